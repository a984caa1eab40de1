"""`save`: each rank writes its file, then the first rank writes the manifest and puts the new folder in place."""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerolab.checkpoint.files import CheckpointError, dtype_name, flush_folder, write_file
from zerolab.checkpoint.manifest import MANIFEST, begin_manifest, build_manifest, is_whole, missing_file, write_manifest
from zerolab.checkpoint.state import (
    Held,
    Optimizers,
    buffers,
    check_idle,
    extra_state,
    flat,
    full_stand_in,
    generators,
    names_in_groups,
    on_all_ranks,
    parameters,
    to_json,
)
from zerolab.comm.collectives import Comm
from zerolab.engine.ema import EMA
from zerolab.engine.engine import Engine
from zerolab.engine.slices import plainly, to_local

# What torch's optimizers keep once per parameter, not once per element. For a parameter without dimensions, the shape
# of the state does not tell which of the two it is.
SCALARS = {"step", "mu_product", "eta", "mu"}
TEMPORARY = ".tmp-" + "[0-9a-f]" * 8  # a pattern: how the name of a folder that is being written ends


@torch.no_grad()
def save(
    path: str | Path,
    zero: Engine,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    ema: EMA | None = None,
    keep: int | None = None,
    background: bool = False,
    **extra: Any,
) -> Saving | None:
    """Write a checkpoint of parameters, buffers, optimizer, step and random number generators to the folder `path`.

    All ranks must call it, after the optimizer's step and before the next forward, with the same path, and must see
    the same file system. A checkpoint that is already there stays until the new one is complete, and is then replaced.
    After a crash, `load` of the same path finds one or the other.

    optimizer: one, or a list of those that train the model: Muon for its matrices and AdamW for the rest.
    ema: the averages of this model, if it has some. They are saved in slices, as the parameters are.
    keep: for paths that end in a number, such as "run/step-000100": afterwards delete older checkpoints with the same
        name and a lower number, so that `keep` whole ones remain. A checkpoint is whole if its manifest is intact and
        its files have the sizes listed there; their bytes are not read. A damaged one does not count, and goes when it
        is older than all that are kept.
    background: return once this rank's part is copied to the host, and write it in a thread while training goes on.
        What is returned has a `wait()`, which all ranks must call before the next save: until it has returned, there
        is no new checkpoint. The copy takes as many bytes as the file.
    extra: any JSON; `load` and `read_extra` return it. The first rank's is saved, as is what modules have by
        `get_extra_state()`, which must be JSON too.

    Raises `CheckpointError` on every rank if any rank failed; with `background`, here or in `wait()`.
    """
    saving = Saving(zero, keep)
    saving.begin(path, optimizer, ema, extra, background)
    if background:
        return saving
    saving.wait()
    return None


class Saving:
    """A save that has begun. Until `wait()` returns, the path has what it had before."""

    def __init__(self, zero: Engine, keep: int | None) -> None:
        self._zero, self._keep = zero, keep
        self._path: Path
        self._optimizers: Optimizers
        self._folder: Path | None = None  # the new one, until it is in place
        self._part: _Part | None = None
        self._manifest: dict[str, Any] = {}
        self._in_thread = False
        self._write: Callable[[], dict[str, Any]]  # returns what the manifest needs to know of this rank's file

    def begin(self, path: str | Path, given: Any, ema: EMA | None, extra: dict[str, Any], background: bool) -> None:
        zero = self._zero

        def check() -> list[str]:
            self._path, self._optimizers = Path(os.path.abspath(path)), Optimizers(given)
            self._folder = _begin(self._path, zero, self._optimizers, ema, self._keep, extra)
            return [str(self._path), self._folder.name if self._folder else ""]

        def take() -> _Part:
            if not folder.is_dir():
                raise CheckpointError(
                    f"there is no {folder}, which rank 0 has made for {places[0][0]}: all ranks must pass the same "
                    "path and see the same file system"
                )
            self._manifest = begin_manifest(zero, self._optimizers, extra)
            self._part = _part(zero, self._optimizers, ema, background)
            return self._part

        def write() -> dict[str, Any]:
            return _write_part(folder, zero, self._part or take())

        with self._all_or_nothing() as comm:
            comm.exchange_bytes(b"", "start of a save")
            places = on_all_ranks(comm, "start of a save", check)
            self._folder = folder = self._path.with_name(places[0][1])
            for rank, (other, _) in enumerate(places):
                if Path(other).name != Path(places[0][0]).name:
                    raise CheckpointError(f"rank {rank} saves to {other}, rank 0 to {places[0][0]}: pass the same path")
            self._write = write
            if background:
                on_all_ranks(comm, "copy of a checkpoint", lambda: bool(take()))
                pool = ThreadPoolExecutor(1, "zerolab save")
                self._write = pool.submit(write).result
                pool.shutdown(wait=False)  # the thread ends with its work, for which a process that ends waits
                self._in_thread = True
                _under_way.add(zero)

    def wait(self) -> None:
        """Wait for all ranks to have written, and put the checkpoint in place. All ranks must call it.

        Raises `CheckpointError` on every rank if any rank failed. A second call does nothing.
        """
        if (folder := self._folder) is None:
            return
        with self._all_or_nothing() as comm:
            parts = on_all_ranks(comm, "writing of a checkpoint", lambda: self._write())

            def finish() -> None:
                if comm.rank == 0:
                    _finish(self._path, folder, self._keep, build_manifest(self._zero, self._manifest, parts))

            on_all_ranks(comm, "end of a save", finish)
            self._end()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[Comm]:
        comm = self._zero.comm
        phase, comm.phase = comm.phase, "save"
        try:
            yield comm
        except BaseException:
            if self._in_thread:
                with suppress(Exception):
                    self._write()  # the thread's: nothing may be written after this
            if comm.rank == 0 and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._end()
            raise
        finally:
            comm.phase = phase

    def _end(self) -> None:
        self._folder = self._part = None
        if self._in_thread:
            _under_way.discard(self._zero)


_under_way: weakref.WeakSet[Engine] = weakref.WeakSet()  # models with a save in the background


def _begin(
    path: Path, zero: Engine, optimizer: Optimizers, ema: EMA | None, keep: int | None, extra: dict[str, Any]
) -> Path | None:
    """On every rank: check that this can be saved. On the first rank: make the temporary folder, and return it."""
    check_idle(zero, ema)
    with suppress(FileNotFoundError):  # the working directory is gone
        if Path.cwd().is_relative_to(os.path.realpath(path)):
            raise CheckpointError(
                f"{path} is the working directory, or above it, and a save replaces the folder: save to a new one, "
                "such as step-000100"
            )
    if zero in _under_way:
        raise CheckpointError("a save of this model in the background is under way: first call wait() of it")
    names_in_groups(zero, optimizer)
    extra_state(zero)
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} must be at least 1")
    if keep is not None and not _split_name(path):
        raise CheckpointError(f"keep={keep} needs a path that ends in digits, not {path.name}")
    if zero.rank > 0:
        return None
    try:
        json.dumps(extra)
        _check_keys(extra)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extras must be JSON (numbers, strings, lists, dicts with strings as keys): {error}"
        ) from None
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link; save to the folder that it leads to, or remove it")
    old = path.with_name(path.name + ".old")
    if old.exists() and not (old / MANIFEST).is_file():
        raise CheckpointError(f"{old} is no zerolab checkpoint, and has the name that {path.name} gets meanwhile")
    if path.exists() and not (path / MANIFEST).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not a zerolab checkpoint, so it is left alone")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{glob.escape(path.name)}{TEMPORARY}"):  # from a save that was killed
        shutil.rmtree(leftover)
    folder = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir()
    return folder


def _check_keys(tree: Any) -> None:
    """Raises `TypeError` where JSON would turn a key into a string without a word."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(tree, dict) and not isinstance(key, str):
            raise TypeError(
                f"{key!r} is a key, and would come back as a string. Make a list of pairs of that dict (MultiStepLR: "
                "state['milestones'] = sorted(state['milestones'].items()), and Counter(dict(...)) of it after loading)"
            )
        if isinstance(value, dict | list | tuple):
            _check_keys(value)


# -- every rank: its file -------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """This rank's: flat tensors, and which elements of what they are; states of parameters; the progress of an EMA."""

    tensors: dict[str, Tensor]
    ranges: dict[str, tuple[int, int]]
    states: dict[str, dict[str, Any] | None]
    ema: list[Any] | None


def _write_part(folder: Path, zero: Engine, part: _Part) -> dict[str, Any]:
    """Write this rank's file; return what the manifest needs to know of it."""
    file = f"rank-{zero.rank:05}-of-{zero.world_size:05}.safetensors"
    written = write_file(folder / file, part.tensors)
    pieces = {
        name: {"file": file, "start": part.ranges[name][0], "stop": part.ranges[name][1], **entry}
        for name, entry in written.pop("tensors").items()
    }
    return {"file": file, **written, "pieces": pieces, "states": part.states, "ema": part.ema}


@torch.no_grad()
def _part(zero: Engine, optimizer: Optimizers, ema: EMA | None, copy: bool) -> _Part:
    """What this rank saves: a copy on the host, or what the model and the optimizer hold."""
    tensors: dict[str, Tensor] = {}
    ranges: dict[str, tuple[int, int]] = {}
    states: dict[str, dict[str, Any] | None] = {}
    shared = _shared_keys(optimizer)
    averages = ema.parts() if ema else []
    first_replica = zero.comm.replicate_group is None or zero.comm.replicate_group.rank == 0
    for number, held in enumerate(parameters(zero)):
        name, unit, slot, param = held.name, held.unit, held.slot, held.param
        begin, end = unit.layout.owned(slot, unit.rank)
        start, stop = begin - slot.offset, end - slot.offset
        tensors_of: dict[str, Tensor] = {f"parameters/{name}": param}
        per_number: dict[str, int] = {}  # elements, for what is not one number for each
        if ema:
            tensors_of[f"ema/{name}"] = averages[number]
        if optimizer.owned(param):
            states[name] = None
            if optimizer.here(param):
                states[name], full = _owned_state(held, optimizer, shared)
                if first_replica:
                    tensors |= full
                    ranges |= {kind: (0, value.numel()) for kind, value in full.items()}
        else:
            states[name], sliced, per_number = _sliced_state(held, optimizer, shared)
            tensors_of |= sliced
            if start == stop and slot.numel and not optimizer.state_of(param):
                states[name] = None  # an optimizer may leave out what has no elements
        if stop > start and first_replica:
            for kind, value in tensors_of.items():
                each = per_number.get(kind)
                dense = flat(value, param) if each is None else to_local(value).detach()
                first, last = (-(-place // (each or 1)) for place in (start, stop))
                if first < last:
                    ranges[kind] = (first, last)
                    tensors[kind] = dense[first:last] if not unit.sharded else dense
    for name, value in _own_tensors(zero).items():
        own = f"rank {zero.rank}/{name}"
        ranges[own] = (0, value.numel())
        tensors[own] = value.reshape(-1)
    if copy:
        tensors = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
    return _Part(tensors, ranges, states, ema.progress() if ema else None)


def _sliced_state(
    held: Held, optimizer: Optimizers, shared: set[str]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, int]]:
    """What an optimizer keeps for a slice: its description, the same on every rank, and its tensors.

    Last, for those of another shape, which a block-wise optimizer keeps: how many elements a number stands for.
    """
    name, state, numel = held.name, dict(optimizer.state_of(held.param)), held.slot.numel
    blocks = optimizer.blocks(held.param)
    with plainly():
        each = {key: blocks.per_number(held.param, key, value) for key, value in state.items()}
    per_number = {key: size for key, size in each.items() if size is not None}
    flat_ones = {key: state.pop(key) for key in per_number}
    elements = {key: value for key, value in state.items() if _per_element(held.param, key, value, shared)}
    numbers = {key: to_json(f"{key} of {name}", state[key]) for key in state.keys() - elements.keys()}
    described: dict[str, Any] = {
        "elements": {key: dtype_name(f"{key} of {name}", value) for key, value in sorted(elements.items())},
        "numbers": dict(sorted(numbers.items())),
    }
    if flat_ones:
        described["tensors"] = {
            key: {"dtype": dtype_name(f"{key} of {name}", value), "shape": [-(-numel // per_number[key])]}
            for key, value in sorted(flat_ones.items())
        }
    tensors = {f"optimizer/{key}/{name}": value for key, value in (elements | flat_ones).items()}
    return described, tensors, {f"optimizer/{key}/{name}": size for key, size in per_number.items()}


def _owned_state(held: Held, optimizer: Optimizers, shared: set[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an owner keeps for a full parameter. Tensors of another shape than the parameter's have a place of their
    own in the description, "tensors", and a list has its items there one by one."""
    name, stand_in = held.name, full_stand_in(held)
    state: dict[str, Any] = {}
    lists = {
        key: len(value) for key, value in optimizer.state_of(held.param).items() if isinstance(value, list | tuple)
    }
    for key, value in optimizer.state_of(held.param).items():
        state |= {f"{key}[{i}]": each for i, each in enumerate(value)} if key in lists else {key: value}
    described: dict[str, Any] = {"elements": {}, "numbers": {}}
    tensors: dict[str, Tensor] = {}
    for key, value in sorted(state.items()):
        what, place = f"{key} of {name}", f"optimizer/{key}/{name}"
        if _per_element(stand_in, key, value, shared):
            described["elements"][key] = dtype_name(what, value)
            tensors[place] = flat(value, stand_in)
        elif isinstance(value, Tensor) and value.dim() > 0:
            entry = {"dtype": dtype_name(what, value), "shape": list(value.shape)}
            described.setdefault("tensors", {})[key] = entry
            tensors[place] = value.detach().reshape(-1)
        else:
            described["numbers"][key] = to_json(what, value)
    if lists:
        described["lists"] = dict(sorted(lists.items()))
        described.setdefault("tensors", {})
    return described, tensors


def _shared_keys(optimizer: Optimizers) -> set[str]:
    """The keys of the optimizer's state that hold one number per parameter, whatever the parameter's shape."""
    keys = set(SCALARS)
    for param, state in (entry for one in optimizer.each for entry in one.state.items()):
        if param.dim() > 0:
            for key, value in state.items():
                if isinstance(value, Tensor):
                    keys = keys | {key} if value.dim() == 0 else keys - {key}
    return keys


def _per_element(param: Tensor, key: str, value: Any, shared: set[str]) -> bool:
    """Does this state have one value per element of the parameter? Then it is saved in slices, as the parameter is."""
    return isinstance(value, Tensor) and value.shape == param.shape and not (param.dim() == 0 and key in shared)


def _own_tensors(zero: Engine) -> dict[str, Tensor]:
    """What each rank has for itself and saves in full."""
    found = {f"buffers/{name}": buffer for name, buffer in buffers(zero).items()}
    return found | {f"generators/{name}": state for name, state in generators(zero).items()}


# -- the first rank: the manifest, and the new folder in the place of the old ----------------------------------------


def _finish(path: Path, folder: Path, keep: int | None, manifest: dict[str, Any]) -> None:
    """All files are written: add the manifest, swap the folders, delete what `keep` does not cover."""
    if file := missing_file(folder, manifest):
        raise CheckpointError(f"rank 0 does not find {file} as it was written: all ranks must see the same file system")
    write_manifest(folder, manifest)
    flush_folder(folder)
    old = path.with_name(path.name + ".old")
    if path.exists():
        if (path / MANIFEST).is_file():
            _remove(old)
            path.rename(old)
        else:
            path.rmdir()  # it was empty
    folder.rename(path)
    flush_folder(path.parent)
    _remove(old)
    if keep is not None:
        _remove_older(path, keep)


def _remove(folder: Path) -> None:
    """Rename it first, so that a half-deleted folder is never taken for a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name.removesuffix('.old')}.tmp-{secrets.token_hex(4)}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _remove_older(path: Path, keep: int) -> None:
    """Keep `path` and the `keep` - 1 whole checkpoints before it; delete what is older, and what killed saves left."""
    mine = _split_name(path)
    if mine is None:
        return
    stem, number = mine
    older: dict[int, list[Path]] = {}  # a killed save may have left two of the same number, one of them .old
    for other in path.parent.iterdir():
        name = _split_name(other)
        if name and name[0] == stem and name[1] < number and (other / MANIFEST).is_file() and not other.is_symlink():
            older.setdefault(name[1], []).append(other)
    kept = 1
    for _, same in sorted(older.items(), reverse=True):
        if kept < keep:
            kept += is_whole(min(same))  # which is not .old
            continue
        for other in same:
            _remove(other)
    for leftover in path.parent.glob(f"*{TEMPORARY}"):
        name = _split_name(path.with_name(leftover.name.split(".tmp-")[0]))
        if name and name[0] == stem:
            shutil.rmtree(leftover)


def _split_name(path: Path) -> tuple[str, int] | None:
    """run-3/step-000100 -> "step-" and 100; None for a name that does not end in digits."""
    match = re.fullmatch(r"(.*?)(\d+)(?:\.old)?", path.name)
    return None if match is None else (match[1], int(match[2]))
