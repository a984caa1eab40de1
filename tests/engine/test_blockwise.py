"""Optimizers that update block by block, in every stage: one process's bits, and a state that any ranks can load."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import pytest
import torch
import whole
from blocks import SIZE, Adam8
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs_common import attempt, worlds
from reference import BF16, batch
from torch import Tensor, nn

import zerolab
from zerolab.engine.blockwise import in_blocks

ODD = {"units": nn.Sequential}


class InOrder(whole.Odd):
    """All of its parameters are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.to(memory_format=torch.contiguous_format)


def adam8(**options: Any) -> Any:
    return lambda model, wrap: [wrap(model.parameters(), Adam8, **options)]


WAYS = {
    "GPT": whole.Way(adam8()),
    "odd": whole.Way(adam8(), model=InOrder, **ODD),
    "odd, flat": whole.Way(adam8(flat=True), model=InOrder, **ODD),
    "odd, flat, bf16, no_sync": whole.Way(adam8(flat=True, skip=True), InOrder, precision=BF16, micro_batches=2, **ODD),
}


def built(way: whole.Way, stage: int, **options: Any) -> tuple[zerolab.Engine, Adam8]:
    torch.manual_seed(7)
    options = {"units": [way.units], "precision": way.precision, "granularity": SIZE} | options
    zero = zerolab.shard(way.model(), stage, **options)
    (optimizer,) = way.make(zero.model, whole.plain)
    assert isinstance(optimizer, Adam8)
    return zero, optimizer


def trained(way: whole.Way, stage: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Parameters and states of the whole."""
    zero, optimizer = built(way, stage, **options)
    for number in range(way.steps):
        whole.step(way, zero, [optimizer], number)
    states = {
        name: {key: zerolab.full_tensor(optimizer.state[p][key]) for key in ("m", "m_scale", "root", "root_scale")}
        for name, p in zero.model.named_parameters()
        if name not in ("frozen", "unused") and not optimizer.param_groups[0]["skip"]
    }
    return zero.full_state_dict(), states


def every_way(stage: int, options: dict[str, Any]) -> Any:
    return {name: trained(way, stage, options) for name, way in WAYS.items()}


def every_way_alone(n: int) -> Any:
    return {name: whole.alone(way, n) for name, way in WAYS.items()}


def odd(options: dict[str, Any]) -> Any:
    return trained(WAYS["odd"], 3, options)[0]


def odd_alone(mesh: tuple[int, int] | None) -> Any:
    return whole.alone(replace(WAYS["odd"], mesh=mesh), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "more"),
    [(3, []), *(pytest.param(n, [(2, {}), (3, {})], marks=pytest.mark.exhaustive) for n in (1, 2, 3, 4))],
    ids=str,
)
def test_equals_one_process_bit_for_bit(ranks, n, more):
    expected = ranks.run(every_way_alone, n, ranks=1)[0]
    of_all = ranks.run(every_way, 0, {}, ranks=n)[0]
    for stage, options in ((1, {}), *more, (3, {"granularity": 3 * SIZE})):
        for results in ranks.run(every_way, stage, options, ranks=n):
            for name in WAYS:
                (state, kept), (_, all_kept) = results[name], of_all[name]
                for key, value in expected[name].items():
                    assert torch.equal(state[key], value), f"stage {stage}, {options}, {name}: {key}"
                for param, entries in kept.items():
                    for key, value in entries.items():
                        assert value.dtype == all_kept[param][key].dtype
                        assert torch.equal(value.flatten(), all_kept[param][key].flatten()), f"{name}: {param}, {key}"


def test_on_a_mesh_and_with_offload(ranks):
    for options in ({"mesh": (2, 2)}, {"offload": "optimizer"}):
        expected = ranks.run(odd_alone, options.get("mesh"), ranks=1)[0]
        for state in ranks.run(odd, options, ranks=4):
            for key, value in expected.items():
                assert torch.equal(state[key], value), f"{options}: {key}"


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVED = WAYS["odd, flat, bf16, no_sync"], WAYS["odd"]
OPTIONS = {"granularity": 2 * SIZE}  # 3 ranks, 4 ranks: their slices are cut at other places


def go_on(way: whole.Way, zero: zerolab.Engine, optimizer: Any, steps: range, folder: str = "") -> None:
    for number in steps:
        if folder and number == 2:
            zerolab.save(folder, zero, optimizer)
        zero.model(*batch(0, number)).backward()  # the same gradients at any number of ranks
        optimizer.step()
        optimizer.zero_grad()


def save_all(folder: str, stage: int) -> Any:
    after = []
    for i, way in enumerate(SAVED):
        zero, optimizer = built(way, stage)
        go_on(way, zero, optimizer, range(4), f"{folder}/{i}")
        after.append(zero.full_state_dict())
    return after


def load_all(folder: str, stage: int, owned: bool) -> Any:
    after = []
    for i, way in enumerate(SAVED):
        zero, optimizer = built(way, stage, **OPTIONS)
        if owned:
            optimizer = zerolab.OwnerOptimizer(zero.model.parameters(), Adam8, **optimizer.defaults)
        zerolab.load(f"{folder}/{i}", zero, optimizer)
        kept = {str(each["m"].dtype) for each in optimizer.state.values() if each}
        assert kept <= {"torch.int8"}
        zerolab.save(f"{folder}/again-{i}", zero, optimizer)
        zero, optimizer = built(way, 2)
        zerolab.load(f"{folder}/again-{i}", zero, optimizer)
        go_on(way, zero, optimizer, range(2, 4))
        after.append(zero.full_state_dict())
    return after


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    worlds(((4, 3), (2, 1, False)), others=[((2, 0), (4, 3, False)), ((1, 1), (2, 3, True)), ((4, 2), (1, 0, False))]),
    ids=str,
)
def test_saved_anywhere_loaded_anywhere(ranks, places, tmp_path):
    """From (ranks, stage) to (ranks, stage), there in slices or with owners, and back into slices: the same bits."""
    (n, stage), (m, other, owned) = places
    expected = ranks.run(save_all, str(tmp_path), stage, ranks=n)[0]
    for after in ranks.run(load_all, str(tmp_path), other, owned, ranks=m):
        for state, wanted in zip(after, expected, strict=True):
            for key, value in wanted.items():
                assert torch.equal(state[key], value), key


# -- where blocks lie -------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), max_size=6)


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(1, 9), st.integers(1, 16), st.integers(1, 3), st.integers(1, 8), st.integers(1, 3))
@example([(), (0,), (3, 0, 2), (1,), (7, 1), (65,)], 9, 16, 3, 5, 2)
def test_slices_are_whole_blocks(shape_list, n, align, parts, size, blocks):
    """Where parameters and shards begin at multiples of a block, each rank has whole blocks, and a number for each."""
    tensors = [(f"p{i}", torch.empty(shape)) for i, shape in enumerate(shape_list)]
    made = zerolab.Layout(tensors, n, lcm(align, size * blocks), lcm(parts, size * blocks))
    for slot in made.slots:
        numbers, place = in_blocks(made, slot, size)
        assert place.shape == (-(-slot.numel // size),)
        have: list[int] = []
        for rank in range(n):
            start, stop = (bound - slot.offset for bound in made.owned(slot, rank))
            first, last = (bound - place.offset for bound in numbers.owned(place, rank))
            if start < stop:
                assert start % (size * blocks) == 0 and (stop % (size * blocks) == 0 or stop == slot.numel)
                assert (first, last) == (start // size, -(-stop // size))
            else:
                assert first == last
            have += range(first, last)
        assert have == list(range(place.numel))


# -- refused ----------------------------------------------------------------------------------------------------------


class Larger(Adam8):
    """Its blocks are not of the size that is declared for it."""


class Undeclared(Adam8):
    pass


def refusals(folder: str) -> dict[str, str]:
    zerolab.declare_blockwise(Larger, 2 * SIZE, ["m_scale"])

    def step(kind: type, **options: Any) -> None:
        torch.manual_seed(7)
        zero = zerolab.Zero3(InOrder(), **options)
        zero.model(*batch(0, 0)).backward()
        kind(zero.model.parameters()).step()

    def save_and_load() -> None:
        way = WAYS["odd"]
        zero, optimizer = built(way, 3)
        go_on(way, zero, optimizer, range(1))
        zerolab.save(folder, zero, optimizer)
        zerolab.load(folder, *built(way, 1, granularity=1))

    cases = {
        "undeclared": lambda: step(Undeclared, granularity=SIZE),
        "cut anywhere": lambda: step(Adam8),
        "cut elsewhere": lambda: step(Adam8, granularity=SIZE // 2),
        "blocks of another size": lambda: step(Larger, granularity=2 * SIZE),
        "order": lambda: zerolab.Zero3(whole.Odd(), granularity=SIZE),
        "none": lambda: zerolab.Zero3(InOrder(), granularity=0),
        "half": lambda: zerolab.Zero3(InOrder(), granularity=1.5),
        "size": lambda: zerolab.declare_blockwise(Adam8, 0),
        "a name": lambda: zerolab.declare_blockwise(Adam8, 8, "m_scale"),
        "ranks differ": lambda: zerolab.Zero3(InOrder(), granularity=1 + torch.distributed.get_rank()),
        "load": save_and_load,
    }
    return {name: attempt(case) for name, case in cases.items()}


def test_refused_with_a_reason_on_every_rank(ranks, tmp_path):
    expected = {
        "undeclared": "zerolab.declare_blockwise",
        "cut anywhere": f"cut at multiples of 1: shard the model with granularity={SIZE}",
        "cut elsewhere": f"updates blocks of {SIZE} elements, and in stage 3 it sees slices that are cut at multiples",
        "blocks of another size": f"one number for each block of {2 * SIZE}",
        "order": "those of conv.weight, of strides",
        "none": "granularity=0 must be",
        "half": "granularity=1.5 must be",
        "size": "size must be at least 1",
        "a name": "per_block names in a list",
        "ranks differ": "granularity=2",
        "load": "cut at multiples of 1",
    }
    for said in ranks.run(refusals, str(tmp_path / "checkpoint"), ranks=2):
        for case, message in said.items():
            assert expected[case] in str(message), f"{case}: {message}"
