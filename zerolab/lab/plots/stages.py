"""The ladder: four stages with a bar for each rank; at every stage one more colour shrinks."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import zerolab
from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, above, frame, key, legend, many, patches, plain
from zerolab.measure import CATEGORIES

WIDEST = 16  # ranks; with more, the bars would be lines


def ladder(report: dict[str, Any], precision: str = "fp32", learner: bool = False) -> tuple[Figure, str]:
    """The model states that each rank holds at each stage, with ticks where the formula puts them.

    report: what `zerolab demo --json` writes. precision: that run's. learner: whether the learner's code ran; its bars
    are solid, the package's hatched. Megabytes are decimal. Ranks beyond the sixteenth are left out.
    """
    stages, ranks = report["stages"], report["ranks"]
    totals = [sum(result["state_bytes"].values()) / 1e6 for result in stages.values()]
    sentence = _sentence(report, totals)
    millions = f"{report['parameters'] / 1e6:.1f} million parameters"
    subtitle = f"A GPT of {millions} trained with Adam in {precision} on {many(ranks, 'rank')}, a bar for each"
    subtitle += key([learner])
    figure = frame("The ladder: each stage shards one more thing", subtitle, sentence)
    axes = figure.add_axes((0.085, 0.26, 0.885, 0.565))
    plain(axes, grid="y")
    for x, result in enumerate(stages.values()):
        bars = [rank["state_bytes"] for rank in result["ranks"]][:WIDEST]
        step = 0.86 / len(bars)
        for rank, held in enumerate(bars):
            bottom = 0.0
            for category in CATEGORIES:
                height = held[category] / 1e6
                hatch = None if learner else HATCHES[category]
                axes.bar(
                    x - 0.43 + (rank + 0.5) * step,
                    height,
                    0.88 * step,
                    bottom,
                    color=COLOURS[category],
                    edgecolor="white",
                    linewidth=0.4,
                    hatch=hatch,
                    zorder=2,
                )
                bottom += height
        _formula(axes, x, result, max(totals))
        highest = max(sum(held.values()) for held in bars) / 1e6
        above(axes, x, highest, f"{highest:.1f} MB", 15 if "0" in stages else 3, fontsize=13, weight="bold")
        if "0" in stages:
            share = 100 * highest / totals[list(stages).index("0")]
            above(axes, x, highest, f"{share:.0f} %", 3, fontsize=10, color=GREY)
    axes.set_xticks(range(len(stages)), [_stage(stage, ranks, precision) for stage in stages], fontsize=11, color=INK)
    axes.set_xlim(-0.55, len(stages) - 0.45)
    axes.set_ylim(0, 1.16 * max(totals))
    axes.set_ylabel("MB held per rank when backward returns", color=GREY)
    tick = Line2D([], [], color=INK, linewidth=1.4, label="by the formula")
    legend(axes, [*patches(list(reversed(CATEGORIES)), not learner), tick], loc="upper right", labelspacing=0.6)
    return figure, sentence


def _formula(axes: Any, x: float, result: dict[str, Any], highest: float) -> None:
    """Ticks where each category should end by the formula, and the category's size where the bars have room."""
    end = 0.0
    for category in CATEGORIES:
        height = result["formula_bytes"][category] / 1e6
        end += height
        axes.hlines(end, x - 0.45, x + 0.45, color=INK, linewidth=1.4, zorder=4)
        if height > 0.045 * highest:
            box = {"boxstyle": "round,pad=0.16", "facecolor": "white", "edgecolor": "none"}
            size = f"{max(rank['state_bytes'][category] for rank in result['ranks']) / 1e6:.1f}"
            axes.text(x, end - height / 2, size, ha="center", va="center", fontsize=9.5, color=INK, zorder=5, bbox=box)


def _stage(stage: str, ranks: int, precision: str) -> str:
    """The stage, its class, and what it is the first to shard."""
    first = "optimizer state" if precision == "fp32" else "optimizer, masters"
    shares = ("everything in full", f"{first} ÷ {ranks}", f"and gradients ÷ {ranks}", f"and parameters ÷ {ranks}")
    return f"stage {stage}\n{zerolab.STAGES[int(stage)].__name__}\n{shares[int(stage)]}"


def _sentence(report: dict[str, Any], totals: list[float]) -> str:
    off = 0.0
    for result in report["stages"].values():
        for category, formula in result["formula_bytes"].items():
            for rank in result["ranks"]:
                off = max(off, abs(rank["state_bytes"][category] - formula) / formula)
    held = ", ".join(f"{total:.1f} MB in stage {stage}" for stage, total in zip(report["stages"], totals))
    ranks = many(report["ranks"], "rank")
    return f"On {ranks}, each holds {held}; every part is within {max(100 * off, 0.01):.2f} % of the formula."
