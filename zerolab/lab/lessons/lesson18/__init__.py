"""Lesson 18: a checkpoint is carried from plain torch, whole and by name, into a sharded run, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.engine.step import STAMP
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

KINDS = ("exp_avg", "exp_avg_sq")
COUNTED = ("lr", "betas", "eps", "weight_decay")  # the hyperparameters that the text asks for
Checkpoint = dict[str, Any]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale + self.frozen


class Whole(nn.Module):
    """Odd shapes, a tied weight, a buffer that counts, a frozen and an unused parameter in each part."""

    seen: Tensor

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.token = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("seen", torch.zeros(2))
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(((5 * torch.arange(param.numel()) + 3 * number + seed) % 7 - 2.6).view(param.shape) / 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        x = self.token(x) * (1 + self.seen.sum() / 16)
        for part in self.parts:
            x = part(x)
        return self.head(x)


def adamw(model: nn.Module, fresh: bool) -> torch.optim.AdamW:
    """Two groups, with values of their own; other ones if `fresh`, which the saved ones must replace."""
    params = dict(model.named_parameters())
    decayed = [name for name in params if "bias" not in name and "scale" not in name]
    rest = [name for name in params if name not in decayed]
    rates = (0.5, 0.25) if fresh else (2.0**-5, 2.0**-6)
    return torch.optim.AdamW(
        [
            {"params": [params[name] for name in decayed], "lr": rates[0], "weight_decay": 0.5 if fresh else 0.125},
            {"params": [params[name] for name in rest], "lr": rates[1], "weight_decay": 0.0},
        ],
        betas=(0.5, 0.5) if fresh else (0.75, 0.875),
    )


def train(model: nn.Module, adam: torch.optim.Optimizer, steps: range, rank: int = 0, ranks: int = 1) -> None:
    """One process trains on 12 rows a step; N ranks take 12 / N of them each."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        rows = (((torch.arange(36) * 11 + 5 * step) % 13) - 6.0).view(12, 3).to(dtype) / 8
        mine = rows.chunk(ranks)[rank]
        (model(mine) - mine.flip(1)).square().mean().backward()
        adam.step()
        adam.zero_grad()


def checkpoint_of(model: nn.Module, adam: torch.optim.Optimizer) -> Checkpoint:
    """What a torch run saves: everything whole, and by name."""
    name_of: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    state = {name_of[param]: {k: v.clone() for k, v in kept.items()} for param, kept in adam.state.items()}
    groups = [
        {k: v for k, v in group.items() if k not in ("params", STAMP)}
        | {"params": [name_of[param] for param in group["params"]]}
        for group in adam.param_groups
    ]
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"weights": weights, "state": state, "groups": groups}


def torch_run(dtype: torch.dtype, steps: int = 3) -> tuple[Whole, torch.optim.AdamW]:
    model = Whole(1, dtype)
    adam = adamw(model, fresh=False)
    train(model, adam, range(steps))
    return model, adam


def cut(unit: Unit, full: dict[str, Tensor], rank: int, shard_of: int | None = None) -> list[Tensor]:
    """This rank's slice of the tensor that `full` has for each parameter of the unit; zeros where there is none.

    shard_of: takes that rank's shard and cuts it as `rank` cuts its own, a mistake.
    """
    flat = torch.zeros(unit.layout.size, dtype=unit.master.dtype)
    for name, view in zip(unit.names, unit.layout.views(flat), strict=True):
        if name in full:
            view.copy_(full[name])
    shard = unit.layout.shard(flat, rank if shard_of is None else shard_of)
    return [part.clone() for part in unit.layout.slices(shard, rank)]


def averages(state: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return {name: kept[kind] for name, kept in state.items()}


def new_run(stage: type[Engine], dtype: torch.dtype) -> tuple[Engine, torch.optim.AdamW]:
    zero = stage(Whole(4, dtype), units=[Part])
    return zero, adamw(zero.model, fresh=True)


def go_on(play: Play, zero: Engine, adam: torch.optim.Optimizer, steps: range) -> None:
    with play.event("training goes on", slack=math.inf):
        train(zero.model, adam, steps, play.rank, play.size)
    look_at_weights(play, zero)


def look_at_weights(play: Play, zero: Engine) -> None:
    for name, tensor in zero.full_state_dict().items():
        play.see(name, tensor)


def look_at_adam(play: Play, zero: Engine, adam: torch.optim.Optimizer) -> None:
    """The state of every parameter, and what stands there besides."""
    known = {param for unit in zero.units for param in unit.params}
    play.see("keys of adam.state that are no parameters of the model", sum(key not in known for key in adam.state))
    most = "one for each parameter that had a state, and no other"
    play.see("how many entries adam.state has", len(adam.state), most)
    storages: dict[int, str] = {}
    for unit in zero.units:
        for name, param in zip(unit.names, unit.params, strict=True):
            kept = adam.state.get(param, {})
            play.see(f"what adam.state has of {name}", sorted(kept))
            look_at_state(play, name, kept)
            for key, tensor in kept.items():
                if isinstance(tensor, Tensor) and to_local(tensor).numel():
                    place = to_local(tensor).untyped_storage()._cdata
                    play.see(f"{key} of {name} has memory of its own", place not in storages)
                    storages[place] = key
    tensors = [to_local(t) for kept in adam.state.values() for t in kept.values() if isinstance(t, Tensor)]
    held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel()}
    play.at_most("bytes that adam.state keeps", float(sum(held.values())))


def look_at_state(play: Play, name: str, kept: dict[str, Any]) -> None:
    for key, value in kept.items():
        if key == "step":
            play.see(f"step of {name} is a tensor", isinstance(value, Tensor))
            one = not isinstance(value, Tensor) or value.numel() == 1
            play.see(f"step of {name}", float(value) if one else tuple(value.shape), "how many steps it has seen")
        else:
            play.see(f"{key} of {name}", to_local(value) if isinstance(value, Tensor) else value)


def look_at_groups(play: Play, groups: Any) -> None:
    play.see("how many groups there are", len(groups) if isinstance(groups, list) else None)
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        for key in COUNTED:
            play.see(f"{key} of group {number}", group.get(key), "all options of all groups are moved")


# ---------------------------------------------------------------------- 18.1


def to(stage: type[Engine], dtype: torch.dtype) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        checkpoint = checkpoint_of(*torch_run(dtype))
        zero, adam = new_run(stage, dtype)
        given = {
            tensor.untyped_storage()._cdata
            for kept in (checkpoint["weights"], *checkpoint["state"].values())
            for tensor in kept.values()
        }
        play.keep("`checkpoint`", checkpoint)
        for call in ("", " a second time"):
            with play.event(f"to_zerolab(){call}", slack=math.inf):
                play.code.to_zerolab(checkpoint, zero, adam)
            look_at_weights(play, zero)
            look_at_adam(play, zero, adam)
            look_at_groups(play, adam.param_groups)
            held = [to_local(t) for kept in adam.state.values() for t in kept.values() if isinstance(t, Tensor)]
            shared = any(tensor.numel() and tensor.untyped_storage()._cdata in given for tensor in held)
            play.see("adam.state shares memory with the checkpoint", shared)
            go_on(play, zero, adam, range(3, 5))

    return act


TO_STUB = '''\
import torch
from zerolab.lab.exercises import Todo


@torch.no_grad()
def to_zerolab(checkpoint: dict, zero, adam) -> None:
    """Put a torch checkpoint, whole and by name, into the sharded `zero` and its `adam`.

    All ranks call it.
    checkpoint["weights"]: name -> tensor, parameters and buffers; a tied one has both names
    checkpoint["state"]:   name -> {"step", "exp_avg", "exp_avg_sq"}; a parameter that never
                           had a gradient has none
    checkpoint["groups"]:  as adam.param_groups, in the same order, with names in "params"
    The checkpoint stays as it is, and `adam` keeps no memory beyond this rank's slices.
    """
    raise Todo("18.1")
'''

TO = """\
import torch


@torch.no_grad()
def to_zerolab(checkpoint: dict, zero, adam) -> None:
    zero.load_full_state_dict(checkpoint["weights"])
    state = checkpoint["state"]
    for unit in zero.units:
        for kind in ("exp_avg", "exp_avg_sq"):
            flat = unit.master.new_zeros(unit.layout.size)
            for name, view in zip(unit.names, unit.layout.views(flat)):
                if name in state:
                    view.copy_(state[name][kind])
            parts = unit.layout.slices(unit.layout.shard(flat, zero.rank), zero.rank)
            for name, param, part in zip(unit.names, unit.params, parts):
                if name in state:
                    adam.state[param]["step"] = state[name]["step"].clone()
                    adam.state[param][kind] = part.clone()
    for group, saved in zip(adam.param_groups, checkpoint["groups"]):
        group.update({key: value for key, value in saved.items() if key != "params"})
"""


# ---------------------------------------------------------------------- 18.2


@torch.no_grad()
def carry(checkpoint: Checkpoint, zero: Engine, adam: torch.optim.Optimizer, rank: int) -> None:
    zero.load_full_state_dict(checkpoint["weights"])
    for unit in zero.units:
        for kind in KINDS:
            parts = cut(unit, averages(checkpoint["state"], kind), rank)
            for name, param, part in zip(unit.names, unit.params, parts, strict=True):
                if name in checkpoint["state"]:
                    adam.state[param]["step"] = checkpoint["state"][name]["step"].clone()
                    adam.state[param][kind] = part
    for group, saved in zip(adam.param_groups, checkpoint["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def back(stage: type[Engine], dtype: torch.dtype) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        zero, adam = new_run(stage, dtype)
        carry(checkpoint_of(*torch_run(dtype)), zero, adam, play.rank)
        for call in ("", " a second time"):
            go_on(play, zero, adam, range(3, 5))
            with play.event(f"from_zerolab(){call}", slack=math.inf) as event:
                result = play.code.from_zerolab(zero, adam)
                event.results.add("the result")
            look_at_weights(play, zero)
            look_at_adam(play, zero, adam)
            play.see("the result", sorted(result) if isinstance(result, dict) else result)
            if not isinstance(result, dict) or not {"weights", "state", "groups"} <= result.keys():
                return
            look_at_result(play, result)
            play.keep(f"what the call{call} returned", [result["weights"], result["state"]])

    return act


def look_at_result(play: Play, result: Checkpoint) -> None:
    weights, state, groups = (result[part] for part in ("weights", "state", "groups"))
    for name, value in (weights if isinstance(weights, dict) else {}).items():
        play.see(f"{name} in the checkpoint", to_local(value) if isinstance(value, Tensor) else value)
    play.see("the names of the weights", sorted(map(str, weights)))
    play.see("the names that have a state", sorted(map(str, state)))
    storages: dict[int, str] = {}
    for name, kept in state.items():
        play.see(f"what there is of {name}", sorted(kept))
        look_at_state(play, f"{name} in the checkpoint", kept)
        for key, tensor in kept.items():
            if isinstance(tensor, Tensor):
                place = tensor.untyped_storage()._cdata
                play.see(f"{key} of {name} has memory of its own in the checkpoint", place not in storages)
                storages[place] = key
    look_at_groups(play, groups)
    if isinstance(groups, list):
        plain = [{key: value for key, value in group.items() if key != STAMP} for group in groups]
        play.see("the groups are JSON", _is_json(plain))
        for number, group in enumerate(plain):
            play.see(f"the params of group {number}", [str(name) for name in group.get("params", ())])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


FROM_STUB = '''\
import torch
from zerolab import to_local
from zerolab.lab.exercises import Todo


@torch.no_grad()
def from_zerolab(zero, adam) -> dict:
    """The checkpoint of a sharded run as torch has it, {"weights", "state", "groups"}.

    It is as in 18.1. All ranks call this, and every rank returns all of it. Each tensor of
    the state has memory of its own, and the run stays as it is.
    """
    raise Todo("18.2")
'''

FROM = """\
import torch
from zerolab import to_local


@torch.no_grad()
def from_zerolab(zero, adam) -> dict:
    state, name_of = {}, {}
    for unit in zero.units:
        name_of |= dict(zip(unit.params, unit.names))
        for kind in ("exp_avg", "exp_avg_sq"):
            shard = unit.master.new_zeros(unit.layout.shard_size)
            for param, part in zip(unit.params, unit.layout.slices(shard, zero.rank)):
                if param in adam.state:
                    part.copy_(to_local(adam.state[param][kind]))
            flat = shard.new_empty(unit.layout.size)
            zero.comm.all_gather(flat, shard, unit.name).wait()
            for name, param, view in zip(unit.names, unit.params, unit.layout.views(flat)):
                if param in adam.state:
                    kept = state.setdefault(name, {})
                    kept["step"] = adam.state[param]["step"].clone()
                    kept[kind] = view.clone()
    groups = []
    for group in adam.param_groups:
        groups.append({key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
        groups[-1]["params"] = [name_of[param] for param in group["params"]]
    return {"weights": zero.full_state_dict(), "state": state, "groups": groups}
"""


def battery_of(act: Callable[[type[Engine], torch.dtype], Callable[[Play], None]]) -> tuple[Scene, ...]:
    return (
        Scene("", act(zerolab.Zero3, torch.float64), loose=1e-12),
        Scene("with Zero1, in float32", act(zerolab.Zero1, torch.float32), sizes=(2,), loose=1e-5),
        Scene("with Zero2, in float64", act(zerolab.Zero2, torch.float64), sizes=(3,), loose=1e-12),
    )


TO_BATTERY, FROM_BATTERY = battery_of(to), battery_of(back)

EXERCISES = [
    Exercise(
        id="18.1",
        title="from torch to zerolab",
        difficulty=2,
        section="Write: from torch to zerolab",
        battery=TO_BATTERY,
        stub=TO_STUB,
        reference=TO,
        hints=(
            'zero.load_full_state_dict(checkpoint["weights"]) cuts weights and buffers. For the averages do by hand '
            "what it does: for each unit, lay the averages out flat, take this rank's shard, and cut it into slices.",
            "flat = unit.master.new_zeros(unit.layout.size); unit.layout.views(flat) are the places of whole "
            "parameters, in the order of unit.names; unit.layout.slices(unit.layout.shard(flat, zero.rank), zero.rank) "
            "are this rank's slices, in the order of unit.params.",
            'For each name in checkpoint["state"]: adam.state[param]["step"] = a clone of the counter, and '
            "adam.state[param][kind] = part.clone(). Last, update each of adam.param_groups with the saved values, all "
            'but "params".',
        ),
        exports=("to_zerolab",),
    ),
    Exercise(
        id="18.2",
        title="from zerolab to torch",
        difficulty=2,
        section="Write: and back",
        battery=FROM_BATTERY,
        stub=FROM_STUB,
        reference=FROM,
        hints=(
            'zero.full_state_dict() is "weights". For each unit and each kind of average: fill a shard with this '
            "rank's slices, all-gather it, and cut the flat tensor into whole parameters.",
            "shard = unit.master.new_zeros(unit.layout.shard_size); the places of the slices in it are "
            "unit.layout.slices(shard, zero.rank), in the order of unit.params; copy to_local(adam.state[param][kind]) "
            "to each. Then flat = shard.new_empty(unit.layout.size) and "
            "zero.comm.all_gather(flat, shard, unit.name).wait().",
            "unit.layout.views(flat) are whole parameters in the order of unit.names: clone() each. `param in "
            "adam.state` says whether a parameter has state; every rank takes part in every gather all the same.",
        ),
        exports=("from_zerolab",),
    ),
]
