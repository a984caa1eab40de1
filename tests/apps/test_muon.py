"""`python -m zerolab.apps.muon`, on a small model: what it promises is looked at by the command itself."""

from __future__ import annotations

import io

import pytest
import rich.console

from zerolab.apps import muon

pytestmark = [pytest.mark.exhaustive]


def test_muon_beside_plain_muon():
    report = muon.measure(2, 4, {"layers": 2, "width": 64})
    assert muon.problems(report) == []
    drawn = rich.console.Console(file=io.StringIO(), width=100)
    drawn.print(muon.table(report), muon.other_ways(report))
    said = drawn.file.getvalue()
    ours = report["systems"]["Zero3"]
    assert 0 < max(ours["sent"]) <= 12 * 2 * 12 * 64**2 / 4
    assert "owners, measured" in said and "all-to-all" in said
    ours["sent"][0] += 4
    (problem,) = muon.problems(report)
    assert problem.startswith("Zero3's ranks sent")
