"""The bytes of model states that this rank really holds, counted from live storages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine.engine import Engine


def model_states(zero: Engine, optimizer: Optimizer, on: str | None = None) -> dict[str, int]:
    """Bytes that this rank holds now: {"parameters", "gradients", "optimizer", "buffers"}.

    on: "device" or "host" counts only what is there. Without `offload` all is on the device. With it the host has what
    the optimizer works with: masters, their gradients, its state; also where device and host are one memory, the CPU's.

    Storages are counted, not tensors: one that many views share counts once, in the first category that it turns up
    in, and one that was released counts 0. Padding counts, because it takes memory.

    parameters: what forward sees and what the optimizer updates (masters; one storage where the dtype is the same).
    gradients: what `.grad` shows, and gradients that wait to be reduced.
    optimizer: every tensor in the optimizer's state; Adam's step counters are 4 bytes for each parameter tensor.
    """
    if on not in (None, "device", "host"):
        raise ValueError(f'on={on!r}: "device", "host", or None for both')
    host: dict[str, list[object]] = {"parameters": [], "gradients": [], "optimizer": [], "buffers": []}
    device: dict[str, list[object]] = {category: [] for category in host}
    for unit in zero.units:
        there = host if unit.offload else device
        device["parameters"] += [unit.full, unit.shard]
        there["parameters"] += unit.params
        device["gradients"] += [unit.bucket.full, unit.bucket.kept_memory, *(whole.grad for whole in unit.full_params)]
        there["gradients"] += [unit.bucket.grad, *(param.grad for param in unit.params)]
        for param in unit.params:
            there["optimizer"] += optimizer.state.get(param, {}).values()
    device["buffers"] += zero.model.buffers()

    seen: set[int] = set()
    both = {"device": device, "host": host}
    counted = {
        where: {category: _new_bytes(values, seen) for category, values in lists.items()}
        for where, lists in both.items()
    }
    if on:
        return counted[on]
    return {category: counted["device"][category] + counted["host"][category] for category in host}


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
