"""Unit: parameters that are gathered, released and reduced together.

A unit holds those parameters of one module (a transformer block, say) that share a dtype and are all trainable or all
frozen. They live in three flat tensors, and the stages differ only in where they place these:

    full      (N * S,) in the compute dtype: what forward and backward read
    master    what the optimizer updates: (N * S,) in stage 0, this rank's shard (S,) in stages 1 to 3; with `offload`
              on the host, where the optimizer then works
    shard     (S,) this rank's part of what is gathered: a view of `master`, or with `offload` its copy on the device

Their gradients are in `bucket`.

Each parameter of the model exists twice. `full_params[i]` is a leaf of autograd and a view of `full`. `params[i]` is a
view of `master`: it is what the optimizer holds, and what the model shows outside forward and backward.

"Gather" and "release" are what FSDP2 calls unshard and reshard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zerolab.comm.collectives import Comm
from zerolab.engine.bucket import Bucket, on_host
from zerolab.engine.layout import Layout
from zerolab.engine.precision import Dtypes
from zerolab.engine.shown import make_shown
from zerolab.engine.slices import plainly, refuse_gradient

Site = tuple[nn.Module, str]  # a module and the name under which it holds a parameter
OnGradient = Callable[["Unit", int], None]


class FullState(Enum):
    """What `Unit.full` holds."""

    STALE = auto()  # old values, or no memory at all
    GATHERING = auto()  # an all-gather is writing to it
    GATHERED = auto()  # every rank's current values
    FAILED = auto()  # a gather failed and may still be writing: the memory must stay


class Unit:
    """The parameters `named` (name in the model, parameter). `sites[i]`: every place that holds the i-th of them."""

    def __init__(
        self,
        name: str,
        named: list[tuple[str, nn.Parameter]],
        sites: list[list[Site]],
        dtypes: Dtypes,
        comm: Comm,
        offload: bool = False,
    ) -> None:
        self.name, self.sites, self.dtypes, self.comm, self.offload = name, sites, dtypes, comm, offload
        self.names = [name for name, _ in named]
        alignment = max(1, 16 // min(dtypes.master.itemsize, dtypes.compute.itemsize))
        self.rank = comm.shard_group.rank  # which shard is this rank's
        replicas = comm.replicate_group.size if comm.replicate_group else 1
        self.layout = Layout(named, comm.shard_group.size, alignment, replicas)
        self.trainable = any(p.requires_grad for _, p in named)  # as the ranks agreed
        self.bucket = Bucket(self)
        self.depth = 0  # calls under way of modules that need this unit

        every = [(module, attribute, i) for i, group in enumerate(sites) for module, attribute in group]
        self._plain_sites = [site for site in every if _is_plain(site[0])]
        self._other_sites = [site for site in every if not _is_plain(site[0])]

        self.full: Tensor
        self.master: Tensor
        self.shard: Tensor
        self.full_params: list[nn.Parameter]
        self.params: list[nn.Parameter]
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
    def sharded(self) -> bool:
        """Whether `master` is this rank's shard alone."""
        return self.master.numel() < self.layout.size

    # -- construction --------------------------------------------------------------------------------------------

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

    def adopt(self, tensors: list[Tensor], trainable: list[bool], on_gradient: OnGradient) -> None:
        """Make parameters of what the optimizer is to see, and show them."""
        self.aliases: list[Tensor] = []  # of `params`, handed out as `.data`
        self.params = [make_shown(*of_one, self.aliases) for of_one in zip(tensors, trainable, self.names, strict=True)]
        self._on_gradient = on_gradient
        self._hooked = [False] * len(self.params)  # which of `full_params` report their gradients
        start = self.master.storage_offset()
        self._places = [(param.size(), param.stride(), param.storage_offset() - start) for param in self.params]
        for i, param in enumerate(self.params):
            param.grad_dtype = None  # a gradient may wait for the step in the reduce dtype, or in float32
            self._follow(i)
        self.version = self.changes
        self.show(self.params)

    # -- what the model shows ------------------------------------------------------------------------------------

    def show(self, tensors: list[nn.Parameter]) -> None:
        """Put `tensors` where the modules look for their parameters."""
        for module, attribute, i in self._plain_sites:
            module._parameters[attribute] = tensors[i]
        for module, attribute, i in self._other_sites:
            setattr(module, attribute, tensors[i])

    def show_full(self) -> None:
        """Forward begins. Check that the parameters shown so far are still ours, then show the full ones."""
        with plainly():
            self._check_shown()
        self.show(self.full_params)

    def _check_shown(self) -> None:
        storage = self.master.untyped_storage()._cdata  # an identity, also for slices without elements
        for i, (full, param) in enumerate(zip(self.full_params, self.params, strict=True)):
            module, attribute = self.sites[i][0]
            shown = module._parameters.get(attribute)
            if (shown is not param and shown is not full) or param.untyped_storage()._cdata != storage:
                raise RuntimeError(
                    f"rank {self.comm.rank}: the storage of {self.names[i]} was replaced after sharding "
                    "(.to(), .double(), .half(), .data = ..., a new Parameter?). Convert the model before sharding it. "
                    "To change values, edit them in place, inside `with zero.full_parameters():`, or with "
                    "zero.load_full_state_dict()"
                )
            if full.requires_grad != param.requires_grad:
                self._follow(i)

    def show_params(self) -> None:
        self.show(self.params)

    def _follow(self, i: int) -> None:
        """Parameter `i` became trainable or frozen: so does its full parameter, whose gradients come here."""
        param, full = self.params[i], self.full_params[i]
        full.requires_grad_(param.requires_grad)
        if not self._hooked[i] and param.requires_grad:
            nn.Parameter.register_hook(param, partial(refuse_gradient, self.names[i]))
            # The garbage collector cannot see what a hook in C++ holds, so the hook must not hold the unit.
            full.register_post_accumulate_grad_hook(partial(_pass_on, weakref.ref(self), i))
            self._hooked[i] = True

    # -- gather and release --------------------------------------------------------------------------------------

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

    def mark_followed(self) -> None:
        """Any later change of the master is a new one."""
        # A backward through an older forward would mix old activations with new weights: autograd will refuse it.
        increment_version(self.full)
        self.version = self.changes

    @property
    def changes(self) -> int:
        """Grows with every write into the masters, `.data` included."""
        return self.master._version + sum(alias._version for alias in self.aliases)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, a tensor laid out as `master` is, that belong to `params`."""
        start = flat.storage_offset()
        return [flat.as_strided(size, stride, start + offset) for size, stride, offset in self._places]


def _is_plain(module: nn.Module) -> bool:
    """Whether it keeps its parameters in one place. LSTM and its kin keep a second list of their weights."""
    return type(module).__setattr__ is nn.Module.__setattr__


def _pass_on(reference: weakref.ref[Unit], i: int, leaf: Tensor) -> None:
    unit = reference()
    if unit is not None:
        unit._on_gradient(unit, i)
