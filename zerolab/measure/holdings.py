"""Who holds what: which part of the model's flat storage this rank holds now, for each category."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit
from zerolab.measure.formulas import CATEGORIES


class Extent(NamedTuple):
    """Elements `start` to `end` of the flat storage: all units end to end, in the order in which they were made."""

    start: int
    end: int


class Holdings(NamedTuple):
    """What `rank` holds of `size` elements, `units` being (name, first element, end) of each unit."""

    stage: int
    rank: int
    size: int
    units: list[tuple[str, int, int]]
    extents: dict[str, list[Extent]]

    def share(self, category: str) -> float:
        """How much of the flat storage this rank holds, from 0 to 1."""
        return sum(extent.end - extent.start for extent in self.extents[category]) / self.size


def holdings(zero: Engine, optimizer: Optimizer) -> Holdings:
    """Read from the live storages which elements are held: {"parameters", "gradients", "optimizer"}.

    Call it when backward has returned, to see gradients too. A storage that was released holds nothing. Optimizer state
    covers the elements of its parameter (padding has none, which leaves gaps of at most 15 bytes).
    """
    units: list[tuple[str, int, int]] = []
    found: dict[str, list[Extent]] = {category: [] for category in CATEGORIES}
    base = 0
    for unit in zero.units:
        for tensor in (unit.full, unit.master):
            found["parameters"] += _held(zero, unit, tensor, base)
        for tensor in (unit.bucket.full, unit.bucket.grad, *(param.grad for param in unit.params)):
            found["gradients"] += _held(zero, unit, tensor, base)
        first = 0 if unit.master.numel() == unit.layout.size else unit.layout.bounds(unit.rank)[0]
        origin = base + first - unit.master.storage_offset()
        for param in unit.params:
            state = optimizer.state.get(param, {})
            if param.numel() and any(isinstance(x, Tensor) and x.shape == param.shape for x in state.values()):
                start = origin + param.storage_offset()
                found["optimizer"].append(Extent(start, start + param.numel()))
        units.append((unit.name, base, base + unit.layout.size))
        base += unit.layout.size
    merged = {category: _merge(extents) for category, extents in found.items()}
    return Holdings(zero.stage, zero.rank, base, units, merged)


def _held(zero: Engine, unit: Unit, tensor: Tensor | None, base: int) -> list[Extent]:
    """Where the storage of `tensor` lies in the model, if the unit begins at `base`: the whole unit or this shard."""
    elements = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    if elements == 0:
        return []
    if elements >= unit.layout.size:
        return [Extent(base, base + unit.layout.size)]
    start, end = unit.layout.bounds(unit.rank)
    return [Extent(base + start, base + end)]


def _merge(extents: list[Extent]) -> list[Extent]:
    """The same elements in extents that neither overlap nor touch, in order."""
    result: list[Extent] = []
    for start, end in sorted(extents):
        if result and start <= result[-1].end:
            result[-1] = Extent(result[-1].start, max(result[-1].end, end))
        else:
            result.append(Extent(start, end))
    return result
