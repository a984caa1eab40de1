"""Optimizer state on the host. Without a GPU host and device are one memory: numbers and bytes are tested, not time."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_common import worlds
from reference import BF16, Model, batch, build, step, train_alone
from torch import Tensor

import zerolab
from zerolab import to_local
from zerolab.engine.precision import KEEP
from zerolab.measure import host_state_bytes, model_states, state_bytes, timeline

pytestmark = pytest.mark.slow

Trained = tuple[dict[str, Tensor], list[Any]]


def train(stage: int, precision: zerolab.Precision | None, offload: str | None, folder: str | None = None) -> Trained:
    """Four steps with clipping, accumulation, an edit, a parameter that is frozen, and half way a checkpoint."""
    zero, optimizer = build(stage, precision, offload=offload)
    seen: list[Any] = []
    for number in range(4):
        if number == 1:
            with zero.no_sync():
                zero.model(*batch(zero.rank, 50)).backward()
        if number == 2:
            with zero.full_parameters():
                zero.model.head.weight.mul_(0.5)
            zero.model.emb.weight.requires_grad_(False)
        if number == 3 and folder:  # half of the way is gone with the other placement
            zerolab.save(folder, zero, optimizer)
            zero, optimizer = build(stage, precision, offload=None if offload else "optimizer")
            zero.model.emb.weight.requires_grad_(False)
            zerolab.load(folder, zero, optimizer)
        loss = zero.model(*batch(zero.rank, number))
        loss.backward()
        seen += [loss.item(), zero.clip_grad_norm_(0.1).item()]
        seen.append([None if p.grad is None else p.grad.clone() for p in zero.model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(), seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(to_local(a), to_local(b)) if isinstance(a, Tensor) else a == b


def compare(stage: int, precision: zerolab.Precision | None, folder: str) -> None:
    plain, seen = train(stage, precision, None)
    for where in (None, f"{folder}/{stage}"):
        state, also_seen = train(stage, precision, "optimizer", where)
        assert same(seen, also_seen), (stage, where)
        assert state.keys() == plain.keys() and all(torch.equal(state[name], plain[name]) for name in plain)


def alone_too(stage: int, precision: zerolab.Precision | None) -> dict[str, Tensor]:
    zero, optimizer = build(stage, precision, offload="optimizer")
    for number in range(3):
        step(zero, optimizer, number)
    return zero.full_state_dict()


@pytest.mark.parametrize("precision", worlds(BF16, others=[None]), ids=["bf16", "fp32"])
@pytest.mark.parametrize("n", worlds(3, others=(1, 2, 4)))
def test_the_same_numbers_with_and_without(ranks, n, precision, tmp_path: Path):
    expected, _ = ranks.run(train_alone, n, precision, 3, ranks=1)[0]
    for stage in (1, 2, 3):
        for state in ranks.run(alone_too, stage, precision, ranks=n):
            assert all(torch.equal(state[name], expected[name]) for name in expected), stage
        ranks.run(compare, stage, precision, str(tmp_path), ranks=n)


def with_scaler(stage: int) -> None:
    """One rank's overflow is everyone's, and the scale and the numbers are those without offload."""
    results = []
    for offload in (None, "optimizer"):
        zero, optimizer = build(stage, zerolab.Precision(torch.float16), offload=offload)
        scaler = zerolab.LossScaler(zero, init_scale=2.0**14)
        scales = []
        for number in range(3):
            loss = zero.model(*batch(zero.rank, number))
            if number == 1 and zero.rank == zero.world_size - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            zero.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        results.append((scales, list(zero.full_state_dict().values())))
    assert results[0][0] == [2.0**14, 2.0**13, 2.0**13]
    assert same(*results)


def test_with_a_loss_scaler(ranks):
    for stage in (1, 2, 3):
        ranks.run(with_scaler, stage, ranks=3)


def held(stage: int, precision: zerolab.Precision | None) -> tuple[dict[str, int], dict[str, int], dict[str, int], int]:
    """Held on the device and on the host when backward has returned, and what the timeline says is there by then."""
    zero, optimizer = build(stage, precision, offload="optimizer")
    step(zero, optimizer, 0)
    with timeline(zero, optimizer) as line:
        zero.model(*batch(zero.rank, 1)).backward()
        time.sleep(0.2)  # gloo's own thread lets go of a gradient a moment after the wait for it
        gc.collect()
    states = [model_states(zero, optimizer, on=where) for where in ("device", "host")]
    return *states, line.by_kind(len(line.events)), sum(unit.layout.size for unit in zero.units)


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", worlds(2, others=(1, 4)))
def test_bytes_on_the_device_and_on_the_host(ranks, n, precision):
    """To the byte, with Ψ counted with its padding, for which Adam keeps nothing."""
    kind = precision or KEEP
    for stage in (1, 2, 3):
        for device, host, alive, psi in ranks.run(held, stage, precision, ranks=n):
            assert device == state_bytes(stage, n, psi, kind, offload=True) | {"buffers": 0}, stage
            expected = host_state_bytes(n, psi, kind)
            unpadded = sum(p.numel() for p in Model().parameters())
            assert psi - unpadded <= unpadded / 100
            assert 0.99 * expected["optimizer"] <= host["optimizer"] <= 1.01 * expected["optimizer"]
            assert (host["parameters"], host["gradients"]) == (expected["parameters"], expected["gradients"])
            # All gradients there are: no full one has stayed behind on the device.
            assert alive["gradients"] == host["gradients"], stage
            assert alive["parameters"] + alive["gathered parameters"] == device["parameters"] + host["parameters"]


def refused() -> list[str]:
    messages = []
    for stage, offload in ((0, "optimizer"), (1, "parameters"), (3, True)):
        try:
            build(stage, offload=offload)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_offloaded(ranks):
    for messages in ranks.run(refused, ranks=2):
        assert len(messages) == 3
        assert "stage 0 has no offload" in messages[0] and "'parameters'" in messages[1]
