"""The pictures of the course. Each takes what was measured, and returns the figure and one sentence: what to see."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import zerolab
from zerolab.measure import CATEGORIES

# The same thing has the same colour in the whole course (the palette of Okabe and Ito, which the colour-blind can
# tell apart), and a hatch, so that nothing is said by colour alone.
COLOURS = {
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "communication": "#D55E00",
}
HATCHES = {"parameters": "//", "gradients": "..", "optimizer": "\\\\", "activations": "xx", "communication": "--"}
LABELS = {"optimizer": "optimizer state"}  # where the category's own name is not what people say

INK, GREY = "#1a1a1a", "#5f5f5f"


def ladder(report: dict[str, Any], precision: str = "fp32") -> tuple[Figure, str]:
    """The ladder: for each stage a bar of the model states that a rank holds, and ticks where the formula says.

    report: what `zerolab demo --json` writes; `precision`: of that run. Megabytes are decimal.
    """
    stages, ranks = report["stages"], report["ranks"]
    totals = [sum(result["state_bytes"].values()) / 1e6 for result in stages.values()]
    figure = Figure(figsize=(9.0, 6.0), facecolor="white")
    axes = figure.add_axes((0.085, 0.255, 0.885, 0.57))
    for x, result in enumerate(stages.values()):
        bottom = formula = 0.0
        for category in CATEGORIES:
            height = result["state_bytes"][category] / 1e6
            _block(axes, x, bottom, height, category, max(totals))
            bottom += height
            formula += result["formula_bytes"][category] / 1e6
            axes.hlines(formula, x - 0.42, x + 0.42, color=INK, linewidth=1.4, zorder=4)
        _above(axes, x, bottom, f"{bottom:.1f} MB", 15 if "0" in stages else 3, INK, 13, "bold")
        if "0" in stages:
            _above(axes, x, bottom, f"{100 * bottom / totals[list(stages).index('0')]:.0f} %", 3, GREY, 10)
    axes.set_xticks(range(len(stages)), [_stage(stage, ranks, precision) for stage in stages], fontsize=11, color=INK)
    axes.set_xlim(-0.55, len(stages) - 0.45)
    axes.set_ylim(0, 1.16 * max(totals))
    axes.set_ylabel("MB held per rank when backward returns", color=GREY)
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="y", colors=GREY)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.yaxis.grid(True, color="#e6e6e6")
    axes.set_axisbelow(True)
    _legend(axes)

    millions = f"{report['parameters'] / 1e6:.1f} million parameters"
    many = f"{ranks} rank{'s' * (ranks > 1)}"
    figure.text(0.03, 0.93, "The ladder: each stage shares out one thing more", fontsize=18, weight="bold", color=INK)
    figure.text(
        0.03, 0.875, f"A GPT of {millions} trained with Adam in {precision} on {many}", fontsize=11.5, color=GREY
    )
    sentence = _ladder_sentence(report, totals, many)
    figure.text(0.03, 0.095, textwrap.fill(sentence, 112), fontsize=11, color=INK, va="top", linespacing=1.45)
    return figure, sentence


def _block(axes: Any, x: float, bottom: float, height: float, category: str, highest: float) -> None:
    """One part of a bar, with its size on it where there is room for a number."""
    axes.bar(x, height, 0.66, bottom, color=COLOURS[category], edgecolor="white", hatch=HATCHES[category], zorder=2)
    if height > 0.045 * highest:
        box = {"boxstyle": "round,pad=0.16", "facecolor": "white", "edgecolor": "none"}
        middle = (x, bottom + height / 2)
        axes.text(*middle, f"{height:.1f}", ha="center", va="center", fontsize=9.5, color=INK, zorder=5, bbox=box)


def _legend(axes: Any) -> None:
    """The categories from top to bottom as they are stacked, then the ticks."""
    handles: list[Any] = [
        Patch(facecolor=COLOURS[name], edgecolor="white", hatch=HATCHES[name], label=LABELS.get(name, name))
        for name in reversed(CATEGORIES)
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.4, label="by the formula"))
    axes.legend(
        handles=handles,
        loc="upper right",
        fontsize=11,
        frameon=True,
        facecolor="white",
        edgecolor="none",
        framealpha=1.0,
        handlelength=2.2,
        handleheight=1.3,
        labelspacing=0.6,
    )


def _above(axes: Any, x: float, y: float, text: str, points: float, colour: str, size: float, weight: str = "normal"):
    """Text so many points above (x, y), on white, so that no line of the grid runs through it."""
    axes.annotate(
        text,
        (x, y),
        (0, points),
        textcoords="offset points",
        ha="center",
        color=colour,
        fontsize=size,
        weight=weight,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        zorder=3,
    )


def _stage(stage: str, ranks: int, precision: str) -> str:
    """The stage, its class, and what it is the first to divide among the ranks."""
    first = "optimizer state" if precision == "fp32" else "optimizer, masters"
    shares = ("everything whole", f"{first} ÷ {ranks}", f"and gradients ÷ {ranks}", f"and parameters ÷ {ranks}")
    return f"stage {stage}\n{zerolab.STAGES[int(stage)].__name__}\n{shares[int(stage)]}"


def _ladder_sentence(report: dict[str, Any], totals: list[float], many: str) -> str:
    off = 0.0
    for result in report["stages"].values():
        for category, formula in result["formula_bytes"].items():
            off = max(off, abs(result["state_bytes"][category] - formula) / formula)
    held = ", ".join(f"{total:.1f} MB in stage {stage}" for stage, total in zip(report["stages"], totals))
    return f"On {many}, each holds {held}; every part is within {max(100 * off, 0.01):.2f} % of the formula."
