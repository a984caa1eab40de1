"""What lesson 12 sends without collectives: to a main GPU, and to a parameter server that waits for nobody."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from zerolab.lab.lessons.lesson12.training import gradient_at
from zerolab.tasks.models import small_gpt


class Messages:
    """`dist.send` and `dist.recv`. `moved[kind]`: the bytes that this rank has sent and received."""

    def __init__(self) -> None:
        self.moved = {"gradients": 0, "parameters": 0}

    def send(self, tensor: Tensor, to: int, kind: str) -> None:
        self.moved[kind] += tensor.nbytes
        dist.send(tensor, to)

    def receive(self, tensor: Tensor, source: int, kind: str) -> Tensor:
        dist.recv(tensor, source)
        self.moved[kind] += tensor.nbytes
        return tensor


def asynchronous(slow: int | None = None, updates: int = 60, rate: float = 0.07) -> dict[str, Any] | None:
    """Rank 0 serves the small GPT's parameters, and all others are workers. slow: one that takes six times as long.

    Returns on rank 0 the mean age of the gradients, counted in updates; for each rank the ages of its gradients; and
    how many updates each has made. The last element of a message is the version of the parameters that it belongs to;
    in the server's reply, -1 says that it is over.
    """
    start = parameters_to_vector(small_gpt().parameters()).detach()
    found = None
    if dist.get_rank() == 0:
        ages, pushed = _serve(start, updates, rate)
        found = {"age": sum(map(sum, ages)) / updates, "ages": ages, "pushed": pushed}
    else:
        _work(start, 6 if dist.get_rank() == slow else 1)
    dist.barrier()
    return found


def _serve(weights: Tensor, updates: int, rate: float) -> tuple[list[list[int]], list[int]]:
    size = dist.get_world_size()
    message, ages, pushed, done = torch.empty(len(weights) + 1), [[] for _ in range(size)], [0] * size, 0  # type: ignore[var-annotated]
    for worker in range(1, size):
        dist.send(torch.cat([weights, torch.zeros(1)]), worker)
    busy = size - 1
    while busy:
        worker = dist.recv(message)  # from any
        ages[worker].append(done - int(message[-1]))
        if done < updates:
            weights -= rate * message[:-1]
            pushed[worker] += 1
            done += 1
        over = done == updates  # and what is still on its way comes too late
        busy -= over
        dist.send(torch.cat([weights, torch.tensor([-1.0 if over else done])]), worker)
    return ages, pushed


def _work(like: Tensor, times: int) -> None:
    message, step = torch.empty(len(like) + 1), 0
    dist.recv(message, 0)
    while message[-1] >= 0:
        for _ in range(times):
            grad = gradient_at(message[:-1], step)
        step += 1
        dist.send(torch.cat([grad, message[-1:]]), 0)
        dist.recv(message, 0)
