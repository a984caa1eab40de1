"""The same numbers as one process: every case of `zerolab trial` that compares them, at every stage.

Bit for bit, unless the case says that a sum is in another order: `exact`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases_common import sharded
from reference import EACH, train_alone, train_sharded

import zerolab
from zerolab.trial.cases import CASES as ALL
from zerolab.trial.numbers import Numbers, alone, build
from zerolab.trial.zoo import CASES as MODELS
from zerolab.trial.zoo import Expert, Mixture, MixtureBlock

CASES = {  # of hybrid sharding test_mesh.py has its own
    name: case
    for name, case in ALL.items()
    if isinstance(case, Numbers) and type(case).run is Numbers.run and "mesh" not in case.needs
}


@pytest.mark.parametrize(("n", "precision"), EACH)
def test_every_stage_equals_one_process_bit_for_bit(ranks, n, precision):
    expected, expected_losses = ranks.run(train_alone, n, precision, 4, ranks=1)[0]
    for stage in range(4):
        results = ranks.run(train_sharded, stage, precision, 4, ranks=n)
        for rank, (state, losses) in enumerate(results):
            assert losses == [row[rank] for row in expected_losses]
            assert list(state) == list(expected)
            for name, value in expected.items():
                assert torch.equal(state[name], value), f"stage {stage}, rank {rank}, {name}"


# -- every model, and every use of it ---------------------------------------------------------------------------------


def in_stages(name: str, stages: tuple[int, ...]) -> dict[int, Any]:
    return {stage: sharded(CASES[name], stage) for stage in stages}


def one_process(name: str, sizes: tuple[int, ...]) -> Any:
    """For one of the world sizes: this rank does one of these computations, while the others do theirs."""
    return alone(CASES[name], sizes[torch.distributed.get_rank()])


def compare(case, expected, results, rank: int) -> None:
    state, losses = expected
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {"rtol": 1e-4, "atol": 1e-5}
    for stage, (got, got_losses) in results.items():
        assert list(got) == list(state), f"stage {stage}"
        for key, value in state.items():
            torch.testing.assert_close(got[key], value, **tolerance, msg=f"stage {stage}: {key} differs")
        if case.exact:
            assert got_losses == [row[rank] for row in losses], f"stage {stage}"


FIRST = {"plain", "tied across units", "mixture of experts", "LoRA on a frozen bf16 base"}
FIRST |= {
    "accumulate",
    "groups and a schedule",
    "odd shapes",
    "two backwards",
    "freezing and thawing",
    "unused",
    "checkpoint nested, reentrant",
}
LIKE_OTHERS = {"attention of linears", "weight norm, old", "raw branches", "output: slots", "output: dataclass"}
LIKE_OTHERS |= {"hugging face bert", "hugging face gpt2", "hugging face llama"}
LIKE_OTHERS |= {f"checkpoint {what}, reentrant" for what in ("inside", "several", "blocks")}
LIKE_OTHERS |= {f"checkpoint {what}, non-reentrant" for what in ("inside", "nested")}
LIKE_OTHERS |= CASES.keys() - MODELS.keys() - FIRST - {"accumulate, each reduced", "an error in backward"}


def case(name: str) -> Any:
    mark = pytest.mark.exhaustive if name in LIKE_OTHERS else pytest.mark.slow
    return pytest.param(name, marks=[mark] * (name not in FIRST))


@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_equals_one_process(ranks, name):
    """In every stage, or in stage 3 and another in turn."""
    stages = CASES[name].stages
    check_at(ranks, name, (3,), stages if name in FIRST else {stages[[*CASES].index(name) % len(stages)], stages[-1]})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_at_other_sizes(ranks, name):
    check_at(ranks, name, (1, 2, 3, 4) if CASES[name].every_size else (2, 3), CASES[name].stages)


def check_at(ranks, name: str, sizes: tuple[int, ...], stages: Iterable[int]) -> None:
    for n, expected in zip(sizes, ranks.run(one_process, name, sizes, ranks=len(sizes)), strict=True):
        for rank, results in enumerate(ranks.run(in_stages, name, tuple(stages), ranks=n)):
            compare(CASES[name], expected, results, rank)


def in_a_group() -> Any:
    case, rank = CASES["plain"], torch.distributed.get_rank()
    groups = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    results = {stage: sharded(case, stage, group=groups[rank % 2]) for stage in range(4)}
    return results, alone(case, 2)


def test_a_group_of_some_ranks(ranks):
    for rank, (results, expected) in enumerate(ranks.run(in_a_group, ranks=4)):
        compare(CASES["plain"], expected, results, rank // 2)


# -- experts as units: ranks that route differently -------------------------------------------------------------------


class ExpertUnits(Mixture):
    """The experts are units of their own. `agreed`: for so many steps all ranks choose the same ones."""

    def __init__(self, agreed: int = 0) -> None:
        super().__init__(units=(Expert, MixtureBlock))
        self.agreed = agreed

    def before(self, model, rank, step):
        super().before(model, 0 if step < self.agreed else rank, 0)


def with_expert_units() -> tuple[Any, list[Any]]:
    case = ExpertUnits()
    return [sharded(case, stage) for stage in (0, 1, 2)], alone(case, torch.distributed.get_world_size())


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_route_differently_are_right_in_stages_0_to_2(ranks, n):
    for rank, (results, expected) in enumerate(ranks.run(with_expert_units, ranks=n)):
        compare(ExpertUnits, expected, dict(enumerate(results)), rank)


def refusal(agreed: int) -> str:
    with pytest.raises(zerolab.CommError) as caught:
        sharded(ExpertUnits(agreed), 3)
    return str(caught.value)


@pytest.mark.parametrize("agreed", [0, 2])
def test_ranks_that_route_differently_are_refused_in_stage_3(ranks, agreed):
    """In the first pass, and in a later one; on every rank, by name, without waiting for a timeout."""
    for message in ranks.run(refusal, agreed, ranks=2):
        assert "failed: " not in message
        assert "experts." in message and "rank 0" in message and "rank 1" in message and "units=" in message


# -- torch's own as the oracle ----------------------------------------------------------------------------------------


def beside_torch(name: str) -> dict[str, dict[str, torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    case, results = CASES[name], {}

    def train(model, rank: int):
        optimizer = case.optimizer(model)
        for step in range(case.steps):
            case.loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    rank = torch.distributed.get_rank()
    for stage in range(4):
        results[f"stage {stage}"] = sharded(case, stage)[0]
    model = DistributedDataParallel(build(case))
    train(model, rank)
    results["DDP"] = model.module.state_dict()
    model = build(case)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(model, rank)
    results["FSDP2"] = {name: p.full_tensor() for name, p in model.state_dict().items()}
    return results


def test_equals_torch_ddp_and_fully_shard(ranks):
    for results in ranks.run(beside_torch, "plain", ranks=2):
        for stage in range(4):
            for theirs in ("DDP", "FSDP2"):
                for key, value in results[theirs].items():
                    torch.testing.assert_close(results[f"stage {stage}"][key], value, rtol=1e-4, atol=1e-6)
