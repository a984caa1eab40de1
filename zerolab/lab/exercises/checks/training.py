"""Training with everything in it that an answer may have forgotten, compared with what one process computes.

Odd shapes, so that shards cut through parameters, with gaps between them, empty slices, a unit of one element, a frozen
and an unused parameter; with and without a root unit; two forwards before their backwards; micro-batches under
no_sync; gradients set to zero in place; float32, float64 and bfloat16; a group that is not the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.comm.waiting import CommError
from zerolab.engine.engine import Engine
from zerolab.engine.precision import Precision
from zerolab.engine.slices import to_local
from zerolab.lab.exercises.checks.values import in_case, storages_in
from zerolab.lab.exercises.exercise import World, Wrong
from zerolab.lab.exercises.spy import GaveUp

ODD = "shards cut through parameters, with gaps in between, and some slices are empty: unit.layout knows the places"
DTYPE = (
    "right in float32 only: take dtypes from unit.full and unit.bucket.full, and cast unit.master to unit.full.dtype"
)
NO_ROOT = "self.root is a list, and it is empty if every parameter is in a block: ask `unit in self.root`"
MICRO = "what no_sync() kept back is part of the gradient, and nothing may be kept from the step before"
GROUP = "self.rank, self.world_size and self.comm are those of the ranks that share this model, not of all processes"
THEIR_CALLS = "{}() talks to all processes, and only some of them share this model: pass group=self.comm.group"
THEIR_NUMBERS = "all processes are counted by {}, and only some of them share this model: self.rank, self.world_size"
A_FEW = 16  # bytes: a counter or two
KEPT = "memory that stays for nothing: what a method needs while it runs goes into a local name"
TWICE = "something was kept from the first forward or its backward: the second found it instead of its own"


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)  # 9 elements, a gap, 3 elements, a gap
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale + self.frozen


class Tiny(nn.Module):
    """A unit of one element, of which most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class OddModel(nn.Module):
    def __init__(self, root: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3) if root else nn.Identity()
        self.blocks = nn.ModuleList([OddBlock(), Tiny(), OddBlock()])
        self.last = nn.Linear(3, 2, bias=False) if root else nn.Identity()
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(((7 * torch.arange(param.numel()) + i) % 5 - 1.5).view(param.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True)
class Case:
    """One training. `steps`: how each of them runs; see `_backwards`."""

    name: str
    steps: tuple[str, ...]
    likely: dict[str, str]  # how a step runs -> what is behind a difference in it
    root: bool = True
    dtype: torch.dtype = torch.float32
    precision: Precision | None = None
    rate: float = 2.0**-5
    tolerance: float = 1e-5
    set_to_none: bool = True
    world_sizes: tuple[int, ...] = (2, 3, 4)  # with one rank, so that a larger mistake is told first, none
    pairs: bool = False  # ranks 0 and 1 train one model, ranks 2 and 3 another


CASES = (
    Case("with odd shapes", ("plain", "two forwards"), {"plain": ODD, "two forwards": TWICE}),
    Case(
        "in float64", ("no_sync", "no_sync"), {"no_sync": MICRO}, dtype=torch.float64, set_to_none=False,
        tolerance=1e-12,
        world_sizes=(2, 4),
    ),
    Case(
        "in bfloat16, without a root unit", ("plain", "plain"), {"plain": DTYPE}, False, precision=Precision(),
        tolerance=0.03, rate=2.0**-4, world_sizes=(3,),
    ),
)  # fmt: skip
PAIRS = Case("in two groups of two ranks", ("plain",), {"plain": GROUP}, world_sizes=(4,), pairs=True)
IN_WORDS = {
    "plain": "",
    "two forwards": ", of two forwards and then two backwards",
    "no_sync": ", whose first micro-batch is under no_sync()",
}


def check_cases(
    answer: Any, cls: type[Engine], world: World, errors: dict[str, str], likely: dict[str, str] | None = None
) -> None:
    """Raises Wrong unless `cls` trains as one process does. likely: how a step runs -> this exercise's own words."""
    for case in CASES:
        if world.world_size in case.world_sizes:
            _check_case(answer, cls, world, case, errors, case.likely | (likely or {}))
    check_pairs(answer, cls, world, errors)


def check_pairs(answer: Any, cls: type[Engine], world: World, errors: dict[str, str]) -> None:
    """Raises Wrong unless ranks 0 and 1 train one model, and ranks 2 and 3 another.

    Of an answer that is right where all ranks train one model, it says what it asked or told all of them.
    """
    if world.world_size not in PAIRS.world_sizes:
        return
    world.spy.asked.clear()
    with world.record() as calls:
        try:
            _check_case(answer, cls, world, PAIRS, errors, PAIRS.likely)
        except (Wrong, CommError, GaveUp) as error:
            seen, likely = str(error).splitlines()[0], error.likely if isinstance(error, Wrong) else GROUP
            if ops := dict.fromkeys(f"dist.{call.op}" for call in calls if call.on_world):
                likely = THEIR_CALLS.format(" and ".join(ops))
            elif world.spy.asked:
                likely = THEIR_NUMBERS.format(" and ".join(sorted(world.spy.asked)))
            when = "" if isinstance(error, Wrong) else f"training {PAIRS.name}: "
            raise Wrong(f"{when}{seen}", likely) from None


def _check_case(
    answer: Any, cls: type[Engine], world: World, case: Case, errors: dict[str, str], likely: dict[str, str]
) -> None:
    errors = {"dtype": DTYPE, "scalar type": DTYPE, "does not cast": DTYPE} | errors
    group, ranks = None, list(range(world.world_size))
    if case.pairs:
        pairs = [ranks[:2], ranks[2:]]
        groups = [dist.new_group(pair) for pair in pairs]
        group, ranks = groups[world.rank // 2], pairs[world.rank // 2]
    rank = ranks.index(world.rank)
    alone = OddModel(case.root).to(case.dtype)
    optimizer_alone = SGD(alone.parameters(), lr=case.rate, momentum=0.5)
    first = DTYPE if case.dtype == torch.float64 else likely[case.steps[0]]
    with in_case(answer, f"training {case.name}", NO_ROOT if not case.root else first, errors):
        zero = cls(OddModel(case.root).to(case.dtype), units=[OddBlock, Tiny], group=group, precision=case.precision)
        optimizer = SGD(zero.model.parameters(), lr=case.rate, momentum=0.5)
    for unit in zero.units:
        if unit.master.dtype != unit.dtypes.master:
            wide = f"the optimizer updates {unit.dtypes.master} here, whatever forward computes in: keep its dtype"
            raise Wrong(f"training {case.name}: unit.master is {unit.master.dtype}", wide)
    for step, how in enumerate(case.steps):
        when = f"training {case.name}, step {step + 1}{IN_WORDS[how]}"
        why = likely[how]
        with in_case(answer, when, why, errors):
            outputs = _backwards(zero, how, inputs(world.rank, step, case.dtype))
            kept = kept_elsewhere(answer, zero)
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.set_to_none)
            with torch.no_grad():
                outputs.append(zero.model(inputs(world.rank, step, case.dtype)[0]))
        theirs = [inputs(each, step, case.dtype) for each in ranks]
        losses = [(alone(x) ** 2).sum() / len(ranks) for xs in theirs for x in xs[: 1 if how == "plain" else 2]]
        with torch.no_grad():
            wanted = [alone(x) for x in theirs[rank]][: 1 if how == "plain" else 2]
        sum(losses).backward()
        optimizer_alone.step()
        optimizer_alone.zero_grad()
        with torch.no_grad():
            wanted.append(alone(theirs[rank][0]))
        names = ["the output", "the output after the step"] if how == "plain" else ["the first output", "the second"]
        for name, got, want in zip([*names, "the output after the step"], outputs, wanted):
            _compare(f"{when}: {name}", got, want, case, why)
        full = dict(alone.named_parameters())
        for unit in zero.units:
            flat = torch.zeros(unit.layout.size, dtype=case.dtype)
            for view, name in zip(unit.layout.views(flat), unit.names, strict=True):
                view.copy_(full[name].detach())
            shard = unit.layout.shard(flat, rank)
            slices = unit.layout.slices(shard, rank) if cls.stage else unit.layout.views(flat)
            for name, got, want in zip(unit.names, unit.params, slices, strict=True):
                _compare(f"{when}: this rank's slice of {name}", to_local(got), want, case, why)
    if kept:
        raise Wrong(f"training {case.name}: when backward returns, {kept}", KEPT)


def kept_elsewhere(answer: Any, zero: Engine) -> str:
    """Which name of the answer's own, on self, on a unit or in its file, holds more than a few bytes; or nothing."""
    places = [("self.{}", vars(zero)), *((f"unit.{{}} of {unit.name}", vars(unit)) for unit in zero.units)]
    places += [(f"{cls.__name__}.{{}}", vars(cls)) for cls in type(zero).__mro__] + [("{}", vars(answer))]
    theirs = storages_in([[unit.full, unit.shard, unit.master, unit.bucket.grad] for unit in zero.units])
    known = {storage._cdata for storage in theirs}
    for called, names in places:
        for name, value in names.items():
            held = sum(storage.nbytes() for storage in storages_in(value) if storage._cdata not in known)
            if held > A_FEW:
                return f"{called.format(name)} holds {held} bytes"
    return ""


def inputs(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Two micro-batches."""
    x = torch.tensor([[1.0, -0.5, 2.0], [0.5 + rank, 1.0, -1.0 - rank]], dtype=dtype) / 2
    return [x + step / 8, 0.5 - x]


def _backwards(zero: Any, how: str, batches: list[Tensor]) -> list[Tensor]:
    """Forward and backward of one step, and the outputs."""
    if how == "plain":
        outputs = [zero.model(batches[0])]
        (outputs[0] ** 2).sum().backward()
    elif how == "two forwards":
        outputs = [zero.model(x) for x in batches]
        for output in outputs:
            (output**2).sum().backward()
    else:
        with zero.no_sync():
            outputs = [zero.model(batches[0])]
            (outputs[0] ** 2).sum().backward()
        outputs.append(zero.model(batches[1]))
        (outputs[1] ** 2).sum().backward()
    return [output.detach() for output in outputs]


def _compare(what: str, got: Tensor, want: Tensor, case: Case, likely: str) -> None:
    difference = (got.double() - want.double()).abs()
    allowed = case.tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    if bool((difference <= allowed).all()):
        return
    if case.dtype == torch.float64 and bool((difference <= 1e-5 * allowed / case.tolerance).all()):
        raise Wrong(f"{what} has the precision of float32 only", DTYPE)
    worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
    seen = f"{what} is {got.flatten()[worst]:g}, expected {want.flatten()[worst]:g}"
    raise Wrong(seen, likely, values_differ=True)
