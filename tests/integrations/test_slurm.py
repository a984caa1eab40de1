"""The package's templates under a real Slurm of two nodes, unchanged: what Slurm does to a job, and what is left of it.

The nodes share this machine's two cores, so the options of sbatch ask for fewer ranks than the templates do.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from jobs_common import PYTHONPATH, ROOT, same
from slurm import NODES, Slurm, listening, missing
from test_train import alone, lines, tiny, weights

from zerolab import lab
from zerolab.apps import machine

pytestmark = pytest.mark.slow

TEMPLATES = ROOT / "zerolab" / "lab" / "slurm"
ENV = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
SMALLER = ("--ntasks-per-node=1", "--cpus-per-task=1")
ENDLESS = 10**6  # steps
LIMIT = 600.0  # seconds for what comes as soon as the machine lets it


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="zerolab-slurm-", dir="/tmp"))
    try:
        with Slurm(folder) as running:
            yield running
        left = [process for process in psutil.process_iter() if str(folder) in _config(process)]
        assert left == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _config(process: psutil.Process) -> str:
    try:
        return process.environ().get("SLURM_CONF", "")
    except psutil.Error:
        return ""


@pytest.fixture(autouse=True)
def nothing_in_the_queue(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user", "root")
    slurm.wait_until(lambda: not slurm.run("squeue", "-h"), 100.0, "an empty queue")


def submit(slurm: Slurm, template: str, folder: Path, *options: str, words: str) -> tuple[int, Path]:
    """The job's number, and where it prints."""
    log = folder / f"{template}.log"
    command = [*SMALLER, "--output", log, *options, TEMPLATES / f"{template}.sbatch", *words.split()]
    return slurm.submit(*command, cwd=folder, **ENV), log


def one_process(words: str, steps: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """With one thread, as the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return alone(words, 2, steps)
    finally:
        torch.set_num_threads(threads)


def endless(folder: Path) -> str:
    """Steps without a validation are so fast that one process would be long in coming after."""
    every = f"--validate-every 5 --save-every {ENDLESS}"
    return tiny("text", f"--stage 2 --steps {ENDLESS} {every} --checkpoint {folder}/run --metrics {folder}/run.jsonl")


def trains(slurm: Slurm, folder: Path, log: Path, lives: int) -> None:
    """Wait until the run, begun and resumed so often, has done a step in its present life."""
    metrics = folder / "run.jsonl"

    def there() -> bool:
        text = log.read_text() if log.exists() else ""
        begun = re.findall(r"steps (\d+) to 1000000", text)
        if len(begun) < lives or not metrics.exists():
            return False
        *_, last, _ = ["", *metrics.read_text().split("\n")]
        return last.startswith("{") and json.loads(last)["step"] >= int(begun[-1])

    slurm.wait_until(there, LIMIT, f"life {lives}", log)


def cancelled_it_has_the_bits_of_one_process(slurm: Slurm, job: int, folder: Path, log: Path, lives: int) -> None:
    """scancel: the ranks get SIGTERM, save and end. No life has lost or repeated a step."""
    slurm.run("scancel", job)
    slurm.wait_until(lambda: slurm.state(job) == "", 100.0, "the job's end", log)
    text = log.read_text()
    ends = [int(step) for step in re.findall(r"stopped after step (\d+) of \d+; saved", text)]
    begins = [int(step) for step in re.findall(r"steps (\d+) to \d+", text)]
    assert len(begins) == lives and begins[0] == 1, text
    assert ends[-1] > begins[-1], text
    losses, expected = one_process(endless(folder), ends[-1])
    assert lines(folder / "run.jsonl", "loss") == losses
    assert same(weights("text", folder / f"run/step-{ends[-1]:06}"), expected) == []


def test_arrays_train_every_stage_bit_for_bit_and_the_doctor_says_what_slurm_gave(slurm, tmp_path):
    assert listening(slurm.folder) == {"127.0.0.1"}
    words = tiny("text", f"--stage %a --steps 4 --checkpoint {tmp_path}/run-%a --metrics {tmp_path}/%a.jsonl")
    jobs = [
        submit(slurm, "srun", tmp_path, "--array=0,2", words=words),
        submit(slurm, "torchrun", tmp_path, "--array=1,3", words=words),
    ]
    report = tmp_path / "doctor.json"
    doctor = f"python -m zerolab.cli doctor --ranks 1 --json {report}"
    slurm.submit(
        "--nodes=2", "--gpus-per-node=4", "--output", tmp_path / "doctor", "--wrap", doctor, cwd=tmp_path, **ENV
    )
    logs = [log for _, log in jobs]
    slurm.wait_until(lambda: not slurm.run("squeue", "-h"), LIMIT, "the end of the arrays", *logs)
    losses, expected = one_process(words.replace("%a", "0"), 4)
    for stage in range(4):
        assert (tmp_path / f"{stage}.jsonl").exists(), [log.read_text() for log in logs]
        assert lines(tmp_path / f"{stage}.jsonl", "loss") == losses
        assert same(weights("text", tmp_path / f"run-{stage}/step-000004"), expected) == []
    assert [log.read_text().count("on 2 ranks") for log in logs] == [2, 2]

    found = {finding["subject"]: finding for finding in json.loads(report.read_text())["findings"]}
    assert found["Slurm"]["state"] == "good" and "environment" not in found
    assert re.match(r"job \d+, 2 nodes \(127\.0\.0\.\[1-2\]\), here 1 cores and 4 GPUs", found["Slurm"]["says"])
    assert ("Slurm's cores" in found) == (psutil.cpu_count() > 1)  # this Slurm does not bind


def test_time_that_is_up_and_a_preemption_requeue_a_job_of_torchrun_that_goes_on(slurm, tmp_path):
    begin = time.monotonic()
    job, log = submit(slurm, "torchrun", tmp_path, "--time=60", "--signal=B:USR1@20", words=endless(tmp_path))
    trains(slurm, tmp_path, log, 1)
    # Minutes from its start. Slurm looks every 30 seconds, and sends the signal that is due before the next look.
    limit = int(time.monotonic() - begin + 30) // 60 + 1
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    slurm.wait_until(lambda: slurm.state(job) == "PENDING", 150.0, "the job in the queue again", log)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")  # once is enough
    trains(slurm, tmp_path, log, 2)
    assert log.read_text().count("stopped after step") == 1 and "DUE TO TIME LIMIT" not in log.read_text()

    high = slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap", "srun true", cwd=tmp_path)
    slurm.wait_until(lambda: slurm.state(high) == "", 100.0, "what preempts", log)
    assert "DUE TO PREEMPTION" in log.read_text()
    trains(slurm, tmp_path, log, 3)
    assert log.read_text().count("stopped after step") == 2
    cancelled_it_has_the_bits_of_one_process(slurm, job, tmp_path, log, 3)


def test_a_node_that_dies_requeues_a_job_of_srun_that_goes_on(slurm, tmp_path):
    words = endless(tmp_path).replace(f"--save-every {ENDLESS}", "--save-every 20")
    job, log = submit(slurm, "srun", tmp_path, words=words)
    slurm.wait_until(lambda: list(tmp_path.glob("run/step-*")), LIMIT, "a checkpoint", log)

    slurm.end(NODES[1])
    slurm.wait_until(lambda: slurm.state(job) == "PENDING", 100.0, "the job in the queue again", log)
    slurm.wait_until(lambda: "down*" in slurm.states(), 100.0, "that Slurm misses the node", log)
    assert "CommError: rank 0 of 2" in log.read_text()
    slurm.start_node(NODES[1])
    trains(slurm, tmp_path, log, 2)
    cancelled_it_has_the_bits_of_one_process(slurm, job, tmp_path, log, 2)


def test_what_is_refused_is_not_tried_again(slurm, tmp_path):
    job, log = submit(slurm, "srun", tmp_path, words="--task text --global-batch 1")
    slurm.wait_until(lambda: slurm.state(job) == "", 100.0, "its end", log)
    assert log.read_text().count("enough for at most 1 ranks") == 1


def test_a_notebook_on_the_engines_of_a_job(slurm, tmp_path):
    where = {"ZEROLAB_CLUSTER": tmp_path / "cluster", "ZEROLAB_ADDRESS": "127.0.0.1"}
    command = [*SMALLER, "--output", tmp_path / "log", TEMPLATES / "ipyparallel.sbatch"]
    slurm.submit(*command, cwd=tmp_path, **ENV, **where)
    file = tmp_path / "cluster/security/ipcontroller-client.json"
    slurm.wait_until(file.exists, LIMIT, "the controller", tmp_path / "log")
    live = lab.start(2, backend="ipyparallel", connection=file)
    try:
        live.run("import os; told = [rank, os.environ['SLURM_NODEID'], os.environ['SLURMD_NODENAME']]")
        told = lab.pull("told")
    finally:
        lab.stop()
    assert told == [[0, "0", NODES[0]], [1, "1", NODES[1]]]


def test_what_the_doctor_makes_of_other_jobs(monkeypatch):
    monkeypatch.setattr(machine, "_usable_cores", lambda: 8)
    assert machine.check_slurm({}) == []
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_ON_NODE": "4"}
    job |= {"SLURM_JOB_END_TIME": str(int(time.time()) + 630), "SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "1"}
    about, cores = machine.check_slurm(job)
    assert about.says.startswith("job 5_2, 1 node (") and "4 cores and 1 GPU;" in about.says
    assert about.says.endswith("10 minutes left; requeued 1 time so far")
    assert cores.state == "note" and "gave 4 cores, but lets this process use 8" in cores.says
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert machine.check_environment(batch) == []  # a batch script, which may start the doctor
    assert machine.check_environment(batch | {"SLURM_STEP_ID": "0"})[0].state == "fix"
