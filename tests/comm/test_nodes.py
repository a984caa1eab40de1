"""Two hosts: network namespaces with their own addresses, joined by a virtual link that torchrun and gloo use."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from jobs_common import PYTHONPATH
from reference import train_alone
from slurm import missing
from test_launch import ROOT, wait_until
from test_mesh import alone_in_tree_order

from zerolab.measure import between_bytes

pytestmark = pytest.mark.slow

GROUP_TIMEOUT, STEPS = 6, 32
OVERHEAD = 1.02  # headers, acknowledgements and messages about the run; 1.003 here, where the link takes large packets


class Host:
    """A network namespace with one interface, `eth`; it sees the files of this machine."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"zerolab{os.getpid()}-{number}"
        self.address = f"10.213.7.{number + 1}"
        self.process: subprocess.Popen | None = None
        self.log = Path()

    def ip(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)

    def torchrun(self, master: Host, port: int, log: Path, *arguments: object, ranks: int = 1) -> None:
        """This host's ranks of a world on two hosts, which meets at `master`."""
        where = ["--nnodes", 2, "--node-rank", self.number, "--nproc-per-node", ranks]
        where += ["--master-addr", master.address, "--master-port", port, "--local-addr", self.address]
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", *where]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["PYTHONPATH"] = PYTHONPATH
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*map(str, command), str(Path(__file__).with_name("jobs_nodes.py")), *map(str, arguments)],
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def lives(self) -> bool:
        return self.process.poll() is None

    def limit(self, rate: str | None) -> bool:
        """Limit what the link carries from here; None: no limit. False where the system cannot do that."""
        if not shutil.which("tc"):
            return False
        limit = ["add", "dev", "eth", "root", "tbf", "rate", rate, "burst", "10kb", "latency", "400ms"]
        command = ["tc", "-n", self.name, "qdisc", *(limit if rate else ["del", "dev", "eth", "root"])]
        return subprocess.run(command, capture_output=True, timeout=600).returncode == 0

    def freeze(self) -> None:
        self._all(psutil.Process.suspend)

    def thaw(self) -> None:
        self._all(psutil.Process.resume)

    def end(self) -> None:
        """Like a host that loses power."""
        if self.process is None:
            return
        self._all(psutil.Process.kill)
        self.process.wait(10)
        self.process = None

    def _all(self, do: Callable[[psutil.Process], None]) -> None:
        """Send a signal to everything that runs on this host."""
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.process.pid)
            for process in [*agent.children(recursive=True), agent]:
                with suppress(psutil.NoSuchProcess):
                    do(process)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=600)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    both = [Host(0), Host(1)]
    if not shutil.which("ip"):
        pytest.skip("needs Linux and iproute2")
    try:
        for host in both:
            ip("netns", "add", host.name)
        ends = [f"zl{os.getpid()}{side}" for side in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(both, ends):
            ip("link", "set", end, "netns", host.name, "name", "eth")
            host.ip("addr", "add", f"{host.address}/24", "dev", "eth")
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "eth", "up")
    except subprocess.CalledProcessError as error:
        remove(both)
        pytest.skip(f"needs the permission to make network namespaces: {error.stderr.decode().strip()}")
    try:
        yield both
        for host in both:
            host.end()
    finally:
        remove(both)


def remove(hosts: list[Host]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True, timeout=600)


def progress(folder: Path) -> list[int]:
    """Where the run began, and how many steps are done."""
    with suppress(FileNotFoundError, ValueError):
        begin, done = map(int, (folder / "progress").read_text().split())
        return [begin, done]
    return [0, 0]


def equal(path: Path, expected: dict[str, torch.Tensor]) -> None:
    state = torch.load(path)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), f"{path.name}: {name}"


@contextmanager
def one_thread() -> Iterator[None]:
    """As many as the ranks have: a different number of threads gives different bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one_process(steps: int) -> dict[str, torch.Tensor]:
    with one_thread():
        return train_alone(2, None, steps)[0]


def in_tree_order() -> dict[str, torch.Tensor]:
    with one_thread():
        return alone_in_tree_order((2, 2), None)


def start(hosts: list[Host], folder: Path, name: str, pause: float) -> None:
    for host in hosts:
        host.torchrun(hosts[0], 29400, folder / f"{name}{host.number}", "life", folder, GROUP_TIMEOUT, STEPS, pause)


def wait_for_step(hosts: list[Host], folder: Path, begin: int, number: int) -> None:
    """Wait until the run that continued from step `begin`, or a later one, has done `number` steps."""

    def there() -> bool:
        first, done = progress(folder)
        return first >= begin and done >= number

    wait_until(lambda: there() or not all(host.lives() for host in hosts))
    assert all(host.lives() for host in hosts), [host.log.read_text() for host in hosts]


def the_first_host_says_why(hosts: list[Host], timeout: float, clock: Callable[[], float]) -> None:
    """The second host does not answer, and nobody closes a connection: only a timeout can notice."""
    begin = clock()
    wait_until(lambda: not hosts[0].lives())
    seconds = clock() - begin
    told = hosts[0].log.read_text()
    assert hosts[0].process.returncode != 0
    assert re.search(r"CommError: rank 0 of \d: [\w-]+ of .+ failed: .*(timeout|timed out)", told, re.IGNORECASE), told
    assert seconds < timeout + 15.0  # beyond the timeout, the seconds that Python and torchrun take to end


@pytest.mark.exhaustive
def test_two_hosts_are_one_process_and_one_that_is_slow_or_cut_off_comes_back(hosts, tmp_path, clock):
    start(hosts, tmp_path, "first", 0.2)
    wait_for_step(hosts, tmp_path, 0, 5)
    expected = one_process(3)
    for stage in range(4):
        equal(tmp_path / f"stage{stage}.pt", expected)

    # The second host is slow: the run waits for it, and goes on.
    slow = hosts[1].limit("1mbit")
    begin, (_, done) = time.monotonic(), progress(tmp_path)
    wait_for_step(hosts, tmp_path, 0, done + 3)
    if slow:
        assert time.monotonic() - begin > 1.5  # a step sends 150,000 bytes; without the limit three take 0.8 s
        hosts[1].limit(None)
    hosts[1].freeze()
    time.sleep(GROUP_TIMEOUT / 3)
    hosts[1].thaw()
    wait_for_step(hosts, tmp_path, 0, progress(tmp_path)[1] + 2)

    # The cable is pulled out of it.
    hosts[1].ip("link", "set", "eth", "down")
    the_first_host_says_why(hosts, GROUP_TIMEOUT, clock)
    for host in hosts:
        host.end()
    saved = progress(tmp_path)[1] // 4 * 4
    assert saved < STEPS and not (tmp_path / "end.pt").exists()

    # The same command continues from the checkpoint, and ends as if nothing had happened.
    hosts[1].ip("link", "set", "eth", "up")
    start(hosts, tmp_path, "again", 0.0)
    with suppress(AssertionError, subprocess.TimeoutExpired):  # the lines below report what has not ended, with its log
        wait_until(lambda: not all(host.lives() for host in hosts))
        for host in hosts:  # where one fails, torchrun on the other may wait for five minutes
            host.process.wait(10)
    assert [host.process.poll() for host in hosts] == [0, 0], [host.log.read_text() for host in hosts]
    begin, end = progress(tmp_path)
    assert begin in (saved, saved + 4) and end == STEPS  # later: it was cut off when both had saved
    equal(tmp_path / "end.pt", one_process(STEPS))


def test_the_slurm_templates_are_there_and_whole():
    """As far as one can check without Slurm: bash can read them, and zerolab.train takes what they say it takes."""
    from zerolab.apps.train import add_arguments

    page = (ROOT / "docs" / "administrators.md").read_text(encoding="utf-8")
    templates = sorted((ROOT / "zerolab" / "lab" / "slurm").glob("*.sbatch"))
    assert [file.name for file in templates] == ["ipyparallel.sbatch", "srun.sbatch", "torchrun.sbatch"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    commands = re.findall(r"run\.sbatch (--task.*?)(?: {2,}#|$)", page, re.MULTILINE)
    for file in templates:
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=600)
        assert file.name in page
        commands += re.findall(r"^#     sbatch .*?\.sbatch (--task.*)$", file.read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert parser.parse_args(command.split()).stage == 2


# Starts SLURM_NTASKS tasks, each on a node of its own (all of them here), with the variables that Slurm would set.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=0 SLURM_NODEID=$i "$@" &
    tasks[i]=$!
done
for task in "${tasks[@]}"; do wait "$task" || failed=1; done
exit ${failed:-0}
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not missing(), reason="tests/integrations/test_slurm.py has a real Slurm here")
def test_the_templates_train_on_two_nodes_where_srun_is_one_that_knows_no_cluster(tmp_path):
    """The real templates and `zerolab.train`; of Slurm, only the variables that it sets."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho localhost\necho other\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]])
    arguments = "--task text --stage 2 --steps 3 --layers 1 --width 32 --context 16 --global-batch 8 --checkpoint"
    runs = []
    for number, template in enumerate(("torchrun", "srun")):
        slurm = {"NTASKS": 2, "NNODES": 2, "JOB_ID": 2 * os.getpid() + number, "JOB_NODELIST": "localhost,other"}
        slurm |= {"STEP_ID": 0, "STEP_NODELIST": "localhost,other", "STEP_TASKS_PER_NODE": "1(x2)"}
        env = os.environ | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        env |= {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1"}
        file = ROOT / "zerolab" / "lab" / "slurm" / f"{template}.sbatch"
        command = ["bash", str(file), *arguments.split(), f"{template}-run"]
        log = tmp_path / f"{template}.log"
        with log.open("w") as out:
            run = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
        runs.append((run, log))
    try:
        last = [(run.wait(600), log.read_text().splitlines()[-1:]) for run, log in runs]
    finally:
        for run, _ in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait(10)
    assert [code for code, _ in last] == [0, 0], [log.read_text() for _, log in runs]
    # Two ranks both times, so the numbers are the same; and each leaves a checkpoint.
    assert last[0] == last[1] and last[0][1][0].startswith("step 3: loss ")
    assert (tmp_path / "torchrun-run").is_dir() and (tmp_path / "srun-run").is_dir()


def across(ranks: int) -> float:
    """What all-gathers without a mesh move from the first half of the ranks to the second, as a share of the result.

    A ring would move (N-1)/N. Here each rank broadcasts its shard, and gloo's broadcast is a tree: rank v, counted from
    the root, has it after round k if v < 2**k, and in round k sends it to v + 2**k. Summed over all rounds and roots.
    """
    sent = 0
    for root in range(ranks):
        have = 1
        while have < ranks:
            for v in range(min(have, ranks - have)):
                source, target = (root + v) % ranks, (root + v + have) % ranks
                sent += source < ranks // 2 <= target
            have *= 2
    return sent / ranks


@pytest.mark.exhaustive
def test_the_link_carries_the_formula_and_less_with_a_mesh_and_a_host_that_froze_is_told(hosts, tmp_path, clock):
    """Four ranks, two on each host: the bytes that the interface sends in a step, with the headers of TCP and IP."""
    for host in hosts:
        host.torchrun(hosts[0], 29401, tmp_path / f"log{host.number}", "links", tmp_path, 6.0, ranks=2)
    wait_for_step(hosts, tmp_path, 0, 5)
    rows = [json.loads((tmp_path / f"links{rank}.json").read_text()) for rank in range(4)]
    expected = in_tree_order()
    for stage in (1, 2, 3):
        equal(tmp_path / f"mesh{stage}.pt", expected)
        mesh, flat = ([row[f"{stage} {kind}"] for row in rows] for kind in ((2, 2), None))
        psi = mesh[0]["psi"]
        for host in (0, 1):
            # With a mesh, only means of shards cross: what the ledgers of this host's two ranks say.
            ledger = mesh[2 * host]["ledger"] + mesh[2 * host + 1]["ledger"]
            assert ledger == 2 * between_bytes((2, 2), psi) == 4 * psi
            # Without, each rank sends a quarter of the gradients to each of the two over there, and gathers cross, too.
            whole = (1 + across(4) * (2 if stage == 3 else 1)) * 4 * psi
            for row, payload in ((mesh[2 * host], ledger), (flat[2 * host], whole)):
                assert payload < row["link"] < OVERHEAD * payload, (stage, host, row, payload)

    # The host stands still for longer than the timeout. When it goes on, its ranks hear that the others have left.
    hosts[1].freeze()
    the_first_host_says_why(hosts, 6.0, clock)
    hosts[1].thaw()
    assert hosts[1].process.wait(300) != 0
    told = hosts[1].log.read_text()
    assert re.search(r"CommError: rank [23] of 4: [\w-]+ of .+ failed: ", told), told
