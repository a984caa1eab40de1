"""What optimizers keep for slices: the rule of slices.py between steps, plain tensors in a step (states.py)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs_common import worlds
from test_optimizers import ELEMENTWISE
from torch import Tensor, nn

import zerolab
from zerolab.engine.slices import Slice
from zerolab.engine.step import STAMP


class Odd(nn.Module):
    """On 2 and 3 ranks a rank has all of a parameter, some, one element of it, or none."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        for name, shape in {"a": (4, 3), "b": (5,), "c": (3, 3), "d": (1,), "e": (2,)}.items():
            setattr(self, name, nn.Parameter(torch.rand(shape, generator=draw) + 0.1))

    def forward(self, step: int) -> Tensor:
        return (self.a.sum() * self.c.square()).sum() + step * (self.b * self.d).square().sum() + self.e.sin().sum()


class Pair:
    """The same run on ranks, sharded, and in this process alone."""

    def __init__(self, stage: int, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model, self.alone = Odd(), Odd()
        self.zero = zerolab.shard(self.model, stage)
        self.make, self.steps = make, 0
        self.optimizer, self.plain = make(self.model.parameters()), make(self.alone.parameters())

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps += 1
            for model, optimizer in ((self.model, self.optimizer), (self.alone, self.plain)):
                model(self.steps).backward()
                optimizer.step()
                optimizer.zero_grad()

    def states(self, key: str) -> list[tuple[Tensor, Tensor]]:
        params = zip(self.model.parameters(), self.alone.parameters(), strict=True)
        return [(self.optimizer.state[mine][key], self.plain.state[whole][key]) for mine, whole in params]

    def check(self, optimizer: Any = None) -> None:
        """Of every parameter, each state that has its shape is a slice of the state in one process."""
        params = list(zip(self.model.parameters(), self.alone.parameters(), strict=True))
        for mine, whole in params:
            kept, want = (optimizer or self.optimizer).state[mine], self.plain.state[whole]
            assert kept.keys() == want.keys()
            for key, value in kept.items():
                assert (type(value) is Slice) == (isinstance(value, Tensor) and want[key].shape == whole.shape), key
                found = zerolab.full_tensor(value) if isinstance(value, Tensor) else value
                assert torch.allclose(torch.as_tensor(found), torch.as_tensor(want[key]))
            assert torch.allclose(zerolab.full_tensor(mine), whole)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def on_ranks(ranks: Any, job: Callable[..., Any], n: int, *given: Any) -> list[Any]:
    return [result for stage in (1, 2, 3) for result in ranks.run(job, stage, *given, ranks=n)]


# -- the rule --------------------------------------------------------------------------------------------------------


def asked(stage: int) -> list[list[float]]:
    pair = Pair(stage, adam)
    answers = []
    for _ in range(2):
        pair.step()
        for mine, whole in pair.states("exp_avg"):
            mine.mul_(0.5)  # which the next step sees
            whole.mul_(0.5)
    for key in ("exp_avg", "exp_avg_sq"):
        for mine, whole in pair.states(key):
            rows = [[t.norm(), t.mean(), t.sum(), t.abs().max(), (t / (1 + t.square())).norm()] for t in (mine, whole)]
            torch.testing.assert_close(*rows)
            answers.append([one.item() for one in rows[0]])
            for refused in (mine.median, lambda mine=mine: mine[0], mine.tolist, mine.normal_):
                with pytest.raises(RuntimeError, match=r"this rank's slice|random values"):
                    refused()
    assert [type(mine) for mine, _ in pair.states("step")] == [Tensor] * 5
    pair.check()
    return answers


@pytest.mark.parametrize("n", worlds(3, others=(2,)))
def test_the_rule(ranks, n):
    for stage in (1, 3):
        results = ranks.run(asked, stage, ranks=n)
        assert all(result == results[0] for result in results)


def every_optimizer(stage: int) -> None:
    for name in ELEMENTWISE:
        for options in ({}, {"foreach": True}, {"momentum": 0.9} if name in ("SGD", "RMSprop") else {"maximize": True}):
            pair = Pair(stage, lambda params, name=name, options=options: getattr(torch.optim, name)(params, **options))
            pair.step(2)
            pair.check()


@pytest.mark.parametrize("n", worlds(2, others=(3,)))
def test_every_elementwise_optimizer(ranks, n):
    ranks.run(every_optimizer, 2, ranks=n)


class Counting(torch.optim.Optimizer):
    """It keeps tensors in a list, one number per parameter in a tensor of shape (1,), and once an error."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.broken = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["count"], state["last"] = torch.zeros(1), [torch.zeros_like(param), torch.zeros_like(param)]
            assert {type(one) for one in (param, param.grad, state["count"], *state["last"])} == {nn.Parameter, Tensor}
            if self.broken:
                raise ArithmeticError
            state["count"] += 1
            state["last"] = [state["last"][1], param.grad.clone()]
            param.sub_(state["last"][0] + state["last"][1], alpha=0.01)


def of_any_kind(stage: int) -> None:
    zerolab.declare_elementwise(Counting)
    pair = Pair(stage, Counting)
    held: Any = []
    for step in range(3):
        if step == 2:
            held = [one for mine, _ in pair.states("last") for one in mine]
            pair.optimizer.broken = True
            pair.model(1).backward()
            with pytest.raises(ArithmeticError):
                pair.optimizer.step()
            pair.optimizer.broken = False
            pair.optimizer.zero_grad()
        pair.step()
    for mine, whole in pair.states("last"):
        for one, other in zip(mine, whole, strict=True):
            assert torch.allclose(one.norm(), other.norm())
    for mine, whole in pair.states("count"):
        assert type(mine) is Tensor and mine.item() == whole.item() == 3
    assert {type(one) for one in held} == {Slice}, "what the step replaced is still a slice"


@pytest.mark.parametrize("n", worlds(3, others=(2,)))
def test_states_of_any_kind(ranks, n):
    on_ranks(ranks, of_any_kind, n)


# -- what programs do with states ------------------------------------------------------------------------------------


def copied(stage: int) -> None:
    """Copies follow the rule, files hold plain tensors, and what is loaded is marked."""
    pair = Pair(stage, adam)
    pair.step(2)
    pair.check(copied := copy.copy(pair.optimizer))
    assert copied.state is pair.optimizer.state
    deep = copy.deepcopy(pair.optimizer.state_dict())
    assert type(deep["state"][0]["exp_avg"]) is Slice
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    read = torch.load(file)
    again = pickle.loads(pickle.dumps(pair.optimizer))
    for state in (*read["state"].values(), *again.state.values()):
        assert {type(value) for value in state.values()} == {Tensor}
    pair.step()
    for state in (deep, read):
        before = [kept["exp_avg"].clone() for kept in state["state"].values()]
        pair.optimizer = pair.make(pair.model.parameters())  # it has made no step
        pair.optimizer.load_state_dict(state)
        assert all(STAMP in group for group in pair.optimizer.state_dict()["param_groups"])
        for (mine, _), want in zip(pair.states("exp_avg"), before, strict=True):
            assert type(mine) is Slice and torch.equal(*map(zerolab.to_local, (mine, want)))


def written(stage: int) -> None:
    """State that a program clears, replaces, moves, or puts there itself; parameters that come later."""
    pair = Pair(stage, lambda params: adam(list(params)[:3]))
    pair.step(2)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.alone, pair.plain)):
        optimizer.state.clear()
        optimizer.add_param_group({"params": list(model.parameters())[3:], "lr": 0.05})
    pair.step(2)
    pair.check()
    for optimizer in (pair.optimizer, pair.plain):
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key == "exp_avg":
                    state[key] = value.to(torch.float64).float()
                elif isinstance(value, Tensor):
                    value.data = value.data.clone()
        for param in optimizer.param_groups[1]["params"]:
            optimizer.state[param] = {"step": torch.tensor(1.0)} | {
                key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")
            }
    pair.check()
    pair.step()
    pair.check()


def through_checkpoint(stage: int, path: str) -> None:
    pair = Pair(stage, adam)
    pair.step(2)
    zerolab.save(path, pair.zero, pair.optimizer)
    want = {key: value.clone() for key, value in pair.zero.full_state_dict().items()}
    pair.step()
    loaded = pair.make(pair.model.parameters())
    for optimizer in (pair.optimizer, loaded):  # one that has stepped, and one that has not
        zerolab.load(path, pair.zero, optimizer)
        assert {type(optimizer.state[param]["exp_avg"]) for param in pair.model.parameters()} == {Slice}
    assert all(torch.equal(value, want[key]) for key, value in pair.zero.full_state_dict().items())


@pytest.mark.parametrize("n", worlds(3, others=(2,)))
def test_what_programs_do(ranks, n, tmp_path):
    on_ranks(ranks, copied, n)
    on_ranks(ranks, written, n)
    for stage in (1, 3):
        ranks.run(through_checkpoint, stage, str(tmp_path / str(stage)), ranks=n)


def unchanged(stage: int) -> None:
    """Whoever looks at states between steps does not change the run, bit for bit."""
    ends = []
    for look in (False, True):
        pair = Pair(stage, lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True))
        for _ in range(3):
            pair.step()
            if look:
                [value.norm() for state in pair.optimizer.state.values() for value in state.values()]
        ends.append(pair.zero.full_state_dict())
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_look_changes_nothing(ranks):
    on_ranks(ranks, unchanged, 2)
