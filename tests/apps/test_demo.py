"""`zerolab demo`: its numbers, its exit status, and that it notices an engine that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zerolab
from zerolab.apps.demo import conclusion, print_table
from zerolab.cli import main
from zerolab.lab.ladder import measure_ladder
from zerolab.measure import CATEGORIES
from zerolab.tasks import data
from zerolab.tasks.models import GPT

pytestmark = pytest.mark.slow

SMALL = {"layers": 2, "width": 32, "context": 16}
KEYS = {
    "losses",
    "bitwise_equal",
    "state_bytes",
    "ranks",
    "formula_bytes",
    "moved_bytes_per_step",
    "formula_moved_bytes_per_step",
    "peak_bytes",
    "step_seconds",
}


def check_stages(report: dict[str, Any]) -> None:
    """The values of a good run."""
    losses = [result["losses"] for result in report["stages"].values()]
    for result in report["stages"].values():
        assert result.keys() == KEYS
        assert result["bitwise_equal"] is True
        assert result["losses"] == losses[0]
        assert len(result["losses"]) == report["steps"]
        assert result["state_bytes"].keys() == result["formula_bytes"].keys() == set(CATEGORIES)
        for category, formula in result["formula_bytes"].items():
            assert result["state_bytes"][category] == pytest.approx(formula, rel=0.01)
        assert result["moved_bytes_per_step"] == pytest.approx(result["formula_moved_bytes_per_step"], rel=0.01)
        assert result["peak_bytes"] >= sum(result["state_bytes"].values())
        assert result["step_seconds"] > 0


@pytest.mark.parametrize(
    ("n", "precision"),
    [(3, "fp32"), *(pytest.param(n, "bf16", marks=pytest.mark.exhaustive) for n in (1, 2, 4))],
)
def test_every_stage_is_one_process(lent: None, n: int, precision: str) -> None:
    report, problems = measure_ladder(n, 3, precision=precision, device="cpu", sizes=SMALL)
    assert problems == []
    assert report.keys() == {"ranks", "steps", "parameters", "stages"}
    assert (report["ranks"], report["steps"], list(report["stages"])) == (n, 3, ["0", "1", "2", "3"])
    check_stages(report)
    moved = [result["moved_bytes_per_step"] for result in report["stages"].values()]
    assert (moved[0] == moved[1] == moved[2] < moved[3]) if n > 1 else moved == [0] * 4


# -- an engine that is wrong -----------------------------------------------------------------------------------------


class Sums(zerolab.DDP):
    """Forgets the division. AdamW hardly notices: only bits tell."""

    def reduce(self, unit: zerolab.Unit) -> None:
        super().reduce(unit).wait()
        unit.bucket.grad *= self.world_size


class Alone(zerolab.Zero1):
    """Reduces nothing."""

    def reduce(self, unit: zerolab.Unit) -> None:
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)


class Hoards(zerolab.Zero2):
    """Keeps full gradients, as stage 1 does."""

    post_backward = zerolab.Zero1.post_backward


class GathersAgain(zerolab.Zero3):
    """Releases the root after its forward too."""

    def post_forward(self, unit: zerolab.Unit) -> None:
        unit.release()


def test_a_wrong_engine_is_noticed(lent: None) -> None:
    classes = (Sums, Alone, Hoards, GathersAgain)
    report, problems = measure_ladder(2, 3, device="cpu", classes=classes, sizes=SMALL)
    assert [result["bitwise_equal"] for result in report["stages"].values()] == [False, False, True, True]

    def said(stage: int) -> str:
        return "\n".join(problem for problem in problems if problem.startswith(f"stage {stage}: "))

    assert "parameters differ" in said(0)
    assert "parameters differ" in said(1)
    assert "bytes" not in said(0) and "gradients" not in said(1)
    assert "bytes gradients" in said(2) and "differ" not in said(2)
    assert "bytes moved" in said(3) and "differ" not in said(3)


class OneRankDiffers(zerolab.DDP):
    """The last rank slips a bit in its last parameter, where no gradient shows it to the others."""

    def after_step(self, unit: zerolab.Unit) -> None:
        super().after_step(unit)
        if self.rank == self.world_size - 1:
            unit.params[-1].data.view(-1).view(torch.int32)[-1] ^= 1


def test_every_rank_is_compared(lent: None) -> None:
    report, problems = measure_ladder(2, 2, [0], device="cpu", classes=(OneRankDiffers,), sizes=SMALL)
    assert report["stages"]["0"]["bitwise_equal"] is False
    assert any("rank 1 ends" in problem for problem in problems)


def test_exit_status_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("zerolab.apps.demo.measure_ladder", lambda *_: (made_up_report(), ["stage 1: is crooked"]))
    assert main(["demo"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: stage 1: is crooked" in said
    assert "bit for bit;" not in said  # no conclusion that would say the opposite
    monkeypatch.setattr("zerolab.apps.demo.measure_ladder", lambda *_: (made_up_report(), []))
    assert main(["demo"]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_some_stages(lent: None) -> None:
    report, problems = measure_ladder(2, 2, [3, 1, 3], "bf16", "cpu", sizes=SMALL)
    psi = report["parameters"]
    assert problems == [] and list(report["stages"]) == ["3", "1"]
    check_stages(report)
    by_hand = {"parameters": 2 * psi, "gradients": psi, "optimizer": 4 * psi}  # 4Ψ/N + 2Ψ/N + 8Ψ/N for N = 2
    assert report["stages"]["3"]["formula_bytes"] == by_hand
    assert report["stages"]["1"]["formula_moved_bytes_per_step"] == 2 * psi


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_command(tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "ladder.json", tmp_path / "ladder.png"
    command = [sys.executable, "-m", "zerolab", "demo", "--ranks", "2", "--steps", "2", "--device", "cpu"]
    files = ["--json", str(json_file), "--plot", str(plot_file)]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no bar where there is no terminal, and no noise from libraries
    report = json.loads(json_file.read_text())
    assert report["parameters"] >= 5_000_000
    check_stages(report)
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    table, sentence = done.stdout.split("Every stage")
    assert max(map(len, table.splitlines())) <= 100
    for word in ("0 DDP", "1 Zero1", "2 Zero2", "3 Zero3", "formula", "moved", "peak", "equal"):
        assert word in table
    assert "…" not in done.stdout
    assert "bit for bit" in sentence


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "two"], "--ranks"),
        (["--steps", "1"], "--steps"),
        (["--stages", "5"], "--stages"),
        (["--stages", "0,x"], "--stages"),
        (["--stages", ""], "--stages"),
        (["--precision", "fp16"], "--precision"),
        (["--device", "tpu"], "--device"),
        (["--json", "/no/such/folder/file.json"], "--json"),
        (["--plot", "picture.txt"], "--plot"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert word in said.err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cuda", "--ranks", "2"])
    assert stopped.value.code == 2
    assert "needs a GPU for each of 2 ranks, and torch sees 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments"), [("rich", []), ("tqdm", []), ("matplotlib", ["--plot", "ladder.png"])]
)
def test_missing_package(
    package: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"needs {package}: pip install 'zerolab[lab]'" in said


def test_extras_are_imported_only_when_they_are_used() -> None:
    seen = "print(json.dumps(sorted(sys.modules)))"
    ours = "zerolab.measure, zerolab.cli, zerolab.apps.demo, zerolab.lab"
    code = f"import json, sys, torch; {seen}; import {ours}; {seen}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    by_torch, all_of_it = (set(json.loads(line)) for line in done.stdout.splitlines())
    roots = {name.split(".")[0] for name in all_of_it - by_torch}  # torch takes tqdm and numpy where it finds them
    assert "zerolab.lab" in all_of_it and "zerolab" in roots
    assert not {"rich", "tqdm", "matplotlib", "numpy", "IPython", "zmq"} & roots
    assert not {name for name in roots if name.startswith("jupyter")}


# -- its parts -------------------------------------------------------------------------------------------------------


def made_up_report(stages: str = "0123", equal: bool = True) -> dict[str, Any]:
    held = {"parameters": 1_234_567_888, "gradients": 1_234_567_888, "optimizer": 2_469_135_776}
    result = {
        "losses": [10.0, 9.87654321],
        "bitwise_equal": equal,
        "state_bytes": held,
        "ranks": [{"state_bytes": held}],
        "formula_bytes": held,
        "moved_bytes_per_step": 3_703_703_664,
        "formula_moved_bytes_per_step": 3_703_703_664,
        "peak_bytes": 9_999_900_000,
        "step_seconds": 123.456,
    }
    return {"ranks": 1, "steps": 2, "parameters": 308_641_972, "stages": dict.fromkeys(stages, result)}


def test_table_of_large_numbers_fits(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(made_up_report(), "bf16")
    table = capsys.readouterr().out
    assert "…" not in table
    for number in ("308,641,972", "9.8765", "1234.6", "2469.1", "4938.3", "3703.7", "9999.9", "123456"):
        assert number in table
    assert max(map(len, table.splitlines())) <= 100


def test_conclusion_does_not_claim_bits_where_there_are_none() -> None:
    assert "bit for bit" in conclusion(made_up_report())
    assert "bit for bit" not in conclusion(made_up_report(equal=False))
    assert "NCCL" in conclusion(made_up_report(equal=False))


@pytest.mark.parametrize("stages", ["0123", "3", "13"])
def test_picture(stages: str, tmp_path: Path) -> None:
    from zerolab.lab.plots import ladder

    figure, sentence = ladder(made_up_report(stages), "bf16")
    figure.savefig(tmp_path / "ladder.png")
    assert "1 rank" in sentence and "%" in sentence


def test_gpt() -> None:
    torch.manual_seed(0)
    gpt = GPT(**SMALL)
    tokens, targets = data.batch(data.text(), 0, 0, 2, 16)
    logits = gpt(tokens)
    assert logits.shape == (2, 16, 256)
    assert gpt(tokens, targets).item() == pytest.approx(5.545, abs=0.2)  # ln 256: it knows nothing yet
    changed = tokens.clone()
    changed[:, 10] += 1
    assert torch.equal(gpt(changed)[:, :10], logits[:, :10])  # no look into the future
    assert not torch.equal(gpt(changed)[:, 10:], logits[:, 10:])
    with pytest.raises(ValueError, match="multiple"):
        GPT(width=30)


def test_batches() -> None:
    text = data.text()
    assert text.dtype == torch.uint8 and len(text) > 100_000
    assert b"statement" in bytes(text[:100].tolist())
    x, y = data.batch(text, 1, 7, 3, 20)
    assert x.shape == y.shape == (3, 20) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    torch.manual_seed(123)  # nobody else's random numbers matter
    assert torch.equal(x, data.batch(text, 1, 7, 3, 20)[0])
    others = [data.batch(text, rank, step, 3, 20)[0] for rank, step in ((0, 7), (1, 6), (1, 8), (2, 7))]
    assert not any(torch.equal(x, other) for other in others)
    with pytest.raises(ValueError, match="too short"):
        data.batch(text[:20], 0, 0, 1, 20)
