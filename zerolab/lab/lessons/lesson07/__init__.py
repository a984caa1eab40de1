"""Lesson 07: the backward of ZeRO-3."""

from __future__ import annotations

import torch
from torch import Tensor

import zerolab
from zerolab import Unit
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.stages import Stage, battery_of


class Forward(zerolab.Zero2):
    """The forward half of ZeRO-3, with which answers to 07.1 are looked at."""

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        unit.gather()

    def post_forward(self, unit: Unit) -> None:
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()


BACKWARD_BATTERY = battery_of(
    Stage("MyZero3", zerolab.Zero3, ("pre_backward", "post_backward", "after_step"), Forward),
    "post_backward() also runs when nothing is reduced (no_sync, frozen units): release then too",
)

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


EXERCISES = [
    Exercise(
        id="07.1",
        title="the backward of ZeRO-3",
        difficulty=3,
        section="ZeRO-3's backward as a class",
        battery=BACKWARD_BATTERY,
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
    ),
]
