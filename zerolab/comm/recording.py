"""What is known of each collective: a `Call` for those who record, and a door for those who watch from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zerolab.comm.flight import name_ranks
from zerolab.comm.groups import Group


@dataclass
class Call:
    """One collective as it ran on this rank.

    `payload`: bytes of the full tensor, all ranks' parts together. `sent`: bytes this rank sends when the
    operation runs as a ring: (N-1)/N of the payload, twice that for an all-reduce. `control`: a message about
    the run (agreement, scalars), not part of the stage's traffic. `step`: 0 before the first optimizer step.
    `link`: with a mesh, "inside" a node or "between" nodes.

    `start`, `end`: when this rank issued it and when it finished, in seconds on the clock of `time.perf_counter`.
    `end` is None until then, and stays None on NCCL, where only the device knows, and where no data moves (the fake
    backend). `waits`: when this rank stood still for it, on NCCL none; `waited`: the seconds they add up to.
    """

    op: str
    unit: str
    phase: str
    payload: int
    sent: int
    control: bool = False
    step: int = 0
    link: str = ""
    start: float = field(default=0.0, compare=False)
    end: float | None = field(default=None, compare=False)
    waits: list[tuple[float, float]] = field(default_factory=list, compare=False)

    @property
    def waited(self) -> float:
        return sum(end - begin for begin, end in self.waits)


def passes(op: str) -> int:
    """How often a ring sends the payload round: an all-reduce is a reduce-scatter and then an all-gather."""
    return 2 if op == "all_reduce" else 1


def bytes_sent(op: str, payload: int, size: int) -> int:
    """Bytes that one of `size` ranks sends when the operation runs as a ring."""
    return passes(op) * payload * (size - 1) // size


class Observer:
    """Watches the collectives of this process while it is in `observers`."""

    def before(self, op: str, payload: int, size: int) -> float:
        """`size` ranks are about to issue `op` on `payload` bytes, all parts together.

        Returns the moment (`time.perf_counter`) before which no wait for it may end; 0 for any.
        """
        return 0.0

    def after(self) -> None:
        """That collective has been issued."""


observers: list[Observer] = []


@dataclass
class Progress:
    """What the engine that owns a Comm has done since it was built, which must be the same on every rank."""

    stage: int | None = None
    steps: int = 0  # of each optimizer
    backwards: int = 0  # those that reduced

    def __str__(self) -> str:
        return f"{_times(self.steps, 'optimizer step')} and {_times(self.backwards, 'backward')}"


def out_of_step(progress: dict[int, Progress]) -> str:
    """The sentences for ranks whose progress differs."""
    alike: dict[str, list[int]] = {}
    for rank, made in progress.items():
        alike.setdefault(str(made), []).append(rank)
    sentence = "; ".join(f"{name_ranks(ranks)} made {made}" for made, ranks in alike.items())
    return (
        f"The ranks are out of step: {sentence}.\nEvery rank must make the same optimizer steps. Let all ranks skip a "
        "step or none (all-reduce the condition first; zerolab.LossScaler does), and give every rank as many batches."
    )


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


class Recorder:
    """Where a run is (`phase`, `step`), and the calls it makes, for everyone who records them."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.step = 0  # optimizer steps so far
        self.progress = Progress()
        self._recordings: list[list[Call]] = []

    @contextmanager
    def collect(self) -> Iterator[list[Call]]:
        """Collect every call that this rank makes inside the block, in order."""
        calls: list[Call] = []
        self._recordings.append(calls)
        try:
            yield calls
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not calls]

    def call(self, op: str, unit: str, payload: int, group: Group, control: bool = False) -> Call | None:
        """Record a call that is issued now, and return it; None if nobody records."""
        if not self._recordings:
            return None
        sent = bytes_sent(op, payload, group.size)
        call = Call(op, unit, self.phase, payload, sent, control, self.step, group.link, time.perf_counter())
        for calls in self._recordings:
            calls.append(call)
        return call
