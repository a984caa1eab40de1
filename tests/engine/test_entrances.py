"""Backward may come into a unit by other ways than its outputs: by what a hook, a list or a retained graph keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import all_say, attempt
from torch import Tensor, nn

import zerolab
from zerolab.measure import ledger

WIDTH = 6


class Block(nn.Module):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Tanh(), nn.Linear(WIDTH + 3, WIDTH)
        self.same, self.kept, self.own = nn.Identity(), kept, []  # the first list is the whole model's

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(x)
        inner = self.up(self.act(self.up(x)[..., :WIDTH]))
        self.kept.append(inner.square().mean())
        self.own[:] = [inner.mean()]
        return x + self.down(self.act(inner))


class Model(nn.Module):
    """The blocks, each `times` in a row. `cut`: what comes before the last block gets no gradient from its outputs."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(self.kept) for _ in range(3))
        self.times, self.cut = times, False

    def forward(self, x: Tensor) -> Tensor:
        self.kept.clear()
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.cut and i == 2:
                x = x.detach()
            for _ in range(self.times):
                x = block(x)
        return self.head(x).square().mean()


def entered_by(way: str, stage: int | None, inputs: list[Tensor], units: Any = Block) -> Any:
    """The gradients of each step, of one process, or of a rank. If backward was refused, the error."""
    torch.manual_seed(0)
    model = Model(3 if way == "a retained graph" else 1).double()
    zero = None if stage is None else zerolab.shard(model, stage, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        features["inner"] = output

    def keep_input(module: nn.Module, args: Any) -> None:
        features["inner"] = args[0].sin()  # made inside of the block, by no module of it

    if way == "a hook":
        model.blocks[1].act.register_forward_hook(keep)
    elif way == "no way that can be seen":
        model.blocks[1].down.register_forward_pre_hook(keep_input)
    steps = []
    for number in range(3):  # the second step is the first in which backward gathers ahead
        model.cut = number == 2 and way != "a retained graph"
        optimizer.zero_grad()
        losses = []
        for x in inputs:
            main = model(x)
            kept = features["inner"].square().mean() if features else sum(model.kept)
            kept = sum(block.own[0] for block in model.blocks) if way == "own lists" else kept
            losses.append((main, kept))
        main, kept = (sum(column) / len(inputs) for column in zip(*losses, strict=True))
        if way == "a retained graph":
            main.backward(retain_graph=True)
            (main / 2).backward()
        elif "list" in way:
            main.backward(retain_graph=True)
            kept.backward()
        elif caught := attempt((main + kept if model.cut else main).backward):
            return caught
        grads = [param.grad for param in model.parameters()]
        steps.append([None if g is None else zerolab.full_tensor(g).clone() if zero else g.clone() for g in grads])
        optimizer.step()
    return steps


def as_rank(way: str, stage: int, units: type[nn.Module] | list[type[nn.Module]] = Block) -> Any:
    return entered_by(way, stage, [inputs(torch.distributed.get_rank())], units)


def inputs(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def all_agree(everyone: list[Any], way: str) -> None:
    """The ranks' gradients are those of one process."""
    expected = entered_by(way, None, [inputs(rank) for rank in range(len(everyone))])
    for steps in everyone:
        for grads, right in zip(steps, expected, strict=True):
            for grad, one in zip(grads, right, strict=True):
                assert (grad is None and one is None) or torch.allclose(grad, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["a hook", "a shared list", "own lists", "a retained graph"])
def test_backward_comes_in_by(ranks, way, stage):
    all_agree(ranks.run(as_rank, way, stage, ranks=2), way)


def gathered_in_backward() -> tuple[list[str], int]:
    """The units, in one backward of everything that was kept; how many hooks a module has after five forwards."""
    model, seen = Model(1), []
    zero = zerolab.Zero3(model, units=Block)
    for block in model.blocks:
        for module in (block.same, block.act):  # the first returns its input, which backward reaches last
            module.register_forward_hook(lambda module, args, output: seen.append(output.square().mean()))
    for _ in range(5):
        seen.clear()
        main = model(inputs(zero.rank).float())
        with ledger(zero) as book:
            (main + sum(seen) + sum(model.kept)).backward()
    return [call.unit for call in book.calls if call.op == "all_gather" and not call.control], len(
        block.act._forward_hooks
    )


def test_every_unit_is_gathered_once_in_backward(ranks):
    for units, hooks in ranks.run(gathered_in_backward, ranks=2):
        assert units == ["blocks.2", "blocks.1", "blocks.0"] and hooks == 2


def test_backward_into_a_unit_that_is_still_being_gathered_is_refused(ranks):
    """Its numbers would be made of whatever the memory held. What the error advises is right."""
    way = "no way that can be seen"
    caught = ranks.run(as_rank, way, 3, ranks=2)
    all_say(caught, "RuntimeError", "a gradient reached blocks.1.", "while blocks.1 was still being gathered", "units=")
    all_agree(ranks.run(as_rank, way, 2, ranks=2), way)
    all_agree(ranks.run(as_rank, way, 3, [Block, nn.Linear], ranks=2), way)
