"""How a script ends: all threads that work for it end first, since one that wakes up too late aborts the process."""

import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_ports
from test_launch import finish, python

JOBS = Path(__file__).with_name("jobs_exit.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc to see threads"),
]


def two_ranks(*arguments: object) -> list[subprocess.Popen]:
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    return [python(JOBS, *arguments, **world, RANK=rank, LOCAL_RANK=rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("how", "stage"),
    [("returns", 3), ("returns", 0), ("destroy", 2), ("mesh", 1), ("forks", 2)],
)
@pytest.mark.exhaustive
def test_no_thread_is_left_when_python_ends(how, stage):
    for rank in two_ranks(how, stage):
        out, err = finish(rank)
        assert (rank.returncode, err) == (0, "")
        first, *others, last = out.splitlines()
        assert first.startswith("at work:") and "'pt_gloo_runloop'" in first and "'flight recorder'" in first
        assert last == "at the end: ['MainThread']"
        assert len(others) == (how == "forks")  # the line that the fork prints


@pytest.mark.exhaustive
def test_a_rank_that_fails_waits_for_a_collective_that_never_ends_only_until_the_timeout():
    other, failing = two_ranks("fails", 2)
    try:
        failing.stdout.readline()
        _, err = finish(failing)
        assert failing.returncode == 1 and "ValueError: rank 1 has failed" in err
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate(timeout=600)
