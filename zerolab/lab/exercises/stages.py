"""The scenes of an exercise whose answer is a stage of the engine, or half of one.

Small trainings with everything in them that a stage may have forgotten: odd shapes, so that shards cut through
parameters, with gaps between them and empty slices; a unit of one element; frozen and unused parameters; with and
without a root unit; micro-batches under no_sync(); forwards before their backwards; gradients zeroed in place; float32,
float64 and bfloat16; groups of some of the ranks; another engine beside it; an error in a forward.

A stage is looked at wherever the engine calls it: what its units hold, what it has sent, what is left in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD

from zerolab.engine.engine import Engine
from zerolab.engine.precision import Precision
from zerolab.engine.slices import to_local
from zerolab.engine.unit import FullState, Unit
from zerolab.lab.exercises.observing import Enough, Play, Scene, in_groups
from zerolab.lab.exercises.spy import Traffic
from zerolab.lab.exercises.values import storages_in
from zerolab.measure.watch import watched

A_FEW = 16.0  # bytes: a counter or two
PAST_COMM = (
    "reduce() goes past self.comm, which alone writes the engine's ledger and adds in rank order: below, the ledger "
    "shows 0 bytes, and the weights may differ from one process's in the last digits"
)
WAITS = (
    "right, but it waits for each reduction before backward goes on, and so gives up their overlap. Start the "
    "reduction and leave the wait to the engine"
)

# ---------------------------------------------------------------------- models


def _nobody() -> None:
    pass


class Block(nn.Module):
    """A unit. It calls `look` in the middle of its forward and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.look: Callable[[], None] = _nobody

    def forward(self, x: Tensor) -> Tensor:
        return _seen(self, self.linear(x)) * 1.0  # so that what is looked at lies inside


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)  # 9 elements, a gap, 3 elements, a gap
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.look: Callable[[], None] = _nobody

    def forward(self, x: Tensor) -> Tensor:
        return x + _seen(self, self.linear(x)) * self.scale + self.frozen


class Tiny(nn.Module):
    """A unit of one element, of which most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _seen(block: Any, x: Tensor) -> Tensor:
    block.look()
    if x.requires_grad:
        x.register_hook(lambda grad: block.look())
    return x


class Whole(nn.Module):
    """Small whole numbers, so that gradients are too, and none is zero. The root has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0]]))
        self.bias = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for param in self.blocks.parameters():
                param.copy_((torch.arange(param.numel()) % 2 + 1.0).view(param.shape))

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == left_out else block(x)
        return self.scale * (x @ self.head + self.bias)


class Odd(nn.Module):
    def __init__(self, root: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3) if root else nn.Identity()
        self.blocks = nn.ModuleList([OddBlock(), Tiny(), OddBlock()])
        self.last = nn.Linear(3, 2, bias=False) if root else nn.Identity()
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(((7 * torch.arange(param.numel()) + i) % 5 - 1.5).view(param.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def odd_inputs(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Two micro-batches."""
    x = torch.tensor([[1.0, -0.5, 2.0], [0.5 + rank, 1.0, -1.0 - rank]], dtype=dtype) / 2
    return [x + step / 8, 0.5 - x]


# ---------------------------------------------------------------------- one engine, and what is seen of it


class Stage:
    """What an exercise asks for. name: of the answer's class. package: the class of zerolab that has it.

    methods: those that are to be written. half: what the rest of the stage comes from, if the answer is a part of it.
    """

    def __init__(self, name: str, package: type[Engine], methods: tuple[str, ...], half: type[Engine] | None = None):
        self.name, self.package, self.methods, self.half = name, package, methods, half

    def of(self, play: Play) -> Any:
        cls = getattr(play.code, self.name)
        return cls if self.half is None else type(cls.__name__, (cls, self.half), {"stage": self.package.stage})

    def writes(self, cls: type, name: str) -> bool:
        """Whether `cls` has a method of that name which is not the package's."""
        return any(name in vars(each) for each in cls.__mro__ if each.__module__.split(".")[0] != "zerolab")

    @contextmanager
    def own(self, play: Play) -> Iterator[None]:
        """Afterwards it is seen whether the package's methods ran in place of the answer's."""
        borrowed: set[str] = set()
        kept = {name: vars(self.package)[name] for name in self.methods if name in vars(self.package)}

        def noticing(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                borrowed.add(name)
                return kept[name](*args)

            return call

        try:
            for name in kept:
                setattr(self.package, name, noticing(name))
            yield
        finally:
            for name, method in kept.items():
                setattr(self.package, name, method)
        for name in kept:
            play.see(f"{name}() is written anew, and not {self.package.__name__}'s", name not in borrowed)


class Training:
    """An engine of the answer's class around `model`, trained in events."""

    def __init__(self, play: Play, stage: Stage, model: Any, name: str = "", **options: Any) -> None:
        self.play, self.model, self.name = play, model, name
        self.earlier: list[StorageWeakRef] = []  # the memory of full gradients
        self.slack = 0.0  # bytes that may be sent beyond the reference's
        self.open: set[str] = set()  # units whose forward or backward has begun
        self.waited: list[bool] = []  # whether post_backward() left nothing to wait for
        cls = stage.of(play)
        with play.event(f"{name}building the engine"), self._guarded():
            is_one = isinstance(cls, type) and issubclass(cls, Engine)
            play.see(f"{stage.name} is a class of the engine's", is_one)
            if not is_one:
                raise Enough
            play.see("stage", cls.stage)
            play.clue("methods that it inherits", [name for name in stage.methods if not stage.writes(cls, name)])
            units = [Block] if isinstance(model, Whole) else [OddBlock, Tiny]
            self.zero: Any = cls(model, units=units, group=play.group, **options)
        self._look_at_slices()
        names = {module: name for name, module in model.named_modules()}
        for module in model.modules():
            if hasattr(module, "look"):
                module.look = lambda name=names[module]: self._look_inside(name)

    def name_gradients(self) -> None:
        """Say what the gradients of a Whole are sums of: each rank's is a multiple of the same numbers."""
        alone = Whole()
        (1.5 * alone(torch.tensor([[1.0, 2.0]])).sum()).backward()
        grads = {name: param.grad for name, param in alone.named_parameters()}
        for unit in self.zero.units:
            layout, flat = unit.layout, torch.zeros(unit.layout.size)
            for name, view in zip(unit.names, layout.views(flat), strict=True):
                view.copy_(grads[name])
                if not self.zero.stage:
                    self.play.bases[f"the gradient of {name}"] = (None, view)
            for rank in range(self.play.size if self.zero.stage else 0):
                for name, part in zip(unit.names, layout.slices(layout.shard(flat, rank), rank), strict=True):
                    self.play.bases[f"rank {rank}'s slice of the gradient of {name}"] = (rank, part)

    # ------------------------------------------------------------------ events

    def forward(self, *args: Any, when: str = "", **keywords: Any) -> Tensor:
        with self._event(f"forward{when}"):
            output = self.model(*args, **keywords)
        self.play.see("the output", output)
        self._look_between()
        return output

    def backward(self, loss: Tensor, when: str = "") -> None:
        self.earlier.clear()
        self.open.clear()
        with self._event(f"backward{when}"):
            loss.backward()
        self.look_at_gradients()
        self._look_between()

    def step(self, optimizer: Any, *args: Any, when: str = "", set_to_none: bool = True) -> None:
        """The optimizer's step and the next forward: new parameters may travel in either."""
        with self._event(f"a step{when}"):
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            self.play.at_most("bytes of full parameters after the step", self._gathered())
            with torch.no_grad():
                output = self.model(*args)
        self.play.see("the output after the step", output)
        for unit in self.zero.units:
            for name, param in zip(unit.names, unit.params, strict=True):
                self.play.see(f"what the optimizer has of {name} after the step", to_local(param.detach()))
        self._look_between()

    def look_at_gradients(self) -> None:
        for unit in self.zero.units:
            for name, param in zip(unit.names, unit.params, strict=True):
                grad = param.grad
                self.play.see(f"the gradient of {name}", None if grad is None else to_local(grad))

    def note_ways(self, calls: list[Traffic]) -> None:
        """What a right answer should know of how it reduces, and which of its calls that took."""
        if self.play.size > 1 and not any(call.said for call in calls):
            self.play.note(PAST_COMM)
        if self.play.size > 1 and all(self.waited):
            self.play.note(WAITS)

    # ------------------------------------------------------------------ looks

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Where memory would go that the shard is a view of, the next to read it would take the process down: NaN."""
        original = Unit.release

        def release(unit: Unit) -> None:
            if _memory(unit.shard) == _memory(unit.full):
                unit.shard = torch.full_like(unit.shard, torch.nan)
            original(unit)

        with patch.object(Unit, "release", release):
            yield

    @contextmanager
    def _event(self, name: str) -> Iterator[None]:
        play, zero, reduce = self.play, self.zero, self.zero.reduce

        def reduce_and_look(unit: Unit) -> Any:
            play.at_most(f"bytes of {unit.name}'s full parameters when it is reduced", _bytes(unit))
            full = unit.bucket.full
            result = reduce(unit)
            self._look_at_reduced(unit, full, result)
            return result

        zero.reduce = reduce_and_look
        try:
            with play.event(f"{self.name}{name}", slack=self.slack) as event:
                with watched(zero, self._before, self._after):
                    yield
        finally:
            del zero.reduce
        said = sum(bool(call.said) for call in event.traffic)
        play.at_most("calls of self.comm", said, len(zero.units))
        play.at_most("calls of torch.distributed", len(event.traffic) - said, 2.0 * len(zero.units))

    def _before(self, point: str, unit: Unit) -> None:
        if point == "post_backward":
            if unit.name in self.open:  # not one that was left out, which is told at the end
                self._need(unit, f"{unit.name} has its parameters until its backward is over")
            self.play.at_most(
                f"full gradients of earlier units, when backward has passed {unit.name}", self._full_gradients
            )
            if isinstance(unit.bucket.full, Tensor):
                self.earlier.append(StorageWeakRef(unit.bucket.full.untyped_storage()))

    def _after(self, point: str, unit: Unit) -> None:
        when = f"after {point}() of {unit.name}"
        if point in ("pre_forward", "pre_backward"):
            self._need(unit, f"{when}, its parameters are there")
            self.open.add(unit.name)
        self.play.at_most(f"bytes of {unit.name}'s full parameters {when}", _bytes(unit))
        self.play.at_most(f"bytes of full parameters {when}", self._gathered(), self.block)
        if isinstance(unit.full, Tensor):
            self.play.see(f"{when}, unit.gathered knows that memory is gone", not unit.gathered or _bytes(unit) > 0)
        if point == "post_backward":
            grad, reduction = unit.bucket.grad, unit.bucket.reduction
            self.play.see(f"{when}, unit.bucket.grad is a tensor", isinstance(grad, Tensor))
            if isinstance(grad, Tensor):
                self.play.see(f"the shape of unit.bucket.grad {when}", tuple(grad.shape))
            self.waited.append(reduction is None)
            self.open.discard(unit.name)
            ends = reduction is None or callable(getattr(reduction, "wait", None))
            self.play.see(f"{when}, unit.bucket.reduction is None or has a wait()", ends)
            if not ends:
                raise Enough

    def _need(self, unit: Unit, what: str) -> None:
        there = isinstance(unit.full, Tensor) and _bytes(unit) > 0 and unit._state is not FullState.GATHERING
        self.play.see(what, there)
        self.play.clue(what, unit._state.name)
        if not there:
            raise Enough

    def _look_at_reduced(self, unit: Unit, full: Tensor, result: Any) -> None:
        play, grad, of = self.play, unit.bucket.grad, f"reduce() of {unit.name}"
        ends = result is None or callable(getattr(result, "wait", None))
        play.see(f"{of} returns None or something with a wait()", ends)
        play.see(f"{of} leaves a tensor in unit.bucket.grad", isinstance(grad, Tensor))
        play.clue(f"{of} leaves", type(grad).__name__)
        if not ends or not isinstance(grad, Tensor):
            raise Enough
        play.see(f"the shape of unit.bucket.grad after {of}", tuple(grad.shape))
        play.see(f"the dtype of unit.bucket.grad after {of}", grad.dtype)
        memory = {_memory(tensor) for tensor in (unit.full, unit.master) if isinstance(tensor, Tensor)}
        play.see(f"unit.bucket.grad has memory of its own after {of}, not the parameters'", _memory(grad) not in memory)
        place = unit.layout.shard(full, unit.rank).data_ptr() if self.zero.stage else full.data_ptr()
        in_place = _memory(grad) != _memory(full) or grad.data_ptr() == place
        play.see(f"if unit.bucket.grad is a part of unit.bucket.full after {of}, it is this rank's", in_place)

    def _look_inside(self, name: str) -> None:
        """In the middle of a block's forward, and of its backward."""
        for unit in self.zero.units:
            if unit.name == name or unit.name.startswith(f"{name}."):
                self._need(unit, f"{unit.name} has its parameters while it computes")
        self.play.at_most(f"bytes of full parameters while {name} computes", self._gathered(), self.block)

    def _look_between(self) -> None:
        self.play.at_most("bytes of full parameters in memory", self._gathered())
        self.play.at_most("full gradients in memory", self._full_gradients)
        self.play.at_most("bytes that the engine, its units and the file keep", self._kept(), A_FEW)

    def _look_at_slices(self) -> None:
        play = self.play
        blocks = [unit.layout.size * unit.full.element_size() for unit in self.zero.units if unit not in self.zero.root]
        self.block = float(max(blocks))  # one may be gathered ahead of its turn
        for unit in self.zero.units:
            play.see(f"the shape of unit.master of {unit.name}", tuple(unit.master.shape))
            play.see(f"the dtype of unit.master of {unit.name}", unit.master.dtype)
            for name, param in zip(unit.names, unit.params, strict=True):
                play.see(f"what the optimizer has of {name}", to_local(param.detach()))
                views = to_local(param).untyped_storage()._cdata == unit.master.untyped_storage()._cdata
                play.see(f"what the optimizer has of {name} is a view of unit.master", views)
        self._look_between()

    def _gathered(self) -> float:
        return float(sum(_bytes(unit) for unit in self.zero.units))

    def _full_gradients(self) -> float:
        if self.zero.stage < 2:  # they may stay
            return 0.0
        storages = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self.earlier]
        return float(sum(storage is not None and storage.nbytes() > 0 for storage in storages))

    def _kept(self) -> float:
        """The bytes that can be reached from names, but for buckets and what is gathered."""
        zero = self.zero
        places = [vars(zero), vars(self.play.code), *(vars(cls) for cls in type(zero).__mro__)]
        places += [vars(unit) for unit in zero.units]
        grads = [to_local(param.grad) for unit in zero.units for param in unit.params if param.grad is not None]
        found = {storage._cdata: storage.nbytes() for names in places for storage in storages_in(list(names.values()))}
        found |= {storage._cdata: storage.nbytes() for storage in storages_in(grads)}
        full = {_memory(unit.full) for unit in zero.units if isinstance(unit.full, Tensor)}
        return float(sum(held for key, held in found.items() if key not in full))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(unit: Unit) -> int:
    return unit.full.untyped_storage().size() if isinstance(unit.full, Tensor) else 0


# ---------------------------------------------------------------------- scenes


def battery_of(stage: Stage, kept: str = "", only: tuple[str, ...] = ()) -> tuple[Scene, ...]:
    """The scenes for an answer that is `stage`. kept: what no_sync() asks of it. only: the titles of some of them."""

    def whole(play: Play, name: str = "") -> Training:
        run = Training(play, stage, Whole(), name)
        run.name_gradients()
        return run

    def loss(play: Play, output: Tensor, times: float = 1.0) -> Tensor:
        return 1.5 * times * 16.0**play.rank * output.sum()

    def x() -> Tensor:
        return torch.tensor([[1.0, 2.0]])

    def plain(play: Play) -> None:
        with stage.own(play):
            run = whole(play)
            run.backward(loss(play, run.forward(x())))
        run.note_ways(play.tape[-1].traffic)
        run.step(SGD(run.model.parameters(), lr=0.25), x())
        with torch.no_grad():
            run.forward(x(), when=" again")

    def later(play: Play) -> None:
        run = whole(play)
        optimizer = SGD(run.model.parameters(), lr=2.0**-20)
        for step in range(2):
            run.model.train(step == 1)
            run.backward(loss(play, run.forward(x(), when=f" {step}"), step + 1.0), f" {step}")
            run.forward(x(), when=" without a backward")  # and what waits for one is out of date after the step
            run.step(optimizer, x(), when=f" {step}", set_to_none=step == 1)

    def micro(play: Play) -> None:
        run = whole(play)
        optimizer = SGD(run.model.parameters(), lr=0.25)
        for step in range(2):
            with run.zero.no_sync():
                run.backward(loss(play, run.forward(x(), when=" under no_sync")), " under no_sync")
            run.backward(loss(play, run.forward(x()), 2.0), f" of step {step}")
            run.step(optimizer, x(), when=f" {step}")

    def two(play: Play) -> None:
        run = whole(play)
        outputs = [run.forward(x(), when=f" {i}") for i in range(2)]
        for i, output in enumerate(outputs):
            run.backward(loss(play, output, i + 1.0), f" {i}")
        run.step(SGD(run.model.parameters(), lr=0.25), x())

    def apart(play: Play) -> None:
        """A block is left out, by rank 0 alone if ranks may; another engine beside it has a frozen one."""
        run, other = whole(play), whole(play, name="another engine: ")
        other.model.blocks[1].requires_grad_(False)
        run.slack = run.block  # whether what was left out is gathered is up to the answer
        left_out = 0 if play.rank == 0 or stage.package.stage == 3 else -1
        one, second = run.forward(x(), left_out=left_out), other.forward(x())
        run.backward(loss(play, one))
        other.backward(loss(play, second, 5.0))
        run.step(SGD(run.model.parameters(), lr=0.25), x())

    def after_error(play: Play) -> None:
        run = whole(play)
        with play.event("a forward that fails", slack=math.inf):  # what is on its way by then is up to the answer
            with suppress(RuntimeError):
                run.model(torch.ones(1, 7))
        run.backward(loss(play, run.forward(x())))
        run.step(SGD(run.model.parameters(), lr=0.25), x())

    def odd(play: Play, steps: int = 1, root: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        run = Training(play, stage, Odd(root).to(dtype), **options)
        optimizer = SGD(run.model.parameters(), lr=2.0**-5, momentum=0.5)
        for step in range(steps):
            batches = odd_inputs(play.rank, step, dtype)
            with run.zero.no_sync() if step else nullcontext():
                run.backward((run.forward(batches[0]) ** 2).sum(), f" {step}")
            if step:
                run.backward((run.forward(batches[1]) ** 2).sum(), f" {step}")
            run.step(optimizer, batches[0], when=f" {step}", set_to_none=bool(step))

    def short(play: Play) -> None:
        run = whole(play)
        run.backward(loss(play, run.forward(x())))
        run.step(SGD(run.model.parameters(), lr=0.25), x())

    shapes = (
        "shards cut through parameters, with gaps in between, and some slices are empty: unit.layout has the places"
    )
    narrow = "right in float32 only: take dtypes from unit.full and unit.bucket.full, and keep unit.master's own"
    scenes = (
        Scene("", plain),
        Scene("in a later step", later, "nothing may be kept from one step to the next", loose=1e-5, sizes=(2,)),
        Scene("with micro-batches under no_sync()", micro, kept, sizes=(1, 3), loose=1e-5),
        Scene("with two forwards before their backwards", two, sizes=(2,)),
        Scene("with two engines, and a block that is left out", apart, sizes=(1, 3)),
        Scene("after a forward that failed", after_error, sizes=(2,)),
        Scene("with odd shapes", odd, shapes, sizes=(4,), loose=1e-5),
        Scene("with odd shapes, in two steps", lambda play: odd(play, 2), shapes, sizes=(2,), loose=1e-5),
        Scene("in float64", lambda play: odd(play, dtype=torch.float64), narrow, sizes=(3,), loose=1e-13),
        Scene(
            "in bfloat16, without a root unit",
            lambda play: odd(play, 2, root=False, precision=Precision()),
            narrow,
            sizes=(2,),
            loose=0.03,
        ),
        *in_groups(
            short,
            "right when all processes share the model, but not when some do: use self.rank, self.world_size and "
            "self.comm; functions of dist take group=self.comm.group",
        ),
    )
    return tuple(scene for scene in scenes if not only or scene.title in only)
