"""Lesson 04: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson04 import REDUCE_SCATTER, ZERO1

from .sources import edit

# ---------------------------------------------------------------------- 04.1

REDUCE_SCATTER_ASYNC = """\
import torch
from torch.distributed import all_to_all_single


def reduce_scatter_mean(flat, rank, world_size):
    received = torch.empty(flat.numel())
    work = all_to_all_single(received, flat / world_size, async_op=True)
    work.wait()
    return sum(received.split(flat.numel() // world_size))
"""

REDUCE_SCATTER_BY_REDUCES = """\
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    shards = [shard.clone() for shard in flat.chunk(world_size)]
    for owner, shard in enumerate(shards):
        dist.reduce(shard, dst=owner)
    return shards[rank] / world_size
"""

_SUM = "received.view(world_size, -1).sum(dim=0)"

REDUCE_SCATTER_MUTANTS = {
    "all-reduce": (
        """\
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    dist.all_reduce(flat)
    return flat.chunk(world_size)[rank] / world_size
""",
        "an all-reduce instead of a reduce-scatter",
    ),
    "gathers everything": (
        """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    flats = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(flats, flat)
    return torch.stack(flats).mean(dim=0).chunk(world_size)[rank]
""",
        "every rank sends everything to every rank",
    ),
    "sum for mean": (edit(REDUCE_SCATTER, " / world_size", ""), "summed over ranks"),
    "divided twice": (edit(REDUCE_SCATTER, "(received, flat)", "(received, flat / world_size)"), "divided by N twice"),
    "the full mean": (edit(REDUCE_SCATTER, _SUM, "received"), "the full mean: return one shard"),
    "its own part alone": (
        edit(REDUCE_SCATTER, f"{_SUM} / world_size", "received.view(world_size, -1)[rank]"),
        "the rank's own gradient",
    ),
    "sums over the elements": (
        edit(REDUCE_SCATTER, _SUM, "received.view(-1, world_size).sum(dim=1)"),
        "rows and columns are mixed up",
    ),
    "another rank's slice": (
        edit(
            REDUCE_SCATTER_BY_REDUCES, "dst=owner", "dst=(owner + 1) % world_size", "shards[rank]", "shards[rank - 1]"
        ),
        "another rank's shard",
    ),
    "forgotten wait": (
        edit(REDUCE_SCATTER_ASYNC, "    work.wait()\n", "", "torch.empty(flat.numel())", "flat.clone()"),
        "a forgotten wait",
    ),
    "nothing returned": (edit(REDUCE_SCATTER, "return ", "mean = "), "`return` is missing"),
    "the mean over elements": (
        edit(REDUCE_SCATTER, f"{_SUM} / world_size", "received.view(world_size, -1).mean(dim=1)"),
        "taken over elements, not over ranks",
    ),
    "input and output swapped": (
        edit(REDUCE_SCATTER, "(received, flat)", "(flat, received)"),
        "the output comes first",
    ),
    "looks at what it sent": (edit(REDUCE_SCATTER, "received.view", "flat.view"), "this rank's own shards"),
    "room for one shard": (
        edit(REDUCE_SCATTER, "torch.empty_like(flat)", "torch.empty(flat.numel() // world_size)"),
        "room for a shard from every rank",
    ),
    "everyone's own shard": (
        edit(
            REDUCE_SCATTER_BY_REDUCES,
            "    for owner, shard in enumerate(shards):\n        dist.reduce(shard, dst=owner)\n",
            "    dist.all_reduce(shards[rank])\n",
        ),
        "different shards were added up",
    ),
}

# ---------------------------------------------------------------------- 04.2

ZERO1_LAZY = """\
from zerolab import DDP


class MyZero1(DDP):
    stage = 1

    def optimizer_params(self, unit):
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit):
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)
        self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name).wait()

    def after_step(self, unit):
        self.stale.append(unit)

    def pre_forward(self, unit):
        self.gather_stale(until=unit)
"""

ZERO1_BY_HAND = """\
import torch
import torch.distributed as dist
import zerolab


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit):
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit):
        received = torch.empty_like(unit.bucket.full)
        dist.all_to_all_single(received, unit.bucket.full, group=self.comm.group)
        unit.bucket.grad = received.view(self.world_size, -1).sum(dim=0) / self.world_size

    def after_step(self, unit):
        unit.gather()
"""

_PARAMS = "unit.layout.slices(unit.keep_shard(), self.rank)"

_REDUCE = "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)"

_GATHER = "self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()"

_HAND = "received.view(self.world_size, -1).sum(dim=0) / self.world_size"

ZERO1_MUTANTS = {
    "full parameters": (
        edit(ZERO1, f"return {_PARAMS}", "return unit.layout.views(unit.master)"),
        "the optimizer sees full parameters",
    ),
    "keep_shard forgotten": (edit(ZERO1, "unit.keep_shard()", "unit.shard"), "unit.master still holds everything"),
    "another rank's parameters": (
        edit(ZERO1, "unit.keep_shard(), self.rank", "unit.keep_shard(), (self.rank + 1) % self.world_size"),
        "another rank's slice",
    ),
    "copies for the optimizer": (
        edit(ZERO1, _PARAMS, f"[view.clone() for view in {_PARAMS}]"),
        "copies: the optimizer would change them",
    ),
    "a copy of the shard": (
        edit(
            ZERO1,
            f"return {_PARAMS}",
            "unit.master = unit.shard = unit.shard.clone()\n        return unit.layout.slices(unit.master, self.rank)",
        ),
        "a copy of the slice is kept besides the full parameters",
    ),
    "all-reduce": (
        edit(ZERO1, _REDUCE, "return self.comm.all_reduce(unit.bucket.full, unit.name)"),
        "an all-reduce instead of a reduce-scatter",
    ),
    "gathers the gradient": (
        edit(
            ZERO1,
            _REDUCE,
            "self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name).wait()\n"
            "        return self.comm.all_gather(unit.bucket.full, unit.bucket.grad, unit.name)",
        ),
        "an all-reduce instead of a reduce-scatter",
    ),
    "sum for mean": (edit(ZERO1_BY_HAND, _HAND, _HAND.removesuffix(" / self.world_size")), "summed over ranks"),
    "divided twice": (
        edit(ZERO1, _REDUCE, _REDUCE.removeprefix("return ") + ".wait()\n        unit.bucket.grad /= self.world_size"),
        "divided by N twice",
    ),
    "not reduced": (edit(ZERO1, f"        {_REDUCE}\n", ""), "the rank's own gradient: nothing was sent"),
    "forgotten wait": (edit(ZERO1, _REDUCE, _REDUCE.removeprefix("return ")), "a forgotten wait"),
    "another rank's gradient": (
        edit(
            ZERO1_BY_HAND,
            f"unit.bucket.grad = {_HAND}",
            "shards = [shard.clone() for shard in unit.bucket.full.chunk(self.world_size)]\n"
            "        for owner, shard in enumerate(shards):\n"
            "            dist.reduce(shard, dst=(owner + 1) % self.world_size)\n"
            "        unit.bucket.grad = shards[self.rank - 1] / self.world_size",
            "        dist.all_to_all_single(received, unit.bucket.full, group=self.comm.group)\n",
            "",
        ),
        "another rank's slice",
    ),
    "unit.bucket.grad not set": (
        edit(ZERO1, "unit.bucket.grad = ", "mine = ", "scatter(unit.bucket.grad", "scatter(mine"),
        "did not leave the mean in unit.bucket.grad",
    ),
    "nobody gathers": (edit(ZERO1, _GATHER, "pass"), "the ranks' weights drift apart"),
    "gather not waited for": (edit(ZERO1, f"{_GATHER}", _GATHER.removesuffix(".wait()")), "a forgotten wait"),
    "gathers in every forward": (
        edit(
            ZERO1,
            "def after_step",
            f"def pre_forward(self, unit):\n        {_GATHER.replace('.full,', '.full.data,')}\n\n    def after_step",
        ),
        "gathered in every forward",
    ),
    "gathers at the wrong places": (
        edit(
            ZERO1,
            _GATHER,
            "shards = [torch.empty_like(unit.master) for _ in range(self.world_size)]\n"
            "        dist.all_gather(shards, unit.master)\n"
            "        unit.full.copy_(torch.cat(shards[::-1]))",
            "import zerolab\n",
            "import torch\nimport torch.distributed as dist\nimport zerolab\n",
        ),
        "this rank's own slice is wrong",
    ),
    "unit.full replaced": (
        edit(
            ZERO1,
            _GATHER,
            "full = unit.full.clone()\n"
            "        self.comm.all_gather(full, unit.master, unit.name).wait()\n"
            "        unit.full = full",
        ),
        "unit.full was replaced",
    ),
    "the work for the gradient": (
        edit(
            ZERO1,
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)\n        return self",
            "unit.bucket.grad = self",
            "reduce_scatter(unit.bucket.grad,",
            "reduce_scatter(unit.layout.shard(unit.bucket.full, self.rank),",
        ),
        "returns something to wait for",
    ),
    "one flat tensor for the optimizer": (
        edit(ZERO1, _PARAMS, "[unit.keep_shard()]"),
        "one tensor for each parameter",
    ),
    "full and shard swapped": (
        edit(ZERO1, _GATHER, "self.comm.all_gather(unit.master, unit.full, unit.name).wait()"),
        "the output comes first",
    ),
    "the function of 04.1": (
        edit(ZERO1, _REDUCE, "unit.bucket.grad = reduce_scatter_mean(unit.bucket.full, self.rank, self.world_size)"),
        "a file of its own",
    ),
    "nothing of its own": (
        "import zerolab\n\n\nclass MyZero1(zerolab.Zero1):\n    stage = 1\n",
        "write your own",
    ),
}

RIGHT = {
    "04.1": (REDUCE_SCATTER_ASYNC, REDUCE_SCATTER_BY_REDUCES),
    "04.2": (ZERO1_LAZY, ZERO1_BY_HAND),
}

WRONG = {
    "04.1": REDUCE_SCATTER_MUTANTS,
    "04.2": ZERO1_MUTANTS,
}
