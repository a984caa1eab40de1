"""ZeRO stage 3: the parameters are sharded too.

A rank keeps its shard. The whole parameters of a unit are gathered before its forward and again before its backward,
and released after each. The root unit holds what is needed first in forward and last in backward, and first in backward
again: it stays from its forward to its reduction, which saves one gather of it.

Held per rank when backward returns, fp32 Adam: (4Ψ + 4Ψ + 8Ψ)/N bytes.
Moved per step and rank: (3Ψ - Ψ_root)(N-1)/N elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.engine.unit import Unit
from zerolab.zero2 import Zero2


class Zero3(Zero2):
    """P_os+g+p: optimizer state, gradients and parameters sharded (arXiv 1910.02054, section 5.3)."""

    stage = 3

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """As before, but the shard gets storage of its own, so that the whole can come and go."""
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        self.gather(unit)

    def post_forward(self, unit: Unit) -> None:
        """Backward will gather again; the root's begins at once, so it may stay if there is to be a backward."""
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()

    def pre_backward(self, unit: Unit) -> None:
        self.gather(unit)

    def post_backward(self, unit: Unit) -> None:
        """Let the parameters go before the reduction needs memory."""
        unit.release()
        self.prefetch_next()
        super().post_backward(unit)

    def after_step(self, unit: Unit) -> None:
        """What is gathered is old."""
        unit.release()
