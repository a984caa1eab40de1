"""Lesson 23: blocks of an 8-bit state that no border between ranks cuts."""

from __future__ import annotations

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

SITUATIONS: tuple[tuple[list[int], int, int], ...] = (
    ([100], 2, 8),
    ([96, 10, 31], 2, 8),
    ([96, 10, 31], 3, 8),
    ([7, 300, 5, 5, 64], 4, 16),
    ([24, 24], 3, 8),  # equal shards are whole blocks already
    ([20], 5, 8),  # fewer blocks than ranks
    ([3, 3, 3], 2, 256),  # a block is a whole parameter
    ([50, 13], 4, 1),  # nothing to keep together
    ([9], 1, 4),
    ([34, 67], 3, 256),  # a share of 33.67 elements, and a border at 34
    ([30], 22, 5),  # 11 * (30 / 22) is less than 15
    ([55], 11, 5),  # 3 / 11 * 55 is less than 15
)


def where_cut(play: Play) -> None:
    for sizes, ranks, block in SITUATIONS:
        given = play.keep("`sizes`", list(sizes))
        said = f"cuts({sizes}, {ranks}, {block})"
        play.call(said, play.code.cuts, given, ranks, block, uses=(), result=said)


CUTS_BATTERY = (
    Scene(
        "",
        where_cut,
        "list the ends of all blocks, parameter by parameter; of these take the last at or before each rank's share",
        sizes=(1, 2),
    ),
)

CUTS_STUB = '''\
from zerolab.lab.exercises import Todo


def cuts(sizes: list[int], ranks: int, block: int) -> list[int]:
    """Where the shards of the ranks begin and end: ranks + 1 numbers, from 0 to the sum.

    Parameters with `sizes` elements lie one after another; the blocks of each begin at
    its own first element, and the last one may be shorter. Rank r begins at the last
    block end (or at 0) that is not beyond its equal share, r * sum(sizes) / ranks.
    """
    raise Todo("23.1")
'''

CUT = """\
def cuts(sizes: list[int], ranks: int, block: int) -> list[int]:
    ends, start = [0], 0
    for size in sizes:
        ends += [start + min(end, size) for end in range(block, size + block, block)]
        start += size
    shares = [r * start / ranks for r in range(ranks)]
    return [max(end for end in ends if end <= share) for share in shares] + [start]
"""


EXERCISES = [
    Exercise(
        id="23.1",
        title="where to cut",
        difficulty=2,
        section="Write: where to cut",
        battery=CUTS_BATTERY,
        stub=CUTS_STUB,
        reference=CUT,
        hints=(
            "List the ends of all blocks first: `start` is where a parameter begins, and the ends of its blocks are "
            "start + block, start + 2 * block, ..., and start + size.",
            "A share is r * sum(sizes) / ranks, not rounded. The border is the largest end that is at most that, and "
            "the last border is the sum.",
            "ends = [0], start = 0; for each size: ends += [start + min(end, size) for end in range(block, size + "
            "block, block)], then start += size. Border r is the largest end that is at most r * start / ranks.",
        ),
        exports=("cuts",),
    ),
]
