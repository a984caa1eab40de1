"""Which collectives a block of code makes, whoever makes them: the learner's own lines, or torch's DDP in C++.

    with calls() as book:
        average(params)
    len(book.calls), book.payload, book.sent     # on this rank

The engine has a ledger of its own (`measure.ledger`), which knows units and phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Raw(NamedTuple):
    """One call: its name, and the bytes of what is reduced, gathered or sent, all ranks' parts together."""

    op: str
    payload: int


@dataclass
class Book:
    """The calls of one rank, in order."""

    world_size: int
    calls: list[Raw] = field(default_factory=list)

    @property
    def payload(self) -> int:
        return sum(call.payload for call in self.calls)

    @property
    def sent(self) -> float:
        """Bytes that this rank sends when the calls run as rings: (N-1)/N of each payload, twice that to all-reduce."""
        share = (self.world_size - 1) / self.world_size
        return sum((2 if call.op == "allreduce" else 1) * call.payload * share for call in self.calls)


class _Watch(TorchDispatchMode):
    """Every collective passes torch's dispatcher, where a mode sees it, also from the threads of backward."""

    def __init__(self, book: Book) -> None:
        super().__init__()
        self.book = book

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            op = function._opname.strip("_")
            sizes = [t.numel() * t.element_size() for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
            if op != "barrier":
                self.book.calls.append(Raw(op, max(sizes, default=0)))
        return function(*args, **(kwargs or {}))


@contextmanager
def calls() -> Iterator[Book]:
    """Record the block. Every operation passes through Python: do not measure times inside."""
    book = Book(dist.get_world_size())
    with _Watch(book):
        yield book
