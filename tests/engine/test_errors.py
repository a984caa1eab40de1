"""What is refused, and with which words; and a good step after a broken one."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases_common import attempt
from jobs_common import Caught, all_say, worlds
from jobs_common import attempt as attempt_timed
from torch import nn

import zerolab
from zerolab.trial.numbers import Block, Stack, alone, build, words
from zerolab.trial.zoo import CASES

PLAIN = CASES["plain"]


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
        kept = "released" if stage == 3 else "kept"
        said[f"create_graph, {kept} {stage}"] = attempt(
            lambda model=model: model(tokens).sum().backward(create_graph=True)
        )
        zero = zerolab.shard(Stack(), stage, units=Block)
        zero.model.require_backward_grad_sync = False
        said[f"torch's flag {stage}"] = attempt(lambda zero=zero: zero.model(tokens))
        zero.model.require_backward_grad_sync = True
        zero.model(tokens)
        said[f"method {stage}"] = attempt(lambda zero=zero: zero.register_forward_method("generate"))
        said[f"norm {stage}"] = attempt(lambda zero=zero: zero.clip_grad_norm_(1.0, 0))
        other = {name: torch.zeros(p.shape) for name, p in Stack().named_parameters()}
        said[f"functional_call {stage}"] = attempt(
            lambda zero=zero, other=other: torch.func.functional_call(zero.model, other, (tokens,))
        )
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
        "create_graph, kept": r"^NotImplementedError: rank \d: backward\(create_graph=True\) would leave gradients",
        "create_graph, released": r"^NotImplementedError: rank \d: gradients with create.* stage 3 has released them",
        "torch's flag": "inside `with zero.no_sync():`",
        "method": "ValueError: Stack has no method 'generate'",
        "functional_call": r"after sharding.*functional_call can only be given its own parameters",
        "norm": "ValueError: norm_type must be greater than 0",
        "double": r"the storage of \S+ was replaced after sharding",
        "half": r"the storage of head.weight was replaced after sharding",
        "data": r"the storage of head.weight was replaced after sharding",
        "parameter": r"head.weight was added or replaced after sharding",
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
    for said in ranks.run(refusals, ranks=2):
        for case, message in said.items():
            pattern = expected[re.sub(r" [-\d]+$", "", case)]
            assert pattern in message or re.search(pattern, message), f"{case}: {message}"


def taken_before_sharding(stage: int) -> dict[str, str]:
    model = Stack()
    taken = list(model.parameters())
    first, told = taken[0], {"repr": ""}
    zerolab.shard(model, stage, units=Block)
    told["repr"] = repr(first)
    with torch._C.DisableTorchFunctionSubclass():
        assert not any(param.numel() for param in taken), "a list of them keeps no memory"
    uses = {
        "clip": lambda: torch.nn.utils.clip_grad_norm_(taken, 1.0),
        "penalty": lambda: sum(param.square().sum() for param in taken),
        "zero": lambda: setattr(first, "grad", None),
        "gradient": lambda: first.grad,
        "by hand": lambda: first.data.add_(1.0),
        "freeze": lambda: first.requires_grad_(False),
        "average": lambda: torch._foreach_mul([torch.zeros(2), first], 0.9),
        "optimizer": lambda: torch.optim.SGD(taken, lr=0.1),
        "copy": lambda: copy.deepcopy(first),
        "shape": lambda: first.shape,
    }
    return told | {use: attempt(call) for use, call in uses.items()}


def test_parameters_that_were_taken_before_sharding(ranks):
    """The model has others in their place: a script that keeps the old ones would train or log nothing."""
    for stage in range(4):
        for told in ranks.run(taken_before_sharding, stage, ranks=2):
            assert told.pop("repr") == "<the emb.weight of before sharding>"
            for use, message in told.items():
                assert message.startswith("RuntimeError: emb.weight was taken from the model before it was sharded"), (
                    use
                )


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
    for said in ranks.run(frozen_by_one_rank, ranks=3):
        assert said[::2] == ["no error"] * 4
        for message in said[1::2]:
            assert message.startswith("CommError: blocks.1.up.weight is frozen on rank 1 and trainable on rank 0")


# -- forward, backward and step in the wrong order --------------------------------------------------------------------


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


def test_backward_through_a_forward_before_the_step_is_refused(ranks):
    for said in ranks.run(stale_graph, ranks=2):
        assert all("modified by an inplace operation" in message for message in said), said


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


# -- errors in the middle of a step -----------------------------------------------------------------------------------


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


class Trap(Exception):
    pass


def after_an_error(where: str) -> list[Any]:
    """Train; break a step off; train on. The broken step must leave nothing behind."""
    case, results = CASES["plain"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units)
        optimizer = case.optimizer(zero.model)
        for step in range(case.steps):
            if step == 1:
                broken_step(zero.model, case, zero.rank, where)
                if where == "backward":
                    with pytest.raises(RuntimeError, match="broke off"):
                        optimizer.step()
                optimizer.zero_grad()
            loss = case.loss(zero.model, zero.rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((zero.full_state_dict(), [0.0] * 3))
    return results, alone(case, zero.world_size)


def broken_step(model, case, rank: int, where: str) -> None:
    error = KeyboardInterrupt if where == "interrupt" else Trap

    def spring(*args):
        raise error

    if where == "backward":
        middle = model.blocks[1].register_forward_hook(lambda m, a, output: output.register_hook(spring) and None)
    else:
        middle = model.blocks[1].up.register_forward_hook(spring)
    with pytest.raises(error):
        case.loss(model, rank, 33).backward()
    middle.remove()


@pytest.mark.parametrize("where", ["forward", "interrupt", "backward"])
def test_a_good_step_after_a_broken_one(ranks, where):
    for results, (state, _) in ranks.run(after_an_error, where, ranks=2):
        for stage, (got, _) in enumerate(results):
            for key, value in state.items():
                assert torch.equal(got[key], value), f"stage {stage}, {key}"


# -- ranks that are out of step ---------------------------------------------------------------------------------------


def own_group() -> dist.ProcessGroup:
    """All ranks, in a group that may break."""
    return dist.new_group(timeout=timedelta(seconds=600))


def out_of_step(how: str) -> list[Caught | None]:
    """In each stage: the last rank does otherwise in one of four steps."""
    return [attempt_timed(train_out_of_step, stage, how) for stage in range(4)]


def train_out_of_step(stage: int, how: str) -> None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block], group=own_group())
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    odd = zero.rank == zero.world_size - 1
    for step in range(4):
        if odd and how == "breaks off" and step == 2:
            broken_step(zero.model, PLAIN, zero.rank, "backward")
            continue
        if odd and how == "has fewer batches" and step == 3:
            break
        if how == "skips a step" and step == 3 and zero.rank == zero.world_size - 3:
            time.sleep(1.5)  # a rank that comes last is told of by the others too
        PLAIN.loss(zero.model, zero.rank, step).backward()
        if not (odd and step == {"skips a step": 2, "skips the last": 3}.get(how)):
            optimizer.step()
        optimizer.zero_grad()
    zero.full_state_dict()


@pytest.mark.parametrize("n", worlds(2, others=[3]))
@pytest.mark.parametrize(("how", "steps"), [("skips a step", 3), ("skips the last", 4)])
def test_unequal_numbers_of_steps(ranks, n, how, steps):
    """Without the comparison stages 0 and 3 finish, with different weights on each rank in stage 0."""
    others = "rank 0" if n == 2 else "ranks 0, 1"
    for caught in zip(*ranks.run(out_of_step, how, ranks=n), strict=True):
        made = f"rank {n - 1} made {steps - 1} optimizer steps and {steps} backwards"
        all_say(caught, "CommError", made, f"{others} made {steps} optimizer steps and {steps} backwards")


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(2, others=[3]))
def test_fewer_batches_on_one_rank(ranks, n):
    for caught in zip(*ranks.run(out_of_step, "has fewer batches", ranks=n), strict=True):
        all_say(caught[:-1], "CommError", f"rank {n - 1} waits in full_state_dict", "as many batches")
        all_say(caught[-1:], "CommError", "waits in all-", "as many batches")


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(2, others=[3]))
def test_a_backward_that_broke_off_on_one_rank(ranks, n):
    for caught in zip(*ranks.run(out_of_step, "breaks off", ranks=n), strict=True):
        all_say(caught[:-1], "CommError", f"rank {n - 1} waits in end of a backward that broke off")
        all_say(caught[-1:], "CommError", "end of a backward that broke off", "waits in ")


# -- ranks that step otherwise ----------------------------------------------------------------------------------------


def other_rates(when: str) -> list[Caught | None]:
    """In each stage: all ranks change their rates at times, the last rank once to another."""
    return [attempt_timed(train_with_other_rates, stage, when) for stage in range(4)]


def train_with_other_rates(stage: int, when: str) -> None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block], group=own_group())
    odd = zero.rank == zero.world_size - 1
    groups = [{"params": zero.model.emb.parameters()}, {"params": zero.model.blocks.parameters(), "mine": zero.rank}]
    optimizer = torch.optim.AdamW(groups, lr=0.3 if odd and when == "at first" else 0.1)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[1]["lr"] = 0.3 if odd and when == "before backward" else 0.2
        PLAIN.loss(zero.model, zero.rank, step).backward()
        if step == 1 and (odd or when != "alone"):
            optimizer.param_groups[1]["betas"] = (0.9, 0.5 if odd and when in ("after backward", "alone") else 0.99)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("n", worlds(2, others=[1, 3]))
def test_hyperparameters_are_the_same_on_all_ranks(ranks, n):
    last = f"on rank {n - 1}"
    expected = {
        "never": (),
        "at first": ("RuntimeError", f"AdamW would step with lr=0.3 {last} and lr=0.1 on rank 0"),
        "before backward": ("RuntimeError", f"AdamW would step with lr=0.3 {last} and lr=0.2 on rank 0"),
        "after backward": ("RuntimeError", f"betas=['0.9', '0.5'] {last} and betas=['0.9', '0.99'] on rank 0"),
    }
    for when, said in expected.items():
        for caught in zip(*ranks.run(other_rates, when, ranks=n), strict=True):
            if said and n > 1:
                all_say(caught, *said)
            else:
                assert caught == (None,) * n


def scaled_by_hand(stage: int, own: bool) -> str:
    """Gradients of summed losses, divided by a number of tokens: this rank's own, or everyone's."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    for step in range(3):
        PLAIN.loss(zero.model, zero.rank, step).backward()
        for p in zero.model.parameters():
            p.grad.div_(10 + step + (zero.rank if own and step == 1 else 0))
        said = attempt(optimizer.step)
        if said != "no error":
            return said
    return "no error"


def test_slices_are_scaled_alike_on_all_ranks(ranks):
    for stage in (1, 2, 3):
        assert ranks.run(scaled_by_hand, stage, False, ranks=2) == ["no error"] * 2
        for said in ranks.run(scaled_by_hand, stage, True, ranks=2):
            assert "div_ 12" in said and "on rank 1" in said and "div_ 11" in said and "on rank 0" in said, said


@pytest.mark.exhaustive
def test_a_hyperparameter_that_one_rank_alone_sets_after_backward(ranks):
    for caught in zip(*ranks.run(other_rates, "alone", ranks=3), strict=True):
        all_say(caught, "CommError", "comparison of hyperparameters that changed after backward")


def finishes_early(stage: int) -> Caught | None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    for step in range(3 - (zero.rank == 1)):
        caught = attempt_timed(lambda step=step: PLAIN.loss(zero.model, zero.rank, step).backward())
        if caught:
            return caught
        optimizer.step()
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize("stage", worlds(3, others=(0, 1, 2)))
def test_a_rank_that_has_finished_is_not_waited_for(ranks, stage):
    first, second = ranks.run(finishes_early, stage, ranks=2)
    assert second is None
    all_say([first], "CommError", "rank 1 has finished its part of the program")


def steps_alone(stage: int) -> Caught | None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    return attempt_timed(optimizer.step) if zero.rank == 0 else None


@pytest.mark.parametrize("stage", worlds(0, others=(1, 2, 3)))
def test_a_step_of_one_rank_alone(ranks, stage):
    """The other rank has gone home, its engine with it, and still it is known how many steps it made."""
    first, second = ranks.run(steps_alone, stage, ranks=2)
    assert second is None
    made = "rank 0 made 1 optimizer step and 1 backward; rank 1 made 0 optimizer steps and 1 backward"
    all_say([first], "CommError", f"rank 1 has finished its part of the program. The ranks are out of step: {made}")


def steps_alone_and_gives_up(stage: int) -> Caught | None:
    """The first rank steps alone, the last goes on to the next backward, the second comes when the first gave up."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block], group=own_group())
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    if zero.rank == 0:
        return attempt_timed(optimizer.step)
    optimizer.zero_grad()
    if zero.rank == 1:
        notes = dist.PrefixStore("zerolab/waits", dist.distributed_c10d._get_default_store())
        notes.wait(["0"])
        while "finished" not in json.loads(notes.get("0")):
            time.sleep(0.05)
    return attempt_timed(lambda: PLAIN.loss(zero.model, zero.rank, 1).backward())


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_gave_up_still_tells_of_its_steps(ranks, stage):
    for caught in ranks.run(steps_alone_and_gives_up, stage, ranks=3):
        all_say([caught], "CommError", "The ranks are out of step: rank 0 made 1 optimizer step")


def edited_on_one_rank() -> list[Caught | None]:
    return [attempt_timed(train_with_an_edit, stage) for stage in (1, 2)]


def train_with_an_edit(stage: int) -> None:
    zero = zerolab.shard(build(PLAIN), stage, units=[Block], group=own_group())
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    if zero.rank == 1:
        with torch.no_grad():
            zero.model.emb.weight.mul_(2.0)
    PLAIN.loss(zero.model, zero.rank, 1).backward()


@pytest.mark.slow
def test_an_edit_on_one_rank(ranks):
    for caught in zip(*ranks.run(edited_on_one_rank, ranks=2), strict=True):
        all_say(caught, "CommError", "Step and edit on every rank alike")
        assert all("stage 0, 1 or 2" not in error.text for error in caught)


def two_models_that_step_in_turn() -> None:
    """As in a GAN: unequal numbers of steps and backwards, but the same on every rank."""
    for stage in range(4):
        zeros = [zerolab.shard(build(PLAIN), stage, units=[Block]) for _ in range(2)]
        optimizers = [torch.optim.SGD(zero.model.parameters(), lr=0.1) for zero in zeros]
        for step in range(4):
            for i, (zero, optimizer) in enumerate(zip(zeros, optimizers, strict=True)):
                PLAIN.loss(zero.model, zero.rank, step).backward()
                if step % 2 or i == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        zeros[1].full_state_dict()


def test_two_models_that_step_in_turn(ranks):
    ranks.run(two_models_that_step_in_turn, ranks=2)


def called_by_a_fork(stage: int) -> str:
    """What a child of a rank hears when it calls the model, as a DataLoader's worker may; then the rank goes on."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
    PLAIN.loss(zero.model, zero.rank, 0).backward()
    optimizer.step()
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        with torch.no_grad():
            os.write(says, attempt(lambda: PLAIN.loss(zero.model, zero.rank, 1)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    PLAIN.loss(zero.model, zero.rank, 2).backward()
    return os.read(hears, 1000).decode()


def test_a_fork_of_a_rank_is_no_rank(ranks):
    assert ranks.run(called_by_a_fork, 0, ranks=2) == ["no error"] * 2  # nothing has to be gathered
    for stage in (1, 2, 3):
        for rank, said in enumerate(ranks.run(called_by_a_fork, stage, ranks=2)):
            assert said.startswith("CommError: ") and f"in a process that rank {rank} has forked" in said, said


class Tied(Stack):
    """Uses the embedding's weight outside of the embedding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.emb(tokens)) @ self.emb.weight.T


def slice_in_forward(stage: int) -> str:
    model = Tied()
    zerolab.shard(model, stage, units=(Block, nn.Embedding))
    try:
        model(words(dist.get_rank(), 0, 2, 5))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_slice_that_forward_sees_is_explained(ranks):
    for stage in (1, 2, 3):
        for rank, said in enumerate(ranks.run(slice_in_forward, stage, ranks=2)):
            assert said.startswith(f"rank {rank}: ") and " of emb.weight " in said
            assert "make one unit of both" in said
    assert ranks.run(slice_in_forward, 0, ranks=2) == ["", ""]


# -- torch.func ------------------------------------------------------------------------------------------------------


class Mapped(nn.Module):
    """A transform inside of the forward of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.linear)(x)


def transformed(stage: int | None) -> dict[str, Any]:
    """What each transform makes of the model or of a unit, or how it is refused; then what the error advises."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Mapped()).double()
    if stage is not None:
        zerolab.shard(model, stage, units=Mapped)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, 2, 4)
    params = dict(model.named_parameters())
    uses = {
        "jvp": lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
        "vmap": lambda: torch.vmap(model)(x),
        "vmap of a unit": lambda: torch.vmap(model[2].linear)(x),
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(x),
        "parameters": lambda: torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(params),
    }
    found: dict[str, Any] = {}
    for name, use in uses.items():
        try:
            found[name] = use()
        except RuntimeError as error:
            found[name] = str(error)
    x = x.clone().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        found["forward_ad"] = tuple(part.detach().clone() for part in torch.autograd.forward_ad.unpack_dual(dual))
    (found["autograd.grad"],) = torch.autograd.grad(model(x).sum(), x)
    model(x).sum().backward()
    return found


def test_transforms_of_the_model_are_refused(ranks):
    expected = transformed(None)
    for stage in range(4):
        for rank, found in enumerate(ranks.run(transformed, stage, ranks=2)):
            torch.testing.assert_close(found.pop("forward_ad"), expected["jvp"])
            torch.testing.assert_close(found.pop("autograd.grad"), expected["grad"])
            assert len(found) == 5
            for name, result in found.items():
                assert result.startswith(f"rank {rank}: a transform of torch.func"), (stage, name, result)


class Adjoint(torch.autograd.Function):
    """Steps of `f` whose backward computes them again, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, z: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.f, ctx.params = f, params
        ctx.save_for_backward(z)
        return z + f(z)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            return None, *torch.autograd.grad(z + ctx.f(z), (z, *ctx.params), grads[0])


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(self.f, x, *self.f.parameters())


def with_an_adjoint(stage: int | None, units: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Solved(), Solved())
    if stage is not None:
        zerolab.shard(model, stage, units=units)
    caught = attempt_timed(lambda: model(torch.ones(2, 4)).square().sum().backward())
    return caught or [zerolab.full_tensor(param.grad) for param in model.parameters()]


def test_an_adjoint_inside_of_one_unit(ranks):
    """What the error advises is right."""
    expected = with_an_adjoint(None, None)
    for stage in range(4):
        all_say(ranks.run(with_an_adjoint, stage, nn.Linear, ranks=2), "RuntimeError", "an adjoint", "of one unit")
        for grads in ranks.run(with_an_adjoint, stage, Solved, ranks=2):
            torch.testing.assert_close(grads, expected)
