"""Lesson 04: ZeRO-1. A reduce-scatter on a bare tensor, then a stage whose optimizer sees only slices."""

from __future__ import annotations

import torch
from torch import Tensor

import zerolab
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.stages import Stage, battery_of

GLOOS = (
    "gloo's own reduce-scatter is an all-reduce inside and sends twice as much; it is counted here as a ring sends it"
)
A_VIEW = "what it returns is a view of a tensor of N * S elements, which stays in memory with it (see lesson 05)"

# ---------------------------------------------------------------------- 04.1


def mean_of_shard(play: Play, length: int = 5, dtype: torch.dtype = torch.float32, when: str = "") -> None:
    shards = [play.base(length, name=f"shard {r}{when}", number=r) for r in range(play.size)]
    if dtype == torch.float64:
        for shard in shards:
            shard *= 1 - 2.0**-20  # exact in float32 too, until it is multiplied
    flat = torch.cat([play.share(shard, play.rank) for shard in shards]).to(dtype)
    play.keep(f"`flat`{when}", flat)
    result = play.call(f"reduce_scatter_mean(){when}", play.code.reduce_scatter_mean, flat, play.rank, play.size)
    play.keep(f"what the call{when} returned", result)
    if play.size > 1 and any(call.op.startswith("reduce_scatter") for call in play.tape[-1].traffic):
        play.note(GLOOS)
    if isinstance(result, Tensor) and result.untyped_storage().nbytes() > result.nbytes:
        play.note(A_VIEW)


def again(play: Play) -> None:
    for i, length in enumerate((5, 3, 3, 1)):
        mean_of_shard(play, length, when=f" of call {i}")


ONE_DTYPE = "right in float32 only: make tensors with torch.empty_like(flat), which has the dtype of `flat`"

SHARD_BATTERY = (
    Scene("", mean_of_shard),
    Scene(
        "in a later call",
        again,
        "right for the first call only: S is flat.numel() // world_size, and nothing may be kept from an earlier call",
    ),
    Scene("in float64", lambda play: mean_of_shard(play, 7, torch.float64), ONE_DTYPE),
    Scene("in bfloat16", lambda play: mean_of_shard(play, 4, torch.bfloat16), ONE_DTYPE),
)

REDUCE_SCATTER_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def reduce_scatter_mean(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """The mean over all ranks of this rank's shard of `flat`: (N * S,) -> (S,).

    `flat` stays as it is. Shard r is elements r * S to (r + 1) * S.
    dist.all_to_all_single(received, flat) sends shard r to rank r, and stores what rank r
    sends in place r.
    """
    raise Todo("04.1")
'''

REDUCE_SCATTER = """\
import torch
import torch.distributed as dist
from torch import Tensor


def reduce_scatter_mean(flat: Tensor, rank: int, world_size: int) -> Tensor:
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    return received.view(world_size, -1).sum(dim=0) / world_size
"""


# ---------------------------------------------------------------------- 04.2

ZERO1_BATTERY = battery_of(Stage("MyZero1", zerolab.Zero1, ("optimizer_params", "reduce", "after_step")))

ZERO1_STUB = '''\
import torch
import torch.distributed as dist
import zerolab
from torch import Tensor
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """What the optimizer updates: this rank's slice of each parameter, nothing else.

        unit.keep_shard() makes this rank's shard of the flat parameters, (S,), the
        unit.master, and returns it. unit.layout.slices(shard, rank) returns a view for each
        parameter, of the part that `rank` owns.
        """
        raise Todo("04.2")

    def reduce(self, unit: Unit):
        """Set unit.bucket.grad to a tensor (S,): this rank's shard of the mean over ranks.

        The gradients are in unit.bucket.full, (N * S,); unit.layout.shard(flat, self.rank)
        is a view of the shard. self.comm.reduce_scatter(output, input, unit.name) starts
        what you wrote in 04.1: return it, since it has a wait(), or None if the mean is
        already there.
        """
        raise Todo("04.2")

    def after_step(self, unit: Unit) -> None:
        """The optimizer has changed unit.master, (S,), which differs on every rank.

        Forward reads unit.full, (N * S,).
        self.comm.all_gather(output, input, unit.name) starts an all-gather.
        """
        raise Todo("04.2")
'''

ZERO1 = """\
import zerolab
from torch import Tensor
from zerolab import Unit


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit: Unit):
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)
        return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)

    def after_step(self, unit: Unit) -> None:
        self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()
"""


EXERCISES = [
    Exercise(
        id="04.1",
        title="the mean of your shard",
        difficulty=1,
        section="Half an all-reduce",
        battery=SHARD_BATTERY,
        stub=REDUCE_SCATTER_STUB,
        reference=REDUCE_SCATTER,
        hints=(
            "received = torch.empty_like(flat), then dist.all_to_all_single(received, flat): now `received` holds "
            "every rank's contribution to *this* rank's shard, in rank order.",
            "received.view(world_size, -1) has a row for each rank. You want the mean over the rows.",
            "return received.view(world_size, -1).sum(dim=0) / world_size",
        ),
        exports=("reduce_scatter_mean",),
    ),
    Exercise(
        id="04.2",
        title="ZeRO-1",
        difficulty=2,
        section="ZeRO-1 as a class",
        battery=ZERO1_BATTERY,
        stub=ZERO1_STUB,
        reference=ZERO1,
        hints=(
            "optimizer_params(): return unit.layout.slices(unit.keep_shard(), self.rank).",
            "reduce(): unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank), then return "
            "self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name).",
            "after_step(): self.comm.all_gather(unit.full, unit.master, unit.name).wait(). Without the wait, forward "
            "may read values that have not arrived.",
        ),
        exports=("MyZero1",),
        extends="Zero1",
    ),
]
