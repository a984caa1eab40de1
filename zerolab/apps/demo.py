"""`zerolab demo`: measure the ladder on this machine (lab/ladder.py), and print it as one table and one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import zerolab
from zerolab.apps.arguments import need
from zerolab.lab.ladder import Report, measure_ladder
from zerolab.measure import CATEGORIES


def run(
    ranks: int = 4,
    steps: int = 20,
    stages: Sequence[int] = (0, 1, 2, 3),
    precision: str = "fp32",
    device: str = "auto",
    json_file: str | None = None,
    plot_file: str | None = None,
) -> int:
    """Measure the ladder; print one table and one sentence. Exit status: 0 all is as promised, 1 not.

    Raises `ladder.Refused` or `MissingPackage` before any work if an argument makes no sense or a package is missing.
    """
    need("rich", "tqdm", *(["matplotlib"] if plot_file else []))
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


def print_table(report: Report, precision: str) -> None:
    """Print a table about 80 characters wide: for each stage what was measured, and below it what the formula says."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    ranks = f"{report['ranks']} rank{'s' * (report['ranks'] > 1)}"
    table = Table(
        title=f"GPT with {report['parameters']:,} parameters, {ranks}, {precision}, {report['steps']} steps.\n"
        "MB per rank: held when backward returns, moved in a step, and the peak of a step.",
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
    console.width = max(console.width, 100)  # a narrow terminal may wrap the lines, but nothing is cut off
    console.print(table)


def conclusion(report: Report) -> str:
    """The table in one sentence, for a run in which nothing is wrong."""
    stages = report["stages"]
    names = ", ".join(_name(stage) for stage in stages)
    held = ", ".join(_mb(sum(r["state_bytes"].values())) for r in stages.values())
    moved = ", ".join(_mb(r["moved_bytes_per_step"]) for r in stages.values())
    same = "bit for bit" if all(r["bitwise_equal"] for r in stages.values()) else "within the tolerance for NCCL"
    return (
        f"Every stage ({names}) ended with the parameters of one process, {same}; "
        f"a rank held {held} MB and moved {moved} MB per step."
    )


def _name(stage: str) -> str:
    return f"{stage} {zerolab.STAGES[int(stage)].__name__}"


def _held(sizes: dict[str, int]) -> list[str]:
    return [_mb(sizes[category]) for category in CATEGORIES] + [_mb(sum(sizes.values()))]


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"
