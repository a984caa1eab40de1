"""Gradient accumulation under no_sync: a rank's own gradients, kept back in the bucket until a backward outside.

Meanwhile `.grad` shows them, so that zero_grad() throws them away, as it would without sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.engine.shown import show_grad
from zerolab.engine.unit import Unit


class KeptBack:
    """What the bucket of `unit` keeps back."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        # Number of the parameter -> its `.grad`, the version of that, and whether it is a part of the bucket. (If not,
        # an earlier backward reduced it.)
        self._shown: dict[int, tuple[Tensor, int, bool]] = {}

    @property
    def is_shown(self) -> bool:
        """Whether some `.grad` still shows what was kept back."""
        return any(self.unit.params[i].grad is not None for i in self._shown)

    def show(self) -> None:
        """A backward under no_sync has ended: show this rank's own gradient, in its slice of each parameter."""
        unit, mine = self.unit, self.unit.bucket.full
        if mine is None:
            return
        if unit.sharded:
            mine = unit.layout.shard(mine, unit.rank)
        mine = mine.to(unit.master.device)
        for i, (param, part) in enumerate(zip(unit.params, unit.parts(mine), strict=True)):
            if unit.bucket.have[i]:
                if is_ours := param.grad is None:
                    show_grad(param, part)
                grad = param.grad
                assert grad is not None
                self._shown[i] = grad, grad._version, is_ours

    def resume(self) -> None:
        """Another backward begins: it adds to what was kept back, less what zero_grad() threw away."""
        if not self._shown:
            return
        unit, bucket = self.unit, self.unit.bucket
        for i, (grad, version, is_ours) in self._shown.items():
            param = unit.params[i]
            changed = grad._version != version
            if changed and grad.any():
                raise RuntimeError(
                    f"rank {unit.comm.rank}: the gradient of {unit.names[i]} was changed before it was reduced; "
                    "scale or clip gradients after a backward outside no_sync()"
                )
            if changed or param.grad is None:
                bucket.have[i] = False
            if is_ours and param.grad is grad:
                param.grad = None
        self._shown = {}
        bucket.lent = any(bucket.have)
        if bucket.lent:
            bucket.full = bucket.full.to(torch.promote_types(bucket.full.dtype, torch.float32))
        else:
            bucket.full = None
