"""The clinic: every patient has a diagnosis, and shows its evidence and no code."""

from __future__ import annotations

import pytest

from zerolab.lab import clinic
from zerolab.lab.exercises.questions import QUESTIONS


def test_every_patient_has_a_question_that_speaks_against_each_wrong_diagnosis():
    known = clinic.patients()
    assert sorted(known) == list(range(1, 14))
    for number, patient in known.items():
        question = QUESTIONS[f"17.{number}"]
        assert set(patient.choices) == set(question.words)
        assert set(question.against) == set(question.words) - {patient.answer}
        assert question.slip(patient.answer, patient.answer) == ""
        assert all(question.slip(letter, patient.answer) for letter in question.against)
        assert patient.story and patient.script


def test_the_code_is_shown_after_a_diagnosis(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path))
    from zerolab.lab import predict

    clinic.uncover(8)
    assert "cuda:0" not in capsys.readouterr().out
    predict("17.8", "a")
    clinic.uncover(8)
    assert "cuda:0" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no patient 99"):
        clinic.uncover(99)


def test_a_failure_is_told_without_the_lines_of_code():
    text = "rank 1 raised ValueError: no\n  line 3 of the cell\n    broken(rank)\nrank 0: finished the cell"
    assert clinic._without_code(text) == "rank 1 raised ValueError: no\nrank 0: finished the cell"


@pytest.mark.slow
def test_patients_show_their_evidence_on_live_ranks(capsys):
    from zerolab.lab.ranks import session

    session.start(4)
    try:
        for number, evidence in (
            (3, "killed by SIGKILL"),
            (5, "sent 0 bytes"),
            (8, "cuda:1 0.0 of"),
            (11, "'SGD' object"),
        ):
            clinic.admit(number)
            said = capsys.readouterr()
            assert evidence in said.out + said.err
            assert "def " not in said.out
    finally:
        session.stop()
