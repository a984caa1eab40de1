"""Bucket: a unit's gradients on their way from autograd to the optimizer.

    collect(i)               backward: autograd has completed the gradient of parameter i; copy it into `full`
    complete_with_zeros()    the unit's turn to be reduced: fill what no gradient has filled
    the stage's reduce()     average `full` over the ranks, the mean goes to `grad`
    depart()                 the reduction is under way: let go of `full`
    advance()                wait for the reduction, step by step
    show(used)               the end of backward: the mean becomes `.grad` of the parameters
    promote(), demote()      around the optimizer's step: gradients in the dtype of the masters

Under no_sync a gradient stops after `collect`, and accumulation.py keeps it back until a backward outside.

    full     (N * S,) in the reduce dtype: this rank's own gradient, then whatever `reduce` makes of it
    grad     the mean, laid out as the masters are: (N * S,) in stage 0, (S,) in stages 1 to 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerolab.engine.parameters import Parameters
from zerolab.engine.shown import receive, show_cast


class Bucket:
    """The gradients of the parameters of `unit`."""

    def __init__(self, unit: Parameters) -> None:
        self.unit = unit
        # Tensors or None. Inside a stage's methods they are tensors, so Any saves these a check.
        self.full: Any = None
        self.complete = False  # `full` has everything that is to travel
        self.grad: Any = None
        self.reduction: Any = None  # under way: anything with `wait()`
        self.have = [False] * len(unit.names)  # the parameters for which `full` has a gradient
        self.used = [False] * len(unit.names)  # those for which it had one when it was reduced in this backward
        self.kept_memory: Tensor | None = None  # an earlier `full`, for the next one to reuse
        self._keep_slice = False  # once the reduction is over, only this rank's slice stays
        self._leaving: Tensor | None = None  # the `full` that goes then
        self.lent = False  # no_sync has shown parts of `full` to the user
        self._promoted: dict[nn.Parameter, torch.dtype] = {}  # the dtypes that `promote` changed

    def collect(self, i: int) -> None:
        """Take over the gradient that autograd has just completed for parameter `i`."""
        leaf = self.unit.full_params[i]
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError(f"{self.unit.names[i]} has a sparse gradient; use Embedding(..., sparse=False)")
        if self.full is None:
            self.full = self._new_full()
            self.have = [False] * len(self.have)  # even if an override lost what no_sync kept back
        slot = self.unit.layout.slots[i]
        view = self.full.as_strided(slot.shape, slot.stride, slot.offset)
        if self.have[i]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.have[i] = True

    def complete_with_zeros(self) -> None:
        """Make `full` fit to travel: zeros where no gradient came, and the reduce dtype."""
        self.used, self.have = self.have, [False] * len(self.have)
        self.complete = True
        if self.full is None:
            self.full = self._new_full().zero_()
            return
        for start, stop in self.unit.layout.gaps:
            self.full[start:stop].zero_()
        for slot, used in zip(self.unit.layout.slots, self.used, strict=True):
            if not used:
                self.full[slot.offset : slot.end].zero_()
        self.full = self.full.to(self.unit.dtypes.reduce)

    def _new_full(self) -> Tensor:
        """Uninitialised; in the memory of an earlier one, if that was kept and no gradient is left in it."""
        kept, self.kept_memory = self.kept_memory, None
        if kept is not None:
            storage = kept.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) == 2:  # `kept` and `storage`
                return kept
        return torch.empty(self.unit.layout.size, dtype=self.unit.dtypes.reduce, device=self.unit.full.device)

    def release(self) -> None:
        """Keep this rank's slice of the mean. The rest goes as soon as the reduction has read it."""
        self._keep_slice = self.grad is not None
        if self._keep_slice and self.full is not None:
            self._leaving, self.full = self.full, None
        if self.reduction is None:
            self._end_reduction()

    def depart(self, keep_memory: bool) -> None:
        """The reduction has begun. What it still needs of `full` is held by it, and by `grad`."""
        self.complete = False
        if keep_memory:
            self.kept_memory = self.full
        self.full = None

    def advance(self) -> bool:
        """Wait for the step of the reduction that is under way and start the next. Whether that was the last."""
        if self.reduction is not None:
            advance = getattr(self.reduction, "advance", self.reduction.wait)
            advance()
            if not getattr(self.reduction, "done", True):
                return False
            self.reduction = None
        self._end_reduction()
        return True

    def _end_reduction(self) -> None:
        if self.grad is not None and self.unit.offload:
            self.grad = on_host(self.grad, wait=False)
        elif self.grad is not None and self._keep_slice:
            self.grad = self.grad.clone()
            if self._leaving is not None and not self.lent:  # now, since a thread of gloo's may still hold it
                self._leaving.untyped_storage().resize_(0)
        self._leaving, self._keep_slice, self.lent = None, False, False

    def show(self, used: list[bool]) -> None:
        """Show the mean as `.grad` of the parameters that some rank used, added to what is there already."""
        mean, self.grad = self.grad, None
        if not any(used):  # frozen, say
            return
        if mean.is_pinned():  # it may still be on its way from the device
            torch.cuda.synchronize()
        for param, part, is_used in zip(self.unit.params, self.unit.parts(mean), used, strict=True):
            if is_used:
                receive(param, part)

    def end_backward(self) -> None:
        self.used = [False] * len(self.used)

    def drop(self) -> None:
        """Forget what an interrupted backward has left."""
        self.full = self.grad = self.reduction = self._leaving = None
        self.lent = self.complete = False
        self.have = [False] * len(self.have)

    def promote(self) -> None:
        """Show gradients in the dtype of the masters, as optimizers want them."""
        grads = [(param, grad) for param in self.unit.params if (grad := param.grad) is not None]
        low = {param: grad.dtype for param, grad in grads if grad.dtype != self.unit.dtypes.master}
        self._promoted |= low
        show_cast({param: param.dtype for param in low})

    def demote(self) -> None:
        """After the step: gradients that stay are kept in the reduce dtype again."""
        show_cast({param: dtype for param, dtype in self._promoted.items() if param.grad is not None})
        self._promoted = {}


def on_host(tensor: Tensor, wait: bool = True) -> Tensor:
    """A copy in the host's memory; of a CUDA tensor in pinned pages, which are quick to copy from and to."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=not wait)
