"""Stage 3: gather the next unit while this one computes. The previous pass of the same kind predicts the next unit.

A pass is one forward of some module, with or without gradients, or one backward. While it visits the units in the order
of the previous one, the next unit is known. Once a pass departs from that order, nothing more is predicted for it, and
the one unit that was gathered for nothing is released. In stage 3 all ranks make the same visits, so they make the same
predictions.

With prefetching, two units hold full parameters at a time, besides the root: the one at work and the next. In backward
a unit is released only after the unit before it has been gathered, so its release makes room for the next prefetch.
"""

from __future__ import annotations

from collections.abc import Hashable

from zerolab.engine.unit import Unit

AT_ONCE = 2  # units with full parameters at a time, besides the root


class Prefetcher:
    """`root`: units that stay gathered anyway."""

    def __init__(self, root: list[Unit]) -> None:
        self._root = root
        self._routes: dict[Hashable, list[Unit]] = {}  # for each kind of pass, the visits of the latest one
        self._route: list[Unit] = []  # the visits of the previous pass of this kind
        self._visits: list[Unit] = []  # the visits of this pass
        self._on_route = False  # both are the same so far
        self._gathered: list[Unit] = []  # the visited units that were gathered when we last looked
        self.ahead: Unit | None = None  # a unit being gathered that is not visited yet

    def begin(self, kind: Hashable) -> None:
        """A pass begins, and whatever came before it is over."""
        self._drop()
        self._route = self._routes.get(kind, [])
        self._routes[kind] = self._visits = []
        self._gathered = []
        self._on_route = True

    def end(self) -> None:
        self._drop()
        self._on_route = False

    def visit(self, unit: Unit) -> None:
        """This rank is about to need `unit`."""
        place = len(self._visits)
        self._on_route = self._on_route and place < len(self._route) and self._route[place] is unit
        if not self._on_route:
            self._drop()
        self.ahead = None
        self._visits.append(unit)
        if unit not in self._root and unit not in self._gathered:
            self._gathered.append(unit)

    def start_next(self) -> None:
        """Start to gather the next unit, if it is known and there is room."""
        self._gathered = [unit for unit in self._gathered if unit.gathered]
        place = len(self._visits)
        if self._on_route and self.ahead is None and place < len(self._route) and len(self._gathered) < AT_ONCE:
            following = self._route[place]
            if not following.gathered:
                self.ahead = following
                following.start_gather()

    def _drop(self) -> None:
        """Release what was gathered for nothing."""
        if self.ahead is not None and not self.ahead.gathered:
            self.ahead.release()
        self.ahead = None
