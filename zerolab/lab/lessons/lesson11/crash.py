"""Really killed saves: the ranks of a save as processes that take turns, one of which dies at an operation on files.

    run = play(work, folder, ranks=2)                                  # lets all end; run.operations says what they did
    play(work, folder, ranks=2, death=Death(rank=1, number=3))         # SIGKILL just before rank 1's fourth operation
    play(work, folder, ranks=2, death=Death(1, 0, within=True))        # in the middle of what it writes there

`work(rank, barrier)` runs in a forked process for each rank. Only one process runs at a time, until it ends, dies or
waits in barrier(): so a mistake that needs bad luck shows every time. When a process dies, the others are killed where
they are, as torchrun does. A kill loses what Python had not yet handed to the system, but nothing that the system has:
only a power cut does that, so `run.operations` has the flushes (os.fsync) too.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from zerolab.lab.standstill import Standstill

PATIENCE = 3.0  # seconds that a process stands still in its turn, or computes in it at most four times as long
INDEX = "index.json"
FEW = 10  # bytes: what is longer than that dies in the middle

Work = Callable[[int, Callable[[], None]], None]

_RENAMES = {"os.rename": "rename", "os.link": "link", "os.symlink": "link"}
_OTHERS = {"os.remove": "remove", "os.rmdir": "remove", "os.mkdir": "mkdir", "os.truncate": "open"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Death:
    """Kill `rank` just before its operation `number` (from 0), or `within`: in the middle of what it then writes."""

    rank: int
    number: int
    within: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation on the folder. `path`, `to`: names in it, or absolute ones.

    what: open (to write), rename, link, remove, mkdir, fsync, sync. barriers: how many the rank had passed before.
    file: (inode, size) of what is renamed or flushed. named: when INDEX appears, the (inode, size) of every file that
    it names, None for one that is not there; None in its place if it is not readable.
    """

    rank: int
    barriers: int
    what: str
    path: str
    to: str = ""
    file: tuple[int, int] | None = None
    named: dict[str, tuple[int, int] | None] | None = None

    def __str__(self) -> str:
        return {
            "open": f"opened {self.path} to write it",
            "rename": f"renamed {self.path} to {self.to}",
            "link": f"linked {self.path} to {self.to}",
            "remove": f"removed {self.path}",
            "mkdir": f"made the folder {self.path}",
            "fsync": f"flushed {self.path}",
        }.get(self.what, f"called os.{self.what}()")


@dataclass
class Run:
    """What the processes did. `ended`: rank -> "" (well), "killed", "late", or the error that it raised."""

    operations: list[Operation] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    unequal: bool = False  # a rank waited in a barrier that another did not come to

    def of(self, rank: int) -> list[Operation]:
        return [operation for operation in self.operations if operation.rank == rank]


def play(
    work: Work,
    folder: Path,
    ranks: int,
    order: Sequence[int] | None = None,
    death: Death | None = None,
    full: int | None = None,
    module: ModuleType | None = None,
) -> Run:
    """Run `work` as `ranks` processes that take turns in `order`.

    full: the rank whose disk is full: it cannot write more than a few bytes. module: where `work` comes from, in case
    it has os.fsync under a name of its own.
    """
    run, order = Run(), list(order or range(ranks))
    sys.stdout.flush()
    processes = {rank: _Process(work, folder.resolve(), rank, death, full == rank, module) for rank in order}
    try:
        _take_turns(run, processes, order)
    finally:
        for process in processes.values():
            process.end()
    return run


def _take_turns(run: Run, processes: dict[int, _Process], order: list[int]) -> None:
    waiting: list[int] = []
    turn, reply = order, b"g"
    while turn:
        waiting = []
        for rank in turn:
            state = processes[rank].turn(reply, run)
            if state == "waits":
                waiting.append(rank)
                continue
            run.ended[rank] = state
            if state in ("killed", "late"):
                return
        run.unequal |= 0 < len(waiting) < len(processes)
        reply = b"x" if len(waiting) < len(processes) else b"g"  # whoever is waited for will not come
        turn = [rank for rank in order if rank in waiting]


class _Process:
    """One rank, seen from its parent."""

    def __init__(
        self, work: Work, folder: Path, rank: int, death: Death | None, full: bool, module: ModuleType | None
    ) -> None:
        self.rank, self._text = rank, b""
        self._read, up = os.pipe()
        down, self._write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):
                os.close(self._read)
                os.close(self._write)
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
                if os.getppid() == parent:
                    mine = death if death is not None and death.rank == rank else None
                    _Child(folder, rank, mine, full, up, down).run(work, module)
            os._exit(0)
        os.close(up)
        os.close(down)

    def turn(self, reply: bytes, run: Run) -> str:
        """Let it go on until it waits in a barrier ("waits") or ends; then as in `Run.ended`."""
        os.write(self._write, reply)
        still = Standstill(lambda: [self.pid], PATIENCE)
        while True:
            while b"\n" not in self._text:
                if not select.select([self._read], [], [], 0.1)[0]:
                    if still.lasts():
                        return "late"
                    continue
                if not (more := os.read(self._read, 1 << 16)):
                    return "killed"
                self._text += more
            line, self._text = self._text.split(b"\n", 1)
            said = json.loads(line)
            if "does" in said:
                run.operations.append(_operation(said["does"]))
            else:
                return str(said["state"])

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it, so it is this process and no other
        os.waitpid(self.pid, 0)
        os.close(self._read)
        os.close(self._write)


def _operation(said: dict[str, Any]) -> Operation:
    file, named = said.pop("file"), said.pop("named")
    pairs = None if named is None else {name: None if at is None else (at[0], at[1]) for name, at in named.items()}
    return Operation(**said, file=None if file is None else (file[0], file[1]), named=pairs)


class _Child:
    """One rank, in its own process."""

    def __init__(self, folder: Path, rank: int, death: Death | None, full: bool, up: int, down: int) -> None:
        self.folder, self.rank, self.death, self.full, self.up, self.down = folder, rank, death, full, up, down
        self.count = self.barriers = 0

    def run(self, work: Work, module: ModuleType | None) -> None:
        os.read(self.down, 1)
        signal.signal(signal.SIGPROF, lambda *_: self._endless())
        signal.setitimer(signal.ITIMER_PROF, 4 * PATIENCE)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, until the process ends
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name in ("fsync", "fdatasync", "sync"):
            self._watch_flush(name, module)
        sys.addaudithook(self._hook)
        if self.full:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails with an error
            self._limit()
        state = ""
        try:
            work(self.rank, self.barrier)
        except BaseException as error:
            own = [f for f in traceback.extract_tb(error.__traceback__) if module and f.filename == module.__file__]
            line = f" · line {own[-1].lineno}: {own[-1].line}" if own else ""
            state = f"{type(error).__name__}: {error}{line}"
        self._say(state=state)

    def _endless(self) -> None:
        self._say(state="late")
        os._exit(0)

    def barrier(self) -> None:
        self._say(state="waits")
        if os.read(self.down, 1) != b"g":
            raise RuntimeError("barrier(): another rank did not come")
        self.barriers += 1

    def _say(self, **what: Any) -> None:
        os.write(self.up, json.dumps(what).encode() + b"\n")

    def _watch_flush(self, name: str, module: ModuleType | None) -> None:
        original = getattr(os, name)

        def flush(*args: Any) -> Any:
            if not args:
                self._does("sync", "")
            else:
                number = args[0] if isinstance(args[0], int) else args[0].fileno()
                at = os.fstat(number)
                path = _path_of(number)
                self._does("fsync", self._name(path) if path else "a file", file=(at.st_ino, at.st_size))
            return original(*args)

        for place in (os, module):
            for key, value in list(vars(place).items()) if place else []:
                if value is original:
                    setattr(place, key, flush)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)) and args[2] & _WRITES:
            if (path := self._inside(args[0])) is not None:
                self._does("open", path)
        elif event in _RENAMES and (self._inside(args[0]) or self._inside(args[1])):
            source, to = os.path.abspath(os.fspath(args[0])), self._name(args[1])
            named = self._named(source) if to == INDEX else None
            self._does(_RENAMES[event], self._name(args[0]), to, _at(source), named)
        elif event in _OTHERS:
            relative = len(args) > 1 and isinstance(args[-1], int) and args[-1] >= 0  # to an open folder: rmtree does
            if relative and event != "os.truncate":
                self._does(_OTHERS[event], str(args[0]))
            elif (path := self._inside(args[0])) is not None:
                self._does(_OTHERS[event], path)

    def _inside(self, path: Any) -> str | None:
        """The name in the folder of what an event is about; None for something elsewhere."""
        if isinstance(path, int):
            return None
        name = self._name(path)
        return None if os.path.isabs(name) or name == "." else name

    def _name(self, path: Any) -> str:
        full = os.path.abspath(os.fsdecode(path))
        parent = os.path.realpath(os.path.dirname(full))  # of a link, the folder that it is in counts
        full = os.path.join(parent, os.path.basename(full))
        inside = full == str(self.folder) or full.startswith(f"{self.folder}{os.sep}")
        return os.path.relpath(full, self.folder) if inside else full

    def _named(self, source: str) -> dict[str, tuple[int, int] | None] | None:
        try:
            with open(source, "rb") as file:
                names = json.loads(file.read())["files"]
            return {name: _at(os.path.join(self.folder, name)) for name in names}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _does(self, what: str, path: str, to: str = "", file: Any = None, named: Any = None) -> None:
        about = {"rank": self.rank, "barriers": self.barriers, "what": what, "path": path, "to": to}
        self._say(does=about | {"file": file, "named": named})
        if self.death is not None and self.count == self.death.number:
            if not self.death.within:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system ends whoever writes more than is allowed
            self._limit()
        self.count += 1

    def _limit(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FEW, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _at(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size


def _path_of(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


# -- what a reader finds ---------------------------------------------------------------------------------------------


class Unreadable(Exception):
    """There is no checkpoint that could be loaded. The message says what is missing."""


def load(folder: Path) -> tuple[int, list[bytes]]:
    """The step and the files of the checkpoint in `folder`, by index.json: {"step": 2, "files": [a name per rank]}."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        step, names = index["step"], index["files"]
    except FileNotFoundError:
        raise Unreadable(f"there is no {INDEX}") from None
    except (ValueError, KeyError, TypeError):
        raise Unreadable(f"{INDEX} is not complete") from None
    for name in names:
        if not (folder / name).is_file():
            raise Unreadable(f"{INDEX} names {name}, which is not there")
    return step, [(folder / name).read_bytes() for name in names]
