"""Stage 0, data parallelism: every rank holds everything, and the ranks average their gradients.

The four stages form a ladder. Each file holds one class, which overrides only what its stage changes. The engine calls
these methods for every unit, the first one once and the others in this order in every step:

    optimizer_params   once, at construction: what the optimizer sees
    pre_forward        before a unit's forward
    post_forward       after it
    pre_backward       when the first gradient reaches the unit's outputs
    post_backward      when all gradients of the unit have arrived
    reduce             called by post_backward: average the gradients over the ranks
    after_step         after the optimizer's step

A stage is a choice of placements, and a collective is what changes one: replicated, R, every rank has all; sharded, S,
each has its slice; partial, P, each has its own gradient, of which all need the mean.

              parameters in                     gradients             the optimizer's
              forward        backward           reduced    kept       parameters and state
    DDP       R              R                  P -> R     R          R
    Zero1     S -> R         R                  P -> S     R          S
    Zero2     S -> R         R                  P -> S     S          S
    Zero3     S -> R -> S    S -> R -> S        P -> S     S          S

P -> R is an all-reduce, P -> S a reduce-scatter, S -> R an all-gather, and R -> S only gives memory back.

With Ψ parameters on N ranks and Adam in fp32, a rank holds, when backward returns:
parameters 4Ψ + gradients 4Ψ + optimizer state 8Ψ = 16Ψ bytes. It sends 2Ψ(N-1)/N elements per step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit


class DDP(Engine):
    """Parameters, gradients and optimizer state are replicated (Li et al., arXiv 2006.15704)."""

    stage = 0

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """The optimizer sees full parameters."""
        return unit.layout.views(unit.master)

    def pre_forward(self, unit: Unit) -> None:
        """The full parameters are there already."""

    def post_forward(self, unit: Unit) -> None:
        """They stay."""

    def pre_backward(self, unit: Unit) -> None:
        """They are still there."""

    def post_backward(self, unit: Unit) -> None:
        """Start averaging the gradients; meanwhile backward continues with the units before this one."""
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit: Unit) -> Any:
        """Every rank gets the full mean."""
        unit.bucket.grad = unit.bucket.full
        return self.comm.all_reduce(unit.bucket.grad, unit.name)

    def after_step(self, unit: Unit) -> None:
        """Every rank took the same step with the same numbers. Only a bf16 copy needs updating."""
        unit.cast()
