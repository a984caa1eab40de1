"""Lesson 06: parameters that come and go, first in a bare tensor, then in the forward of ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD

import zerolab
from zerolab.engine.slices import to_local
from zerolab.engine.unit import FullState, Unit
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.lesson04 import FUNCTION_ERRORS, TOO_SOON
from zerolab.lab.exercises.checks.training import NO_ROOT, check_cases
from zerolab.lab.exercises.checks.values import compare
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic
from zerolab.measure.traffic import Ledger, ledger

SHARD = 6  # elements of each rank's shard, in 06.1
SIZE_0 = "out of bounds for storage of size 0"
OTHER_SIZE = "out of bounds for storage of size"


# ---------------------------------------------------------------------- 06.1


def check_gather(answer: Any, world: World) -> None:
    N = world.world_size
    full = torch.full((N * SHARD,), 0.5)
    views = [full[:5], full[5 : N * SHARD].view(1, -1)]
    storage, size = full.untyped_storage(), full.nbytes

    with world.record() as calls:
        answer.release(full)
    check_released(full, views[0], size, "after release()")
    if calls:
        raise Wrong(
            f"release() calls {calls[0].op}", "release() concerns this rank alone: it needs nothing from the others"
        )
    for times, when in ((1.0, "after release() and gather()"), (-1.0, "after another release() and gather()")):
        if times < 0:
            answer.release(full)
            check_released(full, views[0], size, "after a second release()")
        check_gathering(answer, world, full, views, times, when)
    # The optimizer may change the shards without a release in between.
    check_gathering(answer, world, full, views, 2.0, "after a gather() of new values, without a release() before")
    if full.untyped_storage()._cdata != storage._cdata:
        raise Wrong("full has a new storage", "shrink and grow the storage it has: resize_")
    if N > 1:  # so that a larger mistake is told first
        check_further_units(answer, world)


def check_further_units(answer: Any, world: World) -> None:
    """Two units by turns, of other lengths and dtypes; and nothing is kept of them elsewhere."""
    N = world.world_size
    for dtype, lengths in ((torch.float32, (3, SHARD)), (torch.bfloat16, (2, 5)), (torch.float64, (1, 4))):
        short = str(dtype).removeprefix("torch.")
        shards = [
            [torch.arange(1.0 + i, 1 + i + n, dtype=dtype) / (3 + r) for r in range(N)] for i, n in enumerate(lengths)
        ]
        fulls = [torch.full((N * n,), 0.5, dtype=dtype) for n in lengths]
        when = f"two units by turns, in {short}"
        with world.record() as calls, values.in_case(answer, when, FIRST_UNIT_ONLY, ERRORS):
            for full in fulls:
                answer.release(full)
            for full, parts in zip(fulls[::-1], shards[::-1], strict=True):
                answer.gather(full, parts[world.rank])
        for full, parts in zip(fulls, shards, strict=True):
            if (held := full.untyped_storage().size()) != full.nbytes:
                likely = f"resize_ counts bytes, and an element of {short} has {dtype.itemsize}: element_size() says so"
                raise Wrong(f"{when}: the storage of full has {held} bytes, not {full.nbytes}", likely)
            if not torch.equal(full, torch.cat(parts)):
                rounded = dtype == torch.float64 and torch.equal(full.float(), torch.cat(parts).float())
                raise Wrong(f"{when}: full has wrong values", AS_IT_IS if rounded else FIRST_UNIT_ONLY)
            answer.release(full)
        check_traffic(calls, sum(full.nbytes for full in fulls), N, f"{when}: ")
    for name, value in vars(answer).items():
        if not name.startswith("__") and (held := bytes_in(value)):
            raise Wrong(f"after release(), the name {name} still holds {held} bytes", KEPT_ELSEWHERE)


def bytes_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(map(bytes_in, value.values()))
    return sum(map(bytes_in, value)) if isinstance(value, (list, tuple)) else 0


FIRST_UNIT_ONLY = "right for one unit only: lengths and dtypes differ, and nothing may be kept from an earlier call"
AS_IT_IS = "it became float32 on the way: a shard travels in its own dtype, into a tensor of that dtype"
KEPT_ELSEWHERE = "a copy was kept outside of `full`: release() is there to give the memory back"


def check_released(full: Tensor, view: Tensor, size: int, when: str) -> None:
    held = view.untyped_storage().size()
    if held == 0:
        return
    if not full.numel() and full.untyped_storage()._cdata == view.untyped_storage()._cdata:
        likely = (
            "full.resize_(0) changes the tensor's shape and keeps its memory: use full.untyped_storage().resize_(0)"
        )
        raise Wrong(f"{when} full has no elements, but a view of it still holds {held} of {size} bytes", likely)
    if full.untyped_storage()._cdata != view.untyped_storage()._cdata:
        likely = "`full` got new memory, but its views hold on to the old: shrink the storage itself"
    elif held < size:
        likely = "only part of it was released: resize_(0), since the argument is the new size of the storage, in bytes"
    elif not view.any():
        likely = "nothing was released (zeros take as much memory as other numbers, and del only deletes a name)"
    else:
        likely = "nothing was released: full.untyped_storage().resize_(0) does it, for full and all its views"
    raise Wrong(f"{when} a view of full still holds {held} of {size} bytes", likely)


def check_gathering(answer: Any, world: World, full: Tensor, views: list[Tensor], times: float, when: str) -> None:
    N = world.world_size
    bases = [times * values.base(SHARD, r) for r in range(N)]
    shard = bases[world.rank].clone()
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        returned = answer.gather(full, shard)
    held = views[0].untyped_storage().size()
    if held == 0 and full.untyped_storage()._cdata != views[0].untyped_storage()._cdata:
        likely = "the values are in new memory, which the views know nothing about: fill the storage they share"
        raise Wrong(f"{when} the views of full have no memory", likely)
    if held != full.numel() * 4:
        likely = "resize_ counts bytes: numel() * element_size()" if held else "the storage was not grown again"
        raise Wrong(f"{when} the storage of full has {held} bytes, not {full.numel() * 4}", likely)
    if not torch.equal(shard, bases[world.rank]):
        raise Wrong(f"{when} the rank's own shard has changed", "gather() only reads the shard; it writes to full")

    def explain(got: Tensor) -> str:
        if lost := world.unwaited(calls):
            return f"a forgotten wait: {lost}"
        parts = list(got.detach().chunk(N))
        if all(torch.equal(part, shard) for part in parts) and N > 1 and not calls:
            return "every part is this rank's own shard: nothing was sent, and the others' shards are not here"
        if all(torch.equal(part, bases[0]) for part in parts) and N > 1:
            return "every part is rank 0's shard: a broadcast, but each rank must contribute its own"
        if isinstance(returned, Tensor):
            return "gather() returned its result instead of writing it to `full`, whose views need it"
        if not calls:
            return "nothing was sent: these are old values, or whatever was in that memory"
        if got.isnan().any() and any(call.asynchronous for call in calls):
            return TOO_SOON
        if torch.equal(got.sort().values, torch.cat(bases).sort().values):
            return "all elements are there, but not in rank order: the shards belong end to end"
        if all(any(torch.equal(part, base) for base in bases) for part in parts):
            return "the same shard is in several parts: each rank's shard needs a tensor of its own to arrive in"
        if any(call.op == "all_reduce" for call in calls):
            return "all_reduce adds up all of `full`, with whatever was in its new memory: gather the shards instead"
        if any(call.op == "broadcast" for call in calls):
            return "a broadcast sends what one rank has in `full`: at most its own shard, and each must send its own"
        if any(call.op == "all_gather" for call in calls):
            return "the shards were received, but not into `full` (`full = ...` only binds the name to another tensor)"
        return ""

    compare(f"full, {when}", full.detach(), torch.cat(bases), explain)
    check_traffic(calls, full.nbytes, N)
    if N > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and would be wrong on a slower network")


def check_traffic(calls: list[Traffic], nbytes: int, N: int, when: str = "") -> None:
    moved, allowed = sum(call.sent for call in calls), nbytes * (N - 1) / N
    if moved > allowed + len(calls):  # each call's bytes are rounded up
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        times_as_much = f"{moved / allowed:.2f} x what an all-gather moves" if allowed else "with nobody to send to"
        likely = f"extra traffic ({ops}): one all-gather is enough, in the dtype of the shard"
        raise Wrong(f"{when}{moved:,.0f} bytes were sent per rank, {times_as_much}", likely)


GATHER_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def release(full: Tensor) -> None:
    """Let the memory of `full` go. It and its views stay, without memory until gather()."""
    raise Todo("06.1")


def gather(full: Tensor, shard: Tensor) -> None:
    """Fill `full` with the shards of all ranks, in rank order.

    If its memory was released, allocate it again first.
    full: flat, N times as long as `shard`, which is this rank's part. Views of `full` must
        see the values.
    """
    raise Todo("06.1")
'''

GATHER = """\
import torch.distributed as dist
from torch import Tensor


def release(full: Tensor) -> None:
    full.untyped_storage().resize_(0)


def gather(full: Tensor, shard: Tensor) -> None:
    full.untyped_storage().resize_(full.numel() * full.element_size())
    dist.all_gather(list(full.chunk(dist.get_world_size())), shard)
"""


# ---------------------------------------------------------------------- 06.2, and what 07.1 also needs


class Block(nn.Module):
    """A unit of the check's model. It calls `look` in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.look: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return self.linear(x)


class Model(nn.Module):
    """Four blocks between two layers of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(3, 1)
        self.look: Callable[[], None] = lambda: None
        with torch.no_grad():
            for param in self.parameters():
                param.copy_((torch.arange(param.numel()) % 3 - 0.5).view(param.shape) / 4)

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.look()
        return self.last(x)


def inputs(world: World, step: int) -> Tensor:
    return torch.tensor([[1.0, 2.0], [world.rank + 1.0, step - 1.0]])


def full_bytes(unit: Unit) -> int:
    """Bytes that the full parameters of `unit` take now."""
    return unit.full.untyped_storage().size()


def in_words(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


class Forward(zerolab.Zero2):
    """The forward half of ZeRO-3, with which answers to 07.1 are checked."""

    stage = 3

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        unit.gather()

    def post_forward(self, unit: Unit) -> None:
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()


class Backward(zerolab.Zero2):
    """The backward half of ZeRO-3, with which answers to 06.2 are checked."""

    stage = 3

    def pre_backward(self, unit: Unit) -> None:
        unit.gather()

    def post_backward(self, unit: Unit) -> None:
        unit.release()
        super().post_backward(unit)

    def after_step(self, unit: Unit) -> None:
        unit.release()


def check_class(cls: Any, name: str, methods: tuple[str, ...]) -> None:
    if not isinstance(cls, type) or not issubclass(cls, zerolab.Zero2):
        raise Wrong(f"{name} is not a subclass of zerolab.Zero2", f"it must begin with `class {name}(zerolab.Zero2):`")
    for method in methods:
        if getattr(cls, method) in (getattr(zerolab.Zero2, method), getattr(zerolab.Zero3, method)):
            raise Wrong(f"{name}.{method} is the package's", f"the class inherits {method}(): write your own")


def train(zero: zerolab.Zero2, world: World, steps: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of each step, and this rank's parameters after it: for a right answer, the bits that Zero3 gives."""
    outputs, params = [], []
    optimizer = SGD(zero.model.parameters(), lr=2.0**-6, momentum=0.5)
    for step in range(steps):
        output = zero.model(inputs(world, step))
        (output * output).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs += [output.detach().clone(), zero.model(inputs(world, step))]
        params += [to_local(param).clone() for param in zero.model.parameters()]
    return outputs, params


def check_training(zero: zerolab.Zero2, world: World, explain: Callable[[], str] = lambda: "") -> None:
    """Raises Wrong unless `zero` trains as the package's Zero3 does, bit for bit."""
    outputs, params = train(zero, world)
    same_outputs, same_params = train(zerolab.Zero3(Model(), units=[Block]), world)
    for i, (got, want) in enumerate(zip(outputs, same_outputs, strict=True)):
        if not torch.equal(got, want):
            when = ("in training", "in evaluation after the optimizer's step")[i % 2]
            seen = f"the model's output {when}, step {i // 2 + 1}, is {got[0].item():g}, expected {want[0].item():g}"
            raise Wrong(seen, explain())
    for i, (got, want) in enumerate(zip(params, same_params, strict=True)):
        if not torch.equal(got, want):
            raise Wrong(f"parameter {i} differs from what zerolab.Zero3 computes", explain())


@contextmanager
def guarded() -> Iterator[None]:
    """Raises Wrong if the full parameters are released while the shard is a view of them: reading it would crash."""
    original = Unit.release

    def release(unit: Unit) -> None:
        if unit.shard.untyped_storage()._cdata == unit.full.untyped_storage()._cdata:
            likely = (
                "the shard goes with the full parameters: give it its own memory first, unit.shard = unit.shard.clone()"
            )
            raise Wrong(f"{unit.name}: the full parameters were released while unit.shard is a view of them", likely)
        original(unit)

    with patch.object(Unit, "release", release):
        yield


def check_construction(zero: zerolab.Zero2) -> None:
    for unit in zero.units:
        own = unit.shard.untyped_storage()
        if own._cdata == unit.full.untyped_storage()._cdata:
            likely = "give the shard its own memory, unit.shard = unit.shard.clone(), then unit.release()"
            raise Wrong(f"{unit.name}: after optimizer_params() unit.shard is still a view of unit.full", likely)
        if own.size() > (needed := unit.layout.shard_size * unit.full.element_size()):
            likely = (
                "only this rank's part may stay: unit.shard.clone(). (A slice of a copy keeps all of the copy, and "
                "copy.deepcopy() copies all that a view is a view of)"
            )
            raise Wrong(f"{unit.name}: unit.shard keeps {own.size()} bytes, and a shard has {needed}", likely)
        check_flag(unit)
        if held := full_bytes(unit):
            likely = "optimizer_params() does not release the full parameters: unit.release()"
            raise Wrong(f"{unit.name} holds {held} bytes of full parameters before the first forward", likely)
        for tensor, what in ((unit.master, "unit.master"), *((param, "a parameter") for param in unit.params)):
            if tensor.untyped_storage()._cdata != own._cdata:
                likely = "the optimizer must see slices of the shard: end with return super().optimizer_params(unit)"
                raise Wrong(f"{unit.name}: {what} is not a view of unit.shard", likely)
        seen, owned = sum(to_local(param).numel() for param in unit.params), elements_owned(unit)
        if seen != owned:
            likely = "what optimizer_params() returns does not cover unit.shard: return super().optimizer_params(unit)"
            raise Wrong(f"{unit.name}: the optimizer sees {seen} elements, but this rank owns {owned}", likely)

    for unit, same in zip(zero.units, zerolab.Zero3(Model(), units=[Block]).units, strict=True):
        if not torch.equal(unit.shard, same.shard):
            likely = "the values must survive: copy them with unit.shard.clone() before anything is released"
            wrong = f"{unit.name}: unit.shard does not hold this rank's part of the parameters"
            raise Wrong(wrong, likely, values_differ=True)


def check_flag(unit: Unit) -> None:
    """Raises Wrong if the unit does not know that its memory was released."""
    if unit.gathered and not full_bytes(unit):
        likely = "use unit.release(): it also records that the memory is gone, so that gather() allocates it again"
        raise Wrong(f"{unit.name} has no memory, but is marked as gathered", likely)


def elements_owned(unit: Unit) -> int:
    """Elements in this rank's shard, without padding."""
    bounds = [unit.layout.owned(slot, unit.comm.rank) for slot in unit.layout.slots]
    return sum(stop - start for start, stop in bounds)


def look(zero: zerolab.Zero2, unit: Unit, book: Ledger, world: World) -> None:
    """Runs in the middle of the forward of `unit`: it must be gathered, and hardly anything else."""
    if not full_bytes(unit):
        was_there = any(call.op == "all_gather" and call.unit == unit.name for call in book.calls)
        likely = f"it was gathered, but released before its forward was over. {ALONE}" if was_there else NOT_GATHERED
        raise Wrong(f"in the forward of {unit.name} its full parameters have no memory", likely)
    check_finished(unit, "in its forward")
    blocks = [other for other in zero.units if other not in zero.root]
    gathered = [other for other in blocks if full_bytes(other)]
    if len(gathered) > 2:
        seen = f"in the forward of {unit.name} {in_words([other.name for other in gathered])} are gathered"
        place = blocks.index(unit) if unit in blocks else 0
        later = [other for other in gathered if blocks.index(other) > place]
        raise Wrong(seen, ALL_AT_ONCE if len(later) > 1 else NEVER_RELEASED)
    world.came_on()


def forward(zero: zerolab.Zero2, world: World) -> Tensor:
    """Run a forward, and raise Wrong if units are gathered that should not be, or the other way round."""
    blocks = [unit for unit in zero.units if unit not in zero.root]
    needed = [unit for unit in zero.units if not unit.gathered]
    with ledger(zero) as book, world.record() as traffic:
        model: Any = zero.model
        model.look = partial(look, zero, zero.root[0], book, world)
        for module, unit in zip(model.blocks, blocks, strict=True):
            module.look = partial(look, zero, unit, book, world)
        output = zero.model(inputs(world, 0))
    for unit in zero.units:
        check_flag(unit)
        calls = [call for call in book.calls if call.unit == unit.name and not call.control]
        if len(calls) > (unit in needed):
            seen = f"{unit.name}: {values.counted(len(calls), 'collective')} in one forward"
            raise Wrong(seen, "one all-gather is enough, and none if the unit is gathered: unit.gathered says so")
    sent, N = sum(call.sent for call in traffic), world.world_size
    allowed = 4 * sum(unit.layout.size for unit in needed) * (N - 1) / N
    if sent > allowed + OF_THE_ENGINE * len(traffic):
        ops = ", ".join(dict.fromkeys(call.in_words for call in traffic))
        likely = f"extra traffic ({ops}): one all-gather of each unit is enough, and none of one that is gathered"
        raise Wrong(f"{sent:,.0f} bytes were sent per rank in one forward, {allowed:,.0f} are needed", likely)
    kept = [unit.name for unit in blocks if full_bytes(unit)]
    if kept:
        are = "is" if len(kept) == 1 else "are"
        raise Wrong(f"when forward returns, {in_words(kept)} {are} still gathered", NEVER_RELEASED)
    return output


OF_THE_ENGINE = 8  # bytes at most of a call in which the ranks agree on what to gather
ALONE = "Each call releases `unit` alone"
NOT_FINISHED = "started without waiting: start_gather() returns at once; gather() waits until the values are there"


def check_finished(unit: Unit, when: str) -> None:
    if unit._state is FullState.GATHERING:
        raise Wrong(f"{unit.name} is still being gathered {when}", NOT_FINISHED)


NOT_GATHERED = (
    "it was not gathered: pre_forward() is called before each forward of a unit, also under no_grad and in eval mode, "
    "and must gather it"
)
NEVER_RELEASED = "gathered but never released: post_forward() must release the full parameters of each block"
ALL_AT_ONCE = "all units are gathered at once, so all Ψ parameters are in memory: gather only the unit that runs now"


def check_forward(answer: Any, world: World) -> None:
    check_class(answer.MyZero3Forward, "MyZero3Forward", ("optimizer_params", "pre_forward", "post_forward"))
    cls = type("Zero3", (answer.MyZero3Forward, Backward), {"stage": 3})
    with guarded():
        zero = cls(Model(), units=[Block])
    check_construction(zero)
    root = zero.root[0]

    output = forward(zero, world)
    compare("the model's output", output.detach(), Model()(inputs(world, 0)).detach())
    if not full_bytes(root):
        likely = (
            "backward begins with the root: keep it while gradients are enabled, which saves one gather. (self.root is "
            "a list: ask `unit in self.root`)"
        )
        raise Wrong("when forward returns, the root has been released", likely)
    zero.model.eval()
    forward(zero, world)  # with the root still there
    output.sum().backward()
    for trains in (False, True):
        zero.model.train(trains)
        with torch.no_grad():
            forward(zero, world)
        if held := full_bytes(root):
            likely = "under no_grad no backward follows, so the root must go too: check torch.is_grad_enabled()"
            raise Wrong(f"after a forward under no_grad the root still holds {held} bytes of full parameters", likely)
    check_training(cls(Model(), units=[Block]), world)
    check_cases(answer, cls, world, FORWARD_ERRORS)


FORWARD_STUB = '''\
import torch
import zerolab
from torch import Tensor
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """Runs once, when the engine is built: from here on this rank keeps only its shard.

        So far unit.shard is a view of unit.full. Give it its own memory, release the full
        parameters, then return what ZeRO-2 returns: slices of the shard.
        """
        raise Todo("06.2")

    def pre_forward(self, unit: Unit) -> None:
        """Runs before the forward of `unit`, which needs its full parameters."""
        raise Todo("06.2")

    def post_forward(self, unit: Unit) -> None:
        """Runs after it: release them.

        Not if `unit` is in self.root and a backward can follow.
        """
        raise Todo("06.2")
'''

FORWARD = """\
import torch
import zerolab
from torch import Tensor
from zerolab import Unit


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        unit.shard = unit.shard.clone()
        unit.release()
        return super().optimizer_params(unit)

    def pre_forward(self, unit: Unit) -> None:
        unit.gather()

    def post_forward(self, unit: Unit) -> None:
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()
"""


DIED = "most likely it used a tensor without memory: some operations do not check, and read address 0"

ERRORS = {
    SIZE_0: "the memory was released and is still gone: grow the storage again before anything uses its views",
    OTHER_SIZE: "too small: resize_ counts bytes, and all ranks' shards must fit, full.numel() * full.element_size()",
    "is invalid for input of size": "`full` has a part for each rank, and the check runs with 1, 2, 3 and 4 ranks",
    "`tensor_list` of type List": "all_gather takes a list of tensors, one for each rank: list(full.chunk(N))",
    "invalid output tensor list": "all_gather takes as many tensors as there are ranks: dist.get_world_size()",
    "SIGSEGV": DIED,
} | FUNCTION_ERRORS

MEMBERS = "a Unit has gather() and release(); the rest is on the engine, self: super()'s methods, self.reduce(unit)"
ITS_OWN_FILE = "each exercise is a file of its own; here they are methods of the unit: unit.gather(), unit.release()"
ITS_ARGUMENT = "the engine passes the unit: def pre_forward(self, unit), and so on"

BY_HAND = {
    "modified by an inplace operation": "autograd took the gather for a change of the parameters: fill unit.full.data, "
    "which it does not watch, or call unit.gather()",
    "a leaf Variable that requires grad": "autograd watches these parameters: fill unit.full.data, which it does not "
    "watch, or call unit.gather()",
    "list index out of range": NO_ROOT,
    "'list' object has no attribute 'gather'": NO_ROOT,
    "'list' object has no attribute 'release'": NO_ROOT,
    "'NoneType' object has no attribute": "unit.full, unit.shard and unit.master stay tensors: unit.release() lets the "
    "memory go, and keeps the tensor",
}

FORWARD_ERRORS = BY_HAND | {
    "'Unit' object has no attribute": MEMBERS,
    "takes 1 positional argument but 2 were given": ITS_ARGUMENT,
    "name 'gather' is not defined": ITS_OWN_FILE,
    "name 'release' is not defined": ITS_OWN_FILE,
    "zip() argument 2 is": "return a slice for each parameter: return super().optimizer_params(unit)",
    "SIGSEGV": DIED,
    SIZE_0: "full parameters were used while they had no memory: gather in pre_forward, release in post_forward",
    "'NoneType' object is not iterable": "optimizer_params() returns nothing: `return` is missing",
    "argument 1 must be an iterable, not NoneType": "optimizer_params() returns nothing: `return` is missing",
}

EXERCISES = [
    Exercise(
        id="06.1",
        title="gather and release",
        difficulty=1,
        section="Memory that comes and goes",
        check=check_gather,
        stub=GATHER_STUB,
        reference=GATHER,
        hints=(
            "A tensor and its views share one storage, full.untyped_storage(), and the memory belongs to that.",
            "storage.resize_(0) lets the memory go; storage.resize_(bytes) allocates new memory, not initialised.",
            "gather(): resize_ to full.numel() * full.element_size(), then dist.all_gather into "
            "list(full.chunk(dist.get_world_size())).",
        ),
        exports=("gather", "release"),
        first_rank_only="only rank 0 has all the shards: that is a gather; every rank needs them, so all_gather",
        errors=ERRORS,
    ),
    Exercise(
        id="06.2",
        title="the forward of ZeRO-3",
        difficulty=3,
        section="ZeRO-3's forward as a class",
        check=check_forward,
        stub=FORWARD_STUB,
        reference=FORWARD,
        hints=(
            "A unit has what you wrote in 06.1: unit.gather() and unit.release(). gather() sends unit.shard.",
            "optimizer_params(): unit.shard = unit.shard.clone(), then unit.release(), then return "
            "super().optimizer_params(unit). Released before the clone, the shard would go too.",
            "post_forward(): if unit not in self.root or not torch.is_grad_enabled(): unit.release()",
        ),
        exports=("MyZero3Forward",),
        first_rank_only="every rank keeps rank 0's part: unit.shard is this rank's, the one with the number unit.rank",
        extends="Zero3",
        errors=FORWARD_ERRORS,
    ),
]
