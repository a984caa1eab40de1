# %% [markdown]
# # 20 · FSDP in forty lines
#
# **The question.** Sharded training has a reputation for size: the engine behind `Zero3` has some 5,000 lines
# ([CONTRIBUTING](../CONTRIBUTING.md#what-to-read-first) counts them), and most are hooks, and what hooks have to know.
# SimpleFSDP (arXiv 2411.00284) says that it takes one idea, which fits on a screen: *a parameter rests somewhere, and
# gathering it is a redistribution that autograd can undo.* What do the forty lines do, and what do they leave out? And
# then the opposite question. Sharding moves numbers and changes none of them, so everyone says. There is an optimizer
# in wide use for which that is wrong.

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
import weakref

import torch
import torch.distributed as dist
import zerolab
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from zerolab import lab
from zerolab.lab import GPT, Block, batch, calls, saved, text

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
#   born like this: each rank has the gradient of its own samples.
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
# In data parallelism, forward always computes with replicated parameters. What differs is where a parameter *rests*, and
# backward has to bring its gradient, which is partial, to the same place:
#
# | | parameter rests | forward | backward |
# |---|---|---|---|
# | DDP | replicated | nothing | partial → replicated: all-reduce |
# | ZeRO-3 | sharded | sharded → replicated: all-gather | partial → sharded: reduce-scatter |
# | hybrid | sharded in a node, replicated between nodes | all-gather in the node | reduce-scatter in the node, all-reduce between nodes |
#
# The third row contains the other two. With a *shard group* and a *replicate group*, ZeRO-3 has every rank in the first
# and only itself in the second, and DDP the other way round. A collective in a group of one rank sends nothing. So one
# function with two groups is all three.
#
# torch has a place to put it. A **[parametrization](../docs/glossary.md#parametrization)**
# (`torch.nn.utils.parametrize`) replaces `module.weight` by a function of what is kept: whoever reads `module.weight`
# gets `forward(kept)`. No hook is needed: autograd records how the weight came about, and calls our backward when its
# gradient is there.
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
# ## Three engines
#
# Four ranks can be one shard group, or one replicate group, or a mesh of 2 × 2. Only the groups differ. `shard` gives
# every parameter of the model its parametrization, and the gradients are compared with those of one process that has
# the samples of all four ranks.


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
print("Gather, Sharded and shard:", lab.pull("lines", rank=0), "lines, docstrings included")

# %% tags=["nbval-check-output"]
if lab.predicted("20.1") and lab.predicted("20.2"):
    for way, (holds, sent, gathered, same) in table.items():
        print(f"{way:6} keeps {holds:9,} bytes of parameters, sends {sent:9,.0f};", end=" ")
        print(f"after forward {gathered:9,} more; gradients as of one process: {same}")

# %% [markdown]
# One function, three engines, and the numbers of one process up to rounding (gloo's reduce-scatter adds in an order of
# its own). Even the group of one rank makes a copy, which autograd keeps. And sharded, this sends *exactly what DDP
# sends*, 2Ψ(N-1)/N, and not the 3Ψ of stage 3. (Each collective counts as a ring sends it. gloo's own reduce-scatter
# writes twice that, as lesson 01 found.) What has been saved is the second gather, and the second prediction says who
# pays: 95 % of the full parameters stay in memory from their forward to their backward. This is FSDP2 with
# `reshard_after_forward=False`. Between steps it is ZeRO-3; in a step, at its peak, it isn't.
#
# ## Gather again
#
# To release a parameter after its forward, it must not be *kept*. Autograd lets us say what is kept in place of a
# tensor: `saved_tensors_hooks(pack, unpack)`. Where it wants to keep a gathered parameter, `pack` gives it the shard
# and how to gather, and in backward `unpack` gathers again. These two send the third Ψ. The rest finds out which
# parameter a tensor belongs to: by its storage, since what autograd keeps may be a view, such as a transposed matrix.


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
        self.kept.clear(), Again.made.clear()
        with saved_tensors_hooks(self.pack, self.unpack):
            return self.model(*args)


releases = Releases(shard(make_model(), Again, *MESHES["ZeRO-3"]))
releases(x, y).backward()
same_again = far_from_one(releases.model) < 1e-5
gathered = {"DDP": 0, "forty lines": table["ZeRO-3"][2]}  # and still held after forward
gathered["gather again"] = sum(releases.kept.values()) - activations

# %% [markdown]
# Beside it, the engine's `Zero3` and `DDP`, with a unit for each block. (`observed` measures a step with AdamW; its peak,
# on rank 0, is the allocator's.)


# %%
# %%ranks
from zerolab.lab import observed


def built(way):  # the engine, if there is one, and what to call
    if way in ("DDP", "Zero3"):
        zero = getattr(zerolab, way)(make_model(), units=[Block])
        return zero, zero.model
    if way == "forty lines":
        return None, shard(make_model(), MySharded, *MESHES["ZeRO-3"])
    return None, Releases(shard(make_model(), Again, *MESHES["ZeRO-3"]))


zero, model = built("Zero3")
loss = model(x, y)
gathered["Zero3"] = sum(unit.full.untyped_storage().nbytes() for unit in zero.units)
loss.backward()
WAYS = "DDP", "forty lines", "gather again", "Zero3"
seen = {
    way: observed.observe(built, way, x, y) | {"gathered": gathered[way]} for way in WAYS
}

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
# (those 0.3 MB): the head and the last norm, which belong to the root, are gathered twice here, and the blocks' biases
# only once, since backward never asks for them. The peak falls by less than was gathered; how much varies from run to
# run by up to a megabyte, as gloo's threads let go of memory a moment late.
#
# The bill is in the column of collectives: three or four for every parameter (one is the all-reduce in a group of one
# rank), and each is waited for where it is made. `Zero3` needs 14, and starts a gather while the block before is still
# computing (lesson 09). Nothing in the forty lines knows which parameter comes next.
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
# one and half of the other. Nobody is told. In backward it is the same with a parameter that one rank didn't use: its
# reduce-scatter meets another's. `Zero3` knows the units and their order, so it can compare what the ranks do, and
# refuse. That is a good part of its lines.
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
# Hooks are Python that runs *between* operations, and there a compiled graph has to end. A redistribution is
# operations, and they are in the graph. So the compiler sees what hooks have to guess: every collective of a step, and
# all that is computed between it and its use. It may move them and merge them. Here torch captures a small GPT on two
# ranks as one graph, and its own pass puts the collectives into buckets of a quarter of a megabyte. Then the same GPT
# with `Zero3`. (This cell takes a while.)


# %%
# %%ranks 0,1
from zerolab.lab import compiled

small = place(make_model(layers=2, width=64), of_two, [Shard(0)])
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
# pass turned one collective for each parameter into a few large ones: the units of our engine, found by a program. How
# large? torch's own limit is 2,000 MB, which here is one bucket of everything: one message, and all parameters full at
# once, so at the peak ZeRO-3 saves no more than ZeRO-2. What a better choice is worth shows on GPUs only: here the cores
# that would compute meanwhile are those that send (lesson 09). The paper reports, with Llama 3 up to 405B and together
# with other techniques of distributed training, up to 28.54 % less memory and up to 68.67 % more throughput than FSDP2
# without a compiler (arXiv 2411.00284, abstract).
#
# | | forty lines and a compiler | hooks |
# |---|---|---|
# | sees | the whole step, before it runs | what has happened so far |
# | memory | keeps what it gathered, unless the recomputation is *marked* (SimpleFSDP: selective checkpointing) | releases a storage that autograd still points to |
# | buckets, prefetch | merges and moves collectives in the graph | units, and the order of the step before |
# | what varies: routing, unused parameters | another graph, and on each rank its own; nothing compares them | compares the ranks, and says who differs |
# | cost | compiling, again for each new shape | host time in every step |
#
# ## Sharding that changes the mathematics
#
# So far a cut could lie anywhere, because AdamW updates each element from its own gradient. Now let Adam's two averages
# be stored in 8 bits instead of 32, by block-wise **[quantisation](../docs/glossary.md#quantisation)** (Dettmers et
# al., arXiv 2110.02861). In -127 ... 127 one large value would round all others to 0. So a tensor is cut into
# **blocks**, here of 256 elements, each with a scale of its own: the block's largest absolute value becomes 127. (The
# paper's codes are not evenly spaced.)
#
# How many bytes of optimizer state does a parameter cost? (It was 8. A scale is a float32.)

# %%
lab.predict("20.3", 2 * (1 + 4 / 256))  # bytes per parameter

# %% [markdown]
# ## Write: where to cut
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
# And the optimizer, in thirty lines with its `quantise`. It stores the root of the second average: its range is
# narrower. Where that root was rounded to 0 and the gradient is small, m / root has no bound, so `clamp` lets no
# element move by more than the learning rate.


# %%
# %%ranks
import torch.nn.functional as F

cuts = lab.mine("20.2")


def quantise(x, block):  # (n,) -> codes (n,), and a scale for each block
    rows = F.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = rows.abs().amax(dim=1) / 127
    codes = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
    return codes.flatten()[: x.numel()], scales


def dequantise(codes, scales, block):
    return codes.float() * scales.repeat_interleave(block)[: codes.numel()]


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


model = small_model()
adam, state_bytes = Adam8(model.parameters()), 0
model(x, y).backward()
adam.step()
for state in adam.state.values():
    state_bytes += sum(value.nbytes for key, value in state.items() if key != "t")
small_psi = sum(param.numel() for param in small_model().parameters())

# %%
lab.measured("20.3", lab.pull("state_bytes", rank=0) / lab.pull("small_psi", rank=0))
lab.reveal("20.3")

# %% [markdown]
# A quarter of the bytes. Now on 2 and 3 ranks. `Ragged` is ZeRO-1 with borders that may lie anywhere: a rank updates its
# pieces of the parameters, and sends them to the others.


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
        trial.append((N, name, others))

# %%
import itertools

for N, name, others in lab.pull("trial", rank=0):
    print(f"{N} ranks, {name:18} {others:7,} parameters differ")
    assert (others == 0) == (name == "cut between blocks")
ways = {}
for name, borders in lab.pull("borders_of", rank=0)[3].items():
    lengths = [b - a for a, b in itertools.pairwise(borders)]
    ways[name] = [plots.Piece(length, owner) for owner, length in enumerate(lengths)]
plots.show(plots.shard_map(ways, ranks=3))

# %% [markdown]
# One or two borders in the middle of a block, and after four steps most parameters differ: a border moves all
# blocks behind it in its parameter, and the next forward carries the difference everywhere. This is Adam with other
# blocks, and the loss will not complain. But the run depends on how many ranks it has, and a checkpoint of codes and
# scales from 3 ranks is no state at all for 2. Cut between blocks, every rank count gives the bits of one process (since
# `zerolab.DDP` adds gradients in the order of the ranks, as one process does), and a shard differs from an equal share
# by less than a block: too little to be seen in the first two rows of the picture.
#
# So a layout has a **[granularity](../docs/glossary.md#granularity)**: the number of elements that must stay together.
# For AdamW it is 1, for this Adam 256. For Muon, which orthogonalises matrices, it is a whole parameter (lesson 04): the
# last row of the picture, as long as parameters stay in order. `OwnerOptimizer` may deal them out in any order, and
# comes closer to even shares. Block-wise formats of *weights*, such as tiles of 128 × 128, want whole groups of rows.
#
# And the course's engine? Its layout takes a granularity, and the optimizer has to be declared: what is a block, and
# which of its state is per block. What happens if it isn't? And what does another number of ranks read from a
# checkpoint?

# %%
# %%ranks
group, told, scales = groups[3], {}, {}


def scales_of(model, adam):  # this rank's, of the first average
    states = [adam.state[param] for param in model.parameters() if adam.state[param]]
    assert all(state["m"].dtype == torch.int8 for state in states)
    return [
        scale for state in states for scale in zerolab.to_local(state["m_scale"]).tolist()
    ]


def in_zero3(**options):
    model = small_model()
    zero = zerolab.Zero3(model, units=[Block], group=group, **options)
    adam = Adam8(model.parameters())
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


one_process = by_one_process(3)
if rank < 3:
    try:
        in_zero3()
    except RuntimeError as error:
        told["Adam8"] = str(error).split(". ")[0]
    zerolab.declare_blockwise(Adam8, 256, per_block=["m_scale", "root_scale"])
    told["granularity=256"] = in_zero3(granularity=256)
if rank < 2:
    model = small_model()
    zero = zerolab.Zero3(model, units=[Block], group=groups[2], granularity=256)
    adam = Adam8(model.parameters())
    zerolab.load(f"{folder}/three", zero, adam)
    scales[2] = scales_of(model, adam)

# %% tags=["nbval-check-output"]
for way, said in lab.pull("told", rank=0).items():
    print(f"{way}: {said}")

of_ranks = lab.pull("scales")
found = {N: sorted(scale for of in of_ranks[:N] for scale in of[N]) for N in (2, 3)}
print("scales saved by 3 ranks and loaded by 2: equal:", found[2] == found[3])

# %% [markdown]
# Undeclared, it is refused, instead of silently training another model. With a granularity nothing more travels than
# without, at the price of padding: less than a block for each parameter, less than a block for each rank and unit. The
# scales of 3 ranks are cut anew for 2 and stay what they are, and the codes stay in 8 bits. (`OwnerOptimizer` needs no
# declaration, since an owner sees all of its parameter. But gradients and parameters travel to the owner, and parameters
# back.)
#
# ## In production
#
# FSDP2's DTensors are cut evenly by rows, `Shard(0)`: a border between two rows may be the middle of a block as well.
# **RaggedShard** (veScale-FSDP, arXiv 2602.22437) makes `cuts` a placement: a DTensor in units of a chosen granularity,
# with uneven shards. bitsandbytes has the 8-bit Adam in wide use. It leaves tensors of fewer than 4,096 elements in 32
# bits (its documentation, 0.50.1), and of a sharded parameter it sees a rank's part: one more thing that may change
# with the number of ranks. Before you combine the two, ask where the borders lie.
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
# 4. It sees every collective and all computing between, so it can merge them and move them ahead without hints. A
#    larger bucket has fewer messages, and more full parameters alive at once.
# 5. AdamW updates an element from its own gradient, wherever it is. A block's scale depends on all its elements, and a
#    border within it makes other blocks, so other roundings.
# 6. A border moves back by less than g elements, so a shard differs from an equal one by less than g. It matters when g
#    is not small beside Ψ/N: with whole matrices of a large model, on many ranks, some have two and some none.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
