"""`zerolab demo`: the ladder on this machine. Every stage trains the same model on the same text, and is measured.

The yardstick is one process that does not use zerolab's engine: it runs the ranks' micro-batches one after the other,
adds their gradients in rank order in float32, divides by their number and rounds once. On gloo every stage must
end with its parameters, bit for bit. It runs on one thread, as the ranks do: other thread counts give other bits.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.measure import CATEGORIES, model_states, moved_bytes, peak, state_bytes
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

BATCH, LEARNING_RATE, SEED = 2, 1e-3, 0
PRECISIONS = {"fp32": KEEP, "bf16": zerolab.Precision(torch.bfloat16)}
BYTES_TOLERANCE = 0.01  # padding, and Adam's step counters
# NCCL adds in an order of its own and rounds on the way, and GPU kernels may add in another order in each run. So there
# the parameters may differ by this fraction of the way that training took them (Euclidean norms), for each step.
# In 20 steps other orders and roundings came to 0.0003 in fp32 and 0.03 in bf16, gradients not averaged at all to 0.9.
NCCL_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}

Report = dict[str, Any]  # what --json writes


class Refused(Exception):
    """The demonstration cannot run like this; says why in one line."""


def demo(
    ranks: int = 4,
    steps: int = 20,
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: str = "fp32",
    device: str = "auto",
    json_file: str | None = None,
    plot_file: str | None = None,
) -> int:
    """Measure the ladder, print one table and one sentence; the exit status: 0 all as promised, 1 not.

    Raises `Refused` before any work if an argument makes no sense or a package is missing.
    """
    _need("rich", "tqdm", *(["matplotlib"] if plot_file else []))
    _check_files(json_file, plot_file)
    report, problems = measure_ladder(ranks, steps, stages, precision, device)
    if json_file:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    if plot_file:
        from zerolab.lab.plots import ladder

        figure, sentence = ladder(report, precision)
        figure.savefig(plot_file, dpi=150)
    print_table(report, precision)
    for problem in problems:
        print(f"WRONG: {problem}")
    if not problems:
        print(conclusion(report))
    if plot_file:
        print(f"{plot_file}: {sentence}")
    return 1 if problems else 0


def measure_ladder(
    ranks: int = 4,
    steps: int = 20,
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: str = "fp32",
    device: str = "auto",
    classes: Sequence[type[zerolab.Engine]] = zerolab.STAGES,
    sizes: dict[str, int] | None = None,
) -> tuple[Report, list[str]]:
    """Train alone and at each stage: what was measured, and a line for everything that is not as it should be.

    classes: the class of each stage. sizes: arguments of the `GPT`; default: 5.7 million parameters.
    Bytes are those of the rank that has most, times those of the slowest.
    """
    device = _check(ranks, steps, stages, precision, device)
    job = (steps, precision, sizes or {})
    report: Report = {"ranks": ranks, "steps": steps, "parameters": 0, "stages": {}}
    problems: list[str] = []
    with _without_gpus(device == "cpu"), zerolab.Ranks(ranks, threads=1) as pool:
        alone = pool.run(train_alone, ranks, *job, ranks=1, timeout=3600)[0]
        report["parameters"] = sum(value.numel() for value in alone["state"].values())
        for stage in dict.fromkeys(stages):
            everyone = pool.run(train_sharded, classes[stage], *job, alone, timeout=3600, group_timeout=300)
            entry = _entry(stage, ranks, precision, report["parameters"], everyone)
            report["stages"][str(stage)] = entry
            problems += [f"stage {stage}: {what}" for what in _wrong(entry, everyone, alone, precision)]
    return report, problems


# -- on the ranks ----------------------------------------------------------------------------------------------------


def train_alone(ranks: int, steps: int, precision: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Plain PyTorch: one process that does the work of all ranks, and what every stage should come to."""
    device = zerolab.init()
    torch.manual_seed(SEED)
    model = GPT(**sizes).to(device)
    masters = [param.detach().clone() for param in model.parameters()]
    start = [master.clone() for master in masters]
    model.to(PRECISIONS[precision].compute or torch.float32)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    data, losses = text(), []
    for step in _progress(steps, "one process", shown=True):
        losses.append([])
        sums: list[Tensor] = []
        for rank in range(ranks):
            x, y = batch(data, rank, step, BATCH, model.context)
            loss = model(x.to(device), y.to(device))
            loss.backward()
            losses[-1].append(loss.item())
            grads = [param.grad.float() for param in params]
            sums = [total + grad for total, grad in zip(sums, grads)] if rank else grads
            model.zero_grad()
        for master, param, total in zip(masters, params, sums):
            master.grad = (total / ranks).to(param.dtype).float()  # rounded once, to what travels between ranks
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
    """One rank at one stage: the usual loop, with an eye on it. `alone`: what `train_alone` came to."""
    device = zerolab.init()
    torch.manual_seed(SEED + torch.distributed.get_rank())  # other weights on each rank: the first rank's count
    zero = cls(GPT(**sizes).to(device), units=[Block], precision=PRECISIONS[precision])
    model, data = zero.model, text()
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
    with peak(zero, optimizer) as highest:  # one more step, which counts for nothing else
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


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))  # 0.0 is not -0.0 here


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def _progress(steps: int, what: str, shown: bool) -> Any:
    """A bar on the terminal that this rank inherited; nothing where there is no terminal."""
    from tqdm import tqdm

    return tqdm(range(steps), desc=f"{what:<13}", unit="step", ncols=79, disable=None if shown else True)


# -- what came of it -------------------------------------------------------------------------------------------------


def _entry(stage: int, ranks: int, precision: str, parameters: int, everyone: list[dict[str, Any]]) -> Report:
    """What --json says about a stage."""
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
        differs = f"rank {rank} ends {100 * result['distance']:.2g} % of the way of training off the single process"
        if result["exact"]:
            if result["different"]:
                names = result["different"]
                yield f"{differs}; {len(names)} of {len(alone['state'])} parameters differ, first {names[0]}"
            elif result["losses"] != [losses[rank] for losses in alone["losses"]]:
                yield f"rank {rank} has other losses than the single process had on its micro-batches"
        elif not result["distance"] <= (allowed := NCCL_TOLERANCE[precision] * len(alone["losses"])):
            yield f"{differs}, more than the {100 * allowed:.2g} % that are allowed on NCCL"
    pairs = [(what, entry["state_bytes"][what], entry["formula_bytes"][what]) for what in CATEGORIES]
    pairs.append(("moved", entry["moved_bytes_per_step"], entry["formula_moved_bytes_per_step"]))
    for what, measured, formula in pairs:
        if abs(measured - formula) > BYTES_TOLERANCE * formula:
            yield f"{measured:,} bytes {what}, {formula:,} by the formula"


def print_table(report: Report, precision: str) -> None:
    """One table, about 80 characters wide: for each stage what was measured, and under it what the formula says."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ranks = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}"
    table = Table(
        title=f"GPT with {report['parameters']:,} parameters, {ranks}, {precision}, {report['steps']} steps.\n"
        "MB per rank: held when backward returns; moved in a step; the peak of a step.",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("stage", no_wrap=True)
    first = ("final\nloss", "bit for\nbit")
    for heading in (*first, "para-\nmeters", "gradi-\nents", "opti-\nmizer", "sum", "moved", "peak", "ms per\nstep"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage, r in report["stages"].items():
        measured = (*_held(r["state_bytes"]), _mb(r["moved_bytes_per_step"]), _mb(r["peak_bytes"]))
        formula = (*_held(r["formula_bytes"]), _mb(r["formula_moved_bytes_per_step"]))
        same = "equal" if r["bitwise_equal"] else "not"
        milliseconds = f"{1000 * r['step_seconds']:.0f}"
        table.add_row(_name(stage), f"{r['losses'][-1]:.4f}", same, *measured, milliseconds)
        table.add_row("  formula", "", "", *formula, "", "", style="dim")
    console = Console(highlight=False)
    console.width = max(console.width, 100)  # a narrower terminal may break lines, but nothing is cut off
    console.print(table)


def conclusion(report: Report) -> str:
    """What the table says, in one sentence, where nothing is wrong."""
    stages = report["stages"]
    names = ", ".join(_name(stage) for stage in stages)
    held = ", ".join(_mb(sum(r["state_bytes"].values())) for r in stages.values())
    moved = ", ".join(_mb(r["moved_bytes_per_step"]) for r in stages.values())
    same = "bit for bit" if all(r["bitwise_equal"] for r in stages.values()) else "within the tolerance for NCCL"
    return (
        f"Every stage ({names}) ended with the parameters of one process, {same}; "
        f"a rank held {held} MB and moved {moved} MB a step."
    )


def _name(stage: str) -> str:
    return f"{stage} {zerolab.STAGES[int(stage)].__name__}"


def _held(sizes: dict[str, int]) -> list[str]:
    return [_mb(sizes[category]) for category in CATEGORIES] + [_mb(sum(sizes.values()))]


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


# -- what is asked for -----------------------------------------------------------------------------------------------


def _check(ranks: int, steps: int, stages: Sequence[int], precision: str, device: str) -> str:
    """The device that all will use, "cpu" or "cuda"."""
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


def _check_files(json_file: str | None, plot_file: str | None) -> None:
    """Now, not when the work is done."""
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
            raise Refused(f"{option} {file}: cannot write there")
    if plot_file and Path(plot_file).suffix not in (".png", ".svg", ".pdf"):
        raise Refused(f"--plot {plot_file}: the name must end in .png, .svg or .pdf")


def _need(*packages: str) -> None:
    """Raises `Refused` if a package of the extra `lab` is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise Refused(f"this needs {package}: pip install 'zerolab[lab]'") from None


@contextmanager
def _without_gpus(hidden: bool) -> Iterator[None]:
    """Processes started inside see no GPU, so all of them compute on the CPU, the single one too."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if hidden and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif hidden:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
