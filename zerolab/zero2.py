"""ZeRO stage 2: the gradients are sharded too.

Stage 1 reduced the gradient to the shard that this rank needs and kept the rest all the same. Here the rest goes,
unit by unit, while backward still runs. Nothing else changes.

Held per rank when backward returns, fp32 Adam: parameters 4Ψ + gradients 4Ψ/N + optimizer state 8Ψ/N bytes.
Moved per step and rank: 2Ψ(N-1)/N elements.
"""

from __future__ import annotations

from zerolab.engine.unit import Unit
from zerolab.zero1 import Zero1


class Zero2(Zero1):
    """P_os+g: optimizer state and gradients sharded (arXiv 1910.02054, section 5.2)."""

    stage = 2

    def post_backward(self, unit: Unit) -> None:
        """Once reduced, keep this rank's slice of the gradient."""
        super().post_backward(unit)
        unit.release_grad()
