"""`zerolab train` as a program: it is told to stop, and it is killed, at any moment, and loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs_common import PYTHONPATH, ROOT
from test_train import lines

from zerolab.checkpoint import read_manifest

pytestmark = pytest.mark.slow

NO_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "GLOO_", "OMP_")


def start(*words: str) -> subprocess.Popen:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(NO_WORLD)}
    environment = rest | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", *words], env=environment, stdout=pipe, stderr=pipe, text=True)


def torchrun(restarts: int, *words: str) -> subprocess.Popen:
    options = f"--standalone --nproc-per-node 2 --max-restarts {restarts}"
    return start("torch.distributed.run", *options.split(), *words)


def finish(process: subprocess.Popen, seconds: float) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    finally:
        process.terminate()  # torchrun then ends its ranks, of which SIGKILL would make orphans
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()


SMALL = f"--task text --data {ROOT / 'LICENSE'} --layers 1 --width 8 --context 8 --global-batch 4 --stage 2"


@pytest.mark.exhaustive
def test_sigterm_to_the_command(tmp_path):
    """What a user, a batch system and torchrun do: the command, which starts the ranks, gets it."""
    path = tmp_path / "run.jsonl"
    words = f"train --ranks 2 {SMALL} --steps 100000 --checkpoint {tmp_path}/run --metrics {path}"
    process = start("zerolab.cli", *words.split())
    deadline = time.monotonic() + 600
    while (not path.exists() or not path.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process, 600)
    step = max(lines(path, "loss"))
    assert code == 0 and f"stopped after step {step} of 100000; saved {tmp_path}/run/step-{step:06};" in out, out + err
    assert read_manifest(tmp_path / f"run/step-{step:06}")[1]["extra"]["step"] == step


KILLS = 10


@pytest.mark.exhaustive
def test_ten_kills(tmp_path):
    """SIGKILL to a rank, at random moments and within saves, ten times: the same bits as without."""
    killed, whole, diary = tmp_path / "killed", tmp_path / "whole", tmp_path / "diary"
    killed.mkdir()
    # --resume never is for the start: a restart by torchrun goes on all the same.
    words = f"{SMALL} --steps 400 --save-every 4 --validate-every 400 --resume never --metrics".split()
    job = [str(Path(__file__).with_name("jobs_killed.py")), str(KILLS), str(diary), str(killed)]
    code, out, err = finish(torchrun(KILLS, *job, *words, f"{killed}.jsonl"), 800)
    assert code == 0, out + err
    deaths = [json.loads(line) for line in diary.read_text().splitlines()]
    assert [death["life"] for death in deaths] == list(range(KILLS))  # so no life ended otherwise
    where = [death.get("where", "save") for death in deaths]
    assert where.count("save") >= 2 * KILLS // 5 and len({death["rank"] for death in deaths}) == 2, where
    assert "skipping" not in out  # no save left a checkpoint that is not whole

    command = ["-m", "zerolab.train", *words, f"{whole}.jsonl", "--checkpoint", str(whole)]
    code, out, err = finish(torchrun(0, *command), 600)
    assert code == 0, out + err
    assert read_manifest(killed / "step-000400")[1] == read_manifest(whole / "step-000400")[1]  # with all checksums
    losses = lines(Path(f"{killed}.jsonl"), "loss")
    assert losses == lines(Path(f"{whole}.jsonl"), "loss") and list(losses) == list(range(1, 401))
    assert sorted(path.name for path in killed.iterdir()) == ["step-000396", "step-000400"]
