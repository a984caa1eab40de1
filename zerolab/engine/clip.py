"""The norm of gradients whose slices lie on many ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from zerolab.engine.stage import Stage


def clip_to_norm(stage: Stage, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients in place so that their joint p-norm is at most `max_norm`. Returns the norm before, a scalar.

    The p-th powers of the slices' norms add up to that of the full norm, so one all-reduce of one number is enough (for
    p = inf, of the maximum). In stage 0 every rank has all gradients and needs no all-reduce.
    """
    if not (norm_type > 0 and max_norm >= 0):
        raise ValueError(f"norm_type must be greater than 0 and max_norm at least 0, not {norm_type} and {max_norm}")
    dtypes = (unit.dtypes.master for unit in stage.units if unit.trainable)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)  # the same on every rank
    params = [param for unit in stage.units for param in unit.params if param.grad is not None]
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel()]
    if grads:  # in a few kernels for all of them together
        each = torch._foreach_norm(grads, norm_type, dtype)
        norms = torch.stack([norm.to(each[0].device) for norm in each]).to(stage.comm.device, torch.float64)
    else:
        norms = torch.zeros(1, dtype=torch.float64, device=stage.comm.device)
    if math.isinf(norm_type):
        total = _over_ranks(stage, norms.max(), dist.ReduceOp.MAX)
    else:
        total = _over_ranks(stage, (norms**norm_type).sum(), dist.ReduceOp.SUM) ** (1 / norm_type)
    total = total.to(dtype)
    clip_grads_with_norm_(params, max_norm, total)
    return total


def _over_ranks(stage: Stage, number: Tensor, op: Any) -> Tensor:
    return stage.comm.all_reduce_scalar(number, op) if stage.stage > 0 else number
