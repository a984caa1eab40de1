"""A whole checkpoint by name on the disk, as safetensors and JSON: nothing in it has to be unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, dict[str, Tensor]]


def write_checkpoint(file: str, weights: dict[str, Tensor], state: State, groups: list[dict[str, Any]]) -> None:
    """By one rank: `file`.safetensors has the weights and Adam's state, `file`.json the groups."""
    flat = {f"weights/{name}": tensor for name, tensor in weights.items()}
    for name, kept in state.items():
        flat |= {f"{kind}/{name}": tensor for kind, tensor in kept.items()}
    save_file({key: tensor.contiguous() for key, tensor in flat.items()}, f"{file}.safetensors")
    Path(f"{file}.json").write_text(json.dumps(groups))


def read_checkpoint(file: str) -> dict[str, Any]:
    """What `write_checkpoint` wrote: {"weights", "state", "groups"}."""
    weights: dict[str, Tensor] = {}
    state: State = {}
    for key, tensor in load_file(f"{file}.safetensors").items():
        kind, _, name = key.partition("/")
        if kind == "weights":
            weights[name] = tensor
        else:
            state.setdefault(name, {})[kind] = tensor
    return {"weights": weights, "state": state, "groups": json.loads(Path(f"{file}.json").read_text())}
