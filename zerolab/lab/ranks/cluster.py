"""Live ranks on the engines of an ipyparallel cluster that runs already: `lab.start(backend="ipyparallel")`.

The cluster may have been started by Slurm, SSH, MPI or by hand; it must find this package on its engines. Only who runs
the ranks is different: cells, values, links and messages are session.py's, and what runs on an engine is rank.py's. The
cluster is left as it was found: `lab.stop` makes the engines nobody's ranks again, and ends none.

A rank has the number that the scheduler gave its process, never the engine's id, which is the order in which engines
happened to register.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from zerolab.lab.ranks import rank as on_engine
from zerolab.lab.ranks import session
from zerolab.lab.ranks.session import Session

FIND_TIMEOUT = 15.0  # until the cluster answers and has engines
ANSWER_TIMEOUT = 60.0  # until each engine has said who it is; it imports torch for that
RELEASE_TIMEOUT = 10.0


@dataclass
class _Engine:
    """An engine, by the cluster's own id, and what it says of itself (rank.describe)."""

    id: int
    host: str
    ranks: dict[str, str]
    gpus: int
    chosen: bool
    own: bool

    def __str__(self) -> str:
        return f"engine {self.id} on {self.host}"


class _EngineRank:
    """What session._Rank is, for an engine; a thread of ipyparallel's client reads what comes from it."""

    def __init__(self, number: int, client: Any, engine: _Engine) -> None:
        self.number, self.client, self.engine = number, client, engine
        self._identity = client._engines[engine.id].encode()
        self._arrived: SimpleQueue = SimpleQueue()
        self._bell, self._ring = socket.socketpair()  # for who waits for several ranks at once
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def send(self, code: str, silent: bool = False) -> str:
        content = {"code": code, "silent": silent, "store_history": False, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": not silent}
        return self._send("execute_request", content, track_outstanding=True, message_future_hook=self._follow).msg_id

    def deliver(self, content: dict[str, Any]) -> None:
        self._send("comm_open", content)

    def _send(self, kind: str, content: dict[str, Any], **options: Any) -> Any:
        # Not through a view: it would keep a history on the engine, and hand over the output without its order.
        return self.client._send(self.client._mux_stream, kind, content=content, ident=self._identity, **options)

    def _follow(self, future: Any) -> None:
        """Of a message that is about to be sent: pass on all that comes of it."""
        name = future.msg_id
        future.iopub_callbacks.append(lambda message: self._output(name, message))
        future.add_done_callback(lambda done: self._finished(name, "execute_reply", done))
        future.output.add_done_callback(lambda done: self._finished(name, "status", done))

    def _finished(self, name: str, kind: str, future: Any) -> None:
        """The reply has come, or all output has. The client says so of the cells of dead engines, too."""
        if not self._present:
            return
        aborted = kind == "execute_reply" and type(future.result()).__name__ == "TaskAborted"
        self._put(name, kind, {"status": "aborted" if aborted else "ok", "execution_state": "idle"})

    def _output(self, name: str, message: dict[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind != "status":  # that a cell is through is told by its futures
            self._put(name, kind, dict(message["content"]))

    def _put(self, name: str, kind: str, content: dict[str, Any]) -> None:
        self._arrived.put((name, kind, content))
        with suppress(OSError):  # it rings already, or nobody listens any more
            self._ring.send(b".")

    @property
    def sockets(self) -> list[Any]:
        return [self._bell]

    def messages(self) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        with suppress(Empty):
            while True:
                yield self._arrived.get_nowait()

    @property
    def _present(self) -> bool:
        return self.client is not None and self.engine.id in self.client.ids

    @property
    def fate(self) -> str | None:
        return None if self._present else f"is gone: {self.engine} has left the cluster"

    def interrupt(self) -> None:
        self._signal("SIGINT")

    def kill(self) -> None:
        """Of an engine that reacts to nothing else, and is lost to everybody."""
        self._signal("SIGKILL")
        self.client = None

    def _signal(self, name: str) -> None:
        if self._present:
            self.client.send_signal(getattr(signal, name), targets=self.engine.id, block=False)

    def close(self) -> None:
        self._bell.close()
        self._ring.close()


class ClusterSession(Session):
    """Live ranks that are engines. `find` makes it."""

    _revival = 'start its engine again, and then the ranks: lab.start(backend="ipyparallel")'

    def __init__(self, device: str, client: Any, engines: list[_Engine]) -> None:
        self._client, self._engines = client, engines
        super().__init__(len(engines), device)

    def _open(self) -> None:
        """Adopt the engines. The store is here if all are, else on rank 0's host."""
        hosts, here = [engine.host for engine in self._engines], _here()
        if set(hosts) == {here}:
            self._open_store()
        else:
            other = next((host for host in [*hosts, here] if host != hosts[0]), here)
            self._address, self._port = self._ask(0, on_engine.serve, other)
            patience = timedelta(seconds=FIND_TIMEOUT)
            try:
                self._store = dist.TCPStore(self._address, self._port, wait_for_workers=False, timeout=patience)
            except dist.DistError as error:
                where = f"{self._address}, port {self._port}"
                text = f"rank 0's host, {hosts[0]}, cannot be reached from here at {where}, where the ranks meet"
                raise RuntimeError(f"{text}: run the notebook inside the cluster's network") from error
        for number, engine in enumerate(self._engines):
            local = hosts[:number].count(engine.host)
            world = {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": self.size}
            world |= {"LOCAL_WORLD_SIZE": hosts.count(engine.host)}
            world |= {"MASTER_ADDR": self._address, "MASTER_PORT": self._port, "TORCHELASTIC_USE_AGENT_STORE": True}
            if self.device == "cpu":
                world["CUDA_VISIBLE_DEVICES"] = ""
            self._ask(number, on_engine.adopt, {name: str(value) for name, value in world.items()})
            self._ranks[number] = _EngineRank(number, self._client, engine)
        deadline = time.monotonic() + FIND_TIMEOUT
        for rank in self._ranks.values():
            _hear(rank, deadline)

    def _ask(self, number: int, function: Any, *args: Any) -> Any:
        engine = self._engines[number]
        return _get(_start(self._client, engine.id, function, *args), str(engine))

    def _launch(self, ranks: Iterable[int]) -> None:
        gone = ", ".join(f"rank {rank} ({self._engines[rank]})" for rank in ranks)
        raise RuntimeError(f"not in the cluster any more: {gone}; {self._revival}")

    def _note(self, cell: int, rank: int, what: str) -> None:
        with suppress(dist.DistError):  # the store may have died with rank 0
            super()._note(cell, rank, what)

    def _hint(self, dead: bool) -> str:
        return self._revival if dead else super()._hint(dead)

    def _end(self) -> None:
        """The engines are nobody's ranks again. One that is still busy becomes so when it is done."""
        _let_go(self._client, self._engines)
        for rank in self._ranks.values():
            rank.client = None
            rank.close()


def find(
    ranks: int | None, device: str, profile: str | None, connection: str | os.PathLike | None
) -> tuple[ClusterSession, str]:
    """Ranks on the engines of the cluster, and the end of the sentence that says what they are."""
    client, engines = _connect(profile, connection), []
    try:
        ids = _wait_for_engines(client, ranks)
        answers = {id: _start(client, id, on_engine.describe, device != "cpu") for id in ids}
        for id, answer in answers.items():
            engines.append(_Engine(id, **_get(answer, f"engine {id}")))
        engines, by = _sort(engines)
        engines = engines[:ranks]
        kind = _choose_device(engines, device)
        live = ClusterSession(kind, client, engines)
    except BaseException:
        _let_go(client, engines)
        raise
    hosts: dict[str, list[str]] = {}
    for number, engine in enumerate(engines):
        hosts.setdefault(engine.host, []).append(str(number))
    places = "; ".join(f"{', '.join(numbers)} on {host}" for host, numbers in hosts.items())
    on_cpu = "on the CPU, talking through gloo: bytes and calls are real, times are those of its network."
    rest = session.ON_GPUS if kind == "nccl" else on_cpu
    return live, f"of an ipyparallel cluster, numbered by {by} ({places}), {rest}"


def _connect(profile: str | None, connection: str | os.PathLike | None) -> Any:
    try:
        import ipyparallel
    except ImportError:
        text = "is not installed here, nor perhaps on the cluster: pip install 'zerolab[cluster]' (or ipyparallel)"
        raise RuntimeError(f'backend="ipyparallel", but ipyparallel {text}') from None
    where = f"{os.fspath(connection)}" if connection else f"profile {profile or 'default'!r}"
    try:
        with redirect_stdout(io.StringIO()):  # it tells that it waits
            file = os.fspath(connection) if connection else None
            return ipyparallel.Client(file, profile=profile, timeout=FIND_TIMEOUT)
    except (OSError, ValueError) as error:  # TimeoutError too
        text = f"no ipyparallel cluster answered within {FIND_TIMEOUT:g} s ({where}): {error}"
        cure = (
            'start one, such as: ipcluster start -n 4; or name its file: connection=".../ipcontroller-...-client.json"'
        )
        raise RuntimeError(f"{text}\n{cure}") from None


def _wait_for_engines(client: Any, ranks: int | None) -> list[int]:
    """The ids of the engines, when there are enough."""
    deadline = time.monotonic() + FIND_TIMEOUT
    while len(client.ids) < (ranks or 1):
        if time.monotonic() > deadline:
            few = f"{len(client.ids)} engines, but {ranks} ranks need as many" if client.ids else "no engines"
            text = f"the ipyparallel cluster has {few} (after {FIND_TIMEOUT:g} s): ipcluster engines -n 4 starts four"
            raise RuntimeError(text)
        time.sleep(0.05)
    return sorted(client.ids)


def _start(client: Any, id: int, function: Any, *args: Any) -> Any:
    return client[id].apply_async(function, *args)


def _get(answer: Any, who: str) -> Any:
    """What a call on an engine has returned."""
    import ipyparallel

    try:
        return answer.get(ANSWER_TIMEOUT)
    except TimeoutError:
        raise RuntimeError(
            f"{who} did not answer within {ANSWER_TIMEOUT:g} s: is it busy with something else?"
        ) from None
    except ipyparallel.RemoteError as error:
        cure = ": install there what is installed here" if "Import" in error.ename or "Module" in error.ename else ""
        raise RuntimeError(f"{who}: {error.ename}: {error.evalue}{cure}") from None


def _sort(engines: list[_Engine]) -> tuple[list[_Engine], str]:
    """The engines in the order of their ranks, and who gave them these."""
    for name in on_engine.SCHEDULER:
        told = [engine for engine in engines if name in engine.ranks]
        if not told:
            continue
        if len(told) < len(engines):
            other = next(engine for engine in engines if engine not in told)
            raise RuntimeError(f"{told[0]} has {name} in its environment, {other} has not: start all in the same way")
        numbered: dict[int, _Engine] = {}
        for engine in engines:
            if not engine.ranks[name].isdecimal():
                raise RuntimeError(f"{engine} has {name}={engine.ranks[name]!r}, which is no rank")
            number = int(engine.ranks[name])
            if number in numbered:
                both = f"{numbered[number]} and {engine} both have {name}={number}"
                raise RuntimeError(f"{both}: give each engine a rank of its own, or none any")
            numbered[number] = engine
        if missing := set(range(len(engines))) - numbered.keys():
            text = f"the ranks of {len(engines)} engines by {name} are {', '.join(map(str, sorted(numbered)))}"
            raise RuntimeError(f"{text}: rank {min(missing)} is missing; has its engine started?")
        return [numbered[number] for number in sorted(numbered)], name
    return sorted(engines, key=lambda engine: (engine.host, engine.id)), "host and engine"


def _choose_device(engines: list[_Engine], device: str) -> str:
    """A GPU each, where all ranks can have one and it was asked for or said that they are ours; else the CPU."""
    hosts = [engine.host for engine in engines]
    poor = [engine for engine in engines if engine.gpus < (1 if engine.own else hosts.count(engine.host))]
    if device == "cuda" and poor:
        raise RuntimeError(f'device="cuda", but not every rank can have a GPU: {poor[0]} sees {poor[0].gpus}')
    ours = device == "cuda" or all(engine.chosen for engine in engines)
    return "nccl" if device != "cpu" and not poor and ours else "cpu"


def _hear(rank: _EngineRank, deadline: float) -> None:
    """Until an engine's output reaches us: what it publishes before the controller has our subscription is lost."""
    while time.monotonic() < deadline:
        name = rank.send("", silent=True)
        again = time.monotonic() + 1.0
        while time.monotonic() < again:
            if any((name, "status") == message[:2] for message in rank.messages()):
                return
            time.sleep(0.01)
    raise RuntimeError(f"rank {rank.number}: no output of {rank.engine} came within {FIND_TIMEOUT:g} s")


def _let_go(client: Any, engines: list[_Engine]) -> None:
    """The engines are nobody's ranks again, as far as they can be reached."""
    living = [engine.id for engine in engines if engine.id in client.ids]
    if living:
        with suppress(Exception):  # there is nobody to tell
            client[living].apply_async(on_engine.release).get(RELEASE_TIMEOUT)
    client.close(linger=1000)


def _here() -> str:
    return socket.gethostname()
