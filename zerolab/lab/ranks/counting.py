"""Which collectives a block of code makes, whoever makes them: the learner's own lines, or torch's DDP in C++.

    with calls() as book:
        average(params)
    len(book.calls), book.payload, book.sent     # on this rank

It watches torch's dispatcher, not the Python functions (intercept.py): DDP calls collectives from C++, past them.
The engine has its own ledger (`measure.ledger`), which knows units and phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolab.lab.ranks.intercept import bytes_in_a_ring, nbytes

MESSAGES = ("send", "recv", "recv_any_source")
NO_BYTES = ("barrier", "wait_tensor", "wrap_tensor_autograd")


class Raw(NamedTuple):
    """One call: the dispatcher's name for it, and the bytes that it reduces, gathers or sends, all parts together."""

    op: str
    payload: int


@dataclass
class Book:
    """The calls of one rank, in order."""

    world_size: int
    calls: list[Raw] = field(default_factory=list)
    sent_by: list[float] = field(default_factory=list)  # by each call

    @property
    def payload(self) -> int:
        return sum(call.payload for call in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that this rank sends when the calls run as rings."""
        return sum(self.sent_by)


class _Watch(TorchDispatchMode):
    """Every collective passes torch's dispatcher, where a mode sees it, even from the threads of backward."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):  # the second is what DTensor and torch.compile use
            op = function._opname.strip("_")
            if op not in NO_BYTES:
                group = _group(args)
                size = group.size() if group is not None else self.book.world_size
                largest = max(map(nbytes, tree_leaves((args, kwargs or {}))), default=0)
                if op == "allgather":  # into a list, whose tensors are the ranks' parts
                    largest = sum(map(nbytes, tree_leaves(args[0])))
                elif op == "reduce_scatter":  # from such a list
                    largest = sum(map(nbytes, tree_leaves(args[1])))
                elif op == "all_gather_into_tensor":  # it returns its result
                    largest = nbytes(args[0]) * size
                self.book.calls.append(Raw(op, largest))
                self.book.sent_by.append(_sent(op, largest, args, group, size))
        return function(*args, **(kwargs or {}))


def _group(args: Any) -> dist.ProcessGroup | None:
    """The group that makes the call, if its arguments name one."""
    for value in tree_leaves(args):
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value)
    name: Any = args[-1] if args else None
    named = isinstance(name, str)
    return _resolve_process_group(name) if named else None


def _sent(op: str, payload: int, args: Any, group: dist.ProcessGroup | None, size: int) -> float:
    """What this rank sends: of a message all, of an uneven all-to-all what its splits give to others."""
    if op in MESSAGES:
        return float(payload) if op == "send" else 0.0
    if op == "alltoall_base" and (splits := args[4]):
        rank = group.rank() if group is not None else dist.get_rank()
        return nbytes(args[1]) * (1 - splits[rank] / max(1, sum(splits)))
    return bytes_in_a_ring(op, payload, size)


@contextmanager
def calls() -> Iterator[Book]:
    """Record the block. Every operation passes through Python: do not measure times inside."""
    book = Book(dist.get_world_size())
    with _Watch(book):
        yield book
