"""Lesson 16 plans with the learner's classes from lessons 03 to 07: here with those answers in place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nbclient import NotebookClient

from zerolab.lab import build
from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "solutions" / "16_plan_a_trillion.py"


@pytest.mark.exhaustive
def test_the_learners_classes_make_figure_1(tmp_path):
    my, passed = tmp_path / "my", {}
    my.mkdir()
    for id, asked in EXERCISES.items():
        (my / f"ex_{id.replace('.', '_')}.py").write_text(asked.reference)
        passed[id] = judge.digest(asked.reference)
    (my / "progress.json").write_text(json.dumps({"passed": passed, "predictions": {}, "hints": {}}))

    lesson = build.notebooks(SOURCE)["solutions"]
    NotebookClient(lesson, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute(
        env=os.environ | {"ZEROLAB_MY": str(my)}
    )
    said = "".join(build._text(output) for cell in lesson.cells for output in cell.get("outputs", []))
    for stage, exercises in {
        "DDP": "your code (03.3)",
        "Zero1": "your code (04.2)",
        "Zero2": "your code (05.1)",
        "Zero3": "your code (06.2), your code (07.1)",
    }.items():
        assert f"{stage}: {exercises}; the rest is the package's" in said
    assert "Zero1  the paper   31.4 GB, simulated  31.40 GB" in said
    assert "Zero3  the paper    1.9 GB, simulated   1.64 GB" in said
    assert "✓ 16.2 a plan that pays" in said
    assert "'sequences': 6}: 79.7 GB, 4.6 days, $7,066" in said
