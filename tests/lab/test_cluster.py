"""Live ranks on a real ipyparallel cluster: three engines here, whose ranks are not the order in which they came."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import psutil
import pytest
from test_launch import wait_until

from zerolab import lab
from zerolab.lab.ranks import cluster, magics
from zerolab.lab.ranks.cluster import ClusterSession, _Engine
from zerolab.lab.ranks.session import RankFailure

pytestmark = pytest.mark.exhaustive
RANKS = {0: "2", 1: "0", 2: "1"}  # by the engine's id


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ipyparallel.Client, Path]]:
    """A cluster that somebody else has started, and its connection file."""
    folder, before = tmp_path_factory.mktemp("profile"), set(psutil.Process().children(recursive=True))
    quick = ["--HeartMonitor.period=1000"]  # milliseconds: an engine is one after its first heartbeats
    owner = ipyparallel.Cluster(
        profile_dir=str(folder), cluster_id="t", engines="local", n=1, log_level=40, controller_args=quick
    )
    owner.start_controller_sync()
    try:
        client = owner.connect_client_sync()
        for id, rank in RANKS.items():
            owner.start_engines_sync(n=1, environment={"RANK": rank})
            wait_until(lambda id=id: len(client.ids) > id)
        yield client, folder / "security" / "ipcontroller-t-client.json"
        client.close()
    finally:
        started = set(psutil.Process().children(recursive=True)) - before
        owner.stop_cluster_sync()
        _, left = psutil.wait_procs(started, 15)
        for process in left:
            process.kill()
    assert not left


@pytest.fixture
def three(engines: tuple[ipyparallel.Client, Path]) -> Iterator[ClusterSession]:
    yield lab.start(backend="ipyparallel", connection=engines[1])
    lab.stop()


def test_the_magics_run_on_engines_by_their_ranks(three: ClusterSession, capsys: pytest.CaptureFixture) -> None:
    assert [three._engines[rank].id for rank in range(3)] == [1, 2, 0]
    code = "import os\nimport torch.distributed as dist\nx = torch.ones(1) * rank\ndist.all_reduce(x)\n"
    magics.ranks("", code + "print(rank, world_size, os.environ['RANK'])")
    magics.ranks("0,2", "rank * 10")
    magics.ranks("", "x.item()")
    told = capsys.readouterr().out
    assert "".join(f"rank {r}: {r} 3 {r}\n" for r in range(3)) in told
    assert "rank 0: 0\nrank 2: 20\nall 3 ranks: 3.0\n" in told
    lab.push(words=["a", "b"], big=b"x" * 1_000_000)
    three.run("words.append(rank)")
    assert lab.pull("words") == [["a", "b", 0], ["a", "b", 1], ["a", "b", 2]]
    assert len(lab.pull("big", rank=1)) == 1_000_000


def test_failures_are_told_in_the_same_words_and_reset(three: ClusterSession) -> None:
    with pytest.raises(RankFailure) as caught:
        three.run("import torch.distributed as dist\nkept = rank\nif rank == 1:\n    1 / 0\ndist.barrier()")
    assert str(caught.value).splitlines() == [
        "rank 1 raised ZeroDivisionError: division by zero",
        "  line 4 of the cell",
        "    1 / 0",
        "ranks 0, 2: raised LostRank: barrier needs every rank, but rank 1 raised ZeroDivisionError: division by zero",
        "lab.reset() gives fresh process groups, variables are kept",
    ]
    with pytest.raises(RankFailure, match="all 3 ranks raised CollectiveError: rank 2 called all_reduce"):
        three.run("dist.all_reduce(torch.ones(2 if rank == 2 else 3))")
    with pytest.raises(RankFailure, match=r"^the cell took longer than 1 s and was interrupted\nrank 2 was interr"):
        three.run("while rank == 2: pass", timeout=1.0)
    lab.reset()
    lab.link("100 MB/s, 20 ms")
    three.run(
        "import time; dist.barrier(); begin = time.monotonic(); x = torch.ones(1) * kept\n"
        "dist.all_reduce(x); took = time.monotonic() - begin"
    )
    assert min(lab.pull("took")) > 0.08  # 2 x (3 - 1) messages
    assert [x.item() for x in lab.pull("x")] == [3.0] * 3


def test_stop_leaves_the_engines_as_they_were(engines: tuple[ipyparallel.Client, Path], three: ClusterSession) -> None:
    client, file = engines
    pids = client[:].apply_sync(os.getpid)
    three.run("left = 5 + rank")
    lab.stop()
    assert sorted(client.ids) == [0, 1, 2] and lab.size() == 0
    assert client[:].apply_sync(os.getpid) == pids
    look = (
        "import os, torch.distributed as d; now = os.environ['RANK'], 'MASTER_ADDR' in os.environ, d.is_initialized()"
    )
    client[:].execute(look).get(20)
    assert client[:]["now"] == [(RANKS[id], False, False) for id in range(3)]
    with pytest.raises(RuntimeError, match="these ranks were stopped"):
        three.run("1")
    again = lab.start(3, backend="ipyparallel", connection=file)
    assert again.pull("left") == [5, 6, 7]


def test_ranks_meet_on_the_host_of_rank_0(
    engines: tuple[ipyparallel.Client, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_here", lambda: "localhost")  # another host than that of the engines
    live = lab.start(backend="ipyparallel", connection=engines[1])
    live.run("import torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x.item() == 3")
    ports = {row.laddr.port for row in psutil.Process(client_pid(live, 0)).net_connections() if row.status == "LISTEN"}
    assert live._port in ports
    lab.stop()


def client_pid(live: ClusterSession, rank: int) -> int:
    live.run("import os; pid = os.getpid()")
    return live.pull("pid")[rank]


def test_ranks_that_cannot_be_are_named(engines: tuple[ipyparallel.Client, Path], tmp_path: Path) -> None:
    def told(*ranks: dict[str, str]) -> str:
        with pytest.raises(RuntimeError) as caught:
            cluster._sort([_Engine(id, "node", environment, 0, False, False) for id, environment in enumerate(ranks)])
        return str(caught.value)

    assert told({"RANK": "1"}, {"RANK": "1"}).startswith("engine 0 on node and engine 1 on node both have RANK=1")
    assert told({"PMI_RANK": "0"}, {}).startswith("engine 0 on node has PMI_RANK in its environment, engine 1 on node")
    assert "rank 1 is missing" in told({"SLURM_PROCID": "2"}, {"SLURM_PROCID": "0"})
    assert "RANK='x', which is not a rank" in told({"RANK": "x"})
    unnamed = [_Engine(id, host, {}, 0, False, False) for id, host in enumerate("baab")]
    assert [engine.id for engine in cluster._sort(unnamed)[0]] == [1, 2, 0, 3]
    mixed = [_Engine(0, "a", {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"}, 0, False, False)]
    mixed += [_Engine(1, "a", {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"}, 0, False, False)]
    assert cluster._sort(mixed)[1] == "OMPI_COMM_WORLD_RANK"


def test_a_cluster_that_is_not_there_is_said_to_be_missing(
    engines: tuple[ipyparallel.Client, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "FIND_TIMEOUT", 0.5)
    with pytest.raises(RuntimeError, match=r"no ipyparallel cluster answered within 0\.5 s"):
        lab.start(backend="ipyparallel", connection=tmp_path / "nothing.json")
    with pytest.raises(RuntimeError, match="has 3 engines, too few for 4 ranks"):
        lab.start(4, backend="ipyparallel", connection=engines[1])
    with pytest.raises(ValueError, match='but must be "local" or "ipyparallel"'):
        lab.start(backend="slurm")
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(RuntimeError, match=r"pip install 'zerolab\[cluster\]'"):
        lab.start(backend="ipyparallel")


def test_an_engine_that_dies_is_reported(three: ClusterSession) -> None:  # the last: nobody starts it again
    code = "import os\nimport torch.distributed as dist\nif rank == 1:\n    os._exit(7)\ndist.barrier()"
    with pytest.raises(RankFailure) as caught:
        three.run(code)
    lines = str(caught.value).splitlines()
    host = three._engines[1].host
    assert (caught.value.rank, lines[0]) == (1, f"rank 1 is gone: engine 2 on {host} has left the cluster")
    assert lines[1].startswith("ranks 0, 2: raised LostRank: barrier needs every rank, but rank 1 is gone: engine 2")
    assert lines[2].startswith("start its engine again, and then the ranks: lab.start(")
    with pytest.raises(RuntimeError, match=r"no longer in the cluster: rank 1 \(engine 2 on .*\); start"):
        lab.reset()
    assert [result.text for result in three.run("print('kept' if dist.is_initialized() else '')", [0, 2])] == [
        "kept\n"
    ] * 2
