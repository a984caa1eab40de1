"""Forks of a process that has torch imported: each a process like a fresh one, and none outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs_common import worlds
from test_launch import gone, wait_until

from zerolab.world import nursery

KINDS = worlds(True, others=[False]) if nursery.FORKS else [False]


@pytest.fixture(params=KINDS, ids=lambda forks: "forked" if forks else "fresh")
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "FORKS", request.param)


def start(function: str, *args: Any, **options: Any) -> nursery.Forked | nursery.Fresh:
    options.setdefault("environment", {"PATH": os.environ["PATH"], "HOME": "/nowhere", "ONLY": "this"})
    return nursery.start(f"jobs_nursery:{function}", *args, path=sys.path, **options)


def ended(process: nursery.Forked | nursery.Fresh, timeout: float = 60.0) -> int | None:
    process.join(timeout)
    return process.exitcode


@pytest.mark.usefixtures("kind")
def test_it_is_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_TOKEN", "very-secret")
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "log").open("w+b") as log, (tmp_path / "lent").open("w") as lent:
        process = start("tell", "an argument", fds=[lent.fileno()], output=log.fileno(), name="a rank")
        assert ended(process) == 0, (tmp_path / "log").read_text()
    said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    (told,) = said
    assert told["args"] == ["an argument"] and told["pid"] == process.pid and told["folder"] == str(tmp_path)
    assert told["environment"].pop("LC_CTYPE", "") in ("", "C.UTF-8")  # Python's own, when it starts afresh
    assert told["environment"] == {"PATH": os.environ["PATH"], "HOME": "/nowhere", "ONLY": "this"}
    assert told["session"] == process.pid and told["parent"] != process.pid
    assert told["name"] == "a rank" or sys.platform != "linux"
    assert (tmp_path / "lent").read_text() == "through a file that was lent\n"
    assert "at exit" in (tmp_path / "log").read_text()
    assert "very-secret" not in told["born with"]


@pytest.mark.slow
@pytest.mark.usefixtures("kind")
def test_how_it_ended() -> None:
    assert ended(start("leave", 0)) == 0
    assert ended(start("leave", 7)) == 7
    with open(os.devnull, "wb") as nothing:
        assert ended(start("fail", output=nothing.fileno())) == 1
        assert ended(start("leave", "words for stderr", output=nothing.fileno())) == 1
    process = start("hang")
    assert process.is_alive() and process.exitcode is None
    process.join(0.05)
    assert process.is_alive()
    process.kill()
    assert ended(process) == -signal.SIGKILL and not process.is_alive()
    process.kill()  # once more does no harm
    assert gone(process.pid)


@pytest.mark.usefixtures("kind")
@pytest.mark.slow
def test_it_hears_an_interrupt_whenever_the_nursery_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of an answer starts ranks with SIGINT blocked; ranks of the notebook that came later were deaf."""
    monkeypatch.setattr(nursery, "_nursery", None)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = start("interrupt_itself")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    assert ended(process) == 3
    if nursery.FORKS:
        nursery._nursery.process.kill()
        nursery._nursery.process.wait()


def test_random_numbers_are_not_shared(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        for process in [start("draw", output=log.fileno()) for _ in range(3)]:
            assert ended(process) == 0
    drawn = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({python for python, _ in drawn}) == len({numpy for _, numpy in drawn}) == 3


@pytest.mark.slow
def test_many_at_once_from_several_threads() -> None:
    ends: list[int | None] = []
    threads = [
        threading.Thread(target=lambda code: ends.append(ended(start("leave", code))), args=(n,)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends, key=str) == list(range(8))


@pytest.mark.usefixtures("kind")
def test_a_request_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of arguments and environment, but at most"):
        start("tell", "x" * nursery.LARGEST)


@pytest.fixture
def program(kind: None) -> Iterator[subprocess.Popen]:
    """A process that has started two which hang, one of them in C with the interpreter's lock."""
    code = f"import jobs_nursery; jobs_nursery.start_two({nursery.FORKS})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_none_outlives_its_parent(program: subprocess.Popen) -> None:
    assert program.stdout is not None
    pids = json.loads(program.stdout.readline())
    if nursery.FORKS:
        pids.append(psutil.Process(pids[0]).ppid())  # the nursery
    elif sys.platform != "linux":
        os.kill(pids.pop(), signal.SIGKILL)  # there nothing ends what hangs in C
    program.kill()
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.slow
@pytest.mark.skipif(not nursery.FORKS, reason="forks are for Linux")
def test_a_fork_has_a_nursery_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = start("start_two", True, True, output=log.fileno())
        wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    pids = json.loads((tmp_path / "log").read_text())
    pids.append(psutil.Process(pids[0]).ppid())
    assert psutil.Process(pids[-1]).ppid() == process.pid
    process.kill()
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.skipif(not nursery.FORKS, reason="forks are for Linux")
@pytest.mark.slow
def test_a_dead_nursery_takes_its_forks_along_and_is_followed_by_another() -> None:
    first = start("hang")
    before = psutil.Process(first.pid).ppid()
    os.kill(before, signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    wait_until(lambda: gone(before))
    second = start("hang")
    assert psutil.Process(second.pid).ppid() not in (before, os.getpid())
    second.kill()
    assert ended(second) == -signal.SIGKILL
