"""A pipeline of real ranks: each holds one stage of a model, and passes micro-batches on (lesson 15).

class MyPipeline(Pipeline):
    def order(self): ...          # which forward or backward this rank does when
    def forward(self, m): ...
    def backward(self, m): ...
    def weights(self, m): ...     # only where backward leaves the gradients of weights for later

loss = MyPipeline(stage, inputs, loss, like).run()

With a `Clocked` stage, the times in a run's trace are not measured: each stage has a clock, which a forward or backward
moves on by a fixed time, and a message to its sender's time if that is later. So a schedule shows as on devices of
equal speed whose wires cost nothing, and the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.measure.spans import Span, Trace

Step = tuple[str, int]  # ("forward", 3), ("backward", 3) or ("weights", 3)
CLOCKS = 1 << 20  # the tag of a sender's time is that of its message, and this


class Pipeline:
    """One rank's stage, and its connections to the ranks before and behind it.

    rank, size: the number of this stage, and of all stages. first, last: whether it is that stage.
    stage: the module that this rank computes. micro_batches: how many there are.
    kept: a dictionary, empty when a run begins, for what a forward leaves to its backward.

    inputs: a tensor for each micro-batch, which only the first stage reads. targets: `targets(y, m)` is the mean loss
    of micro-batch m, which only the last stage computes. like: a tensor with the shape and dtype of what passes from
    one stage to the next.
    """

    def __init__(
        self,
        stage: nn.Module,
        inputs: Sequence[Tensor],
        targets: Callable[[Tensor, int], Tensor],
        like: Tensor,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        self.stage = stage
        self.rank = dist.get_rank() if rank is None else rank
        self.size = dist.get_world_size() if size is None else size
        self.first, self.last = self.rank == 0, self.rank == self.size - 1
        self.micro_batches = len(inputs)
        self.kept: dict[Any, Any] = {}
        self.sent = 0  # bytes, in the run that was last
        self.trace = Trace(self.rank, self.size)  # of the run that was last
        self._inputs, self._targets, self._like = inputs, targets, like
        self._sends: list[tuple[Any, Tensor]] = []  # with the tensor, which must live until it has left
        self._losses: list[Tensor] = []
        self._begin = 0.0
        self._clocked = stage if isinstance(stage, Clocked) else None

    # -- what a subclass writes

    def order(self) -> list[Step]:
        """What this rank does in one run, in order: ("forward", m) and ("backward", m) once for each micro-batch m.

        With ("weights", m) as well, the backward is split: of its two matrix products for each of the forward, one is
        left to self.weights(m), and half of its time on a `Clocked` stage.
        """
        raise NotImplementedError

    def forward(self, m: int) -> None:
        """The stage's forward of micro-batch m: take its input, compute, pass the output on."""
        raise NotImplementedError

    def backward(self, m: int) -> None:
        """The stage's backward of micro-batch m: take its output's gradient, compute, pass the input's gradient on."""
        raise NotImplementedError

    def weights(self, m: int) -> None:
        """The gradients of weights that backward(m) left for later. It takes nothing and passes nothing on."""
        raise NotImplementedError

    # -- what it calls

    def take_input(self, m: int) -> Tensor:
        """Wait for what the stage before sends for micro-batch m, and return it; it requires a gradient.

        The first stage takes micro-batch m from the batch.
        """
        return self._inputs[m] if self.first else self._receive(self.rank - 1, 2 * m).requires_grad_()

    def send_output(self, y: Tensor, m: int) -> None:
        """Start sending the output of micro-batch m to the next stage."""
        self._send(y, self.rank + 1, 2 * m)

    def loss(self, y: Tensor, m: int) -> Tensor:
        """The last stage's: the mean loss over the samples of micro-batch m."""
        loss = self._targets(y, m)
        self._losses.append(loss.detach())
        return loss

    def take_grad(self, m: int) -> Tensor:
        """Wait for the gradient of this stage's output of micro-batch m, which the next stage sends, and return it."""
        return self._receive(self.rank + 1, 2 * m + 1)

    def send_grad(self, grad: Tensor, m: int) -> None:
        """Start sending the gradient of this stage's input of micro-batch m to the stage before."""
        self._send(grad, self.rank - 1, 2 * m + 1)

    # -- what the notebook calls

    def run(self) -> float | None:
        """All micro-batches, forward and backward. The last stage returns the mean of their losses, the others None."""
        self.kept.clear()
        self._losses.clear()
        self.sent, self.trace = 0, Trace(self.rank, self.size)
        steps = self.order()
        if self._clocked:
            self._clocked.now, self._clocked.split = 0.0, any(what == "weights" for what, _ in steps)
        for what, m in steps:
            self._begin = self._now()
            self._do(what, m)
            if what == "weights" and self._clocked:
                self._clocked.now += self._clocked.seconds
            self.trace.spans.append(Span(what, str(m), self._begin, self._now()))
        while self._sends:
            self._sends.pop(0)[0].wait()
        return float(torch.stack(self._losses).mean()) if self.last else None

    def _now(self) -> float:
        return self._clocked.now if self._clocked else time.perf_counter()

    def _do(self, what: str, m: int) -> None:
        getattr(self, what)(m)

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        if not 0 <= to < self.size:
            which = "last stage has no next one" if to > 0 else "first stage has none before it"
            raise ValueError(f"rank {self.rank} of {self.size} sends to rank {to}: the {which}")
        self._sends = [(work, held) for work, held in self._sends if not work.is_completed()]
        held = tensor.detach().contiguous()
        self.sent += held.nbytes
        self._sends.append((dist.isend(held, to, tag=tag), held))
        if self._clocked:
            time_sent = torch.tensor(self._clocked.now, dtype=torch.float64)
            self._sends.append((dist.isend(time_sent, to, tag=tag + CLOCKS), time_sent))

    def _receive(self, source: int, tag: int) -> Tensor:
        if not 0 <= source < self.size:
            raise ValueError(f"rank {self.rank} of {self.size} waits for rank {source}, which does not exist")
        tensor = torch.empty_like(self._like)
        work = dist.irecv(tensor, source, tag=tag)
        assert work is not None
        work.wait()
        if self._clocked:
            time_sent = torch.zeros((), dtype=torch.float64)
            dist.recv(time_sent, source, tag=tag + CLOCKS)
            self._clocked.now = max(self._clocked.now, float(time_sent))
        self._begin = self._now()  # until now it stood still
        return tensor


class _Tick(torch.autograd.Function):
    """Moves the clock on, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clocked: Clocked) -> Tensor:
        ctx.clocked = clocked
        clocked.now += clocked.seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clocked.now += ctx.clocked.seconds * (1 if ctx.clocked.split else 2)
        return grad, None


class Clocked(nn.Module):
    """`stage` with a clock: `now` goes on by `seconds` in each forward, and by twice that in each backward.

    A backward that is split takes `seconds` too, and so does what it leaves for later.

    Four ranks on two cores take turns at computing, so what a watch shows there is not what four devices would do.
    """

    def __init__(self, stage: nn.Module, seconds: float) -> None:
        super().__init__()
        self.stage, self.seconds, self.now, self.split = stage, seconds, 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        return _Tick.apply(self.stage(x), self)
