# %% [markdown]
# # 22 · Experts, and long contexts
#
# **The question.** ZeRO brings parameters to the samples. Two kinds of models turn that around. In one, a layer has too
# many *parameters* to gather for every rank, although a token needs only a few of them: experts. In the other, one
# sample has more *tokens* than a GPU can hold: the 100,000 with which lesson 15 opened. In both, tokens travel, or what
# has been made of them. That changes what a step sends, which rank is the slowest, and whose gradients are averaged with
# whose. With the wrong divisor, the experts' gradients are several times too large, and under Adam no loss curve shows
# it: DeepSpeed's ZeRO had that mistake until September 2024.

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
from torch import nn
from zerolab import lab
from zerolab.lab import GPT, MLP, Block, Experts, RingGPT, batch, calls, saved, seen, text
from zerolab.measure import ledger

words = text()
EXPERTS = 8
everyone = dist.group.WORLD

# %% [markdown]
# ## Experts
#
# Take the MLP out of a transformer's block and put eight in its place, the **[experts](../docs/glossary.md#expert)**. A
# **[router](../docs/glossary.md#router)**, a linear layer with one output for each expert, decides which one computes a
# token: that with the largest score, here a sigmoid (in the Switch Transformer, arXiv 2101.03961, a softmax). The
# result is multiplied by the score, which gives the router a gradient. There are eight times the parameters, and a
# token costs what it did before.
#
# With ZeRO-3 on four ranks, each rank has a fourth of every expert, and gathers *all* eight: some token may choose any
# of them. **[Expert parallelism](../docs/glossary.md#expert-parallelism)** leaves an expert whole, on one rank, and
# sends it its tokens. Each rank has rows for every other, but not equally many. The collective for that is the
# **[all-to-all](../docs/glossary.md#all-to-all)** with uneven splits. Here rank 0 has the experts 0 and 1 and the
# tokens 10 to 13, rank 1 has the experts 2 and 3 and the tokens 20 to 24, and so on.

# %%
# %%ranks
torch.manual_seed(rank)
tokens = 10 * (rank + 1) + torch.arange(4.0 + rank)
chosen = torch.randint(EXPERTS, tokens.shape)
before = tokens[torch.argsort(chosen, stable=True)]  # by expert, and so by rank
send = torch.bincount(chosen // 2, minlength=4)
receive = torch.empty_like(send)
dist.all_to_all_single(receive, send)  # how many will come?
after = torch.empty(int(receive.sum()))
dist.all_to_all_single(after, before, receive.tolist(), send.tolist())
before, after = before.tolist(), after.tolist()

# %%
title = "An all-to-all, with uneven splits"
plots.show(plots.before_after(title, lab.pull("before"), lab.pull("after")))

# %% [markdown]
# Left, each rank has sorted its tokens by their experts. Right, what comes to a rank lies in the order of the ranks
# that it came from. The ranks first told each other how many would come, in another all-to-all.
#
# ## Predict
#
# One such layer of width 128, on four ranks with two experts each. Each rank has 512 tokens, spread evenly over the
# experts. Everything is float32. The tokens go to their experts, the results come back, and backward does the same
# with gradients. How many bytes does a rank send in all? (Leave out the numbers of tokens.)

# %%
lab.predict("22.1", 4 * 512 * 128 * 4 * 3 / 4)  # bytes

# %% [markdown]
# ## Write: tokens to experts, and back
#
# `Exchange` is the all-to-all as autograd sees it: a row goes somewhere, and its gradient comes back. `combine` is the
# way back of the tokens. Both are given. `dispatch` is yours: it sorts the tokens, asks how many will come, and sends
# them.

# %%
# %%exercise 22.1

# %%
lab.check("22.1")

# %% [markdown]
# With these two, the layer is short. `Experts` is a list of experts, and calls each with its rows, even if it has none:
# an engine around them needs the same calls on all ranks.

# %%
# %%ranks
dispatch, combine = (lab.mine("22.1", name) for name in ("dispatch", "combine"))


class MoE(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.kept = [Experts(MLP(width) for _ in range(EXPERTS))]  # why a list? Below.
        self.group, self.bias, self.chosen = None, torch.zeros(EXPERTS), None

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).sigmoid()
        self.chosen = (scores + self.bias).argmax(dim=-1)
        if self.group is None:  # all experts are here
            made = self.kept[0](flat, self.chosen)
        else:
            rows, local, way = dispatch(flat, self.chosen, EXPERTS, self.group)
            made = combine(self.kept[0](rows, local), way)
        return (made * scores.gather(1, self.chosen[:, None])).view_as(x)


x = torch.randn(512, 128, requires_grad=True)
evenly = torch.arange(512) % EXPERTS
experts = Experts(MLP(128) for _ in range(2))
with calls() as book:
    rows, local, way = dispatch(x, evenly, EXPERTS, everyone)
    combine(experts(rows, local), way).sum().backward()
sent_tokens = sum(book.sent_by[1:])  # the first call is that of the numbers

gathers = zerolab.Zero3(Experts(MLP(128) for _ in range(EXPERTS)), units=[MLP])
with ledger(gathers) as book:
    gathers.model(x, evenly).sum().backward()
sent_parameters = book.moved

# %%
lab.measured("22.1", lab.pull("sent_tokens", rank=0))
lab.reveal("22.1")

# %% tags=["nbval-check-output"]
if lab.predicted("22.1"):
    tokens = lab.pull("sent_tokens", rank=0)
    parameters = lab.pull("sent_parameters", rank=0)
    print(f"tokens to experts and back: {tokens:,.0f} bytes", end="; ")
    print(f"experts to tokens: {parameters:,}")
    print(f"even at {512 * parameters / tokens:,.0f} tokens on each rank")

# %% [markdown]
# Tokens cost in proportion to their number, parameters in proportion to the experts. `Zero3` gathers each expert twice
# and scatters its gradient, 3Ψ(N-1)/N. With E experts of 8C² parameters and one expert for each token, the two are even
# at 6EC tokens a rank: here 6,144 (6,174 with the biases), and with C = 4,096 and 64 experts 1.6 million. So real
# models send tokens. But ZeRO's messages can be sent ahead, and these can't: the router decides where they go.
#
# ## Who averages what
#
# Now a model: a GPT of two blocks, with eight experts in each. Everything else is replicated or sharded over all four
# ranks, as ever. The experts are shared out over G ranks, an *expert group*. With G = 4 an expert is on one rank. With
# G = 2 each pair has all eight, and two ranks have the same ones, each expert's
# **[replicas](../docs/glossary.md#replica)**:
#
#               place 0     place 1
#     pair 0    rank 0 ──── rank 1      ──  an expert group: tokens
#                 │           │
#     pair 1    rank 2 ──── rank 3       │  replicas: the same experts
#               experts     experts
#               0 to 3      4 to 7
#
# We want the gradients of one process that has the samples of all four ranks, and whose loss is the mean of their four
# losses. In a *dense* parameter, which every rank has, backward leaves the gradient of that rank's loss: add up over the
# four ranks, and divide by four. And an expert? Whose losses are in its gradient already, whose are missing, and what
# does one process divide by?
#
# ## Write: who averages what

# %%
# %%exercise 22.2

# %%
lab.check("22.2")

# %% [markdown]
# Compared with one process, in float64, for G = 2 and 4:

# %%
# %%ranks
average = lab.mine("22.2")
GROUPS = {1: (None, None)}  # G -> this rank's expert group, and its replicas
for G in (2, 4):
    rows = [dist.new_group(range(first, first + G)) for first in range(0, 4, G)]
    columns = [dist.new_group(range(first, 4, G)) for first in range(G)]
    GROUPS[G] = rows[rank // G], columns[rank % G]


def part(experts, G):  # those of all experts that this rank has
    each = EXPERTS // G
    return experts[each * (rank % G) :][:each]


def moe_model(G=1, dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    for block in model.blocks:
        block.mlp = MoE(64)
        block.mlp.kept = [part(block.mlp.kept[0], G).to(dtype)]
        block.mlp.group = GROUPS[G][0]
    return model.to(dtype)


def experts_of(model):
    return [block.mlp.kept[0] for block in model.blocks]


def params_of(modules):
    return [param for module in modules for param in module.parameters()]


def grads_of(modules):
    return [param.grad for param in params_of(modules)]


def loss_of(model, who, number=0):
    x, y = batch(words, who, number, 2, 64)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def one_process():
    model = moe_model()
    for who in range(4):
        (loss_of(model, who) / 4).backward()
    return model


# %% tags=["nbval-check-output"]
# %%ranks
one = one_process()
for G in (2, 4):
    model = moe_model(G)
    loss_of(model, rank).backward()
    ours = grads_of([model]), grads_of(experts_of(model))
    average(*ours, everyone, GROUPS[G][1])
    theirs = grads_of([one]), grads_of(part(experts, G) for experts in experts_of(one))
    for kind, got, want in zip(("dense", "experts"), ours, theirs):
        same = lab.relative_error(got, want) < 1e-9
        print(f"G = {G}, {kind:7}: gradients of one process, to 9 digits: {same}")

# %% [markdown]
# Both kinds are divided by the same number, that of the losses. They differ in what is still to be *added*. A token's
# gradient has come to its expert on the way back, from whichever rank's loss. What an expert lacks is with its
# replicas, which have had other tokens.
#
# ## Together with ZeRO
#
# An engine knows one group for a whole model, and leaves no parameter out. So take several. The experts are in a list,
# where `named_parameters()` doesn't find them: the rest is an ordinary model for a `Zero3` over all ranks. And each
# layer's experts are a model for another `Zero3`, over their replicas.
#
# An engine *averages* over its group. With G = 2 each expert is on two ranks. How many times the gradient of one process
# does `Zero3` leave in its `.grad`?

# %%
lab.predict("22.2", 2)  # times


# %%
# %%ranks
def with_zero(G, stage=3, dtype=torch.float64):  # engines: the model's, and each layer's
    model = moe_model(G, dtype)
    inner = [
        zerolab.shard(experts, stage=stage, units=[MLP], group=GROUPS[G][1])
        for experts in experts_of(model)
    ]
    return [zerolab.shard(model, stage=stage, units=[Block]), *inner]


times = {}
for G in (2, 4):
    outer, first, second = with_zero(G)
    loss_of(outer.model, rank).backward()
    norm = first.clip_grad_norm_(float("inf"))  # it clips nothing
    times[G] = norm / nn.utils.get_total_norm(grads_of([part(experts_of(one)[0], G)]))

# %%
times = lab.pull("times", rank=0)
lab.measured("22.2", round(times[2].item(), 6))
lab.reveal("22.2")

# %% tags=["nbval-check-output"]
if lab.predicted("22.2"):
    for G, factor in times.items():
        print(f"G = {G}: {factor:.3f} x one process's gradient")

# %% [markdown]
# Divided by the 4/G replicas instead of by 4, the gradient is G times too large. Under Adam the loss won't tell you,
# because Adam divides a gradient by its own size. What does suffer: SGD; clipping, whose norm has the experts' part G
# times too large; and a run that goes on with another G, with Adam's averages of another size. DeepSpeed's ZeRO made
# it "ep_size times larger than the true gradient" ([#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545),
# mended by [#6546](https://github.com/deepspeedai/DeepSpeed/pull/6546)). The remedy is one line after backward. With
# it, a step of SGD beside one process:


# %% tags=["nbval-check-output"]
# %%ranks
def right_factor(experts, G):  # from a mean over the 4 / G replicas to one over all four
    for param in params_of(experts):
        if param.grad is not None:
            param.grad /= G


alone = one_process()
torch.optim.SGD(params_of([alone, *experts_of(alone)]), 0.1).step()
for G in (2, 4):
    zeros = with_zero(G)
    model, *experts = [zero.model for zero in zeros]
    loss_of(model, rank).backward()
    right_factor(experts, G)
    torch.optim.SGD(params_of([model, *experts]), 0.1).step()
    plain = [alone, *(part(experts, G) for experts in experts_of(alone))]
    pairs = [(zero.full_state_dict(), of.state_dict()) for zero, of in zip(zeros, plain)]
    same = all(lab.relative_error(got, want) < 1e-10 for got, want in pairs)
    print(f"G = {G}, Zero3 for both: weights as of one process: {same}")

# %% [markdown]
# What if you register the experts as modules, and wrap the model once? The first expert of each rank has the same name
# and shape, so to an engine, or to torch's DDP, they are one parameter. It broadcasts the first rank's, and the others
# are gone, without an error.
#
# ## The fullest expert
#
# Nothing makes the router spread tokens evenly, and an expert that is chosen more learns more, so it is chosen more.
# Forty steps with real text and AdamW, twice. The second time each expert has a *bias*, which is added to its score for
# the choice alone. After every step it rises a little if the expert had fewer of all ranks' tokens than the mean, and
# falls if it had more (arXiv 2408.15664; DeepSeek-V3 uses it).


# %%
# %%ranks
def train(speed):
    zeros = with_zero(4, stage=1, dtype=torch.float32)
    model, *experts = [zero.model for zero in zeros]
    layers = [block.mlp for block in model.blocks]
    adam = torch.optim.AdamW(params_of([model, *experts]), lr=1e-3)
    for number in range(40):
        loss_of(model, rank, number).backward()
        right_factor(experts, 4)
        adam.step()
        adam.zero_grad()
        counts = torch.stack([layer.chosen.bincount(minlength=EXPERTS) for layer in layers])
        dist.all_reduce(counts)  # (layers, experts)
        for layer, mine in zip(layers, counts):
            layer.bias += speed * torch.sign(mine.double().mean() - mine)
    return counts[0].tolist(), layers[0].chosen  # of the first layer


skylines, choices = {}, {}
for name, speed in (("as the router likes", 0.0), ("with a bias", 0.01)):
    skylines[name], choices[name] = train(speed)

# %%
skylines = lab.pull("skylines", rank=0)
capacity = 1.25 * 4 * 128 / 8
title = "Tokens by expert in the first layer, after 40 steps"
plots.show(plots.tokens_by_expert(skylines, title, capacity, learner=lab.passed("22.1")))

# %% [markdown]
# In each layer all ranks wait for the one with the most tokens, which also has the most activations: a run can go out of
# memory in its thousandth step.
#
# The older remedy is a **[capacity](../docs/glossary.md#capacity)**: an expert takes at most a fixed number of tokens
# from each rank, its even share times a *capacity factor* such as 1.25 (the dashed line, for four ranks). Then all
# splits are even and known in advance. A token beyond it is **dropped**: the residual connection carries it past the
# layer, unchanged. Room that is left is sent as padding. Here:


# %%
# %%ranks
for name, chosen in choices.items():
    room = int(1.25 * 128 / EXPERTS)  # of an expert, for a rank's 128 tokens
    kept = chosen.bincount(minlength=EXPERTS).clamp(max=room).sum()
    dist.all_reduce(kept)
    dropped, padding = 1 - kept / 512, 1 - kept / (4 * EXPERTS * room)
    print(f"{name:20} {dropped:.0%} dropped, {padding:.0%} of what is sent is padding")

# %% [markdown]
# So capacity bounds time and memory, and pays with dropped tokens *and* with padding. The bias goes to the cause. And
# without a capacity nothing is dropped: such a layer is *dropless*. (But the host must wait for the router, since
# `all_to_all_single` takes its splits as Python numbers.)
#
# ## A sample that fits nowhere
#
# Now lesson 15's opening case: the activations of one sequence of 100,000 tokens need more memory than a GPU has. ZeRO
# divides model states, data parallelism samples, and this is one sample. So cut the *sequence*: each of N ranks has T/N
# of its tokens, in every layer: **[context parallelism](../docs/glossary.md#context-parallelism)**.
#
# Only attention needs anything from another rank: a query looks at the keys and values of all earlier tokens. Gather
# them all, one layer at a time (Llama 3, arXiv 2407.21783, section 3.3.2). Or let them come *one block after another*,
# around a ring, and hold two: **[ring attention](../docs/glossary.md#ring-attention)** (arXiv 2310.01889). In N - 1
# turns each block has been everywhere.
#
# But a softmax divides by a sum over *all* keys, and here is one block of them. So keep two things for each query:
# the weighted mean of the values so far, and **lse**, the log of the sum of exp(score) so far. The mean has been
# divided by exp(lse), so both can be brought up to date when a block comes: an **[online
# softmax](../docs/glossary.md#online-softmax)** (arXiv 1805.02867). One query, keys with the scores 1, 2 and 3, and
# values 10, 20 and 40, and the third comes in another block:

# %% tags=["nbval-check-output"]
# %%ranks
scores, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 40.0])
mean, lse = (scores[:2].softmax(0) * values[:2]).sum(), scores[:2].logsumexp(0)
both = torch.logaddexp(lse, scores[2])  # the log of the sum of all three
merged = mean * (lse - both).exp() + values[2] * (scores[2] - both).exp()
whole = (scores.softmax(0) * values).sum()
print(f"two keys: mean {mean:.4f}, lse {lse:.4f}", end="; ")
print(f"with the third: {merged:.4f}; all at once: {whole:.4f}")

# %% [markdown]
# ## Predict
#
# In causal attention a token sees only earlier ones. Cut a sequence into 8 chunks, and give four ranks two each: rank 0
# has chunks 0 and 1, rank 3 has 6 and 7. Count pairs, a chunk of queries with a chunk of keys. A pair in which there is
# nothing to see is not computed; one on the diagonal, where half is hidden, is computed whole. How much does rank 3
# compute, as a multiple of the mean of the four ranks?

# %%
lab.predict("22.3", 15 / 9)  # times the mean

# %% [markdown]
# ## Write: one block more
#
# `lab.turn`, which is lesson 01's `exchange`, sends blocks around the ring. What a rank does with each that comes is
# yours to write.

# %%
# %%exercise 22.3

# %%
lab.check("22.3")

# %% [markdown]
# The ring is a loop of turns and of `merge`. `places` are the tokens' places in the sequence: they decide who may see
# whom, and travel with the keys. `seen` lists the pairs of chunks that have something to see. Backward goes around once
# more, and with each block goes its gradient so far. It computes the weights again, from q, k and lse, so nothing of
# size T × T is ever kept.

# %%
# %%ranks
merge = lab.mine("22.3")


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, places, group):
        nothing = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
        states = [*zip(torch.zeros_like(q).chunk(2, -2), nothing.chunk(2, -1))]
        block, theirs = torch.stack([k, v]), places
        for step in range(dist.get_world_size(group)):
            if step:
                block, theirs = lab.turn(block, group), lab.turn(theirs, group)
            for i, j in seen(places, theirs):
                visible = places.chunk(2)[i][:, None] >= theirs.chunk(2)[j]
                key, value = (half.chunk(2, -2)[j] for half in block)
                states[i] = merge(q.chunk(2, -2)[i], key, value, visible, *states[i])
        out, lse = (torch.cat(halves, 2) for halves in zip(*states))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = places, group
        return out

    @staticmethod
    def backward(ctx, grad):
        return *lab.ring_gradients(grad, ctx.saved_tensors, *ctx.ring), None, None


def contiguous(N, r, T):  # the places of rank r of N
    return torch.arange(T).chunk(N)[r]


def zigzag(N, r, T):
    chunks = torch.arange(T).chunk(2 * N)
    return torch.cat([chunks[r], chunks[2 * N - 1 - r]])


# %% tags=["nbval-check-output"]
# %%ranks
rings, flop = {1: GROUPS[4][1], 2: GROUPS[2][0], 4: everyone}, {}
for N, ring in [(2, rings[2]), (4, rings[4])]:
    for way in (contiguous, zigzag):
        places = way(N, dist.get_rank(ring), 64)
        error, flop[N, way.__name__] = lab.attend_in_pieces(Ring.apply, places, ring)
        print(f"{N} ranks, {way.__name__:10}: output and gradients of one", end=" ")
        print("process, to 12 digits:", error < 1e-12)

# %%
flops = lab.pull("flop")
amounts = [of[4, "contiguous"] for of in flops]
lab.measured("22.3", amounts[3] / (sum(amounts) / 4))
lab.reveal("22.3")

# %% [markdown]
# ## Zigzag
#
# Late tokens have more to look at, and in each turn everyone waits for the slowest. The remedy is free: rank r gets the
# chunks r and 2N - 1 - r, one early and one late. That is the **zigzag** placement.

# %%
if lab.predicted("22.3"):
    owners = {"contiguous": [0, 0, 1, 1, 2, 2, 3, 3], "zigzag": [0, 1, 2, 3, 3, 2, 1, 0]}
    flop = {way: [of[4, way] for of in flops] for way in owners}
    plots.show(plots.attention_map(owners, flop))

# %% [markdown]
# Rank 3 computes 15 of the 36 pairs on the left, and 9 on the right, like everyone. In every turn after the first, each
# rank of the zigzag ring computes two pairs; on the left some rank computes four, while others wait.
#
# ## The whole model, on a piece of a sequence
#
# Now a GPT with `Ring` for its attention, and one sequence of 512 tokens. Who averages what? A rank's loss is the mean
# over its own tokens, and the ring brings its keys and values the gradients of the others' losses. So each loss counts
# once, as in data parallelism: `Zero3` over all four ranks is right as it is. (If all have equally many tokens; else
# see lesson 14.)


# %% tags=["nbval-check-output"]
# %%ranks
def long_model(N, dtype=torch.float64):
    torch.manual_seed(0)
    places = zigzag(N, dist.get_rank(rings[N]), 512)  # for the position embeddings, too
    model = RingGPT(lambda q, k, v: Ring.apply(q, k, v, places, rings[N]), places)
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
for N in (1, 2, 4):
    model = long_model(N, torch.float32)
    with saved(model) as kept, calls() as book:
        model(x[:, model.places], y[:, model.places])
    print(f"N = {N}: {kept.peak / 512:,.0f} bytes for each token of the sequence;", end=" ")
    print(f"{book.sent:,.0f} bytes sent in forward")

# %% [markdown]
# That is what a thousand GPUs with ZeRO-3 alone can't do: two ranks halve the activations of *one* sequence, and four
# quarter them. In forward a rank sends keys and values (and their places), 2TC(N-1)/N numbers in a layer, and in
# backward 4TC. For a model of 32 layers of width 4,096 in 16 bits, count 34 bytes for each layer, token and unit of
# width (Korthikanti et al., arXiv 2205.05198, equation 1 without the attention term):

# %% tags=["nbval-check-output"]
kept = 34 * 32 * 4096 * 100_000
for N in (1, 8, 64):
    print(f"100,000 tokens, N = {N:2}: {kept / N / 1e9:6.1f} GB of activations on a rank")

# %% [markdown]
# ## In production
#
# DeepSpeed-Ulysses (arXiv 2309.14509) cuts a sequence another way: all-to-alls before and after attention turn "all
# heads of my tokens" into "all tokens of my heads", and back. In a step a rank sends 8TC(N-1)/N² numbers, less than in
# our ring, but there must be a head for each rank.
#
# FSDP2 can have experts as a part of the model: wrap them first, over a mesh of their replicas, then the rest. It, too,
# averages over the replicas, unless you tell it the divisor (`set_gradient_divide_factor`).
#
# What can't be shown on CPUs: DeepSeek-V3 sends a token to at most four nodes, in fp8, and gives 20 of a GPU's 132
# multiprocessors to the kernels that send (arXiv 2412.19437, sections 3.2.2, 3.3.3 and 3.5.1). A ring hides each turn
# behind the computing of a block, if blocks are long (arXiv 2310.01889, section 3). torch has one for CUDA,
# `torch.distributed.tensor.experimental.context_parallel`.
#
# ## Questions
#
# 1. A layer has 64 experts, and each token uses one. What do expert parallelism and ZeRO-3 send for it in a step, and
#    what decides which is less?
# 2. Sixteen ranks, experts shared out over eight. Over which ranks is an expert's gradient all-reduced, and by what
#    is it divided? What goes wrong with the obvious divisor, and why may nobody notice?
# 3. You wrap a model with registered experts, another set on each rank, in one DDP. What happens, and when?
# 4. Capacity or dropless: what does each cost, in tokens, bytes, memory and waiting?
# 5. Why can softmax be computed one block of keys after another, and what must be kept for each query?
# 6. A sequence is cut among 8 ranks. What is wrong with cutting it in order, what does zigzag change, and what does
#    ZeRO have to know of all this?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Four times the tokens' activations, (N-1)/N of them. ZeRO-3 sends 3(N-1)/N of all 64 experts' parameters. It is
#    decided by tokens per rank against 6EC, which few runs reach.
# 2. Over its 2 replicas, and divided by 16: its tokens came from all ranks, each of whose losses counts 1/16. Divided
#    by 2, it is 8 times too large. Adam's steps don't depend on the size of gradients, so the loss looks right; the
#    norm that clips doesn't.
# 3. When it is built, DDP broadcasts rank 0's parameters. The other experts are gone before the first step.
# 4. Capacity: lost tokens and padding, but known sizes, and a bound for memory. Dropless: every token is computed, the
#    fullest rank decides the time and needs the memory, and the counts must reach the host.
# 5. Two means over disjoint keys combine with weights exp(lse - new lse). So the mean so far and its lse are enough.
# 6. The last rank computes 31 of the 136 pairs of chunks, nearly twice the mean of 17, and all wait for it. With zigzag
#    each has an early chunk and a late one, and all compute the same. ZeRO needs to know nothing: ranks have other
#    tokens, and gradients are averaged over all of them.

# %%
lab.stop()
lab.progress()
