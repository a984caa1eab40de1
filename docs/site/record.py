"""Records what the website replays: one training step of four ranks, at every stage, in fp32 and in bf16.

    python docs/site/record.py       # writes step.json and allocator.json of docs/site/explorables, in about a minute

The package's own instruments look on: `measure.timeline` sees every allocation, `measure.ledger` every collective, and
Python's tracer every line of the stages' files (ddp.py, zero1.py, zero2.py, zero3.py). A recording is a list of
moments: in each, such a line runs, or a unit computes, or the optimizer takes its step. It has no times, so that the
same step gives the same recording. allocator.json has the allocations and releases of the step that lesson 10 replays.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import zerolab
from zerolab.comm.recording import Call
from zerolab.engine.unit import Unit
from zerolab.measure import ledger, timeline
from zerolab.measure.allocations import KINDS, Timeline
from zerolab.measure.planning import PRECISIONS
from zerolab.measure.watch import watched
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

FILE = Path(__file__).parent / "explorables" / "step.json"
ALLOCATOR = FILE.with_name("allocator.json")
RANKS = 4
MODEL = {"layers": 5, "width": 128, "context": 32}
BATCH = 1
WARM = 2  # steps before the one that is recorded: the optimizer makes its state, and prefetching learns the order
NAMES = [f"{stage} {precision}" for stage in range(4) for precision in PRECISIONS]
STAGE_FILES = {inspect.getsourcefile(stage): Path(inspect.getfile(stage)).name for stage in zerolab.STAGES}


class Moment(NamedTuple):
    """From `seconds` on, and after `events` allocations and releases, the rank is at this."""

    seconds: float
    events: int
    phase: str  # an override point of the engine, or "forward", "backward" or "step" for the work between them
    unit: str
    line: tuple[str, str, str] | None  # file, function, text


class Watch:
    """Notes a moment whenever a line of a stage's file begins, or work between the override points."""

    def __init__(self, zero: zerolab.Engine, line: Timeline) -> None:
        self.zero, self.line = zero, line
        self.moments: list[Moment] = []
        self.open: list[Unit] = []  # units in the middle of their forward, outermost first; in backward, the last one
        self.point: tuple[str, str] = ("", "")

    def note(self, phase: str, unit: str, line: tuple[str, str, str] | None = None) -> None:
        events = len(self.line.events) - self.line.before
        self.moments.append(Moment(time.perf_counter(), events, phase, unit, line))

    def before(self, point: str, unit: Unit) -> None:
        self.point = point, unit.name

    def after(self, point: str, unit: Unit) -> None:
        self.point = "", ""
        if point in ("pre_forward", "pre_backward"):
            self.open.append(unit)
        elif point in ("post_forward", "post_backward"):
            self.open = [other for other in self.open if other is not unit]
        if point != "after_step" and self.open:
            self.note(point.split("_")[1], self.open[-1].name)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Python calls this for every line that runs."""
        file = STAGE_FILES.get(frame.f_code.co_filename)
        if file is None or not self.point[0]:
            return None
        if event == "line":
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.note(*self.point, (file, frame.f_code.co_name, code))
        return self.trace

    @contextmanager
    def watching(self) -> Iterator[None]:
        with watched(self.zero, self.before, self.after):
            before = sys.gettrace()
            sys.settrace(self.trace)
            try:
                yield
            finally:
                sys.settrace(before)


def on_a_rank(stage: int, precision: str) -> dict[str, Any]:
    """Train as one of the ranks, and record the last step."""
    device = zerolab.init()
    torch.manual_seed(0)
    model, data = GPT(**MODEL).to(device), text()
    zero = zerolab.shard(model, stage=stage, units=[Block], precision=PRECISIONS[precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = [batch(data, zero.rank, step, BATCH, model.context) for step in range(WARM + 1)]

    def forward(step: int) -> torch.Tensor:
        x, y = batches[step]
        return model(x.to(device), y.to(device))

    for step in range(WARM):
        forward(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with timeline(zero, optimizer) as line, ledger(zero) as book:
        watch = Watch(zero, line)
        with watch.watching():
            forward(WARM).backward()
            watch.note("step", "")
            optimizer.step()
            watch.note("zero_grad", "")
            optimizer.zero_grad()
            watch.note("end", "")
    return recording(watch.moments, line, book.calls)


def recording(moments: list[Moment], line: Timeline, calls: list[Call]) -> dict[str, Any]:
    """What was held in each moment by kind, and from which moment to which each collective was under way.

    A line counts with what is held after it. Work counts with the most that is held while it lasts.
    """
    curves, total = [line.curve(kind) for kind in KINDS], line.curve()
    told = []
    for moment, following in pairwise(moments):
        at = following.events
        if moment.phase in ("forward", "backward", "step"):
            at = max(range(moment.events, at + 1), key=lambda event: total[event])
        told.append((moment.phase, moment.unit, moment.line, [curve[at] for curve in curves]))
    starts = [moment.seconds for moment in moments]
    under_way = []
    for call in calls:
        if not call.control:
            first, last = (bisect_right(starts, seconds) - 1 for seconds in (call.start, call.waits[-1][1]))
            under_way.append([call.op, call.unit, call.payload, call.sent, first, last])
    return {"peak": line.peak, "moments": told, "calls": under_way}


def together(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' recordings as one. In a moment there is one list of bytes by kind, or one of each rank if they differ.

    Raises RuntimeError if the ranks did not do the same.
    """
    first = everyone[0]
    moments = []
    for one in zip(*(rank["moments"] for rank in everyone), strict=True):
        if len({moment[:3] for moment in one}) > 1:
            raise RuntimeError(f"the ranks did not do the same: {one}")
        held = [moment[3] for moment in one]
        moments.append([*one[0][:3], held[0] if all(bytes == held[0] for bytes in held) else held])
    if any(rank["calls"] != first["calls"] for rank in everyone):
        raise RuntimeError("the ranks did not make the same collectives")
    return {"peaks": [rank["peak"] for rank in everyone], "moments": moments, "calls": first["calls"]}


def on_every_stage(names: list[str]) -> dict[str, Any]:
    """One rank's part in the courses of these names, such as "3 bf16"."""
    return {name: on_a_rank(int(name[0]), name[2:]) for name in names}


def record(names: list[str]) -> dict[str, Any]:
    """The courses of these names, on four ranks."""
    ranks = zerolab.launch(on_every_stage, RANKS, names)
    return {name: together([rank[name] for rank in ranks]) for name in names}


def written(courses: dict[str, Any]) -> str:
    """JSON, with a line for each moment. Lines of code are listed once, and a moment has the place in that list."""
    places: dict[tuple[str, str, str], int] = {}
    parts = []
    for name, course in courses.items():
        moments = [
            [phase, unit, None if line is None else places.setdefault(tuple(line), len(places)), held]
            for phase, unit, line, held in course["moments"]
        ]
        rest = [f'"{key}": {json.dumps(course[key])}' for key in ("peaks", "calls")]
        rows = ",\n".join(json.dumps(moment, separators=(",", ":")) for moment in moments)
        parts.append(f'"{name}": {{{", ".join(rest)}, "moments": [\n{rows}]}}')
    parameters = sum(param.numel() for param in GPT(**MODEL).parameters())
    head = {"ranks": RANKS, "parameters": parameters, "kinds": KINDS, "lines": list(places)}
    return json.dumps(head)[:-1] + ', "courses": {\n' + ",\n".join(parts) + "}}\n"


def step_of_lesson_10() -> Timeline:
    """The step that lesson 10 replays in a buffer: a rank trains alone, and keeps every activation."""
    zerolab.init()
    torch.manual_seed(0)
    model, data = GPT(layers=6, width=128), text()
    zero = zerolab.DDP(model, units=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        loss = model(*batch(data, zero.rank, number, 8, model.context))  # stays until the step is over
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)  # makes the optimizer's state
    with timeline(zero, optimizer) as line:
        step(1)
    return line


def allocations() -> str:
    """JSON, with a line for each stretch of events in one phase and unit: [buffer, bytes], and 0 bytes are a release.

    A buffer has the place of its owner, which is a kind and a unit. The first `before` events are what was there.
    """
    (line,) = zerolab.launch(step_of_lesson_10, 1)
    places: dict[tuple[str, str], int] = {}
    buffers = [places.setdefault((buffer.kind, buffer.unit), len(places)) for buffer in line.buffers]
    head = {"before": line.before, "owners": list(places), "buffers": buffers}
    stretches = [
        [phase, unit, [[event.buffer, event.nbytes] for event in events]]
        for (phase, unit), events in groupby(line.events, lambda event: (event.phase, event.unit))
    ]
    rows = ",\n".join(json.dumps(stretch, separators=(",", ":")) for stretch in stretches)
    return json.dumps(head)[:-1] + f', "stretches": [\n{rows}]}}\n'


if __name__ == "__main__":
    FILE.write_text(written(record(NAMES)))
    ALLOCATOR.write_text(allocations())
    for file in (FILE, ALLOCATOR):
        print(f"{file}: {file.stat().st_size:,} bytes")
