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

ZERO2_WAITS_LATER = """\
import zerolab


class Slice:
    def __init__(self, bucket, reduction):
        self.bucket, self.reduction = bucket, reduction

    def wait(self):
        self.reduction.wait()
        self.bucket.grad = self.bucket.grad.clone()


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit):
        super().post_backward(unit)
        if self.reduces(unit):
            unit.bucket.reduction = Slice(unit.bucket, unit.bucket.reduction)
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
    "full set to None": (
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full = None"),
        "unit.bucket.grad is a view of the full gradient",
    ),
    "a slice of the slice": (
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.grad = unit.bucket.grad[:]"),
        "unit.bucket.grad is a view of the full gradient",
    ),
    "asks what is not there": (
        edit(ZERO2, _RELEASE, f"unit.bucket.grad.numel()\n        {_RELEASE}"),
        "self.reduces(unit)",
    ),
    "rank 0's shard for all": (
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.layout.shard(unit.bucket.full, 0).clone()"),
        "another rank's slice",
    ),
    "its rank among all processes": (
        edit(
            ZERO2_WAITS,
            "unit.bucket.grad.clone()",
            "unit.layout.shard(unit.bucket.full, torch.distributed.get_rank()).clone()",
            "import zerolab\n",
            "import torch\nimport zerolab\n",
        ),
        "all processes are counted by dist.get_rank()",
    ),
    "divides by the number of all processes": (
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
            "shards = list(full.chunk(self.world_size))\n"
            "        torch.distributed.reduce_scatter(unit.bucket.grad, shards, group=self.comm.group)\n"
            "        unit.bucket.grad /= torch.distributed.get_world_size()",
        ),
        "all processes are counted by dist.get_world_size()",
    ),
    "freed at once": (
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full.untyped_storage().resize_(0)"),
        "freed at once",
    ),
    "zeroed at once": (
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full.zero_()"),
        "before the reduction had read it",
    ),
    "one buffer for all steps": (
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.grad = torch.empty(unit.layout.shard_size, dtype=full.dtype, device=full.device)",
            "if not hasattr(unit, 'mean'):\n"
            "            unit.mean = torch.empty_like(unit.layout.shard(full, self.rank))\n"
            "        unit.bucket.grad = unit.mean",
        ),
        "something was kept",
    ),
    "float32 alone": (edit(ZERO2_OWN_STORAGE, "dtype=full.dtype, ", ""), "right in float32 only"),
    "what the call returns": (
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
            "unit.bucket.grad = torch.distributed.reduce_scatter(unit.bucket.grad, list(full.chunk(self.world_size)))",
        ),
        "return None: the result is in the tensor",
    ),
    "the full gradient": (
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.full.clone()"),
        "as long as unit.master",
    ),
    "in bfloat16": (
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.grad.bfloat16()"),
        "keeps the dtype of unit.bucket.full",
    ),
    "only rank 0 releases": (
        edit(ZERO2, _RELEASE, f"if self.rank == 0:\n            {_RELEASE}"),
        "full gradients are still there",
    ),
    "reduces twice": (edit(ZERO2, _SUPER, f"{_SUPER}\n        {_SUPER}"), "one reduce-scatter"),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero2(zerolab.Zero1):\n    stage = 2\n", "write your own"),
}

RIGHT = {
    "05.1": (ZERO2_WAITS, ZERO2_OWN_STORAGE, ZERO2_WAITS_LATER),
}

WRONG = {
    "05.1": ZERO2_MUTANTS,
}
