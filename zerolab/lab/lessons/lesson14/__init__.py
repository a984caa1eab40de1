"""Lesson 14: a mean over all tokens of all ranks, and a training script whose result does not depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.training import play_training
from zerolab.tasks.data import Split
from zerolab.tasks.models import GPT, PairEncoder

# ---------------------------------------------------------------------- 14.1

Lengths = tuple[tuple[int, ...], ...]  # of each rank's sentences
# Rank 0 has neither the most nor the fewest tokens, and no sum of counts is a multiple of the ranks.
UNEVEN: Lengths = ((7, 5), (9, 6, 3), (2, 6), (5, 5, 8))
ONE_EMPTY: Lengths = ((4, 2, 3), (0, 0), (6,), (0, 8))
EMPTY: Lengths = ((0, 0), (0,), (0, 0), (0, 0, 0))
SHORT: Lengths = ((2, 1), (1,), (1, 1), (3,))


def of_sentences(play: Play, lengths: tuple[int, ...], classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's logits and tokens; the last column is padding in half of the cases."""
    numbers = torch.Generator().manual_seed(100 * classes + play.rank)
    T = max(*lengths, 2) + play.rank % 2
    tokens = torch.randint(1, classes, (len(lengths), T), generator=numbers)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 0
    return torch.randn(*tokens.shape, classes, generator=numbers, dtype=torch.float64).to(dtype), tokens


def token_loss(play: Play, *cases: Lengths, classes: int = 64, dtype: torch.dtype = torch.float32) -> None:
    play.loose = 1e-6  # terms cancel in a gradient that is softmax - 1, and counts may be float32
    for number, lengths in enumerate(cases):
        logits, tokens = of_sentences(play, lengths[play.rank % len(lengths)], classes, dtype)
        play.keep(f"`logits`{' of the first call' * (number < len(cases) - 1)}", logits.requires_grad_())
        play.keep(f"`tokens`{' of the first call' * (number < len(cases) - 1)}", tokens)
        slack = 512.0 * play.size  # a few numbers of each rank, however they are sent
        with play.event(f"token_loss(){', again' * (number > 0)}", slack=slack):
            loss = play.code.token_loss(logits, tokens, play.size)
        play.see("the result", torch.zeros(loss.numel()) if isinstance(loss, Tensor) else loss)  # any dtype, (1,) too
        if not isinstance(loss, Tensor):
            return
        play.see("the result requires a gradient", loss.requires_grad)
        with play.event(f"backward(){', again' * (number > 0)}", slack=slack):
            loss.sum().backward()
        shares = play.everyone(loss.sum().item())
        play.see("the mean over the ranks of what they return", torch.tensor(sum(shares) / len(shares), dtype=dtype))


TOKEN_LOSS_BATTERY = (
    Scene("", lambda play: token_loss(play, UNEVEN)),
    Scene("where a rank has nothing but padding", lambda play: token_loss(play, ONE_EMPTY)),
    Scene(
        "in a second call, with other sentences",
        lambda play: token_loss(play, UNEVEN, ONE_EMPTY),
        "right for the first call only: the count of an earlier call was kept, and every batch has its own",
    ),
    Scene(
        "where sentences have one token or two",
        lambda play: token_loss(play, SHORT),
        "a sentence of one token has nothing to predict, and counts nowhere",
    ),
    Scene("in float64", lambda play: token_loss(play, UNEVEN, classes=17, dtype=torch.float64)),
    Scene("in bfloat16", lambda play: token_loss(play, UNEVEN, classes=16, dtype=torch.bfloat16)),
    Scene(
        "where no rank has anything but padding",
        lambda play: token_loss(play, EMPTY),
        "a division by zero: a rank may have nothing but padding, and then all ranks may. clamp(min=1)",
    ),
)

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
    a 0 that still depends on logits.
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


# ---------------------------------------------------------------------- 14.2

NOTHING = -100  # a target with nothing to learn: padding in a language model, a pair without an answer


class SeenPairs(PairEncoder):
    record: Callable[[Tensor, bool], None]

    def forward(self, pairs: Tensor) -> Tensor:
        self.record(pairs, self.training)
        return super().forward(pairs)


class SeenGPT(GPT):
    record: Callable[[Tensor, bool], None]

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


def script(play: Play, make: Callable[[], nn.Module], stage: int, batch_size: int, steps: int) -> None:
    model, data = make(), data_of(make is gpt)

    def train(make_optimizer: Callable[[Any], SGD]) -> Any:
        return play.code.train(model, data, stage, steps, batch_size, make_optimizer)

    play_training(play, model, data, Tensor.short, steps, train)


TRAIN_BATTERY = (
    Scene("a pair encoder in stage 3, 5 samples a step", lambda play: script(play, encoder, 3, 5, 3)),
    Scene("a GPT in stage 0, 6 samples a step", lambda play: script(play, gpt, 0, 6, 2)),
    Scene("a pair encoder in stage 2, 3 samples a step", lambda play: script(play, encoder, 2, 3, 2)),
    Scene("a GPT in stage 1, 14 samples of 13 a step", lambda play: script(play, gpt, 1, 14, 2)),
)

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
        model.dropout.p = 0.0  # which mask a sample gets would depend on N
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

_SUMS = '''

def sums(model, inputs, targets):
    """The sum of the losses, how many answers are right, and how many there are."""
    logits, targets = model(inputs.long()).flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits, targets, reduction="sum")  # leaves out -100
    return loss, (logits.argmax(1) == targets).sum(), (targets != -100).sum()
'''

TRAIN_STUB = (
    _IMPORTS
    + "from zerolab.lab.exercises import Todo\n"
    + _SUMS
    + '''

def train(model, data, stage, steps, batch_size, make_optimizer):
    """Train `model` on all ranks; return every step's loss, and the last accuracy.

    data: inputs, targets, validation_inputs, validation_targets, by sample. Step s learns
    from the batch_size samples from s * batch_size on, counted modulo the number of
    samples, and the ranks divide them. make_optimizer(params) makes the optimizer. Loss:
    the mean over the step's targets; every step has at least one. Accuracy: right ones
    over all validation targets. Both are numbers, the same on every rank and with any
    number of ranks.
    """
    raise Todo("14.2")
'''
    + _MAIN
)

TRAIN = (
    _IMPORTS
    + _SUMS
    + """

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
"""
    + _MAIN
)


EXERCISES = [
    Exercise(
        id="14.1",
        title="a mean over all tokens",
        difficulty=1,
        section="Write: every token weighs the same",
        battery=TOKEN_LOSS_BATTERY,
        stub=TOKEN_LOSS_STUB,
        reference=TOKEN_LOSS,
        hints=(
            "The targets are tokens[:, 1:], and logits[:, :-1] go with them. F.cross_entropy(..., ignore_index=0, "
            'reduction="sum") adds up the losses of this rank\'s tokens.',
            "count = (targets != 0).sum(), and dist.all_reduce(count) makes it the number of tokens of all ranks.",
            "The engine will divide by N: return world_size * total / count.clamp(min=1).",
        ),
        exports=("token_loss",),
    ),
    Exercise(
        id="14.2",
        title="the training script",
        difficulty=2,
        section="Write: the training script",
        battery=TRAIN_BATTERY,
        stub=TRAIN_STUB,
        reference=TRAIN,
        hints=(
            "numbers = torch.arange(step * batch_size, (step + 1) * batch_size) % len(data.inputs); this rank takes "
            "numbers[zero.rank :: zero.world_size], which may be empty. It still runs forward and backward.",
            "sums() gives this rank's sum and count. All-reduce the count, call backward() on "
            "world_size * sum / count, and report the all-reduced sum / count.",
            "Accuracy: model.eval(), torch.no_grad(), sums() of validation_inputs[zero.rank :: zero.world_size] and "
            "their targets, then all-reduce the number of right answers and the number of answers, and divide.",
        ),
        exports=("train", "main"),
    ),
]
