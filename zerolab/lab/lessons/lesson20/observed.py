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
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger, peak_of


@torch.no_grad()
def far_from(one: nn.Module, model: nn.Module) -> float:
    """The largest difference of a gradient from that of the plain model `one`, relative to the largest in it.

    Gradients are gathered as their parameters are: by the parametrization.
    """
    off = []
    for path, module in model.named_modules():
        for name, made in getattr(module, "parametrizations", {}).items():
            want = one.get_parameter(f"{path}.{name}").grad
            assert want is not None
            off.append(((made[0](made.original.grad) - want).abs().max() / want.abs().max()).item())
    return max(off)


def observe(build: Callable[[], Engine | nn.Module], x: Tensor, y: Tensor) -> dict[str, float]:
    """Of one rank: bytes of parameters held and of collectives sent, calls, and, on rank 0, the peak of a step.

    build: makes the engine around a model, or a model without one. Bytes and calls are those of the first forward and
    backward; the peak is that of the second step, with AdamW, as the allocator saw it. gathered: full parameters that
    the engine has gathered, and still holds when forward returns.
    """
    seen: dict[str, float] = {}

    def measure() -> Callable[[], Any]:
        built = build()
        model = built.model if isinstance(built, Engine) else built
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        own = [to_local(param) for param in model.parameters()]
        seen["holds"] = sum(param.nbytes for param in own)
        if isinstance(built, Engine):
            kept = {param.untyped_storage()._cdata for param in own}
            with ledger(built) as book:
                loss = model(x, y)
                full = [unit.full.untyped_storage() for unit in built.units]
                seen["gathered"] = sum(storage.nbytes() for storage in full if storage._cdata not in kept)
                loss.backward()
            seen["sent"], seen["calls"] = book.moved, sum(not call.control for call in book.calls)
        else:
            with calls() as made:
                model(x, y).backward()
            seen["sent"], seen["calls"] = made.sent, len(made.calls)

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
