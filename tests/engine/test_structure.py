"""A model that is changed, copied or pickled after it was sharded."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cases_common import attempt
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.optim.swa_utils import AveragedModel

import zerolab
from zerolab.trial.numbers import Block, Stack, words
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.emb.weight


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def other_parameter(module: nn.Module, name: str) -> None:
    setattr(module, name, nn.Parameter(torch.zeros_like(getattr(module, name))))


REFUSED: dict[str, tuple[type[Stack], Callable[[Stack], object], str]] = {
    "module": (Stack, lambda m: setattr(m, "head", nn.Linear(8, 13)), "head.weight was added or replaced"),
    "block": (Stack, lambda m: m.blocks.__setitem__(1, Block()), "blocks.1.norm.weight was added or replaced"),
    "one more": (Stack, lambda m: m.blocks.append(Block()), "blocks.3.norm.weight was added or replaced"),
    "parameter": (Stack, lambda m: other_parameter(m.head, "weight"), "head.weight was added or replaced"),
    "tied parameter": (Tied, lambda m: other_parameter(m.head, "weight"), "head.weight was added or replaced"),
    "new parameter": (Stack, lambda m: setattr(m, "scale", nn.Parameter(torch.ones(1))), "scale was added"),
    "LoRA": (Stack, lambda m: setattr(m.blocks[0], "up", LoRA(m.blocks[0].up)), "blocks.0.up.down.weight was added"),
    "tied later": (Stack, lambda m: setattr(m.head, "weight", m.emb.weight), "head.weight became what emb.weight is"),
    "parametrized": (
        Stack,
        lambda m: nn.utils.parametrize.register_parametrization(m.head, "weight", Doubled()),
        "head.parametrizations.weight.original became what head.weight is",
    ),
    "removed": (Stack, lambda m: m.blocks.__delitem__(2), "blocks.2.norm.weight, or"),
    "removed parameter": (Stack, lambda m: setattr(m.head, "bias", None), "head.bias, or"),
    "deleted parameter": (Stack, lambda m: delattr(m.head, "bias"), "head.bias, or"),
}


def use(what: str, zero: zerolab.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    if what == "forward":
        zero.model(words(zero.rank, 0, 2, 5))
    elif what == "part":
        zero.model.emb(words(zero.rank, 0, 2, 5))
    elif what == "step":
        optimizer.step()
    elif what == "save":
        zerolab.save(f"{folder}/{zero.stage}", zero, optimizer)
    elif what == "load":
        zero.load_full_state_dict(None)
    elif what == "full":
        zero.full_state_dict()
    elif what == "edit":
        with zero.full_parameters():
            pass


USES = ["forward", "part", "step", "save", "load", "full", "edit"]


def changed(name: str, folder: str) -> dict[tuple[int, str, bool], str]:
    """What each use says of a model that was changed after sharding, before its first forward and after it."""
    kind, change, _ = REFUSED[name]
    said = {}
    for stage in range(4):
        for used in (False, True):
            zero = zerolab.shard(kind(), stage, units=Block)
            optimizer = PLAIN.optimizer(zero.model)
            if used:
                PLAIN.loss(zero.model, zero.rank, 0).backward()
                optimizer.step()
                zero.model.emb(words(0, 0, 2, 5))
            change(zero.model)
            for what in USES:
                said[stage, what, used] = attempt(lambda w=what, z=zero, o=optimizer: use(w, z, o, folder))
    return said


@pytest.mark.parametrize("name", REFUSED)
def test_a_changed_model_is_refused(ranks, tmp_path: Path, name):
    for n in (1, 2, 3) if name in ("module", "removed") else (2,):
        for rank, said in enumerate(ranks.run(changed, name, str(tmp_path), ranks=n)):
            for case, message in said.items():
                assert REFUSED[name][2] in message, (case, message)
                assert "after sharding. Change the model before sharding it" in message
                assert f"rank {rank if case[1] != 'save' else 0}: " in message


def swap(model: Stack) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


ALLOWED: dict[str, Callable[[Stack], object]] = {
    "wrapped": partial(apply_activation_checkpointing, check_fn=lambda module: isinstance(module, Block)),
    "nothing to train": lambda m: setattr(m, "emb", nn.Sequential(m.emb, Doubled())),
    "compiled in place": lambda m: m.blocks[0].compile(backend="eager"),
    "compiled": lambda m: setattr(m, "head", torch.compile(m.head, backend="eager")),
    "a second name": lambda m: setattr(m, "tail", m.head),
    "frozen": lambda m: m.head.bias.requires_grad_(False),
    "swapped": swap,
}


def allowed(name: str) -> list[bool]:
    """Whether a sharded model changed in the middle of training goes on as an unsharded one does."""
    equal = []
    for stage in range(4):
        torch.manual_seed(0)
        plain = Stack()
        optimizers = [PLAIN.optimizer(plain)]
        torch.manual_seed(0)
        zero = zerolab.shard(Stack(), stage, units=Block)
        optimizers.append(PLAIN.optimizer(zero.model))
        for step in range(4):
            for model, optimizer in zip((plain, zero.model), optimizers, strict=True):
                if step == 2:
                    ALLOWED[name](model)
                PLAIN.loss(model, 0, step).backward()  # the same on each rank, so the mean is what one process has
                optimizer.step()
                optimizer.zero_grad()
        state, expected = zero.full_state_dict(), plain.state_dict()
        equal.append(
            list(state) == list(expected)
            and all(torch.allclose(state[key], expected[key], rtol=1e-4, atol=1e-6) for key in state)
        )
    return equal


@pytest.mark.parametrize("name", ALLOWED)
def test_a_change_without_parameters(ranks, name):
    assert ranks.run(allowed, name, ranks=2) == [[True] * 4] * 2


# -- copies ----------------------------------------------------------------------------------------------------------


def copies() -> dict[str, str]:
    said = {}
    for stage in range(4):
        zero = zerolab.shard(Stack(), stage, units=Block)
        for name, attempted in {
            "deepcopy": copy.deepcopy,
            "averaged": AveragedModel,
            "pickle": pickle.dumps,
            "save": lambda model: torch.save(model, io.BytesIO()),
        }.items():
            said[f"{name} {stage}"] = attempt(lambda made=attempted, model=zero.model: made(model))
            said[f"{name} block {stage}"] = attempt(lambda made=attempted, model=zero.model: made(model.blocks[1]))
        said[f"engine {stage}"] = attempt(lambda zero=zero: copy.deepcopy(zero))
        PLAIN.loss(zero.model, zero.rank, 0).backward()
    return said


def test_copies_say_what_to_do_instead(ranks):
    for said in ranks.run(copies, ranks=2):
        assert len(said) == 36
        for case, message in said.items():
            assert message.startswith("TypeError: a sharded model can be neither copied nor pickled"), (case, message)
            assert "zero.full_state_dict()" in message and "zerolab.EMA(zero, decay)" in message


def averages(stage: int, precision: zerolab.Precision | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    zero = zerolab.shard(Stack(), stage, units=Block)
    optimizer = PLAIN.optimizer(zero.model)
    mean = [p.detach().clone() for p in zero.model.parameters()]
    for step in range(4):
        PLAIN.loss(zero.model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(mean, [p.detach() for p in zero.model.parameters()], 1 - 0.9)
    torch._foreach_copy_([p.detach() for p in zero.model.parameters()], mean)
    zero.model(words(0, 0, 2, 5))
    return zero.full_state_dict()


def test_averages_of_slices(ranks):
    torch.manual_seed(0)
    model = Stack()
    optimizer = PLAIN.optimizer(model)
    mean = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    mean.update_parameters(model)
    for step in range(4):
        PLAIN.loss(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model)
    for stage in range(4):
        for state in ranks.run(averages, stage, ranks=2):
            assert all(torch.allclose(state[key], value) for key, value in mean.module.state_dict().items())


class Held(nn.Module):
    """Containers of 1 to 25 MB, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(400, 400) * 0.05 for _ in range(2))
        self.layers = nn.ModuleList([nn.Linear(400, 800), nn.Linear(800, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        for layer in self.layers:
            x = layer(x)
        return x


def trained_by_default(stage: int) -> list[str]:
    torch.manual_seed(0)
    zero = zerolab.shard(Held(), stage)
    zero.model(torch.ones(2, 400)).sum().backward()
    assert all(param.grad is not None for param in zero.model.parameters())
    return [unit.name for unit in zero.units]


def test_what_is_never_called_is_no_unit_by_default(ranks):
    for stage in (0, 3):
        assert ranks.run(trained_by_default, stage, ranks=2) == [["root", "layers.0"]] * 2
