"""zerolab: DDP and ZeRO stages 1, 2 and 3 behind one training loop, small enough to read.

    zerolab.init()
    zero = Zero3(model, units=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

To understand it, read ddp, zero1, zero2 and zero3, then engine/layout, unit and bucket, then comm/collectives. The
docstring of engine/ follows a gradient and a parameter through the rest.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zerolab.checkpoint import CheckpointError, export_weights, load, load_model_weights, read_extra, save
from zerolab.comm.collectives import Comm, Pending
from zerolab.comm.recording import Call
from zerolab.comm.waiting import CommError
from zerolab.ddp import DDP
from zerolab.engine.blockwise import declare_blockwise, declare_elementwise
from zerolab.engine.ema import EMA
from zerolab.engine.engine import Engine
from zerolab.engine.layout import Layout, Slot
from zerolab.engine.owner import OwnerOptimizer
from zerolab.engine.precision import Precision
from zerolab.engine.scaler import LossScaler
from zerolab.engine.slices import full_shape, full_tensor, to_local
from zerolab.engine.unit import Unit
from zerolab.world.environment import init
from zerolab.world.processes import RankError, Ranks, launch
from zerolab.zero1 import Zero1
from zerolab.zero2 import Zero2
from zerolab.zero3 import Zero3

__version__ = "0.1.0"

STAGES: tuple[type[Engine], ...] = (DDP, Zero1, Zero2, Zero3)


def shard(model: nn.Module, stage: int, **options: Any) -> Engine:
    """`DDP`, `Zero1`, `Zero2` or `Zero3` of `model`, by number; `options` are the class's."""
    return stage_class(stage)(model, **options)


def stage_class(stage: int) -> type[Engine]:
    """`DDP`, `Zero1`, `Zero2` or `Zero3`. A stage's number is what can be an index, but no truth value."""
    if isinstance(stage, bool) or not hasattr(stage, "__index__") or stage not in range(len(STAGES)):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    return STAGES[stage]


__all__ = [
    "DDP",
    "EMA",
    "STAGES",
    "Call",
    "CheckpointError",
    "Comm",
    "CommError",
    "Engine",
    "Layout",
    "LossScaler",
    "OwnerOptimizer",
    "Pending",
    "Precision",
    "RankError",
    "Ranks",
    "Slot",
    "Unit",
    "Zero1",
    "Zero2",
    "Zero3",
    "declare_blockwise",
    "declare_elementwise",
    "export_weights",
    "full_shape",
    "full_tensor",
    "init",
    "launch",
    "load",
    "load_model_weights",
    "read_extra",
    "save",
    "shard",
    "to_local",
]
