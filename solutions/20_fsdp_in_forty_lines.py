# %% [markdown]
# # 20 · FSDP in forty lines
#
# **The question.** Sharded training has a reputation for size: the engine behind `Zero3` has more than 5,000 lines
# ([CONTRIBUTING](../CONTRIBUTING.md#what-to-read-first) counts them), hooks and much besides. SimpleFSDP (arXiv
# 2411.00284) takes one idea, which fits on a screen: *a parameter rests somewhere, and gathering it is a redistribution
# that autograd can undo.* What do the forty lines do, and what do they leave out? And the opposite question: sharding
# moves numbers and changes none, so everyone says. For an optimizer in wide use, that is wrong.

# %%
# %load_ext zerolab.lab
import shutil
import tempfile

from zerolab import lab
from zerolab.lab import plots

lab.start(4)
folder = tempfile.mkdtemp(prefix="zerolab-lesson-20-")
lab.push(folder=folder)

# %% tags=["nbval-check-output"]
# %%ranks
import inspect

import torch
import torch.distributed as dist
import zerolab
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from zerolab import lab
from zerolab.lab import GPT, Block, batch, calls, observed, saved, text

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
# To go from one to another is a **[redistribution](../docs/glossary.md#redistribution)**. (In a ring, an all-gather or
# a reduce-scatter sends (N-1)/N of the whole, and an all-reduce twice that.) In data parallelism, forward always
# computes with replicated parameters. What differs is where a parameter *rests*, and backward has to bring its partial
# gradient to the same place:
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
# torch has a place to put it. A **[parametrization](../docs/glossary.md#parametrization)**
# (`torch.nn.utils.parametrize`) replaces `module.weight` by a function of what is kept: whoever reads `module.weight`
# gets `forward(kept)`. No hook is needed: autograd records how the weight came about, and calls our backward when its
# gradient is there.
#
# ## Predict
#
# Each parameter of a GPT gets such a parametrization, sharded over 4 ranks, in float32 (no size here needs padding).
# How many bytes does a rank send in a step? (Follow one parameter: what is sent when forward reads it, and what when
# backward has its gradient?)
#
# And how many bytes of full, gathered parameters are still alive when forward returns? Autograd keeps whatever backward
# will need: the matrix of a linear layer, to pass the gradient on to its input; the weight of a layer norm, and torch
# keeps the bias with it; no bias of a linear layer, and no embedding. In this GPT each of 4 blocks has 12·128² elements
# in matrices, the head has 256·128, and each of 9 layer norms 2·128.

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
# Four ranks can be one shard group, or one replicate group, or a mesh of 2 × 2. Only the groups differ. The gradients
# are compared with those of one process that has the samples of all four ranks.


# %%
# %%ranks
Gather, MySharded = (lab.mine("20.1", name) for name in ("Gather", "Sharded"))
everyone, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(4)][rank]
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
MESHES = {  # shard group, replicate group
    "DDP": (alone, everyone),
    "ZeRO-3": (everyone, alone),
    "hybrid": (pairs[rank // 2], columns[rank % 2]),
}


def shard(model, sharded, *mesh):
    for module in [*model.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            register_parametrization(module, name, sharded(param.shape, *mesh))
    return model


one = make_model()
for number in range(4):
    (one(*batch(words, number, 0, 2, 64)) / 4).backward()
x, y = batch(words, rank, 0, 2, 64)

with saved(one) as kept:  # what autograd keeps for backward, parameters left out
    one(x, y)
activations, table = kept.peak, {}
for way, mesh in MESHES.items():
    model = shard(make_model(), MySharded, *mesh)
    with calls() as book, saved(model) as kept:
        model(x, y).backward()
    holds = sum(param.nbytes for param in model.parameters())
    gathered = kept.peak - activations  # the rest of what autograd kept
    same = observed.far_from(one, model) < 1e-5  # its gradients, gathered
    table[way] = holds, book.sent, gathered, same
parts = Gather, MySharded, shard
lines = sum(len(inspect.getsource(part).splitlines()) for part in parts)

# %%
table = lab.pull("table", rank=0)
lab.measured("20.1", table["ZeRO-3"][1])
lab.reveal("20.1")
lab.measured("20.2", table["ZeRO-3"][2])
lab.reveal("20.2")
print("Gather, Sharded and shard:", lab.pull("lines", rank=0), "lines, docstrings included")

# %% tags=["nbval-check-output"]
if lab.predicted("20.1") and lab.predicted("20.2"):
    for way, (holds, sent, gathered, same) in table.items():
        print(f"{way:6} keeps {holds:9,} bytes of parameters, sends {sent:9,.0f};", end=" ")
        print(f"after forward {gathered:9,} more; gradients as of one process: {same}")

# %% [markdown]
# One function, three engines, and the numbers of one process up to rounding. (Even the group of one rank makes a copy,
# which autograd keeps.) Sharded, this sends *exactly what DDP sends*, 2Ψ(N-1)/N, and not stage 3's 3Ψ(N-1)/N, since
# nothing gathers again. (Counted as a ring sends it; gloo's own reduce-scatter writes twice that, as lesson 01 found.)
# The second prediction says who pays: 95 % of the full parameters stay in memory from their forward to their backward.
# This is FSDP2 with `reshard_after_forward=False`: sharded between steps, full in them, as lesson 06's ZeRO-2.
#
# ## Gather again
#
# To release a parameter after its forward, it must not be *kept*. Autograd lets us say what is kept in place of a
# tensor: `saved_tensors_hooks(pack, unpack)`. Here `pack` hands over the shard and how to gather, and in backward
# `unpack` gathers again, which sends the third Ψ (`release`, in `zerolab/lab/lessons/lesson20/gather_again.py`). Beside
# it run the engine's `DDP` and `Zero3`, with a unit for each block. The peak is the allocator's, in a step with AdamW.


# %%
# %%ranks
from zerolab.lab import kept_bytes, release


def forty_lines():
    return shard(make_model(), MySharded, everyone, alone)


WAYS = {
    "DDP": lambda: zerolab.DDP(make_model(), units=[Block]),
    "forty lines": forty_lines,
    "gather again": lambda: release(forty_lines()),
    "Zero3": lambda: zerolab.Zero3(make_model(), units=[Block]),
}
model = WAYS["gather again"]()
model(x, y).backward()
same_again = observed.far_from(one, model) < 1e-5
seen = {way: observed.observe(build, x, y) for way, build in WAYS.items()}
seen["forty lines"]["gathered"] = table["ZeRO-3"][2]
seen["gather again"]["gathered"] = kept_bytes() - activations

# %%
seen, bars = lab.pull("seen", rank=0), {}
for way, of in seen.items():
    kinds = {"parameters": of["holds"], "gathered parameters": of["gathered"]}
    bars[way] = {kind: nbytes / 1e6 for kind, nbytes in kinds.items()}
yours = [False, lab.passed("20.1"), lab.passed("20.1"), False]
title, subtitle = "When forward returns", "bytes of parameters on one of 4 ranks"
if lab.predicted("20.2"):
    plots.show(plots.stacks(bars, title, subtitle, "MB", learner=yours))

# %%
if lab.predicted("20.2"):
    print("               sends  collectives   peak of a step")
    for way, of in seen.items():
        print(f"{way:13}{of['sent']:10,.0f}{of['calls']:9}{of['peak'] / 1e6:14.1f} MB")
    assert all(of["gather again"]["gathered"] == 0 for of in lab.pull("seen"))
    assert all(of["peak"] < seen["DDP"]["peak"] for way, of in seen.items() if way != "DDP")
    assert all(lab.pull("same_again"))

# %% [markdown]
# "Gather again" keeps nothing that it has gathered. It sends 85 kB more than `Zero3`, whose root unit stays gathered
# (those 0.3 MB): of that unit, the head and the last norm are gathered twice here. The blocks' biases are gathered only
# once, since backward never asks for them. The peak shows little of this: it varies by up to a megabyte, as gloo's
# threads let go of memory a moment late.
#
# The bill is in the column of collectives: three or four for every parameter (one is the all-reduce in a group of one
# rank), each waited for where it is made. `Zero3` needs 14, and starts a gather while the block before is still
# computing (lesson 09). Nothing in the forty lines knows which parameter comes next.
#
# ## What autograd does not see
#
# Autograd runs the backward of what was *used*, and each rank decides that for itself. Take two experts of the same
# shape, and let the ranks choose different ones, as a router does.


# %%
# %%ranks
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, number):
        return self.experts[number](x)


def routed(wrap):
    torch.manual_seed(0)
    model, x, mine = Routed(), torch.ones(1, 8), rank % 2  # even ranks take expert 0
    right = model(x, mine).detach()
    try:
        return f"off by {(wrap(model)(x, mine) - right).abs().max():.2f}, and no error"
    except zerolab.CommError as error:
        return str(error).splitlines()[0]


apart = dist.new_group(range(4))  # for different experts
said = {
    "forty lines": routed(lambda model: shard(model, MySharded, apart, alone)),
    "Zero3": routed(lambda model: zerolab.Zero3(model, [nn.Linear], group=apart).model),
}

# %% tags=["nbval-check-output"]
for way, told in lab.pull("said", rank=0).items():
    print(f"{way}: {told}")

# %% [markdown]
# Rank 0 gathers the weight of expert 0 while rank 1 gathers that of expert 1. The calls fit, so each gets half of the
# one and half of the other, and nobody is told. `Zero3` knows the units and their order, so it can compare what the
# ranks do, and refuse. That is a good part of its lines.
#
# ## The same, by torch
#
# A **[DTensor](../docs/glossary.md#dtensor)** is a tensor with a placement, and torch's own redistribution is
# differentiable. Then the exercise is one line: to go to `Replicate`, and to read the gradient as `Partial`.
# torchtitan's SimpleFSDP is made of it (`simple_fsdp.py`, 319 lines in August 2026). The three engines are three lists
# of placements.


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

flat = init_device_mesh("cpu", (4,))
mesh_2x2 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
PLACEMENTS = {
    "DDP": (flat, [Replicate()]),
    "ZeRO-3": (flat, [Shard(0)]),
    "hybrid": (mesh_2x2, [Replicate(), Shard(0)]),
}


class Redistributed(nn.Module):
    def forward(self, kept):
        everywhere = [Replicate()] * kept.device_mesh.ndim
        partial = [Partial("avg")] * kept.device_mesh.ndim
        return kept.redistribute(placements=everywhere).to_local(grad_placements=partial)


def place(model, mesh, placements):
    for module in [*model.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            placed = distribute_tensor(param.detach(), mesh, placements)
            setattr(module, name, nn.Parameter(placed))
            register_parametrization(module, name, Redistributed())
    return model


by_torch = {}
for way, placed in PLACEMENTS.items():
    model = place(make_model(), *placed)
    with calls() as book:
        model(x, y).backward()
    by_torch[way] = book.sent, len(book.calls), observed.far_from(one, model) < 1e-5

# %% tags=["nbval-check-output"]
if lab.predicted("20.1"):
    for way, (sent, number, same) in lab.pull("by_torch", rank=0).items():
        print(f"{way:6} sends {sent:9,.0f} bytes in {number:3} calls;", end=" ")
        print("gradients as of one process:", same)

# %% [markdown]
# The same bytes as yours, but for one row. In torch 2.13 a DTensor is redistributed along one dimension of the mesh
# after the other, from the left: with `[Replicate(), Shard(0)]` it all-reduces the *whole* gradient between the
# replicas, and then reduce-scatters it. (It also leaves out collectives of a single rank. And a DTensor is cut by
# *rows*, dimension 0, where yours is flat. Remember that.)
#
# ## A compiler can read it
#
# Hooks are Python that runs *between* operations, and there a compiled graph has to end. A redistribution is made of
# operations, and they are in the graph. So the compiler sees every collective of a step, and all that is computed
# between it and its use, and it may move and merge them. Here torch captures a small GPT on two ranks without a break,
# and its own pass puts the collectives into buckets of a quarter of a megabyte. Then the same GPT with `Zero3`. (This
# takes a while.)


# %%
# %%ranks 0,1
from zerolab.lab import compiled

small = place(make_model(layers=2, width=64), mesh_2x2["node"], [Shard(0)])
counts, same_compiled, usual = compiled.merged(small, x, y)
zero = zerolab.Zero3(make_model(layers=2, width=64), units=[Block], group=pairs[0])
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
# pass turned one collective for each parameter into a few large ones: the units of our engine, found by a program. Its
# own limit is 2,000 MB, which here is one bucket of everything: one message, and all parameters full at once, so at the
# peak ZeRO-3 saves no more than ZeRO-2. What a better choice is worth shows on GPUs only: here the cores that would
# compute meanwhile are those that send (lesson 09). The paper reports, with Llama 3 up to 405B and together with other
# techniques, up to 28.54 % less memory and up to 68.67 % more throughput than FSDP2 without a compiler (abstract).
#
# | | forty lines and a compiler | hooks |
# |---|---|---|
# | memory | keeps what it gathered, unless the gather is *marked* for recomputation (SimpleFSDP) | releases a storage
# that autograd still points to |
# | what varies: routing, unused parameters | another graph on each rank; nothing compares them | compares the ranks, and says who differs |
# | cost | compiling, again for each new shape | host time in every step |
#
# ## Sharding that changes the mathematics
#
# (Here begins a second sitting, of 40 minutes: it needs the first cells of the lesson, and nothing else.) So far a cut
# could lie anywhere, because AdamW updates each element from its own gradient. Now let Adam's two averages be stored in
# 8 bits instead of 32, by block-wise **[quantisation](../docs/glossary.md#quantisation)** (Dettmers et al., arXiv
# 2110.02861, with other codes). As codes -127 ... 127 of one scale, one large value could round all others to 0. So a
# tensor is cut into **blocks**, here of 256 elements, each with a scale of its own, a float32: the block's largest
# absolute value becomes 127.
#
# How many bytes of optimizer state does a parameter cost? (It was 8.)

# %%
lab.predict("20.3", 2 * (1 + 4 / 256))  # bytes per parameter

# %% [markdown]
# ## Write: where to cut
#
# Now shard it. The parameters of a model lie end to end in a flat storage, and blocks are counted within each
# parameter, from its own first element. With equal shards a border falls anywhere, into the middle of a block. What a
# rank would take for a block is then another one, with another largest value, and from there to the end of that
# parameter all blocks have moved. `cuts` moves each border back to the end of a block. Take parameters of 96, 10 and 31
# elements, in blocks of 8 on 2 ranks: an equal share is 68.5 elements, blocks end at 8, 16, ..., 96, then at 104, 106,
# then at 114, ..., 137, and the border is at 64.

# %%
# %%exercise 20.2

# %%
lab.check("20.2")

# %% [markdown]
# And the optimizer: Adam that stores its averages by `quantise`. (Of the second average it stores the root, whose range
# is narrower.)


# %%
# %%ranks
import torch.nn.functional as F
from zerolab.lab import StoredAdam

cuts, BLOCK = lab.mine("20.2"), 256


def quantise(x):  # (n,) -> codes (n,), and a scale for each block
    rows = F.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = rows.abs().amax(dim=1) / 127
    codes = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
    return codes.flatten()[: x.numel()], scales


def dequantise(codes, scales):
    return codes.float() * scales.repeat_interleave(BLOCK)[: codes.numel()]


class Adam8(StoredAdam):
    def __init__(self, params):
        super().__init__(params, quantise, dequantise)


def small_model():
    return make_model(layers=2, width=64)


model = small_model()
adam = Adam8(model.parameters())
model(x, y).backward()
adam.step()
state = [value for of_one in adam.state.values() for value in of_one.values()]
state_bytes = sum(value.nbytes for value in state if torch.is_tensor(value))
small_psi = sum(param.numel() for param in model.parameters())

# %%
lab.measured("20.3", lab.pull("state_bytes", rank=0) / lab.pull("small_psi", rank=0))
lab.reveal("20.3")

# %% [markdown]
# A quarter of the bytes. Now on 2 and 3 ranks. `Ragged` is ZeRO-1 with borders that may lie anywhere: a rank updates
# its pieces of the parameters, and sends them to the others. `four_steps` trains on the mean of some ranks' gradients.


# %%
# %%ranks
from torch.nn.utils import parameters_to_vector
from zerolab.lab import Ragged, four_steps


def by_one_process(N):
    model = small_model()
    four_steps(model, Adam8(model.parameters()), words, *range(N))
    return parameters_to_vector(model.parameters())


def sharded_by(borders, group):
    model = small_model()
    zerolab.DDP(model, group=group)  # averages gradients, as one process would, bit for bit
    four_steps(model, Ragged(model, borders, group, Adam8), words, rank)
    return parameters_to_vector(model.parameters())


groups, trial = {N: dist.new_group(range(N)) for N in (2, 3)}, []
sizes = [param.numel() for param in small_model().parameters()]
for N, group in groups.items():
    equal = [r * small_psi // N for r in range(N + 1)]
    borders = {"equal shards": equal, "cut between blocks": cuts(sizes, N, BLOCK)}
    if rank < N:
        one_process = by_one_process(N)
        for name, ends in borders.items():
            differ = sharded_by(ends, group) != one_process
            trial.append((N, name, int(differ.sum())))
borders["cut between parameters"] = cuts(sizes, N, small_psi)  # on 3 ranks

# %%
import itertools

for N, name, others in lab.pull("trial", rank=0):
    print(f"{N} ranks, {name:18} {others:7,} parameters differ")
    assert (others == 0) == (name == "cut between blocks")
ways = {}
for name, ends in lab.pull("borders", rank=0).items():
    shards = enumerate(itertools.pairwise(ends))
    ways[name] = [plots.Piece(end - start, owner) for owner, (start, end) in shards]
plots.show(plots.shard_map(ways, ranks=3))

# %% [markdown]
# One or two borders in the middle of a block, and after four steps most parameters differ: a border moves all blocks
# behind it in its parameter, and the next forward carries the difference everywhere. The loss will not complain. But
# the run depends on its number of ranks, and a checkpoint of codes and scales from 3 ranks is no state at all for 2.
# Cut between blocks, every rank count gives the bits of one process (`zerolab.DDP` adds gradients in the order of the
# ranks, as one process does), and a shard differs from an equal share by less than a block: too little to be seen in
# the first two rows of the picture.
#
# So a layout has a **[granularity](../docs/glossary.md#granularity)**: the number of elements that must stay together.
# For AdamW it is 1, for this Adam 256. For Muon, which orthogonalises matrices, it is a whole parameter (lesson 04):
# the last row of the picture.
#
# In the course's engine a layout takes a granularity, and the optimizer has to be declared: what is a block, and which
# of its state is per block. What happens if it isn't? And what does another number of ranks read from a checkpoint?

# %%
# %%ranks
told, scales = {}, {}


def in_zero3(N, **options):
    model = small_model()
    zero = zerolab.Zero3(model, units=[Block], group=groups[N], **options)
    return model, zero, Adam8(model.parameters())


def scales_of(adam):  # this rank's, of the first average
    states = [state for state in adam.state.values() if state]
    assert all(state["m"].dtype == torch.int8 for state in states)
    return torch.cat([zerolab.to_local(state["m_scale"]) for state in states]).tolist()


if rank < 3:
    model, zero, adam = in_zero3(3)
    try:
        four_steps(model, adam, words, rank)
    except RuntimeError as error:
        told["Adam8"] = str(error).split(". ")[0]
    zerolab.declare_blockwise(Adam8, BLOCK, per_block=["m_scale", "root_scale"])
    model, zero, adam = in_zero3(3, granularity=BLOCK)
    four_steps(model, adam, words, rank)
    zerolab.save(f"{folder}/three", zero, adam)
    scales[3] = scales_of(adam)
    full = zero.full_state_dict()
    ours = torch.cat([full[name].flatten() for name, _ in small_model().named_parameters()])
    told["granularity=256"] = f"one process's bits: {torch.equal(ours, one_process)}"
if rank < 2:
    model, zero, adam = in_zero3(2, granularity=BLOCK)
    zerolab.load(f"{folder}/three", zero, adam)
    scales[2] = scales_of(adam)

# %% tags=["nbval-check-output"]
for way, said in lab.pull("told", rank=0).items():
    print(f"{way}: {said}")

of_ranks = lab.pull("scales")
found = {N: sorted(scale for of in of_ranks[:N] for scale in of[N]) for N in (2, 3)}
print("scales saved by 3 ranks and loaded by 2: equal:", found[2] == found[3])

# %% [markdown]
# Undeclared, it is refused, instead of silently training another model. Shards stay equal, so the price of a
# granularity is padding, which travels too: less than a block for each parameter, and for each rank of a unit. The
# scales of 3 ranks are cut anew for 2 and stay what they are, and the codes stay in 8 bits.
#
# ## In production
#
# FSDP2's DTensors are cut evenly by rows, `Shard(0)`: a border between two rows may be the middle of a block as well.
# **RaggedShard** (veScale-FSDP, arXiv 2602.22437) makes `cuts` a placement: a DTensor in units of a chosen granularity,
# with uneven shards. bitsandbytes has the 8-bit Adam in wide use, and of a sharded parameter it sees a rank's part.
# Before you combine the two, ask where the borders lie.
#
# ## Questions
#
# 1. A parameter rests sharded and is computed with replicated. Which redistribution does its gradient make, and which
#    collective is it? And in DDP, and with hybrid sharding?
# 2. The forty lines shard everything and send only 2Ψ(N-1)/N. Where is the third Ψ of stage 3, and who pays instead?
# 3. Half of the ranks choose expert 0, the others expert 1, of the same shape. What do the forty lines compute?
# 4. What can a compiler do with collectives in the graph that hooks cannot, and what does a larger bucket cost?
# 5. Why does an 8-bit Adam on equal shards depend on the number of ranks, when AdamW doesn't?
# 6. A layout has granularity g. How uneven can its shards be, and when does that matter?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Born partial, it must be sharded: a reduce-scatter. In DDP partial → replicated, an all-reduce. With hybrid
#    sharding a reduce-scatter in the node, then an all-reduce of the shard between the nodes.
# 2. Stage 3 gathers again in backward. Here autograd keeps the full parameter from forward to backward: memory pays.
# 3. Each gathers half of the one expert and half of the other, without an error: calls of one shape fit. An engine that
#    knows which unit is gathered can refuse.
# 4. It sees every collective and all computing between, so it can merge them and start them early. A larger bucket has
#    fewer messages, and more full parameters alive at once.
# 5. AdamW updates an element from its own gradient, wherever it is. A block's scale depends on all its elements, and a
#    border within it makes other blocks, so other roundings.
# 6. A shard differs from an equal one by less than g elements. It matters when g is not small beside Ψ/N: with whole
#    matrices of a large model, on many ranks, some have one and some none.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
