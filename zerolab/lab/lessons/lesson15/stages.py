"""A GPT in a pipeline (lesson 15)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.lessons.lesson15.pipeline import Paced, Pipeline
from zerolab.tasks.models import GPT


class GPTStage(nn.Module):
    """Block `rank` of a GPT; the first stage has the embeddings too, the last one the head."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        self.block, self.first, self.last = model.blocks[rank], rank == 0, rank == len(model.blocks) - 1
        if self.first:
            self.token, self.position = model.token, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        x = self.block(x)
        return self.head(self.norm(x)) if self.last else x


def gpt_pipeline(
    schedule: type[Pipeline],
    model: GPT,
    samples: tuple[Tensor, Tensor],
    rank: int,
    micro_batches: int,
    pace: float = 0.0,
) -> Pipeline:
    """A pipeline for `samples`, inputs and targets, a block on each rank. pace: seconds for one sample's forward."""
    tokens, targets = (part.chunk(micro_batches) for part in samples)
    stage: nn.Module = GPTStage(model, rank)
    if pace:
        stage = Paced(stage, pace * len(tokens[0]))

    def loss(logits: Tensor, m: int) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets[m].flatten())

    weight = model.head.weight
    return schedule(stage, tokens, loss, weight.new_empty(*tokens[0].shape, weight.shape[1]))
