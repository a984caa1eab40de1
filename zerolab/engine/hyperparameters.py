"""Hyperparameters: each rank must step with the same, or the slices of one parameter train apart.

They are compared without a message of their own. What ranks exchange when a backward ends says what they have, and a
step with that asks nobody. A step with anything else (the first; a rate that was set after backward) asks all ranks.
The numbers with which a script has computed on slices since backward, to clip or to scale, count as one of them. A
backward foresees that they will be as they were for the last step.
"""

from __future__ import annotations

import json
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from zerolab.comm.collectives import Comm

PLAIN = (bool, int, float, str, type(None))
NOT_VALUES = ("params", "param_names")  # entries of a parameter group that are no hyperparameters
DIGEST = 4  # bytes

Described = list[dict[str, Any]]  # for each parameter group


class Hyperparameters:
    """Those of every optimizer that has stepped on an engine's parameters."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._stepped: list[weakref.ref[Optimizer]] = []  # in the order of their first steps, as on every rank
        self._agreed: weakref.WeakKeyDictionary[Optimizer, Described] = weakref.WeakKeyDictionary()
        self._offered: weakref.WeakKeyDictionary[Optimizer, Described] = weakref.WeakKeyDictionary()
        self._done: list[str] = []  # since the last backward: calls, and the numbers they got
        self._usually: list[str] = []  # for the last step

    def note(self, call: str, numbers: list[float]) -> None:
        """Slices, one or all of them, are computed with `numbers`, whether or not the result is written back."""
        words = f"{call} {', '.join(map(str, numbers))}"
        if self._done[-1:] != [words]:
            self._done.append(words)

    def offer(self) -> bytes:
        """What this rank has now, in `DIGEST` bytes."""
        everything, self._done = [], []
        for number, reference in enumerate(self._stepped):
            if (optimizer := reference()) is not None:
                self._offered[optimizer] = _of(optimizer, self._usually)
                everything.append((number, self._offered[optimizer]))
        return _digest(everything)

    def settle(self, offers: list[bytes]) -> None:
        """Every rank's offer is here: if they are equal, they are agreed on."""
        self._agreed.clear()
        if len(set(offers)) == 1:
            self._agreed.update(self._offered)

    def check(self, optimizer: Optimizer) -> None:
        """`optimizer` is about to step. Raises `RuntimeError` on every rank if they differ."""
        self._usually = list(self._done)
        mine = _of(optimizer, self._done)
        if self._agreed.get(optimizer) == mine:
            return
        what = "comparison of hyperparameters"
        if any(reference() is optimizer for reference in self._stepped):
            what += " that changed after backward"  # on a rank that is here alone
        else:
            self._stepped.append(weakref.ref(optimizer))
        if len(set(self._comm.exchange_bytes(_digest(mine), what))) > 1:
            everyone = self._comm.exchange(mine, what)
            rank = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
            one, other = first_difference(everyone[rank], everyone[0])
            theirs, first = _words(one, other), _words(other, one)
            raise RuntimeError(
                f"{type(optimizer).__name__} would step with {theirs} on rank {rank} and {first} on rank 0: give every "
                "rank the same, or their parameters train differently. (A schedule that follows the loss must follow "
                "the mean of all ranks' losses.)"
            )
        self._agreed[optimizer] = mine


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_VALUES}


def described(values: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, to compare: numbers and words, and of anything else what it is."""
    return {key: _plain(value) for key, value in sorted(values.items())}


def first_difference(one: list[Any], other: list[Any]) -> tuple[Any, Any]:
    """Of two descriptions of parameter groups: the first that differs, or that their numbers do."""
    if len(one) != len(other):
        return f"{len(one)} of them", f"{len(other)}"
    return next((a, b) for a, b in zip(one, other, strict=True) if a != b)


def _of(optimizer: Optimizer, done: list[str]) -> Described:
    """What its class knows as hyperparameters. A script may keep other things in a group, of one rank alone."""
    known, edits = optimizer.defaults, described({"slices computed with": done})
    groups = [{key: value for key, value in group.items() if key in known} for group in optimizer.param_groups]
    return [*(described(group) for group in groups), edits]


def _words(one: Any, other: Any) -> str:
    """What `one`, the description of a group, has other than `other`."""
    if isinstance(one, str):
        return one
    return ", ".join(f"{key}={value}" for key, value in one.items() if value != other.get(key))


def _digest(values: Any) -> bytes:
    return zlib.crc32(json.dumps(values).encode()).to_bytes(DIGEST)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_cuda:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) or type(value) in PLAIN else type(value).__name__
