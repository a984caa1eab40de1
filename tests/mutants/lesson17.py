"""Lesson 17: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson17 import EVALUATE, PLACE, TRAIN, UNEVEN, UNEVEN_STUB

from .sources import edit

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

TRAIN_MUTANTS = {
    "own weights": (edit(TRAIN, _BROADCAST, ""), "the ranks began with different weights"),
    "no reduction": (edit(TRAIN, _REDUCE, ""), "nothing was reduced"),
    "sum": (edit(TRAIN, "                param.grad /= dist.get_world_size()\n", ""), "summed over ranks"),
    "divides twice": (edit(TRAIN, "/= dist.get_world_size()", "/= dist.get_world_size() ** 2"), "divided"),
    "rate by rank": (edit(TRAIN, "lr=lr)", "lr=lr * (1 + dist.get_rank()))"), "the learning rate differs by rank"),
    "no zero_grad": (edit(TRAIN, "        optimizer.zero_grad()\n", ""), "zero_grad() is missing"),
    "two faults": (
        edit(TRAIN, _BROADCAST, "", "lr=lr)", "lr=lr * (1 + dist.get_rank()))"),
        "give all of them rank 0's, before the first step; the learning rate differs by rank",
    ),
    "mean of the weights": (
        edit(
            TRAIN,
            "        dist.broadcast(param.data, src=0)\n",
            "        dist.all_reduce(param.data)\n        param.data /= dist.get_world_size()\n",
        ),
        "rank 0's count",
    ),
    "last rank's weights": (edit(TRAIN, "src=0", "src=dist.get_world_size() - 1"), "rank 0's count"),
    "frozen left out": (
        edit(
            TRAIN,
            "        dist.broadcast(param.data, src=0)\n",
            "        if param.requires_grad:\n            dist.broadcast(param.data, src=0)\n",
        ),
        "broadcast every parameter",
    ),
    "reduces after the step": (
        edit(TRAIN, _REDUCE + _STEP, _STEP + _REDUCE),
        "nothing was reduced",
    ),
    "rank 0's gradient": (
        edit(
            TRAIN,
            "dist.all_reduce(param.grad)\n                param.grad /= dist.get_world_size()",
            "dist.broadcast(param.grad, 0)",
        ),
        "rank 0's gradient alone",
    ),
    "no wait": (
        edit(TRAIN, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        "without waiting",
    ),
    "forgets None": (edit(TRAIN, "            if param.grad is not None:\n", "            if True:\n"), "leave it out"),
    "no step": (edit(TRAIN, _STEP, ""), "optimizer.step() is missing"),
    "first batch alone": (edit(TRAIN, _STEP, _STEP + "        break\n"), "not every batch was used"),
    "float32 only": (
        edit(
            TRAIN,
            "dist.all_reduce(param.grad)",
            "wide = param.grad.float()\n                dist.all_reduce(wide)\n                param.grad = wide",
        ),
        "float",
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

UNEVEN_MUTANTS = {
    "the patient as it came": (
        edit(UNEVEN_STUB, '    raise Todo("17.1")  # take this line out, and mend the patient\n', ""),
        "before each step ask whether every rank has a batch",
    ),
    "asks nobody": (
        edit(UNEVEN, _FLAG, "        everyone = torch.tensor(0 if batch is None else 1)\n"),
        "before each step ask whether every rank has a batch",
    ),
    "as long as one has a batch": (
        edit(UNEVEN, "ReduceOp.MIN", "ReduceOp.MAX"),
        "first ask whether every rank has one",
    ),
    "sum is not zero": (edit(UNEVEN, ", dist.ReduceOp.MIN", ""), "first ask whether every rank has one"),
    "the shortest goes on with nothing": (
        edit(
            UNEVEN,
            "ReduceOp.MIN",
            "ReduceOp.MAX",
            "        model(*batch).backward()\n",
            "        if batch is not None:\n            model(*batch).backward()\n"
            "        else:\n            (model(torch.zeros(5), torch.tensor(0.0)) * 0).backward()\n",
        ),
        "all stop together",
    ),
    "counts one too many": (
        edit(UNEVEN, "            return steps\n", "            return steps + 1\n"),
        "count a step after it was made",
    ),
    "returns its own count": (
        edit(_COLLECT, "return int(count)", "return len(mine)"),
        "the shortest rank ends the loop",
    ),
    "returns the longest": (
        edit(
            _COLLECT,
            "    return int(count)",
            "    longest = torch.tensor([len(mine)])\n    dist.all_reduce(longest, op=dist.ReduceOp.MAX)\n"
            "    return int(longest)",
        ),
        "the shortest rank ends the loop",
    ),
    "one step fewer": (edit(_COLLECT, "mine[: count.item()]", "mine[: count.item() - 1]"), "too early"),
    "rank 0's count": (
        edit(_COLLECT, "dist.all_reduce(count, op=dist.ReduceOp.MIN)", "dist.broadcast(count, 0)"),
        "rank",
    ),
    "goes on alone": (
        edit(
            _COLLECT,
            "    return int(count)",
            "    for x, y in mine[count.item() :]:\n        optimizer.zero_grad()\n        model(x, y).backward()\n"
            "        optimizer.step()\n    return int(count)",
        ),
        "went on alone",
    ),
    "sum": (edit(UNEVEN, "                param.grad /= dist.get_world_size()\n", ""), "summed over ranks"),
    "returns nothing": (edit(UNEVEN, "            return steps\n", "            return\n"), "`return` is missing"),
    "no wait": (edit(UNEVEN, "dist.ReduceOp.MIN)", "dist.ReduceOp.MIN, async_op=True)"), "without waiting"),
    "takes its length": (edit(_COLLECT, "mine = list(batches)", "mine = batches"), "have no length"),
    "StopIteration": (edit(UNEVEN, "next(iterator, None)", "next(iterator)"), "next(iterator, None)"),
    "next of the batches": (edit(UNEVEN, "iter(batches)", "batches"), "iter(batches) makes one"),
    "keeps gradients": (edit(UNEVEN, "        optimizer.zero_grad()\n", ""), "a gradient kept back"),
    "barrier": (
        edit(UNEVEN, "dist.all_reduce(everyone, dist.ReduceOp.MIN)", "dist.barrier()"),
        "rank",
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

EVALUATE_MUTANTS = {
    "keeps the graph": (
        edit(
            EVALUATE,
            "    with torch.no_grad():\n        for x, y in batches:\n" + _ADD,
            "    losses = []\n    for x, y in batches:\n        losses.append((model(x, y), len(x)))\n"
            "    for loss, size in losses:\n        total += torch.tensor([loss.item() * size, size])\n",
        ),
        "a loss keeps its graph",
    ),
    "a mean of batches": (
        edit(EVALUATE, _ADD, "            total += torch.tensor([model(x, y).item(), 1])\n"),
        "multiply each mean",
    ),
    "no reduction": (edit(EVALUATE, "    dist.all_reduce(total)\n", ""), "nothing is reduced"),
    "mean of means": (
        edit(
            EVALUATE,
            _END,
            "    mean = (total[0] / total[1].clamp(min=1)).view(1)\n    dist.all_reduce(mean)\n"
            "    return (mean / dist.get_world_size()).item()\n",
        ),
        "the mean of the ranks' means",
    ),
    "divides by the ranks too": (
        edit(
            EVALUATE,
            _END,
            "    dist.all_reduce(total)\n    return (total[0] / total[1] / dist.get_world_size()).item()\n",
        ),
        "divided by the number of ranks as well",
    ),
    "own number of samples": (
        edit(
            EVALUATE,
            _END,
            "    own = total[1].clone().clamp(min=1)\n    dist.all_reduce(total)\n    return (total[0] / own).item()\n",
        ),
        "the numbers of samples were not",
    ),
    "not divided": (edit(EVALUATE, "(total[0] / total[1]).item()", "total[0].item()"), "not divided"),
    "a tensor": (edit(EVALUATE, "(total[0] / total[1]).item()", "total[0] / total[1]"), "return a float"),
    "leaves eval mode": (edit(EVALUATE, "    model.train(was)\n", ""), "leave it as you found it"),
    "always back to training": (edit(EVALUATE, "model.train(was)", "model.train()"), "leave it as you found it"),
    "dropout stays on": (edit(EVALUATE, "    model.eval()\n", ""), "dropout is on"),
    "returns nothing": (edit(EVALUATE, "    return (total[0] / total[1]).item()\n", ""), "`return` is missing"),
    "reduces in the loop": (
        edit(EVALUATE, _ADD, _ADD.rstrip() + "\n            dist.all_reduce(torch.zeros(1))\n"),
        "rank",
    ),
    "gradients off for good": (
        edit(EVALUATE, "    with torch.no_grad():\n", "    torch.set_grad_enabled(False)\n    if True:\n"),
        "torch.no_grad() in a with statement",
    ),
    "reduces the mean": (
        edit(
            EVALUATE,
            _END,
            "    mean = (total[0] / total[1].clamp(min=1)).view(1)\n    dist.all_reduce(mean)\n"
            "    return mean.item()\n",
        ),
        "a sum of means",
    ),
    "no wait": (edit(EVALUATE, "dist.all_reduce(total)", "dist.all_reduce(total, async_op=True)"), "without waiting"),
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

PLACE_MUTANTS = {
    "rank is the world size": (
        edit(PLACE, 'int(environment["RANK"])', 'int(environment["WORLD_SIZE"])'),
        "no process would be rank 0",
    ),
    "rank on the node": (edit(PLACE, 'int(environment["RANK"])', "local"), "RANK is the number in the whole job"),
    "everyone on cuda:0": (edit(PLACE, 'f"cuda:{local}"', '"cuda:0"'), "every process on a node would use cuda:0"),
    "just cuda": (edit(PLACE, 'f"cuda:{local}"', '"cuda"'), "every process on a node would use cuda:0"),
    "cuda by rank": (edit(PLACE, "cuda:{local}", "cuda:{int(environment['RANK'])}"), "go by LOCAL_RANK"),
    "ids by rank": (edit(PLACE, "[local] if", "[int(environment['RANK'])] if"), "go by LOCAL_RANK"),
    "all of the node": (edit(PLACE, "[local] if", "list(range(gpus)) if"), "only name one GPU"),
    "strings": (edit(PLACE, 'int(environment["RANK"])', 'environment["RANK"]'), "int() them"),
    "string id": (edit(PLACE, 'int(environment["LOCAL_RANK"])', 'environment["LOCAL_RANK"]'), "int() them"),
    "a number, no list": (edit(PLACE, "[local] if", "local if"), "a list with one number"),
    "cuda without a GPU": (edit(PLACE, ' if gpus else "cpu"', ""), "without a GPU the device is cpu"),
    "ids without a GPU": (edit(PLACE, " if gpus else None", ""), "without a GPU the device is cpu"),
    "the node's GPUs are the world": (
        edit(PLACE, 'int(environment["WORLD_SIZE"])', "max(1, gpus)"),
        "WORLD_SIZE is the number",
    ),
    "another name": (edit(PLACE, '"LOCAL_RANK"', '"SLURM_LOCALID"'), "the names are RANK"),
    "returns nothing": (edit(PLACE, "    return {", "    got = {"), "`return` is missing"),
}

RIGHT = {
    "17.2": (TRAIN_FLAT, TRAIN_ASYNC),
    "17.1": (_COLLECT, _OBJECTS),
    "17.3": (EVALUATE_DETACHED, EVALUATE_GATHERED),
    "17.4": (PLACE_TORCH, PLACE_MODULO),
}

WRONG = {
    "17.2": TRAIN_MUTANTS,
    "17.1": UNEVEN_MUTANTS,
    "17.3": EVALUATE_MUTANTS,
    "17.4": PLACE_MUTANTS,
}
