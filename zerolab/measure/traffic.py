"""The ledger: every collective of one rank, in order, with its bytes and its time.

with ledger(zero) as book:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
book.moved                   # bytes this rank sent, counted as in a ring
book.totals("unit")          # summed by unit, or by "op", "phase", "step", "link"
rich.print(book.table())     # one line per call; book.table("op") prints sums
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolab.comm.recording import Call
from zerolab.engine.engine import Engine
from zerolab.measure.units import in_bytes, in_seconds
from zerolab.measure.units import table as new_table

if TYPE_CHECKING:
    from rich.table import Table

KEYS = ("op", "unit", "phase", "step", "link")


@dataclass
class Total:
    """The sum of some collectives, in the units of `zerolab.Call`."""

    calls: int = 0
    payload: int = 0
    sent: int = 0
    seconds: float = 0.0  # from issue to end, 0 on NCCL; calls that overlap all count
    waited: float = 0.0

    def add(self, call: Call) -> None:
        self.calls += 1
        self.payload += call.payload
        self.sent += call.sent
        self.seconds += duration(call) or 0.0
        self.waited += call.waited


@dataclass
class Ledger:
    """The calls of one rank, in the order it issued them. Control messages are marked `control`."""

    rank: int
    world_size: int
    calls: list[Call] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Bytes this rank sent, each collective counted as in a ring. Control messages are left out."""
        return sum(call.sent for call in self.calls if not call.control)

    def totals(self, by: str, control: bool = False) -> dict[Any, Total]:
        """Sums by "op", "unit", "phase", "step" or "link", in order of appearance.

        control: count control messages too. Raises ValueError for any other `by`.
        """
        if by not in KEYS:
            raise ValueError(f"cannot total by this: {by!r} is none of {', '.join(KEYS)}")
        result: dict[Any, Total] = {}
        for call in self.calls:
            if control or not call.control:
                result.setdefault(getattr(call, by), Total()).add(call)
        return result

    def table(self, by: str | None = None) -> Table:
        """A table for rich: one line per call, or one per total if `by` is given."""
        title = f"rank {self.rank} of {self.world_size}: {in_bytes(self.moved)} sent"
        numbers = ["payload", "sent", "under way", "waited"]
        if by is not None:
            table = new_table(title, [by], ["calls", *numbers])
            for key, total in self.totals(by).items():
                sizes = [in_bytes(total.payload), in_bytes(total.sent)]
                times = [in_seconds(total.seconds), in_seconds(total.waited)]
                table.add_row(str(key), str(total.calls), *sizes, *times)
            return table
        table = new_table(title, ["#", "phase", "op", "unit"], numbers)
        for number, call in enumerate(self.calls):
            if number and call.step != self.calls[number - 1].step:
                table.add_section()
            sizes = [in_bytes(call.payload), in_bytes(call.sent)]
            times = [in_seconds(duration(call)), in_seconds(call.waited)]
            table.add_row(str(number), call.phase, call.op, call.unit or "(control)", *sizes, *times)
        return table


def duration(call: Call) -> float | None:
    """Seconds from issue to end; None if the call has not ended."""
    return None if call.end is None else call.end - call.start


@contextmanager
def ledger(zero: Engine) -> Iterator[Ledger]:
    """Record every collective this rank issues inside the block. This costs a few microseconds per call."""
    with zero.comm.record() as calls:
        yield Ledger(zero.rank, zero.world_size, calls)
