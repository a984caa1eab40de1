"""ZeRO-3 that writes down its passes, and leaves the prefetch schedule to a subclass (lesson 09).

class MyPrefetch(Recorded):
    def pre_forward(self, unit):
        unit.gather()              # waits
        ...                        # which of self.coming to start now?
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from zerolab.engine.prefetch import Prefetcher
from zerolab.engine.unit import Unit
from zerolab.zero3 import Zero3


class Recorded(Zero3):
    """ZeRO-3 whose own prefetching is off.

    A pass is a forward or a backward. In each, the engine comes to one unit after the other: to a unit's forward, in
    backward to its backward, twice to one that is used twice.

    coming: the units that the previous pass of the same kind came to from here on, in order. Empty in the first pass,
        and from the moment at which a pass departs from the previous one.
    ahead: how many units may be on their way, or there already, before the pass comes to them.

    What was gathered for nothing is released when a pass departs from the previous one, and when it ends.
    """

    prefetch = False
    ahead = 1
    coming: list[Unit]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.coming = []
        self.prefetcher = record = _Record(self)
        for point in ("pre_forward", "pre_backward"):  # a subclass need not call super()
            setattr(self, point, partial(record.reach, getattr(self, point)))


def holds_memory(unit: Unit) -> bool:
    """Whether there is memory for the full parameters of `unit`."""
    return unit.full.untyped_storage().size() > 0


class _Record(Prefetcher):
    """Stands where the engine's prefetcher stands, gathers nothing, and keeps `zero.coming`."""

    def __init__(self, zero: Recorded) -> None:
        super().__init__(zero.root)
        self._zero = zero
        self._at_work: list[Unit] = []  # reached, and not released since
        self._stay: list[Unit] = []  # there when the pass began
        self._in_reach = False

    def begin(self, kind: Hashable) -> None:
        self._release_early()
        super().begin(kind)
        self._at_work = []
        self._stay = [unit for unit in self._zero.units if holds_memory(unit)]
        self._zero.coming = list(self._route)

    def end(self) -> None:
        self._release_early()
        self._zero.coming = []
        super().end()

    def reach(self, method: Callable[[Unit], None], unit: Unit) -> None:
        if self._in_reach:  # pre_backward() may call pre_forward(): the pass comes to the unit once
            return method(unit)
        place = len(self._visits)
        self._at_work = [other for other in self._at_work if holds_memory(other)] + [unit]
        self._on_route = self._on_route and place < len(self._route) and self._route[place] is unit
        self._visits.append(unit)
        if not self._on_route:
            self._release_early()
        self._zero.coming = self._route[place + 1 :] if self._on_route else []
        self._in_reach = True
        try:
            method(unit)
        finally:
            self._in_reach = False

    def visit(self, unit: Unit) -> None:
        """`reach` has done it."""

    def start_next(self) -> None:
        """A subclass of Recorded does it."""

    def _release_early(self) -> None:
        for unit in self._zero.units:
            if holds_memory(unit) and not any(unit in those for those in (self._root, self._at_work, self._stay)):
                unit.release()
