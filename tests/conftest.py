"""The ranks that the tests run on: real processes with a real process group, started once."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_common import ROOMS, ROOT, copy_checkout

import zerolab

gc.disable()  # what is imported stays
# So that tests and ranks can import the functions of the tests, whichever room these are in.
sys.path[:0] = map(str, ROOMS)


@pytest.fixture(scope="session")
def ranks() -> Iterator[zerolab.Ranks]:
    """`ranks.run(function, *args, ranks=n)`: the function's results on the first n of four ranks, one thread each."""
    with zerolab.Ranks(4, threads=1, forked=True) as pool:
        yield pool


@pytest.fixture
def lent(ranks: zerolab.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program under test gets these ranks where it would start some, one thread each, for itself."""

    @contextmanager
    def lend(size: int, threads: int, forked: bool = False) -> Iterator[Lent]:
        assert threads == 1
        yield Lent(ranks, size)

    if not torch.cuda.is_available():  # there it might hide the GPUs from its own, or give each one
        monkeypatch.setattr(zerolab, "Ranks", lend)


class Lent:
    def __init__(self, pool: zerolab.Ranks, ranks: int) -> None:
        self.pool, self.ranks = pool, ranks

    def run(self, fn: Callable, *args: Any, ranks: int | None = None, **options: float) -> list:
        return self.pool.run(fn, *args, ranks=ranks or self.ranks, **options)


@pytest.fixture(scope="session", autouse=True)
def judges() -> Iterator[None]:
    """One pool for the checks of all exercises, and none is left."""
    yield
    if judge := sys.modules.get("zerolab.lab.exercises.judge"):
        judge.close()


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it, once for all workers of xdist.

    From a copy: a build/ left in the checkout would leak deleted modules into the wheel.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    built = shared / "release"
    with (shared / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
            copy_checkout(source)
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = subprocess.run(command, cwd=source, timeout=600, **output)
            assert done.returncode == 0, done.stdout
            out.rename(built)
    return built


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of what only make test-all runs, one piece in N, drawn by the commit"
    parser.addoption("--share", type=int, default=1, metavar="N", help=text)


def _piece(item: pytest.Item) -> str | None:
    """What is drawn or left as one: a file of `solutions` or about another system, or an exhaustive test."""
    if item.path.parent in (ROOT / "solutions", ROOT / "tests" / "integrations"):
        return str(item.path.relative_to(ROOT))
    return item.nodeid if item.get_closest_marker("exhaustive") else None


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("--share")) > 1:
        pieces = sorted({piece for item in items if (piece := _piece(item))})
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        left = set(random.Random(commit).sample(pieces, len(pieces) - len(pieces) // share))
        config.hook.pytest_deselected(items=[item for item in items if _piece(item) in left])
        items[:] = [item for item in items if _piece(item) not in left]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    # Files of many tests begin early, as in xdist's own order. The browser's, one long test, would be alone at the end.
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name != "test_browser.py", -tests[item.path]))


STILL = [0.0]  # seconds, the longest of the present test in which this process's second thread was not run
RAN = [0.0]  # seconds since the start, as this process had them: see `clock`
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LOAD = Path("/proc/loadavg")


def _feel_the_pulse() -> None:
    last = time.monotonic()
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        STILL[0] = max(STILL[0], now - last - 0.1)
        RAN[0] += min(now - last, 1.0) / max(1.0, _running() / CORES)
        last = now


def _running() -> int:
    """How many processes and threads want a core now."""
    try:
        return int(LOAD.read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return 1


@pytest.fixture
def clock() -> Callable[[], float]:
    """Seconds for a promise about time: they stand still when the machine does, and are longer when it is shared.

    Where six processes want two cores, three seconds count as one.
    """
    return lambda: RAN[0]


class AtOnce:
    """Prints a failure when it happens: a run that a limit ends would keep to itself what had failed."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.section(f"{report.when} of {report.nodeid}", sep="_")
            self.terminal.line(report.longreprtext)


@pytest.hookimpl(trylast=True)  # the terminal's own comes first
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # a worker of xdist's has none
        config.pluginmanager.register(AtOnce(terminal), "failures at once")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background; tests send it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_feel_the_pulse, daemon=True, name="pulse").start()


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection need look at what is imported by now
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failure tells whether the machine stood still meanwhile: no timeout that a test sets holds then."""
    report = yield
    if report.failed and STILL[0] > 1.0:
        report.sections.append(("the machine", f"stood still for {STILL[0]:.1f} s while this test ran"))
    if call.when == "teardown":
        STILL[0] = 0.0
    return report
