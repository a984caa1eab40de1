"""Lesson 20: a parameter that is gathered by autograd."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene, in_groups


def mesh_of(play: Play, kind: str) -> tuple[Any, Any]:
    """The shard group and the replicate group of this rank."""
    alone = play.among([play.rank])
    if kind == "hybrid":  # 2 x 2
        low, column = 2 * (play.rank // 2), play.rank % 2
        return play.among([low, low + 1]), play.among([column, column + 2])
    return (play.group, alone) if kind == "sharded" else (alone, play.group)


def shard_of(full: Tensor, group: Any) -> Tensor:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return F.pad(full.flatten(), (0, -full.numel() % size)).chunk(size)[rank].clone()


def gather(
    play: Play, *shape: int, kind: str = "sharded", dtype: torch.dtype = torch.float32, other: bool = False
) -> None:
    """A gather and its backward; `other`: with another one between the two."""
    mesh = mesh_of(play, kind)
    fine = 1 + 2**-26 if dtype == torch.float64 else 1  # more digits than a float32 has
    full = play.base(*shape, name="the parameter").to(dtype) * fine
    shard = play.keep("`shard`", shard_of(full, mesh[0]).requires_grad_())
    got = play.call("Gather.apply(shard, shape, ...)", play.code.Gather.apply, shard, torch.Size(shape), *mesh)
    if not isinstance(got, Tensor):
        return
    if other:
        sizes = mesh[::-1]
        second = play.keep("the other `shard`", shard_of(play.base(5), sizes[0]).requires_grad_())
        name = "Gather.apply of another parameter, with the groups exchanged"
        more = play.call(name, play.code.Gather.apply, second, torch.Size((5,)), *sizes)
    base = play.base(*shape, name="the gradient")
    grad = play.keep("the gradient that came back", play.share(base, play.rank).to(dtype) * fine)
    with play.event("Gather's backward"):
        got.backward(grad)
    if other:
        with play.event("the other's backward"):
            more.backward(play.share(play.base(5), play.rank))


def strange_gradient(play: Play) -> None:
    """A gradient whose elements do not lie one after another."""
    mesh = mesh_of(play, "sharded")
    shard = play.keep("`shard`", shard_of(play.base(4, 6), mesh[0]).requires_grad_())
    got = play.call("Gather.apply(shard, shape, ...)", play.code.Gather.apply, shard, torch.Size((4, 6)), *mesh)
    grad = play.keep("the gradient that came back", play.share(play.base(6, 4), play.rank))
    with play.event("Gather's backward"):
        got.backward(grad.t())


def let_go(play: Play) -> None:
    """What is left of the full parameter when only autograd's node, or the parametrization, is still there."""
    mesh = mesh_of(play, "sharded")
    shard = shard_of(play.base(16, 16), mesh[0]).requires_grad_()
    with play.event("Gather.apply(shard, shape, ...)"):
        got = play.code.Gather.apply(shard, torch.Size((16, 16)), *mesh)
    node, held = got.grad_fn, held_of(got)
    del got
    play.at_most("bytes of the full parameter that are held for backward", held)
    full = play.base(16, 16).requires_grad_()
    with play.event("right_inverse(full)"):
        made = play.code.Sharded(full.shape, *mesh)
        kept = made.right_inverse(full)
    play.see("the shard hangs on a graph", isinstance(kept, Tensor) and kept.grad_fn is not None)
    held = held_of(full)
    del full
    play.at_most("bytes of the full parameter that Sharded holds", held)
    with torch.no_grad(), play.event("Sharded.forward(shard)"):
        full = made(kept)
    held = held_of(full)
    del full
    play.at_most("bytes of the full parameter that Sharded holds after its forward", held)
    del node, kept, made


def held_of(tensor: Tensor) -> Callable[[], float]:
    """The bytes of its storage if somebody still holds that when asked, and 0 if not."""
    alive, nbytes = weakref.ref(tensor.untyped_storage()), float(tensor.untyped_storage().nbytes())

    def held() -> float:
        if alive() is not None:
            gc.collect()
        return 0.0 if alive() is None else nbytes

    return held


class Sharded:
    """A linear layer whose weight and bias go through the answer's parametrization."""

    def __init__(self, play: Play, kind: str = "sharded", dtype: torch.dtype = torch.float64) -> None:
        self.play, self.dtype, mesh = play, dtype, mesh_of(play, kind)
        self.layer = nn.Linear(3, 5, dtype=dtype)
        with torch.no_grad():
            for param in self.layer.parameters():
                param.copy_(play.base(*param.shape))
        full = {name: play.keep(f"the whole {name}", param.detach()) for name, param in self.layer.named_parameters()}
        self.shards: dict[str, Tensor] = {}
        for name, param in list(self.layer.named_parameters()):
            with play.event(f"Sharded(shape, ...) for the {name}", draws=True):
                made = play.code.Sharded(param.shape, *mesh)
            play.see("Sharded is an nn.Module", isinstance(made, nn.Module))
            play.see("it has no parameters of its own", not list(made.parameters()))
            shard = play.call(f"right_inverse of the {name}", made.right_inverse, param)
            if isinstance(shard, Tensor):
                play.at_most("bytes of memory that the shard holds", shard.untyped_storage().nbytes())
                apart = shard.untyped_storage().data_ptr() != full[name].untyped_storage().data_ptr()
                play.see("the shard lies in memory of its own", apart)
            play.call(f"forward of the {name}'s shard", made.forward, shard)
            with play.event(f"register_parametrization for the {name}"):
                register_parametrization(self.layer, name, made)
            made_of: Any = self.layer.parametrizations
            self.shards[name] = made_of[name].original
        play.keep("the shards", self.shards)

    def forward(self, name: str) -> Tensor:
        x = self.play.share(self.play.base(2, 3), 0).to(self.dtype) * (1 + self.play.rank)
        with self.play.event(f"the forward pass of {name}"):
            y = self.layer(x)
        self.play.see(f"the output for {name}", y)
        return y

    def backward(self, y: Tensor, name: str) -> None:
        with self.play.event(f"the backward pass of {name}"):
            y.backward(torch.ones_like(y) * (1 + self.play.rank))


def in_a_layer(play: Play, kind: str = "sharded") -> None:
    play.loose = 1e-12
    made = Sharded(play, kind)
    made.backward(made.forward("x1"), "x1")


def again(play: Play) -> None:
    """Two forwards before two backwards, under no_grad, and with a frozen weight."""
    play.loose = 1e-12
    made = Sharded(play)
    outputs = [made.forward("x1"), made.forward("x2")]
    with torch.no_grad():
        made.forward("x3 under torch.no_grad()")
    made.backward(outputs[1], "x2")
    made.backward(outputs[0], "x1")
    with torch.no_grad():
        for shard in made.shards.values():
            shard.mul_(3)  # as a step does
    made.backward(made.forward("x4, after a step"), "x4, after a step")
    made.shards["weight"].requires_grad_(False)
    made.backward(made.forward("x5, the weight frozen"), "x5")


GROUPS = "each group has a size and a rank of its own: dist.get_world_size(group), dist.get_rank(group)"
PAD = "cut the padding off after the gather, and put it back before the reduce-scatter"
SCALAR = "this parameter is a number without dimensions, torch.Size([]): count by shape.numel(), and view(shape)"
KEEP = "right the first time: keep what backward needs in ctx, and nothing elsewhere"
GATHER_BATTERY = (
    Scene("", lambda play: gather(play, 4, 6)),
    Scene("with 5 x 7 elements", lambda play: gather(play, 5, 7), PAD),
    Scene("with a single element", lambda play: gather(play), SCALAR),
    Scene("with fewer elements than ranks", lambda play: gather(play, 2), PAD, sizes=(3, 4)),
    Scene("with nothing sharded", lambda play: gather(play, 5, 3, kind="replicated"), GROUPS),
    Scene("with pairs that shard", lambda play: gather(play, 5, 3, kind="hybrid"), GROUPS, sizes=(4,)),
    Scene("with two parameters by turns", lambda play: gather(play, 5, 7, other=True), KEEP),
    Scene("in float64", lambda play: gather(play, 3, 5, dtype=torch.float64), "keep the dtype of `shard`"),
    Scene("with a transposed gradient", strange_gradient, "the gradient may lie in any order in memory: flatten()"),
    Scene("in a layer", in_a_layer),
    Scene("", let_go, "keep no full parameter: backward needs the groups, and right_inverse a copy of the shard"),
    Scene("in a layer, nothing sharded", lambda play: in_a_layer(play, "replicated"), GROUPS),
    Scene("in a layer that pairs shard", lambda play: in_a_layer(play, "hybrid"), GROUPS, sizes=(4,)),
    Scene("in a layer that is used again", again, KEEP),
    *in_groups(in_a_layer, "only some ranks share this layer: pass group=..., and take rank and size from it"),
)

GATHER_STUB = '''\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from zerolab.lab.exercises import Todo


class Gather(torch.autograd.Function):
    """Shards become the full parameter; its gradient becomes shards again."""

    @staticmethod
    def forward(ctx, shard: Tensor, shape: torch.Size, shard_group, replicate_group):
        """(S,) -> `shape`: the shards of all ranks in `shard_group`, one after another,
        without the padding at the end. ctx.groups = ... keeps what backward needs.

        dist.all_gather(list of N tensors, shard, group=...) fills the list; it may be
        the N chunks of one empty tensor.
        """
        raise Todo("20.1")

    @staticmethod
    def backward(ctx, grad: Tensor):
        """This rank's shard, (S,), of the mean of all gradients: over the ranks of
        `shard_group`, and over those of `replicate_group`. `grad` stays as it is.

        dist.reduce_scatter(output, list of N tensors, group=...), then
        dist.all_reduce(tensor, group=...). Return a value for each argument of forward:
        the gradient, and None three times.
        """
        raise Todo("20.1")


class Sharded(nn.Module):
    """A parametrization: what `module.weight` gives is forward(what is kept)."""

    def __init__(self, shape: torch.Size, shard_group, replicate_group) -> None:
        super().__init__()
        self.shape, self.groups = shape, (shard_group, replicate_group)

    def right_inverse(self, full: Tensor) -> Tensor:
        """What this rank, r of the N of `shard_group`, keeps of `full`: chunk r of the N
        equal chunks of its elements, zeros at the end where N does not divide them;
        detached, in memory of its own.
        """
        raise Todo("20.1")

    def forward(self, shard: Tensor) -> Tensor:
        """(S,) -> `shape`."""
        return Gather.apply(shard, self.shape, *self.groups)
'''

GATHER = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: Tensor, shape: torch.Size, shard_group, replicate_group):
        ctx.groups = shard_group, replicate_group
        N = dist.get_world_size(shard_group)
        flat = shard.new_empty(N * shard.numel())
        dist.all_gather(list(flat.chunk(N)), shard, group=shard_group)
        return flat[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, grad: Tensor):
        shard_group, replicate_group = ctx.groups
        N, R = dist.get_world_size(shard_group), dist.get_world_size(replicate_group)
        flat = F.pad(grad.flatten(), (0, -grad.numel() % N))
        mine = flat.new_empty(flat.numel() // N)
        dist.reduce_scatter(mine, list(flat.chunk(N)), group=shard_group)
        dist.all_reduce(mine, group=replicate_group)
        return mine / (N * R), None, None, None


class Sharded(nn.Module):
    def __init__(self, shape: torch.Size, shard_group, replicate_group) -> None:
        super().__init__()
        self.shape, self.groups = shape, (shard_group, replicate_group)

    def right_inverse(self, full: Tensor) -> Tensor:
        N, rank = dist.get_world_size(self.groups[0]), dist.get_rank(self.groups[0])
        flat = F.pad(full.detach().flatten(), (0, -full.numel() % N))
        return flat.chunk(N)[rank].clone()

    def forward(self, shard: Tensor) -> Tensor:
        return Gather.apply(shard, self.shape, *self.groups)
"""


EXERCISES = [
    Exercise(
        id="20.1",
        title="a parameter that gathers itself",
        difficulty=2,
        section="Write: a parameter that gathers itself",
        battery=GATHER_BATTERY,
        stub=GATHER_STUB,
        reference=GATHER,
        hints=(
            "Three sizes: the parameter has shape.numel() elements, padded they are N * S, and a rank keeps S. Forward "
            "goes from S to N * S and cuts the padding off; backward pads with F.pad(grad.flatten(), (0, missing)), "
            "and goes from N * S to S.",
            "missing = -grad.numel() % N. flat.chunk(N) are N views of one tensor, so all_gather into list(flat.chunk"
            "(N)) fills flat. right_inverse pads in the same way and keeps chunk number dist.get_rank(shard_group).",
            "backward: reduce_scatter into a new tensor `mine` of flat.numel() // N elements, all_reduce `mine` in "
            "replicate_group, and divide once, by the sizes of both groups: return mine / (N * R), None, None, None.",
        ),
        exports=("Gather", "Sharded"),
        errors={
            "returned an incorrect number of gradients": "backward returns a value for each argument of forward: the "
            "gradient of the shard, and None for the shape and for each group",
            "returned an invalid gradient": "what backward returns has the shape of the shard, not that of the "
            "parameter: it is what autograd adds to shard.grad",
            "returned a gradient different than None": "the gradient comes first, in the place of the shard, and then "
            "None three times",
        },
    ),
]
