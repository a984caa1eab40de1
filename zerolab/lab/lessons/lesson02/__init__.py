"""Lesson 02: one flat buffer, and views into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

Shapes = tuple[tuple[int, ...], ...]
SHAPES = ((5,), (2, 2), (), (1, 5, 1))  # 15 elements: no multiple of 2 or 4
EVEN = ((4, 3), (12,))  # 24 elements: a multiple of 1, 2, 3 and 4
FEW = ((2,), ())  # fewer elements than ranks


def parameters(shapes: Shapes, dtype: torch.dtype, times: float = 1.0) -> list[nn.Parameter]:
    """Small numbers, all different; in float64 such that float32 would round them. The first one is frozen."""
    params, first = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        data = times * (torch.arange(numel, dtype=torch.float64) + 1.0 + first)
        if dtype == torch.float64:
            data += 2.0**-30
        params.append(nn.Parameter(data.view(shape).to(dtype), requires_grad=first > 0))
        first += numel
    return params


def make_flat(
    play: Play,
    shapes: Shapes,
    ranks: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    times: float = 1.0,
) -> None:
    N = ranks or play.size
    made = parameters(shapes, dtype, times)
    params = [nn.Parameter(one.detach().to(device), one.requires_grad) for one in made]
    play.keep("the list of parameters", params)
    memory = [param.data_ptr() for param in params]
    case = f"{sum(param.numel() for param in params)} elements, N={N}, {str(dtype).removeprefix('torch.')}, {device}"
    result = play.call(f"flat_buffer() of {case}", play.code.flat_buffer, params, N, uses=())
    play.see("each parameter is in the memory it was in", [param.data_ptr() for param in params] == memory)
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[0], Tensor):
        return
    flat, views = result
    play.keep("what an earlier call returned", result)
    play.at_most("bytes that `flat` keeps alive", flat.untyped_storage().nbytes())
    look_at_views(play, flat, views)
    play.clue("elements", flat.numel())
    shown = (
        {view.data_ptr() for view in views if isinstance(view, Tensor)} if isinstance(views, (tuple, list)) else set()
    )
    play.clue("views that show the parameters", len(shown & set(memory)))


def look_at_views(play: Play, flat: Tensor, views: Any) -> None:
    """Each in the memory of `flat`, one behind the other, its elements side by side."""
    if not isinstance(views, (tuple, list)) or not all(isinstance(view, Tensor) for view in views):
        return
    ours, where = flat.untyped_storage().data_ptr(), []
    for i, view in enumerate(views):
        inside = view.is_meta or view.untyped_storage().data_ptr() == ours
        where.append(int(view.storage_offset() - flat.storage_offset()) if inside else -1)
        play.see(f"view {i} lies in the memory of `flat`", inside)
    play.clue("as many memories", len({view.untyped_storage().data_ptr() for view in views if not view.is_meta}))
    for i, place in enumerate(where):
        play.see(f"the first element of `flat` that view {i} shows", place)
    play.see("the elements of each view are side by side", all(view.is_contiguous() for view in views))


def twice(play: Play) -> None:
    make_flat(play, SHAPES)
    make_flat(play, SHAPES, times=2.0)


BATTERY = (
    Scene("with no padding needed", lambda play: make_flat(play, EVEN)),
    Scene("", lambda play: make_flat(play, SHAPES)),
    Scene("in a second call", twice, "every call needs a buffer of its own"),
    Scene("with fewer elements than ranks", lambda play: make_flat(play, FEW)),
    Scene(
        "for other ranks than are running",  # as the lesson does it: a buffer for 5 ranks, on one
        lambda play: make_flat(play, SHAPES, play.size + 4),
        "padded to a multiple of another number: it is the argument world_size, and not always the ranks that run",
    ),
    Scene("in bfloat16", lambda play: make_flat(play, SHAPES, dtype=torch.bfloat16), "keep the parameters' dtype"),
    Scene("in float64", lambda play: make_flat(play, SHAPES, dtype=torch.float64), "keep the parameters' dtype"),
    Scene(
        "on the device 'meta', in place of a GPU",  # tensors there have no memory, and do not mix with the CPU's
        lambda play: make_flat(play, SHAPES, device="meta"),
        "the buffer belongs on the parameters' device: torch.zeros(..., device=params[0].device)",
        sizes=(1,),  # once is enough: torch.cat loads much of torch for it
    ),
)


FLAT_BUFFER_STUB = '''\
import torch
from torch import Tensor
from zerolab.lab.exercises import Todo


def flat_buffer(params: list[Tensor], world_size: int) -> tuple[Tensor, list[Tensor]]:
    """One flat buffer that holds all of `params`, and a view into it for each parameter.

    flat: (size,), all elements of the parameters in order, then as few zeros as make size
        a multiple of `world_size`. Same dtype and device as the parameters. It does not
        require a gradient.
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
        battery=BATTERY,
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
    ),
]
