"""Sharding a model: default units, the meta device, one rank that differs, and what is left afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_common import attempt
from jobs_common import worlds
from torch import nn

import zerolab
from zerolab.engine.partition import device_of
from zerolab.trial.numbers import Block, Stack, build
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


# -- one rank has something else, and all are told --------------------------------------------------------------------


class Wider(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 18)
        self.down = nn.Linear(18, 8)


def odd_model(what: str) -> tuple[nn.Module, dict[str, Any]]:
    model, options = Stack(), {"stage": 2, "units": [Block]}
    if what == "shape":
        model = Stack(Wider)
    elif what == "dtype":
        model.blocks[1].to(torch.bfloat16)
    elif what == "frozen":
        model.blocks[1].up.bias.requires_grad_(False)
    elif what == "fewer":
        model.head.bias = None
    elif what == "renamed":
        model.tail = model.head
        del model.head
    elif what == "stage":
        options["stage"] = 3
    elif what == "precision":
        options["precision"] = zerolab.Precision()
    elif what == "units":
        options["units"] = [nn.Linear]
    elif what == "nothing matches":
        options["units"] = [nn.Conv3d]
    elif what == "meta":
        model.head.to("meta")
    elif what == "no parameters":
        model = nn.Identity()
        options["units"] = None
    elif what == "complex":
        model.extra = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    elif what == "shared memory":
        model.head.weight.data = model.emb.weight.data
    elif what == "scripted":
        model.blocks[1] = torch.jit.script(model.blocks[1])
    elif what == "sparse":
        model.head.register_buffer("graph", torch.eye(3).to_sparse())
    return model, options


def build_with_one_odd_rank(what: str, odd: int) -> str:
    model, options = odd_model(what if dist.get_rank() == odd else "")
    return attempt(lambda: zerolab.shard(model, options.pop("stage"), **options))


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("shape", "CommError", ["rank 1", "blocks.0.up.weight", "shape", "[18, 8]", "[17, 8]"]),
        ("dtype", "CommError", ["rank 1", "blocks.1.norm.weight", "bfloat16"]),
        ("frozen", "CommError", ["rank 1", "blocks.1.up.bias", "requires_grad"]),
        ("fewer", "CommError", ["rank 0 has the parameter head.bias, rank 1 does not"]),
        ("renamed", "CommError", ["rank 0 has the parameter head.bias, rank 1 does not"]),
        ("stage", "CommError", ["rank 1", "Zero3", "Zero2"]),
        ("precision", "CommError", ["rank 1", "bfloat16"]),
        ("units", "CommError", ["rank 1", "unit"]),
        ("nothing matches", "ValueError", ["rank 1", "Conv3d", "Stack", "Block"]),
        ("meta", "ValueError", ["rank 1", "head.weight", "meta", "init="]),
        ("no parameters", "ValueError", ["rank 1", "no parameters"]),
        ("complex", "ValueError", ["rank 1", "extra", "complex64"]),
        ("shared memory", "ValueError", ["rank 1", "head.weight", "emb.weight", "share memory"]),
        ("scripted", "ValueError", ["rank 1", "blocks.1 is a torch.jit.ScriptModule", "torch.compile"]),
        ("sparse", "ValueError", ["rank 1", "the buffer head.graph is sparse", "to_dense()"]),
    ],
)
def test_an_odd_rank_is_named_on_every_rank(ranks, what, kind, words):
    for message in ranks.run(build_with_one_odd_rank, what, 1, ranks=2):
        assert message.startswith(kind)
        for word in words:
            assert word in message


def test_no_process_group():
    if not dist.is_initialized():
        with pytest.raises(zerolab.CommError, match=r"zerolab\.init\(\)"):
            zerolab.Zero1(Stack())


# -- units and the meta device ----------------------------------------------------------------------------------------


def default_units() -> list[list[str]]:
    wide = nn.Sequential(*[nn.Linear(1300, 1300) for _ in range(5)], nn.Linear(1300, 10))
    block = Block()
    shared = nn.ModuleDict({"a": block, "b": block, "head": nn.Linear(8, 8)})  # one module under two names
    assert [unit.name for unit in zerolab.Zero3(shared, units=[Block]).units] == ["root", "a"]
    models = [Stack(), nn.Linear(4, 4), nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), wide]
    return [[unit.name for unit in zerolab.Zero1(model).units] for model in models]


def test_default_units(ranks):
    stack, linear, small, wide = ranks.run(default_units, ranks=1)[0]
    assert stack == ["root", "blocks.0", "blocks.1", "blocks.2"]
    assert linear == ["root"] and small == ["root"]
    assert wide == ["root", "0", "1", "2", "3", "4"]  # 6.8 MB each; the last, 52 kB, stays in the root


class ReadsAnother(nn.Module):
    """Its head is the embedding's weight, not its module."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block = nn.Embedding(11, 8), Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(self.emb(tokens)), self.emb.weight).sum()


def another_unit_is_read() -> list[str]:
    tokens = torch.tensor([[1, 2]])
    both = [(stage, units) for units in ([Block, nn.Embedding], [Block]) for stage in (1, 2, 3)]
    return [
        attempt(
            lambda stage=stage, units=units: zerolab.shard(ReadsAnother(), stage, units=units).model(tokens).backward()
        )
        for stage, units in both
    ]


def test_a_weight_that_another_unit_reads(ranks):
    """What the error advises is right."""
    for said in ranks.run(another_unit_is_read, ranks=2):
        assert said[3:] == ["no error"] * 3
        assert all(
            "of emb.weight" in message and "lies outside of them is the root's" in message for message in said[:3]
        )


def from_meta(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    with torch.device("meta"):
        model = CASES["plain"].model()
    zero = zerolab.shard(model, stage, units=CASES["plain"].units, init=lambda module: module.reset_parameters())
    tokens = torch.zeros(1, 3, dtype=torch.long)
    zero.model(tokens).sum().backward()
    return zero.full_state_dict()


def test_a_model_on_the_meta_device(ranks):
    for stage in range(4):
        states = ranks.run(from_meta, stage, ranks=2)
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert torch.equal(states[0]["norm.weight"], torch.ones(8)) and states[0]["head.weight"].std() > 0.05


# -- when the model is gone -------------------------------------------------------------------------------------------


def left_behind() -> list[bool]:
    """Whether what a sharded model held is gone with it: storages, process groups, threads."""
    alive = []
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block])
        optimizer = PLAIN.optimizer(zero.model)
        PLAIN.loss(zero.model, zero.rank, 0).backward()
        optimizer.step()
        reference = weakref.ref(zero)
        del zero, optimizer
        gc.collect()
        alive.append(reference() is not None)
    return alive


def test_a_model_on_the_meta_device_goes_to_the_device_that_was_chosen():
    """For GPUs that are shared, which the process group says nothing about."""
    with torch.device("meta"):
        model = Stack()
        assert device_of(model) == torch.device("cpu")
    with torch.device("cuda:0"):
        assert device_of(model) == torch.device("cuda:0")


def test_nothing_is_left_of_a_model_that_is_gone(ranks):
    assert ranks.run(left_behind, ranks=2) == [[False] * 4] * 2


def steps_without_a_model(stage: int) -> list[torch.Tensor]:
    """The optimizer is all that the script has kept, and on one rank the garbage collector has run."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    PLAIN.loss(zero.model, 0, 0).backward()
    params, rank = [zerolab.full_tensor(param.data).clone() for param in zero.model.parameters()], zero.rank
    grads = [zerolab.full_tensor(param.grad).clone() for param in zero.model.parameters()]
    del zero
    if rank == 0:
        gc.collect()
    optimizer.step()
    held = [zerolab.full_tensor(param) for group in optimizer.param_groups for param in group["params"]]
    return [new - (old - 0.1 * grad) for new, old, grad in zip(held, params, grads, strict=True)]


@pytest.mark.parametrize("stage", worlds(3, others=(0, 1, 2)))
def test_an_optimizer_outlasts_the_model(ranks, stage):
    for differences in ranks.run(steps_without_a_model, stage, ranks=2):
        assert all(difference.abs().max() < 1e-6 for difference in differences)
