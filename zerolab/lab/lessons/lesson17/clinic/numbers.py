"""Patients that run to the end, and whose numbers are wrong."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.held import fingerprint
from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.lab.ranks.counting import calls
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT

_SHORT = timedelta(seconds=10)


def _gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(layers=1, width=32)


def _row(step: int, loss: Tensor, grads: list[Tensor], model: nn.Module, sent: float) -> None:
    weights = fingerprint(model.parameters())
    print(f"step {step}: loss {loss:.4f}  gradients {fingerprint(grads)}  parameters {weights}  sent {sent:,.0f} bytes")


def _before(model: nn.Module) -> None:
    """The line that stands above the rows."""
    print(f"before:                                   parameters {fingerprint(model.parameters())}")


def _grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


# -- 4 ---------------------------------------------------------------------------------------------------------------


def build(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    if rank == 0:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _two_rates(rank: int, world_size: int) -> None:
    model, words = _gpt(), text()
    sgd = build(model, rank)
    for step in range(2):
        sgd.zero_grad()
        with calls() as book:
            loss = model(*batch(words, rank, step, 4, 32))
            loss.backward()
            for grad in _grads(model):
                dist.all_reduce(grad)
                grad /= world_size
        grads = [grad.clone() for grad in _grads(model)]
        if step == 0:
            _before(model)
        sgd.step()
        _row(step, loss.detach(), grads, model, book.sent)


TWO_RATES = Patient(
    4,
    "Gradients are reduced. Yet a checkpoint of rank 0 scores differently from one of rank 1.",
    (build,),
    _two_rates,
    {
        "a": "The optimizers are not set up alike: on rank 0 one gradient makes another update.",
        "b": "Rank 0 is not in the reduction: it updates with a gradient that the others do not have.",
        "c": "Rank 0 began with other weights than its peers: that difference stays through the steps.",
        "d": "Rank 0 adds up in another order than its peers: rounding errors grow from step to step.",
    },
    "a",
    "Three fingerprints a step find the place: parameters before, gradients after the reduction, parameters after"
    " the update. The first that differs names the part. Here it is the update: rank 0 has another learning rate."
    " Look for `if rank == 0` around anything that changes the model.",
)

# -- 5 ---------------------------------------------------------------------------------------------------------------


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)


def _scale(rank: int, world_size: int) -> list[float]:
    words, norms = text(), []
    groups = {n: dist.new_group(list(range(n)), timeout=_SHORT) for n in (1, 2, 4) if n <= world_size}
    for n, group in groups.items():
        if rank >= n:
            continue
        model = _gpt()
        loss = model(*batch(words, 0, 0, 8, 32))  # the same batch on every rank: so the mean is the same for every N
        loss.backward()
        with calls() as book:
            reduce_gradients(model, group)
        norm = torch.cat([grad.flatten() for grad in _grads(model)]).norm().item()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.optim.Adam(model.parameters(), lr=1e-3).step()
        moved = (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm().item()
        norms.append(norm)
        marks: list[str] = [""] * n
        dist.all_gather_object(marks, fingerprint(model.parameters()), group=group)
        if rank == 0:
            print(f"{n} rank{'s' * (n > 1)}: loss {loss.item():.4f}  gradient norm {norm:.3f}  Adam moved {moved:.4f}")
        if rank == 0 and n == world_size:
            print(f"each of the {n} sent {book.sent:,.0f} bytes  parameters the same on all: {len(set(marks)) == 1}")
    for group in groups.values():
        dist.destroy_process_group(group)
    return norms


SCALE = Patient(
    5,
    "It trains well on one GPU. On four the loss explodes with SGD; with Adam nobody noticed anything.",
    (reduce_gradients,),
    _scale,
    {
        "a": "The learning rate is too large for this model: plain SGD diverges there before Adam does.",
        "b": "The loss is summed over samples and not averaged: it grows with the size of the batch.",
        "c": "The gradients are added up over the ranks and not averaged: each rank more makes them larger.",
        "d": "The gradients go through the reduction twice: once in backward, and then in a loop of its own.",
    },
    "c",
    "With the same batch on every rank, the mean gradient is the same for every N. So the norm should not change,"
    " and it doubles with N: summed, not averaged. SGD takes steps N times as long. Adam divides by the "
    "gradient's own size and moves as far as before, which hides the mistake until somebody adds clipping. Test "
    "with N = 1 and N = 2, on the same batch.",
)

PATIENTS = (TWO_RATES, SCALE)
