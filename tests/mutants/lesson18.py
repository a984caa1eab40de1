"""Lesson 18: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson18 import FROM, TO

from .sources import edit

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

TO_MUTANTS = {
    "weights alone": (
        "def to_zerolab(checkpoint, zero, adam):\n    zero.load_full_state_dict(checkpoint['weights'])\n",
        "would start anew",
    ),
    "no step": (edit(TO, f'                    adam.state[param]["step"] = {_STEP}\n', ""), "without the step counter"),
    "step 0": (edit(TO, _STEP, "torch.tensor(0.0)"), "starts at 0"),
    "one step for all": (
        edit(TO, "    state = checkpoint", "    step = torch.tensor(3.0)\n    state = checkpoint", _STEP, "step"),
        "share one step tensor",
    ),
    "the checkpoint's step": (edit(TO, _STEP, 'state[name]["step"]'), "checkpoint's own tensor"),
    "swapped": (
        edit(TO, "adam.state[param][kind]", 'adam.state[param]["exp_avg" if kind[-1] == "q" else "exp_avg_sq"]'),
        "swapped",
    ),
    "the same twice": (edit(TO, "state[name][kind])", 'state[name]["exp_avg"])'), "swapped"),
    "views": (edit(TO, "part.clone()", "part"), "clone() it"),
    "whole averages": (edit(TO, "= part.clone()", "= state[name][kind].clone()"), "the whole average"),
    "rank 0's shard": (edit(TO, "shard(flat, zero.rank)", "shard(flat, 0)"), "another rank's slice"),
    "state for all": (
        edit(TO, _LAST, "if True:\n" + _INDENT + "adam.state[param]", _STEP, "torch.tensor(3.0)"),
        "have no state",
    ),
    "no look whether": (
        edit(
            TO,
            "                if name in state:\n                    view",
            "                if True:\n                    view",
        ),
        "have no state",
    ),
    "names as keys": (edit(TO, "adam.state[param]", "adam.state[name]"), "the parameters themselves"),
    "groups forgotten": (edit(TO, _GROUPS, ""), "hyperparameters did not come along"),
    "the first group": (
        edit(TO, "for key, value in saved.items()", 'for key, value in checkpoint["groups"][0].items()'),
        "the first group's values",
    ),
    "float32": (edit(TO, "unit.master.new_zeros(unit.layout.size)", "torch.zeros(unit.layout.size)"), "dtype changed"),
    "cut before it is filled": (
        edit(
            TO,
            "            flat = ",
            "            empty = ",
            "unit.layout.views(flat)",
            "unit.layout.views(empty.clone())",
            "shard(flat,",
            "shard(empty,",
        ),
        "nothing but zeros",
    ),
    "once only": (
        edit(TO, "adam.state[param][kind] = part.clone()", "adam.state[param].setdefault(kind, part.clone())"),
        "right the first time only",
    ),
    "no weights": (edit(TO, '    zero.load_full_state_dict(checkpoint["weights"])\n', ""), "did not arrive"),
    "without buffers": (
        edit(
            TO,
            '    zero.load_full_state_dict(checkpoint["weights"])\n',
            "    with zero.full_parameters():\n        for name, param in zero.model.named_parameters():\n"
            '            param.copy_(checkpoint["weights"][name])\n',
        ),
        "buffers are missing",
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

FROM_MUTANTS = {
    "weights alone": (edit(FROM, '"state": state', '"state": {}'), "would start anew"),
    "no step": (edit(FROM, f'                    kept["step"] = {_FROM_STEP}\n', ""), "without the step counter"),
    "step 0": (edit(FROM, _FROM_STEP, "torch.tensor(0.0)"), "starts at 0"),
    "the run's step": (edit(FROM, '["step"].clone()', '["step"]'), "shares memory with the run"),
    "slices": (edit(FROM, "= view.clone()", "= adam.state[param][kind].clone()"), "this rank's slices only"),
    "no gather": (
        edit(
            FROM,
            "            zero.comm.all_gather(flat, shard, unit.name).wait()\n",
            "            flat.zero_()\n            unit.layout.shard(flat, zero.rank).copy_(shard)\n",
        ),
        "this rank's slices only",
    ),
    "views of one memory": (edit(FROM, "view.clone()", "view"), "in one memory"),
    "swapped": (edit(FROM, "kept[kind] =", 'kept["exp_avg" if kind[-1] == "q" else "exp_avg_sq"] ='), "swapped"),
    "empty entries": (
        edit(
            FROM,
            "                if param in adam.state:\n                    part",
            "                if adam.state[param]:\n                    part",
            "                if param in adam.state:\n                    kept",
            "                if adam.state[param]:\n                    kept",
        ),
        "makes an empty entry",
    ),
    "an empty entry, and then no step": (
        edit(
            FROM,
            "                if param in adam.state:\n                    part",
            "                if adam.state[param]:\n                    part",
        ),
        "makes an empty entry",
    ),
    "state for all": (
        edit(
            FROM,
            "                if param in adam.state:\n                    kept",
            "                if True:\n                    kept",
            _FROM_STEP,
            "torch.tensor(5.0)",
        ),
        "have no state",
    ),
    "parameters in groups": (edit(FROM, "[name_of[param] for param in", "[param for param in"), "are names here"),
    "no hyperparameters": (edit(FROM, '("lr", "betas", "eps", "weight_decay")', '("lr",)'), "hyperparameters"),
    "weights without buffers": (
        edit(
            FROM,
            '"weights": zero.full_state_dict()',
            '"weights": {k: v for k, v in zero.full_state_dict().items() if k != "seen"}',
        ),
        "buffers belong to a checkpoint",
    ),
    "one name of a tied weight": (
        edit(
            FROM,
            '"weights": zero.full_state_dict()',
            '"weights": {k: v for k, v in zero.full_state_dict().items() if k != "head.weight"}',
        ),
        "two names",
    ),
    "float32": (
        edit(FROM, "unit.master.new_zeros(unit.layout.shard_size)", "torch.zeros(unit.layout.shard_size)"),
        "dtype changed",
    ),
    "nothing returned": (edit(FROM, "    return {", "    checkpoint = {"), "`return` is missing"),
    "keeps the first": (
        edit(
            FROM,
            "    state, name_of = {}, {}\n",
            "    if hasattr(zero, 'saved'):\n        return zero.saved\n    state, name_of = {}, {}\n",
            "    return {",
            "    zero.saved = {",
        ).rstrip()
        + "\n    return zero.saved\n",
        "right the first time only",
    ),
    "rank 0 alone": (
        edit(
            FROM,
            "    return {",
            "    weights = zero.full_state_dict()\n    if zero.rank > 0:\n        return {}\n    return {",
        ).replace('"weights": zero.full_state_dict()', '"weights": weights'),
        "on every rank",
    ),
    "rank 0 alone, and gathers alone": (
        edit(FROM, "    return {", "    if zero.rank > 0:\n        return {}\n    return {"),
        "not every rank makes the same calls",
    ),
}

RIGHT = {"18.1": (TO_BY_BOUNDS, TO_BY_WEIGHTS), "18.2": (FROM_BY_TORCH, FROM_BY_WEIGHTS, FROM_BY_ASKING)}
WRONG = {"18.1": TO_MUTANTS, "18.2": FROM_MUTANTS}
