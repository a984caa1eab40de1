"""Bytes that this process has asked malloc for and not given back: all of torch's CPU memory, whoever holds it.

It counts what no Python object shows (buckets of a C++ reducer, saved activations) and, besides, everything else that
the process allocates: compare two moments, after `gc.collect()`, and models large enough that the rest does not matter.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def in_use() -> int | None:
    """Bytes in use now; None where malloc does not say (it does in glibc from 2.33 on)."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo
    info = ask()
    return info.uordblks + info.hblkhd


class Highest(TorchDispatchMode):
    """`bytes`: the most in use at the end of any of torch's operations in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = in_use() or 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, in_use() or 0)
        return result
