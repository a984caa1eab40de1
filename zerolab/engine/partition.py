"""From a model to units: which parameters form one. Modules and dtypes decide, before anything is sharded.

Afterwards the model must stay as it is: a module or parameter that came later would train apart on each rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerolab.comm.collectives import Comm
from zerolab.comm.waiting import CommError
from zerolab.engine.parameters import Site
from zerolab.engine.step import is_owned
from zerolab.engine.unit import Unit

UnitClasses = Iterable[type[nn.Module]] | type[nn.Module] | None
Init = Callable[[nn.Module], Any] | None

UNIT_BYTES = 25_000_000  # a default unit, where no blocks repeat: the largest modules of at most this size
SMALL_BYTES = 1_000_000  # modules smaller than this are not worth a unit and stay in the root


@dataclass
class Part:
    """What becomes one unit: parameters of one module, one dtype, all trainable or all frozen.

    Batch norms' parameters form parts of their own: beside float32 buffers, kernels want them in float32 for any input.
    """

    name: str
    module: nn.Module
    dtype: torch.dtype
    trainable: bool
    batch_norm: bool
    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    sites: list[list[Site]] = field(default_factory=list)


def agree_on_parts(model: nn.Module, units: UnitClasses, comm: Comm, has_init: bool, settings: list[str]) -> list[Part]:
    """The parts of `model`, the root's first, the same on every rank.

    Raises `ValueError` on every rank if some rank cannot shard its model, and `CommError` if some rank has a model or
    `settings` other than the first rank's.
    """
    parts, problem = [], None
    try:
        parts = _partition(model, units, comm, has_init)
    except ValueError as error:  # all ranks hear of it, so that none waits for this one
        problem = str(error)
    described = {
        name: [list(p.shape), list(p.stride()), str(p.dtype), p.requires_grad, part.name]
        for part in parts
        for name, p in part.named
    }
    everyone = comm.exchange([problem, settings, described], "comparison of the models")
    for rank, (problem, _, _) in enumerate(everyone):
        if problem:
            raise ValueError(f"rank {rank}: {problem}")
    _, settings0, described0 = everyone[0]
    for rank, (_, settings, described) in enumerate(everyone):
        if settings != settings0:
            raise CommError(f"rank {rank} builds {settings} where rank 0 builds {settings0}")
        if one_sided := described.keys() ^ described0.keys():
            name = min(one_sided)
            has, lacks = (0, rank) if name in described0 else (rank, 0)
            raise CommError(f"rank {has} has the parameter {name}, rank {lacks} does not; {_ALIKE}")
        for i, what in enumerate(("shape", "strides", "dtype", "requires_grad", "unit")):
            for name, facts in described.items():
                if facts[i] != described0[name][i]:
                    theirs = f"{what} {facts[i]} where rank 0 has {described0[name][i]}"
                    raise CommError(f"rank {rank}: {name} has {theirs}; {_ALIKE}")
        if list(described) != list(described0):
            raise CommError(f"rank {rank} has its parameters in another order than rank 0; {_ALIKE}")
    return parts


_ALIKE = "build the same model on every rank"


def _partition(model: nn.Module, units: UnitClasses, comm: Comm, has_init: bool) -> list[Part]:
    """The parts of `model`, the root's first. Raises `ValueError` if it cannot be sharded as it is."""
    sites: dict[int, list[Site]] = {}
    named: dict[int, tuple[str, nn.Parameter]] = {}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    modules = _unit_modules(model, units)
    at = dict(model.named_modules(remove_duplicate=False))  # a module may have several paths
    units_by_id = {id(module): name for name, module in modules}
    for path, module in at.items():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ValueError(
                f"{path or 'the model'} is a torch.jit.ScriptModule, which computes with its own parameters "
                "whatever the model shows; shard the model without torch.jit, and take torch.compile for speed"
            )
        for key, param in module._parameters.items():
            if param is None:
                continue
            named.setdefault(id(param), (f"{path}.{key}" if path else key, param))
            if (module, key) not in sites.setdefault(id(param), []):
                sites[id(param)].append((module, key))
            nearest = path  # the unit that the module is in
            while id(at[nearest]) not in units_by_id:
                nearest = nearest.rpartition(".")[0]
            owner = units_by_id[id(at[nearest])], at[nearest]
            if owner not in owners.setdefault(id(param), []):
                owners[id(param)].append(owner)
    on_meta = [name for name, tensor in [*named.values(), *model.named_buffers()] if tensor.is_meta]
    if on_meta and not has_init:
        raise ValueError(
            f"{on_meta[0]} is on the meta device; pass init=, say init=lambda module: module.reset_parameters()"
        )
    _check(list(named.values()), comm)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"the buffer {name} is sparse, and cannot be sent to the other ranks as it is; register its "
                "to_dense(), or make it a plain attribute, alike on all ranks"
            )

    order = {name: number for number, (name, _) in enumerate(modules)}
    parts: dict[tuple[int, torch.dtype, bool, bool], Part] = {}
    for key, (name, param) in named.items():
        # A parameter tied across units goes to the root, which is gathered whenever any unit is used.
        owner_name, module = owners[key][0] if len(owners[key]) == 1 else ("", model)
        batch_norm = isinstance(sites[key][0][0], nn.modules.batchnorm._NormBase)
        what = (order[owner_name], param.dtype, param.requires_grad, batch_norm)
        if what not in parts:
            parts[what] = Part(owner_name or "root", module, *what[1:])
        parts[what].named.append((name, param))
        parts[what].sites.append(sites[key])
    result = [parts[key] for key in sorted(parts, key=lambda k: k[0])]
    _tell_apart(result)
    return result


def modules_within(module: nn.Module, unit_modules: set[int]) -> Iterator[nn.Module]:
    """`module` and the modules inside it, without those that are units of their own and what is in them."""
    yield module
    for child in module.children():
        if id(child) not in unit_modules:
            yield from modules_within(child, unit_modules)


def units_needed(modules: list[nn.Module], unit_of: dict[int, Unit]) -> list[Unit]:
    """The units that hold parameters of `modules`: several if dtypes differ or weights are tied."""
    params = [param for module in modules for param in module._parameters.values() if param is not None]
    return list({id(unit_of[id(param)]): unit_of[id(param)] for param in params}.values())


def _unit_modules(model: nn.Module, units: UnitClasses) -> list[tuple[str, nn.Module]]:
    """Path and module of every unit, the root's first."""
    if units is None:
        classes = _repeated_blocks(model)
        found = [(n, m) for n, m in model.named_modules() if type(m) in classes] if classes else _by_size(model)
    else:
        wanted = (units,) if isinstance(units, type) else tuple(units)
        for cls in wanted:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise ValueError(f"units: expected module classes, not {cls!r}")
            if not any(isinstance(m, cls) for m in model.modules()):
                names = sorted({type(m).__name__ for m in model.modules()})
                raise ValueError(
                    f"units: {type(model).__name__} contains no {cls.__name__}; it is made of {', '.join(names)}"
                )
        found = [(n, m) for n, m in model.named_modules() if isinstance(m, wanted)]
    # A MultiheadAttention reads its projections' weights without calling them.
    read = {id(inner) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for inner in m.children()}
    return [("", model)] + [(name, m) for name, m in found if m is not model and id(m) not in read]


def _repeated_blocks(model: nn.Module) -> set[type[nn.Module]]:
    """Classes made of modules of which a ModuleList or Sequential holds several; only the outermost ones."""
    if isinstance(model, nn.ModuleList | nn.Sequential):
        children = [
            type(c) for c in model.children() if any(True for _ in c.children()) and any(True for _ in c.parameters())
        ]
        repeated = {cls for cls in children if children.count(cls) > 1}
        if repeated:
            return repeated
    return {cls for child in model.children() for cls in _repeated_blocks(child)}


def _by_size(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model.named_children():
        name = f"{path}.{name}" if path else name
        size = sum(p.numel() * p.element_size() for p in child.parameters())
        called = type(child).forward is not nn.Module.forward  # a ModuleList is not, nor is a ParameterList
        if size > UNIT_BYTES or not called:
            found += _by_size(child, name) or [(name, child)] * called
        elif size >= SMALL_BYTES:
            found.append((name, child))
    return found


def _check(named: list[tuple[str, nn.Parameter]], comm: Comm) -> None:
    if not named:
        raise ValueError("the model has no parameters")
    if not comm.backend:
        raise ValueError(
            f"the model is on {comm.device}, but the process group only serves {comm.config}: move the model to the "
            "group's device before sharding it, or initialise the group with a backend for the model's device"
        )
    storages: dict[int, str] = {}
    for name, param in named:
        if is_owned(param):
            raise ValueError(f"{name} is sharded already; build a new model")
        if param.is_meta:
            continue
        if param.device != comm.device:
            raise ValueError(
                f"{name} is on {param.device}, other parameters are on {comm.device}; move the model to one device"
            )
        if param.requires_grad and not param.dtype.is_floating_point:
            raise ValueError(
                f"{name} is trainable and {param.dtype}; only real floating point parameters can be trained"
            )
        storage = param.untyped_storage()._cdata  # an identity
        if param.numel() and storages.setdefault(storage, name) != name:
            raise ValueError(
                f"{name} and {storages[storage]} are different parameters but share memory; clone one, or tie them"
            )


def _tell_apart(parts: list[Part]) -> None:
    """Parts of one module (another dtype, frozen, batch norms) get names of their own."""
    names = [part.name for part in parts]
    for part, name in zip(parts, names, strict=True):
        if names.count(name) > 1:
            facts = [str(part.dtype).removeprefix("torch."), "" if part.trainable else "frozen"]
            facts.append("batch norm" if part.batch_norm else "")
            part.name = f"{name} ({', '.join(fact for fact in facts if fact)})"


def materialise(modules: Iterable[nn.Module], init: Init, device: torch.device) -> None:
    """Give memory to what `modules` themselves have on the meta device, and values by the user's `init`."""
    for module in modules:
        params = [(key, p) for key, p in module._parameters.items() if p is not None and p.is_meta]
        buffers = [(key, b) for key, b in module._buffers.items() if b is not None and b.is_meta]
        for key, param in params:
            module._parameters[key] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
        for key, buffer in buffers:
            module._buffers[key] = torch.empty_like(buffer, device=device)
        if (params or buffers) and init is not None:
            init(module)


def device_of(model: nn.Module) -> torch.device:
    """Where the model is or, for a model on the meta device, where this process computes.

    GPUs that are shared (under gloo) have to be chosen: `torch.set_default_device("cuda")`, or `with` it.
    """
    for param in model.parameters():
        if not param.is_meta:
            return param.device
    chosen = torch.get_default_device()
    if chosen.type not in ("cpu", "meta"):
        return chosen
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Structure:
    """Looks at every module and parameter of `model` once, and again only after something has changed."""

    def __init__(self, model: nn.Module, units: list[Unit], rank: int) -> None:
        self._model, self._units, self._rank = model, units, rank
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._params: list[nn.Parameter | None] = []

    def check(self) -> None:
        """Raise `RuntimeError` if parameters were added, replaced, moved or removed after sharding."""
        for unit in self._units:
            if name := unit.moved():
                raise RuntimeError(
                    f"rank {self._rank}: the storage of {name} was replaced after sharding (.to(), .double(), .half(), "
                    ".data = ..., a new Parameter?). Convert the model before sharding it. To change values, edit them "
                    "in place, inside `with zero.full_parameters():`, or with zero.load_full_state_dict()"
                )
        if self._unchanged():
            return
        if problem := self._problem():
            raise RuntimeError(
                f"rank {self._rank}: {problem} after sharding. Change the model before sharding it; "
                "torch.func.functional_call can only be given its own parameters"
            )
        self._modules = list(self._model.modules())
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
        for unit in self._units:
            for name, sites, param, full in zip(unit.names, unit.sites, unit.params, unit.full_params, strict=True):
                allowed |= dict.fromkeys(sites, (name, {id(param), id(full)}))
        ours = {number: name for name, numbers in allowed.values() for number in numbers}
        found = set()
        for path, module in self._model.named_modules():
            for key, held in module._parameters.items():
                name = f"{path}.{key}" if path else key
                if held is None:
                    continue
                found.add((module, key))
                if id(held) not in ours:
                    return f"{name} was added or replaced"
                if (module, key) not in allowed or id(held) not in allowed[module, key][1]:
                    return f"{name} became what {ours[id(held)]} is"
        for site, (name, _) in allowed.items():
            if site not in found:
                return f"{name}, or a parameter that was tied to it, was removed"
        return None
