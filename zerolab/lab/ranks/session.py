"""What a notebook calls: `start(4)` starts live ranks (live.py), and the other functions use them until `stop()`."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch.distributed as dist

from zerolab.lab.exercises.cards import Status, shell_here
from zerolab.lab.ranks import cluster, lease, network, notices, registry
from zerolab.lab.ranks.live import ON_GPUS, CannotTravel, NoRanks, Session
from zerolab.lab.ranks.report import Misused, RankFailure, who

__all__ = [
    "CannotTravel",
    "NoRanks",
    "RankFailure",
    "Session",
    "current",
    "link",
    "need",
    "pull",
    "push",
    "reset",
    "size",
    "start",
    "stop",
]

_current: Session | None = None


def start(
    ranks: int | None = None,
    device: str = "auto",
    stop_others: bool = False,
    backend: str = "local",
    profile: str | None = None,
    connection: str | os.PathLike | None = None,
) -> Session:
    """Start live ranks, four by default, in place of this notebook's earlier ones, and say what they run on.

    device: "cpu"; "cuda": one GPU per rank if there are enough, else several ranks share one; "auto": one GPU per
    rank if CUDA_VISIBLE_DEVICES names enough of them, else the CPU. In a classroom, "cuda" waits until this notebook is
    lent GPUs. stop_others: first end the ranks of other notebooks.

    backend: "local", or "ipyparallel" to use the engines of a running cluster (Slurm, SSH, MPI) as ranks. Each engine
    gets the rank that its scheduler gave it (cluster.py); without `ranks`, all engines are used. profile: the cluster's
    IPython profile. connection: its ipcontroller-...-client.json, if it is not in the profile or has an id in its name.
    """
    global _current
    if backend not in ("local", "ipyparallel"):
        raise Misused(f'backend={backend!r}, but must be "local" or "ipyparallel"')
    if backend == "local" and (profile or connection):
        raise Misused('profile and connection describe a cluster: add backend="ipyparallel"')
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= 64):
        raise Misused(f"ranks={ranks!r}, but must be a whole number from 1 to 64")
    if device not in ("auto", "cpu", "cuda"):
        raise Misused(f'device={device!r}, but must be "auto", "cpu" or "cuda"')
    leased = backend == "local" and device == "cuda" and lease.needed()
    number = 4 if ranks is None else ranks
    if backend == "local" and not leased:
        kind, says = _choose_device(number, device)
    stop()
    if (shell := shell_here()) is not None and backend == "local":  # in a notebook of one's own
        shell.extension_manager.load_extension("zerolab.lab")
    notices.show()
    _mention_others(stop_others)
    live: Session
    lent = None
    status = Status()
    try:
        if backend == "ipyparallel":
            live, says = cluster.find(ranks, device, profile, connection)
        else:
            lent = lease.ask(number) if leased else None
            if lent is not None:
                kind, says = _choose_leased(number, lent)
                lent.busy(True)  # starting ranks, which may take long
            status(f"starting {_many(number)}: waiting for torch to be imported and for a Python process each ...")
            live = Session(number, kind, lent)
            live.launch(range(number))
        status(f"{_many(live.size)} started: waiting for them to form a process group ...")
        try:
            live.join()
        except BaseException:
            live.stop()
            raise
        if lent is not None:
            lent.busy(False)
    except BaseException:
        status("the ranks did not start")
        raise
    _current = live
    status.print(f"{_many(live.size)} {says}")
    return live


def _many(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _choose_device(ranks: int, device: str) -> tuple[str, str]:
    """What the ranks run on, and the end of the sentence that says so."""
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise NoRanks('device="cuda", but torch sees no GPU here: leave it out to run on the CPU')
    if device == "auto" and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = 0  # the machine may be shared, and nobody said that these GPUs are ours
    if gpus >= ranks and dist.is_nccl_available():
        return "nccl", ON_GPUS
    if device == "cuda":
        shared = f"share {gpus} GPU{'s' * (gpus > 1)}, talking through gloo"
        return "shared", f"{shared}: bytes are real, times are not, as copies go through host memory."
    return "cpu", "on the CPU, one thread each, talking through gloo: bytes and calls are real, times say little."


def _choose_leased(ranks: int, lent: lease.Lease) -> tuple[str, str]:
    """The same for GPUs that are lent. This process sees none of them."""
    if lent.rehearsal:
        return "cpu", f"on the CPU, because this classroom is a rehearsal without GPUs (leased: {lent})."
    if len(lent.gpus) >= ranks and dist.is_nccl_available():
        return "nccl", ON_GPUS
    return "shared", f"share {lent}, talking through gloo: bytes are real, times are not."


def _mention_others(stop_others: bool) -> None:
    for entry in registry.others():
        pid, many = entry.notebook[0], len(entry.living())
        if stop_others:
            print(f"stopped {registry.stop(entry)} ranks of another notebook (process {pid})")
        else:
            other = f"another notebook (process {pid}) has {many} live rank{'s' * (many > 1)}"
            print(f"{other}; to stop them: lab.stop() there, or lab.start(..., stop_others=True) here")


def current() -> Session | None:
    """This notebook's live ranks, if it has any."""
    return None if _current is None or _current.stopped else _current


def need() -> Session:
    """This notebook's live ranks. Raises NoRanks if it has none."""
    live = current()
    if live is None:
        raise NoRanks("there are no live ranks: lab.start(4) starts four")
    return live


def stop() -> None:
    """End this notebook's ranks, if it has any."""
    if (live := current()) is not None:
        live.stop()


def reset() -> None:
    """Give the ranks fresh process groups and restart the dead ones. Variables are kept, except on restarted ranks."""
    live = need()
    fresh = live.reset()
    kept = sorted(set(range(live.size)) - set(fresh))
    print("fresh process groups; models sharded before belong to the old ones: build them again")
    if fresh:
        print(f"restarted, their variables are gone: {who(fresh, live.size)}")
    if kept and fresh:
        print(f"variables kept: {who(kept, live.size)}")


def push(**values: Any) -> None:
    """`push(x=3)` sets x to 3 on every rank."""
    need().push(**values)


def pull(name: str, rank: int | None = None) -> Any:
    """The value of a variable on every rank, as a list in rank order, or its value on one rank."""
    return need().pull(name) if rank is None else need().pull(name, [rank])[0]


def size() -> int:
    """The number of live ranks: 0 before `start`."""
    live = current()
    return 0 if live is None else live.size


_ASK = "?"


class _Linker:
    """`link("200 MB/s, 50 us")` emulates such a network on the live ranks, `link(None)` ends that, `link()` says which.

    network.py says what an emulated link does.
    """

    def __call__(self, text: str | None = _ASK) -> None:
        live = need()
        if text != _ASK:
            live.link(text)
        print(f"emulated link: {live.emulated}" if live.emulated else "no emulated link: as fast as this machine is")

    def current(self) -> str | None:
        """The emulated link of the live ranks, as it was asked for; plots put it in their titles."""
        live = current()
        return network.current() if live is None else live.emulated


link = _Linker()

atexit.register(stop)
