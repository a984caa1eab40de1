"""What an exercise is, and what is known of the rank on which an answer to it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zerolab.lab.exercises.spy import END, Spy, Traffic


class Todo(Exception):
    """An exercise that is not written yet."""

    def __init__(self, exercise: str = "") -> None:
        which = f"exercise {exercise}" if exercise else "this exercise"
        check = f' and lab.check("{exercise}")' if exercise else ""
        super().__init__(f"{which} is not written yet: replace `raise Todo(...)` with your code, run the cell{check}")


class Wrong(Exception):
    """The first difference that was found on this rank.

    seen: what, where and by how much. likely: the mistake behind it, if it is a known one. tip: where to read on.
    """

    def __init__(self, seen: str, likely: str = "", tip: str = "") -> None:
        super().__init__(seen)
        self.seen, self.likely, self.tip = seen, likely, tip


DIFFICULTIES = ("one idea", "several steps", "parts that depend on each other")


@dataclass(frozen=True)
class Exercise:
    """One exercise of the course.

    battery: the scenes in which an answer is compared with the reference.
    stub, reference: the cell as the learner finds it, and the course's own answer.
    exports: the names that the answer defines; `mine(id)` returns the first.
    extends: the class of zerolab whose methods the answer overrides ("DDP"), for `mine(DDP)`.
    difficulty: 1 to 3, as in DIFFICULTIES.
    section: the heading of the lesson to read again.
    """

    id: str
    title: str
    section: str
    stub: str
    reference: str
    hints: tuple[str, ...]
    exports: tuple[str, ...]
    difficulty: int
    battery: tuple[Any, ...]  # of Scenes
    extends: str = ""
    errors: dict[str, str] = field(default_factory=dict)  # part of a Python error -> the mistake behind it

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks on which there is something to see."""
        return sorted({size for scene in self.battery for size in scene.sizes})

    @property
    def about(self) -> str:
        """What a learner is told above the cell, as Markdown."""
        given = {line.strip() for line in self.stub.splitlines()}
        own = sum(line.strip() not in given for line in self.reference.splitlines() if line.strip())
        marks = "●" * self.difficulty + "○" * (len(DIFFICULTIES) - self.difficulty)
        lines = f"{own} line{'s' * (own > 1)} in the course's answer"
        hints = f'{len(self.hints)} hints: `lab.hint("{self.id}")`'
        return f"**Exercise {self.id}** · {marks} {DIFFICULTIES[self.difficulty - 1]} · {lines} · {hints}"


def returns_none(calls: list[Traffic], error: str = "") -> str:
    """The mistake of using what a collective returns."""
    name = calls[-1].in_words if calls[-1].said else f"dist.{calls[-1].op}"
    if "'wait'" in error or "get_future" in error:
        return (
            f"without async_op=True {name}() is over when it returns: it returns None, and nothing is left to wait for"
        )
    return f"{name}() returns None: it leaves the result in the tensor that you give it"


@dataclass
class World:
    """The rank on which an answer is tried."""

    rank: int
    world_size: int
    spy: Spy
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """The calls to torch.distributed, and the exchanges, that the block makes."""
        with self.spy.record() as calls:
            yield calls

    def all_returned(self, name: str) -> None:
        """Wait until the answer's `name` has returned on every rank.

        A rank that makes one collective more would otherwise meet one of the next situation, and get its values.
        """
        self.spy.agree(f"{END} {name}()")

    def everyone(self, value: Any) -> list[Any]:
        """`value`, which must be JSON, of every rank."""
        return self.spy.everyone(value, range(self.world_size))

    def came_on(self) -> None:
        """This rank is right so far. If it waits for one that is not, then that one's mistake is what is told."""
        self.spy.blocks += 1

    def note(self, sentence: str) -> None:
        """What a right answer should know: it is shown when it passes."""
        if sentence not in self.notes:
            self.notes.append(sentence)
