"""Who reads what: a checkpoint's files in one row, the new shards in the next, and between them every read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import GREY, INK, Look, frame, many, plain

Read = tuple[str, int, int, int]
FILES, SHARDS = 1.0, 0.0  # the two rows, each of height HIGH
HIGH = 0.34


def who_reads_what(
    files: Sequence[tuple[str, int]], numel: int, plans: Sequence[Sequence[Read]] | int
) -> tuple[Figure, str]:
    """One unit of `numel` elements: `files` are (name, length) in rank order, `plans[rank]` what a rank reads.

    A read is (file, start, stop, at): elements [start, stop) of the file go to place `at` of the rank's new shard.
    Padding is hatched. plans: a number of ranks stands for the reads that they need.
    """
    plans = _needed(files, numel, plans) if isinstance(plans, int) else plans
    if not files or not plans:
        raise ValueError(f"{len(files)} files and {len(plans)} ranks: there must be at least one of each")
    shard = math.ceil(numel / len(plans))
    begins, end = {}, 0
    for name, length in files:
        begins[name], end = end, end + length
    sizes = [[stop - start for _, start, stop, _ in plan] for plan in plans]
    total, count = sum(map(sum, sizes)), sum(map(len, sizes))
    pads = end - numel, len(plans) * shard - numel
    sentence = (
        f"{many(len(plans), 'rank')} read the {numel:,} elements in {many(count, 'read')}, {total:,} elements in all; "
        f"the {pads[0]} of padding in the files are read by nobody, and the new shards have {pads[1]} of their own."
    )
    title = f"{many(len(files), 'file')}, read by {many(len(plans), 'rank')}"
    figure = frame(title, "One unit; each band is one read, in the colour of the rank that reads", sentence, (9.0, 4.4))
    axes = figure.add_axes((0.1, 0.2, 0.87, 0.58))
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    for name, length in files:
        data = max(0, min(length, numel - begins[name]))
        _box(axes, begins[name], data, length, FILES, "#F2F2F2")
        for border in (begins[name], begins[name] + length):
            axes.plot([border] * 2, [FILES - 0.04, FILES + HIGH + 0.04], color=INK, linewidth=2.2, zorder=4)
        short = name.removesuffix(".safetensors")
        axes.text(begins[name] + length / 2, FILES + HIGH + 0.06, short, ha="center", fontsize=9, color=INK)
    for rank, plan in enumerate(plans):
        data = max(0, min(shard, numel - rank * shard))
        _box(axes, rank * shard, data, shard, SHARDS, RANKS[rank % len(RANKS)])
        axes.text((rank + 0.5) * shard, SHARDS - 0.15, f"rank {rank}", ha="center", fontsize=9.5, color=INK)
        for name, start, stop, at in plan:
            _band(axes, begins[name] + start, rank * shard + at, stop - start, start, rank, end)
    axes.set_xlim(-0.005 * end, 1.005 * max(end, len(plans) * shard))
    axes.set_ylim(-0.25, FILES + HIGH + 0.2)
    axes.set_xticks([])
    axes.set_yticks([FILES + HIGH / 2, SHARDS + HIGH / 2], ["files", "new shards"], fontsize=10, color=INK)
    return figure, sentence


def _needed(files: Sequence[tuple[str, int]], numel: int, ranks: int) -> list[list[Read]]:
    plans: list[list[Read]] = []
    for rank in range(ranks):
        first, begin = rank * math.ceil(numel / ranks), 0
        last = min(numel, first + math.ceil(numel / ranks))
        plans.append([])
        for name, length in files:
            start, stop = max(first, begin), min(last, begin + length)
            if start < stop:
                plans[rank].append((name, start - begin, stop - begin, start - first))
            begin += length
    return plans


def _box(axes: Any, begin: float, data: float, length: float, y: float, colour: str) -> None:
    """A shard: `data` elements, then padding up to `length`."""
    edge: Look = {"edgecolor": GREY, "linewidth": 0.8}
    axes.add_patch(Rectangle((begin, y), data, HIGH, facecolor=colour, **edge))
    if data < length:
        axes.add_patch(Rectangle((begin + data, y), length - data, HIGH, facecolor="white", hatch="////", **edge))


def _band(axes: Any, above: float, below: float, size: int, start: int, rank: int, whole: int) -> None:
    """From a place in a file to its place in a new shard."""
    top, bottom = FILES, SHARDS + HIGH
    corners = [(above, top), (above + size, top), (below + size, bottom), (below, bottom)]
    colour = RANKS[rank % len(RANKS)]
    axes.add_patch(Polygon(corners, closed=True, facecolor=colour, edgecolor=GREY, linewidth=0.6, alpha=0.75))
    axes.add_patch(Rectangle((above, top), size, HIGH, facecolor=colour, edgecolor=GREY, linewidth=0.6))
    if size > 0.045 * whole:
        fits = 7.8 * size / whole > 0.065 * len(f"[{start:,}, {start + size:,})")  # inches
        place = f"[{start:,},{' ' if fits else chr(10)}{start + size:,})"
        axes.text(above + size / 2, top + HIGH / 2, place, ha="center", va="center", fontsize=8, color=INK)
