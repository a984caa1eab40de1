"""The trace: when this rank computed what, and which collectives were under way meanwhile.

    with trace(zero, optimizer) as record:
        one step
    record.overlap    # 0: it stood still for every collective; 1: it computed through all of them

Times are seconds on the clock of `time.perf_counter`, which on Linux all processes of a machine share: the traces of
several ranks can be drawn on one axis. On CUDA they are the host's times, not the device's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.optim import Optimizer

from zerolab.comm.record import Call
from zerolab.engine.engine import Engine
from zerolab.engine.unit import Unit
from zerolab.measure.watch import watched


class Span(NamedTuple):
    """This rank was at work on `unit` in `phase` ("forward", "backward", "step") from `start` to `end`."""

    phase: str
    unit: str
    start: float
    end: float


@dataclass
class Trace:
    """One rank's block. `spans` do not overlap; `calls` may, and their `waits` lie inside or between the spans."""

    rank: int
    world_size: int
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def under_way(self) -> list[tuple[float, float]]:
        """The intervals in which some collective of the stage (no message about the run) was under way."""
        return union((call.start, call.end) for call in self.calls if call.end is not None and not call.control)

    @property
    def waits(self) -> list[tuple[float, float]]:
        """The intervals in which this rank stood still for one of them."""
        return union(wait for call in self.calls if not call.control for wait in call.waits)

    @property
    def overlap(self) -> float:
        """The share of the time with a collective under way in which this rank did not stand still; 1 without any."""
        total = length(self.under_way)
        return 1.0 - length(intersection(self.under_way, self.waits)) / total if total else 1.0


@contextmanager
def trace(zero: Engine, optimizer: Optimizer) -> Iterator[Trace]:
    """Record the block, usually one step."""
    with zero.comm.record() as calls:
        spans = _Spans()
        result = Trace(zero.rank, zero.world_size, spans.done, calls)
        handles = [
            optimizer.register_step_pre_hook(lambda *_: spans.begin("step", "")),
            optimizer.register_step_post_hook(lambda *_: spans.stop()),
        ]
        try:
            with watched(zero, spans.before, spans.after):
                yield result
        finally:
            for handle in handles:
                handle.remove()
        spans.stop()


class _Spans:
    """Cuts the time into spans: each of the engine's calls ends one, and most begin another."""

    def __init__(self) -> None:
        self.done: list[Span] = []
        self._now: tuple[str, str, float] | None = None
        self._forward: list[Unit] = []  # the units whose forward is under way, the outermost first
        self._backward: list[Unit] = []  # the same of backward

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
    """The same points in intervals that do not overlap, in order."""
    result: Intervals = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """The points that lie in both; each as `union` gives it."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(start, end) for start, end in pairs if start < end]


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
