"""A GPT in a pipeline (lesson 15): its stages, and linear layers that leave their weights' gradients for later."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.lessons.lesson15.pipeline import Clocked, Pipeline
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


def gpt_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all tokens, in the model's dtype. (`model(tokens, targets)` takes float32.)"""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


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
        stage = Clocked(stage, pace * len(tokens[0]))

    def loss(logits: Tensor, m: int) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets[m].flatten())

    weight = model.head.weight
    return schedule(stage, tokens, loss, weight.new_empty(*tokens[0].shape, weight.shape[1]))


class _Weight(torch.autograd.Function):
    """A promise: its backward computes the gradient of a linear layer's weight."""

    @staticmethod
    def forward(ctx, weight, x, grad):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, grad)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        x, grad = ctx.saved_tensors
        return grad.flatten(0, 1).T @ x.flatten(0, 1), None, None


class _Linear(torch.autograd.Function):
    """A linear layer whose backward gives the input's gradient, and appends a promise."""

    @staticmethod
    def forward(ctx, x, layer, bias, promises):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.layer, ctx.promises = layer, promises
        return F.linear(x, layer.weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        weight, (x,) = ctx.layer.weight, ctx.saved_tensors
        with torch.enable_grad():
            ctx.promises.append(_Weight.apply(weight, x.detach(), grad))
        of_bias = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        return grad @ weight, None, of_bias, None


def put_off_weights(stage: nn.Module, promises: list[Tensor]) -> None:
    """From now on, the backward of each linear layer in `stage` appends a promise of its weight's gradient.

    `torch.autograd.backward(promises)` computes them.
    """
    for layer in stage.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_computed, layer, promises)  # type: ignore[method-assign]


def _computed(layer: nn.Linear, promises: list[Tensor], x: Tensor) -> Tensor:
    return _Linear.apply(x, layer, layer.bias, promises)
