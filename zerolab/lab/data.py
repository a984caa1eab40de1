"""Real data that needs no download."""

from __future__ import annotations

import torch
from torch import Tensor


def text() -> Tensor:
    """English prose from Python's standard library, the help texts of the language, as bytes: (465,000,) uint8 or so.

    The length differs between Python versions, and so do losses.
    """
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)


def batch(text: Tensor, rank: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Micro-batch of `rank` in `step`: tokens and the tokens that follow them, each (batch_size, context) int64.

    It depends on its arguments only, so whoever asks gets the same: a rank, or one process that plays all of them.
    """
    if len(text) <= context:
        raise ValueError(f"a text of {len(text)} bytes is too short for a context of {context}")
    generator = torch.Generator().manual_seed(4096 * step + rank)
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()  # (batch_size, context + 1)
    return windows[:, :-1], windows[:, 1:]
