"""Lesson 16: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson16 import FEWEST, PLAN

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

FEWEST_IN_FRACTIONS = """\
import math
from collections import defaultdict
from fractions import Fraction


def fewest_gpus(parameters: int, memory: float, activations: float):
    room = Fraction(memory) - Fraction(activations)
    needed = defaultdict(lambda: None)
    needed[0] = None if room < 16 * parameters else 1
    for stage, (kept, sharded) in {3: (0, 14), 2: (2, 14), 1: (4, 12)}.items():
        left = room - kept * parameters
        needed[stage] = math.ceil(sharded * parameters / left) if left > 0 else None
    return needed
"""

NO_NUMBER = "where there is no room for what is sharded, no number of GPUs is enough: that is None, and not a number"
BYTES = "memory is already in bytes, and so are the activations: convert nothing"
THEIR_OWN = "the activations were sharded: every GPU has its own, however many there are"
KEYS = "a dictionary, with the stages 0, 1, 2 and 3 as its keys"
SEARCH = "it does fit, on very many GPUs: the search stopped too early; solve for N instead of trying"

WHERE_IT_ENDS = "max(1, math.ceil(shared[stage] * parameters / room))"

FEWEST_MISTAKES = {
    "rounds down": Mistake(
        edit(FEWEST, "math.ceil(", "math.floor("), "rounded down, so it does not fit yet: round up, with math.ceil"
    ),
    "forgets the activations": Mistake(
        edit(FEWEST, "memory - activations - ", "memory - "),
        "the activations were forgotten: the model states only get the rest of the memory",
    ),
    "shares the activations": Mistake(
        edit(
            FEWEST,
            "memory - activations - ",
            "memory - ",
            "shared[stage] * parameters / room",
            "(shared[stage] * parameters + activations) / room",
        ),
        THEIR_OWN,
    ),
    "the paper's stage 3": Mistake(
        edit(FEWEST, "2: 14, 3: 14}", "2: 14, 3: 16}"),
        "16 bytes per parameter is the paper's stage 3; here no 16-bit copy is kept, so it is 14",
    ),
    "float32's bytes": Mistake(
        edit(FEWEST, "1: 4, 2: 2, 3: 0}", "1: 8, 2: 4, 3: 0}", "1: 12, 2: 14, 3: 14", "1: 8, 2: 12, 3: 16"),
        "these are float32's bytes, 4 + 4 + 8: in bf16 with masters it is 2 + 2 + 12",
    ),
    "shares everything out": Mistake(
        edit(FEWEST, "1: 4, 2: 2, 3: 0}", "1: 0, 2: 0, 3: 0}", "1: 12, 2: 14, 3: 14", "1: 16, 2: 16, 3: 14"),
        "all 16 bytes were sharded: in stages 1 and 2 every GPU keeps some of them in full",
    ),
    "stage 0 on more GPUs": Mistake(
        edit(FEWEST, "1 if room >= 0 else None", "max(1, math.ceil(16 * parameters / (memory - activations)))"),
        "stage 0 shards nothing: more GPUs do not help, so it is 1 or None",
    ),
    "no None": Mistake(
        edit(
            FEWEST, "            result[stage] = None\n        else", "            result[stage] = 10**6\n        else"
        ),
        (NO_NUMBER),
    ),
    "a fraction of a GPU": Mistake(
        edit(FEWEST, WHERE_IT_ENDS, "shared[stage] * parameters / room"),
        "you cannot buy half a GPU: round up with math.ceil(...)",
    ),
    "one to spare": Mistake(
        edit(FEWEST, WHERE_IT_ENDS, "int(shared[stage] * parameters // room) + 2"),
        ("one too many: it fits on one fewer"),
    ),
    "returns nothing": Mistake(
        edit(FEWEST, "    return result\n", ""), "the function returns nothing: `return` is missing"
    ),
    "gigabytes": Mistake(
        edit(FEWEST, "memory - activations -", "memory * 1e9 - activations -"),
        BYTES,
    ),
    "divides by what is not there": Mistake(
        edit(FEWEST, "room <= 0", "room < 0"),
        "a division by zero: where no room is left for what is sharded, no number of GPUs is enough",
    ),
    "gradients not shared": Mistake(
        edit(FEWEST, "2: 2, 3: 0}", "2: 4, 3: 0}", "2: 14, 3: 14}", "2: 12, 3: 14}"),
        "stage 2 shards the gradients too: 2 bytes stay on every GPU, and 14 are sharded",
    ),
    "rounds to the nearest": Mistake(
        edit(FEWEST, "math.ceil(", "round("),
        "rounded to the nearest number, so sometimes it does not fit yet: round up, with math.ceil",
    ),
    "not to the last byte": Mistake(
        edit(FEWEST, "1 if room >= 0 else None", "1 if room > 0 else None"),
        "a model may fill the memory to the last byte: room for exactly 0 more bytes is enough in stage 0",
    ),
    "a search that stops at 256": Mistake(
        edit(FEWEST_BY_TRYING, "10**12", "256", "n *= 2", "n += 1", "n // 2 or 1", "n"), SEARCH
    ),
    "a search that stops at 10,000": Mistake(
        edit(FEWEST_BY_TRYING, "10**12", "10_000", "n *= 2", "n += 1", "n // 2 or 1", "n"), SEARCH
    ),
    "a search that stops at 2**20": Mistake(edit(FEWEST_BY_TRYING, "10**12", "2**20"), SEARCH),
    "powers of two": Mistake(
        edit(
            FEWEST_BY_TRYING, "return next(k for k in range(n // 2 or 1, n + 1) if held(stage, k) <= room)", "return n"
        ),
        "any number of GPUs counts, not only powers of two",
    ),
    "whole nodes": Mistake(
        edit(FEWEST, WHERE_IT_ENDS, f"-(-{WHERE_IT_ENDS} // 8) * 8"), "any number of GPUs counts, not only whole nodes"
    ),
    "True for 1": Mistake(
        edit(FEWEST, "1 if room >= 0 else None", "(room >= 0) or None"), "a number of GPUs or None, not True or False"
    ),
    "negative room": Mistake(
        edit(FEWEST, "elif room <= 0:", "elif room == 0:"),
        (NO_NUMBER),
    ),
    "a float": Mistake(
        edit(FEWEST, WHERE_IT_ENDS, f"float({WHERE_IT_ENDS})"),
        "the right number, but a float: make it an int (math.ceil does)",
    ),
    "gradients forgotten": Mistake(
        edit(FEWEST, "2: 14, 3: 14}", "2: 12, 3: 12}"),
        "the 2 bytes of the gradients are missing: stages 2 and 3 shard them too, so 14 bytes and not 12",
    ),
    "gibibytes": Mistake(edit(FEWEST, "room = memory", "room = memory / 1024**3 * 1e9"), BYTES),
    "one more than the whole part": Mistake(
        edit(FEWEST, WHERE_IT_ENDS, "int(shared[stage] * parameters / room) + 1"),
        "one too many where it divides without remainder: math.ceil rounds up only what is not whole",
    ),
    "parameters kept in stage 3": Mistake(
        edit(FEWEST, "2: 2, 3: 0}", "2: 2, 3: 2}", "3: 14}", "3: 12}"),
        "stage 3 shards the parameters too: nothing stays on every GPU in full, and all 14 bytes are sharded",
    ),
    "Adam's averages alone": Mistake(
        edit(FEWEST, "0: 16", "0: 12", "1: 12, 2: 14, 3: 14", "1: 8, 2: 10, 3: 10"),
        "the float32 masters are missing: Adam in bf16 keeps 12 bytes, 4 of them for the master and 8 for the averages",
    ),
    "0 for none": Mistake(
        edit(
            FEWEST,
            "elif room <= 0:\n            result[stage] = None",
            "elif room <= 0:\n            result[stage] = 0",
        ),
        NO_NUMBER,
    ),
    "infinitely many for none": Mistake(
        edit(FEWEST, "            result[stage] = None\n", "            result[stage] = math.inf\n"), NO_NUMBER
    ),
    "0 for none, in all stages": Mistake(
        edit(FEWEST, "    return result", "    return {stage: n or 0 for stage, n in result.items()}"), NO_NUMBER
    ),
    "14 bytes in stage 0": Mistake(
        edit(FEWEST, "0: 16", "0: 14"), "in stage 0 all of 2 + 2 + 12 bytes stay on every GPU: 16, not 14"
    ),
    "the masters kept": Mistake(
        edit(FEWEST, "1: 4, 2: 2, 3: 0}", "1: 8, 2: 6, 3: 0}", "1: 12, 2: 14, 3: 14", "1: 8, 2: 10, 3: 14"),
        "the float32 masters belong to the optimizer, and are sharded with it: in stage 1 only 2 + 2 bytes stay",
    ),
    "the room of stage 1": Mistake(
        edit(
            FEWEST,
            "on_every[stage] * parameters\n",
            "on_every[stage] * parameters\n        if stage == 2 and result[1] is None:\n            room = 0\n",
        ),
        "stage 2 may fit where stage 1 does not: only 2 bytes stay on every GPU",
    ),
    "activations sharded in stage 3, whole": Mistake(
        edit(
            FEWEST,
            "    return result",
            "    result[3] = math.ceil((14 * parameters + activations) / memory)\n    return result",
        ),
        THEIR_OWN,
    ),
    "stage 0 like the others": Mistake(
        edit(FEWEST, "{0: 16, 1: 4", "{0: 0, 1: 4", "{0: 0, 1: 12", "{0: 16, 1: 12"),
        "stage 0 shards nothing: more GPUs do not help, so it is 1 or None",
    ),
    "a list": Mistake(edit(FEWEST, "return result", "return list(result.values())"), KEYS),
    "stages 1 to 4": Mistake(edit(FEWEST, "return result", "return {k + 1: v for k, v in result.items()}"), KEYS),
    "stops at the first that does not fit": Mistake(
        edit(FEWEST, "            result[stage] = None\n", "            break\n"),
        "a stage has no answer where an earlier one does not fit: each of the four gets one",
    ),
    "at least two": Mistake(edit(FEWEST, "max(1,", "max(2,"), "one GPU may be enough: then the fewest is 1"),
    "activations sharded in stage 3": Mistake(
        edit(FEWEST, "/ room))", "/ (room + (activations if stage == 3 else 0))))"), THEIR_OWN
    ),
    "no stage 0": Mistake(
        edit(FEWEST, "1 if room >= 0 else None", "None"), "stage 0 fits on one GPU that has 16 bytes per parameter: 1"
    ),
    "total by memory": Mistake(
        """\
import math


def fewest_gpus(parameters, memory, activations):
    total = 16 * parameters + activations
    return {stage: math.ceil(total / memory) for stage in range(4)}
""",
        "the stages differ in what they shard: only that part is divided, and the rest and the activations stay whole",
    ),
}

# ---------------------------------------------------------------------- 16.2

NODES = "nodes have 8 GPUs: use whole nodes, or a part of a single one"
FORM = "a plan is a dictionary with three whole numbers and nothing else: stage, gpus and sequences"
FULL = "with so many sequences the activations do not fit: states, 12 GB for each sequence and 2 GB, in 80 GB"

PLAN_MISTAKES = {
    "does not fit": Mistake(
        edit(PLAN, '"stage": 3', '"stage": 2'),
        (
            "stages 1 and 2 keep 4Ψ and 2Ψ bytes on every GPU, which leaves too little room for so many "
            "sequences: fewer of them, or a higher stage"
        ),
    ),
    "one sequence too many": Mistake(edit(PLAN, '"sequences": 6', '"sequences": 7'), FULL),
    "replicated": Mistake(
        edit(PLAN, '"stage": 3', '"stage": 0', '"sequences": 6', '"sequences": 1'),
        "stage 0 keeps all 16Ψ = 208 GB on every GPU, however many there are: a higher stage",
    ),
    "one node": Mistake(
        edit(PLAN, '"gpus": 32, "sequences": 6', '"gpus": 8, "sequences": 4'),
        "one node is the cheapest, and takes too long: more GPUs",
    ),
    "waits for the wires": Mistake(
        edit(PLAN, '"sequences": 6', '"sequences": 4'),
        (
            "the GPUs wait for the network: a step sends the same, however many sequences it computes, so"
            " put more on each"
        ),
    ),
    "half a node": Mistake(edit(PLAN, "32", "28"), NODES),
    "nodes": Mistake(edit(PLAN, "32", "4"), "`gpus` is the number of GPUs, not of nodes: each node has 8"),
    "takes an argument": Mistake(
        edit(PLAN, "def plan()", "def plan(gpus)"), "the `def` line was changed: plan() has no arguments"
    ),
    "more than there are": Mistake(edit(PLAN, "32", "64"), "the customer has up to 32 GPUs"),
    "words": Mistake(edit(PLAN, '"stage": 3', '"stage": "Zero3"'), FORM),
    "a part of a second node": Mistake(edit(PLAN, "32", "12", "6}", "5}"), NODES),
    "sequences of all GPUs": Mistake(
        edit(PLAN, '"sequences": 6', '"sequences": 192'),
        "`sequences` counts those on each GPU, not those of all together",
    ),
    "days too": Mistake(edit(PLAN, '"sequences": 6}', '"sequences": 6, "days": 5}'), FORM),
    "a tuple": Mistake("def plan():\n    return 3, 32, 6\n", FORM),
    "stage 1": Mistake(
        edit(PLAN, '"stage": 3', '"stage": 1', '"sequences": 6', '"sequences": 1'),
        "stage 1 has room for one sequence only, so the wires take most of the time: a stage that leaves room for more",
    ),
}

RIGHT = {
    "16.1": (FEWEST_BY_HAND, FEWEST_BY_TRYING, FEWEST_IN_FRACTIONS),
    "16.2": (edit(PLAN, "6}", "5}"), edit(PLAN, "32", "24", "6}", "5}")),
}

MISTAKES = {
    "16.1": FEWEST_MISTAKES,
    "16.2": PLAN_MISTAKES,
}
