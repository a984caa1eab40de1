"""float16 with a loss scaler, against torch.amp.GradScaler on one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs_common import worlds
from torch import Tensor, nn

import zerolab
from zerolab import LossScaler, Precision, to_local
from zerolab.trial.numbers import Block, Stack, build, words
from zerolab.trial.numbers import Numbers as Case
from zerolab.trial.zoo import CASES

HALF = Precision(torch.float16)
SCALER = {"init_scale": 2.0**20, "growth_interval": 2}  # overflows at first, and grows soon
STEPS = 12


class InHalf(Case):
    """In two steps the loss of one rank is so large that its gradients overflow."""

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        return loss * 1e6 if (rank, step) in ((0, 8), (1, 10)) else loss

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def scaled(stage: int, clip: bool, micro: int, fused: bool) -> tuple[dict[str, Tensor], list[Any]]:
    zero = zerolab.shard(build(InHalf()), stage, units=[Block], precision=HALF)
    optimizer = InHalf().optimizer(zero.model, fused=fused)
    scaler = LossScaler(zero, **SCALER)
    seen = []
    for step in range(STEPS):
        for part in range(micro):
            scaler.scale(InHalf().loss(zero.model, zero.rank, step + part)).backward()
        norm = None
        if clip:
            scaler.unscale_(optimizer)
            norm = zero.clip_grad_norm_(0.5).item()
        scaler.step(optimizer)
        scaler.update()
        assert all(p.grad is None or micro > 1 or p.grad.dtype == torch.float16 for p in zero.model.parameters())
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), norm))
    return zero.full_state_dict(), seen


def scaled_alone(ranks: int, clip: bool, micro: int, fused: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """One process: float32 masters, a float16 copy, and the mean of the ranks' gradients, each rounded once."""
    model, half = build(InHalf()), build(InHalf()).half()
    optimizer = InHalf().optimizer(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    seen = []
    for step in range(STEPS):
        for copy, param in zip(half.parameters(), model.parameters(), strict=True):
            copy.data.copy_(param.data)
        for part in range(micro):
            grads = []
            for rank in range(ranks):
                half.zero_grad()
                scaler.scale(InHalf().loss(half, rank, step + part)).backward()
                grads.append([p.grad.float() for p in half.parameters()])
            for param, own in zip(model.parameters(), zip(*grads, strict=True), strict=True):
                mean = (sum(own[1:], own[0]) / ranks).half().float()
                param.grad = mean if param.grad is None else param.grad + mean
        norm = None
        if clip:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker(), norm))
    return model.state_dict(), seen


def all_stages(clip: bool, micro: int, fused: bool) -> list[Any]:
    return [scaled(stage, clip, micro, fused) for stage in range(4)]


@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
@pytest.mark.parametrize("micro", [1, 2])
def test_equal_to_one_process(ranks, n, micro):
    expected, said = ranks.run(scaled_alone, n, False, micro, False, ranks=1)[0]
    scales = [scale for scale, _, _ in said]
    ups = [b > a for a, b in itertools.pairwise(scales)]
    assert scales[0] < SCALER["init_scale"] and any(ups[:6]) and scales[8] < scales[7], "all that can happen does"
    for results in ranks.run(all_stages, False, micro, False, ranks=n):
        for state, seen in results:
            assert seen == said
            assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "fused"), [(True, False), (False, True), (True, True)])
def test_clipped_after_unscaling_and_fused(ranks, clip, fused):
    expected, said = ranks.run(scaled_alone, 2, clip, 1, fused, ranks=1)[0]
    every = ranks.run(all_stages, clip, 1, fused, ranks=2)
    for results in every:
        for stage, (state, seen) in enumerate(results):
            assert [row[:2] for row in seen] == [row[:2] for row in said]
            for (_, _, mine), (_, _, theirs), (_, _, first) in zip(seen, said, every[0][stage][1], strict=True):
                if clip:
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=0, equal_nan=True)
                    assert mine == first or mine != mine, "the same on every rank"
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


def overflow_on_one_rank(odd: int) -> list[tuple[bool, float, int]]:
    """A gradient that is not finite in the slice of one rank alone, as no other rank can see."""
    seen = []
    for stage in range(1, 4):
        zero = zerolab.shard(Stack(), stage, units=[Block], precision=HALF)
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        scaler = LossScaler(zero, init_scale=8.0)
        scaler.scale(CASES["plain"].loss(zero.model, zero.rank, 0).float()).backward()
        before = zero.full_state_dict()
        if zero.rank == odd:
            to_local(next(p for p in zero.model.parameters() if to_local(p).numel()).grad)[0] = torch.inf
        with zero.comm.record() as calls:
            scaler.step(optimizer)
        scaler.update()
        after = zero.full_state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        seen.append((same, scaler.get_scale(), len(calls)))
    return seen


@pytest.mark.parametrize("odd", [0, 2])
def test_one_rank_overflows_and_all_skip(ranks, odd):
    for seen in ranks.run(overflow_on_one_rank, odd, ranks=3):
        assert seen == [(True, 4.0, 1)] * 3


def misuse() -> list[str]:
    said = []
    zero = zerolab.Zero2(Stack(), units=[Block], precision=HALF)
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    other = zerolab.Zero2(Stack(), units=[Block], precision=HALF)
    scaler = LossScaler(zero)
    loss = CASES["plain"].loss(zero.model, zero.rank, 0).float()
    with zero.no_sync():
        scaler.scale(loss).backward()
    for wrong in (optimizer, torch.optim.SGD(other.model.parameters(), lr=0.1)):
        with pytest.raises(RuntimeError) as refused:
            scaler.unscale_(wrong)
        said.append(str(refused.value))
    with pytest.raises(ValueError, match="float32 or wider") as refused:
        Precision(torch.float16, master=torch.float16)
    return said


def test_misuse(ranks):
    for said in ranks.run(misuse, ranks=2):
        assert "no_sync() and are not yet averaged" in said[0]
        assert "also updates a model other than this LossScaler" in said[1]
