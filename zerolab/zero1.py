"""ZeRO stage 1: the optimizer state is sharded.

A rank updates only its shard, so it needs only its shard of the mean gradients: the all-reduce becomes a
reduce-scatter. After the step each rank has new values for its shard alone, so the shards are all-gathered. An
all-reduce is a reduce-scatter followed by an all-gather, so this moves what DDP moved.

A rank holds, when backward returns, with Adam in fp32: parameters 4Ψ + gradients 4Ψ + optimizer state 8Ψ/N bytes.
It sends 2Ψ(N-1)/N elements per step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerolab.ddp import DDP
from zerolab.engine.unit import Unit


class Zero1(DDP):
    """P_os: the optimizer state is sharded (Rajbhandari et al., arXiv 1910.02054, section 5.1)."""

    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """The optimizer sees this rank's slice of each parameter, so it keeps state only for that slice."""
        return unit.layout.slices(unit.keep_shard(), unit.rank)

    def reduce(self, unit: Unit) -> Any:
        """Every rank gets the mean of its shard, written into that part of the full gradient."""
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, unit.rank)
        return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)

    def after_step(self, unit: Unit) -> None:
        """The other ranks' shards are stale now. The next forward gathers them, unit by unit."""
        self.stale.append(unit)

    def pre_forward(self, unit: Unit) -> None:
        """Gather stale units in order until `unit` is fresh: ranks that use other units still make the same calls."""
        self.gather_stale(until=unit)
