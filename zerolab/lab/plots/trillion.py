"""To a trillion: how many GPUs it takes until a model's states fit, on two logarithmic scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import zerolab
from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, legend, plain
from zerolab.measure.formulas import state_bytes
from zerolab.measure.paper import BF16, PARAMETERS

GPUS = (24, 80, 141)  # common sizes of memory, in GB
LINES: dict[int, Look] = {
    0: {"color": INK, "linestyle": ":"},
    1: {"color": COLOURS["optimizer"], "linestyle": "-."},
    2: {"color": "#B37400", "linestyle": "--"},
    3: {"color": COLOURS["gathered parameters"], "linestyle": "-"},
}


def to_a_trillion(cells: Sequence[dict[str, Any]]) -> tuple[Figure, str]:
    """A panel for each model: lines for the formula, circles for the paper's values, dots for the engine's.

    cells: what `zerolab simulate --table1 --json` writes under "cells" (bf16 with Adam; model states in decimal GB).
    """
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    if not models:
        raise ValueError("no cells to draw")
    sentence = _sentence(cells, models[-1])
    subtitle = "Model states per GPU in mixed precision with Adam; activations come on top"
    figure = frame("To a trillion parameters", subtitle, sentence, (9.0, 6.2))
    width = 0.87 / len(models)
    for number, model in enumerate(models):
        axes = figure.add_axes((0.08 + number * width, 0.22, width - 0.025, 0.54))
        _panel(axes, model, [cell for cell in cells if cell["model"] == model])
        if number == len(models) - 1:
            for size in GPUS:
                place: Look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                axes.annotate(f"{size} GB", (1, size), (4, 0), va="center", fontsize=8.5, color=GREY, **place)
        if number:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("GB per GPU", color=GREY)
    names = [zerolab.STAGES[stage].__name__ for stage in LINES]
    handles: list[Any] = [Line2D([], [], label=f"{stage} {names[stage]}", **look) for stage, look in LINES.items()]
    circle: Look = {"linestyle": "", "marker": "o", "color": INK}
    handles.append(Line2D([], [], label="the paper", markerfacecolor="white", markersize=7, **circle))
    handles.append(Line2D([], [], label="this engine", markersize=3.5, **circle))
    legend_place: Look = {"loc": "upper center", "bbox_to_anchor": (0.52, 0.872), "ncols": len(handles)}
    legend(figure, handles, columnspacing=1.0, fontsize=9.5, borderpad=0.0, **legend_place)
    return figure, sentence


def _panel(axes: Any, model: str, cells: Sequence[dict[str, Any]]) -> None:
    plain(axes)
    ranks = sorted({cell["ranks"] for cell in cells})
    for stage, look in LINES.items():
        held = [sum(state_bytes(stage, n, int(PARAMETERS[model]), BF16).values()) / 1e9 for n in ranks]
        axes.plot(ranks, held, linewidth=1.6, **look)
    for cell in cells:
        colour = LINES[cell["stage"]]["color"]
        axes.plot(cell["ranks"], cell["paper_gb"], "o", color=colour, markerfacecolor="white", markersize=7, zorder=3)
        axes.plot(cell["ranks"], cell["engine_gb"], "o", color=colour, markersize=3.5, zorder=4)
    for size in GPUS:
        axes.axhline(size, color="#a0a0a0", linewidth=0.8, zorder=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.08, 4e4)
    axes.set_xticks(ranks, [str(n) for n in ranks], fontsize=8.5)
    axes.minorticks_off()
    axes.set_xlabel("GPUs", color=GREY, fontsize=9.5)
    axes.set_title(model, loc="left", fontsize=12, color=INK)


def _sentence(cells: Sequence[dict[str, Any]], model: str) -> str:
    """What a rank holds of the largest model on the most GPUs, measured on the engine."""
    most = max(cell["ranks"] for cell in cells if cell["model"] == model)
    last = {c["stage"]: c["engine_gb"] for c in cells if c["model"] == model and c["ranks"] == most}
    held = ", ".join(f"{float(f'{gb:.3g}'):,g} GB in stage {stage}" for stage, gb in sorted(last.items()))
    return f"On {most:,} GPUs, a rank of a {model} model holds {held}: only stage 3 keeps falling as GPUs are added."
