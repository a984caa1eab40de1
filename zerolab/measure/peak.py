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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from zerolab.engine import Engine
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


def _highest_sum(profiler: profile) -> int:
    """The highest running sum of the bytes allocated and released while the profiler was on."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    total = highest = 0
    for event in events:
        total += event.nbytes()
        highest = max(highest, total)
    return highest
