"""What ring attention needs around its loop: a turn, pairs of halves, backward, and a GPT that attends by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.exercises.learner import exchange
from zerolab.tasks.models import GPT, Attention, Block

Merge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def turn(block: Tensor, group: Any) -> Tensor:
    """Send `block` to the next rank of `group`, and return what the one before sends."""
    place, N = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (place + step) % N) for step in (1, -1))
    return exchange(block, to, source)


def seen(visible: Tensor) -> list[tuple[int, int]]:
    """Which half of the queries sees anything of which half of the keys. visible: (Q, K)."""
    quarters = [half.chunk(2, dim=1) for half in visible.chunk(2)]
    return [(i, j) for i in range(2) for j in range(2) if quarters[i][j].any()]


def by_halves(merge: Merge) -> Merge:
    """`merge`, called for each half of the queries with each half of the keys, if there is anything to see."""

    def merged(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        states = [*zip(out.chunk(2, dim=-2), lse.chunk(2, dim=-1), strict=True)]
        for i, j in seen(visible):
            query, key, value = q.chunk(2, dim=-2)[i], k.chunk(2, dim=-2)[j], v.chunk(2, dim=-2)[j]
            states[i] = merge(query, key, value, visible.chunk(2)[i].chunk(2, dim=1)[j], *states[i])
        outs, logs = zip(*states, strict=True)
        return torch.cat(outs, dim=-2), torch.cat(logs, dim=-1)

    return merged


def with_backward(ring: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Attention that autograd knows. ring: of q, k, v, `places` and `group`, forward's result and its lse."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, places: Tensor, group: Any) -> Tensor:
            out, lse = ring(q, k, v, places, group)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.ring = places, group
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return *_ring_gradients(grad, ctx.saved_tensors, *ctx.ring), None, None

    attend: Callable[..., Tensor] = Attention.apply
    return attend


class RingGPT(GPT):
    """A GPT of two blocks on a rank's part of a sequence of 512 tokens, whose `places`, (T / N,), these are.

    attend: of q, k and v, each (B, H, T / N, D), what attention gives.
    """

    def __init__(self, attend: Callable[..., Tensor], places: Tensor) -> None:
        super().__init__(layers=2, width=64, context=512)
        self.places = places
        for block in self.blocks:
            block.attention = _Attends(cast(Block, block).attention, attend)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.position(self.places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Attends(nn.Module):
    def __init__(self, whole: Attention, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.attend = whole.qkv, whole.out, whole.heads, attend

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)
        y: Tensor = self.attend(*qkv.permute(2, 0, 3, 1, 4))
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def _ring_gradients(
    grad: Tensor, kept: tuple[Tensor, ...], places: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, each (..., T / N, D), around the ring of `group`. kept: q, k, v, out and lse.

    Keys and values go around once more, and with each the gradient that it has got so far; after N turns it is at home.
    Weights are computed again, from scores and lse, so that none are kept (as in FlashAttention-2, arXiv 2307.08691).
    """
    q, k, v, out, lse = kept
    scale = q.shape[-1] ** -0.5
    delta = (grad * out).sum(dim=-1, keepdim=True)
    of_q = torch.zeros_like(q)
    block, theirs = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)]), places
    for _ in range(dist.get_world_size(group)):
        visible = places[:, None] >= theirs
        for i, j in seen(visible):
            rows = [tensor.chunk(2, dim=-2)[i] for tensor in (q, grad, delta, lse[..., None], of_q)]
            query, of_out, offset, logs, of_query = rows
            key, value, of_key, of_value = (tensor.chunk(2, dim=-2)[j] for tensor in block)
            hidden = ~visible.chunk(2)[i].chunk(2, dim=1)[j]
            weights = ((query @ key.mT * scale).masked_fill(hidden, -torch.inf) - logs).exp()
            of_value += weights.mT @ of_out
            of_scores = weights * (of_out @ value.mT - offset) * scale
            of_query += of_scores @ key
            of_key += of_scores.mT @ query
        block, theirs = turn(block, group), turn(theirs, group)
    return of_q, block[2], block[3]
