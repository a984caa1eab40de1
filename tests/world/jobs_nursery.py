"""What processes run that test_nursery.py starts."""

import atexit
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path


def tell(*args: object) -> None:
    *rest, lent = args
    assert isinstance(lent, int)
    os.write(lent, b"through a file that was lent\n")
    proc = Path("/proc/self")
    told = {
        "args": rest,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "name": (proc / "comm").read_text().strip() if proc.exists() else "",
        "born with": (proc / "environ").read_text() if proc.exists() else "",
    }
    print(json.dumps(told), flush=True)
    atexit.register(print, "at exit", flush=True)


def interrupt_itself() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        sys.exit(3)


def leave(code: int | str) -> None:
    sys.exit(code)


def fail() -> None:
    raise RuntimeError("on purpose")


def hang() -> None:
    time.sleep(600.0)


def hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock


def draw() -> None:
    import numpy

    print(json.dumps([random.random(), numpy.random.random()]), flush=True)


def start_two(forks: bool, branch: bool = False) -> None:
    from zerolab.world import nursery

    nursery.FORKS = forks
    if branch:
        nursery.branch()
    functions = ("jobs_nursery:hang", "jobs_nursery:hang_in_c")
    two = [nursery.start(function, environment=os.environ, path=sys.path) for function in functions]
    print(json.dumps([process.pid for process in two]), flush=True)
    hang()
