"""Cases in which the ranks disagree. Promised is an error on every rank, soon, that is not a timeout: never a wait,
never another rank's number. Who answers rightly keeps the promise too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from zerolab.trial.case import REFUSAL, Adapter, Broken, Case, Unsupported, in_one_line, right_or_refused
from zerolab.trial.numbers import WIDTH, Block, Numbers, Stack, build, train


class Disagreement(Case):
    """The base of cases in which ranks disagree."""

    family = "ranks that disagree: an error on each, and no wait"
    source = "torch.distributed, Debugging: TORCH_DISTRIBUTED_DEBUG=DETAIL raises where ranks are out of step"
    needs: frozenset[str] = frozenset()
    least = 2
    limit = 12.0  # seconds. A collective waits longer, so a timeout is too late

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        try:
            self.disagree(make(), dist.get_rank(), dist.get_world_size() - 1)
        except (Broken, Unsupported):
            raise
        except Exception as error:
            return REFUSAL + in_one_line(error)
        raise Broken(f"rank {dist.get_rank()}: no error, and nobody knows what was trained")

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        """Does something else on the rank `odd`."""
        raise NotImplementedError

    def trained(self, adapter: Adapter, model: Any, optimizer: Any = None, steps: int = 2) -> None:
        """Wrap and train the model: some steps, as `Numbers` does."""
        case = Numbers()
        case.steps = steps
        adapter.wrap(model, case.units, optimizer or case.optimizer)
        train(adapter, case)


class OtherShape(Disagreement):
    """A parameter has another shape on one rank."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        model: Any = Stack()
        if rank == odd:
            model.blocks[1].up = nn.Linear(WIDTH, 2 * WIDTH)
            model.blocks[1].down = nn.Linear(2 * WIDTH, WIDTH)
        self.trained(adapter, model)


class SameNumberOtherShape(Disagreement):
    """Two parameters of one rank have changed places: as many elements, other shapes."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        class Pair(Block):
            def __init__(self, first: int, second: int) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(WIDTH, first, bias=False), nn.Linear(WIDTH, second, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.up(x).mean() + self.down(x).mean()

        torch.manual_seed(0)
        sizes = (3, 5) if rank == odd else (5, 3)
        self.trained(adapter, Stack(lambda: Pair(*sizes)))


class OtherDtype(Disagreement):
    """A block has another dtype on one rank."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        model: Any = Stack()
        if rank == odd:
            model.blocks[1].double()
            model.blocks[1].register_forward_pre_hook(lambda block, args: args[0].double())
            model.blocks[1].register_forward_hook(lambda block, args, out: out.float())
        self.trained(adapter, model)


class OtherDepth(Disagreement):
    """One rank has a block less."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        self.trained(adapter, Stack(blocks=2 if rank == odd else 3))


class FrozenOnOne(Disagreement):
    """One rank has frozen a parameter that the others train."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        model: Any = Stack()
        model.blocks[1].up.weight.requires_grad_(rank != odd)
        self.trained(adapter, model)


class FrozenLater(Disagreement):
    """One rank freezes a parameter between two steps."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        class Freezing(Numbers):
            def before(self, model: Any, rank: int, step: int) -> None:
                model.blocks[1].up.weight.requires_grad_(step == 0 or rank != odd)

        case = Freezing()
        adapter.wrap(build(case), case.units, case.optimizer)
        train(adapter, case)


class OneStops(Disagreement):
    """One rank runs out of batches, and goes on to ask for the state dict."""

    needs = frozenset({"full_state"})

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        self.trained(adapter, build(Numbers()), steps=2 if rank == odd else 3)
        adapter.full_state()


class OneSkips(Disagreement):
    """One rank leaves out a backward, as a script does that skips a bad batch."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        class Skipping(Numbers):
            def backward(self, loss: Tensor) -> None:
                adapter.backward(loss)

        case = Skipping()
        adapter.wrap(build(case), case.units, case.optimizer)
        for step in range(3):
            loss = case.loss(adapter.model, rank, step)
            if step != 1 or rank != odd:
                adapter.backward(loss)
            adapter.step()


class OtherRate(Disagreement):
    """A schedule gives one rank another learning rate."""

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        class Drifting(Numbers):
            def after(self, model: Any, optimizer: optim.Optimizer, step: int) -> None:
                if rank == odd:
                    optimizer.param_groups[0]["lr"] *= 0.9

        case = Drifting()
        adapter.wrap(build(case), case.units, case.optimizer)
        train(adapter, case)


class OneAccumulates(Disagreement):
    """One rank accumulates in a micro-batch that the others reduce."""

    needs = frozenset({"accumulate"})

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        case = Numbers()
        adapter.wrap(build(case), case.units, case.optimizer)
        for step in range(2):
            loss = case.loss(adapter.model, rank, step)
            if rank == odd and step == 0:
                with adapter.accumulate():
                    adapter.backward(loss)
            else:
                adapter.backward(loss)
            adapter.step()


class OneClips(Disagreement):
    """One rank clips, the others do not."""

    needs = frozenset({"clip"})

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        case = Numbers()
        adapter.wrap(build(case), case.units, case.optimizer)
        for step in range(2):
            adapter.backward(case.loss(adapter.model, rank, step))
            if rank == odd:
                adapter.clip(1e-3)
            adapter.step()


class OneAsks(Disagreement):
    """One rank asks for the full state dict, as a script does in `if rank == 0:`, while the others train on."""

    needs = frozenset({"full_state"})

    def disagree(self, adapter: Adapter, rank: int, odd: int) -> None:
        case = Numbers()
        adapter.wrap(build(case), case.units, case.optimizer)
        train(adapter, case, range(1))
        if rank == 0:
            adapter.full_state()
        train(adapter, case, range(1, 2))


class OtherWay(Numbers):
    """Ranks that go through different blocks of equal shape get the numbers of one process, or an error."""

    family = Disagreement.family
    needs = frozenset({"some", "parts"})
    least, limit = 2, 12.0

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        tokens = torch.arange(10).view(2, 5)
        x = model.blocks[rank % 2](model.emb(tokens))
        return nn.functional.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        return right_or_refused(super().run, make, part, folder)
