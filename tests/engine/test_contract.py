"""What the contract refuses, and with which words; whole parameters, state dicts; the override points."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo import CASES, Block, Stack, build, sharded, words

import zerolab

PLAIN = CASES["plain"]


def attempt(function: Any) -> str:
    """The error that `function` ends with: class and message."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- construction: one rank has something else, and all are told ----------------------------------------------------


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
    ],
)
def test_an_odd_rank_is_named_on_every_rank(ranks, what, kind, words):
    for message in ranks.run(build_with_one_odd_rank, what, 1, ranks=2, timeout=60, group_timeout=10):
        assert message.startswith(kind)
        for word in words:
            assert word in message


def refusals() -> dict[str, str]:
    """Everything else that is refused; each on a fresh model, where stage matters in stages 1 to 3."""
    tokens = words(dist.get_rank(), 0, 2, 5)
    said = {}
    for stage in range(4):
        model = Stack()
        early = torch.optim.AdamW(model.parameters())
        zero = zerolab.shard(model, stage, units=Block)
        model(tokens).sum().backward()
        said[f"early optimizer {stage}"] = attempt(early.step)
        said[f"sharded twice {stage}"] = attempt(lambda model=model: zerolab.shard(model, 1))
        regulariser = lambda model=model: model.head.weight.square().sum().backward()  # noqa: E731
        said[f"outside forward {stage}"] = attempt(regulariser)
        said[f"create_graph {stage}"] = attempt(lambda model=model: model(tokens).sum().backward(create_graph=True))
        zero = zerolab.shard(Stack(), stage, units=Block)
        said[f"method {stage}"] = attempt(lambda zero=zero: zero.register_forward_method("generate"))
        said[f"norm {stage}"] = attempt(lambda zero=zero: zero.clip_grad_norm_(1.0, 0))
        for name, change in {
            "double": lambda m: m.double(),
            "half": lambda m: m.head.half(),
            "data": lambda m: setattr(m.head.weight, "data", m.head.weight.data.clone()),
            "parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros_like(m.head.weight))),
        }.items():
            zero = zerolab.shard(Stack(), stage, units=Block)
            change(zero.model)
            said[f"{name} {stage}"] = attempt(lambda zero=zero: zero.model(tokens))
        if stage:
            zero = zerolab.shard(Stack(), stage, units=Block)
            said[f"state_dict {stage}"] = attempt(zero.model.state_dict)
            said[f"inner state_dict {stage}"] = attempt(zero.model.blocks[0].state_dict)
            said[f"load_state_dict {stage}"] = attempt(lambda zero=zero: zero.model.load_state_dict({}))
            params = [p for p in zero.model.parameters() if p.dim() == 2]
            for cls in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, MyAdam):
                optimizer = cls(params, lr=1e-3)
                zero.model(tokens).sum().backward()
                said[f"{cls.__name__} {stage}"] = attempt(lambda o=optimizer: o.step(lambda: 0.0))
    for stage in (4, -1, "2"):
        said[f"shard {stage}"] = attempt(lambda stage=stage: zerolab.shard(Stack(), stage))
    said["float16"] = attempt(lambda: zerolab.Precision(torch.float16, master=torch.float16))
    said["int32"] = attempt(lambda: zerolab.Precision(torch.int32))
    return said


class MyAdam(torch.optim.AdamW):
    """Not known to be elementwise, for all the engine knows."""


def test_refusals(ranks):
    expected = {
        "early optimizer": "RuntimeError: AdamW was built before the model was sharded: it holds the old emb.weight",
        "sharded twice": "ValueError: rank 0: emb.weight is sharded already",
        "outside forward": "RuntimeError: a gradient reached head.weight outside of forward",
        "create_graph": "NotImplementedError: backward(create_graph=True)",
        "method": "ValueError: Stack has no method 'generate'",
        "norm": "ValueError: norm_type must be greater than 0",
        "double": r"the storage of \S+ was replaced after sharding",
        "half": r"the storage of head.weight was replaced after sharding",
        "data": r"the storage of head.weight was replaced after sharding",
        "parameter": r"the storage of head.weight was replaced after sharding",
        "state_dict": "zero.full_state_dict()",
        "inner state_dict": "zero.full_state_dict()",
        "load_state_dict": "zero.load_full_state_dict(state)",
        "Muon": "Muon is not known to be elementwise",
        "Adafactor": "Adafactor is not known to be elementwise",
        "LBFGS": "LBFGS is not known to be elementwise",
        "MyAdam": "zerolab.declare_elementwise(MyAdam)",
        "shard": "ValueError: stage must be 0, 1, 2 or 3",
        "float16": "small updates would be lost; use float32",
        "int32": "Precision(compute=torch.int32): not a supported dtype",
    }
    for said in ranks.run(refusals, ranks=2, timeout=60, group_timeout=20):
        for case, message in said.items():
            pattern = expected[re.sub(r" [-\d]+$", "", case)]
            assert pattern in message or re.search(pattern, message), f"{case}: {message}"


def frozen_by_one_rank() -> list[str]:
    said = []
    for stage in range(4):
        zero = zerolab.shard(Stack(), stage, units=[Block])
        optimizer = torch.optim.AdamW(zero.model.parameters())
        for step in range(2):
            if step == 1 and zero.rank == 1:
                zero.model.blocks[1].up.weight.requires_grad_(False)
            said.append(attempt(lambda step=step, zero=zero: PLAIN.loss(zero.model, zero.rank, step).backward()))
            if said[-1] == "no error":
                optimizer.step()
    return said


def test_a_parameter_that_one_rank_froze(ranks):
    for said in ranks.run(frozen_by_one_rank, ranks=3, timeout=60, group_timeout=20):
        assert said[::2] == ["no error"] * 4
        for message in said[1::2]:
            assert message.startswith("CommError: blocks.1.up.weight is frozen on rank 1 and trainable on rank 0")


def test_no_process_group():
    if not dist.is_initialized():
        with pytest.raises(zerolab.CommError, match=r"zerolab\.init\(\)"):
            zerolab.Zero1(Stack())


def stale_graph() -> list[str]:
    """Forward, step, backward: the old activations do not fit the new weights, and torch says so."""
    said = []
    for stage in range(4):
        zero = zerolab.shard(Stack(), stage, units=[Block])
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        PLAIN.loss(zero.model, zero.rank, 0).backward()
        loss = PLAIN.loss(zero.model, zero.rank, 1)
        optimizer.step()
        said.append(attempt(loss.backward))
    return said


def edited_before_backward() -> list[str]:
    said = []
    for stage in range(4):
        zero = zerolab.shard(Stack(), stage, units=[Block])
        PLAIN.loss(zero.model, zero.rank, 0).backward()
        loss = PLAIN.loss(zero.model, zero.rank, 1)
        with torch.no_grad():
            for p in zero.model.parameters():
                p.mul_(2.0)
        said.append(attempt(loss.backward))
    return said


def test_an_edit_between_forward_and_backward_is_refused(ranks):
    for said in ranks.run(edited_before_backward, ranks=2):
        assert all("modified by an inplace operation" in message for message in said), said


def after_an_interrupt() -> list[str]:
    said = []
    for stage in range(4):
        zero = zerolab.shard(Stack(), stage, units=[Block])
        before = zero.full_state_dict()

        def stop(*args):
            raise KeyboardInterrupt

        handle = zero.model.blocks[1].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            PLAIN.loss(zero.model, zero.rank, 0)
        handle.remove()
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        after = zero.full_state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        PLAIN.loss(zero.model, zero.rank, 0).backward()
        said.append(attempt(optimizer.step))
    return said


def test_an_optimizer_built_after_an_interrupted_forward_is_refused(ranks):
    for said in ranks.run(after_an_interrupt, ranks=2):
        assert all("after one that was interrupted" in message for message in said), said


def test_backward_through_a_forward_before_the_step_is_refused(ranks):
    for said in ranks.run(stale_graph, ranks=2):
        assert all("modified by an inplace operation" in message for message in said), said


# -- what the model shows -------------------------------------------------------------------------------------------


def shown(stage: int) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, torch.Tensor], Any]:
    torch.manual_seed(dist.get_rank())  # other values on every rank; the first's count
    model = Stack()
    model.register_buffer("count", torch.tensor([dist.get_rank()]))
    model.register_buffer("flag", torch.tensor(dist.get_rank() == 0))
    zero = zerolab.shard(model, stage, units=[Block])
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    for p in model.parameters():  # touching is harmless
        p.sum().item(), repr(p), p.detach().clone()
    assert (zero.stage, zero.rank, zero.world_size, zero.model) == (
        stage,
        dist.get_rank(),
        dist.get_world_size(),
        model,
    )
    return shapes, zero.full_state_dict(), zero.full_state_dict(rank0_only=True)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_slices_and_full_state_dict(ranks, n):
    torch.manual_seed(0)
    model = Stack()
    model.register_buffer("count", torch.tensor([0]))
    model.register_buffer("flag", torch.tensor(True))
    expected = model.state_dict()
    for stage in range(4):
        total = dict.fromkeys(dict(model.named_parameters()), 0)
        for rank, (shapes, state, on_first) in enumerate(ranks.run(shown, stage, ranks=n)):
            assert [name for name, _ in shapes] == list(total)
            for (name, shape), p in zip(shapes, model.parameters(), strict=True):
                total[name] += shape[0] * (1 if stage else 0)
                if stage:
                    assert shape[1:] == (1,) * (p.dim() - 1)
                else:
                    assert shape == p.shape
            assert list(state) == list(expected) and list(on_first) == (list(expected) if rank == 0 else [])
            assert all(torch.equal(state[key], value) for key, value in expected.items())
            model.load_state_dict(state, strict=True)
        if stage:
            assert total == {name: p.numel() for name, p in model.named_parameters()}


def edit_and_load(stage: int) -> None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    model, tokens = zero.model, words(0, 0, 2, 5)
    before = zero.full_state_dict()
    plain = build(PLAIN)
    with zero.full_parameters():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        assert torch.equal(model(tokens), plain(tokens))
        model.head.bias.fill_(zero.rank + 3.0)
    after = zero.full_state_dict()
    assert (after["head.bias"] == 3).all(), "the first rank's edit is kept"
    assert all(torch.equal(after[key], before[key]) for key in before if key != "head.bias")
    with pytest.raises(KeyError), zero.full_parameters():
        model.head.bias.fill_(9.0)
        raise KeyError
    assert (zero.full_state_dict()["head.bias"] == 3).all(), "after an error nothing is kept"
    plain.head.bias.data.fill_(3.0)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens)), "the next forward sees the edit"

    broken = {key: value for key, value in before.items() if key != "emb.weight"}
    for state, what in (
        (broken, "missing emb.weight"),
        ({**before, "x": before["head.bias"]}, "unexpected x"),
        ({**before, "head.bias": torch.zeros(3)}, "head.bias has shape"),
    ):
        assert what in attempt(lambda state=state: zero.load_full_state_dict(state if zero.rank == 0 else None))
    assert (zero.full_state_dict()["head.bias"] == 3).all(), "and nothing was loaded"
    zero.load_full_state_dict(before if zero.rank == 0 else None)
    assert all(torch.equal(value, before[key]) for key, value in zero.full_state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(tokens), build(PLAIN)(tokens))
    if stage:
        with torch.no_grad():  # an edit by hand of the slices is seen too
            for p in model.parameters():
                p.zero_()
            assert not model(tokens).any()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_editing_and_loading(ranks, n):
    for stage in range(4):
        ranks.run(edit_and_load, stage, ranks=n, timeout=60, group_timeout=20)


# -- the override points --------------------------------------------------------------------------------------------

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
    for mine, theirs in ranks.run(overridden, cls.__name__, ranks=n, timeout=60, group_timeout=20):
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


def test_nothing_is_left_of_a_model_that_is_gone(ranks):
    assert ranks.run(left_behind, ranks=2) == [[False] * 4] * 2
