"""The catalogue of mistakes: what learners might write, and what the checks must say to it.

    python -m tests.mutants            # print what a learner would read for each mistake
    python -m tests.mutants 03.2       # for some exercises only

RIGHT: exercise -> right answers other than the reference. WRONG: exercise -> name of the mistake -> its source, and a
part of the message that must name it.
"""

from __future__ import annotations

from importlib import import_module

from zerolab.lab.exercises.catalogue import EXERCISES

_LESSONS = [import_module(f"{__name__}.lesson{number}") for number in sorted({id[:2] for id in EXERCISES})]

RIGHT: dict[str, tuple[str, ...]] = {id: answers for lesson in _LESSONS for id, answers in lesson.RIGHT.items()}
WRONG: dict[str, dict[str, tuple[str, str]]] = {id: found for lesson in _LESSONS for id, found in lesson.WRONG.items()}
