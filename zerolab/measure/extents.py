"""Who holds what: which elements of the model's flat storage this rank holds now, by category."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.engine.step import each_of
from zerolab.engine.unit import Unit
from zerolab.measure.formulas import CATEGORIES


class Extent(NamedTuple):
    """Elements [start, end) of the flat storage: all units end to end, in the order they were made."""

    start: int
    end: int


class Holdings(NamedTuple):
    """What `rank` holds of `size` elements. units: (name, start, end) of each; extents: by category."""

    stage: int
    rank: int
    size: int
    units: list[tuple[str, int, int]]
    extents: dict[str, list[Extent]]

    def share(self, category: str) -> float:
        """The fraction of the flat storage that this rank holds, from 0 to 1."""
        return sum(extent.end - extent.start for extent in self.extents[category]) / self.size


def holdings(zero: Engine, optimizer: Optimizer | Iterable[Optimizer]) -> Holdings:
    """Look at the live storages: which elements of "parameters", "gradients" and "optimizer" does this rank hold?

    Call it after backward, while there are gradients. A released storage holds nothing. Optimizer state covers the
    elements of its parameter; padding has none, which leaves gaps of at most 15 bytes.
    """
    optimizers = each_of(optimizer)
    units: list[tuple[str, int, int]] = []
    found: dict[str, list[Extent]] = {category: [] for category in CATEGORIES}
    base = 0
    for unit in zero.units:
        found["parameters"] += _held(unit, unit.full, base) + _held(unit, unit.master, base)
        for gradient in (unit.bucket.full, unit.bucket.grad, *(param.grad for param in unit.params)):
            found["gradients"] += _held(unit, gradient, base)
        first = unit.layout.bounds(unit.rank)[0] if unit.sharded else 0
        origin = base + first - int(unit.master.storage_offset())
        for param in unit.params:
            state = [value for one in optimizers for value in one.state.get(param, {}).values()]
            numel = to_local(param).numel()
            if numel and any(isinstance(x, Tensor) and x.shape == param.shape for x in state):
                start = origin + int(param.storage_offset())
                found["optimizer"].append(Extent(start, start + numel))
        units.append((unit.name, base, base + unit.layout.size))
        base += unit.layout.size
    merged = {category: _merge(extents) for category, extents in found.items()}
    return Holdings(zero.stage, zero.rank, base, units, merged)


def _held(unit: Unit, tensor: Tensor | None, base: int) -> list[Extent]:
    """What the storage of `tensor` covers: nothing, this rank's shard, or the full unit, which begins at `base`."""
    elements = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements == 0:
        return []
    if elements >= unit.layout.size:
        return [Extent(base, base + unit.layout.size)]
    start, end = unit.layout.bounds(unit.rank)
    return [Extent(base + start, base + end)]


def _merge(extents: list[Extent]) -> list[Extent]:
    """The same elements, in order, as extents that neither overlap nor touch."""
    result: list[Extent] = []
    for start, end in sorted(extents):
        if result and start <= result[-1].end:
            result[-1] = Extent(result[-1].start, max(result[-1].end, end))
        else:
            result.append(Extent(start, end))
    return result
