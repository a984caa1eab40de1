"""Lesson 06: parameters that come and go, first in a bare tensor, then in the forward of ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import zerolab
from zerolab.engine.unit import Unit
from zerolab.lab.exercises.catalogue import Exercise, World, Wrong, compare, edit
from zerolab.lab.exercises.checks import values
from zerolab.measure.ledger import Ledger, ledger

SHARD = 6  # elements of each rank's shard, in 06.1
SIZE_0 = "out of bounds for storage of size 0"
OTHER_SIZE = "out of bounds for storage of size"


# ---------------------------------------------------------------------- 06.1


def check_gather(answer: Any, world: World) -> None:
    N = world.world_size
    whole = torch.full((N * SHARD,), 0.5)
    views = [whole[:5], whole[5 : N * SHARD].view(1, -1)]
    storage, size = whole.untyped_storage(), whole.nbytes

    answer.release(whole)
    check_released(whole, views[0], size, "after release()")
    for times, when in ((1.0, "after release() and gather()"), (-1.0, "after another release() and gather()")):
        if times < 0:
            answer.release(whole)
            check_released(whole, views[0], size, "after a second release()")
        check_gathering(answer, world, whole, views, times, when)
    # The optimizer may change shards that are not released in between.
    check_gathering(answer, world, whole, views, 2.0, "after a gather() of new values, without a release() before")
    if whole.untyped_storage()._cdata != storage._cdata:
        raise Wrong("whole has another storage than before", "shrink and grow the storage that is there: resize_")


def check_released(whole: Tensor, view: Tensor, size: int, when: str) -> None:
    held = view.untyped_storage().size()
    if held == 0:
        return
    if not whole.numel() and whole.untyped_storage()._cdata == view.untyped_storage()._cdata:
        likely = "whole.resize_(0) changes the tensor's shape and keeps its memory: whole.untyped_storage().resize_(0)"
        raise Wrong(f"{when} whole has no elements, and a view of it still holds {held} of {size} bytes", likely)
    if whole.untyped_storage()._cdata != view.untyped_storage()._cdata:
        likely = "`whole` was given other memory, but its views hold on to the old: shrink the storage itself"
    elif held < size:
        likely = "only a part was let go: resize_(0), since the size is that of the whole storage, in bytes"
    elif not view.any():
        likely = "nothing was let go (zeros take as much memory as other numbers, and del only deletes a name)"
    else:
        likely = "nothing was let go: whole.untyped_storage().resize_(0) does, for whole and all its views"
    raise Wrong(f"{when} a view of whole still holds {held} of {size} bytes", likely)


def check_gathering(answer: Any, world: World, whole: Tensor, views: list[Tensor], times: float, when: str) -> None:
    N = world.world_size
    bases = [times * values.base(SHARD, r) for r in range(N)]
    shard = bases[world.rank].clone()
    with world.record() as calls:
        returned = answer.gather(whole, shard)
    held = views[0].untyped_storage().size()
    if held == 0 and whole.untyped_storage()._cdata != views[0].untyped_storage()._cdata:
        likely = "the values are in new memory, of which the views know nothing: fill the storage that is there"
        raise Wrong(f"{when} the views of whole have no memory", likely)
    if held != whole.numel() * 4:
        likely = "resize_ counts bytes: numel() * element_size()" if held else "the storage was not made large again"
        raise Wrong(f"{when} the storage of whole has {held} bytes, not {whole.numel() * 4}", likely)
    if not torch.equal(shard, bases[world.rank]):
        raise Wrong(f"{when} the rank's own shard has changed", "gather() reads the shard and writes to whole")

    def explain(got: Tensor) -> str:
        if lost := world.unwaited(calls):
            return f"a forgotten wait: {lost}"
        parts = list(got.detach().chunk(N))
        if all(torch.equal(part, bases[0]) for part in parts) and N > 1:
            return "every part is rank 0's shard: a broadcast, where each rank's own was asked"
        if isinstance(returned, Tensor):
            return "gather() returned its result, where it should fill `whole`, whose views wait for it"
        if not calls:
            return "nothing was sent: these are old values, or what happened to be in that memory"
        if all(any(torch.equal(part, base) for base in bases) for part in parts):
            return "all shards are there, but not in the order of the ranks"
        if any(call.op == "all_gather" for call in calls):
            return "the shards were received, but not into `whole` (`whole = ...` only gives a name to another tensor)"
        return ""

    compare(f"whole, {when}", whole.detach(), torch.cat(bases), explain)
    moved, allowed = sum(call.sent for call in calls), 4 * whole.numel() * (N - 1) / N
    if moved > allowed:
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        times_as_much = f"{moved / allowed:.2f} x what an all-gather moves" if allowed else "and there is nobody"
        likely = f"extra traffic ({ops}): one all-gather is enough"
        raise Wrong(f"{moved:,.0f} bytes were sent per rank, {times_as_much}", likely)
    if N > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and will not be on a slower network")


GATHER_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def release(whole: Tensor) -> None:
    """Let the memory of `whole` go. The tensor and its views stay, and have no memory until gather()."""
    raise Todo("06.1")


def gather(whole: Tensor, shard: Tensor) -> None:
    """Fill `whole` with the shards of all ranks, in rank order; if its memory was let go, get it again first.

    whole: flat, N times as long as `shard`, this rank's part. Views of `whole` must see the values.
    """
    raise Todo("06.1")
'''

GATHER = """\
import torch.distributed as dist
from torch import Tensor


def release(whole: Tensor) -> None:
    whole.untyped_storage().resize_(0)


def gather(whole: Tensor, shard: Tensor) -> None:
    whole.untyped_storage().resize_(whole.numel() * whole.element_size())
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
"""

GATHER_ASYNC = """\
import torch
import torch.distributed as dist


def release(whole):
    storage = whole.untyped_storage()
    if storage.size() > 0:
        storage.resize_(0)


def gather(whole, shard):
    storage = whole.untyped_storage()
    if storage.size() == 0:
        storage.resize_(whole.nbytes)
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard, async_op=True).wait()
    torch.cat(parts, out=whole)
"""

GATHER_BY_BROADCASTS = """\
import torch.distributed as dist


def release(whole):
    whole.untyped_storage().resize_(0)


def gather(whole, shard):
    whole.untyped_storage().resize_(whole.nbytes)
    for rank, part in enumerate(whole.split(len(shard))):
        if rank == dist.get_rank():
            part.copy_(shard)
        dist.broadcast(part, src=rank)
"""

_RESIZE = "whole.untyped_storage().resize_(whole.numel() * whole.element_size())"
_RELEASE = "whole.untyped_storage().resize_(0)"
_ALL_GATHER = "dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)"

GATHER_MUTANTS = {
    "releases nothing": (edit(GATHER, _RELEASE, "del whole"), "nothing was let go"),
    "writes zeros": (edit(GATHER, _RELEASE, "whole.zero_()"), "zeros take as much memory"),
    "gives it another memory": (
        edit(GATHER, _RELEASE, "whole.data = whole.new_empty(0)", _RESIZE, "whole.data = whole.new_empty(0)"),
        "its views hold on to the old",
    ),
    "gathers elsewhere": (
        edit(
            GATHER,
            _RESIZE,
            "parts = [shard.clone() for _ in range(dist.get_world_size())]",
            _ALL_GATHER,
            "dist.all_gather(parts, shard)\n    import torch\n    whole.data = torch.cat(parts)",
        ),
        "of which the views know nothing",
    ),
    "does not get the memory again": (edit(GATHER, _RESIZE, "pass"), "the memory was let go and is not there"),
    "counts elements": (edit(GATHER, " * whole.element_size()", ""), "resize_ counts bytes"),
    "forgotten wait": (edit(GATHER, "shard)\n", "shard, async_op=True)\n"), "a forgotten wait"),
    "gathers only what was released": (
        edit(GATHER, _RESIZE, f"if whole.untyped_storage().size():\n        return\n    {_RESIZE}"),
        "these are old values",
    ),
    "the wrong order": (edit(GATHER, "size())), shard)", "size()))[::-1], shard)"), "not in the order of the ranks"),
    "rank 0's shard for all": (
        edit(
            GATHER,
            _ALL_GATHER,
            "for part in whole.chunk(dist.get_world_size()):\n"
            "        part.copy_(shard)\n        dist.broadcast(part, src=0)",
        ),
        "a broadcast, where each rank's own",
    ),
    "another shape": (edit(GATHER, _RELEASE, "whole.resize_(0)"), "and keeps its memory"),
    "gathers on rank 0": (
        edit(
            GATHER,
            _ALL_GATHER,
            "parts = list(whole.chunk(dist.get_world_size()))\n"
            "    dist.gather(shard, parts if dist.get_rank() == 0 else None, dst=0)",
        ),
        "only rank 0 has all the shards",
    ),
    "returns the result": (
        edit(
            GATHER,
            _ALL_GATHER,
            "import torch\n    parts = [shard.clone() for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(parts, shard)\n    return torch.cat(parts)",
        ),
        "gather() returned its result",
    ),
    "sums wholes": (
        edit(
            GATHER,
            _ALL_GATHER,
            "whole.zero_()\n"
            "    whole.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n"
            "    dist.all_reduce(whole)",
        ),
        "extra traffic (all_reduce)",
    ),
}


# ---------------------------------------------------------------------- 06.2, and what 07.1 also needs


class Block(nn.Module):
    """A unit of the check's model. `look` is called in the middle of its forward."""

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


def whole_bytes(unit: Unit) -> int:
    """What the whole parameters of `unit` take now."""
    return unit.full.untyped_storage().size()


def in_words(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


class Forward(zerolab.Zero2):
    """What 07.1 is tried with: the forward half of ZeRO-3."""

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
    """What 06.2 is tried with: the other half."""

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
    """The outputs of each step, and the rank's parameters after each: the same bits if the stage does what it must."""
    outputs, params = [], []
    optimizer = SGD(zero.model.parameters(), lr=2.0**-6, momentum=0.5)
    for step in range(steps):
        output = zero.model(inputs(world, step))
        (output * output).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs += [output.detach().clone(), zero.model(inputs(world, step))]
        params += [param.detach().clone() for param in zero.model.parameters()]
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
            raise Wrong(f"parameter {i} is not what zerolab.Zero3 makes of it", explain())


@contextmanager
def guarded() -> Iterator[None]:
    """Nobody lets go of the whole while the shard is a part of it: what copies it then would crash the process."""
    original = Unit.release

    def release(unit: Unit) -> None:
        if unit.shard.untyped_storage()._cdata == unit.full.untyped_storage()._cdata:
            likely = "the shard goes with the whole: first give it memory of its own, unit.shard = unit.shard.clone()"
            raise Wrong(f"{unit.name}: the whole was released while unit.shard is a view of it", likely)
        original(unit)

    Unit.release = release
    try:
        yield
    finally:
        Unit.release = original


def check_construction(zero: zerolab.Zero2) -> None:
    for unit in zero.units:
        own = unit.shard.untyped_storage()
        if own._cdata == unit.full.untyped_storage()._cdata:
            likely = "give the shard memory of its own, unit.shard = unit.shard.clone(), and release the whole"
            raise Wrong(f"{unit.name}: after optimizer_params() unit.shard is still a view of the whole", likely)
        check_flag(unit)
        if held := whole_bytes(unit):
            likely = "optimizer_params() does not release the whole: unit.release()"
            raise Wrong(f"{unit.name} holds {held} bytes of whole parameters before the first forward", likely)
        for tensor, what in ((unit.master, "unit.master"), *((param, "a parameter") for param in unit.params)):
            if tensor.untyped_storage()._cdata != own._cdata:
                likely = "the optimizer must see slices of the shard: return super().optimizer_params(unit) at the end"
                raise Wrong(f"{unit.name}: {what} is not a view of unit.shard", likely)
        seen, owned = sum(param.numel() for param in unit.params), elements_owned(unit)
        if seen != owned:
            likely = "what optimizer_params() returned does not cover unit.shard: return super().optimizer_params(unit)"
            raise Wrong(f"{unit.name}: the optimizer sees {seen} elements, and this rank owns {owned}", likely)

    for unit, same in zip(zero.units, zerolab.Zero3(Model(), units=[Block]).units, strict=True):
        if not torch.equal(unit.shard, same.shard):
            likely = "the values must stay: unit.shard.clone() copies them, before anything is released"
            raise Wrong(f"{unit.name}: unit.shard has not the values of this rank's part of the parameters", likely)


def check_flag(unit: Unit) -> None:
    """Does the unit know that its memory was let go?"""
    if unit.gathered and not whole_bytes(unit):
        likely = "let it go by unit.release(): it also notes that the whole is gone, so that gather() gets it again"
        raise Wrong(f"{unit.name} has no memory, and believes that it is gathered", likely)


def elements_owned(unit: Unit) -> int:
    """How many elements of parameters this rank's shard has, without padding."""
    bounds = [unit.layout.owned(slot, unit.comm.rank) for slot in unit.layout.slots]
    return sum(stop - start for start, stop in bounds)


def look(zero: zerolab.Zero2, unit: Unit, book: Ledger) -> None:
    """In the middle of the forward of `unit`: is it there, and only it?"""
    if not whole_bytes(unit):
        was_there = any(call.op == "all_gather" and call.unit == unit.name for call in book.calls)
        likely = "it was gathered, and released before its forward was over" if was_there else NOT_GATHERED
        raise Wrong(f"in the forward of {unit.name} its whole parameters have no memory", likely)
    blocks = [other for other in zero.units if other not in zero.root]
    gathered = [other for other in blocks if whole_bytes(other)]
    if len(gathered) > 2:
        seen = f"in the forward of {unit.name} {in_words([other.name for other in gathered])} are gathered"
        place = blocks.index(unit) if unit in blocks else 0
        later = [other for other in gathered if blocks.index(other) > place]
        raise Wrong(seen, ALL_AT_ONCE if len(later) > 1 else NEVER_RELEASED)


def forward(zero: zerolab.Zero2, world: World) -> Tensor:
    """A forward, looked at. Raises Wrong for what is gathered, and what is not."""
    blocks = [unit for unit in zero.units if unit not in zero.root]
    with ledger(zero) as book:
        zero.model.look = partial(look, zero, zero.root[0], book)
        for module, unit in zip(zero.model.blocks, blocks, strict=True):
            module.look = partial(look, zero, unit, book)
        output = zero.model(inputs(world, 0))
    for unit in zero.units:
        check_flag(unit)
        calls = [call for call in book.calls if call.unit == unit.name and not call.control]
        if len(calls) > 1:
            raise Wrong(f"{unit.name}: {len(calls)} collectives in one forward", "one all-gather is enough")
    kept = [unit.name for unit in blocks if whole_bytes(unit)]
    if kept:
        are = "is" if len(kept) == 1 else "are"
        raise Wrong(f"when forward returns, {in_words(kept)} {are} still gathered", NEVER_RELEASED)
    return output


NOT_GATHERED = "it was not gathered: pre_forward() is called before the forward of a unit, and must gather it"
NEVER_RELEASED = "what is gathered is not released: post_forward() must let the whole of each block go"
ALL_AT_ONCE = "all units are gathered at once, so all Ψ parameters are there: gather only the unit whose turn it is"


def check_forward(answer: Any, world: World) -> None:
    check_class(answer.MyZero3Forward, "MyZero3Forward", ("optimizer_params", "pre_forward", "post_forward"))
    cls = type("Zero3", (answer.MyZero3Forward, Backward), {"stage": 3})
    with guarded():
        zero = cls(Model(), units=[Block])
    check_construction(zero)
    root = zero.root[0]

    output = forward(zero, world)
    compare("the model's output", output.detach(), Model()(inputs(world, 0)).detach())
    if not whole_bytes(root):
        likely = "backward begins with the root: where gradients are enabled it stays, which saves one gather of it"
        raise Wrong("when forward returns, the root is released", likely)
    output.sum().backward()
    with torch.no_grad():
        forward(zero, world)
    if held := whole_bytes(root):
        likely = "under no_grad there is no backward to come, and the root must go too: look at torch.is_grad_enabled()"
        raise Wrong(f"after a forward under no_grad the root still holds {held} bytes of whole parameters", likely)
    check_training(cls(Model(), units=[Block]), world)


FORWARD_STUB = '''\
import torch
import zerolab
from torch import Tensor
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        """Once, when the engine is built: from here on this rank keeps its shard alone.

        Give unit.shard, so far a view of unit.full, memory of its own; let the whole go; then return what ZeRO-2
        returns, slices of the shard.
        """
        raise Todo("06.2")

    def pre_forward(self, unit: Unit) -> None:
        """Before the forward of `unit`: its whole parameters must be there."""
        raise Todo("06.2")

    def post_forward(self, unit: Unit) -> None:
        """After it: let them go, unless `unit` is in self.root and a backward can follow."""
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

FORWARD_BY_HAND = """\
import torch
from zerolab import Zero2


class MyZero3Forward(Zero2):
    def optimizer_params(self, unit):
        unit.shard = torch.empty_like(unit.shard).copy_(unit.shard)
        slices = super().optimizer_params(unit)
        unit.release()
        return slices

    def pre_forward(self, unit):
        unit.start_gather()
        unit.gather()

    def post_forward(self, unit):
        backward_follows = torch.is_grad_enabled()
        stays = unit in self.root and backward_follows
        if not stays:
            unit.release()
"""

FORWARD_PREFETCHED = """\
import torch
from zerolab import Zero2


class MyZero3Forward(Zero2):
    def optimizer_params(self, unit):
        unit.shard = unit.shard.detach().clone()
        unit.full.untyped_storage().resize_(0)
        unit.gathered = False
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def pre_forward(self, unit):
        unit.gather()
        place = self.units.index(unit) + 1
        if torch.is_grad_enabled() and unit not in self.root and place < len(self.units):
            self.units[place].start_gather()

    def post_forward(self, unit):
        if unit in self.root and torch.is_grad_enabled():
            return
        unit.release()
"""

_KEEPS = "        if unit not in self.root or not torch.is_grad_enabled():\n            unit.release()\n"
_PRE = "    def pre_forward(self, unit: Unit) -> None:\n        unit.gather()\n"

FORWARD_MUTANTS = {
    "never releases": (edit(FORWARD, _KEEPS, "        pass\n"), "what is gathered is not released"),
    "releases the root too": (edit(FORWARD, _KEEPS, "        unit.release()\n"), "backward begins with the root"),
    "releases only the root": (edit(FORWARD, "unit not in", "unit in"), "what is gathered is not released"),
    "releases only under no_grad": (
        edit(FORWARD, "if unit not in self.root or not torch", "if not torch"),
        "what is gathered is not released",
    ),
    "keeps the root under no_grad": (
        edit(FORWARD, " or not torch.is_grad_enabled()", ""),
        "the root must go too",
    ),
    "asks whether the model trains": (
        edit(FORWARD, "not torch.is_grad_enabled()", "not self.model.training"),
        "the root must go too",
    ),
    "releases too early": (
        edit(FORWARD, _PRE, _PRE + "        if unit not in self.root:\n            unit.release()\n"),
        "released before its forward was over",
    ),
    "gathers nothing": (edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "pass")), "it was not gathered"),
    "gathers afterwards": (
        edit(
            FORWARD,
            _PRE,
            _PRE.replace("unit.gather()", "pass"),
            "            unit.release()",
            "            unit.gather()",
        ),
        "it was not gathered",
    ),
    "gathers all at the start": (
        edit(FORWARD, _PRE, _PRE.replace("unit.gather()", "for each in self.units:\n            each.gather()")),
        "all units are gathered at once",
    ),
    "does not release at construction": (
        edit(FORWARD, "clone()\n        unit.release()\n", "clone()\n"),
        "does not release the whole",
    ),
    "the shard goes with the whole": (
        edit(FORWARD, "        unit.shard = unit.shard.clone()\n", ""),
        "the shard goes with the whole",
    ),
    "lets go behind the unit's back": (
        edit(FORWARD, "():\n            unit.release()", "():\n            unit.full.untyped_storage().resize_(0)"),
        "let it go by unit.release()",
    ),
    "does not copy": (edit(FORWARD, "unit.shard.clone()", "torch.zeros_like(unit.shard)"), "the values must stay"),
    "clones too late": (
        edit(
            FORWARD,
            "        unit.shard = unit.shard.clone()\n        unit.release()",
            "        unit.release()\n        unit.shard = unit.shard.clone()",
        ),
        "the shard goes with the whole",
    ),
    "returns nothing": (edit(FORWARD, "return super()", "super()"), "`return` is missing"),
    "shows the optimizer nothing": (
        edit(
            FORWARD,
            "return super().optimizer_params(unit)",
            "unit.keep_shard()\n        return [unit.shard[:0].view(0, *[1] * (len(slot.shape) - 1)) "
            "for slot in unit.layout.slots]",
        ),
        "does not cover unit.shard",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero3Forward(zerolab.Zero3):\n    pass\n", "write your own"),
}

DIED = "most likely it used a tensor without memory: some operations do not look, and read address 0"

ERRORS = {
    SIZE_0: "the memory was let go and is not there: a storage must be made large again before anybody uses its views",
    OTHER_SIZE: "too small: resize_ counts bytes, and all ranks' shards must find room, whole.numel() * element_size()",
    "`tensor_list` of type List": "all_gather wants a list of tensors, one for each rank: list(whole.chunk(N))",
    "invalid output tensor list": "all_gather wants as many tensors as there are ranks: dist.get_world_size()",
    "SIGSEGV": DIED,
}

MEMBERS = "a Unit has gather() and release(), and the engine (self) has the rest: super()'s methods, self.reduce(unit)"
ITS_OWN_FILE = "every exercise is a file of its own; a unit has the same as methods: unit.gather(), unit.release()"
ITS_ARGUMENT = "the engine passes the unit: def pre_forward(self, unit), and the others likewise"

FORWARD_ERRORS = {
    "'Unit' object has no attribute": MEMBERS,
    "takes 1 positional argument but 2 were given": ITS_ARGUMENT,
    "name 'gather' is not defined": ITS_OWN_FILE,
    "name 'release' is not defined": ITS_OWN_FILE,
    "zip() argument 2 is": "it returns a slice for each parameter: return super().optimizer_params(unit)",
    "SIGSEGV": DIED,
    SIZE_0: "whole parameters were used while they had no memory: gather in pre_forward, release in post_forward",
    "'NoneType' object is not iterable": "optimizer_params() returns nothing: `return` is missing",
    "argument 1 must be an iterable, not NoneType": "optimizer_params() returns nothing: `return` is missing",
}

EXERCISES = [
    Exercise(
        id="06.1",
        title="gather and release",
        section="Memory that comes and goes",
        check=check_gather,
        stub=GATHER_STUB,
        reference=GATHER,
        alternatives=(GATHER_ASYNC, GATHER_BY_BROADCASTS),
        mutants=GATHER_MUTANTS,
        hints=(
            "A tensor and its views share one storage, whole.untyped_storage(), and only that has memory.",
            "storage.resize_(0) lets the memory go; storage.resize_(bytes) gets new memory, with anything in it.",
            "gather(): resize_ to whole.numel() * whole.element_size(), then dist.all_gather into "
            "list(whole.chunk(dist.get_world_size())).",
        ),
        exports=("gather", "release"),
        first_rank_only="only rank 0 has all the shards: that is a gather; every rank needs them, all_gather",
        errors=ERRORS,
    ),
    Exercise(
        id="06.2",
        title="the forward of ZeRO-3",
        section="ZeRO-3's forward as a class",
        check=check_forward,
        stub=FORWARD_STUB,
        reference=FORWARD,
        alternatives=(FORWARD_BY_HAND, FORWARD_PREFETCHED),
        mutants=FORWARD_MUTANTS,
        hints=(
            "A unit does what you wrote in 06.1: unit.gather() and unit.release(). unit.shard is what gather() sends.",
            "optimizer_params(): unit.shard = unit.shard.clone(), then unit.release(), then return "
            "super().optimizer_params(unit). A release before the clone would take the shard with it.",
            "post_forward(): if unit not in self.root or not torch.is_grad_enabled(): unit.release()",
        ),
        exports=("MyZero3Forward",),
        extends="Zero3",
        errors=FORWARD_ERRORS,
    ),
]
