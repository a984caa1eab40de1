"""Cases about numbers: train on the ranks, and in one process that averages the same gradients, and compare.

`train` and `alone` are the two loops. In a trial both compute in float64, where rounding is a million times smaller
than any mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.trial.case import Adapter, Broken, Case

WIDTH, WORDS = 8, 13


def noise(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head: words in, logits out."""

    def __init__(self, make: Any = Block, blocks: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.emb(tokens))))


class Numbers(Case):
    """The parameters after each step are those of one process that averages the ranks' gradients."""

    source = "Li et al., PyTorch Distributed, arXiv 2006.15704, section 3: the same model as without distribution"
    units: Any = (Block,)
    exact = (
        True  # in zerolab bit for bit, in float32; else within a tolerance, where a gradient is reduced in two parts
    )
    steps = 3
    micro = 1  # batches that make a step; all but the last inside `accumulate`
    every_size = False  # zerolab's own tests: also at 1 and 4 ranks
    stages: tuple[int, ...] = (0, 1, 2, 3)
    clip: tuple[float, float] | None = None  # the largest norm, and its p
    tolerance = 0.0  # more than the adapter's, where the optimizer itself rounds to bfloat16
    fails = False  # whether `before` meets an error

    def asked(self) -> dict[str, Any]:
        """Of `Adapter.wrap`."""
        return {name: True for name in ("precision", "scaler", "whole", "some") if name in self.needs}

    def model(self) -> Any:
        return Stack()

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(self, model: Any, rank: int, step: int) -> None:
        """Something done before each step."""

    def between(self) -> None:
        """One process has done it, and now the ranks will."""

    def after(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Something done after each step, such as a schedule's."""

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with in_float64():
            expected, losses = alone(self, ranks)
            self.between()
            adapter = make()
            adapter.wrap(build(self), self.units, self.optimizer, **self.asked())
            own = train(adapter, self)
            state = adapter.full_state()
            for name in {name for name, _ in build(self).named_buffers()} if rank else ():
                (
                    expected.pop(name, None),
                    state.pop(name, None),
                )  # each rank has its own; one process has kept the first rank's
        tolerance = max(self.tolerance, adapter.tolerance)
        return compare(expected, [row[rank] for row in losses], state, own, tolerance)


def build(case: Numbers) -> Any:
    torch.manual_seed(0)
    return case.model()


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


in_float64 = partial(by_default, torch.float64)


def alone(case: Numbers, ranks: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """One process: the mean of the ranks' gradients, in rank order; each rank has its own buffers."""
    model = build(case)
    optimizer = case.optimizer(model)
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(ranks)]
    losses: list[list[float]] = []
    for step in range(case.steps):
        grads = []
        losses.append([])
        for rank in range(ranks):
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers[rank][name])
            model.zero_grad()  # whose gradients are in `grads`: nothing may add to them
            case.before(model, rank, step)
            model.zero_grad()
            for batch in range(step * case.micro, (step + 1) * case.micro):
                loss = case.loss(model, rank, batch) / case.micro
                case.backward(loss)
                losses[-1].append(loss.item())
            grads.append([p.grad for p in model.parameters()])
            buffers[rank] = {name: b.clone() for name, b in model.named_buffers()}
        losses[-1] = losses[-1][case.micro - 1 :: case.micro]
        for param, own in zip(model.parameters(), zip(*grads, strict=True), strict=True):
            param.grad = None
            if any(g is not None for g in own):
                total = torch.zeros_like(param) if own[0] is None else own[0].clone()
                for grad in own[1:]:
                    total += 0 if grad is None else grad
                param.grad = total / ranks
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), *case.clip, foreach=False)
        optimizer.step()
        case.after(model, optimizer, step)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[0][name])
    return model.state_dict(), losses


def train(adapter: Adapter, case: Numbers, steps: range | None = None, group: Any = None) -> list[float]:
    """On ranks, with an engine. The loss of each step's last batch."""
    rank, losses = dist.get_rank(group), []
    for step in steps or range(case.steps):
        case.before(adapter.model, rank, step)
        if case.fails:
            adapter.recover()
        for batch in range(step * case.micro, (step + 1) * case.micro):
            with nullcontext() if (batch + 1) % case.micro == 0 else adapter.accumulate():
                loss = case.loss(adapter.model, rank, batch) / case.micro
                if type(case).backward is Numbers.backward:
                    adapter.backward(loss)
                else:
                    case.backward(loss)
        if case.clip:
            adapter.clip(*case.clip)
        adapter.step()
        case.after(adapter.model, adapter.optimizer, step)
        losses.append(loss.item())
    return losses


def compare(
    expected: dict[str, Tensor],
    expected_losses: list[float],
    state: dict[str, Tensor],
    losses: list[float],
    tolerance: float = 1e-7,
) -> str:
    """What was compared. Raises Broken at the first difference, losses before parameters."""
    rank = dist.get_rank()
    for step, (want, got) in enumerate(zip(expected_losses, losses, strict=True)):
        if not abs(got - want) <= tolerance * max(1.0, abs(want)):
            raise Broken(f"step {step}, rank {rank}: the loss is {got:.9g}, {want:.9g} in one process")
    if state.keys() != expected.keys():
        missing, more = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        raise Broken(f"the state dict lacks {missing[:3]} and has {more[:3]} that nobody asked for")
    worst, where = 0.0, ""
    for name, value in expected.items():
        if state[name].shape != value.shape:
            raise Broken(f"{name} has the shape {tuple(state[name].shape)}, {tuple(value.shape)} in one process")
        off = (state[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        if not off <= worst:  # NaN too
            worst, where = off, name
    if not worst <= tolerance:
        raise Broken(f"after {len(losses)} steps {where} is off by {worst:.2g}")
    return f"off by {worst:.1g} at most"
