"""The whole model, put together from the slices: to look at, to edit, to save, to load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine
    from zerolab.engine.unit import Unit


@contextmanager
def full_parameters(self: Engine) -> Iterator[None]:
    """Inside, the model shows whole parameters in the masters' dtype, on every rank, to look at or to edit in place.

    The first rank's edits are kept, on all ranks; after an error inside, none. All ranks must take part. The
    model may be called inside, but not trained.
    """
    self._forget_calls()
    if self._depth or self._in_backward or self._bypassed:
        raise RuntimeError("full_parameters() cannot be entered inside forward, backward or itself")
    self.comm.phase = "full_parameters"
    wholes = {unit: _gather_master(unit) for unit in self.units}
    for unit, flat in wholes.items():
        unit.show([nn.Parameter(view, requires_grad=False) for view in unit.layout.wholes(flat)])
    self._bypassed = True
    try:
        yield
        self.comm.phase = "full_parameters"
        for unit, flat in wholes.items():
            self.comm.broadcast(flat, unit.name)
            _set_master(self, unit, flat)
    finally:
        self._bypassed = False
        for unit in self.units:
            unit.show_params()


@torch.no_grad()
def full_state_dict(self: Engine, rank0_only: bool = False) -> dict[str, Tensor]:
    """The `state_dict` of the unsharded model, on the CPU, in the masters' dtype. All ranks must take part.

    rank0_only: the group's first rank gets it, the others an empty dict. Buffers are the first rank's.
    Gathers unit by unit, so that a rank holds one whole unit besides the result.
    """
    self._forget_calls()
    self.comm.phase = "full_state_dict"
    wanted = self.rank == 0 or not rank0_only
    state = _own_state_dict(self)
    names_of: dict[int, list[str]] = {}
    for name, param in self.model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    for unit in self.units:
        flat = _gather_master(unit)
        if wanted:
            for param, whole in zip(unit.params, unit.layout.wholes(flat), strict=True):
                copy = whole.to("cpu", copy=True)
                for name in names_of[id(param)]:
                    state[name] = copy
    parameters = {name for names in names_of.values() for name in names}
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in parameters:
            buffer = value.detach().clone()
            self.comm.broadcast(buffer, name)
            state[name] = buffer.to("cpu")
    return state if wanted else {}


@torch.no_grad()
def load_full_state_dict(self: Engine, state: dict[str, Tensor] | None) -> None:
    """Load the `state_dict` of an unsharded model. The first rank's counts; the others may pass None.

    Raises `ValueError` on every rank, before anything is changed, if names are missing or unexpected or shapes differ.
    """
    self._forget_calls()
    self.comm.phase = "load_full_state_dict"
    own = _own_state_dict(self)
    problem = _compare(self, own, state) if self.rank == 0 else None
    problem = self.comm.exchange(problem, "loading of a state dict")[0]
    if problem:
        raise ValueError(f"this state dict does not fit {type(self.model).__name__}: {problem}")
    state = state if self.rank == 0 else {}
    for unit in self.units:
        flat = torch.zeros(unit.layout.size, dtype=unit.master.dtype, device=self.comm.device)
        if self.rank == 0:
            for name, view in zip(unit.names, unit.layout.wholes(flat), strict=True):
                view.copy_(state[name])
        self.comm.broadcast(flat, unit.name)
        _set_master(self, unit, flat)
    for name, buffer in self.model.named_buffers():
        if name in own:
            if self.rank == 0:
                buffer.copy_(state[name])
            self.comm.broadcast(buffer, name)


def refuse_state_dict(engine: Engine, module: nn.Module) -> None:
    """Let `state_dict()` and `load_state_dict()` of a sharded model say why not."""

    def refuse(what: str, instead: str) -> Any:
        def hook(*args: Any) -> None:
            if not engine._bypassed:
                raise RuntimeError(
                    f"model.{what}() of a model in stage {engine.stage} would take this rank's slices for whole "
                    f"parameters; use {instead}, on all ranks"
                )

        return hook

    module.register_state_dict_pre_hook(refuse("state_dict", "zero.full_state_dict()"))
    module.register_load_state_dict_pre_hook(refuse("load_state_dict", "zero.load_full_state_dict(state)"))


def _own_state_dict(engine: Engine) -> dict[str, Any]:
    """What the model itself would save on this rank: the right names, but slices."""
    engine._bypassed = True
    try:
        return engine.model.state_dict()
    finally:
        engine._bypassed = False


def _gather_master(unit: Unit) -> Tensor:
    """The whole masters of `unit` (N * S,), a copy."""
    mine = unit.master.detach().to(unit.comm.device, copy=unit.master.numel() == unit.layout.size)
    if mine.numel() == unit.layout.size:
        return mine
    flat = torch.empty(unit.layout.size, dtype=mine.dtype, device=mine.device)
    unit.comm.all_gather(flat, mine, unit.name).wait()
    return flat


def _set_master(engine: Engine, unit: Unit, flat: Tensor) -> None:
    """Write this rank's part of the whole masters `flat` (N * S,)."""
    if unit.master.numel() < unit.layout.size:
        flat = unit.layout.shard(flat, unit.rank)
    unit.master.detach().copy_(flat)
    engine._changed(unit)


def _compare(engine: Engine, own: dict[str, Any], state: dict[str, Tensor] | None) -> str | None:
    if state is None:
        return "the first rank passed none"
    if missing := sorted(own.keys() - state.keys()):
        return f"missing {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
    if unexpected := sorted(state.keys() - own.keys()):
        return f"unexpected {', '.join(unexpected[:5])}{' ...' if len(unexpected) > 5 else ''}"
    shapes = {
        name: tuple(slot.shape)
        for unit in engine.units
        for name, slot in zip(unit.names, unit.layout.slots, strict=True)
    }
    shapes |= {name: tuple(buffer.shape) for name, buffer in engine.model.named_buffers() if name in own}
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            return f"{name} has shape {tuple(state[name].shape)}, expected {shape}"
    return None
