"""Who has which GPU. A lease is an open socket, so it ends when the processes that hold it end, however they do.

Each student has a Unix socket of their own, which tells the broker who is asking. (Under JupyterHub there is one for
all, and a token tells: hub.py.) A notebook connects, says how many GPUs it wants, learns its place in the queue, and
then learns which GPUs it has. Its ranks inherit the connection, so the lease ends when the last of them is gone and not
before: no GPU is ever lent twice.

Messages are lines of JSON. From the notebook: {"want": 2}, {"busy": true}. To it: {"place": 1}, {"own": ["3"]},
{"gpus": ["0", "1"], "lease": "...", "seconds": 600.0}, {"over": "why"}, {"refused": "why"}.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zerolab.lab.ranks.lease import MARK, minutes

TICK = 0.2  # seconds between looks at the clock
LONGEST = 4096  # bytes of a line
CONNECTIONS = 8  # of one student at once


@dataclass(eq=False)
class Client:
    """A notebook that waits for GPUs (`gpus` is empty) or has them."""

    student: str
    socket: socket.socket
    buffer: bytes = b""
    want: int = 0
    place: int | None = None  # the place that it was last told
    gpus: list[str] = field(default_factory=list)
    lease: str = ""
    since: float = 0.0
    used: float = 0.0
    busy: bool = False
    ended: float | None = None  # when it was told to give them back


@dataclass(frozen=True)
class Entry:
    """For the board: a student's GPUs, or the place in the queue. left: seconds still guaranteed."""

    student: str
    gpus: tuple[str, ...]
    left: float = 0.0
    place: int = 0


class Broker:
    """Lends `gpus`, named as in CUDA_VISIBLE_DEVICES, first come, first served.

    seconds: how long a lease is guaranteed; it then goes on until somebody else waits. idle: seconds without a cell
    after which a lease is taken back. grace: seconds that the holder has to let go before its ranks are killed.
    """

    def __init__(self, gpus: Sequence[str], seconds: float = 600.0, idle: float = 120.0, grace: float = 10.0) -> None:
        if len(set(gpus)) != len(gpus):
            raise ValueError(f"a GPU is named twice: {', '.join(gpus)}")
        self.gpus, self.seconds, self.idle, self.grace = list(gpus), seconds, idle, grace
        self._clients: list[Client] = []  # in the order in which they asked
        self._selector = selectors.DefaultSelector()
        self._paths: list[Path] = []
        self._lock = threading.Lock()  # the board looks from another thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="broker")

    def open(self, student: str, path: Path) -> None:
        """Listen for a student's notebooks at `path`, which only this user may open."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(CONNECTIONS)
        listener.setblocking(False)
        self._paths.append(path)
        self._selector.register(listener, selectors.EVENT_READ, student)

    def join(self, student: str, connection: socket.socket) -> None:
        """Serve a student's notebook that is connected already. The caller knows who it is."""
        with self._lock:
            self._welcome(student, connection)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End all leases. The caller must end the ranks that use the GPUs."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        for key in list(self._selector.get_map().values()):
            _socket_of(key).close()
        self._selector.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def table(self) -> list[Entry]:
        """Who has what, and who waits."""
        with self._lock:
            now, entries = time.monotonic(), []
            for client in self._clients:
                if client.gpus:
                    left = max(0.0, client.since + self.seconds - now)
                    entries.append(Entry(client.student, tuple(client.gpus), left))
            return entries + [Entry(client.student, (), 0.0, i) for i, client in enumerate(self._queue(), 1)]

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(TICK):
                with self._lock:
                    if isinstance(key.data, Client):
                        self._read(key.data)
                    else:
                        self._accept(_socket_of(key), key.data)
            with self._lock:
                self._take_back()
                self._lend()

    def _accept(self, listener: socket.socket, student: str) -> None:
        with suppress(OSError):  # the notebook is gone again
            connection, _ = listener.accept()
            self._welcome(student, connection)

    def _welcome(self, student: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        client = Client(student, connection)
        others = [key.data for key in self._selector.get_map().values() if isinstance(key.data, Client)]
        self._selector.register(connection, selectors.EVENT_READ, client)
        if sum(other.student == student for other in others) >= CONNECTIONS:
            self._refuse(client, f"{CONNECTIONS} of your notebooks are already in the queue")

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, client.buffer = (client.buffer + data).split(b"\n")
        for line in lines:
            self._hear(client, line)
        if len(client.buffer) > LONGEST:
            client.buffer = b""
            self._refuse(client, "that is not a message")

    def _hear(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._refuse(client, "that is not a message")
        elif isinstance(message.get("busy"), bool):
            client.busy, client.used = message["busy"], time.monotonic()
        elif "want" in message and not client.want:
            self._ask(client, message["want"])

    def _ask(self, client: Client, want: Any) -> None:
        if not isinstance(want, int) or isinstance(want, bool) or want < 1:
            self._refuse(client, f"{want!r} is not a number of GPUs")
        else:
            client.want = min(want, len(self.gpus))
            self._clients.append(client)

    def _refuse(self, client: Client, why: str) -> None:
        self._send(client, {"refused": why})
        if not client.gpus:  # else its ranks may still live, and its lease must end as any other
            self._drop(client)

    def _send(self, client: Client, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the notebook does not read, or is gone; both are dealt with elsewhere
            client.socket.send(json.dumps(message).encode() + b"\n")

    def _drop(self, client: Client) -> None:
        if client.socket.fileno() < 0:
            return
        self._selector.unregister(client.socket)
        client.socket.close()
        if client in self._clients:
            self._clients.remove(client)

    def _queue(self) -> list[Client]:
        """Who waits: one notebook per student, and none of a student who has GPUs already."""
        seen = {client.student for client in self._clients if client.gpus}
        queue = []
        for client in self._clients:
            if not client.gpus and client.student not in seen:
                seen.add(client.student)
                queue.append(client)
        return queue

    def _take_back(self) -> None:
        now, waiting = time.monotonic(), any(not client.gpus for client in self._clients)
        for client in [client for client in self._clients if client.gpus]:
            if client.ended is not None:
                if now > client.ended + self.grace and not _kill_ranks(client.lease):
                    self._drop(client)
                continue
            why = ""
            if not client.busy and now > client.used + self.idle:
                why = f"no cell ran on them for {minutes(self.idle)}"
            elif waiting and now > client.since + self.seconds:
                why = f"the lease of {minutes(self.seconds)} is over and others are waiting"
            if why:
                client.ended = now
                self._send(client, {"over": why})

    def _lend(self) -> None:
        """Lend strictly in turn. If small requests could overtake large ones, the large ones might wait forever."""
        lent = {gpu for client in self._clients for gpu in client.gpus}
        free = [gpu for gpu in self.gpus if gpu not in lent]
        queue = self._queue()
        while queue and queue[0].want <= len(free):
            client = queue.pop(0)
            client.gpus, free = free[: client.want], free[client.want :]
            client.lease, client.since = secrets.token_hex(8), time.monotonic()
            client.used = client.since
            self._send(client, {"gpus": client.gpus, "lease": client.lease, "seconds": self.seconds})
        for place, client in enumerate(queue, 1):
            if client.place != place:
                client.place = place
                self._send(client, {"place": place})
        has = {client.student: client.gpus for client in self._clients if client.gpus}
        for client in self._clients:
            if not client.gpus and client not in queue and client.place != 0:
                client.place = 0
                self._send(client, {"own": has.get(client.student, [])})


def _kill_ranks(lease: str) -> bool:
    """Kill the processes of this lease. Returns whether there were any."""
    found = False
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == lease:
                found = True
                process.kill()
    return found


def _socket_of(key: selectors.SelectorKey) -> socket.socket:
    assert isinstance(key.fileobj, socket.socket)  # nothing else is registered
    return key.fileobj
