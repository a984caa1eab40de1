"""The answers in the solutions are the references of the checks: what is taught, tested and run is one text."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest

from zerolab.lab.build import EXERCISE
from zerolab.lab.checks import exercise

pytestmark = pytest.mark.slow

LESSONS = ["02_memory", "03_data_parallel", "04_zero1", "05_zero2", "06_zero3_forward", "07_zero3_backward"]
SOLUTIONS = Path(__file__).parents[1] / "solutions"


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_solution_is_the_reference(lesson: str) -> None:
    cells = jupytext.read(SOLUTIONS / f"{lesson}.py", fmt="py:percent").cells
    answers = {found[1]: cell.source[found.end() :] for cell in cells if (found := EXERCISE.match(cell.source))}
    assert answers and all(id.startswith(lesson[:2]) for id in answers)
    for id, answer in answers.items():
        assert answer.strip() == exercise(id).reference.strip(), f"{id}: the solution and the check's reference differ"
