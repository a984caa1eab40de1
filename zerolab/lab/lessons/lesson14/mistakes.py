"""Lesson 14: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson14 import TOKEN_LOSS, TRAIN

MEAN_OF_MEANS = (
    "the mean of means: each rank divided by its own number of tokens. A token must weigh the same on "
    "every rank, so divide by the number of tokens of all ranks"
)
FACTOR_N = (
    "1/N of the gradient: the engine will average the gradients over the ranks, so the sum that this rank"
    " adds is divided by N once more. Multiply by world_size"
)
A_SUM = "a sum, which grows with the batch: divide by the number of tokens of all ranks"
PADDING_COUNTED = "padding counted as tokens: divide by the number of targets that are not 0"
NO_GRADIENT = "the loss has no gradient any more: .item(), .detach() or torch.tensor(...) cut it off"
NOT_EVERYONE = "not every rank makes this call: all take part, also one that has nothing to add"
NO_RETURN = "the function returns nothing: `return` is missing"
OWN_ZERO = (
    "this 0 does not depend on the logits, so backward() ends before it reaches the model, in whose collectives the "
    "other ranks may wait: the sum of no losses is a 0 that does"
)
NOT_SHIFTED = (
    "the labels are not shifted: logits[:, t] says what comes at t + 1, so compare logits[:, :-1] with tokens[:, 1:]"
)
SHORT_WEIGHS_MORE = (
    "a mean for each sentence, and then a mean of these: a token of a short sentence weighs more than one of a long. "
    "Add up the losses of all tokens, and divide once"
)
MEAN_OF_MEANS_2 = "the mean of means: each rank divided by its own number of targets. Divide by the number of all ranks"
SCALE_N = (
    "the loss is right, and the gradient is 1/N of what it should be: the engine averages over the ranks,"
    " so call backward() on N times this rank's part. (With Adam this hardly shows: it divides by the "
    "size of the gradient)"
)
COUNT_ALL = "targets of -100 were counted: they have nothing to learn, and weigh nothing"
ALL_TAKE_PART = (
    "the ranks make different calls. All run as many forwards and backwards, with the same collectives, "
    "also one that has nothing to learn from"
)

# ---------------------------------------------------------------------- 14.1

TOKEN_LOSS_MASKED = """\
import torch
import torch.distributed as dist


def token_loss(logits, tokens, world_size):
    chances = logits[:, :-1].log_softmax(dim=-1)
    targets = tokens[:, 1:]
    there = targets > 0
    losses = -chances.gather(2, targets.unsqueeze(2)).squeeze(2)
    n = torch.tensor([float(there.sum())])
    work = dist.all_reduce(n, async_op=True)
    own = losses[there].sum()
    work.wait()
    return own / max(n.item(), 1.0) * world_size
"""

TOKEN_LOSS_WEIGHTED_MEAN = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F


def token_loss(logits, tokens, world_size):
    labels = torch.where(tokens == 0, -100, tokens)[:, 1:].reshape(-1)
    counts = [None] * world_size
    dist.all_gather_object(counts, int((labels >= 0).sum()))
    if counts[dist.get_rank()] == 0:
        return logits.sum() * 0.0
    mean = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels)
    return mean * counts[dist.get_rank()] * world_size / sum(counts)
"""

TOKEN_LOSS_THROUGH_AUTOGRAD = """\
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed


def token_loss(logits, tokens, world_size):
    mask = tokens[:, 1:] != 0
    chances = logits[:, :-1].log_softmax(-1, dtype=torch.float64)
    losses = -torch.take_along_dim(chances, tokens[:, 1:, None], 2)[..., 0]
    both = torch.stack([torch.where(mask, losses, 0).sum(), mask.sum()])
    total, count = distributed.all_reduce(both)
    return total / count.detach().clamp(min=1)
"""

TOKEN_LOSS_AVERAGE_COUNT = """\
import torch.distributed as dist
import torch.nn.functional as F


def token_loss(logits, tokens, world_size):
    each = F.cross_entropy(logits.transpose(1, 2)[:, :, :-1], tokens[:, 1:], reduction="none")
    mask = tokens[:, 1:].ne(0)
    average = mask.sum().float()
    dist.all_reduce(average)
    average /= world_size
    return (each * mask).sum() / average.clamp_min(1 / world_size)
"""

_TARGETS = "targets = tokens[:, 1:].flatten()"
_LOGITS = "logits[:, :-1].flatten(0, 1)"
_COUNT = "count = (targets != 0).sum()"
_REDUCE = "dist.all_reduce(count)  # now the number of tokens of all ranks"
_RETURN = "return world_size * total / count.clamp(min=1)"

TOKEN_LOSS_MISTAKES = {
    "mean of means": Mistake(
        edit(TOKEN_LOSS, f"    {_REDUCE}\n", "", "world_size * total", "total"),
        MEAN_OF_MEANS,
    ),
    "torch's mean": Mistake(
        edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="mean"', _RETURN, "return total"),
        MEAN_OF_MEANS,
    ),
    "own count times N": Mistake(edit(TOKEN_LOSS, f"    {_REDUCE}\n", ""), MEAN_OF_MEANS),
    "factor N forgotten": Mistake(edit(TOKEN_LOSS, "world_size * total", "total"), FACTOR_N),
    "divided by N": Mistake(
        edit(TOKEN_LOSS, "world_size * total", "total / world_size"),
        ("1/N^2 of the gradient: divided by world_size. The engine does that already, so multiply by it instead"),
    ),
    "N twice": Mistake(
        edit(TOKEN_LOSS, "world_size * total", "world_size**2 * total"),
        ("N times the gradient: multiplied by world_size twice, or divided by a count that is N times too small"),
    ),
    "softmax first": Mistake(
        edit(TOKEN_LOSS, "logits[:, :-1]", "logits.softmax(-1)[:, :-1]"),
        "cross_entropy takes logits as they are, and applies the softmax itself",
    ),
    "divided twice": Mistake(
        edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="mean"'),
        "divided twice: reduction='mean' has divided by this rank's count already, so use 'sum'",
    ),
    "the first count kept": Mistake(
        edit(
            TOKEN_LOSS,
            "def token_loss",
            "COUNTS = []\n\n\ndef token_loss",
            _REDUCE,
            "if not COUNTS:\n        dist.all_reduce(count)\n        COUNTS.append(count)\n    count = COUNTS[0]",
        ),
        "right for the first call only: the count of an earlier call was kept, and every batch has its own",
    ),
    "in bfloat16": Mistake(
        edit(TOKEN_LOSS, _LOGITS, f"{_LOGITS}.bfloat16()"),
        "nearly right: the loss is computed in less precision than the logits have",
    ),
    "sentence by sentence": Mistake(
        edit(
            TOKEN_LOSS,
            _RETURN,
            "rows = [F.cross_entropy(x[:-1], y[1:], ignore_index=0) for x, y in zip(logits, tokens) if y.any()]\n"
            "    return torch.stack([*rows, 0 * logits.sum()]).sum() / len(logits)",
        ),
        SHORT_WEIGHS_MORE,
    ),
    "sentence by sentence, of all ranks": Mistake(
        edit(
            TOKEN_LOSS,
            'reduction="sum"\n    )',
            'reduction="none"\n    )\n    rows = (tokens[:, 1:] != 0).sum(1)\n'
            "    total = (total.view(len(tokens), -1).sum(1) / rows.clamp(min=1)).sum()",
            _COUNT,
            "count = torch.tensor(len(tokens))",
        ),
        SHORT_WEIGHS_MORE,
    ),
    "a sum": Mistake(edit(TOKEN_LOSS, _RETURN, "return total"), A_SUM),
    "N times the sum": Mistake(edit(TOKEN_LOSS, _RETURN, "return world_size * total"), A_SUM),
    "padding counted": Mistake(edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(targets.numel())"), PADDING_COUNTED),
    "padding learnt and counted": Mistake(
        edit(TOKEN_LOSS, "ignore_index=0, ", "", _COUNT, "count = torch.tensor(targets.numel())"),
        "padding is learnt, and counted: where the target is 0 there is nothing to predict, so it is in neither sum",
    ),
    "padding counted, its own": Mistake(
        edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(tokens.numel())"),
        PADDING_COUNTED,
    ),
    "first tokens counted": Mistake(
        edit(TOKEN_LOSS, _COUNT, "count = (tokens != 0).sum()"),
        ("the first token of each sentence was counted, but nobody predicts it: count the targets, tokens[:, 1:]"),
    ),
    "inputs counted": Mistake(
        edit(TOKEN_LOSS, _COUNT, "count = (tokens[:, :-1] != 0).sum()"),
        (
            "the inputs were counted, and of a padded sentence the last token is an input, but predicts only "
            "padding: count the targets, tokens[:, 1:]"
        ),
    ),
    "clamped before the sum": Mistake(
        edit(TOKEN_LOSS, _COUNT, f"{_COUNT}.clamp(min=1)"),
        (
            "each rank's count was raised to 1 before the sum, so a rank with nothing but padding adds a token "
            "that is not there: clamp(min=1) belongs behind the all-reduce"
        ),
    ),
    "sentences counted": Mistake(
        edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(len(tokens))"),
        ("divided by the number of sentences: a long sentence has more tokens than a short one, and counts more"),
    ),
    "the largest count": Mistake(
        edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, dist.ReduceOp.MAX)"),
        "the counts were all-reduced with MAX: the number of tokens of all ranks is their sum",
    ),
    "the smallest count": Mistake(
        edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, op=dist.ReduceOp.MIN)"),
        "the counts were all-reduced with MIN: the number of tokens of all ranks is their sum",
    ),
    "the product": Mistake(
        edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, dist.ReduceOp.PRODUCT)"),
        "the counts were all-reduced with PRODUCT: the number of tokens of all ranks is their sum",
    ),
    "padding learnt": Mistake(
        edit(TOKEN_LOSS, "ignore_index=0, ", ""),
        "padding is learnt: where the target is 0 there is nothing to predict, ignore_index=0",
    ),
    "labels not shifted": Mistake(
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens.flatten()", _LOGITS, "logits.flatten(0, 1)"),
        NOT_SHIFTED,
    ),
    "each with its own token": Mistake(edit(TOKEN_LOSS, _LOGITS, "logits[:, 1:].flatten(0, 1)"), NOT_SHIFTED),
    "each with its own token, but the last": Mistake(
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens[:, :-1].flatten()"), NOT_SHIFTED
    ),
    "shifted back": Mistake(
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens[:, :-1].flatten()", _LOGITS, "logits[:, 1:].flatten(0, 1)"),
        "shifted the wrong way: logits[:, t] says what comes at t + 1, and here it is compared with t - 1",
    ),
    "rolled": Mistake(
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens.roll(-1, 1).flatten()", _LOGITS, "logits.flatten(0, 1)"),
        "rolled, not shifted: roll() puts the first token behind the last, where nothing is to be predicted",
    ),
    "shifted on one side": Mistake(
        edit(TOKEN_LOSS, _LOGITS, "logits.flatten(0, 1)"),
        "as many logits as targets: logits[:, :-1] go with tokens[:, 1:]",
    ),
    "not flat": Mistake(
        edit(TOKEN_LOSS, f"{_LOGITS}, targets", "logits[:, :-1], tokens[:, 1:]"),
        "cross_entropy wants the classes second: flatten logits to (B * T, V), tokens to (B * T,)",
    ),
    "no clamp": Mistake(
        edit(TOKEN_LOSS, "count.clamp(min=1)", "count"),
        "a division by zero: a rank may have nothing but padding, and then all ranks may. clamp(min=1)",
    ),
    "detached": Mistake(edit(TOKEN_LOSS, _RETURN, "return world_size * total.detach() / count"), NO_GRADIENT),
    "a number": Mistake(edit(TOKEN_LOSS, _RETURN, "return world_size * total.item() / count.item()"), NO_GRADIENT),
    "the loss all-reduced": Mistake(
        edit(TOKEN_LOSS, _RETURN, "dist.all_reduce(total)\n    return total / count.clamp(min=1)"),
        FACTOR_N,
    ),
    "the loss all-reduced, and times N": Mistake(
        edit(TOKEN_LOSS, _RETURN, f"dist.all_reduce(total.detach())\n    {_RETURN}"),
        "the gradient is right, and the loss has the losses of all ranks in it, times N. This rank's own are enough: "
        "the mean over the ranks is taken later",
    ),
    "a zero of its own": Mistake(
        edit(TOKEN_LOSS, _RETURN, f"if count == 0:\n        return torch.zeros((), requires_grad=True)\n    {_RETURN}"),
        OWN_ZERO,
    ),
    "a zero without a gradient": Mistake(
        edit(TOKEN_LOSS, _RETURN, f"if count == 0:\n        return torch.zeros(())\n    {_RETURN}"), OWN_ZERO
    ),
    "each rank a zero of its own": Mistake(
        edit(
            TOKEN_LOSS,
            _RETURN,
            f"if not targets.any():\n        return torch.zeros((), requires_grad=True)\n    {_RETURN}",
        ),
        OWN_ZERO,
    ),
    "the average count, rounded": Mistake(
        edit(TOKEN_LOSS, _RETURN, "return total / (count // world_size).clamp(min=1)"),
        "the average number of tokens was rounded down: divide by their sum, or by an average that is a float",
    ),
    "all logits gathered": Mistake(
        edit(
            TOKEN_LOSS,
            "    total =",
            "    everyone = [None] * world_size\n    dist.all_gather_object(everyone, (logits.detach(), tokens))\n"
            "    total =",
        ),
        "one number of each rank is enough: its count. Logits and tokens stay where they are",
    ),
    "a forgotten wait": Mistake(
        edit(TOKEN_LOSS, "dist.all_reduce(count)", "dist.all_reduce(count, async_op=True)"),
        (
            "a collective with async_op=True has only been started when it returns: wait() for it before its "
            "result is used"
        ),
    ),
    "not a tensor": Mistake(
        edit(TOKEN_LOSS, _COUNT, "count = int((targets != 0).sum())"),
        "all_reduce() takes a tensor and fills it: torch.tensor(...) makes one of a number",
    ),
    "nothing returned": Mistake(edit(TOKEN_LOSS, _RETURN, "world_size * total / count"), NO_RETURN),
    "no reduction": Mistake(
        edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="none"'),
        "one number is needed to call backward() on: the sum over the tokens, divided by their number",
    ),
    "of this rank alone": Mistake(
        edit(TOKEN_LOSS, f"    {_REDUCE}\n", "    if dist.get_rank() == 0:\n        dist.all_reduce(count)\n"),
        NOT_EVERYONE,
    ),
    "fewer tokens than ranks": Mistake(
        edit(TOKEN_LOSS_AVERAGE_COUNT, "clamp_min(1 / world_size)", "clamp_min(1)"),
        "the average count may be less than 1, where there are fewer tokens than ranks: clamp(min=1) is for the sum",
    ),
    "rank 0's count": Mistake(
        edit(TOKEN_LOSS, "dist.all_reduce(count)", "dist.broadcast(count, 0)"),
        "every rank divides by rank 0's count: the number of tokens of all ranks is their sum",
    ),
    "waits too late": Mistake(
        edit(
            TOKEN_LOSS,
            "dist.all_reduce(count)",
            "work = dist.all_reduce(count, async_op=True)",
            _RETURN,
            "loss = world_size * total / count.clamp(min=1)\n    work.wait()\n    return loss",
        ),
        "the count was used before wait() returned, and so without the others' tokens: first wait, then divide",
    ),
    "takes part if it has tokens": Mistake(
        edit(TOKEN_LOSS, "    dist.all_reduce(count)", "    if count > 0:\n        dist.all_reduce(count)"),
        NOT_EVERYONE,
    ),
    "counts all that came": Mistake(
        "seen = 0\n\n\n"
        + edit(TOKEN_LOSS, f"    {_COUNT}\n", f"    global seen\n    {_COUNT} + seen\n    seen = count.clone()\n"),
        "right for the first call only: tokens of earlier calls are counted too, and every batch has its own",
    ),
    "the last token left out": Mistake(
        edit(TOKEN_LOSS, "tokens[:, 1:]", "tokens[:, 1:-1]", "logits[:, :-1]", "logits[:, :-2]"),
        "the last column was left out: of T tokens, T - 1 are predicted, logits[:, :-1] and tokens[:, 1:]",
    ),
    "nll of logits": Mistake(
        edit(TOKEN_LOSS, "F.cross_entropy(", "F.nll_loss("),
        "nll_loss takes log_softmax(logits): cross_entropy does both",
    ),
    "four ranks for sure": Mistake(
        edit(TOKEN_LOSS, "world_size * total", "4 * total"), "multiplied by a fixed number: use the argument world_size"
    ),
    "writes into the logits": Mistake(
        edit(TOKEN_LOSS, "    targets", "    with torch.no_grad():\n        logits[tokens == 0] = 0\n    targets"),
        "the logits or the tokens have changed, and the caller still needs them: work on a copy",
    ),
    "two numbers": Mistake(
        edit(TOKEN_LOSS, _RETURN, "return world_size * total, count"),
        "one number is needed to call backward() on: the sum over the tokens, divided by their number",
    ),
}

# ---------------------------------------------------------------------- 14.2

TRAIN_IN_CHUNKS = edit(
    TRAIN,
    "mine = slice(zero.rank, None, zero.world_size)\n    losses",
    "rank, N = zero.rank, zero.world_size\n    losses",
    "        loss, _, count = sums(model, data.inputs[numbers[mine]], data.targets[numbers[mine]])\n"
    "        dist.all_reduce(count)\n",
    "        count = (data.targets[numbers] != -100).sum()\n"
    "        part = numbers.tensor_split(N)[rank]\n"
    "        loss, _, _ = sums(model, data.inputs[part], data.targets[part])\n",
    "zero.world_size * loss",
    "N * loss",
    "data.validation_inputs[mine], data.validation_targets[mine]",
    "data.validation_inputs.tensor_split(N)[rank], data.validation_targets.tensor_split(N)[rank]",
)

TRAIN_WITH_A_DUMMY = edit(
    TRAIN,
    "        loss, _, count = sums(model, data.inputs[numbers[mine]], data.targets[numbers[mine]])\n",
    "        own = numbers[mine]\n"
    "        weight = min(1, len(own))\n"
    "        own = own if weight else numbers[:1]\n"
    "        loss, _, count = (weight * x for x in sums(model, data.inputs[own], data.targets[own]))\n",
)

TRAIN_BY_HAND = (
    TRAIN[: TRAIN.index("\n\ndef sums")]
    + """

def train(model, data, stage, steps, batch_size, make_optimizer):
    engine = (zerolab.DDP, zerolab.Zero1, zerolab.Zero2, zerolab.Zero3)[stage](model)
    rank, world = dist.get_rank(), dist.get_world_size()
    opt, history, position = make_optimizer(list(model.parameters())), [], 0
    for _ in range(steps):
        opt.zero_grad(set_to_none=False)
        batch = [(position + i) % len(data.targets) for i in range(batch_size)]
        position += batch_size
        own = batch[rank * batch_size // world : (rank + 1) * batch_size // world]
        logits = model(data.inputs[own].long())
        labels = data.targets[own].reshape(-1)
        mask = labels >= 0
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.clamp(min=0), reduction="none")
        parts = torch.stack([(each * mask).sum().detach(), mask.sum().to(each.dtype)])
        dist.all_reduce(parts)
        ((each * mask).sum() * (world / parts[1])).backward()
        opt.step()
        history.append(float(parts[0] / parts[1]))
    engine.model.eval()
    with torch.inference_mode():
        guess = model(data.validation_inputs.long()).argmax(-1)
    there = data.validation_targets != -100
    return history, float((guess == data.validation_targets)[there].double().mean())


def main():
    zerolab.init()
"""
)

TRAIN_MICRO = edit(
    TRAIN,
    "        loss, _, count = sums(model, data.inputs[numbers[mine]], data.targets[numbers[mine]])\n"
    "        dist.all_reduce(count)\n"
    "        (zero.world_size * loss / count).backward()\n",
    "        count = (data.targets[numbers] != -100).sum()\n"
    "        first, second = numbers[mine].tensor_split(2)\n"
    "        with zero.no_sync():\n"
    "            begin, _, _ = sums(model, data.inputs[first], data.targets[first])\n"
    "            (zero.world_size * begin / count).backward()\n"
    "        loss, _, _ = sums(model, data.inputs[second], data.targets[second])\n"
    "        (zero.world_size * loss / count).backward()\n",
    "total = loss.detach()",
    "total = loss.detach() + begin.detach()",
)

_SUMS = "loss, _, count = sums(model, data.inputs[numbers[mine]], data.targets[numbers[mine]])"
_BACKWARD = "(zero.world_size * loss / count).backward()"
_REPORT = "losses.append((total / count).item())"
_VALIDATE = "_, right, count = sums(model, data.validation_inputs[mine], data.validation_targets[mine])"
_HITS = "    dist.all_reduce(right)\n    dist.all_reduce(count)\n"

TRAIN_MISTAKES = {
    "mean of means": Mistake(
        edit(TRAIN, _BACKWARD, "(loss / (data.targets[numbers[mine]] != -100).sum().clamp(min=1)).backward()"),
        MEAN_OF_MEANS_2,
    ),
    "own count": Mistake(edit(TRAIN, "        dist.all_reduce(count)\n        (", "        ("), MEAN_OF_MEANS_2),
    "means reported": Mistake(
        edit(
            TRAIN,
            "total = loss.detach()",
            "total = loss.detach() / (data.targets[numbers[mine]] != -100).sum().clamp(min=1)",
            _REPORT,
            "losses.append(total.item() / zero.world_size)",
        ),
        MEAN_OF_MEANS_2,
    ),
    "factor N forgotten": Mistake(edit(TRAIN, _BACKWARD, "(loss / count).backward()"), SCALE_N),
    "divided by N": Mistake(edit(TRAIN, _BACKWARD, "(loss / count / zero.world_size).backward()"), SCALE_N),
    "N twice": Mistake(
        edit(TRAIN, _BACKWARD, "(zero.world_size**2 * loss / count).backward()"),
        ("the gradient is N times too large: multiplied by N, and by something that is N times too large already"),
    ),
    "a sum": Mistake(edit(TRAIN, _BACKWARD, "(zero.world_size * loss).backward()"), A_SUM),
    "padding counted": Mistake(
        edit(TRAIN, "(targets != -100).sum()", "torch.tensor(targets.numel())"),
        COUNT_ALL,
    ),
    "samples counted": Mistake(
        edit(TRAIN, "dist.all_reduce(count)\n        (", "count = len(numbers)\n        ("),
        COUNT_ALL,
    ),
    "each rank the same": Mistake(
        edit(TRAIN, "numbers[mine]", "numbers[: max(1, batch_size // zero.world_size)]"),
        (
            "each rank the same samples: a rank takes its own part of the step, numbers[rank::N] or "
            "numbers.tensor_split(N)[rank]"
        ),
    ),
    "all samples on every rank": Mistake(
        edit(TRAIN, "numbers[mine]", "numbers"),
        "every rank computes all samples of the step, N times the work: a rank takes its part of them",
    ),
    "the rest left out": Mistake(
        edit(TRAIN, "numbers[mine]", "numbers[: batch_size // zero.world_size * zero.world_size][mine]"),
        ("some samples are left out: where batch_size does not divide by N evenly, the rest belongs to the step too"),
    ),
    "another order on each rank": Mistake(
        edit(
            TRAIN,
            "        loss, _, count",
            "        generator = torch.Generator().manual_seed(zero.rank)\n"
            "        numbers = numbers[torch.randperm(len(numbers), generator=generator)]\n"
            "        loss, _, count",
        ),
        "some samples are left out, others come twice: all ranks must cut one and the same order",
    ),
    "in percent": Mistake(
        edit(TRAIN, "(right / count).item()", "100 * (right / count).item()"), "a share is asked for, not a percentage"
    ),
    "filled up": Mistake(
        edit(
            TRAIN,
            "        loss, _, count",
            "        short = -len(numbers) % zero.world_size\n"
            "        numbers = torch.cat([numbers, numbers[:short]])\n"
            "        loss, _, count",
        ),
        ("samples come twice, as with DistributedSampler, which fills up the last ranks: all others must come once"),
    ),
    "does not go round": Mistake(
        edit(
            TRAIN,
            "torch.arange(step * batch_size, (step + 1) * batch_size) % len(data.inputs)",
            "torch.arange(len(data.inputs))[step * batch_size : (step + 1) * batch_size]",
        ),
        "after the last sample the first one follows: (step * batch_size + i) % len(data.inputs)",
    ),
    "starts again": Mistake(
        edit(
            TRAIN,
            "for step in range(steps):\n",
            "for each in range(steps):\n        step = each % (len(data.inputs) // batch_size or 1)\n",
        ),
        "after the last sample the first one follows: (step * batch_size + i) % len(data.inputs)",
    ),
    "batch_size per rank": Mistake(
        edit(
            TRAIN,
            "torch.arange(step * batch_size, (step + 1) * batch_size)",
            "torch.arange(step * batch_size * zero.world_size, (step + 1) * batch_size * zero.world_size)",
        ),
        "step s takes the samples from s * batch_size on, of all ranks together",
    ),
    "the loss of this rank": Mistake(
        edit(TRAIN, "        dist.all_reduce(total)\n", ""),
        "that is this rank's part of the loss: the mean over all ranks must be reported",
    ),
    "N times the loss": Mistake(
        edit(TRAIN, "total = loss.detach()", "total = zero.world_size * loss.detach()"),
        "N times too large: the loss was reported with the factor N that only backward() needs",
    ),
    "loss averaged twice": Mistake(
        edit(TRAIN, _REPORT, "losses.append((total / count).item() / zero.world_size)"),
        (
            "1/N of it: the parts of the ranks are to be added up, not averaged, once they are divided by the "
            "whole count"
        ),
    ),
    "gradients never zeroed": Mistake(
        edit(TRAIN, "        optimizer.zero_grad()\n", ""),
        "zero_grad() is missing, or comes between backward() and step(): gradients must start from nothing",
    ),
    "no step": Mistake(
        edit(TRAIN, "        optimizer.step()\n", ""),
        "the optimizer never stepped: each step ends with optimizer.step(), once",
    ),
    "always stage 2": Mistake(
        edit(TRAIN, "zerolab.shard(model, stage)", "zerolab.Zero2(model)"),
        "the engine is always of stage 2: zerolab.shard(model, stage) takes the stage that is asked for",
    ),
    "not sharded": Mistake(
        edit(
            TRAIN,
            "zero = zerolab.shard(model, stage)\n",
            "class zero:\n        rank, world_size = dist.get_rank(), dist.get_world_size()\n\n",
        ),
        "shard the model first: zero = zerolab.shard(model, stage)",
    ),
    "optimizer first": Mistake(
        edit(
            TRAIN,
            "    zero = zerolab.shard(model, stage)\n    optimizer = make_optimizer(model.parameters())\n",
            "    optimizer = make_optimizer(model.parameters())\n    zero = zerolab.shard(model, stage)\n",
        ),
        "shard first: zero = zerolab.shard(model, stage), then the optimizer",
    ),
    "int16": Mistake(
        edit(TRAIN, "model(inputs.long())", "model(inputs)"),
        "the tokens are int16 to save memory: model(inputs.long())",
    ),
    "no eval": Mistake(
        edit(TRAIN, "    model.eval()\n", ""),
        "model.eval() is missing: accuracy is measured with dropout or BatchNorm as in training",
    ),
    "eval from the start": Mistake(
        edit(TRAIN, "    model.eval()\n", "", "    losses = []\n", "    losses = []\n    model.eval()\n"),
        "model.train() is missing: after eval() the model trains without dropout, and BatchNorm stands still",
    ),
    "validated with training data": Mistake(
        edit(
            TRAIN,
            "data.validation_inputs[mine], data.validation_targets[mine]",
            "data.inputs[mine], data.targets[mine]",
        ),
        "validated with training data: it was there in training, and so the accuracy is too good",
    ),
    "the mean of accuracies": Mistake(
        edit(
            TRAIN,
            _HITS + "    return losses, (right / count).item()",
            "    rate = right / count.clamp(min=1)\n    dist.all_reduce(rate)\n"
            "    return losses, rate.item() / zero.world_size",
        ),
        ("the mean of the ranks' accuracies: their parts differ in size. Add up hits and counts, then divide once"),
    ),
    "this rank's accuracy": Mistake(
        edit(TRAIN, _HITS, ""), "that is the accuracy of this rank's part: add up the hits and the counts of all ranks"
    ),
    "unlabelled are wrong": Mistake(
        edit(TRAIN, "(right / count).item()", "(right / data.validation_targets.numel()).item()"),
        "targets of -100 were counted as wrong: they have no answer, and are no part of the accuracy",
    ),
    "known to rank 0": Mistake(
        edit(
            TRAIN,
            "return losses, (right / count).item()",
            "return losses, (right / count).item() if zero.rank == 0 else 0.0",
        ),
        "only rank 0 knows the accuracy: every rank returns it, with the hits and the counts of all ranks",
    ),
    "validated with a sampler": Mistake(
        edit(
            TRAIN,
            "    model.eval()\n",
            "    model.eval()\n    from torch.utils.data.distributed import DistributedSampler\n"
            "    mine = list(DistributedSampler(data.validation_inputs, shuffle=False))\n",
        ),
        "some validation samples were counted twice, as with DistributedSampler, which fills up the last ranks: each "
        "once",
    ),
    "hits of all, count of one": Mistake(
        edit(TRAIN, _HITS, "    dist.all_reduce(right)\n"),
        "the counts of all ranks were divided by this rank's count, or the other way round: add up both",
    ),
    "hits of one, count of all": Mistake(
        edit(TRAIN, _HITS, "    dist.all_reduce(count)\n"),
        "this rank's right answers were divided by the count of all ranks: add up both",
    ),
    "one forward a sample": Mistake(
        edit(
            TRAIN,
            _VALIDATE,
            "right = count = torch.tensor(0)\n"
            "        for i in range(zero.rank, len(data.validation_inputs), zero.world_size):\n"
            "            _, r, c = sums(model, data.validation_inputs[i : i + 1], data.validation_targets[i : i + 1])\n"
            "            right, count = right + r, count + c",
        ),
        ALL_TAKE_PART,
    ),
    "skips a step without samples": Mistake(
        edit(
            TRAIN,
            f"        {_SUMS}\n",
            f"        if len(numbers[mine]) == 0:\n            continue\n        {_SUMS}\n",
        ),
        ALL_TAKE_PART,
    ),
    "the mean of nothing": Mistake(
        edit(
            TRAIN,
            'reduction="sum")  # leaves out -100',
            'reduction="mean") * (targets != -100).sum()',
        ),
        "a mean of nothing is nan: where a step has fewer samples than ranks, some have none. Take the sum",
    ),
    "nothing returned": Mistake(edit(TRAIN, "    return losses, (right / count).item()\n", ""), NO_RETURN),
    "only the accuracy": Mistake(
        edit(TRAIN, "return losses, (right", "return (right"),
        "only the accuracy is returned: the docstring asks for losses, accuracy",
    ),
    "another order": Mistake(
        edit(
            TRAIN,
            f"        {_SUMS}\n",
            "        mixed = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(step))\n"
            f"        numbers = mixed[numbers]\n        {_SUMS}\n",
        ),
        "samples come in another order: step s learns from the samples from s * batch_size on, as they lie",
    ),
    "clipped": Mistake(
        edit(TRAIN, "optimizer.step()\n", "zero.clip_grad_norm_(0.1)\n        optimizer.step()\n"),
        "the gradient was changed before the step: nobody asked for clipping or decay",
    ),
    "the loss after the step": Mistake(
        edit(
            TRAIN,
            "        total = loss.detach()\n",
            f"        with torch.no_grad():\n            {_SUMS}\n        dist.all_reduce(count)\n"
            "        total = loss.detach()\n",
        ),
        "that is the loss after the step, from a second forward: report the one that backward() was called on",
    ),
    "a running mean": Mistake(
        edit(TRAIN, _REPORT, "losses.append(((total / count).item() + sum(losses)) / (len(losses) + 1))"),
        "each step's own loss is to be returned, not a mean over the steps so far",
    ),
    "tensors": Mistake(
        edit(TRAIN, _REPORT, "losses.append(total / count)"),
        "losses and accuracy are Python numbers, which main() can write as JSON: .item()",
    ),
    "an optimizer of its own": Mistake(
        edit(TRAIN, "make_optimizer(model.parameters())", "torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)"),
        "make_optimizer(params) makes the optimizer: which one it is, is for the caller to say",
    ),
    "a new optimizer in each step": Mistake(
        edit(TRAIN, f"        {_SUMS}\n", f"        optimizer = make_optimizer(model.parameters())\n        {_SUMS}\n"),
        "the optimizer was made more than once: a new one has forgotten its momentum. Make one, before the first step",
    ),
    "a copy": Mistake(
        edit(TRAIN, "    zero = zerolab", "    import copy\n\n    model = copy.deepcopy(model)\n    zero = zerolab"),
        "a copy of the model was trained: train the model that was given",
    ),
    "always stage 0": Mistake(
        edit(TRAIN, "shard(model, stage)", "shard(model, 0)"),
        "the engine is always of stage 0: zerolab.shard(model, stage) takes the stage that is asked for",
    ),
    "always stage 3": Mistake(
        edit(TRAIN, "shard(model, stage)", "shard(model, 3)"),
        "the engine is always of stage 3: zerolab.shard(model, stage) takes the stage that is asked for",
    ),
    "begins with step 1": Mistake(
        edit(TRAIN, "in range(steps)", "in range(1, steps + 1)"),
        "steps are counted from 0: step 0 learns from the samples 0 to batch_size - 1",
    ),
    "one step more": Mistake(
        edit(TRAIN, "in range(steps)", "in range(steps + 1)"), "there is one step, and one loss, for each of `steps`"
    ),
    "zero_grad before the step": Mistake(
        edit(
            TRAIN,
            "        optimizer.step()\n        optimizer.zero_grad()\n",
            "        optimizer.zero_grad()\n        optimizer.step()\n",
        ),
        "the model does not learn: step() finds no gradients: backward() is missing, or zero_grad() follows it",
    ),
    "the accuracy first": Mistake(
        edit(TRAIN, "return losses, (right / count).item()", "return (right / count).item(), losses"),
        "the losses come first, then the accuracy",
    ),
}

TOKEN_LOSS_OF_SOME = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F


def token_loss(logits, tokens, world_size):
    there = tokens[:, 1:] != 0
    count = there.sum()
    dist.all_reduce(count)
    if count == 0:
        return (logits * 0).sum()
    total = F.cross_entropy(logits[:, :-1][there], tokens[:, 1:][there], reduction="sum")
    return total * (world_size / count).reshape(1)
"""
TRAIN_TUPLES = edit(
    TRAIN,
    "return losses, (right / count).item()",
    "model.train()\n    return tuple(losses), right.item() / count.item()",
)

RIGHT = {
    "14.1": (
        TOKEN_LOSS_MASKED,
        TOKEN_LOSS_THROUGH_AUTOGRAD,
        TOKEN_LOSS_WEIGHTED_MEAN,
        TOKEN_LOSS_AVERAGE_COUNT,
        TOKEN_LOSS_OF_SOME,
    ),
    "14.2": (TRAIN_IN_CHUNKS, TRAIN_WITH_A_DUMMY, TRAIN_BY_HAND, TRAIN_MICRO, TRAIN_TUPLES),
}

MISTAKES = {
    "14.1": TOKEN_LOSS_MISTAKES,
    "14.2": TRAIN_MISTAKES,
}
