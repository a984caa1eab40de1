"""Cases about bytes: what a rank holds, at its most and between, and what it sends, against the formulas.

Each is measured on two models, of 3 and of 8 blocks, and the difference counts. What does not grow with the model
(buffers of a fixed size, the root, padding) cancels out; what grows is compared with the formula for the five blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.measure import moved_bytes, state_bytes
from zerolab.measure.heap import Highest, in_use
from zerolab.measure.sent import Sent
from zerolab.trial.case import Adapter, Broken, Case, Unsupported
from zerolab.trial.numbers import WORDS, Block, Stack, words

FEW, MANY = 3, 8
WIDE = 256
ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, "


class Wide(Stack):
    def __init__(self, blocks: int) -> None:
        super().__init__(lambda: Block(WIDE), blocks)
        self.emb, self.norm = nn.Embedding(WORDS, WIDE), nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, WORDS)


def loss_of(model: Any, step: int) -> Tensor:
    tokens = words(dist.get_rank(), step, 2, 8)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def parameters_between() -> int:
    """Of the blocks that one model has more than the other."""
    return (MANY - FEW) * sum(p.numel() for p in Block(WIDE).parameters())


class Bytes(Case):
    """The base of cases that compare bytes."""

    family = "bytes held and sent"
    needs = frozenset({"bytes"})
    over = 1.03  # the steps of Adam and padding are not in the formulas

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        for _ in range(2):  # a table of Python's that grows meanwhile takes up to megabytes, and takes them once
            over, what = self.attempt(make)
            everyone = [False] * dist.get_world_size()
            dist.all_gather_object(everyone, over <= 0)
            if all(everyone):
                break
        if over > 0:
            raise Broken(f"rank {dist.get_rank()}: {what}")
        return what

    def attempt(self, make: Callable[[], Adapter]) -> tuple[float, str]:
        """Bytes above what is allowed, and what was seen."""
        stage = make().stage
        assert stage is not None
        self.measure(make, FEW)  # what is made once, at first use, is made now
        few, many = (self.measure(make, blocks) for blocks in (FEW, MANY))
        allowed, formula = self.allowed(stage, dist.get_world_size(), parameters_between())
        what = f"five blocks of {parameters_between() // (MANY - FEW):,} parameters: {many - few:,.0f} bytes"
        over = many - few - (allowed * self.over + 2**14)
        times = f"{(many - few) / max(allowed, 1):.2f} times {formula}"
        return over, f"{what}, {times}" if over > 0 else f"{what}; {formula} is {allowed:,.0f}"

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        raise NotImplementedError

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        """Bytes, and the formula in words."""
        raise NotImplementedError


def wrapped(make: Callable[[], Adapter], blocks: int) -> Adapter:
    torch.manual_seed(0)
    adapter = make()
    adapter.wrap(Wide(blocks), (Block,), lambda model: torch.optim.Adam(model.parameters(), lr=1e-3))
    return adapter


def steps(adapter: Adapter, numbers: range) -> None:
    for step in numbers:
        adapter.backward(loss_of(adapter.model, step))
        adapter.step()


def now() -> int:
    """Bytes in use, of what is still wanted."""
    gc.collect()
    held = in_use()
    if held is None:
        raise Unsupported("this system's malloc does not say what is in use")
    return held


STATES = ("4Ψ + 4Ψ + 8Ψ", "4Ψ + 4Ψ + 8Ψ/N", "4Ψ + 4Ψ/N + 8Ψ/N", "4Ψ/N + 4Ψ/N + 8Ψ/N")


class HeldAfterBackward(Bytes):
    """When backward returns, a rank holds what its stage says: parameters, gradients, optimizer state."""

    source = ZERO + "section 5; Figure 1"

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        before = now()
        adapter = wrapped(make, blocks)
        steps(adapter, range(2))
        adapter.backward(loss_of(adapter.model, 2))
        return now() - before

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        return sum(state_bytes(stage, ranks, parameters).values()), STATES[stage]


class HeldBetweenSteps(HeldAfterBackward):
    """Between steps, when gradients are gone or may be, a rank holds no more than when backward had returned."""

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        before = now()
        adapter = wrapped(make, blocks)
        steps(adapter, range(3))
        return now() - before


class HeldAfterForward(Bytes):
    """After a forward without gradients, a rank of stage 3 holds no gathered parameters."""

    source = ZERO + "section 5.3: parameters are discarded once they have been used"

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        adapter = wrapped(make, blocks)
        steps(adapter, range(2))
        before = now()
        with torch.no_grad():
            loss_of(adapter.model, 2)
        return now() - before

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        return (4 * parameters, "4Ψ, gathered") if stage == 2 else (0, "nothing")


class Growth(Bytes):
    """A rank holds no more after nine steps than after three."""

    source = ZERO + "Figure 1: a number of the model and of the ranks, and not of the step"

    def attempt(self, make: Callable[[], Adapter]) -> tuple[float, str]:
        adapter = wrapped(make, MANY)
        steps(adapter, range(3))
        three = now()
        steps(adapter, range(3, 9))
        grown = now() - three
        return grown - 2**16, f"{max(0, grown):,} bytes more"  # a model's shard is ten times that


class Peak(Bytes):
    """At its most, a step holds the stage's states and activations; what is gathered or waits is a few units', not
    the model's."""

    source = ZERO + "section 5; Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2.1"
    over = 1.05

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        before = now()
        adapter = wrapped(make, blocks)
        steps(adapter, range(2))
        with Highest() as highest:
            steps(adapter, range(2, 3))
        return highest.bytes - before

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        def alone(blocks: int) -> float:
            model = Wide(blocks)
            before = now()
            with Highest() as highest:
                loss_of(model, 0).backward()
            return highest.bytes - before

        activations = max(0.0, alone(MANY) - alone(FEW) - 4 * parameters)
        return sum(state_bytes(stage, ranks, parameters).values()) + activations, STATES[stage] + " + activations"


def total(sent: Sent) -> float:
    if sent.bytes is None:
        raise Broken("it sends by a collective whose bytes nobody can tell")
    return sent.bytes


MOVED = ("2Ψ(N-1)/N elements", "2Ψ(N-1)/N elements", "2Ψ(N-1)/N elements", "3Ψ(N-1)/N elements")


class Moved(Bytes):
    """In a step a rank sends what its stage says."""

    source = ZERO + "section 7"
    over = 1.02

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        adapter = wrapped(make, blocks)
        for step in range(2):
            with Sent() as sent:
                adapter.backward(loss_of(adapter.model, step))
                adapter.step()
        return total(sent)

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        return moved_bytes(stage, ranks, parameters), MOVED[stage]


class MovedByAccumulation(Bytes):
    """Gradients of micro-batches that the script adds up travel once in a step."""

    needs = frozenset({"bytes", "accumulate"})
    source = "torch.nn.parallel.DistributedDataParallel.no_sync; FSDPModule.set_requires_gradient_sync"
    over = 1.02

    def measure(self, make: Callable[[], Adapter], blocks: int) -> float:
        adapter = wrapped(make, blocks)
        for step in range(2):
            with Sent() as sent:
                for batch in range(2):
                    with adapter.accumulate():
                        adapter.backward(loss_of(adapter.model, 3 * step + batch))
                adapter.backward(loss_of(adapter.model, 3 * step + 2))
                adapter.step()
        total(sent)
        return sum(call.sent for call in sent.calls if call.op in Sent.REDUCING)

    def allowed(self, stage: int, ranks: int, parameters: int) -> tuple[float, str]:
        share = 4 * parameters * (ranks - 1) / ranks
        return (2 * share, "2Ψ(N-1)/N elements") if stage < 2 else (share, "Ψ(N-1)/N elements")


class Order(Case):
    """Every rank issues the same collectives in the same order, whatever its batch was."""

    family = "bytes held and sent"
    source = "torch.distributed: all ranks must call collectives in the same order"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        adapter = wrapped(make, FEW)
        with Sent() as sent:
            for step in range(3):
                tokens = words(dist.get_rank(), step, 1 + dist.get_rank(), 3 + dist.get_rank())  # other shapes
                adapter.backward(F.cross_entropy(adapter.model(tokens).flatten(0, 1), tokens.flatten()))
                adapter.step()
        mine = [(call.op, 0 if "alltoall" in call.op else call.payload) for call in sent.calls]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                number = next((n for n, pair in enumerate(zip(theirs, everyone[0])) if pair[0] != pair[1]), len(theirs))
                raise Broken(f"collective {number} of rank {rank} is not that of rank 0")
        return f"{len(mine)} collectives"
