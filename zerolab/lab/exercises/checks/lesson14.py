"""Lesson 14: a mean over all tokens of all ranks, and a training script whose result does not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import zerolab
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.lesson04 import check_waited
from zerolab.lab.exercises.checks.lesson11 import everyone
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.tasks.data import Split
from zerolab.tasks.models import GPT, PairEncoder

# ---------------------------------------------------------------------- 14.1

NOT_SHIFTED = (
    "the labels are not shifted: logits[:, t] says what comes at t + 1, so compare logits[:, :-1] with tokens[:, 1:]"
)
SHIFTED_BACK = "shifted the wrong way: logits[:, t] says what comes at t + 1, and here it is compared with t - 1"
PADDING_LEARNT = "padding is learnt: where the target is 0 there is nothing to predict, ignore_index=0"
MEAN_OF_MEANS = (
    "the mean of means: each rank divided by its own number of tokens. A token must weigh the same on every rank, so "
    "divide by the number of tokens of all ranks"
)
FACTOR_N = (
    "1/N of the gradient: the engine will average the gradients over the ranks, so the sum that this rank adds is "
    "divided by N once more. Multiply by world_size"
)
FACTOR_NN = "N times the gradient: multiplied by world_size twice, or divided by a count that is N times too small"
FACTOR_NNN = "1/N^2 of the gradient: divided by world_size. The engine does that already, so multiply by it instead"
DIVIDED_TWICE = "divided twice: reduction='mean' has divided by this rank's count already, so use 'sum'"
FIRST_CALL = "right for the first call only: the count of an earlier call was kept, and every batch has its own"
LESS_PRECISE = "nearly right: the loss is computed in less precision than the logits have"
A_SUM = "a sum, which grows with the batch: divide by the number of tokens of all ranks"
PADDING_COUNTED = "padding counted as tokens: divide by the number of targets that are not 0"
FIRST_COUNTED = "the first token of each sentence was counted, but nobody predicts it: count the targets, tokens[:, 1:]"
INPUTS_COUNTED = (
    "the inputs were counted, and of a padded sentence the last token is an input, but predicts only padding: count "
    "the targets, tokens[:, 1:]"
)
CLAMPED_FIRST = (
    "each rank's count was raised to 1 before the sum, so a rank with nothing but padding adds a token that is not "
    "there: clamp(min=1) belongs behind the all-reduce"
)
SENTENCE_MEANS = (
    "a mean for each sentence, and then a mean of these: a token of a short sentence weighs more than one of a long. "
    "Add up the losses of all tokens, and divide once"
)
SENTENCES_COUNTED = (
    "divided by the number of sentences: a long sentence has more tokens than a short one, and counts more"
)
WRONG_OP = "the counts were all-reduced with {op}: the number of tokens of all ranks is their sum"
NO_GRADIENT = "the loss has no gradient any more: .item(), .detach() or torch.tensor(...) cut it off"
NOT_A_NUMBER = "a division by zero: a rank may have nothing but padding, and then all ranks may. clamp(min=1)"
MUCH_SENT = "one number of each rank is enough: its count. Logits and tokens stay where they are"
GLOBAL_VALUE = (
    "the gradient is right, and the value is not: on average over the ranks it must be the mean loss of all tokens"
)

Batch = tuple[Tensor, Tensor]  # logits (B, T, V) and tokens (B, T), of which 0 is padding


def make_batch(rank: int, case: int, dtype: torch.dtype) -> Batch:
    """Every rank has another number of sentences, of other lengths, and of tokens."""
    B, T, V = ((2, 7, 5), (3, 4, 9), (2, 40, 16))[case]
    B, T = B + rank % 2, T + 2 * rank
    lengths = [max(2, T - 3 * row - rank) for row in range(B)]
    if case == 1 and rank == 1:
        lengths = [0] * B  # a rank with nothing but padding
    generator = torch.Generator().manual_seed(100 * case + rank)
    tokens = torch.randint(1, V, (B, T), generator=generator)
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    return torch.randn(B, T, V, generator=generator, dtype=torch.float64).to(dtype), tokens


def count_of(tokens: Tensor) -> int:
    return int((tokens[:, 1:] != 0).sum())


def gradient(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    fresh = logits.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(loss(fresh), fresh)
    return found


def summed(logits: Tensor, targets: Tensor, ignore: int = 0) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore, reduction="sum")


def patterns(logits: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, str]]:
    """What the gradient looks like, whatever it was divided by, if other positions were compared."""
    for ignore in (0, -100):
        yield _compared(logits, tokens, slice(None), slice(None), ignore), NOT_SHIFTED
        yield _compared(logits, tokens, slice(1, None), slice(None, -1), ignore), SHIFTED_BACK
        yield _compared(logits, tokens.roll(1, 1), slice(None), slice(None), ignore), SHIFTED_BACK
    yield gradient(logits, lambda x: summed(x[:, :-1], tokens[:, 1:], -100)), PADDING_LEARNT
    rolled = gradient(logits, lambda x: summed(x, tokens.roll(-1, 1)))
    yield rolled, "rolled, not shifted: roll() puts the first token behind the last, where nothing is to be predicted"
    chances = gradient(logits, lambda x: summed(x[:, :-1].softmax(-1), tokens[:, 1:]))
    yield chances, "cross_entropy takes logits as they are, and applies the softmax itself"


def _listed(of_rows: list[float], want: Tensor, own: Tensor) -> str:
    right = float((want * own).sum() / (own * own).sum())
    return ", ".join(f"{k / right:.3g}" for k in of_rows if k) + " x the expected"


def _compared(logits: Tensor, tokens: Tensor, at: slice, with_: slice, ignore: int) -> Tensor:
    return gradient(logits, lambda x: summed(x[:, at], tokens[:, with_], ignore))


def scales(batches: list[Batch], rank: int) -> Iterator[tuple[float, str]]:
    """What a wrong answer multiplies the sum over this rank's tokens by, and the mistake."""
    N, counts = len(batches), [count_of(tokens) for _, tokens in batches]
    own, total = counts[rank], sum(counts)
    places = [tokens[:, 1:].numel() for _, tokens in batches]
    firsts = [int((tokens != 0).sum()) for _, tokens in batches]
    inputs = [int((tokens[:, :-1] != 0).sum()) for _, tokens in batches]
    clamped = [max(count, 1) for count in counts]
    sentences = [len(tokens) for _, tokens in batches]
    if N > 1:
        yield 1 / max(own, 1), MEAN_OF_MEANS
        yield N / max(own, 1), MEAN_OF_MEANS
        for op, found in (("MAX", max(counts)), ("MIN", min(counts)), ("PRODUCT", math.prod(counts))):
            for times in (1, N) if found else ():
                yield times / found, WRONG_OP.format(op=op)
        yield 1 / total, FACTOR_N
        yield N * N / total, FACTOR_NN
        yield 1 / total / N, FACTOR_NNN
        yield 1 / max(own, 1) / N, MEAN_OF_MEANS
    for times in (1, N):
        yield times / max(own, 1) / total, DIVIDED_TWICE
    for k in dict.fromkeys((1.0, float(N), 1 / N)):
        yield k, A_SUM
    for times in dict.fromkeys((N, 1, N * N)):
        for counted, likely in (
            (places, PADDING_COUNTED),
            ([tokens.numel() for _, tokens in batches], PADDING_COUNTED),
            (firsts, FIRST_COUNTED),
            (inputs, INPUTS_COUNTED),
            (clamped, CLAMPED_FIRST),
            (sentences, SENTENCES_COUNTED),
        ):
            for denominator in (sum(counted), counted[rank], counted[rank] * N):
                yield times / max(denominator, 1), likely  # a rank may have nothing but padding


def check_token_loss(answer: Any, world: World) -> None:
    for case, dtype in ((0, torch.float32), (1, torch.float32), (0, torch.float64), (2, torch.bfloat16)):
        check_batch(answer, world, [make_batch(r, case, dtype) for r in range(world.world_size)], dtype, CASES[case])
    if world.world_size == 1:  # so that with more ranks a larger mistake is told first
        return
    logits, tokens = make_batch(world.rank, 0, torch.float32)
    with world.record():
        loss, grad = run_loss(answer, world, logits, torch.zeros_like(tokens), "nothing but padding on any rank")
    if not grad.isfinite().all() or loss.item() != 0:
        raise Wrong(f"nothing but padding on any rank: the loss is {loss.item():g}, expected 0", NOT_A_NUMBER)


CASES = ("sentences of different lengths", "one rank has nothing but padding", "longer sentences")


def run_loss(answer: Any, world: World, logits: Tensor, tokens: Tensor, when: str) -> tuple[Tensor, Tensor]:
    """The answer's loss, and its gradient with respect to the logits."""
    fresh, given = logits.clone().requires_grad_(), tokens.clone()
    loss = answer.token_loss(fresh, given, world.world_size)
    if not isinstance(loss, Tensor):
        likely = values.forgot_to_return(loss) or NO_GRADIENT
        raise Wrong(f"{when}: it returns a {type(loss).__name__}, not a tensor", likely)
    if loss.numel() != 1:
        likely = "one number is needed to call backward() on: the sum over the tokens, divided by their number"
        raise Wrong(f"{when}: it returns a tensor of the shape {tuple(loss.shape)}", likely)
    if not loss.requires_grad:
        raise Wrong(f"{when}: the loss does not require a gradient", NO_GRADIENT)
    if not torch.equal(fresh.detach(), logits) or not torch.equal(given, tokens):
        raise Wrong(f"{when}: the logits or the tokens have changed", "the caller still needs them: work on a copy")
    with values.in_case(answer, f"{when}: backward", ERRORS_1["inplace"], ERRORS_1):
        (grad,) = torch.autograd.grad(loss.sum(), fresh, allow_unused=True)
    if grad is None:
        raise Wrong(f"{when}: the loss does not depend on the logits", NO_GRADIENT)
    return loss.detach(), grad


def check_batch(answer: Any, world: World, batches: list[Batch], dtype: torch.dtype, when: str) -> None:
    N, rank = world.world_size, world.rank
    when += f", {str(dtype).removeprefix('torch.')}" * (dtype != torch.float32)
    logits, tokens = batches[rank]
    total = sum(count_of(other) for _, other in batches)
    with world.record() as calls, world.blamed(calls):
        loss, got = run_loss(answer, world, logits, tokens, when)
    ones = gradient(logits, lambda x: summed(x[:, :-1], tokens[:, 1:]))
    want, got = ones * N / total, got.double()
    loose = {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 0.03)

    def equal(one: Tensor, other: Tensor) -> bool:
        return bool(((one - other).abs() <= loose * (other.abs().max() + 1e-12)).all())

    k = float((got * ones).sum() / (ones * ones).sum()) if ones.any() else None  # what the sum was multiplied by
    k = math.nan if k is not None and not equal(got, k * ones) else k
    factors, right = everyone(world, k), everyone(world, equal(got, want))
    if equal(got, want) and not all(right):  # a rank without tokens has nothing to get wrong: tell the same mistake
        seen = f"{when}: the gradient of rank {right.index(False)} is not the expected one"
        raise Wrong(seen, _scale_explained(factors, batches, loose), values_differ=True)
    if not equal(got, want):
        seen, likely = _gradient_explained(got, want, batches, rank, equal, when)
        if k is not None and not math.isnan(k):
            lost = world.unwaited(calls)
            likely = f"a forgotten wait: {lost}, and the others' counts had not arrived" if lost else ""
            seen = f"{when}: the gradient of its tokens is {k * total / N:.3g} x the expected"
            first = sum(count_of(make_batch(r, 0, dtype)[1]) for r in range(N))
            if first != total and all(f is None or math.isclose(f, N / first, rel_tol=loose) for f in factors):
                likely = likely or FIRST_CALL
            likely = likely or _scale_explained(factors, batches, loose)
        raise Wrong(seen, likely, values_differ=True)
    sums = [float(summed(x[:, :-1].double(), y[:, 1:])) for x, y in batches]
    mean, found = sum(sums) / total, everyone(world, float(loss))
    if any(map(math.isnan, found)):
        raise Wrong(f"{when}: the loss of rank {found.index(math.nan)} is nan", NOT_A_NUMBER)
    if not math.isclose(sum(found) / N, mean, rel_tol=max(loose, 1e-5)):
        likely = GLOBAL_VALUE
        if math.isclose(sum(found) / N, N * mean, rel_tol=max(loose, 1e-5)):
            likely += ". The sum was taken over the ranks, and then multiplied by N"
        seen = f"{when}: the mean over the ranks of what they return is {sum(found) / N:g}, not {mean:g}"
        raise Wrong(seen, likely)
    sent = sum(call.sent for call in calls)
    if sent > 256 * N and sent > 0.2 * logits.numel() * logits.element_size():
        raise Wrong(f"{when}: {sent:,.0f} bytes were sent per rank", MUCH_SENT)
    check_waited(calls, world)


def _scale_explained(factors: list[float | None], batches: list[Batch], loose: float) -> str:
    """The mistake by which every rank's sum was multiplied by its factor (None: it has no tokens)."""
    possible = zip(*(scales(batches, rank) for rank in range(len(batches))), strict=True)
    for each in possible:
        if all(k is None or math.isclose(k, scale, rel_tol=loose) for k, (scale, _) in zip(factors, each)):
            return each[0][1]
    return ""


def _gradient_explained(
    got: Tensor, want: Tensor, batches: list[Batch], rank: int, equal: Any, when: str
) -> tuple[str, str]:
    """What was seen, and the mistake behind it."""
    logits, tokens = batches[rank]
    if not bool(got.isfinite().all()):
        return f"{when}: the gradient is not a number", NOT_A_NUMBER
    if not got.any():
        return f"{when}: the gradient is 0", NO_GRADIENT
    if (off := float((got - want).abs().max() / want.abs().max())) < 0.02:
        return f"{when}: the gradient is off by {100 * off:.2g} %", LESS_PRECISE
    places = got.abs().sum(dim=2) > 0
    here = f"{int(places.sum())} positions have a gradient, and {count_of(tokens)} tokens are to be predicted"
    mask = (tokens[:, 1:] != 0).unsqueeze(2)
    own = gradient(logits, lambda x: summed(x[:, :-1], tokens[:, 1:]))
    of_rows = [float((a * b).sum() / (b * b).sum()) if b.any() else 0.0 for a, b in zip(got, own)]
    if equal(got, torch.tensor(of_rows, dtype=got.dtype).view(-1, 1, 1) * own) and mask.any():
        return f"{when}: the tokens of its sentences weigh {_listed(of_rows, want, own)}", SENTENCE_MEANS
    for pattern, likely in patterns(logits, tokens):
        k = float((got * pattern).sum() / (pattern * pattern).sum()) if pattern.any() else 0.0
        if k and equal(got, k * pattern):
            return f"{when}: {here}", likely
    others = int(places.sum()) != count_of(tokens)
    return f"{when}: {here}", "the gradient is that of other targets: tokens[:, 1:], which are not 0" * others


TOKEN_LOSS_STUB = '''\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from zerolab.lab.exercises import Todo


def token_loss(logits: Tensor, tokens: Tensor, world_size: int) -> Tensor:
    """What this rank calls backward() on: on average over the ranks, the mean loss of all
    tokens of all ranks.

    logits: (B, T, V), of which logits[:, t] says what comes at t + 1. tokens: (B, T), in
    which 0 is padding. The ranks have different B and T. The engine averages the gradients
    over the ranks; that is not to be done here. If no rank has anything to predict, it is
    0.
    """
    raise Todo("14.1")
'''

TOKEN_LOSS = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def token_loss(logits: Tensor, tokens: Tensor, world_size: int) -> Tensor:
    targets = tokens[:, 1:].flatten()
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, ignore_index=0, reduction="sum"
    )
    count = (targets != 0).sum()
    dist.all_reduce(count)  # now the number of tokens of all ranks
    return world_size * total / count.clamp(min=1)
"""

ERRORS_1 = {
    "inplace": "the loss itself was all-reduced in place, and its gradient is lost: all-reduce the count",
    "in-place": "the loss itself was all-reduced in place, and its gradient is lost: all-reduce the count",
    "ReduceOp.AVG": "gloo has no AVG: the number of tokens of all ranks is the sum",
    "Expected input batch_size": "as many logits as targets: logits[:, :-1] go with tokens[:, 1:]",
    "Expected target size": "cross_entropy wants the classes second: flatten logits to (B * T, V), tokens to (B * T,)",
    "Target 0 is out of bounds": "there are V classes, and 0 is the padding: ignore_index=0",
    "is out of bounds": "the first two dimensions of logits are B and T: flatten(0, 1) keeps V",
    "Work' object": "with async_op=True the result is in the tensor that you pass, once wait() returns",
    "must be Tensor": "all_reduce() takes a tensor and fills it: torch.tensor(...) makes one of a number",
    "Invalid function argument. Expected parameter `tensor`": "all_reduce() takes a tensor and fills it: "
    "torch.tensor(...) makes one of a number",
    "does not make this call": "not every rank makes this call: all take part, also one that has nothing to add",
    "did not take part": "not every rank makes this call: all take part, also one that has nothing to add",
    " instead": "the ranks make different calls. All run as many forwards and backwards, with the same collectives, "
    "also one that has nothing to learn from",
    "view size is not compatible": "what is cut by [:, :-1] is not contiguous: reshape() or flatten(), not view()",
    "only floating point": "a count is a whole number: it needs no gradient",
}

# ---------------------------------------------------------------------- 14.2

RATE = 0.5  # the learning rate that make_optimizer gives
NOTHING = -100  # a target with nothing to learn: padding in a language model, a pair without an answer


@dataclass(frozen=True)
class Case:
    """One training. Lesson 13 has another kind: what differs is in these methods."""

    name: str
    make: Callable[[], nn.Module]
    stage: int
    batch_size: int
    steps: int

    @property
    def when(self) -> str:
        return f"{self.name}, {self.steps} steps of {self.batch_size} samples"

    def data(self) -> Split:
        return data_of(self.make is gpt)

    def run(self, answer: Any, model: nn.Module, data: Split, make_optimizer: Any) -> Any:
        return answer.train(model, data, self.stage, self.steps, self.batch_size, make_optimizer)

    def prepared(self, inputs: Tensor) -> Tensor:
        """What the model is given for `inputs` of the data."""
        return inputs.long()

    def key(self, row: Tensor) -> bytes:
        """Tells samples apart, whether from the data or on their way into the model."""
        return row.detach().short().numpy().tobytes()

    def rate(self, step: int) -> float:
        return RATE

    def numbers(self, step: int, data: Split) -> list[int]:
        """The samples of the step, of all ranks together."""
        return [(step * self.batch_size + i) % len(data.inputs) for i in range(self.batch_size)]

    def expected(self, seen: Forwards, data: Split) -> Forwards:
        """What right ranks learn from: here as if one rank did it all, since it does not matter who takes what."""
        return [[[step, True, True, self.numbers(step, data)] for step in range(self.steps)]]

    def why_steps(self, found: int) -> str:
        return f"one for each step: {self.steps}"

    def why_samples(self, seen: Forwards, step: int, data: Split) -> str:
        """Why the ranks' samples are not those of the step."""
        N, size = len(seen), len(data.inputs)
        parts, wanted = parts_of(seen, step), sorted(self.numbers(step, data))
        together = sorted(n for part in parts for n in part)
        if any(n >= size for n in together):
            return "it learns from validation data: data.inputs and data.targets are for training"
        if -1 in together:
            return "some inputs are no samples of the data: a rank without samples has an empty batch"
        if N > 1 and all(sorted(part) == wanted for part in parts):
            return ALL_SAMPLES
        if N > 1 and parts[0] and all(sorted(part) == sorted(parts[0]) for part in parts):
            return SAME_BATCH
        if (step + 1) * self.batch_size > size:
            return WRAP
        if set(together) < set(wanted) and len({len(part) for part in parts}) == 1:
            return LEFT_OUT.format(batch=self.batch_size)
        if set(together) == set(wanted):
            return REPEATED
        if N > 1 and set(together) < set(wanted):
            return "some samples are left out, others come twice: all ranks must cut one and the same order"
        return "step s takes the samples from s * batch_size on, of all ranks together"

    def gradients(self) -> list[tuple[Weigh, str]]:
        """How wrong answers weigh the ranks' sums of losses, and the mistake."""
        return GRADIENTS

    def reports(self) -> list[tuple[Report, str]]:
        """What may be reported as the loss. The first is right."""
        return REPORTS

    def why_loss(self, loss: float, seen: Forwards, data: Split) -> str:
        """Why the loss of the first step is another."""
        return ""

    def why_not_validated(self, inputs: set[int]) -> str:
        """Why no validation sample was seen. inputs: what was seen in forwards without gradients; -1 is no sample."""
        return TRAINING_DATA

    def check_rates(self, rates: list[float], world: World) -> None:
        """Raises Wrong if the learning rates of the steps are not those that were asked for."""

    def check_state(self, watch: Watch, trained: nn.Module, world: World) -> None:
        """Raises Wrong if training has left something else behind than `trained`, what one process has."""


class Seen(nn.Module):
    """Remembers what came in: (step, training?, gradients?, numbers of the samples)."""

    record: Callable[[Tensor, bool], None] = staticmethod(lambda inputs, training: None)


class SeenPairs(PairEncoder, Seen):
    def forward(self, pairs: Tensor) -> Tensor:
        self.record(pairs, self.training)
        return super().forward(pairs)


class SeenGPT(GPT, Seen):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        self.record(tokens, self.training)
        return super().forward(tokens, targets)


def encoder() -> nn.Module:
    torch.manual_seed(3)
    model = SeenPairs(layers=1, width=8, heads=2, context=5, vocabulary=31).double()
    model.dropout.p = 0.0
    model.position.weight.requires_grad_(False)
    return model


def gpt() -> nn.Module:
    torch.manual_seed(4)
    return SeenGPT(layers=1, width=8, heads=2, context=5, vocabulary=31).double()


def data_of(language: bool) -> Split:
    """13 samples to train on and 7 to validate with, no two alike; some targets are `NOTHING`."""
    numbers, place = torch.arange(20), torch.arange(5)
    words = 1 + (7 * numbers[:, None] + 3 * place + numbers[:, None] * place) % 30  # (20, 5)
    if language:
        targets = words.roll(-1, 1)
        targets[place[None] >= 1 + (numbers[:, None] * 3) % 5] = NOTHING
        inputs = words
    else:
        inputs = torch.stack([words, words.flip(1)], dim=1)
        inputs[:, 1, 3:] = 0
        targets = (numbers * numbers // 3) % 2
        targets[[3, 5, 6, 15]] = NOTHING
    return Split(inputs[:13].short(), targets[:13], inputs[13:].short(), targets[13:])


CASES_2 = (
    Case("a pair encoder in stage 3", encoder, 3, 5, 4),
    Case("a GPT in stage 0", gpt, 0, 6, 3),
    Case("a pair encoder in stage 2, 3 samples a step", encoder, 2, 3, 3),
    Case("a GPT in stage 1", gpt, 1, 7, 2),
)


@dataclass
class Watch:
    """What the answer did on this rank."""

    case: Case
    data: Split
    steps: int = 0  # of the optimizer
    optimizers: int = 0  # that were made
    rates: list[float] = field(default_factory=list)  # of each step
    engines: list[Any] = field(default_factory=list)
    forwards: list[tuple[int, bool, bool, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = torch.cat([self.data.inputs, self.data.validation_inputs])
        self.rows = {self.case.key(row): number for number, row in enumerate(rows)}

    def saw(self, inputs: Tensor, training: bool) -> None:
        numbers = [self.rows.get(self.case.key(row), -1) for row in inputs]
        self.forwards.append((self.steps, training, torch.is_grad_enabled(), numbers))

    def make_optimizer(self, params: Any) -> SGD:
        self.optimizers += 1
        optimizer = SGD(params, lr=RATE, momentum=0.5)
        optimizer.register_step_pre_hook(self.stepping)
        optimizer.register_step_post_hook(self.stepped)
        return optimizer

    def stepping(self, optimizer: Any, *arguments: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def stepped(self, *arguments: Any) -> None:
        self.steps += 1


@contextmanager
def engines_made(found: list[Any]) -> Iterator[None]:
    before = zerolab.Engine.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        before(self, *args, **kwargs)

    zerolab.Engine.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        zerolab.Engine.__init__ = before  # type: ignore[method-assign]


MEAN_OF_MEANS_2 = "the mean of means: each rank divided by its own number of targets. Divide by the number of all ranks"
SCALE_N = (
    "the loss is right, and the gradient is 1/N of what it should be: the engine averages over the ranks, so call "
    "backward() on N times this rank's part. (With Adam this hardly shows: it divides by the size of the gradient)"
)
SCALE_NN = "the gradient is N times too large: multiplied by N, and by something that is N times too large already"
SAME_BATCH = "each rank the same samples: a rank takes its own part of the step, numbers[rank::N] or chunk(N)[rank]"
ALL_SAMPLES = "every rank computes all samples of the step, N times the work: a rank takes its part of them"
LEFT_OUT = "some samples are left out: {batch} do not divide by N evenly, and all of them belong to the step"
REPEATED = "samples come twice, as with DistributedSampler, which fills up the last ranks: all others must come once"
WRAP = "after the last sample the first one follows: (step * batch_size + i) % len(data.inputs)"
COUNT_ALL = f"targets of {NOTHING} were counted: they have nothing to learn, and weigh nothing"
BY_SAMPLES = "divided by the number of samples: a sentence has as many targets as it has words"
LOSS_LOCAL = "that is this rank's part: the mean over all ranks must be reported"
LOSS_N = "N times too large: the loss was reported with the factor N that only backward() needs"
LOSS_1_N = (
    "1/N of it: the parts of the ranks are to be added up, not averaged, once they are divided by the whole count"
)
NOT_ZEROED = "zero_grad() is missing, or comes between backward() and step(): gradients must start from nothing"
NO_STEP = (
    "the model does not learn: zero_grad() comes between backward() and step(), or the optimizer has other parameters"
)
NEW_OPTIMIZER = (
    "the optimizer was made {made} times: a new one has forgotten its momentum. Make one, before the first step"
)
TRAINING_DATA = "validated with training data: it was there in training, and so the accuracy is too good"
IN_TRAINING_MODE = "model.eval() is missing: accuracy is measured with dropout or BatchNorm as in training"
NOT_AGAIN = "model.train() is missing: after eval() the model trains without dropout, and BatchNorm stands still"
NOTHING_COUNTED = f"targets of {NOTHING} were counted as wrong: they have no answer"
MEAN_ACCURACY = (
    "the mean of the ranks' accuracies: their parts differ in size. Add up hits and counts, then divide once"
)
VALIDATED_TWICE = (
    "some validation samples were counted twice, as with DistributedSampler, which fills up the last ranks: each once"
)
LOCAL_ACCURACY = "that is the accuracy of this rank's part: add up the hits and the counts of all ranks"
HITS_N = "the counts of all ranks were divided by this rank's count, or the other way round: add up both"
UNEQUAL = "every rank must return the same numbers: all-reduce the sums, and divide by the count of all ranks"


def check_train(answer: Any, world: World) -> None:
    for case in CASES_2:
        check_case(answer, world, case)


def check_case(answer: Any, world: World, case: Case) -> None:
    model, data, when = case.make(), case.data(), case.when
    before = [tensor.clone() for tensor in data]
    watch = Watch(case, data)
    type(model).record = staticmethod(watch.saw)  # type: ignore[attr-defined]
    try:
        with engines_made(watch.engines), world.record() as calls, world.blamed(calls):
            got = case.run(answer, model, data, watch.make_optimizer)
    finally:
        type(model).record = staticmethod(lambda inputs, training: None)  # type: ignore[attr-defined]
    losses, accuracy = _form(got, case, when)
    if not all(map(torch.equal, before, data)):
        raise Wrong(f"{when}: the data have changed", "the caller still needs them: work on a copy")
    _check_engine(watch, model, case, when)
    seen: list[list[Any]] = everyone(world, watch.forwards)
    results = everyone(world, [losses, accuracy])
    everyones = [result[0] for result in results]
    sums, trained = alone(case, data, case.expected(seen, data), right_weights)
    counts = [int((data.targets[case.numbers(s, data)] != NOTHING).sum()) for s in range(case.steps)]
    want = [sum(row) / count for row, count in zip(sums, counts, strict=True)]
    if not all(_close(other, want) for other in everyones):
        _check_samples(seen, case, data, when)
        case.check_rates(watch.rates, world)
        if any(map(math.isnan, losses)):
            likely = "a mean of nothing is nan: where a step has fewer samples than ranks, some have none. Take the sum"
            raise Wrong(f"{when}: a loss is nan", likely)
        _check_losses(losses, want, everyones, seen, case, data, world, when, watch.optimizers)
    _check_work(seen, case, data, when)
    case.check_rates(watch.rates, world)
    _check_mode(seen, case, data, when)
    case.check_state(watch, trained, world)
    _check_accuracy(accuracy, [result[1] for result in results], seen, trained, case, data, world, when)


def _form(got: Any, case: Case, when: str) -> tuple[list[float], float]:
    """What was returned, as numbers. Raises Wrong unless it is (a loss for each step, the accuracy)."""
    if not isinstance(got, tuple | list) or len(got) != 2:
        likely = values.forgot_to_return(got) or "return losses, accuracy"
        raise Wrong(f"{when}: it returns a {type(got).__name__}", likely)
    losses, accuracy = got
    try:
        losses = [float(loss) for loss in losses]
        accuracy = float(accuracy)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(
            f"{when}: the losses or the accuracy are no numbers", "return a list of floats, and a float"
        ) from None
    if len(losses) != case.steps:
        raise Wrong(f"{when}: {len(losses)} losses were returned", case.why_steps(len(losses)))
    return losses, accuracy


def _check_engine(watch: Watch, model: nn.Module, case: Case, when: str) -> None:
    if not watch.engines:
        raise Wrong(f"{when}: no engine was made", "shard the model first: zero = zerolab.shard(model, stage)")
    engine = watch.engines[-1]
    if engine.model is not model:
        raise Wrong(f"{when}: another model was sharded", "train the model that was given")
    if engine.stage != case.stage:
        raise Wrong(f"{when}: the engine is of stage {engine.stage}", "zerolab.shard(model, stage) takes the stage")
    if watch.steps != case.steps:
        likely = "each step ends with optimizer.step(), once; optimizer = make_optimizer(model.parameters())"
        raise Wrong(f"{when}: the optimizer stepped {watch.steps} times", likely)


Forwards = list[list[Any]]  # for each rank, its forwards


def parts_of(seen: Forwards, step: int) -> list[list[int]]:
    """The samples of each rank that it learnt from in `step`."""
    return [[n for at, _, grads, found in rank if at == step and grads for n in found] for rank in seen]


def _check_samples(seen: Forwards, case: Case, data: Split, when: str) -> None:
    for step in range(case.steps):
        parts, wanted = parts_of(seen, step), case.numbers(step, data)
        if sorted(n for part in parts for n in part) != sorted(wanted):
            what = f"in step {step + 1} the ranks learn from the samples {_shown(parts)}, expected {_shown([wanted])}"
            raise Wrong(f"{when}: {what}", case.why_samples(seen, step, data))


def _check_work(seen: Forwards, case: Case, data: Split, when: str) -> None:
    """The numbers are right. Has each rank computed only its part?"""
    for step in range(case.steps):
        parts, wanted = parts_of(seen, step), sorted(case.numbers(step, data))
        if len(parts) > 1 and all(sorted(part) == wanted for part in parts):
            raise Wrong(f"{when}: in step {step + 1} the ranks learn from the samples {_shown(parts)}", ALL_SAMPLES)


def _shown(parts: list[list[int]]) -> str:
    return " | ".join(", ".join(map(str, part)) or "none" for part in parts)


# -- what one process computes, if it weighs the ranks' parts as an answer might

Weigh = Callable[[list[int], list[int], int], list[float]]  # (targets that count, all targets, samples) of each rank


def alone(case: Case, data: Split, seen: Forwards, weigh: Weigh, keep: bool = False) -> tuple[list[list[float]], Any]:
    """The sums of losses of each rank's part in each step, and the model after the last.

    weigh: what each rank's sum is multiplied by, in the mean over the ranks. keep: gradients are never set to zero.
    """
    model = case.make()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.5)
    found, kept = [], [[b.clone() for b in model.buffers()] for _ in seen]
    for step in range(case.steps):
        parts = [torch.tensor(part, dtype=torch.long) for part in parts_of(seen, step)]
        optimizer.zero_grad(set_to_none=True) if not keep or step == 0 else None
        sums, weights = [], weigh(*_counts(parts, data))
        for part, weight, own in zip(parts, weights, kept, strict=True):
            _load(model, own)  # BatchNorm's statistics are each rank's own
            total = _sums(model, case.prepared(data.inputs[part]), data.targets[part])
            (weight * total).backward()
            own[:] = [b.clone() for b in model.buffers()]
            sums.append(total.item())
        optimizer.param_groups[0]["lr"] = case.rate(step)
        optimizer.step()
        found.append(sums)
    _load(model, [torch.stack(each).double().mean(0) for each in zip(*kept)])
    model.each_rank = kept  # type: ignore[assignment]
    return found, model


def _load(model: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)


def _sums(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum")


def _counts(parts: list[Tensor], data: Split) -> tuple[list[int], list[int], int]:
    targets = [data.targets[part] for part in parts]
    return [int((t != NOTHING).sum()) for t in targets], [t.numel() for t in targets], sum(map(len, parts))


def right_weights(counts: list[int], everything: list[int], samples: int) -> list[float]:
    return [1 / max(1, sum(counts))] * len(counts)


def _means(counts: list[int], everything: list[int], samples: int) -> list[float]:
    return [1 / max(1, n) / len(counts) for n in counts]


def _scaled(k: Callable[[int], float], weigh: Weigh) -> Weigh:
    return lambda counts, everything, samples: [k(len(counts)) * w for w in weigh(counts, everything, samples)]


def _count_all(with_n: bool) -> Weigh:
    return _by(lambda c, e, s: sum(e) * (len(c) if with_n else 1))


def _by_samples(with_n: bool) -> Weigh:
    return _by(lambda c, e, s: s * (len(c) if with_n else 1))


def _by(pick: Callable[[list[int], list[int], int], float]) -> Weigh:
    return lambda c, e, s: [1 / pick(c, e, s)] * len(c)


GRADIENTS: list[tuple[Weigh, str]] = [
    (_means, MEAN_OF_MEANS_2),
    (_scaled(lambda N: 1 / N, right_weights), SCALE_N),
    (_scaled(lambda N: N, right_weights), SCALE_NN),
    (_scaled(lambda N: 1 / N / N, right_weights), SCALE_N),
    (_scaled(lambda N: N, _means), "each rank's own mean, and multiplied by N: " + MEAN_OF_MEANS_2),
    (_scaled(lambda N: 1 / N, _means), "each rank's own mean, divided by N: " + MEAN_OF_MEANS_2),
    (_by(lambda c, e, s: 1), A_SUM),
    (_by(lambda c, e, s: len(c)), A_SUM),
    *((_count_all(k), COUNT_ALL) for k in (False, True)),
    *((_by_samples(k), BY_SAMPLES) for k in (False, True)),
    (lambda c, e, s: [1 / max(1, n) / len(c) for n in e], COUNT_ALL),
]


Report = Callable[[list[float], list[int], list[int], int, int], float]  # sums, counts, all targets, samples, rank

# What may be reported instead of the mean over the targets of all ranks.
REPORTS: list[tuple[Report, str]] = [
    (lambda s, c, e, n, r: sum(s) / max(1, sum(c)), ""),
    (lambda s, c, e, n, r: s[r] / max(1, c[r]), LOSS_LOCAL),
    (lambda s, c, e, n, r: s[r] / max(1, sum(c)), LOSS_LOCAL),
    (lambda s, c, e, n, r: len(s) * s[r] / max(1, sum(c)), LOSS_LOCAL),
    (lambda s, c, e, n, r: sum(x / max(1, k) for x, k in zip(s, c)) / len(s), MEAN_OF_MEANS_2),
    (lambda s, c, e, n, r: sum(x / max(1, k) for x, k in zip(s, c)), "the sum of the ranks' means: " + MEAN_OF_MEANS_2),
    (lambda s, c, e, n, r: sum(x / max(1, k) for x, k in zip(s, e)) / len(s), COUNT_ALL),
    (lambda s, c, e, n, r: len(s) * sum(s) / max(1, sum(c)), LOSS_N),
    (lambda s, c, e, n, r: sum(s) / max(1, sum(c)) / len(s), LOSS_1_N),
    (lambda s, c, e, n, r: sum(s) / sum(e), COUNT_ALL),
    (lambda s, c, e, n, r: sum(s) / sum(e) / len(s), COUNT_ALL),
    (lambda s, c, e, n, r: sum(s), A_SUM),
    (lambda s, c, e, n, r: sum(s) / len(s), A_SUM),
    (lambda s, c, e, n, r: s[r], A_SUM),
    (lambda s, c, e, n, r: sum(s) / n, BY_SAMPLES),
]


def _check_losses(
    losses: list[float],
    want: list[float],
    everyones: list[list[float]],
    seen: Forwards,
    case: Case,
    data: Split,
    world: World,
    when: str,
    optimizers: int,
) -> None:
    per_step = [
        _counts([torch.tensor(p, dtype=torch.long) for p in parts_of(seen, s)], data) for s in range(case.steps)
    ]

    def reported(sums: list[list[float]], report: Report) -> list[float]:
        return [report(row, *counts, world.rank) for row, counts in zip(sums, per_step, strict=True)]

    if _close(losses, want):
        with world.record():  # the others say what is wrong
            return
    sums, _ = alone(case, data, seen, right_weights)
    first = next(i for i, (a, b) in enumerate(zip(losses, want)) if not math.isclose(a, b, rel_tol=1e-5))
    told = f"{when}: the loss of step {first + 1} is {losses[first]:.5g}, expected {want[first]:.5g}"
    trajectories: list[tuple[list[list[float]], str]] = [(sums, "")]
    trajectories.append((alone(case, data, seen, lambda c, e, s: [0.0] * len(c))[0], NO_STEP))
    trajectories += [(alone(case, data, seen, weigh)[0], likely) for weigh, likely in case.gradients()]
    trajectories.append((alone(case, data, seen, right_weights, keep=True)[0], NOT_ZEROED))
    for found, wrong_gradient in trajectories:
        for report, wrong_report in case.reports():
            if _close(losses, reported(found, report)):
                raise Wrong(told, wrong_report or wrong_gradient, values_differ=True)
    for report, likely in case.reports()[1:]:
        if math.isclose(losses[0], reported(sums, report)[0], rel_tol=1e-5) and first == 0:
            raise Wrong(told, likely, values_differ=True)
    likely = "the first loss is right, so the gradient is wrong" if first else case.why_loss(losses[0], seen, data)
    if first and optimizers > 1:
        likely = NEW_OPTIMIZER.format(made=optimizers)
    if not likely and any(not _close(other, losses) for other in everyones):
        likely = UNEQUAL
    raise Wrong(told, likely, values_differ=True)


def _close(one: list[float], other: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(one, other, strict=True))


def _check_mode(seen: Forwards, case: Case, data: Split, when: str) -> None:
    size = len(data.inputs)
    if any(grads and not training for rank in seen for at, training, grads, _ in rank if at < case.steps):
        raise Wrong(f"{when}: it learns in eval mode", NOT_AGAIN)
    if any(training for rank in seen for _, training, _, found in rank if _validates(found, size)):
        raise Wrong(f"{when}: accuracy is measured in training mode", IN_TRAINING_MODE)


def _check_accuracy(
    accuracy: float,
    everyones: list[float],
    seen: Forwards,
    trained: nn.Module,
    case: Case,
    data: Split,
    world: World,
    when: str,
) -> None:
    N, size = world.world_size, len(data.inputs)
    hits, counted = _hits(trained, case.prepared(data.validation_inputs), data.validation_targets)
    want = hits.sum().item() / counted.sum().item()
    told = f"{when}: the accuracy is {accuracy:.4g}, expected {want:.4g}"
    if math.isclose(accuracy, want, abs_tol=1e-6):
        if any(not math.isclose(other, want, abs_tol=1e-6) for other in everyones):
            with world.record():
                return
        _note_validation(seen, size, world)
        return
    parts = [
        [n - size for _, _, _, found in rank if _validates(found, size) for n in found if n >= size] for rank in seen
    ]
    own = parts[world.rank]
    local = [(hits[p].sum().item(), counted[p].sum().item()) for p in parts]
    rates = [h / c if c else 0.0 for h, c in local]
    known = {
        hits.sum().item() / counted.numel(): NOTHING_COUNTED,
        100 * want: "a share is asked for, not a percentage",
        hits.sum().item() / size: "divided by the number of training samples: divide by that of the validation samples",
    }
    if N > 1:
        known |= {
            rates[world.rank]: LOCAL_ACCURACY,
            hits[own].sum().item() / counted.sum().item(): LOCAL_ACCURACY,
            sum(rates) / N: MEAN_ACCURACY,
        }
        if local[world.rank][1]:
            known[hits.sum().item() / local[world.rank][1]] = HITS_N
    everything = sorted(n for part in parts for n in part)
    if not everything:
        inputs = {n for rank in seen for at, _, grads, found in rank if at == case.steps or not grads for n in found}
        raise Wrong(told, case.why_not_validated(inputs))
    if len(everything) > len(set(everything)) and N > 1 and set(everything) == set(range(counted.shape[0])):
        twice = sum(hits[p].sum().item() for p in parts) / sum(counted[p].sum().item() for p in parts)
        if math.isclose(accuracy, twice, abs_tol=1e-6):
            raise Wrong(told, VALIDATED_TWICE, values_differ=True)
    if N > 1 and set(everything) < set(range(len(data.validation_targets))):
        raise Wrong(told, "some validation samples are left out: 7 do not divide by N evenly")
    likely = next((why for value, why in known.items() if math.isclose(accuracy, value, abs_tol=1e-6)), "")
    if not likely and N > 1 and len(everything) > len(set(everything)):
        likely = VALIDATED_TWICE
    raise Wrong(told, likely or UNEQUAL * (len(set(everyones)) > 1), values_differ=True)


def _validates(found: list[int], size: int) -> bool:
    return any(n >= size for n in found)


def _hits(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample: how many targets the model's first choice is right for, and how many there are."""
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(-1) == targets
    there = targets != NOTHING
    return (right & there).reshape(len(targets), -1).sum(1), there.reshape(len(targets), -1).sum(1)


def _note_validation(seen: Forwards, size: int, world: World) -> None:
    validated = [[n for _, _, _, found in rank for n in found if n >= size] for rank in seen]
    if world.world_size > 1 and all(len(set(rank)) == 7 for rank in validated):
        world.note("right, but every rank validates with all samples: each could take its part")
    if any(grads for rank in seen for _, _, grads, found in rank if _validates(found, size)):
        world.note("right, but validation keeps activations for a backward that never comes: torch.no_grad()")


_MAIN = """

def main() -> None:  # torchrun --nproc-per-node 4 ex_14_2.py --stage 3 --seeds 0 1 2
    zerolab.init()
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", help="the folder of MRPC, or of another task of GLUE")
    args = parser.parse_args()
    data = pairs(args.data, 16)
    for seed in args.seeds:
        torch.manual_seed(seed)
        model = PairEncoder(layers=1, width=32, context=16)
        model.dropout.p = 0.0  # ranks draw other masks: the result would depend on N
        order = torch.randperm(len(data.inputs))
        mixed = data._replace(inputs=data.inputs[order], targets=data.targets[order])
        adam = partial(torch.optim.AdamW, lr=5e-3)
        losses, accuracy = train(model, mixed, args.stage, args.steps, 50, adam)
        if dist.get_rank() == 0:
            print(json.dumps({"seed": seed, "losses": losses, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
"""

_IMPORTS = """\
import argparse
import json
from functools import partial
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from zerolab.lab import PairEncoder, pairs
"""

TRAIN_STUB = (
    _IMPORTS
    + '''\
from zerolab.lab.exercises import Todo


def train(model, data, stage, steps, batch_size, make_optimizer):
    """Train `model` on all ranks; return every step's loss, and the last accuracy.

    data: inputs, targets, validation_inputs, validation_targets; the first dimension is the
    sample. model(inputs.long()) gives logits (samples, ..., classes) for targets
    (samples, ...), where -100 has no answer and counts nowhere.
    Step s learns from the samples s * batch_size, ..., of all ranks together; after the
    last comes the first again. make_optimizer(params) makes the optimizer. Loss: the mean
    over the step's targets. Accuracy: right ones over all validation targets. Both are
    numbers, the same on every rank and with any number of ranks.
    """
    raise Todo("14.2")
'''
    + _MAIN
)

TRAIN = (
    _IMPORTS
    + '''

def sums(model, inputs, targets):
    """The sum of the losses, how many answers are right, and how many there are."""
    logits, targets = model(inputs.long()).flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits, targets, reduction="sum")  # leaves out -100
    return loss, (logits.argmax(1) == targets).sum(), (targets != -100).sum()


def train(model, data, stage, steps, batch_size, make_optimizer):
    zero = zerolab.shard(model, stage)
    optimizer = make_optimizer(model.parameters())
    mine = slice(zero.rank, None, zero.world_size)
    losses = []
    for step in range(steps):
        numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(data.inputs)
        loss, _, count = sums(model, data.inputs[numbers[mine]], data.targets[numbers[mine]])
        dist.all_reduce(count)
        (zero.world_size * loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append((total / count).item())
    model.eval()
    with torch.no_grad():
        _, right, count = sums(model, data.validation_inputs[mine], data.validation_targets[mine])
    dist.all_reduce(right)
    dist.all_reduce(count)
    return losses, (right / count).item()
'''
    + _MAIN
)

ERRORS_2 = {
    "was built before the model was sharded": "shard first: zero = zerolab.shard(model, stage), then the optimizer",
    "expected scalar type Long": "the tokens are int16 to save memory: model(inputs.long())",
    "to have one of the following scalar types": "the tokens are int16 to save memory: model(inputs.long())",
    "grad can be implicitly created only for scalar": "backward() needs one number: reduction='sum'",
    "does not require grad": "there is no gradient: no_grad() is still on, or .item() or .detach() cut it off",
    "Expected target size": "cross_entropy wants (targets, classes): logits.flatten(0, -2) and targets.flatten()",
    "multi-target not supported": "cross_entropy wants (targets, classes): logits.flatten(0, -2) and targets.flatten()",
    "index out of range": "the samples of a step go round: (step * batch_size + i) % len(data.inputs)",
    "is out of bounds for dimension": "the samples of a step go round: (step * batch_size + i) % len(data.inputs)",
    "cannot reshape tensor of 0 elements": "a rank without samples has an empty batch: flatten(0, -2) can do that",
    "must not be None": "all ranks take part in every forward and backward, also those without samples",
    "trying to initialize the default process group twice": "zerolab.init() is in main() already",
} | ERRORS_1

EXERCISES = [
    Exercise(
        id="14.1",
        title="a mean over all tokens",
        difficulty=1,
        section="Write: every token weighs the same",
        check=check_token_loss,
        stub=TOKEN_LOSS_STUB,
        reference=TOKEN_LOSS,
        hints=(
            "The targets are tokens[:, 1:], and logits[:, :-1] go with them. F.cross_entropy(..., ignore_index=0, "
            'reduction="sum") adds up the losses of this rank\'s tokens.',
            "count = (targets != 0).sum(), and dist.all_reduce(count) makes it the number of tokens of all ranks.",
            "The engine will divide by N: return world_size * total / count.clamp(min=1).",
        ),
        exports=("token_loss",),
        errors=ERRORS_1,
    ),
    Exercise(
        id="14.2",
        title="the training script",
        difficulty=2,
        section="Write: the training script",
        check=check_train,
        stub=TRAIN_STUB,
        reference=TRAIN,
        hints=(
            "numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(data.inputs); this rank takes "
            "numbers[zero.rank :: zero.world_size], which may be empty. It still runs forward and backward.",
            'F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") leaves out -100. All-reduce '
            "the count, call backward() on world_size * sum / count, and report the all-reduced sum / count.",
            "Accuracy: model.eval(), torch.no_grad(), one forward on validation_inputs[zero.rank :: zero.world_size], "
            "then all-reduce the number of right answers and the number of answers, and divide.",
        ),
        exports=("train", "main"),
        errors=ERRORS_2,
    ),
]
