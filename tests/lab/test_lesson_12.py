"""What lesson 12 rounds with."""

from __future__ import annotations

import pytest
import torch

from zerolab.lab.lessons.lesson12.rounding import from_int4, to_int4, to_int8


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_int4_is_off_by_half_a_step_at_most(length: int):
    rows = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    rows[1] = 0
    packed = to_int4(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 36 * -(-length // 64))
    back = from_int4(packed)[:, :length]
    for start in range(0, length, 64):
        block, found = rows[:, start : start + 64], back[:, start : start + 64]
        half = block.abs().amax(dim=1, keepdim=True) / 14
        assert ((found - block).abs() <= half * (1 + 1e-5)).all()


def test_int8_has_a_scale_for_each_block():
    x = torch.cat([torch.linspace(-1, 1, 64), 1000 * torch.linspace(-1, 1, 10)])
    small, scales = to_int8(x, block=64)
    assert small.shape == (2, 64) and scales.shape == (2, 1) and small.dtype == torch.int8
    back = (small * scales).flatten()[: len(x)]
    assert ((back - x).abs()[:64] <= 0.5 / 127 + 1e-6).all() and ((back - x).abs()[64:] <= 500 / 127 + 1e-3).all()
