"""Muon under every stage beside plain Muon in torch's DDP, where every rank keeps all state and does all the work.

    python -m zerolab.apps.muon                         # 2 ranks, 40 rounds
    python -m zerolab.apps.muon --ranks 4 --rounds 60

All systems are built on the same ranks and take one step each per round, in turn, as in `zerolab bench`: a GPT on text,
`torch.optim.Muon` for the matrices of its blocks and AdamW for the rest, in fp32. A round gives one ratio of wall
times per stage; their median counts, with its 95 % interval. One more system trains everything with AdamW, for the
losses. Let nothing else run meanwhile. Exit status: 1 if a stage's losses are not those of plain Muon, or if a rank
sent another number of bytes than the formula says.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._pytree import tree_leaves

import zerolab
from zerolab.apps.arguments import PROCESSES, whole
from zerolab.apps.bench import BATCH, SIZES, WARM_UP, interval, time_step
from zerolab.measure import ledger
from zerolab.measure.formulas import muon_bytes
from zerolab.measure.units import in_bytes
from zerolab.measure.units import table as new_table
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

PLAIN, ADAMW = "torch DDP", "torch DDP, AdamW"
STAGES = tuple(cls.__name__ for cls in zerolab.STAGES)
NAMES = (PLAIN, *STAGES, ADAMW)
MUON_RATE, ADAMW_RATE = 0.02, 1e-3  # Muon's is of its update's spectral norm, so it is larger
SAME_LOSS = 1e-3  # relative: torch's DDP adds gradients in another order, and Muon works in bf16


class System:
    """One way to train, on this rank."""

    def __init__(self, name: str, sizes: dict[str, int]) -> None:
        self.device = zerolab.init()
        torch.manual_seed(0)
        gpt = GPT(**sizes).to(self.device)
        self.context, self.data = gpt.context, text()
        self.zero: Any = None
        self.model: nn.Module = gpt
        wrap: Callable[..., Optimizer] = lambda params, cls, **defaults: cls(params, **defaults)  # noqa: E731
        if name in STAGES:
            self.zero = getattr(zerolab, name)(gpt, units=[Block])
            wrap = zerolab.OwnerOptimizer
        else:
            self.model = nn.parallel.DistributedDataParallel(gpt)
        matrices = [] if name == ADAMW else [p for p in gpt.blocks.parameters() if p.dim() == 2]
        taken = {id(p) for p in matrices}
        self.optimizers: list[Optimizer] = [AdamW([p for p in gpt.parameters() if id(p) not in taken], lr=ADAMW_RATE)]
        if matrices:
            self.optimizers.insert(0, wrap(matrices, Muon, lr=MUON_RATE))

    def step(self, number: int) -> float:
        x, y = batch(self.data, dist.get_rank(), number, BATCH[self.device.type], self.context)
        loss: Tensor = self.model(x.to(self.device), y.to(self.device))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def state_bytes(self) -> int:
        """What Muon keeps on this rank."""
        return sum(value.nbytes for value in tree_leaves(dict(self.optimizers[0].state)) if isinstance(value, Tensor))


def on_a_rank(rounds: int, sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Numbers of each system: "wall", "cpu" of every round, "loss" of every step, "state", "sent", "formula".

    sent: bytes in the turn of Muon alone, from the ledger.
    """
    systems = {name: System(name, sizes) for name in NAMES}
    result: dict[str, dict[str, Any]] = {name: {"wall": [], "cpu": [], "loss": []} for name in NAMES}
    for number in range(WARM_UP + rounds):
        for name, system in systems.items():
            loss, wall, cpu = time_step(system.step, number, system.device)
            result[name]["loss"].append(loss)
            if number >= WARM_UP:
                result[name]["wall"].append(wall)
                result[name]["cpu"].append(cpu)
    for name, system in systems.items():
        result[name]["state"] = system.state_bytes()
        if system.zero is not None:
            with ledger(system.zero) as book:
                system.step(WARM_UP + rounds)
            everything = sum(call.sent for call in book.calls if call.phase == "step" and not call.control)
            result[name] |= {"sent": everything, "formula": system.optimizers[0].moved_bytes()}  # type: ignore[attr-defined]
    return result


def measure(ranks: int, rounds: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """What `--json` writes. Ratios are ours over plain Muon's in torch's DDP."""
    sizes = sizes or SIZES["cuda" if ranks <= torch.cuda.device_count() else "cpu"]
    with zerolab.Ranks(ranks, threads=1, forked=True) as pool:
        everyone = pool.run(on_a_rank, rounds, sizes, timeout=3600, group_timeout=300)
    wall = {name: [max(each) for each in zip(*(rank[name]["wall"] for rank in everyone))] for name in NAMES}
    cpu = {name: [sum(each) for each in zip(*(rank[name]["cpu"] for rank in everyone))] for name in NAMES}
    rows = {}
    for name in NAMES:
        ratios = [ours / plain for ours, plain in zip(wall[name], wall[PLAIN])]
        losses = [mean(each) for each in zip(*(rank[name]["loss"] for rank in everyone))]
        rows[name] = {
            "seconds": median(wall[name]),
            "ratio": median(ratios),
            "interval": interval(ratios),
            "cpu_ratio": median(ours / plain for ours, plain in zip(cpu[name], cpu[PLAIN])),
            "state": max(rank[name]["state"] for rank in everyone),
            "losses": losses,
            "sent": [rank[name].get("sent") for rank in everyone],
            "formula": [rank[name].get("formula") for rank in everyone],
        }
    return {"ranks": ranks, "rounds": rounds, "sizes": sizes, "systems": rows}


def problems(report: dict[str, Any]) -> list[str]:
    """What is not as promised, apart from times."""
    rows, found = report["systems"], []
    for name in STAGES:
        ours, plain = (mean(rows[which]["losses"][:10]) for which in (name, PLAIN))
        if abs(ours / plain - 1) > SAME_LOSS:
            found.append(f"{name}'s first losses are {ours:.5f} on average, plain Muon's {plain:.5f}")
        if rows[name]["sent"] != rows[name]["formula"]:
            found.append(
                f"{name}'s ranks sent {rows[name]['sent']} bytes for Muon, the formula says {rows[name]['formula']}"
            )
    return found


def table(report: dict[str, Any]) -> Any:
    title = f"{report['ranks']} ranks, {report['rounds']} rounds: Muon under every stage, beside torch's DDP"
    result = new_table(title, ["system"], ["ms", "wall", "CPU", "state", "sent", "loss"])
    for name, row in report["systems"].items():
        low, high = row["interval"]
        sent = "-" if row["sent"][0] is None else in_bytes(max(row["sent"]))
        state = "-" if name == ADAMW else in_bytes(row["state"])
        ratio = f"{row['ratio']:.3f} [{low:.2f} {high:.2f}]"
        cells = [f"{row['seconds'] * 1000:.0f}", ratio, f"{row['cpu_ratio']:.3f}", state, sent]
        result.add_row(name, *cells, f"{mean(row['losses'][-10:]):.3f}")
    return result


def other_ways(report: dict[str, Any]) -> Any:
    """By formula, for the same matrices, beside what ours sent in stage 3."""
    with torch.device("meta"):
        model = GPT(**report["sizes"])
    shapes = [(p.shape[0], p.shape[1]) for p in model.blocks.parameters() if p.dim() == 2]
    result = new_table("Other ways, by formula", ["way"], ["state", "sent"])
    for way, sizes in muon_bytes(report["ranks"], shapes).items():
        result.add_row(way, *map(in_bytes, sizes))
    ours = report["systems"]["Zero3"]
    result.add_row("owners, measured", in_bytes(ours["state"]), in_bytes(max(ours["sent"])))
    return result


def main(arguments: list[str] | None = None) -> int:
    import rich

    parser = argparse.ArgumentParser(prog="python -m zerolab.apps.muon", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=PROCESSES, default=2, help="processes to start (default 2)")
    parser.add_argument("--rounds", type=whole(4), default=40, help="measured steps of each system (default 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    args = parser.parse_args(arguments)
    report = measure(args.ranks, args.rounds)
    rich.print(table(report))
    steps = len(report["systems"][PLAIN]["losses"])
    print("Wall, CPU: median of the rounds' ratios to torch DDP; below 1 ours is faster. CPU: the sum over the ranks.")
    print("State, sent: Muon's alone, of the rank that has most.", end=" ")
    print(f"Loss: the mean of steps {max(1, steps - 9)} to {steps}, over the ranks.")
    rich.print(other_ways(report))
    print("Even slices are assumed; owners have less to send, because they own what lies mostly on them.")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    found = problems(report)
    for problem in found:
        print(f"WRONG: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
