"""Lesson 06: parameters that come and go, first in a bare tensor, then in the forward of ZeRO-3."""

from __future__ import annotations

import torch

import zerolab
from zerolab import Unit
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Enough, Play, Scene
from zerolab.lab.exercises.stages import Stage, battery_of
from zerolab.lab.exercises.values import storages_in

# ---------------------------------------------------------------------- 06.1


class Full:
    """A flat tensor with views, as a unit has it, and the shards that belong in it."""

    def __init__(self, play: Play, length: int = 6, dtype: torch.dtype = torch.float32, name: str = "") -> None:
        self.play, self.name, self.length, self.dtype = play, name, length, dtype
        self.full = torch.full((play.size * length,), 0.5, dtype=dtype)
        self.views = [self.full[:length], self.full[length - 1 :].view(1, -1)]

    def release(self, when: str = "") -> None:
        play = self.play
        with play.event(f"release() of {self.name}full{when}", uses=()):
            play.code.release(self.full)
        play.at_most("bytes that a view of `full` still holds", self._held())
        play.see("the shape of `full`", tuple(self.full.shape))
        shared = self.full.untyped_storage()._cdata == self.views[0].untyped_storage()._cdata
        play.see("`full` and its views share one memory", shared)

    def gather(self, when: str = "") -> None:
        play, N = self.play, self.play.size
        base = play.base(self.length, name=f"the shards{when}") / 12
        if self.dtype == torch.float64:
            base = base.double() * (1 - 2.0**-30)
        shard = play.keep(f"the {self.name}shard{when}", play.share(base, play.rank).to(self.dtype))
        with play.event(f"gather() of {self.name}full{when}", slack=4.0):
            play.code.gather(self.full, shard)
        play.see("bytes in the memory that the views of `full` show", self._held())
        if self._held() < self.full.nbytes or self.full.untyped_storage().nbytes() < self.full.nbytes:
            raise Enough
        for rank in range(N):
            part = self.full[rank * self.length : (rank + 1) * self.length]
            play.see(f"`full`{when}, where rank {rank}'s shard belongs", part)
        play.see(f"the views of `full`{when}", self.views)

    def _held(self) -> int:
        return self.views[0].untyped_storage().nbytes()


def plain(play: Play) -> None:
    one = Full(play)
    one.release()
    one.gather()
    one.release(" again")
    look_at_names(play)
    one.gather(" again")


def not_released(play: Play) -> None:
    one = Full(play)
    one.gather(" at once")
    one.gather(" of new values")
    one.release()
    one.release(" a second time")
    one.gather(" at last")


def by_turns(play: Play, dtype: torch.dtype = torch.float32, lengths: tuple[int, int] = (3, 6)) -> None:
    one, other = (
        Full(play, length, dtype, f"{name} ") for length, name in zip(lengths, ("one", "another"), strict=True)
    )
    for step in range(2):
        one.release(f" {step}")
        other.release(f" {step}")
        other.gather(f" {step}")
        one.gather(f" {step}")
    one.release()
    other.release()
    look_at_names(play)


def look_at_names(play: Play) -> None:
    """What the file keeps when everything was released."""
    names = [value for name, value in vars(play.code).items() if not name.startswith("__")]
    play.at_most("bytes that names of the file hold", float(sum(one.nbytes() for one in storages_in(names))))


ONE_UNIT = "right for one unit only: lengths and dtypes differ, and nothing may be kept from an earlier call"
BYTES = "resize_ counts bytes: full.numel() * full.element_size(); a shard travels in its own dtype"

GATHER_BATTERY = (
    Scene("", plain),
    Scene("without a release() before", not_released, "fill `full` every time, and get memory if there is none"),
    Scene("with two units by turns", by_turns, ONE_UNIT),
    Scene("in bfloat16", lambda play: by_turns(play, torch.bfloat16, (2, 5)), BYTES, sizes=(2, 3)),
    Scene("in float64", lambda play: by_turns(play, torch.float64, (1, 4)), BYTES, sizes=(1, 4)),
)

GATHER_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def release(full: Tensor) -> None:
    """Let the memory of `full` go. It and its views stay, without memory until gather()."""
    raise Todo("06.1")


def gather(full: Tensor, shard: Tensor) -> None:
    """Fill `full` with the shards of all ranks, in rank order.

    If its memory was released, allocate it again first.
    full: flat, N times as long as `shard`, which is this rank's part. Views of `full` must
        see the values.
    """
    raise Todo("06.1")
'''

GATHER = """\
import torch.distributed as dist
from torch import Tensor


def release(full: Tensor) -> None:
    full.untyped_storage().resize_(0)


def gather(full: Tensor, shard: Tensor) -> None:
    full.untyped_storage().resize_(full.numel() * full.element_size())
    dist.all_gather(list(full.chunk(dist.get_world_size())), shard)
"""


# ---------------------------------------------------------------------- 06.2


class Backward(zerolab.Zero2):
    """The backward half of ZeRO-3, with which answers to 06.2 are looked at."""

    def pre_backward(self, unit: Unit) -> None:
        unit.gather()

    def post_backward(self, unit: Unit) -> None:
        unit.release()
        super().post_backward(unit)

    def after_step(self, unit: Unit) -> None:
        unit.release()


FORWARD_BATTERY = battery_of(
    Stage("MyZero3Forward", zerolab.Zero3, ("optimizer_params", "pre_forward", "post_forward"), Backward)
)

FORWARD_STUB = '''\
import torch
import zerolab
from torch import Tensor
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """Runs once, when the engine is built: from here on this rank keeps only its shard.

        So far unit.shard is a view of unit.full. Give it its own memory, release the full
        parameters, then return what ZeRO-2 returns: slices of the shard.
        """
        raise Todo("06.2")

    def pre_forward(self, unit: Unit) -> None:
        """Runs before the forward of `unit`, which needs its full parameters."""
        raise Todo("06.2")

    def post_forward(self, unit: Unit) -> None:
        """Runs after it: release them.

        Not if `unit` is in self.root and a backward can follow.
        """
        raise Todo("06.2")
'''

FORWARD = """\
import torch
import zerolab
from torch import Tensor
from zerolab import Unit


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        unit.gather()

    def post_forward(self, unit: Unit) -> None:
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()
"""


EXERCISES = [
    Exercise(
        id="06.1",
        title="gather and release",
        difficulty=1,
        section="Memory that comes and goes",
        battery=GATHER_BATTERY,
        stub=GATHER_STUB,
        reference=GATHER,
        hints=(
            "A tensor and its views share one storage, full.untyped_storage(), and the memory belongs to that.",
            "storage.resize_(0) lets the memory go; storage.resize_(bytes) allocates new memory, not initialised.",
            "gather(): resize_ to full.numel() * full.element_size(), then dist.all_gather into "
            "list(full.chunk(dist.get_world_size())).",
        ),
        exports=("gather", "release"),
    ),
    Exercise(
        id="06.2",
        title="the forward of ZeRO-3",
        difficulty=3,
        section="ZeRO-3's forward as a class",
        battery=FORWARD_BATTERY,
        stub=FORWARD_STUB,
        reference=FORWARD,
        hints=(
            "A unit has what you wrote in 06.1: unit.gather() and unit.release(). gather() sends unit.shard.",
            "optimizer_params(): unit.shard = unit.shard.clone(), then unit.release(), then return "
            "super().optimizer_params(unit). Released before the clone, the shard would go too.",
            "post_forward(): if unit not in self.root or not torch.is_grad_enabled(): unit.release()",
        ),
        exports=("MyZero3Forward",),
        extends="Zero3",
    ),
]
