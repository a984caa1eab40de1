"""Bytes of model states that this rank really holds, counted from the live storages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zerolab.engine.engine import Engine
from zerolab.engine.step import each_of


def model_states(zero: Engine, optimizer: Optimizer | Iterable[Optimizer], on: str | None = None) -> dict[str, int]:
    """Bytes that this rank holds now, as {"parameters", "gradients", "optimizer", "buffers"}.

    parameters: what forward sees and what the optimizer updates (masters; one storage if both have the same dtype).
    gradients: what `.grad` shows, and gradients that are still to be reduced.
    optimizer: every tensor in the optimizer's state, or that of several in a list; Adam's step counters take 4 bytes
        per parameter tensor.
    buffers: the model's.

    on: count only what is on the "device" or on the "host". Without `offload` everything is on the device. With it,
    what the optimizer works on is on the host: masters, their gradients, its state. The split is the same on a CPU,
    where both are one memory. Raises ValueError for any other name.

    It counts storages, not tensors. A storage that several views share counts once, in the first category that has it;
    a released one counts 0. Padding counts, because it takes memory.
    """
    if on not in (None, "device", "host"):
        raise ValueError(f'on={on!r}: "device", "host", or None for both')
    optimizers = each_of(optimizer)
    host: dict[str, list[object]] = {"parameters": [], "gradients": [], "optimizer": [], "buffers": []}
    device: dict[str, list[object]] = {category: [] for category in host}
    for unit in zero.units:
        there = host if unit.offload else device
        device["parameters"] += [unit.full, unit.shard]
        there["parameters"] += unit.params
        device["gradients"] += [unit.bucket.full, unit.bucket.kept_memory, *(full.grad for full in unit.full_params)]
        there["gradients"] += [unit.bucket.grad, *(param.grad for param in unit.params)]
        for param in unit.params:
            for one in optimizers:
                there["optimizer"] += tree_leaves(one.state.get(param, {}))
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
    """Bytes of the storages behind `values` that are not in `seen` yet; adds them to `seen`."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            key = storage._cdata  # its identity; the address would be 0 for every released storage
            if key not in seen:
                seen.add(key)
                total += storage.nbytes()
    return total
