"""Lesson 08: a loss scaler whose ranks skip a step together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zerolab
from zerolab import Precision, to_local
from zerolab.engine.slices import plainly
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

HALF = Precision(torch.float16)
Bad = Callable[[Play, list[Tensor]], None]  # changes the slices that the rank has of the gradients
FLAGS = 256  # bytes for each rank: agreeing may cost a number for each parameter, or a pickled one


class Part(nn.Module):
    """Odd sizes, so that slices cut through parameters and some are empty; one parameter is unused, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.factor = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def momentum(params: list[nn.Parameter]) -> Optimizer:
    """One that moves weights even where gradients are 0, and has two groups."""
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    return SGD(groups, lr=2.0**-4, momentum=0.5, weight_decay=2.0**-7)


class Loop:
    """A model, an optimizer and a scaler, in the loop that the lesson shows."""

    def __init__(
        self,
        play: Play,
        stage: int = 3,
        precision: Precision | None = HALF,
        dtype: torch.dtype = torch.float32,
        start: float = 1024.0,
        interval: int = 2,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer] = momentum,
        name: str = "",
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Part(), nn.Linear(7, 3)).to(dtype)
        self.play, self.name, self.steps, self.number = play, name, 0, 0
        self.zero = zerolab.shard(model, stage, units=[Part], precision=precision)
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.optimizer = make_optimizer(list(self.params.values()))
        self.optimizer.register_step_post_hook(self.count)
        made = play.code.MyScaler
        with play.event(f"MyScaler(){name}"):
            self.scaler = made(self.zero, init_scale=start, growth_interval=interval)
        inherits = isinstance(made, type) and issubclass(made, torch.amp.GradScaler)
        play.see("MyScaler inherits from torch's GradScaler", inherits)
        self.look(f"a new scaler{name}")

    def count(self, *_: Any) -> None:
        self.steps += 1

    def turn(
        self,
        how: str = "",
        bad: Bad | None = None,
        *,
        clips: bool = False,
        set_to_none: bool = True,
        exact: bool = True,
    ) -> None:
        """One step with gradients that are written by hand. how: what is special about it, in words.

        bad: puts an overflow among the gradients that this rank has, if it is the one. clips: the loop calls
        unscale_(), and halves the gradients, in which no overflow is left to be seen.
        """
        play = self.play
        self.number += 1
        when = f"step {self.number}{how}{self.name}"
        loss = play.keep("`loss`", torch.tensor(0.75, requires_grad=True))
        if exact:
            play.call(f"{when}: scale()", self.scaler.scale, loss)
        self.write(bad)
        if clips:
            with play.event(f"{when}: unscale_()", slack=FLAGS * play.size):
                self.scaler.unscale_(self.optimizer)
            self.look(f"{when}, after unscale_()", gradients=bad is None)
            for param in self.params.values():
                if param.grad is not None:
                    to_local(param.grad).mul_(0.5).nan_to_num_(0.0, 0.0, 0.0)
        with play.event(f"{when}: step()", slack=FLAGS * play.size):
            self.scaler.step(self.optimizer)
        if bad is not None:
            play.world.all_returned(f"{when}: step")  # so that no call meets one of the next step
        self.look(f"{when}, after step()", exact=exact)
        with play.event(f"{when}: update()", slack=FLAGS * play.size):
            self.scaler.update()
        self.look(f"{when}, after update()", exact=exact)
        with play.event(f"{when}: zero_grad()"):
            grads = [
                weakref.ref(param.grad.untyped_storage()) for param in self.params.values() if param.grad is not None
            ]
            self.optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none:
            play.at_most(f"{when}, after zero_grad(): gradients in memory", sum(grad() is not None for grad in grads))

    def write(self, bad: Bad | None) -> None:
        """What a backward leaves: mean gradients that float16 holds, some too small for it once they are unscaled."""
        written: dict[str, Tensor] = {}
        means = [torch.zeros_like(unit.master, dtype=unit.dtypes.reduce) for unit in self.zero.units]
        for unit, mean in zip(self.zero.units, means, strict=True):
            for name, part in zip(unit.names, unit.parts(mean), strict=True):
                if name in self.params and not name.endswith("unused"):
                    flat = torch.arange(part.numel()) + len(written) + self.play.rank
                    part.copy_(torch.where(flat % 3 == 0, 2.0**-20, (flat % 7 + 1) * 0.25).view(part.shape))
                    written[name] = part
        if bad is not None:
            bad(self.play, [part for part in written.values() if part.numel()])
        for unit, mean in zip(self.zero.units, means, strict=True):
            unit.bucket.grad = mean
            with plainly():
                unit.bucket.show([name in written for name in unit.names])

    def look(self, when: str, gradients: bool = False, exact: bool = True) -> None:
        play = self.play
        play.see(f"{when}: calls of optimizer.step()", self.steps)
        one = self.scaler.scale(torch.ones(()))
        if exact:
            play.see(f"{when}: what scale() makes of 1", one)
        else:
            play.see(f"{when}: the scale is above 0", bool(one > 0))
        if gradients:
            grads = {name: param.grad for name, param in self.params.items()}
            play.see(f"{when}: .grad", {name: None if grad is None else to_local(grad) for name, grad in grads.items()})
        play.see(f"{when}: weights", flat(self.params.values()))
        kept = [value for param in self.params.values() for value in self.optimizer.state.get(param, {}).values()]
        play.see(f"{when}: the optimizer's state", flat(kept))


def flat(tensors: Iterable[Any]) -> Tensor:
    return torch.cat([torch.empty(0), *(to_local(tensor).detach().flatten() for tensor in tensors)])


def on(rank: int | None, value: float, place: int | None = None) -> Bad:
    """Puts `value` into the last element of each of the rank's slices, or of one. rank: None for all ranks."""

    def put(play: Play, parts: list[Tensor]) -> None:
        if rank is None or rank % play.size == play.rank:
            for part in parts if place is None else [parts[min(place, len(parts) - 1)]]:
                part.view(-1)[-1] = value

    return put


# ---------------------------------------------------------------------- the scenes


def good_steps(play: Play) -> None:
    loop = Loop(play)
    loop.turn(clips=True)
    loop.turn(set_to_none=False)
    loop.turn()
    loop.turn(clips=True)


def overflows(play: Play) -> None:
    loop = Loop(play)
    loop.turn()
    loop.turn(", with inf on the last rank", on(-1, math.inf))
    loop.turn(set_to_none=False)
    loop.turn(", with NaN on rank 0", on(0, math.nan))
    loop.turn()
    loop.turn(", the second good one in a row")
    loop.turn(", with -inf on all ranks", on(None, -math.inf), set_to_none=False)
    loop.turn(", with inf on rank 1", on(1, math.inf))
    loop.turn(clips=True)
    loop.turn()


def clipped(play: Play) -> None:
    loop = Loop(play)
    loop.turn(", with inf on rank 0", on(0, math.inf), clips=True)
    loop.turn(clips=True)
    loop.turn(", with NaN on the last rank", on(-1, math.nan), clips=True, set_to_none=False)
    loop.turn()


def one_place(play: Play) -> None:
    loop = Loop(play)
    for place, which in enumerate(("first", "second", "third")):
        loop.turn(f", with inf in the {which} parameter alone", on(None, math.inf, place))


def at_the_limits(play: Play) -> None:
    loop = Loop(play, start=2.0**20, interval=1)
    loop.turn(", with 65,504, which float16 holds", on(None, 65504.0), clips=True)
    loop.turn(", with 2**-24, which float16 holds", on(None, 2.0**-24), clips=True)
    loop.turn()
    loop = Loop(play, start=2.0, name=" of a scaler that begins at 2")
    for _ in range(3):
        loop.turn(", with inf on rank 0", on(0, math.inf), exact=loop.number == 0)


def two_scalers(play: Play) -> None:
    loops = [
        Loop(play, start=64.0, interval=3, name=" of the first"),
        Loop(play, start=8.0, interval=1, name=" of the second"),
    ]
    for number in range(4):
        for loop in loops:
            hit = number == 2 and loop is loops[1]
            loop.turn(*((", with inf on rank 0", on(0, math.inf)) if hit else ()), clips=number % 2 == 0)


def without_float16(play: Play, dtype: torch.dtype) -> None:
    loop = Loop(play, precision=None, dtype=dtype)
    loop.turn(clips=True)
    loop.turn()
    loop.turn(", with 3e38, which float32 holds, and its square does not fit", on(None, 3e38))
    loop.turn(", with inf on rank 0", on(0, math.inf))


OTHER_DTYPE = "the gradients may come in another dtype than float16: take it from them"
STAGE_OF = {1: 0, 2: 2, 3: 3, 4: 1}  # number of ranks -> stage


def training(play: Play) -> None:
    """Whole steps, with overflows where they come about."""
    stage = STAGE_OF[play.size]
    loop = Loop(play, stage, start=2.0**20, make_optimizer=lambda params: AdamW(params, lr=1e-2))
    for step in range(5):
        when = f"step {step + 1} in stage {stage}"
        x = torch.ones(2, 7) * (play.rank + 1 + step % 3) / 8
        for _ in range(2 if step == 3 else 1):
            loss = loop.zero.model(x).double().square().mean()
            loss = loss * 1e6 if step == 2 and play.rank == play.size - 1 else loss
            loop.scaler.scale(loss).backward()
        if step % 2 == 0:
            loop.scaler.unscale_(loop.optimizer)
            loop.zero.clip_grad_norm_(0.5)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad(set_to_none=step != 1)
        play.world.all_returned(when)
        with play.event(when):
            pass
        loop.look(when)


BATTERY = (
    Scene("", good_steps, "go through the loop step by step: what do .grad, the weights and the scale become in each?"),
    Scene("with overflows", overflows, "after an overflow on any rank all skip the step, and halve the scale once"),
    Scene(
        "with an overflow that is clipped", clipped, "unscale_() has to find the overflow, and step() to remember it"
    ),
    Scene(
        "with an overflow in one place",
        one_place,
        "every gradient counts, and one that is not finite is enough",
        sizes=(1, 3),
    ),
    Scene(
        "at the limits",
        at_the_limits,
        "only what isfinite() refuses is an overflow, and the scale has no limit",
        sizes=(1,),
    ),
    Scene(
        "with two scalers in turns",
        two_scalers,
        "scale, count and interval belong to one scaler: keep them in self",
        sizes=(1, 2),
    ),
    Scene("in float32", partial(without_float16, dtype=torch.float32), OTHER_DTYPE, sizes=(1,)),
    Scene("in float64", partial(without_float16, dtype=torch.float64), OTHER_DTYPE, sizes=(1, 4)),
    Scene(
        "in training", training, "the three methods are called by a loop with real gradients here: compare with them"
    ),
)


GIVEN = '''\
    def __init__(
        self, zero: Engine, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.zero, self.factor, self.growth_interval = zero, init_scale, growth_interval
        self.good_steps = 0  # made since the scale last changed
        self.overflow: bool | None = None  # in this step, on any rank; None: not looked yet

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def gradients(self) -> list[Tensor]:
        """This rank's slices of the mean gradients, in float32. Change them in place."""
        self.zero.promote_grads(self.zero.units)
        params = self.zero.model.parameters()
        return [to_local(param.grad) for param in params if param.grad is not None]
'''

SCALER_STUB = f'''\
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from zerolab import Engine, to_local
from zerolab.lab.exercises import Todo


class MyScaler:
{GIVEN}
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide every gradient by self.factor, and set self.overflow.

        It is true if a gradient of ANY rank is not finite.
        """
        raise Todo("08.1")

    def step(self, optimizer: Optimizer) -> None:
        """optimizer.step(), unless there is an overflow.

        Unscale first, if the loop has not called unscale_().
        """
        raise Todo("08.1")

    def update(self) -> None:
        """Halve the scale after an overflow.

        Double it after growth_interval good steps in a row.
        """
        raise Todo("08.1")
'''

SCALER = f"""\
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from zerolab import Engine, to_local


class MyScaler:
{GIVEN}
    def unscale_(self, optimizer: Optimizer) -> None:
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)

    def step(self, optimizer: Optimizer) -> None:
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()

    def update(self) -> None:
        self.good_steps += 1
        if self.overflow:
            self.factor, self.good_steps = self.factor / 2, 0
        elif self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0
        self.overflow = None
"""

EXERCISES = [
    Exercise(
        id="08.1",
        title="the loss scaler",
        difficulty=3,
        section="All or none",
        battery=BATTERY,
        stub=SCALER_STUB,
        reference=SCALER,
        hints=(
            "unscale_(): for grad in self.gradients(): divide in place (grad /= ...), and note whether isfinite() "
            "holds for all of it. A rank knows only its own slices, so the flag must go to all ranks.",
            "The flag is a tensor of one number, 0 or 1. dist.all_reduce(flag, op=dist.ReduceOp.MAX) on EVERY rank "
            "makes it 1 on all of them if it is 1 on any.",
            "step(): if self.overflow is None, unscale_() has not run. update(): overflow: halve, good_steps = 0; else "
            "count, and at growth_interval double and begin again at 0; last, self.overflow = None for the next step.",
        ),
        exports=("MyScaler",),
    ),
]
