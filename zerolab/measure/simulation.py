"""One rank of a cluster that does not exist: the real engine, unchanged, on tensors without memory.

torch's fake tensors have a shape, a dtype and a storage with a size, but no bytes. Its fake process group has as many
ranks as you like and sends nothing. A training step runs on both as it would on rank 0 of `world_size`: sizes are
real, values do not exist, and whatever the ranks would check with each other counts as agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zerolab
from zerolab.engine.engine import Engine
from zerolab.engine.precision import Precision
from zerolab.measure.allocations import Timeline, timeline
from zerolab.measure.states import model_states
from zerolab.measure.traffic import Ledger, ledger

BACKENDS = ("nccl", "gloo")


@dataclass
class Simulation:
    """The last simulated step of rank 0.

    states: bytes held when backward returns, as `model_states` counts them. parameters: elements of the full model.
    """

    stage: int
    world_size: int
    parameters: int
    states: dict[str, int]
    timeline: Timeline
    ledger: Ledger


def simulate(
    model_fn: Callable[[], nn.Module],
    stage: int | type[Engine],
    world_size: int,
    precision: Precision | None = None,
    *,
    inputs: Callable[[], Any],
    loss: Callable[..., Tensor] | None = None,
    units: Iterable[type[nn.Module]] | type[nn.Module] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 2,
    backend: str = "nccl",
) -> Simulation:
    """Train for `steps` steps as rank 0 of `world_size`, and record the last one.

    model_fn: makes the model, of any size: it takes no memory.
    stage: 0 to 3, or a class, for example a learner's.
    inputs: makes the arguments of one forward, as a tuple.
    loss: turns the model's output into the scalar to differentiate; without it, the output is that scalar.
    backend: "nccl" or "gloo". With gloo a reduce-scatter needs an extra buffer to receive into.
    steps: at least 2, because the optimizer makes its state in the first.

    Raises ValueError for arguments that no cluster could run, RuntimeError if this process has a process group.
    """
    kind = _checked(stage, world_size, steps, backend)
    with _fake_cluster(world_size):
        model = model_fn()
        parameters = sum(param.numel() for param in model.parameters())
        zero = kind(model, units=units, precision=precision)
        zero.comm.backend = backend
        stepper = optimizer(model.parameters())

        def step() -> dict[str, int]:
            output = model(*inputs())
            (output if loss is None else loss(output)).backward()
            states = model_states(zero, stepper)
            stepper.step()
            stepper.zero_grad()
            return states

        for _ in range(steps - 1):
            step()
        with timeline(zero, stepper) as line, ledger(zero) as book:
            states = step()
        return Simulation(zero.stage, world_size, parameters, states, line, book)


def _checked(stage: Any, world_size: int, steps: int, backend: str) -> type[Engine]:
    """The stage's class. Refuses impossible arguments before anything is built."""
    try:
        kind = stage if isinstance(stage, type) and issubclass(stage, Engine) else zerolab.stage_class(stage)
    except ValueError:
        raise ValueError(f"stage must be 0, 1, 2 or 3, or a subclass of zerolab's stages, not {stage!r}") from None
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, not {world_size!r}")
    if not isinstance(steps, Integral) or steps < 2:
        raise ValueError(
            f"steps must be a whole number, 2 or more, not {steps!r}: the optimizer makes its state in the first"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return kind


@contextmanager
def _fake_cluster(world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("simulate() needs a process without a process group: call it outside the ranks")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with FakeTensorMode():
            yield
    finally:
        dist.destroy_process_group()
