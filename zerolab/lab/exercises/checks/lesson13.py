"""Lesson 13: a training script for images whose result does not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerolab.lab.exercises.checks import lesson14 as scripts
from zerolab.lab.exercises.checks.lesson11 import everyone
from zerolab.lab.exercises.checks.lesson14 import ALL_SAMPLES, LEFT_OUT, RATE, REPEATED, SAME_BATCH, Case, Seen, Watch
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.tasks.data import Split

BASE = 32  # samples, for which a learning rate is given

# ---------------------------------------------------------------------- 13.1

ORDER = (
    "step s of epoch e takes order[s * batch_size : (s + 1) * batch_size] of all ranks together, and order is "
    "torch.randperm(n, generator=torch.Generator().manual_seed(seed + e))"
)
NOT_SHUFFLED = "the samples come in the order of the data: each epoch shuffles them, with seed + epoch"
SET_EPOCH = (
    "the order of the first epoch again, as with a DistributedSampler whose set_epoch() is never called: the generator "
    "of epoch e starts from seed + e"
)
ANOTHER_SEED = "that is the order of another seed, {found}: epoch e shuffles with seed + e, here {right}"
ONE_GENERATOR = (
    "the random numbers of the epoch before go on: each epoch makes its own generator, from seed + e, so that a run "
    "can start again at any epoch"
)
PER_RANK_ORDER = (
    "the ranks shuffle differently: some samples come twice in an epoch, and others never. All ranks need one and the "
    "same order, of which each takes its part: the seed may not depend on the rank"
)
PER_RANK_BATCH = "batch_size is that of all ranks together: a rank's part is about batch_size / N"
LAST_DROPPED = "drop_last: the last batch of an epoch is smaller than the others, and belongs to it"
NOT_SCALED_IMAGES = "the images are 0 to 255, and the model wants 0 to 1: model(images / 255)"

NOT_SCALED = "not scaled: the rate is meant for 32 samples, and a step has batch_size: rate * batch_size / 32"
SCALED_TWICE = "scaled twice: batch_size counts the samples of all ranks already, so nothing is to be multiplied by N"
SCALED_BY_PART = "scaled by this rank's part of the batch: batch_size counts the samples of all ranks"
SCALED_SQUARED = "scaled twice: by (batch_size / 32) squared. Start from the optimizer's own rate, once"
SCALED_ROOT = "scaled by the square root of batch_size / 32: the linear rule is asked for"
SCALED_AWAY = "scaled the wrong way: a larger batch has a larger rate"
NO_WARM_UP = "no warm-up: in the first epoch of W steps, step s has (s + 1) / W of the rate"
FROM_ZERO = "the warm-up is a step late: step s of the first epoch has (s + 1) / W of the rate, so the first is not 0"
WARM_AGAIN = "the warm-up comes again in every epoch: it is for the first one only"
SET_AFTER = "set after the step: a rate counts from the next step() on, so set it before"
COMPOUNDED = "multiplied again in each step: keep the optimizer's own rate, and compute each step's from that"
ALL_THE_WAY = "the warm-up goes on to the last step: after the first epoch the rate stays"
BY_EPOCH = "the warm-up counts epochs: within the first one it rises with each step, to (s + 1) / W, and it ends there"
FLOOR_W = "W is a step short: the last, smaller step of an epoch counts as well, so W is math.ceil(n / batch_size)"
PER_RANK_W = "W is divided by N: batch_size is that of all ranks together, so W is math.ceil(n / batch_size)"
RAMP = "the warm-up starts at the optimizer's own rate: it rises to the scaled one in equal parts, from 1 / W of it on"
OWN_RATE = (
    "all rates are wrong by the same factor: scale the rate that the optimizer was made with, which is "
    'optimizer.param_groups[0]["lr"] before the first step'
)

LAST_SMALLER = (
    "divided by batch_size, but the last batch of an epoch is smaller: divide by the number of the step's samples"
)
TWICE = "divided twice: reduction='mean' has divided by this rank's samples already, so use 'sum'"
NLL = "nll_loss() on logits: it takes logarithms of probabilities, and cross_entropy() takes logits"
SOFTMAX = "softmax before cross_entropy(), which applies it itself"

BN_OWN = (
    "BatchNorm's running statistics are each rank's own, from its own samples, so the ranks validate with different "
    "models: zero.broadcast_buffers(), or their mean over the ranks, before validation"
)
BN_SUM = "BatchNorm's running statistics were summed over the ranks, not averaged"
BN_OTHER = (
    "BatchNorm's running statistics are neither a rank's nor the mean of the ranks' as training left them: share them "
    "after the last step, and validate in eval mode"
)
WEIGHTS = "the losses are right, so something has changed the weights after the last forward"


@dataclass(frozen=True)
class ImageCase(Case):
    """`epochs` over SIZE images, each in another order; the last batch of an epoch may be smaller."""

    epochs: int = 2
    seed: int = 0

    @property
    def per_epoch(self) -> int:
        return math.ceil(SIZE / self.batch_size)

    @property
    def when(self) -> str:
        return f"{self.name}, {self.epochs} epochs of {SIZE} samples, {self.batch_size} a step"

    def data(self) -> Split:
        return images()

    def run(self, answer: Any, model: nn.Module, data: Split, make_optimizer: Any) -> Any:
        return answer.train(model, data, self.stage, self.epochs, self.batch_size, make_optimizer, self.seed)

    def prepared(self, inputs: Tensor) -> Tensor:
        return inputs / 255

    def key(self, row: Tensor) -> bytes:
        row = row.detach()
        if row.is_floating_point():
            row = (row.double() * 255).round().to(torch.int32)
        return row.to(torch.int32).contiguous().numpy().tobytes()

    def rate(self, step: int) -> float:
        return RATE * self.batch_size / BASE * min(1.0, (step + 1) / self.per_epoch)

    def order(self, seed: int) -> list[int]:
        return torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed)).tolist()

    def numbers(self, step: int, data: Split) -> list[int]:
        epoch, at = divmod(step, self.per_epoch)
        return self.order(self.seed + epoch)[at * self.batch_size : (at + 1) * self.batch_size]

    def expected(self, seen: scripts.Forwards, data: Split) -> scripts.Forwards:
        """BatchNorm takes each rank's part by itself, so with it the parts are those that the ranks have taken."""
        parts = [scripts.parts_of(seen, step) for step in range(self.steps)]
        for step, found in enumerate(parts):
            if (
                sorted(n for part in found for n in part) != sorted(self.numbers(step, data))
                or self.make is not with_batch_norm
            ):
                return super().expected(seen, data)
        return [[[step, True, True, found[rank]] for step, found in enumerate(parts)] for rank in range(len(seen))]

    def why_steps(self, found: int) -> str:
        if dist.get_world_size() == 1 and found == self.epochs * (SIZE // self.batch_size):
            return LAST_DROPPED
        if found in (self.per_epoch, self.epochs) and found < self.steps:
            kept = "those of one epoch" if found == self.per_epoch else "one for each epoch"
            return f"one for each step of every epoch, {self.steps} in all, and these look like {kept}"
        if found < self.steps:
            return f"one for each step, {self.steps} in all: {PER_RANK_BATCH}"
        return f"one for each step, {self.steps} in all: batch_size is not divided by N, a rank's part is"

    def why_samples(self, seen: scripts.Forwards, step: int, data: Split) -> str:
        N, (epoch, at) = len(seen), divmod(step, self.per_epoch)
        parts, wanted = scripts.parts_of(seen, step), sorted(self.numbers(step, data))
        together = sorted(n for part in parts for n in part)
        place = slice(at * self.batch_size, (at + 1) * self.batch_size)
        if any(n >= SIZE for n in together):
            return "it learns from validation data: data.inputs and data.targets are for training"
        if -1 in together:
            return NOT_SCALED_IMAGES
        if N > 1 and all(sorted(part) == wanted for part in parts):
            return ALL_SAMPLES
        if N > 1 and parts[0] and all(sorted(part) == sorted(parts[0]) for part in parts):
            return SAME_BATCH
        if together == list(range(SIZE))[place]:
            return NOT_SHUFFLED
        for other in range(self.seed + self.epochs + 2):
            if together == sorted(self.order(other)[place]):
                right = self.seed + epoch
                return SET_EPOCH if epoch and other == self.seed else ANOTHER_SEED.format(found=other, right=right)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randperm(SIZE, generator=generator).tolist() for _ in range(epoch + 1)]
        if epoch and together == sorted(drawn[-1][place]):
            return ONE_GENERATOR
        if set(together) < set(wanted) and len(together) == len(set(together)):
            return LEFT_OUT.format(batch=len(wanted))
        if set(together) == set(wanted):
            return REPEATED
        first = [scripts.parts_of(seen, s) for s in range(epoch * self.per_epoch, (epoch + 1) * self.per_epoch)]
        whole = [n for step_parts in first for part in step_parts for n in part]
        if N > 1 and len(whole) - len(set(whole)) >= N:
            return PER_RANK_ORDER
        if len(together) == N * len(wanted) and N > 1:
            return PER_RANK_BATCH
        return ORDER

    def gradients(self) -> list[tuple[scripts.Weigh, str]]:
        B = self.batch_size
        return [
            *((weigh, _of_samples(why)) for weigh, why in super().gradients()),
            (lambda c, e, s: [1 / B] * len(c), LAST_SMALLER),
            (lambda c, e, s: [1 / max(1, n) / s for n in c], TWICE),
            (lambda c, e, s: [1 / max(1, n) / s / len(c) for n in c], TWICE),
        ]

    def reports(self) -> list[tuple[scripts.Report, str]]:
        B = self.batch_size
        return [
            *((report, _of_samples(why)) for report, why in super().reports()),
            (lambda s, c, e, n, r: sum(s) / B, LAST_SMALLER),
            (lambda s, c, e, n, r: sum(x / max(1, k) for x, k in zip(s, c)) / n, TWICE),
        ]

    def why_loss(self, loss: float, seen: scripts.Forwards, data: Split) -> str:
        model = self.make()
        parts = [torch.tensor(part, dtype=torch.long) for part in scripts.parts_of(seen, 0)]
        with torch.no_grad():
            logits = torch.cat([model(self.prepared(data.inputs[part])) for part in parts])
        targets = torch.cat([data.targets[part] for part in parts])
        for value, likely in (
            (F.nll_loss(logits, targets), NLL),
            (F.cross_entropy(logits.softmax(-1), targets), SOFTMAX),
        ):
            if math.isclose(loss, float(value), rel_tol=1e-5):
                return likely
        return ""

    def check_rates(self, rates: list[float], world: World) -> None:
        want = [self.rate(step) for step in range(self.steps)]
        wrong = [step for step, (a, b) in enumerate(zip(rates, want)) if not math.isclose(a, b, rel_tol=1e-6)]
        if not wrong:
            return
        told = f"{self.when}: the learning rate of step {wrong[0] + 1} is {rates[wrong[0]]:.4g}, "
        likely = next((why for other, why in self._rates(world.world_size) if _equal(rates, other)), "")
        if not likely and _equal([rate * want[0] for rate in rates], [rate * rates[0] for rate in want]):
            likely = OWN_RATE
        raise Wrong(f"{told}expected {want[wrong[0]]:.4g}", likely)

    def _rates(self, N: int) -> Iterator[tuple[list[float], str]]:
        """The learning rates of wrong answers, and the mistake."""
        W, k, steps = self.per_epoch, self.batch_size / BASE, range(self.steps)
        shapes: list[tuple[Callable[[int], float], str]] = [
            (lambda s: min(1.0, (s + 1) / W), ""),
            (lambda s: 1.0, NO_WARM_UP),
            (lambda s: min(1.0, s / W), FROM_ZERO),
            (lambda s: (s % W + 1) / W, WARM_AGAIN),
            (lambda s: 1.0 if s == 0 else min(1.0, s / W), SET_AFTER),
            (lambda s: (s + 1) / self.steps, ALL_THE_WAY),
            (lambda s: math.prod(min(1.0, (t + 1) / W) for t in range(s + 1)), COMPOUNDED),
            (lambda s: (s // W + 1) / self.epochs, BY_EPOCH),
            (lambda s: min(1.0, (s + 1) / math.ceil(SIZE / self.batch_size / N)), PER_RANK_W if N > 1 else ""),
            (lambda s: min(1.0, (s + 1) / (SIZE // self.batch_size)), FLOOR_W),
        ]
        scales = [(k, ""), (1.0, NOT_SCALED), (k * k, SCALED_SQUARED), (k**0.5, SCALED_ROOT), (1 / k, SCALED_AWAY)]
        if N > 1:
            scales += [(k * N, SCALED_TWICE), (k / N, SCALED_BY_PART), (N, SCALED_TWICE)]
        for shape, wrong_shape in shapes:
            for scale, wrong_scale in scales:
                yield [RATE * scale * shape(s) for s in steps], wrong_scale or wrong_shape
        yield [RATE * math.prod(k * min(1.0, (t + 1) / W) for t in range(s + 1)) for s in steps], COMPOUNDED
        yield [RATE * k * W if s == 0 else RATE * k for s in steps], NO_WARM_UP
        yield [RATE * (1 + (k - 1) * min(1.0, (s + 1) / W)) for s in steps], RAMP
        first = RATE * k / W  # set after the step: the first one has the optimizer's own rate
        yield [RATE, *(max(first, self.rate(s)) for s in steps[:-1])], SET_AFTER

    def why_not_validated(self, inputs: set[int]) -> str:
        return f"in validation too, {NOT_SCALED_IMAGES}" if -1 in inputs else super().why_not_validated(inputs)

    def check_state(self, watch: Watch, trained: nn.Module, world: World) -> None:
        model = watch.engines[-1].model
        own = [b.detach().clone() for b in model.buffers() if b.is_floating_point()]
        everyones = [[torch.tensor(b) for b in found] for found in everyone(world, [b.tolist() for b in own])]
        if own:
            floating = [i for i, b in enumerate(trained.buffers()) if b.is_floating_point()]
            kept: Any = trained.each_rank
            mean = [list(trained.buffers())[i] for i in floating]
            each = [[buffers[i] for i in floating] for buffers in kept]
            name = next(name for name, b in model.named_buffers() if b.is_floating_point())
            told = f"{self.when}: after training, {name} is {_few(own[0])}"
            if any(not _near(other, everyones[0]) for other in everyones):
                other = everyones[1 if world.rank == 0 else 0]
                raise Wrong(f"{told} here and {_few(other[0])} on another rank", BN_OWN)
            if not any(_near(own, one) for one in (mean, *each)):
                summed = world.world_size > 1 and _near(own, [world.world_size * b for b in mean])
                raise Wrong(f"{told}, expected {_few(mean[0])}", BN_SUM if summed else BN_OTHER)
            for i, value in zip(floating, own, strict=True):
                list(trained.buffers())[i].copy_(value)
        with watch.engines[-1].full_parameters():
            for (name, got), want in zip(model.named_parameters(), trained.parameters(), strict=True):
                if not torch.allclose(got.detach(), want.detach(), rtol=1e-5, atol=1e-8):
                    raise Wrong(f"{self.when}: after training, {name} differs from one process's", WEIGHTS)


def _of_samples(likely: str) -> str:
    """Lesson 14's words: there a sample has several targets."""
    return likely.replace("tokens", "samples").replace("targets", "samples")


def _equal(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other))


def _near(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9) for a, b in zip(one, other, strict=True))


def _few(tensor: Tensor) -> str:
    return "(" + ", ".join(f"{x:.3g}" for x in tensor.flatten()[:3].tolist()) + ")"


SIZE = 13  # samples to train on; 7 to validate with


def images() -> Split:
    """No two are alike."""
    numbers = torch.arange(SIZE + 7)
    each = numbers[:, None, None, None]
    pixels = (torch.arange(2 * 4 * 4).view(2, 4, 4) * (3 + 2 * each) * 5 + 11 * each) % 256
    targets = (numbers * numbers // 2) % 3
    return Split(pixels[:SIZE].to(torch.uint8), targets[:SIZE], pixels[SIZE:].to(torch.uint8), targets[SIZE:])


class SeenImages(Seen):
    """Convolution, norm, ReLU, head, in float64; with a frozen and an unused parameter."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = norm
        self.head = nn.Linear(4 * 16, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        self.record(images, self.training)
        x = torch.relu(self.norm(self.conv(images.double() if images.is_floating_point() else images)))
        return self.head(x.flatten(1)) + self.frozen


def with_group_norm() -> nn.Module:
    torch.manual_seed(5)
    return SeenImages(nn.GroupNorm(2, 4)).double()


def with_batch_norm() -> nn.Module:
    torch.manual_seed(6)
    return SeenImages(nn.BatchNorm2d(4)).double()


def case(name: str, make: Callable[[], nn.Module], stage: int, batch_size: int, epochs: int, seed: int) -> ImageCase:
    return ImageCase(name, make, stage, batch_size, epochs * math.ceil(SIZE / batch_size), epochs, seed)


CASES = (
    case("a CNN in stage 3", with_group_norm, 3, 5, 2, 3),
    case("a CNN with BatchNorm in stage 0", with_batch_norm, 0, 9, 2, 1),
    case("a CNN in stage 1, a step smaller than the ranks", with_group_norm, 1, 3, 3, 7),
    case("a CNN with BatchNorm in stage 2", with_batch_norm, 2, 9, 1, 4),
)


def check_train(answer: Any, world: World) -> None:
    for each in CASES:
        scripts.check_case(answer, world, each)


_MAIN = """

def main() -> None:  # torchrun --nproc-per-node 4 ex_13_1.py --stage 3 --seeds 0 1 2
    zerolab.init()
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data", help="the folder of CIFAR-10's binary version")
    args = parser.parse_args()
    data = cifar10(args.data) if args.data else digits()
    for seed in args.seeds:
        torch.manual_seed(seed)
        # In float64 rounding stays small, and runs can be compared.
        model = ResNet(channels=data.inputs.shape[1]).double()
        sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)  # the rate for 32 samples
        settings = args.stage, args.epochs, args.batch_size
        losses, accuracy = train(model, data, *settings, sgd, seed)
        if dist.get_rank() == 0:
            print(json.dumps({"seed": seed, "losses": losses, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
"""

_IMPORTS = """\
import argparse
import json
import math
from functools import partial
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from zerolab.lab import ResNet, cifar10, digits
"""

TRAIN_STUB = (
    _IMPORTS
    + '''\
from zerolab.lab.exercises import Todo


def train(model, data, stage, epochs, batch_size, make_optimizer, seed):
    """Train `model` on all ranks; return every step's loss, and the last accuracy.

    data: inputs (samples, channels, height, width) uint8, targets, validation_inputs,
    validation_targets. model(images / 255) gives logits (samples, classes).
    Epoch e takes the samples in the order
    torch.randperm(n, generator=torch.Generator().manual_seed(seed + e)), batch_size of all
    ranks together in each step; the last step of an epoch may have fewer, and counts.
    make_optimizer(params) makes the optimizer; its rate is for 32 samples. Scale it
    linearly with batch_size; in the first epoch, of W steps, step s (from 0) has
    (s + 1) / W of it.
    Loss: the mean over the step's samples. Accuracy: right answers over all validation
    samples. BatchNorm's running statistics must be the same on all ranks by then. Losses
    and accuracy are numbers, the same on every rank.
    """
    raise Todo("13.1")
'''
    + _MAIN
)

TRAIN = (
    _IMPORTS
    + """

def train(model, data, stage, epochs, batch_size, make_optimizer, seed):
    zero = zerolab.shard(model, stage)
    optimizer = make_optimizer(model.parameters())
    rate = optimizer.param_groups[0]["lr"] * batch_size / 32
    mine = slice(zero.rank, None, zero.world_size)
    n, losses = len(data.inputs), []
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        for numbers in order.split(batch_size):
            optimizer.param_groups[0]["lr"] = rate * min(1, (len(losses) + 1) / math.ceil(n / batch_size))
            logits = model(data.inputs[numbers[mine]] / 255)
            loss = F.cross_entropy(logits, data.targets[numbers[mine]], reduction="sum") / len(numbers)
            (zero.world_size * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(total.item())
    zero.broadcast_buffers()
    model.eval()
    with torch.no_grad():
        hits = (model(data.validation_inputs[mine] / 255).argmax(1) == data.validation_targets[mine]).sum()
    dist.all_reduce(hits)
    return losses, hits.item() / len(data.validation_targets)
"""
    + _MAIN
)

_GENERAL = (
    "was built before the model was sharded",
    "grad can be implicitly created only for scalar",
    "does not require grad",
    "must not be None",
    "trying to initialize the default process group twice",
    "does not make this call",
    "did not take part",
    " instead",
    "Work' object",
    "must be Tensor",
    "Invalid function argument. Expected parameter `tensor`",
    "ReduceOp.AVG",
)
ERRORS = {
    "Input type": NOT_SCALED_IMAGES + ", which also makes floats of them",
    "expected scalar type": NOT_SCALED_IMAGES + ", which also makes floats of them",
    "can't be cast to": "num_batches_tracked is a whole number: average the floating-point buffers only",
    "stack expects": "stack needs equal shapes: the ranks' parts differ",
    "Expected input batch_size": "as many logits as targets: take the same numbers of data.inputs and data.targets",
    "Expected more than 1 value per channel": "BatchNorm needs more than one value: this rank's part is too small",
    "list index out of range": "chunk(N) may give fewer than N parts: tensor_split(N) gives N, some of them empty",
    "tuple index out of range": "chunk(N) may give fewer than N parts: tensor_split(N) gives N, some of them empty",
} | {part: said for part, said in scripts.ERRORS_2.items() if part in _GENERAL}

EXERCISES = [
    Exercise(
        id="13.1",
        title="the training script",
        difficulty=2,
        section="Write: the training script",
        check=check_train,
        stub=TRAIN_STUB,
        reference=TRAIN,
        hints=(
            "order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)), the same on every rank; "
            "`for numbers in order.split(batch_size)`: this rank takes numbers[zero.rank :: zero.world_size], which "
            "may be empty. It still runs forward and backward.",
            'F.cross_entropy(..., reduction="sum") / len(numbers); call backward() on world_size times that, and '
            'report its all-reduced sum. Before the step: optimizer.param_groups[0]["lr"] = rate * batch_size / 32 * '
            "min(1, (steps so far + 1) / math.ceil(n / batch_size)).",
            "After the last step: zero.broadcast_buffers(), model.eval(), torch.no_grad(), one forward on "
            "validation_inputs[zero.rank :: zero.world_size] / 255, all-reduce the right answers, divide by all.",
        ),
        exports=("train", "main"),
        errors=ERRORS,
    ),
]
