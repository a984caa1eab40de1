"""A save that is killed before each of its operations on files in turn, and what can be loaded after each death."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerolab.lab.lessons.lesson11 import crash


def deaths(save: Callable[..., Any], folder: Path, parts: Sequence[bytes]) -> Iterator[tuple[int, str, int]]:
    """As many ranks as there are parts save step 60; then they save step 70, and one dies before an operation.

    save: exercise 11.2. Yields, for each rank and each of its operations, the rank, the operation and the step that
    loads; raises an error if none is complete. What removes a file that is no longer there is not counted.
    """

    def saves(step: int) -> Callable[[int, Callable[[], None]], None]:
        return lambda rank, barrier: save(folder, step, parts[rank], rank, len(parts), barrier)

    for rank in range(len(parts)):
        for number in range(100):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            crash.play(saves(60), folder, ranks=len(parts))
            run = crash.play(saves(70), folder, ranks=len(parts), death=crash.Death(rank, number))
            if run.ended.get(rank) != "killed":
                break  # it got through: there is no operation of this number
            *before, last = run.of(rank)
            step, files = crash.load(folder)
            assert files == list(parts)
            if last.what != "remove" or last.path not in [done.path for done in before if done.what == "rename"]:
                yield rank, str(last), step
