"""How lesson 12 shows what it has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from zerolab.lab.plots.against import tradeoff
from zerolab.lab.plots.bars import stacks

Picture = tuple[Figure, str]
Moved = Mapping[str, float]


def seven_steps_beside_zero1(seven: Sequence[Moved], zero1: Moved) -> Picture:
    """The bytes that each rank of the seven steps moved, by what they are, and a rank of ZeRO-1."""
    of = {"seven steps,\nrank 0": seven[0], "seven steps,\nrank 1": seven[1], "ZeRO-1,\nevery rank": zero1}
    bars = {name: {kind: bytes_ / 1e6 for kind, bytes_ in moved.items()} for name, moved in of.items()}
    return stacks(bars, "Sent and received in a step", "Ranks 1 to 3 of the seven steps are alike", "MB")


def bytes_against_loss(table: Mapping[str, tuple[float, float]]) -> Picture:
    """`table[name]`: bytes sent per rank and step, and the loss. Prints them, too."""
    for name, (sent, loss) in table.items():
        print(f"{name:20} {sent:>10,.0f} bytes sent per rank and step, loss {loss:.3f}")
    exact, few, forgetful = (table[name] for name in ("float32", "top 1 %, residual", "top 1 %, forgetful"))
    said = (
        f"Top 1 % with a residual sends {exact[0] / few[0]:.0f} times less than float32 and ends at {few[1]:.2f}, not "
        f"{exact[1]:.2f}; without the residual at {forgetful[1]:.2f}."
    )
    names = "Bytes against loss", "One model, one text, 4 ranks; the dashed rule is float32"
    axes = "bytes sent per rank and step", "loss after 50 steps"
    return tradeoff(table, *names, axes, said, "float32", in_bytes_per_step=True)


def updates_of_workers(run: Mapping[str, Any]) -> None:
    """Prints what each worker did in a run of `asynchronous`."""
    for worker, (ages, pushed) in enumerate(zip(run["ages"], run["pushed"], strict=True)):
        if ages:
            late = sum(ages) / len(ages)
            print(f"worker {worker}: {pushed:2} updates, its gradients {late:4.1f} updates old on average")


def staleness_against_loss(cases: Mapping[str, tuple[int, int]], losses: Sequence[float]) -> Picture:
    """The loss of each case; the first number of a case is how many updates old its gradients are."""
    said = "; ".join(f"{name}: {loss:.2f}" for name, loss in zip(cases, losses, strict=True))
    return tradeoff(
        {name: (age, loss) for (name, (age, _)), loss in zip(cases.items(), losses, strict=True)},
        "Staleness against loss",
        "The same 120 micro-batches everywhere",
        ("updates that a gradient is old when it is applied", "loss on other text"),
        f"Loss after 120 gradients: {said}.",
        next(iter(cases)),
    )


def inside_and_between(flat: Mapping[str, Any], meshed: Mapping[str, Any]) -> None:
    """Prints what a rank holds and sends in ZeRO-3 on two nodes of two, without a mesh and with one."""
    sent = sum(flat["sent"].values())
    between = sum(bytes_ for name, bytes_ in meshed["sent"].items() if "between" in name)
    inside = sum(meshed["sent"].values()) - between
    print(f"flat: {flat['shard']:,} elements held, {sent:,} bytes sent round the ring of 4")
    print(f"mesh: {meshed['shard']:,} elements held, {inside:,} bytes sent inside the node, {between:,} between nodes")
    out = f"{sent:,} bytes (flat), {2 * between:,} (mesh)"
    print(f"out of a node, by one rank or by both: {out}, {sent / (2 * between):.2f} times less")
