"""Unit: a flat storage that is gathered, released and reduced as one.

A unit holds the parameters of one module (a transformer block, say) that have one dtype and are trainable, or
frozen, together. Three things live in it, and the stages differ only in where they place them:

    whole        (N * S,) in the compute dtype    what forward and backward see
    master       what the optimizer updates: (N * S,) in stage 0, this rank's shard (S,) in stages 1 to 3; with
                 `offload` on the host, where the optimizer then works, and finds the gradient too
    shard        (S,) this rank's part of what is gathered: a view of `master`, with `offload` its copy on the device
    whole_grad   (N * S,) in the reduce dtype     this rank's own gradient, then whatever `reduce` makes of it

Each parameter of the model exists twice: `wholes[i]` is a leaf of autograd and a view of `whole`; `params[i]` is
what the model shows outside forward and backward, what the optimizer holds, and a view of `master`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zerolab.comm.collectives import Comm
from zerolab.engine.layout import Layout
from zerolab.engine.precision import Dtypes

Site = tuple[nn.Module, str]  # a module and the name under which it holds a parameter


class ForwardCall:
    """A call of `units` in forward. Only its autograd graph holds it: where there is no backward, it goes with that."""

    def __init__(self, units: list[Unit], begun: int) -> None:
        self.units, self.begun = units, begun


class Unit:
    """The parameters `named` (name in the model -> parameter), which `sites[i]` hold."""

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
        self.trainable = any(p.requires_grad for _, p in named)  # as agreed between the ranks

        every = [(module, attribute, i) for i, group in enumerate(sites) for module, attribute in group]
        self._plain_sites = [site for site in every if _is_plain(site[0])]
        self._other_sites = [site for site in every if not _is_plain(site[0])]

        self.gathered = False  # whether `whole` holds every rank's current values
        self._gathering: Any = None
        self._stuck = False  # a gather failed, and may still write: its memory must not go

        self.whole_grad: Tensor | None = None
        self.complete = False  # whether `whole_grad` has all that is to travel
        self.kept_memory: Tensor | None = None  # an earlier `whole_grad`, for the next one to lie in
        self.grad: Tensor | None = None  # the averaged gradient, laid out as `master` is
        self.reduction: Any = None  # the reduction under way: anything with `wait()`
        self._slice_only = False  # of the gradient, when the reduction is over
        self._leaving: Tensor | None = None  # the `whole_grad` that is to go then
        self._lent = False  # no_sync has shown parts of `whole_grad` to the user
        self.have = [False] * len(named)  # which parameters `whole_grad` has a gradient for
        self.used = [False] * len(named)  # which it had one for when it was reduced in this backward
        self.arrived: set[int] = set()  # which of them came in this backward
        # What `params[i].grad` shows while no_sync keeps gradients back: (tensor, its version, whether it is a part of
        # `whole_grad`)
        self.kept_back: dict[int, tuple[Tensor, int, bool]] = {}

        self.depth = 0  # how many calls of modules that need this unit are under way
        self.ran = False  # used in a forward since the last backward
        self.calls: WeakSet[ForwardCall] = WeakSet()  # those whose backward has not come back to the unit's inputs
        self.unwatched: ForwardCall | None = None  # the call under way, if it has no inputs by which to see that
        self.opened = False  # pre_backward has run, post_backward has not
        self.ready = False  # backward has passed the unit

    def __repr__(self) -> str:
        return f"Unit({self.name}: {len(self.names)} parameters, {self.layout.numel:,} elements)"

    # -- construction --------------------------------------------------------------------------------------------

    def fill(self, sources: list[Tensor], device: torch.device) -> None:
        """Make the flat storages from the parameters' values on the first rank."""
        dtypes, layout = self.dtypes, self.layout
        self.master = torch.zeros(layout.size, dtype=dtypes.master, device=device)
        for view, source in zip(layout.wholes(self.master), sources, strict=True):
            view.copy_(source)
        self.comm.broadcast(self.master, self.name)
        self.shard = layout.shard(self.master, self.rank)
        self.whole = self.master if dtypes.compute == dtypes.master else self.master.to(dtypes.compute)
        self.wholes = [nn.Parameter(view, requires_grad=False) for view in layout.wholes(self.whole)]
        self.gathered = True

    def keep_shard(self) -> Tensor:
        """Of the masters keep this rank's shard, and let the rest go where `whole` is a copy in another dtype."""
        if self.offload:
            self.master = _on_host(self.shard)
            released = self.whole.untyped_storage().size() == 0
            self.shard = self.shard.to(self.whole.dtype) if released else self.layout.shard(self.whole, self.rank)
            return self.master
        if self.whole is not self.master:
            self.shard = self.shard.clone()
        self.master = self.shard
        return self.master

    def adopt(self, tensors: list[Tensor], trainable: list[bool], on_gradient: Any) -> None:
        """Make parameters of what the optimizer shall see, and show them."""
        self.params = [nn.Parameter(t, requires_grad=r) for t, r in zip(tensors, trainable, strict=True)]
        self._on_gradient = on_gradient
        self._hooked = [False] * len(self.params)  # which of `wholes` tell of their gradients
        self._promoted: dict[int, torch.dtype] = {}  # of which gradients `promote_grads` changed the dtype
        self.version = self.master._version
        start = self.master.storage_offset()
        self._places = [(param.size(), param.stride(), param.storage_offset() - start) for param in self.params]
        for i, param in enumerate(self.params):
            param.grad_dtype = None  # a gradient may wait for the step in the reduce dtype, or in float32
            self._follow(i)
        self.show(self.params)

    # -- what the model shows ------------------------------------------------------------------------------------

    def show(self, tensors: list[nn.Parameter]) -> None:
        """Put `tensors` where the modules look for their parameters."""
        for module, attribute, i in self._plain_sites:
            module._parameters[attribute] = tensors[i]
        for module, attribute, i in self._other_sites:
            setattr(module, attribute, tensors[i])

    def show_whole(self) -> None:
        """Forward begins: show the whole parameters, after a look at what became of the ones shown before."""
        storage = self.master.untyped_storage()._cdata  # an identity, also of slices without elements
        for i, (whole, param) in enumerate(zip(self.wholes, self.params, strict=True)):
            module, attribute = self.sites[i][0]
            shown = module._parameters.get(attribute)
            if (shown is not param and shown is not whole) or param.untyped_storage()._cdata != storage:
                raise RuntimeError(
                    f"rank {self.comm.rank}: the storage of {self.names[i]} was replaced after sharding "
                    "(.to(), .double(), .half(), .data = ..., a new Parameter?). Convert the model before sharding it; "
                    "change values in place, with `with zero.full_parameters():`, or with zero.load_full_state_dict()"
                )
            if whole.requires_grad != param.requires_grad:
                self._follow(i)
        self.show(self.wholes)

    def _follow(self, i: int) -> None:
        """Parameter `i` was made trainable, or frozen: so is its whole, whose gradients from now on come here."""
        param, whole = self.params[i], self.wholes[i]
        whole.requires_grad_(param.requires_grad)
        if not self._hooked[i] and param.requires_grad:
            param.register_hook(partial(_refuse_gradient, self.names[i]))
            # A hook in C++ hides from the garbage collector what it holds: so it must not hold the unit.
            whole.register_post_accumulate_grad_hook(partial(_pass_on, weakref.ref(self), i))
            self._hooked[i] = True

    def show_params(self) -> None:
        self.show(self.params)

    # -- parameters: gather, release -----------------------------------------------------------------------------

    def gather(self) -> None:
        """All-gather every rank's shard into `whole`, on the way cast to the compute dtype."""
        if not self.gathered:
            self.start_gather()
            self._end_gather()
            self.gathered = True

    def start_gather(self) -> None:
        """Like `gather`, but does not wait. `gather` does."""
        if self.gathered or self._gathering is not None:
            return
        storage = self.whole.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.size * self.whole.element_size())
        # `.data`: autograd must not take the same values, gathered again, for a change
        self._gathering = self.comm.all_gather(self.whole.data, self.shard.data.to(self.dtypes.compute), self.name)

    def _end_gather(self) -> None:
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            self._stuck = True
            gathering.wait()
            self._stuck = False

    def outdate(self) -> None:
        """What `whole` holds, or is just getting, is old."""
        self._end_gather()
        self.gathered = False

    def follow_master(self) -> None:
        """The master has new values."""
        self.outdate()
        if self.offload:
            self.shard.data.copy_(self.master.data)

    def mark_followed(self) -> None:
        """What changes the master from now on is another change."""
        # A backward through an older forward would mix old activations with new weights: autograd shall refuse it.
        increment_version(self.whole)
        self.version = self.master._version

    def release(self) -> None:
        """Give the memory of `whole` back. Its views stay, and have no memory either, until the next `gather`."""
        self.outdate()
        if not self._stuck:
            self.whole.untyped_storage().resize_(0)

    def cast(self) -> None:
        """Stage 0: bring `whole` up to date with the masters, where it is a copy of them."""
        if self.whole is not self.master:
            self.whole.data.copy_(self.master.data)
        self.gathered = True

    # -- gradients -----------------------------------------------------------------------------------------------

    def collect(self, i: int) -> None:
        """Take over the gradient that autograd has just completed for parameter `i`."""
        leaf = self.wholes[i]
        grad, leaf.grad = leaf.grad, None
        if grad.is_sparse:
            raise RuntimeError(f"{self.names[i]} has a sparse gradient; use Embedding(..., sparse=False)")
        if self.whole_grad is None:
            self.whole_grad = self._new_whole_grad()
            self.have = [False] * len(self.have)  # also where an override lost what no_sync kept back: nothing is there
        slot = self.layout.slots[i]
        view = self.whole_grad.as_strided(slot.shape, slot.stride, slot.offset)
        if self.have[i]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.have[i] = True
        self.arrived.add(i)

    def complete_grad(self) -> None:
        """Make `whole_grad` fit to travel: zeros where no gradient came, and the reduce dtype."""
        self.used, self.have = self.have, [False] * len(self.have)
        self.complete = True
        if self.whole_grad is None:
            self.whole_grad = self._new_whole_grad().zero_()
            return
        for start, stop in self.layout.gaps:
            self.whole_grad[start:stop].zero_()
        for slot, used in zip(self.layout.slots, self.used, strict=True):
            if not used:
                self.whole_grad[slot.offset : slot.end].zero_()
        self.whole_grad = self.whole_grad.to(self.dtypes.reduce)

    def _new_whole_grad(self) -> Tensor:
        """Uninitialised. In the memory of an earlier one if that was kept, and if no gradient lies in it any more."""
        kept, self.kept_memory = self.kept_memory, None
        if kept is not None:
            storage = kept.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) == 2:  # `kept` and `storage`
                return kept
        return torch.empty(self.layout.size, dtype=self.dtypes.reduce, device=self.whole.device)

    def release_grad(self) -> None:
        """Keep this rank's slice of the gradient and let the rest go, as soon as the reduction has read it."""
        self._slice_only = self.grad is not None
        if self._slice_only and self.whole_grad is not None:
            self._leaving, self.whole_grad = self.whole_grad, None
        if self.reduction is None:
            self._end_reduction()

    def advance_reduction(self) -> bool:
        """Wait for what is under way and start what follows it. Whether the reduction is over."""
        if self.reduction is not None:
            advance = getattr(self.reduction, "advance", self.reduction.wait)
            advance()
            if not getattr(self.reduction, "done", True):
                return False
            self.reduction = None
        self._end_reduction()
        return True

    def _end_reduction(self) -> None:
        if self.grad is not None and self.offload:
            self.grad = _on_host(self.grad)
        elif self._slice_only:
            self.grad = self.grad.clone()
            if self._leaving is not None and not self._lent:  # at once: a thread of gloo's may still hold it
                self._leaving.untyped_storage().resize_(0)
        self._leaving, self._slice_only, self._lent = None, False, False

    def show_grad(self, used: list[bool]) -> None:
        """Show the averaged gradient as `.grad` of the parameters that some rank used, added to what is there."""
        for i, (param, is_used) in enumerate(zip(self.params, used, strict=True)):
            if is_used:
                new = self._grad_of(i, self.grad)
                if param.grad is None:
                    param.grad = new
                elif param.grad.dtype == param.dtype:
                    param.grad += new
                else:  # a further micro-batch: from here on in full precision
                    param.grad = param.grad.to(param.dtype) + new
        self.grad = None

    def keep_back(self) -> None:
        """A backward under no_sync is over: show this rank's own gradient, so that zero_grad() can be noticed."""
        if self.whole_grad is None:
            return
        mine = self.whole_grad
        if self.master.numel() < self.layout.size:
            mine = self.layout.shard(mine, self.rank)
        mine = mine.to(self.master.device)
        for i, param in enumerate(self.params):
            if self.have[i]:
                is_own = param.grad is None
                if is_own:
                    param.grad = self._grad_of(i, mine)
                self.kept_back[i] = (param.grad, param.grad._version, is_own)

    def resume(self) -> None:
        """Another backward begins: keep on adding to what no_sync kept back, less what zero_grad() threw away."""
        if not self.kept_back:
            return
        for i, (shown, version, is_own) in self.kept_back.items():
            changed = shown._version != version
            if changed and shown.any():
                raise RuntimeError(
                    f"rank {self.comm.rank}: the gradient of {self.names[i]} was changed before it was reduced; "
                    "scale or clip gradients after a backward outside no_sync()"
                )
            if changed or self.params[i].grad is None:
                self.have[i] = False
            if is_own and self.params[i].grad is shown:
                self.params[i].grad = None
        self.kept_back = {}
        self._lent = any(self.have)
        if self._lent:
            self.whole_grad = self.whole_grad.to(torch.promote_types(self.whole_grad.dtype, torch.float32))
        else:
            self.whole_grad = None

    def drop_grads(self) -> None:
        """Forget what a backward that broke off has left."""
        self.whole_grad = self.grad = self.reduction = self._leaving = None
        self._lent = self.complete = False
        self.have = [False] * len(self.have)

    def end_backward(self, keep_ran: bool) -> None:
        """Ready for the next backward. `keep_ran`: the graph was kept, so the same forward may have another."""
        self.ready = False
        self.ran = self.ran and (keep_ran or len(self.calls) > 0)
        self.arrived.clear()
        self.used = [False] * len(self.used)

    def promote_grads(self) -> None:
        """Show gradients in the dtype of the masters, as optimizers want them."""
        for i, param in enumerate(self.params):
            if param.grad is not None and param.grad.dtype != param.dtype:
                self._promoted[i] = param.grad.dtype
                param.grad = param.grad.to(param.dtype)

    def demote_grads(self) -> None:
        """After the step: gradients that stay are kept in the reduce dtype again."""
        for i, dtype in self._promoted.items():
            if self.params[i].grad is not None:
                self.params[i].grad = self.params[i].grad.to(dtype)
        self._promoted = {}

    def _grad_of(self, i: int, flat: Tensor) -> Tensor:
        """The part of `flat` that lies where `params[i]` lies in `master`."""
        size, stride, offset = self._places[i]
        return flat.as_strided(size, stride, flat.storage_offset() + offset)


def _is_plain(module: nn.Module) -> bool:
    """Whether it has its parameters in one place; LSTM and its kin keep a second list of their weights."""
    return type(module).__setattr__ is nn.Module.__setattr__


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory; of a CUDA tensor in pinned pages, from and to which copies are quick."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _pass_on(reference: weakref.ref[Unit], i: int, leaf: nn.Parameter) -> None:
    unit = reference()
    if unit is not None:
        unit._on_gradient(unit, i, leaf)


def _refuse_gradient(name: str, grad: Tensor) -> None:
    raise RuntimeError(
        f"a gradient reached {name} outside of forward, where the model shows what the optimizer updates (in stages 1 "
        "to 3 this rank's slice). Use the parameter inside the model's forward, or register the method that uses it: "
        'zero.register_forward_method("name")'
    )
