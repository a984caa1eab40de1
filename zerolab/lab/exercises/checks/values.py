"""Inputs whose wrong results show what went wrong, and the comparisons that say so.

Rank r contributes `16**r * base`, in small integers that float32 holds exactly. So a sum over ranks is a number
in base 16, and each digit counts how often that rank's contribution is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.exercise import Wrong


def base(numel: int, number: int = 0) -> Tensor:
    """Different for every element and every `number`, and divisible by 2, 3 and 4, so that means are exact."""
    return 12.0 * (torch.arange(numel) + 1.0 + number * numel)


def share(base: Tensor, rank: int) -> Tensor:
    """What `rank` contributes."""
    return base * 16.0**rank


def total(base: Tensor, world_size: int) -> Tensor:
    return base * float(sum(16**rank for rank in range(world_size)))


def factor(got: Tensor, want: Tensor) -> float | None:
    """k if every element of `got` is k times that of `want` (which has no zeros), else None."""
    if got.shape != want.shape or got.numel() == 0 or not got.is_floating_point():
        return None
    ratio = got.double() / want.double()
    first = ratio.flatten()[0].item()
    return first if torch.allclose(ratio, torch.full_like(ratio, first), rtol=1e-4, atol=0.0) else None


def contributions(got: Tensor, base: Tensor, world_size: int) -> list[float] | None:
    """How often each rank's contribution is in `got`: [1, 1, 0] is the sum of the first two. None if it is no sum."""
    ratio = factor(got, base)
    if ratio is None or ratio < 0:
        return None
    for scale in dict.fromkeys((1, world_size, world_size**2, world_size**3)):
        number = round(ratio * scale)
        if abs(ratio * scale - number) > 1e-3 + 1e-6 * number:
            continue
        digits = [(number >> (4 * rank)) & 15 for rank in range(world_size)]
        if number < 16**world_size and max(digits) <= 4 * scale:  # nobody adds the same thing more than four times
            return [digit / scale for digit in digits]
    return None


def in_words(shares: list[float]) -> str:
    """[1, 0, 2] -> "rank 0's contribution, rank 2's contribution twice"."""
    times = {1.0: "", 2.0: " twice", 3.0: " three times", 4.0: " four times"}
    said = [f"rank {rank}'s contribution{times.get(k, f' times {k:.3g}')}" for rank, k in enumerate(shares) if k]
    return ", ".join(said) or "nobody's contribution"


def check_tensor(what: str, got: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """`got`, if it is a tensor of that shape and dtype; else raises Wrong."""
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is a {type(got).__name__}, not a tensor", forgot_to_return(got))
    if tuple(got.shape) != tuple(shape):
        raise Wrong(f"{what} has the shape {tuple(got.shape)}, not {tuple(shape)}", _shape_hint(got, shape))
    if got.dtype != dtype:
        raise Wrong(f"{what} is {got.dtype}, not {dtype}", f"the result must keep the input's dtype ({dtype})")
    return got


def forgot_to_return(got: Any) -> str:
    return "the function returns nothing: `return` is missing" if got is None else ""


def _shape_hint(got: Tensor, shape: tuple[int, ...]) -> str:
    count = 1
    for length in shape:
        count *= length
    return "the right number of elements, but in the wrong shape: use view(...)" if got.numel() == count else ""


def compare(
    what: str, got: Tensor, want: Tensor, explain: Callable[[Tensor], str | tuple[str, str]] = lambda got: ""
) -> None:
    """Raises Wrong unless the values are equal (to within two bits); `explain(got)` names the mistake."""
    if torch.allclose(got.double(), want.double(), rtol=1e-6, atol=0.0):
        return
    different = (got.double() - want.double()).abs() > 1e-6 * want.double().abs()
    count, k = int(different.sum()), factor(got, want)
    how_many = f"all {got.numel():,} elements" if different.all() else f"{count:,} of {got.numel():,} elements"
    if k is not None and different.all():
        seen = f"{what}: {k:.3f} x the expected value in {how_many}"
    else:
        at = tuple(torch.nonzero(different)[0].tolist())
        place = at[0] if len(at) == 1 else at
        seen = f"{what}: {how_many} wrong, the first at [{place}]: {got[at]:g}, expected {want[at]:g}"
        seen = seen.replace("[(", "[").replace(")]", "]")
    said = explain(got)
    likely, tip = said if isinstance(said, tuple) else (said, "")
    raise Wrong(seen, likely, tip, values_differ=True)
