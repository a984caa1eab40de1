"""Lesson 14: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson14 import TOKEN_LOSS, TRAIN

from .sources import edit

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
    return (each * mask).sum() / average.clamp_min(1)
"""

_TARGETS = "targets = tokens[:, 1:].flatten()"
_LOGITS = "logits[:, :-1].flatten(0, 1)"
_COUNT = "count = (targets != 0).sum()"
_REDUCE = "dist.all_reduce(count)  # now the number of tokens of all ranks"
_RETURN = "return world_size * total / count.clamp(min=1)"

TOKEN_LOSS_MUTANTS = {
    "mean of means": (
        edit(TOKEN_LOSS, f"    {_REDUCE}\n", "", "world_size * total", "total"),
        "the mean of means",
    ),
    "torch's mean": (
        edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="mean"', _RETURN, "return total"),
        "the mean of means",
    ),
    "own count times N": (edit(TOKEN_LOSS, f"    {_REDUCE}\n", ""), "the mean of means"),
    "factor N forgotten": (edit(TOKEN_LOSS, "world_size * total", "total"), "average the gradients over the ranks"),
    "divided by N": (edit(TOKEN_LOSS, "world_size * total", "total / world_size"), "1/N^2 of the gradient"),
    "N twice": (edit(TOKEN_LOSS, "world_size * total", "world_size**2 * total"), "multiplied by world_size twice"),
    "softmax first": (edit(TOKEN_LOSS, "logits[:, :-1]", "logits.softmax(-1)[:, :-1]"), "applies the softmax itself"),
    "divided twice": (edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="mean"'), "divided twice"),
    "the first count kept": (
        edit(
            TOKEN_LOSS,
            "def token_loss",
            "COUNTS = []\n\n\ndef token_loss",
            _REDUCE,
            "if not COUNTS:\n        dist.all_reduce(count)\n        COUNTS.append(count)\n    count = COUNTS[0]",
        ),
        "right for the first call only",
    ),
    "in bfloat16": (edit(TOKEN_LOSS, _LOGITS, f"{_LOGITS}.bfloat16()"), "in less precision"),
    "sentence by sentence": (
        edit(
            TOKEN_LOSS,
            _RETURN,
            "rows = [F.cross_entropy(x[:-1], y[1:], ignore_index=0) for x, y in zip(logits, tokens) if y.any()]\n"
            "    return torch.stack([*rows, 0 * logits.sum()]).sum() / len(logits)",
        ),
        "a mean for each sentence",
    ),
    "a sum": (edit(TOKEN_LOSS, _RETURN, "return total"), "a sum, which grows with the batch"),
    "N times the sum": (edit(TOKEN_LOSS, _RETURN, "return world_size * total"), "a sum, which grows with the batch"),
    "padding counted": (edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(targets.numel())"), "padding counted as tokens"),
    "padding counted, its own": (
        edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(tokens.numel())"),
        "padding counted as tokens",
    ),
    "first tokens counted": (
        edit(TOKEN_LOSS, _COUNT, "count = (tokens != 0).sum()"),
        "the first token of each sentence was counted",
    ),
    "inputs counted": (
        edit(TOKEN_LOSS, _COUNT, "count = (tokens[:, :-1] != 0).sum()"),
        "the inputs were counted",
    ),
    "clamped before the sum": (
        edit(TOKEN_LOSS, _COUNT, f"{_COUNT}.clamp(min=1)"),
        "belongs behind the all-reduce",
    ),
    "sentences counted": (
        edit(TOKEN_LOSS, _COUNT, "count = torch.tensor(len(tokens))"),
        "divided by the number of sentences",
    ),
    "the largest count": (edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, dist.ReduceOp.MAX)"), "with MAX"),
    "the smallest count": (
        edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, op=dist.ReduceOp.MIN)"),
        "with MIN",
    ),
    "the product": (edit(TOKEN_LOSS, "all_reduce(count)", "all_reduce(count, dist.ReduceOp.PRODUCT)"), "with PRODUCT"),
    "padding learnt": (edit(TOKEN_LOSS, "ignore_index=0, ", ""), "padding is learnt"),
    "labels not shifted": (
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens.flatten()", _LOGITS, "logits.flatten(0, 1)"),
        "the labels are not shifted",
    ),
    "shifted back": (
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens[:, :-1].flatten()", _LOGITS, "logits[:, 1:].flatten(0, 1)"),
        "shifted the wrong way",
    ),
    "rolled": (
        edit(TOKEN_LOSS, _TARGETS, "targets = tokens.roll(-1, 1).flatten()", _LOGITS, "logits.flatten(0, 1)"),
        "roll() puts the first token behind the last",
    ),
    "shifted on one side": (edit(TOKEN_LOSS, _LOGITS, "logits.flatten(0, 1)"), "as many logits as targets"),
    "not flat": (edit(TOKEN_LOSS, f"{_LOGITS}, targets", "logits[:, :-1], tokens[:, 1:]"), "classes second"),
    "no clamp": (edit(TOKEN_LOSS, "count.clamp(min=1)", "count"), "may have nothing but padding"),
    "detached": (edit(TOKEN_LOSS, _RETURN, "return world_size * total.detach() / count"), "cut it off"),
    "a number": (edit(TOKEN_LOSS, _RETURN, "return world_size * total.item() / count.item()"), "cut it off"),
    "the loss all-reduced": (
        edit(TOKEN_LOSS, _RETURN, "dist.all_reduce(total)\n    return total / count.clamp(min=1)"),
        "average the gradients over the ranks",
    ),
    "all logits gathered": (
        edit(
            TOKEN_LOSS,
            "    total =",
            "    everyone = [None] * world_size\n    dist.all_gather_object(everyone, (logits.detach(), tokens))\n"
            "    total =",
        ),
        "one number of each rank is enough",
    ),
    "a forgotten wait": (
        edit(TOKEN_LOSS, "dist.all_reduce(count)", "dist.all_reduce(count, async_op=True)"),
        "a forgotten wait",
    ),
    "not a tensor": (edit(TOKEN_LOSS, _COUNT, "count = int((targets != 0).sum())"), "takes a tensor and fills it"),
    "nothing returned": (edit(TOKEN_LOSS, _RETURN, "world_size * total / count"), "`return` is missing"),
    "no reduction": (edit(TOKEN_LOSS, 'reduction="sum"', 'reduction="none"'), "one number is needed"),
    "of this rank alone": (
        edit(TOKEN_LOSS, f"    {_REDUCE}\n", "    if dist.get_rank() == 0:\n        dist.all_reduce(count)\n"),
        "not every rank makes this call",
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

TRAIN_MUTANTS = {
    "mean of means": (
        edit(TRAIN, _BACKWARD, "(loss / (data.targets[numbers[mine]] != -100).sum().clamp(min=1)).backward()"),
        "the mean of means",
    ),
    "means reported": (
        edit(
            TRAIN,
            "total = loss.detach()",
            "total = loss.detach() / (data.targets[numbers[mine]] != -100).sum().clamp(min=1)",
            _REPORT,
            "losses.append(total.item() / zero.world_size)",
        ),
        "the mean of means",
    ),
    "factor N forgotten": (edit(TRAIN, _BACKWARD, "(loss / count).backward()"), "the gradient is 1/N"),
    "divided by N": (edit(TRAIN, _BACKWARD, "(loss / count / zero.world_size).backward()"), "the gradient is 1/N"),
    "N twice": (edit(TRAIN, _BACKWARD, "(zero.world_size**2 * loss / count).backward()"), "N times too large"),
    "a sum": (edit(TRAIN, _BACKWARD, "(zero.world_size * loss).backward()"), "a sum, which grows with the batch"),
    "padding counted": (
        edit(TRAIN, "(targets != -100).sum()", "torch.tensor(targets.numel())"),
        "were counted: they have nothing to learn",
    ),
    "samples counted": (
        edit(TRAIN, "dist.all_reduce(count)\n        (", "count = len(numbers)\n        ("),
        "were counted: they have nothing to learn",
    ),
    "each rank the same": (
        edit(TRAIN, "numbers[mine]", "numbers[: max(1, batch_size // zero.world_size)]"),
        "each rank the same samples",
    ),
    "all samples on every rank": (
        edit(
            TRAIN,
            "numbers[mine]",
            "numbers",
            "        dist.all_reduce(count)\n        (zero.world_size * ",
            "        (",
        ),
        "N times the work",
    ),
    "the rest left out": (
        edit(TRAIN, "numbers[mine]", "numbers[: batch_size // zero.world_size * zero.world_size][mine]"),
        "some samples are left out",
    ),
    "another order on each rank": (
        edit(
            TRAIN,
            "        loss, _, count",
            "        generator = torch.Generator().manual_seed(zero.rank)\n"
            "        numbers = numbers[torch.randperm(len(numbers), generator=generator)]\n"
            "        loss, _, count",
        ),
        "one and the same order",
    ),
    "in percent": (edit(TRAIN, "(right / count).item()", "100 * (right / count).item()"), "not a percentage"),
    "filled up": (
        edit(
            TRAIN,
            "        loss, _, count",
            "        short = -len(numbers) % zero.world_size\n"
            "        numbers = torch.cat([numbers, numbers[:short]])\n"
            "        loss, _, count",
        ),
        "samples come twice",
    ),
    "does not go round": (
        edit(
            TRAIN,
            "torch.arange(step * batch_size, (step + 1) * batch_size) % len(data.inputs)",
            "torch.arange(len(data.inputs))[step * batch_size : (step + 1) * batch_size]",
        ),
        "after the last sample the first one follows",
    ),
    "batch_size per rank": (
        edit(
            TRAIN,
            "torch.arange(step * batch_size, (step + 1) * batch_size)",
            "torch.arange(step * batch_size * zero.world_size, (step + 1) * batch_size * zero.world_size)",
        ),
        "of all ranks together",
    ),
    "the loss of this rank": (edit(TRAIN, "        dist.all_reduce(total)\n", ""), "this rank's part"),
    "N times the loss": (edit(TRAIN, "total = loss.detach()", "total = zero.world_size * loss.detach()"), "factor N"),
    "loss averaged twice": (
        edit(TRAIN, _REPORT, "losses.append((total / count).item() / zero.world_size)"),
        "1/N of it",
    ),
    "gradients never zeroed": (edit(TRAIN, "        optimizer.zero_grad()\n", ""), "zero_grad() is missing"),
    "no step": (edit(TRAIN, "        optimizer.step()\n", ""), "optimizer stepped 0 times"),
    "always stage 2": (edit(TRAIN, "zerolab.shard(model, stage)", "zerolab.Zero2(model)"), "the engine is of stage 2"),
    "not sharded": (
        edit(
            TRAIN,
            "zero = zerolab.shard(model, stage)\n",
            "class zero:\n        rank, world_size = dist.get_rank(), dist.get_world_size()\n\n",
        ),
        "shard the model first",
    ),
    "optimizer first": (
        edit(
            TRAIN,
            "    zero = zerolab.shard(model, stage)\n    optimizer = make_optimizer(model.parameters())\n",
            "    optimizer = make_optimizer(model.parameters())\n    zero = zerolab.shard(model, stage)\n",
        ),
        "shard first",
    ),
    "int16": (edit(TRAIN, "model(inputs.long())", "model(inputs)"), "the tokens are int16"),
    "no eval": (edit(TRAIN, "    model.eval()\n", ""), "model.eval() is missing"),
    "eval from the start": (
        edit(TRAIN, "    model.eval()\n", "", "    losses = []\n", "    losses = []\n    model.eval()\n"),
        "model.train() is missing",
    ),
    "validated with training data": (
        edit(
            TRAIN,
            "data.validation_inputs[mine], data.validation_targets[mine]",
            "data.inputs[mine], data.targets[mine]",
        ),
        "validated with training data",
    ),
    "the mean of accuracies": (
        edit(
            TRAIN,
            _HITS + "    return losses, (right / count).item()",
            "    rate = right / count.clamp(min=1)\n    dist.all_reduce(rate)\n"
            "    return losses, rate.item() / zero.world_size",
        ),
        "the mean of the ranks' accuracies",
    ),
    "this rank's accuracy": (edit(TRAIN, _HITS, ""), "the accuracy of this rank's part"),
    "unlabelled are wrong": (
        edit(TRAIN, "(right / count).item()", "(right / data.validation_targets.numel()).item()"),
        "were counted as wrong",
    ),
    "hits of all, count of one": (edit(TRAIN, _HITS, "    dist.all_reduce(right)\n"), "add up both"),
    "one forward a sample": (
        edit(
            TRAIN,
            _VALIDATE,
            "right = count = torch.tensor(0)\n"
            "        for i in range(zero.rank, len(data.validation_inputs), zero.world_size):\n"
            "            _, r, c = sums(model, data.validation_inputs[i : i + 1], data.validation_targets[i : i + 1])\n"
            "            right, count = right + r, count + c",
        ),
        "the ranks make different calls. All run",
    ),
    "skips a step without samples": (
        edit(
            TRAIN,
            f"        {_SUMS}\n",
            f"        if len(numbers[mine]) == 0:\n            continue\n        {_SUMS}\n",
        ),
        "the ranks make different calls. All run",
    ),
    "the mean of nothing": (
        edit(
            TRAIN,
            'reduction="sum")  # leaves out -100',
            'reduction="mean") * (targets != -100).sum()',
        ),
        "a mean of nothing is nan",
    ),
    "nothing returned": (edit(TRAIN, "    return losses, (right / count).item()\n", ""), "`return` is missing"),
    "only the accuracy": (edit(TRAIN, "return losses, (right", "return (right"), "return losses, accuracy"),
}

RIGHT = {
    "14.1": (TOKEN_LOSS_MASKED, TOKEN_LOSS_THROUGH_AUTOGRAD, TOKEN_LOSS_WEIGHTED_MEAN, TOKEN_LOSS_AVERAGE_COUNT),
    "14.2": (TRAIN_IN_CHUNKS, TRAIN_WITH_A_DUMMY, TRAIN_BY_HAND, TRAIN_MICRO),
}

WRONG = {
    "14.1": TOKEN_LOSS_MUTANTS,
    "14.2": TRAIN_MUTANTS,
}
