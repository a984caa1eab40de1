"""What lesson 15 compares: a training step in numbers, and three ways to cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zerolab
from zerolab import to_local
from zerolab.lab.activations import saved
from zerolab.lab.held import held_by
from zerolab.lab.lessons.lesson15.pipeline import Pipeline
from zerolab.lab.lessons.lesson15.stages import gpt_pipeline
from zerolab.lab.plots.cuts import Area
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger, model_states
from zerolab.tasks.models import GPT, Block


def run_way(
    way: str,
    model: GPT,
    samples: tuple[Tensor, Tensor],
    split: Callable[[GPT, Any], GPT],
    schedule: type[Pipeline],
) -> dict[str, float]:
    """The second step with AdamW of all ranks together on `samples`, inputs and targets, in numbers of this rank.

    way: "one process", which every rank is for itself, "DDP", "ZeRO-3", "tensor" or "pipeline". split(model, group)
    divides the model's blocks; schedule is the pipeline's, with a micro-batch for each sample and a block on each rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    zero, pipe = None, None
    trained: nn.Module = model
    mine = samples if way in ("one process", "tensor") else tuple(part.chunk(size)[rank] for part in samples)
    if way in ("DDP", "ZeRO-3"):
        zero = (zerolab.DDP if way == "DDP" else zerolab.Zero3)(model, units=[Block])
    elif way == "tensor":
        trained = split(model, dist.group.WORLD)
    elif way == "pipeline":
        pipe = gpt_pipeline(schedule, model, samples, rank, micro_batches=len(samples[0]))
        trained = pipe.stage
    adam = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    step = pipe.run if pipe else lambda: trained(*mine).backward()
    return step_in_numbers(trained, adam, step, zero, pipe)


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
        states = sum((model_states(zero, adam) if zero else held_by(model, adam)).values())
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


@torch.no_grad()
def computed_in_three_ways() -> bool:
    """Run an MLP for each rank one after the other in three ways; whether each gives this rank what all on one do.

    By samples, each rank takes a part of the batch. By layers cut, a part of each layer's hidden units, added up by an
    all-reduce. By layers, one MLP, whose output it sends to the next rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks: Any = GPT(layers=size, width=64).blocks
    mlps = [block.mlp for block in blocks]
    x = torch.randn(2 * size, 64)  # the same on all ranks

    whole, by_samples, by_units = x, x.chunk(size)[rank], x
    for mlp in mlps:
        whole = whole + mlp(whole)
        by_samples = by_samples + mlp(by_samples)
        up, bias = mlp.up.weight.chunk(size)[rank], mlp.up.bias.chunk(size)[rank]
        part = F.linear(F.gelu(F.linear(by_units, up, bias)), mlp.down.weight.chunk(size, dim=1)[rank])
        dist.all_reduce(part)
        by_units = by_units + part + mlp.down.bias

    by_layers = x.clone()
    if rank > 0:
        dist.recv(by_layers, rank - 1)
    by_layers = by_layers + mlps[rank](by_layers)
    if rank < size - 1:
        dist.send(by_layers, rank + 1)
    same = torch.allclose(by_samples, whole.chunk(size)[rank], atol=1e-6) and torch.allclose(by_units, whole, atol=1e-6)
    return same and (rank < size - 1 or torch.allclose(by_layers, whole, atol=1e-6))


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
