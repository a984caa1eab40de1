"""Live ranks on the engines of a running ipyparallel cluster: `lab.start(backend="ipyparallel")`.

Slurm, SSH, MPI or a person may have started the cluster; this package must be installed on its engines. Only the
processes differ from other live ranks: live.py still handles cells, values, links and messages, and rank.py is what
runs on an engine. `lab.stop` leaves the cluster as it was: the engines live on and stop being ranks.

Each rank has the number that the scheduler gave its process, never the engine's id, which is only the order in which
the engines happened to register.
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
from zerolab.lab.ranks.live import ON_GPUS, Session

FIND_TIMEOUT = 15.0  # seconds for the cluster to answer and to have engines
ANSWER_TIMEOUT = 60.0  # seconds for an engine to say who it is, which makes it import torch
RELEASE_TIMEOUT = 10.0


@dataclass
class _Engine:
    """An engine: the cluster's id for it, and its own answers (rank.describe)."""

    id: int
    host: str
    ranks: dict[str, str]
    gpus: int
    chosen: bool
    own: bool

    def __str__(self) -> str:
        return f"engine {self.id} on {self.host}"


class _EngineRank:
    """An engine with the methods of live._Rank. A thread of ipyparallel's client reads the engine's messages."""

    def __init__(self, number: int, client: Any, engine: _Engine) -> None:
        self.number, self.client, self.engine = number, client, engine
        self._identity = client._engines[engine.id].encode()
        self._arrived: SimpleQueue = SimpleQueue()
        self._bell, self._ring = socket.socketpair()  # so that one poll can wait for several ranks
        self._bell.setblocking(False)
        self._ring.setblocking(False)

    def send(self, code: str, silent: bool = False) -> str:
        content = {"code": code, "silent": silent, "store_history": False, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": not silent}
        return self._send("execute_request", content, track_outstanding=True, message_future_hook=self._follow).msg_id

    def deliver(self, content: dict[str, Any]) -> None:
        self._send("comm_open", content)

    def _send(self, kind: str, content: dict[str, Any], **options: Any) -> Any:
        # A view would keep a history on the engine and lose the order of the output.
        return self.client._send(self.client._mux_stream, kind, content=content, ident=self._identity, **options)

    def _follow(self, future: Any) -> None:
        """Pass on everything that answers this message, which is about to be sent."""
        name = future.msg_id
        future.iopub_callbacks.append(lambda message: self._output(name, message))
        future.add_done_callback(lambda done: self._finished(name, "execute_reply", done))
        future.output.add_done_callback(lambda done: self._finished(name, "status", done))

    def _finished(self, name: str, kind: str, future: Any) -> None:
        """The reply has come, or all of the output. (The client also says this of the cells of dead engines.)"""
        if not self._present:
            return
        aborted = kind == "execute_reply" and type(future.result()).__name__ == "TaskAborted"
        self._put(name, kind, {"status": "aborted" if aborted else "ok", "execution_state": "idle"})

    def _output(self, name: str, message: dict[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind != "status":  # the futures say when a cell is done
            self._put(name, kind, dict(message["content"]))

    def _put(self, name: str, kind: str, content: dict[str, Any]) -> None:
        self._arrived.put((name, kind, content))
        with suppress(OSError):  # the bell is ringing already, or nobody listens any more
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
        """Kill an engine that reacts to nothing else. Its cluster loses it too."""
        self._signal("SIGKILL")
        self.client = None

    def _signal(self, name: str) -> None:
        if self._present:
            self.client.send_signal(getattr(signal, name), targets=self.engine.id, block=False)

    def close(self) -> None:
        self._bell.close()
        self._ring.close()


class ClusterSession(Session):
    """Live ranks that are engines. `find` makes one."""

    _revival = 'start its engine again, and then the ranks: lab.start(backend="ipyparallel")'

    def __init__(self, device: str, client: Any, engines: list[_Engine]) -> None:
        self._client, self._engines = client, engines
        super().__init__(len(engines), device)

    def _open(self) -> None:
        """Adopt the engines. The store is in this process if all engines are on this host, else on rank 0's."""
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
            world: dict[str, Any] = {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": self.size}
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

    def launch(self, ranks: Iterable[int]) -> None:
        gone = ", ".join(f"rank {rank} ({self._engines[rank]})" for rank in ranks)
        raise RuntimeError(f"no longer in the cluster: {gone}; {self._revival}")

    def _note(self, cell: int, rank: int, what: str) -> None:
        with suppress(dist.DistError):  # the store may have died with rank 0
            super()._note(cell, rank, what)

    def _hint(self, dead: bool) -> str:
        return self._revival if dead else super()._hint(dead)

    def _end(self) -> None:
        """Let the engines go. One that is busy stops being a rank once it is done."""
        _let_go(self._client, self._engines)
        for rank in self._ranks.values():
            rank.client = None
            rank.close()


def find(
    ranks: int | None, device: str, profile: str | None, connection: str | os.PathLike | None
) -> tuple[ClusterSession, str]:
    """Make ranks of the cluster's engines. Returns them and the end of the sentence that describes them."""
    client = _connect(profile, connection)
    engines: list[_Engine] = []
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
    on_cpu = "on the CPU, talking through gloo: bytes and calls are real, times are those of the cluster's network."
    rest = ON_GPUS if kind == "nccl" else on_cpu
    return live, f"of an ipyparallel cluster, numbered by {by} ({places}), {rest}"


def _connect(profile: str | None, connection: str | os.PathLike | None) -> Any:
    try:
        import ipyparallel
    except ImportError:
        text = "is not installed here, and perhaps not on the cluster: pip install 'zerolab[cluster]' (or ipyparallel)"
        raise RuntimeError(f'backend="ipyparallel", but ipyparallel {text}') from None
    where = f"{os.fspath(connection)}" if connection else f"profile {profile or 'default'!r}"
    try:
        with redirect_stdout(io.StringIO()):  # it prints that it is waiting
            file = os.fspath(connection) if connection else None
            return ipyparallel.Client(file, profile=profile, timeout=FIND_TIMEOUT)
    except (OSError, ValueError) as error:  # TimeoutError too
        text = f"no ipyparallel cluster answered within {FIND_TIMEOUT:g} s ({where}): {error}"
        cure = 'start one: ipcluster start -n 4; or name its file: connection=".../ipcontroller-...-client.json"'
        raise RuntimeError(f"{text}\n{cure}") from None


def _wait_for_engines(client: Any, ranks: int | None) -> list[int]:
    """Wait until there are enough engines. Returns their ids."""
    deadline = time.monotonic() + FIND_TIMEOUT
    while len(client.ids) < (ranks or 1):
        if time.monotonic() > deadline:
            few = f"{len(client.ids)} engines, too few for {ranks} ranks" if client.ids else "no engines"
            text = f"the ipyparallel cluster has {few} (after {FIND_TIMEOUT:g} s): ipcluster engines -n 4 starts four"
            raise RuntimeError(text)
        time.sleep(0.05)
    return sorted(client.ids)


def _start(client: Any, id: int, function: Any, *args: Any) -> Any:
    return client[id].apply_async(function, *args)


def _get(answer: Any, who: str) -> Any:
    """The result of a call on an engine."""
    import ipyparallel

    try:
        return answer.get(ANSWER_TIMEOUT)
    except TimeoutError:
        raise RuntimeError(
            f"{who} did not answer within {ANSWER_TIMEOUT:g} s: is it busy with something else?"
        ) from None
    except ipyparallel.RemoteError as error:
        cure = (
            ": install on the cluster what is installed here"
            if "Import" in error.ename or "Module" in error.ename
            else ""
        )
        raise RuntimeError(f"{who}: {error.ename}: {error.evalue}{cure}") from None


def _sort(engines: list[_Engine]) -> tuple[list[_Engine], str]:
    """The engines in rank order, and what gave them their ranks."""
    for name in on_engine.SCHEDULER:
        told = [engine for engine in engines if name in engine.ranks]
        if not told:
            continue
        if len(told) < len(engines):
            other = next(engine for engine in engines if engine not in told)
            raise RuntimeError(
                f"{told[0]} has {name} in its environment, {other} does not: start them all the same way"
            )
        numbered: dict[int, _Engine] = {}
        for engine in engines:
            if not engine.ranks[name].isdecimal():
                raise RuntimeError(f"{engine} has {name}={engine.ranks[name]!r}, which is not a rank")
            number = int(engine.ranks[name])
            if number in numbered:
                both = f"{numbered[number]} and {engine} both have {name}={number}"
                raise RuntimeError(f"{both}: give each engine its own rank, or give none of them one")
            numbered[number] = engine
        if missing := set(range(len(engines))) - numbered.keys():
            text = f"by {name}, the ranks of {len(engines)} engines are {', '.join(map(str, sorted(numbered)))}"
            raise RuntimeError(f"{text}: rank {min(missing)} is missing; has its engine started?")
        return [numbered[number] for number in sorted(numbered)], name
    return sorted(engines, key=lambda engine: (engine.host, engine.id)), "host and engine"


def _choose_device(engines: list[_Engine], device: str) -> str:
    """Return "nccl" if each rank can have a GPU and we were asked to use them or told they are ours, else "cpu"."""
    hosts = [engine.host for engine in engines]
    poor = [engine for engine in engines if engine.gpus < (1 if engine.own else hosts.count(engine.host))]
    if device == "cuda" and poor:
        raise RuntimeError(f'device="cuda", but not every rank can have a GPU: {poor[0]} sees {poor[0].gpus}')
    ours = device == "cuda" or all(engine.chosen for engine in engines)
    return "nccl" if device != "cpu" and not poor and ours else "cpu"


def _hear(rank: _EngineRank, deadline: float) -> None:
    """Wait until an engine's output reaches us. What it publishes before the controller knows us is lost."""
    while time.monotonic() < deadline:
        name = rank.send("", silent=True)
        again = time.monotonic() + 1.0
        while time.monotonic() < again:
            if any((name, "status") == message[:2] for message in rank.messages()):
                return
            time.sleep(0.01)
    raise RuntimeError(f"rank {rank.number}: no output came from {rank.engine} within {FIND_TIMEOUT:g} s")


def _let_go(client: Any, engines: list[_Engine]) -> None:
    """Make the engines stop being ranks, as far as they can be reached."""
    living = [engine.id for engine in engines if engine.id in client.ids]
    if living:
        with suppress(Exception):  # nobody is left to be told
            client[living].apply_async(on_engine.release).get(RELEASE_TIMEOUT)
    client.close(linger=1000)


def _here() -> str:
    return socket.gethostname()
