"""How many tokens each rank has, and how much one of them weighs if the ranks' means are averaged."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, INK, PALE, Look, frame, many, plain


def token_weights(tokens: Sequence[int], places: Sequence[int]) -> tuple[Figure, str]:
    """A row for each rank: left its tokens, and padding up to its `places`; right the weight of one of its tokens.

    tokens: targets that count, at least one on each rank. places: targets with padding.
    """
    if len(tokens) != len(places) or not tokens or min(tokens) < 1:
        raise ValueError("give each rank's tokens, one or more, and its places")
    ranks, total = len(tokens), sum(tokens)
    weights = [total / ranks / count for count in tokens]  # 1 is what the mean of all tokens gives
    least, most = weights.index(min(weights)), weights.index(max(weights))
    sentence = (
        f"{many(ranks, 'rank')} have {', '.join(f'{count:,}' for count in tokens)} tokens. In the mean of their means "
        f"a token of rank {most} weighs {weights[most] / weights[least]:.3g} times as much as one of rank {least}; in "
        "the mean of all tokens all weigh the same."
    )
    figure = frame("The mean of means", "Left: tokens of a step; right: what one token weighs", sentence, (9.0, 3.9))
    left, right = figure.add_axes((0.09, 0.3, 0.5, 0.45)), figure.add_axes((0.67, 0.3, 0.29, 0.45))
    rows = range(ranks)
    plain(left, grid="x")
    left.barh(rows, places, 0.62, color="white", edgecolor=GREY, hatch="////", linewidth=0.8)
    left.barh(rows, tokens, 0.62, color=COLOURS["other"], edgecolor=INK, linewidth=0.8)
    left.set_yticks(rows, [f"rank {rank}" for rank in rows], color=INK)
    left.set_xlabel("targets: filled, a token; hatched, padding", color=GREY)
    plain(right, grid="x")
    right.barh(rows, weights, 0.62, color=PALE, edgecolor=INK, linewidth=0.8)
    for rank, weight in enumerate(weights):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        place: Look = {"textcoords": "offset points", "va": "center", "zorder": 5, "bbox": box}
        right.annotate(f"{weight:.2f}", (weight, rank), (5, 0), color=INK, **place)
    right.axvline(1.0, color=INK, linewidth=1.4, linestyle="--", zorder=4)
    right.set_yticks([])
    right.set_xlim(0, 1.25 * max(weights))
    right.set_xlabel("weight; dashed: in the mean of all", color=GREY)
    for axes in (left, right):
        axes.invert_yaxis()
    return figure, sentence
