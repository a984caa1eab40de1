"""What lesson 09 counts: FLOP and bytes by phase, gathers that are under way when a block begins, DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from zerolab.engine.engine import Engine
from zerolab.lab.ranks.counting import calls
from zerolab.measure.traffic import ledger

Sample = tuple[Tensor, Tensor]


def flop_by_phase(model: nn.Module, sample: Sample) -> dict[str, int]:
    with FlopCounterMode(display=False) as in_forward:
        loss = model(*sample)
    with FlopCounterMode(display=False) as in_backward:
        loss.backward()
    return {"forward": in_forward.get_total_flops(), "backward": in_backward.get_total_flops()}


def sent_by_phase(zero: Engine, optimizer: Any, step: Callable[[], Any]) -> dict[str, int]:
    """Bytes that this rank sends in the second step: in stages 1 and 2 it gathers what the first has changed."""
    step()
    with ledger(zero) as book:
        step()
    by_phase = book.totals("phase")
    return {phase: by_phase[phase].sent if phase in by_phase else 0 for phase in ("forward", "backward")}


def gathers_of_fsdp2(model: Any, sample: Sample, named: bool = False) -> list[int]:
    """How many gathers FSDP2 has started whenever a block begins to compute, in the second step.

    named: each block has been told, by set_modules_to_forward_prefetch, which block comes next.
    """
    for module in (*model.blocks, model):
        fully_shard(module)
    if named:
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
    model(*sample).backward()
    with calls() as book:
        return _whenever_a_block_begins(model, sample, lambda: sum("allgather" in of.op for of in book.calls))


def gathers_of_ours(zero: Engine, optimizer: Any, step: Callable[[], Any], sample: Sample) -> list[int]:
    """The same of an engine."""
    step()
    with ledger(zero) as book:
        return _whenever_a_block_begins(
            zero.model, sample, lambda: sum(of.op == "all_gather" and not of.control for of in book.calls)
        )


def _whenever_a_block_begins(model: Any, sample: Sample, count: Callable[[], int]) -> list[int]:
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(count())

    for block in model.blocks:
        block.norm1.register_forward_pre_hook(look)
        block.mlp.down.register_full_backward_pre_hook(look)
    model(*sample).backward()
    return seen


def buckets_of_ddp(model: nn.Module, samples: Sequence[Sample], **size: float) -> list[int]:
    """The bytes of each bucket of torch's DDP, in the order in which they leave. size: bucket_cap_mb, or nothing."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **size)  # type: ignore[arg-type]
    for sample in samples:  # it puts its buckets in order after the first step
        with calls() as book:
            ddp(*sample).backward()
    grads = [param.grad for param in ddp.parameters() if param.grad is not None]
    assert len({grad.untyped_storage()._cdata for grad in grads}) == len(book.calls)  # views of the buckets
    return [call.payload for call in book.calls]
