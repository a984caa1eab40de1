"""What save and load both know of a model and its optimizer: names, flat elements, numbers, buffers, generators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolab.checkpoint.files import DTYPES, NAMES, CheckpointError
from zerolab.comm.collectives import Comm
from zerolab.engine.blockwise import Blocks, declared, misfit
from zerolab.engine.ema import EMA
from zerolab.engine.engine import Engine
from zerolab.engine.layout import Slot
from zerolab.engine.owner import OwnerOptimizer
from zerolab.engine.slices import to_local
from zerolab.engine.step import STAMP, averaged, each_of
from zerolab.engine.unit import Unit

# Entries of a parameter group that are not saved: tensors, and the choice of implementation, which is this program's.
NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", STAMP}


def on_all_ranks(comm: Comm, what: str, work: Callable[[], Any]) -> list[Any]:
    """The results of `work()` on every rank, which must be JSON. If it fails on one rank, all ranks raise."""
    result = problem = cause = None
    try:
        result = work()
    except Exception as error:
        cause, problem = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    rows = comm.exchange([problem, result], what)
    for rank, (problem, _) in enumerate(rows):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}") from cause
    return [result for _, result in rows]


def check_idle(zero: Engine, ema: EMA | None) -> None:
    """Raise `CheckpointError` unless parameters are at rest: no forward, backward or `full_parameters()` is running.

    Nor may an EMA show its averages, and `ema` must be of this model.
    """
    if not zero.is_idle():
        raise CheckpointError("a checkpoint cannot be saved or loaded inside forward, backward or full_parameters()")
    if zero in averaged:
        raise CheckpointError("a checkpoint cannot be saved or loaded inside average_parameters() of an EMA")
    if ema is not None and not (isinstance(ema, EMA) and ema.zero is zero):
        what = "one of another model" if isinstance(ema, EMA) else f"a {type(ema).__name__}"
        raise CheckpointError(f"ema must be a zerolab.EMA of this {type(zero).__name__}, and is {what}")


# -- parameters -----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A parameter: its keys in the model's state dict (several if it is tied), its unit and its place there."""

    names: list[str]
    unit: Unit
    slot: Slot
    param: nn.Parameter

    @property
    def name(self) -> str:
        return self.names[0]


def parameters(zero: Engine) -> list[Held]:
    entries = zero.full_model.entries()
    return [
        Held(names, unit, slot, param)
        for unit in zero.units
        for names, slot, param in zip(entries.names(unit), unit.layout.slots, unit.params, strict=True)
    ]


def flat(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of `tensor` in the memory order of `like`, which has its shape: (numel,), a view if possible."""
    tensor = to_local(tensor).detach()
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


# -- the optimizer --------------------------------------------------------------------------------------------------


class Optimizers:
    """The optimizers of one model, one or several: their groups, and the state of each parameter on this rank.

    An `OwnerOptimizer` goes by the name of the class that it wraps, with which its checkpoints are exchangeable.
    """

    def __init__(self, given: Optimizer | Iterable[Optimizer]) -> None:
        self.each = each_of(given)
        if not self.each:
            raise CheckpointError("no optimizer was given: pass one, or a list of those that train this model")
        kinds = [one.optimizer_class if isinstance(one, OwnerOptimizer) else type(one) for one in self.each]
        self.name = " + ".join(kind.__name__ for kind in kinds)
        self.param_groups = [group for one in self.each for group in one.param_groups]
        self._of = {id(param): one for one in self.each for group in one.param_groups for param in group["params"]}

    def owned(self, param: nn.Parameter) -> bool:
        """Whether one rank of each shard group has all of its state, because an `OwnerOptimizer` updates it."""
        return isinstance(self._of.get(id(param)), OwnerOptimizer)

    def here(self, param: nn.Parameter) -> bool:
        """Whether this rank has its state, or a part of that."""
        one = self._of.get(id(param))
        return not isinstance(one, OwnerOptimizer) or one.owns(param)

    def blocks(self, param: nn.Parameter) -> Blocks:
        """What is declared of the class that updates it."""
        return declared.get(type(self._of.get(id(param))), Blocks(1))

    def misfit(self, zero: Engine) -> str | None:
        """Why one of these optimizers may not see what `zero` shows."""
        kinds = [type(one) for one in self.each if not isinstance(one, OwnerOptimizer)]
        return next(
            (problem for kind in kinds if kind in declared and (problem := misfit(kind, zero.stage, zero.granularity))),
            None,
        )

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        one = self._of.get(id(param))
        return {} if one is None else one.state.get(param, {})

    def set_state(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        if (one := self._of.get(id(param))) is not None:
            one.state.pop(param, None)
            if state:
                one.state[param] = state


def full_stand_in(held: Held) -> Tensor:
    """The full parameter without its values: shape and strides, on the meta device."""
    return torch.empty_strided(held.slot.shape, held.slot.stride, dtype=held.param.dtype, device="meta")


def names_in_groups(zero: Engine, optimizer: Optimizers) -> list[list[str]]:
    """The names of the parameters in each of the optimizers' groups."""
    name_of = {id(held.param): held.name for held in parameters(zero)}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in name_of:
                raise CheckpointError(
                    f"{optimizer.name} holds a parameter (group {number}, number {place}) that does not "
                    f"belong to this {type(zero).__name__}: build the optimizer from model.parameters() after "
                    "sharding, one per model"
                )
            if id(param) in seen:
                raise CheckpointError(f"{name_of[id(param)]} is held by two of the optimizers: give it to one")
            seen.add(id(param))
    return [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def group_values(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a parameter group, as JSON."""
    values: dict[str, Any] = {}
    for key, value in group.items():
        if key not in NOT_SAVED:
            many = isinstance(value, tuple | list)
            values[key] = [to_json(key, v)["value"] for v in value] if many else to_json(key, value)["value"]
    return values


def fitting_values(group: dict[str, Any], values: dict[str, Any], where: str) -> dict[str, Any]:
    """The reverse of `group_values`, for `group`: what is a tensor or a tuple in this program stays one."""
    fitting: dict[str, Any] = {}
    for key, saved in values.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            if not isinstance(saved, bool | int | float):
                raise CheckpointError(f"{where} was saved with {key}={saved!r}, but has a tensor here: give it none")
            fitting[key] = torch.full_like(now, saved)
        else:
            fitting[key] = tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved
    return fitting


def set_group_values(group: dict[str, Any], values: dict[str, Any]) -> None:
    group.pop(STAMP, None)
    for key, value in values.items():
        if isinstance(value, Tensor):
            group[key].copy_(value)  # the same object: schedulers may hold it
        else:
            group[key] = value


def to_json(what: str, value: Any) -> dict[str, Any]:
    """One number or string of the optimizer as {"value"}, with its "dtype" if it is a tensor; `what` names it."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in NAMES:
        return {"value": value.item(), "dtype": NAMES[value.dtype]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    raise CheckpointError(
        f"optimizer state {what} has {kind}: it is neither one number nor one per element, so it cannot be saved"
    )


def from_json(saved: dict[str, Any]) -> Any:
    """The reverse of `to_json`."""
    return torch.tensor(saved["value"], dtype=DTYPES[saved["dtype"]]) if "dtype" in saved else saved["value"]


# -- what each rank has for itself ----------------------------------------------------------------------------------


def buffers(zero: Engine) -> dict[str, Tensor]:
    """The buffers that a state dict contains, by its first key for each."""
    first: dict[Any, str] = {}

    def place(buffer: Tensor) -> Any:
        return buffer.untyped_storage()._cdata, buffer.storage_offset(), buffer.size(), buffer.stride()

    found = zero.full_model.entries().buffers
    return {key: buffer for key, buffer in found.items() if first.setdefault(place(buffer), key) == key}


def extra_state(zero: Engine) -> dict[str, Any]:
    """What modules add to the state dict by `get_extra_state()`. It must be JSON."""
    extras = zero.full_model.entries().extras
    for key, value in extras.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise CheckpointError(
                f"{key} of the model's state dict is neither parameter nor buffer nor JSON (but {type(value).__name__})"
                "; leave it out of the state dict and pass it to save as an extra"
            )
    return extras


def generators(zero: Engine) -> dict[str, Tensor]:
    """The states of torch's random number generators on this rank."""
    states = {"cpu": torch.get_rng_state()}
    if zero.comm.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(zero.comm.device)
    return states
