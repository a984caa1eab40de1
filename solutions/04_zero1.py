# %% [markdown]
# # 04 · ZeRO-1: shard the optimizer
#
# **The question.** Four GPUs train with data parallelism. Each keeps Adam's two averages of *all* parameters: 8 bytes of the
# 16 that a parameter costs (lesson 02). And all four keep the same numbers, to the bit. Who needs the copies?
#
# Nobody. If rank 0 updates the first quarter of the model, rank 1 the second and so on, each needs the optimizer state of
# its quarter alone. That is ZeRO-1 (*zero redundancy optimizer*, stage 1). On 7.5 billion parameters and 64 GPUs it gives
# back 59 of 120 GB on every GPU, in exchange for two questions: what does it cost in traffic, and does the model still
# learn the same? You will answer both to the byte and to the bit.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
import torch.distributed as dist
import zerolab
from zerolab import lab
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block
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
# Everything in float32, the optimizer is Adam, and there are N = 4 ranks. How many bytes does *each rank* save when the optimizer
# state is shared out? (Adam's step counters, 4 bytes for each of the 53 tensors, stay on every rank.)

# %%
lab.predict("04.1", 8 * 867_072 * 3 // 4)

# %% [markdown]
# Traffic: DDP all-reduces the gradients. ZeRO-1 has to do with fewer gradients, but it must send parameters after the
# step: rank 0 has new values of the first quarter, and everyone needs them. How many times the bytes of DDP does a rank
# send in a step? (1.5 would be half as much again.)

# %%
lab.predict("04.2", 1.0)

# %% [markdown]
# ## Half an all-reduce
#
# Rank r updates quarter r only, its **shard**. So of the mean gradient it needs quarter r, and nobody else does. You know
# the collective that adds up and leaves each rank one part: the **reduce-scatter**, the first half of an all-reduce.

# %%
# %%ranks
x = torch.arange(1.0, 9) * 10**rank  # 8 elements on 4 ranks: shards of 2
start = x.tolist()
received = torch.empty_like(x)
dist.all_to_all_single(received, x)  # shard r of everyone goes to rank r
middle = received.tolist()

# %%
title = "all-to-all: everyone's shard r to rank r"
plots.show(plots.before_after(title, lab.pull("start"), lab.pull("middle")))

# %% [markdown]
# What is left to do needs no network. Write `reduce_scatter_mean(flat, rank, world_size)`: the mean of this rank's shard.

# %%
# %%exercise 04.1

# %%
lab.check("04.1")

# %% [markdown]
# On a real gradient: your shards, put end to end, must be what an all-reduce gives, for half of its bytes.

# %%
# %%ranks
from zerolab.lab.ranks.calls import calls

reduce_scatter_mean = lab.mine("04.1")
model = make_model()
model(*batch(words, rank, 0, 8, 64)).backward()
# Ψ divides by 4, so there is no padding.
flat = torch.cat([param.grad.flatten() for param in model.parameters()])
with calls() as half:
    shard = reduce_scatter_mean(flat, rank, world_size)
with calls() as whole:
    dist.all_reduce(flat)
mean = flat.view(world_size, -1)[rank] / world_size
sent, equal = (half.sent, whole.sent), torch.allclose(shard, mean, atol=1e-7)

# %%
# NBVAL_CHECK_OUTPUT
half, whole = lab.pull("sent", rank=0)
print(f"reduce-scatter: {half:,.0f} bytes sent per rank, all-reduce: {whole:,.0f}")
print("every rank has the mean of its shard:", all(lab.pull("equal")))

# %% [markdown]
# ## ZeRO-1 as a class
#
# A stage of this course's engine is a class, and ZeRO-1 changes three methods of DDP (lesson 03). The engine keeps each block
# of the model as a **unit**: one flat buffer `unit.whole` of N·S elements, which cuts into N shards of S elements. Here is a
# toy unit of three parameters, a, b and c, cut for four ranks:

# %%
import torch
from zerolab.engine.layout import Layout

three = [("a", torch.empty(5)), ("b", torch.empty(2, 2)), ("c", torch.empty(3, 2))]
layout = Layout(three, world_size=4)
plots.show(plots.flat_storage(layout))

# %%
# NBVAL_CHECK_OUTPUT
flat = torch.arange(float(layout.size))
shard = layout.shard(flat, 1)
slices = [part.flatten().tolist() for part in layout.slices(shard, 1)]
print("rank 1's shard:", shard.tolist(), "its slices of a, b and c:", slices)

# %% [markdown]
# The cuts do not ask where a parameter begins or ends. What of a parameter lies in a rank's shard is the rank's **slice** of it:
# rank 1 has the end of a, most of b, and of c nothing. `layout.shard` and `layout.slices` give views, no copies. Every unit
# has a layout of its own, `unit.layout`. The three methods:
#
# - `optimizer_params(unit)`, once: what the optimizer is given. In DDP all parameters; now this rank's slice of each.
# - `reduce(unit)`, in backward: leaves the mean in `unit.grad`. In DDP an all-reduce; now the shard alone.
# - `after_step(unit)`: the step has changed this rank's shard, `unit.master`. Forward reads `unit.whole`, in which the
#   other ranks' shards are old.
#
# `self.comm` has the collectives: `reduce_scatter(output, input, unit.name)` leaves the mean of your shard, as in 04.1, and
# `all_gather(output, input, unit.name)` puts everyone's shards in their places. Both only *start*, and return something with
# a `wait()`. (`unit.whole` may be bfloat16 where `unit.master` is float32: `.to(unit.whole.dtype)` is right for both.)

# %%
# %%exercise 04.2

# %%
lab.check("04.2")

# %% [markdown]
# ## Measure
#
# Five steps of training on real text: DDP, ZeRO-1 with your methods over the package's, and the package's own. The ledger
# writes down every collective, `model_states` counts live storages, `holdings` looks up which elements a rank holds.

# %%
# %%ranks
Zero1 = lab.mine(zerolab.Zero1)


def train(stage, precision=None, steps=5):
    zero = stage(make_model(), units=[Block], precision=precision)
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
lab.measured("04.1", before["optimizer"] - after["optimizer"], "bytes")
lab.reveal("04.1")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("04.1"):
    psi, tensors, ranks = 867_072, 53, 4
    for rank, (before, after) in enumerate(lab.pull("held")):
        print(f"rank {rank}: optimizer {before['optimizer']:,} -> {after['optimizer']:,} bytes")
        assert after["optimizer"] == 8 * psi // ranks + 4 * tensors
        assert after["parameters"] == before["parameters"] == 4 * psi
    if after["gradients"] < before["gradients"]:
        print("reduce() puts the shard into memory of its own: that is ZeRO-2 already, see lesson 05")

# %%
if lab.predicted("04.1"):
    both = [list(stage) for stage in zip(*lab.pull("where"))]
    plots.show(plots.who_holds_what(both))

# %% [markdown]
# Each rank holds its piece *of every unit*, because every unit is cut by itself. Together the four pieces are the optimizer
# state once. Not a byte is left to explain: 8Ψ/4, and 212 bytes of step counters on every rank.
#
# Now the traffic.

# %%
ddp_sent, zero_sent = lab.pull("sent", rank=0)
lab.measured("04.2", zero_sent / ddp_sent, "× DDP's bytes")
lab.reveal("04.2")

# %%
# %%ranks
by_op = {}
for name, run in (("DDP", ddp), ("Zero1", sharded)):
    for call in run["book"].calls:
        if not call.control:  # by which the ranks make sure that they agree: a few bytes
            by_op[name, call.op] = by_op.get((name, call.op), 0) + call.sent

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("04.2"):
    by_op = lab.pull("by_op", rank=0)
    for stage in ("DDP", "Zero1"):
        first, second = by_op[stage, "reduce_scatter"], by_op[stage, "all_gather"]
        together = f"{first:,} + all-gather {second:,} = {first + second:,}"
        print(f"{stage:6} reduce-scatter {together} bytes")

# %% [markdown]
# The same two halves, the same bytes (the engine's DDP makes its all-reduce of them, so that sums keep their order). In DDP
# the all-gather follows the reduce-scatter at once, and carries **gradients**. In ZeRO-1 the optimizer's step stands
# *between* the halves, and what is gathered are **parameters**. That is the whole trick. And the numbers?

# %%
# NBVAL_CHECK_OUTPUT
same = lab.pull("same")
print("after 5 steps all losses and parameters, to the last bit:")
print("ZeRO-1 as above and DDP equal:", all(of["DDP"] for of in same))
print("ZeRO-1 as above and the package's equal:", all(of["package"] for of in same))

# %% [markdown]
# They must be: Adam computes each element from that element's gradient, average and square, wherever it happens. This is
# true of SGD, Adam, and their kin. An optimizer that looks at a whole matrix at once (Muon, Shampoo) or at the norm of a
# layer (LAMB) cannot be cut like that; the engine refuses those it knows.
#
# ## Where the peak is
#
# What has to fit is the *peak* of a step. `timeline` records every buffer of one step from its allocation to its release
# (lesson 02), so one can see when the saved bytes are missing:


# %%
# %%ranks
def record(stage):
    zero = stage(make_model(), units=[Block])
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(2):  # the first makes the optimizer state
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
from zerolab.measure.timeline import KINDS

if lab.predicted("04.1"):
    before, after = (line.by_kind() for line in lines)
    print(f"{'at the peak':20}{'DDP':>12}{'ZeRO-1':>12}{'less by':>12}")
    for kind in KINDS:
        if before[kind] or after[kind]:
            saved = before[kind] - after[kind]
            print(f"{kind:20}{before[kind]:>12,}{after[kind]:>12,}{saved:>12,}")
    saved = lines[0].peak - lines[1].peak
    print(f"{'together':20}{lines[0].peak:>12,}{lines[1].peak:>12,}{saved:>12,}")
    assert sum(before.values()) == lines[0].peak and sum(after.values()) == lines[1].peak
    assert before["optimizer"] - after["optimizer"] == 8 * 867_072 * 3 // 4

# %% [markdown]
# The green band is there during the whole step, so the peak falls by all of it, wherever it is. Of what is left,
#
# - *parameters* are 4Ψ, and the *optimizer* has 8Ψ/4 and the 212 bytes;
# - *activations* are what forward leaves for backward (lesson 02 takes them apart): all ranks have their own, and no stage of
#   ZeRO touches them;
# - *gradients* have only begun to come: the buckets of the last block and of the root, where backward begins. They grow to
#   4Ψ while activations go, and are the subject of lesson 05;
# - *other* is the text, 465 kB or so, the batch, and a few bytes in which the ranks agree on what they are about to send
#   (so it may differ by 20 bytes or so).
#
# ## In production
#
# torch has ZeRO-1 as an optimizer that wraps another: `ZeroRedundancyOptimizer`, beside an ordinary DDP. It never cuts a
# tensor; it deals whole tensors to the ranks, largest first, each to the rank that has the least so far. DDP still
# all-reduces everything, and after the step each rank broadcasts what it has updated. So how many times DDP's bytes does it send?
# And what will happen with a vocabulary of 4,096, where two tensors hold most of the parameters?

# %%
lab.predict("04.3", 1.5)

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zerolab.lab.ranks.calls import calls as watch


def state_of(optimizer):
    return sum(value.nbytes for kept in optimizer.state.values() for value in kept.values())


def with_torch(model, steps=2):
    parallel = DistributedDataParallel(model)
    adam = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        with watch() as backward:
            parallel(*batch(words, rank, step, 8, 64)).backward()
        with watch() as updating:
            adam.step()
    # A broadcast in a ring: all but the last rank pass it on, so each sends 3/4 of it on average.
    return {"state": state_of(adam.optim), "sent": (backward.sent, updating.payload * 3 / 4)}


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
lab.measured("04.3", round((in_backward + in_step) / ddp_sent, 3), "× DDP's bytes")
lab.reveal("04.3")

# %%
# NBVAL_CHECK_OUTPUT
everyone = lab.pull("balance")
if lab.predicted("04.1"):
    for model in ("small", "large"):
        for number, name in enumerate(("ZeroRedundancyOptimizer", "flat shards")):
            held = [rank[model][number] for rank in everyone]
            print(f"{model} vocabulary, {name:23}", *(f"{size:>10,}" for size in held), "bytes")
print("the same parameters to 0.0001:", max(lab.pull("differ")) < 1e-4)

# %% [markdown]
# The all-reduce stays, 2Ψ(N-1)/N, and the broadcasts come on top, half as much again: **1.5 times**. It is the price of being a
# wrapper around DDP. With the small vocabulary dealing whole tensors is nearly even; with the large one the token embedding
# and the head are one tensor each, and cannot be cut. What decides whether a run fits is the fullest rank.
#
# DeepSpeed's stage 1 and FSDP cut as you did, flat or along the first dimension. (Parameters differ in the last digits here,
# since DDP's ring adds the ranks in another order.)
#
# ## On trial
#
# > "Splitting by layer, by block or dynamically are equivalent choices."
#
# Four ways to deal the GPT with the large vocabulary out to 4 ranks. A *piece* is what must stay together.

# %%
from zerolab.tasks.models import GPT
from zerolab.lab.plots.shards import Piece, largest_share, shard_map

RANKS = 4
model = GPT(layers=2, width=128, vocabulary=4096)
sizes = [(name, param.numel()) for name, param in model.named_parameters()]
psi = sum(numel for _, numel in sizes)


def greedy(pieces):  # as torch does: the largest first, each to whoever has least
    load, owner = [0] * RANKS, {}
    for name, numel in sorted(pieces.items(), key=lambda piece: -piece[1]):
        owner[name] = load.index(min(load))
        load[owner[name]] += numel
    return [Piece(numel, owner[name]) for name, numel in pieces.items()]


def together(key):  # the elements of all parameters with the same key
    pieces = {}
    for name, numel in sizes:
        pieces[key(name)] = pieces.get(key(name), 0) + numel
    return pieces


def in_turn(pieces):
    return [Piece(numel, number % RANKS) for number, numel in enumerate(pieces.values())]


def block(name):  # "blocks.0" of "blocks.0.mlp.up.weight", "token" of "token.weight"
    return ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])


ways = {
    "blocks in turn": in_turn(together(block)),
    "layers in turn": in_turn(together(lambda name: name.rpartition(".")[0])),
    "tensors greedily": greedy(dict(sizes)),
    "flat": [Piece(psi // RANKS, rank) for rank in range(RANKS)],
}

# %%
# NBVAL_CHECK_OUTPUT
plots.show(shard_map(ways, RANKS))

# %%
# NBVAL_CHECK_OUTPUT
for name, pieces in ways.items():
    state = largest_share(pieces, RANKS) * 8 * psi / RANKS
    print(f"{name:18} Adam's state on the fullest rank: {state:>12,.0f} bytes")

# %% [markdown]
# **Verdict: false.** Every way is right, in the sense that the numbers come out the same. But the fullest rank decides,
# and by block, by layer or by tensor it holds far more than its share here. Dealing tensors greedily is good while none is
# larger than an even share; here two are. Flat cuts are even whatever the model is (up to a few elements of padding).
#
# It costs bytes as well. Reduce-scatter and all-gather want as many elements from everyone, so unequal pieces are padded to
# the largest, and the network carries 1.44 to 1.76 times as much, or they travel by slower ways, as the broadcasts above.
#
# > "Gradients are gathered on a main GPU, which updates the model."

# %%
# %%ranks
updated = sum(param.numel() for param in sharded["zero"].model.parameters())

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("04.2"):
    for rank, (_, bytes_sent) in enumerate(lab.pull("sent")):
        elements = lab.pull("updated", rank=rank)
        print(f"rank {rank} updates {elements:,} elements and sends {bytes_sent:,} bytes a step")

# %% [markdown]
# **False.** All ranks do the same. A main GPU would be the root of lesson 01, through which everything has to go.
#
# > "ZeRO reduces communication."
#
# **False for stage 1**, you have counted it: to the byte what DDP sends. It reduces *memory*.
#
# > "ZeRO-1 keeps 12Ψ + 4Ψ/N bytes, ZeRO-2 8Ψ + 8Ψ/N."

# %%
# %%ranks
half = zerolab.Precision(torch.bfloat16)
rows = {"ZeRO-1, float32": package["held"]}
rows["ZeRO-1, bfloat16"] = train(zerolab.Zero1, half, steps=2)["held"]
rows["ZeRO-2, float32"] = train(zerolab.Zero2, steps=2)["held"]
rows["ZeRO-2, bfloat16"] = train(zerolab.Zero2, half, steps=2)["held"]
rows = {name: round(sum(held.values()) / psi, 2) for name, held in rows.items()}

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("04.1"):
    for name, measured in lab.pull("rows", rank=0).items():
        claimed = 12 + 4 / 4 if "ZeRO-1" in name else 8 + 8 / 4
        print(f"{name:17} measured {measured:5.2f} bytes per parameter, claimed {claimed:.2f}")

# %% [markdown]
# **False**, in float32 and with bfloat16. Stage 1 keeps 8Ψ + 8Ψ/N in float32 (parameters and gradients whole, Adam's two averages
# shared out), and 4Ψ + 12Ψ/N with bfloat16, whose float32 masters are shared out too. Stage 2, which is lesson 05, shares
# out gradients as well: 4Ψ + 12Ψ/N and 2Ψ + 14Ψ/N. Whoever plans a bfloat16 run with the claim buys 1.8 times the memory on 4 GPUs,
# and three to four times on many.
#
# ## Questions
#
# 1. Why can ZeRO-1 leave out the second half of DDP's all-reduce, and what must it send instead?
# 2. 1,000 GPUs instead of 64: how much more does ZeRO-1 save, for 7.5 billion parameters in float32?
# 3. You forget the all-gather after the step. Does the run fail?
# 4. Gradients are clipped to a joint norm of 1. A rank has a quarter of them. What must it ask the others?
# 5. Why does it not matter that a shard's boundary goes through the middle of a matrix? When would it?
# 6. Training on 4 ranks is to go on with 8. What has to happen to the optimizer state?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. A rank updates its shard alone, so it needs that shard's mean gradient alone: the reduce-scatter. Then everyone needs all
#    new parameters: an all-gather of as many bytes as the all-gather of gradients that was left out.
# 2. Next to nothing: 8Ψ/64 is 0.94 GB, 8Ψ/1000 is 0.06 GB. What is left, 8Ψ = 60 GB, does not shrink.
# 3. No. Each rank goes on with new values in its own shard and old ones elsewhere; the models drift apart, and training is
#    worse without an error. Your check of 04.2 found that by comparing weights, not losses.
# 4. For the sum of the squares: an all-reduce of one number. (`zero.clip_grad_norm_` does it.)
# 5. Adam treats every element by itself. It matters for optimizers that look at a matrix or a layer as a whole.
# 6. It has to be cut anew: shards of N = 4 and N = 8 have different boundaries. `zerolab.load`
#    does it: it reads at any number of ranks and in any stage what `zerolab.save` wrote at another.

# %%
lab.stop()
lab.progress()
