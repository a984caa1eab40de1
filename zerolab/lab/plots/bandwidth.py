"""The time of a step against the bandwidth of the link: from where on does communication hide behind computing?"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, legend, plain
from zerolab.measure.overlap import Phases, knee, one_after_the_other, overlapped
from zerolab.measure.units import in_bytes, in_seconds

OVERLAPPED: Look = {"color": INK, "linewidth": 1.3, "zorder": 2}
SERIAL: Look = {"color": GREY, "linewidth": 1.0, "linestyle": "--", "zorder": 2}
COLOUR = COLOURS["communication"]
MEASURED: Look = {"color": COLOUR, "marker": "o", "markersize": 6.5, "linestyle": "", "zorder": 3}


def link_sweep(
    measured: Mapping[str, Mapping[float, float]], phases: Mapping[str, Phases], title: str, subtitle: str
) -> tuple[Figure, str]:
    """`measured[stage][bytes per second]` in seconds, as dots, beside what `phases[stage]` predicts.

    A panel for each stage, all on one scale. Solid: overlapped; dashed: one after the other; a dotted rule: the knee.
    """
    if not measured or any(not times for times in measured.values()):
        raise ValueError("no measurements to draw")
    knees = {stage: knee(phases[stage]) for stage in measured}
    sentence = _sentence(measured, knees)
    figure = frame(title, subtitle, sentence, (9.0, 4.9))
    speeds = sorted({speed for times in measured.values() for speed in times})
    low, high = 0.8 * speeds[0], 1.25 * speeds[-1]
    smooth = [low * (high / low) ** (k / 120) for k in range(121)]
    highest = max(max(times.values()) for times in measured.values())
    width = 0.89 / len(measured)
    for number, (stage, times) in enumerate(measured.items()):
        axes = figure.add_axes((0.09 + number * width, 0.32, 0.9 * width, 0.4))
        plain(axes, grid="y")
        axes.set_title(stage, fontsize=11, color=INK, loc="left")
        axes.axvline(knees[stage], color=GREY, linewidth=1.0, linestyle=":")
        axes.plot(smooth, [1e3 * overlapped(phases[stage], speed) for speed in smooth], **OVERLAPPED)
        axes.plot(smooth, [1e3 * one_after_the_other(phases[stage], speed) for speed in smooth], **SERIAL)
        axes.plot(list(times), [1e3 * seconds for seconds in times.values()], **MEASURED)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0, 1.12e3 * highest)
        axes.set_xticks(speeds, [f"{speed / 1e6:.3g}" for speed in speeds], fontsize=8.5)
        axes.minorticks_off()
        if number:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("milliseconds a step", color=GREY)
    figure.text(0.53, 0.225, "bandwidth of the link, MB/s", color=GREY, fontsize=10, ha="center")
    handles = [
        Line2D([], [], label="measured", **MEASURED),
        Line2D([], [], label="predicted: overlapped", **OVERLAPPED),
        Line2D([], [], label="one after the other", **SERIAL),
        Line2D([], [], color=GREY, linewidth=1.0, linestyle=":", label="knee"),
    ]
    place: Look = {"loc": "upper center", "bbox_to_anchor": (0.53, 1 - 0.85 / 4.9), "ncols": len(handles)}
    legend(figure, handles, columnspacing=1.4, fontsize=9.5, borderpad=0.0, **place)
    return figure, sentence


def _sentence(measured: Mapping[str, Mapping[float, float]], knees: Mapping[str, float]) -> str:
    slowest, fastest = min(min(times) for times in measured.values()), max(max(times) for times in measured.values())
    ends = ", ".join(
        f"{stage} {in_seconds(times[slowest])} and {in_seconds(times[fastest])}" for stage, times in measured.items()
    )
    lowest, highest = min(knees.values()), max(knees.values())
    where = f"{in_bytes(lowest)}/s"
    if highest > 1.02 * lowest:
        where = f"between {where} and {in_bytes(highest)}/s"
    return f"The predicted knee is at {where}. A step at {in_bytes(slowest)}/s and at {in_bytes(fastest)}/s: {ends}."
