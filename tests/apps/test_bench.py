"""The benchmark runs, and what it says of itself holds. (Its ratios are the machine's: no test asks for them.)"""

from __future__ import annotations

import json

import pytest
import torch

from zerolab import STAGES
from zerolab.apps import bench
from zerolab.measure import moved_bytes, peak_of
from zerolab.tasks.models import GPT

pytestmark = pytest.mark.slow

SMALL = {"layers": 2, "width": 64, "context": 16}


def test_all_systems_do_the_same_work(lent):
    report = bench.measure_times(2, 4, "bf16", SMALL)
    gpt = GPT(**SMALL)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (gpt, *gpt.blocks)]
    root = 2 * sizes[0] - sum(sizes)
    moved = {stage.__name__: moved_bytes(stage.stage, 2, sizes[0], root, bench.PRECISIONS["bf16"]) for stage in STAGES}
    assert [(pair["ours"], pair["peer"]) for pair in report["pairs"]] == list(bench.pairs_of("bf16"))
    for pair in report["pairs"]:
        assert pair["loss_ours"] == pytest.approx(pair["loss_peer"], rel=bench.SAME_LOSS["fp32"])
        low, high = pair["wall_interval"]
        assert 0 < low <= pair["wall_ratio"] <= high
    for pair in report["pairs"]:  # what passes torch's collectives is what the formula says, up to padding
        assert pair["moved_ours"] == pytest.approx(moved[pair["ours"]], rel=0.01)
        assert pair["moved_peer"] is None or pair["moved_peer"] > 0
    assert report["pairs"][2]["moved_peer"] == pytest.approx(moved["Zero2"], rel=0.01)  # FSDP2's, which are the same
    assert set(report["floor"]) == set(bench.names_of("bf16")) - {bench.FLOOR}


def test_the_interval_of_a_median():
    ratios = [float(k) for k in range(40)]
    low, high = bench.interval(ratios)
    assert (low, high) == (13.0, 26.0)  # ranks 14 and 27 of 40: 96 % by the binomial distribution
    assert bench.interval([1.0, 2.0, 3.0, 4.0]) == (1.0, 4.0)


def test_the_peak_of_anything():
    def build():
        kept = torch.zeros(1_000_000)

        def step():
            kept.add_(torch.ones(500_000).repeat(2))  # 2 MB and 4 MB besides the 4 MB that stay

        return step

    assert peak_of(build, torch.device("cpu")) == pytest.approx(10e6, rel=0.01)


@pytest.mark.exhaustive
def test_table_and_picture(capsys, tmp_path, monkeypatch):
    """Peaks of two pairs: each system takes processes of its own."""
    measure = bench.measure
    monkeypatch.setattr(bench, "measure", lambda ranks, rounds, precision: measure(ranks, rounds, precision, SMALL))
    monkeypatch.setattr(bench, "PAIRS", bench.PAIRS[::3])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)  # as where DeepSpeed is absent
    file, drawn = tmp_path / "bench.json", tmp_path / "bench.png"
    assert bench.run(2, 4, ["fp32"], str(file), str(drawn)) == 0
    said = capsys.readouterr().out
    assert "Zero3 : FSDP2 reshard" in said and "…" not in said and "WRONG" not in said
    assert "overhead" in said and "Overhead: by how much a step is longer than one without communication" in said
    assert "DeepSpeed is not installed: skipped" in said and "-c constraints.txt" in said and "use --rounds 40" in said
    report = json.loads(file.read_text())
    assert report["ranks"] == 2 and all(0.2 < pair["peak_ratio"] < 5 for pair in report["pairs"])
    assert set(report["peak_bytes"]) == {bench.FLOOR, "DDP", "torch DDP", "Zero3", "FSDP2 reshard"}
    assert report["peak_bytes"]["Zero3"] < report["peak_bytes"]["DDP"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_deepspeed_does_the_same_work():
    pytest.importorskip("deepspeed", reason="the extra bench is not installed")
    report = bench.measure_times(2, 4, "fp32", SMALL)
    deepspeed = [pair for pair in report["pairs"] if pair["peer"].startswith("DeepSpeed")]
    assert [(pair["ours"], pair["peer"]) for pair in deepspeed] == list(bench.DEEPSPEED)
    for pair in deepspeed:
        assert pair["loss_ours"] == pytest.approx(pair["loss_peer"], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_on_cuda():
    """NCCL and CUDA events: the same work, and a rank alone sends nothing."""
    report = bench.measure_times(1, 4, "fp32", SMALL)
    for pair in report["pairs"]:
        assert pair["loss_ours"] == pytest.approx(pair["loss_peer"], rel=bench.SAME_LOSS["fp32"])
        assert pair["moved_ours"] == 0
    assert all(seconds > 0 for seconds in report["step_seconds"].values())
