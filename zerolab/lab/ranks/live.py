"""Live ranks: a `Session` is several IPython kernels that form one process group and run the notebook's cells.

Each rank is a process of its own (rank.py), which learns who it is from the variables that torchrun sets. This process
holds the store where the ranks meet, sends them cells, and collects what they print. When a rank fails, it tells the
ranks that wait for it (guard.py). Everything listens on the loopback interface only.

session.py is what a notebook calls. cluster.py makes ranks of the engines of an ipyparallel cluster.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import zmq
from jupyter_client.blocking import BlockingKernelClient
from traitlets import Instance

from zerolab.lab.ranks import lease, network, notices, registry, report, turns
from zerolab.lab.ranks.rank import MIME, NAME, TARGET
from zerolab.lab.ranks.report import Failure, Misused, Plain, RankFailure, Result
from zerolab.world import nursery
from zerolab.world.processes import Patience

# Seconds until a collective fails when a rank is missing, and nothing tells the others that it will not come. Gloo
# counts those in which a laptop sleeps.
GROUP_TIMEOUT = 60.0
START_TIMEOUT = 300.0  # seconds: torch is imported, perhaps on a machine whose cores are all taken
INTERRUPT_TIMEOUT = 17.0  # seconds, after which a rank that ignores an interrupt is killed
PATIENCE = 5.0  # how long the other ranks may go on after one has failed
LIVES = 4  # of a rank, in cells that start the dead again: one that has died so often will not get any further
LOG = "log"  # the file with what ranks write past Python, to their stdout and stderr
LOOK = 0.2  # seconds: a longer time between two looks counts as this much, since the machine stood still
# Kept out of the ranks' environment: the server's tokens, which any cell could print, and settings of another world.
NOT_FOR_RANKS = ("JPY_", "JUPYTER_TOKEN", "JUPYTERHUB_", "GLOO_", "SLURM_")

ON_GPUS = "with a GPU each: `.to(device)` puts a tensor there, which NCCL carries; gloo carries what is on the CPU."


class NoRanks(Plain, RuntimeError):
    """There are no live ranks."""


class CannotTravel(Plain, TypeError):
    """This value cannot be sent to another process."""


class _Client(BlockingKernelClient):
    """With jupyter_client 7, which Colab has, sockets would belong to an event loop, and a cell keeps that busy."""

    context = Instance(zmq.Context)

    def _context_default(self) -> zmq.Context:
        self._created_context = True
        return zmq.Context()


@dataclass
class _Rank:
    """The process of one rank, and the sockets to its kernel."""

    number: int
    process: nursery.Forked | nursery.Fresh
    file: Path  # where the kernel writes its ports and its key
    client: _Client | None = None
    taken: str = ""  # why its GPU was taken back, which ended the rank
    heard: int = 0  # bytes of the ranks' log before its last cell

    @property
    def _connected(self) -> _Client:
        assert self.client is not None, f"rank {self.number} has not been connected"
        return self.client

    def connect(self) -> bool:
        """Connect to the kernel if it is up; return whether it was."""
        try:
            json.loads(self.file.read_text())
        except (FileNotFoundError, ValueError):
            return False
        self.client = _Client(connection_file=str(self.file))
        self.client.load_connection_file()
        self.client.start_channels(stdin=False, hb=False, control=False)
        self.file.unlink()
        return True

    def send(self, code: str, silent: bool = False) -> str:
        """Send a cell. Returns the id of the message, which the answers will name."""
        self.heard = (self.file.parent / LOG).stat().st_size
        return self._connected.execute(
            code, silent=silent, store_history=False, allow_stdin=False, stop_on_error=not silent
        )

    def deliver(self, content: dict[str, Any]) -> None:
        """Send values, in the message that opens a Jupyter comm."""
        self._connected.shell_channel.send(self._connected.session.msg("comm_open", content))

    @property
    def sockets(self) -> list[Any]:
        """These become readable when messages arrive."""
        return [self._connected.iopub_channel.socket, self._connected.shell_channel.socket]

    def messages(self) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
        """What the kernel has sent so far: (id of the message that it answers, type, content)."""
        for socket_ in self.sockets:
            while True:
                try:
                    _, answer = self._connected.session.recv(socket_, zmq.NOBLOCK)
                except zmq.Again:
                    break
                if answer is None:
                    break
                yield answer["parent_header"].get("msg_id"), answer["header"]["msg_type"], answer["content"]

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
            self.client = None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and whatever it started
        self.process.join(10.0)
        self.close()

    def interrupt(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)

    @property
    def fate(self) -> str | None:
        """How the process ended; None while it lives."""
        code = self.process.exitcode
        if code is None:
            return None
        if code >= 0:
            return f"exited with code {code}"
        if why := self.taken or notices.of(self.process.pid):
            return f"was ended: {why}"
        cause = " (out of memory, or by hand)" if code == -signal.SIGKILL else ""
        if code == -signal.SIGABRT and (why := self._last_words()):
            cause = f" ({why})"
        return f"was killed by {signal.Signals(-code).name}{cause}"

    def _last_words(self) -> str:
        """Of what the ranks wrote since the cell began (they share the log): C++'s last error that nobody caught,
        as by gloo's thread where a message does not fit; or else the last line, as by the allocator."""
        with suppress(OSError):  # the session is over
            said = (self.file.parent / LOG).read_bytes()[self.heard :].decode(errors="replace").strip()
            if errors := re.findall(r"what\(\):\s*(?:\[.*?\][ .]*)?(.+)", said):
                return errors[-1].strip()
            return f"last written: {said.splitlines()[-1]}" if said else ""
        return ""


class Session:
    """`size` live ranks. `session.start` makes one."""

    _revival = "lab.reset() restarts the dead"

    def __init__(self, size: int, device: str, lent: lease.Lease | None = None) -> None:
        self.size, self.device = size, device  # device: "cpu", "nccl" or "shared"
        self._lease = lent  # for its GPUs, in a classroom
        self.emulated: str | None = None  # the emulated link, as it was asked for
        self._ranks: dict[int, Any] = {}  # of _Rank, or of a class with the same methods
        self._cells, self._worlds = itertools.count(1), itertools.count()
        self._lives = dict.fromkeys(range(size), 0)  # how many lives of a rank have ended
        self._always: list[str] = []  # cells that a rank runs first when it is started again
        self._open()
        if lent is not None:
            lent.watch(self._lose)

    def _open_store(self) -> None:
        # TCPStore's own socket would listen on all interfaces, and a port that was only looked up can be lost again.
        listener = socket.create_server(("127.0.0.1", 0))
        self._address, self._port, fd = "127.0.0.1", int(listener.getsockname()[1]), listener.detach()
        self._store = dist.TCPStore(self._address, self._port, None, True, wait_for_workers=False, master_listen_fd=fd)

    def _open(self) -> None:
        self._open_store()
        self._folder = Path(tempfile.mkdtemp(prefix="zerolab-"))  # closed to other users
        self._log = (self._folder / LOG).open("w+b")

    def __repr__(self) -> str:
        return f"<{self.size} live rank{'s' * (self.size > 1)}>" if self._ranks else "<ranks that were stopped>"

    def _ipython_display_(self) -> None:
        """Show nothing where a notebook would show what `lab.start` returns: it has printed all there is to say."""

    # -- running -------------------------------------------------------------------------------------------------------

    def run(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        show: bool = False,
        watch: Callable[[dict[int, Result]], None] | None = None,
        always: bool = False,
        revive: bool = False,
    ) -> list[Result]:
        """Run `code` as a cell on all ranks, or on some. Returns what each did, in rank order.

        show: print and display the output here. watch: called several times a second with the results so far.
        timeout: seconds after which the cell is interrupted. always: ranks that are started again run this cell too.
        revive: a rank that dies is no failure. It is started again at once, without a process group, while the others
        go on, and runs the cells marked `always`, then this one.

        Raises RankFailure if the cell failed on a rank, was interrupted or took too long.
        """
        results = self._run(code, ranks, timeout, show, watch, revive=revive)
        if always:
            self._always.append(code)
        return results

    def _call(
        self, function: str, *args: Any, ranks: Iterable[int] | None = None, timeout: float | None = None
    ) -> list:
        """Call one of our own functions on the ranks. A failure leaves out its traceback, which no learner needs."""
        module, _, name = function.partition(".")
        text = ", ".join(map(repr, args))
        code = f"from zerolab.lab.ranks import {module} as _module; _module.{name}({text}); del _module"
        return self._run(code, ranks, timeout, traces=False)

    def _run(
        self,
        code: str,
        ranks: Iterable[int] | None,
        timeout: float | None,
        show: bool = False,
        watch: Callable[[dict[int, Result]], None] | None = None,
        traces: bool = True,
        revive: bool = False,
    ) -> list[Result]:
        chosen = self._choose(ranks)
        cell = next(self._cells)
        for rank in set(range(self.size)) - set(chosen):
            self._note(cell, rank, "takes no part in this cell")
        before = f"from zerolab.lab.ranks import guard as _guard; _guard.begin({cell}, {self.size}); del _guard"
        for rank in chosen:
            self._ranks[rank].send(before, silent=True)
        try:
            if self._lease is not None:
                self._lease.busy(True)
            results, reason = self._collect(chosen, code, cell, timeout, watch, revive)
        finally:
            if self._lease is not None:
                self._lease.busy(False)
        if show:
            report.show(results, self.size)
        for result in results.values():
            if result.failure and not traces:
                result.failure.trace = ""
        dead = [rank for rank in results if self._ranks[rank].fate]
        hint = self._hint(bool(dead)) if report.out_of_step(results) else ""
        error = report.failure(results, self.size, hint)
        if error is not None:
            raise RankFailure(f"{reason}{error}", error.rank, results)
        return [results[rank] for rank in chosen]

    def _choose(self, ranks: Iterable[int] | None) -> list[int]:
        self._must_live()
        chosen = sorted(set(range(self.size) if ranks is None else ranks))
        if not chosen or not set(chosen) <= set(range(self.size)):
            raise Misused(f"ranks {', '.join(map(str, chosen)) or '(none)'}: there are ranks 0 to {self.size - 1}")
        if dead := [f"rank {rank} {self._ranks[rank].fate}" for rank in chosen if self._ranks[rank].fate]:
            raise RankFailure(f"{', '.join(dead)}: {self._revival}", None, {})
        return chosen

    def _hint(self, dead: bool) -> str:
        """The last line of a failure's message: what to do now."""
        return "lab.reset() gives fresh process groups" + (" and restarts the dead" if dead else ", variables are kept")

    def _must_live(self) -> None:
        if not self._ranks:
            raise NoRanks("these ranks were stopped: lab.start(4) starts new ones")
        self._must_hold()

    def _must_hold(self) -> None:
        """Raise NoRanks if the lease of its GPUs is over."""
        if self._lease is not None and self._lease.over:
            raise NoRanks(self._lease.over)

    def _note(self, cell: int, rank: int, what: str) -> None:
        """Tell ranks that wait for this one (guard.py) why it will not come."""
        self._store.set(f"over/{cell}/{rank}", what)

    def _collect(
        self,
        ranks: list[int],
        code: str,
        cell: int,
        timeout: float | None,
        watch: Callable[[dict[int, Result]], None] | None,
        revive: bool = False,
    ) -> tuple[dict[int, Result], str]:
        """Send the cell and collect the answers until every rank is done, dead, or has ignored an interrupt."""
        results = {rank: Result(rank) for rank in ranks}
        begin = time.monotonic()
        limit = Patience(timeout, longest=LOOK) if timeout is not None else None
        deadline: Patience | None = None
        waiting = {rank: (self._ranks[rank].send(code), {"reply", "idle"}) for rank in ranks}
        poller, reason = zmq.Poller(), ""
        for rank in ranks:
            for readable in self._ranks[rank].sockets:
                poller.register(readable, zmq.POLLIN)
        while waiting:
            try:
                poller.poll(100)
                for rank in list(waiting):
                    dead = self._ranks[rank].fate  # ask first, then read: so nothing it sent before it died is lost
                    self._receive(rank, results[rank], *waiting[rank])
                    if dead and waiting[rank][1] and revive and deadline is None and self._may_live(rank):
                        results[rank].write("stdout", f"{dead}, and started again\n")
                        waiting[rank] = (self._revive(rank, code, poller), {"reply", "idle"})
                        continue
                    if dead and waiting[rank][1]:
                        results[rank].failure = Failure("died", dead, time=time.time())
                    if dead or not waiting[rank][1]:
                        del waiting[rank]
                        results[rank].seconds = time.monotonic() - begin
                        self._tell(cell, results[rank])
                        if results[rank].failure and (limit is None or limit.left > PATIENCE):
                            limit, timeout = Patience(PATIENCE, longest=LOOK), None
                if watch is not None:
                    watch(results)
                if deadline is None and limit is not None and limit.turn() < 0:
                    if timeout is not None:
                        reason = f"the cell took longer than {timeout:g} s and was interrupted\n"
                    deadline = Patience(INTERRUPT_TIMEOUT, longest=LOOK)
                    self._interrupt(waiting)
                if deadline is not None and deadline.turn() < 0:
                    for rank in waiting:
                        stubborn = f"did not react to the interrupt within {INTERRUPT_TIMEOUT:g} s: killed"
                        results[rank].failure = Failure("died", stubborn, time=time.time())
                        self._ranks[rank].kill()
                    break
            except KeyboardInterrupt:
                reason = "interrupted\n"
                deadline = deadline or Patience(INTERRUPT_TIMEOUT, longest=LOOK)
                self._interrupt(waiting)
        return results, reason

    def _may_live(self, rank: int) -> bool:
        """Count the end of a life, and tell it to all who look; whether there may be another."""
        self._lives[rank] += 1
        self._store.set(f"lives/{rank}", str(self._lives[rank]))
        return self._lives[rank] % LIVES > 0

    def _revive(self, rank: int, code: str, poller: zmq.Poller) -> str:
        """Start a dead rank again, and send it what it has to run. Returns the id of the last message, its cell."""
        for readable in self._ranks[rank].sockets:
            poller.unregister(readable)
        self._ranks[rank].kill()
        self.launch([rank])
        for readable in self._ranks[rank].sockets:
            poller.register(readable, zmq.POLLIN)
        return [self._ranks[rank].send(each) for each in (*self._always, code)][-1]

    def _receive(self, rank: int, result: Result, message: str, missing: set[str]) -> None:
        """Read what the rank's kernel has sent. Removes from `missing` the signs of the cell's end that have come."""
        for answered, kind, content in self._ranks[rank].messages():
            if answered != message:
                continue
            if kind == "execute_reply":
                missing.discard("reply")
                if content["status"] == "aborted" and result.failure is None:
                    result.failure = Failure("interrupted", "was interrupted", time=time.time())
            elif kind == "status" and content["execution_state"] == "idle":
                missing.discard("idle")
            elif kind == "stream":
                result.write(content["name"], content["text"])
            elif kind in ("display_data", "execute_result"):
                content["data"].pop("application/vnd.jupyter.widget-view+json", None)  # the widget lives on the rank
                result.outputs.append(("display", (content["data"], content.get("metadata", {}))))
            elif kind == "error":
                result.failure = report.raised(content, time.time())

    def _tell(self, cell: int, result: Result) -> None:
        if result.failure is None:
            self._note(cell, result.rank, "finished the cell")
        elif result.failure.kind == "raised":
            self._note(cell, result.rank, f"raised {result.failure.summary}")
        else:
            self._note(cell, result.rank, result.failure.summary)

    def _interrupt(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._ranks[rank].interrupt()

    # -- values --------------------------------------------------------------------------------------------------------

    def push(self, ranks: Iterable[int] | None = None, **values: Any) -> None:
        """Copy values to the ranks, as variables of these names."""
        buffer = io.BytesIO()
        try:
            pickle.dump(values, buffer)
        except Exception as error:
            raise CannotTravel(f"{', '.join(values)} cannot be sent to the ranks: {error}") from error
        data = base64.b64encode(buffer.getvalue()).decode()
        for rank in self._choose(ranks):
            self._ranks[rank].deliver({"comm_id": uuid.uuid4().hex, "target_name": TARGET, "data": {"values": data}})
        self._call("rank.take", ranks=ranks)

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """A copy of a variable's value on each rank."""
        values = []
        for result in self._call("rank.give", name, ranks=ranks):
            data = next(data[0][MIME] for kind, data in result.outputs if kind == "display" and MIME in data[0])
            try:
                values.append(pickle.loads(base64.b64decode(data)))  # safe: our own process signed it with its key
            except Exception as error:
                text = f"rank {result.rank}: {name!r} cannot be rebuilt here, where its class is not defined: {error}"
                raise CannotTravel(text) from error
        return values

    def link(self, text: str | None) -> None:
        """Emulate a network on the ranks from now on (network.py), or none with None."""
        if text is not None:
            network.parse(text)
        self._call("network.use", text)
        self.emulated = text

    # -- the ranks' lives ----------------------------------------------------------------------------------------------

    def launch(self, ranks: Iterable[int]) -> None:
        """Start the processes of these ranks together, and wait for their kernels."""
        ranks = list(ranks)
        try:
            with turns.turn():
                patience = Patience(START_TIMEOUT, longest=LOOK)
                with self._lease.starting if self._lease is not None else nullcontext():
                    self._must_hold()
                    for rank in ranks:
                        self._ranks[rank] = self._spawn(rank)
                registry.write([rank.process.pid for rank in self._ranks.values()])
                self._wait(ranks, patience, lambda rank: self._ranks[rank].connect())
                self._wait(ranks, patience, self._answers)
        except BaseException:  # KeyboardInterrupt too
            self.stop()
            raise

    def _spawn(self, rank: int) -> _Rank:
        file = self._folder / f"rank{rank}.json"
        file.unlink(missing_ok=True)
        process = nursery.start(
            "zerolab.lab.ranks.rank:main",
            ["-f", str(file), "--ip=127.0.0.1"],  # an IPython profile may name another address; this wins
            environment=self._environment(rank),
            output=self._log.fileno(),
            fds=[self._lease.fd] if self._lease is not None else [],
            name=NAME,
            forked=self.device == "cpu",  # CUDA is particular about forks
        )
        return _Rank(rank, process, file)

    def _lose(self, why: str) -> None:
        """Kill the ranks because their GPUs were taken back; `why` is then the reason that each gives. (Any thread.)"""
        for rank in list(self._ranks.values()):
            rank.taken = why
            if rank.process.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)

    def _environment(self, rank: int) -> dict[str, str]:
        rest = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_RANKS)}
        if self.device == "cpu":
            rest["CUDA_VISIBLE_DEVICES"] = ""
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
        world["ZEROLAB_LIFE"] = self._lives[rank]
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port, "OMP_NUM_THREADS": 1}
        if self._lease is not None:
            rest |= self._lease.environment
        # A learner's own init_process_group must meet at our store, not open a second one at its port.
        ours = {"TORCHELASTIC_USE_AGENT_STORE": True}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # C++ warnings tell a learner little
        return rest | {name: str(value) for name, value in (world | meet | ours | quiet).items()}

    def _wait(self, ranks: list[int], patience: Patience, ready: Callable[[int], bool]) -> None:
        waiting = set(ranks)
        while waiting:
            for rank in sorted(waiting):
                if fate := self._ranks[rank].fate:
                    raise RuntimeError(f"rank {rank} {fate} while starting:\n{self._last_log()}")
            waiting -= {rank for rank in waiting if ready(rank)}
            if patience.turn() < 0:
                names = ", ".join(map(str, sorted(waiting)))
                raise RuntimeError(f"rank {names}: not ready within {START_TIMEOUT:g} s\n{self._last_log()}")
            time.sleep(0.02)

    def _answers(self, rank: int) -> bool:
        """Whether the kernel's output reaches us. What it publishes before the socket is connected is lost."""
        client = self._ranks[rank].client
        client.kernel_info()
        return bool(client.iopub_channel.socket.poll(50))

    def _last_log(self) -> str:
        self._log.seek(max(0, self._log.tell() - 3000))
        return self._log.read().decode(errors="replace").strip()

    def join(self) -> None:
        """Put every rank into a fresh process group."""
        world = next(self._worlds)
        where = (self._address, self._port, world)
        self._call("rank.join", *where, GROUP_TIMEOUT, self.device, self.emulated, timeout=60.0)

    def reset(self) -> list[int]:
        """Make fresh process groups, and start dead ranks again, empty. Variables are kept. Returns the fresh ranks."""
        self._must_live()
        fresh: set[int] = set()
        while True:
            dead = [rank for rank in range(self.size) if self._ranks[rank].fate or self._ranks[rank].client is None]
            for rank in dead:
                self._ranks[rank].kill()
            if dead:
                self.launch(dead)
            fresh |= set(dead)
            try:
                self.join()
                return sorted(fresh)
            except RankFailure:
                died = {rank for rank in range(self.size) if self._ranks[rank].fate}  # in the meantime
                if not died or died & fresh:
                    raise

    def stop(self) -> None:
        """End all processes. (The engines of a cluster live on; they only stop being ranks.)"""
        self._end()
        self._ranks = {}

    @property
    def stopped(self) -> bool:
        return not self._ranks

    def _end(self) -> None:
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks.values():
            rank.kill()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        registry.remove()
        if self._lease is not None:
            self._lease.release()
