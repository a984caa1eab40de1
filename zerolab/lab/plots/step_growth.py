"""How a step grows: the engine's own time with units, a real step's with units and parameters, and bytes with ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerolab.lab.plots.style import GREY, INK, Look, frame, legend, plain

# One look per stage: a colour, a marker and a line style.
LOOKS: tuple[Look, ...] = (
    {"color": "#1a1a1a", "marker": "s", "linestyle": "-"},
    {"color": "#56B4E9", "marker": "^", "linestyle": "--"},
    {"color": "#009E73", "marker": "o", "linestyle": "-."},
    {"color": "#D55E00", "marker": "D", "linestyle": ":"},
)
NAMES = ("DDP", "Zero1", "Zero2", "Zero3")
Rows = list[dict[str, Any]]


def scaling(report: dict[str, Any]) -> tuple[Figure, str]:
    """report: what `zerolab scaling --json` writes."""
    sentence = _sentence(report)
    figure = frame("How a step grows", "the engine's own time, a step's on real ranks, and bytes", sentence, (9.0, 8.4))
    left, right, low, high, size = 0.09, 0.58, 0.20, 0.56, (0.38, 0.24)
    links = [row for row in report["engine"] if row["kind"] == "link"]
    points = [
        {"stage": row["stage"], "units": n, "ms": 1e3 * (forward + backward)}
        for row in links
        for n, forward, backward in zip(row["units"], row["forward"], row["backward"])
    ]
    axes = _axes(figure, (left, high, *size), "The engine's own ms: forward and backward", "units of one layer")
    _lines(axes, points, "units", lambda row: row["ms"])
    few = report["units"][0]["ranks"]
    for place, key in (((right, high), "units"), ((left, low), "parameters")):
        rows = report[key]
        axes = _axes(figure, (*place, *size), f"ms of a step on {few} ranks, by {key}", f"{key} (grey: plain)")
        _lines(axes, rows, key, lambda row: 1e3 * row["seconds"])
        plainly = [row for row in rows if row["stage"] == 0]
        axes.plot([row[key] for row in plainly], [1e3 * row["floor"] for row in plainly], color=GREY, linewidth=1)
        axes.set(xscale="log", yscale="log")
    axes = _axes(figure, (right, low, *size), "kB that a rank sends in a step", "ranks (large: real, small: simulated)")
    _lines(axes, report["simulated"], "ranks", lambda row: row["sent"] / 1e3, markersize=3)
    _lines(axes, report["ranks"], "ranks", lambda row: row["sent"] / 1e3, markersize=7, linewidth=0)
    axes.set(xscale="log")
    handles = [Line2D([], [], label=name, **look) for name, look in zip(NAMES, LOOKS)]
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.5, 0.90), ncols=4, borderpad=0.0)
    return figure, sentence


def _axes(figure: Figure, place: tuple[float, float, float, float], title: str, x: str) -> Any:
    axes = figure.add_axes(place)
    plain(axes, grid="y")
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, color=GREY, fontsize=9)
    return axes


def _lines(axes: Any, rows: Rows, x: str, y: Callable[[dict[str, Any]], float], **keywords: Any) -> None:
    for stage, look in enumerate(LOOKS):
        mine = [row for row in rows if row["stage"] == stage]
        axes.plot(
            [row[x] for row in mine],
            [y(row) for row in mine],
            **({"markersize": 5, "linewidth": 1.4} | look | keywords),
        )


def _sentence(report: dict[str, Any]) -> str:
    def most(kind: str, part: str) -> str:
        return f"{1e6 * max(row['per_unit'][part] for row in report['engine'] if row['kind'] == kind):.0f}"

    ratios = [ratio for row in report["engine"] for ratio in row["linear"].values()]
    largest = max(row["ranks"] for row in report["simulated"])
    sent = {row["stage"]: row["sent"] / 1e3 for row in report["simulated"] if row["ranks"] == largest}
    return (
        f"The engine adds at most {most('link', 'forward')} µs to a small unit's forward and "
        f"{most('link', 'backward')} µs to its backward; for a transformer block, with its 12 parameters, "
        f"{most('block', 'forward')} and {most('block', 'backward')} µs. "
        f"With more units, each costs {min(ratios):.2f} to {max(ratios):.2f} times as much. "
        f"On {largest:,} ranks, each sends {sent[0]:.0f} kB per step in stage 0 and {sent[3]:.0f} kB in stage 3."
    )
