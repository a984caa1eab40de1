"""The norm of gradients whose slices lie on many ranks."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine


def clip_to_norm(engine: Engine, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients in place so that their joint p-norm is at most `max_norm`. Returns the norm before, a scalar.

    The p-th powers of the slices' norms add up to that of the full norm, so one all-reduce of one number is enough (for
    p = inf, of the maximum). In stage 0 every rank has all gradients and needs no all-reduce.
    """
    if not (norm_type > 0 and max_norm >= 0):
        raise ValueError(f"norm_type must be greater than 0 and max_norm at least 0, not {norm_type} and {max_norm}")
    dtypes = (unit.dtypes.master for unit in engine.units if unit.trainable)
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)  # the same on every rank
    params = [param for unit in engine.units for param in unit.params if param.grad is not None]
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel()]
    grads = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    norms = [torch.linalg.vector_norm(grad, norm_type).double().to(engine.comm.device) for grad in grads]
    zero = torch.zeros((), dtype=torch.float64, device=engine.comm.device)
    if math.isinf(norm_type):
        total, op = torch.stack([zero, *norms]).max(), dist.ReduceOp.MAX
    else:
        total, op = sum((norm**norm_type for norm in norms), zero), dist.ReduceOp.SUM
    if engine.stage > 0:
        engine.comm.all_reduce_scalar(total, op)
    if not math.isinf(norm_type):
        total = total ** (1 / norm_type)
    total = total.to(dtype)
    clip_grads_with_norm_(params, max_norm, total)
    return total
