"""What lesson 15 compares: a training step in numbers, and three ways to cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zerolab import to_local
from zerolab.lab.activations import saved
from zerolab.lab.lessons.lesson15.pipeline import Pipeline
from zerolab.lab.plots.cuts import Area
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
    watch: Any = ledger(zero) if zero else calls()
    with saved(model) as kept, watch as book, flop:
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


def most_on_a_rank(rows: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each way's `step_in_numbers`, one of each rank, the largest of each number; prints them as a table."""
    largest = {way: {key: max(of[way][key] for of in rows) for key in rows[0][way]} for way in rows[0]}
    print("the most on a rank: model states   activations  bytes sent  MFLOP   parameters updated")
    for way, of in largest.items():
        print(f"{way:18}{of['states']:>14,}{of['kept']:>14,}{of['sent']:>12,.0f}", end="")
        print(f"{of['flop'] / 1e6:>7,.0f}{of['updated']:>21,}")
    return largest


def _held(model: nn.Module, adam: torch.optim.Optimizer) -> int:
    kept = [t for param in model.parameters() for t in (param, param.grad, *adam.state[param].values())]
    return sum(t.nbytes for t in kept if t is not None)


def three_ways(size: int, message: int) -> dict[str, list[Area]]:
    """For a picture: which rank computes what of `size` layers, in three ways. message: bytes of a layer's output."""
    ranks, full = range(size), (0.0, 1.0)
    parts = [(rank / size, (rank + 1) / size) for rank in ranks]
    reduced = 2 * (size - 1) * message // size  # as a ring
    return {
        "samples": [Area(rank, layer, parts[rank], full) for rank in ranks for layer in ranks],
        "each layer": [
            Area(rank, layer, full, parts[rank], reduced * (layer > 0)) for rank in ranks for layer in ranks
        ],
        "layers": [Area(rank, rank, full, full, message * (rank > 0)) for rank in ranks],
    }
