"""The full model, assembled from the slices: to look at, edit, save or load. Engine's methods document the promises."""

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
def editing(engine: Engine) -> Iterator[None]:
    if not engine.is_idle() or engine.in_backward:
        raise RuntimeError("full_parameters() cannot be entered inside forward, backward or itself")
    engine.comm.phase = "full_parameters"
    gathered = {unit: _gather_master(unit) for unit in engine.units}
    for unit, flat in gathered.items():
        unit.show([nn.Parameter(view, requires_grad=False) for view in unit.layout.views(flat)])
    engine.bypassed = True
    try:
        yield
        engine.comm.phase = "full_parameters"
        for unit, flat in gathered.items():
            engine.comm.broadcast(flat, unit.name)
            _set_master(engine, unit, flat)
    finally:
        engine.bypassed = False
        for unit in engine.units:
            unit.show_params()


@torch.no_grad()
def gather_state_dict(engine: Engine, rank0_only: bool = False) -> dict[str, Tensor]:
    engine.forget_calls()
    engine.comm.phase = "full_state_dict"
    engine.check_in_step("full_state_dict")
    wanted = engine.rank == 0 or not rank0_only
    state = own_state_dict(engine)
    names_of: dict[int, list[str]] = {}
    for name, param in engine.model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    for unit in engine.units:
        flat = _gather_master(unit)
        if wanted:
            for param, view in zip(unit.params, unit.layout.views(flat), strict=True):
                copy = view.to("cpu", copy=True)
                for name in names_of[id(param)]:
                    state[name] = copy
    parameters = {name for names in names_of.values() for name in names}
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in parameters:
            buffer = value.detach().clone()
            engine.comm.broadcast(buffer, name)
            state[name] = buffer.to("cpu")
    return state if wanted else {}


@torch.no_grad()
def spread_state_dict(engine: Engine, state: dict[str, Tensor] | None) -> None:
    engine.forget_calls()
    engine.comm.phase = "load_full_state_dict"
    own = own_state_dict(engine)
    problem = _compare(engine, own, state) if engine.rank == 0 else None
    problem = engine.comm.exchange(problem, "loading of a state dict")[0]
    if problem:
        raise ValueError(f"this state dict does not fit {type(engine.model).__name__}: {problem}")
    values = state or {}
    for unit in engine.units:
        flat = torch.zeros(unit.layout.size, dtype=unit.master.dtype, device=engine.comm.device)
        if engine.rank == 0:
            for name, view in zip(unit.names, unit.layout.views(flat), strict=True):
                view.copy_(values[name])
        engine.comm.broadcast(flat, unit.name)
        _set_master(engine, unit, flat)
    for name, buffer in engine.model.named_buffers():
        if name in own:
            if engine.rank == 0:
                buffer.copy_(values[name])
            engine.comm.broadcast(buffer, name)


def refuse_state_dict(engine: Engine, module: nn.Module) -> None:
    """Let `state_dict()` and `load_state_dict()` of a sharded model say why not."""

    def refuse(what: str, instead: str) -> Any:
        def hook(*args: Any) -> None:
            if not engine.bypassed:
                raise RuntimeError(
                    f"model.{what}() of a model in stage {engine.stage} would take this rank's slices for full "
                    f"parameters; use {instead}, on all ranks"
                )

        return hook

    module.register_state_dict_pre_hook(refuse("state_dict", "zero.full_state_dict()"))
    module.register_load_state_dict_pre_hook(refuse("load_state_dict", "zero.load_full_state_dict(state)"))


def own_state_dict(engine: Engine) -> dict[str, Any]:
    """What the model itself would save on this rank: the right names, but slices."""
    engine.bypassed = True
    try:
        return engine.model.state_dict()
    finally:
        engine.bypassed = False


def _gather_master(unit: Unit) -> Tensor:
    """A copy of the full masters of `unit`, (N * S,)."""
    mine = unit.master.detach().to(unit.comm.device, copy=not unit.sharded)
    if not unit.sharded:
        return mine
    flat = torch.empty(unit.layout.size, dtype=mine.dtype, device=mine.device)
    unit.comm.all_gather(flat, mine, unit.name).wait()
    return flat


def _set_master(engine: Engine, unit: Unit, flat: Tensor) -> None:
    """Write this rank's part of the full masters `flat`, (N * S,)."""
    if unit.sharded:
        flat = unit.layout.shard(flat, unit.rank)
    unit.master.detach().copy_(flat)
    engine.master_changed(unit)


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
