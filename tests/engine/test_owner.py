"""Optimizers that look at whole parameters, under every stage: the numbers of one process, and the bytes promised."""

from __future__ import annotations

import copy
import gc
import time
from math import inf
from typing import Any

import pytest
import reference
import torch
import whole
from jobs_common import all_say, attempt, worlds
from reference import BF16
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer
from whole import Odd, Way, build, step

import zerolab
from zerolab import OwnerOptimizer
from zerolab.measure import ledger, model_states, owner_moved_bytes, plan, state_bytes, timeline
from zerolab.tasks.models import GPT
from zerolab.tasks.models import Block as GPTBlock
from zerolab.world.processes import Patience

ODD = {"model": Odd, "units": nn.Sequential}

WAYS = {
    "Muon and AdamW": Way(),
    "groups and a schedule": Way(whole.muon_in_groups),
    "bf16": Way(precision=BF16),
    "no_sync": Way(micro_batches=3),
    "Shampoo": Way(whole.shampoo_and_adamw),
    "LAMB": Way(whole.lamb),
    "Adafactor": Way(whole.adafactor),
    "Muon on an odd model": Way(**ODD),
    "Shampoo on an odd model": Way(whole.shampoo_and_adamw, **ODD),
    "LAMB on an odd model, bf16": Way(whole.lamb, precision=BF16, **ODD),
    "ranks that own nothing": Way(whole.one_matrix),
}


def every_way(stage: int, names: list[str]) -> dict[str, Any]:
    return {name: whole.train(WAYS[name], stage) for name in names}


def every_way_alone(n: int) -> dict[str, Any]:
    return {name: whole.alone(way, n) for name, way in WAYS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "stages"), [(2, [3, 1]), *(pytest.param(n, range(4), marks=pytest.mark.exhaustive) for n in (1, 2, 3, 4))]
)
def test_equals_one_process_bit_for_bit(ranks, n, stages):
    """With two stages they take turns, way by way."""
    expected = ranks.run(every_way_alone, n, ranks=1)[0]
    for i, stage in enumerate(stages):
        names = [*WAYS][i::2] if len(stages) == 2 else [*WAYS]
        results = ranks.run(every_way, stage, names, ranks=n)
        for name in names:
            for state, owners in (result[name] for result in results):
                assert owners == results[0][name][1], "the ranks agree on the owners"
                for key, value in expected[name].items():
                    assert torch.equal(state[key], value), f"{name}, stage {stage}: {key}"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", worlds((2, 2), others=[(1, 3), (2, 1)]), ids=str)
def test_with_a_mesh(ranks, mesh):
    way = Way(mesh=mesh)
    n = mesh[0] * mesh[1]
    expected = ranks.run(whole.alone, way, n, ranks=1)[0]
    for stage in (1, 2, 3):
        for state, owners in ranks.run(whole.train, way, stage, ranks=n):
            assert set(owners.values()) == set(range(mesh[1]))
            assert all(torch.equal(state[key], value) for key, value in expected.items()), f"stage {stage}"


def test_with_clipping(ranks):
    """The joint norm is summed in another order, so nearly."""
    way = Way(whole.lamb, clip=0.1)
    expected = ranks.run(whole.alone, way, 3, ranks=1)[0]
    for stage in range(4):
        for state, _ in ranks.run(whole.train, way, stage, ranks=3):
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=f"stage {stage}: {key}")


class Placed(whole.Lamb):
    """Notes where in memory its parameters and gradients begin."""

    def step(self, closure: Any = None) -> Any:
        places = [t.data_ptr() % 64 for group in self.param_groups for p in group["params"] for t in (p, p.grad)]
        PLACES.extend(places)
        return super().step(closure)


PLACES: list[int] = []


def where_they_begin(stage: int) -> list[int]:
    PLACES.clear()
    whole.train(Way(lambda model, wrap: [wrap(model.parameters(), Placed)], **ODD), stage)
    return PLACES


@pytest.mark.slow
@pytest.mark.parametrize("n", worlds(2, others=(1, 3)))
def test_parameters_begin_where_those_of_one_process_do(ranks, n):
    """Off a boundary, some matrix products round otherwise on some processors."""
    for stage in range(4):
        everywhere = [place for places in ranks.run(where_they_begin, stage, ranks=n) for place in places]
        assert everywhere and not any(everywhere), f"stage {stage}"


def with_a_closure(stage: int) -> list[dict[str, torch.Tensor]]:
    states = []
    for closure in (False, True):
        zero, (muon, adamw) = build(Way(), stage)
        for number in range(2):

            def compute(number=number, zero=zero, muon=muon, adamw=adamw):
                muon.zero_grad()
                adamw.zero_grad()
                loss = zero.model(*reference.batch(zero.rank, number))
                loss.backward()
                return loss

            if closure:
                assert muon.step(compute).item() > 0
            else:
                compute()
                muon.step()
            adamw.step()
        states.append(zero.full_state_dict())
    return states


def test_closures(ranks):
    for stage in range(4):
        for plain, closure in ranks.run(with_a_closure, stage, ranks=2):
            assert all(torch.equal(plain[key], closure[key]) for key in plain)


def gradients_that_come_and_go(stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """Frozen between steps, gradients set to None on all ranks, a group added later."""
    zero, (muon, adamw) = build(Way(), stage)
    named = dict(zero.model.named_parameters())
    late = named["head.weight"]
    adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if p is not late]
    for number in range(4):
        if number == 1:
            named["blocks.0.up.weight"].requires_grad_(False)
        if number == 2:
            named["blocks.0.up.weight"].requires_grad_(True)
            muon.add_param_group({"params": [late], "lr": 0.05})
        zero.model(*reference.batch(zero.rank, number)).backward()
        if number == 3:
            named["blocks.1.down.weight"].grad = None
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return zero.full_state_dict(), len(muon.owners())


def test_gradients_that_come_and_go(ranks):
    expected, _ = ranks.run(gradients_that_come_and_go, 0, ranks=2)[0]
    for stage in range(4):
        for state, owned in ranks.run(gradients_that_come_and_go, stage, ranks=2):
            assert owned == 9
            assert all(torch.equal(state[key], value) for key, value in expected.items()), f"stage {stage}"


def scaled(stage: int) -> tuple[bool, bool]:
    """LossScaler: an infinite gradient on one rank skips the step on all."""
    zero, (muon, _) = build(Way(), stage)
    scaler = zerolab.LossScaler(zero)
    before = zero.full_state_dict()
    same = []
    for bad in (True, False):
        loss = zero.model(*reference.batch(zero.rank, 0))
        scaler.scale(loss * (float("inf") if bad and zero.rank == 0 else 1)).backward()
        scaler.step(muon)
        scaler.update()
        muon.zero_grad()
        after = zero.full_state_dict()
        same.append(all(torch.equal(after[key], before[key]) for key in before))
        for p in zero.model.parameters():
            p.grad = None
    return tuple(same)


def test_loss_scaler(ranks):
    for stage in (0, 3):
        assert ranks.run(scaled, stage, ranks=2) == [(True, False)] * 2


# -- bytes ------------------------------------------------------------------------------------------------------------


def gpt(stage: int) -> tuple[zerolab.Engine, OwnerOptimizer, AdamW]:
    torch.manual_seed(0)
    zero = zerolab.shard(GPT(layers=3, width=48, heads=4, context=16), stage, units=[GPTBlock])
    return zero, OwnerOptimizer(whole.blocks(zero.model), Muon, lr=0.02), AdamW(whole.rest(zero.model))


def gpt_backward(zero: zerolab.Engine, number: int) -> None:
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(10 * number + zero.rank))
    zero.model(tokens[:, :-1], tokens[:, 1:]).backward()


def held_and_moved(stage: int) -> dict[str, int]:
    zero, muon, adamw = gpt(stage)
    sizes = {slot.name: slot.numel for unit in zero.units for slot in unit.layout.slots}
    for number in range(3):
        gpt_backward(zero, number)
        with ledger(zero) as book:
            muon.step()
        adamw.step()
    states = {value.untyped_storage().data_ptr(): value for state in muon.state.values() for value in state.values()}
    calls = [call for call in book.calls if not call.control]
    assert {call.phase for call in calls} <= {"step"}
    assert {call.op for call in calls} <= {"broadcast" if stage == 0 else "all_to_all"}
    return {
        "held": sum(value.untyped_storage().nbytes() for value in states.values()),
        "model_states": model_states(zero, [muon, adamw])["optimizer"] - model_states(zero, adamw)["optimizer"],
        "formula": sum(4 * sizes[name] for name, owner in muon.owners().items() if owner == zero.comm.shard_group.rank),
        "all": sum(4 * sizes[name] for name in muon.owners()),
        "sent": book.moved,
        "moved_bytes": muon.moved_bytes(),
        "control": sum(call.control for call in book.calls),
        "order": [(call.op, call.unit, call.payload) for call in calls],
    }


@pytest.mark.parametrize("n", worlds(3, others=(1, 2, 4)))
def test_bytes_held_and_moved_are_the_formulas(ranks, n):
    for stage in range(4):
        rows = ranks.run(held_and_moved, stage, ranks=n)
        everything = rows[0]["all"]
        for row in rows:
            assert row["held"] == row["formula"] == row["model_states"]
            assert row["held"] <= 1.1 * everything / n, f"stage {stage}: within a tenth of even"
            assert row["sent"] == row["moved_bytes"], f"stage {stage}"
            assert row["control"] == 2
            assert row["order"] == rows[0]["order"]
        mean = sum(row["sent"] for row in rows) / n
        formula = owner_moved_bytes(stage, n, everything // 4)
        if stage == 0:
            assert mean == formula
        else:  # which slices an owner has already is up to the layout
            assert mean <= 1.3 * formula if n > 1 else mean == 0, f"stage {stage}: {mean / max(formula, 1):.2f}"


class Watched(Muon):
    """Notes, as its step begins, how much memory of full size is alive.

    gloo's threads let go of what they sent a moment after wait() has returned: more than `ALLOWED` is looked at again.
    """

    def step(self, closure: Any = None) -> Any:
        patience = Patience(10.0, longest=0.01)
        while (alive := alive_bytes()) > max(ALLOWED, default=inf) and patience.turn() > 0:
            time.sleep(0.01)
        PEAKS.append(alive)
        return super().step(closure)


def alive_bytes() -> int:
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]
    floats = [t for t in tensors if t.dtype == torch.float32]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in floats}.values())


PEAKS: list[int] = []
ALLOWED: list[int] = []


def passing(stage: int) -> tuple[int, int]:
    """Bytes alive in the middle of an owner's turn beyond those before the step; and the largest matrix."""
    zero, _, _ = gpt(stage)
    optimizer = OwnerOptimizer(whole.blocks(zero.model), Watched, lr=0.02)
    largest = 4 * max(slot.numel for unit in zero.units for slot in unit.layout.slots if "blocks" in slot.name)
    for number in range(2):
        gpt_backward(zero, number)
        PEAKS.clear()
        before = alive_bytes()
        allowed = before + (2 * largest if stage else 0)
        ALLOWED[:] = [allowed] if number else []  # the first step also makes the state
        optimizer.step()
        for param in zero.model.parameters():
            param.grad = None
    return max(PEAKS) - before, largest


@pytest.mark.parametrize("n", worlds(2, others=(4,)))
def test_a_step_holds_two_matrices_at_most(ranks, n):
    """The gradient and the master of the one that is being updated."""
    for stage in (1, 2, 3):
        found = ranks.run(passing, stage, ranks=n)
        assert all(0 < transient <= 2 * largest for transient, largest in found), (stage, found)
    assert all(transient <= 0 for transient, _ in ranks.run(passing, 0, ranks=n)), "in place"


def seen_by_the_timeline(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """What the timeline sees at the moment in a step when most is gathered; and what is held.

    Of several steps the one with the least: gloo's threads may let go late of what an earlier turn gathered.
    """
    zero, muon, adamw = gpt(stage)
    moments = []
    for number in range(8):
        gpt_backward(zero, number)
        with timeline(zero, [muon, adamw]) as line:
            muon.step()
        adamw.step()
        both = [sum(sizes) for sizes in zip(line.curve("gathered parameters"), line.curve("gradients"), strict=True)]
        moments.append((max(both), number, line.by_kind(line.before + both.index(max(both)))))
    return min(moments[1:])[2], model_states(zero, [muon, adamw])  # the first step makes the state


def test_the_timeline_knows_it(ranks):
    for kinds, states in ranks.run(seen_by_the_timeline, 2, ranks=2):
        assert kinds["optimizer"] == states["optimizer"]
        matrix = kinds["gathered parameters"]
        assert matrix == 4 * 48 * 4 * 48, "the largest, whose turn is first"
        assert kinds["gradients"] == states["gradients"] + matrix


def test_the_plan_has_the_formulas():
    rows = plan(7.5e9, 64, optimizer="muon", precision="bf16")
    for row, adam in zip(rows, plan(7.5e9, 64, precision="bf16"), strict=True):
        assert row.states["optimizer"] == round(4 * 7.5e9 / 64)
        assert row.states["parameters"] == adam.states["parameters"]
        extra = 4 * 7.5e9 * 63 / 64 if row.stage == 0 else 12 * 7.5e9 * 63 / 64**2
        assert row.moved == pytest.approx(adam.moved + extra)
    assert state_bytes(0, 4, 100, optimizer_bytes=4, owned=True)["optimizer"] == 100


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVED = {
    "Muon": Way(**ODD),
    "Shampoo": Way(whole.shampoo_and_adamw, **ODD),
    "LAMB": Way(whole.lamb, precision=BF16, **ODD),
    "Adafactor": Way(whole.adafactor, **ODD),
}


def save_all(folder: str, stage: int) -> dict[str, Any]:
    """Save after two steps; the parameters after two more."""
    after = {}
    for name, way in SAVED.items():
        zero, optimizers = build(way, stage)
        for number in range(4):
            if number == 2:
                zerolab.save(f"{folder}/{name}", zero, optimizers, steps=2)
            for optimizer in optimizers:  # the same gradients at any number of ranks
                optimizer.zero_grad()
            zero.model(*reference.batch(0, number)).backward()
            for optimizer in optimizers:
                optimizer.step()
        after[name] = zero.full_state_dict()
    return after


def load_all(folder: str, stage: int) -> dict[str, Any]:
    after = {}
    for name, way in SAVED.items():
        torch.manual_seed(123)
        zero, optimizers = build(way, stage)
        assert zerolab.load(f"{folder}/{name}", zero, optimizers) == {"steps": 2}
        if isinstance(optimizers[0], OwnerOptimizer):
            for param in optimizers[0].state:
                assert optimizers[0].owns(param)
        for number in (2, 3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            zero.model(*reference.batch(0, number)).backward()
            for optimizer in optimizers:
                optimizer.step()
        after[name] = zero.full_state_dict()
    return after


@pytest.mark.slow
@pytest.mark.parametrize(
    "places", worlds(((4, 3), (2, 2)), others=[((2, 0), (4, 3)), ((1, 1), (3, 3)), ((3, 2), (1, 0))]), ids=str
)
def test_saved_anywhere_loaded_anywhere(ranks, places, tmp_path):
    """From (ranks, stage) to (ranks, stage): the next two steps are those of the run that was not interrupted.

    Every rank has the same batch, whose mean is nearly itself at 3 ranks and exactly at 1, 2 and 4.
    """
    (n, stage), (m, other) = places
    expected = ranks.run(save_all, str(tmp_path), stage, ranks=n)[0]
    exact = 3 not in (n, m)
    for after in ranks.run(load_all, str(tmp_path), other, ranks=m):
        for name, state in expected.items():
            for key, value in state.items():
                if exact:
                    assert torch.equal(after[name][key], value), f"{name}: {key}"
                else:  # Muon rounds to bf16 on the way
                    torch.testing.assert_close(after[name][key], value, rtol=0, atol=2e-3, msg=f"{name}: {key}")


def from_plain(folder: str) -> bool:
    """torch's own Muon, in stage 0, and OwnerOptimizer read each other's checkpoints."""
    torch.manual_seed(7)
    zero = zerolab.DDP(reference.Model(), units=[reference.Block])
    optimizers = whole.muon_and_adamw(zero.model, whole.plain)
    for number in range(2):
        step(Way(), zero, optimizers, number)
    zerolab.save(f"{folder}/plain", zero, optimizers)
    other, owners = build(Way(), 3)
    zerolab.load(f"{folder}/plain", other, owners)
    zerolab.save(f"{folder}/owned", other, owners)
    again, plain = zerolab.DDP(reference.Model(), units=[reference.Block]), None
    plain = whole.muon_and_adamw(again.model, whole.plain)
    zerolab.load(f"{folder}/owned", again, plain)
    for engine, each in ((zero, optimizers), (other, owners), (again, plain)):
        step(Way(), engine, each, 2)
    states = [engine.full_state_dict() for engine in (zero, other, again)]
    return all(torch.equal(states[0][key], state[key]) for state in states for key in states[0])


def test_checkpoints_of_torchs_own_class(ranks, tmp_path):
    assert ranks.run(from_plain, str(tmp_path), ranks=2) == [True, True]


def state_dicts(stage: int) -> tuple[bool, Any]:
    """A rank's state dict fits the same rank, and no other."""
    zero, optimizers = build(Way(), stage)
    step(Way(), zero, optimizers, 0)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    weights = zero.full_state_dict()
    other, again = build(Way(), stage)
    other.load_full_state_dict(weights)
    for optimizer, state in zip(again, saved, strict=True):
        optimizer.load_state_dict(state)
    step(Way(), zero, optimizers, 1)
    step(Way(), other, again, 1)
    one, two = zero.full_state_dict(), other.full_state_dict()
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, saved[0])
    again[0].load_state_dict(everyone[1 - zero.rank])
    return all(torch.equal(one[key], two[key]) for key in one), attempt(lambda: step(Way(), other, again, 2))


def test_state_dicts(ranks):
    for stage in (0, 3):
        results = ranks.run(state_dicts, stage, ranks=2)
        assert all(same for same, _ in results)
        words = ("those of the parameters that rank 1 of 2 owns", "use zerolab.save(path, zero, optimizer)")
        all_say([error for _, error in results], "RuntimeError", *words)


# -- errors, on every rank --------------------------------------------------------------------------------------------


class Fails(SGD):
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"]:
            raise ArithmeticError("not positive definite")


def refused() -> dict[str, Any]:
    model = reference.Model()
    old = [p for p in model.parameters() if p.dim() == 2]
    zero = zerolab.Zero3(model, units=[reference.Block])
    other = zerolab.Zero3(nn.Linear(4, 4))
    rank, matrices = zero.rank, whole.blocks(zero.model)
    everything = list(zero.model.parameters())
    both = [*zero.model.parameters(), *other.model.parameters()]
    offloaded = zerolab.Zero2(nn.Linear(4, 4), offload="optimizer")
    messages = {
        "vectors": attempt(lambda: OwnerOptimizer(everything, Muon)),
        "one rank's vectors": attempt(lambda: OwnerOptimizer(everything if rank else matrices, Muon)),
        "old": attempt(lambda: OwnerOptimizer(old, Muon)),
        "unsharded": attempt(lambda: OwnerOptimizer(nn.Linear(3, 3).parameters(), Muon)),
        "two models": attempt(lambda: OwnerOptimizer(both, SGD)),
        "LBFGS": attempt(lambda: OwnerOptimizer(everything, torch.optim.LBFGS)),
        "no class": attempt(lambda: OwnerOptimizer(everything, Muon(matrices))),
        "early state": attempt(lambda: OwnerOptimizer(everything, Adagrad)),
        "offload": attempt(lambda: OwnerOptimizer(offloaded.model.parameters(), SGD, lr=0.1)),
        "other parameters": attempt(lambda: OwnerOptimizer(matrices[rank:], Muon)),
        "other order": attempt(lambda: OwnerOptimizer(matrices[:: 1 - 2 * rank], Muon)),
        "other rate": attempt(lambda: OwnerOptimizer(matrices, Muon, lr=0.1 * (rank + 1))),
    }
    for what in ("gradient", "rate", "failure"):
        optimizer: Optimizer = OwnerOptimizer(matrices, Fails if what == "failure" else Muon, lr=0.01)
        zero.model(*reference.batch(rank, 0)).backward()
        if rank and what == "gradient":
            matrices[3].grad = None
        if rank and what == "rate":
            optimizer.param_groups[0]["lr"] = 0.5
        messages[what] = attempt(optimizer.step)
        for param in everything:
            param.grad = None
    optimizer = OwnerOptimizer(matrices, Muon)
    zero.model(*reference.batch(rank, 1)).backward()
    optimizer.step()  # all is well after all
    messages["late vectors"] = attempt(lambda: optimizer.add_param_group({"params": [everything[2]]}))
    assert len(optimizer.param_groups) == 1
    messages["alone"] = attempt(lambda: torch.optim.Muon(everything[:1]).step())
    return messages


def test_refused_with_a_reason_on_every_rank(ranks):
    results = ranks.run(refused, ranks=2)
    value, comm, runtime = "ValueError", "CommError", "RuntimeError"
    muon = "OwnerOptimizer cannot be built with Muon: ValueError: Muon only supports 2D parameters"
    first, last = "['blocks.0.up.weight', [0, True]]", "['blocks.3.down.weight', [0, True]]"
    expected = {
        "vectors": (value, f"rank 0: {muon}"),
        "one rank's vectors": (value, f"rank 1: {muon}"),
        "old": (runtime, "emb.weight was taken from the model before it was sharded"),
        "unsharded": (value, "is of no sharded model: shard the model first"),
        "two models": (value, "parameters of several sharded models"),
        "LBFGS": (value, "LBFGS looks at several parameters together"),
        "no class": ("TypeError", "expected a subclass of torch.optim.Optimizer"),
        "early state": (value, "it makes state in its constructor"),
        "offload": (value, 'does not go with offload="optimizer"'),
        "other parameters": (comm, "OwnerOptimizer's parameters: rank 1 has 7 of them where rank 0 has 8"),
        "other order": (comm, f"rank 1 has {last} where rank 0 has {first}"),
        "other rate": (comm, "OwnerOptimizer's values: rank 1 has"),
        "gradient": (runtime, "rank 0 has a gradient for blocks.1.down.weight, rank 1 has none"),
        "rate": (runtime, "would step with lr=0.5 on rank 1 and lr=0.01 on rank 0"),
        "failure": (runtime, "Fails failed on blocks.", "ArithmeticError: not positive definite", "from a checkpoint"),
        "late vectors": (value, f"rank 0: {muon}"),
        "alone": (runtime, "Use zerolab.OwnerOptimizer(params, Muon)"),
    }
    for name, words in expected.items():
        all_say([result[name] for result in results], *words)
