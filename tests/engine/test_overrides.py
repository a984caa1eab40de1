"""The override points: when they are called, and subclasses that do it in ways of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_common import attempt, sharded

import zerolab
from zerolab.trial.numbers import Block, build
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


POINTS = ("optimizer_params", "pre_forward", "post_forward", "pre_backward", "post_backward", "reduce", "after_step")


def watched(stage: int, log: list[tuple[str, str]]) -> type[zerolab.Engine]:
    """The stage with every override point overridden by one that notes and goes on."""

    def note(point: str) -> Any:
        def method(self, unit):
            log.append((point, unit.name))
            return getattr(super(cls, self), point)(unit)

        return method

    cls = type("Watched", (zerolab.STAGES[stage],), {point: note(point) for point in POINTS})
    return cls


def call_order(stage: int) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    zero = watched(stage, log)(build(PLAIN), units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    for step in range(2):
        PLAIN.loss(zero.model, zero.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log


@pytest.mark.parametrize("n", [1, 2])
def test_the_order_of_calls_is_the_documented_one(ranks, n):
    units = ["root", "blocks.0", "blocks.1", "blocks.2"]
    inner = units[1:]
    step = [("pre_forward", "root")]
    step += [(point, unit) for unit in inner for point in ("pre_forward", "post_forward")]
    step += [("post_forward", "root"), ("pre_backward", "root")]
    for i, unit in enumerate(reversed(inner)):
        step += [("pre_backward", unit)]
        if i:
            step += [(point, inner[-i]) for point in ("post_backward", "reduce")]
    step += [(point, unit) for unit in ("blocks.0", "root") for point in ("post_backward", "reduce")]
    step += [("after_step", unit) for unit in units]
    for stage in range(4):
        for log in ranks.run(call_order, stage, ranks=n):
            assert log == [("optimizer_params", unit) for unit in units] + step * 2, f"stage {stage}"


class OneAllReduce(zerolab.DDP):
    """Synchronous: torch's all-reduce, then the mean."""

    def reduce(self, unit):
        dist.all_reduce(unit.bucket.full)
        unit.bucket.grad = unit.bucket.full / self.world_size


class AllReduceLater(zerolab.DDP):
    """Asynchronous: torch's own Work, of gradients that were divided before."""

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full / self.world_size
        return dist.all_reduce(unit.bucket.grad, async_op=True)


class GatherAtOnce(zerolab.Zero1):
    """By hand and synchronous; the parameters are gathered after the step and not before the next forward."""

    def reduce(self, unit):
        dist.all_reduce(unit.bucket.full)
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank) / self.world_size

    def after_step(self, unit):
        unit.gather()


class SliceByHand(zerolab.Zero2):
    """Waits for the reduction and keeps the slice."""

    def post_backward(self, unit):
        zerolab.Zero1.post_backward(self, unit)
        if unit.bucket.reduction is not None:
            unit.bucket.reduction.wait()
            unit.bucket.grad = unit.bucket.grad.clone()


class GatherByHand(zerolab.Zero3):
    """All-gathers with a list of tensors, and releases in both directions, the root too."""

    def pre_forward(self, unit):
        if not unit.gathered:
            unit.full.untyped_storage().resize_(unit.layout.size * 4)
            dist.all_gather(list(unit.full.data.chunk(self.world_size)), unit.shard.data)
            unit.gathered = True

    pre_backward = pre_forward

    def post_forward(self, unit):
        unit.release()


def overridden(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    cls = globals()[name]
    zero = cls(build(PLAIN), units=[Block])
    optimizer = PLAIN.optimizer(zero.model)
    for step in range(PLAIN.steps):
        PLAIN.loss(zero.model, zero.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(), sharded(PLAIN, cls.stage)[0]


@pytest.mark.parametrize("cls", [OneAllReduce, AllReduceLater, GatherAtOnce, SliceByHand, GatherByHand])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_subclass_may_do_it_its_own_way(ranks, cls, n):
    for mine, theirs in ranks.run(overridden, cls.__name__, ranks=n):
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=1e-6)


class Forgetful(zerolab.Zero1):
    def reduce(self, unit):
        pass


def forget() -> str:
    zero = Forgetful(build(PLAIN), units=[Block])
    return attempt(PLAIN.loss(zero.model, zero.rank, 0).backward)


def test_a_reduce_that_leaves_nothing_is_named(ranks):
    assert "Forgetful.reduce() left no unit.bucket.grad" in ranks.run(forget, ranks=1)[0]
