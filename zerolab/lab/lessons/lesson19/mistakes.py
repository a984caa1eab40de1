"""Lesson 19: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson19 import CARRIES, VERDICT

ROUNDED = (
    "a state that travels in another dtype was rounded on the way: round the state in the same way, "
    "state.to(payload.dtype), before you compare"
)
NAME_ALL = "more than one state can have these numbers, and the evidence cannot tell them apart: name them all"
A_LIST = "return a list of names, also for one or none"
ORDER = "the list keeps the order of `runs`"
A_LIST_OF_RUNS = "the second thing is the list of the runs, as they are in `runs`, of which the claim is true"
THE_CONDITION = "the runs of which it is true are the condition: list them, and no others, whatever the word is"
THE_WORDS = 'the word is "true", "false", "true under a condition" or "not tried"'

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

CARRIES_MISTAKES = {
    "whole states only": Mistake(
        edit(CARRIES, EITHER, "if torch.equal(payload, state):"),
        ("in an all-gather a rank gives its shard alone: compare with the rank-th of N equal stretches, too"),
    ),
    "shards only": Mistake(
        edit(CARRIES, EITHER, "if torch.equal(payload, shard):"),
        ("a reduce-scatter is given the whole of a state: compare with that, too, and not only with a shard"),
    ),
    "rank 0's shard": Mistake(
        edit(CARRIES, "[rank]", "[0]"),
        "that is rank 0's shard: this rank's is the rank-th of N equal stretches, [rank]",
    ),
    "any rank's shard": Mistake(
        edit(
            CARRIES, "torch.equal(payload, shard):", "any(torch.equal(payload, s) for s in state.view(world_size, -1)):"
        ),
        ("any rank's shard counts here, and only this rank's is what it sends: the one with the number `rank`"),
    ),
    "the next rank's shard": Mistake(
        edit(CARRIES, "[rank]", "[(rank + 1) % world_size]"), "that is the next rank's shard: rank r owns stretch r"
    ),
    "from the end": Mistake(edit(CARRIES, "[rank]", "[-rank]"), "counted from the end: rank r owns stretch r, [rank]"),
    "asks the process group": Mistake(
        edit(
            CARRIES,
            "    found = []",
            "    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()\n    found = []",
        ),
        "take the rank and the number of ranks from the arguments: states may be cut for other ranks than are running",
    ),
    "anywhere in the state": Mistake(
        edit(
            CARRIES,
            EITHER,
            "if any(torch.equal(payload, state[i : i + len(payload)]) for i in range(len(state))):",
        ),
        "a stretch from anywhere in the state is no message: it is the whole of it, or this rank's shard",
    ),
    "whatever is in it": Mistake(
        edit(CARRIES, EITHER, "if torch.isin(payload, state).all():"),
        "the same numbers in another order are no state: compare element by element",
    ),
    "the same memory": Mistake(
        edit(CARRIES, EITHER, "if payload.data_ptr() in (state.data_ptr(), shard.data_ptr()):"),
        "nothing was recognised: a message is a copy, in memory of its own, so compare the numbers",
    ),
    "both": Mistake(edit(CARRIES, ") or torch", ") and torch"), "a message is the whole or a shard: `or`, not `and`"),
    "at its name it stops": Mistake(
        edit(CARRIES, "found.append(name)", "found.append(name)\n            break"), NAME_ALL
    ),
    "one state alone": Mistake(
        edit(CARRIES, "    return found", "        return found"),
        "only the first state was compared: `return` belongs behind the loop",
    ),
    "numbers in place of names": Mistake(
        edit(CARRIES, "found.append(name)", "found.append(list(states).index(name))"),
        "return names: the keys of `states`, not what they stand for",
    ),
    "every Nth element": Mistake(
        edit(CARRIES, "state.view(world_size, -1)[rank]", "state[rank::world_size]"),
        "a shard is a stretch of elements side by side, the rank-th of N, not every Nth element",
    ),
    "the dtypes stay": Mistake(edit(CARRIES, "        state = state.to(payload.dtype)\n", ""), ROUNDED),
    "widens the message": Mistake(
        edit(CARRIES, "        state = state.to(payload.dtype)\n", "        payload = payload.to(state.dtype)\n"),
        ROUNDED,
    ),
    "close enough": Mistake(
        edit(
            CARRIES,
            EITHER,
            "if any(len(payload) == len(s) and torch.allclose(payload, s, 1e-4, 1e-6) for s in (state, shard)):",
        ),
        "close is not equal: a step changes a parameter by a thousandth, so compare with torch.equal",
    ),
    "the norm": Mistake(
        edit(
            CARRIES,
            EITHER,
            "if any(len(payload) == len(s) and payload.double().norm() == s.double().norm() for s in (state, shard)):",
        ),
        "other numbers can have the same norm: compare element by element",
    ),
    "the numbers, sorted": Mistake(
        edit(
            CARRIES,
            EITHER,
            "if any(torch.equal(payload.sort().values, s.sort().values) for s in (state, shard)):",
        ),
        "the same numbers in another order are no state: compare element by element",
    ),
    "the last element": Mistake(
        edit(CARRIES, EITHER, "if any(len(payload) == len(s) and payload[-1] == s[-1] for s in (state, shard)):"),
        "one element that is equal is not enough: all of them have to be",
    ),
    "by length": Mistake(
        edit(CARRIES, EITHER, "if len(payload) in (len(state), len(shard)):"),
        "all states have the same length: compare the numbers, not how many there are",
    ),
    "the first that fits": Mistake(edit(CARRIES, "found.append(name)", "return [name]"), NAME_ALL),
    "the last that fits": Mistake(edit(CARRIES, "found.append(name)", "found = [name]"), NAME_ALL),
    "nothing if it is not certain": Mistake(
        edit(CARRIES, "return found", "return found if len(found) == 1 else []"), NAME_ALL
    ),
    "a string": Mistake(edit(CARRIES, "return found", "return found[0] if found else ''"), A_LIST),
    "None for none": Mistake(edit(CARRIES, "return found", "return found or None"), A_LIST),
    "nothing is returned": Mistake(
        edit(CARRIES, "    return found\n", ""), "the function returns nothing: `return` is missing"
    ),
    "twice": Mistake(
        edit(
            CARRIES,
            EITHER + "\n            found.append(name)",
            "found += [name] * (torch.equal(payload, state) + torch.equal(payload, shard))",
        ),
        "a name appears twice: on one rank the shard is the whole, and either match is enough",
    ),
    "the tensors": Mistake(
        edit(CARRIES, "found.append(name)", "found.append(state)"),
        "return names: the keys of `states`, not what they stand for",
    ),
    "compares with ==": Mistake(
        edit(CARRIES, EITHER, "if (payload == state).all():"),
        ("comparing tensors of other lengths with == raises: torch.equal gives one True or False for any two"),
    ),
    "a message cut in shards": Mistake(
        edit(CARRIES, "    found = []\n", "    found = []\n    payload.view(world_size, -1)\n"),
        "a message need not divide by the number of ranks: cut the state, not the message",
    ),
    "the sizes of numbers": Mistake(
        edit(CARRIES, EITHER, "if any(torch.equal(payload.abs(), s.abs()) for s in (state, shard)):"),
        "the signs differ: compare the numbers themselves, not their absolute values",
    ),
    "rounds the states for good": Mistake(
        edit(
            CARRIES,
            "        state = state.to(payload.dtype)\n",
            "        states[name] = state = state.to(payload.dtype)\n",
        ),
        "the states were written to: work on a copy, under another name",
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

BY_BOTH = "{(run.ranks, run.dtype): run for run in runs if run.stage == 0}"

VERDICT_MISTAKES = {
    "DDP is evidence": Mistake(
        edit(VERDICT, "run.stage > 0 and ", ""), "DDP itself was counted: the claims are about ZeRO, stages 1 to 3"
    ),
    "one rank is evidence": Mistake(
        edit(VERDICT, "run.ranks > 1 and ", ""),
        "a run on one rank was counted: there is nobody to share with, so it is no evidence",
    ),
    "one DDP for both dtypes": Mistake(
        edit(
            VERDICT, BY_BOTH, "{(run.ranks, d): run for d in ('float32', 'bfloat16') for run in runs if run.stage == 0}"
        ),
        ("compared with a DDP of another dtype: bfloat16 is a difference of its own, so look for the same dtype"),
    ),
    "a set": Mistake(
        edit(
            VERDICT,
            "where = [run for run in tried if claim(run, ddps[run.ranks, run.dtype])]",
            "where = list({run for run in tried if claim(run, ddps[run.ranks, run.dtype])})",
        ),
        ORDER,
    ),
    "backwards": Mistake(edit(VERDICT, "run in tried if claim", "run in reversed(tried) if claim"), ORDER),
    "no list under a condition": Mistake(
        edit(
            VERDICT, '"true under a condition", where', '"true under a condition", where * (len(where) == len(tried))'
        ),
        THE_CONDITION,
    ),
    "all that was tried": Mistake(
        edit(VERDICT, '"true under a condition", where', '"true under a condition", tried'), THE_CONDITION
    ),
    "numbers of runs": Mistake(
        edit(VERDICT, "where = [run for run in tried", "where = [i for i, run in enumerate(tried)"), A_LIST_OF_RUNS
    ),
    "false and not tried swapped": Mistake(
        edit(
            VERDICT,
            '"false", where',
            '"not tried", where',
            'not tried:\n        return "not tried"',
            'not tried:\n        return "false"',
        ),
        "false is what some run could have contradicted and all did; not tried is what no run could tell",
    ),
    "false is true": Mistake(
        edit(VERDICT, 'return "false", where', 'return "true", where'),
        "a claim that is true of none of the evidence is false",
    ),
    "one run is not enough": Mistake(
        edit(VERDICT, "if not tried:", "if len(tried) < 2:"), "one run with a DDP to compare is evidence, too"
    ),
    "more than two ranks": Mistake(
        edit(VERDICT, "run.ranks > 1", "run.ranks > 2"), "two ranks share, too: runs on more than one rank count"
    ),
    "float32 alone": Mistake(
        edit(VERDICT, "run.stage > 0 and", "run.dtype == 'float32' and run.stage > 0 and"),
        "runs in bfloat16 are evidence, too, each with its own DDP",
    ),
    "by the number of parameters": Mistake(
        edit(VERDICT, "(run.ranks, run.dtype)", "(run.parameters, run.dtype)", "[run.ranks,", "[run.parameters,"),
        "compared with a DDP on another number of ranks: look for one with as many",
    ),
    "the DDP before it": Mistake(
        """\
def verdict(claim, runs):
    ddp, tried, where = None, [], []
    for run in runs:
        if run.stage == 0:
            ddp = run
        elif ddp and run.ranks > 1:
            tried.append(run)
            if claim(run, ddp):
                where.append(run)
    if not tried:
        return "not tried", where
    return ("true" if where == tried else "true under a condition" if where else "false"), where
""",
        "the runs come in any order: DDP may stand behind those that are compared with it",
    ),
    "the first DDP": Mistake(
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run, next(iter(ddps.values())))"),
        "compared with the first DDP: look for the one with as many ranks and the same dtype",
    ),
    "a DDP on any number of ranks": Mistake(
        edit(
            VERDICT,
            "(run.ranks, run.dtype): run for run",
            "(n, run.dtype): run for n in (1, 2, 3, 4) for run",
        ),
        "compared with a DDP on another number of ranks: look for one with as many",
    ),
    "no partner, no check": Mistake(
        edit(VERDICT, " and (run.ranks, run.dtype) in ddps]", "]"),
        "there may be no DDP with as many ranks and the same dtype: such a run is no evidence",
    ),
    "the two swapped": Mistake(
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(ddps[run.ranks, run.dtype], run)"),
        "claim(run, ddp): the run that is tried comes first, and DDP's second",
    ),
    "nothing tried is true": Mistake(
        edit(
            VERDICT,
            '    if not tried:\n        return "not tried", where\n',
            "",
            "    if not where:",
            "    if tried and not where:",
        ),
        "without evidence a claim was not tried: all([]) is True, and proves nothing",
    ),
    "nothing tried is false": Mistake(
        edit(VERDICT, '    if not tried:\n        return "not tried", where\n', ""),
        "there is no run that could tell, so this is neither true nor false: not tried",
    ),
    "one case is enough": Mistake(
        edit(
            VERDICT,
            'return "true" if len(where) == len(tried) else "true under a condition", where',
            'return "true", where',
        ),
        "of some of the runs it is true, and not of others: true under a condition",
    ),
    "the majority decides": Mistake(
        edit(VERDICT, "if len(where) == len(tried)", "if 2 * len(where) > len(tried)"),
        "most is not all: of some of the runs it is true, and not of others, so true under a condition",
    ),
    "a counterexample makes it false": Mistake(
        edit(VERDICT, 'else "true under a condition", where', 'else "false", where'),
        ("one counterexample makes it not true, but false only if it is true of none: else true under a condition"),
    ),
    "always a condition": Mistake(
        edit(VERDICT, '"true" if len(where) == len(tried) else "true under a condition"', '"true under a condition"'),
        "it is true of all the evidence: no condition is left",
    ),
    "the word alone": Mistake(
        edit(VERDICT, ", where\n", "\n"), "return two things: the word, and the list of runs of which the claim is true"
    ),
    "the stages": Mistake(
        edit(VERDICT, '"true under a condition", where', '"true under a condition", [run.stage for run in where]'),
        A_LIST_OF_RUNS,
    ),
    "how many": Mistake(edit(VERDICT, ", where\n", ", len(where)\n"), A_LIST_OF_RUNS),
    "those of which it is false": Mistake(
        edit(VERDICT, "where = [run for run in tried if claim", "where = [run for run in tried if not claim"),
        "on the list are the runs of which the claim is false",
    ),
    "sorted": Mistake(
        edit(
            VERDICT,
            "if claim(run, ddps[run.ranks, run.dtype])]",
            "if claim(run, ddps[run.ranks, run.dtype])]\n    where.sort(key=lambda run: run.stage)",
        ),
        ORDER,
    ),
    "sorts the runs": Mistake(
        edit(VERDICT, "    ddps =", "    runs.sort(key=lambda run: run.stage)\n    ddps ="),
        "the list of runs was changed: make another one",
    ),
    "one run for each stage": Mistake(
        edit(VERDICT, "    where =", "    tried = list({run.stage: run for run in tried}.values())\n    where ="),
        "every run counts, also several of one stage: each with its own DDP",
    ),
    "stage 3 alone": Mistake(
        edit(VERDICT, "run.stage > 0", "run.stage == 3"), "the evidence are stages 1, 2 and 3, not only the last"
    ),
    "conditionally": Mistake(edit(VERDICT, '"true under a condition"', '"conditional"'), THE_WORDS),
    "True and False": Mistake(edit(VERDICT, '"false", where', "False, where"), THE_WORDS),
    "DDP's bytes": Mistake(
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run, ddps[run.ranks, run.dtype].sent)"),
        "claim(run, ddp) takes two runs, the whole of each: the one that is tried, and its DDP",
    ),
    "one run": Mistake(
        edit(VERDICT, "claim(run, ddps[run.ranks, run.dtype])", "claim(run)"),
        "claim(run, ddp) takes two runs, the whole of each: the one that is tried, and its DDP",
    ),
    "None without evidence": Mistake(
        edit(VERDICT, 'return "not tried", where', 'return "not tried", None'),
        "a list, too, where there is no evidence: an empty one",
    ),
    "nothing is returned": Mistake(
        edit(VERDICT, '    return "true" if len(where) == len(tried) else "true under a condition", where\n', ""),
        "the function returns nothing: `return` is missing",
    ),
    "one DDP in all": Mistake(
        edit(
            VERDICT,
            "ddps = {(run.ranks, run.dtype): run for run in runs if run.stage == 0}",
            "ddp = next(run for run in runs if run.stage == 0)",
            " and (run.ranks, run.dtype) in ddps]",
            "]",
            "ddps[run.ranks, run.dtype]",
            "ddp",
        ),
        "compared with the first DDP: look for the one with as many ranks and the same dtype",
    ),
}

RIGHT = {
    "19.1": (CARRIES_BY_LENGTH, CARRIES_BY_BYTES),
    "19.2": (VERDICT_IN_A_LOOP, VERDICT_BY_SETS),
}

MISTAKES = {
    "19.1": CARRIES_MISTAKES,
    "19.2": VERDICT_MISTAKES,
}
