"""What replicas that may die write into the store that outlives them, and read of each other there."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from zerolab.lab.lessons.lesson21 import quorums as quorums_module
from zerolab.lab.lessons.lesson21 import replicas
from zerolab.lab.lessons.lesson21.background import scratch_folder, write_in_background, written_meanwhile
from zerolab.lab.lessons.lesson21.quorums import Quorums, checksum
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


# --- what training makes of it ---


def first_come(before: list[str], replicas: dict, least: int) -> tuple | None:
    """A decision that waits for all of `before`, and for nobody else."""
    there = {name: ranks[0] for name, ranks in replicas.items() if not {"busy", "dead"} & {*ranks}}
    if any("busy" in replicas[name] for name in before if name not in there):
        return None
    step = max(there.values())
    return sorted(there), step, {name: "A" for name in there if there[name] < step}


@pytest.fixture
def three() -> list[Seat]:
    store = dist.HashStore()
    seats = [Seat(1, store, rank, 0, 3) for rank in range(3)]
    for seat in seats:
        seat._together = [0]
    return seats


def begin(three: list[Seat], deaths: tuple[int, ...]) -> Quorums:
    """All ask for quorum 0, and then these die: what A asks with from then on."""
    everybody = [Quorums(seat, first_come, after=4) for seat in three]
    with ThreadPoolExecutor(3) as pool:
        assert all(len(quorum.members) == 3 for quorum in pool.map(lambda quorums: quorums.ask(0), everybody))
    for rank in deaths:
        three[0].store.set(f"lives/{rank}", "1")
    return everybody[0]


def test_all_get_the_same_quorum_and_vote_alike(three: list[Seat]) -> None:
    everybody = [Quorums(seat, first_come) for seat in three]
    with ThreadPoolExecutor(3) as pool:
        asked = [*pool.map(lambda quorums: quorums.ask(0), everybody)]
        assert {(quorum.number, *quorum.members, quorum.step) for quorum in asked} == {(0, "A", "B", "C", 0)}
        errors = [None, RuntimeError("somebody is gone"), None]
        assert [*pool.map(lambda quorum, error: quorum.vote(error), asked, errors)] == [False] * 3
        asked = [*pool.map(lambda quorums: quorums.ask(0), everybody)]
        assert [*pool.map(lambda quorum: quorum.vote(None), asked)] == [True] * 3
    tried = [(0, ["A", "B", "C"], {}, False), (0, ["A", "B", "C"], {}, True)]
    assert [quorums.attempts for quorums in everybody] == [tried] * 3


def test_a_newcomer_asks_for_the_next_quorum_and_takes_the_state(three: list[Seat]) -> None:
    models = [torch.nn.Linear(2, 3) for _ in range(2)]
    adams = [torch.optim.AdamW(model.parameters()) for model in models]
    models[0](torch.ones(1, 2)).sum().backward()
    adams[0].step()
    old, store = begin(three, deaths=(1, 2)), three[0].store
    assert old.ask(1).members == ["A"] and old.end == float("inf")
    newcomer = Seat(1, store, 1, 1, 3)
    newcomer._together = [1]
    new = Quorums(newcomer, first_come, after=4)
    assert new.number == 2

    def join(quorums: Quorums, step: int, model: torch.nn.Module, adam: torch.optim.AdamW) -> None:
        quorum = quorums.ask(step)
        assert quorum.members == ["A", "B"] and quorum.sources == {"B": "A"} and quorum.step == 1
        assert quorum.group() is quorum.group()  # it is made once: the number of a quorum is never used twice
        quorum.hand_over(SimpleNamespace(model=model), adam)

    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(join, new, 0, models[1], adams[1])
        while not store.check(["ask 2/1"]):  # that it has asked, A must see
            time.sleep(0.01)
        pool.submit(join, old, 1, models[0], adams[0]).result()
        joined.result()
    zeros = [SimpleNamespace(model=model) for model in models]
    assert checksum(zeros[0], adams[0]) == checksum(zeros[1], adams[1])
    assert (old.end, old.received) == (5, 0) and (new.end, new.received) == (5, 12 * 9)


def test_an_error_that_comes_again_and_again_is_raised(three: list[Seat], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorums_module, "ERRORS", 1)
    alone = begin(three, deaths=(1, 2))
    assert not alone.ask(0).vote(ValueError("once"))
    with pytest.raises(ValueError, match="twice"):
        alone.ask(0).vote(ValueError("twice"))


def test_a_scratch_folder_is_one_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []
    for user in (1000, 1000, 1001):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        folders.append(scratch_folder())
    assert folders[0] == folders[1] != folders[2] and all(folder.is_dir() for folder in folders)


def test_a_checkpoint_in_the_background(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)

    def one_step(step: int) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)

    live = dict(model.named_parameters())
    assert sorted(written_meanwhile(live, model, one_step, tmp_path / "live")) == [0, 1]
    staged = {name: param.detach().clone() for name, param in live.items()}
    assert written_meanwhile(staged, model, one_step, tmp_path / "staged") == [0, 0]
    write_in_background(staged, 7, tmp_path / "kept.safetensors").join()
    assert [path.name for path in tmp_path.glob("kept*")] == ["kept.safetensors"]
    assert load_file(tmp_path / "kept.safetensors")["step"] == 7
