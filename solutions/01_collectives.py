# %% [markdown]
# # 01 · Collectives
#
# **The question.** Four ranks have computed four gradients, 4 bytes for each parameter. Before anyone may take a step,
# everyone needs the mean. Who sends what to whom?
#
# The first idea is that everybody sends to rank 0, which adds up and sends the result back. It is right, and it is why
# early distributed training stopped paying off at eight GPUs: the time grows with the number of ranks, because one wire
# carries everything. The second idea is a ring, which you will write in this lesson. Everything in DDP and ZeRO is made of
# its two halves.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4);

# %% [markdown]
# ## Seven collectives
#
# There are not many. Each is a picture, and all of them come from one question: what does each rank hold before, and what
# after? Watch the colours; white is a sum.

# %%
# %%ranks
import torch.distributed as dist

x = torch.arange(1.0, 5) * 10**rank  # rank 0: 1 2 3 4, rank 1: 10 20 30 40, ...
before = x.tolist()
dist.all_reduce(x)
after = x.tolist()

# %%
plots.show(plots.before_after("all-reduce: everyone gets the sum", lab.pull("before"), lab.pull("after")))

# %% [markdown]
# All-reduce does two things at once: it adds up, and it tells everyone. Each half exists alone. **Reduce-scatter** adds up,
# and leaves each rank with *one part* of the sum, its *shard*. **All-gather** adds nothing: it tells everyone every shard.

# %%
# %%ranks
x = torch.arange(1.0, 5) * 10**rank
received = torch.empty_like(x)
dist.all_to_all_single(received, x)  # element k of every rank goes to rank k ...
shard = received.sum().reshape(1)  # ... which adds up what it got: a reduce-scatter
whole = torch.empty(4)
dist.all_gather(list(whole.split(1)), shard)  # into four views of one tensor
start, middle, end = before, shard.tolist(), whole.tolist()

# %%
plots.show(plots.before_after("reduce-scatter: a part of the sum each", lab.pull("start"), lab.pull("middle")))
plots.show(plots.before_after("all-gather: every part to everyone", lab.pull("middle"), lab.pull("end")))

# %% [markdown]
# Look at the last picture's right side and at the first one's: they are the same. **An all-reduce is a reduce-scatter and
# then an all-gather.** Keep this sentence. ZeRO is what you get when you put something *between* the two.
#
# (Why not `dist.reduce_scatter_tensor`? On NCCL one would. gloo's version of it is an all-reduce in disguise, which moves
# twice the bytes. An all-to-all and a sum is a true one.)
#
# The other four, in one cell: *broadcast* (one rank's tensor to all), *reduce* (the sum to one rank), *gather* (all tensors
# to one rank), *all-to-all* (everyone a different part to everyone; you have just used it).

# %%
# %%ranks
mine = torch.tensor([rank + 1.0])
told = mine.clone()
dist.broadcast(told, src=2)
summed = mine.clone()
dist.reduce(summed, dst=0)
summed = summed.tolist() if rank == 0 else []  # elsewhere it now holds a partial sum or nothing of use
collected = [torch.empty(1) for _ in range(world_size)] if rank == 0 else None
dist.gather(mine, collected, dst=0)
mine, told = mine.tolist(), told.tolist()
collected = [t.item() for t in collected] if rank == 0 else []

# %%
pairs = {"broadcast from rank 2": "told", "reduce to rank 0": "summed", "gather on rank 0": "collected"}
for name, after in pairs.items():
    plots.show(plots.before_after(name, lab.pull("mine"), lab.pull(after)))

# %% [markdown]
# ## Root against ring
#
# Now count. A gradient of **8 MB** on **4 ranks**. With a root, ranks 1, 2 and 3 send their 8 MB to rank 0, and it
# sends 8 MB back to each. How many MB go *through* rank 0, in and out together?

# %%
lab.predict("01.1", 48)

# %% [markdown]
# In a ring each rank talks to two neighbours only: it sends to the right and receives from the left. Cut the gradient in
# four chunks of 2 MB. In each round every rank passes one chunk on, and adds what comes in to its own. After 3 rounds each
# rank has one chunk in which all four contributions are added: a reduce-scatter. Three more rounds pass the finished chunks
# round: an all-gather. How many MB go through each rank, in and out together, in all 6 rounds?

# %%
lab.predict("01.2", 24)

# %% [markdown]
# ## Write it: the first half
#
# `exchange(tensor, to, source)` sends a tensor to one rank and returns what another sends here in the same round. Write the
# ring's first half with it. Which chunk must rank `r` send *first*, so that after N - 1 rounds its own chunk, number `r`,
# is the finished one? Draw four ranks on paper; it is the whole exercise.
#
# Every exercise goes like this: write your code where `raise Todo` stands, run the cell, then run the check below it. The check
# brings its own ranks, data and `exchange`, tries your function on 1, 2, 3 and 4 ranks, and stops at the first mistake. If you
# are stuck, `lab.hint()` helps, one step at a time. All chunks have one shape; you may change them in place.

# %%
# %%exercise 01.1

# %%
lab.check("01.1")

# %% [markdown]
# ## Write it: the second half
#
# Now everyone has one finished chunk and needs all of them. The same ring, without the adding.

# %%
# %%exercise 01.2

# %%
lab.check("01.2")

# %% [markdown]
# ## See it turn
#
# Whose contributions are in a chunk? Let rank r bring `2**r` in every chunk: then the bits of a sum say who is in it. In
# place c of a vector stands chunk c, so that what travels tells where it belongs. The `exchange` below writes down every
# message, and runs your function (or the course's, until yours has passed).

# %%
# %%ranks
from zerolab.lab import mine
from zerolab.lab.exercises import exchange

reduce_scatter, all_gather = mine("01.1"), mine("01.2")
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
# And the bytes: 8 MB through a root, and the same 8 MB through your ring, among 2, 3 and 4 ranks. Every message is counted
# where it leaves and where it arrives.

# %%
# %%ranks
def count(*tensors):
    global through
    through += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def by_root(x, n):
    received = torch.empty_like(x)
    for other in range(1, n):  # everyone to rank 0, which adds up ...
        if rank == other:
            dist.send(x, 0)
        elif rank == 0:
            dist.recv(received, other)
            x += received
    for other in range(1, n):  # ... and back
        if rank == other:
            dist.recv(x, 0)
        elif rank == 0:
            dist.send(x, other)
    count(*[x] * (2 * (n - 1) if rank == 0 else 2))
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
whole = torch.randn(2_000_000, generator=torch.Generator().manual_seed(rank))  # 8 MB
traffic, sums = {}, {}
for n in (2, 3, 4):
    for way in (by_root, by_ring):
        through = 0
        if rank < n:
            sums[n, way.__name__] = way(whole.clone(), n)
        traffic[n, way.__name__] = through
dist.all_reduce(whole)
same = [torch.allclose(sums[4, way], whole, atol=1e-5) for way in ("by_root", "by_ring")]
print("both give what all_reduce gives:", same == [True, True])

# %%
history = [list(rows) for rows in zip(*lab.pull("history"))]
everyone = lab.pull("traffic")
busiest = {n: [max(rank[n, way] for rank in everyone) for way in ("by_root", "by_ring")] for n in (2, 3, 4)}
lab.measured("01.1", busiest[4][0] / 1e6, "MB")
lab.measured("01.2", busiest[4][1] / 1e6, "MB")
lab.reveal("01.1")
lab.reveal("01.2")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("01.1"):
    for n, (root, ring) in busiest.items():
        print(f"{n} ranks: {root:,} bytes through a root, {ring:,} through each rank of the ring")

# %%
if lab.predicted("01.1"):
    plots.show(plots.ring_against_root(history, busiest))

# %% [markdown]
# In general, for Ψ bytes on N ranks: the root carries 2(N - 1)Ψ, each rank of the ring 2 · 2Ψ(N - 1)/N, half of it out and
# half of it in. The first grows without end, the second never reaches 4Ψ. From here on we count what a rank *sends*: an
# all-reduce of Ψ sends 2Ψ(N - 1)/N, a reduce-scatter or an all-gather Ψ(N - 1)/N.

# %% [markdown]
# ## Measure: latency and bandwidth
#
# Bytes are not all: each of the 6 messages takes some time before its first byte arrives. So the cost of a collective is
#
# $$\text{time} = \text{latency} + \frac{\text{bytes}}{\text{bandwidth}}$$
#
# Loopback on a laptop has no wire, and four ranks share its cores, so its times say little. `lab.link` puts a wire in:
# the same collectives, on the same bytes, take as long as on a network of the speed you name. A message of how many bytes
# spends half of its time on latency and half on bandwidth, on a link of 100 MB/s with a latency of 5 ms? (In bytes: for
# 2 kB write 2_000.)

# %%
lab.predict("01.3", 500_000)

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
def slowest(name):  # a collective is over when its slowest rank is done
    return {size: [max(times) for times in zip(*(t[size] for t in lab.pull(name)))] for size in lab.pull(name)[0]}


fit = plots.fit_cost(lab.pull("message")[0])
lab.measured("01.3", round(fit.latency * fit.bandwidth), "bytes")
lab.reveal("01.3")

# %%
if lab.predicted("01.3"):
    plots.show(plots.cost(slowest("all_reduce"), "all-reduce on 4 ranks"))

# %% [markdown]
# Half and half is where bytes / bandwidth = latency: 100 MB/s times 5 ms. What you said was compared with what was measured,
# so some percent are the machine's (more if it is busy). And the picture is of an all-reduce on 4 ranks: 6 messages one after the other, and 1.5
# times its bytes sent. So the latency that was fitted is about 30 ms, and the bandwidth about two thirds of
# 100 MB/s.

# %%
fit = plots.fit_cost(slowest("all_reduce"))
assert 28e-3 < fit.latency < 45e-3 and 40e6 < fit.bandwidth < 80e6, fit
lab.link(None)

# %% [markdown]
# This is why gradients are put together in *buckets* before they are reduced (lesson 03): a hundred small all-reduces pay
# a hundred latencies.

# %% [markdown]
# ## In production
#
# NCCL, which moves bytes between NVIDIA GPUs, chooses between a ring and trees: a tree has a latency that grows with
# log N and not with N, so small messages on many GPUs take the tree, large ones the ring. gloo, which moves
# them between CPUs, uses a ring for its all-reduce. You call the same function:

# %%
# %%ranks
x = torch.ones(1_000)
dist.all_reduce(x)
assert x[0] == world_size
print(f"{dist.get_backend()} says {x[0]:g}")

# %% [markdown]
# ## On trial
#
# > "The compression ratio is C = |G| / |G'| = C²." · "At 10 GB/s and a ratio of 10, 100 GB become 10 GB, so 10 GB become 1 GB."
#
# Two sentences of one article on "ZeRO's gradient compression". Do the arithmetic: time is bytes over bandwidth.

# %%
# NBVAL_CHECK_OUTPUT
bandwidth, ratio = 10e9, 10  # bytes per second
for size in (100e9, 10e9):
    print(f"{size / 1e9:.0f} GB: {size / bandwidth:.1f} s plain, {size / ratio / bandwidth:.1f} s compressed")
print("C = C² holds for C =", [c for c in range(100) if c == c**2])

# %% [markdown]
# **Verdict: false.** A ratio equals its own square only if it is 1 (nothing is compressed) or 0. The second sentence
# divides by the ratio once, and then again. And ZeRO compresses nothing at all, as the next lessons measure: what you
# saw above, reduce-scatter and all-gather of every byte, is all that it sends.

# %% [markdown]
# ## Questions
#
# 1. An all-reduce of 1 GB on 8 ranks: how many bytes does each rank send in a ring?
# 2. What are an all-reduce's two halves, and what could you do between them?
# 3. You double the number of ranks. Does the ring's bandwidth term double? Does its latency term?
# 4. Two ranks call `all_reduce` and two call `broadcast`. What would plain gloo do? What did you see here?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. 2 · 1 GB · 7/8 = 1.75 GB.
# 2. Reduce-scatter and all-gather. Between them each rank has the finished sum of its shard: it could update just these
#    parameters, and then gather *parameters* in place of gradients. That is ZeRO, lesson 04.
# 3. The bandwidth term goes from 2Ψ(N - 1)/N to 2Ψ(2N - 1)/2N: almost nothing. The latency term is 2(N - 1) messages:
#    it doubles.
# 4. Wait until its timeout, or worse: if the sizes differ it may abort one rank or leave a wrong tensor on another. The
#    lab's ranks compare what they are about to call first, and say who called what.

# %%
lab.stop()
lab.progress()
