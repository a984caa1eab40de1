"""Lesson 19: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson19 import CARRIES, VERDICT

from .sources import edit

# ---------------------------------------------------------------------- 19.1

CARRIES_BY_LENGTH = """\
def carries(payload, states, rank, world_size):
    def same(state):
        part = state
        if payload.numel() < state.numel():
            part = state.chunk(world_size)[rank]
        return part.shape == payload.shape and bool((part.to(payload.dtype) == payload).all())

    return {name for name in states if same(states[name])}
"""

CARRIES_BY_BYTES = """\
def carries(payload, states, rank, world_size):
    sealed = payload.tolist()
    names = []
    for name in sorted(states):
        numbers = states[name].to(payload.dtype).tolist()
        S = len(numbers) // world_size
        if sealed in (numbers, numbers[rank * S : (rank + 1) * S]):
            names += [name]
    return tuple(names)
"""

EITHER = "if torch.equal(payload, state) or torch.equal(payload, shard):"

CARRIES_MUTANTS = {
    "whole states only": (edit(CARRIES, EITHER, "if torch.equal(payload, state):"), "a rank gives its shard alone"),
    "shards only": (edit(CARRIES, EITHER, "if torch.equal(payload, shard):"), "is given the whole of it"),
    "rank 0's shard": (edit(CARRIES, "[rank]", "[0]"), "a rank gives its shard alone"),
    "any rank's shard": (
        edit(
            CARRIES, "torch.equal(payload, shard):", "any(torch.equal(payload, s) for s in state.view(world_size, -1)):"
        ),
        "that is another rank's shard",
    ),
    "every Nth element": (
        edit(CARRIES, "state.view(world_size, -1)[rank]", "state[rank::world_size]"),
        "a rank gives its",
    ),
    "the dtypes stay": (edit(CARRIES, "        state = state.to(payload.dtype)\n", ""), "was rounded on the way"),
    "widens the message": (
        edit(CARRIES, "        state = state.to(payload.dtype)\n", "        payload = payload.to(state.dtype)\n"),
        "was rounded on the way",
    ),
    "close enough": (
        edit(
            CARRIES,
            EITHER,
            "if any(len(payload) == len(s) and torch.allclose(payload, s, 1e-4, 1e-6) for s in (state, shard)):",
        ),
        "close is not equal",
    ),
    "the norm": (
        edit(
            CARRIES,
            EITHER,
            "if any(len(payload) == len(s) and payload.double().norm() == s.double().norm() for s in (state, shard)):",
        ),
        "the same numbers in another order",
    ),
    "the numbers, sorted": (
        edit(
            CARRIES,
            EITHER,
            "if any(torch.equal(payload.sort().values, s.sort().values) for s in (state, shard)):",
        ),
        "the same numbers in another order",
    ),
    "the last element": (
        edit(CARRIES, EITHER, "if any(len(payload) == len(s) and payload[-1] == s[-1] for s in (state, shard)):"),
        "all of them have to be",
    ),
    "by length": (edit(CARRIES, EITHER, "if len(payload) in (len(state), len(shard)):"), "all of them have to be"),
    "the first that fits": (edit(CARRIES, "found.append(name)", "return [name]"), "name them all"),
    "the last that fits": (edit(CARRIES, "found.append(name)", "found = [name]"), "name them all"),
    "nothing if it is not certain": (
        edit(CARRIES, "return found", "return found if len(found) == 1 else []"),
        "name them all",
    ),
    "a string": (edit(CARRIES, "return found", "return found[0] if found else ''"), "return a list of names"),
    "None for none": (edit(CARRIES, "return found", "return found or None"), "`return` is missing"),
    "nothing is returned": (edit(CARRIES, "    return found\n", ""), "`return` is missing"),
    "twice": (
        edit(
            CARRIES,
            EITHER + "\n            found.append(name)",
            "found += [name] * (torch.equal(payload, state) + torch.equal(payload, shard))",
        ),
        "a name appears twice",
    ),
    "the tensors": (edit(CARRIES, "found.append(name)", "found.append(state)"), "the keys of `states`"),
    "compares with ==": (edit(CARRIES, EITHER, "if (payload == state).all():"), "torch.equal says False to that"),
    "a message cut in shards": (
        edit(CARRIES, "    found = []\n", "    found = []\n    payload.view(world_size, -1)\n"),
        "cut the state, not the message",
    ),
    "the sizes of numbers": (
        edit(CARRIES, EITHER, "if any(torch.equal(payload.abs(), s.abs()) for s in (state, shard)):"),
        "the signs differ",
    ),
    "rounds the states for good": (
        edit(
            CARRIES,
            "        state = state.to(payload.dtype)\n",
            "        states[name] = state = state.to(payload.dtype)\n",
        ),
        "the states were written to",
    ),
}

# ---------------------------------------------------------------------- 19.2

VERDICT_IN_A_LOOP = """\
def verdict(claim, runs):
    counted, where = 0, []
    for run in runs:
        if run.stage == 0 or run.ranks == 1:
            continue
        for other in runs:
            if other.stage == 0 and other.ranks == run.ranks and other.dtype == run.dtype:
                counted += 1
                if claim(run, other):
                    where.append(run)
    if counted == 0:
        word = "not tried"
    elif len(where) == counted:
        word = "true"
    elif where:
        word = "true under a condition"
    else:
        word = "false"
    return word, where
"""

VERDICT_BY_SETS = """\
from dataclasses import dataclass


def ddp_of(run, runs):
    return next((r for r in runs if (r.stage, r.ranks, r.dtype) == (0, run.ranks, run.dtype)), None)


def verdict(claim, runs):
    pairs = [(run, ddp_of(run, runs)) for run in runs if run.stage and run.ranks >= 2]
    answers = [(bool(claim(run, ddp)), run) for run, ddp in pairs if ddp]
    words = {(): "not tried", (True,): "true", (False,): "false", (False, True): "true under a condition"}
    return [words[tuple(sorted({said for said, _ in answers}))], [run for said, run in answers if said]]
"""

TRIED = "if run.stage > 0 and run.ranks > 1 and (run.ranks, run.dtype) in ddps]"
BY_BOTH = "{(run.ranks, run.dtype): run for run in runs if run.stage == 0}"

VERDICT_MUTANTS = {
    "DDP is evidence": (edit(VERDICT, "run.stage > 0 and ", ""), "true"),
    "one rank is evidence": (edit(VERDICT, "run.ranks > 1 and ", ""), "not tried"),
    "one DDP for both dtypes": (
        edit(
            VERDICT, BY_BOTH, "{(run.ranks, d): run for d in ('float32', 'bfloat16') for run in runs if run.stage == 0}"
        ),
        "compared with a DDP of another dtype",
    ),
    "the first DDP": (
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run, next(iter(ddps.values())))"),
        "compared with a DDP o",
    ),
    "a DDP on any number of ranks": (
        edit(
            VERDICT,
            "(run.ranks, run.dtype): run for run",
            "(n, run.dtype): run for n in (1, 2, 3, 4) for run",
        ),
        "compared with a DDP on another number of ranks",
    ),
    "no partner, no check": (edit(VERDICT, " and (run.ranks, run.dtype) in ddps]", "]"), "such a run is no evidence"),
    "the two swapped": (
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(ddps[run.ranks, run.dtype], run)"),
        "the second run given to claim() is DDP's",
    ),
    "nothing tried is true": (
        edit(
            VERDICT,
            '    if not tried:\n        return "not tried", where\n',
            "",
            "    if not where:",
            "    if tried and not where:",
        ),
        "all([]) is True",
    ),
    "nothing tried is false": (
        edit(VERDICT, '    if not tried:\n        return "not tried", where\n', ""),
        "neither true nor false",
    ),
    "one case is enough": (
        edit(
            VERDICT,
            'return "true" if len(where) == len(tried) else "true under a condition", where',
            'return "true", where',
        ),
        "of some of the runs it is true",
    ),
    "the majority decides": (
        edit(VERDICT, "if len(where) == len(tried)", "if 2 * len(where) > len(tried)"),
        "of some of the runs it is true",
    ),
    "a counterexample makes it false": (
        edit(VERDICT, 'else "true under a condition", where', 'else "false", where'),
        "of some of the runs it is true",
    ),
    "always a condition": (
        edit(VERDICT, '"true" if len(where) == len(tried) else "true under a condition"', '"true under a condition"'),
        "no condition is left",
    ),
    "the word alone": (edit(VERDICT, ", where\n", "\n"), "return two things"),
    "the stages": (
        edit(VERDICT, '"true under a condition", where', '"true under a condition", [run.stage for run in where]'),
        "the second thing is a list of runs",
    ),
    "how many": (edit(VERDICT, ", where\n", ", len(where)\n"), "the second thing is a list"),
    "those of which it is false": (
        edit(VERDICT, "where = [run for run in tried if claim", "where = [run for run in tried if not claim"),
        "not the runs of which the claim is true",
    ),
    "sorted": (
        edit(
            VERDICT,
            "if claim(run, ddps[run.ranks, run.dtype])]",
            "if claim(run, ddps[run.ranks, run.dtype])]\n    where.sort(key=lambda run: run.stage)",
        ),
        "keep the order of `runs`",
    ),
    "sorts the runs": (
        edit(VERDICT, "    ddps =", "    runs.sort(key=lambda run: run.stage)\n    ddps ="),
        "the list was changed",
    ),
    "one run for each stage": (
        edit(VERDICT, "    where =", "    tried = list({run.stage: run for run in tried}.values())\n    where ="),
        "runs are missing on the list",
    ),
    "stage 3 alone": (edit(VERDICT, "run.stage > 0", "run.stage == 3"), "runs are missing on the list"),
    "conditionally": (edit(VERDICT, '"true under a condition"', '"conditional"'), "it is one of"),
    "True and False": (edit(VERDICT, '"false", where', "False, where"), "it is one of"),
    "DDP's bytes": (
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run, ddps[run.ranks, run.dtype].sent)"),
        "takes two runs",
    ),
    "one run": (edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run)"), "takes two runs"),
    "nothing is returned": (
        edit(VERDICT, '    return "true" if len(where) == len(tried) else "true under a condition", where\n', ""),
        "`return` is missing",
    ),
    "one DDP in all": (
        edit(
            VERDICT,
            "ddps = {(run.ranks, run.dtype): run for run in runs if run.stage == 0}",
            "ddp = next(run for run in runs if run.stage == 0)",
            " and (run.ranks, run.dtype) in ddps]",
            "]",
            "ddps[run.ranks, run.dtype]",
            "ddp",
        ),
        "may be no DDP",
    ),
}

RIGHT = {
    "19.1": (CARRIES_BY_LENGTH, CARRIES_BY_BYTES),
    "19.2": (VERDICT_IN_A_LOOP, VERDICT_BY_SETS),
}

WRONG = {
    "19.1": CARRIES_MUTANTS,
    "19.2": VERDICT_MUTANTS,
}
