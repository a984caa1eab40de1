"""Stage 0, data parallel: every rank holds everything, and gradients are averaged.

The four stages are one ladder. Each file holds one class, which says what changes from the one before; the engine
calls these methods, in this order in every step, for every unit:

    optimizer_params   once, at construction: what the optimizer sees
    pre_forward        before a unit's forward
    post_forward       after it
    pre_backward       when the first gradient reaches the unit's outputs
    post_backward      when all gradients of the unit are there
    reduce             from post_backward: average the gradient over the ranks
    after_step         after the optimizer's step

Held per rank when backward returns, fp32 Adam: parameters 4Ψ + gradients 4Ψ + optimizer state 8Ψ = 16Ψ bytes.
Moved per step and rank: 2Ψ(N-1)/N elements.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit


class DDP(Engine):
    """Parameters, gradients and optimizer state replicated (Li et al., arXiv 2006.15704)."""

    stage = 0

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """The optimizer sees whole parameters."""
        return unit.layout.wholes(unit.master)

    def pre_forward(self, unit: Unit) -> None:
        """The whole parameters are there already."""

    def post_forward(self, unit: Unit) -> None:
        """And they stay."""

    def pre_backward(self, unit: Unit) -> None:
        """Backward needs what forward needed, and it is still there."""

    def post_backward(self, unit: Unit) -> None:
        """Average the gradients, while backward goes on with the units before this one."""
        if self.reduces(unit):
            unit.reduction = self.reduce(unit)

    def reduce(self, unit: Unit) -> Any:
        """Every rank gets the whole mean."""
        unit.grad = unit.whole_grad
        return self.comm.all_reduce(unit.grad, unit.name)

    def after_step(self, unit: Unit) -> None:
        """Every rank made the same step with the same numbers; only a bf16 copy has to follow."""
        unit.cast()
