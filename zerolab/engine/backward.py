"""Backward: gradients go into buckets, and each unit is reduced in its turn.

    gradient at a call's outputs  at_outputs: pre_backward, show the full parameters. What modules keep of a call, and
                                  in stage 3 what a hook may keep, counts as its outputs
    gradient of a parameter       on_gradient: put it into the unit's bucket
    backward has passed a unit    _on_passed: the unit waits for its turn, which is the same on every rank;
                                  then post_backward, which reduces
    autograd has finished         _end: the remaining turns; what was used on any rank; show gradients

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

import functools
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Variable

from zerolab.comm.waiting import CommError
from zerolab.engine.accumulation import KeptBack
from zerolab.engine.hyperparameters import DIGEST
from zerolab.engine.parameters import sealed
from zerolab.engine.slices import plainly
from zerolab.engine.stage import Stage
from zerolab.engine.step import Step
from zerolab.engine.unit import Unit

USED, TRAINABLE, LATE = 1, 2, 4  # the bits that ranks exchange about each parameter after a backward


class Backward:
    """The backward under way, if any, and what no_sync kept back of those before."""

    def __init__(self, stage: Stage, step: Step) -> None:
        self._stage, self._comm, self._step = stage, stage.comm, step
        self.sync = True  # False inside no_sync()
        self.under_way = False  # from the first gradient to the end of backward, or until a broken one is dropped
        self._reduces = False  # whether the backward that began last did so outside no_sync()
        self._reducing: deque[Unit] = deque()  # units whose reduction is under way
        self._kept_back = {unit: KeptBack(unit) for unit in stage.units}
        self.held: set[Unit] = set()  # stay gathered until backward ends: nobody saw where it will enter them
        self.turns = Turns(stage.units, self._begin, self._on_passed)

    def check_grads_final(self, units: list[Unit]) -> None:
        """Raises `RuntimeError` if gradients are incomplete, or not averaged yet."""
        rank = self._comm.rank
        if self.under_way:
            raise RuntimeError(f"rank {rank}: the last backward broke off; run forward and backward again")
        for unit in units:
            if self._kept_back[unit].is_shown:
                raise RuntimeError(
                    f"rank {rank}: the gradients of {unit.name} were added up under no_sync() and are not yet "
                    "averaged; run the last micro-batch's backward outside no_sync()"
                )

    # -- while autograd runs -----------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """A gradient shows up. False if autograd builds a graph of it, for a later backward.

        Such a gradient is on its way to an input, and nothing is reduced: in stages 0 to 2 all it needs is there.
        """
        if self.under_way:
            return True
        if torch.is_grad_enabled():
            if self._stage.stage == 3:
                raise NotImplementedError(
                    f"rank {self._comm.rank}: gradients with create_graph=True need the parameters again in the next "
                    "backward, and stage 3 has released them by then; take stage 2, or 0 or 1"
                )
            return False
        Variable._execution_engine.queue_callback(self._end)
        self.under_way, self._reduces = True, self.sync
        if self._stage.plain:  # the optimizer calls it by itself
            self._step.pause()
        for param in self._stage.listeners.values():
            param.drop()
        self._stage.notice_edits()
        self._stage.gather_stale()  # as forward would have, and other ranks' did
        self._comm.phase = "backward"
        self._stage.prefetcher.begin("backward")
        with plainly():
            for kept_back in self._kept_back.values():
                kept_back.resume()
        self.turns.set_turns(self.sync)
        return True

    def at_outputs(
        self, units: list[Unit], around: list[Unit], ended: int, unwatched: ForwardCall | None, grad: Tensor
    ) -> None:
        """A gradient reached the outputs of a call of `units`, inside of `around`, that ended when the clock showed
        `ended`."""
        if not self._begin():
            return
        for unit in [*units, *(unit for unit in around if not self.turns.is_over(unit))]:
            if not self.turns.progress[unit].opened:
                self.turns.progress[unit].opened = True
                self._stage.pre_backward(unit)
                unit.unseal()
                unit.show(unit.full_params)  # for a recompute
        self.turns.at_outputs(ended, unwatched)

    def at_inside(self, unit: Unit, grad: Tensor) -> None:
        """A gradient reached something from inside of a call of `unit`."""
        if not self.turns.progress[unit].passed:
            self.at_outputs([unit], [], sys.maxsize, None, grad)

    def on_gradient(self, unit: Unit, i: int) -> None:
        """Autograd has completed the gradient of parameter `i` of `unit`."""
        if not self._begin():
            unit.full_params[i].grad = None
            raise NotImplementedError(
                f"rank {self._comm.rank}: backward(create_graph=True) would leave gradients with a graph in "
                f"{unit.names[i]}, and their average over the ranks has none. Take torch.autograd.grad(..., inputs, "
                "create_graph=True) for the gradients of inputs, and backward() for the loss that you make of them"
            )
        progress = self.turns.progress[unit]
        if unit.in_flight and not progress.opened and not progress.passed:  # where autograd asks for no version
            raise _unseen(unit)
        unit.bucket.collect(i)
        self.turns.at_parameter(unit, i)

    def _on_passed(self, unit: Unit) -> None:
        """Backward has passed `unit`. It is reduced when its turn comes, which is the same on every rank."""
        if unit.trainable and self.sync:
            self._take_turns()
        else:
            self._finish(unit)

    def _take_turns(self, everyone: bool = False) -> None:
        for unit in self.turns.turns(everyone):
            self._advance_reductions()
            if not unit.depth:
                unit.bucket.complete_with_zeros()
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Backward is done with `unit`: the stage's post_backward, which reduces if it is the unit's turn."""
        stage = self._stage
        self.turns.progress[unit].opened = False
        if unit.depth:  # autograd.grad in the middle of a forward, which goes on
            if any(unit.bucket.have):
                raise RuntimeError(
                    f"rank {stage.rank}: backward() inside of the model's forward reached parameters of {unit.name}, "
                    "which is still at work; call it when forward is over, or take torch.autograd.grad(..., inputs)"
                )
            return
        unit.show(unit.params)
        reduces = stage.reduces(unit)
        stage.post_backward(unit)
        if reduces:
            if unit.bucket.grad is None:
                raise RuntimeError(f"{type(stage).__name__}.reduce() left no unit.bucket.grad (unit {unit.name})")
            self._reducing.append(unit)
            unit.bucket.depart(stage.keep_grad_memory)
            if not stage.overlap:
                self._advance_reductions(to_the_end=True)

    def _advance_reductions(self, to_the_end: bool = False) -> None:
        """Take each reduction under way one step further. Most have a single step, so one at a time is in flight."""
        while self._reducing:
            self._reducing = deque(unit for unit in self._reducing if not unit.bucket.advance())
            if not to_the_end:
                return

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Autograd has finished: reduce what is left, exchange what was used, show the gradients."""
        if self.sync:
            self._take_turns(everyone=True)
            with plainly():
                message = self._step.hyperparameters.offer() + _flags(self._stage.units)
            exchanged = self._comm.start_exchange(message, "exchange of used parameters")
            self._advance_reductions(to_the_end=True)
            rows = exchanged()
            self._step.hyperparameters.settle([row[:DIGEST] for row in rows])
            with plainly():
                self._show_grads([row[DIGEST:] for row in rows])
            self._comm.progress.backwards += 1
        self._close()
        if not self.sync:
            with plainly():
                for kept_back in self._kept_back.values():
                    kept_back.show()
        self._stage.prefetcher.end()
        self.turns.end(keep_graph=torch._C._autograd._get_current_graph_task_keep_graph())
        for param in list(self._stage.listeners.values()):  # a hook may register another
            param.deliver()

    def drop(self) -> None:
        """An error broke backward off: its gradients are incomplete, and none is shown."""
        if self._reduces:  # on every rank at the same place, or the ranks would reduce one unit with another
            self._comm.phase = "clean-up"
            issued = [group.log.count for group in self._comm.groups]
            for rank, other in enumerate(self._comm.exchange(issued, "end of a backward that broke off")):
                if other != issued:
                    raise CommError(
                        f"rank {self._comm.rank}: the last backward broke off, on rank {rank} at another place; start "
                        "the ranks again, or build the model and zero anew on all of them"
                    )
        self._advance_reductions(to_the_end=True)
        for unit in self._stage.units:
            unit.bucket.drop()
        self._close()
        self.turns.end()

    def _close(self) -> None:
        for unit in self._stage.units:
            if self.turns.progress[unit].opened or unit in self.held:
                self._finish(unit)
            unit.bucket.end_backward()
        self.held = set()
        self.under_way = False

    def _show_grads(self, flags: list[bytes]) -> None:
        """Show the averaged gradients of the parameters that some rank used. `flags`: every rank's."""
        units = self._stage.units
        _compare_trainable(units, flags)
        some = functools.reduce(operator.or_, map(int.from_bytes, flags)).to_bytes(len(flags[0]))
        used, late = ([bool(flag & bit) for flag in some] for bit in (USED, LATE))
        start = 0
        for unit in units:
            mine = slice(start, start + len(unit.params))
            start = mine.stop
            unit.bucket.show(used[mine])
            if any(late[mine]):  # gradients that came after the unit's turn: every rank reduces once more
                unit.bucket.complete_with_zeros()
                self._finish(unit)
                self._advance_reductions(to_the_end=True)
                unit.bucket.show(late[mine])
            unit.trainable = any(param.requires_grad for param in unit.params)
        self.turns.learn_order(lambda order: self._comm.exchange(order, "order of the units")[0])


def _flags(units: list[Unit]) -> bytes:
    """One byte for each parameter: what this rank knows about it."""
    flags = [
        USED * used + TRAINABLE * param.requires_grad + LATE * late
        for unit in units
        for used, late, param in zip(unit.bucket.used, unit.bucket.have, unit.params, strict=True)
    ]
    return bytes(flags)


def _compare_trainable(units: list[Unit], flags: list[bytes]) -> None:
    """Raises `CommError` if a parameter is frozen on one rank alone."""
    names = [name for unit in units for name in unit.names]
    words = {TRAINABLE: "trainable", 0: "frozen"}
    for rank, row in enumerate(flags):
        if row == flags[0]:
            continue
        for name, mine, first in zip(names, row, flags[0], strict=True):
            if (mine ^ first) & TRAINABLE:
                raise CommError(
                    f"{name} is {words[mine & TRAINABLE]} on rank {rank} and {words[first & TRAINABLE]} on rank 0; "
                    "set requires_grad alike on all ranks"
                )


# -- has backward passed a unit, and whose turn is it? ---------------------------------------------------------------


class ForwardCall:
    """A call of `units` in forward. Only its autograd graph holds it: without a backward it goes with the graph."""

    def __init__(self, units: list[Unit], begun: int) -> None:
        self.units, self.begun = units, begun


class Progress:
    """How far forward and backward have come with one unit."""

    def __init__(self) -> None:
        self.ran = False  # a forward has used the unit since the last backward
        self.calls: WeakSet[ForwardCall] = WeakSet()  # those that backward has not passed
        self.ended: WeakSet[ForwardCall] = WeakSet()  # those that this backward has passed
        self.unwatched: ForwardCall | None = None  # the call under way, if it has no input that will show its end
        self.opened = False  # pre_backward has run, post_backward has not
        self.passed = False
        self.arrived: set[int] = set()  # parameters whose gradient came in this backward


class Turns:
    """`begin()` is called whenever a gradient shows up, and says whether it counts; `passed(unit)` when backward has
    passed a unit."""

    def __init__(self, units: list[Unit], begin: Callable[[], bool], passed: Callable[[Unit], None]) -> None:
        self._begin, self._on_passed = begin, passed
        self.progress = {unit: Progress() for unit in units}
        self._clock = 0  # ticks when a call begins and when it ends
        self._unwatched: list[ForwardCall] = []  # calls whose backward has begun, without an input that shows its end
        self._order = list(units)  # of first use in forward
        self._first_uses: list[Unit] | None = []  # as this rank sees it, until the ranks have agreed on one
        self._turns: deque[Unit] = deque()  # units still to be reduced in this backward

    def used(self, unit: Unit) -> None:
        """A forward that may have a backward uses `unit`."""
        progress = self.progress[unit]
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
            self.progress[unit].calls.add(call)
            self.progress[unit].unwatched = None if made else call

    def call_ends(self, units: list[Unit]) -> tuple[int, ForwardCall | None]:
        """A call of `units` ends: the time, and the call if none of its inputs will show its end in backward."""
        self._clock += 1
        unwatched = self.progress[units[0]].unwatched if units else None
        for unit in units:
            self.progress[unit].unwatched = None
        return self._clock, unwatched

    def at_outputs(self, ended: int, unwatched: ForwardCall | None) -> None:
        """A gradient reached the outputs of a call that ended at `ended`: later calls have been passed."""
        for call in [call for call in self._unwatched if call.begun > ended]:
            self._unwatched.remove(call)
            self._end_call(call)
        if unwatched and unwatched not in self._unwatched:
            self._unwatched.append(unwatched)

    def at_parameter(self, unit: Unit, i: int) -> None:
        """The gradient of parameter `i` of `unit` is there."""
        progress = self.progress[unit]
        progress.arrived.add(i)
        if len(progress.arrived) == len(unit.params) and not progress.calls:
            self._pass(unit)

    def _at_input(self, call: ForwardCall, grad: Tensor) -> None:
        if self._begin():
            self._end_call(call)

    def _end_call(self, call: ForwardCall) -> None:
        for unit in call.units:
            self._ended(unit, call)
            if not self.progress[unit].calls:
                self._pass(unit)

    def _ended(self, unit: Unit, call: ForwardCall) -> None:
        progress = self.progress[unit]
        progress.calls.discard(call)
        progress.ended.add(call)

    def _pass(self, unit: Unit) -> None:
        progress = self.progress[unit]
        if not progress.passed:
            progress.passed = True
            self._on_passed(unit)

    def is_over(self, unit: Unit) -> bool:
        """Backward has been through all calls of `unit` and has all of its gradients."""
        progress = self.progress[unit]
        return progress.passed and not progress.calls and len(progress.arrived) == len(unit.params)

    def set_turns(self, sync: bool) -> None:
        """A backward begins. sync: it reduces."""
        self._turns = deque(unit for unit in reversed(self._order) if unit.trainable and sync)

    def turns(self, everyone: bool = False) -> Iterator[Unit]:
        """The units whose turn has come; `everyone`: all that are left.

        A unit without a forward has nothing to wait for, but it takes its turn: other ranks may need its zeros.
        """
        while self._turns:
            progress = self.progress[self._turns[0]]
            if not (everyone or progress.passed or not (progress.ran or progress.opened)):
                return
            yield self._turns.popleft()

    def end(self, keep_graph: bool = False) -> None:
        """Backward is over, or broke off. keep_graph: it kept its graph, so the same forward may have another one."""
        for call in self._unwatched:
            for unit in call.units:
                self._ended(unit, call)
        self._unwatched = []
        for progress in self.progress.values():
            progress.passed = False
            if keep_graph:
                progress.calls |= progress.ended
            progress.ended.clear()
            progress.ran = progress.ran and (keep_graph or len(progress.calls) > 0)
            progress.arrived.clear()

    def learn_order(self, agree: Callable[[list[int]], list[int]]) -> None:
        """After the first backward: take turns in the order of first use that the ranks `agree` on, as numbers."""
        if self._first_uses is None:
            return
        units = list(self.progress)
        numbers = [units.index(unit) for unit in self._first_uses]
        numbers += [i for i in range(len(units)) if i not in numbers]
        self._order = [units[i] for i in agree(numbers)]
        self._first_uses = None


# -- a way into a unit that nobody has seen ----------------------------------------------------------------------------


def _unseen(unit: Any) -> RuntimeError:
    return RuntimeError(
        f"rank {unit.comm.rank}: backward wants to read {unit.name}, which is not gathered: the loss uses something "
        "from inside of it that is neither among its outputs nor kept by its modules. Return it, keep it as an "
        "attribute of one of its modules, or take stage 2"
    )


def _explained(run: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's own `run`. In stage 3 it refuses to read a unit that is not gathered; that is said by name."""

    @functools.wraps(run)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
            unit = sealed.get(int(found[1])) if found else None
            if found is None or unit is None or int(found[2]) != unit.unsealed:  # that of a forward before a step
                raise
            raise _unseen(unit) from error

    return explained


if _run := getattr(torch.autograd, "_engine_run_backward", None):  # else autograd's own words must do
    torch.autograd._engine_run_backward = _explained(_run)  # type: ignore[attr-defined]
