"""A learner's stage in cases of `zerolab trial`: what they are told of answers that have passed."""

import os

import mutants
import pytest

import zerolab
from zerolab import lab
from zerolab.lab.exercises import judge
from zerolab.lab.exercises.learner import Misused
from zerolab.lab.exercises.store import file_of, write_progress

pytestmark = pytest.mark.slow


def passes(id: str, source: str) -> None:
    """Say that it has."""
    file_of(id).parent.mkdir(parents=True)
    file_of(id).write_text(source)
    write_progress({"passed": {id: judge.digest(source)}, "predictions": {}, "hints": {}})


def test_a_learner_s_code_is_what_is_tried(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path / "my"))
    passes("05.1", mutants.WRONG["05.1"]["keeps the full gradient"][0])
    lab.trial(zerolab.Zero2, "plain", "held after backward")
    first, plain, held, *rest, seen, last = capsys.readouterr().out.splitlines()
    assert first == "Zero2: your code (05.1); the rest is the package's"
    assert plain.startswith("✓ plain: ") and held.startswith("✗ held after backward: ")
    assert "wrong: " in seen + rest[-1] and last == "1 of 2 promises kept, on 2 ranks"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ  # live ranks that start later keep torch's record


@pytest.mark.exhaustive
def test_another_engine_says_what_it_promises_instead(capsys):
    lab.trial("fsdp2", "plain", "disagree: a learning rate")
    plain, rate, seen, *_, last = capsys.readouterr().out.splitlines()
    assert plain.startswith("✓ plain: ") and rate.startswith("✗ disagree: a learning rate: ")
    assert "no error" in seen and last == "1 of 2 promises kept, on 2 ranks"


def test_what_cannot_be_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path / "my"))
    with pytest.raises(Misused, match=r"knows no case 'plane'; zerolab trial --list"):
        lab.trial(zerolab.Zero2, "plane")
    with pytest.raises(Misused, match="no engine 'fsdp3': one of ddp, zero1"):
        lab.trial("fsdp3", "plain")
    with pytest.raises(Misused, match="no exercise extends Engine"):
        lab.trial(zerolab.Engine, "plain")
