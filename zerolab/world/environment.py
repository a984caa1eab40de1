"""Who the ranks are: `init` joins the world that the environment describes.

    python train.py                                # a world of one rank
    torchrun --nproc-per-node 4 train.py           # four ranks on this machine
    srun --nodes 2 --ntasks-per-node 4 python train.py

If each rank has a GPU of its own, the ranks talk through NCCL, else through gloo, on the CPU.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")

at_return: list[Callable[[], None]] = []  # called when the function that a rank was given by `launch` has returned
at_leave: list[Callable[[], None]] = []  # called before the rank of a pool leaves its process group for another
given_up = threading.Event()  # this process no longer waits for a collective that is under way and can never end
_stores: Iterator[dist.Store] | None = None  # a store for each call of `init`, where `meet_in` gave some
_cpu_too = False  # whether ranks with a GPU each can send what is on the CPU as well


class Place(NamedTuple):
    """Which rank this process is, of how many, in the world and on its machine, and where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def init(timeout: float = 300.0) -> torch.device:
    """Join the default process group that the environment describes; return this rank's device.

    The environment is torchrun's, else srun's, else empty: a world of one. A collective that waits for more
    than `timeout` seconds fails. If torch.distributed is already initialised, this only returns the device.

    Raises RuntimeError, naming the variable, if the environment is incomplete or contradicts itself.
    """
    timeout = seconds("timeout", timeout)
    if not dist.is_initialized():
        _join(read_place(os.environ), timeout)
    if torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seconds(name: str, value: Any, most: float = 1e9) -> float:
    """`value`, if it is a number of seconds to wait. Raises ValueError, which says what may be.

    most: more, counted in nanoseconds from now, does not fit into torch's 64 bits.
    """
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 < number <= most:
        end = "math.inf waits without end" if most == math.inf else f"at most {most:,.0f}"
        raise ValueError(f"{name}={value!r}, but must be a number of seconds, more than 0 ({end})")
    return float(number)


def meet_in(stores: Iterator[dist.Store] | None, cpu_too: bool = False) -> None:
    """From now on, each call of `init` in this process takes the next of `stores`; None: what the environment says.

    cpu_too: ranks with a GPU each send what is on the CPU as well, through gloo: NCCL takes only what is on a GPU.
    """
    global _stores, _cpu_too
    _stores, _cpu_too = stores, cpu_too


def _join(place: Place, timeout: float) -> None:
    if _is_loopback(place.address):  # otherwise gloo listens at the address of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if _stores is not None:
        meet: dict[str, Any] = {"store": next(_stores)}
    elif place.world_size == 1:
        meet = {"store": dist.HashStore()}
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.local_world_size == place.world_size:
        # torchrun's store outlives its restarts. Addresses that earlier lives left there must not be found: nobody
        # answers at them. (Between machines the restarts are not counted alike, so there the store is left as it is.)
        store = dist.TCPStore(place.address, place.port, place.world_size, False, timedelta(seconds=timeout))
        meet = {"store": dist.PrefixStore(f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)}
    else:
        host = f"[{place.address}]" if ":" in place.address else place.address
        meet = {"init_method": f"tcp://{host}:{place.port}"}
    if gpu := _own_gpu(place):
        torch.cuda.set_device(gpu)
    elif _stores is None and (count := torch.cuda.device_count()) and place.local_rank == 0:
        warnings.warn(
            f"{place.local_world_size} ranks on this machine, and this one sees {count} GPU{'s' * (count > 1)}: they "
            "train on the CPU, through gloo. If each rank sees a GPU of its own (mpirun, --gpu-bind), set "
            "SLURM_GPUS_PER_TASK=1; else start as many ranks as there are GPUs",
            stacklevel=3,
        )
    dist.init_process_group(
        ("cpu:gloo,cuda:nccl" if _cpu_too else "nccl") if gpu else "gloo",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=gpu,
        **meet,
    )


def _own_gpu(place: Place) -> torch.device | None:
    """The GPU that no other rank of this machine uses, if there is one."""
    count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if place.local_world_size <= count:
        return torch.device("cuda", place.local_rank)
    if count and "SLURM_GPUS_PER_TASK" in os.environ:  # then each rank sees only its own, counted from 0
        return torch.device("cuda", 0)
    return None


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


# ---------------------------------------------------------------------- reading the environment


def read_place(env: Mapping[str, str]) -> Place:
    """The place that torchrun's or Slurm's variables describe; without any, a world of one.

    Raises RuntimeError, naming the variable, if they are incomplete or contradict each other.
    """
    if "RANK" in env or ("WORLD_SIZE" in env and "SLURM_PROCID" not in env):
        names = TORCHRUN
        if env.get("WORLD_SIZE") == "1" or _is_loopback(env.get("MASTER_ADDR", "")):  # all ranks are here
            env = {"LOCAL_RANK": env.get("RANK", ""), "LOCAL_WORLD_SIZE": env.get("WORLD_SIZE", "")} | dict(env)
    elif "SLURM_PROCID" in env and (env["SLURM_PROCID"], env.get("SLURM_NTASKS", "1")) != ("0", "1"):
        names = SLURM  # a batch script has a SLURM_PROCID too, but is one process
        env = _with_what_follows(env)
    else:
        return Place()
    numbers = [_number(env, name) for name in names]
    for i in (0, 2):
        if numbers[i] >= numbers[i + 1]:
            raise _bad(env, f"{names[i]}={numbers[i]} must be less than {names[i + 1]}={numbers[i + 1]}")
    if numbers[1] == 1:
        return Place()
    rank, world_size, local_rank, local_world_size = numbers
    address, port = _value(env, "MASTER_ADDR"), _number(env, "MASTER_PORT")
    if not 0 < port < 2**16:  # `torchrun --master-port 0` sets 0, where nobody would ever meet
        raise _bad(env, f"MASTER_PORT={port} is not a port: set it to one from 1 to 65535")
    return Place(rank, world_size, local_rank, local_world_size, address, port)


def _value(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise _bad(env, f"{name} is not set: start with torchrun or srun, which set it, or set it on every rank")
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    if not _value(env, name).isdecimal():
        raise _bad(env, f"{name}={env[name]!r} is not a number: set it to one, 0 or more")
    return int(env[name])


def _bad(env: Mapping[str, str], what: str) -> RuntimeError:
    return RuntimeError(f"rank {env.get('RANK') or env.get('SLURM_PROCID') or 'unknown'} cannot start: {what}")


def _with_what_follows(slurm: Mapping[str, str]) -> dict[str, str]:
    """Slurm's environment and what follows from it: the ranks on this node, the address and port of rank 0."""
    env = dict(slurm)
    hosts = env.get("SLURM_STEP_NODELIST") or ("SLURM_STEP_ID" in env and env.get("SLURM_NODELIST")) or ""
    if not env.setdefault("MASTER_ADDR", first_host(hosts)):
        hint = "start with srun (a batch script alone is one process), or set MASTER_ADDR to the host of rank 0"
        raise _bad(env, f"SLURM_NTASKS={env.get('SLURM_NTASKS')}, but no SLURM_STEP_NODELIST: {hint}")

    per_node = []  # "2(x3),1": two ranks on each of three nodes, one on the fourth
    for ranks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        per_node += [ranks] * int(repeat or 1)
    if per_node:  # what this step has; the other variable is what the job asked for
        env["SLURM_NTASKS_PER_NODE"] = per_node[int(env.get("SLURM_NODEID", 0))]
    elif env.get("SLURM_NNODES", "1") == "1":
        env.setdefault("SLURM_NTASKS_PER_NODE", env.get("SLURM_NTASKS", ""))

    if "SLURM_JOB_ID" in env:  # the step counts too: two that run side by side must not meet each other
        number = int(env["SLURM_JOB_ID"]) + 97 * int(env.get("SLURM_STEP_ID", 0))
        env.setdefault("MASTER_PORT", str(10000 + number % 20000))  # below the ports that systems hand out as free
    return env


def first_host(hosts: str) -> str:
    """`node[03-07,9],login1` -> `node03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group()) if first else ""
