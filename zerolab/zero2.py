"""ZeRO stage 2: the gradients are sharded too.

Stage 1 averages only this rank's shard of the gradient, but keeps the full gradient in memory. Stage 2 releases it,
unit by unit, while backward is still running. Nothing else changes.

A rank holds, when backward returns, with Adam in fp32: parameters 4Ψ + gradients 4Ψ/N + optimizer state 8Ψ/N bytes.
It sends 2Ψ(N-1)/N elements per step.
"""

from __future__ import annotations

from zerolab.engine.unit import Unit
from zerolab.zero1 import Zero1


class Zero2(Zero1):
    """P_os+g: optimizer state and gradients are sharded (arXiv 1910.02054, section 5.2)."""

    stage = 2

    def post_backward(self, unit: Unit) -> None:
        """Once the gradient is reduced, keep only this rank's shard of it."""
        super().post_backward(unit)
        unit.bucket.release()
