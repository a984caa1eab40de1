"""Has backward passed a unit, and whose turn is it to be reduced?

Autograd does not say when it has finished with a module. But it runs what was created last first. So what made an
input of a unit runs after everything that the unit did with that input: when a gradient arrives at such an input,
backward has passed that call. A call without such an input (token ids need no gradient) has been passed when a
gradient reaches the outputs of a call that had ended before this one began. A clock that ticks as calls begin and end
tells which those are. Whatever is still open when backward ends has been passed then.

Once every parameter of a unit has its gradient, backward does not need them any more either. But with calls still open
that would not happen at the same point between the gathers on every rank, so it only counts without them.

A unit that has been passed waits for its turn to be reduced. Turns follow one order on every rank, the reverse of first
use in forward as the first rank saw it, even where ranks used different units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor

if TYPE_CHECKING:
    from zerolab.engine.unit import Unit


class ForwardCall:
    """A call of `units` in forward. Only its autograd graph holds it: without a backward it goes with the graph."""

    def __init__(self, units: list[Unit], begun: int) -> None:
        self.units, self.begun = units, begun


class Progress:
    """How far forward and backward have come with one unit."""

    def __init__(self) -> None:
        self.ran = False  # a forward has used the unit since the last backward
        self.calls: WeakSet[ForwardCall] = WeakSet()  # those that backward has not passed
        self.unwatched: ForwardCall | None = None  # the call under way, if it has no input that will show its end
        self.opened = False  # pre_backward has run, post_backward has not
        self.passed = False
        self.arrived: set[int] = set()  # parameters whose gradient came in this backward


class Backward:
    """`begin()` is called whenever a gradient shows up, `passed(unit)` when backward has passed a unit."""

    def __init__(self, units: list[Unit], begin: Callable[[], None], passed: Callable[[Unit], None]) -> None:
        self._begin, self._on_passed = begin, passed
        self._progress = {unit: Progress() for unit in units}
        self._clock = 0  # ticks when a call begins and when it ends
        self._unwatched: list[ForwardCall] = []  # calls whose backward has begun, without an input that shows its end
        self._order = list(units)  # of first use in forward
        self._first_uses: list[Unit] | None = []  # as this rank sees it, until the ranks have agreed on one
        self._turns: deque[Unit] = deque()  # units still to be reduced in this backward

    # -- forward -------------------------------------------------------------------------------------------------

    def used(self, unit: Unit) -> None:
        """A forward that may have a backward uses `unit`."""
        progress = self._progress[unit]
        if not progress.ran:
            progress.ran = True
            if self._first_uses is not None and unit not in self._first_uses:
                self._first_uses.append(unit)

    def call_begins(self, units: list[Unit], inputs: list[Tensor]) -> None:
        """A call of `units` begins. `inputs`: its tensors that require a gradient."""
        self._clock += 1
        call = ForwardCall(units, self._clock)
        made = [tensor for tensor in inputs if tensor.grad_fn is not None]
        for tensor in made:
            tensor.register_hook(partial(self._at_input, call))
        for unit in units:
            self._progress[unit].calls.add(call)
            self._progress[unit].unwatched = None if made else call

    def call_ends(self, units: list[Unit]) -> tuple[int, ForwardCall | None]:
        """A call of `units` ends: the time, and the call if none of its inputs will show its end in backward."""
        self._clock += 1
        unwatched = self._progress[units[0]].unwatched if units else None
        for unit in units:
            self._progress[unit].unwatched = None
        return self._clock, unwatched

    # -- backward: has it passed a unit? ---------------------------------------------------------------------------

    def open(self, unit: Unit) -> bool:
        """Backward enters `unit`. False if it had entered before."""
        progress = self._progress[unit]
        was_open, progress.opened = progress.opened, True
        return not was_open

    def is_open(self, unit: Unit) -> bool:
        return self._progress[unit].opened

    def close(self, unit: Unit) -> None:
        self._progress[unit].opened = False

    def at_outputs(self, ended: int, unwatched: ForwardCall | None) -> None:
        """A gradient reached the outputs of a call that ended at `ended`: later calls have been passed."""
        for call in [call for call in self._unwatched if call.begun > ended]:
            self._unwatched.remove(call)
            self._end_call(call)
        if unwatched and unwatched not in self._unwatched:
            self._unwatched.append(unwatched)

    def at_parameter(self, unit: Unit, i: int) -> None:
        """The gradient of parameter `i` of `unit` is there."""
        progress = self._progress[unit]
        progress.arrived.add(i)
        if len(progress.arrived) == len(unit.params) and not progress.calls:
            self._pass(unit)

    def _at_input(self, call: ForwardCall, grad: Tensor) -> None:
        self._begin()
        self._end_call(call)

    def _end_call(self, call: ForwardCall) -> None:
        for unit in call.units:
            self._progress[unit].calls.discard(call)
            if not self._progress[unit].calls:
                self._pass(unit)

    def _pass(self, unit: Unit) -> None:
        progress = self._progress[unit]
        if not progress.passed:
            progress.passed = True
            self._on_passed(unit)

    # -- backward: whose turn is it? -------------------------------------------------------------------------------

    def set_turns(self, sync: bool) -> None:
        """A backward begins. sync: it reduces."""
        self._turns = deque(unit for unit in reversed(self._order) if unit.trainable and sync)

    def turns(self, everyone: bool = False) -> Iterator[Unit]:
        """The units whose turn has come; `everyone`: all that are left.

        A unit without a forward has nothing to wait for, but it takes its turn: other ranks may need its zeros.
        """
        while self._turns:
            progress = self._progress[self._turns[0]]
            if not (everyone or progress.passed or not (progress.ran or progress.opened)):
                return
            yield self._turns.popleft()

    # -- the end of backward -----------------------------------------------------------------------------------------

    def end(self, keep_graph: bool) -> None:
        """Backward is over. keep_graph: its graph was kept, so the same forward may have another backward."""
        for call in self._unwatched:
            for unit in call.units:
                self._progress[unit].calls.discard(call)
        self._reset(keep_graph)

    def drop(self) -> None:
        """An error broke backward off."""
        self._reset(keep_graph=False)

    def _reset(self, keep_graph: bool) -> None:
        self._unwatched = []
        for progress in self._progress.values():
            progress.passed = False
            progress.ran = progress.ran and (keep_graph or len(progress.calls) > 0)
            progress.arrived.clear()

    def learn_order(self, agree: Callable[[list[int]], list[int]]) -> None:
        """After the first backward: take turns in the order of first use that the ranks `agree` on, as numbers."""
        if self._first_uses is None:
            return
        units = list(self._progress)
        numbers = [units.index(unit) for unit in self._first_uses]
        numbers += [i for i in range(len(units)) if i not in numbers]
        self._order = [units[i] for i in agree(numbers)]
        self._first_uses = None
