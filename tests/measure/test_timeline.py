"""The instruments on real ranks: ledger, memory timeline and trace, against the allocator and the formulas."""

from __future__ import annotations

import io
import itertools
import threading
import time
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from jobs_common import attempt, worlds

import zerolab
from zerolab import Precision
from zerolab.lab import plots
from zerolab.measure import KINDS, allocations, holdings, ledger, model_states, moved_bytes, peak, timeline, trace
from zerolab.measure.spans import Span, Trace, intersection, union
from zerolab.tasks.models import GPT, Block

BF16 = Precision(torch.bfloat16)


def build(stage, precision=None, **sizes):
    torch.manual_seed(0)
    zero = (zerolab.STAGES[stage] if isinstance(stage, int) else stage)(
        GPT(**sizes), units=[Block], precision=precision
    )
    return zero, torch.optim.AdamW(zero.model.parameters())


def train(zero, optimizer, batch=4):
    x = torch.randint(0, 256, (batch, zero.model.context), generator=torch.Generator().manual_seed(zero.rank))
    zero.model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- the ledger -----------------------------------------------------------------------------------------------------


def kept_books(stage):
    zero, optimizer = build(stage, layers=2, width=64, context=16)
    for _ in range(3):
        train(zero, optimizer)
    with ledger(zero) as book:
        for _ in range(2):
            train(zero, optimizer)
    psi = sum(unit.layout.size for unit in zero.units)
    return book, psi, sum(unit.layout.size for unit in zero.root)


@pytest.mark.parametrize("n", worlds(3, others=(1,)))
@pytest.mark.slow
def test_the_ledger_adds_up(ranks, n):
    from rich.console import Console

    for stage in range(4):
        for book, psi, root in ranks.run(kept_books, stage, ranks=n):
            assert book.moved == 2 * moved_bytes(stage, n, psi, root)
            steps = book.totals("step")
            assert [total.sent for total in steps.values()] == 2 * [moved_bytes(stage, n, psi, root)]
            for key in ("op", "unit", "phase"):
                assert sum(total.sent for total in book.totals(key).values()) == book.moved
            assert sum(total.calls for total in book.totals("op", control=True).values()) == len(book.calls)
            assert sorted(book.totals("unit")) == ["blocks.0", "blocks.1", "root"]
            issued = [call.start for call in book.calls]
            assert issued == sorted(issued) and all(call.end > call.start for call in book.calls)
            assert all(call.waits and 0 <= call.waited < 60 for call in book.calls)
            console = Console(width=80, record=True, file=io.StringIO())
            console.print(book.table())
            console.print(book.table("op"))
            printed = console.export_text()
            assert "reduce_scatter" in printed and "blocks.1" in printed and "…" not in printed
            with pytest.raises(ValueError, match="'colour' is none of op, unit"):
                book.totals("colour")


# -- the timeline ---------------------------------------------------------------------------------------------------


def slowed(stage):
    """How many times the processor's time a step takes with a timeline: the median over pairs, with and without."""
    zero, optimizer = build(stage)
    train(zero, optimizer)
    ratios = []
    for _ in range(5):
        begin = time.process_time()
        train(zero, optimizer)
        middle = time.process_time()
        with timeline(zero, optimizer):
            train(zero, optimizer)
        ratios.append((time.process_time() - middle) / (middle - begin))
    return median(ratios)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_what_a_timeline_costs(ranks, stage):
    """1.1 to 1.6 times is documented. By the processor's time: what else the machine does takes no part in it."""
    (ratio,) = ranks.run(slowed, stage, ranks=1)
    print(f"stage {stage}: a step takes {ratio:.2f} times as long with a timeline")
    assert 0.5 < ratio < 3


def peaks(stage, precision):
    """The timeline of one step, and the allocator's peak of the next."""
    zero, optimizer = build(stage, precision, layers=3, width=128)
    for _ in range(3):
        train(zero, optimizer)
    with timeline(zero, optimizer) as line:
        train(zero, optimizer)
    with peak(zero, optimizer) as allocated:
        train(zero, optimizer)
    return line, allocated.bytes, model_states(zero, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", worlds(1, others=(4,)))
def test_the_timeline_agrees_with_the_allocator(ranks, n, precision):
    for stage in range(4):
        for line, allocated, states in ranks.run(peaks, stage, precision, ranks=n):
            assert abs(line.peak - allocated) <= 0.05 * allocated, f"stage {stage}"
            check_states(line, states, stage)


def check_states(line, states, stage):
    end = line.by_kind(len(line.events))
    assert end["parameters"] + (end["gathered parameters"] if stage < 3 else 0) == states["parameters"]
    assert end["optimizer"] == states["optimizer"]
    assert end["gradients"] == end["communication"] == 0, "zero_grad() has freed them"
    at_peak = line.by_kind()
    assert sum(at_peak.values()) == line.peak == max(line.curve())
    assert line.curve() == [sum(together) for together in zip(*(line.curve(kind) for kind in KINDS), strict=True)]
    assert max(line.curve("activations")) > 0
    assert line.world_size == 1 or max(line.curve("communication")) > 100_000
    assert (max(line.curve("gathered parameters")) > 0) == (stage == 3)
    phases = [event.phase for event in line.events[line.before :]]
    assert [phase for phase in dict.fromkeys(phases)] == ["forward", "backward", "step"] or phases[0] == "step"
    # Every buffer names the line that made it, in the model, the engine or the loop.
    made = [buffer for buffer in line.buffers if buffer.phase in ("forward", "backward") and buffer.operation]
    assert made and all(buffer.site[0].endswith(".py") and buffer.site[1] > 0 for buffer in made)
    assert any(buffer.site[0].endswith("models.py") and buffer.kind == "activations" for buffer in made)
    units = {buffer.unit for buffer in made if buffer.kind == "activations"}
    assert {"blocks.0", "blocks.1", "blocks.2"} <= units


def who_notes_memory(stage):
    """The threads that wrote an event in which memory came or went."""
    writers, plain = set(), allocations._Recorder._resized

    def resized(recorder, number, nbytes):
        if recorder._sizes[number] != nbytes:
            writers.add(threading.current_thread().name)
        plain(recorder, number, nbytes)

    zero, optimizer = build(stage, layers=2, width=64, context=16)
    train(zero, optimizer)
    with patch.object(allocations._Recorder, "_resized", resized), timeline(zero, optimizer):
        train(zero, optimizer)
    return writers


@pytest.mark.parametrize("stage", [0, 3])
def test_threads_of_gloos_write_no_event(ranks, stage):
    """They inherit the mode and allocate when they like: the same step would not always give the same timeline."""
    assert ranks.run(who_notes_memory, stage, ranks=2) == [{"MainThread"}] * 2


def held_beside_the_states(own):
    """After an operation on 4,000 bytes that torch has allocated, or that a bytearray has."""
    tensor = torch.zeros(1000) if own else torch.frombuffer(bytearray(4000), dtype=torch.float32)
    zero, optimizer = build(1, layers=1, width=64, context=16)
    with timeline(zero, optimizer) as line:
        total = tensor.sum()
    assert total == 0
    return line.by_kind(len(line.events))["other"]


def test_memory_that_torch_did_not_allocate_is_not_counted(ranks):
    (own,), (others,) = (ranks.run(held_beside_the_states, own, ranks=1) for own in (True, False))
    assert (own, others) == (4004, 4)


def full_gradients_in_backward(stage):
    zero, optimizer = build(stage, layers=6, width=64, context=16)
    for _ in range(2):
        train(zero, optimizer)
    with timeline(zero, optimizer) as line:
        train(zero, optimizer)
    return max(line.curve("gradients")), max(line.curve("gathered parameters")), [u.layout.size for u in zero.units]


def test_stages_differ_where_they_should(ranks):
    """Stage 2 never holds as many gradients as stage 1; stage 3 never gathers more than two units and the root."""
    most = {stage: ranks.run(full_gradients_in_backward, stage, ranks=2)[0] for stage in (1, 2, 3)}
    sizes = most[1][2]
    assert most[1][0] >= 4 * sum(sizes)
    root, block = sizes[0], sizes[1]
    slices = sum(sizes) / 2
    assert most[2][0] <= 4 * (root + 2.5 * block + slices) < 4 * sum(sizes)
    assert most[3][0] <= 4 * (root + 2.5 * block + slices)
    assert 4 * block < most[3][1] <= 4 * (root + 2 * block)


def misuse():
    zero, optimizer = build(1, layers=1, width=32, context=8)
    said = []

    def attempt(function):
        try:
            function()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    def nested():
        with timeline(zero, optimizer), timeline(zero, optimizer):
            pass

    def open_still():
        with timeline(zero, optimizer) as line:
            line.curve()

    def left_open():
        timeline(zero, optimizer).__enter__()

    def broken_step():
        with timeline(zero, optimizer):
            zero.model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))

    plain = torch.UntypedStorage.resize_
    attempt(nested)
    attempt(open_still)
    attempt(broken_step)
    with timeline(zero, optimizer) as line:  # the failed ones have cleaned up
        train(zero, optimizer)
    attempt(lambda: line.curve("colours"))
    attempt(lambda: line.alive(10**9))
    assert torch.UntypedStorage.resize_ is plain
    assert not any(name in vars(zero) for name in ("pre_forward", "post_backward"))
    return said


def test_memory_that_a_thread_of_autograds_asks_for_has_the_line_that_waits_for_it():
    """On a GPU, backward runs in a thread without a line of the user's."""
    found: list[tuple] = []
    thread = threading.Thread(target=found.extend, args=(itertools.starmap(allocations._caller, [()]),))
    thread.start()
    thread.join()
    ((kind, unit, (file, _, function)),) = found
    assert (kind, unit, file) == (None, "", __file__)
    assert function == "test_memory_that_a_thread_of_autograds_asks_for_has_the_line_that_waits_for_it"


def test_misuse_of_the_timeline_is_named(ranks):
    for said in ranks.run(misuse, ranks=2):
        expected = ["a timeline is open already", "still open", "ValueError", "'colours' is none of", "moment"]
        assert len(said) == len(expected)
        assert all(word in message for word, message in zip(expected, said, strict=True)), said


# -- the trace ------------------------------------------------------------------------------------------------------


def with_two_optimizers(stage):
    """What each instrument sees of a model that two optimizers train, and what it says of something else."""
    zero, _ = build(stage, layers=2, width=64, context=16)
    params = [*zero.model.parameters()]
    both = [torch.optim.SGD(params[::2], momentum=0.9), torch.optim.AdamW(params[1::2])]
    steps = SimpleNamespace(step=lambda: [one.step() for one in both], zero_grad=zero.model.zero_grad)
    train(zero, steps)
    with trace(zero, both) as record, timeline(zero, iter(both)) as line:
        train(zero, steps)
    train(zero, SimpleNamespace(step=lambda: None, zero_grad=lambda: None))
    held = [holdings(zero, one).share("optimizer") for one in (both, *both)]
    refused = [attempt(measure, zero, None) for measure in (model_states, holdings)]
    refused += [attempt(lambda given=given: trace(zero, given).__enter__()) for given in (None, [None], zero)]
    phases = [span.phase for span in record.spans]
    return phases.count("step"), line.by_kind()["optimizer"], model_states(zero, both)["optimizer"], held, refused


def test_a_model_that_two_optimizers_train(ranks):
    for steps, bytes_seen, states, (both, one, other), refused in ranks.run(with_two_optimizers, 2, ranks=2):
        assert steps == 2 and bytes_seen == states
        assert both == pytest.approx(one + other) and min(one, other) > 0
        for said, kind in zip(refused, ["NoneType"] * 4 + ["Zero2"], strict=True):
            assert said.kind == "TypeError" and said.text.endswith(f"and no {kind}"), said


class Impatient(zerolab.Zero2):
    """Waits for every reduction as soon as it has begun, and gathers nothing ahead of time."""

    prefetch = overlap = False


def traced(stage):
    zero, optimizer = build(stage, layers=4, width=128)
    computed: list[float] = []  # when the backward of a block had its first gradients
    for block in zero.model.blocks:
        block.mlp.register_full_backward_hook(lambda *_: computed.append(time.perf_counter()))
    for _ in range(3):
        train(zero, optimizer, batch=8)
    records = []
    for _ in range(4):
        computed.clear()
        with trace(zero, optimizer) as record:
            train(zero, optimizer, batch=8)
        records.append((record, waited_for_at_once(record, computed)))
    return records


def waited_for_at_once(record, computed):
    """Of each reduction before the last block's backward: does this rank wait for it before it computes again?"""
    reductions = [call for call in record.calls if call.op == "reduce_scatter" and call.start < computed[-1]]
    following = [min(moment for moment in computed if moment > call.start) for call in reductions]
    return [any(begin < by for begin, _ in call.waits) for call, by in zip(reductions, following, strict=True)]


@pytest.mark.slow
def test_reductions_run_while_backward_computes(ranks):
    for records in ranks.run(traced, 2, ranks=4):
        for record, at_once in records:
            assert 0 < record.overlap <= 1
            assert at_once == [False] * 3
        record, _ = records[0]
        names = {(span.phase, span.unit) for span in record.spans}
        blocks = {(phase, f"blocks.{i}") for phase in ("forward", "backward") for i in range(4)}
        assert names >= blocks | {("forward", "root"), ("step", "")}
        ordered = [time for span in record.spans for time in (span.start, span.end)]
        assert ordered == sorted(ordered)


def forward_of_a_stage(stage, prefetch):
    zero, optimizer = build(stage, layers=3, width=64, context=16)
    zero.prefetch = prefetch
    for _ in range(2):
        train(zero, optimizer)
    with trace(zero, optimizer) as record:
        train(zero, optimizer)
    gathers = {call.unit: call.start for call in record.calls if call.op == "all_gather" and not call.control}
    forward = {span.unit: span.end for span in record.spans if span.phase == "forward"}
    state = [value for value in zero.full_state_dict().values()]
    return list(gathers), [gathers[f"blocks.{k + 1}"] < forward[f"blocks.{k}"] for k in range(2)], state


@pytest.mark.parametrize("stage", [1, 2])
def test_the_next_unit_is_gathered_while_one_computes(ranks, stage):
    ahead, when_needed = (ranks.run(forward_of_a_stage, stage, prefetch, ranks=2) for prefetch in (True, False))
    for (order, early, state), (order_2, early_2, state_2) in zip(ahead, when_needed, strict=True):
        assert order == order_2 == ["root", "blocks.0", "blocks.1", "blocks.2"]
        assert early == [True, True] and early_2 == [False, False]
        assert all(torch.equal(one, other) for one, other in zip(state, state_2, strict=True))


@pytest.mark.slow
def test_the_overlap_score_can_be_bad(ranks):
    for records in ranks.run(traced, Impatient, ranks=4):
        assert all(at_once == [True] * 3 for _, at_once in records)
        assert min(record.overlap for record, _ in records) < 1


def calls_and_numbers(stage, overlap):
    zero, optimizer = build(stage, layers=3, width=64, context=16)
    zero.overlap = overlap
    for _ in range(2):
        train(zero, optimizer)
    with zero.comm.record() as calls:
        train(zero, optimizer)
    return [(call.op, call.unit, call.phase) for call in calls], zero.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_overlap_the_calls_and_the_numbers_are_the_same(ranks, stage):
    results = [ranks.run(calls_and_numbers, stage, overlap, ranks=3) for overlap in (True, False)]
    for (calls, state), (calls_2, state_2) in zip(*results, strict=True):
        assert sorted(calls) == sorted(calls_2)
        assert all(torch.equal(state[name], state_2[name]) for name in state | state_2)


def test_a_trace_without_the_devices_times():
    """As on NCCL: no score is made up, and the picture says so."""
    call = zerolab.Call("all_gather", "u", "forward", 8, 4, start=1.0)
    record = Trace(0, 2, [Span("forward", "u", 0, 4)], [call])
    assert record.overlap is None
    figure, sentence = plots.gantt(record)
    assert "only the device knows" in sentence
    figure.clear()


def test_intervals_by_hand():
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 4)], [(1, 3.5)]) == [(1, 2), (3, 3.5)]
    call = zerolab.Call("all_gather", "u", "forward", 8, 4, start=0.0, end=4.0, waits=[(1.0, 2.0)])
    control = zerolab.Call("all_gather", "", "forward", 8, 4, control=True, start=0.0, end=9.0, waits=[(4.0, 9.0)])
    assert Trace(0, 2, [Span("forward", "u", 0, 4)], [call, control]).overlap == 0.75
    assert Trace(0, 1).overlap == 1.0
