"""What the ranks of test_launch.py do: functions for `launch`, and a script for torchrun, srun and python."""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from zerolab.world.environment import init
from zerolab.world.processes import Ranks, launch

TEN_MINUTES = 600


def place(*args):
    """Who this rank is, according to torch.distributed, the environment and `init`."""
    device = init()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": str(device),
        "environment": [int(os.environ[name]) for name in names if name in os.environ],
        "pid": os.getpid(),
        "args": args,
    }


def total(x):
    """A sum over the ranks and a view of it: neither may arrive as a handle to this process's memory."""
    mine = x * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return {"sum": mine, "view": mine[1:], "parameter": torch.nn.Parameter(mine.clone())}


def echo(value):
    return value


def nest(nested):
    """What becomes of a launch inside a rank: its result, or the first line of its refusal."""
    try:
        return launch(echo, 1, "inner", timeout=60.0, nested=nested)
    except RuntimeError as why:
        return str(why)


def threads():
    return torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])


def collected(import_something):
    """Of a new module and of a cycle of this run: are they looked at by a full collection?"""
    if import_something:
        importlib.import_module("xmlrpc.server")
        globals()["cycle"] = weakref.ref(Cycle())
    looked_at = {id(thing) for thing in gc.get_objects()}
    module = sys.modules["xmlrpc.server"]
    return id(vars(module)) in looked_at, globals()["cycle"]() is None


class Cycle:
    def __init__(self):
        self.itself = self


def rejoin():
    """Leaves the group and joins a new one, twice."""
    for _ in range(2):
        # Together: a rank that leaves early closes connections that others may still be using.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"leaves/{dist.get_rank()}", "")
        store.wait([f"leaves/{rank}" for rank in range(dist.get_world_size())])
        dist.destroy_process_group()
        init(20)
        one = torch.ones(1)
        dist.all_reduce(one)
    return one.item()


def load():
    return [batch.tolist() for batch in DataLoader(range(4), batch_size=2, num_workers=1)]


def leave_first():
    """Rank 0 sends and returns while the others have not yet begun to read."""
    x = torch.full((1_000_000,), float(dist.get_rank()))
    if dist.get_rank():
        time.sleep(0.5)
    dist.broadcast(x, 0)
    return x.sum().item()


def listening():
    """Addresses at which this process listens or talks, with a second group in use."""
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return [(c.laddr.ip, c.status) for c in psutil.Process().net_connections("inet")]


def raises(first):
    """Rank `first` raises at once, the next a moment later, the others wait for them."""
    dist.barrier()
    if dist.get_rank() == first:
        raise ValueError(f"bad luck on {dist.get_rank()}")
    if dist.get_rank() == (first + 1) % dist.get_world_size():
        time.sleep(0.2)
        raise KeyError("a consequence")
    wait_for_all()


def wait_for_all():
    dist.all_reduce(torch.ones(1))


def dies(how):
    """The last rank dies, as `how` says, while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        {"exit": lambda: os._exit(3), "sys": lambda: sys.exit("enough"), "kill": suicide}[how]()
    wait_for_all()


def suicide():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_with_heir():
    """Rank 1 dies, but a process that it forked holds all its pipes open for a while."""
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(35)
            os._exit(0)
        suicide()
    wait_for_all()


def hangs(absent=1):
    """Rank `absent` never comes to the collective that the others wait in."""
    if dist.get_rank() == absent:
        oversleep()
    wait_for_all()


def oversleep():
    time.sleep(TEN_MINUTES)


def hang_and_tell(path):
    """Says in a file that the collective is about to hang."""
    if dist.get_rank() == 0:
        with open(f"{path}.new", "w") as file:
            json.dump([os.getpid(), os.getppid()], file)
        os.rename(f"{path}.new", path)
    hangs(absent=0)


def rest_and_tell(path):
    """A second and a half in 15 turns. Says in a file that it has begun."""
    for turn in range(15):
        if turn == dist.get_rank() == 0:
            Path(path).touch()
        time.sleep(0.1)
    return turn + 1


def not_to_be_pickled():
    return threading.Lock() if dist.get_rank() == 1 else None


class Unpicklable:
    def __reduce__(self):
        return int, ("not a number",)


def not_to_be_unpickled():
    return Unpicklable() if dist.get_rank() == 1 else None


def forks():
    """Rank 0 forks four times; each copy leaves the function. Their exit codes, which tell that they have ended."""
    codes = []
    for way in ("return", "exit", "raise", "raise unheard") if dist.get_rank() == 0 else ():
        if (child := os.fork()) == 0:
            if way == "exit":
                sys.exit(3)
            if way == "raise unheard":
                sys.stderr.close()
            if "raise" in way:
                raise ValueError("the copy's own")
            return "of a copy"
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    wait_for_all()
    return codes


def prints():
    print(f"out of rank {dist.get_rank()}")
    print(f"err of rank {dist.get_rank()}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hang"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        pool = Ranks(2)
        pool.run(echo, 0)
        if "heir" in sys.argv and os.fork() == 0:
            time.sleep(TEN_MINUTES)
        pool.run(hang_and_tell, sys.argv[2])
    elif sys.argv[1:2] == ["rest"]:
        with Ranks(2) as pool:
            pool.run(echo, 0)
            print(pool.run(rest_and_tell, sys.argv[2], timeout=3.0))
    elif sys.argv[1:2] == ["prints"]:
        Ranks(2).run(prints)  # which is never closed
    else:
        here = place()
        wait_for_all()
        sockets = psutil.Process().net_connections("inet")
        here["listening"] = [c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN]
        dist.destroy_process_group()
        sys.stdout.write(json.dumps(here) + "\n")
