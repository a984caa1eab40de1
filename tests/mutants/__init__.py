"""The catalogue of mistakes: what learners might write, and what the checks must say to it.

    python -m tests.mutants            # print what a learner would read for each mistake
    python -m tests.mutants 03.2       # for some exercises only

RIGHT: exercise -> right answers other than the reference. WRONG: exercise -> name of the mistake -> its source, and the
sentence that must name it. They stand in the lessons' rooms.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from zerolab.lab import lessons

_ROOMS = [import_module(f"zerolab.lab.lessons.{room.name}.mistakes") for room in iter_modules(lessons.__path__)]

RIGHT: dict[str, tuple[str, ...]] = {id: answers for room in _ROOMS for id, answers in room.RIGHT.items()}
WRONG: dict[str, dict[str, tuple[str, str]]] = {
    id: {name: (mistake.source, mistake.says) for name, mistake in found.items()}
    for room in _ROOMS
    for id, found in room.MISTAKES.items()
}
