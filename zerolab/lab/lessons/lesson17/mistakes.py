"""Lesson 17: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson17 import EVALUATE, UNEVEN, UNEVEN_STUB

SUMMED = "the gradients were summed over ranks, not averaged"
NOT_WAITED = (
    "a collective with async_op=True has only been started when it returns: wait() for it before its result is used"
)
ASK_FIRST = (
    "a rank whose batches were used up has returned, and the others wait for it: before each step ask "
    "whether every rank has a batch"
)
WITHOUT_A_BATCH = "a rank without a batch went on: first ask whether every rank has one"
NO_RETURN = "the function returns nothing: `return` is missing"
MODE = "leave the model in the mode in which it came: was = model.training, and model.train(was) at the end"
LESS_PRECISE = "the loss is less precise than it could be: return it in float32 or better, and round where you print"

# ---------------------------------------------------------------------- 17.1

_COLLECT = """\
import torch
import torch.distributed as dist


def train(model, optimizer, batches):
    mine = list(batches)
    count = torch.tensor([len(mine)])
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    N = dist.get_world_size()
    for x, y in mine[: count.item()]:
        optimizer.zero_grad()
        model(x, y).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad.div_(N))
        optimizer.step()
    return int(count)
"""

_OBJECTS = """\
import torch
import torch.distributed as dist


def mean(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g) / dist.get_world_size())


def train(model, optimizer, batches):
    done = object()
    it, steps = iter(batches), 0
    batch = next(it, done)
    flags = [None] * dist.get_world_size()
    dist.all_gather_object(flags, batch is not done)
    while all(flags):
        model.zero_grad()
        model(*batch).backward()
        mean(model)
        optimizer.step()
        steps += 1
        batch = next(it, done)
        dist.all_gather_object(flags, batch is not done)
    return steps
"""

_STEP = "        optimizer.step()\n"
_FLAG = (
    "        everyone = torch.tensor(0 if batch is None else 1)\n        dist.all_reduce(everyone, dist.ReduceOp.MIN)\n"
)

UNEVEN_MISTAKES = {
    "the patient as it came": Mistake(
        edit(UNEVEN_STUB, '    raise Todo("17.1")  # take this line out, and mend the patient\n', ""),
        ASK_FIRST,
    ),
    "asks nobody": Mistake(
        edit(UNEVEN, _FLAG, "        everyone = torch.tensor(0 if batch is None else 1)\n"),
        ASK_FIRST,
    ),
    "as long as one has a batch": Mistake(
        edit(UNEVEN, "ReduceOp.MIN", "ReduceOp.MAX"),
        WITHOUT_A_BATCH,
    ),
    "as long as one has a batch, unpacked": Mistake(
        edit(
            UNEVEN,
            "ReduceOp.MIN",
            "ReduceOp.MAX",
            "        model(*batch).backward()\n",
            "        x, y = batch\n        model(x, y).backward()\n",
        ),
        WITHOUT_A_BATCH,
    ),
    "rank 0's batches": Mistake(
        edit(
            UNEVEN,
            "dist.all_reduce(everyone, dist.ReduceOp.MIN)",
            "dist.broadcast(everyone, 0)",
            "        model(*batch).backward()\n",
            "        x, y = batch\n        model(x, y).backward()\n",
        ),
        "rank 0 answered for all ranks: they stop when any of them has no batch, dist.ReduceOp.MIN",
    ),
    "asks only after a step": Mistake(
        edit(
            UNEVEN,
            "        batch = next(iterator, None)\n" + _FLAG + "        if everyone == 0:\n            return steps\n",
            "",
            "    while True:\n",
            "    batch = next(iterator, None)\n    while batch is not None:\n",
            "        steps += 1\n",
            "        steps += 1\n        batch = next(iterator, None)\n"
            + _FLAG
            + "        if everyone == 0:\n            break\n    return steps\n",
        ),
        "the ranks ask each other only after a step, and one may have no batch at all: ask before the first one, too",
    ),
    "asks after the backward": Mistake(
        edit(
            UNEVEN,
            _FLAG + "        if everyone == 0:\n            return steps\n",
            "",
            "        optimizer.zero_grad()\n        model(*batch).backward()\n",
            "        optimizer.zero_grad()\n        if batch is not None:\n            model(*batch).backward()\n"
            + _FLAG
            + "        if everyone == 0:\n            return steps\n",
        ),
        "the model is called for a batch that makes no step: ask first, since a sharded model gathers its parameters "
        "when it is called, and would wait there for the rank without a batch",
    ),
    "sum is not zero": Mistake(edit(UNEVEN, ", dist.ReduceOp.MIN", ""), WITHOUT_A_BATCH),
    "the shortest goes on with nothing": Mistake(
        edit(
            UNEVEN,
            "ReduceOp.MIN",
            "ReduceOp.MAX",
            "        model(*batch).backward()\n",
            "        if batch is not None:\n            model(*batch).backward()\n"
            "        else:\n            (model(torch.zeros(5), torch.tensor(0.0)) * 0).backward()\n",
        ),
        "ranks without a batch went on with nothing, and the others trained on: all stop together",
    ),
    "counts one too many": Mistake(
        edit(UNEVEN, "            return steps\n", "            return steps + 1\n"),
        "count a step after it was made: not the look for a batch that ends the loop, and all that were made",
    ),
    "returns its own count": Mistake(
        edit(_COLLECT, "return int(count)", "return len(mine)"),
        "that is how many batches this rank had: the shortest rank ends the loop",
    ),
    "returns the longest": Mistake(
        edit(
            _COLLECT,
            "    return int(count)",
            "    longest = torch.tensor([len(mine)])\n    dist.all_reduce(longest, op=dist.ReduceOp.MAX)\n"
            "    return int(longest)",
        ),
        "that is the longest rank's number of batches: the shortest rank ends the loop",
    ),
    "one step fewer": Mistake(
        edit(_COLLECT, "mine[: count.item()]", "mine[: count.item() - 1]"),
        "stopped too early: as long as every rank has a batch, all make the step",
    ),
    "rank 0's count": Mistake(
        edit(_COLLECT, "dist.all_reduce(count, op=dist.ReduceOp.MIN)", "dist.broadcast(count, 0)"),
        ("rank 0's number of batches was taken for all ranks: the smallest of all numbers counts, dist.ReduceOp.MIN"),
    ),
    "goes on alone": Mistake(
        edit(
            _COLLECT,
            "    return int(count)",
            "    for x, y in mine[count.item() :]:\n        optimizer.zero_grad()\n        model(x, y).backward()\n"
            "        optimizer.step()\n    return int(count)",
        ),
        "after the others stopped, this rank went on alone: its parameters are not theirs any more",
    ),
    "sum": Mistake(edit(UNEVEN, "                param.grad /= dist.get_world_size()\n", ""), SUMMED),
    "returns nothing": Mistake(edit(UNEVEN, "            return steps\n", "            return\n"), NO_RETURN),
    "no wait": Mistake(edit(UNEVEN, "dist.ReduceOp.MIN)", "dist.ReduceOp.MIN, async_op=True)"), NOT_WAITED),
    "takes its length": Mistake(
        edit(_COLLECT, "mine = list(batches)", "mine = batches"),
        "the batches have no length: go through them with iter() and next()",
    ),
    "StopIteration": Mistake(
        edit(UNEVEN, "next(iterator, None)", "next(iterator)"),
        "next(iterator) raises where there is no batch left: next(iterator, None) returns None",
    ),
    "next of the batches": Mistake(
        edit(UNEVEN, "iter(batches)", "batches"),
        "next() takes an iterator: iter(batches) makes one, once, before the loop",
    ),
    "keeps gradients": Mistake(
        edit(UNEVEN, "        optimizer.zero_grad()\n", ""),
        "a step was made with something other than a batch of every rank: a batch twice, a gradient kept back, or one "
        "of the step before (zero_grad())",
    ),
    "barrier": Mistake(
        edit(UNEVEN, "dist.all_reduce(everyone, dist.ReduceOp.MIN)", "dist.barrier()"),
        ASK_FIRST,
    ),
    "asks once": Mistake(
        edit(
            UNEVEN,
            _FLAG,
            "        if steps == 0:\n    " + _FLAG.replace("\n    ", "\n        "),
            "== 0:",
            "== 0 or batch is None:",
        ),
        ASK_FIRST,
    ),
    "averages the parameters": Mistake(
        edit(
            _COLLECT,
            "                dist.all_reduce(p.grad.div_(N))\n        optimizer.step()\n",
            "                pass\n        optimizer.step()\n        for p in model.parameters():\n"
            "            dist.all_reduce(p.data)\n            p.data /= N\n",
        ),
        "each rank stepped with its own gradient, and the parameters were averaged: with SGD that is the same, but "
        "with Adam, whose step is not in proportion to the gradient, it is not",
    ),
    "begins again": Mistake(
        edit(
            _COLLECT,
            "ReduceOp.MIN",
            "ReduceOp.MAX",
            "mine[: count.item()]",
            "(mine * 9)[: count.item() if mine else 0]",
        ),
        "a rank without a new batch took an old one again: all stop together when the first has none",
    ),
    "the first batch lost": Mistake(
        edit(UNEVEN, "iter(batches)\n", "iter(batches)\n    next(iterator, None)\n"),
        "the first batch was taken, and never used: each call of next() takes one",
    ),
    "one step at the end": Mistake(
        edit(UNEVEN, _STEP, "", "            return steps", "            optimizer.step()\n            return steps"),
        "optimizer.step() belongs into the loop, once for each batch",
    ),
    "the last first": Mistake(
        edit(_COLLECT, "mine[: count.item()]", "mine[::-1][: count.item()]"),
        "the batches are used in another order: the first that comes is the first to be learnt from",
    ),
    "goes on counting": Mistake(
        "steps = 0\n" + edit(UNEVEN, "    steps, iterator = 0, iter", "    global steps\n    iterator = iter"),
        "steps of an earlier call are counted too: begin with 0 in each call",
    ),
    "the mean count": Mistake(
        edit(_COLLECT, "op=dist.ReduceOp.MIN)", "op=dist.ReduceOp.SUM)\n    count //= dist.get_world_size()"),
        ASK_FIRST,
    ),
}

# ---------------------------------------------------------------------- 17.2

EVALUATE_DETACHED = """\
import torch
import torch.distributed as dist


def evaluate(model, batches):
    before = model.training
    model.train(False)
    try:
        total, count = torch.zeros(1, dtype=torch.float64), 0
        for x, y in batches:
            total += model(x, y).detach() * x.shape[0]
            count += x.shape[0]
    finally:
        model.train(before)
    count = torch.tensor([count])
    dist.all_reduce(total)
    dist.all_reduce(count)
    return float(total / count)
"""

EVALUATE_GATHERED = """\
import torch
import torch.distributed as dist


@torch.inference_mode()
def evaluate(model, batches):
    training = model.training
    model.eval()
    pairs = [(float(model(x, y)), len(y)) for x, y in batches]
    if training:
        model.train()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pairs)
    pairs = [pair for theirs in everyone for pair in theirs]
    return sum(loss * size for loss, size in pairs) / sum(size for _, size in pairs)
"""

_ADD = "            total += torch.tensor([model(x, y).item() * len(x), len(x)])\n"
_END = "    dist.all_reduce(total)\n    return (total[0] / total[1]).item()\n"

EVALUATE_MISTAKES = {
    "keeps the graph": Mistake(
        edit(
            EVALUATE,
            "    with torch.no_grad():\n        for x, y in batches:\n" + _ADD,
            "    losses = []\n    for x, y in batches:\n        losses.append((model(x, y), len(x)))\n"
            "    for loss, size in losses:\n        total += torch.tensor([loss.item() * size, size])\n",
        ),
        "a loss keeps its graph, and that its activations: .item(), or torch.no_grad()",
    ),
    "a mean of batches": Mistake(
        edit(EVALUATE, _ADD, "            total += torch.tensor([model(x, y).item(), 1])\n"),
        "batches of different sizes count alike: multiply each mean by its number of samples",
    ),
    "takes its length": Mistake(
        edit(EVALUATE, "    model.eval()\n", "    model.eval()\n    count = len(batches)\n"),
        "the batches can be gone through once and have no length: count in the loop",
    ),
    "no reduction": Mistake(
        edit(EVALUATE, "    dist.all_reduce(total)\n", ""), "nothing is reduced: that is this rank's own mean"
    ),
    "mean of means": Mistake(
        edit(
            EVALUATE,
            _END,
            "    mean = (total[0] / total[1].clamp(min=1)).view(1)\n    dist.all_reduce(mean)\n"
            "    return (mean / dist.get_world_size()).item()\n",
        ),
        "the mean of the ranks' means: ranks with few samples weigh as much as those with many",
    ),
    "divides by the ranks too": Mistake(
        edit(
            EVALUATE,
            _END,
            "    dist.all_reduce(total)\n    return (total[0] / total[1] / dist.get_world_size()).item()\n",
        ),
        "divided by the number of ranks as well: the number of samples is enough",
    ),
    "own number of samples": Mistake(
        edit(
            EVALUATE,
            _END,
            "    own = total[1].clone().clamp(min=1)\n    dist.all_reduce(total)\n    return (total[0] / own).item()\n",
        ),
        "the sums were reduced, the numbers of samples were not",
    ),
    "not divided": Mistake(
        edit(EVALUATE, "(total[0] / total[1]).item()", "total[0].item()"),
        "a sum over samples, not divided by their number",
    ),
    "a tensor": Mistake(
        edit(EVALUATE, "(total[0] / total[1]).item()", "total[0] / total[1]"),
        "a tensor can carry a graph, and all activations with it: return a float, .item()",
    ),
    "leaves eval mode": Mistake(edit(EVALUATE, "    model.train(was)\n", ""), MODE),
    "always back to training": Mistake(edit(EVALUATE, "model.train(was)", "model.train()"), MODE),
    "dropout stays on": Mistake(
        edit(EVALUATE, "    model.eval()\n", ""), "dropout is on: call model.eval() before the loop"
    ),
    "returns nothing": Mistake(edit(EVALUATE, "    return (total[0] / total[1]).item()\n", ""), NO_RETURN),
    "reduces in the loop": Mistake(
        edit(EVALUATE, _ADD, _ADD.rstrip() + "\n            dist.all_reduce(torch.zeros(1))\n"),
        (
            "ranks have different numbers of batches, so a collective in the loop waits for ranks that have left "
            "it: one all-reduce of two numbers, after the loop, is enough"
        ),
    ),
    "gradients off for good": Mistake(
        edit(EVALUATE, "    with torch.no_grad():\n", "    torch.set_grad_enabled(False)\n    if True:\n"),
        "gradients are off afterwards, for the whole process: use torch.no_grad() in a with statement",
    ),
    "reduces the mean": Mistake(
        edit(
            EVALUATE,
            _END,
            "    mean = (total[0] / total[1].clamp(min=1)).view(1)\n    dist.all_reduce(mean)\n"
            "    return mean.item()\n",
        ),
        "a sum of means, not divided",
    ),
    "no wait": Mistake(edit(EVALUATE, "dist.all_reduce(total)", "dist.all_reduce(total, async_op=True)"), NOT_WAITED),
    "to rank 0": Mistake(
        edit(EVALUATE, "dist.all_reduce(total)", "dist.reduce(total, 0)"),
        "only rank 0 has the sums: dist.reduce() gives them to one rank, dist.all_reduce() to all",
    ),
    "the largest": Mistake(
        edit(EVALUATE, "dist.all_reduce(total)", "dist.all_reduce(total, dist.ReduceOp.MAX)"),
        "the largest of the ranks' sums was taken: all-reduce adds up unless it is told otherwise",
    ),
    "rounded": Mistake(
        edit(EVALUATE, "(total[0] / total[1]).item()", "round((total[0] / total[1]).item(), 2)"),
        LESS_PRECISE,
    ),
    "half precision": Mistake(
        edit(EVALUATE, "torch.zeros(2)", "torch.zeros(2, dtype=torch.float16)"),
        LESS_PRECISE,
    ),
    "leaves small batches out": Mistake(
        edit(EVALUATE, "in batches:\n", "in batches:\n            if len(x) == 1:\n                continue\n"),
        "some batches were left out: every sample counts, also those of a small batch",
    ),
    "freezes the model": Mistake(
        edit(EVALUATE, "    model.eval()\n", "    model.eval().requires_grad_(False)\n"),
        "the parameters need no gradient any more, so training cannot go on: torch.no_grad() ends with its block",
    ),
    "at least a sample for each rank": Mistake(
        edit(EVALUATE, "/ total[1])", "/ total[1].clamp(min=dist.get_world_size()))"),
        "the divisor was raised to the number of ranks: there may be fewer samples than ranks, and all ranks have it",
    ),
    "learns": Mistake(
        edit(
            EVALUATE,
            "    with torch.no_grad():\n",
            "    if True:\n",
            "in batches:\n",
            "in batches:\n            model(x, y).backward()\n",
        ),
        "an evaluation calls no backward(): the parameters have gradients afterwards, which the next step would use",
    ),
}

EVALUATE_NAMED_LOSS = edit(
    EVALUATE,
    "    with torch.no_grad():\n",
    "    if True:\n",
    _ADD,
    "            loss = model(x, y)\n            total += torch.tensor([loss.item() * len(x), len(x)])\n",
)
RIGHT = {
    "17.1": (_COLLECT, _OBJECTS),
    "17.2": (EVALUATE_DETACHED, EVALUATE_GATHERED, EVALUATE_NAMED_LOSS),
}

MISTAKES = {
    "17.1": UNEVEN_MISTAKES,
    "17.2": EVALUATE_MISTAKES,
}
