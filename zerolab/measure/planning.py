"""What will fit: the formulas of all stages side by side, for a run that has not begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from zerolab.engine.precision import KEEP, Precision
from zerolab.measure.formulas import (
    ADAM_BYTES,
    CATEGORIES,
    MUON_BYTES,
    between_bytes,
    bytes_per_parameter,
    host_state_bytes,
    moved_bytes,
    owner_moved_bytes,
    state_bytes,
)
from zerolab.measure.units import in_bytes
from zerolab.measure.units import table as new_table

if TYPE_CHECKING:
    from rich.table import Table

STAGES = ("DDP", "Zero1", "Zero2", "Zero3")
PRECISIONS = {"fp32": KEEP, "bf16": Precision(torch.bfloat16)}
OPTIMIZERS = {"adam": ADAM_BYTES, "momentum": 4, "sgd": 0, "muon": MUON_BYTES}  # bytes of state per parameter
OWNED = {"muon"}  # in `OwnerOptimizer`: the state is shared out in every stage, and more is sent

Choice = TypeVar("Choice")


@dataclass
class Row:
    """One stage. Bytes per rank: `states` by category when backward returns, `moved` what it sends in a step.

    host: what offload keeps in the host's memory. between: sent to other replicas; `moved` then stays inside its own.
    fits: whether states and activations fit in the memory. largest: parameters of the largest model whose states fit
    beside the same activations. Both are None if no memory was given.
    """

    stage: int
    states: dict[str, int]
    activations: int
    moved: int
    host: int = 0
    between: int = 0
    fits: bool | None = None
    largest: int | None = None

    @property
    def total(self) -> int:
        return sum(self.states.values()) + self.activations


def plan(
    parameters: float,
    ranks: int,
    memory: float | None = None,
    precision: str = "bf16",
    optimizer: str = "adam",
    activations: float = 0,
    offload: bool = False,
    replicas: int = 1,
) -> list[Row]:
    """One row per stage. memory, activations: bytes per rank. precision, optimizer: see PRECISIONS, OPTIMIZERS.

    offload: masters, gradients and the optimizer's state stay on the host; there is no row for stage 0, which has no
    offload. replicas: the ranks form `mesh=(replicas, ranks / replicas)` and share a model's states inside a replica;
    stage 0 has nothing to shard, and stays one group.

    With "muon", all parameters are counted as if `OwnerOptimizer` updated them with Muon; the usual recipe leaves
    embeddings, norms and heads to Adam, at 8 bytes each instead of 4.

    Not counted: gathered parameters and buckets in the middle of a step (about two units, see `simulate`), and what
    the framework takes for itself (about 1 GB on a GPU).

    Raises ValueError for an unknown name, for sizes below 1, if replicas do not divide the ranks, if activations leave
    no memory, and for offload with Muon, whose owners need whole matrices on the device.
    """
    settings, kept = _choose("precision", precision, PRECISIONS), _choose("optimizer", optimizer, OPTIMIZERS)
    for name, value in (("parameters", parameters), ("ranks", ranks), ("replicas", replicas)):
        if not value >= 1:
            raise ValueError(f"{name} must be 1 or more, not {value:g}")
    if ranks % replicas:
        raise ValueError(f"{replicas} replicas do not divide {ranks} ranks")
    if activations < 0 or (memory is not None and memory <= activations):
        raise ValueError(f"activations of {in_bytes(activations)} leave nothing of {in_bytes(memory or 0)} per GPU")
    owned, count = optimizer in OWNED, round(parameters)
    if owned and offload:
        raise ValueError("Muon does not go with offload: it needs whole matrices on the device")
    rows = []
    for stage in range(1 if offload else 0, len(STAGES)):
        size = ranks // replicas if stage else ranks
        each = bytes_per_parameter(stage, size, settings, optimizer_bytes=kept, offload=offload, owned=owned)
        row = Row(
            stage,
            state_bytes(stage, size, count, settings, optimizer_bytes=kept, offload=offload, owned=owned),
            round(activations),
            moved_bytes(stage, size, count, precision=settings),
        )
        if owned:
            row.moved += round(owner_moved_bytes(stage, size, count))
        if offload:
            row.host = sum(host_state_bytes(size, count, settings, optimizer_bytes=kept).values())
        if stage:
            row.between = between_bytes((replicas, size), count, settings)
        if memory is not None:
            row.fits = row.total <= memory
            row.largest = int((memory - activations) / each)
        rows.append(row)
    return rows


def table(rows: list[Row], title: str) -> Table:
    """A table for rich, one column per stage."""
    lines: dict[str, list[float]] = {name: [row.states[name] for row in rows] for name in CATEGORIES}
    lines["activations"] = [row.activations for row in rows]
    lines["total"] = [row.total for row in rows]
    lines["on the host"] = [row.host for row in rows]
    lines["sent"] = [row.moved for row in rows]
    lines["sent between replicas"] = [row.between for row in rows]
    result = new_table(title, ["bytes per rank"], [f"{row.stage} {STAGES[row.stage]}" for row in rows])
    for name, sizes in lines.items():
        if name in (*CATEGORIES, "total", "sent") or any(sizes):
            result.add_row(name, *map(in_bytes, sizes))
    if rows[0].largest is not None:
        result.add_row("fits", *("yes" if row.fits else "no" for row in rows))
        result.add_row("largest model", *(in_parameters(row.largest or 0) for row in rows))
    return result


def in_parameters(count: float) -> str:
    """Three digits and a letter: 7.50B, 128B, 1.00T."""
    return in_bytes(count).removesuffix("B").replace("G", "B").replace(" ", "")


def read_parameters(text: str) -> float:
    """The number in "7.5e9", "7.5B", "124M" or "1T". Raises ValueError for anything else."""
    letters = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    scale = letters.get(text[-1:].upper(), 1)
    try:
        value = float(text if scale == 1 else text[:-1]) * scale
    except ValueError:
        value = 0
    if scale == 1 and 0 < value < 1e18 and not value.is_integer():
        raise ValueError(f"{text} is {text} parameters: do you mean {text}B or {text}M?")
    if 1 <= value < 1e18:
        return value
    raise ValueError(f"{text!r} is not a number of parameters; write 7.5e9, 7.5B, 124M or 1T")


def _choose(what: str, name: str, choices: Mapping[str, Choice]) -> Choice:
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}: choose from {', '.join(choices)}")
    return choices[name]
