"""The norm of gradients whose slices lie on many ranks, and whether they are finite."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

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
    if grads:  # in a few kernels for all of them together
        each = torch._foreach_norm(grads, norm_type, dtype)
        norms = torch.stack([norm.to(each[0].device) for norm in each]).to(engine.comm.device, torch.float64)
    else:
        norms = torch.zeros(1, dtype=torch.float64, device=engine.comm.device)
    if math.isinf(norm_type):
        total = _max_over_ranks(engine, norms.max())
    else:
        total = _sum_over_ranks(engine, (norms**norm_type).sum()) ** (1 / norm_type)
    total = total.to(dtype)
    clip_grads_with_norm_(params, max_norm, total)
    return total


def full_norms(grads: Any, norm_type: float = 2.0, *_: Any, **__: Any) -> Any:
    """What torch's clipping asks for: the norm of a gradient, or of each in a list, over the slices of all ranks.

    One all-reduce for each sharded model that they belong to. A gradient of no sharded model has its own norm.
    """
    if isinstance(grads, Tensor):
        return full_norms([grads], norm_type)[0]
    if not norm_type > 0:
        raise ValueError(f"norm_type must be greater than 0, not {norm_type}")
    norms = [_norm(grad, norm_type) for grad in grads]
    engines = [grad.engine() if hasattr(grad, "engine") else None for grad in grads]
    for engine in dict.fromkeys(engines):
        if engine is not None:
            engine.check_grads_final(engine.units)
            engine.promote_grads(engine.units)  # so that the scaling that follows is in full precision
            mine = [i for i, other in enumerate(engines) if other is engine]
            together = torch.stack([norms[i] for i in mine]).to(engine.comm.device)
            if math.isinf(norm_type):
                together = _max_over_ranks(engine, together)
            else:
                together = _sum_over_ranks(engine, together**norm_type) ** (1 / norm_type)
            for i, norm in zip(mine, together, strict=True):
                norms[i] = norm.to(grads[i].device)
    return [n.to(torch.promote_types(grad.dtype, torch.float32)) for n, grad in zip(norms, grads, strict=True)]


def any_overflow(grads: list[Tensor], found_inf: Tensor, _: Tensor) -> None:
    """What torch's GradScaler asks for: set `found_inf`, in place, if it is set on any rank."""
    for engine in dict.fromkeys(grad.engine() for grad in grads if hasattr(grad, "engine")):
        engine.check_grads_final(engine.units)
        found_inf.copy_(_max_over_ranks(engine, found_inf.to(engine.comm.device)))


def _norm(grad: Tensor, p: float) -> Tensor:
    """The p-norm of one slice, summed at least in float32, as a float64 scalar."""
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=grad.device)
    return torch.linalg.vector_norm(grad.to(torch.promote_types(grad.dtype, torch.float32)), p).double()


def _sum_over_ranks(engine: Engine, numbers: Tensor) -> Tensor:
    return engine.comm.all_reduce_scalar(numbers, dist.ReduceOp.SUM) if engine.stage > 0 else numbers


def _max_over_ranks(engine: Engine, numbers: Tensor) -> Tensor:
    return engine.comm.all_reduce_scalar(numbers, dist.ReduceOp.MAX) if engine.stage > 0 else numbers
