"""Lesson 03: data parallel, first naively, then with a bucket, then as a class of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.lab.exercises.catalogue import Exercise, Traffic, World, Wrong, check_tensor, compare, edit
from zerolab.lab.exercises.checks import values

KEPT_BACK = (
    "what no_sync() kept back was changed or lost: where self.reduces(unit) is False, leave unit.bucket.full alone"
)
BROADCAST = "a broadcast copies one rank's gradient to all, the mean of all ranks was asked"
SHAPES = ((5,), (2, 2), (3,))


def mean_explained(
    base: Tensor, world: World, calls: list[Traffic], suspects: list[tuple[Tensor, str]] | None = None
) -> Callable[[Tensor], str]:
    """Names what is there in place of the mean over the ranks of `values.share(base, rank)`."""
    N, rank = world.world_size, world.rank

    def explain(got: Tensor) -> str:
        for wrong, likely in suspects or []:
            if torch.allclose(got, wrong):
                return likely
        shares = values.contributions(got, base, N)
        if shares == [1.0] * N and any(call.touched for call in calls):
            return "changed before the wait: when the sum came in, it took the place of what had been divided"
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
                return "the rank's own gradient: nothing was sent to anybody"
            return "the rank's own gradient: it was not reduced, or the result was not written back"
        if shares and sum(share > 0 for share in shares) == 1 < N:
            return f"{values.in_words(shares)} alone, where the mean of all was asked: a maximum, or one rank's copy"
        k = values.factor(got, values.total(base, N) / N)
        if k is not None and abs(N / k - round(N / k)) < 1e-3:
            return f"the sum over the ranks was divided by {round(N / k)}, but there are {N}"
        return f"{values.in_words(shares)}, where the mean of all ranks was asked" if shares else ""

    return explain


def check_traffic(calls: list[Traffic], world: World, payload: int, slack: int = 0) -> None:
    """An all-reduce moves 2 (N-1)/N of the payload; `slack` bytes of padding are forgiven."""
    N = world.world_size
    sent, allowed = sum(call.sent for call in calls), 2 * payload * (N - 1) / N
    if sent > allowed + slack:
        times = f"{sent / allowed:.2f} x what an all-reduce moves" if allowed else "and there is nobody to send to"
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        raise Wrong(
            f"{sent:,.0f} bytes were sent per rank, {times}", f"extra traffic ({ops}): one all-reduce is enough"
        )
    if N > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and will not be on a slower network")


def make_params(world: World) -> list[nn.Parameter]:
    """Parameters that differ between ranks, so that it shows if they are averaged instead of their gradients."""
    bases = [values.base(torch.Size(shape).numel(), i).view(shape) for i, shape in enumerate(SHAPES)]
    return [nn.Parameter(-values.share(base, world.rank)) for base in bases]


def check_untouched(params: list[nn.Parameter], world: World) -> None:
    for i, (param, before) in enumerate(zip(params, make_params(world), strict=True)):
        if not torch.equal(param, before):
            likely = "the parameters were averaged (or changed), not their gradients: use param.grad"
            raise Wrong(f"parameter {i} has changed", likely)


def set_grads(params: list[nn.Parameter], world: World, step: int) -> list[Tensor]:
    """New gradients; what each is a multiple of."""
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
        check_tensor(f"gradient {i}", params[i].grad, tuple(params[i].shape))
        want = values.total(bases[i], N) / N
        compare(f"gradient {i}", params[i].grad, want, mean_explained(bases[i], world, calls))
    check_traffic(calls, world, 4 * sum(params[i].numel() for i in (0, 2)), slack=2 * 4 * N)


AVERAGE_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def average(params: list[Tensor]) -> None:
    """Replace the gradient of each parameter by its mean over all ranks. One all-reduce per parameter will do.

    A parameter that nobody used has no gradient, and none afterwards.
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

AVERAGE_ASYNC = """\
from torch.distributed import all_reduce, get_world_size


def average(params):
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.div_(get_world_size())
    started = [all_reduce(grad, async_op=True) for grad in grads]
    for work in started:
        work.wait()
"""

AVERAGE_NATIVE = """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            continue
        mean = param.grad.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        param.grad = mean
"""

AVERAGE_MUTANTS = {
    "waits for the last only": (
        edit(AVERAGE_ASYNC, "    for work in started:\n        work.wait()", "    started[-1].wait()"),
        "a forgotten wait: all_reduce was started once",
    ),
    "divides before the wait": (
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            work = dist.all_reduce(param.grad, async_op=True)
            param.grad /= dist.get_world_size()
            work.wait()
""",
        "changed before the wait",
    ),
    "sum for mean": (edit(AVERAGE, "            param.grad /= dist.get_world_size()\n", ""), "summed over ranks"),
    "divided twice": (
        edit(
            AVERAGE, "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size(); dist.all_reduce(param.grad)"
        ),
        "divided by N twice",
    ),
    "forgotten wait": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        "a forgotten wait",
    ),
    "averages the parameter": (
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param.data)", "param.grad /=", "param.data /="),
        "the parameters were averaged",
    ),
    "reduces a copy": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "grad = param.grad.clone(); dist.all_reduce(grad)",
            "param.grad /=",
            "grad /=",
        ),
        "was not written back",
    ),
    "only divides": (edit(AVERAGE, "            dist.all_reduce(param.grad)\n", ""), "nothing was sent to anybody"),
    "reduces to rank 0": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.reduce(param.grad, dst=0)"),
        "reached rank 0 only",
    ),
    "broadcasts": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "dist.broadcast(param.grad, src=0)",
            "            param.grad /= dist.get_world_size()\n",
            "",
        ),
        "a broadcast copies one rank's gradient",
    ),
    "a number of ranks by heart": (edit(AVERAGE, "dist.get_world_size()", "2"), "was divided by 2, but there are"),
    "no gradient": (
        edit(AVERAGE, "if param.grad is not None:", "if param is not None:"),
        "has no gradient (grad is None)",
    ),
    "only rank 0 calls": (
        edit(AVERAGE, "if param.grad is not None:", "if param.grad is not None and dist.get_rank() == 0:"),
        "not every rank makes the same calls",
    ),
    "another order on every rank": (
        edit(AVERAGE, "for param in params:", "for param in params[:: -1 if dist.get_rank() else 1]:"),
        "different orders",
    ),
    "gathers everything": (
        """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            grads = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(grads, param.grad)
            param.grad = torch.stack(grads).mean(0)
""",
        "extra traffic",
    ),
}

# ---------------------------------------------------------------------- 03.2


def check_bucket(answer: Any, world: World) -> None:
    N, params = world.world_size, make_params(world)
    numel = sum(param.numel() for param in params)
    bucket, old = answer.Bucket(params), None
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
                f"{op} was called by {'collect' if around else 'write_back'}()", "only reduce() is to communicate"
            )
        check_untouched(params, world)
        for i, (param, base) in enumerate(zip(params, bases, strict=True)):
            want = values.total(base, N)
            if step == 1 and i == 1 and N > 1:
                want = want - values.share(base, 0)
            suspects = [(old[i], "the mean of the step before")] if old else []
            what = f"gradient {i}, step {step}"
            if param.grad is None:
                raise Wrong(f"{what} is None", "write_back() passed by a parameter that had no gradient on this rank")
            check_tensor(what, param.grad, tuple(param.shape))
            compare(what, param.grad, want / N, mean_explained(base, world, calls, suspects))
        if len(calls) > 2 or [call.op for call in calls].count("all_reduce") > 1:  # reduce-scatter, all-gather are two
            likely = "one call per parameter" if len(calls) == len(params) else "the buffer goes in pieces"
            raise Wrong(
                f"reduce() made {len(calls)} calls", f"{likely}: one all-reduce of the flat buffer is the point"
            )
        check_traffic(calls, world, 4 * numel, slack=2 * 4 * N)
        old = [param.grad.clone() for param in params]


def _check_flat(bucket: Any, numel: int, N: int, pieces: list[Tensor], old: list[Tensor] | None) -> None:
    flat = getattr(bucket, "flat", None)
    if not isinstance(flat, Tensor) or flat.dim() != 1:
        what = (
            "is missing"
            if flat is None
            else f"is a {type(flat).__name__} of {getattr(flat, 'dim', lambda: 0)()} dimensions"
        )
        raise Wrong(
            f"bucket.flat {what}", "after collect(), self.flat is one tensor of one dimension with all gradients"
        )
    if not numel <= flat.numel() < numel + N:
        raise Wrong(f"bucket.flat has {flat.numel()} elements, not {numel}", "one place for each element is wanted")
    if (held := flat.untyped_storage().nbytes()) >= 4 * (numel + N):
        raise Wrong(f"bucket.flat keeps {held} bytes, not {4 * numel}", "flat is a part of something larger")
    offset = 0
    for i, piece in enumerate(pieces):
        found = flat[offset : offset + len(piece)]

        def explain(found: Tensor, i: int = i, piece: Tensor = piece) -> str:
            if torch.allclose(found, -values.share(values.base(len(piece), i), 0)) or bool((found < 0).all()):
                return "the parameters were collected, not their gradients"
            if old is not None and torch.equal(found, piece + old[i].flatten()) and piece.any():
                return "left over from the step before, and added to: a new step begins with an empty buffer"
            if not piece.any():
                if old is not None and torch.equal(found, old[i].flatten()):
                    return "left over from the step before: where a parameter has no gradient, write zeros"
                return "where a parameter has no gradient, zeros belong into the buffer"
            return (
                "not collected yet: it is zero" if not found.any() else "another gradient is there: look at the offsets"
            )

        compare(f"bucket.flat, piece {i}", found, piece, explain)
        offset += len(piece)


BUCKET_STUB = '''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


class Bucket:
    """One flat buffer, `self.flat`, for the gradients of `params`: they travel together."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        raise Todo("03.2")

    def collect(self) -> None:
        """Copy all gradients into self.flat, one after the other; zeros where a parameter has none."""
        raise Todo("03.2")

    def reduce(self) -> None:
        """Average self.flat over the ranks, in one all-reduce."""
        raise Todo("03.2")

    def write_back(self) -> None:
        """Give every parameter its mean gradient; also those that had none here: another rank may have had one."""
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

BUCKET_OF_VIEWS = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params = params

    def collect(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.flat = torch.cat([grad.reshape(-1) for grad in grads]).detach()

    def reduce(self):
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def write_back(self):
        self.work.wait()
        offset = 0
        for p in self.params:  # the gradients stay in the bucket, as DDP's gradient_as_bucket_view does it
            p.grad = self.flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
"""

BUCKET_IN_TWO_HALVES = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params, self.N = params, dist.get_world_size()
        numel = sum(p.numel() for p in params)
        self.numels = [p.numel() for p in params]
        self.flat = torch.zeros(numel + -numel % self.N)

    def collect(self):
        self.flat.zero_()
        pieces = self.flat[: sum(self.numels)].split(self.numels)
        for p, piece in zip(self.params, pieces):
            if p.grad is not None:
                piece += p.grad.flatten()

    def reduce(self):  # an all-to-all and a sum: a reduce-scatter; then an all-gather
        received = torch.empty_like(self.flat)
        dist.all_to_all_single(received, self.flat)
        mine = received.view(self.N, -1).sum(0) / self.N
        dist.all_gather(list(self.flat.view(self.N, -1)), mine)

    def write_back(self):
        for p, piece in zip(self.params, self.flat[: sum(self.numels)].split(self.numels)):
            p.grad = piece.reshape(p.shape).clone()
"""

_DIVIDE = "        self.flat /= dist.get_world_size()\n"
_ASYNC = "dist.all_reduce(self.flat, async_op=True)"

BUCKET_MUTANTS = {
    "in two pieces": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(half) for half in self.flat.split(6)]"),
        "the buffer goes in pieces",
    ),
    "added to what was there": (
        edit(BUCKET, "view.copy_(param.grad)", "view.add_(param.grad)"),
        "a new step begins with an empty buffer",
    ),
    "sum for mean": (edit(BUCKET, _DIVIDE, ""), "summed over ranks"),
    "divided twice": (edit(BUCKET, "view.clone()", "view / dist.get_world_size()"), "divided by N twice"),
    "forgotten wait": (edit(BUCKET, "dist.all_reduce(self.flat)", _ASYNC), "a forgotten wait"),
    "left over from the step before": (
        edit(BUCKET, "                view.zero_()", "                pass"),
        "left over from the step before",
    ),
    "no gradient": (
        edit(BUCKET, "if param.grad is None:", "if param is None:"),
        "has no gradient (grad is None)",
    ),
    "one call per parameter": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(view) for view in self.views]"),
        "one call per parameter",
    ),
    "not written back": (
        edit(BUCKET, "            param.grad = view.clone()", "            pass"),
        "was not written back",
    ),
    "written back to some": (
        edit(
            BUCKET,
            "            param.grad = view",
            "            if param.grad is not None:\n                param.grad = view",
        ),
        "passed by a parameter",
    ),
    "collects the parameters": (
        edit(BUCKET, "view.copy_(param.grad)", "view.copy_(param.data)"),
        "the parameters were collected",
    ),
    "writes into the parameters": (
        edit(BUCKET, "param.grad = view.clone()", "param.data.copy_(view)"),
        "the parameters were averaged",
    ),
    "all at the same place": (
        edit(BUCKET, "            offset += param.numel()\n", ""),
        "look at the offsets",
    ),
    "flat gradients": (
        edit(BUCKET, "param.grad = view.clone()", "param.grad = view.flatten()"),
        "a piece of a flat buffer has one dimension",
    ),
    "reduces to rank 0": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "dist.reduce(self.flat, dst=0)"),
        "reached rank 0 only",
    ),
    "gathers everything": (
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n" + _DIVIDE,
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(flats, self.flat)\n"
            "        self.flat.copy_(torch.stack(flats).mean(0))\n",
        ),
        "extra traffic",
    ),
}


# ---------------------------------------------------------------------- 03.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def make_model() -> nn.Sequential:
    """Two units of small whole numbers: so are all gradients, and none is zero."""
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((torch.arange(param.numel()) % 2 + 1.0).view(param.shape))
    return model


INPUT = torch.tensor([[1.0, 2.0]])


def gradients_alone() -> dict[str, Tensor]:
    """What each rank's gradient is a multiple of."""
    model = make_model()
    (12.0 * model(INPUT).sum()).backward()
    return {name: param.grad for name, param in model.named_parameters()}


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
            named = mean_explained(times * base, world, calls, known)
            compare(what, param.grad, want, lambda got, named=named: named(got) or otherwise)
        check_traffic(calls, world, payload)
        if (count := [call.op for call in calls].count("all_reduce")) > len(zero.units):
            likely = "one call per parameter: unit.bucket.full is a bucket, and goes in one all-reduce"
            raise Wrong(f"{count} all-reduces for {len(zero.units)} units", likely)

    with world.record() as calls:
        backward(1)
    check_same_weights(model, world)
    check_step("one backward", calls, 1, {})
    zero.model.zero_grad()

    with world.record() as inside, zero.no_sync():
        backward(1)
    if inside:
        likely = "no_sync() was ignored: in post_backward, only reduce where self.reduces(unit) says so"
        raise Wrong(f"{inside[0].op} was called inside no_sync()", likely)
    with world.record() as calls:
        backward(2)
    lost = {2: "only the last micro-batch: what no_sync() kept back is lost", 1: "only the first micro-batch"}
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
        """All gradients of `unit` are there: start to reduce it, if self.reduces(unit) says that it is its turn.

        What reduce() returns belongs in unit.bucket.reduction: the engine waits for it before anyone sees the gradient.
        """
        raise Todo("03.3")

    def reduce(self, unit: Unit):
        """Average unit.bucket.full, a flat tensor, over the ranks and leave it in unit.bucket.grad.

        Return None if it is there already, or something with a wait() after which it is.
        self.comm.all_reduce(tensor, unit.name) starts a mean; dist.all_reduce() a sum.
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

DDP_SYNCHRONOUS = """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if not self.reduces(unit):
            return
        self.reduce(unit)

    def reduce(self, unit):
        dist.all_reduce(unit.bucket.full, group=self.comm.group)
        unit.bucket.full /= self.world_size
        unit.bucket.grad = unit.bucket.full
"""

DDP_DIVIDED_FIRST = """\
import torch.distributed as dist
from zerolab import DDP


class MyDDP(DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full / self.world_size
        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)
"""

_COMM = "return self.comm.all_reduce(unit.bucket.grad, unit.name)"

DDP_MUTANTS = {
    "one call per parameter": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(view) for view in unit.layout.views(unit.bucket.full)]",
        ),
        "one call per parameter",
    ),
    "only a shard": (
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)",
            _COMM,
            "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
        ),
        "in stage 0 every rank keeps the whole mean",
    ),
    "loses what no_sync kept back": (
        edit(
            DDP,
            "unit.bucket.reduction = self.reduce(unit)",
            "unit.bucket.reduction = self.reduce(unit)\n        unit.bucket.full = None",
        ),
        "what no_sync() kept back",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    pass\n", "write your own"),
    "sum for mean": (
        edit(DDP_SYNCHRONOUS, "        unit.bucket.full /= self.world_size\n", ""),
        "summed over ranks",
    ),
    "divided twice": (
        edit(
            DDP,
            _COMM,
            "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        unit.bucket.grad /= self.world_size",
        ),
        "divided by N twice",
    ),
    "forgotten wait: nothing returned": (edit(DDP, "return self", "self"), "a forgotten wait"),
    "forgotten wait: not kept": (edit(DDP, "unit.bucket.reduction = self", "self"), "a forgotten wait"),
    "ignores no_sync": (edit(DDP, "if self.reduces(unit):", "if True:"), "no_sync() was ignored"),
    "never reduces": (edit(DDP, "if self.reduces(unit):", "if False:"), "reduce() was not called"),
    "unit.bucket.grad not set": (
        edit(DDP, "unit.bucket.grad = unit.bucket.full\n        ", "", "unit.bucket.grad", "unit.bucket.full"),
        "did not say in unit.bucket.grad",
    ),
    "reduces a copy": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.bucket.grad.clone()"),
        "was not written back",
    ),
    "averages the parameters": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.full.data"),
        "it was not reduced",
    ),
    "changes the parameters": (
        edit(
            DDP,
            _COMM,
            "dist.all_reduce(unit.full.data)",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        "the parameters were averaged",
    ),
    "reduces twice": (
        edit(DDP, "        return", "        self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return"),
        "extra traffic",
    ),
    "reduces to rank 0": (
        edit(DDP_SYNCHRONOUS, "all_reduce(unit.bucket.full, ", "reduce(unit.bucket.full, dst=0, "),
        "reached rank 0 only",
    ),
    "only rank 0 calls": (
        edit(DDP_SYNCHRONOUS, "if not self.reduces(unit):", "if not self.reduces(unit) or self.rank > 0:"),
        "reduce() was not called",
    ),
    "gathers everything": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "all = [unit.bucket.full.clone() for _ in range(self.world_size)]; dist.all_gather(all, unit.bucket.full)",
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full = sum(all) / self.world_size",
        ),
        "extra traffic",
    ),
}


NONE = "a parameter that was not used has no gradient (grad is None)"
ERRORS = {
    "NoneType": NONE,
    "Expected parameter `tensor` of type torch.Tensor": NONE,
    "a gradient of size": "a piece of a flat buffer has one dimension: a gradient needs view_as(param)",
    "storage of size": "unit.bucket.grad needs the size of unit.bucket.full: in stage 0 every rank keeps the full mean",
    "left no unit.bucket.grad": "reduce() was not called, or did not say in unit.bucket.grad where the mean is",
}
FIRST_RANK = "the result reached rank 0 only: reduce() collects on one rank, all_reduce() on all"

EXERCISES = [
    Exercise(
        id="03.1",
        title="average the gradients",
        section="The mean of N batches",
        check=check_average,
        stub=AVERAGE_STUB,
        reference=AVERAGE,
        alternatives=(AVERAGE_ASYNC, AVERAGE_NATIVE),
        mutants=AVERAGE_MUTANTS,
        hints=(
            "dist.all_reduce(tensor) replaces `tensor`, on every rank, by the sum over the ranks.",
            "The mean is the sum divided by dist.get_world_size(). It has to end up in param.grad.",
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
        alternatives=(BUCKET_OF_VIEWS, BUCKET_IN_TWO_HALVES),
        mutants=BUCKET_MUTANTS,
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
        alternatives=(DDP_SYNCHRONOUS, DDP_DIVIDED_FIRST),
        mutants=DDP_MUTANTS,
        hints=(
            "unit.bucket.full is the bucket, and it is full: the engine has collected the unit's gradients there.",
            "reduce(): unit.bucket.grad = unit.bucket.full, then "
            "return self.comm.all_reduce(unit.bucket.grad, unit.name), which has "
            "a wait().",
            "post_backward(): if self.reduces(unit): unit.bucket.reduction = self.reduce(unit). Inside no_sync() "
            "self.reduces(unit) is False.",
        ),
        exports=("MyDDP",),
        extends="DDP",
        first_rank_only=FIRST_RANK,
        errors=ERRORS,
    ),
]
