"""Ranks that miss each other, for test_flight.py: rank 2 oversleeps, skips a collective, or dies."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch
import torch.distributed as dist
from jobs_common import batch, build

import zerolab
from zerolab.comm import Comm


def oversleep(seconds: float) -> None:
    time.sleep(seconds)


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
    if case == "oversleeps" and zero.rank == 2:
        oversleep(6.0)
    elif case == "hurries" and zero.rank == 2:
        time.sleep(1.0)  # so that the others give up first
        dist.barrier()
    elif case == "skips" and zero.rank == 2:
        zero.comm.reduce_scatter = lambda *arguments: None
    elif case == "dies" and zero.rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif (case, zero.rank) in (("dies", 3), ("holds the store", 0)):
        os.kill(os.getpid(), signal.SIGSTOP)


def reduce(sizes: list[int]) -> None:
    """Four units; rank 2 skips the second."""
    comm = Comm(None, torch.device("cpu"))
    comm.phase = "backward"
    for unit, size in zip("abcd", sizes, strict=True):
        if unit != "b" or comm.rank != 2:
            comm.reduce_scatter(torch.empty(size), torch.ones(size * comm.world_size), unit).wait()


def told(job: Callable[..., None], *arguments: object) -> tuple[str, str]:
    """What the job raised, and what this rank printed."""
    zerolab.init()
    out, error = io.StringIO(), ""
    with redirect_stderr(out):
        try:
            job(*arguments)
        except RuntimeError as caught:
            error = str(caught)
    return error, out.getvalue()


def told_in_files(folder: str, job: Callable[..., None], *arguments: object) -> None:
    error, text = told(job, *arguments)
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps([error, text]))
    raise zerolab.CommError(error)


if __name__ == "__main__":  # one rank of a world whose store rank 0 holds
    zerolab.init(float(sys.argv[1]))
    train("holds the store", 3)
