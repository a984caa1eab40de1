"""The solutions' answers are the checks' references: what is taught, tested and run is one text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerolab.lab import build
from zerolab.lab.exercises.catalogue import EXERCISES, find_exercise
from zerolab.lab.exercises.questions import QUESTIONS

pytestmark = pytest.mark.slow

SOLUTIONS = Path(__file__).parents[2] / "solutions"
LESSONS = sorted({id[:2] for id in EXERCISES})


def test_the_predictions_are_those_that_the_lessons_ask_for() -> None:
    sources = [path.read_text() for path in sorted(SOLUTIONS.glob("[0-9][0-9]_*.py"))]
    ids = {id for source in sources for id in re.findall(r"""lab\.predict\(\s*["']([^"']+)""", source)}
    assert ids == set(QUESTIONS)


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_solution_is_the_reference(lesson: str) -> None:
    (source,) = SOLUTIONS.glob(f"{lesson}_*.py")
    cells = build.notebooks(source)["solutions"].cells
    answers = {found[1]: cell.source[found.end() :] for cell in cells if (found := build.EXERCISE.match(cell.source))}
    assert sorted(answers) == [id for id in EXERCISES if id.startswith(lesson)]
    for id, answer in answers.items():
        assert answer.strip() == find_exercise(id).reference.strip(), f"{id}: the solution and the reference differ"
