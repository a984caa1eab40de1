"""Lesson 13: other right answers, and the mistakes that the check must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson13 import TRAIN

from .sources import edit

# ---------------------------------------------------------------------- 13.1

TRAIN_IN_CHUNKS = edit(
    TRAIN,
    '    rate = optimizer.param_groups[0]["lr"] * batch_size / 32\n',
    "",
    "    n, losses = len(data.inputs), []\n",
    "    n, losses = len(data.inputs), []\n"
    "    W = -(-n // batch_size)\n"
    "    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: batch_size / 32 * min(1.0, (s + 1) / W))\n",
    '            optimizer.param_groups[0]["lr"] = rate * min(1, (len(losses) + 1) / math.ceil(n / batch_size))\n',
    "            part = numbers.tensor_split(zero.world_size)[zero.rank]\n",
    "data.inputs[numbers[mine]]",
    "data.inputs[part]",
    "data.targets[numbers[mine]]",
    "data.targets[part]",
    "            optimizer.step()\n",
    "            optimizer.step()\n            warm_up.step()\n",
    "data.validation_inputs[mine]",
    "data.validation_inputs.tensor_split(zero.world_size)[zero.rank]",
    "data.validation_targets[mine]",
    "data.validation_targets.tensor_split(zero.world_size)[zero.rank]",
)

TRAIN_BY_HAND = (
    TRAIN[: TRAIN.index("\n\ndef train")]
    + """

def share_statistics(model, N):
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for one in (module.running_mean, module.running_var):
                dist.all_reduce(one)
                one /= N


def train(model, data, stage, epochs, batch_size, make_optimizer, seed):
    engine = (zerolab.DDP, zerolab.Zero1, zerolab.Zero2, zerolab.Zero3)[stage](model)
    rank, world = dist.get_rank(), dist.get_world_size()
    opt, history, n = make_optimizer(list(model.parameters())), [], len(data.targets)
    bases = [group["lr"] * batch_size / 32 for group in opt.param_groups]
    per_epoch = (n + batch_size - 1) // batch_size
    for step in range(epochs * per_epoch):
        epoch, at = divmod(step, per_epoch)
        if at == 0:
            generator = torch.Generator()
            generator.manual_seed(seed + epoch)
            order = torch.randperm(n, generator=generator).tolist()
        batch = order[at * batch_size : (at + 1) * batch_size]
        own = batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]
        for group, base in zip(opt.param_groups, bases):
            group["lr"] = base * (step + 1) / per_epoch if epoch == 0 else base
        opt.zero_grad(set_to_none=False)
        each = F.cross_entropy(model(data.inputs[own].double() / 255), data.targets[own], reduction="none")
        (each.sum() * (world / len(batch))).backward()
        opt.step()
        sums = [None] * world
        dist.all_gather_object(sums, float(each.detach().sum()))
        history.append(sum(sums) / len(batch))
    share_statistics(engine.model, world)
    engine.model.eval()
    with torch.inference_mode():
        guess = model(data.validation_inputs / 255).argmax(-1)
    return history, float((guess == data.validation_targets).double().mean())


def main():
    zerolab.init()
"""
)

TRAIN_SHARES_IN_EVERY_STEP = edit(
    TRAIN,
    "            optimizer.zero_grad()\n",
    "            optimizer.zero_grad()\n            zero.broadcast_buffers()\n",
    "    zero.broadcast_buffers()\n    model.eval()",
    "    model.eval()",
    "torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))",
    "(torch.manual_seed(seed + epoch), torch.randperm(n))[1]",
    "        hits = (model(data.validation_inputs[mine] / 255).argmax(1) == data.validation_targets[mine]).sum()\n",
    "        hits = torch.tensor(0.0)\n"
    "        for images, answers in zip(data.validation_inputs.split(3), data.validation_targets.split(3)):\n"
    "            hits += (model(images[mine] / 255).argmax(1) == answers[mine]).sum()\n",
)

TRAIN_WITH_THE_LAST_RANKS_BUFFERS = edit(
    TRAIN,
    "    zero.broadcast_buffers()\n",
    "    for buffer in model.buffers():\n        dist.broadcast(buffer, src=zero.world_size - 1)\n",
)

TRAIN_MICRO = edit(
    TRAIN,
    "            logits = model(data.inputs[numbers[mine]] / 255)\n"
    '            loss = F.cross_entropy(logits, data.targets[numbers[mine]], reduction="sum") / len(numbers)\n',
    "            def loss_of(part):\n"
    '                all_of = F.cross_entropy(model(data.inputs[part] / 255), data.targets[part], reduction="sum")\n'
    "                return all_of / len(numbers)\n\n"
    "            loss = loss_of(numbers[mine])\n",
    "total = loss.detach()",
    "total = loss.detach().clone()",
)

_ORDER = "order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))"
_RATE = 'optimizer.param_groups[0]["lr"] = rate * min(1, (len(losses) + 1) / math.ceil(n / batch_size))'
_BASE = 'rate = optimizer.param_groups[0]["lr"] * batch_size / 32'
_LOSS = 'loss = F.cross_entropy(logits, data.targets[numbers[mine]], reduction="sum") / len(numbers)'
_MEAN = "loss = F.cross_entropy(logits, data.targets[numbers[mine]])"
_BACKWARD = "(zero.world_size * loss).backward()"
_RETURN = "return losses, hits.item() / len(data.validation_targets)"
_SHORT = "            short = -len(numbers) % zero.world_size\n"

TRAIN_MUTANTS = {
    "no sampler": (
        edit(
            TRAIN, "numbers[mine]", "numbers", _BACKWARD, "loss.backward()", "            dist.all_reduce(total)\n", ""
        ),
        "N times the work",
    ),
    "each rank the same part": (
        edit(TRAIN, "numbers[mine]", "numbers[: -(-len(numbers) // zero.world_size)]"),
        "each rank the same samples",
    ),
    "each rank another order": (edit(TRAIN, "seed + epoch", "seed + epoch + 100 * zero.rank"), "shuffle differently"),
    "each rank its own random order": (
        edit(TRAIN, _ORDER, "torch.manual_seed(zero.rank)\n        order = torch.randperm(n)"),
        "the order of another seed",
    ),
    "set_epoch forgotten": (edit(TRAIN, "manual_seed(seed + epoch)", "manual_seed(seed)"), "set_epoch() is never"),
    "the seed forgotten": (edit(TRAIN, "manual_seed(seed + epoch)", "manual_seed(epoch)"), "the order of another seed"),
    "epochs counted from 1": (edit(TRAIN, "seed + epoch", "seed + epoch + 1"), "the order of another seed"),
    "one generator for all epochs": (
        edit(
            TRAIN,
            _ORDER,
            "order = torch.randperm(n, generator=generator)",
            "    n, losses",
            "    generator = torch.Generator().manual_seed(seed)\n    n, losses",
        ),
        "the epoch before go on",
    ),
    "not shuffled": (edit(TRAIN, _ORDER, "order = torch.arange(n)"), "in the order of the data"),
    "the last batch dropped": (
        edit(TRAIN, "order.split(batch_size)", "order[: n // batch_size * batch_size].split(batch_size)"),
        "drop_last",
    ),
    "the rest of a batch left out": (
        edit(TRAIN, "numbers[mine]", "numbers[: max(1, len(numbers) // zero.world_size) * zero.world_size][mine]"),
        "some samples are left out",
    ),
    "dropped on some ranks": (
        edit(
            TRAIN,
            f"            {_RATE}\n",
            f"            if len(numbers[mine]) == 0:\n                continue\n            {_RATE}\n",
        ),
        "the ranks make different calls",
    ),
    "filled up": (
        edit(
            TRAIN,
            f"            {_RATE}\n",
            f"{_SHORT}            numbers = torch.cat([numbers, numbers[:1].expand(short)])\n            {_RATE}\n",
        ),
        "samples come twice",
    ),
    "the data sharded first": (
        edit(TRAIN, "order.split(batch_size)", "order[mine].split(batch_size)", "numbers[mine]", "numbers"),
        "batch_size is that of all ranks together",
    ),
    "a sampler with whole batches": (
        edit(TRAIN, "numbers[mine]", "order.roll(-zero.rank * batch_size)[: batch_size]"),
        "of all ranks together",
    ),
    "mean of means": (edit(TRAIN, _LOSS, _MEAN, _BACKWARD, "loss.nan_to_num().backward()"), "mean of"),
    "factor N forgotten": (edit(TRAIN, _BACKWARD, "loss.backward()"), "the gradient is 1/N"),
    "divided by N": (edit(TRAIN, _BACKWARD, "(loss / zero.world_size).backward()"), "the gradient is 1/N"),
    "N twice": (edit(TRAIN, _BACKWARD, "(zero.world_size**2 * loss).backward()"), "N times too large"),
    "divided twice": (edit(TRAIN, ', reduction="sum") / len(numbers)', ") / len(numbers)"), "divided twice"),
    "a sum": (edit(TRAIN, " / len(numbers)\n", "\n"), "a sum, which grows with the batch"),
    "divided by batch_size": (
        edit(TRAIN, "/ len(numbers)\n", "/ batch_size\n"),
        "the last batch of an epoch is smaller",
    ),
    "nll_loss on logits": (edit(TRAIN, "F.cross_entropy", "F.nll_loss"), "nll_loss() on logits"),
    "softmax first": (edit(TRAIN, "cross_entropy(logits", "cross_entropy(logits.softmax(1)"), "softmax before"),
    "the loss of this rank": (edit(TRAIN, "            dist.all_reduce(total)\n", ""), "this rank's part"),
    "N times the loss": (edit(TRAIN, "total = loss.detach()", "total = zero.world_size * loss.detach()"), "factor N"),
    "loss averaged": (edit(TRAIN, "total.item()", "total.item() / zero.world_size"), "1/N of it"),
    "rate not scaled": (edit(TRAIN, _BASE, 'rate = optimizer.param_groups[0]["lr"]'), "not scaled"),
    "rate scaled twice": (edit(TRAIN, "batch_size / 32\n", "batch_size / 32 * zero.world_size\n"), "scaled twice"),
    "rate scaled by N": (edit(TRAIN, "* batch_size / 32\n", "* zero.world_size\n"), "scaled"),
    "rate of this rank's part": (
        edit(TRAIN, "batch_size / 32\n", "batch_size / zero.world_size / 32\n"),
        "scaled by this rank's part",
    ),
    "square root": (edit(TRAIN, "* batch_size / 32\n", "* (batch_size / 32) ** 0.5\n"), "by the square root"),
    "no warm-up": (
        edit(TRAIN, _RATE, 'optimizer.param_groups[0]["lr"] = rate'),
        "no warm-up",
    ),
    "warm-up from 0": (edit(TRAIN, "(len(losses) + 1) /", "len(losses) /"), "the first is not 0"),
    "warm-up again": (
        edit(TRAIN, "(len(losses) + 1) /", "(len(losses) % math.ceil(n / batch_size) + 1) /"),
        "comes again in every epoch",
    ),
    "warm-up by epochs": (
        edit(TRAIN, "min(1, (len(losses) + 1) / math.ceil(n / batch_size))", "(epoch + 1) / epochs"),
        "the warm-up counts epochs",
    ),
    "W rounded down": (edit(TRAIN, "math.ceil(n / batch_size)", "(n // batch_size)"), "W is a step short"),
    "W of one rank": (
        edit(TRAIN, "math.ceil(n / batch_size)", "math.ceil(n / batch_size / zero.world_size)"),
        "W is divided by N",
    ),
    "warm-up from the unscaled rate": (
        edit(
            TRAIN,
            _RATE,
            f"base = rate * 32 / batch_size\n            {_RATE.replace('rate *', 'base + (rate - base) *')}",
        ),
        "starts at the optimizer's own rate",
    ),
    "a rate of one's own": (
        edit(TRAIN, _BASE, "rate = 0.02 * batch_size / 32"),
        "wrong by the same factor",
    ),
    "rate after the step": (
        edit(TRAIN, f"            {_RATE}\n", "", "optimizer.step()\n", f"optimizer.step()\n            {_RATE}\n"),
        "set after the step",
    ),
    "rate compounds": (
        edit(TRAIN, "= rate * min", '= optimizer.param_groups[0]["lr"] * batch_size / 32 * min', f"    {_BASE}\n", ""),
        "multiplied again in each step",
    ),
    "gradients never zeroed": (edit(TRAIN, "            optimizer.zero_grad()\n", ""), "zero_grad() is missing"),
    "gradients zeroed before the step": (
        edit(
            TRAIN,
            "            optimizer.step()\n            optimizer.zero_grad()\n",
            "            optimizer.zero_grad()\n            optimizer.step()\n",
        ),
        "comes between backward() and step()",
    ),
    "an optimizer for each epoch": (
        edit(
            TRAIN, f"        {_ORDER}\n", f"        {_ORDER}\n        optimizer = make_optimizer(model.parameters())\n"
        ),
        "a new one has forgotten its momentum",
    ),
    "losses of the last epoch": (
        edit(TRAIN, "return losses,", "return losses[-math.ceil(n / batch_size) :],"),
        "these look like those of one epoch",
    ),
    "no step": (edit(TRAIN, "            optimizer.step()\n", ""), "optimizer stepped 0 times"),
    "a step on rank 0": (
        edit(
            TRAIN,
            "            optimizer.step()\n",
            "            if zero.rank == 0:\n                optimizer.step()\n",
        ),
        "as many optimizer.step() calls",
    ),
    "always stage 2": (edit(TRAIN, "zerolab.shard(model, stage)", "zerolab.Zero2(model)"), "the engine is of stage 2"),
    "not sharded": (
        edit(
            TRAIN,
            "zero = zerolab.shard(model, stage)\n",
            "class zero:\n        rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            "        broadcast_buffers = staticmethod(lambda: None)\n\n",
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
    "images of 0 to 255": (
        edit(TRAIN, "[numbers[mine]] / 255", "[numbers[mine]].float()", "[mine] / 255", "[mine].float()"),
        "the images are 0 to 255",
    ),
    "bytes": (edit(TRAIN, "[numbers[mine]] / 255", "[numbers[mine]]"), "the images are 0 to 255"),
    "own statistics": (edit(TRAIN, "    zero.broadcast_buffers()\n", ""), "running statistics are each rank's own"),
    "statistics summed": (
        edit(
            TRAIN,
            "    zero.broadcast_buffers()\n",
            "    for buffer in model.buffers():\n        dist.all_reduce(buffer)\n",
        ),
        "summed over the ranks",
    ),
    "shared too early": (
        edit(
            TRAIN, "    zero.broadcast_buffers()\n", "", "    n, losses", "    zero.broadcast_buffers()\n    n, losses"
        ),
        "running statistics are each rank's own",
    ),
    "no eval": (edit(TRAIN, "    model.eval()\n", ""), "model.eval() is missing"),
    "eval from the start": (
        edit(TRAIN, "    model.eval()\n", "", "    n, losses", "    model.eval()\n    n, losses"),
        "model.train() is missing",
    ),
    "validated with training data": (
        edit(TRAIN, "data.validation_inputs", "data.inputs", "data.validation_targets", "data.targets"),
        "validated with training data",
    ),
    "learns from validation data": (
        edit(TRAIN, "data.inputs[numbers[mine]]", "data.validation_inputs[numbers[mine] % 7]"),
        "it learns from validation data",
    ),
    "validated with bytes": (
        edit(TRAIN, "validation_inputs[mine] / 255", "validation_inputs[mine].float()"),
        "in validation too",
    ),
    "validated with a sampler": (
        edit(
            TRAIN,
            "    model.eval()\n",
            "    model.eval()\n    from torch.utils.data.distributed import DistributedSampler\n"
            "    mine = list(DistributedSampler(data.validation_inputs, shuffle=False))\n",
            "    dist.all_reduce(hits)\n    return losses, hits.item() / len(data.validation_targets)",
            "    dist.all_reduce(hits)\n    return losses, hits.item() / (len(mine) * zero.world_size)",
        ),
        "as with DistributedSampler",
    ),
    "divided by the training samples": (
        edit(TRAIN, "hits.item() / len(data.validation_targets)", "hits.item() / n"),
        "the number of training samples",
    ),
    "the mean of accuracies": (
        edit(
            TRAIN,
            f"    dist.all_reduce(hits)\n    {_RETURN}",
            "    rate = hits / max(1, len(data.validation_targets[mine]))\n    dist.all_reduce(rate)\n"
            "    return losses, rate.item() / zero.world_size",
        ),
        "the mean of the ranks' accuracies",
    ),
    "this rank's accuracy": (
        edit(
            TRAIN,
            f"    dist.all_reduce(hits)\n    {_RETURN}",
            "    return losses, hits.item() / max(1, len(data.validation_targets[mine]))",
        ),
        "the accuracy of this rank's part",
    ),
    "hits of this rank": (edit(TRAIN, "    dist.all_reduce(hits)\n", ""), "the accuracy of this rank's part"),
    "in percent": (edit(TRAIN, "return losses, hits", "return losses, 100 * hits"), "not a percentage"),
    "nothing returned": (edit(TRAIN, f"    {_RETURN}\n", ""), "`return` is missing"),
}

RIGHT = {
    "13.1": (TRAIN_IN_CHUNKS, TRAIN_BY_HAND, TRAIN_SHARES_IN_EVERY_STEP, TRAIN_MICRO, TRAIN_WITH_THE_LAST_RANKS_BUFFERS)
}

WRONG = {"13.1": TRAIN_MUTANTS}
