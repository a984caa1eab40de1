"""A patient that runs out of memory."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT


class _Storages(TorchDispatchMode):
    """The bytes of the storages that operations make, for as long as they live, by device."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[Any, int, str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:

            def forget(_: Any, key: int = key) -> None:
                self._live.pop(key, None)

            gone = weakref.ref(storage, forget)
            self._live[key] = (gone, storage.nbytes(), str(tensor.device))

    def by_device(self) -> Counter[str]:
        gc.collect()
        found: Counter[str] = Counter()
        for _, nbytes, device in self._live.values():
            found[device] += nbytes
        return found


# -- 6 ---------------------------------------------------------------------------------------------------------------


def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    model.eval()
    total, count = torch.zeros(()), 0
    for x, y in batches:
        total = total + model(x, y)
        count += 1
    return total / count


def _validation(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(0)
    model, words = GPT(layers=2, width=64), text()
    held: list[int] = []
    with _Storages() as storages:

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for step in range(6):
                yield batch(words, rank, step, 8, 64)
                held.append(storages.by_device()["cpu"])

        evaluate(model, batches())
    per_batch = [after - before for before, after in itertools.pairwise(held)]
    print("live after validation batch 1 to 6, MB:", "  ".join(f"{size / 1e6:.1f}" for size in held))
    print(f"more with each batch: {min(per_batch) / 1e6:.1f} to {max(per_batch) / 1e6:.1f} MB")
    return held


VALIDATION = Patient(
    6,
    "It trains for hours and runs out of memory in the first validation, which has no backward and no optimizer.",
    (evaluate,),
    _validation,
    {
        "a": "The validation batches are larger than those of training: their activations do not fit.",
        "b": "The running sum of the losses holds every graph: all batches' activations stay with it.",
        "c": "The memory is fragmented: enough of it is free, but no hole is large enough for a batch.",
        "d": "The gradients of all validation batches pile up: nobody calls zero_grad() between them.",
    },
    "b",
    "In training backward() frees the graph. In validation nothing does: the sum of the losses holds every loss, "
    "each loss its graph, and each graph its activations. The growth is the same for every batch, and that is the"
    " sign. torch.no_grad() builds no graph at all, and .item() keeps a number in place of a tensor.",
)

PATIENTS = (VALIDATION,)
