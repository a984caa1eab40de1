"""An allocator to look at: it hands out pieces of one flat buffer, and never moves them.

    ways = replay(line, apart=("gradients",))
    ways.arena.free, ways.arena.largest     # bytes that are free, and the largest piece of them

`replay` takes the sizes and lifetimes that `measure.timeline` recorded in a real step. Every piece is really written,
and when it goes its bytes are still as they were written: nothing overlaps. An allocator of a GPU works alike, with
more rules (which sizes share a region, what is kept for later); the holes are the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zerolab.measure.allocations import Timeline
from zerolab.measure.units import in_bytes

GRAIN = 512  # bytes: sizes are rounded up to a multiple, as CUDA's allocator does


class OutOfMemory(RuntimeError):
    """No hole is large enough."""


class Piece(NamedTuple):
    """A piece of the buffer, and the moments of the step between which it was in use."""

    kind: str
    start: int  # address
    nbytes: int
    begin: int
    end: int


class Arena:
    """`size` bytes. `take` gives the first hole that is large enough (first fit). memory: False keeps books alone."""

    def __init__(self, size: int, memory: bool = True) -> None:
        self.size = size
        self.memory = torch.zeros(size if memory else 0, dtype=torch.uint8)
        self.holes: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), in order, never touching
        self.top = 0  # the highest address that was ever in use
        self._marks = 0
        self._taken: dict[int, tuple[int, int]] = {}  # start -> (end, the mark in its bytes)

    @property
    def free(self) -> int:
        return sum(end - start for start, end in self.holes)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole: what can be asked for next."""
        return max((end - start for start, end in self.holes), default=0)

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` that are now in use. Raises OutOfMemory."""
        size = -(-nbytes // GRAIN) * GRAIN
        found = next((i for i, (start, end) in enumerate(self.holes) if end - start >= size), None)
        if found is None:
            holes = f"{len(self.holes)} hole{'s' * (len(self.holes) != 1)}, the largest of {in_bytes(self.largest)}"
            raise OutOfMemory(f"{in_bytes(size)} wanted, and {in_bytes(self.free)} are free: {holes}")
        start, end = self.holes.pop(found)
        if start + size < end:
            insort(self.holes, (start + size, end))
        self._marks = self._marks % 255 + 1
        self._taken[start] = (start + size, self._marks)
        self.memory[start : start + size] = self._marks
        self.top = max(self.top, start + size)
        return start

    def give(self, start: int) -> None:
        """The piece at `start` is free again, and grows together with holes beside it."""
        end, mark = self._taken.pop(start)
        if bool((self.memory[start:end] != mark).any()):  # empty, if there are books alone
            raise AssertionError(f"somebody wrote to {start}:{end} while it was in use")
        insort(self.holes, (start, end))
        i = self.holes.index((start, end))
        if i + 1 < len(self.holes) and self.holes[i + 1][0] == end:
            end = self.holes.pop(i + 1)[1]
        if i and self.holes[i - 1][1] == start:
            i -= 1
            start = self.holes.pop(i)[0]
        self.holes[i] = (start, end)


@dataclass
class Replay:
    """What became of a recorded step in an arena. `moment`: how many events it has seen."""

    line: Timeline
    arena: Arena
    pieces: list[Piece] = field(default_factory=list)
    needed: int = 0  # bytes in use at the peak
    lost: int = 0  # the most bytes that were free at any moment, and not in the largest hole
    moment: int = 0
    until: str = ""  # the phase that it stopped after
    apart: tuple[str, ...] = ()


def replay(line: Timeline, size: int | None = None, apart: Sequence[str] = (), until: str = "") -> Replay:
    """Run the step's allocations again, in an arena of `size` bytes (default: as many as they turn out to need).

    apart: kinds that get one region of their own, reserved before the step, with all their buffers end to end.
    until: stop after this phase, "forward" or "backward".
    """
    if size is None:
        size = _run(line, Arena(_PLENTY, memory=False), apart, "").arena.top
    return _run(line, Arena(size), apart, until)


_PLENTY = 1 << 50


def _run(line: Timeline, arena: Arena, apart: Sequence[str], until: str) -> Replay:
    result = Replay(line, arena, until=until, apart=tuple(apart))
    regions = {kind: _Region(line, kind, arena) for kind in apart}
    live: dict[int, tuple[int, int]] = {}  # buffer -> (address, moment)
    in_use, last = 0, _last_of(line, until)
    sizes: dict[int, int] = {}

    def place_of(kind: str) -> Arena | _Region:
        return regions[kind] if kind in regions else arena  # noqa: SIM401, the two have no class in common

    def close(number: int, moment: int) -> None:
        start, begin = live.pop(number)
        kind = line.buffers[number].kind
        result.pieces.append(Piece(kind, start, sizes[number], begin, moment))
        place_of(kind).give(start)

    for moment, event in enumerate(line.events[:last]):
        number, kind = event.buffer, line.buffers[event.buffer].kind
        if number in live:
            in_use -= sizes[number]
            close(number, moment)
        if event.nbytes:
            sizes[number] = -(-event.nbytes // GRAIN) * GRAIN
            in_use += sizes[number]
            live[number] = (place_of(kind).take(event.nbytes), moment)
        result.needed = max(result.needed, in_use)
        if arena.size < _PLENTY:
            result.lost = max(result.lost, arena.free - arena.largest)
    result.moment = last
    for number, (start, begin) in live.items():
        result.pieces.append(Piece(line.buffers[number].kind, start, sizes[number], begin, last))
    return result


def _last_of(line: Timeline, until: str) -> int:
    """How many events there are up to the end of the phase `until`."""
    if not until:
        return len(line.events)
    return max(i for i, event in enumerate(line.events) if i >= line.before and event.phase == until) + 1


class _Region:
    """One piece of the arena for all buffers of one kind: an arena inside the arena."""

    def __init__(self, line: Timeline, kind: str, arena: Arena) -> None:
        trial = Arena(_PLENTY, memory=False)
        live: dict[int, int] = {}
        for event in line.events:
            if line.buffers[event.buffer].kind == kind:
                if event.buffer in live:
                    trial.give(live.pop(event.buffer))
                if event.nbytes:
                    live[event.buffer] = trial.take(event.nbytes)
        self.inside = Arena(trial.top, memory=False)
        self.start = arena.take(trial.top) if trial.top else 0

    def take(self, nbytes: int) -> int:
        return self.start + self.inside.take(nbytes)

    def give(self, start: int) -> None:
        self.inside.give(start - self.start)
