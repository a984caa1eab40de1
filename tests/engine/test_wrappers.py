"""Wrappers and hooks that rename what a model saves: the keys are those of the unsharded model's own state_dict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_common import attempt
from jobs_common import worlds
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import zerolab
from zerolab.trial.numbers import Block, Stack, words
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


def wrapped(impl: CheckpointImpl, model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


def parametrized(model: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrizations.spectral_norm(model.blocks[0].up)
    return model


def compiled_parts(model: nn.Module) -> nn.Module:
    model.head = torch.compile(model.head, backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def split(model: nn.Module) -> nn.Module:
    """Saved as two halves and a transpose, as fused projections often are."""

    def on_save(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        whole = state.pop(f"{prefix}up.weight")
        state[f"{prefix}up.first"], state[f"{prefix}up.rest"] = whole[:8], whole[8:]
        state[f"{prefix}down.turned"] = state.pop(f"{prefix}down.weight").t()

    def on_load(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if f"{prefix}up.first" in state:
            state[f"{prefix}up.weight"] = torch.cat([state.pop(f"{prefix}up.{half}") for half in ("first", "rest")])
            state[f"{prefix}down.weight"] = state.pop(f"{prefix}down.turned").t()

    for block in model.blocks:
        block._register_state_dict_hook(on_save)
        block.register_load_state_dict_pre_hook(on_load)
    return model


class Noting(nn.Linear):
    """Has extra state, which is not the same on each rank, and buffers under two names."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.notes: Any = {"seen": [dist.get_rank() if dist.is_initialized() else 0, None, "x"]}
        self.register_buffer("count", torch.zeros(3))
        self.again = nn.Module()
        self.again.register_buffer("count", self.count)

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


class Plainer(Noting):
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def noting(model: nn.Module) -> nn.Module:
    model.head = Noting(model.head.in_features, model.head.out_features)
    return wrapped(CheckpointImpl.NO_REENTRANT, model)


def left_out(model: nn.Module) -> nn.Module:
    """A frozen table that its owner does not save."""
    model.emb.weight.requires_grad_(False)
    model._register_state_dict_hook(lambda module, state, prefix, metadata: state.__delitem__("emb.weight"))
    return model


MODELS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {  # and whether the keys are the plain model's
    "checkpointed": (partial(wrapped, CheckpointImpl.NO_REENTRANT), True),
    "checkpointed, reentrant": (partial(wrapped, CheckpointImpl.REENTRANT), True),
    "parametrized": (parametrized, False),
    "old weight norm": (lambda model: (nn.utils.weight_norm(model.head), model)[1], False),
    "compiled parts": (compiled_parts, False),
    "compiled": (partial(torch.compile, backend="eager"), False),
    "split": (split, False),
    "extra state": (noting, False),
    "left out": (left_out, False),
}
FIRST = ("checkpointed", "parametrized", "extra state", "left out")


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0](Stack())


def same(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(state) == list(expected) and all(
        torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]
        for key, value in state.items()
    )


def step(zero: zerolab.Engine, optimizer: torch.optim.Optimizer, number: int) -> None:
    PLAIN.loss(zero.model, zero.rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def round_trips(name: str, late: bool, folder: str) -> None:
    """Full state dicts, checkpoints and weights of one kind of model, each stage's loaded by the next stage."""
    wrap, plain_keys = MODELS[name]
    for stage in range(4):
        expected = {k: v.clone() if isinstance(v, Tensor) else v for k, v in make(name).state_dict().items()}
        torch.manual_seed(0)
        zero = zerolab.shard(Stack(), stage, units=Block) if late else zerolab.shard(make(name), stage, units=Block)
        model = wrap(zero.model) if late else zero.model
        state = zero.full_state_dict()
        if name == "extra state":  # the first rank's
            expected["head._extra_state"] = {"seen": [0, None, "x"]}
        assert same(state, expected), (list(state), list(expected))
        assert state._metadata.keys() == make(name).state_dict()._metadata.keys()
        assert list(zero.full_state_dict(rank0_only=True)) == (list(expected) if zero.rank == 0 else [])
        make(name, 1).load_state_dict(state, strict=name != "left out")
        if plain_keys:
            Stack().load_state_dict(state)

        optimizer = PLAIN.optimizer(model)
        step(zero, optimizer, 0)
        after = zero.full_state_dict()
        zerolab.save(f"{folder}/{stage}", zero, optimizer)
        zerolab.export_weights(f"{folder}/{stage}.safetensors", zero)
        step(zero, optimizer, 1)
        last = zero.full_state_dict()
        assert not same(last, after)

        for other in (name, *(["checkpointed", None] if plain_keys else [])):
            torch.manual_seed(5)
            fresh = Stack() if other is None else make(other, 5)
            again = zerolab.shard(fresh, (stage + 1) % 4, units=Block)
            frozen = [p.detach().clone() for p in fresh.parameters() if not p.requires_grad]
            again.load_full_state_dict(after if again.rank == 0 else None)
            assert same(again.full_state_dict(), after)
            assert all(
                torch.equal(p, q)
                for p, q in zip((p for p in fresh.parameters() if not p.requires_grad), frozen, strict=True)
            ), "what the state dict leaves out keeps its values"
            zero_state = make(name, 6).state_dict() if other else Stack().state_dict()
            again.load_full_state_dict(zero_state)
            resumed = PLAIN.optimizer(fresh)
            zerolab.load(f"{folder}/{stage}", again, resumed)
            assert same(again.full_state_dict(), after)
            if name != "left out":  # where the first step's table was another
                step(again, resumed, 1)
                assert same(again.full_state_dict(), last)
            if name not in ("split", "left out"):  # their checkpoints have parameters that their state dicts lack
                alone = Stack() if other is None else make(other, 7)
                zerolab.load_model_weights(f"{folder}/{stage}", alone)
                assert same(alone.state_dict(), after)
            if name == "extra state":
                plainer = make("extra state", 7)
                plainer.head.__class__ = Plainer
                said = attempt(lambda s=stage, model=plainer: zerolab.load_model_weights(f"{folder}/{s}", model))
                assert said.endswith("only the checkpoint has head._extra_state"), said
            alone = Stack() if other is None else make(other, 7)
            if name == "extra state":
                alone.head.notes = {"seen": [0, None, "x"]}  # not in a safetensors file
            zerolab.load_model_weights(f"{folder}/{stage}.safetensors", alone)
            assert same(alone.state_dict(), after)


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.exhaustive] * (m not in FIRST)) for m in MODELS])
def test_what_a_wrapped_model_saves(ranks, tmp_path: Path, name, n):
    ranks.run(round_trips, name, False, str(tmp_path), ranks=n)


@pytest.mark.slow
@pytest.mark.parametrize("name", worlds("checkpointed, reentrant", others=["checkpointed"]))
def test_wrapped_after_sharding(ranks, tmp_path: Path, name):
    ranks.run(round_trips, name, True, str(tmp_path), ranks=2)


class Halved(Stack):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.half() for name, value in super().state_dict(*args, **kwargs).items()}


class OnHost(Stack):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.cpu() for name, value in super().state_dict(*args, **kwargs).items()}


class WithTensors(Noting):
    def get_extra_state(self) -> Any:
        return {"scale": torch.full((3,), 2.0 + dist.get_rank())}


def refusals(folder: str) -> list[str]:
    said = []
    for stage in range(4):
        zero = zerolab.shard(Halved(), stage, units=Block)
        said.append(attempt(zero.full_state_dict))
        said.append(attempt(zerolab.shard(OnHost(), stage, units=Block).full_state_dict))
        with zero.full_parameters():
            assert zero.model.state_dict()["emb.weight"].dtype == torch.float16
            said.append(attempt(zero.full_state_dict))
        zero.model(words(0, 0, 2, 5))  # and the model is as before

        model = Stack()
        model.head = WithTensors(8, 13)
        zero = zerolab.shard(model, stage, units=Block)
        state = zero.full_state_dict()
        assert state["head._extra_state"]["scale"].tolist() == [2.0] * 3
        zero.load_full_state_dict(state if zero.rank == 0 else None)
        assert model.head.notes["scale"].tolist() == [2.0] * 3
        said.append(attempt(lambda zero=zero: zerolab.save(f"{folder}/x", zero, PLAIN.optimizer(zero.model))))
    return said


def test_what_cannot_be_saved(ranks, tmp_path: Path):
    for said in ranks.run(refusals, str(tmp_path), ranks=2):
        assert len(said) == 16
        for computed, moved, inside, tensors in zip(*(said[i::4] for i in range(4)), strict=True):
            assert computed.startswith("RuntimeError: emb.weight: a hook of Halved computes its state dict")
            assert moved.startswith("RuntimeError: a hook of OnHost computes its state dict from values")
            assert "full_parameters()" in computed and "inside forward, backward or full_parameters()" in inside
            assert "head._extra_state" in tensors and "nor JSON" in tensors and tensors.startswith("CheckpointError")
