# %% [markdown]
# # 15 · Model parallelism in one hour
#
# **The question.** ZeRO divides parameters, gradients and optimizer state among the ranks. Two things it does not
# divide: a sample and its activations. If one sequence of 100,000 tokens needs more memory than a GPU has, a thousand
# GPUs with ZeRO-3 fail exactly as one does. And if 1,024 GPUs are to share a batch of 512 sequences, half of them have
# nothing to do. Then the *computing* has to be divided: **[model parallelism](../docs/glossary.md#model-parallelism)**.
# It comes in two kinds, it can be combined with ZeRO, and the wrong kind in the wrong place leaves three quarters of
# your GPUs idle. Which one, when, and what does it send?

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from torch import nn
from zerolab import lab
from zerolab.lab import GPT, Block, Paced, batch, calls, saved, text
from zerolab.lab.plots import Area
from zerolab.measure import ledger, model_states

words = text()


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(layers=4, width=128).to(dtype)  # 4 heads


def loss_of(model, tokens, targets):  # in the dtype of the model, where the model itself would go through float32
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Three ways to cut
#
# Four layers, eight samples, four ranks. There are three things to divide:
#
# - the *samples*: every rank runs all layers on its own samples. That is **[data
#   parallelism](../docs/glossary.md#data-parallelism)**, with or without ZeRO;
# - *each layer*: every rank computes a part of every layer, for all samples. That is **[tensor
#   parallelism](../docs/glossary.md#tensor-parallelism)**;
# - *the sequence of layers*: every rank computes some layers, for all samples, and hands the result on. That is the
#   division by layers, which with one more idea becomes **[pipeline
#   parallelism](../docs/glossary.md#pipeline-parallelism)**.
#
# This cell runs the four MLPs of a GPT in all three ways, and notes what each rank computed and what had to arrive
# first. (A residual connection, `x + ...`, surrounds each, as in the GPT.)

# %%
# %%ranks
torch.manual_seed(0)
mlps = [block.mlp for block in GPT(layers=4, width=64).blocks]
x = torch.randn(8, 64)  # the same on all ranks
mine, everything = (rank / 4, (rank + 1) / 4), (0.0, 1.0)
areas = {"samples": [], "each layer": [], "layers": []}

with torch.no_grad():
    whole = x
    for mlp in mlps:
        whole = whole + mlp(whole)

    y = x.chunk(4)[rank]
    for number, mlp in enumerate(mlps):
        y = y + mlp(y)
        areas["samples"].append(Area(rank, number, mine, everything))
    same = [torch.allclose(y, whole.chunk(4)[rank], atol=1e-6)]

    y, waited = x, 0
    for number, mlp in enumerate(mlps):
        hidden = F.gelu(F.linear(y, mlp.up.weight.chunk(4)[rank], mlp.up.bias.chunk(4)[rank]))
        part = F.linear(hidden, mlp.down.weight.chunk(4, dim=1)[rank])
        areas["each layer"].append(Area(rank, number, everything, mine, waited))
        dist.all_reduce(part)
        y, waited = y + part + mlp.down.bias, part.nbytes
    same.append(torch.allclose(y, whole, atol=1e-6))

    y = x.clone()
    if rank > 0:
        dist.recv(y, rank - 1)
    areas["layers"].append(Area(rank, rank, everything, everything, y.nbytes * (rank > 0)))
    y = y + mlps[rank](y)
    if rank < 3:
        dist.send(y, rank + 1)
    same.append(rank < 3 or torch.allclose(y, whole, atol=1e-6))

# %%
ways = {
    name: [area for areas in lab.pull("areas") for area in areas[name]] for name in ("samples", "each layer", "layers")
}
plots.show(plots.who_computes_what(ways))

# %% tags=["nbval-check-output"]
print("the same results in all three ways:", all(all(same) for same in lab.pull("same")))

# %% [markdown]
# Follow the arrows, which are the **dependencies**. In the first row there are none: until backward has gradients to
# average, no rank needs anything from another. In the second, no rank can begin a layer before *all* ranks have
# finished the one before. In the third, a rank needs one message, from one other rank, but it needs it before it can do
# anything at all.
#
# ## Predict
#
# Take the second row first. In a GPT, tensor parallelism divides the two halves of each block, attention and MLP. Each
# half costs one all-reduce in forward, as above, and one in backward. What is all-reduced has the shape of the block's
# input. Our model has 4 blocks of width 128, the batch has 8 sequences of 64 tokens, everything is float32, and two
# ranks divide the model. How many bytes does a rank send in a step?

# %%
lab.predict("15.1", 4 * 2 * 2 * 8 * 64 * 128 * 4)  # bytes

# %% [markdown]
# ## Rows first, then columns
#
# An MLP has two layers, `up` and `down`. Between them lie the **hidden units**. Give each rank some of the hidden
# units. For its units it needs some *rows* of `up.weight`, and then it has their values in full, and no other rank
# needs them. In `down` it multiplies them by the *columns* of `down.weight` that belong to them. The result has the
# full width, but is only a part of a sum: each output adds up over *all* hidden units. Here is the smallest example: 2
# inputs, 4 hidden units on 4 ranks, 3 outputs.

# %%
# %%ranks
up = torch.tensor([[1.0, 0], [0, 1], [1, 1], [3, 1]])  # (hidden, inputs)
down = torch.tensor([[1.0, 1, 1, 1], [10, 10, 10, 10], [100, 100, 100, 100]])  # (outputs, hidden)
unit = F.relu(up[rank] @ torch.tensor([1.0, 2.0]))  # this rank's hidden unit, in full
part = down[:, rank] * unit
before = part.tolist()
dist.all_reduce(part)
after = part.tolist()

# %%
plots.show(plots.before_after("parts of a sum: all-reduce", lab.pull("before"), lab.pull("after")))

# %% [markdown]
# One all-reduce for two layers. (In the literature, `up` is *column-parallel* and `down` *row-parallel*: there the
# matrices are written the other way round. torch stores a weight as outputs × inputs.)
#
# Could `up` be cut by columns instead? Then every rank would have a part of *every* hidden unit, and the nonlinearity
# would stand in the way:

# %% tags=["nbval-check-output"]
import torch

a, b = torch.tensor(2.0), torch.tensor(-3.0)
gelu = torch.nn.functional.gelu
print(f"gelu(2) + gelu(-3) = {gelu(a) + gelu(b):.3f}, but gelu(2 - 3) = {gelu(a + b):.3f}")

# %% [markdown]
# It needs the complete sum, so there would be a second all-reduce before it. Nonlinear functions want complete units.
#
# And backward? Let every rank have the same gradient of the output y. Two places need care:
#
# - *Where the parts leave* the split region, y = part₀ + part₁ + ... The gradient of each part is the gradient of y,
#   and every rank has that already. Forward adds up, backward does nothing.
# - *Where x enters*, each rank's hidden units use it. So each rank gets only the part of x's gradient that comes from
#   its own units. Forward does nothing, backward adds up.
#
# The two mirror each other; the Megatron paper (arXiv 1909.08053) calls them g and f. Here they are `Leave` and
# `Enter`. autograd knows nothing of `torch.distributed`, so each is an `autograd.Function`, in which you write both
# directions yourself.
#
# ## Write the split
#
# Mind the bias of `down`: every rank has it, and it counts once.

# %%
# %%exercise 15.1

# %%
lab.check("15.1")

# %% [markdown]
# ## Attention, by heads
#
# Attention comes in complete units too: its heads. Each head has its own queries q, keys k and values v, and no head
# looks at another. So give each rank some of the heads. The first layer of our attention computes q, k and v at once.
# Its weight has 3·C rows: first q of all heads, then k of all heads, then v of all heads. Which rows does a rank need?

# %%
# %%exercise 15.2

# %%
lab.check("15.2")

# %% [markdown]
# The rest is as in the MLP: `Enter`, this rank's heads, this rank's columns of the output layer, `Leave`, the bias.
# `split` replaces both halves of every block. Everything else stays on both ranks: the embeddings, the layer norms, the
# head of the model.
#
# Four ranks give us two pairs, a **[mesh](../docs/glossary.md#mesh)** of 2 × 2. Ranks 0 and 1 divide one copy of the
# model, ranks 2 and 3 another. Each pair is a process group, the rank's *tensor group*. (Its *data group* comes later.)

# %%
# %%ranks
MyMLP, Enter, Leave = (lab.mine("15.1", name) for name in ("MyMLP", "Enter", "Leave"))
heads_of = lab.mine("15.2")


class MyAttention(nn.Module):
    def __init__(self, whole, group, rows_of=heads_of):
        super().__init__()
        place, size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.heads = group, whole.heads // size
        self.weight = nn.Parameter(rows_of(whole.qkv.weight.detach(), whole.heads, place, size))  # (3 C / N, C)
        self.bias = nn.Parameter(rows_of(whole.qkv.bias.detach(), whole.heads, place, size))
        self.out = nn.Parameter(whole.out.weight.detach().chunk(size, dim=1)[place].clone())  # (C, C / N)
        self.out_bias = nn.Parameter(whole.out.bias.detach().clone())

    def forward(self, x, mask=None):
        B, T, _ = x.shape
        qkv = F.linear(Enter.apply(x, self.group), self.weight, self.bias).view(B, T, 3, self.heads, -1)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        part = F.linear(y.transpose(1, 2).flatten(2), self.out)
        return Leave.apply(part, self.group) + self.out_bias


def split(model, group, rows_of=heads_of):
    for block in model.blocks:
        block.attention = MyAttention(block.attention, group, rows_of)
        block.mlp = MyMLP(block.mlp, group)
    return model


pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
tensor_group, place = pairs[rank // 2], rank % 2  # place: 0 or 1 in the pair

# %% [markdown]
# ## Measure
#
# Are the numbers those of one process? Compare in float64, where rounding is too small to hide a mistake: the loss, and
# the gradients of four parameters: one that is cut, and three that both ranks of a pair have.

# %%
# %%ranks
whole, cut = make_model(torch.float64), split(make_model(torch.float64), tensor_group)
tokens = batch(words, 0, 0, 8, 64)  # the same for everyone
losses = [loss_of(model, *tokens) for model in (whole, cut)]
for loss in losses:
    loss.backward()
theirs, ours = whole.blocks[1], cut.blocks[1]
pairs_of_grads = {
    "mlp.up.weight": (ours.mlp.up.weight.grad, theirs.mlp.up.weight.grad.chunk(2)[place]),
    "mlp.down.bias": (ours.mlp.down.bias.grad, theirs.mlp.down.bias.grad),
    "norm1.weight": (ours.norm1.weight.grad, theirs.norm1.weight.grad),
    "token.weight": (cut.token.weight.grad, whole.token.weight.grad),
}
off = {name: (a - b).abs().max().item() / b.abs().max().item() for name, (a, b) in pairs_of_grads.items()}
off["loss"] = (losses[1] / losses[0] - 1).abs().item()
norms = torch.cat([p.grad.flatten() for name, p in cut.named_parameters() if "norm" in name])
in_pair = [torch.empty_like(norms) for _ in range(2)]
dist.all_gather(in_pair, norms, group=tensor_group)
norms_equal = torch.equal(*in_pair)

mixed = split(make_model(torch.float64), tensor_group, lambda rows, heads, rank, size: rows.chunk(size)[rank].clone())
wrong = loss_of(mixed, *tokens).item() - losses[0].item()

# %% tags=["nbval-check-output"]
for name in lab.pull("off", rank=0):
    print(f"{name:14} equals one process's, to 12 digits:", all(off[name] < 1e-12 for off in lab.pull("off")))
print("the layer norms' gradients are the same in a pair, bit for bit:", all(lab.pull("norms_equal")))
print("with q, k and v cut as they lie, the loss is another:", all(abs(off) > 1e-6 for off in lab.pull("wrong")))

# %% [markdown]
# Close, not bit for bit: a sum in two parts is rounded differently. Look at the layer norm. Its weight is on both
# ranks, nobody averaged its gradient, and still both have the right one, because everything outside `Enter` and `Leave`
# sees the same numbers on both ranks. A gradient that came from inside, before `Enter` had added up, would differ
# between the two, and so would the copies, after one step and without any error. And cutting q, k and v wrongly is no
# error either: the shapes are right, and the model is another.
#
# Now the bytes, in float32:

# %%
# %%ranks
cut = split(make_model(), tensor_group)
with saved(cut) as kept_cut:
    loss = cut(*tokens)
    with calls() as in_backward:
        loss.backward()
with calls() as in_forward:
    cut(*tokens)
# Between two ranks an all-reduce sends each element once: 2 (N-1)/N = 1.
sent_tensor = in_forward.payload + in_backward.payload
number = len(in_forward.calls) + len(in_backward.calls)
whole = make_model()
with saved(whole) as kept_whole:
    whole(*tokens).backward()
held = [sum(param.nbytes for param in model.parameters()) for model in (whole, cut)]
held += [kept.peak for kept in (kept_whole, kept_cut)]

# %%
lab.measured("15.1", lab.pull("sent_tensor", rank=0))
lab.reveal("15.1")

# %% tags=["nbval-check-output"]
if lab.predicted("15.1"):
    whole, cut, kept_whole, kept_cut = lab.pull("held", rank=0)
    print(f"{lab.pull('number', rank=0)} all-reduces, {lab.pull('sent_tensor', rank=0):,} bytes sent by each rank")
    print(f"parameters on a rank: {whole:,} bytes whole, {cut:,} divided by two ranks")
    print(f"activations, which forward keeps for backward: {kept_cut / kept_whole:.2f} x those of one process")

# %% [markdown]
# More than the 4Ψ = 3,468,288 bytes that DDP's all-reduce sends between two ranks, and of another kind. DDP's bytes
# depend on the parameters, and hide behind backward (lesson 09). These depend on the *tokens*, and nothing can hide
# them: the next layer waits. So tensor parallelism lives where the wires are fastest, inside a node. What it buys: a
# rank holds about half of the parameters and computes half of each block. Of the activations the divided part is
# halved: q, k, v and the hidden units. The blocks' inputs and the layer norms' stay on both ranks.
#
# ## Two by two
#
# Ranks 0 and 1 divide a model between them, and so do ranks 2 and 3. The second pair computes other samples. So rank 2
# has the same *parameters* as rank 0, and rank 3 the same as rank 1. {0, 2} and {1, 3} are the **data groups**, and
# within them ZeRO works as ever. Which group sends what?

# %% tags=["nbval-check-output"]
print("        place 0    place 1")
print("pair 0  rank 0 ─── rank 1    ───  a tensor group: activations")
print("          │          │")
print("pair 1  rank 2 ─── rank 3     │   a data group: parameters and gradients, by ZeRO")

# %% [markdown]
# Model states are 16 bytes for each parameter: 4 for the parameter, 4 for its gradient, 8 for Adam. Four ranks now hold
# one GPT. Embeddings, layer norms, the model's head and the biases after `Leave` are not divided within a pair, 77,056
# of the 867,072 parameters. ZeRO-3 divides whatever a rank has by two. How many bytes does a rank hold, for each of the
# Ψ parameters of the whole model?

# %%
lab.predict("15.2", 16 / 4 * (867_072 + 77_056) / 867_072)  # bytes per parameter

# %%
# %%ranks
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
data_group = columns[place]
pair = rank // 2  # the pairs train on different samples


def train_two_by_two(dtype, steps=3):
    zero = zerolab.Zero3(split(make_model(dtype), tensor_group), units=[Block], group=data_group)
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book, calls() as everything:
            loss_of(zero.model, *batch(words, pair, step, 8, 64)).backward()
            states = model_states(zero, adam)
            adam.step()
    tensor = sum(call.payload for call in everything.calls if call.op == "allreduce")  # ours; ZeRO-3 has none
    return zero.full_state_dict(), states, {"tensor group": tensor, "data group": book.moved}


def train_alone(steps=3):
    model = make_model(torch.float64)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        for pair in range(2):
            (loss_of(model, *batch(words, pair, step, 8, 64)) / 2).backward()
        adam.step()
    return model


together, _, _ = train_two_by_two(torch.float64)
alone = split(train_alone(), tensor_group).state_dict()
furthest = max((together[name] - value).abs().max().item() for name, value in alone.items())
_, states, by_group = train_two_by_two(torch.float32)

# %%
states = lab.pull("states", rank=0)
lab.measured("15.2", round(sum(states.values()) / 867_072, 3))
lab.reveal("15.2")

# %% tags=["nbval-check-output"]
print(
    "after 3 steps of AdamW in float64, every parameter is one process's, to 1e-10:", max(lab.pull("furthest")) < 1e-10
)
if lab.predicted("15.2"):
    for group, sent in lab.pull("by_group", rank=0).items():
        print(f"{group}: {sent:>9,} bytes sent by each rank in a step")

# %% [markdown]
# The tensor group sends what it sent before. The data group sends what ZeRO-3 sends between two ranks, but for a model
# that is almost half as large: 3/2 of the rank's parameters (less what the root keeps gathered, lesson 07). Two
# dimensions, two kinds of bytes, and neither knows of the other. Neither class had to be changed: `group=data_group`
# was all.
#
# One thing does have to know. A gradient *norm* over the whole model adds up squares. In a pair, cut parameters count
# on both ranks, copies only once. `zero.clip_grad_norm_` sees its data group only, and would clip the two ranks of a
# pair differently. Megatron marks the copies for that reason; in FSDP2 every parameter is a DTensor, which knows how it
# is cut.
#
# ## By layers, and the bubble
#
# Now the third row of the first picture: each rank has some of the layers. `lab.Pipeline` connects the ranks. A
# **stage** is what one rank computes. To see when it computes, every stage here sleeps 20 ms for each sample, and 40 ms
# in backward: sleeping ranks do not take turns at two cores. So the *times* are emulated; messages and numbers are
# real. First, the plain division by layers: the whole batch goes through stage 0, then 1, then 2, then 3, and back.

# %%
# %%ranks
MyPipeline = lab.mine("15.3")


class Part(nn.Module):
    """Blocks first to last of a GPT, with the embeddings before the first and the head behind the last."""

    def __init__(self, model, rank, size):
        super().__init__()
        each = len(model.blocks) // size
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.token, self.position = (model.token, model.position) if rank == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if rank == size - 1 else (None, None)

    def forward(self, x):
        if self.token:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head else x


def pipeline(schedule, micro_batches, dtype=torch.float32, pace=0.0):
    """A pipeline for the 8 sequences, in so many micro-batches."""
    tokens, targets = batch(words, 0, 0, 8, 64)
    targets = targets.chunk(micro_batches)
    stage = Part(make_model(dtype), rank, 4)
    if pace:
        stage = Paced(stage, pace * 8 / micro_batches)  # seconds for a micro-batch
    like = torch.empty(8 // micro_batches, 64, 128, dtype=dtype)

    def loss(logits, m):
        return F.cross_entropy(logits.flatten(0, 1), targets[m].flatten())

    return schedule(stage, tokens.chunk(micro_batches), loss, like)


pipe = pipeline(MyPipeline, micro_batches=1, pace=0.02)
pipe.run()
dist.barrier()
pipe.run()
by_layers = pipe.trace

# %%
paced = "emulated: 20 ms a sample"
plots.show(plots.pipeline_runs({"by layers": lab.pull("by_layers")}, paced))
assert plots.bubble(lab.pull("by_layers")) > 0.6

# %% [markdown]
# One stage works at a time: four ranks, the speed of one. The white area is the
# **[bubble](../docs/glossary.md#bubble)**. The remedy: cut the batch into **micro-batches**, and send each on as soon
# as it is ready. While stage 1 computes micro-batch 0, stage 0 has micro-batch 1. Gradients of all micro-batches add
# up, as in gradient accumulation, so the step is the same. With 4 stages and 8 micro-batches, first all forwards and
# then all backwards (the schedule is called **GPipe**, arXiv 1811.06965): what fraction of the time is bubble?

# %%
lab.predict("15.3", 100 * 3 / 11)  # % of the time

# %%
# %%ranks


class GPipe(MyPipeline):
    def order(self):
        each = range(self.micro_batches)
        return [("forward", m) for m in each] + [("backward", m) for m in each]


pipe = pipeline(GPipe, micro_batches=8, pace=0.02)
pipe.run()
dist.barrier()
pipe.run()
gpipe = pipe.trace

# %%
gpipe = lab.pull("gpipe")
lab.measured("15.3", round(100 * plots.bubble(gpipe), 1))
lab.reveal("15.3")

# %%
if lab.predicted("15.3"):
    plots.show(plots.pipeline_runs({"by layers": lab.pull("by_layers"), "GPipe, 8 micro-batches": gpipe}, paced))
    assert plots.bubble(gpipe) < 0.55 < plots.bubble(lab.pull("by_layers"))

# %% [markdown]
# Count in units of one micro-batch on one stage. A rank works for M of them, and waits while the pipeline fills and
# empties: N - 1. So the bubble is (N-1) / (M+N-1), here 3/11. With M much larger than N it nearly vanishes. (The
# measured one is a little larger: stages compute besides sleeping, and take turns at the cores.)
#
# ## Write a stage
#
# GPipe pays in memory: when the first backward begins, the activations of all M micro-batches are there. The remedy is
# an order called **1F1B**, one forward, one backward. The last stage can run the backward of micro-batch 0 as soon as
# it has run its forward. So start backwards as early as possible, and let each free its activations before the next
# forward takes more. Rank r runs as many forwards as there are stages behind it, then takes turns.
#
# Write the order, and what a stage does in forward and in backward.

# %%
# %%exercise 15.3

# %%
lab.check("15.3")

# %%
# %%ranks
MyPipeline = lab.mine("15.3")
pipe = pipeline(MyPipeline, micro_batches=8, pace=0.02)
pipe.run()
dist.barrier()
pipe.run()
one_by_one = pipe.trace


def compare(schedule):
    """The gradients and the loss in float64 beside one process's, and the activations kept and bytes sent in float32."""
    pipe = pipeline(schedule, micro_batches=8, dtype=torch.float64)
    loss = pipe.run()
    whole = make_model(torch.float64)
    want = loss_of(whole, *batch(words, 0, 0, 8, 64))
    want.backward()
    mine = Part(whole, rank, 4)
    pairs = [(a.grad, b.grad) for a, b in zip(pipe.stage.parameters(), mine.parameters(), strict=True)]
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    off = max(off, abs(loss / want.item() - 1) if pipe.last else 0.0)
    pipe = pipeline(schedule, micro_batches=8)
    with saved(pipe.stage) as kept:
        pipe.run()
    return {"off": off, "kept": kept.peak, "sent": pipe.sent}


compared = {"GPipe": compare(GPipe), "1F1B": compare(MyPipeline)}

# %%
if lab.predicted("15.3"):
    runs = {"GPipe": gpipe, "1F1B": lab.pull("one_by_one")}
    plots.show(plots.pipeline_runs(runs, paced))
    assert [plots.in_flight(trace) for trace in runs["GPipe"]] == [8, 8, 8, 8]
    assert [plots.in_flight(trace) for trace in runs["1F1B"]] == [4, 3, 2, 1]

# %% tags=["nbval-check-output"]
compared = lab.pull("compared")
for name in ("GPipe", "1F1B"):
    print(
        f"{name:5} the loss and all gradients are one process's, to 11 digits:",
        all(of[name]["off"] < 1e-11 for of in compared),
    )
for rank, of in enumerate(compared):
    times = of["GPipe"]["kept"] / of["1F1B"]["kept"]
    print(f"rank {rank} sends {of['1F1B']['sent']:,} bytes; GPipe keeps {times:.1f} x the activations that 1F1B keeps")

# %% [markdown]
# The same bubble, the same bytes, the same gradients, and less memory: rank r keeps N - r micro-batches, whatever M is.
# Rank 0 keeps half here (4 of 8); with M = 64 it would be a sixteenth.
#
# And the traffic is the smallest of all: one activation forward and its gradient back, between neighbours. So pipelines
# cross the slow wires between nodes, where neither tensor parallelism nor ZeRO-3 would keep up.
#
# ## All four, side by side
#
# The same model, the same 8 sequences, 4 ranks, one step with AdamW in float32. FLOP are counted by torch (matrix
# products only), and activations are what autograd keeps at the most.

# %%
# %%ranks
from torch.utils.flop_counter import FlopCounterMode

tokens = batch(words, 0, 0, 8, 64)
own = [part.chunk(4)[rank] for part in tokens]


def states_of(model, adam):
    of_params = [t for p in model.parameters() for t in (p, p.grad, *adam.state[p].values())]
    return sum(t.nbytes for t in of_params)


def observe(model, adam, step, zero=None, pipe=None):
    """The second step is counted; the first creates Adam's state."""
    for number in range(2):
        with saved(model) as kept:
            if number:
                with ledger(zero) if zero else calls() as book, FlopCounterMode(display=False) as flop:
                    step()
                    states = sum(model_states(zero, adam).values()) if zero else states_of(model, adam)
                    adam.step()
            else:
                step()
                adam.step()
        adam.zero_grad()
    sent = pipe.sent if pipe else book.moved if zero else book.sent
    updated = sum(zerolab.to_local(param).numel() for param in adam.param_groups[0]["params"])
    return {"states": states, "kept": kept.peak, "sent": sent, "flop": flop.get_total_flops(), "updated": updated}


def run_way(way):
    zero = pipe = None
    model, mine = make_model(), tokens if way in ("one process", "tensor") else own
    if way in ("DDP", "ZeRO-3"):
        zero = (zerolab.DDP if way == "DDP" else zerolab.Zero3)(model, units=[Block])
    elif way == "tensor":
        model = split(model, dist.group.WORLD)  # one head on each rank
    elif way == "pipeline":
        pipe = pipeline(MyPipeline, micro_batches=8)
        model = pipe.stage
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = pipe.run if pipe else lambda: model(*mine).backward()
    return observe(model, adam, step, zero, pipe)


WAYS = ("one process", "DDP", "ZeRO-3", "tensor", "pipeline")
table = {way: run_way(way) for way in WAYS}

# %%
rows = lab.pull("table")
largest = {way: {key: max(of[way][key] for of in rows) for key in rows[0][way]} for way in rows[0]}
print(f"{'the fullest of 4 ranks':24}{'model states':>14}{'activations':>14}{'bytes sent':>14}{'MFLOP':>9}")
for way, of in largest.items():
    print(f"{way:24}{of['states']:>14,}{of['kept']:>14,}{of['sent']:>14,.0f}{of['flop'] / 1e6:>9,.0f}")
one = largest["one process"]
assert largest["DDP"]["states"] >= one["states"] and largest["ZeRO-3"]["states"] < 0.3 * one["states"]
assert largest["tensor"]["flop"] < 0.5 * one["flop"]

# %% [markdown]
# Read it by columns:
#
# - *Model states.* DDP divides nothing, ZeRO-3 everything, tensor parallelism all but the copies. A pipeline's fullest
#   stage has an embedding or the head besides its block.
# - *Activations.* Data parallelism, with or without ZeRO, has a quarter because it has a quarter of the samples. It
#   goes no further than one sample per rank. The other two divide what belongs to *one* sample.
# - *Bytes.* DDP and ZeRO-3 send parameters and gradients, however many tokens there are. The other two send
#   activations, in proportion to the tokens.
#
# **When ZeRO is not enough**: one sample's activations (with checkpointing, lesson 10) or one unit's full parameters do
# not fit on a GPU; or the batch that still trains well has fewer samples than you have GPUs. **When ZeRO is the wrong
# tool**: the model fits anyway, then DDP is enough; or each rank has so few tokens that gathering the parameters takes
# longer than using them (lesson 09), then leave the parameters where they are and send activations. **When model
# parallelism is the wrong tool**: everything above fits ZeRO. It changes the model's code, and ZeRO does not.
#
# ## In production
#
# torch has both kinds. `parallelize_module` replaces a layer's weight by a **DTensor**, a tensor that knows how it is
# cut over a mesh: `ColwiseParallel` is our `up`, `RowwiseParallel` our `down`. And `torch.distributed.pipelining` has
# stages and schedules. Both beside ours, on the same numbers:

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
inputs = torch.randn(8, 64, 128)


def forward_and_backward(mlp):
    x = inputs.clone().requires_grad_()
    with calls() as book:
        y = mlp(x)
        (y**2).mean().backward()
    grad = mlp.up.weight.grad
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    return y.detach(), x.grad, grad, len(book.calls)


torchs = make_model().blocks[0].mlp
parallelize_module(torchs, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
with CommDebugMode() as torchs_book:  # torch calls its collectives by another name
    *torchs, _ = forward_and_backward(torchs)
torchs_calls = torchs_book.get_total_counts()
*ours, our_calls = forward_and_backward(MyMLP(make_model().blocks[0].mlp, tensor_group))
agree = all(torch.allclose(a, b, rtol=1e-4, atol=1e-8) for a, b in zip(torchs, ours, strict=True))

pipe = pipeline(MyPipeline, micro_batches=8)
our_loss = pipe.run()
stage = Part(make_model(), rank, 4)
sequences, targets = batch(words, 0, 0, 8, 64)
schedule = Schedule1F1B(
    PipelineStage(stage, rank, 4, torch.device("cpu")),
    8,
    loss_fn=lambda logits, wanted: F.cross_entropy(logits.flatten(0, 1), wanted.flatten()),
)
losses = []
if rank == 0:
    schedule.step(sequences)
else:
    schedule.step(target=targets, losses=losses) if rank == 3 else schedule.step()
pairs_of_grads = [(a.grad, b.grad) for a, b in zip(stage.parameters(), pipe.stage.parameters(), strict=True)]
stages_agree = all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs_of_grads)

# %% tags=["nbval-check-output"]
print("Colwise and Rowwise: output and gradients agree:", all(lab.pull("agree")))
print(f"collectives: torch {lab.pull('torchs_calls', rank=0)}, ours {lab.pull('our_calls', rank=0)}")
print("Schedule1F1B: all gradients agree:", all(lab.pull("stages_agree")))

# %% [markdown]
# The same two all-reduces, and the same gradients. Large runs use all three dimensions: tensor parallelism inside a
# node, pipelines between nodes, ZeRO in the data dimension. (Stages 2 and 3 of ZeRO go badly with a pipeline: every
# micro-batch would gather and reduce again. One uses stage 1 there.)
#
# ## On trial
#
# > "Each GPU trains a submodel, or only its shard's gradient."

# %% tags=["nbval-check-output"]
one = largest["one process"]["flop"]
for way in ("DDP", "ZeRO-3", "tensor", "pipeline"):
    each = [of[way]["flop"] / one for of in rows]
    print(f"{way:9} each rank computes {', '.join(f'{part:.3f}' for part in each)} of one process's FLOP")

# %% [markdown]
# **False for ZeRO.** A quarter on every rank looks like a quarter of the model, but it is a quarter of the *samples*:
# each rank runs every layer in full. Its backward computes the gradient of *every* parameter, and the reduce-scatter
# hands the parts to their owners. Training a submodel is what the last two rows do, and there the quarters are of the
# layers. (In the tensor row every rank also computes the model's whole head; in the pipeline the last stage does.)
#
# > "Data parallelism lowers a GPU's memory; data and model parallelism both raise it."

# %% tags=["nbval-check-output"]
for way, of in largest.items():
    print(f"{way:12} model states {of['states'] / largest['one process']['states']:.2f} x one process's")

# %% [markdown]
# **False, both halves.** Data parallelism neither lowers nor raises the model states: DDP's are those of one process.
# What it lowers is activations, as far as it lowers the samples per GPU. (Its buckets may add to the peak, lesson 03.)
# ZeRO and model parallelism lower the model states. Together they lower them further: 15.2.
#
# > "It needs a special model structure; synchronisation adds compute."

# %% tags=["nbval-check-output"]
for way in ("one process", "DDP", "ZeRO-3"):
    total = sum(of[way]["flop"] for of in rows) / (4 if way == "one process" else 1)
    updates = [of[way]["updated"] for of in rows]
    print(f"{way:12} {total / one:.3f} x the FLOP, all ranks together; a rank updates {max(updates):,} parameters")

# %% [markdown]
# **False for ZeRO.** The same GPT class went into DDP and ZeRO-3 as it was. Forward and backward compute what one
# process computes, and the update work of a rank *falls*, to Ψ/N. What synchronisation adds is traffic and waiting. The
# first half is **true of model parallelism**: for the tensor row we replaced both halves of every block, and the
# pipeline needs a model that is a chain of stages of equal cost.
#
# > "Model parallelism suits little data."

# %%
# %%ranks
by_batch = {}
for sequences in (1, 2, 4, 8):
    cut = split(make_model(), tensor_group)
    with calls() as book:
        cut(*batch(words, 0, 0, sequences, 64)).backward()
    zero = zerolab.DDP(make_model(), units=[Block], group=data_group)
    with ledger(zero) as replicas:
        zero.model(*batch(words, pair, 0, sequences, 64)).backward()
    by_batch[sequences] = book.payload, replicas.moved

# %% tags=["nbval-check-output"]
for sequences, (tensor, data) in lab.pull("by_batch", rank=0).items():
    print(f"sequences: {sequences}; tensor parallelism sends {tensor:>9,} bytes, DDP {data:,}")
for micro_batches in (1, 2, 8):
    print(f"a pipeline of 4 stages, micro-batches: {micro_batches}, bubble at best {3 / (micro_batches + 3):.0%}")

# %% [markdown]
# **True under a condition**, for one kind and for another sense of "data". The size of the *data set* decides nothing.
# With few tokens in a *step*, tensor parallelism sends less and DDP as much as ever: between two ranks of this model it
# is ahead up to six sequences. A pipeline is the opposite: with few micro-batches it stands still.
#
# > "Each shard's gradient sums over its own samples, and the full gradient is the sum of the shards."

# %%
# %%ranks
zero = zerolab.Zero2(make_model(), units=[Block])
zero.model(*own).backward()
mine = torch.cat([zerolab.to_local(p.grad).flatten() for p in zero.units[1].params if p.grad is not None])

whole = make_model()
whole(*tokens).backward()
layout = zero.units[1].layout
names = zero.units[1].names
flat = torch.zeros(layout.size)
for view, name in zip(layout.views(flat), names, strict=True):
    view.copy_(whole.get_parameter(name).grad)
of_all = torch.cat([piece.flatten() for piece in layout.slices(layout.shard(flat, rank), rank)])

lonely = make_model()
lonely(*own).backward()
for view, name in zip(layout.views(flat), names, strict=True):
    view.copy_(lonely.get_parameter(name).grad)
of_own = torch.cat([piece.flatten() for piece in layout.slices(layout.shard(flat, rank), rank)])
trial = {
    "elements": mine.numel(),
    "all samples": torch.allclose(mine, of_all, rtol=1e-3, atol=1e-6),
    "own samples": torch.allclose(mine, of_own, rtol=1e-3, atol=1e-6),
}

# %% tags=["nbval-check-output"]
for rank, found in enumerate(lab.pull("trial")):
    print(
        f"rank {rank}: a shard of {found['elements']:,} elements; the gradient over all ranks' samples: "
        f"{found['all samples']}; over its own: {found['own samples']}"
    )

# %% [markdown]
# **False**: it mixes two ways to cut. *Samples* are cut among the ranks, and gradients over samples are averaged.
# *Elements* of the gradient are cut into shards, and shards are put end to end. Each element of a shard is the mean
# over the samples of *all* ranks. The shards belong to different parameters, so adding them up means nothing.
#
# ## Questions
#
# 1. Why is the first layer of an MLP cut by output units and the second by input units?
# 2. Which all-reduces does a transformer block need in tensor parallelism, forward and backward, and what decides their
#    size?
# 3. A pipeline has 8 stages. How many micro-batches keep the bubble below 10 %? What do they cost in memory with GPipe,
#    and with 1F1B?
# 4. How is a mesh of tensor parallelism, pipeline and ZeRO laid out on nodes of 8 GPUs, and why?
# 5. In tensor parallelism, a layer norm's weight is on every rank. What keeps the copies equal, and what would break
#    it?
# 6. A 7B model with ZeRO-3 fits on 64 GPUs with one sequence each. You get 512 GPUs, and the batch must not grow. What
#    now?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Then each rank has complete hidden units, applies the nonlinearity to them without asking anyone, and the parts of
#    the second layer's sums need one all-reduce. Cut the other way round, there would be one before the nonlinearity as
#    well.
# 2. Two in forward, where attention and MLP leave the split region, and two in backward, where they entered it. Each
#    has the size of the block's input: sequences × tokens × width, whatever the number of parameters.
# 3. (N-1)/(M+N-1) < 0.1 with N = 8 needs M > 63: at least 64. GPipe keeps the activations of all 64 on every stage.
#    1F1B keeps 8 on the first stage and 1 on the last.
# 4. Tensor parallelism inside the node: it sends the most, and nothing hides it. Pipeline stages on different nodes:
#    they send little, to one neighbour. ZeRO over what is left: its traffic does not depend on the tokens and hides
#    behind backward.
# 5. All ranks compute it from equal inputs and equal gradients, because `Enter` adds up in backward. It breaks if a
#    rank uses a gradient from inside the split region before the all-reduce, if dropout draws different masks on the
#    ranks outside of it, or if the copies started differently.
# 6. 64 sequences cannot be given to 512 ranks. Divide the computing: tensor parallelism over the 8 GPUs of a node, and
#    ZeRO over 64 such groups, one sequence for each.

# %%
lab.stop()
lab.progress()
