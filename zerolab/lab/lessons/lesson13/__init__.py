"""Lesson 13: a training script for images whose result does not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.training import play_training
from zerolab.tasks.data import Split

# ---------------------------------------------------------------------- 13.1

SIZE = 13  # samples to train on; 7 to validate with


def images() -> Split:
    """No two are alike."""
    numbers = torch.arange(SIZE + 7)
    each = numbers[:, None, None, None]
    pixels = (torch.arange(2 * 4 * 4).view(2, 4, 4) * (3 + 2 * each) * 5 + 11 * each) % 256
    targets = (numbers * numbers // 2) % 3
    return Split(pixels[:SIZE].to(torch.uint8), targets[:SIZE], pixels[SIZE:].to(torch.uint8), targets[SIZE:])


def whole(images: Tensor) -> Tensor:
    """Images of 0 to 1 in whole numbers again, however they were divided."""
    return (images.double() * 255).round() if images.is_floating_point() else images


class SeenImages(nn.Module):
    """Convolution, norm, ReLU, head, in float64; with a frozen and an unused parameter.

    With BatchNorm, only evaluation uses its output. So the losses do not depend on which of a step's samples a rank
    takes, and the running statistics do.
    """

    record: Callable[[Tensor, bool], None]

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = norm
        self.head = nn.Linear(4 * 16, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.left: list[Tensor] = []  # BatchNorm's statistics after the last forward that learns
        self.used: list[Tensor] = []  # those of the first validation after it

    def forward(self, images: Tensor) -> Tensor:
        self.record(images, self.training)
        x = self.conv(whole(images) / 255 if images.is_floating_point() else images)
        if self.training and isinstance(self.norm, nn.BatchNorm2d):
            self.norm(x.detach())
            if torch.is_grad_enabled():
                self.left, self.used = [one.clone() for one in statistics_of(self)], []
        else:
            self.used = self.used or [one.clone() for one in statistics_of(self)]
            x = self.norm(x)
        return self.head(torch.relu(x).flatten(1)) + self.frozen


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [buffer.detach() for buffer in model.buffers() if buffer.is_floating_point()]


def with_group_norm() -> nn.Module:
    torch.manual_seed(5)
    return SeenImages(nn.GroupNorm(2, 4)).double()


def with_batch_norm() -> nn.Module:
    torch.manual_seed(6)
    return SeenImages(nn.BatchNorm2d(4)).double()


def script(play: Play, make: Callable[[], nn.Module], stage: int, batch_size: int, epochs: int, seed: int) -> None:
    model, data = make(), images()
    assert isinstance(model, SeenImages)
    shares = make is with_batch_norm

    def train(make_optimizer: Callable[[Any], SGD]) -> Any:
        return play.code.train(model, data, stage, epochs, batch_size, make_optimizer, seed)

    @torch.no_grad()
    def accuracy_of() -> float:
        model.record = lambda images, training: None
        guess = model.eval()(data.validation_inputs / 255).argmax(1)
        return (guess == data.validation_targets).double().mean().item()

    steps = epochs * math.ceil(SIZE / batch_size)
    play_training(play, model, data, lambda row: whole(row).int(), steps, train, accuracy_of if shares else None)
    if shares:
        statistics(play, model)


def statistics(play: Play, model: SeenImages) -> None:
    """BatchNorm's running statistics at the validation: on all ranks a rank's, or the mean of the ranks'."""
    own = torch.cat(model.used or statistics_of(model))
    everyones = [torch.tensor(one, dtype=own.dtype) for one in play.everyone(own.tolist())]
    ends = torch.cat(model.left or [own]).tolist()
    left = torch.tensor(play.everyone(ends), dtype=own.dtype)
    other = next((rank for rank, one in enumerate(everyones) if not torch.allclose(one, own, rtol=1e-6)), play.rank)
    said = f"they begin with {own[0]:.4g} here and with {everyones[other][0]:.4g} on rank {other}"
    play.see("BatchNorm's running statistics are the same on all ranks", other == play.rank, said)
    right = any(torch.allclose(own, one, rtol=1e-6) for one in [left.mean(0), *left])
    said = f"they begin with {own[0]:.4g}, and the ranks' mean with {left[:, 0].mean():.4g}"
    play.see("BatchNorm's running statistics are a rank's, or the ranks' mean", right, said)
    play.clue("statistics", f"{(own.sum() / left.mean(0).sum()).item() / play.size:.3g} N")


BUFFERS = (
    "BatchNorm's running statistics come from each rank's own samples: share them after the last step, before "
    "validation, with zero.broadcast_buffers() or as their mean"
)
TRAIN_BATTERY = (
    Scene("a CNN in stage 3, 2 epochs of 13 images, 5 a step", lambda play: script(play, with_group_norm, 3, 5, 2, 3)),
    Scene(
        "a CNN with BatchNorm in stage 0, 2 epochs of 13 images, 9 a step",
        lambda play: script(play, with_batch_norm, 0, 9, 2, 1),
        BUFFERS,
    ),
    Scene(
        "a CNN in stage 1, an epoch of 13 images, 3 a step",
        lambda play: script(play, with_group_norm, 1, 3, 1, 7),
        "a step may have fewer samples than there are ranks: a rank without any runs forward and backward all the same",
    ),
    Scene(
        "a CNN with BatchNorm in stage 2, an epoch of 13 images, 9 a step",
        lambda play: script(play, with_batch_norm, 2, 9, 1, 4),
        BUFFERS,
    ),
)

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
    validation_targets. model(images / 255), which casts its input to its own dtype, gives
    logits (samples, classes).
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

EXERCISES = [
    Exercise(
        id="13.1",
        title="the training script",
        difficulty=2,
        section="Write: the training script",
        battery=TRAIN_BATTERY,
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
    ),
]
