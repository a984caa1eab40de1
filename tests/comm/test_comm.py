"""comm/: right sums, a true record, and agreement between ranks."""

import os
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta

import jobs_common
import pytest
import torch
import torch.distributed as dist
from jobs_common import Caught, all_say, attempt, rank_ordered_mean, worlds

import zerolab
from zerolab import Comm
from zerolab.comm import waiting

CPU = torch.device("cpu")
SIZES = (1, 7, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def comm_of(timeout: float, members: list[int] | None = None) -> Comm:
    """A Comm over a group of its own, so that what breaks in it leaves the next one alone."""
    return Comm(dist.new_group(members, timeout=timedelta(seconds=timeout)), CPU)


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-3, 3, numel).double()
    return values.to(dtype)


# -- the sums -------------------------------------------------------------------------------------------------------


def job_collectives():
    comm = Comm(None, CPU)
    n, rank = comm.world_size, comm.rank
    for dtype in DTYPES:
        for size in SIZES:
            rows = [contribution(r, n * size, dtype) for r in range(n)]
            mean = rank_ordered_mean(rows)
            exact = torch.stack(rows).double().mean(0)
            assert mean.dtype == dtype
            torch.testing.assert_close(mean.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
            mine = slice(rank * size, (rank + 1) * size)

            own = rows[rank].clone()
            out = torch.full((size,), torch.nan, dtype=dtype)
            comm.reduce_scatter(out, own, "u").wait()
            assert torch.equal(out, mean[mine]), ("reduce_scatter", dtype, size)
            assert torch.equal(own, rows[rank]), "reduce_scatter changed its input"

            comm.reduce_scatter(own[mine], own, "u").wait()  # the output lies inside the input
            rest = [i for i in range(n * size) if not mine.start <= i < mine.stop]
            assert torch.equal(own[mine], mean[mine]) and torch.equal(own[rest], rows[rank][rest])

            own = rows[rank].clone()
            comm.all_reduce(own, "u").wait()
            assert torch.equal(own, mean), ("all_reduce", dtype, size)

            gathered = torch.full((n * size,), torch.nan, dtype=dtype)
            comm.all_gather(gathered, rows[rank][mine], "u").wait()
            expected = torch.cat([rows[r][r * size : (r + 1) * size] for r in range(n)])
            assert torch.equal(gathered, expected)
            inside = rows[rank].clone()
            comm.all_gather(inside, inside[mine], "u").wait()
            assert torch.equal(inside, expected)

            dealt = torch.full((n, size), torch.nan, dtype=dtype)
            comm.all_to_all(dealt, rows[rank].view(n, size), "u").wait()
            assert torch.equal(dealt, torch.stack([row.view(n, size)[rank] for row in rows]))

            sent = rows[rank].clone()
            comm.broadcast(sent, "u")
            assert torch.equal(sent, rows[0])

    for value in (
        torch.tensor([rank == 0, True, False]),
        torch.tensor(rank + 5),
        torch.full((2, 3), rank, dtype=torch.uint8),
        torch.zeros(0),
        torch.arange(6.0).view(2, 3).t() + rank,  # not contiguous
        torch.arange(6.0).view(2, 3)[:, ::2] + rank,
    ):
        first = [rank == 0 and value, value]  # our own value, kept apart from the one that arrives
        comm.broadcast(value, "buffer")
        assert rank or torch.equal(value, first[0])
    assert comm.exchange(value.tolist(), "check") == n * [value.tolist()]

    total = torch.tensor(1.0 + rank)
    assert comm.all_reduce_scalar(total, dist.ReduceOp.SUM).item() == n * (n + 1) / 2
    assert comm.all_reduce_scalar(torch.tensor(float(rank)), dist.ReduceOp.MAX).item() == n - 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives_are_exact(ranks, n):
    ranks.run(job_collectives, ranks=n)


def job_bf16_is_rounded_once():
    """256 + 1 + 1 + ... in bfloat16 stays 256 if every partial sum is rounded."""
    comm = Comm(None, CPU)
    own = torch.full((4,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
    comm.all_reduce(own, "u").wait()
    return own.float().tolist()


def test_bf16_is_summed_in_float32(ranks):
    for result in ranks.run(job_bf16_is_rounded_once):
        assert result == [64.75 if result[0] == 64.75 else 65.0] * 4  # 259 / 4 = 64.75, a bfloat16 is 64.5 or 65
        assert result[0] == torch.tensor(259 / 4).bfloat16().item() != 64.0


# -- the record -----------------------------------------------------------------------------------------------------


def job_record():
    comm = Comm(None, CPU)
    n, rank = comm.world_size, comm.rank
    flat = torch.ones(n * 6, dtype=torch.bfloat16)  # 12 bytes a shard
    shard = flat.view(n, -1)[rank]
    comm.phase = "forward"
    comm.all_gather(flat, shard, "a").wait()  # agreed on, so that the one below is predicted
    comm.all_gather(flat, shard, "a").wait()
    with comm.record() as calls:
        comm.all_gather(flat, shard, "a").wait()
        comm.phase = "backward"
        comm.reduce_scatter(shard, flat, "b").wait()
        with comm.record() as inner:
            comm.all_reduce(torch.ones(n * 5), "c").wait()
        comm.broadcast(torch.ones(7), "d")
        comm.all_to_all(torch.zeros(n, 9, dtype=torch.uint8), torch.ones(n, 9, dtype=torch.uint8), "e").wait()
        comm.all_reduce_scalar(torch.tensor(1.0), dist.ReduceOp.SUM)
        comm.exchange("hello", "greeting")
    comm.broadcast(torch.ones(7), "not recorded")
    return [tuple(vars(call).values())[:6] for call in calls], [call.op for call in inner], comm.world_size


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_calls_are_recorded_with_their_bytes(ranks, n):
    results = ranks.run(job_record, ranks=n)
    assert all(result == results[0] for result in results)
    calls, inner, _ = results[0]
    assert inner == ["reduce_scatter", "all_gather"]  # on gloo, what a ring all-reduce is made of
    assert [call[:5] for call in calls if not call[5]] == [
        # op, unit, phase, bytes of all parts together, bytes that one rank sends in a ring
        ("all_gather", "a", "forward", 12 * n, 12 * (n - 1)),
        ("reduce_scatter", "b", "backward", 12 * n, 12 * (n - 1)),
        ("reduce_scatter", "c", "backward", 20 * n, 20 * (n - 1)),
        ("all_gather", "c", "backward", 20 * n, 20 * (n - 1)),
        ("broadcast", "d", "backward", 28, 28 * (n - 1) // n),
        ("all_to_all", "e", "backward", 9 * n, 9 * (n - 1)),
    ]
    control = [call for call in calls if call[5]]
    assert [call[0] for call in control] == ["all_reduce", "all_gather", "all_gather"]
    assert control[0][3:5] == (4, 2 * 4 * (n - 1) // n)
    assert [call[3] for call in control[1:]] == [384 * n] * 2  # its length first; each fits into its frame


def job_pending():
    comm = Comm(None, CPU)
    flat = torch.full((comm.world_size * 3,), float(comm.rank))
    with comm.record() as calls:
        pending = comm.all_reduce(flat, "u")
        steps = [(pending.done, len(calls))]
        while not pending.done:
            pending.advance()
            steps.append((pending.done, len(calls)))
        pending.advance()  # nothing left to do
        pending.wait()
    expected = (comm.world_size - 1) / 2
    assert flat.tolist() == [expected] * flat.numel()

    # Several under way, which finish in a different order than they started in.
    flats = [torch.full((comm.world_size * k,), float(comm.rank + k)) for k in (1, 2, 3)]
    outs = [torch.empty(k) for k in (1, 2, 3)]
    works = [comm.reduce_scatter(o, f, "u") for o, f in zip(outs, flats, strict=True)]
    for work in reversed(works):
        work.wait()
        assert work.done
    assert [o.tolist() for o in outs] == [[expected + k] * k for k in (1, 2, 3)]
    return steps


@pytest.mark.parametrize("n", [1, 3])
def test_pending_goes_step_by_step(ranks, n):
    for steps in ranks.run(job_pending, ranks=n):
        assert steps == [(False, 1), (False, 2), (True, 2)]


def job_ledger(stage):
    zero = zerolab.shard(jobs_common.build(), stage)
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    for step in range(2):
        with zero.comm.record() as calls:  # the calls of the second step are returned
            zero.model(*jobs_common.batch(zero.rank, step)).backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    size = {unit.name: unit.layout.size * 4 for unit in zero.units}
    return [tuple(vars(call).values())[:6] for call in calls], size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ledger_is_the_same_on_every_rank(ranks, stage):
    results = ranks.run(job_ledger, stage, ranks=3)
    assert results[1] == results[0] and results[2] == results[0]
    calls, size = results[0]
    moved = [(call[0], call[1]) for call in calls if not call[5]]
    if stage < 3:
        assert sorted(moved) == sorted((op, unit) for unit in size for op in ("reduce_scatter", "all_gather"))
    assert all(payload == size[unit] for op, unit, _, payload, _, control in calls if not control)


# -- errors ---------------------------------------------------------------------------------------------------------


def job_missing(op, absent):
    """Rank `absent` does not take part."""
    comm = comm_of(2)
    n = comm.world_size
    comm.phase = "backward"
    flat = torch.ones(n * 100_000)
    calls = {
        "reduce-scatter": lambda: comm.reduce_scatter(flat[:100_000], flat, "blocks.1").wait(),
        "all-reduce": lambda: comm.all_reduce(flat, "blocks.1").wait(),
        "gather": lambda: comm.all_gather(flat, flat[:100_000].clone(), "blocks.1").wait(),
        "broadcast": lambda: comm.broadcast(flat, "blocks.1"),
    }
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == absent:  # and alive until the others have waited long enough
        store.wait([f"caught/{rank}" for rank in range(n) if rank != absent])
        return None
    caught = attempt(calls[op])
    store.set(f"caught/{comm.rank}", "")
    return caught


@pytest.mark.parametrize("op", worlds("reduce-scatter", others=("all-reduce", "gather", "broadcast")))
def test_a_missing_rank_is_an_error(ranks, op):
    results = ranks.run(job_missing, op, 0, ranks=3)
    for rank, caught in enumerate(results[1:], 1):
        assert caught is not None and caught.kind == "CommError"
        for word in (f"rank {rank} of 3", op, "blocks.1", "backward"):
            assert word in caught.text, caught.text


def test_without_a_process_group_there_is_no_comm():
    assert not dist.is_initialized()
    with pytest.raises(zerolab.CommError, match=r"zerolab\.init\(\)"):
        Comm(None, CPU)


def job_group():
    world = Comm(None, CPU)
    group = dist.new_group([1, 3])
    if world.rank not in (1, 3):
        return attempt(Comm, group, CPU)
    comm = Comm(group, CPU)
    assert (comm.rank, comm.world_size, comm.first) == ([1, 3].index(world.rank), 2, 1)
    value = torch.tensor([float(world.rank)] * 4)
    comm.all_reduce(value, "u").wait()
    assert value.tolist() == [2.0] * 4
    value.fill_(world.rank)
    comm.broadcast(value, "u")
    assert value.tolist() == [1.0] * 4
    assert comm.exchange(world.rank, "ranks") == [1, 3]
    return None


def test_a_group_of_some_ranks(ranks):
    results = ranks.run(job_group)
    for rank in (0, 2):
        assert results[rank].kind == "CommError"
        assert f"rank {rank} is not a member of the group" in results[rank].text
    assert results[1] is results[3] is None


# -- agreement ------------------------------------------------------------------------------------------------------

PASS = (("a", "forward"), ("b", "forward"), ("c", "forward"), ("c", "backward"), ("b", "backward"))
SKIPS_B = (("a", "forward"), ("c", "forward"), ("c", "backward"), ("b", "backward"))
SIZE_OF = {"a": 3, "b": 5, "c": 5, "d": 8}  # b and c have the same shape, so only agreement tells them apart


def gathers(comm: Comm, order) -> None:
    """Gather in this order, and check that every tensor is the right one."""
    for unit, phase in order:
        comm.phase = phase
        size, number = SIZE_OF[unit], float(ord(unit))
        out = torch.empty(comm.world_size * size)
        comm.all_gather(out, torch.full((size,), number + 1000 * comm.rank), unit).wait()
        expected = torch.arange(comm.world_size).mul(1000).add(number).repeat_interleave(size)
        assert torch.equal(out, expected), f"WRONG TENSOR on rank {comm.rank} for {unit}: {out}"


def job_orders(passes):
    """Every rank's passes; the last may fail."""
    comm = comm_of(600)
    *before, last = passes[comm.rank]
    for order in before:
        gathers(comm, order)
    with comm.record() as calls:
        caught = attempt(gathers, comm, last)
    return caught, sum(call.control for call in calls), len(calls)


def run_orders(ranks, passes) -> tuple[list[Caught | None], list[int]]:
    results = ranks.run(job_orders, passes, ranks=len(passes))
    return [result[0] for result in results], [result[1] for result in results]


@pytest.mark.parametrize(("n", "other"), [(2, 1), (4, 0), (4, 2)])
def test_another_order_in_the_first_pass(ranks, n, other):
    caught, _ = run_orders(ranks, [[SKIPS_B if rank == other else PASS] for rank in range(n)])
    all_say(caught, "CommError")
    for rank, error in enumerate(caught):
        mine, theirs = ("c", "b") if rank == other else ("b", "c")
        against = (1 if other == 0 else 0) if rank == other else other
        assert f"rank {rank}, announcement of a gather of {mine} (forward)" in error.text
        assert f"rank {against} is in announcement of a gather of {theirs} instead" in error.text
        assert "into one unit" in error.text  # what to do about it


def job_gives_up():
    comm = comm_of(60)
    gathers(comm, PASS)
    gathers(comm, PASS)
    return attempt(gathers, comm, PASS if comm.rank else SKIPS_B)


def test_ranks_that_gave_up_are_not_asked_to_leave_their_groups(ranks):
    """Each waits for the other in another collective, so their groups would end only after the timeout."""
    before = ranks.run(os.getpid, ranks=2)
    all_say(ranks.run(job_gives_up, ranks=2), "CommError")
    assert set(before).isdisjoint(ranks.run(os.getpid, ranks=2))


@pytest.mark.parametrize("place", worlds((2, 0), (4, 3), others=[(2, 1), (3, 1)]), ids=str)
def test_one_rank_leaves_the_agreed_order(ranks, place):
    n, other = place
    caught, _ = run_orders(ranks, [[PASS, PASS, SKIPS_B if rank == other else PASS] for rank in range(n)])
    all_say(caught, "CommError")
    for rank, error in enumerate(caught):
        assert f"rank {rank}" in error.text
        assert "into one unit" in error.text
        assert ("gather of c" if rank == other else "all-gather of b") in error.text
        if rank != other:
            assert f"rank {other} waits in announcement of a gather of c (forward)" in error.text


def test_two_ranks_leave_the_agreed_order_in_two_ways(ranks):
    strange = (("a", "forward"), ("d", "forward"))
    caught, _ = run_orders(ranks, [[PASS, PASS, last] for last in (PASS, SKIPS_B, strange)])
    all_say(caught, "CommError")


def test_all_ranks_may_change_the_order_together(ranks):
    caught, control = run_orders(ranks, [[PASS, PASS, SKIPS_B]] * 3)
    assert caught == [None] * 3 and all(control)


def test_orders_may_alternate(ranks):
    caught, _ = run_orders(ranks, [[PASS, SKIPS_B, PASS, SKIPS_B, SKIPS_B, PASS]] * 3)
    assert caught == [None] * 3


def test_the_usual_order_is_not_announced(ranks):
    caught, control = run_orders(ranks, [[PASS, PASS, PASS]] * 3)
    assert caught == [None] * 3 and control == [0] * 3


def job_slow_and_strange(deviates):
    """Rank 1 comes three seconds late, with the right gather or a different one."""
    comm = comm_of(600)
    for _ in range(2):
        gathers(comm, PASS)
    gathers(comm, PASS[:1])
    if comm.rank == 1:
        time.sleep(3)
    return attempt(gathers, comm, SKIPS_B[1:] if deviates == comm.rank else PASS[1:])


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(ranks):
    assert ranks.run(job_slow_and_strange, -1, ranks=2) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("deviates", worlds(1, others=[0]))
def test_a_slow_rank_and_another_order(ranks, deviates):
    all_say(ranks.run(job_slow_and_strange, deviates, ranks=2), "CommError")


def job_different_messages(unequal):
    """The last rank is in another message, longer or as long, or in the same message of another Comm."""
    group = dist.new_group(timeout=timedelta(seconds=600))
    comms = [Comm(group, CPU), Comm(group, CPU)]
    odd = comms[0].rank == comms[0].world_size - 1
    what, size = ("others", {"longer": 1000, "as long": 300}[unequal]) if odd and unequal != "Comm" else ("usual", 300)
    return attempt(comms[odd and unequal == "Comm"].exchange_bytes, bytes(size), what)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("unequal", "word"), [("longer", "others"), ("as long", "others"), ("Comm", "another model")])
def test_different_messages_meet_with_an_error(ranks, n, unequal, word):
    """gloo aborts a process that gets more bytes than it expects."""
    caught = ranks.run(job_different_messages, unequal, ranks=n)
    all_say(caught[:-1], "CommError", f"rank {n - 1} is in ", word)
    all_say(caught[-1:], "CommError", "rank 0 is in usual")


def job_waits_and_a_slow_rank():
    """Notes of waits that are over: rank 1 has waited, and now comes late where the others wait."""
    comm = comm_of(600)
    value = torch.ones(comm.world_size)
    for slow in range(comm.world_size):
        if comm.rank == slow:
            time.sleep(2.5)
        comm.all_reduce(value, f"u{slow}").wait()
        comm.exchange(None, "test")


@pytest.mark.exhaustive
def test_waits_that_are_over_do_not_count(ranks):
    ranks.run(job_waits_and_a_slow_rank, ranks=3)


def job_many_turns():
    turn, waiting.POLL = waiting.POLL, timedelta(milliseconds=1)
    try:
        comm = Comm(None, CPU)
        value = torch.ones(300_000)
        for _ in range(200):
            comm.all_reduce(value, "u").wait()
    finally:
        waiting.POLL = turn


def test_what_ends_together_with_a_turn_of_the_wait_has_not_failed(ranks):
    ranks.run(job_many_turns, ranks=2)


def job_unequal_number_of_comms():
    """Ranks 0 and 1 also have a group of their own, so they have made more Comms than the others."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        Comm(pair, CPU)
    comm = comm_of(600)
    for _ in range(2):
        gathers(comm, PASS)
    return attempt(gathers, comm, SKIPS_B if comm.rank == 2 else PASS)


def test_agreement_with_an_unequal_number_of_comms(ranks):
    all_say(ranks.run(job_unequal_number_of_comms, ranks=3), "CommError")


def job_reduces_where_others_gather():
    """Rank 0 does not need unit b, so it goes to the reduction while rank 1 does what was agreed."""
    comm = comm_of(6)
    for _ in range(2):
        gathers(comm, PASS)
    if comm.rank == 0:
        out = torch.empty(5)
        caught = attempt(lambda: comm.reduce_scatter(out, torch.full((10,), 7.0), "b").wait())
        return caught or Caught("nothing", f"reduced {out}", 0)
    gathers(comm, PASS[:1]) if comm.rank == 5 else None
    comm.phase = "forward"
    out = torch.empty(6)
    caught = attempt(lambda: comm.all_gather(out, torch.full((3,), 9.0), "a").wait())
    return caught or Caught("nothing", f"gathered {out}", 0)


@pytest.mark.slow
def test_a_gather_does_not_meet_a_reduction(ranks):
    all_say(ranks.run(job_reduces_where_others_gather, ranks=2), "CommError")


def job_wrong_sizes():
    comm = comm_of(6)
    wrong = torch.ones(5), torch.ones(6)
    return [attempt(comm.reduce_scatter, *wrong, "b"), attempt(comm.all_gather, *reversed(wrong), "b")]


def test_sizes_that_do_not_fit_are_refused_before_anything_moves(ranks):
    for rank, both in enumerate(ranks.run(job_wrong_sizes, ranks=2)):
        for error in both:
            assert error.kind == "ValueError", error
            assert error.text.startswith(f"rank {rank}: 5 elements are not the shard of 6 on 2 ranks"), error


def job_two_dtypes():
    comm = comm_of(6)
    full, shard = torch.ones(6, dtype=torch.bfloat16), torch.full((3,), 1.0 + comm.rank)
    refused = attempt(comm.reduce_scatter, shard, full, "b")
    comm.all_gather(full, shard, "b").wait()
    return refused, full.tolist()


def test_two_dtypes(ranks):
    """A gather casts, on every backend alike (test_strict.py); a reduction refuses, as NCCL's does."""
    for rank, (error, full) in enumerate(ranks.run(job_two_dtypes, ranks=2)):
        assert error.kind == "ValueError", error
        refused = f"rank {rank}: a reduce-scatter does not cast torch.bfloat16 to torch.float32"
        assert error.text.startswith(refused), error
        assert full == [1.0] * 3 + [2.0] * 3


def job_exchange():
    comm = Comm(None, CPU)
    messages = [{"rank": 0}, "Ψ" * 1000, None, [1.5, [True, ""], "x" * 70_000]]
    everyone = comm.exchange(messages[comm.rank], "test")
    finish = comm.start_exchange(bytes([comm.rank, 7]), "test")
    both = comm.exchange_bytes(bytes([comm.rank]), "test"), finish()
    return everyone == messages[: comm.world_size], *both


@pytest.mark.parametrize("n", [1, 4])
def test_exchange_of_unequal_messages(ranks, n):
    for result in ranks.run(job_exchange, ranks=n):
        assert result == (True, [bytes([r]) for r in range(n)], [bytes([r, 7]) for r in range(n)])


# -- versions of torch ----------------------------------------------------------------------------------------------


def job_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = Comm(None, CPU)
        flat = torch.ones(comm.world_size * 4)
        comm.all_reduce(flat, "u").wait()
        comm.all_gather(flat, flat[:4].clone(), "u").wait()
        comm.broadcast(flat, "u")
        comm.exchange("hello", "test")
        for stage in range(4):
            zero = zerolab.shard(jobs_common.build(), stage)
            optimizer = torch.optim.AdamW(zero.model.parameters())
            for step in range(2):
                zero.model(*jobs_common.batch(zero.rank, step)).backward()
                optimizer.step()
            zero.full_state_dict()


def test_no_warnings(ranks):
    ranks.run(job_no_warnings, ranks=2)


OLDER_TORCH = """
import torch.distributed as dist
for name in ("all_gather_single", "reduce_scatter_single"):
    if hasattr(dist, name):
        delattr(dist, name)
import zerolab.comm.native as native
assert native.all_gather is dist.all_gather_into_tensor
assert native.reduce_scatter is dist.reduce_scatter_tensor
"""

NEWER_TORCH = """
import torch.distributed as dist
import zerolab.comm.native as native
assert native.all_gather is getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
assert native.reduce_scatter is getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""

FAKE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
import zerolab, jobs_common
for stage in range(4):
    zero = zerolab.shard(jobs_common.build(), stage)
    optimizer = torch.optim.AdamW(zero.model.parameters())
    for step in range(2):
        with zero.comm.record() as calls:
            zero.model(*jobs_common.batch(0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    size = {unit.name: unit.layout.size for unit in zero.units}
    psi = sum(size.values())
    elements = sum(call.sent for call in calls if not call.control) / 4
    assert elements == (2 * psi if stage < 3 else 3 * psi - size["root"]) * 63 / 64, (stage, elements, psi)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", worlds(FAKE, others=[OLDER_TORCH, NEWER_TORCH]), ids=["fake", "older", "newer"])
def test_in_a_process_of_its_own(script):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr


def late_to_the_start() -> str:
    """Rank 0 waits for longer than a turn before another rank makes its Comm."""
    raised: list[str] = []
    threading.excepthook = lambda args: raised.append(repr(args.exc_value))
    if dist.get_rank() == 1:
        time.sleep(3)
    Comm(None, torch.device("cpu"))
    threading.excepthook = threading.__excepthook__
    return "".join(raised)


@pytest.mark.slow
def test_a_rank_that_waits_for_the_first_message_can_say_so(ranks):
    assert ranks.run(late_to_the_start, ranks=2) == ["", ""]
