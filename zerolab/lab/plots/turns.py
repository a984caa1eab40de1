"""Whose keys a rank has in each turn of a ring, and how much it computes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import GREY, INK, PALE, Look, frame, many, plain

Table = Sequence[Sequence[int]]


def ring_turns(held: Table, pairs: Mapping[str, Table] | None = None) -> tuple[Figure, str]:
    """Rows are ranks, columns turns. held[rank][turn]: the rank whose block of keys is there.

    pairs[name][rank][turn], for each of some placements: how many pairs of chunks the rank computes in that turn, each
    of which is a square. Below stands what the slowest rank computes, for which the others wait.
    """
    if not held or (pairs is not None and not pairs):
        raise ValueError("no turns to draw")
    ranks, turns = len(held), len(held[0])
    if pairs is None:
        title, subtitle = "Keys go around the ring", "in a square: the rank whose keys are there"
        sentence = _who_had(held)
    else:
        title, subtitle = "Who waits for whom", "each square is a pair of chunks; in it: whose keys they are"
        sentence = "; ".join(_who_waits(name, table) for name, table in pairs.items()) + "."
    panels = {"": None} if pairs is None else dict(pairs)
    rows = ranks + (pairs is not None)
    height = 2.1 + 0.42 * rows
    figure = frame(title, f"{many(ranks, 'rank')}; {subtitle}", sentence, (9.0, height))
    width = 0.9 / len(panels)
    for number, (name, table) in enumerate(panels.items()):
        share = width - 0.05 if table else 0.45  # alone, it needs no more
        axes = figure.add_axes((0.09 + width * number, 0.72 / height, share, 0.42 * rows / height))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        for rank, row in enumerate(held):
            for turn, owner in enumerate(row):
                _squares(axes, turn, rank, owner, table[rank][turn] if table else None)
        labels = [f"rank {rank}" for rank in range(ranks)]
        if table:
            slowest = [max(row[turn] for row in table) for turn in range(turns)]
            for turn, most in enumerate(slowest):
                place: Look = {"ha": "center", "va": "center", "fontsize": 10, "color": INK}
                axes.text(turn + 0.5, ranks + 0.5, f"{'' if turn == 0 else '+ '}{most}", **place)
            labels.append("slowest")
            name = f"{name}: {sum(slowest)} in all"
        axes.set_xlim(0, turns)
        axes.set_ylim(rows, 0)
        axes.xaxis.tick_top()
        axes.set_xticks([turn + 0.5 for turn in range(turns)], ["at home", *(f"turn {n}" for n in range(1, turns))])
        axes.tick_params(axis="x", labelsize=9.5, labelcolor=GREY)
        axes.set_yticks([row + 0.5 for row in range(rows)], labels if not number else [""] * rows, fontsize=9.5)
        if name:
            axes.set_title(name, loc="left", fontsize=11, color=INK, pad=20)
    return figure, sentence


def _squares(axes: Any, turn: int, rank: int, owner: int, pairs: int | None) -> None:
    """One square over the whole cell, or for each pair a quarter of it."""
    axes.add_patch(Rectangle((turn + 0.03, rank + 0.08), 0.94, 0.84, facecolor="white", edgecolor=PALE))
    look: Look = {"facecolor": RANKS[owner % len(RANKS)], "edgecolor": INK, "linewidth": 0.7}
    place: Look = {"ha": "center", "va": "center", "fontsize": 9.5, "color": INK}
    size = 0.94 if pairs is None else 0.22
    for number in range(1 if pairs is None else pairs):
        left = turn + 0.03 + 0.235 * number
        axes.add_patch(Rectangle((left, rank + 0.08), size, 0.84, **look))
        axes.text(left + size / 2, rank + 0.5, str(owner), **place)


def _who_had(held: Table) -> str:
    complete = all(sorted(row) == [*range(len(held))] for row in held)
    had = "each rank has had the keys of all" if complete else "not every rank has had all keys"
    return f"After {many(len(held[0]) - 1, 'turn')} {had}, one block at a time."


def _who_waits(name: str, table: Table) -> str:
    slowest, mean = sum(map(max, zip(*table, strict=True))), sum(map(sum, table)) / len(table)
    end = f"the last rank is done after the time of {slowest} pairs"
    return f"{name}: each rank computes {mean:g} pairs on average, and {end}"
