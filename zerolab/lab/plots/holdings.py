"""Who holds what: a row for each rank, with the model's flat storage along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

import zerolab
from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, frame, legend, many, patches, plain
from zerolab.measure import CATEGORIES
from zerolab.measure.extents import Holdings

SAID = {"parameters": "the parameters", "gradients": "the gradients", "optimizer": "the optimizer state"}


def who_holds_what(stages: Sequence[Sequence[Holdings]]) -> tuple[Figure, str]:
    """For each stage, a panel with every rank's `measure.holdings`: bands are filled where the rank holds something."""
    ranks, size = len(stages[0]), stages[0][0].size
    sentence = _sentence(stages)
    subtitle = f"{many(ranks, 'rank')}; from left to right the {size:,} elements of the model, laid end to end"
    height = 2.1 + len(stages) * (0.5 + 0.24 * ranks)
    figure = frame("Who holds what when backward returns", subtitle, sentence, (9.0, height))
    room = (height - 2.2) / height
    for number, stage in enumerate(stages):
        panel = room / len(stages)
        bottom = 1.0 / height + room - (number + 1) * panel
        axes = figure.add_axes((0.1, bottom, 0.87, panel - 0.34 / height))
        _panel(axes, stage)
    legend(
        figure,
        patches(list(CATEGORIES)),
        loc="upper right",
        bbox_to_anchor=(0.98, 1 - 0.8 / height),
        ncols=3,
        columnspacing=1.2,
        borderpad=0.0,
    )
    return figure, sentence


def _panel(axes: Any, everyone: Sequence[Holdings]) -> None:
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    size, stage = everyone[0].size, everyone[0].stage
    axes.set_title(f"stage {stage}, {zerolab.STAGES[stage].__name__}", loc="left", fontsize=11, color=INK, pad=4)
    for row, held in enumerate(everyone):
        for band, category in enumerate(CATEGORIES):
            y = row + 0.12 + 0.27 * band
            axes.add_patch(_box(0, size, y, facecolor="white", edgecolor="#c8c8c8", linewidth=0.6))
            for start, end in held.extents[category]:
                look = {"facecolor": COLOURS[category], "hatch": HATCHES[category], "edgecolor": "white"}
                axes.add_patch(_box(start, end, y, linewidth=0, **look))
    axes.vlines([end for _, _, end in everyone[0].units[:-1]], 0, len(everyone), color=GREY, linewidth=0.5, zorder=5)
    axes.set_xlim(0, size)
    axes.set_ylim(len(everyone), 0)
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(len(everyone))], [f"rank {held.rank}" for held in everyone], fontsize=9)


def _box(start: float, end: float, y: float, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, y), end - start, 0.23, **look)


def _sentence(stages: Sequence[Sequence[Holdings]]) -> str:
    """What each stage cuts, compared with the one before."""
    parts = []
    for stage in stages:
        cut = [SAID[c] for c in CATEGORIES if max(held.share(c) for held in stage) < 0.999]
        if not cut:
            parts.append(f"in stage {stage[0].stage} every rank holds everything")
            continue
        share = max(held.share(c) for held in stage for c in CATEGORIES if SAID[c] in cut)
        listed = " and ".join([", ".join(cut[:-1]), cut[-1]] if len(cut) > 1 else cut)
        parts.append(f"in stage {stage[0].stage} a rank holds {100 * share:.0f} % of {listed}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}. The lines mark the {len(stages[0][0].units)} units."
