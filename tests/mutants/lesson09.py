"""Lesson 09: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson09 import OVERLAP, PREFETCH

from .sources import edit

# ---------------------------------------------------------------------- 09.1

OVERLAP_SWEPT = """\
def overlap(computing, travelling):
    events = []
    for spans, which in ((computing, 0), (travelling, 1)):
        for start, end in spans:
            events += [(start, which, 1), (end, which, -1)]
    open_spans, last, total, hidden = [0, 0], 0.0, 0.0, 0.0
    for moment, which, change in sorted(events):
        if open_spans[1]:
            total += moment - last
            hidden += (moment - last) * (open_spans[0] > 0)
        open_spans[which] += change
        last = moment
    return hidden / total if total > 0 else 1.0
"""

OVERLAP_IN_PIECES = """\
from itertools import pairwise


def overlap(computing, travelling):
    edges = sorted({edge for span in [*computing, *travelling] for edge in span})
    both = travels = 0.0
    for start, end in pairwise(edges):
        middle = (start + end) / 2
        if any(a < middle < b for a, b in travelling):
            travels += end - start
            if any(a < middle < b for a, b in computing):
                both += end - start
    if travels == 0:
        return 1
    return both / travels
"""

OVERLAP_BY_INCLUSION = """\
def length(spans):
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def overlap(computing, travelling):
    if length(travelling) == 0:
        return 1.0
    both = length(computing) + length(travelling) - length(computing + travelling)
    return both / length(travelling)
"""

_RATIO = "    return hidden / total if total else 1.0\n"

OVERLAP_MUTANTS = {
    "the part that stands still": (edit(OVERLAP, "return hidden / total", "return 1 - hidden / total"), "stands still"),
    "a percentage": (edit(OVERLAP, "return hidden / total", "return 100 * hidden / total"), "not a percentage"),
    "seconds": (edit(OVERLAP, _RATIO, "    return hidden\n"), "the hidden time itself"),
    "of the time that it computes": (
        edit(
            OVERLAP, _RATIO, "    busy = sum(b - a for a, b in computing)\n    return hidden / busy if busy else 1.0\n"
        ),
        "divided by the time that the rank computes",
    ),
    "of the whole step": (
        edit(
            OVERLAP,
            _RATIO,
            "    every = computing + travelling\n"
            "    whole = max(b for _, b in every) - min(a for a, _ in every) if every else 0\n"
            "    return hidden / whole if whole else 1.0\n",
        ),
        "divided by the time of the whole step",
    ),
    "of all that happens": (
        edit(
            OVERLAP,
            _RATIO,
            "    every = sum(b - a for a, b in merged(computing + travelling))\n"
            "    return hidden / every if every else 1.0\n",
        ),
        "divided by the time of the whole step",
    ),
    "compares two lengths": (
        edit(
            OVERLAP,
            _RATIO,
            "    busy = sum(b - a for a, b in computing)\n    return min(1.0, busy / total) if total else 1.0\n",
        ),
        "what counts is the time in which *both* happen",
    ),
    "merges nothing": (
        edit(OVERLAP, "    computing, travelling = merged(computing), merged(travelling)\n", ""),
        "every moment counts once",
    ),
    "merges what travels only": (
        edit(OVERLAP, "merged(computing), merged(travelling)", "computing, merged(travelling)"),
        "every moment counts once",
    ),
    "merges what computes only": (
        edit(OVERLAP, "merged(computing), merged(travelling)", "merged(computing), travelling"),
        "every moment counts once",
    ),
    "ends at the last end": (
        edit(OVERLAP, "max(found[-1][1], end))", "end)"),
        "may lie inside an earlier one",
    ),
    "does not sort": (edit(OVERLAP, "sorted(spans)", "spans"), "in no order"),
    "sorts in place": (
        edit(OVERLAP, "    found = []\n", "    found = []\n    spans.sort()\n"),
        "the caller's lists have changed",
    ),
    "divides by zero": (edit(OVERLAP, _RATIO, "    return hidden / total\n"), "nothing travels"),
    "zero where nothing travels": (edit(OVERLAP, "else 1.0", "else 0.0"), "the score is 1.0"),
    "the first pairs only": (
        edit(OVERLAP, "for a in computing for b in travelling", "for a, b in zip(computing, travelling)"),
        "add up over all pairs",
    ),
    "negative where they are apart": (
        edit(OVERLAP, "max(0, min(a[1], b[1]) - max(a[0], b[0]))", "(min(a[1], b[1]) - max(a[0], b[0]))"),
        "nothing in common",
    ),
    "whole seconds": (
        "def overlap(computing, travelling):\n"
        "    both = total = 0\n"
        "    for tick in range(2000):\n"
        "        moment = tick / 100 + 0.005\n"
        "        moving = any(a <= moment < b for a, b in travelling)\n"
        "        total += moving\n"
        "        both += moving and any(a <= moment < b for a, b in computing)\n"
        "    return both / total if total else 1.0\n",
        "the score is a ratio and has no unit",
    ),
    "compared with the pair before": (
        edit(
            OVERLAP,
            "    for start, end in sorted(spans):\n        if found and start <= found[-1][1]:\n",
            "    spans, before = sorted(spans), 0.0\n    for start, end in spans:\n"
            "        reached, before = before, end\n        if found and start <= reached:\n",
        ),
        "with the merged pair so far",
    ),
    "two by two": (
        edit(
            OVERLAP,
            "        if found and start <= found[-1][1]:\n",
            "        fresh = not found or len(found[-1]) == 2\n        if found and fresh and start <= found[-1][1]:\n",
            "max(found[-1][1], end))",
            "max(found[-1][1], end), 0)",
            "    return found\n",
            "    return [pair[:2] for pair in found]\n",
        ),
        "with the merged pair so far",
    ),
    "from the first to the last": (
        edit(
            OVERLAP,
            "sum(end - start for start, end in travelling)",
            "travelling[-1][1] - travelling[0][0] if travelling else 0",
        ),
        "from the first to the last pair",
    ),
    "the mean of fractions": (
        edit(
            OVERLAP,
            _RATIO,
            "    parts = [\n"
            "        sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing) / (b[1] - b[0])\n"
            "        for b in travelling\n"
            "        if b[1] > b[0]\n"
            "    ]\n"
            "    return sum(parts) / len(parts) if parts else 1.0\n",
        ),
        "the mean of the pairs' fractions",
    ),
    "only those that lie inside": (
        edit(
            OVERLAP,
            "max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in travelling",
            "b[1] - b[0] for a in computing for b in travelling if a[0] <= b[0] and b[1] <= a[1]",
        ),
        "a fraction from 0 to 1: the time that is hidden",
    ),
    "rounds": (edit(OVERLAP, "return hidden / total", "return round(hidden / total, 2)"), "it was rounded"),
    "returns nothing": (edit(OVERLAP, "    return hidden", "    hidden"), "`return` is missing"),
    "a tensor": (
        "import torch\n\n\n"
        + edit(
            OVERLAP, "return hidden / total if total else 1.0", "return torch.tensor(hidden / total if total else 1.0)"
        ),
        "return a Python number",
    ),
    "in float32": (
        edit(
            "import torch\n\n\n" + OVERLAP,
            "    computing, travelling = merged(computing), merged(travelling)\n",
            "    computing, travelling = (\n"
            "        merged([tuple(torch.tensor(span).tolist()) for span in spans])\n"
            "        for spans in (computing, travelling)\n"
            "    )\n",
        ),
        "float32 has too few digits",
    ),
    "the first of an empty list": (
        edit(
            OVERLAP,
            "    found = []\n    for start, end in sorted(spans):\n",
            "    spans = sorted(spans)\n    found = [spans[0]]\n    for start, end in spans[1:]:\n",
        ),
        "a list may be empty",
    ),
}

# ---------------------------------------------------------------------- 09.2

PREFETCH_SELF_RECORDED = """\
import zerolab
from zerolab.lab import Recorded


class MyPrefetch(Recorded):
    def gather_and_go_on(self, unit):
        super().gather(unit)
        started = 0
        for following in list(self.coming):
            if started == self.ahead:
                break
            if not following.gathered:
                following.start_gather()
                started += 1

    def pre_forward(self, unit):
        self.gather_and_go_on(unit)

    def pre_backward(self, unit):
        self.gather_and_go_on(unit)
"""

PREFETCH_AFTER_RELEASE = """\
from zerolab.lab import Recorded


class MyPrefetch(Recorded):
    def pre_forward(self, unit):
        super().pre_forward(unit)
        self.refill()

    def pre_backward(self, unit):
        super().pre_backward(unit)
        self.refill()

    def post_backward(self, unit):
        super().post_backward(unit)
        self.refill()

    def refill(self):
        queue, left = self.coming, self.ahead
        while queue and left > 0:
            queue[0].start_gather()
            queue, left = queue[1:], left - 1
"""

PREFETCH_BY_ENGINE_GATHER = """\
from zerolab.lab import Recorded


class MyPrefetch(Recorded):
    def gather(self, unit):
        unit.gather()
        [other.start_gather() for other in self.coming[0 : self.ahead]]
"""

_FORWARD = "    def pre_forward(self, unit: Unit) -> None:\n        unit.gather()\n        self.start_ahead()\n"
_BACKWARD = "    def pre_backward(self, unit: Unit) -> None:\n        unit.gather()\n        self.start_ahead()\n"
_AHEAD = "        for unit in self.coming[: self.ahead]:\n            unit.start_gather()\n"

PREFETCH_MUTANTS = {
    "prefetches nothing": (edit(PREFETCH, "        self.start_ahead()\n", ""), "it must be on its way *before*"),
    "waits for the next": (edit(PREFETCH, "unit.start_gather()", "unit.gather()"), "gather() waits until all"),
    "starts everything": (edit(PREFETCH, "self.coming[: self.ahead]", "self.coming"), "self.ahead is a budget"),
    "one too many": (edit(PREFETCH, "[: self.ahead]", "[: self.ahead + 1]"), "self.ahead is a budget"),
    "always one": (edit(PREFETCH, "[: self.ahead]", "[:1]"), "the first self.ahead units"),
    "always two": (edit(PREFETCH, "[: self.ahead]", "[:2]"), "self.ahead is a budget"),
    "in forward only": (
        edit(PREFETCH, _BACKWARD, _BACKWARD.replace("        self.start_ahead()\n", "")),
        "backward does not",
    ),
    "in backward only": (
        edit(PREFETCH, _FORWARD, _FORWARD.replace("        self.start_ahead()\n", "")),
        "it must be on its way",
    ),
    "not without gradients": (
        "import torch\n"
        + edit(
            PREFETCH, _FORWARD, _FORWARD.replace("self.start", "if torch.is_grad_enabled():\n            self.start")
        ),
        "a forward under no_grad is a pass like any other",
    ),
    "after forward": (
        edit(
            PREFETCH,
            _FORWARD,
            _FORWARD.replace("        self.start_ahead()\n", "") + "\n    def post_forward(self, unit: Unit) -> None:\n"
            "        super().post_forward(unit)\n"
            "        self.start_ahead()\n",
        ),
        "it must be on its way *before*",
    ),
    "the order of self.units": (
        edit(
            PREFETCH,
            _AHEAD,
            "        pass\n",
            "self.start_ahead()",
            "[other.start_gather() for other in self.units[self.units.index(unit) + 1 :][: self.ahead] if self.coming]",
        ),
        "the order was assumed",
    ),
    "the units before, in backward": (
        edit(
            PREFETCH,
            _BACKWARD,
            "    def pre_backward(self, unit: Unit) -> None:\n"
            "        unit.gather()\n"
            "        at = self.units.index(unit)\n"
            "        for other in self.units[max(0, at - self.ahead) : at] if self.coming else []:\n"
            "            other.start_gather()\n",
        ),
        "the order was assumed",
    ),
    "in the wrong direction": (
        edit(PREFETCH, "self.coming[: self.ahead]", "self.coming[::-1][: self.ahead]"),
        "the order was assumed",
    ),
    "skips the next": (edit(PREFETCH, "[: self.ahead]", "[1 : self.ahead + 1]"), "the order was assumed"),
    "the others first": (
        edit(
            PREFETCH,
            "        unit.gather()\n        self.start_ahead()\n",
            "        self.start_ahead()\n        unit.gather()\n",
        ),
        "the unit that is needed now comes first",
    ),
    "does not wait": (
        edit(PREFETCH, "        unit.gather()\n", "        unit.start_gather()\n"),
        "start_gather() returns at once",
    ),
    "does not gather": (edit(PREFETCH, "        unit.gather()\n", ""), "unit.gather() must come first"),
    "gathers only what was not started": (
        edit(
            PREFETCH,
            "        unit.gather()\n",
            "        if unit.full.untyped_storage().size() == 0:\n            unit.gather()\n",
        ),
        "it is still being gathered",
    ),
    "gathers anew": (
        edit(PREFETCH, "        unit.gather()\n", "        unit.release()\n        unit.gather()\n"),
        "gathered, released and gathered again",
    ),
    "releases what it started": (
        edit(
            PREFETCH,
            "            unit.start_gather()\n",
            "            unit.start_gather()\n            unit.release()\n",
        ),
        "it must be on its way",
    ),
    "an index": (
        edit(PREFETCH, _AHEAD, "        for k in range(self.ahead):\n            self.coming[k].start_gather()\n"),
        "self.coming is empty in the first pass",
    ),
    "the first order for ever": (
        edit(
            PREFETCH,
            _FORWARD,
            "    order = None\n\n"
            "    def pre_forward(self, unit: Unit) -> None:\n"
            "        unit.gather()\n"
            "        self.order = self.order or []\n"
            "        if unit in self.order:\n"
            "            place = self.order.index(unit) + 1\n"
            "            for other in self.order[place : place + self.ahead]:\n"
            "                other.start_gather()\n"
            "        else:\n"
            "            self.order.append(unit)\n",
        ),
        "keep no order of your own",
    ),
    "the next forward's first": (
        edit(
            PREFETCH,
            "self.coming[: self.ahead]",
            "(self.coming + self.units[1:] * (len(self.coming) == 0))[: self.ahead]",
        ),
        "self.coming is empty",
    ),
    "rank 0 only": (
        edit(PREFETCH, "self.coming[: self.ahead]", "self.coming[: self.ahead * (self.rank == 0)]"),
        "not every rank makes the same calls",
    ),
    "never lets go": (
        edit(PREFETCH, _BACKWARD, _BACKWARD + "\n    def post_forward(self, unit: Unit) -> None:\n        pass\n"),
        "release what is no longer needed",
    ),
    "lets go of what is ahead": (
        edit(
            PREFETCH,
            _BACKWARD,
            _BACKWARD + "\n    def post_forward(self, unit: Unit) -> None:\n"
            "        super().post_forward(unit)\n"
            "        for other in self.coming:\n"
            "            other.release()\n",
        ),
        "each call releases `unit` alone",
    ),
    "each unit only once": (
        edit(
            PREFETCH,
            "            unit.start_gather()\n",
            "            if unit not in self.begun:\n"
            "                self.begun = (*self.begun, unit)\n"
            "                unit.start_gather()\n",
            "class MyPrefetch(Recorded):\n",
            "class MyPrefetch(Recorded):\n    begun = ()\n\n",
        ),
        "every time",
    ),
    "forgets the reduction": (
        edit(
            PREFETCH,
            _BACKWARD,
            _BACKWARD + "\n    def post_backward(self, unit: Unit) -> None:\n        unit.release()\n",
        ),
        "super().post_backward(unit) is missing",
    ),
    "the budget counted down": (
        edit(
            PREFETCH,
            _AHEAD,
            "        for unit in self.coming:\n"
            "            if self.ahead > 0:\n"
            "                unit.start_gather()\n"
            "                self.ahead -= 1\n",
        ),
        "self.ahead is a setting",
    ),
    "the unit at work counted": (
        edit(
            PREFETCH,
            _AHEAD,
            "        there = sum(unit.full.untyped_storage().size() > 0 for unit in self.units)\n"
            "        for unit in self.coming[: max(0, self.ahead - there + 1)]:\n"
            "            unit.start_gather()\n",
        ),
        "neither the unit at work nor the root counts",
    ),
    "looks for the unit in what comes": (
        edit(
            PREFETCH,
            _AHEAD,
            "        at = self.coming.index(unit) if unit in self.coming else len(self.coming)\n"
            "        for other in self.coming[at + 1 : at + 1 + self.ahead]:\n"
            "            other.start_gather()\n",
            "start_ahead(self)",
            "start_ahead(self, unit)",
            "self.start_ahead()",
            "self.start_ahead(unit)",
        ),
        "begins with the unit after this one",
    ),
    "the budget with the unit at work": (
        edit(PREFETCH, "[: self.ahead]", "[: self.ahead - 1]"),
        "it must be on its way",
    ),
    "the package's own": (
        "from zerolab.lab import Recorded\n\n\nclass MyPrefetch(Recorded):\n    prefetch = True\n",
        "it must be on its way",
    ),
    "another base": (edit(PREFETCH, "MyPrefetch(Recorded)", "MyPrefetch(Unit)"), "class MyPrefetch(Recorded)"),
}

PREFETCH_BEFORE_THE_WAIT = """\
from zerolab.lab import Recorded


class MyPrefetch(Recorded):
    def start(self, unit):
        for each in [unit, *self.coming[: self.ahead]]:
            each.start_gather()
        unit.gather()

    pre_forward = pre_backward = start
"""

RIGHT = {
    "09.1": (OVERLAP_SWEPT, OVERLAP_IN_PIECES, OVERLAP_BY_INCLUSION),
    "09.2": (PREFETCH_SELF_RECORDED, PREFETCH_AFTER_RELEASE, PREFETCH_BY_ENGINE_GATHER, PREFETCH_BEFORE_THE_WAIT),
}

WRONG = {
    "09.1": OVERLAP_MUTANTS,
    "09.2": PREFETCH_MUTANTS,
}
