"""The spy compares a call before any rank makes it: gloo would hang, end a process, or mix up bytes."""

from __future__ import annotations

import threading

import jobs_spy
import pytest
import torch.distributed as dist

from zerolab import Ranks
from zerolab.lab.exercises.spy import Spy

CANNOT = "GaveUp: all_to_all_single: rank 1 cannot make this call"
SAID = {  # by call: what rank 0 is told, and rank 1, which differs
    "rows that cannot be divided": (CANNOT, "all_to_all_single: 5 rows cannot be divided evenly among 3 ranks"),
    "rows of an output": (CANNOT, "all_to_all_single: 4 rows cannot be divided evenly among 3 ranks"),
    "two splits": (CANNOT, "all_to_all_single: input_split_sizes has 2 numbers, where each of 3 ranks needs one"),
    "splits that do not add up": (
        CANNOT,
        "all_to_all_single: output_split_sizes [2, 2, 1] does not add up to the 6 rows",
    ),
    "a split below 0": (CANNOT, "all_to_all_single: input_split_sizes [-1, 3, 4] does not add up to the 6 rows"),
    "more than is expected": ("rank 1 of the group sends 3 elements to rank 0, which expects 2",) * 2,
    "a short list": (
        "GaveUp: all_to_all: rank 1 cannot make this call",
        "all_to_all: a list of 2 tensors, where each of 3 ranks needs one",
    ),
    "a long part": ("rank 1 of the group sends 2 elements to rank 2, which expects 1",) * 2,
    "functional: rows": (CANNOT, "all_to_all_single: 5 rows cannot be divided evenly among 3 ranks"),
    "functional: expected": ("rank 1 of the group sends 2 elements to rank 1, which expects 3",) * 2,
    "a pair, of other sizes": (
        "all_reduce of 8 bytes: rank 1 calls all_reduce of 12 bytes instead",
        "all_reduce of 12 bytes: rank 0 calls all_reduce of 8 bytes instead",
    ),
    "a pair that gives up": (
        "all_reduce of 8 bytes: rank 1 calls all_reduce of 12 bytes instead",
        "all_reduce of 12 bytes: rank 0 calls all_reduce of 8 bytes instead",
        "GaveUp: all_reduce of 8 bytes: rank 0 does not make this call",
    ),
    "a pair, in other calls": (
        "reduce of 8 bytes: rank 1 calls broadcast of 8 bytes instead",
        "broadcast of 8 bytes: rank 0 calls reduce of 8 bytes instead",
    ),
    "a pair, functional": (
        "all_reduce of 8 bytes: rank 1 calls all_reduce of 12 bytes instead",
        "all_reduce of 12 bytes: rank 0 calls all_reduce of 8 bytes instead",
    ),
    "an object, or a tensor": (
        "all_reduce of 8 bytes: rank 1 calls all_gather_object instead",
        "all_gather_object: rank 0 calls all_reduce of 8 bytes instead",
    ),
    "another group first": [
        f"GaveUp: all_reduce of 8 bytes: rank {rank} does not make this call" for rank in (1, 0, 1)
    ],
    "one that ends": ("GaveUp: all_reduce of 8 bytes: rank 1 did not take part", "", "GaveUp"),
    "one that sleeps": ("GaveUp: all_reduce of 8 bytes: rank 1 does not make this call", ""),
    "one that is late": ("",) * 3,
    "one that is told, and goes on": ("",) * 3,
    "from anybody, later than it is sent": ("",) * 3,
    "two that call": ("",) * 3,
    "one that computes while another waits": ("",) * 3,
    "from outside": ("", ""),
    "splits that fit": ("", ""),
    "splits of nothing": ("", ""),
}


PATIENCE = {"one that sleeps": 1.0, "one that computes while another waits": 1.5}  # nothing else depends on it


def test_every_call_is_expected() -> None:
    assert SAID.keys() == jobs_spy.CALLS.keys()


@pytest.mark.parametrize("name", SAID)
def test_a_call_that_differs_is_told_before_it_is_made(ranks: Ranks, name: str) -> None:
    told = ranks.run(jobs_spy.call, name, PATIENCE.get(name, 10_000.0), ranks=3)
    for found, said in zip(told, SAID[name], strict=False):
        assert (said in found) if said else (not found), told


def test_a_rank_whose_call_has_come_does_not_wait_in_vain() -> None:
    store = dist.HashStore()
    spy = Spy(store, 0, 3)
    spy._calls_from_here()
    spy._say_that_it_waits(["a"], [1])
    for key, said in {"waits/1": '[["b"], ["c"]]', "waits/2": "", "over/2": ""}.items():
        store.set(key, said)
    assert spy._all_wait_in_vain()
    store.set("c", "")
    assert not spy._all_wait_in_vain()


@pytest.mark.parametrize("asks, comes_on", [([1], False), ([2], True), ([1, 2], False)])
def test_a_rank_that_is_told_that_another_has_ended_may_come_on(asks: list[int], comes_on: bool) -> None:
    """By catching that, as `goes_on` does: the third waits for what it does then."""
    store = dist.HashStore()
    spy = Spy(store, 0, 3)
    spy._calls_from_here()
    for key, said in {"waits/1": '[["a"]]', "waits/2": "", "over/2": ""}.items():
        store.set(key, said)
    spy._say_that_it_waits(["b"], asks)
    assert spy._all_wait_in_vain() != comes_on


def test_a_rank_that_calls_from_two_threads_never_says_that_it_waits() -> None:
    """One may wait, and the other go on."""
    store = dist.HashStore()
    spy = Spy(store, 0, 3)
    spy._calls_from_here()
    spy._say_that_it_waits(["a"], [1])
    assert store.get("waits/0")
    other = threading.Thread(target=spy._calls_from_here)
    other.start()
    other.join()
    assert not store.get("waits/0")
    spy._say_that_it_waits(["b"], [1])
    assert not store.get("waits/0")
