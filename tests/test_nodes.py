"""Two hosts: network namespaces with addresses of their own, joined by a virtual link; torchrun and gloo across it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from test_invariants import train_alone
from test_launch import ROOT, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

GROUP_TIMEOUT, STEPS = 6, 24


class Host:
    """A network namespace with one interface, `eth`; it sees the files of this machine."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"zerolab{os.getpid()}-{number}"
        self.address = f"10.213.7.{number + 1}"
        self.process: subprocess.Popen | None = None
        self.log = Path()

    def ip(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)

    def torchrun(self, master: Host, port: int, log: Path, *arguments: object) -> None:
        """A rank on this host, of a world of two that meets at `master`."""
        where = ["--nnodes", 2, "--node-rank", self.number, "--nproc-per-node", 1]
        where += ["--master-addr", master.address, "--master-port", port, "--local-addr", self.address]
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run", *where]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*map(str, command), str(ROOT / "tests" / "jobs_nodes.py"), *map(str, arguments)],
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """As a host that loses its power."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.process.pid)
            for process in [*agent.children(recursive=True), agent]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(10)
        self.process = None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


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
    yield both
    for host in both:
        host.end()
    remove(both)


def remove(hosts: list[Host]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True, timeout=10)


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


def one_process(steps: int) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: other thread counts give other bits
    state, _ = train_alone(2, None, steps)
    torch.set_num_threads(threads)
    return state


def start_and_cut_off(hosts: list[Host], folder: Path) -> int:
    """Every stage on both hosts, then a long run; the second host is cut off in it. The steps that were done."""
    for host in hosts:
        host.torchrun(hosts[0], 29400, folder / f"log{host.number}", folder, GROUP_TIMEOUT, STEPS, 0.3)
    wait_until(lambda: progress(folder)[1] >= 6 or not all(host.lives() for host in hosts), 60.0)
    assert all(host.lives() for host in hosts), [host.log.read_text() for host in hosts]
    expected = one_process(3)
    for stage in range(4):
        equal(folder / f"stage{stage}.pt", expected)

    # The cable is pulled out of the second host. Nobody closes a connection: only a timeout can tell.
    hosts[1].ip("link", "set", "eth", "down")
    begin, (_, done) = time.monotonic(), progress(folder)
    wait_until(lambda: not hosts[0].lives(), GROUP_TIMEOUT + 30.0)
    seconds = time.monotonic() - begin
    told = hosts[0].log.read_text()
    assert hosts[0].process.returncode != 0 and done < STEPS and not (folder / "end.pt").exists()
    assert re.search(r"CommError: rank 0 of 2: [\w-]+ of .+ failed: .*(timeout|timed out)", told, re.IGNORECASE), told
    assert seconds < GROUP_TIMEOUT + 15.0  # what is above the timeout is Python's and torchrun's way out
    for host in hosts:
        host.end()

    return done


def come_back(hosts: list[Host], folder: Path, done: int) -> None:
    """The same command goes on from the checkpoint, and ends as if nothing had been."""
    hosts[1].ip("link", "set", "eth", "up")
    for host in hosts:
        host.torchrun(hosts[0], 29400, folder / f"again{host.number}", folder, GROUP_TIMEOUT, STEPS, 0.0)
    for host in hosts:
        assert host.process.wait(60) == 0, host.log.read_text()
    saved, end = progress(folder)
    assert saved >= 4 and saved % 4 == 0 and saved <= done + 1 and end == STEPS
    equal(folder / "end.pt", one_process(STEPS))


def test_two_hosts_are_one_process_and_one_that_was_cut_off_comes_back(hosts, tmp_path):
    done = start_and_cut_off(hosts, tmp_path)
    come_back(hosts, tmp_path, done)


def test_the_slurm_templates_are_there_and_whole():
    """As far as can be told without Slurm: bash can read them, and zerolab.train takes what they say it takes."""
    from zerolab.train import add_arguments

    page = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")
    templates = sorted((ROOT / "zerolab" / "lab" / "slurm").glob("*.sbatch"))
    assert [file.name for file in templates] == ["ipyparallel.sbatch", "srun.sbatch", "torchrun.sbatch"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    commands = re.findall(r"run\.sbatch (--task.*?)(?: {2,}#|$)", page, re.MULTILINE)
    for file in templates:
        subprocess.run(["bash", "-n", str(file)], check=True, timeout=10)
        assert file.name in page
        commands += re.findall(r"^#     sbatch .*?\.sbatch (--task.*)$", file.read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert parser.parse_args(command.split()).stage == 2
