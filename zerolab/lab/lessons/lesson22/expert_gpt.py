"""A layer's experts, on the rows that have chosen them, and a GPT that has such layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.tasks.models import GPT


class Experts(nn.ModuleList):
    """Some of a layer's experts: (R, C) -> (R, C). local (R,), int64: which of them each row is for.

    All are called, even without rows.
    """

    def forward(self, rows: Tensor, local: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self):
            places = (local == number).nonzero().flatten()
            out = out.index_copy(0, places, expert(rows[places]))
        return out


def expert_groups(G: int) -> tuple[Any, Any]:
    """This rank's expert group, G ranks that stand side by side, and its replicas, which have the same place in theirs.

    All ranks call it, as they call `new_group`.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(list(range(first, first + G))) for first in range(0, N, G)]
    columns = [dist.new_group(list(range(place, N, G))) for place in range(G)]
    return rows[rank // G], columns[rank % G]


def part(experts: Experts, group: Any) -> Experts:
    """Those of all a layer's experts that this rank has, when the ranks of `group` share them out in order."""
    each = len(experts) // dist.get_world_size(group)
    return cast(Experts, experts[each * dist.get_rank(group) :][:each])


class ExpertGPT(GPT):
    """A GPT of two blocks of width 64, with `layer(64)` in place of each MLP; its weights are the same on all ranks.

    A layer makes all its experts and keeps them in a list, `kept`, where parameters() does not find them. Those of this
    rank stay: the others are with the other ranks of `group`, which becomes the layer's `group`.
    """

    def __init__(self, layer: Callable[[int], Any], group: Any, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        super().__init__(layers=2, width=64)
        for block in self.blocks:
            block.mlp = made = layer(64)
            made.kept, made.group = [part(made.kept[0], group).to(dtype)], group
        self.to(dtype)

    @property
    def experts(self) -> list[Experts]:
        """Each layer's, of this rank."""
        return [block.mlp.kept[0] for block in cast(Any, self.blocks)]

    def grads(self, group: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of dense parameters, and of experts. group: only of those that this rank has in it."""
        modules = [part(experts, group) if group else experts for experts in self.experts]
        dense, own = [*self.parameters()], [param for module in modules for param in module.parameters()]
        return [param.grad for param in dense], [param.grad for param in own]  # type: ignore[misc]

    def states(self, group: Any) -> list[dict[str, Tensor]]:
        """The state of what is dense, and of each layer's experts: of those that this rank has in `group`."""
        return [self.state_dict(), *(part(experts, group).state_dict() for experts in self.experts)]
