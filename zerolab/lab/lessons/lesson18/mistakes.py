"""Lesson 18: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson18 import FROM, TO

# ---------------------------------------------------------------------- 18.1

TO_BY_WEIGHTS = """\
import torch


@torch.no_grad()
def to_zerolab(checkpoint, zero, adam):  # the engine cuts the averages, as if they were weights
    weights, state = checkpoint["weights"], checkpoint["state"]
    adam.state.clear()
    for kind in ("exp_avg", "exp_avg_sq"):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        zero.load_full_state_dict(zeros | {name: kept[kind] for name, kept in state.items()} | {
            name: state["token.weight"][kind] for name in ("token.weight", "head.weight") if "head.weight" in weights
        })
        for name, param in zero.model.named_parameters():
            if name in state:
                adam.state[param][kind] = param.detach().clone()
                adam.state[param]["step"] = torch.tensor(state[name]["step"].item())
    zero.load_full_state_dict(weights)
    for here, there in zip(adam.param_groups, checkpoint["groups"]):
        for key in there.keys() - {"params"}:
            here[key] = there[key]
"""

TO_BY_BOUNDS = """\
import torch


def to_zerolab(checkpoint, zero, adam):
    zero.load_full_state_dict(checkpoint["weights"])
    for unit in zero.units:
        first, last = unit.layout.bounds(zero.rank)
        for name, slot, param in zip(unit.names, unit.layout.slots, unit.params):
            kept = checkpoint["state"].get(name)
            if kept is None:
                continue
            a, b = (min(max(edge - slot.offset, 0), slot.numel) for edge in (first, last))
            mine = {kind: kept[kind].flatten()[a:b].clone().view(param.shape) for kind in ("exp_avg", "exp_avg_sq")}
            adam.state[param] = {"step": kept["step"].clone(), **mine}
    for number, saved in enumerate(checkpoint["groups"]):
        adam.param_groups[number].update({**saved, "params": adam.param_groups[number]["params"]})
"""

_GROUPS = TO[TO.index("    for group, saved") :]
_STEP = 'state[name]["step"].clone()'
_INDENT = 20 * " "
_LAST = "if name in state:\n" + _INDENT + "adam.state[param]"

TO_MISTAKES = {
    "weights alone": Mistake(
        "def to_zerolab(checkpoint, zero, adam):\n    zero.load_full_state_dict(checkpoint['weights'])\n",
        "the weights alone: Adam would start anew, with steps of a full learning rate (lesson 11)",
    ),
    "no step": Mistake(
        edit(TO, f'                    adam.state[param]["step"] = {_STEP}\n', ""),
        "the averages without the step counter: Adam corrects them by it, so they would count too much",
    ),
    "step 0": Mistake(
        edit(TO, _STEP, "torch.tensor(0.0)"),
        "the counter starts at 0: Adam would take the averages for those of a new run and enlarge them",
    ),
    "one step for all": Mistake(
        edit(TO, "    state = checkpoint", "    step = torch.tensor(3.0)\n    state = checkpoint", _STEP, "step"),
        (
            "several parameters share one step tensor: AdamW adds 1 to it in place, once for each of them. Clone "
            "it for each"
        ),
    ),
    "the checkpoint's step": Mistake(
        edit(TO, _STEP, 'state[name]["step"]'),
        "the checkpoint's own tensor: the next step would change the checkpoint with it. clone() it",
    ),
    "swapped": Mistake(
        edit(TO, "adam.state[param][kind]", 'adam.state[param]["exp_avg" if kind[-1] == "q" else "exp_avg_sq"]'),
        "exp_avg and exp_avg_sq are swapped, or one of them was taken for both",
    ),
    "the same twice": Mistake(
        edit(TO, "state[name][kind])", 'state[name]["exp_avg"])'),
        "exp_avg and exp_avg_sq are swapped, or one of them was taken for both",
    ),
    "views": Mistake(
        edit(TO, "part.clone()", "part"),
        (
            "a view of a larger tensor, which stays in memory with it: then every rank holds the whole average. "
            "clone() it"
        ),
    ),
    "whole averages": Mistake(
        edit(TO, "= part.clone()", "= state[name][kind].clone()"),
        (
            "the whole average: the optimizer sees this rank's slice of the parameter, and its state must have "
            "that shape"
        ),
    ),
    "rank 0's shard": Mistake(
        edit(TO, "shard(flat, zero.rank)", "shard(flat, 0)"),
        "another rank's slice: layout.shard(flat, rank) and layout.slices(shard, rank) both take zero.rank",
    ),
    "state for all": Mistake(
        edit(TO, _LAST, "if True:\n" + _INDENT + "adam.state[param]", _STEP, "torch.tensor(3.0)"),
        ("frozen parameters, and those that never had a gradient, have no state: look whether the name is in it"),
    ),
    "no look whether": Mistake(
        edit(
            TO,
            "                if name in state:\n                    view",
            "                if True:\n                    view",
        ),
        ("frozen parameters, and those that never had a gradient, have no state: look whether the name is in it"),
    ),
    "names as keys": Mistake(
        edit(TO, "adam.state[param]", "adam.state[name]"),
        "adam.state has nothing for the parameters: its keys are the parameters themselves, not their names",
    ),
    "groups forgotten": Mistake(
        edit(TO, _GROUPS, ""),
        "the hyperparameters did not come along: the saved values belong in adam.param_groups, group by group",
    ),
    "the first group": Mistake(
        edit(TO, "for key, value in saved.items()", 'for key, value in checkpoint["groups"][0].items()'),
        "every group got the first group's values: go through both lists together",
    ),
    "float32": Mistake(
        edit(TO, "unit.master.new_zeros(unit.layout.size)", "torch.zeros(unit.layout.size)"),
        (
            "the dtype changed on the way: make tensors with unit.master.new_zeros(...), which have the "
            "parameters' dtype"
        ),
    ),
    "cut before it is filled": Mistake(
        edit(
            TO,
            "            flat = ",
            "            empty = ",
            "unit.layout.views(flat)",
            "unit.layout.views(empty.clone())",
            "shard(flat,",
            "shard(empty,",
        ),
        "nothing but zeros: the flat tensor was cut before it was filled, or the name was not found",
    ),
    "once only": Mistake(
        edit(TO, "adam.state[param][kind] = part.clone()", "adam.state[param].setdefault(kind, part.clone())"),
        "right the first time only: a second load must replace what is there, not keep it or add to it",
    ),
    "no weights": Mistake(
        edit(TO, '    zero.load_full_state_dict(checkpoint["weights"])\n', ""),
        "the weights did not arrive: zero.load_full_state_dict(checkpoint['weights']), on every rank",
    ),
    "without buffers": Mistake(
        edit(
            TO,
            '    zero.load_full_state_dict(checkpoint["weights"])\n',
            "    with zero.full_parameters():\n        for name, param in zero.model.named_parameters():\n"
            '            param.copy_(checkpoint["weights"][name])\n',
        ),
        "the buffers are missing: zero.load_full_state_dict() takes weights and buffers together",
    ),
}

# ---------------------------------------------------------------------- 18.2

FROM_BY_WEIGHTS = """\
import torch


@torch.no_grad()
def from_zerolab(zero, adam):  # the averages take the place of the weights for a moment, and are read as weights
    weights = zero.full_state_dict()
    names = {param: name for name, param in zero.model.named_parameters()}
    kept = {names[param]: {"step": values["step"].clone()} for param, values in adam.state.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        for param in names:
            param.copy_(adam.state[param][kind]) if param in adam.state else param.zero_()
        for unit in zero.units:
            zero.master_changed(unit)
        full = zero.full_state_dict()
        for name in kept:
            kept[name][kind] = full[name].clone()
    zero.load_full_state_dict(weights)
    groups = [dict(g, params=[names[param] for param in g["params"]]) for g in adam.param_groups]
    return {"weights": weights, "state": kept, "groups": groups}
"""

FROM_BY_TORCH = """\
import torch
import torch.distributed as dist
from zerolab import to_local


@torch.no_grad()
def from_zerolab(zero, adam):
    N = zero.world_size
    names, state = {}, {}
    for unit in zero.units:
        for slot, name, param in zip(unit.layout.slots, unit.names, unit.params):
            names[param] = name
            kept = adam.state.get(param)
            if kept:
                state[name] = {"step": torch.tensor(float(kept["step"]))}
                for kind in ("exp_avg", "exp_avg_sq"):
                    parts = [None] * N
                    dist.all_gather_object(parts, to_local(kept[kind]).flatten())
                    state[name][kind] = torch.cat(parts).view(slot.shape)
    keys = ("lr", "betas", "eps", "weight_decay")
    groups = [{k: group[k] for k in keys} for group in adam.param_groups]
    for saved, group in zip(groups, adam.param_groups):
        saved["params"] = [names[p] for p in group["params"]]
    return dict(weights=zero.full_state_dict(), state=state, groups=groups)
"""

FROM_BY_ASKING = """\
import torch
from zerolab import full_tensor


def from_zerolab(zero, adam):  # each slice leads to the whole
    names = {param: name for name, param in zero.model.named_parameters()}
    state = {name: {key: full_tensor(t).clone() for key, t in adam.state[param].items()}
             for param, name in names.items() if param in adam.state}
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in adam.param_groups]
    return {"weights": zero.full_state_dict(), "state": state, "groups": groups}
"""

_FROM_STEP = 'adam.state[param]["step"].clone()'

FROM_MISTAKES = {
    "weights alone": Mistake(
        edit(FROM, '"state": state', '"state": {}'),
        "the weights alone: Adam would start anew, with steps of a full learning rate (lesson 11)",
    ),
    "no step": Mistake(
        edit(FROM, f'                    kept["step"] = {_FROM_STEP}\n', ""),
        "the averages without the step counter: Adam corrects them by it, so they would count too much",
    ),
    "step 0": Mistake(
        edit(FROM, _FROM_STEP, "torch.tensor(0.0)"),
        "the counter starts at 0: Adam would take the averages for those of a new run and enlarge them",
    ),
    "the run's step": Mistake(
        edit(FROM, '["step"].clone()', '["step"]'),
        "it shares memory with the run, so the next step changes what was saved: clone() it",
    ),
    "slices": Mistake(
        edit(FROM, "= view.clone()", "= adam.state[param][kind].clone()"),
        "this rank's slices only: all-gather the shards, and cut the flat tensor by layout.views(flat)",
    ),
    "no gather": Mistake(
        edit(
            FROM,
            "            zero.comm.all_gather(flat, shard, unit.name).wait()\n",
            "            flat.zero_()\n            unit.layout.shard(flat, zero.rank).copy_(shard)\n",
        ),
        "this rank's slices only: all-gather the shards, and cut the flat tensor by layout.views(flat)",
    ),
    "views of one memory": Mistake(
        edit(FROM, "view.clone()", "view"),
        "several tensors in one memory, which safetensors refuses: clone() each view",
    ),
    "swapped": Mistake(
        edit(FROM, "kept[kind] =", 'kept["exp_avg" if kind[-1] == "q" else "exp_avg_sq"] ='),
        "exp_avg and exp_avg_sq are swapped, or one of them was taken for both",
    ),
    "empty entries": Mistake(
        edit(
            FROM,
            "                if param in adam.state:\n                    part",
            "                if adam.state[param]:\n                    part",
            "                if param in adam.state:\n                    kept",
            "                if adam.state[param]:\n                    kept",
        ),
        (
            "adam.state[param] makes an empty entry where there is none, and the next step fails on it: ask "
            "adam.state.get(param), or `param in adam.state`"
        ),
    ),
    "an empty entry, and then no step": Mistake(
        edit(
            FROM,
            "                if param in adam.state:\n                    part",
            "                if adam.state[param]:\n                    part",
        ),
        (
            "adam.state[param] makes an empty entry where there is none, and the next step fails on it: ask "
            "adam.state.get(param), or `param in adam.state`"
        ),
    ),
    "state for all": Mistake(
        edit(
            FROM,
            "                if param in adam.state:\n                    kept",
            "                if True:\n                    kept",
            _FROM_STEP,
            "torch.tensor(5.0)",
        ),
        ("frozen parameters, and those that never had a gradient, have no state: look whether the name is in it"),
    ),
    "parameters in groups": Mistake(
        edit(FROM, "[name_of[param] for param in", "[param for param in"),
        "a group's `params` are names here: the file that they go into knows no Python objects",
    ),
    "no hyperparameters": Mistake(
        edit(FROM, '("lr", "betas", "eps", "weight_decay")', '("lr",)'),
        "the hyperparameters did not come along: the saved values belong in adam.param_groups, group by group",
    ),
    "weights without buffers": Mistake(
        edit(
            FROM,
            '"weights": zero.full_state_dict()',
            '"weights": {k: v for k, v in zero.full_state_dict().items() if k != "seen"}',
        ),
        "buffers belong to a checkpoint: zero.full_state_dict() has weights and buffers",
    ),
    "one name of a tied weight": Mistake(
        edit(
            FROM,
            '"weights": zero.full_state_dict()',
            '"weights": {k: v for k, v in zero.full_state_dict().items() if k != "head.weight"}',
        ),
        "a tied weight has two names, and torch expects both: zero.full_state_dict() has them",
    ),
    "float32": Mistake(
        edit(FROM, "unit.master.new_zeros(unit.layout.shard_size)", "torch.zeros(unit.layout.shard_size)"),
        (
            "the dtype changed on the way: make tensors with unit.master.new_zeros(...), which have the "
            "parameters' dtype"
        ),
    ),
    "nothing returned": Mistake(
        edit(FROM, "    return {", "    checkpoint = {"),
        "the function returns nothing: `return` is missing",
    ),
    "keeps the first": Mistake(
        edit(
            FROM,
            "    state, name_of = {}, {}\n",
            "    if hasattr(zero, 'saved'):\n        return zero.saved\n    state, name_of = {}, {}\n",
            "    return {",
            "    zero.saved = {",
        ).rstrip()
        + "\n    return zero.saved\n",
        "right the first time only: something of the first call was kept",
    ),
    "rank 0 alone": Mistake(
        edit(
            FROM,
            "    return {",
            "    weights = zero.full_state_dict()\n    if zero.rank > 0:\n        return {}\n    return {",
        ).replace('"weights": zero.full_state_dict()', '"weights": weights'),
        'return {"weights": ..., "state": ..., "groups": ...}, on every rank',
    ),
    "rank 0 alone, and gathers alone": Mistake(
        edit(FROM, "    return {", "    if zero.rank > 0:\n        return {}\n    return {"),
        "not every rank makes the same calls: some are done while others wait",
    ),
}

RIGHT = {"18.1": (TO_BY_BOUNDS, TO_BY_WEIGHTS), "18.2": (FROM_BY_TORCH, FROM_BY_WEIGHTS, FROM_BY_ASKING)}
MISTAKES = {"18.1": TO_MISTAKES, "18.2": FROM_MISTAKES}
