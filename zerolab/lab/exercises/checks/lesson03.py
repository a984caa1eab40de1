"""Lesson 03: data parallel, first naively, then with a bucket, then as a class of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor, compare
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic

KEPT_BACK = (
    "what no_sync() kept back was changed or lost: while self.reduces(unit) is False, leave unit.bucket.full alone"
)
BROADCAST = "a broadcast copies one rank's gradient to all; the exercise asks for the mean over all ranks"
SHAPES = ((5,), (2, 2), (3,))


def mean_explained(
    base: Tensor,
    world: World,
    calls: list[Traffic],
    suspects: list[tuple[Tensor, str]] | None = None,
    otherwise: str = "",
) -> Callable[[Tensor], str]:
    """Names what was found instead of the mean over the ranks of `values.share(base, rank)`."""
    N, rank = world.world_size, world.rank

    def explain(got: Tensor) -> str:
        for wrong, likely in suspects or []:
            if torch.allclose(got, wrong):
                return likely
        shares = values.contributions(got, base, N)
        if shares == [1.0] * N and any(call.touched for call in calls):
            return "changed before the wait: the sum came in later and overwrote what you had divided"
        if shares == [1.0] * N:
            return "summed over ranks, not averaged"
        if shares == [1.0 / N**2] * N:
            return "divided by N twice"
        others = [share for r, share in enumerate(shares or []) if r != rank]
        if shares and not any(others) and max(shares) <= 1:
            if lost := world.unwaited(calls):
                return f"a forgotten wait: {lost}, so this is still the rank's own gradient"
            if {call.op for call in calls} == {"broadcast"}:
                return BROADCAST
            if not calls:
                return "the rank's own gradient: nothing was sent"
            return "the rank's own gradient: it was not reduced, or the result was not written back"
        if shares and sum(share > 0 for share in shares) == 1 < N:
            return f"{values.in_words(shares)} alone, not the mean of all: a maximum, or one rank's copy"
        k = values.factor(got, values.total(base, N) / N)
        if k is not None and abs(N / k - round(N / k)) < 1e-3:
            return f"the sum over the ranks was divided by {round(N / k)}, but there are {N}"
        return f"{values.in_words(shares)}, not the mean over all ranks" if shares else otherwise

    return explain


def check_traffic(calls: list[Traffic], world: World, payload: int, slack: int = 0) -> None:
    """An all-reduce moves 2 (N-1)/N of the payload; `slack` bytes of padding are allowed on top."""
    N = world.world_size
    sent, allowed = sum(call.sent for call in calls), 2 * payload * (N - 1) / N
    if sent > allowed + slack:
        times = f"{sent / allowed:.2f} x what an all-reduce moves" if allowed else "with nobody to send to"
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        raise Wrong(
            f"{sent:,.0f} bytes were sent per rank, {times}", f"extra traffic ({ops}): one all-reduce is enough"
        )
    if N > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and would be wrong on a slower network")


def make_params(world: World) -> list[nn.Parameter]:
    """Parameters that differ between ranks, so that averaging them instead of their gradients shows."""
    bases = [values.base(torch.Size(shape).numel(), i).view(shape) for i, shape in enumerate(SHAPES)]
    return [nn.Parameter(-values.share(base, world.rank)) for base in bases]


def check_untouched(params: list[nn.Parameter], world: World) -> None:
    for i, (param, before) in enumerate(zip(params, make_params(world), strict=True)):
        if not torch.equal(param, before):
            likely = "the parameters were averaged (or changed), not their gradients: use param.grad"
            raise Wrong(f"parameter {i} has changed", likely)


def set_grads(params: list[nn.Parameter], world: World, step: int) -> list[Tensor]:
    """Set new gradients; return the tensor that each one is a multiple of."""
    bases = [values.base(param.numel(), 10 * step + i).view(param.shape) for i, param in enumerate(params)]
    for param, base in zip(params, bases, strict=True):
        param.grad = values.share(base, world.rank)
    return bases


# ---------------------------------------------------------------------- 03.1


def check_average(answer: Any, world: World) -> None:
    N, params = world.world_size, make_params(world)
    bases = set_grads(params, world, 0)
    params[1].grad = None  # on every rank: nobody used it
    with world.record() as calls:
        answer.average(params)
    check_untouched(params, world)
    if params[1].grad is not None:
        raise Wrong("parameter 1 has a gradient now", "a parameter that no rank used must keep grad = None: skip it")
    for i in (0, 2):
        grad = check_tensor(f"gradient {i}", params[i].grad, tuple(params[i].shape))
        want = values.total(bases[i], N) / N
        compare(f"gradient {i}", grad, want, mean_explained(bases[i], world, calls))
    check_traffic(calls, world, 4 * sum(params[i].numel() for i in (0, 2)), slack=2 * 4 * N)


AVERAGE_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def average(params: list[Tensor]) -> None:
    """Replace each parameter's gradient with its mean over all ranks. One all-reduce per parameter will do.

    A parameter that nobody used has no gradient, and must have none afterwards.
    """
    raise Todo("03.1")
'''

AVERAGE = """\
import torch.distributed as dist
from torch import Tensor


def average(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
"""


# ---------------------------------------------------------------------- 03.2


def check_bucket(answer: Any, world: World) -> None:
    N, params = world.world_size, make_params(world)
    numel = sum(param.numel() for param in params)
    bucket = answer.Bucket(params)
    old: list[Tensor] = []  # the means of the previous step
    for step in (0, 1):
        bases = set_grads(params, world, step)
        grads: list[Tensor | None] = [param.grad for param in params]
        if step == 1 and world.rank == 0 and N > 1:
            params[1].grad = grads[1] = None  # a rank that did not use it contributes zeros
        with world.record() as around:
            bucket.collect()
        _check_flat(bucket, numel, N, [torch.zeros(4) if g is None else g.flatten() for g in grads], old)
        with world.record() as calls:
            bucket.reduce()
        with world.record() as after:
            bucket.write_back()
        if around or after:
            op = (around + after)[0].op
            raise Wrong(
                f"{op} was called by {'collect' if around else 'write_back'}()", "only reduce() may communicate"
            )
        check_untouched(params, world)
        means: list[Tensor] = []
        for i, (param, base) in enumerate(zip(params, bases, strict=True)):
            want = values.total(base, N)
            if step == 1 and i == 1 and N > 1:
                want = want - values.share(base, 0)
            suspects = [(mean, "the mean of the previous step") for mean in old[i : i + 1]]
            what = f"gradient {i}, step {step}"
            if param.grad is None:
                likely = "write_back() skipped a parameter without a gradient on this rank; another rank may have one"
                raise Wrong(f"{what} is None", likely)
            grad = check_tensor(what, param.grad, tuple(param.shape))
            means.append(grad.clone())
            compare(what, grad, want / N, mean_explained(base, world, calls, suspects))
        if len(calls) > 2 or [call.op for call in calls].count("all_reduce") > 1:  # reduce-scatter, all-gather are two
            likely = "one call per parameter" if len(calls) == len(params) else "the buffer is sent in pieces"
            raise Wrong(
                f"reduce() made {len(calls)} calls", f"{likely}: one all-reduce of the flat buffer is the point"
            )
        check_traffic(calls, world, 4 * numel, slack=2 * 4 * N)
        old = means


def _check_flat(bucket: Any, numel: int, N: int, pieces: list[Tensor], old: list[Tensor]) -> None:
    flat = getattr(bucket, "flat", None)
    if not isinstance(flat, Tensor) or flat.dim() != 1:
        what = (
            "is missing"
            if flat is None
            else f"is a {type(flat).__name__} of {getattr(flat, 'dim', lambda: 0)()} dimensions"
        )
        raise Wrong(
            f"bucket.flat {what}", "after collect(), self.flat must be a one-dimensional tensor with all gradients"
        )
    if not numel <= flat.numel() < numel + N:
        raise Wrong(f"bucket.flat has {flat.numel()} elements, not {numel}", "it needs one place for each element")
    if (held := flat.untyped_storage().nbytes()) >= 4 * (numel + N):
        raise Wrong(f"bucket.flat keeps {held} bytes, not {4 * numel}", "flat is a slice of something larger")
    offset = 0
    for i, piece in enumerate(pieces):
        found = flat[offset : offset + len(piece)]

        def explain(found: Tensor, i: int = i, piece: Tensor = piece) -> str:
            if torch.allclose(found, -values.share(values.base(len(piece), i), 0)) or bool((found < 0).all()):
                return "the parameters were collected, not their gradients"
            if old and torch.equal(found, piece + old[i].flatten()) and piece.any():
                return "the previous step's values were left in and added to: every step starts with an empty buffer"
            if not piece.any():
                if old and torch.equal(found, old[i].flatten()):
                    return "left over from the previous step: where a parameter has no gradient, write zeros"
                return "where a parameter has no gradient, the buffer must hold zeros"
            return "not collected: still zero" if not found.any() else "another gradient is here: look at the offsets"

        compare(f"bucket.flat, piece {i}", found, piece, explain)
        offset += len(piece)


BUCKET_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


class Bucket:
    """One flat buffer, `self.flat`, in which the gradients of `params` travel together."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        raise Todo("03.2")

    def collect(self) -> None:
        """Copy all gradients into self.flat, in order; zeros where a parameter has none."""
        raise Todo("03.2")

    def reduce(self) -> None:
        """Average self.flat over the ranks, in one all-reduce."""
        raise Todo("03.2")

    def write_back(self) -> None:
        """Give every parameter its mean gradient, even if it had none here: another rank may have had one."""
        raise Todo("03.2")
'''

BUCKET = """\
import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.flat = torch.zeros(sum(param.numel() for param in params))
        self.views, offset = [], 0
        for param in params:
            self.views.append(self.flat[offset : offset + param.numel()].view_as(param))
            offset += param.numel()

    def collect(self) -> None:
        for param, view in zip(self.params, self.views):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()

    def write_back(self) -> None:
        for param, view in zip(self.params, self.views):
            param.grad = view.clone()
"""


# ---------------------------------------------------------------------- 03.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def make_model() -> nn.Sequential:
    """Two units of small integers, so that all gradients are small integers too, and none is zero."""
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((torch.arange(param.numel()) % 2 + 1.0).view(param.shape))
    return model


INPUT = torch.tensor([[1.0, 2.0]])


def gradients_alone() -> dict[str, Tensor]:
    """The gradients of which each rank's are a multiple."""
    model = make_model()
    (12.0 * model(INPUT).sum()).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def check_ddp(answer: Any, world: World) -> None:
    N, bases, model = world.world_size, gradients_alone(), make_model()
    check_class(answer.MyDDP)
    zero = answer.MyDDP(model, units=[Block])
    payload = 4 * sum(unit.layout.size for unit in zero.units)

    def backward(times: float) -> None:
        (model(INPUT).sum() * 12.0 * times * 16.0**world.rank).backward()

    def check_step(
        when: str, calls: list[Traffic], times: float, suspects: dict[float, str], otherwise: str = ""
    ) -> None:
        for name, param in model.named_parameters():
            what, base = f"{name}, {when}", bases[name]
            if param.grad is None:
                raise Wrong(f"{what}: there is no gradient", "post_backward() or reduce() lost it")
            want = times * values.total(base, N) / N
            known = [(want / times * other, likely) for other, likely in suspects.items()]
            compare(what, param.grad, want, mean_explained(times * base, world, calls, known, otherwise))
        check_traffic(calls, world, payload)
        if (count := [call.op for call in calls].count("all_reduce")) > len(zero.units):
            likely = "one call per parameter: unit.bucket.full holds all of them, so one all-reduce is enough"
            raise Wrong(f"{count} all-reduces for {len(zero.units)} units", likely)

    with world.record() as calls:
        backward(1)
    check_same_weights(model, world)
    check_step("one backward", calls, 1, {})
    zero.model.zero_grad()

    with world.record() as inside, zero.no_sync():
        backward(1)
    if inside:
        likely = "no_sync() was ignored: in post_backward, reduce only if self.reduces(unit)"
        raise Wrong(f"{inside[0].op} was called inside no_sync()", likely)
    with world.record() as calls:
        backward(2)
    lost = {2.0: "only the last micro-batch: what no_sync() kept back is lost", 1.0: "only the first micro-batch"}
    check_step("two micro-batches under no_sync", calls, 3, lost, KEPT_BACK)


def check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, zerolab.DDP) or cls.stage != 0:
        raise Wrong("MyDDP is not a subclass of zerolab.DDP", "it must begin with `class MyDDP(zerolab.DDP):`")
    for name in ("post_backward", "reduce"):
        if getattr(cls, name) is getattr(zerolab.DDP, name):
            raise Wrong(f"MyDDP.{name} is the package's", f"the class inherits {name}(): write your own")


def check_same_weights(model: nn.Module, world: World) -> None:
    for (name, param), want in zip(model.named_parameters(), make_model().parameters(), strict=True):
        if not torch.equal(param, want):
            raise Wrong(f"{name} has changed", "the parameters were averaged (or changed), not unit.bucket.full")


DDP_STUB = '''\
import torch.distributed as dist
import zerolab
from zerolab import Unit
from zerolab.lab.exercises import Todo


class MyDDP(zerolab.DDP):
    def post_backward(self, unit: Unit) -> None:
        """All gradients of `unit` are complete. Start its reduction, if self.reduces(unit).

        Put what reduce() returns into unit.bucket.reduction: the engine waits for it before anyone sees the gradient.
        """
        raise Todo("03.3")

    def reduce(self, unit: Unit):
        """Average unit.bucket.full, a flat tensor, over the ranks and leave the mean in unit.bucket.grad.

        Return None if the mean is there already, or something whose wait() returns when it is.
        self.comm.all_reduce(tensor, unit.name) starts a mean; dist.all_reduce() is a sum.
        """
        raise Todo("03.3")
'''

DDP = """\
import zerolab
from zerolab import Unit


class MyDDP(zerolab.DDP):
    def post_backward(self, unit: Unit) -> None:
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit: Unit):
        unit.bucket.grad = unit.bucket.full
        return self.comm.all_reduce(unit.bucket.grad, unit.name)
"""


NONE = "a parameter that was not used has no gradient (grad is None)"
ERRORS = {
    "NoneType": NONE,
    "Expected parameter `tensor` of type torch.Tensor": NONE,
    "a gradient of size": "a piece of a flat buffer has one dimension: a gradient needs view_as(param)",
    "storage of size": "unit.bucket.grad must be as long as unit.bucket.full: here every rank keeps the full mean",
    "left no unit.bucket.grad": "reduce() was not called, or did not leave the mean in unit.bucket.grad",
}
FIRST_RANK = "the result reached rank 0 only: reduce() leaves it on one rank, all_reduce() on all of them"

EXERCISES = [
    Exercise(
        id="03.1",
        title="average the gradients",
        section="The mean of N batches",
        check=check_average,
        stub=AVERAGE_STUB,
        reference=AVERAGE,
        hints=(
            "dist.all_reduce(tensor) replaces `tensor` on every rank with the sum over the ranks.",
            "The mean is the sum divided by dist.get_world_size(). It must end up in param.grad.",
            "for param in params: if param.grad is not None: all-reduce param.grad, then divide it by the world size.",
        ),
        exports=("average",),
        first_rank_only=FIRST_RANK,
        errors=ERRORS,
    ),
    Exercise(
        id="03.2",
        title="a bucket",
        section="Buckets",
        check=check_bucket,
        stub=BUCKET_STUB,
        reference=BUCKET,
        hints=(
            "You wrote flat_buffer() in lesson 02: a flat tensor and a view into it for each parameter.",
            "collect() copies each gradient into its view, or zeroes the view; reduce() is one dist.all_reduce of "
            "self.flat and a division.",
            "write_back(): for param, view in zip(self.params, self.views): param.grad = view.clone()",
        ),
        exports=("Bucket",),
        first_rank_only=FIRST_RANK,
        errors=ERRORS,
    ),
    Exercise(
        id="03.3",
        title="a class of the engine",
        section="DDP as a class",
        check=check_ddp,
        stub=DDP_STUB,
        reference=DDP,
        hints=(
            "The engine has collected the unit's gradients in its bucket: they are in unit.bucket.full.",
            "reduce(): unit.bucket.grad = unit.bucket.full, then return self.comm.all_reduce(unit.bucket.grad, "
            "unit.name), which has a wait().",
            "post_backward(): if self.reduces(unit): unit.bucket.reduction = self.reduce(unit). Inside no_sync() "
            "self.reduces(unit) is False.",
        ),
        exports=("MyDDP",),
        extends="DDP",
        first_rank_only=FIRST_RANK,
        errors=ERRORS,
    ),
]
