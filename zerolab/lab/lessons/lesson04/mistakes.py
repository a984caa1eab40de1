"""Lesson 04: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson04 import REDUCE_SCATTER, ZERO1

# ---------------------------------------------------------------------- 04.1

REDUCE_SCATTER_ASYNC = """\
import torch
from torch.distributed import all_to_all_single


def reduce_scatter_mean(flat, rank, world_size):
    received = torch.empty(flat.numel(), dtype=flat.dtype)
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

REDUCE_SCATTER_BY_GATHERS = """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    for owner, shard in enumerate(flat.chunk(world_size)):
        into = [torch.empty_like(shard) for _ in range(world_size)] if rank == owner else None
        dist.gather(shard, into, dst=owner)
        if rank == owner:
            mean = sum(into) / world_size
    return mean
"""

REDUCE_SCATTER_BY_SCATTERS = """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    total = torch.zeros_like(flat.chunk(world_size)[0])
    for source in range(world_size):
        part = torch.empty_like(total)
        dist.scatter(part, list(flat.chunk(world_size)) if rank == source else None, src=source)
        total += part
    return total / world_size
"""

REDUCE_SCATTER_BY_LIST = """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    shards = list(flat.chunk(world_size))
    total = torch.empty_like(shards[rank])
    dist.reduce_scatter(total, shards)
    return total / world_size
"""

REDUCE_SCATTER_FUNCTIONAL = """\
import torch.distributed as dist
from torch.distributed._functional_collectives import reduce_scatter_tensor


def reduce_scatter_mean(flat, rank, world_size):
    return reduce_scatter_tensor(flat, "sum", 0, dist.group.WORLD) / world_size
"""

REDUCE_SCATTER_THROUGH_AUTOGRAD = """\
import torch
from torch.distributed.nn.functional import all_to_all_single


def reduce_scatter_mean(flat, rank, world_size):
    received = all_to_all_single(torch.empty_like(flat), flat)
    return received.view(world_size, -1).sum(dim=0) / world_size
"""

REDUCE_SCATTER_BY_MESSAGES = """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    shards = list(flat.chunk(world_size))
    parts = [torch.empty_like(shard) for shard in shards]
    parts[rank] = shards[rank]
    messages = []
    for other in range(world_size):
        if other != rank:
            messages.append(dist.P2POp(dist.isend, shards[other], other))
            messages.append(dist.P2POp(dist.irecv, parts[other], other))
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return torch.stack(parts).mean(dim=0)
"""

_SUM = "received.view(world_size, -1).sum(dim=0)"

REDUCE_SCATTER_MISTAKES = {
    "functional all-reduce": Mistake(
        """\
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce


def reduce_scatter_mean(flat, rank, world_size):
    return all_reduce(flat, "sum", dist.group.WORLD).chunk(world_size)[rank] / world_size
""",
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "functional all-gather": Mistake(
        """\
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


def reduce_scatter_mean(flat, rank, world_size):
    everything = funcol.all_gather_tensor(flat, 0, dist.group.WORLD)
    return everything.view(world_size, world_size, -1)[:, rank].mean(dim=0)
""",
        ("every rank sends everything to every rank, and most of it is wasted: send each shard to its owner only"),
    ),
    "all-reduce through autograd": Mistake(
        """\
from torch.distributed.nn.functional import all_reduce


def reduce_scatter_mean(flat, rank, world_size):
    return all_reduce(flat).chunk(world_size)[rank] / world_size
""",
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "all-reduce": Mistake(
        """\
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    dist.all_reduce(flat)
    return flat.chunk(world_size)[rank] / world_size
""",
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "gathers everything": Mistake(
        """\
import torch
import torch.distributed as dist


def reduce_scatter_mean(flat, rank, world_size):
    flats = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(flats, flat)
    return torch.stack(flats).mean(dim=0).chunk(world_size)[rank]
""",
        ("every rank sends everything to every rank, and most of it is wasted: send each shard to its owner only"),
    ),
    "sum for mean": Mistake(
        edit(REDUCE_SCATTER, " / world_size", ""),
        "summed over ranks, not averaged",
    ),
    "divided twice": Mistake(
        edit(REDUCE_SCATTER, "(received, flat)", "(received, flat / world_size)"),
        "divided by N twice",
    ),
    "the full mean": Mistake(
        edit(REDUCE_SCATTER, _SUM, "received"),
        "the full mean: return one shard, of flat.numel() / N elements",
    ),
    "its own part alone": Mistake(
        edit(REDUCE_SCATTER, f"{_SUM} / world_size", "received.view(world_size, -1)[rank]"),
        "this rank's own part alone: `received` has a part from every rank, one after another. Add them up",
    ),
    "sums over the elements": Mistake(
        edit(REDUCE_SCATTER, _SUM, "received.view(-1, world_size).sum(dim=1)"),
        "rows and columns are mixed up: view(N, S), then sum over the N rows",
    ),
    "another rank's slice": Mistake(
        edit(
            REDUCE_SCATTER_BY_REDUCES, "dst=owner", "dst=(owner + 1) % world_size", "shards[rank]", "shards[rank - 1]"
        ),
        "another rank's shard: this is the mean of shard 1",
    ),
    "forgotten wait": Mistake(
        edit(
            REDUCE_SCATTER_ASYNC, "    work.wait()\n", "", "torch.empty(flat.numel(), dtype=flat.dtype)", "flat.clone()"
        ),
        "a forgotten wait: all_to_all_single was started once without waiting for it, so nothing had arrived",
    ),
    "nothing returned": Mistake(
        edit(REDUCE_SCATTER, "return ", "mean = "),
        "the function returns nothing: `return` is missing",
    ),
    "the mean over elements": Mistake(
        edit(REDUCE_SCATTER, f"{_SUM} / world_size", "received.view(world_size, -1).mean(dim=1)"),
        "the mean was taken over elements, not over ranks: view(N, S) has a row per rank, so use dim=0",
    ),
    "input and output swapped": Mistake(
        edit(REDUCE_SCATTER, "(received, flat)", "(flat, received)"),
        "the output comes first, and it is a separate tensor: dist.all_to_all_single(received, flat)",
    ),
    "looks at what it sent": Mistake(
        edit(REDUCE_SCATTER, "received.view", "flat.view"),
        "this rank's own shards were added up: what the other ranks sent is in `received`",
    ),
    "room for one shard": Mistake(
        edit(REDUCE_SCATTER, "torch.empty_like(flat)", "torch.empty(flat.numel() // world_size, dtype=flat.dtype)"),
        "`received` needs room for a shard from every rank: as many elements as `flat`",
    ),
    "what the call returns": Mistake(
        edit(REDUCE_SCATTER, "    dist.all_to_all_single(received", "    received = dist.all_to_all_single(received"),
        "dist.all_to_all_single() returns None: it leaves the result in the tensor that you give it",
    ),
    "sums before the wait": Mistake(
        edit(
            REDUCE_SCATTER_ASYNC,
            "    work.wait()\n    return sum(received.split(flat.numel() // world_size))",
            "    mean = sum(received.split(flat.numel() // world_size))\n    work.wait()\n    return mean",
        ),
        "used before the wait: what a call with async_op=True brings is there only after its wait()",
    ),
    "only rank 0 divides": Mistake(
        edit(REDUCE_SCATTER, "/ world_size", "/ (world_size if rank == 0 else 1)"),
        "only rank 0 divided by the number of ranks: every rank must do that",
    ),
    "divides its input": Mistake(
        edit(REDUCE_SCATTER, "    received =", "    flat /= world_size\n    received =", " / world_size\n", "\n"),
        "the caller still needs its gradient: work on a copy",
    ),
    "reduces its input": Mistake(
        edit(REDUCE_SCATTER_BY_REDUCES, "shard.clone() for shard", "shard for shard"),
        "the caller still needs its gradient: work on a copy",
    ),
    "keeps the result": Mistake(
        edit(
            REDUCE_SCATTER,
            f"return {_SUM} / world_size",
            f"mean = _means.setdefault(flat.numel(), torch.empty_like(flat)[: flat.numel() // world_size])\n"
            f"    return mean.copy_({_SUM} / world_size)",
            "def reduce",
            "_means = {}\n\n\ndef reduce",
        ),
        "all calls return the same tensor, a buffer that is kept between them: make a new one in every call",
    ),
    "keeps the length": Mistake(
        edit(REDUCE_SCATTER, "view(world_size, -1)", "view(world_size, 5)"),
        (
            "right for the first call only: S is flat.numel() // world_size, and nothing may be kept from an "
            "earlier call"
        ),
    ),
    "float32 alone": Mistake(
        edit(REDUCE_SCATTER, "empty_like(flat)", "empty(flat.numel())"),
        "right in float32 only: make tensors with torch.empty_like(flat), which has the dtype of `flat`",
    ),
    "rounds down": Mistake(
        edit(REDUCE_SCATTER, " / world", " // world"),
        "// rounds down: divide with /",
    ),
    "divides by GPUs": Mistake(
        edit(REDUCE_SCATTER, "/ world_size", "/ torch.cuda.device_count()"),
        ("a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"),
    ),
    "without its own": Mistake(
        edit(REDUCE_SCATTER, _SUM, f"({_SUM} - received.view(world_size, -1)[rank])"),
        "this rank's own contribution is missing: the mean is over all ranks",
    ),
    "scattered from rank 0": Mistake(
        edit(
            REDUCE_SCATTER,
            "dist.all_to_all_single(received, flat)",
            "dist.scatter(received[: len(flat) // world_size], list(flat.chunk(world_size)) if rank == 0 else None)",
            f"{_SUM} / world_size",
            "received[: len(flat) // world_size]",
        ),
        ("a scatter hands out what rank 0 has, and nothing of the other ranks is in it: add up all ranks' parts"),
    ),
    "a list": Mistake(
        edit(REDUCE_SCATTER, f"{_SUM} / world_size", "list(received.chunk(world_size))"),
        "there is a piece from every rank: add them up, divide by N, and return one tensor",
    ),
    "everyone's own shard": Mistake(
        edit(
            REDUCE_SCATTER_BY_REDUCES,
            "    for owner, shard in enumerate(shards):\n        dist.reduce(shard, dst=owner)\n",
            "    dist.all_reduce(shards[rank])\n",
        ),
        ("different shards were added up, rank 0's first and rank 1's second: on rank r, add up every rank's shard r"),
    ),
    "a fixed number of ranks": Mistake(
        edit(REDUCE_SCATTER, "view(world_size, -1)", "view(4, -1)"),
        ("written for one number of ranks or elements: view(N, -1) has a row for each rank, whatever N and S are"),
    ),
    "adds to its own shard": Mistake(
        edit(
            REDUCE_SCATTER,
            f"return {_SUM} / world_size",
            "mine = flat.view(world_size, -1)[rank]\n"
            "    for other, part in enumerate(received.view(world_size, -1)):\n"
            "        mine += part * (other != rank)\n"
            "    return mine / world_size",
        ),
        (
            "a view of the shard was written to, and so `flat` itself: the caller still needs its gradient: work "
            "on a copy"
        ),
    ),
    "every N-th element": Mistake(
        edit(REDUCE_SCATTER, "(received, flat)", "(received, flat.view(-1, world_size).t().flatten())"),
        "every N-th element was added up, but shard r is elements r * S to (r + 1) * S",
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

ZERO1_BY_LISTS = edit(
    ZERO1,
    "import zerolab\n",
    "import torch\nimport torch.distributed as dist\nimport zerolab\n",
    "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)\n"
    "        return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
    "shards = list(unit.bucket.full.chunk(self.world_size))\n"
    "        unit.bucket.grad = torch.empty_like(shards[0])\n"
    "        dist.reduce_scatter(unit.bucket.grad, shards)\n"
    "        unit.bucket.grad /= self.world_size",
    "self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()",
    "dist.all_gather(list(unit.full.chunk(self.world_size)), unit.master.to(unit.full.dtype))",
)

ZERO1_BY_LISTS_OF_ITS_GROUP = edit(
    ZERO1_BY_LISTS,
    "(unit.bucket.grad, shards)",
    "(unit.bucket.grad, shards, group=self.comm.group)",
    "unit.full.dtype))",
    "unit.full.dtype), group=self.comm.group)",
)

ZERO1_WITHOUT_CAST = edit(ZERO1, ".to(unit.full.dtype)", "")

ZERO1_WAITS_LATER = edit(
    ZERO1,
    "self.comm.all_gather",
    "unit.arriving = self.comm.all_gather",
    ".wait()",
    "\n\n    def pre_forward(self, unit):\n"
    "        if getattr(unit, 'arriving', None):\n"
    "            unit.arriving.wait()\n"
    "            unit.arriving = None",
)

_PARAMS = "unit.layout.slices(unit.keep_shard(), self.rank)"

_REDUCE = "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)"

_INTO_MINE = _REDUCE.replace("unit.bucket.grad", "mine")

_GATHER = "self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()"

_HAND = "received.view(self.world_size, -1).sum(dim=0) / self.world_size"

ZERO1_MISTAKES = {
    "no stage": Mistake(
        edit(ZERO1, "    stage = 1\n\n", ""),
        (
            "`stage = 1` is missing from the class: clipping and checkpoints go by it, and would take each slice "
            "for all there is"
        ),
    ),
    "full parameters": Mistake(
        edit(ZERO1, f"return {_PARAMS}", "return unit.layout.views(unit.master)"),
        "the optimizer sees full parameters, and will keep state for all of them: give it this rank's slices",
    ),
    "keep_shard forgotten": Mistake(
        edit(ZERO1, "unit.keep_shard()", "unit.shard"),
        "unit.master still holds everything: keep_shard() makes this rank's shard the master, and returns it",
    ),
    "another rank's parameters": Mistake(
        edit(ZERO1, "unit.keep_shard(), self.rank", "unit.keep_shard(), (self.rank + 1) % self.world_size"),
        "another rank's slice: layout.slices(shard, rank) takes the rank that owns the shard, self.rank",
    ),
    "copies for the optimizer": Mistake(
        edit(ZERO1, _PARAMS, f"[view.clone() for view in {_PARAMS}]"),
        ("copies: the optimizer would change them and not the model. Give it views, which layout.slices() returns"),
    ),
    "slices of the full parameters": Mistake(
        edit(
            ZERO1,
            f"return {_PARAMS}",
            "unit.keep_shard()\n        return unit.layout.slices(unit.layout.shard(unit.full, self.rank), self.rank)",
        ),
        (
            "what the optimizer updates is not in unit.master: it got copies or slices of unit.full, or "
            "unit.master was replaced later"
        ),
    ),
    "a copy of the shard": Mistake(
        edit(
            ZERO1,
            f"return {_PARAMS}",
            "unit.master = unit.shard = unit.shard.clone()\n        return unit.layout.slices(unit.master, self.rank)",
        ),
        "a copy of the slice is kept besides the full parameters: give the optimizer views of them",
    ),
    "all-reduce": Mistake(
        edit(ZERO1, _REDUCE, "return self.comm.all_reduce(unit.bucket.full, unit.name)"),
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "gathers the gradient": Mistake(
        edit(
            ZERO1,
            _REDUCE,
            "self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name).wait()\n"
            "        return self.comm.all_gather(unit.bucket.full, unit.bucket.grad, unit.name)",
        ),
        "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes",
    ),
    "sum for mean": Mistake(
        edit(ZERO1_BY_HAND, _HAND, _HAND.removesuffix(" / self.world_size")),
        "summed over ranks, not averaged",
    ),
    "divided twice": Mistake(
        edit(ZERO1, _REDUCE, _REDUCE.removeprefix("return ") + ".wait()\n        unit.bucket.grad /= self.world_size"),
        "divided by N twice",
    ),
    "not reduced": Mistake(
        edit(ZERO1, f"        {_REDUCE}\n", ""),
        "the rank's own gradient: nothing was sent",
    ),
    "forgotten wait": Mistake(
        edit(ZERO1, _REDUCE, _REDUCE.removeprefix("return ")),
        ("a forgotten wait: self.comm.reduce_scatter was started without waiting for it, so nothing had arrived"),
    ),
    "another rank's gradient": Mistake(
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
        "another rank's slice: the mean of rank 1's shard",
    ),
    "unit.bucket.grad not set": Mistake(
        edit(ZERO1, "unit.bucket.grad = ", "mine = ", "scatter(unit.bucket.grad", "scatter(mine"),
        "reduce() did not leave the mean in unit.bucket.grad",
    ),
    "a backup on the unit": Mistake(
        edit(ZERO1, _GATHER, f"{_GATHER}\n        unit.backup = unit.full.clone()"),
        "memory that stays for nothing: what a method needs while it runs goes into a local name",
    ),
    "broadcasts to everybody": Mistake(
        edit(
            ZERO1,
            _GATHER,
            "unit.layout.shard(unit.full, self.rank).copy_(unit.master)\n"
            "        for rank in range(self.world_size):\n"
            "            dist.broadcast(unit.layout.shard(unit.full, rank), rank)",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        ("dist.broadcast() talks to all processes, and only some of them share this model: pass group=self.comm.group"),
    ),
    "nobody gathers": Mistake(
        edit(ZERO1, _GATHER, "pass"),
        (
            "the other ranks' slices are as before the step: nothing was gathered into unit.full, and the ranks' "
            "weights drift apart"
        ),
    ),
    "gather not waited for": Mistake(
        edit(ZERO1, f"{_GATHER}", _GATHER.removesuffix(".wait()")),
        "a forgotten wait: self.comm.all_gather was started without waiting for it",
    ),
    "gathers in every forward": Mistake(
        edit(
            ZERO1,
            "def after_step",
            f"def pre_forward(self, unit):\n        {_GATHER.replace('.full,', '.full.data,')}\n\n    def after_step",
        ),
        "gathered in every forward: once after a step is enough, since the full parameters stay",
    ),
    "gathers at the wrong places": Mistake(
        edit(
            ZERO1,
            _GATHER,
            "shards = [torch.empty_like(unit.master) for _ in range(self.world_size)]\n"
            "        dist.all_gather(shards, unit.master)\n"
            "        unit.full.copy_(torch.cat(shards[::-1]))",
            "import zerolab\n",
            "import torch\nimport torch.distributed as dist\nimport zerolab\n",
        ),
        "this rank's own slice is wrong: it was overwritten with something other than its new values",
    ),
    "unit.full replaced": Mistake(
        edit(
            ZERO1,
            _GATHER,
            "full = unit.full.clone()\n"
            "        self.comm.all_gather(full, unit.master, unit.name).wait()\n"
            "        unit.full = full",
        ),
        "unit.full was replaced, but forward reads views of the old one: gather into unit.full itself",
    ),
    "the work for the gradient": Mistake(
        edit(
            ZERO1,
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)\n        return self",
            "unit.bucket.grad = self",
            "reduce_scatter(unit.bucket.grad,",
            "reduce_scatter(unit.layout.shard(unit.bucket.full, self.rank),",
        ),
        "reduce_scatter() returns something to wait for: return that; unit.bucket.grad is its output",
    ),
    "one flat tensor for the optimizer": Mistake(
        edit(ZERO1, _PARAMS, "[unit.keep_shard()]"),
        (
            "optimizer_params() must return one tensor for each parameter, empty ones too, as "
            "layout.slices(shard, rank) does"
        ),
    ),
    "full and shard swapped": Mistake(
        edit(ZERO1, _GATHER, "self.comm.all_gather(unit.master, unit.full, unit.name).wait()"),
        (
            "the full tensor and a shard were mixed up: reduce_scatter fills a shard from a full tensor, "
            "all_gather a full tensor from shards, and the output comes first"
        ),
    ),
    "the function of 04.1": Mistake(
        edit(ZERO1, _REDUCE, "unit.bucket.grad = reduce_scatter_mean(unit.bucket.full, self.rank, self.world_size)"),
        ("each exercise is a file of its own: use self.comm.reduce_scatter(), or copy your function into this cell"),
    ),
    "what the call returns": Mistake(
        edit(
            ZERO1_BY_LISTS,
            "dist.reduce_scatter(unit",
            "unit.bucket.grad = dist.reduce_scatter(unit",
            "        unit.bucket.grad /= self.world_size\n",
            "",
        ),
        ("the functions of torch.distributed return None: the result is in the tensor that you pass to be filled"),
    ),
    "sums before the wait": Mistake(
        edit(
            ZERO1_BY_HAND,
            "        dist.all_to_all_single(received, unit.bucket.full, ",
            "        work = dist.all_to_all_single(received, unit.bucket.full, async_op=True, ",
            _HAND,
            f"{_HAND}\n        work.wait()",
        ),
        "used before the wait: what a call with async_op=True brings is there only after its wait()",
    ),
    "only rank 0 divides": Mistake(
        edit(ZERO1_BY_HAND, "/ self.world_size", "/ (self.world_size if self.rank == 0 else 1)"),
        "only rank 0 divided by the number of ranks: every rank must do that",
    ),
    "the first backward's gradient": Mistake(
        edit(
            ZERO1_BY_HAND,
            f"unit.bucket.grad = {_HAND}",
            f"if not hasattr(unit, 'mean'):\n            unit.mean = {_HAND}\n"
            "        unit.bucket.grad = unit.mean.clone()",
        ),
        "the first backward's gradients again: nothing may be kept from one backward to the next",
    ),
    "into rank 0's place": Mistake(
        edit(ZERO1, "layout.shard(unit.bucket.full, self.rank)", "layout.shard(unit.bucket.full, 0)"),
        (
            "another rank's slice: as output, reduce_scatter() takes this rank's shard of its input, or memory of "
            "its own"
        ),
    ),
    "no empty slices": Mistake(
        edit(ZERO1, _PARAMS, f"[view for view in {_PARAMS} if view.numel()]"),
        (
            "optimizer_params() must return one tensor for each parameter, empty ones too, as "
            "layout.slices(shard, rank) does"
        ),
    ),
    "the rank first": Mistake(
        edit(ZERO1, "(unit.keep_shard(), self.rank)", "(self.rank, unit.keep_shard())"),
        "the tensor comes first, then the rank: layout.slices(shard, rank)",
    ),
    "slices without gaps": Mistake(
        edit(
            ZERO1,
            f"return {_PARAMS}",
            "shard, slices, end = unit.keep_shard(), [], 0\n"
            "        first, last = unit.layout.bounds(self.rank)\n"
            "        for slot in unit.layout.slots:\n"
            "            begin, end = end, end + slot.numel\n"
            "            start = min(max(begin, first), last)\n"
            "            part = shard[start - first : max(start, min(end, last)) - first]\n"
            "            slices.append(part.view(-1, *[1] * (len(slot.shape) - 1)))\n"
            "        return slices",
        ),
        (
            "shards cut through parameters, with gaps in between, and some slices are empty: unit.layout knows "
            "the places"
        ),
    ),
    "float32 alone": Mistake(
        edit(ZERO1_BY_HAND, "torch.empty_like(unit.bucket.full)", "torch.empty(unit.layout.size)"),
        (
            "right in float32 only: take dtypes from unit.full and unit.bucket.full, and cast unit.master to "
            "unit.full.dtype"
        ),
    ),
    "a buffer of float32": Mistake(
        edit(
            ZERO1,
            "unit.layout.shard(unit.bucket.full, self.rank)",
            "unit.bucket.full.new_empty(unit.layout.shard_size).float()",
        ),
        (
            "right in float32 only: take dtypes from unit.full and unit.bucket.full, and cast unit.master to "
            "unit.full.dtype"
        ),
    ),
    "gathers without the cast": Mistake(
        edit(ZERO1_BY_LISTS, "unit.master.to(unit.full.dtype)", "unit.master"),
        (
            "right in float32 only: take dtypes from unit.full and unit.bucket.full, and cast unit.master to "
            "unit.full.dtype"
        ),
    ),
    "everyone's own shard": Mistake(
        edit(
            ZERO1_BY_LISTS,
            "unit.bucket.grad = torch.empty_like(shards[0])",
            "unit.bucket.grad = shards[self.rank]",
            "dist.reduce_scatter(unit.bucket.grad, shards)",
            "dist.all_reduce(unit.bucket.grad)",
        ),
        ("different shards were added up, rank 0's first and rank 1's second: on rank r, add up every rank's shard r"),
    ),
    "talks to all processes": Mistake(
        ZERO1_BY_LISTS,
        (
            "dist.reduce_scatter() talks to all processes, and only some of them share this model: pass "
            "group=self.comm.group"
        ),
    ),
    "its rank among all processes": Mistake(
        edit(
            ZERO1,
            "self.rank",
            "dist.get_rank()",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        (
            "all processes are counted by dist.get_rank(), and only some of them share this model: self.rank, "
            "self.world_size"
        ),
    ),
    "divides by the number of all processes": Mistake(
        edit(ZERO1_BY_HAND, "/ self.world_size", "/ dist.get_world_size()"),
        (
            "all processes are counted by dist.get_world_size(), and only some of them share this model: "
            "self.rank, self.world_size"
        ),
    ),
    "unit.full is None": Mistake(
        edit(ZERO1_BY_LISTS, "        dist.all_gather(", "        unit.full = dist.all_gather("),
        (
            "unit.full is no tensor any more: gather into it (the functions of torch.distributed return None: the "
            "result is in the tensor that you pass to be filled)"
        ),
    ),
    "returns the gradient": Mistake(
        edit(ZERO1, _REDUCE, f"{_REDUCE.removeprefix('return ')}.wait()\n        return unit.bucket.grad"),
        "return what has a wait(), as self.comm.reduce_scatter() returns it, or None if the mean is there",
    ),
    "a shard without padding": Mistake(
        edit(
            ZERO1,
            "unit.layout.shard(unit.bucket.full, self.rank)",
            "unit.bucket.full.split(max(1, unit.layout.numel // self.world_size))[self.rank]",
        ),
        (
            "shards cut through parameters, with gaps in between, and some slices are empty: unit.layout knows "
            "the places"
        ),
    ),
    "a stage without after_step": Mistake(
        edit(ZERO1, "def after_step", "def post_step"),
        "the class inherits after_step(): write your own",
    ),
    "its shard for all of unit.full": Mistake(
        edit(ZERO1, _GATHER, "unit.cast()"),
        (
            "unit.full was overwritten with this rank's shard, which is a part of it: self.comm.all_gather() puts "
            "every rank's shard in its place"
        ),
    ),
    "into the parameters": Mistake(
        edit(ZERO1, "unit.layout.shard(unit.bucket.full", "unit.layout.shard(unit.full"),
        "unit.full and unit.master hold the parameters: the gradients are in unit.bucket.full",
    ),
    "averages the parameters": Mistake(
        edit(ZERO1, "(unit.bucket.grad, unit.bucket.full", "(unit.bucket.grad, unit.full"),
        "unit.full and unit.master hold the parameters: the gradients are in unit.bucket.full",
    ),
    "the full gradient": Mistake(
        edit(ZERO1, _REDUCE, f"mine, unit.bucket.grad = unit.bucket.grad, unit.bucket.full\n        {_INTO_MINE}"),
        "it must be as long as unit.master: this rank's shard, (S,)",
    ),
    "flattened slices": Mistake(
        edit(ZERO1, _PARAMS, f"[view.flatten() for view in {_PARAMS}]"),
        "flattened: a slice has as many dimensions as its parameter, as layout.slices() returns it",
    ),
    "a shard of the shard": Mistake(
        edit(ZERO1, "unit.keep_shard()", "unit.layout.shard(unit.keep_shard(), self.rank)"),
        "unit.master is the shard already, and layout.slices(unit.master, self.rank) has its slices",
    ),
    "views of the shard": Mistake(
        edit(ZERO1, _PARAMS, "unit.layout.views(unit.keep_shard())"),
        (
            "layout.views() cuts a full tensor, (N * S,), into parameters; layout.slices(shard, rank) cuts a "
            "shard, (S,), into slices"
        ),
    ),
    "nothing of its own": Mistake(
        "import zerolab\n\n\nclass MyZero1(zerolab.Zero1):\n    stage = 1\n",
        "the class inherits optimizer_params(): write your own",
    ),
}

RIGHT = {
    "04.1": (
        REDUCE_SCATTER_ASYNC,
        REDUCE_SCATTER_BY_REDUCES,
        REDUCE_SCATTER_BY_GATHERS,
        REDUCE_SCATTER_BY_SCATTERS,
        REDUCE_SCATTER_BY_LIST,
        REDUCE_SCATTER_FUNCTIONAL,
        REDUCE_SCATTER_THROUGH_AUTOGRAD,
        REDUCE_SCATTER_BY_MESSAGES,
    ),
    "04.2": (ZERO1_LAZY, ZERO1_BY_HAND, ZERO1_BY_LISTS_OF_ITS_GROUP, ZERO1_WITHOUT_CAST, ZERO1_WAITS_LATER),
}

MISTAKES = {
    "04.1": REDUCE_SCATTER_MISTAKES,
    "04.2": ZERO1_MISTAKES,
}
