"""GPUs that are lent: never to two at once, whoever dies, hangs or talks rubbish. Real processes, a real broker."""

import fcntl
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from test_launch import finish, gone, python, wait_until

from zerolab import lab
from zerolab.classroom.broker import CONNECTIONS, Broker
from zerolab.classroom.hub import LOCK, SOCKET, Door
from zerolab.lab.ranks import lease, session, turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the classroom is for Linux"),
]


@contextmanager
def lending(folder: Path, students: int, gpus: int, **times: float) -> Iterator[Broker]:
    broker = Broker([str(gpu) for gpu in range(gpus)], **times)
    for student in range(students):
        broker.open(f"student-{student:02}", folder / f"{student}")
    broker.start()
    try:
        yield broker
    finally:
        broker.close()


def ask(folder: Path, student: int, gpus: int, timeout: float = 600.0, tell=lambda line: None) -> lease.Lease:
    os.environ[lease.SOCKET] = str(folder / str(student))
    try:
        return lease.ask(gpus, timeout, tell)
    finally:
        del os.environ[lease.SOCKET]


# ---------------------------------------------------------------------- never two


def learner(folder: Path, student: int, rounds: int) -> None:
    """Takes GPUs again and again; for each it locks a file, which fails at once if another process has it locked."""
    chance = random.Random(student)
    for _ in range(rounds):
        lent = ask(folder, student, chance.randint(1, 4), 60.0)
        files = [os.open(folder / f"gpu{gpu}", os.O_CREAT | os.O_RDWR) for gpu in lent.gpus]
        for gpu, file in zip(lent.gpus, files):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (folder / f"twice {gpu} {student} {time.time()}").touch()
        how = chance.choice(["release", "release", "die", "rank outlives"])
        # A rank: it has the lease and the locks for as long as it lives, which is longer than its notebook.
        rank = ["sleep", "0.3" if how == "rank outlives" else "0.02"]
        process = subprocess.Popen(rank, pass_fds=[lent.fd, *files], env=lent.environment)
        time.sleep(chance.random() * 0.02)
        if how != "release":
            os.kill(os.getpid(), signal.SIGKILL)
        process.wait(120.0)
        for file in files:
            os.close(file)
        lent.release()


def test_no_gpu_is_ever_lent_twice_and_none_is_lost(tmp_path: Path) -> None:
    """Twenty students at eight GPUs; many are killed and come back; some leave a rank behind that has the GPU."""
    fork = multiprocessing.get_context("fork")  # twenty imports of torch would take longer than the test
    with lending(tmp_path, 20, 8) as broker:

        def start(student: int) -> multiprocessing.Process:
            process = fork.Process(target=learner, args=(tmp_path, student, 6))
            process.start()
            return process

        running, killed = {student: start(student) for student in range(20)}, 0
        try:
            while killed < 40:
                for student, process in running.items():
                    if not process.is_alive():
                        process.join()
                        assert process.exitcode in (0, -signal.SIGKILL)
                        killed += process.exitcode != 0
                        running[student] = start(student)
                time.sleep(0.01)
        finally:
            for process in running.values():
                process.kill()
                process.join()
        assert not list(tmp_path.glob("twice*"))
        wait_until(lambda: not broker.table())
        everything = ask(tmp_path, 0, 8)
        assert everything.gpus == [str(gpu) for gpu in range(8)]
        everything.release()


# ---------------------------------------------------------------------- the queue


def test_places_are_told_and_turns_are_kept(tmp_path: Path) -> None:
    told: dict[int, list[str]] = {1: [], 2: [], 3: []}
    leases: dict[int, lease.Lease] = {}

    def wait(student: int, gpus: int) -> None:
        leases[student] = lease.ask(gpus, 300.0, told[student].append)

    with lending(tmp_path, 4, 4) as broker:
        first = ask(tmp_path, 0, 3)
        threads = []
        for student, gpus in ((1, 2), (2, 3), (3, 1)):  # the last one could have the free GPU, but it is not its turn
            os.environ[lease.SOCKET] = str(tmp_path / str(student))
            threads.append(threading.Thread(target=wait, args=(student, gpus)))
            threads[-1].start()
            wait_until(lambda student=student: len(broker.table()) == student + 1 and told[student])
        del os.environ[lease.SOCKET]
        assert [told[student][0][:45] for student in (1, 2, 3)] == [
            "waiting for 2 GPUs: place 1 in the queue (int",
            "waiting for 3 GPUs: place 2 in the queue (int",
            "waiting for a GPU: place 3 in the queue (inte",
        ]
        assert [(entry.student, len(entry.gpus), entry.place) for entry in broker.table()] == [
            ("student-00", 3, 0),
            ("student-01", 0, 1),
            ("student-02", 0, 2),
            ("student-03", 0, 3),
        ]
        own: list[str] = []
        with pytest.raises(lease.NoLease, match="no GPUs came free in time"):
            ask(tmp_path, 0, 1, 0.7, own.append)  # a fourth GPU is free, but one lease at a time
        assert own == ["waiting: another notebook of yours has GPU 0, 1, 2; lab.stop() there ends that"]
        first.release()
        wait_until(lambda: 1 in leases)
        time.sleep(0.5)
        assert leases[1].gpus == ["0", "1"] and 2 not in leases and 3 not in leases
        leases[1].release()
        for thread in threads:
            thread.join()
        assert leases[2].gpus == ["0", "1", "2"] and leases[3].gpus == ["3"]
        assert "place 1 in the queue" in told[2][1] and told[2][2].startswith("GPUs 0, 1, 2 for 10 minutes")
        leases[2].release()
        leases[3].release()


# ---------------------------------------------------------------------- the end of a lease


def test_the_time_is_over_only_when_somebody_waits_and_idle_ends_it_at_once(tmp_path: Path) -> None:
    with lending(tmp_path, 2, 1, seconds=1.0, idle=1.5) as broker:
        over: list[str] = []
        first = ask(tmp_path, 0, 1)
        first.busy(True)  # a long cell
        first.watch(over.append)
        time.sleep(2.0)
        assert not over and broker.table()[0].left == 0.0
        second = ask(tmp_path, 1, 1)  # the notebook's ranks have ended by the time that it has let go
        assert over == [first.over] and first.over.startswith(
            "GPU 0 went back: the lease of 1 second is over and others are waiting"
        )
        begin = time.monotonic()
        second.watch(over.append)  # and nothing runs
        wait_until(lambda: len(over) == 2)
        assert time.monotonic() - begin > 1.0 and "no cell ran on them for 1.5 seconds" in over[1]
        wait_until(lambda: not broker.table())


def test_who_does_not_let_go_loses_the_ranks(tmp_path: Path) -> None:
    """A notebook that hangs neither hears that its time is over nor ends its ranks."""
    with lending(tmp_path, 2, 1, seconds=0.2, grace=0.5):
        first = ask(tmp_path, 0, 1)
        ranks = [subprocess.Popen(["sleep", "600"], env=first.environment, pass_fds=[first.fd]) for _ in range(2)]
        other = subprocess.Popen(["sleep", "600"], pass_fds=[first.fd])  # not a rank of the lease
        try:
            second = ask(tmp_path, 1, 1)
            assert [rank.wait(300) for rank in ranks] == [-signal.SIGKILL] * 2 and other.poll() is None
            second.release()
        finally:
            for process in [*ranks, other]:
                process.kill()
                process.wait(120.0)
            first.release()


def test_rubbish_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with lending(tmp_path, 2, 2):
        for rubbish in (b"no JSON\n", b"[" * 3000 + b"\n", b"3\n", b'{"want": "all"}\n', b"x" * 20_000):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(60.0)
                connection.connect(str(tmp_path / "0"))
                with suppress(BrokenPipeError):
                    connection.sendall(rubbish)
                answer = connection.recv(1000)
                assert b"refused" in answer
        many = []
        for _ in range(CONNECTIONS + 1):
            many.append(socket.socket(socket.AF_UNIX))
            many[-1].connect(str(tmp_path / "0"))
        many[-1].settimeout(60.0)
        assert b"already in the queue" in many[-1].recv(1000)
        for connection in many:
            connection.close()
        assert os.stat(tmp_path / "0").st_mode & 0o777 == 0o600
        lent = ask(tmp_path, 1, 100)  # more than there are: all of them
        assert lent.gpus == ["0", "1"]
    with pytest.raises(lease.NoLease, match="does not answer"):
        ask(tmp_path, 0, 1)
    lent.release()


# ---------------------------------------------------------------------- live ranks

NOTEBOOK = """
import time
from zerolab import lab
live = lab.start(2, device="cuda")
print(sorted(rank.process.pid for rank in live._ranks.values()), flush=True)
time.sleep(600)
"""


def test_live_ranks_have_a_lease_and_lose_it(tmp_path, monkeypatch, capsys) -> None:
    """Numbers are lent and the ranks stay on the CPU, as in a rehearsal."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))  # of no notebook but this one
    monkeypatch.setenv(lease.REHEARSAL, "1")
    monkeypatch.setenv(lease.SOCKET, str(tmp_path / "0"))
    with lending(tmp_path, 2, 2, seconds=2.0, idle=600.0) as broker:
        notebook = python("-c", NOTEBOOK)
        try:
            monkeypatch.setenv(lease.SOCKET, str(tmp_path / "1"))
            wait_until(lambda: [entry.student for entry in broker.table()] == ["student-00"])
            assert broker.table()[0].gpus == ("0", "1")
            for line in notebook.stdout:
                if line.startswith("["):
                    pids = json.loads(line)
                    break
            notebook.kill()  # as closing a notebook does at the worst: its kernel has no say
            notebook.wait(120.0)
            wait_until(lambda: all(map(gone, pids)))
            wait_until(lambda: not broker.table())
        finally:
            finish(notebook)
        live = lab.start(2, device="cuda")
        told = capsys.readouterr().out
        assert told.startswith("GPUs 0, 1 for 2 seconds, then until somebody else waits; lab.stop() gives them back\n")
        assert "2 ranks on the CPU, because this classroom is a rehearsal without GPUs (leased: GPUs 0, 1)." in told
        seen = live.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'] == '', os.environ['ZEROLAB_LEASE'])")
        assert seen[0].text == seen[1].text and re.fullmatch(r"True [0-9a-f]{16}\n", seen[0].text)
        time.sleep(1.0)
        live.run("pass")  # its time is over, but nobody waits
        busy = tmp_path / "busy"

        def ask_when_busy() -> None:
            wait_until(busy.exists)
            ask(tmp_path, 0, 1).release()

        other = threading.Thread(target=ask_when_busy)
        other.start()
        with pytest.raises(session.RankFailure) as caught:
            live.run(f"import time; open({str(busy)!r}, 'w').close(); time.sleep(600)")
        over = "the lease of 2 seconds is over and others are waiting"
        why = f'GPUs 0, 1 went back: {over}; lab.start(device="cuda") asks again'
        assert f"were ended: {why}" in str(caught.value)
        other.join()
        assert not other.is_alive()
        with pytest.raises(session.NoRanks, match="went back"):
            lab.reset()
        monkeypatch.setenv(lease.SOCKET, str(tmp_path / "1"))
        lab.start(1, device="cuda")
        assert broker.table()[0].gpus == ("0",)
        lab.stop()
        wait_until(lambda: not broker.table())


# ---------------------------------------------------------------------- turns


def test_ranks_start_in_turns_and_a_notebook_that_dies_blocks_nobody(tmp_path: Path, monkeypatch) -> None:
    turns.make(tmp_path / "turns", 2)
    monkeypatch.setenv(turns.FOLDER, str(tmp_path / "turns"))
    fork, at_once = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").Value("i", 0)

    def start(number: int) -> None:
        with turns.turn():
            with at_once.get_lock():
                at_once.value += 1
                (tmp_path / f"{at_once.value} at once, {number}").touch()
            wait_until(lambda: any(tmp_path.glob("2 at once, *")))
            with at_once.get_lock():
                at_once.value -= 1

    def hold() -> None:
        with turns.turn():
            (tmp_path / "held").touch()
            time.sleep(600)

    notebooks = [fork.Process(target=start, args=(number,)) for number in range(6)]
    for notebook in notebooks:
        notebook.start()
    for notebook in notebooks:
        notebook.join()
        assert notebook.exitcode == 0
    assert len(list(tmp_path.glob("* at once, *"))) == 6
    assert {path.name[0] for path in tmp_path.glob("* at once, *")} == {"1", "2"}
    dead = fork.Process(target=hold)
    dead.start()
    wait_until((tmp_path / "held").exists)
    told: list[str] = []
    with turns.turn():  # the second place
        begin = time.monotonic()
        with turns.turn(2.5, told.append):  # there is no third: it goes on when its time is over
            assert time.monotonic() - begin > 2.4
        assert told == ["other notebooks are starting their ranks; yours are next in line"]
        dead.kill()
        dead.join()
        with turns.turn(600.0, told.append):
            assert len(told) == 1  # its place was free


# ---------------------------------------------------------------------- under JupyterHub


def say(path: Path, *messages: bytes) -> dict:
    """What is answered first."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(str(path))
        connection.sendall(b"".join(messages))
        return json.loads(connection.makefile().readline())


def test_a_token_tells_who_asks(tmp_path: Path) -> None:
    def who(token: str) -> str | None:
        if token == "hub is down":
            raise RuntimeError
        return {"secret": "ada"}.get(token)

    ended, path = threading.Event(), tmp_path / SOCKET
    with lending(tmp_path, 0, 2) as broker:
        door = Door(broker, path, False, who)

        def serve() -> None:
            while not ended.is_set():
                door.look()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert os.stat(path).st_mode & 0o777 == 0o600
            want = lease.line(want=1)
            for first in (
                want,
                lease.line(token="ada"),
                lease.line(token=["secret"]),
                b"[" * 3000 + b"\n",
                b"x" * 5000,
            ):
                assert "does not know this notebook's token" in say(path, first)["refused"]
            assert "JupyterHub does not answer" in say(path, lease.line(token="hub is down"), want)["refused"]
            assert not broker.table()
            assert say(path, lease.line(token="secret", student="grace"), want)["gpus"] == ["0"]
            wait_until(lambda: not broker.table())
            with socket.socket(socket.AF_UNIX) as held:
                held.connect(str(path))
                held.sendall(lease.line(token="secret") + lease.line(want=2))
                wait_until(broker.table)
                assert [(entry.student, entry.gpus) for entry in broker.table()] == [("ada", ("0", "1"))]
        finally:
            ended.set()
            thread.join()
            door.close()
    assert not path.exists()


@pytest.mark.exhaustive
def test_the_broker_of_a_hub_that_was_killed_makes_way_for_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerolab.classroom.hub", "lend", str(tmp_path), "0", "--seconds=600"]
    hub = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)", *command]
    hubs, brokers = [], []

    def begun() -> bool:
        brokers[:] = [child for each in hubs for child in psutil.Process(each.pid).children()]
        lock = str(tmp_path / LOCK)
        return len(brokers) == len(hubs) and all(lock in {file.path for file in each.open_files()} for each in brokers)

    def serves() -> bool:
        with suppress(OSError):
            return "refused" in say(tmp_path / SOCKET, lease.line(want=1))
        return False

    try:
        hubs.append(subprocess.Popen(hub))
        wait_until(serves)
        hubs.append(subprocess.Popen(hub))
        wait_until(begun)
        first, second = brokers
        hubs[0].kill()
        wait_until(lambda: gone(first.pid))
        wait_until(serves)
        second.terminate()
        assert hubs[1].wait(300.0) == 0 and not (tmp_path / SOCKET).exists()
    finally:
        for process in [*hubs, *brokers]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for each in hubs:
            each.wait(120.0)
