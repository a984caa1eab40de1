"""The rule for slices: what a program does with one is right for the whole tensor, or refused by name.

Outside forward, stages 1 to 3 show this rank's slice of each parameter, each gradient and what an optimizer keeps. What
is called with a slice, and with whatever is computed from it, is judged by the operations of torch that it comes to:

    element by element, all operands cut alike    done; the result is a slice, cut alike
    a question about the whole                    answered for the whole, alike on all ranks, which all must ask
    random numbers                                refused: each rank would draw its own
    collectives of torch.distributed              refused: the ranks have different places of it
    anything else                                 refused

Which operations work element by element torch itself knows: they carry the tag `pointwise`. So this file lists no
functions of torch's, but the copies and the reductions, which have no such tag, and what no operation shows.

Inside of zerolab, and of an optimizer's step, a slice is a tensor like any other: `plainly()`.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zerolab.comm.collectives import Comm
from zerolab.engine.layout import Layout, Slot

plainly = torch._C.DisableTorchFunctionSubclass  # a context in which slices are tensors like any other
aten = torch.ops.aten

# By the names of aten's operations, without the underscore of those that work in place.
COPIES = {
    "alias", "clone", "copy", "detach", "empty_like", "fill", "full_like", "ones_like", "_to_copy", "zero",
    "zeros_like",
}  # fmt: skip
NEW = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"}
NORMS = {"_foreach_norm", "linalg_vector_norm", "norm"}
# Functions, by what Python calls them. The first hand out values as what is no tensor.
HANDED_OUT = {"numpy", "tolist", "__array__", "__dlpack__"}
NUMBERS = {"item", "__bool__", "__complex__", "__float__", "__index__", "__int__"}
BACKWARDS = (torch.autograd.backward, torch.autograd.grad)
UNSEEN = "hands out what is this rank's slice alone"
COLLECTIVE = "would pair each rank's slice with another place's (gradients are the average over the ranks already)"
VALUES = {"H", "T", "imag", "mH", "mT", "real"}  # attributes that are computed


class Sharded(Protocol):
    """What slices ask of the engine whose model they belong to."""

    stage: int
    comm: Comm
    units: list[Any]
    plain: bool  # while an optimizer works on parameters and gradients as they are
    listeners: dict[int, Any]  # parameters with hooks of the user's

    def is_idle(self) -> bool: ...
    def check_grads_final(self, units: list[Any]) -> None: ...
    def promote_grads(self, units: list[Any]) -> None: ...
    def note_numbers(self, call: str, numbers: list[float]) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where a slice lies: of which tensor it is, and how that is cut."""

    engine: weakref.ref[Sharded]
    name: str  # the parameter's, in the model
    layout: Layout
    slot: Slot
    group: str  # the name of the process group that has the rest
    of_grad: bool = False
    rows: int | None = None  # how many of the tensor's are the slice; None: all

    @functools.cached_property
    def cut(self) -> Any:
        """The same for tensors of which every rank has the same elements, in the same order."""
        slot = self.slot
        return self.group, slot.shape, slot.stride, slot.offset, self.layout.shard_size

    def the_engine(self, call: str) -> Sharded:
        if (engine := self.engine()) is None:
            raise RuntimeError(f"{call} of {self}: the sharded model that it belongs to is gone")
        return engine

    def __str__(self) -> str:
        return f"the gradient of {self.name}" if self.of_grad else self.name


class Settled:
    """Values that the ranks have agreed on. No rank may draw others by itself."""

    full_name: str  # of the parameter, in the model

    def _refuse_random(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse_random(str(place_of(self) or self.full_name))

    normal_ = uniform_ = _refuse_random

    @property
    def shape(self) -> torch.Size:
        return self._size()

    def dim(self) -> int:
        return len(self._size())

    ndimension = dim

    def _size(self) -> torch.Size:
        """Before nn.init draws, it looks at the shape, and returns at once if there are no elements."""
        if sys._getframe(2).f_globals.get("__name__") == "torch.nn.init":
            self._refuse_random()
        with plainly():
            return self.size()  # type: ignore[attr-defined,no-any-return]


class Slice(Settled, Tensor):  # type: ignore[misc, override]
    """This rank's slice of a tensor that is cut as a parameter is."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self.detach().clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_local(self).__reduce_ex__(protocol)


def full_shape(tensor: Tensor) -> torch.Size:
    """The shape in one process of a parameter, a gradient, or what was computed from them. No rank is asked."""
    place = place_of(tensor)
    return torch.Size(place.slot.shape) if place else tensor.size()


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor of which `tensor` is a slice, with its shape, on every rank; else `tensor` itself.

    All ranks must call it, for the same tensors in the same order. Named after `DTensor.full_tensor`. Raises
    `RuntimeError` if the sharded model is gone, `CommError` if another rank calls something else.
    """
    place = place_of(tensor)
    if place is None:
        return tensor
    comm, slot, layout = place.the_engine("full_tensor").comm, place.slot, place.layout
    bounds = [layout.owned(slot, rank) for rank in range(layout.world_size)]
    largest = max(stop - start for start, stop in bounds)
    mine = to_local(tensor).reshape(-1)
    padded = mine.new_zeros(largest)
    padded[: mine.numel()] = mine
    gathered = mine.new_empty(largest * len(bounds))
    comm.all_gather(gathered, padded, f"full_tensor of {place}").wait()
    rows = gathered.view(len(bounds), largest)
    flat = torch.cat([row[: stop - start] for row, (start, stop) in zip(rows, bounds, strict=True)])
    return flat.as_strided(slot.shape, slot.stride)


def place_of(value: Any) -> Place | None:
    return getattr(value, "place", None) if isinstance(value, Tensor) else None


def marked(tensor: Tensor, place: Place) -> Slice:
    """`tensor` itself, from now on known as a slice."""
    tensor.__class__ = Slice  # type: ignore[assignment]
    tensor.place = place  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def to_local(tensor: Tensor) -> Tensor:
    """This rank's slice as a plain tensor of shape (k, 1, ...), which shares its memory. Any other tensor as it is.

    What is done with it is this rank's own business. Named after `DTensor.to_local`.
    """
    if place_of(tensor) is None:
        return tensor
    with plainly():
        return tensor.detach().as_subclass(Tensor)


# -- a call ---------------------------------------------------------------------------------------------------------


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func`, a function of torch's, with slices among its arguments."""
    with plainly():
        attribute = _attribute(func)
        if attribute is not None and attribute not in VALUES:
            if attribute == "grad" and func.__name__ == "__set__":  # or no rank would know of what it is a slice
                _Rule("grad")._agreed(list(args), args[1])
            result = func(*args, **kwargs)
            if attribute == "data" and isinstance(result, Tensor) and (place := place_of(args[0])):
                return marked(result, place)
            return result
        if func in BACKWARDS:
            return refuse_inputs(func, args, kwargs)
        slices = [value for value in tree_leaves((args, kwargs)) if place_of(value)]
        if all((engine := one.place.engine()) is not None and engine.plain for one in slices):
            return func(*args, **kwargs)  # there are none, or an optimizer is at work on them, which may see them
        call = attribute or func.__name__
        if call in HANDED_OUT:
            raise _refusal(call, slices[0].place, UNSEEN)
        if call in NUMBERS or (call == "__format__" and slices[0].place.slot.numel == 1):
            return func(_only_element(call, slices[0]), *args[1:])
        if call in ("__repr__", "__format__"):
            return f"this rank's slice of {slices[0].place}: {func(*args, **kwargs)}"
        if call in ("numel", "nelement"):
            return slices[0].place.slot.numel
        # torch takes other ways with one element or none than with some, and every rank must go the same.
        stand_ins = {id(one): _StandIn(one) for one in slices if one.numel() < 2}
        judged = args, kwargs
        if stand_ins:
            judged = tree_map_only(
                Tensor, lambda one: stand_ins[id(one)].tensor if id(one) in stand_ins else one, judged
            )
        with _Rule(call) as rule:
            result = func(*judged[0], **judged[1])
        if not rule.asked:  # no values, but what kind of tensor it is
            given = {id(one) for one in tree_leaves((args, kwargs))}
            for one in tree_leaves(result):
                if call not in NEW and isinstance(one, Tensor) and not (place_of(one) or id(one) in given):
                    if not any(one.dtype == other.dtype and one.is_set_to(other) for other in rule.converted):
                        raise _refusal(call, slices[0].place, UNSEEN)  # made of what no operation has shown
            return func(*args, **kwargs) if stand_ins else result
        for other in stand_ins.values():
            other.write_back()
        return _returned(result, rule, list(stand_ins.values()))


def _returned(result: Any, rule: _Rule, stand_ins: list[_StandIn]) -> Any:
    """`result` as the caller gets it."""
    if isinstance(result, list | tuple) and not isinstance(result, torch.Size):
        return type(result)([_returned(one, rule, stand_ins) for one in result])
    if (place := rule.place(result)) is None:
        return result
    for other in stand_ins:
        if result is other.tensor:
            return other.original
        if result.is_set_to(other.tensor):  # of the same memory
            return marked(other.original.detach(), replace(place, rows=None))
    if place.rows is not None:
        return marked(result.as_subclass(Tensor)[: place.rows].clone(), replace(place, rows=None))
    return marked(result, place) if type(result) is Tensor else result


def refuse_inputs(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func`, unless it is a backward that is asked for gradients of what a model shows."""
    if func in BACKWARDS:
        inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
        for one in tree_leaves(inputs):
            if hasattr(one, "full_name"):
                call = "autograd.grad" if func is torch.autograd.grad else "backward(inputs=...)"
                if torch._C._current_graph_task_id() != -1:
                    raise RuntimeError(
                        f"{call} of {one.full_name} inside of a backward: an adjoint got a parameter from where the "
                        "model shows what the optimizer updates, and not what it computes with. Apply such a function, "
                        "and take its parameters, inside the forward of one unit that holds them: list the module "
                        "that does so in units="
                    )
                raise RuntimeError(
                    f"{call} of {one.full_name}: forward computed with the full parameter, not with what a sharded "
                    "model shows, so there is no way back to it. Call loss.backward(), after which p.grad is the "
                    "average over the ranks; what is to get no gradient takes p.requires_grad_(False)"
                )
    with plainly():
        return func(*args, **kwargs)


class _StandIn:
    """`tensor` of two elements, for the slice `original`, which has fewer: its elements and zeros."""

    def __init__(self, original: Any) -> None:
        self.original, self.rows = original, original.numel()
        rows = torch.zeros([2] + [1] * (original.dim() - 1), dtype=original.dtype, device=original.device)
        if original.requires_grad and not original.is_leaf:
            rows = torch.cat([original.as_subclass(Tensor), rows[self.rows :]])
        else:
            rows[: self.rows] = original.detach()
            if original.requires_grad:  # a gradient goes where it would have gone
                rows.requires_grad_().register_hook(functools.partial(refuse_gradient, original.place.name))
        self.tensor = marked(rows, replace(original.place, rows=self.rows))
        self._version = self.tensor._version

    @torch.no_grad()
    def write_back(self) -> None:
        if self.tensor._version != self._version:
            self.original.copy_(self.tensor[: self.rows])


def _attribute(func: Any) -> str | None:
    """The name of the attribute that `func` reads or writes."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return getattr(func.__self__, "__name__", "")
    return None


class _Rule(TorchDispatchMode):
    """Judges each of torch's operations that `call` comes to."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.asked = False  # whether an operation was seen
        self._seen: list[tuple[Tensor, Place]] = []  # slices that were given or made
        self.converted: list[Tensor] = []  # of what is no slice, by `t.to(p)` or `t.type_as(p)`

    def place(self, value: Any) -> Place | None:
        """Autograd may have wrapped anew what was made as a slice."""
        if not isinstance(value, Tensor):
            return None
        return place_of(value) or next((place for one, place in self._seen if value.is_set_to(one)), None)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [(value, self.place(value)) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        slices = [(value, place) for value, place in given if place is not None]
        if not slices:
            result = op(*args, **kwargs)
            if op._overloadpacket is aten._to_copy:
                self.converted.append(result)
            return result
        self.asked = True
        self._seen += slices
        place = slices[0][1]
        name = op._overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise refuse_random(str(place))
        if op.namespace in ("c10d", "_c10d_functional"):
            raise _refusal(self.call, place, COLLECTIVE)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # GradScaler's
            return self._unscale(op, *args)
        if name in WHOLE or name in NORMS:
            return self._answer(op, name, args, kwargs)
        if name in NEW:
            result = op(*args, **kwargs)
            return marked(result, replace(place, rows=None)) if result.shape == self._own(args[0]).shape else result
        if not _elementwise(op):
            raise _refusal(self.call, place, f"is not done element by element ({name})")
        numbers = [one for one in tree_leaves((args, kwargs)) if type(one) in (int, float)]
        if numbers and (engine := place.engine()) is not None:
            engine.note_numbers(self.call, numbers)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
        columns = list(zip(*(value for value in lists if any(isinstance(one, Tensor) for one in value)), strict=False))
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if columns:
            places = [self._agreed([*column, *others], column[0]) for column in columns]
        else:
            written = [value for value, info in _bound(op, args, kwargs) if info and info.is_write]
            places = [self._agreed(others, *written)]
        result = op(*args, **kwargs)
        if columns and name.endswith("_"):
            self._written(args[0])
        if isinstance(result, Tensor):
            return self._made(result, places[0], slices[0][0])
        if isinstance(result, list | tuple):
            likes = args[0] if columns else [slices[0][0]] * len(result)
            made = zip(result, places if columns else places * len(result), likes, strict=True)
            return type(result)(self._made(one, at, like) for one, at, like in made)
        return result

    def _agreed(self, operands: list[Any], *written: Any) -> Place | None:
        """Where the result lies. Raises `RuntimeError` unless all `operands` are cut alike, or have one element."""
        found = [(value, self.place(value)) for value in operands if isinstance(value, Tensor)]
        slices = [(value, place) for value, place in found if place is not None]
        if not slices:
            return None
        first, place = slices[0]
        for _, its in slices[1:]:
            if its.cut != place.cut:
                raise _refusal(
                    self.call, place, f"would pair its elements with others than in one process: {its} is cut otherwise"
                )
        for other, none in found:
            # One element is the same for all, but a rank whose slice has one could not tell it from a slice.
            if none is None and (other.numel() != 1 or other.dim() >= first.dim() or any(other is w for w in written)):
                shape = tuple(other.shape)
                raise _refusal(
                    self.call,
                    place,
                    f"got a tensor of shape {shape} with it that is no slice of anything (make one alike by "
                    "torch.zeros_like, clone or detach)",
                )
        return next((its for _, its in slices if its.of_grad), place)

    def _written(self, tensors: Any) -> None:
        """An operation on a list wrote to them. Under a mode their versions do not show it."""
        increment_version([one for one in tensors if self.place(one) and not one.is_inference()])

    def _own(self, value: Any) -> Any:
        """What of `value` is the slice."""
        place = self.place(value)
        return value if place is None else value.as_subclass(Tensor)[: place.rows]

    def _made(self, result: Any, place: Place | None, like: Tensor) -> Any:
        if place is None or not isinstance(result, Tensor):
            return result
        if result.shape != like.shape:
            raise _refusal(self.call, place, "gives it another shape")
        if type(result) is Tensor:
            marked(result, place)
        self._seen.append((result, place))
        return result

    def _unscale(self, op: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        """Set `found_inf` on all ranks, if one of them has found what is not finite."""
        op(grads, found_inf, inv_scale)
        self._written(grads)
        places = {place.the_engine(self.call): place for grad in grads if (place := self.place(grad)) is not None}
        for engine, place in places.items():
            engine.check_grads_final(engine.units)
            (rows,) = _from_all_ranks([found_inf], [place], self.call)
            found_inf.fill_(rows.max())

    # -- questions about the whole -------------------------------------------------------------------------------

    def _answer(self, op: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The answer for the whole to a question about one slice or, by `_foreach_norm`, about each in a list."""
        many = not isinstance(args[0], Tensor)
        tensors = list(args[0]) if many else [args[0]]
        given = dict(zip((info.name for info in op._schema.arguments), args, strict=False)) | kwargs
        others = [value for value in args[1:] if isinstance(value, Tensor)]
        places = [self._agreed([tensor, *others]) for tensor in tensors]
        first = next(place for place in places if place is not None)
        # Of what kind the answer is; a wrong argument is an error here, on all ranks.
        ones = [torch.zeros([1] * tensor.dim(), dtype=tensor.dtype) for tensor in tensors]
        like = op(ones if many else ones[0], *([ones[0]] if others else args[1:2]), *args[2:], **kwargs)
        dims = [dim] if isinstance(dim := given.get("dim"), int) else list(dim or ())
        if dims and len({one % max(1, tensors[0].dim()) for one in dims}) < tensors[0].dim():
            raise _refusal(self.call, first, "goes over a dimension")
        if self.place(tensors[0]) is None and not many:
            raise _refusal(self.call, first, "compares it with what is no slice")
        if "norm" in name:
            power = given.get("ord", given.get("p", 2.0))
            of_slice, of_parts = _norm_of(2.0 if power is None else float(power))
            for engine in {place.the_engine("norm"): None for place in places if place is not None and place.of_grad}:
                engine.promote_grads(engine.units)  # the scaling that follows is in full precision
        else:
            of_slice, of_parts = WHOLE[name]
        own = [self._own(value) for value in (*tensors, *args[1:])]
        parts = [of_slice(*own, **kwargs)] if others else [of_slice(one) for one in own[: len(tensors)]]
        totals = [of_parts(rows) for rows in _from_all_ranks(parts, places, self.call)]
        if name == "mean":
            totals = [totals[0] / first.slot.numel]
        if isinstance(like, bool):
            return bool(totals[0])
        answers = []
        for total, tensor, one in zip(totals, tensors, like if many else [like], strict=True):
            wide = "norm" in name and given.get("dtype") is None  # as zero.clip_grad_norm_ has it
            dtype = torch.promote_types(one.dtype, torch.float32) if wide else one.dtype
            answers.append(total.to(device=tensor.device, dtype=dtype).reshape(one.shape))
        return answers if many else answers[0]


def _norm_of(p: float) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """The p-norm: of a slice, of which the p-th powers add up, and of these of all ranks."""
    if math.isinf(p):
        limit = _extreme(torch.max, False) if p > 0 else _extreme(torch.min, True)
        return lambda tensor: limit(tensor.abs()), torch.max if p > 0 else torch.min
    if p == 0:
        return torch.count_nonzero, torch.sum
    return lambda tensor: (_wide(tensor.abs()) ** p).sum(), lambda rows: rows.sum() ** (1 / p)


def _elementwise(op: Any) -> bool:
    if torch.Tag.pointwise in op.tags:
        return True
    base = op._overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
    packet = getattr(aten, base, None)
    others = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return base in COPIES or any(torch.Tag.pointwise in other.tags for other in others)


def _bound(op: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Each argument, and how the operation may write to it."""
    infos = op._schema.arguments
    named = {info.name: info.alias_info for info in infos}
    return [(value, info.alias_info) for value, info in zip(args, infos, strict=False)] + [
        (value, named.get(key)) for key, value in kwargs.items()
    ]


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _extreme(pick: Any, smallest: bool) -> Callable[[Tensor], Tensor]:
    """The largest or smallest of a slice; where it has no elements, what any other is larger or smaller than."""

    def of_slice(tensor: Tensor) -> Tensor:
        wide = _wide(tensor)
        if wide.numel():
            return pick(wide)  # type: ignore[no-any-return]
        if wide.is_floating_point():
            return wide.new_tensor(math.inf if smallest else -math.inf)
        limits = torch.iinfo(torch.long)
        return wide.new_tensor(limits.max if smallest else limits.min)

    return of_slice


def _sum(tensor: Tensor) -> Tensor:
    return _wide(tensor).sum()


# By aten's name: what each rank finds in its slice, and how that of all ranks, stacked, comes together.
WHOLE: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "sum": (_sum, torch.sum),
    "mean": (_sum, torch.sum),
    "nansum": (lambda tensor: _wide(tensor).nansum(), torch.sum),
    "prod": (lambda tensor: _wide(tensor).prod(), torch.prod),
    "count_nonzero": (torch.count_nonzero, torch.sum),
    "_foreach_max": (_extreme(torch.max, False), torch.max),
    "max": (_extreme(torch.max, False), torch.max),
    "amax": (_extreme(torch.max, False), torch.max),
    "min": (_extreme(torch.min, True), torch.min),
    "amin": (_extreme(torch.min, True), torch.min),
    "any": (torch.any, torch.any),
    "all": (torch.all, torch.all),
    "equal": (lambda *given: torch.tensor(torch.equal(*given)), torch.all),
    "allclose": (lambda *given, **options: torch.tensor(torch.allclose(*given, **options)), torch.all),
}


def _from_all_ranks(parts: list[Tensor], places: list[Place | None], call: str) -> list[Tensor]:
    """For each of `parts`, one number, those of all ranks of its shard group, (ranks,). All ranks must take part."""
    rows = [_wide(part).reshape(1).cpu() for part in parts]
    for engine in {place.the_engine(call): None for place in places if place is not None}:
        mine = [i for i, place in enumerate(places) if place is not None and place.engine() is engine]
        message = torch.cat([rows[i] for i in mine])
        what = f"{call} of {places[mine[0]]}" if len(mine) == 1 else f"{call} of {len(mine)} slices"
        found = engine.comm.exchange_bytes(message.view(torch.uint8).numpy().tobytes(), what[:112])
        size = engine.comm.shard_group.size  # of neighbours
        first = engine.comm.rank // size * size
        everyone = torch.frombuffer(bytearray(b"".join(found[first : first + size])), dtype=message.dtype)
        for i, column in zip(mine, everyone.view(size, -1).T, strict=True):
            rows[i] = column
    return rows


def _only_element(call: str, tensor: Any) -> Tensor:
    """The one element of the whole tensor, on all ranks."""
    place: Place = tensor.place
    if place.slot.numel != 1:
        raise _refusal(call.strip("_"), place, f"wants one element, and it has {place.slot.numel}")
    (rows,) = _from_all_ranks([_sum(tensor.detach())], [place], call.strip("_"))
    return rows.sum().to(tensor.dtype)


# -- errors ---------------------------------------------------------------------------------------------------------


def _refusal(call: str, place: Place, why: str) -> RuntimeError:
    engine = place.the_engine(call)
    advice = (
        "On all ranks alike, take zerolab.full_tensor(t), or parameters inside `with zero.full_parameters():`; "
        "zerolab.to_local(t) is the slice itself"
    )
    if not engine.is_idle():
        advice = (
            "Use the parameter inside the module that owns it, or make one unit of both modules: units= lists the "
            "classes of those that become units, and what lies outside of them is the root's, there in every forward"
        )
    return RuntimeError(
        f"rank {engine.comm.rank}: {call} of {place} {why}, and outside the forward of its own unit stage "
        f"{engine.stage} shows this rank's slice. {advice}"
    )


def refuse_gradient(name: str, grad: Tensor) -> None:
    raise RuntimeError(
        f"a gradient reached {name} outside of forward, where the model shows what the optimizer updates (in stages 1 "
        "to 3 this rank's slice). Use the parameter inside the model's forward, or register the method that uses it: "
        'zero.register_forward_method("name"). What a penalty on weights alone would add to the gradients, add to '
        "them after backward: p.grad.add_(p.detach(), alpha=2 * c)"
    )


def refuse_random(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was to get random values after sharding: each rank would draw its own, in stages 1 to 3 for the shape "
        "of its slice. Initialise the model before sharding it, or inside `with zero.full_parameters():`, where the "
        "first rank's values are kept"
    )
