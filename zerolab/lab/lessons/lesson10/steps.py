"""What lesson 10 trains: blocks that are run by a function, and a sharded model whose update lies with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from zerolab.lab.lessons.lesson10.host import HostLink

Part = Callable[..., Any]


class RunBy(nn.Module):
    """`block` as a part of a model that calls run(block, x) in its place."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], block: nn.Module) -> None:
        super().__init__()
        self.run, self.block = run, block

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


class OnDevice:
    """An optimizer of 10.2's shape that keeps its masters beside the shard, and uses no link."""

    def __init__(self, shard: Tensor, make_optimizer: Callable[[list[Tensor]], Optimizer], link: HostLink) -> None:
        self.shard, self.master = shard, shard.float()
        self.optimizer = make_optimizer([self.master])

    def receive(self, start: int, grad: Tensor) -> None:
        self.master.grad = grad.float()

    def step(self) -> None:
        self.optimizer.step()
        self.shard.copy_(self.master)


def train_sharded(
    model: nn.Module,
    optimizer: Callable[..., Any],
    samples: Sequence[tuple[Tensor, Tensor]],
    flat_buffer: Part,
    reduce_scatter_mean: Part,
) -> tuple[list[float], Tensor, float]:
    """ZeRO-1 in bfloat16, a step for each of this rank's `samples`. Returns the losses, the parameters and the bytes
    that crossed the link in a step.

    optimizer: HostOptimizer or OnDevice. flat_buffer and reduce_scatter_mean: exercises 02.1 and 04.1.
    """
    rank, size, link = dist.get_rank(), dist.get_world_size(), HostLink()
    params = list(model.bfloat16().parameters())
    flat, views = flat_buffer(params, size)
    for param, view in zip(params, views, strict=True):
        param.data = view
    shard = flat.view(size, -1)[rank]
    updates = optimizer(shard, lambda masters: AdamW(masters, lr=1e-3), link)
    losses, before = [], link.down + link.up
    for sample in samples:
        loss = model(*sample)
        loss.backward()
        grads = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
        updates.receive(0, reduce_scatter_mean(grads, rank, size))
        updates.step()
        dist.all_gather(list(flat.chunk(size)), shard.clone())
        model.zero_grad()
        losses.append(loss.item())
    return losses, flat, (link.down + link.up - before) / len(samples)
