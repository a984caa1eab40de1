"""Fresh processes on this machine, the ranks of one world: `launch` runs a function on each.

    losses = zerolab.launch(train.main, 4, "tiny")         # [main("tiny") of each rank]

`Ranks` keeps the processes for several runs.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import itertools
import math
import multiprocessing
import os
import pickle
import pkgutil
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zerolab.world import nursery
from zerolab.world.environment import TORCHRUN, Place, at_leave, at_return, given_up, init, meet_in, read_place, seconds

_Process = BaseProcess | nursery.Forked | nursery.Fresh
LEAVE_TIMEOUT = 10.0  # seconds to leave a process group, or to end


class AlreadyRanks(RuntimeError):
    """This process is one of several ranks already, each of which would start more."""


class RankError(RuntimeError):
    """A rank failed: `rank` is the first that did, `traceback` its traceback, or the place where it was, as text."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 600.0,
    group_timeout: float = 60.0,
    threads: int | None = None,
    nested: bool = False,
) -> list[Any]:
    """Run the importable `fn(*args)` on `ranks` fresh processes; return their results in rank order.

    `with Ranks(ranks) as pool` starts the processes once for several runs; `Ranks` and `Ranks.run` say which errors
    there are.
    """
    with Ranks(ranks, threads, nested) as pool:
        return pool.run(fn, *args, timeout=timeout, group_timeout=group_timeout)


class Patience:
    """Seconds `left` to wait for other processes of this machine, in turns.

    A turn longer than `longest` seconds counts as that much: the machine stood still (a paused VM, Control-Z) or was
    busy, and the other processes with it.
    """

    def __init__(self, seconds: float, longest: float = 1.0) -> None:
        self.left, self.longest, self._last = seconds, longest, time.monotonic()

    def turn(self) -> float:
        """The seconds left after the turn that ends here."""
        last, self._last = self._last, time.monotonic()
        self.left -= min(self._last - last, self.longest)
        return self.left

    def at_most(self, seconds: float) -> None:
        """From now on, no more than these seconds, and turns of a tenth of them."""
        self.left, self.longest = min(self.left, seconds), min(self.longest, seconds / 10)


@dataclass
class _Reply:
    """How one step ended for a rank."""

    verdict: str = "done"  # or "died", "raised", "late"
    summary: str = "had finished"
    text: str = ""  # the traceback, or where the rank is
    result: bytes = b""
    spent: bool = False  # its process groups would end only after their timeout, so it must not be asked to leave them
    time: float = 0.0  # of the failure: time.monotonic(), one clock for all processes of a machine


class Ranks:
    """A pool of processes on this machine, started at the first run and kept between runs.

    Each computes with `threads` threads, by default an equal share of the cores. Everything listens on the
    loopback interface only. The next run finds whatever a function leaves behind in modules, random states too, but for
    engines and what else holds process groups: they end with their run. After a run in which a rank gave up on a
    collective (CommError), the next one starts new processes.

    forked: they begin as forks of a process that has torch imported (nursery.py), in a fraction of the time. Functions
    must then come from a module, not from the script that runs.

    Raises AlreadyRanks inside a rank that torchrun, srun or another pool has started, unless `nested`.
    """

    def __init__(self, ranks: int, threads: int | None = None, nested: bool = False, forked: bool = False) -> None:
        self.ranks, self._forked = _positive("ranks", ranks), forked
        if not nested:
            _refuse_inside_a_rank(ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = max(1, cores // ranks) if threads is None else _positive("threads", threads)
        self._processes: list[
            tuple[BaseProcess | nursery.Forked | nursery.Fresh, Connection]
        ] = []  # the pipe: tasks there, replies back
        self._store: dist.TCPStore | None = None  # where the ranks of a run meet
        self._runs = itertools.count()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 600.0,
        group_timeout: float = 60.0,
    ) -> list[Any]:
        """Run `fn(*args)` on the first `ranks` processes; return their results in rank order.

        They join the default process group before `fn` is called, so `zerolab.init()` in `fn` only returns the
        device. Arguments and results are copied. The run is stopped after `timeout` seconds, start-up included;
        once all results are here, the ranks get ten more to leave. A collective fails after `group_timeout`
        seconds. Time in which the machine stood still, or Control-Z had stopped the program, does not count in
        `timeout`.

        Raises TypeError before any process starts if `fn` cannot be imported or an argument cannot be pickled;
        RankError if a rank fails, time is up, or a result cannot be unpickled here. Then all processes are gone, and
        the next run starts new ones.
        """
        size = self.ranks if ranks is None else _positive("ranks", ranks)
        if size > self.ranks:
            raise ValueError(f"ranks={size}, but this pool has {self.ranks}")
        if not callable(fn):
            raise TypeError(
                f"in place of a function came a {type(fn).__name__}: pass the function itself, as in launch(main, 4), "
                "not what it returns, as in launch(main(), 4)"
            )
        group_timeout = seconds("group_timeout", group_timeout)
        patience = Patience(seconds("timeout", timeout, math.inf))
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
        cannot = f"other processes cannot import {name}: move it to the top level of a module"
        call = _dumps(fn, cannot, self._forked)
        cannot = f"other processes cannot be given the arguments of {name}: one cannot be pickled"
        data = _dumps(args, cannot, self._forked)
        try:
            if any(pipe.poll() or not process.is_alive() for process, pipe in self._processes):
                self._kill()  # one died since the last run
            if not self._processes:
                self._start(patience)
            port = self._store.port if self._store else 0
            self._send(size, (next(self._runs), size, port, group_timeout, call, data))
            replies = self._gather(size, patience, f"in {name}")
            if any(reply.spent for reply in replies):
                self._kill()
            else:  # all together: a rank that leaves early closes connections that others may still read from
                self._send(size, ())
                patience.left = max(patience.left, LEAVE_TIMEOUT)  # its result is here, so no rank is late
                self._gather(size, patience, f"after {name}, leaving the process group")
            return [_result(reply, f"rank {rank} of {size}", rank, name) for rank, reply in enumerate(replies)]
        except BaseException:  # KeyboardInterrupt too
            self._kill()
            raise

    def close(self) -> None:
        """End the processes as scripts end, with threads and exit handlers; kill those that take ten seconds."""
        self._send(self.ranks, None)
        patience = Patience(LEAVE_TIMEOUT, longest=0.5)
        for process, _ in self._processes:
            while process.is_alive() and patience.turn() > 0:
                process.join(0.1)
        self._kill()

    def _kill(self) -> None:
        for process, _ in self._processes:
            process.kill()
        for process, pipe in self._processes:
            process.join(10.0)
            pipe.close()
        self._processes, self._store = [], None

    def _start(self, patience: Patience) -> None:
        if not _main_has_a_file():  # after `python < script` it is "<stdin>", which spawn would run
            vars(sys.modules["__main__"]).pop("__file__", None)
        resource_tracker.ensure_running()  # spawn would start it, which unblocks signals
        # Control-C goes to every process of a terminal. The children inherit the mask: it is not for them.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
        try:
            # A socket that TCPStore opens listens on all interfaces, and a port that was only looked up may be taken.
            listener = socket.create_server(("127.0.0.1", 0))
            port, fd = listener.getsockname()[1], listener.detach()
            self._store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd)
            for rank in range(self.ranks):
                pipe, its_end = multiprocessing.Pipe()
                with its_end:  # closed here, so that the death of the process closes the pipe
                    begin = self._fork if self._forked else self._spawn
                    self._processes.append((begin(rank, its_end), pipe))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        self._gather(self.ranks, patience, "at its start (scripts launch under `if __name__ == '__main__':`)")

    def _spawn(self, rank: int, pipe: Connection) -> BaseProcess:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_serve, args=(rank, self.threads, pipe), daemon=True)
        process.start()
        return process

    def _fork(self, rank: int, pipe: Connection) -> nursery.Forked | nursery.Fresh:
        begin, fds = f"{__name__}:_serve_forked", [pipe.fileno()]
        return nursery.start(begin, rank, self.threads, environment=os.environ, path=sys.path, fds=fds)

    def _send(self, size: int, task: tuple[Any, ...] | None) -> None:
        for _, pipe in self._processes[:size]:
            with suppress(ConnectionError):  # it is dead, which _gather will notice
                pipe.send_bytes(pickle.dumps(task))

    def _gather(self, size: int, patience: Patience, doing: str) -> list[_Reply]:
        """The replies of the first `size` processes, when all are done."""
        replies: dict[int, _Reply] = {}
        while len(replies) < size and (left := patience.turn()) > 0:
            pending = {rank: self._processes[rank] for rank in range(size) if rank not in replies}
            # A fork of a dead process may hold the pipe open, so look for the dead every 0.2 s.
            dead = {rank for rank, (process, _) in pending.items() if not process.is_alive()}
            wait([pipe for _, pipe in pending.values()], 0.0 if dead else min(left, patience.longest, 0.2))
            for rank, (process, pipe) in pending.items():
                if rank in dead or pipe.poll():
                    replies[rank] = _receive(process, pipe)
                    if replies[rank].verdict != "done":  # perhaps because of what the next reply says
                        # After a death, the others may be about to say what they waited for (comm/flight.py).
                        patience.at_most(2.5 if replies[rank].verdict == "died" else 0.5)
        if len(replies) < size or any(reply.verdict != "done" for reply in replies.values()):
            raise self._error(size, replies, doing)
        return [replies[rank] for rank in range(size)]

    def _error(self, size: int, replies: dict[int, _Reply], doing: str) -> RankError:
        late = {rank: self._processes[rank] for rank in range(size) if rank not in replies}
        for process, _ in late.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        for rank, (_, pipe) in late.items():
            replies[rank] = _Reply("late", "had not finished", _innermost_calls(pipe))
        order = ("died", "raised", "late", "done")  # a death comes first: the others only noticed
        first = min(replies, key=lambda rank: (order.index(replies[rank].verdict), replies[rank].time, rank))
        over = "time is up: " if replies[first].verdict == "late" else ""
        lines = [f"{over}rank {first} of {size} {replies[first].summary}, {doing}", replies[first].text]
        for rank in sorted(replies.keys() - {first}):
            lines.append(f"rank {rank} {replies[rank].summary}")
            lines += [replies[rank].text] * (replies[rank].verdict == "late")
        return RankError("\n".join(line for line in lines if line), first, replies[first].text)


def _refuse_inside_a_rank(ranks: int) -> None:
    try:
        here = read_place(os.environ)
    except RuntimeError:  # an incomplete environment, such as a batch script's, is no rank's
        here = Place()
    if here.world_size > 1:
        raise AlreadyRanks(
            f"this process is rank {here.rank} of {here.world_size} already, and each of them would start {ranks} more:"
            " call the function itself, where zerolab.init() joins the ranks that there are, or start the program once,"
            " with python alone (or pass nested=True, if you mean it)"
        )


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}, but must be a whole number, 1 or more")
    return value


class _Pickler(pickle.Pickler):
    """Plain pickle, so tensors are copied; refuses what is defined where no other process can import it.

    Spawned processes run the script that is `__main__` here once more. Forked ones do not: for them `python -m module`
    has the module's name, and a script has none.
    """

    def __init__(self, file: io.BytesIO, forked: bool) -> None:
        super().__init__(file)
        self._forked = forked

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (FunctionType, type)) or value.__module__ != "__main__":
            return NotImplemented
        if not _main_has_a_file():
            raise pickle.PicklingError(f"{value.__qualname__} exists only in this notebook or prompt")
        if not self._forked:
            return NotImplemented
        if (spec := vars(sys.modules["__main__"]).get("__spec__")) is None:
            raise pickle.PicklingError(f"{value.__qualname__} is in the script, which forked processes do not run")
        return pkgutil.resolve_name, (f"{spec.name}:{value.__qualname__}",)


def _dumps(value: Any, refusal: str, forked: bool) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, forked).dump(value)
    except Exception as error:
        raise TypeError(f"{refusal} ({error})") from error
    return buffer.getvalue()


def _main_has_a_file() -> bool:
    main = vars(sys.modules["__main__"])
    return main.get("__spec__") is not None or os.path.isfile(main.get("__file__") or "")


def _receive(process: _Process, pipe: Connection) -> _Reply:
    """The reply in the pipe, or how the process died without one."""
    if pipe.poll():
        with suppress(EOFError, ConnectionError):
            return pickle.loads(pipe.recv_bytes())
    process.join(10.0)
    code = process.exitcode
    if code is None or code >= 0:
        return _Reply("died", f"exited with code {code}", time=time.monotonic())
    summary = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGABRT:
        summary += " (as gloo does to a rank that gets more than it expects: has another one skipped a collective?)"
    return _Reply("died", summary, time=time.monotonic())


def _result(reply: _Reply, who: str, rank: int, name: str) -> Any:
    try:
        return pickle.loads(reply.result)
    except Exception as error:
        why = traceback.format_exception_only(error)[0].strip()
        text = "".join(traceback.format_exception(error))
        raise RankError(f"{who} returned what cannot be unpickled here ({why}), from {name}", rank, text) from error


def _innermost_calls(pipe: Connection) -> str:
    """What faulthandler writes into the pipe on SIGUSR1, even if the process is stuck in C."""
    dump = b""
    while wait([pipe], 0.3) and (part := os.read(pipe.fileno(), 65536)):
        dump += part
    # The main thread comes last. From this file outwards, its frames are the same for every function.
    frames = dump.decode(errors="replace").rpartition("(most recent call first):\n")[2].splitlines()
    inner = list(itertools.takewhile(lambda frame: __file__ not in frame, frames)) or frames
    return "\n".join(inner[:10]) or "  an unknown place"


# ---------------------------------------------------------------------- in a process of a pool

_kept = [0]  # modules when the collector was last told to leave alone what is there
Tasks = queue.SimpleQueue["tuple[Any, ...] | None"]  # the arguments of _work; (): leave the group; None: end


def _serve(rank: int, threads: int, pipe: Connection) -> None:
    """Do what comes through the pipe, until None comes or the parent is gone."""
    faulthandler.register(signal.SIGUSR1, file=pipe.fileno(), all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    multiprocessing.current_process().daemon = False  # a daemon cannot start a DataLoader's workers
    for stream in (sys.stdout, sys.stderr):  # whole lines, so that ranks do not garble each other's
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    _keep_what_is_imported()
    tasks: Tasks = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    reply = _Reply()
    while True:
        pipe.send_bytes(pickle.dumps(reply))
        if (task := tasks.get()) is None:
            return
        try:
            reply = _Reply(result=_work(rank, *task) if task else _leave(), spent=given_up.is_set())
        except BaseException as error:  # SystemExit too
            reply = _failure(error)


def _serve_forked(rank: int, threads: int, pipe: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as _start does for the others
    _serve(rank, threads, Connection(pipe))


def _listen(pipe: Connection, tasks: Tasks) -> None:
    parent = multiprocessing.parent_process()
    lives_with = parent.pid if parent else os.getppid()  # the nursery
    with suppress(EOFError, ConnectionError):
        while os.getppid() == lives_with:  # a fork of the parent may hold the pipe open after its end
            if pipe.poll(1.0):
                tasks.put(pickle.loads(pipe.recv_bytes()))
    os._exit(1)  # the main thread may wait in a collective that never ends


def _work(rank: int, run: int, size: int, port: int, timeout: float, call: bytes, data: bytes) -> bytes:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # if set, it names a network: these ranks use loopback
    world = (rank, size, rank, size, "127.0.0.1", port)
    os.environ.update(zip((*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), map(str, world)))
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    meet_in(dist.PrefixStore(f"run {run}, group {group}", store) for group in itertools.count())
    fn, args = pickle.loads(call), pickle.loads(data)
    init(timeout)
    result = _call(fn, args)
    for say in at_return:
        say()
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, a {type(result).__name__}, cannot be pickled") from error


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`fn(*args)`. A process that it has forked, and that comes back here, ends: the rank is its parent."""
    rank = os.getpid()
    try:
        return fn(*args)
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    """End as a script does, but without exit handlers and threads, which are the rank's."""
    status = int(error is not None)
    try:
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if status != error.code and error.code is not None:
                print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
    finally:
        nursery.leave_at_once(status)


def _leave() -> bytes:
    for let_go in at_leave:
        let_go()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # hooks tie models into cycles; this run's memory must not stay into the next
    _keep_what_is_imported()
    return b""


def _keep_what_is_imported() -> None:
    """Modules stay: the collection after each run need not look at them."""
    if len(sys.modules) > _kept[0]:
        _kept[0] = len(sys.modules)
        gc.freeze()


def _failure(error: BaseException) -> _Reply:
    when, trace = time.monotonic(), error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:  # our own frames, around the function
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    what = traceback.format_exception_only(type(error), error)[0].splitlines()[0]
    return _Reply("raised", f"raised {what}", text, time=when)
