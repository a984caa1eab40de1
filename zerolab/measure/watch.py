"""Look over the engine's shoulder: run code before and after each override point, for the length of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit

POINTS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "after_step")

Look = Callable[[str, Unit], None]


def each_of(given: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that train a model, given as one or as several in a list. Raises TypeError for anything else."""
    several = isinstance(given, Iterable) and not isinstance(given, Optimizer)
    found: list[Any] = [*given] if several else [given]  # type: ignore[misc]
    if strange := [type(one).__name__ for one in found if not isinstance(one, Optimizer)]:
        raise TypeError(f"pass the optimizer, or a list of those that train this model, and no {strange[0]}")
    return found


@contextmanager
def watched(zero: Engine, before: Look, after: Look) -> Iterator[None]:
    """Call `before(point, unit)` and `after(point, unit)` around every override point the engine calls."""
    hidden = {point: vars(zero).get(point) for point in POINTS}
    for point in POINTS:
        setattr(zero, point, _around(getattr(zero, point), point, before, after))
    try:
        yield
    finally:
        for point, own in hidden.items():
            if own is None:
                delattr(zero, point)
            else:  # an outer block still watches
                setattr(zero, point, own)


def _around(method: Any, point: str, before: Look, after: Look) -> Any:
    @functools.wraps(method)
    def call(unit: Unit) -> Any:
        before(point, unit)
        result = method(unit)
        after(point, unit)
        return result

    return call
