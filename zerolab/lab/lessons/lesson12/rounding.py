"""Tensors in blocks of small integers with a scale each, and means that are made of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zerolab.lab.ranks.counting import calls


def to_int8(x: Tensor, block: int = 256) -> tuple[Tensor, Tensor]:
    """(n,) -> int8 (rows, block), the last row padded, and a float32 scale for each row (rows, 1)."""
    rows = F.pad(x, (0, -len(x) % block)).view(-1, block)
    scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (rows / scales).round().to(torch.int8), scales


def to_int4(rows: Tensor) -> Tensor:
    """(N, S) -> uint8 (N, 36 for each block of 64 elements): 32 bytes of values, two to a byte, and 4 of scale."""
    blocks = F.pad(rows, (0, -rows.shape[1] % 64)).unflatten(1, (-1, 64))
    scales = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 7
    small = ((blocks / scales).round() + 8).to(torch.uint8)  # 1 to 15
    pairs = small[..., ::2] + 16 * small[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=2).flatten(1)


def from_int4(packed: Tensor) -> Tensor:
    """What `to_int4` has packed -> (N, S), S rounded up to whole blocks."""
    blocks = packed.unflatten(1, (-1, 36))
    pairs, scales = blocks[..., :32], blocks[..., 32:].contiguous().view(torch.float32)
    small = torch.stack([pairs % 16, pairs // 16], dim=3).flatten(2) - 8.0
    return (small * scales).flatten(1)


def all_gathered(tensor: Tensor) -> list[Tensor]:
    """Everyone's, in rank order."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def int4_means(grad: Tensor) -> dict[str, tuple[float, float]]:
    """The mean of all ranks' gradients (Ψ,), in int4: of each way the bytes that a rank sends, and the length of the
    error over that of the mean.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = grad.view(size, -1)  # row r is what rank r is to own
    exact = rows.clone()
    dist.all_reduce(exact)
    exact = exact[rank] / size
    found = {}
    for name, way in {"all-to-all": mean_by_all_to_all, "ring": mean_by_ring}.items():
        with calls() as book:
            mean = way(rows)
        found[name] = book.sent, relative_length(mean - exact, exact)
    return found


def mean_by_all_to_all(rows: Tensor) -> Tensor:
    """Every rank's part goes straight to its owner, rounded once: (N, S) -> (S,), the mean of this rank's row."""
    mine = to_int4(rows)
    everyone = torch.empty_like(mine)
    dist.all_to_all_single(everyone, mine)
    return from_int4(everyone)[:, : rows.shape[1]].mean(dim=0)


def mean_by_ring(rows: Tensor) -> Tensor:
    """A reduce-scatter by a ring whose every hop is rounded to int4: (N, S) -> (S,), the mean of this rank's row."""
    rank, size = dist.get_rank(), dist.get_world_size()
    of_rank = list(rows.clone().split(1))
    for hop in range(1, size):
        mine = to_int4(of_rank[rank - hop])  # negative ones count from the end
        its = torch.empty_like(mine)
        work = dist.isend(mine, (rank + 1) % size)
        dist.recv(its, (rank - 1) % size)
        if work is not None:
            work.wait()
        of_rank[rank - hop - 1] += from_int4(its)[:, : rows.shape[1]]
    return of_rank[rank][0] / size


def relative_length(a: Tensor, b: Tensor) -> float:
    """|a| / |b|, over all ranks' parts of both."""
    squares = torch.stack([a.square().sum(), b.square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())
