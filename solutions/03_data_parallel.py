# %% [markdown]
# # 03 · Data parallel
#
# One GPU would train for eight days. You rent four, and expect two days. The plan is called **data parallelism**: every
# rank has the whole model, each takes a part of the batch, and together they make one step.
#
# It is a dozen lines, and three mistakes in them cost real money, because nothing fails: gradients that are *added* where
# they should be averaged are a learning rate four times too high; a call for each tensor lets the network wait for itself;
# and a sampler that was forgotten makes four GPUs do the work of one, to the last bit. You will make it right, then watch
# the third mistake.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4);

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
import torch.distributed as dist
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

words = text()


def make_model():
    torch.manual_seed(0)  # every rank begins with the same weights
    return GPT(layers=2, width=128)


model = make_model()
params = list(model.parameters())
print(f"{sum(p.numel() for p in params):,} parameters in {len(params)} tensors")

# %% [markdown]
# ## The mean of N batches
#
# All ranks' batches of one step together are the **global batch**. Here each of four ranks takes 4 sequences, so the
# global batch has 16. Let us look at one gradient, that of four weights, on each rank:

# %%
# %%ranks
model(*batch(words, rank, 0, batch_size=4, context=64)).backward()  # which batch depends on the rank
grad = params[4].grad[1, :4] * 1e5
mine = [round(x, 2) for x in grad.tolist()]
dist.all_reduce(grad)  # replaces the tensor by the sum over the ranks, on every rank
mean = [round(x, 2) for x in (grad / world_size).tolist()]

# %%
from zerolab.lab import plots

plots.show(plots.before_after("all-reduce, then divided by 4", lab.pull("mine"), lab.pull("mean")))

# %% [markdown]
# The ranks saw different text, so they want to go different ways. If each took its own step, there would be four models
# after it. So they agree on the **mean**. That is no compromise but exactly right. The loss of a batch is the mean of its
# sequences' losses, and for four batches of equal size
#
# $$L_{16} = \tfrac14 (L_4^{(0)} + L_4^{(1)} + L_4^{(2)} + L_4^{(3)}) \quad\text{so}\quad
# \nabla L_{16} = \tfrac14 (\nabla L_4^{(0)} + \nabla L_4^{(1)} + \nabla L_4^{(2)} + \nabla L_4^{(3)}).$$
#
# The mean of the four gradients *is* the gradient of the global batch. And as all ranks began with the same weights and
# make the same step, they stay equal; no weight ever travels.
#
# ## Predict
#
# The plainest way: after backward, all-reduce each parameter's gradient. In one step, how many calls is that? And how many
# bytes does a rank send, if an all-reduce of B bytes among N ranks runs as a ring (lesson 01: each rank sends 2(N-1)/N of
# B)? There are 470,528 parameters in float32.

# %%
lab.predict("03.1", 29)
lab.predict("03.2", 2 * 3 / 4 * 4 * 470_528)

# %% [markdown]
# ## Write: average
#
# Three lines will do. One trap: a parameter that nobody used has no gradient.

# %%
# %%exercise 03.1

# %%
lab.check("03.1")

# %% [markdown]
# ## Measure
#
# Your code on real gradients. `calls()` writes down every collective that passes PyTorch's dispatcher.

# %%
# %%ranks
from zerolab import lab
from zerolab.lab.ranks.calls import calls

average = lab.mine("03.1")
with calls() as book:
    average(params)
number, sent = len(book.calls), book.sent

# %%
lab.measured("03.1", lab.pull("number", rank=0), "calls")
lab.measured("03.2", lab.pull("sent", rank=0), "bytes")
lab.reveal("03.1")
lab.reveal("03.2")

# %% [markdown]
# 29 calls and not one byte more than the formula: 2 × ¾ × 4 bytes × 470,528.
#
# Now train: 10 steps on real text, and the same once more in *one process that does all the work alone*. It gets the
# global batch in one piece.

# %%
# %%ranks


def train(model, after_backward=None, steps=10, data_of=lambda rank: rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch(words, data_of(rank), step, 4, 64)).backward()
        if after_backward is not None:
            after_backward(list(model.parameters()))
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


naive = train(make_model(), average)

# %%
import torch
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

torch.set_num_threads(1)  # as on the ranks: how work is cut among threads changes the order of sums
words = text()


def alone(gradients, steps=10):
    torch.manual_seed(0)
    model = GPT(layers=2, width=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, [batch(words, rank, step, 4, 64) for rank in range(4)])
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def in_one_piece(model, batches):
    x, y = (torch.cat(part) for part in zip(*batches))  # 16 sequences
    model(x, y).backward()


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other))


one_process = alone(in_one_piece)
naive = lab.pull("naive")
print(f"four ranks and one process: weights differ by {largest_difference(naive[0], one_process):.0e} at most")

# %%
# NBVAL_CHECK_OUTPUT
same = all(largest_difference(naive[0], other) == 0 for other in naive)
print("all ranks end with the same weights, to the bit:", same)
print("four ranks and one process agree to 0.00001:", largest_difference(naive[0], one_process) < 1e-5)

# %% [markdown]
# The ranks agree to the bit: after an all-reduce all hold the same bytes. With one process they agree to about six digits,
# not to the bit. Floating point sums depend on their order: 16 sequences in one matrix product are added up in another
# order than four times 4, and the ring adds the ranks' parts in an order of its own. Nobody is more right than the other.
# (Further down you get equality to the bit, by taking care of the order.)
#
# ## Buckets
#
# A message has a price that does not depend on its size: its **latency**. On a laptop you do not feel it, so we emulate a
# network of 200 MB/s on which every message takes 1 ms. An all-reduce in a ring of 4 ranks is 2 × 3 messages, one after
# the other. How many milliseconds will averaging take with your 29 calls?

# %%
lab.predict("03.3", 1000 * (29 * 6 * 0.001 + 2_823_168 / 200e6))

# %% [markdown]
# ## Write: a bucket
#
# The gradients can travel together, in one flat tensor, a **bucket**. You made one in lesson 02. Now with three methods:
# `collect` copies gradients in, `reduce` makes one all-reduce, `write_back` copies the means out. Mind the parameter
# without a gradient: here another rank may have had one, and all must send buckets of the same layout.

# %%
# %%exercise 03.2

# %%
lab.check("03.2")

# %%
lab.link("200 MB/s, 1 ms")

# %%
# %%ranks
import time
from statistics import median

Bucket = lab.mine("03.2")
bucket = Bucket(params)


def bucketed(params):
    bucket.collect()
    bucket.reduce()
    bucket.write_back()


def seconds(function, times=3):
    found = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        function(params)
        found.append(time.perf_counter() - begin)
    return median(found)


times = seconds(average), seconds(bucketed)
with calls() as book:
    bucketed(params)
number, sent = len(book.calls), book.sent

# %%
times = [max(of_ranks) for of_ranks in zip(*lab.pull("times"))]
lab.measured("03.3", round(1000 * times[0]), "ms")
lab.reveal("03.3")

# %%
if lab.predicted("03.3"):
    transfer = lab.pull("sent", rank=0) / 200e6
    costs = {
        "29 calls": plots.Cost(29 * 6 * 0.001, transfer, times[0]),
        "1 call": plots.Cost(6 * 0.001, transfer, times[1]),
    }
    title = "The same bytes in 29 calls and in one"
    plots.show(plots.call_costs(costs, title, "Averaging the gradients of the GPT on 4 ranks"))

# %%
# NBVAL_CHECK_OUTPUT
number, sent = lab.pull("number", rank=0), lab.pull("sent", rank=0)
if lab.predicted("03.2") and lab.predicted("03.3"):
    print(f"with the bucket: {number} call, {sent:,.0f} bytes sent per rank")
    assert times[0] > 4 * times[1]
lab.link(None)

# %% [markdown]
# Nearly all of the long bar is latency, and the bucket removes it: 6 messages in place of 174, the same bytes. (The
# diamonds lie to the right of the bars: a call also costs this machine's own time, and 29 calls cost it 29 times.)
#
# So is one bucket for the whole model the best? No: a bucket can leave only when its last gradient has come, and the last
# one comes at the very end of backward. Several buckets leave one by one, **while backward is still at work on the rest**.
# So real engines take a few: large enough that latency does not matter, small enough to leave early.
#
# ## DDP as a class
#
# Lesson 02 showed hooks. The engine of this course uses them: it takes the model apart into **units** (here each
# transformer block, and a root for what is left), gathers each unit's gradients in one flat bucket, `unit.whole_grad`, and
# calls a method when the bucket is full. What the method does makes the difference between all the stages to come. Stage
# 0 is two short methods:
#
# - `reduce(unit)` averages `unit.whole_grad` over the ranks and leaves the mean in `unit.grad`. It may start that and
#   return something to wait for: so backward goes on meanwhile.
# - `post_backward(unit)` calls `reduce` when it is the unit's turn. It is not, while the user collects gradients of several
#   batches before a step (**gradient accumulation**, inside `with zero.no_sync():`): then nothing should travel until the
#   last one. `self.reduces(unit)` knows.

# %%
# %%exercise 03.3

# %%
lab.check("03.3")

# %% [markdown]
# The whole of it on the real task: the user's training loop does not mention ranks at all any more. The engine keeps a
# ledger of what it moved. How many units will it name, and what will the sum be?

# %%
# %%ranks
import zerolab
from zerolab.measure import holdings, ledger, model_states, moved_bytes

MyDDP = lab.mine(zerolab.DDP)
model = make_model()
zero = MyDDP(model, units=[Block])
by_class = train(model)

# %%
# %%ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    optimizer.zero_grad()
    with ledger(zero) as book:
        model(*batch(words, rank, step, 4, 64)).backward()
    optimizer.step()
    held, extents = model_states(zero, optimizer), holdings(zero, optimizer)
moved = {unit: total.sent for unit, total in book.totals("unit").items()}
formula = moved_bytes(stage=0, world_size=world_size, parameters=470_528)

# %%
# NBVAL_CHECK_OUTPUT
moved = lab.pull("moved", rank=0)
if lab.predicted("03.2"):
    for unit, sent in moved.items():
        print(f"{unit:9} {sent:>9,} bytes sent per rank")
    print(f"{'together':9} {sum(moved.values()):>9,}, by the formula {lab.pull('formula', rank=0):,}")

# %% [markdown]
# The same bytes as your first three lines, to the byte, now in three buckets that leave during backward: the last block
# first, as the last lesson's hook said. And the numbers? This engine adds the ranks' parts **in rank order**. One process
# that does the same, batch by batch, must get the same bits:


# %%
# NBVAL_CHECK_OUTPUT
def batch_by_batch(model, batches):
    for x, y in batches:
        model(x, y).backward()  # adds to the gradients of the batches before
    for param in model.parameters():
        param.grad /= len(batches)


in_order = alone(batch_by_batch)
by_class = lab.pull("by_class")
same = all(largest_difference(in_order, weights) == 0 for weights in by_class)
print("DDP's weights equal one process's to the bit:", same)

# %% [markdown]
# ## In production
#
# PyTorch's own `DistributedDataParallel` is the same idea in C++: hooks, buckets, all-reduces that start during backward.
# Side by side on the same model and data, with its calls written down:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

model = make_model()
ddp = DistributedDataParallel(model)  # calls that go through `ddp` average the gradients of `model`
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(10):
    optimizer.zero_grad()
    loss = ddp(*batch(words, rank, step, 4, 64))
    with calls() as book:
        loss.backward()
    optimizer.step()
by_torch = [param.detach().clone() for param in model.parameters()]
buckets = [call.payload for call in book.calls]

# %%
# NBVAL_CHECK_OUTPUT
by_torch, buckets = lab.pull("by_torch", rank=0), lab.pull("buckets", rank=0)
print("torch's DDP and ours agree to 0.00001:", largest_difference(by_torch, by_class[0]) < 1e-5)
listed = " + ".join(f"{size:,}" for size in buckets)
print(f"its buckets: {listed} = {sum(buckets):,} bytes = 4 × {sum(buckets) // 4:,}")

# %% [markdown]
# Two buckets here: the first is small (about 1 MB) so that something leaves early, the others hold up to `bucket_cap_mb`, 25
# MB by default. They follow the order in which gradients came in the first step, not the blocks. Otherwise it is what you
# wrote. (Its order of sums is gloo's, so it agrees with ours to rounding.)
#
# ## On trial: the sampler
#
# > "A program without a distributed sampler trains N times more data."
#
# The `DataLoader` of a script for one GPU knows nothing of ranks. Started four times, it deals the same batches to every
# rank. More data? We train three ways, 25 steps, and look at the loss on pieces of the text that are drawn for that alone:

# %%
# %%ranks
others = batch(words, 99, 1_000_000, 16, 64)


def losses(data_of):
    model = make_model()
    MyDDP(model, units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(25):
        optimizer.zero_grad()
        model(*batch(words, data_of(rank), step, 4, 64)).backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(model(*others).item())
    return seen, [param.detach().clone() for param in model.parameters()]


each_its_own, _ = losses(lambda rank: rank)
all_the_same, weights = losses(lambda rank: 0)  # every rank asks for the batches of rank 0

# %%
torch.manual_seed(0)
model = GPT(layers=2, width=128)  # one process, one batch of 4 in each step, no ranks at all
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
one_rank = []
for step in range(25):
    optimizer.zero_grad()
    model(*batch(words, 0, step, 4, 64)).backward()
    optimizer.step()
    with torch.no_grad():
        one_rank.append(model(*batch(words, 99, 1_000_000, 16, 64)).item())

# %%
series = {
    "one process alone": one_rank,
    "four ranks, all with the same batches": lab.pull("all_the_same", rank=0),
    "four ranks, each with its own": lab.pull("each_its_own", rank=0),
}
equal = sum(a == b for a, b in zip(*list(series.values())[:2]))
ends = [f"{values[-1]:.2f}" for values in series.values()]
said = f"In {equal} of 25 steps four ranks with the same batches have the loss of one process, "
said += f"in the end {ends[1]}; four ranks with batches of their own end at {ends[2]}."
title = "Four ranks that see the same batches do the work of one"
plots.show(plots.curves(series, title, "Loss on other pieces of the text while the GPT trains", "loss", said))

# %%
# NBVAL_CHECK_OUTPUT
same = all(torch.equal(a, b.detach()) for a, b in zip(lab.pull("weights", rank=0), model.parameters()))
print("four ranks with the same batches end with the weights of one process, to the bit:", same)

# %% [markdown]
# **Verdict: false.** The mean of four equal gradients is that gradient. Four GPUs were paid, one worked, and nothing failed:
# the loss fell as it always did. The curve that you would have compared it with is the lower one.
#
# In PyTorch the cure is `torch.utils.data.DistributedSampler`, which deals rank r the samples r, r + N, r + 2N, … (and
# `sampler.set_epoch(epoch)`, without which every epoch has the same order). The test is cheap, and worth a line in every
# training script: **do the ranks' first batches differ?**

# %%
# %%ranks 0,3
# NBVAL_CHECK_OUTPUT
from torch.utils.data import DistributedSampler

dealt = DistributedSampler(range(10), num_replicas=4, rank=rank, shuffle=False)
print("samples", list(dealt))

# %% [markdown]
# Ten samples do not divide by four, so it deals the first ones twice: every rank gets three. On evaluation that counts
# samples double.

# %% [markdown]
# ## On trial: whose gradient is it?
#
# > "Each shard's gradient sums over its own samples, and the full gradient is the sum of the shards."
#
# The sentence mixes two ways to divide: the *data* among the ranks, and the *parameters* into shards (lesson 04). Today only
# data was divided. How many numbers does a rank's gradient have, then, and is it the sum or the mean that equals the
# gradient of the global batch?

# %%
# %%ranks
model = make_model()
model(*batch(words, rank, 0, 4, 64)).backward()
own = torch.cat([param.grad.flatten() for param in model.parameters()])

# %%
# NBVAL_CHECK_OUTPUT
own = lab.pull("own")
torch.manual_seed(0)
model = GPT(layers=2, width=128)
in_one_piece(model, [batch(words, rank, 0, 4, 64) for rank in range(4)])
full = torch.cat([param.grad.flatten() for param in model.parameters()])
print("elements of each rank's gradient:", [len(grad) for grad in own], "and of the full one:", len(full))
print(f"length of the sum:  {(sum(own).norm() / full.norm()).item():.4f} x the full gradient's")
print(f"length of the mean: {(sum(own).norm() / 4 / full.norm()).item():.4f} x")
assert torch.allclose(sum(own) / 4, full, atol=1e-6)

# %% [markdown]
# **Verdict: false.** Every rank has a gradient for *every* parameter, from its own samples; the full gradient is their mean
# (where losses are means and batches equally large). A sum is four times too long: the learning rate times four.
#
# ## On trial: is this ZeRO?
#
# > "Wrapping the model in DataParallel or DDP, with NCCL as the process group's backend, is ZeRO."
#
# The backend is a telephone: it changes who carries the bytes, not who holds them. So look at who holds what after a
# step with Adam. From left to right lie the model's parameters, end to end; a band is filled where the rank holds them:

# %%
plots.show(plots.who_holds_what([lab.pull("extents")]))

# %% [markdown]
# That was your class. PyTorch's `DistributedDataParallel`, counted in the same way:

# %%
# %%ranks
model = make_model()
ddp = DistributedDataParallel(model)
adam = torch.optim.AdamW(model.parameters())
ddp(*batch(words, rank, 0, 4, 64)).backward()
adam.step()
tensors = [*model.parameters(), *(param.grad for param in model.parameters())]
tensors += [value for state in adam.state.values() for value in state.values()]
torch_holds = sum(tensor.nbytes for tensor in tensors)

# %%
# NBVAL_CHECK_OUTPUT
for rank, (ours, torchs) in enumerate(zip(lab.pull("held"), lab.pull("torch_holds"))):
    print(f"rank {rank} holds {sum(ours.values()):,} bytes of model states, with torch's DDP {torchs:,}")
print(f"{torchs / 470_528:.2f} bytes per parameter on each rank, {4 * torchs / 470_528:.0f} on all together")

# %% [markdown]
# **Verdict: false.** Every rank holds everything: 16 bytes per parameter, four times over. Data parallelism divides
# *activations* (each rank has a quarter of the global batch) and *time*, and no model state. Those four equal copies are
# the waste that ZeRO removes, one kind after the other: lesson 04 begins with the green band.
#
# ## Questions
#
# 1. Why do the ranks' weights stay equal, though no weight is ever sent?
# 2. Your script runs on 8 GPUs in place of 1, with the same batch size per GPU. What happened to the global batch, and what
#    should you think about?
# 3. The naive version and the bucketed one send the same bytes. When is the naive one nearly as fast?
# 4. Why not one bucket for the whole model?
# 5. Rank 3's last batch has 2 sequences where the others have 4. Is the mean of the four gradients still right?
# 6. With gradient accumulation over 8 batches, how much traffic does `no_sync()` save, and what does it cost?
# 7. How do you notice a missing sampler without looking at the code?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. They begin equal (the same seed, or a broadcast at the start, as DDP does), get the same averaged gradients, byte for
#    byte, and the optimizer is a function of these alone.
# 2. It is 8 times as large, so an epoch has an eighth of the steps. Fewer, better steps often want a higher learning rate
#    (a linear rule with warm-up is common); or divide the batch size per GPU by 8.
# 3. When transfer dwarfs latency: large tensors, or a fast network with little latency.
# 4. It is full only when backward is over, so nothing travels while backward computes; and it is another copy of all
#    gradients.
# 5. No. A mean of means gives its 2 sequences twice the weight of the others. Weight each rank's loss by its number of
#    sequences, or tokens.
# 6. Seven eighths: gradients travel once in place of 8 times. In stage 0 it costs nothing, since every rank keeps whole
#    gradients anyway; in ZeRO-2 and 3 it costs exactly that.
# 7. All ranks report the same loss in the first step, to the last digit. With different batches they cannot.

# %%
lab.stop()
lab.progress()
