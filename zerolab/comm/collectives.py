"""Collectives between the ranks of one group: the only file that knows about backends.

Three promises, whatever the backend:

- **Means, in rank order.** gloo's own reduce-scatter is an all-reduce in disguise, twice the bytes and a sum in
  ring order. Here all ranks exchange their slices and add them in rank order: half the bytes, and the same bits
  in every run. gloo's own all-gather copies all it gathers twice; here every rank broadcasts its slice, into its place.
  NCCL has a true reduce-scatter and all-gather, which are used as they are.
- **Recorded.** Every call passes through `_record`; `with comm.record() as calls:` collects them.
- **Agreed.** Ranks that gather different units would get each other's bytes without an error. So a gather that
  the agreed order does not predict is first announced on a control group, where it costs nobody a wrong tensor.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.comm import flight

with suppress(ImportError):  # as defaults of arguments it keeps for ever the group that it finds on import: now none
    import torch.distributed.nn.functional

POLL = timedelta(seconds=1)  # how often a wait looks whether another rank has a complaint

# torch 2.13 renamed the single-tensor collectives; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Complaint = Callable[[], "str | None"]  # asked while waiting: why it would be in vain


def _no_complaint() -> None:
    return None


# An emulated network (zerolab.lab.network): given bytes sent and messages, when a collective that is issued now may be
# complete, by time.perf_counter. None: when it is.
emulated_link: Callable[[int, int], float] | None = None

_numbers = count()  # of the Comms in this process
_comms: WeakSet[Comm] = WeakSet()
_process = 0  # that made them; a fork of it has none of their threads
_control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()
_mesh_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], tuple[Ring, Ring]]] = WeakKeyDictionary()


class CommError(RuntimeError):
    """A collective failed, or the ranks disagree. The message names the rank, the operation and the unit."""


@dataclass
class Call:
    """One collective as it ran on this rank.

    `payload`: bytes of the whole tensor, all ranks' parts together. `sent`: bytes this rank sends when the
    operation runs as a ring: (N-1)/N of the payload, twice that for an all-reduce. `control`: a message about
    the run (agreement, scalars), not part of the traffic of the stage. `step`: 0 before the first optimizer step.
    `link`: with a mesh, "inside" a node or "between" nodes.

    `start`, `end`: when this rank issued it and when it was through, in seconds on the clock of `time.perf_counter`
    (on NCCL, when the host had waited for it; the device may be elsewhere). `end` is None until then, and stays None
    where no data moves (the fake backend). `waits`: when this rank stood still for it; `waited`: seconds of that.
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


class Ring(NamedTuple):
    """Ranks that make a collective together: their group, this rank's number in it, how many they are."""

    group: dist.ProcessGroup
    rank: int
    size: int
    log: flight.Log
    link: str = ""


class Issued(NamedTuple):
    """A collective that was started, for the flight recorder, its record if anybody keeps one, and when an emulated
    link would be through."""

    works: list[Any]
    entry: flight.Entry
    call: Call | None
    ready: float = 0.0


Steps = Generator[Issued, None, None]  # issues one collective after the other, the next when the last is through


class Pending:
    """A collective under way, perhaps of several steps, each of which waits for the one before.

    `advance()` waits for the step in flight and starts the next. `wait()` goes on to the end.
    """

    def __init__(self, wait: Callable[[Issued], None], steps: Steps) -> None:
        self._wait, self._steps = wait, steps
        self._issued = next(steps, None)

    def advance(self) -> None:
        if self._issued is not None:
            self._wait(self._issued)
            self._issued = next(self._steps, None)

    def wait(self) -> None:
        while not self.done:
            self.advance()

    @property
    def done(self) -> bool:
        return self._issued is None


class _Question:
    """Asks for a complaint in a thread, which alone hangs where the store does not answer: its host may be cut off."""

    def __init__(self, complaint: Complaint) -> None:
        self._complaint, self._reason = complaint, None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with suppress(dist.DistError):  # without a store nobody complains: the timeout of the group will tell
            self._reason = self._complaint()

    def reason(self) -> str | None:
        self._thread.join(POLL.total_seconds())
        return self._reason

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()


class Comm:
    """The collectives of one process group, for tensors on `device`. `rank` and `world_size` are the group's.

    mesh: (replicas, ranks that share one), whose product is the number of ranks; neighbours share. Then shards travel
    `inside` a replica, and only means of shards `between` the replicas. Without a mesh all ranks are inside.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, mesh: tuple[int, int] | None = None
    ) -> None:
        if not dist.is_initialized():
            raise CommError(
                "there is no process group: call zerolab.init() first (it also serves a single process), "
                "or start the ranks with zerolab.launch, torchrun or srun"
            )
        everyone = group or dist.group.WORLD
        if everyone == dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError(f"global rank {dist.get_rank()} is not a member of the group that it was given")
        global _process
        _process = os.getpid()
        _comms.add(self)
        self.device = device
        self.rank = dist.get_rank(everyone)
        self.world_size = dist.get_world_size(everyone)
        self.first = dist.get_global_rank(everyone, 0)
        self.everyone = Ring(everyone, self.rank, self.world_size, flight.log_of(everyone))
        self.backend = self._backend_for(device)
        self.phase = "setup"
        self.step = 0  # optimizer steps so far
        self._control = None if self.backend == "fake" else _control_group(everyone)
        self._messages = flight.log_of(everyone, "control")
        self._recordings: list[list[Call]] = []
        self._gathers = 0  # how many all-gathers so far: the same number on every rank
        self._last: tuple[str, str] | None = None  # (unit, phase) of the last gather
        self._expected: dict[tuple[str, str] | None, tuple[str, str]] = {}  # what followed it, agreed between ranks
        # Where this Comm leaves its notes: numbered by the first rank, since others may have made more of them.
        asked = self.exchange([next(_numbers), mesh and list(mesh)], "start of a Comm")
        for rank, (_, other) in enumerate(asked):
            if other != asked[0][1]:
                raise CommError(f"rank {rank} asks for mesh={other} where rank 0 asks for mesh={asked[0][1]}")
        name = f"zerolab/{everyone.group_name}/{asked[0][0]}"
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.inside, self.between = _rings_of_mesh(self.everyone, mesh) if mesh else (self.everyone, None)
        self.group = self.inside.group

    def _backend_for(self, device: torch.device) -> str:
        """The backend that serves `device` in the group, which may have one for each kind of device."""
        self.config = dist.get_backend_config(self.everyone.group)  # "cpu:gloo,cuda:nccl"
        return dict(part.split(":", 1) for part in self.config.split(",")).get(device.type, "")

    # -- collectives ---------------------------------------------------------------------------------------------

    def reduce_scatter(self, output: Tensor, input: Tensor, unit: str) -> Pending:
        """Mean over the ranks of `input` (N * S,), of which this rank gets its shard in `output` (S,).

        `output` may be this rank's shard of `input` itself. With a mesh: the mean of the replicas' means.
        """

        def steps() -> Steps:
            yield from self._reduce_scatter_steps(output, input, unit, self.inside)
            if self.between:
                yield from self._all_reduce_steps(output, unit, self.between)

        return self._start(f"reduce-scatter of {unit}", steps())

    def all_reduce(self, tensor: Tensor, unit: str) -> Pending:
        """Mean over the ranks of `tensor` (N * S,), in place."""
        return self._start(f"all-reduce of {unit}", self._all_reduce_steps(tensor, unit, self.everyone))

    def all_gather(self, output: Tensor, input: Tensor, unit: str) -> Pending:
        """The shards `input` (S,) of all ranks, in rank order, in `output` (N * S,), of which `input` may be a part."""
        complaint = self._agree_on_gather(unit)
        return self._start(f"all-gather of {unit}", self._all_gather_steps(output, input, unit, self.inside), complaint)

    def broadcast(self, tensor: Tensor, unit: str) -> None:
        """The first rank's `tensor` on every rank, in place."""
        flat = tensor.contiguous()
        payload = flat.view(torch.uint8) if flat.dtype == torch.bool else flat

        def steps() -> Steps:
            start = partial(dist.broadcast, payload, src=self.first)
            yield self._issue("broadcast", unit, payload, self.everyone, start)

        self._start(f"broadcast of {unit}", steps()).wait()
        if flat is not tensor:
            tensor.copy_(flat)

    def all_reduce_scalar(self, value: Tensor, op: Any) -> Tensor:
        """Reduce over the shards a one-element tensor in place; the same bits on every rank."""

        def steps() -> Steps:
            yield self._issue("all_reduce", "", value, self.inside, partial(dist.all_reduce, value, op), control=True)

        self._start("all-reduce of a scalar", steps()).wait()
        return value

    def _reduce_scatter_steps(self, output: Tensor, input: Tensor, unit: str, ring: Ring) -> Steps:
        if self.backend != "gloo":
            native = partial(_reduce_scatter, output, input, dist.ReduceOp.AVG)
            yield self._issue("reduce_scatter", unit, input, ring, native)
            return
        # Two exchanges, down to lower ranks and up to higher ones: a single one would also copy what this rank keeps.
        rows, rank = input.view(ring.size, -1), ring.rank
        lower, higher = [1] * rank + [0] * (ring.size - rank), [0] * (rank + 1) + [1] * (ring.size - rank - 1)
        from_lower, from_higher = torch.empty_like(rows[:rank]), torch.empty_like(rows[rank + 1 :])
        down = partial(dist.all_to_all_single, from_higher, rows[:rank], higher, lower)
        up = partial(dist.all_to_all_single, from_lower, rows[rank + 1 :], lower, higher)
        yield self._issue("reduce_scatter", unit, input, ring, down, up)
        in_order = [*from_lower, rows[rank], *from_higher]
        if rank == 0:
            in_order[:2] = reversed(in_order[:2])  # the same sum, and what is overwritten is not the caller's
        _mean_in_order(in_order, output)
        for received in (from_lower, from_higher):
            received.untyped_storage().resize_(0)  # a thread of gloo's may not have let go of it yet

    def _all_reduce_steps(self, tensor: Tensor, unit: str, ring: Ring) -> Steps:
        if self.backend != "gloo":
            yield self._issue("all_reduce", unit, tensor, ring, partial(dist.all_reduce, tensor, dist.ReduceOp.AVG))
            return
        # A reduce-scatter, then an all-gather: what a ring all-reduce is made of, but summed in rank order.
        mine = tensor.view(ring.size, -1)[ring.rank]
        yield from self._reduce_scatter_steps(mine, tensor, unit, ring)
        yield from self._all_gather_steps(tensor, mine, unit, ring)

    def _all_gather_steps(self, output: Tensor, input: Tensor, unit: str, ring: Ring) -> Steps:
        if self.backend != "gloo":
            yield self._issue("all_gather", unit, output, ring, partial(_all_gather, output, input))
            return
        slices = output.view(ring.size, -1)
        if not slices[ring.rank].is_set_to(input):
            slices[ring.rank].copy_(input)
        roots = [dist.get_global_rank(ring.group, rank) for rank in range(ring.size)]
        starts = [partial(dist.broadcast, part, src=root) for part, root in zip(slices, roots, strict=True)]
        yield self._issue("all_gather", unit, output, ring, *starts)

    def _issue(
        self, op: str, unit: str, payload: Tensor, ring: Ring, *starts: Callable[..., Any], control: bool = False
    ) -> Issued:
        """Record a collective and start it, of however many it is made."""
        nbytes = payload.numel() * payload.element_size()
        call = self._record(op, unit, nbytes, ring, control)
        ready = self._emulate(op, nbytes, ring.size)
        entry = ring.log.note(op, unit, self.phase, payload)
        works = [start(group=ring.group, async_op=True) for start in starts]
        entry.issued = time.time()
        if call is not None and self.backend == "gloo" and self._control is not None:
            both = torch.futures.collect_all([work.get_future() for work in works])
            both.add_done_callback(partial(_note_end, call, ready=ready))
        return Issued(works, entry, call, ready)

    def _emulate(self, op: str, payload: int, size: int) -> float:
        if emulated_link is None:
            return 0.0
        return emulated_link(_sent(op, payload, size), (2 if op == "all_reduce" else 1) * (size - 1))

    # -- waiting -------------------------------------------------------------------------------------------------

    def _start(self, what: str, steps: Steps, complaint: Complaint = _no_complaint) -> Pending:
        def wait(issued: Issued) -> None:
            begin, issued.entry.wait = time.perf_counter(), time.time()
            for work in issued.works:
                if self.backend == "gloo":
                    self._wait(work, what, issued.entry, complaint)
                else:
                    work.wait()  # makes the current stream wait, not this thread
            issued.entry.end = time.time()
            if (left := issued.ready - time.perf_counter()) > 0:
                time.sleep(left)
            if issued.call is not None:
                issued.call.waits.append((begin, time.perf_counter()))
                if self.backend == "nccl":
                    _note_end(issued.call)

        try:
            return Pending(wait, steps)
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _wait(self, work: Any, what: str, entry: flight.Entry, complaint: Complaint) -> None:
        """Wait in short turns: Ctrl-C gets through, and so does the news that another rank went another way."""
        question: _Question | None = None
        while True:
            try:
                if is_through(work, POLL):
                    return
            except RuntimeError as error:  # it failed, or the group's timeout passed
                raise self._failure(what, error, entry) from error
            if complaint is not _no_complaint and (question is None or question.over):
                question = _Question(complaint)
            if question is not None and (reason := question.reason()):
                self._note("stopped", {"gather": self._gathers})
                raise CommError(f"rank {self.rank}, {what}: {reason}\n{_ROUTING}")

    def _failure(self, what: str, error: Exception, entry: flight.Entry | None = None) -> CommError:
        return CommError(
            f"rank {self.rank} of {self.world_size}: {what} ({self.phase}) failed: {error}\n"
            "Another rank stopped, is much slower, or did not take part in this collective: look at its output first.\n"
            f"{flight.ask(entry)}".rstrip()
        )

    # -- agreement -----------------------------------------------------------------------------------------------

    def _agree_on_gather(self, unit: str) -> Complaint:
        """Make sure that every rank gathers `unit` now.

        What follows a gather is agreed once, then predicted. Every rank predicts the same, so a rank that does
        what is predicted need not ask. One that does not, asks; if the others had gone on as predicted, their
        wait finds the note that this rank leaves in the store, and all of them stop with an error.
        """
        here, before = (unit, self.phase), self._last
        self._last = here
        self._gathers += 1
        if self._control is None:
            return _no_complaint
        if self._expected.get(before) == here:
            number = self._gathers
            return lambda: self._contradicted(number)
        self._note("unpredicted", {"gather": self._gathers, "unit": unit})
        what = f"announcement of a gather of {unit}"
        digest = zlib.crc32(repr(here).encode()).to_bytes(4)
        if len(set(self.exchange_bytes(digest, what, self._abandoned))) == 1:
            self._expected[before] = here
            return _no_complaint
        for rank, other in enumerate(self.exchange(list(here), what)):
            if tuple(other) != here:
                theirs = f"rank {rank} gathers {other[0]} ({other[1]})"
                raise CommError(f"rank {self.rank} gathers unit {unit} ({self.phase}) where {theirs}.\n{_ROUTING}")
        raise AssertionError("the digests differ and the gathers do not")

    def _contradicted(self, gather: int) -> str | None:
        """Whether another rank did not find predicted what this rank did at its gather number `gather`."""
        for rank, note in self._notes("unpredicted"):
            if note["gather"] == gather:
                return f"rank {rank} gathers unit {note['unit']} instead."
        return None

    def _abandoned(self) -> str | None:
        """Whether another rank has stopped because of what this rank announced."""
        for rank, note in self._notes("stopped"):
            if note["gather"] == self._gathers:
                return f"rank {rank} gathers another unit."
        return None

    def _note(self, kind: str, note: dict[str, Any]) -> None:
        self._store.set(f"{kind}/{self.rank}", json.dumps(note))

    def _notes(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for rank in range(self.world_size):
            if rank != self.rank and self._store.check([f"{kind}/{rank}"]):
                yield rank, json.loads(self._store.get(f"{kind}/{rank}"))

    def exchange(self, message: Any, what: str, complaint: Complaint = _no_complaint) -> list[Any]:
        """`message` (anything JSON) of every rank, in rank order. For rare, small things."""
        if self._control is None:
            return [message] * self.world_size
        data = json.dumps(message).encode()
        sizes = self.exchange_bytes(len(data).to_bytes(8), what, complaint)
        longest = max(int.from_bytes(size) for size in sizes)
        rows = self.exchange_bytes(data.ljust(longest), what, complaint)
        return [json.loads(row) for row in rows]

    def exchange_bytes(self, message: bytes, what: str, complaint: Complaint = _no_complaint) -> list[bytes]:
        """`message`, equally long on every rank, of every rank, on the control group."""
        return self.start_exchange(message, what, complaint)()

    def start_exchange(
        self, message: bytes, what: str, complaint: Complaint = _no_complaint
    ) -> Callable[[], list[bytes]]:
        """Like `exchange_bytes`, but returns at once with a function that waits and gives the result."""
        if self._control is None:
            return lambda: [message] * self.world_size
        result = bytearray(self.world_size * len(message))
        tensors = [torch.frombuffer(data, dtype=torch.uint8) for data in (result, bytearray(message))]
        call = self._record("all_gather", "", len(result), self.everyone, control=True)
        entry = self._messages.note(what, "", self.phase, tensors[0])
        work = self._control._allgather_base(*tensors)
        entry.issued = time.time()

        def finish() -> list[bytes]:
            begin, entry.wait = time.perf_counter(), time.time()
            self._wait(work, what, entry, complaint)
            entry.end = time.time()
            if call is not None:
                _note_end(call)
                call.waits.append((begin, call.end))
            return [bytes(result[i : i + len(message)]) for i in range(0, len(result), len(message))]

        return finish

    # -- recording -----------------------------------------------------------------------------------------------

    @contextmanager
    def record(self) -> Iterator[list[Call]]:
        """Collect every call that this rank makes inside the block, in order."""
        calls: list[Call] = []
        self._recordings.append(calls)
        try:
            yield calls
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not calls]

    def _record(self, op: str, unit: str, payload: int, ring: Ring, control: bool = False) -> Call | None:
        if not self._recordings:
            return None
        sent = _sent(op, payload, ring.size)
        call = Call(op, unit, self.phase, payload, sent, control, self.step, ring.link, time.perf_counter())
        for calls in self._recordings:
            calls.append(call)
        return call


def _sent(op: str, payload: int, size: int) -> int:
    """Bytes that one of `size` ranks sends when the operation runs as a ring."""
    return (2 if op == "all_reduce" else 1) * payload * (size - 1) // size


def _note_end(call: Call, future: Any = None, ready: float = 0.0) -> None:
    call.end = max(time.perf_counter(), ready)


def is_through(work: Any, turn: timedelta) -> bool:
    """Whether `work` is through, or is within a turn. Raises what it failed of."""
    try:
        work.wait(turn)
        return True
    except RuntimeError:  # it failed, or the turn is over
        if not work.is_completed():
            return False
    work.wait()  # at once: it failed, or ended well just after the turn
    return True


_ROUTING = (
    "The ranks went different ways through the model (experts, skipped layers, one pass more than others), and would "
    "have mixed up their bytes. Put the parts between which they choose into one unit (units=[...] with the class that "
    "contains them all), let every rank make as many passes, or use stage 0, 1 or 2."
)


def _mean_in_order(rows: list[Tensor], mean: Tensor) -> None:
    """Into `mean` (S,): ((row 0 + row 1) + row 2 + ...) / N of N `rows` (S,), at least in float32, rounded once.

    May overwrite row 0. `mean` may be another row."""
    total = rows[0].to(torch.promote_types(mean.dtype, torch.float32))
    for row in rows[1:]:
        total += row
    torch.div(total, len(rows), out=mean)


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """A gloo group of the same ranks for messages about the run, made once for each group.

    Not by `dist.new_group`: that takes part of its name from how many groups this process is in, which may differ.
    """
    if group not in _control_groups:
        store = dist.PrefixStore(f"zerolab/control/{group.group_name}", dist.distributed_c10d._get_default_store())
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        _control_groups[group] = dist.ProcessGroupGloo(store, rank, size, _timeout_of(group))
    return _control_groups[group]


def _rings_of_mesh(everyone: Ring, mesh: tuple[int, int]) -> tuple[Ring, Ring]:
    """The ranks that share a replica with this one, and those that hold the same shards in the other replicas.

    Made once for each mesh: every rank takes part in making every group, its own or not.
    """
    known = _mesh_groups.setdefault(everyone.group, {})
    if mesh not in known:
        replicas, size = mesh
        rows = [list(range(first, first + size)) for first in range(0, replicas * size, size)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        timeout = _timeout_of(everyone.group)
        made = [[dist.new_group(ranks, timeout=timeout) for ranks in lines] for lines in (rows, columns)]
        replica, place = divmod(everyone.rank, size)
        known[mesh] = (
            Ring(made[0][replica], place, size, flight.log_of(made[0][replica]), "inside"),
            Ring(made[1][place], replica, replicas, flight.log_of(made[1][place]), "between"),
        )
    return known[mesh]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    return backend.options._timeout


@atexit.register
def _let_go() -> None:
    """End the threads that work for this package: one that wants the interpreter after its end aborts the process.

    gloo's threads do: a collective that was waited for is dropped a little later, with its tensors, by the thread that
    ran it (pytorch issue 190489). They end with their groups, and who holds groups is known here. A collective that
    is still under way, because something failed, is waited for until the timeout of its group, as torch does.
    """
    flight.stop()
    if os.getpid() != _process:
        return
    for comm in list(_comms):
        vars(comm).clear()
    _control_groups.clear()
    _mesh_groups.clear()
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
