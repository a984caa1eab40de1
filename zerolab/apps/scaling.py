"""`zerolab scaling`: how a step's time and bytes grow with units, parameters and ranks, and the engine's share of it.

To find the engine's share, a model runs once sharded and once plain, in one process on one thread, with torch's fake
process group, which has ranks but moves nothing. The extra CPU time of the sharded model, less the time inside torch's
collectives, is the engine: its Python and the copies that it makes. The minimum of several rounds counts. (Collectives
are called as on NCCL, one call each, so the sums of gloo's reduce-scatter are not included.)

A second table puts FSDP2 beside the stages: what each adds to a plain step on the host, collectives' calls included,
for 12 small transformer blocks on 64 ranks of the same kind. On a GPU the host has to be done before the device is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.comm.recording import Observer, observers
from zerolab.measure import ledger, simulate
from zerolab.tasks.models import Block

STAGES = (0, 1, 2, 3)
FAKE_RANKS, ROUNDS, WARM_UP = 8, 15, 3
HOST_RANKS, HOST_BLOCKS, HOST_WIDTH, HOST_ROUNDS = 64, 12, 64, 40
PLAIN, FSDP2 = "plain", "FSDP2"
TARGET = 100e-6  # seconds that the engine may take, per unit and direction
UNITS, WIDTH = (1, 4, 16, 64), 64  # tiny units on real ranks: 4,160 parameters each
WIDTHS = (32, 64, 128, 256, 512)  # of four units: 4 thousand to a million parameters
RANKS_WIDTH = 256  # of eight units on 1 to 1,024 ranks: large enough that padding stays small
RANKS, BIG_CLUSTERS = (1, 2, 4, 8), (1, 2, 4, 8, 64, 256, 1024)
PARTS = ("forward", "backward", "step")


class Link(nn.Module):
    """One layer: the smallest unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    """Several units of a kind in sequence."""

    def __init__(self, units: int, kind: str, width: int) -> None:
        super().__init__()
        make = {"link": lambda: Link(width), "block": lambda: Block(width, 2)}[kind]
        self.units = nn.ModuleList(make() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.sum()


KINDS: dict[str, type[nn.Module]] = {"link": Link, "block": Block}


def sharded(stage: int, units: int, kind: str, width: int) -> tuple[Chain, zerolab.Engine]:
    model = Chain(units, kind, width)
    return model, zerolab.shard(model, stage, units=[KINDS[kind]])


# -- the engine's own time -------------------------------------------------------------------------------------------


def engine_cost(kind: str, stage: int, counts: Sequence[int] = (8, 32, 128), rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds that the engine adds to a step of this many units, and what that makes per unit.

    {"units": counts, "forward": seconds for each count, ..., "per_unit": {"forward": seconds, ...}, "per_step": the
    rest, "linear": {"forward": a unit's cost between the last two counts over its cost between the first two, ...}}
    """
    result: dict[str, Any] = {"kind": kind, "stage": stage, "units": list(counts), **{part: [] for part in PARTS}}
    result["collectives"] = []
    with fake_ranks(FAKE_RANKS), collectives_timed() as spent:
        for count in counts:
            plain, model = Chain(count, kind, 8), sharded(stage, count, kind, 8)[0]
            best = [least(plain, spent, rounds), least(model, spent, rounds)]
            for part in PARTS:
                result[part].append(best[1][part] - best[0][part])
            result["collectives"].append(best[1]["collectives"])
    result["per_unit"] = {part: slope(counts, result[part]) for part in PARTS}
    result["per_step"] = {part: result[part][0] - counts[0] * result["per_unit"][part] for part in PARTS}
    result["linear"] = {
        part: slope(counts[-2:], result[part][-2:]) / slope(counts[:2], result[part][:2]) for part in PARTS[:2]
    }
    return result


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return (y[-1] - y[0]) / (x[-1] - x[0])


def least(model: nn.Module, spent: _Stopwatch, rounds: int) -> dict[str, float]:
    """CPU seconds of each part of a step, without the collectives: the minimum of `rounds`."""
    x = torch.randn(1, 2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss: list[Tensor] = []
    actions: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss.append(model(x)),
        "backward": lambda: loss.pop().backward(),
        "step": optimizer.step,
    }
    best = dict.fromkeys([*PARTS, "collectives"], float("inf"))
    for number in range(WARM_UP + rounds):
        collectives = 0.0
        for part, action in actions.items():
            spent.seconds, begin = 0.0, time.process_time()
            action()
            seconds = time.process_time() - begin - spent.seconds
            collectives += spent.seconds
            if number >= WARM_UP:
                best[part] = min(best[part], seconds)
        optimizer.zero_grad()
        if number >= WARM_UP:
            best["collectives"] = min(best["collectives"], collectives)
    return best


def host_cost(rounds: int = HOST_ROUNDS) -> dict[str, dict[str, float]]:
    """Seconds of the host that each stage and FSDP2 add to a step of a plain model: {"stage 2": {"forward": ...}, ...}.

    CPU time of this process, the median of `rounds` in which all take a step in turn. PLAIN's own are beside them.
    """
    from torch.distributed.fsdp import fully_shard

    names = {f"stage {stage}": stage for stage in STAGES}
    times: dict[str, dict[str, list[float]]] = {}
    with fake_ranks(HOST_RANKS):
        systems: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for name in (PLAIN, *names, FSDP2):
            model: nn.Module = Chain(HOST_BLOCKS, "block", HOST_WIDTH)
            if name == FSDP2:
                for unit in model.units:  # type: ignore[union-attr]
                    fully_shard(unit)
                fully_shard(model)
            elif name in names:
                zerolab.shard(model, names[name], units=[Block])
            systems[name] = model, torch.optim.AdamW(model.parameters(), lr=0.0)
            times[name] = {part: [] for part in PARTS}
        x = torch.randn(1, 16, HOST_WIDTH)
        for number in range(WARM_UP + rounds):
            for name, (model, optimizer) in systems.items():
                seconds = parts_of_a_step(model, optimizer, x)
                if number >= WARM_UP:
                    for part in PARTS:
                        times[name][part].append(seconds[part])
    result = {PLAIN: {part: median(times[PLAIN][part]) for part in PARTS}}
    for name in (*names, FSDP2):
        pairs = {part: zip(times[name][part], times[PLAIN][part], strict=True) for part in PARTS}
        result[name] = {part: median(one - plain for one, plain in pairs[part]) for part in PARTS}
    return result


def parts_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, float]:
    """CPU seconds of this process in each part."""
    moments = [time.process_time()]
    loss = model(x)
    moments.append(time.process_time())
    loss.backward()
    moments.append(time.process_time())
    optimizer.step()
    moments.append(time.process_time())
    optimizer.zero_grad()
    return {part: end - begin for part, begin, end in zip(PARTS, moments[:-1], moments[1:], strict=True)}


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Make this process rank 0 of `count` ranks that do not exist, on one thread."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("the engine's own cost can only be measured in a process without a process group")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


class _Stopwatch(Observer):
    """`seconds`: CPU time inside the functions of torch that the engine calls for its collectives."""

    seconds = 0.0
    _begin = 0.0

    def before(self, op: str, payload: int, size: int) -> float:
        self._begin = time.process_time()
        return 0.0

    def after(self) -> None:
        self.seconds += time.process_time() - self._begin


@contextmanager
def collectives_timed() -> Iterator[_Stopwatch]:
    spent = _Stopwatch()
    observers.append(spent)
    try:
        yield spent
    finally:
        observers.remove(spent)


# -- on real ranks, and on simulated ones ----------------------------------------------------------------------------


def time_cases(cases: list[tuple[int, int, int]], rounds: int = ROUNDS) -> list[dict[str, float]]:
    """On every rank, for each (stage, units, width): {"seconds": of a step, "floor": of a plain step, "sent": bytes}.

    Seconds are the minimum of `rounds`, sharded and plain in turn. The plain model does not communicate.
    """
    results = []
    for stage, units, width in cases:
        plain = Chain(units, "link", width)
        model, zero = sharded(stage, units, "link", width)
        steps = [stepper(plain, width), stepper(model, width)]
        best = [float("inf"), float("inf")]
        for number in range(WARM_UP + rounds):
            for k, step in enumerate(steps):
                dist.barrier()
                begin = time.perf_counter()
                step()
                if number >= WARM_UP:
                    best[k] = min(best[k], time.perf_counter() - begin)
        with ledger(zero) as book:
            steps[1]()
        results.append({"seconds": best[1], "floor": best[0], "sent": book.moved})
    return results


def stepper(model: nn.Module, width: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, width)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_on_ranks(pool: zerolab.Ranks, ranks: int, cases: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """For each case, the slowest rank's seconds and the first rank's bytes."""
    everyone = pool.run(time_cases, cases, ranks=ranks, timeout=600)
    rows = []
    for number, (stage, units, width) in enumerate(cases):
        mine = [rank[number] for rank in everyone]
        row = {"stage": stage, "ranks": ranks, "units": units, "parameters": units * (width * width + width)}
        row |= {key: max(each[key] for each in mine) for key in ("seconds", "floor")}
        rows.append(row | {"sent": mine[0]["sent"]})
    return rows


def simulate_bytes(stage: int, ranks: int, units: int, width: int) -> int:
    """Bytes that rank 0 sends in a step, simulated."""
    simulation = simulate(
        lambda: Chain(units, "link", width), stage, ranks, inputs=lambda: (torch.empty(8, width),), units=[Link]
    )
    return simulation.ledger.moved


# -- the report ------------------------------------------------------------------------------------------------------


def measure(
    ranks: Sequence[int] = RANKS, big: Sequence[int] = BIG_CLUSTERS, counts: Sequence[int] = (8, 32, 128)
) -> dict[str, Any]:
    """Measure everything that `--json` writes. Times are on two ranks if allowed, bytes on each number of ranks."""
    few = min(2, max(ranks))
    report: dict[str, Any] = {"target_seconds_per_unit": TARGET}
    report["engine"] = [engine_cost(kind, stage, counts) for kind in KINDS for stage in STAGES]
    report["host"] = host_cost()
    with zerolab.Ranks(max(ranks), threads=1, forked=True) as pool:
        report["units"] = measure_on_ranks(pool, few, [(stage, n, WIDTH) for stage in STAGES for n in UNITS])
        report["parameters"] = measure_on_ranks(pool, few, [(stage, 4, width) for stage in STAGES for width in WIDTHS])
        report["ranks"] = []
        for n in ranks:
            report["ranks"] += measure_on_ranks(pool, n, [(stage, 8, RANKS_WIDTH) for stage in STAGES])
    report["simulated"] = [
        {"stage": stage, "ranks": n, "sent": simulate_bytes(stage, n, 8, RANKS_WIDTH)} for stage in STAGES for n in big
    ]
    return report


def problems_of(report: dict[str, Any]) -> list[str]:
    """A line for each real step that did not send the simulated number of bytes, which should never happen."""
    simulated = {(row["stage"], row["ranks"]): row["sent"] for row in report["simulated"]}
    found = []
    for row in report["ranks"]:
        expected = simulated.get((row["stage"], row["ranks"]), row["sent"])
        if row["sent"] != expected:
            found.append(f"stage {row['stage']}, {row['ranks']} ranks: {row['sent']} bytes, simulated {expected}")
    return found


def run(json_file: str | None, plot_file: str | None) -> int:
    """Measure, print, and write the files. Exit status: 1 if the bytes are not as simulated."""
    import rich

    report = measure()
    rich.print(engine_table(report))
    print(
        "Without collectives. Linear: a unit's cost from 32 to 128 units over its cost from 8 to 32, both directions."
    )
    rich.print(host_table(report))
    from zerolab.lab import plots

    figure, sentence = plots.scaling(report)
    print(sentence)
    problems = problems_of(report)
    for problem in problems:
        print(f"WRONG: {problem}")
    if json_file:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    if plot_file:
        figure.savefig(plot_file, dpi=150)
    return 1 if problems else 0


def host_table(report: dict[str, Any]) -> Any:
    """What sharding adds to a step on the host, beside FSDP2, as a table for rich."""
    from zerolab.measure.units import table as new_table

    title = f"Milliseconds of the host: {HOST_BLOCKS} blocks of width {HOST_WIDTH}, {HOST_RANKS} ranks (fake)"
    result = new_table(title, ["added to a plain step by"], [*PARTS, "together", "of FSDP2's"])
    theirs = sum(report["host"][FSDP2].values())
    for name, seconds in report["host"].items():
        together = sum(seconds.values())
        ratio = "-" if name == PLAIN else f"{together / theirs:.2f}"
        label = "(the plain step itself)" if name == PLAIN else name
        result.add_row(label, *(f"{1e3 * seconds[part]:.1f}" for part in PARTS), f"{1e3 * together:.1f}", ratio)
    return result


def engine_table(report: dict[str, Any]) -> Any:
    """What a unit costs in each direction, as a table for rich."""
    from zerolab.measure.units import table as new_table

    result = new_table("The engine's own microseconds per unit", ["unit", "stage"], [*PARTS, "linear"])
    names = {"link": "one layer, 2 parameters", "block": "transformer block, 12"}
    for row in report["engine"]:
        cells = [f"{1e6 * row['per_unit'][part]:.0f}" for part in PARTS]
        linear = " ".join(f"{row['linear'][part]:.2f}" for part in PARTS[:2])
        result.add_row(names[row["kind"]], str(row["stage"]), *cells, linear)
    return result
