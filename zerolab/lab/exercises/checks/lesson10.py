"""Lesson 10: a block that forgets its activations and runs again, and an optimizer that works on the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerolab
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.host import HostLink


class Alive(TorchDispatchMode):
    """Every storage that the block's operations make, to see later which are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before:
                    self._made[storage._cdata] = (weakref.ref(storage), storage.nbytes(), tuple(leaf.shape))
        return result

    def left(self, but: tuple[Tensor | None, ...] = ()) -> list[tuple[int, tuple[int, ...]]]:
        """(bytes, shape) of each that is still in memory, the largest first, without those of the tensors `but`."""
        gc.collect()
        known = {tensor.untyped_storage()._cdata for tensor in but if tensor is not None}
        found = [(nbytes, shape) for key, (ref, nbytes, shape) in self._made.items() if ref() and key not in known]
        return sorted(found, reverse=True)


# ---------------------------------------------------------------------- 10.1

ROWS, WIDTH, HIDDEN = 96, 32, 128
SMALL = 11_000  # bytes: less than an input, more than the state of the generator

KEPT = (
    "the block's activations are kept: run it without recording in forward (inside an autograd.Function's forward "
    "nothing is recorded), and again in backward"
)
COPIED = "a copy of the input is kept besides the input itself: save x, which costs nothing while its maker keeps it"
OUTPUT = "the output is kept as well: backward computes it again, so save the input alone"
TWICE_FORWARD = "run twice in forward: the second run belongs into backward"
TWICE_BACKWARD = "run more than once in backward: one run gives all gradients"
NOT_RECORDED = (
    "nothing was recorded: backward runs with gradients switched off. Run the block, and whatever you compute from its "
    "result, under torch.enable_grad()"
)
NO_INPUT = (
    "the input's gradient is lost: what comes before the block learns nothing. Give the detached input requires_grad, "
    "and return its .grad"
)
NO_PARAMS = (
    "the parameters' gradients are lost: torch.autograd.backward(y, grad) adds them up in .grad; torch.autograd.grad() "
    "only returns those that it is asked for"
)
NEEDS_GRAD = (
    "apply() looks at its own tensor arguments, and here x needs no gradient; the block's parameters still do. Give it "
    "one more argument, a tensor of no elements with requires_grad=True"
)
DRAWN = (
    "the block drew other random numbers the second time: keep torch.get_rng_state() in forward, and set it again "
    "before the block runs in backward"
)
OFF = "dropout was off in the second run: leave the block in the mode it is in"
FIRST_DRAW = "the first run draws as it would without checkpointing: leave the generator alone in forward"
MOVED = (
    "the second run has moved the generator: whatever is drawn next differs from a run without checkpointing. Put its "
    "state back, as torch.random.fork_rng() does"
)
NO_AUTOCAST = (
    "autocast was on in forward, and backward runs without it: keep what torch.is_autocast_enabled() and "
    "torch.get_autocast_dtype() say, and run the block again under the same torch.autocast(...)"
)
AUTOCAST_ON = (
    "autocast was off in forward, so the second run must be without it, even if backward is called under autocast: "
    "torch.autocast(device, dtype, enabled=False) switches it off"
)
AUTOCAST_DTYPE = (
    "autocast has another dtype in the second run: keep torch.get_autocast_dtype() in forward, and give it to "
    "torch.autocast(device, dtype, enabled)"
)
PASSED_ON = "that is the gradient of the block's output, as it arrived: return the gradient of its input, x.grad"
NO_KWARGS = "the keyword arguments are lost: keep them, and pass them again in backward"
OTHERS_INPUT = (
    "the second forward's input was used for both backwards: keep what a call needs with that call (ctx), not on the "
    "block or in a global variable"
)
STAYS = "still there after it is over: keep what a call needs on ctx, which goes with the graph"
DOUBLED_INPUT = (
    "the input's gradient counts twice: the second run was not cut off from the input's own history. Start from "
    "x.detach()"
)
DOUBLED = (
    "the parameters' gradients count twice: they are added up by the inner backward, and must not be returned or added "
    "again"
)
HISTORY = (
    "the inner backward went on into what comes before the block: it has to stop at the input. Start from "
    "x.detach().requires_grad_()"
)
OVERWRITTEN = "the gradient that was there is lost: gradients add up in .grad until zero_grad()"
CALLERS = "the caller's tensor: work on x.detach(), which has a requires_grad of its own"
ONE_DTYPE = "right in float32 only: make no tensors of a fixed dtype"
UNDER_ZERO = (
    "right without an engine, wrong under ZeRO: there the block has its parameters only while it is called. Don't "
    "touch block.parameters(); call block(x, ...) in forward and again in backward, and let the gradients add up"
)
TORCHS = "torch.utils.checkpoint is what you are building: write it yourself"
IGNORES_GRAD = "the gradient that arrives is not used: torch.autograd.backward(y, grad) starts from it"


@dataclass
class Seen:
    """What the block saw when it was called."""

    recording: bool
    autocast: torch.dtype | None
    scale: float
    masked: bool
    total: float  # of the input
    dropped: Tensor


class Odd(nn.Module):
    """A block with dropout, keyword arguments, a frozen and an unused parameter, which writes down how it is called."""

    def __init__(self, dtype: torch.dtype = torch.float32, dropout: float = 0.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout, self.seen = dropout, []  # type: ignore[var-annotated]
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_((((7 * torch.arange(param.numel()) + i) % 11 - 5.0) / 32).view(param.shape))
        self.to(dtype)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        hidden = torch.nn.functional.dropout(torch.relu(self.up(x)) + 1.0, self.dropout, self.training)
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dropped = (hidden == 0).detach()
        total = float(x.detach().double().sum())
        self.seen.append(Seen(torch.is_grad_enabled(), autocast, scale, mask is not None, total, dropped))
        y = self.down(hidden) * scale + self.frozen
        if mask is not None:
            y = y * mask
        return x + y.to(x.dtype)

    def grads(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}


def rows(number: int, dtype: torch.dtype = torch.float32, rank: int = 0) -> Tensor:
    count = torch.arange(ROWS * WIDTH, dtype=torch.float64)
    return (((5 * count + 3 * number + rank) % 13 - 6) / 8).view(ROWS, WIDTH).to(dtype)


def upstream(dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(ROWS * WIDTH, dtype=torch.float64) % 5 - 1.5) / 4).view(ROWS, WIDTH).to(dtype)


def check_checkpointed(answer: Any, world: World) -> None:
    with refusing_torchs():
        check_one_block(answer, world, {}, "")
        check_under_an_engine(answer, world)
        if world.world_size > 1:  # the rest has nothing to do with ranks
            return
        check_one_block(answer, world, {"scale": 0.5, "mask": (rows(3) > 0).float()}, "with scale= and mask=")
        check_kept(answer, world)
        check_generator(answer)
        check_no_gradient_to_input(answer, world)
        check_leaf(answer)
        check_autocast(answer)
        check_two_calls(answer)
        check_accumulates(answer)
        check_without_gradients(answer)
        for dtype in (torch.float64, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            check_one_block(answer, world, {}, f"in {name}", dtype, ONE_DTYPE)


@contextmanager
def refusing_torchs() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Wrong("torch.utils.checkpoint was called", TORCHS)

    import torch.utils.checkpoint as torchs

    with (
        patch.object(torchs.CheckpointFunction, "forward", refuse),
        patch.object(torchs, "_checkpoint_without_reentrant_generator", refuse),
    ):
        yield


def run_plain(block: Odd, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What the block returns, with the random numbers that the answer's call will draw."""
    state = torch.get_rng_state()
    y = block(x, **kwargs)
    torch.set_rng_state(state)
    return y


def called(answer: Any, block: Odd, x: Tensor, kwargs: dict[str, Any], when: str) -> Tensor:
    """The answer's forward, after a look at what is the same in every case."""
    before, needed, values_before = len(block.seen), x.requires_grad, x.detach().clone()
    got = answer.checkpointed(block, x, **kwargs)
    if got is None:
        raise Wrong(f"checkpointed() returns nothing{when}", "`return` is missing")
    check_tensor(f"what checkpointed() returns{when}", got, tuple(x.shape), x.dtype)
    calls = len(block.seen) - before
    if calls != 1:
        likely = TWICE_FORWARD if calls else "the block was not called: call block(x, **kwargs)"
        raise Wrong(f"the block was called {values.counted(calls, 'time')} in forward{when}", likely)
    if x.requires_grad != needed:
        raise Wrong(f"x.requires_grad was {needed}, and is {x.requires_grad} after the call{when}", CALLERS)
    if not torch.equal(x.detach(), values_before):
        raise Wrong(f"the values of x have changed{when}", CALLERS)
    return got


def check_one_block(
    answer: Any,
    world: World,
    kwargs: dict[str, Any],
    name: str,
    dtype: torch.dtype = torch.float32,
    likely: str = "",
) -> None:
    """One forward and one backward, of a block in the middle of a graph."""
    when = f" ({name})" if name else ""
    kwargs = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    plain, block = Odd(dtype), Odd(dtype)
    weights = [torch.full((WIDTH,), 0.75, dtype=dtype, requires_grad=True) for _ in range(2)]
    data, grad = rows(0, dtype, world.rank), upstream(dtype)
    with values.in_case(answer, f"checkpointed(block, x){when}", likely, ERRORS):
        want = run_plain(plain, data * weights[0], kwargs)
        x = data * weights[1]
        tasks: list[int] = []
        x.register_hook(lambda _: tasks.append(torch._C._current_graph_task_id()))
        got = called(answer, block, x, kwargs, when)
        if not torch.equal(block.seen[0].dropped, plain.seen[0].dropped):
            raise Wrong(f"dropout chose other elements than in block(x){when}", FIRST_DRAW)
        _compare(f"the output{when}", got, want, NO_KWARGS if kwargs else "not what block(x, **kwargs) returns")
        if not got.requires_grad:
            raise Wrong(
                f"the output needs no gradient{when}", "nothing is recorded: apply() of an autograd.Function is"
            )
        got.register_hook(lambda _: tasks.append(torch._C._current_graph_task_id()))
        blind = Odd(dtype)  # for a backward that starts from ones
        run_plain(blind, rows(0, dtype, world.rank) * 0.75, kwargs).sum().backward()
        want.backward(grad)
        got.backward(grad)
    check_second_run(block, when)
    bias, ones = block.down.bias.grad, blind.down.bias.grad
    if bias is not None and ones is not None and torch.allclose(bias, ones, rtol=0.01):
        raise Wrong(f"the gradient of block.down.bias is that of the sum of the output{when}", IGNORES_GRAD)
    if len(set(tasks)) > 1:
        raise Wrong(f"the gradient of x was passed on from inside the block's backward{when}", HISTORY)
    if (found := weights[1].grad) is not None and torch.allclose(found, (data * grad).sum(0), rtol=0.01):
        raise Wrong(f"the gradient of x is that of the output{when}", PASSED_ON)
    check_grads(block, plain, weights, when, likely)


def check_second_run(block: Odd, when: str, first: int = 0, calls: int = 2) -> None:
    """How the block was called in backward."""
    if len(block.seen) - first < calls:
        raise Wrong(f"the block was not called again in backward{when}", KEPT)
    if len(block.seen) - first > calls:
        more = len(block.seen) - first - calls // 2
        raise Wrong(f"the block was called {more} times in backward{when}", TWICE_BACKWARD)
    one, other = block.seen[first], block.seen[first + calls // 2]
    if (one.scale, one.masked) != (other.scale, other.masked):
        raise Wrong(f"in backward the block got scale={other.scale}, in forward {one.scale}{when}", NO_KWARGS)
    if one.total != other.total:
        raise Wrong(f"in backward the block got another input than in forward{when}", OTHERS_INPUT)
    if one.autocast != other.autocast:
        likely = NO_AUTOCAST if other.autocast is None else AUTOCAST_DTYPE if one.autocast else AUTOCAST_ON
        raise Wrong(f"autocast was {one.autocast} in forward, and {other.autocast} in backward{when}", likely)
    if not other.recording:
        raise Wrong(f"the block was called in backward with gradients switched off{when}", NOT_RECORDED)
    if not torch.equal(one.dropped, other.dropped):
        different = int((one.dropped != other.dropped).sum())
        seen = f"dropout chose other elements in backward than in forward, {different:,} of {one.dropped.numel():,}"
        off = bool(one.dropped.any()) and not bool(other.dropped.any())
        raise Wrong(f"{seen}{when}", OFF if off else DRAWN)


def check_grads(block: Odd, plain: Odd, weights: list[Tensor], when: str, likely: str = "") -> None:
    want, got = weights[0].grad, weights[1].grad
    assert want is not None
    if got is None:
        raise Wrong(f"no gradient has reached what comes before the block{when}", NO_INPUT)
    _compare(f"the gradient of x{when}", got, want, likely, {2.0: DOUBLED_INPUT})
    theirs = block.grads()
    for name, wanted in plain.grads().items():
        found = theirs[name]
        if wanted is None:
            if found is not None and bool(found.any()):
                raise Wrong(f"block.{name} has a gradient{when}", "it is frozen or unused: leave it alone")
            continue
        if found is None:
            raise Wrong(f"block.{name} has no gradient{when}", NO_PARAMS)
        _compare(f"the gradient of block.{name}{when}", found, wanted, likely, {2.0: DOUBLED})


def _compare(what: str, got: Tensor, want: Tensor, likely: str = "", factors: dict[float, str] | None = None) -> None:
    close = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.03}[want.dtype]
    allowed = close * max(1e-3, want.double().abs().max().item())

    def equal(times: float) -> bool:
        return bool(((got.double() - times * want.double()).abs() <= abs(times) * allowed).all())

    if equal(1.0):
        return
    for times, mistake in (factors or {}).items():
        if equal(times):
            raise Wrong(f"{what} is {times:g} x the expected value", mistake)
    if not bool(got.any()):
        raise Wrong(f"{what} is zero everywhere", likely)
    worst = int((got.double() - want.double()).abs().argmax())
    seen = f"{what} is {got.flatten()[worst]:g} at its worst element, expected {want.flatten()[worst]:g}"
    raise Wrong(seen, likely, values_differ=True)


def check_kept(answer: Any, world: World) -> None:
    """What stays between forward and backward, after backward, and if there is none."""
    block, weight, grad = Odd(), torch.full((WIDTH,), 0.75, requires_grad=True), upstream()
    x = rows(0) * weight
    with Alive() as alive:
        y = called(answer, block, x, {}, "")
        z = y * 2.0
        output = weakref.ref(y.untyped_storage())
        block.seen[-1].dropped = torch.empty(0)  # the block's own notes do not count
        own = alive.left(but=(x, y, z))
        del y
        gc.collect()
        with_output = output() is not None
        if sum(nbytes for nbytes, _ in own) > SMALL:
            shape = own[0][1]
            likely = COPIED if shape == tuple(x.shape) and len(own) == 1 else KEPT
            total = sum(nbytes for nbytes, _ in own)
            seen = f"when forward returns, {total:,} bytes are kept besides the input, the largest of shape {shape}"
            raise Wrong(seen, likely)
        if with_output:
            raise Wrong("when nobody else needs the output any more, it is still in memory", OUTPUT)
        z.backward(grad)
        block.seen[-1].dropped = torch.empty(0)
        del z
        left = alive.left(but=(x, weight.grad, *(param.grad for param in block.parameters())))
        if sum(nbytes for nbytes, _ in left) > SMALL:
            total = sum(nbytes for nbytes, _ in left)
            raise Wrong(f"after backward {total:,} bytes are still in memory, the largest of shape {left[0][1]}", STAYS)
    gone = []
    for again in range(2):  # a forward that no backward follows
        x = rows(again) * weight
        y = answer.checkpointed(block, x)
        gone += [weakref.ref(x.untyped_storage())]
        del x, y
    gc.collect()
    if left := [ref for ref in gone if ref() is not None]:
        seen = f"after {values.counted(2, 'forward')} without a backward, the inputs of {len(left)} are in memory"
        raise Wrong(seen, STAYS)


def check_generator(answer: Any) -> None:
    plain, block = Odd(), Odd()
    x, other = rows(0).requires_grad_(), rows(0).requires_grad_()
    torch.manual_seed(11)
    plain(x)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    y = called(answer, block, other, {}, "")
    if not torch.equal(torch.get_rng_state(), after):
        raise Wrong("after forward the random numbers go on from another place than after block(x)", FIRST_DRAW)
    torch.rand(3)
    before = torch.get_rng_state()
    y.backward(upstream())
    if not torch.equal(torch.get_rng_state(), before):
        raise Wrong("backward has changed the state of the random number generator", MOVED)


def check_no_gradient_to_input(answer: Any, world: World) -> None:
    when = " (x needs no gradient, as in a first block)"
    plain, block = Odd(), Odd()
    x = rows(1, rank=world.rank)
    with values.in_case(answer, f"checkpointed(block, x){when}", NEEDS_GRAD, ERRORS):
        want = run_plain(plain, x, {})
        got = called(answer, block, x, {}, when)
        if not got.requires_grad:
            raise Wrong(f"the output needs no gradient{when}", NEEDS_GRAD)
        want.backward(upstream())
        got.backward(upstream())
    if x.grad is not None or x.requires_grad:
        raise Wrong(f"x has got a gradient{when}", CALLERS)
    theirs = block.grads()
    for name, wanted in plain.grads().items():
        if wanted is not None:
            if (found := theirs[name]) is None:
                raise Wrong(f"block.{name} has no gradient{when}", NEEDS_GRAD)
            _compare(f"the gradient of block.{name}{when}", found, wanted)


def check_leaf(answer: Any) -> None:
    """An x that nothing has computed, and a chain of three blocks."""
    when = " (x is a leaf of the graph)"
    plain, block = Odd(), Odd()
    one, other = rows(2).requires_grad_(), rows(2).requires_grad_()
    want = run_plain(plain, one, {})
    want.backward(upstream())
    called(answer, block, other, {}, when).backward(upstream())
    if other.grad is None:
        raise Wrong(f"x has no gradient{when}", NO_INPUT)
    assert one.grad is not None
    _compare(f"the gradient of x{when}", other.grad, one.grad, "", {2.0: DOUBLED_INPUT})
    when = " (three blocks, one after another)"
    chains = [[Odd(dropout=0.0) for _ in range(3)] for _ in range(2)]
    x = rows(2)
    for want_block in chains[0]:
        x = want_block(x)
    x.backward(upstream())
    y = rows(2)
    for got_block in chains[1]:
        y = answer.checkpointed(got_block, y)
    y.backward(upstream())
    for number, (want_block, got_block) in enumerate(zip(*chains, strict=True)):
        for name, wanted in want_block.grads().items():
            if wanted is not None:
                found = got_block.grads()[name]
                if found is None:
                    raise Wrong(f"blocks[{number}].{name} has no gradient{when}", NO_INPUT)
                _compare(f"the gradient of blocks[{number}].{name}{when}", found, wanted)


def check_autocast(answer: Any) -> None:
    _check_autocast(answer, torch.bfloat16, " (forward under autocast, backward outside, as always)")
    _check_autocast(answer, torch.float16, " (forward under autocast in float16, backward outside)")
    block, when = Odd(), " (forward outside of autocast, backward under it)"
    y = called(answer, block, rows(4).requires_grad_(), {}, when)
    with torch.autocast("cpu", torch.bfloat16), values.in_case(answer, f"a backward{when}", AUTOCAST_ON, ERRORS):
        y.backward(upstream())
    check_second_run(block, when)


def _check_autocast(answer: Any, dtype: torch.dtype, when: str) -> None:
    plain, block = Odd(), Odd()
    x = rows(4).requires_grad_()
    with torch.autocast("cpu", dtype):
        want = run_plain(plain, x, {})
        got = called(answer, block, x, {}, when)
    want.backward(upstream())
    with values.in_case(answer, f"a backward{when}", NO_AUTOCAST, ERRORS):
        got.backward(upstream())
    check_second_run(block, when)
    for name, wanted in plain.grads().items():
        if wanted is not None:
            found = block.grads()[name]
            assert found is not None
            _compare(f"the gradient of block.{name}{when}", found, wanted, NO_AUTOCAST)


def check_two_calls(answer: Any) -> None:
    """Two forwards of one block, then their backwards, the first one's first."""
    when = " (two forwards, then two backwards)"
    plain, block = Odd(dropout=0.0), Odd(dropout=0.0)
    sides = []
    for it, call in ((plain, lambda *a, **k: plain(*a, **k)), (block, answer.checkpointed)):
        inputs = [rows(number).requires_grad_() for number in range(2)]
        outputs = []
        for x, scale in zip(inputs, (0.5, 2.0), strict=True):
            outputs.append(call(x, scale=scale) if it is plain else call(block, x, scale=scale))
        for number, y in enumerate(outputs):
            with values.in_case(answer, f"backward {number + 1}{when}", OTHERS_INPUT, ERRORS):
                y.backward(upstream())
        sides.append(inputs)
    runs = block.seen
    for number in range(2):
        if len(runs) > number + 2 and runs[number + 2].total != runs[number].total:
            raise Wrong(f"in backward {number + 1} the block got another input than in forward{when}", OTHERS_INPUT)
        if len(runs) > number + 2 and runs[number + 2].scale != runs[number].scale:
            mine, theirs = runs[number + 2].scale, runs[number].scale
            raise Wrong(f"in backward {number + 1} it got scale={mine}, in its forward {theirs}{when}", OTHERS_INPUT)
    for number, (one, other) in enumerate(zip(*sides, strict=True)):
        if other.grad is None:
            raise Wrong(f"the input of forward {number + 1} has no gradient{when}", OTHERS_INPUT)
        assert one.grad is not None
        _compare(f"the gradient of the input of forward {number + 1}{when}", other.grad, one.grad, OTHERS_INPUT)
    for name, wanted in plain.grads().items():
        if wanted is not None:
            found = block.grads()[name]
            assert found is not None
            _compare(f"the gradient of block.{name}{when}", found, wanted, OVERWRITTEN)


def check_accumulates(answer: Any) -> None:
    """zero_grad(set_to_none=False), and gradients that were there."""
    when = " (after an earlier backward)"
    block = Odd(dropout=0.0)
    answer.checkpointed(block, rows(0)).backward(upstream())
    once = block.grads()
    kept = {name: param.grad for name, param in block.named_parameters()}
    answer.checkpointed(block, rows(0)).backward(upstream())
    for name, grad in block.grads().items():
        wanted = once[name]
        if wanted is not None:
            assert grad is not None
            _compare(f"the gradient of block.{name}{when}", grad, 2.0 * wanted, "", {0.5: OVERWRITTEN, 1.5: DOUBLED})
    for param in block.parameters():
        if param.grad is not None:
            param.grad.zero_()
    answer.checkpointed(block, rows(0)).backward(upstream())
    for name, param in block.named_parameters():
        if (wanted := once[name]) is not None and param.grad is not None:
            _compare(f"the gradient of block.{name} (after zero_grad(set_to_none=False))", param.grad, wanted)
            if kept[name] is not param.grad and kept[name] is not None:
                world_sees = "what was .grad is another tensor now"
                raise Wrong(f"block.{name}: {world_sees}", OVERWRITTEN)


def check_without_gradients(answer: Any) -> None:
    """Evaluation: nothing is recorded, and the block runs once."""
    block, x = Odd(), rows(0)
    with torch.no_grad(), Alive() as alive:
        y = called(answer, block, x, {}, " (under torch.no_grad())")
        block.seen[-1].dropped = torch.empty(0)
        if y.requires_grad:
            raise Wrong("under torch.no_grad() the output needs a gradient", "the caller has switched gradients off")
        left = alive.left(but=(x, y))
        if sum(nbytes for nbytes, _ in left) > SMALL:
            raise Wrong(f"under torch.no_grad() a tensor of shape {left[0][1]} stays in memory", STAYS)


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


def check_under_an_engine(answer: Any, world: World) -> None:
    """In stages 0 and 3, whose parameters come and go, the weights after two steps must be those without."""
    if world.world_size not in (2, 3):
        return
    for stage in (zerolab.DDP, zerolab.Zero3):
        weights = []
        for how in (lambda block, x: block(x), answer.checkpointed):
            when = f"training under zerolab.{stage.__name__}"
            with values.in_case(answer, when, UNDER_ZERO, {}):
                zero = stage(Model(how), units=[Small])
                optimizer = SGD(zero.model.parameters(), lr=0.125)
                for step in range(2):
                    x = (torch.arange(12.0).view(3, 4) + step - world.rank) / 8
                    zero.model(x).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                weights.append(zero.full_state_dict())
        for name, wanted in weights[0].items():
            _compare(f"{name} after two steps under zerolab.{stage.__name__}", weights[1][name], wanted, UNDER_ZERO)


CHECKPOINTED_STUB = '''\
import torch
from torch import Tensor, nn
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


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, asks: Tensor, block: nn.Module, x: Tensor, kwargs: dict) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block, ctx.kwargs, device = block, kwargs, x.device.type
        ctx.random = torch.get_rng_state()
        ctx.autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return block(x, **kwargs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (kept,) = ctx.saved_tensors
        x = kept.detach().requires_grad_(kept.requires_grad)
        autocast = torch.autocast(x.device.type, *ctx.autocast)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:
            torch.set_rng_state(ctx.random)
            y = ctx.block(x, **ctx.kwargs)
        torch.autograd.backward(y, grad)
        return None, None, x.grad, None


def checkpointed(block: nn.Module, x: Tensor, **kwargs) -> Tensor:
    return Recompute.apply(torch.empty(0, requires_grad=True), block, x, kwargs)
"""

ERRORS = {
    "does not require grad and does not have a grad_fn": NOT_RECORDED,
    "backward through the graph a second time": HISTORY,
    "can only save variables": "save_for_backward() takes tensors alone; anything else is an attribute, ctx.block",
    "takes no keyword arguments": "apply() takes no keyword arguments: give it the dictionary itself",
    "incorrect number of gradients": "backward() returns one value for each argument of forward(), without ctx: None "
    "for those that need no gradient",
    "unexpected keyword argument": NO_KWARGS,
    "can't retain_grad on Tensor that has requires_grad=False": NOT_RECORDED,
    "Cannot access data pointer": "the memory was given back: keep x itself",
    "leaf variable that requires grad": CALLERS,
    "you can only change requires_grad flags of leaf": "x has a history here: x.detach() first, then requires_grad_()",
    "same dtype": NO_AUTOCAST,
    "returned an invalid gradient at index": "backward() returns the gradients in the order of forward()'s arguments, "
    "without ctx",
    "'tuple' object has no attribute": "ctx.saved_tensors is a tuple, even of one tensor: (x,) = ctx.saved_tensors",
}


# ---------------------------------------------------------------------- 10.2

SHARD = 512
PARTS = ((200, 512), (0, 200))  # as backward sends them: the last first

NOT_DOWN = (
    "the masters did not come over the link: link.to_host(shard) copies the shard; anything else (.clone(), .float()) "
    "makes a copy where the shard is, on the device"
)
SAME_MEMORY = (
    "the optimizer works on the device's own shard, so its state would be there too: give it a copy, link.to_host"
)
LOW = "the masters must be float32, whatever the shard is: small updates are lost in 16 bits (lesson 02)"
WIDE_DOWN = "cast before it was sent, so twice the bytes travel: send the gradient as it is, and cast on the host"
WIDE_UP = "sent in float32, and rounded only on the device: cast to the shard's dtype on the host, and send half"
GRAD_BYPASS = (
    "the gradient did not come over the link when it was there: on a GPU it is on the device, which needs the memory; "
    "link.to_host(grad) copies it"
)
UP_BYPASS = "the new values did not go over the link: link.to_device(shard, ...) copies them, in the shard's dtype"
NEVER = "the device never gets the new values: link.to_device(self.shard, ...) after the update"
TOO_OFTEN = "more travels than the part that came: send this part alone, when it comes"
BF16 = "the masters are kept in the shard's 16 bits, where small updates are lost"
NOT_CLEARED = "the last step's gradients are still in it: after a step begin with zeros"
NOT_ADDED = "the second micro-batch's gradient has replaced the first one's: what comes before a step adds up"
NO_START = "`start` is not used: the part belongs at shard[start : start + len(grad)]"
RELOADED = (
    "the masters were loaded from the shard again, which has only their rounded values: the host's copy is the true one"
)
AVERAGED = "the micro-batches were averaged: until step(), gradients add up; what arrives is divided already"
KEPT_THERE = (
    "the device cannot give its memory back while you keep the gradient itself: keep the copy that link.to_host(grad) "
    "returns"
)
DIFFERENCE = (
    "an update is too small for 16 bits to add it up there: send the masters' new values, which replace the shard's"
)
TOO_NARROW = "rounded to 16 bits, and this shard has more: cast to the shard's own dtype, self.shard.dtype"
DOUBLE = "float32 is enough for the masters: float64 takes twice the host's memory"
A_LIST = "make_optimizer takes a list of tensors, as every optimizer does: make_optimizer([master])"
LATE = "the values of the step before: the masters were sent before the optimizer had updated them"
NEW_STATE = "the optimizer's state starts over in every step: make the optimizer once, in __init__, and keep it"
SUM_16 = "gradients were added up in the shard's 16 bits, which rounds: cast each to float32 first"
ONE_PART = "only one of the parts had an effect: every part of the gradient counts"
EARLY = "updated before step(): receive() only takes the gradient, there may be more to come"
REPLACED = (
    "self.shard is another tensor now: the model reads the old one. Copy into it, link.to_device(self.shard, ...)"
)
SHARED = "two HostOptimizers share something: keep it on self, not on the class or in a global variable"
OWN_OPTIMIZER = "make_optimizer([...]) makes the optimizer: it knows which kind, and with what settings"
MUCH = "the host needs 16 bytes an element: masters, gradients and Adam's two averages in float32"
NOT_TOUCHED = "the gradient is the caller's: work on the copy"
OTHER_16 = "rounded to another 16-bit format on the way: cast to the shard's own dtype, self.shard.dtype"
NO_UPDATE = "the masters are as before: the optimizer saw no gradient, or was not asked to step"
SCALED = "the gradient that arrives is the mean already: do not divide it again"


class Meter(HostLink):
    """Counts what crosses, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[Tensor] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        result = super().to_host(tensor)
        self.came.append(result)
        return result

    def to_device(self, out: Tensor, tensor: Tensor) -> None:
        if tensor.dtype != out.dtype and tensor.itemsize == out.itemsize:
            raise Wrong(f"link.to_device() was given {tensor.dtype} for a shard of {out.dtype}", OTHER_16)
        super().to_device(out, tensor)


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype
    make: Callable[[list[Tensor]], Optimizer]
    held: int = 0  # bytes for each element, where they are counted


def adam(params: list[Tensor]) -> Optimizer:
    return Adam(params, lr=3e-3)


def momentum(params: list[Tensor]) -> Optimizer:
    return SGD(params, lr=3e-3, momentum=0.5)


CASES = (
    Case("in bfloat16, with Adam", torch.bfloat16, adam, 16),
    Case("in float32, with SGD and momentum", torch.float32, momentum),
    Case("in float16, with Adam", torch.float16, adam),
)

# For each step, the micro-batches; each is a list of parts. The last step gets one part alone.
STEPS = ((PARTS,), (PARTS, PARTS), (PARTS[::-1],), (PARTS[:1],))


def gradient(step: int, micro: int, dtype: torch.dtype, size: int = SHARD) -> Tensor:
    """Not the same for any two, and such that sums do not fit into 16 bits."""
    count = torch.arange(size, dtype=torch.float64)
    base = 1.0 + ((3 * count + 5 * step) % 17) / 8
    return (base * (1.0 if micro == 0 else 2.0**-9) * (-1.0) ** step).to(dtype)


def first_shard(dtype: torch.dtype) -> Tensor:
    return (1.0 + (torch.arange(SHARD, dtype=torch.float64) % 7) / 4).to(dtype)


def simulate(case: Case, how: str = "") -> list[tuple[Tensor, Tensor]]:
    """The masters and the shard after each step, done right or with the mistake `how`."""
    shard = first_shard(case.dtype)
    master = shard.clone() if how == "bf16" else shard.float()
    total = torch.zeros(SHARD, dtype=case.dtype if how == "sum" else torch.float32)
    master.grad = total.to(master.dtype)
    optimizer, found = case.make([master]), []
    for step, micros in enumerate(STEPS):
        for micro, parts in enumerate(micros):
            full = gradient(step, micro, case.dtype)
            if how == "one part":
                parts = parts[-1:]
            for start, end in parts:
                at = slice(0, end - start) if how == "start" else slice(start, end)
                piece = full[start:end].to(total.dtype)
                total[at] = piece if how == "last" else total[at] + piece
                if how == "each":
                    master.grad = total.clone()
                    optimizer.step()
                    total.zero_()
        if how == "reload":
            master.copy_(shard)
        if how == "new":
            optimizer = case.make([master])
        old = master.clone()
        master.grad = total.to(master.dtype) / (len(micros) if how == "mean" else 1)
        if how != "each":
            optimizer.step()
        shard.copy_(old if how == "late" else master)
        if how != "keeps":
            total.zero_()
        found.append((master.float().clone(), shard.clone()))
    return found


SUSPECTS = {
    "bf16": BF16,
    "sum": SUM_16,
    "keeps": NOT_CLEARED,
    "last": NOT_ADDED,
    "start": NO_START,
    "reload": RELOADED,
    "late": LATE,
    "new": NEW_STATE,
    "one part": ONE_PART,
    "mean": AVERAGED,
    "each": EARLY,
}  # "late" differs in the shard alone


def check_host_optimizer(answer: Any, world: World) -> None:
    for case in CASES if world.world_size == 1 else CASES[:1]:  # what is checked has nothing to do with ranks
        check_case(answer, case)
    check_two(answer)


def make_and_note(case: Case, made: list[list[Tensor]]) -> Callable[[Any], Optimizer]:
    def make(params: Any) -> Optimizer:
        if isinstance(params, Tensor):
            raise Wrong("make_optimizer got a tensor, not a list", A_LIST)
        params = list(params)
        if params and isinstance(params[0], dict):
            params = [param for group in params for param in group["params"]]
        made.append(params)
        return case.make(params)

    return make


def check_case(answer: Any, case: Case) -> None:
    shard, link, made = first_shard(case.dtype), Meter(), []  # type: ignore[var-annotated]
    itemsize, expected = case.dtype.itemsize, simulate(case)
    suspects = {how: simulate(case, how) for how in SUSPECTS}
    with values.in_case(answer, f"{case.name}: HostOptimizer(...)", "", ERRORS2), Alive() as alive:
        host = answer.HostOptimizer(shard, make_and_note(case, made), link)
        check_made(made, shard, link, case)
        for step, micros in enumerate(STEPS):
            before, bytes_down = shard.clone(), link.down
            sent = 0
            for micro, parts in enumerate(micros):
                full = gradient(step, micro, case.dtype)
                for start, end in parts:
                    grad = full[start:end].clone()
                    asked = f"{case.name}, step {step + 1}: receive({start}, grad)"
                    with values.in_case(answer, asked, "", ERRORS2):
                        host.receive(start, grad)
                    sent += grad.numel() * itemsize
                    check_sent(asked, link.down - bytes_down, sent)
                    if not torch.equal(grad, full[start:end]):
                        raise Wrong(f"{asked}: grad has changed", NOT_TOUCHED)
                    there = weakref.ref(grad.untyped_storage())
                    del grad
                    if there() is not None and gc.collect() >= 0 and there() is not None:
                        raise Wrong(f"{asked}: the gradient on the device is still in memory afterwards", KEPT_THERE)
            if not torch.equal(shard, before):
                raise Wrong(f"{case.name}, step {step + 1}: the shard has changed before step() was called", EARLY)
            up = link.up
            asked = f"{case.name}, step {step + 1}: step()"
            with values.in_case(answer, asked, "", ERRORS2):
                host.step()
            if len(made) > 1:
                raise Wrong(f"{asked}: make_optimizer was called {len(made)} times", NEW_STATE)
            if not made:
                raise Wrong(f"{asked}: make_optimizer was never called", OWN_OPTIMIZER)
            check_made(made, shard, link, case)
            wrong = {how: found[step] for how, found in suspects.items()}
            last = expected[step - 1][0] if step else first_shard(case.dtype).float()
            check_masters(asked, made[0], expected[step][0], wrong, last, step)
            check_values(asked, shard, before, expected[step][1], wrong, host, link.up - up, step)
            check_up(asked, link.up - up, SHARD * itemsize)
            if link.down - bytes_down > sent:
                raise Wrong(f"{asked}: {link.down - bytes_down - sent:,} bytes more came to the host", RELOADED)
        if shard.requires_grad:
            raise Wrong(f"{case.name}: the shard needs a gradient now", "copy values, not what autograd recorded")
        del full, before, last, expected, suspects, link.came[:]
        if case.held:
            held = alive.left(but=(shard,))
            total = sum(nbytes for nbytes, shape in held if nbytes >= SHARD)
            if total > (case.held + itemsize) * SHARD:
                seen = f"{case.name}: after four steps {total / SHARD:.1f} bytes an element are held besides the shard"
                raise Wrong(seen, MUCH)


def check_made(made: list[list[Tensor]], shard: Tensor, link: Meter, case: Case) -> None:
    if not made:
        return  # perhaps in the first step
    params, at = made[0], f"{case.name}: the optimizer"
    if not all(isinstance(param, Tensor) for param in params):
        raise Wrong(f"{at} got {type(params[0]).__name__}, not a tensor", "make_optimizer takes a list of tensors")
    if sum(param.numel() for param in params) != SHARD:
        got = sum(param.numel() for param in params)
        raise Wrong(f"{at} got {got} elements, not {SHARD}", "one float32 master for each element of the shard")
    if any(param.untyped_storage()._cdata == shard.untyped_storage()._cdata for param in params):
        raise Wrong(f"{at} got the shard's own memory", SAME_MEMORY)
    if any(param.dtype != torch.float32 for param in params):
        raise Wrong(f"{at} got {params[0].dtype} to update", DOUBLE if params[0].itemsize > 4 else LOW)
    wanted = SHARD * case.dtype.itemsize
    if link.down < wanted:
        seen = f"{case.name}: {link.down:,} bytes had come to the host when the optimizer was made, not {wanted:,}"
        raise Wrong(seen, NOT_DOWN)


def check_sent(asked: str, came: int, wanted: int) -> None:
    if came == wanted:
        return
    if came < wanted:
        raise Wrong(f"{asked}: {came:,} bytes came to the host, not {wanted:,}", GRAD_BYPASS)
    likely = WIDE_DOWN if came == 2 * wanted else TOO_OFTEN
    raise Wrong(f"{asked}: {came:,} bytes came to the host, not {wanted:,}", likely)


def check_up(asked: str, went: int, wanted: int) -> None:
    if went != wanted:
        likely = (
            WIDE_UP if went == 2 * wanted else UP_BYPASS if went < wanted else "send the shard once, after the step"
        )
        raise Wrong(f"{asked}: {went:,} bytes went to the device, not {wanted:,}", likely)


CLOSE = 3e-7


def matches(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want.double(), rtol=CLOSE, atol=0.0)


def check_masters(
    asked: str, params: list[Tensor], want: Tensor, suspects: dict[str, tuple[Tensor, Tensor]], last: Tensor, step: int
) -> None:
    got = torch.cat([param.detach().flatten() for param in sorted(params, key=Tensor.data_ptr)])
    if matches(got, want):
        return
    likely = next((SUSPECTS[how] for how, (found, _) in suspects.items() if matches(got, found)), "")
    if matches(got, last):
        likely = likely or NO_UPDATE
    elif not step and not likely:
        ratio = (got - last) / (want - last)
        likely = SCALED if torch.allclose(ratio, ratio.median(), rtol=0.01) else ""
    seen = f"{asked}: {_difference(got, want)} of the masters are wrong"
    raise Wrong(f"{seen}, {_worst(got, want)}", likely, values_differ=True)


def check_values(
    asked: str,
    got: Tensor,
    before: Tensor,
    want: Tensor,
    suspects: dict[str, tuple[Tensor, Tensor]],
    host: Any,
    went: int,
    step: int,
) -> None:
    if matches(got, want):
        return
    late = matches(got, suspects["late"][1])
    likely = LATE if late and not step else DIFFERENCE if late else ""
    if any(matches(got, want.to(low).to(want.dtype)) for low in (torch.bfloat16, torch.float16)):
        likely = TOO_NARROW
    if torch.equal(got, before) and _replaced(host, got, want):
        likely = REPLACED
    elif torch.equal(got, before) and not went:
        likely = NEVER
    seen = (
        f"{asked}: {_difference(got, want)} of the shard are wrong, {_worst(got, want)}, though the masters are right"
    )
    raise Wrong(seen, likely, values_differ=True)


def _difference(got: Tensor, want: Tensor) -> str:
    wrong = int((~torch.isclose(got.double(), want.double(), rtol=CLOSE, atol=0.0)).sum())
    return f"{wrong:,} of {SHARD} elements"


def _worst(got: Tensor, want: Tensor) -> str:
    at = int((got.double() - want.double()).abs().argmax())
    return f"[{at}] is {got[at]:.7g}, expected {want[at]:.7g}"


def _replaced(host: Any, shard: Tensor, want: Tensor) -> bool:
    """Whether the right values are in another tensor of the shard's dtype, which the answer keeps."""
    kept = [value for value in vars(host).values() if isinstance(value, Tensor) and value.dtype == shard.dtype]
    return any(value.shape == want.shape and matches(value, want) for value in kept)


def check_two(answer: Any) -> None:
    """A second one, made and used while the first is in the middle of a step."""
    case = CASES[0]
    shards, hosts = [first_shard(case.dtype) for _ in range(2)], []  # type: ignore[var-annotated]
    for shard in shards:
        hosts.append(answer.HostOptimizer(shard, case.make, HostLink()))
    full = gradient(0, 0, case.dtype)
    with values.in_case(answer, "two HostOptimizers", SHARED, ERRORS2):
        for start, end in PARTS:
            hosts[0].receive(start, full[start:end].clone())
            hosts[1].receive(start, -full[start:end].clone())
        for host in hosts:
            host.step()
    for number, sign in ((0, 1.0), (1, -1.0)):
        master = first_shard(case.dtype).float()
        master.grad = sign * full.float()
        case.make([master]).step()
        if not matches(shards[number], master.to(case.dtype)):
            raise Wrong(f"two HostOptimizers, one step each: the shard of number {number + 1} is wrong", SHARED)


ERRORS2 = {
    "NoneType": "the gradient is None: zero_grad() sets it to None unless you say set_to_none=False. Keep a buffer of "
    "zeros, and zero it after a step",
    "expected to have the same dtype": "a tensor's .grad has the tensor's dtype: cast to float32 on the host",
    "assigned grad has data of a different": "a tensor's .grad has its size and dtype: cast, and mind the part",
    "a leaf Variable that requires grad": "change values under torch.no_grad(), or use a tensor that needs no gradient",
    "can't optimize a non-leaf": "the optimizer takes a tensor with no history: detach() it",
    "assign a gradient of size": "the shard's gradient has one element for each of the shard's: put each part at its "
    "place, and add up those of several micro-batches",
    "must match the size": "the part belongs at [start : start + len(grad)], not over the entire shard",
    "doesn't match the broadcast shape": "the part belongs at [start : start + len(grad)], not over the entire shard",
}

HOST_STUB = '''\
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from zerolab.lab.exercises import Todo
from zerolab.lab.host import HostLink


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
from zerolab.lab.host import HostLink


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
        check=check_checkpointed,
        stub=CHECKPOINTED_STUB,
        reference=CHECKPOINTED,
        hints=(
            "forward: keep x, block, kwargs, torch.get_rng_state() and the autocast state on ctx; return "
            "block(x, **kwargs).",
            "backward: x = kept.detach().requires_grad_(kept.requires_grad), then under torch.enable_grad() "
            "y = block(x, **kwargs), then torch.autograd.backward(y, grad). The input's gradient is x.grad.",
            "The second run needs three contexts: torch.random.fork_rng(devices=[]), in which you call "
            "torch.set_rng_state(...); torch.enable_grad(); and torch.autocast(x.device.type, dtype, enabled). Return "
            "None, None, x.grad, None.",
        ),
        exports=("checkpointed",),
        errors=ERRORS,
    ),
    Exercise(
        id="10.2",
        title="optimizer state on the host",
        difficulty=3,
        section="Write: an optimizer on the host",
        check=check_host_optimizer,
        stub=HOST_STUB,
        reference=HOST,
        hints=(
            "The master is link.to_host(shard).float(). The cast happens after the trip, so 2 bytes an element travel.",
            "master.grad is zeros at first. receive() adds to master.grad[start : start + len(grad)].",
            "step(): self.optimizer.step(), then self.link.to_device(self.shard, self.master.to(self.shard.dtype)), "
            "then self.master.grad.zero_().",
        ),
        exports=("HostOptimizer",),
        errors=ERRORS2,
    ),
]
