"""Patients that stop: a hang, a run whose ranks part ways, a dead rank, and one that never starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import zerolab
from zerolab.lab.clinic.patient import Patient
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
        "a": "the network is too slow: three ranks wait for a message that is still on its way",
        "b": "rank 3 died: it does not answer any more",
        "c": "rank 3 has fewer batches: it made every step it had data for, and left the loop without an error",
        "d": "rank 0 hangs: its message is the first in the log",
    },
    "c",
    "Read a hang backwards: not who complains, but who did not come. Rank 3 is alive (it has a record), its last "
    "collective is completed, and no line of the script runs on it: it has finished. A loop over data of uneven "
    "length does that. Count the steps in the log: all ranks made two, and the data of rank 3 ended there.",
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
    "It hangs in its last step. A few samples in the data are broken, but the code was written for that.",
    (careful_steps,),
    _careful,
    {
        "a": "rank 1 died of the broken sample, in step 1",
        "b": "rank 1 left out a backward alone: since then its gradients met those of other steps, and one was missing",
        "c": "the NaN travelled in the all-reduce to all ranks, and their losses became NaN too",
        "d": "the ranks have models of different sizes: their collectives carry different numbers of bytes",
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
        "a": "the network: three ranks say that a connection was closed, and rank 2 says nothing",
        "b": "rank 0 began it: its error comes first in the log, and the others follow",
        "c": "a deadlock: rank 2 waits in another collective than the others",
        "d": "rank 2 was killed from outside by signal 9: it left no traceback, and the others' errors follow",
    },
    "d",
    "Errors about connections are consequences. A rank that is killed from outside has no traceback, so the log "
    "holds only the errors of the innocent. Ask which rank says nothing and how it ended: exit code -9, or 137 "
    "under a container, is SIGKILL. In this ward the script sends it to itself. On your machines it is mostly "
    "Linux, which ran out of host memory: look at dmesg on that node. Data loader workers and pinned buffers fill"
    " the host, not the GPU.",
    reset=True,
)

# -- 4 ---------------------------------------------------------------------------------------------------------------


def start(rank: int, world_size: int, port: int) -> None:
    rank = world_size  # the listing: init_process_group(..., rank=world_size, world_size=world_size)
    place = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={world_size}"
    next(dist.rendezvous(place, timeout=timedelta(seconds=1)))


def _never_starts(rank: int, world_size: int) -> None:
    free = [0]
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = [probe.getsockname()[1]]
    port = torch.tensor(free)
    dist.broadcast(port, 0)
    begin, said = time.monotonic(), ""
    print(f"process {os.getpid()}: I am rank {world_size}, and the world has {world_size}", flush=True)
    with _without_c_plus_plus():
        try:
            start(rank, world_size, int(port))
        except dist.DistError as error:
            said = str(error).splitlines()[0].replace(str(int(port)), "PORT")
            said = f"{type(error).__name__}: {said}"
    print(said)
    print("it waited for its timeout of 1 s:", time.monotonic() - begin > 0.9)


@contextmanager
def _without_c_plus_plus() -> Iterator[None]:
    """Leaves out what C++ writes to the standard error: twenty addresses on every rank."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


RENDEZVOUS = Patient(
    4,
    "A listing from an article. All four processes start, and nothing happens for as long as the timeout allows.",
    (start,),
    _never_starts,
    {
        "a": "a firewall: nobody can reach the port on this machine",
        "b": "no process is rank 0: that is the one that opens the port, and all four say they are number 4",
        "c": "the world size is wrong: one process more is expected than there are",
        "d": "the timeout is too short for four processes",
    },
    "b",
    "Rank 0 opens the port at MASTER_ADDR:MASTER_PORT, and all others connect to it. With rank=world_size nobody "
    "is 0. So everyone waits for a server that nobody starts, and the message is about a network. Ranks go from 0"
    " to world_size - 1.",
)

PATIENTS = (HANG, DESYNC, DEAD, RENDEZVOUS)
