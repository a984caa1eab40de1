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
    sizes: list[int] = field(default_factory=list)  # of each call's group

    @property
    def payload(self) -> int:
        return sum(call.payload for call in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that this rank sends when the calls run as rings."""
        return sum(bytes_in_a_ring(*call, size) for call, size in zip(self.calls, self.sizes, strict=True))


class _Watch(TorchDispatchMode):
    """Every collective passes torch's dispatcher, where a mode sees it, even from the threads of backward."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):  # the second is what DTensor and torch.compile use
            op = function._opname.strip("_")
            if op not in NO_BYTES:
                size = _group_size(args, self.book.world_size)
                largest = max(map(nbytes, tree_leaves((args, kwargs or {}))), default=0)
                if op == "allgather":  # into a list, whose tensors are the ranks' parts
                    largest = sum(map(nbytes, tree_leaves(args[0])))
                elif op == "reduce_scatter":  # from such a list
                    largest = sum(map(nbytes, tree_leaves(args[1])))
                elif op == "all_gather_into_tensor":  # it returns its result
                    largest = nbytes(args[0]) * size
                self.book.calls.append(Raw(op, largest))
                self.book.sizes.append(size)
        return function(*args, **(kwargs or {}))


def _group_size(args: Any, world_size: int) -> int:
    """How many ranks make the call together."""
    for value in tree_leaves(args):
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value).size()
    name: Any = args[-1] if args else None
    named = isinstance(name, str)
    return _resolve_process_group(name).size() if named else world_size


@contextmanager
def calls() -> Iterator[Book]:
    """Record the block. Every operation passes through Python: do not measure times inside."""
    book = Book(dist.get_world_size())
    with _Watch(book):
        yield book
