"""The ledger of a check: every call of torch.distributed that an answer makes, by whatever name it imported it.

Two things make mistakes visible that would otherwise depend on luck. A call with `async_op=True` fills its result
only when it is waited for, so that a forgotten wait is wrong every time. And before a call the ranks tell each other
what they are about to do: where that does not match they give up, instead of hanging, or aborting, or mixing up bytes.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.comm.collectives import is_through
from zerolab.world.processes import Patience

PATIENCE = 3.0  # seconds that a rank waits for the others
POLL = timedelta(milliseconds=50)

# The collectives, and which of their arguments they fill.
FILLED = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
    "gather": "gather_list",
    "scatter": "tensor",
    "barrier": "",
}
PICKLED = ("all_gather_object", "gather_object", "broadcast_object_list")


StandIn = tuple[Tensor, Tensor, Tensor]  # the tensor of the answer, the one that is filled for it, how it was before


class GaveUp(BaseException):
    """The others do not do what this rank does. Not an Exception: an answer shall not catch it by accident."""


@dataclass
class Traffic:
    """One call. `payload`: bytes of the whole, all ranks' parts together. `to`, `source`: of an exchange."""

    op: str
    payload: int
    world_size: int
    to: int = -1
    source: int = -1
    kept: int | None = None  # of an uneven all-to-all: bytes of `payload`, then this rank's alone, that stay here
    waited: bool = False
    touched: bool = False  # its result was changed between the start and the wait, and the change is lost

    @property
    def sent(self) -> float:
        """Bytes that this rank sends when the call runs as a ring, which is what the course counts."""
        if self.op in ("exchange", "send"):
            return self.payload
        if self.kept is not None:
            return self.payload - self.kept
        return (2 if self.op == "all_reduce" else 1) * self.payload * (self.world_size - 1) / self.world_size


class Started:
    """What an asynchronous call returns. The result is filled in by `wait`, not before."""

    def __init__(self, spy: Spy, call: Traffic, work: Any, copies: list[StandIn]) -> None:
        self._spy, self._call, self._work, self._copies = spy, call, work, copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._spy.wait(self._work, self._call.op)
        self._call.waited = True
        with torch.no_grad():
            for target, filled, before in self._copies:
                self._call.touched |= not torch.equal(target, before)
                target.copy_(filled)
        self._copies = []
        return True

    def __getattr__(self, name: str) -> Any:  # is_completed() and what else one may ask it
        return getattr(self._work, name)

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result([])
        return future


class Spy:
    """`with spy:` replaces the functions of torch.distributed by ones that write down what they do."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, patience: float = PATIENCE) -> None:
        self.store, self.rank, self.world_size, self.patience = store, rank, world_size, patience
        self.calls: list[Traffic] = []
        self.blocks = 0  # how many times something was recorded: how far the check has come
        self._numbers: Counter[str] = Counter()  # of calls, by whom they concern
        self._originals: dict[str, Callable] = {}

    def __enter__(self) -> Spy:
        for name, filled in FILLED.items():
            if original := getattr(dist, name, None):
                self._originals[name] = original
                setattr(dist, name, self._watched(name, filled, original))
        for name in PICKLED:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._watched_pickle(name, self._originals[name]))
        self._originals["send"] = dist.send
        dist.send = self._watched_send
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """The calls of a block."""
        self.blocks += 1
        before, self.calls = self.calls, []
        calls = self.calls
        try:
            yield calls
        finally:
            self.calls = [*before, *calls]

    def exchange(self, tensor: Tensor, to: int, source: int) -> Tensor:
        """Send `tensor` to rank `to` and return what rank `source` sends here: both at once, so neither blocks."""
        for name, rank in (("to", to), ("source", source)):
            if not isinstance(rank, int) or not 0 <= rank < self.world_size:
                raise ValueError(
                    f"exchange({name}={rank!r}): ranks go from 0 to {self.world_size - 1}; did you take % N?"
                )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"exchange() sends one tensor, not a {type(tensor).__name__}")
        call = Traffic("exchange", tensor.numel() * tensor.element_size(), self.world_size, to, source)
        self.calls.append(call)
        if to == source == self.rank:
            return tensor.clone()
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self.store.set(self._next(f"{self.rank} to {to}"), str(call.payload))
        coming = self._ask(self._next(f"{source} to {self.rank}"), source, f"exchange(to={to}, source={source})")
        if int(coming) != call.payload:
            raise ValueError(
                f"rank {source} sends {coming} bytes here, which sends {call.payload}: chunks are equally long"
            )
        works = [dist.isend(tensor.detach().contiguous(), to), dist.irecv(out, source)]
        for work in works:
            work.wait(timedelta(seconds=self.patience))
        call.waited = True
        return out

    def _next(self, concerns: str) -> str:
        """A name for the next call that `concerns` these ranks, the same on all of them."""
        self._numbers[concerns] += 1
        return f"{concerns}, call {self._numbers[concerns]}"

    def _ask(self, name: str, rank: int, doing: str) -> str:
        """What `rank` has said about the call `name`, which it may not have reached yet."""
        patience = Patience(self.patience)
        while True:
            is_over = self.store.check([f"over/{rank}"])  # before the look, since it says its last word before that
            if self.store.check([name]):
                return self.store.get(name).decode()
            if is_over:
                raise GaveUp(f"{doing}: rank {rank} did not take part")
            if patience.turn() <= 0:
                raise GaveUp(f"{doing}: nothing of the kind comes from rank {rank}")
            time.sleep(0.0005)

    def _agree(self, call: Traffic) -> None:
        """Make sure that all ranks make this call now."""
        uneven = call.op in ("gather", "scatter", "all_to_all", "all_to_all_single")  # where sizes may differ
        what = call.op if uneven else f"{call.op} of {call.payload} bytes"
        name = self._next("all")
        self.store.set(f"{name} by {self.rank}", what)
        for rank in range(self.world_size):
            theirs = self._ask(f"{name} by {rank}", rank, what)
            if theirs != what:
                raise GaveUp(f"{what}: rank {rank} calls {theirs} instead")

    def _watched(self, name: str, filled: str, original: Callable) -> Callable:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            asynchronous = bool(bound.arguments.pop("async_op", False))
            payload = max((_bytes(value) for value in bound.arguments.values()), default=0)
            traffic = Traffic(name, payload, self.world_size)
            if splits := bound.arguments.get("input_split_sizes"):
                traffic.payload = _bytes(bound.arguments["input"])
                traffic.kept = traffic.payload * splits[self.rank] // max(1, sum(splits))
            self.calls.append(traffic)
            if bound.arguments.get("group") in (None, dist.group.WORLD):
                self._agree(traffic)
            copies: list[StandIn] = []
            if asynchronous and bound.arguments.get(filled) is not None:
                bound.arguments[filled], copies = _stand_ins(bound.arguments[filled])
            started = Started(self, traffic, original(*bound.args, **bound.kwargs, async_op=True), copies)
            return started if asynchronous else started.wait() and None

        return call

    def _watched_pickle(self, name: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            largest = max(map(_pickled_bytes, [*args, *kwargs.values()]), default=0)
            self.calls.append(Traffic(name, largest * self.world_size, self.world_size, waited=True))
            return original(*args, **kwargs)

        return call

    def _watched_send(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(Traffic("send", _bytes(tensor), self.world_size, waited=True))
        return self._originals["send"](tensor, *args, **kwargs)

    def wait(self, work: Any, op: str) -> None:
        """Wait in short turns, so that an interrupt gets through."""
        patience = Patience(self.patience)
        try:
            while work is not None and not is_through(work, POLL):
                if patience.turn() <= 0:
                    raise GaveUp(f"{op}: not through after {self.patience:g} seconds")
        except RuntimeError as error:
            raise GaveUp(f"{op}: {error}") from None


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return 0


def _pickled_bytes(value: Any) -> int:
    try:
        return len(pickle.dumps(value))
    except (TypeError, AttributeError, pickle.PicklingError):  # a process group
        return 0


def _stand_ins(value: Any) -> tuple[Any, list[StandIn]]:
    """Copies to be filled in place of `value`, a tensor or a list of them, and which belongs to which."""
    tensors = [value] if isinstance(value, Tensor) else value
    found = [(tensor, tensor.detach().clone(), tensor.detach().clone()) for tensor in tensors]
    copies = [copy for _, copy, _ in found]
    return copies[0] if isinstance(value, Tensor) else copies, found
