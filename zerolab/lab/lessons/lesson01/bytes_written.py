"""What a collective really writes, by the kernel's count of this process."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch.distributed as dist


def written(collective: Callable[[], object]) -> float | None:
    """Call `collective` on all ranks; the bytes that this process wrote meanwhile, to sockets too.

    None where nobody counts them: anywhere but on Linux, where the kernel keeps its counts to itself, and for NCCL,
    which writes to no file.
    """
    dist.barrier()
    before = _counted()
    collective()
    dist.barrier()
    after = _counted()
    return None if before is None or after is None or "gloo" not in dist.get_backend() else after - before


def _counted() -> int | None:
    try:
        return int(psutil.Process().io_counters().write_chars)
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None
