"""The catalogue of mistakes: what learners might write, and what the checks must say to it.

    python -m tests.mutants            # print what a learner would read for each mistake
    python -m tests.mutants 03.2       # for some exercises only

RIGHT: exercise -> right answers other than the reference. WRONG: exercise -> name of the mistake -> its source, and a
part of the message that must name it. FORMER: exercise -> a right answer in the engine's former names.
"""

from __future__ import annotations

from . import (
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
    lesson16,
)
from .former import FORMER as FORMER

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
    lesson16,
)

RIGHT: dict[str, tuple[str, ...]] = {id: answers for lesson in _LESSONS for id, answers in lesson.RIGHT.items()}
WRONG: dict[str, dict[str, tuple[str, str]]] = {id: found for lesson in _LESSONS for id, found in lesson.WRONG.items()}
