"""The matrix: every catalogued mistake against the message that a learner reads.

    python -m zerolab.lab.exercises            # all exercises
    python -m zerolab.lab.exercises 03.2       # some

Exits with 1 if a right answer is refused, or a mistake is let through or not named.
"""

from __future__ import annotations

import sys

from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import Exercise, catalogue


def rows(asked: Exercise) -> list[tuple[str, bool, judge.Verdict]]:
    """(what was tried, whether the check judged it as it should, the verdict)."""
    found = []
    right = {"the reference": asked.reference} | {f"alternative {i}": s for i, s in enumerate(asked.alternatives, 1)}
    for name, source in right.items():
        verdict = judge.judge(asked.id, source)
        found.append((name, verdict.passed, verdict))
    verdict = judge.judge(asked.id, asked.stub)
    found.append(("the stub", verdict.kind == "todo", verdict))
    for name, (source, part) in asked.mutants.items():
        verdict = judge.judge(asked.id, source)
        found.append((name, not verdict.passed and verdict.kind != "todo" and part in verdict.text, verdict))
    return found


def main(ids: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    everything = catalogue()
    if unknown := [id for id in ids if id not in everything]:
        print(f"there is no exercise {', '.join(unknown)}; there are {', '.join(everything)}", file=sys.stderr)
        return 2
    console, bad = Console(), 0
    for asked in (everything[id] for id in ids or everything):
        table = Table("tried", "judged", "seen", "likely", title=f"{asked.id} {asked.title}", show_lines=True)
        for name, as_it_should, verdict in rows(asked):
            bad += not as_it_should
            seen = verdict.seen or verdict.text.splitlines()[0].split("    ")[-1]
            table.add_row(name, "as it should" if as_it_should else "[red]NOT as it should[/]", seen, verdict.likely)
        console.print(table)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
