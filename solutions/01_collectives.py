# %% [markdown]
# # 01 · Collectives
#
# **The question.** Four ranks have computed four gradients, 4 bytes for each parameter. Before any of them can take a
# step, all of them need the mean. Who sends what to whom?
#
# The obvious idea: everybody sends to rank 0, which adds up and sends the result back. That is correct, and it doesn't
# scale. One wire carries everything, so the time grows with the number of ranks. The better idea is a ring, and you
# will write it in this lesson. Everything in DDP and ZeRO is built from its two halves.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4);

# %% [markdown]
# ## Eight collectives
#
# There aren't many. Each fits in one picture, which shows what each rank holds before, and what after. Watch the
# colours. A number has the colour of the rank that had it before. White is a sum that nobody had before.

# %%
# %%ranks
import torch.distributed as dist

x = torch.arange(1.0, 5) * 10**rank  # rank 0: 1 2 3 4, rank 1: 10 20 30 40, ...
before = x.tolist()
dist.all_reduce(x)
after = x.tolist()

# %%
before, after = lab.pull("before"), lab.pull("after")
plots.show(plots.before_after("all-reduce: everyone gets the sum", before, after))

# %% [markdown]
# All-reduce does two things at once: it adds up, and it gives everyone the result. Each half exists on its own.
# **[Reduce-scatter](../docs/glossary.md#reduce-scatter)** adds up and leaves each rank with *one part* of the sum, its *shard*. **[All-gather](../docs/glossary.md#all-gather)** adds nothing:
# it gives everyone every shard.

# %%
# %%ranks
x = torch.arange(1.0, 5) * 10**rank
received = torch.empty_like(x)
dist.all_to_all_single(received, x)  # element k of every rank goes to rank k ...
shard = received.sum().reshape(1)  # ... which adds up what it received: a reduce-scatter
full = torch.empty(4)
dist.all_gather(list(full.split(1)), shard)  # into four views of one tensor
start, middle, end = before, shard.tolist(), full.tolist()

# %%
start, middle, end = (lab.pull(name) for name in ("start", "middle", "end"))
plots.show(plots.before_after("reduce-scatter: everyone gets one part", start, middle))
plots.show(plots.before_after("all-gather: everyone gets every part", middle, end))

# %% [markdown]
# Compare the right side of the last picture with the right side of the first. They show the same numbers. **An
# all-reduce is a reduce-scatter followed by an all-gather.** Remember this sentence. ZeRO is what you get when you put
# something *between* the two.
#
# (Why not `dist.reduce_scatter`? On NCCL you would use it. The trial at the end of this lesson shows what gloo makes of
# it. An all-to-all followed by a sum is a real one.)
#
# Here are the other five, in one cell: *[broadcast](../docs/glossary.md#broadcast)* (one rank's tensor to all), *reduce* (the sum to one rank), *gather*
# (all tensors to one rank), *scatter* (one rank's parts, one to each rank) and *[all-to-all](../docs/glossary.md#all-to-all)* (each rank sends a different
# part to each other rank; the reduce-scatter above began with it).

# %%
# %%ranks
mine = torch.tensor([rank + 1.0])
told = mine.clone()
dist.broadcast(told, src=2)
summed = mine.clone()
dist.reduce(summed, dst=0)
summed = summed.tolist() if rank == 0 else []  # on the others, perhaps a partial sum
collected = [torch.empty(1) for _ in range(world_size)] if rank == 0 else None
dist.gather(mine, collected, dst=0)
parts = list(torch.arange(11.0, 11 + world_size).split(1)) if rank == 0 else None
given = torch.empty(1)
dist.scatter(given, parts, src=0)
mine, told, given = mine.tolist(), told.tolist(), given.tolist()
collected, parts = ([t.item() for t in tensors or []] for tensors in (collected, parts))
swapped = received.tolist()  # by the all-to-all above

# %%
collectives = {
    "broadcast from rank 2": ("mine", "told"),
    "reduce to rank 0": ("mine", "summed"),
    "gather on rank 0": ("mine", "collected"),
    "scatter from rank 0": ("parts", "given"),
    "all-to-all": ("start", "swapped"),
}
for name, (before, after) in collectives.items():
    plots.show(plots.before_after(name, lab.pull(before), lab.pull(after)))

# %% [markdown]
# ## Root against ring
#
# Now count. The gradient has **8 MB**, and there are **4 ranks**. With a root, ranks 1, 2 and 3 each send their 8 MB to
# rank 0, and rank 0 sends 8 MB back to each. How many MB go *through* rank 0, in and out together?

# %%
lab.predict("01.1", 48)  # MB

# %% [markdown]
# In a ring, each rank talks to its two neighbours only: it sends to the right and receives from the left. Cut the
# gradient into four chunks of 2 MB. In each round every rank passes one chunk on, and adds its own part to the chunk
# that comes in. After 3 rounds each rank has one chunk that holds the sum of all four contributions: a reduce-scatter.
# Three more rounds pass the finished chunks around: an all-gather. How many MB go through each rank, in and out
# together, in all 6 rounds?

# %%
lab.predict("01.2", 24)  # MB

# %% [markdown]
# ## Write it: the first half
#
# `exchange(tensor, to, source)` sends a tensor to one rank, and returns the tensor that another rank sends here in the
# same round. Use it to write the first half of the ring. Which chunk must rank `r` send *first*, so that after N - 1
# rounds the finished chunk on rank `r` is number `r`? Draw four ranks on paper; that is the whole exercise.
#
# Every exercise works like this: put your code where it says `raise Todo`, run the cell, then run the check below it.
# The check brings its own ranks, data and `exchange`. It tries your function on 1, 2, 3 and 4 ranks and stops at the
# first mistake. If you get stuck, `lab.hint()` helps one step at a time. All chunks have the same shape, and you may
# change them in place.

# %%
# %%exercise 01.1

# %%
lab.check("01.1")

# %% [markdown]
# ## Write it: the second half
#
# Now everyone has one finished chunk and needs all of them. It is the same ring, without the addition.

# %%
# %%exercise 01.2

# %%
lab.check("01.2")

# %% [markdown]
# ## See it turn
#
# Whose contributions are in a chunk? Let rank r bring `2**r` in every chunk. Then the bits of a sum say who is in it.
# Chunk c is a vector with that number in position c, so we can tell which chunk is travelling. The `exchange` below
# notes, after each round of the first half, whose parts are in each chunk. It runs your function, or the course's until
# yours has passed.

# %%
# %%ranks
from zerolab import lab
from zerolab.lab import exchange

reduce_scatter, all_gather = lab.mine("01.1"), lab.mine("01.2")
held = [2**rank] * world_size
history = [list(held)]


def watched(tensor, to, source):
    received = exchange(tensor, to, source)
    chunk = int(received.nonzero()[0])
    held[chunk] |= int(received[chunk])
    history.append(list(held))
    return received


result = reduce_scatter(list(torch.eye(world_size) * 2**rank), rank, world_size, watched)

# %% [markdown]
# Now the bytes: 8 MB through a root, and the same 8 MB through your ring, among 2, 3 and 4 ranks. Every message is
# counted where it leaves and where it arrives.

# %%
# %%ranks
def count(*tensors):
    global through
    through += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def by_root(x, n):
    received = torch.empty_like(x)
    for other in range(1, n):  # everyone sends to rank 0, which adds up ...
        if rank == other:
            dist.send(x, 0)
            count(x)
        elif rank == 0:
            dist.recv(received, other)
            count(received)
            x += received
    for other in range(1, n):  # ... and sends the sum back
        if rank == other:
            dist.recv(x, 0)
            count(x)
        elif rank == 0:
            dist.send(x, other)
            count(x)
    return x


# %%
# %%ranks
def counted(tensor, to, source):
    received = exchange(tensor, to, source)
    count(tensor, received)
    return received


def by_ring(x, n):
    chunks = list(torch.nn.functional.pad(x, (0, -x.numel() % n)).chunk(n))
    mine = reduce_scatter([chunk.clone() for chunk in chunks], rank, n, counted)
    return torch.cat(all_gather(mine, rank, n, counted))[: x.numel()]


# %%
# %%ranks
gradient = torch.randn(2_000_000, generator=torch.Generator().manual_seed(rank))  # 8 MB
traffic, sums = {}, {}
for n in (2, 3, 4):
    for way in (by_root, by_ring):
        through = 0
        if rank < n:
            sums[n, way.__name__] = way(gradient.clone(), n)
        traffic[n, way.__name__] = through
dist.all_reduce(gradient)
same = [torch.allclose(sums[4, way], gradient, atol=1e-5) for way in ("by_root", "by_ring")]
print("both agree with all_reduce:", same == [True, True])

# %%
history = [list(rows) for rows in zip(*lab.pull("history"))]
everyone = lab.pull("traffic")
ways = "by_root", "by_ring"
busiest = {n: [max(rank[n, way] for rank in everyone) for way in ways] for n in (2, 3, 4)}
lab.measured("01.1", busiest[4][0] / 1e6)
lab.measured("01.2", busiest[4][1] / 1e6)
lab.reveal("01.1")
lab.reveal("01.2")

# %% tags=["nbval-check-output"]
if lab.predicted("01.1") and lab.predicted("01.2"):
    for n, (root, ring) in busiest.items():
        print(f"{n} ranks: {root:,} bytes through a root,", end=" ")
        print(f"{ring:,} through each rank of the ring")

# %%
if lab.predicted("01.1") and lab.predicted("01.2"):
    plots.show(plots.ring_against_root(history, busiest))

# %% [markdown]
# Left, the first half of your ring: the letters in a chunk are the ranks whose parts it sums, A for rank 0. Right, the
# bytes of both halves.
#
# In general, for B bytes on N ranks, 2(N - 1)B go through the root, and 2 · 2B(N - 1)/N go through each rank of the
# ring, half of it out and half of it in. The first grows without limit; the second never reaches 4B. (On 3 ranks you
# see 11 bytes more than the formula says: 2,000,000 numbers don't divide by 3, so `by_ring` adds a zero.)
#
# From here on we count only what a rank *sends*. An all-reduce of B bytes sends 2B(N - 1)/N. A reduce-scatter or an
# all-gather sends B(N - 1)/N.

# %% [markdown]
# ## Measure: latency and bandwidth
#
# Bytes are not everything. Each of the 6 messages takes some time before its first byte arrives. So a message costs
#
# $$\text{time} = \text{latency} + \frac{\text{bytes}}{\text{bandwidth}}$$
#
# A laptop talking to itself has no wire, and four ranks share its cores, so its times say little. `lab.link` adds a
# wire: the same collectives, on the same bytes, take as long as they would on a network of the speed you name.
#
# On a link of 100 MB/s with a latency of 5 ms, how large is the message that spends half of its time on latency and
# half on bandwidth? (In bytes: for 2 kB write 2_000.)

# %%
lab.predict("01.3", 500_000)  # bytes

# %%
lab.link("100 MB/s, 5 ms")

# %%
# %%ranks
import time


def timed(function):
    times = {}
    for size in (4_000, 40_000, 400_000, 4_000_000):
        x, times[size] = torch.zeros(size // 4), []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            function(x)
            times[size].append(time.perf_counter() - begin)
    return times


message = timed(lambda x: exchange(x, (rank + 1) % world_size, (rank - 1) % world_size))
all_reduce = timed(dist.all_reduce)


# %%
def slowest(name):  # a collective takes as long as its slowest rank
    ranks = lab.pull(name)
    runs = {size: zip(*(times[size] for times in ranks)) for size in ranks[0]}
    return {size: list(map(max, times)) for size, times in runs.items()}


fit = plots.fit_cost(lab.pull("message")[0])  # of a single message: rank 0's times will do
lab.measured("01.3", round(fit.latency * fit.bandwidth))
lab.reveal("01.3")

# %%
if lab.predicted("01.3"):
    plots.show(plots.cost(slowest("all_reduce"), "all-reduce on 4 ranks"))

# %% [markdown]
# The two halves are equal where bytes / bandwidth = latency: that is 100 MB/s times 5 ms.
#
# The picture shows an all-reduce on 4 ranks: 6 messages, one after another, that together carry 1.5 times its bytes. So
# the fitted latency should be about 30 ms, or more where the machine is busy, and the fitted bandwidth about two thirds
# of 100 MB/s.
#
# This is why gradients are put together in *buckets* before they are reduced (lesson 03): a hundred small all-reduces
# pay a hundred latencies.

# %%
lab.link(None)

# %% [markdown]
# ## In production
#
# NCCL, which moves bytes between NVIDIA GPUs, chooses between a ring and trees. A tree's latency grows with log N, a
# ring's with N. So small messages on many GPUs take the tree, and large ones take the ring. gloo, which moves bytes
# between CPUs, uses a ring for its all-reduce. You call the same function either way.
#
# ## On trial
#
# > "Note: reduce-scatter is 2 times faster than all reduce!"
#
# So said Hugging Face's *Ultra-Scale Playbook* of 2025, beside its chapter on ZeRO-1 ([the line, in a later
# edit](https://huggingface.co/spaces/nanotron/ultrascale-playbook/discussions/93/files)). For your ring it is plain:
# half the rounds, and half the bytes. But does the function of that name do what your ring does? Linux counts the bytes
# that a process writes, to sockets too. Ask it, for 8 MB on 4 ranks:

# %%
# %%ranks
from zerolab.lab import written

x, part = torch.ones(2_000_000), torch.empty(500_000)
parts = list(x.chunk(world_size))
every = [torch.empty(500_000) for _ in range(world_size)]
collectives = {
    "all_reduce": lambda: dist.all_reduce(x),
    "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
    "all_gather": lambda: dist.all_gather(every, part),
}
sizes = {name: written(of) for name, of in collectives.items()}

# %% tags=["nbval-check-output"]
for name, size in lab.pull("sizes", rank=0).items():
    if size is None:  # not Linux, or not gloo
        print(f"nobody counts what {name} writes here; gloo on Linux: see the solution")
    else:
        print(f"gloo's {name:14} writes {size / 1e6:.0f} MB on each rank")

# %% [markdown]
# **True under a condition**: that it is a reduce-scatter. NCCL's sends half of what its all-reduce sends, as your ring
# does. gloo's sends all of it, and throws three quarters of the sum away; its all-gather is the real thing. What a function
# is called says what comes out, and not how it got there.

# %% [markdown]
# ## Questions
#
# 1. An all-reduce of 1 GB on 8 ranks: how many bytes does each rank send in a ring?
# 2. What are the two halves of an all-reduce, and what could you do between them?
# 3. You double the number of ranks. Does the ring's bandwidth term double? Does its latency term?
# 4. Two ranks call `all_reduce` and two call `broadcast`. What would plain gloo do? What would you see here?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. 2 · 1 GB · 7/8 = 1.75 GB.
# 2. Reduce-scatter and all-gather. Between them, each rank has the finished sum of its shard. It could update just
#    those parameters, and then all-gather *parameters* instead of gradients. That is ZeRO, lesson 04.
# 3. The bandwidth term goes from 2B(N - 1)/N to 2B(2N - 1)/2N: from 2 ranks to 4 that is half as much again, from 64 to
#    128 less than 1 %. The latency term goes from 2(N - 1) messages to 2(2N - 1): with many ranks, it doubles.
# 4. Plain gloo would wait until its timeout, or do worse: if the sizes differ, it may abort one rank or leave a wrong
#    tensor on another. The lab's ranks first compare what they are about to call, and tell you who called what.

# %%
lab.stop()
lab.progress()
