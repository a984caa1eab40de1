"""What lesson 03 measures with: one process that does the work of four ranks, the seconds of a call, the bytes held."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.held import held_by
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT

Sample = tuple[Tensor, Tensor]


def train_alone(gradients: Callable[[nn.Module, list[Sample]], None], ranks: int = 4, steps: int = 10) -> list[Tensor]:
    """The weights of the lesson's GPT after `steps`, trained in this process on the batches of all `ranks`.

    gradients(model, batches) leaves in the model the gradients of a step.
    """
    words = text()
    torch.manual_seed(0)
    model = GPT(layers=2, width=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, [batch(words, rank, step, 4, 64) for rank in range(ranks)])
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def in_one_piece(model: nn.Module, batches: Sequence[Sample]) -> None:
    """One backward, for all sequences at once."""
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    model(x, y).backward()


def batch_by_batch(model: nn.Module, batches: Sequence[Sample]) -> None:
    """A backward for each batch, whose gradients add up in order; then their mean."""
    for x, y in batches:
        model(x, y).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= len(batches)


def largest_difference(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """Of any element of these tensors from the same element of those."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def seconds(function: Callable[..., Any], *args: Any, times: int = 3) -> float:
    """How long `function(*args)` takes on this rank, when all ranks begin together: the median of `times` calls."""
    found = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        function(*args)
        found.append(time.perf_counter() - begin)
    return median(found)


def held_after_step(model: nn.Module, sample: Sample) -> int:
    """The bytes of parameters, gradients and optimizer state after a step of AdamW."""
    adam = torch.optim.AdamW(model.parameters())
    model(*sample).backward()
    adam.step()
    return sum(held_by(model, adam).values())
