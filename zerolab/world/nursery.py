"""Processes that begin with torch imported: forks of one process, the nursery, that has imported it and only waits.

A process that begins with nothing spends two seconds of a core on imports, and four ranks on two cores are what a
learner waits for. The nursery spends them once, and a fork takes a few hundredths of a second.

    process = nursery.start("zerolab.lab.ranks.rank:main", *arguments, environment=os.environ)

Every fork is killed when the nursery ends, and the nursery ends when the process that started it ends, for whatever
reason: it looks for it twice a second. What Python draws once in a process's life, the seed of the hashes of strings,
is the same in all forks; the random numbers of Python and numpy are not. Outside of Linux, where the libraries below
torch do not survive a fork, each is a fresh process instead.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

FORKS = sys.platform == "linux"
# Whatever of this is installed. The engine's hooks ask for torch._dynamo, which takes a second.
IMPORTED = ("torch._dynamo", "zerolab", "ipykernel.kernelapp")
SECRETS = ("JPY_", "JUPYTER_TOKEN", "JUPYTERHUB_")  # of a notebook server: what a fork never sees, it cannot print
START_TIMEOUT = 600.0  # seconds for torch to be imported, on a busy machine too; its death ends the wait
NAME = "zerolab nursery"  # of the process
LARGEST = 1 << 17  # bytes of a request
NUMBER = struct.Struct("q")


class Forked:
    """A fork of the nursery, with what ranks need of `multiprocessing.Process`."""

    def __init__(self, news: Connection) -> None:
        self._news = news  # from the nursery: its pid, and later how it ended
        self._lock = threading.Lock()
        self._exitcode: int | None = None
        try:
            if not news.poll(START_TIMEOUT):
                raise RuntimeError(f"the process that starts ranks did not answer for {START_TIMEOUT:g} s")
            self.pid = NUMBER.unpack(news.recv_bytes())[0]
        except EOFError:
            raise RuntimeError("the process that starts ranks has died") from None

    @property
    def exitcode(self) -> int | None:
        """-n if signal n killed it; None while it lives."""
        with self._lock:
            if self._exitcode is None and self._news.poll():
                try:
                    self._exitcode = NUMBER.unpack(self._news.recv_bytes())[0]
                except EOFError:
                    self._exitcode = -signal.SIGKILL  # the nursery's end was its end
                self._news.close()
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            wait([self._news], timeout)

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Fresh:
    """The same where nothing is forked."""

    def __init__(self, request: bytes, fds: Sequence[int], environment: dict[str, str]) -> None:
        main = threading.current_thread() is threading.main_thread()
        command = _python("_fresh", os.getpid(), main, list(fds))
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True
        )
        self.pid = self._process.pid
        assert self._process.stdin
        with suppress(ConnectionError), self._process.stdin as stdin:
            stdin.write(request)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


class _Nursery:
    """The process and our end of its socket. One for each process that starts ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
        # One thread, as each rank has by default: a fork keeps none but the one that forks.
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with theirs:
            self.process = subprocess.Popen(
                _python("_main", theirs.fileno(), self.owner),
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Control-C in a terminal is not for it
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def start(self, request: bytes, fds: Sequence[int]) -> Forked:
        news, its_end = Pipe(duplex=False)
        with its_end, suppress(ConnectionError):  # if it has just died, no news will come
            socket.send_fds(self.requests, [request], [its_end.fileno(), *fds])
        return Forked(news)


class _Branch(_Nursery):
    """A fork of a process that has imported everything and has one thread yet."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.requests.close()
            os.setsid()
            _be_called(NAME)
            _serve(theirs, self.owner)
            sys.exit()
        theirs.close()

    def ended(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) != (0, 0)


def _python(function: str, *args: Any) -> list[str]:
    """A command that calls one of these functions, of the package that we are in, wherever that is."""
    find = f"sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from zerolab.world import nursery; del sys.path[0]"
    return [sys.executable, "-c", f"import gc, sys; gc.disable(); {find}; gc.enable(); nursery.{function}{args}"]


_nursery: _Nursery | None = None
_lock = threading.Lock()


def start(
    function: str,
    *args: Any,
    environment: Mapping[str, str],
    path: Sequence[str] = (),
    fds: Sequence[int] = (),
    output: int | None = None,
    name: str = "",
    forked: bool = True,
) -> Forked | Fresh:
    """A process that runs `function`, "module:name", with `args`, and then the numbers of its copies of `fds`.

    It leads a session of its own, has exactly this environment, and ends as a script ends. path: its sys.path, by
    default as `python -c` has it. output: a file for its stdout and stderr. name: what `top` shows, up to 15 letters.
    forked: False for a fresh process on Linux too.

    Raises RuntimeError if the nursery dies meanwhile; the next call starts a new one.
    """
    request = pickle.dumps((function, args, dict(environment), os.getcwd(), list(path), output is not None, name))
    if len(request) > LARGEST:
        raise ValueError(f"{len(request):,} bytes of arguments and environment, but at most {LARGEST:,} fit")
    if output is not None:
        fds = [output, *fds]
    if not (forked and FORKS):
        return Fresh(request, fds, dict(environment))
    with _lock:
        return _living().start(request, fds)


def prepare() -> None:
    """Start the nursery, which takes two seconds, and do not wait for it. `start` will need it."""
    if FORKS:
        with _lock:
            _living()


def branch() -> None:
    """In a fork that has one thread yet and will start ranks: its nursery is a fork too, and imports nothing again."""
    global _nursery
    _nursery = _Branch()


def _living() -> _Nursery:
    global _nursery
    if _nursery is not None and (_nursery.owner != os.getpid() or _nursery.ended()):
        _nursery.requests.close()  # our parent's, or dead
        _nursery = None
    if _nursery is None:
        _nursery = _Nursery()
    return _nursery


# ---------------------------------------------------------------------- in the nursery


_status: int | None = None  # with which this process ends, once it is known


def _main(requests: int, parent: int) -> None:
    _be_called(NAME)
    atexit.register(_end)  # before all others, so after all others
    gc.disable()  # what is imported stays
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in the forks leave these pages alone, which all of them share
    gc.enable()
    _serve(socket.socket(fileno=requests), parent)


def _serve(requests: socket.socket, parent: int) -> None:
    global _status
    try:
        if (begin := _wait_for_requests(requests, parent)) is not None:
            begin()
        _status = 0
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        _status = 1
        raise


def _end() -> None:
    """A fork ends as a script does, except that nothing is freed: that would copy every page which it shares with the
    nursery, and take a quarter of a second of a core."""
    if _status is not None:
        leave_at_once(_status)


def leave_at_once(status: int) -> NoReturn:
    """Without exit handlers, and without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, or closed
            stream.flush()
    os._exit(status)


def _wait_for_requests(requests: socket.socket, parent: int) -> Callable[[], None] | None:
    """Forks at each request; returns what to do in the fork, and None in the nursery when its parent is gone."""
    me = os.getpid()
    news: dict[int, Connection] = {}  # for each fork, to say how it ends
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in selector.select(0.5):
                if key.data is not None:  # the file that tells of a fork's end
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                    _tell(news[key.data], code)
                    news.pop(key.data).close()
                    continue
                request, fds, *_ = socket.recv_fds(requests, LARGEST, 16)
                if not request:
                    return None
                pid = os.fork()
                if pid == 0:
                    requests.detach()
                    for fd in (*fds[:1], *(key.fd for key in selector.get_map().values())):
                        os.close(fd)
                    for pipe in news.values():
                        pipe.close()
                    return lambda: _begin(me, request, fds[1:])
                news[pid] = Connection(fds[0], readable=False)
                _tell(news[pid], pid)
                for fd in fds[1:]:
                    os.close(fd)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
    return None


def _tell(pipe: Connection, number: int) -> None:
    with suppress(ConnectionError):  # nobody asks any more
        pipe.send_bytes(NUMBER.pack(number))


def _begin(parent: int, request: bytes, fds: list[int]) -> None:
    """Be a fork: run what `start` was asked for."""
    os.setsid()
    _end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    _run(request, fds)


def _run(request: bytes, fds: list[int]) -> None:
    # Whoever needed the nursery first may have blocked or ignored signals just then, and its forks inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function, args, environment, folder, path, redirected, name = pickle.loads(request)  # our own parent pickled it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if path:
        sys.path[:] = path
    if redirected:
        for standard in (1, 2):
            os.dup2(fds[0], standard)
        os.close(fds.pop(0))
    if name:
        _be_called(name)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*args, *fds)


def _end_with_parent() -> None:
    """Even while hanging in C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _be_called(name: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME


def _fresh(parent: int, by_main_thread: bool, fds: list[int]) -> None:
    """Be a fresh process. A thread ends it when its parent has gone."""
    if by_main_thread:  # the signal would come when the *thread* ends that started us
        _end_with_parent()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    request = sys.stdin.buffer.read()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _run(request, fds)
