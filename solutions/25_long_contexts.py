# %% [markdown]
# # 25 · Long contexts
#
# **The question.** Lesson 15 opened with one sequence of 100,000 tokens, whose activations need more memory than a GPU
# has, and left it there. ZeRO divides model states and data parallelism divides samples; this is *one sample*. A
# thousand GPUs with ZeRO-3 fail exactly as one does. So each GPU must take a piece of the sequence. Most of a
# transformer doesn't notice, because it computes each token by itself. Attention does: a token looks at all earlier
# ones, and most of them are on other GPUs. How does it still come out as in one process? Who waits for whom? And what
# must ZeRO know about it? The lesson builds on lesson 01's ring and lesson 07's `Zero3`. It needs one fact from
# lesson 22, and repeats it.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %%
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, RingGPT, batch, calls, saved, seen, text

words = text()
everyone = dist.group.WORLD
alone = [dist.new_group([one]) for one in range(4)][rank]
pair = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
rings = {1: alone, 2: pair, 4: everyone}  # so many ranks share a sequence

# %% [markdown]
# ## A sample that fits nowhere
#
# Take a model of 32 layers of width 4,096, in 16 bits. Without the T × T matrices of attention, forward leaves 34 bytes
# for each layer, token and unit of width (Korthikanti et al., arXiv 2205.05198, equation 1):

# %% tags=["nbval-check-output"]
kept = 34 * 32 * 4096 * 100_000
print(f"100,000 tokens: {kept / 1e9:.1f} GB of activations")

# %% [markdown]
# So cut the *sequence*: each of N ranks has T/N of its tokens, in every layer. That is
# **[context parallelism](../docs/glossary.md#context-parallelism)**. Embeddings, layer norms, MLPs and the loss compute
# each token by itself, and need nothing from other ranks. In attention a token compares its *query* with the *keys* of
# all tokens up to its own, which gives their scores; the result is a mean of their *values*, weighted by the softmax of
# the scores. Only keys and values must come from elsewhere.
#
# One way is to gather them all, one layer at a time (Llama 3, arXiv 2407.21783, section 3.3.2). Or let them come *one
# block after another*, around a ring, and hold only two blocks at a time: **[ring
# attention](../docs/glossary.md#ring-attention)** (arXiv 2310.01889). `lab.turn`, which is lesson 01's `exchange`,
# sends a block to the next rank and returns that of the rank before. Here a block is the number of the rank that it
# belongs to:

# %%
# %%ranks
block, held = torch.tensor([rank]), [rank]
for _ in range(3):
    block = lab.turn(block, everyone)
    held.append(block.item())

# %%
plots.show(plots.ring_turns(lab.pull("held")))

# %% [markdown]
# After N - 1 turns each block has been everywhere.
#
# ## One block at a time
#
# But a softmax divides by a sum over *all* keys, and a rank sees one block of them. Can it compute a mean now and add
# to it later? Yes, if it knows how much weight the mean so far has. Say that the keys so far have weights that add up
# to 3, and their values a mean of 20, and a new key has weight 1 and value 40:
#
#       so far        weight 3    mean 20   ███ ███ ███
#       the new key   weight 1    value 40  ███
#       together      weight 4    mean 25   = 3/4 · 20 + 1/4 · 40
#
# A key's weight is exp(score), and a sum of those soon overflows. So keep its logarithm, **lse**: the log of the sum of
# exp(score). Then the new lse is log(exp(lse) + exp(score)), which is `torch.logaddexp`, and the shares, 3/4 and 1/4
# above, are exp(lse - new) and exp(score - new). That is an **[online softmax](../docs/glossary.md#online-softmax)**
# (arXiv 1805.02867). Keys with the scores 1, 2 and 3, and values 10, 20 and 40; the third comes in another block:

# %% tags=["nbval-check-output"]
# %%ranks
scores, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 40.0])
mean, lse = (scores[:2].softmax(0) * values[:2]).sum(), scores[:2].logsumexp(0)
new = torch.logaddexp(lse, scores[2])  # the log of the sum of all three
merged = mean * (lse - new).exp() + values[2] * (scores[2] - new).exp()
whole = (scores.softmax(0) * values).sum()
print(f"two keys: mean {mean:.4f}, lse {lse:.4f}", end="; ")
print(f"with the third: {merged:.4f}; all at once: {whole:.4f}")

# %% [markdown]
# ## Write: one block more
#
# Yours is what a rank does with each block that comes: the same as above, for many queries and many keys at once. Only
# `visible` is new. In *causal* attention a token sees only itself and earlier ones, so a query may see a part of a
# block, or nothing of it.

# %%
# %%exercise 25.1

# %%
lab.check("25.1")

# %% [markdown]
# ## Predict
#
# The ring will be a loop of turns and of `merge`. First, who has the most to do? Cut a sequence into 8 chunks, and give
# four ranks two each: rank 0 has chunks 0 and 1, rank 3 has 6 and 7. Count pairs, a chunk of queries with a chunk of
# keys. A pair in which there is nothing to see is not computed; one on the diagonal, where half is hidden, is computed
# whole. How much does rank 3 compute, as a multiple of the mean of the four ranks?

# %%
lab.predict("25.1", 15 / 9)  # times the mean

# %% [markdown]
# ## The ring
#
# `places` are the tokens' places in the sequence: they decide who may see whom, and travel with the keys. `by_halves`
# cuts a rank's queries and a block of keys into their two chunks, and calls your `merge` for those pairs in which there
# is something to see.

# %%
# %%ranks
merge = lab.by_halves(lab.mine("25.1"))


def ring(q, k, v, places, group):  # q, k, v: (B, H, T / N, D), of this rank's tokens
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    block, theirs = torch.stack([k, v]), places
    for step in range(dist.get_world_size(group)):
        if step:
            block, theirs = lab.turn(block, group), lab.turn(theirs, group)
        visible = places[:, None] >= theirs
        out, lse = merge(q, *block, visible, out, lse)
    return out, lse


attend = lab.with_backward(ring)

# %% [markdown]
# `with_backward` makes it a function that autograd knows (in `zerolab/lab/lessons/lesson25/ring.py`). Its backward is
# the same loop again: each block goes around once more, and with it the gradient of its keys and values so far. The
# weights are computed again, from q, k and lse, so nothing of size T × T is ever kept.
#
# Is it right? Here it is beside torch's attention in one process, with its FLOP counted, and with two ways to place the
# tokens. `contiguous` is the prediction's.


# %%
# %%ranks
def contiguous(N, r, T):  # the places of rank r of N
    return torch.arange(T).chunk(N)[r]


def zigzag(N, r, T):
    chunks = torch.arange(T).chunk(2 * N)
    return torch.cat([chunks[r], chunks[2 * N - 1 - r]])


# %% tags=["nbval-check-output"]
# %%ranks
flop = {}
for N in (2, 4):
    for way in (contiguous, zigzag):
        places = way(N, dist.get_rank(rings[N]), 64)
        error, flop[N, way.__name__] = lab.attend_in_pieces(attend, places, rings[N])
        print(f"{N} ranks, {way.__name__:10}: output and gradients of one", end=" ")
        print("process, to 12 digits:", error < 1e-12)

# %%
flops = lab.pull("flop")
amounts = [of[4, "contiguous"] for of in flops]
lab.measured("25.1", amounts[3] / (sum(amounts) / 4))
lab.reveal("25.1")

# %% [markdown]
# ## Zigzag
#
# Late tokens have more to look at, so the rank that has the last ones does the most. The remedy is free: rank r gets
# the chunks r and 2N - 1 - r, one early and one late. That is the **zigzag** placement.

# %%
if lab.predicted("25.1"):
    owners = {"contiguous": [0, 0, 1, 1, 2, 2, 3, 3], "zigzag": [0, 1, 2, 3, 3, 2, 1, 0]}
    flop = {way: [of[4, way] for of in flops] for way in owners}
    plots.show(plots.attention_map(owners, flop))

# %% [markdown]
# Rank 3 computes 15 of the 36 pairs on the left, and 9 on the right, like everyone. But a ring has turns, and in each
# of them ranks wait for their neighbours. So an even total is not enough: how many pairs does a rank have in each turn?

# %%
# %%ranks
pairs = {}
for way in (contiguous, zigzag):
    mine = way(4, rank, 64)[:, None]
    pairs[way.__name__] = [len(seen(mine >= way(4, source, 64))) for source in held]

# %%
if lab.predicted("25.1"):
    pairs = {way: [of[way] for of in lab.pull("pairs")] for way in ("contiguous", "zigzag")}
    plots.show(plots.ring_turns(lab.pull("held"), pairs))

# %% [markdown]
# On the left rank 0 is idle from turn 1 on: whatever comes is later than its queries. On the right every rank has three
# pairs with its own block, and two in each turn after it: of a lower rank's block both its chunks see the early keys,
# and of a higher rank's its late chunk sees all.
#
# ## The whole model, on a piece of a sequence
#
# Now a GPT of two blocks, width 64 and float32, with `attend` for its attention, and one sequence of 512 tokens on four
# ranks. Each turn sends a block of keys and values, and their places, as int64. How many bytes does a rank send in the
# whole forward?

# %%
lab.predict("25.2", 2 * 3 * (2 * 128 * 64 * 4 + 128 * 8))  # bytes

# %% [markdown]
# And who averages what? In lesson 22 an engine averaged each expert over its replicas, which were fewer than the
# losses, so its divisor was too small. Here every rank has every parameter, and the engine averages over all four.
# Each rank's loss is the mean over its own tokens. The ring takes a part of its gradient to other ranks, with their
# keys and values. But the sum over all four has each loss exactly once, as in data parallelism, so `Zero3` over all
# four ranks is right as it is. (If all ranks have equally many tokens. If not, see lesson 14.)


# %% tags=["nbval-check-output"]
# %%ranks
def long_model(N, dtype=torch.float64):
    torch.manual_seed(0)
    places = zigzag(N, dist.get_rank(rings[N]), 512)  # for the position embeddings, too
    model = RingGPT(lambda q, k, v: attend(q, k, v, places, rings[N]), places)
    return model.to(dtype)


x, y = batch(words, 0, 0, 1, 512)  # one sequence, the same on all ranks
torch.manual_seed(0)
plain = GPT(layers=2, width=64, context=512).double()
F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
zero = zerolab.Zero3(long_model(4), units=[Block])
places = zero.model.places
zero.model(x[:, places], y[:, places]).backward()
for model in (plain, zero.model):
    torch.optim.SGD(model.parameters(), 0.1).step()
same = lab.relative_error(zero.full_state_dict(), plain.state_dict()) < 1e-12
print("one sequence on four ranks, with Zero3: one process's weights after a step:", same)

# %%
# %%ranks
per_token, sent = {}, {}
for N in (1, 2, 4):
    model = long_model(N, torch.float32)
    with saved(model) as kept, calls() as book:
        model(x[:, model.places], y[:, model.places])
    per_token[N], sent[N] = kept.peak / 512, book.sent

# %%
lab.measured("25.2", lab.pull("sent", rank=0)[4])
lab.reveal("25.2")

# %% tags=["nbval-check-output"]
if lab.predicted("25.2"):
    sent = lab.pull("sent", rank=0)
    for N, kept in lab.pull("per_token", rank=0).items():
        print(f"N = {N}, a rank: {kept:,.0f} bytes", end=" ")
        print("kept per token of the sequence", end="; ")
        print(f"{sent[N]:,.0f} sent in forward")

# %% [markdown]
# That is what a thousand GPUs with ZeRO-3 alone can't do: two ranks halve the activations of *one* sequence, and four
# quarter them. In a layer's forward a rank sends 2TC(N-1)/N numbers, keys and values (and their places). In backward it
# sends 4TC, because the gradients travel with them, and all the way home. The large model again:

# %% tags=["nbval-check-output"]
kept = 34 * 32 * 4096 * 100_000
for N in (1, 8, 64):
    print(f"100,000 tokens, N = {N:2}: {kept / N / 1e9:6.1f} GB of activations on a rank")

# %% [markdown]
# ## In production
#
# DeepSpeed-Ulysses (arXiv 2309.14509) cuts a sequence another way: all-to-alls before and after attention turn "all
# heads of my tokens" into "all tokens of my heads", and back. In a layer's forward and backward a rank sends
# 8TC(N-1)/N² numbers, less than in our ring, but there must be a head for each rank.
#
# What can't be shown on CPUs: a ring hides each turn behind the computing of a block, if blocks are long (arXiv
# 2310.01889, section 3). torch 2.13 has one for CUDA, and calls it experimental:
# `torch.distributed.tensor.experimental.context_parallel`.
#
# ## Questions
#
# 1. Why can softmax be computed one block of keys after another, and what must be kept for each query?
# 2. A query sees two keys, in two blocks: scores 0 and log 3, values 8 and 4. What are its mean and its lse after the
#    first block, and after the second?
# 3. A sequence is cut among 8 ranks. What is wrong with cutting it in order, and what does zigzag change?
# 4. What does ZeRO have to know about context parallelism, and when is its mean over the ranks wrong?
# 5. The model of 32 layers of width 4,096 in 16 bits, 100,000 tokens, 8 ranks. How many bytes does a rank send in
#    forward and in backward around our ring, and how many with Ulysses? What may still favour the ring?
# 6. The same model, 64 GPUs of 80 GB, and 64 sequences of 8,000 tokens in a batch. Do you cut sequences?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Two means over disjoint keys combine with weights exp(lse - new lse). So the mean so far and its lse are enough.
# 2. After the first: mean 8 and lse 0, since exp(0) = 1. After the second the weights are 1 and 3: lse = log 4, and the
#    mean is 1/4 · 8 + 3/4 · 4 = 5.
# 3. The last rank computes 31 of the 136 pairs of chunks, nearly twice the mean of 17, and all wait for it. With zigzag
#    each has an early chunk and a late one, and all compute the same.
# 4. Nothing: each rank has different tokens, and gradients are averaged over all ranks, as ever. The mean is wrong if
#    ranks have different numbers of tokens that count, for example with padding: then divide sums by the number of all.
# 5. Forward 2TC(N-1)/N in 32 layers, 45.9 GB; backward 4TC, 104.9 GB. Ulysses: 8TC(N-1)/N², 22.9 GB for both. The ring
#    works with more ranks than heads, and its turns can hide behind computing.
# 6. No. 8,000 tokens need 34 · 32 · 4,096 · 8,000 bytes, 35.7 GB. The layers have 32 · 12 · 4,096² parameters, 6.4
#    billion, and with ZeRO-3 their states are 16 · 6.4 · 10⁹ / 64 bytes, 1.6 GB a rank. So each GPU has a sequence, and
#    no keys travel. Cut when one sample doesn't fit, or when there are fewer samples than GPUs.

# %%
lab.stop()
lab.progress()
