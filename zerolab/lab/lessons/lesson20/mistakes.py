"""Lesson 20: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson20 import GATHER

GATHER_INTO_TENSORS = """\
import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape, shard_group, replicate_group):
        ctx.shape, ctx.padded = shard.shape, shard.numel() * shard_group.size()
        ctx.shard_group, ctx.replicate_group = shard_group, replicate_group
        flat = torch.empty(ctx.padded, dtype=shard.dtype, device=shard.device)
        dist.all_gather_into_tensor(flat, shard.contiguous(), group=shard_group)
        return flat.narrow(0, 0, shape.numel()).reshape(shape)

    @staticmethod
    def backward(ctx, grad):
        flat = grad.new_zeros(ctx.padded)
        flat[: grad.numel()] = grad.reshape(-1)
        mine = grad.new_empty(ctx.shape)
        work = dist.reduce_scatter_tensor(mine, flat, group=ctx.shard_group, async_op=True)
        work.wait()
        mine /= ctx.shard_group.size()
        if ctx.replicate_group.size() > 1:
            dist.all_reduce(mine, group=ctx.replicate_group)
            mine /= ctx.replicate_group.size()
        return (mine, *3 * [None])


class Sharded(nn.Module):
    def __init__(self, shape, shard_group, replicate_group):
        super().__init__()
        self.shape, self.shards, self.replicas = shape, shard_group, replicate_group

    def right_inverse(self, full):
        each = -(-full.numel() // self.shards.size())
        begin = each * self.shards.rank()
        mine = full.detach().reshape(-1)[begin : begin + each]
        kept = full.detach().new_zeros(each)
        kept[: mine.numel()] = mine
        return kept

    def forward(self, shard):
        return Gather.apply(shard, self.shape, self.shards, self.replicas)
"""

GATHER_BY_ALL_TO_ALL = """\
import math

import torch
import torch.distributed as dist
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape, shard_group, replicate_group):
        ctx.save_for_backward()
        ctx.groups, ctx.each = (shard_group, replicate_group), len(shard)
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(shard_group))]
        dist.all_gather(parts, shard.detach(), group=shard_group)
        return torch.cat(parts)[: math.prod(shape)].reshape(shape).clone()

    @staticmethod
    def backward(ctx, grad):
        shard_group, replicate_group = ctx.groups
        N = dist.get_world_size(shard_group)
        flat = torch.cat([grad.flatten(), grad.new_zeros(N * ctx.each - grad.numel())])
        flat = flat / (N * dist.get_world_size(replicate_group))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=shard_group)
        mine = received.view(N, ctx.each).sum(dim=0)
        dist.all_reduce(mine, group=replicate_group)
        return mine, None, None, None


class Sharded(nn.Module):
    def __init__(self, *mesh):
        super().__init__()
        self.mesh = mesh

    def right_inverse(self, full):
        group = self.mesh[1]
        N, full = dist.get_world_size(group), full.detach()
        rows = full.new_zeros(N, -(-full.numel() // N))
        rows.flatten()[: full.numel()].copy_(full.flatten())
        return rows[dist.get_rank(group)].clone()

    def forward(self, shard):
        return Gather.apply(shard, *self.mesh)
"""

SUM = "the gradients were added up and not averaged: divide once, by the sizes of both groups, N * R"
PART_OF_THE_MEAN = (
    "the mean is over all ranks, those that share the shards and those that have replicas: divide by N * R"
)
TWICE = "divided twice: after the sums over both groups one division, by N * R, makes the mean"
NO_REPLICAS = (
    "replicas were left out: ranks of replicate_group hold the same shard and have seen other samples, so the shard's "
    "gradient is all-reduced among them"
)
TOO_MUCH = (
    "the whole gradient was all-reduced where a shard of it is enough: reduce-scatter it in shard_group first, then "
    "all-reduce the shard in replicate_group"
)
WORLD = "that went over all processes: pass group=..., and ask the group for its size and this rank's number in it"
UNPADDED = "the padding is still there: the parameter has shape.numel() elements, and the shards together may have more"
LAYOUT = "rank r keeps chunk r, elements that lie one after another, so that the chunks end to end are the parameter"
VIEW = "a view of the full parameter keeps all of it in memory: clone() the shard"
GRAD_FLAT = "the gradient may be a transposed or expanded tensor, which view(-1) refuses: use flatten() or reshape(-1)"
IN_PLACE = "the gradient that came in was changed, and autograd may pass the same tensor elsewhere: work on a copy"
SHARED = "what backward needs belongs to this call: keep it in ctx, and not on the class, which all parameters share"
NO_GRADIENT = (
    "dist's collectives know nothing of autograd, so the shard gets no gradient: Sharded.forward calls Gather.apply"
)
HOLDS_ALL = (
    "the full parameter is held after its use: sharding saves nothing, and whoever uses it again misses what the "
    "optimizer has made of the shards. Keep the shard, and in ctx the groups alone"
)
ARGUMENTS = (
    "backward returns a value for each argument of forward: the gradient of the shard, and None for the shape and for "
    "each of the two groups"
)

MIXED_UP = (
    "the two groups were mixed up: parameters are gathered and gradients scattered in shard_group, and only the "
    "all-reduce is in replicate_group"
)
OTHER_SHARDS = (
    "the all-reduce went over ranks with other shards: it belongs to replicate_group, all of whose ranks hold this one"
)
NOTHING_MISSING = "where N divides the elements nothing is missing: -numel % N is 0 there, and N - numel % N would be N"
WHOLE = "what backward returns has the shape of the shard, and not that of the parameter"

_SCATTER = "        dist.reduce_scatter(mine, list(flat.chunk(N)), group=shard_group)\n"
_REDUCE = "        dist.all_reduce(mine, group=replicate_group)\n"
_MEAN = "mine / (N * R), None, None, None"
_GATHER = "        dist.all_gather(list(flat.chunk(N)), shard, group=shard_group)\n"
_KEPT = "        return flat.chunk(N)[rank].clone()\n"
_DEALT = (  # element by element, and put together again in forward
    _KEPT,
    "        return flat[rank::N].clone()\n",
    "return flat[: shape.numel()].view(shape)",
    "return flat.view(N, -1).t().flatten()[: shape.numel()].view(shape)",
)

GATHER_MISTAKES = {
    "a sum": Mistake(edit(GATHER, _MEAN, "mine, None, None, None"), SUM),
    "the mean of the shard group": Mistake(edit(GATHER, "(N * R)", "N"), PART_OF_THE_MEAN),
    "divided by the world": Mistake(
        edit(GATHER, "(N * R)", "dist.get_world_size()"),
        "divided by the number of all processes: it is the two groups that are averaged over, N * R",
    ),
    "divided twice": Mistake(edit(GATHER, "mine / (N * R)", "mine / (N * R) / (N * R)"), TWICE),
    "no replicas": Mistake(edit(GATHER, _REDUCE, ""), NO_REPLICAS),
    "no sum over the shard group": Mistake(
        edit(GATHER, _SCATTER, "        mine.copy_(flat.chunk(N)[dist.get_rank(shard_group)])\n"),
        "this rank's own gradient was cut up, and nobody else's is in it: reduce-scatter adds up those of all ranks",
    ),
    "all-reduce, then a slice": Mistake(
        edit(
            GATHER,
            _SCATTER,
            "        flat = flat.clone()\n        dist.all_reduce(flat, group=shard_group)\n"
            "        mine = flat.chunk(N)[dist.get_rank(shard_group)].clone()\n",
        ),
        TOO_MUCH,
    ),
    "replicas first": Mistake(
        edit(
            GATHER,
            _SCATTER + _REDUCE,
            "        flat = flat.clone()\n        dist.all_reduce(flat, group=replicate_group)\n" + _SCATTER,
        ),
        TOO_MUCH,
    ),
    "gathers from all": Mistake(
        edit(
            GATHER,
            "N = dist.get_world_size(shard_group)\n        flat = shard",
            "N = dist.get_world_size()\n        flat = shard",
            _GATHER,
            _GATHER.replace(", group=shard_group", ""),
        ),
        WORLD,
    ),
    "the reduce-scatter of all": Mistake(
        edit(
            GATHER,
            "N, R = dist.get_world_size(shard_group), dist.get_world_size(replicate_group)",
            "N, R = dist.get_world_size(), 1",
            _SCATTER,
            _SCATTER.replace(", group=shard_group", ""),
        ),
        WORLD,
    ),
    "a rank of the world": Mistake(
        edit(GATHER, "dist.get_rank(self.groups[0])", "dist.get_rank() % self.groups[0].size()"),
        "this rank's number among all processes was taken, and in its group it has another: dist.get_rank(group)",
    ),
    "a rank among the replicas": Mistake(
        edit(GATHER, "dist.get_rank(self.groups[0])", "self.groups[1].rank() % self.groups[0].size()"),
        "the shard was chosen by this rank's number among the replicas: it is the number in shard_group that counts",
    ),
    "the all-reduce of all": Mistake(
        edit(GATHER, _REDUCE, _REDUCE.replace(", group=replicate_group", "")), OTHER_SHARDS
    ),
    "the all-reduce in the shard group": Mistake(
        edit(GATHER, _REDUCE, _REDUCE.replace("replicate_group", "shard_group")), OTHER_SHARDS
    ),
    "groups exchanged": Mistake(
        edit(GATHER, "ctx.groups = shard_group, replicate_group", "ctx.groups = replicate_group, shard_group"),
        MIXED_UP,
    ),
    "groups exchanged by Sharded": Mistake(
        edit(
            GATHER,
            "Gather.apply(shard, self.shape, *self.groups)",
            "Gather.apply(shard, self.shape, *self.groups[::-1])",
        ),
        MIXED_UP,
    ),
    "no padding in backward": Mistake(
        edit(
            GATHER, "        flat = F.pad(grad.flatten(), (0, -grad.numel() % N))\n", "        flat = grad.flatten()\n"
        ),
        "the gradient was scattered without the padding, so the parts are not as long as the shard: pad it as before",
    ),
    "padding left": Mistake(
        edit(GATHER, "return flat[: shape.numel()].view(shape)", "return flat.view(-1, *shape[1:])"), UNPADDED
    ),
    "no padding": Mistake(
        edit(
            GATHER,
            "        flat = F.pad(full.detach().flatten(), (0, -full.numel() % N))\n" + _KEPT,
            "        return full.detach().flatten().tensor_split(N)[rank].clone()\n",
        ),
        "the shards have different lengths, which all-gather cannot put together: pad with zeros to a multiple of N",
    ),
    "the shard's size rounded down": Mistake(
        edit(
            GATHER,
            "        flat = F.pad(full.detach().flatten(), (0, -full.numel() % N))\n" + _KEPT,
            "        flat, each = full.detach().flatten(), full.numel() // N\n"
            "        return flat[each * rank : each * (rank + 1)].clone()\n",
        ),
        "the elements behind the last whole chunk are gone: where N does not divide them, round a shard's size up, and "
        "fill it with zeros",
    ),
    "N zeros where none is missing": Mistake(
        edit(GATHER, "-full.numel() % N", "N - full.numel() % N"), NOTHING_MISSING
    ),
    "N zeros where none is missing, in backward too": Mistake(
        edit(GATHER, "-full.numel() % N", "N - full.numel() % N", "-grad.numel() % N", "N - grad.numel() % N"),
        NOTHING_MISSING,
    ),
    "no zeros": Mistake(
        edit(
            GATHER,
            "        flat = F.pad(full.detach().flatten(), (0, -full.numel() % N))\n",
            "        flat = full.new_empty(full.numel() + -full.numel() % N)\n"
            "        flat[: full.numel()] = full.detach().flatten()\n",
        ),
        "nothing was written behind the last element: torch.empty leaves there what was in memory, so pad with zeros",
    ),
    "zeros in front": Mistake(
        edit(
            GATHER, "full.detach().flatten(), (0, -full.numel() % N)", "full.detach().flatten(), (-full.numel() % N, 0)"
        ),
        "the padding is in front, and so every element has moved: it belongs to the end",
    ),
    "dealt out": Mistake(edit(GATHER, _KEPT, "        return flat[rank::N].clone()\n"), LAYOUT),
    "dealt out, and put together in forward": Mistake(
        edit(
            GATHER,
            *_DEALT,
        ),
        LAYOUT,
    ),
    "dealt out, and put together": Mistake(
        edit(
            GATHER,
            *_DEALT,
            _SCATTER,
            "        flat = flat.view(-1, N).t().flatten()\n" + _SCATTER,
        ),
        LAYOUT,
    ),
    "the next rank's": Mistake(edit(GATHER, "flat.chunk(N)[rank]", "flat.chunk(N)[(rank + 1) % N]"), LAYOUT),
    "a view": Mistake(edit(GATHER, "flat.chunk(N)[rank].clone()", "flat.chunk(N)[rank]"), VIEW),
    "still in the graph": Mistake(
        edit(GATHER, "full.detach().flatten()", "full.flatten()"),
        "the shard hangs on the graph of the full parameter: detach() first, for the shard is the leaf from now on",
    ),
    "view(-1)": Mistake(edit(GATHER, "F.pad(grad.flatten()", "F.pad(grad.view(-1)"), GRAD_FLAT),
    "divides the gradient in place": Mistake(
        edit(
            GATHER,
            "        flat = F.pad(grad.flatten()",
            "        grad /= N * R\n        flat = F.pad(grad.flatten()",
            _MEAN,
            "mine, None, None, None",
        ),
        IN_PLACE,
    ),
    "one gradient": Mistake(edit(GATHER, _MEAN, "mine / (N * R)"), ARGUMENTS),
    "a gradient too few": Mistake(edit(GATHER, _MEAN, "mine / (N * R), None, None"), ARGUMENTS),
    "the full gradient": Mistake(
        edit(
            GATHER,
            "        mine = flat.new_empty(flat.numel() // N)\n" + _SCATTER + _REDUCE,
            "        mine = grad.clone()\n        dist.all_reduce(mine, group=shard_group)\n" + _REDUCE,
        ),
        WHOLE,
    ),
    "the full gradient, flat": Mistake(
        edit(GATHER, _SCATTER, "        mine = flat.clone()\n        dist.all_reduce(mine, group=shard_group)\n"), WHOLE
    ),
    "kept on the class": Mistake(
        edit(GATHER, "ctx.groups = shard", "Gather.groups = shard", "= ctx.groups", "= Gather.groups"), SHARED
    ),
    "the full parameter in ctx": Mistake(
        edit(
            GATHER,
            "        return flat[: shape.numel()].view(shape)\n",
            "        ctx.save_for_backward(flat)\n        return flat[: shape.numel()].view(shape)\n",
        ),
        HOLDS_ALL,
    ),
    "the full parameter in self": Mistake(
        edit(
            GATHER, "        flat = F.pad(full.detach()", "        self.full = full\n        flat = F.pad(full.detach()"
        ),
        HOLDS_ALL,
    ),
    "the last one in self": Mistake(
        edit(
            GATHER,
            "        return Gather.apply(shard, self.shape, *self.groups)\n",
            "        self.last = Gather.apply(shard, self.shape, *self.groups)\n        return self.last\n",
        ),
        HOLDS_ALL,
    ),
    "gathered once for all": Mistake(
        edit(
            GATHER,
            "        return Gather.apply(shard, self.shape, *self.groups)\n",
            "        if getattr(self, 'full', None) is None:\n"
            "            self.full = Gather.apply(shard, self.shape, *self.groups)\n        return self.full\n",
        ),
        HOLDS_ALL,
    ),
    "outside of autograd": Mistake(
        edit(
            GATHER,
            "        return Gather.apply(shard, self.shape, *self.groups)\n",
            "        N = dist.get_world_size(self.groups[0])\n        flat = shard.new_empty(N * shard.numel())\n"
            "        dist.all_gather(list(flat.chunk(N)), shard.detach(), group=self.groups[0])\n"
            "        return flat[: self.shape.numel()].view(self.shape)\n",
        ),
        NO_GRADIENT,
    ),
    "not waited for": Mistake(
        edit(GATHER, "shard, group=shard_group)", "shard, group=shard_group, async_op=True)"),
        "the all-gather was started and not waited for: without async_op=True it is over when it returns",
    ),
    "float32": Mistake(
        edit(GATHER, "shard.new_empty(N * shard.numel())", "torch.empty(N * shard.numel())"),
        "the full parameter has the dtype of the shard, whatever that is: shard.new_empty(...)",
    ),
    "sent in float64": Mistake(
        edit(
            GATHER,
            "F.pad(grad.flatten()",
            "F.pad(grad.double().flatten()",
            "return mine / (N * R)",
            "return (mine / (N * R)).to(grad.dtype)",
        ),
        "the gradient was converted to a wider dtype before it was sent, and so more bytes travel: reduce it as it is",
    ),
    "sent in float32": Mistake(
        edit(GATHER, "F.pad(grad.flatten()", "F.pad(grad.float().flatten()"),
        "the gradient was converted to float32, which loses digits of a float64: reduce it as it is",
    ),
    "returns nothing": Mistake(
        edit(GATHER, "        return flat[: shape.numel()].view(shape)\n", ""),
        "Gather.forward returns nothing: `return` is missing",
    ),
}

RIGHT = {"20.1": [GATHER_INTO_TENSORS, GATHER_BY_ALL_TO_ALL]}
MISTAKES = {"20.1": GATHER_MISTAKES}
