"""Lesson 05: ZeRO-2. What is left of a unit's gradient once it is reduced, and when the rest goes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

import zerolab
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.catalogue import Exercise, World, Wrong, edit
from zerolab.lab.exercises.checks.lesson03 import INPUT, Block, make_model
from zerolab.lab.exercises.checks.lesson04 import (
    ERRORS,
    FIRST_RANK,
    TOO_MUCH,
    check_class,
    check_gradients,
    check_means,
    check_moved,
    check_training,
    check_waited,
    forward,
    payload_of,
)

TOO_LATE = "released too late: the peak is as high as in stage 1. Let each unit's gradient go as soon as it is reduced"


def check_zero2(answer: Any, world: World) -> None:
    check_class(answer.MyZero2, "MyZero2", zerolab.Zero1, ("post_backward",))
    model = make_model()
    zero = answer.MyZero2(model, units=[Block])
    try:
        check_gradients(zero, model, world)
    except Wrong as wrong:
        if "own gradient: it was not reduced" not in wrong.likely:
            raise
        likely = "released before the reduction is over: what was kept is the rank's own gradient, not yet the mean"
        raise Wrong(wrong.seen, likely, values_differ=True) from None
    zero.model.zero_grad()
    check_no_sync(zero, model, world)
    check_released(answer.MyZero2, world)
    check_training(answer.MyZero2, zerolab.Zero2, world)


def check_no_sync(zero: Any, model: nn.Module, world: World) -> None:
    """Two micro-batches, the first under no_sync: nothing is sent for it, and nothing of it is lost."""
    with world.record() as inside, zero.no_sync():
        forward(model, world).backward()
    if inside:
        likely = "no_sync() was ignored: only reduce where self.reduces(unit) says so, as super().post_backward() does"
        raise Wrong(f"{inside[0].op} was called inside no_sync()", likely)
    kept = "what no_sync() kept back is lost: where self.reduces(unit) is False there is nothing to release yet"
    if any(unit.bucket.full is None for unit in zero.units):
        raise Wrong("unit.bucket.full is gone after a backward under no_sync()", kept)
    with world.record() as calls:
        (2.0 * forward(model, world)).backward()
    check_means(zero, world, calls, "two micro-batches under no_sync", 3.0, {2.0: kept, 1.0: kept})
    check_moved("two micro-batches", calls, world, payload_of(zero), "extra traffic: one reduce-scatter is enough")
    check_waited(calls, world)


def check_released(cls: type, world: World) -> None:
    """While backward goes on, the memory of at most one earlier unit's whole gradient is still there."""
    if world.world_size == 1:
        return
    earlier: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    class Watched(cls):
        def post_backward(self, unit: Unit) -> None:
            nonlocal most
            most = max(most, alive(earlier))
            if unit.bucket.full is not None:
                earlier.append(weakref.ref(unit.bucket.full.untyped_storage()))
            super().post_backward(unit)

    model = nn.Sequential(*(Block() for _ in range(4)))
    Watched(model, units=[Block])
    model(INPUT).sum().backward()
    if left := alive(earlier):
        much = f"the memory of {left} of 4 units' whole gradients is still there when backward has returned"
        raise Wrong(much, TOO_MUCH["gradients"])
    if most > 1:
        raise Wrong(f"up to {most} units' whole gradients were there at once, besides the one at work", TOO_LATE)


def alive(storages: list[weakref.ref[torch.UntypedStorage]]) -> int:
    found = [reference() for reference in storages]
    return sum(storage is not None and storage.nbytes() > 0 for storage in found)


ZERO2_STUB = '''\
import torch
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are there. Reduce them as stage 1 does, then keep this rank's slice alone.

        super().post_backward(unit) starts the reduction, if self.reduces(unit): what can be waited for is then in
        unit.bucket.reduction, and unit.bucket.grad is a view of unit.bucket.full, which it keeps alive.
        unit.bucket.release() keeps a copy of the slice, as soon as the reduction is over, and lets the rest go.
        """
        raise Todo("05.1")
'''

ZERO2 = """\
import zerolab
from zerolab import Unit


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit: Unit) -> None:
        super().post_backward(unit)
        unit.bucket.release()
"""

ZERO2_WAITS = """\
import zerolab


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit):
        if self.reduces(unit):
            self.reduce(unit).wait()
            unit.bucket.grad = unit.bucket.grad.clone()
"""

ZERO2_OWN_STORAGE = """\
import torch
import zerolab


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit):
        if not self.reduces(unit):
            return
        full = unit.bucket.full
        unit.bucket.grad = torch.empty(unit.layout.shard_size, dtype=full.dtype, device=full.device)
        unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)
"""

_SUPER = "super().post_backward(unit)"
_RELEASE = "unit.bucket.release()"

ZERO2_MUTANTS = {
    "keeps the whole gradient": (edit(ZERO2, f"        {_RELEASE}\n", ""), "whole gradients are still there"),
    "releases before it reduces": (
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        {_RELEASE}\n        {_SUPER}"),
        "whole gradients are still there",
    ),
    "throws away what is to be reduced": (
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        unit.bucket.full = None\n        {_SUPER}"),
        "before it was reduced",
    ),
    "copies the slice too early": (
        edit(
            ZERO2, _RELEASE, "if unit.bucket.grad is not None:\n            unit.bucket.grad = unit.bucket.grad.clone()"
        ),
        "released before the reduction is over",
    ),
    "a view of the whole": (
        edit(
            ZERO2_WAITS, "unit.bucket.grad = unit.bucket.grad.clone()", "unit.bucket.grad = unit.bucket.grad.detach()"
        ),
        "whole gradients are still there",
    ),
    "releases all of them at the end": (
        edit(
            ZERO2,
            _RELEASE,
            "if unit is self.units[0]:\n            for each in self.units:\n                each.bucket.release()",
        ),
        "released too late",
    ),
    "loses what no_sync kept back": (
        edit(ZERO2, _RELEASE, f"{_RELEASE}\n        unit.bucket.full = None"),
        "what no_sync() kept back is lost",
    ),
    "ignores no_sync": (
        edit(ZERO2_WAITS, "if self.reduces(unit):", "if unit.bucket.full is not None:"),
        "no_sync() was ignored",
    ),
    "never reduces": (edit(ZERO2, f"        {_SUPER}\n", ""), "reduce() was not called"),
    "all-reduce": (
        edit(
            ZERO2_WAITS,
            "self.reduce(unit).wait()\n            unit.bucket.grad = unit.bucket.grad.clone()",
            "self.comm.all_reduce(unit.bucket.full, unit.name).wait()\n"
            "            unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank).clone()",
        ),
        "an all-reduce where a reduce-scatter was asked",
    ),
    "forgotten wait": (
        edit(ZERO2_OWN_STORAGE, "unit.bucket.reduction = ", "", "torch.empty(", "torch.zeros("),
        "a forgotten wait",
    ),
    "divided twice": (
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.grad / self.world_size"),
        "divided by N twice",
    ),
    "no reduction to wait for": (
        edit(ZERO2, _RELEASE, "unit.bucket.reduction.wait()\n        unit.bucket.grad = unit.bucket.grad.clone()"),
        "unit.bucket.reduction is None where nothing was reduced",
    ),
    "releases the parameters": (edit(ZERO2, _RELEASE, "unit.release()"), "lets the *parameters* go"),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero2(zerolab.Zero1):\n    stage = 2\n", "write your own"),
}

ERRORS5 = {  # before those of lesson 04, which are about stage 1's methods
    "object has no attribute 'wait'": "unit.bucket.reduction is None where nothing was reduced, under no_sync: look at "
    "self.reduces(unit) first",
    "no attribute 'bucket.full'": "`del` takes the attribute itself away, and the engine asks for it: it may be None",
    "for storage of size 0": "unit.release() lets the *parameters* go, which is lesson 06: here unit.bucket.release()",
    "killed by SIG": "memory went that was still read: the reduction has only been started when super() returns",
}

EXERCISES = [
    Exercise(
        id="05.1",
        title="ZeRO-2",
        section="Release after reduce",
        check=check_zero2,
        stub=ZERO2_STUB,
        reference=ZERO2,
        alternatives=(ZERO2_WAITS, ZERO2_OWN_STORAGE),
        mutants=ZERO2_MUTANTS,
        hints=(
            "Stage 1 does nearly everything: call super().post_backward(unit) first.",
            "The reduction may still be reading the whole gradient when super() returns. unit.bucket.release() knows "
            "that, and waits for it in its own time.",
            "Two lines: super().post_backward(unit), then unit.bucket.release(). Under no_sync it finds nothing.",
        ),
        exports=("MyZero2",),
        extends="Zero2",
        first_rank_only=FIRST_RANK,
        errors=ERRORS5 | ERRORS | {"NoneType": "the gradient was let go before it was reduced: first super()"},
    ),
]
