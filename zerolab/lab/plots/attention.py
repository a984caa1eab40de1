"""Which rank computes which part of causal attention, and how much that is for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import GREY, INK, PALE, Look, frame, many, plain


def attention_map(ways: Mapping[str, Sequence[int]], flop: Mapping[str, Sequence[float]]) -> tuple[Figure, str]:
    """A panel for each placement. ways[name]: the rank that has each chunk of the sequence; flop[name]: of each rank.

    A row for each chunk of queries, a column for each of keys. A square has the number of the rank that computes it:
    the one that has the queries. On the diagonal half of it is hidden; above it there is nothing to see.
    """
    if not ways or ways.keys() != flop.keys():
        raise ValueError("give the placement and the FLOP of the same ways")
    chunks = max(map(len, ways.values()))
    sentence = "; ".join(_of_one(name, flop[name]) for name in ways) + "."
    height = 5.1
    subtitle = (
        f"{many(chunks, 'chunk')}: queries from top to bottom, keys across; in a square: the rank that computes it"
    )
    figure = frame("Causal attention, shared out", subtitle, sentence, (9.0, height))
    width = 0.93 / len(ways)
    for number, (name, owners) in enumerate(ways.items()):
        axes = figure.add_axes((0.05 + width * number, 0.19, 0.56 * width, 0.61))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        for row, owner in enumerate(owners):
            for column in range(len(owners)):
                _square(axes, row, column, owner)
        axes.set_xlim(0, len(owners))
        axes.set_ylim(len(owners), 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(name, loc="left", fontsize=11, color=INK, pad=5)
        _bars(figure, flop[name], 0.05 + width * number + 0.7 * width, 0.25 * width)
    return figure, sentence


def _square(axes: Any, row: int, column: int, owner: int) -> None:
    if column > row:
        axes.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, facecolor="white", edgecolor=PALE))
        return
    look: Look = {"facecolor": RANKS[owner % len(RANKS)], "edgecolor": INK, "linewidth": 0.7}
    axes.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, **look))
    place: Look = {"ha": "center", "va": "center", "fontsize": 9.5, "color": INK}
    axes.text(column + 0.5, row + 0.5, str(owner), **place)


def _bars(figure: Figure, flop: Sequence[float], left: float, width: float) -> None:
    axes = figure.add_axes((left, 0.19, width, 0.61))
    plain(axes)
    mean = sum(flop) / len(flop)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for rank, amount in enumerate(flop):
        look: Look = {"color": RANKS[rank % len(RANKS)], "edgecolor": INK, "linewidth": 0.7}
        axes.barh(rank, amount / mean, 0.6, **look)
        place: Look = {"va": "center", "fontsize": 9.5, "color": INK, "zorder": 5, "bbox": box}
        axes.text(amount / mean + 0.08, rank, f"{amount / mean:.2f}", **place)
    axes.axvline(1.0, color=INK, linewidth=1.2, linestyle="--", zorder=4)
    axes.set_yticks(range(len(flop)), [f"rank {rank}" for rank in range(len(flop))], fontsize=9.5)
    axes.set_xticks([])
    axes.set_xlim(0, 2.2)
    axes.invert_yaxis()
    axes.set_title("FLOP / mean", loc="left", fontsize=9.5, color=GREY, pad=5)


def _of_one(name: str, flop: Sequence[float]) -> str:
    mean = sum(flop) / len(flop)
    busiest = max(range(len(flop)), key=lambda rank: flop[rank])
    if max(flop) - min(flop) < 1e-9 * mean:
        return f"{name}: all ranks compute the same"
    times = f"{max(flop) / mean:.2f} times the mean, and {max(flop) / min(flop):.3g} times the least"
    return f"{name}: rank {busiest} computes {times}"
