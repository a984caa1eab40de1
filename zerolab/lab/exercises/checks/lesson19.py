"""Lesson 19: what a message carries, and the verdict on a claim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.lab.exercises.checks.values import forgot_to_return, in_case
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.trial import Evidence, envelopes, evidence, laid_out

# ---------------------------------------------------------------------- 19.1

STATES = ("parameters", "gradient", "average", "average of squares")


def carried(payload: Tensor, states: dict[str, Tensor], rank: int, world_size: int) -> list[str]:
    """The right answer."""
    found = []
    for name, whole in states.items():
        shard = whole.view(world_size, -1)[rank]
        if any(torch.equal(payload, part.to(payload.dtype)) for part in (whole, shard)):
            found.append(name)
    return found


def check_carries(answer: Any, world: World) -> None:
    live = list(_live_messages(world))  # first, while all ranks are in step: a rank that is wrong stops
    for when, payload, states in (*_messages(world), *live):
        _try_message(answer, world, when, payload, states)


def _states(numel: int, world_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Numbers such as training has, padded with zeros to a multiple of the number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    size = -(-numel // world_size) * world_size
    scales = (0.5, 1e-2, 1e-3, 1e-6)
    flat = {name: torch.zeros(size) for name in STATES}
    for name, scale in zip(STATES, scales):
        flat[name][:numel] = scale * torch.randn(numel, generator=generator)
    flat["average of squares"].abs_()
    return flat


def _messages(world: World) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    N, rank = world.world_size, world.rank
    for numel in (8, 13, 1):
        states = _states(numel, N, seed=numel)
        for name, whole in states.items():
            yield f"{name}, all {len(whole)} elements", whole.clone(), states
            yield f"{name}, this rank's shard of {len(whole)}", whole.view(N, -1)[rank].clone(), states
    states = _states(30, N, seed=5)
    for name, whole in states.items():
        yield f"{name}, in bfloat16", whole.to(torch.bfloat16), states
        yield f"{name}, this rank's shard in bfloat16", whole.view(N, -1)[rank].to(torch.bfloat16), states
    wide = {name: whole.double() for name, whole in states.items()}
    yield "float64, parameters", wide["parameters"].clone(), wide
    half = states | {"gradient": states["gradient"].to(torch.bfloat16)}
    yield "a bfloat16 gradient among float32 states", half["gradient"].clone(), half
    yield "a float32 average beside a bfloat16 gradient", half["average"].clone(), half
    if N > 1:
        for other in {(rank + 1) % N, N - 1 - rank} - {rank}:
            yield f"the shard of rank {other}", states["parameters"].view(N, -1)[other].clone(), states
        whole = states["parameters"]
        yield "as long as a shard, from the second element on", whole[1 : 1 + len(whole) // N].clone(), states
    # A step of Adam changes a parameter by a thousandth: both are states.
    after = states["parameters"] * (1 + 1e-6)
    close = states | {"new parameters": after}
    yield "parameters before a step", states["parameters"].clone(), close
    yield "parameters after a step", after.clone(), close
    yield "a gradient, divided by the ranks and doubled", states["gradient"] * 2.0, states
    yield "a gradient, reversed", states["gradient"].flip(0).clone(), states
    yield "a gradient with one element changed", _one_changed(states["gradient"]), states
    yield "a gradient of the opposite sign", -states["gradient"], states
    yield "other numbers", torch.linspace(0.0, 1.0, len(states["gradient"])), states
    yield "a message of another length", torch.ones(len(states["gradient"]) + 1), states
    # Before the first step all averages are zero: nobody can tell which of them a message of zeros is.
    fresh = states | {"average": torch.zeros_like(after), "average of squares": torch.zeros_like(after)}
    yield "zeros, where both averages are zeros", torch.zeros_like(after), fresh
    backwards = dict(reversed(fresh.items()))
    yield "zeros, with the states in another order", torch.zeros_like(after), backwards
    yield "a message, and no states", torch.ones(N), {}


def _one_changed(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[0] += 1.0
    return changed


def _try_message(answer: Any, world: World, when: str, payload: Tensor, states: dict[str, Tensor]) -> None:
    want = carried(payload, states, world.rank, world.world_size)
    given, kept = payload.clone(), {name: whole.clone() for name, whole in states.items()}
    # An engine asks while training goes on: outside of no_grad, with what it has.
    shown = f"a message of {payload.numel()} elements ({when})"
    likely = "an error that comes only with this message: compare its length and its dtype with the states'"
    with in_case(answer, shown, likely, CARRIES_ERRORS):
        got = answer.carries(payload, states, world.rank, world.world_size)
    if not torch.equal(payload, given) or payload.dtype != given.dtype:
        raise Wrong(f"{shown}: the message is no longer what it was", "the message was written to: work on a copy")
    if list(states) != list(kept) or not all(torch.equal(states[name], kept[name]) for name in kept):
        raise Wrong(f"{shown}: the states are no longer what they were", "the states were written to: work on a copy")
    if isinstance(got, str):
        raise Wrong(f"{shown}: carries() returns {got!r}", "return a list of names, also for one or none")
    if not isinstance(got, (list, tuple, set)):
        likely = forgot_to_return(got) or "return a list of names, also for one or none"
        raise Wrong(f"{shown}: carries() returns {got!r}", likely)
    if not all(isinstance(name, str) for name in got):
        raise Wrong(
            f"{shown}: carries() returns {got!r}", "return names: the keys of `states`, not what they stand for"
        )
    found = list(got)
    if sorted(found) == sorted(want):
        return
    raise Wrong(
        f"{shown}: carries() returns {found}, expected {want}", _why_carries(found, payload, states, world, want)
    )


def _why_carries(found: list[str], payload: Tensor, states: dict[str, Tensor], world: World, want: list[str]) -> str:
    N, rank = world.world_size, world.rank
    if len(found) != len(set(found)):
        return "a name appears twice: on one rank the shard is the whole. Either match is enough"
    missing, extra = set(want) - set(found), set(found) - set(want)
    if missing and len(want) > 1 and set(found) < set(want):
        return "more than one state can have these numbers, and the evidence cannot tell them apart: name them all"
    for name in missing:
        whole = states[name]
        in_shards = payload.numel() * N == whole.numel() and N > 1
        if payload.dtype != whole.dtype:
            return (
                f"a {_short(whole.dtype)} state that travels in {_short(payload.dtype)} was rounded on the way: round "
                "the state in the same way, state.to(payload.dtype), before you compare"
            )
        if in_shards:
            return "in an all-gather a rank gives its shard alone: compare with the rank-th of N equal stretches, too"
        return "the state has these numbers, in this order: a reduce-scatter is given the whole of it"
    for name in extra:
        whole = states[name]
        parts = [whole, whole.view(N, -1)[rank]]
        same = [part for part in parts if part.numel() == payload.numel()]
        if not same:
            shards = whole.view(N, -1)
            if any(torch.equal(payload, shard.to(payload.dtype)) for shard in shards):
                return "that is another rank's shard: this rank's has the number `rank`"
            return "the lengths differ: a message is the whole state or this rank's shard, and nothing in between"
        part = same[0].to(payload.dtype)
        shards = whole.view(N, -1)
        if payload.numel() == shards.shape[1] and any(torch.equal(payload, s.to(payload.dtype)) for s in shards):
            return "that is another rank's shard: this rank's has the number `rank`"
        if torch.equal(payload.sort().values, part.sort().values):
            return "the same numbers in another order: compare element by element"
        if torch.allclose(payload.float(), part.float(), rtol=1e-2, atol=1e-3):
            return "close is not equal: a step changes a parameter by a thousandth, so compare with torch.equal"
        if torch.equal(payload.abs(), part.abs()):
            return "the signs differ: compare the numbers themselves, not their squares or norms"
        return "some elements are equal, not all: all of them have to be"
    return "the names of the states that have these numbers, each once"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Odd(nn.Module):
    """Two units of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(5, 7), nn.Tanh()), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def _given(rank: int, step: int) -> tuple[Tensor]:
    return (torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)),)


def _live_messages(world: World) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """The messages of two real steps in each stage."""
    rank = world.rank
    for stage in zerolab.STAGES:
        model = odd()
        zero = stage(model, units=[nn.Sequential])
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            with zero.full_parameters():
                before = {name: param.detach().clone() for name, param in model.named_parameters()}
            alone = odd()
            alone.load_state_dict(before)
            alone(*_given(rank, step)).square().mean().backward()
            grads = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
            adam.zero_grad()
            with envelopes(zero) as sent:
                model(*_given(rank, step)).square().mean().backward()
            adam.step()
            units = {unit.name: unit for unit in zero.units}
            for message in sent:
                unit = units[message.unit]
                states = {"parameters": laid_out(unit, before), "gradient": laid_out(unit, grads)}
                when = f"stage {stage.stage}, step {step + 1}, {message.what} of {message.unit}"
                yield when, message.payload, states


CARRIES_ERRORS = {
    "must match the size of tensor": "the lengths differ: torch.equal says False to that, where == raises",
    "Expected all tensors to have the same dtype": "bring both to one dtype, that of the message",
    "did not match": "bring both to one dtype, that of the message: the state is what gets rounded",
    "is invalid for input of size": "a message need not divide by the number of ranks: cut the state, not the message",
    "list index out of range": "a message may be none of the states: then the list is empty",
    "StopIteration": "a message may be none of the states: then the list is empty",
    "ambiguous": "comparing tensors gives a tensor: torch.equal gives one True or False",
    "with more than one value": "comparing tensors gives a tensor: torch.equal gives one True or False",
}

CARRIES_STUB = '''\
import torch
from zerolab.lab.exercises import Todo


def carries(payload, states, rank, world_size):
    """The names of the states that this message could be: a list, empty if it is none of
    them.

    payload: what this rank gave to a collective, flat: the whole of a state, (N * S,), or
    this rank's shard, (S,). It may have been rounded on the way, to payload.dtype. states:
    {name: flat tensor (N * S,)}, of any dtype. A message is a state if all elements are
    equal, in order (torch.equal): rounding makes no state of another.
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

Claim = Callable[[Evidence, Evidence], bool]
WORDS = ("true", "false", "true under a condition", "not tried")


def judged(claim: Claim, runs: list[Evidence]) -> tuple[str, list[Evidence]]:
    """The right answer."""
    ddps = {(run.ranks, run.dtype): run for run in runs if run.stage == 0}
    tried = [run for run in runs if run.stage > 0 and run.ranks > 1 and (run.ranks, run.dtype) in ddps]
    where = [run for run in tried if claim(run, ddps[run.ranks, run.dtype])]
    if not tried:
        return "not tried", where
    return "false" if not where else "true" if len(where) == len(tried) else "true under a condition", where


CLAIMS: dict[str, Claim] = {
    "holds less than DDP": lambda run, ddp: run.held < ddp.held,
    "sends less than DDP": lambda run, ddp: run.sent < ddp.sent,
    "sends no more than DDP": lambda run, ddp: run.sent <= ddp.sent,
    "sends more, holds less": lambda run, ddp: run.sent > ddp.sent and run.held < ddp.held,
    "ends with DDP's parameters": lambda run, ddp: run.digits == ddp.digits,
    "ends with other parameters": lambda run, ddp: run.digits != ddp.digits,
    "holds 10 bytes per parameter at most": lambda run, ddp: run.held <= 10 * run.parameters,
    "holds 16Ψ/N and a tenth at most": lambda run, ddp: run.held <= 1.1 * 16 * run.parameters / run.ranks,
    "anything": lambda run, ddp: True,
    "is as large as its DDP": lambda run, ddp: (
        (run.parameters, run.ranks, run.dtype) == (ddp.parameters, ddp.ranks, ddp.dtype)
    ),
    "holds half of DDP's at most": lambda run, ddp: 2 * run.held <= ddp.held,
}


class Rounded(zerolab.Zero2):
    """An engine that does compress: gradients are rounded before they are sent. So the other verdict comes up too."""

    def reduce(self, unit: zerolab.Unit) -> Any:
        full = unit.bucket.full
        assert full is not None
        full.copy_(torch.round(full * 64) / 64)
        return super().reduce(unit)


def check_verdict(answer: Any, world: World) -> None:
    runs = _measured(world)
    for when, some in _cases(runs, world):
        for said, claim in CLAIMS.items():
            _try_claim(answer, f'"{said}", {when}', claim, some)


def _measured(world: World) -> list[Evidence]:
    """Every stage in both dtypes, on one rank and on all (and on pairs of four), and one that rounds."""
    N, rank = world.world_size, world.rank
    groups = [[dist.new_group([one]) for one in range(N)][rank]]
    if N == 4:
        groups.append([dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2])
    runs = []
    for group in (*groups, None) if N > 1 else groups:
        for dtype in (torch.float32, torch.bfloat16):
            for stage in (*zerolab.STAGES, Rounded):
                run = evidence(stage, dtype, group, odd, _given_in(dtype), (nn.Sequential,))
                if stage is not Rounded:
                    runs.append(run)
                elif dtype == torch.float32:
                    rounded = run
    if N > 1:
        runs.append(rounded)
    return runs


def _given_in(dtype: torch.dtype) -> Callable[[int, int], tuple[Tensor]]:
    return lambda rank, step: tuple(x.to(dtype) for x in _given(rank, step))  # type: ignore[return-value]


def _cases(runs: list[Evidence], world: World) -> Iterator[tuple[str, list[Evidence]]]:
    """The smallest first."""
    if world.world_size == 1:
        yield "with runs on one rank", runs
        yield "with no runs", []
        return
    *honest, rounds = runs
    many = [run for run in honest if run.ranks == world.world_size]
    plain = many[:4]
    yield "with float32 runs", plain
    yield "with the runs in another order", plain[::-1]
    yield "with a run of DDP alone", plain[:1]
    yield "with stage 3 and no DDP", plain[3:]
    yield "with both dtypes", many
    yield "with runs on one rank among them", [run for run in honest if run.ranks in (1, world.world_size)]
    yield "with an engine that rounds", [*plain, rounds]
    yield "with all numbers of ranks", honest
    yield "with DDP missing in bfloat16", [run for run in honest if (run.stage, run.dtype) != (0, "bfloat16")]
    yield "with all of them, shuffled", [runs[i] for i in torch.randperm(len(runs), generator=_seeded())]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _try_claim(answer: Any, when: str, claim: Claim, runs: list[Evidence]) -> None:
    want, where = judged(claim, runs)
    asked: list[tuple[Evidence, Evidence]] = []

    def noted(run: Evidence, ddp: Evidence) -> bool:
        if not isinstance(run, Evidence) or not isinstance(ddp, Evidence):
            other = ddp if isinstance(run, Evidence) else run
            likely = "claim(run, ddp) takes two runs: the one that is tried, and the DDP run to compare it with"
            raise Wrong(f"{when}: claim() was given a {type(other).__name__}", likely)
        asked.append((run, ddp))
        return claim(run, ddp)

    given = copy.copy(runs)
    with in_case(answer, when, "an error that comes only with these runs", VERDICT_ERRORS):
        got = answer.verdict(noted, given)
    if given != runs:
        raise Wrong(f"{when}: the list of runs is no longer what it was", "the list was changed: make another one")
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        likely = forgot_to_return(got) or "return two things: the word, and the list of runs of which the claim is true"
        raise Wrong(f"{when}: verdict() returns {got!r:.80}", likely)
    word, found = got
    if word not in WORDS:
        raise Wrong(f"{when}: the verdict is {word!r}", f"it is one of {', '.join(map(repr, WORDS))}")
    right = word == want and isinstance(found, (list, tuple)) and list(found) == where
    if right:
        return
    likely = _why_verdict(word, found, want, where, asked, runs)
    numbers = f" and {len(found)} runs" if isinstance(found, (list, tuple)) else ""
    raise Wrong(f"{when}: {word!r}{numbers}, expected {want!r} and {len(where)} runs", likely)


def _why_verdict(
    word: str,
    found: Any,
    want: str,
    where: list[Evidence],
    asked: list[tuple[Evidence, Evidence]],
    runs: list[Evidence],
) -> str:
    for run, ddp in asked:
        if ddp.stage != 0:
            return "the second run given to claim() is DDP's, stage 0, and the first is the one that is tried"
        if ddp.dtype != run.dtype and run.stage > 0:
            return "compared with a DDP of another dtype: bfloat16 is a difference of its own. Look for the same dtype"
        if ddp.ranks != run.ranks and run.stage > 0:
            return "compared with a DDP on another number of ranks: look for one with as many"
    if not isinstance(found, (list, tuple)) or not all(isinstance(run, Evidence) for run in found):
        return "the second thing is a list of runs, those in `runs`, of which the claim is true"
    if want == "not tried":
        return "there is no run that could tell, so this is neither true nor false: not tried (all([]) is True)"
    if any(run.stage == 0 for run in found):
        return "DDP itself is on the list: the claims are about ZeRO, stages 1 to 3"
    if any(run.ranks == 1 for run in found):
        return "a run on one rank is on the list: there is nobody to share with, so it is no evidence"
    partners = {(run.ranks, run.dtype) for run in runs if run.stage == 0}
    if any((run.ranks, run.dtype) not in partners for run in found):
        return "a run without a DDP of as many ranks and the same dtype is on the list: there is nothing to compare"
    if list(found) == where:
        if word == "not tried":
            return "there are runs of ZeRO with a DDP to compare: the claim was tried"
        if want == "true" and word == "true under a condition" and all(run in where for run, _ in asked):
            return "it is true of all the evidence: no condition is left"
        if want == "true under a condition":
            return f"of some of the runs it is true, and not of others: {want!r}"
        return (
            "runs that are no evidence were counted: DDP itself, a single rank, or one without a DDP to compare with"
            if word == "true under a condition"
            else "true: of all the runs that count. false: of none. And in between, true under a condition"
        )
    if len(found) == len(where) and all(run in where for run in found):
        return "the right runs, in another order: keep the order of `runs`"
    if where and all(run not in where for run in found):
        return "on the list are not the runs of which the claim is true"
    if set(map(id, found)) < set(map(id, where)):
        return "runs are missing on the list: every run counts, each with its own DDP"
    return "the list is of the runs of which the claim is true, each once"


VERDICT_ERRORS = {
    "KeyError": "there may be no DDP with as many ranks and the same dtype: such a run is no evidence",
    "StopIteration": "there may be no DDP with as many ranks and the same dtype: such a run is no evidence",
    "list index out of range": "there may be no such run: leave out what has no DDP to be compared with",
    "has no attribute 'sent'": "claim(run, ddp) takes two runs: look for a DDP, and leave the run out if there is none",
    "has no attribute 'held'": "claim(run, ddp) takes two runs: look for a DDP, and leave the run out if there is none",
    "missing 1 required positional": "claim(run, ddp) takes two runs: the one that is tried, and its DDP",
    "by zero": "there may be no run that counts: that is 'not tried'",
    "frozen": "a run cannot be changed: it is evidence",
    "object has no attribute": "a run has stage, ranks, dtype, parameters, held, sent and digits",
    "unhashable": "make a list of the runs, or look them up by (run.ranks, run.dtype)",
}

VERDICT_STUB = '''\
from zerolab.lab.exercises import Todo


def verdict(claim, runs):
    """The verdict on a claim about ZeRO, and the runs of which it is true.

    claim(run, ddp) says whether it is true of a run, compared with `ddp`: the run of stage
    0 with as many ranks and the same dtype. runs: in any order; a run has stage, ranks,
    dtype, parameters, held, sent and digits. The evidence: the runs of stages 1 to 3 on
    more than one rank that have such a `ddp` among the runs.

    Returns (word, where). where: the list of the runs of which the claim is true, in the
    order of `runs`. word: "true" of all the evidence, "false" of none of it, else "true
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
        check=check_carries,
        stub=CARRIES_STUB,
        reference=CARRIES,
        hints=(
            "Go through states.items(), and collect the names for which the message is the same as the state, or as "
            "this rank's shard of it.",
            "state.view(world_size, -1)[rank] is the shard. state.to(payload.dtype) rounds as the way did.",
            "if torch.equal(payload, state) or torch.equal(payload, shard): found.append(name)",
        ),
        exports=("carries",),
        errors=CARRIES_ERRORS,
    ),
    Exercise(
        id="19.2",
        title="the verdict",
        difficulty=1,
        section="A claim is a sentence about runs",
        check=check_verdict,
        stub=VERDICT_STUB,
        reference=VERDICT,
        hints=(
            "First the DDP runs, by what has to agree: ddps = {(run.ranks, run.dtype): run for ... if run.stage == 0}.",
            "Then the evidence: stage above 0, more than one rank, and (run.ranks, run.dtype) in ddps. Then those of "
            "which claim(run, ddps[run.ranks, run.dtype]) is true.",
            "No evidence: not tried. None of it: false. All of it: true. Else: true under a condition.",
        ),
        exports=("verdict",),
        errors=VERDICT_ERRORS,
    ),
]
