"""torch.distributed.checkpoint, as docs/using.md says: a model between zerolab and FSDP2, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs_common import worlds
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zerolab

SAVE, LOAD = (
    part.strip()
    for part in (Path(__file__).parents[2] / "docs" / "using.md")
    .read_text()
    .partition("import torch.distributed.checkpoint as dcp\n")[2]
    .partition("```")[0]
    .strip()
    .split("\n\n")
)


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def ours(code: str, stage: int, seed: int, folder: str) -> dict[str, Tensor]:
    zero = zerolab.shard(built(seed), stage, units=[nn.Linear])
    exec(code, {"dcp": dcp, "zero": zero, "folder": folder})
    return zero.full_state_dict()


def fsdp2(save: bool, seed: int, folder: str) -> dict[str, Tensor]:
    model = built(seed)
    fully_shard(model)
    state = {"model": state_dict.get_model_state_dict(model)}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        state_dict.set_model_state_dict(model, state["model"])
    now = state_dict.get_model_state_dict(model)
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in now.items()}


def alone(seed: int, folder: str) -> dict[str, Tensor]:
    model = built(seed)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return model.state_dict()


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in range(3))])
def test_a_model_goes_there_and_back(ranks: Any, tmp_path: Path, stage: int) -> None:
    wanted = built(1).state_dict()
    for folder, steps in {
        "there": [(3, ours, SAVE, stage, 1), (2, fsdp2, False, 2), (1, alone, 2)],
        "back": [(3, fsdp2, True, 1), (2, ours, LOAD, stage, 2)],
        "home": [(2, ours, SAVE, stage, 1), (3, ours, LOAD, 3 - stage, 2)],
    }.items():
        for n, job, *given in steps:
            for got in ranks.run(job, *given, str(tmp_path / folder), ranks=n):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def asked_for_states(stage: int) -> list[str]:
    model = built(1)
    zerolab.shard(model, stage)
    kinds = [torch.optim.AdamW(model.parameters()), zerolab.OwnerOptimizer(model.parameters(), torch.optim.AdamW)]
    said = []
    for optimizer in kinds:
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        for options in (None, state_dict.StateDictOptions(full_state_dict=True)):
            try:
                state_dict.get_optimizer_state_dict(model, optimizer, options=options)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("n", worlds(2, others=(3,)))
def test_states_of_slices_are_refused(ranks: Any, n: int) -> None:
    for stage in (1, 2, 3):
        for rank, said in enumerate(ranks.run(asked_for_states, stage, ranks=n)):
            for one in said:
                assert f"rank {rank}: torch.distributed.checkpoint would take what" in one
