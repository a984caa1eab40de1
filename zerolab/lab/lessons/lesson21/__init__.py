"""Lesson 21: who goes on after a death, and what a checkpoint in the background may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

# ---------------------------------------------------------------------- 21.1

DEAD, BUSY = "dead", "busy"
State = dict[str, list[Any]]
Case = tuple[list[str], State, int]

ALL_THERE: tuple[Case, ...] = (
    (["A", "B"], {"A": [3, 3], "B": [3, 3]}, 1),
    (["A", "B", "C"], {"A": [0, 0], "B": [0, 0], "C": [0, 0]}, 1),
    (["A"], {"A": [7]}, 1),
    (["A", "B", "C"], {"C": [5, 5], "A": [5, 5], "B": [5, 5]}, 2),  # in another order
)
AFTER_A_DEATH: tuple[Case, ...] = (
    (["A", "B", "C"], {"A": [4, 4], "B": [4, DEAD], "C": [4, 4]}, 1),  # half a replica
    (["A", "B", "C"], {"A": [4, 4], "B": [DEAD, DEAD], "C": [4, 4]}, 1),
    (["A", "B", "C"], {"A": [4, 4], "B": [DEAD, BUSY], "C": [4, 4]}, 1),  # its rest will not come
    (["A", "B", "C", "D"], {"A": [DEAD], "B": [9], "C": [DEAD], "D": [9]}, 2),
    (["A", "C"], {"A": [4, 4], "B": [DEAD, DEAD], "C": [4, 4]}, 1),  # dead since before
)
STILL_BUSY: tuple[Case, ...] = (
    (["A", "B"], {"A": [4, 4], "B": [BUSY, BUSY]}, 1),
    (["A", "B", "C"], {"A": [4, 4], "B": [4, BUSY], "C": [4, 4]}, 1),
    (["A", "B", "C"], {"A": [4, 4], "B": [DEAD, 4], "C": [BUSY, 4]}, 1),
)
NEWCOMERS: tuple[Case, ...] = (
    (["A", "C"], {"A": [9, 9], "B": [0, 0], "C": [9, 9]}, 1),
    (["B", "C"], {"A": [0, 0], "B": [9, 9], "C": [9, 9]}, 1),  # the newcomer is the first by name
    (["A", "C"], {"A": [9, 9], "B": [0, BUSY], "C": [9, 9]}, 1),  # not yet there: not waited for
    (["A", "C"], {"A": [9, 9], "B": [BUSY, BUSY], "C": [9, 9]}, 1),
    (["B", "D"], {"A": [0], "B": [6], "C": [0], "D": [6], "E": [0]}, 1),  # three newcomers, two sources
    (["C"], {"A": [0], "B": [0], "C": [12], "D": [0]}, 1),
    (["A", "B", "C"], {"A": [8, 8], "B": [5, 5], "C": [8, 8]}, 1),  # one that missed three steps
    (["A", "B", "C"], {"A": [2], "B": [10], "C": [2]}, 1),  # most are behind
    (["A", "C"], {"A": [9, DEAD], "B": [0, 0], "C": [9, 9]}, 1),  # a death and a newcomer at once
)
TOO_FEW: tuple[Case, ...] = (
    (["A", "B", "C"], {"A": [4], "B": [DEAD], "C": [DEAD]}, 2),
    (["A", "B", "C"], {"A": [4, 4], "B": [DEAD, 4], "C": [4, DEAD]}, 2),
    (["A"], {"A": [DEAD], "B": [BUSY]}, 1),
    (["A"], {"A": [4], "B": [0]}, 2),  # just enough, with the newcomer
    (["A", "B"], {"A": [DEAD, DEAD], "B": [DEAD, 3]}, 1),  # nobody
)
NONE_LEFT: tuple[Case, ...] = (  # of `before`: those that come back go on by themselves
    (["A"], {"A": [DEAD], "B": [5], "C": [7]}, 1),
    (["A", "B"], {"A": [DEAD, 6], "B": [DEAD, DEAD], "C": [6, 6], "D": [6, BUSY]}, 1),
)


def decides(cases: tuple[Case, ...]) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        for before, replicas, least in cases:
            given = [*before], {name: [*ranks] for name, ranks in replicas.items()}
            play.keep("`before`", given[0])
            play.keep("`replicas`", given[1])
            said = f"decide({before}, {replicas}, {least})"
            with play.event(said, uses=()):  # None is an answer here, so it is not told that `return` is missing
                found = play.code.decide(*given, least)
            play.see(said, plain(found))

    return act


def plain(found: Any) -> Any:
    """A decision in one form: what kind of sequence it is in, and the order of sources, are free."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        return found
    members, step, sources = found
    return (
        list(members) if isinstance(members, tuple) else members,
        step,
        dict(sorted(sources.items())) if isinstance(sources, dict) else sources,
    )


QUORUM_BATTERY = (
    Scene(
        "", decides(ALL_THERE), "a replica is there if all of its ranks have asked; sort the members by name", (1, 2)
    ),
    Scene(
        "after a death",
        decides(AFTER_A_DEATH),
        "a replica with a dead rank is not there, and is not waited for: the rest of it cannot train",
        (1, 2),
    ),
    Scene(
        "with a rank that is still busy",
        decides(STILL_BUSY),
        "a replica of `before` that is busy, with no dead rank, will ask soon: None until then",
        (1, 2),
    ),
    Scene(
        "with newcomers",
        decides(NEWCOMERS),
        "a replica that is not in `before` joins if it has asked, and nobody waits for it if it has not; those with "
        "fewer steps take from those with the most, in turn",
        (1, 2),
    ),
    Scene("with too few", decides(TOO_FEW), "None if fewer than `least` replicas are there, or nobody is", (1, 2)),
    Scene(
        "with none of `before` left",
        decides(NONE_LEFT),
        "`before` says who is waited for, and nothing else: those that are there go on, from the most steps among them",
        (1, 2),
    ),
)

QUORUM_STUB = '''\
from zerolab.lab.exercises import Todo


def decide(before: list[str], replicas: dict[str, list], least: int) -> tuple | None:
    """Who makes the next step: (members, step, sources), or None: not yet, look again.

    before: the members of the last quorum. replicas: name -> one entry for each of its
    ranks: an int if it has asked to go on, how many steps its parameters have seen, the
    same for all of a replica; "busy" if it lives and has not asked yet; "dead".

    A replica is there if all its ranks have asked. One of `before` that is not there, but
    has no dead rank, is waited for: None. Nobody else is. None, too, if fewer than `least`
    are there; `least` is 1 or more.

    members: those that are there, sorted by name. step: the most steps that one of them
    has seen. sources: for each member with fewer steps, the name of one with `step`, from
    which it takes the state. In the order of their names, the first that is behind takes
    from the first that is not, the second from the second, and so on, in turn.
    """
    raise Todo("21.1")
'''

QUORUM = """\
def decide(before: list[str], replicas: dict[str, list], least: int) -> tuple | None:
    there = {}
    for name, ranks in sorted(replicas.items()):
        if "dead" in ranks:
            continue
        if "busy" not in ranks:
            there[name] = ranks[0]
        elif name in before:
            return None
    if len(there) < least:
        return None
    step = max(there.values())
    newest = [name for name in there if there[name] == step]
    behind = [name for name in there if there[name] < step]
    sources = {name: newest[i % len(newest)] for i, name in enumerate(behind)}
    return list(there), step, sources
"""

# ---------------------------------------------------------------------- 21.2


def staged(play: Play, state: Any, change: Callable[[], None], name: str = "stage(state)") -> None:
    """A copy, and then training goes on: what was staged must not change with it."""
    play.keep("`state`", state)
    got = play.call(name, play.code.stage, state, uses=())
    play.at_most("bytes that the copy holds", bytes_in(got))
    play.keep("what was staged", got)
    with torch.no_grad(), play.event("the optimizer's next step"):
        change()
    play.see("the kind of each part", kinds(got))
    play.see("whether the copy is a graph's", [tensor.grad_fn is not None for tensor in tensors_in(got)])


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def kinds(value: Any, path: str = "stage(state)") -> dict[str, str]:
    """Where dicts, lists and tuples are, in one that is nested: a tuple that became a list loads as another state."""
    if not isinstance(value, dict | list | tuple):
        return {}
    kind = next(kind.__name__ for kind in (dict, list, tuple) if isinstance(value, kind))
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    inside = [kinds(part, f"{path}[{key!r}]") for key, part in parts]
    return {path: kind} | {place: found for each in inside for place, found in each.items()}


def bytes_in(value: Any) -> float:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(value)}
    return float(sum(storages.values()))


def times(factor: float, *tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def flat_dict(play: Play) -> None:
    weight, bias = play.base(3, 4), play.base(4)
    staged(play, {"weight": weight, "bias": bias, "step": 7}, lambda: times(2, weight, bias))


def optimizers(play: Play) -> None:
    """What Adam's state_dict() looks like: dicts in dicts, lists, numbers that are no tensors."""
    averages = {i: {"step": torch.tensor(3.0), "exp_avg": play.base(5), "exp_avg_sq": play.base(5)} for i in range(2)}
    groups: list[dict[str, Any]] = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1], "foreach": None}]
    state = {"state": averages, "param_groups": groups}

    def change() -> None:
        for of_one in averages.values():
            for tensor in of_one.values():
                tensor.add_(1)
        groups[0]["lr"] = 5e-4
        groups[0]["params"].append(2)

    staged(play, state, change)


def parameters(play: Play) -> None:
    params = [nn.Parameter(play.base(2, 3)), nn.Parameter(play.base(6))]
    staged(play, {"parameters": params}, lambda: times(3, *params))


def slices(play: Play) -> None:
    """Parameters that are slices of one long storage, as an engine keeps them."""
    flat = play.base(4096)
    parts = flat[8:20], flat[100:101], flat[:0]
    staged(play, {"slices": parts}, lambda: times(2, flat))


def dtypes(play: Play) -> None:
    tensors = [
        play.base(3).to(torch.bfloat16),
        play.base(3).long(),
        torch.tensor([True, False, True]).to(torch.uint8),
        play.base(4, 6).t(),
        play.base(3).double() * (1 + 2.0**-40),
    ]
    staged(play, tensors, lambda: times(0, *tensors))


def one_tensor(play: Play) -> None:
    tensor = play.base(5)
    staged(play, tensor, lambda: times(2, tensor))


STAGE_BATTERY = (
    Scene("", flat_dict, "clone each tensor: the optimizer writes into the old ones", (1, 2)),
    Scene("with an optimizer's state", optimizers, "go into every dict, list and tuple, and make each anew", (1, 2)),
    Scene("with parameters", parameters, "the copy belongs to no graph: detach() first", (1, 2)),
    Scene("with slices of a long storage", slices, "copy the slice, and not the storage that it lies in", (1, 2)),
    Scene("with other dtypes", dtypes, "the copy has the dtype and the shape of the tensor", (1,)),
    Scene("with a tensor alone", one_tensor, "`state` itself may be a tensor", (1,)),
)

STAGE_STUB = '''\
import torch
from zerolab.lab.exercises import Todo


def stage(state):
    """A copy of `state` that no later step of training changes.

    state: a tensor, a number, a string, None, or a dict, list or tuple of such, nested. Of
    a tensor: the same values, dtype and shape, detached, in memory of its own, no more
    than it needs. Dicts, lists and tuples become new dicts, lists and tuples; all else
    stays as it is.
    """
    raise Todo("21.2")
'''

STAGE = """\
import torch


def stage(state):
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: stage(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)([stage(value) for value in state])
    return state
"""

EXERCISES = [
    Exercise(
        id="21.1",
        title="who goes on",
        difficulty=2,
        section="Write: who goes on",
        battery=QUORUM_BATTERY,
        stub=QUORUM_STUB,
        reference=QUORUM,
        hints=(
            "Go through the replicas by name, and ask three things of each, in this order. Does it have a dead rank? "
            "Then it is out. Have all its ranks asked? Then it is there. Is it in `before`? Then return None.",
            "Collect `there`, name -> steps (of its first rank: all ranks of a replica have seen the same). step is "
            "the largest of there.values(); split the names into those that have it, `newest`, and those `behind`.",
            "sources = {name: newest[i % len(newest)] for i, name in enumerate(behind)}",
        ),
        exports=("decide",),
    ),
    Exercise(
        id="21.2",
        title="what a checkpoint in the background reads",
        difficulty=1,
        section="Write: stage, then write",
        battery=STAGE_BATTERY,
        stub=STAGE_STUB,
        reference=STAGE,
        hints=(
            "The function calls itself for what is in a dict, a list or a tuple. What is none of these, and no tensor, "
            "it returns as it is.",
            "A tensor: detach() alone is the same memory, clone() alone belongs to the graph. copy.deepcopy copies the "
            "storage of which a slice is a part.",
            "A dict: {key: stage(value) for key, value in state.items()}. A list or a tuple: type(state)([...]).",
        ),
        exports=("stage",),
    ),
]
