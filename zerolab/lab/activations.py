"""Activations, counted: the bytes that autograd keeps from forward for backward.

with saved(model) as kept:
    loss = model(x, y)
    loss.backward()
kept.peak
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """Bytes that are kept now, and the most there were. Storages are counted, and each of them once."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._users: Counter[int] = Counter()

    def add(self, key: int, nbytes: int) -> None:
        self._users[key] += 1
        if self._users[key] == 1:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def drop(self, key: int, nbytes: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.now -= nbytes


class _Handle:
    """One saved tensor. It is gone from the count when autograd lets go of it."""

    def __init__(self, tensor: Tensor, kept: Kept, counts: bool) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._kept, self._entry = tensor, kept, (storage._cdata, storage.nbytes())
        self._counts = counts
        if counts:
            kept.add(*self._entry)

    def __del__(self) -> None:
        if self._counts:
            self._kept.drop(*self._entry)


@contextmanager
def saved(model: nn.Module) -> Iterator[Kept]:
    """Count what forwards inside the block keep for backward, parameters and buffers of `model` left out."""
    kept, modules = Kept(), [*model.modules()]

    def pack(tensor: Tensor) -> Any:  # called for each tensor that is kept: parameters() would walk the model each time
        held = (value for module in modules for value in (*module._parameters.values(), *module._buffers.values()))
        own = {value.untyped_storage()._cdata for value in held if value is not None}
        return _Handle(tensor, kept, tensor.untyped_storage()._cdata not in own)

    with saved_tensors_hooks(pack, lambda handle: handle.tensor):
        yield kept
