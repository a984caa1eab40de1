"""Backward may come into a unit by other ways than its outputs: by what a hook, a list or a retained graph keeps."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs_common import all_say, attempt, worlds
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import zerolab
from zerolab.measure import ledger

WIDTH = 6
OUTSIDE: list[Tensor] = []  # the engine sees no list that is nobody's attribute


class Block(nn.Module):
    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Tanh(), nn.Linear(WIDTH + 3, WIDTH)
        self.same, self.kept, self.own = nn.Identity(), kept, OrderedDict()  # the list is the whole model's
        self.hook: Any = None  # on an inner module, for the time of a forward

    def forward(self, x: Tensor) -> Tensor:
        handle = self.act.register_forward_hook(self.hook) if self.hook else None
        x = self.same(x)
        inner = self.up(self.act(self.up(x)[..., :WIDTH]))
        self.kept.append(inner.square().mean())
        self.own["losses"] = [inner.mean()]
        OUTSIDE.append(inner.sin())
        x = x + self.down(self.act(inner))
        if handle:
            handle.remove()
        return x


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
    frozen = "frozen" in way
    if frozen:
        model.blocks[1].requires_grad_(False)
    zero = None if stage is None else zerolab.shard(model, stage, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> Any:
        features["inner"] = module.weight.square() if "weight" in way else output
        if "attribute" in way:
            module.seen = features["inner"]
        return output * 2

    def keep_input(module: nn.Module, args: Any) -> None:
        features["inner"] = args[0].sin()  # made inside of the block, by no module of it

    if "own forward" in way:
        model.blocks[1].hook = keep
    elif "weight" in way:
        model.blocks[1].up.register_forward_hook(keep)
    elif way == "a hook":
        model.blocks[1].act.register_forward_hook(keep)
    elif way == "a hook before its input":
        model.blocks[1].down.register_forward_pre_hook(keep_input)
    elif way == "a hook on the block":
        model.blocks[1].register_forward_hook(keep, prepend=True)
    steps = []
    for number in range(3):  # the second step is the first in which backward gathers ahead
        model.cut = number == 2 and way != "a retained graph"
        optimizer.zero_grad()
        losses = []
        for x in inputs:
            OUTSIDE.clear()
            with saved_tensors_hooks(*[lambda kept: kept] * 2) if "packed" in way else nullcontext():
                main = model(x)
            kept = features["inner"].square().mean() if features else sum(model.kept)
            if way == "own lists":
                kept = sum(block.own["losses"][0] for block in model.blocks)
            elif "no way" in way:
                kept = OUTSIDE[1].square().mean()
            losses.append((main, kept))
        main, kept = (sum(column) / len(inputs) for column in zip(*losses, strict=True))
        if way == "a retained graph":
            main.backward(retain_graph=True)
            (main / 2).backward()
        elif "list" in way:
            main.backward(retain_graph=True)
            kept.backward()
        elif caught := attempt((kept if "alone" in way else main + kept if model.cut else main).backward):
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
@pytest.mark.parametrize(
    "way",
    [
        "a hook",
        "a hook before its input",
        "a hook on the block",
        "a shared list",
        "own lists",
        "a retained graph",
        "a hook in its own forward, kept as an attribute",
        "a weight that a hook keeps as an attribute, alone",
    ],
)
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


@pytest.mark.parametrize(
    "way",
    [
        "no way that can be seen",  # while the block is being gathered
        "no way into a frozen block",
        "no way that can be seen, packed by hooks",  # of which autograd asks no version
        "no way that can be seen, alone",  # while it is released, as in all that follow
        "a hook in its own forward, alone",
        "a weight that a hook keeps, alone",
    ],
)
def test_backward_into_a_unit_that_is_not_gathered_is_refused(ranks, way):
    """Its numbers would be made of whatever the memory held. What the error advises is right."""
    caught = ranks.run(as_rank, way, 3, ranks=2)
    all_say(caught, "RuntimeError", "backward wants to read blocks.1, which is not gathered", "keep it as an attribute")
    all_agree(ranks.run(as_rank, way, 2, ranks=2), way)


class LeavesOut(nn.Module):
    """Three blocks; `ways` says what becomes of the second one's output, in one loss or in several."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Block([]) for _ in range(3))
        self.ways = ""

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.blocks[0](self.first(x))
        second = self.blocks[1](x)
        third = {"used": second, "cut off": second.detach(), "not used": x}
        return [self.blocks[2](third[way]).square().mean() for way in self.ways.split(", ")]


def left_out(ways: list[str], stage: int | None, inputs: list[Tensor]) -> list[Tensor | None]:
    """The gradients of the last step. The second block is frozen if it is cut off."""
    torch.manual_seed(0)
    model = LeavesOut().double()
    model.blocks[1].requires_grad_("cut off" not in ways[-1])
    if stage is not None:
        zerolab.shard(model, stage, units=Block)
    for model.ways in ways:
        model.zero_grad()
        for losses in zip(*[model(x) for x in inputs], strict=True):
            (sum(losses) / len(inputs)).backward(retain_graph=True)
    return [None if p.grad is None else zerolab.full_tensor(p.grad).clone() for p in model.parameters()]


def left_out_on_a_rank(ways: list[str]) -> list[Tensor | None]:
    return left_out(ways, 3, [inputs(torch.distributed.get_rank())])


@pytest.mark.parametrize("ways", [["used", "used", "not used"], ["used", "used", "cut off, not used"]], ids=str)
def test_a_block_that_is_predicted_and_left_out(ranks, ways):
    """Its input gets a gradient from elsewhere: nothing was read while it was being gathered."""
    expected = left_out(ways, None, [inputs(0), inputs(1)])
    for grads in ranks.run(left_out_on_a_rank, ways, ranks=2):
        for grad, right in zip(grads, expected, strict=True):
            assert (grad is None and right is None) or torch.allclose(grad, right, rtol=1e-10, atol=1e-12)


class FillsItsInput(nn.Module):
    """A block that changes a dictionary and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: dict[str, Tensor]) -> None:
        state["x"] = torch.tanh(self.linear(state["x"]))


class Forces(nn.Module):
    """Asks for a gradient in the middle of its forward, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 4), nn.ModuleList(FillsItsInput() for _ in range(2)), None
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            state = {"x": self.first(x)}
            for block in self.blocks:
                block(state)
            (force,) = torch.autograd.grad(state["x"].sum(), x, retain_graph=True)
        return self.last(state["x"] + force).square().mean()


def in_the_middle(stage: int | None, inputs: list[Tensor]) -> list[Tensor]:
    """Evaluated and trained, with a batch in between that breaks before the engine's own hooks, and is tried again."""
    torch.manual_seed(0)
    model = Forces().double()
    if stage is not None:
        zerolab.shard(model, stage, units=FillsItsInput)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    broken: list[int] = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: broken.pop() / 0 if broken else None, prepend=True)
    for number in range(4):
        with torch.no_grad():
            model(inputs[0])
        broken += [1] * (number == 2)
        try:
            loss = sum(model(x) for x in inputs) / len(inputs)
        except ZeroDivisionError:
            loss = sum(model(x) for x in inputs) / len(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def in_the_middle_of_all(stage: int) -> list[Tensor]:
    losses = torch.stack(in_the_middle(stage, [inputs(torch.distributed.get_rank())]))
    torch.distributed.all_reduce(losses)
    return list(losses / torch.distributed.get_world_size())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_in_the_middle_of_a_forward(ranks, stage):
    expected = in_the_middle(None, [inputs(0), inputs(1)])
    for losses in ranks.run(in_the_middle_of_all, stage, ranks=2):
        assert torch.allclose(torch.stack(losses), torch.stack(expected), rtol=1e-10)


def backward_in_a_forward(stage: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zerolab.shard(model, stage, units=())
    model[0].register_forward_hook(lambda module, args, output: output.sum().backward())
    return attempt(lambda: model(torch.ones(2, 4)))


def test_a_backward_inside_of_a_forward_is_refused(ranks):
    for stage in (1, 3):
        caught = ranks.run(backward_in_a_forward, stage, ranks=2)
        all_say(caught, "RuntimeError", "backward() inside of the model's forward reached parameters of root")


@dataclass
class Table:
    """torch's pytree does not know it."""

    x: Tensor
    weight: Tensor
    penalty: Tensor


class ShowsItsWeight(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.emb, self.kind = nn.Embedding(7, WIDTH), kind

    def forward(self, tokens: Tensor) -> Any:
        weight = self.emb.weight
        return self.kind(x=self.emb(tokens), weight=weight, penalty=weight.square().mean())


class ReadsTheWeight(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table, self.block = ShowsItsWeight(kind), Block([])

    def forward(self, tokens: Tensor) -> Tensor:
        table = self.table(tokens)
        return (self.block(table.x) @ table.weight.T).square().mean() + table.penalty


def shows_its_weight(kind: Any, stage: int | None) -> Any:
    torch.manual_seed(0)
    model = ReadsTheWeight(kind).double()
    if stage is not None:
        zerolab.shard(model, stage, units=[ShowsItsWeight, Block])
    return attempt(lambda: model(torch.arange(5)).backward()) or [
        zerolab.full_tensor(p.grad) for p in model.parameters()
    ]


@pytest.mark.parametrize("stage", worlds(3, others=[1, 2]))
def test_a_weight_in_what_a_block_returns(ranks, stage):
    """What the error advises is right."""
    expected = shows_its_weight(Table, None)
    for grads in ranks.run(shows_its_weight, Table, stage, ranks=2):
        torch.testing.assert_close(grads, expected)
    told = ranks.run(shows_its_weight, SimpleNamespace, stage, ranks=2)
    if stage == 3:
        all_say(told, "RuntimeError", "table returned a parameter in a SimpleNamespace", "put it into a dataclass")
    else:
        torch.testing.assert_close(told, [expected] * 2)


def root_shows_its_weight(stage: int | None) -> Any:
    torch.manual_seed(0)
    model = ShowsItsWeight(SimpleNamespace).double()
    if stage is not None:
        zerolab.shard(model, stage)
    table = model(torch.arange(5))
    (table.x.sum() + table.weight.square().sum()).backward()
    return zerolab.full_tensor(model.emb.weight.grad)


def test_a_root_that_stays_may_return_its_weight_in_anything(ranks):
    torch.testing.assert_close(ranks.run(root_shows_its_weight, 3, ranks=2), [root_shows_its_weight(None)] * 2)


class Keeps(nn.Module):
    """Keeps a loss, and returns its result in something that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
        self.loss = y.square().mean()
        return iter([y])


class Around(nn.Module):
    """A unit with another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Keeps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = next(self.inner(torch.tanh(self.first(x))))
        OUTSIDE.append(y.sin())
        return self.last(y)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList(Around() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def entered_inside(stage: int | None, evaluated: bool, inputs: list[Tensor]) -> list[list[Tensor | None]]:
    """Gradients of steps whose loss is all, or what an inner block keeps, or what is made of its result."""
    torch.manual_seed(0)
    model = Nested().double()
    if stage is not None:
        zerolab.shard(model, stage, units=[Around, Keeps])
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    for which in ("all", "kept", "made", "kept", "all"):
        optimizer.zero_grad()
        losses = []
        for x in inputs:
            OUTSIDE.clear()
            main = model(x)
            losses.append({"all": main, "kept": model.blocks[1].inner.loss, "made": OUTSIDE[1].square().mean()}[which])
        if evaluated:
            with torch.no_grad():
                model(inputs[0])
        (sum(losses) / len(inputs)).backward()
        steps.append([None if p.grad is None else zerolab.full_tensor(p.grad).clone() for p in model.parameters()])
        optimizer.step()
    return steps


def entered_inside_by_all(stage: int, evaluated: bool) -> list[list[Tensor | None]]:
    return entered_inside(stage, evaluated, [inputs(torch.distributed.get_rank())])


@pytest.mark.parametrize("evaluated", [False, True])
def test_backward_may_begin_inside_of_a_nested_unit(ranks, evaluated):
    """The units around it are needed too, and what stayed gathered for a backward stays in an evaluation."""
    expected = entered_inside(None, evaluated, [inputs(0), inputs(1)])
    for steps in ranks.run(entered_inside_by_all, 3, evaluated, ranks=2):
        torch.testing.assert_close(steps, expected)


class Hides(nn.Module):
    """What it returns nobody can look into, so it stays gathered until backward is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Keeps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return iter([self.last(next(self.inner(x)))])


def gathered_under_no_sync() -> list[str]:
    model = nn.ModuleList([Hides(), Hides()])
    zero = zerolab.Zero3(model, units=[Hides, Keeps])
    with ledger(zero) as book, zero.no_sync():
        sum(next(block(torch.ones(2, WIDTH))).square().mean() + block.inner.loss for block in model).backward()
    return [call.unit for call in book.calls if call.op == "all_gather" and call.phase == "backward"]


def test_a_unit_that_backward_is_done_with_is_not_gathered_for_what_is_inside_of_it(ranks):
    assert ranks.run(gathered_under_no_sync, ranks=2) == [[], []]
