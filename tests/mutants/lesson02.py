"""Lesson 02: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson02 import FLAT_BUFFER

from .sources import edit

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

FLAT_BUFFER_MUTANTS = {
    "the parameters themselves": (
        edit(FLAT_BUFFER, "views.append(view)", "param.data = view\n        views.append(param)"),
        "the parameters went into the buffer themselves",
    ),
    "points the parameters at the buffer": (
        edit(FLAT_BUFFER, "views.append(view)", "param.data = view\n        views.append(view)"),
        "the parameters went into the buffer themselves",
    ),
    "pads every parameter": (
        edit(FLAT_BUFFER, "sum(param.numel()", f"sum({_EACH}", "offset += param.numel()", f"offset += {_EACH}"),
        "every parameter was padded by itself",
    ),
    "padding in front": (
        edit(FLAT_BUFFER, "views, offset = [], 0", "views, offset = [], size - numel"),
        "the padding is in front",
    ),
    "views cut before padding": (
        """\
import torch
from torch.nn import functional as F


def flat_buffer(params, world_size):
    flat = torch.cat([param.detach().flatten() for param in params])
    sizes = [param.numel() for param in params]
    views = [piece.view_as(param) for piece, param in zip(flat.split(sizes), params)]
    return F.pad(flat, (0, -len(flat) % world_size)), views
""",
        "views of an earlier buffer",
    ),
    "asks the process group": (
        edit(FLAT_BUFFER, "    numel =", "    world_size = torch.distributed.get_world_size()\n    numel ="),
        "use the argument world_size",
    ),
    "another device": (edit(FLAT_BUFFER, ", device=params[0].device", ""), "on the parameters' device"),
    "parameters as views": (
        edit(FLAT_BUFFER, "views.append(view)", "views.append(torch.nn.Parameter(view))"),
        "no nn.Parameter",
    ),
    "by way of float32": (edit(FLAT_BUFFER, "param.detach()", "param.detach().float()"), "went through float32"),
    "one buffer for all calls": (
        "kept = {}\n"
        + edit(
            FLAT_BUFFER,
            "    views, offset",
            "    flat = kept.setdefault((size, flat.dtype, flat.device), flat)\n    views, offset",
        ),
        "a buffer of its own",
    ),
    "a shape without dimensions taken apart": (
        edit(FLAT_BUFFER, ".view(param.shape)", ".view(*param.shape)"),
        "view(*param.shape) cannot",
    ),
    "the buffer a parameter": (
        edit(FLAT_BUFFER, "return flat, views", "return torch.nn.Parameter(flat), views"),
        "return a plain tensor",
    ),
    "the buffer a parameter from the start": (
        edit(FLAT_BUFFER, "    views, offset", "    flat = torch.nn.Parameter(flat)\n    views, offset"),
        "was written to requires a gradient",
    ),
    "rounded down": (edit(FLAT_BUFFER, "-(-numel // world_size)", "numel // world_size"), "rounded up, not down"),
    "in reverse": (edit(FLAT_BUFFER, "for param in params:", "for param in reversed(params):"), "in a different order"),
    "no padding": (
        edit(FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel"),
        "no padding",
    ),
    "padding where none is needed": (
        edit(
            FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel + world_size - numel % world_size"
        ),
        "padding where none was needed",
    ),
    "one buffer for each rank": (
        edit(FLAT_BUFFER, "-(-numel // world_size) * world_size  # rounded up", "numel * world_size"),
        "N times the parameters",
    ),
    "copies, not views": (edit(FLAT_BUFFER, "views.append(view)", "views.append(view.clone())"), "a copy, not a view"),
    "the parameters themselves as views": (
        edit(FLAT_BUFFER, "views.append(view)", "views.append(param.detach())"),
        "a copy, not a view",
    ),
    "values not copied": (edit(FLAT_BUFFER, "        view.copy_(param.detach())\n", ""), "values were not copied"),
    "padding not zero": (edit(FLAT_BUFFER, "torch.zeros", "torch.empty"), "the padding is not zero"),
    "flat views": (
        edit(FLAT_BUFFER, ".view(param.shape)", "", "copy_(param.detach())", "copy_(param.detach().flatten())"),
        "use view",
    ),
    "no offset": (edit(FLAT_BUFFER, "        offset += param.numel()\n", ""), "wrong offset"),
    "offset of one dimension": (
        edit(FLAT_BUFFER, "offset += param.numel()", "offset += param.shape[0]"),
        "wrong offset",
    ),
    "always float32": (edit(FLAT_BUFFER, "dtype=params[0].dtype, ", ""), "must keep the input's dtype"),
    "with the autograd graph": (
        edit(FLAT_BUFFER_CAT, "with torch.no_grad():", "with torch.enable_grad():"),
        "autograd graph",
    ),
    "returns nothing": (edit(FLAT_BUFFER, "    return flat, views\n", ""), "`return` is missing"),
    "the views first": (edit(FLAT_BUFFER, "return flat, views", "return views, flat"), "the buffer comes first"),
    "returns the buffer alone": (edit(FLAT_BUFFER, "return flat, views", "return flat"), "return flat, views"),
}

RIGHT = {
    "02.1": (FLAT_BUFFER_CAT, FLAT_BUFFER_STRIDED, FLAT_BUFFER_OF_TORCHS_PARTS, FLAT_BUFFER_FOREACH),
}

WRONG = {
    "02.1": FLAT_BUFFER_MUTANTS,
}
