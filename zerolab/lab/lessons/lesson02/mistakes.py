"""Lesson 02: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson02 import FLAT_BUFFER

FLAT_BUFFER_CAT = """\
import torch


def flat_buffer(params, world_size):
    with torch.no_grad():
        flat = torch.cat([param.reshape(-1) for param in params])
        padding = -len(flat) % world_size
        flat = torch.cat([flat, flat.new_zeros(padding)])
    pieces = flat.split([param.numel() for param in params] + [padding])
    return flat, [piece.view_as(param) for piece, param in zip(pieces, params)]
"""

FLAT_BUFFER_STRIDED = """\
import torch
import torch.nn.functional as F


def flat_buffer(params, world_size):
    ends = torch.tensor([param.numel() for param in params]).cumsum(0).tolist()
    size = ends[-1] + (world_size - ends[-1] % world_size) % world_size
    flat = torch.empty(size, dtype=params[0].dtype, device=params[0].device)
    flat[ends[-1] :] = 0
    views = []
    for end, param in zip(ends, params):
        view = flat.as_strided(param.shape, param.stride(), end - param.numel())
        view.copy_(param.data)
        views.append(view)
    return flat, views
"""

FLAT_BUFFER_OF_TORCHS_PARTS = """\
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector


def flat_buffer(params, world_size):
    vector = parameters_to_vector(params).detach()
    flat = F.pad(vector, (0, -len(vector) % world_size))
    sizes = [param.numel() for param in params]
    return flat, tuple(piece.view_as(param) for piece, param in zip(flat[: sum(sizes)].split(sizes), params))
"""

FLAT_BUFFER_FOREACH = """\
import torch


def flat_buffer(params, world_size):
    sizes = [param.numel() for param in params]
    flat = params[0].detach().new_zeros((sum(sizes) + world_size - 1) // world_size * world_size)
    views = [flat.narrow(0, sum(sizes[:i]), size).reshape(params[i].shape) for i, size in enumerate(sizes)]
    with torch.no_grad():
        torch._foreach_copy_(views, list(params))
    return flat, views
"""

_EACH = "(-(-param.numel() // world_size) * world_size)"

FLAT_BUFFER_MISTAKES = {
    "the parameters themselves": Mistake(
        edit(FLAT_BUFFER, "views.append(view)", "param.data = view\n        views.append(param)"),
        (
            "the parameters went into the buffer themselves (param.data = ...): leave them as they are, and "
            "return views of the buffer"
        ),
    ),
    "points the parameters at the buffer": Mistake(
        edit(FLAT_BUFFER, "views.append(view)", "param.data = view\n        views.append(view)"),
        (
            "the parameters went into the buffer themselves (param.data = ...): leave them as they are, and "
            "return views of the buffer"
        ),
    ),
    "pads every parameter": Mistake(
        edit(FLAT_BUFFER, "sum(param.numel()", f"sum({_EACH}", "offset += param.numel()", f"offset += {_EACH}"),
        "every parameter was padded by itself: lay them end to end, and pad once, at the end",
    ),
    "padding in front": Mistake(
        edit(FLAT_BUFFER, "views, offset = [], 0", "views, offset = [], size - numel"),
        "wrong offset: the padding is in front; it belongs at the end",
    ),
    "views cut before padding": Mistake(
        """\
import torch
from torch.nn import functional as F


def flat_buffer(params, world_size):
    flat = torch.cat([param.detach().flatten() for param in params])
    sizes = [param.numel() for param in params]
    views = [piece.view_as(param) for piece, param in zip(flat.split(sizes), params)]
    return F.pad(flat, (0, -len(flat) % world_size)), views
""",
        (
            "views of an earlier buffer: F.pad() and torch.cat() make new memory, so pad first, and cut the "
            "views out of the `flat` that you return"
        ),
    ),
    "asks the process group": Mistake(
        edit(FLAT_BUFFER, "    numel =", "    world_size = torch.distributed.get_world_size()\n    numel ="),
        "padded for the ranks that are running: use the argument world_size, not dist.get_world_size()",
    ),
    "another device": Mistake(
        edit(FLAT_BUFFER, ", device=params[0].device", ""),
        "the buffer belongs on the parameters' device: torch.zeros(..., device=params[0].device)",
    ),
    "parameters as views": Mistake(
        edit(FLAT_BUFFER, "views.append(view)", "views.append(torch.nn.Parameter(view))"),
        "a view is a plain tensor, which can be written to: no nn.Parameter, no autograd graph",
    ),
    "by way of float32": Mistake(
        edit(FLAT_BUFFER, "param.detach()", "param.detach().float()"),
        ("the values went through float32, which rounds them: the buffer must have the parameters' dtype throughout"),
    ),
    "one buffer for all calls": Mistake(
        "kept = {}\n"
        + edit(
            FLAT_BUFFER,
            "    views, offset",
            "    flat = kept.setdefault((size, flat.dtype, flat.device), flat)\n    views, offset",
        ),
        "a second call writes over the first one's buffer: every call needs a buffer of its own",
    ),
    "a shape without dimensions taken apart": Mistake(
        edit(FLAT_BUFFER, ".view(param.shape)", ".view(*param.shape)"),
        "a scalar parameter has the shape (): view(param.shape) can do that, view(*param.shape) cannot",
    ),
    "the buffer a parameter": Mistake(
        edit(FLAT_BUFFER, "return flat, views", "return torch.nn.Parameter(flat), views"),
        "return a plain tensor: no nn.Parameter, no requires_grad=True",
    ),
    "the buffer a parameter from the start": Mistake(
        edit(FLAT_BUFFER, "    views, offset", "    flat = torch.nn.Parameter(flat)\n    views, offset"),
        (
            "what was written to requires a gradient: the buffer must not (no nn.Parameter), and parameters are"
            " only to be read"
        ),
    ),
    "rounded down": Mistake(
        edit(FLAT_BUFFER, "-(-numel // world_size)", "numel // world_size"),
        "a slice of the buffer is too short: its size is the sum of all numel(), rounded up, not down",
    ),
    "padded by the remainder": Mistake(
        edit(FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel + numel % world_size"),
        "padded by the remainder, numel % N: what is missing to a multiple of N is -numel % N",
    ),
    "in reverse": Mistake(
        edit(FLAT_BUFFER, "for param in params:", "for param in reversed(params):"),
        "the views, or the parameters in the buffer, are in a different order from the parameters",
    ),
    "no padding": Mistake(
        edit(FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel"),
        "no padding: the elements do not divide into N equal shards; pad to the next multiple of N",
    ),
    "padding where none is needed": Mistake(
        edit(
            FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel + world_size - numel % world_size"
        ),
        "padding where none was needed: N - numel % N is N, not 0, when N divides numel",
    ),
    "one buffer for each rank": Mistake(
        edit(FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel * world_size"),
        "N times the parameters: make one buffer of all elements, not one per rank",
    ),
    "copies, not views": Mistake(
        edit(FLAT_BUFFER, "views.append(view)", "views.append(view.clone())"),
        "a copy, not a view: writing to it would not change the flat buffer; slice `flat` itself",
    ),
    "the parameters themselves as views": Mistake(
        edit(FLAT_BUFFER, "views.append(view)", "views.append(param.detach())"),
        "these are the parameters themselves, in memory of their own: cut the views out of `flat`",
    ),
    "values not copied": Mistake(
        edit(FLAT_BUFFER, "        view.copy_(param.detach())\n", ""),
        "values were not copied: the buffer is still zero",
    ),
    "padding not zero": Mistake(
        edit(FLAT_BUFFER, "torch.zeros", "torch.empty"),
        "the padding is not zero: torch.empty() leaves whatever was in memory",
    ),
    "flat views": Mistake(
        edit(FLAT_BUFFER, ".view(param.shape)", "", "copy_(param.detach())", "copy_(param.detach().flatten())"),
        "the right number of elements, but in the wrong shape: use view(param.shape)",
    ),
    "no offset": Mistake(
        edit(FLAT_BUFFER, "        offset += param.numel()\n", ""),
        "wrong offset: every view starts at the beginning",
    ),
    "offset of one dimension": Mistake(
        edit(FLAT_BUFFER, "offset += param.numel()", "offset += param.shape[0]"),
        "wrong offset: each view begins where the one before ends, so the offset must grow by numel()",
    ),
    "always float32": Mistake(
        edit(FLAT_BUFFER, "dtype=params[0].dtype, ", ""),
        "the result must keep the parameters' dtype: torch.zeros(..., dtype=params[0].dtype)",
    ),
    "with the autograd graph": Mistake(
        edit(FLAT_BUFFER_CAT, "with torch.no_grad():", "with torch.enable_grad():"),
        "the parameters went in with their autograd graph: detach() them, or work under torch.no_grad()",
    ),
    "returns nothing": Mistake(
        edit(FLAT_BUFFER, "    return flat, views\n", ""),
        "the function returns nothing: `return` is missing",
    ),
    "the views first": Mistake(
        edit(FLAT_BUFFER, "return flat, views", "return views, flat"),
        "the buffer comes first: `return flat, views`",
    ),
    "returns the buffer alone": Mistake(
        edit(FLAT_BUFFER, "return flat, views", "return flat"),
        "the views are missing: `return flat, views`",
    ),
}

RIGHT = {
    "02.1": (FLAT_BUFFER_CAT, FLAT_BUFFER_STRIDED, FLAT_BUFFER_OF_TORCHS_PARTS, FLAT_BUFFER_FOREACH),
}

MISTAKES = {
    "02.1": FLAT_BUFFER_MISTAKES,
}
