"""What lesson 23 updates with: Adam that stores its averages as it is told, and ZeRO-1 whose shards end anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from zerolab.engine.slices import to_local
from zerolab.tasks.data import batch


class StoredAdam(Optimizer):
    """Adam that keeps of its averages, flat, what `store` returns, codes and scales; `restore` makes floats of them.

    Of the second it keeps the root, whose range is narrower. Where that root was rounded to 0 and the gradient is
    small, m / root has no bound, so no element moves by more than the learning rate.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        store: Callable[[Tensor], tuple[Tensor, Tensor]],
        restore: Callable[[Tensor, Tensor], Tensor],
        lr: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.store, self.restore = store, restore

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    self._update(param, param.grad.flatten(), self.state[param], group["lr"])

    def _update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], lr: float, b1: float = 0.9, b2: float = 0.95
    ) -> None:
        m = root = torch.zeros_like(grad)
        if state:
            m, root = self.restore(state["m"], state["m_scale"]), self.restore(state["root"], state["root_scale"])
        t = state["t"] = state.get("t", 0) + 1
        m = b1 * m + (1 - b1) * grad
        root = (b2 * root**2 + (1 - b2) * grad**2).sqrt()
        step = (m / (1 - b1**t)) / (root / (1 - b2**t) ** 0.5 + 1e-8)
        param -= lr * step.clamp(-1, 1).view_as(param)
        state["m"], state["m_scale"] = self.store(m)
        state["root"], state["root_scale"] = self.store(root)


def four_steps(model: nn.Module, adam: Any, words: Tensor, *ranks: int) -> list[Tensor]:
    """Train, each step on the mean of the gradients of these ranks' samples.

    Returns what this rank has of all parameters, flat, after each step.
    """
    after = []
    for number in range(4):
        for rank in ranks:
            model(*batch(words, rank, number, 2, 64)).backward()
        for param in model.parameters() if len(ranks) > 1 else ():
            assert param.grad is not None
            param.grad /= len(ranks)
        adam.step()
        model.zero_grad()
        after.append(torch.cat([to_local(param).detach().flatten() for param in model.parameters()]))
    return after


class Ragged:
    """ZeRO-1: rank r of `group` updates elements borders[r] to borders[r + 1] of all parameters of `model`, flat."""

    def __init__(
        self,
        model: nn.Module,
        borders: Sequence[int],
        group: Any,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        self.params, self.borders, self.group = [*model.parameters()], borders, group
        self.flat = parameters_to_vector(self.params).detach()
        first, last = borders[dist.get_rank(group) :][:2]
        self.pieces: list[tuple[nn.Parameter, nn.Parameter, slice]] = []  # a view of `flat`, and of what it is a part
        start = 0
        for param in self.params:
            a, b = max(first, start), min(last, start + param.numel())
            if a < b:
                self.pieces.append((nn.Parameter(self.flat[a:b]), param, slice(a - start, b - start)))
            start += param.numel()
        self.optimizer = make_optimizer([piece for piece, *_ in self.pieces])

    @torch.no_grad()
    def step(self) -> None:
        for piece, param, part in self.pieces:
            assert param.grad is not None
            piece.grad = param.grad.flatten()[part]
        self.optimizer.step()
        for owner, (a, b) in enumerate(pairwise(self.borders)):
            dist.broadcast(self.flat[a:b], group=self.group, group_src=owner)
        for param, now in zip(self.params, self.flat.split([param.numel() for param in self.params]), strict=True):
            param.copy_(now.view_as(param))
