"""Lesson 06: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson06 import FORWARD, GATHER

from .sources import edit

# ---------------------------------------------------------------------- 06.1

GATHER_ASYNC = """\
import torch
import torch.distributed as dist


def release(full):
    storage = full.untyped_storage()
    if storage.size() > 0:
        storage.resize_(0)


def gather(full, shard):
    storage = full.untyped_storage()
    if storage.size() == 0:
        storage.resize_(full.nbytes)
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard, async_op=True).wait()
    torch.cat(parts, out=full)
"""

GATHER_BY_BROADCASTS = """\
import torch.distributed as dist


def release(full):
    full.untyped_storage().resize_(0)


def gather(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    for rank, part in enumerate(full.split(len(shard))):
        if rank == dist.get_rank():
            part.copy_(shard)
        dist.broadcast(part, src=rank)
"""

_RESIZE = "full.untyped_storage().resize_(full.numel() * full.element_size())"

_RELEASE = "full.untyped_storage().resize_(0)"

_ALL_GATHER = "dist.all_gather(list(full.chunk(dist.get_world_size())), shard)"

GATHER_MUTANTS = {
    "releases nothing": (edit(GATHER, _RELEASE, "del full"), "nothing was released"),
    "writes zeros": (edit(GATHER, _RELEASE, "full.zero_()"), "zeros take as much memory"),
    "gives it another memory": (
        edit(GATHER, _RELEASE, "full.data = full.new_empty(0)", _RESIZE, "full.data = full.new_empty(0)"),
        "its views hold on to the old",
    ),
    "gathers elsewhere": (
        edit(
            GATHER,
            _RESIZE,
            "parts = [shard.clone() for _ in range(dist.get_world_size())]",
            _ALL_GATHER,
            "dist.all_gather(parts, shard)\n    import torch\n    full.data = torch.cat(parts)",
        ),
        "which the views know nothing about",
    ),
    "does not get the memory again": (edit(GATHER, _RESIZE, "pass"), "the memory was released and is still gone"),
    "counts elements": (edit(GATHER, " * full.element_size()", ""), "resize_ counts bytes"),
    "forgotten wait": (edit(GATHER, "shard)\n", "shard, async_op=True)\n"), "a forgotten wait"),
    "gathers only what was released": (
        edit(GATHER, _RESIZE, f"if full.untyped_storage().size():\n        return\n    {_RESIZE}"),
        "these are old values",
    ),
    "the wrong order": (edit(GATHER, "size())), shard)", "size()))[::-1], shard)"), "not in rank order"),
    "its own shard for all": (
        edit(GATHER, _ALL_GATHER, "full.copy_(shard.repeat(dist.get_world_size()))"),
        "nothing was sent",
    ),
    "one tensor for all that arrives": (
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = [shard.clone()] * dist.get_world_size()\n"
            "    dist.all_gather(parts, shard)\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "the same shard is in several parts",
    ),
    "sums what was in the memory": (  # if that was zero, the sum is right, but takes extra traffic
        edit(
            GATHER,
            _ALL_GATHER,
            "full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n    dist.all_reduce(full)",
        ),
        "all_reduce",
    ),
    "rank 0's shard for all": (
        edit(
            GATHER,
            _ALL_GATHER,
            "for part in full.chunk(dist.get_world_size()):\n"
            "        part.copy_(shard)\n        dist.broadcast(part, src=0)",
        ),
        "a broadcast, but each rank must contribute its own",
    ),
    "another shape": (edit(GATHER, _RELEASE, "full.resize_(0)"), "and keeps its memory"),
    "gathers on rank 0": (
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = list(full.chunk(dist.get_world_size()))\n"
            "    dist.gather(shard, parts if dist.get_rank() == 0 else None, dst=0)",
        ),
        "only rank 0 has all the shards",
    ),
    "returns the result": (
        edit(
            GATHER,
            _ALL_GATHER,
            "import torch\n    parts = [shard.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard)\n    return torch.cat(parts)",
        ),
        "gather() returned its result",
    ),
    "4 bytes for each element": (edit(GATHER, "full.element_size()", "4"), "resize_ counts bytes"),
    "the demonstration's 6 elements": (
        edit(GATHER, "full.numel() * full.element_size()", "6 * 4 * dist.get_world_size()"),
        "resize_ counts bytes",
    ),
    "what the call returns": (
        edit(
            GATHER,
            _ALL_GATHER,
            f"import torch\n    full.copy_(torch.cat({_ALL_GATHER}))",
        ),
        "dist.all_gather() returns None",
    ),
    "copies before the wait": (
        edit(
            GATHER_ASYNC,
            "async_op=True).wait()\n    torch.cat(parts, out=full)",
            "async_op=True)\n    torch.cat(parts, out=full)",
            "dist.all_gather(",
            "work = dist.all_gather(",
            "out=full)\n",
            "out=full)\n    work.wait()\n",
        ),
        "before the wait",
    ),
    "keeps the first unit's parts": (
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = _kept.setdefault('parts', list(full.chunk(dist.get_world_size())))\n"
            "    dist.all_gather(parts, shard)",
            "def release",
            "_kept = {}\n\n\ndef release",
        ),
        "nothing may be kept from an earlier call",
    ),
    "keeps a copy": (
        edit(
            GATHER_ASYNC,
            "def release",
            "_kept = {}\n\n\ndef release",
            "torch.cat(parts, out=full)",
            "_kept[full.numel()] = parts\n    torch.cat(parts, out=full)",
        ),
        "a copy was kept outside",
    ),
    "sums full tensors": (
        edit(
            GATHER,
            _ALL_GATHER,
            "full.zero_()\n"
            "    full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n"
            "    dist.all_reduce(full)",
        ),
        "extra traffic (all_reduce)",
    ),
    "rank 0's whole tensor for all": (
        edit(
            GATHER,
            _ALL_GATHER,
            "full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n    dist.broadcast(full, src=0)",
        ),
        "a broadcast sends what one rank has",
    ),
    "takes turns": (
        edit(
            GATHER_ASYNC,
            "torch.cat(parts, out=full)",
            "full.copy_(torch.stack(parts, dim=1).flatten())",
        ),
        "the shards belong end to end",
    ),
    "4 ranks": (edit(GATHER, "full.chunk(dist.get_world_size())", "full.view(4, -1)"), "with 1, 2, 3 and 4 ranks"),
    "by way of float32": (
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = [shard.float().clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard.float())\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "in the dtype of the shard",
    ),
    "by way of float32 where that is shorter": (
        edit(
            GATHER,
            _ALL_GATHER,
            "short = shard.float() if shard.element_size() > 4 else shard\n"
            "    parts = [short.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, short)\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "it became float32 on the way",
    ),
    "all wait before they release": (
        edit(GATHER, _RELEASE, f"dist.barrier()\n    {_RELEASE}"),
        "concerns this rank alone",
    ),
}

# ---------------------------------------------------------------------- 06.2, and what 07.1 also needs

FORWARD_BY_HAND = """\
import torch
from zerolab import Zero2


class MyZero3Forward(Zero2):
    def optimizer_params(self, unit):
        unit.shard = torch.empty_like(unit.shard).copy_(unit.shard)
        slices = super().optimizer_params(unit)
        unit.release()
        return slices

    def pre_forward(self, unit):
        unit.start_gather()
        unit.gather()

    def post_forward(self, unit):
        backward_follows = torch.is_grad_enabled()
        stays = unit in self.root and backward_follows
        if not stays:
            unit.release()
"""

FORWARD_PREFETCHED = """\
import torch
from zerolab import Zero2


class MyZero3Forward(Zero2):
    def optimizer_params(self, unit):
        unit.shard = unit.shard.detach().clone()
        unit.full.untyped_storage().resize_(0)
        unit.gathered = False
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def pre_forward(self, unit):
        unit.gather()
        place = self.units.index(unit) + 1
        if torch.is_grad_enabled() and unit not in self.root and place < len(self.units):
            self.units[place].start_gather()

    def post_forward(self, unit):
        if unit in self.root and torch.is_grad_enabled():
            return
        unit.release()
"""

GATHER_BY_HAND = """\
        if not unit.gathered:
            full = unit.full.data
            full.untyped_storage().resize_(full.nbytes)
            shards = list(full.chunk(self.world_size))
            torch.distributed.all_gather(shards, unit.shard.to(full.dtype), group=self.comm.group)
            unit.gathered = True
"""

FORWARD_GATHERS = edit(FORWARD, "        unit.gather()\n", GATHER_BY_HAND)

_KEEPS = "        if unit not in self.root or not torch.is_grad_enabled():\n            unit.release()\n"

_PRE = "    def pre_forward(self, unit: Unit) -> None:\n        unit.gather()\n"

FORWARD_MUTANTS = {
    "a list of copies": (
        edit(FORWARD, _KEEPS, f"        self.seen = [*getattr(self, 'seen', []), unit.full.clone()]\n{_KEEPS}"),
        "self.seen holds",
    ),
    "never releases": (edit(FORWARD, _KEEPS, "        pass\n"), "gathered but never released"),
    "releases the root too": (edit(FORWARD, _KEEPS, "        unit.release()\n"), "backward begins with the root"),
    "releases only the root": (edit(FORWARD, "unit not in", "unit in"), "gathered but never released"),
    "releases only under no_grad": (
        edit(FORWARD, "if unit not in self.root or not torch", "if not torch"),
        "gathered but never released",
    ),
    "keeps the root under no_grad": (
        edit(FORWARD, " or not torch.is_grad_enabled()", ""),
        "the root must go too",
    ),
    "asks whether the model trains": (
        edit(FORWARD, "not torch.is_grad_enabled()", "not self.model.training"),
        "the root must go too",
    ),
    "releases too early": (
        edit(FORWARD, _PRE, _PRE + "        if unit not in self.root:\n            unit.release()\n"),
        "released before its forward was over",
    ),
    "gathers nothing": (edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "pass")), "it was not gathered"),
    "gathers afterwards": (
        edit(
            FORWARD,
            _PRE,
            _PRE.replace("unit.gather()", "pass"),
            "            unit.release()",
            "            unit.gather()",
        ),
        "it was not gathered",
    ),
    "gathers all at the start": (
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "for each in self.units:\n            each.gather()")),
        "all units are gathered at once",
    ),
    "does not release at construction": (
        edit(FORWARD, "clone()\n        unit.release()\n", "clone()\n"),
        "does not release the full parameters",
    ),
    "the shard goes with the full parameters": (
        edit(FORWARD, "        unit.shard = unit.shard.clone()\n", ""),
        "the shard goes with the full parameters",
    ),
    "lets go behind the unit's back": (
        edit(FORWARD, "():\n            unit.release()", "():\n            unit.full.untyped_storage().resize_(0)"),
        "use unit.release(): it also records",
    ),
    "does not copy": (edit(FORWARD, "unit.shard.clone()", "torch.zeros_like(unit.shard)"), "the values must survive"),
    "clones too late": (
        edit(
            FORWARD,
            "        unit.shard = unit.shard.clone()\n        unit.release()",
            "        unit.release()\n        unit.shard = unit.shard.clone()",
        ),
        "the shard goes with the full parameters",
    ),
    "returns nothing": (edit(FORWARD, "return super()", "super()"), "`return` is missing"),
    "shows the optimizer nothing": (
        edit(
            FORWARD,
            "return super().optimizer_params(unit)",
            "unit.keep_shard()\n        return [unit.shard[:0].view(0, *[1] * (len(slot.shape) - 1)) "
            "for slot in unit.layout.slots]",
        ),
        "does not cover unit.shard",
    ),
    "the root is a list": (edit(FORWARD, "unit not in self.root", "unit is not self.root"), "self.root is a list"),
    "starts and does not wait": (
        edit(FORWARD, _PRE, _PRE.replace("gather", "start_gather")),
        "started without waiting",
    ),
    "releases every unit": (
        edit(
            FORWARD,
            "():\n            unit.release()",
            "():\n            for each in self.units:\n                each.release()",
        ),
        "Each call releases `unit` alone",
    ),
    "the first of the root": (edit(FORWARD, "unit not in self.root", "unit is not self.root[0]"), "it is empty"),
    "gathers by hand": (
        edit(
            FORWARD,
            _PRE,
            _PRE.replace(
                "unit.gather()",
                "unit.full.untyped_storage().resize_(unit.full.nbytes)\n"
                "        shards = list(unit.full.chunk(self.world_size))\n"
                "        torch.distributed.all_gather(shards, unit.shard.to(unit.full.dtype))",
            ),
        ),
        "autograd",
    ),
    "an all-reduce for the gather": (
        edit(
            FORWARD,
            _PRE,
            _PRE.replace(
                "unit.gather()",
                "full = unit.full.data\n"
                "        full.untyped_storage().resize_(full.nbytes)\n"
                "        full.zero_()\n"
                "        unit.layout.shard(full, self.rank).copy_(unit.shard)\n"
                "        torch.distributed.all_reduce(full)",
            ),
        ),
        "extra traffic (all_reduce",
    ),
    "unit.full is None": (
        edit(FORWARD, "():\n            unit.release()", "():\n            unit.full = None"),
        "stay tensors",
    ),
    "its rank among all processes": (
        edit(FORWARD_PREFETCHED, "self.rank", "torch.distributed.get_rank()"),
        "all processes are counted by dist.get_rank()",
    ),
    "gathers from all processes": (edit(FORWARD_GATHERS, ", group=self.comm.group", ""), "talks to all processes"),
    "a shard in float32": (
        edit(FORWARD, "unit.shard.clone()", "torch.empty(unit.layout.shard_size).copy_(unit.shard)"),
        "float32",
    ),
    "a shard in the compute dtype": (
        edit(FORWARD, "unit.shard.clone()", "unit.shard.to(unit.full.dtype, copy=True)"),
        "keep its dtype",
    ),
    "a slice of a copy": (
        edit(FORWARD, "unit.shard.clone()", "unit.layout.shard(unit.full.clone(), unit.rank)"),
        "A slice of a copy keeps all of the copy",
    ),
    "rank 0's part": (
        edit(FORWARD, "unit.shard.clone()", "unit.layout.shard(unit.full, 0).clone()"),
        "every rank keeps rank 0's part",
    ),
    "releases on rank 0": (
        edit(FORWARD, "if unit not", "if self.rank == 0 and unit not"),
        "gathered but never released",
    ),
    "keeps the root in eval mode": (
        edit(FORWARD, "not torch.is_grad_enabled()", "self.model.training and not torch.is_grad_enabled()"),
        "the root must go too",
    ),
    "a deep copy of a view": (
        edit(FORWARD, "unit.shard.clone()", "__import__('copy').deepcopy(unit.shard)"),
        "copies all that a view is a view of",
    ),
    "gathers only in training": (
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "if self.model.training:\n            unit.gather()")),
        "and in eval mode",
    ),
    "gathers what is there": (edit(FORWARD_GATHERS, "if not unit.gathered", "if True"), "none of one that is gathered"),
    "releases the list": (
        edit(FORWARD, _KEEPS, "        (unit if unit not in self.root else self.root).release()\n"),
        "self.root is a list",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero3Forward(zerolab.Zero3):\n    pass\n", "write your own"),
}

RIGHT = {
    "06.1": (GATHER_ASYNC, GATHER_BY_BROADCASTS),
    "06.2": (FORWARD_BY_HAND, FORWARD_PREFETCHED, FORWARD_GATHERS),
}

WRONG = {
    "06.1": GATHER_MUTANTS,
    "06.2": FORWARD_MUTANTS,
}
