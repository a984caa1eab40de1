"""Lesson 17: two patients mended."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

Batches = list[tuple[Tensor, Tensor]]


class Once:
    """Batches that can be gone through once, without a length."""

    def __init__(self, data: Batches) -> None:
        self._data = iter(data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._data


# ---------------------------------------------------------------------- what is trained


class Probe(nn.Module):
    """Its loss is linear in the parameters, so an update says which batches are in it. Notes where it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 6, dtype=torch.float64))
        self.scale = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.called: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.called.append(self.weight.detach().clone())
        return (self.weight * x).sum() + self.scale * y


class Training:
    """A model, this rank's batches, and what is looked at after a call that trains."""

    def __init__(self, play: Play) -> None:
        self.play, self.lr, self.steps = play, 2.0**-4, 0
        self.model, self.start = Probe(), Probe()

    def batches(self, count: int, of_all: int) -> Batches:
        """This rank's `count`, of the `of_all` at most that a rank has."""
        made = []
        for _ in range(of_all):
            x = self.play.base(5, name=f"batch {self.steps}")
            y = self.play.base(1)
            made.append(tuple(self.play.share(one, self.play.rank).double() for one in (x, y[0])))
            self.steps += 1
        return self.play.keep("the batches", made[:count])

    def look(self) -> None:
        play, model = self.play, self.model
        for name in ("weight", "scale"):
            went = (getattr(self.start, name) - getattr(model, name)).detach() / self.lr
            play.see(f"what {name} has come down by since the start, over lr", went)
        play.see("weight, in each call of the model", model.called)
        for name in ("frozen", "unused"):
            play.see(f"the {name} parameter", getattr(model, name).detach())
        play.see("requires_grad of the parameters", [param.requires_grad for param in model.parameters()])


# ---------------------------------------------------------------------- 17.1


def uneven(play: Play, *calls: tuple[int, ...], adam: bool = False) -> None:
    """calls: how many batches each rank has, in each call of train()."""
    one = Training(play)
    trained = [one.model.weight, one.model.scale]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=one.lr)
    if adam:
        optimizer = torch.optim.Adam(trained, lr=one.lr)
    for counts in calls:
        counts = counts[: play.size]
        data = one.batches(counts[play.rank], max(counts))
        with play.event(f"train() with {', '.join(map(str, counts))} batches on the ranks", slack=math.inf):
            steps = play.code.train(one.model, optimizer, Once(data))
        one.look()
        play.see("the result", int(steps) if isinstance(steps, Tensor) and steps.numel() == 1 else steps)


NONE = "ranks may have no batch at all: ask before the first step, too"
UNEVEN_BATTERY = (
    Scene("", lambda play: uneven(play, (2, 2, 2, 2))),
    Scene("", lambda play: uneven(play, (1, 3, 2, 2))),
    Scene("", lambda play: uneven(play, (3, 2, 4, 1))),
    Scene("where a rank has no batch", lambda play: uneven(play, (2, 1, 0, 3)), NONE),
    Scene("where a rank has no batch", lambda play: uneven(play, (0, 2, 2, 2)), NONE),
    Scene("where no rank has a batch", lambda play: uneven(play, (0, 0, 0, 0)), NONE),
    Scene(
        "in a second call",
        lambda play: uneven(play, (3, 1, 2, 2), (1, 2, 3, 4)),
        "right the first time: nothing may be kept from one call to the next",
    ),
    Scene(
        "with Adam",
        lambda play: uneven(play, (4, 3, 3, 5), adam=True),
        "all ranks give the optimizer the same gradient, the mean; one step for each batch, and none after the last",
    ),
)

UNEVEN_STUB = '''\
import torch
import torch.distributed as dist
from zerolab.lab.exercises import Todo


def train(model, optimizer, batches):
    """Train as long as *every* rank has a batch. Return the number of steps, the same on
    all ranks.

    batches: an iterable without a length, of this rank's batches. Ranks may have more or
    fewer, even none. A parameter without a gradient has .grad None, on every rank alike.
    """
    raise Todo("17.1")  # take this line out, and mend the patient
    steps = 0
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        steps += 1
    return steps
'''

UNEVEN = """\
import torch
import torch.distributed as dist


def train(model, optimizer, batches):
    steps, iterator = 0, iter(batches)
    while True:
        batch = next(iterator, None)
        everyone = torch.tensor(0 if batch is None else 1)
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        if everyone == 0:
            return steps
        optimizer.zero_grad()
        model(*batch).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
        steps += 1
"""


# ---------------------------------------------------------------------- 17.2


class Token:
    """Lives as long as the graph that it is in."""


class Marked(torch.autograd.Function):
    """The identity; its node in the graph keeps a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, None


class Judged(nn.Module):
    """model(x, y) is the mean of (2^(w·x) - y)² over the samples. It counts how many of its graphs are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.5)
        self.seen: list[weakref.ref[Token]] = []
        self.alive = self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.alive = max(self.alive, sum(ref() is not None for ref in self.seen))
        self.calls += 1
        token = Token()
        self.seen.append(weakref.ref(token))
        hidden = Marked.apply(self.dropout(self.weight * x).exp2(), token)
        return ((hidden - y) ** 2).mean()


def evaluate(play: Play, *calls: tuple[tuple[int, ...], ...], training: bool = True, kind: Callable = iter) -> None:
    """calls: the sizes of each rank's batches, in each call of evaluate()."""
    model = Judged().train(training)
    play.keep("the parameters", list(model.parameters()))
    for sizes in calls:
        sizes, rank = sizes[: play.size], play.rank
        data = play.keep(
            "the batches",
            [
                (torch.arange(size) / 4 + step / 8 + rank / 2, torch.full((size,), 3.0 * rank + step))
                for step, size in enumerate(sizes[rank])
            ],
        )
        said = " and ".join(str(list(each)) for each in sizes)
        name = f"evaluate() with batches of {said} samples"
        with play.event(name, slack=math.inf):
            loss = play.code.evaluate(model, kind(data))
        play.see("the result", loss)
        play.see("model.training", "on" if model.training else "off")
        play.at_most("batches whose activations were alive at once", max(2, 1 + model.alive))
        play.see("calls of the model", model.calls)


LEAVE = "leave the model in the mode in which it came: was = model.training, and model.train(was) at the end"
EVALUATE_BATTERY = (
    Scene("", lambda play: evaluate(play, ((4, 2),) * 4, ((4, 4, 1), (4,), (2, 1), (3, 3, 3, 1)))),
    Scene("of a model in evaluation mode", lambda play: evaluate(play, ((3, 1),) * 4, training=False), LEAVE),
    Scene(
        "where a rank has no batch",
        lambda play: evaluate(play, ((2,), (5, 1), (), (1, 1))),
        "a rank without batches has 0 samples: divide after the all-reduce, by everybody's number",
    ),
    Scene("with fewer samples than ranks", lambda play: evaluate(play, ((1,), (), (), (1,))), "divide by their number"),
    Scene("where rank 0 has no batch", lambda play: evaluate(play, ((), (5, 1), (2,), ())), sizes=(2, 3, 4)),
    Scene(
        "with batches that come from a generator, twice",
        lambda play: evaluate(play, ((1, 3),) * 4, ((6,), (1,), (2, 2), (1,)), kind=lambda data: (b for b in data)),
        "go through the batches once, count them as they come, and keep nothing from an earlier call",
    ),
)

EVALUATE_STUB = '''\
import torch
import torch.distributed as dist
from zerolab.lab.exercises import Todo


def evaluate(model, batches):
    """The mean loss over all samples of all ranks, a float, the same on every rank.

    model(x, y) returns the mean loss over a batch of len(x) samples. batches: to go through
    once; ranks may have different numbers of them, even none. The model is left in the
    mode, training or not, in which it came.
    """
    raise Todo("17.2")  # take this line out, and mend the patient
    model.eval()
    total, count = torch.zeros(()), 0
    for x, y in batches:
        total = total + model(x, y)
        count += 1
    return total / count
'''

EVALUATE = """\
import torch
import torch.distributed as dist


def evaluate(model, batches):
    was = model.training
    model.eval()
    total = torch.zeros(2)  # the sum of the losses, and how many samples
    with torch.no_grad():
        for x, y in batches:
            total += torch.tensor([model(x, y).item() * len(x), len(x)])
    model.train(was)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
"""


EXERCISES = [
    Exercise(
        id="17.1",
        title="stop together",
        difficulty=2,
        section="Write: stop together",
        battery=UNEVEN_BATTERY,
        stub=UNEVEN_STUB,
        reference=UNEVEN,
        hints=(
            "Before each step the ranks have to tell each other whether they have a batch, in a collective in which "
            "a rank without a batch takes part too.",
            "batch = next(iterator, None) is None when nothing is left. An all-reduce of 1 or 0 with dist.ReduceOp.MIN "
            "gives 1 only if every rank has one.",
            "while True: take a batch, all-reduce the flag, return the steps if it is 0, else make the step.",
        ),
        exports=("train",),
    ),
    Exercise(
        id="17.2",
        title="a validation that forgets",
        difficulty=1,
        section="Write: a validation that forgets",
        battery=EVALUATE_BATTERY,
        stub=EVALUATE_STUB,
        reference=EVALUATE,
        hints=(
            "A number has no graph: model(x, y).item(), inside `with torch.no_grad():`, which does not even build one.",
            "Add up model(x, y).item() * len(x) and len(x). A rank without batches has 0 of both.",
            "One all-reduce of torch.tensor([total, count]) after the loop, and then divide. Remember model.training "
            "before model.eval().",
        ),
        exports=("evaluate",),
    ),
]
