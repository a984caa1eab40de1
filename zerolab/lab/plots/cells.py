"""What a collective does: each rank's tensor before and after, as rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.style import INK, PALE, Look, frame, many, plain

# One pale colour for each rank's values; sums are white. The numbers say the same.
RANKS = ("#CDE7F7", "#F9E2B8", "#BFE6DA", "#EBD3E1", "#F5CDB3", "#DDDDDD", "#F8F3B0", "#C6D3F0")

Rows = Sequence[Sequence[float]]


def before_after(name: str, before: Rows, after: Rows) -> tuple[Figure, str]:
    """`before[rank]`, `after[rank]`: the elements that each rank holds (none: an empty row). name: the collective's.

    A number has the colour of the rank that held it before, so the ranks should hold different numbers.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"{len(before)} rows before and {len(after)} after: give one for each rank, both times")
    ranks = len(before)
    owner = {value: rank for rank, row in enumerate(before) for value in row}
    widest = max(len(row) for row in (*before, *after))
    sentence = _sentence(name, before, after, owner)
    figure = frame(name, many(ranks, "rank"), sentence, (9.0, 1.85 + 0.38 * ranks))
    bottom, height = 0.65 / (1.85 + 0.38 * ranks), 0.38 * ranks / (1.85 + 0.38 * ranks)
    for number, (title, rows) in enumerate((("before", before), ("after", after))):
        axes = figure.add_axes((0.09 + 0.475 * number, bottom, 0.41, height))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        for rank, row in enumerate(rows):
            if not row:
                axes.text(0.05, rank + 0.5, "nothing", va="center", fontsize=9, color="#8a8a8a")
            for place, value in enumerate(row):
                _cell(axes, place, rank, value, owner)
        axes.set_xlim(0, widest)
        axes.set_ylim(ranks, 0)
        axes.set_xticks([])
        axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=9.5)
        axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=5)
        if number:
            axes.set_yticklabels([])
    return figure, sentence


def _cell(axes: Any, place: int, rank: int, value: float, owner: dict[float, int]) -> None:
    colour = RANKS[owner[value] % len(RANKS)] if value in owner else "white"
    edge: Look = {"edgecolor": INK if value not in owner else PALE, "linewidth": 0.9}
    axes.add_patch(Rectangle((place + 0.02, rank + 0.08), 0.96, 0.84, facecolor=colour, **edge))
    axes.text(place + 0.5, rank + 0.5, f"{value:g}", ha="center", va="center", fontsize=10, color=INK)


def _sentence(name: str, before: Rows, after: Rows, owner: dict[float, int]) -> str:
    """Counts what arrived where."""
    held = f"{sum(map(len, before))} numbers on {many(len(before), 'rank')} became {sum(map(len, after))}"
    mixed = sum(value not in owner for row in after for value in row)
    if mixed:
        made = "each" if mixed == sum(map(len, after)) else f"{mixed} of them"
        return f"{name}: {held}; {made} made from several ranks' numbers."
    came = [sum(owner[value] != rank for value in row) for rank, row in enumerate(after)]
    return f"{name}: {held}; no rank received more than {max(came)} that it did not have."
