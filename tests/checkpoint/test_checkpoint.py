"""Checkpoints: saved at any world size and stage, loaded at any other; damaged ones refused; crashes survived."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jobs_crash
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jobs_common import PYTHONPATH, worlds
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import zerolab
from zerolab import CheckpointError, to_local
from zerolab.trial.numbers import WORDS, Block, Stack, alone, noise, words
from zerolab.trial.numbers import Numbers as Case
from zerolab.trial.zoo import CASES


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
    """Save one checkpoint from each stage at this world size; return this rank's buffers."""
    for stage in range(4):
        torch.manual_seed(0)
        zero, optimizer = fresh(case, stage)
        train(case, zero, optimizer, range(case.steps))
        zerolab.save(f"{folder}/{zero.world_size}-{stage}", zero, optimizer, lr=0.5, words=["a", {"b": None}])
    return dict(zero.model.named_buffers())


Held = dict[str, tuple[int, int, Tensor | float]]  # name -> flat elements [start, stop) and their values


def held(zero: zerolab.Engine, optimizer: torch.optim.Optimizer) -> Held:
    """What this rank holds of each tensor, flat; full tensors in their parameter's memory order."""
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
                    found[key] = (start, stop, to_local(value).detach().reshape(-1).clone())
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
    """The full tensors, from one process without zerolab: parameters as "/name", optimizer state as "exp_avg/name"."""
    alone(case, ranks)
    expected: dict[str, Any] = {}
    for name, param in case.last.named_parameters():
        for key, value in {"": param, **case.made.state.get(param, {})}.items():
            expected[f"{key}/{name}"] = value.clone() if key == "step" else memory_order(value, param.stride())
    return expected


def assert_holds(parts: list[Held], expected: dict[str, Any], stage: int) -> None:
    """The parts of all ranks make exactly the expected tensors; in stages 1 to 3 each element is held once."""
    for name, full in expected.items():
        pieces = [part[name] for part in parts]
        if name.startswith("step/"):
            assert all(torch.equal(value, full) and value.dtype == full.dtype for _, _, value in pieces), name
        elif stage == 0:
            assert all(torch.equal(value, full) for _, _, value in pieces), name
        else:
            assert torch.equal(torch.cat([value for _, _, value in pieces]), full), name
    assert all(part.keys() == expected.keys() for part in parts)


class Saved(NamedTuple):
    folder: str  # contains the checkpoints, each named "n-stage"
    buffers: dict[int, list[dict[str, Tensor]]]  # n -> the buffers of each rank


@pytest.fixture(scope="module")
def saved(ranks: zerolab.Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Checkpoints of 1 to 4 ranks and all stages. The tests only read them."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return Saved(folder, {n: ranks.run(save_all, Mixed(), folder, ranks=n) for n in range(1, 5)})


@pytest.fixture(scope="module")
def expected(ranks: zerolab.Ranks) -> dict[int, dict[str, Any]]:
    return {n: ranks.run(truth, Mixed(), n, ranks=1)[0] for n in range(1, 5)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "every"), [(3, 7), *(pytest.param(m, 3, marks=pytest.mark.exhaustive) for m in range(1, 5))]
)
def test_saved_at_n_loaded_at_m(ranks, saved, expected, m, every):
    """Every stage into every stage, or one of `every` pairs: each number of ranks and each stage is among them."""
    jobs = [(f"{n}-{stage}", target) for n in range(1, 5) for stage in range(4) for target in range(4)][::every]
    results = ranks.run(load_all, Mixed(), saved.folder, jobs, ranks=m)
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


def five(folder: str, jobs: list[tuple[str, int]]) -> list[Held]:
    save_all(Mixed(), folder)
    return [result[0] for result in load_all(Mixed(), folder, jobs)]


@pytest.mark.exhaustive
def test_five_ranks(ranks, saved, expected, tmp_path):
    """Saved at 1 to 5 and loaded at 5, saved at 5 and loaded at 1 to 4; each stage into each, at one of these."""
    folder = str(shutil.copytree(saved.folder, tmp_path / "five"))
    truths = expected | {5: ranks.run(truth, Mixed(), 5, ranks=1)[0]}
    jobs = [(f"{n}-{stage}", target) for n in range(1, 6) for stage in range(4) for target in range(4)][::3]
    parts = zerolab.launch(five, 5, folder, jobs, threads=1)
    for i, (name, stage) in enumerate(jobs):
        assert_holds([part[i] for part in parts], truths[int(name[0])], stage)
    pairs = [(f"5-{stage}", target) for stage in range(4) for target in range(4)]
    for m in range(1, 5):
        jobs = pairs[m - 1 :: 3]
        results = ranks.run(load_all, Mixed(), folder, jobs, ranks=m)
        for i, (_, stage) in enumerate(jobs):
            assert_holds([result[i][0] for result in results], truths[5], stage)


class Noisy(Mixed):
    """Its loss is random, so the random number generators matter."""

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return super().loss(model, rank, step) * torch.rand(())


def interrupted(case: Case, stage: int, target: int, folder: str, precision: Any) -> None:
    """Training in one go, and training that is saved half way and resumed in a new model, agree bit for bit."""
    torch.manual_seed(dist.get_rank())
    zero, optimizer = fresh(case, stage, precision=precision)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(case, zero, optimizer, range(2))
    schedule.step()
    zero.full_state_dict()  # does not count as a step
    zerolab.save(f"{folder}/{stage}", zero, optimizer, schedule=schedule.state_dict(), step=2)
    losses = train(case, zero, optimizer, range(2, 4))
    torch.rand(7 + dist.get_rank())
    again, other = fresh(case, target, precision=precision)
    rates = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    extra = zerolab.load(f"{folder}/{stage}", again, other)
    rates.load_state_dict(extra["schedule"])
    assert again.comm.step == 2 and rates.get_last_lr() == [0.005, 0.01]
    assert train(case, again, other, range(extra["step"], 4)) == losses
    assert zero.comm.step == again.comm.step
    full, there = zero.full_state_dict(), again.full_state_dict()
    assert all(torch.equal(full[key], there[key]) for key in full)


def interruptions(folder: str, precision: Any) -> None:
    for stage in range(4):
        interrupted(Noisy(), stage, stage, folder, precision)
        interrupted(Noisy(), stage, 3 - stage, folder, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", worlds(zerolab.Precision(), others=[None]), ids=["bf16", "fp32"])
def test_training_goes_on_bit_for_bit(ranks, tmp_path, precision):
    ranks.run(interruptions, str(tmp_path), precision, ranks=3)


class Optimized(Case):
    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(model.parameters(), lr=0.01, **self.options)


OPTIMIZERS = [
    (name, {}) for name in ["ASGD", "SGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
]
OPTIMIZERS += [("SGD", {"momentum": 0.9}), ("Adam", {"fused": True}), ("RMSprop", {"momentum": 0.9, "centered": True})]


def with_optimizer(name: str, options: dict[str, Any], stage: int, target: int, steps: int, folder: str) -> None:
    case = Optimized(name, options)
    zero, optimizer = fresh(case, stage)
    train(case, zero, optimizer, range(steps))
    zerolab.save(folder, zero, optimizer)
    train(case, zero, optimizer, range(3, 5))
    again, other = fresh(case, target)
    train(case, again, other, range(7, 8))  # load must replace what this leaves
    zerolab.load(folder, again, other)
    train(case, again, other, range(3, 5))
    full, there = zero.full_state_dict(), again.full_state_dict()
    assert all(torch.equal(full[key], there[key]) for key in full), (name, options, stage, target)
    kinds = [
        {key: (value.dtype, value.dim()) for key, value in o.state[p].items() if isinstance(value, Tensor)}
        for o, p in ((optimizer, zero.units[0].params[0]), (other, again.units[0].params[0]))
    ]
    assert kinds[0] == kinds[1]


def with_optimizers(folder: str, every: int) -> None:
    for i, (name, options) in [*enumerate(OPTIMIZERS)][::every]:
        with_optimizer(name, options, i % 4, (i + 1 + i // 4) % 4, 2, folder)
    with_optimizer("SGD", {"momentum": 0.9}, 2, 0, 0, folder)  # before the first step: no state
    with_optimizer("AdamW", {}, 0, 1, 0, folder)


@pytest.mark.slow
@pytest.mark.parametrize("every", worlds(3, others=[1]))
def test_every_elementwise_optimizer(ranks, tmp_path, every):
    ranks.run(with_optimizers, str(tmp_path / "last"), every, ranks=2)


# -- weights alone --------------------------------------------------------------------------------------------------


def test_into_a_plain_model(saved, expected):
    for n, stage in ((1, 2), (2, 0), (3, 3), (4, 1)):
        model = Everything()
        zerolab.load_model_weights(f"{saved.folder}/{n}-{stage}", model)
        for name, param in model.named_parameters():
            assert torch.equal(memory_order(param, param.stride()), expected[n][f"/{name}"]), name
        first = saved.buffers[n][0]
        assert all(torch.equal(buffer, first[name]) for name, buffer in model.named_buffers())
        model.to(torch.bfloat16)
        zerolab.load_model_weights(f"{saved.folder}/{n}-{stage}", model)
        assert torch.equal(model.emb.weight.flatten(), expected[n]["/emb.weight"].bfloat16())


def export(folder: str, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    zero, optimizer = fresh(Mixed(), stage)
    train(Mixed(), zero, optimizer, range(1))
    zerolab.export_weights(f"{folder}/{stage}.safetensors", zero)
    return zero.full_state_dict()


def test_exported_weights(ranks, tmp_path):
    for stage in (0, 3):
        full = ranks.run(export, str(tmp_path), stage, ranks=2)[0]
        file = tmp_path / f"{stage}.safetensors"
        assert set(tmp_path.glob(f"{stage}*")) == {file}, "no other file is left"
        read = load_file(file)
        assert read.keys() == full.keys() - {"head.weight"}, "tied weights once"
        assert all(torch.equal(read[name], full[name]) for name in read)
        library, own = Everything(), Everything()
        assert load_model(library, file) == (set(), [])
        zerolab.load_model_weights(file, own)
        for model in (library, own):
            assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())


def other_models() -> dict[str, tuple[nn.Module, str]]:
    wide = Everything()
    wide.head.bias = nn.Parameter(torch.zeros(WORDS + 1))
    more, fewer, untied, typed = Everything(), Everything(), Everything(), Everything()
    more.extra = nn.Linear(2, 2)
    del fewer.conv.bias
    untied.head.weight = nn.Parameter(untied.emb.weight.detach().clone())
    typed.flag = torch.tensor(1.0)
    return {
        "wide": (wide, r"head.bias has shape \(13,\), in this model \(14,\)"),
        "more": (more, "has no (parameter )?extra.weight"),
        "fewer": (fewer, "has (a parameter conv.bias that|conv.bias, which) this model lacks"),
        "typed": (typed, "flag is .*bool|buffer flag is .*BOOL"),
        "untied": (untied, "has no head.weight"),
    }


def test_a_plain_model_that_does_not_fit_stays_as_it_is(ranks, saved, tmp_path):
    ranks.run(export, str(tmp_path), 3, ranks=1)
    for source in (Path(saved.folder) / "2-3", tmp_path / "3.safetensors"):
        for what, (model, pattern) in other_models().items():
            before = {name: value.clone() for name, value in model.state_dict().items()}
            if what == "untied" and source.is_dir():  # a checkpoint knows both names
                zerolab.load_model_weights(source, model)
                continue
            with pytest.raises(CheckpointError, match=pattern) as refused:
                zerolab.load_model_weights(source, model)
            assert str(source) in str(refused.value)
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError, match="meta device"), torch.device("meta"):
        zerolab.load_model_weights(source, Everything())
    file = tmp_path / "3.safetensors"
    for data in (b"", b"\x80\x04.", file.read_bytes()[:-3], b"\xff" * 8 + file.read_bytes()[8:]):
        (tmp_path / "broken").write_bytes(data)
        with pytest.raises(CheckpointError, match="broken is not a complete safetensors file"):
            zerolab.load_model_weights(tmp_path / "broken", Everything())


# -- refused, on every rank, with nothing changed -------------------------------------------------------------------


def attempt(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def snapshot(zero: zerolab.Engine, optimizer: torch.optim.Optimizer) -> Any:
    own = [b.clone() for b in zero.model.buffers()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return held(zero, optimizer), own, groups, torch.get_rng_state(), zero.comm.step


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


class Renamed(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.bn
        del self.bn

    def forward(self, tokens: Tensor, image: Tensor) -> Any:
        self.bn = self.other
        return super().forward(tokens, image)


class Odd(Mixed):
    def __init__(self, what: str) -> None:
        self.what = what

    def model(self) -> nn.Module:
        if self.what in ("wide", "more", "fewer", "untied", "typed"):
            return other_models()[self.what][0]
        return {"renamed": Renamed, "double": lambda: Everything().double()}.get(self.what, Everything)()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.what == "other kind":
            return torch.optim.Adam(model.parameters())
        if self.what == "one group":
            return torch.optim.AdamW(model.parameters())
        if self.what == "fewer groups":
            return torch.optim.AdamW([p for p in model.parameters() if p.dim() >= 2])
        if self.what == "other order":
            groups = super().optimizer(model).param_groups
            return torch.optim.AdamW([{"params": groups[i]["params"][::-1]} for i in (1, 0)])
        return super().optimizer(model)


ODD = {
    "wide": r"head.bias has shape \(13,\), in this model \(14,\) \(saved from Everything, this is Everything\)",
    "more": "has no parameter extra.weight",
    "fewer": "has a parameter conv.bias that this model lacks",
    "typed": "buffer flag is",
    "untied": "emb.weight is tied differently: emb.weight = head.weight in the checkpoint, emb.weight in this model",
    "renamed": "has no parameter other.weight .saved from Everything, this is Renamed",
    "double": "was saved as torch.float32 but is torch.float64 here",
    "other kind": "was saved with AdamW, this optimizer is Adam",
    "one group": "parameter group 0 .* was not saved as one group",
    "fewer groups": "was saved with 2 parameter groups, this optimizer has 1",
}


def load_odd(what: str, folder: str) -> list[str]:
    said = []
    for stage in range(4):
        zero, optimizer = fresh(Odd(what), stage)
        before = snapshot(zero, optimizer)
        said.append(attempt(lambda z=zero, o=optimizer: zerolab.load(f"{folder}/2-1", z, o)))
        assert same(before, snapshot(zero, optimizer)) == (said[-1] != "no error")
    return said


@pytest.mark.parametrize("what", ODD)
def test_a_model_that_does_not_fit_stays_as_it_is(ranks, saved, what):
    for said in ranks.run(load_odd, what, saved.folder, ranks=2):
        for message in said:
            assert re.match(rf"CheckpointError: rank 0: {saved.folder}/2-1: .*{ODD[what]}", message), message


def test_groups_in_another_order(ranks, saved):
    for said in ranks.run(load_odd, "other order", saved.folder, ranks=2):
        assert said == ["no error"] * 4


def load_where_one_rank_cannot(folder: str, other: str) -> list[str]:
    """What each rank says when only rank 1 finds damaged files, or a different checkpoint."""
    said = []
    for stage in range(4):
        zero, optimizer = fresh(Mixed(), stage)
        train(Mixed(), zero, optimizer, range(1))
        before = snapshot(zero, optimizer)
        path = other if dist.get_rank() else folder
        said.append(attempt(lambda z=zero, o=optimizer, path=path: zerolab.load(path, z, o)))
        assert same(before, snapshot(zero, optimizer))
    return said


def test_one_rank_cannot_read(ranks, saved, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(f"{saved.folder}/2-3", damaged)
    file = damaged / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1  # in the state of the last rank's random number generator
    file.write_bytes(data)
    bits = rf"CheckpointError: rank 1: {file}: rank 1/generators/cpu is damaged: bytes \d+ to"
    other = "CheckpointError: .*ranks see different checkpoints"
    missing = "CheckpointError: rank 1: .*nowhere is not a zerolab checkpoint: there is no .*nowhere/manifest.json"
    for there, pattern in ((str(damaged), bits), (f"{saved.folder}/2-2", other), ("nowhere", missing)):
        for said in ranks.run(load_where_one_rank_cannot, f"{saved.folder}/2-3", there, ranks=2):
            assert all(re.match(pattern, message) for message in said), said


class Picky(nn.Module):
    """Has extra state, which rank 1 may refuse."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.notes = [says]

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, notes: Any) -> None:
        self.notes[:] = notes
        if notes == ["bad"] and (not dist.is_initialized() or dist.get_rank() == 1):
            raise ValueError("cannot take it")
        if not dist.is_initialized():
            self.sum = self.linear.weight.sum()


def half_loads(folder: str) -> dict[str, str]:
    """Loads that fail late, each with what it says; `broken off` is the only one that may have changed something."""

    def build(value: float, says: str = "good") -> tuple[Any, torch.optim.Optimizer]:
        model = Picky(says)
        nn.init.constant_(model.linear.weight, value)
        zero = zerolab.Zero2(model)
        made = torch.optim.SGD([{"params": [*model.parameters()]}, {"params": []}, {"params": []}], lr=value)
        for number, group in enumerate(made.param_groups):
            group |= {"lr": value + number, "mine": None}
        return zero, made

    said = {}
    for says in ("good", "bad"):
        there = build(5.0, says)
        zerolab.save(f"{folder}/{says}", *there)
    for what, name in (("extra", "bad"), ("group", "good")):
        zero, optimizer = build(1.0)
        optimizer.param_groups[2]["mine"] = torch.tensor(1.0) if what == "group" else None
        before = snapshot(zero, optimizer), [*zero.model.notes]
        said[what] = attempt(lambda z=zero, o=optimizer, name=name: zerolab.load(f"{folder}/{name}", z, o))
        if what == "extra":
            bad = there[0].full_state_dict()
            said["state"] = attempt(lambda z=zero, bad=bad: z.load_full_state_dict(bad))
        assert same(before, (snapshot(zero, optimizer), [*zero.model.notes])), what
    zero, optimizer = build(1.0)
    zerolab.load(f"{folder}/good", zero, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [5.0, 6.0, 7.0], "groups without parameters, in order"
    ema = zerolab.EMA(zero)
    zerolab.save(f"{folder}/ema", zero, optimizer, ema=ema)
    if zero.rank == 1:
        ema.resume = None  # what nobody has thought of
    said["broken off"] = attempt(lambda: zerolab.load(f"{folder}/ema", zero, optimizer, ema=ema))
    return said


HALF_LOADS = {
    "extra": r"CheckpointError: .*bad: rank 1: modules do not take this extra state \(ValueError: cannot take it\), "
    "and have what they had; nothing else has changed",
    "state": "RuntimeError: rank 1: modules do not take this extra state .*, and have what they had; nothing else",
    "group": "CheckpointError: rank 0: .*: parameter group 2 was saved with mine=None, but has a tensor here",
    "broken off": r"CheckpointError: rank 1: .*ema fits, but putting it in place broke off \(TypeError: 'NoneType'.*"
    "load again before you train",
}


def test_what_can_fail_fails_before_anything_has_changed(ranks, tmp_path):
    for said in ranks.run(half_loads, str(tmp_path), ranks=2):
        for what, message in said.items():
            assert re.match(HALF_LOADS[what], message), f"{what}: {message}"
    model = Picky("good")
    before = model.linear.weight.clone()
    with pytest.raises(CheckpointError, match=r"do not take this extra state .*nothing else has changed"):
        zerolab.load_model_weights(tmp_path / "bad", model)
    assert model.notes == ["good"] and torch.equal(model.linear.weight, before)
    zerolab.load_model_weights(tmp_path / "good", model)
    assert model.sum == 30.0 and not model.sum.requires_grad, "made of the weights that were loaded"


# -- saving: what is refused, what is replaced, what is kept ---------------------------------------------------------


def refused_saves(folder: str) -> dict[str, str]:
    """Each refused save leaves the old checkpoint in place, and nothing else."""
    said = {}
    case = Mixed()
    zero, optimizer = fresh(case, 2)
    train(case, zero, optimizer, range(1))
    path = Path(folder) / "step-7"
    zerolab.save(path, zero, optimizer)
    mine = zero.rank == 1  # something is wrong on this rank alone

    def save(to: Path = path, keep: Any = None, other: Any = optimizer, **extra: Any) -> str:
        message = attempt(lambda: zerolab.save(to, zero, other, keep=keep, **extra))
        assert zero.rank or not list(Path(folder).glob("*.tmp-*")), "nothing is left behind"
        return message

    said["extra"] = save(thing=torch.zeros(2))
    said["keys"] = save(schedule={"milestones": Counter([3, 8])})
    said["link"] = save(Path(folder) / "link")
    said["old"] = save(Path(folder) / "new")
    said["keep 0"] = save(keep=0)
    said["keep what"] = save(Path(folder) / "last", keep=2)
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    said["stranger"] = save(other=stranger if mine else optimizer)
    (Path(folder) / "mine").mkdir(exist_ok=True)
    (Path(folder) / "mine" / "thesis.tex").touch()
    said["foreign"] = save(Path(folder) / "mine")
    said["two names"] = save(Path(folder) / f"step-{7 + zero.rank}")
    (Path(folder) / f"own-{zero.rank}").mkdir()
    said["two folders"] = save(Path(folder) / f"own-{zero.rank}" / "step-7")
    outside = os.getcwd()
    os.chdir(Path(folder) / "mine" if mine else Path(folder) / "own-0")
    said["here"], said["empty path"], said["root"] = save("."), save(""), save("/")  # empty, on rank 0
    said["no path"] = save(None if mine else path)
    os.chdir(outside)
    first = next(p for p in zero.units[0].params if p in optimizer.state)
    state, original = optimizer.state[first], dict(optimizer.state[first])
    if mine:
        state["step"] = state["step"] + 1
    said["disagree"] = save()
    state["step"] = original["step"]
    if mine:
        state["row"] = torch.zeros(first.numel() + 1)
    said["shape"] = save()
    state.pop("row", None)
    if mine:
        state["exp_avg"] = state["exp_avg"].to(torch.float8_e5m2)
    said["dtype"] = save()
    state["exp_avg"] = original["exp_avg"]
    with zero.full_parameters():
        said["inside"] = save()
    if mine:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limit[1]))  # the disk is full
    said["full"] = save()
    if mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    zero.comm.exchange(None, "end")
    assert sorted(p.name for p in Path(folder).iterdir()) == ["link", "mine", "new.old", "own-0", "own-1", "step-7"]
    assert not list(Path(folder).glob("own-?/*"))
    again, other = fresh(case, 1)
    said["load of root"] = attempt(lambda: zerolab.load("/", again, other))
    zerolab.load(f"{path}/", again, other)
    assert same(held(again, other), held(zero, optimizer))
    return said


REFUSED = {
    "extra": "rank 0: extras must be JSON",
    "keys": "rank 0: extras must be JSON .*: 3 is a key, and would come back as a string. Make a list of pairs",
    "link": "rank 0: .*link is a symbolic link; save to the folder that it leads to",
    "old": "rank 0: .*new.old is no zerolab checkpoint, and has the name that new gets meanwhile",
    "keep 0": "rank 0: keep=0 must be at least 1",
    "keep what": "rank 0: keep=2 needs a path that ends in digits, not last",
    "stranger": r"rank 1: AdamW holds a parameter \(group 0, number 0\) that does not belong to this Zero2",
    "foreign": "rank 0: .*mine exists and is not a zerolab checkpoint, so it is left alone",
    "two names": "rank 1 saves to .*step-8, rank 0 to .*step-7: pass the same path",
    "two folders": r"rank 1: there is no .*own-1/step-7.tmp-\w+, which rank 0 has made for .*own-0/step-7: all ranks",
    "here": "rank 0: .*own-0 is the working directory, or above it, and a save replaces the folder: save to a new one",
    "empty path": "rank 0: .*own-0 is the working directory",
    "root": "rank 0: / is the working directory, or above it",
    "no path": "rank 1: TypeError: expected str",
    "load of root": "rank 0: / is not a zerolab checkpoint: there is no /manifest.json",
    "disagree": "rank 0: optimizer state of .* is .* on rank 0, but .* on rank 1",
    "shape": r"rank 1: optimizer state row of .* has shape \(\d+,\): it is neither one number nor one per element",
    "dtype": "rank 1: exp_avg of scale has dtype torch.float8_e5m2",
    "inside": "rank 0: a checkpoint cannot be saved or loaded inside",
    "full": "rank 1: OSError: .*File too large",
}


def test_refused_saves(ranks, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "new.old").mkdir()
    (tmp_path / "new.old" / "notes").touch()
    for said in ranks.run(refused_saves, str(tmp_path), ranks=2):
        for what, message in said.items():
            assert re.match(f"CheckpointError: {REFUSED[what]}", message), f"{what}: {message}"


def save_many(folder: str) -> None:
    zero, optimizer = fresh(CASES["plain"], 2)
    top = Path(folder)
    for number in (8, 9, 10, 100, 11, 12):
        zerolab.save(top / f"run-{number}", zero, optimizer, number=number, keep=3)
    zerolab.save(top / "run-12", zero, optimizer, number=12.5)


def loaded_number(folder: str) -> Any:
    zero, optimizer = fresh(CASES["plain"], 3)
    return zerolab.load(folder, zero, optimizer)["number"]


def test_what_is_kept(ranks, tmp_path):
    for name in (
        "step-1",
        "run-2",
        "other-3.tmp-x",
        "run-12.tmp-01230123",
        "run-4.tmp-89ab89ab",
    ):  # the last two: killed
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    (tmp_path / "run-100").mkdir()  # empty, so it may be used
    (tmp_path / "run-3").symlink_to(tmp_path / "run-2")  # moved elsewhere, say
    ranks.run(save_many, str(tmp_path), ranks=2)
    left = ["other-3.tmp-x", "run-10", "run-100", "run-11", "run-12", "run-2", "run-3", "step-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left, "only old checkpoints of this name go"
    assert ranks.run(loaded_number, str(tmp_path / "run-12"), ranks=1) == [12.5]
    (tmp_path / "run-11").rename(tmp_path / "run-11.old")  # killed between the two renames
    assert ranks.run(loaded_number, str(tmp_path / "run-11"), ranks=3) == [11] * 3


def save_beside_damaged(folder: str) -> list[list[str]]:
    """Save step-1 to step-7, keeping two, while 3 and 4 are cut off and 5 is left twice. What is there, each time."""
    zero, optimizer = fresh(CASES["plain"], 2)
    top, seen = Path(folder), []
    for number in range(1, 8):
        zerolab.save(top / f"step-{number}", zero, optimizer, keep=2)
        zero.comm.exchange(None, "saved")
        if zero.rank == 0:
            seen.append(sorted(path.name for path in top.iterdir()))
            if number in (3, 4):
                name = ("rank-00001-of-00002.safetensors", "manifest.json")[number - 3]
                os.truncate(top / f"step-{number}" / name, 100)
            if number == 5:
                shutil.copytree(top / "step-5", top / "step-5.old")  # killed before the last step of a save
        zero.comm.exchange(None, "damaged")
    return seen


def test_damaged_checkpoints_do_not_count(ranks, tmp_path):
    """While a damaged one is among the newest, two whole ones remain; it goes when both are newer."""
    seen, _ = ranks.run(save_beside_damaged, str(tmp_path), ranks=2)
    assert seen == [
        ["step-1"],
        ["step-1", "step-2"],
        ["step-2", "step-3"],
        ["step-2", "step-3", "step-4"],
        ["step-2", "step-3", "step-4", "step-5"],
        ["step-5", "step-5.old", "step-6"],
        ["step-6", "step-7"],
    ]


class Turned(Mixed):
    """The same model, with its convolution in the default memory order."""

    def model(self) -> nn.Module:
        return Everything().to(memory_format=torch.contiguous_format)


def turned(folder: str) -> None:
    """Elements must agree by index, not by place in memory."""
    for first, second, path in ((Mixed(), Turned(), "a"), (Turned(), Mixed(), "b")):
        zero, optimizer = fresh(first, 3)
        train(first, zero, optimizer, range(1))
        zerolab.save(f"{folder}/{path}", zero, optimizer)
        again, other = fresh(second, 0)
        zerolab.load(f"{folder}/{path}", again, other)
        sharded, third = fresh(second, 2)
        zerolab.load(f"{folder}/{path}", sharded, third)
        plain = second.model()
        zerolab.load_model_weights(f"{folder}/{path}", plain)
        right = zero.full_state_dict()
        for state in (again.full_state_dict(), sharded.full_state_dict(), plain.state_dict()):
            assert all(torch.equal(state[name], value) for name, value in right.items() if "running" not in name)
        assert again.model.conv.weight.is_contiguous() == isinstance(second, Turned)
        train(second, sharded, third, range(1, 2))
        train(second, again, other, range(1, 2))
        one, two = again.full_state_dict(), sharded.full_state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_another_memory_order(ranks, tmp_path):
    ranks.run(turned, str(tmp_path), ranks=2)


# -- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("background", [pytest.param([], marks=pytest.mark.exhaustive), ["background"]])
def test_a_save_killed_at_every_moment(tmp_path, background):
    """One process. After each death either the old checkpoint or the new one loads, and nothing piles up."""
    command = [sys.executable, str(Path(__file__).parent / "jobs_crash.py"), str(tmp_path), *background]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=600
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and said[-1] == {"left": ["checkpoint"]}, done.stdout + done.stderr
    loaded = [line["loaded"] for line in said if "loaded" in line]
    assert loaded == sorted(loaded, reverse=True) and len(loaded) > 12 and loaded.count("old") > 6
    before = [line["before"] for line in said if "before" in line]
    renames = [i for i, (event, _) in enumerate(before) if event == "os.rename"]
    # The first rename moves the old one aside, the second puts the new one in its place.
    assert len(renames) == 3 and loaded.index("new") == len(jobs_crash.SIZES) + renames[1] + 1


def die_while_saving(path: str, rank: int, death: str) -> None:
    case = CASES["plain"]
    torch.manual_seed(0)
    zero, optimizer = fresh(case, 2)
    train(case, zero, optimizer, range(1))
    zerolab.save(path, zero, optimizer, number=1)
    train(case, zero, optimizer, range(1, 2))
    if zero.rank == rank:
        if death == "writing":
            jobs_crash.die_when_writing(5000)
        else:
            jobs_crash.die_at(int(death), str(Path(path).parent))
    zerolab.save(path, zero, optimizer, number=2)


def one_step(path: str) -> bool:
    """Does the checkpoint hold the state after one step?"""
    case = CASES["plain"]
    torch.manual_seed(0)
    zero, optimizer = fresh(case, 2)
    train(case, zero, optimizer, range(1))
    again, other = fresh(case, 3)
    return zerolab.load(path, again, other)["number"] == 1 and same(held(zero, optimizer), held(again, other))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "death"), [(1, "writing"), (1, "1"), (0, "8")])
def test_a_rank_that_dies_while_all_save(ranks, tmp_path, rank, death):
    path = tmp_path / "checkpoint"
    with pytest.raises(zerolab.RankError, match=f"rank {rank} of 2 was killed by SIG(KILL|XFSZ)"):
        ranks.run(die_while_saving, str(path), rank, death, ranks=2)
    assert all(ranks.run(one_step, str(path), ranks=2))


def saves_while_it_trains(folder: str) -> dict[str, str]:
    """A save in the background, beside one in the foreground, while training goes on."""
    case = CASES["plain"]
    torch.manual_seed(0)
    zero, optimizer = fresh(case, 2)
    train(case, zero, optimizer, range(2))
    zerolab.save(f"{folder}/before", zero, optimizer, number=[1])
    number = [1]
    saving = zerolab.save(f"{folder}/meanwhile", zero, optimizer, background=True, number=number)
    assert saving is not None
    train(case, zero, optimizer, range(2, 4))
    number.append(2)
    said = {"early": attempt(lambda: zerolab.read_extra(f"{folder}/meanwhile"))}
    for again in ("second", "third"):
        said[again] = attempt(lambda: zerolab.save(f"{folder}/second", zero, optimizer))
    saving.wait()
    saving.wait()
    states = []
    for name in ("before", "meanwhile"):
        again, other = fresh(case, 3)
        assert zerolab.load(f"{folder}/{name}", again, other) == {"number": [1]}
        states.append(held(again, other))
    assert same(*states)
    zerolab.save(f"{folder}/second", zero, optimizer)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if zero.rank == 1:  # its disk is full, as it were
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        saving = zerolab.save(f"{folder}/second", zero, optimizer, background=True)
        said["failed"] = attempt(saving.wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {key: str(value) for key, value in said.items()}


def test_a_save_in_the_background(ranks, tmp_path):
    for said in ranks.run(saves_while_it_trains, str(tmp_path), ranks=2):
        assert "is not a zerolab checkpoint" in said["early"]
        assert "first call wait()" in said["second"] and said["third"] == said["second"]
        assert "rank 1: " in said["failed"] and "File too large" in said["failed"]
    assert sorted(os.listdir(tmp_path)) == ["before", "meanwhile", "second"]


# -- what is read, and that nothing is executed ----------------------------------------------------------------------


class Wide(Case):
    units = (nn.Linear,)

    def model(self) -> nn.Module:
        return nn.Linear(1024, 4096, bias=False)  # 16 MiB


def save_wide(path: str) -> None:
    zerolab.save(path, *fresh(Wide(), 3))


def bytes_read(path: str, stage: int) -> int:
    """How many bytes this process asks the system for while it loads."""
    zero, optimizer = fresh(Wide(), stage)
    before = read_so_far()
    zerolab.load(path, zero, optimizer)
    return read_so_far() - before


def read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
def test_a_rank_reads_what_it_needs(ranks, tmp_path):
    mib = 1 << 20
    ranks.run(save_wide, str(tmp_path / "1"), ranks=1)
    ranks.run(save_wide, str(tmp_path / "3"), ranks=3)
    for name in ("1", "3"):
        for size in ranks.run(bytes_read, str(tmp_path / name), 3, ranks=4):
            assert 4 * mib <= size < 6.5 * mib, "a quarter, and at each end at most one chunk more"
        assert 16 * mib <= ranks.run(bytes_read, str(tmp_path / name), 0, ranks=2)[0] < 16.5 * mib


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


FILES = ("manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")
Damage = tuple[str, int, float, int]  # what, to which file, where (0 to 1), and a number to do it with

DAMAGE = st.tuples(
    st.sampled_from(["cut", "flip", "swap", "delete", "append", "bomb", "foreign", "folder", "edit", "edit", "space"]),
    st.integers(0, 2),
    st.floats(0, 1),
    st.integers(0, 255),
)


def damaged(files: dict[str, bytes], foreign: dict[str, bytes], damage: list[Damage], bomb: bytes) -> dict[str, Any]:
    """The files after the damage; None stands for a folder of that name."""
    files = dict(files)
    for what, number, where, value in damage:
        name = FILES[number]
        data = bytearray(files.get(name) or b"")
        at = min(int(where * len(data)), len(data) - 1)
        if what == "cut":
            files[name] = bytes(data[:at])
        elif what == "flip" and data:
            data[at] ^= 1 << value % 8
            files[name] = bytes(data)
        elif what == "swap":
            other = FILES[(number + 1) % 3]
            files[name], files[other] = files.get(other, b""), files.get(name, b"")
        elif what == "delete":
            files.pop(name, None)
        elif what == "append":
            files[name] = bytes(data) + bytes([value]) * (1 + value % 9)
        elif what == "bomb":
            files[name] = bomb
        elif what == "foreign":
            files[name] = foreign[name]
        elif what == "folder":
            files[name] = None
        elif what in ("edit", "space") and files.get(FILES[0]):
            files[FILES[0]] = edited(files[FILES[0]], where, value, what == "space")
    return files


def edited(text: bytes, where: float, value: int, harmless: bool) -> bytes:
    """The manifest with one value changed or removed or, if `harmless`, only formatted differently."""
    try:
        manifest = json.loads(text)
    except ValueError:
        return text + b" "
    if harmless:
        return json.dumps(manifest, indent=value % 5, sort_keys=True).encode()
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(manifest)
    node, key = places[min(int(where * len(places)), len(places) - 1)]
    old = node[key]
    if value % 4 == 0:
        del node[key]
    elif isinstance(old, str):
        node[key] = old[:-1] + chr(65 + value % 26)
    elif isinstance(old, int | float):
        node[key] = old + value
    else:
        node[key] = [None, {}, [], "x", 0][value % 5]
    return json.dumps(manifest).encode()


def load_damaged(good: str, other: str, folder: str, examples: int) -> dict[str, int]:
    """Load checkpoints that hypothesis has damaged: each is refused, or the damage is harmless. Counts both."""
    zero, optimizer = fresh(Mixed(), 2)
    zerolab.load(good, zero, optimizer)
    right = snapshot(zero, optimizer)[:4]
    plain, weights = Everything(), Everything()
    zerolab.load_model_weights(good, weights)
    zero, optimizer = fresh(Mixed(), 2)
    train(Mixed(), zero, optimizer, range(1))
    zerolab.save(f"{folder}/start", zero, optimizer)
    zerolab.load(f"{folder}/start", zero, optimizer)
    start = snapshot(zero, optimizer)
    files, foreign = ({name: (Path(f) / name).read_bytes() for name in FILES} for f in (good, other))
    bomb = pickle.dumps(Bomb(f"{folder}/mark"))
    path = Path(folder) / "damaged"
    counts = {"refused": 0, "harmless": 0}

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.lists(DAMAGE, min_size=1, max_size=2))
    @example([("edit", 0, 0.0, 1)])
    @example([("bomb", 0, 0.0, 0)])
    @example([("bomb", 1, 0.0, 0)])
    def check(damage: list[Damage]) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        broken = damaged(files, foreign, damage, bomb)
        for name, data in broken.items():
            (path / name).mkdir() if data is None else (path / name).write_bytes(data)
        said = attempt(lambda: zerolab.load(path, zero, optimizer))
        if said == "no error":
            assert same(snapshot(zero, optimizer)[:3], right[:3]), damage
            counts["harmless"] += 1
            zerolab.load(f"{folder}/start", zero, optimizer)
        else:
            wrong = [name for name in FILES if broken.get(name) != files[name]]
            assert said.startswith(f"CheckpointError: rank 0: {path}"), (damage, said)
            assert any(name in said for name in wrong), (damage, said)
            assert FILES[0] in wrong or re.search(
                r"(parameters|optimizer/\w+|rank 0/buffers|rank 0/generators)/", said
            ), said
            counts["refused"] += 1
        assert same(snapshot(zero, optimizer), start), damage
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        if attempt(lambda: zerolab.load_model_weights(path, plain)).startswith("CheckpointError"):
            assert same(plain.state_dict(), before)
        else:
            assert same(plain.state_dict(), weights.state_dict())

    check()
    assert not Path(f"{folder}/mark").exists()
    pickle.loads(bomb)
    assert Path(f"{folder}/mark").exists(), "the bomb is one"
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("examples", [150])
def test_damaged_checkpoints(ranks, saved, tmp_path, examples):
    """None loads with wrong numbers, none crashes the process, and nothing in them is executed."""
    good, other = f"{saved.folder}/2-3", f"{saved.folder}/2-0"
    counts = ranks.run(load_damaged, good, other, str(tmp_path), examples, ranks=1)[0]
    assert counts["refused"] > examples * 2 / 3 and counts["harmless"] > 0


# -- the extras, before there is a model ------------------------------------------------------------------------------


def save_extra(folder: str) -> None:
    zero, optimizer = fresh(CASES["plain"], 3)
    zerolab.save(f"{folder}/run", zero, optimizer, model={"layers": 3}, rank=zero.rank, best=0.25)


def test_read_extra(ranks, tmp_path):
    ranks.run(save_extra, str(tmp_path), ranks=2)
    path = tmp_path / "run"
    assert zerolab.read_extra(path) == {"model": {"layers": 3}, "rank": 0, "best": 0.25}
    assert zerolab.read_extra(os.path.relpath(path))["model"] == {"layers": 3}
    for file in path.glob("*.safetensors"):
        file.unlink()  # it reads only the manifest
    path.rename(tmp_path / "run.old")  # killed between two renames
    assert zerolab.read_extra(path)["best"] == 0.25
    manifest = tmp_path / "run.old" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.25", "0.26"))
    with pytest.raises(CheckpointError, match="is damaged"):
        zerolab.read_extra(path)
    with pytest.raises(CheckpointError, match="is not a zerolab checkpoint"):
        zerolab.read_extra(tmp_path)
    manifest.write_bytes(pickle.dumps({"content": {"extra": {}}}))
    with pytest.raises(CheckpointError, match="is damaged"):
        zerolab.read_extra(path)


# -- buffers and dtypes that not everything fits into ------------------------------------------------------------------


class Expanded(nn.Module):
    def __init__(self, expanded: bool, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        mask = torch.full((3, 1), value).expand(3, 4)
        self.register_buffer("mask", mask if expanded else torch.arange(12.0).reshape(3, 4))


def expanded_buffers(folder: str) -> dict[str, Any]:
    said: dict[str, Any] = {}

    def build(expanded: bool, value: float) -> tuple[Any, Any]:
        zero = zerolab.Zero2(Expanded(expanded, value))
        return zero, torch.optim.SGD(zero.model.parameters(), lr=0.1)

    saved, plain = build(True, 5.0), build(False, 0.0)
    zerolab.save(f"{folder}/expanded", *saved)
    zerolab.save(f"{folder}/plain", *plain)
    for way in ("load", "state"):
        zero, optimizer = build(True, 1.0)
        before = zero.full_state_dict()
        load = zero.load_full_state_dict
        if way == "load":
            load = lambda of, zero=zero, optimizer=optimizer: zerolab.load(of, zero, optimizer)  # noqa: E731
        good, bad = (
            (f"{folder}/expanded", f"{folder}/plain")
            if way == "load"
            else (
                saved[0].full_state_dict(),
                plain[0].full_state_dict(),
            )
        )
        said[f"{way}, refused"] = attempt(lambda load=load, bad=bad: load(bad))
        assert same(zero.full_state_dict(), before), "nothing has changed"
        load(good)
        assert same(zero.full_state_dict(), saved[0].full_state_dict())
    return said


def test_an_expanded_buffer_is_loaded_or_refused_before_anything_changes(ranks, tmp_path):
    for said in ranks.run(expanded_buffers, str(tmp_path), ranks=2):
        assert all("mask has rows that differ" in message for message in said.values()), said
    model = Expanded(True, 1.0)
    zerolab.load_model_weights(tmp_path / "expanded", model)
    assert model.mask.stride() == (1, 0) and model.mask.unique().tolist() == [5.0]


def with_buffer(folder: str, values: Tensor) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("values", values)
    zero = zerolab.Zero1(model)
    zerolab.save(folder, zero, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("values", "fits", "not_into"),
    [
        (torch.tensor([300, -1]), torch.int32, torch.int8),
        (torch.tensor([0, 1]), torch.bool, None),
        (torch.tensor([0, 2]), torch.int8, torch.bool),
        (torch.tensor([1e6, 0.1]), torch.bfloat16, torch.float16),
        (torch.tensor([torch.inf, torch.nan]), torch.float16, None),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_into_a_dtype(ranks, tmp_path, values, fits, not_into):
    ranks.run(with_buffer, str(tmp_path / "saved"), values, ranks=1)
    for dtype in (fits, not_into):
        model = nn.Linear(2, 2)
        model.register_buffer("values", torch.zeros(2, dtype=dtype))
        before = model.weight.clone()
        if dtype is fits:
            zerolab.load_model_weights(tmp_path / "saved", model)
            assert torch.allclose(model.values.double(), values.double(), rtol=1e-2, equal_nan=True)
        elif dtype is not None:
            with pytest.raises(CheckpointError, match=f"values that {dtype}, its dtype here, cannot hold"):
                zerolab.load_model_weights(tmp_path / "saved", model)
            assert torch.equal(model.weight, before)
