"""What gradients hold between backward and step: accumulated, reduced, kept for the next step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from jobs_common import worlds
from test_measure import BF16, PADDED, PARAMETERS, TwoLayers
from torch import Tensor, nn

import zerolab
from zerolab.measure import model_states, timeline


def held_between(precision: zerolab.Precision | None) -> list[tuple[list[int], list[int], int]]:
    """Bytes of gradients after each of three backwards, the same under no_sync and after one that ends it, and how many
    elements of parameters this rank updates."""
    seen = []
    for stage in range(4):
        zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear], precision=precision)
        optimizer = torch.optim.AdamW(zero.model.parameters())

        def backward(zero=zero, optimizer=optimizer) -> int:
            zero.model(torch.ones(3, 6)).backward()
            return model_states(zero, optimizer)["gradients"]

        synchronised = [backward() for _ in range(3)]
        optimizer.zero_grad()
        with zero.no_sync():
            kept_back = [backward() for _ in range(3)]
        kept_back.append(backward())
        seen.append((synchronised, kept_back, sum(zerolab.to_local(p).numel() for p in zero.model.parameters())))
    return seen


@pytest.mark.parametrize("n", worlds(2, others=(1, 3, 4)))
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_bytes_of_accumulation(ranks, n, name):
    """Under no_sync gradients are full in every stage, and in float32 from the second micro-batch on; the backward
    that reduces them brings them back to what one backward holds. Reduced each time, they are held as after one
    backward; in bf16 they are then added up in float32, of what this rank updates (which has no padding)."""
    full, share = PADDED[name][n], PADDED[name][n] // n
    size = 4 if name == "fp32" else 2
    everyone = ranks.run(held_between, BF16 if name == "bf16" else None, ranks=n)
    for stage in range(4):
        mine = share if stage >= 2 else full
        for synchronised, kept_back, elements in (seen[stage] for seen in everyone):
            added = 4 * mine if name == "fp32" else 4 * elements
            assert synchronised == [size * mine, added, added], f"stage {stage}"
            assert kept_back == [size * full, 4 * full, 4 * full, size * mine], f"stage {stage}"
        assert sum(seen[stage][2] for seen in everyone) == PARAMETERS * (1 if stage else n)


def let_go() -> list[tuple[list[int], list[int]]]:
    """Bytes of the full gradients that something else still refers to: after a backward, and after one that ends a
    no_sync() in which parts of them were shown."""
    seen = []
    for stage in zerolab.STAGES:
        kept: list[Tensor] = []

        class Kept(stage):
            def post_backward(self, unit: zerolab.Unit, kept: list[Tensor] = kept) -> None:
                kept.append(unit.bucket.full)
                super().post_backward(unit)

        zero = Kept(TwoLayers(), units=[nn.Linear])

        def backward(zero=zero, kept=kept) -> list[int]:
            kept.clear()
            zero.model(torch.ones(3, 6)).backward()
            return [grad.untyped_storage().size() for grad in kept]

        after_one = backward()
        zero.model.zero_grad()
        with zero.no_sync():
            backward()
        shown = [param.grad for param in zero.model.parameters()]
        seen.append((after_one, backward()))
        assert all(grad.isfinite().all() for grad in shown)
    return seen


def test_whole_gradients_go_when_they_are_reduced(ranks):
    """And not when the last reference goes, which a thread of gloo's may hold. What no_sync has shown stays."""
    for seen in ranks.run(let_go, ranks=2):
        for stage, (after_one, after_no_sync) in enumerate(seen):
            assert sum(after_one) == (0 if stage >= 2 else PADDED["fp32"][2] * 4)
            assert sum(after_no_sync) == PADDED["fp32"][2] * 4


def in_kept_memory(keep: bool) -> list[tuple[list[Tensor], list[bool], list[int]]]:
    """Four steps, gradients set to None after each, but the user still has those of the second. For each stage: the
    gradients of every step, whether some of the next lie where they lay, and bytes of gradients after each zero_grad(),
    in the end once more by the timeline."""
    seen = []
    for stage in zerolab.STAGES:
        torch.manual_seed(0)
        zero = stage(TwoLayers(), units=[nn.Linear])
        zero.keep_grad_memory = keep
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        grads, places, held, mine = [], [], [], None
        for step in range(4):
            zero.model(torch.full((3, 6), 1.0 + step + zero.rank)).square().sum().backward()
            shown = [param.grad for param in zero.model.parameters()]
            grads += [grad.clone() for grad in shown]
            places.append({grad.untyped_storage().data_ptr() for grad in shown if grad.numel()})
            if step == 1:
                mine = [(grad, grad.clone()) for grad in shown]
            if step == 3:
                assert all(torch.equal(grad, copy) for grad, copy in mine), "a gradient that the user has was changed"
            optimizer.step()
            del shown
            zero.model.zero_grad()
            held.append(model_states(zero, optimizer)["gradients"])
        with timeline(zero, optimizer) as line:
            torch.ones(1)
        held.append(line.by_kind(len(line.events))["gradients"])
        seen.append((grads, [not old.isdisjoint(new) for old, new in pairwise(places)], held))
    return seen


def test_keep_grad_memory(ranks):
    """The same gradients, in stages 0 and 1 in the memory of the last ones, unless the user has one of those."""
    without, with_it = (ranks.run(in_kept_memory, keep, ranks=2) for keep in (False, True))
    for plain, kept in zip(without, with_it, strict=True):
        for stage in range(4):
            assert all(map(torch.equal, plain[stage][0], kept[stage][0]))
            assert plain[stage][2] == [0] * 5
            if stage < 2:
                assert kept[stage][1] == [True, False, True]
                assert kept[stage][2] == [PADDED["fp32"][2] * 4] * 5
            else:
                assert kept[stage][2] == [0] * 5
