"""Lesson 03: data parallel, first naively, then with a bucket, then as a class of the engine."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import zerolab
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Event, Play, Scene
from zerolab.lab.exercises.stages import Stage, battery_of
from zerolab.lab.ranks.intercept import MESSAGES

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((5,), (2, 2), (), (1, 3, 1))
OTHERS: Shapes = ((3, 1), (7,))


class Model:
    """Parameters that differ between ranks, so that averaging them instead of their gradients shows."""

    def __init__(self, play: Play, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32, name: str = "") -> None:
        self.play, self.dtype, self.name = play, dtype, name
        self.params = [nn.Parameter(-play.share(play.base(*shape), play.rank).to(dtype)) for shape in shapes]

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    def backward(self, in_place: bool = False, unused: tuple[int, ...] = (), opposite: bool = False) -> None:
        """New gradients: with in_place as after `zero_grad(set_to_none=False)`.

        unused: parameters that this rank has not used. opposite: the first rank's and the last one's add up to zero.
        """
        play = self.play
        for i, param in enumerate(self.params):
            new = play.share(play.base(*param.shape, name=f"{self.name}gradient {i}"), play.rank).to(param.dtype)
            if opposite:
                new = torch.full_like(
                    param, {0: 1.0, play.size - 1: -1.0}.get(play.rank, 0.0) if play.size > 1 else 1.0
                )
            if self.dtype == torch.float64:
                new = new * (1 - 2.0**-30)
            if i in unused:
                param.grad = None
            elif in_place and param.grad is not None:
                param.grad.zero_().add_(new)
            else:
                param.grad = new

    def look(self) -> None:
        self.play.see(f"{self.name}the parameters", [param.detach() for param in self.params])
        for i, param in enumerate(self.params):
            self.play.see(f"{self.name}gradient {i}", param.grad)


def padding(play: Play, numels: list[int], dtype: torch.dtype = torch.float32) -> float:
    """Bytes that a rank sends beyond an all-reduce's where each of these tensors is padded to equal chunks."""
    return 2.0 * (play.size - 1) / play.size * dtype.itemsize * sum(-numel % play.size for numel in numels)


# ---------------------------------------------------------------------- 03.1


def average(model: Model, when: str = "") -> None:
    numels = [param.numel() for param in model.params if param.grad is not None]
    asked = 16.0 * len(model.params)  # an answer may first ask all ranks which parameters anybody used
    with model.play.event(f"average(){when}", slack=padding(model.play, numels, model.dtype) + asked):
        model.play.code.average(model.params)
    model.look()


def plain_average(play: Play, dtype: torch.dtype = torch.float32) -> None:
    model = Model(play, dtype=dtype)
    model.backward()
    average(model)


def average_again(play: Play) -> None:
    model, other = Model(play), Model(play, OTHERS, name="another model's ")
    for step, in_place in enumerate((False, True, False)):
        model.backward(in_place)
        average(model, f" of step {step}")
        other.backward(in_place)
        average(other, f" of step {step}, another model")


def average_unused(play: Play) -> None:
    model = Model(play)
    for unused in ((), (1,), (0, 3), (1, 2, 3)):
        model.backward(unused=unused)
        average(model, f" with {len(unused)} unused")


def average_opposite(play: Play) -> None:
    model = Model(play)
    model.backward(opposite=True)
    average(model)


UNUSED = "a parameter that no rank used has no gradient, and must have none afterwards; the others have, so go on"
AGAIN = "right in the first step, but not in a later one: read param.grad anew in every step, and keep nothing of it"
ONE_DTYPE = "right in float32 only: the mean belongs in the gradients' own dtype"

AVERAGE_BATTERY = (
    Scene("", plain_average),
    Scene("in a later step", average_again, AGAIN),
    Scene("with parameters that were not used", average_unused, UNUSED),
    Scene("with gradients whose mean is zero", average_opposite, sizes=(2, 3)),
    Scene("in bfloat16", lambda play: plain_average(play, torch.bfloat16), ONE_DTYPE, sizes=(1, 2)),
    Scene("in float64", lambda play: plain_average(play, torch.float64), ONE_DTYPE, sizes=(2, 3)),
)

AVERAGE_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def average(params: list[Tensor]) -> None:
    """Replace each parameter's gradient with its mean over all ranks.

    One all-reduce per parameter will do. A parameter that nobody used has no gradient, and
    must have none afterwards.
    """
    raise Todo("03.1")
'''

AVERAGE = """\
import torch.distributed as dist
from torch import Tensor


def average(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
"""


# ---------------------------------------------------------------------- 03.2


class Steps:
    """The three methods of a bucket, called in one step after another."""

    def __init__(
        self,
        play: Play,
        shapes: Shapes = SHAPES,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        unused: tuple[int, ...] = (),
    ) -> None:
        self.play, self.name, self.model = play, name, Model(play, shapes, dtype, name)
        self.model.backward(unused=unused)  # the lesson makes its bucket after a backward
        with play.event(f"{name}Bucket()", uses=()):
            self.bucket = play.code.Bucket(self.model.params)

    def step(self, when: str) -> None:
        play, bucket, model = self.play, self.bucket, self.model
        with play.event(f"{self.name}collect(){when}", uses=()):
            bucket.collect()
        self._look_at_flat()
        with play.event(f"{self.name}reduce(){when}", slack=padding(play, [model.numel], model.dtype)) as event:
            bucket.reduce()
        play.see("the flat buffer is sent as a whole", _as_a_whole(event))
        with play.event(f"{self.name}write_back(){when}", uses=()):
            bucket.write_back()
        model.look()

    def _look_at_flat(self) -> None:
        """It holds all gradients, in order, and may be padded."""
        play, flat, numel = self.play, getattr(self.bucket, "flat", None), self.model.numel
        play.see("self.flat is a tensor of one dimension", isinstance(flat, Tensor) and flat.dim() == 1)
        if not isinstance(flat, Tensor) or flat.dim() != 1:
            return
        play.see("self.flat has a place for each element", numel <= flat.numel() < numel + play.size)
        play.clue("elements", flat.numel() - numel)
        play.at_most(
            "bytes that self.flat keeps alive", flat.untyped_storage().nbytes(), flat.itemsize * (play.size - 1.0)
        )
        start = 0
        for i, param in enumerate(self.model.params):
            end = start + param.numel()
            play.see(
                f"self.flat[{start}:{end}], where gradient {i} belongs", flat[start:end].detach().view(param.shape)
            )
            start = end


def _as_a_whole(event: Event) -> bool:
    collectives = [call.op for call in event.traffic if call.op not in MESSAGES]
    return len(collectives) <= 2 and collectives.count("all_reduce") <= 1  # reduce-scatter and all-gather are two


def plain_steps(play: Play, dtype: torch.dtype = torch.float32) -> None:
    Steps(play, dtype=dtype).step("")


def later_steps(play: Play) -> None:
    steps = Steps(play)
    for step, in_place in enumerate((False, True, False)):
        steps.model.backward(in_place)
        steps.step(f" of step {step}")
    steps.step(" once more, on the means")  # as the lesson does to measure times


def unused_steps(play: Play) -> None:
    steps = Steps(play, unused=(0,) if play.rank == 0 else (2, 3))
    for step, (unused, theirs) in enumerate((((1,), ()), ((0, 2), (3,)), ((), (0, 1, 2, 3)))):
        steps.model.backward(unused=unused if play.rank == 0 else theirs)
        steps.step(f" of step {step}")


def opposite_steps(play: Play) -> None:
    steps = Steps(play)
    steps.model.backward(opposite=True)
    steps.step("")


def two_buckets(play: Play) -> None:
    one, other = Steps(play), Steps(play, OTHERS, "another bucket's ")
    one.step("")
    held = getattr(one.bucket, "flat", None)
    play.keep("self.flat of the first bucket", held[: one.model.numel] if isinstance(held, Tensor) else None)
    other.step("")
    del play.kept["self.flat of the first bucket"]
    one.model.backward()
    one.step(" again")


BUCKET_BATTERY = (
    Scene("", plain_steps),
    Scene("in a later step", later_steps, "start afresh in every step, and keep nothing that a step leaves behind"),
    Scene(
        "with parameters that a rank has not used",
        unused_steps,
        "zeros travel for a parameter without a gradient, and it gets the mean all the same: another rank may have one",
    ),
    Scene("with gradients whose mean is zero", opposite_steps, sizes=(2, 3)),
    Scene("with two buckets", two_buckets, "what belongs to one bucket is made in its __init__() or collect()"),
    *(
        Scene(
            f"in {str(dtype).removeprefix('torch.')}",
            partial(plain_steps, dtype=dtype),
            sizes=(2,),
            note="for float32 only: with dtype=params[0].dtype self.flat would hold any gradients",
        )
        for dtype in (torch.bfloat16, torch.float64)
    ),
)

BUCKET_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


class Bucket:
    """One flat buffer, `self.flat`, in which the gradients of `params` travel together."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        raise Todo("03.2")

    def collect(self) -> None:
        """Copy all gradients into self.flat, in order; zeros where a parameter has none."""
        raise Todo("03.2")

    def reduce(self) -> None:
        """Average self.flat over the ranks, in one all-reduce."""
        raise Todo("03.2")

    def write_back(self) -> None:
        """Give every parameter its mean gradient, even if it had none here.

        Another rank may have had one.
        """
        raise Todo("03.2")
'''

BUCKET = """\
import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        numel = sum(param.numel() for param in params)
        self.flat = torch.zeros(numel, dtype=params[0].dtype)
        self.views, offset = [], 0
        for param in params:
            self.views.append(self.flat[offset : offset + param.numel()].view_as(param))
            offset += param.numel()

    def collect(self) -> None:
        for param, view in zip(self.params, self.views):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()

    def write_back(self) -> None:
        for param, view in zip(self.params, self.views):
            param.grad = view.clone()
"""


# ---------------------------------------------------------------------- 03.3

DDP_BATTERY = battery_of(
    Stage("MyDDP", zerolab.DDP, ("post_backward", "reduce")),
    "what no_sync() kept back is in unit.bucket.full: while self.reduces(unit) is False, leave it alone",
)

DDP_STUB = '''\
import torch.distributed as dist
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyDDP(zerolab.DDP):
    def post_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are complete. Start its reduction, if self.reduces(unit).

        Put what reduce() returns into unit.bucket.reduction: the engine waits for it before
        anyone sees the gradient.
        """
        raise Todo("03.3")

    def reduce(self, unit: Unit):
        """Average unit.bucket.full, a flat tensor, over the ranks.

        Leave the mean in unit.bucket.grad. Return None if it is there already, or something
        whose wait() returns when it is.
        self.comm.all_reduce(tensor, unit.name) starts a mean, in place, and enters it in
        the engine's ledger. The ranks that share the model need not be all: self.world_size
        counts them, and for functions of dist there is group=self.comm.group.
        """
        raise Todo("03.3")
'''

DDP = """\
import zerolab
from zerolab import Unit


class MyDDP(zerolab.DDP):
    def post_backward(self, unit: Unit) -> None:
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit: Unit):
        unit.bucket.grad = unit.bucket.full
        return self.comm.all_reduce(unit.bucket.grad, unit.name)
"""


EXERCISES = [
    Exercise(
        id="03.1",
        title="average the gradients",
        difficulty=1,
        section="The mean of N batches",
        battery=AVERAGE_BATTERY,
        stub=AVERAGE_STUB,
        reference=AVERAGE,
        hints=(
            "dist.all_reduce(tensor) replaces `tensor` on every rank with the sum over the ranks.",
            "The mean is the sum divided by dist.get_world_size(). It must end up in param.grad.",
            "for param in params: if param.grad is not None: all-reduce param.grad, then divide it by the world size.",
        ),
        exports=("average",),
    ),
    Exercise(
        id="03.2",
        title="a bucket",
        difficulty=2,
        section="Buckets",
        battery=BUCKET_BATTERY,
        stub=BUCKET_STUB,
        reference=BUCKET,
        hints=(
            "You wrote flat_buffer() in lesson 02: a flat tensor and a view into it for each parameter.",
            "collect() copies each gradient into its view, or zeroes the view; reduce() is one dist.all_reduce of "
            "self.flat and a division.",
            "write_back(): for param, view in zip(self.params, self.views): param.grad = view.clone()",
        ),
        exports=("Bucket",),
    ),
    Exercise(
        id="03.3",
        title="a class of the engine",
        difficulty=2,
        section="DDP as a class",
        battery=DDP_BATTERY,
        stub=DDP_STUB,
        reference=DDP,
        hints=(
            "The engine has collected the unit's gradients in its bucket: they are in unit.bucket.full.",
            "reduce(): unit.bucket.grad = unit.bucket.full, then return self.comm.all_reduce(unit.bucket.grad, "
            "unit.name), which has a wait().",
            "post_backward(): if self.reduces(unit): unit.bucket.reduction = self.reduce(unit). Inside no_sync() "
            "self.reduces(unit) is False.",
        ),
        exports=("MyDDP",),
        extends="DDP",
    ),
]
