"""Small edits of a reference: which there are, and that some which once passed are refused."""

from __future__ import annotations

import pytest

from mutants.edits import edits
from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES

SOURCE = """\
def mean(x, n):
    if n > 1:
        x = x.clone()
    return x[1:] / n
"""


def test_each_is_another_program() -> None:
    found = edits(SOURCE)
    assert found["def mean(x, n):\n    if n > 1:\n        x = x.clone()\n    return x[1:] // n"] == "Div -> FloorDiv"
    assert found["def mean(x, n):\n    if n > 1:\n        x = x\n    return x[1:] / n"] == "line 3, x for x.clone()"
    assert {"Gt -> GtE", "line 1, without `if n > 1:`", "line 4, 1: from the start"} < {*found.values()}
    assert len(found) == 17 and SOURCE.strip() not in found


@pytest.mark.parametrize(
    ("id", "what"),
    [("03.2", "Div -> FloorDiv"), ("17.1", "Div -> FloorDiv"), ("22.3", "Pow -> Mult")],
)
def test_numbers_are_none_for_which_two_operations_agree(id: str, what: str) -> None:
    wrong = [source for source, edit in edits(EXERCISES[id].reference).items() if edit == what]
    assert wrong and not any(judge.try_answer(id, source, told=False).passed for source in wrong)
