# %% [markdown]
# # 22 · Experts, and long contexts
#
# **The question.** ZeRO brings parameters to the samples. Two kinds of models turn that around. One has so many
# *parameters* in a layer that gathering them for every rank is hopeless, although each token needs only a few of them:
# experts. The other has so many *tokens* in one sample that no GPU can hold it: the 100,000 tokens with which lesson 15
# opened, and for which it had no answer. In both, tokens travel, or what has been made of them. That changes what a
# step sends, which rank is the slowest, and whose gradients are averaged with whose. With the wrong divisor, the
# experts' gradients are several times too large, and under Adam no loss curve shows it: DeepSpeed's ZeRO had that
# mistake until September 2024.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zerolab import lab
from zerolab.lab import GPT, MLP, Block, RingGPT, batch, calls, saved, seen, text
from zerolab.measure import ledger

words = text()
EXPERTS = 8
everyone = dist.group.WORLD
one = nn.ModuleList(MLP(128) for _ in range(EXPERTS))
psi = sum(param.numel() for param in one.parameters())
print(f"{EXPERTS} experts: {psi:,} parameters, of which a token uses {psi // EXPERTS:,}")

# %% [markdown]
# ## Experts
#
# Take the MLP out of a transformer's block and put eight in its place, the **[experts](../docs/glossary.md#expert)**.
# A **[router](../docs/glossary.md#router)**, a linear layer with one output for each expert, decides for each token
# which of them computes it: the one with the largest score (as in the Switch Transformer, arXiv 2101.03961). The
# expert's result is multiplied by the score, and through that factor the router gets a gradient. The layer has eight
# times the parameters, and a token costs what it cost before.
#
# Where are the experts? With ZeRO-3 on four ranks, each has a fourth of every expert, and gathers *all* eight in each
# layer: some token may choose any of them. The alternative leaves an expert whole, on one rank, and sends it its
# tokens: **[expert parallelism](../docs/glossary.md#expert-parallelism)**. Each rank has rows for every other, and not
# equally many. The collective for that is the **[all-to-all](../docs/glossary.md#all-to-all)** with uneven splits. Here
# four ranks have four to seven tokens each (rank 0 has 10, 11, 12 and 13), and two of the experts: rank 0 has the
# experts 0 and 1, rank 1 has 2 and 3, and so on.

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
# Left, each rank has put its tokens in the order of their experts. Right, what comes to a rank lies in the order of
# the ranks that it came from. How many will come, the ranks tell each other first, in an all-to-all of one number each.
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
# `Exchange`, which is given, is the all-to-all as autograd sees it. Nothing is added up here: a row goes somewhere, and
# its gradient comes back. `dispatch` puts the tokens in order, asks how many will come, and sends them; `combine` is its
# way back.

# %%
# %%exercise 22.1

# %%
lab.check("22.1")

# %% [markdown]
# With these two, the layer is short. In a rank's `Experts` every expert is called, even if it has no rows: then all
# ranks make the same calls in the same order, which an engine around them needs (lesson 20: ranks that route to
# different units).

# %%
# %%ranks
dispatch, combine = (lab.mine("22.1", name) for name in ("dispatch", "combine"))


class Experts(nn.Module):
    def __init__(self, each):
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, rows, local):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.each):
            places = (local == number).nonzero().flatten()
            out = out.index_copy(0, places, expert(rows[places]))
        return out


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


torch.manual_seed(rank)
experts = Experts(MLP(128) for _ in range(2))
x = torch.randn(512, 128, requires_grad=True)
evenly = torch.arange(512) % EXPERTS
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
# and scatters its gradient, 3Ψ(N-1)/N, which is less only with thousands of tokens on each rank. With E experts of 8C²
# parameters and one expert for each token, the two are even at 6EC tokens a rank: here 6,144 (6,174 with the biases),
# and with C = 4,096 and 64 experts 1.6 million. So real models send tokens. But ZeRO's messages can be sent ahead, and
# these can't: where tokens go is known only when the router has decided.
#
# ## Who averages what
#
# Now a model: a GPT of two blocks, with eight experts in each. Everything but the experts is replicated or sharded
# over all four ranks, as ever. The experts are shared out over G ranks, an *expert group*. With G = 4 an expert is on
# one rank. With G = 2 each pair has all eight, and two ranks have the same ones, each expert's
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
# losses. A *dense* parameter is one that every rank has. On rank r, backward leaves the gradient of that rank's loss in
# it: add up over the four ranks, and divide by four. And an expert? Whose losses are in its gradient already, whose are
# missing, and what does one process divide by?
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
GROUPS = {}  # G -> this rank's expert group, and its replicas
for G in (2, 4):
    rows = [dist.new_group(range(first, first + G)) for first in range(0, 4, G)]
    columns = [dist.new_group(range(first, 4, G)) for first in range(G)]
    GROUPS[G] = rows[rank // G], columns[rank % G]


def moe_model(dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    for block in model.blocks:
        block.mlp = MoE(64)
        block.mlp.kept[0].to(dtype)
    return model.to(dtype)


def shared_out(G, dtype=torch.float64):  # of each layer's experts, those of this rank
    model, each = moe_model(dtype), EXPERTS // G
    for block in model.blocks:
        first = each * (rank % G)
        block.mlp.kept = [Experts(block.mlp.kept[0].each[first : first + each])]
        block.mlp.group = GROUPS[G][0]
    return model


def experts_of(model):
    return [block.mlp.kept[0] for block in model.blocks]


def loss_of(model, number, who):
    x, y = batch(words, who, number, 2, 64)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def grads_of(modules):
    return [param.grad for module in modules for param in module.parameters()]


def mine_of(one, G):  # those of one process's experts that this rank has
    each = EXPERTS // G
    first = each * (rank % G)
    return [experts.each[first : first + each] for experts in experts_of(one)]


one = moe_model()
for who in range(4):
    (loss_of(one, 0, who) / 4).backward()
off = {}
for G in GROUPS:
    model = shared_out(G)
    loss_of(model, 0, rank).backward()
    ours = grads_of([model]), grads_of(experts_of(model))
    average(*ours, everyone, GROUPS[G][1])
    theirs = grads_of([one]), grads_of(mine_of(one, G))
    for kind, a, b in zip(("dense", "experts"), ours, theirs):
        size = max(grad.abs().max() for grad in b)
        off[G, kind] = max((x - y).abs().max() / size for x, y in zip(a, b)).item()

# %% tags=["nbval-check-output"]
for G, kind in lab.pull("off", rank=0):
    same = all(off[G, kind] < 1e-9 for off in lab.pull("off"))
    print(f"G = {G}, {kind:7}: gradients of one process, to 9 digits: {same}")

# %% [markdown]
# Both kinds are divided by the same number, that of the losses. They differ in what is still to be *added*. A token's
# gradient has come to its expert on the way back, from whichever rank's loss. What an expert lacks is with its
# replicas, which have had other tokens.
#
# ## Together with ZeRO
#
# Can the engine do that? It knows one group for a whole model, and leaves no parameter out. So take several engines.
# The experts are in a list, where `named_parameters()` doesn't find them: without them, the model is an ordinary
# model for a `Zero3` over all ranks. And each layer's experts are a model of their own for another `Zero3`, over
# their replicas.
#
# An engine *averages* over its group. With G = 2 each expert is on two ranks. What `Zero3` leaves in its `.grad` is
# how many times the gradient of one process?

# %%
lab.predict("22.2", 2)  # times

# %%
# %%ranks
inf = float("inf")


def with_zero(G, stage=3, dtype=torch.float64):
    model = shared_out(G, dtype)
    inner = [
        zerolab.shard(experts, stage=stage, units=[MLP], group=GROUPS[G][1])
        for experts in experts_of(model)
    ]
    return zerolab.shard(model, stage=stage, units=[Block]), inner


def norm_of(grads):
    return sum(grad.double().square().sum() for grad in grads).sqrt()


times = {}
for G in GROUPS:
    outer, inner = with_zero(G)
    loss_of(outer.model, 0, rank).backward()
    norms = [zero.clip_grad_norm_(inf).item() for zero in inner]  # it clips nothing
    right = [norm_of(grads_of([experts])).item() for experts in mine_of(one, G)]
    times[G] = max(a / b for a, b in zip(norms, right))

# %%
lab.measured("22.2", round(lab.pull("times", rank=0)[2], 6))
lab.reveal("22.2")

# %% tags=["nbval-check-output"]
if lab.predicted("22.2"):
    for G, times in lab.pull("times", rank=0).items():
        print(f"G = {G}: {times:.3f} x one process's gradient")

# %% [markdown]
# Divided by the 4/G replicas instead of by 4, the gradient is G times too large. Under Adam the loss won't tell you,
# because Adam divides a gradient by its own size. What does suffer: SGD; clipping, whose norm has the experts' part G
# times too large; and a run that goes on with another G, with Adam's averages of another size. DeepSpeed's ZeRO divided
# by the replicas: the gradient is "ep_size times larger than the true gradient"
# ([#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545), mended by
# [#6546](https://github.com/deepspeedai/DeepSpeed/pull/6546)).
#
# The remedy is a line after backward. (The norm for clipping needs one, too: an engine's `clip_grad_norm_` knows its own
# group, and the other ranks of an expert group have other experts.) Three steps of SGD, beside one process:


# %%
# %%ranks
def params_of(*zeros):
    return [param for zero in zeros for param in zero.model.parameters()]


def right_factor(inner, G):  # from a mean over the 4 / G replicas to one over all four
    for param in params_of(*inner):
        if param.grad is not None:
            param.grad /= G


def train_one(steps):
    model = moe_model()
    params = [p for part in (model, *experts_of(model)) for p in part.parameters()]
    sgd = torch.optim.SGD(params, 0.1)
    for number in range(steps):
        for who in range(4):
            (loss_of(model, number, who) / 4).backward()
        sgd.step()
        sgd.zero_grad()
    return model


alone = train_one(3)
agree = {}
for G in (2, 4):
    outer, inner = with_zero(G)
    sgd = torch.optim.SGD(params_of(outer, *inner), 0.1)
    for number in range(3):
        loss_of(outer.model, number, rank).backward()
        right_factor(inner, G)
        sgd.step()
        sgd.zero_grad()
    pairs = [(outer, alone)]
    pairs += [(zero, Experts(mine)) for zero, mine in zip(inner, mine_of(alone, G))]
    worst = max(
        (full - plain.state_dict()[name]).abs().max()
        for zero, plain in pairs
        for name, full in zero.full_state_dict().items()
    )
    agree[G] = worst.item() < 1e-10

# %% tags=["nbval-check-output"]
for G, same in lab.pull("agree", rank=0).items():
    print(f"G = {G}, Zero3 for both: weights as of one process: {same}")

# %% [markdown]
# Several engines, and the weights of one process. What it costs is convenience: there is a checkpoint of the model, and
# one of experts for each place and layer. And a mistake is close at hand: register the experts as modules, and wrap the
# model once. The first expert of each rank has the same name and shape, so to an engine, or to torch's DDP, they are one
# parameter. It broadcasts the first rank's, and the others are gone, without an error.
#
# ## The fullest expert
#
# Which expert gets how many tokens? Nothing makes the router spread them evenly, and an expert that is chosen more
# learns more, so it is chosen more. Forty steps with real text and AdamW, twice. The second time each expert has a
# *bias*, which is added to its score for the choice alone. After every step it rises a little if the expert had fewer
# of all ranks' tokens than the mean, and falls if it had more (auxiliary-loss-free balancing, arXiv 2408.15664;
# DeepSeek-V3 uses it). (The text below the picture explains the dashed line.)


# %%
# %%ranks
def counted(model):
    each = [torch.bincount(block.mlp.chosen, minlength=EXPERTS) for block in model.blocks]
    counts = torch.stack(each)
    dist.all_reduce(counts)
    return counts  # (layers, experts)


def train(steps, speed):
    outer, inner = with_zero(4, stage=1, dtype=torch.float32)
    adam = torch.optim.AdamW(params_of(outer, *inner), lr=1e-3)
    for number in range(steps):
        loss = loss_of(outer.model, number, rank)
        loss.backward()
        right_factor(inner, 4)
        adam.step()
        adam.zero_grad()
        counts = counted(outer.model)
        for block, mine in zip(outer.model.blocks, counts):
            block.mlp.bias += speed * torch.sign(mine.double().mean() - mine)
    return counts[0].tolist(), outer.model.blocks[0].mlp.chosen  # of the first layer


skylines, choices = {}, {}
for name, speed in (("as the router likes", 0.0), ("with a bias", 0.01)):
    skylines[name], choices[name] = train(40, speed)

# %%
skylines = lab.pull("skylines", rank=0)
capacity = 1.25 * 4 * 128 / 8
title = "Tokens by expert in the first layer, after 40 steps"
plots.show(plots.tokens_by_expert(skylines, title, capacity, learner=lab.passed("22.1")))

# %% [markdown]
# In each layer, forward and backward, all ranks wait for the one with the most tokens. Its activations are those of
# the tokens that it got: a run can go out of memory in its thousandth step because a router has changed its mind.
#
# The older remedy is a **[capacity](../docs/glossary.md#capacity)**: an expert takes at most a fixed number of tokens
# from each rank, its even share times a *capacity factor* such as 1.25. Then all splits are even and known in advance.
# A token beyond the capacity is **dropped**: the residual connection carries it past the layer, unchanged. Room that is
# left is sent as padding. (The dashed line is the room that an expert has for all four ranks together. A rank's tokens
# may find their part of it full where another rank's is not, so more are dropped than lie above the line.)
#
# What a factor of 1.25 drops of the two choices above:


# %%
# %%ranks
def within(chosen, capacity):  # for each token, whether its expert still has room
    one_hot = F.one_hot(chosen, EXPERTS)
    place = (one_hot.cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
    return place < capacity


dropped = {}
for name, chosen in choices.items():
    room = int(1.25 * len(chosen) / EXPERTS)
    kept = within(chosen, room)
    rows = torch.tensor([len(chosen), EXPERTS * room, int(kept.sum())])
    dist.all_reduce(rows)
    dropped[name] = rows.tolist()

# %%
for name, (rows, places, kept) in lab.pull("dropped", rank=0).items():
    print(f"{name:20} {rows} tokens, {places} places:", end=" ")
    padding = 1 - kept / places
    print(f"{1 - kept / rows:.0%} dropped, {padding:.0%} of what is sent is padding")

# %% [markdown]
# So capacity bounds time and memory, and pays with tokens that are dropped *and* with padding. The bias goes to the
# cause, and drops nothing: such a layer is called *dropless*. (But the host must wait for the router, since
# `all_to_all_single` takes its splits as Python numbers.)
#
# ## A sample that fits nowhere
#
# Now lesson 15's opening case: one sequence of 100,000 tokens, whose activations need more memory than a GPU has.
# ZeRO divides model states, data parallelism samples, and this is one sample. So cut the *sequence*: each of N ranks
# has T/N of the tokens of every sample, in every layer: **[context
# parallelism](../docs/glossary.md#context-parallelism)**.
#
# Where does a rank then need anything from another? Only in attention: a query looks at the keys and values of all
# earlier tokens, and most of them are elsewhere. All-gather them, and a rank holds keys and values of the whole
# sequence, one layer at a time (Llama 3 does that, arXiv 2407.21783, section 3.3.2). Or let them come *one block after
# another*, around a ring, and hold two: **[ring attention](../docs/glossary.md#ring-attention)** (arXiv 2310.01889). In
# N - 1 turns each block has been everywhere.
#
# But a softmax divides by a sum over *all* keys, and here is one block of them. So keep two things for each query:
# the weighted mean of the values so far, and **lse**, the log of the sum of exp(score) so far. The mean has been
# divided by exp(lse), so both can be brought up to date when a block comes: an **[online
# softmax](../docs/glossary.md#online-softmax)** (arXiv 1805.02867; FlashAttention does the same within a GPU). One
# query, keys with the scores 1, 2 and 3, and values 10, 20 and 40, and the third comes in another block:

# %%
# %%ranks
scores, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 40.0])
whole = (scores.softmax(0) * values).sum()
mean, lse = (scores[:2].softmax(0) * values[:2]).sum(), scores[:2].logsumexp(0)
both = torch.logaddexp(lse, scores[2])  # the log of the sum of all three
merged = mean * (lse - both).exp() + values[2] * (scores[2] - both).exp()
example = [round(number.item(), 4) for number in (mean, lse, merged, whole)]

# %% tags=["nbval-check-output"]
mean, lse, merged, whole = lab.pull("example", rank=0)
print(f"two keys: mean {mean}, lse {lse}; with the third: {merged}; all at once: {whole}")

# %% [markdown]
# ## Predict
#
# In causal attention a token sees only earlier ones. Cut a sequence into 8 chunks, and give four ranks two each, in
# order: rank 0 has chunks 0 and 1, rank 3 has 6 and 7. Count in pairs: a chunk of queries with a chunk of keys. A
# pair in which there is nothing to see is not computed; one on the diagonal, where half is hidden, is computed whole.
# How much does rank 3 compute, as a multiple of the mean of the four ranks?

# %%
lab.predict("22.3", 15 / 9)  # times the mean

# %% [markdown]
# ## Write: one block more
#
# Lesson 01's `exchange` sends the blocks around the ring. What a rank does with each that comes is yours to write.

# %%
# %%exercise 22.3

# %%
lab.check("22.3")

# %% [markdown]
# The ring is a loop of turns, each an `exchange`, and of `merge`. Backward goes around once more, and with each block
# goes the gradient that it has got so far. It computes the weights again, from scores and lse, so nothing of size T × T
# is ever kept. (That is `lab.ring_gradients`; `seen` lists the pairs of chunks that have something to see. `places` are
# the tokens' places in the sequence: they decide who may see whom, and travel with the keys.)

# %%
# %%ranks
merge = lab.mine("22.3")


def turn(block, group):  # to the next rank of `group`, and from the one before
    place, N = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (place + step) % N) for step in (1, -1))
    return lab.exchange(block, to, source)


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, places, group):
        nothing = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
        states = [*zip(torch.zeros_like(q).chunk(2, -2), nothing.chunk(2, -1))]
        block, theirs = torch.stack([k, v]), places
        for step in range(dist.get_world_size(group)):
            if step:
                block, theirs = turn(block, group), turn(theirs, group)
            for i, j in seen(places, theirs):
                visible = places.chunk(2)[i][:, None] >= theirs.chunk(2)[j]
                key, value = (part.chunk(2, -2)[j] for part in block)
                states[i] = merge(q.chunk(2, -2)[i], key, value, visible, *states[i])
        out, lse = (torch.cat(parts, 2) for parts in zip(*states))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = places, group
        return out

    @staticmethod
    def backward(ctx, grad):
        places, group = ctx.ring
        size = dist.get_world_size(group)
        kept = ctx.saved_tensors
        grads = lab.ring_gradients(
            grad, kept, places, size, lambda block: turn(block, group)
        )
        return *grads, None, None


def contiguous(N, r, T):  # the places of rank r of N
    return torch.arange(T).chunk(N)[r]


def zigzag(N, r, T):
    chunks = torch.arange(T).chunk(2 * N)
    return torch.cat([chunks[r], chunks[2 * N - 1 - r]])


rings = {1: GROUPS[4][1], 2: GROUPS[2][0], 4: everyone}
random = torch.Generator().manual_seed(0)
T = 64
whole = [torch.randn(2, 4, T, 16, generator=random, dtype=torch.float64) for _ in range(4)]
q, k, v = (tensor.clone().requires_grad_() for tensor in whole[:3])
want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
want.backward(whole[3])
ring_off, flop, owners = {}, {}, {}
for N in (2, 4):
    for way in (contiguous, zigzag):
        places = way(N, dist.get_rank(rings[N]), T)
        mine = [tensor[:, :, places].clone().requires_grad_() for tensor in whole[:3]]
        with FlopCounterMode(display=False) as counter:
            got = Ring.apply(*mine, places, rings[N])
        got.backward(whole[3][:, :, places])
        found = [got, *(tensor.grad for tensor in mine)]
        wanted = [t[:, :, places] for t in (want, q.grad, k.grad, v.grad)]
        worst = max((a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted))
        ring_off[N, way.__name__] = worst.item()
        flop[N, way.__name__] = counter.get_total_flops()
        owners[N, way.__name__] = [rank] if N < 4 else places.view(2, -1)[:, 0].tolist()

# %% tags=["nbval-check-output"]
for N, way in lab.pull("ring_off", rank=0):
    same = all(off[N, way] < 1e-12 for off in lab.pull("ring_off"))
    print(f"{N} ranks, {way:10}: output and gradients of one process, to 12 digits: {same}")

# %%
flops = lab.pull("flop")
amounts = [of[4, "contiguous"] for of in flops]
lab.measured("22.3", amounts[3] / (sum(amounts) / 4))
lab.reveal("22.3")

# %% [markdown]
# ## Zigzag
#
# Late tokens have more to look at, and in each turn of a ring everyone waits for the slowest. The remedy costs
# nothing: give each rank an early chunk and a late one, rank r the chunks r and 2N - 1 - r. That is the **zigzag**
# placement. (Llama 3 cuts its sequences like this.)

# %%
if lab.predicted("22.3"):
    found, ways = lab.pull("owners"), {}
    for way in ("contiguous", "zigzag"):
        ranks_of = {first: r for r, of in enumerate(found) for first in of[4, way]}
        ways[way] = [ranks_of[first] for first in sorted(ranks_of)]
    flop = {way: [of[4, way] for of in lab.pull("flop")] for way in ways}
    plots.show(plots.attention_map(ways, flop))

# %% [markdown]
# Rank 3 computes 15 of the 36 pairs on the left, and 9 on the right, like everyone. And so in every turn: after the
# first, every rank of the zigzag ring computes two pairs; on the left some rank computes four, while others wait.
#
# ## The whole model, on a piece of a sequence
#
# Now a GPT with `Ring` for its attention, and one sequence of 512 tokens. (`RingGPT` also gives a token the position
# embedding of its *place in the sequence*.) And who averages what? Every rank uses all parameters on its own tokens, and
# its loss is a mean over them. That is data parallelism, to which a token is as good as a sample: `Zero3` over all four
# ranks is right as it is. (If all have equally many tokens; lesson 14 has the other case.)


# %%
# %%ranks
def long_model(N, dtype=torch.float64):
    torch.manual_seed(0)
    places = zigzag(N, dist.get_rank(rings[N]), 512)
    model = RingGPT(lambda q, k, v: Ring.apply(q, k, v, places, rings[N]), places)
    return model.to(dtype)


x, y = batch(words, 0, 0, 1, 512)  # one sequence, the same on all ranks
torch.manual_seed(0)
plain = GPT(layers=2, width=64, context=512).double()
sgd = torch.optim.SGD(plain.parameters(), 0.1)
F.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
sgd.step()

zero = zerolab.Zero3(long_model(4), units=[Block])
places = zero.model.places
sgd = torch.optim.SGD(zero.model.parameters(), 0.1)
zero.model(x[:, places], y[:, places]).backward()
sgd.step()
full, want = zero.full_state_dict(), plain.state_dict()
long_same = max((full[name] - want[name]).abs().max().item() for name in want) < 1e-12

kept_by = {}
for N in (1, 2, 4):
    model = long_model(N, torch.float32)
    gc.collect()
    with saved(model) as kept, calls() as book:
        model(x[:, model.places], y[:, model.places])
    kept_by[N] = kept.peak, book.sent

# %% tags=["nbval-check-output"]
same = all(lab.pull("long_same"))
print("one sequence on four ranks, with Zero3: one process's weights after a step:", same)

# %%
for N, (kept, sent) in lab.pull("kept_by", rank=0).items():
    print(f"N = {N}: {kept / 512:,.0f} bytes for each token of the sequence;", end=" ")
    print(f"{sent:,.0f} bytes sent in forward")

# %% [markdown]
# That is what a thousand GPUs with ZeRO-3 alone can't do: two ranks halve the activations of *one* sequence, and four
# quarter them. What a rank sends is keys and values (and their places), 2TC(N-1)/N numbers in a layer: almost as many
# with 64 ranks as with 8. For a model of 32 layers of width 4,096 in 16 bits, count 34 bytes for each layer, token and
# unit of width (Korthikanti et al., arXiv 2205.05198, equation 1 without the attention term):

# %% tags=["nbval-check-output"]
kept = 34 * 32 * 4096 * 100_000
for N in (1, 8, 64):
    print(f"100,000 tokens, N = {N:2}: {kept / N / 1e9:6.1f} GB of activations on a rank")

# %% [markdown]
# ## In production
#
# There is a second way to cut a sequence: all-to-alls before and after attention turn "all heads of my tokens" into "all
# tokens of my heads", and back (DeepSpeed-Ulysses, arXiv 2309.14509). Sent are q, k, v and the output, TC/N numbers
# each, (N-1)/N of them: less than in a ring with more than two ranks. The limit is the number of heads.
#
# FSDP2 can have experts as a part of the model: wrap them first, over a mesh of their replicas, and it leaves them alone
# when the rest is wrapped. It averages over the replicas, too, until it is told the divisor:
# `set_gradient_divide_factor`.
#
# Some of what matters can't be shown on CPUs. DeepSeek-V3 lets a token go to at most four nodes, sends it in fp8, and
# gives 20 of a GPU's 132 multiprocessors to the kernels that send (arXiv 2412.19437, sections 3.2.2, 3.3.3 and 3.5.1).
# torch's symmetric memory has an all-to-all whose splits stay on the GPU (`torch.ops.symm_mem.all_to_all_vdev_2d`). A
# ring can hide each turn behind the computing of a block, if blocks are long (arXiv 2310.01889, section 3). torch's own
# ring, `torch.distributed.tensor.experimental.context_parallel`, knows three kernels for CUDA and none for the CPU; its
# load balancer is the zigzag, under the name of head and tail.
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
# 1. Four times the tokens' activations, (N-1)/N of them: there and back, forward and backward. ZeRO-3 sends 3(N-1)/N
#    of all 64 experts' parameters. It is decided by tokens per rank against 6EC, which few runs reach.
# 2. Over its 2 replicas, and divided by 16: its tokens came from all ranks, each of whose losses counts 1/16. Divided
#    by 2, it is 8 times too large. Adam's steps don't depend on the size of gradients, so the loss looks right; the
#    norm that clips doesn't.
# 3. DDP broadcasts rank 0's parameters when it is built, and from then on averages gradients of what it takes for one
#    expert. The other experts are gone before the first step.
# 4. Capacity: lost tokens and padding, known sizes, even splits. Dropless: every token is computed; the fullest rank
#    decides the time and needs the memory; the counts must reach the host.
# 5. Two means over disjoint keys combine with weights exp(lse - new lse). So the mean so far and its lse are enough.
# 6. With 8 ranks and 16 chunks, the last rank computes 31 of the 136 pairs of chunks, nearly twice the mean of 17, and
#    all wait for it. With zigzag each has an early chunk and a late one, and all compute the same. ZeRO needs to know
#    nothing: ranks have other tokens, and gradients are averaged over all of them.

# %%
lab.stop()
lab.progress()
