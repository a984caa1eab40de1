"""The habits of training scripts, at every stage, against one process (habits.py)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from habits import HABITS, PAGE, Block, Model, Script, batch, page
from jobs_common import worlds
from torch import nn

import zerolab
from zerolab import Precision, to_local
from zerolab.engine.slices import Slice

TITLES = {entry.title: number for number, entry in enumerate(HABITS)}


def model() -> Model:
    torch.manual_seed(3)
    return Model().double()


def follow(script: Script, number: int, stage: int | None) -> tuple[dict[str, torch.Tensor], list[Any]]:
    entry = HABITS[number]
    if entry.before:
        entry.before(script)
    if stage is not None:
        script.shard(stage)
    script.optimizer = torch.optim.AdamW(script.model.parameters(), lr=0.05)
    entry.run(script)
    state = script.model.state_dict() if script.zero is None else script.zero.full_state_dict()
    return state, [float(value) if isinstance(value, float) else value.detach() for value in script.seen]


def alone(number: int, ranks: int) -> Any:
    return follow(Script(model(), list(range(ranks))), number, None)


def sharded(number: int, stages: list[int]) -> list[Any]:
    """What each stage gives: (full state, values seen) or, if it is refused there, the error."""
    results: list[Any] = []
    for stage in stages:
        script = Script(model(), [torch.distributed.get_rank()])
        if HABITS[number].refused is not None and stage in HABITS[number].stages:
            try:
                follow(script, number, stage)
                results.append("it was not refused")
            except (RuntimeError, TypeError, ValueError) as error:
                results.append(str(error))
        else:
            results.append(follow(script, number, stage))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
@pytest.mark.parametrize("title", TITLES)
def test_habit(ranks, title, n):
    number = TITLES[title]
    entry = HABITS[number]
    if n < entry.ranks:
        pytest.skip("nothing is wrong with one rank")
    runs = [[0], [1], [2], [3]] if entry.ranks > 1 else [[0, 1, 2, 3]]  # what breaks the group ends a run
    parts = [ranks.run(sharded, number, stages, ranks=n) for stages in runs]
    results = [list(itertools.chain(*of_rank)) for of_rank in zip(*parts, strict=True)]
    everywhere = entry.refused and len(entry.stages) == 4
    expected, expected_seen = (None, None) if everywhere else ranks.run(alone, number, n, ranks=1)[0]
    for rank, stages in enumerate(results):
        for stage, result in enumerate(stages):
            if entry.refused and stage in entry.stages:
                assert entry.refused in result, f"stage {stage}, rank {rank}"
                continue
            state, seen = result
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, msg=lambda m, s=stage, k=key: f"stage {s}, {k}: {m}")
            torch.testing.assert_close(seen, expected_seen, msg=lambda m, s=stage: f"stage {s}: {m}")


def test_the_page_is_what_the_tests_say():
    assert PAGE.read_text() == page()


# -- writes through .data, where forward reads a copy ----------------------------------------------------------------


def written(stage: int, dtype: torch.dtype | None, offload: str | None) -> list[float]:
    """How far forward is from a model of the full parameters, after each kind of write."""
    precision = Precision(dtype) if dtype else None
    net = model().float()
    zero = zerolab.shard(net, stage, units=[Block], precision=precision, offload=offload)
    x = batch(0, 0).float()
    kept = [p.data for p in net.parameters()]  # handed out once, written later
    distances = []

    def compare() -> None:
        plain = Model()
        plain.load_state_dict(zero.full_state_dict())
        plain, inputs = (plain.to(dtype), x.to(dtype)) if dtype else (plain, x)
        with torch.no_grad():
            distances.append((net(x) - plain(inputs)).abs().max().item())

    compare()
    for p in net.parameters():
        p.data.mul_(2)
    compare()
    for data in kept:
        to_local(data).view(-1)[:1] = 0.5
    compare()
    net(x).sum().backward()
    for data in kept:
        data.add_(0.25)
    compare()
    with torch.no_grad():
        torch._foreach_mul_(kept, 0.5)
    compare()
    return distances


@pytest.mark.parametrize(("dtype", "offload"), [(None, None), (torch.bfloat16, None), (None, "optimizer")])
def test_a_write_through_data_is_seen_at_the_next_forward(ranks, dtype, offload):
    for n in (1, 2, 3):
        for stage in range(1 if offload else 0, 4):
            for distances in ranks.run(written, stage, dtype, offload, ranks=n):
                assert distances == [0.0] * 5, (n, stage)


# -- hooks -----------------------------------------------------------------------------------------------------------


def hooks_and_accumulation(stage: int) -> tuple[list[str], list[float]]:
    """Which hooks run when, and by how much a gradient differs from the average of what the ranks added up."""
    net = model()
    zero = zerolab.shard(net, stage, units=[Block])
    called: list[str] = []
    grads: list[torch.Tensor] = []
    weight = net.head.weight
    weight.register_hook(lambda grad: (called.append("hook"), grads.append(grad.clone()))[0])
    weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    zero.model(batch(zero.rank, 0)).sum().backward()
    called.append("|")
    with zero.no_sync():
        zero.model(batch(zero.rank, 1)).sum().backward()
    called.append("|")
    zero.model(batch(zero.rank, 2)).sum().backward()
    return called, to_local(weight.grad - grads[0] - grads[1]).abs().view(-1).tolist()


def hook_that_registers_another(stage: int) -> list[str]:
    net = model()
    zero = zerolab.shard(net, stage, units=[Block])
    called: list[str] = []

    def first(param: nn.Parameter) -> None:
        called.append("first")
        handle.remove()
        net.first.bias.register_post_accumulate_grad_hook(lambda _: called.append("second"))

    handle = net.head.weight.register_post_accumulate_grad_hook(first)
    for number in range(2):
        zero.model(batch(zero.rank, number)).sum().backward()
    return called


def hook_of_another_shape(stage: int) -> str:
    net = model()
    zerolab.shard(net, stage, units=[Block])
    net.first.weight.register_hook(lambda grad: grad.sum())
    try:
        net(batch(0, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_hooks_run_in_each_backward_that_reduces(ranks):
    for stage in range(4):
        for called, distances in ranks.run(hooks_and_accumulation, stage, ranks=2):
            assert called == ["hook", "after", "|", "|", "hook", "after"]
            assert all(distance < 1e-12 for distance in distances)
        assert ranks.run(hook_that_registers_another, stage, ranks=2) == [["first", "second"]] * 2
        for said in ranks.run(hook_of_another_shape, stage, ranks=2):
            assert "a hook on first.weight returned a gradient of shape ()" in said


# -- copies, scaling, mixed precision --------------------------------------------------------------------------------


def copied(stage: int) -> list[Any]:
    net = model()
    zerolab.shard(net, stage, units=[Block])
    net(batch(0, 0)).sum().backward()
    weight = net.head.weight
    twin, grad = copy.deepcopy(weight), copy.deepcopy(weight.grad)
    kinds = [isinstance(twin, nn.Parameter), twin.requires_grad, type(grad)]
    return [*kinds, bool((twin == weight).all()), bool((grad == weight.grad).all())]


def test_a_copied_parameter_is_a_plain_one_or_a_slice(ranks):
    for stage in range(4):
        for facts in ranks.run(copied, stage, ranks=2):
            assert facts == [True, True, Slice if stage else torch.Tensor, True, True]


def clipped_in_half_precision(stage: int) -> Any:
    """zerolab's clipping and torch's, on the same bf16 gradients."""
    results = []
    for theirs in (False, True):
        net = model().float()
        zero = zerolab.shard(net, stage, units=[Block], precision=Precision(torch.bfloat16))
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net(batch(zero.rank, 0).float()).sum().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1) if theirs else zero.clip_grad_norm_(0.1)
        optimizer.step()
        results.append((norm, zero.full_state_dict()))
    return results


def test_torchs_clipping_of_bf16_gradients_is_ours(ranks):
    for stage in (1, 2, 3):
        for (norm, state), (their_norm, their_state) in ranks.run(clipped_in_half_precision, stage, ranks=2):
            torch.testing.assert_close(their_norm, norm, rtol=1e-6, atol=0)
            for key, value in state.items():
                torch.testing.assert_close(their_state[key], value, rtol=1e-6, atol=1e-7)


def refused_scaling(stage: int) -> list[str]:
    said = []
    net = model().float()
    zero = zerolab.shard(net, stage, units=[Block], precision=Precision(torch.float16))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(net(batch(zero.rank, 0).float()).sum()).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        said.append(str(error))
    optimizer.zero_grad()
    with zero.no_sync():
        net(batch(zero.rank, 0).float()).sum().backward()
    try:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_scaling_in_float16_and_clipping_under_no_sync_are_refused(ranks):
    for stage in range(4):
        for said in ranks.run(refused_scaling, stage, ranks=2):
            assert "unscale FP16 gradients" in said[0]  # torch says it
            assert "run the last micro-batch's backward outside no_sync()" in said[-1] or stage == 0


# -- writes inside forward --------------------------------------------------------------------------------------------


class Clamping(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def clamping() -> Model:
    net = model()
    net.blocks[1].__class__ = Clamping
    return net


def written_in_forward(stage: int, precision: Precision | None) -> Any:
    net = clamping()
    zero = zerolab.shard(net, stage, units=[Block], precision=precision)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for number in range(3):
            net(batch(zero.rank, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return zero.full_state_dict()


def test_writes_inside_forward_are_kept_or_refused(ranks):
    alone = clamping()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(3):
        for rank in range(2):
            (alone(batch(rank, number)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in range(4):
        for state in ranks.run(written_in_forward, stage, None, ranks=2):
            if stage == 3:
                assert "forward wrote into parameters of blocks.1" in state
            else:
                for key, value in alone.state_dict().items():
                    torch.testing.assert_close(state[key], value)
        for said in ranks.run(written_in_forward, stage, Precision(torch.bfloat16), ranks=2):
            assert "forward wrote into parameters of blocks.1" in said


class Following(Block):
    """Writes what depends on its batch, as an Embedding with max_norm does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            limit = 0.05 * x.abs().max()
            self.up.weight.clamp_(-limit, limit)
        return super().forward(x)


def written_by_batch(stage: int, same: bool) -> str:
    net = model()
    net.blocks[1].__class__ = Following
    zero = zerolab.shard(net, stage, units=[Block])
    try:
        net(batch(0 if same else zero.rank, 0))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_write_otherwise_in_forward(ranks):
    for stage in range(3):
        assert ranks.run(written_by_batch, stage, True, ranks=2) == ["nothing"] * 2
        for said in ranks.run(written_by_batch, stage, False, ranks=2):
            assert "forward wrote into parameters of blocks.1, and not the same on every rank" in said


# -- an optimizer's step, where all of it is plain ---------------------------------------------------------------------


def kinds(params: Iterable[nn.Parameter]) -> set[type]:
    """Of parameters and their gradients."""
    return {type(one) for p in params for one in (p, p.grad)}


class Stumbling(torch.optim.SGD):
    """Steps, and fails then if it is told to. Another optimizer may step inside of it."""

    inner: torch.optim.Optimizer | None = None
    fails = False

    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        assert {type(p) for p in params} == {nn.Parameter}
        if closure is not None:
            closure()
            assert kinds(params) == {nn.Parameter, torch.Tensor}
        super().step()
        if self.inner is not None:
            self.inner.step()
        assert kinds(params) == {nn.Parameter, torch.Tensor}
        if self.fails:
            raise KeyError


zerolab.declare_elementwise(Stumbling)


def stumble(stage: int) -> tuple[float, float, int]:
    """Torch's clipping after a step that failed in its closure, and one that did not: what it and zerolab find."""
    net = model()
    zero = zerolab.shard(net, stage, units=[Block])
    optimizer = Stumbling(net.parameters(), lr=0.1)
    called = []
    net.head.weight.register_hook(called.append)

    def closure(fails: bool) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(batch(zero.rank, 0)).sum()
        loss.backward()
        if fails:
            raise KeyError
        return loss

    try:
        optimizer.step(lambda: closure(True))
    except KeyError:
        optimizer.zero_grad()
    optimizer.step(lambda: closure(False))
    optimizer.zero_grad()
    net(batch(zero.rank, 1)).sum().backward()
    theirs = nn.utils.clip_grad_norm_(net.parameters(), 100.0)
    return theirs.item(), zero.clip_grad_norm_(100.0).item(), len(called)


def test_a_step_that_fails_and_one_with_a_closure(ranks):
    for stage in range(4):
        for theirs, ours, called in ranks.run(stumble, stage, ranks=2):
            assert theirs == pytest.approx(ours, rel=1e-12) and called == 3


def fail_inside(stage: int) -> tuple[float, ...]:
    """What is shown at once after a step that failed half-way, of an optimizer inside of which another steps."""
    net = model()
    zero = zerolab.shard(net, stage, units=[Block])
    torch.optim.SGD(net.parameters())  # so that torch and zerolab know its class, too
    optimizer = Stumbling(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(batch(zero.rank, 0)).sum().backward()
    optimizer.step()
    shown, before = kinds(net.parameters()), zero.full_state_dict()
    assert nn.Parameter not in shown
    optimizer.fails = True
    try:
        optimizer.step()
    except KeyError:
        assert kinds(net.parameters()) == shown
        states = [state["momentum_buffer"] for one in (optimizer, optimizer.inner) for state in one.state.values()]
        assert {type(one) for one in states} == {Slice if stage else torch.Tensor}
        theirs = nn.utils.clip_grad_norm_(net.parameters(), 100.0)
        after = zero.full_state_dict()
    with torch.no_grad():  # and what the step has done is seen
        plain = Model().double()
        plain.load_state_dict(after)
        apart = (net(batch(0, 1)) - plain(batch(0, 1))).abs().max()
    moved = min((after[key] - value).abs().max().item() for key, value in before.items())
    return theirs.item(), zero.clip_grad_norm_(100.0).item(), apart.item(), moved


def test_after_a_step_that_failed_the_model_shows_what_it_did_before(ranks):
    for stage in range(4):
        for theirs, ours, apart, moved in ranks.run(fail_inside, stage, ranks=2):
            assert theirs == pytest.approx(ours, rel=1e-12) and apart == 0.0 and moved > 0
