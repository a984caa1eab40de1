"""Lesson 19's evidence: every message of a step is opened and known, and the runs are as the formulas say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.lab.exercises.checks import lesson19
from zerolab.lab.exercises.exercise import World
from zerolab.lab.exercises.spy import Spy
from zerolab.lab.trial import Evidence, envelopes, evidence, small_gpt
from zerolab.measure import ledger, moved_bytes, state_bytes
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import Block

pytestmark = pytest.mark.slow


def every_message() -> list[tuple[str, list[str]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, Spy(dist.distributed_c10d._get_default_store(), rank, size, 5.0))
    return [
        (when, lesson19.carried(payload, states, rank, size))
        for when, payload, states in lesson19._live_messages(world)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_message_is_known(ranks, size):
    """The check's own messages: gradients are reduced, parameters gathered, and plain PyTorch has the same bits."""
    for rank, found in enumerate(ranks.run(every_message, ranks=size)):
        assert len(found) == 30
        for when, names in found:
            kind = "parameters" if "all_gather" in when else "gradient"
            # A shard may be padding alone, and then it is zero in all states.
            assert kind in names and (names == [kind] or rank > 0), (when, names)


def opened() -> list[tuple[int, int]]:
    found = []
    for stage in zerolab.STAGES:
        model = small_gpt()
        zero = stage(model, units=[Block])
        adam = torch.optim.AdamW(model.parameters())
        for step in range(2):
            adam.zero_grad()
            with envelopes(zero) as sent, ledger(zero) as book:
                model(*batch(text(), zero.rank, step, 2, 32)).backward()
                adam.step()
        assert "all_gather" not in vars(zero.comm)  # nobody opens envelopes after the block
        found.append((sum(message.sent for message in sent), book.moved))
    return found


def test_no_byte_of_the_ledger_is_left_out(ranks):
    for found in ranks.run(opened, ranks=3):
        assert len(found) == 4
        assert all(one == other > 0 for one, other in found)


def in_both_dtypes() -> list[Evidence]:
    return [evidence(stage, dtype) for dtype in (torch.float32, torch.bfloat16) for stage in range(4)]


def test_evidence_is_what_the_formulas_say(ranks):
    everyone = ranks.run(in_both_dtypes, ranks=2)
    root = 136_960 - 2 * 49_984
    for run in everyone[0]:
        precision = KEEP if run.dtype == "float32" else zerolab.Precision(torch.bfloat16)
        held = sum(state_bytes(run.stage, 2, run.parameters, precision).values())
        assert run.parameters == 136_960 and 0 <= run.held - held < 1000  # padding, Adam's counters
        assert abs(run.sent - moved_bytes(run.stage, 2, run.parameters, root, precision)) < 1000
    assert everyone[0] == everyone[1]
    assert len({run.digits for run in everyone[0]}) == 2  # one for each dtype
