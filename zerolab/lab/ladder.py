"""The ladder on this machine: every stage trains the same model on the same text, and is measured.

The yardstick is one process that does not use zerolab's engine. It runs the ranks' micro-batches one by one, adds their
gradients in rank order in float32, divides by the number of ranks and rounds once. On gloo every stage must end with
its parameters, bit for bit. The process runs on one thread, as the ranks do: more threads would give other bits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.lab.exercises.cards import Status
from zerolab.measure import CATEGORIES, model_states, moved_bytes, peak, state_bytes
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

BATCH, LEARNING_RATE, SEED = 2, 1e-3, 0
PRECISIONS = {"fp32": KEEP, "bf16": zerolab.Precision(torch.bfloat16)}
BYTES_TOLERANCE = 0.01  # for padding and Adam's step counters
# NCCL adds in an order of its own and rounds on the way, and GPU kernels may add in a different order on every run.
# There the parameters may differ by this fraction of the distance that training moved them (Euclidean norms), per step.
# In 20 steps, other orders and roundings reached 0.0003 in fp32 and 0.03 in bf16; gradients never averaged, 0.9.
NCCL_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}

Report = dict[str, Any]  # what `zerolab demo --json` writes


class Refused(Exception):
    """The ladder cannot be measured like this. The message says why, in one line."""


def measure_ladder(
    ranks: int = 4,
    steps: int = 20,
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: str = "fp32",
    device: str = "auto",
    classes: Sequence[type[zerolab.Engine]] = zerolab.STAGES,
    sizes: dict[str, int] | None = None,
) -> tuple[Report, list[str]]:
    """Train alone and at each stage. Returns what was measured, and a line for everything that is not as it should be.

    classes: the class of each stage. sizes: arguments of the `GPT` (default: 5.7 million parameters). Bytes are those
    of the rank that has most, times those of the slowest rank. Raises `Refused` if the arguments make no sense.
    """
    device = _check(ranks, steps, stages, precision, device)
    job = (steps, precision, sizes or {})
    report: Report = {"ranks": ranks, "steps": steps, "parameters": 0, "stages": {}}
    problems: list[str] = []
    status = Status()
    importable = all(stage.__module__ != "__main__" for stage in classes)
    with _without_gpus(device == "cpu"), zerolab.Ranks(ranks, threads=1, forked=importable) as pool:
        status("one process trains alone ...")
        alone = pool.run(train_alone, ranks, *job, ranks=1, timeout=3600)[0]
        report["parameters"] = sum(value.numel() for value in alone["state"].values())
        for stage in dict.fromkeys(stages):
            status(f"{ranks} ranks train at stage {stage} ...")
            everyone = pool.run(train_sharded, classes[stage], *job, alone, timeout=3600, group_timeout=300)
            entry = _entry(stage, ranks, precision, report["parameters"], everyone)
            report["stages"][str(stage)] = entry
            problems += [f"stage {stage}: {what}" for what in _wrong(entry, everyone, alone, precision)]
        status("trained")
    return report, problems


# -- on the ranks ----------------------------------------------------------------------------------------------------


def train_alone(ranks: int, steps: int, precision: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Plain PyTorch in one process, doing the work of all ranks. Returns what every stage should arrive at."""
    device = zerolab.init()
    torch.manual_seed(SEED)
    model = GPT(**sizes).to(device)
    masters = [param.detach().clone() for param in model.parameters()]
    start = [master.clone() for master in masters]
    model.to(PRECISIONS[precision].compute or torch.float32)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    data = text()
    losses: list[list[float]] = []
    for step in _progress(steps, "one process", shown=True):
        losses.append([])
        sums: list[Tensor] = []
        for rank in range(ranks):
            x, y = batch(data, rank, step, BATCH, model.context)
            loss = model(x.to(device), y.to(device))
            loss.backward()
            losses[-1].append(loss.item())
            grads = [_grad(param) for param in params]
            sums = [total + grad for total, grad in zip(sums, grads)] if rank else grads
            model.zero_grad()
        for master, param, total in zip(masters, params, sums):
            master.grad = (total / ranks).to(param.dtype).float()  # rounded once, to the dtype that ranks exchange
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params):
                param.copy_(master)
    return {
        "losses": losses,
        "state": {name: master.cpu() for (name, _), master in zip(model.named_parameters(), masters)},
        "way": _norm([a - b for a, b in zip(masters, start)]),
    }


def train_sharded(
    cls: type[zerolab.Engine], steps: int, precision: str, sizes: dict[str, int], alone: dict[str, Any]
) -> dict[str, Any]:
    """One rank at one stage: the usual loop, and measurements around it. `alone`: the result of `train_alone`."""
    device = zerolab.init()
    torch.manual_seed(SEED + torch.distributed.get_rank())  # every rank has different weights: the first rank's count
    model, data = GPT(**sizes).to(device), text()
    zero = cls(model, units=[Block], precision=PRECISIONS[precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    held: dict[str, int] = {}

    def train_step(step: int) -> float:
        x, y = batch(data, zero.rank, step, BATCH, model.context)
        loss = model(x.to(device), y.to(device))
        loss.backward()
        held.update(model_states(zero, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # on a GPU this waits until the step is done

    losses, seconds = [], []
    for step in _progress(steps, f"stage {cls.stage} {cls.__name__}", shown=zero.rank == 0):
        begin = time.perf_counter()
        with zero.comm.record() as calls:
            losses.append(train_step(step))
        seconds.append(time.perf_counter() - begin)
    held_in_the_end = {category: held[category] for category in CATEGORIES}

    state, expected = zero.full_state_dict(), alone["state"]
    different = [name for name in expected if not _same_bits(state[name], expected[name])]
    distance = _norm([state[name] - expected[name] for name in expected]) / alone["way"]
    with peak(zero, optimizer) as highest:  # one more step, for the peak alone
        train_step(steps)
    return {
        "losses": losses,
        "different": different,
        "distance": distance,
        "held": held_in_the_end,
        "moved": sum(call.sent for call in calls if not call.control),
        "root": sum(unit.layout.numel for unit in zero.root),
        "peak": highest.bytes,
        "seconds": median(seconds[1:]),
        "exact": zero.comm.backend == "gloo",
    }


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None, "the GPT uses all of its parameters"
    return param.grad.float()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))  # 0.0 is not -0.0 here


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def _progress(steps: int, what: str, shown: bool) -> Any:
    """A progress bar on the terminal that this rank inherited. Without a terminal, nothing is shown."""
    from tqdm import tqdm

    return tqdm(range(steps), desc=f"{what:<13}", unit="step", ncols=79, disable=None if shown else True)


# -- the results -----------------------------------------------------------------------------------------------------


def _entry(stage: int, ranks: int, precision: str, parameters: int, everyone: list[dict[str, Any]]) -> Report:
    """The entry of a stage in the report."""
    sizes = (stage, ranks, parameters)
    kind = PRECISIONS[precision]
    return {
        "losses": [sum(losses) / ranks for losses in zip(*(rank["losses"] for rank in everyone))],
        "bitwise_equal": not any(rank["different"] for rank in everyone),
        "state_bytes": {category: max(rank["held"][category] for rank in everyone) for category in CATEGORIES},
        "ranks": [{"state_bytes": rank["held"]} for rank in everyone],
        "formula_bytes": state_bytes(*sizes, precision=kind),
        "moved_bytes_per_step": max(rank["moved"] for rank in everyone),
        "formula_moved_bytes_per_step": moved_bytes(*sizes, root=everyone[0]["root"], precision=kind),
        "peak_bytes": max(rank["peak"] for rank in everyone),
        "step_seconds": max(rank["seconds"] for rank in everyone),
    }


def _wrong(entry: Report, everyone: list[dict[str, Any]], alone: dict[str, Any], precision: str) -> Iterator[str]:
    for rank, result in enumerate(everyone):
        off = f"{100 * result['distance']:.2g} % of the distance that training covered"
        differs = f"rank {rank} ends away from the single process, by {off}"
        if result["exact"]:
            if result["different"]:
                names = result["different"]
                yield f"{differs}; {len(names)} of {len(alone['state'])} parameters differ, first {names[0]}"
            elif result["losses"] != [losses[rank] for losses in alone["losses"]]:
                yield f"rank {rank} does not have the losses that the single process had on its micro-batches"
        elif not result["distance"] <= (allowed := NCCL_TOLERANCE[precision] * len(alone["losses"])):
            yield f"{differs}, more than the {100 * allowed:.2g} % allowed on NCCL"
    pairs = [(what, entry["state_bytes"][what], entry["formula_bytes"][what]) for what in CATEGORIES]
    pairs.append(("moved", entry["moved_bytes_per_step"], entry["formula_moved_bytes_per_step"]))
    for what, measured, formula in pairs:
        if abs(measured - formula) > BYTES_TOLERANCE * formula:
            yield f"{measured:,} bytes {what}, {formula:,} by the formula"


# -- the arguments ---------------------------------------------------------------------------------------------------


def _check(ranks: int, steps: int, stages: Sequence[int], precision: str, device: str) -> str:
    """The device for all processes, "cpu" or "cuda". Raises Refused if the arguments make no sense."""
    if ranks < 1:
        raise Refused(f"--ranks must be 1 or more, not {ranks}")
    if steps < 2:
        raise Refused(f"--steps must be 2 or more, not {steps}: in the first step the optimizer has no state yet")
    if not stages or not set(stages) <= set(range(len(zerolab.STAGES))):
        raise Refused(f"--stages must be some of 0,1,2,3, not {','.join(map(str, stages)) or 'none'}")
    if precision not in PRECISIONS:
        raise Refused(f"--precision must be {' or '.join(PRECISIONS)}, not {precision}")
    if device not in ("auto", "cpu", "cuda"):
        raise Refused(f"--device must be auto, cpu or cuda, not {device}")
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < ranks:
        raise Refused(f"--device cuda needs a GPU for each of {ranks} ranks, and torch sees {gpus}")
    return "cpu" if device == "cpu" or gpus < ranks else "cuda"


@contextmanager
def _without_gpus(hidden: bool) -> Iterator[None]:
    """Hide the GPUs from processes started inside, so that all of them, the single one too, compute on the CPU."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if hidden and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif hidden and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
