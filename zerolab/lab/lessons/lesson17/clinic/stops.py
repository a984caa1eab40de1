"""Patients that stop: a hang, a run whose ranks part ways, and a dead rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import zerolab
from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

_GLOO = re.compile(r"\[/\S*/gloo/\S+\] | \[[\d.]+\]:\d+|\. This is typically .*")  # places and ports, and advice

Batches = list[tuple[Tensor, Tensor]]


def _batches(rank: int, count: int) -> Batches:
    words = text()
    return [batch(words, rank, step, 4, 32) for step in range(count)]


def _impatient() -> dist.ProcessGroup:
    """All ranks, as a group whose collectives give up after 2 seconds. torch's own wait for half an hour."""
    return dist.new_group(timeout=timedelta(seconds=2))


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=1, width=32)


# -- 1 ---------------------------------------------------------------------------------------------------------------


def one_epoch(zero: zerolab.Zero1, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for step, (x, y) in enumerate(batches):
        loss = zero.model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} done", flush=True)


def _epoch(rank: int, world_size: int) -> None:
    files = _batches(rank, 3)
    mine = files[: 2 if rank == world_size - 1 else 3]  # the last rank's file is shorter
    zero = zerolab.Zero1(_gpt(), units=[Block], group=_impatient())
    one_epoch(zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-3), mine)


HANG = Patient(
    1,
    "It trains for a while. Then it hangs until the timeout, always at the same step.",
    (one_epoch, _epoch),
    _epoch,
    {
        "a": "The network is slow: three ranks wait for a message from rank 3 that is still on its way.",
        "b": "Rank 3 died and left no traceback: the other three wait for a process that is gone.",
        "c": "Rank 3 ran out of batches and left its loop: the other three went on to one more step.",
        "d": "Rank 3 skipped a backward in an earlier step: since then it is one collective behind.",
    },
    "c",
    "Read a hang backwards: not who complains, but who did not come. Rank 3 is alive (it has a record), its last "
    "collective is completed, and no line of the script runs on it: it has finished. A loop over data of uneven "
    "length does that. Count the steps in the log: all ranks made two, the data of rank 3 ended there, and the "
    "others wait at the beginning of a third.",
    reset=True,
)

# -- 2 ---------------------------------------------------------------------------------------------------------------


def careful_steps(
    zero: zerolab.DDP, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    for step, (x, y) in enumerate(batches):
        loss = zero.model(x, y)
        print(f"step {step}: loss is finite: {bool(loss.isfinite())}", flush=True)
        if not loss.isfinite():
            continue  # a bad batch: leave it out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class _Spoilt(GPT):
    """A GPT whose loss on a batch that begins with byte 0 is NaN, as one sample with a broken number makes it."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss * float("nan") if tokens[0, 0] == 0 else loss


def _careful(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    data = _batches(rank, 4)
    if rank == 1:
        data[1][0][0, 0] = 0
    zero = zerolab.DDP(_Spoilt(layers=1, width=32), units=[Block], group=_impatient())
    careful_steps(zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-3), data)


DESYNC = Patient(
    2,
    "It hangs in its last step. A few samples in the data are known to be broken, and the code looks for them.",
    (careful_steps,),
    _careful,
    {
        "a": "Rank 1 had one batch fewer than the others: it left its loop while they made a last step.",
        "b": "Rank 1 made one backward fewer: from then on, gradients of different steps were added up.",
        "c": "The NaN went through the all-reduce into the weights of all ranks: it broke their losses.",
        "d": "Rank 1's process was killed during the last step: the other three wait for its gradients.",
    },
    "b",
    "The hang is not where the mistake is. In step 1 rank 1 left out its backward. The others' gradients of step "
    "1 then met rank 1's gradients of step 2, since these are of the same shape, and nothing complained. Two "
    "updates mixed batches of different steps. Only in the end was there one collective too few. Whatever one "
    "rank decides alone (to skip, to stop, to catch an error) all have to decide: ask for the minimum of a flag "
    "first.",
    reset=True,
)

# -- 3 ---------------------------------------------------------------------------------------------------------------


def killed_from_outside(zero: zerolab.DDP, optimizer: torch.optim.Optimizer, batches: Batches, rank: int) -> None:
    for step, (x, y) in enumerate(batches):
        if rank == 2 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # as Linux does to the largest process when memory runs out
        zero.model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _killed(rank: int, world_size: int) -> None:
    zero = zerolab.DDP(_gpt(), units=[Block])
    try:
        killed_from_outside(zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-3), _batches(rank, 4), rank)
    except Exception as error:
        print(f"{type(error).__name__}: {_GLOO.sub('', str(error)).splitlines()[0]}", flush=True)


DEAD = Patient(
    3,
    "Three ranks end with an error about a connection. Whoever opened the ticket blames the network.",
    (killed_from_outside,),
    _killed,
    {
        "a": "The network cut rank 2 off: the other ranks' connections closed, and its messages are lost.",
        "b": "Rank 0 failed first, since its error leads the log: the other errors are consequences of it.",
        "c": "Rank 2 was in another collective than its peers: it failed there and closed its connections.",
        "d": "Rank 2 was ended from outside: Python had no time for an error, and the others only noticed.",
    },
    "d",
    "Errors about connections are consequences. A rank that is killed from outside has no traceback, so the log "
    "holds only the errors of the innocent. Ask which rank says nothing and how it ended: exit code -9, or 137 "
    "under a container, is SIGKILL. In this ward the script sends it to itself. On your machines it is mostly "
    "Linux, which ran out of host memory: look at dmesg on that node. Data loader workers and pinned buffers fill"
    " the host, not the GPU.",
    reset=True,
    catches=True,
)

PATIENTS = (HANG, DESYNC, DEAD)
