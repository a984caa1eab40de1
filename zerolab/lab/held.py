"""What a rank holds of a plain model, or under torch's DDP, ZeroRedundancyOptimizer or FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def held_by(model: nn.Module, adam: Any) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, as `model_states` counts them for ours."""
    params = list(model.parameters())
    state = getattr(adam, "optim", adam).state  # ZeroRedundancyOptimizer has the rank's own optimizer inside
    return {
        "parameters": _bytes(params),
        "gradients": _bytes(param.grad for param in params if param.grad is not None),
        "optimizer": _bytes(value for kept in state.values() for value in kept.values()),
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of a DTensor, as FSDP2's parameters are, only the part on this rank."""
    return sum(tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes for tensor in tensors)
