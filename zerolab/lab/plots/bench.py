"""How long a step takes, every stage beside its peer, with the floor below both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerolab.lab.plots.style import GREY, INK, above, frame, legend, many, plain

OURS, PEER, FLOOR = "#0072B2", "#BBBBBB", "#1a1a1a"


def step_times(reports: Sequence[dict[str, Any]]) -> tuple[Figure, str]:
    """reports: of `zerolab bench`, one for each precision, of equal numbers of ranks."""
    ranks = reports[0]["ranks"]
    sentence = _sentence(reports)
    subtitle = f"{many(ranks, 'rank')}, seconds of a step: the median of {reports[0]['rounds']} rounds, in turn"
    figure = frame("Every stage beside its peer", subtitle, sentence, (9.0, 5.2))
    width = 0.92 / len(reports)
    for number, report in enumerate(reports):
        axes = figure.add_axes((0.07 + number * width, 0.32, width - 0.05, 0.42))
        _panel(axes, report)
    handles = [Patch(facecolor=OURS, hatch="//", edgecolor="white", label="this package")]
    handles += [Patch(facecolor=PEER, edgecolor="white", label="the peer")]
    handles += [Patch(facecolor=FLOOR, label="the floor: no communication")]
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.5, 0.86), ncols=3, borderpad=0.0, fontsize=10)
    return figure, sentence


def _panel(axes: Any, report: dict[str, Any]) -> None:
    plain(axes, grid="y")
    seconds = report["step_seconds"]
    floor = seconds["no communication"]
    for x, pair in enumerate(report["pairs"]):
        axes.bar(x - 0.19, seconds[pair["ours"]], 0.36, color=OURS, hatch="//", edgecolor="white", zorder=2)
        axes.bar(x + 0.19, seconds[pair["peer"]], 0.36, color=PEER, edgecolor="white", zorder=2)
        highest = max(seconds[pair["ours"]], seconds[pair["peer"]])
        above(axes, x, highest, f"{pair['wall_ratio']:.2f}", 3, fontsize=11, weight="bold")
    axes.axhline(floor, color=FLOOR, linewidth=1.2, zorder=4)
    short = {"ZeroRedundancyOptimizer": "ZeroRedund.\nOptimizer", "FSDP2 reshard": "FSDP2\nreshard"}
    names = [f"{pair['ours']}\n{short.get(pair['peer'], pair['peer'])}" for pair in report["pairs"]]
    axes.set_xticks(range(len(names)), names, fontsize=9, color=INK)
    axes.set_ylim(0, 1.18 * max(seconds.values()))
    axes.set_title(report["precision"], loc="left", fontsize=11, color=INK)
    axes.set_ylabel("seconds", color=GREY, fontsize=9)


def _sentence(reports: Sequence[dict[str, Any]]) -> str:
    parts = []
    for report in reports:
        ratios = ", ".join(f"{pair['ours']} {pair['wall_ratio']:.2f} of {pair['peer']}" for pair in report["pairs"])
        parts.append(f"{report['precision']}: {ratios}")
    return f"A step takes, in {'; in '.join(parts)}."
