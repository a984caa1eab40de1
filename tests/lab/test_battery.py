"""What a battery sees without being told to look, in an exercise that says nothing about it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from zerolab.lab.exercises import judge, observing
from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.differences import KINDS, MADE, OF_PARTS
from zerolab.lab.exercises.judge import LEFT_BEHIND, RAISED
from zerolab.lab.exercises.mistakes import edit, mistakes_of, nearest, signatures_of
from zerolab.lab.exercises.observing import Event, Play
from zerolab.lab.lessons.lesson01.mistakes import REDUCE_SCATTER_INTO_CHUNKS
from zerolab.world import processes

REFERENCE = EXERCISES["01.2"].reference
BEGIN = "    right, left"

SEEN = {
    "random": (f"    torch.rand(1)\n{BEGIN}", "the random state has changed"),
    "grad mode": (f"    torch.set_grad_enabled(False)\n{BEGIN}", "torch.is_grad_enabled() is False, expected True"),
    "default dtype": (
        f"    torch.set_default_dtype(torch.float64)\n{BEGIN}",
        "torch.get_default_dtype() is torch.float64",
    ),
    "input": (f"    chunk, mine = chunk.clone(), chunk\n    mine[0] = 7\n{BEGIN}", "`chunk`: 1 of 4 are wrong"),
}
RETURNED = {
    "dtype": ("[one.double() for one in chunks]", "result[0] is torch.float64, not torch.float32"),
    "gradient": ("[one.requires_grad_() for one in chunks]", "result[0] requires a gradient"),
    "parameter": ("[torch.nn.Parameter(one, False) for one in chunks]", "result[0] is a Parameter, not a Tensor"),
    "shape": ("[one[None] for one in chunks]", "result[0] has the shape (1, 4), not (4,)"),
    "type": ("[one.tolist() for one in chunks]", "result[0] is a list, not a Tensor"),
    "length": ("chunks + chunks", "the result has 2 items, not 1"),
    "nothing": ("None", "the result is None"),
    "fresh": ("[torch.empty_like(one) for one in chunks]", "result[0]: all 4 elements are wrong"),
    "zero": ("[0 * one for one in chunks]", "result[0]: all 4 elements are wrong, the first at [0]: 0, expected"),
    "infinite": ("[one / 0 for one in chunks]", "result[0]: all 4 elements are wrong, the first at [0]: inf"),
    "another order": ("[one.flip(0) for one in chunks]", "; the elements are there, in another order"),
    "bytes": ("(exchange(chunk, rank, rank), chunks)[1]", "this rank sent 16 bytes, and 0 are enough"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_left_behind_is_seen(name: str) -> None:
    line, seen = SEEN[name]
    verdict = judge.try_answer("01.2", "import torch\n" + edit(REFERENCE, BEGIN, line))
    assert not verdict.passed and seen in verdict.seen, verdict.text
    assert judge.try_answer("01.2", REFERENCE).passed  # nothing of it is left on the ranks


@pytest.mark.parametrize("kind", RETURNED)
def test_each_kind_of_difference_is_seen_and_has_its_sentence(kind: str) -> None:
    returned, seen = RETURNED[kind]
    source = "import torch\n" + edit(REFERENCE, "return chunks", f"return {returned}")
    verdict = judge.try_answer("01.2", source, told=False)
    assert not verdict.passed and seen in verdict.seen, verdict.text
    assert verdict.likely == (KINDS | MADE)[kind]


def test_a_rank_that_is_wrong_alone_is_named_and_the_others_are_right() -> None:
    source = edit(REFERENCE, "return chunks", "return [c + (rank == 1) for c in chunks]")
    verdict = judge.try_answer("01.2", source)
    assert "N=1 ok · N=2 wrong" in verdict.text and "rank 1, result[0]: all 4 elements are wrong" in verdict.text
    assert "(rank 0 is right)" in verdict.text


TOLD_FROM_THE_VALUES = {  # (exercise, mistake): what is seen, and what to look at if no mistake is known
    ("03.3", "skips zeros"): ("rank 1 of the group sends", judge.DIFFERENT),
    ("06.1", "its own first"): ("; that is another rank's part", MADE["the part"]),
    ("09.2", "in forward only"): ("gathered ahead while blocks.1 works is [], expected ['blocks.3']", MADE["["]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("id", "name"), TOLD_FROM_THE_VALUES)
def test_what_is_told_of_a_mistake_that_nobody_knows_is_true(id: str, name: str) -> None:
    verdict = judge.try_answer(id, mistakes_of(id)[name].source, told=False)
    seen, likely = TOLD_FROM_THE_VALUES[id, name]
    assert seen in verdict.seen and verdict.likely == likely, verdict.text


ASTRAY = {  # how a ring that adds into its chunks goes wrong, and what is made of whose parts come out
    "elsewhere": ("return chunks[rank]", "return chunks[rank - 1]"),
    "mixed": ("rank - step - 1", "rank - step"),
    "factor": ("return chunks[rank]", "return chunks[rank] / world_size"),
    "another's": ("+= exchange", "= 2 * exchange"),
    "twice": ("+= exchange", "+= 2 * exchange"),
    "twice, on one rank": ("range(world_size - 1)", "range(world_size)"),
    "missing": ("range(world_size - 1)", "range(world_size - 2)"),
}


@pytest.mark.parametrize("name", ASTRAY)
def test_what_is_told_of_parts_says_which_went_astray(name: str) -> None:
    verdict = judge.try_answer("01.1", edit(REDUCE_SCATTER_INTO_CHUNKS, *ASTRAY[name]), told=False)
    assert "of chunk" in verdict.seen and verdict.likely == OF_PARTS[name.split(",")[0]], verdict.text


def test_what_was_wrong_before_an_event_was_not_changed_by_it() -> None:
    verdict = judge.try_answer("03.2", mistakes_of("03.2")["divided in write_back"].source, told=False)
    assert "self.flat of the first bucket" in verdict.seen and verdict.likely != KINDS["changed"], verdict.text


def test_what_an_answer_does_its_own_way_hides_no_mistake() -> None:
    known = mistakes_of("06.1")["releases nothing"].says
    told = nearest("06.1", signatures_of("06.1")["releases nothing"] | {"own 1", "own 2", "own 3"})
    assert told and told.says == known
    assert not nearest("06.1", {f"own {i}" for i in range(9)})


def test_memory_that_is_more_than_the_reference_s_is_a_bound() -> None:
    reference = EXERCISES["02.1"].reference
    source = edit(reference, "    views, offset", "    flat = flat.repeat(2)[:size]\n    views, offset")
    verdict = judge.try_answer("02.1", source, told=False)
    assert "bytes that `flat` keeps alive: 192, at most 96" in verdict.seen, verdict.text
    assert verdict.likely == KINDS["bound"]


AVERAGE = EXERCISES["03.1"].reference
REDUCES = "dist.all_reduce(param.grad)"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[float, int, float]]:
    """asked(values): what `at_most` finds where the reference has 8, after how many sleeps and seconds of its clock."""
    now, sleeps = [0.0], []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        now[0] += stalls.pop() if stalls else seconds

    monkeypatch.setattr(observing, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    world, stalls = SimpleNamespace(rank=0), []
    reference = Play(None, world, [0], group="a group")
    reference.tape.append(Event("a step"))
    reference.at_most("bytes", lambda: 8)
    play = Play(None, world, [0], group="a group", reference=reference)
    play.tape.append(Event("a step"))

    def ask(*values: float, stands_still: float = 0.0, number: bool = False) -> tuple[float, int, float]:
        """values: what is there each time; the last of them from then on. stands_still: the machine, in each sleep.

        number: the first of them is all that `at_most` gets.
        """
        before, begin, coming = len(sleeps), now[0], [*values]
        stalls[:] = [stands_still] * 20 if stands_still else []
        play.at_most("bytes", values[0] if number else lambda: coming.pop(0) if len(coming) > 1 else coming[0])
        return play.tape[-1].bounds["bytes"], len(sleeps) - before, now[0] - begin

    return ask


def test_a_bound_is_asked_again_until_it_holds(asked: Callable) -> None:
    assert asked(8) == (8, 0, 0.0)
    for _ in range(3):  # and what came down in time shortens no later wait
        assert asked(*[9] * 150, 8)[:2] == (8, 150)
    assert asked(*[9] * 20, 8, stands_still=40.0)[:2] == (8, 20)  # the machine stood still, which does not count


def test_a_bound_that_does_not_hold_is_waited_for_a_quarter_as_long_each_time(asked: Callable) -> None:
    found, _, seconds = zip(*[asked(9) for _ in range(4)], strict=True)
    assert found == (9,) * 4
    assert seconds == pytest.approx((2.0, 0.5, 0.125, 0.03125), abs=0.011)
    assert asked(8) == (8, 0, 0.0)


def test_a_number_is_not_waited_for_and_shortens_no_later_wait(asked: Callable) -> None:
    assert [asked(9, number=True) for _ in range(3)] == [(9, 0, 0.0)] * 3
    assert asked(9)[2] == pytest.approx(2.0, abs=0.011)


def test_what_was_not_waited_for_is_told_before_what_came_of_it() -> None:
    source = edit(AVERAGE, REDUCES, "param.grad = param.grad * 3; dist.all_reduce(param.grad, async_op=True)")
    verdict = judge.try_answer("03.1", source, told=False)
    assert "gradient 0: all 5 elements are wrong" in verdict.seen
    assert verdict.likely == KINDS["waiting"]


def test_an_error_after_a_difference_is_a_consequence() -> None:
    source = edit(EXERCISES["03.2"].reference, "view.copy_(param.grad)", "self.flat = None")
    verdict = judge.try_answer("03.2", source, told=False)
    assert verdict.kind == "wrong" and "not so: self.flat is a tensor of one dimension" in verdict.seen


def test_an_error_is_told_with_its_scene_its_event_and_its_line() -> None:
    source = edit(AVERAGE, "if param.grad is not None:", "if True:")
    verdict = judge.try_answer("03.1", source, told=False)
    assert "with parameters that were not used, in average() with 1 unused: " in verdict.seen
    assert f"· line 9: {REDUCES}" in verdict.seen
    assert verdict.likely == "a parameter that no rank used has no gradient, and must have none afterwards; the " + (
        "others have, so go on"
    )


def test_a_none_is_told_as_a_collective_s_only_where_the_answer_uses_what_one_returns() -> None:
    asked = EXERCISES["17.1"].reference
    batch = edit(asked, "ReduceOp.MIN", "ReduceOp.MAX")
    flag = edit(
        asked, "        dist.all_reduce(everyone,", "        everyone = dist.all_reduce(everyone,", "== 0", "+ 0"
    )
    said = {
        name: judge.try_answer("17.1", source, told=False, sizes=(2,))
        for name, source in (("batch", batch), ("flag", flag))
    }
    assert all("NoneType" in verdict.seen for verdict in said.values())
    assert "returns None" in said["flag"].likely and "returns None" not in said["batch"].likely
    helper = edit(EXERCISES["14.2"].reference, "    return loss, (", "    loss, (")  # the engine's calls come before it
    said["helper"] = judge.try_answer("14.2", helper, told=False, sizes=(2,))
    assert "NoneType" in said["helper"].seen and "returns None" not in said["helper"].likely


# Of an answer that is like no known mistake: an exercise, an edit of its reference, what is seen, and what is likely.
LIKELY = {
    "a method that returns nothing": ("04.2", "return unit.layout.slices", "unit.layout.slices", "adopt()", "NoneType"),
    "a module that is none yet": ("20.1", "        super().__init__()\n", "", "", "has no attribute '_parameters'"),
    "a name that is not there": ("23.1", "    ends, start = [0], 0\n", "", "· line 4: ends +=", RAISED),
    "a number": ("17.1", "            return steps\n", "            return steps + 1\n", "is 3, expected 2", "number"),
    "a factor": ("02.1", "param.detach()", "2 * param.detach()", "; that is 2 times what is expected", "times"),
    "no result": ("18.2", "    return {", "    checkpoint = {", "rank 0, the result is None", "nothing"),
}


@pytest.mark.parametrize("name", LIKELY)
def test_what_is_likely_follows_from_what_is_seen(name: str) -> None:
    id, old, new, seen, likely = LIKELY[name]
    verdict = judge.try_answer(id, edit(EXERCISES[id].reference, old, new), told=False, sizes=(1,))
    assert seen in verdict.text and verdict.likely == (KINDS | MADE | LEFT_BEHIND).get(likely, likely), verdict.text


def test_where_the_text_leaves_a_difference_open_it_is_a_note() -> None:
    bucket = edit(EXERCISES["03.2"].reference, ", dtype=params[0].dtype", "")
    verdict = judge.try_answer("03.2", bucket)
    assert verdict.passed and "note     for float32 only" in verdict.text


def test_the_engine_of_an_answer_keeps_no_memory_that_the_references_does_not() -> None:
    source = edit(EXERCISES["05.1"].reference, "import zerolab\n", "import torch\nimport zerolab\n")
    verdict = judge.try_answer("05.1", source.rstrip() + "\n        self.kept = torch.zeros(99)\n", told=False)
    assert "bytes that the engine, its units and the file keep" in verdict.seen


@pytest.mark.parametrize("id", [id for id, asked in EXERCISES.items() if asked.battery])
def test_every_mistake_has_its_signature_and_no_other_has(id: str) -> None:
    known, kept = mistakes_of(id), signatures_of(id)
    assert known.keys() == kept.keys(), f"run python -m zerolab.lab.exercises.signatures {id[:2]}"
    for name, marks in kept.items():
        assert (told := nearest(id, marks)) and told.says == known[name].says, name
