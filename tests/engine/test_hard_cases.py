"""Every model and use of the zoo, at every stage, against one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from zoo import CASES, Expert, Mixture, MixtureBlock, alone, build, sharded

import zerolab


def all_stages(name: str) -> dict[int, Any]:
    return {stage: sharded(CASES[name], stage) for stage in CASES[name].stages}


def one_process(name: str, ranks: int) -> Any:
    return alone(CASES[name], ranks)


def compare(case, expected, results, rank: int) -> None:
    state, losses = expected
    tolerance = {"rtol": 0, "atol": 0} if case.exact else {"rtol": 1e-4, "atol": 1e-5}
    for stage, (got, got_losses) in results.items():
        assert list(got) == list(state), f"stage {stage}"
        for key, value in state.items():
            torch.testing.assert_close(got[key], value, **tolerance, msg=f"stage {stage}: {key} differs")
        if case.exact:
            assert got_losses == [row[rank] for row in losses], f"stage {stage}"


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(ranks, name):
    for n in (1, 2, 3, 4) if CASES[name].every_size else (2, 3):
        expected = ranks.run(one_process, name, n, ranks=1)[0]
        for rank, results in enumerate(ranks.run(all_stages, name, ranks=n, timeout=60, group_timeout=20)):
            compare(CASES[name], expected, results, rank)


# -- experts as units: ranks that route differently -----------------------------------------------------------------


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


def refusal(agreed: int) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(zerolab.CommError) as caught:
        sharded(ExpertUnits(agreed), 3)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("agreed", [0, 2])
def test_ranks_that_route_differently_are_refused_in_stage_3(ranks, agreed):
    """In the first pass, and in a later one; in seconds, on every rank, by name."""
    for message, seconds in ranks.run(refusal, agreed, ranks=2, timeout=60, group_timeout=40):
        assert seconds < 15
        assert "experts." in message and "rank 0" in message and "rank 1" in message and "units=" in message


# -- errors in the middle -------------------------------------------------------------------------------------------


class Trap(Exception):
    pass


def after_an_error(where: str) -> list[Any]:
    """Train; break a step off; train on. The broken step must leave nothing behind."""
    case, results = CASES["plain"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units)
        optimizer = case.optimizer(zero.model)
        for step in range(case.steps):
            if step == 1:
                broken_step(zero.model, case, zero.rank, where)
                if where == "backward":
                    with pytest.raises(RuntimeError, match="broke off"):
                        optimizer.step()
                optimizer.zero_grad()
            loss = case.loss(zero.model, zero.rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((zero.full_state_dict(), [0.0] * 3))
    return results, alone(case, zero.world_size)


def broken_step(model, case, rank: int, where: str) -> None:
    error = KeyboardInterrupt if where == "interrupt" else Trap

    def spring(*args):
        raise error

    if where == "backward":
        middle = model.blocks[1].register_forward_hook(lambda m, a, output: output.register_hook(spring) and None)
    else:
        middle = model.blocks[1].up.register_forward_hook(spring)
    with pytest.raises(error):
        case.loss(model, rank, 33).backward()
    middle.remove()


@pytest.mark.parametrize("where", ["forward", "interrupt", "backward"])
def test_a_good_step_after_a_broken_one(ranks, where):
    for results, (state, _) in ranks.run(after_an_error, where, ranks=2):
        for stage, (got, _) in enumerate(results):
            for key, value in state.items():
                assert torch.equal(got[key], value), f"stage {stage}, {key}"


# -- gradient accumulation ------------------------------------------------------------------------------------------


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
def test_accumulation_under_no_sync(ranks, n):
    expected = ranks.run(accumulate_alone, n, ranks=1)[0]
    for results in ranks.run(accumulate, None, ranks=n):
        for got in results:
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-5)
        assert all(torch.equal(got[key], results[0][key]) for got in results for key in got), "stages differ"


def accumulate_synchronised(ranks: int) -> list[Any]:
    case, results = CASES["plain"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units)
        optimizer = case.optimizer(zero.model)
        for step in range(3):
            for micro in range(3):
                case.loss(zero.model, zero.rank, 3 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(zero.full_state_dict())
    return results


def test_accumulation_with_a_reduction_each(ranks):
    expected = ranks.run(accumulate_alone, 2, ranks=1)[0]
    for results in ranks.run(accumulate_synchronised, 2, ranks=2):
        for got in results:
            for key, value in expected.items():
                torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-5)


# -- torch's own as the oracle --------------------------------------------------------------------------------------


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


# -- a group, another entry point, the meta device ------------------------------------------------------------------


def in_a_group() -> Any:
    case, rank = CASES["plain"], torch.distributed.get_rank()
    groups = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    results = {stage: sharded(case, stage, group=groups[rank % 2]) for stage in range(4)}
    return results, alone(case, 2)


def test_a_group_of_some_ranks(ranks):
    for rank, (results, expected) in enumerate(ranks.run(in_a_group, ranks=4)):
        compare(CASES["plain"], expected, results, rank // 2)


def generate() -> list[Any]:
    import transformers  # noqa: F401

    case = CASES["hugging face llama"]
    prompt = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = build(case).generate(prompt, **options).tolist()
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage)
        zero.register_forward_method("generate")
        results.append(zero.model.generate(prompt, **options).tolist())
        case.loss(zero.model, zero.rank, 0).backward()
        assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
    return results, expected


def test_generation(ranks):
    for results, expected in ranks.run(generate, ranks=2):
        assert all(result == expected for result in results)


def from_meta(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    with torch.device("meta"):
        model = CASES["plain"].model()
    zero = zerolab.shard(model, stage, units=CASES["plain"].units, init=lambda module: module.reset_parameters())
    tokens = torch.zeros(1, 3, dtype=torch.long)
    zero.model(tokens).sum().backward()
    return zero.full_state_dict()


def test_a_model_on_the_meta_device(ranks):
    for stage in range(4):
        states = ranks.run(from_meta, stage, ranks=2)
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert torch.equal(states[0]["norm.weight"], torch.ones(8)) and states[0]["head.weight"].std() > 0.05
