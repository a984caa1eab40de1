"""The defects that `make test-planted` plants: each still has its place."""

from __future__ import annotations

import pytest

from .__main__ import ROOT
from .defects import DEFECTS, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_has_one_place_and_tests_that_are_there(defect: Defect) -> None:
    source = (ROOT / "zerolab" / defect.file).read_text()
    assert source.count(defect.old) == 1
    assert defect.new != defect.old
    compile(source.replace(defect.old, defect.new), defect.file, "exec")
    assert all((ROOT / "tests" / name.partition("::")[0]).exists() for name in defect.tests.split())


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
