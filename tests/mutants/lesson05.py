"""Lesson 05: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson05 import ZERO2

from .sources import edit

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
    "keeps the full gradient": (edit(ZERO2, f"        {_RELEASE}\n", ""), "full gradients are still there"),
    "releases before it reduces": (
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        {_RELEASE}\n        {_SUPER}"),
        "full gradients are still there",
    ),
    "throws away what is to be reduced": (
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        unit.bucket.full = None\n        {_SUPER}"),
        "before it was reduced",
    ),
    "copies the slice too early": (
        edit(
            ZERO2, _RELEASE, "if unit.bucket.grad is not None:\n            unit.bucket.grad = unit.bucket.grad.clone()"
        ),
        "released before the reduction has finished",
    ),
    "a view of the full gradient": (
        edit(
            ZERO2_WAITS, "unit.bucket.grad = unit.bucket.grad.clone()", "unit.bucket.grad = unit.bucket.grad.detach()"
        ),
        "full gradients are still there",
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
        "an all-reduce instead of a reduce-scatter",
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

RIGHT = {
    "05.1": (ZERO2_WAITS, ZERO2_OWN_STORAGE),
}

WRONG = {
    "05.1": ZERO2_MUTANTS,
}
