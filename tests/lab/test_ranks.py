"""Live ranks, with real kernels: what a learner sees of a cell on all ranks, and what is left when things go wrong."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from test_launch import ROOT, children, gone, wait_until

from zerolab import lab
from zerolab.lab.__main__ import copy_lessons, write_kernel
from zerolab.lab.ranks import live, network, report, session
from zerolab.lab.ranks.magics import parse
from zerolab.lab.ranks.rank import NAME, _shown
from zerolab.lab.ranks.session import RankFailure, Session

pytestmark = pytest.mark.slow
IMPORT = "import torch.distributed as dist\n"


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    others = children()
    yield session.start(4)
    lab.stop()
    assert children() <= others


@pytest.fixture
def fresh(four: Session) -> Iterator[Session]:
    """For what goes wrong: the ranks are reset after it, and must work then."""
    yield four
    four.reset()
    assert [result.text for result in four.run(IMPORT + "x = torch.ones(1); dist.all_reduce(x); print(x.item())")] == [
        "4.0\n"
    ] * 4


def fails(four: Session, code: str, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        four.run(IMPORT + code, **options)
    return caught.value


def here(folder: Path) -> str:
    """A line with which a rank says that it is in the cell."""
    return f"open(f'{folder}/{{rank}}', 'w').close()"


def when_all_are_here(ranks: int, folder: Path, interrupt: Callable[[], None]) -> None:
    """In a thread: an interrupt that comes before the cell would end the tests, or nothing at all."""

    def watch() -> None:
        wait_until(lambda: len([*folder.iterdir()]) == ranks)
        time.sleep(0.5)  # so that they wait by then; if not, they are interrupted a line earlier
        interrupt()

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------- what goes well


def test_output_comes_in_rank_order_under_headers(four: Session, capsys: pytest.CaptureFixture) -> None:
    four.run("import time; time.sleep(0.1 * (3 - rank)); print('I am', rank, 'of', world_size)", show=True)
    assert capsys.readouterr().out == "".join(f"rank {rank}: I am {rank} of 4\n" for rank in range(4))


def test_equal_output_is_shown_once(four: Session, capsys: pytest.CaptureFixture) -> None:
    four.run("print('same')", show=True)
    four.run("print('even' if rank % 2 == 0 else f'odd {rank}', device, sep='\\n')", show=True)
    four.run("rank * 0 + 7", [0, 2], show=True)
    four.run("None if rank else 'only the first'", show=True)
    expected = "all 4 ranks: same\nranks 0, 2:\neven\ncpu\nrank 1:\nodd 1\ncpu\nrank 3:\nodd 3\ncpu\n"
    assert capsys.readouterr().out == expected + "ranks 0, 2: 7\nrank 0: 'only the first'\n"


def test_a_progress_bar_ends_as_a_terminal_would_show_it(four: Session) -> None:
    code = "from tqdm.auto import tqdm\nfor _ in tqdm(range(40)): pass\nprint('50 %\\r100 %'); print('abc\\rx')"
    for result in four.run(code):
        bar = "".join(text for kind, text in result.outputs if kind == "stderr")
        assert (bar.count("\n"), bar.count("%"), "100%" in bar) == (1, 1, True)
        assert "".join(text for kind, text in result.outputs if kind == "stdout") == "100 %\nxbc\n"


def test_a_carriage_return_counts_across_pieces() -> None:
    result = report.Result(0)
    for piece in ("\r 10%", "\r 20%", "\r100%", "\n", "next\r", "N"):
        result.write("stderr", piece)
    assert result.outputs == [("stderr", "100%\nNext")]


def test_values_go_out_and_come_back(four: Session) -> None:
    lab.push(big=torch.arange(1_000_000.0))
    assert all(torch.equal(big, torch.arange(1_000_000.0)) for big in lab.pull("big"))
    lab.push(x=torch.arange(3), words=["a", "b"])
    four.run("x = x + rank")
    assert [x.tolist() for x in lab.pull("x")] == [[r, r + 1, r + 2] for r in range(4)]
    assert lab.pull("words", rank=2) == ["a", "b"]
    assert (lab.size(), lab.current()) == (4, four)
    with pytest.raises(TypeError, match="f cannot be sent to the ranks"):
        lab.push(f=lambda: 0)
    with pytest.raises(RankFailure, match="all 4 ranks raised NameError: there is no variable 'nothing' here"):
        lab.pull("nothing")
    with pytest.raises(RankFailure, match="all 4 ranks raised TypeError: 'g', a function, cannot be sent"):
        four.run("g = lambda: 0")
        lab.pull("g")


def test_collectives_give_what_torch_gives(four: Session) -> None:
    code = """
x = torch.full((4,), float(rank)); dist.all_reduce(x); assert x.tolist() == [6.0] * 4
work = dist.broadcast(x.fill_(rank), src=2, async_op=True); work.wait(); assert x.tolist() == [2.0] * 4
rows = [torch.empty(1) for _ in range(4)]; dist.all_gather(rows, torch.tensor([float(rank)]))
assert torch.cat(rows).tolist() == [0, 1, 2, 3]
y = torch.empty(2); dist.reduce_scatter(y, [torch.full((2,), float(i)) for i in range(4)])
assert y.tolist() == [4.0 * rank] * 2
sizes = [[1, 2, 0, 1], [0, 1, 1, 1], [2, 2, 2, 2], [1, 0, 0, 1]]     # uneven, and one rank may leave out what is even
out = torch.empty(sum(row[rank] for row in sizes))
dist.all_to_all_single(out, torch.full((sum(sizes[rank]),), float(rank)), [row[rank] for row in sizes],
                       None if rank == 2 else sizes[rank])
assert out.tolist() == [float(i) for i in range(4) for _ in range(sizes[i][rank])]
if rank == 0: dist.scatter(y, [torch.full((2,), 10.0 * i) for i in range(4)])
else: dist.scatter(y)
assert y.tolist() == [10.0 * rank] * 2
names = [None] * 4; dist.all_gather_object(names, f"r{rank}"); assert names == ["r0", "r1", "r2", "r3"]
pair = dist.new_group([1, 3])
if rank in (1, 3): dist.all_reduce(y, group=pair); assert y.tolist() == [40.0] * 2
dist.barrier()
"""
    four.run(IMPORT + code)


def test_messages_give_what_torch_gives(four: Session) -> None:
    code = """
after, before, box = (rank + 1) % 4, (rank - 1) % 4, torch.empty(3)
ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), after), dist.P2POp(dist.irecv, box, before)]
for work in dist.batch_isend_irecv(ops): work.wait()
assert box.tolist() == [before] * 3
works = [dist.isend(box.clone(), after), dist.irecv(box, before)]
for work in works + works: work.wait()  # a second time does nothing
assert box.tolist() == [(rank - 2) % 4] * 3
if rank == 1: dist.send(torch.ones(3), dst=0)
if rank == 0: assert (dist.recv(box), box.tolist()) == (1, [1.0] * 3)
"""
    four.run(IMPORT + code)


def test_the_engine_runs_on_live_ranks(four: Session) -> None:
    code = """
torch.manual_seed(0); model = torch.nn.Linear(8, 8); zero = zerolab.Zero3(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.full((2, 8), float(rank))).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
with zero.full_parameters(): total = model.weight.sum().item()
"""
    four.run(code)
    assert len(set(lab.pull("total"))) == 1
    four.reset()
    with pytest.raises(RankFailure, match=r"rebuild what was sharded before lab.reset\(\)"):
        four.run("model(torch.ones(2, 8))")


# ---------------------------------------------------------------------- what goes wrong


def test_a_rank_that_raises_is_named_with_its_lines(fresh: Session) -> None:
    code = "def broken(x):\n    return x / 0\nif rank == 2:\n    broken(rank)\ndist.all_reduce(torch.ones(1))"
    error = fails(fresh, code)
    lines = str(error).splitlines()
    assert (error.rank, lines[0]) == (2, "rank 2 raised ZeroDivisionError: division by zero")
    assert lines[1:5] == [
        "  line 5 of the cell",
        "    broken(rank)",
        "  line 3 of the cell, in broken",
        "    return x / 0",
    ]
    others = "all_reduce of (1,) float32, SUM needs every rank, but rank 2 raised ZeroDivisionError: division by zero"
    assert lines[5:] == [
        f"ranks 0, 1, 3: raised LostRank: {others}",
        "lab.reset() gives fresh process groups, variables are kept",
    ]


def test_a_syntax_error_shows_its_place(four: Session) -> None:
    assert str(fails(four, "x = = 1")).splitlines()[:4] == [
        "all 4 ranks raised SyntaxError: invalid syntax",
        "  line 2 of the cell",
        "    x = = 1",
        "        ^",
    ]


OUT_OF_STEP = "lab.reset() gives fresh process groups, variables are kept"


def test_a_reset_is_advised_only_where_it_helps(fresh: Session) -> None:
    """After a mistake that nobody waited for, and after a call that did not match, the ranks go on without one."""
    plain = ["nothing", "if rank == 2: nothing", "dist.all_reduce(torch.ones(3 if rank else 4))", "x = = 1"]
    for code in plain:
        assert "lab.reset()" not in str(fails(fresh, code))
        fresh.run(IMPORT + "x = torch.ones(1); dist.all_reduce(x); assert x.item() == 4")
    for code in (
        "if rank == 2: nothing\ndist.barrier()",
        "if rank: dist.barrier()",
        "raise zerolab.CommError('order')",
    ):
        assert str(fails(fresh, code)).splitlines()[-1] == OUT_OF_STEP


def test_without_ranks_a_sentence_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_current", None)
    for call in (session.need, lab.reset, lab.link, lambda: lab.push(x=1), lambda: lab.pull("x")):
        with pytest.raises(session.NoRanks) as caught:
            call()
        assert caught.value._render_traceback_() == ["there are no live ranks: lab.start(4) starts four"]


def test_a_dead_rank_is_reported_and_restarted(fresh: Session, capsys: pytest.CaptureFixture) -> None:
    fresh.run("kept = rank")
    error = fails(fresh, "import os\nif rank == 3: os._exit(7)\ndist.barrier()")
    lines = str(error).splitlines()
    assert (error.rank, lines[0]) == (3, "rank 3 exited with code 7")
    assert lines[1] == "ranks 0, 1, 2: raised LostRank: barrier needs every rank, but rank 3 exited with code 7"
    with pytest.raises(RankFailure, match=r"rank 3 exited with code 7: lab.reset\(\) restarts the dead"):
        fresh.run("1")
    os.kill(fresh._ranks[1].process.pid, signal.SIGKILL)
    lab.reset()
    told = capsys.readouterr().out
    assert "restarted, their variables are gone: ranks 1, 3\nvariables kept: ranks 0, 2\n" in told
    texts = [result.text for result in fresh.run("print('kept' in globals(), zerolab.__name__)")]
    assert texts == ["True zerolab\n", "False zerolab\n"] * 2


LONGER = """
group = dist.group.WORLD
if rank == 0:
    group.recv([torch.ones(4)], 1, 7).wait()
if rank == 1:
    group.send([torch.ones(64)], 0, 7).wait()
"""
FREED_TWICE = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
place = libc.malloc(64)
for _ in range(2 if rank == 0 else 0):
    libc.free(place)
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [(LONGER, "Received data size doesn't match expected size"), (FREED_TWICE, "last written: free(): double free")],
    ids=["gloo", "the allocator"],
)
def test_an_aborted_rank_says_why(fresh: Session, code: str, words: str) -> None:
    """The first by a message longer than what is received, made past the guard that compares the ranks' calls."""
    error = str(fails(fresh, code))
    assert error.startswith("rank 0 was killed by SIGABRT (") and words in error, error


def test_a_cell_may_go_on_when_a_rank_dies(fresh: Session, capsys: pytest.CaptureFixture) -> None:
    """The others wait for the next life of the dead, in this very cell; it has what was to be there always."""
    fresh.run("import os, time, torch.distributed as dist; known = 7", always=True)
    store = "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), wait_for_workers=False)"
    code = f"""{store}
life = int(os.environ["ZEROLAB_LIFE"])
if os.environ["RANK"] == "2" and life == 0:
    print("before", flush=True); os._exit(3)
if os.environ["RANK"] == "2": store.set("born", "again")
print(life, store.get("born").decode(), known, store.check(["lives/2"]))"""
    fresh.run(code, show=True, revive=True)
    told = capsys.readouterr().out
    assert "ranks 0, 1, 3: 0 again 7 True\n" in told
    assert "exited with code 3, and started again\n1 again 7 True\n" in told
    assert "process group" not in told
    error = fails(fresh, "if os.environ['RANK'] == '1': os._exit(4)", revive=True)
    assert str(error).startswith("rank 1 exited with code 4")  # in each of its lives
    fresh._always.clear()


def test_a_rank_that_does_not_come_fails_the_others(fresh: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "GROUP_TIMEOUT", 1.5)
    monkeypatch.setattr(live, "PATIENCE", 0.5)
    fresh.reset()
    begin = time.monotonic()
    error = fails(fresh, "import time\nif rank == 1:\n    time.sleep(60)\ndist.all_reduce(torch.ones(2))")
    assert time.monotonic() - begin > 1.5
    lines = str(error).splitlines()
    assert (error.rank, lines[:3]) == (
        1,
        ["rank 1 was interrupted", "  line 4 of the cell", "    time.sleep(60)"],
    )
    late = "all_reduce of (2,) float32, SUM waited 1.5 s for rank 1, still busy elsewhere"
    assert lines[3] == f"ranks 0, 2, 3: raised LostRank: {late}"


def test_the_flight_recorder_tells_under_the_cell(
    fresh: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's collectives are not the learner's lines: which one failed, and why, only the recorder knows."""
    monkeypatch.setattr(live, "GROUP_TIMEOUT", 1.5)
    fresh.reset()
    fresh.run("zero = zerolab.shard(torch.nn.Linear(4, 4), 3); zero.model(torch.ones(1, 4)).sum().backward()")
    waits = "while len([*told.iterdir()]) < 3: time.sleep(0.1)"  # and comes when the others have failed
    cell = f"""import time
from pathlib import Path; told = Path({str(tmp_path)!r})
if rank == 2:
    {waits}
try:
    zero.model(torch.ones(1, 4))
finally:
    (told / str(rank)).touch()
"""
    error = fails(fresh, cell)
    assert error.rank in (0, 1, 3) and "CommError: rank" in str(error)
    late = (
        r"rank 2 did not come to (#\d+ )?[\w -]+ of root( \(forward\))?, for which ranks 0, 1, 3 wait: it is at line 5"
    )
    assert re.search(late, str(error)), str(error)
    (text,) = [result.text for result in error.results.values() if "flight recorder" in result.text]
    assert "\nranks 0, 1, 3:\n  completed " in text and f"in <module>: {waits}" in " ".join(text.split())


def test_a_cell_may_be_given_a_time(fresh: Session) -> None:
    error = fails(fresh, "while rank == 2: pass", timeout=1.0)
    assert str(error).startswith("the cell took longer than 1 s and was interrupted\nrank 2 was interrupted\n")
    assert "ranks 0, 1, 3: finished the cell" in str(error)


@pytest.mark.parametrize(
    "wait",
    ["dist.all_reduce(torch.ones(1))", "dist.recv(torch.ones(1), 1)", "model(torch.ones(1, 4))"],
    ids=["collective", "message", "engine"],
)
def test_an_interrupt_frees_ranks_that_wait(fresh: Session, wait: str, tmp_path: Path) -> None:
    fresh.run("model = torch.nn.Linear(4, 4); zero = zerolab.Zero3(model)")
    when_all_are_here(4, tmp_path, lambda: signal.raise_signal(signal.SIGINT))
    error = fails(fresh, f"{here(tmp_path)}\nimport time\nif rank == 0: {wait}\nelse: time.sleep(600)")
    assert str(error).startswith("interrupted\n")
    assert {result.failure.kind for result in error.results.values()} == {"interrupted"}


MISMATCHES = {
    "shape": (
        "x = torch.ones(3 if rank == 2 else 4); dist.all_reduce(x)",
        "rank 2 called all_reduce of (3,) float32, SUM (line 2) while "
        "ranks 0, 1, 3 called all_reduce of (4,) float32, SUM (line 2)",
    ),
    "dtype": (
        "x = torch.ones(4, dtype=torch.float64 if rank == 1 else None); dist.all_reduce(x)",
        "rank 1 called all_reduce of (4,) float64, SUM (line 2) while "
        "ranks 0, 2, 3 called all_reduce of (4,) float32, SUM (line 2)",
    ),
    "root": (
        "x = torch.ones(4); dist.broadcast(x, src=3 if rank == 0 else 1)",
        "rank 0 called broadcast of (4,) float32 from rank 3 (line 2) while "
        "ranks 1, 2, 3 called broadcast of (4,) float32 from rank 1 (line 2)",
    ),
    "reduction": (
        "x = torch.ones(4); dist.all_reduce(x, dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)",
        "rank 3 called all_reduce of (4,) float32, MAX (line 2) while "
        "ranks 0, 1, 2 called all_reduce of (4,) float32, SUM (line 2)",
    ),
    "order": (
        "x = torch.ones(4)\nif rank == 1:\n    dist.broadcast(x, 0); dist.all_reduce(x)\n"
        "else:\n    dist.all_reduce(x); dist.broadcast(x, 0)",
        "rank 1 called broadcast of (4,) float32 from rank 0 (line 4) while "
        "ranks 0, 2, 3 called all_reduce of (4,) float32, SUM (line 6)",
    ),
    "sizes": (
        "x = torch.ones(4); dist.all_to_all_single(torch.ones(4), x, None, [0, 1, 2, 1] if rank == 0 else None)",
        "all_to_all_single of rows of () float32: rank 0 has 0 for rank 0, which expects 1",
    ),
    "asynchronous": (
        "x = torch.ones(4 + rank // 3); dist.all_reduce(x, async_op=True).wait()",
        "rank 3 called all_reduce of (5,) float32, SUM (line 2) while "
        "ranks 0, 1, 2 called all_reduce of (4,) float32, SUM (line 2)",
    ),
}


@pytest.mark.parametrize(("code", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_reported_and_moves_nothing(four: Session, code: str, message: str) -> None:
    error = fails(four, code)
    assert str(error).splitlines()[0] == f"all 4 ranks raised CollectiveError: {message}"
    sums = [x.sum().item() for x in lab.pull("x")]
    assert sums == [len(x) for x in lab.pull("x")]  # ones, as they were
    four.run(IMPORT + "x = torch.ones(4); dist.all_reduce(x); assert x.tolist() == [4.0] * 4")  # nothing is out of step


def test_a_skipped_collective_is_reported(fresh: Session) -> None:
    error = fails(fresh, "if rank != 2: dist.all_reduce(torch.ones(4))")
    late = "all_reduce of (4,) float32, SUM needs every rank, but rank 2 finished the cell without it"
    assert str(error).splitlines()[0] == f"ranks 0, 1, 3 raised LostRank: {late}"
    absent = r"barrier needs every rank, but rank 1 takes no part in this cell(?! without)"
    with pytest.raises(RankFailure, match=absent):
        fresh.run("dist.barrier()", ranks=[0, 2])
    error = fails(fresh, "if rank == 0: dist.recv(torch.ones(1), 1)")
    assert "waits for rank 1, which finished the cell" in str(error)


# ---------------------------------------------------------------------- an emulated link


def test_a_link_is_read_in_the_units_that_people_write() -> None:
    assert network.parse("200 MB/s, 50 us")[:2] == pytest.approx((200e6, 50e-6))
    assert network.parse("10 Gbit/s, 0.5ms")[:2] == pytest.approx((1.25e9, 0.5e-3))
    assert network.parse("1 GB/s, 2 us").seconds(1_000_000, 3) == pytest.approx(1.006e-3)
    for wrong in ("fast", "200 MB/s", "50 us, 200 MB/s", "0 MB/s, 1 us", "-1 MB/s, 1 us", "1 MB, 1 us"):
        with pytest.raises(ValueError, match='write a bandwidth and a latency, such as "200 MB/s, 50 us"'):
            network.parse(wrong)


# A group as ranks with a GPU each have it. What stands for its GPU has a size and no bytes, and is sent nowhere.
TWO_DEVICES = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg
both = dist.new_group(backend="cpu:gloo,cuda:fake")
with FakeTensorMode(): on_gpu = torch.empty(2, device="cuda")
"""


def test_a_link_delays_real_collectives(four: Session, capsys: pytest.CaptureFixture) -> None:
    lab.link("10 MB/s, 10 ms")
    assert (lab.link.current(), capsys.readouterr().out) == ("10 MB/s, 10 ms", "emulated link: 10 MB/s, 10 ms\n")
    code = """
import time
import urllib.error
import urllib.request
def moments(function):
    dist.barrier(); network.sleep_until(max(network._free.values())); begin = time.perf_counter()
    function(); return begin, time.perf_counter()
from zerolab.lab.ranks import network
def chain():  # each rank passes on what it got
    if rank: dist.recv(x, rank - 1)
    if rank < 3: dist.send(x, rank + 1)
def root():
    for other in range(1, 4): dist.recv(x, other) if rank == 0 else rank == other and dist.send(x, 0)
def two():
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(x, async_op=True)]
    for work in works: work.wait()
    return x
def forward(): return model(torch.ones(1, 500))
x = torch.ones(250_000)                                         # 1 MB: 100 ms of bandwidth
model = torch.nn.Linear(500, 500, bias=False); zero = zerolab.Zero3(model)       # 1 MB, too
found = [moments(f) for f in (lambda: dist.all_reduce(x), two, chain, root, forward)]
"""

    def times() -> list[list[float]]:
        """For each rank, from when the first rank began: ranks leave a barrier one after the other."""
        found = lab.pull("found")
        return [[end - min(row[i][0] for row in found) for i, (_, end) in enumerate(mine)] for mine in found]

    each = 3 * (0.010 + 0.025)  # of a ring: N - 1 messages, each of 1/N of the bytes
    four.run(IMPORT + code)
    # A busy machine adds time, and never takes any away: nothing may be early, and all is in time at last.
    for _ in range(10):
        for rank, (reduced, twice, chain, root, gather) in enumerate(times()):
            assert reduced >= 2 * each and twice >= 4 * each and gather >= each
            assert chain >= 0.110 * min(rank + 1, 3) and root >= 0.110 * (3 if rank == 0 else 1)
        if in_time := all(reduced < 2 * each + 0.5 and twice < 4 * each + 0.5 for reduced, twice, *_ in times()):
            break
        four.run(code)
    assert in_time
    four.reset()  # keeps the link
    assert four.run("print(network.on())")[0].text == "True\n"
    four.run(TWO_DEVICES + "dist.all_reduce(torch.ones(2), group=both)")
    barrier = "from zerolab.lab.ranks.guard import Flight\nwork = dist.barrier(both, async_op=True); work.wait()\n"
    assert four.run(barrier + "print(isinstance(work, Flight))")[0].text == "False\n"  # it may have gone by NCCL
    with pytest.raises(RankFailure, match="a link is emulated for what is on the CPU"):
        four.run("dist.all_reduce(on_gpu, group=both)")
    four.reset()
    lab.link(None)
    lab.link()
    assert capsys.readouterr().out.count("no emulated link") == 2
    assert lab.link.current() is None
    four.run(TWO_DEVICES + "dist.all_reduce(on_gpu, group=both)")
    for _ in range(10):
        four.run(IMPORT + code)
        if quick := max(map(max, times())) < 0.4:
            break
    assert quick


# ---------------------------------------------------------------------- what is asked for


def test_the_magic_says_what_it_does_not_understand(four: Session) -> None:
    assert vars(parse("")) == {"ranks": None, "timeout": None, "always": False, "revive": False}
    assert vars(parse("0,2 --always")) == {"ranks": [0, 2], "timeout": None, "always": True, "revive": False}
    assert vars(parse("1-3 --timeout 30 --revive"))["timeout"] == 30.0
    for wrong in ("a", "0,,2", "--wait 3", "--timeout x", "0 2"):
        with pytest.raises(ValueError, match="write %%ranks, %%ranks 0,2 or %%ranks --timeout 30"):
            parse(wrong)
    with pytest.raises(ValueError, match="ranks 0, 4: there are ranks 0 to 3"):
        four.run("1", [0, 4])


def test_start_says_what_it_cannot_do() -> None:
    for ranks in (0, True, "4", 65):
        with pytest.raises(ValueError, match="must be a whole number from 1 to 64"):
            lab.start(ranks)
    with pytest.raises(ValueError, match='must be "auto", "cpu" or "cuda"'):
        lab.start(2, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="torch sees no GPU here"):
            lab.start(2, device="cuda")


def test_copies_of_lessons_never_lose_an_answer(tmp_path: Path) -> None:
    lessons, work = tmp_path / "lessons", tmp_path / "work"
    lessons.mkdir()
    for name in ("00_a.ipynb", "01_b.ipynb"):
        (lessons / name).write_text("old")
    assert copy_lessons(lessons, work) == []
    (work / "00_a.ipynb").write_text("my answer")
    assert copy_lessons(lessons, work) == []
    for name in ("00_a.ipynb", "01_b.ipynb", "02_c.ipynb"):
        (lessons / name).write_text("new")
    for _ in range(2):
        (line,) = copy_lessons(lessons, work)
        assert line.startswith("00_a.ipynb has changed in the course. Your copy was left alone")
    texts = {path.name: path.read_text() for path in sorted(work.glob("*.ipynb"))}
    assert texts == {"00_a.ipynb": "my answer", "00_a.new.ipynb": "new", "01_b.ipynb": "new", "02_c.ipynb": "new"}
    (work / "02_c.ipynb").unlink()
    copy_lessons(lessons, work)
    assert (work / "02_c.ipynb").read_text() == "new"
    assert set(json.loads((work / ".copied.json").read_text())) == {"00_a.ipynb", "01_b.ipynb", "02_c.ipynb"}
    (lessons / "02_c.ipynb").rename(lessons / "03_c.ipynb")  # an untouched copy follows, an answer stays
    (lessons / "00_a.ipynb").rename(lessons / "04_a.ipynb")
    (line,) = copy_lessons(lessons, work)
    assert line.startswith("00_a.ipynb is no longer in the course") and copy_lessons(lessons, work) == []
    texts = {path.name: path.read_text() for path in sorted(work.glob("0?_?.ipynb"))}
    assert texts == {"00_a.ipynb": "my answer"} | dict.fromkeys(("01_b.ipynb", "03_c.ipynb", "04_a.ipynb"), "new")
    remembered = json.loads((work / ".copied.json").read_text())
    outside = tmp_path / "outside.ipynb"
    outside.write_text("new")
    for name in ("../outside.ipynb", str(outside), "my", "", "\n.ipynb"):  # a student may have written them
        remembered[name] = remembered["01_b.ipynb"]
    (work / "my").mkdir()
    (work / ".copied.json").write_text(json.dumps(remembered))
    assert copy_lessons(lessons, work) == [] and outside.exists()
    (work / ".copied.json").write_text("[]")
    assert len(copy_lessons(lessons, work)) == 0
    (lessons / "04_a.ipynb").rename(lessons / "00_a.ipynb")
    (work / ".copied.json").write_text("")  # cut off
    (line,) = copy_lessons(lessons, work)
    assert line.startswith("00_a.ipynb") and (work / "00_a.ipynb").read_text() == "my answer"


# ---------------------------------------------------------------------- in notebooks


class Notebook:
    """A notebook's kernel, as JupyterLab starts it."""

    def __init__(self, folder: Path, first: str = "%load_ext zerolab.lab") -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))
        self.pid = self.manager.provisioner.pid
        self.run(first)

    def run(self, cell: str, person: bool = False) -> list[dict]:
        """What the cell shows: the contents of its messages, with their type as "type". person: might answer."""
        shown: list[dict] = []
        self.client.execute_interactive(
            cell,
            timeout=600,
            allow_stdin=person,
            output_hook=lambda message: shown.append(message["content"] | {"type": message["msg_type"]}),
        )
        return shown

    def text(self, cell: str, **options) -> str:
        """What it prints; of an error what is shown of it."""
        return "".join(
            content.get("text", "") + "\n".join(content.get("traceback", ())) for content in self.run(cell, **options)
        )

    def ranks(self) -> list[int]:
        living = [child for child in psutil.Process(self.pid).children(recursive=True) if not gone(child.pid)]
        return [child.pid for child in living if child.name() == NAME]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Notebook]]:
    """Two notebooks that are both just opened."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = children()
    both = [Notebook(tmp_path), Notebook(tmp_path)]
    yield both
    ranks = [pid for notebook in both if not gone(notebook.pid) for pid in notebook.ranks()]
    for notebook in both:
        notebook.close()
    wait_until(lambda: all(map(gone, ranks)) and children() <= before)


def test_a_notebook_from_its_first_cell_to_its_violent_end(notebooks: list[Notebook], tmp_path: Path) -> None:
    first, second = notebooks
    assert first.text("%%ranks\n1") == "there are no live ranks: lab.start(4) starts four"
    shown = [content for content in first.run("from zerolab import lab\nlab.start(2)") if content["type"] != "status"]
    (told,) = [content["text"] for content in shown if content["type"] != "execute_input"]
    assert (
        told
        == "2 ranks on the CPU, one thread each, talking through gloo: bytes and calls are real, times say little.\n"
    )
    assert first.text("%%ranks\nprint('I am', rank)") == "rank 0: I am 0\nrank 1: I am 1\n"

    shown = first.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([rank])\nplt.show()")
    kinds = [(content["type"], content.get("text") or sorted(content.get("data", ()))) for content in shown]
    picture = ("display_data", ["image/png", "text/plain"])
    assert [kind for kind in kinds if kind[0] in ("stream", "display_data")] == [
        ("stream", "rank 0:\n"),
        picture,
        ("stream", "rank 1:\n"),
        picture,
    ]

    slow = "%%ranks\nimport time\nprint('first')\ntime.sleep(2 + rank)\nprint('last')"
    assert first.text(slow) == "all 2 ranks:\nfirst\nlast\n"
    for _ in range(5):  # a machine that stands still for a second hides what comes meanwhile
        shown = first.run(slow, person=True)
        kinds = [content["type"] for content in shown if content["type"] in ("stream", "clear_output")]
        assert kinds[-2:] == ["clear_output", "stream"]  # what was shown on the way is taken back
        told = [content["text"] for content in shown if content["type"] == "stream"]
        while told[-2].startswith("rank 0: last (done)\nrank 1: last"):  # moments before the end, or none
            del told[-2]
        if told[-2].startswith("rank 0: last"):
            break
    assert told[-2:] == ["rank 0: last (done)\nrank 1: first\n", "all 2 ranks:\nfirst\nlast\n"]

    (error,) = [content for content in first.run("%%ranks 1\n1 / 0") if content["type"] == "error"]
    assert (error["ename"], len(error["traceback"])) == ("RankFailure", 1)
    assert error["traceback"][0].startswith(
        "RankFailure: rank 1 raised ZeroDivisionError: division by zero\n  line 2 of"
    )

    (tmp_path / "here").mkdir()
    when_all_are_here(2, tmp_path / "here", first.manager.interrupt_kernel)
    told = first.text(f"%%ranks\n{here(tmp_path / 'here')}\nwhile True: pass")
    assert "interrupted\nall 2 ranks were interrupted\n  line 3 of the cell\n    while True: pass" in told

    assert f"another notebook (process {first.pid}) has 2 live ranks" in second.text(
        "from zerolab import lab\nlab.start(1)"
    )
    assert len(first.ranks()) == 2
    told = second.text("lab.start(1, stop_others=True)")
    assert told.startswith(f"stopped 2 ranks of another notebook (process {first.pid})\n1 rank on the CPU")
    assert "was killed by SIGKILL (out of memory, or by hand): lab.reset() restarts the dead" in first.text(
        "%%ranks\n1"
    )
    assert "restarted, their variables are gone: all 2 ranks" in first.text("lab.reset()")
    assert first.text("lab.start(2)").count("on the CPU") == 1
    pids = first.ranks() + second.ranks()
    assert len(pids) == 3

    stuck = "%%ranks\nimport re, torch.distributed as dist\nx = torch.ones(1)\n"
    # Rank 0 holds the interpreter's lock: no thread of its own can end it.
    first.client.execute(stuck + "if rank: dist.all_reduce(x)\nelse: re.match('(a+)+b', 'a' * 60)")
    time.sleep(1.0)
    os.kill(first.pid, signal.SIGKILL)
    os.kill(second.pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)))


def test_the_magics_are_known_before_the_first_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `zerolab lab`: before the first cell, and after a restart, a sentence says what to run, without torch."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PATH", write_kernel(tmp_path / "a folder"))
    notebook = Notebook(tmp_path, first="")
    try:
        for restarted in (False, True):
            if restarted:
                notebook.manager.restart_kernel(now=True)
                notebook.client.wait_for_ready(timeout=600)
            for name in ("ranks", "exercise"):
                told = notebook.text(f"%%{name}\n1")
                assert f"%%{name} is not loaded yet: first run the cell that begins with %load_ext zerolab.lab" in told
                assert "Traceback" not in told
            assert (
                notebook.text("import sys; print('torch' in sys.modules, 'zerolab' in sys.modules)") == "False False\n"
            )
            assert notebook.text("%who") == "sys\t \n"
            if not restarted:
                notebook.run("%load_ext zerolab.lab")
                assert notebook.text("%%ranks\n1") == "there are no live ranks: lab.start(4) starts four"
                assert "not loaded" not in notebook.text("%%exercise\n1")
        # A notebook of one's own may begin without that line.
        shown = notebook.run("from zerolab import lab\nlab.start(1)", person=True)  # who watches sees what it waits for
        states = [content["data"]["text/plain"] for content in shown if "display_data" in content["type"]]
        begins = ("starting 1 rank: waiting for", "1 rank started: waiting for", "1 rank on the CPU, one thread")
        assert len(states) == 3 and all(map(str.startswith, states, begins)), states
        assert notebook.text("%%ranks\nprint(rank)") == "rank 0: 0\n"
    finally:
        notebook.close()


def listens(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


@pytest.mark.exhaustive
def test_the_lab_opens_at_the_first_lesson_for_who_has_the_token(tmp_path: Path) -> None:
    for name in ("lessons/01_b.ipynb", "lessons/00_a.ipynb", "solutions/00_a.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    pretend = (
        "import sys; from zerolab.lab import __main__ as main; main.__file__ = sys.argv.pop(1); sys.exit(main.main())"
    )
    where = [str(tmp_path / "zerolab" / "lab" / "__main__.py"), "--work", str(tmp_path / "work"), "--no-browser"]
    server = subprocess.Popen(
        [sys.executable, "-c", pretend, *where, "--port", "18888"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = iter(server.stderr.readline, "")
        found = (
            re.search(r"(http://127\.0\.0\.1:\d+)(/lab/tree/00_a\.ipynb)\?token=(\w{20,})", line) for line in lines
        )
        address, _, token = next(match.groups() for match in found if match)
        wait_until(lambda: listens(address))  # the address is told before
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}/api/contents", timeout=600)
        with urllib.request.urlopen(f"{address}/api/contents?token={token}", timeout=600) as reply:
            assert {item["name"] for item in json.load(reply)["content"]} == {"00_a.ipynb", "01_b.ipynb", "solutions"}
        with urllib.request.urlopen(f"{address}/api/kernelspecs/python3?token={token}", timeout=600) as reply:
            assert "before.py" in json.load(reply)["spec"]["argv"][-1]  # its kernels know the magics
        # where a lesson's link to ../solutions/00_a.ipynb leads
        urllib.request.urlopen(f"{address}/files/solutions/00_a.ipynb?token={token}", timeout=600).close()
    finally:
        server.kill()
        server.communicate(timeout=600)


def test_a_trace_names_no_folders_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _shown(torch.__file__) == "torch/__init__.py"
    assert _shown(session.__file__) == "zerolab/lab/ranks/session.py"
    assert _shown(str(tmp_path / "my" / "ex_05_1.py")) == "my/ex_05_1.py"
