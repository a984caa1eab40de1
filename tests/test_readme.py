"""The README's program, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zerolab
from zerolab.tasks.models import GPT, Block

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def program() -> str:
    return blocks()[0]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(program())
    losses = eval(run(str(script)))
    assert len(losses) == 4 and all(2 < loss < 6 for loss in losses)


def test_the_same_function_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    last = 'print(f"loss {main():.3f}", flush=True)\n    torch.distributed.destroy_process_group()'
    script.write_text(program().replace("print(zerolab.launch(main, 4))", last))
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert len(re.findall(r"loss \d\.\d+", said)) == 2


def measured_as_in_the_readme(source):
    zero = zerolab.Zero3(GPT(layers=2, width=64, context=16), units=[Block])
    optimizer = torch.optim.AdamW(zero.model.parameters())

    def step():
        x = torch.zeros(2, 16, dtype=torch.long)
        zero.model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    names = {"zero": zero, "optimizer": optimizer, "step": step}
    exec(source, names)
    return names["book"].moved, names["line"].peak, names["record"].overlap


def test_the_measurements_run(ranks):
    for moved, peak, overlap in ranks.run(measured_as_in_the_readme, blocks()[1], ranks=2):
        assert moved > 0 and peak > 0 and 0 <= overlap <= 1


def test_make_targets_exist():
    """What the README tells to type, the Makefile has."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
