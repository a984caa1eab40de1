"""The trace: when this rank computed what, and which collectives were under way meanwhile.

    with trace(zero, optimizer) as record:
        one step
    record.overlap    # 0: this rank waited for every collective; 1: it never waited

Times are seconds of `time.perf_counter`. On Linux all processes of a machine share that clock, so the traces of
several ranks can be drawn on one axis. On CUDA they are the host's times, not the device's, which for a collective on
NCCL are not known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.optim import Optimizer

from zerolab.comm.recording import Call
from zerolab.engine.engine import Engine
from zerolab.engine.step import each_of
from zerolab.engine.unit import Unit
from zerolab.measure.watch import watched


class Span(NamedTuple):
    """From `start` to `end` this rank worked on `unit` in `phase`: "forward", "backward" or "step"."""

    phase: str
    unit: str
    start: float
    end: float


@dataclass
class Trace:
    """One rank's record. `spans` never overlap; `calls` may, and their `waits` lie inside or between spans."""

    rank: int
    world_size: int
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def under_way(self) -> list[tuple[float, float]]:
        """When at least one collective was under way, as intervals. Control messages do not count."""
        return union((call.start, call.end) for call in self.calls if call.end is not None and not call.control)

    @property
    def waits(self) -> list[tuple[float, float]]:
        """When this rank waited for one of them, as intervals."""
        return union(wait for call in self.calls if not call.control for wait in call.waits)

    @property
    def overlap(self) -> float | None:
        """Of the time with a collective under way, the fraction that this rank did not spend waiting; 1 if none ran.

        None if only the device knows when they ended (NCCL): look at a profile of it.
        """
        total = length(self.under_way)
        if not total and any(not call.control for call in self.calls):
            return None
        return 1.0 - length(intersection(self.under_way, self.waits)) / total if total else 1.0


@contextmanager
def trace(zero: Engine, optimizer: Optimizer | Iterable[Optimizer]) -> Iterator[Trace]:
    """Record a block, usually one step. optimizer: one, or a list of those that train the model."""
    optimizers = each_of(optimizer)
    with zero.comm.record() as calls:
        spans = _Spans()
        result = Trace(zero.rank, zero.world_size, spans.done, calls)
        handles = [one.register_step_pre_hook(lambda *_: spans.begin("step", "")) for one in optimizers]
        handles += [one.register_step_post_hook(lambda *_: spans.stop()) for one in optimizers]
        try:
            with watched(zero, spans.before, spans.after):
                yield result
        finally:
            for handle in handles:
                handle.remove()
        spans.stop()


class _Spans:
    """Cuts time into spans: each override point that the engine calls ends a span, and most begin another."""

    def __init__(self) -> None:
        self.done: list[Span] = []
        self._now: tuple[str, str, float] | None = None
        self._forward: list[Unit] = []  # units in the middle of their forward, outermost first
        self._backward: list[Unit] = []  # units in the middle of their backward

    def begin(self, phase: str, unit: str) -> None:
        self.stop()
        self._now = (phase, unit, time.perf_counter())

    def stop(self) -> None:
        if self._now is not None:
            phase, unit, start = self._now
            self.done.append(Span(phase, unit, start, time.perf_counter()))
        self._now = None

    def before(self, point: str, unit: Unit) -> None:
        if point != "after_step":
            self.stop()

    def after(self, point: str, unit: Unit) -> None:
        if point == "pre_forward":
            self._forward.append(unit)
        elif point == "post_forward":
            self._forward = [other for other in self._forward if other is not unit]
        elif point == "pre_backward":
            self._backward.append(unit)
        elif point == "post_backward":
            self._backward = [other for other in self._backward if other is not unit]
        if point.endswith("backward"):
            if self._backward:
                self.begin("backward", self._backward[-1].name)
        elif self._forward:
            self.begin("forward", self._forward[-1].name)


Intervals = list[tuple[float, float]]


def union(intervals: Iterable[Any]) -> Intervals:
    """The same points, in order, as intervals that do not overlap."""
    result: Intervals = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The points that lie in both. Each argument is a result of `union`."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(start, end) for start, end in pairs if start < end]


def length(intervals: Intervals) -> float:
    """The total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
