"""Lesson 09: how much of the communication is hidden, and which gather to start when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from numbers import Real
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.engine.slices import to_local
from zerolab.engine.unit import FullState, Unit
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Enough, Play, Scene
from zerolab.lab.exercises.stages import Stage, battery_of
from zerolab.lab.lessons.lesson09.recorded import Recorded, holds_memory
from zerolab.measure.spans import Intervals
from zerolab.measure.traffic import ledger
from zerolab.measure.watch import watched

# ---------------------------------------------------------------------- 09.1

Lists = tuple[Intervals, Intervals]

APART: list[Lists] = [  # no pair touches another of its list
    ([(0.0, 10.0)], [(7.0, 15.0)]),
    ([(2.0, 9.0)], [(1.0, 11.0)]),
    ([(0.0, 4.0), (6.0, 7.0)], [(2.0, 10.0)]),
    ([(0.0, 2.0)], [(1.0, 5.0), (7.0, 8.0)]),
]
TOGETHER: list[Lists] = [  # pairs that overlap, touch, or lie in one another
    ([(3.0, 5.0)], [(0.0, 4.0), (2.0, 6.0)]),
    ([(0.0, 3.0), (1.0, 4.0)], [(2.0, 6.0)]),
    ([(1.0, 4.0)], [(0.0, 10.0), (2.0, 3.0)]),
    ([(0.0, 8.0), (1.0, 2.0)], [(5.0, 9.0)]),
    ([(1.0, 4.0)], [(0.0, 10.0), (2.0, 3.0), (5.0, 6.0)]),
    ([(0.0, 1.0)], [(0.0, 2.0), (1.0, 3.0), (2.5, 5.0)]),
    ([(0.0, 2.0), (2.0, 3.0)], [(1.0, 2.0), (2.0, 5.0)]),
]
UNORDERED: list[Lists] = [
    ([(8.0, 11.0), (0.0, 3.0)], [(9.0, 12.0), (1.0, 2.0), (2.0, 5.0)]),
    ([(5.0, 7.0), (4.0, 6.0), (0.0, 1.0)], [(6.0, 9.0), (3.0, 6.5), (0.5, 2.0)]),
]
BOUNDS: list[Lists] = [
    ([(0.0, 1.0)], [(1.0, 2.0)]),
    ([(0.0, 4.0)], [(1.0, 2.0), (1.5, 3.0)]),
    ([], [(0.0, 1.0), (3.0, 4.0)]),
    ([(0.0, 1.0)], []),
    ([], []),
    ([(0.0, 1.0)], [(0.5, 0.5)]),
    ([(0.5, 0.5)], [(0.0, 1.0)]),
    ([(-3.0, -1.0)], [(-2.0, 1.0)]),
]


def moved(lists: Lists, start: float, scale: float) -> Lists:
    computing, travelling = ([(start + scale * a, start + scale * b) for a, b in spans] for spans in lists)
    return computing, travelling


def any_lists(seed: int) -> Lists:
    """Up to 40 pairs in each list, in any order, many of them with ends in common."""
    random = Random(seed)
    computing, travelling = (
        [
            (float(start := random.randrange(100)), float(start + random.randrange(12)))
            for _ in range(random.randrange(40))
        ]
        for _ in range(2)
    )
    return computing, travelling


def overlaps(cases: list[Lists]) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        for computing, travelling in cases:
            name = f"overlap({_shown(computing)}, {_shown(travelling)})"
            given = (list(computing), list(travelling))
            with play.event(name, uses=()):
                result = play.code.overlap(*given)
            number = isinstance(result, Real) and not isinstance(result, bool)
            play.see(name, float(result) if number else result)
            play.see("the lists that were passed", given)

    return act


def _shown(spans: Intervals) -> str:
    if len(spans) > 4:
        return f"{len(spans)} pairs"
    return "[" + ", ".join(f"({a:.9g}, {b:.9g})" for a, b in spans) + "]"


ONCE = "merge the pairs of each list first, in the order of their starts, so that every moment counts once"
PLAIN = APART + TOGETHER + UNORDERED

OVERLAP_BATTERY = (  # one rank knows it all
    Scene("", overlaps(PLAIN), sizes=(1,)),
    Scene("at the bounds", overlaps(BOUNDS), "1.0 if nothing travels, and 0.0 if nothing of it is hidden", sizes=(1,)),
    Scene(
        "in microseconds",
        overlaps([moved(lists, 0.0, 1e-6) for lists in PLAIN]),
        "the score is a ratio and has no unit: nothing may depend on whether times are seconds or microseconds",
        sizes=(1,),
    ),
    Scene(
        "late on the clock",
        overlaps([moved(lists, 86_400.0, 1e-3) for lists in PLAIN]),
        "a clock may have run for days: only differences of times count, and float32 has too few digits for them",
        sizes=(1,),
    ),
    Scene("with many pairs", overlaps([any_lists(seed) for seed in range(12)]), ONCE, sizes=(1,)),
)

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


class Passes:
    """Forwards and backwards of one engine, and what is gathered, or on its way, while each unit works.

    free: a unit is used twice. Then it is up to the answer whether a unit that is at work counts as ahead.
    """

    def __init__(self, play: Play, frozen: int | None = None, free: bool = False) -> None:
        self.play, self.model, self.free = play, Route(frozen), free
        cls = play.code.MyPrefetch
        with play.event("building the engine"):
            is_one = isinstance(cls, type) and issubclass(cls, Recorded)
            play.see("MyPrefetch is a class, and a Recorded", is_one)
            if not is_one:
                raise Enough
            self.zero: Any = cls(self.model, units=[Stop])
        self.blocks = [unit for unit in self.zero.units if unit not in self.zero.root]
        self.optimizer = SGD(self.model.parameters(), lr=2.0**-5, momentum=0.5)
        blocks: Any = self.model.blocks
        for number, block in enumerate(blocks):
            unit = next(unit for unit in self.zero.units if unit.name.startswith(f"blocks.{number}"))
            block.look = lambda unit=unit: self._look(unit)

    def step(self, number: int, path: tuple[int, ...], ahead: int, how: str = "") -> None:
        play, zero = self.play, self.zero
        self.model.path, zero.ahead, self.ahead = path, ahead, ahead
        batches = [_inputs(play.rank, number), _inputs(play.rank, number + 7)][: 2 if how else 1]
        if how == "two forwards":
            outputs = [self._forward(x, f" {i}") for i, x in enumerate(batches)]
            for i, output in enumerate(outputs):
                self._backward(output, f" {i}")
        else:
            for i, x in enumerate(batches):
                with zero.no_sync() if i < len(batches) - 1 else nullcontext():
                    self._backward(self._forward(x, f" {i}"), f" {i}")
        with play.event("the optimizer's step"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        with torch.no_grad():
            self._forward(batches[0], " without gradients")
        for name, param in self.model.named_parameters():
            play.see(f"this rank's slice of {name}", to_local(param.detach()))

    def _forward(self, x: Tensor, when: str) -> Tensor:
        with self._pass(f"forward{when}"):
            output = self.model(x)
        self.play.see("the output", output)
        return output

    def _backward(self, output: Tensor, when: str) -> None:
        with self._pass(f"backward{when}"):
            (output**2).sum().backward()

    @contextmanager
    def _pass(self, name: str) -> Iterator[None]:
        self.at_work: list[Unit] = []
        with (
            self.play.event(name, slack=64.0),
            ledger(self.zero) as book,
            watched(self.zero, self._before, self._after),
        ):
            yield
        gathers = [call.unit for call in book.calls if call.op == "all_gather" and not call.control]
        if self.free:
            self.play.at_most("gathers", len(gathers))
        else:
            self.play.see("what was gathered, in order", gathers)
        self.play.see("units that are still gathered", [unit.name for unit in self.blocks if holds_memory(unit)])

    def _before(self, point: str, unit: Unit) -> None:
        if point.startswith("pre") and unit not in self.at_work:
            self.at_work.append(unit)

    def _after(self, point: str, unit: Unit) -> None:
        when = f"after {point}() of {unit.name}"
        if point.startswith("post"):
            self.at_work = [other for other in self.at_work if other is not unit]
        if point == "after_step":
            return
        self.play.see(f"{when}, self.ahead", self.zero.ahead)
        if point.startswith("pre"):
            self._need(unit, f"{when}, its parameters are there")
        self.play.see(f"{when}, no more than self.ahead units are gathered ahead", len(self._early()) <= self.ahead)

    def _early(self) -> dict[str, str]:
        """The blocks that are there, or on their way, before the pass has come to them."""
        early = [unit for unit in self.blocks if holds_memory(unit) and unit not in self.at_work]
        return {unit.name: "on its way" if unit._state is FullState.GATHERING else "there" for unit in early}

    def _need(self, unit: Unit, what: str) -> None:
        there = holds_memory(unit) and unit._state is not FullState.GATHERING
        self.play.see(what, there)
        if not there:
            raise Enough

    def _look(self, unit: Unit) -> None:
        """`unit` is in the middle of its work."""
        self._need(unit, f"{unit.name} has its parameters while it works")
        early = self._early()
        if not self.free:
            self.play.see(f"gathered ahead while {unit.name} works", sorted(early))
            self.play.see(f"how far that is while {unit.name} works", [early[name] for name in sorted(early)])


def _inputs(rank: int, step: int) -> Tensor:
    return torch.tensor([[1.0, 2.0], [rank + 1.0, step - 1.0]]) / 4


def route(*steps: tuple[tuple[int, ...], int], how: str = "", frozen: int | None = None) -> Callable[[Play], None]:
    """Steps of one engine: which way each takes, and how many units may be ahead."""

    def act(play: Play) -> None:
        passes = Passes(play, frozen, free=any(len(set(path)) < len(path) for path, _ in steps))
        for number, (path, ahead) in enumerate(steps):
            passes.step(number, path, ahead, how)

    return act


PREFETCH_BATTERY = (
    Scene("", route((STRAIGHT, 1), (STRAIGHT, 1), (STRAIGHT, 2)), sizes=(1, 2, 4)),
    Scene(
        "with other budgets",
        route(*((STRAIGHT, ahead) for ahead in (1, 2, 9, 0))),
        "self.ahead says how many: start the first self.ahead units of self.coming",
        sizes=(1,),
    ),
    Scene(
        "with two forwards before their backwards", route((STRAIGHT, 2), (STRAIGHT, 2), how="two forwards"), sizes=(2,)
    ),
    Scene("with a block that is used twice", route((TWICE, 1), (TWICE, 1), (TWICE, 2)), sizes=(2,), loose=1e-6),
    Scene("with a frozen block", route((STRAIGHT, 1), (STRAIGHT, 1), frozen=3), sizes=(3,)),
    Scene("with micro-batches under no_sync()", route((STRAIGHT, 1), (STRAIGHT, 1), how="no_sync"), sizes=(1,)),
    Scene(
        "with a third step that takes another way",
        route((STRAIGHT, 2), (STRAIGHT, 2), (OTHER, 2), (STRAIGHT, 2)),
        "self.coming is empty while nothing is known: then start nothing, and keep no order of your own",
        sizes=(1, 3),
    ),
    *battery_of(Stage("MyPrefetch", Recorded, ()), only=("with odd shapes", "in bfloat16, without a root unit")),
)

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


EXERCISES = [
    Exercise(
        id="09.1",
        title="an overlap score",
        difficulty=1,
        section="A score from 0 to 1",
        battery=OVERLAP_BATTERY,
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
    ),
    Exercise(
        id="09.2",
        title="the prefetch schedule",
        difficulty=3,
        section="Write the schedule",
        battery=PREFETCH_BATTERY,
        stub=PREFETCH_STUB,
        reference=PREFETCH,
        hints=(
            "Both methods do the same: first what is needed now, then what is needed next.",
            "unit.gather() waits until `unit` is there. If it was started earlier, nothing is sent again.",
            "Then: for other in self.coming[: self.ahead]: other.start_gather()",
        ),
        exports=("MyPrefetch",),
    ),
]
