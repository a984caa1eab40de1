"""The world of ranks: `init` joins the one that the environment describes, `launch` makes one here.

    python train.py                                # a world of one rank
    torchrun --nproc-per-node 4 train.py           # four ranks on this machine
    srun --nodes 2 --ntasks-per-node 4 python train.py

    losses = zerolab.launch(train.main, 4, "tiny")         # [main("tiny") of each rank], in fresh processes

Where each rank has a GPU of its own the ranks talk through NCCL, else through gloo, on the CPU.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
LEAVE_TIMEOUT = 10.0  # seconds to leave a process group, or to end

# In a process of a pool: a new place to meet for each call of `init`. Elsewhere None.
_stores: Iterator[dist.Store] | None = None


# ---------------------------------------------------------------------- joining a world


class _Place(NamedTuple):
    """Which of how many this process is, in the world and on its machine, and where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def init(timeout: float = 300.0) -> torch.device:
    """Joins the default process group that the environment describes and returns this rank's device.

    The environment is torchrun's, else srun's, else empty: a world of one. A collective that waits for more
    than `timeout` seconds fails. If torch.distributed is initialised already, only returns the device.

    Raises RuntimeError, naming the variable, if the environment is incomplete or contradicts itself.
    """
    if not dist.is_initialized():
        _join(_read(os.environ), timeout)
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _join(place: _Place, timeout: float) -> None:
    if _is_loopback(place.address):  # otherwise gloo listens at the address of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if _stores is not None:
        meet: dict[str, Any] = {"store": next(_stores)}
    elif place.world_size == 1:
        meet = {"store": dist.HashStore()}
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.local_world_size == place.world_size:
        # torchrun's store outlives its restarts. The addresses that earlier lives left there must not be found: they
        # would be tried in vain. (Between machines the restarts are not counted alike, so there it is left as it is.)
        store = dist.TCPStore(place.address, place.port, place.world_size, False, timedelta(seconds=timeout))
        meet = {"store": dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)}
    else:
        host = f"[{place.address}]" if ":" in place.address else place.address
        meet = {"init_method": f"tcp://{host}:{place.port}"}
    if gpu := _own_gpu(place):
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=gpu,
        **meet,
    )


def _own_gpu(place: _Place) -> torch.device | None:
    """The GPU that no other rank of this machine uses, if there is one."""
    count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if place.local_world_size <= count:
        return torch.device("cuda", place.local_rank)
    if count and "SLURM_GPUS_PER_TASK" in os.environ:  # then each rank sees only its own, counted from 0
        return torch.device("cuda", 0)
    return None


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _read(env: Mapping[str, str]) -> _Place:
    """The place that the environment describes. A batch script has a SLURM_PROCID too, but is one process."""
    if "RANK" in env or ("WORLD_SIZE" in env and "SLURM_PROCID" not in env):
        names = TORCHRUN
        if env.get("WORLD_SIZE") == "1" or _is_loopback(env.get("MASTER_ADDR", "")):  # all ranks are here
            env = {"LOCAL_RANK": env.get("RANK", ""), "LOCAL_WORLD_SIZE": env.get("WORLD_SIZE", "")} | dict(env)
    elif "SLURM_PROCID" in env and (env["SLURM_PROCID"], env.get("SLURM_NTASKS", "1")) != ("0", "1"):
        names = SLURM
        env = _derive(env)
    else:
        return _Place()
    numbers = [_number(env, name) for name in names]
    for i in (0, 2):
        if numbers[i] >= numbers[i + 1]:
            raise _bad(env, f"{names[i]}={numbers[i]} must be less than {names[i + 1]}={numbers[i + 1]}")
    if numbers[1] == 1:
        return _Place()
    place = _Place(*numbers, _value(env, "MASTER_ADDR"), _number(env, "MASTER_PORT"))
    if not 0 < place.port < 2**16:  # `torchrun --master-port 0` says 0, where nobody would ever meet
        raise _bad(env, f"MASTER_PORT={place.port} is not a port: set it to one from 1 to 65535")
    return place


def _value(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise _bad(env, f"{name} is not set: start with torchrun or srun, which see to it, or set it on every rank")
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    if not _value(env, name).isdecimal():
        raise _bad(env, f"{name}={env[name]!r} is not a number: set it to one, 0 or more")
    return int(env[name])


def _bad(env: Mapping[str, str], what: str) -> RuntimeError:
    return RuntimeError(f"rank {env.get('RANK') or env.get('SLURM_PROCID') or 'unknown'} cannot start: {what}")


def _derive(env: Mapping[str, str]) -> dict[str, str]:
    """Slurm's environment and what follows from it: the ranks on this node, address and port of rank 0."""
    env = dict(env)
    hosts = env.get("SLURM_STEP_NODELIST") or ("SLURM_STEP_ID" in env and env.get("SLURM_NODELIST")) or ""
    if not env.setdefault("MASTER_ADDR", _first_host(hosts)):
        hint = "start with srun (a batch script alone is one process), or set MASTER_ADDR to the host of rank 0"
        raise _bad(env, f"SLURM_NTASKS={env.get('SLURM_NTASKS')}, but no SLURM_STEP_NODELIST: {hint}")

    per_node = []  # "2(x3),1": two ranks on each of three nodes, one on the fourth
    for ranks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        per_node += [ranks] * int(repeat or 1)
    if per_node:  # is what this step has; the other variable is what the job asked for
        env["SLURM_NTASKS_PER_NODE"] = per_node[int(env.get("SLURM_NODEID", 0))]
    elif env.get("SLURM_NNODES", "1") == "1":
        env.setdefault("SLURM_NTASKS_PER_NODE", env.get("SLURM_NTASKS", ""))

    if "SLURM_JOB_ID" in env:  # the step counts too: two that run side by side must not meet each other
        number = int(env["SLURM_JOB_ID"]) + 97 * int(env.get("SLURM_STEP_ID", 0))
        env.setdefault("MASTER_PORT", str(10000 + number % 20000))  # below what systems hand out as free ports
    return env


def _first_host(hosts: str) -> str:
    """`node[03-07,9],login1` -> `node03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts).group()
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first)


# ---------------------------------------------------------------------- making a world


class RankError(RuntimeError):
    """A rank failed: `rank` is the first that did, `traceback` its traceback or where it stood, as text."""

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


def launch(
    fn: Callable,
    ranks: int,
    *args: Any,
    timeout: float = 600.0,
    group_timeout: float = 60.0,
    threads: int | None = None,
) -> list:
    """Runs the importable `fn(*args)` on `ranks` fresh processes; returns their results in rank order.

    `with Ranks(ranks) as pool` starts processes once for several runs; see `Ranks.run` for the errors.
    """
    with Ranks(ranks, threads) as pool:
        return pool.run(fn, *args, timeout=timeout, group_timeout=group_timeout)


class Patience:
    """Seconds `left` to wait for other processes of this machine, in turns.

    A turn of more than a second counts as one: the machine stood still (a paused VM, Control-Z), the others with it.
    """

    def __init__(self, seconds: float) -> None:
        self.left, self._last = seconds, time.monotonic()

    def turn(self) -> float:
        """The seconds left after the turn that ends here."""
        last, self._last = self._last, time.monotonic()
        self.left -= min(self._last - last, 1.0)
        return self.left


@dataclass
class _Reply:
    """What became of a rank in one step."""

    verdict: str = "done"  # or "died", "raised", "late"
    summary: str = "had finished"
    text: str = ""  # the traceback, or where it stands
    result: bytes = b""
    time: float = 0.0  # of the failure: time.monotonic(), one clock for all processes of a machine


class Ranks:
    """A pool of processes on this machine, started at its first run and kept between runs.

    Each computes with `threads` threads, by default an equal share of the cores. Everything listens on the
    loopback interface only. What a function leaves in modules (random states, too) the next one finds.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        self.ranks = _positive("ranks", ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = max(1, cores // ranks) if threads is None else _positive("threads", threads)
        self._processes: list[tuple[BaseProcess, Connection]] = []  # the pipe: tasks there, replies back
        self._store: dist.TCPStore | None = None
        self._runs = itertools.count()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable,
        *args: Any,
        ranks: int | None = None,
        timeout: float = 600.0,
        group_timeout: float = 60.0,
    ) -> list:
        """Runs `fn(*args)` on the first `ranks` processes; returns their results in rank order.

        They are the default process group before `fn` is called: `zerolab.init()` in `fn` only returns the
        device. Arguments and results are copied. After `timeout` seconds, start-up included, the run is
        stopped, but ranks that are through have ten more to leave; after `group_timeout` seconds a collective
        fails. Seconds in which the machine stood still, or Control-Z had stopped the program, do not count in
        `timeout`.

        Raises TypeError before any process starts if `fn` cannot be imported or an argument not be pickled,
        RankError if a rank fails or the time is over: all processes are gone then, the next run starts anew.
        """
        size = self.ranks if ranks is None else _positive("ranks", ranks)
        if size > self.ranks:
            raise ValueError(f"ranks={size}, but this pool has {self.ranks}")
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
        call = _dumps(fn, f"other processes cannot import {name}: move it to the top level of a module")
        data = _dumps(args, f"other processes cannot have the arguments of {name}: one cannot be pickled")
        patience = Patience(timeout)
        try:
            if any(pipe.poll() or not process.is_alive() for process, pipe in self._processes):
                self._kill()  # one died since the last run
            if not self._processes:
                self._start(patience)
            self._send(size, (next(self._runs), size, self._store.port, group_timeout, call, data))
            results = self._gather(size, patience, f"in {name}")
            # All leave together: who leaves early closes connections that others may still read from.
            self._send(size, ())
            patience.left = max(patience.left, LEAVE_TIMEOUT)  # nobody whose result is here is late
            self._gather(size, patience, f"after {name}, leaving the process group")
        except BaseException:  # KeyboardInterrupt too
            self._kill()
            raise
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """Ends the processes as scripts end, with threads and exit handlers; kills who takes ten seconds."""
        self._send(self.ranks, None)
        deadline = time.monotonic() + LEAVE_TIMEOUT
        for process, _ in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process, _ in self._processes:
            process.kill()
        for process, pipe in self._processes:
            process.join(10.0)
            pipe.close()
        self._processes, self._store = [], None

    def _start(self, patience: Patience) -> None:
        if not _main_has_a_file():  # `python < script` says that its file is "<stdin>", which spawn would run
            vars(sys.modules["__main__"]).pop("__file__", None)
        resource_tracker.ensure_running()  # spawn would start it, which unblocks signals
        # Control-C goes to all processes of a terminal. The children inherit that it is not for them.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
        try:
            # TCPStore's own socket listens on all interfaces, and a port only looked up may be lost again.
            listener = socket.create_server(("127.0.0.1", 0))
            port, fd = listener.getsockname()[1], listener.detach()
            self._store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=fd)
            spawn = multiprocessing.get_context("spawn")
            for rank in range(self.ranks):
                pipe, its_end = spawn.Pipe()
                process = spawn.Process(target=_serve, args=(rank, self.threads, its_end), daemon=True)
                process.start()
                its_end.close()  # now the death of the process closes the pipe
                self._processes.append((process, pipe))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        self._gather(self.ranks, patience, "at its start (scripts launch under `if __name__ == '__main__':`)")

    def _send(self, size: int, task: tuple | None) -> None:
        for _, pipe in self._processes[:size]:
            with suppress(ConnectionError):  # dead, as _gather will find
                pipe.send_bytes(pickle.dumps(task))

    def _gather(self, size: int, patience: Patience, doing: str) -> list[bytes]:
        """The results of the first `size` processes."""
        replies: dict[int, _Reply] = {}
        while len(replies) < size and (left := patience.turn()) > 0:
            pending = {rank: self._processes[rank] for rank in range(size) if rank not in replies}
            # A process that a dead one forked may hold the pipe open, so look for the dead every 0.2 s.
            dead = {rank for rank, (process, _) in pending.items() if not process.is_alive()}
            wait([pipe for _, pipe in pending.values()], 0.0 if dead else min(left, 0.2))
            for rank, (process, pipe) in pending.items():
                if rank in dead or pipe.poll():
                    replies[rank] = _receive(process, pipe)
                    if replies[rank].verdict != "done":  # perhaps only a consequence of what we hear next
                        # After a death the others may be about to say what they waited for (flight.py).
                        patience.left = min(patience.left, 2.5 if replies[rank].verdict == "died" else 0.5)
        if len(replies) < size or any(reply.verdict != "done" for reply in replies.values()):
            raise self._error(size, replies, doing)
        return [replies[rank].result for rank in range(size)]

    def _error(self, size: int, replies: dict[int, _Reply], doing: str) -> RankError:
        late = {rank: self._processes[rank] for rank in range(size) if rank not in replies}
        for process, _ in late.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        for rank, (_, pipe) in late.items():
            replies[rank] = _Reply("late", "had not finished", _innermost_calls(pipe))
        order = ("died", "raised", "late", "done")  # a death comes first: the others only noticed it
        first = min(replies, key=lambda rank: (order.index(replies[rank].verdict), replies[rank].time, rank))
        over = "the time is over: " if replies[first].verdict == "late" else ""
        lines = [f"{over}rank {first} of {size} {replies[first].summary}, {doing}", replies[first].text]
        for rank in sorted(replies.keys() - {first}):
            lines.append(f"rank {rank} {replies[rank].summary}")
            lines += [replies[rank].text] * (replies[rank].verdict == "late")
        return RankError("\n".join(line for line in lines if line), first, replies[first].text)


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}, but must be a whole number, 1 or more")
    return value


class _Pickler(pickle.Pickler):
    """Plain pickle, so tensors are copied; refuses what was defined where nobody else can import it."""

    def reducer_override(self, value: Any) -> Any:
        defined = isinstance(value, (FunctionType, type)) and value.__module__ == "__main__"
        if defined and not _main_has_a_file():
            raise pickle.PicklingError(f"{value.__qualname__} exists only in this notebook or prompt")
        return NotImplemented


def _dumps(value: Any, refusal: str) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{refusal} ({error})") from error
    return buffer.getvalue()


def _main_has_a_file() -> bool:
    main = vars(sys.modules["__main__"])
    return main.get("__spec__") is not None or os.path.isfile(main.get("__file__") or "")


def _receive(process: BaseProcess, pipe: Connection) -> _Reply:
    """The reply that is in the pipe, or what became of a process that died without one."""
    if pipe.poll():
        with suppress(EOFError, ConnectionError):
            return pickle.loads(pipe.recv_bytes())
    process.join(10.0)
    code = process.exitcode
    killed = code is not None and code < 0
    summary = f"was killed by {signal.Signals(-code).name}" if killed else f"exited with code {code}"
    if killed and -code == signal.SIGABRT:
        summary += " (as gloo does to a rank that gets more than it expects: has another one skipped a collective?)"
    return _Reply("died", summary, time=time.monotonic())


def _innermost_calls(pipe: Connection) -> str:
    """What faulthandler writes into the pipe upon SIGUSR1, even if the process is stuck in C."""
    dump = b""
    while wait([pipe], 0.3) and (part := os.read(pipe.fileno(), 65536)):
        dump += part
    # The main thread comes last. Its outer frames, from this file on, are the same for every function.
    frames = dump.decode(errors="replace").rpartition("(most recent call first):\n")[2].splitlines()
    inner = list(itertools.takewhile(lambda frame: __file__ not in frame, frames)) or frames
    return "\n".join(inner[:10]) or "  an unknown place"


# ---------------------------------------------------------------------- in a process of a pool


def _serve(rank: int, threads: int, pipe: Connection) -> None:
    """Does what comes through the pipe, until None comes or the parent is gone."""
    faulthandler.register(signal.SIGUSR1, file=pipe.fileno(), all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    multiprocessing.current_process().daemon = False  # a daemon may not start a DataLoader's workers
    for stream in (sys.stdout, sys.stderr):  # whole lines, so that ranks do not garble each other's
        stream.reconfigure(line_buffering=True, write_through=False)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, tasks), daemon=True).start()
    reply = _Reply()
    while True:
        pipe.send_bytes(pickle.dumps(reply))
        if (task := tasks.get()) is None:
            return
        try:
            reply = _Reply(result=_work(rank, *task) if task else _leave())
        except BaseException as error:  # SystemExit too
            reply = _failure(error)


def _listen(pipe: Connection, tasks: queue.SimpleQueue) -> None:
    parent = multiprocessing.parent_process().pid
    with suppress(EOFError, ConnectionError):
        while os.getppid() == parent:  # the pipe alone does not tell: a process that it forked may hold it open
            if pipe.poll(1.0):
                tasks.put(pickle.loads(pipe.recv_bytes()))
    os._exit(1)  # the main thread may wait in a collective for ever


def _work(rank: int, run: int, size: int, port: int, timeout: float, call: bytes, data: bytes) -> bytes:
    global _stores
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # names a network, if it is set: here it shall be loopback
    world = (rank, size, rank, size, "127.0.0.1", port)
    os.environ.update(zip((*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), map(str, world)))
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    _stores = (dist.PrefixStore(f"run {run}, group {group}", store) for group in itertools.count())
    fn, args = pickle.loads(call), pickle.loads(data)
    init(timeout)
    result = fn(*args)
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, a {type(result).__name__}, cannot be pickled") from error


def _leave() -> bytes:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # hooks tie models into cycles; the next run's memory shall not hold this one's
    return b""


def _failure(error: BaseException) -> _Reply:
    when, trace = time.monotonic(), error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:  # our calls around the function
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    what = traceback.format_exception_only(type(error), error)[0].splitlines()[0]
    return _Reply("raised", f"raised {what}", text, time=when)
