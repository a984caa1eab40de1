# %% [markdown]
# # 20 · FSDP in forty lines
#
# **The question.** Sharded training has a reputation for size: the engine behind `Zero3` has some 5,000 lines
# ([CONTRIBUTING](../CONTRIBUTING.md#what-to-read-first) counts them), and most are hooks, and what hooks have to know.
# SimpleFSDP (arXiv 2411.00284) says that it takes one idea, which fits on a screen: *a parameter rests somewhere, and
# gathering it is a redistribution that autograd can undo.* Is that all? Anyone who picks an engine should know what the
# forty lines do, what they leave out, and which of the rest is worth having. And then the opposite question. Sharding
# moves numbers and changes none of them, so everyone says. There is an optimizer in wide use for which that is wrong.

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
import gc
import inspect
import weakref

import torch
import torch.distributed as dist
import zerolab
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from zerolab import lab
from zerolab.lab import GPT, Block, batch, calls, saved, text
from zerolab.measure import ledger, peak_of

words = text()


def make_model(layers=4, width=128):
    torch.manual_seed(0)
    return GPT(layers=layers, width=width)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## A tensor, and where it is
#
# Take one parameter and a group of N ranks. There are three ways in which the ranks can have it, three
# **[placements](../docs/glossary.md#placement)**:
#
# - **replicated**: every rank has all of it;
# - **sharded**: each rank has 1/N of it, and the shards end to end are the whole;
# - **partial**: each rank has a tensor of full size, and the *sum* of all of them is meant, or the mean. Gradients are
#   born like this: each rank has that of its own samples.
#
# To go from one to another is a **[redistribution](../docs/glossary.md#redistribution)**, and the three that send
# anything are collectives you know:
#
# | from | to | collective | a ring sends |
# |---|---|---|---|
# | sharded | replicated | all-gather | (N-1)/N of it |
# | partial | sharded | reduce-scatter | (N-1)/N |
# | partial | replicated | all-reduce | 2(N-1)/N |
#
# Forward computes with replicated parameters, always. So data parallelism is a choice of where a parameter *rests*, and
# backward has to bring its gradient, which is partial, to the same place:
#
# | | parameter rests | forward | backward |
# |---|---|---|---|
# | DDP | replicated | nothing | partial → replicated: all-reduce |
# | ZeRO-3 | sharded | sharded → replicated: all-gather | partial → sharded: reduce-scatter |
# | hybrid | sharded in a node, replicated between nodes | all-gather in the node | reduce-scatter in the node, all-reduce between nodes |
#
# The third row contains the other two. With a *shard group* and a *replicate group*, ZeRO-3 has every rank in the first
# and only itself in the second, and DDP the other way round. A collective in a group of one rank does nothing. So one
# function with two groups is all three.
#
# torch has a place to put it. A **[parametrization](../docs/glossary.md#parametrization)**
# (`torch.nn.utils.parametrize`) replaces `module.weight` by a function of what is kept: whoever reads `module.weight`
# gets `forward(kept)`. The model's code stays as it is, and no hook is needed: forward reads the weight, autograd
# records how it came about, and calls our backward when its gradient is there.
#
# ## Predict
#
# Each parameter of a GPT gets such a parametrization, sharded over 4 ranks, in float32. How many bytes does a rank send
# in a step? (Follow one parameter: what is sent when forward reads it, and what when backward has its gradient? Is
# there anything else? Nothing is padded here.)
#
# And what does a rank *hold* when forward returns? Autograd keeps whatever backward will need. A linear layer needs its
# matrix, to pass the gradient on to its input; a layer norm its weight, and torch keeps the bias with it. Biases of
# linear layers and the rows of embeddings are not needed. So how many bytes of full, gathered parameters are still
# alive then? In this GPT each of 4 blocks has 12·128² elements in matrices, the head has 256·128, and each of 9
# layer norms 2·128.

# %%
lab.predict("20.1", 2 * 4 * 867_072 * 3 / 4)  # bytes
lab.predict("20.2", 4 * (4 * 12 * 128**2 + 256 * 128 + 9 * 2 * 128))  # bytes

# %% [markdown]
# ## Write: a parameter that gathers itself
#
# `Gather` is the redistribution, in both directions. `Sharded` is the parametrization: `right_inverse` says what to
# keep of a full parameter (torch calls it once, when the parametrization is registered), and `forward` what to make of
# it. The shards are flat: the elements one after another, zeros at the end where N doesn't divide them.

# %%
# %%exercise 20.1

# %%
lab.check("20.1")

# %% [markdown]
# ## Three placements
#
# Four ranks can be one shard group, or one replicate group, or a mesh of 2 × 2. First one parameter of 8 elements,
# whose gradient on rank r is r + 1 everywhere: what does each rank keep, and what comes back?

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
placed = {}
for way, mesh in MESHES.items():
    made = MySharded(torch.Size([8]), *mesh)
    kept = made.right_inverse(torch.arange(8.0)).requires_grad_()
    full = made(kept)
    full.backward(torch.full((8,), rank + 1.0))
    assert torch.equal(full, torch.arange(8.0))
    assert torch.all(kept.grad == (1 + 2 + 3 + 4) / 4)
    placed[way] = [int(value) for value in kept], 4  # its gradient is the mean of 4

# %%
found = lab.pull("placed")
ways = {way: [plots.Placed(*of[way]) for of in found] for way in found[0]}
plots.show(plots.placements(ways, elements=8))

# %% [markdown]
# Only the groups differ. Now the whole model, with real text. `shard` gives every parameter its parametrization, and
# the gradients are compared with those of one process that has the samples of all four ranks.


# %%
# %%ranks
def shard(model, sharded, *mesh):
    for module in [*model.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            register_parametrization(module, name, sharded(param.shape, *mesh))
    return model


def shards_of(model):  # name in the plain model -> its parametrization and its shard
    found = {}
    for path, module in model.named_modules():
        made_of = module.parametrizations if is_parametrized(module) else {}
        for name, made in made_of.items():
            found[f"{path}.{name}"] = made[0], made.original
    return found


one = make_model()
for number in range(4):
    (one(*batch(words, number, 0, 2, 64)) / 4).backward()
x, y = batch(words, rank, 0, 2, 64)


def far_from_one(model):  # the largest difference of a gradient, relative to that gradient
    off = []
    for name, (made, kept) in shards_of(model).items():
        full = one.get_parameter(name).grad
        off.append((kept.grad - made.right_inverse(full)).abs().max() / full.abs().max())
    return max(off).item()


with saved(one) as kept:  # what autograd keeps for backward, parameters left out
    one(x, y)
activations = kept.peak
table = {}
for way, mesh in MESHES.items():
    model = shard(make_model(), MySharded, *mesh)
    with calls() as book, saved(model) as kept:
        model(x, y).backward()
    holds = sum(param.nbytes for param in model.parameters())
    gathered = kept.peak - activations  # the rest of what autograd kept
    table[way] = holds, book.sent, gathered, far_from_one(model) < 1e-5
parts = Gather, MySharded, shard
lines = sum(len(inspect.getsource(part).splitlines()) for part in parts)

# %%
table = lab.pull("table", rank=0)
lab.measured("20.1", table["ZeRO-3"][1])
lab.reveal("20.1")
lab.measured("20.2", table["ZeRO-3"][2])
lab.reveal("20.2")
print("Gather, Sharded and shard:", lab.pull("lines", rank=0), "lines")

# %% tags=["nbval-check-output"]
if lab.predicted("20.1") and lab.predicted("20.2"):
    for way, (holds, sent, _, same) in table.items():
        print(f"{way:7} keeps {holds:9,} bytes of parameters, sends {sent:9,.0f};", end=" ")
        print("gradients as of one process:", same)
    gathered = table["ZeRO-3"][2]
    print(f"ZeRO-3, when forward returns: {gathered:,} bytes gathered and still held")

# %% [markdown]
# One function, three engines, and the numbers of one process up to rounding (gloo's reduce-scatter adds in an order of its own). And look at
# the bytes: sharded, this sends *exactly what DDP sends*, 2Ψ(N-1)/N, and not the 3Ψ of stage 3. What has been saved is
# the second gather, and the second prediction says who pays: 95 % of the full parameters stay in memory from their
# forward to their backward. This is FSDP2 with `reshard_after_forward=False`. Between steps it is ZeRO-3; in a step, at
# its peak, it isn't.
#
# ## Gather again
#
# To release a parameter after its forward, it must not be *kept*. Autograd lets us say what is kept in place of a
# tensor: `saved_tensors_hooks(pack, unpack)`. Where it wants to keep a gathered parameter, `pack` gives it the shard
# and how to gather, and in backward `unpack` gathers again. These two are a dozen lines, and they send the third Ψ. The
# rest finds out which parameter a tensor belongs to: by its storage, since what autograd keeps may be a view, such as a
# transposed matrix.


# %%
# %%ranks
from torch.autograd.graph import saved_tensors_hooks


class Again(MySharded):
    made = {}  # storage -> the gathered parameter while it is alive, and what made it

    def forward(self, shard):
        full = super().forward(shard)
        Again.made[full.untyped_storage()._cdata] = weakref.ref(full), self, shard
        return full


class Releases(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.kept = model, {}  # bytes that autograd keeps, by storage

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        found = Again.made.get(storage._cdata)
        if found is None or found[0]() is None:
            self.kept[storage._cdata] = storage.nbytes()
            return tensor  # an activation
        return *found[1:], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        made, shard, *place = kept
        with torch.no_grad():
            return made(shard).as_strided(*place)

    def forward(self, *args):
        self.kept.clear()
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.model(*args)


releases = Releases(shard(make_model(), Again, *MESHES["ZeRO-3"]))
releases(x, y).backward()
same_again = far_from_one(releases.model) < 1e-5

# %% [markdown]
# Beside it, the engine's `Zero3` and `DDP`, with a unit for each block: what is held when forward returns, the bytes,
# the collectives, and the peak of a step with AdamW on rank 0, from the allocator.


# %%
# %%ranks
def built(way):
    if way in ("DDP", "Zero3"):
        zero = getattr(zerolab, way)(make_model(), units=[Block])
        return zero, zero.model
    if way == "forty lines":
        return None, shard(make_model(), MySharded, *MESHES["ZeRO-3"])
    return None, Releases(shard(make_model(), Again, *MESHES["ZeRO-3"]))


def observe(way):
    seen = {}

    def build():  # and measure a first step
        zero, model = built(way)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        seen["holds"] = sum(zerolab.to_local(param).nbytes for param in model.parameters())
        with ledger(zero) if zero else calls() as book:
            if way == "forty lines":
                with saved(model) as kept:
                    loss = model(x, y)
                gathered = kept.now - activations
            else:
                loss = model(x, y)
                gathered = 0
            if way == "gather again":
                gathered = sum(model.kept.values()) - activations
            elif way == "Zero3":
                gathered = sum(unit.full.untyped_storage().nbytes() for unit in zero.units)
            loss.backward()
        number = sum(not call.control for call in book.calls) if zero else len(book.calls)
        seen.update(gathered=gathered, calls=number, sent=book.moved if zero else book.sent)

        def step():
            adam.step()
            adam.zero_grad()
            model(x, y).backward()

        return step

    gc.collect()  # or what is freed in the meantime would be taken off the peak
    if rank == 0:
        seen["peak"] = peak_of(build, torch.device("cpu"), steps=1)
    else:
        build()()
    return seen


WAYS = "DDP", "forty lines", "gather again", "Zero3"
seen = {way: observe(way) for way in WAYS}

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
# "Gather again" keeps nothing that it has gathered: autograd holds the same bytes as in one process. It sends
# 85 kB more than `Zero3`, whose root unit stays gathered (those 0.3 MB): the head and the last norm, which belong to the
# root, are gathered twice here, and the blocks' biases only once, since backward never asks for them. The peak falls by less than was gathered, because it moves into backward, where gloo copies the lists that
# it is given. (The peaks of the forty lines vary from run to run by up to a megabyte: gloo's threads let go of memory a
# moment late.)
#
# The bill is in the column of collectives: three or four for every parameter (one is the all-reduce in a group of one
# rank), and each is waited for where it is made. A ring passes its message on N - 1 times, however short it is (lesson
# 03 measured what that costs). `Zero3` needs 14, and starts a gather while the block before is still computing (lesson
# 09). Nothing in the forty lines knows which parameter comes next.
#
# ## What autograd does not see
#
# Autograd runs the backward of what was *used*. Each rank decides that for itself. Take two experts of the same shape,
# and let the ranks choose different ones, as a router does.


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


apart = dist.new_group(range(4))  # for calls that do not fit
said = {
    "forty lines": routed(lambda model: shard(model, MySharded, apart, alone)),
    "Zero3": routed(lambda model: zerolab.Zero3(model, [nn.Linear], group=apart).model),
}

# %% tags=["nbval-check-output"]
for way, told in lab.pull("said", rank=0).items():
    print(f"{way}: {told}")

# %% [markdown]
# Rank 0 gathers the weight of expert 0 while rank 1 gathers that of expert 1. The calls fit, and each gets half of the
# one and half of the other. Nobody is told. (With experts of different shapes, gloo would abort a rank or hand it a
# wrong tensor.) In backward it is the same with a parameter that one rank didn't use: its reduce-scatter meets
# another's.
# `Zero3` knows the units and their order, so it can compare what the ranks do, and refuse. That is a good part of its
# lines.
#
# ## The same, by torch
#
# A **[DTensor](../docs/glossary.md#dtensor)** is a tensor with a placement, and torch's own redistribution is
# differentiable. Then the exercise is one line: to go to `Replicate`, and to read the gradient as `Partial`.
# torchtitan's SimpleFSDP is made of it (`simple_fsdp.py`, 319 lines in August 2026, with tensor parallelism and mixed
# precision). The three engines are three lists of placements.


# %%
# %%ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

flat_mesh, mesh_2x2 = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
of_two = DeviceMesh("cpu", [0, 1])  # every rank takes part in making it
PLACEMENTS = {
    "DDP": (flat_mesh, [Replicate()]),
    "ZeRO-3": (flat_mesh, [Shard(0)]),
    "hybrid": (mesh_2x2, [Replicate(), Shard(0)]),
    "hybrid, turned": (mesh_2x2, [Shard(0), Replicate()]),
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
for way, (mesh, placements) in PLACEMENTS.items():
    model = place(make_model(), mesh, placements)
    with calls() as book:
        model(x, y).backward()
    off = []
    for name, (_, kept) in shards_of(model).items():
        want = one.get_parameter(name).grad
        off.append(((kept.grad.full_tensor() - want).abs().max() / want.abs().max()).item())
    by_torch[way] = book.sent, len(book.calls), max(off) < 1e-5

# %% tags=["nbval-check-output"]
if lab.predicted("20.1"):
    for way, (sent, number, same) in lab.pull("by_torch", rank=0).items():
        print(f"{way:14} sends {sent:9,.0f} bytes in {number} calls;", end=" ")
        print("gradients as of one process:", same)

# %% [markdown]
# The same bytes as yours, but for one row. In torch 2.13 a DTensor is redistributed along one dimension of the mesh
# after the other, from the left: with `[Replicate(), Shard(0)]` it all-reduces the *whole* gradient between the
# replicas, and then scatters it. Turn the mesh, and the reduce-scatter comes first. (It also leaves out collectives of
# a single rank. And a DTensor is cut by *rows*, dimension 0, where yours is flat. Remember that.)
#
# ## A compiler can read it
#
# Hooks are Python that runs *between* operations, and there a compiled graph has to end. A redistribution is
# operations, and they are in the graph. So the compiler sees what hooks have to guess: every collective of a step, its
# size, and all that is computed between it and its use. It may move them and merge them. Here torch captures a small
# GPT on two ranks as one graph, and its own pass puts the collectives into buckets of a quarter of a megabyte. Then the
# same GPT with `Zero3`. (This cell takes a while. You need not follow it: most of it asks torch for the graph, counts its
# collectives, and lets the pass merge them.)


# %%
# %%ranks 0,1
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes import bucketing
from torch._inductor.pattern_matcher import stable_topological_sort

counts = {"forward": [], "backward": []}


def collectives(graph):
    named = (str(node.target) for node in graph.graph.nodes)
    return sum("c10d" in name and "wait_tensor" not in name for name in named)


def compiler(direction, bucket):
    def compile_it(graph, inputs):
        counts[direction].append(collectives(graph))
        bucket(graph, lambda number: 0.25)  # MB
        stable_topological_sort(graph.graph)
        counts[direction].append(collectives(graph))
        graph.recompile()
        return make_boxed_func(graph.forward)

    return compile_it


small = place(make_model(layers=2, width=64), of_two, [Shard(0)])
small(x, y).backward()
eager = [param.grad.to_local().clone() for param in small.parameters()]
small.zero_grad()
backend = aot_autograd(
    fw_compiler=compiler("forward", bucketing.bucket_all_gather),
    bw_compiler=compiler("backward", bucketing.bucket_reduce_scatter),
)
torch.compile(small, backend=backend, fullgraph=True)(x, y).backward()
compiled = [param.grad.to_local() for param in small.parameters()]
same_compiled = all(map(torch.equal, eager, compiled))
usual = bucketing.bucket_cap_mb_by_bucket_idx_default(0)

graphs = []
zero = zerolab.Zero3(make_model(layers=2, width=64), units=[Block], group=pairs[0])


def kept_as_it_is(graph, inputs):
    graphs.append(collectives(graph))
    return graph.forward


torch.compile(zero.model, backend=kept_as_it_is)(x, y).backward()

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
# pass turned one collective for each parameter into a few large ones: the units of our engine, found by a program. How
# large? torch's own limit is 2,000 MB, which here is one bucket of everything: one message, and all parameters full at
# once, so what ZeRO-3 saves is gone. The paper's pass chooses by what it estimates that a collective and the computing
# before it take. What that is worth shows on GPUs only. The paper reports, with Llama 3 up to 405B on torchtitan, up to
# 28.54 % less memory and up to 68.67 % more throughput than FSDP2 without a compiler (arXiv 2411.00284, abstract); here
# nothing can be said, because the cores that would compute meanwhile are those that send (lesson 09).
#
# | | forty lines and a compiler | hooks |
# |---|---|---|
# | sees | the whole step, before it runs | what has happened so far |
# | memory | decides what to keep or gather again; needs the recomputation *marked* (SimpleFSDP: selective checkpointing) | releases a storage that autograd still points to |
# | buckets, prefetch | merges and moves collectives in the graph | units, and the order of the step before |
# | what varies: routing, unused parameters | another graph, and on each rank its own; nothing compares them | compares the ranks, and says who differs |
# | cost | compiling, again for each new shape | host time in every step |
#
# ## Sharding that changes the mathematics
#
# So far a cut could lie anywhere, because AdamW updates each element from its own gradient. Now let Adam's two averages
# be stored in 8 bits instead of 32, by block-wise **[quantisation](../docs/glossary.md#quantisation)** (Dettmers et
# al., arXiv 2110.02861). A number in -127 ... 127 is too coarse for a whole tensor, in which one large value would
# round all others to 0. So a tensor is cut into **blocks**, here of 256 elements, each with a scale of its own: the
# block's largest absolute value becomes 127. The paper's codes are not evenly spaced, and ours are, for brevity.
#
# How many bytes of optimizer state does a parameter cost? (It was 8. A scale is a float32.)

# %%
lab.predict("20.3", 2 * (1 + 4 / 256))  # bytes per parameter

# %% [markdown]
# ## Write: blocks, and where to cut
#
# Now shard it. The parameters of a model lie end to end in a flat storage, and blocks are counted within each
# parameter, from its own first element. With equal shards a border falls anywhere, into the middle of a block. What a
# rank would take for a block is then another one, with another largest value, and from there to the end of that
# parameter all blocks have moved. `cuts` is the remedy: move each border back to the end of a block.

# %%
# %%exercise 20.2

# %%
lab.check("20.2")

# %% [markdown]
# And the optimizer, in thirty lines. It stores the root of the second average: its range is narrower. Where that root
# was rounded to 0 and the gradient is small, m / root has no bound, so `clamp` lets no element move by more than the
# learning rate.


# %%
# %%ranks
quantise, dequantise = lab.mine("20.2", "quantise"), lab.mine("20.2", "dequantise")
cuts = lab.mine("20.2", "cuts")


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, block=256):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "block": block})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    self.update(param, param.grad.flatten(), group, self.state[param])

    def update(self, param, grad, group, state):
        (b1, b2), block = group["betas"], group["block"]
        m = root = torch.zeros_like(grad)
        if state:
            m = dequantise(state["m"], state["m_scale"], block)
            root = dequantise(state["root"], state["root_scale"], block)
        t = state["t"] = state.get("t", 0) + 1
        m = b1 * m + (1 - b1) * grad
        root = (b2 * root**2 + (1 - b2) * grad**2).sqrt()
        step = (m / (1 - b1**t)) / (root / (1 - b2**t) ** 0.5 + group["eps"])
        param -= group["lr"] * step.clamp(-1, 1).view_as(param)
        state["m"], state["m_scale"] = quantise(m, block)
        state["root"], state["root_scale"] = quantise(root, block)


def small_model():
    return make_model(layers=2, width=64)


losses, state_bytes = {}, 0
for name in ("8 bits", "32 bits") if rank == 0 else ():
    model = small_model()
    way = {"8 bits": Adam8, "32 bits": torch.optim.Adam}[name]
    adam = way(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses[name] = []
    for number in range(60):
        loss = model(*batch(words, 0, number, 4, 64))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses[name].append(loss.item())
    if name == "8 bits":
        for state in adam.state.values():
            state_bytes += sum(value.nbytes for key, value in state.items() if key != "t")
small_psi = sum(param.numel() for param in small_model().parameters())

# %%
lab.measured("20.3", lab.pull("state_bytes", rank=0) / lab.pull("small_psi", rank=0))
lab.reveal("20.3")
subtitle = "a GPT of 2 blocks of width 64, one process, the same batches"
losses = lab.pull("losses", rank=0)
plots.show(plots.curves(losses, "Adam with 8 bits, and with 32", subtitle, "loss"))

# %% [markdown]
# A quarter of the bytes, and with this model and 60 steps the same curve. Now on 2 and 3 ranks. `Ragged` is ZeRO-1
# with borders that may lie anywhere: a rank updates its pieces of the parameters, and sends them to the others.


# %%
# %%ranks
class Ragged:
    def __init__(self, model, borders, group):
        self.params, self.borders, self.group = [*model.parameters()], borders, group
        self.first, self.last = borders[dist.get_rank(group) :][:2]
        self.pieces, self.places, start = [], [], 0
        for param in self.params:
            a, b = max(self.first - start, 0), min(self.last - start, param.numel())
            if a < b:
                self.pieces.append(nn.Parameter(param.detach().flatten()[a:b].clone()))
                self.places.append((param, slice(a, b)))
            start += param.numel()

    @torch.no_grad()
    def step(self, adam):
        for piece, (param, place) in zip(self.pieces, self.places):
            piece.grad = param.grad.flatten()[place]
        adam.step()
        flat = torch.cat([param.flatten() for param in self.params])
        if self.pieces:
            flat[self.first : self.last] = torch.cat(self.pieces)
        for owner, (a, b) in enumerate(zip(self.borders, self.borders[1:])):
            dist.broadcast(flat[a:b], group=self.group, group_src=owner)
        parts = flat.split([param.numel() for param in self.params])
        for param, part in zip(self.params, parts):
            param.copy_(part.view_as(param))
            param.grad = None


def by_one_process(N):  # four steps, each on the mean of the N ranks' gradients
    model = small_model()
    adam = Adam8(model.parameters())
    for number in range(4):
        for r in range(N):
            model(*batch(words, r, number, 2, 64)).backward()
        for param in model.parameters():
            param.grad /= N
        adam.step()
        adam.zero_grad()
    return [param.detach() for param in model.parameters()]


def sharded_by(borders, group):
    model = small_model()
    zerolab.DDP(model, group=group)  # averages gradients, as one process would, bit for bit
    ragged = Ragged(model, borders, group)
    adam = Adam8(ragged.pieces)
    for number in range(4):
        model(*batch(words, rank, number, 2, 64)).backward()
        ragged.step(adam)
    return [param.detach() for param in model.parameters()]


groups = {N: dist.new_group(range(N)) for N in (2, 3)}
sizes = [param.numel() for param in small_model().parameters()]
trial, borders_of = [], {}
for N, group in groups.items():
    equal = [r * small_psi // N for r in range(N + 1)]
    borders_of[N] = {"equal shards": equal, "cut between blocks": cuts(sizes, N, 256)}
    borders_of[N]["cut between parameters"] = cuts(sizes, N, small_psi)
    for name in ("equal shards", "cut between blocks") if rank < N else ():
        one_process, ours = by_one_process(N), sharded_by(borders_of[N][name], group)
        others = sum(int((a != b).sum()) for a, b in zip(one_process, ours))
        trial.append((N, name, borders_of[N][name], others))

# %% tags=["nbval-check-output"]
for N, name, borders, others in lab.pull("trial", rank=0):
    print(f"{N} ranks, {name:18} {borders}: one process's, bit for bit: {others == 0}")

# %%
import itertools

for N, name, _, others in lab.pull("trial", rank=0):
    print(f"{N} ranks, {name:18} {others:7,} parameters differ")
ways = {}
for name, borders in lab.pull("borders_of", rank=0)[3].items():
    lengths = [b - a for a, b in itertools.pairwise(borders)]
    ways[name] = [plots.Piece(length, owner) for owner, length in enumerate(lengths)]
plots.show(plots.shard_map(ways, ranks=3))

# %% [markdown]
# One or two borders in the middle of a block, and after four steps most parameters differ: a border moves all
# blocks behind it in its parameter, and the next forward carries the difference everywhere. None of these numbers is
# *wrong*, and the loss will not complain. But the run depends on how many ranks it has, and a checkpoint of codes and
# scales from 3 ranks is no state at all for 2. Cut between blocks, every rank count gives the bits of one process, and
# a shard differs from an equal share by less than a block: too little to be seen in the first two rows of the picture.
# (The comparison is bit for bit because `zerolab.DDP` adds gradients in the order of the ranks, as one process does.)
#
# So a layout has a **[granularity](../docs/glossary.md#granularity)**: the number of elements that must stay together.
# For AdamW it is 1, for this Adam 256. For Muon, which orthogonalises matrices, it is a whole parameter (lesson 18),
# and then the last row of the picture is the best there is. Block-wise formats of *weights*, such as tiles of 128 ×
# 128, want whole groups of rows.
#
# And the course's engine? Its layout takes a granularity, and the optimizer has to be declared: what is a block, and
# which of its state is per block. What happens if it isn't? And what does another number of ranks read from a checkpoint?
# Try it:

# %%
# %%ranks
group, told, scales = groups[3], {}, {}


def scales_of(model, adam):  # this rank's, and the dtype of the codes
    kept = {name: adam.state[param] for name, param in model.named_parameters()}
    return {n: (zerolab.to_local(s["m_scale"]), s["m"].dtype) for n, s in kept.items() if s}


def in_zero3(make, **options):
    model = small_model()
    zero = zerolab.Zero3(model, units=[Block], group=group, **options)
    adam = make(model.parameters())
    for number in range(4):
        model(*batch(words, rank, number, 2, 64)).backward()
        adam.step()
        adam.zero_grad()
    if options:
        zerolab.save(f"{folder}/three", zero, adam)
        scales[3] = scales_of(model, adam)
    full = zero.full_state_dict()
    ours = [full[name] for name, _ in small_model().named_parameters()]
    return "one process's bits: " + str(all(map(torch.equal, ours, one_process)))


if rank < 3:
    try:
        in_zero3(Adam8)
    except RuntimeError as error:
        told["Adam8"] = str(error).split(". ")[0]
    told["OwnerOptimizer"] = in_zero3(lambda params: zerolab.OwnerOptimizer(params, Adam8))
    zerolab.declare_blockwise(Adam8, 256, per_block=["m_scale", "root_scale"])
    told["granularity=256"] = in_zero3(Adam8, granularity=256)
if rank < 2:
    model = small_model()
    zero = zerolab.Zero3(model, units=[Block], group=groups[2], granularity=256)
    adam = Adam8(model.parameters())
    zerolab.load(f"{folder}/three", zero, adam)
    scales[2] = scales_of(model, adam)
if rank < 3:
    zerolab.declare_elementwise(Adam8)  # which it is not
    told["declared elementwise"] = in_zero3(Adam8)

# %% tags=["nbval-check-output"]
for way, said in lab.pull("told", rank=0).items():
    print(f"{way}: {said}")

of_ranks, whole = lab.pull("scales"), {2: {}, 3: {}}
for N, parts in whole.items():
    for of_rank in of_ranks[:N]:
        for name, (part, _) in of_rank[N].items():
            parts[name] = parts.get(name, []) + part.tolist()
codes = {dtype for of_rank in of_ranks[:2] for _, dtype in of_rank[2].values()}
same = whole[2] == whole[3]
print(f"scales saved by 3 ranks and loaded by 2: equal: {same}, codes: {codes}")

# %% [markdown]
# Undeclared, it is refused, instead of silently training another model. `OwnerOptimizer` gives each parameter one
# owner, which sees all of it: right, but each owner's parameters travel to it and back, and a parameter is the smallest thing
# that can be owned. With a granularity nothing travels, at the price of padding: less than a block for each parameter,
# less than a block for each rank and unit. Codes and scales of 3 ranks are cut anew for 2 and stay what they are, in 8
# bits. A promise that isn't true buys the same wrong numbers as equal shards.
#
# ## In production
#
# FSDP2's DTensors are cut evenly by rows, `Shard(0)`: a border between two rows may be the middle of a block as well.
# **RaggedShard** (veScale-FSDP, arXiv 2602.22437) makes `cuts` a placement: a DTensor in units of a chosen granularity,
# with uneven shards, and a planner that arranges parameters in a buffer so that collectives need no copies. Its
# abstract reports 5 to 66 % more throughput and 16 to 30 % less memory than other systems, on GPUs; here one can
# test the numbers, not the speed. bitsandbytes has the 8-bit Adam in wide use. It leaves tensors of fewer than 4,096
# elements in 32 bits (its documentation, 0.50.1), and of a sharded parameter it sees a rank's part: one more thing that
# may change with the number of ranks. Before you combine the two, ask where the borders lie.
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
# 2. Stage 3 gathers again in backward. Here autograd has kept the full parameter since forward: the peak pays.
# 3. Each gathers a mixture, half of the one expert and half of the other, without an error: calls of one shape fit. An
#    engine that knows which unit is gathered can refuse.
# 4. It sees every collective and all computing between, so it can merge them and move them ahead without hints, and
#    decide what to keep. A larger bucket has fewer messages, and more full parameters alive at once.
# 5. AdamW updates an element from its own gradient, wherever it is. A block's scale depends on all its elements, and a
#    border within it makes other blocks, so other roundings.
# 6. A border moves back by less than g elements, so a shard differs from an equal one by less than g. It matters when g
#    is not small beside Ψ/N: with whole matrices of a large model, on many ranks, some have two and some none.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
