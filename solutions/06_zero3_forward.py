# %% [markdown]
# # 06 · ZeRO-3, forward: parameters that come and go
#
# ZeRO-2 has shared out the optimizer state and the gradients. What is left on every rank are the parameters: 140 GB for a
# model of 70 billion in 16 bits. No GPU of 80 GB holds them, and a hundred more such GPUs do not help.
#
# But look at what a forward does: it computes one block, then the next. While it is in block 3, nobody needs the
# parameters of block 50. So each rank keeps a quarter of each block (there are four ranks), and before a block's turn the
# ranks send each other their quarters; after it they let the whole go. Today you write that; backward comes in lesson 07.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4)
# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
from torch.optim import AdamW
from zerolab import Zero2, Zero3
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

words = text()
inputs = batch(words, rank, 0, batch_size=1, context=32)


def build(stage, units=(Block,)):
    torch.manual_seed(0)
    zero = stage(GPT(layers=6, width=128), units=units)
    zero.prefetch = False  # nothing is gathered before its turn, so that one can see each turn; usually it is on
    return zero


zero = build(Zero2)
for unit in zero.units[:3]:
    print(f"{unit.name:9} {unit.layout.size:,} elements")
print(f"... {len(zero.units)} units, together {sum(unit.layout.size for unit in zero.units):,}")

# %% [markdown]
# A **unit** is what is gathered and released as one: here each of the six blocks, and the **root** unit, which holds the
# rest: embeddings, the last norm and the output layer. The root is used at the beginning *and* at the end of a forward.
#
# ## Predict
#
# Ψ = 1,263,616 parameters in float32 on 4 ranks: 73,984 in the root, 198,272 in each block. How many bytes
#
# 1. of parameters does a rank hold between two steps?
# 2. of *whole* parameters are there at the most at one moment of a forward, if a rank keeps only what it needs then?
# 3. does a rank send in one forward? (An all-gather as a ring: (N-1)/N of what is gathered, lesson 01.)

# %%
lab.predict("06.1", 4 * 1_263_616 // 4)
lab.predict("06.2", 4 * (73_984 + 198_272))
lab.predict("06.3", 3 * 4 * 1_263_616 // 4)

# %% [markdown]
# ## Memory that comes and goes
#
# How does one take the memory away from parameters that a model holds on to? Not by `del`, which only deletes a name. A
# tensor is a small Python object that describes its shape and points to a **storage**, and views share the storage of what
# they are views of (lesson 02). The storage can be made smaller, down to nothing:

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
flat = torch.arange(6.0)
view = flat[2:6].view(2, 2)
storage = flat.untyped_storage()
print("storage:", storage.size(), "bytes")
storage.resize_(0)
print("storage:", storage.size(), "bytes; view still has the shape", tuple(view.shape))
try:
    view.t().sum()
except RuntimeError as error:
    print("RuntimeError:", error)
storage.resize_(6 * 4)
flat.copy_(torch.arange(6.0) * 10)
print("storage:", storage.size(), "bytes; view:", view.tolist())

# %% [markdown]
# So a module can keep its parameters, views of a flat storage, for the whole training, and the memory behind them comes and
# goes. Note two things. After `resize_` there is *anything* in the new memory: it has to be filled. And whoever touches a
# view while there is no memory gets this error, with luck. Some operations do not look: they read address 0, and the
# process dies.
#
# ## Write: gather and release
#
# `whole` is a flat tensor for all ranks' parameters of a unit, `shard` this rank's part of it. Two lines and one.

# %%
# %%exercise 06.1

# %%
lab.check("06.1")

# %% [markdown]
# Your two functions on a real layer, by hand: each rank keeps its quarter of a matrix, lets the whole go, and gathers it
# just for the product. A fresh process would find the same numbers.

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
from zerolab import lab

gather = lab.mine("06.1", "gather")
release = lab.mine("06.1", "release")
torch.manual_seed(0)
layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(2, 64)
expected = layer(x)
whole = layer.weight.detach().flatten()
layer.weight.data = whole.view(64, 64)  # a view of the flat storage, as in lesson 02
shard = whole.chunk(world_size)[rank].clone()
release(whole)
held = [whole.untyped_storage().size() + shard.nbytes]
gather(whole, shard)
held.append(whole.untyped_storage().size() + shard.nbytes)
assert torch.equal(layer(x), expected)
release(whole)
held.append(whole.untyped_storage().size() + shard.nbytes)
print("bytes held, without the whole, with it, and without it again:", held)

# %% [markdown]
# 16,384 bytes come and go, 4,096 stay. `gather` and `release` of the engine's units do the same:
#
# | | |
# |---|---|
# | `unit.whole` | flat, in all ranks' length: what forward and backward see. Its memory comes and goes |
# | `unit.shard` | this rank's part: it stays, and the optimizer updates it |
# | `unit.gather()` | your `gather(unit.whole, unit.shard)`; does nothing where the whole is there and new |
# | `unit.release()` | your `release(unit.whole)` |
#
# ## See
#
# The package's `Zero3` on the GPT. In the middle of each block a hook looks at what there is on this rank:

# %%
# %%ranks
zero = build(Zero3)
moments = {}


def look(moment):
    whole = sum(unit.whole.untyped_storage().size() for unit in zero.units)
    moments[moment] = {"parameters": sum(unit.shard.nbytes for unit in zero.units), "gathered parameters": whole}


look("before\nforward")
for i, block in enumerate(zero.model.blocks):
    block.mlp.register_forward_hook(lambda *_, i=i: look(f"in\nblock {i}"))
loss = zero.model(*inputs)
look("forward\nis over")

# %%
from zerolab.lab import plots

moments = lab.pull("moments", rank=0)
lab.measured("06.1", moments["before\nforward"]["parameters"], "bytes")
lab.measured("06.2", max(kinds["gathered parameters"] for kinds in moments.values()), "bytes")
lab.reveal("06.1")
lab.reveal("06.2")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("06.1") and lab.predicted("06.2"):
    bars = {moment: {kind: size / 1e6 for kind, size in kinds.items()} for moment, kinds in moments.items()}
    title = "Parameters on one rank in the course of a forward"
    picture, _ = plots.stacks(bars, title, "ZeRO-3 on 4 ranks; the whole model would be 5.05 MB", "MB")
    most = max(sum(kinds.values()) for kinds in bars.values())
    plots.show((picture, f"1.26 MB of shards stay; what is whole comes on top, together {most:.2f} MB at the most."))

# %% [markdown]
# The lower part is the shard, a quarter of everything, and it never moves. Above it the block that has its turn, and the
# root. The root is still there when forward is over: backward begins with it, so letting it go would mean to gather it
# again at once. It stays until backward has passed it, which is why the traffic of a step is not 3Ψ but 3Ψ - Ψ_root
# (lesson 07). Under `torch.no_grad()` no backward will come, and the root must go too.
#
# ## ZeRO-3's forward as a class
#
# The engine calls three methods, of which ZeRO-2's do something else:
#
# - `optimizer_params(unit)`, once, when the engine is built: what the optimizer sees. ZeRO-2's version, which you inherit,
#   makes slices of `unit.shard`. But there `unit.shard` is a *view* of the whole, and would go with it.
# - `pre_forward(unit)` before the unit's forward, `post_forward(unit)` after it.
#
# `self.root` is a list of the root unit. About seven lines. `lab.hint("06.2")` helps.

# %%
# %%exercise 06.2

# %%
lab.check("06.2")

# %% [markdown]
# ## Measure
#
# `lab.mine(Zero3)` is the package's `Zero3` with your methods over it; the backward half is the package's today. The
# `ledger` writes down what a forward sends; the loss must be that of ZeRO-2, to the last bit.

# %%
# %%ranks
from zerolab.measure import ledger

Zero3 = lab.mine(Zero3)
zero2, zero3 = build(Zero2), build(Zero3)
with ledger(zero3) as book:
    loss = zero3.model(*inputs).item()
moved, gathers = book.moved, {unit: total.calls for unit, total in book.totals("unit").items()}
assert loss == zero2.model(*inputs).item()

# %%
lab.measured("06.3", lab.pull("moved", rank=0), "bytes")
lab.reveal("06.3")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("06.3"):
    print("gathers of each unit in one forward:", lab.pull("gathers", rank=0))
    assert set(lab.pull("moved")) == {3 * 4 * 1_263_616 // 4}

# %% [markdown]
# ZeRO-2 gathers the same bytes once per step, after the optimizer. ZeRO-3 gathers them in forward, lets them go, and will
# gather them again in backward: that second time is the price. At 10 GB/s, the 70
# billion parameters in 16 bits take 14 seconds, each time. Whoever has the memory for ZeRO-2 should not pay that.
#
# Now a whole training step of both, every allocation recorded. (`holdings` notes what each rank holds when backward
# returns, `timeline` every buffer of a step, from when to when.) The batch is small, so that parameters show beside
# activations.

# %%
# %%ranks
from zerolab.measure import holdings, timeline


def step(zero, optimizer):
    zero.model(*inputs).backward()
    held = holdings(zero, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return held


def record(zero):
    optimizer = AdamW(zero.model.parameters(), lr=1e-3)
    step(zero, optimizer)  # makes the optimizer state
    with timeline(zero, optimizer) as line:
        held = step(zero, optimizer)
    return line, held


(line2, held2), (line3, held3) = record(zero2), record(zero3)

# %%
if lab.predicted("06.2"):
    lines = [lab.pull("line2", rank=0), lab.pull("line3", rank=0)]
    plots.show(plots.skyline(lines, learner=[False, lab.passed("06.2")]))

# %% [markdown]
# Left, stage 2: all parameters lie at the bottom, all the time. Right, stage 3: a quarter of them, and on top a saw: a
# tooth is a block that comes and goes. (It has wider teeth in backward, for which lesson 07 has the reason.) Use the slider
# to go through it; the list below it names the largest buffers of a rank, and the line of code that made each, if it was
# made in this step. (The tensors of gathered parameters were made long ago; only their memory is new.)

# %%
from zerolab.lab.explorers import timeline_scrubber

lines = lab.pull("line3")
if lab.predicted("06.2"):
    middle = len([event for event in lines[0].events[lines[0].before :] if event.phase == "forward"]) // 2
    scrubber = timeline_scrubber(lines, middle)
    display(scrubber)
    print("At the start:", scrubber.sentence)

# %% [markdown]
# Every byte at the peak of stage 3:

# %%
if lab.predicted("06.2"):
    line = lines[0]
    rows = {kind: {} for kind in line.by_kind()}
    for part in line.parts():
        rows[part.kind][part.unit] = part.nbytes
    for kind, units in rows.items():
        whose = ", ".join(f"{unit} {nbytes:,}" for unit, nbytes in units.items() if unit)
        print(f"{sum(units.values()):>12,}  {kind:20} {whose if len(units) < 6 else 'of all units'}")
    print(f"{line.peak:>12,}  together, the peak, in {line.events[line.peak_moment - 1].phase}")
    assert sum(sum(units.values()) for units in rows.values()) == line.peak

# %% [markdown]
# Parameters and optimizer state are 12 bytes for each parameter of the shard, and Adam's counters. The rest, activations aside, is in flight, and
# a matter of backward: a *second* block is gathered while the first is not yet released; the block that backward has just
# passed has a whole gradient, the one before it is being reduced (its gradient, and most of it again for what is received); the
# root's gradient is half there. Lesson 07 takes that apart.
#
# Who holds what, when backward has returned:

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("06.1"):
    plots.show(plots.who_holds_what([lab.pull("held2"), lab.pull("held3")]))

# %% [markdown]
# The last band is cut: between steps, nothing is whole any more, on any rank.
#
# ## Break it on purpose
#
# What if a unit is released too early? Say, right after it was gathered, before its forward has run:

# %% tags=["raises-exception"]
# %%ranks
# a mistake made on purpose: one tooth of the saw ends before the work is done


class TooEarly(Zero3):
    def pre_forward(self, unit):
        super().pre_forward(unit)
        if unit not in self.root:
            unit.release()


build(TooEarly).model(*inputs)

# %% [markdown]
# *Its data is not allocated*: a view was used whose storage has no memory, by a norm, the first thing that a block does. Other
# operations say *storage of size 0*, as above. Nothing in the message speaks of ZeRO, so it is worth knowing: in
# production it usually means that a parameter was used *outside* of the forward of the module that was wrapped, where
# nobody had gathered it. (Here all ranks raised it at the same place, so nobody waits for anybody, and `lab.reset()` is not
# needed. If one rank alone raises it, the others hang.)
#
# And gathered too late? Then the memory is not there either, and the same kind of error comes; lesson 07 tries it in
# backward. The third kind is silent: memory that is there with *old* values in it. Lesson 07 tries that, too.
#
# Parameters outside of forward are what the optimizer sees: slices. The engine shows whole ones on demand:

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
weight = zero3.model.blocks[0].mlp.up.weight
print("outside of forward:", tuple(weight.shape), weight.numel(), "elements here")
with zero3.full_parameters():
    print("full_parameters(): ", tuple(zero3.model.blocks[0].mlp.up.weight.shape))

# %% [markdown]
# The matrix lies in a stretch of its block's flat storage, which is cut into four without regard to matrices. So some ranks
# hold half of it and some nothing, and each updates what it holds.
#
# ## In production
#
# PyTorch's own ZeRO-3 is `fully_shard` (FSDP2). It is called once for each unit and then for the model, which becomes the
# root unit. The same model, side by side: the loss, what is held between steps, what a forward sends.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab.ranks.calls import calls

torch.manual_seed(0)
theirs = GPT(layers=6, width=128)
for block in theirs.blocks:
    fully_shard(block)
fully_shard(theirs)
held = sum(param.to_local().nbytes for param in theirs.parameters())
with calls() as book, torch.no_grad():
    their_loss = theirs(*inputs).item()
found = their_loss == build(Zero3).model(*inputs).item(), held, book.sent, len(book.calls)

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("06.1") and lab.predicted("06.3"):
    for rank, (same_loss, held, sent, number) in enumerate(lab.pull("found")):
        print(f"rank {rank}: same loss {same_loss}; {held:,} bytes held; {sent:,.0f} sent in {number} calls")

# %% [markdown]
# The same loss to the bit, the same bytes held, the same bytes sent, in the same seven all-gathers: `fully_shard` is what
# you wrote. It lets memory go with the same `untyped_storage().resize_(0)`
# (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `free_storage`), and keeps the root after forward, as you do;
# `reshard_after_forward=False` keeps every unit, which makes ZeRO-2 of it. It differs in what a shard is: rows of each
# parameter, where ours is a stretch of the flat unit. And it gathers the next unit while the current one computes, as
# ours does where `prefetch` is not switched off, as it is here. DeepSpeed's stage 3 does the same per parameter, with a
# *persistence threshold* below which parameters stay.
#
# ## On trial
#
# > "Full sharding keeps 16Ψ/N bytes."
#
# We measure what is held when backward returns, and the most that is there of parameters and gradients during a step;
# with a unit for each block, and with the whole model as one unit, which is what you get when nothing is said to be a unit.

# %%
# %%ranks
from zerolab.measure import model_states


def weigh(units):
    zero = build(Zero3, units)
    optimizer = AdamW(zero.model.parameters(), lr=1e-3)
    step(zero, optimizer)
    with timeline(zero, optimizer) as line:
        zero.model(*inputs).backward()
        states = sum(model_states(zero, optimizer).values())
        optimizer.step()
        optimizer.zero_grad()
    kinds = ("parameters", "gathered parameters", "gradients", "optimizer", "communication")
    return states, max(map(sum, zip(*(line.curve(kind) for kind in kinds)))), max(line.curve("gathered parameters"))


weights = {"a unit for each block": weigh((Block,)), "one unit": weigh(())}

# %%
if lab.predicted("06.2"):
    print(f"16Ψ/N = {16 * 1_263_616 // 4:,}")
    for name, (states, most, gathered) in lab.pull("weights", rank=0).items():
        print(f"{name:22} {states:,} held when backward returns; gathered {gathered:,}; with all states {most:,}")

# %% [markdown]
# **Verdict: true, plus the units in flight.** What stays is 16Ψ/N, but for Adam's counters. At one moment there are more:
# the root and the blocks in flight, whole, and gradients on their way. With small units that is little. With one
# unit for the whole model, all of Ψ is gathered, and for forward and backward ZeRO-3 saves no parameters at all. So the
# *largest unit* decides whether a large model fits, and no number of GPUs makes it smaller.
#
# ## Questions
#
# 1. Why does ZeRO-3 not simply `del` the parameters after a block's forward?
# 2. Why does the root stay after the forward of a training step, and what would it cost to release it?
# 3. A validation loop runs under `torch.no_grad()`, and memory is higher after it than before. What may be wrong?
# 4. A model of 70 billion parameters in 80 equal blocks, bfloat16, on 64 GPUs: how much memory for parameters during
#    forward, with a unit for each block? And if someone wrapped only the whole model?
# 5. Training raises "setStorage: ... out of bounds for storage of size 0", or "its data is not allocated yet". Where do you
#    look first?
# 6. Does ZeRO-3 send more than ZeRO-2 in a *validation* pass?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. The modules, autograd and the optimizer hold on to the tensors, and shall: a name less frees nothing. What can go
#    without anybody letting go of the tensor is the memory of its storage.
# 2. Backward begins with the root: it would be gathered again at once, Ψ_root (N-1)/N elements more for each rank and step.
# 3. The root (or, worse, every unit) was kept for a backward that never comes: `post_forward` has to look at
#    `torch.is_grad_enabled()`, not at `model.training`.
# 4. 140 GB / 64 = 2.2 GB of shards, and 140 GB / 80 = 1.75 GB for the block that has its turn, twice that when the next one
#    is gathered ahead, and the root. Wrapped as one: 2.2 + 140 GB.
# 5. For a parameter that is used outside of the forward of its unit: a weight read by another module, a method other than
#    `forward`, a loss that touches weights. `zero.register_forward_method("name")` makes a method gather first.
# 6. ZeRO-2 gathers after each optimizer step only, so a second validation pass costs it nothing. ZeRO-3 gathers Ψ in each.

# %%
lab.stop()
lab.progress()
