"""Lesson 24: the outer step of replicas that meet after every H-th step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene, in_groups


class Rounds:
    """A replica of some parameters, and what the answer makes of them after each round of local steps."""

    def __init__(
        self, play: Play, *shapes: tuple[int, ...], name: str = "", dtype: Any = torch.float32, **options: Any
    ):
        self.play, self.name = play, name
        self.params = [nn.Parameter(play.base(*shape).to(dtype) * (1 + 2.0**-30)) for shape in shapes]
        play.keep(f"the parameters{name}", self.params)
        with play.event(f"Outer(params, ...){name}"):
            self.outer = play.code.Outer(self.params, group=play.group, **options)
        self.number = 0

    def local_steps(self, scale: float = 1.0) -> None:
        self.number += 1
        with torch.no_grad(), self.play.event(f"the local steps of round {self.number}{self.name}"):
            for param in self.params:
                moved = self.play.base(*param.shape).to(param.dtype)
                param.sub_(scale * moved * (1 + self.play.rank) / 16)

    def step(self) -> None:
        self.play.call(f"step() after round {self.number}{self.name}", self.outer.step)


def rounds(play: Play, times: int = 3, scale: float = 1.0, **options: Any) -> None:
    play.loose = 1e-12 if options.get("dtype") == torch.float64 else 1e-5
    replica = Rounds(play, (3, 4), (5,), **options)
    for _ in range(times):
        replica.local_steps(scale)
        replica.step()


def by_turns(play: Play) -> None:
    play.loose = 1e-5
    replicas = [Rounds(play, (4,), name=" of the first"), Rounds(play, (2, 3), name=" of the second", momentum=0.5)]
    for _ in range(3):
        for replica in replicas:
            replica.local_steps()
        for replica in replicas:
            replica.step()


def a_generator(play: Play) -> None:
    """model.parameters() can be gone through only once."""
    play.loose = 1e-5
    params = [nn.Parameter(play.base(3)), nn.Parameter(play.base(2, 2))]
    play.keep("the parameters", params)
    with play.event("Outer(params, ...), a generator"):
        outer = play.code.Outer((param for param in params), group=play.group)
    for number in (1, 2):
        with torch.no_grad(), play.event(f"the local steps of round {number}"):
            for param in params:
                param.sub_(play.base(*param.shape) * (1 + play.rank) / 16)
        play.call(f"step() after round {number}", outer.step)


def transposed(play: Play) -> None:
    play.loose = 1e-5
    param = nn.Parameter(play.base(3, 5).t())
    play.keep("the parameters", [param])
    with play.event("Outer(params, ...)"):
        outer = play.code.Outer([param], group=play.group)
    with torch.no_grad(), play.event("the local steps of round 1"):
        param.sub_(play.base(5, 3) * (1 + play.rank) / 16)
    play.call("step() after round 1", outer.step)


def gradients_stay(play: Play) -> None:
    """Parameters that autograd goes on to use, and whoever else has a view of them."""
    play.loose = 1e-5
    replica = Rounds(play, (3,), (2,))
    replica.local_steps()
    views = [param.detach() for param in replica.params]
    replica.step()
    play.see(
        "a view of each parameter sees what it becomes", [bool(v.eq(p).all()) for v, p in zip(views, replica.params)]
    )
    play.see("they are leaves that require a gradient", [p.is_leaf and p.requires_grad for p in replica.params])


OUTER_BATTERY = (
    Scene("", rounds),
    Scene("with a single round", lambda play: rounds(play, times=1)),
    Scene(
        "without momentum, lr = 1",
        lambda play: rounds(play, lr=1.0, momentum=0.0),
        "then the result is the mean of the ranks' parameters",
    ),
    Scene("with other rates", lambda play: rounds(play, lr=0.4, momentum=0.6), "lr and momentum are arguments"),
    Scene("with local steps that move nothing", lambda play: rounds(play, scale=0.0), "the outer gradient is zero"),
    Scene("with two objects by turns", by_turns, "keep everything in self"),
    Scene(
        "with a generator of parameters", a_generator, "model.parameters() is gone through once: list(params)", (1, 2)
    ),
    Scene("with a transposed parameter", transposed, "a parameter may lie in any order in memory", (1, 2)),
    Scene("in float64", lambda play: rounds(play, dtype=torch.float64), "keep the parameter's dtype", (1, 2)),
    Scene(
        "with parameters that others use",
        gradients_stay,
        "write into the parameters, under torch.no_grad(): copy_ keeps their memory, `.data =` gives another",
        (1, 2),
    ),
    *in_groups(rounds, "only some ranks are in this group: pass group=..., and divide by its size"),
)

OUTER_STUB = '''\
import torch
import torch.distributed as dist
from zerolab.lab.exercises import Todo


class Outer:
    """The outer optimizer of local steps. All ranks begin with the same parameters."""

    def __init__(self, params, lr=0.7, momentum=0.9, group=None) -> None:
        """Keep `old`, a copy of each parameter, and `speed`, zeros of the same shape."""
        raise Todo("24.1")

    @torch.no_grad()
    def step(self) -> None:
        """After the local steps, when the ranks' parameters differ.

        For each parameter:
            gradient = old - mean of the ranks' parameters
            speed = momentum * speed + gradient
            old = old - lr * (gradient + momentum * speed)       (Nesterov)
        and the parameter becomes `old`, in place. Each is all-reduced once, alone or with
        others.
        """
        raise Todo("24.1")
'''

OUTER = """\
import torch
import torch.distributed as dist


class Outer:
    def __init__(self, params, lr=0.7, momentum=0.9, group=None) -> None:
        self.params, self.lr, self.momentum, self.group = list(params), lr, momentum, group
        self.old = [param.detach().clone() for param in self.params]
        self.speed = [torch.zeros_like(old) for old in self.old]

    @torch.no_grad()
    def step(self) -> None:
        N = dist.get_world_size(self.group)
        for param, old, speed in zip(self.params, self.old, self.speed):
            total = param.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            gradient = old - total / N
            speed.mul_(self.momentum).add_(gradient)
            old -= self.lr * (gradient + self.momentum * speed)
            param.copy_(old)
"""

EXERCISES = [
    Exercise(
        id="24.1",
        title="the outer step",
        difficulty=1,
        section="Write: the outer step",
        battery=OUTER_BATTERY,
        stub=OUTER_STUB,
        reference=OUTER,
        hints=(
            "The mean of the ranks' parameters: a copy of this rank's, all_reduce with group=self.group, divided by "
            "dist.get_world_size(self.group).",
            "`old` is what all ranks began the round with, the same everywhere. So each rank computes the same new "
            "`old`, and nothing more need be sent. At the end: param.copy_(old).",
            "gradient = old - mean; speed.mul_(momentum).add_(gradient); old -= lr * (gradient + momentum * speed)",
        ),
        exports=("Outer",),
    ),
]
