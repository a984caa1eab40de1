"""Clipping by each norm, alone and with a loss scaler and accumulation, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import worlds
from torch import Tensor, nn, optim

import zerolab
from zerolab.trial.numbers import Block, build
from zerolab.trial.zoo import CASES, Plain

PLAIN = CASES["plain"]


def clipped(norm_type: float) -> list[tuple[float, dict[str, torch.Tensor], int]]:
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block])
        optimizer = optim.SGD(zero.model.parameters(), lr=1.0)
        (50 * PLAIN.loss(zero.model, zero.rank, 0)).backward()
        with zero.comm.record() as calls:
            norm = zero.clip_grad_norm_(0.5, norm_type)
        optimizer.step()
        results.append((norm.item(), zero.full_state_dict(), len(calls)))
        zero.clip_grad_norm_(1.0, norm_type)
    return results


def clipped_alone(ranks: int, norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    model = build(PLAIN)
    for rank in range(ranks):
        (50 * PLAIN.loss(model, rank, 0) / ranks).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    optim.SGD(model.parameters(), lr=1.0).step()
    return norm.item(), model.state_dict()


@pytest.mark.parametrize(
    "norm_type", [2.0, float("inf"), *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1.0, 3.0))]
)
def test_clipping(ranks, norm_type):
    for n in (1, 3):
        norm, state = ranks.run(clipped_alone, n, norm_type, ranks=1)[0]
        results = ranks.run(clipped, norm_type, ranks=n)
        for stage in range(4):
            assert len({result[stage][0] for result in results}) == 1, "the same on every rank"
            for got, got_state, calls in (result[stage] for result in results):
                assert got == pytest.approx(norm, rel=1e-5)
                assert calls == (1 if stage else 0)
                for key, value in state.items():
                    torch.testing.assert_close(got_state[key], value, rtol=1e-4, atol=1e-6)


class InFloat64(Plain):
    def model(self):
        return super().model().double()


def clipped_in_float64(norm_type: float) -> list[tuple[Tensor, dict[str, Tensor]]]:
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(InFloat64()), stage, units=[Block])
        (50 * PLAIN.loss(zero.model, zero.rank, 0)).backward()
        norm = zero.clip_grad_norm_(0.5, norm_type)
        optim.SGD(zero.model.parameters(), lr=1.0).step()
        results.append((norm, zero.full_state_dict()))
    return results


def clipped_in_float64_alone(ranks: int, norm_type: float) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(InFloat64())
    for rank in range(ranks):
        (50 * PLAIN.loss(model, rank, 0) / ranks).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    optim.SGD(model.parameters(), lr=1.0).step()
    return norm, model.state_dict()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_float64_is_not_rounded(ranks, n, norm_type):
    norm, state = ranks.run(clipped_in_float64_alone, n, norm_type, ranks=1)[0]
    for results in ranks.run(clipped_in_float64, norm_type, ranks=n):
        for got, got_state in results:
            torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)  # the dtype too
            for key, value in state.items():
                torch.testing.assert_close(got_state[key], value, rtol=1e-12, atol=1e-14)


# -- with a loss scaler, in float16 -----------------------------------------------------------------------------------


P_NORMS = (1.0, 2.0, float("inf"))


def scaled_and_clipped() -> list[Any]:
    """float16, two micro-batches of which the first is kept back, unscaled, clipped by each p in turn."""
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block], precision=zerolab.Precision(torch.float16))
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.5)
        scaler = zerolab.LossScaler(zero, init_scale=1024.0)
        norms, calls = [], []
        for step, p in enumerate(P_NORMS):
            with zero.no_sync():
                scaler.scale(PLAIN.loss(zero.model, zero.rank, 2 * step).float()).backward()
            scaler.scale(PLAIN.loss(zero.model, zero.rank, 2 * step + 1).float()).backward()
            scaler.unscale_(optimizer)
            with zero.comm.record() as made:
                norms.append(zero.clip_grad_norm_(0.1, p).item())
            calls.append(len(made))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((norms, calls, scaler.get_scale(), zero.full_state_dict()))
    return results


def scaled_and_clipped_alone(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank's micro-batches are added in float32 and rounded to float16; so is the mean over the ranks."""
    model, half = build(PLAIN), build(PLAIN).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step, p in enumerate(P_NORMS):
        for copy, param in zip(half.parameters(), model.parameters(), strict=True):
            copy.data.copy_(param.data)
        own = []
        for rank in range(ranks):
            parts = []
            for micro in range(2):
                half.zero_grad()
                (1024.0 * PLAIN.loss(half, rank, 2 * step + micro).float()).backward()
                parts.append([param.grad.float() for param in half.parameters()])
            own.append([(a + b).half().float() for a, b in zip(*parts, strict=True)])
        for param, grads in zip(model.parameters(), zip(*own, strict=True), strict=True):
            param.grad = (sum(grads[1:], grads[0]) / ranks).half().float() / 1024.0
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, p).item())
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize("n", worlds(2, others=(1, 3, 4)))
def test_float16_kept_back_unscaled_and_clipped(ranks, n):
    norms, state = ranks.run(scaled_and_clipped_alone, n, ranks=1)[0]
    assert all(norm > 0.2 for norm in norms), "every step is clipped"
    everyone = ranks.run(scaled_and_clipped, ranks=n)
    for results in everyone:
        for stage, (mine, calls, scale, got) in enumerate(results):
            assert mine == everyone[0][stage][0], "the same on every rank"
            assert mine == pytest.approx(norms, rel=1e-4)
            assert calls == [1 if stage else 0] * 3 and scale == 1024.0, "at most one all-reduce"
            for name, value in state.items():
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5, msg=f"stage {stage}: {name}")


# -- clipping on one rank alone, and what it costs that this is noticed ------------------------------------------------


def control_messages(stage: int, clips: bool) -> list[int]:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = PLAIN.optimizer(zero.model)
    counts = []
    for step in range(4):
        with zero.comm.record() as calls:
            PLAIN.loss(zero.model, zero.rank, step).backward()
            if clips:
                zero.clip_grad_norm_(0.5)
            optimizer.step()
        counts.append(sum(call.control for call in calls))
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("stage", [0, 3])
def test_every_step_clipped_alike_needs_no_message_about_it(ranks, stage):
    with_clips, without = (ranks.run(control_messages, stage, clips, ranks=2)[0] for clips in (True, False))
    assert with_clips[2:] == [count + (stage > 0) for count in without[2:]]  # the all-reduce of the norm
