"""Mixed precision: which dtype is where and when."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

import zerolab
from zerolab import Precision
from zerolab.trial.numbers import Block, build
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


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


def reduced_in(reduce: torch.dtype) -> list[torch.dtype]:
    zero = zerolab.Zero2(build(PLAIN), units=[Block], precision=Precision(torch.bfloat16, reduce))
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    return [p.grad.dtype for p in zero.model.parameters()]


def test_the_reduce_dtype(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        assert set(ranks.run(reduced_in, dtype, ranks=2)[0]) == {dtype}


class Quantised(torch.nn.Module):
    """Frozen parameters of dtypes that no backend sends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn), False)
        self.codes = torch.nn.Parameter(torch.arange(5).to(torch.uint16), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.linear(x), self.weight.to(x.dtype)).sum() + self.codes.float().sum()


def frozen_and_quantised(stage: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Quantised()
    zero = None if stage is None else zerolab.shard(model, stage, units=[])
    loss = model(torch.ones(2, 4))
    loss.backward()
    state = zero.full_state_dict() if zero else model.state_dict()
    return [loss.detach(), *(state[name].float() for name in sorted(state))]


def test_frozen_parameters_of_any_dtype(ranks):
    expected = frozen_and_quantised(None)
    for stage in range(4):
        for found in ranks.run(frozen_and_quantised, stage, ranks=3):
            assert all(map(torch.equal, found, expected)), f"stage {stage}"


class Named(UserDict):
    """A dictionary that is none of Python's own, as tokenizers return."""


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    tokens: torch.Tensor
    named: Any = None
    above: Any = None


class TakesBatches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        self.seen = [batch.x.dtype, batch.tokens.dtype, batch.named["inner"][0].x.dtype, type(batch.named).__name__]
        return self.linear(batch.x).sum()


def inputs_in_containers() -> list[Any]:
    model = TakesBatches()
    zerolab.Zero3(model, units=[], precision=Precision())
    x, tokens, named = torch.ones(2, 4), torch.arange(2), Named()
    batch = Batch(x, tokens, named)
    named["inner"] = [Batch(x, tokens, above=batch)]  # which refers to what it lies in
    model(batch).backward()
    return [*model.seen, batch.x.dtype]


def test_inputs_are_cast_in_every_container(ranks):
    expected = [torch.bfloat16, torch.int64, torch.bfloat16, "Named", torch.float32]
    assert ranks.run(inputs_in_containers, ranks=2) == [expected] * 2
