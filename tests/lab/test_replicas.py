"""What replicas that may die write into the store that outlives them, and read of each other there."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from zerolab.lab.lessons.lesson21 import replicas
from zerolab.lab.lessons.lesson21.replicas import Seat, replica
from zerolab.lab.ranks.report import Misused


@pytest.fixture
def seats() -> list[Seat]:
    store = dist.HashStore()
    return [Seat(2, store, rank, 0, 4) for rank in range(4)]


def test_places(seats: list[Seat]) -> None:
    assert [(seat.name, seat.place) for seat in seats] == [("A", 0), ("A", 1), ("B", 0), ("B", 1)]
    assert seats[0].ranks_of("B") == [2, 3]
    with pytest.raises(Misused, match="5 ranks are no whole number of replicas of 2"):
        Seat(2, seats[0].store, 0, 0, 5)


def test_a_note_counts_while_its_life_lasts(seats: list[Seat]) -> None:
    for seat in seats[:3]:
        seat.note("ask 0", seat.rank + 10)
    assert seats[3].notes("ask 0") == {0: 10, 1: 11, 2: 12}
    seats[0].store.set("lives/1", "1")
    assert seats[3].lives() == [0, 1, 0, 0]
    assert seats[3].notes("ask 0") == {0: 10, 2: 12}


def test_a_vote_is_known_when_all_have_voted_or_died(seats: list[Seat]) -> None:
    lives = seats[0].lives()
    for seat in seats[:2]:
        seat.note("vote 0", True)
    assert seats[0].noted("vote 0", [0, 1], lives) == [True, True]
    assert seats[0].noted("vote 0", [0, 1, 2], lives) is None
    seats[0].store.set("lives/1", "1")  # it had voted, and that counts
    seats[0].store.set("lives/2", "1")  # it had not
    assert seats[3].noted("vote 0", [0, 1, 2], lives) == [True, True, None]
    Seat(2, seats[0].store, 2, 1, 4).note("vote 0", True)  # nor does its next life vote in its place
    assert seats[3].noted("vote 0", [0, 1, 2], lives) == [True, True, None]


def test_the_first_decision_counts(seats: list[Seat]) -> None:
    assert seats[0].read("quorum 0") is None
    assert seats[1].first("quorum 0", [["A"], 3]) == [["A"], 3]
    assert seats[2].first("quorum 0", [["A", "B"], 3]) == [["A"], 3]
    assert seats[0].read("quorum 0") == [["A"], 3]


def test_a_wait_ends(seats: list[Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    seats[0]._together, answers = [0, 0], iter([None, None, "there"])
    assert seats[0].until(lambda: next(answers)) == "there"
    monkeypatch.setattr(replicas, "PATIENCE", 0.02)
    with pytest.raises(RuntimeError, match="rank 0 waited"):
        seats[0].until(lambda: None)


def test_half_a_replica_ends(seats: list[Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(replicas.os, "_exit", end)
    seats[2]._together = [0, 0]
    seats[2].end_if_broken()
    seats[0].store.set("lives/3", "1")
    with pytest.raises(Ended):
        seats[2].until(lambda: "what it waits for is there")


def test_only_on_live_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROLAB_LIFE", raising=False)
    with pytest.raises(Misused, match="on live ranks"):
        replica(2)


def test_who_waits_for_a_rank_that_met_a_death_hears_of_it() -> None:
    """A waits for B, and B for C, which dies: B's error ends A's wait, long before its time is over."""
    store, tensor = dist.HashStore(), torch.zeros(1)
    seats = [Seat(1, store, rank, 0, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        a, b, c = pool.map(lambda seat: seat.group(0, ["A", "B", "C"]), seats)
        waits = [pool.submit(a.receive, tensor.clone(), 1), pool.submit(b.receive, tensor.clone(), 2)]
        c.group = None  # as the end of its process does
        for wait in waits:
            with pytest.raises(RuntimeError, match=r"(?i)closed|reset") as caught:
                wait.result()
            assert "imed out" not in str(caught.value)
    with pytest.raises(RuntimeError, match="make another group"):
        b.send(tensor, 0)
