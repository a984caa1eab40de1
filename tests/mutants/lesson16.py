"""Lesson 16: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson16 import FEWEST, PLAN

from .sources import edit

FEWEST_BY_HAND = """\
from math import ceil


def fewest_gpus(parameters, memory, activations):
    M, P = memory - activations, parameters
    return {
        0: 1 if 16 * P <= M else None,
        1: ceil(12 * P / (M - 4 * P)) if M > 4 * P else None,
        2: ceil(14 * P / (M - 2 * P)) if M > 2 * P else None,
        3: ceil(14 * P / M) if M > 0 else None,
    }
"""

FEWEST_BY_TRYING = """\
def held(stage, n):
    return {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 14 / n}[stage]


def fewest_gpus(parameters, memory, activations):
    room = (memory - activations) / parameters  # bytes for each parameter

    def first(stage):
        if held(stage, 10**12) > room:
            return None
        n = 1
        while held(stage, n) > room:
            n *= 2
        return next(k for k in range(n // 2 or 1, n + 1) if held(stage, k) <= room)

    return {stage: first(stage) for stage in range(4)}
"""

WHERE_IT_ENDS = "max(1, math.ceil(shared[stage] * parameters / room))"

FEWEST_MUTANTS = {
    "rounds down": (edit(FEWEST, "math.ceil(", "math.floor("), "round up, not down"),
    "forgets the activations": (edit(FEWEST, "memory - activations - ", "memory - "), "activations were forgotten"),
    "shares the activations": (
        edit(
            FEWEST,
            "memory - activations - ",
            "memory - ",
            "shared[stage] * parameters / room",
            "(shared[stage] * parameters + activations) / room",
        ),
        "the activations were sharded",
    ),
    "the paper's stage 3": (edit(FEWEST, "2: 14, 3: 14}", "2: 14, 3: 16}"), "no 16-bit copy is kept"),
    "float32's bytes": (
        edit(FEWEST, "1: 4, 2: 2, 3: 0}", "1: 8, 2: 4, 3: 0}", "1: 12, 2: 14, 3: 14", "1: 8, 2: 12, 3: 16"),
        "means that no number of GPUs is enough",
    ),
    "shares everything out": (
        edit(FEWEST, "1: 4, 2: 2, 3: 0}", "1: 0, 2: 0, 3: 0}", "1: 12, 2: 14, 3: 14", "1: 16, 2: 16, 3: 14"),
        "all 16 bytes were sharded",
    ),
    "stage 0 on more GPUs": (
        edit(FEWEST, "1 if room >= 0 else None", "max(1, math.ceil(16 * parameters / (memory - activations)))"),
        "stage 0 shards nothing",
    ),
    "no None": (
        edit(
            FEWEST, "            result[stage] = None\n        else", "            result[stage] = 10**6\n        else"
        ),
        "no number of GPUs is enough",
    ),
    "a fraction of a GPU": (
        edit(FEWEST, WHERE_IT_ENDS, "shared[stage] * parameters / room"),
        "you cannot buy half a GPU",
    ),
    "one to spare": (edit(FEWEST, WHERE_IT_ENDS, "int(shared[stage] * parameters // room) + 2"), "one too many"),
    "returns nothing": (edit(FEWEST, "    return result\n", ""), "`return` is missing"),
    "gigabytes": (edit(FEWEST, "memory - activations -", "memory * 1e9 - activations -"), "already in bytes"),
    "divides by what is not there": (edit(FEWEST, "room <= 0", "room < 0"), "there is no room left"),
    "gradients not shared": (
        edit(FEWEST, "2: 2, 3: 0}", "2: 4, 3: 0}", "2: 14, 3: 14}", "2: 12, 3: 14}"),
        "the gradients were not sharded",
    ),
    "rounds to the nearest": (edit(FEWEST, "math.ceil(", "round("), "round up, not down"),
    "not to the last byte": (edit(FEWEST, "1 if room >= 0 else None", "1 if room > 0 else None"), "to the last byte"),
    "a search that stops at 256": (
        edit(FEWEST_BY_TRYING, "10**12", "256", "n *= 2", "n += 1", "n // 2 or 1", "n"),
        "a search stopped too early",
    ),
    "a search that stops at 10,000": (
        edit(FEWEST_BY_TRYING, "10**12", "10_000", "n *= 2", "n += 1", "n // 2 or 1", "n"),
        "a search stopped too early",
    ),
    "a search that stops at 2**20": (edit(FEWEST_BY_TRYING, "10**12", "2**20"), "a search stopped too early"),
    "powers of two": (
        edit(
            FEWEST_BY_TRYING, "return next(k for k in range(n // 2 or 1, n + 1) if held(stage, k) <= room)", "return n"
        ),
        "not only powers of two",
    ),
    "whole nodes": (edit(FEWEST, WHERE_IT_ENDS, f"-(-{WHERE_IT_ENDS} // 8) * 8"), "whole nodes"),
    "True for 1": (edit(FEWEST, "1 if room >= 0 else None", "(room >= 0) or None"), "not True or False"),
    "negative room": (
        edit(FEWEST, "elif room <= 0:", "elif room == 0:"),
        "None",
    ),
    "a float": (edit(FEWEST, WHERE_IT_ENDS, f"float({WHERE_IT_ENDS})"), "make it an int"),
    "gradients forgotten": (edit(FEWEST, "2: 14, 3: 14}", "2: 12, 3: 12}"), "which of 2 + 2 + 12 does it shard"),
}

# ---------------------------------------------------------------------- 16.2

PLAN_MUTANTS = {
    "does not fit": (edit(PLAN, '"stage": 3', '"stage": 2'), "without any sequence it needs"),
    "one sequence too many": (edit(PLAN, '"sequences": 6', '"sequences": 7'), "without any sequence it needs"),
    "replicated": (edit(PLAN, '"stage": 3', '"stage": 0', '"sequences": 6', '"sequences": 1'), "a higher stage"),
    "one node": (edit(PLAN, '"gpus": 32, "sequences": 6', '"gpus": 8, "sequences": 4'), "more GPUs"),
    "waits for the wires": (edit(PLAN, '"sequences": 6', '"sequences": 4'), "the GPUs wait for the network"),
    "half a node": (edit(PLAN, "32", "28"), "use whole nodes"),
    "nodes": (edit(PLAN, "32", "4"), "the number of nodes"),
    "takes an argument": (edit(PLAN, "def plan()", "def plan(gpus)"), "its arguments must stay"),
    "more than there are": (edit(PLAN, "32", "64"), "the customer has 32"),
    "words": (edit(PLAN, '"stage": 3', '"stage": "Zero3"'), "it must be a whole number"),
}

RIGHT = {
    "16.1": (FEWEST_BY_HAND, FEWEST_BY_TRYING),
    "16.2": (edit(PLAN, "6}", "5}"), edit(PLAN, "32", "24", "6}", "5}")),
}

WRONG = {
    "16.1": FEWEST_MUTANTS,
    "16.2": PLAN_MUTANTS,
}
