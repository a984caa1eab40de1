"""A small GPT, its data, a step on the ranks, and the one process that they must equal."""

from __future__ import annotations

import pytest
import torch
from jobs_common import Block, Net
from torch import Tensor

import zerolab
from zerolab import Precision

FIRST = ((2, "fp32"), (2, "bf16"), (4, "fp32"))
BF16 = Precision(torch.bfloat16)
# Numbers of ranks with precisions, to `parametrize` a test of (n, precision) with.
EACH = [
    pytest.param(n, precision, id=f"{n}-{name}", marks=[pytest.mark.exhaustive] * ((n, name) not in FIRST))
    for n in (1, 2, 3, 4)
    for name, precision in (("fp32", None), ("bf16", BF16))
]

VOCABULARY, WIDTH, DEPTH = 64, 32, 4


class Model(Net):
    def __init__(self) -> None:
        super().__init__(WIDTH, DEPTH, VOCABULARY)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def build(stage: int, precision: Precision | None = None, **options) -> tuple[zerolab.Engine, torch.optim.Optimizer]:
    torch.manual_seed(7 + torch.distributed.get_rank())  # the first rank's values count
    zero = zerolab.shard(Model(), stage, units=[Block], precision=precision, **options)
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-2)


def step(zero: zerolab.Engine, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss = zero.model(*batch(zero.rank, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_sharded(stage: int, precision: Precision | None, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    zero, optimizer = build(stage, precision)
    losses = [step(zero, optimizer, number).item() for number in range(steps)]
    return zero.full_state_dict(), losses


def train_alone(
    ranks: int, precision: Precision | None, steps: int, device: str = "cpu", eps: float = 1e-8
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """One process, no zerolab: the mean of the ranks' gradients, summed in rank order in float32, rounded once."""
    torch.manual_seed(7)
    model = Model().to(device)
    masters = [p.detach().clone() for p in model.parameters()]
    if precision:
        model = model.to(precision.compute)
    else:
        masters = [p.data for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, eps=eps)
    losses = []
    for number in range(steps):
        grads, row = [], []
        for rank in range(ranks):
            model.zero_grad()
            loss = model(*(tensor.to(device) for tensor in batch(rank, number)))
            loss.backward()
            row.append(loss.item())
            grads.append([p.grad for p in model.parameters()])
        losses.append(row)
        for master, own in zip(masters, zip(*grads, strict=True), strict=True):
            total = own[0].float()
            for grad in own[1:]:
                total = total + grad.float()
            master.grad = (total / ranks).to(own[0].dtype).float()
        optimizer.step()
        if precision:
            for param, master in zip(model.parameters(), masters, strict=True):
                param.data.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    return {name: master.cpu() for name, master in zip(names, masters, strict=True)}, losses
