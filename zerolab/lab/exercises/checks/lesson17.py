"""The exercises of lesson 17: four patients mended."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.checks.values import BY_ZERO, compare, forgot_to_return, in_case
from zerolab.lab.exercises.exercise import Exercise, World, Wrong

Batches = list[tuple[Tensor, Tensor]]

# ---------------------------------------------------------------------- what is trained


class Probe(nn.Module):
    """Its loss is linear in the parameters, so a gradient says which batches are in it: rank r's in base 16."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 6, dtype=dtype) * (1 + 3 * rank))
        self.scale = nn.Parameter(torch.full((), 2.0 + rank, dtype=dtype))
        self.frozen = nn.Parameter(torch.full((3,), 1.0 + rank, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.full((2,), 1.0 + rank, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.weight * x).sum() + self.scale * y


def batches_of(rank: int, count: int, dtype: torch.dtype = torch.float32, first: int = 0) -> Batches:
    """What `rank` trains on: the gradients of weight and scale, 12 · 16**rank times small integers."""
    steps = range(first, first + count)
    return [
        (12.0 * 16**rank * (torch.arange(5, dtype=dtype) + 1 + step), torch.tensor(12.0 * 16**rank, dtype=dtype))
        for step in steps
    ]


def trainable(model: Probe) -> list[Tensor]:
    return [model.weight.detach(), model.scale.detach()]


# ---------------------------------------------------------------------- 17.2

RATE = 2.0**-4
STARTS = {
    "first": "",
    "own": "the ranks began with different weights: give all of them rank 0's, before the first step",
    "mean": "the ranks began with the mean of their weights: rank 0's count, so broadcast them",
    "last": "the ranks began with another rank's weights: rank 0's count",
}
SUMS = {
    "mean": "",
    "own": "nothing is reduced: every rank took its own gradient",
    "sum": "summed over ranks, not averaged",
    "twice": "divided by the number of ranks twice",
    "first's": "every rank took rank 0's gradient: a broadcast where the mean was wanted",
}
ALONE = "the update has rank 0's gradient alone; nothing was reduced, or it was broadcast"
RATES = {"lr": "", "by rank": "the learning rate differs by rank: the same gradient gives another update"}
ZEROS = {"each": "", "never": "gradients of earlier steps are still there: zero_grad() is missing"}
FROZEN = "a parameter that is not trained has to be the same on all ranks too: broadcast every parameter"
PARTED = "not all ranks end with the same parameters"
SHORT = "not every batch was used: there is one step for each"


def _simulate(
    N: int, rank: int, count: int, start: str, sums: str, rates: str, zeros: str, dtype: torch.dtype
) -> list[Tensor]:
    """The parameters after `count` steps of the answer that makes these choices."""
    starts = [[p.clone() for p in trainable(Probe(r, dtype))] for r in range(N)]
    values = {
        "first": starts[0],
        "own": starts[rank],
        "last": starts[-1],
        "mean": [torch.stack(each).mean(dim=0) for each in zip(*starts, strict=True)],
    }[start]
    rate = RATE * (1 + rank) if rates == "by rank" else RATE
    kept: list[Tensor] = [torch.zeros_like(value) for value in values]
    for step in range(count):
        grads = [list(batches_of(r, count, dtype)[step]) for r in range(N)]
        for i, value in enumerate(values):
            local = [kept[i] + grad[i] if zeros == "never" else grad[i] for grad in grads]
            if zeros == "never" and sums == "own":
                local[rank] = kept[i] + grads[rank][i]
            total = torch.stack(local).sum(dim=0)
            got = {"mean": total / N, "own": local[rank], "sum": total, "twice": total / N**2, "first's": local[0]}
            kept[i] = got[sums]
            values[i] = value - rate * got[sums]
    return values


def _known_training(world: World, count: int, got: list[Tensor], dtype: torch.dtype) -> str:
    """The mistakes that together lead to `got`, the fewest first."""
    options = [
        choice
        for choice in itertools.product(STARTS, SUMS, RATES, ZEROS)
        if choice != ("first", "mean", "lr", "each") and (choice[3] == "each" or count > 1)
    ]
    options.sort(key=lambda choice: sum(bool(s) for s in _said(choice)))
    for choice in options:
        wanted = _simulate(world.world_size, world.rank, count, *choice, dtype)
        if all(torch.allclose(one.double(), other.double(), rtol=1e-6) for one, other in zip(got, wanted)):
            if world.rank == 0 and choice[1] == "own":
                return f"no mean was taken: {ALONE}"
            return "; ".join(sentence for sentence in _said(choice) if sentence)
    start = _simulate(world.world_size, world.rank, 0, "first", "mean", "lr", "each", dtype)
    if all(torch.equal(one, other) for one, other in zip(got, start)):
        return "the parameters are rank 0's, and never changed: optimizer.step() is missing, or sees no gradient"
    for fewer in range(1, count):
        wanted = _simulate(world.world_size, world.rank, fewer, "first", "mean", "lr", "each", dtype)
        if all(torch.allclose(one, other) for one, other in zip(got, wanted)):
            return SHORT
    return PARTED if world.world_size > 1 else ""


def _said(choice: tuple[str, ...]) -> list[str]:
    start, sums, rates, zeros = choice
    return [STARTS[start], SUMS[sums], RATES[rates], ZEROS[zeros]]


def check_in_step(answer: Any, world: World) -> None:
    for dtype, count in ((torch.float32, 1), (torch.float32, 3), (torch.float64, 2)):
        model, data = Probe(world.rank, dtype), batches_of(world.rank, count, dtype)
        before = copy.deepcopy(data)
        when = f"after {count} step{'s' * (count > 1)}" + " in float64" * (dtype == torch.float64)
        with world.record() as calls, world.blamed(calls):
            answer.train(model, iter(data), RATE)
        if any(not torch.equal(a, b) for old, new in zip(before, data) for a, b in zip(old, new)):
            raise Wrong(
                f"{when}: a batch was changed", "the batches are inputs: work on gradients and parameters alone"
            )
        wanted = _simulate(world.world_size, world.rank, count, "first", "mean", "lr", "each", dtype)
        got = [value.clone() for value in trainable(model)]

        def explain(_: Tensor, got: list[Tensor] = got, count: int = count, dtype: torch.dtype = dtype) -> str:
            return world.unwaited(calls) or _known_training(world, count, got, dtype)

        for name, one, other in zip(("weight", "scale"), got, wanted, strict=True):
            compare(f"{when}: {name}", one, other, explain)
        first = Probe(0, dtype)
        for name in ("frozen", "unused"):
            here, there = getattr(model, name).detach(), getattr(first, name).detach()
            compare(f"{when}: the {name} parameter", here, there, lambda _: FROZEN)
        if not model.weight.requires_grad or model.frozen.requires_grad:
            raise Wrong(f"{when}: requires_grad was changed", "copy the values into the parameters: param.data")


TRAIN_ERRORS = {
    "a leaf Variable that requires grad": "a collective writes into its tensor: broadcast param.data, not param",
    "'NoneType' object has no attribute": "a parameter that is not used has no gradient: param.grad is None, leave it "
    "out (on every rank alike)",
    "unsupported operand type(s) for /=: 'NoneType'": "a parameter that is not used has no gradient: param.grad is "
    "None, leave it out (on every rank alike)",
    "must be a tensor": "a parameter that is not used has no gradient: param.grad is None, leave it out",
    "type torch.Tensor": "a parameter that is not used has no gradient: param.grad is None, leave it out",
    "NoneType": "a parameter that is not used has no gradient: param.grad is None, leave it out (on every rank alike)",
    "does not require grad": "the loss has no graph: only the values of parameters may be replaced (param.data)",
    "object of type 'list_iterator' has no len": "batches can be gone through once, and have no length",
}

TRAIN_STUB = '''\
import torch
import torch.distributed as dist
from zerolab.lab.exercises import Todo


def train(model, batches, lr):
    """Train on this rank's batches with SGD. All ranks begin with rank 0's parameters and
    take the same steps.

    batches: as many on every rank, to go through once. model(x, y) returns the loss. A
    parameter that is not trained, or not used, has no gradient: its .grad is None on every
    rank.
    """
    raise Todo("17.2")  # take this line out, and mend the patient: it has four faults
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * (1 + dist.get_rank()))
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
'''

TRAIN = """\
import torch
import torch.distributed as dist


def train(model, batches, lr):
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()
"""

# ---------------------------------------------------------------------- 17.1

COUNTS: tuple[tuple[int, ...], ...] = ((2, 2, 2, 2), (3, 2, 4, 1), (1, 3, 2, 2), (2, 1, 0, 3))


class Sampler:
    """Batches that can be gone through once, without a length."""

    def __init__(self, data: Batches) -> None:
        self._data = iter(data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._data


def check_uneven(answer: Any, world: World) -> None:
    for counts in COUNTS:
        counts = counts[: world.world_size]
        torch.manual_seed(0)
        model = Probe(0)
        sgd = torch.optim.SGD([model.weight, model.scale], lr=RATE)
        data, shortest = batches_of(world.rank, counts[world.rank]), min(counts)
        when = f"with {', '.join(map(str, counts))} batches"
        with world.record() as calls:
            steps = answer.train(model, sgd, Sampler(data))
        world.all_returned("train")
        if steps is None:
            raise Wrong(f"{when}: train() returns None", forgot_to_return(None))
        if isinstance(steps, Tensor) and steps.numel() == 1:
            steps = steps.item()
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise Wrong(f"{when}: train() returns a {type(steps).__name__}", "return the number of steps")
        got = [value.clone() for value in trainable(model)]
        if lost := world.unwaited(calls):
            raise Wrong(f"{when}: {lost}", f"a forgotten wait: {lost}")

        def explain(_: Tensor, counts: tuple[int, ...] = counts, got: list[Tensor] = got) -> str:
            return _known_uneven(world, counts, got)

        for name, one, other in zip(("weight", "scale"), got, _after(counts, shortest), strict=True):
            compare(f"{when}: {name}", one, other, explain)
        if steps != shortest:
            raise Wrong(f"{when}: train() returns {steps}, expected {shortest}", _known_count(world, counts, steps))


def _after(
    counts: tuple[int, ...], steps: int, divide: int = 0, absent: bool = False, sums: bool = False
) -> list[Tensor]:
    """The parameters after `steps` steps of the mean over the ranks. absent: who has no batch left adds nothing."""
    values, N = [value.clone() for value in trainable(Probe(0))], len(counts)
    for step in range(steps):
        for i, value in enumerate(values):
            here = [r for r in range(N) if counts[r] > step or not absent]
            total = torch.stack([batches_of(r, step + 1)[step][i] for r in here]).sum(dim=0)
            values[i] = value - RATE * total / (1 if sums else len(here) if divide else N)
    return values


def _known_uneven(world: World, counts: tuple[int, ...], got: list[Tensor]) -> str:
    def equal(wanted: list[Tensor]) -> bool:
        return all(torch.allclose(one, other) for one, other in zip(got, wanted))

    shortest, N = min(counts), len(counts)
    if shortest and N > 1 and equal(_after(counts, shortest, sums=True)):
        return "summed over ranks, not averaged"
    own = _after(counts, shortest)
    for step in range(shortest, counts[world.rank]):
        for i, value in enumerate(own):
            own[i] = value - RATE * batches_of(world.rank, step + 1)[step][i]
        if equal(own):
            return "after the others stopped, this rank went on alone: its parameters are not theirs any more"
    for divide in (0, 1):
        for steps in range(shortest + 1, max(counts) + 1):
            if equal(_after(counts, steps, divide, absent=True)):
                return "ranks without a batch went on with nothing, and the others trained on: all stop together"
    for steps in range(shortest):
        if equal(_after(counts, steps)):
            return "stopped too early: as long as every rank has a batch, all make the step"
    return LAST_TWICE


LAST_TWICE = "a step was made with something other than a batch of every rank: a batch twice, or a gradient kept back"


def _known_count(world: World, counts: tuple[int, ...], steps: int) -> str:
    if steps == counts[world.rank]:
        return "that is how many batches this rank had: the shortest rank ends the loop"
    if steps == max(counts):
        return "that is the longest rank's number of batches: the shortest rank ends the loop"
    return "count a step after it was made: not the look for a batch that ends the loop, and all that were made"


UNEVEN_ERRORS = {
    "the end of train()": "a rank whose batches were used up has returned, and the others wait for it: before each "
    "step ask whether every rank has a batch",
    "iterable, not NoneType": "a rank without a batch went on: first ask whether every rank has one",
    "object of type 'Sampler' has no len": "the batches have no length: go through them with iter() and next()",
    "'Sampler' object is not an iterator": "next() takes an iterator: iter(batches) makes one, once, before the loop",
    "'Sampler' object is not subscriptable": "batches can be gone through once: iter() and next(), or list() them",
    "cannot unpack non-iterable NoneType": "a rank without a batch went on: first ask whether every rank has one",
    "StopIteration": "next(iterator) raises where there is no batch left: next(iterator, None) returns None",
    "'NoneType' object is not subscriptable": "a rank without a batch went on: first ask whether every rank has one",
    "NoneType": "a parameter that is not used, or frozen, has no gradient: its .grad is None",
}

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

# ---------------------------------------------------------------------- 17.3

SIZES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((4, 4, 1), (4,), (2, 1), (3, 3, 3, 1)),
    ((4, 2), (4, 2), (4, 2), (4, 2)),
    ((2,), (5, 1), (), (1, 1)),
)


class _Token:
    """Lives as long as the graph that it is in."""


class _Marked(torch.autograd.Function):
    """The identity; its node in the graph keeps a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
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
        self.seen: list[weakref.ref[_Token]] = []
        self.alive = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.alive = max(self.alive, sum(ref() is not None for ref in self.seen))
        token = _Token()
        self.seen.append(weakref.ref(token))
        hidden = _Marked.apply(self.dropout(self.weight * x).exp2(), token)
        return ((hidden - y) ** 2).mean()


def samples_of(rank: int, sizes: tuple[int, ...]) -> Batches:
    return [
        (torch.arange(size) / 4 + step / 8 + rank / 2, torch.full((size,), 3.0 * rank + step))
        for step, size in enumerate(sizes)
    ]


def check_evaluate(answer: Any, world: World) -> None:
    N = world.world_size
    for sizes in SIZES:
        sizes = sizes[:N]
        for training in (True, False):
            model = Judged().train(training)
            data = samples_of(world.rank, sizes[world.rank])
            when = "with batches of " + " and ".join(str(list(each)) for each in sizes) + " samples"
            with world.record() as calls, world.blamed(calls):
                got = answer.evaluate(model, iter(data))
            if got is None:
                raise Wrong(f"{when}: evaluate() returns None", forgot_to_return(None))
            if isinstance(got, Tensor):
                likely = "a tensor can carry a graph, and all activations with it: return a float, .item()"
                raise Wrong(f"{when}: evaluate() returns a tensor", likely)
            if not isinstance(got, float):
                raise Wrong(f"{when}: evaluate() returns a {type(got).__name__}", "return a float, .item()")
            if lost := world.unwaited(calls):
                raise Wrong(f"{when}: {lost}", f"a forgotten wait: {lost}")
            each = [[float(loss) for loss in _losses(r, sizes[r])] for r in range(N)]
            _compare_means(when, got, each, sizes, world)
            if model.alive > 1:
                seen = f"{when}: the activations of {model.alive} batches were alive at once"
                raise Wrong(seen, "a loss keeps its graph, and that its activations: .item(), or torch.no_grad()")
            if model.training != training:
                was = "training" if training else "evaluation"
                likely = f"the model was in {was} mode: leave it as you found it, `was = model.training`"
                raise Wrong(f"{when}: model.training is {model.training} afterwards", likely)
            if model.weight.grad is not None:
                raise Wrong(f"{when}: the parameters have gradients", "an evaluation calls no backward()")
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)
                raise Wrong(f"{when}: gradients are off afterwards", "use torch.no_grad() in a with statement")
            if len(calls) > 2:
                likely = "one all-reduce of two numbers is enough, after the loop: the sum, and how many samples"
                raise Wrong(f"{when}: {len(calls)} collectives", likely)


def _losses(rank: int, sizes: tuple[int, ...]) -> list[Tensor]:
    model = Judged().eval()
    with torch.no_grad():
        return [model(x, y) for x, y in samples_of(rank, sizes)]


def _compare_means(when: str, got: float, each: list[list[float]], sizes: Any, world: World) -> None:
    sums = [sum(loss * size for loss, size in zip(losses, many)) for losses, many in zip(each, sizes)]
    counts, batches, N = [sum(many) for many in sizes], [len(many) for many in sizes], len(sizes)
    want, r = sum(sums) / sum(counts), world.rank

    def means(total: list[float], many: list[int]) -> list[float]:
        return [one / count if count else 0.0 for one, count in zip(total, many)]

    plain = [sum(losses) for losses in each]
    known = {
        "batches of different sizes count alike: multiply each mean by its number of samples": sum(plain)
        / sum(batches),
        "nothing is reduced: that is this rank's own mean": means(sums, counts)[r],
        "nothing is reduced, and batches of different sizes count alike": means(plain, batches)[r],
        "the mean of the ranks' means: ranks with few samples weigh as much as those with many": sum(
            means(sums, counts)
        )
        / N,
        "the mean of the ranks' means, which are means of batches' means: weigh every sample alike": sum(
            means(plain, batches)
        )
        / N,
        "a sum of means, not divided": sum(means(sums, counts)),
        "a sum over samples, not divided by their number": sum(sums),
        "a sum over batches, not divided": sum(plain),
        "this rank's own sum, not divided, and not reduced": sums[r],
        "the sums were reduced, the numbers of samples were not": sum(sums) / counts[r] if counts[r] else 0.0,
        "divided by the number of ranks as well: the number of samples is enough": want / N,
        "the sum of all samples, divided by the number of batches": sum(sums) / sum(batches),
        "the sum of the batches' means, divided by the number of samples": sum(plain) / sum(counts),
    }

    def explain(_: Tensor) -> str:
        found = [text for text, value in known.items() if abs(value - got) < 1e-5 * max(1.0, abs(got))]
        return found[0] if found else "dropout is on, or a batch is missing: call model.eval() before the loop"

    one, other = torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)
    compare(f"{when}: the loss", one, other, explain, rtol=1e-5)


EVALUATE_ERRORS = {
    "division by zero": "a rank without batches has 0 samples: divide after the all-reduce, by everybody's number",
    "Integer division": BY_ZERO,
    "'int' object has no attribute": "a rank without batches never made a tensor: begin with torch.zeros(2)",
    "'float' object has no attribute": "a number is not a tensor: torch.tensor([total, count])",
    "local variable": "a rank without batches never came into the loop: set the variable before it",
    "a leaf Variable that requires grad": "a collective writes into its tensor: give it one without a graph",
    "must be a tensor": "a collective takes a tensor: torch.tensor([total, count])",
    "type torch.Tensor": "a collective takes a tensor: torch.tensor([total, count])",
    "has no len": "batches can be gone through once, and have no length: count them as they come",
}

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
    raise Todo("17.3")  # take this line out, and mend the patient
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

# ---------------------------------------------------------------------- 17.4

PLACES = (  # rank, local rank, world size, GPUs of the node
    (0, 0, 4, 4), (3, 3, 4, 4), (9, 1, 16, 8), (15, 7, 16, 8), (1, 1, 4, 0), (5, 1, 8, 4), (6, 2, 8, 0), (0, 0, 1, 1),
)  # fmt: skip


def check_place(answer: Any, world: World) -> None:
    for rank, local, size, gpus in PLACES:
        environment = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(size)}
        kept = dict(environment)
        when = f"RANK={rank} LOCAL_RANK={local} WORLD_SIZE={size}, {gpus} GPUs"
        with in_case(answer, when, "an error in the code, at the line shown", PLACE_ERRORS):
            got = answer.place(environment, gpus)
        if environment != kept:
            raise Wrong(f"{when}: the environment was changed", "read it, and leave it as it is")
        if not isinstance(got, dict):
            raise Wrong(f"{when}: place() returns a {type(got).__name__}", forgot_to_return(got) or "return a dict")
        want = {
            "rank": rank,
            "world_size": size,
            "device": f"cuda:{local}" if gpus else "cpu",
            "device_ids": [local] if gpus else None,
        }
        if set(got) != set(want):
            raise Wrong(f"{when}: the keys are {', '.join(map(str, got))}", f"there must be {', '.join(want)}")
        for key, value in want.items():
            mine = str(got[key]) if key == "device" else got[key]
            if isinstance(mine, tuple):
                mine = list(mine)
            if mine != value or isinstance(mine, bool) or isinstance(mine, str) != isinstance(value, str):
                raise Wrong(
                    f"{when}: {key} is {got[key]!r}, expected {value!r}", _why_there(key, mine, rank, size, gpus)
                )


def _why_there(key: str, got: Any, rank: int, size: int, gpus: int) -> str:
    if key in ("rank", "world_size"):
        if isinstance(got, str):
            return "the environment holds strings: int() them"
        if key == "rank" and got == size:
            return "ranks go from 0 to world_size - 1: no process would be rank 0, and nobody would open the port"
        if key == "rank":
            return "RANK is the number in the whole job, LOCAL_RANK the number on this node"
        return "WORLD_SIZE is the number of processes in the job: not this node's GPUs"
    if not gpus:
        return "without a GPU the device is cpu, and device_ids is None"
    if key == "device":
        if got in ("cuda", "cuda:0"):
            return "every process on a node would use cuda:0: one GPU for each, by its number on the node"
        if got == f"cuda:{rank}":
            return "the node has no such GPU: GPUs are counted on each node, so go by LOCAL_RANK"
        return "the device is cuda and LOCAL_RANK, as in cuda:1, where the node has GPUs"
    if isinstance(got, list) and len(got) > 1:
        return "device_ids can only name one GPU, this process's own"
    if isinstance(got, list) and got and isinstance(got[0], str):
        return "the environment holds strings: int() them"
    if got == [rank]:
        return "the node has no such GPU: GPUs are counted on each node, so go by LOCAL_RANK"
    if not isinstance(got, list):
        return "device_ids is a list with one number"
    return "this process's own GPU is meant, the one with the number LOCAL_RANK"


PLACE_ERRORS = {
    "KeyError": "the names are RANK, LOCAL_RANK and WORLD_SIZE, as torchrun sets them",
    "'str' object cannot be interpreted": "the environment holds strings: int() them",
    "not all arguments converted": "the environment holds strings: int() them before you calculate",
    "must be str, not int": "the environment holds strings: int() them",
    "not supported between instances": "the environment holds strings: int() them",
    "by zero": "there may be no GPU at all: then the device is cpu",
    "'RANK'": "the names are RANK, LOCAL_RANK and WORLD_SIZE; read them from `environment`",
}

PLACE_STUB = '''\
from zerolab.lab.exercises import Todo


def place(environment, gpus):
    """Who this process is, and which GPU it uses: a dict with rank, world_size, device and
    device_ids.

    environment: what torchrun sets, such as {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE":
    "16"}: the number in the job, the number on this node, how many in the job. gpus: of
    this node. 0: the device is "cpu", device_ids None.
    """
    raise Todo("17.4")  # take this line out, and mend the patients
    world_size = int(environment["WORLD_SIZE"])
    return {
        "rank": world_size,
        "world_size": world_size,
        "device": "cuda:0",
        "device_ids": list(range(gpus)),
    }
'''

PLACE = """\
def place(environment, gpus):
    local = int(environment["LOCAL_RANK"])
    return {
        "rank": int(environment["RANK"]),
        "world_size": int(environment["WORLD_SIZE"]),
        "device": f"cuda:{local}" if gpus else "cpu",
        "device_ids": [local] if gpus else None,
    }
"""

Check = Callable[[Any, World], None]

EXERCISES = [
    Exercise(
        id="17.1",
        title="stop together",
        difficulty=2,
        section="Write: stop together",
        check=check_uneven,
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
        errors=UNEVEN_ERRORS,
    ),
    Exercise(
        id="17.2",
        title="four faults at once",
        difficulty=1,
        section="Write: four faults at once",
        check=check_in_step,
        stub=TRAIN_STUB,
        reference=TRAIN,
        hints=(
            "Go by the fingerprints: parameters before the first step, gradients before the update, and "
            "parameters after it have to be the same on all ranks.",
            "dist.broadcast(param.data, src=0) for every parameter, the frozen ones too; the same lr on every rank; "
            "optimizer.zero_grad() in every step.",
            "After backward(), for every parameter with a gradient: dist.all_reduce(param.grad), then "
            "param.grad /= dist.get_world_size().",
        ),
        exports=("train",),
        errors=TRAIN_ERRORS,
    ),
    Exercise(
        id="17.3",
        title="a validation that forgets",
        difficulty=1,
        section="Write: a validation that forgets",
        check=check_evaluate,
        stub=EVALUATE_STUB,
        reference=EVALUATE,
        hints=(
            "A number has no graph: model(x, y).item(), inside `with torch.no_grad():`, which does not even build one.",
            "Add up model(x, y).item() * len(x) and len(x). A rank without batches has 0 of both.",
            "One all-reduce of torch.tensor([total, count]) after the loop, and then divide. Remember model.training "
            "before model.eval().",
        ),
        exports=("evaluate",),
        errors=EVALUATE_ERRORS,
    ),
    Exercise(
        id="17.4",
        title="who, and on which GPU",
        difficulty=1,
        section="Write: who, and on which GPU",
        check=check_place,
        stub=PLACE_STUB,
        reference=PLACE,
        hints=(
            "Ranks go from 0 to WORLD_SIZE - 1, over all nodes. GPUs are counted on each node, from 0.",
            'local = int(environment["LOCAL_RANK"]) is this process\'s GPU.',
            '"device": f"cuda:{local}" if gpus else "cpu", and device_ids is [local], or None without GPUs.',
        ),
        exports=("place",),
        errors=PLACE_ERRORS,
    ),
]
