"""What the engine must know about optimizers: when they step, and whether they may see slices.

An optimizer is elementwise if the update of an element depends on that element's own gradients alone. Then a slice is
updated exactly as it would be inside the full parameter. Muon (matrix sign), Adafactor (row and column means), LBFGS
(inner products) and LAMB (norms per layer) are not, and on slices would give other numbers without an error.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine
    from zerolab.engine.unit import Unit

REPLACED, FULL, OWNER = "_zerolab_replaced", "_zerolab_full", "_zerolab_owner"  # what parameters are marked with

_elementwise: set[type] = {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Allow an optimizer class in stages 1 to 3, because it updates each element from its own gradients alone."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, not {optimizer_class!r}")
    _elementwise.add(optimizer_class)


def mark_replaced(original: nn.Parameter, name: str) -> None:
    """`original` is no longer a parameter of its model."""
    setattr(original, REPLACED, name)


def mark_full(full: nn.Parameter, name: str) -> None:
    """`full` is what forward sees of a parameter, not what an optimizer updates."""
    setattr(full, FULL, name)


def mark_owned(param: nn.Parameter, engine: Engine, unit: Unit) -> None:
    setattr(param, OWNER, (weakref.ref(engine), weakref.ref(unit)))


def owners_of(optimizer: Optimizer) -> dict[Engine, list[Unit]]:
    """The engines whose parameters `optimizer` holds, each with its units that are concerned, in the engine's order."""
    touched: dict[Engine, set[int]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if name := getattr(param, REPLACED, None):
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built before the model was sharded: it holds the old {name}, "
                    "which the model no longer uses. Build the optimizer from model.parameters() after sharding"
                )
            if name := getattr(param, FULL, None):
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built inside a forward, or after one that was interrupted: it "
                    f"holds a full {name} that does not last. Build it from model.parameters() outside of forward"
                )
            if owner := getattr(param, OWNER, None):
                reference, unit = owner
                engine = reference()
                if engine is not None:
                    touched.setdefault(engine, set()).add(id(unit()))
    return {engine: [u for u in engine.units if id(u) in ids] for engine, ids in touched.items()}


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for engine, units in owners_of(optimizer).items():
        if engine.stage > 0 and type(optimizer) not in _elementwise:
            name = type(optimizer).__name__
            raise RuntimeError(
                f"{name} is not known to be elementwise, and in stage {engine.stage} it sees slices of parameters: its "
                "numbers would be wrong. Use stage 0. Or, if it does update each element from that element's own "
                f"gradients alone, call zerolab.declare_elementwise({name})"
            )
        engine.before_optimizer(units)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for engine, units in owners_of(optimizer).items():
            engine.after_optimizer(units)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
