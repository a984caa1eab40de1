"""The list of all exercises."""

from __future__ import annotations

from zerolab.lab.exercises.checks import (
    lesson03,
    lesson04,
    lesson05,
    lesson06,
    lesson07,
    lesson08,
    lesson09,
    lesson10,
    lesson11,
    lesson12,
    lesson13,
    lesson14,
    lesson15,
    lesson16,
    lesson17,
    lesson18,
    lesson19,
)
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.lessons import lesson01, lesson02
from zerolab.lab.ranks.report import Plain

_LESSONS = (
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson05,
    lesson06,
    lesson07,
    lesson08,
    lesson09,
    lesson10,
    lesson11,
    lesson12,
    lesson13,
    lesson14,
    lesson15,
    lesson16,
    lesson17,
    lesson18,
    lesson19,
)

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
    "15": "Model parallelism in one hour",
    "16": "Plan a trillion parameters",
    "17": "The clinic",
    "18": "Over to production",
    "19": "Claims on trial, and the interview",
}  # as their headings

# By number, in the order of the course.
EXERCISES: dict[str, Exercise] = {exercise.id: exercise for lesson in _LESSONS for exercise in lesson.EXERCISES}


class NoSuchExercise(Plain, KeyError):
    """There is no exercise with that number."""

    def __str__(self) -> str:
        return str(self.args[0])


def find_exercise(id: str) -> Exercise:
    """The exercise with that number. Raises KeyError, which lists the numbers there are."""
    if id not in EXERCISES:
        raise NoSuchExercise(f"there is no exercise {id!r}; there are {', '.join(EXERCISES)}")
    return EXERCISES[id]
