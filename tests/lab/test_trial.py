"""Lesson 19's evidence: every message of a step is opened and known, and the runs are as the formulas say."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.lab.exercises.battery import load
from zerolab.lab.lessons.lesson19 import CARRIES
from zerolab.lab.lessons.lesson19.trial import (
    Evidence,
    by_kind,
    envelopes,
    evidence,
    in_the_messages,
    laid_out,
    states_in_plain_torch,
    torch_has,
)
from zerolab.measure import ledger, moved_bytes, state_bytes
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import Block, small_gpt

pytestmark = pytest.mark.slow


class Odd(nn.Module):
    """Two units of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def odd_batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def every_message() -> list[tuple[str, list[str]]]:
    """What each message of two steps in each stage could be, by the course's answer to 19.1."""
    carries = load(CARRIES, "<19.1>", "ex_19_1").carries
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for stage in zerolab.STAGES:
        torch.manual_seed(0)
        model = Odd()
        zero = stage(model, units=[nn.Sequential])
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            with zero.full_parameters():
                before = {name: param.detach().clone() for name, param in model.named_parameters()}
            alone = Odd()
            alone.load_state_dict(before)
            alone(odd_batch(rank, step)).square().mean().backward()
            grads = {name: param.grad for name, param in alone.named_parameters()}
            adam.zero_grad()
            with envelopes(zero) as sent:
                model(odd_batch(rank, step)).square().mean().backward()
            adam.step()
            units = {unit.name: unit for unit in zero.units}
            for message in sent:
                unit = units[message.unit]
                states = {"parameters": laid_out(unit, before), "gradient": laid_out(unit, grads)}
                when = f"stage {stage.stage}, step {step + 1}, {message.what} of {message.unit}"
                found.append((when, carries(message.payload, states, rank, size)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_message_is_known(ranks, size):
    """Gradients are reduced, parameters gathered, and plain PyTorch has the same bits."""
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


def test_messages_are_counted_by_what_is_in_them():
    messages = [(["old parameters"], 3), (["own gradient"], 5), (["new average", "old average"], 7)]
    found = by_kind([*messages, (["new average of squares"], 11), ([], 13)])
    assert found == {"parameters": 3, "gradients": 5, "optimizer": 18, "unknown": 13}
    said = in_the_messages({1: by_kind(messages[:2])})[1]
    assert said.endswith("in ZeRO-1. All the rest is gradients: no stage sends optimizer state.")
    assert in_the_messages({1: found})[1].endswith("in ZeRO-1. Not all the rest is gradients.")


def states_of_the_second_step() -> dict[str, dict[str, Tensor]]:
    return states_in_plain_torch(small_gpt, lambda rank, step: batch(text(), rank, step, 2, 32), steps=2)


def test_states_in_plain_torch_are_the_same_on_all_ranks_but_the_gradient(ranks):
    first, second = ranks.run(states_of_the_second_step, ranks=2)
    assert len(first) == 7
    for state in first:
        same = all(torch.equal(first[state][name], second[state][name]) for name in first[state])
        assert same == (state != "own gradient"), state
    assert not any(torch.equal(first["old average"][name], first["new average"][name]) for name in first["new average"])


def test_a_name_in_torch_is_looked_up():
    assert torch_has("torch.optim.AdamW") and torch_has("torch.distributed.fsdp.fully_shard")
    assert not torch_has("torch.optim.ZeRO") and not torch_has("torch.distributed.zero.ZeRO2")
    with pytest.raises(ValueError, match="no name in torch"):
        torch_has("os.path")
