"""Lesson 09: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson09 import OVERLAP, PREFETCH

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

OVERLAP_MISTAKES = {
    "the part that stands still": Mistake(
        edit(OVERLAP, "return hidden / total", "return 1 - hidden / total"),
        "that is the part in which the rank stands still: the score is the part that is hidden",
    ),
    "a percentage": Mistake(
        edit(OVERLAP, "return hidden / total", "return 100 * hidden / total"),
        "a fraction from 0 to 1, not a percentage",
    ),
    "seconds": Mistake(
        edit(OVERLAP, _RATIO, "    return hidden\n"),
        "that is the hidden time itself: divide it by the time in which something travels",
    ),
    "of the time that it computes": Mistake(
        edit(
            OVERLAP, _RATIO, "    busy = sum(b - a for a, b in computing)\n    return hidden / busy if busy else 1.0\n"
        ),
        "divided by the time that the rank computes: divide by the time in which something travels",
    ),
    "of the whole step": Mistake(
        edit(
            OVERLAP,
            _RATIO,
            "    every = computing + travelling\n"
            "    whole = max(b for _, b in every) - min(a for a, _ in every) if every else 0\n"
            "    return hidden / whole if whole else 1.0\n",
        ),
        "divided by the time of the whole step: divide by the time in which something travels",
    ),
    "of all that happens": Mistake(
        edit(
            OVERLAP,
            _RATIO,
            "    every = sum(b - a for a, b in merged(computing + travelling))\n"
            "    return hidden / every if every else 1.0\n",
        ),
        "divided by the time of the whole step: divide by the time in which something travels",
    ),
    "compares two lengths": Mistake(
        edit(
            OVERLAP,
            _RATIO,
            "    busy = sum(b - a for a, b in computing)\n    return min(1.0, busy / total) if total else 1.0\n",
        ),
        "it compares two lengths: what counts is the time in which *both* happen",
    ),
    "merges nothing": Mistake(
        edit(OVERLAP, "    computing, travelling = merged(computing), merged(travelling)\n", ""),
        (
            "a moment is counted once for every pair that contains it: first merge the pairs of each list that "
            "overlap, so that every moment counts once"
        ),
    ),
    "merges what travels only": Mistake(
        edit(OVERLAP, "merged(computing), merged(travelling)", "computing, merged(travelling)"),
        (
            "a moment is counted once for every pair that contains it: first merge the pairs of each list that "
            "overlap, so that every moment counts once"
        ),
    ),
    "merges what computes only": Mistake(
        edit(OVERLAP, "merged(computing), merged(travelling)", "merged(computing), travelling"),
        (
            "a moment is counted once for every pair that contains it: first merge the pairs of each list that "
            "overlap, so that every moment counts once"
        ),
    ),
    "ends at the last end": Mistake(
        edit(OVERLAP, "max(found[-1][1], end))", "end)"),
        (
            "a pair may lie inside an earlier one: the merged pair ends at the later of the two ends, max(end, "
            "other_end)"
        ),
    ),
    "does not sort": Mistake(
        edit(OVERLAP, "sorted(spans)", "spans"),
        "the pairs are in no order: sort them before you merge, with sorted(), which leaves the list as it is",
    ),
    "sorts in place": Mistake(
        edit(OVERLAP, "    found = []\n", "    found = []\n    spans.sort()\n"),
        ("the caller's lists have changed: sorted(spans) makes a new list, spans.sort() and pop() change theirs"),
    ),
    "divides by zero": Mistake(
        edit(OVERLAP, _RATIO, "    return hidden / total\n"),
        "nothing travels, so nothing had to be waited for: the score is 1.0",
    ),
    "zero where nothing travels": Mistake(
        edit(OVERLAP, "else 1.0", "else 0.0"),
        "nothing travels, so nothing had to be waited for: the score is 1.0",
    ),
    "the first pairs only": Mistake(
        edit(OVERLAP, "for a in computing for b in travelling", "for a, b in zip(computing, travelling)"),
        "add up over all pairs of both lists",
    ),
    "negative where they are apart": Mistake(
        edit(OVERLAP, "max(0, min(a[1], b[1]) - max(a[0], b[0]))", "(min(a[1], b[1]) - max(a[0], b[0]))"),
        "two pairs that lie apart have nothing in common: max(0, ...), or the difference is negative",
    ),
    "whole seconds": Mistake(
        "def overlap(computing, travelling):\n"
        "    both = total = 0\n"
        "    for tick in range(2000):\n"
        "        moment = tick / 100 + 0.005\n"
        "        moving = any(a <= moment < b for a, b in travelling)\n"
        "        total += moving\n"
        "        both += moving and any(a <= moment < b for a, b in computing)\n"
        "    return both / total if total else 1.0\n",
        ("the score is a ratio and has no unit: nothing may depend on whether times are in seconds or microseconds"),
    ),
    "compared with the pair before": Mistake(
        edit(
            OVERLAP,
            "    for start, end in sorted(spans):\n        if found and start <= found[-1][1]:\n",
            "    spans, before = sorted(spans), 0.0\n    for start, end in spans:\n"
            "        reached, before = before, end\n        if found and start <= reached:\n",
        ),
        (
            "compare each pair with the merged pair so far, not with the pair before it: an earlier pair may "
            "reach further, and more than two may belong together"
        ),
    ),
    "two by two": Mistake(
        edit(
            OVERLAP,
            "        if found and start <= found[-1][1]:\n",
            "        fresh = not found or len(found[-1]) == 2\n        if found and fresh and start <= found[-1][1]:\n",
            "max(found[-1][1], end))",
            "max(found[-1][1], end), 0)",
            "    return found\n",
            "    return [pair[:2] for pair in found]\n",
        ),
        (
            "compare each pair with the merged pair so far, not with the pair before it: an earlier pair may "
            "reach further, and more than two may belong together"
        ),
    ),
    "from the first to the last": Mistake(
        edit(
            OVERLAP,
            "sum(end - start for start, end in travelling)",
            "travelling[-1][1] - travelling[0][0] if travelling else 0",
        ),
        "divided by the time from the first to the last pair: between them, nothing may travel for a while",
    ),
    "the mean of fractions": Mistake(
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
        (
            "that is the mean of the pairs' fractions, in which a short pair counts as much as a long one: add up "
            "seconds, and divide once"
        ),
    ),
    "only those that lie inside": Mistake(
        edit(
            OVERLAP,
            "max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in travelling",
            "b[1] - b[0] for a in computing for b in travelling if a[0] <= b[0] and b[1] <= a[1]",
        ),
        "a fraction from 0 to 1: the time that is hidden, divided by the time in which something travels",
    ),
    "rounds": Mistake(
        edit(OVERLAP, "return hidden / total", "return round(hidden / total, 2)"),
        "it was rounded: return the fraction as it is",
    ),
    "returns nothing": Mistake(
        edit(OVERLAP, "    return hidden", "    hidden"),
        "the function returns nothing: `return` is missing",
    ),
    "a tensor": Mistake(
        "import torch\n\n\n"
        + edit(
            OVERLAP, "return hidden / total if total else 1.0", "return torch.tensor(hidden / total if total else 1.0)"
        ),
        "return a Python number: a tensor or an array of one element has .item()",
    ),
    "in float32": Mistake(
        edit(
            "import torch\n\n\n" + OVERLAP,
            "    computing, travelling = merged(computing), merged(travelling)\n",
            "    computing, travelling = (\n"
            "        merged([tuple(torch.tensor(span).tolist()) for span in spans])\n"
            "        for spans in (computing, travelling)\n"
            "    )\n",
        ),
        (
            "times are read from a clock that may have run for days: only differences count, and float32 has too "
            "few digits"
        ),
    ),
    "the first of an empty list": Mistake(
        edit(
            OVERLAP,
            "    found = []\n    for start, end in sorted(spans):\n",
            "    spans = sorted(spans)\n    found = [spans[0]]\n    for start, end in spans[1:]:\n",
        ),
        "a list may be empty: a step without communication, or a rank that computes nothing",
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

PREFETCH_MISTAKES = {
    "prefetches nothing": Mistake(
        edit(PREFETCH, "        self.start_ahead()\n", ""),
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "waits for the next": Mistake(
        edit(PREFETCH, "unit.start_gather()", "unit.gather()"),
        (
            "gather() waits until all of it has arrived, so the rank stands still for what it does not need yet: "
            "start_gather() returns at once, and the gather() of that unit's own turn waits"
        ),
    ),
    "starts everything": Mistake(
        edit(PREFETCH, "self.coming[: self.ahead]", "self.coming"),
        (
            "self.ahead is a budget, and every unit beyond it takes memory for its full parameters: start the "
            "first self.ahead units of self.coming"
        ),
    ),
    "one too many": Mistake(
        edit(PREFETCH, "[: self.ahead]", "[: self.ahead + 1]"),
        (
            "self.ahead is a budget, and every unit beyond it takes memory for its full parameters: start the "
            "first self.ahead units of self.coming"
        ),
    ),
    "always one": Mistake(
        edit(PREFETCH, "[: self.ahead]", "[:1]"),
        "self.ahead says how many: start the first self.ahead units of self.coming",
    ),
    "always two": Mistake(
        edit(PREFETCH, "[: self.ahead]", "[:2]"),
        (
            "self.ahead is a budget, and every unit beyond it takes memory for its full parameters: start the "
            "first self.ahead units of self.coming"
        ),
    ),
    "in forward only": Mistake(
        edit(PREFETCH, _BACKWARD, _BACKWARD.replace("        self.start_ahead()\n", "")),
        (
            "forward prefetches and this backward does not: self.coming holds what comes next there too, every "
            "time. Do the same in both"
        ),
    ),
    "in backward only": Mistake(
        edit(PREFETCH, _FORWARD, _FORWARD.replace("        self.start_ahead()\n", "")),
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "not without gradients": Mistake(
        "import torch\n"
        + edit(
            PREFETCH, _FORWARD, _FORWARD.replace("self.start", "if torch.is_grad_enabled():\n            self.start")
        ),
        "a forward under no_grad is a pass like any other, and self.coming holds what comes next there too",
    ),
    "after forward": Mistake(
        edit(
            PREFETCH,
            _FORWARD,
            _FORWARD.replace("        self.start_ahead()\n", "") + "\n    def post_forward(self, unit: Unit) -> None:\n"
            "        super().post_forward(unit)\n"
            "        self.start_ahead()\n",
        ),
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "the order of self.units": Mistake(
        edit(
            PREFETCH,
            _AHEAD,
            "        pass\n",
            "self.start_ahead()",
            "[other.start_gather() for other in self.units[self.units.index(unit) + 1 :][: self.ahead] if self.coming]",
        ),
        (
            "the order was assumed: blocks do not run in the order in which self.units lists them, and backward "
            "runs the other way round. self.coming has the order that was recorded"
        ),
    ),
    "the units before, in backward": Mistake(
        edit(
            PREFETCH,
            _BACKWARD,
            "    def pre_backward(self, unit: Unit) -> None:\n"
            "        unit.gather()\n"
            "        at = self.units.index(unit)\n"
            "        for other in self.units[max(0, at - self.ahead) : at] if self.coming else []:\n"
            "            other.start_gather()\n",
        ),
        (
            "the order was assumed: blocks do not run in the order in which self.units lists them, and backward "
            "runs the other way round. self.coming has the order that was recorded"
        ),
    ),
    "in the wrong direction": Mistake(
        edit(PREFETCH, "self.coming[: self.ahead]", "self.coming[::-1][: self.ahead]"),
        (
            "the order was assumed: blocks do not run in the order in which self.units lists them, and backward "
            "runs the other way round. self.coming has the order that was recorded"
        ),
    ),
    "skips the next": Mistake(
        edit(PREFETCH, "[: self.ahead]", "[1 : self.ahead + 1]"),
        (
            "the order was assumed: blocks do not run in the order in which self.units lists them, and backward "
            "runs the other way round. self.coming has the order that was recorded"
        ),
    ),
    "the others first": Mistake(
        edit(
            PREFETCH,
            "        unit.gather()\n        self.start_ahead()\n",
            "        self.start_ahead()\n        unit.gather()\n",
        ),
        (
            "the link works through gathers in the order in which they are started, so the unit that is needed "
            "now comes first: unit.gather(), then the others"
        ),
    ),
    "does not wait": Mistake(
        edit(PREFETCH, "        unit.gather()\n", "        unit.start_gather()\n"),
        "start_gather() returns at once: unit.gather() waits for it, without sending anything twice",
    ),
    "does not gather": Mistake(
        edit(PREFETCH, "        unit.gather()\n", ""),
        ("unit.gather() must come first, in pre_forward() and in pre_backward(): the first pass has no prefetch"),
    ),
    "gathers only what was not started": Mistake(
        edit(
            PREFETCH,
            "        unit.gather()\n",
            "        if unit.full.untyped_storage().size() == 0:\n            unit.gather()\n",
        ),
        "start_gather() returns at once: unit.gather() waits for it, without sending anything twice",
    ),
    "gathers anew": Mistake(
        edit(PREFETCH, "        unit.gather()\n", "        unit.release()\n        unit.gather()\n"),
        ("gathered, released and gathered again: unit.gather() waits for what is on its way and sends nothing twice"),
    ),
    "releases what it started": Mistake(
        edit(
            PREFETCH,
            "            unit.start_gather()\n",
            "            unit.start_gather()\n            unit.release()\n",
        ),
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "an index": Mistake(
        edit(PREFETCH, _AHEAD, "        for k in range(self.ahead):\n            self.coming[k].start_gather()\n"),
        (
            "self.coming is empty in the first pass, and at the end of every pass: a slice, self.coming[: "
            "self.ahead], may be shorter than you ask for"
        ),
    ),
    "the first order for ever": Mistake(
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
        (
            "gathered for nothing: self.coming is empty while nothing is known, in the first pass, and after a "
            "pass has departed from the one before. Then start nothing, and keep no order of your own"
        ),
    ),
    "the next forward's first": Mistake(
        edit(
            PREFETCH,
            "self.coming[: self.ahead]",
            "(self.coming + self.units[1:] * (len(self.coming) == 0))[: self.ahead]",
        ),
        (
            "gathered for nothing: self.coming is empty while nothing is known, in the first pass, and after a "
            "pass has departed from the one before. Then start nothing, and keep no order of your own"
        ),
    ),
    "rank 0 only": Mistake(
        edit(PREFETCH, "self.coming[: self.ahead]", "self.coming[: self.ahead * (self.rank == 0)]"),
        "not every rank makes the same calls: some are done while others wait",
    ),
    "never lets go": Mistake(
        edit(PREFETCH, _BACKWARD, _BACKWARD + "\n    def post_forward(self, unit: Unit) -> None:\n        pass\n"),
        (
            "Zero3's post_forward() and post_backward() release what is no longer needed: if you override them, "
            "call super()"
        ),
    ),
    "lets go of what is ahead": Mistake(
        edit(
            PREFETCH,
            _BACKWARD,
            _BACKWARD + "\n    def post_forward(self, unit: Unit) -> None:\n"
            "        super().post_forward(unit)\n"
            "        for other in self.coming:\n"
            "            other.release()\n",
        ),
        ("it is needed next, and its gather was in vain: each call releases `unit` alone, as Zero3's methods do"),
    ),
    "each unit only once": Mistake(
        edit(
            PREFETCH,
            "            unit.start_gather()\n",
            "            if unit not in self.begun:\n"
            "                self.begun = (*self.begun, unit)\n"
            "                unit.start_gather()\n",
            "class MyPrefetch(Recorded):\n",
            "class MyPrefetch(Recorded):\n    begun = ()\n\n",
        ),
        (
            "forward prefetches and this backward does not: self.coming holds what comes next there too, every "
            "time. Do the same in both"
        ),
    ),
    "forgets the reduction": Mistake(
        edit(
            PREFETCH,
            _BACKWARD,
            _BACKWARD + "\n    def post_backward(self, unit: Unit) -> None:\n        unit.release()\n",
        ),
        "nothing was reduced: super().post_backward(unit) is missing",
    ),
    "the budget counted down": Mistake(
        edit(
            PREFETCH,
            _AHEAD,
            "        for unit in self.coming:\n"
            "            if self.ahead > 0:\n"
            "                unit.start_gather()\n"
            "                self.ahead -= 1\n",
        ),
        "self.ahead is a setting, and it holds in every pass: read it, and count with a name of your own",
    ),
    "the unit at work counted": Mistake(
        edit(
            PREFETCH,
            _AHEAD,
            "        there = sum(unit.full.untyped_storage().size() > 0 for unit in self.units)\n"
            "        for unit in self.coming[: max(0, self.ahead - there + 1)]:\n"
            "            unit.start_gather()\n",
        ),
        (
            "every call starts the first self.ahead units of self.coming, and neither the unit at work nor the root "
            "counts as one of them"
        ),
    ),
    "looks for the unit in what comes": Mistake(
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
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "the budget with the unit at work": Mistake(
        edit(PREFETCH, "[: self.ahead]", "[: self.ahead - 1]"),
        (
            "every call starts the first self.ahead units of self.coming, and neither the unit at work nor the root "
            "counts as one of them"
        ),
    ),
    "the package's own": Mistake(
        "from zerolab.lab import Recorded\n\n\nclass MyPrefetch(Recorded):\n    prefetch = True\n",
        (
            "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). "
            "self.coming begins with the unit after this one. What is started after the unit has computed travels "
            "while nobody computes"
        ),
    ),
    "another base": Mistake(
        edit(PREFETCH, "MyPrefetch(Recorded)", "MyPrefetch(Unit)"),
        "it must begin with `class MyPrefetch(Recorded):`",
    ),
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

PREFETCH_BY_EACH_OTHER = edit(
    PREFETCH_BEFORE_THE_WAIT,
    "def start(",
    "def pre_forward(",
    "pre_forward = pre_backward = start",
    "def pre_backward(self, unit):\n        self.pre_forward(unit)",
)

RIGHT = {
    "09.1": (OVERLAP_SWEPT, OVERLAP_IN_PIECES, OVERLAP_BY_INCLUSION),
    "09.2": (
        PREFETCH_SELF_RECORDED,
        PREFETCH_AFTER_RELEASE,
        PREFETCH_BY_ENGINE_GATHER,
        PREFETCH_BY_EACH_OTHER,
        PREFETCH_BEFORE_THE_WAIT,
    ),
}

MISTAKES = {
    "09.1": OVERLAP_MISTAKES,
    "09.2": PREFETCH_MISTAKES,
}
