"""Optimizers, clipping, schedules and mixed precision, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim
from zoo import CASES, Block, Case, Plain, alone, build, sharded

import zerolab
from zerolab import Precision

PLAIN = CASES["plain"]
ELEMENTWISE = ["ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop"]
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ELEMENTWISE},
    **{f"{name}, foreach": (name, {"foreach": True}) for name in ELEMENTWISE},
    **{f"{name}, maximize": (name, {"maximize": True}) for name in ("SGD", "Adam", "AdamW")},
    "SGD, momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "AdamW, amsgrad": ("AdamW", {"amsgrad": True}),
    **{f"{name}, fused": (name, {"fused": True}) for name in ("SGD", "Adagrad", "Adam", "AdamW")},
}


class Optimized(Plain):
    def __init__(self, name: str) -> None:
        self.name = name
        self.exact = "fused" not in name

    def optimizer(self, model):
        cls, options = OPTIONS[self.name]
        return getattr(optim, cls)(model.parameters(), lr=0.01, **options)


def every_optimizer(stage: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: sharded(Optimized(name), stage)[0] for name in OPTIONS}


def every_optimizer_alone(ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: alone(Optimized(name), ranks)[0] for name in OPTIONS}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_elementwise_optimizer(ranks, stage):
    expected = ranks.run(every_optimizer_alone, 3, ranks=1)[0]
    for results in ranks.run(every_optimizer, stage, ranks=3, timeout=100):
        for name, state in results.items():
            tolerance = {"rtol": 0, "atol": 0} if Optimized(name).exact else {"rtol": 1e-4, "atol": 1e-6}
            for key, value in expected[name].items():
                torch.testing.assert_close(state[key], value, **tolerance, msg=f"{name}: {key}")


class Groups(Case):
    """Weight decay for what has two dimensions, another rate by name, a schedule, and a closure."""

    def optimizer(self, model):
        decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and not name.startswith("head")]
        others = [p for name, p in model.named_parameters() if p.dim() < 2 and not name.startswith("head")]
        head = [p for name, p in model.named_parameters() if name.startswith("head")]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others}, {"params": head, "lr": 0.05}]
        optimizer = optim.AdamW(groups, lr=0.02, weight_decay=0.0)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer


def in_groups() -> tuple[Any, Any]:
    case = Groups()
    return {stage: sharded(case, stage)[0] for stage in range(4)}, alone(case, torch.distributed.get_world_size())[0]


def test_parameter_groups_and_schedules(ranks):
    for results, expected in ranks.run(in_groups, ranks=2):
        for state in results.values():
            assert all(torch.equal(state[key], value) for key, value in expected.items())


def closures_and_several_optimizers(precision: Precision | None) -> list[tuple[Any, Any]]:
    pairs = []
    for stage in range(4):
        states = []
        for closure in (False, True):
            zero = zerolab.shard(build(PLAIN), stage, units=[Block], precision=precision)
            blocks = [p for name, p in zero.model.named_parameters() if name.startswith("blocks")]
            rest = [p for name, p in zero.model.named_parameters() if not name.startswith("blocks")]
            first, second = optim.SGD(blocks, lr=0.1), optim.SGD(rest, lr=0.1)
            for step in range(3):

                def compute(step=step, zero=zero, first=first, second=second):
                    first.zero_grad()
                    second.zero_grad()
                    loss = PLAIN.loss(zero.model, zero.rank, step)
                    loss.backward()
                    return loss

                if closure:
                    first.step(compute)
                    assert all(p.grad.dtype == p.dtype for p in rest)
                else:
                    compute()
                    if precision:
                        assert all(p.grad.dtype == torch.bfloat16 and p.dtype == torch.float32 for p in rest)
                    first.step()
                second.step()
            states.append(zero.full_state_dict())
        pairs.append(tuple(states))
    return pairs


@pytest.mark.parametrize("precision", [None, Precision()], ids=["fp32", "bf16"])
def test_closures_and_several_optimizers(ranks, precision):
    for pairs in ranks.run(closures_and_several_optimizers, precision, ranks=2):
        for plain, with_closure in pairs:
            assert all(torch.equal(plain[key], with_closure[key]) for key in plain)
            assert all(torch.equal(plain[key], pairs[0][0][key]) for key in plain)


def used_by_nobody() -> list[tuple[bool, bool, float]]:
    """A parameter that no rank used has no gradient, and weight decay leaves it alone; one rank's use is enough."""
    seen = []
    for stage in range(4):
        zero = zerolab.shard(CASES["mixture of experts"].model(), stage, units=CASES["mixture of experts"].units)
        optimizer = optim.AdamW(zero.model.parameters(), lr=0.1, weight_decay=0.5)
        CASES["mixture of experts"].before(zero.model, zero.rank, 0)  # block 0: rank 0 takes expert 0, rank 1 expert 1
        before = zero.full_state_dict()
        CASES["mixture of experts"].loss(zero.model, zero.rank, 0).backward()
        names = dict(zero.model.named_parameters())
        grads = [names[f"blocks.0.experts.{i}.layer.weight"].grad is not None for i in range(4)]
        optimizer.step()
        after = zero.full_state_dict()
        same = [torch.equal(before[key], after[key]) for key in before if "blocks.0.experts" in key and "weight" in key]
        seen.append((grads, same))
    return seen


def test_a_parameter_that_nobody_used(ranks):
    for seen in ranks.run(used_by_nobody, ranks=2):
        assert seen == [([True, True, False, False], [False, False, True, True])] * 4


# -- clipping -------------------------------------------------------------------------------------------------------


def clipped(norm_type: float) -> list[tuple[float, dict[str, torch.Tensor], int]]:
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block])
        optimizer = optim.SGD(zero.model.parameters(), lr=1.0)
        (50 * PLAIN.loss(zero.model, zero.rank, 0)).backward()
        with zero.comm.record() as calls:
            norm = zero.clip_grad_norm_(0.5, norm_type)
        optimizer.step()
        results.append((norm.item(), zero.full_state_dict(), len(calls)))
        zero.clip_grad_norm_(1.0, norm_type)
    return results


def clipped_alone(ranks: int, norm_type: float) -> tuple[float, dict[str, torch.Tensor]]:
    model = build(PLAIN)
    for rank in range(ranks):
        (50 * PLAIN.loss(model, rank, 0) / ranks).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    optim.SGD(model.parameters(), lr=1.0).step()
    return norm.item(), model.state_dict()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping(ranks, norm_type):
    for n in (1, 3):
        norm, state = ranks.run(clipped_alone, n, norm_type, ranks=1)[0]
        results = ranks.run(clipped, norm_type, ranks=n)
        for stage in range(4):
            assert len({result[stage][0] for result in results}) == 1, "the same on every rank"
            for got, got_state, calls in (result[stage] for result in results):
                assert got == pytest.approx(norm, rel=1e-5)
                assert calls == (1 if stage else 0)
                for key, value in state.items():
                    torch.testing.assert_close(got_state[key], value, rtol=1e-4, atol=1e-6)


# -- mixed precision ------------------------------------------------------------------------------------------------


def in_bf16() -> list[dict[str, Any]]:
    seen = []
    for stage in range(4):
        dtypes: dict[str, Any] = {}
        zero = zerolab.shard(build(CASES["batch norm, channels_last"]), stage, precision=Precision())
        model = zero.model
        params = list(model.parameters())
        norms = {id(p) for module in (model[1], model[4]) for p in module.parameters()}
        others = [p for p in params if id(p) not in norms]

        def inside(module, args, dtypes=dtypes):
            dtypes.update(inside=module.weight.dtype, activation=args[0].dtype)

        def in_step(*_, dtypes=dtypes, params=params):
            dtypes["step"] = {p.grad.dtype for p in params}

        model[3].register_forward_pre_hook(inside)
        optimizer = optim.AdamW(params)
        optimizer.register_step_pre_hook(in_step)
        CASES["batch norm, channels_last"].loss(model, zero.rank, 0).backward()
        dtypes["outside"] = {p.dtype for p in params}
        dtypes["buffer"] = model[1].running_mean.dtype
        dtypes["waiting"] = {p.grad.dtype for p in others}
        dtypes["waiting, batch norm"] = {p.grad.dtype for p in params if id(p) in norms}
        optimizer.step()
        dtypes["after the step"] = {p.grad.dtype for p in others}
        optimizer.zero_grad()
        CASES["batch norm, channels_last"].loss(model, zero.rank, 1).backward()
        zero.clip_grad_norm_(1.0)
        dtypes["clipped"] = {p.grad.dtype for p in params}
        seen.append(dtypes)
    return seen


def test_dtypes_in_mixed_precision(ranks):
    bf16, fp32 = torch.bfloat16, torch.float32
    expected = {
        "inside": bf16,
        "activation": bf16,
        "outside": {fp32},
        "buffer": fp32,
        "waiting": {bf16},
        "waiting, batch norm": {fp32},
        "step": {fp32},
        "after the step": {bf16},
        "clipped": {fp32},
    }
    for seen in ranks.run(in_bf16, ranks=2):
        for dtypes in seen:
            assert dtypes == expected


def micro_batches(synchronised: bool) -> tuple[list[Any], Any]:
    """Three micro-batches in bf16. Added up in float32; each contribution rounded to bf16 once, and so is each mean."""
    results, size = [], torch.distributed.get_world_size()
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block], precision=Precision())
        before = zero.full_state_dict()
        optimizer = optim.SGD(zero.model.parameters(), lr=1.0)
        for micro in range(3):
            zero._sync = synchronised or micro == 2
            PLAIN.loss(zero.model, zero.rank, micro).backward()
        optimizer.step()
        results.append({key: value - before[key] for key, value in zero.full_state_dict().items()})
    model = build(PLAIN).to(torch.bfloat16)
    grads: dict[int, list[Any]] = {}
    for rank in range(size):
        for micro in range(3):
            model.zero_grad()
            PLAIN.loss(model, rank, micro).backward()
            grads.setdefault(rank, []).append({name: p.grad.float() for name, p in model.named_parameters()})
    expected = {}
    for name, param in build(PLAIN).named_parameters():
        if synchronised:
            means = [sum(grads[r][m][name] for r in range(size)) / size for m in range(3)]
            total = sum(mean.to(torch.bfloat16).float() for mean in means)
        else:
            sums = [sum(micro[name] for micro in grads[r]).to(torch.bfloat16).float() for r in range(size)]
            total = (sum(sums) / size).to(torch.bfloat16).float()
        expected[name] = (param.detach() - total) - param.detach()
    return results, expected


@pytest.mark.parametrize("synchronised", [False, True])
def test_micro_batches_are_added_in_float32(ranks, synchronised):
    for results, expected in ranks.run(micro_batches, synchronised, ranks=3):
        for result in results:
            for name, value in expected.items():
                assert torch.equal(result[name], value), name


def reduced_in(reduce: torch.dtype) -> list[torch.dtype]:
    zero = zerolab.Zero2(build(PLAIN), units=[Block], precision=Precision(torch.bfloat16, reduce))
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    return [p.grad.dtype for p in zero.model.parameters()]


def test_the_reduce_dtype(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        assert set(ranks.run(reduced_in, dtype, ranks=2)[0]) == {dtype}
