"""What overlap can hide: the time of a step on a link, before anybody runs it.

`predicted_step` makes the calls of the engine (forward.py, backward.py, prefetch.py) in the engine's order, as it is
from the second step on; a test compares it with real ranks. They queue on one link, as on that of `lab.link`. Left out
are control messages, the optimizer's step, Python, and embeddings, which are looked up. An all-reduce is one call, as
on NCCL; on gloo the engine makes two of it.

`knee` knows no order: it asks of each phase whether what it sends fits behind what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from zerolab.comm.recording import Call, bytes_sent, passes
from zerolab.engine.precision import KEEP, Precision
from zerolab.measure.spans import Span, Trace, length


class Phase(NamedTuple):
    """What one phase of a step computes and sends: `seconds` with nothing to wait for, and `sent` bytes.

    latency: seconds that its messages take, however small they are.
    """

    seconds: float
    sent: float
    latency: float = 0.0


Phases = Mapping[str, Phase]  # by name: "forward", "backward"
Doing = tuple[str, int]  # what a rank does, and the unit that it does it with
WAITS = {"gather": "gathered", "reduce": "reduced"}


def overlapped(phases: Phases, bandwidth: float) -> float:
    """Seconds of a step that waits only for what a phase sends beyond what fits into its computing."""
    return sum(max(phase.seconds, phase.latency + phase.sent / bandwidth) for phase in phases.values())


def one_after_the_other(phases: Phases, bandwidth: float) -> float:
    """Seconds of a step that never computes and sends at the same time."""
    return sum(phase.seconds + phase.latency + phase.sent / bandwidth for phase in phases.values())


def knee(phases: Phases) -> float:
    """The bandwidth, in bytes per second, from which on every phase can hide what it sends.

    Infinite if the latency of a phase's messages alone takes as long as its computing.
    """
    return max(_least(phase) for phase in phases.values())


def _least(phase: Phase) -> float:
    if phase.sent == 0:
        return 0.0
    return phase.sent / (phase.seconds - phase.latency) if phase.seconds > phase.latency else math.inf


def phases_of(trace: Trace, latency: float = 0.0) -> dict[str, Phase]:
    """What forward and backward computed and sent in a trace. latency: seconds for each message of a ring."""
    found = {}
    for name in ("forward", "backward"):
        calls = [call for call in trace.calls if call.phase == name and not call.control]
        seconds = length([(span.start, span.end) for span in trace.spans if span.phase == name])
        messages = sum(passes(call.op) for call in calls) * (trace.world_size - 1)
        found[name] = Phase(seconds, sum(call.sent for call in calls), messages * latency)
    return found


def order(stage: int, last: int, prefetch: bool = True) -> dict[str, list[Doing]]:
    """What a rank does in each phase, one after the other. Units are 0, the root, to `last`, in the order of forward.

    ("gather", k) and ("reduce", k) start a collective of unit k, ("gathered", k) and ("reduced", k) wait for it.
    ("compute", 0) is the last layer, which belongs to the root.
    """
    return {"forward": [*_forward(stage, last, prefetch)], "backward": [*_backward(stage, last, prefetch)]}


def _forward(stage: int, last: int, prefetch: bool) -> Iterator[Doing]:
    for unit in range(last + 1):
        if stage > 0:
            if unit == 0 or not prefetch:
                yield "gather", unit
            yield "gathered", unit
            if prefetch and unit < last:
                yield "gather", unit + 1
        if unit > 0:
            yield "compute", unit
    yield "compute", 0


def _backward(stage: int, last: int, prefetch: bool) -> Iterator[Doing]:
    if stage == 3 and prefetch:
        yield "gather", last
    yield "compute", 0  # in stage 3 the root is still gathered
    for unit in range(last, 0, -1):
        if stage == 3:
            if not prefetch:
                yield "gather", unit
            yield "gathered", unit
        if unit + 2 <= last:  # one reduction at a time is under way
            yield "reduced", unit + 2
        if stage == 3 and prefetch and unit > 1:  # before the reduction, or it would wait behind it
            yield "gather", unit - 1
        if unit < last:
            yield "reduce", unit + 1
        yield "compute", unit
    if last > 1:
        yield "reduced", 2
    for unit in (1, 0):
        yield "reduce", unit
        yield "reduced", unit


def predicted_step(
    stage: int,
    units: Mapping[str, tuple[int, float]],
    ranks: int,
    bandwidth: float,
    latency: float = 0.0,
    prefetch: bool = True,
    precision: Precision = KEEP,
) -> Trace:
    """A step as `trace` would record it, from 0 on; `plots.gantt` draws it.

    units: elements, and seconds of the forward, by name, the root first. A backward takes twice as long as a forward.
    bandwidth: bytes per second. latency: seconds for each of the N-1 messages of a ring; an all-reduce has twice as
    many. prefetch: as `Stage.prefetch`; stage 0 gathers nothing. Raises ValueError for what cannot be.
    """
    if stage not in (0, 1, 2, 3) or ranks < 1 or bandwidth <= 0 or len(units) < 2:
        raise ValueError("a step needs a stage from 0 to 3, a rank, a bandwidth, and a unit beside the root")
    _, compute, reduce = precision.dtypes(torch.float32, trainable=True)
    ops = {"gather": ("all_gather", compute), "reduce": ("reduce_scatter" if stage else "all_reduce", reduce)}
    names, step = list(units), Trace(0, ranks)
    calls: dict[Doing, Call] = {}  # by what one waits for
    now = free = 0.0  # when the rank is done with what it did so far, and when the link is
    for phase, doings in order(stage, len(units) - 1, prefetch).items():
        for verb, unit in doings:
            elements, seconds = units[names[unit]]
            if verb == "compute":
                begin, now = now, now + (seconds if phase == "forward" else 2 * seconds)
                step.spans.append(Span(phase, names[unit], begin, now))
            elif verb in ops:
                op, dtype = ops[verb]
                payload = elements * dtype.itemsize
                sent = bytes_sent(op, payload, ranks)
                free = max(now, free) + (passes(op) * (ranks - 1) * latency + sent / bandwidth)
                step.calls.append(Call(op, names[unit], phase, payload, sent, start=now, end=free))
                calls[WAITS[verb], unit] = step.calls[-1]
            else:
                call = calls[verb, unit]
                begin, now = now, max(now, call.end or 0.0)
                call.waits.append((begin, now))
    return step
