"""The time of a step against the bandwidth of the link: from where on does communication hide behind computing?"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, legend, plain
from zerolab.measure.units import in_bytes, in_seconds


class Phase(NamedTuple):
    """What one phase of a step computes and sends: `seconds` with nothing to wait for, and `sent` bytes."""

    seconds: float
    sent: float


Phases = Mapping[str, Phase]  # by name: "forward", "backward"


def overlapped(phases: Phases, bandwidth: float) -> float:
    """Seconds of a step that waits only for what a phase sends beyond what fits into its computing."""
    return sum(max(phase.seconds, phase.sent / bandwidth) for phase in phases.values())


def one_after_the_other(phases: Phases, bandwidth: float) -> float:
    """Seconds of a step that never computes and sends at the same time."""
    return sum(phase.seconds + phase.sent / bandwidth for phase in phases.values())


def knee(phases: Phases) -> float:
    """The bandwidth, in bytes per second, from which on every phase can hide what it sends."""
    return max(phase.sent / phase.seconds for phase in phases.values())


def link_sweep(
    measured: Mapping[str, Mapping[float, float]], phases: Mapping[str, Phases], title: str, subtitle: str
) -> tuple[Figure, str]:
    """`measured[stage][bytes per second]` in seconds, as dots, beside what `phases[stage]` predicts.

    Solid: overlapped; dashed: one after the other. A dotted rule marks each knee. The last stage is drawn in colour.
    """
    if not measured or any(not times for times in measured.values()):
        raise ValueError("no measurements to draw")
    knees = {stage: knee(phases[stage]) for stage in measured}
    sentence = _sentence(measured, knees)
    figure = frame(title, subtitle, sentence, (9.0, 5.4))
    axes = figure.add_axes((0.09, 0.27, 0.88, 0.49))
    plain(axes, grid="y")
    speeds = sorted({speed for times in measured.values() for speed in times})
    low, high = 0.85 * speeds[0], 1.2 * speeds[-1]
    smooth = [low * (high / low) ** (k / 120) for k in range(121)]
    handles = []
    for (stage, times), marker in zip(measured.items(), cycle("osD^")):
        colour = COLOURS["communication"] if stage == list(measured)[-1] else INK
        look: Look = {"color": colour, "linewidth": 1.2, "zorder": 2}
        axes.plot(smooth, [1e3 * overlapped(phases[stage], speed) for speed in smooth], **look)
        serial = [1e3 * one_after_the_other(phases[stage], speed) for speed in smooth]
        axes.plot(smooth, serial, linestyle="--", **(look | {"linewidth": 0.8}))
        axes.axvline(knees[stage], color=colour, linewidth=0.8, linestyle=":")
        filled = colour if stage == list(measured)[-1] else "white"
        dots: Look = {"markerfacecolor": filled, "markeredgecolor": colour, "markersize": 7, "linestyle": ""}
        axes.plot(list(times), [1e3 * seconds for seconds in times.values()], marker, zorder=3, **dots)
        handles.append(Line2D([], [], marker=marker, label=stage, **dots))
    handles.append(Line2D([], [], color=GREY, linewidth=1.2, label="predicted: overlapped"))
    handles.append(Line2D([], [], color=GREY, linewidth=0.8, linestyle="--", label="one after the other"))
    handles.append(Line2D([], [], color=GREY, linewidth=0.8, linestyle=":", label="knee"))
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.12e3 * max(max(times.values()) for times in measured.values()))
    axes.set_xticks(speeds, [f"{in_bytes(speed)}/s" for speed in speeds], fontsize=9)
    axes.minorticks_off()
    axes.set_ylabel("milliseconds a step", color=GREY)
    axes.set_xlabel("bandwidth of the link", color=GREY)
    place: Look = {"loc": "upper center", "bbox_to_anchor": (0.53, 1 - 0.85 / 5.4), "ncols": len(handles)}
    legend(figure, handles, columnspacing=1.0, fontsize=9, borderpad=0.0, handletextpad=0.4, **place)
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
