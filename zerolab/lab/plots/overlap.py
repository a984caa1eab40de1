"""The Gantt chart of a step: what each rank computed, and which collectives were running meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerolab.lab.plots.style import COLOURS, GREY, Look, frame, legend, many, plain
from zerolab.measure.spans import Trace, intersection, length, union
from zerolab.measure.units import in_seconds

PHASES = {"forward": ("#d4d4d4", ""), "backward": ("#8a8a8a", ""), "step": ("#d4d4d4", "////")}
OPS = {"reduce_scatter": "", "all_gather": "////", "all_reduce": "xxxx", "broadcast": "...."}
WAIT = "#1a1a1a"


def gantt(traces: Trace | Sequence[Trace]) -> tuple[Figure, str]:
    """Every rank's `measure.trace` of the same step, on one clock: above what the rank computes, below what it sends.
    One trace is drawn alone.

    Control messages are left out. A black bar below is a wait: the rank stands still for a collective. The score is the
    mean of the ranks' `overlap`.
    """
    if isinstance(traces, Trace):
        traces = [traces]
    if not traces:
        raise ValueError("no trace to draw")
    begin = min(start for trace in traces for start, _ in _moments(trace))
    sentence = _sentence(traces)
    height = 2.3 + 0.72 * len(traces)
    known = [trace.overlap for trace in traces if trace.overlap is not None]
    score = (
        f"overlap {mean(known):.2f} (0: all stand still, 1: all compute)" if known else "only the device knows waits"
    )
    subtitle = f"{many(len(traces), 'rank')}, one step; {score}"
    figure = frame("Who computes, and what travels meanwhile", subtitle, sentence, (9.0, height))
    axes = figure.add_axes((0.08, 1.28 / height, 0.89, (height - 2.5) / height))
    plain(axes, grid="x")
    for row, trace in enumerate(traces):
        for span in trace.spans:
            colour, hatch = PHASES[span.phase]
            _bar(axes, begin, span.start, span.end, row + 0.08, 0.42, facecolor=colour, hatch=hatch, edgecolor="white")
        for call in trace.calls:
            if not call.control and call.end is not None:
                look: Look = {
                    "facecolor": COLOURS["communication"],
                    "hatch": OPS.get(call.op, ""),
                    "edgecolor": "white",
                }
                _bar(axes, begin, call.start, call.end, row + 0.52, 0.22, **look)
        for start, end in trace.waits:
            _bar(axes, begin, start, end, row + 0.77, 0.12, facecolor=WAIT, edgecolor="none")
    axes.set_ylim(len(traces), 0)
    axes.set_yticks([row + 0.45 for row in range(len(traces))], [f"rank {trace.rank}" for trace in traces], fontsize=10)
    axes.autoscale(axis="x", tight=True)
    axes.set_xlim(0, None)
    axes.set_xlabel("milliseconds", color=GREY, fontsize=9.5)
    _legend(figure, traces, height)
    return figure, sentence


def _bar(axes: Any, begin: float, start: float, end: float, y: float, height: float, **look: Any) -> None:
    axes.broken_barh([(1000 * (start - begin), 1000 * (end - start))], (y, height), linewidth=0.4, **look)


def _legend(figure: Figure, traces: Sequence[Trace], height: float) -> None:
    ops = {call.op for trace in traces for call in trace.calls if not call.control}
    handles = [Patch(facecolor=c, hatch=h, edgecolor=GREY, label=phase) for phase, (c, h) in PHASES.items()]
    for op in sorted(ops):
        look: Look = {"facecolor": COLOURS["communication"], "hatch": OPS.get(op, ""), "edgecolor": "white"}
        handles.append(Patch(label=op.replace("_", "-"), **look))
    handles.append(Patch(facecolor=WAIT, label="stands still"))
    place = {"loc": "upper center", "bbox_to_anchor": (0.52, 1 - 0.85 / height), "ncols": len(handles)}
    legend(figure, handles, columnspacing=1.2, fontsize=9.5, borderpad=0.0, **place)


def _moments(trace: Trace) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in trace.spans] + [(call.start, call.start) for call in trace.calls]


def _sentence(traces: Sequence[Trace]) -> str:
    """How much of backward's collective time passes while the ranks keep computing."""
    if all(trace.overlap is None for trace in traces):
        return "When the collectives ended only the device knows: a profile of it shows what they overlapped with."
    still, total = 0.0, 0.0
    for trace in traces:
        calls = [call for call in trace.calls if call.phase == "backward" and not call.control and call.end is not None]
        under_way = union((call.start, call.end) for call in calls)
        still += length(intersection(under_way, trace.waits))
        total += length(under_way)
    waits = in_seconds(mean(length(trace.waits) for trace in traces))
    share = f"{100 * (1 - still / total):.0f} % of" if total else "none of"
    return (
        f"{share} the time of backward's collectives passed while the ranks kept computing; over the whole step, a "
        f"rank stood still for {waits}."
    ).capitalize()
