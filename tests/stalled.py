"""Run a command on a machine that stalls: `python -m tests.stalled make test`, or `make test-stalled ARGS=tests/comm`.

At random moments every process that the command has started is stopped at once, for 5 to 40 seconds, as a laptop that
sleeps or a virtual machine that is moved stops them; two processes beside them compute all the time. What passes here
waits for what it depends on, and not for a while. The moments follow from the seed, which is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

BUSY = 2  # processes beside the command
STOPPED = (5.0, 40.0)  # seconds, from and to
BETWEEN = 30.0  # seconds on average
PR_SET_CHILD_SUBREAPER = 36


def run(command: Sequence[str], seed: int, between: float = BETWEEN) -> int:
    """The exit status of `command`, which nothing that it started outlives."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whoever loses its parent stays in our tree
    moments = random.Random(seed)
    busy = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(BUSY)]
    for process in busy:
        process.start()
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    started = subprocess.Popen(command)
    begin, stalls, still = time.monotonic(), 0, 0.0
    try:
        while (status := _ended_within(moments.expovariate(1 / between), started.pid)) is None:
            stop = moments.uniform(*STOPPED)
            stopped = _stop_all(own)
            time.sleep(stop)
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
            stalls, still = stalls + 1, still + stop
        return status
    finally:
        for process in _tree(own):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in busy:
            process.kill()
        minutes = (time.monotonic() - begin) / 60
        print(f"stalled {stalls} times, for {still / 60:.1f} of {minutes:.1f} minutes (--seed {seed})", flush=True)


def _compute() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(1_000_000))


def _ended_within(seconds: float, pid: int) -> int | None:
    """The exit status of process `pid`, or None after `seconds`. Orphans that end meanwhile are buried."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for orphan in (child for child in psutil.Process().children() if child.pid != pid):
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if orphan.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(orphan.pid, os.WNOHANG)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    return None


def _tree(own: set[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in own]


def _stop_all(own: set[int]) -> list[psutil.Process]:
    """Stop the tree, also what is started meanwhile. What a test has stopped itself is left to the test."""
    stopped: dict[int, psutil.Process] = {}
    theirs: set[int] = set()
    while fresh := [process for process in _tree(own) if process.pid not in stopped.keys() | theirs]:
        for process in fresh:
            with suppress(psutil.NoSuchProcess):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE):
                    theirs.add(process.pid)
                    continue
                process.suspend()
            stopped[process.pid] = process
    return list(stopped.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="of the moments, to have the same again")
    parser.add_argument("--between", type=float, default=BETWEEN, help="seconds between two stops, on average")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    return run(options.command, seed, options.between)


if __name__ == "__main__":
    sys.exit(main())
