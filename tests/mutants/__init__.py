"""The catalogue of mistakes: what learners might write, and what the checks must say to it.

    python -m tests.mutants            # print what a learner would read for each mistake
    python -m tests.mutants 03.2       # for some exercises only

RIGHT: exercise -> right answers other than the reference. WRONG: exercise -> name of the mistake -> its source, and a
part of the message that must name it. The lessons that have a room have theirs there.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from zerolab.lab.exercises import lessons

_ROOMS = [
    import_module(f"zerolab.lab.exercises.lessons.{room.name}.mistakes") for room in iter_modules(lessons.__path__)
]
_LESSONS = [
    import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__) if file.name.startswith("lesson")
]

RIGHT: dict[str, tuple[str, ...]] = {
    id: answers for lesson in (*_ROOMS, *_LESSONS) for id, answers in lesson.RIGHT.items()
}
WRONG: dict[str, dict[str, tuple[str, str]]] = {
    id: {name: (mistake.source, mistake.says) for name, mistake in found.items()}
    for room in _ROOMS
    for id, found in room.MISTAKES.items()
} | {id: found for lesson in _LESSONS for id, found in lesson.WRONG.items()}
