"""Optimizers that look at whole parameters, models for them, and training with them on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference
import torch
import torch.nn.functional as F
from jobs_common import rank_ordered_mean
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

import zerolab
from zerolab import OwnerOptimizer, Precision


class Shampoo(Optimizer):
    """Per matrix: factors of the left and of the right, whose shapes are not the matrix's (arXiv 1802.09568)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.reshape(p.shape[0], -1), self.state[p]
                if not state:
                    state["factors"] = [torch.eye(n) * 1e-3 for n in grad.shape]
                    state["steps"] = 0
                state["steps"] += 1
                for factor, moment in zip(state["factors"], (grad @ grad.T, grad.T @ grad), strict=True):
                    factor += moment
                left, right = (_root(factor) for factor in state["factors"])
                p.add_((left @ grad @ right).view(p.shape), alpha=-group["lr"])


def _root(factor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    return vectors * values.clamp(min=1e-6).pow(-0.25) @ vectors.T


class Lamb(Optimizer):
    """Per layer: Adam's step, as long as the layer's weights (arXiv 1904.00962). Counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                mean, square = (
                    state["mean"] / (1 - 0.9 ** group["steps"]),
                    state["square"] / (1 - 0.99 ** group["steps"]),
                )
                update = mean / (square.sqrt() + 1e-6)
                trust = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else 1.0
                p.sub_(group["lr"] * trust * update)


class Odd(nn.Module):
    """Tied weights, a frozen matrix, one that nobody uses, a channels_last convolution, a scalar, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(reference.VOCABULARY, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7)) for _ in range(3))
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3, 7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5, 9))
        self.head = nn.Linear(7, reference.VOCABULARY)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = h + block(h)
        image = self.conv(h[..., :3].transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, 4)).square().mean()
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        return loss + image * self.scale + 0 * self.frozen.sum()


def blocks(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    taken = {id(p) for p in blocks(model)}
    return [p for p in model.parameters() if id(p) not in taken]


Wrap = Callable[..., Optimizer]


def muon_and_adamw(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    return [wrap(blocks(model), Muon, lr=0.02), AdamW(rest(model), lr=1e-2)]


def muon_in_groups(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    """Another rate for one half, by a schedule; the schedule steps with the optimizer."""
    half = len(blocks(model)) // 2
    groups = [{"params": blocks(model)[:half]}, {"params": blocks(model)[half:], "lr": 0.05, "weight_decay": 0.0}]
    optimizers = [wrap(groups, Muon, lr=0.02), AdamW(rest(model), lr=1e-2)]
    for optimizer in optimizers:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
    return optimizers


def shampoo_and_adamw(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [wrap(matrices, Shampoo), AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2)]


def lamb(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    return [wrap(model.parameters(), Lamb)]


def adafactor(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    return [wrap(model.parameters(), torch.optim.Adafactor, lr=0.01)]


def one_matrix(model: nn.Module, wrap: Wrap) -> list[Optimizer]:
    """All ranks but one own nothing."""
    first = blocks(model)[:1]
    return [wrap(first, Lamb), AdamW([p for p in model.parameters() if p is not first[0]], lr=1e-2)]


def plain(params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> Optimizer:
    return optimizer_class(params, **defaults)


@dataclass(frozen=True)
class Way:
    """How to train: `make` builds the optimizers."""

    make: Callable[[nn.Module, Wrap], list[Optimizer]] = muon_and_adamw
    model: type[nn.Module] = reference.Model
    units: type[nn.Module] = reference.Block
    precision: Precision | None = None
    micro_batches: int = 1  # all but the last under no_sync
    clip: float | None = None
    mesh: tuple[int, int] | None = None
    steps: int = 3


def build(way: Way, stage: int, **options: Any) -> tuple[zerolab.Engine, list[Optimizer]]:
    torch.manual_seed(7)
    mesh = way.mesh if stage else None
    zero = zerolab.shard(way.model(), stage, units=[way.units], precision=way.precision, mesh=mesh, **options)
    return zero, way.make(zero.model, OwnerOptimizer)


def step(way: Way, zero: zerolab.Engine, optimizers: list[Optimizer], number: int) -> None:
    for micro in range(way.micro_batches - 1):
        with zero.no_sync():
            zero.model(*reference.batch(zero.rank, 100 + 10 * number + micro)).backward()
    zero.model(*reference.batch(zero.rank, number)).backward()
    if way.clip is not None:
        zero.clip_grad_norm_(way.clip)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(way: Way, stage: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    zero, optimizers = build(way, stage)
    for number in range(way.steps):
        step(way, zero, optimizers, number)
    return zero.full_state_dict(), optimizers[0].owners()


def alone(way: Way, ranks: int) -> dict[str, Tensor]:
    """One process, plain classes: the mean of the ranks' gradients, in rank order (with a mesh, of the replicas')."""
    torch.manual_seed(7)
    model = way.model()
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    holder = way.model()  # the optimizer's parameters: the masters under their names
    for (name, p), (_, own) in zip(holder.named_parameters(), model.named_parameters(), strict=True):
        p.data, p.requires_grad = masters[name], own.requires_grad
    if way.precision:
        model = model.to(way.precision.compute)
    optimizers = way.make(holder, plain)
    for number in range(way.steps):
        for name, p in model.named_parameters():
            p.data.copy_(masters[name])
        rows = []
        for rank in range(ranks):
            model.zero_grad()
            for micro in range(way.micro_batches - 1):
                model(*reference.batch(rank, 100 + 10 * number + micro)).backward()
            model(*reference.batch(rank, number)).backward()
            rows.append([p.grad for p in model.parameters()])
        replicas = way.mesh[0] if way.mesh else 1
        share = ranks // replicas
        rows = [_mean(rows[r * share : (r + 1) * share]) for r in range(replicas)]
        for p, grad in zip(holder.parameters(), _mean(rows), strict=True):
            p.grad = None if grad is None else grad.float()
        if way.clip is not None:
            nn.utils.clip_grad_norm_(holder.parameters(), way.clip)
        for optimizer in optimizers:
            optimizer.step()
    return masters


def _mean(rows: list[list[Tensor | None]]) -> list[Tensor | None]:
    return [None if own[0] is None else rank_ordered_mean(list(own)) for own in zip(*rows, strict=True)]
