"""A gathered parameter that autograd does not keep: its shard is kept in its place, and backward gathers again."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import ParametrizationList

_kept_of: WeakKeyDictionary[nn.Module, dict[int, int]] = WeakKeyDictionary()


def release(model: nn.Module) -> nn.Module:
    """The same model. Full parameters that its parametrizations make are released after their forward."""
    kept: dict[int, int] = {}  # storages, and their bytes

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if (made_by := getattr(storage, "made_by", None)) is None:
            kept[storage._cdata] = storage.nbytes()
            return tensor  # an activation
        return *made_by, (tensor.size(), tensor.stride(), tensor.storage_offset())

    for module in model.modules():
        if isinstance(module, ParametrizationList):
            module[0].register_forward_hook(_note)
    hooks = saved_tensors_hooks(pack, _unpack)
    model.register_forward_pre_hook(lambda *_: kept.clear())
    model.register_forward_pre_hook(lambda *_: hooks.__enter__())
    model.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)
    _kept_of[model] = kept
    return model


def kept_bytes(model: nn.Module) -> int | None:
    """What autograd kept of the last forward of a model that was given to `release`, shards left out; else None."""
    return sum(_kept_of[model].values()) if model in _kept_of else None


def _note(made: nn.Module, args: tuple[Any, ...], full: Tensor) -> None:
    """On the storage, since what autograd keeps may be a view, such as a transposed matrix."""
    storage: Any = full.untyped_storage()
    storage.made_by = made, *args


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    made, shard, place = kept
    with torch.no_grad():
        return made(shard).as_strided(*place)
