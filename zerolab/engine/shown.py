"""What the model shows outside forward: parameters and gradients with which a script's habits are right, or refused.

Scripts write through `.data`, put hooks on parameters, call `nn.init`, clip with torch's own functions and scale losses
with torch's `GradScaler`. With a plain `nn.Parameter` for a rank's slice, each of these would give other numbers
without a word. So what the model shows is a subclass, as a DTensor is, which does what it can tell:

    p.data                   always the same alias, whose version counter shows every write
    p.register_hook(f)       f gets the averaged gradient once backward is over, as a post-accumulate hook does
    nn.init.normal_(p)       refused: each rank would draw its own numbers, and look at the shape of its slice
    copy.deepcopy(p)         a plain `nn.Parameter`
    p.device                 refused to torch's DistributedDataParallel, which would average slices
    p.grad                   this rank's slice like any tensor; but when torch's clipping asks for its norm, or
                             GradScaler whether it is finite, the answer is that of all ranks

During the optimizer's step they are plain, so there they cost nothing.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as clipping_types
from torch.utils.hooks import RemovableHandle

from zerolab.engine.clip import any_overflow, full_norms

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine

Hooks = dict[int, Callable[[Tensor], Any]]  # as torch keeps them: number of the handle -> hook


class _Settled:
    """Values that the ranks have agreed on. No rank may draw others by itself."""

    full_name: str  # of the parameter, in the model

    def _refuse_random(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.full_name} was to get random values after sharding: each rank would draw its own, in stages 1 to "
            "3 for the shape of its slice. Initialise the model before sharding it, or inside `with "
            "zero.full_parameters():`, where the first rank's values are kept"
        )

    normal_ = uniform_ = _refuse_random

    @property  # type: ignore[override]
    def shape(self) -> torch.Size:
        return self._size()

    def dim(self) -> int:
        return len(self._size())

    def ndimension(self) -> int:
        return len(self._size())

    def _size(self) -> torch.Size:
        """Before nn.init draws, it looks at the shape, and returns at once if there are no elements."""
        if _belongs_to("torch.nn.init", sys._getframe(2)):
            self._refuse_random()
        return self.size()  # type: ignore[attr-defined,no-any-return]


class _Alias(_Settled, Tensor):  # type: ignore[misc, override]
    """`p.data`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ShownParameter(_Settled, nn.Parameter):  # type: ignore[misc, override]
    """A parameter as the optimizer updates it: full in stage 0, else this rank's slice."""

    _alias: _Alias | None = None
    _mean: Tensor | None = None  # the averaged gradient, until the hooks have seen it

    def describe(self, full_name: str, aliases: list[Tensor]) -> None:
        """`aliases` collects what `.data` hands out."""
        self.full_name, self._aliases = full_name, aliases
        self._hooks: Hooks = OrderedDict()
        self._hooks_after: Hooks = OrderedDict()

    def belong(self, engine: Engine, original: nn.Parameter) -> None:
        """Stand for `original`. Its hooks move here, and their handles still remove them."""
        self._engine, self._is_slice = weakref.ref(engine), engine.stage > 0
        if original._backward_hooks is not None:
            self._hooks = original._backward_hooks
        if original._post_accumulate_grad_hooks is not None:
            self._hooks_after = original._post_accumulate_grad_hooks
        if self._hooks or self._hooks_after:
            engine.listeners[id(self)] = self

    # -- .data ---------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        if self._alias is None:
            self._alias = super().data.as_subclass(_Alias)
            self._alias.full_name = self.full_name
            self._aliases.append(self._alias)
        return self._alias

    @data.setter
    def data(self, value: Tensor) -> None:  # other memory is refused at the next forward
        nn.Parameter.data.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        if _belongs_to(DDP, sys._getframe(1)):
            raise RuntimeError(
                f"{self.full_name} is sharded, and zerolab averages its gradients: leave DistributedDataParallel out. "
                "For Hugging Face's Trainer, which adds it, take zerolab.integrations.transformers.ZeroTrainer"
            )
        return super().device

    def _refuse_product(self) -> None:
        if self._is_slice:  # k values of it, so a product with them is an error of shapes, or a wrong number
            raise RuntimeError(
                f"a matrix product with {self.full_name} outside its forward would take this rank's slice: write it "
                "inside `with zero.full_parameters():`, or load zero.full_state_dict() into a plain model, for which "
                "peft's merge_and_unload() works too"
            )

    def __matmul__(self, other: Any) -> Tensor:
        self._refuse_product()
        return super().__matmul__(other)

    def __rmatmul__(self, other: Any) -> Tensor:
        self._refuse_product()
        return super().__rmatmul__(other)  # type: ignore[no-any-return]

    # -- hooks ---------------------------------------------------------------------------------------------------

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

    def hold(self, mean: Tensor) -> None:
        """Keep an averaged gradient for the hooks, until `deliver`."""
        self._mean = mean if self._mean is None else self._mean + mean

    def deliver(self) -> None:
        """Backward is over: what was kept goes by the hooks."""
        mean, self._mean = self._mean, None
        if mean is None:
            return
        for hook in tuple(self._hooks.values()):
            other = hook(mean)
            if other is not None:
                if other.shape != mean.shape:
                    raise RuntimeError(
                        f"a hook on {self.full_name} returned a gradient of shape {tuple(other.shape)} where the model "
                        f"shows a slice of shape {tuple(mean.shape)}: write hooks that work element by element"
                    )
                mean = other.to(mean.dtype)
        _accumulate(self, mean)
        for hook in tuple(self._hooks_after.values()):
            hook(self)

    def drop(self) -> None:
        """Backward broke off."""
        self._mean = None

    def mark(self, grad: Any) -> None:
        """Let `grad`, of this parameter, answer for all ranks."""
        if self._is_slice or grad.dtype == torch.float16:
            grad.__class__ = ShownGrad
            grad.engine = self._engine

    # -- copies --------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(super().data.clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(super().data, self.requires_grad).__reduce_ex__(protocol)


def make_shown(tensor: Tensor, requires_grad: bool, full_name: str, aliases: list[Tensor]) -> nn.Parameter:
    """A parameter that shows `tensor`. A tensor that is a subclass itself (in a simulation) becomes a plain one."""
    param = ShownParameter(tensor, requires_grad)
    if type(param) is ShownParameter:
        param.describe(full_name, aliases)
    return param


def receive(param: nn.Parameter, mean: Tensor) -> None:
    """Show an averaged gradient, laid out as `param` is. Hooks see it first, when backward is over."""
    if type(param) is ShownParameter and (param._hooks or param._hooks_after):
        param.hold(mean)
    else:
        _accumulate(param, mean)


def _accumulate(param: nn.Parameter, mean: Tensor) -> None:
    if param.grad is None:
        show_grad(param, mean)
    elif param.grad.dtype == param.dtype:
        param.grad += mean
    else:  # a further micro-batch: from here on in full precision
        show_grad(param, param.grad.to(param.dtype) + mean)


def show_grad(param: nn.Parameter, grad: Tensor) -> None:
    """Let `param.grad` show `grad`."""
    if type(param) is ShownParameter:
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


class ShownGrad(Tensor):
    """A slice of a gradient. To torch's clipping and its GradScaler it answers for the slices of all ranks."""

    engine: weakref.ref[Engine]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch._foreach_norm, torch.linalg.vector_norm) and _belongs_to(CLIPPING, sys._getframe(1)):
                return full_norms(*args, **kwargs)
            result = func(*args, **kwargs)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                any_overflow(*args, **kwargs)
            elif func == _get_dtype and result == torch.float16 and _belongs_to(SCALING, sys._getframe(1)):
                raise ValueError(
                    "torch.amp.GradScaler cannot unscale gradients that wait for the step in float16; use "
                    "zerolab.LossScaler(zero)"
                )
            # What has the shape of a gradient still is one: of `p.grad = p.grad / 2` torch can clip the norm, too.
            # But `p -= lr * p.grad` gives back `p`, as in torch, and `out=` what was passed.
            given = any(result is arg for arg in (*args, *kwargs.values()))
            if isinstance(result, Tensor) and not isinstance(result, cls) and not given:
                shown = next((arg for arg in args if isinstance(arg, cls)), None)
                if shown is not None and shown.shape == result.shape:
                    result = result.as_subclass(cls)
                    result.engine = shown.engine
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self.as_subclass(Tensor).clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


CLIPPING, SCALING, DDP = "torch.nn.utils.clip_grad", "torch.amp.grad_scaler", "torch.nn.parallel.distributed"
_get_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]


def become_plain(params: list[nn.Parameter]) -> None:
    """An optimizer is about to step: torch is quicker with its own classes, also on subclasses that change nothing."""
    for param in params:
        if type(param) is ShownParameter:
            grad: Any = param.grad
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            if type(grad) is ShownGrad:
                grad.__class__ = Tensor  # type: ignore[assignment]


def become_shown(params: list[nn.Parameter]) -> None:
    """The step is over."""
    for param in params:
        if type(param) is nn.Parameter and hasattr(param, "full_name"):
            grad: Any = param.grad
            param.__class__ = ShownParameter
            if type(grad) is Tensor:
                if hasattr(grad, "engine"):
                    grad.__class__ = ShownGrad
                else:
                    show_grad(param, grad)


def explain_shapes(error: BaseException | None) -> None:
    """Forward has failed, perhaps because it saw a slice where it wanted a parameter."""
    if isinstance(error, RuntimeError) and re.search("shape|size|dimension", str(error)):
        note = (
            "zerolab: outside the forward of its own unit a parameter shows this rank's slice, of shape (k, 1, ...). "
            "If that is the shape above, use the parameter inside the module that owns it, or make one unit of both "
            "modules"
        )
        if note not in getattr(error, "__notes__", []):
            error.add_note(note)


def _belongs_to(module: str, frame: Any) -> bool:
    return frame.f_globals.get("__name__") == module


# torch's optimizers and its clipping take their quick path for these as well, as for DTensor.
optimizers_types.append(ShownParameter)
clipping_types.append(ShownGrad)  # type: ignore[arg-type]
