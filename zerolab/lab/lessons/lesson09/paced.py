"""Steps that lesson 09 times on its emulated processor, and the picture of such steps at several bandwidths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.lab.lessons.lesson09.processor import Processor
from zerolab.lab.lessons.lesson09.recorded import holds_memory
from zerolab.lab.plots.bandwidth import link_sweep
from zerolab.measure.overlap import Phase
from zerolab.measure.spans import Intervals, Trace, intersection, length, trace
from zerolab.measure.traffic import ledger
from zerolab.measure.watch import watched


@dataclass
class Timed:
    """A step of all ranks.

    seconds: until the last rank was done. working: how long the slowest rank took without its waits. late: by which
    part of the step a rank's processor was late. record: this rank's trace.
    """

    seconds: float
    working: float
    late: float
    record: Trace

    @property
    def noise(self) -> str:
        return f", too noisy to judge: {self.late:.0%} of it late" if self.late > 0.05 else ""


@dataclass
class Observed:
    """What a step did on this rank: bytes sent, most blocks at once by phase, its collectives, the weights after it."""

    sent: int
    most: dict[str, int]
    calls: list[tuple[str, str, str]]
    weights: Tensor


class Paced:
    """`step` of a model on an emulated processor of `speed` FLOP per second."""

    def __init__(self, zero: Engine, optimizer: Optimizer, step: Callable[..., Any], speed: float) -> None:
        self.zero, self.optimizer, self.step = zero, optimizer, step
        self.processor = Processor(zero.model, speed)  # type: ignore[arg-type]
        step()  # creates the optimizer's state

    def timed(self) -> Timed:
        """Time a step, and once more if 3 % of it or more was late; the better of the two counts."""
        found = []
        for _ in range(2):
            self.processor.late.clear()
            dist.barrier()
            begin = time.perf_counter()
            with trace(self.zero, self.optimizer) as record:
                self.step()
            took = time.perf_counter() - begin
            seconds, working = _slowest(took), _slowest(took - length(record.waits))
            waited = intersection(self.processor.late, record.waits)  # for others: that is not late
            late = _slowest(length(self.processor.late) - length(waited)) / seconds
            found.append(Timed(seconds, working, late, record))
            if late < 0.03:
                break
        return min(found, key=lambda one: one.late)

    def observed(self) -> Observed:
        most = {"forward": 0, "backward": 0}
        blocks = [unit for unit in self.zero.units if unit not in self.zero.root]

        def look(point: str, unit: Any) -> None:
            phase = point.partition("_")[2]
            if phase in most:
                most[phase] = max(most[phase], sum(map(holds_memory, blocks)))

        with ledger(self.zero) as book, watched(self.zero, before=lambda *_: None, after=look):
            self.step(1)
        calls = sorted((of.op, of.phase, of.unit) for of in book.calls if not of.control)
        weights = torch.cat([value.flatten() for value in self.zero.full_state_dict().values()])
        return Observed(book.moved, most, calls, weights)


def _slowest(seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def computing(record: Trace) -> Intervals:
    """The spans of `record` without the waits inside them."""
    pieces = []
    for span in record.spans:
        begin = span.start
        for start, end in record.waits:
            if start < span.end and begin < end:
                pieces.append((begin, min(start, span.end)))
                begin = end
        pieces.append((begin, span.end))
    return [(start, end) for start, end in pieces if start < end]


def bandwidth_sweep(
    swept: Mapping[str, Mapping[float | None, Timed]],
    sent: Mapping[str, Mapping[str, int]],
    flop: Mapping[str, float],
    speed: float,
    knee: float,
) -> tuple[Figure, str]:
    """swept[stage][part]: a step at this part of the knee's bandwidth, None: without a link. sent and flop by phase."""
    times, phases = {}, {}
    for stage, found in swept.items():
        times[stage] = {part * knee: step.seconds for part, step in found.items() if part}
        phases[stage] = {phase: Phase(flop[phase] / speed, sent[stage][phase]) for phase in flop}
    title = "How much bandwidth is enough to hide communication?"
    subtitle = f"4 ranks, 256 tokens on each; emulated: links of 20 µs, processors of {speed / 1e9:.0f} GFLOP/s"
    return link_sweep(times, phases, title, subtitle)


def taken_off(before: Timed, after: Timed) -> str:
    """What a unit ahead takes off the step, if these two are not too noisy to tell."""
    saved = before.seconds - after.seconds
    if saved > 0 and not before.noise and not after.noise:
        return f"One unit ahead takes {1000 * saved:.0f} ms off the step."
    return "This machine is too busy now to show what a unit ahead takes off the step."
