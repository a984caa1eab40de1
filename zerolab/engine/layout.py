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

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm, prod

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
    `granularity`: every parameter and every shard starts at a multiple of this many elements. So a rank's slice of a
    parameter starts at a multiple of it within that parameter, whose elements must lie in order.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        world_size: int,
        align: int = 1,
        parts: int = 1,
        granularity: int = 1,
    ) -> None:
        if min(world_size, align, granularity) < 1:
            given = f"{world_size}, {align} and {granularity}"
            raise ValueError(f"world_size, align and granularity must be at least 1, not {given}")
        self.world_size, self.granularity = world_size, granularity
        align = lcm(align, granularity)
        self.slots: list[Slot] = []
        self.gaps: list[tuple[int, int]] = []  # stretches that belong to no parameter
        end = 0
        for name, tensor in tensors:
            offset = _round_up(end, align)
            self._add_gap(end, offset)
            # A dense tensor keeps its memory order (channels_last stays channels_last).
            stride = torch.empty_like(tensor, device="meta").stride()
            if granularity > 1 and not tensor.is_contiguous():
                raise ValueError(
                    f"granularity={granularity} counts elements in order, and those of {name}, of strides {stride} "
                    f"and shape {tuple(tensor.shape)}, lie in another: use parameters that are contiguous"
                )
            self.slots.append(Slot(name, tuple(tensor.shape), tuple(stride), offset))
            end = self.slots[-1].end
        self.numel = sum(slot.numel for slot in self.slots)
        self.size = _round_up(max(end, 1), world_size * lcm(parts, granularity))
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

    def in_blocks(self, slot: Slot, size: int) -> tuple[Layout, Slot]:
        """Where one number for each `size` elements of `slot` lies. The granularity must be a multiple of `size`."""
        numbers = Slot(slot.name, (-(-slot.numel // size),), (1,), slot.offset // size)
        blocks = copy.copy(self)
        blocks.slots, blocks.gaps, blocks.numel = [numbers], [], numbers.numel
        blocks.size, blocks.shard_size = self.size // size, self.shard_size // size
        return blocks, numbers

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
