"""A gathered parameter that autograd does not keep: its shard is kept in its place, and backward gathers again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList

_kept: dict[int, int] = {}  # storages, and their bytes


def release(model: nn.Module) -> nn.Module:
    """The same model. Full parameters that its parametrizations make are released after their forward."""
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            module[0].register_forward_hook(_note)
    hooks = saved_tensors_hooks(_pack, _unpack)
    model.register_forward_pre_hook(lambda *_: _kept.clear())
    model.register_forward_pre_hook(lambda *_: hooks.__enter__())
    model.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)
    return model


def kept_bytes() -> int:
    """What autograd kept of the last forward of a model that was given to `release`, shards left out."""
    return sum(_kept.values())


def _note(made: nn.Module, args: tuple[Any, ...], full: Tensor) -> None:
    """On the storage, since what autograd keeps may be a view, such as a transposed matrix."""
    storage: Any = full.untyped_storage()
    storage.made_by = made, *args


def _pack(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    if (made_by := getattr(storage, "made_by", None)) is None:
        _kept[storage._cdata] = storage.nbytes()
        return tensor  # an activation
    return *made_by, (tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    made, shard, place = kept
    with torch.no_grad():
        return made(shard).as_strided(*place)
