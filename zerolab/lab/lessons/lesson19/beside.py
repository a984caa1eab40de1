"""What lesson 19 shows beside the trial: memory that ranks of one machine share, and what a step of FSDP2 sends."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from zerolab.lab.ranks.counting import calls
from zerolab.tasks.models import GPT


def through_one_file(value: float) -> float:
    """All ranks map the same file of this machine into their memory, and rank 0 writes `value`: what this rank sees.

    No collective carries the value, only the file's name.
    """
    path = [f"{tempfile.gettempdir()}/zerolab-shared-{os.getpid()}"]
    dist.broadcast_object_list(path, src=0)
    first = dist.get_rank() == 0
    if first:
        torch.zeros(1).numpy().tofile(path[0])
    dist.barrier()
    shared = torch.from_file(path[0], shared=True, size=1)
    if first:
        shared.fill_(value)
    dist.barrier()
    there = shared.item()
    dist.barrier()
    if first:
        os.remove(path[0])
    return there


def sent_by_fsdp2(model: GPT, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """The bytes that this rank sends in a step of FSDP2 with Adam: in forward and backward, and in the update."""
    for module in (*model.blocks, model):
        fully_shard(module)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with calls() as computing:
        model(*inputs).backward()
    with calls() as updating:
        adam.step()
    return computing.sent, updating.sent
