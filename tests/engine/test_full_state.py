"""What the model shows: slices, full parameters to look at and edit, full state dicts, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_common import attempt
from jobs_common import same, worlds
from torch import nn
from torch.nn.utils import prune

import zerolab
from zerolab.trial.numbers import WIDTH, Block, Stack, build, words
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


def shown(stage: int) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, torch.Tensor], Any]:
    torch.manual_seed(dist.get_rank())  # other values on every rank; the first's count
    model = Stack()
    model.register_buffer("count", torch.tensor([dist.get_rank()]))
    model.register_buffer("flag", torch.tensor(dist.get_rank() == 0))
    zero = zerolab.shard(model, stage, units=[Block])
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    for p in model.parameters():  # touching is harmless
        p.sum().item(), repr(p), p.detach().clone()
    assert (zero.stage, zero.rank, zero.world_size, zero.model) == (
        stage,
        dist.get_rank(),
        dist.get_world_size(),
        model,
    )
    return shapes, zero.full_state_dict(), zero.full_state_dict(rank0_only=True)


@pytest.mark.parametrize("n", worlds(3, others=(1, 4)))
def test_slices_and_full_state_dict(ranks, n):
    torch.manual_seed(0)
    model = Stack()
    model.register_buffer("count", torch.tensor([0]))
    model.register_buffer("flag", torch.tensor(True))
    expected = model.state_dict()
    for stage in range(4):
        total = dict.fromkeys(dict(model.named_parameters()), 0)
        for rank, (shapes, state, on_first) in enumerate(ranks.run(shown, stage, ranks=n)):
            assert [name for name, _ in shapes] == list(total)
            for (name, shape), p in zip(shapes, model.parameters(), strict=True):
                total[name] += shape[0] * (1 if stage else 0)
                if stage:
                    assert shape[1:] == (1,) * (p.dim() - 1)
                else:
                    assert shape == p.shape
            assert list(state) == list(expected) and list(on_first) == (list(expected) if rank == 0 else [])
            assert all(torch.equal(state[key], value) for key, value in expected.items())
            model.load_state_dict(state, strict=True)
        if stage:
            assert total == {name: p.numel() for name, p in model.named_parameters()}


def edit_and_load(stage: int) -> None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    model, tokens = zero.model, words(0, 0, 2, 5)
    before = zero.full_state_dict()
    plain = build(PLAIN)
    with zero.full_parameters():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        assert torch.equal(model(tokens), plain(tokens))
        model.head.bias.fill_(zero.rank + 3.0)
    after = zero.full_state_dict()
    assert (after["head.bias"] == 3).all(), "the first rank's edit is kept"
    assert all(torch.equal(after[key], before[key]) for key in before if key != "head.bias")
    with pytest.raises(KeyError), zero.full_parameters():
        model.head.bias.fill_(9.0)
        raise KeyError
    assert (zero.full_state_dict()["head.bias"] == 3).all(), "after an error nothing is kept"
    plain.head.bias.data.fill_(3.0)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens)), "the next forward sees the edit"

    broken = {key: value for key, value in before.items() if key != "emb.weight"}
    for state, what in (
        (broken, "missing emb.weight"),
        ({**before, "x": before["head.bias"]}, "unexpected x"),
        ({**before, "head.bias": torch.zeros(3)}, "head.bias has shape"),
    ):
        assert what in attempt(lambda state=state: zero.load_full_state_dict(state if zero.rank == 0 else None))
    assert (zero.full_state_dict()["head.bias"] == 3).all(), "and nothing was loaded"
    with zero.full_parameters():  # as the first of these errors says
        model.load_state_dict({"head.bias": torch.full_like(before["head.bias"], 5.0)}, strict=False)
    assert (zero.full_state_dict()["head.bias"] == 5).all()
    zero.load_full_state_dict(before if zero.rank == 0 else None)
    assert all(torch.equal(value, before[key]) for key, value in zero.full_state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(tokens), build(PLAIN)(tokens))
    if stage:
        with torch.no_grad():  # an edit by hand of the slices is seen too
            for p in model.parameters():
                p.zero_()
            assert not model(tokens).any()


@pytest.mark.parametrize("n", worlds(2, others=(1, 4)))
def test_editing_and_loading(ranks, n):
    for stage in range(4):
        ranks.run(edit_and_load, stage, ranks=n)


def replace(stage: int) -> list[str]:
    """What replaces a parameter inside full_parameters() is kept, or refused on every rank with what it was."""
    zero = zerolab.shard(build(CASES["tied across units"]), stage, units=[Block])
    model = zero.model
    before = zero.full_state_dict()
    square = torch.arange(float(WIDTH))
    with zero.full_parameters():
        model.blocks[0].norm.weight.data = square + zero.rank
        model.blocks[0].norm.bias = nn.Parameter(square - zero.rank)
        model.norm.bias.data = model.norm.weight.data  # other memory of the same unit
        new = {key: value + zero.rank + 1 for key, value in before.items()}
        model.blocks[1].load_state_dict({k: new[f"blocks.1.{k}"] for k in model.blocks[1].state_dict()}, assign=True)
    after = zero.full_state_dict()
    changed = {"blocks.0.norm.weight": square, "blocks.0.norm.bias": square, "norm.bias": before["norm.weight"]}
    changed |= {key: value + 1 for key, value in before.items() if key.startswith("blocks.1.")}
    assert not same(after, before | changed)

    def cut(module: nn.Module) -> None:
        prune.l1_unstructured(module.blocks[0].up, "weight", 0.5)

    def untie(module: nn.Module) -> None:
        module.blocks[2].up.weight = nn.Parameter(module.head.weight.new_zeros(2 * WIDTH + 1, WIDTH))

    def resize(module: nn.Module) -> None:
        module.norm.bias.data = torch.zeros(WIDTH + 1)

    def on_one_rank(module: nn.Module) -> None:
        if zero.rank == zero.world_size - 1:
            module.norm.half()

    told = []
    for edit in (on_one_rank, resize, untie, cut):

        def edits(edit: Callable[[nn.Module], None] = edit) -> None:
            with zero.full_parameters():
                edit(model)

        told.append(attempt(edits))
        if edit is not cut:
            assert not same(zero.full_state_dict(), after), "no edit was kept"
    return told


@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
def test_replacing_inside(ranks, n):
    for stage in range(4):
        for told in ranks.run(replace, stage, ranks=n):
            half, resized, untied, pruned = told
            assert f"rank {n - 1}: norm.weight went from shape ({WIDTH},) in float32 to" in half
            assert f"rank 0: norm.bias went from shape ({WIDTH},) in float32 to ({WIDTH + 1},) in float32" in resized
            assert "was tied to another parameter, and replaced in one place only," in untied
            assert "blocks.0.up.weight was removed, or is no parameter any more, inside full_parameters()" in pruned


# -- buffers ----------------------------------------------------------------------------------------------------------


def buffers_of_any_kind() -> dict[str, torch.Tensor]:
    rank, model = dist.get_rank(), torch.nn.Linear(2, 2)
    for dtype in (torch.uint16, torch.int16, torch.int8, torch.float8_e4m3fn, torch.complex64):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.full((3,), 1 + rank).to(dtype))
        model.register_buffer(f"one_{dtype}".replace("torch.", ""), torch.tensor(1 + rank).to(dtype))
    model.register_buffer("expanded", torch.full((2, 1, 3), 1.0 + rank).expand(2, 4, 3))
    model.register_buffer("one_expanded", torch.full((1,), 1.0 + rank).expand(4))
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T + rank)
    model.register_buffer("conjugate", torch.full((3,), 1.0 + rank, dtype=torch.complex64).conj())
    zero = zerolab.shard(model, 1)
    before = zero.full_state_dict()
    ema = zerolab.EMA(zero)
    with ema.average_parameters():
        pass
    state = zero.full_state_dict()
    assert all(torch.equal(state[name].cfloat(), value.cfloat()) for name, value in before.items())
    shown = dict(model.named_buffers())
    assert all(torch.equal(shown[name].cfloat(), state[name].cfloat()) for name in shown)
    return {name: buffer.cfloat() for name, buffer in shown.items()}


def test_buffers_of_any_kind_are_the_first_rank_s(ranks):
    for shown in ranks.run(buffers_of_any_kind, ranks=3):
        turned = shown.pop("turned")
        assert torch.equal(turned, torch.arange(6.0).reshape(2, 3).T.cfloat())
        assert len(shown) == 13 and all(torch.equal(value, torch.ones_like(value)) for value in shown.values())


def same_buffers() -> list[Any]:
    """BatchNorm's statistics after training, and after the first rank's were given to all, before the model goes on.

    Then the last loss, and the statistics of a full state dict taken before they were given to all."""
    case, results = CASES["batch norm, channels_last"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units)
        optimizer = case.optimizer(zero.model)
        seen = []
        for step in range(2):
            case.loss(zero.model, zero.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append({name: buffer.clone() for name, buffer in zero.model.named_buffers()})
            full = zero.full_state_dict()
            zero.broadcast_buffers()
            seen.append({name: buffer.clone() for name, buffer in zero.model.named_buffers()})
        zero.model.eval()
        with torch.no_grad():
            seen.append(case.loss(zero.model, 0, 7))
        seen.append({name: full[name] for name in seen[0]})
        results.append(seen)
    return results


@pytest.mark.parametrize("n", worlds(2, others=(1, 4)))
def test_broadcast_buffers(ranks, n):
    everyone = ranks.run(same_buffers, ranks=n)
    for stage in range(4):
        for own, equal in ((0, 1), (2, 3)):
            first = everyone[0][stage][own]
            for rank in range(n):
                mine, after = everyone[rank][stage][own], everyone[rank][stage][equal]
                assert all(torch.equal(after[name], first[name]) for name in first)
                assert rank == 0 or not torch.equal(mine["1.running_mean"], first["1.running_mean"])
        assert all(torch.equal(results[stage][4], everyone[0][stage][4]) for results in everyone)
        assert all(
            torch.equal(results[stage][5][k], v) for results in everyone for k, v in everyone[0][stage][2].items()
        )
        assert int(everyone[0][stage][3]["1.num_batches_tracked"]) == 2
