# %% [markdown]
# # 04 · ZeRO-1: shard the optimizer
#
# **The question.** Four GPUs train with data parallelism. Each keeps Adam's two averages for *all* parameters: 8 of the 16
# bytes that a parameter costs (lesson 02). All four keep the same numbers, bit for bit. Who needs the copies?
#
# Nobody. Let each rank update one quarter of the model. It then needs the optimizer state of that quarter and nothing more.
# That is ZeRO-1 (*zero redundancy optimizer*, stage 1). For 7.5 billion parameters in float32 on 64 GPUs, it frees 59 of
# the 120 GB on every GPU. Two questions remain: what does it cost in traffic, and does the model still learn the same? You
# will answer the first to the byte and the second to the bit.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, batch, text
from zerolab.measure import holdings, ledger, model_states, timeline

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# Everything is in float32, the optimizer is Adam, and there are N = 4 ranks. How many bytes does *each rank* save when they
# divide the optimizer state among themselves? (Adam's step counters stay on every rank: 4 bytes for each of the 53
# tensors.)

# %%
lab.predict("04.1", 8 * 867_072 * 3 // 4)  # bytes

# %% [markdown]
# Now the traffic. DDP all-reduces the gradients. ZeRO-1 sends fewer gradients, but it has to send parameters after the
# step: rank 0 has the new values of its quarter, and everyone needs them. How many bytes does a rank send in a step, as
# a multiple of DDP's? (1.5 means half as much again.)

# %%
lab.predict("04.2", 1.0)  # × DDP's bytes

# %% [markdown]
# ## Half an all-reduce
#
# Call rank r's quarter its **[shard](../docs/glossary.md#shard)**. Rank r updates only this shard, so it needs only this shard of the mean gradient, and
# no other rank needs it. You know the collective that sums and leaves each rank one part: the **[reduce-scatter](../docs/glossary.md#reduce-scatter)**, the first
# half of an all-reduce. As in lesson 01, we make it of a sum and an all-to-all, in which every rank sends shard r to
# rank r:

# %%
# %%ranks
x = torch.arange(1.0, 9) * 10**rank  # 8 elements on 4 ranks: shards of 2
start = x.tolist()
received = torch.empty_like(x)
dist.all_to_all_single(received, x)  # every rank sends its shard r to rank r
middle = received.tolist()

# %%
title = "all-to-all: every rank sends shard r to rank r"
plots.show(plots.before_after(title, lab.pull("start"), lab.pull("middle")))

# %% [markdown]
# The rest needs no network. Write `reduce_scatter_mean(flat, rank, world_size)`, which returns the mean of this rank's
# shard.

# %%
# %%exercise 04.1

# %%
lab.check("04.1")

# %% [markdown]
# Now a real gradient. Put end to end, the four shards must equal the mean that an all-reduce gives, for half the bytes.

# %%
# %%ranks
from zerolab.lab import calls

reduce_scatter_mean = lab.mine("04.1")
model = make_model()
model(*batch(words, rank, 0, 8, 64)).backward()
# Ψ is divisible by 4, so there is no padding.
flat = torch.cat([param.grad.flatten() for param in model.parameters()])
with calls() as first_half:
    shard = reduce_scatter_mean(flat, rank, world_size)
with calls() as both_halves:
    dist.all_reduce(flat)
mean = flat.view(world_size, -1)[rank] / world_size
sent, equal = (first_half.sent, both_halves.sent), torch.allclose(shard, mean, atol=1e-7)

# %% tags=["nbval-check-output"]
first_half, both_halves = lab.pull("sent", rank=0)
print(f"sent by each rank: reduce-scatter {first_half:,.0f} bytes,", end=" ")
print(f"all-reduce {both_halves:,.0f}")
print("every rank has the mean of its shard:", all(lab.pull("equal")))

# %% [markdown]
# ## ZeRO-1 as a class
#
# In this course's engine every stage is a class, and ZeRO-1 overrides three methods of DDP (lesson 03). The engine turns
# each block of the model into a **unit**, and everything outside of the blocks into one more, the root: one flat buffer
# `unit.full` of N·S elements, cut into N shards of S elements each. Here is a toy unit of three parameters a, b and c, cut for four ranks:

# %%
import torch
from zerolab import Layout

three = [("a", torch.empty(5)), ("b", torch.empty(2, 2)), ("c", torch.empty(3, 2))]
layout = Layout(three, world_size=4)
plots.show(plots.flat_storage(layout))

# %% tags=["nbval-check-output"]
flat = torch.arange(float(layout.size))
shard = layout.shard(flat, 1)
slices = [part.flatten().tolist() for part in layout.slices(shard, 1)]
print("rank 1's shard:", shard.tolist(), "its slices of a, b and c:", slices)

# %% [markdown]
# The cuts ignore where a parameter begins or ends. The part of a parameter that lies in a rank's shard is the rank's
# **[slice](../docs/glossary.md#slice)** of it. Rank 1 has the end of a, most of b and nothing of c. `layout.shard` and `layout.slices` return views, not
# copies. Every unit has a layout of its own, `unit.layout`, which may leave a few elements free between two parameters.
#
# You override three methods:
#
# - `optimizer_params(unit)`, called once: returns what the optimizer updates. In DDP that is the full parameters; now it is
#   this rank's slice of each. Outside forward and backward the model shows these slices as its parameters, so an optimizer
#   that is given `model.parameters()` sees nothing else.
# - `reduce(unit)`, called in backward: takes this rank's gradient from `unit.bucket.full` and leaves the mean in
#   `unit.bucket.grad`. In DDP that takes an all-reduce; now the mean of the shard is enough.
# - `after_step(unit)`, called after the step, which has changed this rank's shard, `unit.master`. Forward reads
#   `unit.full`, where the other ranks' shards are now old.
#
# `self.comm` has the collectives. `reduce_scatter(output, input, unit.name)` leaves the mean of your shard in `output`, as
# in 04.1. `all_gather(output, input, unit.name)` puts every rank's shard in its place. Both only *start* the transfer, and
# return something with a `wait()`. (`unit.full` may be bfloat16 where `unit.master` is float32; `.to(unit.full.dtype)` is
# right in both cases.)

# %%
# %%exercise 04.2

# %%
lab.check("04.2")

# %% [markdown]
# ## Measure
#
# Train five steps on real text, three times: with DDP, with the package's ZeRO-1 using your methods, and with the package's
# own. `ledger` records every collective, `model_states` counts the bytes of live storages, and `holdings` finds which
# elements a rank holds. Inside `with zero.full_parameters():` every rank sees the full parameters again.

# %%
# %%ranks
Zero1 = lab.mine(zerolab.Zero1)


def train(stage, steps=5):
    zero = stage(make_model(), units=[Block])
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            loss = zero.model(*batch(words, rank, step, 8, 64))
            loss.backward()
            held, held_where = model_states(zero, adam), holdings(zero, adam)
            adam.step()
        losses.append(loss.item())
    with zero.full_parameters():
        weights = [param.detach().clone() for param in zero.model.parameters()]
    found = {"zero": zero, "book": book, "held": held, "where": held_where}
    return found | {"weights": weights, "losses": losses}


ddp, sharded, package = train(zerolab.DDP), train(Zero1), train(zerolab.Zero1)
held, where = (ddp["held"], sharded["held"]), (ddp["where"], sharded["where"])
sent = ddp["book"].moved, sharded["book"].moved


def equal(one, other):
    weights = all(map(torch.equal, one["weights"], other["weights"]))
    return weights and one["losses"] == other["losses"]


same = {"DDP": equal(sharded, ddp), "package": equal(sharded, package)}

# %%
before, after = lab.pull("held", rank=0)
lab.measured("04.1", before["optimizer"] - after["optimizer"])
lab.reveal("04.1")

# %% tags=["nbval-check-output"]
if lab.predicted("04.1"):
    psi, tensors, ranks = 867_072, 53, 4
    for rank, (before, after) in enumerate(lab.pull("held")):
        states = before["optimizer"], after["optimizer"]
        print("rank {}: optimizer {:,} -> {:,} bytes".format(rank, *states))
        assert after["optimizer"] == 8 * psi // ranks + 4 * tensors
        assert after["parameters"] == before["parameters"] == 4 * psi
    if after["gradients"] < before["gradients"]:
        print("your reduce() gives the shard its own memory: that is ZeRO-2, see lesson 05")

# %%
if lab.predicted("04.1"):
    both = [list(stage) for stage in zip(*lab.pull("where"))]
    plots.show(plots.who_holds_what(both))

# %% [markdown]
# Each rank holds a piece *of every unit*, because every unit is cut separately. Together the four pieces are exactly one
# copy of the optimizer state. Not a byte is left to explain: 8Ψ/4, plus 212 bytes of step counters on every rank.
#
# Now the traffic.

# %%
ddp_sent, zero_sent = lab.pull("sent", rank=0)
lab.measured("04.2", zero_sent / ddp_sent)
lab.reveal("04.2")

# %%
# %%ranks
by_op = {}
for name, run in (("DDP", ddp), ("Zero1", sharded)):
    for call in run["book"].calls:
        if not call.control:  # control: a few bytes, with which ranks check that they agree
            by_op[name, call.op] = by_op.get((name, call.op), 0) + call.sent

# %% tags=["nbval-check-output"]
if lab.predicted("04.2"):
    by_op = lab.pull("by_op", rank=0)
    for stage in ("DDP", "Zero1"):
        first, second = by_op[stage, "reduce_scatter"], by_op[stage, "all_gather"]
        together = f"{first:,} + all-gather {second:,} = {first + second:,}"
        print(f"{stage:6} reduce-scatter {together} bytes")

# %% [markdown]
# The same two halves, the same bytes. (The engine's DDP builds its all-reduce from these two, so that sums keep their
# order.) In DDP the all-gather follows the reduce-scatter at once, and carries **gradients**. In ZeRO-1 the optimizer's
# step comes *between* the halves, and the all-gather carries **parameters**. That is the whole trick. And the numbers?

# %% tags=["nbval-check-output"]
same = lab.pull("same")
print("all losses and parameters after 5 steps, bit for bit:")
print("this ZeRO-1 equals DDP:", all(of["DDP"] for of in same))
print("this ZeRO-1 equals the package's:", all(of["package"] for of in same))

# %% [markdown]
# They must be equal. Adam computes each element from that element's gradient, average and average square, on whatever
# rank that happens. The same is true of SGD, AdamW, Adagrad and RMSprop.
#
# ## What cannot be cut
#
# Not all optimizers work element by element. Muon averages the gradient of a matrix, and then makes all singular values
# of that average nearly equal, so that the update is about as large in every direction. Each element of the result
# depends on the entire matrix. What comes out if each rank hands Muon the rows that it has?

# %%
# %%ranks
from torch.optim import Muon


def first_step(gradient):  # where Muon goes from zero
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient
    Muon([param], lr=1.0, weight_decay=0.0).step()
    return param.detach()


gradient = model.blocks[0].mlp.down.weight.grad  # 128 x 512, from the real gradient above
dist.all_reduce(gradient)
right = first_step(gradient).chunk(world_size)[rank]  # 32 rows of the right step
alone = first_step(gradient.chunk(world_size)[rank])  # the step of these rows by themselves
off = ((alone - right).norm() / right.norm()).item()

zero = zerolab.Zero1(make_model(), units=[Block])
matrices = [param for param in zero.model.blocks.parameters() if param.dim() == 2]
zero.model(*batch(words, rank, 0, 8, 64)).backward()
try:
    Muon(matrices, lr=0.02).step()
except RuntimeError as error:
    refused = str(error)

# %%
print("off by, on each rank:", *(f"{100 * off:.0f} %" for off in lab.pull("off")))
print(lab.pull("refused", rank=0))

# %% [markdown]
# Rows alone give a step in a wrong direction, and no error would say so. So stages 1 to 3 refuse Muon, and name a way
# out. `OwnerOptimizer` does not cut: each matrix has an
# *owner*, the rank that updates all of it. In a step, the others send the owner their slices of the gradient and of the
# matrix. It runs Muon, keeps Muon's state, and sends the new slices back.


# %%
# %%ranks
def with_muon(stage, build):
    zero = stage(make_model(), units=[Block])
    muon = build([param for param in zero.model.blocks.parameters() if param.dim() == 2])
    for step in range(3):
        zero.model(*batch(words, rank, step, 8, 64)).backward()
        muon.step()
        zero.model.zero_grad()
    with zero.full_parameters():
        weights = [param.detach().clone() for param in zero.model.parameters()]
    state = [value for kept in muon.state.values() for value in kept.values()]
    return weights, sum(value.nbytes for value in state)


def owners(matrices):
    return zerolab.OwnerOptimizer(matrices, Muon, lr=0.02)


replicated, full_state = with_muon(zerolab.DDP, lambda matrices: Muon(matrices, lr=0.02))
owned, state = with_muon(zerolab.Zero1, owners)
identical = all(map(torch.equal, replicated, owned))

# %% tags=["nbval-check-output"]
same = all(lab.pull("identical"))
print("three steps of Muon, in DDP and with owners in Zero1, bit for bit:", same)
for rank, (full, own) in enumerate(zip(lab.pull("full_state"), lab.pull("state"))):
    print(f"rank {rank}: Muon's state {full:,} bytes in DDP, {own:,} with owners")

# %% [markdown]
# The state is shared out as evenly as whole matrices allow. `OwnerOptimizer` works in every stage, and for Shampoo, SOAP
# and LAMB as well: see [Muon](../docs/muon.md). From here on the optimizer is Adam again.
#
# ## Where the peak is
#
# What has to fit is the *[peak](../docs/glossary.md#peak)* of a step. `timeline` records every buffer of one step from allocation to release (lesson
# 02), so you can see whether the saving counts when it matters:


# %%
# %%ranks
def record(stage):
    zero = stage(make_model(), units=[Block])
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(2):  # the first step creates the optimizer state
        with timeline(zero, adam) as line:
            zero.model(*batch(words, rank, step, 8, 64)).backward()
            adam.step()
            adam.zero_grad()
    return line


lines = record(zerolab.DDP), record(Zero1)

# %%
lines = lab.pull("lines", rank=0)
if lab.predicted("04.1"):
    plots.show(plots.skyline(lines, learner=[False, lab.passed("04.2")]))

# %%
from zerolab.measure import KINDS

if lab.predicted("04.1"):
    before, after = (line.by_kind() for line in lines)
    print(f"{'at the peak':20}{'DDP':>12}{'ZeRO-1':>12}{'saved':>12}")
    for kind in KINDS:
        if before[kind] or after[kind]:
            saved = before[kind] - after[kind]
            print(f"{kind:20}{before[kind]:>12,}{after[kind]:>12,}{saved:>12,}")
    saved = lines[0].peak - lines[1].peak
    print(f"{'total':20}{lines[0].peak:>12,}{lines[1].peak:>12,}{saved:>12,}")
    assert sum(before.values()) == lines[0].peak and sum(after.values()) == lines[1].peak
    assert before["optimizer"] - after["optimizer"] == 8 * 867_072 * 3 // 4

# %% [markdown]
# The green band lasts for the entire step. So wherever the peak comes, it falls by as much as the band does. What is left:
#
# - *parameters* are 4Ψ, and *optimizer* is 8Ψ/4 and the 212 bytes;
# - *activations* are what forward leaves for backward (lesson 02 takes them apart). Every rank has its own, and no stage of
#   ZeRO touches them;
# - *gradients* have only begun to arrive: these are the buckets of the last block and of the root (the unit for everything
#   outside the blocks), where backward begins. They grow to 4Ψ while activations shrink, and are the subject of lesson 05;
# - *other* is the batch: 8 × 65 numbers of 8 bytes.
#
# ## In production
#
# torch has ZeRO-1 as an optimizer that wraps another one: `ZeroRedundancyOptimizer`, used next to ordinary DDP. It never
# cuts a tensor. It assigns the tensors to the ranks, largest first, each to the rank that has the least so far. DDP still
# all-reduces every gradient, and after the step each rank broadcasts the tensors it has updated. As a multiple of DDP's
# bytes, how much does it send? (A broadcast along a ring costs each rank 3/4 of the tensor, on average.) And think ahead:
# what will happen with a vocabulary of 4,096, where two tensors hold most of the parameters?

# %%
lab.predict("04.3", 1.5)  # × DDP's bytes

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def state_of(optimizer):
    return sum(value.nbytes for kept in optimizer.state.values() for value in kept.values())


def with_torch(model, steps=2):
    parallel = DistributedDataParallel(model)
    adam = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        with calls() as backward:
            parallel(*batch(words, rank, step, 8, 64)).backward()
        with calls() as updating:
            adam.step()
    # A broadcast along a ring: all ranks but the last pass it on, 3/4 of it on average.
    sent = backward.sent, updating.payload * 3 / 4
    return {"state": state_of(adam.optim), "sent": sent}


def with_zerolab(model, steps=2):
    zero = Zero1(model, units=[Block])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        model(*batch(words, rank, step, 8, 64)).backward()
        adam.step()
    with zero.full_parameters():
        weights = [param.detach().clone() for param in model.parameters()]
    return {"state": state_of(adam), "weights": weights}


def large_vocabulary():
    torch.manual_seed(0)
    return GPT(layers=2, width=128, vocabulary=4096)


# %%
# %%ranks
model = make_model()
torchs, ours = with_torch(model), with_zerolab(make_model())
pairs = zip(model.parameters(), ours["weights"], strict=True)
differ = max((a - b).abs().max().item() for a, b in pairs)
uneven = with_torch(large_vocabulary())["state"], with_zerolab(large_vocabulary())["state"]
balance = {"small": (torchs["state"], ours["state"]), "large": uneven}

# %%
in_backward, in_step = lab.pull("torchs", rank=0)["sent"]
lab.measured("04.3", round((in_backward + in_step) / ddp_sent, 3))
lab.reveal("04.3")

# %% tags=["nbval-check-output"]
everyone = lab.pull("balance")
if lab.predicted("04.1"):
    for model in ("small", "large"):
        for number, name in enumerate(("ZeroRedundancyOptimizer", "flat shards")):
            held = [f"{rank[model][number]:>10,}" for rank in everyone]
            print(f"{model} vocabulary, {name:23}", *held, "bytes")
print("the parameters agree to 0.0001:", max(lab.pull("differ")) < 1e-4)

# %% [markdown]
# The all-reduce is still there, 2Ψ(N-1)/N, and the broadcasts add half as much again: **1.5 times**. That is the price of
# wrapping DDP from outside. With the small vocabulary, assigning uncut tensors comes out nearly even. With the large one,
# the token embedding and the head are one tensor each, and neither can be cut. The fullest rank decides whether a run fits.
#
# DeepSpeed's stage 1 cuts flat, as you did, and FSDP2 cuts each parameter along its first dimension.
#
# (The parameters of `ZeroRedundancyOptimizer` and yours differ in their last digits, because torch's DDP adds the ranks'
# gradients in another order.)
#
# ## On trial
#
# > "Splitting by layer, by block or dynamically are equivalent choices."
#
# Here are four ways to deal the GPT with the large vocabulary out to 4 ranks. A *piece* is whatever has to stay
# together. (Greedily, each tensor goes to the rank that has the least so far: that is what "dynamically" comes to.)

# %%
from zerolab.lab import GPT, ways_to_deal
from zerolab.lab.plots import largest_share, shard_map

RANKS = 4
model = GPT(layers=2, width=128, vocabulary=4096)
psi = sum(param.numel() for param in model.parameters())
ways = ways_to_deal(model, RANKS)

# %% tags=["nbval-check-output"]
plots.show(shard_map(ways, RANKS))

# %% tags=["nbval-check-output"]
for name, pieces in ways.items():
    state = largest_share(pieces, RANKS) * 8 * psi / RANKS
    print(f"{name:18} Adam's state on the fullest rank: {state:>12,.0f} bytes")

# %% [markdown]
# **Verdict: false.** Every way is right, in the sense that the numbers come out the same. But the fullest rank decides,
# and by block, by layer or by tensor it holds far more than its share here. Dealing out tensors greedily cannot be even
# if a tensor is larger than an even share; here two are. Flat cuts are even for any model, up to a few elements of
# padding.
#
# Uneven pieces cost traffic as well. Reduce-scatter and all-gather expect the same number of elements from every rank.
# Either the pieces are padded to the largest, and the network carries 1.44 to 1.76 times as much. Or they travel by slower
# means, like the broadcasts above.
#
# > "Gradients are gathered on a main GPU, which updates the model."

# %%
# %%ranks
params = sharded["zero"].model.parameters()
updated = sum(zerolab.to_local(param).numel() for param in params)

# %% tags=["nbval-check-output"]
if lab.predicted("04.2"):
    for rank, (_, sent) in enumerate(lab.pull("sent")):
        elements = lab.pull("updated", rank=rank)
        print(f"rank {rank} updates {elements:,} elements and sends {sent:,} bytes a step")

# %% [markdown]
# **Verdict: false.** All ranks do the same work. A main GPU would be the root of lesson 01, through which everything
# has to pass.

# %% [markdown]
# ## Your engine on trial
#
# Your stage 1 goes through six of the promises of `zerolab trial`. Two of them look at the parts that
# only sharded engines have: a norm of which each rank has a part, and a checkpoint that another number of ranks loads
# ([all of them](../docs/trial.md), and what PyTorch's own engines make of them).

# %% tags=["nbval-check-output"]
import zerolab

promises = [
    "plain", "clip by the 2-norm", "groups and a schedule", "resumed by more",
    "held after backward", "moved in a step",
]
lab.trial(zerolab.Zero1, *promises)

# %% [markdown]
# ## Questions
#
# 1. Why can ZeRO-1 skip the second half of DDP's all-reduce, and what must it send instead?
# 2. How much more does ZeRO-1 save on 1,000 GPUs than on 64, for 7.5 billion parameters in float32?
# 3. You forget the all-gather after the step. Does the run fail?
# 4. Gradients are to be clipped to a global norm of 1. A rank has a quarter of them. What must it ask the others for?
# 5. Why does it not matter that a shard boundary runs through the middle of a matrix? When would it?
# 6. A run on 4 ranks is to continue on 8. What has to happen to the optimizer state?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. A rank updates only its shard, so it needs only that shard of the mean gradient: the reduce-scatter. Afterwards
#    everyone needs all the new parameters. That takes an all-gather, of as many bytes as the all-gather of gradients that
#    was skipped.
# 2. Next to nothing: 8Ψ/64 is 0.94 GB, and 8Ψ/1000 is 0.06 GB. What is left, 8Ψ = 60 GB, does not shrink.
# 3. No. Each rank goes on with new values in its own shard and old values elsewhere. The models drift apart, and training
#    gets worse without an error. The check of 04.2 finds this by comparing weights, not losses.
# 4. For their sums of squares: an all-reduce of one number. (`zero.clip_grad_norm_` does it.)
# 5. Adam treats every element by itself. It matters for optimizers that look at a matrix (Muon) or a layer (LAMB) in one
#    piece: there a parameter needs an owner.
# 6. It has to be cut again: the boundaries of shards for N = 4 and N = 8 differ. `zerolab.load` does this. It reads what
#    `zerolab.save` wrote, at any number of ranks and in any stage.

# %%
lab.stop()
lab.progress()
