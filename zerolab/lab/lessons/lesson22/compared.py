"""What lesson 22 compares with one process: gradients, and weights."""

from __future__ import annotations

from typing import Any

import torch


def relative_error(got: Any, want: Any) -> float:
    """The largest difference over the largest number in `want`. Both are lists of tensors, or state dicts."""
    names = list(want) if isinstance(want, dict) else range(len(want))
    off = torch.stack([(got[name].cpu() - want[name].cpu()).abs().max() for name in names])
    return (off.max() / max(want[name].abs().max().cpu() for name in names)).item()
