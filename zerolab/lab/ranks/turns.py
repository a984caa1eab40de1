"""In a classroom, notebooks take turns to start their ranks: if twenty start four each at once, all of them time out.

A turn is a lock on a file, which the system frees when the process dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerolab.world.processes import Patience

FOLDER = "ZEROLAB_TURNS"  # in a lab's environment: where the files are
PATIENCE = 2.0  # seconds of waiting before we say why
LONGEST_WAIT = 600.0


def make(folder: Path, turns: int) -> None:
    """Make the files for this many turns at once."""
    folder.mkdir()
    for number in range(turns):
        (folder / str(number)).touch(0o600)


@contextmanager
def turn(timeout: float = LONGEST_WAIT, tell: Callable[[str], None] = print) -> Iterator[None]:
    """Wait for a turn and hold it. After `timeout` go on without one; so do notebooks outside a classroom, at once."""
    names = sorted(Path(os.environ.get(FOLDER) or "/nowhere").glob("*"))
    files = [os.open(name, os.O_RDWR | os.O_CLOEXEC) for name in names]
    try:
        patience, told = Patience(timeout), False
        while files and patience.turn() > 0 and not any(map(_lock, files)):
            if not told and timeout - patience.left > PATIENCE:
                tell("other notebooks are starting their ranks; yours are next in line")
                told = True
            time.sleep(0.1)
        yield
    finally:
        for file in files:
            os.close(file)


def _lock(file: int) -> bool:
    import fcntl  # only where classrooms run: Windows has none

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
