# %% [markdown]
# # 06 · ZeRO-3, forward: parameters that come and go
#
# ZeRO-2 shards the optimizer state and the gradients. What every rank still holds in full is the parameters: 140 GB for a
# model of 70 billion in 16 bits. An 80 GB GPU cannot hold them, and a hundred more such GPUs do not help.
#
# But look at what forward does: it computes one block, then the next. While it is in block 3, nobody needs the parameters
# of block 50. So with four ranks, each keeps a quarter of every block. Before a block's turn the ranks **[gather](../docs/glossary.md#gather)** it: they
# send each other their quarters. After its turn they **[release](../docs/glossary.md#release)** it: the full parameters go and the quarters stay. Today
# you write that; backward comes in lesson 07.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4)
# %% tags=["nbval-check-output"]
# %%ranks
import torch
from torch.optim import AdamW
from zerolab import Zero2, Zero3
from zerolab.lab import GPT, Block, batch, text

words = text()
inputs = batch(words, rank, 0, batch_size=1, context=32)


def build(stage, units=(Block,)):
    torch.manual_seed(0)
    zero = stage(GPT(layers=6, width=128), units=units)
    zero.prefetch = False  # by default True; so you can see each unit gathered in its turn
    return zero


zero = build(Zero2)
for unit in zero.units[:3]:
    print(f"{unit.name:9} {unit.layout.size:,} elements")
total = sum(unit.layout.size for unit in zero.units)
print(f"... {len(zero.units)} units, {total:,} elements in total")

# %% [markdown]
# A **unit** is what is gathered and released together. Here each of the six blocks is one. The **[root](../docs/glossary.md#root)** unit holds the
# rest: the embeddings, the last norm and the output layer. Forward uses the root at its beginning *and* at its end.
#
# ## Predict
#
# The model has Ψ = 1,263,616 parameters in float32, on 4 ranks: 73,984 in the root and 198,272 in each block. How many
# bytes
#
# 1. of parameters does a rank hold between two steps?
# 2. of *full* parameters are there at most, in the middle of a block's forward, if a rank keeps only the units whose
#    forward is running? (The root's forward is that of the entire model.)
# 3. does a rank send in one forward? (As in a ring, an all-gather sends (N-1)/N of what is gathered; lesson 01.)

# %%
lab.predict("06.1", 4 * 1_263_616 // 4)  # bytes
lab.predict("06.2", 4 * (73_984 + 198_272))  # bytes
lab.predict("06.3", 3 * 4 * 1_263_616 // 4)  # bytes

# %% [markdown]
# ## Memory that comes and goes
#
# How do you take the memory away from parameters that a model still refers to? Not with `del`, which only deletes a name. A
# tensor is a small Python object that describes its shape and points to a **[storage](../docs/glossary.md#storage)**. A view shares the storage of the
# tensor it was made from (lesson 02). And a storage can be made smaller, down to nothing:

# %% tags=["nbval-check-output"]
# %%ranks
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
storage.resize_(flat.nbytes)
flat.copy_(torch.arange(6.0) * 10)
print("storage:", storage.size(), "bytes; view:", view.tolist())

# %% [markdown]
# So a module can keep its parameters, which are views of a flat storage, for the entire training run, while the memory
# behind them comes and goes. Note two things. After `resize_` the new memory contains *anything*: you have to fill it. And
# code that touches a view while there is no memory gets this error only if you are lucky. Some operations do not look: they
# read address 0, and the process dies.
#
# ## Write: gather and release
#
# Both functions take a flat tensor for the full parameters of a unit. `gather` also takes `shard`, this rank's part of it.
# `gather` needs two lines, `release` one.

# %%
# %%exercise 06.1

# %%
lab.check("06.1")

# %% [markdown]
# Now use your two functions on a real layer, by hand. Each rank keeps its quarter of a matrix, releases the full matrix,
# and gathers it again just for the product.

# %% tags=["nbval-check-output"]
# %%ranks
from zerolab import lab

gather = lab.mine("06.1", "gather")
release = lab.mine("06.1", "release")
torch.manual_seed(0)
layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(2, 64)
expected = layer(x)
full = layer.weight.detach().flatten()
layer.weight.data = full.view(64, 64)  # a view of the flat storage, as in lesson 02
shard = full.chunk(world_size)[rank].clone()
release(full)
held = [full.untyped_storage().size() + shard.nbytes]
gather(full, shard)
held.append(full.untyped_storage().size() + shard.nbytes)
assert torch.equal(layer(x), expected)
release(full)
held.append(full.untyped_storage().size() + shard.nbytes)
print("bytes held without the full matrix, with it, and without it again:", held)

# %% [markdown]
# 16,384 bytes come and go; 4,096 stay. `gather` and `release` of the engine's units do the same:
#
# | | |
# |---|---|
# | `unit.full` | flat, all ranks' shards end to end: what forward and backward see. Its memory comes and goes |
# | `unit.shard` | this rank's part: it stays, and the optimizer updates it |
# | `unit.gather()` | your `gather(unit.full, unit.shard)`, unless the full parameters are there and current |
# | `unit.release()` | your `release(unit.full)` |
#
# ## See
#
# Here is the package's `Zero3` on the GPT. In the middle of each block a hook notes what this rank holds:

# %%
# %%ranks
zero = build(Zero3)
moments = {}


def look(moment):
    shards = sum(unit.shard.nbytes for unit in zero.units)
    gathered = sum(unit.full.untyped_storage().size() for unit in zero.units)
    moments[moment] = {"parameters": shards, "gathered parameters": gathered}


look("before\nforward")
for i, block in enumerate(zero.model.blocks):
    block.mlp.register_forward_hook(lambda *_, i=i: look(f"in\nblock {i}"))
loss = zero.model(*inputs)
look("after\nforward")

# %%
from zerolab.lab import plots

moments = lab.pull("moments", rank=0)
lab.measured("06.1", moments["before\nforward"]["parameters"])
lab.measured("06.2", max(kinds["gathered parameters"] for kinds in moments.values()))
lab.reveal("06.1")
lab.reveal("06.2")

# %% tags=["nbval-check-output"]
if lab.predicted("06.1") and lab.predicted("06.2"):
    bars = {}
    for moment, kinds in moments.items():
        bars[moment] = {kind: size / 1e6 for kind, size in kinds.items()}
    title = "Parameters on one rank during a forward"
    subtitle = "ZeRO-3 on 4 ranks; the full model would be 5.05 MB"
    picture, _ = plots.stacks(bars, title, subtitle, "MB")
    most = max(sum(kinds.values()) for kinds in bars.values())
    said = "1.26 MB of shards stay. Gathered parameters come on top: "
    plots.show((picture, f"{said}at most {most:.2f} MB in total."))

# %% [markdown]
# The lower part is the shard, a quarter of everything, and it never changes. Above it are the root and the block whose
# turn it is. The root is still there when forward is over. Backward begins with it, so if it were released, it would
# have to be gathered again at once. It stays until backward has passed it, which is why a step moves not 3Ψ but 3Ψ -
# Ψ_root (lesson 07). Under `torch.no_grad()` no backward will come, so there the root must go too.
#
# ## ZeRO-3's forward as a class
#
# ZeRO-3 changes three methods that the engine calls:
#
# - `optimizer_params(unit)`, called once, when the engine is built: returns what the optimizer sees. ZeRO-2's version,
#   which you inherit, returns slices of `unit.shard`. But there `unit.shard` is a *view* of `unit.full`, and would lose its
#   memory along with it.
# - `pre_forward(unit)`, called before the unit's forward, and `post_forward(unit)`, called after it.
#
# `self.root` is a list: the root unit is in it, unless every parameter is in a block. You need about six lines.
# `lab.hint("06.2")` helps.

# %%
# %%exercise 06.2

# %%
lab.check("06.2")

# %% [markdown]
# ## Measure
#
# `lab.mine(Zero3)` is the package's `Zero3` with your methods in place of its own; its backward is still the package's
# today. `ledger` records what a forward sends. The loss must equal ZeRO-2's, bit for bit.

# %%
# %%ranks
from zerolab.measure import ledger

Zero3 = lab.mine(Zero3)
zero2, zero3 = build(Zero2), build(Zero3)
with ledger(zero3) as book:
    loss = zero3.model(*inputs).item()
moved = book.moved
gathers = {unit: total.calls for unit, total in book.totals("unit").items()}
assert loss == zero2.model(*inputs).item()

# %%
lab.measured("06.3", lab.pull("moved", rank=0))
lab.reveal("06.3")

# %% tags=["nbval-check-output"]
if lab.predicted("06.3"):
    print("gathers of each unit in one forward:", lab.pull("gathers", rank=0))
    assert set(lab.pull("moved")) == {3 * 4 * 1_263_616 // 4}

# %% [markdown]
# ZeRO-2 gathers the same bytes once per step, to fetch what the optimizers of the other ranks have changed. ZeRO-3
# gathers them in forward, releases them, and will gather them again in backward. That second time is the price. At 10
# GB/s, 70 billion parameters in 16 bits take 14 seconds, each time. If you have the memory for ZeRO-2, do not pay that,
# unless you can hide it by gathering ahead of time.
#
# Now record every allocation of a forward, for both stages. (`timeline` notes every buffer, when it comes and when it
# goes; `holdings` notes what each rank holds when backward returns.) The batch is small, so that parameters are visible next
# to activations.

# %%
# %%ranks
from zerolab.measure import holdings, timeline


def step(zero, optimizer):
    zero.model(*inputs).backward()
    optimizer.step()
    optimizer.zero_grad()


def record(zero):
    optimizer = AdamW(zero.model.parameters(), lr=1e-3)
    step(zero, optimizer)  # creates the optimizer state
    with timeline(zero, optimizer) as line:
        loss = zero.model(*inputs)
    loss.backward()
    return line, holdings(zero, optimizer)


(line2, held2), (line3, held3) = record(zero2), record(zero3)

# %%
if lab.predicted("06.2"):
    lines = [lab.pull("line2", rank=0), lab.pull("line3", rank=0)]
    plots.show(plots.skyline(lines, learner=[False, lab.passed("06.2")]))

# %% [markdown]
# On the left is stage 2: all parameters lie at the bottom, all the time. On the right is stage 3: a quarter of them, and on
# top a saw. Each tooth is a block that comes and goes, while activations pile up for backward. Move through the forward with
# the slider. The list below it names the largest buffers of a rank, and for a buffer created meanwhile the line of code that
# created it. (The tensors of gathered parameters were created long ago; only their memory is new.)

# %%
from zerolab.lab import timeline_scrubber

lines = lab.pull("line3")
if lab.predicted("06.2"):
    scrubber = timeline_scrubber(lines, len(lines[0].events) // 2)
    display(scrubber)
    print("At the start:", scrubber.sentence)

# %% [markdown]
# What happens to the saw in backward, and where the peak of a whole step is, lesson 07 shows.
#
# Here is who holds what when backward has returned:

# %% tags=["nbval-check-output"]
if lab.predicted("06.1"):
    plots.show(plots.who_holds_what([lab.pull("held2"), lab.pull("held3")]))

# %% [markdown]
# Now the parameters are cut as well: between steps, no rank holds anything in full.
#
# ## Break it on purpose
#
# What if a unit is released too early? Say, right after it was gathered, before its forward has run:

# %% tags=["raises-exception"]
# %%ranks
# a deliberate mistake: each tooth of the saw ends before its work is done


class TooEarly(Zero3):
    def pre_forward(self, unit):
        super().pre_forward(unit)
        if unit not in self.root:
            unit.release()


build(TooEarly).model(*inputs)

# %% [markdown]
# It ends with *its data is not allocated yet*: something used a view whose storage has no memory. Here it was a norm,
# the first thing that a block does. Other operations say *storage of size 0*, as above. The message does not mention
# ZeRO, so it is worth knowing. In production it usually means that a parameter was used *outside* the forward of the
# wrapped module, where nobody had gathered it. (Here all ranks raised the error at the same place, so nobody waits for
# anybody, and you do not need `lab.reset()`. If only one rank raises it, the others wait: lesson 00.)
#
# And gathered too late? Then the memory is not there either, and you get the same kind of error; lesson 07 tries it in
# backward. The third kind is silent: the memory is there, but with *old* values in it. Lesson 07 tries that, too.
#
# Outside forward, the model's parameters are what the optimizer sees: slices. The engine shows the full ones on demand:

# %% tags=["nbval-check-output"]
# %%ranks
weight = zero3.model.blocks[0].mlp.up.weight
print("outside forward:   ", tuple(weight.shape), weight.shape[0], "elements here")
with zero3.full_parameters():
    print("full_parameters(): ", tuple(zero3.model.blocks[0].mlp.up.weight.shape))

# %% [markdown]
# The matrix is a stretch of its block's flat storage, which is cut into four without regard to matrices. (A slice is
# flat, and is shown with as many dimensions as its matrix, because optimizers ask how many a parameter has.) So two
# ranks hold about half of the matrix each and two hold nothing, and each updates what it holds.
#
# ## In production
#
# PyTorch's own ZeRO-3 is `fully_shard` (FSDP2). You call it once for each unit and then for the model, which becomes the
# root unit. Here is the same model side by side: the loss, what is held between steps, and what a forward sends.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab import calls

torch.manual_seed(0)
theirs = GPT(layers=6, width=128)
for block in theirs.blocks:
    fully_shard(block)
fully_shard(theirs)
held = sum(param.to_local().nbytes for param in theirs.parameters())
with calls() as book, torch.no_grad():
    their_loss = theirs(*inputs).item()
found = their_loss == build(Zero3).model(*inputs).item(), held, book.sent, len(book.calls)

# %% tags=["nbval-check-output"]
if lab.predicted("06.1") and lab.predicted("06.3"):
    for rank, (same_loss, held, sent, number) in enumerate(lab.pull("found")):
        print(f"rank {rank}: same loss {same_loss}; {held:,} bytes held;", end=" ")
        print(f"{sent:,.0f} sent in {number} calls")

# %% [markdown]
# The same loss to the bit, the same bytes held, the same bytes sent, in the same seven all-gathers: `fully_shard` is
# what you wrote. It frees memory with the same `untyped_storage().resize_(0)`
# (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `free_storage`), and it keeps the root after forward, as you
# do. With `reshard_after_forward=False` it keeps every unit, as in lesson 05. It differs in what a shard is: rows
# of each parameter, where ours is a stretch of the flat unit. And on a GPU, where the host runs ahead, the next gather
# starts while the current unit computes (lesson 09). Ours gathers ahead too, unless `prefetch` is off, as it is here.
# DeepSpeed's stage 3 does the same for each parameter, and has a *persistence threshold* below which parameters stay.
#
# ## On trial
#
# > "Full sharding keeps 16Ψ/N bytes."
#
# Measure what is held when backward returns, and the most that a step holds at any moment, apart from activations. Do it
# with a unit for each block, and with the entire model as one unit, which is what you get when you name no units.

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
    return states, max(map(sum, zip(*(line.curve(kind) for kind in kinds))))


weights = {"a unit for each block": weigh((Block,)), "one unit": weigh(())}

# %%
if lab.predicted("06.2"):
    print(f"16Ψ/N = {16 * 1_263_616 // 4:,}")
    for name, (states, most) in lab.pull("weights", rank=0).items():
        print(f"{name:22} {states:,} held when backward returns; at most {most:,} in total")

# %% [markdown]
# **Verdict: true, plus the units in flight.** What stays is 16Ψ/N, plus Adam's counters. At some moments there is more: the
# full parameters of the root and of the blocks in flight, and gradients on their way. With small units that is little. With
# one unit for the entire model, all of Ψ is gathered at once, and during forward and backward ZeRO-3 saves no parameter memory at
# all. So the *largest unit* decides whether a large model fits, and no number of GPUs makes it smaller.

# %% [markdown]
# ## Your engine on trial
#
# These promises are about forward: what a rank holds when it is over, that an evaluation has the full model's loss, and
# that a block may run twice. `lab.trial` asks about backward in the next lesson.

# %% tags=["nbval-check-output"]
import zerolab

promises = ["plain", "a block used twice", "evaluation", "held after a forward"]
lab.trial(zerolab.Zero3, *promises)

# %% [markdown]
# ## Questions
#
# 1. Why does ZeRO-3 not simply `del` the parameters after a block's forward?
# 2. Why does the root stay after the forward of a training step, and what would it cost to release it?
# 3. A validation loop runs under `torch.no_grad()`, and memory is higher after it than before. What may be wrong?
# 4. A model has 70 billion parameters in 80 equal blocks, in bfloat16, on 64 GPUs. How much memory do the parameters take
#    during forward, with a unit for each block? And if someone wrapped only the model?
# 5. Training raises "setStorage: ... out of bounds for storage of size 0", or "its data is not allocated yet". What do you
#    look for first?
# 6. Does ZeRO-3 send more than ZeRO-2 in a *validation* pass?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. The modules, autograd and the optimizer refer to the tensors, and have to go on doing so. Deleting one name frees
#    nothing. What can go while everybody keeps the tensor is the memory of its storage.
# 2. Backward begins with the root, so it would be gathered again at once: each rank would send Ψ_root (N-1)/N more elements
#    per step.
# 3. The root (or, worse, every unit) was kept for a backward that never comes. `post_forward` has to look at
#    `torch.is_grad_enabled()`, not at `model.training`.
# 4. 140 GB / 64 = 2.2 GB of shards, and 140 GB / 80 = 1.75 GB for the block whose turn it is, twice that if the next one is
#    gathered ahead, and the root. Wrapped as one unit: 2.2 + 140 GB.
# 5. A parameter that is used outside the forward of its unit: a weight read by another module, a method other than
#    `forward`, a loss that touches weights. `zero.register_forward_method("name")` makes a method gather first.
# 6. Yes. ZeRO-2 gathers only after an optimizer step, so a second validation pass costs it nothing. ZeRO-3 gathers Ψ in
#    each.

# %%
lab.stop()
lab.progress()
