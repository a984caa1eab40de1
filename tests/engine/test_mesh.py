"""Hybrid sharding: shards inside a replica, means of shards between replicas. (2, 2): two replicas of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_common import rank_ordered_mean, worlds
from reference import BF16, Model, batch, build, step
from torch import Tensor, nn

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.measure import between_bytes, ledger, model_states, moved_bytes

STEPS = 3
MESHES = worlds((2, 2), others=[(4, 1), (1, 4), (2, 1), (1, 3)])


def alone_in_tree_order(mesh: tuple[int, int], precision: zerolab.Precision | None) -> dict[str, Tensor]:
    """One process, no zerolab: the mean of the replicas' means, each summed in rank order in float32, rounded once."""
    torch.manual_seed(7)
    model = Model()
    masters = [p.detach().clone() for p in model.parameters()]
    if precision:
        model = model.to(precision.compute)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for number in range(STEPS):
        for param, master in zip(model.parameters(), masters, strict=True):
            param.data.copy_(master)
        means = [_mean([_gradients(model, r * mesh[1] + s, number) for s in range(mesh[1])]) for r in range(mesh[0])]
        for master, grad in zip(masters, _mean(means), strict=True):
            master.grad = grad.float()
        optimizer.step()
    return {name: master for (name, _), master in zip(model.named_parameters(), masters, strict=True)}


def _gradients(model: nn.Module, rank: int, number: int) -> list[Tensor]:
    model.zero_grad()
    model(*batch(rank, number)).backward()
    return [param.grad for param in model.parameters()]


def _mean(rows: list[list[Tensor]]) -> list[Tensor]:
    return [rank_ordered_mean(list(own)) for own in zip(*rows, strict=True)]


def train(stage: int, mesh: tuple[int, int], precision: zerolab.Precision | None) -> dict[str, Tensor]:
    zero, optimizer = build(stage, precision, mesh=mesh)
    for number in range(STEPS):
        step(zero, optimizer, number)
    return zero.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equals_one_process_in_tree_order(ranks, mesh, precision):
    expected = ranks.run(alone_in_tree_order, mesh, precision, ranks=1)[0]
    for stage in (1, 2, 3):
        for state in ranks.run(train, stage, mesh, precision, ranks=mesh[0] * mesh[1]):
            assert all(torch.equal(state[name], value) for name, value in expected.items()), stage


def bytes_of(stage: int, mesh: tuple[int, int], precision: zerolab.Precision | None) -> dict[str, Any]:
    zero, optimizer = build(stage, precision, mesh=mesh)
    step(zero, optimizer, 0)
    with ledger(zero) as book:
        zero.model(*batch(zero.rank, 1)).backward()
        held = model_states(zero, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    psi, root = (sum(unit.layout.size for unit in units) for units in (zero.units, zero.root))
    sent = {link: total.sent for link, total in book.totals("link").items()}
    return {"held": held, "sent": sent, "psi": psi, "root": root}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_bytes_held_and_bytes_for_each_link(ranks, precision):
    kind = precision or KEEP
    for stage in (1, 2, 3):
        for mesh in [(2, 2), (4, 1)]:
            for seen in ranks.run(bytes_of, stage, mesh, precision, ranks=4):
                psi = seen["psi"]
                inside = moved_bytes(stage, mesh[1], psi, seen["root"], kind)
                assert seen["sent"] == {"inside": inside, "between": between_bytes(mesh, psi, kind)}
                expected = zerolab.measure.state_bytes(stage, mesh[1], psi, kind)
                assert [seen["held"][key] for key in ("parameters", "gradients")] == [
                    expected[key] for key in ("parameters", "gradients")
                ]
                assert 0.98 * expected["optimizer"] <= seen["held"]["optimizer"] <= 1.02 * expected["optimizer"]


def everything(stage: int, folder: str) -> None:
    """Accumulation, clipping, an edit, a checkpoint that goes to another mesh and to none, fp16, offload."""
    zero, optimizer = build(stage, mesh=(2, 2))
    with zero.no_sync():
        zero.model(*batch(zero.rank, 9)).backward()
    zero.model(*batch(zero.rank, 0)).backward()
    norm = zero.clip_grad_norm_(0.05)
    assert len({row for row in zero.comm.exchange(norm.item(), "norms")}) == 1
    optimizer.step()
    optimizer.zero_grad()
    with zero.full_parameters():
        zero.model.head.weight.mul_(1 + zero.rank)  # the first rank's edit counts, in every replica
    step(zero, optimizer, 1)
    state = zero.full_state_dict()
    zerolab.save(f"{folder}/{stage}", zero, optimizer)
    step(zero, optimizer, 2)
    after = zero.full_state_dict()
    for options in ({}, {"mesh": (4, 1)}, {"mesh": (2, 2), "offload": "optimizer"}):
        other, other_optimizer = build(stage, **options)
        zerolab.load(f"{folder}/{stage}", other, other_optimizer)
        assert all(torch.equal(value, state[name]) for name, value in other.full_state_dict().items())
        step(other, other_optimizer, 2)
        for name, value in other.full_state_dict().items():
            if "offload" in options:
                assert torch.equal(value, after[name])
            else:  # summed in another order
                torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-4)
    other.load_full_state_dict(state if other.rank == 0 else None)
    assert all(torch.equal(value, state[name]) for name, value in other.full_state_dict().items())
    zero, optimizer = build(stage, zerolab.Precision(torch.float16), mesh=(2, 2))
    scaler = zerolab.LossScaler(zero, init_scale=2.0**10)
    loss = zero.model(*batch(zero.rank, 0))
    scaler.scale(loss * torch.inf if zero.rank == 3 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9


@pytest.mark.slow
def test_what_else_a_mesh_must_do(ranks, tmp_path: Path):
    for stage in (1, 2, 3):
        ranks.run(everything, stage, str(tmp_path), ranks=4)


def refused() -> list[str]:
    rank, messages = torch.distributed.get_rank(), []
    for stage, options in (
        (0, {"mesh": (2, 2)}),
        (2, {"mesh": (2, 3)}),
        (2, {"mesh": (4,)}),
        (2, {"mesh": (2, 2), "group": torch.distributed.group.WORLD}),
        (3, {"mesh": (2, 2) if rank else (4, 1)}),
    ):
        try:
            build(stage, **options)
        except (ValueError, zerolab.CommError) as error:
            messages.append(str(error))
    return messages


def test_what_is_no_mesh(ranks):
    for messages in ranks.run(refused, ranks=4):
        expected = ["stage 0", "product is 4", "product is 4", "group", "rank 1 asks for mesh=[2, 2]"]
        assert len(messages) == len(expected)
        assert all(words in message for words, message in zip(expected, messages, strict=True)), messages
