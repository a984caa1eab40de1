"""The rule of slices.py against torch itself: every function that takes a tensor, on slices and in one process."""

from __future__ import annotations

import gc
import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from jobs_common import worlds
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

import zerolab
from zerolab import Ranks
from zerolab.engine.slices import Place, place_of, to_local

# Of a tensor as an object, and of its memory: a slice answers for itself.
ABOUT_THE_SLICE = {
    "shape", "size", "stride", "nbytes", "__len__", "storage_offset", "data_ptr", "const_data_ptr",
    "is_contiguous", "storage", "untyped_storage", "_storage", "typed_storage", "storage_type", "is_set_to", "_is_view",
    "is_same_size", "dim_order", "is_non_overlapping_and_dense", "__repr__", "__format__", "__hash__", "__reduce_ex__",
    "__dir__", "_version", "__cuda_array_interface__", "_cdata", "itemsize", "__dict__", "module_load", "grad_fn",
    "output_nr", "__weakref__", "empty_like",
}  # fmt: skip
# They ask for a device or for shared memory, or are about Python's objects; and torch tells no subclass of `set_`.
LEFT_OUT = {
    "__del__", "__setstate__", "_make_subclass", "cuda", "hpu", "ipu", "mtia", "pin_memory", "set_", "set_printoptions",
    "share_memory_", "swap_tensors", "xpu",
}  # fmt: skip


class Odd(nn.Module):
    """Slices of all kinds on 2 and 3 ranks: all of a parameter, a part, none; a vector and matrices alike."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        for name, shape in {"a": (4, 3), "b": (4, 3), "c": (5,), "d": (3, 3)}.items():
            setattr(self, name, nn.Parameter(torch.rand(shape, generator=draw) + 0.1))

    def forward(self) -> Tensor:
        return (self.a * self.b).sum() + (self.c.sum() * self.d.square()).sum()


def functions() -> dict[str, Callable[..., Any]]:
    """What torch lets a subclass of Tensor override, and the rest of the foreach functions."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for several in get_overridable_functions().values():
            for function in several:
                name = (resolve_name(function) or f"?.{function.__name__}").removesuffix(".__get__")
                if name.split(".")[-1] not in LEFT_OUT and function.__name__ not in ("__set__", "__delete__"):
                    found[name] = function
    for key in dir(torch):
        if key.startswith("_foreach_"):
            found[f"torch.{key}"] = getattr(torch, key)
    return found


def arguments(one: Tensor, like: Tensor) -> Iterator[tuple[Any, ...]]:
    """`one` and `like` are cut alike. What most functions take is among these."""
    number, index = torch.tensor(0.5), torch.tensor([0])
    yield from [(one,), (one, like), (one, 2), (one, 0.5), (one, number), (number, one), (one, like, like), (one, 0, 1)]
    yield from [(one, 0.1, 0.9), (one, [0]), (one, like, 0.5), (one, 0, index), (one, index), (one, torch.float64)]
    yield from [([one, like],), ([one, like], [like, one]), ([one, like], 2.0), ([one, like], [2.0, 3.0])]
    yield from [([one], [like], [like]), ([one], [like], 0.5), ([one, like], number), (one.ne(0), one, like)]
    yield from [(torch.ones(1, 3), one), (one, torch.ones(3, 2)), (one, 1, 0.5, like)]


def outcome(function: Any, given: Any) -> Any:
    """What comes back, or the error."""
    try:
        return function(*given)
    except Exception as error:
        return error


def fit(mine: Any, full: Any, key: str) -> str:
    """How what a slice gave stands to what the whole gives. What does not fit comes back in words."""
    if isinstance(mine, Tensor) and isinstance(full, Tensor):
        place: Place | None = place_of(mine)
        if place is None:
            same = mine.shape == full.shape and mine.dtype == full.dtype
            close = same and torch.allclose(mine.detach(), full.detach(), rtol=1e-4, equal_nan=True)
            return "the whole" if close else f"{key}: {mine} where one process has {full}"
        rank = place.the_engine("test").comm.shard_group.rank
        start, stop = (bound - place.slot.offset for bound in place.layout.owned(place.slot, rank))
        if full.shape != place.slot.shape or full.dtype != mine.dtype:
            return f"{key}: a slice in {mine.dtype} of {place.slot.shape}, but one process has {full.shape}"
        own, want = to_local(mine).reshape(-1), full.detach().reshape(-1)[max(0, start) : max(0, stop)]
        close = torch.allclose(own, want, rtol=1e-4, equal_nan=True) if stop > start else own.numel() == 0
        return "a slice" if close else f"{key}: slice {own} where one process has {want}"
    if isinstance(mine, float) and isinstance(full, float) and math.isclose(mine, full, rel_tol=1e-4):
        return "the whole"
    try:
        same = bool(mine == full)
    except Exception:
        same = type(mine) is type(full)
    return "the whole" if same else f"{key}: {mine!r:.90} where one process has {full!r:.90}"


def compare(mine: Any, full: Any, key: str) -> str:
    if isinstance(mine, Exception):
        ours = "the forward of its own unit" in str(mine) or "random values" in str(mine)
        return "refused" if ours else "torch's error"
    if key in ABOUT_THE_SLICE:
        return "about the slice"
    ones, others = tree_leaves(mine), tree_leaves(full)
    if len(ones) != len(others):
        return f"{key}: {len(ones)} results where one process has {len(others)}"
    found = [fit(one, other, key) for one, other in zip(ones, others, strict=True)]
    return next((words for words in found if ":" in words), found[0] if found else "nothing")


def copied(given: Any) -> Any:
    return tree_map(lambda one: one.detach().clone() if isinstance(one, Tensor) else one, given)


def ask(stage: int, every: int) -> tuple[Counter[str], list[str]]:
    """Each of torch's functions, or one of `every`, with every choice of arguments that it takes.

    Returns how often each outcome came, and what is none of them.
    """
    torch.default_generator.manual_seed(0)
    model, alone = Odd().double(), Odd().double()  # gradients are averaged, so they are rounded otherwise
    zerolab.shard(model, stage)
    model().backward()
    alone().backward()
    counts, wrong = Counter[str](), []
    for name, function in sorted(functions().items())[::every]:
        key = name.split(".")[-1]
        for one, like, grad in (("a", "b", True), ("c", "c", False), ("d", "d", False)):
            rows = []
            for of in (model, alone):
                params = getattr(of, one), getattr(of, like)
                rows.append(list(arguments(*[param.grad for param in params] if grad else params)))
            for given, plain in zip(*rows, strict=True):
                words = asked(function, key, given, plain)
                if words is not None:
                    counts[words if ":" not in words else "wrong"] += 1
                    if ":" in words:
                        wrong.append(f"{name} with {len(given)} arguments, {one}: {words}")
    return counts, wrong


def shares(result: Any, given: Any) -> bool:
    """Whether some of `result` lies in the memory of what was given."""
    ones, others = (
        [to_local(x).untyped_storage()._cdata for x in tree_leaves(of) if isinstance(x, Tensor)]
        for of in (result, given)
    )
    return not set(ones).isdisjoint(others)


@torch.no_grad()
def asked(function: Any, key: str, given: Any, plain: Any) -> str | None:
    """How `function` of slices stands to that of plain tensors; None where these are an error."""
    plain = copied(plain)
    torch.default_generator.manual_seed(0)  # torch.manual_seed turns to every kind of device
    if isinstance(full := outcome(function, plain), Exception):
        return None
    given = copied(given)
    torch.default_generator.manual_seed(0)
    mine = outcome(function, given)
    words = compare(mine, full, key)
    if ":" not in words and not isinstance(mine, Exception) and key not in ABOUT_THE_SLICE:
        tensors = [[x for x in tree_leaves(g) if isinstance(x, Tensor)] for g in (given, plain)]
        changed = compare(*tensors, f"{key} in place")
        if ":" not in changed and shares(mine, given) != shares(full, plain):
            return f"{key}: the result is in memory of its own, or is not, other than in one process"
        return changed if ":" in changed else words
    return words


@pytest.mark.slow
@pytest.mark.parametrize(("n", "every"), [(3, 8), *(pytest.param(n, 1, marks=pytest.mark.exhaustive) for n in (2, 3))])
def test_functions_of_torch(n: int, every: int) -> None:
    with warnings.catch_warnings(), Ranks(n, threads=1, forked=True) as own:  # they change what they run on
        warnings.simplefilter("ignore")
        rows = own.run(ask, 3, every)
    for counts, wrong in rows:
        print(counts)
        assert not wrong, "\n".join(wrong)


# -- collectives of torch.distributed --------------------------------------------------------------------------------


def collectives() -> dict[str, Callable[..., Any]]:
    """Those of torch.distributed that take tensors, and those of its functional collectives that take a group too."""
    found = {}
    for module in (dist.distributed_c10d, functional):
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and not name.startswith(("_", "legacy_")):
                named = set(inspect.signature(function).parameters)
                tensors = any(re.match("(tensor|input|output|self$)", one) for one in named)
                if "group" in named and tensors and not name.endswith("_inplace"):  # those are for torch.compile
                    found[f"{module.__name__}.{name}"] = function
    return found


def filled(function: Callable[..., Any], one: Tensor) -> dict[str, Any]:
    """Arguments with which `function` gets `one` wherever it takes a tensor."""
    size, rank = dist.get_world_size(), dist.get_rank()
    others = {"group": dist.group.WORLD, "gather_dim": 0, "reduceOp": "sum", "src_dst": list(range(size))}
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in others:
            given[name] = others[name]
        elif name in ("src", "dst"):
            given[name] = (rank + 1) % size if function.__name__.endswith(("send", "recv")) else rank
        elif name == "scatter_dim":
            given[name] = [0] * size if "coalesced" in function.__name__ else 0
        elif name.endswith("split_sizes"):
            given[name] = None
        elif name == "output_tensor_lists":
            given[name] = [[one] * size]
        elif name.endswith(("_list", "tensors", "inputs")) or "list" in str(parameter.annotation):
            given[name] = [one] * size
        elif re.match("(tensor|input|output|self$)", name):
            given[name] = one
    return given


def collectives_by_hand(stage: int) -> list[str]:
    """What is not refused, of all collectives with a parameter, its data, its gradient and a copy."""
    size = dist.get_world_size()
    model = nn.Linear(size, 2 * size, bias=False)  # a slice can be split among the ranks again
    zerolab.shard(model, stage)
    model(torch.ones(1, size)).sum().backward()
    wrong = []
    for key, function in collectives().items():
        for one in (model.weight, model.weight.data, model.weight.grad, model.weight.detach().clone()):
            try:
                function(**filled(function, one))
                wrong.append(key)
            except RuntimeError as error:
                if "would pair each rank's slice with another place's" not in str(error):
                    wrong.append(f"{key}: {error}")
    return wrong


@pytest.mark.skipif(not hasattr(dist.distributed_c10d, "has_torch_function"), reason="this torch tells no subclass")
@pytest.mark.parametrize("n", worlds(2, others=(3,)))
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the names that torch gives up
def test_collectives_by_hand(ranks: Any, n: int) -> None:
    assert len(collectives()) > 25
    for stage in (1, 2, 3):
        assert ranks.run(collectives_by_hand, stage, ranks=n) == [[]] * n


# -- the way to the whole, and to this rank's part ---------------------------------------------------------------------


def the_whole(stage: int, mesh: tuple[int, int] | None) -> None:
    model, alone = Odd(), Odd()
    options = {"mesh": mesh} if mesh else {}
    zero = zerolab.shard(model, stage, **options)
    model().backward()
    alone().backward()
    for (name, param), plain in zip(model.named_parameters(), alone.parameters(), strict=True):
        for shown, want in ((param, plain), (param.grad, plain.grad), (param.detach() * 2, plain * 2)):
            assert zerolab.full_shape(shown) == want.shape
            assert torch.allclose(zerolab.full_tensor(shown), want), name
            assert torch.allclose(shown.sum(), want.sum()) and torch.allclose(shown.max(), want.max()), name
        local = zerolab.to_local(param)
        assert (type(local) is Tensor) == (stage > 0) and local.shape == param.shape
        local.detach().mul_(2)  # the memory of the parameter, and a write that the next forward notices
        assert torch.allclose(zerolab.full_tensor(param), 2 * plain)
        param.detach().mul_(2)
        assert torch.allclose(zerolab.full_tensor(param), 4 * plain), name
    with torch.no_grad():
        assert torch.allclose(model(), 16 * (alone.a * alone.b).sum() + 64 * (alone.c.sum() * alone.d.square()).sum())
        assert zerolab.full_tensor(alone.a) is alone.a
    zero.full_state_dict()


@pytest.mark.parametrize(("n", "mesh"), [(3, None), (4, (2, 2))])
def test_the_whole_and_the_part(ranks: Any, n: int, mesh: tuple[int, int] | None) -> None:
    for stage in range(1 if mesh else 0, 4):
        ranks.run(the_whole, stage, mesh, ranks=n)


class Nested(Odd):
    zero: Any = None

    def forward(self) -> Tensor:
        with self.zero[0].full_parameters():
            return super().forward()


def said_by(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RuntimeError as error:  # CommError is one
        return str(error)
    return ""


def asked_wrongly() -> list[str]:
    """What is said: to a model that is gone, to full_parameters() in forward, to a rank that asks alone."""
    model = Odd()
    zerolab.Zero2(model)
    average = model.a.detach().clone()
    del model
    gc.collect()
    average.mul_(2)
    nested = Nested()
    nested.zero = [zerolab.Zero2(nested)]
    alone = nested.a.norm if nested.zero[0].rank else nested.zero[0].full_state_dict
    return [said_by(attempt) for attempt in (average.norm, nested, alone)]


def test_what_is_asked_wrongly(ranks: Any) -> None:
    for rank, (gone, nested, alone) in enumerate(ranks.run(asked_wrongly, ranks=2)):
        assert gone == "norm of a: the sharded model that it belongs to is gone"
        assert "full_parameters() cannot be entered inside forward" in nested
        assert f"rank {rank}" in alone and "norm of a" in alone
