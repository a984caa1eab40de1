"""Inputs whose wrong results show what went wrong, and the comparisons that say so.

Rank r contributes `16**r * base`, in small integers that float32 holds exactly. So a sum over ranks is a number
in base 16, and each digit counts how often that rank's contribution is in it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerolab.comm.waiting import CommError
from zerolab.lab.exercises.exercise import Todo, Wrong

BY_ZERO = "a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"


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
    if not math.isfinite(first):
        return None
    return first if torch.allclose(ratio, torch.full_like(ratio, first), rtol=1e-4, atol=0.0) else None


def contributions(got: Tensor, base: Tensor, world_size: int) -> list[float] | None:
    """How often each rank's contribution is in `got`: [1, 1, 0] is the sum of the first two. None if it is no sum."""
    ratio = factor(got, base)
    return None if ratio is None else shares_in(ratio, world_size)


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
    what: str,
    got: Tensor,
    want: Tensor,
    explain: Callable[[Tensor], str | tuple[str, str]] = lambda got: "",
    rtol: float = 1e-6,
) -> None:
    """Raises Wrong unless the values are equal (to within two bits); `explain(got)` names the mistake."""
    different = ~torch.isclose(got.double(), want.double(), rtol=rtol, atol=0.0)
    if not different.any():
        return
    wrong, k = int(different.sum()), factor(got, want)
    how_many = f"all {counted(got.numel(), 'element')}" if different.all() else f"{wrong:,} of {got.numel():,} elements"
    if got.numel() == 1:
        how_many = "its only element"
    if k is not None and different.all():
        seen = f"{what}: {k:.3f} x the expected value in {how_many}"
    else:
        at = tuple(torch.nonzero(different)[0].tolist())
        place = f", the first at [{', '.join(map(str, at))}]" if at else ""
        digits = "g" if got.dtype != torch.float64 else ".17g"
        seen = f"{what}: {how_many} wrong{place}: {got[at]:{digits}}, expected {want[at]:{digits}}"
    said = BY_ZERO if bool(got.isinf().all()) else explain(got)
    likely, tip = said if isinstance(said, tuple) else (said, "")
    raise Wrong(seen, likely, tip, values_differ=True)


def storages_in(tree: Any) -> list[torch.UntypedStorage]:
    """Those of the tensors in `tree`: a tensor, or lists, tuples and dictionaries with tensors in them. Each once."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return list({storage._cdata: storage for storage in found}.values())


class nan_in_fresh_memory:
    """Makes torch.empty() return NaN, so that what was never written shows."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        self._set(True)

    def __exit__(self, *exception: object) -> None:
        self._set(self.before)

    def _set(self, on: bool) -> None:  # this fills what torch.empty() returns; torch's own function imports a compiler
        torch._C._set_deterministic_algorithms(on, warn_only=True)


@contextmanager
def in_case(answer: Any, when: str, likely: str, errors: dict[str, str] | None = None) -> Iterator[None]:
    """An error in the block is an answer's that fails only here: raises Wrong, with the answer's line.

    likely: the mistake behind it, unless `errors` knows the message.
    """
    try:
        yield
    except (CommError, Todo, Wrong):
        raise
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else ""
        said = f"{type(error).__name__}: {what}"
        likely = next((mistake for part, mistake in (errors or {}).items() if part in said), likely)
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == answer.__file__]
        line = f" · line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
        raise Wrong(f"{when}: {said}{line}", likely) from None
