"""Ring against root: how contributions travel round a ring, and how much the busiest rank sends and receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, many, plain
from zerolab.measure.units import in_bytes

History = Sequence[Sequence[Sequence[int]]]


def ring_against_root(history: History, traffic: Mapping[int, tuple[float, float]]) -> tuple[Figure, str]:
    """Rows are ranks, columns are rounds; a chunk shows whose contributions it sums. Beside it, the busiest rank.

    history: `history[round][rank][chunk]`, an integer whose bit r says that rank r's contribution is in the chunk. To
    get it, let rank r begin with 2**r in every element, and note what each rank holds before the first round and after
    every round. traffic: {ranks: (bytes with a root, bytes in a ring)}, sent and received by the busiest rank.
    """
    ranks = len(history[0])
    if not traffic:
        raise ValueError("no traffic: give {number of ranks: (bytes with a root, bytes in a ring)}")
    sentence = _sentence(traffic)
    height = 2.5 + 0.75 * ranks
    subtitle = f"A reduction among {many(ranks, 'rank')}; the letters in a chunk say whose parts it sums"
    figure = frame("Ring against root", subtitle, sentence, (9.0, height))
    area = (0.07, 1.15 / height, 0.55, (height - 2.3) / height)
    _rounds(figure.add_axes(area), history)
    _busiest(figure.add_axes((0.72, area[1], 0.25, area[3])), traffic)
    return figure, sentence


def _rounds(axes: Any, history: History) -> None:
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    ranks = len(history[0])
    chunks = len(history[0][0])
    full = 2**ranks - 1
    width = 0.84 / chunks
    for column, held in enumerate(history):
        for rank, values in enumerate(held):
            for chunk, value in enumerate(values):
                parts = [r for r in range(ranks) if value >> r & 1]
                done = value == full
                colour = COLOURS["gradients"] if done else "#ffffff" if not parts else _tint(len(parts) / ranks)
                place = (column + chunk * width, rank + 0.12)
                look: Look = {"edgecolor": INK if done else "#9a9a9a", "linewidth": 1.3 if done else 0.6}
                axes.add_patch(Rectangle(place, width * 0.94, 0.72, facecolor=colour, **look))
                text = "\n".join("ABCDEFGHIJKLMNOP"[r] for r in parts) if ranks <= 8 else str(len(parts))
                middle = (place[0] + 0.47 * width, rank + 0.48)
                axes.text(*middle, text, ha="center", va="center", fontsize=7.5, color=INK, linespacing=0.95)
    axes.set_xlim(-0.04, len(history))
    axes.set_ylim(ranks, 0)
    axes.xaxis.tick_top()
    labels = ["before"] + [f"round {number}" for number in range(1, len(history))]
    axes.set_xticks([column + 0.42 for column in range(len(history))], labels, fontsize=9.5)
    axes.set_yticks([rank + 0.48 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)], fontsize=9.5)


def _tint(share: float) -> tuple[float, float, float]:
    """The gradients' colour; the fewer parts, the paler."""
    colour = [int(COLOURS["gradients"][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (1 - (1 - channel) * 0.55 * share for channel in colour)
    return red, green, blue


def _busiest(axes: Any, traffic: Mapping[int, tuple[float, float]]) -> None:
    plain(axes, grid="y")
    sizes = sorted(traffic)
    ends = []
    for number, (name, marker, style) in enumerate([("root", "s", "--"), ("ring", "o", "-")]):
        values = [traffic[n][number] / 1e6 for n in sizes]
        axes.plot(sizes, values, marker=marker, linestyle=style, color=COLOURS["communication"] if number else INK)
        ends.append((name, values[-1]))
    for name, value in ends:
        axes.annotate(name, (sizes[-1], value), (0, 7), textcoords="offset points", ha="center", fontsize=10, color=INK)
    axes.set_ylim(0, 1.18 * max(value for _, value in ends))
    axes.set_xlim(min(sizes) - 0.4, max(sizes) + 0.6)
    axes.set_xticks(sizes)
    axes.set_xlabel("ranks", color=GREY, fontsize=9.5)
    axes.set_title("MB through the busiest rank", loc="left", fontsize=10, color=INK)


def _sentence(traffic: Mapping[int, tuple[float, float]]) -> str:
    few, most = min(traffic), max(traffic)
    root, ring = ([traffic[n][which] for n in (few, most)] for which in (0, 1))
    return (
        f"From {few} to {many(most, 'rank')} the busiest rank's traffic grows from {in_bytes(root[0])} to "
        f"{in_bytes(root[1])} with a root, and from {in_bytes(ring[0])} to {in_bytes(ring[1])} in a ring."
    )
