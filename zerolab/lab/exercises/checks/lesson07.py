"""Lesson 07: the backward of ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import SGD

import zerolab
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.checks.lesson06 import (
    ALL_AT_ONCE,
    ALONE,
    BY_HAND,
    DIED,
    MEMBERS,
    SIZE_0,
    Block,
    Forward,
    Model,
    check_class,
    check_finished,
    check_flag,
    check_training,
    full_bytes,
    in_words,
    inputs,
)
from zerolab.lab.exercises.checks.training import check_cases
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.measure.traffic import Ledger, ledger
from zerolab.measure.watch import watched

AGAIN = (
    "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also in eval "
    "mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of size 0)"
)
TOO_EARLY = f"it was gathered, but released before its backward was over. {ALONE}"
LET_GO = "it was gathered, and pre_backward() released it: backward needs it now (gather() keeps what is there)"
NEVER = "post_backward() does not release the full parameters, which backward no longer needs"
LATE = "released after the reduction started, so both need memory at once: first unit.release(), then super()"
NOT_ALWAYS = "post_backward() also runs when nothing is reduced (no_sync, frozen units): release then too"
ROOT = "the root stays from its forward to its reduction, and no longer: post_backward() must release it too"
TWICE = (
    "after two forwards, the first backward releases it: pre_backward() must gather every unit, the root too (gather() "
    "does nothing if it is there)"
)
OLD = (
    "the optimizer has changed the shards, so gathered parameters are out of date: after_step() must release them. "
    "(unit.gathered is False by then, but their memory is still there)"
)
STALE = (
    "self.stale is ZeRO-2's, whose after_step() fills it: the next forward would begin by gathering all units in it. "
    "Here each is gathered when its turn comes, so unit.release() is all"
)
MEDDLED = (
    "units come and go as they should, so it is the gradient: super().post_backward(unit) takes the mean of "
    "unit.bucket.full as backward has left it"
)
ALL_REDUCED = "gathered once more after its reduction, which makes an all-reduce of it: a rank needs only its shard"
ONCE = "post_backward() must reduce a unit once, with self.reduce(unit), as super().post_backward(unit) does"
FULL_GRAD = "the full gradient is kept: super().post_backward(unit) reduces it and keeps only this rank's slice"


class Eyes:
    """Looks at what is gathered at each of the engine's calls during backward."""

    def __init__(self, zero: Any, book: Ledger, world: World, again: str = AGAIN) -> None:
        self.zero, self.book, self.world, self.again = zero, book, world, again  # a Zero2, whose reduce() is replaced
        self.most = 3 if again is AGAIN else len(zero.units)  # after two forwards, units stay for the other backward
        self.blocks = [unit for unit in zero.units if unit not in zero.root]
        self.late: set[str] = set()  # units that were still gathered when their reduction began
        self.open: list[Unit] = []  # those whose backward has begun and is not over
        self.kept: set[str] = set()  # units that were gathered when backward reached them
        reduce = zero.reduce

        def reduce_and_look(unit: Unit) -> Any:
            if full_bytes(unit):
                self.late.add(unit.name)
            return reduce(unit)

        zero.reduce = reduce_and_look

    def before(self, point: str, unit: Unit) -> None:
        if point == "pre_backward" and full_bytes(unit):
            self.kept.add(unit.name)
        if point == "post_backward" and not full_bytes(unit):
            raise Wrong(f"backward has passed {unit.name}, but its full parameters have no memory", TOO_EARLY)

    def after(self, point: str, unit: Unit) -> None:
        held = full_bytes(unit)
        if point == "post_backward":
            self.open = [other for other in self.open if other is not unit]
            if gone := [other.name for other in self.open if not full_bytes(other)]:
                seen = f"post_backward() of {unit.name} released {in_words(gone)}, whose backward is not over"
                raise Wrong(seen, ALONE)
        if point == "pre_backward":
            self.open.append(unit)
            if not held:
                calls = [c for c in self.book.calls if c.unit == unit.name and c.phase == "backward"]
                seen = f"backward reaches {unit.name}, but its full parameters have no memory"
                likely = TOO_EARLY if calls else LET_GO if unit.name in self.kept else self.again
                raise Wrong(seen, likely)
            check_finished(unit, "when backward needs it")
            gathered = [other.name for other in self.blocks if full_bytes(other)]
            if len(gathered) > self.most:
                raise Wrong(f"when backward reaches {unit.name}, {in_words(gathered)} are gathered", ALL_AT_ONCE)
        check_flag(unit)
        if point == "post_backward":
            if held:
                likely = ROOT if unit not in self.blocks else NEVER if unit.trainable else NOT_ALWAYS
                raise Wrong(f"after post_backward() {unit.name} still holds {held} bytes of full parameters", likely)
            if unit.name in self.late:
                raise Wrong(f"{unit.name} is still gathered when its gradient is reduced", LATE)
        self.world.came_on()


def watch(zero: zerolab.Zero2, world: World, loss: Callable[[], Tensor], again: str = AGAIN) -> Ledger:
    """The calls of `loss` and of its backward. Raises Wrong if that gathers or releases at the wrong time."""
    with ledger(zero) as book:
        eyes = Eyes(zero, book, world, again)
        with watched(zero, eyes.before, eyes.after):
            loss().backward()
    return book


def check_gone(zero: zerolab.Zero2, when: str, likely: str) -> None:
    kept = [unit.name for unit in zero.units if full_bytes(unit)]
    if kept:
        raise Wrong(f"{when} the full parameters of {in_words(kept)} are in memory", likely)


def check_calls(zero: zerolab.Zero2, book: Ledger) -> None:
    """Two gathers of each block (forward, backward), one of the root, and one reduce-scatter of each unit."""
    for unit in zero.units:
        ops = [call.op for call in book.calls if call.unit == unit.name and not call.control]
        gathers, reductions = ops.count("all_gather"), len(ops) - ops.count("all_gather")
        want = 1 if unit in zero.root else 2
        if gathers > want:
            likely = "more traffic than 3Ψ - Ψ_root: in backward, gather each block once and the root not at all"
            if reductions and ops[-1] == "all_gather":
                likely = ALL_REDUCED
            raise Wrong(f"{unit.name} was gathered {gathers} times in a step, not {want}", likely)
        if reductions != 1:
            raise Wrong(f"{unit.name}: {reductions} reductions in a step", ONCE)


def check_backward(answer: Any, world: World) -> None:
    check_class(answer.MyZero3, "MyZero3", ("pre_backward", "post_backward", "after_step"))
    cls = type("Zero3", (answer.MyZero3, Forward), {"stage": 3})
    zero = cls(Model(), units=[Block])
    optimizer = SGD(zero.model.parameters(), lr=0.5)
    check_gone(
        zero, "before the first forward", "optimizer_params() belongs to the forward half (06.2): leave it alone"
    )

    book = watch(zero, world, lambda: zero.model(inputs(world, 0)).sum())
    check_gone(zero, "when backward has returned,", NEVER)
    check_calls(zero, book)
    for unit in zero.units:
        for param in unit.params:
            held = 0 if param.grad is None else param.grad.untyped_storage().size()
            if held > unit.layout.shard_size * 4:
                raise Wrong(f"{unit.name}: a gradient is a view of {held} bytes, more than a shard has", FULL_GRAD)

    zero.model(inputs(world, 0))  # the root stays for a backward that never comes
    optimizer.step()
    check_gone(zero, "after the optimizer's step", OLD)
    if zero.stale:
        units = "1 unit is" if len(zero.stale) == 1 else f"{len(zero.stale)} units are"
        raise Wrong(f"after the optimizer's step {units} marked for the next forward to begin with", STALE)

    optimizer.zero_grad()
    with zero.no_sync(), ledger(zero) as book:
        zero.model(inputs(world, 1)).sum().backward()
    if any(call.op != "all_gather" and not call.control for call in book.calls):
        raise Wrong("a gradient was reduced inside no_sync()", IGNORED)
    check_gone(zero, "after a backward under no_sync", NOT_ALWAYS)
    zero.model(inputs(world, 1)).sum().backward()

    part_frozen = Model().eval()
    part_frozen.blocks[1].requires_grad_(False)
    watch(cls(part_frozen, units=[Block]), world, lambda: part_frozen(inputs(world, 0)).sum())
    check_two_forwards(cls(Model(), units=[Block]), world)
    check_training(cls(Model(), units=[Block]), world, lambda: MEDDLED)
    check_cases(answer, cls, world, ERRORS)


IGNORED = "no_sync() was ignored: reduce only if self.reduces(unit), as super().post_backward() does"


def check_two_forwards(zero: Any, world: World) -> None:
    outputs = [zero.model(inputs(world, i)) for i in (0, 1)]
    for output in outputs:
        watch(zero, world, output.sum, TWICE)
    check_gone(zero, "after two forwards and two backwards", NEVER)


BACKWARD_STUB = '''\
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero3(zerolab.Zero2):
    def pre_backward(self, unit: Unit) -> None:
        """Runs before the backward of `unit`, which needs its full parameters."""
        raise Todo("07.1")

    def post_backward(self, unit: Unit) -> None:
        """Backward has passed `unit`: release its parameters, and do what ZeRO-2 does.

        In which order? The reduction needs memory.
        """
        raise Todo("07.1")

    def after_step(self, unit: Unit) -> None:
        """The optimizer has changed the shards: what is still gathered is out of date."""
        raise Todo("07.1")
'''

BACKWARD = """\
import zerolab
from zerolab import Unit


class MyZero3(zerolab.Zero2):
    def pre_backward(self, unit: Unit) -> None:
        unit.gather()

    def post_backward(self, unit: Unit) -> None:
        unit.release()
        super().post_backward(unit)

    def after_step(self, unit: Unit) -> None:
        unit.release()
"""


ERRORS = BY_HAND | {
    "'NoneType' object is not subscriptable": "unit.bucket.full is gone, it was reduced before: post_backward() must "
    "reduce a unit once",
    "'Unit' object has no attribute": MEMBERS,
    "takes 1 positional argument but 2 were given": "the engine passes the unit: def pre_backward(self, unit)",
    "SIGSEGV": DIED,
    SIZE_0: AGAIN,
    "its data is not allocated": AGAIN,
    "left no unit.bucket.grad": "nothing was reduced: super().post_backward(unit) is missing",
}

EXERCISES = [
    Exercise(
        id="07.1",
        title="the backward of ZeRO-3",
        difficulty=3,
        section="ZeRO-3's backward as a class",
        check=check_backward,
        stub=BACKWARD_STUB,
        reference=BACKWARD,
        hints=(
            "Each method is one or two lines, from unit.gather(), unit.release() and super().post_backward(unit).",
            "post_backward(): backward no longer needs the parameters, so release them first; then "
            "super().post_backward(unit) reduces the gradient and keeps this rank's slice.",
            "pre_backward(): unit.gather(). after_step(): unit.release(), not super().after_step(unit).",
        ),
        exports=("MyZero3",),
        extends="Zero3",
        errors=ERRORS,
    ),
]
