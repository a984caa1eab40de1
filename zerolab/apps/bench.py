"""`zerolab bench`: every stage beside the library that does the same, step by step in the same processes.

All systems are built on the same ranks and take one step each per round, in turn, so that whatever else the machine is
doing hits all of them. A round gives one ratio per pair; the median of the ratios counts, with its 95 % interval. All
ranks meet before and after each step, so a step's time is the slowest rank's; CPU time is the sum over the ranks.

Peaks come from the allocator, in separate processes for each system. The floor is plain PyTorch without communication;
a system's time above the floor is what sharding costs. Bytes moved are counted at torch's collectives, which every
system must use, and as a ring would send them (gloo's own reduce-scatter sends twice that).

On CUDA, with a rank for each GPU and a larger model, CUDA events time the steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.lab.ladder import PRECISIONS
from zerolab.measure import peak_of
from zerolab.measure.sent import Sent
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

SIZES = {
    "cpu": {"layers": 7, "width": 384, "heads": 6, "context": 64},  # 12.6 million parameters
    "cuda": {"layers": 12, "width": 1024, "heads": 16, "context": 512},  # 152 million, which fill a GPU
}
BATCH = {"cpu": 4, "cuda": 16}
WARM_UP = 3
LEARNING_RATE = 3e-4  # with 1e-3 the loss jumps, and rounding decides where it lands
BUCKET = 25 * 2**20 // 4  # elements: DeepSpeed's buckets are as large as those of torch's DDP, 25 MB
# Relative. In bf16, torch's DDP uses autocast and the others cast weights. Ranks that never communicate are 0.0035 off.
SAME_LOSS = {"fp32": 1e-4, "bf16": 5e-4}
COMPARED = 10  # compare the mean loss of the first steps; from step 15 on, rounding to bf16 decides where the loss goes
PAIRS = (
    ("DDP", "torch DDP"),
    ("Zero1", "ZeroRedundancyOptimizer"),
    ("Zero2", "FSDP2"),
    ("Zero3", "FSDP2 reshard"),
)
DEEPSPEED = (("DDP", "DeepSpeed 0"), ("Zero1", "DeepSpeed 1"), ("Zero2", "DeepSpeed 2"), ("Zero3", "DeepSpeed 3"))
FLOOR = "no communication"

Step = Callable[[int], float]  # takes a step's number, trains, returns the loss


def pairs_of(precision: str) -> tuple[tuple[str, str], ...]:
    """Pairs of ours and a peer. DeepSpeed only if installed, and not its stage 0 in bf16, which has no masters."""
    if importlib.util.find_spec("deepspeed") is None:
        return PAIRS
    return PAIRS + (DEEPSPEED if precision == "fp32" else DEEPSPEED[1:])


def names_of(precision: str) -> list[str]:
    """Every system once, the floor first."""
    return list(dict.fromkeys([FLOOR, *(name for pair in pairs_of(precision) for name in pair)]))


# -- the systems -----------------------------------------------------------------------------------------------------


def build(name: str, precision: str, sizes: dict[str, int]) -> Step:
    """Build a system by name, at its best settings, with the same weights, data and optimizer as the others."""
    device = zerolab.init()
    torch.manual_seed(0)
    gpt = GPT(**sizes).to(device)
    data, rank = text(), dist.get_rank()

    def inputs(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(data, rank, number, BATCH[device.type], gpt.context)
        return x.to(device), y.to(device)

    if name.startswith("DeepSpeed"):
        return _deepspeed_step(gpt, int(name[-1]), precision, inputs)
    compute = PRECISIONS[precision].compute
    model: nn.Module = gpt
    autocast = torch.autocast(device.type, compute or torch.bfloat16, enabled=False)
    if name in zerolab.__all__:
        zero = getattr(zerolab, name)(gpt, units=[Block], precision=PRECISIONS[precision])
        zero.keep_grad_memory = True  # as torch's DDP keeps its buckets
    elif name.startswith("FSDP2"):
        _fully_shard(gpt, compute, device, reshard=name.endswith("reshard"))
    else:
        autocast = torch.autocast(device.type, compute or torch.bfloat16, enabled=compute is not None)
        if name != FLOOR:
            ids = [device.index] if device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(gpt, device_ids=ids, gradient_as_bucket_view=True)
    if name == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(number: int) -> float:
        with autocast:
            loss: Tensor = model(*inputs(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _fully_shard(gpt: GPT, compute: torch.dtype | None, device: torch.device, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute)
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def _deepspeed_step(gpt: GPT, stage: int, precision: str, inputs: Callable[[int], tuple[Tensor, Tensor]]) -> Step:
    """DeepSpeed with torch's AdamW, so that it does the same work as the others."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("deepspeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it uses the old names
    config = {
        "train_micro_batch_size_per_gpu": BATCH[zerolab.init().type],
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET,  # the default, 2 GB, is allocated for any model, however small
            "allgather_bucket_size": BUCKET,
            # With this it gathers once per step, as parameters that are due for prefetch are not released after
            # forward. With 0 it gathers twice, as Zero3 does, but one parameter at a time.
            "stage3_prefetch_bucket_size": BUCKET,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # otherwise it clips at 1
        "bf16": {"enabled": precision == "bf16"},
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiles
        import deepspeed

        optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)
        engine = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config, dist_init_required=False)[0]

    def step(number: int) -> float:
        loss: Tensor = engine(*inputs(number))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


# -- on the ranks ----------------------------------------------------------------------------------------------------


def time_rounds(rounds: int, precision: str, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """One rank's seconds: {system: {"wall": of every round, "cpu": ..., "loss": of every step, "sent": bytes}}."""
    device = zerolab.init()
    steps = {name: build(name, precision, sizes) for name in names_of(precision)}
    result: dict[str, dict[str, Any]] = {name: {"wall": [], "cpu": [], "loss": []} for name in steps}
    numbers: Iterable[int] = range(WARM_UP + rounds)
    with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may have little besides torch
        from tqdm import tqdm

        hidden = None if dist.get_rank() == 0 else True
        numbers = tqdm(numbers, desc=f"rounds {precision}", unit="round", ncols=79, disable=hidden)
    for number in numbers:
        for name, step in steps.items():
            with Sent() if number == WARM_UP - 1 else contextlib.nullcontext() as sent:
                loss, wall, cpu = time_step(step, number, device)
            result[name]["loss"].append(loss)
            if sent is not None:
                result[name]["sent"] = sent.bytes
            if number >= WARM_UP:
                result[name]["wall"].append(wall)
                result[name]["cpu"].append(cpu)
    return result


def time_step(step: Step, number: int, device: torch.device) -> tuple[float, float, float]:
    """The loss, and the seconds of wall and CPU time. Ranks begin together; on the CPU, the last one ends the step."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    if on_cuda:
        begin.record()
    loss = step(number)
    if on_cuda:
        end.record()
        end.synchronize()
    cpu = time.process_time() - cpu
    if on_cuda:
        return loss, begin.elapsed_time(end) / 1000, cpu
    dist.barrier()
    return loss, time.perf_counter() - wall, cpu


def measure_peak(name: str, precision: str, sizes: dict[str, int]) -> int:
    """One rank's peak of a step, in bytes."""

    def make() -> Callable[[], float]:
        step, number = build(name, precision, sizes), iter(range(10))
        return lambda: step(next(number))

    return peak_of(make, zerolab.init())


# -- the report ------------------------------------------------------------------------------------------------------


def measure(ranks: int, rounds: int, precision: str, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """Measure what `--json` writes. Ratios are ours over the peer's: below 1, ours is faster or holds less."""
    sizes = sizes or SIZES["cuda" if ranks <= torch.cuda.device_count() else "cpu"]
    report = measure_times(ranks, rounds, precision, sizes)
    report["peak_bytes"] = peaks = measure_peaks(ranks, precision, sizes)
    for pair in report["pairs"]:
        pair["peak_ratio"] = peaks[pair["ours"]] / peaks[pair["peer"]]
    return report


def measure_times(ranks: int, rounds: int, precision: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Time all systems, in turn on the same ranks."""
    with zerolab.Ranks(ranks, threads=1, forked=True) as pool:
        everyone = pool.run(time_rounds, rounds, precision, sizes, timeout=3600, group_timeout=300)
    names = names_of(precision)
    wall = {name: [max(each) for each in zip(*(rank[name]["wall"] for rank in everyone))] for name in names}
    cpu = {name: [sum(each) for each in zip(*(rank[name]["cpu"] for rank in everyone))] for name in names}
    loss = {name: mean(loss for rank in everyone for loss in rank[name]["loss"][:COMPARED]) for name in names}
    sent = {name: mean_sent([rank[name]["sent"] for rank in everyone]) for name in names}
    pairs = []
    for ours, peer in pairs_of(precision):
        pair: dict[str, Any] = {"ours": ours, "peer": peer, "loss_ours": loss[ours], "loss_peer": loss[peer]}
        pair |= {"moved_ours": sent[ours], "moved_peer": sent[peer]}
        for kind, times in (("wall", wall), ("cpu", cpu)):
            ratios = [a / b for a, b in zip(times[ours], times[peer])]
            pair[f"{kind}_ratio"], pair[f"{kind}_interval"] = median(ratios), interval(ratios)
        above = [median(wall[name]) - median(wall[FLOOR]) for name in (ours, peer)]
        pair["above_floor_ratio"] = above[0] / above[1] if above[1] > 0 else None
        pairs.append(pair)
    report = {"ranks": ranks, "rounds": rounds, "precision": precision, "pairs": pairs}
    report["floor"] = {name: median([a / b for a, b in zip(wall[FLOOR], wall[name])]) for name in names[1:]}
    return report | {"step_seconds": {name: median(wall[name]) for name in names}}


def mean_sent(each: list[float | None]) -> float | None:
    """The mean over the ranks; None if a rank could not count."""
    counted = [sent for sent in each if sent is not None]
    return sum(counted) / len(counted) if len(counted) == len(each) else None


def measure_peaks(ranks: int, precision: str, sizes: dict[str, int]) -> dict[str, int]:
    """The peak of the rank that has most, for each system. Fresh processes keep other systems' memory out."""
    peaks = {}
    for name in names_of(precision):
        with zerolab.Ranks(ranks, threads=1, forked=True) as pool:
            peaks[name] = max(pool.run(measure_peak, name, precision, sizes, timeout=600))
    return peaks


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics, which assume nothing about the distribution."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, int(n / 2 - 0.98 * n**0.5))
    return ordered[low], ordered[n - 1 - low]


def run(ranks: int | None, rounds: int, precisions: list[str], json_file: str | None, plot_file: str | None) -> int:
    """Measure, print a table for each precision, write the files. Exit status: 1 if a pair did not do the same work.

    ranks: None for one on each GPU, or two if there are no GPUs.
    """
    import rich

    ranks = ranks or torch.cuda.device_count() or 2
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: skipped. To add it, in a checkout:")
        print("DS_BUILD_OPS=0 pip install --no-build-isolation -c constraints.txt -e '.[bench]'")
    elif "bf16" in precisions:
        print("DeepSpeed's stage 0 has no fp32 masters in bf16, so it would do different work: skipped there.")
    reports, wrong = [], 0
    for precision in precisions:
        reports.append(measure(ranks, rounds, precision))
        rich.print(table(reports[-1]))
        for pair in reports[-1]["pairs"]:
            if abs(pair["loss_ours"] / pair["loss_peer"] - 1) > SAME_LOSS[precision]:
                print(f"WRONG: {pair['ours']} begins with loss {pair['loss_ours']}, {pair['peer']} {pair['loss_peer']}")
                wrong = 1
        print(moved_line(reports[-1]))
    print("Below 1 ours is faster, or holds less. Wall and CPU: median of the rounds' ratios, [95 % interval].")
    print("Overhead: by how much a step is longer than one without communication, ours over the peer's; 0.50 is half.")
    if rounds < 40:
        print(f"{rounds} rounds are only a trial: use --rounds 40 or more before you compare.")
    if json_file:
        report = reports[0] | ({"reports": reports} if len(reports) > 1 else {})
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    if plot_file:
        from zerolab.lab.plots import step_times

        figure, sentence = step_times(reports)
        figure.savefig(plot_file, dpi=150)
        print(f"{plot_file}: {sentence}")
    return wrong


def moved_line(report: dict[str, Any]) -> str:
    """What each system sends in a step, and the floor as a fraction of each system's time."""
    from zerolab.measure.units import in_bytes

    moved: dict[str, float | None] = {}
    for pair in report["pairs"]:
        moved |= {pair["ours"]: pair["moved_ours"], pair["peer"]: pair["moved_peer"]}
    said = [f"{name} {'not counted' if sent is None else in_bytes(round(sent))}" for name, sent in moved.items()]
    floors = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in report["floor"].items())
    return f"Sent by a rank in a step, if in rings: {', '.join(said)}.\nThe floor is {floors}."


def table(report: dict[str, Any]) -> Any:
    """A table for rich with a line for each pair. The losses are ours; `run` reports a peer whose loss differs."""
    from zerolab.measure.units import table as new_table

    loss = ", ".join(f"{value:.4f}" for value in sorted({round(p["loss_ours"], 4) for p in report["pairs"]}))
    title = f"{report['ranks']} ranks, {report['precision']}, {report['rounds']} rounds; first {COMPARED} losses {loss}"
    result = new_table(title, ["ours : peer"], ["wall", "CPU", "overhead", "peak"])
    for pair in report["pairs"]:
        cells = []
        for kind in ("wall", "cpu"):
            low, high = pair[f"{kind}_interval"]
            cells.append(f"{pair[f'{kind}_ratio']:.3f} [{low:.2f} {high:.2f}]")
        above = pair["above_floor_ratio"]
        cells += ["-" if above is None else f"{above:.2f}", f"{pair['peak_ratio']:.3f}"]
        result.add_row(f"{pair['ours']} : {pair['peer'].removesuffix('Optimizer')}", *cells)
    return result
