"""The formulas against the paper and the design's table, and bytes counted against bytes made."""

from __future__ import annotations

import pytest
import torch
from zoo import CASES, build

import zerolab
from zerolab.measure import model_states, moved_bytes, paper_state_bytes, peak, state_bytes
from zerolab.precision import KEEP, Precision


def test_figure_1_of_the_paper():
    """7.5 billion parameters, 64 GPUs: 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [paper_state_bytes(stage, 64, 7.5e9) / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.88], rel=0.005)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_the_table_of_the_stages(n):
    psi = 64_000
    fp32 = [16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n]
    bf16 = [16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 14 * psi / n]
    for stage in range(4):
        assert sum(state_bytes(stage, n, psi).values()) == fp32[stage]
        assert sum(state_bytes(stage, n, psi, Precision()).values()) == bf16[stage]
    moved = [moved_bytes(stage, n, psi, root=1000) for stage in range(4)]
    assert moved == [round(4 * e * (n - 1) / n) for e in (2 * psi, 2 * psi, 2 * psi, 3 * psi - 1000)]


def test_what_makes_no_sense():
    with pytest.raises(ValueError, match="stage"):
        state_bytes(4, 2, 100)
    with pytest.raises(ValueError, match="world_size"):
        moved_bytes(1, 0, 100)
    with pytest.raises(ValueError, match="root"):
        moved_bytes(3, 2, 100, root=200)


def counted(precision: Precision) -> list[tuple[dict[str, int], int, int]]:
    case, results = CASES["plain"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units, precision=precision)
        optimizer = case.optimizer(zero.model)
        for step in range(2):
            case.loss(zero.model, zero.rank, step).backward()
            held = model_states(zero, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        with peak(zero, optimizer) as highest:
            case.loss(zero.model, zero.rank, 3).backward()
        results.append((held, sum(unit.layout.size for unit in zero.units), highest.bytes))
    return results


@pytest.mark.parametrize("precision", [KEEP, Precision()], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 3])
def test_bytes_held(ranks, n, precision):
    steps = 4 * len(list(build(CASES["plain"]).parameters()))  # Adam's counters
    for results in ranks.run(counted, precision, ranks=n):
        for stage, (held, padded, highest) in enumerate(results):
            formula = state_bytes(stage, n, padded, precision)
            assert held["parameters"] == formula["parameters"] and held["gradients"] == formula["gradients"]
            padding = 8 * (padded - sum(p.numel() for p in build(CASES["plain"]).parameters()))
            assert formula["optimizer"] - padding <= held["optimizer"] - steps <= formula["optimizer"]
            assert held["buffers"] == 0
            assert highest >= held["parameters"] + held["gradients"] + held["optimizer"]
