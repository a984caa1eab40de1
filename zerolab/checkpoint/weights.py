"""Weights alone: from a checkpoint or a safetensors file into a plain module, and from an engine into such a file."""

from __future__ import annotations

import copy
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.checkpoint.files import DTYPES, CheckpointError, Pieces, flush_folder
from zerolab.checkpoint.manifest import read_manifest
from zerolab.checkpoint.state import on_all_ranks
from zerolab.comm.native import each_once
from zerolab.engine.engine import Engine
from zerolab.engine.full import give_extras, refused_extras
from zerolab.engine.step import is_owned


@torch.no_grad()
def load_model_weights(path: str | Path, model: nn.Module) -> None:
    """Load weights and buffers into a plain module, from a checkpoint folder or a safetensors file.

    Needs no process group. Values are converted to the module's dtypes. Of tied weights, one name is enough. What
    modules have by `get_extra_state()` is in a checkpoint, but not in a safetensors file.

    Raises `CheckpointError`, with nothing changed, if names or shapes differ, values do not fit into a dtype, or a
    module refuses its extra state. A safetensors file alone has no checksums, so a changed value in it goes unnoticed.
    """
    path = Path(os.path.abspath(path))
    targets, extras, here = _plain_targets(model), dict[str, Any](), dict[str, Any]()
    if path.is_file():
        values = _read_weights_file(path, targets)
    else:
        values, extras = _read_weights_of_checkpoint(path, targets)
        state = model.state_dict()
        here = copy.deepcopy({key: value for key, value in state.items() if not isinstance(value, Tensor)})
        if different := sorted(here.keys() ^ extras.keys()):
            where = "the checkpoint" if different[0] in extras else "this model"
            raise CheckpointError(f"{path}: only {where} has {different[0]}")
    for names, target in targets:
        there = values[names[0]].dtype
        if there.is_floating_point != target.is_floating_point():
            raise CheckpointError(f"{path}: {names[0]} is {there} there, but {target.dtype} in this model")
        if there != target.dtype and _lost(values[names[0]], target.dtype):
            raise CheckpointError(
                f"{path}: {names[0]} is {there} there, and has values that {target.dtype}, its dtype here, cannot hold"
            )
    if extras:
        if problem := give_extras(model, extras):
            raise CheckpointError(f"{path}: {refused_extras(problem, give_extras(model, here))}")
    for names, target in targets:
        each_once(target).copy_(each_once(values[names[0]], like=target))
    if extras and (problem := give_extras(model, extras)):  # again, for what modules make of it and of their weights
        raise CheckpointError(f"{path}: weights are loaded, but modules do not take the extra state now ({problem})")


def _lost(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether some of `values` would be others as `dtype`. That they are rounded is not meant."""
    there = values.to(dtype)
    if dtype.is_floating_point:
        return not torch.equal(there.double().isfinite(), values.double().isfinite())
    return not torch.equal(there.to(values.dtype), values)


def _plain_targets(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The tensors of a module's state dict, each with all its names."""
    names_of: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names_of.setdefault(id(value), ([], value))[0].append(name)
    for names, value in names_of.values():
        if is_owned(value):
            raise CheckpointError("this model is sharded: use zerolab.load or zero.load_full_state_dict")
        if value.is_meta:
            raise CheckpointError(
                f"{names[0]} is on the meta device, without memory; call model.to_empty(device=...) first"
            )
    return list(names_of.values())


def _read_weights_of_checkpoint(
    path: Path, targets: list[tuple[list[str], Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The values for `targets`, each under the first of its names, and the extra state of modules."""
    folder, content, _ = read_manifest(path)
    pieces = Pieces(folder, content["files"], content["pieces"], content["chunk"])
    entry_of = {name: entry for entry in content["parameters"].values() for name in entry["names"]}
    shapes = {name: entry["shape"] for name, entry in entry_of.items()}
    shapes |= {name: entry["shape"] for name, entry in content["buffers"].items()}
    _compare_names(folder, targets, shapes)
    values = {}
    for names, target in targets:
        name = next(name for name in names if name in shapes)
        if len({id(entry_of[name]) for name in names if name in entry_of}) > 1:
            raise CheckpointError(
                f"{folder}: {' and '.join(names)} are one parameter in this model, but several in the checkpoint"
            )
        if name in entry_of:
            entry = entry_of[name]
            flat = pieces.read(f"parameters/{entry['names'][0]}", DTYPES[entry["dtype"]], 0, target.numel())
            values[names[0]] = flat.as_strided(entry["shape"], entry["stride"])
        else:
            dtype = DTYPES[content["buffers"][name]["dtype"]]
            values[names[0]] = pieces.read(f"rank 0/buffers/{name}", dtype, 0, target.numel()).view(target.shape)
    return values, content.get("extra_state", {})


def _read_weights_file(path: Path, targets: list[tuple[list[str], Tensor]]) -> dict[str, Tensor]:
    """The same from a safetensors file."""
    from safetensors import SafetensorError, safe_open  # here, so that `make gpu` runs where there is only torch

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            _compare_names(path, targets, shapes)
            found = {names[0]: next(name for name in names if name in shapes) for names, _ in targets}
            return {name: file.get_tensor(there).clone() for name, there in found.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _compare_names(path: Path, targets: list[tuple[list[str], Tensor]], shapes: dict[str, list[int]]) -> None:
    """Raise unless `shapes`, what is there, has every target under at least one name, and nothing else."""
    for names, target in targets:
        there = [name for name in names if name in shapes]
        if not there:
            raise CheckpointError(f"{path}: has no {names[0]}, which this model has")
        for name in there:
            if tuple(shapes[name]) != tuple(target.shape):
                shape = f"has shape {tuple(shapes[name])}, in this model {tuple(target.shape)}"
                raise CheckpointError(f"{path}: {name} {shape}")
    if unused := sorted(shapes.keys() - {name for names, _ in targets for name in names}):
        raise CheckpointError(f"{path}: has {unused[0]}, which this model lacks")


def export_weights(path: str | Path, zero: Engine) -> None:
    """Write full weights and buffers to one safetensors file, under the names of the plain model.

    The file is as Hugging Face's libraries write and read it: tied weights once, under their first name. All ranks
    must call it; the first one writes, under another name until the file is complete. `load_model_weights` and
    `safetensors.torch.load_model` both read it.
    """
    from safetensors.torch import save_file

    path = Path(os.path.abspath(path))
    state = zero.full_state_dict(rank0_only=True)

    def write() -> None:
        if zero.comm.rank > 0:
            return
        once = {id(value): name for name, value in reversed(state.items()) if isinstance(value, Tensor)}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            save_file({name: state[name].contiguous() for name in once.values()}, new, metadata={"format": "pt"})
            with open(new, "rb") as file:
                os.fsync(file.fileno())
            new.rename(path)
            flush_folder(path.parent)
        finally:
            new.unlink(missing_ok=True)

    on_all_ranks(zero.comm, "export of weights", write)
