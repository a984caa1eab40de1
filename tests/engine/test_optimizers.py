"""Every elementwise optimizer, parameter groups, schedules and closures, against one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from cases_common import sharded
from jobs_common import all_say, attempt
from torch import nn, optim

import zerolab
from zerolab import Precision
from zerolab.trial.numbers import Block, alone, build, noise
from zerolab.trial.numbers import Numbers as Case
from zerolab.trial.training import Optimized
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


ELEMENTWISE = ["ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop"]


OPTIMIZERS = {
    **{name: Optimized(name) for name in ELEMENTWISE},
    **{f"{name}, foreach": Optimized(name, foreach=True) for name in ELEMENTWISE},
    **{f"{name}, maximize": Optimized(name, maximize=True) for name in ("SGD", "Adam", "AdamW")},
    "SGD, momentum": Optimized("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW, amsgrad": Optimized("AdamW", amsgrad=True),
    **{f"{name}, fused": Optimized(name, fused=True) for name in ("SGD", "Adagrad", "Adam", "AdamW")},
}


def each_optimizer(names: list[str], stage: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: sharded(OPTIMIZERS[name], stage)[0] for name in names}


def each_alone(names: list[str], ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: alone(OPTIMIZERS[name], ranks)[0] for name in names}


LIKE_OTHERS = [f"{name}, foreach" for name in ELEMENTWISE if name not in ("Adam", "Rprop")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "stage"),
    [
        pytest.param([name for name in OPTIMIZERS if name not in LIKE_OTHERS], 3, id="3"),
        pytest.param(LIKE_OTHERS, 3, marks=pytest.mark.exhaustive, id="3-like others"),
        *(pytest.param([*OPTIMIZERS], stage, marks=pytest.mark.exhaustive, id=str(stage)) for stage in (0, 1)),
    ],
)
def test_every_elementwise_optimizer(ranks, names, stage):
    expected = ranks.run(each_alone, names, 3, ranks=1)[0]
    for results in ranks.run(each_optimizer, names, stage, ranks=3):
        for name, state in results.items():
            tolerance = {"rtol": 0, "atol": 0} if OPTIMIZERS[name].exact else {"rtol": 1e-4, "atol": 1e-6}
            for key, value in expected[name].items():
                torch.testing.assert_close(state[key], value, **tolerance, msg=f"{name}: {key}")


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


# -- torch's state dicts ----------------------------------------------------------------------------------------------


class Even(Case):
    """On two ranks all slices are equally long, so nothing but a stamp tells them apart."""

    units = ()

    def model(self):
        return nn.Sequential(nn.Linear(8, 8, bias=False))

    def loss(self, model, rank, step):
        return model(noise(rank, step, 3, 8)).square().mean()


def trained(case: Case, stage: int, steps: range, load: Any = None, model: Any = None) -> tuple[Any, Any, Any]:
    """The full parameters, the engine and the optimizer after `steps`; `load`, `model`: state dicts to begin with."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=600))
    zero = zerolab.shard(build(case), stage, units=case.units or None, group=group)
    optimizer = optim.Adam(zero.model.parameters(), lr=0.01)
    if load is not None:
        zero.load_full_state_dict(model)
        optimizer.load_state_dict(load)
    for step in steps:
        case.loss(zero.model, zero.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(), zero, optimizer


def reloaded(case: Case, stage: int, saved_by: int | None, path: str) -> Any:
    """Rank `saved_by`'s state dict goes to every rank, through a file as usual; None: each rank keeps its own."""
    expected, _, _ = trained(case, stage, range(4))
    model, zero, optimizer = trained(case, stage, range(2))
    if zero.rank == saved_by:
        torch.save(optimizer.state_dict(), path)
    zero.comm.exchange(None, "wait for the file")
    state = optimizer.state_dict() if saved_by is None else torch.load(path, weights_only=True)
    got: list[Any] = []
    caught = attempt(lambda: got.append(trained(case, stage, range(2, 4), state, model)[0]))
    right = bool(got) and all(torch.equal(got[0][key], value) for key, value in expected.items())
    return caught, right


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [2, 3])
def test_each_rank_may_load_its_own_state(ranks, stage, n, tmp_path):
    for caught, right in ranks.run(reloaded, Even(), stage, None, "", ranks=n):
        assert caught is None and right


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("n", "saved_by", "case"), [(2, 0, Even()), (2, 1, Even()), (3, 0, PLAIN)])
def test_one_rank_s_state_on_all_ranks(ranks, stage, n, saved_by, case, tmp_path):
    """It is right in stage 0. In the others it was taken in silence where slices are equally long."""
    results = ranks.run(reloaded, case, stage, saved_by, str(tmp_path / "state"), ranks=n)
    if stage == 0:
        assert results == [(None, True)] * n
        return
    other = 1 if saved_by == 0 else 0
    words = (f"rank {other}: Adam was given a state for slices, those of rank {saved_by} of {n}", "zerolab.load(")
    all_say([caught for caught, _ in results], "RuntimeError", *words)


def loaded_into(stage: int, how: str) -> Any:
    """A state of full shapes on all ranks, or the last rank alone loads its own, or slices go to another stage."""
    case = Even() if how == "slices" else PLAIN
    model, zero, optimizer = trained(case, {"full": 0, "slices": 1}.get(how, stage), range(2))
    if how == "alone":
        optimizer.load_state_dict(optimizer.state_dict()) if zero.rank == zero.world_size - 1 else None
        case.loss(zero.model, zero.rank, 2).backward()
        return attempt(lambda: (optimizer.step(), case.loss(zero.model, zero.rank, 3).backward()))
    return attempt(trained, case, stage, range(2, 4), optimizer.state_dict(), model)


def line_search(n: int, as_float: bool) -> tuple[list[torch.Tensor], float]:
    """Two steps of LBFGS, whose line search decides by what the closure returns: on `n` ranks, or on one for all."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x, y = torch.randn(2, n, 5, 6, dtype=torch.float64)
    x, y = x * torch.arange(1, n + 1).view(n, 1, 1), y.sum(2, keepdim=True)  # ranks' losses differ
    if n > 1 and torch.distributed.is_initialized():
        model = zerolab.DDP(model).model
        rank = torch.distributed.get_rank()
        x, y = x[rank], y[rank]
    optimizer = optim.LBFGS(model.parameters(), lr=2.0, max_iter=6, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss.item() if as_float else loss

    for _ in range(2):
        told = optimizer.step(closure)
    return [param.detach().clone() for param in model.parameters()], float(torch.as_tensor(told).detach())


@pytest.mark.parametrize(("n", "as_float"), [(2, False), (3, True)])
def test_an_optimizer_that_decides_by_the_loss_sees_that_of_all_ranks(ranks, n, as_float):
    expected, loss = line_search(n, as_float)
    for found, told in ranks.run(line_search, n, as_float, ranks=n):
        assert told == pytest.approx(loss, rel=1e-9)
        assert all(torch.allclose(one, other, rtol=1e-7, atol=1e-9) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_of_full_shapes(ranks, stage, n):
    caught = ranks.run(loaded_into, stage, "full", ranks=n)
    all_say(caught, "RuntimeError", "rank 0: Adam was given a state exp_avg of shape (", "zerolab.load(")


@pytest.mark.parametrize("stage", range(4))
def test_a_state_of_slices_in_another_stage(ranks, stage):
    """Stages 1 to 3 have the same slices."""
    caught = ranks.run(loaded_into, stage, "slices", ranks=2)
    if stage:
        assert caught == [None, None]
    else:
        all_say(caught, "RuntimeError", "rank 0: Adam was given a state for slices", "stage 0 has none")


@pytest.mark.parametrize("stage", range(4))
def test_a_state_that_one_rank_loads(ranks, stage):
    caught = ranks.run(loaded_into, stage, "alone", ranks=2)
    all_say(caught, "CommError", "check of the optimizer's state")
