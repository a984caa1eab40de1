"""What an optimizer keeps for a slice, `optimizer.state[p]["exp_avg"]`, follows the rule of slices.py, as `p` does.

A tensor there that has the shape of the slice is marked as a slice between steps, and is plain in a step, as gradients
are. It stays the same object in torch's own dictionaries. So what is written into it reaches the next step, and
`state_dict()`, copies and pickles are torch's. A tensor of another shape, such as a step counter, is one for the whole
parameter and stays plain.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zerolab.engine.slices import Slice, marked, place_of, plainly

CONTAINERS = {dict, list, tuple}


def mark_states(optimizer: Optimizer) -> None:
    """Let what `optimizer` keeps for slices be slices, as far as it is not yet."""
    with plainly():
        for param, kept in optimizer.state.items():
            if (place := place_of(param)) is not None:
                for value in _values(kept):
                    if type(value) is Tensor and value.dim() and value.shape == param.shape:
                        if value.numel() != 1 or not _one_for_all(optimizer, kept, value):
                            marked(value, place)


def marked_states(optimizer: Optimizer) -> list[Tensor]:
    """The slices among what `optimizer` keeps."""
    return [value for kept in optimizer.state.values() for value in _values(kept) if type(value) is Slice]


def make_plain(states: list[Tensor]) -> None:
    for value in states:
        value.__class__ = Tensor  # type: ignore[assignment]


def make_shown(states: list[Tensor]) -> None:
    for value in states:
        value.__class__ = Slice  # type: ignore[assignment]


def _values(kept: Any) -> list[Any]:
    values = list(kept.values()) if isinstance(kept, dict) else [kept]
    return values if CONTAINERS.isdisjoint(map(type, values)) else tree_leaves(kept)


def _one_for_all(optimizer: Optimizer, kept: dict[str, Any], value: Tensor) -> bool:
    """Whether `value`, of one element as the slice, is one for the whole parameter: slices of other lengths tell."""
    key = next((key for key, other in kept.items() if other is value), None)
    others = ((param, other.get(key)) for param, other in optimizer.state.items() if place_of(param))
    return any(isinstance(other, Tensor) and other.shape != param.shape for param, other in others)
