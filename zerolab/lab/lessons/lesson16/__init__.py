"""Lesson 16: the fewest GPUs that hold a model, by stage, and a plan that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerolab.engine.precision import Precision
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.measure.formulas import moved_bytes, state_bytes

# ---------------------------------------------------------------------- 16.1

GIB = 2**30  # a number that floats divide without rounding

# parameters, bytes of a GPU, bytes of activations on each
MODELS: tuple[tuple[int, float, float], ...] = (
    (13_000_000_000, 80e9, 19e9),
    (7_500_000_000, 80e9, 10e9),
    (7_500_000_000, 24e9, 4e9),
    (70_000_000_000, 80e9, 16e9),
    (1_000_000_000_000, 141e9, 40e9),
    (1_000_000, 20_000_000, 0),  # whole numbers; fits on one GPU
    (1_000_000_000, 10e9, 12e9),  # the activations alone do not fit
)
TO_THE_BYTE: tuple[tuple[int, float, float], ...] = (
    (GIB, 16.0 * GIB, 0.0),  # on one GPU
    (GIB, 18.0 * GIB, 2.0 * GIB),
    (GIB, 8.0 * GIB, 0.0),  # on 3 in stage 1
    (GIB, 6.0 * GIB, 2.0 * GIB),  # on 7 in stage 2; no room at all in stage 1
    (GIB, 7.0 * GIB, 5.0 * GIB),  # on 7 in stage 3; no room at all in stage 2
    (GIB, 5.0 * GIB, 5.0 * GIB),  # no room at all
)
A_BYTE_SHORT = tuple((parameters, memory - 1, activations) for parameters, memory, activations in TO_THE_BYTE)
MANY: tuple[tuple[int, float, float], ...] = (  # so many in stage 1 that no search should try them one by one
    (1_000_000_000, 4.05e9, 0.0),
    (1_000_000_000, 4.04e9, 0.0),
    (1_000_000_000, 4.00075e9, 0.0),
    (1_000_000_000, 4_000_009_990.0, 0.0),
)


def in_billions(number: float) -> str:
    return f"{number / 1e9:.12g}e9" if number else "0"


def fewest_of(cases: tuple[tuple[int, float, float], ...]) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        for parameters, memory, activations in cases:
            said = f"fewest_gpus({parameters:_}, {in_billions(memory)}, {in_billions(activations)})"
            play.call(said, play.code.fewest_gpus, parameters, memory, activations, uses=(), result=said)

    return act


FEWEST_BATTERY = (
    Scene(
        "",
        fewest_of(MODELS + TO_THE_BYTE + A_BYTE_SHORT),
        "by hand: which of the 2 + 2 + 12 bytes does this stage shard, and which stay on every GPU? What is left of "
        "the memory beside those that stay?",
        sizes=(1, 2),
    ),
    Scene(
        "where the fewest are very many",
        fewest_of(MANY),
        "any number of GPUs counts, however large: solve for N instead of trying",
        sizes=(1,),
    ),
)


FEWEST_STUB = '''\
import math
from zerolab.lab.exercises import Todo


def fewest_gpus(
    parameters: int, memory: float, activations: float
) -> dict[int, int | None]:
    """For each stage 0 to 3, the fewest GPUs on which training in bf16 with Adam fits; None
    if no number is enough (also where nothing is left for what is sharded). What fills the
    memory exactly fits.

    memory: bytes of one GPU. activations: bytes that each GPU needs besides the model
    states.
    """
    raise Todo("16.1")
'''

FEWEST = '''\
import math


def fewest_gpus(
    parameters: int, memory: float, activations: float
) -> dict[int, int | None]:
    """For each stage 0 to 3 the fewest GPUs on which training in bf16 with Adam fits; None
    if no number is enough."""
    on_every, shared = {0: 16, 1: 4, 2: 2, 3: 0}, {0: 0, 1: 12, 2: 14, 3: 14}
    result = {}
    for stage in range(4):
        room = memory - activations - on_every[stage] * parameters
        if shared[stage] == 0:
            result[stage] = 1 if room >= 0 else None
        elif room <= 0:
            result[stage] = None
        else:
            result[stage] = max(1, math.ceil(shared[stage] * parameters / room))
    return result
'''


# ---------------------------------------------------------------------- 16.2

PARAMETERS, GPU, IN_FLIGHT, SEQUENCE = 13_000_000_000, 80e9, 2e9, 12e9  # bytes; SEQUENCE: activations of one
MOST_GPUS, PER_NODE = 32, 8
TOKENS, CONTEXT = 20e9, 2048
FLOPS, INSIDE, BETWEEN = 200e12, 300e9, 25e9  # operations per second; bytes per second in and between nodes
DAYS, DOLLARS, PRICE = 7.0, 8000.0, 2.0  # limit, limit, per GPU and hour


def bytes_held(stage: int, gpus: int, sequences: int) -> float:
    states = state_bytes(stage, gpus, PARAMETERS, precision=Precision())
    return sum(states.values()) + sequences * SEQUENCE + IN_FLIGHT


def days(stage: int, gpus: int, sequences: int) -> float:
    """If sending never overlaps computing, and has no latency."""
    computing = 6 * PARAMETERS * sequences * CONTEXT / FLOPS
    sent = moved_bytes(stage, gpus, PARAMETERS, precision=Precision(torch.bfloat16))
    step = computing + sent / (INSIDE if gpus <= PER_NODE else BETWEEN)
    return TOKENS / (gpus * sequences * CONTEXT) * step / 86400


def dollars(stage: int, gpus: int, sequences: int) -> float:
    return gpus * days(stage, gpus, sequences) * 24 * PRICE


# Every plan within the limits is right: only whether it is can be compared. In this order, each limit in a scene.


def form(play: Play, plan: Any) -> None:
    play.see("the plan", dict.fromkeys(plan) if isinstance(plan, dict) else plan)
    for name, value in plan.items() if isinstance(plan, dict) else ():
        play.see(f"the type of {name}", type(value).__name__)


def within_reach(play: Play, plan: dict[str, int]) -> None:
    stage, gpus, sequences = plan["stage"], plan["gpus"], plan["sequences"]
    play.see("stage is 0, 1, 2 or 3", stage in range(4))
    play.see("there is at least one GPU, and one sequence on each", gpus > 0 and sequences > 0)
    play.see("gpus are whole nodes of 8, or a part of one", gpus < PER_NODE or gpus % PER_NODE == 0)
    play.at_most("gpus", max(gpus, MOST_GPUS))


def memory(play: Play, plan: dict[str, int]) -> None:
    play.at_most("GB that a GPU needs", max(bytes_held(**plan), GPU) / 1e9)


def time(play: Play, plan: dict[str, int]) -> None:
    play.at_most("days", max(days(**plan), DAYS))


def money(play: Play, plan: dict[str, int]) -> None:
    play.at_most("dollars", max(dollars(**plan), DOLLARS))


def plan_with(look: Callable[[Play, Any], None]) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        with play.event("plan()", uses=()) as event:
            plan = play.code.plan()
            event.results.add("the plan")
        look(play, plan)
        for name in ("stage", "gpus", "sequences"):
            play.clue(name, plan.get(name) if isinstance(plan, dict) else None)

    return act


PLAN_BATTERY = (
    Scene("", plan_with(form), "a plan is a dictionary of three whole numbers: stage, gpus and sequences"),
    Scene("", plan_with(within_reach), "stage 0 to 3, up to 32 GPUs in nodes of 8, a sequence or more on each"),
    Scene(
        "",
        plan_with(memory),
        "it does not fit: the states by the stage's formula, 12 GB for each sequence, and 2 GB. Take fewer sequences, "
        "a higher stage or more GPUs",
    ),
    Scene(
        "",
        plan_with(time),
        "too slow: more GPUs, or more sequences on each: a step sends the same, however many sequences it computes",
    ),
    Scene(
        "",
        plan_with(money),
        "the GPUs wait for the network: more sequences on each, or a stage that sends less",
    ),
)


PLAN_STUB = '''\
from zerolab.lab.exercises import Todo


def plan() -> dict[str, int]:
    """{"stage": 0 to 3, "gpus": how many, in whole nodes of 8, "sequences": on each GPU in
    a step}."""
    raise Todo("16.2")
'''

PLAN = """\
def plan() -> dict[str, int]:
    return {"stage": 3, "gpus": 32, "sequences": 6}
"""


EXERCISES = [
    Exercise(
        id="16.1",
        title="the fewest GPUs",
        difficulty=1,
        section="Write: the fewest GPUs",
        battery=FEWEST_BATTERY,
        stub=FEWEST_STUB,
        reference=FEWEST,
        hints=(
            "For each stage write down the bytes per parameter that stay on every GPU, and those that are sharded: "
            "in stage 1 these are 4 and 12.",
            "The room for what is sharded is memory - activations - (bytes on every GPU) * parameters. If there is "
            "none, no number of GPUs is enough.",
            "N = math.ceil(shared * parameters / room), and at least 1. Stage 0 shards nothing: 1 or None.",
        ),
        exports=("fewest_gpus",),
        errors={"division by zero": "there is no room left for what is sharded: then no number of GPUs is enough"},
    ),
    Exercise(
        id="16.2",
        title="a plan that pays",
        difficulty=1,
        section="Write: a plan that pays",
        battery=PLAN_BATTERY,
        stub=PLAN_STUB,
        reference=PLAN,
        hints=(
            "Rule out what does not fit: 16Ψ = 208 GB in stage 0. Stages 1 and 2 keep 4Ψ = 52 and 2Ψ = 26 GB per GPU.",
            "A step sends the same however many sequences it computes. So the stage with the most room for sequences "
            "may be the cheapest, even though it sends half as much again.",
            "Stage 3 on 24 or 32 GPUs holds 7.6 or 5.7 GB, and 5 sequences 60.",
        ),
        exports=("plan",),
    ),
]
