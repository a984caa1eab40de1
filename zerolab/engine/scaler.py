"""Loss scaling for float16, whose smallest number is 6e-8. Most gradients of a small loss are smaller.

So the loss is multiplied by a large scale before backward, and the gradients are divided by it before the step. The
scale is found by trial: if a gradient overflows, the step is skipped and the scale halved; after `growth_interval`
good steps it is doubled (Micikevicius et al., arXiv 1710.03740, section 3.2).

In stages 1 to 3 a rank sees only its slice of the averaged gradients. An overflow in another rank's slice must stop it
too, or some ranks would step and others not, with different scales from then on. So the ranks decide together.

    scaler = zerolab.LossScaler(zero)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)            # only needed before clipping
    zero.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.engine.step import owners_of
from zerolab.engine.unit import Unit


class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a sharded model, with the same numbers and the same decision on every rank.

    zero: the sharded model; options: those of `GradScaler` (init_scale, growth_factor, backoff_factor,
    growth_interval, enabled). Its `state_dict()` is JSON, so `zerolab.save` can store it as an extra.
    """

    def __init__(self, zero: Engine, **options: Any) -> None:
        super().__init__(zero.comm.device.type, **options)
        self.zero = zero

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()`, unless a gradient on some rank is not finite."""
        result = super().step(optimizer, *args, **kwargs)
        for unit in self._units(optimizer):  # whether the step was made or skipped
            unit.bucket.demote()
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale in float32. Gradients in float32 answer GradScaler for all ranks (shown.py)."""
        units = self._units(optimizer)
        self.zero.promote_grads(units)
        if self.zero.offload:
            # The gradients are on the host. torch would copy these there without waiting for the copies.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _units(self, optimizer: Optimizer) -> list[Unit]:
        """The units of the model that `optimizer` updates."""
        owners = owners_of(optimizer)
        if owners.keys() - {self.zero}:
            raise RuntimeError(f"this {type(optimizer).__name__} also updates a model other than this LossScaler's")
        return owners.get(self.zero, [])
