"""What an optimizer's update of an element depends on: that element's gradients alone, or those of its block.

An elementwise optimizer may see any slice. A block-wise one, such as Adam with a quantised state (Dettmers et al.,
arXiv 2110.02861), cuts each flattened parameter into blocks, from its first element on, and keeps numbers for each of
them, such as a scale. It may see slices that are whole blocks. A `Layout` cuts such if parameters and shards begin at
multiples of a block: that is the granularity.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from zerolab.engine.layout import Layout, Slot


@dataclass(frozen=True)
class Blocks:
    """`size`: the elements of a block. `keys`: what `optimizer.state[p]` has with one number per block."""

    size: int
    keys: frozenset[str] = frozenset()

    def count(self, param: Tensor) -> int:
        return -(-param.numel() // self.size)

    def per_number(self, param: Tensor, key: str, value: Any) -> int | None:
        """How many elements of `param` each number of this state stands for, if it is flat and cut as `param` is."""
        if not isinstance(value, Tensor) or value.dim() != 1 or self.size == 1:
            return None
        if key in self.keys:
            return self.size if len(value) == self.count(param) else None
        return 1 if param.dim() != 1 and len(value) == param.numel() else None

    def check(self, optimizer: Optimizer) -> None:
        """Raise `ValueError` if the optimizer keeps other numbers than one per block."""
        for param, kept in optimizer.state.items():
            for key in self.keys & kept.keys():
                if self.per_number(param, key, kept[key]) is None:
                    what = tuple(kept[key].shape) if isinstance(kept[key], Tensor) else type(kept[key]).__name__
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {what} in {key} for {param.numel()} elements; declared was "
                        f"one number for each block of {self.size}, which is ({self.count(param)},)"
                    )


def in_blocks(layout: Layout, slot: Slot, size: int) -> tuple[Layout, Slot]:
    """Where one number for each `size` elements of `slot` lies, if `layout` cuts at multiples of `size`."""
    numbers = Slot(slot.name, (-(-slot.numel // size),), (1,), slot.offset // size)
    blocks = copy.copy(layout)
    blocks.slots, blocks.gaps, blocks.numel = [numbers], [], numbers.numel
    blocks.size, blocks.shard_size = layout.size // size, layout.shard_size // size
    return blocks, numbers


def refuse_disorder(named: Iterable[tuple[str, Tensor]], granularity: int) -> None:
    """Raise `ValueError` if elements lie in another order than that in which blocks are counted."""
    for name, tensor in named if granularity > 1 else ():
        if not tensor.is_contiguous():
            raise ValueError(
                f"granularity={granularity} counts elements in order, and those of {name}, of strides "
                f"{tensor.stride()} and shape {tuple(tensor.shape)}, lie in another: use parameters that are contiguous"
            )


declared: dict[type, Blocks] = dict.fromkeys(
    (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop), Blocks(1)
)


def declare_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Allow an optimizer class in stages 1 to 3, because it updates each element from its own gradients alone."""
    declare_blockwise(optimizer_class, 1)


def declare_blockwise(optimizer_class: type[Optimizer], size: int, per_block: Iterable[str] = ()) -> None:
    """Allow an optimizer class in stages 1 to 3 of models that are sharded with `granularity=` a multiple of `size`.

    It must cut every flattened parameter, whatever its number of elements, into blocks of `size`, the last of which
    may be shorter, and update an element from the gradients of its block alone.

    per_block: the names of what it keeps with one number for each block: `optimizer.state[p][name]` is (blocks,). What
    else it keeps has the shape of `p`, or is (p.numel(),), or one number for the whole parameter.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, not {optimizer_class!r}")
    if size < 1 or isinstance(per_block, str):
        raise ValueError(f"size must be at least 1 and per_block names in a list, not {size} and {per_block!r}")
    declared[optimizer_class] = Blocks(size, frozenset(per_block))


def misfit(optimizer_class: type[Optimizer], stage: int, granularity: int) -> str | None:
    """Why an optimizer of this class may not see what `stage` shows, cut at multiples of `granularity`."""
    name = optimizer_class.__name__
    if stage == 0:
        return None
    if issubclass(optimizer_class, optim.LBFGS):
        return (
            f"{name} is not known to be elementwise: it looks at all parameters together, and in stage {stage} it sees "
            "slices of them. Use stage 0"
        )
    if (blocks := declared.get(optimizer_class)) is None:
        return (
            f"{name} is not known to be elementwise, and in stage {stage} it sees slices of parameters: its numbers "
            f"would be wrong. Use zerolab.OwnerOptimizer(params, {name}), which shows it full parameters, or stage 0. "
            "Or, if it does update each element from that element's own gradients alone, call "
            f"zerolab.declare_elementwise({name}); if from those of its block of elements, zerolab.declare_blockwise"
        )
    if granularity % blocks.size:
        return (
            f"{name} updates blocks of {blocks.size} elements, and in stage {stage} it sees slices that are cut at "
            f"multiples of {granularity}: shard the model with granularity={blocks.size}, or use "
            f"zerolab.OwnerOptimizer(params, {name}), or stage 0"
        )
    return None
