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
    return (x[1:] + n + n) / n
"""


def test_each_is_another_program() -> None:
    found = {what: edited.splitlines() for edited, what in edits(SOURCE).items()}
    assert found["line 4, Div -> FloorDiv in (x[1:] + n + n) / n"][-1] == "    return (x[1:] + n + n) // n"
    assert found["line 4, Add -> Sub in x[1:] + n"][-1] == "    return (x[1:] - n + n) / n"  # one of the two
    assert found["line 3, x for x.clone()"][2] == "        x = x"
    assert {"line 2, Gt -> GtE in n > 1", "line 1, without `if n > 1:`", "line 4, 1: from the start"} < found.keys()
    assert SOURCE.splitlines() not in found.values()


@pytest.mark.parametrize(
    ("id", "what"),
    [("03.2", "Div -> FloorDiv"), ("17.1", "Div -> FloorDiv"), ("25.1", "Pow -> Mult")],
)
def test_numbers_are_none_for_which_two_operations_agree(id: str, what: str) -> None:
    wrong = [source for source, edit in edits(EXERCISES[id].reference).items() if what in edit]
    assert wrong and not any(judge.try_answer(id, source, told=False).passed for source in wrong)
