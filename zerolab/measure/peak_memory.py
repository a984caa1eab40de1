"""Peak memory: the most bytes this rank had in use at any moment of a step.

On CUDA the allocator knows: `torch.cuda.max_memory_allocated` counts everything on the device.

On the CPU torch keeps no such number, but its profiler reports the size and time of every allocation and release. The
peak is the largest running sum of these, plus the model states that existed before. It includes what torch allocates
in the thread of the step and in gloo's threads: activations, gradients, temporary buffers (gloo's all-gather has one).
It misses memory that torch's allocator does not hand out (Python itself, oneDNN's workspaces, sockets) and tensors
that existed before and are not model states, such as the text. Nor does it see such a tensor released inside the
block: torch then warns, and the peak is too high. So free the gradients at the end of a step, as the training loop
does, rather than at the start of the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function
from torch.optim import Optimizer

from zerolab.engine.engine import Engine
from zerolab.measure.states import model_states


@dataclass
class Peak:
    """`bytes` is the peak, filled in when the block ends."""

    bytes: int = 0


@contextmanager
def peak(zero: Engine, optimizer: Optimizer | Iterable[Optimizer]) -> Iterator[Peak]:
    """Measure a block, usually one step: `with peak(zero, optimizer) as p: ...`, then read `p.bytes`.

    The block runs slower than usual, so do not time it.
    """
    result = Peak()
    device = zero.comm.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        torch.cuda.synchronize(device)
        result.bytes = torch.cuda.max_memory_allocated(device)
    else:
        before = sum(model_states(zero, optimizer).values())
        # Keeps the profiler's library from logging to stderr. It reads this once, before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(profile_memory=True) as profiler:
            yield result
        result.bytes = before + _highest_sum(profiler)


def peak_of(build: Callable[[], Callable[[], Any]], device: torch.device, steps: int = 3) -> int:
    """The allocator's peak, in bytes, during the last of `steps` steps. Works for any library, not only zerolab.

    build: makes model and optimizer, and returns a function that runs one step. All that it allocates counts.
    """
    if device.type == "cuda":
        step = build()
        for _ in range(steps):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            step()
        return torch.cuda.max_memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as profiler:
        step = build()
        for _ in range(steps - 1):
            step()
        with record_function(LAST):
            step()
    return _highest_sum(profiler, since=LAST)


LAST = "zerolab: the last step"


def _highest_sum(profiler: profile, since: str | None = None) -> int:
    """The highest running sum of bytes allocated and released while the profiler ran; `since`: from this event on."""
    assert profiler.kineto_results is not None, "the profiler has run"
    events: list[Any] = profiler.kineto_results.events()  # Any: torch's stubs lack nbytes()
    first = next((event.start_ns() for event in events if event.name() == since), 0)
    total = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.start_ns() >= first:
            highest = max(highest, total, total + event.nbytes())
        total += event.nbytes()
    return highest
