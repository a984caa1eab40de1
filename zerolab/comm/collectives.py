"""Collectives between the ranks of one group: the only file that knows about backends.

Three promises, whatever the backend:

- **Means, in rank order.** gloo's own reduce-scatter is an all-reduce in disguise: twice the bytes, and a sum in
  ring order. Here every rank sends each other rank its shard, and adds what it gets in rank order: half the bytes,
  and the same bits in every run. gloo's own all-gather copies everything it gathers twice; here every rank broadcasts
  its shard straight into place. NCCL has a true reduce-scatter and all-gather, which are used as they are (native.py);
  it sums in an order of its own, and rounds each addition to the dtype that travels.
- **Recorded.** `with comm.record() as calls:` collects every collective with its bytes and times (recording.py).
- **Agreed.** Before a gather, every rank makes sure that the others gather the same unit (agreement.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.comm.agreement import Agreement
from zerolab.comm.flight import Entry
from zerolab.comm.groups import Group, backends_of, group_of, hold, mesh_groups
from zerolab.comm.native import all_gather, each_once, mean_op, reduce_scatter
from zerolab.comm.recording import Call, Recorder, observers
from zerolab.comm.waiting import CommError


class Issued(NamedTuple):
    """A collective under way: torch's works, its entry in the flight recorder, its record if anyone keeps one, and
    the moment before which no wait for it may end."""

    works: list[Any]
    entry: Entry
    call: Call | None
    ready: float


Steps = Generator[Issued, None, None]  # issues collectives one by one, each when the one before has finished


class Pending:
    """A collective under way, in one step or in several that wait for each other.

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


class Comm:
    """The collectives of one process group, for tensors on `device`. `rank` and `world_size` are the group's.

    mesh: (replicas, neighbours that share one), together all ranks. Shards then travel in the `shard_group`, and only
    means of shards in the `replicate_group`. Without a mesh the shard group is everyone, and the other is None.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, mesh: tuple[int, int] | None = None
    ) -> None:
        if not dist.is_initialized():
            raise CommError(
                "there is no process group: call zerolab.init() first (it also serves a single process), "
                "or start the ranks with zerolab.launch, torchrun or srun"
            )
        handle = group or dist.group.WORLD
        if handle is None or handle == dist.GroupMember.NON_GROUP_MEMBER:
            raise CommError(f"global rank {dist.get_rank()} is not a member of the group that it was given")
        hold(self)
        self.device = device
        self.everyone = group_of(handle)
        self.rank, self.world_size = self.everyone.rank, self.everyone.size
        self.first = dist.get_global_rank(handle, 0)
        self.config = dist.get_backend_config(handle)
        self.backend = backends_of(handle).get(device.type, "")
        self._moves_data = self.backend != "fake"
        self._recorder = Recorder()
        self.progress = self._recorder.progress
        self._agreement = Agreement(self.everyone, self._recorder, mesh, fake=not self._moves_data)
        self.shard_group, self.replicate_group = self.everyone, None
        if mesh:
            self.shard_group, self.replicate_group = mesh_groups(self.everyone, mesh)
        self.groups = [group for group in (self.everyone, self.shard_group, self.replicate_group) if group]
        self.group = self.shard_group.handle

    # -- collectives ---------------------------------------------------------------------------------------------

    def reduce_scatter(self, output: Tensor, input: Tensor, unit: str) -> Pending:
        """Mean over the ranks of `input` (N * S,), of which this rank gets its shard in `output` (S,).

        `output` has its dtype, and may be this rank's shard of it. With a mesh: the mean of the replicas' means.
        """
        self.shard_group.check_sizes(input, output)
        if output.dtype != input.dtype:
            raise ValueError(f"rank {dist.get_rank()}: a reduce-scatter does not cast {input.dtype} to {output.dtype}")

        def steps() -> Steps:
            yield from self._reduce_scatter_steps(output, input, unit, self.shard_group)
            if self.replicate_group:
                yield from self._all_reduce_steps(output, unit, self.replicate_group)

        return self._start(f"reduce-scatter of {unit}", steps())

    def all_reduce(self, tensor: Tensor, unit: str) -> Pending:
        """Mean over the ranks of `tensor` (N * S,), in place."""
        return self._start(f"all-reduce of {unit}", self._all_reduce_steps(tensor, unit, self.everyone))

    def all_gather(self, output: Tensor, input: Tensor, unit: str) -> Pending:
        """All ranks' shards `input` (S,), in rank order, in `output` (N * S,), which may contain it. Casts."""
        self.shard_group.check_sizes(output, input)
        self._agreement.agree_on_gather(unit)
        return self._start(f"all-gather of {unit}", self._all_gather_steps(output, input, unit, self.shard_group))

    def all_to_all(self, output: Tensor, input: Tensor, unit: str) -> Pending:
        """Row r of `input` (N, ...) goes to rank r, row r of `output` (N, ...) comes from it. No stage uses it."""

        def steps() -> Steps:
            start = partial(dist.all_to_all_single, output, input)
            yield self._issue("all_to_all", unit, input, self.shard_group, start)

        return self._start(f"all-to-all of {unit}", steps())

    def broadcast(self, tensor: Tensor, unit: str) -> None:
        """The first rank's `tensor` on every rank, in place."""
        rows = each_once(tensor)
        flat = rows.resolve_conj().contiguous()
        payload = flat.view(-1).view(torch.uint8)  # no backend knows every dtype

        def steps() -> Steps:
            yield self._issue("broadcast", unit, payload, self.everyone, partial(dist.broadcast, payload, self.first))

        self._start(f"broadcast of {unit}", steps()).wait()
        rows.copy_(flat)

    def all_reduce_scalar(self, value: Tensor, op: Any) -> Tensor:
        """Reduce a one-element tensor over the shard group, in place; the same bits on every rank."""

        def steps() -> Steps:
            start = partial(dist.all_reduce, value, op)
            yield self._issue("all_reduce", "", value, self.shard_group, start, control=True)

        self._start("all-reduce of a scalar", steps()).wait()
        return value

    def _reduce_scatter_steps(self, output: Tensor, input: Tensor, unit: str, group: Group) -> Steps:
        if self.backend != "gloo":
            op = mean_op(input.dtype, group.size)
            yield self._issue("reduce_scatter", unit, input, group, partial(reduce_scatter, output, input, op))
            if op == dist.ReduceOp.SUM:
                output.div_(group.size)
            return
        # Two exchanges, down to lower ranks and up to higher ones: a single one would also copy what this rank keeps.
        rows, rank = input.view(group.size, -1), group.rank  # (N, S)
        lower, higher = [1] * rank + [0] * (group.size - rank), [0] * (rank + 1) + [1] * (group.size - rank - 1)
        from_lower, from_higher = torch.empty_like(rows[:rank]), torch.empty_like(rows[rank + 1 :])
        down = partial(dist.all_to_all_single, from_higher, rows[:rank], higher, lower)
        up = partial(dist.all_to_all_single, from_lower, rows[rank + 1 :], lower, higher)
        yield self._issue("reduce_scatter", unit, input, group, down, up)
        in_order = [*from_lower, rows[rank], *from_higher]
        if rank == 0:
            in_order[:2] = reversed(in_order[:2])  # the sum is the same, and the row it overwrites is not the caller's
        _mean_in_order(in_order, output)
        for received in (from_lower, from_higher):
            received.untyped_storage().resize_(0)  # a thread of gloo's may still hold it

    def _all_reduce_steps(self, tensor: Tensor, unit: str, group: Group) -> Steps:
        if self.backend != "gloo":
            op = mean_op(tensor.dtype, group.size)
            yield self._issue("all_reduce", unit, tensor, group, partial(dist.all_reduce, tensor, op))
            if op == dist.ReduceOp.SUM:
                tensor.div_(group.size)
            return
        # A reduce-scatter, then an all-gather: what a ring all-reduce is made of, but summed in rank order.
        mine = tensor.view(group.size, -1)[group.rank]
        yield from self._reduce_scatter_steps(mine, tensor, unit, group)
        yield from self._all_gather_steps(tensor, mine, unit, group)

    def _all_gather_steps(self, output: Tensor, input: Tensor, unit: str, group: Group) -> Steps:
        if self.backend != "gloo":
            both = output.view(torch.uint8), input.to(output.dtype).view(torch.uint8)
            yield self._issue("all_gather", unit, output, group, partial(all_gather, *both))
            return
        shards = output.view(group.size, -1)  # (N, S)
        if not shards[group.rank].is_set_to(input):
            shards[group.rank].copy_(input)
        roots = [dist.get_global_rank(group.handle, rank) for rank in range(group.size)]
        starts = [partial(dist.broadcast, s.view(torch.uint8), src=r) for s, r in zip(shards, roots, strict=True)]
        yield self._issue("all_gather", unit, output, group, *starts)

    # -- issuing and waiting -------------------------------------------------------------------------------------

    def _issue(
        self, op: str, unit: str, payload: Tensor, group: Group, *starts: Callable[..., Any], control: bool = False
    ) -> Issued:
        """Record a collective and start it, in as many calls of torch as it takes."""
        nbytes = payload.numel() * payload.element_size()
        call = self._recorder.call(op, unit, nbytes, group, control)
        entry = group.log.note(op, unit, self.phase, payload)
        ready = max((observer.before(op, nbytes, group.size) for observer in observers), default=0.0)
        works = [start(group=group.handle, async_op=True) for start in starts]
        for observer in observers:
            observer.after()
        entry.issued = time.time()
        if call is not None and self.backend == "gloo" and self._moves_data:
            both = torch.futures.collect_all([work.get_future() for work in works])
            both.add_done_callback(partial(_note_end, call, ready))
        return Issued(works, entry, call, ready)

    def _start(self, what: str, steps: Steps) -> Pending:
        """The first step is issued when this returns. A wait ends with an error if it can never succeed."""

        def wait(issued: Issued) -> None:
            begin, issued.entry.wait = time.perf_counter(), time.time()
            for work in issued.works:
                if self.backend == "gloo":
                    self._agreement.wait(work, what, issued.entry)
                else:
                    work.wait()  # makes the current stream wait, not this thread
            issued.entry.end = time.time()
            if (left := issued.ready - time.perf_counter()) > 0:
                time.sleep(left)
            if issued.call is not None and self.backend == "gloo":  # elsewhere only the device knows
                issued.call.waits.append((begin, time.perf_counter()))

        self._agreement.refuse_forks(what)
        try:
            return Pending(wait, steps)
        except RuntimeError as error:
            raise self._agreement.failure(what, error) from error

    # -- what the ranks tell each other, and what is recorded ------------------------------------------------------

    def exchange(self, message: Any, what: str) -> list[Any]:
        """Every rank's `message` (anything JSON), in rank order. For what is rare and small."""
        return self._agreement.exchange(message, what)

    def exchange_bytes(self, message: bytes, what: str) -> list[bytes]:
        """Every rank's `message`, of the same length on every rank, in rank order."""
        return self._agreement.exchange_bytes(message, what)

    def start_exchange(self, message: bytes, what: str) -> Callable[[], list[bytes]]:
        """Like `exchange_bytes`, but returns at once; the function it returns waits and gives the messages."""
        return self._agreement.start_exchange(message, what)

    def record(self) -> AbstractContextManager[list[Call]]:
        """Collect every call that this rank makes inside the block, in order."""
        return self._recorder.collect()

    @property
    def phase(self) -> str:
        """What the run is doing: "forward", "backward", "step", ..."""
        return self._recorder.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._recorder.phase = phase

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._recorder.step

    @step.setter
    def step(self, step: int) -> None:
        self._recorder.step = step


def _note_end(call: Call, ready: float = 0.0, future: Any = None) -> None:
    call.end = max(time.perf_counter(), ready)


def _mean_in_order(rows: list[Tensor], mean: Tensor) -> None:
    """Into `mean` (S,): ((row 0 + row 1) + row 2 + ...) / N of N `rows` (S,), at least in float32, rounded once.

    May overwrite row 0. `mean` may be another row."""
    total = rows[0].to(torch.promote_types(mean.dtype, torch.float32))
    for row in rows[1:]:
        total += row
    torch.div(total, len(rows), out=mean)
