"""What the engine must know about optimizers: when they step, and whether they may see slices.

An optimizer is elementwise if the update of an element depends on that element's own gradients alone. Then a slice is
updated exactly as it would be inside the full parameter. Muon (matrix sign), Adafactor (row and column means), LBFGS
(inner products) and LAMB (norms per layer) are not, and on slices would give other numbers without an error.
"""

from __future__ import annotations

import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine
    from zerolab.engine.unit import Unit

MARK = "_zerolab_mark"  # the attribute of a parameter: who updates it, or why no optimizer may

averaged: weakref.WeakSet[Engine] = weakref.WeakSet()  # their masters are averages for now: ema.py

_elementwise: set[type] = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Allow an optimizer class in stages 1 to 3, because it updates each element from its own gradients alone."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, not {optimizer_class!r}")
    _elementwise.add(optimizer_class)


class Owner:
    """What updates a parameter. Those of a unit share one, so that few are looked at in each step."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine, self.unit = weakref.ref(engine), weakref.ref(unit)


class SeesSlices(Optimizer):
    """An optimizer of ours that knows what slices are, so that it needs no permission. See owner.py."""

    def state_place(self) -> str:
        """Whose its state is on this rank: the same words for the same parameters."""
        raise NotImplementedError


def mark_replaced(original: nn.Parameter, name: str) -> None:
    """`original` is no longer a parameter of its model."""
    problem = (
        f"was built before the model was sharded: it holds the old {name}, which the model no longer uses. Build the "
        "optimizer from model.parameters() after sharding"
    )
    setattr(original, MARK, problem)


def mark_full(full: nn.Parameter, name: str) -> None:
    """`full` is what forward sees of a parameter, not what an optimizer updates."""
    problem = (
        f"was built inside a forward, or after one that was interrupted: it holds a full {name} that does not last. "
        "Build it from model.parameters() outside of forward"
    )
    setattr(full, MARK, problem)


def mark_owned(param: nn.Parameter, owner: Owner) -> None:
    setattr(param, MARK, owner)


def is_owned(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter of a sharded model."""
    return isinstance(getattr(tensor, MARK, None), Owner)


def owners_of(optimizer: Optimizer) -> dict[Engine, list[Unit]]:
    """The engines whose parameters `optimizer` holds, each with its units that are concerned, in the engine's order."""
    marks = [getattr(param, MARK, None) for group in optimizer.param_groups for param in group["params"]]
    touched: dict[Engine, set[int]] = {}
    for mark in dict.fromkeys(marks):
        if isinstance(mark, str):
            raise RuntimeError(f"{type(optimizer).__name__} {mark}")
        if mark is not None and (engine := mark.engine()) is not None:
            touched.setdefault(engine, set()).add(id(mark.unit()))
    return {engine: [u for u in engine.units if id(u) in ids] for engine, ids in touched.items()}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    owners = owners_of(optimizer)
    if not averaged.isdisjoint(owners):
        raise RuntimeError(
            f"{type(optimizer).__name__} was to step inside average_parameters() of an EMA, whose end takes back what "
            "is done to parameters inside: step before it or after it"
        )
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_post_hook(_stamp)
        optimizer.register_load_state_dict_post_hook(_unchecked.add)
        if optimizer.state or isinstance(optimizer, SeesSlices):  # of which a rank may have none where others have some
            _unchecked.add(optimizer)
    if optimizer in _unchecked:
        for engine in owners:
            _check_state(optimizer, engine)
        _unchecked.discard(optimizer)
    for engine, units in owners.items():
        if engine.stage > 0 and type(optimizer) not in _elementwise and not isinstance(optimizer, SeesSlices):
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} is not known to be elementwise, and in stage {engine.stage} it sees slices of parameters: its "
                f"numbers would be wrong. Use zerolab.OwnerOptimizer(params, {name}), which shows it full "
                "parameters, or stage 0. Or, if it does update each element from that element's own gradients alone, "
                f"call zerolab.declare_elementwise({name})"
            )
        engine.before_optimizer(optimizer, units)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for engine, units in owners_of(optimizer).items():
            engine.after_optimizer(units)


# -- state dicts ----------------------------------------------------------------------------------------------------

STAMP = "zerolab_slices"  # the entry of a state dict's parameter groups that says whose slices the state is of

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unchecked: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # their state has come from elsewhere


def _slices(optimizer: Optimizer, engine: Engine) -> str | None:
    """Which slices this rank has: the same words for the same slices, in every stage."""
    if isinstance(optimizer, SeesSlices):
        return optimizer.state_place()
    if engine.stage == 0:
        return None
    group = engine.comm.shard_group
    places = [[unit.names, [slot.offset for slot in unit.layout.slots]] for unit in engine.units]
    return f"those of rank {group.rank} of {group.size}, layout {zlib.crc32(repr(places).encode()):08x}"


def _stamp(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """After `optimizer.state_dict()`."""
    for engine in owners_of(optimizer):
        if slices := _slices(optimizer, engine):
            for group in state["param_groups"]:
                group[STAMP] = slices


def _check_state(optimizer: Optimizer, engine: Engine) -> None:
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


def _misfit(optimizer: Optimizer, engine: Engine) -> str | None:
    name, mine = type(optimizer).__name__, _slices(optimizer, engine)
    names = {id(param): name for unit in engine.units for name, param in zip(unit.names, unit.params, strict=True)}
    for group in optimizer.param_groups:
        if (stamp := group.get(STAMP, mine)) != mine:
            have = f"this rank has {mine}" if mine else "stage 0 has none"
            return f"{name} was given a state for slices, {stamp}; {have}"
        for param in [] if isinstance(optimizer, SeesSlices) else group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                one_each = isinstance(value, torch.Tensor) and value.dim() == param.dim() and value.numel() > 1
                if one_each and value.shape != param.shape and id(param) in names:
                    shapes = f"{tuple(value.shape)} for {names[id(param)]}, whose shape on this rank is"
                    return f"{name} was given a state {key} of shape {shapes} {tuple(param.shape)}"
    return None


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
