"""Gradients that have a graph of their own (create_graph=True), gone through once more by the backward that counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from habits import Block, Model, batch
from jobs_common import worlds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zerolab


def gradient(output: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), of, create_graph=True)[0]


def penalty_alone(model: Model, x: Tensor) -> Tensor:
    x.requires_grad_()
    return gradient(model(x).square(), x).norm(dim=1).mean()


def of_an_activation(model: Model, x: Tensor) -> Tensor:
    """The gradient at what the first block returned, beside the loss."""
    inner: list[Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: inner.append(output))
    output = model(x)
    handle.remove()
    return output.square().mean() + gradient(output.square(), inner[0]).square().mean()


def third_order(model: Model, x: Tensor) -> Tensor:
    x.requires_grad_()
    once = gradient(model(x), x)
    return gradient(once.square(), x).square().mean()


def recomputed(model: Model, x: Tensor) -> Tensor:
    x.requires_grad_()
    y = model.first(x)
    for block in model.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    return model.head(y).square().mean() + gradient(model.head(y).square(), x).square().mean()


LOSSES: list[Callable[[Model, Tensor], Tensor]] = [penalty_alone, of_an_activation, third_order, recomputed]


def losses(model: Any, ranks: list[int]) -> list[dict[str, Tensor | None]]:
    """The gradients after a backward of each loss, the mean over `ranks`."""
    found = []
    for loss in LOSSES:
        model.zero_grad()
        (sum(loss(model, batch(rank, 1)) for rank in ranks) / len(ranks)).backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        found.append({name: grad if grad is None else zerolab.full_tensor(grad) for name, grad in grads.items()})
    return found


def built(stage: int | None) -> Model:
    torch.manual_seed(5)
    model = Model().double()
    if stage is not None:
        zerolab.shard(model, stage, units=[Block])
    return model


def on_ranks(stage: int) -> list[dict[str, Tensor | None]]:
    return losses(built(stage), [dist.get_rank()])


def refused_and_again() -> list[Any]:
    """A backward that would leave gradients with a graph, then an ordinary one: what is said, the gradients."""
    results: list[Any] = []
    for stage in range(3):
        model = built(stage)
        with pytest.raises(NotImplementedError) as error:
            model(batch(dist.get_rank(), 1)).square().mean().backward(create_graph=True)
        model(batch(dist.get_rank(), 1)).square().mean().backward()
        results.append((str(error.value), [zerolab.full_tensor(p.grad) for p in model.parameters()]))
    return results


@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
def test_gradients_of_gradients(ranks: Any, n: int) -> None:
    expected = losses(built(None), list(range(n)))
    for stage in range(3):
        for got in ranks.run(on_ranks, stage, ranks=n):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_after_a_refusal_all_is_as_before(ranks: Any) -> None:
    model = built(None)
    (sum(model(batch(rank, 1)).square().mean() for rank in range(2)) / 2).backward()
    for rank, stages in enumerate(ranks.run(refused_and_again, ranks=2)):
        for said, grads in stages:
            assert f"rank {rank}: backward(create_graph=True) would leave" in said
            torch.testing.assert_close(grads, [p.grad for p in model.parameters()])
