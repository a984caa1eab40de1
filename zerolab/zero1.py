"""ZeRO stage 1: the optimizer state is sharded.

A rank needs the mean of only those gradients whose parameters it updates: its shard. So all-reduce becomes
reduce-scatter. After the step each rank has new values for its shard alone, and the shards are gathered.
An all-reduce is a reduce-scatter and an all-gather, so what moves is what DDP moved.

Held per rank when backward returns, fp32 Adam: parameters 4Ψ + gradients 4Ψ + optimizer state 8Ψ/N bytes.
Moved per step and rank: 2Ψ(N-1)/N elements.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerolab.ddp import DDP
from zerolab.engine.unit import Unit


class Zero1(DDP):
    """P_os: optimizer state sharded (Rajbhandari et al., arXiv 1910.02054, section 5.1)."""

    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """The optimizer sees this rank's slice of each parameter, and so keeps state for that alone."""
        return unit.layout.slices(unit.keep_shard(), unit.rank)

    def reduce(self, unit: Unit) -> Any:
        """Every rank gets the mean of its own shard, in place; the rest is this rank's own gradient, of no more use."""
        unit.grad = unit.layout.shard(unit.whole_grad, unit.rank)
        return self.comm.reduce_scatter(unit.grad, unit.whole_grad, unit.name)

    def after_step(self, unit: Unit) -> None:
        """The other ranks' shards are old now. They are gathered when a forward needs them."""
        self.stale.append(unit)

    def pre_forward(self, unit: Unit) -> None:
        """Gather in the order of `stale` until `unit` is new: ranks that need other units still make the same calls."""
        self.gather_stale(until=unit)
