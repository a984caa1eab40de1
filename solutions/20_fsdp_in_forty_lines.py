# %% [markdown]
# # 20 · FSDP in forty lines
#
# **The question.** Sharded training has a reputation for size: the engine behind `Zero3` has more than 5,000 lines
# ([CONTRIBUTING](../CONTRIBUTING.md#what-to-read-first) counts them), hooks and much besides. SimpleFSDP (arXiv
# 2411.00284) takes one idea, which fits on a screen: *a parameter rests somewhere, and gathering it is a redistribution
# that autograd can differentiate.* Both are in use: FSDP2 has hooks, SimpleFSDP has none, so that a compiler can read
# it. To choose, you have to know what the forty lines do, and what they leave out.
#
# The lesson builds on 06 and 07. In ZeRO-3 a rank holds a shard of every parameter; a unit is gathered before its
# forward, released, and gathered again for its backward, and its gradient is reduce-scattered.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import observed, plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import inspect

import torch
import torch.distributed as dist
import zerolab
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrize import register_parametrization
from zerolab import lab
from zerolab.lab import GPT, Block, batch, observed, release, routed, text

words = text()


def make_model(layers=4, width=128):
    torch.manual_seed(0)
    return GPT(layers=layers, width=width)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## A tensor, and where it is
#
# A group of N ranks can have a tensor in three ways, three **[placements](../docs/glossary.md#placement)**:
#
# - **replicated**: every rank has all of it;
# - **sharded**: each rank has 1/N of it, and the shards end to end are the whole;
# - **partial**: each rank has a tensor of full size, and their *sum* is meant, or their mean. Gradients are born like
#   this: each rank has the gradient of its own samples.
#
# To go from one to another is a **[redistribution](../docs/glossary.md#redistribution)**. Here are two, with a
# parameter of four elements.

# %% tags=["nbval-check-output"]
# %%ranks
kept = torch.tensor([10.0 * rank])  # sharded
full = torch.empty(4)
dist.all_gather(list(full.chunk(4)), kept)  # now replicated
grad = torch.tensor([1.0, 1.0, 1.0, 100.0]) * rank  # partial
mine = torch.empty(1)
dist.reduce_scatter(mine, list(grad.chunk(4)))  # now sharded: a sum
print(f"parameter {kept.tolist()} -> {full.tolist()}")
print(f"gradient  {grad.tolist()} -> {(mine / 4).tolist()}, its mean")

# %% [markdown]
# In data parallelism, forward always computes with replicated parameters. What differs is where a parameter *rests*,
# and backward has to bring its partial gradient to the same place:
#
# | | parameter rests | forward | backward |
# |---|---|---|---|
# | DDP | replicated | nothing | partial → replicated: all-reduce |
# | ZeRO-3 | sharded | sharded → replicated: all-gather | partial → sharded: reduce-scatter |
# | hybrid | sharded in a node, replicated between nodes | all-gather in the node | reduce-scatter in the node, all-reduce between nodes |
#
# The third row contains the other two, because a collective in a group of one rank sends nothing: in ZeRO-3 the
# *replicate group* is the rank alone, in DDP the *shard group*. So one function with two groups is all three.
#
# torch has a place for such a function. A **[parametrization](../docs/glossary.md#parametrization)**
# (`torch.nn.utils.parametrize`) replaces `module.weight` by a function of what is kept: whoever reads `module.weight`
# gets `forward(kept)`. No hook is needed: autograd records how the weight came about, and calls our backward when its
# gradient is there.
#
# ## Predict
#
# Each parameter of the GPT gets such a parametrization, sharded over 4 ranks, in float32 (no size here needs padding).
# How many bytes does a rank send in a step? Follow one parameter: what is sent when forward reads it, and what when
# backward has its gradient? (In a ring, an all-gather or a reduce-scatter sends (N-1)/N of the whole, and an all-reduce
# twice that.)
#
# And how many bytes of full, gathered parameters are still alive when forward returns? Autograd keeps whatever backward
# will need: the matrix of a linear layer, to pass the gradient on to its input; the weight of a layer norm, and torch
# keeps the bias with it; no bias of a linear layer, and no embedding. In this GPT each of 4 blocks has 12·128²
# elements in matrices, the head has 256·128, and each of 9 layer norms 2·128.

# %%
lab.predict("20.1", 2 * 4 * 867_072 * 3 / 4)  # bytes
lab.predict("20.2", 4 * (4 * 12 * 128**2 + 256 * 128 + 9 * 2 * 128))  # bytes

# %% [markdown]
# ## Write: a parameter that gathers itself
#
# `Gather` is the redistribution, in both directions. `Sharded` is the parametrization: `right_inverse` says what to
# keep of a full parameter, and `forward` what to make of it. The shards are flat, with zeros at the end where N doesn't
# divide the elements. With N = 2, a parameter of shape (5, 7) has 35 elements, 36 with its padding, and a shard has
# S = 18.

# %%
# %%exercise 20.1

# %%
lab.check("20.1")

# %% [markdown]
# ## Three engines
#
# Four ranks can be one replicate group, or one shard group, or a mesh of two nodes with two ranks each. Only the groups
# differ. `observe` runs a forward and a backward, and says what the rank holds and sends, and whether the gradients
# are those of one process that has the samples of all four ranks.


# %%
# %%ranks
Gather, MySharded = (lab.mine("20.1", name) for name in ("Gather", "Sharded"))
everyone, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(4)][rank]
mesh_2x2 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
node, nodes = mesh_2x2["node"].get_group(), mesh_2x2["nodes"].get_group()
MESHES = {  # shard group, replicate group
    "DDP": (alone, everyone),
    "ZeRO-3": (everyone, alone),
    "hybrid": (node, nodes),
}


def shard(model, sharded, *mesh):
    for module in [*model.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            register_parametrization(module, name, sharded(param.shape, *mesh))
    return model


one = observed.by_one_process(make_model(), words)
x, y = batch(words, rank, 0, 2, 64)
table = {}
for way, mesh in MESHES.items():
    table[way] = observed.observe(shard(make_model(), MySharded, *mesh), one, x, y)
parts = Gather, MySharded, shard
lines = sum(len(inspect.getsource(part).splitlines()) for part in parts)

# %%
table = lab.pull("table", rank=0)
lab.measured("20.1", table["ZeRO-3"]["sent"])
lab.reveal("20.1")
lab.measured("20.2", table["ZeRO-3"]["gathered"])
lab.reveal("20.2")
print("Gather, Sharded and shard:", lab.pull("lines", rank=0), "lines, docstrings included")

# %% tags=["nbval-check-output"]
if lab.predicted("20.1") and lab.predicted("20.2"):
    for way, of in table.items():
        print(f"{way:6} keeps {of['holds']:9,} bytes of parameters,", end=" ")
        print(f"{of['gathered']:,} more after forward; sends {of['sent']:,.0f};", end=" ")
        print("gradients as of one process:", of["same"])

# %% [markdown]
# One function, three engines, and the numbers of one process up to rounding. (Even the group of one rank makes a copy,
# which autograd keeps.) Sharded, this sends *exactly what DDP sends*, 2Ψ(N-1)/N, and not stage 3's 3Ψ(N-1)/N, since
# nothing gathers again. Memory pays for it: 95 % of the full parameters stay from their forward to their backward. So
# parameters are sharded between steps, and full in them.
#
# ## Gather again
#
# A parameter can be released after its forward if autograd does not *keep* it. We may say what is kept in place of a
# tensor: `saved_tensors_hooks(pack, unpack)`. Here `pack` hands over the shard and how to gather, and in backward
# `unpack` gathers again, which sends the third Ψ (`release`, in `zerolab/lab/lessons/lesson20/gather_again.py`). Beside
# it run the engine's `DDP` and `Zero3`, with a unit for each block.

# %%
# %%ranks
ways = {
    "DDP": zerolab.DDP(make_model(), units=[Block]),
    "forty lines": shard(make_model(), MySharded, everyone, alone),
    "gather again": release(shard(make_model(), MySharded, everyone, alone)),
    "Zero3": zerolab.Zero3(make_model(), units=[Block]),
}
seen = {way: observed.observe(built, one, x, y) for way, built in ways.items()}

# %%
seen = lab.pull("seen", rank=0)
yours = [False, lab.passed("20.1"), lab.passed("20.1"), False]
title, subtitle = "When forward returns", "bytes of parameters on one of 4 ranks"
if lab.predicted("20.2"):
    plots.show(plots.stacks(observed.bars(seen), title, subtitle, "MB", learner=yours))
    for way, of in seen.items():
        print(f"{way:12} sends {of['sent']:9,.0f} bytes in {of['calls']:3} collectives")
    assert all(of["gather again"]["gathered"] == 0 for of in lab.pull("seen"))
    assert all(of["gather again"]["same"] for of in lab.pull("seen"))

# %% [markdown]
# "Gather again" keeps nothing that it has gathered, and sends 85 kB more than `Zero3`, whose root unit (those 0.3 MB)
# stays gathered.
#
# The bill is the number of collectives: three or four for every parameter (one is the all-reduce in a group of one
# rank), each waited for on the spot. `Zero3` makes 14, and starts a gather while the block before is still
# computing (lesson 09). Nothing in the forty lines knows which parameter comes next.
#
# ## What autograd does not see
#
# Autograd runs the backward of what was *used*, and each rank decides that for itself. `routed` takes a model of two
# experts, linear layers of one shape. As a router might decide, even ranks use expert 0, odd ranks expert 1.

# %%
# %%ranks
apart = dist.new_group(range(4))  # a group for this alone: the ranks disagree in it
said = {
    "forty lines": routed(lambda model: shard(model, MySharded, apart, alone)),
    "Zero3": routed(lambda model: zerolab.Zero3(model, [nn.Linear], group=apart).model),
}

# %% tags=["nbval-check-output"]
for way, told in lab.pull("said", rank=0).items():
    print(f"{way}: {told}")

# %% [markdown]
# Rank 0 gathers the weight of expert 0 while rank 1 gathers that of expert 1. The calls match, so each rank gets half
# of one and half of the other: its output is off by up to 0.67, without an error. `Zero3` knows the units and their
# order, so it can compare what the ranks do, and refuse. Some of its 5,000 lines are for that.
#
# ## The same, by torch
#
# A **[DTensor](../docs/glossary.md#dtensor)** is a tensor with a placement, and torch's own redistribution is
# differentiable. So the exercise is one line: redistribute to `Replicate`, and take the gradient as `Partial`. `place`
# does with DTensors what `shard` did with shards. The three engines are three lists of placements.


# %%
# %%ranks
from torch.distributed.tensor import Partial, Replicate, Shard
from zerolab.lab import place

flat = init_device_mesh("cpu", (4,))
PLACEMENTS = {
    "DDP": (flat, [Replicate()]),
    "ZeRO-3": (flat, [Shard(0)]),
    "hybrid": (mesh_2x2, [Replicate(), Shard(0)]),
}


class Redistributed(nn.Module):
    def forward(self, kept):  # a DTensor
        everywhere = [Replicate()] * kept.device_mesh.ndim
        partial = [Partial("avg")] * kept.device_mesh.ndim
        return kept.redistribute(placements=everywhere).to_local(grad_placements=partial)


by_torch = {}
for way, placed in PLACEMENTS.items():
    by_torch[way] = observed.observe(place(make_model(), Redistributed, *placed), one, x, y)

# %% tags=["nbval-check-output"]
if lab.predicted("20.1"):
    for way, of in lab.pull("by_torch", rank=0).items():
        print(f"{way:6} sends {of['sent']:9,.0f} bytes in {of['calls']:3} calls;", end=" ")
        print("gradients as of one process:", of["same"])

# %% [markdown]
# The same bytes as yours, but for one row. In torch 2.13 a DTensor is redistributed along one dimension of the mesh
# after the other, from the left: with `[Replicate(), Shard(0)]` it all-reduces the *whole* gradient between the
# replicas, and then reduce-scatters it. (It also leaves out collectives of a single rank. And a DTensor is cut by
# *rows*, dimension 0, where yours is flat. Lesson 23 has an optimizer for which it matters where one cuts.)
#
# ## A compiler can read it
#
# Hooks are Python that runs *between* operations, and at those of our engine a compiled graph ends, as you will see. A
# redistribution is made of operations, so a compiler sees every collective of a step and all that is computed between
# it and its use, and it may move and merge them. Here torch captures a small GPT on two ranks, and its own pass puts
# the collectives into buckets of a quarter of a megabyte. Then the same GPT with `Zero3`. (This takes a while.)


# %%
# %%ranks 0,1
from zerolab.lab import compiled

small = place(make_model(layers=2, width=64), Redistributed, mesh_2x2["node"], [Shard(0)])
counts, same_compiled, usual = compiled.merged(small, x, y)
zero = zerolab.Zero3(make_model(layers=2, width=64), units=[Block], group=node)
graphs = compiled.pieces(zero.model, x, y)

# %%
counts = lab.pull("counts", rank=0)
for direction, (before, after) in counts.items():
    print(f"{direction}: {before} collectives, in buckets {after}")
    assert after < before
print("the same gradients, bit for bit:", lab.pull("same_compiled", rank=0))
print(f"torch's own size of a bucket: {lab.pull('usual', rank=0):,.0f} MB")
graphs = lab.pull("graphs", rank=0)
print(f"Zero3: forward in {len(graphs)} graphs, with {sum(graphs)} collectives in them")
assert len(graphs) > 1 and sum(graphs) == 0

# %% [markdown]
# One graph for forward, one for backward, where `Zero3` leaves the compiler pieces without a collective. And torch's
# pass turned one collective for each parameter into a few large ones: the units of our engine, found by a program. With
# torch's own size, 2,000 MB, this model would be one bucket: one message, and all parameters full at once. What a
# better size is worth shows only on GPUs: here the cores that would compute meanwhile are busy sending (lesson 09).
#
# ## In production
#
# FSDP2 (`fully_shard`) has hooks. With `reshard_after_forward=False` it keeps what it gathered, as the forty lines do.
# torchtitan's SimpleFSDP (`simple_fsdp.py`, 319 lines in August 2026) is the forty lines and a compiler. The paper
# reports, with Llama 3 up to 405B and together with other techniques, up to 28.54 % less memory and up to 68.67 % more
# throughput than FSDP2 without a compiler (abstract).
#
# | | forty lines and a compiler | hooks |
# |---|---|---|
# | memory | keeps what it gathered, unless the gather is *marked* for recomputation | releases what autograd points to |
# | what varies: routing, unused parameters | another graph on each rank; nothing compares them | can compare the ranks and say who differs, as `Zero3` does |
# | cost | compiling, again for each new shape | host time in every step |
#
# ## Questions
#
# 1. A parameter rests sharded and is computed with replicated. Which redistribution does its gradient make, and which
#    collective is it? And in DDP, and with hybrid sharding?
# 2. The forty lines shard everything and send only 2Ψ(N-1)/N. Where is the third Ψ of stage 3, and who pays instead?
# 3. On a network, starting a collective takes 50 µs. What do those of the forty lines cost in a step (of the 159, a
#    third is within a single rank), against the 14 of `Zero3`, and what would lower their number?
# 4. Half of the ranks choose expert 0, the others expert 1, of the same shape. What do the forty lines compute?
# 5. In hybrid sharding on 2 × 2 ranks, DTensors sent 6.9 MB and your `Gather` 5.2 MB. Which collective makes the
#    difference?
# 6. What can a compiler do with collectives in the graph that hooks cannot, and what does a larger bucket cost?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Born partial, it must be sharded: a reduce-scatter. In DDP partial → replicated, an all-reduce. With hybrid
#    sharding a reduce-scatter in the node, then an all-reduce of the shard between the nodes.
# 2. Stage 3 gathers again in backward. Here autograd keeps the full parameter from forward to backward: memory pays.
# 3. 106 are on the network: 5.3 ms against 0.7 ms. Fewer and larger messages come from units of several parameters,
#    which an engine knows, or from buckets, which a compiler makes of the collectives in its graph.
# 4. Each gathers half of one expert and half of the other, without an error: calls of one shape match. An engine that
#    knows which unit is gathered can refuse.
# 5. The all-reduce between the replicas, which in a group of two sends as much as the tensor has. `Gather` all-reduces
#    half of the gradient, after the reduce-scatter: 1.73 MB. The DTensors all-reduced the whole before it: 3.47 MB.
# 6. It sees every collective and all computing between, so it can merge them and start them early. A larger bucket has
#    fewer messages, and more full parameters alive at once.

# %%
lab.stop()
lab.progress()
