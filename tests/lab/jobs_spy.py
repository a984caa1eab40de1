"""Calls that test_spy.py makes on three ranks, of which one differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from zerolab.lab.exercises.spy import GaveUp, Spy

A, B, C = 0, 1, 2  # the ranks


def all_to_all_single(outs: int, ins: int, receive: list[int] | None = None, send: list[int] | None = None) -> None:
    dist.all_to_all_single(torch.empty(outs), torch.ones(ins), receive, send)


def functional_all_to_all(ins: int, receive: list[int] | None = None, send: list[int] | None = None) -> None:
    functional.all_to_all_single(torch.ones(ins), receive, send, [A, B, C]).sum()


def all_to_all(outs: list[int], ins: list[int]) -> None:
    dist.all_to_all([*map(torch.empty, outs)], [*map(torch.ones, ins)])


def in_a_pair(rank: int, call: Callable[[dist.ProcessGroup], object]) -> None:
    pair = dist.new_group([A, B])
    if rank != C:
        call(pair)


def in_a_pair_that_gives_up(rank: int) -> None:
    """The third then waits for one of the pair."""
    waited_for = dist.new_group([A, C])
    in_a_pair(rank, lambda pair: dist.all_reduce(torch.ones(2 + rank), group=pair))
    if rank == C:
        dist.all_reduce(torch.ones(2), group=waited_for)


def other_group(rank: int) -> None:
    """All ranks have two groups of all of them, and one takes the other first."""
    groups = [dist.new_group(), dist.new_group()]
    for group in groups[:: -1 if rank == B else 1]:
        dist.all_reduce(torch.ones(2), group=group)


def ends(rank: int) -> None:
    if rank != B:
        dist.all_reduce(torch.ones(2))


def sleeps(rank: int) -> None:
    """Until the others have been told; those have another thread, which computes until then."""
    if rank == B:
        while not the_store().check([f"over/{A}", f"over/{C}"]):
            time.sleep(0.5)  # a wait of the store's has a limit, which a machine that stops may reach
        return
    with computing():
        dist.all_reduce(torch.ones(2))


def is_late(rank: int) -> None:
    """One that calls when the others have said that they wait."""
    if rank == B:
        until_they_wait(A, C)
    dist.all_reduce(torch.ones(2))


def goes_on(rank: int) -> None:
    """One that catches what it is told about one that ends, and calls when the third says that it waits."""
    pair = dist.new_group([A, C])
    if rank == B:
        until_they_wait(A)
    if rank == A:
        try:
            dist.all_reduce(torch.ones(2))
        except GaveUp:
            until_they_wait(C)
    if rank != B:
        dist.all_reduce(torch.ones(2), group=pair)


def from_anybody(rank: int) -> None:
    """Received when the one that sends has said that it waits, and answered."""
    if rank == A:
        dist.send(torch.ones(2), B)
        dist.recv(torch.ones(2), B)
    if rank == B:
        until_they_wait(A)
        dist.recv(torch.ones(2))
        dist.send(torch.ones(2), A)


def two_call(rank: int) -> None:
    """One with a thread that waits for another's call, and which makes the one that the other waits for itself."""
    pairs = [dist.new_group([A, B]), dist.new_group([A, B])]
    if rank == A:
        waits = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),), kwargs={"group": pairs[0]})
        waits.start()
        until_they_wait(B)
        dist.all_reduce(torch.ones(2), group=pairs[1])
        waits.join()
    if rank == B:
        for pair in reversed(pairs):
            dist.all_reduce(torch.ones(2), group=pair)


def one_computes(rank: int) -> None:
    """As `two_call`, and computes before that: for longer than a rank has patience with who stands still."""
    told: list[BaseException] = []
    pairs = [dist.new_group([A, B]), dist.new_group([A, B])]

    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(2), group=pairs[0])
        except GaveUp as error:
            told.append(error)

    if rank == A:
        waits = threading.Thread(target=wait)
        waits.start()
        until_they_wait(B)
        begun = time.process_time()
        while time.process_time() < begun + 3:
            pass
        dist.all_reduce(torch.ones(2), group=pairs[1])
        waits.join()
    if rank == B:
        for pair in reversed(pairs):
            dist.all_reduce(torch.ones(2), group=pair)
    assert not told, told


def the_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def until_they_wait(*ranks: int) -> None:
    while not all(the_store().get(f"waits/{rank}") for rank in ranks):
        time.sleep(0.01)
    time.sleep(0.1)  # and look at each other


@contextmanager
def computing() -> Iterator[None]:
    """With another thread, which computes."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    threading.Thread(target=compute, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def from_outside(rank: int) -> None:
    pair = dist.new_group([A, B])
    dist.all_reduce(torch.ones(2), group=pair)
    dist.all_gather_object([None, None], rank, group=pair)


CALLS: dict[str, Callable[[int], object]] = {
    "rows that cannot be divided": lambda rank: all_to_all_single(6, 5 if rank == B else 6),
    "rows of an output": lambda rank: all_to_all_single(4 if rank == B else 6, 6),
    "two splits": lambda rank: all_to_all_single(6, 6, None, [3, 3] if rank == B else [2, 2, 2]),
    "splits that do not add up": lambda rank: all_to_all_single(6, 6, [2, 2, 1] if rank == B else [2, 2, 2]),
    "a split below 0": lambda rank: all_to_all_single(6, 6, None, [-1, 3, 4] if rank == B else [2, 2, 2]),
    "more than is expected": lambda rank: all_to_all_single(6, 9 if rank == B else 6),
    "a short list": lambda rank: all_to_all([1, 1, 1], [1, 1] if rank == B else [1, 1, 1]),
    "a long part": lambda rank: all_to_all([1, 1, 1], [1, 1, 2] if rank == B else [1, 1, 1]),
    "functional: rows": lambda rank: functional_all_to_all(5 if rank == B else 6),
    "functional: expected": lambda rank: functional_all_to_all(6, [2, 3, 2] if rank == B else [2, 2, 2], [2, 2, 2]),
    "a pair, of other sizes": lambda rank: in_a_pair(
        rank, lambda pair: dist.all_reduce(torch.ones(2 + rank), group=pair)
    ),
    "a pair that gives up": in_a_pair_that_gives_up,
    "a pair, in other calls": lambda rank: in_a_pair(
        rank,
        lambda pair: (dist.broadcast if rank == B else dist.reduce)(torch.ones(2), A, group=pair),
    ),
    "a pair, functional": lambda rank: in_a_pair(
        rank, lambda pair: functional.all_reduce(torch.ones(2 + rank), "sum", pair).sum()
    ),
    "an object, or a tensor": lambda rank: (
        dist.all_gather_object([None] * 3, rank) if rank == B else dist.all_reduce(torch.ones(2))
    ),
    "another group first": other_group,
    "one that ends": ends,
    "one that sleeps": sleeps,
    "one that is late": is_late,
    "one that is told, and goes on": goes_on,
    "from anybody, later than it is sent": from_anybody,
    "two that call": two_call,
    "one that computes while another waits": one_computes,
    "from outside": from_outside,
    "splits that fit": lambda rank: all_to_all_single(6, 6, [2, 2, 2], [2, 2, 2]),
    "splits of nothing": lambda rank: all_to_all_single(0, 0, [0, 0, 0], [0, 0, 0]),
}


def call(name: str, patience: float) -> str:
    """What this rank is told."""
    rank, store = dist.get_rank(), the_store()
    try:
        with Spy(store, rank, 3, patience):
            CALLS[name](rank)
    except (GaveUp, Exception) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set(f"over/{rank}", "1")
    return ""
