"""The memory timeline: every allocation and release of a step, by kind, unit and phase.

    with timeline(zero, optimizer) as line:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    line.peak                    # bytes
    line.parts()                 # what the peak consists of, by kind and unit
    line.curve("gradients")      # bytes at every moment

A `TorchDispatchMode` sees the result of every operation: on the CPU, on CUDA, and with fake tensors. A storage it has
not seen before is a new buffer; a weak reference reports when the storage goes away; `resize_` of a storage is watched.

So the timeline counts storages of tensors, without those that view memory of Python's, numpy's, a file or another
process. The allocator sees a little more: workspace that a kernel frees before it returns, and what gloo allocates in
its own threads, which comes and goes at any moment. On CUDA it also rounds each block up to 512 bytes. The tests hold
the difference at the peak below 5 % (`tests/measure/test_timeline.py`).

Sometimes it becomes clear only later what a buffer was: a gradient, when autograd hands it to a parameter; optimizer
state, when the step is over. So each buffer gets its kind when the block ends, and that kind counts for all its life.

Every operation goes through Python. A step of the demo's GPT takes 1.1 to 1.6 times as long
(`pytest -k timeline_costs -rP` measures it), and more if a model's operations are smaller. Don't time anything inside.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolab.engine.engine import Engine
from zerolab.engine.step import each_of
from zerolab.engine.unit import Unit
from zerolab.measure.watch import watched

KINDS = (
    "parameters",  # what a rank keeps: shards, masters, and full parameters that are never released
    "gathered parameters",  # full parameters, from gather to release
    "gradients",  # of parameters: in buckets, accumulated, reduced
    "optimizer",  # optimizer state
    "activations",  # what forward saves for backward, and their gradients
    "communication",  # copies that collectives send from or receive into
    "other",  # buffers, inputs, temporaries of the optimizer's step
)

NOWHERE = ("", 0, "")

# The modules of the engine that allocate for one unit.
ROOM = ("zerolab.engine.owner", "_room")  # makes room for an owner's gradient or master, and says of which kind
OF_A_UNIT = tuple(f"zerolab.engine.{room}" for room in ("unit", "parameters", "bucket", "accumulation"))


@dataclass
class Buffer:
    """One storage: its kind, its unit, and where it was made: `phase`, `operation`, `site` (file, line, function)."""

    kind: str
    unit: str
    phase: str
    operation: str
    site: tuple[str, int, str]
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Event(NamedTuple):
    """At `seconds` after the start, in `phase` and while working on `unit`, `buffer` grew or shrank to `nbytes`."""

    seconds: float
    phase: str
    unit: str
    buffer: int
    nbytes: int


class Part(NamedTuple):
    """All buffers of one kind and unit at one moment: how many bytes, how many buffers."""

    kind: str
    unit: str
    nbytes: int
    buffers: int


@dataclass
class Timeline:
    """What one rank allocated and released, in order. Moment m is the moment after m events; 0 is the start."""

    rank: int
    world_size: int
    stage: int
    buffers: list[Buffer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    before: int = 0  # the first so many events describe what was there when the block began
    closed: bool = False

    @property
    def peak(self) -> int:
        """The most bytes in use at any moment."""
        return max(self.curve())

    @property
    def peak_moment(self) -> int:
        """The first moment at which the peak was reached."""
        curve = self.curve()
        return self.before + curve.index(max(curve))

    def curve(self, kind: str | None = None) -> list[int]:
        """Bytes in use after each event, of one kind or of all. The first value is what was there before the block."""
        self._check_closed()
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        sizes = [0] * len(self.buffers)
        changes = []
        for event in self.events:
            counts = kind is None or self.buffers[event.buffer].kind == kind
            changes.append((event.nbytes - sizes[event.buffer]) * counts)
            sizes[event.buffer] = event.nbytes
        totals = [0, *accumulate(changes)]
        return totals[self.before :]

    def alive(self, moment: int) -> dict[int, int]:
        """The buffers that have memory at `moment`, as {index in `buffers`: bytes}."""
        self._check_closed()
        if not 0 <= moment <= len(self.events):
            raise ValueError(f"moment {moment} is not between 0 and {len(self.events)}")
        sizes: dict[int, int] = {}
        for event in self.events[:moment]:
            sizes[event.buffer] = event.nbytes
        return {number: nbytes for number, nbytes in sizes.items() if nbytes}

    def parts(self, moment: int | None = None) -> list[Part]:
        """What memory consists of at `moment` (default: at the peak), the largest part first."""
        sums: dict[tuple[str, str], list[int]] = {}
        for number, nbytes in self.alive(self.peak_moment if moment is None else moment).items():
            buffer = self.buffers[number]
            sums.setdefault((buffer.kind, buffer.unit), []).append(nbytes)
        parts = [Part(kind, unit, sum(sizes), len(sizes)) for (kind, unit), sizes in sums.items()]
        return sorted(parts, key=lambda part: -part.nbytes)

    def by_kind(self, moment: int | None = None) -> dict[str, int]:
        """Bytes of each kind at `moment` (default: at the peak)."""
        totals = dict.fromkeys(KINDS, 0)
        for part in self.parts(moment):
            totals[part.kind] += part.nbytes
        return totals

    def _check_closed(self) -> None:
        if not self.closed:
            raise RuntimeError("the timeline is still open: read it after its `with` block")


_open: list[Any] = []  # the recorder that is running in this process, if any


@contextmanager
def timeline(zero: Engine, optimizer: Optimizer | Iterable[Optimizer]) -> Iterator[Timeline]:
    """Record a block, usually one step. optimizer: one, or a list of those that train the model.

    RuntimeError if another timeline is open in this process.
    """
    if _open:
        raise RuntimeError(
            f"rank {zero.rank}: a timeline is open already. They cannot be nested: leave the other `with` block first"
        )
    recorder = _Recorder(zero, optimizer)
    _open.append(recorder)
    try:
        with recorder.recording():
            yield recorder.line
    finally:
        _open.remove(recorder)
    recorder.close()


class _Recorder(TorchDispatchMode):
    """Sees every operation, and writes `line`."""

    def __init__(self, zero: Engine, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        super().__init__()
        self.zero = zero
        self.optimizers = each_of(optimizer)
        self.line = Timeline(zero.rank, zero.world_size, zero.stage)
        self.device = zero.comm.device.type
        self.begin, self.thread = time.perf_counter(), threading.get_ident()
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # identity -> index of the buffer
        self._sizes: list[int] = []
        self._kinds: dict[int, tuple[str, str]] = {}  # what we learned about a buffer: kind and unit
        self._at_work: list[Unit] = []  # units in the middle of their forward, outermost first
        self._in_backward: Unit | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._note_states()
        self.line.before = len(self.line.events)
        handles = [
            full.register_hook(partial(self._note_gradient, unit))
            for unit in self.zero.units
            for full in unit.full_params
            if full.requires_grad
        ]
        try:
            with watched(self.zero, self._before, self._after), self._watched_resizes(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _watched_resizes(self) -> Iterator[None]:
        """The dispatcher does not see `storage.resize_`, so replace the method for the length of the block."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            if storage._cdata in self._known:
                self._resized(self._known[storage._cdata][0], storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", resize):
            yield

    def close(self) -> None:
        """The block is over, so now we know what everything was."""
        self._note_states()
        for number, (kind, unit) in self._kinds.items():
            self.line.buffers[number].kind, self.line.buffers[number].unit = kind, unit
        self._known.clear()
        self.line.closed = True

    # -- what happens --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.device == "cpu" and threading.get_ident() != self.thread:  # gloo's: it inherits the mode
            return function(*args, **kwargs)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.device.type == self.device:
                storage = value.untyped_storage()
                if storage._cdata not in self._known and storage.resizable():
                    self._see_old(storage, value)
        result = function(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == self.device:
                self._see(value, str(function))
        return result

    def _see(self, tensor: Tensor, operation: str) -> None:
        """Note a new storage, or a new size of one."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if storage._cdata in self._known:
            number = self._known[storage._cdata][0]
        elif nbytes == 0 or not storage.resizable():
            return
        else:
            number = self._add(storage, self._describe(operation, tensor))
        self._resized(number, nbytes)

    def _see_old(self, storage: torch.UntypedStorage, tensor: Tensor) -> None:
        """A storage from before the block, for example the batch: insert it at the start."""
        buffer = Buffer("other", "", "before", "", NOWHERE, tuple(tensor.shape), _name(tensor.dtype))
        number = self._add(storage, buffer)
        self._sizes[number] = storage.nbytes()
        self.line.events.insert(self.line.before, Event(0.0, "before", "", number, storage.nbytes()))
        self.line.before += 1

    def _add(self, storage: torch.UntypedStorage, buffer: Buffer) -> int:
        number = len(self.line.buffers)
        self.line.buffers.append(buffer)
        self._sizes.append(0)
        gone = partial(self._gone, storage._cdata, number)
        self._known[storage._cdata] = (number, weakref.ref(storage, gone))
        return number

    def _gone(self, identity: int, number: int, reference: Any) -> None:
        if self._known.get(identity, (None,))[0] == number:
            del self._known[identity]
            self._resized(number, 0)

    def _resized(self, number: int, nbytes: int) -> None:
        if self._sizes[number] != nbytes:
            self._sizes[number] = nbytes
            now = time.perf_counter() - self.begin
            self.line.events.append(Event(now, self.zero.comm.phase, self._unit(), number, nbytes))

    # -- what a buffer is -----------------------------------------------------------------------------------------

    def _describe(self, operation: str, tensor: Tensor) -> Buffer:
        """A first guess, from the code that asked for the memory."""
        phase = self.zero.comm.phase
        kind, unit, site = _caller()
        if kind is None:
            kind = "activations" if phase in ("forward", "backward") else "other"
        return Buffer(kind, unit or self._unit(), phase, operation, site, tuple(tensor.shape), _name(tensor.dtype))

    def _unit(self) -> str:
        if self._at_work:
            return self._at_work[-1].name
        return self._in_backward.name if self._in_backward is not None else ""

    def _before(self, point: str, unit: Unit) -> None:
        if point == "pre_forward":
            self._at_work.append(unit)
        elif point == "pre_backward":
            self._in_backward = unit

    def _after(self, point: str, unit: Unit) -> None:
        if point == "post_forward" and unit in self._at_work:
            self._at_work.remove(unit)
        elif point == "post_backward" and unit is self._in_backward:
            self._in_backward = self.zero.root[0] if self.zero.root else None
        elif point == "after_step":
            self._in_backward = None

    def _note_gradient(self, unit: Unit, grad: Tensor) -> None:
        """Autograd has just computed the gradient of a full parameter."""
        self._note(grad, "gradients", unit.name)

    def _note_states(self) -> None:
        """Label what the engine and the optimizer keep."""
        for unit in self.zero.units:
            for tensor in (unit.master, unit.shard, *unit.params):
                self._note(tensor, "parameters", unit.name)
            kind = "gathered parameters" if self.zero.stage == 3 else "parameters"
            self._note(unit.full, kind, unit.name)
            bucket = unit.bucket
            for gradient in (bucket.full, bucket.kept_memory, bucket.grad, *(param.grad for param in unit.params)):
                self._note(gradient, "gradients", unit.name)
            for param in unit.params:
                for value in tree_leaves([one.state.get(param, {}) for one in self.optimizers]):
                    self._note(value, "optimizer", unit.name)
        for buffer in self.zero.model.buffers():
            self._note(buffer, "other", "")

    def _note(self, tensor: Any, kind: str, unit: str) -> None:
        if not isinstance(tensor, Tensor) or tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            buffer = Buffer(kind, unit, self.zero.comm.phase, "", NOWHERE, tuple(tensor.shape), _name(tensor.dtype))
            number = self._add(storage, buffer)
            self._resized(number, storage.nbytes())
        number = self._known[storage._cdata][0]
        if self._kinds.get(number, ("",))[0] not in ("parameters", "gathered parameters"):
            self._kinds[number] = (kind, unit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _caller() -> tuple[str | None, str, tuple[str, int, str]]:
    """Which code asked for memory: the kind this implies, if any; the unit; the file, line and function.

    What a unit or a bucket allocates is a gradient, except for the copy that a gather sends. What `comm` allocates
    serves a collective. Frames of torch and of these instruments are skipped. Backward on a GPU runs in a thread of
    autograd's that may have no others: there it is the line for which the main thread stands still.
    """
    here = sys._getframe(1)
    frame = _outside(here) or _outside(sys._current_frames().get(threading.main_thread().ident or 0)) or here
    code = frame.f_code
    site = (code.co_filename, frame.f_lineno, code.co_name)
    module = frame.f_globals.get("__name__", "")
    if module.startswith("zerolab.comm."):
        return "communication", str(frame.f_locals.get("unit", "")), site
    if module in OF_A_UNIT:
        owner = frame.f_locals.get("self")  # a Unit, its Bucket, or what that keeps back
        bucket = getattr(owner, "bucket", owner)
        unit = getattr(bucket, "unit", None)
        return "communication" if code.co_name == "start_gather" else "gradients", getattr(unit, "name", ""), site
    if (module, code.co_name) == ROOM:
        return frame.f_locals["kind"], frame.f_locals["item"].unit.name, site
    return None, "", site


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither torch's nor that of an instrument."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch", "zerolab.measure", "threading")
    ):
        frame = frame.f_back
    return frame
