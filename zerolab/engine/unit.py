"""Unit: parameters that are gathered, released and reduced together.

A unit holds those parameters of one module (a transformer block, say) that share a dtype and are all trainable or all
frozen. They live in three flat tensors, and the stages differ only in where they place these:

    full      (N * S,) in the compute dtype: what forward and backward read
    master    what the optimizer updates: (N * S,) in stage 0, this rank's shard (S,) in stages 1 to 3; with `offload`
              on the host, where the optimizer then works
    shard     (S,) this rank's part of what is gathered: a view of `master`, or with `offload` its copy on the device

Their gradients are in `bucket`. What the model shows of them is in parameters.py.

"Gather" and "release" are what FSDP2 calls unshard and reshard.
"""

from __future__ import annotations

from enum import Enum, auto
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.comm.collectives import Comm
from zerolab.engine.bucket import Bucket, on_host
from zerolab.engine.layout import Layout
from zerolab.engine.parameters import Named, Parameters, Sites
from zerolab.engine.precision import Dtypes


class FullState(Enum):
    """What `Unit.full` holds."""

    STALE = auto()  # old values, or no memory at all
    GATHERING = auto()  # an all-gather is writing to it
    GATHERED = auto()  # every rank's current values
    FAILED = auto()  # a gather failed and may still be writing: the memory must stay


class Unit(Parameters):
    """The parameters `named` (name in the model, parameter). `sites[i]`: every place that holds the i-th of them."""

    def __init__(
        self, name: str, named: Named, sites: Sites, dtypes: Dtypes, comm: Comm, offload: bool, granularity: int
    ) -> None:
        super().__init__(named, sites, dtypes, comm, offload)
        self.name = name
        alignment = max(1, 16 // min(dtypes.master.itemsize, dtypes.compute.itemsize))
        self.rank = comm.shard_group.rank  # which shard is this rank's
        replicas = comm.replicate_group.size if comm.replicate_group else 1
        self.layout = Layout(named, comm.shard_group.size, lcm(alignment, granularity), lcm(replicas, granularity))
        self.bucket = Bucket(self)
        self.shard: Tensor
        self._state = FullState.STALE
        self._gathering: Any = None  # the all-gather under way

    def __repr__(self) -> str:
        return f"Unit({self.name}: {len(self.names)} parameters, {self.layout.numel:,} elements)"

    @property
    def gathered(self) -> bool:
        """Whether `full` holds every rank's current values."""
        return self._state is FullState.GATHERED

    @gathered.setter
    def gathered(self, value: bool) -> None:  # for a stage that gathers by hand
        self._state = FullState.GATHERED if value else FullState.STALE

    @property
    def in_flight(self) -> bool:
        """Whether `full` is being received."""
        return self._state is FullState.GATHERING

    @property
    def sharded(self) -> bool:
        """Whether `master` is this rank's shard alone."""
        return self.master.numel() < self.layout.size

    def fill(self, sources: list[Tensor], device: torch.device) -> None:
        """Make the flat tensors, with the first rank's values of the parameters."""
        dtypes, layout = self.dtypes, self.layout
        self.master = torch.zeros(layout.size, dtype=dtypes.master, device=device)
        for view, source in zip(layout.views(self.master), sources, strict=True):
            view.copy_(source)
        self.comm.broadcast(self.master, self.name)
        self.shard = layout.shard(self.master, self.rank)
        self.full = self.master if dtypes.compute == dtypes.master else self.master.to(dtypes.compute)
        self.full_params = [nn.Parameter(view, requires_grad=False) for view in layout.views(self.full)]
        self._state = FullState.GATHERED

    def keep_shard(self) -> Tensor:
        """Keep this rank's shard of the masters. The rest goes, unless it is what `full` is a view of."""
        if self.offload:
            self.master = on_host(self.shard)
            released = self.full.untyped_storage().size() == 0
            self.shard = self.shard.to(self.full.dtype) if released else self.layout.shard(self.full, self.rank)
            return self.master
        if self.full is not self.master:
            self.shard = self.shard.clone()
        self.master = self.shard
        return self.master

    def gather(self) -> None:
        """All-gather every rank's shard into `full`, cast to the compute dtype on the way."""
        if not self.gathered:
            self.start_gather()
            self._finish_gather()

    def start_gather(self) -> None:
        """Like `gather`, but without waiting. A later `gather` waits."""
        if self._state in (FullState.GATHERED, FullState.GATHERING):
            return
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.size * self.full.element_size())
        # `.data`: autograd must not see the same values, gathered again, as a change
        self._gathering = self.comm.all_gather(self.full.data, self.shard.data.to(self.dtypes.compute), self.name)
        self._state = FullState.GATHERING

    def _finish_gather(self) -> None:
        if self._state is FullState.GATHERING:
            gathering, self._gathering = self._gathering, None
            self._state = FullState.FAILED
            gathering.wait()
            self._state = FullState.GATHERED

    def outdate(self) -> None:
        """What `full` holds, or is just receiving, is old."""
        self._finish_gather()
        if self._state is not FullState.FAILED:
            self._state = FullState.STALE

    def release(self) -> None:
        """Give the memory of `full` back. Its views remain, without memory, until the next `gather`."""
        self.outdate()
        if self._state is not FullState.FAILED:
            self.seal()
            self.full.untyped_storage().resize_(0)

    def cast(self) -> None:
        """Stage 0: bring `full` up to date with the masters, if it is a copy of them."""
        if self.full is not self.master:
            self.full.data.copy_(self.master.data)
        self._state = FullState.GATHERED

    def follow_master(self) -> None:
        """The master has new values."""
        self.outdate()
        if self.offload:
            self.shard.data.copy_(self.master.data)
