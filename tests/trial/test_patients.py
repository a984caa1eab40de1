"""The trial on trial: an engine that is right passes; each of many with one bug is found by the case that names it."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs_common import worlds
from patients import PATIENTS

import zerolab
from zerolab.trial.cases import CASES
from zerolab.trial.hearing import HOLDS, UNSUPPORTED, hear

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"


@pytest.fixture(scope="module")
def pool() -> Iterator[zerolab.Ranks]:
    """Of its own: torch's flight recorder, which takes memory for each collective, is off in it."""
    before = os.environ.get("TORCH_FR_BUFFER_SIZE")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    try:
        with zerolab.Ranks(4, threads=1, forked=True) as ranks:
            ranks.run(os.getpid)
            yield ranks
    finally:
        os.environ.pop("TORCH_FR_BUFFER_SIZE")
        if before is not None:
            os.environ["TORCH_FR_BUFFER_SIZE"] = before


def engine(name: str) -> str:
    return f"{HERE / 'patients.py'}:{name}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, n", [("Small", 1), ("Small", 3), ("Smallest", 2)])
def test_the_right_engine_passes(pool, name, n):
    found = list(hear(f"{HERE / 'small.py'}:{name}", n, pool=pool))
    assert not [verdict for verdict in found if verdict.verdict not in (HOLDS, UNSUPPORTED)]
    assert sum(verdict.verdict == HOLDS for verdict in found) > 70


@pytest.mark.slow
@pytest.mark.parametrize("name", worlds(*[*PATIENTS][::3], others=[name for i, name in enumerate(PATIENTS) if i % 3]))
def test_the_case_that_names_its_bug_finds_it(pool, name):
    patient = PATIENTS[name]
    assert patient.__doc__ and "#" in patient.issue and set(patient.found_by) <= CASES.keys()
    (verdict,) = hear(engine(name), 2, patient.found_by[:1], pool)
    assert verdict.verdict not in (HOLDS, UNSUPPORTED), verdict.what


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, patient in PATIENTS.items() if not patient.everywhere])
def test_no_other_case_is_wrong_about_it(pool, name):
    """Of the cases a tenth, another one for each patient."""
    some = [*CASES][[*PATIENTS].index(name) % 10 :: 10]
    said = [
        verdict.case for verdict in hear(engine(name), 2, some, pool) if verdict.verdict not in (HOLDS, UNSUPPORTED)
    ]
    assert set(said) <= set(PATIENTS[name].found_by)


def test_every_promise_is_written_somewhere_and_every_patient_s_issue_stands_with_its_case():
    assert not [name for name, case in CASES.items() if not case.source or not case.promise]
    issues: dict[str, list[str]] = {}
    for patient in PATIENTS.values():
        issues.setdefault(patient.found_by[0], []).append(patient.issue)
    assert {name: case.broke.split(", ") for name, case in CASES.items() if case.broke} == issues


# -- docs/trial.md --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_is_as_the_stored_results_are():
    command = [sys.executable, str(DOCS / "trial" / "write.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads((DOCS / "trial" / "results.json").read_text())
    assert all(one["cases"].keys() == CASES.keys() for one in stored.values())


def test_the_table_of_lesson_18_is_as_the_stored_results_are():
    write, stored = (
        runpy.run_path(str(DOCS / "trial" / "write.py")),
        json.loads((DOCS / "trial" / "results.json").read_text()),
    )
    lesson = (DOCS.parent / "solutions" / "18_production.py").read_text().partition("## DeepSpeed on trial")[2]
    rows = [re.findall(r"[^|#\n]+", line) for line in re.findall(r"^# (\|.*\|)$", lesson, re.M)]
    head, _, *rows = ([cell.strip() for cell in row] for row in rows)
    engines = [name.lower().replace(" ", "") for name in head[1:]]
    assert engines == ["fsdp2", "deepspeed2", "deepspeed3"] and len(rows) == 8
    for name, *signs in rows:
        assert signs == [write["sign"](stored[engine]["cases"][name]) for engine in engines], name


@pytest.mark.exhaustive
def test_the_page_s_adapter_is_fsdp2_in_forty_lines(pool):
    file = DOCS / "trial" / "fsdp2.py"
    names = ["plain", "accumulate", "clip by the 2-norm", "state dict", "resumed by more", "held between steps"]
    assert len(file.read_text().splitlines()) < 50
    assert [v.verdict for v in hear(f"{file}:MyFSDP", 2, names, pool)] == [HOLDS] * len(names)
