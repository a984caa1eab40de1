"""What the model shows of a unit. Each parameter exists twice:

    full_params[i]    a leaf of autograd and a view of the unit's `full`: what forward and backward see
    params[i]         a view of its `master`: what the optimizer holds, and what the model shows the rest of the time

The modules hold the one or the other. Autograd leaves a gradient at the first, and it comes out at the second.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zerolab.comm.collectives import Comm
from zerolab.engine.layout import Layout
from zerolab.engine.precision import Dtypes
from zerolab.engine.shown import make_shown
from zerolab.engine.slices import plainly, refuse_gradient

Named = list[tuple[str, nn.Parameter]]
Site = tuple[nn.Module, str]  # a module and the name under which it holds a parameter
Sites = list[list[Site]]  # of each parameter: all places that hold it

_seals = itertools.count(2**30, 1024)  # versions that no tensor comes to by being written to
sealed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # such a version -> its unit


class Parameters:
    """Those of one unit."""

    layout: Layout
    full: Tensor
    master: Tensor
    full_params: list[nn.Parameter]
    params: list[nn.Parameter]

    def __init__(self, named: Named, sites: Sites, dtypes: Dtypes, comm: Comm, offload: bool) -> None:
        self.sites, self.dtypes, self.comm, self.offload = sites, dtypes, comm, offload
        self.names = [name for name, _ in named]
        self.trainable = any(p.requires_grad for _, p in named)  # as the ranks agreed
        self.depth = 0  # calls under way of modules that need this unit
        self._seal = next(_seals)
        self.unsealed: int | None = None  # the version of `full` while it is sealed
        sealed[self._seal] = self
        every = [(module, attribute, i) for i, group in enumerate(sites) for module, attribute in group]
        self._plain_sites = [site for site in every if _is_plain(site[0])]
        self._other_sites = [site for site in every if not _is_plain(site[0])]

    def adopt(self, tensors: list[Tensor], trainable: list[bool], on_gradient: Callable[[Any, int], None]) -> None:
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

    def show(self, tensors: list[nn.Parameter]) -> None:
        """Put `tensors` where the modules look for their parameters."""
        for module, attribute, i in self._plain_sites:
            module._parameters[attribute] = tensors[i]
        for module, attribute, i in self._other_sites:
            setattr(module, attribute, tensors[i])

    def show_full(self) -> None:
        """Forward begins: show the full parameters."""
        self.unseal()
        with plainly():
            for i, (full, param) in enumerate(zip(self.full_params, self.params, strict=True)):
                if full.requires_grad != param.requires_grad:
                    self._follow(i)
        self.show(self.full_params)

    def moved(self) -> str | None:
        """The name of a parameter that no longer lies in the memory of the masters."""
        with plainly():
            storage = self.master.untyped_storage()._cdata  # an identity, also for slices without elements
            for name, param in zip(self.names, self.params, strict=True):
                if param.untyped_storage()._cdata != storage:
                    return name
        return None

    def _follow(self, i: int) -> None:
        """Parameter `i` became trainable or frozen: so does its full parameter, whose gradients come here."""
        param, full = self.params[i], self.full_params[i]
        full.requires_grad_(param.requires_grad)
        if not self._hooked[i] and param.requires_grad:
            nn.Parameter.register_hook(param, partial(refuse_gradient, self.names[i]))
            # The garbage collector cannot see what a hook in C++ holds, so the hook must not hold the unit.
            full.register_post_accumulate_grad_hook(partial(_pass_on, weakref.ref(self), i))
            self._hooked[i] = True

    @property
    def changes(self) -> int:
        """Grows with every write into the masters, `.data` included."""
        return self.master._version + sum(alias._version for alias in self.aliases)

    def mark_followed(self) -> None:
        """Any later change of the master is a new one."""
        # A backward through an older forward would mix old activations with new weights: autograd will refuse it.
        if self.unsealed is None:
            increment_version(self.full)
        else:
            self.unsealed += 1
        self.version = self.changes

    @property
    def writes(self) -> int:
        """Grows with every write into `full`."""
        return self.full._version if self.unsealed is None else self.unsealed

    def seal(self) -> None:
        """Released: autograd refuses to read `full` in backward. It knows by the version: see `_explained`."""
        if self.unsealed is None:
            self.unsealed = self.full._version
            torch._C._autograd._unsafe_set_version_counter((self.full,), (self._seal,))

    def unseal(self) -> None:
        """Gathered for a forward, or for a backward that has come by a way that is known."""
        if self.unsealed is not None:
            torch._C._autograd._unsafe_set_version_counter((self.full,), (self.unsealed,))
            self.unsealed = None

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, a tensor laid out as `master` is, that belong to `params`."""
        start = flat.storage_offset()
        return [flat.as_strided(size, stride, start + offset) for size, stride, offset in self._places]


def _is_plain(module: nn.Module) -> bool:
    """Whether it keeps its parameters in one place. LSTM and its kin keep a second list of their weights."""
    return type(module).__setattr__ is nn.Module.__setattr__


def _pass_on(reference: weakref.ref[Parameters], i: int, leaf: Tensor) -> None:
    unit = reference()
    if unit is not None:
        unit._on_gradient(unit, i)
