"""A patient rebuilt from a bug report of 2026: what was broken in a library, in a few lines, on four ranks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.lessons.lesson17.clinic.patient import Patient, fingerprint
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT


def _mean_of_gradients(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


# -- 9 ---------------------------------------------------------------------------------------------------------------


def save(path: Path, model: nn.Module, adam: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "adam": adam.state_dict(), "step": step, "random": torch.get_rng_state()}
    if dist.get_rank() == 0:  # replicas: the others hold the same
        torch.save(state, path)
    dist.barrier()


def load(path: Path, model: nn.Module, adam: torch.optim.Optimizer) -> int:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    torch.set_rng_state(state["random"])
    return state["step"]


class _Dropping(GPT):
    """A GPT with dropout after each block. It counts what was dropped."""

    dropped = 0

    def __init__(self) -> None:
        super().__init__(layers=1, width=32)
        for block in self.blocks:
            block.register_forward_hook(self._drop)

    def _drop(self, block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept = nn.functional.dropout(output, 0.1, self.training)
        self.dropped = int((kept == 0).sum())
        return kept


def _resumed(rank: int, world_size: int) -> None:
    words, place = text(), [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(place)
    path = Path(place[0]) / "checkpoint.pt"

    def begin() -> tuple[_Dropping, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Dropping()
        torch.manual_seed(1 + rank)  # every rank drops something else
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step_of(model: _Dropping, adam: torch.optim.Optimizer, step: int) -> str:
        x, y = batch(words, rank, step, 8, 32)
        state = fingerprint(moment for one in adam.state.values() for moment in (one["exp_avg"], one["exp_avg_sq"]))
        said = f"batch {fingerprint([x, y])}  parameters {fingerprint(model.parameters())}  Adam's state {state}"
        with torch.no_grad():
            evaluated = model.eval()(x, y)
        loss = model.train()(x, y)
        adam.zero_grad()
        loss.backward()
        _mean_of_gradients(model)
        adam.step()
        return f"{said}  loss {evaluated:.4f}, with dropout {loss:.4f} ({model.dropped} dropped)"

    model, adam = begin()
    for step in range(2):
        step_of(model, adam, step)
    save(path, model, adam, 2)
    print("went on:", step_of(model, adam, 2))
    model, adam = begin()
    print("resumed:", step_of(model, adam, load(path, model, adam)))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0])


RANDOM = Patient(
    9,
    "A run that was resumed from its checkpoint does not repeat the run that was never stopped. Here is the first step "
    "after the checkpoint, in both.",
    (save, load),
    _resumed,
    {
        "a": "The loader begins anew: after the checkpoint the ranks learn from the first batches again.",
        "b": "Adam's state is not restored: its averages begin with zeros, and its first steps are too long.",
        "c": "No random state is restored: every rank begins again with the numbers of its own seed.",
        "d": "All ranks go on with rank 0's random state: it was taken for something that they share.",
    },
    "d",
    "Rank 0 repeats its step to the last digit, so a random state was restored. The others have their batch, the "
    "parameters, Adam's state, and the loss without dropout. Only what dropout draws is not theirs: all drop as many "
    "elements as rank 0. One copy is enough of what is the same on all ranks. Random states differ, and so do places "
    "in the data: each rank needs its own. (The report counts 252 of 256 ranks that had another rank's.)",
    source='NVIDIA/Megatron-LM#6858, August 2026: "fix: restore each rank\'s own RNG state on checkpoint load"\n'
    "https://github.com/NVIDIA/Megatron-LM/pull/6858",
)

PATIENTS = (RANDOM,)
