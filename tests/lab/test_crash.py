"""Saves that are really killed: who dies where, and what the others do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerolab.lab.lessons.lesson11 import crash

pytestmark = pytest.mark.slow


def write_then_rename(folder: Path, rank: int, barrier) -> None:
    new = folder / f"{rank}.tmp"
    with open(new, "wb") as file:
        file.write(b"x" * 100)
        file.flush()
        os.fsync(file.fileno())
    barrier()
    os.replace(new, folder / str(rank))


def test_every_operation_is_seen_in_the_order_of_turns(tmp_path):
    run = crash.play(lambda rank, barrier: write_then_rename(tmp_path, rank, barrier), tmp_path, 2, order=[1, 0])
    assert [(o.rank, o.barriers, o.what, o.path) for o in run.operations] == [
        (1, 0, "open", "1.tmp"),
        (1, 0, "fsync", "1.tmp"),
        (0, 0, "open", "0.tmp"),
        (0, 0, "fsync", "0.tmp"),
        (1, 1, "rename", "1.tmp"),
        (0, 1, "rename", "0.tmp"),
    ]
    assert run.ended == {0: "", 1: ""} and not run.unequal
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    flushed = run.operations[1].file
    assert flushed is not None and flushed[1] == 100
    assert str(run.operations[-1]) == "renamed 0.tmp to 0"


@pytest.mark.parametrize(
    ("number", "within", "left"), [(0, False, {}), (0, True, {"0.tmp": 10}), (1, False, {"0.tmp": 100})]
)
def test_a_death_is_real_and_at_the_given_moment(tmp_path, number, within, left):
    run = crash.play(
        lambda rank, barrier: write_then_rename(tmp_path, rank, barrier),
        tmp_path,
        2,
        death=crash.Death(0, number, within),
    )
    assert run.ended == {0: "killed"}  # rank 1 never had its turn
    assert {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path)} == left


def test_the_others_are_told_that_a_rank_does_not_come(tmp_path):
    run = crash.play(lambda rank, barrier: barrier() if rank == 0 else None, tmp_path, 2)
    assert run.unequal and run.ended[1] == "" and "another rank did not come" in run.ended[0]


def test_a_full_disk_is_an_error(tmp_path):
    run = crash.play(lambda rank, barrier: write_then_rename(tmp_path, rank, barrier), tmp_path, 2, full=1)
    assert "File too large" in run.ended[1] and "another rank did not come" in run.ended[0]


def test_a_rank_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(crash, "PATIENCE", 0.2)

    def forever(rank, barrier):
        while True:
            pass

    assert crash.play(forever, tmp_path, 1).ended == {0: "late"}


def test_what_a_reader_finds(tmp_path):
    with pytest.raises(crash.Unreadable, match="there is no index"):
        crash.load(tmp_path)
    (tmp_path / crash.INDEX).write_text('{"step": 2, "files": ["a"')
    with pytest.raises(crash.Unreadable, match="not complete"):
        crash.load(tmp_path)
    (tmp_path / crash.INDEX).write_text('{"step": 2, "files": ["a"]}')
    with pytest.raises(crash.Unreadable, match="names a, which is not there"):
        crash.load(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    assert crash.load(tmp_path) == (2, [b"1"])
