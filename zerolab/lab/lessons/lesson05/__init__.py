"""Lesson 05: ZeRO-2. What a rank keeps of a unit's gradient after its reduction, and when the rest goes."""

from __future__ import annotations

import zerolab
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.stages import Stage, battery_of

ZERO2_BATTERY = battery_of(
    Stage("MyZero2", zerolab.Zero2, ("post_backward",)),
    "what no_sync() kept back is lost: while self.reduces(unit) is False there is nothing to release yet",
)

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


EXERCISES = [
    Exercise(
        id="05.1",
        title="ZeRO-2",
        difficulty=2,
        section="Release after reduce",
        battery=ZERO2_BATTERY,
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
    ),
]
