"""What NCCL does itself: torch's collectives for single tensors, and how to have it make a mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the single-tensor collectives; 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mean_op(dtype: torch.dtype, size: int) -> Any:
    """The operation for a mean over `size` ranks: AVG; or SUM, of a sum that is still to be divided.

    AVG multiplies by 1/N rounded to the dtype: 0.2 % off in bf16 for N = 3. (In fp16 0.02 %, and there a sum might
    overflow.) With one rank, AVG leaves out the last elements (NCCL before 2.29.7, its issue 1950).
    """
    sums = size == 1 or (dtype == torch.bfloat16 and size & (size - 1) > 0)
    return dist.ReduceOp.SUM if sums else dist.ReduceOp.AVG


def each_once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A view of `tensor` that can be written to: where it, or `like`, is expanded, and all rows are one, that row."""
    sizes = zip((tensor if like is None else like).stride(), tensor.shape, strict=True)
    return tensor[tuple(slice(None) if stride or not size else 0 for stride, size in sizes)]


def rows_are_one(tensor: Tensor, like: Tensor) -> bool:
    """Whether `tensor` fits into `like`, whose shape it has: where that is expanded, all rows must be one."""
    expanded = [dim for dim, stride in enumerate(like.stride()) if not stride and like.shape[dim]]
    return all(torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor)) for dim in expanded)
