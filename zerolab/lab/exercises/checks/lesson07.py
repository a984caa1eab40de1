"""Lesson 07: the backward of ZeRO-3."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD

import zerolab
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.catalogue import Exercise, World, Wrong, edit
from zerolab.lab.exercises.checks.lesson06 import (
    ALL_AT_ONCE,
    DIED,
    MEMBERS,
    SIZE_0,
    Block,
    Forward,
    Model,
    check_class,
    check_flag,
    check_training,
    in_words,
    inputs,
    whole_bytes,
)
from zerolab.measure.ledger import Ledger, ledger
from zerolab.measure.watch import watched

AGAIN = "post_forward() let it go: pre_backward() must gather it again (torch would say: storage of size 0)"
TOO_EARLY = "it was there, and was released before its backward was over"
LET_GO = "it was there, and pre_backward() let it go: backward needs it now. What is there, gather() leaves"
NEVER = "post_backward() does not release the whole parameters, of which backward has no more need"
LATE = "released after the reduction was started, so both need memory at once: first unit.release(), then super()"
NOT_ALWAYS = "post_backward() is also called where nothing is reduced (under no_sync, or frozen): release there too"
ROOT = "the root stays from its forward to its reduction, and no longer: post_backward() must release it too"
OLD = "the optimizer has changed the shards, so what is gathered is old: after_step() must release it"
STALE = "Zero2.after_step() puts units in self.stale, all of which are gathered when the next forward begins"
WHOLE_GRAD = "the whole gradient is kept: super().post_backward(unit) reduces it, and keeps this rank's slice"


class Eyes:
    """Looks at what is gathered at each of the engine's calls in a backward."""

    def __init__(self, zero: zerolab.Zero2, book: Ledger) -> None:
        self.zero, self.book = zero, book
        self.blocks = [unit for unit in zero.units if unit not in zero.root]
        self.late: set[str] = set()  # units that were still whole when their reduction began
        self.kept: set[str] = set()  # units that were there when backward came to them
        reduce = zero.reduce

        def reduce_and_look(unit: Unit) -> Any:
            if whole_bytes(unit):
                self.late.add(unit.name)
            return reduce(unit)

        zero.reduce = reduce_and_look

    def before(self, point: str, unit: Unit) -> None:
        if point == "pre_backward" and whole_bytes(unit):
            self.kept.add(unit.name)
        if point == "post_backward" and not whole_bytes(unit):
            raise Wrong(f"backward has gone through {unit.name}, whose whole parameters have no memory", TOO_EARLY)

    def after(self, point: str, unit: Unit) -> None:
        held = whole_bytes(unit)
        if point == "pre_backward":
            if not held:
                calls = [c for c in self.book.calls if c.unit == unit.name and c.phase == "backward"]
                seen = f"backward begins with {unit.name}, and its whole parameters have no memory"
                likely = TOO_EARLY if calls else LET_GO if unit.name in self.kept else AGAIN
                raise Wrong(seen, likely)
            gathered = [other.name for other in self.blocks if whole_bytes(other)]
            if len(gathered) > 3:
                raise Wrong(f"when backward comes to {unit.name}, {in_words(gathered)} are gathered", ALL_AT_ONCE)
        check_flag(unit)
        if point == "post_backward":
            if held:
                likely = NEVER if unit in self.blocks else ROOT
                raise Wrong(f"after post_backward() {unit.name} still holds {held} bytes of whole parameters", likely)
            if unit.name in self.late:
                raise Wrong(f"{unit.name} is still whole when its gradient is reduced", LATE)


def check_gone(zero: zerolab.Zero2, when: str, likely: str) -> None:
    kept = [unit.name for unit in zero.units if whole_bytes(unit)]
    if kept:
        raise Wrong(f"{when} the whole parameters of {in_words(kept)} are there", likely)


def check_calls(zero: zerolab.Zero2, book: Ledger) -> None:
    """One gather of each block in forward and one in backward, one of the root; one reduce-scatter of each unit."""
    for unit in zero.units:
        ops = [call.op for call in book.calls if call.unit == unit.name and not call.control]
        gathers, reductions = ops.count("all_gather"), len(ops) - ops.count("all_gather")
        want = 1 if unit in zero.root else 2
        if gathers > want:
            likely = "more traffic than 3Ψ - Ψ_root: gather each block once in backward, and the root not at all"
            raise Wrong(f"{unit.name} was gathered {gathers} times in a step, not {want}", likely)
        if reductions != 1:
            raise Wrong(f"{unit.name}: {reductions} reductions in a step", "post_backward() reduces a unit once")


def check_backward(answer: Any, world: World) -> None:
    check_class(answer.MyZero3, "MyZero3", ("pre_backward", "post_backward", "after_step"))
    cls = type("Zero3", (answer.MyZero3, Forward), {"stage": 3})
    zero = cls(Model(), units=[Block])
    optimizer = SGD(zero.model.parameters(), lr=0.5)
    check_gone(zero, "before the first forward", "optimizer_params() is the forward's matter (06.2): leave it alone")

    with ledger(zero) as book:
        eyes = Eyes(zero, book)
        with watched(zero, eyes.before, eyes.after):
            zero.model(inputs(world, 0)).sum().backward()
    check_gone(zero, "when backward has returned,", NEVER)
    check_calls(zero, book)
    for unit in zero.units:
        for param in unit.params:
            held = 0 if param.grad is None else param.grad.untyped_storage().size()
            if held > unit.layout.shard_size * 4:
                raise Wrong(f"{unit.name}: a gradient is a view of {held} bytes, where a shard has fewer", WHOLE_GRAD)

    zero.model(inputs(world, 0))  # the root stays for a backward that does not come
    optimizer.step()
    check_gone(zero, "after the optimizer's step", OLD)
    if zero.stale:
        raise Wrong(f"after the optimizer's step {len(zero.stale)} units are in self.stale", STALE)

    optimizer.zero_grad()
    with zero.no_sync():
        zero.model(inputs(world, 1)).sum().backward()
    check_gone(zero, "after a backward under no_sync", NOT_ALWAYS)
    zero.model(inputs(world, 1)).sum().backward()
    check_training(cls(Model(), units=[Block]), world)


BACKWARD_STUB = '''\
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero3(zerolab.Zero2):
    def pre_backward(self, unit: Unit) -> None:
        """Backward has come to `unit`: its whole parameters must be there."""
        raise Todo("07.1")

    def post_backward(self, unit: Unit) -> None:
        """Backward has passed `unit`: let its parameters go, and do what ZeRO-2 does with the gradient.

        In which order? The reduction needs memory.
        """
        raise Todo("07.1")

    def after_step(self, unit: Unit) -> None:
        """The optimizer has changed the shards: what is still gathered is old."""
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

BACKWARD_BY_HAND = """\
from zerolab import Zero2


class MyZero3(Zero2):
    def pre_backward(self, unit):
        if not unit.gathered:
            unit.start_gather()
            unit.gather()

    def post_backward(self, unit):
        unit.release()
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)
        unit.bucket.release()

    def after_step(self, unit):
        if unit.full.untyped_storage().size():
            unit.release()
"""

BACKWARD_PREFETCHED = """\
from zerolab import Zero2


class MyZero3(Zero2):
    def pre_backward(self, unit):
        unit.gather()
        blocks = [each for each in self.units if each not in self.root]
        if unit in blocks and (place := blocks.index(unit)) > 0:
            blocks[place - 1].start_gather()

    def post_backward(self, unit):
        unit.release()
        Zero2.post_backward(self, unit)

    def after_step(self, unit):
        self.stale.clear()
        unit.release()
"""

_PRE = "    def pre_backward(self, unit: Unit) -> None:\n        unit.gather()\n"
_POST = "        unit.release()\n        super().post_backward(unit)\n"
_AFTER = "    def after_step(self, unit: Unit) -> None:\n        unit.release()\n"

BACKWARD_MUTANTS = {
    "does not gather again": (edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "pass")), "must gather it again"),
    "gathers the root only": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.root]")),
        "must gather it again",
    ),
    "releases too early": (edit(BACKWARD, _PRE, _PRE + "        unit.release()\n"), "pre_backward() let it go"),
    "pre_backward lets go": (
        edit(BACKWARD, _PRE, _PRE.replace("gather", "release")),
        "pre_backward() let it go",
    ),
    "gathers all at the start": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.units]")),
        "all units are gathered at once",
    ),
    "never releases": (edit(BACKWARD, _POST, "        super().post_backward(unit)\n"), "does not release the whole"),
    "releases after the reduction": (
        edit(BACKWARD, _POST, "        super().post_backward(unit)\n        unit.release()\n"),
        "first unit.release()",
    ),
    "keeps the root": (
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        unit in self.root or unit.release()\n        super",
        ),
        "the root stays from its forward to its reduction, and no longer",
    ),
    "releases only what is reduced": (
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        self.reduces(unit) and unit.release()\n        super",
        ),
        "where nothing is reduced",
    ),
    "does not reduce": (
        edit(BACKWARD, "        super().post_backward(unit)\n", ""),
        "super().post_backward(unit) is missing",
    ),
    "keeps the whole gradient": (
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.reduction = self.reduce(unit)",
        ),
        "the whole gradient is kept",
    ),
    "gathers again when it is over": (
        edit(BACKWARD, _POST, _POST + "        unit.gather()\n"),
        "does not release the whole",
    ),
    "keeps what is old": (edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "pass")), "is old"),
    "gathers after the step": (
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "unit.gather()")),
        "after_step() must release it",
    ),
    "after the step as ZeRO-2": (
        edit(BACKWARD, _AFTER, _AFTER + "        super().after_step(unit)\n"),
        "when the next forward begins",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero3(zerolab.Zero3):\n    pass\n", "write your own"),
}

ERRORS = {
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
        section="ZeRO-3's backward as a class",
        check=check_backward,
        stub=BACKWARD_STUB,
        reference=BACKWARD,
        alternatives=(BACKWARD_BY_HAND, BACKWARD_PREFETCHED),
        mutants=BACKWARD_MUTANTS,
        hints=(
            "Each method is one line or two, of unit.gather(), unit.release() and super().post_backward(unit).",
            "post_backward(): backward has no more need of the parameters, so they go first; then "
            "super().post_backward(unit) reduces the gradient and keeps a slice.",
            "pre_backward(): unit.gather(). after_step(): unit.release(), and not super().after_step(unit).",
        ),
        exports=("MyZero3",),
        extends="Zero3",
        errors=ERRORS,
    ),
]
