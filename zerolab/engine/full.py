"""The full model, assembled from the slices: to look at, edit, save or load. Engine's methods document the promises."""

from __future__ import annotations

import base64
import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zerolab.comm.collectives import Comm
from zerolab.comm.native import each_once, rows_are_one
from zerolab.engine.backward import Backward
from zerolab.engine.forward import Forward
from zerolab.engine.partition import Structure
from zerolab.engine.stage import Stage
from zerolab.engine.unit import Unit


@dataclass
class Place:
    """The part of a unit's parameter `i` that one entry of a state dict shows; `full`: all of it."""

    i: int
    view: Tensor  # on the meta device: its shape, strides and offset inside the parameter
    full: bool

    def within(self, param: Tensor) -> Tensor:
        """The same part of `param`, a dense tensor with the parameter's shape and strides."""
        offset = int(param.storage_offset()) + int(self.view.storage_offset())
        return param.as_strided(self.view.size(), self.view.stride(), offset)


@dataclass
class Entries:
    """What each key of the unsharded model's `state_dict()` stands for."""

    state: dict[str, Any]  # what the model returned: keys in its order, and torch's metadata
    places: dict[Unit, dict[str, Place]]
    buffers: dict[str, Tensor]  # this rank's own, to read and to write
    extras: dict[str, Any]  # what get_extra_state() and hooks returned

    def names(self, unit: Unit) -> list[list[str]]:
        """The keys of each parameter: several if it is tied, its name in the model if it has no key to itself."""
        keys: list[list[str]] = [[] for _ in unit.params]
        for key, place in self.places[unit].items():
            if place.full:
                keys[place.i].append(key)
        return [own or [name] for own, name in zip(keys, unit.names, strict=True)]


class FullModel:
    """What the model of `stage` would be in one process."""

    def __init__(self, stage: Stage, forward: Forward, backward: Backward, structure: Structure) -> None:
        self._stage, self._comm = stage, stage.comm
        self._forward, self._backward, self._structure = forward, backward, structure

    @contextmanager
    def editing(self) -> Iterator[None]:
        stage, comm = self._stage, self._comm
        if not self._forward.is_idle() or self._backward.under_way:
            raise RuntimeError("full_parameters() cannot be entered inside forward, backward or itself")
        self._structure.check()
        comm.phase = "full_parameters"
        gathered = {unit: _gather_master(unit) for unit in stage.units}
        shown = {unit: unit.layout.views(flat) for unit, flat in gathered.items()}
        with self._forward.bypass():
            for unit, views in shown.items():
                unit.show([nn.Parameter(view, requires_grad=False) for view in views])
            yield
            comm.phase = "full_parameters"
            found = [_take_over(unit, views) for unit, views in shown.items()]
            problems = comm.exchange(next(filter(None, found), None), "end of full_parameters()")
            for rank, problem in enumerate(problems):
                if problem:
                    raise RuntimeError(f"rank {rank}: {problem} inside full_parameters(), so no edit was kept")
            for unit, flat in gathered.items():
                comm.broadcast(flat, unit.name)
                self._set_master(unit, flat)

    @torch.no_grad()
    def gather_state_dict(self, rank0_only: bool) -> dict[str, Tensor]:
        comm = self._comm
        comm.phase = "full_state_dict"
        comm.exchange_bytes(b"", "full_state_dict")  # nothing is gathered before every rank is here
        wanted = comm.rank == 0 or not rank0_only
        own = self.entries()
        state = own.state
        for unit in self._stage.units:
            flat = _gather_master(unit)
            if not wanted:
                continue
            views = unit.layout.views(flat)
            copies: dict[int | str, Tensor] = {}
            for key, place in own.places[unit].items():
                which = place.i if place.full else key  # tied entries share one
                if which not in copies:
                    copies[which] = place.within(views[place.i]).to("cpu", copy=True)
                state[key] = copies[which]
        for key, value in own.buffers.items():
            buffer = value.clone()
            comm.broadcast(buffer, key)
            state[key] = buffer.to("cpu")
        state.update(_first_ranks(comm, own.extras))
        return state if wanted else {}

    @torch.no_grad()
    def spread_state_dict(self, state: dict[str, Tensor] | None) -> None:
        comm = self._comm
        comm.phase = "load_full_state_dict"
        own = self.entries()
        problem = _compare(own, state) if comm.rank == 0 else None
        problem = comm.exchange(problem, "loading of a state dict")[0]
        if problem:
            raise ValueError(f"this state dict does not fit {type(self._stage.model).__name__}: {problem}")
        values = state or {}
        extras = _first_ranks(comm, {key: values.get(key) for key in own.extras})
        self.set_extras(extras, own.extras)
        for unit in self._stage.units:
            if {place.i for place in own.places[unit].values() if place.full} == set(range(len(unit.params))):
                flat = torch.zeros(unit.layout.size, dtype=unit.master.dtype, device=comm.device)
            else:  # what no entry shows keeps its value
                flat = _gather_master(unit)
            if comm.rank == 0:
                views = unit.layout.views(flat)
                for key, place in own.places[unit].items():
                    place.within(views[place.i]).copy_(values[key])
            comm.broadcast(flat, unit.name)
            self._set_master(unit, flat)
        for key, buffer in own.buffers.items():
            if comm.rank == 0:
                each_once(buffer).copy_(each_once(values[key], like=buffer))
            comm.broadcast(buffer, key)
        self.renew_extras(extras)

    def _set_master(self, unit: Unit, flat: Tensor) -> None:
        """Write this rank's part of the full masters `flat`, (N * S,)."""
        if unit.sharded:
            flat = unit.layout.shard(flat, unit.rank)
        unit.master.detach().copy_(flat)
        self._stage.master_changed(unit)

    def entries(self) -> Entries:
        """What the keys of the unsharded model's `state_dict()` stand for.

        The model itself is asked, for wrappers and hooks rename its parameters, split them or leave them out. Meanwhile
        it shows stand-ins on the meta device, with the full shapes; what comes back is known by the storage of its
        stand-in.
        """
        if not self._forward.is_idle():
            raise RuntimeError("the state dict cannot be had inside forward, backward or full_parameters()")
        self._structure.check()
        model, units = self._stage.model, self._stage.units
        computed = (
            f"a hook of {type(model).__name__} computes its state dict from values of parameters, which are "
            "sharded: use `with zero.full_parameters(): model.state_dict()`, on all ranks"
        )
        origins: dict[int | None, tuple[Unit, Place]] = {}  # by the identity of a stand-in's storage
        try:
            with self._forward.bypass():
                for unit in units:
                    on_meta: Any = {"dtype": unit.master.dtype, "device": "meta"}
                    stand_ins = [
                        nn.Parameter(torch.empty_strided(slot.shape, slot.stride, **on_meta), param.requires_grad)
                        for slot, param in zip(unit.layout.slots, unit.params, strict=True)
                    ]
                    unit.show(stand_ins)
                    for i, full in enumerate(stand_ins):
                        origins[_storage(full)] = unit, Place(i, full, full=True)
                state = model.state_dict()
        except RuntimeError as error:  # torch's, of the meta device
            raise RuntimeError(computed) from error
        buffers = {_storage(buffer) for buffer in model.buffers()} - {None}
        result = Entries(state, {unit: {} for unit in units}, {}, {})
        for key, value in state.items():
            storage = _storage(value)
            if storage in origins:
                unit, place = origins[storage]
                if value.dtype == place.view.dtype:
                    same = value.size() == place.view.size() and value.stride() == place.view.stride()
                    result.places[unit][key] = Place(place.i, value, full=same)
                    continue
            elif storage in buffers:
                result.buffers[key] = value.detach()
                continue
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                raise RuntimeError(f"{key}: {computed}")
            result.extras[key] = value
        return result

    def set_extras(self, extras: dict[str, Any], before: dict[str, Any]) -> None:
        """Have `set_extra_state()` called with `extras`, entries of a state dict, on every rank.

        That is user code, so it comes before anything else is loaded. If it fails on one rank, all give their modules
        `before` again, and raise `RuntimeError`.
        """
        if not extras:
            return
        model = self._stage.model
        try:
            before = copy.deepcopy(tree_map_only(Tensor, Tensor.detach, before))  # it may be the modules' own
        except Exception:
            before = {}  # what cannot be copied cannot be given back
        with self._forward.bypass():
            problems = self._comm.exchange(give_extras(model, extras), "loading of extra state")
            for rank, problem in enumerate(problems):
                if problem:
                    again = give_extras(model, before) if before else "it cannot be copied"
                    raise RuntimeError(f"rank {rank}: {refused_extras(problem, again)}")

    def renew_extras(self, extras: dict[str, Any]) -> None:
        """Once more, for modules that make something of it and of what has been loaded meanwhile."""
        with self._forward.bypass():
            if extras and (problem := give_extras(self._stage.model, extras)):
                raise RuntimeError(problem)

    def refuse_elsewhere(self) -> None:
        """Let `state_dict()`, `load_state_dict()` and copies of a sharded model say why not."""

        def refuse(what: str, instead: str, *args: Any) -> None:
            if not self._forward.bypassed:
                raise RuntimeError(
                    f"model.{what}() of a model in stage {self._stage.stage} would take this rank's slices for full "
                    f"parameters; use {instead}, on all ranks"
                )

        for module in self._stage.model.modules():
            vars(module)["__reduce_ex__"] = refuse_copy
            if self._stage.stage > 0:
                module.register_state_dict_pre_hook(partial(refuse, "state_dict", "zero.full_state_dict()"))
                module.register_load_state_dict_pre_hook(
                    partial(refuse, "load_state_dict", "zero.load_full_state_dict(state)")
                )


@torch.no_grad()
def give_extras(model: nn.Module, extras: dict[str, Any]) -> str | None:
    """Have `set_extra_state()` called with `extras`, entries of a state dict; return what it raised."""
    try:
        model.load_state_dict(extras, strict=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused_extras(problem: str, again: str | None) -> str:
    """`problem` was in the way of new extra state, and `again`, if anything, of the old one."""
    kept = f"nor what they had ({again}), so it is partly new" if again else "and have what they had"
    return f"modules do not take this extra state ({problem}), {kept}; nothing else has changed"


def refuse_copy(*args: Any) -> Any:
    """Let copy.deepcopy(model), AveragedModel(model), pickle and torch.save(model) say why not."""
    raise TypeError(
        "a sharded model can be neither copied nor pickled. Copy it before sharding it, or build it again and load "
        "zero.full_state_dict(). To average weights, use zerolab.EMA(zero, decay)"
    )


@torch.no_grad()
def _take_over(unit: Unit, views: list[Tensor]) -> str | None:
    """Copy into `views` what modules hold in their place by now. Or, if it is nothing that fits, say so."""
    for name, view, sites in zip(unit.names, views, unit.sites, strict=True):
        param, *others = (module._parameters.get(key) for module, key in sites)
        if param is None or any(other is None for other in others):
            return f"{name} was removed, or is no parameter any more,"
        if any(other is not param for other in others):
            return f"{name} was tied to another parameter, and replaced in one place only,"
        if (param.shape, param.dtype) != (view.shape, view.dtype):
            was, now = ((tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in (view, param))
            return f"{name} went from shape {was[0]} in {was[1]} to {now[0]} in {now[1]}"
        if not param.is_set_to(view):
            view.copy_(param.clone())
    return None


def _storage(value: Any) -> int | None:
    """The identity of a tensor's storage."""
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return int(value.untyped_storage()._cdata) if strided else None


def _first_ranks(comm: Comm, extras: dict[str, Any]) -> dict[str, Any]:
    """The first rank's `extras`, which may be any objects, on every rank. The keys are the same there."""
    if not extras:
        return {}
    message = None
    if comm.rank == 0:
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu"), extras)
        message = base64.b64encode(pickle.dumps(on_cpu)).decode()
    result: dict[str, Any] = pickle.loads(base64.b64decode(comm.exchange(message, "exchange of extra state")[0]))
    return result


def _gather_master(unit: Unit) -> Tensor:
    """A copy of the full masters of `unit`, (N * S,)."""
    mine = unit.master.detach().to(unit.comm.device, copy=not unit.sharded)
    if not unit.sharded:
        return mine
    flat = torch.empty(unit.layout.size, dtype=mine.dtype, device=mine.device)
    unit.comm.all_gather(flat, mine, unit.name).wait()
    return flat


def _compare(own: Entries, state: dict[str, Tensor] | None) -> str | None:
    if state is None:
        return "the first rank passed none"
    if missing := sorted(own.state.keys() - state.keys()):
        return (
            f"missing {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. To load a part: `with "
            "zero.full_parameters(): model.load_state_dict(part, strict=False)`"
        )
    if unexpected := sorted(state.keys() - own.state.keys()):
        return f"unexpected {', '.join(unexpected[:5])}{' ...' if len(unexpected) > 5 else ''}"
    shapes = {key: tuple(place.view.shape) for places in own.places.values() for key, place in places.items()}
    shapes |= {key: tuple(buffer.shape) for key, buffer in own.buffers.items()}
    for key, shape in shapes.items():
        if tuple(state[key].shape) != shape:
            return f"{key} has shape {tuple(state[key].shape)}, expected {shape}"
    for key, buffer in own.buffers.items():
        if not rows_are_one(state[key], buffer):
            return f"{key} has rows that differ, and the model's is one row, expanded"
    return None
