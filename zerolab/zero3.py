"""ZeRO stage 3: the parameters are sharded too.

A rank keeps only its shard. A unit's full parameters are gathered before its forward and again before its backward, and
released after each. The root unit holds what forward needs first and last, so backward begins with it. It stays
gathered from its forward to its reduction, which saves one gather.

A rank holds, when backward returns, with Adam in fp32: (4Ψ + 4Ψ + 8Ψ)/N bytes.
It sends (3Ψ - Ψ_root)(N-1)/N elements per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.engine.unit import Unit
from zerolab.zero2 import Zero2


class Zero3(Zero2):
    """P_os+g+p: optimizer state, gradients and parameters are sharded (arXiv 1910.02054, section 5.3)."""

    stage = 3

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """As in stage 1, but the shard gets storage of its own, so that the full parameters can be released."""
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        self.gather(unit)

    def post_forward(self, unit: Unit) -> None:
        """Release the unit; backward gathers it again. The root stays if a backward can follow: it begins there."""
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()

    def pre_backward(self, unit: Unit) -> None:
        self.gather(unit)

    def post_backward(self, unit: Unit) -> None:
        """Release the parameters first: the reduction needs memory."""
        unit.release()
        self.prefetch_next()
        super().post_backward(unit)

    def after_step(self, unit: Unit) -> None:
        """Gathered parameters are stale now."""
        unit.release()
