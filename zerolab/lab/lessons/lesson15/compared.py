"""What lesson 15 compares: a training step in numbers, and a shard with one process's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zerolab import to_local
from zerolab.lab.activations import saved
from zerolab.lab.lessons.lesson15.pipeline import Pipeline
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger, model_states


def step_in_numbers(
    model: nn.Module,
    adam: torch.optim.Optimizer,
    step: Callable[[], Any],
    zero: Any = None,
    pipe: Pipeline | None = None,
) -> dict[str, float]:
    """One step of a rank: bytes of model states, of activations kept at most, and sent; FLOP; parameters updated.

    step: forward and backward. zero: the engine around `model`, if there is one; pipe: the pipeline.
    """
    step()  # the first step creates Adam's state
    adam.step()
    adam.zero_grad()
    flop = FlopCounterMode(display=False)
    with saved(model) as kept, ledger(zero) if zero else calls() as book, flop:
        step()
        states = sum(model_states(zero, adam).values()) if zero else _held(model, adam)
        adam.step()
    return {
        "states": states,
        "kept": kept.peak,
        "sent": pipe.sent if pipe else book.moved if zero else book.sent,
        "flop": flop.get_total_flops(),
        "updated": sum(to_local(param).numel() for param in adam.param_groups[0]["params"]),
    }


def _held(model: nn.Module, adam: torch.optim.Optimizer) -> int:
    kept = [t for param in model.parameters() for t in (param, param.grad, *adam.state[param].values())]
    return sum(t.nbytes for t in kept if t is not None)


def own_elements(unit: Any, rank: int, model: nn.Module) -> Tensor:
    """Of the gradients in `model`, which has no engine, the elements that are `rank`'s shard of `unit`."""
    flat = torch.zeros(unit.layout.size)
    for view, name in zip(unit.layout.views(flat), unit.names, strict=True):
        view.copy_(model.get_parameter(name).grad)
    pieces = unit.layout.slices(unit.layout.shard(flat, rank), rank)
    return torch.cat([piece.flatten() for piece in pieces])
