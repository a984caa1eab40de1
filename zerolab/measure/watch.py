"""Look over the engine's shoulder: run code before and after each override point, for the length of a block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit

POINTS = ("pre_forward", "post_forward", "pre_backward", "post_backward", "after_step")

Look = Callable[[str, Unit], None]


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
