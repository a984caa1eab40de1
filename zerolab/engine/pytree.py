"""Find and cast the tensors in whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator, Enum, type)
_NEVER_RESULTS = {bool, int, float, str, type(None)}  # quicker to check than whether it is a tensor
_EVERY_MODULE_S = frozenset(vars(nn.Module())) | {"_zerolab", "__reduce_ex__"}  # and what the engine adds


def grad_tensors(tree: Any, objects: bool = True) -> tuple[list[Tensor], bool]:
    """All tensors in `tree` that require a gradient, and whether something in it cannot be looked into.

    Looks into containers and dataclasses and, with `objects`, into the attributes of other objects.
    """
    found: dict[int, Tensor] = {}
    opaque = False
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            if value.requires_grad:
                found[id(value)] = value
        elif isinstance(value, _PLAIN) or id(value) in seen:
            continue
        else:
            seen.add(id(value))
            inside = _inside(value, objects)
            opaque = opaque or inside is None
            todo.extend(inside or ())
    return list(found.values()), opaque


def _inside(value: Any, objects: bool) -> list[Any] | None:
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if objects and hasattr(value, "__dict__"):
        return list(vars(value).values())
    return None


def kept_by_modules(modules: list[nn.Module], since: int) -> Iterator[Tensor]:
    """Results that `modules` keep as attributes or in containers, such as auxiliary losses, made `since` then."""
    for module in modules:
        for name, value in vars(module).items():
            kind = type(value)
            if name in _EVERY_MODULE_S or kind in _NEVER_RESULTS:
                continue
            if kind is not tuple or not _NEVER_RESULTS.issuperset(map(type, value)):  # most are shapes
                yield from made_since(since, value)


def made_since(since: int, tree: Any) -> Iterator[Tensor]:
    """The tensors in `tree` with an autograd node of at least that number."""
    for tensor in grad_tensors(tree, objects=False)[0]:
        if (made := tensor.grad_fn) and made._sequence_nr() >= since:
            yield tensor


def detached_from(storages: set[int], tree: Any) -> Any:
    """`tree` with copies of the tensors that lie in one of `storages` (their identities), or else `tree` itself."""

    def inside(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.untyped_storage()._cdata in storages

    if not any(inside(leaf) for leaf in tree_leaves(tree)):
        return tree
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if inside(tensor) else tensor, tree)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors in `tree` as `dtype`, everything else as it is."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
