"""Lesson 23: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson23 import CUT

CUTS_BY_BISECTION = """\
from bisect import bisect_right


def cuts(sizes, ranks, block):
    ends, total = [0], sum(sizes)
    for size in sizes:
        start = ends[-1]
        ends.extend(range(start + block, start + size, block))
        ends.append(start + size)
    return [ends[bisect_right(ends, r * total // ranks) - 1] for r in range(ranks + 1)]
"""

CUTS_BY_COUNTING = """\
def cuts(sizes, ranks, block):
    total, cut = sum(sizes), []
    for r in range(ranks):
        share, start, last = r * total // ranks, 0, 0
        for size in sizes:
            if start + size <= share:
                last = start + size
            elif start <= share:
                last = start + (share - start) // block * block
            start += size
        cut.append(last)
    return [*cut, total]
"""

FROM_THE_START = (
    "blocks were counted from the beginning of all parameters: those of a parameter begin at its own first element"
)
NOT_BEHIND = "a rank begins at the last block end at or before its equal share, and not at the next one"
NO_BLOCKS = "these are equal shards, which cut blocks in two: move each border back to the end of a block"
BEFORE = (
    "the share was rounded before it was multiplied by r, and falls short of a block end that it meets: "
    "r * sum(sizes) / ranks multiplies first"
)
ROUNDED_UP = (
    "the equal share was rounded up, and so a border behind it was taken: compare with r * start / ranks itself"
)
FROM_THE_LAST = "each share is counted from 0, r * sum(sizes) / ranks: counted from the border before, the moves add up"
SHORT = "the end of a parameter is the end of a block too, even of a short one"
_ENDS = "        ends += [start + min(end, size) for end in range(block, size + block, block)]\n"
_LAST = "max(end for end in ends if end <= share)"
_RETURN = f"    return [{_LAST} for share in shares] + [start]\n"
_CUT = (
    "    cut = [0]\n    for r in range(1, ranks):\n"
    "        cut.append(max(end for end in ends if end <= cut[-1] + {}))\n    return cut + [start]\n"
)

CUTS_MISTAKES = {
    "blocks from the start": Mistake(
        edit(CUT, f"[{_LAST} for share in shares]", "[int(share) // block * block for share in shares]"),
        FROM_THE_START,
    ),
    "the next block": Mistake(edit(CUT, _LAST, "min(end for end in ends if end >= share)"), NOT_BEHIND),
    "the nearest block": Mistake(edit(CUT, _LAST, "min(ends, key=lambda end: abs(end - share))"), NOT_BEHIND),
    "before, never at": Mistake(
        edit(CUT, _LAST, "max([0, *(end for end in ends if end < share)])"),
        "a share that ends with a block needs no moving: at or before, end <= share",
    ),
    "equal shards": Mistake(edit(CUT, f"[{_LAST} for share in shares]", "[int(share) for share in shares]"), NO_BLOCKS),
    "ends of parameters": Mistake(
        edit(CUT, _ENDS, "        ends.append(start + size)\n"),
        "no border lies inside a parameter: a large one may be cut between any two of its blocks",
    ),
    "short blocks forgotten": Mistake(
        edit(CUT, _ENDS, "        ends += [start + end for end in range(block, size + 1, block)]\n"), SHORT
    ),
    "rounded shares": Mistake(
        edit(CUT, "r * start / ranks", "round(r * start / ranks)"),
        ROUNDED_UP,
    ),
    "shares rounded up": Mistake(edit(CUT, "r * start / ranks", "-(-r * start // ranks)"), ROUNDED_UP),
    "shares rounded down first": Mistake(edit(CUT, "r * start / ranks", "r * (start // ranks)"), BEFORE),
    "divided first": Mistake(edit(CUT, "r * start / ranks", "r * (start / ranks)"), BEFORE),
    "a fraction first": Mistake(edit(CUT, "r * start / ranks", "r / ranks * start"), BEFORE),
    "a share from the last border": Mistake(
        edit(CUT, _RETURN, _CUT.format("start / ranks")),
        FROM_THE_LAST,
    ),
    "a share of the rest": Mistake(
        edit(CUT, _RETURN, _CUT.format("(start - cut[-1]) / (ranks - r + 1)")),
        FROM_THE_LAST,
    ),
    "no two borders alike": Mistake(
        edit(CUT, f"[{_LAST} for share in shares] + [start]", f"sorted({{*({_LAST} for share in shares), start}})"),
        "a rank may have nothing, and then two borders are equal: there are ranks + 1 of them all the same",
    ),
    "no last border": Mistake(
        edit(CUT, "for share in shares] + [start]", "for share in shares]"),
        "there are ranks + 1 borders: the last rank ends where the last parameter does",
    ),
    "lengths": Mistake(
        edit(
            CUT,
            _RETURN,
            f"    found = [{_LAST} for share in shares] + [start]\n"
            "    return [b - a for a, b in zip(found, found[1:])]\n",
        ),
        "these are the lengths of the shards: asked for is where they begin, and where the last one ends",
    ),
}

RIGHT = {"23.1": [CUTS_BY_BISECTION, CUTS_BY_COUNTING]}
MISTAKES = {"23.1": CUTS_MISTAKES}
