# %% [markdown]
# # 03 · Data parallel
#
# Training on one GPU would take eight days. You rent four, and expect two days. The plan is called **data
# parallelism**: every rank has the full model, each takes a part of the batch, and together they make one step.
#
# It takes a dozen lines, and three mistakes in them cost real money, because nothing fails. If you *add* gradients
# where you should average them, SGD's learning rate is four times too high. If you make one call for each tensor, the
# network spends its time waiting. And if you forget the sampler, four GPUs do the work of one, to the last bit. You
# will avoid the first two. The section for another day, at the end, shows the third.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4);

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
from zerolab.lab import GPT, Block, batch, text

words = text()


def make_model():
    torch.manual_seed(0)  # every rank starts with the same weights
    return GPT(layers=2, width=128)


model = make_model()
params = list(model.parameters())
print(f"{sum(p.numel() for p in params):,} parameters in {len(params)} tensors")

# %% [markdown]
# ## The mean of N batches
#
# The batches of all ranks in one step make up the **[global batch](../docs/glossary.md#global-batch)**. Here each of four ranks takes 4 sequences, so the
# global batch has 16. Let's look at part of one gradient on each rank, the elements for four weights (times 100,000, so
# that they are easy to read):

# %%
# %%ranks
model(*batch(words, rank, 0, batch_size=4, context=64)).backward()  # a batch of its own
grad = params[4].grad[1, :4] * 1e5
mine = [round(x, 2) for x in grad.tolist()]
dist.all_reduce(grad)  # on every rank, the sum over the ranks replaces the tensor
mean = [round(x, 2) for x in (grad / world_size).tolist()]

# %%
from zerolab.lab import plots

mine, mean = lab.pull("mine"), lab.pull("mean")
plots.show(plots.before_after("all-reduce, then divided by 4", mine, mean))

# %% [markdown]
# The ranks saw different text, so their gradients point in different directions. If each rank took its own step, there
# would be four different models afterwards. So they agree on the **mean**. That is no compromise. The loss of a batch
# is the mean of its sequences' losses, and for four batches of equal size
#
# $$L_{16} = \tfrac14 (L_4^{(0)} + L_4^{(1)} + L_4^{(2)} + L_4^{(3)}) \quad\text{so}\quad
# \nabla L_{16} = \tfrac14 (\nabla L_4^{(0)} + \nabla L_4^{(1)} + \nabla L_4^{(2)} + \nabla L_4^{(3)}).$$
#
# The mean of the four gradients *is* the gradient of the global batch. All ranks started with the same weights and make
# the same step, so they stay equal. No weight ever travels.
#
# ## Predict
#
# The simplest way is to all-reduce each parameter's gradient after backward. How many calls is that in one step (03.1)?
# And how many bytes does a rank send (03.2), if an all-reduce of B bytes among N ranks runs as a ring? (In lesson 01,
# each rank sent 2(N-1)/N of B.) There are 470,528 parameters in float32.

# %%
lab.predict("03.1", 29)  # calls
lab.predict("03.2", 2 * 3 / 4 * 4 * 470_528)  # bytes

# %% [markdown]
# ## Write: average
#
# Four lines are enough. There is one trap: a parameter that nobody used has no gradient.

# %%
# %%exercise 03.1

# %%
lab.check("03.1")

# %% [markdown]
# ## Measure
#
# `calls()` records every collective of `torch.distributed` that a rank takes part in, and counts for each the bytes that
# a ring sends (lesson 01).

# %%
# %%ranks
from zerolab import lab
from zerolab.lab import calls

average = lab.mine("03.1")
with calls() as book:
    average(params)
number, sent = len(book.calls), book.sent

# %%
lab.measured("03.1", lab.pull("number", rank=0))
lab.measured("03.2", lab.pull("sent", rank=0))
lab.reveal("03.1")
lab.reveal("03.2")

# %% [markdown]
# 29 calls, and not one byte more than the formula: 2 × ¾ × 4 bytes × 470,528.
#
# Now train for 10 steps on real text. Then do the same in *one process that does all the work alone*, and gets the
# global batch of each step in one piece.

# %%
# %%ranks


def train(model, after_backward=None, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch(words, rank, step, 4, 64)).backward()
        if after_backward is not None:
            after_backward(list(model.parameters()))
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


naive = train(make_model(), average)

# %%
import torch
from zerolab.lab import batch_by_batch, in_one_piece, largest_difference, train_alone

torch.set_num_threads(1)  # as on the ranks: the number of threads changes the order of sums
one_process = train_alone(in_one_piece)
naive = lab.pull("naive")
difference = largest_difference(naive[0], one_process)
print(f"four ranks and one process: their weights differ by {difference:.0e} at most")

# %% tags=["nbval-check-output"]
same = all(largest_difference(naive[0], other) == 0 for other in naive)
print("all ranks end with the same weights, to the bit:", same)
print("four ranks and one process agree to 0.00001:", difference < 1e-5)

# %% [markdown]
# The ranks agree to the bit, because after an all-reduce all of them hold the same bytes. With one process they agree
# up to rounding: floating-point sums depend on their order. One matrix product over 16 sequences adds them in a
# different order than four products over 4, and the ring adds the ranks' parts in yet another.
#
# ## Buckets
#
# Every message has a price that doesn't depend on its size: its **[latency](../docs/glossary.md#latency)**. You don't notice it on a laptop, so we
# emulate a network of 200 MB/s with a latency of 1 ms. An all-reduce in a ring of 4 ranks is 2 × 3 messages, one after
# another. How many milliseconds will averaging take with your 29 calls, latency and bytes together?

# %%
lab.predict("03.3", 1000 * (29 * 6 * 0.001 + 2_823_168 / 200e6))  # ms

# %% [markdown]
# ## Write: a bucket
#
# The gradients can travel together in one flat tensor, a **[bucket](../docs/glossary.md#bucket)**. You made a flat buffer in lesson 02. This one has
# three methods: `collect` copies the gradients in, `reduce` makes one all-reduce, and `write_back` copies the means
# out. Watch out for a parameter without a gradient: another rank may have one for it, and all ranks must send buckets
# with the same layout. (A parameter that no rank used then comes back with zeros, and Adam may still move it. So this
# course's engine asks all ranks first, and leaves `None` where nobody has a gradient.)

# %%
# %%exercise 03.2

# %%
lab.check("03.2")

# %%
lab.link("200 MB/s, 1 ms")

# %%
# %%ranks
from zerolab.lab import seconds

Bucket = lab.mine("03.2")
bucket = Bucket(params)


def bucketed(params):
    bucket.collect()
    bucket.reduce()
    bucket.write_back()


times = seconds(average, params), seconds(bucketed, params)  # medians of three calls
with calls() as book:
    bucketed(params)
number, sent = len(book.calls), book.sent

# %%
times = [max(of_ranks) for of_ranks in zip(*lab.pull("times"))]
lab.measured("03.3", round(1000 * times[0]))
lab.reveal("03.3")

# %%
if lab.predicted("03.3"):
    plots.show(lab.calls_beside_link(lab.pull("sent", rank=0), times))

# %% tags=["nbval-check-output"]
number, sent = lab.pull("number", rank=0), lab.pull("sent", rank=0)
if lab.predicted("03.2") and lab.predicted("03.3"):
    print(f"with the bucket: {number} call, {sent:,.0f} bytes sent per rank")
    assert times[0] > 29 * 0.006  # no faster than the link
lab.link(None)

# %% [markdown]
# Nearly all of the long bar is latency, and the bucket removes it: 6 messages instead of 174, with the same bytes.
#
# So is one bucket for the whole model best? No. A bucket can't leave until its last gradient is there, and the last
# gradient comes at the very end of backward. Several buckets can leave one by one, **while backward is still working on
# the rest**. So real engines use a few buckets: large enough that latency doesn't matter, and small enough to leave
# early.
#
# ## DDP as a class
#
# Lesson 02 showed hooks. This course's engine uses them. It divides the model into
# **[units](../docs/glossary.md#unit)**: here, one for each transformer block, and a root for everything else. It
# collects each unit's gradients in one flat bucket, `unit.bucket.full`, and when the last gradient is in, it calls the
# method `post_backward`. This class is stage 0 to the engine, and each of ZeRO's stages 1 to 3 overrides a few such
# methods. Write two short ones:
#
# - `reduce(unit)` averages `unit.bucket.full` over the ranks. It may return before the average is done, with something
#   to wait for, and backward goes on in the meantime.
# - `post_backward(unit)` calls `reduce`, if `self.reduces(unit)`. That says no while the user adds up the gradients of
#   several batches before a step (**[gradient accumulation](../docs/glossary.md#gradient-accumulation)**, inside
#   `with zero.no_sync():`). Then nothing should travel until the last batch.

# %%
# %%exercise 03.3

# %%
lab.check("03.3")

# %% [markdown]
# Now run your class on the real task. The training loop calls no `average` any more: the engine has put its hooks into
# the model. It also keeps a ledger of what it moved. Two steps with AdamW follow. After them `model_states` counts the
# bytes that a rank holds, and `holdings` finds which elements; both are for the trial below.

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

# %% tags=["nbval-check-output"]
moved = lab.pull("moved", rank=0)
if lab.predicted("03.2"):
    for unit, sent in moved.items():
        print(f"{unit:9} {sent:>9,} bytes sent per rank")
    formula = lab.pull("formula", rank=0)
    print(f"{'total':9} {sum(moved.values()):>9,}, by the formula {formula:,}")
    if not any(moved.values()):
        print("the ledger is empty: your reduce() goes past self.comm, which writes it")

# %% [markdown]
# The same number of bytes as your `average` sent, now in three buckets that leave during backward, the last block
# first, as the hook in lesson 02 showed. And the numbers? This engine adds the ranks' parts **in rank
# order**: each rank gets everybody's part of its own quarter, adds them up, and then the quarters are gathered. That
# sends the ring's bytes, and the order of the sum never varies. One process that does the same, batch by batch,
# must get the same bits:

# %% tags=["nbval-check-output"]
in_order = train_alone(batch_by_batch)
by_class = lab.pull("by_class")
same = all(largest_difference(in_order, weights) == 0 for weights in by_class)
print("DDP's weights equal those of one process, to the bit:", same)
if not same:
    print("self.comm adds in rank order, dist.all_reduce in the order of its ring")

# %% [markdown]
# ## In production
#
# PyTorch's own `DistributedDataParallel` is the same idea in C++: hooks, buckets, and all-reduces that start during
# backward. Here it runs on the same model and data, and we record its calls:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

# After ddp's forward, backward averages the gradients.
ddp = DistributedDataParallel(make_model())
by_torch = train(ddp)
with calls() as book:
    train(ddp, steps=1)
buckets = [call.payload for call in book.calls]

# %% tags=["nbval-check-output"]
by_torch, buckets = lab.pull("by_torch", rank=0), lab.pull("buckets", rank=0)
agree = largest_difference(by_torch, by_class[0]) < 1e-5
print("torch's DDP and ours agree to 0.00001:", agree)
listed = " + ".join(f"{size:,}" for size in buckets)
print(f"its buckets: {listed} = {sum(buckets):,} bytes = 4 × {sum(buckets) // 4:,}")

# %% [markdown]
# It uses two buckets here (torch 2.13). The first closes once it holds about 1 MB, so that something leaves early. Later
# ones hold up to `bucket_cap_mb`, 25 MB by default; here the second takes everything that is left. Buckets follow the
# order in which gradients arrived in the first step, not the blocks. Apart from that, it is what you wrote. (gloo decides
# in which order it adds, so the numbers agree with ours up to rounding.)
#
# ## On trial: is this ZeRO?
#
# > "Wrapping the model in DataParallel or DDP, with NCCL as the process group's backend, is ZeRO."
#
# The backend is like the phone company: it changes who carries the bytes, not who holds them. So look at who holds what
# after a step with Adam. The model's parameters lie end to end, from left to right. A band is filled where the rank
# holds that part:

# %%
plots.show(plots.who_holds_what([lab.pull("extents")]))

# %% [markdown]
# That was your class. Now PyTorch's `DistributedDataParallel`: its parameters, gradients and Adam's state. (Its buckets
# are one more copy of the gradients, unless you pass `gradient_as_bucket_view=True`. They are not counted here.)

# %%
# %%ranks
from zerolab.lab import held_after_step

ddp = DistributedDataParallel(make_model())
torch_holds = held_after_step(ddp, batch(words, rank, 0, 4, 64))

# %% tags=["nbval-check-output"]
for rank, (ours, torchs) in enumerate(zip(lab.pull("held"), lab.pull("torch_holds"))):
    ours = sum(ours.values())
    print(f"rank {rank} holds {ours:,} bytes of model states; with torch's DDP, {torchs:,}")
each = torchs / 470_528
print(f"{each:.2f} bytes per parameter on each rank, {4 * each:.0f} on all ranks together")

# %% [markdown]
# **Verdict: false.** Every rank holds everything: 16 bytes per parameter, four times over. Data parallelism divides
# *activations* (each rank has a quarter of the global batch) and *time*. It divides no model states. Those four equal
# copies are the waste that ZeRO removes, one kind at a time. Lesson 04 starts with the optimizer's.

# %% [markdown]
# ## Your engine on trial
#
# `zerolab trial` puts a data-parallel engine through more than a hundred promises, each on fresh ranks and beside one
# process: the same numbers, the bytes of a formula, an error where ranks would wait for each other forever. A good many
# were once broken by a library that people train with ([An engine on trial](../docs/trial.md) has the issues). Seven are
# about what you wrote in this lesson.

# %% tags=["nbval-check-output"]
import zerolab

promises = [
    "plain", "odd shapes", "tied across units", "unused", "accumulate",
    "held after backward", "moved in a step",
]
lab.trial(zerolab.DDP, *promises)

# %% [markdown]
# ## For another day (11 minutes)
#
# Two more claims: what happens without a sampler, and what a rank's gradient holds. On a fresh kernel, run the cells
# above first.
#
# ## On trial: the sampler
#
# > "A program without a distributed sampler trains N times more data."
#
# The `DataLoader` of a script for one GPU knows nothing about ranks. Start the script four times, and every rank gets
# the same batches. Is that more data? We train for 25 steps in three ways, and after each step look at the loss on 8 other
# pieces of the text:

# %%
# %%ranks
others = batch(words, 99, 1_000_000, 8, 32)


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
all_the_same, weights = losses(lambda rank: 0)  # every rank takes the batches of rank 0

# %%
from zerolab.lab import GPT, batch, text

words = text()
torch.manual_seed(0)
model = GPT(layers=2, width=128)  # one process, one batch of 4 per step, no ranks at all
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
others, one_rank = batch(words, 99, 1_000_000, 8, 32), []
for step in range(25):
    optimizer.zero_grad()
    model(*batch(words, 0, step, 4, 64)).backward()
    optimizer.step()
    with torch.no_grad():
        one_rank.append(model(*others).item())

# %%
series = {
    "one process alone": one_rank,
    "four ranks, all with the same batches": lab.pull("all_the_same", rank=0),
    "four ranks, each with its own": lab.pull("each_its_own", rank=0),
}
equal = sum(a == b for a, b in zip(*list(series.values())[:2]))
ends = [f"{values[-1]:.2f}" for values in series.values()]
said = (
    f"In {equal} of 25 steps, four ranks with the same batches have exactly the loss of "
    f"one process; they end at {ends[1]}. Four with batches of their own end at {ends[2]}."
)
title = "Four ranks with the same batches do the work of one"
subtitle = "Loss on other pieces of the text while the GPT trains"
plots.show(plots.curves(series, title, subtitle, "loss", said))

# %% tags=["nbval-check-output"]
same = largest_difference(lab.pull("weights", rank=0), model.parameters()) == 0
print("four ranks with the same batches end with one process's weights, to the bit:", same)

# %% [markdown]
# **Verdict: false.** The mean of four equal gradients is that same gradient. You paid for four GPUs, one did the work,
# and nothing failed: the loss fell. Only the curve that ends lower would have warned you, and you wouldn't have had it.
#
# In PyTorch the cure is `torch.utils.data.DistributedSampler`. It shuffles the samples, the same way on all ranks, and
# deals them like cards: rank r gets those at r, r + N, r + 2N, … (Call `sampler.set_epoch(epoch)` too, or every epoch
# has the same order.) The test is cheap, and worth a line in every training script: **do the ranks' first batches
# differ?**

# %% tags=["nbval-check-output"]
# %%ranks 0,3
from torch.utils.data import DistributedSampler

dealt = DistributedSampler(range(10), num_replicas=4, rank=rank, shuffle=False)
print("samples", list(dealt))

# %% [markdown]
# Ten samples don't divide evenly by four, so it hands out the first two again and every rank gets three. In an
# evaluation, those samples count twice.

# %% [markdown]
# ## On trial: whose gradient is it?
#
# > "Each shard's gradient sums over its own samples, and the full gradient is the sum of the shards."
#
# The sentence mixes up two kinds of splitting: the *data* among the ranks, and the *parameters* into shards (lesson
# 04). Today we split only data. So how many numbers does a rank's gradient have? And which one equals the gradient of
# the global batch, the sum or the mean?

# %%
# %%ranks
model = make_model()
model(*batch(words, rank, 0, 4, 64)).backward()
own = torch.cat([param.grad.flatten() for param in model.parameters()])

# %% tags=["nbval-check-output"]
own = lab.pull("own")
torch.manual_seed(0)
model = GPT(layers=2, width=128)
in_one_piece(model, [batch(words, rank, 0, 4, 64) for rank in range(4)])
full = torch.cat([param.grad.flatten() for param in model.parameters()])
print("elements of each rank's gradient:", list(map(len, own)), end=" ")
print("of the full one:", len(full))
times = (sum(own).norm() / full.norm()).item()
print(f"length of the sum:  {times:.4f} x the full gradient's")
print(f"length of the mean: {times / 4:.4f} x")
assert torch.allclose(sum(own) / 4, full, atol=1e-6)

# %% [markdown]
# **Verdict: false.** Every rank has a gradient for *every* parameter, computed from its own samples. The full gradient
# is their mean (if losses are means and all batches have the same size). The sum is four times too long. For SGD that
# is the learning rate times four; Adam divides the factor out again, so with Adam only what compares gradients with a
# number notices, such as clipping.

# %% [markdown]
# ## Questions
#
# 1. Why do the ranks' weights stay equal, although no weight is ever sent?
# 2. Your script runs on 8 GPUs instead of 1, with the same batch size per GPU. What happened to the global batch, and
#    what should you think about?
# 3. The naive version and the bucketed one send the same bytes. When is the naive one nearly as fast?
# 4. Why not use one bucket for the whole model?
# 5. Rank 3's last batch has 2 sequences where the others have 4. Is the mean of the four gradients still right?
# 6. With gradient accumulation over 8 batches, how much traffic does `no_sync()` save, and what does it cost?
# 7. (Of "For another day".) How do you notice a missing sampler without looking at the code?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. They start equal (the same seed, or a broadcast at the start, as DDP does it). They get the same averaged
#    gradients, byte for byte. And the optimizer's step depends on nothing else.
# 2. It is 8 times as large, so an epoch has an eighth of the steps. Fewer, better steps often want a higher learning
#    rate (scaling it linearly, with warm-up, is common). Or divide the batch size per GPU by 8.
# 3. When transfer dwarfs latency: with large tensors, or on a network with little latency.
# 4. It isn't complete until backward is over, so nothing travels while backward computes. It is also one more copy of
#    all gradients.
# 5. No. A mean of means gives its 2 sequences twice the weight of the others. Weight each rank's loss by its number of
#    sequences, or of tokens.
# 6. Seven eighths: gradients travel once instead of 8 times. In stage 0 it costs nothing, since every rank keeps full
#    gradients anyway. In ZeRO-2 and 3 it costs exactly that: the memory for full gradients.
# 7. All ranks report the same loss in the first step, to the last digit. With different batches they can't.

# %%
lab.stop()
lab.progress()
