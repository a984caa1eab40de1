"""`load`: match the manifest with this model and optimizer, read what this rank owns, and only then change anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerolab.checkpoint.files import DTYPES, NAMES, CheckpointError, Pieces
from zerolab.checkpoint.manifest import read_manifest
from zerolab.checkpoint.state import (
    Held,
    Optimizers,
    buffers,
    check_idle,
    extra_state,
    fitting_values,
    flat,
    from_json,
    full_stand_in,
    generators,
    names_in_groups,
    on_all_ranks,
    parameters,
    set_group_values,
)
from zerolab.comm.native import each_once, rows_are_one
from zerolab.comm.waiting import CommError
from zerolab.engine.ema import EMA
from zerolab.engine.engine import Engine
from zerolab.engine.step import show_states, watch


def load(
    path: str | Path, zero: Engine, optimizer: Optimizer | Iterable[Optimizer], *, ema: EMA | None = None
) -> dict[str, Any]:
    """Load what `save` wrote, at any world size and stage, into the same model and the same kind of optimizer.

    All ranks must call it. Each reads and checks only the slices it needs, and nothing changes until all ranks have
    done so. optimizer: one, or a list in the order of the save. The groups must hold the same parameters as when they
    were saved; hyperparameters become the saved ones, but foreach, fused and capturable stay as they are here. At the
    same world size each rank gets back its own buffers and random number generators; at another, every rank gets the
    first rank's buffers. ema: takes in the averages, which a checkpoint that has some needs; its decay stays.

    Returns the extras. Raises `CheckpointError` on every rank, with nothing changed, if anything is missing, damaged,
    or from another model. `set_extra_state()` of modules, which may fail, is called before anything else changes.
    """
    comm = zero.comm
    phase, comm.phase = comm.phase, "load"
    try:
        loading = _Loading(path, zero, optimizer, ema)
        checksums = on_all_ranks(comm, "reading of a checkpoint", loading.read)
        if len(set(checksums)) > 1:
            raise CheckpointError(
                f"{path}: the ranks see different checkpoints there; all must see the same file system"
            )
        loading.give_extra_state()
        on_all_ranks(comm, "loading of a checkpoint", loading.write)
        return loading.content["extra"]
    finally:
        comm.phase = phase


def read_extra(path: str | Path) -> dict[str, Any]:
    """The extras of the checkpoint `path`, for example to build the model from them.

    Needs neither ranks nor a model. Raises `CheckpointError` if there is no checkpoint or its manifest is damaged.
    """
    _, content, _ = read_manifest(Path(os.path.abspath(path)))
    extra: dict[str, Any] = content["extra"]
    return extra


class _Loading:
    """One rank's part of a load: `read` collects and checks, `write` changes the model and the optimizer.

    What can fail is done by `read`, or in user code by `give_extra_state`, so that `write` need only copy.
    """

    def __init__(
        self, path: str | Path, zero: Engine, optimizer: Optimizer | Iterable[Optimizer], ema: EMA | None
    ) -> None:
        self.path, self.zero, self.given, self.ema = path, zero, optimizer, ema

    def read(self) -> str:
        """Read all this rank needs; return the checksum of the manifest."""
        check_idle(self.zero, self.ema)
        self.optimizer = Optimizers(self.given)
        self.folder, self.content, checksum = read_manifest(Path(os.path.abspath(self.path)))
        self.pieces = Pieces(self.folder, self.content["files"], self.content["pieces"], self.content["chunk"])
        self.held = parameters(self.zero)
        self._match_parameters()
        self._match_groups()
        self._match_averages()
        self.extras, self.extras_before = self._match_extra_state()
        self.parameters = [self._read(held, "parameters", self.entries[held.name]["dtype"]) for held in self.held]
        self.states = [self._read_state(held) for held in self.held]
        averaged = self.held if self.ema else []
        self.averages = [self._read(held, "ema", self.entries[held.name]["dtype"]) for held in averaged]
        self.own = self._read_own()
        return checksum

    def give_extra_state(self) -> None:
        try:
            self.zero.full_model.set_extras(self.extras, self.extras_before)
        except CommError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error

    def write(self) -> None:
        try:
            self._write()
        except CommError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.folder} fits, but putting it in place broke off ({type(error).__name__}: {error}): parameters, "
                "buffers and the optimizer are partly those of the checkpoint; load again before you train"
            ) from error

    @torch.no_grad()
    def _write(self) -> None:
        step_on_device = {  # torch's optimizers want `step` on the device for these parameters
            id(param)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if group.get("capturable") or group.get("fused")
        }
        for held, values, state in zip(self.held, self.parameters, self.states, strict=True):
            param = held.param
            flat(param, param).copy_(values)
            self.optimizer.set_state(param, self._placed(held, state, id(param) not in step_on_device))
        for optimizer in self.optimizer.each:
            watch(optimizer)
            show_states(optimizer)
        for group, fitting in zip(self.optimizer.param_groups, self.group_values, strict=True):
            set_group_values(group, fitting)
        if self.ema:
            for held, part, values in zip(self.held, self.ema.parts(), self.averages, strict=True):
                flat(part, held.param).copy_(values)
            self.ema.resume(self.content["ema"]["updates"])
        for name, buffer in buffers(self.zero).items():
            each_once(buffer).copy_(each_once(self.own[f"buffers/{name}"].view(buffer.shape), like=buffer))
        if "generators/cpu" in self.own:
            torch.set_rng_state(self.own["generators/cpu"])
        if "generators/cuda" in self.own:
            torch.cuda.set_rng_state(self.own["generators/cuda"], self.zero.comm.device)
        self.zero.full_model.renew_extras(self.extras)
        for unit in self.zero.units:
            self.zero.master_changed(unit)
        self.zero.comm.step = self.content["step"]

    # -- does the checkpoint fit this model and optimizer? -------------------------------------------------------

    def _match_parameters(self) -> None:
        """Find each of the model's parameters in the checkpoint, by any of its names; none may be left over there."""
        entry_of = {name: entry for entry in self.content["parameters"].values() for name in entry["names"]}
        self.entries: dict[str, dict[str, Any]] = {}
        for held in self.held:
            name, slot, dtype = held.name, held.slot, held.param.dtype
            entry = entry_of.get(name)
            if entry is None:
                raise CheckpointError(f"{self.folder}: has no parameter {name} ({self._other_model()})")
            if sorted(entry["names"]) != sorted(held.names):
                there, here = " = ".join(entry["names"]), " = ".join(held.names)
                raise CheckpointError(
                    f"{self.folder}: {name} is tied differently: {there} in the checkpoint, {here} in this model"
                )
            self.entries[name] = entry
            if tuple(entry["shape"]) != slot.shape:
                shapes = f"has shape {tuple(entry['shape'])}, in this model {slot.shape}"
                raise CheckpointError(f"{self.folder}: {name} {shapes} ({self._other_model()})")
            if entry["dtype"] != NAMES[dtype]:
                raise CheckpointError(
                    f"{self.folder}: {name} was saved as {DTYPES[entry['dtype']]} but is {dtype} here; use "
                    "the same Precision(master=...), or load_model_weights into the model before sharding it"
                )
        used = {entry["names"][0] for entry in self.entries.values()}
        if unused := sorted(self.content["parameters"].keys() - used):
            raise CheckpointError(
                f"{self.folder}: has a parameter {unused[0]} that this model lacks ({self._other_model()})"
            )

    def _other_model(self) -> str:
        return f"saved from {self.content['model']}, this is {type(self.zero.model).__name__}"

    def _match_groups(self) -> None:
        """Find, for each of the optimizer's parameter groups, the saved group with the same parameters."""
        kind = self.optimizer.name
        if kind != self.content["optimizer"]:
            raise CheckpointError(
                f"{self.folder}: was saved with {self.content['optimizer']}, this optimizer is {kind}"
            )
        if problem := self.optimizer.misfit(self.zero):
            raise CheckpointError(f"{self.folder}: {problem}")
        left: dict[frozenset[str], list[dict[str, Any]]] = {}  # of several without parameters, the order tells
        for saved in self.content["groups"]:
            left.setdefault(frozenset(saved["names"]), []).append(saved)
        self.group_values = []
        groups = zip(self.optimizer.param_groups, names_in_groups(self.zero, self.optimizer), strict=True)
        for number, (group, names) in enumerate(groups):
            there = frozenset(self.entries[name]["names"][0] for name in names)
            if not left.get(there):
                has = f"{len(names)} parameters, the first is {names[0]}" if names else "no parameters"
                raise CheckpointError(
                    f"{self.folder}: the optimizer's parameter group {number} ({has}) was not saved as one group"
                )
            where = f"{self.folder}: parameter group {number}"
            self.group_values.append(fitting_values(group, left[there].pop(0)["values"], where))
        if len(self.group_values) != len(self.content["groups"]):
            raise CheckpointError(
                f"{self.folder}: was saved with {len(self.content['groups'])} parameter groups, this optimizer has "
                f"{len(self.group_values)}"
            )

    def _match_averages(self) -> None:
        if (self.content.get("ema") is None) != (self.ema is None):
            has = "no averages: leave ema out" if self.ema else "averages: pass ema=zerolab.EMA(zero, decay)"
            raise CheckpointError(f"{self.folder}: has {has}")

    def _match_extra_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the checkpoint has, and what is here."""
        here, saved = extra_state(self.zero), self.content.get("extra_state", {})
        if different := sorted(here.keys() ^ saved.keys()):
            where = "the checkpoint" if different[0] in saved else "this model"
            raise CheckpointError(f"{self.folder}: only {where} has {different[0]} ({self._other_model()})")
        return dict(saved), here

    # -- what this rank reads ------------------------------------------------------------------------------------

    def _read_state(self, held: Held) -> dict[str, Any]:
        """The optimizer's state of one parameter: what has its shape (or its slice's), other tensors, numbers."""
        if not self.optimizer.here(held.param):
            return {}
        entry, owned = self.entries[held.name], self.optimizer.owned(held.param)
        state = entry["state"]
        found: dict[str, Any] = {}
        for key, dtype in state["elements"].items():
            found[key] = self._read(held, f"optimizer/{key}", dtype, owned)
        like = full_stand_in(held) if owned else held.param
        found = {key: value.as_strided(like.size(), like.stride()) for key, value in found.items()}
        for key, what in state.get("tensors", {}).items():
            start, stop = 0, prod(what["shape"])
            there = torch.empty(what["shape"], device="meta")
            if held.unit.sharded and not owned:
                each = self.optimizer.blocks(held.param).per_number(full_stand_in(held), key, there)
                if each is None:
                    raise CheckpointError(
                        f"{self.folder}: the optimizer state {key} of {held.name} belongs to the full parameter; load "
                        "it into zerolab.OwnerOptimizer"
                    )
                start, stop = (-(-place // each) for place in self._slice(held))
                what = what | {"shape": [stop - start]}
            read = self.pieces.read(f"optimizer/{key}/{entry['names'][0]}", DTYPES[what["dtype"]], start, stop)
            found[key] = read.view(what["shape"])
        found |= {key: from_json(number) for key, number in state["numbers"].items()}
        for key, length in state.get("lists", {}).items():
            found[key] = [found.pop(f"{key}[{i}]") for i in range(length)]
        return found

    def _read(self, held: Held, kind: str, dtype: str, full: bool = False) -> Tensor:
        """This rank's elements of a tensor that has the shape of a parameter: flat, in the memory order of its slot.

        full: all of them, although this rank has a slice of the parameter."""
        entry, unit, slot = self.entries[held.name], held.unit, held.slot
        start, stop = self._slice(held) if unit.sharded and not full else (0, slot.numel)
        read = partial(self.pieces.read, f"{kind}/{entry['names'][0]}", DTYPES[dtype])
        if tuple(entry["stride"]) == slot.stride:
            return read(start, stop)
        # Saved in another memory order (channels_last then or now): a slice here is scattered there.
        there = read(0, slot.numel).as_strided(slot.shape, entry["stride"])
        return flat(there, full_stand_in(held))[start:stop]

    def _slice(self, held: Held) -> tuple[int, int]:
        """This rank's elements of a parameter."""
        start, stop = held.unit.layout.owned(held.slot, held.unit.rank)
        return start - held.slot.offset, stop - held.slot.offset

    def _placed(self, held: Held, state: dict[str, Any], step_on_host: bool) -> dict[str, Any]:
        """The state as the optimizer keeps it: on the parameter's device, but `step` on the host if asked."""
        param, placed = held.param, {}
        for key, value in state.items():
            if isinstance(value, list):
                value = [each.to(param.device) if isinstance(each, Tensor) else each for each in value]
            if isinstance(value, Tensor) and not (key == "step" and step_on_host):
                value = value.to(param.device)
            placed[key] = value
        return placed

    def _read_own(self) -> dict[str, Tensor]:
        """This rank's buffers and generators; at another world size, the first rank's buffers."""
        same = self.content["world_size"] == self.zero.world_size
        rank = self.zero.rank if same else 0
        here, saved = buffers(self.zero), self.content["buffers"]
        if different := sorted(here.keys() ^ saved.keys()):
            where = "the checkpoint" if different[0] in saved else "this model"
            raise CheckpointError(f"{self.folder}: only {where} has a buffer {different[0]} ({self._other_model()})")
        own = {}
        for name, buffer in here.items():
            ours, theirs = (list(buffer.shape), NAMES.get(buffer.dtype)), (saved[name]["shape"], saved[name]["dtype"])
            if ours != theirs:
                raise CheckpointError(
                    f"{self.folder}: buffer {name} is {theirs} in the checkpoint, {ours} in this model"
                )
            there = f"rank {rank}/buffers/{name}"
            own[f"buffers/{name}"] = values = self.pieces.read(there, buffer.dtype, 0, buffer.numel())
            if not rows_are_one(values.view(buffer.shape), buffer):
                raise CheckpointError(
                    f"{self.folder}: buffer {name} has rows that differ, and here it is one, expanded"
                )
        for name, state in generators(self.zero).items():
            there = f"rank {rank}/generators/{name}"
            if same and there in self.content["pieces"]:
                own[f"generators/{name}"] = self.pieces.read(there, torch.uint8, 0, state.numel())
        return own
