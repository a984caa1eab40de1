"""Find and cast the tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserList
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator, Enum, type)
_NEVER_RESULTS = {bool, int, float, str, type(None)}  # quicker to check than whether it is a tensor
_EVERY_MODULE_S = frozenset(vars(nn.Module())) | {"_zerolab", "__reduce_ex__"}  # and what the engine adds


def grad_tensors(tree: Any, objects: bool = True, frozen: bool = False) -> tuple[list[Tensor], bool]:
    """All tensors in `tree` that require a gradient, and whether something in it cannot be looked into.

    Looks into containers and dataclasses and, with `objects`, into the attributes of other objects. With `frozen`, also
    tensors that require no gradient.
    """
    found: dict[int, Tensor] = {}
    opaque = False
    seen: set[int] = set()
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            if value.requires_grad or frozen:
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


def detached_from(storages: set[int], tree: Any) -> tuple[Any, bool]:
    """`tree` with copies of the tensors that lie in one of `storages` (their identities), or else `tree` itself.

    Also whether one is left, in an object whose attributes cannot be exchanged.
    """

    def inside(leaf: Tensor) -> bool:
        return leaf.layout is torch.strided and leaf.untyped_storage()._cdata in storages

    def any_inside(tree: Any) -> bool:
        return any(map(inside, grad_tensors(tree, frozen=True)[0]))

    if not any_inside(tree):
        return tree, False
    tree = map_tensors(lambda tensor: tensor.clone() if inside(tensor) else tensor, tree)
    return tree, any_inside(tree)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating point tensors in `tree` as `dtype`, everything else as it is."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any, above: tuple[int, ...] = ()) -> Any:
    """`tree` with `change(tensor)` for each tensor in tuples, lists, dictionaries and dataclasses, which are copied.

    above: identities of what `tree` lies in, and may refer to.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if id(value) in above or not grad_tensors(value, objects=False, frozen=True)[0]:
            return value
        pairs: Any
        put: Any = operator.setitem
        if isinstance(value, MutableMapping):
            pairs = list(value.items())
        elif isinstance(value, list | UserList):
            pairs = list(enumerate(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            pairs, put = [(name, getattr(value, name)) for name in names], object.__setattr__
        else:
            return value
        new = copy.copy(value)
        for key, old in pairs:
            put(new, key, map_tensors(change, old, (*above, id(value))))
        return new

    return tree_map(leaf, tree)
