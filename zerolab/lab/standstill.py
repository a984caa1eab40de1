"""Will another process ever come on? Told by what it does, not by the clock.

    still = Standstill([pid], seconds=3.0)
    while not there():
        if still.lasts():
            raise ...                      # it has slept for 3 seconds, while this process was there to see it

A process comes on if its threads, or its children's, compute or wait for a core. One that waits for something else
does neither, so whoever waits for such a process alone waits in vain. On a machine that is busy, a process that could
compute waits for a core; on one that was stopped, nobody looked, and the seconds do not count. Outside Linux, where
the system does not show who waits for a core, only what was computed counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from zerolab.world.processes import Patience

EVERY = 0.5  # seconds between two looks
MOVES = 0.4 * EVERY  # more than a process needs that only asks now and then whether it may go on


class Standstill:
    """Asked again and again whether processes stand still. pids: which, perhaps others each time."""

    def __init__(self, pids: Callable[[], Iterable[int]], seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self._patience, self._pause = Patience(seconds, longest=EVERY), Patience(EVERY)
        self._before = self._moved()

    def lasts(self) -> bool:
        """Whether none of the processes has come on for as many seconds as this one was there to see it."""
        left = self._patience.turn()
        if self._pause.turn() > 0:
            return False
        self._pause, before, self._before = Patience(EVERY), self._before, self._moved()
        if self._before.keys() != before.keys() or any(self._before[pid] - before[pid] > MOVES for pid in before):
            left, self._patience = self._seconds, Patience(self._seconds, longest=EVERY)
        return left <= 0

    def _moved(self) -> dict[int, float]:
        """For each process: seconds that it and its children have computed, or waited for a core, in their lives."""
        return {pid: sum(_seconds(pid)) for pid in self._pids()}


def _seconds(pid: int) -> Iterator[float]:
    """Of each thread of a process and of its children."""
    if not Path("/proc/self/schedstat").exists():
        yield from _computed(pid)
        return
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                computed, waited, _ = (task / "schedstat").read_text().split()
                yield (int(computed) + int(waited)) / 1e9
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from _seconds(int(child))


def _computed(pid: int) -> Iterator[float]:
    """The same where there is no such file."""
    import psutil

    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                yield sum(process.cpu_times()[:2])
