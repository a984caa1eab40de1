"""Micro-batches: with and without no_sync, added in float32, and with activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import worlds
from reference import BF16
from torch import Tensor, optim

import zerolab
from zerolab import Precision
from zerolab.trial.numbers import Block, build
from zerolab.trial.zoo import CASES, Checkpointed


def accumulate(precision: zerolab.Precision | None) -> list[Any]:
    """Micro-batches with and without no_sync, and zero_grad in the middle of an accumulation."""
    case, results = CASES["plain"], []
    for stage in range(4):
        for set_to_none in (True, False):
            zero = zerolab.shard(build(case), stage, units=case.units, precision=precision)
            optimizer = case.optimizer(zero.model)
            for step in range(3):
                with zero.no_sync():
                    case.loss(zero.model, zero.rank, 100 + step).backward()  # thrown away
                    optimizer.zero_grad(set_to_none)
                    case.loss(zero.model, zero.rank, 3 * step).backward()
                    with zero.comm.record() as calls:
                        case.loss(zero.model, zero.rank, 3 * step + 1).backward()
                    assert not [call for call in calls if call.op != "all_gather"]
                    assert stage == 3 or not calls
                with pytest.raises(RuntimeError, match="no_sync"):
                    optimizer.step()
                case.loss(zero.model, zero.rank, 3 * step + 2).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            results.append(zero.full_state_dict())
    return results


def accumulate_alone(ranks: int) -> dict[str, torch.Tensor]:
    case = CASES["plain"]
    model = build(case)
    optimizer = case.optimizer(model)
    for step in range(3):
        model.zero_grad()
        for rank in range(ranks):
            for micro in range(3):
                (case.loss(model, rank, 3 * step + micro) / ranks).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.slow
def test_accumulation_under_no_sync(ranks, n):
    expected = ranks.run(accumulate_alone, n, ranks=1)[0]
    for results in ranks.run(accumulate, None, ranks=n):
        for got in results:
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-5)
        assert all(torch.equal(got[key], results[0][key]) for got in results for key in got), "stages differ"


# -- in bf16 ----------------------------------------------------------------------------------------------------------


PLAIN = CASES["plain"]


def micro_batches(synchronised: bool) -> tuple[list[Any], Any]:
    """Three micro-batches in bf16. Added up in float32; each contribution rounded to bf16 once, and so is each mean."""
    results, size = [], torch.distributed.get_world_size()
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block], precision=Precision())
        before = zero.full_state_dict()
        optimizer = optim.SGD(zero.model.parameters(), lr=1.0)
        for micro in range(3):
            zero._backward.sync = synchronised or micro == 2
            PLAIN.loss(zero.model, zero.rank, micro).backward()
        optimizer.step()
        results.append({key: value - before[key] for key, value in zero.full_state_dict().items()})
    model = build(PLAIN).to(torch.bfloat16)
    grads: dict[int, list[Any]] = {}
    for rank in range(size):
        for micro in range(3):
            model.zero_grad()
            PLAIN.loss(model, rank, micro).backward()
            grads.setdefault(rank, []).append({name: p.grad.float() for name, p in model.named_parameters()})
    expected = {}
    for name, param in build(PLAIN).named_parameters():
        if synchronised:
            means = [sum(grads[r][m][name] for r in range(size)) / size for m in range(3)]
            total = sum(mean.to(torch.bfloat16).float() for mean in means)
        else:
            sums = [sum(micro[name] for micro in grads[r]).to(torch.bfloat16).float() for r in range(size)]
            total = (sum(sums) / size).to(torch.bfloat16).float()
        expected[name] = (param.detach() - total) - param.detach()
    return results, expected


@pytest.mark.parametrize("synchronised", [False, True])
def test_micro_batches_are_added_in_float32(ranks, synchronised):
    for results, expected in ranks.run(micro_batches, synchronised, ranks=3):
        for result in results:
            for name, value in expected.items():
                assert torch.equal(result[name], value), name


def recomputed(precision: zerolab.Precision) -> list[list[dict[str, Tensor]]]:
    """Blocks in no checkpoint, in a re-entrant one and in the other, with micro-batches kept back."""
    cases = [PLAIN, Checkpointed(True, "blocks"), Checkpointed(False, "blocks")]
    results = []
    for stage in range(4):
        states = []
        for case in cases:
            zero = zerolab.shard(build(case), stage, units=[Block], precision=precision)
            optimizer = case.optimizer(zero.model)
            for step in range(3):
                with zero.no_sync():
                    case.loss(zero.model, zero.rank, 2 * step).backward()
                case.loss(zero.model, zero.rank, 2 * step + 1).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
            states.append(zero.full_state_dict())
        results.append(states)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(3, others=(1,)))
def test_recomputed_in_bf16_with_micro_batches_kept_back(ranks, n):
    """Both kinds of activation checkpointing change no bit, and no stage differs from another."""
    for results in ranks.run(recomputed, BF16, ranks=n):
        expected = results[0][0]
        assert any(not torch.equal(expected[name], value) for name, value in build(PLAIN).state_dict().items())
        for stage, states in enumerate(results):
            for state in states:
                assert all(torch.equal(state[name], value) for name, value in expected.items()), f"stage {stage}"
