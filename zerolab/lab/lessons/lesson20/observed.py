"""What a rank holds and sends in a step of a sharded model, compared with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.lab.activations import saved
from zerolab.lab.lessons.lesson20.gather_again import kept_bytes
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger
from zerolab.tasks.data import batch


def by_one_process(model: nn.Module, words: Tensor, ranks: int = 4) -> nn.Module:
    """The same model, with the mean of the gradients of all ranks' samples."""
    for rank in range(ranks):
        (model(*batch(words, rank, 0, 2, 64)) / ranks).backward()
    return model


def observe(built: Engine | nn.Module, one: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """A forward and a backward of an engine, or of a model whose parameters are parametrized.

    holds: bytes of parameters on this rank. sent, calls: its collectives. gathered: bytes of full parameters that are
    held besides when forward returns. same: the gradients are those of the plain model `one`; of an engine it is not
    asked.
    """
    if isinstance(built, Engine):
        return _of_an_engine(built, x, y)
    holds = sum(_own(param).nbytes for param in built.parameters())
    activations = _kept_by(one, x, y)
    with calls() as book, saved(built) as kept:
        loss = built(x, y)
        released = kept_bytes(built)
        gathered = (kept.peak if released is None else released) - activations
        loss.backward()
    same = _far_from(one, built) < 1e-5
    return {"holds": holds, "sent": book.sent, "calls": len(book.calls), "gathered": gathered, "same": same}


def bars(seen: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For a picture: of each way, in MB, the parameters that a rank holds and those that it has gathered besides."""
    kinds = {"parameters": "holds", "gathered parameters": "gathered"}
    return {way: {kind: of[name] / 1e6 for kind, name in kinds.items()} for way, of in seen.items()}


def _of_an_engine(zero: Engine, x: Tensor, y: Tensor) -> dict[str, Any]:
    own = [to_local(param) for param in zero.model.parameters()]
    ours = {param.untyped_storage()._cdata for param in own}
    with ledger(zero) as book:
        loss = zero.model(x, y)
        full = [unit.full.untyped_storage() for unit in zero.units]
        gathered = sum(storage.nbytes() for storage in full if storage._cdata not in ours)
        loss.backward()
    number = sum(not call.control for call in book.calls)
    return {"holds": sum(param.nbytes for param in own), "sent": book.moved, "calls": number, "gathered": gathered}


def _own(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _kept_by(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that autograd keeps of a forward of a plain model, its parameters left out: activations."""
    with saved(model) as kept:
        model(x, y)
    return kept.peak


@torch.no_grad()
def _far_from(one: nn.Module, model: nn.Module) -> float:
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
