"""`make gpu`'s tables, without a GPU: every line that does not need one, on real ranks."""

from __future__ import annotations

import pytest

from zerolab.apps import gpu

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.skipif(gpu.torch.cuda.is_available(), reason="the ranks of the tests would take the device")
def test_a_trial_on_the_cpu(lent, capsys, monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    assert gpu.main(["--device", "cpu", "--rounds", "2"]) == 0
    out = capsys.readouterr().out
    for words in ("plain PyTorch", "torch DDP", "FSDP2 reshard", "Zero3"):
        assert out.count(f"\n{words} ") >= 2, out  # in fp32 and in bf16
    assert "2 ranks on one device, gloo" in out and "4 ranks on one device, gloo" in out
    assert out.count("formula") == 8 and "through NCCL: skipped, needs NCCL" in out
    assert out.count("no device was seen") == 2


def test_less_than_the_formula_is_wrong(lent, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "state_bytes", lambda *args: {"parameters": 10**9})
    lines, right = gpu.beside_formula("cpu", "gloo", 2, "bf16")
    assert not right and "1000.00" in lines[1]


def test_without_a_device_it_says_so(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu.main([]) == 0 and "no CUDA device here" in capsys.readouterr().out
