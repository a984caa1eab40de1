"""Checkpoints: saved at any world size and stage, loaded at any other; damaged ones refused; crashes survived."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Block, Case, Stack, alone, noise, words

import zerolab


class Everything(Stack):
    """Tied weights, a channels_last convolution, a batch norm with buffers, a scalar, one element, nothing, frozen."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.head.weight = self.emb.weight
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.bn = nn.BatchNorm2d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(3, 7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        image = self.bn(self.conv(image)).mean() * self.scale * self.one + self.nothing.sum() + self.frozen.mean()
        return super().forward(tokens), image


class Mixed(Case):
    units = (Block, nn.Conv2d)
    steps = 2
    made: torch.optim.Optimizer

    def model(self) -> nn.Module:
        self.last = Everything()
        return self.last

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        logits, image = model(tokens, noise(rank, step, 2, 3, 4, 4))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + image.square().sum()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.02}]
        self.made = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, amsgrad=True)
        return self.made


def fresh(case: Case, stage: int, **options: Any) -> tuple[zerolab.Engine, torch.optim.Optimizer]:
    zero = zerolab.shard(case.model(), stage, units=case.units, **options)
    return zero, case.optimizer(zero.model)


def train(case: Case, zero: zerolab.Engine, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = case.loss(zero.model, zero.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_all(case: Case, folder: str) -> dict[str, Tensor]:
    """One checkpoint from each stage, at this world size; this rank's buffers."""
    for stage in range(4):
        torch.manual_seed(0)
        zero, optimizer = fresh(case, stage)
        train(case, zero, optimizer, range(case.steps))
        zerolab.save(f"{folder}/{zero.world_size}-{stage}", zero, optimizer, lr=0.5, words=["a", {"b": None}])
    return dict(zero.model.named_buffers())


Held = dict[str, tuple[int, int, Tensor | float]]  # name -> first and one past the last flat element, the elements


def held(zero: zerolab.Engine, optimizer: torch.optim.Optimizer) -> Held:
    """What this rank has of each tensor: flat, in the order of a contiguous parameter for what is whole."""
    found: Held = {}
    for unit in zero.units:
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            for name, value in {"": param, **optimizer.state.get(param, {})}.items():
                key = f"{name}/{slot.name}"
                if isinstance(value, Tensor) and value.dim() == 0 and name == "step":
                    found[key] = (0, 0, value.clone())
                elif zero.stage == 0:
                    found[key] = (0, slot.numel, memory_order(value, slot.stride))
                else:
                    start, stop = (i - slot.offset for i in unit.layout.owned(slot, zero.rank))
                    found[key] = (start, stop, value.detach().reshape(-1).clone())
    return found


def memory_order(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    dense = torch.empty_strided(value.shape, stride, dtype=value.dtype).copy_(value.detach())
    return dense.as_strided((value.numel(),), (1,)).clone()


def load_all(case: Case, folder: str, jobs: list[tuple[str, int]]) -> list[tuple[Held, Any, list[dict], dict]]:
    results = []
    for name, stage in jobs:
        torch.manual_seed(1)
        zero, optimizer = fresh(case, stage)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        extra = zerolab.load(f"{folder}/{name}", zero, optimizer)
        groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        results.append((held(zero, optimizer), extra, groups, dict(zero.model.named_buffers())))
    return results


def truth(case: Mixed, ranks: int) -> dict[str, Tensor | float]:
    """The whole tensors by one process without zerolab: parameters as "/name", optimizer state as "exp_avg/name"."""
    alone(case, ranks)
    expected: dict[str, Any] = {}
    for name, param in case.last.named_parameters():
        for key, value in {"": param, **case.made.state.get(param, {})}.items():
            expected[f"{key}/{name}"] = value.clone() if key == "step" else memory_order(value, param.stride())
    return expected


def assert_holds(parts: list[Held], expected: dict[str, Any], stage: int) -> None:
    """The parts of all ranks are exactly the expected tensors, and in stages 1 to 3 each element is held once."""
    for name, whole in expected.items():
        pieces = [part[name] for part in parts]
        if name.startswith("step/"):
            assert all(torch.equal(value, whole) and value.dtype == whole.dtype for _, _, value in pieces), name
        elif stage == 0:
            assert all(torch.equal(value, whole) for _, _, value in pieces), name
        else:
            assert torch.equal(torch.cat([value for _, _, value in pieces]), whole), name
    assert all(part.keys() == expected.keys() for part in parts)


class Saved(NamedTuple):
    folder: str  # of the checkpoints "n-stage"
    buffers: dict[int, list[dict[str, Tensor]]]  # n -> of each rank


@pytest.fixture(scope="module")
def saved(ranks: zerolab.Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Checkpoints of 1 to 4 ranks and all stages; only read by the tests."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return Saved(folder, {n: ranks.run(save_all, Mixed(), folder, ranks=n, timeout=60) for n in range(1, 5)})


@pytest.fixture(scope="module")
def expected(ranks: zerolab.Ranks) -> dict[int, dict[str, Any]]:
    return {n: ranks.run(truth, Mixed(), n, ranks=1)[0] for n in range(1, 5)}


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_saved_at_n_loaded_at_m(ranks, saved, expected, m):
    jobs = [(f"{n}-{stage}", (stage + n + m) % 4) for n in range(1, 5) for stage in range(4)]
    if m == 3:
        jobs += [(f"2-{stage}", target) for stage in range(4) for target in range(4)]
    results = ranks.run(load_all, Mixed(), saved.folder, jobs, ranks=m, timeout=60)
    for i, (name, stage) in enumerate(jobs):
        n = int(name[0])
        assert_holds([result[i][0] for result in results], expected[n], stage)
        for rank, (_, extra, groups, buffers) in enumerate(result[i] for result in results):
            assert extra == {"lr": 0.5, "words": ["a", {"b": None}]}
            assert [(g["lr"], g["weight_decay"], g["betas"]) for g in groups] == [
                (1e-2, 0.3, (0.9, 0.999)),
                (0.02, 0.0, (0.9, 0.999)),
            ]
            there = saved.buffers[n][rank if m == n else 0]
            assert all(torch.equal(buffers[key], there[key]) for key in there if key != "hidden")
            assert buffers["bn.num_batches_tracked"] == 2
