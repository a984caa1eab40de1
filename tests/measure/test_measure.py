"""The formulas against the paper; measurements on real ranks against bytes counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import worlds
from torch import Tensor, nn

import zerolab
from zerolab.measure import model_states, moved_bytes, paper_state_bytes, peak, state_bytes

BF16 = zerolab.Precision(torch.bfloat16)
KEEP = zerolab.Precision(compute=None, master=None)

# ---------------------------------------------------------------------- formulas


def test_figure_1_of_the_paper() -> None:
    gigabytes = [paper_state_bytes(stage, 64, 7.5e9) / 1e9 for stage in range(4)]
    assert [round(value, 1) for value in gigabytes] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    ("world_size", "parameters", "gigabytes"),
    [
        (1, 7.5e9, (120, 120, 120)),
        (4, 7.5e9, (52.5, 41.3, 30)),
        (16, 7.5e9, (35.6, 21.6, 7.5)),
        (256, 7.5e9, (30.4, 15.4, 0.47)),
        (64, 128e9, (536, 284, 32)),
        (1024, 128e9, (513, 257, 2)),
        (16, 1e12, (4750, 2875, 1000)),
        (1024, 1e12, (4011, 2013, 15.6)),
    ],
)
def test_table_1_of_the_paper(world_size: int, parameters: float, gigabytes: tuple[float, ...]) -> None:
    for stage, expected in zip((1, 2, 3), gigabytes):  # the paper rounds some values and cuts others off
        assert paper_state_bytes(stage, world_size, parameters) / 1e9 == pytest.approx(expected, rel=0.006)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_table_of_the_design(n: int) -> None:
    psi = 64_000
    fp32 = [sum(state_bytes(stage, n, psi).values()) for stage in range(4)]
    assert fp32 == [16 * psi, 8 * psi + 8 * psi // n, 4 * psi + 12 * psi // n, 16 * psi // n]
    bf16 = [sum(state_bytes(stage, n, psi, BF16).values()) for stage in range(4)]
    assert bf16 == [16 * psi, 4 * psi + 12 * psi // n, 2 * psi + 14 * psi // n, 14 * psi // n]


@pytest.mark.parametrize("stage", range(4))
def test_only_the_stored_copy_of_stage_3_differs_from_the_paper(stage: int) -> None:
    ours, psi = sum(state_bytes(stage, 8, 8_000, BF16).values()), 8_000
    assert paper_state_bytes(stage, 8, psi) - ours == (2 * psi / 8 if stage == 3 else 0)


def test_categories() -> None:
    psi, n = 1000, 4
    assert state_bytes(1, n, psi) == {"parameters": 4000, "gradients": 4000, "optimizer": 2000}
    # masters are parameters: a bf16 copy, and this rank's share of the masters
    assert state_bytes(1, n, psi, BF16) == {"parameters": 2000 + 1000, "gradients": 2000, "optimizer": 2000}
    assert state_bytes(0, n, psi, BF16)["parameters"] == 2000 + 4000
    assert state_bytes(3, n, psi, BF16)["parameters"] == 1000
    assert state_bytes(0, n, psi, optimizer_bytes=4)["optimizer"] == 4000  # SGD with momentum
    wide = zerolab.Precision(torch.bfloat16, reduce=torch.float32)
    assert state_bytes(2, n, psi, wide)["gradients"] == 1000
    assert state_bytes(0, n, psi, KEEP, own=torch.float64)["parameters"] == 8000


def test_moved_bytes() -> None:
    psi, root, n = 1000, 100, 4
    assert [moved_bytes(stage, n, psi, root) for stage in range(4)] == [6000, 6000, 6000, 8700]
    assert moved_bytes(3, n, psi, root) == 4 * (3 * psi - root) * (n - 1) // n
    assert [moved_bytes(stage, n, psi, root, BF16) for stage in range(4)] == [3000, 3000, 3000, 4350]
    # stage 0 moves gradients twice, stage 1 gradients once and parameters once
    wide = zerolab.Precision(torch.bfloat16, reduce=torch.float32)
    assert [moved_bytes(stage, n, psi, root, wide) for stage in (0, 1)] == [6000, 4500]
    assert [moved_bytes(stage, 1, psi, root) for stage in range(4)] == [0, 0, 0, 0]


def test_nonsense_is_refused() -> None:
    for arguments in ((4, 2, 10), (-1, 2, 10), (0, 0, 10), (0, 2, -1)):
        with pytest.raises(ValueError, match="must be"):
            state_bytes(*arguments)
        with pytest.raises(ValueError, match="must be"):
            moved_bytes(*arguments)
        with pytest.raises(ValueError, match="must be"):
            paper_state_bytes(*arguments)
    with pytest.raises(ValueError, match="root"):
        moved_bytes(3, 2, 10, root=11)


# ---------------------------------------------------------------------- on real ranks


class TwoLayers(nn.Module):
    """Two units of 60 + 10 and 20 + 2 parameters, and 20 bytes of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 2)
        self.register_buffer("five", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


PARAMETERS = 92
# By hand: each parameter begins at a multiple of 16 bytes, each unit is padded to a multiple of N elements.
#   fp32  60 10 | 20 2          70 70 72 72 + 22 22 24 24 elements for N = 1, 2, 3, 4
#   bf16  60 . 10 | 20 . 2      74 74 75 76 + 26 26 27 28
PADDED = {"fp32": {1: 92, 2: 92, 3: 96, 4: 96}, "bf16": {1: 100, 2: 100, 3: 102, 4: 104}}


def states_of(precision: zerolab.Precision | None) -> list[list[dict[str, int]]]:
    """Model states of each stage after sharding, when the second backward returns, and after zero_grad."""
    seen = []
    for stage in range(4):
        zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear], precision=precision)
        optimizer = torch.optim.AdamW(zero.model.parameters())
        moments = [model_states(zero, optimizer)]
        for _ in range(2):
            zero.model(torch.ones(3, 6)).backward()
            moments[1:] = [model_states(zero, optimizer)]
            optimizer.step()
            optimizer.zero_grad()
        seen.append([*moments, model_states(zero, optimizer)])
    return seen


@pytest.mark.parametrize("n", worlds(2, 3, others=(1, 4)))
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_model_states_by_hand(ranks: zerolab.Ranks, n: int, name: str) -> None:
    size = PADDED[name][n]
    share = size // n
    if name == "fp32":
        parameters = (4 * size, 4 * size, 4 * size, 4 * share)
        gradients = (4 * size, 4 * size, 4 * share, 4 * share)
    else:
        parameters = (6 * size, 2 * size + 4 * share, 2 * size + 4 * share, 4 * share)
        gradients = (2 * size, 2 * size, 2 * share, 2 * share)
    everyone = ranks.run(states_of, BF16 if name == "bf16" else None, ranks=n)
    for stage in range(4):
        for before, held, after in (result[stage] for result in everyone):
            empty = {"gradients": 0, "optimizer": 0, "buffers": 20}
            assert before == {"parameters": parameters[stage], **empty}
            assert held["parameters"] == parameters[stage]
            assert held["gradients"] == gradients[stage]
            assert held["buffers"] == 20
            assert after == {**held, "gradients": 0}
        # The optimizer's state has no padding: 8 bytes for each element, and a counter for each of 4 tensors.
        state = [result[stage][1]["optimizer"] for result in everyone]
        if stage == 0:
            assert state == [8 * PARAMETERS + 16] * n
        else:
            assert sum(state) == 8 * PARAMETERS + 16 * n
            assert max(state) <= 8 * share + 16


def kept_back(stage: int) -> list[int]:
    """Bytes of gradients after a backward under no_sync, and after the next one."""
    zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    seen = []
    with zero.no_sync():
        zero.model(torch.ones(3, 6)).backward()
        seen.append(model_states(zero, optimizer)["gradients"])
    zero.model(torch.ones(3, 6)).backward()
    seen.append(model_states(zero, optimizer)["gradients"])
    return seen


@pytest.mark.parametrize("stage", range(4))
def test_gradients_under_no_sync_count(ranks: zerolab.Ranks, stage: int) -> None:
    full, share = 4 * 92, 4 * 46
    for seen in ranks.run(kept_back, stage, ranks=2):
        assert seen == [full, share if stage >= 2 else full]


def gathered(stage: int) -> int:
    """Bytes of parameters at the start of the second unit's forward."""
    zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    seen = []

    def look(*_: Any) -> None:
        seen.append(model_states(zero, optimizer)["parameters"])

    zero.model.second.register_forward_pre_hook(look)
    zero.model(torch.ones(3, 6))
    return seen[0]


def test_what_is_gathered_counts(ranks: zerolab.Ranks) -> None:
    assert ranks.run(gathered, 3, ranks=2) == [4 * 46 + 4 * 22] * 2
    assert ranks.run(gathered, 2, ranks=2) == [4 * 92] * 2


def peaks(stage: int) -> dict[str, int]:
    zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    result = {"states": sum(model_states(zero, optimizer).values())}
    with peak(zero, optimizer) as nothing:
        pass
    with peak(zero, optimizer) as temporary:
        a = torch.empty(1000)
        del a
        b = torch.empty(300)
        c = torch.empty(200)
        del b, c
    storage = torch.empty(10).untyped_storage()
    with peak(zero, optimizer) as resized:
        storage.resize_(5000)
        storage.resize_(0)
    with peak(zero, optimizer) as step:
        zero.model(torch.ones(3, 6)).backward()
        held = sum(model_states(zero, optimizer).values())
        optimizer.step()
        optimizer.zero_grad()
    result |= {"nothing": nothing.bytes, "temporary": temporary.bytes, "resized": resized.bytes}
    return result | {"step": step.bytes, "held": held}


@pytest.mark.parametrize("stage", range(4))
def test_peak(ranks: zerolab.Ranks, stage: int) -> None:
    for result in ranks.run(peaks, stage, ranks=2):
        assert result["nothing"] == result["states"]
        assert result["temporary"] == result["states"] + 4000
        assert result["resized"] == result["states"] + 5000
        assert result["step"] >= result["held"]
