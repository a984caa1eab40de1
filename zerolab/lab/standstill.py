"""Will another process ever come on? Told by what it does, not by the clock.

    still = Standstill([pid], seconds=3.0)
    while not there():
        if still.lasts():
            raise ...                      # it has slept for 3 seconds, while this process was there to see it

A process comes on if its threads, or its children's, compute. One that waits for something else does not, so whoever
waits for such a process alone waits in vain. On a busy machine who computes waits for a core most of the time: that
counts as well, up to a multiple of what was computed, for who only asks now and then whether it may go on has to wait
for a core too. But who asks sleeps between two questions: a thread that wants a core and has not slept since the last
look comes on, however little it got. On a machine that was stopped nobody looked, and the seconds do not count. Outside
Linux, where the system does not show who waits for a core, only what was computed counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zerolab.world.processes import Patience

EVERY = 0.5  # seconds between two looks
LONG = 4 * EVERY  # between two looks of a machine that was stopped, perhaps: nobody had all that time for computing
MOVES = 0.4  # of the time between two looks: more than a process needs that only asks now and then
STATE, SLEPT = "State", "voluntary_ctxt_switches"  # lines of a thread's status
BUSY = 30  # seconds of waiting for a core, at most, that count for each that was computed


class Thread(NamedTuple):
    """Seconds of its life that it computed, and that it waited for a core; how often it slept; whether it wants one."""

    computed: float
    waited: float = 0.0
    slept: int = 0
    wants: bool = False


_Threads = dict[int, Thread]


class Standstill:
    """Asked again and again whether processes stand still. pids: which, perhaps others each time."""

    def __init__(self, pids: Callable[[], Iterable[int]], seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self._patience, self._pause = Patience(seconds, longest=EVERY), Patience(EVERY)
        self._looked, self._before = time.monotonic(), self._look()

    def lasts(self) -> bool:
        """Whether none of the processes has come on for as many seconds as this one was there to see it."""
        left = self._patience.turn()
        if self._pause.turn() > 0:
            return False
        looked, before = self._looked, self._before
        self._pause, self._looked, self._before = Patience(EVERY), time.monotonic(), self._look()
        between = self._looked - looked
        if between > LONG:
            between = EVERY
        moves = (moved(before.get(pid, {}), threads, between) for pid, threads in self._before.items())
        if any(seconds > MOVES * between for seconds in moves):
            left, self._patience = self._seconds, Patience(self._seconds, longest=EVERY)
        return left <= 0

    def _look(self) -> dict[int, _Threads]:
        return {pid: dict(_threads(pid)) for pid in self._pids()}


def moved(before: _Threads, now: _Threads, between: float) -> float:
    """Seconds that a process computed, and waited for a core to compute on, of those `between` two looks."""
    seconds = 0.0
    for number, thread in now.items():
        last = before.get(number, Thread(0.0))
        computed = thread.computed - last.computed
        seconds += computed + min(thread.waited - last.waited, BUSY * computed)
        if last.wants and thread.wants and thread.slept == last.slept:
            seconds += between
    return seconds


def _threads(pid: int) -> Iterator[tuple[int, Thread]]:
    """The threads of a process and of its children."""
    if not Path("/proc/self/schedstat").exists():
        yield pid, Thread(_computed(pid))
        return
    with suppress(OSError):  # it has ended
        for number in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                computed, waited, _ = _read(pid, number, "schedstat").split()
                status = _read(pid, number, "status")
                state, slept = (status.partition(f"\n{key}:")[2].split(None, 1)[0] for key in (STATE, SLEPT))
                yield int(number), Thread(int(computed) / 1e9, int(waited) / 1e9, int(slept), state == "R")
            with suppress(OSError):
                for child in _read(pid, number, "children").split():
                    yield from _threads(int(child))


def _read(pid: int, task: str, name: str) -> str:
    """Cheaply: who looks computes, and two that look at each other must not take that for coming on."""
    with open(f"/proc/{pid}/task/{task}/{name}", encoding="utf-8", errors="replace") as file:
        return file.read()


def _computed(pid: int) -> float:
    """The same of a process as a whole, where there is no such file."""
    import psutil

    seconds = 0.0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                seconds += sum(process.cpu_times()[:2])
    return seconds
