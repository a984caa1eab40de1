"""manifest.json: what a checkpoint contains, which file has which elements, and a checksum over all of that."""

from __future__ import annotations

import copy
import json
import os
from math import prod
from pathlib import Path
from typing import Any

from zerolab.checkpoint.files import CHUNK, NAMES, CheckpointError, digest, dtype_name, naming
from zerolab.checkpoint.state import Optimizers, buffers, extra_state, group_values, names_in_groups, parameters
from zerolab.engine.ema import difference
from zerolab.engine.engine import Engine

FORMAT = "zerolab checkpoint"
VERSIONS = (1, 2)  # 2: some state has a shape of its own, "tensors" (see saving.py)
MANIFEST = "manifest.json"


def begin_manifest(zero: Engine, optimizer: Optimizers, extra: dict[str, Any]) -> dict[str, Any]:
    """What the content of manifest.json has of this moment, whatever the ranks' files will be."""
    begun = {
        "step": zero.comm.step,
        "optimizer": optimizer.name,
        "groups": [
            {"names": names, "values": group_values(group)}
            for names, group in zip(names_in_groups(zero, optimizer), optimizer.param_groups, strict=True)
        ],
        "buffers": {
            name: {"shape": tuple(buffer.shape), "dtype": dtype_name(name, buffer)}
            for name, buffer in buffers(zero).items()
        },
        "extra_state": extra_state(zero),
        "extra": extra,
    }
    return copy.deepcopy(begun)


def build_manifest(zero: Engine, begun: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of manifest.json, with what each rank reported of its file (`parts`, in rank order).

    Raises `CheckpointError` if the ranks disagree, or if elements are missing.
    """
    pieces: dict[str, list[Any]] = {}
    for part in parts:
        for name, piece in part["pieces"].items():
            pieces.setdefault(name, []).append(piece)
    states = {name: _agreed_state(name, [part["states"][name] for part in parts]) for name in parts[0]["states"]}
    if problem := difference([part["ema"] for part in parts]):
        raise CheckpointError(problem)
    ema = parts[0]["ema"] and {"updates": parts[0]["ema"][0]}
    entries = {}
    for held in parameters(zero):
        state, numel = states[held.name], held.slot.numel
        wanted = {f"parameters/{held.name}": numel}
        wanted |= {f"optimizer/{key}/{held.name}": numel for key in state["elements"]}
        wanted |= {f"optimizer/{key}/{held.name}": prod(t["shape"]) for key, t in state.get("tensors", {}).items()}
        wanted |= {f"ema/{held.name}": held.slot.numel} if ema else {}
        for name, numel in wanted.items():
            have = sum(piece["stop"] - piece["start"] for piece in pieces.get(name, []))
            if have != numel:
                raise CheckpointError(f"{name}: the ranks have {have} of its {numel} elements")
        entries[held.name] = {
            "names": held.names,
            "shape": held.slot.shape,
            "stride": held.slot.stride,
            "dtype": NAMES[held.param.dtype],
            "state": state,
        }
    return {
        "format": FORMAT,
        "version": 2 if any("tensors" in state for state in states.values()) else 1,
        "model": type(zero.model).__name__,
        "stage": zero.stage,
        "world_size": zero.world_size,
        **begun,
        "parameters": entries,
        "ema": ema,
        "chunk": CHUNK,
        "files": {part["file"]: {"bytes": part["bytes"], "header": part["header"]} for part in parts},
        "pieces": pieces,
    }


def _agreed_state(name: str, states: list[Any]) -> Any:
    """What the ranks say of a parameter's optimizer state, in rank order; None from those that have none of it."""
    first = next(rank for rank, state in enumerate(states) if state is not None)
    for rank, state in enumerate(states):
        if state is not None and repr(state) != repr(states[first]):  # repr: nan equals nan
            raise CheckpointError(
                f"optimizer state of {name} is {states[first]} on rank {first}, but {state} on rank {rank}"
            )
    return states[first]


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write manifest.json into `folder`, with its checksum, and flush it to disk."""
    text = json.dumps(content)
    with naming(folder / MANIFEST), open(folder / MANIFEST, "x", encoding="utf-8") as file:
        json.dump({"checksum": digest(_canonical(json.loads(text))), "content": json.loads(text)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> tuple[Path, dict[str, Any], str]:
    """The folder of the checkpoint `path`, the content of its manifest, and the checksum of that.

    Raises `CheckpointError` if there is no manifest, or if it is damaged or of another version.
    """
    folder = path if (path / MANIFEST).exists() else path.parent / f"{path.name}.old"  # killed between two renames
    file = folder / MANIFEST
    if not file.exists():
        raise CheckpointError(f"{path} is not a zerolab checkpoint: there is no {path / MANIFEST}")
    try:
        manifest = json.loads(file.read_bytes())
        content, checksum = manifest["content"], manifest["checksum"]
        intact = digest(_canonical(content)) == checksum
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{file} is damaged: its checksum does not match its content")
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") not in VERSIONS:
        raise CheckpointError(f"{file} is not a {FORMAT} of version {' or '.join(map(str, VERSIONS))}")
    return folder, content, checksum


def missing_file(folder: Path, content: dict[str, Any]) -> Path | None:
    """A file that the manifest lists and that is not in `folder`, or has another size than listed. None: all are."""
    for name, about in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != about["bytes"]:
            return file
    return None


def is_whole(path: Path) -> bool:
    """Whether the manifest is intact and the files have their sizes. A load also reads and checks their bytes."""
    try:
        folder, content, _ = read_manifest(path)
        return missing_file(folder, content) is None
    except (CheckpointError, OSError):
        return False


def _canonical(content: Any) -> bytes:
    """The same bytes for the same JSON, whatever its layout."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
