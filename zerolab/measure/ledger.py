"""The ledger: every collective of one rank, in order, with its bytes and its time.

with ledger(zero) as book:
    loss = model(x, y)
    loss.backward()
    optimizer.step()
book.moved                   # bytes that this rank sent, as a ring would send them
book.totals("unit")          # the same by unit, or by "op", "phase", "step", "link"
rich.print(book.table())     # line by line; book.table("op") adds up
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolab.comm.record import Call
from zerolab.engine.engine import Engine
from zerolab.measure.units import in_bytes, in_seconds
from zerolab.measure.units import table as new_table

if TYPE_CHECKING:
    from rich.table import Table

KEYS = ("op", "unit", "phase", "step", "link")


@dataclass
class Total:
    """What some collectives add up to; see `zerolab.Call` for the units."""

    calls: int = 0
    payload: int = 0
    sent: int = 0
    seconds: float = 0.0  # from issue to end; several may be under way at once
    waited: float = 0.0

    def add(self, call: Call) -> None:
        self.calls += 1
        self.payload += call.payload
        self.sent += call.sent
        self.seconds += duration(call) or 0.0
        self.waited += call.waited


@dataclass
class Ledger:
    """The calls of one rank, in the order in which it issued them. Messages about the run are marked `control`."""

    rank: int
    world_size: int
    calls: list[Call] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Bytes that this rank sends when the collectives run as rings; without messages about the run."""
        return sum(call.sent for call in self.calls if not call.control)

    def totals(self, by: str, control: bool = False) -> dict[Any, Total]:
        """Sums by "op", "unit", "phase", "step" or "link", in order of appearance; with `control`, messages too."""
        if by not in KEYS:
            raise ValueError(f"totals by what? {by!r} is none of {', '.join(KEYS)}")
        result: dict[Any, Total] = {}
        for call in self.calls:
            if control or not call.control:
                result.setdefault(getattr(call, by), Total()).add(call)
        return result

    def table(self, by: str | None = None) -> Table:
        """For rich: a line for each call, or, with `by`, for each total."""
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
    """Seconds from issue to end; None for a call that has no end."""
    return None if call.end is None else call.end - call.start


@contextmanager
def ledger(zero: Engine) -> Iterator[Ledger]:
    """Record every collective that this rank issues inside the block. Costs some microseconds a call."""
    with zero.comm.record() as calls:
        yield Ledger(zero.rank, zero.world_size, calls)
