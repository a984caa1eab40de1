"""The most memory that this rank had in use at one moment of a step.

On CUDA the allocator knows: `torch.cuda.max_memory_allocated`, everything that lies on the device.

On the CPU torch keeps no such number, but its profiler reports every allocation and every release with size and time.
The largest running sum of these, on top of the model states that were there before, is the peak. It contains
what torch allocates in the thread of the step and in gloo's threads on its behalf: activations, gradients,
temporary buffers (gloo's all-gather has one). It misses what does not come from torch's allocator (Python itself,
workspaces of oneDNN, sockets), tensors that were there before and are no model states (the text, the batch if it was
made before), and the release of what was there before: torch warns if that happens, and the peak is then too high.
So let the gradients go at the end of a step, as the training loop does, not at the beginning of the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from zerolab.engine.engine import Engine
from zerolab.measure.states import model_states


@dataclass
class Peak:
    """`bytes`: the peak, known when the block is over."""

    bytes: int = 0


@contextmanager
def peak(zero: Engine, optimizer: Optimizer) -> Iterator[Peak]:
    """Measure the block, usually one step: `with peak(zero, optimizer) as p: ...`, then `p.bytes`.

    The block runs slower than usual, so do not measure its time.
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
        # The profiler's library writes lines about itself to stderr; it looks at this before it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            yield result
        result.bytes = before + _highest_sum(profiler)


def peak_of(build: Callable[[], Callable[[], Any]], device: torch.device, steps: int = 3) -> int:
    """The allocator's peak in bytes in the last of `steps` steps, of whatever `build` builds: any library's.

    build: makes model and optimizer, and returns a function that makes a step. Everything that it allocates counts.
    """
    if device.type == "cuda":
        step = build()
        for _ in range(steps):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            step()
        return torch.cuda.max_memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step = build()
        for _ in range(steps - 1):
            step()
        with record_function(LAST):
            step()
    return _highest_sum(profiler, since=LAST)


LAST = "zerolab: the last step"


def _highest_sum(profiler: profile, since: str | None = None) -> int:
    """The highest running sum of the bytes allocated and released while the profiler was on, or `since` an event."""
    events = list(profiler.profiler.kineto_results.events())
    first = next((event.start_ns() for event in events if event.name() == since), 0)
    total = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns()):
        if event.start_ns() >= first:
            highest = max(highest, total, total + event.nbytes())
        total += event.nbytes()
    return highest
