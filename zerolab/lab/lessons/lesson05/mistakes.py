"""Lesson 05: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson05 import ZERO2

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

STILL_THERE = (
    "full gradients are still there: unit.bucket.grad is a view of the full gradient, and a view keeps all of its "
    "memory. Call unit.bucket.release() as soon as this unit's reduction has been started: it copies the shard when "
    "that is over, and lets the rest go"
)

_RELEASE = "unit.bucket.release()"

ZERO2_MISTAKES = {
    "keeps the full gradient": Mistake(
        edit(ZERO2, f"        {_RELEASE}\n", ""),
        STILL_THERE,
    ),
    "releases before it reduces": Mistake(
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        {_RELEASE}\n        {_SUPER}"),
        STILL_THERE,
    ),
    "throws away what is to be reduced": Mistake(
        edit(ZERO2, f"        {_SUPER}\n        {_RELEASE}", f"        unit.bucket.full = None\n        {_SUPER}"),
        "the gradient was released before it was reduced: call super() first",
    ),
    "copies the slice too early": Mistake(
        edit(
            ZERO2, _RELEASE, "if unit.bucket.grad is not None:\n            unit.bucket.grad = unit.bucket.grad.clone()"
        ),
        "released before the reduction has finished: what was kept is the rank's own gradient, not the mean",
    ),
    "a view of the full gradient": Mistake(
        edit(
            ZERO2_WAITS, "unit.bucket.grad = unit.bucket.grad.clone()", "unit.bucket.grad = unit.bucket.grad.detach()"
        ),
        STILL_THERE,
    ),
    "keeps the root's": Mistake(
        edit(ZERO2, _RELEASE, "if unit not in self.root:\n            unit.bucket.release()"),
        "the root's full gradient is still there: its bucket is released like any other",
    ),
    "releases all of them at the end": Mistake(
        edit(
            ZERO2,
            _RELEASE,
            "if unit is self.units[0]:\n            for each in self.units:\n                each.bucket.release()",
        ),
        ("released too late: the peak is as high as in stage 1. Release each unit's gradient as soon as it is reduced"),
    ),
    "loses what no_sync kept back": Mistake(
        edit(ZERO2, _RELEASE, f"{_RELEASE}\n        unit.bucket.full = None"),
        "what no_sync() kept back is lost: while self.reduces(unit) is False there is nothing to release yet",
    ),
    "ignores no_sync": Mistake(
        edit(ZERO2_WAITS, "if self.reduces(unit):", "if unit.bucket.full is not None:"),
        "no_sync() was ignored: reduce only if self.reduces(unit), as super().post_backward() does",
    ),
    "never reduces": Mistake(
        edit(ZERO2, f"        {_SUPER}\n", ""),
        "reduce() was not called: super().post_backward(unit) does that",
    ),
    "all-reduce": Mistake(
        edit(
            ZERO2_WAITS,
            "self.reduce(unit).wait()\n            unit.bucket.grad = unit.bucket.grad.clone()",
            "self.comm.all_reduce(unit.bucket.full, unit.name).wait()\n"
            "            unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank).clone()",
        ),
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "forgotten wait": Mistake(
        edit(ZERO2_OWN_STORAGE, "unit.bucket.reduction = ", "", "torch.empty(", "torch.zeros("),
        ("a forgotten wait: self.comm.reduce_scatter was started without waiting for it, so nothing had arrived"),
    ),
    "divided twice": Mistake(
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.grad / self.world_size"),
        "divided by N twice",
    ),
    "no reduction to wait for": Mistake(
        edit(ZERO2, _RELEASE, "unit.bucket.reduction.wait()\n        unit.bucket.grad = unit.bucket.grad.clone()"),
        ("unit.bucket.reduction is None where nothing was reduced, under no_sync(): check self.reduces(unit) first"),
    ),
    "releases the parameters": Mistake(
        edit(ZERO2, _RELEASE, "unit.release()"),
        "unit.release() lets the *parameters* go, which is lesson 06: use unit.bucket.release()",
    ),
    "full set to None": Mistake(
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full = None"),
        STILL_THERE,
    ),
    "a slice of the slice": Mistake(
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.grad = unit.bucket.grad[:]"),
        STILL_THERE,
    ),
    "asks what is not there": Mistake(
        edit(ZERO2, _RELEASE, f"unit.bucket.grad.numel()\n        {_RELEASE}"),
        "where nothing was reduced, under no_sync(), unit.bucket.grad is None: check self.reduces(unit) first",
    ),
    "rank 0's shard for all": Mistake(
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.layout.shard(unit.bucket.full, 0).clone()"),
        "another rank's slice: rank 0's part of this rank's own",
    ),
    "its rank among all processes": Mistake(
        edit(
            ZERO2_WAITS,
            "unit.bucket.grad.clone()",
            "unit.layout.shard(unit.bucket.full, torch.distributed.get_rank()).clone()",
            "import zerolab\n",
            "import torch\nimport zerolab\n",
        ),
        (
            "all processes are counted by dist.get_rank(), and only some of them share this model: self.rank, "
            "self.world_size"
        ),
    ),
    "divides by the number of all processes": Mistake(
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
            "shards = list(full.chunk(self.world_size))\n"
            "        torch.distributed.reduce_scatter(unit.bucket.grad, shards, group=self.comm.group)\n"
            "        unit.bucket.grad /= torch.distributed.get_world_size()",
        ),
        (
            "all processes are counted by dist.get_world_size(), and only some of them share this model: "
            "self.rank, self.world_size"
        ),
    ),
    "freed at once": Mistake(
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full.untyped_storage().resize_(0)"),
        ("freed at once: when super() returns the reduction has only started, and still reads the full gradient"),
    ),
    "zeroed at once": Mistake(
        edit(ZERO2, _RELEASE, "if self.reduces(unit):\n            unit.bucket.full.zero_()"),
        ("zeros: the gradient was overwritten before the reduction had read it, or the result was never written"),
    ),
    "one buffer for all steps": Mistake(
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.grad = torch.empty(unit.layout.shard_size, dtype=full.dtype, device=full.device)",
            "if not hasattr(unit, 'mean'):\n"
            "            unit.mean = torch.empty_like(unit.layout.shard(full, self.rank))\n"
            "        unit.bucket.grad = unit.mean",
        ),
        "something was kept from the first forward or its backward: the second found it instead of its own",
    ),
    "float32 alone": Mistake(
        edit(ZERO2_OWN_STORAGE, "dtype=full.dtype, ", ""),
        (
            "right in float32 only: take dtypes from unit.full and unit.bucket.full, and cast unit.master to "
            "unit.full.dtype"
        ),
    ),
    "what the call returns": Mistake(
        edit(
            ZERO2_OWN_STORAGE,
            "unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
            "unit.bucket.grad = torch.distributed.reduce_scatter(unit.bucket.grad, list(full.chunk(self.world_size)))",
        ),
        ("the functions of torch.distributed return None: the result is in the tensor that you pass to be filled"),
    ),
    "the full gradient": Mistake(
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.full.clone()"),
        "it must be as long as unit.master: this rank's shard, (S,)",
    ),
    "in bfloat16": Mistake(
        edit(ZERO2_WAITS, "unit.bucket.grad.clone()", "unit.bucket.grad.bfloat16()"),
        "a gradient keeps the dtype of unit.bucket.full",
    ),
    "only rank 0 releases": Mistake(
        edit(ZERO2, _RELEASE, f"if self.rank == 0:\n            {_RELEASE}"),
        STILL_THERE,
    ),
    "reduces twice": Mistake(
        edit(ZERO2, _SUPER, f"{_SUPER}\n        {_SUPER}"),
        "extra traffic: one reduce-scatter, or one all_to_all_single, is enough",
    ),
    "nothing of its own": Mistake(
        "import zerolab\n\n\nclass MyZero2(zerolab.Zero1):\n    stage = 2\n",
        "the class inherits post_backward(): write your own",
    ),
}

RIGHT = {
    "05.1": (ZERO2_WAITS, ZERO2_OWN_STORAGE, ZERO2_WAITS_LATER),
}

MISTAKES = {
    "05.1": ZERO2_MISTAKES,
}
