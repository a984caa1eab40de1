"""Lesson 16: the fewest GPUs that hold a model, by stage."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch

from zerolab.engine.precision import Precision
from zerolab.lab.exercises.checks.values import forgot_to_return
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.measure.formulas import moved_bytes, state_bytes

# parameters, bytes of a GPU, bytes of activations on each
CASES = (
    (13_000_000_000, 80e9, 19e9),  # tells the common mistakes apart
    (7_500_000_000, 80e9, 10e9),
    (7_500_000_000, 24e9, 4e9),
    (1_000_000, 20e6, 0.0),  # fits on one
    (1_000_000, 16e6, 0.0),  # to the byte
    (70_000_000_000, 80e9, 16e9),
    (1_000_000_000_000, 141e9, 40e9),
    (1_000_000_000, 9e9, 1e9),  # stage 2 divides without remainder
    (1_000_000_000, 5e9, 1e9),  # no room at all in stage 1
    (1_000_000_000, 10e9, 12e9),  # the activations alone do not fit
    (1_000_000_000, 4.05e9, 0.0),  # 240 in stage 1, beyond them 300, 16,000 and more than 2**20: no search may stop
    (1_000_000_000, 4.04e9, 0.0),
    (1_000_000_000, 4.00075e9, 0.0),
    (1_000_000_000, 4_000_009_990.0, 0.0),
)
SHARDED = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 14)}  # bytes per parameter: on every rank, and sharded


def fewest(parameters: int, memory: float, activations: float) -> dict[int, int | None]:
    """The right answer, in exact arithmetic: state_bytes() rounds to bytes, which matters on a million GPUs."""
    found: dict[int, int | None] = {}
    for stage, (kept, shared) in SHARDED.items():
        room = Fraction(memory) - Fraction(activations) - kept * parameters
        if shared == 0:
            found[stage] = 1 if room >= 0 else None
        else:
            found[stage] = None if room <= 0 else max(1, math.ceil(shared * parameters / room))
    return found


def _held(stage: int, ranks: int, parameters: int) -> int:
    return sum(state_bytes(stage, ranks, parameters, precision=Precision()).values())


def check_fewest(answer: Any, world: World) -> None:
    if world.world_size > 1:
        return  # one rank knows it all
    for case in CASES:
        got = answer.fewest_gpus(*case)
        want = fewest(*case)
        said = f"{case[0] / 1e9:g} billion parameters, {case[1] / 1e9:g} GB, {case[2] / 1e9:g} GB of activations"
        if not isinstance(got, dict) or set(got) != {0, 1, 2, 3}:
            likely = forgot_to_return(got) or "return a dictionary {0: ..., 1: ..., 2: ..., 3: ...}"
            raise Wrong(f"the result is {got!r}", likely)
        for stage in range(4):
            if got[stage] != want[stage] or isinstance(got[stage], (float, bool)):
                raise Wrong(f"stage {stage} ({said}): {got[stage]!r}, expected {want[stage]!r}", _why(got, case, stage))


def _why(got: dict[int, Any], case: tuple[int, float, float], stage: int) -> str:
    parameters, memory, activations = case
    value, want = got[stage], fewest(*case)[stage]
    if isinstance(value, bool):
        return "a number of GPUs or None, not True or False"
    if got == fewest(parameters, memory * 1e9, activations):
        return "memory is already in bytes, and so are the activations"
    if value == math.inf:
        return "if no number of GPUs can hold it, the answer is None"
    if isinstance(value, float) and value.is_integer():
        return "the right kind of number, but a float: make it an int (math.ceil does)"
    if isinstance(value, float):
        return "you cannot buy half a GPU: round up with math.ceil(...)"
    if want is None:
        if stage == 0:
            return "stage 0 shards nothing: more GPUs do not help, so it is 1 or None"
        return "what every GPU keeps in full does not fit: no number of GPUs is enough, so None"
    if value is None:
        if want > 256:
            return "it does fit, on very many GPUs: a search stopped too early. Solve for N instead of trying"
        if memory - activations == sum(SHARDED[stage]) * parameters:
            return "it does fit: a model may fill the memory to the last byte"
        return (
            "it does fit, and None means that no number of GPUs is enough: which of the 2 + 2 + 12 bytes does stage "
            f"{stage} keep on every GPU?"
        )
    if activations and value == fewest(parameters, memory, 0.0)[stage]:
        return "the activations were forgotten: the model states only get the rest of the memory"
    room = memory - activations - SHARDED[stage][0] * parameters
    if want > 256 and value < want and (value & (value - 1) == 0 or value % 1000 == 0):
        return "a search stopped too early. Solve for N instead of trying"
    if stage >= 2 and value < want and value == max(1, math.ceil(12 * parameters / room)):
        return (
            "the 2 bytes of the gradients are missing: which of 2 + 2 + 12 does it shard, and which stay on every GPU?"
        )
    if stage == 3 and value == max(1, math.ceil(16 * parameters / room)):
        return "16 bytes per parameter is the paper's stage 3; here no 16-bit copy is kept, so it is 14"
    if value == want - 1:
        return "one too few: it does not fit yet; round up, not down"
    if value == want + 1:
        return "one too many: it fits on one fewer; a model that fills the memory to the last byte does fit"
    if value > want and (value & (value - 1) == 0 or value == 8 * math.ceil(want / 8)):
        return "it fits on fewer: any number of GPUs counts, not only powers of two or whole nodes"
    if activations and room + activations > 0:
        if value == max(1, math.ceil((SHARDED[stage][1] * parameters + activations) / (room + activations))):
            return "the activations were sharded: every GPU has its own, however many there are"
    if value in {max(1, math.ceil(16 * parameters / (memory - activations)))}:
        return "all 16 bytes were sharded: in this stage every GPU keeps some of them in full"
    fp32 = {1: (8, 8), 2: (4, 12), 3: (0, 16)}.get(stage)
    if fp32 and memory - activations > fp32[0] * parameters:
        if value == max(1, math.ceil(fp32[1] * parameters / (memory - activations - fp32[0] * parameters))):
            gradients = "the gradients were not sharded, or " if stage == 2 else ""
            return gradients + "these are float32's bytes: in bf16 with masters it is 2 + 2 + 12"
    return f"not the bytes of stage {stage}: which of 2 + 2 + 12 does it shard, and which stay on every GPU?"


FEWEST_STUB = '''\
import math
from zerolab.lab.exercises import Todo


def fewest_gpus(
    parameters: int, memory: float, activations: float
) -> dict[int, int | None]:
    """For each stage 0 to 3, the fewest GPUs on which training in bf16 with Adam fits; None
    if no number is enough.

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
STAGES = (0, 1, 2, 3)


def cost(stage: int, gpus: int, sequences: int) -> tuple[float, float, float]:
    """Bytes per GPU, days and dollars of a plan, if sending never overlaps computing and has no latency."""
    held = _held(stage, gpus, PARAMETERS) + sequences * SEQUENCE + IN_FLIGHT
    computing = 6 * PARAMETERS * sequences * CONTEXT / FLOPS
    sent = moved_bytes(stage, gpus, PARAMETERS, precision=Precision(torch.bfloat16))
    step = computing + sent / (INSIDE if gpus <= PER_NODE else BETWEEN)
    seconds = TOKENS / (gpus * sequences * CONTEXT) * step
    return held, seconds / 86400, gpus * seconds / 3600 * PRICE


def _is_good(stage: int, gpus: int, sequences: int) -> bool:
    held, days, dollars = cost(stage, gpus, sequences)
    return held <= GPU and days <= DAYS and dollars <= DOLLARS


def check_plan(answer: Any, world: World) -> None:
    plan = answer.plan()
    if not isinstance(plan, dict) or set(plan) != {"stage", "gpus", "sequences"}:
        raise Wrong(f"the plan is {plan!r}", forgot_to_return(plan) or "it must have stage, gpus and sequences")
    for name, value in plan.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < (name != "stage"):
            raise Wrong(f"{name} is {value!r}", "it must be a whole number, and at least 1 for GPUs and sequences")
    stage, gpus, sequences = plan["stage"], plan["gpus"], plan["sequences"]
    if stage not in STAGES:
        raise Wrong(f"stage is {stage}", "there are stages 0 to 3")
    if gpus > MOST_GPUS:
        raise Wrong(f"{gpus} GPUs", f"the customer has {MOST_GPUS}")
    if gpus > PER_NODE and gpus % PER_NODE:
        raise Wrong(f"{gpus} GPUs", f"nodes have {PER_NODE} GPUs: use whole nodes, or part of a single one")
    held, days, dollars = cost(stage, gpus, sequences)
    if gpus * PER_NODE <= MOST_GPUS and _is_good(stage, gpus * PER_NODE, sequences):
        raise Wrong(f"{gpus} GPUs", f"that is the number of nodes: each has {PER_NODE} GPUs")
    if held > GPU:
        seen = f"a GPU would need {held / 1e9:.1f} GB and has {GPU / 1e9:.0f}"
        alone = (held - sequences * SEQUENCE) / 1e9
        raise Wrong(seen, f"without any sequence it needs {alone:.1f} GB: fewer sequences, a higher stage or more GPUs")
    if days > DAYS:
        likely = "more GPUs, or more sequences on each: a step sends the same, however many sequences it computes"
        raise Wrong(f"it would take {days:.1f} days, and the limit is {DAYS:.0f}", likely)
    if dollars > DOLLARS:
        likely = "the GPUs wait for the network: more sequences on each, or a stage that sends less"
        raise Wrong(f"it would cost ${dollars:,.0f}, and the limit is ${DOLLARS:,.0f}", likely)


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
        check=check_fewest,
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
        check=check_plan,
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
