"""What lesson 22 compares with one process: gradients, and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerolab.lab.lessons.lesson22.expert_gpt import ExpertGPT


def relative_error(got: Any, want: Any) -> float:
    """The largest difference over the largest number in `want`. Both are lists of tensors, or state dicts."""
    names = list(want) if isinstance(want, dict) else range(len(want))
    off = torch.stack([(got[name].cpu() - want[name].cpu()).abs().max() for name in names])
    return (off.max() / max(want[name].abs().max().cpu() for name in names)).item()


def same_step(engines: Sequence[Any], one: ExpertGPT, group: Any) -> bool:
    """Make a step of SGD here and in one process: have both the same weights then, to 10 digits?

    engines: the model's, and that of each layer's experts. one: the model of one process. group: the expert group.
    """
    for modules in ([engine.model for engine in engines], [one, *one.experts]):
        torch.optim.SGD([param for module in modules for param in module.parameters()], 0.1).step()
    states = [engine.full_state_dict() for engine in engines]
    return all(relative_error(got, want) < 1e-10 for got, want in zip(states, one.states(group), strict=True))
