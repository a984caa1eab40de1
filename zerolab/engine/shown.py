"""What the model shows outside forward: parameters and gradients with which a script's habits are right, or refused.

Scripts write through `.data`, put hooks on parameters, call `nn.init`, clip with torch's own functions and scale losses
with torch's `GradScaler`. With a plain `nn.Parameter` for a rank's slice, each of these would give other numbers
without a word. So what the model shows is a subclass, as a DTensor is, which does what it can tell:

    p.data                   always the same alias, whose version counter shows every write
    p.register_hook(f)       f gets the averaged gradient once backward is over, as a post-accumulate hook does
    nn.init.normal_(p)       refused: each rank would draw its own numbers, and look at the shape of its slice
    copy.deepcopy(p)         in stage 0 a plain `nn.Parameter`, else a slice
    p.device                 refused to torch's DistributedDataParallel, which would average slices
    p.is_leaf                tells us of the optimizer that it is given to
    p, p.grad, p.data        in stages 1 to 3 slices, which follow the rule of slices.py

During the optimizer's step they are plain, so there they cost nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_types
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zerolab.engine.layout import Layout, Slot
from zerolab.engine.slices import Place, Settled, Sharded, Slice, marked, plainly, refuse_inputs, run

watch: Callable[[Any], None] | None = None  # step.py's
Hooks = dict[int, Callable[[Tensor], Any]]  # as torch keeps them: number of the handle -> hook


class _Alias(Settled, Tensor):  # type: ignore[misc, override]
    """`p.data` in stage 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ShownParameter(Settled, nn.Parameter):  # type: ignore[misc, override]
    """A parameter as the optimizer updates it: full in stage 0, else (as a `ShownSlice`) this rank's slice."""

    _alias: Tensor | None = None
    full_name: str  # in the model
    place: Place | None = None
    _aliases: list[Tensor]
    _hooks: Hooks
    _hooks_after: Hooks
    _mean: Tensor | None = None  # the averaged gradient, until the hooks have seen it

    def belong(self, engine: Sharded, original: nn.Parameter, layout: Layout, slot: Slot) -> None:
        """Stand for `original`. Its hooks move here, and their handles still remove them."""
        self._engine = weakref.ref(engine)
        if engine.stage > 0:
            self.place = Place(self._engine, self.full_name, layout, slot, engine.comm.shard_group.handle.group_name)
            self._place_of_grad = replace(self.place, of_grad=True)
            self.__class__ = ShownSlice
        if original._backward_hooks is not None:
            self._hooks = original._backward_hooks
        if original._post_accumulate_grad_hooks is not None:
            self._hooks_after = original._post_accumulate_grad_hooks
        if self._hooks or self._hooks_after:
            engine.listeners[id(self)] = self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return refuse_inputs(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        if self._alias is None:
            alias: Any = super().data
            if self.place is None:
                alias = alias.as_subclass(_Alias)
                alias.full_name = self.full_name
            self._alias = alias
            self._aliases.append(self._alias)
        return self._alias

    @data.setter
    def data(self, value: Tensor) -> None:  # other memory is refused at the next forward
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.parallel.distributed":
            raise RuntimeError(
                f"{self.full_name} is sharded, and zerolab averages its gradients: leave DistributedDataParallel out. "
                "For Hugging Face's Trainer, which adds it, take zerolab.integrations.transformers.ZeroTrainer"
            )
        return super().device

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """An optimizer asks it when it is given this parameter: from then on, step.py knows the optimizer."""
        frame = sys._getframe(1)
        if watch is not None and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            watch(frame.f_locals["self"])
        return super().is_leaf

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """`hook` gets the averaged gradient of what this parameter shows, once in every backward that reduces.

        What it returns, if anything, is used instead. It runs when backward has reduced everything.
        """
        return self._register(self._hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """`hook` gets this parameter, once its `.grad` is there, in every backward that reduces. It may step."""
        return self._register(self._hooks_after, hook)

    def _register(self, hooks: Hooks, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        engine = self._engine()
        if not self.requires_grad or engine is None:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        engine.listeners[id(self)] = self
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _refuse_node(self, other: Tensor) -> Any:
        """For hooks on the node of autograd that accumulates a gradient, it is asked for with `p.view_as(p)`."""
        if other is self:
            raise RuntimeError(
                f"autograd's node of {self.full_name} is not what a backward through the sharded model runs: hooks on "
                "it would never be called; use p.register_post_accumulate_grad_hook(f)"
            )
        return self.view(other.size())

    view_as = expand_as = _refuse_node

    # -- hooks see a gradient when backward is over ----------------------------------------------------------------

    def deliver(self) -> None:
        """Backward is over: what was kept goes by the hooks."""
        mean, self._mean = self._mean, None
        if mean is None:
            return
        self.mark(mean)
        for hook in tuple(self._hooks.values()):
            other = hook(mean)
            if other is not None:
                if other.shape != mean.shape:
                    raise RuntimeError(
                        f"a hook on {self.full_name} returned a gradient of shape {tuple(other.shape)} where the model "
                        f"shows a slice of shape {tuple(mean.shape)}: write hooks that work element by element"
                    )
                mean = other.to(mean.dtype)
        with plainly():
            _accumulate(self, mean)
        for hook in tuple(self._hooks_after.values()):
            hook(self)

    def drop(self) -> None:
        """Backward broke off."""
        self._mean = None

    def mark(self, grad: Tensor) -> None:
        """`grad` is the gradient of this parameter, or becomes it."""
        if self.place is not None:
            marked(grad, self._place_of_grad)

    # -- copies --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(super().data.clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(super().data, self.requires_grad).__reduce_ex__(protocol)


class ShownSlice(ShownParameter):
    """This rank's slice of a parameter, in stages 1 to 3."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A slice, and an `nn.Parameter` to those who ask."""
        with plainly():
            copy: Any = marked(self.detach().clone(), self.place)
            copy.requires_grad_(self.requires_grad)
        copy._is_param = True
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plainly():
            return super().__reduce_ex__(protocol)


class ReplacedParameter(nn.Parameter):
    """What a script took from the model before it was sharded: nobody updates it any more, and every use is refused."""

    full_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(one.full_name for one in tree_leaves((args, kwargs)) if type(one) is cls)
        raise RuntimeError(
            f"{name} was taken from the model before it was sharded, and the model no longer uses that tensor. Take it "
            f"from the model after sharding, as in model.parameters() or model.get_parameter({name!r})"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the {self.full_name} of before sharding>"


def replaced(original: nn.Parameter, full_name: str) -> None:
    """The model has another parameter in place of `original`, whose memory goes."""
    if type(original) is nn.Parameter:
        original.data = original.data.new_empty(0)
        original.full_name = full_name  # type: ignore[attr-defined]
        original.__class__ = ReplacedParameter  # type: ignore[assignment]


SHOWN = (ShownParameter, ShownSlice)  # `isinstance` asks nn.Parameter's metaclass, for each parameter in each step


def make_shown(tensor: Tensor, requires_grad: bool, full_name: str, aliases: list[Tensor]) -> nn.Parameter:
    """A parameter that shows `tensor`; `aliases` collects what its `.data` hands out.

    A tensor that is a subclass itself (in a simulation) becomes a plain one.
    """
    param = ShownParameter(tensor, requires_grad)
    if type(param) is ShownParameter:
        param.full_name, param._aliases = full_name, aliases
        param._hooks, param._hooks_after = OrderedDict(), OrderedDict()
    return param


def receive(param: Any, mean: Tensor) -> None:
    """Show an averaged gradient, laid out as `param` is. Hooks see it first, when backward is over."""
    if type(param) in SHOWN and (param._hooks or param._hooks_after):
        param._mean = mean if param._mean is None else param._mean + mean
    else:
        _accumulate(param, mean)


def _accumulate(param: nn.Parameter, mean: Tensor) -> None:
    if param.grad is None:
        show_grad(param, mean)
    elif param.grad.dtype == param.dtype:
        param.grad += mean
    else:  # a further micro-batch: from here on in full precision
        show_grad(param, param.grad.to(param.dtype) + mean)


def show_grad(param: Any, grad: Tensor) -> None:
    """Let `param.grad` show `grad`."""
    if type(param) in SHOWN:
        param.mark(grad)
    param.grad = grad


@torch.no_grad()
def show_cast(dtypes: dict[nn.Parameter, torch.dtype]) -> None:
    """Let the gradients of the parameters have these dtypes: one copy for them all, on a device one launch."""
    if dtypes:
        grads: list[Any] = [param.grad for param in dtypes]
        cast = [torch.empty_like(grad, dtype=dtype) for grad, dtype in zip(grads, dtypes.values(), strict=True)]
        torch._foreach_copy_(cast, grads)
        for param, grad in zip(dtypes, cast, strict=True):
            show_grad(param, grad)


def become_plain(params: list[nn.Parameter]) -> None:
    """An optimizer is about to step: torch is quicker with its own classes, also on subclasses that change nothing."""
    for param in params:
        if type(param) in SHOWN:
            grad: Any = param.grad
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            if type(grad) is Slice:
                grad.__class__ = Tensor  # type: ignore[assignment]


def become_shown(params: list[nn.Parameter]) -> None:
    """The step is over."""
    for param in params:
        if type(param) is nn.Parameter and hasattr(param, "full_name"):
            grad: Any = param.grad
            shown: Any = param
            param.__class__ = ShownSlice if getattr(param, "place", None) else ShownParameter
            if type(grad) is Tensor:
                shown.mark(grad)


# torch's optimizers and its clipping take their quick path for these as well, as for DTensor.
optimizers_types.extend(SHOWN)
clipping_types.append(Slice)
