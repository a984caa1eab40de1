"""Lesson 10: a block that forgets its activations and runs again, and an optimizer that works on the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import zerolab
from zerolab.lab.exercises.alive import Alive
from zerolab.lab.exercises.exercise import Exercise, Wrong
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.lessons.lesson10.host import HostLink

# ---------------------------------------------------------------------- 10.1

ROWS, WIDTH, HIDDEN = 96, 32, 128
SMALL = 11_000  # bytes: less than an input, more than the state of the generator


class Odd(nn.Module):
    """A block with dropout, keyword arguments, a frozen and an unused parameter, which writes down how it is called."""

    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = dropout
        self.notes: list[dict[str, Any]] = []
        self.dropped: list[list[int]] = []
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_((((7 * torch.arange(param.numel()) + i) % 11 - 5.0) / 32).view(param.shape))
        self.to(dtype)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        hidden = torch.nn.functional.dropout(torch.relu(self.up(x)) + 1.0, self.dropout, self.training)
        device = x.device.type
        note = {
            "gradients are recorded": torch.is_grad_enabled(),
            "autocast": str(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None),
            "scale": scale,
            "a mask is given": mask is not None,
            "the sum of its input": float(x.detach().double().sum()),
            "in training mode": self.training,
        }
        self.notes.append(note)
        self.dropped.append((hidden == 0).flatten().nonzero().flatten().tolist())
        y = self.down(hidden) * scale + self.frozen
        if mask is not None:
            y = y * mask
        return x + y.to(x.dtype)


def rows(number: int, dtype: torch.dtype = torch.float32, rank: int = 0) -> Tensor:
    count = torch.arange(ROWS * WIDTH, dtype=torch.float64)
    return (((5 * count + 3 * number + rank) % 13 - 6) / 8).view(ROWS, WIDTH).to(dtype)


def upstream(dtype: torch.dtype = torch.float32) -> Tensor:
    """What arrives at a block's output; in float64 it has digits that float32 would round."""
    fine = 2.0**-30 if dtype == torch.float64 else 0.0
    return ((torch.arange(ROWS * WIDTH, dtype=torch.float64) % 5 - 1.5) / 4 + fine).view(ROWS, WIDTH).to(dtype)


@contextmanager
def refusing_torchs() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Wrong("torch.utils.checkpoint was called")

    import torch.utils.checkpoint as torchs

    with (
        patch.object(torchs.CheckpointFunction, "forward", refuse),
        patch.object(torchs, "_checkpoint_without_reentrant_generator", refuse),
    ):
        yield


class Calls:
    """The answer's calls with one block, and the backwards that follow."""

    def __init__(self, play: Play, block: Odd, name: str = "") -> None:
        self.play, self.block, self.name = play, block, name

    def forward(self, x: Tensor, which: str = "", **kwargs: Any) -> Any:
        play, when = self.play, f"forward{which}{self.name}"
        self.block.notes.clear()
        with play.event(when) as event, refusing_torchs():
            y = play.code.checkpointed(self.block, x, **kwargs)
            event.see(f"the result of {when}", y)
        notes = [{name: value for name, value in note.items() if "recorded" not in name} for note in self.block.notes]
        play.see(f"the block's calls in {when}", notes)
        play.see(f"x needs a gradient after {when}", x.requires_grad)
        play.see(f"the values of x after {when}", x.detach())
        return y

    def backward(
        self, y: Any, grad: Tensor, which: str = "", forward: int = 0, autocast: torch.dtype | None = None
    ) -> None:
        """The backward of the forward with that number, if it was recorded. autocast: around it."""
        play, when = self.play, f"backward{which}{self.name}"
        if not isinstance(y, Tensor) or not y.requires_grad:
            return
        self.block.notes.clear()
        first = len(self.block.dropped)
        with play.event(when), under(autocast), refusing_torchs():
            y.backward(grad)
        play.see(f"the block's calls in {when}", self.block.notes)
        again = self.block.dropped[first:]
        play.see(
            f"dropout takes the elements in {when} that it took in forward", again == [self.block.dropped[forward]]
        )
        play.clue("dropped", [len(dropped) for dropped in again])
        if autocast is None:  # else it is open whether the backward inside of it is under it too
            self.gradients(when)

    def gradients(self, when: str) -> None:
        grads = {name: param.grad for name, param in self.block.named_parameters()}
        self.play.see(f"the block's gradients after {when}", grads)


def in_the_middle(play: Play, dtype: torch.dtype = torch.float32, **kwargs: Any) -> None:
    """Between other parts of a graph."""
    calls = Calls(play, Odd(dtype))
    weight = torch.full((WIDTH,), 0.75, dtype=dtype, requires_grad=True)
    x = rows(0, dtype, play.rank) * weight
    tasks: list[int] = []
    x.register_hook(lambda _: tasks.append(torch._C._current_graph_task_id()))
    y = calls.forward(x, **kwargs)
    if isinstance(y, Tensor) and y.requires_grad:
        y.register_hook(lambda _: tasks.append(torch._C._current_graph_task_id()))
    torch.rand(3)  # somebody else draws
    calls.backward(y, upstream(dtype))
    play.see("the gradient that reaches what comes before the block", weight.grad)
    play.see("it is passed on by the same backward", len(set(tasks)) == 1)


def what_is_kept(play: Play) -> None:
    """Between forward and backward, after backward, and when no backward follows."""
    block, weight = Odd(), torch.full((WIDTH,), 0.75, requires_grad=True)
    alive, code = Alive(), play.code
    x = rows(0) * weight
    with play.event("forward"), alive:
        y = code.checkpointed(block, x)
    if not isinstance(y, Tensor) or not y.requires_grad:
        return
    own = alive.left(but=(x, y))
    play.at_most("bytes kept besides the input when forward returns", max(SMALL, sum(nbytes for nbytes, _ in own)))
    play.clue("kept", own)
    output = weakref.ref(y.untyped_storage())
    z = y * 2.0
    del y
    gc.collect()
    play.see("the output is in memory when nobody else needs it", output() is not None)
    with play.event("backward"), alive:
        z.backward(upstream())
    left = alive.left(but=(x, z, weight.grad, *(param.grad for param in block.parameters())))
    play.at_most("bytes kept after backward", max(SMALL, sum(nbytes for nbytes, _ in left)))
    inputs = []
    for number in range(2):
        with play.event(f"forward {number + 1} without a backward"):
            x = rows(number) * weight
            y = code.checkpointed(block, x)
        inputs.append(weakref.ref(x.untyped_storage()))
        del x, y
    gc.collect()
    play.at_most("inputs of forwards without a backward in memory", sum(ref() is not None for ref in inputs))


def as_first_block(play: Play) -> None:
    x = rows(1, rank=play.rank)
    calls = Calls(play, Odd())
    calls.backward(calls.forward(x), upstream())
    play.see("the gradient of x", x.grad)


def of_a_leaf(play: Play) -> None:
    x = rows(2).requires_grad_()
    calls = Calls(play, Odd())
    calls.backward(calls.forward(x), upstream())
    play.see("the gradient of x", x.grad)


def with_a_view(play: Play) -> None:
    """Neither contiguous, nor with two dimensions."""
    whole = torch.stack([rows(2), rows(3)], 2).requires_grad_()
    calls = Calls(play, Odd())
    y = calls.forward(whole[:, :, 1].view(2, ROWS // 2, WIDTH))
    calls.backward(y, upstream().view(2, ROWS // 2, WIDTH))
    play.see("the gradient of what x is a view of", whole.grad)


def in_a_row(play: Play) -> None:
    """Three blocks, of which the first is called once more at the end."""
    blocks = [Odd(dropout=0.0) for _ in range(3)]
    x = rows(2)
    with play.event("forward"):
        for block in (*blocks, blocks[0]):
            x = play.code.checkpointed(block, x)
    if isinstance(x, Tensor) and x.requires_grad:
        with play.event("backward"):
            x.backward(upstream())
    for number, block in enumerate(blocks):
        Calls(play, block).gradients(f"backward, block {number}")


def under(autocast: torch.dtype | None) -> Any:
    return nullcontext() if autocast is None else torch.autocast("cpu", autocast)


def under_autocast(play: Play, forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    x = rows(4).requires_grad_()
    calls = Calls(play, Odd())
    with under(forward):
        y = calls.forward(x)
    calls.backward(y, upstream(), autocast=backward)
    if backward is None:
        play.see("the gradient of x", x.grad)


def two_calls(play: Play, reverse: bool) -> None:
    """Two forwards of one block, then their backwards, in either order."""
    calls, inputs = Calls(play, Odd()), [rows(number).requires_grad_() for number in range(2)]
    outputs = [
        calls.forward(x, f" {number}", scale=scale)
        for number, (x, scale) in enumerate(zip(inputs, (0.5, 2.0), strict=True), 1)
    ]
    for number in (1, 0) if reverse else (0, 1):
        calls.backward(outputs[number], upstream(), f" {number + 1}", forward=number)
    play.see("the gradients of the inputs", [x.grad for x in inputs])


def accumulated(play: Play) -> None:
    """Gradients that were there, and zeros in their place."""
    block = Odd(dropout=0.0)
    calls = Calls(play, block)
    calls.backward(calls.forward(rows(0), " 1"), upstream(), " 1")
    calls.backward(calls.forward(rows(0), " 2"), upstream(), " 2")
    kept = [param.grad for param in block.parameters() if param.grad is not None]
    for grad in kept:
        grad.zero_()
    calls.backward(calls.forward(rows(0), " 3"), upstream(), " 3 after zero_grad(set_to_none=False)")
    now = [param.grad for param in block.parameters() if param.grad is not None]
    play.see("each .grad is the tensor that it was", [id(grad) for grad in kept] == [id(grad) for grad in now])


def without_gradients(play: Play) -> None:
    block, alive, x = Odd(), Alive(), rows(0)
    with torch.no_grad(), play.event("forward under torch.no_grad()") as event, alive:
        y = play.code.checkpointed(block, x)
    event.see("the result", y)
    play.see("the block's calls", block.notes)
    left = alive.left(but=(x, y if isinstance(y, Tensor) else None))
    play.at_most("bytes kept under torch.no_grad()", max(SMALL, sum(nbytes for nbytes, _ in left)))
    calls = Calls(play, block)
    block.eval()
    calls.backward(calls.forward(x, " in eval mode"), upstream(), " in eval mode", forward=1)
    play.see("the block is in training mode", block.training)


class Small(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 10), nn.Linear(10, 4)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_((((5 * torch.arange(param.numel()) + i + number) % 7 - 3.0) / 16).view(param.shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two blocks and a head. how: what calls a block."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small(number) for number in range(2))
        self.head = nn.Linear(4, 2)
        self.how = how
        with torch.no_grad():
            self.head.weight.copy_((torch.arange(8.0) - 4).view(2, 4) / 8)
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return self.head(x)


def under_an_engine(play: Play, stage: int) -> None:
    """Whose parameters come and go."""
    zero = zerolab.shard(Model(play.code.checkpointed), stage, units=[Small])
    optimizer = SGD(zero.model.parameters(), lr=0.125)
    for step in range(2):
        x = (torch.arange(12.0).view(3, 4) + step - play.rank) / 8
        with play.event(f"step {step + 1}"):
            zero.model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with play.event("full_state_dict()") as event:
        event.see("the weights after two steps", dict(zero.full_state_dict()))


ONE = (1,)  # what has nothing to do with ranks
UNDER_ZERO = (
    "right without an engine, wrong under ZeRO: there the block has its parameters only while it is called. Don't "
    "touch block.parameters(); call block(x, ...) in forward and again in backward, and let the gradients add up"
)
AUTOCAST = "both runs need the same autocast, on or off, whatever is around backward: keep its state, and set it again"

CHECKPOINTED_BATTERY = (
    Scene("", in_the_middle, "compare with block(x), which computes, draws and counts the same"),
    Scene(
        "with scale= and mask=",
        lambda play: in_the_middle(play, scale=0.5, mask=(rows(3) > 0).float()),
        "the keyword arguments belong to both runs",
        ONE,
    ),
    Scene("of an x that needs no gradient", as_first_block, "the block's parameters still need theirs", ONE),
    Scene("of a leaf", of_a_leaf, "the gradient of x is what your backward returns for it", ONE),
    Scene("with an x that is not contiguous", with_a_view, "x may have any shape, and be a view", ONE),
    Scene("with blocks in a row", in_a_row, "every call keeps its own: a block may be called more than once", ONE),
    Scene("under autocast", partial(under_autocast, forward=torch.bfloat16, backward=None), AUTOCAST, ONE),
    Scene("under autocast in float16", partial(under_autocast, forward=torch.float16, backward=None), AUTOCAST, ONE),
    Scene(
        "with autocast around backward alone",
        partial(under_autocast, forward=None, backward=torch.bfloat16),
        AUTOCAST,
        ONE,
    ),
    Scene(
        "in two forwards, then two backwards", partial(two_calls, reverse=False), "keep on ctx what a call needs", ONE
    ),
    Scene("in two forwards and their backwards reversed", partial(two_calls, reverse=True), "keep it on ctx", ONE),
    Scene("after an earlier backward", accumulated, "gradients add up in .grad until zero_grad()", ONE),
    Scene("in memory", what_is_kept, "keep the input, and on ctx what it takes to run again, and nothing else", ONE),
    Scene("without gradients", without_gradients, "leave the modes of torch and of the block as they are", ONE),
    Scene("in float64", partial(in_the_middle, dtype=torch.float64), "make no tensors of a fixed dtype", ONE),
    Scene("in bfloat16", partial(in_the_middle, dtype=torch.bfloat16), "make no tensors of a fixed dtype", ONE),
    Scene("under zerolab.DDP", partial(under_an_engine, stage=0), UNDER_ZERO, (2, 3)),
    Scene("under zerolab.Zero3", partial(under_an_engine, stage=3), UNDER_ZERO, (2, 3)),
)


CHECKPOINTED_STUB = '''\
import torch
from torch import Tensor, nn
from zerolab.lab import Moment
from zerolab.lab.exercises import Todo


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, asks: Tensor, block: nn.Module, x: Tensor, kwargs: dict) -> Tensor:
        """Run the block (nothing is recorded in here); keep on `ctx` what backward needs.

        asks: has no elements and needs a gradient, so that apply() records this call even
        if x needs none. ctx.save_for_backward(x) keeps a tensor; anything else is an
        attribute: ctx.block = block.
        """
        raise Todo("10.1")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        """Run the block again, now recorded, and send `grad` back through it.

        Return a gradient for each argument of forward, None for those that need none.
        (x,) = ctx.saved_tensors; torch.autograd.backward(y, grad) adds up the parameters'
        gradients.
        """
        raise Todo("10.1")


def checkpointed(block: nn.Module, x: Tensor, **kwargs) -> Tensor:
    """block(x, **kwargs), which keeps only its input, and runs again in backward.

    Both runs have the same random numbers and the same autocast. (Without
    torch.utils.checkpoint. No gradient is needed for what is in `kwargs`.)
    """
    return Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)
'''

CHECKPOINTED = """\
import torch
from torch import Tensor, nn
from zerolab.lab import Moment


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, asks: Tensor, block: nn.Module, x: Tensor, kwargs: dict) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block, ctx.kwargs, ctx.moment = block, kwargs, Moment(x.device.type)
        return block(x, **kwargs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (kept,) = ctx.saved_tensors
        x = kept.detach().requires_grad_(kept.requires_grad)
        with torch.enable_grad(), ctx.moment.again():
            y = ctx.block(x, **ctx.kwargs)
        torch.autograd.backward(y, grad)
        return None, None, x.grad, None


def checkpointed(block: nn.Module, x: Tensor, **kwargs) -> Tensor:
    return Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)
"""

ONE_FOR_EACH = (
    "backward() returns one value for each argument of forward(), without ctx: None for those that need no gradient"
)
IN_ORDER = "backward() returns the gradients in the order of forward()'s arguments, without ctx"

# ---------------------------------------------------------------------- 10.2

SHARD = 512
PARTS = ((200, 512), (0, 200))  # as backward sends them: the last first
# For each step, the micro-batches; each is a list of parts. The last step gets one part alone.
STEPS = ((PARTS,), (PARTS, PARTS), (PARTS[::-1],), (PARTS[:1],))


class Meter(HostLink):
    """Tells what crossed since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def to_device(self, out: Tensor, tensor: Tensor) -> None:
        self.dtypes.append(str(tensor.dtype))
        super().to_device(out, tensor)

    def taken(self) -> dict[str, Any]:
        crossed = {"bytes down": self.down, "bytes up": self.up, "dtypes up": sorted(set(self.dtypes))}
        self.down = self.up = 0
        self.dtypes = []
        return crossed


def gradient(step: int, micro: int, dtype: torch.dtype, size: int = SHARD) -> Tensor:
    """Not the same for any two, and such that sums do not fit into 16 bits."""
    count = torch.arange(size, dtype=torch.float64)
    base = 1.0 + ((3 * count + 5 * step) % 17) / 8
    return (base * (1.0 if micro == 0 else 2.0**-9) * (-1.0) ** step).to(dtype)


def adam(params: Any) -> Optimizer:
    return Adam(params, lr=2.0**-4)


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=2.0**-4, momentum=0.5)


class Host:
    """A shard on the device, which is a part of something larger, and the answer's optimizer for it."""

    def __init__(
        self,
        play: Play,
        dtype: torch.dtype,
        make: Callable[[Any], Optimizer] = adam,
        size: int = SHARD,
        name: str = "",
    ) -> None:
        self.play, self.name, self.size, self.link = play, name, size, Meter()
        self.masters: list[list[Tensor]] = []
        flat = (1.0 + (torch.arange(size + 20, dtype=torch.float64) % 7) / 4).to(dtype)
        self.shard = play.keep(f"the shard{name}", flat[10 : 10 + size])
        play.keep(f"what lies beside the shard{name}", [flat[:10], flat[10 + size :]])
        self.alive, self.make = Alive(), make
        with play.event(f"HostOptimizer(){name}"), self.alive:
            self.host = play.code.HostOptimizer(self.shard, self.made, self.link)
        self.look(f"HostOptimizer(){name}")

    def made(self, params: Any) -> Optimizer:
        optimizer = self.make(params)
        self.masters.append([param for group in optimizer.param_groups for param in group["params"]])
        return optimizer

    def receive(self, start: int, grad: Tensor, when: str) -> None:
        play, when = self.play, f"receive({start}, grad) in {when}{self.name}"
        before = grad.clone()
        with play.event(when), self.alive:
            self.host.receive(start, grad)
        self.look(when)
        play.see(f"grad is as it was after {when}", torch.equal(grad, before))
        there = weakref.ref(grad.untyped_storage())
        del grad
        gc.collect()
        play.at_most(f"gradients on the device that {when} keeps", int(there() is not None))

    def step(self, when: str) -> None:
        play, when = self.play, f"step() in {when}{self.name}"
        with play.event(when) as event:
            with self.alive:
                self.host.step()
            event.see(f"how often make_optimizer was called after {when}", len(self.masters))
            if self.masters:
                params = sorted(self.masters[0], key=Tensor.data_ptr)
                event.see(f"the masters after {when}", torch.cat([param.detach().flatten() for param in params]))
                ours = self.shard.untyped_storage()._cdata
                shared = any(param.untyped_storage()._cdata == ours for param in params)
                event.see(f"the masters are in the shard's memory after {when}", shared)
        self.look(when)

    def look(self, when: str) -> None:
        self.play.see(f"over the link in {when}", self.link.taken())

    def held(self, when: str) -> None:
        """Counted without counters: what is as large as a byte for each element."""
        most = (16 + self.shard.itemsize) * self.size
        held = sum(nbytes for nbytes, _ in self.alive.left(but=(self.shard,)) if nbytes >= self.size)
        self.play.at_most(f"bytes held besides the shard after {when}", max(most, held))


def four_steps(play: Play, dtype: torch.dtype, make: Callable[[Any], Optimizer] = adam) -> None:
    host = Host(play, dtype, make)
    for step, micros in enumerate(STEPS):
        for micro, parts in enumerate(micros):
            full = gradient(step, micro, dtype)
            for start, end in parts:
                host.receive(start, full[start:end].clone(), f"step {step + 1}")
        host.step(f"step {step + 1}")
    host.held("four steps")


def of_any_size(play: Play) -> None:
    """An odd shard in three parts, of which one has a single element; then a shard of one element."""
    for size, parts in ((37, ((36, 37), (0, 20), (20, 36))), (1, ((0, 1),))):
        host = Host(play, torch.bfloat16, momentum, size, f" for {size} elements")
        for step in range(2):
            full = gradient(step, 0, torch.bfloat16, size)
            for start, end in parts:
                host.receive(start, full[start:end].clone(), f"step {step + 1}")
            host.step(f"step {step + 1}")


def overwritten_shard(play: Play) -> None:
    """What is on the device is lost between two steps. The masters are not."""
    host = Host(play, torch.bfloat16, momentum)
    for step in range(2):
        for start, end in PARTS:
            host.receive(start, gradient(step, 0, torch.bfloat16)[start:end].clone(), f"step {step + 1}")
        host.step(f"step {step + 1}")
        with play.event(f"the shard is filled with zeros after step {step + 1}"):
            host.shard.zero_()


def two_hosts(play: Play) -> None:
    hosts = [Host(play, torch.bfloat16, name=f" of the {which}") for which in ("first", "second")]
    for step in range(2):
        full = gradient(step, 0, torch.bfloat16)
        for start, end in PARTS:
            for sign, host in zip((1.0, -1.0), hosts, strict=True):
                host.receive(start, sign * full[start:end], f"step {step + 1}")
        for host in hosts:
            host.step(f"step {step + 1}")


HOST_BATTERY = (
    Scene("", partial(four_steps, dtype=torch.bfloat16), "follow one element: down, added up, updated in float32, up"),
    Scene(
        "in float32, with SGD and momentum",
        partial(four_steps, dtype=torch.float32, make=momentum),
        "the shard's dtype is that of the shard, and make_optimizer says which optimizer",
    ),  # on any number of ranks: Adam does not show by what gradients were divided
    Scene(
        "in float16",
        partial(four_steps, dtype=torch.float16),
        "what goes up has the shard's dtype, self.shard.dtype",
        ONE,
    ),
    Scene("of other sizes", of_any_size, "a part may have any size: shard[start : start + len(grad)]", ONE),
    Scene(
        "with a shard that others write to",
        overwritten_shard,
        "the host's copy is the true one: the shard has only its rounded values",
        ONE,
    ),
    Scene("with two of them in turns", two_hosts, "whatever belongs to one HostOptimizer is kept on self", (1, 2)),
)


HOST_STUB = '''\
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from zerolab.lab.exercises import Todo
from zerolab.lab import HostLink


class HostOptimizer:
    """Updates `shard`: this rank's parameters, (S,) on the device, in 16 bits (or float32).

    On the host are, in float32, the masters, their gradients, and what the optimizer keeps.
    make_optimizer([master]) makes the optimizer. What crosses goes over the link, as small
    as it can be: link.to_host(tensor) returns a copy on the host;
    link.to_device(out, tensor) copies into `out`, on the device.
    """

    def __init__(
        self,
        shard: Tensor,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        link: HostLink,
    ) -> None:
        raise Todo("10.2")

    def receive(self, start: int, grad: Tensor) -> None:
        """`grad`: the mean gradient of shard[start : start + len(grad)], on the device.

        It has the shard's dtype. Bring it to the host now, so that the device can give its
        memory back. Called for each part, in any order, and again for each micro-batch:
        until step(), gradients add up.
        """
        raise Todo("10.2")

    def step(self) -> None:
        """Update the masters with the gradients since the last step, then the shard."""
        raise Todo("10.2")
'''

HOST = """\
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from zerolab.lab import HostLink


class HostOptimizer:
    def __init__(
        self,
        shard: Tensor,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        link: HostLink,
    ) -> None:
        self.shard, self.link = shard, link
        self.master = link.to_host(shard).float()
        self.master.grad = torch.zeros_like(self.master)
        self.optimizer = make_optimizer([self.master])

    def receive(self, start: int, grad: Tensor) -> None:
        self.master.grad[start : start + len(grad)] += self.link.to_host(grad).float()

    def step(self) -> None:
        self.optimizer.step()
        self.link.to_device(self.shard, self.master.to(self.shard.dtype))
        self.master.grad.zero_()
"""


EXERCISES = [
    Exercise(
        id="10.1",
        title="a checkpointed block",
        difficulty=2,
        section="Write: a checkpointed block",
        battery=CHECKPOINTED_BATTERY,
        stub=CHECKPOINTED_STUB,
        reference=CHECKPOINTED,
        hints=(
            "forward: keep x, block, kwargs and Moment(x.device.type) on ctx, and return block(x, **kwargs). The block "
            "draws random numbers, so the Moment comes first.",
            "backward: x = kept.detach().requires_grad_(kept.requires_grad), then under torch.enable_grad() "
            "y = block(x, **kwargs), then torch.autograd.backward(y, grad). The input's gradient is x.grad.",
            "The second run needs both contexts: with torch.enable_grad(), ctx.moment.again(). Return None, None, "
            "x.grad, None.",
        ),
        exports=("checkpointed",),
        errors={
            "incorrect number of gradients": ONE_FOR_EACH,
            "returned a gradient different than None at position": IN_ORDER,
            "returned an invalid gradient at index": IN_ORDER,
        },
    ),
    Exercise(
        id="10.2",
        title="optimizer state on the host",
        difficulty=3,
        section="Write: an optimizer on the host",
        battery=HOST_BATTERY,
        stub=HOST_STUB,
        reference=HOST,
        hints=(
            "The master is link.to_host(shard).float(). The cast happens after the trip, so 2 bytes an element travel.",
            "master.grad is zeros at first. receive() adds to master.grad[start : start + len(grad)].",
            "step(): self.optimizer.step(), then self.link.to_device(self.shard, self.master.to(self.shard.dtype)), "
            "then self.master.grad.zero_().",
        ),
        exports=("HostOptimizer",),
    ),
]
