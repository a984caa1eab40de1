"""A backend as strict as NCCL on a GPU, for tensors on the CPU, so that the native branch of comm/ runs without one.

gloo forgives: a result is often there before anyone waits for it, an input may be used again at once, a wait that
fails says so. On a GPU none of this holds, and a program that relied on it trains on garbage. So here

- an output is NaN from the moment its collective is issued until `wait()`, and memory that nobody has filled is NaN;
- until then input and output must stay as they are, and their memory must not be released;
- a mean is NCCL's: each rank multiplies by 1/N, rounded to the dtype, then all add up, in the dtype;
- a group runs its collectives one after the other, each only when all ranks have issued it; if ranks issue different
  ones, or a rank is missing, nothing of that group ever arrives again;
- `wait()` raises nothing: after `patience` seconds it returns, and the output is still NaN;
- one rank may be late all the time;
- a collective that nobody has waited for is an error when the world ends.

What cannot be had here: streams, and an allocator that hands memory out again while a device still reads it.

    with strict.world(late=1):
        train(...)
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.world.processes import Patience

FOREVER = 60.0  # seconds after which a wait that should have ended has failed; a machine that stands still has none
LAG = 0.002  # seconds by which each collective of a late rank is late


class Broken(AssertionError):
    """Something was done that a GPU would answer with wrong numbers."""


@dataclass
class World:
    """What the groups of one world share."""

    late: int | None = None  # a rank
    patience: float | None = None  # seconds; None: waits end when the data is there
    flying: list[Work] = field(default_factory=list)  # issued, not waited for
    most: Counter[str] = field(default_factory=Counter)  # for each operation, how many were under way at a time
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)  # how often each operation ran with which reduction


_here = World()


class Work:
    """A collective under way. `touched`: its tensors, which must stay as they are until `wait`."""

    def __init__(self, name: str, output: Tensor, touched: list[Tensor]) -> None:
        self.name, self.output = name, output
        self.touched = [(tensor, tensor.data_ptr(), _bytes(tensor).clone()) for tensor in touched]
        self.result: Tensor | None = None
        self.done = threading.Event()
        _here.flying.append(self)
        kind = name.split()[0]
        _here.most[kind] = max(_here.most[kind], sum(work.name.split()[0] == kind for work in _here.flying))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self not in _here.flying:  # a second wait changes nothing
            return True
        _here.flying.remove(self)
        arrived = self.done.wait(_here.patience) if _here.patience else self._arrives()
        for tensor, place, before in self.touched:
            if tensor.data_ptr() != place or (tensor.numel() and tensor.untyped_storage().size() == 0):
                raise Broken(f"{self.name}: memory was released before the wait")
            if not torch.equal(_bytes(tensor), before):
                raise Broken(f"{self.name}: memory was written to before the wait")
        self.touched = []
        if arrived and self.result is not None:
            self.output.copy_(self.result)
        elif _here.patience is None:
            raise Broken(f"{self.name}: the ranks issued different collectives, or one is missing")
        return True

    def _arrives(self) -> bool:
        patience = Patience(FOREVER)
        while not self.done.wait(min(0.5, FOREVER)) and patience.turn() > 0:
            pass
        return self.done.is_set()

    def is_completed(self) -> bool:
        return self.done.is_set()


class StrictGroup(dist.ProcessGroup):
    """Moves everything through gloo, in a thread of its own: the device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._jobs: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._device = threading.Thread(target=self._run, daemon=True)
        self._device.start()

    def getBackendName(self) -> str:
        return "strict"

    def _set_group_name(self, name: str) -> None:
        self.name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo

    def _run(self) -> None:
        while (job := self._jobs.get()) and job():
            pass

    def leave(self) -> None:
        self._jobs.put(None)
        self._device.join(0.0 if _here.patience else FOREVER)

    # -- what torch.distributed calls; torch before 2.13 has the older names ------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self._issue("all_gather", output, input, lambda rows: rows.view(output.shape))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        mine = slice(self.rank() * output.numel(), (self.rank() + 1) * output.numel())
        _here.ops["reduce_scatter", _named(opts.reduceOp)] += 1
        return self._issue("reduce_scatter", output, input, lambda rows: _reduce(rows[:, mine], opts.reduceOp))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        _here.ops["all_reduce", _named(opts.reduceOp)] += 1
        return self._issue("all_reduce", tensor, tensor, lambda rows: _reduce(rows, opts.reduceOp).view(tensor.shape))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        return self._issue(
            "broadcast", tensor, tensor, lambda rows: rows[opts.rootRank].view(tensor.shape), opts.rootRank
        )

    def all_to_all_single(self, output: Tensor, input: Tensor, coming: list[int], going: list[int], opts: Any) -> Work:
        def move(sent: Tensor) -> Tensor:
            result = torch.empty(output.numel(), dtype=sent.dtype)
            self._gloo.alltoall_base(result, sent, coming, going, dist.AllToAllOptions()).wait()
            return result.view(output.shape)

        return self._issue("all_to_all", output, input, move=move)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    # -- the device ---------------------------------------------------------------------------------------------------

    def _issue(
        self,
        op: str,
        output: Tensor,
        input: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
        root: int | None = None,
        move: Callable[[Tensor], Tensor] | None = None,
    ) -> Work:
        """`finish` makes the output of all ranks' inputs, (N, numel); or `move` of this rank's, whatever its size."""
        output, input = output.detach(), input.detach()
        if not (output.is_contiguous() and input.is_contiguous()):
            raise Broken(f"{op}: NCCL wants dense tensors")
        sent = input.clone().view(-1)
        if root != self.rank():
            _bytes(output).fill_(255)  # NaN in each dtype of floating point
        if op == "all_gather":  # the input may be this rank's part of the output
            input.copy_(sent.view(input.shape))
        work = Work(f"{op} of {tuple(input.shape)}", output, [output, input])
        kind = zlib.crc32(repr((op, sent.shape if finish else None, sent.dtype, root)).encode())

        def job() -> bool:
            if self.rank() == _here.late:
                time.sleep(LAG)
            try:
                kinds = self._gather(torch.tensor([kind]))
                if len(set(kinds.flatten().tolist())) > 1:
                    return False  # as on a device, where ranks that do not match wait for each other for good
                work.result = finish(self._gather(sent)) if finish else move(sent)
            except RuntimeError:  # a rank is gone
                return False
            work.done.set()
            return True

        self._jobs.put(job)
        return work

    def _gather(self, row: Tensor) -> Tensor:
        rows = torch.empty(self.size() * row.numel() * row.element_size(), dtype=torch.uint8)
        if row.numel():
            self._gloo._allgather_base(rows, _bytes(row)).wait()
        return rows.view(row.dtype).view(self.size(), -1)


dist.Backend.register_backend("strict", StrictGroup, devices=["cpu"])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _named(op: Any) -> str:
    return next(name for name in ("SUM", "AVG", "MAX") if op == getattr(dist.ReduceOp, name))


def _reduce(rows: Tensor, op: Any) -> Tensor:
    """Added up in the dtype, from the last rank to the first: any order is as good as another."""
    if op == dist.ReduceOp.MAX:
        return rows.amax(0)
    if op == dist.ReduceOp.AVG:
        rows = rows * torch.tensor(1 / len(rows), dtype=rows.dtype)
    total = rows[-1].clone()
    for row in reversed(rows[:-1]):
        total += row
    return total


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    """In place of `UntypedStorage.resize_`: what a collective uses stays, and new memory is NaN."""
    if size < storage.size():
        for work in _here.flying:
            if any(tensor.untyped_storage().data_ptr() == storage.data_ptr() for tensor, *_ in work.touched):
                raise Broken(f"{work.name}: memory is released before the wait")
    grows = size > storage.size()
    torch._C.StorageBase.resize_(storage, size)
    if grows:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


def under_way() -> list[str]:
    """What is under way on this rank."""
    return [work.name for work in _here.flying]


def _meet(store: dist.Store, place: str, patience: float) -> None:
    """Wait for all ranks: who closes its connections takes them from the others."""
    store.add(place, 1)
    left = Patience(patience, longest=0.1)
    while store.add(place, 0) < dist.get_world_size() and left.turn() > 0:
        time.sleep(0.001)


@contextmanager
def world(late: int | None = None, patience: float | None = None) -> Iterator[World]:
    """Inside, the ranks of this world form another one, whose backend is strict; afterwards a new one with gloo."""
    global _here
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "timeout": timeout}
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"strict worlds of rank {ranks['rank']}", 1)  # the same on every rank
    _meet(store, f"entered {number}", FOREVER)  # gloo may still be connecting the others
    dist.destroy_process_group()
    _here = World(late, patience)
    dist.init_process_group("strict", store=dist.PrefixStore(f"strict {number}", store), **ranks)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty() gives with NaN
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    try:
        yield _here
        if _here.flying:
            raise Broken(f"nobody has waited for {_here.flying[0].name} (and {len(_here.flying) - 1} more)")
    finally:
        del torch.UntypedStorage.resize_
        torch.use_deterministic_algorithms(False)
        for group in list(dist.distributed_c10d._world.pg_map):
            if isinstance(group, StrictGroup):
                group.leave()
        _meet(store, f"left {number}", patience or FOREVER)  # those who still read
        dist.destroy_process_group()
        ranks["timeout"] = timedelta(seconds=60)  # one that waits in vain comes later than the others
        dist.init_process_group("gloo", store=dist.PrefixStore(f"after strict {number}", store), **ranks)
