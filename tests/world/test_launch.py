"""`init` and `launch`, with real processes: what they return, say when a rank fails, and leave behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs_launch
import psutil
import pytest
import torch
from jobs_common import PYTHONPATH
from ports import free_ports

from zerolab.world import environment as environment_of_ranks
from zerolab.world import nursery
from zerolab.world.environment import first_host, init, read_place
from zerolab.world.processes import AlreadyRanks, Patience, RankError, Ranks, launch

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(jobs_launch.__file__)
LOCAL = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
NO_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "SLURM_", "GLOO_")


def environment(**variables: object) -> dict[str, str]:
    """This process's environment without any trace of a world, and `variables`."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith(NO_WORLD)}
    return rest | {"PYTHONPATH": PYTHONPATH} | {name: str(value) for name, value in variables.items()}


def python(*args: object, **variables: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, text: str | None = None) -> tuple[str, str]:
    try:
        return process.communicate(text, timeout=600)
    finally:
        process.kill()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children() -> set[int]:
    """Processes below this one, even dead ones not yet reaped, without the nursery and the resource tracker."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            own_nursery = child.name() == nursery.NAME and child.ppid() == os.getpid()
            if not own_nursery and "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
        except psutil.ZombieProcess:
            found.add(child.pid)
        except psutil.NoSuchProcess:
            pass
    return found


def wait_until(condition: Callable[[], object]) -> None:
    patience = Patience(600.0)
    while not condition() and patience.turn() > 0:
        time.sleep(0.02)
    assert condition()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """For runs that succeed."""
    with Ranks(4) as pool:
        yield pool


@pytest.fixture(scope="module", params=["forked", pytest.param("spawned", marks=pytest.mark.exhaustive)])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """For runs that fail: it starts new processes after each."""
    with Ranks(2, forked=request.param == "forked") as pool:
        yield pool


def fails(pool: Ranks, fn, *args, **options) -> RankError:
    """The error of a run that must fail, leave no process behind, and leave the pool fit for another run."""
    pids = {place["pid"] for place in pool.run(jobs_launch.place)}
    assert pids <= children()
    others = children() - pids
    with pytest.raises(RankError) as caught:
        pool.run(fn, *args, **options)
    assert children() <= others
    return caught.value


# ---------------------------------------------------------------------- what goes well


def test_results_in_rank_order(four: Ranks) -> None:
    places = four.run(jobs_launch.place, "a", 1)
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["environment"] for place in places] == [[rank, 4, rank, 4] for rank in range(4)]
    assert {place["args"] for place in places} == {("a", 1)}
    assert {place["size"] for place in places} == {4}
    assert len({place["pid"] for place in places}) == 4
    if torch.cuda.device_count() < 4:
        assert {(place["backend"], place["device"]) for place in places} == {("gloo", "cpu")}


def test_processes_are_kept_and_a_run_may_use_some_of_them(four: Ranks) -> None:
    before = [place["pid"] for place in four.run(jobs_launch.place)]
    some = four.run(jobs_launch.place, ranks=2)
    assert [place["environment"] for place in some] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert [place["size"] for place in some] == [2, 2]
    assert [place["pid"] for place in some + four.run(jobs_launch.place)] == before[:2] + before


def test_tensors_are_copied(four: Ranks) -> None:
    x = torch.arange(3.0)
    for result in four.run(jobs_launch.total, x):
        torch.testing.assert_close(result["sum"], torch.tensor([0.0, 10.0, 20.0]))
        torch.testing.assert_close(result["view"], torch.tensor([10.0, 20.0]))
        assert isinstance(result["parameter"], torch.nn.Parameter)
    assert torch.equal(x, torch.arange(3.0))


def test_a_rank_may_return_before_the_others_have_read_what_it_sent(four: Ranks) -> None:
    assert four.run(jobs_launch.leave_first) == [0.0] * 4


def test_init_works_again_after_destroy(four: Ranks) -> None:
    assert four.run(jobs_launch.rejoin, ranks=3) == [3.0] * 3
    assert four.run(jobs_launch.rejoin, ranks=2) == [2.0] * 2


@pytest.mark.slow
def test_a_function_may_use_data_loader_workers(four: Ranks) -> None:
    assert four.run(jobs_launch.load, ranks=1) == [[[0, 1], [2, 3]]]


def test_everything_listens_on_loopback_only(four: Ranks) -> None:
    for sockets in four.run(jobs_launch.listening):
        assert {ip for ip, _ in sockets} <= set(LOCAL)
        assert any(status == psutil.CONN_LISTEN for _, status in sockets)
    here = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert any(c.laddr.port == four._store.port for c in here)
    assert {c.laddr.ip for c in here} <= set(LOCAL)


def test_threads(four: Ranks) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // 4)
    assert four.run(jobs_launch.threads) == [(share, share)] * 4


def test_after_a_run_its_cycles_are_gone_and_what_it_imported_is_looked_at_no_more(four: Ranks) -> None:
    assert four.run(jobs_launch.collected, True) == [(True, False)] * 4
    assert four.run(jobs_launch.collected, False) == [(False, True)] * 4


def test_nothing_starts_before_the_first_run_and_only_results_stay_after_close() -> None:
    before = children()
    pool = Ranks(1, threads=3)
    assert children() == before
    big = torch.randn(1_000_000)
    (back,) = pool.run(jobs_launch.echo, {"big": big})
    assert pool.run(jobs_launch.threads) == [(3, 3)]
    assert len(children() - before) == 1
    pool.close()
    assert children() == before
    pool.close()  # a second time does no harm
    assert torch.equal(back["big"], big) and not back["big"].is_shared()


@pytest.mark.exhaustive
def test_output_in_whole_lines_and_no_noise_even_when_never_closed() -> None:
    """GLOO_SOCKET_IFNAME names a cluster's network. It must not be used here, where that network does not exist."""
    process = python(JOBS, "prints", PYTHONUNBUFFERED="1", GLOO_SOCKET_IFNAME="cluster0")
    out, err = finish(process)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(err.splitlines()) == ["err of rank 0", "err of rank 1"]


# ---------------------------------------------------------------------- what goes wrong


def test_the_first_failing_rank_is_named_with_its_traceback(two: Ranks) -> None:
    error = fails(two, jobs_launch.raises, 1)
    assert error.rank == 1
    assert "in raises" in error.traceback and "ValueError: bad luck on 1" in error.traceback
    assert "zerolab/world/" not in error.traceback  # none of our own frames
    assert error.traceback in str(error)
    assert str(error).startswith("rank 1 of 2 raised ValueError: bad luck on 1, in jobs_launch.raises\n")
    assert "\nrank 0 raised KeyError: 'a consequence'" in str(error)


def test_others_that_still_wait_are_named(four: Ranks) -> None:
    error = fails(four, jobs_launch.dies, "sys")
    assert error.rank == 3
    assert str(error).startswith("rank 3 of 4 raised SystemExit: enough, in jobs_launch.dies\n")
    for rank in range(3):
        assert f"\nrank {rank} had not finished\n" in str(error)
    assert str(error).count("in wait_for_all\n") == 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "rank 1 of 2 exited with code 3, in jobs_launch.dies"),
        ("kill", "rank 1 of 2 was killed by SIGKILL, in jobs_launch.dies"),
    ],
)
def test_a_death_comes_before_those_who_noticed_it(two: Ranks, how: str, said: str) -> None:
    error = fails(two, jobs_launch.dies, how)
    assert error.rank == 1
    assert str(error).startswith(said)
    assert "\nrank 0 " in str(error)


@pytest.mark.exhaustive
def test_a_death_is_seen_though_an_heir_holds_the_pipe(two: Ranks) -> None:
    assert two.run(jobs_launch.echo, 1) == [1, 1]
    before = {process.pid for process, _ in two._processes}  # pools of other tests may be alive too
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        two.run(jobs_launch.dies_with_heir)
    assert not children() & before


@pytest.mark.slow
def test_a_hang_names_the_ranks_and_where_they_stand(two: Ranks) -> None:
    error = fails(two, jobs_launch.hangs, timeout=2.0)
    assert error.rank == 0 and "in wait_for_all" in error.traceback
    assert str(error).startswith("time is up: rank 0 of 2 had not finished, in jobs_launch.hangs\n")
    waiting, _, sleeping = str(error).partition("\nrank 1 had not finished\n")
    assert "all_reduce" in waiting
    assert "in oversleep\n" in sleeping and "in hangs" in sleeping and str(JOBS) in sleeping
    assert "zerolab/world/" not in str(error)


@pytest.mark.slow
def test_a_collective_fails_after_the_group_timeout(two: Ranks) -> None:
    error = fails(two, jobs_launch.hangs, group_timeout=1.0)
    assert error.rank == 0 and "Timed out" in error.traceback
    assert "rank 1 had not finished\n" in str(error) and "in oversleep" in str(error)


def test_time_may_be_over_before_the_processes_have_started() -> None:
    before = children()
    with pytest.raises(RankError, match=r"time is up: rank 0 of 2 had not finished, at its start"):
        launch(jobs_launch.echo, 2, 1, timeout=0.05)
    assert children() == before


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled(two: Ranks) -> None:
    error = fails(two, jobs_launch.not_to_be_pickled)
    assert error.rank == 1
    assert "the result, a lock, cannot be pickled" in str(error)
    assert "rank 0 had finished" in str(error)


@pytest.mark.slow
def test_a_result_that_cannot_be_unpickled(two: Ranks) -> None:
    error = fails(two, jobs_launch.not_to_be_unpickled)
    assert error.rank == 1 and "__reduce__" not in str(error)
    assert str(error) == (
        "rank 1 of 2 returned what cannot be unpickled here (ValueError: invalid literal for int() with base 10: "
        "'not a number'), from jobs_launch.not_to_be_unpickled"
    )


def test_a_copy_that_a_rank_forks_is_no_rank(two: Ranks) -> None:
    """It ends where the function ends, and its result or error is not the rank's."""
    assert two.run(jobs_launch.forks) == [[0, 3, 1, 1], []]
    assert two.run(jobs_launch.echo, 4) == [4, 4]


def nested():
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize("fn", [lambda: 0, nested()])
def test_functions_that_cannot_be_imported(fn) -> None:
    before = children()
    with pytest.raises(TypeError, match=r"cannot import .* top level of a module"):
        launch(fn, 2)
    assert children() == before


@pytest.mark.slow
def test_arguments_that_cannot_be_pickled(two: Ranks) -> None:
    pids = [place["pid"] for place in two.run(jobs_launch.place)]
    with pytest.raises(TypeError, match=r"arguments of jobs_launch\.echo.*lock"):
        two.run(jobs_launch.echo, threading.Lock())
    assert [place["pid"] for place in two.run(jobs_launch.place)] == pids


@pytest.mark.slow
def test_a_process_that_is_killed_while_idle_is_replaced(two: Ranks) -> None:
    pids = [place["pid"] for place in two.run(jobs_launch.place)]
    (victim,) = [process for process, _ in two._processes if process.pid == pids[1]]
    victim.kill()
    victim.join(600.0)
    assert two.run(jobs_launch.echo, 3) == [3, 3]
    assert not children() & set(pids)


@pytest.mark.exhaustive
def test_a_script_without_its_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import zerolab\ndef f(): return 1\nprint(zerolab.launch(f, 2))\n")
    out, err = finish(python(script))
    assert out == ""
    assert "at its start (scripts launch under `if __name__ == '__main__':`)" in err.splitlines()[-2] + err


@pytest.mark.exhaustive
def test_a_prompt_can_launch_what_is_imported_but_not_what_it_defines() -> None:
    program = """
import jobs_launch, zerolab
class Thing: pass
def f(): pass
for fn, args in ((f, ()), (jobs_launch.echo, (Thing(),)), (jobs_launch.echo, ([f],)), (jobs_launch.echo, (5,))):
    try:
        print(zerolab.launch(fn, 2, *args))
    except TypeError as error:
        print(error)
"""
    out, err = finish(python("-"), program)
    assert [line.split("(")[-1] for line in out.splitlines()] == [
        "f exists only in this notebook or prompt)",
        "Thing exists only in this notebook or prompt)",
        "f exists only in this notebook or prompt)",
        "[5, 5]",
    ], err
    assert not err


@pytest.mark.slow
def test_forked_ranks_know_a_module_that_runs_as_main_by_its_name(tmp_path: Path) -> None:
    """Its functions and classes, as in `python -m zerolab.apps.muon`. Of a script they know nothing, which is said."""
    (tmp_path / "job.py").write_text("""
import zerolab
class Thing:
    class Part:
        size = 5
def f(part): return part().size
if __name__ == "__main__":
    with zerolab.Ranks(2, threads=1, forked=True) as pool:
        try:
            print(pool.run(f, Thing.Part))
        except TypeError as error:
            print(error)
""")
    by_name, _ = finish(python("-m", "job", PYTHONPATH=f"{tmp_path}:{PYTHONPATH}"))
    as_script, _ = finish(python(tmp_path / "job.py"))
    assert by_name == "[5, 5]\n"
    assert as_script == (
        "other processes cannot import __main__.f: move it to the top level of a module "
        "(f is in the script, which forked processes do not run)\n"
    )


@pytest.mark.parametrize("ranks", [0, -1, 1.0, "2", True, None])
def test_ranks_that_are_no_number(ranks) -> None:
    with pytest.raises(ValueError, match="ranks="):
        launch(jobs_launch.echo, ranks, 1)


@pytest.mark.parametrize("fn", [None, "jobs_launch.echo", [1, 2]])
def test_a_function_that_was_called_already(fn) -> None:
    kind = type(fn).__name__
    with pytest.raises(TypeError, match=rf"came a {kind}: pass the function itself, as in launch\(main, 4\), not"):
        launch(fn, 2)


@pytest.mark.parametrize("value", [None, float("nan"), 0, -1.0, "60", True])
def test_seconds_that_are_no_number(value) -> None:
    said = f"{value!r}, but must be a number of seconds, more than 0"
    with pytest.raises(ValueError, match=f"^timeout={said} .math.inf waits without end"):
        launch(jobs_launch.echo, 1, 1, timeout=value)
    with pytest.raises(ValueError, match=f"^group_timeout={said} .at most 1,000,000,000"):
        launch(jobs_launch.echo, 1, 1, group_timeout=value)
    with pytest.raises(ValueError, match=f"^timeout={said} .at most"):
        init(value)


def test_the_longest_waits(two: Ranks) -> None:
    assert two.run(jobs_launch.place, timeout=float("inf"), group_timeout=1_000_000_000)[1]["size"] == 2
    for endless in (float("inf"), 1e12):
        with pytest.raises(ValueError, match="group_timeout"):
            two.run(jobs_launch.echo, 1, group_timeout=endless)


@pytest.mark.exhaustive
def test_ranks_start_no_ranks_by_accident(four: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of a pool nor those of torchrun and srun; a world of one rank may."""
    for rank, said in enumerate(four.run(jobs_launch.nest, False, ranks=2)):
        assert said.startswith(f"this process is rank {rank} of 2 already, and each of them would start 1 more: call")
    assert four.run(jobs_launch.nest, True, ranks=2) == [["inner"]] * 2
    assert four.run(jobs_launch.nest, False, ranks=1) == [["inner"]]
    for variables in (LOCAL2, SRUN):
        with monkeypatch.context() as world:
            for name, value in variables.items():
                world.setenv(name, value)
            with pytest.raises(AlreadyRanks, match="already"):
                launch(jobs_launch.echo, 2, 1)
    monkeypatch.setenv("SLURM_PROCID", "0")  # a batch script for four tasks is one process
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert Ranks(2).ranks == 2


def test_more_ranks_than_the_pool_has(two: Ranks) -> None:
    with pytest.raises(ValueError, match="ranks=3, but this pool has 2"):
        two.run(jobs_launch.echo, 1, ranks=3)


def hanging(*arguments: object) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A program whose ranks hang, rank 1 in a collective and rank 0 elsewhere; and the ranks' processes."""
    program = python(JOBS, "hang", *arguments)
    told = Path(str(arguments[0]))
    wait_until(lambda: told.exists() or program.poll() is not None)
    rank0, parent = json.loads(told.read_text())
    assert parent == program.pid
    below = psutil.Process(program.pid).children()
    ranks = [process for process in below if "spawn_main" in " ".join(process.cmdline())]
    assert len(ranks) == 2 and rank0 in {process.pid for process in ranks}
    return program, ranks


@pytest.mark.slow
def test_no_rank_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Not even when a process that the parent forked has inherited its ends of the pipes, and lives on."""
    program, ranks = hanging(tmp_path / "told", "heir")
    program.kill()
    _, alive = psutil.wait_procs(ranks, timeout=300)
    assert not alive
    os.killpg(program.pid, signal.SIGKILL)  # the heir
    finish(program)


def interrupt(program: subprocess.Popen, ranks: list[psutil.Process]) -> str:
    """Control-C: a terminal sends it to every process of the group. Returns what they wrote on stderr."""
    os.killpg(program.pid, signal.SIGINT)
    _, alive = psutil.wait_procs(ranks, timeout=300)
    assert not alive
    _, err = finish(program)
    assert program.returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, err
    return err


@pytest.mark.slow
def test_control_c(tmp_path: Path) -> None:
    assert interrupt(*hanging(tmp_path / "told")).count("Traceback") == 1


@pytest.mark.exhaustive
def test_control_c_while_the_processes_start(tmp_path: Path) -> None:
    program = python(JOBS, "hang", tmp_path / "told")
    parent = psutil.Process(program.pid)
    wait_until(lambda: len(parent.children()) == 3)  # two ranks and the resource tracker
    interrupt(program, parent.children())


@pytest.mark.exhaustive
def test_control_z_takes_none_of_the_time(tmp_path: Path) -> None:
    program = python(JOBS, "rest", tmp_path / "told")
    wait_until(lambda: (tmp_path / "told").exists() or program.poll() is not None)
    os.killpg(program.pid, signal.SIGSTOP)  # a terminal sends SIGTSTP to the group, with the same effect
    time.sleep(4.0)  # longer than the run may take
    os.killpg(program.pid, signal.SIGCONT)
    assert finish(program) == ("[15, 15]\n", "")


# ---------------------------------------------------------------------- init


def worlds(processes: list[subprocess.Popen]) -> list[dict]:
    """What each of the processes printed, in rank order."""
    found = []
    for process, (out, err) in [(process, finish(process)) for process in processes]:
        assert out and process.returncode == 0, err
        # The agents of torchrun on two hosts say so where the one that holds the store is the first to end.
        assert "torch.distributed.run" in process.args or not err, err
        found += [json.loads(line) for line in out.splitlines()]
    return sorted(found, key=lambda world: world["rank"])


@pytest.mark.slow
def test_a_world_of_one_needs_no_variable() -> None:
    (world,) = worlds([python(JOBS)])
    assert (world["rank"], world["size"], world["environment"]) == (0, 1, [])
    assert set(world["listening"]) <= set(LOCAL)


@pytest.mark.slow
def test_torchrun() -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    run = python(*start, JOBS, OMP_NUM_THREADS=1)
    found = worlds([run])
    assert [world["environment"] for world in found] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert all(set(world["listening"]) <= set(LOCAL) for world in found)


@pytest.mark.exhaustive
def test_srun() -> None:
    """Three tasks on two nodes (both here), as srun describes them."""
    tasks = [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    found = worlds(
        [
            python(
                JOBS,
                SLURM_PROCID=rank,
                SLURM_NTASKS=3,
                SLURM_LOCALID=local,
                SLURM_NODEID=node,
                SLURM_STEP_ID=0,
                SLURM_JOB_ID=os.getpid(),
                SLURM_STEP_NODELIST="localhost,node[03-07,9]",
                SLURM_STEP_TASKS_PER_NODE="2,1",
            )
            for rank, local, node in tasks
        ]
    )
    assert [(world["rank"], world["size"]) for world in found] == [(0, 3), (1, 3), (2, 3)]


SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
SRUN |= {"SLURM_STEP_NODELIST": "node[03-05],old9", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}


def test_the_place_that_slurm_describes() -> None:
    assert read_place(SRUN) == (5, 7, 1, 2, "node03", 10000 + 123456 % 20000)
    assert read_place(SRUN | {"SLURM_STEP_ID": "1"}).port != read_place(SRUN).port
    assert read_place(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})[4:] == ("10.0.0.1", 29500)
    last = {"SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}
    assert read_place(SRUN | last).local_world_size == 1
    asked = {"SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": ""}
    assert read_place(SRUN | asked).local_world_size == 4
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert read_place(SRUN | torchrun) == (1, 2, 1, 2, "localhost", 1)


def test_slurm_without_srun_is_a_world_of_one() -> None:
    assert read_place({"SLURM_NTASKS": "4", "SLURM_NODELIST": "a,b"}).world_size == 1  # salloc's shell
    assert read_place({"SLURM_PROCID": "0", "SLURM_NODELIST": "a"}).world_size == 1  # a batch script
    assert read_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[03-07,9]", "node03"),
        ("node[9,03-07],login", "node9"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("rack[1-2]node[04-5]-ib,x", "rack1node04-ib"),
        ("10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def testfirst_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


LOCAL2 = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "rank 1 cannot start: WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "rank unknown cannot start: RANK is not set"),
        (LOCAL2 | {"RANK": "2"}, "rank 2 cannot start: RANK=2 must be less than WORLD_SIZE=2"),
        (LOCAL2 | {"RANK": "-1"}, "rank -1 cannot start: RANK='-1' is not a number"),
        (LOCAL2 | {"WORLD_SIZE": "two"}, "rank 1 cannot start: WORLD_SIZE='two' is not a number"),
        (LOCAL2 | {"WORLD_SIZE": "0", "RANK": "0"}, "RANK=0 must be less than WORLD_SIZE=0"),
        (LOCAL2 | {"MASTER_ADDR": "10.0.0.1"}, "rank 1 cannot start: LOCAL_RANK is not set"),
        (LOCAL2 | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        (LOCAL2 | {"MASTER_PORT": ""}, "rank 1 cannot start: MASTER_PORT is not set"),
        (LOCAL2 | {"MASTER_PORT": "x"}, "MASTER_PORT='x' is not a number"),
        (LOCAL2 | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "rank 5 cannot start: SLURM_NTASKS=7, but no SLURM_STEP_NODELIST"),
        (SRUN | {"SLURM_LOCALID": ""}, "rank 5 cannot start: SLURM_LOCALID is not set"),
        (SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 must be less than SLURM_NTASKS=7"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "start with srun"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "a"}, "rank 1 cannot start: SLURM_NTASKS is not set"),
    ],
)
def test_environments_that_cannot_be(variables: dict, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(NO_WORLD)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as caught:
        init(1.0)
    assert said in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_rank_that_sees_only_its_own_gpu_is_not_sent_to_the_cpu_in_silence(monkeypatch):
    """mpirun and --gpu-bind show each rank one GPU. Without SLURM_GPUS_PER_TASK it might also be shared."""
    monkeypatch.setattr(environment_of_ranks.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(environment_of_ranks.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(environment_of_ranks.torch.cuda, "set_device", lambda _: None)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    for gpus, warned in ((0, False), (1, True), (4, False)):
        monkeypatch.setattr(environment_of_ranks.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            environment_of_ranks._join(read_place(SRUN)._replace(rank=0, local_rank=0, local_world_size=2), 1.0)
        assert ["train on the CPU" in str(each.message) for each in said] == [True] * warned


# ---------------------------------------------------------------------- schedulers that set torchrun's variables


def test_the_places_that_kubernetes_and_ray_describe() -> None:
    """Kubeflow's PyTorchJob: a pod for each rank, no variable for the place on its machine unless torchrun runs there.

    Ray Train: all of torchrun's, set in each worker (ray.train.torch.config, of Ray 2.60).
    """
    first = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(RuntimeError, match="rank 2 cannot start: LOCAL_RANK is not set"):
        read_place(first | {"PYTHONUNBUFFERED": "1"})  # python, where the pod's command should be torchrun
    assert read_place(first | local) == (2, 3, 0, 1, "job-master-0", 23456)
    ray = first | {"NODE_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
    assert read_place(ray) == (2, 3, 0, 1, "job-master-0", 23456)


@pytest.mark.exhaustive
def test_kubernetes() -> None:
    """Two pods of a PyTorchJob, as processes: torchrun in each reads the operator's PET_ variables."""
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_ports(1)[0]}
    torchrun = {f"PET_{name}": value for name, value in meet.items()} | {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 1}
    pods = [meet | torchrun | {"WORLD_SIZE": 2, "RANK": pod, "PET_NODE_RANK": pod} for pod in (0, 1)]
    found = worlds([python("-m", "torch.distributed.run", JOBS, OMP_NUM_THREADS=1, **pod) for pod in pods])
    assert [world["environment"] for world in found] == [[0, 2, 0, 1], [1, 2, 0, 1]]


@pytest.mark.exhaustive
def test_ray_train() -> None:
    """Two workers on one node, with the variables that Ray Train sets in each."""
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_ports(1)[0]}
    node = meet | {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 0, "ACCELERATE_TORCH_DEVICE": "cpu"}
    found = worlds([python(JOBS, RANK=rank, LOCAL_RANK=rank, **node) for rank in (0, 1)])
    assert [world["environment"] for world in found] == [[0, 2, 0, 2], [1, 2, 1, 2]]
