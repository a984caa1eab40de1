"""The flight recorder: ranks that miss each other, and what every rank is told."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import jobs_flight
import pytest
from jobs_flight import told
from ports import free_ports
from test_launch import finish, python

import zerolab
from zerolab.comm import flight

pytestmark = pytest.mark.slow

PATIENCE = jobs_flight.PATIENCE.total_seconds()


@pytest.fixture(scope="module", autouse=True)
def warm(ranks: zerolab.Ranks) -> None:
    """A good run: what ranks import at their first step is imported, and not in the seconds that are counted here."""
    ranks.run(told, jobs_flight.train, "goes well", 3, ranks=4)


def one_table(results: list[tuple[str, str]]) -> str:
    """The table that exactly one rank printed, 80 columns wide."""
    (text,) = {text for _, text in results if text}
    assert sum(bool(text) for _, text in results) == 1
    assert max(map(len, text.splitlines())) == flight.WIDTH
    return text


def run(ranks: zerolab.Ranks, *job: object, size: int = 3) -> list[tuple[str, str]]:
    return ranks.run(told, *job, ranks=size, group_timeout=PATIENCE)


def test_a_slow_rank_is_named_with_the_line_that_it_is_in(ranks):
    results = run(ranks, jobs_flight.train, "oversleeps", 3)
    late = (
        r"rank 2 did not come to (#\d+ all-gather of root \(forward\)), for which ranks 0, 1 wait: it is at line \d+ "
    )
    for rank, (error, _) in enumerate(results):
        assert error.startswith(f"rank {rank} of 3: all-gather of root (forward) failed: ")
        what = re.search(late + r"of jobs_flight.py, in oversleep: store.wait\(keys, PATIENCE\)$", error).group(1)
    text = one_table(results)
    waits = re.search(
        rf"ranks 0, 1:\n  completed .*\n  waits in   {re.escape(what)} +(\(\d+,\)) float32 +([\d.]+) s\n", text
    )
    assert float(waits.group(2)) > jobs_flight.LIMIT.total_seconds() - 0.1
    assert re.search(r"\nrank 2:\n  completed .*\n  is at      line \d+ of jobs_flight.py, in oversleep", text)


def test_a_rank_that_waits_elsewhere_is_named_with_what_it_waits_for(ranks):
    """Rank 2 leaves out its reductions, and goes on to the engine's message at the end of backward."""
    results = ranks.run(told, jobs_flight.train, "skips", 1, ranks=3, group_timeout=PATIENCE)
    reduction, message = "reduce-scatter of blocks.1 (backward)", "exchange of used parameters (backward)"
    for rank, (error, _) in enumerate(results):
        mine, theirs = (message, reduction) if rank == 2 else (reduction, message)
        assert f"rank {rank}, {mine}: rank " in error and f" waits in {theirs} instead" in error, error


def test_a_collective_of_the_script_is_known_from_torch(ranks):
    results = run(ranks, jobs_flight.train, "hurries", 1)
    for error, _ in results[:2]:
        assert error.endswith("for which ranks 0, 1 wait: it waits in barrier, not the engine's"), error
    assert "  issued     barrier, not the engine's" in one_table(results)
    assert "go_wrong: dist.barrier()\n" in one_table(results)


def test_a_rank_that_skips_one_of_many_alike_is_found_later(ranks):
    """The others took the bytes of rank 2's c for b's, and the bytes of its d for c's. Only then does a rank wait."""
    results = run(ranks, jobs_flight.reduce, [4, 4, 4, 4])
    b, c = (f"reduce-scatter of {unit} (backward) (12,) float32" for unit in "bc")
    for rank, (error, _) in enumerate(results[:2]):
        assert error.startswith(f"rank {rank}, reduce-scatter of d (backward): rank 2 has finished")
        assert error.endswith(f"\nrank 2 skipped #2 {b} of ranks 0, 1: its #2 is {c}")
    assert results[2][0] == ""
    assert "#3 reduce-scatter of d (backward)" in one_table(results)


def test_ranks_that_died_or_stopped_are_named(ranks, tmp_path: Path):
    """Rank 2 is killed while rank 3 is stopped. `launch` knows the signal, the others know what they waited for."""
    with pytest.raises(zerolab.RankError) as caught:
        job = (jobs_flight.train, "dies", 3)
        ranks.run(jobs_flight.told_in_files, str(tmp_path), *job, ranks=4, group_timeout=PATIENCE)
    assert caught.value.rank == 2 and "rank 2 of 4 was killed by SIGKILL" in str(caught.value)
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank*.json"))]
    assert results
    for error, _ in results:
        waits = r"did not come to #\d+ all-gather of root \(forward\), for which ranks 0, 1 wait: process \d+ on \S+ is"
        assert re.search(rf"\nrank 2 {waits} dead\n", error), error
        assert re.search(rf"\nrank 3 {waits} stopped, by a signal or a debugger$", error), error
    text = one_table(results)
    assert re.search(r"\nrank 2:\n  no record: process \d+ on \S+ is dead\n", text)


def test_a_rank_that_skips_one_of_another_size_kills_another(ranks, tmp_path: Path):
    """gloo aborts a process that gets more than it expects. Its record is lost with it, so `launch` gives the hint."""
    with pytest.raises(zerolab.RankError) as caught:
        job = (jobs_flight.reduce, [4, 8, 4, 4])
        ranks.run(jobs_flight.told_in_files, str(tmp_path), *job, ranks=3, group_timeout=PATIENCE)
    hint = r"rank 2 of 3 was killed by SIGABRT \(as gloo .* has another one skipped a collective\?\), in "
    assert re.match(hint, str(caught.value))
    results = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("rank*.json"))]
    # A rank that got rank 2's bytes before it died took them for the bytes of #2, and waits in #3.
    assert results and all(re.search(r"\nrank 2 did not come to #[23] .* is dead$", error) for error, _ in results)


@pytest.mark.exhaustive
def test_a_store_that_does_not_answer_holds_nobody_up():
    """Rank 0 holds the store, and is stopped. A rank that asked the store now would wait forever."""
    world = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    first, second = [python(jobs_flight.__file__, 2.0, RANK=rank, **world) for rank in (0, 1)]
    try:
        _, err = finish(second)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        finish(first)
    assert "CommError: rank 1 of 2: all-gather of root (forward) failed: " in err, err
    assert "\nthe store does not answer, so nobody can be asked: its process (torchrun's agent" in err
    assert re.search(r"\nrank 1:\n  completed .*\n  waits in   #\d+ all-gather of root \(forward\) ", err)
    assert second.returncode == 1


# ---------------------------------------------------------------------- rows made by hand


def row(*names: str, waits: bool = True) -> flight.Row:
    """A rank that made these collectives and waits in the last one."""
    calls = [
        {
            "group": "0",
            "ranks": [0, 1],
            "number": number,
            "name": name,
            "what": f"#{number} {name}",
            "shape": "(4,) int8",
        }
        | {"state": "done", "seconds": 1.0}
        for number, name in enumerate(names, 1)
    ]
    if waits:
        calls[-1]["state"] = "waits"
    return {"calls": calls, "place": ""}


def test_of_two_ranks_the_one_that_is_ahead_has_skipped():
    said = "rank 1 skipped #1 gather of a (4,) int8 of rank 0: its #1 is gather of b (4,) int8"
    assert flight.verdict({0: row("gather of a", "gather of b"), 1: row("gather of b")}) == said
    assert flight.verdict({0: row("gather of a"), 1: row("gather of b")}).startswith("rank 0 did not take part in #1")


def test_a_rank_without_a_collective_and_a_network_without_a_rank():
    said = flight.verdict({0: row("gather of a"), 1: {"calls": [], "place": ""}})
    assert said == "rank 1 did not come to #1 gather of a, for which rank 0 waits: it is not in the script"
    said = flight.verdict({0: row("gather of a"), 1: row("gather of a")})
    assert (
        said
        == "all ranks came to #1 gather of a, for which ranks 0, 1 wait: the network between them is slow or broken"
    )
    assert flight.verdict({0: row("gather of a", waits=False), 1: {"silent": "died"}}) == ""


def test_names_that_are_too_long_for_a_line():
    rows = {rank: row(f"gather of {'very.' * 20}long") for rank in range(70)}
    text = flight.table(rows, 0, "a sentence " * 20)
    assert max(map(len, text.splitlines())) <= flight.WIDTH
    assert "ranks 0-69:\n  waits in   #1 gather of very." in text and "...  (4,) int8   1.0 s" in text
