"""Groups of ranks that make collectives together, and how their threads end with the process."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from zerolab.comm.flight import Log, log_of
from zerolab.comm.flight import stop as stop_flight_recorder
from zerolab.world.environment import at_leave

with suppress(ImportError):  # its defaults keep the process group they find at import for good: so import it now
    import torch.distributed.nn.functional


class Group(NamedTuple):
    """Ranks that make a collective together: torch's group, this rank's number in it, and how many they are.

    `link`: with a mesh, "inside" a shard group or "between" its replicas, as in `Call`."""

    handle: dist.ProcessGroup
    rank: int
    size: int
    log: Log
    link: str = ""

    def check_sizes(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        if full.numel() != self.size * shard.numel():
            raise ValueError(
                f"rank {dist.get_rank()}: {shard.numel()} elements are not the shard of {full.numel()} on {self.size} "
                f"ranks: the full tensor needs {self.size} times as many"
            )


_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()
_mesh_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], tuple[Group, Group]]] = WeakKeyDictionary()
_holders: WeakSet[object] = WeakSet()
_process = 0  # the process that made the groups; a fork of it has none of their threads


def group_of(handle: dist.ProcessGroup, link: str = "") -> Group:
    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle), log_of(handle), link)


def control_group(handle: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """A gloo group of the same ranks for messages about the run, made once for each group.

    `dist.new_group` will not do: it names groups by how many this process is in, which may differ between ranks.
    """
    if handle not in _control_groups:
        store = dist.PrefixStore(f"zerolab/control/{handle.group_name}", dist.distributed_c10d._get_default_store())
        rank, size = dist.get_rank(handle), dist.get_world_size(handle)
        timeout = _timeout_of(handle)
        if waits_on_device(handle):  # speak before torch's watchdog ends the process at the group's timeout
            timeout *= 0.75
        _control_groups[handle] = dist.ProcessGroupGloo(store, rank, size, timeout)
    return _control_groups[handle]


def backends_of(handle: dist.ProcessGroup) -> dict[str, str]:
    """Which backend serves each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(part.split(":", 1) for part in dist.get_backend_config(handle).split(","))


def waits_on_device(handle: dist.ProcessGroup) -> bool:
    """Whether it is the device that waits for this group's collectives, as on NCCL: the host hears of no failure."""
    return dist.get_backend(handle) != "gloo"


def checked_mesh(mesh: Any, group: dist.ProcessGroup | None, stage: int) -> tuple[int, int] | None:
    if mesh is None:
        return None
    if stage == 0 or group is not None:
        other = "stage 0, which replicates everything anyway" if stage == 0 else "group"
        raise ValueError(f"mesh={mesh!r} does not go with {other}")
    mesh, ranks = tuple(mesh), dist.get_world_size() if dist.is_initialized() else 1
    if len(mesh) != 2 or not all(isinstance(n, int) and n >= 1 for n in mesh) or mesh[0] * mesh[1] != ranks:
        raise ValueError(f"mesh={mesh}: (replicas, ranks that share one), two numbers whose product is {ranks}")
    return mesh


def mesh_groups(everyone: Group, mesh: tuple[int, int]) -> tuple[Group, Group]:
    """This rank's shard group, which shares one replica, and its replicate group, which holds the same shard of each.

    Made once for each mesh. Every rank takes part in making every group, even one it is not in.
    """
    known = _mesh_groups.setdefault(everyone.handle, {})
    if mesh not in known:
        replicas, size = mesh
        rows = [list(range(first, first + size)) for first in range(0, replicas * size, size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        timeout = _timeout_of(everyone.handle)
        made = [[dist.new_group(ranks, timeout=timeout) for ranks in lines] for lines in (rows, columns)]
        replica, place = divmod(everyone.rank, size)
        known[mesh] = group_of(made[0][replica], "inside"), group_of(made[1][place], "between")
    return known[mesh]


def _timeout_of(handle: dist.ProcessGroup) -> timedelta:
    backend = handle._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(handle) else "cpu"))
    return backend.options._timeout


def hold(holder: object) -> None:
    """Remember an object that holds groups: when the process ends, or leaves them, its attributes are cleared."""
    global _process
    _process = os.getpid()
    _holders.add(holder)


def _clear() -> None:
    """Let go of all groups. A holder may be kept alive by a graph whose hooks lead to it, and which it leads to itself:
    Python does not see such a circle, and the threads of its group would look for messages a hundred times a second."""
    for holder in list(_holders):
        vars(holder).clear()
    _control_groups.clear()
    _mesh_groups.clear()


at_leave.append(_clear)


@atexit.register
def _let_go() -> None:
    """End the threads that work for this package: one that wants the interpreter after its end aborts the process.

    gloo's threads do: a finished collective is dropped a little later, tensors and all, by the thread that ran it
    (pytorch issue 190489). The threads end with their groups, and this file knows who holds groups. A collective that
    is still under way, because something failed, is waited for until its group's timeout, as torch does.
    """
    stop_flight_recorder()
    if os.getpid() != _process:
        return
    _clear()
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
