"""`zerolab demo`, from end to end, and that it notices an engine that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import zerolab
from zerolab.cli import main
from zerolab.lab.data import batch, text
from zerolab.lab.demo import demo
from zerolab.lab.models import GPT

SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16}


class Sum(zerolab.Zero1):
    """Forgets to divide."""

    def reduce(self, unit):
        pending = super().reduce(unit)
        pending.wait()
        unit.grad *= self.world_size


class Hoarder(zerolab.Zero2):
    """Keeps the whole gradient."""

    def post_backward(self, unit):
        zerolab.Zero1.post_backward(self, unit)


def test_the_command(tmp_path):
    report, plot = tmp_path / "demo.json", tmp_path / "ladder.png"
    options = ["--ranks", "2", "--steps", "2", "--stages", "1,3", "--precision", "bf16"]
    command = [sys.executable, "-m", "zerolab.cli", "demo", *options, "--json", str(report), "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr
    assert "bit for bit" in done.stdout and "Zero3" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = json.loads(report.read_text())
    assert (result["ranks"], result["steps"]) == (2, 2)
    psi = result["parameters"]
    assert psi > 5_000_000 and list(result["stages"]) == ["1", "3"]
    for stage in result["stages"].values():
        assert stage["bitwise_equal"] and len(stage["losses"]) == 2
        assert stage["peak_bytes"] > sum(stage["state_bytes"].values()) and stage["step_seconds"] > 0
        for key, formula in stage["formula_bytes"].items():
            assert stage["state_bytes"][key] == pytest.approx(formula, rel=0.01)
        assert stage["moved_bytes_per_step"] == pytest.approx(stage["formula_moved_bytes_per_step"], rel=0.01)
    assert result["stages"]["3"]["formula_bytes"] == {"parameters": 2 * psi, "gradients": psi, "optimizer": 4 * psi}
    assert result["stages"]["1"]["formula_moved_bytes_per_step"] == 2 * psi


def test_a_wrong_engine_is_noticed(capsys):
    classes = (zerolab.DDP, Sum, Hoarder, zerolab.Zero3)
    assert demo(2, 2, [1, 2, 3], classes=classes, model=SMALL) == 1
    said = capsys.readouterr().out
    assert "WRONG: stage 1 differs from the single process" in said
    assert "WRONG: stage 2: gradients" in said
    assert "stage 3" not in said.split("WRONG", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--stages", "0,4"], "--stages must be among"),
        (["--stages", "all"], "--stages takes numbers"),
        pytest.param(
            ["--device", "cuda"],
            "needs a GPU for each",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 3, reason="there are enough GPUs"),
        ),
    ],
)
def test_bad_arguments(arguments, says, capsys):
    assert main(["demo", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_text_and_its_batches():
    data = text()
    assert data.dtype == torch.uint8 and len(data) > 400_000 and b"statement" in bytes(data[:100_000].tolist())
    x, y = batch(data, 1, 2, 3, 16)
    assert x.shape == y.shape == (3, 16) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, batch(data, 1, 2, 3, 16)[0]) and not torch.equal(x, batch(data, 2, 1, 3, 16)[0])


def test_the_model_is_causal():
    model = GPT(**SMALL)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] += 1
    same = (model(tokens) == model(changed % 256)).all(-1)[0]
    assert same[:10].all() and not same[10:].any()
