"""Lesson 03: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson03 import AVERAGE, BUCKET, DDP

from .sources import edit

# ---------------------------------------------------------------------- 03.1

AVERAGE_ASYNC = """\
from torch.distributed import all_reduce, get_world_size


def average(params):
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.div_(get_world_size())
    started = [all_reduce(grad, async_op=True) for grad in grads]
    for work in started:
        work.wait()
"""

AVERAGE_NATIVE = """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            continue
        mean = param.grad.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        param.grad = mean
"""

AVERAGE_MUTANTS = {
    "waits for the last only": (
        edit(AVERAGE_ASYNC, "    for work in started:\n        work.wait()", "    started[-1].wait()"),
        "a forgotten wait: all_reduce was started 3 times",
    ),
    "divides before the wait": (
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            work = dist.all_reduce(param.grad, async_op=True)
            param.grad /= dist.get_world_size()
            work.wait()
""",
        "changed before the wait",
    ),
    "sum for mean": (edit(AVERAGE, "            param.grad /= dist.get_world_size()\n", ""), "summed over ranks"),
    "divided twice": (
        edit(
            AVERAGE, "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size(); dist.all_reduce(param.grad)"
        ),
        "divided by N twice",
    ),
    "forgotten wait": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        "a forgotten wait",
    ),
    "averages the parameter": (
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param.data)", "param.grad /=", "param.data /="),
        "the parameters were averaged",
    ),
    "reduces a copy": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "grad = param.grad.clone(); dist.all_reduce(grad)",
            "param.grad /=",
            "grad /=",
        ),
        "was not written back",
    ),
    "only divides": (edit(AVERAGE, "            dist.all_reduce(param.grad)\n", ""), "nothing was sent"),
    "reduces to rank 0": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.reduce(param.grad, dst=0)"),
        "reached rank 0 only",
    ),
    "broadcasts": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "dist.broadcast(param.grad, src=0)",
            "            param.grad /= dist.get_world_size()\n",
            "",
        ),
        "a broadcast copies one rank's gradient",
    ),
    "a number of ranks by heart": (edit(AVERAGE, "dist.get_world_size()", "2"), "was divided by 2, but there are"),
    "no gradient": (
        edit(AVERAGE, "if param.grad is not None:", "if param is not None:"),
        "has no gradient (grad is None)",
    ),
    "only rank 0 calls": (
        edit(AVERAGE, "if param.grad is not None:", "if param.grad is not None and dist.get_rank() == 0:"),
        "not every rank makes the same calls",
    ),
    "another order on every rank": (
        edit(AVERAGE, "for param in params:", "for param in params[:: -1 if dist.get_rank() else 1]:"),
        "different orders",
    ),
    "gathers everything": (
        """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            grads = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(grads, param.grad)
            param.grad = torch.stack(grads).mean(0)
""",
        "extra traffic",
    ),
}

# ---------------------------------------------------------------------- 03.2

BUCKET_OF_VIEWS = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params = params

    def collect(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.flat = torch.cat([grad.reshape(-1) for grad in grads]).detach()

    def reduce(self):
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def write_back(self):
        self.work.wait()
        offset = 0
        for p in self.params:  # the gradients stay in the bucket, as DDP's gradient_as_bucket_view does it
            p.grad = self.flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
"""

BUCKET_IN_TWO_HALVES = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params, self.N = params, dist.get_world_size()
        numel = sum(p.numel() for p in params)
        self.numels = [p.numel() for p in params]
        self.flat = torch.zeros(numel + -numel % self.N)

    def collect(self):
        self.flat.zero_()
        pieces = self.flat[: sum(self.numels)].split(self.numels)
        for p, piece in zip(self.params, pieces):
            if p.grad is not None:
                piece += p.grad.flatten()

    def reduce(self):  # an all-to-all and a sum: a reduce-scatter; then an all-gather
        received = torch.empty_like(self.flat)
        dist.all_to_all_single(received, self.flat)
        mine = received.view(self.N, -1).sum(0) / self.N
        dist.all_gather(list(self.flat.view(self.N, -1)), mine)

    def write_back(self):
        for p, piece in zip(self.params, self.flat[: sum(self.numels)].split(self.numels)):
            p.grad = piece.reshape(p.shape).clone()
"""

_DIVIDE = "        self.flat /= dist.get_world_size()\n"

_ASYNC = "dist.all_reduce(self.flat, async_op=True)"

BUCKET_MUTANTS = {
    "in two pieces": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(half) for half in self.flat.split(6)]"),
        "the buffer is sent in pieces",
    ),
    "added to what was there": (
        edit(BUCKET, "view.copy_(param.grad)", "view.add_(param.grad)"),
        "every step starts with an empty buffer",
    ),
    "sum for mean": (edit(BUCKET, _DIVIDE, ""), "summed over ranks"),
    "divided twice": (edit(BUCKET, "view.clone()", "view / dist.get_world_size()"), "divided by N twice"),
    "forgotten wait": (edit(BUCKET, "dist.all_reduce(self.flat)", _ASYNC), "a forgotten wait"),
    "left over from the step before": (
        edit(BUCKET, "                view.zero_()", "                pass"),
        "left over from the previous step",
    ),
    "no gradient": (
        edit(BUCKET, "if param.grad is None:", "if param is None:"),
        "has no gradient (grad is None)",
    ),
    "one call per parameter": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(view) for view in self.views]"),
        "one call per parameter",
    ),
    "not written back": (
        edit(BUCKET, "            param.grad = view.clone()", "            pass"),
        "was not written back",
    ),
    "written back to some": (
        edit(
            BUCKET,
            "            param.grad = view",
            "            if param.grad is not None:\n                param.grad = view",
        ),
        "skipped a parameter",
    ),
    "collects the parameters": (
        edit(BUCKET, "view.copy_(param.grad)", "view.copy_(param.data)"),
        "the parameters were collected",
    ),
    "writes into the parameters": (
        edit(BUCKET, "param.grad = view.clone()", "param.data.copy_(view)"),
        "the parameters were averaged",
    ),
    "all at the same place": (
        edit(BUCKET, "            offset += param.numel()\n", ""),
        "look at the offsets",
    ),
    "flat gradients": (
        edit(BUCKET, "param.grad = view.clone()", "param.grad = view.flatten()"),
        "a piece of a flat buffer has one dimension",
    ),
    "reduces to rank 0": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "dist.reduce(self.flat, dst=0)"),
        "reached rank 0 only",
    ),
    "gathers everything": (
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n" + _DIVIDE,
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(flats, self.flat)\n"
            "        self.flat.copy_(torch.stack(flats).mean(0))\n",
        ),
        "extra traffic",
    ),
}

# ---------------------------------------------------------------------- 03.3

DDP_SYNCHRONOUS = """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if not self.reduces(unit):
            return
        self.reduce(unit)

    def reduce(self, unit):
        dist.all_reduce(unit.bucket.full, group=self.comm.group)
        unit.bucket.full /= self.world_size
        unit.bucket.grad = unit.bucket.full
"""

DDP_DIVIDED_FIRST = """\
import torch.distributed as dist
from zerolab import DDP


class MyDDP(DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full / self.world_size
        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)
"""

_COMM = "return self.comm.all_reduce(unit.bucket.grad, unit.name)"

DDP_MUTANTS = {
    "one call per parameter": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(view) for view in unit.layout.views(unit.bucket.full)]",
        ),
        "one call per parameter",
    ),
    "only a shard": (
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)",
            _COMM,
            "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
        ),
        "here every rank keeps the full mean",
    ),
    "loses what no_sync kept back": (
        edit(
            DDP,
            "unit.bucket.reduction = self.reduce(unit)",
            "unit.bucket.reduction = self.reduce(unit)\n        unit.bucket.full = None",
        ),
        "what no_sync() kept back",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    pass\n", "write your own"),
    "sum for mean": (
        edit(DDP_SYNCHRONOUS, "        unit.bucket.full /= self.world_size\n", ""),
        "summed over ranks",
    ),
    "divided twice": (
        edit(
            DDP,
            _COMM,
            "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        unit.bucket.grad /= self.world_size",
        ),
        "divided by N twice",
    ),
    "forgotten wait: nothing returned": (edit(DDP, "return self", "self"), "a forgotten wait"),
    "forgotten wait: not kept": (edit(DDP, "unit.bucket.reduction = self", "self"), "a forgotten wait"),
    "ignores no_sync": (edit(DDP, "if self.reduces(unit):", "if True:"), "no_sync() was ignored"),
    "never reduces": (edit(DDP, "if self.reduces(unit):", "if False:"), "reduce() was not called"),
    "unit.bucket.grad not set": (
        edit(DDP, "unit.bucket.grad = unit.bucket.full\n        ", "", "unit.bucket.grad", "unit.bucket.full"),
        "did not leave the mean in unit.bucket.grad",
    ),
    "reduces a copy": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.bucket.grad.clone()"),
        "was not written back",
    ),
    "averages the parameters": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.full.data"),
        "it was not reduced",
    ),
    "changes the parameters": (
        edit(
            DDP,
            _COMM,
            "dist.all_reduce(unit.full.data)",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        "the parameters were averaged",
    ),
    "reduces twice": (
        edit(DDP, "        return", "        self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return"),
        "extra traffic",
    ),
    "reduces to rank 0": (
        edit(DDP_SYNCHRONOUS, "all_reduce(unit.bucket.full, ", "reduce(unit.bucket.full, dst=0, "),
        "reached rank 0 only",
    ),
    "only rank 0 calls": (
        edit(DDP_SYNCHRONOUS, "if not self.reduces(unit):", "if not self.reduces(unit) or self.rank > 0:"),
        "reduce() was not called",
    ),
    "gathers everything": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "all = [unit.bucket.full.clone() for _ in range(self.world_size)]; dist.all_gather(all, unit.bucket.full)",
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full = sum(all) / self.world_size",
        ),
        "extra traffic",
    ),
}

RIGHT = {
    "03.1": (AVERAGE_ASYNC, AVERAGE_NATIVE),
    "03.2": (BUCKET_OF_VIEWS, BUCKET_IN_TWO_HALVES),
    "03.3": (DDP_SYNCHRONOUS, DDP_DIVIDED_FIRST),
}

WRONG = {
    "03.1": AVERAGE_MUTANTS,
    "03.2": BUCKET_MUTANTS,
    "03.3": DDP_MUTANTS,
}
