"""The clinic: every patient has a diagnosis, and shows its evidence and no code."""

from __future__ import annotations

from collections import Counter

import pytest

from zerolab.lab.exercises.questions import QUESTIONS
from zerolab.lab.lessons.lesson17 import clinic


def test_every_patient_has_a_question_that_speaks_against_each_wrong_diagnosis():
    known = clinic.patients()
    assert sorted(known) == list(range(1, 11))
    for number, patient in known.items():
        question = QUESTIONS[f"17.{number}"]
        assert set(patient.choices) == set(question.words)
        assert set(question.against) == set(question.words) - {patient.answer}
        assert question.slip(patient.answer, patient.answer) == ""
        assert all(question.slip(letter, patient.answer) for letter in question.against)
        assert patient.story and patient.script


def test_a_diagnosis_cannot_be_told_by_its_length_or_its_letter() -> None:
    """Whoever always takes the longest, the shortest or one letter is right no more often than by chance."""
    known = clinic.patients().values()
    by_chance = len(known) / len("abcd")
    for unit, size in (("letters", len), ("words", lambda diagnosis: len(diagnosis.split()))):
        places = Counter[int]()
        right = Counter[str]()
        for patient in known:
            sizes = {letter: size(diagnosis) for letter, diagnosis in patient.choices.items()}
            if unit == "letters":
                assert max(sizes.values()) <= 1.12 * min(sizes.values()), f"patient {patient.number}: {sizes}"
            own, all_of_them = sizes[patient.answer], list(sizes.values())
            for name, extreme in (("longest", max(all_of_them)), ("shortest", min(all_of_them))):
                right[name] += (own == extreme) / all_of_them.count(extreme)  # of several, one is taken at random
            places[sum(other > own for other in all_of_them)] += 1
        assert max(right.values()) <= by_chance, (unit, right)
        assert max(places.values()) <= by_chance + 2, (unit, places)
    letters = Counter(patient.answer for patient in known)
    assert max(letters.values()) <= by_chance + 1 and set(letters) == set("abcd"), letters


def test_diagnoses_are_worded_alike() -> None:
    """Each is a suspicion and what it does, in one sentence: nothing but its content tells one from the others."""
    for patient in clinic.patients().values():
        for words in patient.choices.values():
            assert words.count(": ") == 1 and words.endswith(".") and words.count(".") == 1, words


def test_the_code_is_shown_after_a_diagnosis(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path))
    from zerolab.lab import predict

    clinic.uncover(6)
    assert "def evaluate" not in capsys.readouterr().out
    predict("17.6", "a")
    clinic.uncover(6)
    assert "def evaluate" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no patient 99"):
        clinic.uncover(99)


def test_a_failure_is_told_without_the_lines_of_code():
    text = "rank 1 raised ValueError: no\n  line 3 of the cell\n    broken(rank)\nrank 0: finished the cell"
    assert clinic._without_code(text) == "rank 1 raised ValueError: no\nrank 0: finished the cell"
    assert clinic._without_code(text, finished=False) == "rank 1 raised ValueError: no"


@pytest.mark.exhaustive
def test_patients_show_their_evidence_on_live_ranks(capsys):
    from zerolab.lab.ranks import session

    session.start(4)
    try:
        for number, evidence in (
            (3, "rank 2: no output, exit code -9"),
            (4, "sent 187,200 bytes"),
            (6, "more with each batch: 5.0 to 5.0 MB"),
            (7, "Culprit rank 3; Error type: COLLECTIVE_TYPE_MISMATCH"),
            (8, "group info: 1:dense"),
            (9, "ranks 2, 3:"),
            (10, "with dropout 5."),
        ):
            clinic.admit(number)
            said = capsys.readouterr()
            assert evidence in said.out + said.err
            assert "def " not in said.out and "SIGKILL" not in said.out + said.err
            assert "github.com" not in said.out
            if number == 3:  # its ranks catch what they raise, so that they finish says nothing
                assert "finished the cell" not in said.out
    finally:
        session.stop()
