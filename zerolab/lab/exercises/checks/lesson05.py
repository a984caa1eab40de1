"""Lesson 05: ZeRO-2. What a rank keeps of a unit's gradient after its reduction, and when the rest goes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.checks.lesson03 import INPUT, Block, make_model
from zerolab.lab.exercises.checks.lesson04 import (
    ERRORS,
    FIRST_RANK,
    NOT_RETURNED,
    TOO_MUCH,
    check_class,
    check_form,
    check_gradients,
    check_means,
    check_moved,
    check_training,
    check_waited,
    forward,
    note_calls,
    payload_of,
)
from zerolab.lab.exercises.checks.training import check_cases
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.world.processes import Patience

VIEW = (
    "full gradients are still there: unit.bucket.grad is a view of the full gradient, and a view keeps all of its "
    "memory. Copy the shard once the reduction is over: unit.bucket.release() does that"
)
PARAMETERS = "unit.release() lets the *parameters* go, which is lesson 06: use unit.bucket.release()"
AT_ONCE = "freed at once: when super() returns the reduction has only started, and still reads the full gradient"
TOO_LATE = "released too late: the peak is as high as in stage 1. Release each unit's gradient as soon as it is reduced"


def check_zero2(answer: Any, world: World) -> None:
    check_class(answer.MyZero2, "MyZero2", zerolab.Zero1, ("post_backward",))
    model = make_model()
    zero = answer.MyZero2(model, units=[Block])
    try:
        with looking_after(zero, world):
            check_gradients(zero, model, world)
    except Wrong as wrong:
        if "own gradient: it was not reduced" not in wrong.likely:
            raise
        likely = "released before the reduction has finished: what was kept is the rank's own gradient, not the mean"
        raise Wrong(wrong.seen, likely, values_differ=True) from None
    zero.model.zero_grad()
    check_no_sync(zero, model, world)
    check_released(answer.MyZero2, world)
    check_training(answer.MyZero2, zerolab.Zero2, world)
    check_cases(answer, answer.MyZero2, world, ERRORS5)


@contextmanager
def looking_after(zero: Any, world: World) -> Iterator[None]:
    """Look at what post_backward() leaves, before the engine goes on."""
    post_backward = zero.post_backward

    def post_backward_and_look(unit: Unit) -> None:
        full, reduces, before = unit.bucket.full, zero.reduces(unit), len(world.spy.calls)
        post_backward(unit)
        note_calls(world, world.spy.calls[before:])
        bucket, name = unit.bucket, unit.name
        if unit.full.untyped_storage().size() == 0:
            raise Wrong(f"unit {name}: after post_backward() the parameters have no memory", PARAMETERS)
        running = bucket.reduction is not None and not getattr(bucket.reduction, "done", False)
        if running and full is not None and full.untyped_storage().size() == 0:
            raise Wrong(f"unit {name}: the full gradient has no memory, and its reduction is still running", AT_ONCE)
        if reduces and not isinstance(bucket.grad, Tensor):
            by_hand = [call for call in world.spy.calls[before:] if not call.said]
            likely = NOT_RETURNED if by_hand else "super().post_backward(unit) leaves the mean there: do not lose it"
            if len(world.spy.calls) == before and not bucket.reduction:
                likely = "reduce() was not called: super().post_backward(unit) does that"
            raise Wrong(f"unit {name}: after post_backward() unit.bucket.grad is {bucket.grad}, not a tensor", likely)
        if reduces:
            check_form(unit, full, world.spy.calls[before:])

    zero.post_backward = post_backward_and_look
    yield
    del zero.post_backward


def check_no_sync(zero: Any, model: nn.Module, world: World) -> None:
    """Two micro-batches, the first under no_sync, which sends nothing and must not be lost."""
    with world.record() as inside, zero.no_sync():
        forward(model, world).backward()
    if inside:
        likely = "no_sync() was ignored: reduce only if self.reduces(unit), as super().post_backward() does"
        raise Wrong(f"{inside[0].op} was called inside no_sync()", likely)
    kept = "what no_sync() kept back is lost: while self.reduces(unit) is False there is nothing to release yet"
    if any(unit.bucket.full is None for unit in zero.units):
        raise Wrong("unit.bucket.full is gone after a backward under no_sync()", kept)
    with world.record() as calls:
        (2.0 * forward(model, world)).backward()
    check_means(zero, world, calls, "two micro-batches under no_sync", 3.0, {2.0: kept, 1.0: kept})
    check_moved("two micro-batches", calls, world, payload_of(zero), "extra traffic: one reduce-scatter is enough")
    check_waited(calls, world)


def check_released(cls: type, world: World) -> None:
    """During backward at most one earlier unit's full gradient may still be in memory."""
    if world.world_size == 1:
        return
    earlier: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    class Watched(cls):
        def post_backward(self, unit: Unit) -> None:
            nonlocal most
            most = max(most, alive(earlier, at_most=1))
            if unit.bucket.full is not None:
                earlier.append(weakref.ref(unit.bucket.full.untyped_storage()))
            super().post_backward(unit)

    model = nn.Sequential(*(Block() for _ in range(4)))
    zero = Watched(model, units=[Block])
    model(INPUT).sum().backward()
    if left := alive(earlier, at_most=0):
        much = f"{left} of 4 units' full gradients are still in memory after backward"
        grads = [param.grad for param in model.parameters() if param.grad is not None and param.grad.numel()]
        shards = [4 * unit.layout.shard_size for unit in zero.units]
        is_view = any(grad.untyped_storage().nbytes() > max(shards) for grad in grads)
        raise Wrong(much, VIEW if is_view else TOO_MUCH["gradients"])
    if most > 1:
        raise Wrong(f"up to {most} units' full gradients were in memory at once, besides the current one", TOO_LATE)
    with world.record():  # a rank that comes here was right
        pass


def alive(storages: list[weakref.ref[torch.UntypedStorage]], at_most: int) -> int:
    """How many still have memory. One of gloo's threads may let go a moment late: wait for that, not for an answer."""
    patience = Patience(2.0, longest=0.02)
    while True:
        found = [reference() for reference in storages]
        count = sum(storage is not None and storage.nbytes() > 0 for storage in found)
        del found
        if count <= at_most or patience.turn() <= 0:
            return count
        time.sleep(0.01)


ZERO2_STUB = '''\
import torch
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are there. Reduce them, then keep only this rank's shard.

        super().post_backward(unit) starts the reduction as stage 1 does, if
        self.reduces(unit). Then unit.bucket.reduction is what to wait for, and
        unit.bucket.grad is a view of unit.bucket.full, which it keeps alive.
        unit.bucket.release() copies the shard as soon as the reduction has finished, and
        lets the rest go.
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


ERRORS5 = {  # before those of lesson 04, which are about stage 1's methods
    "object has no attribute 'wait'": "unit.bucket.reduction is None where nothing was reduced, under no_sync(): check "
    "self.reduces(unit) first",
    "no attribute 'full'": "`del` removes the attribute itself, which the engine reads: set it to None instead",
    "'NoneType' object has no attribute": "where nothing was reduced, under no_sync(), unit.bucket.grad is None: check "
    "self.reduces(unit) first",
    "for storage of size 0": AT_ONCE,
    "killed by SIG": "memory was released while it was read: when super() returns, the reduction has only started",
}
ERRORS5 |= {part: mistake for part, mistake in ERRORS.items() if part not in ERRORS5}

EXERCISES = [
    Exercise(
        id="05.1",
        title="ZeRO-2",
        difficulty=2,
        section="Release after reduce",
        check=check_zero2,
        stub=ZERO2_STUB,
        reference=ZERO2,
        hints=(
            "Stage 1 does nearly everything: call super().post_backward(unit) first.",
            "The reduction may still be reading the full gradient when super() returns. unit.bucket.release() knows "
            "that, and waits when it has to.",
            "Two lines: super().post_backward(unit), then unit.bucket.release(). Under no_sync it finds nothing to do.",
        ),
        exports=("MyZero2",),
        extends="Zero2",
        first_rank_only=FIRST_RANK,
        errors=ERRORS5 | {"NoneType": "the gradient was released before it was reduced: call super() first"},
    ),
]
