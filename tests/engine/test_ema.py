"""The average of a sharded model's parameters, against torch's AveragedModel in one process, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import whole
from jobs_common import Block, Net, all_say, attempt, batch, build, rank_ordered_mean, same, worlds
from reference import EACH
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerolab
from zerolab import EMA, Precision

DECAYS = (0.9, 0.9, 0.3, 0.99)  # of each update; the first copies
STATE = dict[str, Tensor]


class Model(Net):
    """Frozen in part, and with a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.ln.weight.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(7))


def start(stage: int, seed: int = 0, **options: Any) -> tuple[zerolab.Engine, torch.optim.Optimizer, EMA]:
    zero = zerolab.shard(build(Model, seed), stage, units=[Block], **options)
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=0.02), EMA(zero, DECAYS[0])


def step(zero: zerolab.Engine, optimizer: torch.optim.Optimizer, ema: EMA, number: int) -> None:
    zero.model(*batch(zero.rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.decay = DECAYS[number]
    ema.update()


# -- the numbers -----------------------------------------------------------------------------------------------------


def averaged(stage: int, precision: Precision | None) -> tuple[STATE, STATE, list[float]]:
    """Averages, parameters, and after each step what the model computes with the averages."""
    zero, optimizer, ema = start(stage, precision=precision)
    losses = []
    for number in range(len(DECAYS)):
        step(zero, optimizer, ema, number)
        guard = torch.inference_mode() if number % 2 else torch.no_grad()
        with guard, ema.average_parameters():
            losses.append(zero.model(*batch(0, 99)).item())
    return ema.full_state_dict(), zero.full_state_dict(), losses


def alone(n: int, precision: Precision | None) -> tuple[STATE, STATE, list[float]]:
    """The same in one process, from the masters, without zerolab."""

    def computing(masters: nn.Module) -> nn.Module:
        return copy.deepcopy(masters).to(precision.compute) if precision else masters

    masters, losses = build(Model), []
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.02)
    mean = AveragedModel(masters)
    for number, decay in enumerate(DECAYS):
        model, grads = computing(masters), []
        for rank in range(n):
            model.zero_grad()
            model(*batch(rank, number)).backward()
            grads.append([p.grad for p in model.parameters()])
        for param, own in zip(masters.parameters(), zip(*grads, strict=True), strict=True):
            param.grad = None if own[0] is None else rank_ordered_mean(list(own)).float()
        optimizer.step()
        mean.multi_avg_fn = get_ema_multi_avg_fn(decay)
        mean.update_parameters(masters)
        losses.append(computing(mean.module)(*batch(0, 99)).item())
    return mean.module.state_dict(), masters.state_dict(), losses


@pytest.mark.parametrize(("n", "precision"), EACH)
def test_equals_torchs_average_bit_for_bit(ranks, n, precision):
    mean, trained, losses = ranks.run(alone, n, precision, ranks=1)[0]
    for stage in range(4):
        for state, params, seen in ranks.run(averaged, stage, precision, ranks=n):
            assert not same(state, mean), f"stage {stage}"
            assert not same(params, trained), f"stage {stage}: training went on from other parameters"
            assert seen == losses, f"stage {stage}"


def by_hand(stage: int, options: dict[str, Any]) -> list[str]:
    """Where the average is not that of full states, with Muon for matrices if `options` are a `Way`'s."""
    if "make" in options:
        zero, optimizers = whole.build(whole.Way(**options), stage)
    else:
        zero, adamw, _ = start(stage, **options)
        optimizers = [adamw]
    ema, mean = EMA(zero, 0.7), STATE()
    for number in range(3):
        zero.model(*batch(zero.rank, number)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ema.update()
        now = zero.full_state_dict()
        mean = {k: torch.lerp(mean[k], v, 1 - 0.7) if mean and v.is_floating_point() else v for k, v in now.items()}
    first = mean if zero.rank == 0 else {}
    return same(ema.full_state_dict(), mean) + same(ema.full_state_dict(rank0_only=True), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "n", "stages"),
    [
        ({"make": whole.muon_and_adamw}, 3, (0, 1, 2, 3)),
        ({"offload": "optimizer"}, 2, (1, 2, 3)),
        ({"mesh": (2, 2)}, 4, (1, 2, 3)),
    ],
    ids=["owner", "offload", "mesh"],
)
def test_with_other_placements(ranks, options, n, stages):
    for stage in stages:
        assert ranks.run(by_hand, stage, options, ranks=n) == [[]] * n, f"stage {stage}"


# -- what it holds and moves ------------------------------------------------------------------------------------------


def costs(stage: int) -> tuple[int, list[Any], int]:
    zero, optimizer, ema = start(stage)
    step(zero, optimizer, ema, 0)
    with zero.comm.record() as calls:
        ema.update()
    held = {average.untyped_storage().data_ptr(): average.untyped_storage() for average in ema.averages.values()}
    return sum(each.nbytes() for each in held.values()), calls, sum(unit.layout.size for unit in zero.units)


@pytest.mark.parametrize("n", worlds(3, others=(1, 2, 4)))
def test_it_holds_slices_and_an_update_moves_nothing(ranks, n):
    for stage in range(4):
        for held, calls, psi in ranks.run(costs, stage, ranks=n):
            assert held == 4 * psi // (n if stage else 1) and calls == []


# -- afterwards everything is as before ------------------------------------------------------------------------------


class Normed(nn.Module):
    """Its buffers change with every forward, one in place and one not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(()))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean()
        return self.head(self.norm(x))


def fail(grad: Tensor) -> Tensor:
    raise KeyError("in backward")


def left_by_errors(stage: int) -> list[str]:
    """What differs after average_parameters(), by whatever it was left."""
    zero = zerolab.shard(build(Normed), stage, units=[nn.Linear])
    optimizer, ema = torch.optim.SGD(zero.model.parameters(), lr=0.5), EMA(zero, 0.5)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(zero.rank))

    def train() -> None:
        zero.model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()

    def inside(how: str) -> None:
        with ema.average_parameters():
            out = zero.model(x)
            if how == "backward":
                out.register_hook(fail)
                out.sum().backward()
            for p in zero.model.parameters():
                p.data.zero_()
            if how == "forward":
                zero.model(x[:, :5])
            if how == "load":
                zero.load_full_state_dict({k: torch.ones_like(v) for k, v in zero.full_state_dict().items()})

    train()
    train()
    expected, mean, wrong = zero.full_state_dict(), ema.full_state_dict(), []
    for how, error in {"forward": "RuntimeError", "backward": "KeyError", "load": None, "nothing": None}.items():
        caught = attempt(inside, how)
        assert (caught and caught.kind) == error, caught
        shown = [zerolab.full_tensor(p).detach() for p in zero.model.parameters()]
        held = [expected[name] for name, _ in zero.model.named_parameters()]
        wrong += [how for a, b in zip(shown, held, strict=True) if not torch.equal(a, b)]
        wrong += [f"{how}: {name}" for name in same(zero.full_state_dict(), expected)]
        if how != "backward":
            wrong += [f"{how}: average of {name}" for name in same(ema.full_state_dict(), mean)]
        else:  # and the next forward drops what the broken backward left
            zero.model(x)
            expected, mean = zero.full_state_dict(), ema.full_state_dict()
    train()
    return wrong


def test_afterwards_all_is_as_before(ranks):
    for stage in range(4):
        assert ranks.run(left_by_errors, stage, ranks=2) == [[], []], f"stage {stage}"


# -- refused by name -------------------------------------------------------------------------------------------------


def refusals(stage: int, folder: str) -> dict[str, Any]:
    zero, optimizer, ema = start(stage)
    step(zero, optimizer, ema, 0)
    said: dict[str, Any] = {"a model": attempt(EMA, zero.model)}
    said |= {f"decay {decay}": attempt(EMA, zero, decay) for decay in (1.0, -0.1, float("nan"))}

    def update(name: str) -> Any:
        return lambda *args: said.update({name: attempt(ema.update)})

    hooks = [zero.model.head.register_forward_hook(update("in forward"))]
    loss = zero.model(*batch(zero.rank, 1))
    loss.register_hook(update("in backward"))
    with zero.no_sync():
        loss.backward()
    hooks[0].remove()
    update("under no_sync")()
    zero.model(*batch(zero.rank, 2)).backward()
    with zero.full_parameters():
        update("in full_parameters")()
    other = EMA(zero)
    with ema.average_parameters():
        update("in average")()
        said["nested"] = attempt(other.average_parameters().__enter__)
        said["full state"] = attempt(other.full_state_dict)
        said["step"] = attempt(optimizer.step)
        said["save"] = attempt(zerolab.save, folder, zero, optimizer, ema=ema)
        said["load"] = attempt(zerolab.load, folder, zero, optimizer, ema=ema)
    optimizer.step()
    ema.decay = 1.5
    update("decay set")()
    ema.decay = 0.9
    said["foreign"] = attempt(zerolab.save, folder, zero, optimizer, ema=start(stage)[2])
    said["extra"] = attempt(zerolab.save, folder, zero, optimizer, ema={"decay": 0.9})
    if zero.rank == 0:
        ema.update()
    said["uneven"] = attempt(ema.average_parameters().__enter__)
    said["uneven save"] = attempt(zerolab.save, folder, zero, optimizer, ema=ema)
    varied = EMA(zero, 0.1 if zero.rank else 0.2)
    varied.update()
    varied.decay = 0.5
    said["another decay"] = attempt(varied.full_state_dict)
    said["one rank's"] = attempt(zerolab.save, folder, zero, optimizer, ema=other if zero.rank else None)
    zerolab.save(folder, zero, optimizer)
    said["load none"] = attempt(zerolab.load, folder, zero, optimizer, ema=other)
    zerolab.save(folder, zero, optimizer, ema=other)
    said["forgotten"] = attempt(zerolab.load, folder, zero, optimizer)
    return said


REFUSED = {
    "a model": ("TypeError", "EMA takes what Zero3(model) or another stage returned, not a Model"),
    **{f"decay {d}": ("ValueError", f"decay={d}: from 0 to less than 1") for d in (1.0, -0.1, float("nan"))},
    "decay set": ("ValueError", "decay=1.5: from 0 to less than 1"),
    "in forward": ("RuntimeError", "update() of an EMA was called inside forward, backward or full_parameters()"),
    "in backward": ("RuntimeError", "update() of an EMA was called inside forward, backward or full_parameters()"),
    "in full_parameters": ("RuntimeError", "update() of an EMA was called inside forward, backward or full_param"),
    "under no_sync": ("RuntimeError", "were added up under no_sync() and are not yet averaged"),
    "in average": ("RuntimeError", "update() of an EMA was called inside average_parameters()"),
    "nested": ("RuntimeError", "average_parameters() of an EMA was called inside average_parameters()"),
    "full state": ("RuntimeError", "average_parameters() of an EMA was called inside average_parameters()"),
    "step": ("RuntimeError", "AdamW was to step inside average_parameters() of an EMA"),
    "save": ("CheckpointError", "cannot be saved or loaded inside average_parameters() of an EMA"),
    "load": ("CheckpointError", "cannot be saved or loaded inside average_parameters() of an EMA"),
    "foreign": ("CheckpointError", "rank 0: ema must be a zerolab.EMA of this", "and is one of another model"),
    "extra": ("CheckpointError", "rank 0: ema must be a zerolab.EMA of this", "and is a dict"),
    "uneven": ("CommError", "rank 0 has one after 2 updates, with decay 0.9, rank 1 has one after 1 updates, with"),
    "uneven save": ("CheckpointError", "rank 0 has one after 2 updates, with decay 0.9, rank 1 has one after 1"),
    "one rank's": ("CheckpointError", "rank 0 has none, rank 1 has one after 0 updates, with decay 0.999"),
    "another decay": ("CommError", "rank 0 has one after 1 updates, with decay 0.5, rank 1 has one after 1 updates"),
    "load none": ("CheckpointError", "has no averages: leave ema out"),
    "forgotten": ("CheckpointError", "has averages: pass ema=zerolab.EMA(zero, decay)"),
}


def test_refused_by_name(ranks, tmp_path):
    for stage in range(4):
        everyone = ranks.run(refusals, stage, str(tmp_path / "last"), ranks=2)
        assert all(said.keys() == REFUSED.keys() for said in everyone)
        for what, (kind, *words) in REFUSED.items():
            all_say([said[what] for said in everyone], kind, *words)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def kept(folder: str) -> list[list[STATE]]:
    """From each stage, a checkpoint after two steps; averages then, and after two more steps."""
    states = []
    for stage in range(4):
        zero, optimizer, ema = start(stage)
        step(zero, optimizer, ema, 0)
        step(zero, optimizer, ema, 1)
        zerolab.save(f"{folder}/{stage}", zero, optimizer, ema=ema, note="kept")
        states.append([ema.full_state_dict()])
        step(zero, optimizer, ema, 2)
        step(zero, optimizer, ema, 3)
        states[-1].append(ema.full_state_dict())
    return states


def taken(folder: str) -> list[list[STATE]]:
    """The same from each of these checkpoints, loaded at another stage."""
    states = []
    for stage in range(4):
        zero, optimizer, ema = start(3 - stage, seed=1)
        assert zerolab.load(f"{folder}/{stage}", zero, optimizer, ema=ema) == {"note": "kept"}
        assert ema.updates == 2
        states.append([ema.full_state_dict()])
        step(zero, optimizer, ema, 2)
        step(zero, optimizer, ema, 3)
        states[-1].append(ema.full_state_dict())
    return states


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(3, others=(1, 2, 4)))
def test_saved_and_loaded_at_any_size_and_stage(ranks, n, tmp_path):
    saved = ranks.run(kept, str(tmp_path), ranks=n)[0]
    for m in (n, 2, 4):
        for loaded in ranks.run(taken, str(tmp_path), ranks=m):
            for stage in range(4):
                assert not same(loaded[stage][0], saved[stage][0]), f"stage {stage}, {n} to {m} ranks"
                assert m != n or not same(loaded[stage][1], saved[stage][1]), f"stage {stage}"
