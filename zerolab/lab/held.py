"""What a rank holds: bytes, of a plain model or under torch's DDP, ZeroRedundancyOptimizer or FSDP2, and which bits."""

from __future__ import annotations

import zlib
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


def fingerprint(tensors: Iterable[Tensor], digits: int = 4) -> str:
    """Hexadecimal digits, 8 at most, that are the same only where every bit is (almost certainly)."""
    return f"{zlib.crc32(b''.join(t.detach().numpy().tobytes() for t in tensors)):08x}"[-digits:]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of a DTensor, as FSDP2's parameters are, only the part on this rank."""
    return sum(tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes for tensor in tensors)
