"""Blocks of a model whose parameters lie end to end, and the borders between ranks that fall into them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from zerolab.lab.plots.shards import Piece


def blocks_and_owners(sizes: Sequence[int], borders: Sequence[int], block: int) -> list[Piece]:
    """A piece for each block of parameters with `sizes` elements, or two where a border lies in it.

    borders: where the shards of the ranks begin and end. block: elements in a block, counted in each parameter.
    """
    ends = {end for _, end in _blocks(sizes, block)}
    points = pairwise(sorted({*borders, *ends}))
    return [Piece(end - start, bisect_right(borders, start) - 1) for start, end in points]


def in_other_blocks(sizes: Sequence[int], borders: Sequence[int], block: int) -> int:
    """Elements whose rank, which counts blocks from where its part of a parameter begins, puts them into other blocks
    than one process does.
    """
    right, other, start = set(_blocks(sizes, block)), 0, 0
    for size in sizes:
        inside = [border for border in borders if start < border < start + size]
        for first, last in pairwise([start, *inside, start + size]):
            counted = _blocks([last - first], block, first)
            other += sum(end - begin for begin, end in counted if (begin, end) not in right)
        start += size
    return other


def _blocks(sizes: Sequence[int], block: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Where each block begins and ends; the last one of a parameter may be shorter."""
    for size in sizes:
        for begin in range(start, start + size, block):
            yield begin, min(begin + block, start + size)
        start += size
