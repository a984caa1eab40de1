"""Lesson 08: a loss scaler whose ranks skip a step together."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import zerolab
from zerolab.engine.engine import Engine
from zerolab.engine.slices import to_local
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.lesson04 import check_waited
from zerolab.lab.exercises.checks.values import in_case
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import GaveUp, Traffic

START, INTERVAL, RATE, MOMENTUM = 1024.0, 2, 2.0**-4, 0.5
ONE_NUMBER = 256  # bytes: what agreeing may cost, with room for one number per parameter

ALONE = (
    "each rank decided for itself: a rank sees only its slice, so ask all ranks, with an all-reduce of one number (MAX)"
)
LOST_FLAG = (
    "the ranks do send something, but one overflow among them does not win: an all-reduce with MAX (or SUM > 0) says "
    "yes if any rank does; MIN says yes only if all do"
)
NOT_NAN = "an overflow can also be NaN (inf - inf): isfinite() finds inf, -inf and NaN"
NOT_MINUS = "-inf is an overflow too: isfinite() finds inf, -inf and NaN"
NEVER_LOOKED = (
    "the overflow goes unnoticed, or the step is made all the same: ask isfinite() of the gradients (isnan() does not "
    "find inf, and the loss may be finite), and if one is not, leave optimizer.step() out"
)
ONE_ONLY = (
    "the overflow of one parameter is forgotten when the next one is looked at: once the flag is set, it must stay set"
)
NO_WAIT = "a forgotten wait: with async_op=True the flag has not arrived yet when it is read"
TOO_LATE = "unscale_() must find the overflow and remember it: clipping turns an inf among the gradients into NaN and 0"
STILL = (
    "the overflow of the step before is still remembered: every step looks anew, and update() forgets what it has used"
)
HALF = (
    "unscaled in float16, where small numbers become 0 again, and what the scale has saved is lost: self.gradients() "
    "gives them in float32"
)
NOT_IN_PLACE = (
    "param.grad still has the scaled gradient, and clipping needs the true one: unscale_() must divide in place, with "
    "/= or div_() (grad = grad / ... makes a new tensor, which nobody keeps)"
)
MULTIPLIED = "multiplied by the scale once more: divide by it"
NOT_UNSCALED = (
    "step() used scaled gradients: it must unscale them itself, unless the loop has called unscale_() in this same "
    "step (so update() must forget that it was done)"
)
TWICE = "divided by the scale twice: after unscale_(), step() must not unscale again"
BY_RANKS = "divided by the number of ranks as well: the gradients are the mean already"
GONE = "the gradients are still needed for the step: the loop itself calls zero_grad() after it"
KEPT = "the scaler keeps the gradients themselves, 4 bytes for each: keep only whether they are finite"
SEVERAL = (
    "an overflow on several ranks at once is missed: after an all-reduce with SUM the flag may be 2 or more, so ask "
    "whether it is greater than 0"
)
IN_STEP = "step() divides by a scale that is not the one that the loss was multiplied by: only update() may change it"
REPAIRED = (
    "the step was made with changed gradients: momentum, weight decay and Adam's averages move weights even where "
    "gradients are 0, so do not call optimizer.step() at all"
)
NO_STEP = "step() must call optimizer.step() when all gradients are finite"
UPDATES = "only step() may change weights: unscale_() divides the gradients, and update() adjusts the scale"
NO_SHRINK = "after an overflow update() must halve the scale, or every later step overflows too"
SHRUNK_TWICE = "halved more than once for one overflow: in update(), once, however many ranks or parameters overflowed"
SHRUNK_WRONG = "after an overflow the scale is halved"
BRANCH = (
    "every rank must make the same calls, whether it has an overflow or not: a rank that sees none cannot know that "
    "another one does"
)
GREW = "growth_interval good steps double the scale, and the count begins again at 0 when it does"
OFF_BY_ONE = f"the scale doubles after growth_interval good steps: with {INTERVAL}, in the second one's update()"
NOT_RESET = (
    "good steps are counted in a row: an overflow sets the count back to 0, or the scale grows before it has proved "
    "itself"
)
NEVER_GREW = "update() must double the scale after growth_interval good steps, or it only ever falls"
GREW_ONCE = (
    "right for the first growth only: the count must go back to 0 when the scale grows, and begin again from there"
)
DIFFERENT = "the ranks' scales differ from here on, so they average gradients of different scales: change it on all"
TOO_MUCH = "one number is enough: each rank says only whether its own gradients are finite"
NO_GRADIENT = "a parameter that was not used has no gradient: param.grad is None (self.gradients() leaves it out)"
EMPTY = "a rank may own nothing of a parameter, and an empty tensor has no largest element: isfinite().all() is True"
SHARED = "the scale belongs to one scaler: keep it in self, not in the class or the module"
FIXED = "right for the first scaler only: take the scale and the interval from __init__"
MANY = (
    "an all-reduce for each parameter is right, and pays the latency each time: collect one flag, and all-reduce once"
)
CONSTANT = "divided by a fixed 2**16: divide by self.factor, which the loss was multiplied by"
NO_ERROR = (
    "this comes only with an overflow, which is no error: every rank leaves optimizer.step() out, and update() halves "
    "the scale"
)
ZERO = "halving must not end at 0, which `//` or int() does with a scale of 1: divide by 2"
LIMITED = "the scale has an upper limit: it grows for as long as no gradient overflows"
INHERITED = "write unscale_(), step() and update() yourself, without torch's GradScaler"


class Part(nn.Module):
    """Odd sizes, so that slices cut through parameters and some are empty; one parameter is unused, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.factor = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(7))
            self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def make(stage: int = 3, half: bool = True) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(Part(), nn.Linear(7, 3))
    precision = zerolab.Precision(torch.float16) if half else None
    return zerolab.shard(model if half else model.double(), stage, units=[Part], precision=precision)


@dataclass(frozen=True)
class Turn:
    """One step. bad: what is in the gradients; who: on which rank ("all", "first", "last"). then: the scale after it.

    first: the loop itself calls unscale_(), and halves the gradients before step(), as clipping does.
    """

    name: str
    then: float
    bad: float = 0.0
    who: str = "last"
    first: bool = False
    place: int = -1  # in which of the rank's slices the bad element is
    set_to_none: bool = True

    def hits(self, world: World) -> bool:
        place = {"first": 0, "last": world.world_size - 1, "all": world.rank}[self.who]
        return bool(self.bad) and world.rank == place


TURNS = (
    Turn("step 1", 1024.0, first=True),
    Turn("step 2", 2048.0, set_to_none=False),
    Turn("step 3", 2048.0, first=True),
    Turn("step 4", 4096.0),
    Turn("step 5, with inf in one rank's slice", 2048.0, math.inf),
    Turn("step 6, after a skipped one", 2048.0, set_to_none=False),
    Turn("step 7, with NaN in one rank's slice", 1024.0, math.nan, "first"),
    Turn("step 8, after a skipped one", 1024.0),
    Turn("step 9, the second good one in a row", 2048.0),
    Turn("step 10, with -inf on all ranks", 1024.0, -math.inf, "all", set_to_none=False),
    Turn("step 11, with inf in one rank's slice, which is clipped", 512.0, math.inf, "first", True),
    Turn("step 12, with inf in the first parameter alone", 256.0, math.inf, "all", place=0),
    Turn("step 13, after three skipped ones", 256.0),
)


def check_scaler(answer: Any, world: World) -> None:
    cls = answer.MyScaler
    if not isinstance(cls, type):
        raise Wrong(f"MyScaler is a {cls.__class__.__name__}", "it must begin with `class MyScaler:`")
    for name in ("__init__", "scale", "unscale_", "step", "update"):
        if not callable(getattr(cls, name, None)):
            raise Wrong(f"MyScaler has no {name}()", f"the method was renamed or removed: it must be {name}()")
    if issubclass(cls, torch.amp.GradScaler):
        raise Wrong("MyScaler is a GradScaler of torch's", INHERITED)
    Stage(answer, world).run()
    check_again(answer, world)
    check_limits(answer, world)
    check_training(answer, world)


class Stage:
    """Gradients written into the slices of a ZeRO-3 model, where a step moves nothing, and each turn's outcome."""

    def __init__(self, answer: Any, world: World) -> None:
        self.answer, self.world, self.seen = answer, world, 0
        self.zero = make()
        self.params = [param for param in self.zero.model.parameters() if param.requires_grad]
        with torch.no_grad():
            for param in self.params:
                param.zero_()
        half = len(self.params) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:]}]
        self.optimizer = SGD(groups, lr=RATE, momentum=MOMENTUM)
        self.scaler = answer.MyScaler(self.zero, init_scale=START, growth_interval=INTERVAL)
        self.speed = [torch.zeros_like(to_local(param)) for param in self.params]  # SGD's momentum
        self.given = [False] * len(self.params)  # which of them have a gradient in this turn

    def run(self) -> None:
        before = START
        for number, turn in enumerate(TURNS):
            scale = scale_of(self.scaler)
            if number == 0 and scale != START:
                raise Wrong(f"a new scaler multiplies a loss of 1 by {scale:g}, not {START:g}", FIXED)
            self.turn(turn, before)
            before = turn.then

    def turn(self, turn: Turn, scale: float) -> None:
        world, name = self.world, turn.name
        loss = self.zero.model(torch.ones(2, 7)).sum()
        kept = loss.detach().clone()
        scaled = self.scaler.scale(loss)
        if not torch.equal(loss.detach(), kept):
            raise Wrong(f"{name}: scale() has changed the loss", "return loss * self.factor, a new tensor")
        scaled.backward()
        grads = self.write(turn)
        bad = not all(bool(grad.isfinite().all()) for grad in grads)
        expected = [grad / scale for grad in grads]
        before = [to_local(param).clone() for param in self.params]
        speed = [one.clone() for one in self.speed]
        with world.record() as calls, in_case(self.answer, name, NO_ERROR if turn.bad else "", ERRORS):
            if turn.first:
                self.scaler.unscale_(self.optimizer)
                self.check_unscaled(name, grads, expected, before, bad)
                for param in self.params:
                    if param.grad is not None:
                        to_local(param.grad).mul_(0.5).nan_to_num_(0.0, 0.0, 0.0)  # no trace of an overflow is left
                expected = [grad * 0.5 for grad in expected]
            self.scaler.step(self.optimizer)
            after = [to_local(param).clone() for param in self.params]
            self.scaler.update()
        after_update = unchanged(after, self.params)
        grads_left = [weakref.ref(param.grad.untyped_storage()) for param in self.params if param.grad is not None]
        self.optimizer.zero_grad(set_to_none=turn.set_to_none)
        held = sum(1 for grad in grads_left if grad() is not None) if turn.set_to_none else 0
        now = scale_of(self.scaler)
        made = not unchanged(before, after)
        facts = self.exchange(name, made, now)
        if not after_update:
            raise Wrong(f"{name}: update() has changed weights", UPDATES)
        if turn.bad:
            self.check_skipped(turn, made, bad, [fact[0] for fact in facts], before, after, calls)
        else:
            self.check_made(turn, made, expected, before, after, speed, scale, calls)
        self.check_scale(turn, scale, now, [fact[1] for fact in facts])
        if held:
            raise Wrong(f"{name}: after zero_grad() {values.counted(held, 'gradient')} still in memory", KEPT)
        check_small(name, calls, world)
        check_waited(calls, world)

    def write(self, turn: Turn) -> list[Tensor]:
        """Write gradients that float16 holds exactly, some of them too small for it once they are unscaled."""
        grads, self.given = [], [param.grad is not None for param in self.params]
        for number, param in enumerate(self.params):
            if param.grad is None:
                grads.append(torch.zeros_like(to_local(param)))
                continue
            flat = torch.arange(to_local(param).numel()) + number + 1
            grad = torch.where(flat % 3 == 0, 2.0**-20, (flat % 7 + 1) * 0.25).view(param.shape)
            grads.append(grad)
        if turn.hits(self.world):
            owned = [grad for grad, given in zip(grads, self.given, strict=True) if grad.numel() and given]
            owned[turn.place].view(-1)[-1] = turn.bad
        with torch.no_grad():
            for grad, param in zip(grads, self.params, strict=True):
                if param.grad is not None:
                    to_local(param.grad).copy_(grad)
        return grads

    def check_unscaled(self, name: str, grads: Any, expected: Any, before: list[Tensor], bad: bool) -> None:
        if not unchanged(before, self.params):
            raise Wrong(f"{name}: unscale_() has changed weights", UPDATES)
        if bad:
            return
        for number, (param, grad, want) in enumerate(zip(self.params, grads, expected, strict=True)):
            what = f"{name}, after unscale_(): the gradient of parameter {number}"
            if param.grad is None:
                if self.given[number]:
                    raise Wrong(f"{what} is None", GONE)
                continue
            if param.grad.dtype == torch.float16:
                raise Wrong(f"{what} is in float16", NOT_IN_PLACE if same(param.grad, grad) else HALF)
            got = to_local(param.grad)
            if got.numel() and not same(got, want):
                ratio = values.factor(got, want)
                likely = NOT_IN_PLACE if same(got, grad) else MULTIPLIED if ratio and ratio > 1 else ""
                likely = HALF if bool(((got == 0) & (want != 0)).any()) else likely
                likely = CONSTANT if ratio and math.isclose(ratio * 2**16, START, rel_tol=0.02) else likely
                by_ranks = ratio is not None and math.isclose(ratio * self.world.world_size, 1.0, rel_tol=0.02)
                likely = likely or (BY_RANKS if by_ranks else TWICE if ratio and ratio < 1 else "")
                raise Wrong(f"{what} is {_times(ratio)} the unscaled one", likely)

    def exchange(self, name: str, made: bool, scale: float) -> list[tuple[bool, float]]:
        """What each rank did, told through the store, so that no call of the check's own gets between the answer's."""
        spy, self.seen = self.world.spy, self.seen + 1
        spy.store.set(f"turn {self.seen} of {spy.rank}", f"{int(made)} {scale!r}")
        facts = []
        for rank in range(self.world.world_size):
            try:
                said = spy._ask(f"turn {self.seen} of {rank}", rank, name)
            except GaveUp:
                raise Wrong(f"{name}: this rank is through, and rank {rank} is not", BRANCH) from None
            facts.append((said[0] == "1", float(said.split()[1])))
        return facts

    def check_skipped(
        self, turn: Turn, made: bool, bad: bool, steps: list[bool], before: Any, after: Any, calls: list[Traffic]
    ) -> None:
        """No rank may have changed anything."""
        if not any(steps):
            return
        moved, N = [rank for rank, step in enumerate(steps) if step], self.world.world_size
        if N > 1 and (lost := self.world.unwaited(calls)):
            raise Wrong(f"{turn.name}: the step was made, and {lost}", NO_WAIT)
        if not made:
            raise Wrong(f"{turn.name}: this rank skipped, and rank {moved[0]} made the step", ALONE)
        finite = all(bool(param.isfinite().all()) for param in after)
        whole = "with it" if bad else "although another rank's slice has it"
        seen = f"{turn.name}: the step was made, {whole}"
        if len(moved) < N:
            raise Wrong(seen, ALONE)
        other = NOT_NAN if math.isnan(turn.bad) else NOT_MINUS if turn.bad < 0 else NEVER_LOOKED
        if turn.who == "all" and N > 1:
            other = SEVERAL
        elif turn.first:
            other = TOO_LATE
        elif turn.place == 0:
            other = ONE_ONLY
        elif bad and finite:
            other = REPAIRED
        elif N > 1:
            other = LOST_FLAG if calls and other is NEVER_LOOKED else other
        raise Wrong(seen, other)

    def check_made(
        self,
        turn: Turn,
        made: bool,
        expected: list[Tensor],
        before: list[Tensor],
        after: list[Tensor],
        speed: list[Tensor],
        scale: float,
        calls: list[Traffic],
    ) -> None:
        """The step must be momentum SGD's, with the unscaled gradients."""
        owns = any(given and to_local(param).numel() for param, given in zip(self.params, self.given, strict=True))
        if not made and owns:
            likely = STILL if "skipped" in turn.name else NO_STEP
            raise Wrong(f"{turn.name}: no weight has changed, and all gradients are finite", likely)
        for number, (param, want, old, new, momentum) in enumerate(
            zip(self.params, expected, before, after, speed, strict=True)
        ):
            if not self.given[number] or not to_local(param).numel():
                continue
            self.speed[number] = MOMENTUM * momentum + want
            used = (old - new).double() / RATE - MOMENTUM * momentum.double()
            wrong = ~torch.isclose(used, want.double(), rtol=1e-2, atol=0.0)
            if not wrong.any():
                continue
            large = want > 2.0**-16
            ratio = values.factor(used[large], want[large].double())
            what = f"{turn.name}: the step used {_times(ratio)} the gradient of parameter {number}"
            raise Wrong(what, self.why_step(turn, ratio, scale))

    def why_step(self, turn: Turn, ratio: float | None, scale: float) -> str:
        if ratio is None:
            return HALF
        if math.isclose(ratio, scale, rel_tol=0.02):
            return NOT_UNSCALED
        if math.isclose(ratio, scale**2, rel_tol=0.02):
            return MULTIPLIED
        if math.isclose(ratio, 1 / scale, rel_tol=0.02):
            return TWICE
        if math.isclose(ratio * self.world.world_size, 1.0, rel_tol=0.02) and self.world.world_size > 1:
            return BY_RANKS
        if math.isclose(ratio * 2**16, scale, rel_tol=0.02):
            return CONSTANT
        if turn.first and ratio == 2.0:
            return "gradients were read again after unscale_(): what clipping changed must be what the step uses"
        if ratio in (0.5, 2.0, 0.25, 4.0):
            return IN_STEP
        return HALF if math.isclose(ratio, 1, rel_tol=0.02) else ""

    def check_scale(self, turn: Turn, before: float, now: float, scales: list[float]) -> None:
        other = next((rank for rank, scale in enumerate(scales) if scale != now), None)
        seen = f"{turn.name}: the scale goes from {before:g} to {now:g}"
        if other is not None:
            raise Wrong(f"{seen}, and on rank {other} to {scales[other]:g}", DIFFERENT)
        if now == turn.then:
            return
        seen += f", not {turn.then:g}"
        if turn.bad:
            likely = NO_SHRINK if now >= before else SHRUNK_TWICE if now < turn.then else SHRUNK_WRONG
        elif now > turn.then:
            likely = NOT_RESET if "skipped" in turn.name else OFF_BY_ONE if turn.name == "step 1" else GREW
        elif turn.name.startswith("step 2"):
            likely = NEVER_GREW if now == before else GREW
        elif turn.then > before:
            likely = GREW_ONCE
        else:
            likely = "a good step leaves the scale as it is, until there are growth_interval of them"
        raise Wrong(seen, likely)


def unchanged(before: list[Tensor], now: list[Any]) -> bool:
    """Bit for bit; NaN equals NaN."""
    pairs = zip(before, now, strict=True)
    return all(torch.allclose(old, to_local(new).detach(), rtol=0.0, atol=0.0, equal_nan=True) for old, new in pairs)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(to_local(got).detach().double(), want.double())


def _times(ratio: float | None) -> str:
    return "something other than" if ratio is None else f"{ratio:.4g} x"


def scale_of(scaler: Any) -> float:
    scaled = scaler.scale(torch.ones(()))
    if not isinstance(scaled, Tensor):
        raise Wrong(f"scale() returns a {type(scaled).__name__}", "scale() was given: return loss * self.factor")
    return float(scaled)


def check_small(name: str, calls: list[Traffic], world: World) -> None:
    sent = sum(call.sent for call in calls)
    if sent > ONE_NUMBER * world.world_size:
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        raise Wrong(f"{name}: {sent:,.0f} bytes were sent per rank ({ops})", TOO_MUCH)
    if len(calls) > 2 and world.world_size > 1:
        world.note(MANY)


def check_again(answer: Any, world: World) -> None:
    """Another scaler has a scale and a count of its own."""
    zero = make()
    optimizer = SGD(zero.model.parameters(), lr=RATE)
    one, other = (answer.MyScaler(zero, init_scale=s, growth_interval=i) for s, i in ((64.0, 3), (8.0, 1)))
    for scaler, then in ((one, (64.0, 64.0, 128.0)), (other, (16.0, 32.0, 64.0))):
        for number, want in enumerate(then, 1):
            with in_case(answer, "a second and a third scaler", FIXED, ERRORS):
                scaler.scale(zero.model(torch.ones(2, 7)).sum() * 2.0**-6).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            if (now := scale_of(scaler)) != want:
                interval = 3 if scaler is one else 1
                seen = f"another scaler, with growth_interval={interval}: after {values.counted(number, 'good step')}"
                raise Wrong(f"{seen} its scale is {now:g}, not {want:g}", FIXED if scaler is one else SHARED)


def check_limits(answer: Any, world: World) -> None:
    """The scale grows beyond the usual first one, and never falls to 0."""
    zero = make()
    optimizer = SGD(zero.model.parameters(), lr=RATE)
    for start, bad in ((2.0**20, 0.0), (1.0, math.inf)):
        scaler, scales = answer.MyScaler(zero, init_scale=start, growth_interval=1), [start]
        for _ in range(2):
            with in_case(answer, f"a scaler that begins at {start:g}", NO_ERROR if bad else LIMITED, ERRORS):
                loss = scaler.scale(zero.model(torch.ones(2, 7)).sum() * 2.0**-24)
                loss.backward()
                for param in zero.model.parameters():
                    if param.grad is not None:
                        to_local(param.grad).fill_(bad)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            scales.append(scale_of(scaler))
        seen = f"a scaler that begins at {start:g}, after {'overflows' if bad else 'good steps'}: its scales are "
        seen += ", ".join(f"{scale:g}" for scale in scales)
        if bad and not scales[-1] > 0:
            raise Wrong(seen, ZERO)
        if not bad and scales[-1] != 4 * start:
            raise Wrong(seen, LIMITED)


STAGE_OF = {1: 0, 2: 2, 3: 3, 4: 1}  # world size -> stage


def check_training(answer: Any, world: World) -> None:
    """Twelve steps with AdamW and clipping, with overflows where they happen, as with the package's scaler."""
    stage = STAGE_OF[world.world_size]
    for half in (True, False):
        when = f"training in stage {stage}" + ("" if half else ", in float64")
        found = []
        for make_scaler in (zerolab.LossScaler, answer.MyScaler):
            zero = make(stage, half)
            optimizer = AdamW(zero.model.parameters(), lr=1e-2)
            scaler = make_scaler(zero, init_scale=2.0**20, growth_interval=2)
            with in_case(answer, when, "", ERRORS):
                found.append(train(zero, optimizer, scaler, world))
        for step, (ours, theirs) in enumerate(zip(*found, strict=True)):
            if ours[1] != theirs[1]:
                seen = f"{when}, step {step + 1}: the scale is {theirs[1]:g}, not {ours[1]:g}"
                raise Wrong(seen, STAGE_0 if stage == 0 else DIFFERENT)
            if not torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-7, equal_nan=True):
                likely = HALF if half else "right in float16 only: the gradients may also come in float64"
                raise Wrong(f"{when}, step {step + 1}: the weights differ from those of zerolab.LossScaler", likely)


STAGE_0 = "right in stages 1 to 3 only: in stage 0 every rank has the full gradient"


def train(zero: Engine, optimizer: Optimizer, scaler: Any, world: World) -> list[tuple[Tensor, float]]:
    seen = []
    for step in range(8):
        x = torch.ones(2, 7, dtype=next(zero.model.parameters()).dtype) * (world.rank + 1 + step % 3) / 8
        micro = 2 if step == 5 else 1
        for _ in range(micro):
            loss = zero.model(x).double().square().mean()
            if step == 4 and world.rank == world.world_size - 1:
                loss = loss * 1e6
            scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            zero.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step != 2)
        weights = torch.cat([to_local(param).flatten().double() for param in zero.model.parameters()])
        seen.append((weights, scale_of(scaler)))
    return seen


GIVEN = '''\
    def __init__(
        self, zero: Engine, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.zero, self.factor, self.growth_interval = zero, init_scale, growth_interval
        self.good_steps = 0  # made since the scale last changed
        self.overflow: bool | None = None  # in this step, on any rank; None: not looked yet

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def gradients(self) -> list[Tensor]:
        """This rank's slices of the mean gradients, in float32. Change them in place."""
        self.zero.promote_grads(self.zero.units)
        params = self.zero.model.parameters()
        return [to_local(param.grad) for param in params if param.grad is not None]
'''

SCALER_STUB = f'''\
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from zerolab import Engine, to_local
from zerolab.lab.exercises import Todo


class MyScaler:
{GIVEN}
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide every gradient by self.factor, and set self.overflow.

        It is true if a gradient of ANY rank is not finite.
        """
        raise Todo("08.1")

    def step(self, optimizer: Optimizer) -> None:
        """optimizer.step(), unless there is an overflow.

        Unscale first, if the loop has not called unscale_().
        """
        raise Todo("08.1")

    def update(self) -> None:
        """Halve the scale after an overflow.

        Double it after growth_interval good steps in a row.
        """
        raise Todo("08.1")
'''

SCALER = f"""\
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from zerolab import Engine, to_local


class MyScaler:
{GIVEN}
    def unscale_(self, optimizer: Optimizer) -> None:
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)

    def step(self, optimizer: Optimizer) -> None:
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()

    def update(self) -> None:
        self.good_steps += 1
        if self.overflow:
            self.factor, self.good_steps = self.factor / 2, 0
        elif self.good_steps == self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0
        self.overflow = None
"""

ERRORS = {
    "does not make this call": BRANCH,
    "did not take part": BRANCH,
    "max(): Expected reduction dim": EMPTY,
    "numel() == 0": EMPTY,
    "'NoneType' object has no attribute": NO_GRADIENT,
    "unsupported operand type(s) for /=: 'NoneType'": NO_GRADIENT,
    "unsupported operand type(s) for /: 'NoneType'": NO_GRADIENT,
    "takes 1 positional argument but 2 were given": "the loop passes the optimizer: def step(self, optimizer)",
}

EXERCISES = [
    Exercise(
        id="08.1",
        title="the loss scaler",
        difficulty=3,
        section="All or none",
        check=check_scaler,
        stub=SCALER_STUB,
        reference=SCALER,
        hints=(
            "unscale_(): for grad in self.gradients(): divide in place (grad /= ...), and note whether isfinite() "
            "holds for all of it. A rank knows only its own slices, so the flag must go to all ranks.",
            "The flag is a tensor of one number, 0 or 1. dist.all_reduce(flag, op=dist.ReduceOp.MAX) on EVERY rank "
            "makes it 1 on all of them if it is 1 on any.",
            "step(): if self.overflow is None, unscale_() has not run. update(): overflow: halve, good_steps = 0; else "
            "count, and at growth_interval double and begin again at 0; last, self.overflow = None for the next step.",
        ),
        exports=("MyScaler",),
        errors=ERRORS,
    ),
]
