"""What a program keeps in memory: every storage that it makes, to see later which are still there."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """`with alive:` as often as the program is called; `alive.left()` at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), tuple(leaf.shape))
        return result

    def left(self, but: tuple[Tensor | None, ...] = ()) -> list[tuple[int, tuple[int, ...]]]:
        """(bytes, shape) of each that is still in memory, the largest first, without those of the tensors `but`."""
        gc.collect()
        known = {tensor.untyped_storage()._cdata for tensor in but if tensor is not None}
        made = self._made.items()
        found = [(nbytes, shape) for key, (ref, nbytes, shape) in made if not ref.expired() and key not in known]
        return sorted(found, reverse=True)
