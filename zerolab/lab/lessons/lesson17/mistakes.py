"""Lesson 17: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson17 import EVALUATE, PLACE, TRAIN, UNEVEN, UNEVEN_STUB

SUMMED = "the gradients were summed over ranks, not averaged, or the learning rate was multiplied by their number"
START = "rank 0's parameters count, on every rank: broadcast them, and do not average them or take another rank's"
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
ONE_GPU = "every process on a node would use cuda:0: one GPU for each, by its number on the node"
ON_THE_NODE = "the node has no such GPU: GPUs are counted on each node, so go by LOCAL_RANK"
STRINGS = "the environment holds strings: int() them"
LESS_PRECISE = "the loss is less precise than it could be: return it in float32 or better, and round where you print"
PLAIN_SGD = "plain SGD is asked for: lr times the gradient, without momentum, weight decay or another optimizer"
NOT_ZEROED = "gradients of earlier steps are still there: zero_grad() is missing in the loop"
KEYS = "the keys are rank, world_size, device and device_ids, and no others"
GIVEN = "read what is in `environment`: this process's own is another one, and there is no process group yet"
NO_GPU = "without a GPU the device is cpu, and device_ids is None"

# ---------------------------------------------------------------------- 17.2

# One message for all gradients, and one for all parameters.
TRAIN_FLAT = """\
import torch
import torch.distributed as dist


def train(model, batches, lr):
    N, params = dist.get_world_size(), list(model.parameters())
    with torch.no_grad():
        start = torch.cat([p.flatten() for p in params])
        dist.broadcast(start, 0)
        for p, value in zip(params, start.split([p.numel() for p in params])):
            p.copy_(value.view_as(p))
    for x, y in batches:
        grads = torch.autograd.grad(model(x, y), [p for p in params if p.requires_grad], allow_unused=True)
        pairs = [(p, g) for p, g in zip([p for p in params if p.requires_grad], grads) if g is not None]
        flat = torch.cat([g.flatten() for _, g in pairs])
        dist.all_reduce(flat)
        with torch.no_grad():
            for (p, _), g in zip(pairs, flat.split([p.numel() for p, _ in pairs])):
                p -= lr * g.view_as(p) / N
"""

# The state dict travels as an object, gradients are divided before the sum, and are awaited together.
TRAIN_ASYNC = """\
import torch
import torch.distributed as dist
from torch.optim import SGD


def train(model, batches, lr):
    state = [model.state_dict()]
    dist.broadcast_object_list(state)
    model.load_state_dict(state[0])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(trained, lr)
    for batch in batches:
        model(*batch).backward()
        works = []
        for p in filter(lambda p: p.grad is not None, trained):
            p.grad.div_(dist.get_world_size())
            works.append(dist.all_reduce(p.grad, async_op=True))
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
"""

_BROADCAST = "    for param in model.parameters():\n        dist.broadcast(param.data, src=0)\n"
_REDUCE = (
    "        for param in model.parameters():\n            if param.grad is not None:\n"
    "                dist.all_reduce(param.grad)\n                param.grad /= dist.get_world_size()\n"
)
_STEP = "        optimizer.step()\n"

TRAIN_MISTAKES = {
    "own weights": Mistake(
        edit(TRAIN, _BROADCAST, ""),
        "the ranks began with different weights: give all of them rank 0's, before the first step",
    ),
    "no reduction": Mistake(
        edit(TRAIN, _REDUCE, ""),
        "nothing is reduced: every rank took its own gradient, and not the mean over all ranks",
    ),
    "sum": Mistake(edit(TRAIN, "                param.grad /= dist.get_world_size()\n", ""), SUMMED),
    "divides twice": Mistake(
        edit(TRAIN, "/= dist.get_world_size()", "/= dist.get_world_size() ** 2"),
        "the gradients were divided by the number of ranks twice",
    ),
    "rate by rank": Mistake(
        edit(TRAIN, "lr=lr)", "lr=lr * (1 + dist.get_rank()))"),
        "the learning rate differs by rank: the same gradient gives another update",
    ),
    "no zero_grad": Mistake(
        edit(TRAIN, "        optimizer.zero_grad()\n", ""),
        NOT_ZEROED,
    ),
    "two faults": Mistake(
        edit(TRAIN, _BROADCAST, "", "lr=lr)", "lr=lr * (1 + dist.get_rank()))"),
        (
            "the ranks began with different weights, and the learning rate differs by rank: broadcast rank 0's "
            "parameters before the first step, and take the same lr everywhere"
        ),
    ),
    "mean of the weights": Mistake(
        edit(
            TRAIN,
            "        dist.broadcast(param.data, src=0)\n",
            "        dist.all_reduce(param.data)\n        param.data /= dist.get_world_size()\n",
        ),
        START,
    ),
    "last rank's weights": Mistake(edit(TRAIN, "src=0", "src=dist.get_world_size() - 1"), START),
    "frozen left out": Mistake(
        edit(
            TRAIN,
            "        dist.broadcast(param.data, src=0)\n",
            "        if param.requires_grad:\n            dist.broadcast(param.data, src=0)\n",
        ),
        "a parameter that is not trained has to be the same on all ranks too: broadcast every parameter",
    ),
    "reduces after the step": Mistake(
        edit(TRAIN, _REDUCE + _STEP, _STEP + _REDUCE),
        (
            "the gradients were reduced after the step that should have used them: first backward(), then the "
            "mean, then optimizer.step()"
        ),
    ),
    "rank 0's gradient": Mistake(
        edit(
            TRAIN,
            "dist.all_reduce(param.grad)\n                param.grad /= dist.get_world_size()",
            "dist.broadcast(param.grad, 0)",
        ),
        "every rank took rank 0's gradient: a broadcast where the mean was wanted",
    ),
    "no wait": Mistake(
        edit(TRAIN, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        NOT_WAITED,
    ),
    "forgets None": Mistake(
        edit(TRAIN, "            if param.grad is not None:\n", "            if True:\n"),
        "a parameter that is not used has no gradient: param.grad is None, leave it out (on every rank alike)",
    ),
    "no step": Mistake(
        edit(TRAIN, _STEP, ""),
        "the parameters are rank 0's, and never changed: optimizer.step() is missing, or sees no gradient",
    ),
    "first batch alone": Mistake(
        edit(TRAIN, _STEP, _STEP + "        break\n"), "not every batch was used: there is one step for each"
    ),
    "float32 only": Mistake(
        edit(
            TRAIN,
            "dist.all_reduce(param.grad)",
            "wide = param.grad.float()\n                dist.all_reduce(wide)\n                param.grad = wide",
        ),
        "the gradients went through float32: reduce them in their own dtype",
    ),
    "lr times N": Mistake(edit(TRAIN, "lr=lr)", "lr=lr * dist.get_world_size())"), SUMMED),
    "broadcasts after the step": Mistake(
        edit(
            TRAIN,
            _BROADCAST,
            "",
            _STEP,
            _STEP + _BROADCAST.replace("    ", "        ", 1).replace("\n    ", "\n        "),
        ),
        "rank 0's parameters came after the first step, so its gradients were those of other weights: first broadcast",
    ),
    "divides the loss alone": Mistake(
        edit(TRAIN, _REDUCE, "", "loss = model(x, y)", "loss = model(x, y) / dist.get_world_size()"),
        "dividing the loss by the number of ranks adds nothing of the others: all-reduce the gradients",
    ),
    "averages the parameters before the step": Mistake(
        edit(TRAIN, "all_reduce(param.grad)", "all_reduce(param.data)", "param.grad /=", "param.data /="),
        "the parameters were averaged, and the gradients were not: each rank still takes its own gradient",
    ),
    "broadcasts at the end": Mistake(
        edit(TRAIN, _REDUCE, "") + _BROADCAST,
        "in the steps nothing is reduced: a broadcast at the end leaves what rank 0 has learnt, and nobody else",
    ),
    "momentum": Mistake(
        edit(TRAIN, "lr=lr)", "lr=lr, momentum=0.9)"),
        PLAIN_SGD,
    ),
    "Adam": Mistake(
        edit(TRAIN, "SGD(", "Adam("),
        PLAIN_SGD,
    ),
    "zero_grad once": Mistake(
        edit(TRAIN, "        optimizer.zero_grad()\n", "", "    for x, y", "    optimizer.zero_grad()\n    for x, y"),
        NOT_ZEROED,
    ),
    "zero_grad too late": Mistake(
        edit(TRAIN, "        optimizer.zero_grad()\n", "", _STEP, "        optimizer.zero_grad()\n" + _STEP),
        "the parameters are rank 0's, and never changed: optimizer.step() is missing, or sees no gradient",
    ),
    "steps on rank 0": Mistake(
        edit(TRAIN, _STEP, "        if dist.get_rank() == 0:\n            optimizer.step()\n"),
        "only rank 0 made the steps: all ranks take the same step, with the same gradient",
    ),
    "the largest gradient": Mistake(
        edit(TRAIN, "all_reduce(param.grad)", "all_reduce(param.grad, op=dist.ReduceOp.MAX)"),
        "an element's largest gradient was taken, divided by N: the mean is the sum over ranks, divided by N",
    ),
    "four ranks for sure": Mistake(
        edit(TRAIN, "/= dist.get_world_size()", "/= 4"),
        "divided by a fixed number: the number of ranks is dist.get_world_size()",
    ),
    "scalars left out": Mistake(
        edit(TRAIN, "is not None:", "is not None and param.dim() > 0:"),
        "not every gradient was reduced: every parameter that has one needs the mean, a single number too",
    ),
    "several epochs": Mistake(
        edit(TRAIN, "    for x, y in batches:", "    batches = list(batches)\n    for x, y in batches * 2:"),
        "each batch is learnt from once, as it comes: there is one step for each",
    ),
    "broadcasts a copy": Mistake(
        edit(TRAIN, "broadcast(param.data,", "broadcast(param.data.clone(),"),
        "the ranks began with different weights: give all of them rank 0's, before the first step",
    ),
}

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
        ("a step was made with something other than a batch of every rank: a batch twice, or a gradient kept back"),
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

# ---------------------------------------------------------------------- 17.3

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

# ---------------------------------------------------------------------- 17.4

PLACE_TORCH = """\
import torch


def place(environment, gpus):
    rank, local, size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if gpus == 0:
        return dict(rank=rank, world_size=size, device=torch.device("cpu"), device_ids=None)
    return dict(rank=rank, world_size=size, device=torch.device("cuda", local), device_ids=[local])
"""

PLACE_MODULO = """\
def place(environment, gpus):
    got = {"rank": int(environment.get("RANK", 0)), "world_size": int(environment.get("WORLD_SIZE", 1))}
    mine = int(environment.get("LOCAL_RANK", 0)) % gpus if gpus else None
    got["device"] = "cpu" if mine is None else "cuda:" + str(mine)
    got["device_ids"] = None if mine is None else [mine]
    return got
"""

PLACE_MISTAKES = {
    "rank is the world size": Mistake(
        edit(PLACE, 'int(environment["RANK"])', 'int(environment["WORLD_SIZE"])'),
        "ranks go from 0 to world_size - 1: no process would be rank 0, and nobody would open the port",
    ),
    "rank on the node": Mistake(
        edit(PLACE, 'int(environment["RANK"])', "local"),
        "RANK is the number in the whole job, LOCAL_RANK the number on this node",
    ),
    "everyone on cuda:0": Mistake(edit(PLACE, 'f"cuda:{local}"', '"cuda:0"'), ONE_GPU),
    "just cuda": Mistake(edit(PLACE, 'f"cuda:{local}"', '"cuda"'), ONE_GPU),
    "cuda by rank": Mistake(edit(PLACE, "cuda:{local}", "cuda:{int(environment['RANK'])}"), ON_THE_NODE),
    "ids by rank": Mistake(edit(PLACE, "[local] if", "[int(environment['RANK'])] if"), ON_THE_NODE),
    "all of the node": Mistake(
        edit(PLACE, "[local] if", "list(range(gpus)) if"), "device_ids can only name one GPU, this process's own"
    ),
    "strings": Mistake(edit(PLACE, 'int(environment["RANK"])', 'environment["RANK"]'), STRINGS),
    "string id": Mistake(edit(PLACE, 'int(environment["LOCAL_RANK"])', 'environment["LOCAL_RANK"]'), STRINGS),
    "a number, no list": Mistake(edit(PLACE, "[local] if", "local if"), "device_ids is a list with one number"),
    "cuda without a GPU": Mistake(edit(PLACE, ' if gpus else "cpu"', ""), NO_GPU),
    "ids without a GPU": Mistake(edit(PLACE, " if gpus else None", ""), NO_GPU),
    "the node's GPUs are the world": Mistake(
        edit(PLACE, 'int(environment["WORLD_SIZE"])', "max(1, gpus)"),
        "WORLD_SIZE is the number of processes in the job: not this node's GPUs",
    ),
    "another name": Mistake(
        edit(PLACE, '"LOCAL_RANK"', '"SLURM_LOCALID"'),
        "the names are RANK, LOCAL_RANK and WORLD_SIZE, as torchrun sets them",
    ),
    "returns nothing": Mistake(edit(PLACE, "    return {", "    got = {"), NO_RETURN),
    "by modulo": Mistake(
        edit(PLACE, 'int(environment["LOCAL_RANK"])', 'int(environment["RANK"]) % max(1, gpus)'),
        "RANK % gpus is the number on the node only if every node runs a process for each of its GPUs: use LOCAL_RANK",
    ),
    "asks the process group": Mistake(
        "import torch.distributed as dist\n\n\n"
        + edit(PLACE, 'int(environment["WORLD_SIZE"])', "dist.get_world_size()"),
        GIVEN,
    ),
    "asks the system": Mistake(
        "import os\n\n\n" + edit(PLACE, "    local", "    environment = os.environ\n    local"),
        GIVEN,
    ),
    "names for ids": Mistake(
        edit(PLACE, "[local] if", "[f'cuda:{local}'] if"),
        "device_ids has the GPU's number, an int, and not its name",
    ),
    "a number for a device": Mistake(
        edit(PLACE, 'f"cuda:{local}"', "local"),
        "the device is cuda and LOCAL_RANK, as in cuda:1, where the node has GPUs",
    ),
    "takes it out": Mistake(
        edit(PLACE, 'environment["LOCAL_RANK"]', 'environment.pop("LOCAL_RANK")'),
        "the environment was changed: read it, and leave it as it is",
    ),
    "another key": Mistake(
        edit(PLACE, '"device_ids"', '"device_id"'),
        KEYS,
    ),
    "one key more": Mistake(
        edit(PLACE, '        "rank"', '        "local_rank": local,\n        "rank"'),
        KEYS,
    ),
    "a single GPU is none": Mistake(
        edit(PLACE, 'if gpus else "cpu"', 'if gpus > 1 else "cpu"'),
        "one GPU is a GPU: the device is cpu only where gpus is 0",
    ),
}

EVALUATE_NAMED_LOSS = edit(
    EVALUATE,
    "    with torch.no_grad():\n",
    "    if True:\n",
    _ADD,
    "            loss = model(x, y)\n            total += torch.tensor([loss.item() * len(x), len(x)])\n",
)
TRAIN_BY_HOOKS = """\
import torch
import torch.distributed as dist


def train(model, batches, lr):
    def average(grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()

    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_hook(average) for p in trained]
    optimizer = torch.optim.SGD(trained, lr)
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
"""

TRAIN_BY_THE_ENGINE = """\
import torch
import zerolab


def train(model, batches, lr):
    zero = zerolab.DDP(model)
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        zero.model(x, y).backward()
        optimizer.step()
"""

RIGHT = {
    "17.2": (TRAIN_FLAT, TRAIN_ASYNC, TRAIN_BY_HOOKS, TRAIN_BY_THE_ENGINE),
    "17.1": (_COLLECT, _OBJECTS),
    "17.3": (EVALUATE_DETACHED, EVALUATE_GATHERED, EVALUATE_NAMED_LOSS),
    "17.4": (PLACE_TORCH, PLACE_MODULO),
}

MISTAKES = {
    "17.2": TRAIN_MISTAKES,
    "17.1": UNEVEN_MISTAKES,
    "17.3": EVALUATE_MISTAKES,
    "17.4": PLACE_MISTAKES,
}
