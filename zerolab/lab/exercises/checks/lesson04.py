"""Lesson 04: ZeRO-1. A reduce-scatter on a bare tensor, then a stage whose optimizer sees only slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.engine.engine import Engine
from zerolab.engine.layout import Layout
from zerolab.engine.slices import to_local
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.lesson03 import INPUT, Block, gradients_alone, make_model, mean_explained
from zerolab.lab.exercises.checks.training import ODD, check_cases
from zerolab.lab.exercises.checks.values import check_tensor, compare
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic
from zerolab.measure import model_states

ALL_REDUCE = "an all-reduce instead of a reduce-scatter: a rank needs only its own shard, which is half the bytes"


TOO_SOON = "read before the wait: what was started has written its result only when wait() returns"


def check_moved(what: str, calls: list[Traffic], world: World, payload: int, likely: str) -> None:
    """A reduce-scatter or an all-gather moves (N-1)/N of the payload, and no more."""
    N = world.world_size
    sent, allowed = sum(call.sent for call in calls), payload * (N - 1) / N
    if sent > allowed:
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        times = f"{sent / allowed:.2f} x the {allowed:,.0f} needed" if allowed else "with nobody to send to"
        raise Wrong(f"{what}: {sent:,.0f} bytes were sent per rank, {times} ({ops})", likely)


def check_waited(calls: list[Traffic], world: World) -> None:
    if world.world_size > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and would be wrong on a slower network")


def explained(
    base: Tensor, world: World, calls: list[Traffic], suspects: list[tuple[Tensor, str]]
) -> Callable[[Tensor], str]:
    """As `mean_explained`, but a forgotten wait is always the first suspect."""
    named = mean_explained(base, world, calls, suspects)
    lost = world.unwaited(calls)

    def explain(got: Tensor) -> str:
        if lost:
            return f"a forgotten wait: {lost}, so nothing had arrived"
        return named(got)

    return explain


# ---------------------------------------------------------------------- 04.1

SHARD = 5
SWAPPED = "the output comes first, and it is a separate tensor: dist.all_to_all_single(received, flat)"
OVER_ELEMENTS = "the mean was taken over elements, not over ranks: view(N, S) has a row per rank, so use dim=0"
OWN_SHARDS = "this rank's own shards were added up: what the other ranks sent is in `received`"
OWN_MISSING = "this rank's own contribution is missing: the mean is over all ranks"
CALLERS = "the caller still needs its gradient: work on a copy"
ADDED_IN_PLACE = f"a view of the shard was written to, and so `flat` itself: {CALLERS}"
FIRST_CALL_ONLY = (
    "right for the first call only: S is flat.numel() // world_size, and nothing may be kept from an earlier call"
)
ONE_DTYPE = "right in float32 only: make tensors with torch.empty_like(flat), which has the dtype of `flat`"
KEPT_BUFFER = "all calls return the same tensor, a buffer that is kept between them: make a new one in every call"
GLOOS = (
    "gloo's own reduce-scatter is an all-reduce inside and sends twice as much; it is counted here as a ring sends it"
)
A_VIEW = "what it returns is a view of a tensor of N * S elements, which stays in memory with it (see lesson 05)"
DIFFERENT_SHARDS = (
    "different shards were added up, rank 0's first and rank 1's second: on rank r, add up every rank's shard r"
)


def check_reduce_scatter(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    base = values.base(N * SHARD)
    flat = values.share(base, rank)
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        got = answer.reduce_scatter_mean(flat, rank, N)
    check_input(flat, values.share(base, rank), calls, rank, N)
    if isinstance(got, Tensor) and N > 1 and got.numel() == N * SHARD:
        raise Wrong(
            f"it returns {got.numel()} elements", "the full mean: return one shard, of flat.numel() / N elements"
        )
    if isinstance(got, Tensor) and got.numel() in (1, N):
        elements = "1 element" if got.numel() == 1 else f"{got.numel()} elements"
        raise Wrong(f"it returns {elements}, and a shard has {SHARD}", OVER_ELEMENTS)
    if isinstance(got, (int, float)):
        raise Wrong(f"it returns the number {got}", "nothing was added up: the rank's own contribution is missing")
    if isinstance(got, (list, tuple)):
        likely = "there is a piece from every rank: add them up, divide by N, and return one tensor"
        raise Wrong(f"it returns a {type(got).__name__}, not a tensor", likely)
    check_tensor("what it returns", got, (SHARD,))
    check_moved("a flat tensor", calls, world, 4 * base.numel(), _why_so_much(calls))
    shards = base.view(N, SHARD)
    mean = values.total(base, N).view(N, SHARD) / N
    others = [(mean[r], f"another rank's shard: this is the mean of shard {r}") for r in range(N) if r != rank]
    transposed = torch.stack([values.share(base, r).view(N, SHARD)[rank] for r in range(N)]).flatten()
    mixed = transposed.view(SHARD, N)
    likely = "rows and columns are mixed up: view(N, S), then sum over the N rows"
    others += [(how(mixed, 1), likely) for how in (torch.mean, torch.sum)]
    interleaved = values.total(base, N).view(SHARD, N)[:, rank] / N
    others += [(interleaved, "every N-th element was added up, but shard r is elements r * S to (r + 1) * S")]
    own_shards = torch.stack([values.share(base, r).view(N, SHARD)[r] for r in range(N)]).sum(dim=0)
    others += [(how(flat.view(N, SHARD), 0), OWN_SHARDS) for how in (torch.mean, torch.sum) if N > 1]
    others += [(own_shards / k, DIFFERENT_SHARDS) for k in dict.fromkeys((1, N)) if N > 1]
    others += [
        (values.share(shards[rank], r) / k, _one_part(r, rank, calls)) for r in range(N) for k in (1, N) if N > 1
    ]
    others += [(mean[rank] - values.share(shards[rank], rank) / k, OWN_MISSING) for k in (N, 1)]
    compare("its shard", got, mean[rank], explained(shards[rank], world, calls, others))
    check_waited(calls, world)
    for note, applies in (
        (GLOOS, any(call.op.startswith("reduce_scatter") for call in calls)),
        (A_VIEW, got.untyped_storage().nbytes() > 4 * SHARD),
    ):
        if N > 1 and applies:
            world.note(note)
    if N > 1:  # so that a larger mistake is told first
        check_further_calls(answer, world, got, mean[rank])


def check_input(flat: Tensor, before: Tensor, calls: list[Traffic], rank: int, N: int) -> None:
    if torch.equal(flat, before):
        return
    if torch.equal(flat, before / N):
        raise Wrong("`flat` has changed: it was divided by N in place", CALLERS)
    others = [r for r in range(N) if r != rank]
    if N > 1 and torch.equal(flat.view(N, -1)[others], before.view(N, -1)[others]):
        raise Wrong("this rank's shard of `flat` has changed", ADDED_IN_PLACE)
    exchanged = bool(calls) and all(call.op == "all_to_all_single" for call in calls)
    if exchanged:
        raise Wrong("the all-to-all changed `flat`", SWAPPED)
    if {call.op for call in calls} == {"all_reduce"}:
        raise Wrong("the all-reduce changed `flat`", ALL_REDUCE)
    raise Wrong("`flat` has changed", CALLERS)


def _one_part(r: int, rank: int, calls: list[Traffic]) -> str:
    if {call.op for call in calls} == {"scatter"}:
        return (
            f"a scatter hands out what rank {r} has, and nothing of the other ranks is in it: add up all ranks' parts"
        )
    whose = "this rank's own part" if r == rank else f"rank {r}'s part"
    return f"{whose} alone: `received` has a part from every rank, one after another. Add them up"


def check_further_calls(answer: Any, world: World, first: Tensor, expected: Tensor) -> None:
    """Another length, dtype and other values, and what the first call returned must stay."""
    N, rank = world.world_size, world.rank
    for dtype, length, likely in (
        (torch.float32, SHARD, FIRST_CALL_ONLY),
        (torch.float32, 3, FIRST_CALL_ONLY),
        (torch.float64, 7, ONE_DTYPE),
        (torch.bfloat16, 4, ONE_DTYPE),
    ):
        when = f"another call, with {N} x {length} elements in {str(dtype).removeprefix('torch.')}"
        # 1.5, 3, ...: exact in bfloat16, and no whole numbers
        base = 1.5 * ((torch.arange(N * length, dtype=dtype) + rank) % 4 + 1).view(N, length)
        parts = [(1.5 * ((torch.arange(N * length) + r) % 4 + 1)).view(N, length)[rank] for r in range(N)]
        flat = base.flatten()
        with world.record(), values.in_case(answer, when, likely):
            got = answer.reduce_scatter_mean(flat, rank, N)
        check_tensor(f"{when}: what it returns", got, (length,), dtype)
        want = torch.stack(parts).sum(dim=0) / N
        if not torch.allclose(got.double(), want.double(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0.0):
            floor = torch.equal(got.double(), want.floor().double())
            likely = "// rounds down: divide with /" if floor else FIRST_CALL_ONLY
            raise Wrong(
                f"{when}: {got[0]:g} at [0], expected {want[0]:g}" * (not floor) or f"{when}: whole numbers", likely
            )
        if not torch.equal(flat, base.flatten()):
            raise Wrong(f"{when}: `flat` has changed", CALLERS)
    if not torch.equal(first, expected):
        raise Wrong("what the first call returned has changed in a later call", KEPT_BUFFER)


def _why_so_much(calls: list[Traffic]) -> str:
    ops = {call.op for call in calls}
    if "all_reduce" in ops or {"broadcast", "all_to_all_single"} <= ops:
        return ALL_REDUCE
    if any(op.startswith("all_gather") for op in ops):
        return "every rank sends everything to every rank, and most of it is wasted: send each shard to its owner only"
    return "extra traffic: one reduce-scatter, or one all_to_all_single, is enough"


REDUCE_SCATTER_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def reduce_scatter_mean(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """The mean over all ranks of this rank's shard of `flat`: (N * S,) -> (S,).

    `flat` stays as it is. Shard r is elements r * S to (r + 1) * S.
    dist.all_to_all_single(received, flat) sends shard r to rank r, and stores what rank r
    sends in place r.
    """
    raise Todo("04.1")
'''

REDUCE_SCATTER = """\
import torch
import torch.distributed as dist
from torch import Tensor


def reduce_scatter_mean(flat: Tensor, rank: int, world_size: int) -> Tensor:
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    return received.view(world_size, -1).sum(dim=0) / world_size
"""


# ---------------------------------------------------------------------- 04.2


def owned(layout: Layout, flat: Tensor, rank: int, owner: int | None = None) -> Tensor:
    """The elements (without padding) of the shard of `owner`, seen through the slices of `rank`."""
    shard = layout.shard(flat, rank if owner is None else owner)
    return torch.cat([view.flatten() for view in layout.slices(shard, rank)])


def flat_of(layout: Layout, tensors: list[Tensor]) -> Tensor:
    """`tensors`, one for each parameter, laid out flat, with zeros for padding."""
    flat = torch.zeros(layout.size)
    for view, tensor in zip(layout.views(flat), tensors, strict=True):
        view.copy_(tensor)
    return flat


def check_class(cls: Any, name: str, base: type, methods: tuple[str, ...]) -> None:
    """Raises Wrong unless the learner's class extends `base` and overrides `methods`."""
    if not isinstance(cls, type) or not issubclass(cls, base):
        likely = f"it must begin with `class {name}(zerolab.{base.__name__}):`"
        raise Wrong(f"{name} is not a subclass of zerolab.{base.__name__}", likely)
    for method in methods:
        if any(method in vars(theirs) and getattr(cls, method) is vars(theirs)[method] for theirs in LADDER):
            raise Wrong(f"{name}.{method} is the package's", f"the class inherits {method}(): write your own")


LADDER = (zerolab.DDP, zerolab.Zero1, zerolab.Zero2, zerolab.Zero3)


def check_zero1(answer: Any, world: World) -> None:
    check_class(answer.MyZero1, "MyZero1", zerolab.DDP, ("optimizer_params", "reduce", "after_step"))
    model = make_model()
    zero = answer.MyZero1(model, units=[Block])
    before = [unit.full.clone() for unit in zero.units]
    for unit, full in zip(zero.units, before, strict=True):
        check_slices(unit, full, world)
    with looking(zero, world):
        check_gradients(zero, model, world)
        check_step(zero, model, before, world)
    check_training(answer.MyZero1, zerolab.Zero1, world)
    check_cases(answer, answer.MyZero1, world, ERRORS | {"are not the shard of": ODD})


def check_slices(unit: Unit, full: Tensor, world: World) -> None:
    """What the optimizer sees must be this rank's slice of each parameter, in the storage that it is to change."""
    layout, rank = unit.layout, world.rank
    seen, want = sum(to_local(param).numel() for param in unit.params), len(owned(layout, full, rank))
    if world.world_size > 1 and seen == layout.numel:
        likely = "the optimizer sees full parameters, and will keep state for all of them: give it this rank's slices"
        raise Wrong(f"unit {unit.name}: the optimizer gets all {seen} elements, not this rank's {want}", likely)
    kept = unit.master.numel()
    if kept != layout.shard_size:
        likely = "unit.master still holds everything: keep_shard() makes this rank's shard the master, and returns it"
        raise Wrong(f"unit {unit.name}: unit.master has {kept} elements, not {layout.shard_size}", likely)
    of_rank = [_shapes(layout.slices(layout.shard(full, r), r)) for r in range(world.world_size)]
    given, shapes = _shapes(unit.params), of_rank[rank]
    if world.world_size > 1 and given != shapes:
        likely = "unit.master is the shard already, and layout.slices(unit.master, self.rank) has its slices"
        if given in of_rank:
            likely = "another rank's slice: layout.slices(shard, rank) takes the rank that owns the shard, self.rank"
        elif list(map(prod, given)) == list(map(prod, shapes)):
            likely = "flattened: a slice has as many dimensions as its parameter, as layout.slices() returns it"
        listed = [", ".join(map(str, found)) for found in (given, shapes)]
        raise Wrong(f"unit {unit.name}: the optimizer gets the shapes {listed[0]}, not {listed[1]}", likely)
    got = torch.cat([to_local(param).flatten() for param in unit.params])
    compare(f"unit {unit.name}, what the optimizer sees", got, owned(layout, full, rank), _whose(unit, full, world))
    if any(param.untyped_storage()._cdata != unit.master.untyped_storage()._cdata for param in unit.params):
        likely = (
            "copies: the optimizer would change them and not the model. Give it views, which layout.slices() returns"
        )
        raise Wrong(f"unit {unit.name}: what the optimizer sees is not in unit.master", likely)


def _shapes(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def _whose(unit: Unit, full: Tensor, world: World) -> Callable[[Tensor], str]:
    def explain(got: Tensor) -> str:
        for r in range(world.world_size):
            if torch.equal(got, owned(unit.layout, full, world.rank, r)):
                return f"another rank's slice: this is rank {r}'s"
        return "another rank's slice"

    return explain


def forward(model: nn.Module, world: World) -> Tensor:
    """A loss for which rank r's gradients are 16**r times those of `gradients_alone`."""
    return 12.0 * 16.0**world.rank * model(INPUT).sum()


def payload_of(zero: zerolab.Engine) -> int:
    return 4 * sum(unit.layout.size for unit in zero.units)


def check_gradients(zero: Any, model: nn.Module, world: World) -> None:
    """After a backward each parameter's gradient is the mean of this rank's slice, and nothing else was sent.

    The gradients of the second backward, twice those of the first, stay.
    """
    check_no_gather(model, world, "a forward before any step")
    for times, when in ((1.0, "one backward"), (2.0, "a second backward")):
        model.zero_grad()
        loss = times * forward(model, world)
        with world.record() as calls, values.nan_in_fresh_memory():
            loss.backward()
        check_moved(when, calls, world, payload_of(zero), _why_so_much(calls))
        check_means(zero, world, calls, when, times, {1.0: KEPT_FIRST, 3.0: ADDED_FIRST} if times == 2.0 else None)
        check_waited(calls, world)


ZEROED = "zeros: the gradient was overwritten before the reduction had read it, or the result was never written"
WAITS = (
    "right, but it waits for each reduction before backward goes on, and so gives up their overlap. Start the "
    "reduction and leave the wait to the engine"
)
KEPT_FIRST = "the first backward's gradients again: nothing may be kept from one backward to the next"
ADDED_FIRST = "the first backward's gradients were added to the second's, although zero_grad() was called between them"
PARAMETERS = "unit.full and unit.master hold the parameters: the gradients are in unit.bucket.full"
OTHERS_PLACE = (
    "another rank's slice: as output, reduce_scatter() takes this rank's shard of its input, or memory of its own"
)


@contextmanager
def looking(zero: Any, world: World) -> Iterator[None]:
    """Look at what reduce() leaves, before the engine takes it."""
    reduce = zero.reduce
    found: list[Wrong] = []

    def reduce_and_look(unit: Unit) -> Any:
        full, before = unit.bucket.full, len(world.spy.calls)
        result = reduce(unit)
        grad, by_hand = unit.bucket.grad, [call for call in world.spy.calls[before:] if not call.said]
        note_calls(world, world.spy.calls[before:])
        if not isinstance(grad, Tensor):
            likely = "reduce() did not leave the mean in unit.bucket.grad"
            if hasattr(grad, "wait"):
                likely = "reduce_scatter() returns something to wait for: return that; unit.bucket.grad is its output"
            elif by_hand:
                likely = NOT_RETURNED
            raise Wrong(f"unit {unit.name}: after reduce() unit.bucket.grad is {_kind(grad)}, not a tensor", likely)
        if result is not None and not hasattr(result, "wait"):
            likely = "return what has a wait(), as self.comm.reduce_scatter() returns it, or None if the mean is there"
            raise Wrong(f"reduce() returns {_kind(result)}", likely)
        check_form(unit, full, world.spy.calls[before:])
        if _storage(grad) in (_storage(unit.full), _storage(unit.master)):
            raise Wrong(f"unit {unit.name}: unit.bucket.grad is in the memory of the parameters", PARAMETERS)
        mine = unit.layout.shard(full, world.rank)
        if _storage(grad) == _storage(full) and grad.shape == mine.shape and grad.data_ptr() != mine.data_ptr():
            seen = f"unit {unit.name}: unit.bucket.grad is another rank's part of unit.bucket.full"
            found.append(Wrong(seen, OTHERS_PLACE))  # rank 0 sees nothing, and goes on
        return result

    zero.reduce = reduce_and_look
    yield
    del zero.reduce
    if found:
        raise found[0]
    with world.record():  # a rank that comes here was right
        pass


def check_form(unit: Unit, full: Tensor, calls: list[Traffic]) -> None:
    """Raises Wrong unless unit.bucket.grad has the length of a shard, and the dtype of `full`, which was reduced."""
    grad, S = unit.bucket.grad, unit.layout.shard_size
    if grad.numel() != S:
        all_reduced = any("all_reduce" in call.in_words for call in calls)
        likely = ALL_REDUCE if all_reduced else "it must be as long as unit.master: this rank's shard, (S,)"
        seen = f"unit {unit.name}: unit.bucket.grad has {values.counted(grad.numel(), 'element')}, not {S}"
        raise Wrong(seen, likely)
    if grad.dtype != full.dtype:
        likely = "a gradient keeps the dtype of unit.bucket.full"
        raise Wrong(f"unit {unit.name}: unit.bucket.grad is {grad.dtype}, not {full.dtype}", likely)


def note_calls(world: World, calls: list[Traffic]) -> None:
    """What a right reduction by these calls should know."""
    if world.world_size > 1 and calls and all(call.waited for call in calls):
        world.note(WAITS)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def check_means(
    zero: Any, world: World, calls: list[Traffic], when: str, times: float, lost: dict[float, str] | None = None
) -> None:
    """Compare each unit's gradients with the mean over the ranks of `times` those of one backward.

    lost: another multiple -> the mistake that it comes from.
    """
    N, rank, alone = world.world_size, world.rank, gradients_alone()
    for unit in zero.units:
        layout, what = unit.layout, f"unit {unit.name}, gradients after {when}"
        if any(param.grad is None for param in unit.params):
            raise Wrong(
                f"{what}: there are none", "reduce() left nothing in unit.bucket.grad, or post_backward() lost it"
            )
        flat = times * flat_of(layout, [alone[name] for name in unit.names])
        got = torch.cat([to_local(param.grad).flatten() for param in unit.params])
        base = owned(layout, flat, rank)
        suspects = [
            (values.total(owned(layout, flat, rank, r), N) / N, f"another rank's slice: the mean of rank {r}'s shard")
            for r in range(N)
            if r != rank
        ]
        suspects += [
            (
                values.share(owned(layout, flat, rank, r), rank),
                f"another rank's slice: rank {r}'s part of this rank's own",
            )
            for r in range(N)
            if r != rank
        ]
        suspects += [(torch.zeros_like(base), ZEROED), (owned(layout, unit.full.detach(), rank), PARAMETERS)]
        suspects += [(values.total(base, N) / N * (k / times), likely) for k, likely in (lost or {}).items()]
        own = torch.stack([values.share(owned(layout, flat, rank, r), r) for r in range(N)]).sum(dim=0)
        suspects += [(own / k, DIFFERENT_SHARDS) for k in (1, N) if N > 1]
        compare(what, got, values.total(base, N) / N, explained(base, world, calls, suspects))


def check_step(zero: Any, model: nn.Module, before: list[Tensor], world: World) -> None:
    """After a step every rank's forward sees every rank's new values, and each value was sent once."""
    optimizer, alone, N = torch.optim.SGD(model.parameters(), lr=0.25), gradients_alone(), world.world_size
    with world.record() as calls:
        optimizer.step()
        with torch.no_grad():
            model(INPUT)
    for unit, old in zip(zero.units, before, strict=True):
        layout = unit.layout
        grads = flat_of(layout, [alone[name] for name in unit.names])
        want, got = old - 2.0 * 0.25 * values.total(grads, N) / N, unit.full.detach()
        _compare_weights(unit, got, want, old, calls, world)
    likely = "extra traffic: after a step, one all-gather of each unit's new parameters is enough"
    check_moved("one step", calls, world, payload_of(zero), likely)
    check_waited(calls, world)
    check_no_gather(model, world, "a second forward after the same step")


def check_no_gather(model: nn.Module, world: World, when: str) -> None:
    with world.record() as calls, torch.no_grad():
        model(INPUT)
    if sum(call.sent for call in calls):
        likely = "gathered in every forward: once after a step is enough, since the full parameters stay"
        raise Wrong(f"{calls[0].op} was called in {when}", likely)


def _compare_weights(unit: Unit, got: Tensor, want: Tensor, old: Tensor, calls: list[Traffic], world: World) -> None:
    def explain(found: Tensor) -> str:
        layout, rank = unit.layout, world.rank
        mine, theirs = owned(layout, got, rank), owned(layout, want, rank)
        if lost := world.unwaited(calls):
            return f"a forgotten wait: {lost}"
        if not torch.allclose(mine, theirs):
            if torch.equal(mine, owned(layout, old, rank)):
                return "this rank's own slice is as it was before the step: the optimizer's update was overwritten"
            return "this rank's own slice is wrong: it was overwritten with something other than its new values"
        rest = [owned(layout, got, rank, r) for r in range(world.world_size) if r != rank]
        was = [owned(layout, old, rank, r) for r in range(world.world_size) if r != rank]
        if all(torch.equal(a, b) for a, b in zip(rest, was)):
            return (
                "the other ranks' slices are as before the step: nothing was gathered into unit.full, and the ranks' "
                "weights drift apart"
            )
        return (
            "a rank's new slice did not arrive, or is in the wrong place: rank r's shard goes to place r of unit.full"
        )

    pick = torch.cat([torch.arange(slot.offset, slot.end) for slot in unit.layout.slots])
    compare(f"unit {unit.name}, parameters after a step", got[pick], want[pick], explain)
    if unit.full.untyped_storage()._cdata != unit.full_params[0].untyped_storage()._cdata:
        likely = "unit.full was replaced, but forward reads views of the old one: gather into unit.full itself"
        raise Wrong(f"unit {unit.name}: after a step unit.full is not the tensor that forward reads", likely)


def check_training(theirs: type[Engine], stage: type[Engine], world: World) -> None:
    """Three steps of Adam against the package's stage: the same numbers, and no more bytes held or sent."""
    if theirs.stage != stage.stage:
        raise Wrong(f"{theirs.__name__}.stage is {theirs.stage}", f"`stage = {stage.stage}` {NO_STAGE}")
    (ours, held, sent), (wanted, may_hold, may_send) = (_train(cls, world) for cls in (theirs, stage))
    for category, likely in TOO_MUCH.items():
        if held[category] > may_hold[category]:
            much = f"{held[category]} bytes of {category} are held when backward returns, not {may_hold[category]}"
            raise Wrong(much, likely)
    if sent > may_send:
        raise Wrong(f"{sent:,.0f} bytes were sent in three steps, not {may_send:,.0f}", "extra traffic")
    for name, value in wanted.items():
        compare(f"{name} after three steps of Adam", ours[name], value, lambda got: LATER_STEPS)


NO_STAGE = "is missing from the class: clipping and checkpoints go by it, and would take each slice for all there is"
LATER_STEPS = "the first step is right, a later one is not: nothing may be kept from one step to the next"
TOO_MUCH = {
    "parameters": "a copy of the slice is kept besides the full parameters: give the optimizer views of them",
    "gradients": "full gradients are still there: after the reduction, keep only this rank's shard",
    "optimizer": "the optimizer keeps state for more than this rank's slice",
}


def _train(cls: type, world: World) -> tuple[dict[str, Tensor], dict[str, int], float]:
    """Parameters after three steps, model states after the last backward, bytes sent."""
    model = make_model()
    zero = cls(model, units=[Block])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    with world.record() as calls:
        for step in range(3):
            optimizer.zero_grad()
            (model(INPUT * (1.0 + world.rank + step)) ** 2).mean().backward()
            held = model_states(zero, optimizer)
            optimizer.step()
        with torch.no_grad():
            model(INPUT)
    full = {
        name: view.clone()
        for unit in zero.units
        for name, view in zip(unit.names, unit.layout.views(unit.full.detach()), strict=True)
    }
    return full, held, sum(call.sent for call in calls)


ZERO1_STUB = '''\
import torch
import torch.distributed as dist
import zerolab
from torch import Tensor
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """What the optimizer updates: this rank's slice of each parameter, nothing else.

        unit.keep_shard() makes this rank's shard of the flat parameters, (S,), the
        unit.master, and returns it. unit.layout.slices(shard, rank) returns a view for each
        parameter, of the part that `rank` owns.
        """
        raise Todo("04.2")

    def reduce(self, unit: Unit):
        """Leave in unit.bucket.grad, (S,), the mean of this rank's shard over the ranks.

        The gradients are in unit.bucket.full, (N * S,); unit.layout.shard(flat, self.rank)
        is a view of the shard. self.comm.reduce_scatter(output, input, unit.name) starts
        what you wrote in 04.1: return it, since it has a wait(), or None if the mean is
        already there.
        """
        raise Todo("04.2")

    def after_step(self, unit: Unit) -> None:
        """The optimizer has changed unit.master, (S,), which differs on every rank.

        Forward reads unit.full, (N * S,).
        self.comm.all_gather(output, input, unit.name) starts an all-gather.
        """
        raise Todo("04.2")
'''

ZERO1 = """\
import zerolab
from torch import Tensor
from zerolab import Unit


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit: Unit):
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)
        return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)

    def after_step(self, unit: Unit) -> None:
        self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()
"""


NOT_RETURNED = "the functions of torch.distributed return None: the result is in the tensor that you pass to be filled"
SIZES = (
    "the full tensor and a shard were mixed up: reduce_scatter fills a shard from a full tensor, all_gather a full "
    "tensor from shards, and the output comes first"
)
PENDING = "async_op=True returns something to wait for; the result is in the tensor that you pass, once wait() returns"

ERRORS = {
    "left no unit.bucket.grad": "reduce() was not called, or did not leave the mean in unit.bucket.grad",
    "increment_version": f"unit.full is no tensor any more: gather into it ({NOT_RETURNED})",
    "object has no attribute 'wait'": "reduce() returns what has a wait(), as self.comm.reduce_scatter() returns it, "
    "or None if the mean is there already",
    "Boolean value of Tensor": "the tensor comes first, then the rank: layout.slices(shard, rank)",
    "'int' object is not subscriptable": "the tensor comes first, then the rank: layout.shard(flat, rank)",
    "was replaced after sharding": "what the optimizer updates is not in unit.master: it got copies or slices of "
    "unit.full, or unit.master was replaced later",
    "storage of size": "layout.views() cuts a full tensor, (N * S,), into parameters; layout.slices(shard, rank) cuts "
    "a shard, (S,), into slices",
    "modified by an inplace operation": "unit.full was written to between forward and backward: "
    "after_step(unit) gathers that unit, after the step, and no other",
    "refer to a single memory location": "unit.full was overwritten with this rank's shard, which is a part of it: "
    "self.comm.all_gather() puts every rank's shard in its place",
    "The size of tensor": "the full tensor, (N * S,), and a shard, (S,), were mixed up",
    "are not the shard of": SIZES,
    "is invalid for input of size": "written for one number of ranks or elements: view(N, -1) has a row for each rank, "
    "whatever N and S are",
    "name 'reduce_scatter_mean' is not": "each exercise is a file of its own: use self.comm.reduce_scatter(), or copy "
    "your function into this cell",
    "'Pending' object": "reduce_scatter() returns something to wait for: return that; unit.bucket.grad is its output",
    "out=list": "layout.slices() is a list of views; unit.bucket.grad is one flat tensor, so use layout.shard()",
    "'NoneType' object is not iterable": "optimizer_params() returns nothing: `return` is missing",
    "zip() argument 2 is": "optimizer_params() must return one tensor for each parameter, empty ones too, as "
    "layout.slices(shard, rank) does",
    "'NoneType' object has no attribute": f"outside of backward unit.bucket.grad is None, and {NOT_RETURNED}",
    "Expected parameter `tensor` of type torch.Tensor": "there is no tensor here: in reduce() the gradients "
    "are in unit.bucket.full",
    "must be Tensor, not NoneType": "there is no tensor here: after a step unit.bucket.grad may be gone; what travels "
    "is unit.master",
    "in->size == out->size": "`received` needs room for a shard from every rank: as many elements as `flat`",
    "stuck in reduce: not finished": "all ranks must pass the same dst to dist.reduce(): make one call for each owner",
}
FUNCTION_ERRORS = {
    "'NoneType' object": NOT_RETURNED,
    "not NoneType": NOT_RETURNED,
    "'NoneType' and": NOT_RETURNED,
    "Work' object": PENDING,
    "ReduceOp.AVG": "gloo has no AVG: sum, then divide by the number of ranks",
}
FIRST_RANK = "the result reached rank 0 only: each rank needs the mean of its own shard"

EXERCISES = [
    Exercise(
        id="04.1",
        title="the mean of your shard",
        difficulty=1,
        section="Half an all-reduce",
        check=check_reduce_scatter,
        stub=REDUCE_SCATTER_STUB,
        reference=REDUCE_SCATTER,
        hints=(
            "received = torch.empty_like(flat), then dist.all_to_all_single(received, flat): now `received` holds "
            "every rank's contribution to *this* rank's shard, in rank order.",
            "received.view(world_size, -1) has a row for each rank. You want the mean over the rows.",
            "return received.view(world_size, -1).sum(dim=0) / world_size",
        ),
        exports=("reduce_scatter_mean",),
        first_rank_only=FIRST_RANK,
        errors=FUNCTION_ERRORS | ERRORS,
    ),
    Exercise(
        id="04.2",
        title="ZeRO-1",
        difficulty=2,
        section="ZeRO-1 as a class",
        check=check_zero1,
        stub=ZERO1_STUB,
        reference=ZERO1,
        hints=(
            "optimizer_params(): return unit.layout.slices(unit.keep_shard(), self.rank).",
            "reduce(): unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank), then return "
            "self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name).",
            "after_step(): self.comm.all_gather(unit.full, unit.master, unit.name).wait(). Without the wait, forward "
            "may read values that have not arrived.",
        ),
        exports=("MyZero1",),
        extends="Zero1",
        first_rank_only=FIRST_RANK,
        errors=ERRORS,
    ),
]
