"""A JupyterLab for each student, started, watched and ended together.

    class/                 belongs to the user who runs the classroom; closed to others
        handout.csv        who gets which address and token
        solutions/         the solutions that are open: the teacher puts them here, and takes them away
        student-01/        the student's home: settings, logs
            work/          what the student sees: copies of lessons and solutions, and my/ with answers and progress

All students run as this user and share one set of packages (shield.py). That keeps them out of each other's way; it
stops accidents, not malice. Linux only: it needs Linux's signal at a parent's death and its adoption of orphans.
"""

from __future__ import annotations

import csv
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from zerolab.classroom import shield
from zerolab.classroom.broker import Broker
from zerolab.lab.__main__ import (
    JUPYTERLAB,
    REMEMBERED,
    copy_docs,
    copy_notebooks,
    kernel_options,
    write_kernel,
    write_settings,
)
from zerolab.lab.ranks import lease, notices, turns

START_TIMEOUT = 120.0  # seconds until a JupyterLab must answer
STOP_TIMEOUT = 10.0  # from SIGTERM to SIGKILL
PAUSE = 5.0  # before one that died soon after its start is started again
CULL = 1800  # seconds until a notebook ends that runs nothing and that no browser shows
NOT_FOR_STUDENTS = ("JPY_", "JUPYTER", "IPYTHON", "ZEROLAB_", "XDG_", "MPLCONFIGDIR", "SSH_", "GLOO_", "RANK", "WORLD_")
STUDENT = "ZEROLAB_STUDENT"  # in the environment of a lab and of everything that it starts: the student's name

# Closing a notebook ends its kernel and its ranks.
TRACKER, SHUTDOWN = "notebook-extension/tracker.jupyterlab-settings", '{"kernelShutdown": true}'

NO_ANSWERS = "Your teacher has the answers to these questions."
CLOSED = "This solution is not open yet. When your teacher has opened it, close this page and follow the link again."

# However the classroom ends, its labs must not outlive it. This comes last, as a change of user would undo it.
LAST = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv[1]) or sys.exit('orphan')"
LAST += "; os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"


class Refused(Exception):
    """The classroom cannot be held like this. The message says why, in one line."""


@dataclass
class Lab:
    """A student's JupyterLab."""

    student: str
    home: Path
    port: int
    token: str
    process: subprocess.Popen | None = None
    started: float = 0.0
    ready: bool = False
    starts: int = 0

    @property
    def work(self) -> Path:
        return self.home / "work"

    @property
    def page(self) -> str:
        """The page at which a lab opens: the first lesson."""
        first = next(iter(sorted(self.work.glob("00_*.ipynb"))), None)
        return f"/lab/tree/{first.name}" if first is not None else "/lab"

    @property
    def notices(self) -> Path:
        return self.home / "notices"


class Classroom:
    """`open` sets it up, `look` starts the labs and keeps them running, `close` ends everything."""

    def __init__(
        self,
        folder: Path,
        students: int,
        ip: str = "127.0.0.1",
        first_port: int = 8801,
        gpus: Sequence[str] = (),
        rehearsal: bool = False,
        lease_seconds: float = 600.0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.ip, self.rehearsal, self.tell = folder.resolve(), ip, rehearsal, tell
        self.first_port = first_port
        self.labs: list[Lab] = []
        self.broker = Broker(gpus, lease_seconds)
        self._lessons, self._answers_shown = Path(), True
        self._solutions: dict[str, bytes] = {}  # what the last link of each lesson leads to
        self._opened: dict[Path, int] = {}  # the solutions that are open, and when they were written
        self._names = [f"student-{number:02}" for number in range(1, students + 1)]
        self._lock: int | None = None
        self._scratch_folder: Path | None = None
        self._shield = False

    @property
    def _scratch(self) -> Path:
        assert self._scratch_folder is not None, "the classroom is not open"
        return self._scratch_folder

    def open(self, lessons: Path, solutions: Path | None = None, answers: bool = True) -> None:
        """Make the folders. `look` then starts the labs. solutions: those in this folder are open from the start.
        answers: whether the lessons show the answers to their questions, folded."""
        self._lessons, self._answers_shown = lessons, answers
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another classroom is running in {self.folder}: end it, or name another --folder") from None
        self.folder.chmod(0o700)
        self.solutions.mkdir(exist_ok=True)
        if solutions is not None:
            for solution in solutions.glob("*.ipynb"):
                shutil.copy(solution, self.solutions)
        self._look_at_solutions()
        known = self._read_handout()
        taken: set[int] = set()
        for name in self._names:
            port, token = known.get(name, (0, secrets.token_hex(16)))
            lab = Lab(name, self.folder / name, port or self.first_port, token)
            lab.port = self._free_port(lab.port, taken)
            taken.add(lab.port)
            self.labs.append(lab)
            self._furnish(lab)
        self._write_handout()
        self._scratch_folder = Path(tempfile.mkdtemp(prefix="zerolab-"))  # a socket's path must be short
        (self._scratch / "aside").mkdir()
        turns.make(self._scratch / "turns", max(2, (os.cpu_count() or 1) // 2))
        why = shield.why_not(self.folder, self.labs[0].home, self._scratch / "aside")
        self._shield = not why
        if why:
            text = "students can change the packages and see each other's folders: on this system, `unshare`"
            self.tell(f"{text} cannot give each of them a view of their own ({why})")
        if self.broker.gpus:
            for lab in self.labs:
                self.broker.open(lab.student, self._scratch / lab.student)
            self.broker.start()
        _adopt(True)

    # -- files ---------------------------------------------------------------------------------------------------------

    @property
    def handout(self) -> Path:
        return self.folder / "handout.csv"

    @property
    def solutions(self) -> Path:
        return self.folder / "solutions"

    def _read_handout(self) -> dict[str, tuple[int, str]]:
        """The ports and tokens of last time, so that what was handed out stays valid."""
        if not self.handout.exists():
            return {}
        try:
            with self.handout.open(newline="") as file:
                return {row["student"]: (int(row["port"]), row["token"]) for row in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError):
            raise Refused(f"{self.handout} is damaged: if you delete it, all students get new tokens") from None

    def _write_handout(self) -> None:
        host = socket.gethostname() if self.ip in ("0.0.0.0", "::", "*") else self.ip
        new = self.handout.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")  # for shells: `\r` would be part of the address
            table.writerow(["student", "port", "token", "address"])
            for lab in self.labs:
                address = f"http://{f'[{host}]' if ':' in host else host}:{lab.port}{lab.page}?token={lab.token}"
                table.writerow([lab.student, lab.port, lab.token, address])
        new.replace(self.handout)

    def _furnish(self, lab: Lab) -> None:
        """Make the student's folder, or whatever is missing from it.

        The token goes into a file: the command line and the environment could be shown by a cell of a notebook.
        """
        lab.notices.mkdir(parents=True, exist_ok=True)
        lab.home.chmod(0o700)
        try:
            handed_out = {
                lesson.name: lesson.read_bytes() if self._answers_shown else _without_answers(lesson)
                for lesson in sorted(self._lessons.glob("*.ipynb"))
            }
            lines = copy_notebooks(handed_out, lab.work)
            copy_docs(lab.work)
        except (OSError, ValueError) as error:
            lines = [f"the lessons were not updated: {lab.work / REMEMBERED} is damaged ({error}): delete it"]
        for line in lines:
            self.tell(f"{lab.student}: {line}")
        self._hand_out_solutions(lab)
        file = lab.home / ".jupyter/jupyter_server_config.json"
        file.parent.mkdir(exist_ok=True)
        file.touch(0o600)
        file.chmod(0o600)
        file.write_text(json.dumps({"IdentityProvider": {"token": lab.token}}) + "\n")
        setting = lab.home / ".jupyter/lab/user-settings/@jupyterlab" / TRACKER
        setting.parent.mkdir(parents=True, exist_ok=True)
        if not setting.exists():
            setting.write_text(SHUTDOWN + "\n")

    def _look_at_solutions(self) -> bool:
        """Whether solutions were opened or closed since the last look."""
        before, self._opened = self._opened, {}
        for solution in self.solutions.glob("*.ipynb"):
            with suppress(OSError):  # it was taken away just now
                self._opened[solution] = solution.stat().st_mtime_ns
        if self._solutions and self._opened == before:
            return False
        for lesson in sorted(self._lessons.glob("*.ipynb")):
            self._solutions[lesson.name] = closed_page(lesson)
            if (solution := self.solutions / lesson.name) in self._opened:
                with suppress(OSError):
                    self._solutions[lesson.name] = solution.read_bytes()
        return True

    def _hand_out_solutions(self, lab: Lab) -> None:
        """Put them, or pages that say that they are not open, where the links lead: JupyterLab shows nothing above its
        root, so `../solutions` is in it."""
        try:  # JupyterLab may have saved such a page with other metadata, which is no reason to keep it
            lines = copy_notebooks(self._solutions, lab.work / "solutions", is_closed_page)
        except (OSError, ValueError) as error:
            lines = [f"the solutions were not updated: {error}"]
        for line in lines:
            self.tell(f"{lab.student}: {line}")

    def _free_port(self, first: int, taken: Iterable[int]) -> int:
        for port in range(first, 65536):
            if port not in taken and _is_free(self.ip, port):
                return port
        raise Refused(f"there is no free port from {first} up at {self.ip}: name another --port")

    # -- processes -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Start the labs that are not running, a few at a time, and clean up after processes that have ended."""
        now, starting = time.monotonic(), 0
        if self._look_at_solutions():
            for lab in self.labs:
                self._hand_out_solutions(lab)
        for lab in self.labs:
            if lab.process is not None and lab.process.poll() is not None:
                self.tell(f"{lab.student}: JupyterLab ended with {lab.process.returncode}; starting it again")
                self.tell(f"    its last line: {_last_line(lab.home / 'log')}")
                lab.process = None
            if lab.process is not None and not lab.ready:
                lab.ready = self._answers(lab)
                if not lab.ready and now > lab.started + START_TIMEOUT:
                    self.tell(f"{lab.student}: no answer from JupyterLab in {START_TIMEOUT:g} s; starting it again")
                    lab.process.kill()
                    lab.process.wait(STOP_TIMEOUT)
                    lab.process = None
            starting += lab.process is not None and not lab.ready
        for lab in self.labs:
            soon = lab.starts and now < lab.started + PAUSE
            if lab.process is None and not soon and starting < (os.cpu_count() or 1):
                lab.started, lab.ready, lab.starts = now, False, lab.starts + 1
                starting += 1
                try:
                    self._start(lab)
                except OSError as error:  # a full disk, or something that the student did to the folder
                    self.tell(f"{lab.student}: JupyterLab did not start, trying again: {error}")
        self._reap()

    def _start(self, lab: Lab) -> None:
        if lab.starts > 1:
            self._furnish(lab)
        taken = {other.port for other in self.labs if other is not lab}
        if (port := self._free_port(lab.port, taken)) != lab.port:
            self.tell(f"{lab.student}: port {lab.port} was taken, now it is {port}; {self.handout} has the new address")
            lab.port = port
            self._write_handout()
        command = [sys.executable, "-c", LAST, str(os.getpid()), *JUPYTERLAB, "--no-browser"]
        command += [f"--ip={self.ip}", f"--port={lab.port}", "--ServerApp.port_retries=0"]
        command += [f"--ServerApp.root_dir={lab.work}", f"--MappingKernelManager.cull_idle_timeout={CULL}"]
        command += [*write_settings(lab.home / ".jupyter/lab/app-settings"), *kernel_options()]
        command.append(f"--LabApp.default_url={lab.page}")
        if os.geteuid() == 0:
            command.append("--allow-root")
        if self._shield:
            command = shield.shielded(command, self.folder, lab.home, self._scratch / "aside")
        with (lab.home / "log").open("ab") as log:
            (lab.home / "log").chmod(0o600)
            lab.process = subprocess.Popen(
                command,
                cwd=lab.work,
                env=self._environment(lab),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Control-C is for the classroom
            )

    def _environment(self, lab: Lab) -> dict[str, str]:
        rest = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_STUDENTS)}
        jupyter = lab.home / ".jupyter"
        own: dict[str, object] = {
            "HOME": lab.home,
            "JUPYTER_CONFIG_DIR": jupyter,
            "JUPYTER_DATA_DIR": jupyter / "data",
            "JUPYTER_PATH": write_kernel(jupyter / "lab/app-settings"),
            "JUPYTER_RUNTIME_DIR": jupyter / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": jupyter / "lab/user-settings",
            "JUPYTERLAB_WORKSPACES_DIR": jupyter / "lab/workspaces",
            "IPYTHONDIR": lab.home / ".ipython",
            "ZEROLAB_MY": lab.work / "my",
            STUDENT: lab.student,
            notices.FOLDER: lab.notices,
            turns.FOLDER: self._scratch / "turns",
            "CUDA_VISIBLE_DEVICES": "",  # a notebook's own process is on the CPU; its ranks ask for GPUs
            "PYTHONDONTWRITEBYTECODE": 1,  # everybody shares the packages: nobody writes there
        }
        if self.broker.gpus:
            own[lease.SOCKET] = self._scratch / lab.student
            if self.rehearsal:
                own[lease.REHEARSAL] = 1
        return rest | {name: str(value) for name, value in own.items()}

    def _answers(self, lab: Lab) -> bool:
        """Whether this student's JupyterLab listens there. It proves itself by accepting the token."""
        host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.ip, self.ip)
        address = f"http://{f'[{host}]' if ':' in host else host}:{lab.port}/api/status"
        request = urllib.request.Request(address, headers={"Authorization": f"token {lab.token}"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=2.0) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _reap(self) -> None:
        """Orphans become our children: kill what a notebook left behind, and collect the dead."""
        ours = {lab.process.pid for lab in self.labs if lab.process is not None}
        for child in psutil.Process().children():
            with suppress(psutil.Error, ChildProcessError):
                if child.pid in ours:
                    continue
                if child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)
                elif self._of_a_student(child):
                    child.kill()

    def _of_a_student(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            elsewhere = self._shield and shield.view_of(process.pid) not in (0, shield.view_of(os.getpid()))
            return elsewhere or STUDENT in process.environ()
        return False

    def close(self) -> None:
        """End every lab, its notebooks and their ranks."""
        living = [lab.process for lab in self.labs if lab.process is not None]
        for process in living:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in living:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for _ in range(3):  # the children of what we kill become ours too
            left = [child for child in psutil.Process().children(recursive=True) if self._of_a_student(child)]
            for child in left:
                with suppress(psutil.Error):
                    child.kill()
            psutil.wait_procs(left, 2.0)
        for process in living:
            process.wait(STOP_TIMEOUT)
        _adopt(False)
        self.broker.close()
        if self._scratch_folder is not None:
            shutil.rmtree(self._scratch_folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def _adopt(orphans: bool) -> None:
    """Whether processes that students leave behind become ours, to be ended and reaped by us."""
    ctypes.CDLL(None).prctl(36, int(orphans))  # PR_SET_CHILD_SUBREAPER


def _without_answers(lesson: Path) -> bytes:
    """The lesson, with a sentence in place of the answers to its questions."""
    notebook = json.loads(lesson.read_bytes())
    for cell in notebook["cells"]:
        if "answer" in cell["metadata"].get("tags", []):
            cell["source"] = NO_ANSWERS
    return json.dumps(notebook).encode()


def closed_page(lesson: Path) -> bytes:
    """The page in place of a solution."""
    cell = {"cell_type": "markdown", "id": "closed", "metadata": {}, "source": CLOSED}
    return json.dumps(json.loads(lesson.read_bytes()) | {"cells": [cell]}).encode()


def is_closed_page(notebook: bytes) -> bool:
    with suppress(ValueError, KeyError, TypeError):
        return ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]] == [CLOSED]
    return False


def _is_free(ip: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just released counts as free
        try:
            probe.bind(("" if ip == "*" else ip, port))
        except OSError:
            return False
    return True


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().rpartition("\n")[2][-200:]
    except OSError:
        return ""
