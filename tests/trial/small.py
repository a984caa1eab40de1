"""An engine that is right, in some sixty lines: every rank holds everything, and gradients are averaged before use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.trial import Adapter


class Smallest(Adapter):
    """Data parallelism. Ranks tell each other what they are about to do, so a rank that does not do it is noticed."""

    stage = 0
    supports = frozenset({"accumulate", "full_state", "group", "broadcast", "some", "several", "parts", "whole"})
    supports |= {"bytes"}

    def wrap(self, model: nn.Module, units: Any, optimizer: Any, **asked: Any) -> None:
        self.group, self.model = asked.get("group"), model
        self.ranks, self.made, self.averaged = dist.get_world_size(self.group), [0, 0], False
        self.agree("wrap", [(name, p.shape, p.dtype) for name, p in self.named()])
        self.agree_on_frozen()
        self.broadcast()
        self.optimizer = optimizer(model)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def params(self) -> list[nn.Parameter]:
        return [p for _, p in self.named()]

    def agree(self, what: str, value: Any = None) -> None:
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, (what, value), group=self.group)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise RuntimeError(f"rank {rank} is at {other}, rank 0 at {everyone[0]}")

    def agree_on_frozen(self) -> None:
        self.agree("trained", [p.requires_grad for p in self.params()])

    def broadcast(self) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.made[0] += 1

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.made[1] += 1
        yield

    def used(self) -> list[int]:
        """For each parameter: how many ranks have a gradient."""
        flags = torch.tensor([p.grad is not None for p in self.params()]).int()
        dist.all_reduce(flags, group=self.group)
        return flags.tolist()

    def average(self) -> None:
        if self.averaged:
            return
        self.agree("average", self.made)
        self.agree_on_frozen()
        for param, ranks in zip(self.params(), self.used(), strict=True):
            if ranks:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                self.reduce(param.grad, ranks)
        self.averaged = True

    def reduce(self, grad: Tensor, ranks: int) -> None:
        dist.all_reduce(grad, group=self.group)
        grad /= self.ranks

    def step(self) -> None:
        self.average()
        self.agree("step", [{k: repr(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.averaged = False

    # -- state -------------------------------------------------------------------------------------------------------

    def full_state(self) -> dict[str, Tensor]:
        self.agree("full_state")
        return self.model.state_dict()


class Small(Smallest):
    """It clips, too, and has checkpoints."""

    supports = Smallest.supports | {"clip", "save"}

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        self.average()
        self.agree("clip", max_norm)
        return nn.utils.clip_grad_norm_(self.params(), max_norm, norm_type).item()

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "saved.pt")
        dist.barrier()

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "saved.pt", weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, state in optimizer["state"].items():  # torch has cast them to the parameter's dtype
            self.optimizer.state[params[number]].update(state)
