"""Who computes is told from who only asks, on a core that ten others keep busy."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from zerolab.lab import standstill
from zerolab.lab.standstill import EVERY, MOVES, Standstill, Thread, moved
from zerolab.world.processes import Patience

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux shows who waits")

COMPUTES = "while True: pass"
ASKS = "import time\nwhile True: time.sleep(0.05)"
FOR = 2.0  # seconds: more than a stop of the machine takes off, which is one look


@contextmanager
def on_a_busy_core(program: str) -> Iterator[int]:
    """The process of `program`. Whoever wakes up waits for its turn, as in a batch job."""
    place = f"os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])"
    batch = "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    with ExitStack() as stack:
        for source in [COMPUTES] * 10 + [program]:
            begun = f"import os; {place}; {batch}; print(flush=True)\n{source}"
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", begun], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.read(1)
        yield process.pid


@pytest.mark.slow
def test_one_that_only_asks_stands_still():
    with on_a_busy_core(ASKS) as pid:
        still, patience = Standstill(lambda: [pid], FOR), Patience(20 * FOR)
        while not still.lasts():
            assert patience.turn() > 0
            time.sleep(0.05)


@pytest.mark.slow
def test_one_that_computes_comes_on():
    with on_a_busy_core(COMPUTES) as pid:
        still, patience = Standstill(lambda: [pid], FOR), Patience(2 * FOR)
        while patience.turn() > 0:
            assert not still.lasts()
            time.sleep(0.05)


def test_after_a_stop_what_is_computed_counts_by_the_time_of_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody had more, however long the stop was; and it takes off no more than that."""
    clock, computed = [0.0], [0.0]
    monkeypatch.setattr(standstill.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Standstill, "_look", lambda self: {1: {1: Thread(computed[0])}})
    still = Standstill(lambda: [1], FOR)
    idle = (EVERY, 0.0)
    for seconds, of_it in [(60.0, 0.0), idle, idle, (60.0, 2 * MOVES * EVERY), idle, idle, idle]:
        clock[0], computed[0] = clock[0] + seconds, computed[0] + of_it
        assert not still.lasts()
    clock[0] += EVERY
    assert still.lasts()


def rate(before: dict[int, Thread], now: dict[int, Thread], seconds: float = EVERY) -> float:
    return moved(before, now, seconds) / seconds


def test_to_wait_for_a_core_counts_by_what_is_computed():
    """As seen in half a second at a load of 30: a rank that asked others twice, and one that computed."""
    before = {1: Thread(5.0, 7.0), 2: Thread(0.1, 0.1)}
    assert rate(before, {1: Thread(5.0025, 7.9), 2: Thread(0.1, 0.1)}) < MOVES
    assert rate(before, {1: Thread(5.02, 7.48), 2: Thread(0.1, 0.1)}) > MOVES
    assert rate(before, {1: Thread(5.0, 7.0), 2: Thread(0.1, 0.1), 3: Thread(0.3)}) > MOVES


def test_what_is_computed_counts_by_the_time_it_had_for_it():
    """A machine so slow that two seconds pass between two looks: a rank that asked others four times."""
    before = {1: Thread(5.0, 7.0)}
    assert rate(before, {1: Thread(5.02, 7.9)}, 2.0) < MOVES
    assert rate(before, {1: Thread(5.1, 8.0)}, 2.0) > MOVES


def test_who_wants_a_core_and_has_not_slept_comes_on_however_little_it_gets():
    """As seen at a load of 60: no core for half a second, then one for a moment."""
    before = {1: Thread(5.0, 7.0, slept=8, wants=True)}
    assert rate(before, {1: Thread(5.0, 7.0, slept=8, wants=True)}) > MOVES
    assert rate(before, {1: Thread(5.003, 7.5, slept=9, wants=True)}) < MOVES  # it has slept: it only asks
    assert rate(before, {1: Thread(5.003, 7.5, slept=8, wants=False)}) < MOVES  # and now it sleeps
    asleep = {1: Thread(5.0, 7.0, slept=8)}
    assert rate(asleep, {1: Thread(5.003, 7.4, slept=8, wants=True)}) < MOVES  # it has just woken up
