"""What the doctor says of real GPUs. `make gpu` runs these; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch

from zerolab.apps import doctor, machine

pytestmark = pytest.mark.gpu


def test_it_sees_what_torch_sees():
    facts, findings = machine.look_at_gpus()
    count = torch.cuda.device_count()
    assert [gpu["name"] for gpu in facts["gpus"]] == [torch.cuda.get_device_name(i) for i in range(count)]
    assert [gpu["total"] for gpu in facts["gpus"]] == [torch.cuda.mem_get_info(i)[1] for i in range(count)]
    assert all(gpu["problem"] == "" and 0 < gpu["free"] <= gpu["total"] for gpu in facts["gpus"])
    states = {finding.subject: finding.state for finding in findings}
    assert "fix" not in states.values() and states["NCCL"] == states["CUDA"] == "good", findings


def test_hidden_gpus_are_no_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    facts, (finding,) = machine.look_at_gpus()
    assert facts["gpus"] == [] and finding.state == "note"


def test_an_all_reduce_on_each_backend():
    count = torch.cuda.device_count()
    for kind, ranks in (("nccl", count), ("shared", count + 1)):
        entry, finding = machine.all_reduce(kind, ranks)
        assert finding.state == "good", finding
        assert entry["latency_seconds"] > 0 and entry["seconds"] > 0
        factor = 2 * (ranks - 1) / ranks
        assert entry["bus_bytes_per_second"] == pytest.approx(factor * entry["bytes"] / entry["seconds"])


def test_lessons_run_as_the_lab_chooses(monkeypatch):
    session = pytest.importorskip("zerolab.lab.ranks.session")
    count = torch.cuda.device_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    for ranks in (1, count, count + 1):
        row = doctor._how(ranks, count, True)
        for column, device in (("as it is", "auto"), ("on GPUs", "cuda")):
            kind = {"nccl": "NCCL", "shared": "gloo, sharing", "cpu": "gloo, CPU"}[
                session._choose_device(ranks, device)[0]
            ]
            assert row[column].startswith(kind), (ranks, device)


def test_live_ranks_send_what_is_on_their_gpu_and_what_is_not():
    session = pytest.importorskip("zerolab.lab.ranks.session")
    count = torch.cuda.device_count()
    live = session.start(count, device="cuda")
    try:
        ones = "import torch, torch.distributed as dist\nboth = [torch.ones(1), torch.ones(1, device=device)]\n"
        told = live.run(ones + "for one in both: dist.all_reduce(one)\nprint([one.item() for one in both])")
        assert [result.text for result in told] == [f"{[float(count)] * 2}\n"] * count
    finally:
        session.stop()
