"""Lesson 15: an MLP split over the ranks, the heads of a rank, and one stage of a pipeline."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor, compare, counted, in_case
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic
from zerolab.lab.pipeline import Pipeline, Step

Suspects = list[tuple[Tensor, str]]


def explain_by(suspects: Suspects) -> Callable[[Tensor], str]:
    """The mistake whose result it is; "" if it is none of `suspects`."""

    def explain(got: Tensor) -> str:
        for suspect, why in suspects:
            if got.shape == suspect.shape and torch.allclose(got.double(), suspect.double(), rtol=1e-6, atol=1e-12):
                return why
        return ""

    return explain


# ---------------------------------------------------------------------- 15.1

NOT_SUMMED = (
    "Enter.backward must add up: each rank's gradient tells only how the loss depends on x through its own hidden "
    "units. Without the all-reduce every layer below gets a part of its gradient"
)
SUMS_AGAIN = (
    "Leave.backward all-reduces too: every rank has the gradient of the sum already, in full, and so the gradient "
    "becomes N times too large. It passes through as it is"
)
NO_MEAN = "the mean was taken: the parts of one sum are added up, and nothing is averaged"
PARTIAL = "Leave.forward must add up: each rank has the part of the sum that comes from its own hidden units"
ENTERS_SUMMED = "Enter.forward passes x on as it is: every rank has the same x, and N times x is another input"
IN_PLACE_GRAD = (
    "Enter.backward changed the gradient that it was given, which another branch (a residual connection) still "
    "needs: clone it, then all-reduce the clone"
)
IN_PLACE_X = "Leave.forward changed the tensor that it was given: clone it, then all-reduce the clone"
BIAS_TIMES_N = "the bias of `down` was added on every rank before the sum, so N times: add it after the sum"
BIAS_LOST = "the bias of `down` is missing: add it after the sum"
BIAS_DIVIDED = "the bias of `down` was divided by N: then so is its gradient. Keep all of it, and add it after the sum"
BIAS_ONE_RANK = (
    "the bias of `down` is added on one rank only: there it gets its gradient, elsewhere none, and after a step the "
    "copies differ. Add it on every rank, after the sum"
)
RELU = "that is a ReLU: the small example above has one, but the MLP of the GPT has a GELU between its two layers"
NO_GELU = "the GELU between the two layers is missing"
GELU_BETWEEN = "GELU comes between the two layers, and not after the second"
UP_REDUCED = (
    "an all-reduce after the first layer adds hidden units of different ranks. They are different units: leave them "
    "where they are, the second layer wants each rank's own"
)
MUCH = (
    "more was sent than one all-reduce of x's size: in forward only what leaves is added up, in backward only what "
    "came in"
)
GATHERED = (
    "all ranks' parts were gathered and then added up here: that sends (N-1) times a part, and an all-reduce only "
    "2(N-1)/N times"
)
GATHER_NO_GRAD = (
    "dist's collectives know nothing of autograd: no gradient passes through what they fill. Call them inside an "
    "autograd.Function that says what backward does"
)
WRONG_GROUP = (
    "the call went over all ranks, not over `group`: pass group=..., and take rank and size from it, "
    "dist.get_rank(group)"
)
KEEPS_WHOLE = "the parameters are views of the whole model's, all of which then stays in memory: clone() the part"
FRESH = "the values are not those of `mlp`: a split keeps a part of the given weights, and makes up none"
SPLIT_UP = "the first layer is cut by hidden units: up.weight is (hidden, C), so rank r keeps rows, and all columns"
SPLIT_DOWN = "the second layer is cut by the same hidden units: down.weight is (C, hidden), so rank r keeps columns"
OTHERS_PART = "another rank's part: rank r keeps hidden units r * hidden / N to (r + 1) * hidden / N"
DEALT = (
    "hidden units were dealt out in turn, [rank::N]: the sum would be right, but rank r is to keep those from "
    "r * hidden / N on, as they lie"
)
MLP_CHANGED = "the given `mlp` must stay as it is: copy what you keep"
ONE_DTYPE = "right in one dtype only: keep the dtype of mlp's weights, and convert nothing"
FIRST_ONLY = "right the first time only: nothing may be kept from one call to the next except in ctx"
KEPT_BUFFER = "all calls return the same tensor, a buffer kept between them: make a new one in every call"


class Whole(nn.Module):
    """zerolab's MLP, with any widths."""

    def __init__(self, width: int, hidden: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, dtype=dtype), nn.Linear(hidden, width, dtype=dtype)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(_noise(param.shape, seed + number) / param.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def _noise(shape: Any, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_split(answer: Any, world: World) -> None:
    group = dist.group.WORLD
    check_enter(answer, world, group)
    check_leave(answer, world, group)
    check_parts(answer, world, group)
    check_mlp(answer, world, group, world.rank, world.world_size)
    check_again(answer, world, group)
    if world.world_size == 4:  # two by two: this rank's neighbour is in its group, the others are not
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        check_mlp(answer, world, groups[world.rank // 2], world.rank % 2, 2, "with a group of two of the four ranks, ")


def check_sent(what: str, calls: list[Traffic], size: int, tensor: Tensor, times: int = 1) -> None:
    """At most one all-reduce of `tensor`, however it is made; it may be padded to a multiple of the ranks."""
    nbytes = -(-tensor.numel() // size) * size * tensor.element_size()
    sent, allowed = sum(call.sent for call in calls), times * 2 * nbytes * (size - 1) / size
    if sent > allowed + 1e-6:
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        gathers = all(call.op.startswith("all_gather") for call in calls)
        raise Wrong(f"{what}: {sent:,.0f} bytes were sent, not {allowed:,.0f} ({ops})", GATHERED if gathers else MUCH)


def check_enter(answer: Any, world: World, group: Any) -> None:
    N, rank = world.world_size, world.rank
    base = values.base(6).view(2, 3)
    x = base.clone().requires_grad_()
    with world.record() as calls, world.blamed(calls):
        y = answer.Enter.apply(x, group)
    check_tensor("Enter.apply(x, group)", y, (2, 3))
    suspects = [(base * N, ENTERS_SUMMED), (base / N, NO_MEAN)]
    compare("Enter.apply(x, group)", y.detach(), base, explain_by(suspects))
    if calls and N > 1:
        raise Wrong(f"Enter.forward calls {calls[0].op}", "x is the same on every rank: forward has nothing to send")
    grad = values.share(base, rank)
    branch = torch.zeros(2, 3, requires_grad=True)
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        _backward(answer, "Enter", y + branch, grad)
    total = values.total(base, N)
    if x.grad is None:
        raise Wrong("Enter: x gets no gradient", "Enter.backward returns the gradient of x, then None for `group`")
    suspects = [(values.share(base, rank), NOT_SUMMED), (total / N, NO_MEAN), (values.share(base, rank) / N, NO_MEAN)]
    if lost := world.unwaited(calls):
        suspects.insert(0, (x.grad, f"a forgotten wait: {lost}"))
    compare("Enter, the gradient of x", x.grad, total, explain_by(suspects))
    if not (torch.equal(grad, values.share(base, rank)) and torch.equal(_grad(branch), grad)):
        raise Wrong("Enter.backward: the gradient that it was given has changed", IN_PLACE_GRAD)
    check_sent("Enter.backward", calls, N, grad)


def check_leave(answer: Any, world: World, group: Any) -> None:
    N, rank = world.world_size, world.rank
    base = values.base(6).view(3, 2)
    part = values.share(base, rank).requires_grad_()
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        y = answer.Leave.apply(part + 0, group)
        kept = values.share(base, rank)
        with torch.no_grad():
            answer.Leave.apply(kept, group)
    check_tensor("Leave.apply(part, group)", y, (3, 2))
    total, mine = values.total(base, N), values.share(base, rank)
    suspects = [(mine, PARTIAL), (total / N, NO_MEAN), (mine / N, NO_MEAN)]
    if lost := world.unwaited(calls):
        suspects.insert(0, (y.detach(), f"a forgotten wait: {lost}"))
    compare("Leave.apply(part, group)", y.detach(), total, explain_by(suspects))
    if not torch.equal(kept, mine):
        raise Wrong("Leave.forward: the tensor that it was given has changed", IN_PLACE_X)
    check_sent("Leave.forward", calls, N, part, times=2)
    for dtype in (torch.float64, torch.bfloat16):
        with world.record():
            other = answer.Leave.apply(mine.to(dtype), group)
        check_tensor(f"Leave.apply(part, group) of a part in {dtype}", other, (3, 2), dtype)
    if not y.requires_grad:
        raise Wrong("what Leave.apply() returns requires no gradient", GATHER_NO_GRAD)
    grad = 5 * base
    with world.record() as calls:
        _backward(answer, "Leave", y, grad)
    if part.grad is None:
        raise Wrong("Leave: the part gets no gradient", "Leave.backward returns the gradient, then None for `group`")
    compare(
        "Leave, the gradient of the part",
        part.grad,
        5 * base,
        explain_by([(grad * N, SUMS_AGAIN), (grad / N, NO_MEAN)]),
    )
    if calls and N > 1:
        likely = SUMS_AGAIN if sum(call.sent for call in calls) else MUCH
        raise Wrong(f"Leave.backward calls {calls[0].op}", likely)


def _backward(answer: Any, which: str, y: Tensor, grad: Tensor) -> None:
    likely = f"{which}.backward returns something for each argument of forward: the gradient, and None for `group`"
    with in_case(answer, f"{which}.backward", likely, ERRORS_1):
        y.backward(grad)


def _chunk(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, dim)[rank]


def check_parts(answer: Any, world: World, group: Any) -> None:
    """What MyMLP keeps, by name, shape, value and bytes."""
    N, rank = world.world_size, world.rank
    mlp = Whole(3, 24, 1, torch.float64)
    before = copy.deepcopy(mlp.state_dict())
    with world.record() as calls:
        split = answer.MyMLP(mlp, group)
    if any(not torch.equal(value, before[name]) for name, value in mlp.state_dict().items()):
        raise Wrong("building MyMLP has changed `mlp`", MLP_CHANGED)
    if not isinstance(split, nn.Module):
        raise Wrong(
            f"MyMLP(mlp, group) is a {type(split).__name__}", "class MyMLP(nn.Module), whose __init__ calls super()"
        )
    found = dict(split.named_parameters())
    wanted = {
        "up.weight": _chunk(mlp.up.weight, 0, rank, N),
        "up.bias": _chunk(mlp.up.bias, 0, rank, N),
        "down.weight": _chunk(mlp.down.weight, 1, rank, N),
        "down.bias": mlp.down.bias,
    }
    if set(found) != set(wanted):
        missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        seen = f"there is no {missing[0]}" if missing else f"there is another parameter, {extra[0]}"
        likely = "its parameters are up.weight, up.bias, down.weight and down.bias, each an nn.Parameter"
        raise Wrong(f"MyMLP's parameters: {seen}", likely)
    for name, want in wanted.items():
        got, whole = found[name].detach(), mlp.get_parameter(name).detach()
        if tuple(got.shape) != tuple(want.shape):
            if tuple(got.shape) == tuple(whole.shape):
                likely = "all of it was kept: a rank's part has 1/N of the hidden units"
            elif name == "down.bias":
                likely = "every rank keeps all of down's bias: it is added once, to the complete sum"
            else:
                likely = SPLIT_UP if name.startswith("up") else SPLIT_DOWN
            raise Wrong(f"{name} has the shape {tuple(got.shape)}, not {tuple(want.shape)}", likely)
        if got.dtype != want.dtype:
            raise Wrong(f"{name} is {got.dtype}, and mlp's is {want.dtype}", ONE_DTYPE)
        dim = 1 if name == "down.weight" else 0
        suspects = (
            [(_chunk(whole, dim, r, N), OTHERS_PART) for r in range(N) if r != rank] if name != "down.bias" else []
        )
        dealt = torch.arange(whole.shape[dim])
        suspects += [(whole.index_select(dim, dealt[r::N]), DEALT) for r in range(N) if name != "down.bias"]
        if name == "down.bias":
            suspects += [(whole / N, BIAS_DIVIDED), (torch.zeros_like(whole), BIAS_ONE_RANK)]
        compare(name, got, want.detach(), lambda got, known=suspects: explain_by(known)(got) or FRESH)  # type: ignore[misc]
        held, needed = found[name].untyped_storage().nbytes(), want.numel() * want.element_size()
        if held > needed:
            raise Wrong(f"{name} holds {held:,} bytes of memory, and its values need {needed:,}", KEEPS_WHOLE)
        if found[name].untyped_storage()._cdata == mlp.get_parameter(name).untyped_storage()._cdata:
            raise Wrong(f"{name} is in the same memory as mlp's", MLP_CHANGED)
    if calls and sum(call.sent for call in calls):
        raise Wrong(
            f"building MyMLP calls {calls[0].op}", "every rank has the whole `mlp` here: nothing has to be sent"
        )


def check_mlp(answer: Any, world: World, group: Any, rank: int, N: int, when: str = "") -> None:
    """Forward, and then the gradients, against the whole MLP's."""
    whole = Whole(3, 24, 1, torch.float64)
    split = answer.MyMLP(whole, group)
    # each pair of ranks has its own x, so that a sum over all ranks shows
    x = _noise((2, 4, 3), 7 + world.rank // N).requires_grad_()
    given = x.detach().clone()
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        got = split(x)
    check_tensor(f"{when}the output", got, tuple(x.shape), torch.float64)
    parts = [_part(whole, given, r, N) for r in range(N)]
    bias = whole.down.bias.detach()
    want = whole(given).detach()
    total = want - bias
    if world.world_size > N:
        suspects = [(got.detach(), WRONG_GROUP)]
    else:
        suspects = [(want + (N - 1) * bias, BIAS_TIMES_N), (total, BIAS_LOST), (total + bias / N, BIAS_DIVIDED)]
        suspects += [(parts[rank] + bias, PARTIAL), (parts[rank], PARTIAL), (parts[rank] + bias / N, PARTIAL)]
        suspects += [(how, NO_MEAN) for how in (total / N + bias, want / N, total / N)]
        with torch.no_grad():
            suspects += [(whole.down(whole.up(given)), NO_GELU), (F.gelu(want), GELU_BETWEEN)]
            suspects += [(whole.down(F.relu(whole.up(given))), RELU)]
            suspects += [(F.gelu(whole.down(whole.up(given))), GELU_BETWEEN)]
            summed = torch.stack([_hidden(whole, given, r, N, gelu=False) for r in range(N)]).sum(0)
            for hidden in (F.gelu(summed), torch.stack([_hidden(whole, given, r, N) for r in range(N)]).sum(0)):
                local = [hidden @ _chunk(whole.down.weight, 1, r, N).T for r in range(N)]
                suspects += [(local[rank] + bias, UP_REDUCED), (sum(local) + bias, UP_REDUCED)]  # type: ignore[list-item]
    if lost := world.unwaited(calls):
        suspects.insert(0, (got.detach(), f"a forgotten wait: {lost}"))
    reductions = sum(call.op == "all_reduce" for call in calls)
    compare(
        f"{when}the output",
        got.detach(),
        want,
        lambda got: explain_by(suspects)(got) or (UP_REDUCED if reductions > 1 and N > 1 else ""),
    )
    check_sent(f"{when}forward", calls, world.world_size, x)
    if not got.requires_grad:
        raise Wrong(f"{when}the output requires no gradient", GATHER_NO_GRAD)
    grad = _noise(x.shape, 11)
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
        got.backward(grad)
    _check_gradients(split, whole, x, given, grad, rank, N, when)
    check_sent(f"{when}backward", calls, world.world_size, x)
    if not torch.equal(x.detach(), given):
        raise Wrong(f"{when}x has changed", "work on a copy of x")


def _hidden(whole: Whole, x: Tensor, rank: int, N: int, gelu: bool = True) -> Tensor:
    with torch.no_grad():
        hidden = F.linear(x, _chunk(whole.up.weight, 0, rank, N), _chunk(whole.up.bias, 0, rank, N))
        return F.gelu(hidden) if gelu else hidden


def _part(whole: Whole, x: Tensor, rank: int, N: int) -> Tensor:
    with torch.no_grad():
        return _hidden(whole, x, rank, N) @ _chunk(whole.down.weight, 1, rank, N).T


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _check_gradients(
    split: nn.Module, whole: Whole, x: Tensor, given: Tensor, grad: Tensor, rank: int, N: int, when: str
) -> None:
    whole.zero_grad()
    alone = given.clone().requires_grad_()
    whole(alone).backward(grad)
    if x.grad is None or any(param.grad is None for param in split.parameters()):
        who = "x" if x.grad is None else next(n for n, p in split.named_parameters() if p.grad is None)
        raise Wrong(f"{when}{who} gets no gradient", BIAS_ONE_RANK if who == "down.bias" else GATHER_NO_GRAD)
    others = dist.get_world_size() > N
    wanted = {
        "down.bias": _grad(whole.down.bias),
        "down.weight": _chunk(_grad(whole.down.weight), 1, rank, N),
        "up.weight": _chunk(_grad(whole.up.weight), 0, rank, N),
        "up.bias": _chunk(_grad(whole.up.bias), 0, rank, N),
    }
    for name, want in wanted.items():
        got = _grad(split.get_parameter(name))
        suspects: Suspects = [(want * N, SUMS_AGAIN), (want / N, NO_MEAN)]
        if name == "down.bias":
            suspects = [(want * N, BIAS_TIMES_N), (want / N, BIAS_DIVIDED), (torch.zeros_like(want), BIAS_ONE_RANK)]
        compare(f"{when}the gradient of {name}", got, want, explain_by([(got, WRONG_GROUP)] if others else suspects))
    with torch.no_grad():
        z = F.linear(given, whole.up.weight, whole.up.bias)
    F.gelu(z.requires_grad_()).backward(grad @ whole.down.weight.detach())
    own = _chunk(_grad(z), -1, rank, N) @ _chunk(whole.up.weight.detach(), 0, rank, N)
    total = _grad(alone)
    suspects = [(own, NOT_SUMMED), (total / N, NO_MEAN), (total * N, SUMS_AGAIN), (own / N, NO_MEAN)]
    compare(f"{when}the gradient of x", x.grad, total, explain_by([(x.grad, WRONG_GROUP)] if others else suspects))


def check_again(answer: Any, world: World, group: Any) -> None:
    """Two forwards before two backwards, other shapes and dtypes, a frozen parameter, no gradient at all."""
    N = world.world_size
    cases = (
        ("a second MLP, float32, two rows", torch.float32, 5, 12, (2, 5), ONE_DTYPE, 1e-4),
        ("in bfloat16", torch.bfloat16, 6, 24, (3, 1, 6), ONE_DTYPE, 0.1),
        ("two forwards, then two backwards", torch.float64, 3, 12, (4, 3), FIRST_ONLY, 1e-9),
    )
    for when, dtype, width, hidden, shape, likely, near in cases:
        whole = Whole(width, hidden, 31, dtype)
        split = answer.MyMLP(whole, group)
        xs = [_noise(shape, 50 + k).to(dtype).requires_grad_() for k in range(2)]
        alone = [x.detach().clone().requires_grad_() for x in xs]
        for step in range(2):
            with world.record() as calls, in_case(answer, when, likely, ERRORS_1):
                got = [split(x) for x in xs]
                first = got[0].detach().clone()
                if not all(y.dtype == dtype for y in got):
                    raise Wrong(f"{when}: the output is {got[0].dtype}", ONE_DTYPE)
                for k in (0, 1):
                    got[k].backward(torch.ones_like(got[k]) * (k + 1))
            if not torch.equal(first, got[0].detach()):
                raise Wrong(f"{when}: the first output has changed in a later call", KEPT_BUFFER)
            if lost := world.unwaited(calls):
                raise Wrong(f"{when}: {lost}", f"a forgotten wait: {lost}")
            want = [whole(x) for x in alone]
            for k in (0, 1):
                want[k].backward(torch.ones_like(want[k]) * (k + 1))
            pairs = [(f"output {k}", got[k], want[k]) for k in (0, 1)]
            pairs += [(f"gradient of x {k}", xs[k].grad, alone[k].grad) for k in (0, 1)]
            cut = _chunk(_grad(whole.up.weight), 0, world.rank, N)
            pairs.append(("gradient of up.weight", split.get_parameter("up.weight").grad, cut))
            for name, ours, theirs in pairs:
                tolerance = near * float(theirs.detach().abs().max())
                if ours is None or not torch.allclose(ours.double(), theirs.double(), rtol=near, atol=tolerance):
                    said = f"{when}, step {step + 1}: {name} differs from the whole MLP's"
                    raise Wrong(said, likely if not step else FIRST_ONLY, values_differ=True)
            split.zero_grad(set_to_none=bool(step))
            whole.zero_grad()
            for x in (*xs, *alone):
                x.grad = None
    whole = Whole(3, 12, 31, torch.float64)
    split, x = answer.MyMLP(whole, group), _noise((2, 3), 3)
    split.get_parameter("up.weight").requires_grad_(False)
    with in_case(answer, "up.weight is frozen, and x needs no gradient", FIRST_ONLY, ERRORS_1):
        split(x).sum().backward()
        whole(x).sum().backward()
    mine, theirs = _grad(split.get_parameter("down.weight")), _chunk(_grad(whole.down.weight), 1, world.rank, N)
    compare("up.weight is frozen: the gradient of down.weight", mine, theirs)
    with torch.no_grad(), in_case(answer, "under torch.no_grad()", FIRST_ONLY, ERRORS_1):
        compare("under torch.no_grad(), the output", split(x), whole(x))


ERRORS_1 = {
    "returned an incorrect number of gradients": "backward returns something for each argument of forward: the "
    "gradient, and None for `group`",
    "mat1 and mat2 shapes": SPLIT_DOWN,
    "index out of range": WRONG_GROUP,
    "not a Tensor": "backward returns tensors (or None), forward a tensor",
    "modified by an inplace operation": "a collective overwrote what backward needs: clone, and all-reduce the clone",
    "is a view and is being modified inplace": "clone, then all-reduce the clone",
    "a leaf Variable that requires grad": "copy under torch.no_grad(), or make an nn.Parameter of the part's clone",
    "does not require grad": GATHER_NO_GRAD,
    "must be the same size": "the ranks' parts have different shapes: each has hidden / N of the hidden units",
    "cannot assign": "an nn.Parameter is wanted: nn.Parameter(part.detach().clone())",
    "before Module.__init__() call": "MyMLP.__init__ begins with super().__init__()",
}

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
        """Keep what backward needs: ctx.group = group. Return x.view_as(x): it is new."""
        raise Todo("15.1")

    @staticmethod
    def backward(ctx, grad: Tensor):
        """`grad`, this rank's part of the gradient, stays as it is; others need it too.

        Return two things, the gradient of x and None, since `group` has none.
        dist.all_reduce(tensor, group=group) adds up in place.
        """
        raise Todo("15.1")


class Leave(torch.autograd.Function):
    """A part of a sum leaves the split region as the whole sum, the same on every rank."""

    @staticmethod
    def forward(ctx, part: Tensor, group) -> Tensor:
        """`part` stays as it is."""
        raise Todo("15.1")

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise Todo("15.1")


class MyMLP(nn.Module):
    """This rank's part of an MLP: `mlp.up` is nn.Linear(C, hidden), down the reverse."""

    def __init__(self, mlp: nn.Module, group) -> None:
        """Rank r of N in `group` has units r * hidden / N to (r + 1) * hidden / N.

        The parameters are called up.weight, up.bias, down.weight and down.bias, as in
        `mlp`, which stays as it is. dist.get_rank(group) and dist.get_world_size(group)
        are r and N.
        """
        super().__init__()
        raise Todo("15.1")

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

MIXED = (
    "cut in the order in which the rows lie, a rank gets all of q and some of k: cut q, k and v one by one, and put "
    "this rank's three pieces together"
)
OTHERS_HEADS = "another rank's heads: rank r has heads r * heads / N to (r + 1) * heads / N"
HEADS_DEALT = "heads were dealt out in turn, [rank::N]: rank r has those from r * heads / N on"
ONLY_ONE = "q, k and v are needed, all three: 3 * C / N rows"
PER_HEAD = "the rows lie as q of all heads, then k, then v, not as q, k and v of one head after the other"
THROUGH_HEAD = "a head cannot be cut: raise ValueError where the number of heads is not a multiple of `size`"
HEADS_VIEW = "what it returns is a view of all rows, which then stay in memory: clone() the part"
WITHIN = "the cut runs through every head: view as (3, heads, C / heads), then take heads, not parts of a head"


def check_heads(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    cases = [(12, 2, (), torch.float32), (12, 3, (4,), torch.float64), (24, 1, (5,), torch.bfloat16)]
    for heads, size, rest, dtype in cases:
        C = heads * size
        rows = torch.arange(1.0, 3 * C + 1, dtype=torch.float64)
        rows = (rows.view(-1, *(1 for _ in rest)) + torch.zeros(3 * C, *rest)).to(dtype)
        before = rows.clone()
        call = f"heads_of(rows of shape {tuple(rows.shape)}, {heads}, {rank}, {N})"
        with in_case(answer, call, MIXED):
            got = answer.heads_of(rows, heads, rank, N)
        lay = rows.view(3, heads, size, *rest)
        per = heads // N
        want = lay[:, rank * per : (rank + 1) * per].flatten(0, 2)
        if isinstance(got, Tensor) and got.numel() * 3 == want.numel():
            raise Wrong(f"{call} has the shape {tuple(got.shape)}", ONLY_ONE)
        if isinstance(got, (tuple, list)):
            raise Wrong(f"{call} is a {type(got).__name__}", "put the three pieces together, torch.cat([q, k, v])")
        check_tensor(call, got, tuple(want.shape), dtype)
        suspects = [(rows.chunk(N)[r], MIXED) for r in range(N)]
        suspects += [(lay[:, r * per : (r + 1) * per].flatten(0, 2), OTHERS_HEADS) for r in range(N) if r != rank]
        suspects += [(lay[:, r::N].flatten(0, 2), HEADS_DEALT) for r in range(N)]
        by_head = lay.transpose(0, 1)
        suspects += [(by_head[rank * per : (rank + 1) * per].flatten(0, 2), PER_HEAD)]
        other = rows.view(heads, 3, size, *rest)
        suspects += [(other[rank * per : (rank + 1) * per].flatten(0, 2), PER_HEAD)]
        suspects += [(other[rank * per : (rank + 1) * per].transpose(0, 1).flatten(0, 2), PER_HEAD)]
        if size % N == 0:
            part = size // N
            suspects += [(lay[:, :, rank * part : (rank + 1) * part].flatten(0, 2), WITHIN)]
        suspects += [(rows.view(3, size, heads, *rest)[:, :, rank * per : (rank + 1) * per].flatten(0, 2), WITHIN)]
        compare(call, got.double(), want.double(), explain_by(suspects))
        if N > 1 and got.untyped_storage().nbytes() > want.numel() * want.element_size():
            raise Wrong(f"{call} holds {got.untyped_storage().nbytes():,} bytes", HEADS_VIEW)
        if not torch.equal(rows, before):
            raise Wrong(f"{call}: `rows` has changed", "work on a copy")
        if got.untyped_storage()._cdata == rows.untyped_storage()._cdata:
            raise Wrong(f"{call} is in the memory of `rows`", HEADS_VIEW)
    if N > 1:
        _check_refusal(answer, N - 1, rank, N)
        _check_refusal(answer, N + 1, rank, N)


def _check_refusal(answer: Any, heads: int, rank: int, N: int) -> None:
    """Heads that cannot be dealt out evenly, although the rows can."""
    call = f"heads_of(rows, {heads}, {rank}, {N})"
    rows = torch.arange(3.0 * heads * N)
    try:
        got = answer.heads_of(rows, heads, rank, N)
    except ValueError:
        return
    except Exception as error:
        raise Wrong(f"{call} raises {type(error).__name__}: {error}", THROUGH_HEAD) from None
    raise Wrong(f"{call} returns {counted(len(got) if isinstance(got, Tensor) else 0, 'row')}", THROUGH_HEAD)


HEADS_STUB = '''\
import torch
from torch import Tensor
from zerolab.lab.exercises import Todo


def heads_of(rows: Tensor, heads: int, rank: int, size: int) -> Tensor:
    """The rows of a qkv layer that `rank` of `size` needs for its heads.

    (3 * C, ...) -> (3 * C / size, ...). The rows lie in this order: q of head 0, q of head
    1, ..., then k of all heads, then v of all heads; each head has C / heads rows of each.
    Rank r gets heads r * heads / size to (r + 1) * heads / size, in the same order, in
    memory of their own. Raises ValueError if `heads` is not a multiple of `size`.
    """
    raise Todo("15.2")
'''

HEADS = """\
from torch import Tensor


def heads_of(rows: Tensor, heads: int, rank: int, size: int) -> Tensor:
    if heads % size:
        raise ValueError(f"{heads} heads cannot be dealt out evenly to {size} ranks")
    pieces = rows.view(3, size, -1, *rows.shape[1:])  # q, k, v; of each a piece per rank
    return pieces[:, rank].flatten(0, 1).clone()
"""


# ---------------------------------------------------------------------- 15.3

GPIPE = (
    "all forwards before the first backward: that is GPipe, which keeps the activations of all micro-batches. Begin "
    "with backwards as soon as their gradients can be there"
)
TOO_MANY = "too many micro-batches are in flight: rank r needs to keep N - r at most, since that many stages lie ahead"
ONE_BY_ONE = (
    "each micro-batch goes all the way there and back before the next one starts: only one stage works at a time. Rank "
    "r begins with N - 1 - r forwards, to fill the stages ahead"
)
TOO_SLOW = "stages stand still longer than they have to: after the first N - 1 - r forwards, take turns, one and one"
LIFO = (
    "backwards run in the opposite order, the last micro-batch first: the first micro-batch is the first to arrive at "
    "the last stage, and its gradient the first to come back"
)
OWN_FIRST = "a backward comes before its own forward"
ONCE = "each micro-batch has one forward and one backward on every rank"
DEADLOCK = "the orders of the ranks do not fit: each waits for what another sends only later, and none goes on"
STEP_FORM = 'order() returns a list of pairs, ("forward", m) or ("backward", m)'

UNSCALED = (
    "the loss of a micro-batch is the mean over its samples: divide it by self.micro_batches, or M means are added up"
)
SCALED_TWICE = "divided by the number of micro-batches more than once: the last stage divides the loss, and nobody else"
BY_STAGES = "the loss was divided by the number of stages: divide by the number of micro-batches"
OVERWRITTEN = "only the last micro-batch's gradient is left: gradients of all micro-batches add up until zero_grad()"
SAME_KEPT = "backward of one micro-batch used what another one's forward left: keep it under its number, self.kept[m]"
KEPT_LONG = "what backward has used can go: self.kept.pop(m), or the activations of all micro-batches stay in memory"
NEVER_SENT = "it was never sent on, and the next rank waits for it"
INPUTS_GRAD = "what goes back is the gradient of this stage's input, x.grad"
TAKES_GRAD = "backward of a stage in the middle begins with the gradient that the next stage sends: y.backward(grad)"
WRONG_NUMBER = "another micro-batch's number"
NOT_LOSS = "the last stage computes the loss, self.loss(y, m), and sends nothing on"

WIDTH = 3
SHAPES = (
    (3, 5),
    (1, 1),
    (2, 1),
    (2, 2),
    (2, 3),
    (2, 5),
    (3, 2),
    (3, 4),
    (4, 1),
    (4, 4),
    (4, 8),
    (5, 3),
    (5, 7),
    (6, 12),
)


def one_forward_one_backward(rank: int, size: int, micro_batches: int) -> list[Step]:
    warm = min(size - 1 - rank, micro_batches)
    order = [("forward", m) for m in range(warm)]
    for m in range(micro_batches - warm):
        order += [("forward", warm + m), ("backward", m)]
    return order + [("backward", m) for m in range(micro_batches - warm, micro_batches)]


def _pipe(answer: Any, rank: int, size: int, micro_batches: int) -> Pipeline:
    inputs = [torch.zeros(1, WIDTH) for _ in range(micro_batches)]
    return answer.MyPipeline(nn.Identity(), inputs, lambda y, m: y.mean(), inputs[0], rank=rank, size=size)


def check_order(answer: Any) -> None:
    """Every rank's order, for many numbers of stages and micro-batches, played through by the clock."""
    for size, M in SHAPES:
        when = f"{counted(size, 'stage')}, {counted(M, 'micro-batch').replace('batchs', 'batches')}"
        orders: list[list[Step]] = []
        for rank in range(size):
            with in_case(answer, f"{when}, order() of rank {rank}", STEP_FORM):
                got = _pipe(answer, rank, size, M).order()
                got = got if got is None or isinstance(got, (str, dict, int)) else list(got)
            orders.append(_checked_form(got, M, f"{when}, rank {rank}"))
        _check_played(orders, size, M, when)


def _checked_form(got: Any, M: int, when: str) -> list[Step]:
    if not isinstance(got, list):
        likely = values.forgot_to_return(got) or STEP_FORM
        raise Wrong(f"{when}: order() returns a {type(got).__name__}, not a list", likely)
    for step in got:
        form = isinstance(step, (tuple, list)) and len(step) == 2 and step[0] in ("forward", "backward")
        if not form or not isinstance(step[1], int):
            raise Wrong(f"{when}: {step!r} is among the steps", STEP_FORM)
        if not 0 <= step[1] < M:
            raise Wrong(f"{when}: {step!r} is among the steps", f"micro-batches are numbered from 0 to {M - 1} here")
    steps = [(str(what), m) for what, m in got]
    for m in range(M):
        for what in ("forward", "backward"):
            if (times := steps.count((what, m))) != 1:
                raise Wrong(f"{when}: {what} of micro-batch {m} comes {counted(times, 'time')}", ONCE)
        if steps.index(("backward", m)) < steps.index(("forward", m)):
            raise Wrong(f"{when}: {_say(steps)}", OWN_FIRST)
    return steps


def _say(steps: list[Step]) -> str:
    """F0 F1 B0 ..., as the pictures write it."""
    shown = " ".join(f"{what[0].upper()}{m}" for what, m in steps[:10])
    return shown + " ..." * (len(steps) > 10)


def _check_played(orders: list[list[Step]], size: int, M: int, when: str) -> None:
    ends: dict[tuple[int, str, int], int] = {}  # (rank, what, m) -> when it is over; a forward takes 1, a backward 2
    at, clock = [0] * size, [0] * size
    moved = True
    while moved:
        moved = False
        for rank in range(size):
            while at[rank] < len(orders[rank]):
                what, m = orders[rank][at[rank]]
                ahead = rank - 1 if what == "forward" else rank + 1
                if 0 <= ahead < size and (ahead, what, m) not in ends:
                    break
                begin = max(clock[rank], ends.get((ahead, what, m), 0))
                clock[rank] = ends[rank, what, m] = begin + (1 if what == "forward" else 2)
                at[rank] += 1
                moved = True
    stuck = [rank for rank in range(size) if at[rank] < len(orders[rank])]
    if stuck:
        waits = [f"rank {r} waits for {orders[r][at[r]][0]} of {orders[r][at[r]][1]}" for r in stuck[:2]]
        raise Wrong(f"{when}: {' and '.join(waits)}, for ever", DEADLOCK)
    for rank, steps in enumerate(orders):
        wanted = one_forward_one_backward(rank, size, M)
        backs = [m for what, m in steps if what == "backward"]
        if backs == list(range(M))[::-1] and M > 1:
            raise Wrong(f"{when}, rank {rank}: {_say(steps)}", LIFO)
        flying = most = 0
        for what, _ in steps:
            flying += 1 if what == "forward" else -1
            most = max(most, flying)
        allowed = min(size - rank, M)
        if most > allowed:
            batches = counted(most, "micro-batch").replace("batchs", "batches")
            likely = GPIPE if most == M and M > 1 and all(what == "forward" for what, _ in steps[:M]) else TOO_MANY
            raise Wrong(f"{when}, rank {rank}: {_say(steps)} keeps {batches}, and {allowed} would do", likely)
        if steps != wanted and max(clock) <= 3 * (M + size - 1):
            continue
    if max(clock) > 3 * (M + size - 1):
        took = f"takes {max(clock)} units of time (a forward takes 1, a backward 2), and {3 * (M + size - 1)} would do"
        alone = all(steps == [(what, m) for m in range(M) for what in ("forward", "backward")] for steps in orders)
        raise Wrong(f"{when}: rank 0 does {_say(orders[0])}; all together it {took}", ONE_BY_ONE if alone else TOO_SLOW)


class Stage(nn.Module):
    """A small stage; the first one has a frozen bias. Remembers its outputs without keeping them alive."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))
        with torch.no_grad():
            self.layer.weight.copy_(_noise((WIDTH, WIDTH), 100 + number))
            self.layer.bias.copy_(_noise((WIDTH,), 200 + number))
        self.layer.bias.requires_grad_(number != 0)
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.outputs.append(weakref.ref(y))
        return y


class Expected:
    """One process, the whole model: what passes from stage to stage, and every gradient."""

    def __init__(self, size: int, M: int, seed: int, dtype: torch.dtype) -> None:
        self.M, self.dtype = M, dtype
        self.inputs = [_noise((2, WIDTH), seed + m).to(dtype) for m in range(M)]
        self.targets = [_noise((2, WIDTH), 1000 + seed + m).to(dtype) for m in range(M)]
        self.stages = [Stage(number, dtype) for number in range(size)]
        self.between: list[list[Tensor]] = []  # [m][k] enters stage k; the last leaves the last stage
        for m in range(M):
            passed = [self.inputs[m]]
            for stage in self.stages:
                passed.append(stage(passed[-1]))
                passed[-1].retain_grad()
            (self.loss(passed[-1], m) / M).backward()
            self.between.append(passed)

    def loss(self, y: Tensor, m: int) -> Tensor:
        return ((y - self.targets[m]) ** 2).mean()

    def forward_of(self, rank: int, m: int) -> Tensor:
        return self.between[m][rank].detach()

    def of_ones(self, rank: int, m: int) -> Tensor:
        """The gradient of a stage's input where that of its output is all ones."""
        x = self.forward_of(rank, m).clone().requires_grad_()
        return torch.autograd.grad(self.stages[rank](x).sum(), x)[0]

    def grad_of(self, rank: int, m: int) -> Tensor:
        grad = self.between[m][rank].grad
        assert grad is not None
        return grad


def checked(answer: Any, expected: Expected, alone: bool) -> type[Pipeline]:
    """The learner's class, where each call is compared with what one process computes before it leaves the rank.

    alone: nothing leaves the rank, and what would come from others is what one process computes.
    """

    class Checked(answer.MyPipeline):  # type: ignore[misc]
        def take_input(self, m: int) -> Tensor:
            self._log("take_input", m)
            arrives = alone and not self.first
            x = expected.forward_of(self.rank, m).clone().requires_grad_() if arrives else super().take_input(m)
            if not self.first:
                self.inputs_seen[m] = weakref.ref(x)
            return x

        def loss(self, y: Tensor, m: int) -> Tensor:
            self._log("loss", m)
            return super().loss(y, m)

        def send_output(self, y: Tensor, m: int) -> None:
            self._log("send_output", m)
            if self.last:
                raise Wrong(f"the last stage sends the output of micro-batch {m} on", NOT_LOSS)
            self._compare(
                f"the output of micro-batch {m}, as it is sent on", y, expected.forward_of(self.rank + 1, m), 1
            )
            if not alone:
                super().send_output(y, m)

        def take_grad(self, m: int) -> Tensor:
            self._log("take_grad", m)
            if self.last:
                raise Wrong(
                    f"the last stage waits for a gradient of micro-batch {m}", "its backward begins with the loss"
                )
            return expected.grad_of(self.rank + 1, m).clone() if alone else super().take_grad(m)

        def send_grad(self, grad: Tensor, m: int) -> None:
            self._log("send_grad", m)
            if self.first:
                raise Wrong(f"the first stage sends a gradient of micro-batch {m} back", "the batch needs no gradient")
            self._compare(
                f"the gradient of micro-batch {m}, as it is sent back", grad, expected.grad_of(self.rank, m), 0
            )
            if not alone:
                super().send_grad(grad, m)

        def _log(self, name: str, m: int) -> None:
            what, now = self.doing
            if m != now:
                raise Wrong(f"{what}({now}) calls self.{name} for micro-batch {m!r}", f"{WRONG_NUMBER}: pass m on")
            self.called.append(name)

        def _compare(self, what: str, got: Any, want: Tensor, forwards: int) -> None:
            M, N = expected.M, self.size
            if not isinstance(got, Tensor):
                raise Wrong(f"{what}, is a {type(got).__name__}", values.forgot_to_return(got) and INPUTS_GRAD)
            others = range(M)
            known: Suspects = []
            if forwards:
                same = [expected.forward_of(self.rank + 1, k) for k in others]
                known += [
                    (expected.forward_of(self.rank, k), "the stage's input was sent on, not its output") for k in others
                ]
            else:
                same = [expected.grad_of(self.rank, k) for k in others]
                known += [(want * M, UNSCALED), (want * M / N, BY_STAGES)] + [
                    (want / M**k, SCALED_TWICE) for k in (1, 2, 3)
                ]
                if not self.last:
                    known += [(expected.grad_of(self.rank + 1, k), INPUTS_GRAD) for k in others]
                    known += [(expected.of_ones(self.rank, k), TAKES_GRAD) for k in others]
            known += [(tensor, SAME_KEPT) for tensor in same]
            if got.shape != want.shape:
                raise Wrong(
                    f"{what}, has the shape {tuple(got.shape)}, not {tuple(want.shape)}", explain_by(known)(got)
                )
            likely = explain_by(known)
            default = SAME_KEPT if not forwards and M > 1 else ""
            if expected.dtype == torch.float64:
                compare(what, got.detach(), want.detach(), lambda got: likely(got) or default)

        def _do(self, what: str, m: int) -> None:
            self.doing = what, m
            self.called: list[str] = []
            super()._do(what, m)
            needed = ["take_input", "loss" if self.last else "send_output"]
            if what == "backward":
                needed = ["take_grad"] * (not self.last) + ["send_grad"] * (not self.first)
            for name in needed:
                if name not in self.called:
                    likely = NEVER_SENT if name.startswith("send") else f"{what} calls self.{name}(..., m)"
                    likely = NOT_LOSS if name == "loss" else TAKES_GRAD if name == "take_grad" else likely
                    raise Wrong(f"{what}({m}) on stage {self.rank} of {self.size} does not call self.{name}", likely)
            for name in dict.fromkeys(self.called):
                if name not in needed or self.called.count(name) > 1:
                    times = f"{counted(self.called.count(name), 'time')}"
                    raise Wrong(
                        f"{what}({m}) calls self.{name} {times}", f"{what} needs {', '.join(needed) or 'none'} only"
                    )
            if what == "backward":
                self.backwards += 1
                if self._holds(m):
                    gc.collect()
                    if self._holds(m):
                        raise Wrong(
                            f"after backward({m}), what micro-batch {m}'s forward left is still held", KEPT_LONG
                        )
            else:
                self.forwards += 1

        def _holds(self, m: int) -> bool:
            kept = self.inputs_seen.get(m)
            alive = sum(ref() is not None for ref in self.stage.outputs)
            return bool(kept and kept() is not None) or alive > self.forwards - self.backwards

    return Checked


def check_run(answer: Any, world: World) -> None:
    """Each stage of three by itself, then the ranks together; several micro-batches, runs and dtypes."""
    for number in (1, 2, 0):
        with world.record():
            _run(answer, 3, number, 5, 20, torch.float64, True, f"stage {number} of 3, 5 micro-batches")
    N = world.world_size
    for M, seed, dtype in (
        (1, 1, torch.float64),
        (5, 20, torch.float64),
        (2, 40, torch.float32),
        (3, 60, torch.bfloat16),
    ):
        name = str(dtype).removeprefix("torch.")
        when = f"{counted(M, 'micro-batch').replace('batchs', 'batches')} in {name}"
        with world.record():
            dist.barrier()  # a message waits a few seconds only, and ranks may have taken different times to get here
            _run(answer, N, world.rank, M, seed, dtype, False, when)


def _run(answer: Any, N: int, rank: int, M: int, seed: int, dtype: torch.dtype, alone: bool, when: str) -> None:
    """Twice, so that gradients add up, then once more from zeros."""
    expected = Expected(N, M, seed, dtype)
    stage = Stage(rank, dtype)
    made = checked(answer, expected, alone)
    pipe = made(stage, expected.inputs, expected.loss, expected.inputs[0], rank=rank, size=N)
    grads = {n: p.grad for n, p in expected.stages[rank].named_parameters()}
    for run in (1, 2, 3):
        if run == 3:
            stage.zero_grad(set_to_none=False)
        pipe.inputs_seen, pipe.forwards, pipe.backwards = {}, 0, 0  # type: ignore[attr-defined]
        stage.outputs.clear()
        with in_case(answer, when, "", ERRORS_3):
            loss = pipe.run()
        again = {1: "", 2: ", run twice without zero_grad()", 3: ", after zero_grad(set_to_none=False)"}[run]
        _check_grads(stage, grads, 2 if run == 2 else 1, M, N, dtype, f"{when}{again}")
        if pipe.last:
            want = sum(float(expected.loss(row[-1], m)) for m, row in enumerate(expected.between)) / M
            if abs(float(loss or 0.0) - want) > 0.03 * want + 1e-6:
                likely = "self.loss is called once for each m"
                raise Wrong(f"{when}: run() returns the loss {loss}, expected {want:.6g}", likely)
        if pipe.kept:
            raise Wrong(f"{when}: {len(pipe.kept)} entries are left in self.kept after the run", KEPT_LONG)
    for source, target in zip(expected.inputs, Expected(N, M, seed, dtype).inputs, strict=True):
        if not torch.equal(source, target):
            raise Wrong(f"{when}: the batch has changed", "work on copies")


def _check_grads(
    stage: Stage, grads: dict[str, Tensor | None], runs: int, M: int, N: int, dtype: torch.dtype, when: str
) -> None:
    for name, param in stage.named_parameters():
        want = grads[name]
        if want is None:
            if param.grad is not None and float(param.grad.abs().sum()):
                raise Wrong(f"{when}: {name} is frozen or unused, and has a gradient", "y.backward() is enough")
            continue
        want = want * runs
        if param.grad is None:
            raise Wrong(f"{when}: {name} has no gradient after the run", OVERWRITTEN)
        known = [(want * M, UNSCALED), (want * M / N, BY_STAGES)] if M > 1 else []
        known += [(want / M**k, SCALED_TWICE) for k in (1, 2, 3) if M > 1]
        times = f"{when}: the gradient of {name}"
        if dtype == torch.float64:
            compare(times, param.grad, want, lambda got: explain_by(known)(got) or OVERWRITTEN)  # noqa: B023
        elif not torch.allclose(param.grad.double(), want.double(), rtol=0.1, atol=0.1 * float(want.abs().max())):
            raise Wrong(f"{times} is wrong", "right in float64 only: keep the dtype of what comes in")


def check_pipeline(answer: Any, world: World) -> None:
    if not isinstance(answer.MyPipeline, type) or not issubclass(answer.MyPipeline, Pipeline):
        raise Wrong(
            "MyPipeline is not a subclass of lab.Pipeline", "it must begin with `class MyPipeline(lab.Pipeline):`"
        )
    check_order(answer)
    check_run(answer, world)


ERRORS_3 = {
    "grad can be implicitly created only for scalar": TAKES_GRAD,
    "backward through the graph a second time": SAME_KEPT,
    "does not require grad": "there is no graph: forward must keep x and the y that the stage computed from it",
}
ERRORS_3 |= {
    "'NoneType' object has no attribute 'detach'": "x.grad is None: it is there after backward, for the x that "
    "self.take_input() gave",
}

PIPELINE_STUB = '''\
from zerolab import lab
from zerolab.lab.exercises import Todo


class MyPipeline(lab.Pipeline):
    """Stage self.rank of self.size.

    Also there: self.micro_batches, self.first, self.last, self.stage, self.kept.
    """

    def order(self) -> list[tuple[str, int]]:
        """1F1B: ("forward", m) and ("backward", m), once for each micro-batch m.

        First size - 1 - rank forwards (or all, if there are fewer). Then one forward and
        one backward in turn. Then the backwards that are left.
        """
        raise Todo("15.3")

    def forward(self, m: int) -> None:
        """self.take_input(m) is x; self.stage(x) is y; self.send_output(y, m) passes it on.

        The last stage computes self.loss(y, m) instead, the mean over micro-batch m. All
        micro-batches together must give the gradient of the mean over the batch. What
        backward(m) will need goes into self.kept.
        """
        raise Todo("15.3")

    def backward(self, m: int) -> None:
        """self.take_grad(m) gives the gradient of y (the last stage has its loss).

        y.backward(grad) leaves x.grad, and self.send_grad(x.grad, m) passes it on; the
        first stage sends nothing. Parameters' gradients add up.
        """
        raise Todo("15.3")
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
        check=check_split,
        stub=SPLIT_STUB,
        reference=SPLIT,
        hints=(
            "Enter and Leave mirror each other. One does nothing in forward and adds up in backward, the other the "
            "other way round. Adding up: clone, dist.all_reduce(clone, group=group), return the clone.",
            "chunk(N)[rank] cuts up.weight and up.bias by rows, chunk(N, dim=1)[rank] cuts down.weight by columns. "
            "Detach and clone each part, and make an nn.Parameter of it. down.bias stays as it is.",
            "forward: gelu of F.linear(Enter.apply(x, group), up.weight, up.bias), then F.linear with down.weight and "
            "without a bias, then Leave.apply(..., group), then + down.bias.",
        ),
        exports=("MyMLP", "Enter", "Leave"),
        errors=ERRORS_1,
    ),
    Exercise(
        id="15.2",
        title="a rank's heads",
        difficulty=1,
        section="Attention, by heads",
        check=check_heads,
        stub=HEADS_STUB,
        reference=HEADS,
        hints=(
            "Write down the rows of a tiny case: 2 heads of width 1 on 2 ranks, so the rows are q0 q1 k0 k1 v0 v1. "
            "Rank 0 needs q0, k0 and v0.",
            "rows.view(3, size, -1, *rows.shape[1:]) has q, k and v along the first dimension and the ranks along the "
            "second: the heads of one rank lie next to each other.",
            "[:, rank] takes this rank's three pieces, flatten(0, 1) puts them end to end, clone() gives them memory.",
        ),
        exports=("heads_of",),
    ),
    Exercise(
        id="15.3",
        title="one forward, one backward",
        difficulty=2,
        section="Write a stage",
        check=check_pipeline,
        stub=PIPELINE_STUB,
        reference=PIPELINE,
        hints=(
            "order(): the last rank has no warm-up: F0 B0 F1 B1 ... The rank before it begins with F0, then F1 B0 F2 "
            "B1 ..., and ends with the backward that is left.",
            "forward(): keep x and y, self.kept[m] = x, y. On the last stage, y is self.loss(y, m) divided by "
            "self.micro_batches.",
            "backward(): x, y = self.kept.pop(m), then y.backward(self.take_grad(m)), on the last stage y.backward(). "
            "Unless this is the first stage, self.send_grad(x.grad, m).",
        ),
        exports=("MyPipeline",),
        errors=ERRORS_3,
    ),
]
