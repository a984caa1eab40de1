"""Attention divided by heads (lesson 15), as `MyMLP` divides an MLP by hidden units."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.tasks.models import Attention


class SplitAttention(nn.Module):
    """This rank's heads of `whole`: x -> Enter, this rank's heads, its columns of the output layer, Leave, the bias.

    The first layer's weight has 3·C rows: q of all heads, then k of all heads, then v of all heads. So what belongs to
    a rank's heads is three blocks of rows, one of each. Enter, Leave: the learner's, or the course's.
    """

    def __init__(self, whole: Attention, group: Any, Enter: Any, Leave: Any) -> None:
        super().__init__()
        place, size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.heads, self.enter, self.leave = group, whole.heads // size, Enter.apply, Leave.apply
        out = whole.out.weight.detach().chunk(size, dim=1)[place]
        self.weight = _heads_of(whole.qkv.weight, place, size)  # (3 C / N, C)
        self.bias = _heads_of(whole.qkv.bias, place, size)
        self.out = nn.Parameter(out.clone())  # (C, C / N)
        self.out_bias = nn.Parameter(whole.out.bias.detach().clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        qkv = F.linear(self.enter(x, self.group), self.weight, self.bias)
        q, k, v = qkv.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        part = F.linear(y.transpose(1, 2).flatten(2), self.out)
        return self.leave(part, self.group) + self.out_bias


def split_gradients(cut: Any, whole: Any, group: Any) -> tuple[dict[str, float], bool]:
    """How far a divided block's gradients are from the whole one's, of the largest; whether the group has equal norms.

    The first for a weight that is cut, and for a layer norm's, which every rank of the group has.
    """
    place, size = dist.get_rank(group), dist.get_world_size(group)
    grads = {
        "mlp.up.weight": (cut.mlp.up.weight.grad, whole.mlp.up.weight.grad.chunk(size)[place]),
        "norm1.weight": (cut.norm1.weight.grad, whole.norm1.weight.grad),
    }
    off = {name: ((ours - right).abs().max() / right.abs().max()).item() for name, (ours, right) in grads.items()}
    norms = [torch.empty_like(cut.norm1.weight) for _ in range(size)]
    dist.all_gather(norms, cut.norm1.weight.grad, group=group)
    return off, all(torch.equal(norm, norms[0]) for norm in norms)


def _heads_of(rows: Tensor, place: int, size: int) -> nn.Parameter:
    """(3 C, ...) -> (3 C / N, ...)."""
    pieces = rows.detach().view(3, size, -1, *rows.shape[1:])  # q, k, v; a piece per rank
    return nn.Parameter(pieces[:, place].flatten(0, 1).clone())
