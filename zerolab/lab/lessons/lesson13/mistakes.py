"""Lesson 13: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson13 import TRAIN

ANOTHER_SEED = "that is the order of another seed: epoch e shuffles with seed + e"
SHUFFLE_DIFFERENTLY = (
    "the ranks shuffle differently: some samples come twice in an epoch, and others never. All ranks need one and the "
    "same order, of which each takes its part: the seed may not depend on the rank"
)
GRADIENT_1_N = (
    "the loss is right, and the gradient is 1/N of what it should be: the engine averages over the ranks,"
    " so call backward() on N times this rank's part. (With Adam this hardly shows: it divides by the "
    "size of the gradient)"
)
NOT_SCALED = "not scaled: the rate is meant for 32 samples, and a step has batch_size: rate * batch_size / 32"
MEAN_OF_MEANS = "the mean of means: each rank divided by its own number of samples. Divide by the number of all ranks"
OWN_STATISTICS = (
    "BatchNorm's running statistics are each rank's own, from its own samples, so the ranks validate with"
    " different models: zero.broadcast_buffers(), or their mean over the ranks, before validation"
)
OWN_ACCURACY = "that is the accuracy of this rank's part: add up the hits and the counts of all ranks"

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

TRAIN_MISTAKES = {
    "no sampler": Mistake(
        edit(
            TRAIN, "numbers[mine]", "numbers", _BACKWARD, "loss.backward()", "            dist.all_reduce(total)\n", ""
        ),
        "every rank computes all samples of the step, N times the work: a rank takes its part of them",
    ),
    "each rank the same part": Mistake(
        edit(TRAIN, "numbers[mine]", "numbers[: -(-len(numbers) // zero.world_size)]"),
        (
            "each rank the same samples: a rank takes its own part of the step, numbers[rank::N] or "
            "numbers.tensor_split(N)[rank]"
        ),
    ),
    "each rank another order": Mistake(
        edit(TRAIN, "seed + epoch", "seed + epoch + 100 * zero.rank"),
        SHUFFLE_DIFFERENTLY,
    ),
    "each rank its own random order": Mistake(
        edit(TRAIN, _ORDER, "torch.manual_seed(zero.rank)\n        order = torch.randperm(n)"),
        SHUFFLE_DIFFERENTLY,
    ),
    "set_epoch forgotten": Mistake(
        edit(TRAIN, "manual_seed(seed + epoch)", "manual_seed(seed)"),
        (
            "the order of the first epoch again, as with a DistributedSampler whose set_epoch() is never called: "
            "the generator of epoch e starts from seed + e"
        ),
    ),
    "the seed forgotten": Mistake(
        edit(TRAIN, "manual_seed(seed + epoch)", "manual_seed(epoch)"),
        ANOTHER_SEED,
    ),
    "epochs counted from 1": Mistake(
        edit(TRAIN, "seed + epoch", "seed + epoch + 1"),
        ANOTHER_SEED,
    ),
    "one generator for all epochs": Mistake(
        edit(
            TRAIN,
            _ORDER,
            "order = torch.randperm(n, generator=generator)",
            "    n, losses",
            "    generator = torch.Generator().manual_seed(seed)\n    n, losses",
        ),
        (
            "the random numbers of the epoch before go on: each epoch makes its own generator, from seed + e, so "
            "that a run can start again at any epoch"
        ),
    ),
    "not shuffled": Mistake(
        edit(TRAIN, _ORDER, "order = torch.arange(n)"),
        "the samples come in the order of the data: each epoch shuffles them, with seed + epoch",
    ),
    "the last batch dropped": Mistake(
        edit(TRAIN, "order.split(batch_size)", "order[: n // batch_size * batch_size].split(batch_size)"),
        "drop_last: the last batch of an epoch is smaller than the others, and belongs to it",
    ),
    "the rest of a batch left out": Mistake(
        edit(TRAIN, "numbers[mine]", "numbers[: max(1, len(numbers) // zero.world_size) * zero.world_size][mine]"),
        ("some samples are left out: a step's samples may not divide by N evenly, and all of them belong to the step"),
    ),
    "dropped on some ranks": Mistake(
        edit(
            TRAIN,
            f"            {_RATE}\n",
            f"            if len(numbers[mine]) == 0:\n                continue\n            {_RATE}\n",
        ),
        (
            "the ranks make different calls. All run as many forwards and backwards, with the same collectives, "
            "also one that has nothing to learn from"
        ),
    ),
    "filled up": Mistake(
        edit(
            TRAIN,
            f"            {_RATE}\n",
            f"{_SHORT}            numbers = torch.cat([numbers, numbers[:1].expand(short)])\n            {_RATE}\n",
        ),
        ("samples come twice, as with DistributedSampler, which fills up the last ranks: all others must come once"),
    ),
    "the data sharded first": Mistake(
        edit(TRAIN, "order.split(batch_size)", "order[mine].split(batch_size)", "numbers[mine]", "numbers"),
        (
            "too many samples in a step, and too few steps: batch_size is that of all ranks together, so a "
            "rank's part is about batch_size / N"
        ),
    ),
    "a sampler with whole batches": Mistake(
        edit(TRAIN, "numbers[mine]", "order.roll(-zero.rank * batch_size)[: batch_size]"),
        (
            "batch_size samples on each rank: it is that of all ranks together, so step s of an epoch is "
            "order[s * batch_size : (s + 1) * batch_size], of which each rank takes its part"
        ),
    ),
    "mean of means": Mistake(
        edit(TRAIN, _LOSS, _MEAN, _BACKWARD, "loss.nan_to_num().backward()"),
        MEAN_OF_MEANS,
    ),
    "means reported": Mistake(
        edit(TRAIN, _LOSS, f"{_MEAN}.nan_to_num() / zero.world_size"),
        MEAN_OF_MEANS,
    ),
    "factor N forgotten": Mistake(
        edit(TRAIN, _BACKWARD, "loss.backward()"),
        GRADIENT_1_N,
    ),
    "divided by N": Mistake(
        edit(TRAIN, _BACKWARD, "(loss / zero.world_size).backward()"),
        GRADIENT_1_N,
    ),
    "N twice": Mistake(
        edit(TRAIN, _BACKWARD, "(zero.world_size**2 * loss).backward()"),
        ("the gradient is N times too large: multiplied by N, and by something that is N times too large already"),
    ),
    "divided twice": Mistake(
        edit(TRAIN, ', reduction="sum") / len(numbers)', ") / len(numbers)"),
        "divided twice: reduction='mean' has divided by this rank's samples already, so use 'sum'",
    ),
    "a sum": Mistake(
        edit(TRAIN, " / len(numbers)\n", "\n"),
        "a sum, which grows with the batch: divide by the number of samples of all ranks",
    ),
    "divided by batch_size": Mistake(
        edit(TRAIN, "/ len(numbers)\n", "/ batch_size\n"),
        (
            "divided by batch_size, but the last batch of an epoch is smaller: divide by the number of the step's"
            " samples"
        ),
    ),
    "nll_loss on logits": Mistake(
        edit(TRAIN, "F.cross_entropy", "F.nll_loss"),
        "nll_loss() on logits: it takes logarithms of probabilities, and cross_entropy() takes logits",
    ),
    "softmax first": Mistake(
        edit(TRAIN, "cross_entropy(logits", "cross_entropy(logits.softmax(1)"),
        "softmax before cross_entropy(), which applies it itself",
    ),
    "the loss of this rank": Mistake(
        edit(TRAIN, "            dist.all_reduce(total)\n", ""),
        "that is this rank's part: the mean over all ranks must be reported",
    ),
    "N times the loss": Mistake(
        edit(TRAIN, "total = loss.detach()", "total = zero.world_size * loss.detach()"),
        "N times too large: the loss was reported with the factor N that only backward() needs",
    ),
    "loss averaged": Mistake(
        edit(TRAIN, "total.item()", "total.item() / zero.world_size"),
        (
            "1/N of it: the parts of the ranks are to be added up, not averaged, once they are divided by the "
            "whole count"
        ),
    ),
    "rate not scaled": Mistake(
        edit(TRAIN, _BASE, 'rate = optimizer.param_groups[0]["lr"]'),
        NOT_SCALED,
    ),
    "rate scaled twice": Mistake(
        edit(TRAIN, "batch_size / 32\n", "batch_size / 32 * zero.world_size\n"),
        ("scaled twice: batch_size counts the samples of all ranks already, so nothing is to be multiplied by N"),
    ),
    "rate scaled by N": Mistake(
        edit(TRAIN, "* batch_size / 32\n", "* zero.world_size\n"),
        (
            "scaled by the number of ranks: batch_size counts the samples of all ranks already, so the factor"
            " is batch_size / 32"
        ),
    ),
    "rate of this rank's part": Mistake(
        edit(TRAIN, "batch_size / 32\n", "batch_size / zero.world_size / 32\n"),
        "scaled by this rank's part of the batch: batch_size counts the samples of all ranks",
    ),
    "rate of a smaller step": Mistake(
        edit(TRAIN, _RATE, _RATE.replace("rate *", "rate * len(numbers) / batch_size *")),
        "the last step of an epoch got a smaller rate: the rate follows batch_size, also if a step has fewer samples",
    ),
    "square root": Mistake(
        edit(TRAIN, "* batch_size / 32\n", "* (batch_size / 32) ** 0.5\n"),
        "scaled by the square root of batch_size / 32: the linear rule is asked for",
    ),
    "no warm-up": Mistake(
        edit(TRAIN, _RATE, 'optimizer.param_groups[0]["lr"] = rate'),
        "no warm-up: in the first epoch of W steps, step s has (s + 1) / W of the rate",
    ),
    "warm-up from 0": Mistake(
        edit(TRAIN, "(len(losses) + 1) /", "len(losses) /"),
        ("the warm-up is a step late: step s of the first epoch has (s + 1) / W of the rate, so the first is not 0"),
    ),
    "warm-up again": Mistake(
        edit(TRAIN, "(len(losses) + 1) /", "(len(losses) % math.ceil(n / batch_size) + 1) /"),
        "the warm-up comes again in every epoch: it is for the first one only",
    ),
    "warm-up by epochs": Mistake(
        edit(TRAIN, "min(1, (len(losses) + 1) / math.ceil(n / batch_size))", "(epoch + 1) / epochs"),
        ("the warm-up counts epochs: within the first one it rises with each step, to (s + 1) / W, and it ends there"),
    ),
    "warm-up to the end": Mistake(
        edit(TRAIN, "math.ceil(n / batch_size)", "(epochs * math.ceil(n / batch_size))"),
        "the warm-up takes the whole run: it ends with the first epoch, whose W steps it counts",
    ),
    "W a step too long": Mistake(
        edit(TRAIN, "math.ceil(n / batch_size)", "(math.ceil(n / batch_size) + 1)"),
        "the warm-up ends a step late: the last step of the first epoch, s = W - 1, has the whole rate",
    ),
    "W rounded down": Mistake(
        edit(TRAIN, "math.ceil(n / batch_size)", "(n // batch_size)"),
        ("W is a step short: the last, smaller step of an epoch counts as well, so W is math.ceil(n / batch_size)"),
    ),
    "W of one rank": Mistake(
        edit(TRAIN, "math.ceil(n / batch_size)", "math.ceil(n / batch_size / zero.world_size)"),
        (
            "W is the number of steps of an epoch: batch_size is that of all ranks together, so W is "
            "math.ceil(n / batch_size), not a part of it"
        ),
    ),
    "warm-up from the unscaled rate": Mistake(
        edit(
            TRAIN,
            _RATE,
            f"base = rate * 32 / batch_size\n            {_RATE.replace('rate *', 'base + (rate - base) *')}",
        ),
        (
            "the warm-up starts at the optimizer's own rate: it rises to the scaled one in equal parts, from 1 / "
            "W of it on"
        ),
    ),
    "a rate of one's own": Mistake(
        edit(TRAIN, _BASE, "rate = 0.02 * batch_size / 32"),
        "all rates are wrong by the same factor: scale the rate that the optimizer was made with, which is "
        'optimizer.param_groups[0]["lr"] before the first step',
    ),
    "rate after the step": Mistake(
        edit(TRAIN, f"            {_RATE}\n", "", "optimizer.step()\n", f"optimizer.step()\n            {_RATE}\n"),
        "set after the step: a rate counts from the next step() on, so set it before",
    ),
    "rate compounds": Mistake(
        edit(TRAIN, "= rate * min", '= optimizer.param_groups[0]["lr"] * batch_size / 32 * min', f"    {_BASE}\n", ""),
        ("multiplied again in each step: keep the optimizer's own rate, and compute each step's from that"),
    ),
    "gradients never zeroed": Mistake(
        edit(TRAIN, "            optimizer.zero_grad()\n", ""),
        ("zero_grad() is missing: gradients must start from nothing in each step"),
    ),
    "gradients zeroed before the step": Mistake(
        edit(
            TRAIN,
            "            optimizer.step()\n            optimizer.zero_grad()\n",
            "            optimizer.zero_grad()\n            optimizer.step()\n",
        ),
        "the model does not learn: step() finds no gradients: backward() is missing, or zero_grad() follows it",
    ),
    "an optimizer for each epoch": Mistake(
        edit(
            TRAIN, f"        {_ORDER}\n", f"        {_ORDER}\n        optimizer = make_optimizer(model.parameters())\n"
        ),
        ("the optimizer was made anew: a new one has forgotten its momentum. Make one, before the first step"),
    ),
    "losses of the last epoch": Mistake(
        edit(TRAIN, "return losses,", "return losses[-math.ceil(n / batch_size) :],"),
        "the losses of every step of every epoch are asked for, and these are those of one epoch",
    ),
    "no step": Mistake(
        edit(TRAIN, "            optimizer.step()\n", ""),
        "the optimizer never steps: each step ends with optimizer.step(), once",
    ),
    "a step on rank 0": Mistake(
        edit(
            TRAIN,
            "            optimizer.step()\n",
            "            if zero.rank == 0:\n                optimizer.step()\n",
        ),
        ("every rank must make as many optimizer.step() calls: each updates its own copy, or its own shard"),
    ),
    "always stage 2": Mistake(
        edit(TRAIN, "zerolab.shard(model, stage)", "zerolab.Zero2(model)"),
        "`stage` is not used: zerolab.shard(model, stage) takes it",
    ),
    "not sharded": Mistake(
        edit(
            TRAIN,
            "zero = zerolab.shard(model, stage)\n",
            "class zero:\n        rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            "        broadcast_buffers = staticmethod(lambda: None)\n\n",
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
    "images of 0 to 255": Mistake(
        edit(TRAIN, "[numbers[mine]] / 255", "[numbers[mine]].float()", "[mine] / 255", "[mine].float()"),
        "the images are 0 to 255, and the model wants 0 to 1: model(images / 255)",
    ),
    "bytes": Mistake(
        edit(TRAIN, "[numbers[mine]] / 255", "[numbers[mine]]"),
        ("the images are 0 to 255, and the model wants 0 to 1: model(images / 255), which also makes floats of them"),
    ),
    "own statistics": Mistake(
        edit(TRAIN, "    zero.broadcast_buffers()\n", ""),
        OWN_STATISTICS,
    ),
    "statistics summed": Mistake(
        edit(
            TRAIN,
            "    zero.broadcast_buffers()\n",
            "    for buffer in model.buffers():\n        dist.all_reduce(buffer)\n",
        ),
        "BatchNorm's running statistics were summed over the ranks, not averaged",
    ),
    "shared too early": Mistake(
        edit(
            TRAIN, "    zero.broadcast_buffers()\n", "", "    n, losses", "    zero.broadcast_buffers()\n    n, losses"
        ),
        OWN_STATISTICS,
    ),
    "no eval": Mistake(
        edit(TRAIN, "    model.eval()\n", ""),
        "model.eval() is missing: accuracy is measured with dropout or BatchNorm as in training",
    ),
    "eval from the start": Mistake(
        edit(TRAIN, "    model.eval()\n", "", "    n, losses", "    model.eval()\n    n, losses"),
        ("model.train() is missing: after eval() the model trains without dropout, and BatchNorm stands still"),
    ),
    "validated with training data": Mistake(
        edit(TRAIN, "data.validation_inputs", "data.inputs", "data.validation_targets", "data.targets"),
        "validated with training data: it was there in training, and so the accuracy is too good",
    ),
    "learns from validation data": Mistake(
        edit(TRAIN, "data.inputs[numbers[mine]]", "data.validation_inputs[numbers[mine] % 7]"),
        "it learns from validation data: data.inputs and data.targets are for training",
    ),
    "validated with bytes": Mistake(
        edit(TRAIN, "validation_inputs[mine] / 255", "validation_inputs[mine].float()"),
        "in validation too, the images are 0 to 255, and the model wants 0 to 1: model(images / 255)",
    ),
    "validated with a sampler": Mistake(
        edit(
            TRAIN,
            "    model.eval()\n",
            "    model.eval()\n    from torch.utils.data.distributed import DistributedSampler\n"
            "    mine = list(DistributedSampler(data.validation_inputs, shuffle=False))\n",
            "    dist.all_reduce(hits)\n    return losses, hits.item() / len(data.validation_targets)",
            "    dist.all_reduce(hits)\n    return losses, hits.item() / (len(mine) * zero.world_size)",
        ),
        (
            "some validation samples were counted twice, as with DistributedSampler, which fills up the last "
            "ranks: each once"
        ),
    ),
    "divided by the training samples": Mistake(
        edit(TRAIN, "hits.item() / len(data.validation_targets)", "hits.item() / n"),
        "divided by the number of training samples: divide by that of the validation samples",
    ),
    "the mean of accuracies": Mistake(
        edit(
            TRAIN,
            f"    dist.all_reduce(hits)\n    {_RETURN}",
            "    rate = hits / max(1, len(data.validation_targets[mine]))\n    dist.all_reduce(rate)\n"
            "    return losses, rate.item() / zero.world_size",
        ),
        ("the mean of the ranks' accuracies: their parts differ in size. Add up hits and counts, then divide once"),
    ),
    "this rank's accuracy": Mistake(
        edit(
            TRAIN,
            f"    dist.all_reduce(hits)\n    {_RETURN}",
            "    return losses, hits.item() / max(1, len(data.validation_targets[mine]))",
        ),
        OWN_ACCURACY,
    ),
    "known to rank 0": Mistake(
        edit(TRAIN, _RETURN, f"{_RETURN} if zero.rank == 0 else None"),
        "only rank 0 knows the accuracy: every rank returns it, with the hits of all ranks",
    ),
    "hits of this rank": Mistake(
        edit(TRAIN, "    dist.all_reduce(hits)\n", ""),
        OWN_ACCURACY,
    ),
    "in percent": Mistake(
        edit(TRAIN, "return losses, hits", "return losses, 100 * hits"), "a share is asked for, not a percentage"
    ),
    "nothing returned": Mistake(
        edit(TRAIN, f"    {_RETURN}\n", ""), "the function returns nothing: `return` is missing"
    ),
}

RIGHT = {
    "13.1": (TRAIN_IN_CHUNKS, TRAIN_BY_HAND, TRAIN_SHARES_IN_EVERY_STEP, TRAIN_MICRO, TRAIN_WITH_THE_LAST_RANKS_BUFFERS)
}

MISTAKES = {"13.1": TRAIN_MISTAKES}
