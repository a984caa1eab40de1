"""Is the model still the one that was sharded? A module or parameter that came later would train apart on each rank."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from zerolab.engine.engine import Engine


class Structure:
    """Looks at every module and parameter once, and again only where something has changed since."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[nn.Module, Snapshot] = {}  # for each module that is called from outside the model

    def check(self, module: nn.Module) -> None:
        """Raise `RuntimeError` if parameters in `module` were added, replaced, moved or removed after sharding."""
        seen = self._seen.get(module)
        if seen is None or not seen.is_current():
            if problem := self._problem():
                rank = self._engine.rank
                raise RuntimeError(f"rank {rank}: {problem} after sharding. Change the model before sharding it")
            self._seen[module] = Snapshot(module)

    def _problem(self) -> str | None:
        """What is wrong anywhere in the model. It may show the optimizer's parameters, or full ones."""
        allowed: dict[tuple[nn.Module, str], tuple[str, set[int]]] = {}
        for unit in self._engine.units:
            for name, sites, param, full in zip(unit.names, unit.sites, unit.params, unit.full_params, strict=True):
                allowed |= dict.fromkeys(sites, (name, {id(param), id(full)}))
        ours = {number: name for name, numbers in allowed.values() for number in numbers}
        found = set()
        for name, module, key, param in self._shown():
            found.add((module, key))
            if id(param) not in ours:
                return f"{name} was added or replaced"
            if (module, key) not in allowed or id(param) not in allowed[module, key][1]:
                return f"{name} became what {ours[id(param)]} is"
        for site, (name, _) in allowed.items():
            if site not in found:
                return f"{name}, or a parameter that was tied to it, was removed"
        return None

    def _shown(self) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        for path, module in self._engine.model.named_modules():
            for key, param in module._parameters.items():
                if param is not None:
                    yield f"{path}.{key}" if path else key, module, key, param


class Snapshot:
    """The modules and parameters inside `module`. Compared before each forward, so without a loop in Python."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._children = [dict(inner._modules) for inner in self._modules]
        self._params = self._parameters()

    def is_current(self) -> bool:
        if [inner._modules for inner in self._modules] != self._children:
            return False
        params = self._parameters()  # `is`, for tensors do not compare as a whole
        return len(params) == len(self._params) and all(map(operator.is_, params, self._params))

    def _parameters(self) -> list[nn.Parameter | None]:
        return [param for inner in self._modules for param in inner._parameters.values()]
