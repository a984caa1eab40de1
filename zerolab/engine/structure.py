"""Is the model still the one that was sharded? A module or parameter that came later would train apart on each rank."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine


class Structure:
    """Looks at every module and parameter once, and again only after something has changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._params: list[nn.Parameter | None] = []

    def check(self) -> None:
        """Raise `RuntimeError` if parameters were added, replaced, moved or removed after sharding."""
        if self._unchanged():
            return
        if problem := self._problem():
            rank = self._engine.rank
            raise RuntimeError(f"rank {rank}: {problem} after sharding. Change the model before sharding it")
        self._modules = list(self._engine.model.modules())
        self._children = [dict(module._modules) for module in self._modules]
        self._params = self._held()

    def _unchanged(self) -> bool:
        """Nearly always true, and asked before each forward, so without a loop in Python."""
        if not self._modules or [module._modules for module in self._modules] != self._children:
            return False
        params = self._held()  # compared with `is`, for tensors do not compare as a whole
        return len(params) == len(self._params) and all(map(operator.is_, params, self._params))

    def _held(self) -> list[nn.Parameter | None]:
        return [param for module in self._modules for param in module._parameters.values()]

    def _problem(self) -> str | None:
        """What is wrong anywhere in the model. It may show the optimizer's parameters, or full ones."""
        allowed: dict[tuple[nn.Module, str], tuple[str, set[int]]] = {}
        for unit in self._engine.units:
            for name, sites, param, full in zip(unit.names, unit.sites, unit.params, unit.full_params, strict=True):
                allowed |= dict.fromkeys(sites, (name, {id(param), id(full)}))
        ours = {number: name for name, numbers in allowed.values() for number in numbers}
        found = set()
        for name, module, key, held in self._named():
            found.add((module, key))
            if id(held) not in ours:
                return f"{name} was added or replaced"
            if (module, key) not in allowed or id(held) not in allowed[module, key][1]:
                return f"{name} became what {ours[id(held)]} is"
        for site, (name, _) in allowed.items():
            if site not in found:
                return f"{name}, or a parameter that was tied to it, was removed"
        return None

    def _named(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        for path, module in self._engine.model.named_modules():
            for key, param in module._parameters.items():
                if param is not None:
                    yield f"{path}.{key}" if path else key, module, key, param
