"""What lesson 24 compares local steps with, the mean of gradients in every step, and by what: bytes, seconds, loss."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.ranks.counting import calls
from zerolab.tasks.data import batch


def average_gradients(model: nn.Module) -> None:
    """The mean over all ranks, in one all-reduce."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad) / dist.get_world_size())


def fastest(exchange: Callable[[], None], tries: int = 3) -> float:
    """Seconds that `exchange` takes, the fastest of some tries."""
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def sent_by(exchange: Callable[[], None]) -> float:
    """Bytes that this rank sends in `exchange`, when its collectives run as rings."""
    with calls() as book:
        exchange()
    return book.sent


@torch.no_grad()
def validation_loss(model: nn.Module, words: Tensor) -> float:
    """The loss on windows that no rank trains on, the same for whoever asks."""
    losses = [model(*batch(words, 9, 9_990 + i, 32, 64)) for i in range(2)]
    return torch.stack(losses).mean().item()
