"""What lesson 11 finds in files: whose tensors, how many bytes of state, and the shards that ranks have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import zerolab
from zerolab import Zero3, to_local
from zerolab.engine.unit import Unit
from zerolab.lab.lessons.lesson11.run import small_run

Plan = Callable[[list[tuple[str, int]], int, int, int], list[tuple[str, int, int, int]]]
KINDS = ("parameters", "exp_avg", "exp_avg_sq")


def whose_tensors(path: str) -> str:
    """A digit for each tensor of a file: the rank that it is filled with."""
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception as error:
        return f"cannot be read: {type(error).__name__}"
    return "".join(str(int(tensor[0])) for tensor in loaded.values())


def state_bytes_in(folder: Path) -> int:
    """The bytes of all tensors of a checkpoint's files, but for the states of random number generators."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys() if not name.startswith("rank"))  # noqa: SIM118
    return total


def pieces_of(folder: Path, name: str) -> list[str]:
    """Which elements of a parameter are in which file, as a checkpoint's manifest has it."""
    content = json.loads((folder / "manifest.json").read_text())["content"]
    return [
        f"{name}: elements {piece['start']} to {piece['stop']} are in {piece['file']}"
        for piece in content["pieces"][f"parameters/{name}"]
    ]


def reads_needed(files: Sequence[tuple[str, int]], numel: int, ranks: int) -> int:
    """How many reads `ranks` ranks need for a unit of `numel` elements. files: names and lengths of the old shards."""
    shard, begin, ends = -(-numel // ranks), 0, set()
    for _, length in files:
        begin += length
        ends.add(min(begin, numel))
    ends |= {min(shard * (rank + 1), numel) for rank in range(ranks)}
    return len(ends - {0})  # a read ends where a shard ends, old or new


def save_shards(path: str, zero: Zero3, adam: torch.optim.Optimizer) -> None:
    """This rank's shard of every unit, in three tensors: "parameters/NAME", "exp_avg/NAME", "exp_avg_sq/NAME"."""
    shards = {}
    for unit in zero.units:
        for kind in KINDS:
            flat = shards[f"{kind}/{unit.name}"] = torch.zeros(unit.layout.shard_size)
            for place, tensor in zip(unit.layout.slices(flat, zero.rank), _slices(unit, adam, kind), strict=True):
                place.copy_(tensor)
    save_file(shards, path)


def in_shards(saved: str, folder: str) -> list[str]:
    """Write what zerolab.save has written into `saved` with `save_shards` instead: a file in `folder` for each rank.

    All ranks call this. Returns the names of all files, in rank order.
    """
    files = [f"{folder}/rank-{rank}.safetensors" for rank in range(dist.get_world_size())]
    run = small_run()
    zerolab.load(saved, *run)
    save_shards(files[dist.get_rank()], *run)
    dist.barrier()
    return files


@torch.no_grad()
def load_shards(plan_reads: Plan, zero: Zero3, adam: torch.optim.Optimizer, files: Sequence[str], step: int) -> int:
    """Load what `save_shards` of step `step` wrote, on any number of ranks. Returns the bytes that this rank has read.

    plan_reads: exercise 11.1. files: one for each rank that saved, in rank order.
    """
    read = 0
    for unit in zero.units:
        numel = unit.layout.slots[-1].end  # without padding
        plan = plan_reads(_lengths(files, unit), numel, zero.world_size, zero.rank)
        for param in unit.params:  # Adam's state of a parameter, to be filled
            empty = {kind: torch.empty_like(to_local(param)) for kind in KINDS[1:]}
            adam.state[param] = {"step": torch.tensor(float(step))} | empty
        for kind in KINDS:
            flat = torch.zeros(unit.layout.shard_size)  # this rank's new shard
            for name, start, stop, at in plan:
                with safe_open(name, framework="pt") as file:
                    part = file.get_slice(f"{kind}/{unit.name}")[start:stop]
                flat[at : at + stop - start] = part
                read += part.nbytes
            for place, part in zip(_slices(unit, adam, kind), unit.layout.slices(flat, zero.rank), strict=True):
                place.copy_(part)
    return read


def _lengths(files: Sequence[str], unit: Unit) -> list[tuple[str, int]]:
    """Of the unit's shard in each file."""
    found = []
    for name in files:
        with safe_open(name, framework="pt") as file:
            found.append((name, file.get_slice(f"parameters/{unit.name}").get_shape()[0]))
    return found


def _slices(unit: Unit, adam: torch.optim.Optimizer, kind: str) -> list[Tensor]:
    """This rank's slice of each parameter, or of its average."""
    if kind == "parameters":
        return [to_local(param).detach() for param in unit.params]
    return [to_local(adam.state[param][kind]) for param in unit.params]
