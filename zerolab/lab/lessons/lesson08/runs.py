"""What lesson 08 measures with: gradients of both kinds, a run with or without a scaler, bytes held and sent, peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from zerolab.engine.engine import Engine
from zerolab.lab.plots.losses import curves
from zerolab.lab.ranks.counting import calls
from zerolab.measure.allocations import timeline
from zerolab.measure.formulas import state_bytes

Sample = tuple[Tensor, Tensor]


def both_kinds_of_gradients(model: nn.Module, sample: Sample) -> dict[str, list[Tensor]]:
    """One backward: the gradients of the weights, and those of the activations, which each layer hands to the one
    before it."""
    carried: list[Tensor] = []

    def keep(_: nn.Module, into: Any, out: Any) -> None:
        carried.append(out[0])

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_full_backward_hook(keep)
    model(*sample).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return {"gradients": grads, "activations": carried}


def unmoved_by_a_step(zero: Engine, optimizer: Optimizer, sample: Sample) -> float:
    """Percentage of all ranks' masters that a step leaves exactly as they were."""
    params = [*zero.model.parameters()]
    before = [param.detach().clone() for param in params]
    zero.model(*sample).backward()
    optimizer.step()
    same = sum(int((old == new).sum()) for old, new in zip(before, params, strict=True))
    count = torch.tensor([same, sum(old.numel() for old in before)])
    dist.all_reduce(count)
    return 100 * count[0].item() / count[1].item()


@dataclass
class Run:
    """scales: before each step, and after the last. weights: after the last, by name."""

    losses: list[float]
    scales: list[float]
    weights: dict[str, Tensor]

    def equals(self, other: Run) -> bool:
        """The same scales, and the same weights to the bit."""
        pairs = zip(self.weights.values(), other.weights.values(), strict=True)
        return self.scales == other.scales and all(torch.equal(a, b) for a, b in pairs)


def train_with(scaler: Any, zero: Engine, samples: Iterable[Sample]) -> Run:
    """A step for each of `samples`, clipped. scaler: None, or what the loop of "All or none" calls."""
    adam, losses, scales = AdamW(zero.model.parameters(), lr=1e-3), [], []
    for sample in samples:
        loss = zero.model(*sample)
        if scaler is None:
            loss.backward()
            zero.clip_grad_norm_(1.0)
            adam.step()
        else:
            scales.append(scaler.scale(torch.ones(())).item())
            scaler.scale(loss).backward()
            scaler.unscale_(adam)
            zero.clip_grad_norm_(1.0)
            scaler.step(adam)
            scaler.update()
        adam.zero_grad()
        losses.append(loss.item())
    if scaler is not None:
        scales.append(scaler.scale(torch.ones(())).item())
    return Run(losses, scales, zero.full_state_dict())


def scale_by_step(scales: Sequence[Sequence[float]]) -> tuple[Figure, str]:
    """The picture of `Run.scales` of every rank."""
    powers = {f"rank {rank}": [log2(scale) for scale in of_rank] for rank, of_rank in enumerate(scales)}
    first = powers["rank 0"]
    assert all(of_rank == first for of_rank in powers.values()), "the ranks' scales differ"
    skipped = [after < before for before, after in pairwise(first)]
    sentence = (
        f"The scale falls from 2^{first[0]:.0f} to 2^{min(first):.0f} and ends at 2^{first[-1]:.0f}, the same on every "
        f"rank. {sum(skipped)} of {len(skipped)} steps were skipped by all, {sum(skipped[:-1])} before the last."
    )
    title, subtitle = "The loss scale finds its place", f"fp16, stage 2, {len(powers)} ranks"
    return curves(powers, title, subtitle, "power of two", sentence)


class Held(NamedTuple):
    """Bytes on this rank after a backward, and bytes that it sent."""

    parameters: int
    gradients: int
    sent: float


def held_and_sent(model: nn.Module, sample: Sample, autocast: bool = False) -> Held:
    """One forward and backward of a model of torch's DDP or FSDP2. autocast: forward under autocast to bfloat16."""
    with calls() as book:
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = model(*sample)
        loss.backward()
    params = [*model.parameters()]
    grads = [param.grad for param in params if param.grad is not None]
    return Held(_bytes(params), _bytes(grads), book.sent)


def _bytes(tensors: Iterable[Any]) -> int:
    """What this rank has of them."""
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)


def beyond_formula(zero: Engine, held: dict[str, int], psi: int) -> dict[str, int]:
    """By category, the bytes of `held` that the formula for Ψ parameters does not have."""
    formula = state_bytes(zero.stage, zero.world_size, psi, zero.precision)
    return {kind: held[kind] - formula[kind] for kind in formula}


class Peak(NamedTuple):
    """MB at a step's peak, and in which phase that is; the most MB of activations."""

    peak: float
    phase: str
    acts: float


def peak_of_step(zero: Engine, sample: Sample) -> Peak:
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step() -> None:
        zero.model(*sample).backward()
        adam.step()
        adam.zero_grad()

    step()  # creates the optimizer's state
    with timeline(zero, adam) as line:
        step()
    phase = line.events[line.peak_moment - 1].phase
    return Peak(line.peak / 1e6, phase, max(line.curve("activations")) / 1e6)
