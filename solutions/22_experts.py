# %% [markdown]
# # 22 · Experts
#
# **The question.** ZeRO brings parameters to the samples. A layer of *experts* turns that around: it has too many
# parameters to gather for every rank, and a token needs only a few of them. So the tokens travel. That changes what a
# step sends, which rank is the slowest, and whose gradients are averaged with whose. With the wrong divisor the
# experts' gradients are several times too large, and under Adam a loss curve may well not show it. DeepSpeed's ZeRO had
# that mistake until October 2024. The lesson builds on lesson 07's `Zero3`, and on groups that cross, as in lesson 15.

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
from zerolab.lab import MLP, Block, Experts, batch, calls, text
from zerolab.measure import ledger

words = text()
EXPERTS = 8
everyone = dist.group.WORLD

# %% [markdown]
# ## Experts
#
# Take the MLP out of a transformer's block and put eight in its place, the **[experts](../docs/glossary.md#expert)**. A
# **[router](../docs/glossary.md#router)**, a linear layer with one output for each expert, decides which one computes a
# token: the one with the largest score. Here the score is a sigmoid (in the Switch Transformer, arXiv 2101.03961, a
# softmax). The result is multiplied by the score, which gives the router a gradient. There are eight times the MLP's
# parameters, and a token's computing stays as it was, but for the small router.
#
# With ZeRO-3 on four ranks, each rank has a quarter of every expert, and gathers *all* eight: some token may choose any
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
# What does that send? `Experts` is a list of experts, and calls each with its rows, even if it has none: an engine
# around them needs the same calls on all ranks. Beside it, `Zero3` gathers all eight for the same tokens.

# %%
# %%ranks
dispatch, combine = (lab.mine("22.1", name) for name in ("dispatch", "combine"))
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
# at 6EC tokens a rank: here 6,144 (6,174 with the biases), and with C = 4,096 and 64 experts 1.6 million. So a layer
# like that sends tokens. But ZeRO's messages can be sent ahead, and these can't: the router decides where they go.
#
# ## Who averages what
#
# Now a model: a GPT of two blocks, with eight experts in each. Everything else is *dense*: each rank has it, replicated
# or sharded over all four, as ever. The experts are shared out over G ranks, an *expert group*. With G = 4 an expert is
# on one rank. With G = 2 each pair has all eight, and two ranks have the same ones, each expert's
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
# losses. In a dense parameter, backward leaves the gradient of this rank's own loss: add up over the four ranks, and
# divide by four. And an expert? Whose losses are in its gradient already, whose are missing, and what does one process
# divide by?
#
# ## Write: who averages what

# %%
# %%exercise 22.2

# %%
lab.check("22.2")

# %% [markdown]
# Now the layer, which is short with `dispatch` and `combine`. (That it keeps its experts in a list looks odd; ZeRO will
# need it.) `ExpertGPT` puts one into each of two blocks, sets its `group`, and keeps only the experts of this rank. One
# process is the case G = 1: a rank alone in its expert group.

# %%
# %%ranks
class MoE(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.kept = [Experts(MLP(width) for _ in range(EXPERTS))]
        self.bias = torch.zeros(EXPERTS)  # changes nothing yet

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.router(flat).sigmoid()
        self.chosen = (scores + self.bias).argmax(dim=-1)
        rows, local, way = dispatch(flat, self.chosen, EXPERTS, self.group)
        made = combine(self.kept[0](rows, local), way)
        return (made * scores.gather(1, self.chosen[:, None])).view_as(x)


# this rank's expert group, and its replicas
GROUPS = {G: lab.expert_groups(G) for G in (1, 2, 4)}


def loss_of(model, who, number=0):
    x, y = batch(words, who, number, 2, 64)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def one_process():
    model = lab.ExpertGPT(MoE, GROUPS[1][0])
    for who in range(4):
        (loss_of(model, who) / 4).backward()
    return model


# %% [markdown]
# Your `average` against one process, in float64, for G = 2 and 4:

# %% tags=["nbval-check-output"]
# %%ranks
average = lab.mine("22.2")
one = one_process()
for G in (2, 4):
    group, replicas = GROUPS[G]
    model = lab.ExpertGPT(MoE, group)
    loss_of(model, rank).backward()
    ours, theirs = model.grads(), one.grads(group)
    average(*ours, everyone, replicas)
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
# An engine knows one group for a whole model, and leaves no parameter out. So take several. That is why the experts are
# in a list: `named_parameters()` doesn't find them there. The rest is an ordinary model for a `Zero3` over all ranks,
# and each layer's experts are a model for another `Zero3`, over their replicas.
#
# (If they were registered as modules, under one engine or torch's DDP, the first experts of all ranks would have the
# same name and shape, and so count as one parameter: the first rank's is broadcast, and the others are lost, silently.)
#
# An engine *averages* over its group. With G = 2 each expert is on two ranks. How many times the gradient of one
# process does `Zero3` leave in its `.grad`?

# %%
lab.predict("22.2", 2)  # times


# %%
# %%ranks
def with_zero(G, stage=3, dtype=torch.float64):  # engines: the model's, and each layer's
    group, replicas = GROUPS[G]
    model = lab.ExpertGPT(MoE, group, dtype)
    engines = [zerolab.shard(model, stage, units=[Block])]
    for experts in model.experts:
        engines.append(zerolab.shard(experts, stage, units=[MLP], group=replicas))
    return engines


times = {}
for G in (2, 4):
    outer, first, second = with_zero(G)
    loss_of(outer.model, rank).backward()
    norm = first.clip_grad_norm_(float("inf"))  # of layer 1's experts; it clips nothing
    right = [param.grad for param in lab.part(one.experts[0], GROUPS[G][0]).parameters()]
    times[G] = norm / nn.utils.get_total_norm(right)

# %%
times = lab.pull("times", rank=0)
lab.measured("22.2", round(times[2].item(), 6))
lab.reveal("22.2")

# %% tags=["nbval-check-output"]
if lab.predicted("22.2"):
    for G, factor in times.items():
        print(f"G = {G}: {factor:.3f} x one process's gradient")

# %% [markdown]
# Divided by the 4/G replicas instead of by 4, the gradient is G times too large. Under Adam the loss may not tell you,
# because Adam divides a gradient by its own size. What does suffer: SGD; clipping, whose norm has the experts' part G
# times too large; and a run that continues with another G, whose averages in Adam have the wrong size. DeepSpeed's ZeRO
# made it "ep_size times larger than the true gradient" ([#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545),
# mended by [#6546](https://github.com/deepspeedai/DeepSpeed/pull/6546)). The remedy is one line after backward. With
# it, a step of SGD beside one process:


# %% tags=["nbval-check-output"]
# %%ranks
def right_factor(experts, G):  # from a mean over the 4 / G replicas to one over all four
    for param in (param for each in experts for param in each.parameters()):
        if param.grad is not None:
            param.grad /= G


for G in (2, 4):
    outer, *inner = with_zero(G)
    loss_of(outer.model, rank).backward()
    right_factor([zero.model for zero in inner], G)
    same = lab.same_step([outer, *inner], one_process(), GROUPS[G][0])
    print(f"G = {G}, Zero3 for both: weights as of one process: {same}")

# %% [markdown]
# ## The fullest expert
#
# Nothing makes the router spread tokens evenly, and an expert that is chosen more learns more, so it is chosen more
# (arXiv 1701.06538, section 4). Forty steps with real text and AdamW, twice. The second time each expert has a *bias*,
# which is added to its score for the choice alone. After every step it rises a little if the expert had fewer of all
# ranks' tokens than the mean, and falls if it had more (arXiv 2408.15664; DeepSeek-V3 uses it). The picture has a
# dashed line, a *capacity*, which is explained below it.


# %%
# %%ranks
def train(speed):
    model, *experts = [zero.model for zero in with_zero(4, stage=1, dtype=torch.float32)]
    layers = [block.mlp for block in model.blocks]
    params = [param for module in (model, *experts) for param in module.parameters()]
    adam = torch.optim.AdamW(params, lr=1e-3)
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
# In each layer all ranks wait for the one with the most tokens, which also has the most activations: training can run
# out of memory in its thousandth step.
#
# The older remedy is a **[capacity](../docs/glossary.md#capacity)**: an expert takes at most a fixed number of tokens
# from each rank, its even share times a *capacity factor* such as 1.25 (the dashed line, for four ranks). All splits
# are then even and known in advance. A token beyond it is **dropped**: the residual connection carries it past the
# layer. Unused room is sent as padding.


# %%
# %%ranks
for name, chosen in choices.items():
    room = int(1.25 * 128 / EXPERTS)  # of an expert, for a rank's 128 tokens
    kept = chosen.bincount(minlength=EXPERTS).clamp(max=room).sum()
    dist.all_reduce(kept)
    dropped, padding = 1 - kept / 512, 1 - kept / (4 * EXPERTS * room)
    print(f"{name:20} {dropped:.0%} dropped, {padding:.0%} of what is sent is padding")

# %% [markdown]
# So capacity bounds time and memory, and pays with dropped tokens *and* with padding. The bias treats the cause: here
# 13 % were dropped instead of 65 %. Without a capacity nothing is dropped: such a layer is *dropless*. (But the host
# must wait for the router, since `all_to_all_single` takes its splits as Python numbers.)
#
# ## In production
#
# FSDP2 can have experts as a part of the model: wrap them first, over a mesh of their replicas, then the rest. In torch
# 2.13 it, too, averages over the replicas, unless you tell it the divisor (`set_gradient_divide_factor`).
#
# What can't be shown on CPUs: DeepSeek-V3 sends a token to at most four nodes, in fp8, and gives 20 of a GPU's 132
# multiprocessors to the kernels that send (arXiv 2412.19437, sections 3.2.2, 3.3.3 and 3.5.1).
#
# ## Questions
#
# 1. A layer has 64 experts, and each token uses one. What do expert parallelism and ZeRO-3 send for it in a step, and
#    what decides which is less?
# 2. The layer of width 128 had eight experts on four ranks. Take 16 on eight. Each rank still has 512 tokens. By what
#    factors do the tokens' bytes and ZeRO-3's bytes change, and at how many tokens are the two even?
# 3. Sixteen ranks, experts shared out over eight. Over which ranks is an expert's gradient all-reduced, and by what
#    is it divided? What goes wrong with the obvious divisor, and why may nobody notice?
# 4. You wrap a model with registered experts, another set on each rank, in one DDP. What happens, and when?
# 5. Capacity or dropless: what does each cost, in tokens, bytes, memory and waiting?
# 6. The fullest expert gets five times the mean, equally from all ranks. Which capacity factor drops nothing, and how
#    much of what is sent is then padding?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Four times the tokens' activations, (N-1)/N of them. ZeRO-3 sends 3(N-1)/N of all 64 experts' parameters. It is
#    decided by tokens per rank against 6EC: 1.6 million in the lesson's example of 64 experts.
# 2. The tokens' by 7/6, since 7/8 of them travel instead of 3/4. ZeRO-3's by 7/3: there are also twice as many
#    parameters. They are even at 6EC = 6 · 16 · 128 = 12,288 tokens a rank, twice as many as before.
# 3. Over its 2 replicas, and divided by 16: between them they had tokens of all ranks, and each rank's loss counts
#    1/16. Divided by 2, it is 8 times too large. Adam's steps don't depend on the size of gradients, so the loss looks
#    right; the norm that clips doesn't.
# 4. When it is built, DDP broadcasts rank 0's parameters. The other experts are gone before the first step.
# 5. Capacity: lost tokens and padding, but known sizes, and a bound for memory. Dropless: every token is computed, the
#    fullest rank decides the time and needs the memory, and the counts must reach the host.
# 6. Five. Each expert then has room for five times its even share, and a fifth of all room is used: 80 % is padding.

# %%
lab.stop()
lab.progress()
