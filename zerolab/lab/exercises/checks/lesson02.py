"""Lesson 02: one flat buffer, and views into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor
from zerolab.lab.exercises.exercise import Exercise, World, Wrong

SHAPES = ((5,), (2, 2), (), (1, 5, 1))  # 15 elements: no multiple of 2 or 4
EVEN = ((4, 3), (12,))  # 24 elements: a multiple of 1, 2, 3 and 4
FEW = ((2,), ())  # fewer elements than ranks
Shapes = tuple[tuple[int, ...], ...]


def check_flat_buffer(answer: Any, world: World) -> None:
    N = world.world_size
    _check(answer, N, EVEN)
    flat, views = _check(answer, N, SHAPES)
    before, inside = flat.clone(), [view.clone() for view in views]
    _check(answer, N, SHAPES, times=2.0)
    if not torch.equal(flat, before) or not all(map(torch.equal, views, inside)):
        raise Wrong("a second call changed the first one's buffer", "every call needs a buffer of its own")
    _check(answer, N, FEW)
    _check(answer, N + 4, SHAPES, running=N)  # as the lesson does it: a buffer for 5 ranks, on one
    _check(answer, N, SHAPES, torch.bfloat16)
    _check(answer, N, SHAPES, torch.float64)
    if N == 1:  # once is enough: torch.cat loads much of torch for it
        _check_device(answer, N)


OWN_ARGUMENT = "padded for the ranks that are running: use the argument world_size, not dist.get_world_size()"


def _params(shapes: Shapes, dtype: torch.dtype, times: float = 1.0) -> list[nn.Parameter]:
    """Small numbers, all different; in float64 such that float32 would round them. The first one is frozen."""
    params, first = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        data = times * (torch.arange(numel, dtype=torch.float64) + 1.0 + first)
        if dtype == torch.float64:
            data += 2.0**-40
        params.append(nn.Parameter(data.view(shape).to(dtype), requires_grad=first > 0))
        first += numel
    return params


def _check(
    answer: Any,
    N: int,
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    times: float = 1.0,
    running: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    params = _params(shapes, dtype, times)
    memory = [param.data_ptr() for param in params]
    numel = sum(param.numel() for param in params)
    size = -(-numel // N) * N
    with values.nan_in_fresh_memory():
        result = answer.flat_buffer(params, N)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        likely = "the function returns nothing: `return` is missing" if result is None else "`return flat, views`"
        raise Wrong(f"the result is a {type(result).__name__}, not (flat, views)", likely)
    flat, views = result
    if isinstance(views, Tensor) and isinstance(flat, (tuple, list)):
        raise Wrong("the result is (views, flat)", "the buffer comes first: `return flat, views`")
    case = f"{numel} elements, N={N}" + f", {str(dtype).removeprefix('torch.')}" * (dtype != torch.float32)
    _check_flat(flat, size, params, N, dtype, case, running)
    if not isinstance(views, (tuple, list)):
        raise Wrong(f"the views are a {type(views).__name__}, not a list", "return one view for each parameter")
    if len(views) != len(params):
        likely = "return one view for each parameter"
        raise Wrong(f"{values.counted(len(views), 'view')} for {values.counted(len(params), 'parameter')}", likely)
    shapes_found = [tuple(view.shape) for view in views]
    if shapes_found != list(shapes) and sorted(shapes_found) == sorted(shapes):
        likely = "the views are in a different order from the parameters"
        raise Wrong(f"the views have the shapes {shapes_found}", likely)
    if (which := next((i for i, param in enumerate(params) if param.data_ptr() != memory[i]), None)) is not None:
        likely = "the parameters went into the buffer themselves (param.data = ...): leave them, and return views of it"
        raise Wrong(f"parameter {which} ({case}) has other memory than before", likely)
    _check_views(flat, list(views), params, case)
    if not _is_zero(flat[numel:]):
        found = flat[numel].item()
        fresh = found != found  # NaN: never written
        likely = "torch.empty() leaves whatever was in memory" if fresh else "something was written past the end"
        raise Wrong(f"the padding ({case}) holds {found:g}, not 0", f"the padding is not zero: {likely}")
    for i, (param, before) in enumerate(zip(params, _params(shapes, dtype, times), strict=True)):
        if not torch.equal(param, before) or param.requires_grad != before.requires_grad:
            what = "requires_grad" if torch.equal(param, before) else "its values"
            likely = "the parameters are to be copied: leave them as they are"
            raise Wrong(f"parameter {i} ({case}) has changed: {what}", likely)
    return flat, list(views)


def _check_views(flat: Tensor, views: list[Tensor], params: list[nn.Parameter], case: str) -> None:
    storages = [view.untyped_storage().data_ptr() for view in views if isinstance(view, Tensor)]
    ours = flat.untyped_storage().data_ptr()
    starts = [int(view.storage_offset() - flat.storage_offset()) for view in views if isinstance(view, Tensor)]
    ends = [sum(param.numel() for param in params[: i + 1]) for i in range(len(params))]
    for i, (view, param) in enumerate(zip(views, params, strict=True)):
        what = f"view {i} ({case})"
        check_tensor(what, view, tuple(param.shape), param.dtype)
        if storages[i] != ours:
            held = values.counted(view.untyped_storage().nbytes(), "byte")
            likely = "a copy, not a view: writing to it would not change the flat buffer; slice `flat` itself"
            if len(views) > 1 and len(set(storages)) == 1:
                likely = (
                    "views of an earlier buffer: F.pad() and torch.cat() make new memory, so pad first, and cut the "
                    "views out of the `flat` that you return"
                )
            raise Wrong(f"{what} has memory of its own, {held}", likely)
        if view.requires_grad:
            likely = "a view is a plain tensor, which can be written to: no nn.Parameter, no autograd graph"
            raise Wrong(f"{what} requires a gradient", likely)
        if (at := starts[i]) != (offset := ends[i] - param.numel()):
            raise Wrong(f"{what} starts at element {at}, not {offset}", _why_there(starts, params, len(flat)))
        if not view.is_contiguous():
            likely = "its elements are not side by side: flat[offset : offset + numel].view(shape)"
            raise Wrong(f"{what} has the strides {view.stride()}", likely)
    for i, (view, param) in enumerate(zip(views, params, strict=True)):
        if not torch.equal(view, param.detach()):
            first = tuple(torch.nonzero(view != param.detach())[0].tolist())
            digits = ".17g" if view.dtype == torch.float64 else "g"
            place = f" at {list(first)}" if first else ""
            seen = f"view {i} ({case}) has {view[first]:{digits}}{place}, expected {param[first]:{digits}}"
            raise Wrong(seen, _lost(view, param), values_differ=True)


def _why_there(starts: list[int], params: list[nn.Parameter], size: int) -> str:
    """Why the views start at `starts`."""
    numels = [param.numel() for param in params]
    rights = [sum(numels[:i]) for i in range(len(numels))]
    padding = size - sum(numels)
    if starts == [right + padding for right in rights]:
        return "wrong offset: the padding is in front; it belongs at the end"
    if not any(starts):
        return "wrong offset: every view starts at the beginning"
    if starts == [sum(numels[i + 1 :]) for i in range(len(numels))]:
        return "wrong offset: the parameters lie in reverse order"
    gaps = [b - a - numel for a, b, numel in zip(starts, starts[1:], numels, strict=False)]
    if all(gap >= 0 for gap in gaps) and sum(gaps) <= padding:
        return "wrong offset: there is padding between the parameters; pad once, at the end"
    return "wrong offset: the offset must grow by numel()"


def _check_flat(
    flat: Any, size: int, params: list[nn.Parameter], N: int, dtype: torch.dtype, case: str, running: int
) -> None:
    what, numel = f"flat ({case})", sum(param.numel() for param in params)
    if not isinstance(flat, Tensor) or flat.dim() != 1:
        check_tensor(what, flat, (size,), dtype)
    if flat.numel() != size:
        each = sum(-(-param.numel() // N) * N for param in params)
        likely = {
            -(-numel // (running or N)) * (running or N): OWN_ARGUMENT,
            numel: f"no padding: {numel} elements do not divide into {N} equal shards",
            numel + N - numel % N: "padding where none was needed: N - numel % N is N, not 0, when N divides numel",
            each: "every parameter was padded by itself: lay them end to end, and pad once, at the end",
            numel * N: "N times the parameters: make one buffer of all elements, not one per rank",
        }.get(flat.numel(), f"pad to the next multiple of {N}, and no further")
        raise Wrong(f"{what} has {values.counted(flat.numel(), 'element')}, not {size}", likely)
    check_tensor(what, flat, (size,), dtype)
    if flat.requires_grad:
        likely = "the parameters went in with their autograd graph: detach() them, or work under torch.no_grad()"
        if flat.is_leaf:
            likely = "return a plain tensor: no nn.Parameter, no requires_grad=True"
        raise Wrong(f"{what} requires a gradient", likely)
    held = flat.untyped_storage().nbytes()
    if held != size * dtype.itemsize:
        raise Wrong(f"{what} keeps {held} bytes, not {size * dtype.itemsize}", "flat is a slice of something larger")


def _check_device(answer: Any, N: int) -> None:
    """The meta device stands for a GPU: tensors there have no memory, and do not mix with the CPU's."""
    params = [nn.Parameter(param.to("meta")) for param in _params(SHAPES, torch.float32)]
    try:
        flat, _ = answer.flat_buffer(params, N)
        found = str(flat.device)
    except (NotImplementedError, RuntimeError) as error:
        found = f"another ({str(error).splitlines()[0]})"
    if found != "meta":
        likely = "the buffer belongs on the parameters' device: torch.zeros(..., device=params[0].device)"
        raise Wrong(f"the parameters are on the device 'meta' (in place of a GPU), and flat is on {found}", likely)


def _lost(view: Tensor, param: Tensor) -> str:
    if view.isnan().any():
        return "values were not copied: this is uninitialised memory"
    if not view.any():
        return "values were not copied: the buffer is still zero"
    if torch.equal(view.float(), param.detach().float()):
        return (
            "the values went through float32, which rounds them: the buffer must have the parameters' dtype throughout"
        )
    if torch.equal(view.flatten().sort().values, param.detach().flatten().sort().values):
        return "the elements are in a different order from the parameter's"
    return "another parameter's values are here: the copies overlap"


def _is_zero(tail: Tensor) -> bool:
    return not (tail != 0).any()  # NaN is not 0


FLAT_BUFFER_STUB = '''\
import torch
from torch import Tensor
from zerolab.lab.exercises import Todo


def flat_buffer(params: list[Tensor], world_size: int) -> tuple[Tensor, list[Tensor]]:
    """One flat buffer that holds all of `params`, and a view into it for each parameter.

    flat: (size,), all elements of the parameters in order, then zeros up to the next
        multiple of `world_size`. Same dtype and device as the parameters.
        It needs no gradient.
    views: one for each parameter, in its shape and in the memory of `flat`.
    """
    raise Todo("02.1")
'''

FLAT_BUFFER = """\
import torch
from torch import Tensor


def flat_buffer(params: list[Tensor], world_size: int) -> tuple[Tensor, list[Tensor]]:
    numel = sum(param.numel() for param in params)
    size = -(-numel // world_size) * world_size  # rounded up
    flat = torch.zeros(size, dtype=params[0].dtype, device=params[0].device)
    views, offset = [], 0
    for param in params:
        view = flat[offset : offset + param.numel()].view(param.shape)
        view.copy_(param.detach())
        views.append(view)
        offset += param.numel()
    return flat, views
"""


EXERCISES = [
    Exercise(
        id="02.1",
        title="a flat buffer with views",
        difficulty=1,
        section="Flat storage",
        check=check_flat_buffer,
        stub=FLAT_BUFFER_STUB,
        reference=FLAT_BUFFER,
        hints=(
            "A slice of a tensor and .view() share its memory; .clone(), torch.cat() and indexing with a list make "
            "new memory.",
            "numel rounded up to a multiple of N is -(-numel // N) * N. With torch.zeros the padding is zero from the "
            "start.",
            "For each parameter: view = flat[offset : offset + p.numel()].view(p.shape); view.copy_(p.detach()); "
            "offset += p.numel().",
        ),
        exports=("flat_buffer",),
        errors={
            "is invalid for input of size": (
                "a slice of the buffer is too short: is its size the sum of all numel(), rounded up, not down?"
            ),
            "got ()": "a scalar parameter has the shape (): view(param.shape) can do that, view(*param.shape) cannot",
            "tuple index out of range": "a scalar parameter has the shape (): numel() counts its elements",
            "a view of a leaf Variable": (
                "what was written to requires a gradient: the buffer must not (no nn.Parameter, no "
                "requires_grad=True), and parameters are only to be read"
            ),
            "in-place operation": "a view was written to while autograd was recording: detach() the parameter",
        },
    ),
]
