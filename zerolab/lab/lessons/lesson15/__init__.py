"""Lesson 15: an MLP split over the ranks, and one stage of a pipeline."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene, in_groups


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def places_in(got: Any, whole: Tensor, first: int) -> str:
    """Which rows of `whole` are those of `got`, counted from `first`."""
    if not isinstance(got, Tensor) or got.shape[1:] != whole.shape[1:]:
        return ""
    at = [torch.nonzero((whole == row).view(len(whole), -1).all(1)).flatten().tolist() for row in got.detach()[:, None]]
    return " ".join(f"{found[0] - first:+}" if found else "none" for found in at)


# ---------------------------------------------------------------------- 15.1


class Whole(nn.Module):
    """zerolab's MLP, with any widths."""

    def __init__(self, width: int, hidden: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, dtype=dtype), nn.Linear(hidden, width, dtype=dtype)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(noise(tuple(param.shape), seed + number) / param.shape[-1] ** 0.5)


def padding(play: Play, tensor: Tensor) -> float:
    """Bytes that an all-reduce sends more if it is made in two halves, of parts of equal size."""
    return -tensor.numel() % play.size * tensor.element_size() * 2.0 * (play.size - 1) / play.size


def enter_and_leave(play: Play, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    code = play.code
    x = play.keep("`x`", play.base(*shape).to(dtype).requires_grad_())
    y = play.call("Enter.apply(x, group)", code.Enter.apply, x, play.group)
    grad = play.keep("the gradient that came back", play.share(play.base(*shape, name="it"), play.rank).to(dtype))
    branch = play.keep("another branch", torch.zeros(shape, dtype=dtype, requires_grad=True))
    with play.event("Enter's backward", slack=padding(play, x)):
        (y + branch).backward(grad)

    parts = play.base(*shape, name="the sum")
    part = play.keep("`part`", play.share(parts, play.rank).to(dtype))
    with play.event("Leave.apply(part, group)", slack=padding(play, part)), torch.no_grad():
        y = code.Leave.apply(part, play.group)
    play.see("the result", y)
    leaf = part.clone().requires_grad_()
    with play.event("Leave.apply(part, group) of a part that requires a gradient", slack=padding(play, part)):
        y = code.Leave.apply(leaf + 0, play.group)
    play.see("the result", y)
    play.keep("the part that requires a gradient", leaf)
    grad = play.keep("the gradient of the sum", play.base(*shape).to(dtype))
    with play.event("Leave's backward"):
        y.backward(grad)


class Split:
    """The answer's part of a whole MLP, and what is looked at when it is made and used."""

    def __init__(
        self,
        play: Play,
        name: str,
        width: int = 3,
        hidden: int = 24,
        seed: int = 1,
        dtype: torch.dtype = torch.float64,
        group: Any = None,
    ) -> None:
        self.play, self.name, self.shape, self.dtype = play, name, (2, 6, width), dtype
        self.group = group or play.group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.whole = play.keep(f"the whole `{name}`", Whole(width, hidden, seed, dtype))
        with play.event(f"MyMLP({name}, group)", draws=True):  # as nn.Linear does
            self.made = play.code.MyMLP(self.whole, self.group)
        play.see("MyMLP is an nn.Module", isinstance(self.made, nn.Module))
        self.parameters = dict(self.made.named_parameters())
        play.see(f"the parameters of MyMLP({name})", self.parameters)
        for key, param in self.parameters.items():
            play.at_most(f"bytes of memory that {key} holds", param.untyped_storage().nbytes())
        theirs = {param.untyped_storage().data_ptr() for param in self.whole.parameters()}
        ours = {param.untyped_storage().data_ptr() for param in self.parameters.values()}
        play.see("every part is a copy, in memory of its own", not theirs & ours)
        first = self.ranks.index(play.world.rank) * hidden // len(self.ranks)
        play.clue("rows of up", places_in(self.parameters.get("up.weight"), self.whole.up.weight, first))
        columns = self.parameters.get("down.weight", torch.empty(0)).t()
        play.clue("columns of down", places_in(columns, self.whole.down.weight.t(), first))

    def look_at_parameters(self) -> None:
        """After every event from now on, with their gradients."""
        self.play.keep(f"MyMLP({self.name})", self.parameters)

    def input(self, seed: int, times: float = 1.0, shape: tuple[int, ...] = ()) -> Tensor:
        """Other numbers in each group of ranks, so that a sum over all ranks shows."""
        x = times * noise(shape or self.shape, 100 * self.ranks[0] + seed, self.dtype)
        return self.play.keep(f"x{seed}", x.requires_grad_())

    def forward(self, x: Tensor, name: str) -> Tensor:
        with self.play.event(f"the forward pass of {name}", slack=padding(self.play, x)):
            y = self.made(x)
        self.play.keep(f"the output for {name}", y)
        self.play.see(f"the output for {name}", y)
        return y

    def backward(self, y: Tensor, name: str, **options: Any) -> None:
        with self.play.event(f"the backward pass of {name}", slack=padding(self.play, y)):
            y.backward(noise(tuple(y.shape), 11, self.dtype), **options)


def in_an_mlp(play: Play, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = ()) -> None:
    play.loose = 1e-12  # in a matrix product
    split = Split(play, "mlp", dtype=dtype)
    split.look_at_parameters()
    x = split.input(1, shape=shape)
    split.backward(split.forward(x, "x1"), "x1")


def again(play: Play) -> None:
    """Two MLPs, and of one two forwards before the backwards, the first of them twice; then without zero_grad()."""
    play.loose = 1e-12
    one, other = Split(play, "mlp"), Split(play, "other", 4, 12, 31)
    one.look_at_parameters()
    other.look_at_parameters()
    outputs = [one.forward(one.input(1), "x1"), other.forward(other.input(2), "x2"), one.forward(one.input(3), "x3")]
    one.backward(outputs[0], "x1", retain_graph=True)
    one.backward(outputs[2], "x3")
    other.backward(outputs[1], "x2")
    one.backward(outputs[0], "x1, a second time")
    one.made.zero_grad()
    one.backward(one.forward(one.input(4, times=30.0), "x4"), "x4")


def two_groups(play: Play) -> None:
    """One MLP on some of the ranks, another on all, by turns."""
    play.loose = 1e-12
    one, other = Split(play, "mlp"), Split(play, "other", 4, 12, 31, group=dist.group.WORLD)
    outputs = [one.forward(one.input(1), "x1"), other.forward(other.input(2), "x2")]
    one.backward(outputs[0], "x1")
    other.backward(outputs[1], "x2")


def left_alone(play: Play) -> None:
    """What a split keeps, when nobody else holds the whole MLP any more."""
    whole = Whole(3, 12, 1, torch.float32)
    theirs = [weakref.ref(part) for part in (whole, *whole.parameters())]
    with play.event("MyMLP(mlp, group)", draws=True):
        made = play.code.MyMLP(whole, play.group)
    del whole
    if any(ref() is not None for ref in theirs):
        gc.collect()
    play.see("the whole `mlp` can go, the parts are enough", not any(ref() is not None for ref in theirs))
    del made


def frozen(play: Play) -> None:
    """As inside torch.no_grad(), and then where some need no gradient."""
    play.loose = 1e-12
    split = Split(play, "mlp")
    split.look_at_parameters()
    x = split.input(1)
    with torch.no_grad():
        split.forward(x, "x1 under torch.no_grad()")
    split.parameters["up.weight"].requires_grad_(False)
    split.backward(split.forward(x.detach(), "x1, which needs no gradient"), "x1, which needs no gradient")


AGAIN = "right the first time: keep nothing from one call to the next, except in ctx"
DTYPE = "keep the dtype of the arguments, and convert nothing"
SPLIT_BATTERY = (
    Scene("", lambda play: enter_and_leave(play, 4, 6)),
    Scene("with 5 x 7 elements", lambda play: enter_and_leave(play, 5, 7), "take the shape from the argument"),
    Scene("in bfloat16", lambda play: enter_and_leave(play, 3, 4, dtype=torch.bfloat16), DTYPE),
    Scene("in an MLP", in_an_mlp),
    Scene("", left_alone, "keep a copy of this rank's parts, and not `mlp`, which would stay in memory as long"),
    Scene("in an MLP in bfloat16", lambda play: in_an_mlp(play, torch.bfloat16), DTYPE),
    Scene(
        "in an MLP for a single vector",
        lambda play: in_an_mlp(play, shape=(3,)),
        "the last dimension is that of the features, and any number of others may stand before it",
    ),
    Scene("in two MLPs that take turns", again, AGAIN),
    Scene(
        "in an MLP on some ranks and another on all",
        two_groups,
        "each MLP has a group of its own: keep it in self, and in ctx, and not for all MLPs together",
        sizes=(3, 4),
        groups="strided",
    ),
    Scene("in an MLP of which some needs no gradient", frozen, AGAIN),
    *(
        scene
        for scene in in_groups(
            in_an_mlp,
            "only some ranks share this MLP: pass group=..., and take rank and size from it, dist.get_rank(group)",
        )
        if scene.groups != "strided"  # those have two MLPs, above
    ),
)

SPLIT_STUB = '''\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from zerolab.lab.exercises import Todo


class Enter(torch.autograd.Function):
    """x, the same on every rank, enters the split region, where the ranks differ."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        """Keep the group. Return a new tensor in x's memory: autograd must not get x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Return two things, the gradient of x and None, since `group` has none.

        `grad` is this rank's part of it. Don't write into it: autograd may use it
        elsewhere. dist.all_reduce(tensor, group=group) adds up in place.
        """
        raise Todo("15.1")


class Leave(torch.autograd.Function):
    """A part of a sum leaves the split region as the whole sum, the same on every rank."""

    @staticmethod
    def forward(ctx, part: Tensor, group) -> Tensor:
        """Return the sum over the group in a new tensor; leave `part` unchanged."""
        raise Todo("15.1")

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Return the gradient of `part`, and None for `group`."""
        raise Todo("15.1")


class MyMLP(nn.Module):
    """This rank's part of an MLP: `mlp.up` is nn.Linear(C, hidden), down the reverse."""

    def __init__(self, mlp: nn.Module, group) -> None:
        """This rank has the units from rank * hidden / N to (rank + 1) * hidden / N."""
        super().__init__()
        self.group = group
        rank, N = dist.get_rank(group), dist.get_world_size(group)
        self.up, self.down = nn.Module(), nn.Module()
        columns = mlp.down.weight.detach().chunk(N, dim=1)[rank]
        self.up.weight = nn.Parameter(mlp.up.weight.detach().chunk(N)[rank].clone())
        self.up.bias = nn.Parameter(mlp.up.bias.detach().chunk(N)[rank].clone())
        self.down.weight = nn.Parameter(columns.clone())  # (C, hidden / N)
        self.down.bias = nn.Parameter(mlp.down.bias.detach().clone())  # on every rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C): down(gelu(up(x))) of the whole MLP, x the same on all."""
        raise Todo("15.1")
'''

SPLIT = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, group) -> Tensor:
        part = part.clone()
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class MyMLP(nn.Module):
    def __init__(self, mlp: nn.Module, group) -> None:
        super().__init__()
        self.group = group
        rank, N = dist.get_rank(group), dist.get_world_size(group)
        self.up, self.down = nn.Module(), nn.Module()
        columns = mlp.down.weight.detach().chunk(N, dim=1)[rank]
        self.up.weight = nn.Parameter(mlp.up.weight.detach().chunk(N)[rank].clone())
        self.up.bias = nn.Parameter(mlp.up.bias.detach().chunk(N)[rank].clone())
        self.down.weight = nn.Parameter(columns.clone())  # (C, hidden / N)
        self.down.bias = nn.Parameter(mlp.down.bias.detach().clone())  # on every rank

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias))
        return Leave.apply(F.linear(hidden, self.down.weight), self.group) + self.down.bias
"""


# ---------------------------------------------------------------------- 15.2

WIDTH = 3
SHAPES = ((3, 5), (1, 1), (2, 1), (2, 2), (2, 5), (3, 1), (3, 2), (4, 1), (4, 4), (4, 8), (5, 7), (6, 3))


def in_words(steps: Any) -> Any:
    """F0 F1 B0 ..., as the hints write it; what is no list of steps, as it is."""
    if steps is None or isinstance(steps, (str, dict, int)):
        return steps
    said = []
    for step in steps:
        pair = isinstance(step, (tuple, list)) and len(step) == 2 and step[0] in ("forward", "backward")
        said.append(f"{step[0][0].upper()}{step[1]}" if pair and isinstance(step[1], int) else repr(step))
    return " ".join(said)


def orders(play: Play) -> None:
    for size, M in SHAPES:
        inputs = [torch.zeros(1, WIDTH) for _ in range(M)]
        for rank in range(size):
            name = f"order() of rank {rank} of {size}, micro_batches={M}"
            with play.event(name):
                pipe = play.code.MyPipeline(nn.Identity(), inputs, None, inputs[0], rank=rank, size=size)
                steps = in_words(pipe.order())
            play.see(name, steps)
            flying = steps.replace("F", "+").replace("B", "-").split() if isinstance(steps, str) else []
            ahead = [sum(1 if s[0] == "+" else -1 for s in flying[:i]) for i in range(len(flying) + 1)]
            play.clue("more in flight than stages ahead", max(ahead) - min(size - rank, M))


class Stage(nn.Module):
    """A small stage; the first one has a frozen bias, and embeds whole numbers. Keeps none of its outputs alive."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        with torch.no_grad():
            self.layer.weight.copy_(noise((WIDTH, WIDTH), 100 + number))
            self.layer.bias.copy_(noise((WIDTH,), 200 + number))
        self.layer.bias.requires_grad_(number != 0)
        self.alive: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = F.one_hot(x, WIDTH).to(self.layer.weight.dtype)
        y = torch.tanh(self.layer(x))
        self.alive.append(weakref.ref(y))
        return y


def staged(
    play: Play, rank: int, size: int, M: int, dtype: torch.dtype, alone: bool, seed: int, tokens: bool = False
) -> Any:
    """An answer's stage. alone: nothing leaves the rank, and what would come from others is made up."""
    targets = [noise((2, WIDTH), 1000 + seed + m, dtype) for m in range(M)]
    inputs = [noise((2, WIDTH), seed + m, dtype) for m in range(M)]
    if tokens:
        inputs = [(10 * x[:, 0]).long() % WIDTH for x in inputs]
    stage = Stage(rank, dtype)

    class Watched(play.code.MyPipeline):  # type: ignore[misc, name-defined]
        """Each forward and backward is an event, and what it takes and sends is looked at."""

        def take_input(self, m: int) -> Tensor:
            made_up = alone and not self.first
            x = noise((2, WIDTH), seed + 7 * m + 3, dtype).requires_grad_() if made_up else super().take_input(m)
            self.calls.append(f"take_input({m})")
            if not self.first:
                stage.alive.append(weakref.ref(x))
            return x

        def loss(self, y: Tensor, m: int) -> Tensor:
            self.calls.append(f"loss(y, {m})")
            self.passed["the `y` given to self.loss"] = y
            return super().loss(y, m)

        def send_output(self, y: Tensor, m: int) -> None:
            self.calls.append(f"send_output(y, {m})")
            self.passed["what self.send_output sends"] = y.detach() if isinstance(y, Tensor) else y
            if not alone or self.last:
                super().send_output(y, m)

        def take_grad(self, m: int) -> Tensor:
            self.calls.append(f"take_grad({m})")
            made_up = alone and not self.last
            return noise((2, WIDTH), seed + 9 * m + 5, dtype) if made_up else super().take_grad(m)

        def send_grad(self, grad: Tensor, m: int) -> None:
            self.calls.append(f"send_grad(grad, {m})")
            self.passed["what self.send_grad sends"] = grad
            if not alone or self.first:
                super().send_grad(grad, m)

        def _do(self, what: str, m: int) -> None:
            self.calls: list[str] = []
            self.passed: dict[str, Any] = {}
            name = f"{what}({m}) of stage {self.rank} of {self.size}"
            with play.event(name):
                super()._do(what, m)
            play.see(f"what {name} calls", ", ".join(sorted(self.calls)))
            for said, value in self.passed.items():
                play.see(said, value)
            self.flying = getattr(self, "flying", 0) + (1 if what == "forward" else -1)
            if held() > self.flying * (1 if self.first else 2):
                gc.collect()  # perhaps only a cycle keeps them
            play.at_most(f"tensors that are held after {name}", held())
            look_at_gradients()

    def held() -> int:
        return sum(ref() is not None for ref in stage.alive)

    def look_at_gradients() -> None:
        for name, param in stage.named_parameters():
            play.see(f"the gradient of {name}", torch.zeros_like(param) if param.grad is None else param.grad)

    made = Watched(stage, inputs, lambda y, m: ((y - targets[m]) ** 2).mean(), noise((2, WIDTH), 0, dtype), rank, size)
    play.keep("the batch", inputs)
    return made


def run(play: Play, pipe: Any, times: int) -> None:
    """Gradients add up from run to run, until they are zero again."""
    for number in range(times):
        if number == 2:
            pipe.stage.zero_grad(set_to_none=False)
        pipe.stage.alive.clear()
        loss = pipe.run()
        play.see("the loss that run() returns", loss)
        play.see("entries that a run leaves in self.kept", len(pipe.kept))


def one_stage(number: int, M: int = 4, tokens: bool = False) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        play.loose = 1e-12
        run(play, staged(play, number, 3, M, torch.float64, True, 20, tokens), 3 if number == 1 else 2)

    return act


def together(M: int, dtype: torch.dtype, times: int) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        play.loose = 1e-12
        run(play, staged(play, play.rank, play.size, M, dtype, False, 40), times)

    return act


def take_turns(play: Play) -> None:
    """Two stages in the middle and a last one, in the order of the lesson's GPipe."""
    play.loose = 1e-12
    pipes = [staged(play, number, 3, M, torch.float64, True, 60 * M) for number, M in ((1, 2), (1, 4), (2, 3))]
    for pipe in (*pipes, *pipes):
        each = range(pipe.micro_batches)
        pipe.order = lambda each=each: [("forward", m) for m in each] + [("backward", m) for m in each]
        run(play, pipe, 1)


IN_ANY_ORDER = (
    "another order(), such as GPipe's, calls the same forward(m) and backward(m): keep what belongs to m by m"
)
# Each stage by itself, before messages are sent that may be waited for: where judge.APART looks, too.
PIPELINE_BATTERY = (
    Scene("", orders, sizes=(1, 3)),
    Scene("4 micro-batches", one_stage(1), sizes=(1, 3)),
    Scene("4 micro-batches", one_stage(2), sizes=(1, 3)),
    Scene("4 micro-batches", one_stage(0), sizes=(1, 3)),
    Scene("3 micro-batches of whole numbers", one_stage(0, 3, tokens=True), "the batch needs no gradient", (1,)),
    Scene("with all forwards before the backwards", take_turns, IN_ANY_ORDER, (1,)),
    Scene("5 micro-batches, all ranks", together(5, torch.float64, 3)),
    Scene("a single micro-batch, all ranks", together(1, torch.float64, 1)),
    Scene("3 micro-batches in bfloat16, all ranks", together(3, torch.bfloat16, 1), "keep the dtype of what comes in"),
)

PIPELINE_STUB = '''\
from zerolab import lab
from zerolab.lab.exercises import Todo


class MyPipeline(lab.Pipeline):
    """Stage self.rank of self.size. self.micro_batches is how many there are."""

    def order(self) -> list[tuple[str, int]]:
        """1F1B: ("forward", m) and ("backward", m), once for each micro-batch m.

        First size - 1 - rank forwards (or all, if there are fewer). Then one forward and
        one backward in turn. Then the backwards that are left.
        """
        raise Todo("15.2")

    def forward(self, m: int) -> None:
        x = self.take_input(m)
        y = self.stage(x)
        if self.last:
            y = self.loss(y, m) / self.micro_batches
        else:
            self.send_output(y, m)
        self.kept[m] = x, y

    def backward(self, m: int) -> None:
        """The last stage's y is a loss; the others wait for the gradient of theirs."""
        x, y = self.kept.pop(m)
        y.backward(None if self.last else self.take_grad(m))
        if not self.first:
            self.send_grad(x.grad, m)
'''

PIPELINE = """\
from zerolab import lab


class MyPipeline(lab.Pipeline):
    def order(self) -> list[tuple[str, int]]:
        warm_up = min(self.size - 1 - self.rank, self.micro_batches)
        steps = [("forward", m) for m in range(warm_up)]
        for m in range(self.micro_batches - warm_up):
            steps += [("forward", warm_up + m), ("backward", m)]
        left = range(self.micro_batches - warm_up, self.micro_batches)
        return steps + [("backward", m) for m in left]

    def forward(self, m: int) -> None:
        x = self.take_input(m)
        y = self.stage(x)
        if self.last:
            y = self.loss(y, m) / self.micro_batches
        else:
            self.send_output(y, m)
        self.kept[m] = x, y

    def backward(self, m: int) -> None:
        x, y = self.kept.pop(m)
        y.backward(None if self.last else self.take_grad(m))
        if not self.first:
            self.send_grad(x.grad, m)
"""


EXERCISES = [
    Exercise(
        id="15.1",
        title="an MLP on N ranks",
        difficulty=2,
        section="Write the split",
        battery=SPLIT_BATTERY,
        stub=SPLIT_STUB,
        reference=SPLIT,
        hints=(
            "Enter and Leave mirror each other. One does nothing in forward and adds up in backward, the other the "
            "other way round. Adding up: clone, dist.all_reduce(clone, group=group), return the clone.",
            "What a rank multiplies with its own `up` has entered, and what its own `down` gives has to leave. Only "
            "down.bias is outside: added before Leave, it would count N times.",
            "forward: gelu of F.linear(Enter.apply(x, group), up.weight, up.bias), then F.linear with down.weight and "
            "without a bias, then Leave.apply(..., group), then + down.bias.",
        ),
        exports=("MyMLP", "Enter", "Leave"),
    ),
    Exercise(
        id="15.2",
        title="one forward, one backward",
        difficulty=2,
        section="Write the order",
        battery=PIPELINE_BATTERY,
        stub=PIPELINE_STUB,
        reference=PIPELINE,
        hints=(
            'With F0 for ("forward", 0) and B0 for ("backward", 0), the last rank takes turns from the start: F0 B0 F1 '
            "B1 ... The rank before it begins with F0, then F1 B0 F2 B1 ..., and ends with the backward that is left.",
            "Rank r of N begins with min(N - 1 - r, M) forwards. The micro-batches of its backwards are 0, 1, 2, ..., "
            "and each comes right after the next forward.",
            "warm_up = min(self.size - 1 - self.rank, self.micro_batches). After those forwards, for m from 0: forward "
            "warm_up + m, then backward m, while there are forwards. The last warm_up backwards end it.",
        ),
        exports=("MyPipeline",),
    ),
]
