"""Shard maps: ways to deal the same model out to the ranks, and how evenly each does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import GREY, INK, frame, many, plain


class Piece(NamedTuple):
    """`numel` elements of the model that `owner` has; pieces lie end to end."""

    numel: int
    owner: int


def largest_share(pieces: Sequence[Piece], ranks: int) -> float:
    """What the fullest rank has, as a multiple of an even share."""
    held = [sum(piece.numel for piece in pieces if piece.owner == rank) for rank in range(ranks)]
    return ranks * max(held) / sum(held)


def shard_map(ways: Mapping[str, Sequence[Piece]], ranks: int) -> tuple[Figure, str]:
    """A row for each way: the model from left to right, in the colour and with the number of who owns it."""
    size = sum(piece.numel for piece in next(iter(ways.values())))
    for name, pieces in ways.items():
        if sum(piece.numel for piece in pieces) != size:
            raise ValueError(f"{name!r} deals out another number of elements than {next(iter(ways))!r}")
    shares = {name: largest_share(pieces, ranks) for name, pieces in ways.items()}
    said = ", ".join(f"{share:.2f} {name}" for name, share in shares.items())
    sentence = f"The fullest of {many(ranks, 'rank')} has, as a multiple of an even share: {said}."
    height = 2.0 + 0.62 * len(ways)
    figure = frame(
        "Who owns which element", f"{size:,} elements of the model, laid end to end", sentence, (9.0, height)
    )
    axes = figure.add_axes((0.2, 0.85 / height, 0.67, (height - 1.9) / height))
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    for row, (name, pieces) in enumerate(ways.items()):
        start = 0
        for numel, owner in pieces:
            look = {"facecolor": RANKS[owner % len(RANKS)], "edgecolor": GREY, "linewidth": 0.3}
            axes.add_patch(Rectangle((start, row + 0.1), numel, 0.8, **look))
            if numel > 0.03 * size:
                axes.text(start + numel / 2, row + 0.5, str(owner), ha="center", va="center", fontsize=9, color=INK)
            start += numel
        axes.text(1.02 * size, row + 0.5, f"{shares[name]:.2f} ×", va="center", fontsize=11, color=INK)
    axes.text(1.02 * size, -0.15, "fullest rank", fontsize=9, color=GREY)
    axes.set_xlim(0, size)
    axes.set_ylim(len(ways), 0)
    axes.set_xticks([])
    axes.set_yticks([row + 0.5 for row in range(len(ways))], list(ways), fontsize=10, color=INK)
    return figure, sentence
