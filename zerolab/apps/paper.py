"""`zerolab simulate`: reproduces the paper's Figure 1 and Table 1 by running this engine as one rank of its cluster.

Source of the values: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Decimal gigabytes of model states per device, mixed precision with Adam. Some values of the table are
cut where others are rounded.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import rich
from tqdm import tqdm

from zerolab.measure.paper import FIGURE_1, PARAMETERS, SIZES, TABLE_1, simulate_gpt
from zerolab.measure.units import in_bytes
from zerolab.measure.units import table as new_table


class Cell(NamedTuple):
    """One value of the paper."""

    model: str
    ranks: int
    stage: int
    paper_gb: float


def figure_1() -> list[Cell]:
    return [Cell("7.5B", 64, stage, value) for stage, value in enumerate(FIGURE_1)]


def table_1() -> list[Cell]:
    return [
        Cell(model, ranks, stage, value)
        for ranks, row in TABLE_1.items()
        for model, values in zip(SIZES, row, strict=True)
        for stage, value in zip((1, 2, 3), values, strict=True)
    ]


def expected_gb(cell: Cell) -> float:
    """What this engine should hold: the paper's value; in stage 3 14Ψ/N, as it keeps no 16-bit copy of its slices."""
    return 14 * PARAMETERS[cell.model] / cell.ranks / 1e9 if cell.stage == 3 else cell.paper_gb


def reproduce(cell: Cell) -> dict[str, Any]:
    """Run the cell. All values are gigabytes per rank: `engine_gb` is the model states when backward returns, `peak_gb`
    the peak of the step (one sequence, no checkpointing), `moved_gb_per_step` what a ring sends."""
    result = simulate_gpt(*SIZES[cell.model], cell.stage, cell.ranks)
    return {
        **cell._asdict(),
        "expected_gb": expected_gb(cell),
        "engine_gb": sum(result.states.values()) / 1e9,
        "peak_gb": result.timeline.peak / 1e9,
        "moved_gb_per_step": result.ledger.moved / 1e9,
    }


def show_cells(cells: list[Cell], path: str | None, picture: str | None = None) -> int:
    """Run the cells, print the table, write `path` and `picture` if given. Exit status: 1 if a value is wrong."""
    results = []
    for result in tqdm(reproduce_all(cells), total=len(cells), unit="cell", disable=None):
        results.append(result)
        if path:
            write_json(path, {"cells": results})
    columns = ["stage", "paper", "expected", "engine", "ratio", "peak", "sent"]
    table = new_table("GB per rank, bf16 with Adam", ["model", "ranks"], columns)
    wrong = 0
    for result in results:
        ratio = result["engine_gb"] / result["expected_gb"]
        wrong += abs(ratio - 1) > 0.01
        sizes = [result[key] for key in ("paper_gb", "expected_gb", "engine_gb")]
        transients = [result["peak_gb"], result["moved_gb_per_step"]]
        table.add_row(
            result["model"],
            str(result["ranks"]),
            str(result["stage"]),
            *map(gigabytes, sizes),
            f"{ratio:.4f}",
            *map(gigabytes, transients),
        )
    rich.print(table)
    tell(
        f"{len(results) - wrong} of {len(results)} engine values are within 1 % of the expected ones: the paper's or, "
        "in stage 3, 14Ψ/N, because there each gather makes a fresh 16-bit copy of a slice and none is kept."
    )
    tell(
        "paper, expected, engine: model states when backward returns. peak: of the step, on one sequence of 1,024 "
        "tokens, without checkpointing. sent: per step, by a ring."
    )
    if picture:
        from zerolab.lab.plots import to_a_trillion

        draw(picture, to_a_trillion(results))
    return 1 if wrong else 0


def show_model(model: str, stage: int, ranks: int, path: str | None, picture: str | None = None) -> int:
    """Simulate one model and say what its peak is made of."""
    if sys.stderr.isatty():
        print(f"one step of {model} parameters, without memory; large models take half a minute ...", file=sys.stderr)
    result = simulate_gpt(*SIZES[model], stage, ranks)
    line = result.timeline
    states = sum(result.states.values())
    title = f"{model} parameters, stage {stage}, rank 0 of {ranks}: {in_bytes(line.peak)} at the peak of a step"
    table = new_table(title, ["what", "of which units"], ["bytes", "share"])
    parts = line.parts()
    for kind, nbytes in line.by_kind().items():
        if nbytes:
            units = [part.unit for part in parts if part.kind == kind and part.unit]
            table.add_row(kind, few(units), in_bytes(nbytes), f"{100 * nbytes / line.peak:.1f} %")
    rich.print(table)
    event = line.events[line.peak_moment - 1]
    tell(
        f"The peak comes in {event.phase}, during {event.unit}. When backward returns, model states are "
        f"{in_bytes(states)}; in the step, this rank sends {in_bytes(result.ledger.moved)}."
    )
    if path:
        report = {"model": model, "stage": stage, "ranks": ranks, "states": result.states, "peak": line.by_kind()}
        write_json(path, report | {"moved": result.ledger.moved})
    if picture:
        from zerolab.lab.plots import skyline

        draw(picture, skyline([line]))
    return 0


def few(names: list[str]) -> str:
    """Up to three names; of a longer list, the first two and how many more there are."""
    names = list(dict.fromkeys(names))
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def gigabytes(size: float) -> str:
    """With four digits, as a person writes them: 0.1025, 31.4, 16,010."""
    return f"{size:,.0f}" if size >= 1000 else f"{size:.4g}"


def tell(text: str) -> None:
    """Print the text in lines of at most 80 columns."""
    print(textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False))


def draw(path: str, picture: tuple[Any, str]) -> None:
    """Save what a function of `zerolab.lab.plots` returned, and print its sentence."""
    figure, sentence = picture
    figure.savefig(path, dpi=150)
    tell(f"{path}: {sentence}")


def write_json(path: str, report: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def reproduce_all(cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
    """Run the cells in processes of their own, several at a time. Yields the results in order."""
    workers = max(1, min(4, os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(reproduce, cells)
        finally:
            pool.shutdown(cancel_futures=True)
