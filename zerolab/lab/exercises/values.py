"""What wrong values are made of, and memory that shows what was never written to it.

Rank r contributes `16**r * base`, in small integers that float32 holds exactly. So a sum over ranks is a number
in base 16, and each digit counts how often that rank's contribution is in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def factor(got: Tensor, want: Tensor) -> float | None:
    """k if every element of `got` is k times that of `want` (which has no zeros), else None."""
    if got.shape != want.shape or got.numel() == 0 or not got.is_floating_point():
        return None
    ratio = got.double() / want.double()
    first = ratio.flatten()[0].item()
    if not math.isfinite(first):
        return None
    return first if torch.allclose(ratio, torch.full_like(ratio, first), rtol=1e-4, atol=0.0) else None


def shares_in(ratio: float, world_size: int) -> list[float] | None:
    """The digits of `ratio` in base 16: how often each rank's contribution is in it, or None if that cannot be."""
    if ratio < 0:
        return None
    for scale in dict.fromkeys((1, world_size, world_size**2, world_size**3)):
        number = round(ratio * scale)
        if abs(ratio * scale - number) > 1e-3 + 1e-6 * number:
            continue
        digits = [(number >> (4 * rank)) & 15 for rank in range(world_size)]
        if number < 16**world_size and max(digits) <= 4 * scale:  # nobody adds the same thing more than four times
            return [digit / scale for digit in digits]
    return None


def in_words(shares: list[float], thing: str = "contribution") -> str:
    """[1, 0, 2] -> "rank 0's and twice rank 2's contributions"."""
    times = {1.0: "", 2.0: "twice ", 3.0: "three times ", 4.0: "four times "}
    said = [f"{times.get(k, f'{k:.3g} times ')}rank {rank}'s" for rank, k in enumerate(shares) if k]
    if not said:
        return f"nobody's {thing}"
    *others, last = said
    return f"{', '.join(others)} and {last} {thing}s" if others else f"{last} {thing}"


def counted(number: int, thing: str) -> str:
    """ "1 round", "2 rounds"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def storages_in(tree: Any) -> list[torch.UntypedStorage]:
    """Those of the tensors in `tree`: a tensor, or lists, tuples and dictionaries with tensors in them. Each once."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return list({storage._cdata: storage for storage in found}.values())


class nan_in_fresh_memory:
    """Makes torch.empty() return NaN, and storages grow by NaN, so that what was never written shows."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        self._set(True)
        torch.UntypedStorage.resize_ = _grow_by_nan  # type: ignore[method-assign, assignment]

    def __exit__(self, *exception: object) -> None:
        self._set(self.before)
        del torch.UntypedStorage.resize_  # the method of its base is back

    def _set(self, on: bool) -> None:  # this fills what torch.empty() returns; torch's own function imports a compiler
        torch._C._set_deterministic_algorithms(on, warn_only=True)


def _grow_by_nan(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    before = storage.nbytes()
    torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
    if size > before and storage.device.type == "cpu":
        torch.empty(0, dtype=torch.uint8).set_(storage)[before:].fill_(255)  # all bits set: NaN in every float dtype
    return storage
