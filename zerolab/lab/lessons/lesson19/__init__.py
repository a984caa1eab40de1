"""Lesson 19: what a message carries, and the verdict on a claim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.values import counted
from zerolab.lab.lessons.lesson19.trial import Evidence

# ---------------------------------------------------------------------- 19.1

SCALES = {"parameters": 0.5, "gradient": 1e-2, "average": 1e-3, "average of squares": 1e-6}  # as in training


def made_states(play: Play, numel: int, ranks: int) -> dict[str, Tensor]:
    """Of `numel` elements, padded with zeros to a multiple of the number of ranks."""
    generator = torch.Generator().manual_seed(numel)
    states = {name: torch.zeros(-(-numel // ranks) * ranks) for name in SCALES}
    for name, scale in SCALES.items():
        states[name][:numel] = scale * torch.randn(numel, generator=generator)
    return states


class Messages:
    """Asks the program about messages, as rank `rank` of `ranks`."""

    def __init__(self, play: Play, numel: int, rank: int | None = None, ranks: int | None = None) -> None:
        self.play, self.rank, self.ranks = play, play.rank if rank is None else rank, ranks or play.size
        self.states = made_states(play, numel, self.ranks)

    def shard(self, whole: Tensor) -> Tensor:
        return whole.view(self.ranks, -1)[self.rank]

    def ask(self, what: str, payload: Tensor, states: dict[str, Tensor] | None = None) -> None:
        play, said = self.play, f"what carries() finds in {what}, {counted(len(payload), 'element')}"
        play.keep("`payload`", payload)
        states = play.keep("`states`", dict(self.states if states is None else states))
        with play.event(said, uses=()) as event:
            names = play.code.carries(payload, states, self.rank, self.ranks)
            event.results.add(said)
        if isinstance(names, (list, tuple, set)):  # in any order
            names = sorted(names) if all(isinstance(name, str) for name in names) else list(names)
        play.see(said, names)


def whole_or_shard(play: Play) -> None:
    for numel in (8, 13, 1):  # with padding; with shards that are padding alone
        messages = Messages(play, numel)
        for name, whole in messages.states.items():
            messages.ask(f"all of {name}", whole.clone())
            messages.ask(f"this rank's shard of {name}", messages.shard(whole).clone())
    messages = Messages(play, 16)
    whole = messages.states["parameters"]
    for further in range(1, play.size):
        other = whole.view(play.size, -1)[(play.rank + further) % play.size]
        messages.ask(f"the shard of the rank {further} further on", other.clone())
    if play.size > 1:
        messages.ask("rank 0's shard with its last element changed", torch.cat([whole[: len(other) - 1], other[:1]]))
        messages.ask("every Nth element of the parameters", whole[play.rank :: play.size].clone())


def rounded(play: Play) -> None:
    messages = Messages(play, 30)
    for name, whole in messages.states.items():
        messages.ask(f"{name}, in bfloat16", whole.bfloat16())
        messages.ask(f"this rank's shard of {name}, in bfloat16", messages.shard(whole).bfloat16())
    gradient, average = messages.states["gradient"], messages.states["average"]
    wide = {name: whole.double() / 3 for name, whole in messages.states.items()}
    messages.ask("the gradient, in float64", wide["gradient"].clone(), wide)
    messages.ask("a float64 gradient, in float32", wide["gradient"].float(), wide)
    messages.ask("a float64 gradient, in float16", wide["gradient"].half(), wide)
    mixed = messages.states | {"gradient": gradient.bfloat16(), "steps": torch.arange(len(gradient)) + 3}
    messages.ask("a bfloat16 gradient among float32 states", mixed["gradient"].clone(), mixed)
    messages.ask("a bfloat16 gradient, in float32", mixed["gradient"].float(), mixed)
    messages.ask("a float32 average beside a bfloat16 gradient", average.clone(), mixed)
    messages.ask("whole numbers, in float32", mixed["steps"].float(), mixed)
    messages.ask("whole numbers", mixed["steps"].clone(), mixed)


def no_state(play: Play) -> None:
    messages, N = Messages(play, 30), play.size
    whole, gradient = messages.states["parameters"], messages.states["gradient"]
    if N > 1:
        messages.ask("as many elements as a shard, from the second on", whole[1 : 1 + len(whole) // N].clone())
        messages.ask("two shards of three or four", whole[: 2 * len(whole) // N].clone()) if N > 2 else None
    for at in (0, 7, len(gradient) - 1):
        changed = gradient.clone()
        changed[at] += 2.0**-20
        messages.ask(f"the gradient with element {at} changed", changed)
    messages.ask("the gradient doubled", gradient * 2.0)
    messages.ask("the gradient with the other sign", -gradient)
    messages.ask("the gradient in reverse order", gradient.flip(0))
    messages.ask("other numbers", torch.linspace(0.0, 1.0, len(gradient)))
    messages.ask("a longer message", torch.cat([gradient, gradient[:1]]))
    messages.ask("one number", gradient[:1].clone())
    messages.ask("a message, where there are no states", gradient.clone(), {})


def alike(play: Play) -> None:
    """States whose numbers are close, or the same."""
    messages = Messages(play, 30)
    old, zeros = messages.states["parameters"], torch.zeros_like(messages.states["parameters"])
    step = messages.states | {"new parameters": old * (1 + 1e-6)}
    messages.ask("parameters before a small step", old.clone(), step)
    messages.ask("parameters after a small step", step["new parameters"].clone(), step)
    messages.ask("parameters after a small step, in bfloat16", step["new parameters"].bfloat16(), step)
    fresh = messages.states | {"average": zeros.clone(), "average of squares": zeros.clone()}
    messages.ask("zeros, where both averages are zeros", zeros.clone(), fresh)
    messages.ask("a shard of zeros, where both averages are zeros", messages.shard(zeros).clone(), fresh)
    messages.ask("negative zeros, where both averages are zeros", -zeros, fresh)
    messages.ask("zeros, with the states in another order", zeros.clone(), dict(reversed(fresh.items())))
    messages.ask("the gradient, where both averages are zeros", fresh["gradient"].clone(), fresh)


def other_ranks(play: Play) -> None:
    for rank, ranks in ((0, 1), (1, 5), (4, 5)):
        messages = Messages(play, 13, rank, ranks)
        for name, whole in messages.states.items():
            messages.ask(f"all of {name}", whole.clone())
            messages.ask(f"the shard of rank {rank} of {ranks} of {name}", messages.shard(whole).clone())
            messages.ask(f"the first shard of {name}", whole.view(ranks, -1)[0].clone())
    messages = Messages(play, 30)
    apart = {name: torch.stack([whole, -whole], 1)[:, 0] for name, whole in messages.states.items()}
    messages.ask("a gradient whose elements do not lie side by side", apart["gradient"], apart)


CARRIES_BATTERY = (
    Scene(
        "",
        whole_or_shard,
        "a reduce-scatter is given the whole of a state, an all-gather this rank's shard, the rank-th of N equal "
        "stretches: compare with both, and name each match once",
    ),
    Scene(
        "",
        rounded,
        "a state may have been rounded on the way: round it in the same way, state.to(payload.dtype), and compare then",
    ),
    Scene(
        "",
        no_state,
        "all elements must be equal, in order, and as many: whatever is close, permuted or another rank's is no state",
    ),
    Scene(
        "",
        alike,
        "name every state that has exactly these numbers, and no other: the evidence cannot tell them apart",
    ),
    Scene(
        "with other numbers for `rank` and `world_size`",
        other_ranks,
        "take the rank and the number of ranks from the arguments",
        sizes=(3,),
    ),
)


CARRIES_STUB = '''\
import torch
from zerolab.lab.exercises import Todo


def carries(payload, states, rank, world_size):
    """The names of the states that this message could be: a list, empty if it is none of
    them.

    payload: what this rank gave to a collective, flat: the whole of a state, (N * S,), or
    this rank's shard, (S,). It may have been rounded on the way, to payload.dtype. states:
    {name: flat tensor (N * S,)}, of any dtype. A message is a state if all elements are
    equal, in order (torch.equal), once the state has been rounded as the message was.
    """
    raise Todo("19.1")
'''

CARRIES = """\
import torch


def carries(payload, states, rank, world_size):
    found = []
    for name, state in states.items():
        state = state.to(payload.dtype)
        shard = state.view(world_size, -1)[rank]
        if torch.equal(payload, state) or torch.equal(payload, shard):
            found.append(name)
    return found
"""


# ---------------------------------------------------------------------- 19.2

PSI = 1200
CLAIMS: dict[str, Callable[[Evidence, Evidence], bool]] = {
    "sends more, holds less": lambda run, ddp: run.sent > ddp.sent and run.held < ddp.held,
    "holds less than DDP": lambda run, ddp: run.held < ddp.held,
    "sends less than DDP": lambda run, ddp: run.sent < ddp.sent,
    "ends with DDP's parameters": lambda run, ddp: run.digits == ddp.digits,
    "holds half of DDP's at most": lambda run, ddp: 2 * run.held <= ddp.held,
    "is compared with its like": lambda run, ddp: (run.ranks, run.dtype) == (ddp.ranks, ddp.dtype),
}


def run_of(stage: int, ranks: int, dtype: str) -> Evidence:
    """As the formulas have it."""
    whole = {"float32": (16, 8, 4, 0), "bfloat16": (16, 4, 2, 0)}[dtype][stage]
    held = whole * PSI + (16 - whole) * PSI // ranks
    sent = (3 if stage == 3 else 2) * (4 if dtype == "float32" else 2) * PSI * (ranks - 1) // ranks
    return Evidence(stage, ranks, dtype, PSI, held, sent, f"{ranks} {dtype}")


def runs_on(*ranks: int, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> list[Evidence]:
    return [run_of(stage, n, dtype) for n in ranks for dtype in dtypes for stage in range(4)]


PLAIN, MANY = runs_on(4, dtypes=("float32",)), runs_on(2, 4)
ROUNDS = Evidence(2, 4, "float32", PSI, PLAIN[2].held, PLAIN[2].sent // 2, "rounded")  # an engine that compresses
IN_WORDS = {run: f"stage {run.stage}, {run.ranks} ranks, {run.dtype}" for run in (*MANY, *runs_on(1))}
IN_WORDS[ROUNDS] = "stage 2 that rounds"


def tried_with(runs: list[Evidence]) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        order = {name: number for number, name in enumerate(IN_WORDS[run] for run in runs)}
        for said, claim in CLAIMS.items():
            given = play.keep("`runs`", list(runs))
            with play.event(f'"{said}"', uses=()) as event:
                result = play.code.verdict(claim, given)
                event.results.add("what verdict() returns")
            pair = isinstance(result, (tuple, list)) and len(result) == 2
            play.see("what verdict() returns", [None] * len(result) if isinstance(result, (tuple, list)) else result)
            if pair:
                word, where = result
                play.see(f'the word for "{said}"', word)
                if isinstance(where, (tuple, list)):
                    where = [IN_WORDS.get(one, "?") if isinstance(one, Evidence) else one for one in where]
                    tried = sorted(where, key=lambda one: order.get(str(one), len(order)))
                    play.see(f'where "{said}" is true', tried)
                    play.see(f'where "{said}" is true comes in the order of runs', tried == where)
                else:
                    play.see(f'where "{said}" is true', where)

    return act


NO_EVIDENCE = (
    "this run is no evidence: the claims are about stages 1 to 3, on several ranks, with a DDP to compare with"
)
NO_DDP = "there may be no DDP with as many ranks and the same dtype: leave such a run out"
PARTNER = (
    "every run of stages 1 to 3 on several ranks counts, compared with the DDP of as many ranks and the same dtype"
)

VERDICT_BATTERY = tuple(
    Scene(title, tried_with(runs), about, sizes=(1, 3))
    for title, runs, about in (
        (
            "",
            PLAIN,
            "the evidence: the runs of stages 1 to 3; true: of all of it, false: of none, else true under a condition",
        ),
        ("with the runs in another order", PLAIN[::-1], "DDP may stand anywhere, and `where` has the order of `runs`"),
        ("with both dtypes, on 2 and on 4 ranks", MANY, PARTNER),
        ("with runs that are mixed up", MANY[1::2] + MANY[::2], PARTNER),
        ("with an engine that rounds, too", [*PLAIN, ROUNDS], "every run counts, also two of one stage"),
        (
            "with runs on one rank among them",
            runs_on(1, 4),
            "one rank has nobody to share with: such a run is no evidence",
        ),
        ("with runs on one rank alone", runs_on(1), NO_EVIDENCE),
        ("with a run of DDP alone", PLAIN[:1], NO_EVIDENCE),
        ("with one run and its DDP", [PLAIN[3], PLAIN[0]], "one run with a DDP to compare is evidence, too"),
        ("with no DDP", PLAIN[1:], NO_DDP),
        ("with no DDP in bfloat16", [run for run in MANY if run.stage or run.dtype == "float32"], NO_DDP),
        ("with no DDP on 2 ranks", [run for run in MANY if run.stage or run.ranks == 4], NO_DDP),
        ("with no runs", [], "without evidence nothing was tried: neither true nor false (all([]) is True)"),
    )
)


VERDICT_STUB = '''\
from zerolab.lab.exercises import Todo


def verdict(claim, runs):
    """The verdict on a claim about ZeRO, and the runs of which it is true.

    claim(run, ddp) says whether it is true of a run, compared with `ddp`: the run of stage
    0 with as many ranks and the same dtype. runs: in any order; a run has stage, ranks,
    dtype, parameters, held, sent and digits. The evidence: the runs of stages 1 to 3 on
    more than one rank that have such a `ddp` among the runs.

    Returns (word, where). where: the list of the evidence of which the claim is true, in
    the order of `runs`. word: "true" of all the evidence, "false" of none of it, else "true
    under a condition"; "not tried" without evidence.
    """
    raise Todo("19.2")
'''

VERDICT = """\
def verdict(claim, runs):
    ddps = {(run.ranks, run.dtype): run for run in runs if run.stage == 0}
    tried = [run for run in runs
             if run.stage > 0 and run.ranks > 1 and (run.ranks, run.dtype) in ddps]
    where = [run for run in tried if claim(run, ddps[run.ranks, run.dtype])]
    if not tried:
        return "not tried", where
    if not where:
        return "false", where
    return "true" if len(where) == len(tried) else "true under a condition", where
"""


EXERCISES = [
    Exercise(
        id="19.1",
        title="what a message carries",
        difficulty=1,
        section="Open the envelopes",
        battery=CARRIES_BATTERY,
        stub=CARRIES_STUB,
        reference=CARRIES,
        hints=(
            "Go through states.items(), and collect the names for which the message is the same as the state, or as "
            "this rank's shard of it.",
            "state.view(world_size, -1)[rank] is the shard. state.to(payload.dtype) rounds as the way did.",
            "if torch.equal(payload, state) or torch.equal(payload, shard): found.append(name)",
        ),
        exports=("carries",),
    ),
    Exercise(
        id="19.2",
        title="the verdict",
        difficulty=1,
        section="A claim is a sentence about runs",
        battery=VERDICT_BATTERY,
        stub=VERDICT_STUB,
        reference=VERDICT,
        hints=(
            "First the DDP runs, by what has to agree: ddps = {(run.ranks, run.dtype): run for ... if run.stage == 0}.",
            "Then the evidence: stage above 0, more than one rank, and (run.ranks, run.dtype) in ddps. Then those of "
            "which claim(run, ddps[run.ranks, run.dtype]) is true.",
            "No evidence: not tried. None of it: false. All of it: true. Else: true under a condition.",
        ),
        exports=("verdict",),
    ),
]
