"""What lesson 11 counts with, beside its exercises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerolab.lab.exercises.battery import load
from zerolab.lab.lessons.lesson11 import READS, SAVE, old_files
from zerolab.lab.lessons.lesson11.files import reads_needed, whose_tensors
from zerolab.lab.lessons.lesson11.run import dealt
from zerolab.lab.lessons.lesson11.survival import deaths


def test_reads_needed_are_those_of_a_plan():
    plan_reads = load(READS, "<11.1>", "ex_11_1").plan_reads
    for numel in (1, 2, 12, 13, 38):
        for before in range(1, 5):
            for now in range(1, 5):
                files = old_files(numel, before)
                reads = sum(len(plan_reads(files, numel, now, rank)) for rank in range(now))
                assert reads_needed(files, numel, now) == reads, (numel, before, now)


def test_whose_tensors(tmp_path: Path):
    torch.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "model.pt")
    assert whose_tensors(str(tmp_path / "model.pt")) == "10"
    (tmp_path / "model.pt").write_bytes(b"PK")
    assert whose_tensors(str(tmp_path / "model.pt")).startswith("cannot be read")


def test_a_change_of_ranks_deals_samples_twice():
    for ranks in (1, 2, 4):
        assert len(set(dealt(ranks, ranks).tolist())) == 80 * 24
    again = dealt(4, 3)
    assert len(again) == 80 * 24 and len(set(again.tolist())) < 80 * 24


@pytest.mark.slow
def test_every_death_leaves_a_checkpoint(tmp_path: Path):
    """What removes a temporary file that was renamed away is no death to tell."""
    save = load(SAVE, "<11.2>", "ex_11_2").save_checkpoint
    told = list(deaths(save, tmp_path / "tries", [b"first" * 10, b"second" * 10]))
    assert {step for *_, step in told} == {60, 70} and {rank for rank, *_ in told} == {0, 1}
    assert not any("removed" in operation and ".tmp" in operation for _, operation, _ in told)
    assert [step for rank, _, step in told if rank == 1] == [60] * 3
