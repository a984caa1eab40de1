"""Shard maps: ways to divide a model among the ranks, and how even each one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import GREY, INK, Look, frame, many, plain


class Piece(NamedTuple):
    """`numel` elements of the model, held by the rank `owner`. Pieces lie end to end."""

    numel: int
    owner: int


def largest_share(pieces: Sequence[Piece], ranks: int) -> float:
    """What the fullest rank holds, as a multiple of an even share."""
    held = [sum(piece.numel for piece in pieces if piece.owner == rank) for rank in range(ranks)]
    return ranks * max(held) / sum(held)


def shard_map(ways: Mapping[str, Sequence[Piece]], ranks: int) -> tuple[Figure, str]:
    """A row for each way: the model from left to right, with the colour and the number of each piece's owner."""
    size = sum(piece.numel for piece in next(iter(ways.values())))
    for name, pieces in ways.items():
        if sum(piece.numel for piece in pieces) != size:
            raise ValueError(f"{name!r} and {next(iter(ways))!r} do not divide the same number of elements")
    shares = {name: largest_share(pieces, ranks) for name, pieces in ways.items()}
    said = ", ".join(f"{share:.2f} {name}" for name, share in shares.items())
    sentence = f"The fullest of {many(ranks, 'rank')} holds, as a multiple of an even share: {said}."
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
            look: Look = {"facecolor": RANKS[owner % len(RANKS)], "edgecolor": GREY, "linewidth": 0.3}
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
