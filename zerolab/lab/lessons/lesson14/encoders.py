"""The encoder of a colleague's training loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zerolab.tasks.models import Block


class Encoder(nn.Module):
    """Word numbers (B, T), 0 for padding -> hidden states (B, T, width), each of the whole sentence. It has no head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(4096, width, padding_idx=0)
        self.position = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.token(words) + self.position(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x, (words != 0)[:, None, None, :])  # no word attends to padding
        return self.norm(x)
