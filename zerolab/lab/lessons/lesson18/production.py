"""What DeepSpeed's settings do to a step of lesson 18's model: `python -m zerolab.lab.lessons.lesson18.production`.

Ours and torch's come first, then DeepSpeed, if it is installed, with a setting changed in each row. Every row is a run
of its own: five steps in four fresh processes. Bytes sent are those of a step, each collective counted as in a ring.
The peak is the allocator's, in the last step. Every number is from the rank that has most.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import zerolab
from zerolab.lab.ranks.counting import calls
from zerolab.measure import ledger, peak_of
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

RANKS, STEPS, ROWS, LENGTH = 4, 5, 8, 64
SAME = 1e-5  # how far a loss may be from ours, of about 5: other orders of sums
OURS = ("DDP", "Zero1", "Zero2", "Zero3")
TORCHS = ("torch DDP", "ZeroRedundancyOptimizer", "FSDP2")
RELEASE_ALL = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
CHANGES: tuple[tuple[int, dict[str, Any]], ...] = (  # to the configuration in `zero_optimization`
    (1, {}),
    (2, {}),
    (2, {"overlap_comm": False}),
    (2, {"contiguous_gradients": False}),
    (2, {"reduce_bucket_size": 10_000_000}),
    (2, {"reduce_bucket_size": 10_000_000, "overlap_comm": False}),
    (2, {"use_multi_rank_bucket_allreduce": False}),
    (3, {}),
    (3, {"stage3_param_persistence_threshold": 0}),
    (3, RELEASE_ALL),
)


class Run(NamedTuple):
    """A system's five steps on one rank. Bytes, and the loss of each step."""

    sent: float
    state: int
    peak: int
    losses: list[float]


def zero_optimization(stage: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The lesson's file, with buckets for a small model: the default is 2 GB for each, on every rank."""
    return {
        "stage": stage,
        "reduce_bucket_size": 1_000_000,
        "allgather_bucket_size": 1_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    } | changes


def run(name: str, stage: int = 0, changes: dict[str, Any] | None = None) -> Run:
    """On every rank: train, and count. name: a class of ours, one of TORCHS, or "DeepSpeed" with a stage."""
    device, words = zerolab.init(), text()
    losses: list[float] = []
    sent: list[float] = []
    states: list[Callable[[], Iterable[Tensor]]] = []

    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        step, count, state = _build(name, GPT(layers=4, width=128).to(device), stage, changes or {})
        states.append(state)

        def counted() -> None:
            inputs = [part.to(device) for part in batch(words, dist.get_rank(), len(losses), ROWS, LENGTH)]
            # Not in the last step, whose peak counts.
            with count() if len(losses) == STEPS - 2 else contextlib.nullcontext() as book:
                losses.append(step(*inputs))
            if book is not None:
                sent.append(float(book.moved if hasattr(book, "moved") else book.sent))

        return counted

    peak = peak_of(make, device, STEPS)
    return Run(sent[0], sum(tensor.nbytes for tensor in states[0]()), peak, losses)


def _build(name: str, gpt: GPT, stage: int, changes: dict[str, Any]) -> tuple[Callable[..., float], Any, Any]:
    """What runs a step and returns its loss, what counts a step's collectives, and what lists the state's tensors."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    count: Any = calls
    model: Any = gpt
    if name == "DeepSpeed":
        return _deepspeed(gpt, stage, changes)
    if name in OURS:
        zero = getattr(zerolab, name)(gpt, units=[Block])
        model, count = zero.model, lambda: ledger(zero)
    elif name == "FSDP2":
        for module in (*gpt.blocks, gpt):
            fully_shard(module)
    else:
        model = torch.nn.parallel.DistributedDataParallel(gpt)
    adam: Any
    if name == "ZeroRedundancyOptimizer":
        adam = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*inputs: Tensor) -> float:
        loss: Tensor = model(*inputs)
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    return step, count, lambda: _tensors(getattr(adam, "optim", adam))


def _deepspeed(gpt: GPT, stage: int, changes: dict[str, Any]) -> tuple[Callable[..., float], Any, Any]:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it uses the old names
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,  # otherwise it clips at 1
        "zero_optimization": zero_optimization(stage, changes),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, as in the other rows
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiles
        import deepspeed

        adam = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
        engine = deepspeed.initialize(model=gpt, optimizer=adam, config=config, dist_init_required=False)[0]

    def step(*inputs: Tensor) -> float:
        loss: Tensor = engine(*inputs)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, calls, lambda: _tensors(adam)


def _tensors(adam: torch.optim.Optimizer) -> list[Tensor]:
    found = [value for kept in adam.state.values() for value in kept.values() if isinstance(value, Tensor)]
    return [value.to_local() if hasattr(value, "to_local") else value for value in found]


def systems() -> list[tuple[str, int, dict[str, Any]]]:
    """Every row of the table."""
    rows: list[tuple[str, int, dict[str, Any]]] = [(name, 0, {}) for name in OURS + TORCHS]
    if importlib.util.find_spec("deepspeed") is not None:
        rows += [("DeepSpeed", stage, changes) for stage, changes in CHANGES]
    return rows


def main() -> int:
    """Print the table, row by row. Exit status: 1 if a system's losses are not those of our DDP."""
    print(f"{'bytes sent':>12}{'state':>12}{'peak':>13}{'losses apart':>15}   {RANKS} ranks, {STEPS} steps")
    ours: list[float] = []
    wrong = 0
    for name, stage, changes in systems():
        with zerolab.Ranks(RANKS, threads=1) as pool:
            everyone = pool.run(run, name, stage, changes)
        ours = ours or everyone[0].losses
        apart = max(abs(a - b) for a, b in zip(everyone[0].losses, ours, strict=True))
        wrong += apart > SAME
        sent, state, peak = (max(getattr(each, kind) for each in everyone) for kind in ("sent", "state", "peak"))
        changed = [f"{key}: {str(value).lower()}" for key, value in changes.items()]
        said = " · ".join([name if name != "DeepSpeed" else f"DeepSpeed, stage {stage}", *changed])
        print(f"{sent:12,.0f}{state:12,}{peak:13,}{apart:15.1g}   {said}", flush=True)
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: docs/performance.md says how to add it.")
    else:
        print(f"DeepSpeed {version('deepspeed')}, torch {version('torch')}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
