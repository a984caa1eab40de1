"""ZeRO-3 whose parameters are gathered in int8 (qwZ of ZeRO++, arXiv 2306.10209)."""

from __future__ import annotations

from zerolab import Zero3
from zerolab.engine.unit import Unit
from zerolab.lab.lessons.lesson12.rounding import to_int8


class Int8Gathers(Zero3):
    """Shards stay in float32. A gather sends them rounded, with a scale for each block of 64."""

    prefetch = False  # which would start gathers past this method

    def gather(self, unit: Unit) -> None:
        if unit.gathered:
            return
        size = self.comm.world_size
        unit.full.untyped_storage().resize_(unit.full.numel() * 4)
        small, scales = to_int8(unit.shard.data, block=64)
        parts = [part.new_empty(size, *part.shape) for part in (small, scales)]
        for everyone, mine in zip(parts, (small, scales), strict=True):
            self.comm.all_gather(everyone.flatten(), mine.flatten(), unit.name).wait()
        rows = (parts[0] * parts[1]).view(size, -1)[:, : unit.shard.numel()]
        unit.full.data.copy_(rows.flatten())
        unit.gathered = True
