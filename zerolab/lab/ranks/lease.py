"""In a student's notebook: borrow GPUs for its ranks, for ten minutes, from the classroom's broker (broker.py).

The lease is the open socket. Ranks inherit it, so the broker sees it close when the last of them is gone.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SOCKET = "ZEROLAB_GPUS"  # where the broker listens for this student
REHEARSAL = "ZEROLAB_GPUS_REHEARSAL"  # there are no GPUs, only numbers to lend: ranks stay on the CPU
TOKEN = "JUPYTERHUB_API_TOKEN"  # under JupyterHub: what tells the broker whose notebook this is
MARK = "ZEROLAB_LEASE"  # in the environment of a lease's ranks: which lease they belong to
LONGEST_WAIT = 3600.0  # seconds in the queue


class NoLease(RuntimeError):
    """There are no GPUs for this notebook, which shows this sentence alone, without our frames."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def needed() -> bool:
    """Whether this is a classroom, where a notebook must ask for its GPUs."""
    return bool(os.environ.get(SOCKET))


class Lease:
    """GPUs for this notebook's ranks, until `release` or until `over` says why they were taken back."""

    def __init__(self, connection: socket.socket, gpus: list[str], name: str, seconds: float, rest: bytes) -> None:
        self.gpus, self.seconds = gpus, seconds
        self.rehearsal = bool(os.environ.get(REHEARSAL))
        self.over = ""
        self.starting = threading.RLock()  # held while ranks start, so that none starts once the lease is over
        self._socket, self._name, self._rest, self._released = connection, name, rest, False

    def __str__(self) -> str:
        return f"GPU{'s' * (len(self.gpus) > 1)} {', '.join(self.gpus)}"

    @property
    def fd(self) -> int:
        """The socket's file descriptor, for the ranks to inherit."""
        return self._socket.fileno()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the ranks' environment."""
        return {MARK: self._name, "CUDA_VISIBLE_DEVICES": "" if self.rehearsal else ",".join(self.gpus)}

    def busy(self, yes: bool) -> None:
        """Tell the broker that the start of ranks, or a cell on them, begins or ends. All other time counts as idle."""
        with suppress(OSError):  # the lease is over; the next cell will say so
            self._socket.sendall(line(busy=yes))

    def watch(self, end: Callable[[str], None]) -> None:
        """Call `end(why)`, on a thread of its own, if the GPUs are taken back. `end` must end the ranks."""

        def wait() -> None:
            with suppress(OSError, ValueError):
                while not self.over:
                    answer, self._rest = _next(self._socket, self._rest, None)
                    if self._released:
                        return
                    if answer is None:
                        answer = {"over": "the classroom has ended"}
                    if "over" in answer:
                        with self.starting:
                            self.over = f"{self} went back: {answer['over']}; " + 'lab.start(device="cuda") asks again'
                            end(self.over)
                self.release()

        threading.Thread(target=wait, name="lease", daemon=True).start()

    def release(self) -> None:
        """Close this process's end of the lease. Its ranks must have ended: they hold the lease open too."""
        self._released = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # wakes the thread that reads
        self._socket.close()


def ask(gpus: int, timeout: float = LONGEST_WAIT, tell: Callable[[str], None] = print) -> Lease:
    """Wait for this many GPUs (or for all, if there are fewer), telling the place in the queue. Raises NoLease."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline, rest = time.monotonic() + timeout, b""
    try:
        try:
            connection.connect(os.environ[SOCKET])
            if token := os.environ.get(TOKEN):
                connection.sendall(line(token=token))
            connection.sendall(line(want=gpus))
        except OSError as error:
            raise NoLease(
                f"the classroom that lends GPUs does not answer ({error.strerror}): ask the teacher"
            ) from None
        while True:
            answer, rest = _next(connection, rest, deadline)
            if answer is None:
                raise NoLease("the classroom that lends GPUs has ended: ask the teacher")
            if "refused" in answer:
                raise NoLease(answer["refused"])
            if "place" in answer:
                many = "a GPU" if gpus == 1 else f"{gpus} GPUs"
                tell(f"waiting for {many}: place {answer['place']} in the queue (interrupt this cell to leave it)")
            if "own" in answer:
                state = f"has GPU {', '.join(answer['own'])}" if answer["own"] else "is in the queue already"
                tell(f"waiting: another notebook of yours {state}; lab.stop() there ends that")
            if "gpus" in answer:
                lease = Lease(connection, answer["gpus"], answer["lease"], answer["seconds"], rest)
                length = minutes(lease.seconds)
                tell(f"{lease} for {length}, then until somebody else waits; lab.stop() gives them back")
                return lease
    except BaseException:  # KeyboardInterrupt too: out of the queue
        connection.close()
        raise


def _next(connection: socket.socket, rest: bytes, deadline: float | None) -> tuple[dict[str, Any] | None, bytes]:
    """The next message (None at the end of the stream), and what was read beyond it."""
    while b"\n" not in rest:
        connection.settimeout(None if deadline is None else max(0.01, deadline - time.monotonic()))
        try:
            data = connection.recv(4096)
        except TimeoutError:
            raise NoLease("no GPUs came free in time: try again later") from None
        if not data:
            return None, rest
        rest += data
    line, _, rest = rest.partition(b"\n")
    return json.loads(line), rest


def line(**message: Any) -> bytes:
    """A message, as it is sent."""
    return json.dumps(message).encode() + b"\n"


def token_of(line: bytes) -> str:
    """The token in a notebook's first line; "" if there is none."""
    with suppress(ValueError, RecursionError):
        message = json.loads(line)
        if isinstance(message, dict) and isinstance(message.get("token"), str):
            return message["token"]
    return ""


def minutes(seconds: float) -> str:
    """`10 minutes`, or `45 seconds` for less than one minute."""
    number, unit = (seconds, "second") if seconds < 60 else (seconds / 60, "minute")
    return f"{number:g} {unit}{'s' * (number != 1)}"
