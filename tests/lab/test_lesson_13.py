"""The training script of lesson 13 as learners run it: by the real torchrun, on files in the format of CIFAR-10."""

from __future__ import annotations

import json

import pytest
import torch

from zerolab.lab import scripts
from zerolab.tasks.data import RECORD, cifar10
from zerolab.tasks.models import ResidualBlock, ResNet

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


def write_cifar10(folder, records=3):
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        rows = torch.randint(256, (records, RECORD), generator=generator, dtype=torch.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.numpy().tobytes())


def test_the_residual_net_takes_images_of_any_size():
    net = ResNet()
    assert sum(param.numel() for param in net.parameters()) == 7_434
    assert net(torch.rand(2, 1, 8, 8)).shape == net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert net(torch.rand(0, 1, 8, 8)).shape == (0, 10)
    x = torch.rand(2, 16, 4, 4)
    block = ResidualBlock(16)
    torch.nn.init.zeros_(block.conv2.weight)
    assert torch.equal(block(x), x)


@pytest.mark.exhaustive
def test_the_same_result_on_any_number_of_ranks(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path / "my"))
    write_cifar10(tmp_path)
    assert cifar10(str(tmp_path)).inputs.shape == (15, 3, 32, 32)

    def run(ranks, stage):
        arguments = ("--epochs", 2, "--batch-size", 6, "--seeds", 0, 1, "--data", tmp_path)  # 6, 6, and 3 samples
        said = scripts.torchrun("13.1", ranks, "--stage", stage, *arguments)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    one, other = run(1, 0), run(4, 3)
    assert [each["seed"] for each in one] == [0, 1] and len(one[0]["losses"]) == 6
    assert one[0]["losses"] != one[1]["losses"]
    for a, b in zip(one, other, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-9)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-6)
    assert "torchrun --nproc-per-node 4 ex_13_1.py --stage 3" in capsys.readouterr().out
