"""`python -m zerolab.lab.lessons.lesson18.production`: what its rows count is what the formulas say."""

from __future__ import annotations

import pytest

from zerolab.lab.lessons.lesson18 import production
from zerolab.tasks.models import GPT

PSI = sum(param.numel() for param in GPT(layers=4, width=128).parameters())


def test_deepspeed_has_rows_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(production.importlib.util, "find_spec", lambda name: None)
    assert [name for name, _, _ in production.systems()] == [*production.OURS, *production.TORCHS]
    monkeypatch.setattr(production.importlib.util, "find_spec", lambda name: object())
    assert len(production.systems()) == len(production.OURS + production.TORCHS) + len(production.CHANGES)


def test_a_change_is_of_a_setting_in_the_file():
    assert production.zero_optimization(2, {}) | {"overlap_comm": False} == production.zero_optimization(
        2, {"overlap_comm": False}
    )


@pytest.mark.exhaustive
def test_ours_and_torchs_rows(ranks):
    rows = {name: ranks.run(production.run, name, ranks=2)[0] for name in ("DDP", "Zero3", "FSDP2")}
    assert rows["DDP"].sent == 4 * PSI  # 2 (N-1)/N of 4 bytes each
    assert rows["FSDP2"].sent == rows["Zero3"].sent > rows["DDP"].sent
    assert 2 * rows["Zero3"].state == pytest.approx(rows["DDP"].state, rel=0.001)
    for row in rows.values():
        assert len(row.losses) == production.STEPS
        assert row.losses == pytest.approx(rows["DDP"].losses, abs=production.SAME)
        assert row.peak > row.state


@pytest.mark.slow
def test_deepspeeds_rows(ranks):
    pytest.importorskip("deepspeed", reason="the extra bench is not installed")
    stage2 = ranks.run(production.run, "DeepSpeed", 2, {"use_multi_rank_bucket_allreduce": False}, ranks=2)[0]
    assert stage2.sent == pytest.approx(4 * PSI, abs=1000)
