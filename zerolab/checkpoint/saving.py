"""Checkpoints that any stage at any world size can load.

A checkpoint is a folder: one safetensors file per rank with that rank's slice of everything, and manifest.json, which
says which flat elements of which parameter, or optimizer state, each file holds. All stages write the same: in stage
0, where every rank has everything, each writes the slice that it would own in stage 1. So loading at another world
size or stage is arithmetic: each rank reads, of whatever files, the elements that it owns now.

    step-000100/
        manifest.json
        rank-00000-of-00002.safetensors    parameters/head.weight [0, 52), optimizer/exp_avg/head.weight [0, 52), ...
        rank-00001-of-00002.safetensors    parameters/head.weight [52, 104), ...

Written under another name, flushed to the disk, then renamed: whoever is killed at whatever moment leaves the old
checkpoint or the new one, whole. Nothing is changed by a load until every rank has read, and checked, all it needs.

Gradients are not part of a checkpoint: save after the optimizer's step.
"""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolab.checkpoint.files import CHUNK, DTYPES, NAMES, CheckpointError, Pieces, digest, dtype_name, write_file
from zerolab.comm.collectives import Comm
from zerolab.engine.engine import Engine
from zerolab.engine.full import own_state_dict
from zerolab.engine.layout import Slot
from zerolab.engine.unit import Unit

FORMAT, VERSION = "zerolab checkpoint", 1
MANIFEST = "manifest.json"

# What torch's optimizers keep once per parameter, not per element: how to tell these of a parameter of one element.
SCALARS = {"step", "mu_product", "eta", "mu"}
# Of a parameter group, what is not saved: tensors, and which implementation to use, which is this program's choice.
NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


# -- save -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def save(path: str | Path, zero: Engine, optimizer: Optimizer, *, keep: int | None = None, **extra: Any) -> None:
    """Write a checkpoint of parameters, buffers, optimizer, step and random number generators to the folder `path`.

    All ranks must take part, between the optimizer's step and the next forward, and see the same file system. A
    checkpoint that is there already is replaced, and stays until the new one is whole; after a crash, `load` of the
    same path finds one or the other.

    keep: for paths that end in a number, "run/step-000100": afterwards remove older checkpoints of the same name and
        lower number, so that `keep` are left.
    extra: anything JSON, which `load` returns. The first rank's counts.

    Raises `CheckpointError` on every rank if it failed on some.
    """
    path, comm = Path(os.path.abspath(path)), zero.comm
    phase, comm.phase = comm.phase, "save"
    folder: Path | None = None
    try:
        begun = _on_all(comm, "start of a save", lambda: _begin(path, zero, optimizer, keep, extra))
        folder = path.with_name(begun[0])
        parts = _on_all(comm, "writing of a checkpoint", lambda: _write_part(folder, zero, optimizer))
        finish = lambda: _finish(path, folder, keep, _manifest(zero, optimizer, parts, extra))  # noqa: E731
        _on_all(comm, "end of a save", finish if comm.rank == 0 else lambda: None)
    except BaseException:
        if comm.rank == 0 and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        comm.phase = phase


def _on_all(comm: Comm, what: str, work: Callable[[], Any]) -> list[Any]:
    """What `work()` returns on each rank, which must be JSON; if it failed on some rank, an error on all."""
    result = problem = cause = None
    try:
        result = work()
    except Exception as error:
        cause, problem = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    rows = comm.exchange([problem, result], what)
    for rank, (problem, _) in enumerate(rows):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}") from cause
    return [result for _, result in rows]


def _begin(path: Path, zero: Engine, optimizer: Optimizer, keep: int | None, extra: dict[str, Any]) -> str | None:
    """Every rank: can this be saved? The first rank: make the temporary folder; its name."""
    _check_idle(zero)
    _names_in_groups(zero, optimizer)
    if keep is not None and (keep < 1 or not _stem(path)):
        raise CheckpointError(
            f"keep={keep}: needs a number of at least 1, and a path that ends in digits, not {path.name}"
        )
    if zero.rank > 0:
        return None
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extras must be JSON (numbers, strings, lists, dicts with strings as keys): {error}"
        ) from None
    if path.exists() and not (path / MANIFEST).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not a zerolab checkpoint; it is left alone")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):  # of a save that was killed
        shutil.rmtree(leftover)
    folder = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir()
    return folder.name


def _check_idle(zero: Engine) -> None:
    if not zero.is_idle():
        raise CheckpointError("a checkpoint cannot be made or loaded inside forward, backward or full_parameters()")


def _write_part(folder: Path, zero: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Write this rank's file; what the manifest must know of it."""
    tensors: dict[str, Tensor] = {}
    ranges: dict[str, tuple[int, int]] = {}
    states: dict[str, dict[str, Any]] = {}
    shared = _shared_keys(optimizer)
    first_replica = zero.comm.between is None or zero.comm.between.rank == 0
    for unit, slot, param in _parameters(zero):
        begin, end = unit.layout.owned(slot, unit.rank)
        start, stop = begin - slot.offset, end - slot.offset
        state = optimizer.state.get(param, {})
        elements = {key: value for key, value in state.items() if _is_sliced(param, key, value, shared)}
        numbers = {key: _number(f"{key} of {slot.name}", state[key]) for key in state.keys() - elements.keys()}
        states[slot.name] = {
            "elements": {key: dtype_name(f"{key} of {slot.name}", value) for key, value in sorted(elements.items())},
            "numbers": dict(sorted(numbers.items())),
        }
        if stop > start and first_replica:
            sliced = {f"optimizer/{key}/{slot.name}": value for key, value in elements.items()}
            for name, value in {f"parameters/{slot.name}": param, **sliced}.items():
                flat = _flat(value, param)
                ranges[name] = (start, stop)
                tensors[name] = flat[start:stop] if flat.numel() == slot.numel else flat
    for name, value in _own_tensors(zero).items():
        whole = f"rank {zero.rank}/{name}"
        ranges[whole] = (0, value.numel())
        tensors[whole] = value.reshape(-1)
    file = f"rank-{zero.rank:05}-of-{zero.world_size:05}.safetensors"
    written = write_file(folder / file, tensors)
    pieces = {
        name: {"file": file, "start": ranges[name][0], "stop": ranges[name][1], **entry}
        for name, entry in written.pop("tensors").items()
    }
    return {"file": file, **written, "pieces": pieces, "states": states}


def _parameters(zero: Engine) -> Iterator[tuple[Unit, Slot, nn.Parameter]]:
    for unit in zero.units:
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            yield unit, slot, param


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements in the order in which the memory of `like`, of the same shape, holds them; if possible, a view."""
    tensor = tensor.detach()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _shared_keys(optimizer: Optimizer) -> set[str]:
    """The entries of the optimizer's state that are one number per parameter, whatever the parameter's shape."""
    keys = set(SCALARS)
    for param, state in optimizer.state.items():
        if param.dim() > 0:
            for key, value in state.items():
                if isinstance(value, Tensor):
                    keys = keys | {key} if value.dim() == 0 else keys - {key}
    return keys


def _is_sliced(param: nn.Parameter, key: str, value: Any, shared: set[str]) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and not (param.dim() == 0 and key in shared)


def _number(what: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in NAMES:
        return {"value": value.item(), "dtype": NAMES[value.dtype]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    raise CheckpointError(
        f"optimizer state {what} has {kind}: neither one number nor one per element, it cannot be saved"
    )


def _from_number(saved: dict[str, Any]) -> Any:
    """Back from `_number`."""
    return torch.tensor(saved["value"], dtype=DTYPES[saved["dtype"]]) if "dtype" in saved else saved["value"]


def _buffers(zero: Engine) -> dict[str, Tensor]:
    """The buffers that a state dict has, by name."""
    names = {name for name, _ in zero.model.named_parameters(remove_duplicate=False)}
    own = own_state_dict(zero)
    buffers = {name: buffer for name, buffer in zero.model.named_buffers() if name in own}
    aliases = {name for name, _ in zero.model.named_buffers(remove_duplicate=False)}
    if strange := sorted(own.keys() - names - aliases):
        raise CheckpointError(f"the model's {strange[0]} is neither parameter nor buffer; pass it to save as an extra")
    return buffers


def _generators(zero: Engine) -> dict[str, Tensor]:
    """The states of torch's random number generators."""
    states = {"cpu": torch.get_rng_state()}
    if zero.comm.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(zero.comm.device)
    return states


def _own_tensors(zero: Engine) -> dict[str, Tensor]:
    """What each rank has for itself, and saves whole."""
    buffers = {f"buffers/{name}": buffer for name, buffer in _buffers(zero).items()}
    return buffers | {f"generators/{name}": state for name, state in _generators(zero).items()}


def _manifest(zero: Engine, optimizer: Optimizer, parts: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
    """All that the ranks have told, put together and compared: the content of manifest.json."""
    pieces: dict[str, list[Any]] = {}
    for rank, part in enumerate(parts):
        for name, piece in part["pieces"].items():
            pieces.setdefault(name, []).append(piece)
        for name, state in part["states"].items():
            first = parts[0]["states"][name]
            if repr(state) != repr(first):  # repr: nan equals nan
                raise CheckpointError(f"optimizer state of {name} is {first} on rank 0, but {state} on rank {rank}")
    parameters = {}
    names_of = _names(zero.model)
    for _, slot, param in _parameters(zero):
        state = parts[0]["states"][slot.name]
        for name in [f"parameters/{slot.name}", *(f"optimizer/{key}/{slot.name}" for key in state["elements"])]:
            held = sum(piece["stop"] - piece["start"] for piece in pieces.get(name, []))
            if held != slot.numel:
                raise CheckpointError(f"{name}: the ranks have {held} of its {slot.numel} elements")
        parameters[slot.name] = {
            "names": sorted(names_of[id(param)], key=lambda name, own=slot.name: name != own),
            "shape": slot.shape,
            "stride": slot.stride,
            "dtype": NAMES[param.dtype],
            "state": state,
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": type(zero.model).__name__,
        "stage": zero.stage,
        "world_size": zero.world_size,
        "step": zero.comm.step,
        "optimizer": type(optimizer).__name__,
        "groups": [
            {"names": names, "values": _values(group)}
            for names, group in zip(_names_in_groups(zero, optimizer), optimizer.param_groups, strict=True)
        ],
        "parameters": parameters,
        "buffers": {
            name: {"shape": tuple(b.shape), "dtype": dtype_name(name, b)} for name, b in _buffers(zero).items()
        },
        "extra": extra,
        "chunk": CHUNK,
        "files": {part["file"]: {"bytes": part["bytes"], "header": part["header"]} for part in parts},
        "pieces": pieces,
    }


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def _names_in_groups(zero: Engine, optimizer: Optimizer) -> list[list[str]]:
    """The parameters of each group of the optimizer, by name."""
    name_of = {id(param): slot.name for _, slot, param in _parameters(zero)}
    groups = [[name_of.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
    for number, names in enumerate(groups):
        if None in names:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter (group {number}, number {names.index(None)}) that is "
                f"not of this {type(zero).__name__}: build it from model.parameters() after sharding, one per model"
            )
    return groups


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group."""
    values = {}
    for key, value in group.items():
        if key not in NOT_SAVED:
            many = isinstance(value, tuple | list)
            values[key] = [_number(key, v)["value"] for v in value] if many else _number(key, value)["value"]
    return values


def _set_values(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Back from `_values`: what is a tensor or a list in this program stays one."""
    for key, saved in values.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            now.fill_(saved)
        elif isinstance(now, tuple):
            group[key] = tuple(saved)
        else:
            group[key] = saved


def _finish(path: Path, folder: Path, keep: int | None, manifest: dict[str, Any]) -> None:
    """The first rank, when all files are written: the manifest, and the new folder in the place of the old."""
    for file, about in manifest["files"].items():
        if not (folder / file).is_file() or (folder / file).stat().st_size != about["bytes"]:
            raise CheckpointError(f"{folder / file} is not where rank 0 looks: all ranks must share one file system")
    text = json.dumps(manifest)
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        json.dump({"checksum": digest(_canonical(json.loads(text))), "content": json.loads(text)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)
    old = path.with_name(path.name + ".old")
    if path.exists():
        if (path / MANIFEST).is_file():
            _remove(old)
            path.rename(old)
        else:
            path.rmdir()  # it was empty
    folder.rename(path)
    _flush_folder(path.parent)
    _remove(old)
    if keep is not None:
        for older in _older(path)[keep - 1 :]:
            _remove(older)
        for leftover in path.parent.glob("*.tmp-*"):
            if (match := _stem(path.with_name(leftover.name.split(".tmp-")[0]))) and match[1] == _stem(path)[1]:
                shutil.rmtree(leftover)


def _canonical(content: Any) -> bytes:
    """The same bytes for the same JSON, however it is written."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _flush_folder(folder: Path) -> None:
    """Names are contents of folders, and must reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """First under a name that nobody takes for a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name.removesuffix('.old')}.tmp-{secrets.token_hex(4)}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _stem(path: Path) -> re.Match[str] | None:
    """run-3/step-000100 -> step- and 000100."""
    return re.fullmatch(r"(.*?)(\d+)(?:\.old)?", path.name)


def _older(path: Path) -> list[Path]:
    """The checkpoints beside `path` with the same stem and a lower number, highest first."""
    stem, number = _stem(path).groups()
    found = []
    for other in path.parent.iterdir():
        match = _stem(other)
        if match and match[1] == stem and int(match[2]) < int(number) and (other / MANIFEST).is_file():
            found.append((int(match[2]), other))
    return [other for _, other in sorted(found, reverse=True)]


# -- load -----------------------------------------------------------------------------------------------------------


def load(path: str | Path, zero: Engine, optimizer: Optimizer) -> dict[str, Any]:
    """Load what `save` wrote, at any world size and stage, into the same model and the same kind of optimizer.

    All ranks must take part. Each reads only the slices that it needs, checks them, and changes nothing until all
    ranks have. The optimizer's groups must hold the same parameters as then; hyperparameters are the saved ones, except
    which implementation is used (foreach, fused, capturable). At the same world size each rank gets back its own
    buffers and the state of its random number generators, at another one the first rank's buffers.

    Returns the extras. Raises `CheckpointError` on every rank, with nothing changed, if something is missing,
    damaged, or of another model.
    """
    comm = zero.comm
    phase, comm.phase = comm.phase, "load"
    try:
        loading = _Loading(Path(os.path.abspath(path)), zero, optimizer)
        checksums = _on_all(comm, "reading of a checkpoint", loading.read)
        if len(set(checksums)) > 1:
            raise CheckpointError(f"{path}: the ranks see different checkpoints there; they must share one file system")
        loading.write()
        return loading.content["extra"]
    finally:
        comm.phase = phase


class _Loading:
    """One rank's part of a load: `read` collects, `write` changes."""

    def __init__(self, path: Path, zero: Engine, optimizer: Optimizer) -> None:
        self.path, self.zero, self.optimizer = path, zero, optimizer

    def read(self) -> str:
        _check_idle(self.zero)
        self.folder, self.content, checksum = read_manifest(self.path)
        self.pieces = Pieces(self.folder, self.content["files"], self.content["pieces"], self.content["chunk"])
        self._match_parameters()
        self._match_groups()
        self.parameters = [self._read_parameter(unit, slot) for unit, slot, _ in _parameters(self.zero)]
        self.states = [self._read_state(unit, slot) for unit, slot, _ in _parameters(self.zero)]
        self.own = self._read_own()
        return checksum

    @torch.no_grad()
    def write(self) -> None:
        on_device = {  # torch's optimizers want `step` there for these
            id(param)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if group.get("capturable") or group.get("fused")
        }
        for (_, _, param), flat, state in zip(_parameters(self.zero), self.parameters, self.states, strict=True):
            _flat(param, param).copy_(flat)
            self.optimizer.state.pop(param, None)
            if state:
                self.optimizer.state[param] = self._placed(param, state, id(param) not in on_device)
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            _set_values(group, saved["values"])
        for name, buffer in _buffers(self.zero).items():
            buffer.copy_(self.own[f"buffers/{name}"].view(buffer.shape))
        if "generators/cpu" in self.own:
            torch.set_rng_state(self.own["generators/cpu"])
        if "generators/cuda" in self.own:
            torch.cuda.set_rng_state(self.own["generators/cuda"], self.zero.comm.device)
        for unit in self.zero.units:
            self.zero.master_changed(unit)
        self.zero.comm.step = self.content["step"]

    def _match_parameters(self) -> None:
        """Find in the checkpoint each parameter of the model, by any of its names, and leave nothing over."""
        entry_of = {name: entry for entry in self.content["parameters"].values() for name in entry["names"]}
        names_of = _names(self.zero.model)
        self.entries: dict[str, dict[str, Any]] = {}
        for _, slot, param in _parameters(self.zero):
            entry = entry_of.get(slot.name)
            if entry is None:
                raise CheckpointError(f"{self.folder}: has no parameter {slot.name} ({self._other_model()})")
            if sorted(entry["names"]) != sorted(names_of[id(param)]):
                tied = (
                    f"{' = '.join(entry['names'])} in the checkpoint, {' = '.join(names_of[id(param)])} in this model"
                )
                raise CheckpointError(f"{self.folder}: {slot.name} is tied otherwise: {tied}")
            self.entries[slot.name] = entry
            if tuple(entry["shape"]) != slot.shape:
                here = f"has shape {tuple(entry['shape'])}, in this model {slot.shape}"
                raise CheckpointError(f"{self.folder}: {slot.name} {here} ({self._other_model()})")
            if entry["dtype"] != NAMES[param.dtype]:
                raise CheckpointError(
                    f"{self.folder}: {slot.name} was saved as {DTYPES[entry['dtype']]}, and is {param.dtype} here; use "
                    "the same Precision(master=...), or load_model_weights into the model before sharding it"
                )
        used = {entry["names"][0] for entry in self.entries.values()}
        if unused := sorted(self.content["parameters"].keys() - used):
            raise CheckpointError(
                f"{self.folder}: has a parameter {unused[0]}, this model has not ({self._other_model()})"
            )

    def _other_model(self) -> str:
        return f"saved from {self.content['model']}, this is {type(self.zero.model).__name__}"

    def _match_groups(self) -> None:
        """For each parameter group of the optimizer, the saved one with the same parameters."""
        kind = type(self.optimizer).__name__
        if kind != self.content["optimizer"]:
            raise CheckpointError(
                f"{self.folder}: was saved with {self.content['optimizer']}, this optimizer is {kind}"
            )
        saved = {frozenset(group["names"]): group for group in self.content["groups"]}
        self.groups = []
        for number, names in enumerate(_names_in_groups(self.zero, self.optimizer)):
            there = frozenset(self.entries[name]["names"][0] for name in names)
            if there not in saved:
                raise CheckpointError(
                    f"{self.folder}: the optimizer's parameter group {number} ({len(names)} parameters, the first is "
                    f"{names[0] if names else 'missing'}) was not saved as one group"
                )
            self.groups.append(saved[there])
        if len(self.groups) != len(self.content["groups"]):
            had = len(self.content["groups"])
            raise CheckpointError(f"{self.folder}: the optimizer had {had} parameter groups, now {len(self.groups)}")

    def _read_parameter(self, unit: Unit, slot: Slot) -> Tensor:
        return self._read(unit, slot, "parameters", self.entries[slot.name]["dtype"])

    def _read_state(self, unit: Unit, slot: Slot) -> dict[str, Any]:
        """The optimizer's state of a parameter: flat tensors, and numbers."""
        state = self.entries[slot.name]["state"]
        elements = {key: self._read(unit, slot, f"optimizer/{key}", dtype) for key, dtype in state["elements"].items()}
        return elements | {key: _from_number(number) for key, number in state["numbers"].items()}

    def _read(self, unit: Unit, slot: Slot, kind: str, dtype: str) -> Tensor:
        """What this rank needs of a tensor with the shape of a parameter: flat, in the memory order of `slot`."""
        entry = self.entries[slot.name]
        start, stop = 0, slot.numel
        if unit.master.numel() < unit.layout.size:
            start, stop = (i - slot.offset for i in unit.layout.owned(slot, unit.rank))
        read = partial(self.pieces.read, f"{kind}/{entry['names'][0]}", DTYPES[dtype])
        if tuple(entry["stride"]) == slot.stride:
            return read(start, stop)
        whole = read(0, slot.numel).as_strided(slot.shape, entry["stride"])  # the model is now channels_last, or was
        return _flat(whole, torch.empty_strided(slot.shape, slot.stride, device="meta"))[start:stop]

    def _placed(self, param: nn.Parameter, state: dict[str, Any], on_host: bool) -> dict[str, Any]:
        """The state as the optimizer keeps it: elements in the parameter's shape; `step` on the host if `on_host`."""
        placed = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 1:
                value = value.as_strided(param.size(), param.stride())
            if isinstance(value, Tensor) and not (key == "step" and on_host):
                value = value.to(param.device)
            placed[key] = value
        return placed

    def _read_own(self) -> dict[str, Tensor]:
        """This rank's buffers and generators; of another number of ranks, the first one's buffers."""
        same = self.content["world_size"] == self.zero.world_size
        rank = self.zero.rank if same else 0
        buffers, saved = _buffers(self.zero), self.content["buffers"]
        if different := sorted(buffers.keys() ^ saved.keys()):
            where = "the checkpoint" if different[0] in saved else "this model"
            raise CheckpointError(f"{self.folder}: only {where} has a buffer {different[0]} ({self._other_model()})")
        own = {}
        for name, buffer in buffers.items():
            here, there = (list(buffer.shape), NAMES.get(buffer.dtype)), (saved[name]["shape"], saved[name]["dtype"])
            if here != there:
                raise CheckpointError(
                    f"{self.folder}: buffer {name} is {there} in the checkpoint, {here} in this model"
                )
            full = f"rank {rank}/buffers/{name}"
            own[f"buffers/{name}"] = self.pieces.read(full, buffer.dtype, 0, buffer.numel())
        for name, state in _generators(self.zero).items():
            full = f"rank {rank}/generators/{name}"
            if same and full in self.content["pieces"]:
                own[f"generators/{name}"] = self.pieces.read(full, torch.uint8, 0, state.numel())
        return own


def read_manifest(path: Path) -> tuple[Path, dict[str, Any], str]:
    """The folder of the checkpoint `path`, the content of its manifest, and its checksum."""
    folder = path if (path / MANIFEST).exists() else path.with_name(path.name + ".old")  # killed between two renames
    file = folder / MANIFEST
    if not file.exists():
        raise CheckpointError(f"{path} is not a zerolab checkpoint: there is no {path / MANIFEST}")
    try:
        manifest = json.loads(file.read_bytes())
        content, checksum = manifest["content"], manifest["checksum"]
        whole = digest(_canonical(content)) == checksum
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file} is damaged: it does not have the checksum that it states")
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{file} is not a {FORMAT} of version {VERSION}")
    return folder, content, checksum


# -- weights alone --------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_model_weights(path: str | Path, model: nn.Module) -> None:
    """Load the weights and buffers of a checkpoint folder, or of a safetensors file, into a plain module.

    Needs no process group. Values are converted to the dtype that the module has. Of tied weights, one name is enough.
    Raises `CheckpointError`, with nothing changed, if names or shapes differ. A lone file carries no checksums: what
    was altered in it without changing its structure is not noticed.
    """
    path = Path(os.path.abspath(path))
    targets = _plain_targets(model)
    if path.is_file():
        values = _read_weights_file(path, targets)
    else:
        values = _read_weights_of_checkpoint(path, targets)
    for names, target in targets:
        there = values[names[0]].dtype
        if there.is_floating_point != target.is_floating_point():
            raise CheckpointError(f"{path}: {names[0]} is {there} there, and {target.dtype} in this model")
    for names, target in targets:
        target.copy_(values[names[0]])


def _plain_targets(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """The tensors of a module's state dict, each with all its names."""
    names_of: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names_of.setdefault(id(value), ([], value))[0].append(name)
    for names, value in names_of.values():
        if hasattr(value, "_zerolab_owner"):
            raise CheckpointError("this model is sharded: use zerolab.load, or zero.load_full_state_dict")
        if value.is_meta:
            raise CheckpointError(
                f"{names[0]} is on the meta device, without memory; call model.to_empty(device=...) first"
            )
    return list(names_of.values())


def _read_weights_of_checkpoint(path: Path, targets: list[tuple[list[str], Tensor]]) -> dict[str, Tensor]:
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
            raise CheckpointError(f"{folder}: {' and '.join(names)} are one parameter here, and several there")
        if name in entry_of:
            entry = entry_of[name]
            flat = pieces.read(f"parameters/{entry['names'][0]}", DTYPES[entry["dtype"]], 0, target.numel())
            values[names[0]] = flat.as_strided(entry["shape"], entry["stride"])
        else:
            dtype = DTYPES[content["buffers"][name]["dtype"]]
            values[names[0]] = pieces.read(f"rank 0/buffers/{name}", dtype, 0, target.numel()).view(target.shape)
    return values


def _read_weights_file(path: Path, targets: list[tuple[list[str], Tensor]]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open  # here, so that `make gpu` runs where there is only torch

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            _compare_names(path, targets, shapes)
            found = {names[0]: next(name for name in names if name in shapes) for names, _ in targets}
            return {name: file.get_tensor(there).clone() for name, there in found.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _compare_names(path: Path, targets: list[tuple[list[str], Tensor]], shapes: dict[str, list[int]]) -> None:
    for names, target in targets:
        there = [name for name in names if name in shapes]
        if not there:
            raise CheckpointError(f"{path}: has no {names[0]}, which the model has")
        for name in there:
            if tuple(shapes[name]) != tuple(target.shape):
                shape = f"has shape {tuple(shapes[name])}, in this model {tuple(target.shape)}"
                raise CheckpointError(f"{path}: {name} {shape}")
    if unused := sorted(shapes.keys() - {name for names, _ in targets for name in names}):
        raise CheckpointError(f"{path}: has {unused[0]}, which the model has not")


def export_weights(path: str | Path, zero: Engine) -> None:
    """Write the whole weights and buffers to one safetensors file with the names of the plain model.

    As Hugging Face's libraries write and read it: tied weights once, under their first name. All ranks must take part;
    the first writes, to another name first. `load_model_weights` reads it, and so does `safetensors.torch.load_model`.
    """
    from safetensors.torch import save_file

    path = Path(os.path.abspath(path))
    state = zero.full_state_dict(rank0_only=True)

    def write() -> None:
        once = {id(value): name for name, value in reversed(state.items()) if isinstance(value, Tensor)}
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            save_file({name: state[name].contiguous() for name in once.values()}, new, metadata={"format": "pt"})
            with open(new, "rb") as file:
                os.fsync(file.fileno())
            new.rename(path)
            _flush_folder(path.parent)
        finally:
            new.unlink(missing_ok=True)

    _on_all(zero.comm, "export of weights", write if zero.rank == 0 else lambda: None)
