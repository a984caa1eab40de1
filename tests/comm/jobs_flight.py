"""Ranks that miss each other, for test_flight.py: rank 2 oversleeps, skips a collective, or dies."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs_common import batch, build

import zerolab
from zerolab.comm import Comm
from zerolab.comm.groups import control_group

# Of a collective in which a rank is missing. All that is to succeed has PATIENCE: on a machine that stops for a while,
# LIMIT would end it.
LIMIT, PATIENCE = timedelta(seconds=2), timedelta(minutes=10)
GIVEN_UP = ["rank 0 has given up", "rank 1 has given up"]  # in the store


def oversleep(store: dist.Store, keys: list[str]) -> None:
    store.wait(keys, PATIENCE)


def train(case: str, stage: int) -> None:
    """Two good steps, a third in which a rank goes wrong, and a fourth."""
    zero = zerolab.shard(build(), stage)
    optimizer = torch.optim.AdamW(zero.model.parameters())
    for step in range(4):
        if step == 2:
            go_wrong(case, zero)
        zero.model(*batch(zero.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def go_wrong(case: str, zero: zerolab.Engine) -> None:
    if case == "skips" and zero.rank == 2:
        zero.comm.reduce_scatter = lambda *arguments: None
    elif (case, zero.rank) == ("holds the store", 0):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif wrong := {"oversleeps": [2], "hurries": [2], "dies": [2, 3]}.get(case):
        store = dist.distributed_c10d._get_default_store()
        if zero.rank not in wrong:
            give_up_soon([f"rank {rank} is there" for rank in wrong])
            return
        store.set(f"rank {zero.rank} is there", "")
        if case == "oversleeps":
            oversleep(store, GIVEN_UP)
        elif case == "hurries":
            dist.barrier()
            raise RuntimeError("the others came to the barrier when they had given up")
        elif zero.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while case == "dies":  # again, if somebody wakes it
            os.kill(os.getpid(), signal.SIGSTOP)


def give_up_soon(keys: list[str]) -> None:
    """Wait for `keys` in the store; after that, this rank waits for no collective longer than LIMIT."""
    dist.distributed_c10d._get_default_store().wait(keys, PATIENCE)
    wait_for_collectives(LIMIT)


def wait_for_collectives(limit: timedelta) -> None:
    world = dist.distributed_c10d._get_default_group()
    for group in (world._get_backend(torch.device("cpu")), control_group(world)):
        group._set_default_timeout(limit)


def reduce(sizes: list[int]) -> None:
    """Four units; rank 2 skips the second."""
    comm = Comm(None, torch.device("cpu"))
    comm.phase = "backward"
    for unit, size in zip("abcd", sizes, strict=True):
        if unit == "d" and comm.rank != 2:
            give_up_soon(["rank 2 has finished"])
        if unit != "b" or comm.rank != 2:
            comm.reduce_scatter(torch.empty(size), torch.ones(size * comm.world_size), unit).wait()
    if comm.rank == 2:
        dist.distributed_c10d._get_default_store().set("rank 2 has finished", "")


def told(job: Callable[..., None], *arguments: object) -> tuple[str, str]:
    """What the job raised, and what this rank printed."""
    zerolab.init()
    out, error = io.StringIO(), ""
    with redirect_stderr(out):
        try:
            job(*arguments)
        except RuntimeError as caught:
            error = str(caught)
            store, given_up = dist.distributed_c10d._get_default_store(), f"rank {dist.get_rank()} has given up"
            store.set(given_up, "")
            if "hurries" in arguments and given_up in GIVEN_UP:  # nobody asks any more: let rank 2 go
                store.wait(GIVEN_UP, PATIENCE)
                wait_for_collectives(PATIENCE)
                dist.barrier()
    return error, out.getvalue()


def told_in_files(folder: str, job: Callable[..., None], *arguments: object) -> None:
    error, text = told(job, *arguments)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps([error, text]))
    raise zerolab.CommError(error)


if __name__ == "__main__":  # one rank of a world whose store rank 0 holds
    zerolab.init(float(sys.argv[1]))
    train("holds the store", 3)
