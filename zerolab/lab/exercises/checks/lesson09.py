"""Lesson 09: how much of the communication is hidden, and which gather to start when."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.comm.recording import Call
from zerolab.engine.slices import to_local
from zerolab.engine.unit import FullState, Unit
from zerolab.lab.exercises.checks.training import check_cases
from zerolab.lab.exercises.checks.values import forgot_to_return, in_case
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.recorded import Recorded, holds_memory
from zerolab.measure.spans import Intervals, intersection, length, union
from zerolab.measure.traffic import ledger
from zerolab.measure.watch import watched

# ---------------------------------------------------------------------- 09.1

NOTHING_TRAVELS = "nothing travels, so nothing had to be waited for: the score is 1.0"
NO_COMPUTING = "the rank computes nothing meanwhile, so nothing is hidden: the score is 0.0"
MERGE = (
    "a moment is counted once for every pair that contains it: first merge the pairs of each list that overlap, so "
    "that every moment counts once"
)
IN_ORDER = "the pairs are in no order: sort them before you merge, with sorted(), which leaves the list as it is"
NESTED = "a pair may lie inside an earlier one: the merged pair ends at the later of the two ends, max(end, other_end)"
SO_FAR = (
    "compare each pair with the merged pair so far, not with the pair before it: an earlier pair may reach further, "
    "and more than two may belong together"
)
NO_UNIT = "the score is a ratio and has no unit: nothing may depend on whether times are in seconds or microseconds"
CALLERS = "the caller's lists have changed: sorted(spans) makes a new list, spans.sort() and pop() change theirs"
NO_FRACTION = "a fraction from 0 to 1: the time that is hidden, divided by the time in which something travels"

APART = "two pairs that lie apart have nothing in common: max(0, ...), or the difference is negative"
LATE_CLOCK = (
    "times are read from a clock that may have run for days: only differences count, and float32 has too few digits"
)
AN_ITEM = "return a Python number: a tensor or an array of one element has .item()"
ROUNDED = "it was rounded: return the fraction as it is"

Lists = tuple[Intervals, Intervals]

CASES: tuple[tuple[str, Intervals, Intervals, str], ...] = (
    ("", [(0.0, 10.0)], [(7.0, 15.0)], NO_FRACTION),
    ("", [(2.0, 9.0)], [(1.0, 11.0)], NO_FRACTION),
    ("", [(0.0, 4.0), (6.0, 7.0)], [(2.0, 10.0)], "add up over all pairs of both lists"),
    ("", [(0.0, 2.0)], [(1.0, 5.0), (7.0, 8.0)], APART),
    ("", [(3.0, 5.0)], [(0.0, 4.0), (2.0, 6.0)], MERGE),
    ("", [(0.0, 3.0), (1.0, 4.0)], [(2.0, 6.0)], MERGE),
    ("", [(1.0, 4.0)], [(0.0, 10.0), (2.0, 3.0)], NESTED),
    ("", [(0.0, 8.0), (1.0, 2.0)], [(5.0, 9.0)], NESTED),
    ("", [(1.0, 4.0)], [(0.0, 10.0), (2.0, 3.0), (5.0, 6.0)], SO_FAR),
    ("", [(0.0, 1.0)], [(0.0, 2.0), (1.0, 3.0), (2.5, 5.0)], SO_FAR),
    ("", [(8.0, 11.0), (0.0, 3.0)], [(9.0, 12.0), (1.0, 2.0), (2.0, 5.0)], IN_ORDER),
    ("", [(5.0, 7.0), (4.0, 6.0), (0.0, 1.0)], [(6.0, 9.0), (3.0, 6.5), (0.5, 2.0)], IN_ORDER),
    ("", [(0.0, 2.0), (2.0, 3.0)], [(1.0, 2.0), (2.0, 5.0)], "pairs that touch are merged like those that overlap"),
    ("nothing is hidden: ", [(0.0, 1.0)], [(1.0, 2.0)], "pairs that touch have no moment in common"),
    ("everything is hidden: ", [(0.0, 4.0)], [(1.0, 2.0), (1.5, 3.0)], MERGE),
    ("no computing: ", [], [(0.0, 1.0), (3.0, 4.0)], NO_COMPUTING),
    ("no communication: ", [(0.0, 1.0)], [], NOTHING_TRAVELS),
    ("nothing at all: ", [], [], NOTHING_TRAVELS),
    ("a collective of no length: ", [(0.0, 1.0)], [(0.5, 0.5)], NOTHING_TRAVELS),
)


def score(computing: Intervals, travelling: Intervals) -> float:
    total = length(union(travelling))
    return length(intersection(union(travelling), union(computing))) / total if total else 1.0


def check_overlap(answer: Any, world: World) -> None:
    if world.world_size > 1:
        return  # one rank knows it all
    for about, computing, travelling, likely in CASES:
        _check_score(answer, about, computing, travelling, likely)
    for about, scale, start, likely in (
        ("in microseconds, ", 1e-6, 0.0, NO_UNIT),
        ("late on the clock, ", 1e-3, 86_400.0, LATE_CLOCK),
    ):
        for _, computing, travelling, _ in CASES[:12]:
            moved: Lists = ([], [])
            for into, spans in zip(moved, (computing, travelling), strict=True):
                into += [(start + scale * a, start + scale * b) for a, b in spans]
            _check_score(answer, about, *moved, likely, 1e-6)
    many = [(float(7 * k % 101), 7 * k % 101 + 1.0 + k % 3) for k in range(60)]
    other = [(float(11 * k % 103), 11 * k % 103 + 0.5 + k % 2) for k in range(60)]
    _check_score(answer, "60 pairs in each list: ", many, other, IN_ORDER)


def _check_score(
    answer: Any, about: str, computing: Intervals, travelling: Intervals, likely: str, tolerance: float = 1e-9
) -> None:
    want, given = score(computing, travelling), (list(computing), list(travelling))
    call = f"{about}overlap({_shown(computing)}, {_shown(travelling)})"
    with in_case(answer, call, likely, OVERLAP_ERRORS):
        got = answer.overlap(*given)
    if not isinstance(got, Real) or isinstance(got, bool):
        raise Wrong(
            f"{call} is a {type(got).__name__}, not a number",
            forgot_to_return(got) or (AN_ITEM if hasattr(got, "item") else NO_FRACTION),
        )
    if not abs(float(got) - want) <= tolerance:
        plain = likely in (NO_FRACTION, MERGE, APART)
        found = plain and _which_slip(float(got), want, computing, travelling, tolerance)
        found = NOTHING_TRAVELS if math.isnan(got) else found or likely
        raise Wrong(f"{call} = {float(got):.6g}, expected {want:.6g}", found)
    if given != (computing, travelling):
        raise Wrong(f"{call}: the lists that were passed have changed", CALLERS)


def _shown(spans: Intervals) -> str:
    if len(spans) > 4:
        return f"{len(spans)} pairs"
    return "[" + ", ".join(f"({a:.9g}, {b:.9g})" for a, b in spans) + "]"


def _which_slip(got: float, want: float, computing: Intervals, travelling: Intervals, tolerance: float) -> str:
    """The step that leads from the right score to `got`; "" if none is known."""
    merged = union(computing), union(travelling)
    hidden, total, busy = length(intersection(*merged)), length(merged[1]), length(merged[0])
    if total == 0:
        return NOTHING_TRAVELS
    everything = length(union([*computing, *travelling]))
    pairs = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in travelling)
    halves = [sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in x for b in y) for x, y in (
        (computing, merged[1]), (merged[0], travelling))]  # fmt: skip
    summed = sum(b - a for a, b in travelling)
    shares = [length(intersection([pair], merged[0])) / (pair[1] - pair[0]) for pair in merged[1]]
    from_first_to_last = merged[1][-1][1] - merged[1][0][0]
    slips = [
        (1 - want, "that is the part in which the rank stands still: the score is the part that is hidden"),
        (100 * want, "a fraction from 0 to 1, not a percentage"),
        (hidden, "that is the hidden time itself: divide it by the time in which something travels"),
        (total, "that is the time in which something travels: of which part of it does the rank compute?"),
        (hidden / busy if busy else -1.0, "divided by the time that the rank computes: divide by the time in which "
         "something travels"),
        (hidden / everything, "divided by the time of the whole step: divide by the time in which something travels"),
        (hidden / from_first_to_last, "divided by the time from the first to the last pair: between them, nothing may "
         "travel for a while"),
        (sum(shares) / len(shares), "that is the mean of the pairs' fractions, in which a short pair counts as much as "
         "a long one: add up seconds, and divide once"),
        (total / everything, "nothing says yet whether the rank computes at the same time"),
        (min(1.0, busy / total), "it compares two lengths: what counts is the time in which *both* happen"),
    ]  # fmt: skip
    for value, likely in slips:
        if abs(got - value) <= max(tolerance, 1e-9) and abs(value - want) > 1e-6:
            return likely
    counted_twice = [up / down for up in (hidden, pairs, *halves) for down in (total, summed)]
    if any(abs(got - value) <= tolerance and abs(value - want) > 1e-6 for value in counted_twice):
        return MERGE
    if any(got == round(want, digits) for digits in range(1, 7)):
        return ROUNDED
    return MERGE if got > 1 + tolerance else ""


OVERLAP_STUB = '''\
from zerolab.lab.exercises import Todo

Pairs = list[tuple[float, float]]  # of (start, end), in seconds


def overlap(computing: Pairs, travelling: Pairs) -> float:
    """Of the time in which something travels, the part in which this rank computes: 0 to 1.

    Both lists are in any order. Pairs of one list may overlap, touch, or lie inside one
    another, and every moment counts once. 1.0 if nothing travels. The lists stay unchanged.
    """
    raise Todo("09.1")
'''

OVERLAP = """\
Pairs = list[tuple[float, float]]  # of (start, end), in seconds


def merged(spans):
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(computing: Pairs, travelling: Pairs) -> float:
    computing, travelling = merged(computing), merged(travelling)
    total = sum(end - start for start, end in travelling)
    hidden = sum(
        max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in computing for b in travelling
    )
    return hidden / total if total else 1.0
"""

OVERLAP_ERRORS = {
    "division by zero": NOTHING_TRAVELS,
    "index out of range": "a list may be empty: a step without communication, or a rank that computes nothing",
    "empty sequence": "a list may be empty: a step without communication, or a rank that computes nothing",
    "iterable argument is empty": "a list may be empty: a step without communication, or a rank that computes nothing",
    "does not support item assignment": "the pairs are tuples: put a new pair in place of the old one",
}


# ---------------------------------------------------------------------- 09.2


class Stop(nn.Module):
    """A unit of the check's model. It calls `look` in the middle of its forward, and of its backward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3 + number)
        self.back = nn.Linear(3 + number, 3)
        self.unused = nn.Parameter(torch.ones(5 + number))
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.look())
        return torch.tanh(self.back(y))


class Route(nn.Module):
    """Four blocks between two layers of the root unit, which come in the order of `path`."""

    def __init__(self, frozen: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(Stop(number) for number in range(4))
        self.last = nn.Linear(3, 1)
        self.path: tuple[int, ...] = STRAIGHT
        self.look: Callable[[], None] = lambda: None
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(((5 * torch.arange(param.numel()) + i) % 7 - 3.0).view(param.shape) / 8)
        for param in self.blocks[frozen].parameters() if frozen is not None else ():
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        x = self.first(x)
        for number in self.path:
            x = self.blocks[number](x)
        return self.last(x)


STRAIGHT = (2, 0, 3, 1)  # not the order in which the model lists them
OTHER = (2, 3, 1)
TWICE = (0, 1, 0, 2, 3)


@dataclass(frozen=True)
class Run:
    """Steps of one model. `steps`: (how, path, ahead) of each; `how` as in `_step`."""

    name: str
    steps: tuple[tuple[str, tuple[int, ...], int], ...]
    frozen: int | None = None
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)  # those that show something new: each step has many gathers


RUNS = (
    Run("one unit ahead", (("plain", STRAIGHT, 1),) * 2, world_sizes=(1, 2, 3, 4)),
    Run("one unit ahead, then more", tuple(("plain", STRAIGHT, ahead) for ahead in (1, 2, 9, 0)), world_sizes=(1,)),
    Run("two units ahead", (("plain", STRAIGHT, 2),) * 2, world_sizes=(2,)),
    Run("two forwards, then their backwards", (("two forwards", STRAIGHT, 2),) * 2, world_sizes=(2,)),
    Run("a block is used twice", tuple(("plain", TWICE, ahead) for ahead in (1, 1, 2)), world_sizes=(2,)),
    Run("a block is frozen", (("plain", STRAIGHT, 1),) * 2, frozen=3, world_sizes=(3,)),
    Run("the first micro-batch under no_sync()", (("no_sync", STRAIGHT, 1),) * 2, world_sizes=(3,)),
    Run(
        "the third step takes another way",
        tuple(("plain", path, 2) for path in (STRAIGHT, STRAIGHT, OTHER, STRAIGHT)),
        world_sizes=(3,),
    ),
)

WAITS = (
    "gather() waits until all of it has arrived, so the rank stands still for what it does not need yet: "
    "start_gather() returns at once, and the gather() of that unit's own turn waits"
)
LATE = (
    "it must be on its way *before* the unit computes: start it in pre_forward() and in pre_backward(). self.coming "
    "begins with the unit after this one. What is started after the unit has computed travels while nobody computes"
)
BOTH_WAYS = (
    "forward prefetches and this backward does not: self.coming holds what comes next there too, every time. Do the "
    "same in both"
)
FORWARD_TOO = (
    "backward prefetches and forward does not: self.coming holds what comes next there too, so do the same in both"
)
NO_GRAD = "a forward under no_grad is a pass like any other, and self.coming holds what comes next there too"
TOO_FEW = "self.ahead says how many: start the first self.ahead units of self.coming"
EVERY_TIME = (
    "an earlier call started what comes next, and this one did not: every call starts the first self.ahead units of "
    "self.coming, and neither the unit at work nor the root counts as one of them"
)
SETTING = "self.ahead is a setting, and it holds in every pass: read it, and count with a name of your own"
TOO_MANY = (
    "self.ahead is a budget, and every unit beyond it takes memory for its full parameters: start the first self.ahead "
    "units of self.coming"
)
ASSUMED = (
    "the order was assumed: blocks do not run in the order in which self.units lists them, and backward runs the other "
    "way round. self.coming has the order that was recorded"
)
NEED_FIRST = (
    "the link works through gathers in the order in which they are started, so the unit that is needed now comes "
    "first: unit.gather(), then the others"
)
NOT_WAITED = "start_gather() returns at once: unit.gather() waits for it, without sending anything twice"
NOT_GATHERED = "unit.gather() must come first, in pre_forward() and in pre_backward(): the first pass has no prefetch"
GATHERED_AGAIN = (
    "gathered, released and gathered again: unit.gather() waits for what is on its way and sends nothing twice"
)
GUESSED = (
    "gathered for nothing: self.coming is empty while nothing is known, in the first pass, and after a pass has "
    "departed from the one before. Then start nothing, and keep no order of your own"
)
LET_GO = "it is needed next, and its gather was in vain: each call releases `unit` alone, as Zero3's methods do"
STILL_THERE = "it was started after the last unit had been reached, and nobody needs it: self.coming is empty then"
KEPT = "Zero3's post_forward() and post_backward() release what is no longer needed: if you override them, call super()"
TOO_EARLY = "it was released while the unit still computes: Zero3 releases it when it is done"


def check_prefetch(answer: Any, world: World) -> None:
    cls = answer.MyPrefetch
    if not isinstance(cls, type) or not issubclass(cls, Recorded):
        raise Wrong("MyPrefetch is not a subclass of Recorded", "it must begin with `class MyPrefetch(Recorded):`")
    for run in (run for run in RUNS if world.world_size in run.world_sizes):
        with in_case(answer, run.name, "", PREFETCH_ERRORS):
            ours = _train(cls, run, world, looks=True)
        plain = _train(Recorded, run, world, looks=False)
        _compare(run, ours, plain)
    check_cases(answer, cls, world, PREFETCH_ERRORS)


class Eyes:
    """Knows what comes next in each pass, and looks at what is gathered. `looks` False: only writes the passes down."""

    def __init__(self, zero: Recorded, name: str, world: World, looks: bool) -> None:
        self.zero, self.name, self.world, self.looks = zero, name, world, looks
        self.routes: dict[str, list[Unit]] = {}
        self.prefetched: set[str] = set()  # the kinds of pass in which something was on its way at the right time
        self.passes: list[tuple[str, list[str], bool, list[str]]] = []  # kind, gathers, on route, visits
        self.blocks = [unit for unit in zero.units if unit not in zero.root]
        self.ahead = zero.ahead  # as the check has set it

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        self.kind, self.at_work = kind, list[Unit]()
        self.route, self.visits = self.routes.get(kind, []), list[Unit]()
        self.routes[kind], self.on_route, self.departed = self.visits, bool(self.route), False
        with ledger(self.zero) as book, watched(self.zero, self._before, self._after):
            self.book = book
            yield
        gathers = [call.unit for call in book.calls if call.op == "all_gather" and not call.control]
        self.passes.append((kind, gathers, not self.departed, [unit.name for unit in self.visits]))
        left = [unit.name for unit in self.blocks if holds_memory(unit)]
        if self.looks and left:
            raise Wrong(f"{self.name}: when {self.phase} is over, {_and(left)} {_are(left)} gathered", STILL_THERE)

    @property
    def phase(self) -> str:
        return self.kind.split(",")[0]

    @property
    def early(self) -> list[Unit]:
        """Blocks that are gathered, or being gathered, before the pass has come to them."""
        return [unit for unit in self.blocks if holds_memory(unit) and unit not in self.at_work]

    @property
    def coming(self) -> list[Unit]:
        return self.route[len(self.visits) :] if self.on_route else []

    def _before(self, point: str, unit: Unit) -> None:
        self.were_early = self.early
        if not point.startswith("pre"):
            return
        place = len(self.visits)
        follows = self.on_route and place < len(self.route) and self.route[place] is unit
        self.departed |= bool(self.route) and not follows
        self.on_route = follows
        self.visits.append(unit)
        self.was_there, self.issued = holds_memory(unit), len(self._gathers(unit))
        if unit not in self.at_work:
            self.at_work.append(unit)

    def _after(self, point: str, unit: Unit) -> None:
        if point.startswith("post"):
            if unit in self.at_work:
                self.at_work.remove(unit)
            if self.looks and holds_memory(unit) and unit in self.blocks and unit not in self.coming:
                raise Wrong(f"{self.name}: after {point}() {unit.name} is still gathered", KEPT)
        if not self.looks or point == "after_step":
            return
        gone = [other.name for other in self.were_early if other is not unit and not holds_memory(other)]
        if gone and self.on_route:
            raise Wrong(f"{self.name}: {point}() of {unit.name} released {_and(gone)}, gathered ahead", LET_GO)
        if point.startswith("pre"):
            seen = f"{self.name}: after {point}() of {unit.name}"
            if self.zero.ahead != self.ahead:
                raise Wrong(f"{seen} self.ahead is {self.zero.ahead}, and it was {self.ahead}", SETTING)
            if not holds_memory(unit):
                raise Wrong(f"{seen} its full parameters have no memory", NOT_GATHERED)
            if unit._state is FullState.GATHERING:
                raise Wrong(f"{seen} it is still being gathered", NOT_WAITED)
            if self.was_there and len(self._gathers(unit)) > self.issued:
                raise Wrong(f"{seen} it was gathered, and it was there or on its way before", GATHERED_AGAIN)
        self._check_budget(f"after {point}() of {unit.name}")
        self._passed()

    def _gathers(self, unit: Unit) -> list[Call]:
        return [call for call in self.book.calls if call.unit == unit.name and call.op == "all_gather"]

    def _passed(self) -> None:
        """So far this rank is right: if others wait for it later, its own mistake is told first."""
        with self.world.record():
            pass

    def _check_budget(self, when: str) -> None:
        early = [other.name for other in self.early]
        if len(early) > self.zero.ahead:
            done = [other.name for other in self.early if other in self.visits and other not in self.coming]
            seen = (
                f"{self.name}: {when} {_and(early)} {_are(early)} gathered ahead, and self.ahead is {self.zero.ahead}"
            )
            raise Wrong(seen, KEPT if done and len(done) == len(early) else TOO_MANY)

    def look(self, unit: Unit) -> None:
        """`unit` is in the middle of its work."""
        if not self.looks:
            return
        when = f"in the {self.phase} of {unit.name}"
        if not holds_memory(unit):
            raise Wrong(f"{self.name}: {when} its full parameters have no memory", TOO_EARLY)
        self._check_budget(when)
        wanted: list[Unit] = []
        for other in self.coming[: self.zero.ahead]:
            if other in self.at_work or other in wanted:
                break  # it is there, and will be released before it is needed again
            wanted += [other] * (other not in self.zero.root)
        missing = [other.name for other in wanted if not holds_memory(other)]
        if missing:
            there = [other.name for other in self.early]
            seen = f"{self.name}: {when} {_and(missing)} should be on {'its' if len(missing) == 1 else 'their'} way"
            raise Wrong(f"{seen}, and {_and(there) or 'nothing'} {_are(there)}", self._why_missing(wanted))
        waited = [other.name for other in wanted if other._state is FullState.GATHERED]
        if waited:
            raise Wrong(f"{self.name}: {when} {_and(waited)} {_are(waited)} there already, not on the way", WAITS)
        if wanted:
            self.prefetched.add(self.phase)
        self._passed()

    def _why_missing(self, wanted: list[Unit]) -> str:
        if any(unit not in wanted for unit in self.early):
            return ASSUMED
        if self.early:
            return TOO_FEW
        if self.kind != self.phase and self.phase in self.prefetched:
            return NO_GRAD
        if self.prefetched == {"forward"} and self.phase == "backward":
            return BOTH_WAYS
        if self.phase in self.prefetched:
            return EVERY_TIME
        return LATE if self.phase == "forward" else FORWARD_TOO if self.prefetched == {"backward"} else LATE


def _train(
    cls: type[Recorded], run: Run, world: World, looks: bool
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, list[str], bool, list[str]]]]:
    """Outputs and this rank's parameters after each step, and the gathers of every pass."""
    model = Route(run.frozen)
    zero = cls(model, units=[Stop])
    eyes = Eyes(zero, run.name, world, looks)
    blocks: Any = model.blocks
    model.look = lambda: eyes.look(zero.root[0])
    names = {unit.name: unit for unit in zero.units}
    for number, block in enumerate(blocks):
        unit = names[f"blocks.{number}"] if f"blocks.{number}" in names else _unit_of(zero, number)
        block.look = lambda unit=unit: eyes.look(unit)
    optimizer = SGD(model.parameters(), lr=2.0**-5, momentum=0.5)
    found: list[tuple[str, Tensor]] = []
    for step, (how, path, ahead) in enumerate(run.steps):
        model.path, zero.ahead, eyes.ahead = path, ahead, ahead
        for output in _step(zero, eyes, how, world, step):
            found.append((f"step {step + 1}, the output", output))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with eyes.watching("forward, without gradients"), torch.no_grad():
            found.append((f"step {step + 1}, the output after the step", model(_inputs(world, step))))
        if left := [unit.name for unit in zero.units if looks and holds_memory(unit)]:
            raise Wrong(f"{run.name}: between two steps {_and(left)} {_are(left)} gathered", STILL_THERE)
        found += [
            (f"step {step + 1}, this rank's slice of {name}", to_local(param).clone())
            for name, param in model.named_parameters()
        ]
    return found, eyes.passes


def _unit_of(zero: Recorded, number: int) -> Unit:
    return next(unit for unit in zero.units if unit.name.startswith(f"blocks.{number}"))


def _step(zero: Recorded, eyes: Eyes, how: str, world: World, step: int) -> list[Tensor]:
    """The forwards and backwards of one step."""
    batches = [_inputs(world, step), _inputs(world, step + 7)]
    outputs = []
    if how == "two forwards":
        for x in batches:
            with eyes.watching("forward"):
                outputs.append(zero.model(x))
        for output in outputs:
            with eyes.watching("backward"):
                (output**2).sum().backward()
    else:
        for number, x in enumerate(batches if how == "no_sync" else batches[:1]):
            with zero.no_sync() if how == "no_sync" and number == 0 else nullcontext():
                with eyes.watching("forward"):
                    outputs.append(zero.model(x))
                with eyes.watching("backward"):
                    (outputs[-1] ** 2).sum().backward()
    return [output.detach() for output in outputs]


def _inputs(world: World, step: int) -> Tensor:
    return torch.tensor([[1.0, 2.0], [world.rank + 1.0, step - 1.0]]) / 4


def _compare(run: Run, ours: Any, plain: Any) -> None:
    """Values bit for bit, and the gathers of each pass: as many as without prefetching, in the order of need."""
    for (kind, gathers, on_route, _), (_, needed, _, _) in zip(ours[1], plain[1], strict=True):
        phase = kind.split(",")[0]
        extra, missing = Counter(gathers) - Counter(needed), Counter(needed) - Counter(gathers)
        if missing:
            raise Wrong(f"{run.name}: in {phase}, {_and(list(missing))} was not gathered by the engine", NOT_GATHERED)
        if extra:
            unit, many = next(iter(extra.items()))
            allowed = 0 if on_route else max(ahead for _, _, ahead in run.steps)
            if sum(extra.values()) > allowed:
                times = gathers.count(unit)
                seen = f"{run.name}: in a {phase}, {unit} was gathered {times} times, not {times - many}"
                raise Wrong(seen, GUESSED)
        elif gathers != needed and len(set(needed)) == len(needed) and on_route:
            at = next(i for i, (got, want) in enumerate(zip(gathers, needed, strict=True)) if got != want)
            seen = f"{run.name}: in a {phase}, {gathers[at]} was started before {needed[at]}, which is needed first"
            raise Wrong(seen, NEED_FIRST)
    for (what, got), (_, want) in zip(ours[0], plain[0], strict=True):
        if not torch.equal(got, want):
            seen = f"{run.name}: {what} differs from what Zero3 computes without prefetching"
            raise Wrong(seen, "prefetching must not change a single bit: was something released, or not waited for?")


def _and(names: list[str]) -> str:
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


PREFETCH_STUB = '''\
from zerolab import Unit
from zerolab.lab import Recorded
from zerolab.lab.exercises import Todo


class MyPrefetch(Recorded):
    """ZeRO-3 with a prefetch schedule.

    self.coming: the units that come next in this pass, in order, as the previous pass of
        the same kind (forward, backward) came to them; empty where that is not known.
    self.ahead: how many units may be there, or on their way, before the pass comes to them.
    unit.start_gather() returns at once, and does nothing if the unit is there or on its
    way. unit.gather() waits.
    """

    def pre_forward(self, unit: Unit) -> None:
        """Runs before the forward of `unit`, which needs its full parameters now."""
        raise Todo("09.2")

    def pre_backward(self, unit: Unit) -> None:
        """Runs before the backward of `unit`, which needs its full parameters now."""
        raise Todo("09.2")
'''

PREFETCH = """\
from zerolab import Unit
from zerolab.lab import Recorded


class MyPrefetch(Recorded):
    def pre_forward(self, unit: Unit) -> None:
        unit.gather()
        self.start_ahead()

    def pre_backward(self, unit: Unit) -> None:
        unit.gather()
        self.start_ahead()

    def start_ahead(self) -> None:
        for unit in self.coming[: self.ahead]:
            unit.start_gather()
"""

PREFETCH_ERRORS = {
    "list index out of range": "self.coming is empty in the first pass, and at the end of every pass: a slice, "
    "self.coming[: self.ahead], may be shorter than you ask for",
    "pop from empty list": "self.coming is empty in the first pass, and at the end of every pass",
    "out of bounds for storage of size 0": NOT_GATHERED,
    "its data is not allocated": NOT_GATHERED,
    "left no unit.bucket.grad": "nothing was reduced: super().post_backward(unit) is missing",
    "'Unit' object has no attribute": "a Unit has gather(), start_gather() and release(); self has coming and ahead",
    "takes 1 positional argument but 2 were given": "the engine passes the unit: def pre_forward(self, unit)",
    "object has no attribute 'start_gather'": "self.coming is a list: start_gather() belongs to each unit in it",
    "is not in list": "the order was assumed: self.coming has what comes next",
}

EXERCISES = [
    Exercise(
        id="09.1",
        title="an overlap score",
        difficulty=1,
        section="A score from 0 to 1",
        check=check_overlap,
        stub=OVERLAP_STUB,
        reference=OVERLAP,
        hints=(
            "Merge the pairs of each list first. Go through sorted(spans): a pair that begins before the last merged "
            "one ends becomes part of it.",
            "The merged pair ends at max(its end, the other's end), since a pair may lie inside another.",
            "Two merged pairs have max(0, min(ends) - max(starts)) seconds in common. Add that up over all pairs of "
            "pairs, and divide by the length of what travels, if there is any.",
        ),
        exports=("overlap",),
        errors=OVERLAP_ERRORS,
    ),
    Exercise(
        id="09.2",
        title="the prefetch schedule",
        difficulty=3,
        section="Write the schedule",
        check=check_prefetch,
        stub=PREFETCH_STUB,
        reference=PREFETCH,
        hints=(
            "Both methods do the same: first what is needed now, then what is needed next.",
            "unit.gather() waits until `unit` is there. If it was started earlier, nothing is sent again.",
            "Then: for other in self.coming[: self.ahead]: other.start_gather()",
        ),
        exports=("MyPrefetch",),
        errors=PREFETCH_ERRORS,
    ),
]
