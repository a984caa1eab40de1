"""Where each parameter lies in a flat storage, and which part of it a rank owns. Pure arithmetic.

A unit keeps its parameters in one flat storage, one after another, padded so that it cuts into `world_size` equal
shards. Three parameters of 5, 4 and 6 elements on 4 ranks:

    flat      a a a a a b b b b c c c c c c .          15 elements, 1 of padding
    shard     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3          4 elements each

Rank 1 owns the last element of `a` and the first three of `b`, and nothing of `c`. Shard boundaries ignore parameter
boundaries. That keeps all shards the same size, as reduce-scatter and all-gather require
(Rajbhandari et al., arXiv 1910.02054, section 5.1, "P_os").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat storage. `offset` and `numel` count elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Layout:
    """The arrangement of named tensors in one flat storage of `size` elements, cut into equal shards.

    `align`: every parameter starts at a multiple of this many elements (kernels like 16-byte boundaries).
    `parts`: every shard can itself be cut into this many equal parts.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], world_size: int, align: int = 1, parts: int = 1) -> None:
        if world_size < 1 or align < 1:
            raise ValueError(f"world_size and align must be at least 1, not {world_size} and {align}")
        self.world_size = world_size
        self.slots: list[Slot] = []
        self.gaps: list[tuple[int, int]] = []  # stretches that belong to no parameter
        end = 0
        for name, tensor in tensors:
            offset = _round_up(end, align)
            self._add_gap(end, offset)
            # A dense tensor keeps its memory order (channels_last stays channels_last).
            stride = torch.empty_like(tensor, device="meta").stride()
            self.slots.append(Slot(name, tuple(tensor.shape), tuple(stride), offset))
            end = self.slots[-1].end
        self.numel = sum(slot.numel for slot in self.slots)
        self.size = _round_up(max(end, 1), world_size * parts)
        self.shard_size = self.size // world_size
        self._add_gap(end, self.size)

    def _add_gap(self, start: int, stop: int) -> None:
        if stop > start:
            self.gaps.append((start, stop))

    def bounds(self, rank: int) -> tuple[int, int]:
        """The shard of `rank`: its first flat element, and one past its last."""
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def owned(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The flat elements `[start, stop)` of `slot` that `rank` owns; none if start == stop."""
        first, last = self.bounds(rank)
        start = min(max(slot.offset, first), last)
        return start, max(start, min(slot.end, last))

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """View of the shard of `rank`: (size,) -> (shard_size,)."""
        start, stop = self.bounds(rank)
        return flat[start:stop]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat storage (size,) in the shapes of the parameters."""
        base = int(flat.storage_offset())
        return [flat.as_strided(slot.shape, slot.stride, base + slot.offset) for slot in self.slots]

    def slices(self, shard: Tensor, rank: int) -> list[Tensor]:
        """Views of the slice that `rank` owns of each parameter, cut out of its shard (shard_size,).

        Each has the shape (k, 1, ..., 1): as many dimensions as the parameter, at least one, and k may be 0.
        """
        first, _ = self.bounds(rank)
        views = []
        for slot in self.slots:
            start, stop = self.owned(slot, rank)
            views.append(shard[start - first : stop - first].view(-1, *[1] * (len(slot.shape) - 1)))
        return views


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
