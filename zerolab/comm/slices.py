"""One parameter's slices between the ranks that have them and the rank that owns the parameter.

Shards cut a unit's flat storage in rank order, so a parameter's slices, one after another, are the parameter. Nothing
has to be packed: each rank sends its slice as it lies in its shard, and the owner receives it where it belongs.

    slices   rank 0: a a a a    rank 1: a a a a a a    rank 2: a a          uneven, some may be empty
    full     on the owner:      a a a a a a a a a a a a
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.comm.collectives import Comm, Pending, Steps


def gather_slices(
    comm: Comm, fulls: list[Tensor], slices: list[Tensor], sizes: list[int], owner: int, unit: str
) -> Pending:
    """Put every rank's `slices` into `fulls` on the rank `owner` of the shard group.

    slices: flat tensors of one dtype, a slice of each of the same number of parameters; rank r's have `sizes[r]`
    elements. fulls: on the owner as many tensors (sum(sizes),), elsewhere empty ones (0,).
    """
    every, one = _splits(comm, sizes, owner)
    sent = 0 if comm.shard_group.rank == owner else sum(map(_nbytes, slices))
    return _all_to_all(comm, fulls, slices, every, one, sum(sizes), sent, unit)


def scatter_slices(comm: Comm, mine: Tensor, full: Tensor, sizes: list[int], owner: int, unit: str) -> Pending:
    """The reverse: the `full` parameter (sum(sizes),) of the rank `owner` goes to every rank's slice `mine`.

    Elsewhere `full` is empty (0,).
    """
    every, one = _splits(comm, sizes, owner)
    sent = _nbytes(full) - _nbytes(mine) if comm.shard_group.rank == owner else 0
    return _all_to_all(comm, [mine], [full], one, every, sum(sizes), sent, unit)


def spread_full(comm: Comm, full: Tensor, owner: int, unit: str) -> Pending:
    """The `full` parameter of the rank `owner`, a flat tensor, on every rank of the shard group, in place."""
    group = comm.shard_group
    start = partial(dist.broadcast, full, src=dist.get_global_rank(group.handle, owner))

    def steps() -> Steps:
        yield comm._issue("broadcast", unit, full, group, start)

    return comm._start(f"broadcast of {unit}", steps())


def _splits(comm: Comm, sizes: list[int], owner: int) -> tuple[list[int], list[int]]:
    """Elements that this rank exchanges with each rank: as the owner, which has to do with all, and as one of all."""
    rank = comm.shard_group.rank
    every = sizes if rank == owner else [0] * len(sizes)
    return every, [sizes[rank] if other == owner else 0 for other in range(len(sizes))]


def _all_to_all(
    comm: Comm,
    outputs: list[Tensor],
    inputs: list[Tensor],
    incoming: list[int],
    outgoing: list[int],
    numel: int,
    sent: int,
    unit: str,
) -> Pending:
    payload = torch.empty(len(inputs) * numel, dtype=inputs[0].dtype, device="meta")
    starts = [
        partial(dist.all_to_all_single, output, input, incoming, outgoing)
        for output, input in zip(outputs, inputs, strict=True)
    ]

    def steps() -> Steps:
        issued = comm._issue("all_to_all", unit, payload, comm.shard_group, *starts)
        if issued.call is not None:
            issued.call.sent = sent  # slices are uneven, so it is known only here
        yield issued

    return comm._start(f"all-to-all of {unit}", steps())


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
