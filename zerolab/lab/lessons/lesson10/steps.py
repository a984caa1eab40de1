"""What lesson 10 trains and measures: blocks that are run by a function, a step's allocations and weights, where model
states are, and a sharded model whose update lies with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from zerolab.engine.engine import Engine
from zerolab.lab.lessons.lesson10.host import HostLink
from zerolab.measure.allocations import Timeline, timeline
from zerolab.measure.states import model_states

Part = Callable[..., Any]
Sample = tuple[Tensor, Tensor]


class RunBy(nn.Module):
    """`block` as a part of a model that calls run(block, x) in its place."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], block: nn.Module) -> None:
        super().__init__()
        self.run, self.block = run, block

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


def with_blocks_run_by(run: Callable[[nn.Module, Tensor], Tensor] | None, model: Any) -> Any:
    """`model`, whose blocks are called by run(block, x). None: as they are."""
    if run is not None:
        model.blocks = nn.ModuleList(RunBy(run, block) for block in model.blocks)
    return model


def second_step(zero: Engine, sample: Callable[[int], Sample]) -> tuple[Timeline, float, dict[str, Tensor]]:
    """Trains on sample(0) and sample(1). Of the second step: what was allocated, the loss, and the weights after it."""
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step(number: int) -> float:
        loss = zero.model(*sample(number))
        loss.backward()
        adam.step()
        adam.zero_grad()
        return float(loss.item())

    step(0)  # creates the optimizer's state
    with timeline(zero, adam) as line:
        loss = step(1)
    return line, loss, zero.full_state_dict()


def left_by_forward(line: Timeline) -> int:
    """Bytes of activations when the step's forward returns."""
    moment = next(i for i, event in enumerate(line.events) if i >= line.before and event.phase == "backward")
    return line.by_kind(moment)["activations"]


def bit_for_bit(first: Sequence[Any], *others: Sequence[Any]) -> bool:
    """Each is a loss and the weights by name: whether all are the same as the first, whatever the names are."""
    loss, weights = first
    return all(
        other == loss and all(map(torch.equal, theirs.values(), weights.values())) and len(theirs) == len(weights)
        for other, theirs in others
    )


def held_on_device_and_host(zero: Engine, samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    """Bytes of model states in either place, by kind, when the backward of the last sample returns."""
    adam, held = AdamW(zero.model.parameters(), lr=1e-3), {}
    for sample in samples:
        adam.zero_grad()
        zero.model(*sample).backward()
        held = {"device": model_states(zero, adam, on="device"), "host": model_states(zero, adam, on="host")}
        adam.step()
    return held


def lines_of_places(places: Mapping[str, Mapping[str, Mapping[str, int]]], psi: int) -> str:
    """A line for each run, of what is on the device and on the host: bytes, and multiples of Ψ."""
    lines = []
    for name, held in places.items():
        device, host = (sum(held[where].values()) for where in ("device", "host"))
        lines.append(
            f"{name:16} device {device:>9,} bytes = {device / psi:.2f} Ψ   host {host:>9,} bytes = {host / psi:.2f} Ψ"
        )
    return "\n".join(lines)


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


def on_device_and_host(
    make_model: Callable[[], nn.Module],
    optimizer: Callable[..., Any],
    samples: Sequence[tuple[Tensor, Tensor]],
    *parts: Part,
) -> tuple[bool, float]:
    """`train_sharded` with OnDevice, and with `optimizer`, a HostOptimizer.

    Returns whether losses and parameters are the same, bit for bit, and the bytes that crossed the link in a step.
    """
    on_device = train_sharded(make_model(), OnDevice, samples, *parts)
    on_host = train_sharded(make_model(), optimizer, samples, *parts)
    return on_device[0] == on_host[0] and torch.equal(on_device[1], on_host[1]), on_host[2]
