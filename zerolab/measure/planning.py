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
    bytes_per_parameter,
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

    fits: whether states and activations fit in the memory. largest: parameters of the largest model whose states fit
    beside the same activations. Both are None if no memory was given.
    """

    stage: int
    states: dict[str, int]
    activations: int
    moved: int
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
) -> list[Row]:
    """One row per stage. memory, activations: bytes per rank. precision, optimizer: see PRECISIONS, OPTIMIZERS.

    With "muon", all parameters are counted as if `OwnerOptimizer` updated them with Muon; the usual recipe leaves
    embeddings, norms and heads to Adam, at 8 bytes each instead of 4.

    Not counted: gathered parameters and buckets in the middle of a step (about two units, see `simulate`), and what
    the framework takes for itself (about 1 GB on a GPU).

    Raises ValueError for an unknown name, for sizes below 1, and if activations leave no memory.
    """
    settings, kept = _choose("precision", precision, PRECISIONS), _choose("optimizer", optimizer, OPTIMIZERS)
    for name, value in (("parameters", parameters), ("ranks", ranks)):
        if not value >= 1:
            raise ValueError(f"{name} must be 1 or more, not {value:g}")
    if activations < 0 or (memory is not None and memory <= activations):
        raise ValueError(f"activations of {in_bytes(activations)} leave nothing of {in_bytes(memory or 0)} per GPU")
    owned = optimizer in OWNED
    rows = []
    for stage in range(len(STAGES)):
        states = state_bytes(stage, ranks, round(parameters), settings, optimizer_bytes=kept, owned=owned)
        moved = moved_bytes(stage, ranks, round(parameters), precision=settings)
        if owned:
            moved += round(owner_moved_bytes(stage, ranks, round(parameters)))
        row = Row(stage, states, round(activations), moved)
        if memory is not None:
            row.fits = row.total <= memory
            each = bytes_per_parameter(stage, ranks, settings, optimizer_bytes=kept, owned=owned)
            row.largest = int((memory - activations) / each)
        rows.append(row)
    return rows


def table(rows: list[Row], title: str) -> Table:
    """A table for rich, one line per stage."""
    with_memory = rows[0].fits is not None
    if rows[0].activations:
        title += f"\ntotal includes activations of {in_bytes(rows[0].activations)}"
    names = [*CATEGORIES, "total", "sent", *(["fits", "largest"] if with_memory else [])]
    result = new_table(title, ["stage"], names)
    for row in rows:
        cells = [in_bytes(size) for size in (*row.states.values(), row.total, row.moved)]
        if row.largest is not None:
            cells += ["yes" if row.fits else "no", in_parameters(row.largest)]
        result.add_row(f"{row.stage} {STAGES[row.stage]}", *cells)
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
        if 1 <= value < 1e18:
            return value
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a number of parameters; write 7.5e9, 7.5B, 124M or 1T")


def _choose(what: str, name: str, choices: Mapping[str, Choice]) -> Choice:
    if name not in choices:
        raise ValueError(f"unknown {what} {name!r}: choose from {', '.join(choices)}")
    return choices[name]
