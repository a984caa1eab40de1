"""Lesson 06: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson06 import FORWARD, GATHER

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

GATHER_MISTAKES = {
    "releases nothing": Mistake(
        edit(GATHER, _RELEASE, "del full"),
        "nothing was released: full.untyped_storage().resize_(0) does it, for full and all its views; zeros take as "
        "much memory as other numbers, and del only deletes a name",
    ),
    "writes zeros": Mistake(
        edit(GATHER, _RELEASE, "full.zero_()"),
        "nothing was released: full.untyped_storage().resize_(0) does it, for full and all its views; zeros take as "
        "much memory as other numbers, and del only deletes a name",
    ),
    "gives it another memory": Mistake(
        edit(GATHER, _RELEASE, "full.data = full.new_empty(0)", _RESIZE, "full.data = full.new_empty(0)"),
        "`full` got new memory, but its views hold on to the old: shrink the storage itself",
    ),
    "resizes the tensor": Mistake(
        edit(GATHER, _RELEASE, "full.resize_(0)", _RESIZE, "full.resize_(len(shard) * dist.get_world_size())"),
        "full.resize_(0) changes the tensor's shape and keeps its memory: use full.untyped_storage().resize_(0)",
    ),
    "its own first": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "r, parts = dist.get_rank(), [shard.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard)\n"
            "    full.copy_(__import__('torch').cat([shard, *parts[:r], *parts[r + 1 :]]))",
        ),
        "all elements are there, but not in rank order: the shards belong end to end",
    ),
    "gathers elsewhere": Mistake(
        edit(
            GATHER,
            _RESIZE,
            "parts = [shard.clone() for _ in range(dist.get_world_size())]",
            _ALL_GATHER,
            "dist.all_gather(parts, shard)\n    import torch\n    full.data = torch.cat(parts)",
        ),
        "the values are in new memory, which the views know nothing about: fill the storage they share",
    ),
    "does not get the memory again": Mistake(
        edit(GATHER, _RESIZE, "pass"),
        "the memory was released and is still gone: grow the storage again before anything uses its views",
    ),
    "counts elements": Mistake(
        edit(GATHER, " * full.element_size()", ""),
        "too small: resize_ counts bytes, and all ranks' shards must fit, full.numel() * full.element_size()",
    ),
    "forgotten wait": Mistake(
        edit(GATHER, "shard)\n", "shard, async_op=True)\n"),
        "a forgotten wait: all_gather was started once without waiting for it",
    ),
    "gathers only what was released": Mistake(
        edit(GATHER, _RESIZE, f"if full.untyped_storage().size():\n        return\n    {_RESIZE}"),
        "nothing was sent: these are old values, or whatever was in that memory",
    ),
    "the wrong order": Mistake(
        edit(GATHER, "size())), shard)", "size()))[::-1], shard)"),
        "all elements are there, but not in rank order: the shards belong end to end",
    ),
    "its own shard for all": Mistake(
        edit(GATHER, _ALL_GATHER, "full.copy_(shard.repeat(dist.get_world_size()))"),
        "every part is this rank's own shard: nothing was sent, and the others' shards are not here",
    ),
    "one tensor for all that arrives": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = [shard.clone()] * dist.get_world_size()\n"
            "    dist.all_gather(parts, shard)\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "the same shard is in several parts: each rank's shard needs a tensor of its own to arrive in",
    ),
    "sums what was in the memory": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n    dist.all_reduce(full)",
        ),
        "all_reduce adds up all of `full`, with whatever was in its new memory: gather the shards instead",
    ),
    "rank 0's shard for all": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "for part in full.chunk(dist.get_world_size()):\n"
            "        part.copy_(shard)\n        dist.broadcast(part, src=0)",
        ),
        "every part is rank 0's shard: a broadcast, but each rank must contribute its own",
    ),
    "another shape": Mistake(
        edit(GATHER, _RELEASE, "full.resize_(0)"),
        ("full.resize_(0) changes the tensor's shape and keeps its memory: use full.untyped_storage().resize_(0)"),
    ),
    "gathers on rank 0": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = list(full.chunk(dist.get_world_size()))\n"
            "    dist.gather(shard, parts if dist.get_rank() == 0 else None, dst=0)",
        ),
        "only rank 0 has all the shards: that is a gather; every rank needs them, so all_gather",
    ),
    "returns the result": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "import torch\n    parts = [shard.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard)\n    return torch.cat(parts)",
        ),
        "gather() returned its result instead of writing it to `full`, whose views need it",
    ),
    "4 bytes for each element": Mistake(
        edit(GATHER, "full.element_size()", "4"),
        "resize_ counts bytes, and an element of bfloat16 has 2: element_size() says so",
    ),
    "the demonstration's 6 elements": Mistake(
        edit(GATHER, "full.numel() * full.element_size()", "6 * 4 * dist.get_world_size()"),
        "resize_ counts bytes, and an element of float32 has 4: element_size() says so",
    ),
    "what the call returns": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            f"import torch\n    full.copy_(torch.cat({_ALL_GATHER}))",
        ),
        "dist.all_gather() returns None: it leaves the result in the tensor that you give it",
    ),
    "copies before the wait": Mistake(
        edit(
            GATHER_ASYNC,
            "async_op=True).wait()\n    torch.cat(parts, out=full)",
            "async_op=True)\n    torch.cat(parts, out=full)",
            "dist.all_gather(",
            "work = dist.all_gather(",
            "out=full)\n",
            "out=full)\n    work.wait()\n",
        ),
        "read before the wait: what was started has written its result only when wait() returns",
    ),
    "keeps the first unit's parts": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = _kept.setdefault('parts', list(full.chunk(dist.get_world_size())))\n"
            "    dist.all_gather(parts, shard)",
            "def release",
            "_kept = {}\n\n\ndef release",
        ),
        "right for one unit only: lengths and dtypes differ, and nothing may be kept from an earlier call",
    ),
    "keeps a copy": Mistake(
        edit(
            GATHER_ASYNC,
            "def release",
            "_kept = {}\n\n\ndef release",
            "torch.cat(parts, out=full)",
            "_kept[full.numel()] = parts\n    torch.cat(parts, out=full)",
        ),
        "a copy was kept outside of `full`: release() is there to give the memory back",
    ),
    "sums full tensors": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "full.zero_()\n"
            "    full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n"
            "    dist.all_reduce(full)",
        ),
        "extra traffic (all_reduce): one all-gather is enough, in the dtype of the shard",
    ),
    "rank 0's whole tensor for all": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "full.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n    dist.broadcast(full, src=0)",
        ),
        "a broadcast sends what one rank has in `full`: at most its own shard, and each must send its own",
    ),
    "takes turns": Mistake(
        edit(
            GATHER_ASYNC,
            "torch.cat(parts, out=full)",
            "full.copy_(torch.stack(parts, dim=1).flatten())",
        ),
        "all elements are there, but not in rank order: the shards belong end to end",
    ),
    "4 ranks": Mistake(
        edit(GATHER, "full.chunk(dist.get_world_size())", "full.view(4, -1)"),
        "`full` has a part for each rank, and the check runs with 1, 2, 3 and 4 ranks",
    ),
    "by way of float32": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = [shard.float().clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard.float())\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "extra traffic (all_gather): one all-gather is enough, in the dtype of the shard",
    ),
    "by way of float32 where that is shorter": Mistake(
        edit(
            GATHER,
            _ALL_GATHER,
            "short = shard.float() if shard.element_size() > 4 else shard\n"
            "    parts = [short.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, short)\n"
            "    full.copy_(__import__('torch').cat(parts))",
        ),
        "it became float32 on the way: a shard travels in its own dtype, into a tensor of that dtype",
    ),
    "all wait before they release": Mistake(
        edit(GATHER, _RELEASE, f"dist.barrier()\n    {_RELEASE}"),
        "release() concerns this rank alone: it needs nothing from the others",
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

FORWARD_MISTAKES = {
    "a list of copies": Mistake(
        edit(FORWARD, _KEEPS, f"        self.seen = [*getattr(self, 'seen', []), unit.full.clone()]\n{_KEEPS}"),
        "memory that stays for nothing: what a method needs while it runs goes into a local name",
    ),
    "never releases": Mistake(
        edit(FORWARD, _KEEPS, "        pass\n"),
        "gathered but never released: post_forward() must release the full parameters of each block",
    ),
    "releases the root too": Mistake(
        edit(FORWARD, _KEEPS, "        unit.release()\n"),
        (
            "backward begins with the root: keep it while gradients are enabled, which saves one gather. "
            "(self.root is a list: ask `unit in self.root`)"
        ),
    ),
    "releases only the root": Mistake(
        edit(FORWARD, "unit not in", "unit in"),
        "gathered but never released: post_forward() must release the full parameters of each block",
    ),
    "releases only under no_grad": Mistake(
        edit(FORWARD, "if unit not in self.root or not torch", "if not torch"),
        "gathered but never released: post_forward() must release the full parameters of each block",
    ),
    "keeps the root under no_grad": Mistake(
        edit(FORWARD, " or not torch.is_grad_enabled()", ""),
        "under no_grad no backward follows, so the root must go too: check torch.is_grad_enabled()",
    ),
    "asks whether the model trains": Mistake(
        edit(FORWARD, "not torch.is_grad_enabled()", "not self.model.training"),
        "under no_grad no backward follows, so the root must go too: check torch.is_grad_enabled()",
    ),
    "releases too early": Mistake(
        edit(FORWARD, _PRE, _PRE + "        if unit not in self.root:\n            unit.release()\n"),
        "it was gathered, but released before its forward was over. Each call releases `unit` alone",
    ),
    "gathers nothing": Mistake(
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "pass")),
        (
            "it was not gathered: pre_forward() is called before each forward of a unit, also under no_grad and "
            "in eval mode, and must gather it"
        ),
    ),
    "gathers afterwards": Mistake(
        edit(
            FORWARD,
            _PRE,
            _PRE.replace("unit.gather()", "pass"),
            "            unit.release()",
            "            unit.gather()",
        ),
        (
            "it was not gathered: pre_forward() is called before each forward of a unit, also under no_grad and "
            "in eval mode, and must gather it"
        ),
    ),
    "gathers all at the start": Mistake(
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "for each in self.units:\n            each.gather()")),
        ("all units are gathered at once, so all Ψ parameters are in memory: gather only the unit that runs now"),
    ),
    "does not release at construction": Mistake(
        edit(FORWARD, "clone()\n        unit.release()\n", "clone()\n"),
        "optimizer_params() does not release the full parameters: unit.release()",
    ),
    "the shard goes with the full parameters": Mistake(
        edit(FORWARD, "        unit.shard = unit.shard.clone()\n", ""),
        ("the shard goes with the full parameters: give it its own memory first, unit.shard = unit.shard.clone()"),
    ),
    "lets go behind the unit's back": Mistake(
        edit(FORWARD, "():\n            unit.release()", "():\n            unit.full.untyped_storage().resize_(0)"),
        "use unit.release(): it also records that the memory is gone, so that gather() allocates it again",
    ),
    "does not copy": Mistake(
        edit(FORWARD, "unit.shard.clone()", "torch.zeros_like(unit.shard)"),
        "the values must survive: copy them with unit.shard.clone() before anything is released",
    ),
    "clones too late": Mistake(
        edit(
            FORWARD,
            "        unit.shard = unit.shard.clone()\n        unit.release()",
            "        unit.release()\n        unit.shard = unit.shard.clone()",
        ),
        ("the shard goes with the full parameters: give it its own memory first, unit.shard = unit.shard.clone()"),
    ),
    "slices of the full parameters": Mistake(
        edit(
            FORWARD,
            "        unit.shard = unit.shard.clone()\n        unit.release()\n"
            "        return super().optimizer_params(unit)",
            "        slices = super().optimizer_params(unit)\n        unit.shard = unit.shard.clone()\n"
            "        unit.release()\n        return slices",
        ),
        "the optimizer's slices were cut before the shard had memory of its own: they are views of the full "
        "parameters, whose memory goes",
    ),
    "returns nothing": Mistake(
        edit(FORWARD, "return super()", "super()"),
        "optimizer_params() returns nothing: `return` is missing",
    ),
    "shows the optimizer nothing": Mistake(
        edit(
            FORWARD,
            "return super().optimizer_params(unit)",
            "unit.keep_shard()\n        return [unit.shard[:0].view(0, *[1] * (len(slot.shape) - 1)) "
            "for slot in unit.layout.slots]",
        ),
        "what optimizer_params() returns does not cover unit.shard: return super().optimizer_params(unit)",
    ),
    "the root is a list": Mistake(
        edit(FORWARD, "unit not in self.root", "unit is not self.root"),
        (
            "backward begins with the root: keep it while gradients are enabled, which saves one gather. "
            "(self.root is a list: ask `unit in self.root`)"
        ),
    ),
    "starts and does not wait": Mistake(
        edit(FORWARD, _PRE, _PRE.replace("gather", "start_gather")),
        "started without waiting: start_gather() returns at once; gather() waits until the values are there",
    ),
    "releases every unit": Mistake(
        edit(
            FORWARD,
            "():\n            unit.release()",
            "():\n            for each in self.units:\n                each.release()",
        ),
        "it was gathered, but released before its forward was over. Each call releases `unit` alone",
    ),
    "the first of the root": Mistake(
        edit(FORWARD, "unit not in self.root", "unit is not self.root[0]"),
        "self.root is a list, and it is empty if every parameter is in a block: ask `unit in self.root`",
    ),
    "gathers by hand": Mistake(
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
        (
            "autograd took the gather for a change of the parameters: fill unit.full.data, which it does not "
            "watch, or call unit.gather()"
        ),
    ),
    "an all-reduce for the gather": Mistake(
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
        "extra traffic (all_reduce): one all-gather of each unit is enough, and none of one that is gathered",
    ),
    "unit.full is None": Mistake(
        edit(FORWARD, "():\n            unit.release()", "():\n            unit.full = None"),
        ("unit.full, unit.shard and unit.master stay tensors: unit.release() lets the memory go, and keeps the tensor"),
    ),
    "its rank among all processes": Mistake(
        edit(FORWARD_PREFETCHED, "self.rank", "torch.distributed.get_rank()"),
        (
            "all processes are counted by dist.get_rank(), and only some of them share this model: self.rank, "
            "self.world_size"
        ),
    ),
    "gathers from all processes": Mistake(
        edit(FORWARD_GATHERS, ", group=self.comm.group", ""),
        (
            "dist.all_gather() talks to all processes, and only some of them share this model: pass "
            "group=self.comm.group"
        ),
    ),
    "a shard in float32": Mistake(
        edit(FORWARD, "unit.shard.clone()", "torch.empty(unit.layout.shard_size).copy_(unit.shard)"),
        "the optimizer updates torch.float64 here, whatever forward computes in: keep its dtype",
    ),
    "a shard in the compute dtype": Mistake(
        edit(FORWARD, "unit.shard.clone()", "unit.shard.to(unit.full.dtype, copy=True)"),
        "the optimizer updates torch.float32 here, whatever forward computes in: keep its dtype",
    ),
    "a slice of a copy": Mistake(
        edit(FORWARD, "unit.shard.clone()", "unit.layout.shard(unit.full.clone(), unit.rank)"),
        (
            "only this rank's part may stay: unit.shard.clone(). (A slice of a copy keeps all of the copy, and "
            "copy.deepcopy() copies all that a view is a view of)"
        ),
    ),
    "rank 0's part": Mistake(
        edit(FORWARD, "unit.shard.clone()", "unit.layout.shard(unit.full, 0).clone()"),
        "every rank keeps rank 0's part: unit.shard is this rank's, the one with the number unit.rank",
    ),
    "releases on rank 0": Mistake(
        edit(FORWARD, "if unit not", "if self.rank == 0 and unit not"),
        "gathered but never released: post_forward() must release the full parameters of each block",
    ),
    "keeps the root in eval mode": Mistake(
        edit(FORWARD, "not torch.is_grad_enabled()", "self.model.training and not torch.is_grad_enabled()"),
        "under no_grad no backward follows, so the root must go too: check torch.is_grad_enabled()",
    ),
    "a deep copy of a view": Mistake(
        edit(FORWARD, "unit.shard.clone()", "__import__('copy').deepcopy(unit.shard)"),
        (
            "only this rank's part may stay: unit.shard.clone(). (A slice of a copy keeps all of the copy, and "
            "copy.deepcopy() copies all that a view is a view of)"
        ),
    ),
    "gathers only in training": Mistake(
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "if self.model.training:\n            unit.gather()")),
        (
            "it was not gathered: pre_forward() is called before each forward of a unit, also under no_grad and "
            "in eval mode, and must gather it"
        ),
    ),
    "gathers what is there": Mistake(
        edit(FORWARD_GATHERS, "if not unit.gathered", "if True"),
        "extra traffic (all_gather): one all-gather of each unit is enough, and none of one that is gathered",
    ),
    "releases the list": Mistake(
        edit(FORWARD, _KEEPS, "        (unit if unit not in self.root else self.root).release()\n"),
        "self.root is a list, and it is empty if every parameter is in a block: ask `unit in self.root`",
    ),
    "nothing of its own": Mistake(
        "import zerolab\n\n\nclass MyZero3Forward(zerolab.Zero3):\n    pass\n",
        "the class inherits optimizer_params(): write your own",
    ),
}

RIGHT = {
    "06.1": (GATHER_ASYNC, GATHER_BY_BROADCASTS),
    "06.2": (FORWARD_BY_HAND, FORWARD_PREFETCHED, FORWARD_GATHERS),
}

MISTAKES = {
    "06.1": GATHER_MISTAKES,
    "06.2": FORWARD_MISTAKES,
}
