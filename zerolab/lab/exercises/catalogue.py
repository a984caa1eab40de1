"""The exercises: what is asked, what is right, which mistakes are known, and how each is recognised.

`python -m zerolab.lab.exercises` tries every catalogued mistake on its check and prints what the learner would read.

A check is a function `check(answer, world)` that runs on every rank of a disposable pool. `answer` is the module made
of the learner's cell. It raises `Wrong` at the first difference; what it says comes from looking at results, at the
memory they hold and at the calls that were made, never at the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.spy import GaveUp, Spy, Traffic
from zerolab.lab.ranks.report import Plain

UNKNOWN = "a mistake that this check does not know; this is the smallest case that fails"


class NoSuchExercise(Plain, KeyError):
    """There is no exercise of that number."""

    def __str__(self) -> str:
        return str(self.args[0])


class Todo(Exception):
    """An exercise that is not written yet."""

    def __init__(self, exercise: str = "") -> None:
        which = f"exercise {exercise}" if exercise else "this exercise"
        check = f' and lab.check("{exercise}")' if exercise else ""
        super().__init__(f"{which} is not written yet: replace `raise Todo(...)` by your code, run the cell{check}")


class Wrong(Exception):
    """The first difference that a check found on this rank.

    seen: what, where and how much. likely: the mistake that does that, if one is known. tip: where to read on.
    """

    def __init__(self, seen: str, likely: str = "", tip: str = "", values_differ: bool = False) -> None:
        super().__init__(seen)
        self.seen, self.likely, self.tip, self.values_differ = seen, likely, tip, values_differ


@dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    stub, reference: cells as a learner sees and might write them. alternatives: other right answers.
    mutants: wrong answers, and a part of the sentence that must name each.
    exports: what the answer defines, the first of them is what `mine(id)` gives.
    extends: the class of zerolab whose methods the answer's class overrides ("DDP"), for `mine(DDP)`.
    section: the heading of the lesson to read again. first_rank_only: what to say if only rank 0 is right.
    """

    id: str
    title: str
    section: str
    check: Callable[[Any, World], None]
    stub: str
    reference: str
    alternatives: tuple[str, ...]
    mutants: dict[str, tuple[str, str]]  # name -> (source, part of the message)
    hints: tuple[str, ...]
    exports: tuple[str, ...]
    extends: str = ""
    first_rank_only: str = ""
    errors: dict[str, str] = field(default_factory=dict)  # part of a Python error -> the mistake behind it


@dataclass
class World:
    """What a check knows of the rank it runs on."""

    rank: int
    world_size: int
    spy: Spy
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """The calls of torch.distributed, and the exchanges, that the block makes."""
        with self.spy.record() as calls:
            yield calls

    def unwaited(self, calls: list[Traffic]) -> str:
        """Which asynchronous calls nobody waited for, in words; "" if none."""
        lost = [call.op for call in calls if not call.waited]
        if not lost:
            return ""
        return f"{lost[0]} was started {'once' if len(lost) == 1 else f'{len(lost)} times'} without waiting for it"


def check_tensor(what: str, got: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Raises Wrong unless `got` is a tensor of that shape and dtype."""
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is a {type(got).__name__}, not a tensor", forgot_to_return(got))
    if tuple(got.shape) != tuple(shape):
        raise Wrong(f"{what} has the shape {tuple(got.shape)}, not {tuple(shape)}", _shape_hint(got, shape))
    if got.dtype != dtype:
        raise Wrong(f"{what} is {got.dtype}, not {dtype}", f"the dtype of the input was not kept ({dtype})")


def forgot_to_return(got: Any) -> str:
    return "the function returns nothing: `return` is missing" if got is None else ""


def _shape_hint(got: Tensor, shape: tuple[int, ...]) -> str:
    count = 1
    for length in shape:
        count *= length
    return "the elements are there but not in the shape that was asked: use view(...)" if got.numel() == count else ""


def compare(
    what: str, got: Tensor, want: Tensor, explain: Callable[[Tensor], str | tuple[str, str]] = lambda got: ""
) -> None:
    """Raises Wrong unless the values are equal (to the last bit but two); `explain(got)` names the mistake."""
    if torch.allclose(got.double(), want.double(), rtol=1e-6, atol=0.0):
        return
    different = (got.double() - want.double()).abs() > 1e-6 * want.double().abs()
    count, k = int(different.sum()), values.factor(got, want)
    how_many = f"all {got.numel():,} elements" if different.all() else f"{count:,} of {got.numel():,} elements"
    if k is not None and different.all():
        seen = f"{what}: {k:.3f} x the expected value in {how_many}"
    else:
        at = tuple(torch.nonzero(different)[0].tolist())
        place = at[0] if len(at) == 1 else at
        seen = f"{what}: {how_many} wrong, the first at [{place}]: {got[at]:g}, expected {want[at]:g}"
        seen = seen.replace("[(", "[").replace(")]", "]")
    said = explain(got)
    likely, tip = said if isinstance(said, tuple) else (said, "")
    raise Wrong(seen, likely, tip, values_differ=True)


def edit(source: str, *changes: str) -> str:
    """`source` with the first text of `changes` replaced by the second, the third by the fourth, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if old not in source:
            raise ValueError(f"{old!r} is not in the source that is to be changed")
        source = source.replace(old, new)
    return source


def catalogue() -> dict[str, Exercise]:
    """All exercises, in the order of the course."""
    from zerolab.lab.exercises.checks import (
        lesson01,
        lesson02,
        lesson03,
        lesson04,
        lesson05,
        lesson06,
        lesson07,
        lesson16,
    )

    lessons = (lesson01, lesson02, lesson03, lesson04, lesson05, lesson06, lesson07, lesson16)
    return {exercise.id: exercise for lesson in lessons for exercise in lesson.EXERCISES}


def exercise(id: str) -> Exercise:
    """The exercise of that number. Raises KeyError, naming those there are."""
    known = catalogue()
    if id not in known:
        raise NoSuchExercise(f"there is no exercise {id!r}; there are {', '.join(known)}")
    return known[id]


__all__ = [
    "UNKNOWN",
    "Exercise",
    "GaveUp",
    "Spy",
    "Todo",
    "Traffic",
    "World",
    "Wrong",
    "catalogue",
    "check_tensor",
    "compare",
    "edit",
    "exercise",
    "forgot_to_return",
]
