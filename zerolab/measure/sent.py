"""What a rank sends with any library: counted at torch's collectives, which every one of them must use.

    with Sent() as sent:
        loss.backward()
    sent.bytes, sent.calls

zerolab's own engine knows more about its collectives: `ledger` (traffic.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SentCall(NamedTuple):
    """A collective. payload: bytes of the full tensor. sent: by this rank, if it runs as a ring. members: ranks."""

    op: str
    payload: int
    sent: float
    members: int


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in the block if collectives run as rings; `bytes` is the sum.

    All ranks but one pass a broadcast on, so it counts as (N-1)/N of its size on each. `bytes` is None if something was
    called whose traffic we cannot tell. `calls` has every collective, in order.
    """

    TIMES = {
        "allreduce_": 2,
        "broadcast_": 1,
        "_allgather_base_": 1,
        "allgather_": 1,
        "allgather_into_tensor_coalesced_": 1,
        "_reduce_scatter_base_": 1,
        "reduce_scatter_": 1,
        "reduce_scatter_tensor_coalesced_": 1,
        "alltoall_base_": 1,
        "barrier": 0,
    }
    REDUCING = ("allreduce_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SentCall] = []
        self.unknown = False

    @property
    def bytes(self) -> float | None:
        return None if self.unknown else sum(call.sent for call in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: tuple[Any, ...]) -> None:
        times = self.TIMES.get(op)
        if times is None:
            self.unknown = True
            return
        sizes = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args[:2]]
        size = sizes[0] if op in ("allreduce_", "broadcast_") else max(sizes)
        rank, members = group_of(args)
        share = 1 / members  # the part that stays on this rank
        if op == "alltoall_base_" and (splits := args[4]):
            size, share = sizes[1], splits[rank] / max(1, sum(splits))
        self.calls.append(SentCall(op, size, times * size * (1 - share), members))


def group_of(args: tuple[Any, ...]) -> tuple[int, int]:
    """This rank's place in the process group among a collective's arguments, and the group's size."""
    for arg in args:
        if "ProcessGroup" in str(arg):
            group = dist.ProcessGroup.unbox(arg)
            return group.rank(), group.size()
    return dist.get_rank(), dist.get_world_size()
