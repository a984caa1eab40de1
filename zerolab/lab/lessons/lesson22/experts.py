"""A layer's experts, on the rows that have chosen them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Experts(nn.ModuleList):
    """Some of a layer's experts: (R, C) -> (R, C). local (R,), int64: which of them each row is for.

    All are called, even without rows.
    """

    def forward(self, rows: Tensor, local: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self):
            places = (local == number).nonzero().flatten()
            out = out.index_copy(0, places, expert(rows[places]))
        return out
