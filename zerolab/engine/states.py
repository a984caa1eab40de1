"""What an optimizer keeps for a slice, `optimizer.state[p]["exp_avg"]`, follows the rule of slices.py, as `p` does.

A tensor there that has the shape of the slice is marked as a slice between steps, and is plain in a step, as gradients
are. It stays the same object in torch's own dictionaries. So what is written into it reaches the next step, and
`state_dict()`, copies and pickles are torch's. So does what a block-wise optimizer keeps for each block. A tensor of
another shape, such as a step counter, is one for the whole parameter and stays plain.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zerolab.engine.blockwise import Blocks, declared, in_blocks
from zerolab.engine.slices import Slice, marked, place_of, plainly

CONTAINERS = {dict, list, tuple}


def mark_states(optimizer: Optimizer) -> None:
    """Let what `optimizer` keeps for slices be slices, as far as it is not yet."""
    if any(type(value) is Tensor and value.dim() for value in _values(optimizer.state)):
        blocks = declared.get(type(optimizer), Blocks(1))
        with plainly():
            for param, kept in optimizer.state.items():
                if (place := place_of(param)) is None:
                    continue
                for key, value in kept.items() if blocks.size > 1 else ():
                    if type(value) is Tensor and (each := blocks.per_number(param, key, value)):
                        layout, slot = in_blocks(place.layout, place.slot, each)
                        marked(value, replace(place, layout=layout, slot=slot))
                for value in _values({param: kept}):
                    if type(value) is Tensor:
                        if value.shape == param.shape and not _one_for_all(optimizer, blocks, kept, value):
                            marked(value, place)


def marked_states(optimizer: Optimizer) -> list[Tensor]:
    """The slices among what `optimizer` keeps."""
    return [value for value in _values(optimizer.state) if type(value) is Slice]


def make_plain(states: list[Tensor]) -> None:
    for value in states:
        value.__class__ = Tensor  # type: ignore[assignment]


def make_shown(states: list[Tensor]) -> None:
    for value in states:
        value.__class__ = Slice  # type: ignore[assignment]


def _values(state: dict[Any, Any]) -> list[Any]:
    """Twice in each step, so it must be quick where optimizers keep what torch's do: dictionaries of tensors."""
    if {*map(type, state.values())} == {dict}:
        values = list(chain.from_iterable(map(dict.values, state.values())))
        if CONTAINERS.isdisjoint(map(type, values)):
            return values
    return tree_leaves(list(state.values()))


def _one_for_all(optimizer: Optimizer, blocks: Blocks, kept: dict[str, Any], value: Tensor) -> bool:
    """Whether `value`, cut as the slice, is one number for the whole parameter. Slices of other lengths tell."""
    if value.numel() != 1:
        return False
    key = next((key for key, other in kept.items() if other is value), None)
    others = ((param, other.get(key)) for param, other in optimizer.state.items() if place_of(param))
    return any(
        isinstance(other, Tensor) and other.shape != param.shape and not blocks.per_number(param, str(key), other)
        for param, other in others
    )
