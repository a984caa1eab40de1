"""The bytes of model states that this rank really holds, counted from live storages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine import Engine


def model_states(zero: Engine, optimizer: Optimizer) -> dict[str, int]:
    """Bytes that this rank holds now: {"parameters", "gradients", "optimizer", "buffers"}.

    Storages are counted, not tensors: one that many views share counts once, in the first category that it turns up
    in, and one that was released counts 0. Padding counts, because it takes memory.

    parameters: what forward sees and what the optimizer updates (masters; one storage where the dtype is the same).
    gradients: what `.grad` shows, and gradients that wait to be reduced.
    optimizer: every tensor in the optimizer's state; Adam's step counters are 4 bytes for each parameter tensor.
    """
    parameters, gradients = [], []
    for unit in zero.units:
        parameters += [unit.whole, *unit.params]
        gradients += [unit.whole_grad, unit.grad, *(param.grad for param in unit.params)]
        gradients += [whole.grad for whole in unit.wholes]
    state = [value for values in optimizer.state.values() for value in values.values()]

    seen: set[int] = set()
    return {
        "parameters": _new_bytes(parameters, seen),
        "gradients": _new_bytes(gradients, seen),
        "optimizer": _new_bytes(state, seen),
        "buffers": _new_bytes(zero.model.buffers(), seen),
    }


def _new_bytes(values: Iterable[object], seen: set[int]) -> int:
    """Bytes of the storages behind `values` that are not in `seen` yet, to which they are added."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            key = storage._cdata  # who the storage is; its address would be 0 for all that are released
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total
