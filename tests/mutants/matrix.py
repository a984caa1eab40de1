"""The tests of a lesson's checks: right answers pass, and every catalogued mistake is named.

Each lesson has a file that takes them from here, so that lessons are tried side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES

from . import RIGHT, WRONG

RICHEST = (3,)  # numbers of ranks: groups of some ranks, of every other and of one are all tried there


def param(id: str, name: str, *values: Any, first: bool) -> Any:
    """One answer to an exercise. `make test` tries the first of each kind, `make test-all` the others too."""
    return pytest.param(id, *values, id=f"{id} {name}", marks=() if first else pytest.mark.exhaustive)


def is_named(verdict: judge.Verdict, id: str, said: str) -> bool:
    """Whether it is told what it is. Where a rank waits for one that went another way, how far that came is a matter of
    time: then it may be told what is true of all that wait, or that it does not end, but never another mistake.
    """
    waits = any(report.kind in ("waits", "late") for report in verdict.reports)
    return said in verdict.text or (waits and verdict.likely not in {other for _, other in WRONG[id].values()})


def answers_of(lesson: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """What a test file of `lesson` ("04") assigns to two names that pytest finds."""
    exercises = [asked for id, asked in EXERCISES.items() if id.startswith(lesson)]
    right, wrong = [], []
    for asked in exercises:
        rich = [size for size in asked.sizes if size in RICHEST] or asked.sizes
        right.append(param(asked.id, "reference", asked.reference, rich, first=True))
        if others := [size for size in asked.sizes if size not in rich]:
            right.append(param(asked.id, "reference on other numbers of ranks", asked.reference, others, first=False))
        for i, source in enumerate(RIGHT[asked.id]):
            right.append(param(asked.id, f"alternative {i}", source, asked.sizes, first=False))
        mistakes = WRONG[asked.id].items()
        wrong += [param(asked.id, name, *mistake, first=i == 0) for i, (name, mistake) in enumerate(mistakes)]

    @pytest.mark.slow
    @pytest.mark.parametrize(("id", "source", "sizes"), right)
    def test_right_answers_pass(id: str, source: str, sizes: Sequence[int]) -> None:
        verdict = judge.try_answer(id, source, sizes=sizes)
        assert verdict.passed, verdict.text
        assert verdict.text.splitlines()[0].endswith(f"N={', '.join(map(str, sizes))} ok")

    @pytest.mark.slow
    @pytest.mark.parametrize(("id", "source", "said"), wrong)
    def test_mistakes_are_named(id: str, source: str, said: str) -> None:
        verdict = judge.try_answer(id, source)
        assert verdict.kind not in ("right", "todo"), verdict.text
        assert is_named(verdict, id, said), verdict.text
        unknown = re.search(r"NameError: name '(\w+)'", verdict.seen)  # then it does not do what its name says
        assert not unknown or any(unknown[1] in other.exports for other in EXERCISES.values()), verdict.text
        first, seen, likely, tip = verdict.text.splitlines()[:4]
        assert first.startswith(f"✗ {id} ") and first.endswith("wrong")
        assert (
            seen.startswith("  seen     rank ")
            and likely.startswith("  likely   ")
            and tip.startswith("  try      lab.hint()")
        )

    return test_right_answers_pass, test_mistakes_are_named
