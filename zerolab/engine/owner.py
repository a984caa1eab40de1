"""Optimizers that look at whole matrices, in every stage: each parameter has an owner, which updates all of it.

Muon takes the sign of a matrix, Shampoo and SOAP its left and right factors, Adafactor its rows and columns, LAMB the
norm of a layer. None of them can update a slice by itself. So a step goes in rounds, with one parameter per owner:

    gather     all ranks send the owner their slices of its parameter: the averaged gradient and the master
    update     the owner runs the optimizer on them; it alone keeps the state
    scatter    all ranks get their slices of the new master

While they travel, it updates parameters of which it has all anyway. In stage 0 every rank has everything, so an owner
updates its parameter in place and spreads it. In place, a parameter may begin anywhere in memory, where a process by
itself would have it on a boundary. Some matrix products round otherwise there, so an owner copies such a parameter.

With N ranks, and Ψ elements in parameters that are updated here, in fp32:

    held, always     the optimizer's state / N: Muon 4Ψ/N bytes in every stage; within a matrix of even
    held, in a step  stages 1 to 3: the owner's gradient and master of one parameter, at most twice the largest matrix
                     (and what the optimizer itself needs for one); stage 0: nothing, or that for what is copied
    moved            stages 1 to 3: 12Ψ(N-1)/N² bytes per rank and step if slices are even; stage 0: 4Ψ(N-1)/N

A parameter of n elements, k of them on its owner, moves 12(n - k) bytes: n - k elements of the gradient and of the
master go to the owner, and n - k come back. `moved_bytes()` has the exact number of a rank. With a mesh, N is the size
of a shard group, and every replica does the same work.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from zerolab.comm.collectives import Comm, Pending
from zerolab.comm.slices import gather_slices, scatter_slices, spread_full
from zerolab.comm.waiting import CommError
from zerolab.engine.engine import Engine
from zerolab.engine.hyperparameters import NOT_VALUES, PLAIN, described, first_difference, values_of
from zerolab.engine.layout import Slot
from zerolab.engine.step import MARK, SeesSlices
from zerolab.engine.step import Owner as Updated
from zerolab.engine.unit import Unit

BOUNDARY = 64  # bytes: where torch lets a tensor on the CPU begin


@dataclass(eq=False)
class Owned:
    """A parameter with its owner, a rank of the shard group. `sizes`: the elements of each rank's slice."""

    name: str
    unit: Unit
    slot: Slot
    param: nn.Parameter  # what the model shows and the user's groups hold: a slice, or all of it in stage 0
    group: int
    sizes: list[int]
    stand_in: Tensor  # the shape of the full parameter, one element of memory
    full: nn.Parameter  # what the wrapped optimizer gets to see on the owner
    owner: int = -1

    @property
    def at_home(self) -> bool:
        """Whether its owner holds all of it anyway, in stages 1 to 3: then nothing travels."""
        return self.sizes[self.owner] == self.slot.numel

    def shaped(self, flat: Tensor) -> Tensor:
        """`flat` (numel,) in the shape of the full parameter, without a copy."""
        return flat.as_strided(self.slot.shape, self.slot.stride, flat.storage_offset())

    def lie_flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's, which is dense: (numel,) in the order of its memory, without a copy."""
        return tensor.detach().as_strided((tensor.numel(),), (1,))


class OwnerOptimizer(SeesSlices):
    """`optimizer_class` on full parameters of a sharded model: Muon, Shampoo, SOAP, Adafactor, LAMB in every stage.

        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        muon = zerolab.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)

    In the manner of torch's `ZeroRedundancyOptimizer`. params: parameters of one sharded model, or parameter groups, as
    for any optimizer; the same on every rank. defaults: arguments of `optimizer_class`. Parameter groups, schedulers,
    closures, clipping and step hooks work as with `optimizer_class` itself. `state` has only what this rank owns.

    optimizer_class: a `torch.optim.Optimizer` whose update of a parameter depends on that parameter and its gradients
    alone, and that makes its state in `step()`. Its `step()` is called once for each parameter that this rank owns.

    Each parameter has one owner among the ranks of its shard group. Owners are even by elements, over all parameters
    given. Every rank has the same list of them, and it does not change.

    Bytes held and moved: see the module's docstring and `moved_bytes`.

    All ranks must construct it, step it and add groups to it alike. Raises `ValueError` on every rank if a rank cannot
    build it, `CommError` if the ranks disagree, and in `step()` `RuntimeError` if some have a gradient or a
    hyperparameter that others do not have, or if `optimizer_class` failed on an owner.
    """

    _inner: Any = None  # the wrapped optimizer; its groups are this one's, with full parameters

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(f"expected a subclass of torch.optim.Optimizer, not {optimizer_class!r}")
        if issubclass(optimizer_class, LBFGS | OwnerOptimizer):
            raise ValueError(
                f"{optimizer_class.__name__} looks at several parameters together, and an owner has only its own: "
                "OwnerOptimizer is for optimizers that look at one parameter at a time"
            )
        self.optimizer_class, self._given = optimizer_class, defaults
        self._engine: Engine
        self._items: list[Owned] = []  # in the order of the groups
        self._loads: list[int] = []  # elements that each rank owns
        self._mine: set[int] = set()  # identities of the parameters that this rank owns
        super().__init__(params, {})
        self._take(self.param_groups, lambda groups: optimizer_class(groups, **defaults))
        self.defaults = self._inner.defaults

    # -- for users -----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of `optimizer_class` on every parameter that has a gradient. All ranks must take part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            comm, engine = self._engine.comm, self._engine
            comm.phase = "step"
            items = self._agree_on_grads()
            Rounds(comm, engine.stage == 0, self._inner, self.param_groups, self.state).run(items)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `Optimizer.add_param_group`, on all ranks. What is owned already stays where it is."""
        super().add_param_group(param_group)
        if self._inner is None:  # still in Optimizer's own constructor
            return
        try:
            self._take(self.param_groups[-1:], lambda groups: self._add_to_inner(groups[0]))
        except BaseException:
            self.param_groups.pop()
            del self._inner.param_groups[len(self.param_groups) :]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict()` gave on this rank, for the same ranks. For others, use `zerolab.save` and `load`."""
        super().load_state_dict(state_dict)
        for item in self._items:
            if not self.owns(item.param):
                self.state.pop(item.param, None)

    def owners(self) -> dict[str, int]:
        """The owner of each parameter, by the parameter's name in the model: a rank of the shard group."""
        return {item.name: item.owner for item in self._items}

    def moved_bytes(self) -> int:
        """Bytes this rank sends in a step in which every parameter has a gradient: the formula, parameter by parameter.

        Stages 1 to 3: twice its slices of what others own (gradients and masters), and what it owns of others' slices.
        Stage 0: (N-1)/N of every parameter, as in a ring.
        """
        group, total = self._engine.comm.shard_group, 0
        for item in self._items:
            numel, mine = item.slot.numel, item.sizes[group.rank]
            if self._engine.stage == 0:
                total += numel * item.param.element_size() * (group.size - 1) // group.size
            else:
                total += (numel - mine if item.owner == group.rank else 2 * mine) * item.param.element_size()
        return total

    # -- construction: the same owners on every rank ---------------------------------------------------------------

    def _take(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Find owners for the parameters of `groups`, and let `build` show full parameters to the wrapped optimizer."""
        engine = self._engine_of(groups)
        self._engine, problem, inner = engine, None, self._inner
        number = len(self.param_groups) - len(groups)
        items = [self._item(param, number + i) for i, group in enumerate(groups) for param in group["params"]]
        if engine.offload:
            problem = (
                'OwnerOptimizer does not go with offload="optimizer", which keeps slices on the host, apart from the '
                "device on which they travel: leave offload out"
            )
        else:
            full = [
                group | {"params": [i.full for i in items if i.group == number + g]} for g, group in enumerate(groups)
            ]
            try:
                inner = build([{key: value for key, value in group.items() if key != "param_names"} for group in full])
                if inner.state:
                    problem = "it makes state in its constructor, for all parameters; OwnerOptimizer needs it in step()"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self._agree_on_items(items, problem, inner)
        self._inner = inner
        for outer, within in zip(groups, inner.param_groups[number:], strict=True):
            outer.update((key, value) for key, value in within.items() if key not in NOT_VALUES)
            within["params"] = []  # those of one owner's turn, in `_update`
        self._choose_owners(items)
        self._items += items
        self._mine |= {id(item.param) for item in items if item.owner == engine.comm.shard_group.rank}

    def _engine_of(self, groups: list[dict[str, Any]]) -> Engine:
        engines = [self._engine] if self._items else []
        for group in groups:
            for param in group["params"]:
                mark = getattr(param, MARK, None)
                if isinstance(mark, str):
                    raise ValueError(f"OwnerOptimizer({self.optimizer_class.__name__}) {mark}")
                if not isinstance(mark, Updated):
                    raise ValueError(
                        f"OwnerOptimizer was given a parameter of shape {tuple(param.shape)} that is of no sharded "
                        "model: shard the model first, then pass parameters from model.parameters()"
                    )
                engines.append(mark.engine)
        if len(set(map(id, engines))) != 1:
            raise ValueError("OwnerOptimizer was given parameters of several sharded models: build one for each")
        return engines[0]

    def _item(self, param: nn.Parameter, group: int) -> Owned:
        unit: Any = getattr(param, MARK).unit
        i = next(i for i, other in enumerate(unit.params) if other is param)
        slot, layout = unit.layout.slots[i], unit.layout
        bounds = (layout.owned(slot, rank) for rank in range(layout.world_size))
        stand_in = torch.zeros((), dtype=param.dtype, device=param.device).expand(slot.shape)
        full = nn.Parameter(stand_in)
        return Owned(unit.names[i], unit, slot, param, group, [stop - start for start, stop in bounds], stand_in, full)

    def _add_to_inner(self, group: dict[str, Any]) -> Any:
        self.optimizer_class([dict(group)], **self._given)  # some look at parameters in their constructor alone
        self._inner.add_param_group(group)
        return self._inner

    def _agree_on_items(self, items: list[Owned], problem: str | None, inner: Any) -> None:
        """Raises on every rank if some rank has a problem, other parameters, or other hyperparameters."""
        comm, name = self._engine.comm, self.optimizer_class.__name__
        mine = {item.name: [item.group, item.param.requires_grad] for item in items}
        values = [] if problem else [described(values_of(group)) for group in inner.param_groups]
        everyone = comm.exchange([problem, name, list(mine.items()), values], "comparison of the optimizers")
        for rank, (problem, *_) in enumerate(everyone):
            if problem:
                raise ValueError(f"rank {rank}: OwnerOptimizer cannot be built with {name}: {problem}")
        for rank, (_, *theirs) in enumerate(everyone):
            for what, one, first in zip(("class", "parameters", "values"), theirs, everyone[0][1:], strict=True):
                if one != first:
                    one, first = first_difference(one, first) if isinstance(one, list) else (one, first)
                    raise CommError(
                        f"OwnerOptimizer's {what}: rank {rank} has {one} where rank 0 has {first}; build it alike on "
                        "all ranks"
                    )

    def _choose_owners(self, items: list[Owned]) -> None:
        """Even by elements, and the same on every rank. Frozen parameters, which have no state, come last."""
        loads = self._loads or [0] * self._engine.comm.shard_group.size
        trained = sorted((item for item in items if item.param.requires_grad), key=lambda item: -item.slot.numel)
        frozen = [item for item in items if not item.param.requires_grad]
        sizes = [item.slot.numel for item in trained]
        capacity = max([(sum(loads) + sum(sizes)) / len(loads), *sizes])
        while (owners := _pack(trained, loads, capacity)) is None:
            capacity *= 1.01
        for one, owner in zip(trained, owners, strict=True):
            one.owner = owner
            loads[owner] += one.slot.numel
        for one in frozen:
            one.owner = loads.index(min(loads))
            loads[one.owner] += one.slot.numel
        self._loads = loads

    def _agree_on_grads(self) -> list[Owned]:
        """The parameters with a gradient. Raises `RuntimeError` on every rank if ranks differ."""
        comm = self._engine.comm
        have = bytes(item.param.grad is not None for item in self._items)
        rows = comm.exchange_bytes(have, "comparison of gradients")
        for rank, row in enumerate(rows):
            for item, mine, first in zip(self._items, row, rows[0], strict=True):
                if mine != first:
                    has, lacks = (rank, 0) if mine else (0, rank)
                    raise RuntimeError(
                        f"rank {has} has a gradient for {item.name}, rank {lacks} has none: set gradients to None on "
                        "all ranks or on none"
                    )
        return [item for item, present in zip(self._items, have, strict=True) if present]

    def owns(self, param: Tensor) -> bool:
        """Whether this rank updates `param` and keeps its state."""
        return id(param) in self._mine

    def state_place(self) -> str:
        group = self._engine.comm.shard_group
        owners = zlib.crc32(repr(self.owners()).encode())
        return f"those of the parameters that rank {group.rank} of {group.size} owns, owners {owners:08x}"


class Rounds:
    """One step of `inner` on the parameters that this rank owns. `groups` and `state` are the OwnerOptimizer's.

    replicated: in stage 0, every rank has all of every parameter.
    """

    def __init__(self, comm: Comm, replicated: bool, inner: Any, groups: list[dict[str, Any]], state: Any) -> None:
        self._comm, self._replicated, self._inner, self._groups, self._state = comm, replicated, inner, groups, state
        self._rank = comm.shard_group.rank
        self._given = [values_of(group) for group in groups]  # every turn begins with the same
        self._updated: list[str] = []
        self._failed: list[Exception] = []  # the others must hear of it, and not wait

    def run(self, items: list[Owned]) -> None:
        """Update `items`, of all ranks. Raises `RuntimeError` on every rank if it failed on one."""
        home = [item for item in items if item.owner == self._rank and item.at_home and not self._replicated]
        still = [item for item in home if all(map(_on_boundary, _lying_flat(item)))]
        copied = [item for item in home if item not in still]  # once there is room
        turns = self._turns([item for item in items if not item.at_home or self._replicated])
        meanwhile = [still[number :: 2 * len(turns)] for number in range(2 * len(turns))]
        spreading: list[Pending] = []  # in stage 0, where nothing has to make room for the next turn
        for turn, first, second in zip(turns, meanwhile[::2], meanwhile[1::2], strict=True):
            rooms, gathering = self._gather(turn)
            self._update(first)
            _finish(gathering)
            self._update(turn, rooms)
            scattering = self._scatter(turn, rooms[0])
            self._update(second)
            if self._replicated:
                spreading += scattering
            else:
                _finish(scattering)
            del rooms
        self._update(copied if turns else still + copied)
        _finish(spreading)
        if not self._updated:
            self._count_step()
        self._put_back()
        failed = self._failed
        problem = f"{self._updated[-1]}: {type(failed[0]).__name__}: {failed[0]}" if failed else None
        ends = self._comm.exchange_bytes(bytes([problem is not None]), "end of an owners' step")
        if any(row != b"\0" for row in ends):
            everyone = self._comm.exchange(problem, "error in an owners' step")
            other, theirs = next((rank, one) for rank, one in enumerate(everyone) if one is not None)
            raise RuntimeError(
                f"rank {other}: {type(self._inner).__name__} failed on {theirs}. Some parameters have made this step "
                "and others have not: go on from a checkpoint"
            ) from (failed[0] if failed else None)

    def _turns(self, items: list[Owned]) -> list[list[Owned]]:
        """At most one parameter for each owner in a turn, of about the same size, so that owners work together."""
        by_size = sorted(items, key=lambda item: -item.slot.numel)
        queues = [[item for item in by_size if item.owner == rank] for rank in range(self._comm.shard_group.size)]
        return [[item for item in turn if item is not None] for turn in zip_longest(*queues)]

    def _gather(self, turn: list[Owned]) -> tuple[tuple[Tensor, Tensor], list[Pending]]:
        """The full master and gradient of the parameter of `turn` that this rank owns, flat, once all have waited.

        Empty tensors if it owns none.
        """
        comm, pending = self._comm, []
        ours = torch.empty(0), torch.empty(0)
        for item in turn:
            grad: Any = item.param.grad
            if self._replicated:
                if item.owner == self._rank:
                    ours = _lying_flat(item)
                continue
            slices = [item.param.detach().view(-1), grad.detach().to(item.param.dtype).reshape(-1)]
            rooms = (_room(item, "gathered parameters", comm), _room(item, "gradients", comm))
            if item.owner == self._rank:
                ours = rooms
            pending.append(gather_slices(comm, list(rooms), slices, item.sizes, item.owner, item.unit.name))
        return ours, pending

    def _update(self, items: list[Owned], rooms: tuple[Tensor, Tensor] | None = None) -> None:
        """Update those of `items` that this rank owns. `rooms`: master and gradient, if they were gathered."""
        for item in items:
            if item.owner == self._rank and not self._failed:
                self._updated.append(item.name)
                try:
                    self._update_one(item, *(rooms or _lying_flat(item)))
                except Exception as error:
                    self._failed.append(error)

    def _update_one(self, item: Owned, master: Tensor, grad: Tensor) -> None:
        """Let the wrapped optimizer update `master`, in place, as the only parameter there is."""
        inner, full = self._inner, item.full
        self._show_groups()
        inner.param_groups[item.group]["params"] = [full]
        own = master if _on_boundary(master) else _room(item, "gathered parameters", self._comm).copy_(master)
        full.data, full.grad = item.shaped(own), None
        full.grad = item.shaped(grad if _on_boundary(grad) else _room(item, "gradients", self._comm).copy_(grad))
        if item.param in self._state:
            inner.state[full] = self._state[item.param]
        try:
            inner.step()
            if own is not master:
                master.copy_(own)
        finally:
            if full in inner.state:
                self._state[item.param] = inner.state.pop(full)
            inner.param_groups[item.group]["params"] = []
            full.grad, full.data = None, item.stand_in

    def _scatter(self, turn: list[Owned], master: Tensor) -> list[Pending]:
        """Give every rank the new masters of `turn`. Returns what is under way."""
        comm, pending = self._comm, []
        for item in turn:
            if self._replicated:
                pending.append(spread_full(comm, item.lie_flat(item.param), item.owner, item.unit.name))
                continue
            mine = item.param.detach().view(-1)
            full = master if item.owner == self._rank else mine[:0]
            pending.append(scatter_slices(comm, mine, full, item.sizes, item.owner, item.unit.name))
        return pending

    def _show_groups(self) -> None:
        for group, values in zip(self._inner.param_groups, self._given, strict=True):
            group.update(
                (key, value if type(value) in PLAIN else copy.deepcopy(value)) for key, value in values.items()
            )

    def _count_step(self) -> None:
        """This rank had no turn. An optimizer that counts its steps in its groups counts this one, as the others'."""
        self._show_groups()
        try:
            self._inner.step()
        except Exception:  # it wants parameters, so it counts nowhere but in their state
            self._show_groups()

    def _put_back(self) -> None:
        """What the wrapped optimizer changed in its groups."""
        for group, inner, before in zip(self._groups, self._inner.param_groups, self._given, strict=True):
            for key, value in values_of(inner).items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                elif key not in before or type(value) not in PLAIN or value != before[key]:
                    group[key] = value


def _pack(items: list[Owned], loads: list[int], capacity: float) -> list[int] | None:
    """An owner for each of `items`, the largest first, so that none owns more than `capacity`; None if they do not fit.

    Each goes to the fullest rank that has room, and among equals to the one that holds most of it already.
    """
    loads, owners = list(loads), []
    for item in items:
        numel, sizes = item.slot.numel, item.sizes
        fitting = [rank for rank, load in enumerate(loads) if load + numel <= capacity]
        if not fitting:
            return None
        owners.append(max(fitting, key=lambda rank: (loads[rank], sizes[rank])))
        loads[owners[-1]] += numel
    return owners


def _finish(pending: list[Pending]) -> None:
    """Wait for all, and let go of each, since it holds tensors."""
    while pending:
        pending.pop(0).wait()


def _room(item: Owned, kind: str, comm: Comm) -> Tensor:
    """Memory for a full parameter, on its owner; `kind` is for the timeline."""
    numel = item.slot.numel if item.owner == comm.shard_group.rank else 0
    return torch.empty(numel, dtype=item.param.dtype, device=item.param.device)


def _on_boundary(flat: Tensor) -> bool:
    return flat.data_ptr() % BOUNDARY == 0


def _lying_flat(item: Owned) -> tuple[Tensor, Tensor]:
    """Master and gradient of a parameter of which this rank has all, where they are."""
    grad: Any = item.param.grad
    return item.lie_flat(item.param), item.lie_flat(grad)
