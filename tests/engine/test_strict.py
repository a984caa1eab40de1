"""The native branch, the one for NCCL, on a backend for the CPU that forgives nothing (strict.py says what it does)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import strict
import torch
import torch.distributed as dist
from cases_common import sharded
from reference import BF16, Block, Model, batch
from test_numbers import ExpertUnits
from torch import Tensor, nn

import zerolab
from zerolab import to_local
from zerolab.comm import Comm
from zerolab.measure import ledger, trace
from zerolab.trial.numbers import alone
from zerolab.trial.zoo import CASES

# -- the backend itself -----------------------------------------------------------------------------------------------


def mistakes() -> list[str]:
    """What strict.py says to each mistake."""
    said = []

    def attempt(mistake: Any) -> None:
        try:
            with strict.world():
                comm = Comm(None, torch.device("cpu"))
                output, input = torch.zeros(3), torch.arange(6.0)
                mistake(comm.reduce_scatter(output, input, "unit"), output, input)
        except strict.Broken as broken:
            said.append(str(broken))

    attempt(lambda pending, output, input: None)
    attempt(lambda pending, output, input: (input.zero_(), pending.wait()))
    attempt(lambda pending, output, input: (output.zero_(), pending.wait()))
    attempt(lambda pending, output, input: input.untyped_storage().resize_(0))
    with strict.world():
        comm, output = Comm(None, torch.device("cpu")), torch.zeros(3)
        pending = comm.reduce_scatter(output, torch.arange(6.0) + comm.rank, "unit")
        said.append(str(output.isnan().all().item()))
        pending.wait()
        said.append(str(output.tolist()))
        said.append(str(torch.empty(3).isnan().all().item()))
    return said


def test_it_forgives_no_mistake(ranks):
    for rank, said in enumerate(ranks.run(mistakes, ranks=2)):
        assert "nobody has waited for reduce_scatter" in said[0]
        assert all("was written to before the wait" in words for words in said[1:3])
        assert "is released before the wait" in said[3]
        assert said[4:] == ["True", str([[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]][rank]), "True"]


# -- the same numbers as on gloo --------------------------------------------------------------------------------------


def built(stage: int, mode: dict[str, Any]) -> tuple[zerolab.Engine, torch.optim.Optimizer]:
    torch.manual_seed(7 + dist.get_rank())
    options = {key: value for key, value in mode.items() if not hasattr(zerolab.DDP, key)}
    zero = zerolab.shard(Model(), stage, units=[Block], **options)
    for key in mode.keys() - options.keys():
        setattr(zero, key, mode[key])
    # Another order of the sum rounds otherwise; with this eps Adam does not magnify it.
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-2, eps=1e-2)


def break_off(*_: Any) -> None:
    raise InterruptedError


def everything(stage: int, mode: dict[str, Any], folder: str) -> list[Tensor]:
    """Steps, accumulation, clipping, evaluation, also with averages, errors that all ranks meet, edits, a checkpoint:
    what comes of it."""
    zero, optimizer = built(stage, mode)
    model, seen, ema = zero.model, [], zerolab.EMA(zero, 0.5)

    def step(number: int) -> None:
        loss = model(*batch(zero.rank, number))
        loss.backward()
        seen.extend([loss.detach(), zero.clip_grad_norm_(0.5)])
        seen.extend(to_local(param.grad).float() for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        ema.update()

    step(0)
    seen.extend(zerolab.full_tensor(param).detach().clone() for param in model.parameters())
    with zero.no_sync():
        model(*batch(zero.rank, 1)).backward()
    step(2)
    with torch.no_grad():
        seen.append(model(*batch(zero.rank, 3)))
        with ema.average_parameters():
            seen.append(model(*batch(zero.rank, 3)))
    hook = model.blocks[0].register_forward_hook(
        lambda module, inputs, output: output.register_hook(break_off) and None
    )
    with pytest.raises(InterruptedError):
        model(*batch(zero.rank, 4)).backward()
    hook.remove()
    step(5)
    hook = model.blocks[1].register_forward_hook(break_off)
    with pytest.raises(InterruptedError):
        model(*batch(zero.rank, 6))
    hook.remove()
    with zero.full_parameters():
        model.head.weight.mul_(1 + zero.rank)
    step(7)
    zerolab.save(folder, zero, optimizer, ema=ema)
    zero, optimizer = built(stage, mode)
    ema = zerolab.EMA(zero, 0.5)
    zerolab.load(folder, zero, optimizer, ema=ema)
    model = zero.model
    step(8)
    state = zero.full_state_dict()
    zero.load_full_state_dict({name: value / 2 for name, value in state.items()} if zero.rank == 0 else None)
    step(9)
    states = zero.full_state_dict(), ema.full_state_dict()
    return [*(tensor.float() for tensor in seen), *(value for state in states for value in state.values())]


def on_both(stages: list[int], modes: list[dict[str, Any]], folder: str, late: int | None) -> float:
    """The largest difference between gloo and strict."""
    differences = [0.0]
    for stage in stages:
        for mode in modes:
            results = []
            for place in (nullcontext(), strict.world(late)):
                with place:
                    results.append(everything(stage, mode, folder))
            differences += [(a - b).abs().max().item() for a, b in zip(*results, strict=True) if a.numel()]
    return max(differences)  # NaN, if there is one


PLAIN, SLOW = {}, {"prefetch": False, "overlap": False}
KEEPING, AWAY = {"keep_grad_memory": True}, {"offload": "optimizer"}


def compare(ranks: Any, n: int, tolerance: float, *arguments: Any) -> None:
    for difference in ranks.run(on_both, *arguments, ranks=n):
        assert difference <= tolerance, difference  # also false of NaN


@pytest.mark.slow
def test_two_ranks_are_equal_bit_for_bit(ranks, tmp_path: Path):
    """Half of one and half of the other, rounded once: there is only one mean of two."""
    compare(ranks, 2, 0.0, [0], [PLAIN, SLOW | KEEPING], str(tmp_path), None)
    compare(ranks, 2, 0.0, [1, 2], [PLAIN], str(tmp_path), 1)
    compare(ranks, 2, 0.0, [3], [AWAY, {"precision": BF16}], str(tmp_path), 0)


@pytest.mark.exhaustive
def test_other_settings_three_ranks_and_meshes(ranks, tmp_path: Path):
    compare(ranks, 2, 0.0, [1, 2], [AWAY], str(tmp_path), 1)
    compare(ranks, 2, 0.0, [3], [PLAIN, SLOW], str(tmp_path), 0)
    compare(ranks, 3, 1e-5, [0, 2, 3], [PLAIN], str(tmp_path), 2)
    compare(ranks, 4, 1e-5, [1, 3], [{"mesh": (2, 2)}], str(tmp_path), 0)
    compare(ranks, 4, 1e-5, [2], [{"mesh": (1, 4)} | AWAY], str(tmp_path), None)


def owned(stage: int) -> list[Tensor]:
    """Muon on whole matrices: what the parameters are after three steps."""
    zero, _ = built(stage, {})
    matrices = [param for param in zero.model.parameters() if param.dim() == 2]
    muon = zerolab.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)
    for number in range(3):
        zero.model(*batch(zero.rank, number)).backward()
        muon.step()
        zero.model.zero_grad()
    return list(zero.full_state_dict().values())


def owned_on_both() -> None:
    for stage in range(4):
        expected = owned(stage)
        with strict.world(late=1):
            for got, wanted in zip(owned(stage), expected, strict=True):
                assert torch.equal(got, wanted), stage


@pytest.mark.slow
def test_owners_of_whole_matrices(ranks):
    ranks.run(owned_on_both, ranks=2)


# -- hard models ------------------------------------------------------------------------------------------------------

HARD = ["tied across units", "mixture of experts", "freezing and thawing", "unused", "two backwards", "two losses"]
HARD += ["checkpoint nested, reentrant", "checkpoint blocks, non-reentrant", "shared across checkpoints", "odd shapes"]


def hard() -> None:
    for name in HARD:
        case = CASES[name]
        expected, losses = alone(case, dist.get_world_size())
        for stage in case.stages:
            with strict.world(late=1) as here:
                state, own = sharded(case, stage)
            tolerance = {"rtol": 0, "atol": 0} if case.exact else {"rtol": 1e-4, "atol": 1e-5}
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, **tolerance, msg=f"{name}, stage {stage}: {key}")
            if case.exact:
                assert own == [row[dist.get_rank()] for row in losses], (name, stage)
            assert here.most["reduce_scatter"] <= 1 and here.most["all_reduce"] <= 1  # memory for one at a time


@pytest.mark.exhaustive
def test_hard_models(ranks):
    ranks.run(hard, ranks=2)


def on_meta(stage: int) -> list[Tensor]:
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Model()
    zero = zerolab.shard(model, stage, units=[Block], init=initialise)
    zero.model(*batch(zero.rank, 0)).backward()
    return [*zero.full_state_dict().values(), *(to_local(param.grad) for param in model.parameters())]


def initialise(module: nn.Module) -> None:
    module.reset_parameters()


def meta_on_both() -> None:
    for stage in (1, 3):
        expected = on_meta(stage)
        with strict.world(late=0):
            for got, wanted in zip(on_meta(stage), expected, strict=True):
                assert torch.equal(got, wanted)


def test_models_from_the_meta_device(ranks):
    ranks.run(meta_on_both, ranks=2)


# -- means, times -----------------------------------------------------------------------------------------------------


def means() -> tuple[dict[str, list[float]], dict[Any, int]]:
    """The means of 1, 1, 1, ... and of 0, 1, 2, ..., by reduce-scatter and by all-reduce."""
    rows = {}
    with strict.world() as here:
        comm = Comm(None, torch.device("cpu"))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for name, value in (("ones", 1.0), ("ranks", float(comm.rank))):
                output, full = torch.empty(5, dtype=dtype), torch.full((5 * comm.world_size,), value, dtype=dtype)
                comm.reduce_scatter(output, full, "unit").wait()
                comm.all_reduce(full, "unit").wait()
                rows[f"{name} {dtype}"] = [*set(output.tolist()), *set(full.tolist())]
        return rows, here.ops


def test_the_native_mean(ranks):
    """Not torch's AVG where it is off: in bf16 a third is 0.334, and for one rank it may leave elements out."""
    for n in (1, 2, 3):
        for rows, ops in ranks.run(means, ranks=n):
            for name, values in rows.items():
                expected = 1.0 if name.startswith("ones") else (n - 1) / 2
                assert values == pytest.approx(
                    [expected] * 2, rel=1e-3 if "float16" in name and "b" not in name else 1e-6
                )
            kinds = {op for _, op in ops}
            assert kinds == ({"SUM"} if n == 1 else {"AVG"} if n == 2 else {"AVG", "SUM"})


def masters_as_parameters() -> list[float]:
    with strict.world():
        comm = Comm(None, torch.device("cpu"))
        full = torch.empty(3 * comm.world_size, dtype=torch.bfloat16)
        comm.all_gather(full, torch.full((3,), 1.0 + comm.rank), "unit").wait()
        return full.tolist()


def test_a_gather_casts(ranks):
    """As on gloo, where a copy is made anyway."""
    assert ranks.run(masters_as_parameters, ranks=2) == [[1.0] * 3 + [2.0] * 3] * 2


def timed() -> None:
    with strict.world():
        zero, optimizer = built(3, {})
        with trace(zero, optimizer) as record, ledger(zero) as book:
            zero.model(*batch(zero.rank, 0)).backward()
        assert record.overlap is None and not record.waits
        assert book.moved > 0 and all(call.end is None for call in book.calls if not call.control)
        assert all(call.end is not None for call in book.calls if call.control)


def test_nothing_is_said_of_times_that_only_a_device_knows(ranks):
    ranks.run(timed, ranks=2)


# -- a rank that goes another way, is late, raises, dies: the waits themselves say nothing -----------------------------


def another_route(agreed: int) -> str:
    with pytest.raises(zerolab.CommError) as caught, strict.world(patience=0.05):
        sharded(ExpertUnits(agreed), 3)
    return str(caught.value)


@pytest.mark.parametrize("agreed", [0, 2])
def test_another_route_is_named(ranks, agreed):
    for message in ranks.run(another_route, agreed, ranks=2):
        assert "experts." in message and "units=" in message and "rank " in message, message
        assert "failed: " not in message


def oversleep() -> tuple[str, float, float]:
    with strict.world(patience=0.05):
        comm = Comm(None, torch.device("cpu"))
        group = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        begin = time.monotonic()
        if comm.rank == 1:
            time.sleep(group)
        try:
            comm.exchange_bytes(b"", "exchange of used parameters")
        except zerolab.CommError as error:
            return str(error), time.monotonic() - begin, group
        return "", 0.0, group


@pytest.mark.exhaustive
def test_the_control_group_speaks_before_the_watchdog(ranks):
    (message, seconds, timeout), _ = ranks.run(oversleep, ranks=2, timeout=60, group_timeout=8)
    assert "exchange of used parameters" in message and "watchdog" in message
    assert 0.7 * timeout < seconds  # plus what the flight recorder needs to ask the others
    assert "rank 1 did not come" in message or "rank 1" in message


_entered = []  # worlds that are not left


def goes_wrong(how: str, folder: str) -> None:
    _entered.append(strict.world(patience=0.05))
    _entered[0].__enter__()
    zero, optimizer = built(3, {})
    try:
        for number in range(4):
            if zero.rank == 1 and number == 2:
                if how == "raises":
                    raise ValueError("a bad batch")
                os.kill(os.getpid(), signal.SIGKILL)
            zero.model(*batch(zero.rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except zerolab.CommError as error:
        Path(folder, f"rank {zero.rank}").write_text(str(error))
        raise


@pytest.mark.parametrize(("how", "words"), [("raises", "ValueError: a bad batch"), ("dies", "SIGKILL")])
def test_a_rank_that_fails_is_named(how, words, tmp_path: Path):
    with zerolab.Ranks(2, threads=1, forked=True) as pool, pytest.raises(zerolab.RankError) as caught:
        pool.run(goes_wrong, how, str(tmp_path))
    assert caught.value.rank == 1 and words in str(caught.value), caught.value
    if how == "dies":  # the other one did not go on with what never came
        assert "exchange of used parameters" in (tmp_path / "rank 0").read_text()


# -- float16 with the optimizer on the host ---------------------------------------------------------------------------


class OnDevice(Tensor):
    """A number that would be on a device: the host may only read a copy that it has waited for."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def to(self, *_: Any, non_blocking: bool = False, **__: Any) -> Tensor:
        raise strict.Broken(f"copied with non_blocking={non_blocking}, and read at once")


def unscaled(offload: str | None) -> None:
    zero, optimizer = built(2, {"precision": zerolab.Precision(torch.float16), "offload": offload})
    scaler = zerolab.LossScaler(zero, init_scale=4.0)
    scaler.scale(zero.model(*batch(zero.rank, 0))).backward()
    before = [to_local(param.grad).float().sum().item() for param in zero.model.parameters()]
    scale, found = (torch.tensor([number]).as_subclass(OnDevice) for number in (0.25, 0.0))
    scaler._unscale_grads_(optimizer, scale, found, False)
    after = [to_local(param.grad).sum().item() for param in zero.model.parameters()]
    assert after == pytest.approx([value / 4 for value in before], rel=1e-3, abs=1e-6)


def scales() -> None:
    unscaled("optimizer")
    with pytest.raises(strict.Broken, match="non_blocking=True"):
        unscaled(None)  # on a GPU: a copy on the device itself, in the stream's order


def test_the_scale_is_on_the_host_before_it_is_read_there(ranks):
    ranks.run(scales, ranks=2)
