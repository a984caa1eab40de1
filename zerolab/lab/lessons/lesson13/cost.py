"""What a training step costs in each stage: bytes that a rank holds at its peak, and bytes that it sends."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import zerolab
from zerolab.measure import ledger, timeline
from zerolab.tasks.data import digits
from zerolab.tasks.models import ResidualBlock, ResNet


def cost_of_step(stage: int, images: int) -> tuple[int, int]:
    """The second step of AdamW on a ResNet of four blocks of 64 channels: (peak, sent), in bytes of this rank.

    images: how many digits there are in each rank's batch. Call it on all ranks.
    """
    data = digits()
    torch.manual_seed(0)
    zero = zerolab.shard(ResNet(layers=4, width=64), stage, units=[ResidualBlock])
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)

    def step() -> None:
        logits = zero.model(data.inputs[:images] / 255)
        F.cross_entropy(logits, data.targets[:images]).backward()
        adam.step()
        adam.zero_grad()

    step()  # creates the optimizer state
    with timeline(zero, adam) as line, ledger(zero) as book:
        step()
    return line.peak, book.moved
