"""`zerolab bench`: every stage beside the library that does the same, step by step in the same processes.

All systems are built on the same ranks and take one step each per round, in turn, so that whatever else the machine
does hits all of them. A round gives one ratio per pair; the median of the ratios counts, with its 95 % interval. Before
and after each step all ranks meet, so a step's time is the slowest rank's; CPU time is the sum over the ranks.

Peaks come from the allocator, in separate processes for each system. The floor is plain PyTorch that does not
communicate: what is above it is what sharding costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.lab.data import batch, text
from zerolab.lab.demo import PRECISIONS
from zerolab.lab.models import GPT, Block
from zerolab.measure import peak_of

SIZES = {"layers": 7, "width": 384, "heads": 6, "context": 64}  # 12.4 million parameters
BATCH, WARM_UP, LEARNING_RATE = 4, 3, 1e-3
SAME_LOSS = 0.002  # of each other: bf16 is done by autocast in torch's DDP, by casting the weights elsewhere
PAIRS = (
    ("DDP", "torch DDP"),
    ("Zero1", "ZeroRedundancyOptimizer"),
    ("Zero2", "FSDP2"),
    ("Zero3", "FSDP2 reshard"),
)
FLOOR = "no communication"
NAMES = (FLOOR, *(name for pair in PAIRS for name in pair))

Step = Callable[[int], float]  # takes a step's number, trains, returns the loss


# -- the systems -----------------------------------------------------------------------------------------------------


def build(name: str, precision: str, sizes: dict[str, int]) -> Step:
    """One system by name, with the same weights, data and optimizer as the others, at its best settings."""
    device = zerolab.init()
    torch.manual_seed(0)
    gpt = GPT(**sizes).to(device)
    compute = PRECISIONS[precision].compute
    model: nn.Module = gpt
    autocast = torch.autocast(device.type, compute or torch.bfloat16, enabled=False)
    if name in zerolab.__all__:
        getattr(zerolab, name)(gpt, units=[Block], precision=PRECISIONS[precision])
    elif name.startswith("FSDP2"):
        _fully_shard(gpt, compute, device, reshard=name.endswith("reshard"))
    else:
        autocast = torch.autocast(device.type, compute or torch.bfloat16, enabled=compute is not None)
        if name != FLOOR:
            ids = [device.index] if device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(gpt, device_ids=ids, gradient_as_bucket_view=True)
    if name == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, more = ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
    else:
        kind, more = torch.optim.AdamW, {}
    optimizer = kind(model.parameters(), lr=LEARNING_RATE, **more)
    data, rank = text(), dist.get_rank()

    def step(number: int) -> float:
        x, y = batch(data, rank, number, BATCH, gpt.context)
        with autocast:
            loss: Tensor = model(x.to(device), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _fully_shard(gpt: GPT, compute: torch.dtype | None, device: torch.device, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=compute), "reshard_after_forward": reshard}
    for block in gpt.blocks:
        fully_shard(block, **options)
    fully_shard(gpt, **options)


# -- on the ranks ----------------------------------------------------------------------------------------------------


def time_rounds(rounds: int, precision: str, sizes: dict[str, int]) -> dict[str, dict[str, list[float]]]:
    """One rank's seconds: {system: {"wall": of every round, "cpu": ..., "loss": of every step}}."""
    from tqdm import tqdm

    steps = {name: build(name, precision, sizes) for name in NAMES}
    result: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": [], "loss": []} for name in NAMES}
    hidden = None if dist.get_rank() == 0 else True
    for number in tqdm(range(WARM_UP + rounds), desc=f"rounds {precision}", unit="round", ncols=79, disable=hidden):
        for name, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            loss = step(number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            cpu = time.process_time() - cpu
            dist.barrier()
            wall = time.perf_counter() - wall
            result[name]["loss"].append(loss)
            if number >= WARM_UP:
                result[name]["wall"].append(wall)
                result[name]["cpu"].append(cpu)
    return result


def measure_peak(name: str, precision: str, sizes: dict[str, int]) -> int:
    """One rank's peak of a step in bytes."""

    def make() -> Callable[[], float]:
        step, number = build(name, precision, sizes), iter(range(10))
        return lambda: step(next(number))

    return peak_of(make, zerolab.init())


# -- the report ------------------------------------------------------------------------------------------------------


def measure(ranks: int, rounds: int, precision: str, sizes: dict[str, int] = SIZES) -> dict[str, Any]:
    """What `--json` writes. Ratios are ours over the peer's: below 1, ours is faster, or holds less."""
    report = measure_times(ranks, rounds, precision, sizes)
    report["peak_bytes"] = peaks = measure_peaks(ranks, precision, sizes)
    for pair in report["pairs"]:
        pair["peak_ratio"] = peaks[pair["ours"]] / peaks[pair["peer"]]
    return report


def measure_times(ranks: int, rounds: int, precision: str, sizes: dict[str, int]) -> dict[str, Any]:
    """All systems in turn on the same ranks."""
    with zerolab.Ranks(ranks, threads=1) as pool:
        everyone = pool.run(time_rounds, rounds, precision, sizes, timeout=3600, group_timeout=300)
    wall = {name: [max(each) for each in zip(*(rank[name]["wall"] for rank in everyone))] for name in NAMES}
    cpu = {name: [sum(each) for each in zip(*(rank[name]["cpu"] for rank in everyone))] for name in NAMES}
    loss = {name: sum(rank[name]["loss"][-1] for rank in everyone) / ranks for name in NAMES}
    pairs = []
    for ours, peer in PAIRS:
        pair: dict[str, Any] = {"ours": ours, "peer": peer, "loss_ours": loss[ours], "loss_peer": loss[peer]}
        for kind, times in (("wall", wall), ("cpu", cpu)):
            ratios = [a / b for a, b in zip(times[ours], times[peer])]
            pair[f"{kind}_ratio"], pair[f"{kind}_interval"] = median(ratios), interval(ratios)
        above = [median(wall[name]) - median(wall[FLOOR]) for name in (ours, peer)]
        pair["above_floor_ratio"] = above[0] / above[1] if above[1] > 0 else None
        pairs.append(pair)
    report = {"ranks": ranks, "rounds": rounds, "precision": precision, "pairs": pairs}
    report["floor"] = {name: median([a / b for a, b in zip(wall[FLOOR], wall[name])]) for name in NAMES[1:]}
    return report | {"step_seconds": {name: median(wall[name]) for name in NAMES}}


def measure_peaks(ranks: int, precision: str, sizes: dict[str, int]) -> dict[str, int]:
    """Of the rank that has most, each system in fresh processes: nobody else's memory."""
    peaks = {}
    for name in NAMES:
        with zerolab.Ranks(ranks, threads=1) as pool:
            peaks[name] = max(pool.run(measure_peak, name, precision, sizes, timeout=600))
    return peaks


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from the order statistics: no assumption about how ratios are distributed."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, int(n / 2 - 0.98 * n**0.5))
    return ordered[low], ordered[n - 1 - low]


def bench(ranks: int, rounds: int, precisions: list[str], json_file: str | None, plot_file: str | None) -> int:
    """Measure, print a table for each precision, write what was asked for; 1 if two of a pair did other work."""
    import rich

    reports, wrong = [], 0
    for precision in precisions:
        reports.append(measure(ranks, rounds, precision))
        rich.print(table(reports[-1]))
        for pair in reports[-1]["pairs"]:
            if abs(pair["loss_ours"] / pair["loss_peer"] - 1) > SAME_LOSS:
                print(f"WRONG: {pair['ours']} ends with loss {pair['loss_ours']}, {pair['peer']} {pair['loss_peer']}")
                wrong = 1
    print("Below 1 ours is faster, or holds less. Wall and CPU: median of the rounds' ratios, [95 % interval].")
    print("above: what a step costs more than without any communication, ours over the peer's.")
    if json_file:
        report = reports[0] if len(reports) == 1 else {"ranks": ranks, "reports": reports}
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    if plot_file:
        from zerolab.lab.plots import step_times

        figure, sentence = step_times(reports)
        figure.savefig(plot_file, dpi=150)
        print(f"{plot_file}: {sentence}")
    return wrong


def table(report: dict[str, Any]) -> Any:
    """For rich: a line for each pair. The losses are ours: `bench` says so if a peer's is another."""
    from zerolab.measure.units import table as new_table

    loss = ", ".join(f"{value:.4f}" for value in sorted({round(p["loss_ours"], 4) for p in report["pairs"]}))
    title = f"{report['ranks']} ranks, {report['precision']}, {report['rounds']} rounds; loss {loss}"
    result = new_table(title, ["ours : peer"], ["wall", "CPU", "above", "peak"])
    for pair in report["pairs"]:
        cells = []
        for kind in ("wall", "cpu"):
            low, high = pair[f"{kind}_interval"]
            cells.append(f"{pair[f'{kind}_ratio']:.3f} [{low:.2f} {high:.2f}]")
        above = pair["above_floor_ratio"]
        cells += ["-" if above is None else f"{above:.2f}", f"{pair['peak_ratio']:.3f}"]
        result.add_row(f"{pair['ours']} : {pair['peer'].removesuffix('Optimizer')}", *cells)
    return result
