"""Exercises: what checks and predictions say, and whose code runs. The answers themselves are tried in mutants/."""

from __future__ import annotations

import html
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs_exercises
import mutants
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from jobs_common import worlds
from mutants import __main__ as matrix

import zerolab
from zerolab.lab.exercises import cards, catalogue, judge, predictions
from zerolab.lab.exercises import learner as exercises
from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.differences import KINDS
from zerolab.lab.exercises.exercise import Todo
from zerolab.lab.exercises.mistakes import Mistake
from zerolab.lab.exercises.questions import QUESTIONS
from zerolab.lab.exercises.store import read_progress, write_progress
from zerolab.lab.ranks import session

pytestmark = pytest.mark.slow

SOLUTIONS = Path(__file__).parents[2] / "solutions"


@pytest.fixture
def my(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's folder, and a learner's memory, that are empty."""
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path / "my"))
    for name, empty in (("_loaded", {}), ("_classes", {}), ("_told", None), ("_last", None)):
        monkeypatch.setattr(exercises, name, empty)
    monkeypatch.setattr(predictions, "_measured", {})
    return tmp_path / "my"


def test_every_lesson_has_a_file_that_tries_its_answers() -> None:
    files = {file.stem.removeprefix("test_lesson") for file in Path(mutants.__file__).parent.glob("test_lesson*.py")}
    assert files == {id[:2] for id in EXERCISES}


def test_the_catalogue_is_what_the_course_promises() -> None:
    for asked in EXERCISES.values():
        right, wrong = mutants.RIGHT[asked.id], mutants.WRONG[asked.id]
        assert len(right) >= 2 and len(wrong) >= 5 and len(asked.hints) >= 3, asked.id
        sources = [asked.reference, *right, *(source for source, _ in wrong.values())]
        assert len(set(sources)) == len(sources), f"{asked.id}: the same answer twice"


@pytest.mark.parametrize("id", EXERCISES)
def test_the_stub_is_not_done_yet(id: str) -> None:
    verdict = judge.try_answer(id, EXERCISES[id].stub)
    assert verdict.kind == "todo"
    assert verdict.text.startswith(f"○ {id} ") and verdict.text.endswith("not done yet")


def test_a_stub_raises_todo_and_starts_no_ranks(
    my: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    module = exercises.define("01.1", EXERCISES["01.1"].stub)
    capsys.readouterr()
    monkeypatch.setattr(judge, "pool", lambda: pytest.fail("ranks were asked for"))
    exercises.check("01.1")
    assert capsys.readouterr().out == "○ 01.1 ring reduce-scatter    not done yet\n"
    with pytest.raises(Todo, match=r"exercise 01.1 is not written yet.*lab.check\(\"01.1\"\)"):
        module.ring_reduce_scatter([], 0, 1, None)


# ---------------------------------------------------------------------- answers that break the pool


@pytest.mark.parametrize("inside", worlds("pass", others=["time.sleep(1.0)"]))
def test_a_hang_is_cut_and_the_next_check_works(monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    judge.try_answer("01.1", EXERCISES["01.1"].reference)  # the pool is there
    if "sleep" in inside:
        monkeypatch.setattr(judge, "WALL", 5.0)
    source = f"import time\n\ndef ring_reduce_scatter(*args):\n    while True:\n        {inside}\n"
    verdict = judge.try_answer("01.1", source, patience=1.0)
    assert verdict.kind == "late" and "a loop that does not end" in verdict.text
    assert "line 5" in verdict.seen or "line 6" in verdict.seen, verdict.text
    assert ("computing" in verdict.seen) == (inside == "pass")
    assert judge.try_answer("01.1", EXERCISES["01.1"].reference).passed


def test_a_check_leaves_no_process_group() -> None:
    """Its threads would look for messages a hundred times a second, and its ranks would seem to compute."""
    before = judge.pool().run(jobs_exercises.process_groups)
    assert min(before) >= 1  # or the threads have another name
    for id in ("03.1", "03.3"):  # their references are played again, and kept
        assert judge.try_answer(id, EXERCISES[id].reference).passed
    after = judge.pool().run(jobs_exercises.process_groups)
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@pytest.mark.exhaustive
def test_a_wait_that_the_limit_cuts_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a rank that sleeps, on a machine so busy that it does not seem to stand still."""
    judge.try_answer("01.1", EXERCISES["01.1"].reference)  # the pool is there
    monkeypatch.setattr(judge, "WALL", 5.0)
    partial = "    partial = chunks"
    sleeps = f"    if rank == 1:\n        time.sleep(600)\n{partial}"
    source = f"import time\n{EXERCISES['01.1'].reference}".replace(partial, sleeps)
    verdict = judge.try_answer("01.1", source, patience=600.0, told=False)
    assert verdict.kind == "late" and verdict.likely == judge.DIFFERENT, verdict.text


def test_a_message_that_nobody_sends() -> None:
    source = "import torch.distributed as dist\n\n"
    source += "def average(params):\n    if dist.get_world_size() > 1:\n        dist.recv(params[0].data)\n"
    verdict = judge.try_answer("03.1", source, patience=1.0)
    assert verdict.kind == "waits" and "waits for a message that no rank sends" in verdict.text, verdict.text
    assert "line 6: dist.recv" in verdict.seen


def test_an_exit_is_reported_and_the_next_check_works() -> None:
    verdict = judge.try_answer("01.2", "import os\n\ndef ring_all_gather(*args):\n    os._exit(3)\n")
    assert verdict.kind == "late" and "exited with code 3" in verdict.text
    assert "the process itself died" in verdict.text
    assert judge.try_answer("01.2", EXERCISES["01.2"].reference).passed


def test_what_does_not_compile_says_where() -> None:
    verdict = judge.try_answer("01.1", "def ring_reduce_scatter(:\n", filename="/here/ex_01_1.py")
    assert verdict.kind == "raised" and "SyntaxError" in verdict.seen and "line 2" in verdict.seen


def test_a_renamed_function_is_noticed() -> None:
    verdict = judge.try_answer("01.1", "def ring(*args):\n    pass\n")
    assert "it must be ring_reduce_scatter" in verdict.likely


def test_a_pass_names_the_numbers_of_ranks_on_which_something_was_seen() -> None:
    for id, sizes in {"09.1": "1", "16.1": "1, 2", "19.2": "1, 3"}.items():
        assert judge.try_answer(id, EXERCISES[id].reference).text.splitlines()[0].endswith(f"N={sizes} ok")


def test_an_unknown_mistake_shows_the_case() -> None:
    source = "import torch\n\ndef ring_all_gather(chunk, rank, N, exchange):\n    return [torch.full((4,), 7.0)] * N\n"
    verdict = judge.try_answer("01.2", source)
    assert verdict.likely == KINDS["values"] and "N=1 wrong" in verdict.text
    assert "the first at [0]: 7, expected 3" in verdict.seen


def test_a_mistake_says_a_whole_sentence() -> None:
    with pytest.raises(ValueError, match="a part of a sentence: 'a forgotten wait: '"):
        Mistake("", "a forgotten wait: ")


def test_an_answer_that_takes_all_processes_for_its_group_is_told_so() -> None:
    source = EXERCISES["04.2"].reference.replace("self.rank", "dist.get_rank()")
    verdict = judge.try_answer("04.2", f"import torch.distributed as dist\n{source}", sizes=(1, 2))
    assert "N=1 ok · N=2 wrong" in verdict.text and "among all ranks but rank 0" in verdict.seen
    assert verdict.likely.startswith("all processes are counted by dist.get_rank(), and only some of them")
    assert "note" not in judge.try_answer("04.2", EXERCISES["04.2"].reference, sizes=(2,)).text


def test_a_forgotten_wait_is_wrong_every_time() -> None:
    source, said = mutants.WRONG["03.1"]["forgotten wait"]
    verdict = judge.try_answer("03.1", source)
    assert not verdict.passed and said in verdict.text


def test_what_an_answer_prints_is_shown() -> None:
    verdict = judge.try_answer("01.1", "def ring_reduce_scatter(*args):\n    print('so far')\n    return 1 / 0\n")
    assert "printed  so far" in verdict.text
    assert "ZeroDivisionError" in verdict.seen and "line 4: return 1 / 0" in verdict.seen


# ---------------------------------------------------------------------- a pass, and what revokes it


def test_a_pass_counts_until_the_answer_changes(my: Path, capsys: pytest.CaptureFixture) -> None:
    exercises.define("01.2", EXERCISES["01.2"].reference)
    assert not exercises.passed("01.2")
    exercises.check()
    assert "✓ 01.2 ring all-gather    N=1, 2, 3, 4 ok" in capsys.readouterr().out
    assert exercises.passed("01.2")
    ours = exercises.mine("01.2")
    assert capsys.readouterr().out == "ring_all_gather: your code (01.2)\n"
    assert inspect.getsourcefile(ours) == str((my / "ex_01_2.py").absolute())
    assert inspect.getsource(ours) in EXERCISES["01.2"].reference

    with (my / "ex_01_2.py").open("a") as file:
        file.write("# edited\n")
    assert not exercises.passed("01.2")
    theirs = exercises.mine("01.2")
    assert theirs is not ours
    assert capsys.readouterr().out.startswith("ring_all_gather: the course's code, 01.2 has not passed")
    exercises.progress()
    assert "○ 01.1, ○ 01.2 changed since it passed\n" in capsys.readouterr().out


def test_mine_of_an_exercise_that_defines_two(my: Path, capsys: pytest.CaptureFixture) -> None:
    assert exercises.mine("06.1").__name__ == "gather"
    said = "gather: the course's code, 06.1 is not written yet"
    assert capsys.readouterr().out == f'{said}; release is lab.mine("06.1", "release")\n'
    assert exercises.mine("06.1", "release").__name__ == "release"
    assert capsys.readouterr().out == "release: the course's code, 06.1 is not written yet\n"
    with pytest.raises(exercises.Misused, match=r"exercise 06\.1 defines gather, release, not 'let go'"):
        exercises.mine("06.1", "let go")
    with pytest.raises(exercises.Misused, match="3 is neither"):
        exercises.mine(3)


def test_a_wrong_answer_loses_an_earlier_pass(my: Path, capsys: pytest.CaptureFixture) -> None:
    exercises.define("01.2", EXERCISES["01.2"].reference)
    exercises.check("01.2")
    exercises.define("01.2", mutants.WRONG["01.2"]["order of arrival"][0])
    exercises.check("01.2")
    assert "in order of arrival" in capsys.readouterr().out
    exercises.define("01.2", EXERCISES["01.2"].reference)
    assert not exercises.passed("01.2")


def test_a_stub_never_replaces_an_answer(my: Path, capsys: pytest.CaptureFixture) -> None:
    exercises.define("01.1", EXERCISES["01.1"].reference)
    module = exercises.define("01.1", EXERCISES["01.1"].stub)
    assert (my / "ex_01_1.py").read_text() == EXERCISES["01.1"].reference
    assert "your answer in my/ex_01_1.py is used" in capsys.readouterr().out
    assert module.ring_reduce_scatter([torch.ones(2)], 0, 1, None).tolist() == [1.0, 1.0]


def test_a_stub_with_other_comments_is_a_stub(my: Path, capsys: pytest.CaptureFixture) -> None:
    old = EXERCISES["06.1"].stub.replace("Let the memory", "Give the memory")
    assert old != EXERCISES["06.1"].stub
    exercises.define("06.1", EXERCISES["06.1"].reference)
    exercises.define("06.1", old)
    assert (my / "ex_06_1.py").read_text() == EXERCISES["06.1"].reference
    assert "your answer in my/ex_06_1.py is used" in capsys.readouterr().out
    half = old.replace('raise Todo("06.1")', "full.untyped_storage().resize_(0)", 1)
    exercises.define("06.1", half)
    assert (my / "ex_06_1.py").read_text() == half, "half an answer is one"


def test_an_object_of_an_older_version_says_so(my: Path) -> None:
    source = "class Box:\n    def value(self):\n        return {}\n"
    old = exercises.define("01.1", source.format(1)).Box()
    assert exercises.define("01.1", source.format(1)).Box().value() == old.value() == 1  # the same cell run again
    new = exercises.define("01.1", source.format(2)).Box()
    assert new.value() == 2
    with pytest.raises(exercises.Stale, match=r"Box.value\(\) of an earlier version of 01.1.*rebuild the model"):
        old.value()


def test_check_before_the_cell_ran(my: Path, capsys: pytest.CaptureFixture) -> None:
    exercises.check("01.1")
    assert "not done yet: run the cell that begins with %%exercise 01.1" in capsys.readouterr().out
    with pytest.raises(KeyError, match=r"no exercise '01.9'; there are 01.1, 01.2"):
        exercises.check("01.9")
    exercises._last = None
    with pytest.raises(ValueError, match="which exercise"):
        exercises.check()


def test_progress_over_the_course(my: Path, capsys: pytest.CaptureFixture) -> None:
    """A line for each lesson, under its heading, and what comes next."""
    exercises.progress()
    *lines, last = capsys.readouterr().out.splitlines()
    headings = [re.search("^# # (.+)$", path.read_text(), re.MULTILINE)[1] for path in sorted(SOLUTIONS.glob("*.py"))]
    assert [f"{number} · {title}" for number, title in catalogue.LESSONS.items()] == headings
    assert [line[:2] for line in lines] == [heading[:2] for heading in headings]
    assert max(map(len, lines)) <= 120
    assert last == f"0 of {len(EXERCISES)} exercises, 0 of {len(QUESTIONS)} predictions; next: 01.1 ring reduce-scatter"
    exercises.define("01.1", EXERCISES["01.1"].reference)
    exercises.check()
    exercises.define("01.2", "def ring_all_gather(): ...")
    predictions.predict("01.1", "1 MB")
    capsys.readouterr()
    exercises.progress()
    said = capsys.readouterr().out
    assert "✓ 01.1, ○ 01.2 written, not passed\n" in said and re.search(r"01 Collectives +1 of \d+ predicted", said)
    assert f"1 of {len(EXERCISES)} exercises, 1 of {len(QUESTIONS)} predictions; next: 01.2 ring all-gather\n" in said


def test_damaged_progress_is_named(my: Path) -> None:
    my.mkdir()
    (my / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"progress.json is damaged .*: delete it"):
        exercises.progress()


# ---------------------------------------------------------------------- predictions and hints


def said_by(capsys: pytest.CaptureFixture, id: str, *guess: object) -> str:
    """What is printed for this guess (none: for the one that is kept) once `id` is revealed."""
    if guess:
        predictions.predict(id, guess[0])
    capsys.readouterr()
    predictions.reveal(id)
    return capsys.readouterr().out


def test_reveal_shows_nothing_before_a_prediction(my: Path, capsys: pytest.CaptureFixture) -> None:
    predictions.measured("02.1", 4_200_000)
    predictions.predict("02.1", ...)
    predictions.reveal("02.1")
    said = capsys.readouterr().out
    assert 'replace `...` with a number of bytes (4e6 and "4 MB" are the same), or lab.skip("02.1")' in said
    assert "first lab.predict" in said and "4.2" not in said
    assert "measured 4.20 MB; you said 5.00 MB: 19 % too much" in said_by(capsys, "02.1", 5_000_000)
    assert "exactly right" in said_by(capsys, "02.1", 4_200_000)


def test_skip(my: Path, capsys: pytest.CaptureFixture) -> None:
    predictions.skip("02.2")
    assert "not measured yet" in said_by(capsys, "02.2")
    predictions.measured("02.2", 16.0)
    assert said_by(capsys, "02.2") == "02.2: measured 16 bytes per parameter\n"
    assert said_by(capsys, "02.2", 16).endswith("exactly right\n")


@pytest.mark.parametrize("call", [predictions.predict, predictions.skip, predictions.reveal, predictions.predicted])
def test_a_misspelt_prediction_names_those_there_are(my: Path, call: Callable) -> None:
    lessons = ", ".join(dict.fromkeys(id[:2] for id in QUESTIONS))
    for id, said in {
        "05.9": "there is no prediction '05.9'; lesson 05 has 05.1, 05.2, 05.3, 05.4",
        "05.01": "there is no prediction '05.01'; lesson 05 has 05.1, 05.2, 05.3, 05.4",
        "5.1": "there is no prediction '5.1'; lesson 05 has 05.1, 05.2, 05.3, 05.4",
        "cats": f"there is no prediction 'cats'; lessons {lessons} have predictions",
        2.2: 'the name of a prediction is a string such as "01.1", not 2.2',
    }.items():
        with pytest.raises(exercises.Misused) as caught:
            call(id)
        assert str(caught.value) == said
    assert not my.exists(), "nothing was written down"


@pytest.mark.parametrize(
    ("id", "value", "number"),
    [
        ("02.1", 5.2e6, 5.2e6),
        ("02.1", "5.2 MB", 5.2e6),
        ("02.1", "5.2MB", 5.2e6),
        ("02.1", " ~ 5200 kB ", 5.2e6),
        ("02.1", "5,200,000", 5.2e6),
        ("02.1", "5_200_000 bytes", 5.2e6),
        ("02.1", "5.2e6", 5.2e6),
        ("02.1", "1 KiB", 1024),
        ("02.1", "16 Ψ", 16 * 867_072),
        ("02.1", "16psi", 16 * 867_072),
        ("01.1", "48 MB", 48),
        ("01.1", "48e6 bytes", 48),
        ("16.1", "31.4 GB", 31.4),
        ("16.1", "31400 MB", 31.4),
        ("02.2", "16", 16),
        ("02.2", "16 bytes", 16),
        ("03.1", "29 calls", 29),
        ("03.3", "0.3 s", 300),
        ("04.2", "1.5x", 1.5),
        ("04.2", "150 %", 1.5),
        ("05.2", " Small", "small"),
    ],
)
def test_a_prediction_is_taken_as_people_write_it(my: Path, id: str, value: object, number: float | str) -> None:
    predictions.predict(id, value)
    kept = read_progress()["predictions"][id]
    assert kept == (number if isinstance(number, str) else pytest.approx(number))


@pytest.mark.parametrize(
    ("id", "value", "said"),
    [
        ("02.1", "a lot", r"02.1 asks for a number of bytes .* not \'a lot\'; nothing was written down"),
        ("02.1", "5,2 MB", "not '5,2 MB'"),
        ("02.1", "3 Mbit", "not '3 Mbit'"),
        ("02.1", "1.2.3", "not '1.2.3'"),
        ("02.1", -3, "not -3"),
        ("02.1", float("nan"), "not nan"),
        ("02.1", True, "not True"),
        ("02.1", [1, 2], "not a list"),
        ("02.1", torch.ones(1), "not a Tensor"),
        ("03.1", "29 MB", "03.1 asks for a number of calls, not '29 MB'"),
        ("03.1", "3 Ψ", "not '3 Ψ'"),
        ("05.2", 5, '05.2 asks for "small" or "large", not 5'),
        ("05.2", "medium", "not 'medium'"),
    ],
)
def test_nonsense_is_refused_at_once(my: Path, id: str, value: object, said: str) -> None:
    with pytest.raises(predictions.NoPrediction, match=said):
        predictions.predict(id, value)
    assert not my.exists(), "nothing was written down"


def test_what_an_earlier_version_wrote_down(my: Path, capsys: pytest.CaptureFixture) -> None:
    predictions.measured("01.1", 48.0)
    write_progress({"passed": {}, "predictions": {"01.1": "48 MB", "01.2": "much"}, "hints": {}})
    assert said_by(capsys, "01.1").endswith("exactly right\n")
    predictions.measured("01.2", 24.0)
    said = said_by(capsys, "01.2")
    assert "you said 'much', but this asks for a number of MB" in said and "24" not in said


@pytest.mark.parametrize(
    ("id", "value", "guess", "said"),
    [
        ("02.1", 16 * 867_072, 12 * 867_072, "Adam keeps two averages"),
        ("03.2", 2_823_168, 4 * 470_528 * 2, "does not send its own part"),
        ("04.1", 8 * 867_072 * 3 // 4, 6 * 867_072 // 4, "number of elements"),
        ("06.2", 1_089_024, 793_088, "The root's forward is under way"),
        ("07.1", 20, 21, "stays from its forward"),
        ("09.2", 4, 2, "without prefetching"),
        ("01.1", 48.0, 48e6, "Those are bytes"),
        ("02.1", 16 * 867_072, 16 * 8 * 867_072, "Those are bits"),
        ("01.3", 579_000, 250_000, "half as long to send"),
        ("03.3", 290, 188, "what the formula gives"),
        ("03.3", 290, 174, "the latency alone"),
        ("10.1", 5_136, 51_200, "16 vectors in each block"),
        ("10.2", 1.324, 1.5, "one part of three"),
        ("10.4", 1_263_616, 1_263_616 // 2, "one direction"),
    ],
)
def test_a_known_slip_is_named(
    my: Path, capsys: pytest.CaptureFixture, id: str, value: float, guess: float, said: str
) -> None:
    predictions.measured(id, value)
    assert said in said_by(capsys, id, guess)
    assert said not in said_by(capsys, id, value)
    assert said not in said_by(capsys, id, 1.07 * value)


def test_slips_are_wrong_and_apart() -> None:
    """No slip is the right answer, and each asks for something that a person could have meant."""
    for id, question in QUESTIONS.items():
        assert not (question.words and (question.slips or question.unit)), id
        ratios = sorted([1.0, *question.slips])
        assert all(b > 1.01 * a for a, b in itertools.pairwise(ratios)), id


@pytest.mark.parametrize(
    ("guess", "value", "said"),
    [
        (30, 10, "3 times the measured value"),
        (1, 10, "0.1 times the measured value"),
        (9.9999, 10.0, "less than 0.1 % off"),
        (8, 10, "20 % too little"),
        (5, 0, "off by 5"),
        ("ring", "root", "not the same"),
    ],
)
def test_how_far_off(guess: object, value: object, said: str) -> None:
    assert predictions._how_far_off(guess, value) == said


def test_hints_unfold_one_at_a_time(my: Path, capsys: pytest.CaptureFixture) -> None:
    for number in (1, 2, 3, 3):
        exercises.hint("01.1")
        assert capsys.readouterr().out.count("01.1, hint") == number


# ---------------------------------------------------------------------- the learner's class


def pass_03_3() -> None:
    exercises.define("03.3", mutants.RIGHT["03.3"][0])
    exercises.check("03.3")


def test_mine_is_the_packages_class_until_the_check_has_passed(my: Path, capsys: pytest.CaptureFixture) -> None:
    assert exercises.mine(zerolab.DDP) is zerolab.DDP
    assert capsys.readouterr().out == "DDP: 03.3 is not written yet; the rest is the package's\n"
    pass_03_3()
    assert "✓ 03.3" in capsys.readouterr().out
    ours = exercises.mine(zerolab.DDP)
    assert capsys.readouterr().out == "DDP: your code (03.3); the rest is the package's\n"
    assert issubclass(ours, zerolab.DDP) and ours.__name__ == "DDP" and ours.stage == 0
    assert ours.reduce.__code__.co_filename == str((my / "ex_03_3.py").absolute())
    assert ours.optimizer_params is zerolab.DDP.optimizer_params
    assert exercises.mine(zerolab.DDP) is ours
    exercises.define("03.3", mutants.RIGHT["03.3"][1])
    with pytest.raises(exercises.Stale, match=r"MyDDP.reduce\(\) of an earlier version of 03.3"):
        ours.reduce(None, None)
    assert exercises.mine(zerolab.DDP) is zerolab.DDP
    with pytest.raises(ValueError, match="no exercise extends Module; there are exercises for DDP"):
        exercises.mine(torch.nn.Module)


def test_the_learners_class_trains_as_the_packages_does(
    my: Path, ranks: zerolab.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_03_3()
    decisions = {"03.3": exercises._decision("03.3")}
    results = ranks.run(jobs_exercises.train_with_both, decisions, ranks=2)
    for ours, theirs, file in results:
        assert ours == theirs and len(ours) == 3
        assert file.endswith("ex_03_3.py")


@pytest.mark.exhaustive
def test_both_halves_of_the_learners_zero3_train_as_the_packages_does(my: Path, ranks: zerolab.Ranks) -> None:
    for id in ("06.2", "07.1"):
        exercises.define(id, mutants.RIGHT[id][1])
        exercises.check(id)
    decisions = {id: exercises._decision(id) for id in ("06.2", "07.1")}
    for ours, theirs, files in ranks.run(jobs_exercises.train_zero3, decisions, ranks=3):
        assert ours == theirs and len(ours) == 3
        assert files == ["ex_06_2.py"] * 2 + ["ex_07_1.py"] * 3


def test_a_stub_in_use_says_so_on_its_rank(my: Path, ranks: zerolab.Ranks) -> None:
    with pytest.raises(zerolab.RankError, match=r"exercise 03.3 is not written yet"):
        ranks.run(jobs_exercises.train_a_stub, EXERCISES["03.3"].stub, ranks=2)


# ---------------------------------------------------------------------- as a learner and a maintainer start it


@pytest.fixture
def shell(my: Path) -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    exercises.register(shell)
    yield shell
    InteractiveShell.clear_instance()


def test_the_magic(my: Path, shell: InteractiveShell) -> None:
    shell.run_cell("%%exercise 01.2\n" + EXERCISES["01.2"].reference).raise_error()
    assert (my / "ex_01_2.py").read_text().strip() == EXERCISES["01.2"].reference.strip()
    shell.run_cell("alone = ring_all_gather('mine', 0, 1, None)").raise_error()
    assert shell.user_ns["alone"] == ["mine"]
    with pytest.raises(KeyError, match=r"there is no exercise '9.9'"):
        shell.run_cell_magic("exercise", "9.9", "pass")
    with pytest.raises(ValueError, match="which exercise"):
        shell.run_cell_magic("exercise", "", "pass")


def test_a_cell_that_does_not_compile_shows_its_line_alone(
    my: Path, shell: InteractiveShell, capsys: pytest.CaptureFixture
) -> None:
    result = shell.run_cell("%%exercise 01.2\ndef ring_all_gather(mine, rank):\n    x = = 1\n")
    assert isinstance(result.error_in_exec, exercises.NotPython)
    shown = capsys.readouterr().out.partition("tries it\n")[2].splitlines()
    assert shown == [
        "01.2 is not Python yet: SyntaxError: invalid syntax",
        "  line 3 of the cell",
        "    x = = 1",
        "        ^",
    ]
    assert (my / "ex_01_2.py").read_text().endswith("x = = 1\n"), "what was written is not lost"


def test_a_cell_that_raises_shows_its_lines_alone(shell: InteractiveShell, capsys: pytest.CaptureFixture) -> None:
    result = shell.run_cell("%%exercise 01.2\ndef f():\n    return undefined\n\nf()\n")
    assert isinstance(result.error_in_exec, exercises.Broken)
    shown = capsys.readouterr().out.partition("tries it\n")[2].splitlines()
    assert shown == [
        "01.2 cannot be used yet: NameError: name 'undefined' is not defined",
        "  line 5 of the cell",
        "    f()",
        "  line 3 of the cell",
        "    return undefined",
    ]


def test_the_matrix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    few = dict(list(mutants.WRONG["01.2"].items())[:2])
    monkeypatch.setattr(matrix, "EXERCISES", {"01.2": EXERCISES["01.2"]})
    monkeypatch.setattr(matrix, "WRONG", {"01.2": few})
    monkeypatch.setenv("COLUMNS", "160")
    assert matrix.main(["01.2"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("the reference", "alternative 2", "the stub", *few))
    assert "NOT" not in said
    assert matrix.main(["09.9"]) == 2
    assert "there is no exercise 09.9; there are 01.2" in capsys.readouterr().err


def test_the_matrix_fails_where_a_mistake_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RIGHT", {"01.2": ()})
    monkeypatch.setattr(matrix, "WRONG", {"01.2": {"none": (EXERCISES["01.2"].reference, "x")}})
    judged = {name: as_it_should for name, as_it_should, _ in matrix.rows(EXERCISES["01.2"])}
    assert judged == {"the reference": True, "the stub": True, "none": False}


# ---------------------------------------------------------------------- with live ranks


def test_live_ranks_have_the_same_answer_and_the_same_decision(my: Path, capsys: pytest.CaptureFixture) -> None:
    box = "class Box:\n    def value(self):\n        return {}\n"
    session.start(2, device="cpu")
    try:
        live = session.current()
        exercises.define("01.1", box.format(1))
        live.run("old = Box()\nassert old.value() == 1")
        exercises.define("01.1", box.format(2))
        live.run("assert Box().value() == 2")
        with pytest.raises(session.RankFailure, match=r"Box.value\(\) of an earlier version of 01.1"):
            live.run("old.value()")

        exercises.define("01.2", EXERCISES["01.2"].reference)
        live.run(
            "from zerolab.lab import mine\ntheirs = mine('01.2')\nassert '01_2' not in theirs.__code__.co_filename"
        )
        exercises.check("01.2")
        live.run("ours = mine('01.2')\nassert ours.__code__.co_filename.endswith('my/ex_01_2.py'), ours")
        live.run("from zerolab.lab.exercises import exchange\nimport torch")
        live.run("got = ours(torch.tensor([rank]), rank, world_size, exchange)\nassert [int(t) for t in got] == [0, 1]")
        (my / "ex_01_2.py").write_text("# edited in another editor, not yet run\n")
        live.run("assert mine('01.2') is ours")  # the notebook decides, and it has said nothing yet
    finally:
        session.stop()


# ---------------------------------------------------------------------- cards


def test_a_card_says_what_the_text_says() -> None:
    text = "✗ 04.2 reduce    N=1 ok · N=2 wrong\n  seen     rank 1, a <b> · line 7: if x < 1:\n  try      lab.hint()"
    shown = cards.as_html(text, "wrong")
    assert cards.COLOURS["wrong"] in shown and "<table" in shown
    assert "a &lt;b&gt; · line 7: <code>if x &lt; 1:</code>" in shown
    words = html.unescape(re.sub(r"<[^>]+>", " ", shown.replace("&lt;", "‹").replace("&gt;", "›")))
    for word in text.replace("<", "‹").replace(">", "›").split():
        assert word in words, word


def test_a_card_is_text_where_nothing_shows_html(capsys: pytest.CaptureFixture) -> None:
    cards.say("✓ right", "right")
    status = cards.Status()
    status("on the way")
    status.end("✓ done", "right")
    assert capsys.readouterr().out == "✓ right\n✓ done\n"
