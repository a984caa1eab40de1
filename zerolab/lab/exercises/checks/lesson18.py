"""Lesson 18: a checkpoint is carried from plain torch, whole and by name, into a sharded run, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.engine.step import STAMP
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.exercise import Exercise, World, Wrong

KINDS = ("exp_avg", "exp_avg_sq")
Checkpoint = dict[str, Any]

NEW_ADAM = "the weights alone: Adam would start anew, with steps of a full learning rate (lesson 11)"
NO_STEP = "the averages without the step counter: Adam corrects them by it, so they would count too much"
STEP_0 = "the counter starts at 0: Adam would take the averages for those of a new run and enlarge them"
SHARED_STEP = (
    "several parameters share one step tensor: AdamW adds 1 to it in place, once for each of them. Clone it for each"
)
SWAPPED = "exp_avg and exp_avg_sq are swapped, or one of them was taken for both"
WEIGHTS = "those are the weights: the averages have to be cut like them, but they are other tensors"
FULL = "the whole average: the optimizer sees this rank's slice of the parameter, and its state must have that shape"
OTHER_RANK = "another rank's slice: layout.shard(flat, rank) and layout.slices(shard, rank) both take zero.rank"
BY_POSITION = (
    "another parameter's: the order of units is not the order of model.parameters(). Go by name, with unit.names"
)
ZEROS = "nothing but zeros: the flat tensor was cut before it was filled, or the name was not found"
NO_GAPS = (
    "the wrong elements: shards cut through parameters, with gaps between them; layout.views(flat) and slices() know"
)
A_VIEW = "a view of a larger tensor, which stays in memory with it: then every rank holds the whole average. clone() it"
CALLERS = "the checkpoint's own tensor: the next step would change the checkpoint with it. clone() it"
NO_STATE = "frozen parameters, and those that never had a gradient, have no state: look whether the name is in it"
BUFFERS = "the buffers are missing: zero.load_full_state_dict() takes weights and buffers together"
NOT_LOADED = "the weights did not arrive: zero.load_full_state_dict(checkpoint['weights']), on every rank"
LOST_WEIGHTS = "the averages were left in the place of the weights: put the weights back, last"
GROUPS = "the hyperparameters did not come along: the saved values belong in adam.param_groups, group by group"
FIRST_GROUP = "every group got the first group's values: go through both lists together"
KEYS = "the keys of adam.state are the parameters themselves, not their names"
DTYPE = "the dtype changed on the way: make tensors with unit.master.new_zeros(...), which have the parameters' dtype"
AGAIN = "right the first time only: a second load must replace what is there, not keep it or add to it"
TIED = "a tied weight is one parameter with two names: it has one state"


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


CASES = ((zerolab.Zero3, torch.float64), (zerolab.Zero1, torch.float32), (zerolab.Zero2, torch.float64))


def cases() -> Iterator[tuple[str, type[Engine], torch.dtype]]:
    for stage, dtype in CASES:
        yield f"{stage.__name__}, {str(dtype).removeprefix('torch.')}", stage, dtype


# ---------------------------------------------------------------------- 18.1


def check_to(answer: Any, world: World) -> None:
    for when, stage, dtype in cases():
        model, adam = torch_run(dtype)
        checkpoint = checkpoint_of(model, adam)
        given = deepcopy(checkpoint)
        zero, sharded = new_run(stage, dtype)
        for call in ("", ", loaded a second time"):
            with world.record(), values.in_case(answer, when + call, AGAIN if call else "", ERRORS):
                answer.to_zerolab(given, zero, sharded)
            try:
                check_unchanged(when + call, given, checkpoint, world)
                check_weights(when + call, zero, checkpoint, world)
                check_state(when + call, zero, sharded, given, world)
                check_groups(when + call, sharded, checkpoint)
            except Wrong as wrong:
                if call:
                    raise Wrong(wrong.seen, AGAIN) from None
                raise
            with world.record(), values.in_case(answer, f"{when}: training goes on", "", ERRORS):
                train(zero.model, sharded, range(3, 5), world.rank, world.world_size)
            check_unchanged(f"{when}: after a step", given, checkpoint, world, CALLERS)
        train(model, adam, range(3, 5))
        check_going_on(when, zero.full_state_dict(), dict(model.state_dict()), dtype)


def check_unchanged(when: str, given: Checkpoint, before: Checkpoint, world: World, likely: str = "") -> None:
    likely = likely or "the caller still needs the checkpoint: work on copies"
    same = given.keys() == before.keys() and given["groups"] == before["groups"]
    for part in ("weights", "state"):
        same = same and given[part].keys() == before[part].keys()
    if not same:
        raise Wrong(f"{when}: `checkpoint` has changed", likely)
    for name, tensor in before["weights"].items():
        if not torch.equal(given["weights"][name], tensor):
            raise Wrong(f"{when}: the checkpoint's {name} has changed", likely)
    for name, kept in before["state"].items():
        if given["state"][name].keys() != kept.keys():
            raise Wrong(f"{when}: the checkpoint's state of {name} has other keys", likely)
        for key, tensor in kept.items():
            if not torch.equal(given["state"][name][key], tensor):
                raise Wrong(f"{when}: the checkpoint's {key} of {name} has changed", likely)


def always(likely: str) -> Callable[[Tensor], str]:
    """For `values.compare`, where the mistake is known before the values are looked at."""
    return lambda got: likely


def check_weights(when: str, zero: Engine, checkpoint: Checkpoint, world: World) -> None:
    untouched = Whole(4, next(iter(checkpoint["weights"].values())).dtype).state_dict()
    got = zero.full_state_dict()
    if all(torch.equal(got[name], untouched[name]) for name in got):
        raise Wrong(f"{when}: the weights are those that the model was built with", NOT_LOADED)
    for name, want in checkpoint["weights"].items():
        if torch.equal(got[name], want):
            continue
        likely = ""
        if name == "seen":
            likely = BUFFERS
        elif torch.equal(got[name], untouched[name]):
            likely = NOT_LOADED
        elif any(torch.equal(got[name], kept[k]) for kept in checkpoint["state"].values() for k in KINDS) or not bool(
            got[name].any()
        ):
            likely = LOST_WEIGHTS
        values.compare(f"{when}: {name}", got[name], want, always(likely), rtol=0.0)


def check_state(when: str, zero: Engine, adam: torch.optim.Optimizer, checkpoint: Checkpoint, world: World) -> None:
    state = checkpoint["state"]
    known = {param for unit in zero.units for param in unit.params}
    if strange := [key for key in adam.state if key not in known]:
        kind = f"a {type(strange[0]).__name__}" if not isinstance(strange[0], str) else repr(strange[0])
        raise Wrong(f"{when}: adam.state has a key that is no parameter of the model, {kind}", KEYS)
    if state and not any(adam.state.get(param) for param in known):
        raise Wrong(f"{when}: adam.state is empty", NEW_ADAM)
    storages: dict[int, str] = {}
    theirs = {
        tensor.untyped_storage()._cdata
        for tensor in [*checkpoint["weights"].values(), *(t for kept in state.values() for t in kept.values())]
    }
    for unit in zero.units:
        want = {kind: cut(unit, averages(state, kind), world.rank) for kind in KINDS}
        for number, (name, param) in enumerate(zip(unit.names, unit.params, strict=True)):
            kept = adam.state.get(param, {})
            if name not in state:
                if kept:
                    raise Wrong(f"{when}: {name} has {', '.join(kept)}, and none in the checkpoint", NO_STATE)
                continue
            if not kept:
                raise Wrong(f"{when}: {name} has no state", TIED if "token" in name or "head" in name else "")
            if "step" not in kept:
                raise Wrong(f"{when}: {name} has {', '.join(kept)} and no step", NO_STEP)
            for kind in KINDS:
                if kind not in kept:
                    raise Wrong(f"{when}: {name} has no {kind}", "Adam keeps two averages: exp_avg and exp_avg_sq")
                check_average(
                    f"{when}: {kind} of {name}", to_local(kept[kind]), want, kind, unit, number, checkpoint, world
                )
            check_step_counter(f"{when}: step of {name}", kept["step"], state[name]["step"])
            for key, tensor in kept.items():
                if not isinstance(tensor, Tensor):
                    continue
                tensor = to_local(tensor)
                place = tensor.untyped_storage()._cdata
                if tensor.numel() and place in theirs:
                    raise Wrong(f"{when}: {key} of {name} shares the memory of a tensor of the checkpoint", CALLERS)
                if tensor.numel() and tensor.untyped_storage().nbytes() > tensor.nbytes:
                    many = tensor.untyped_storage().nbytes()
                    raise Wrong(f"{when}: {key} of {name} has {tensor.nbytes} bytes and holds {many}", A_VIEW)
                if tensor.numel() and place in storages:
                    shared = f"{when}: {key} of {name} is the same tensor as {storages[place]}"
                    raise Wrong(shared, SHARED_STEP if key == "step" else "every parameter has averages of its own")
                storages[place] = f"{key} of {name}"


def check_step_counter(what: str, got: Any, want: Tensor) -> None:
    if not isinstance(got, Tensor):
        raise Wrong(
            f"{what} is a {type(got).__name__}", "torch's AdamW keeps the counter in a tensor: clone the saved one"
        )
    if got.numel() != 1 or got.item() != want.item():
        seen = f"{got.item():g}" if got.numel() == 1 else f"of shape {tuple(got.shape)}"
        raise Wrong(f"{what} is {seen}, not {want.item():g}", STEP_0 if seen == "0" else "one counter, as it was saved")


def check_average(
    what: str,
    got: Any,
    want: dict[str, list[Tensor]],
    kind: str,
    unit: Unit,
    number: int,
    checkpoint: Checkpoint,
    world: World,
) -> None:
    expected, state, name = want[kind][number], checkpoint["state"], unit.names[number]
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is a {type(got).__name__}", "")
    if got.shape != expected.shape:
        whole = got.shape == state[name][kind].shape
        seen = f"{what} has the shape {tuple(got.shape)}, this rank's slice of the parameter {tuple(expected.shape)}"
        others = [tuple(cut(unit, {}, r)[number].shape) for r in range(world.world_size)]
        raise Wrong(seen, FULL if whole else OTHER_RANK if tuple(got.shape) in others else NO_GAPS)
    if got.dtype != expected.dtype:
        raise Wrong(f"{what} is {got.dtype}, not {expected.dtype}", DTYPE)

    def explain(got: Tensor) -> str:
        other = KINDS[1 - KINDS.index(kind)]
        suspects = [(want[other][number], SWAPPED)]
        suspects += [(cut(unit, checkpoint["weights"], world.rank)[number], WEIGHTS)]
        for r in range(world.world_size):
            suspects.append((cut(unit, averages(state, kind), r)[number], OTHER_RANK))
            suspects.append((cut(unit, averages(state, kind), world.rank, shard_of=r)[number], OTHER_RANK))
        for suspect, likely in suspects:
            if torch.equal(suspect, got):
                return likely
        if not bool(got.any()):
            return ZEROS
        flat = torch.cat([kept[kind].flatten() for kept in state.values()])
        if bool(torch.isin(got, flat).all()):
            return BY_POSITION if bool((~torch.isin(got, state[name][kind])).any()) else NO_GAPS
        return ""

    values.compare(what, got, expected, explain, rtol=0.0)


COUNTED = ("lr", "betas", "eps", "weight_decay")


def check_groups(when: str, adam: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    saved = checkpoint["groups"]
    if len(adam.param_groups) != len(saved):
        likely = "change the values in the groups that are there, and leave the groups and their parameters"
        raise Wrong(f"{when}: adam has {len(adam.param_groups)} groups, not {len(saved)}", likely)
    for number, (group, want) in enumerate(zip(adam.param_groups, saved, strict=True)):
        if any(isinstance(param, str) for param in group["params"]):
            likely = "group['params'] must stay the parameters: leave that key out of what you copy"
            raise Wrong(f"{when}: group {number} has names for parameters", likely)
        for key in COUNTED:
            got = tuple(group[key]) if key == "betas" else group[key]
            if got != (tuple(want[key]) if key == "betas" else want[key]):
                likely = FIRST_GROUP if number and got == saved[0][key] else GROUPS
                raise Wrong(f"{when}: {key} of group {number} is {got}, not {want[key]}", likely)


def check_going_on(when: str, got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for name, tensor in want.items():
        if not torch.allclose(got[name], tensor, rtol=tolerance, atol=tolerance):
            apart = (got[name] - tensor).abs().max().item()
            raise Wrong(
                f"{when}: two steps after the move, {name} is {apart:.2g} off", "something of the state is lost"
            )


# ---------------------------------------------------------------------- 18.2

ONE_RANK = "this rank's slices only: all-gather the shards, and cut the flat tensor by layout.views(flat)"
SHARES = "several tensors in one memory, which safetensors refuses: clone() each view"
DEFAULTS = (
    "adam.state[param] makes an empty entry where there is none, and the next step fails on it: ask "
    "adam.state.get(param), or `param in adam.state`"
)
NOT_BACK = "the model has changed: whatever was put in the place of the parameters must go back"
ALIASES = "it shares memory with the run, so the next step changes what was saved: clone() it"
KEPT = "right the first time only: something of the first call was kept"


def check_from(answer: Any, world: World) -> None:
    for when, stage, dtype in cases():
        model, adam = torch_run(dtype)
        zero, sharded = new_run(stage, dtype)
        carry(checkpoint_of(model, adam), zero, sharded, world.rank)
        train(zero.model, sharded, range(3, 5), world.rank, world.world_size)
        train(model, adam, range(3, 5))
        first = check_back(answer, when, zero, sharded, checkpoint_of(model, adam), world, dtype)
        before = deepcopy(first)
        with world.record(), values.in_case(answer, f"{when}: training goes on", DEFAULTS, ERRORS_BACK):
            train(zero.model, sharded, range(5, 6), world.rank, world.world_size)
        check_unchanged(f"{when}: a step later", first, before, world, ALIASES)
        train(model, adam, range(5, 6))
        try:
            check_back(answer, f"{when}, a second call", zero, sharded, checkpoint_of(model, adam), world, dtype)
        except Wrong as wrong:
            raise Wrong(wrong.seen, KEPT) from None


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


def snapshot(zero: Engine, adam: torch.optim.Optimizer) -> list[Tensor]:
    held = [unit.master.detach().clone() for unit in zero.units]
    return held + [to_local(t).clone() for kept in adam.state.values() for t in kept.values() if isinstance(t, Tensor)]


def check_back(
    answer: Any,
    when: str,
    zero: Engine,
    adam: torch.optim.Optimizer,
    want: Checkpoint,
    world: World,
    dtype: torch.dtype,
) -> Checkpoint:
    entries, held = len(adam.state), snapshot(zero, adam)
    with world.record(), values.in_case(answer, when, "", ERRORS_BACK):
        got = answer.from_zerolab(zero, adam)
    if not isinstance(got, dict) or not {"weights", "state", "groups"} <= got.keys():
        what = f"a {type(got).__name__}" if not isinstance(got, dict) else f"a dict with {', '.join(map(str, got))}"
        likely = values.forgot_to_return(got) or 'return {"weights": ..., "state": ..., "groups": ...}, on every rank'
        raise Wrong(f"{when}: it returns {what}", likely)
    if len(adam.state) != entries:
        raise Wrong(f"{when}: adam.state had {entries} entries and now has {len(adam.state)}", DEFAULTS)
    now = snapshot(zero, adam)
    if len(now) != len(held) or not all(map(torch.equal, now, held)):
        raise Wrong(f"{when}: the parameters or the state of the run have changed", NOT_BACK)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    check_whole(f"{when}: weights", got["weights"], want["weights"], world, tolerance)
    check_names(when, got["state"], want["state"])
    for name, kept in want["state"].items():
        theirs = got["state"][name]
        if "step" not in theirs:
            raise Wrong(f"{when}: {name} has no step", NO_STEP)
        check_step_counter(f"{when}: step of {name}", theirs["step"], kept["step"])
        if missing := [kind for kind in KINDS if kind not in theirs]:
            raise Wrong(f"{when}: {name} has no {missing[0]}", "Adam keeps two averages: exp_avg and exp_avg_sq")
    for kind in KINDS:
        full = averages(got["state"], kind)
        whole = averages(want["state"], kind)
        other = averages(want["state"], KINDS[1 - KINDS.index(kind)])
        check_whole(f"{when}: {kind}", full, whole, world, tolerance, other, want["weights"])
    check_memory(when, got["state"])
    check_names_in_groups(when, got["groups"], want["groups"])
    return got


def check_names(when: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    if not got:
        raise Wrong(f"{when}: the state is empty", NEW_ADAM)
    if any(not isinstance(name, str) for name in got):
        raise Wrong(f"{when}: a key of the state is a {type(next(iter(got))).__name__}", "by name: unit.names")
    if more := sorted(got.keys() - want.keys()):
        raise Wrong(f"{when}: there is a state of {more[0]}, which has none", NO_STATE)
    if less := sorted(want.keys() - got.keys()):
        likely = "the keys are those of the model, as unit.names has them, without a prefix or a number"
        empty = "a rank that owns nothing of a parameter still knows its step: build the entry on every rank"
        raise Wrong(f"{when}: there is no state of {less[0]}", empty if less[0] != "token.weight" else likely)


def check_whole(
    what: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    world: World,
    tolerance: float,
    other: dict[str, Tensor] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> None:
    for name, expected in want.items():
        if name not in got:
            raise Wrong(f"{what}: {name} is missing", BUFFERS_BACK if name == "seen" else TIED_BACK)
        tensor = got[name]
        if not isinstance(tensor, Tensor):
            raise Wrong(f"{what}: {name} is a {type(tensor).__name__}", "")
        tensor = to_local(tensor)
        if tensor.shape != expected.shape:
            seen = f"{what}: {name} has the shape {tuple(tensor.shape)}, not {tuple(expected.shape)}"
            raise Wrong(seen, ONE_RANK if tensor.numel() <= expected.numel() else "without padding: layout.views(flat)")
        if tensor.dtype != expected.dtype:
            raise Wrong(f"{what}: {name} is {tensor.dtype}, not {expected.dtype}", DTYPE)
        if torch.allclose(tensor, expected, rtol=tolerance, atol=tolerance):
            continue

        def same(suspect: Tensor | None, tensor: Tensor = tensor) -> bool:
            return suspect is not None and suspect.shape == tensor.shape and torch.allclose(suspect, tensor, atol=1e-4)

        likely = ""
        if other and same(other.get(name)):
            likely = SWAPPED
        elif weights and same(weights.get(name)):
            likely = WEIGHTS
        elif not bool(tensor.any()):
            likely = ZEROS
        elif any(same(want[another]) for another in want if another != name):
            likely = BY_POSITION
        elif bool((torch.isclose(tensor, expected, atol=1e-4) | (tensor == 0)).all()):
            likely = ONE_RANK
        values.compare(f"{what} of {name}", tensor, expected, always(likely), rtol=tolerance)


BUFFERS_BACK = "buffers belong to a checkpoint: zero.full_state_dict() has weights and buffers"
TIED_BACK = "a tied weight has two names, and torch expects both: zero.full_state_dict() has them"


def check_memory(when: str, state: dict[str, Any]) -> None:
    seen: dict[int, str] = {}
    for name, kept in state.items():
        for key, tensor in kept.items():
            if isinstance(tensor, Tensor):
                place = tensor.untyped_storage()._cdata
                if place in seen:
                    raise Wrong(f"{when}: {key} of {name} is in the memory of {seen[place]}", SHARES)
                seen[place] = f"{key} of {name}"


def check_names_in_groups(when: str, got: Any, want: list[dict[str, Any]]) -> None:
    names = "a group's `params` are names here: the file that they go into knows no Python objects"
    if not isinstance(got, list) or len(got) != len(want):
        raise Wrong(f"{when}: groups: {len(want)} were expected", "a list with an entry for each of adam.param_groups")
    try:
        json.dumps([{key: value for key, value in group.items() if key != STAMP} for group in got])
    except (TypeError, ValueError) as error:
        raise Wrong(f"{when}: groups are not JSON: {error}", names) from None
    for number, (group, wanted) in enumerate(zip(got, want, strict=True)):
        if list(group.get("params", ())) != wanted["params"]:
            raise Wrong(f"{when}: group {number} has the params {group.get('params')}, not {wanted['params']}", names)
        for key in COUNTED:
            theirs = group.get(key)
            if (tuple(theirs) if isinstance(theirs, list) else theirs) != wanted[key]:
                raise Wrong(f"{when}: {key} of group {number} is {theirs}, not {wanted[key]}", GROUPS)


# ---------------------------------------------------------------------- what both use

SIZES = "sizes differ: layout.views(flat) are whole parameters, layout.slices(shard, rank) are this rank's"
ERRORS = {
    "does not fit": "load_full_state_dict() wants every weight and buffer of the model, under the model's names",
    "must match the size": SIZES,
    "expanded size": SIZES,
    "a leaf Variable": "parameters are changed under torch.no_grad()",
    "requires grad": "parameters are read and changed under torch.no_grad()",
    "'step'": NO_STEP,
    "'exp_avg'": NO_STATE,
    "KeyError": NO_STATE,
}
ERRORS_BACK = ERRORS | {"'step'": DEFAULTS, "'exp_avg'": DEFAULTS, "KeyError": DEFAULTS}

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

EXERCISES = [
    Exercise(
        id="18.1",
        title="from torch to zerolab",
        difficulty=2,
        section="Write: from torch to zerolab",
        check=check_to,
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
        errors=ERRORS,
    ),
    Exercise(
        id="18.2",
        title="from zerolab to torch",
        difficulty=2,
        section="Write: and back",
        check=check_from,
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
        errors=ERRORS_BACK,
    ),
]
