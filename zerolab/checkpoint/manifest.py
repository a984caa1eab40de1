"""manifest.json: what a checkpoint contains, which file has which elements, and a checksum over all of that."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from zerolab.checkpoint.files import CHUNK, NAMES, CheckpointError, digest, dtype_name, naming
from zerolab.checkpoint.state import buffers, extra_state, group_values, names_in_groups, parameters
from zerolab.engine.engine import Engine

FORMAT, VERSION = "zerolab checkpoint", 1
MANIFEST = "manifest.json"


def build_manifest(
    zero: Engine, optimizer: Optimizer, parts: list[dict[str, Any]], extra: dict[str, Any]
) -> dict[str, Any]:
    """The content of manifest.json, from what each rank reported of its file (`parts`, in rank order).

    Raises `CheckpointError` if the ranks disagree, or if elements are missing.
    """
    pieces: dict[str, list[Any]] = {}
    for rank, part in enumerate(parts):
        for name, piece in part["pieces"].items():
            pieces.setdefault(name, []).append(piece)
        for name, state in part["states"].items():
            first = parts[0]["states"][name]
            if repr(state) != repr(first):  # repr: nan equals nan
                raise CheckpointError(f"optimizer state of {name} is {first} on rank 0, but {state} on rank {rank}")
    entries = {}
    for held in parameters(zero):
        state = parts[0]["states"][held.name]
        for name in [f"parameters/{held.name}", *(f"optimizer/{key}/{held.name}" for key in state["elements"])]:
            have = sum(piece["stop"] - piece["start"] for piece in pieces.get(name, []))
            if have != held.slot.numel:
                raise CheckpointError(f"{name}: the ranks have {have} of its {held.slot.numel} elements")
        entries[held.name] = {
            "names": held.names,
            "shape": held.slot.shape,
            "stride": held.slot.stride,
            "dtype": NAMES[held.param.dtype],
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
            {"names": names, "values": group_values(group)}
            for names, group in zip(names_in_groups(zero, optimizer), optimizer.param_groups, strict=True)
        ],
        "parameters": entries,
        "buffers": {
            name: {"shape": tuple(buffer.shape), "dtype": dtype_name(name, buffer)}
            for name, buffer in buffers(zero).items()
        },
        "extra_state": extra_state(zero),
        "extra": extra,
        "chunk": CHUNK,
        "files": {part["file"]: {"bytes": part["bytes"], "header": part["header"]} for part in parts},
        "pieces": pieces,
    }


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
    folder = path if (path / MANIFEST).exists() else path.with_name(path.name + ".old")  # killed between two renames
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
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{file} is not a {FORMAT} of version {VERSION}")
    return folder, content, checksum


def _canonical(content: Any) -> bytes:
    """The same bytes for the same JSON, whatever its layout."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
