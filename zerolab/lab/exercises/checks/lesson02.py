"""Lesson 02: one flat buffer, and views into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.checks.values import check_tensor
from zerolab.lab.exercises.exercise import Exercise, World, Wrong

SHAPES = ((5,), (2, 2), (3, 2))  # 15 elements: no multiple of 2 or 4
EVEN = ((4, 3), (12,))  # 24 elements: a multiple of 1, 2, 3 and 4


def check_flat_buffer(answer: Any, world: World) -> None:
    N = world.world_size
    for shapes in (EVEN, SHAPES):
        _check(answer, N, shapes, torch.float32)
    _check(answer, N, SHAPES, torch.bfloat16)


def _check(answer: Any, N: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    params, first = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        params.append(nn.Parameter((torch.arange(numel) + 1.0 + first).view(shape).to(dtype)))
        first += numel
    numel, size = first, -(-first // N) * N
    with _nan_in_fresh_memory():
        result = answer.flat_buffer(params, N)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        likely = "the function returns nothing: `return` is missing" if result is None else "`return flat, views`"
        raise Wrong(f"the result is a {type(result).__name__}, not (flat, views)", likely)
    flat, views = result
    case = f"{numel} elements, N={N}"
    _check_flat(flat, size, numel, N, dtype, case)
    if len(views) != len(params):
        raise Wrong(f"{len(views)} views for {len(params)} parameters", "return one view for each parameter")
    shapes_found = [tuple(view.shape) for view in views]
    if shapes_found != list(shapes) and sorted(shapes_found) == sorted(shapes):
        likely = "the views are in a different order from the parameters"
        raise Wrong(f"the views have the shapes {shapes_found}", likely)
    offset = 0
    for i, (view, param) in enumerate(zip(views, params, strict=True)):
        what = f"view {i} ({case})"
        check_tensor(what, view, tuple(param.shape), dtype)
        if view.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            raise Wrong(
                f"{what} has memory of its own, {view.untyped_storage().nbytes()} bytes",
                "a copy, not a view: writing to it would not change the flat buffer; slice `flat` itself",
            )
        at = view.storage_offset() - flat.storage_offset()
        if at != offset:
            likely = "every view starts at the beginning" if at == 0 else "the offset must grow by numel()"
            raise Wrong(f"{what} starts at element {at}, not {offset}", f"wrong offset: {likely}")
        offset += param.numel()
    for i, (view, param) in enumerate(zip(views, params, strict=True)):
        if not torch.equal(view, param.detach()):
            at = tuple(torch.nonzero(view != param.detach())[0].tolist())
            seen = f"view {i} ({case}) has {view[at]:g} at {list(at)}, expected {param[at]:g}"
            raise Wrong(seen, _lost(view, param), values_differ=True)
    if not _is_zero(flat[numel:]):
        found = flat[numel].item()
        fresh = found != found  # NaN: never written
        likely = "torch.empty() leaves whatever was in memory" if fresh else "something was written past the end"
        raise Wrong(f"the padding ({case}) holds {found:g}, not 0", f"the padding is not zero: {likely}")


def _check_flat(flat: Any, size: int, numel: int, N: int, dtype: torch.dtype, case: str) -> None:
    what = f"flat ({case})"
    if not isinstance(flat, Tensor) or flat.dim() != 1:
        check_tensor(what, flat, (size,), dtype)
    if flat.numel() != size:
        likely = {
            numel: f"no padding: {numel} elements do not divide into {N} equal shards",
            numel + N - numel % N: "padding where none was needed: N - numel % N is N, not 0, when N divides numel",
            numel * N: "N times the parameters: make one buffer of all elements, not one per rank",
        }.get(flat.numel(), f"pad to the next multiple of {N}, and no further")
        raise Wrong(f"{what} has {flat.numel()} elements, not {size}", likely)
    check_tensor(what, flat, (size,), dtype)
    if flat.requires_grad:
        likely = "the parameters went in with their autograd graph: detach() them, or work under torch.no_grad()"
        raise Wrong(f"{what} requires a gradient", likely)
    held = flat.untyped_storage().nbytes()
    if held != size * dtype.itemsize:
        raise Wrong(f"{what} keeps {held} bytes, not {size * dtype.itemsize}", "flat is a slice of something larger")


def _lost(view: Tensor, param: Tensor) -> str:
    if view.isnan().any():
        return "values were not copied: this is uninitialised memory"
    if not view.any():
        return "values were not copied: the buffer is still zero"
    if torch.equal(view.flatten().sort().values, param.detach().flatten().sort().values):
        return "the elements are in a different order from the parameter's"
    return "another parameter's values are here: the copies overlap"


def _is_zero(tail: Tensor) -> bool:
    return not (tail != 0).any()  # NaN is not 0


class _nan_in_fresh_memory:
    """Makes torch.empty() return NaN, so that memory that was never written shows."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # this fills what torch.empty() returns

    def __exit__(self, *exception: object) -> None:
        torch.use_deterministic_algorithms(self.before)


FLAT_BUFFER_STUB = '''\
import torch
from torch import Tensor
from zerolab.lab.exercises import Todo


def flat_buffer(params: list[Tensor], world_size: int) -> tuple[Tensor, list[Tensor]]:
    """One flat buffer that holds all of `params`, and a view into it for each parameter.

    flat: (size,), all elements of the parameters in order, then zeros up to the next multiple of `world_size`.
        Same dtype and device as the parameters; needs no gradient.
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
            "is invalid for input of size": "a slice of the buffer is too short: is the size rounded up, not down?",
            "in-place operation": "a view was written to while autograd was recording: detach() the parameter",
        },
    ),
]
