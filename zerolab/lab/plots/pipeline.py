"""What each stage of a pipeline did when, from recorded runs: forwards, backwards, and the bubble between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerolab.lab.plots.overlap import PHASES
from zerolab.lab.plots.style import GREY, INK, Look, frame, legend, plain
from zerolab.measure.spans import Trace, length

STEPS = {phase: PHASES[phase] for phase in ("forward", "backward")} | {"weights": ("#f4f4f4", "////")}


def bubble(traces: Sequence[Trace]) -> float:
    """Of the time from the first span to the last, the fraction in which a rank does not compute; the ranks' mean."""
    begin = min(span.start for trace in traces for span in trace.spans)
    end = max(span.end for trace in traces for span in trace.spans)
    busy = sum(length([(span.start, span.end) for span in trace.spans]) for trace in traces)
    return 1.0 - busy / (len(traces) * (end - begin))


def in_flight(trace: Trace) -> int:
    """The most micro-batches that had begun, and of which something was left to do or under way."""
    ends = {span.unit: number for number, span in enumerate(trace.spans)}
    now = most = 0
    for number, span in enumerate(trace.spans):
        now += span.phase == "forward"
        most = max(most, now)
        now -= ends[span.unit] == number
    return most


def pipeline_runs(runs: Mapping[str, Sequence[Trace]], note: str = "") -> tuple[Figure, str]:
    """A panel for each run, with a row for each stage; the number in a box is its micro-batch. All on one scale.

    runs: name -> the traces of `lab.Pipeline` of all ranks. White is the bubble: the stage stands still. note: what
    the subtitle adds, for example that the computing is emulated.
    """
    if not runs or not all(runs.values()):
        raise ValueError("no run to draw")
    stages = max(len(traces) for traces in runs.values())
    panel = 0.62 + 0.36 * stages
    height = 1.95 + panel * len(runs)
    sentence = _sentence(runs)
    subtitle = f"{stages} stages, one step; the order is recorded on live ranks; a number is a micro-batch"
    subtitle += f" · {note}" * bool(note)
    figure = frame("Who computes which micro-batch when", subtitle, sentence, (9.0, height))
    longest = max(_end(traces) - _begin(traces) for traces in runs.values())
    for number, (name, traces) in enumerate(runs.items()):
        bottom = 0.95 + panel * (len(runs) - 1 - number)
        axes = figure.add_axes((0.09, (bottom + 0.05) / height, 0.88, 0.36 * stages / height))
        plain(axes)
        axes.set_title(
            f"{name}: {bubble(traces):.0%} of the time is bubble", loc="left", fontsize=10.5, color=INK, pad=4
        )
        for row, trace in enumerate(traces):
            for span in trace.spans:
                _box(axes, row, 1000 * (span.start - _begin(traces)), 1000 * (span.end - span.start), span, longest)
        axes.set_xlim(0, 1000 * longest)
        axes.set_ylim(len(traces), 0)
        axes.set_yticks([row + 0.5 for row in range(len(traces))], [f"rank {t.rank}" for t in traces], fontsize=9.5)
        if number == len(runs) - 1:
            axes.set_xlabel("milliseconds", color=GREY, fontsize=9.5)
        else:
            axes.set_xticklabels([])
    seen = {span.phase for traces in runs.values() for trace in traces for span in trace.spans}
    handles = [Patch(facecolor=c, hatch=h, edgecolor=GREY, label=p) for p, (c, h) in STEPS.items() if p in seen]
    handles.append(Patch(facecolor="white", edgecolor=GREY, label="bubble: stands still"))
    place: Look = {"loc": "upper center", "bbox_to_anchor": (0.52, 1 - 0.85 / height), "ncols": 4}
    legend(figure, handles, fontsize=9.5, borderpad=0.0, **place)
    return figure, sentence


def _box(axes: Any, row: int, start: float, width: float, span: Any, longest: float) -> None:
    colour, hatch = STEPS[span.phase]
    edge = GREY if hatch else "white"  # which is also the colour of the hatching
    look: Look = {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.8}
    axes.broken_barh([(start, width)], (row + 0.06, 0.88), **look)
    if width > 12 * longest:  # milliseconds against seconds: wide enough for a number
        look = {"color": "white"} if span.phase == "backward" else {"color": INK}
        if hatch:
            look["bbox"] = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
        axes.text(start + width / 2, row + 0.5, span.unit, ha="center", va="center", fontsize=8.5, **look)


def _begin(traces: Sequence[Trace]) -> float:
    return min(span.start for trace in traces for span in trace.spans)


def _end(traces: Sequence[Trace]) -> float:
    return max(span.end for trace in traces for span in trace.spans)


def _sentence(runs: Mapping[str, Sequence[Trace]]) -> str:
    said = []
    for name, traces in runs.items():
        most = max(in_flight(trace) for trace in traces)
        batches = f"{most} micro-batch{'es' * (most > 1)}"
        said.append(f"{name}: a stage stands still for {bubble(traces):.0%} of the time and keeps at most {batches}")
    return "; ".join(said) + "."
