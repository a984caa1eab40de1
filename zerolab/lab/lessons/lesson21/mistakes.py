"""Lesson 21: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson21 import QUORUM, STAGE

# ---------------------------------------------------------------------- 21.1

DECIDE_BY_SETS = """\
from itertools import cycle


def decide(before, replicas, least):
    there = sorted(name for name in replicas if all(isinstance(rank, int) for rank in replicas[name]))
    late = [name for name in before if name not in there and "dead" not in replicas[name]]
    if late or len(there) < least:
        return None
    step = max(replicas[name][0] for name in there)
    newest = cycle([name for name in there if replicas[name][0] == step])
    sources = {name: next(newest) for name in there if replicas[name][0] != step}
    return tuple(there), step, sources
"""

DECIDE_STEP_BY_STEP = """\
def decide(before, replicas, least):
    members, step = [], -1
    for name in replicas:
        asked = dead = 0
        for rank in replicas[name]:
            if rank == "dead":
                dead += 1
            elif rank != "busy":
                asked += 1
        if asked == len(replicas[name]):
            members.append(name)
            step = max(step, replicas[name][-1])
        elif name in before and not dead:
            return None
    if len(members) < least:
        return None
    members.sort()
    sources, sure, turn = {}, [], 0
    for name in members:
        if replicas[name][0] == step:
            sure.append(name)
    for name in members:
        if name not in sure:
            sources[name] = sure[turn]
            turn = (turn + 1) % len(sure)
    return members, step, sources
"""

_DEAD = '        if "dead" in ranks:\n            continue\n'
HALF = (
    "half a replica was counted in: with one of its ranks dead, nobody has the other half of its shards, and its "
    "replica cannot finish a step"
)
FOR_THE_DEAD = (
    "it waits for a replica that has a dead rank: whether the rest of it asks or not, it cannot train, and so nobody "
    "ever goes on"
)
FOR_NEWCOMERS = (
    "it waits for a newcomer that has not asked yet: nobody knows how long that takes, and all would stand still"
)
NOT_WAITED = (
    "a replica of `before` is busy with the step before, and was left out: it lives, so it would be thrown out for "
    "being a moment late. Return None until it has asked"
)
ZERO_STEPS = (
    "an entry of 0 was taken for one that has not asked: it has, and its parameters have seen no step. Ask for "
    "isinstance(entry, int), and not whether it is true"
)
LEAST = "`least` is the smallest number of replicas that may go on: as many as `least` are enough, fewer are not"
WITHOUT_OLD = (
    "when none of `before` is left, those that are there go on without them, from the most steps that *they* have "
    "seen: `before` says only who is waited for"
)
ORDER = "the members are in another order than that of their names: all ranks count their places by this list"
NOT_THE_NEWEST = (
    "the state of the member with the most steps is the one that counts: with another, steps that were made are lost"
)
IN_TURN = "all newcomers take from the same replica, which then sends for all of them while the others wait: take turns"

QUORUM_MISTAKES = {
    "half a replica": Mistake(
        edit(QUORUM, '        if "dead" in ranks:\n', '        if all(rank == "dead" for rank in ranks):\n').replace(
            "there[name] = ranks[0]", "there[name] = next(rank for rank in ranks if rank != 'dead')"
        ),
        HALF,
    ),
    "any rank will do": Mistake(
        edit(
            QUORUM,
            _DEAD + '        if "busy" not in ranks:\n            there[name] = ranks[0]\n',
            "        asked = [rank for rank in ranks if isinstance(rank, int)]\n"
            "        if asked:\n            there[name] = asked[0]\n",
            "        elif name in before:\n",
            '        elif name in before and "busy" in ranks:\n',
        ),
        HALF,
    ),
    "waits for the dead": Mistake(
        edit(QUORUM, _DEAD, "", '"busy" not in ranks', '"busy" not in ranks and "dead" not in ranks'), FOR_THE_DEAD
    ),
    "waits for half of the dead": Mistake(
        edit(
            QUORUM,
            _DEAD,
            '        if "dead" in ranks and "busy" not in ranks:\n            continue\n',
            '"busy" not in ranks:',
            '"busy" not in ranks and "dead" not in ranks:',
        ),
        FOR_THE_DEAD,
    ),
    "waits for whoever is busy beside the dead": Mistake(
        edit(
            QUORUM,
            _DEAD,
            '        if "dead" in ranks and not ("busy" in ranks and name in before):\n            continue\n',
            "elif name in before:",
            'elif name in before and "busy" in ranks:',
        ),
        FOR_THE_DEAD,
    ),
    "0 is not asked": Mistake(
        edit(QUORUM, '"busy" not in ranks', "all(rank and rank != 'busy' for rank in ranks)"), ZERO_STEPS
    ),
    "0 has not asked, and is no one": Mistake(
        edit(
            QUORUM,
            '"busy" not in ranks',
            "all(rank and rank != 'busy' for rank in ranks)",
            "elif name in before:",
            "elif name in before and 'busy' in ranks:",
        ),
        ZERO_STEPS,
    ),
    "waits for everybody": Mistake(edit(QUORUM, "elif name in before", "else"), FOR_NEWCOMERS),
    "waits for newcomers that have begun to ask": Mistake(
        edit(QUORUM, "elif name in before", "elif name in before or ranks != ['busy'] * len(ranks)"), FOR_NEWCOMERS
    ),
    "waits for nobody": Mistake(
        edit(QUORUM, "        elif name in before:\n            return None\n", ""),
        NOT_WAITED,
    ),
    "newcomers stay out": Mistake(
        edit(QUORUM, '        if "busy" not in ranks:\n', '        if "busy" not in ranks and name in before:\n'),
        "newcomers were left out: a replica that is not in `before` and has asked joins, or a run only ever shrinks",
    ),
    "least and no more": Mistake(edit(QUORUM, "len(there) < least", "len(there) <= least"), LEAST),
    "least forgotten": Mistake(edit(QUORUM, "len(there) < least", "not there"), LEAST),
    "counts ranks": Mistake(
        edit(
            QUORUM,
            "len(there) < least",
            "sum(isinstance(rank, int) for ranks in replicas.values() for rank in ranks) < least",
            "    step = max",
            "    if not there:\n        return None\n    step = max",
        ),
        "ranks were counted, and `least` counts replicas",
    ),
    "counts the old ones": Mistake(
        edit(QUORUM, "len(there) < least", "sum(name in before for name in there) < least"),
        "only those of `before` were counted: a newcomer that is there makes the number up to `least` as well",
    ),
    "nobody without an old one": Mistake(
        edit(QUORUM, "len(there) < least", "len(there) < least or not there.keys() & before"), WITHOUT_OLD
    ),
    "steps of the old ones": Mistake(
        edit(
            QUORUM,
            "max(there.values())",
            "max([there[name] for name in there if name in before], default=0)",
        ),
        WITHOUT_OLD,
    ),
    "in the order given": Mistake(edit(QUORUM, "sorted(replicas.items())", "replicas.items()"), ORDER),
    "old ones first": Mistake(
        edit(
            QUORUM,
            "    return list(there), step, sources\n",
            "    return sorted(there, key=lambda name: (name not in before, name)), step, sources\n",
        ),
        ORDER,
    ),
    "fewest steps": Mistake(
        edit(
            QUORUM,
            "max(there.values())",
            "min(there.values())",
            "there[name] < step",
            "there[name] > step",
        ),
        NOT_THE_NEWEST,
    ),
    "what most have": Mistake(
        edit(
            QUORUM,
            "max(there.values())",
            "max(there.values(), key=list(there.values()).count)",
            "there[name] < step",
            "there[name] != step",
        ),
        NOT_THE_NEWEST,
    ),
    "steps of the first": Mistake(edit(QUORUM, "max(there.values())", "next(iter(there.values()))"), NOT_THE_NEWEST),
    "all from the first": Mistake(edit(QUORUM, "newest[i % len(newest)]", "newest[0]"), IN_TURN),
    "all from the last": Mistake(edit(QUORUM, "newest[i % len(newest)]", "newest[-1]"), IN_TURN),
    "from the last on": Mistake(
        edit(QUORUM, "newest[i % len(newest)]", "newest[-1 - i % len(newest)]"),
        "the turns begin at the wrong end: the first that is behind takes from the first, by name, that is not",
    ),
    "one source each": Mistake(
        edit(
            QUORUM,
            "{name: newest[i % len(newest)] for i, name in enumerate(behind)}",
            "dict(zip(behind, newest))",
        ),
        "there are more newcomers than replicas to take from, and some got none: begin again with the first",
    ),
    "turns over all members": Mistake(
        edit(
            QUORUM,
            "{name: newest[i % len(newest)] for i, name in enumerate(behind)}",
            "{name: newest[i % len(newest)] for i, name in enumerate(there) if name in behind}",
        ),
        "the turns were counted over all members: only those that are behind take one",
    ),
    "only who is new": Mistake(
        edit(QUORUM, "if there[name] < step]", "if name not in before]"),
        "who takes the state is decided by its steps, not by `before`: a member that missed some is behind too, and at "
        "the start nobody is",
    ),
    "sources are steps": Mistake(
        edit(QUORUM, "{name: newest[i % len(newest)] for", "{name: step for"),
        "`sources` says for each member that is behind the *name* of the one that it takes from",
    ),
    "the other way round": Mistake(
        edit(QUORUM, "{name: newest[i % len(newest)] for", "{newest[i % len(newest)]: name for"),
        "`sources` is the wrong way round: its keys are those that take, its values those that give",
    ),
    "everybody is a source": Mistake(
        edit(QUORUM, "for i, name in enumerate(behind)}", "for i, name in enumerate(there)}"),
        "members that have all steps are in `sources` too: they need nothing",
    ),
    "steps of all ranks": Mistake(
        edit(QUORUM, "there[name] = ranks[0]", "there[name] = sum(ranks)"),
        "the steps of a replica's ranks were added up: all of them have seen the same, so one of them tells it",
    ),
    "a majority": Mistake(
        edit(QUORUM, "len(there) < least", "len(there) < max(least, len(before) // 2 + 1)"),
        "a majority was asked for: `least` alone says how many are enough, and here one decision counts anyway",
    ),
    "members alone": Mistake(
        edit(QUORUM, "return list(there), step, sources", "return list(there)"),
        "a decision is three things: members, step and sources",
    ),
    "the next step": Mistake(
        edit(QUORUM, "return list(there), step, sources", "return list(there), step + 1, sources"),
        "`step` is how many steps have been made, as the replicas say it, and not the number after it",
    ),
    "an empty quorum": Mistake(
        edit(
            QUORUM,
            "    if len(there) < least:\n        return None\n",
            "    if len(there) < least:\n        return [], 0, {}\n",
        ),
        "if it cannot be decided yet, return None: an empty list of members is a decision too",
    ),
    "a list is used up": Mistake(
        edit(QUORUM, "    there = {}\n", "    there = {}\n    before.sort(reverse=True)\n    before.pop()\n"),
        "`before` was changed, and the caller's list with it: leave the arguments as they are",
    ),
    "returns nothing": Mistake(
        edit(QUORUM, "    return list(there), step, sources\n", ""),
        "decide returns nothing where it could decide: `return` is missing, or those who are there were not found",
    ),
}

# ---------------------------------------------------------------------- 21.2

STAGE_BY_TREE = """\
import torch
from torch.utils._pytree import tree_map


def stage(state):
    def copied(value):
        return torch.empty_like(value).copy_(value) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        return tree_map(copied, state)
"""

STAGE_TO_CPU = """\
import torch


def stage(state):
    match state:
        case torch.Tensor():
            return state.detach().to("cpu", copy=True)
        case dict():
            return dict(zip(state, map(stage, state.values())))
        case list():
            return [*map(stage, state)]
        case tuple():
            return (*map(stage, state),)
    return state
"""

_CLONE = "state.detach().clone()"
ALIAS = (
    "what was staged is the same memory as the parameters: the next step writes into it, and the checkpoint gets a "
    "bit of each step. Copy: clone()"
)
NESTED = "what is inside dicts, lists or tuples was not copied: stage each part of them too"
TUPLES = "a list came out as a tuple, or a tuple as a list: type(state)(...) makes the kind that was there"
STAGE_MISTAKES = {
    "the state itself": Mistake("def stage(state):\n    return state\n", ALIAS),
    "a new dict": Mistake("def stage(state):\n    return dict(state) if isinstance(state, dict) else state\n", ALIAS),
    "copy.copy": Mistake("import copy\n\n\ndef stage(state):\n    return copy.copy(state)\n", ALIAS),
    "detach": Mistake(edit(STAGE, _CLONE, "state.detach()"), ALIAS),
    "to the CPU": Mistake(edit(STAGE, _CLONE, 'state.detach().to("cpu")'), ALIAS),
    "contiguous": Mistake(edit(STAGE, _CLONE, "state.detach().contiguous()"), ALIAS),
    "data": Mistake(edit(STAGE, _CLONE, "state.data"), ALIAS),
    "deepcopy": Mistake(
        "import copy\n\n\ndef stage(state):\n    return copy.deepcopy(state)\n",
        "this copies whatever it finds, as copy.deepcopy and torch.save do: a parameter stays a parameter, and a slice "
        "brings the whole storage that it lies in. Detach and clone each tensor",
    ),
    "deepcopy of each": Mistake(
        edit(STAGE, _CLONE, "copy.deepcopy(state.detach())", "import torch\n", "import copy\n\nimport torch\n"),
        "the whole storage that a slice lies in was copied, as copy.deepcopy does: clone() copies the slice",
    ),
    "in the graph": Mistake(
        edit(STAGE, _CLONE, "state.clone()"),
        "the copy belongs to the graph of the parameter, and keeps it alive: detach() as well",
    ),
    "lists left": Mistake(
        edit(STAGE, "    if isinstance(state, (list, tuple)):\n", "    if isinstance(state, tuple):\n"), NESTED
    ),
    "tuples left": Mistake(
        edit(STAGE, "    if isinstance(state, (list, tuple)):\n", "    if isinstance(state, list):\n"), NESTED
    ),
    "tensors of the first level": Mistake(
        "import torch\n\n\ndef stage(state):\n    if isinstance(state, torch.Tensor):\n"
        "        return state.detach().clone()\n    if isinstance(state, dict):\n"
        "        return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value\n"
        "                for key, value in state.items()}\n    return state\n",
        NESTED,
    ),
    "as float32": Mistake(
        edit(STAGE, _CLONE, "state.detach().clone().float()"),
        "the dtype has changed: a checkpoint keeps what the run had, whole numbers and all 64 bits",
    ),
    "as bfloat16": Mistake(
        edit(STAGE, _CLONE, "state.detach().clone().bfloat16()"),
        "the dtype has changed: a checkpoint keeps what the run had, whole numbers and all 64 bits",
    ),
    "flat": Mistake(
        edit(STAGE, _CLONE, "state.detach().flatten().clone()"), "the copy has lost the shape of the tensor"
    ),
    "in place": Mistake(
        edit(
            STAGE,
            "        return {key: stage(value) for key, value in state.items()}\n",
            "        for key, value in state.items():\n            state[key] = stage(value)\n        return state\n",
        ),
        "the copies were put into the caller's own dict, which training goes on to use: make a new one",
    ),
    "tuples become lists": Mistake(
        edit(STAGE, "type(state)([stage(value) for value in state])", "[stage(value) for value in state]"),
        TUPLES,
    ),
    "lists become tuples": Mistake(
        edit(STAGE, "type(state)([stage(value) for value in state])", "tuple(stage(value) for value in state)"),
        TUPLES,
    ),
    "floats only": Mistake(
        edit(STAGE, "isinstance(state, torch.Tensor)", "isinstance(state, torch.Tensor) and state.is_floating_point()"),
        "tensors of whole numbers were not copied: training changes a counter or a mask as it changes a parameter",
    ),
    "no scalars": Mistake(
        edit(STAGE, "isinstance(state, torch.Tensor)", "isinstance(state, torch.Tensor) and state.dim() > 0"),
        "a tensor without dimensions was not copied: AdamW's `step` is one, and it is added to in place",
    ),
    "by numpy": Mistake(
        edit(STAGE, _CLONE, "torch.from_numpy(state.detach().numpy().copy())"),
        "numpy has no bfloat16: copy with torch, state.detach().clone()",
    ),
    "parameters again": Mistake(
        edit(STAGE, _CLONE, "torch.nn.Parameter(state.detach().clone(), state.is_floating_point())"),
        "the copy is an nn.Parameter, which asks for gradients: a plain tensor is meant, state.detach().clone()",
    ),
    "refuses the rest": Mistake(
        edit(STAGE, "    return state\n", "    raise TypeError(type(state))\n"),
        "numbers, strings and None belong to a state too: return them as they are",
    ),
    "tensors only": Mistake(
        edit(STAGE, "        return state.detach().clone()\n", "        return state.detach().clone()\n").replace(
            "    return state\n", ""
        ),
        "what is no tensor, dict, list or tuple is missing: return it as it is",
    ),
}

RIGHT = {"21.1": [DECIDE_BY_SETS, DECIDE_STEP_BY_STEP], "21.2": [STAGE_BY_TREE, STAGE_TO_CPU]}
MISTAKES = {"21.1": QUORUM_MISTAKES, "21.2": STAGE_MISTAKES}
