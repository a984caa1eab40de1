"""The matrix: every known mistake, and the message that a learner would read.

    python -m tests.mutants            # all exercises
    python -m tests.mutants 03.2       # some

Exits with 1 if a right answer is refused, or if a mistake passes or is not named.
"""

from __future__ import annotations

import sys

from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.exercise import Exercise

from . import RIGHT, WRONG
from .matrix import is_named


def rows(asked: Exercise) -> list[tuple[str, bool, judge.Verdict]]:
    """(what was tried, whether the check judged it as it should, the verdict)."""
    found = []
    right = {"the reference": asked.reference} | {f"alternative {i}": s for i, s in enumerate(RIGHT[asked.id], 1)}
    for name, source in right.items():
        verdict = judge.try_answer(asked.id, source)
        found.append((name, verdict.passed, verdict))
    verdict = judge.try_answer(asked.id, asked.stub)
    found.append(("the stub", verdict.kind == "todo", verdict))
    for name, (source, part) in WRONG[asked.id].items():
        verdict = judge.try_answer(asked.id, source)
        found.append(
            (name, not verdict.passed and verdict.kind != "todo" and is_named(verdict, asked.id, part), verdict)
        )
    return found


def main(ids: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    if unknown := [id for id in ids if id not in EXERCISES]:
        print(f"there is no exercise {', '.join(unknown)}; there are {', '.join(EXERCISES)}", file=sys.stderr)
        return 2
    console, bad = Console(), 0
    for asked in (EXERCISES[id] for id in ids or EXERCISES):
        table = Table("tried", "judged", "seen", "likely", title=f"{asked.id} {asked.title}", show_lines=True)
        for name, as_it_should, verdict in rows(asked):
            bad += not as_it_should
            seen = verdict.seen or verdict.text.splitlines()[0].split("    ")[-1]
            table.add_row(name, "as it should" if as_it_should else "[red]NOT as it should[/]", seen, verdict.likely)
        console.print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
