"""What a rank holds and sends in a step of a sharded model, and the peak of its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.lab.calls import calls
from zerolab.measure import ledger, peak_of


def observe(
    build: Callable[[str], tuple[Engine | None, nn.Module]], way: str, x: Tensor, y: Tensor
) -> dict[str, float]:
    """Of one rank: bytes of parameters held and of collectives sent, calls, and, on rank 0, the peak of a step.

    build: makes the model of a `way`, and the engine around it if there is one. Bytes and calls are those of the first
    forward and backward; the peak is that of the second step, with AdamW, as the allocator saw it.
    """
    seen: dict[str, float] = {}

    def measure() -> Callable[[], Any]:
        zero, model = build(way)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        seen["holds"] = sum(to_local(param).nbytes for param in model.parameters())
        if zero is None:
            with calls() as made:
                model(x, y).backward()
            seen["sent"], seen["calls"] = made.sent, len(made.calls)
        else:
            with ledger(zero) as book:
                model(x, y).backward()
            seen["sent"], seen["calls"] = book.moved, sum(not call.control for call in book.calls)

        def step() -> None:
            adam.step()
            adam.zero_grad()
            model(x, y).backward()

        return step

    gc.collect()  # or what is freed in the meantime would be taken off the peak
    if dist.get_rank() == 0:
        seen["peak"] = peak_of(measure, torch.device("cpu"), steps=1)
    else:
        measure()()
    return seen
