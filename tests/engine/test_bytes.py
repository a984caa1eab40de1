"""Bytes held, bytes in passing and bytes moved, as the formulas say."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from reference import DEPTH, EACH, Block, Model, batch, build, step
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zerolab
from zerolab import Precision
from zerolab.world.processes import Patience

# -- held after backward ----------------------------------------------------------------------------------------------


def storage_bytes(tensors) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(size for pointer, size in storages.items() if pointer)


def held_after_backward(stage: int, precision: Precision | None) -> tuple[list[int], int]:
    zero, optimizer = build(stage, precision)
    step(zero, optimizer, 0)
    zero.model(*batch(zero.rank, 1)).backward()
    gc.collect()
    params = list(zero.model.parameters())
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    full = [unit.full for unit in zero.units]
    held = [storage_bytes(params + full), storage_bytes(p.grad for p in params), storage_bytes(states)]
    return held, sum(unit.layout.size for unit in zero.units)


@pytest.mark.parametrize(("n", "precision"), EACH)
def test_bytes_held_equal_the_table(ranks, n, precision):
    """To the byte, with Ψ counted with its padding (below 1 % here): parameters, gradients, optimizer state."""
    for stage in range(4):
        for held, psi in ranks.run(held_after_backward, stage, precision, ranks=n):
            shard = psi // n
            if precision is None:
                params = 4 * (shard if stage == 3 else psi)
                grads = 4 * (shard if stage >= 2 else psi)
            else:
                masters = 4 * (psi if stage == 0 else shard)
                params = masters + (0 if stage == 3 else 2 * psi)
                grads = 2 * (shard if stage >= 2 else psi)
            states = 8 * (psi if stage == 0 else shard)
            unpadded = sum(p.numel() for p in Model().parameters())
            assert psi - unpadded <= unpadded / 100
            assert held[:2] == [params, grads], f"stage {stage}"
            assert 0.99 * states <= held[2] <= states, f"stage {stage}"  # Adam keeps none for the padding


# -- in passing -------------------------------------------------------------------------------------------------------


BOUND = 3  # the gradient on its way, the one that is being computed, and what arrives from the other ranks


class Count(TorchDispatchMode):
    """Counts, after every operation, the living storages of a size, but for some; keeps the largest count.

    gloo's own thread lets go of a collective's tensors a moment after `wait()` has returned: storages above `bound`
    get that moment, so that what counts is what is held.
    """

    def __init__(self, size: int, but: list[Tensor], bound: int) -> None:
        super().__init__()
        self.size, self.but, self.bound = size, {tensor.untyped_storage()._cdata for tensor in but}, bound
        self.most, self.seen = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, Tensor) else None
        if storage is not None and storage.nbytes() == self.size and storage._cdata not in self.but:
            self.seen[storage._cdata] = StorageWeakRef(storage)
        patience = Patience(5.0, longest=0.01)
        while True:
            self.seen = {key: ref for key, ref in self.seen.items() if not ref.expired()}
            if len(self.seen) <= max(self.bound, self.most) or patience.turn() <= 0:
                break
            time.sleep(0.001)
        self.most = max(self.most, len(self.seen))
        return result


def transients(stage: int) -> tuple[int, int]:
    """The most unit-sized storages made in backward and alive together, and the most units gathered at once."""
    gathered = []

    class Watched(zerolab.STAGES[stage]):
        def watch(self) -> None:
            inner = [unit for unit in self.units if unit not in self.root]
            gathered.append(sum(unit.full.untyped_storage().size() > 0 for unit in inner))

        def pre_forward(self, unit):
            super().pre_forward(unit)
            self.watch()

        def pre_backward(self, unit):
            super().pre_backward(unit)
            self.watch()

        def post_backward(self, unit):
            self.watch()
            super().post_backward(unit)
            self.watch()

    torch.manual_seed(0)
    zero = Watched(Model(), units=[Block])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    for number in range(2):
        step(zero, optimizer, number)
    loss = zero.model(*batch(zero.rank, 2))
    with Count(4 * zero.units[-1].layout.size, but=[unit.full for unit in zero.units], bound=BOUND) as count:
        loss.backward()
    return count.most, max(gathered)


@pytest.mark.parametrize("n", [2, 4])
def test_backward_holds_full_gradients_of_two_units_at_most(ranks, n):
    for stage in (2, 3):
        for storages, _ in ranks.run(transients, stage, ranks=n):
            assert 2 <= storages <= BOUND, f"stage {stage}"


@pytest.mark.slow
def test_the_count_can_fail(ranks):
    """Stage 1 keeps every unit's gradient, so the same count must exceed the bound."""
    assert all(storages > BOUND for storages, _ in ranks.run(transients, 1, ranks=2))


@pytest.mark.parametrize("n", [2, 4])
def test_stage_3_holds_full_parameters_of_two_units_at_most(ranks, n):
    assert all(1 <= gathered <= 2 for _, gathered in ranks.run(transients, 3, ranks=n))
    assert all(gathered == DEPTH for _, gathered in ranks.run(transients, 2, ranks=n))


# -- moved ------------------------------------------------------------------------------------------------------------


def moved(stage: int, precision: Precision | None) -> tuple[list[zerolab.Call], int, int]:
    zero, optimizer = build(stage, precision)
    for number in range(3):  # the order of gathers from the end of a step to the next is agreed in the third
        step(zero, optimizer, number)
    with zero.comm.record() as calls:
        step(zero, optimizer, 3)
    root = sum(unit.layout.size for unit in zero.root)
    return calls, sum(unit.layout.size for unit in zero.units), root


@pytest.mark.parametrize(("n", "precision"), EACH)
def test_moved_bytes_equal_the_table_and_the_order_is_the_same(ranks, n, precision):
    for stage in range(4):
        results = ranks.run(moved, stage, precision, ranks=n)
        for calls, psi, root in results:
            elements = (3 * psi - root if stage == 3 else 2 * psi) * (n - 1) // n
            assert sum(call.sent for call in calls if not call.control) == elements * (2 if precision else 4)
            assert [(c.op, c.unit, c.phase) for c in calls] == [(c.op, c.unit, c.phase) for c in results[0][0]]
            assert sum(call.control for call in calls) == 1, "one exchange of flags per backward"
