"""The optimizer's step: who updates a parameter, whether it may see slices, and what it must see.

An optimizer is elementwise if the update of an element depends on that element's own gradients alone. Then a slice is
updated exactly as it would be inside the full parameter. Muon (matrix sign), Adafactor (row and column means), LBFGS
(inner products) and LAMB (norms per layer) are not, and on slices would give other numbers without an error. Between
the two are those that update block by block: see blockwise.py.

It sees plain parameters and states, and gradients in the masters' dtype. Closures and hooks of the optimizer are the
script's own: they see what a script sees outside of the step, so they may clip, or log a norm.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerolab.comm.waiting import CommError
from zerolab.engine import shown
from zerolab.engine.blockwise import declared, misfit
from zerolab.engine.hyperparameters import Hyperparameters
from zerolab.engine.shown import become_plain, become_shown
from zerolab.engine.slices import plainly
from zerolab.engine.stage import Stage
from zerolab.engine.states import make_plain, make_shown, mark_states, marked_states
from zerolab.engine.unit import Unit

MARK = "_zerolab_mark"  # the attribute of a parameter: who updates it, or why no optimizer may

averaged: weakref.WeakSet[Any] = weakref.WeakSet()  # their masters are averages for now: ema.py


class Step:
    """The step under way, if any, and how many there have been."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.hyperparameters = Hyperparameters(stage.comm)
        self._counted = False  # a step since the last forward
        self._states: dict[Optimizer, list[Tensor]] = {}  # of those that step: what they keep for slices

    def begin(self, optimizer: Optimizer, units: list[Unit]) -> None:
        """`optimizer` is about to update `units`."""
        comm = self._stage.comm
        comm.phase = "step"
        comm.progress.steps += 1  # told with the comparison: a rank that left this step out has made one less
        try:
            self.hyperparameters.check(optimizer)
        except CommError:  # it stays counted, for other ranks that ask later
            comm.progress.steps += 1
            raise
        finally:
            comm.progress.steps -= 1
        with plainly():
            for unit in units:
                unit.bucket.promote()

    def end(self, units: list[Unit]) -> None:
        """The optimizer has updated `units`, and hooks of the script's have run."""
        comm = self._stage.comm
        with plainly():
            for unit in units:
                unit.bucket.demote()
                self._stage.master_changed(unit)
        comm.progress.steps += 1
        if not self._counted:  # several optimizers make one step
            comm.step += 1
            self._counted = True

    def forward_begins(self) -> None:
        self._counted = False

    def enter(self, optimizer: Optimizer, units: list[Unit]) -> None:
        """What runs now is the optimizer's own."""
        self._stage.plain = True
        with plainly():
            for unit in units:
                become_plain(unit.params)
        states = marked_states(optimizer)
        make_plain(states)
        self._states.setdefault(optimizer, []).extend(states)

    def pause(self) -> None:
        """What runs now is the script's: a closure."""
        self._stage.plain = False
        with plainly():
            for unit in self._stage.units:
                become_shown(unit.params)
        for states in self._states.values():
            make_shown(states)

    def leave(self, optimizer: Optimizer) -> None:
        """It is done, or has failed. If another one has called it, that one goes on."""
        make_shown(self._states.pop(optimizer, []))
        if not self._states:
            self.pause()
        show_states(optimizer)


class Owner:
    """What updates a parameter. Those of a unit share one, so that few are looked at in each step.

    The engine lasts as long as somebody holds a parameter of it, an optimizer say. If it did not, each rank's garbage
    collector would decide whether the ranks still compare what they step with.
    """

    def __init__(self, engine: Any, unit: Unit) -> None:
        self.engine, self.unit = engine, unit


def mark(original: nn.Parameter, full: nn.Parameter, param: nn.Parameter, name: str, owner: Owner) -> None:
    """`owner` updates `param`, not `original`, which the model had before, nor `full`, which forward sees."""
    replaced = (
        f"was built before the model was sharded: it holds the old {name}, which the model no longer uses. Build the "
        "optimizer from model.parameters() after sharding"
    )
    passing = (
        f"was built inside a forward, or after one that was interrupted: it holds a full {name} that does not last. "
        "Build it from model.parameters() outside of forward"
    )
    for tensor, what in ((original, replaced), (full, passing), (param, owner)):
        setattr(tensor, MARK, what)


def is_owned(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter of a sharded model."""
    return isinstance(getattr(tensor, MARK, None), Owner)


class SeesSlices(Optimizer):
    """An optimizer of ours that knows what slices are, so that it needs no permission. See owner.py."""

    def state_place(self) -> str:
        """Whose its state is on this rank: the same words for the same parameters."""
        raise NotImplementedError


def each_of(given: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers that train a model, given as one or as several in a list. Raises TypeError for anything else."""
    several = isinstance(given, Iterable) and not isinstance(given, Optimizer)
    found: list[Any] = [*given] if several else [given]  # type: ignore[misc]
    if strange := [type(one).__name__ for one in found if not isinstance(one, Optimizer)]:
        raise TypeError(f"pass the optimizer, or a list of those that train this model, and no {strange[0]}")
    return found


def owners_of(optimizer: Optimizer) -> dict[Any, list[Unit]]:
    """The engines whose parameters `optimizer` holds, each with its units that are concerned, in the engine's order."""
    marks = [getattr(param, MARK, None) for group in optimizer.param_groups for param in group["params"]]
    touched: dict[Any, set[int]] = {}
    for mark in dict.fromkeys(marks):
        if isinstance(mark, str):
            raise RuntimeError(f"{type(optimizer).__name__} {mark}")
        if mark is not None:
            touched.setdefault(mark.engine, set()).add(id(mark.unit))
    return {engine: [u for u in engine.units if id(u) in ids] for engine, ids in touched.items()}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Before the script's own hooks. Returns the arguments of the step, with closures that see what the script sees."""
    owners = owners_of(optimizer)
    if not owners:
        return None
    if not averaged.isdisjoint(owners):
        raise RuntimeError(
            f"{type(optimizer).__name__} was to step inside average_parameters() of an EMA, whose end takes back what "
            "is done to parameters inside: step before it or after it"
        )
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not hasattr(param, MARK) and param.grad is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was to update a parameter of shape {tuple(param.shape)} that is of no "
                    "sharded model, with those of one: nobody averages its gradient, so each rank would train its own. "
                    "Shard it with the model, as zerolab.shard(nn.ModuleList([model, criterion]), ...), or average its "
                    "gradient and give it an optimizer to itself"
                )
    watch(optimizer)
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        if optimizer.state or isinstance(optimizer, SeesSlices):  # of which a rank may have none where others have some
            _loaded(optimizer)
    if optimizer in _unchecked:
        for engine in owners:
            _check_state(optimizer, engine)
        _unchecked.discard(optimizer)
    for engine, units in owners.items():
        if not isinstance(optimizer, SeesSlices):
            if problem := misfit(type(optimizer), engine.stage, engine.granularity):
                raise RuntimeError(problem)
        engine.before_optimizer(optimizer, units)
    _under_way[optimizer] = owners
    args = tuple(_paused(optimizer, one) for one in args)
    return args, {key: _paused(optimizer, one) for key, one in kwargs.items()}


def _on_plain(step: Callable[..., Any]) -> Callable[..., Any]:
    """The `step` of an optimizer's class, inside of all hooks, so that it sees plain tensors, and nothing else does."""

    @functools.wraps(step)
    def plain(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer in _inside:  # called by the step of a class that is derived from this one
            return step(optimizer, *args, **kwargs)
        owners = _owners(optimizer)
        _inside.add(optimizer)
        try:
            for engine, units in owners.items():
                engine.enter_optimizer(optimizer, units)
            result = step(optimizer, *args, **kwargs)
            if (blocks := declared.get(type(optimizer))) and blocks.keys:
                with plainly():
                    blocks.check(optimizer)
            return result
        finally:
            _inside.discard(optimizer)
            for engine in owners:
                engine.leave_optimizer(optimizer)

    plain.zerolab = True  # type: ignore[attr-defined]
    return plain


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for engine, units in _owners(optimizer).items():
            engine.after_optimizer(units)
    _under_way.pop(optimizer, None)


def _owners(optimizer: Optimizer) -> dict[Any, list[Unit]]:
    """As `owners_of`, in a step. If that called `super().step()`, an inner one has ended already."""
    return _under_way.get(optimizer) or owners_of(optimizer)


def _paused(optimizer: Optimizer, argument: Any) -> Any:
    """`argument` of a step; if it is a closure, so that the script sees in it what it sees outside of a step."""
    if not callable(argument) or argument is optimizer:
        return argument

    @functools.wraps(argument)
    def closure(*args: Any, **kwargs: Any) -> Any:
        for engine in _owners(optimizer):
            engine.pause_optimizer()
        result = argument(*args, **kwargs)
        for engine, units in _owners(optimizer).items():
            engine.promote_grads(engine.units)
            engine.enter_optimizer(optimizer, units)
        return _of_all_ranks(optimizer, result)

    return closure


def _of_all_ranks(optimizer: Optimizer, loss: Any) -> Any:
    """What a closure returned; the ranks' mean, if an optimizer might decide by it, as LBFGS does."""
    if type(optimizer) in declared or isinstance(optimizer, SeesSlices):
        return loss
    if not isinstance(loss, float) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        return loss
    comm = next(iter(_owners(optimizer))).comm
    losses = comm.exchange(loss.item() if isinstance(loss, Tensor) else loss, "what the ranks' closures returned")
    mean = sum(losses) / len(losses)
    return torch.full_like(loss, mean) if isinstance(loss, Tensor) else mean


_under_way: weakref.WeakKeyDictionary[Optimizer, dict[Any, list[Unit]]] = weakref.WeakKeyDictionary()  # of steps
_inside: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those whose own code runs

# -- states, and state dicts -------------------------------------------------------------------------------------------

STAMP = "zerolab_slices"  # the entry of a state dict's parameter groups that says whose slices the state is of

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unchecked: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # their state has come from elsewhere


def watch(optimizer: Optimizer) -> None:
    """From now on, what `optimizer` keeps for slices is known as slices, and its step sees them as plain tensors."""
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_post_hook(_stamp)
        optimizer.register_load_state_dict_post_hook(_loaded)
    cls: Any = type(optimizer)
    if getattr(cls.step, "hooked", False) and not hasattr(cls.step, "zerolab"):
        cls.step = Optimizer.profile_hook_step(_on_plain(cls.step.__wrapped__))  # as torch itself does it
        cls.step.hooked = True


def _loaded(optimizer: Optimizer) -> None:
    """Its state has come from elsewhere."""
    _unchecked.add(optimizer)
    show_states(optimizer)


def show_states(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, SeesSlices):  # which keeps states of full parameters
        mark_states(optimizer)


def _slices(optimizer: Optimizer, engine: Stage) -> str | None:
    """Which slices this rank has: the same words for the same slices, in every stage."""
    if isinstance(optimizer, SeesSlices):
        return optimizer.state_place()
    if engine.stage == 0:
        return None
    group = engine.comm.shard_group
    places = [
        [unit.names, [slot.offset for slot in unit.layout.slots], unit.layout.shard_size] for unit in engine.units
    ]
    return f"those of rank {group.rank} of {group.size}, layout {zlib.crc32(repr(places).encode()):08x}"


def _stamp(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """After `optimizer.state_dict()`."""
    for engine in owners_of(optimizer):
        if slices := _slices(optimizer, engine):
            _refuse_names(optimizer, engine, sys._getframe(1))
            for group in state["param_groups"] if state["state"] else []:
                group[STAMP] = slices


def _refuse_names(optimizer: Optimizer, engine: Stage, frame: Any) -> None:
    """torch's get_optimizer_state_dict gives the states names of parameters, and calls them full."""
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    if frame is not None:
        raise RuntimeError(
            f"rank {engine.comm.rank}: torch.distributed.checkpoint would take what {type(optimizer).__name__} keeps "
            "on this rank for the state of whole parameters; use zerolab.save(path, zero, optimizer) and zerolab.load. "
            "For the model, dcp.save({'model': zero.full_state_dict()}, ...) will do"
        )


def _check_state(optimizer: Optimizer, engine: Stage) -> None:
    """Raises `RuntimeError` on every rank if on some rank the optimizer's state belongs to other slices."""
    engine.comm.phase = "step"
    problem = _misfit(optimizer, engine)
    for rank, other in enumerate(engine.comm.exchange(problem, "check of the optimizer's state")):
        if other:
            raise RuntimeError(
                f"rank {rank}: {other}. {type(optimizer).__name__}.state_dict() has only the slices of the rank that "
                "calls it; use zerolab.save(path, zero, optimizer) and zerolab.load(path, zero, optimizer), which fit "
                "any stage and number of ranks"
            )
    for group in optimizer.param_groups:
        group.pop(STAMP, None)


def _misfit(optimizer: Optimizer, engine: Stage) -> str | None:
    name, mine = type(optimizer).__name__, _slices(optimizer, engine)
    names = {id(param): name for unit in engine.units for name, param in zip(unit.names, unit.params, strict=True)}
    per_block = declared[type(optimizer)].keys if type(optimizer) in declared else ()
    for group in optimizer.param_groups:
        if (stamp := group.get(STAMP, mine)) != mine:
            have = f"this rank has {mine}" if mine else "stage 0 has none"
            return f"{name} was given a state for slices, {stamp}; {have}"
        for param in [] if isinstance(optimizer, SeesSlices) else group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                one_each = isinstance(value, torch.Tensor) and value.dim() == param.dim() and value.numel() > 1
                if one_each and key not in per_block and value.shape != param.shape and id(param) in names:
                    shapes = f"{tuple(value.shape)} for {names[id(param)]}, whose shape on this rank is"
                    return f"{name} was given a state {key} of shape {shapes} {tuple(param.shape)}"
    return None


shown.watch = watch
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
