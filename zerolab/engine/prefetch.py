"""Stage 3: gather the next unit while this one computes. Which one is next, the last pass of the same kind tells.

A pass is one forward of some module, with or without gradients, or one backward. As long as it visits the units as the
last one did, the next unit is known. A pass that leaves that way is not guessed about any further, and the one unit
that was gathered in vain is released. In stage 3 all ranks make the same visits, so they make the same guesses.

Because of it two units are whole at the same time, the root not counted: the one at work and the next one. In backward
a unit's parameters are released after the unit before it has been gathered, so the release is the time for the next.
"""

from __future__ import annotations

from collections.abc import Hashable

from zerolab.engine.unit import Unit

AT_ONCE = 2  # units that are whole at the same time, besides the root


class Prefetcher:
    """`root`: units that stay whole anyway."""

    def __init__(self, root: list[Unit]) -> None:
        self._root = root
        self._routes: dict[Hashable, list[Unit]] = {}  # for each kind of pass, the visits of the last one
        self._route: list[Unit] = []  # those of the last pass of this kind
        self._visits: list[Unit] = []  # those of this pass
        self._on_route = False  # they are the same so far
        self._whole: list[Unit] = []  # which of the visited units were whole, when last looked at
        self._ahead: Unit | None = None  # is being gathered, and not yet visited

    def begin(self, kind: Hashable) -> None:
        """Another pass begins, and whatever there was before it is over."""
        self._drop()
        self._route = self._routes.get(kind, [])
        self._routes[kind] = self._visits = []
        self._whole = []
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
        self._ahead = None
        self._visits.append(unit)
        if unit not in self._root and unit not in self._whole:
            self._whole.append(unit)

    def start_next(self) -> None:
        """Start to gather the unit that comes next, if that is known and there is room."""
        self._whole = [unit for unit in self._whole if unit.gathered]
        place = len(self._visits)
        if self._on_route and self._ahead is None and place < len(self._route) and len(self._whole) < AT_ONCE:
            following = self._route[place]
            if not following.gathered:
                self._ahead = following
                following.start_gather()

    def _drop(self) -> None:
        """What was gathered in vain goes."""
        if self._ahead is not None and not self._ahead.gathered:
            self._ahead.release()
        self._ahead = None
