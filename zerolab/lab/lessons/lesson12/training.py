"""What lesson 12 trains: one small GPT on one text, whose gradients or parameters travel in another form."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zerolab import Zero1, to_local
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block, small_gpt

RATE = 0.05


class Compressor(Protocol):
    def mean(self, grad: Tensor) -> Tensor:
        """The mean of all ranks' gradients, flat: (Ψ,) -> (Ψ,)."""


def micro_batch(who: int, step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    """What rank `who` trains on in `step`: windows of 64 bytes."""
    return batch(_words(), who, step, samples, 64)


@cache
def _words() -> Tensor:
    return text()


def gradient_on_text(model: nn.Module, step: int, who: int | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of a micro-batch of 256 tokens, flat: (Ψ,), and the loss. who: the rank whose it is, if another."""
    model.zero_grad()
    loss = model(*micro_batch(dist.get_rank() if who is None else who, step))
    loss.backward()
    return torch.cat([_grad(param).flatten() for param in model.parameters()]), loss.detach()


def gradient_at(weights: Tensor, step: int, who: int | None = None) -> Tensor:
    """The gradient of the small GPT with these weights: (Ψ,) -> (Ψ,)."""
    vector_to_parameters(weights.clone(), _model().parameters())
    return gradient_on_text(_model(), step, who)[0]


def loss_on_other_text(weights: Tensor) -> float:
    """The loss of the small GPT with these weights on 32 samples that it has not seen."""
    vector_to_parameters(weights.clone(), _model().parameters())
    with torch.no_grad():
        return float(_model()(*micro_batch(9, 9999, 32)))


@cache
def _model() -> GPT:
    return small_gpt()


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def train_compressed(compressor: Compressor, steps: int = 50) -> dict[str, Any]:
    """SGD with momentum, gradients averaged by `compressor`.

    Returns the loss at the end; the bytes that a rank sends in a step; this rank's last gradient; and of the last 20
    pairs of successive gradients on this rank the cosine, and the length of the difference over that of the gradient.
    """
    model = small_gpt()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, products, last = [], [], None
    for step in range(steps):
        grad, loss = gradient_on_text(model, step)
        if last is not None:
            change = grad - last
            products.append(torch.stack([grad @ grad, grad @ last, change @ change]))
        last = grad
        with calls() as book:
            mean = compressor.mean(grad)
        vector_to_parameters(mean, [_grad(param) for param in model.parameters()])
        sgd.step()
        losses.append(loss)
    square, product, square_of_change = torch.stack(products[-20:]).sum(dim=0).tolist()
    found = {"loss": _end_of(losses), "sent": book.sent, "grad": last}
    return found | {"cosine": product / square, "difference": (square_of_change / square) ** 0.5}


def train_with_hook(hook: Callable[..., Any], state: Any = None, steps: int = 50) -> dict[str, float]:
    """The same with torch's DDP and a communication hook. state: the hook's, of PowerSGD."""
    ddp = DistributedDataParallel(small_gpt())
    ddp.register_comm_hook(state, hook)
    sgd = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(steps):
        before = state.total_numel_after_compression if state else 0
        sgd.zero_grad()
        loss = ddp(*micro_batch(dist.get_rank(), step))
        with calls() as book:
            loss.backward()
        sgd.step()
        losses.append(loss.detach())
    sent = book.sent
    if state:  # PowerSGD sends from callbacks, which `calls` does not see, but counts
        size = dist.get_world_size()
        sent = 2 * (size - 1) / size * 4 * (state.total_numel_after_compression - before)
    return {"loss": _end_of(losses), "sent": sent}


def _end_of(losses: list[Tensor]) -> float:
    """The mean of the last five, over all ranks."""
    end = torch.stack(losses[-5:]).mean()
    dist.all_reduce(end)
    return end.item() / dist.get_world_size()


def zero1_step() -> tuple[Tensor, dict[str, int]]:
    """ZeRO-1 with SGD: the parameters after one step (Ψ,), and the bytes that a rank sends and receives in a later one,
    by what they are.
    """
    zero = Zero1(small_gpt(), units=[Block])
    sgd = torch.optim.SGD(zero.model.parameters(), lr=RATE)

    def step() -> None:
        zero.model.zero_grad()
        zero.model(*micro_batch(dist.get_rank(), 0)).backward()
        sgd.step()

    step()
    with zero.full_parameters():
        exact = parameters_to_vector(zero.model.parameters()).detach().clone()
    step()
    with ledger(zero) as book:  # forward gathers what the step before has updated
        step()
    moved = {"gradients": 0, "parameters": 0}
    for call in book.calls:
        if not call.control:  # a rank of a ring receives as much as it sends
            moved["gradients" if call.op == "reduce_scatter" else "parameters"] += 2 * call.sent
    return exact, moved


def train_in_stage(stage: Callable[..., Any], steps: int = 15, **options: Any) -> dict[str, Any]:
    """AdamW around `stage`, with its `options`.

    Returns the loss at the end; the bytes that a rank sends in a step, by operation and, with a mesh, link; this rank's
    slices of the first step's mean gradients; the elements of its shards, and the blocks of 64 that they make.
    """
    zero = stage(small_gpt(), units=[Block], **options)
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    losses, first = [], torch.empty(0)
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            loss = zero.model(*micro_batch(dist.get_rank(), step))
            loss.backward()
            adam.step()
        losses.append(loss.detach())
        if step == 0:
            first = torch.cat([to_local(param.grad).flatten() for param in zero.model.parameters()])
    sent: dict[str, int] = {}
    for call in book.calls:
        if not call.control:
            name = f"{call.op} {call.link}".rstrip()
            sent[name] = sent.get(name, 0) + call.sent
    shard = sum(unit.master.numel() for unit in zero.units)
    blocks = sum(-(-unit.layout.shard_size // 64) for unit in zero.units)  # rounded up
    return {"loss": _end_of(losses), "sent": sent, "grad": first, "shard": shard, "blocks": blocks}
