"""The predicted step: in the order of real ranks on an emulated link, with the calls of a simulated cluster."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest
import torch
from jobs_common import worlds
from test_timeline import build, train

from zerolab.lab import plots
from zerolab.lab.ranks.network import linked, parse
from zerolab.measure import Phase, knee, moved_bytes, phases_of, predicted_step, simulate, trace
from zerolab.measure.overlap import WAITS, order
from zerolab.measure.planning import PRECISIONS
from zerolab.measure.spans import length
from zerolab.tasks.models import GPT, Block

VERBS = {"all_gather": "gather", "reduce_scatter": "reduce"}


def really(stage, blocks, prefetch):
    """What a real rank does in its second step, by the moment at which it does it: (verb, unit) as in `order`."""
    zero, optimizer = build(stage, layers=blocks, width=32, context=8)
    zero.prefetch = prefetch
    numbers = {"root": 0} | {f"blocks.{k}": k + 1 for k in range(blocks)}
    moments = []

    def note(unit, *_):
        moments.append((time.perf_counter(), zero.comm.phase, ("compute", unit)))

    for unit, block in [*enumerate(zero.model.blocks, 1), (0, zero.model)]:
        first, last = (block.norm1, block.mlp.down) if unit else (block.head, block.head)
        first.register_forward_pre_hook(partial(note, unit))
        last.register_full_backward_pre_hook(partial(note, unit))
    train(zero, optimizer)  # stage 3 learns what comes next
    moments.clear()
    with linked("20 MB/s, 50 us"), trace(zero, optimizer) as record:
        train(zero, optimizer)
    for call in record.calls:
        if not call.control and not (stage == 0 and call.op == "all_gather"):  # the second half of an all-reduce
            verb, unit = VERBS[call.op], numbers[call.unit]
            moments.append((call.start, call.phase, (verb, unit)))
            moments += [(begin, call.phase, (WAITS[verb], unit)) for begin, _ in call.waits]
    return {phase: [what for _, of, what in sorted(moments) if of == phase] for phase in ("forward", "backward")}


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_it_is_in_the_order_of_real_ranks(ranks, stage):
    for blocks, prefetch in [(4, True), (4, False), (1, True)]:
        for done in ranks.run(really, stage, blocks, prefetch, ranks=2):
            assert done == order(stage, blocks, prefetch), (blocks, prefetch)


def small():
    return GPT(layers=3, width=128)


def tokens():
    batch = torch.zeros(4, 64, dtype=torch.long)
    return batch, batch


@pytest.mark.slow
@pytest.mark.parametrize("stage", worlds(1, 3, others=(0, 2)))
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
def test_it_makes_the_calls_of_a_simulated_rank(stage, precision):
    fake = simulate(small, stage, 64, PRECISIONS[precision], inputs=tokens, units=[Block])
    real = [call for call in fake.ledger.calls if not call.control]
    itemsize = 2 if precision == "bf16" else 4
    sizes = {call.unit: call.payload // itemsize for call in real}  # as they are padded
    units = {name: (sizes[name], 1.0) for name in ["root", *(f"blocks.{k}" for k in range(3))]}
    calls = predicted_step(stage, units, 64, 1e9, precision=PRECISIONS[precision]).calls
    assert [(c.op, c.unit, c.phase, c.payload, c.sent) for c in calls] == [
        (c.op, c.unit, c.phase, c.payload, c.sent) for c in real
    ]
    psi, root = sum(sizes.values()), sizes["root"]
    assert sum(call.sent for call in calls) == moved_bytes(stage, 64, psi, root, PRECISIONS[precision])


UNITS = {"root": (1_000, 1.0), "a": (4_000, 2.0), "b": (4_000, 2.0)}


def test_every_second_of_a_step():
    """4 ranks, fp32: a block's gather and its reduction take 2 s, the root's half a second, or are all in vain."""
    step = predicted_step(3, UNITS, ranks=4, bandwidth=6_000)
    spans = [(span.phase, span.unit, span.start, span.end) for span in step.spans]
    assert spans == [
        ("forward", "a", 2.5, 4.5),  # the root's gather and its own
        ("forward", "b", 4.5, 6.5),  # gathered meanwhile
        ("forward", "root", 6.5, 7.5),
        ("backward", "root", 7.5, 9.5),
        ("backward", "b", 9.5, 13.5),
        ("backward", "a", 13.5, 17.5),
    ]
    assert [(call.unit, call.start, call.end) for call in step.calls[-3:]] == [
        ("b", 13.5, 15.5),
        ("a", 17.5, 19.5),
        ("root", 19.5, 20.0),
    ]
    assert length(step.waits) == 5.0 and step.overlap == 1 - 5.0 / length(step.under_way)
    in_turn = predicted_step(3, UNITS, ranks=4, bandwidth=6_000, prefetch=False)
    assert max(call.end for call in in_turn.calls) == 20.0 + 3 * 2.0  # all gathers of blocks but the first


@pytest.mark.parametrize("stage", range(4))
def test_a_call_takes_what_the_emulated_link_lets_it_take(stage):
    link = parse("6 kB/s, 10 ms")
    step = predicted_step(stage, UNITS, 4, link.bandwidth, link.latency)
    free = 0.0
    for call in step.calls:
        begin = max(call.start, free)
        free = begin + link.seconds(call.sent, 6 if call.op == "all_reduce" else 3)
        assert call.end == free


def test_the_knee():
    found = {stage: phases_of(predicted_step(stage, UNITS, 4, 6_000, 1 / 64), 1 / 64) for stage in range(4)}
    assert found[0] == {"forward": Phase(5.0, 0, 0.0), "backward": Phase(10.0, 54_000, 18 / 64)}
    assert found[3] == {"forward": Phase(5.0, 27_000, 9 / 64), "backward": Phase(10.0, 51_000, 15 / 64)}
    assert knee(found[1]) == knee(found[3]) == 27_000 / (5 - 9 / 64)
    assert knee(found[0]) == 54_000 / (10 - 18 / 64)
    assert knee({"forward": Phase(1.0, 3.0, 1.0)}) == math.inf and knee({"forward": Phase(0.0, 0.0)}) == 0.0


def test_it_is_drawn_as_a_record_is():
    figure, sentence = plots.gantt(predicted_step(3, UNITS, 4, 6_000))
    assert figure and "a rank stood still for 5.00 s" in sentence


@pytest.mark.parametrize("wrong", [{"stage": 4}, {"ranks": 0}, {"bandwidth": 0.0}, {"units": {"root": (1, 1.0)}}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a step needs a stage from 0 to 3"):
        predicted_step(**({"stage": 0, "units": UNITS, "ranks": 2, "bandwidth": 1.0} | wrong))
