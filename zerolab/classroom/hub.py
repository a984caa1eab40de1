"""The course under JupyterHub, which brings users, servers and limits. From here come the notebooks and the GPUs.

`configure(c)` in jupyterhub_config.py lets JupyterHub run this module in two ways:

    python -m zerolab.classroom.hub work     as a user: brings the copies of the lessons up to date, starts JupyterLab
    python -m zerolab.classroom.hub lend     as a service of the hub: lends GPUs

A notebook shows the broker the token of its server; JupyterHub, and nobody else, says whose token it is.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolab.classroom.broker import LONGEST, Broker
from zerolab.classroom.labs import START_TIMEOUT, Refused, closed_page, is_closed_page
from zerolab.classroom.run import lent_gpus
from zerolab.lab.__main__ import (
    SETTINGS,
    copy_docs,
    copy_lessons,
    copy_notebooks,
    find_course,
    kernel_options,
    write_kernel,
    write_settings,
)
from zerolab.lab.ranks import lease, turns

SERVICE, CULLER = "zerolab-gpus", "zerolab-culler"
WORK = "zerolab"  # in a user's home: the copies
SOCKET, TURNS, LOCK = "gpus", "turns", "lock"  # in the class's folder
LONGEST_PATH = 100  # bytes of a socket's path; Linux takes 107
INTRODUCTION = 10.0  # seconds in which a notebook must show its token
STRANGERS = 32  # notebooks whose token is being looked at
EVERY = 0.5  # seconds between looks at whether the hub is still there


def configure(
    c: Any,
    gpus: int = 0,
    lease_minutes: float = 10.0,
    cull_minutes: float = 30.0,
    solutions: bool = False,
    folder: Path | str = "class",
    accounts: bool | None = None,
) -> None:
    """Add the course to JupyterHub's configuration `c`. Your own lines may come before or after it.

    gpus: how many the broker lends; if torch sees none, it lends numbers and ranks stay on the CPU. lease_minutes: how
    long a lease is guaranteed. cull_minutes: an idle server is stopped after this time. solutions: whether they are
    open. folder: for the broker's socket. accounts: whether JupyterHub's users are accounts of this machine (default:
    whether this is root); if not, all servers run as this user, with homes in `folder`. Raises Refused.
    """
    folder = Path(folder).resolve()
    if len(os.fsencode(folder / SOCKET)) > LONGEST_PATH:
        raise Refused(f"{folder}: a socket needs a shorter path")
    names, rehearsal = lent_gpus(gpus)
    if accounts is None:
        accounts = os.geteuid() == 0
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711 if accounts else 0o700)
    (folder / TURNS).mkdir(exist_ok=True)
    (folder / TURNS).chmod(0o755)
    for number in range(max(2, (os.cpu_count() or 1) // 2)):
        file = folder / TURNS / str(number)
        file.touch()
        file.chmod(0o666 if accounts else 0o600)

    us = [sys.executable, "-m", "zerolab.classroom.hub"]
    c.JupyterHub.bind_url = "http://127.0.0.1:8000"
    if not accounts:
        c.JupyterHub.spawner_class = "simple"
        c.SimpleLocalProcessSpawner.home_dir_template = str(folder / "homes" / "{username}")
    c.Spawner.cmd = [*us, "work", *["--solutions"] * solutions]
    c.Spawner.default_url = "/lab/tree/00_welcome.ipynb"
    c.Spawner.http_timeout = int(START_TIMEOUT)  # a whole room starts at once
    environment = {turns.FOLDER: str(folder / TURNS), "CUDA_VISIBLE_DEVICES": ""}  # only ranks ask for GPUs
    culler = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={round(60 * cull_minutes)}"]
    services: list[dict[str, Any]] = [{"name": CULLER, "command": culler}]
    if names:
        environment[lease.SOCKET] = str(folder / SOCKET)
        if rehearsal:
            environment[lease.REHEARSAL] = "1"
        lend = [*us, "lend", str(folder), ",".join(names), f"--seconds={60 * lease_minutes:g}"]
        services.append({"name": SERVICE, "command": [*lend, *["--accounts"] * accounts]})
    c.Spawner.environment.update(environment)
    c.JupyterHub.services.extend(services)
    scopes = ["list:users", "read:users:activity", "read:servers", "delete:servers"]
    c.JupyterHub.load_roles.append({"name": CULLER, "services": [CULLER], "scopes": scopes})


def work(solutions: bool, rest: list[str]) -> None:
    """Become the user's JupyterLab, on copies of the lessons. rest: further options for it."""
    course, mine = find_course(), Path.home() / WORK
    told = copy_lessons(course / "lessons", mine)
    copy_docs(mine)
    if solutions:
        pages = {page.name: page.read_bytes() for page in sorted((course / "solutions").glob("*.ipynb"))}
    else:
        pages = {lesson.name: closed_page(lesson) for lesson in sorted((course / "lessons").glob("*.ipynb"))}
    for line in told + copy_notebooks(pages, mine / "solutions", is_closed_page):
        print(line, file=sys.stderr)
    os.environ |= {"ZEROLAB_MY": str(mine / "my"), "JUPYTER_PATH": write_kernel(mine / SETTINGS)}
    command = [sys.executable, "-m", "jupyterhub.singleuser", f"--ServerApp.root_dir={mine}"]
    command += [*write_settings(mine / SETTINGS), *kernel_options()]
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, [*command, *rest])


class Door:
    """Lets notebooks in to the broker, each under the name that `who` gives for the token in its first line."""

    def __init__(self, broker: Broker, path: Path, everybody: bool, who: Callable[[str], str | None]) -> None:
        self.broker, self.path, self.who = broker, path, who
        self._room = threading.BoundedSemaphore(STRANGERS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o666 if everybody else 0o600)
        self._listener.listen(STRANGERS)
        self._listener.settimeout(EVERY)

    def look(self) -> None:
        """Wait a moment for a notebook."""
        with suppress(OSError):  # nobody came, or is gone again
            connection, _ = self._listener.accept()
            if self._room.acquire(timeout=EVERY):
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            else:
                _refuse(connection, "too many notebooks ask at once: try again")

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(INTRODUCTION)
            token = lease.token_of(_line(connection))
            name = self.who(token) if token else None
            if name:
                self.broker.join(name, connection)
            else:
                _refuse(connection, "JupyterHub does not know this notebook's token: restart your server")
        except OSError:  # it is gone, or says nothing
            connection.close()
        except Exception as error:
            _refuse(connection, f"JupyterHub does not answer ({type(error).__name__}): try again")
        finally:
            self._room.release()

    def close(self) -> None:
        self._listener.close()
        self.path.unlink(missing_ok=True)


def _line(connection: socket.socket) -> bytes:
    """The first line, and nothing of what follows, which is for the broker."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST:
        if not (byte := connection.recv(1)):
            raise OSError("it is gone")
        line += byte
    return line


def _refuse(connection: socket.socket, why: str) -> None:
    with suppress(OSError):
        connection.sendall(lease.line(refused=why))
    connection.close()


def ask_hub(token: str) -> str | None:
    """Whose token it is, as JupyterHub says; None for nobody's, and for a service's. Raises if the hub is not there."""
    from jupyterhub.services.auth import HubAuth

    if not re.fullmatch(r"[\w-]{1,200}", token, re.ASCII):
        return None
    model = HubAuth().user_for_token(token, use_cache=False)  # a server's token ends with the server
    return model["name"] if model and model.get("kind") == "user" else None


def lend(folder: Path, gpus: list[str], seconds: float, accounts: bool) -> None:
    """Lend GPUs until a signal comes or the hub is gone."""
    ended, hub = threading.Event(), os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ended.set())
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    while not ended.is_set() and os.getppid() == hub:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # the broker of a hub that was killed: it is about to end
            ended.wait(EVERY)
    else:
        return
    broker = Broker(gpus, seconds)
    broker.start()
    door = Door(broker, folder / SOCKET, accounts, ask_hub)
    try:
        while not ended.is_set() and os.getppid() == hub:
            door.look()
    finally:
        door.close()
        broker.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zerolab.classroom.hub", description="What JupyterHub runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("work").add_argument("--solutions", action="store_true")
    lending = commands.add_parser("lend")
    lending.add_argument("folder", type=Path)
    lending.add_argument("gpus", type=lambda names: names.split(","))
    lending.add_argument("--seconds", type=float, required=True)
    lending.add_argument("--accounts", action="store_true")
    options, rest = parser.parse_known_args()
    if options.command == "work":
        work(options.solutions, rest)
    else:
        lend(options.folder, options.gpus, options.seconds, options.accounts)


if __name__ == "__main__":
    main()
