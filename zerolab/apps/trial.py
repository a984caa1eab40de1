"""`zerolab trial`: an engine goes through the cases of zerolab/trial, and here is the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zerolab
from zerolab.trial import hearing
from zerolab.trial.cases import CASES
from zerolab.trial.hearing import HOLDS, UNSUPPORTED, Refused, Verdict

SIGNS = {HOLDS: "✓", UNSUPPORTED: "–"}


def chosen(only: list[str] | None) -> list[str]:
    """The names of the cases that `only` asks for: exactly, or all that begin so. Raises Refused if there is none."""
    if not only:
        return list(CASES)
    names: dict[str, None] = {}
    for text in only:
        found = [text] if text in CASES else [name for name in CASES if name.startswith(text)]
        if not found:
            raise Refused(f"argument --only: no case {text!r}; zerolab trial --list shows them all")
        names |= dict.fromkeys(found)
    return list(names)


def run(
    engine: str, ranks: list[int], only: list[str] | None, json_file: str | None = None, report: str | None = None
) -> int:
    """Print the verdicts. Exit status: 1 if a promise is not kept that the engine makes. Raises Refused before it."""
    from tqdm import tqdm

    names = chosen(only)
    hearing.find(engine)
    verdicts: list[Verdict] = []
    try:
        with zerolab.Ranks(max(ranks) + 1, threads=1, forked=True) as pool:
            with tqdm(total=len(names) * len(ranks), unit="case", ncols=79, leave=False) as bar:
                for size in ranks:
                    for verdict in hearing.hear(engine, size, names, pool):
                        verdicts.append(verdict)
                        bar.set_description(f"{size} rank{'s' * (size > 1)}, {verdict.case}"[:40])
                        bar.update()
    except KeyboardInterrupt:  # what was heard by then has taken its time
        print_verdicts(engine, verdicts, ranks)
        raise
    record = hearing.record(engine, verdicts)
    if json_file:
        Path(json_file).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if report:
        Path(report).write_text("\n".join(in_markdown(record)) + "\n")
    print_verdicts(engine, verdicts, ranks)
    return 0 if all(verdict.good for verdict in verdicts) else 1


def print_verdicts(engine: str, verdicts: list[Verdict], ranks: list[int]) -> None:
    """What does not hold, with the command that shows it again, and how many hold."""
    from rich import box, print
    from rich.markup import escape
    from rich.table import Table

    rest = [verdict for verdict in verdicts if verdict.verdict not in (HOLDS, UNSUPPORTED)]
    if rest:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("case", "ranks", "verdict", "what was seen"):
            table.add_column(column)
        for verdict in rest:
            seen = f"{verdict.what}\n({verdict.otherwise})" if verdict.otherwise else verdict.what
            table.add_row(verdict.case, str(verdict.ranks), verdict.verdict, escape(seen))
        print(table)
    for size in ranks:
        if not (counts := Counter(verdict.verdict for verdict in verdicts if verdict.ranks == size)):
            continue  # interrupted before
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        print(f"{engine}, {size} rank{'s' * (size > 1)}: {said}", flush=True)
    if bad := next((verdict for verdict in rest if not verdict.otherwise), None):
        print(f"One alone: {hearing.command(engine, bad)}")


def print_cases() -> None:
    """All cases: the name, the promise, where it is written, and who once broke it."""
    from rich import print
    from rich.markup import escape

    for family, names in families().items():
        print(f"\n[bold]{family}[/bold]")
        for name in names:
            broke = f"; broken in {CASES[name].broke}" if CASES[name].broke else ""
            print(
                f"  {escape(name)}: {escape(CASES[name].promise)}\n    [dim]{escape(CASES[name].source + broke)}[/dim]"
            )


def families() -> dict[str, list[str]]:
    """The names of the cases by what they are about."""
    found: dict[str, list[str]] = {}
    for name, case in CASES.items():
        found.setdefault(case.family, []).append(name)
    return found


def in_markdown(record: dict[str, Any]) -> Iterable[str]:
    """A report: for each family a table of its cases, one column for each number of ranks."""
    verdicts = record["verdicts"]
    sizes = sorted({verdict["ranks"] for verdict in verdicts})
    yield f"# {record['engine']} on trial\n"
    yield f"With torch {record['torch']}. ✓ holds, – not offered."
    for family, names in families().items():
        rows = {name: [v for v in verdicts if v["case"] == name] for name in names}
        if any(rows.values()):
            yield f"\n## {family}\n"
            yield f"| case | promise | {' | '.join(f'{size} ranks' for size in sizes)} | |"
            yield f"|---|---|{'---|' * len(sizes)}---|"
        for name, found in rows.items():
            if found:
                signs = [SIGNS.get(v["verdict"], v["verdict"]) for v in sorted(found, key=lambda v: v["ranks"])]
                seen = next((v["otherwise"] or v["what"] for v in found if v["verdict"] not in SIGNS), "")
                yield f"| {name} | {CASES[name].promise} | {' | '.join(signs)} | {seen.replace('|', '/')} |"
