"""Lesson 03: data parallel, first naively, then with a bucket, then as a class of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.training import check_pairs
from zerolab.lab.exercises.checks.values import BY_ZERO, check_tensor, compare
from zerolab.lab.exercises.exercise import SUMMED, Exercise, World, Wrong, returns_none
from zerolab.lab.exercises.spy import Traffic
from zerolab.lab.ranks.intercept import MESSAGES

KEPT_BACK = (
    "what no_sync() kept back was changed or lost: while self.reduces(unit) is False, leave unit.bucket.full alone"
)
BROADCAST = "a broadcast copies one rank's gradient to all; the exercise asks for the mean over all ranks"
MEDDLED = "changed before the wait: between the start and the wait() the network reads the tensor, so leave it alone"
SHAPES = ((5,), (2, 2), (), (1, 3, 1))
OTHERS = ((3, 1), (7,))
STALE = "the gradients of an earlier step: read param.grad anew in every step, since it may be another tensor by then"
REPLACED = "`self.flat = ...` makes another tensor, and the views still look into the old one: change it in place (/=)"
OLD_MEANS = "the mean of the previous step"
ROUNDED = "right to seven digits only: the gradient went through float32; buffers need the gradients' dtype"
AGAIN = "right in the first step, but not in a later one: start afresh, and keep nothing that a step leaves behind"


def exact(dtype: torch.dtype) -> float:
    """How far off a mean may be, relative to it: the rounding of a few operations."""
    return {torch.bfloat16: 2e-2, torch.float64: 1e-13}.get(dtype, 1e-6)


def rounded(want: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, str]]:
    """What rounding makes of `want` in float64, which the checks choose such that it shows."""
    return [(want.floor(), "`//` rounds down: divide with `/`"), (want, ROUNDED)] if dtype == torch.float64 else []


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
            if torch.allclose(got.double(), wrong.double()):
                return likely
        lost = world.unwaited(calls)
        if any(call.meddled for call in calls):
            return MEDDLED
        if got.isnan().any():
            if lost:
                return f"a forgotten wait: {lost}, so nothing had arrived"
            if any(call.asynchronous for call in calls):
                return "used before the wait: what a call with async_op=True brings is there only after its wait()"
            return "memory that nothing was written to: torch.empty() and its kin do not begin with zeros"
        shares = values.contributions(got, base, N)
        if shares == [1.0] * N and any(call.touched for call in calls):
            return "changed before the wait: the sum came in later and overwrote what you had divided"
        if shares == [1.0] * N:
            return SUMMED
        if shares == [1.0 / N**2] * N:
            return "divided by N twice"
        others = [share for r, share in enumerate(shares or []) if r != rank]
        if shares and not any(others) and max(shares) <= 1:
            if lost:
                return f"a forgotten wait: {lost}, so this is still the rank's own gradient"
            if {call.op for call in calls} == {"broadcast"}:
                return BROADCAST
            if not calls:
                return "the rank's own gradient: nothing was sent"
            if any(call.asynchronous for call in calls):
                return (
                    "the rank's own gradient: it was not reduced, was used before the wait, or the result was not "
                    "written back"
                )
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
    if sent > allowed + slack + 0.5:
        times = f"{sent / allowed:.2f} x what an all-reduce moves" if allowed else "with nobody to send to"
        ops = ", ".join(dict.fromkeys(call.in_words for call in calls))
        raise Wrong(
            f"{sent:,.0f} bytes were sent per rank, {times}", f"extra traffic ({ops}): one all-reduce is enough"
        )
    if any(call.meddled for call in calls):
        raise Wrong("a tensor was changed while it was being sent", MEDDLED)
    if N > 1 and (lost := world.unwaited(calls)):
        raise Wrong(lost, "a forgotten wait: the result was right by luck, and would be wrong on a slower network")


def make_params(
    world: World, shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Parameters that differ between ranks, so that averaging them instead of their gradients shows."""
    bases = [values.base(torch.Size(shape).numel(), i).view(shape) for i, shape in enumerate(shapes)]
    return [nn.Parameter(-values.share(base, world.rank).to(dtype)) for base in bases]


def check_untouched(params: list[nn.Parameter], world: World) -> None:
    before = make_params(world, tuple(tuple(param.shape) for param in params), params[0].dtype)
    for i, (param, own) in enumerate(zip(params, before, strict=True)):
        if not torch.equal(param, own):
            likely = "the parameters were averaged (or changed), not their gradients: use param.grad"
            raise Wrong(f"parameter {i} has changed", likely)


def set_grads(params: list[nn.Parameter], world: World, step: int, in_place: bool = False) -> list[Tensor]:
    """Set new gradients; return the tensor that each one is a multiple of.

    in_place: as backward does it after `zero_grad(set_to_none=False)`; else as after `zero_grad()`.
    """
    bases = [values.base(param.numel(), 10 * step + i).view(param.shape) for i, param in enumerate(params)]
    if params[0].dtype == torch.float64:
        bases = [base.double() * (1 - 2.0**-40) for base in bases]
    for param, base in zip(params, bases, strict=True):
        new = values.share(base, world.rank).to(param.dtype)
        if in_place and param.grad is not None:
            param.grad.zero_()
            param.grad += new
        else:
            param.grad = new
    return bases


# ---------------------------------------------------------------------- 03.1


def check_average(answer: Any, world: World) -> None:
    params = make_params(world)
    _average(answer, world, params, "")
    try:
        _average(answer, world, params, "step 1", step=1, in_place=True)
        _average(answer, world, params, "with a parameter that was not used", step=2, unused=1)
        _average(answer, world, make_params(world, OTHERS), "other parameters", step=3)
    except Wrong as wrong:
        likely = STALE if wrong.likely.startswith("the rank's own gradient") else wrong.likely or AGAIN
        raise Wrong(wrong.seen, likely, wrong.tip, wrong.values_differ) from None
    for dtype in (torch.bfloat16, torch.float64):
        _average(answer, world, make_params(world, SHAPES, dtype), str(dtype).removeprefix("torch."))


def _average(
    answer: Any,
    world: World,
    params: list[nn.Parameter],
    when: str,
    step: int = 0,
    in_place: bool = False,
    unused: int | None = None,
) -> None:
    N, dtype, before = world.world_size, params[0].dtype, [param.grad for param in params]
    old = [None if grad is None else grad.clone() for grad in before]
    bases = set_grads(params, world, step, in_place)
    if unused is not None:  # on every rank
        params[unused].grad = None
    used = [i for i in range(len(params)) if i != unused]
    with world.record() as calls, values.nan_in_fresh_memory():
        if unused is None:
            with world.blamed(calls):
                answer.average(params)
        else:
            answer.average(params)
    check_untouched(params, world)
    if unused is not None and params[unused].grad is not None:
        likely = "a parameter that no rank used must keep grad = None: skip it"
        raise Wrong(f"parameter {unused} has a gradient now", likely)
    for i in used:
        what = f"gradient {i}" + f", {when}" * bool(when)
        if params[i].grad is None:
            likely = returns_none(calls) if calls else "it was there before: the mean belongs in param.grad"
            raise Wrong(f"{what} is None", likely)
        grad = check_tensor(what, params[i].grad, tuple(params[i].shape), dtype)
        want = values.total(bases[i], N) / N
        suspects = rounded(want, dtype)
        if (mean := old[i]) is not None and mean.shape == want.shape:
            suspects.append((mean, OLD_MEANS))
        explained = mean_explained(bases[i], world, calls, suspects)
        if unused is not None and i > unused and torch.equal(grad, values.share(bases[i], world.rank)) and N > 1:
            likely = "the loop ended at the parameter without a gradient: go on with the next one (continue, not break)"
            raise Wrong(f"{what} is as it was", likely)
        compare(what, grad, want.to(dtype), explained, exact(dtype))
    padded = sum(-(-params[i].numel() // N) * N for i in used)  # where each one is cut into equal chunks
    check_traffic(calls, world, dtype.itemsize * padded)


AVERAGE_STUB = '''\
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


def average(params: list[Tensor]) -> None:
    """Replace each parameter's gradient with its mean over all ranks.

    One all-reduce per parameter will do. A parameter that nobody used has no gradient, and
    must have none afterwards.
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
    params = make_params(world)
    set_grads(params, world, 9)  # the lesson makes its bucket after a backward
    bucket = answer.Bucket(params)
    steps = _Steps(world, params, bucket)
    steps.check(0)
    steps.check(1, in_place=True)  # after zero_grad(set_to_none=False)
    steps.check(2, unused=1)
    steps.again("step 2 once more, on the means")
    if world.world_size > 1:
        steps.cancelled("gradients whose mean is zero")
    others = make_params(world, OTHERS)
    second = _Steps(world, others, answer.Bucket(others))
    steps.check(3)
    held = bucket.flat.clone() if isinstance(getattr(bucket, "flat", None), Tensor) else None
    second.check(0, name="a second bucket")
    if held is not None and not torch.equal(bucket.flat, held):
        likely = "self.flat belongs to one bucket: make it in __init__ or collect(), not in the class"
        raise Wrong("a second bucket changed the first one's flat", likely)
    steps.check(4)
    for dtype in (torch.bfloat16, torch.float64):
        _try_dtype(answer, world, dtype)


def _try_dtype(answer: Any, world: World, dtype: torch.dtype) -> None:
    """The exercise promises float32 alone, so another dtype is worth a sentence, but not a refusal."""
    params = make_params(world, SHAPES, dtype)
    try:
        _Steps(world, params, answer.Bucket(params)).check(0, name=str(dtype).removeprefix("torch."))
    except (Wrong, RuntimeError, TypeError):
        world.note("for float32 only: with dtype=params[0].dtype self.flat would hold any gradients")


class _Steps:
    """The three methods of a bucket, called in one step after another."""

    def __init__(self, world: World, params: list[nn.Parameter], bucket: Any) -> None:
        self.world, self.params, self.bucket = world, params, bucket
        self.means: list[Tensor] = []  # of the previous step
        self.replaced = False  # reduce() or write_back() made another self.flat
        self.own: list[Tensor] = []  # this rank's gradients in earlier steps
        if all(param.grad is not None for param in params):
            self.own = [param.grad.clone() for param in params if param.grad is not None]

    def check(self, step: int, in_place: bool = False, unused: int | None = None, name: str = "") -> None:
        world, params, N = self.world, self.params, self.world.world_size
        bases = set_grads(params, world, step, in_place)
        wants = [values.total(base, N) for base in bases]
        if unused is not None and N > 1:  # a rank that did not use it contributes zeros
            wants[unused] = wants[unused] - values.share(bases[unused], 0)
            if world.rank == 0:
                params[unused].grad = None
        self._run(bases, [want / N for want in wants], name or f"step {step}")

    def again(self, name: str) -> None:
        """Once more, without a backward in between, as the lesson does to measure times."""
        self._run(self.means, self.means, name, shared=True)

    def cancelled(self, name: str) -> None:
        """The first rank's gradients and the last one's add up to zero, and the others' are zero."""
        sign = {0: 1.0, self.world.world_size - 1: -1.0}.get(self.world.rank, 0.0)
        for param in self.params:
            param.grad = torch.full_like(param, sign)
        zeros = [torch.zeros_like(param) for param in self.params]
        self._run(zeros, zeros, name)

    def _run(self, bases: list[Tensor], wants: list[Tensor], when: str, shared: bool = False) -> None:
        world, params, bucket = self.world, self.params, self.bucket
        dtype, numel = params[0].dtype, sum(param.numel() for param in params)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        missing = [param.grad is None for param in params]
        views = _share_memory(params, bucket)
        with world.record() as around, values.nan_in_fresh_memory():
            bucket.collect()
        pieces = list(zip(grads, missing, strict=True))
        self._check_flat(numel, dtype, pieces, views, when)
        place = bucket.flat.data_ptr()
        with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls):
            bucket.reduce()
        with world.record() as after, values.nan_in_fresh_memory(), world.blamed([] if any(missing) else calls):
            bucket.write_back()
        self.replaced = isinstance(bucket.flat, Tensor) and bucket.flat.data_ptr() != place
        if around or after:
            who = "collect" if around else "write_back"
            raise Wrong(f"{(around + after)[0].op} was called by {who}()", "only reduce() may communicate")
        check_untouched(params, world)
        old, self.means = self.means, []
        for i, (param, base, want) in enumerate(zip(params, bases, wants, strict=True)):
            what = f"gradient {i}, {when}"
            if param.grad is None:
                likely = "write_back() skipped a parameter without a gradient on this rank; another rank may have one"
                raise Wrong(f"{what} is None", likely if missing[i] else "write_back() lost it")
            grad = check_tensor(what, param.grad, tuple(param.shape), dtype)
            suspects = rounded(want, dtype)
            if not shared:
                if not want.any():
                    suspects += [(grads[i], "this rank's own gradient is still there: a mean of zero replaces it too")]
                added = "the mean was added to this rank's own gradient: write_back() replaces param.grad"
                suspects += [(want + grads[i], added)] if grads[i].any() else []
                suspects += [(mean, OLD_MEANS) for mean in old[i : i + 1]]
            if missing[i] and not grad.any():
                likely = "this rank had no gradient, but another one had: the mean of all is in the bucket"
                raise Wrong(f"{what} is zero", likely)
            explain = (lambda got: AGAIN) if shared else mean_explained(base, world, calls, suspects)
            compare(what, grad, want.to(dtype), explain, exact(dtype))
            self.means.append(want.to(dtype))
        self.own = grads
        collectives = [call.op for call in calls if call.op not in MESSAGES]
        if len(collectives) > 2 or collectives.count("all_reduce") > 1:  # reduce-scatter and all-gather are two
            likely = "one call per parameter" if len(collectives) == len(params) else "the buffer is sent in pieces"
            raise Wrong(
                f"reduce() made {values.counted(len(collectives), 'call')}",
                f"{likely}: one all-reduce of the flat buffer is the point",
            )
        check_traffic(calls, world, dtype.itemsize * numel, slack=2 * dtype.itemsize * world.world_size)

    def _check_flat(
        self, numel: int, dtype: torch.dtype, pieces: list[tuple[Tensor, bool]], views: bool, when: str
    ) -> None:
        N, flat, old = self.world.world_size, getattr(self.bucket, "flat", None), self.means
        if not isinstance(flat, Tensor) or flat.dim() != 1:
            what = "is missing" if flat is None else f"is a {type(flat).__name__}"
            if isinstance(flat, Tensor):
                what += f" of {values.counted(flat.dim(), 'dimension')}"
            likely = "after collect(), self.flat must be a one-dimensional tensor with all gradients"
            raise Wrong(f"bucket.flat {what}", likely)
        if not numel <= flat.numel() < numel + N:
            likely = "it needs one place for each element"
            if flat.numel() == sum(len(grad.flatten()) for grad, missing in pieces if not missing):
                likely += ": a parameter without a gradient keeps its place, and zeros go there"
            if flat.numel() in (2 * numel, 3 * numel):
                likely = "it grows with every step: start each collect() with an empty list, or with the same buffer"
            raise Wrong(f"bucket.flat has {values.counted(flat.numel(), 'element')}, not {numel}, {when}", likely)
        if (held := flat.untyped_storage().nbytes()) >= flat.itemsize * (numel + N):
            raise Wrong(
                f"bucket.flat keeps {held} bytes, not {flat.itemsize * numel}", "flat is a slice of something larger"
            )
        offset = 0
        for i, (grad, missing) in enumerate(pieces):
            piece = grad.flatten()
            found = flat.detach()[offset : offset + len(piece)]

            def explain(found: Tensor, i: int = i, piece: Tensor = piece, missing: bool = missing) -> str:
                if bool((found < 0).all()):
                    return "the parameters were collected, not their gradients"
                mean = old[i].flatten() if old else torch.zeros(0)
                earlier = self.own[i].flatten() if self.own else torch.zeros(0)
                if missing:
                    if torch.equal(found, mean) or torch.equal(found, earlier):
                        return "left over from the previous step: where a parameter has no gradient, write zeros"
                    return "where a parameter has no gradient, the buffer must hold zeros"
                if any(len(one) and torch.allclose(found, piece + one) for one in (mean, earlier)):
                    return (
                        "the previous step's values were left in and added to: every step starts with an empty buffer"
                    )
                if torch.equal(found, earlier) or torch.equal(found, mean):
                    return REPLACED if self.replaced else STALE
                if not found.any() and views:
                    return (
                        "collect() zeroed self.flat, of which write_back() had made param.grad a view, so the new "
                        "gradients went with it (zero_grad(set_to_none=False) keeps that view): clone() in write_back()"
                    )
                if found.isnan().any():
                    return "not collected: torch.empty() does not begin with zeros"
                return (
                    "not collected: still zero" if not found.any() else "another gradient is here: look at the offsets"
                )

            compare(f"bucket.flat, piece {i}, {when}", found, piece.to(found.dtype), explain)
            offset += len(piece)


def _share_memory(params: list[nn.Parameter], bucket: Any) -> bool:
    """Whether gradients lie in the bucket's own memory."""
    flat = getattr(bucket, "flat", None)
    if not isinstance(flat, Tensor):
        return False
    memory = flat.untyped_storage().data_ptr()
    return any(param.grad is not None and param.grad.untyped_storage().data_ptr() == memory for param in params)


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
        """Give every parameter its mean gradient, even if it had none here.

        Another rank may have had one.
        """
        raise Todo("03.2")
'''

BUCKET = """\
import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        numel = sum(param.numel() for param in params)
        self.flat = torch.zeros(numel, dtype=params[0].dtype)
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


class Whole(nn.Module):
    """Two blocks, of which the first may be left out, and a root with parameters of its own, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0]]))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, skip_first: bool = False) -> Tensor:
        for block in self.blocks[int(skip_first) :]:
            x = block(x)
        return self.scale * (x @ self.head + self.bias)


def make_whole(dtype: torch.dtype = torch.float32, frozen: bool = False) -> Whole:
    model = Whole()
    model.bias.requires_grad_(not frozen)
    with torch.no_grad():
        for param in model.blocks.parameters():
            param.copy_((torch.arange(param.numel()) % 2 + 1.0).view(param.shape))
    return model.to(dtype)


class _Run:
    """One engine of the learner's class, and what its gradients should be."""

    def __init__(self, answer: Any, world: World, dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        self.world, self.dtype, self.model = world, dtype, make_whole(dtype, frozen)
        self.zero = _watched(answer.MyDDP)(self.model, units=[Block])
        self.payload = sum(unit.layout.size for unit in self.zero.units if unit.trainable) * dtype.itemsize
        self.units = sum(unit.trainable for unit in self.zero.units)

    def alone(self, skip_first: bool = False) -> dict[str, Tensor]:
        """The gradients of which each rank's are a multiple."""
        model = make_whole(self.dtype)
        (12.0 * model(INPUT.to(self.dtype), skip_first).sum()).backward()
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}

    def loss(self, times: float, skip_first: bool = False) -> Tensor:
        output = self.model(INPUT.to(self.dtype), skip_first)
        return output.sum() * 12.0 * times * 16.0**self.world.rank

    def check(
        self,
        when: str,
        calls: list[Traffic],
        times: float,
        suspects: dict[float, str] | None = None,
        otherwise: str = "",
        rounds: int = 1,
        skipped_on_first: bool = False,
    ) -> None:
        world, N, bases = self.world, self.world.world_size, self.alone()
        skipped = self.alone(skip_first=True)
        for name, param in self.model.named_parameters():
            if not param.requires_grad:
                continue
            what = f"{name}, {when}"
            if param.grad is None:
                raise Wrong(f"{what}: there is no gradient", "post_backward() or reduce() lost it")
            want = times * values.total(bases[name], N) / N
            if skipped_on_first:
                want = want + times * (skipped[name] - bases[name]) / N
            known = [(want / times * other, likely) for other, likely in (suspects or {}).items()]
            known += rounded(want, self.dtype)
            explained = mean_explained(times * bases[name], world, calls, known, otherwise)
            compare(what, param.grad, want.to(self.dtype), explained, exact(self.dtype))
        check_traffic(calls, world, self.payload * rounds)
        if (count := [call.op for call in calls].count("all_reduce")) > self.units * rounds:
            likely = "one call per parameter: unit.bucket.full holds all of them, so one all-reduce is enough"
            raise Wrong(f"{count} all-reduces for {self.units * rounds} units", likely)


def check_ddp(answer: Any, world: World) -> None:
    check_class(answer.MyDDP)
    run = _Run(answer, world)
    with world.record() as calls, values.nan_in_fresh_memory(), world.blamed(calls), _without_the_packages():
        run.loss(1).backward()
    check_same_weights(run.model, world)
    run.check("one backward", calls, 1)
    _note_ways(world, calls)
    run.zero.model.zero_grad()

    with world.record() as inside, values.nan_in_fresh_memory(), run.zero.no_sync():
        run.loss(1).backward()
    if inside:
        likely = "no_sync() was ignored: in post_backward, reduce only if self.reduces(unit)"
        raise Wrong(f"{inside[0].in_words} was called inside no_sync()", likely)
    with world.record() as calls, values.nan_in_fresh_memory():
        run.loss(2).backward()
    lost = {2.0: "only the last micro-batch: what no_sync() kept back is lost", 1.0: "only the first micro-batch"}
    run.check("two micro-batches under no_sync", calls, 3, lost, KEPT_BACK)
    try:
        _later(run, answer, world)
    except Wrong as wrong:
        raise Wrong(wrong.seen, wrong.likely or AGAIN, wrong.tip, wrong.values_differ) from None
    check_pairs(answer, answer.MyDDP, world, DDP_ERRORS)


def _later(run: _Run, answer: Any, world: World) -> None:
    """What shows that something was kept that belongs to one step, one engine or one dtype."""
    for param in run.model.parameters():
        if param.grad is not None:
            param.grad.zero_()  # zero_grad(set_to_none=False)
    with world.record() as calls, values.nan_in_fresh_memory():
        losses = [run.loss(1), run.loss(2)]
        for loss in losses:
            loss.backward()
    suspects = {2.0: "only the last of two backwards", 1.0: "only the first of two backwards"}
    run.check("two forwards, then two backwards", calls, 3, suspects, rounds=2)
    other = _Run(answer, world, frozen=True)  # a parameter that is frozen makes a unit without gradients
    run.zero.model.zero_grad()
    with world.record() as calls, values.nan_in_fresh_memory():
        other.loss(5).backward()
        run.loss(1, skip_first=world.rank == 0 and world.world_size > 1).backward()
    run.check("a block that rank 0 did not use", calls, 1, rounds=2, skipped_on_first=world.world_size > 1)
    other.check("another model beside it", [], 5)
    for dtype in (torch.bfloat16, torch.float64):
        run = _Run(answer, world, dtype)
        with world.record() as calls, values.nan_in_fresh_memory():
            run.loss(1).backward()
        run.check(f"a model in {str(dtype).removeprefix('torch.')}", calls, 1)


def _note_ways(world: World, calls: list[Traffic]) -> None:
    if world.world_size > 1 and not any(call.said for call in calls):
        world.note(PAST_COMM)


PAST_COMM = (
    "reduce() goes past self.comm, which alone writes the engine's ledger and adds in rank order: below, the ledger "
    "shows 0 bytes, and the weights may differ from one process's in the last digits"
)


def _watched(cls: type) -> type:
    """`cls`, which complains as soon as a method leaves something behind that the engine cannot use."""

    class Watched(cls):
        def post_backward(self, unit: Any) -> None:
            super().post_backward(unit)
            check_left(unit)

    Watched.__name__ = cls.__name__
    return Watched


def check_left(unit: Any) -> None:
    grad, reduction = unit.bucket.grad, unit.bucket.reduction
    if grad is not None and not isinstance(grad, Tensor):
        raise Wrong(
            f"unit.bucket.grad is a {type(grad).__name__}, not a tensor",
            "self.comm.all_reduce() returns something to wait for, and the mean will be in the tensor that it was "
            "given: that tensor is unit.bucket.grad",
        )
    if reduction is not None and not callable(getattr(reduction, "wait", None)):
        likely = "unit.bucket.reduction is for something with a wait(), or None if the mean is there already"
        raise Wrong(f"unit.bucket.reduction is a {type(reduction).__name__}, without a wait()", likely)
    if isinstance(grad, Tensor) and grad.dim() != 1:
        likely = "a flat tensor, laid out as unit.bucket.full is: the engine cuts it into the parameters' gradients"
        raise Wrong(f"unit.bucket.grad has the shape {tuple(grad.shape)}", likely)
    if isinstance(grad, Tensor) and grad.dtype != unit.dtypes.reduce:
        likely = "a buffer for gradients has their dtype: torch.empty_like(unit.bucket.full)"
        raise Wrong(f"unit.bucket.grad is {grad.dtype}, and unit.bucket.full was {unit.dtypes.reduce}", likely)
    if isinstance(grad, Tensor) and grad.numel() != unit.layout.size:
        likely = "unit.bucket.grad must be as long as unit.bucket.full: here every rank keeps the full mean"
        raise Wrong(f"unit.bucket.grad has {grad.numel()} elements, not {unit.layout.size}", likely)


def check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, zerolab.DDP) or cls.stage != 0:
        raise Wrong("MyDDP is not a subclass of zerolab.DDP", "it must begin with `class MyDDP(zerolab.DDP):`")
    for name in ("post_backward", "reduce"):
        if getattr(cls, name) is getattr(zerolab.DDP, name):
            raise Wrong(f"MyDDP.{name} is the package's", f"the class inherits {name}(): write your own")


@contextmanager
def _without_the_packages() -> Iterator[None]:
    """Inside, the two methods that are to be written cannot be borrowed by super()."""
    kept = {name: getattr(zerolab.DDP, name) for name in ("post_backward", "reduce")}

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> None:
            raise Wrong(f"MyDDP calls the package's {name}()", f"super().{name}() is the answer: write your own")

        return refuse

    try:
        for name in kept:
            setattr(zerolab.DDP, name, refusing(name))
        yield
    finally:
        for name, method in kept.items():
            setattr(zerolab.DDP, name, method)


def check_same_weights(model: nn.Module, world: World) -> None:
    for (name, param), want in zip(model.named_parameters(), make_whole().parameters(), strict=True):
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

        Put what reduce() returns into unit.bucket.reduction: the engine waits for it before
        anyone sees the gradient.
        """
        raise Todo("03.3")

    def reduce(self, unit: Unit):
        """Average unit.bucket.full, a flat tensor, over the ranks.

        Leave the mean in unit.bucket.grad. Return None if it is there already, or something
        whose wait() returns when it is.
        self.comm.all_reduce(tensor, unit.name) starts a mean, in place, and enters it in
        the engine's ledger. The ranks that share the model need not be all: self.world_size
        counts them, and for functions of dist there is group=self.comm.group.
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


FREED = "memory was given back (its storage resized to 0) while it was still needed: wait first"
NONE = "a parameter that was not used has no gradient (grad is None)"
ERRORS = {
    "ZeroDivisionError": BY_ZERO,
    "storage of size 0": FREED,
    "SIGSEGV": FREED,
    "Boolean value of Tensor": "a tensor of several elements is neither true nor false: `if param.grad is not None`",
    "argument: 'unit'": "self.comm's methods take two arguments: the tensor, and unit.name",
    "tuple index out of range": "a scalar parameter has the shape (): numel() counts its elements",
    "expected to be a Tensor or None": (
        "with async_op=True a collective returns something to wait for; the result is in the tensor that it was given"
    ),
    "output with shape": "self.views do not fit the parameters: make them anew for each bucket, in __init__",
    "data of a different type": "a gradient has its parameter's dtype: make buffers with dtype=param.dtype",
    "NoneType": NONE,
    "Expected parameter `tensor` of type torch.Tensor": NONE,
    "a gradient of size": "a piece of a flat buffer has one dimension: a gradient needs view_as(param)",
    "storage of size": "unit.bucket.grad must be as long as unit.bucket.full: here every rank keeps the full mean",
    "left no unit.bucket.grad": "reduce() was not called, or did not leave the mean in unit.bucket.grad",
}
DDP_ERRORS = {
    "Expected parameter `tensor`": "the parameters have no .grad yet: the unit's gradients are in unit.bucket.full",
    "NoneType": (
        "unit.bucket.grad is None until reduce() sets it, and the parameters have no .grad yet: the unit's gradients "
        "are in unit.bucket.full"
    ),
} | {part: mistake for part, mistake in ERRORS.items() if part != "NoneType"}
FIRST_RANK = "the result reached rank 0 only: reduce() leaves it on one rank, all_reduce() on all of them"

EXERCISES = [
    Exercise(
        id="03.1",
        title="average the gradients",
        difficulty=1,
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
        difficulty=2,
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
        difficulty=2,
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
        errors=DDP_ERRORS,
    ),
]
