"""The list of all exercises."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from zerolab.lab import lessons
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.ranks.report import Plain

LESSONS: dict[str, str] = {
    "00": "Welcome",
    "01": "Collectives",
    "02": "Where the memory goes",
    "03": "Data parallel",
    "04": "ZeRO-1: shard the optimizer",
    "05": "ZeRO-2: shard the gradients",
    "06": "ZeRO-3, forward: parameters that come and go",
    "07": "ZeRO-3, backward: gather again, reduce, release",
    "08": "Mixed precision",
    "09": "Overlap and prefetch",
    "10": "Beyond model states",
    "11": "Checkpoints that survive",
    "12": "What ZeRO is not, and what it learned since",
    "13": "Case: images",
    "14": "Case: text",
    "15": "Model parallelism",
    "16": "Plan a trillion parameters",
    "17": "The clinic",
    "18": "Over to production",
    "19": "Claims on trial, and the interview",
    "20": "FSDP in forty lines",
    "21": "Nothing stops",
    "22": "Experts",
    "23": "8-bit Adam, sharded",
    "24": "A slow link",
    "25": "Long contexts",
}  # as their headings


def _exercises() -> dict[str, Exercise]:
    """By number, in the order of the course: those of all rooms."""
    rooms = sorted(room.name for room in iter_modules(lessons.__path__, f"{lessons.__name__}."))
    return {exercise.id: exercise for room in rooms for exercise in import_module(room).EXERCISES}


EXERCISES: dict[str, Exercise] = _exercises()


class NoSuchExercise(Plain, KeyError):
    """There is no exercise with that number."""

    def __str__(self) -> str:
        return str(self.args[0])


def find_exercise(id: str) -> Exercise:
    """The exercise with that number. Raises KeyError, which lists the numbers there are."""
    if id not in EXERCISES:
        raise NoSuchExercise(f"there is no exercise {id!r}; there are {', '.join(EXERCISES)}")
    return EXERCISES[id]
