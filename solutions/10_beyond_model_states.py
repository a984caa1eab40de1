# %% [markdown]
# # 10 · Beyond model states
#
# **The question.** ZeRO-3 on 64 GPUs leaves 1.9 GB of model states on each, for 7.5 billion parameters. A GPU has 80
# GB. You give each one a batch of eight sequences of 2,048 tokens, and the first step dies: out of memory. What else is
# there?
#
# Stages 1 to 3 divide parameters, gradients and optimizer state. The rest they leave as it is, on every GPU.

# %% tags=["nbval-check-output"]
from zerolab.measure import activation_bytes, paper_state_bytes

states = paper_state_bytes(3, 64, 7.5e9)
kept = activation_bytes(tokens=8 * 2048, layers=36, width=4096, vocabulary=50_257)
print(f"model states in stage 3, 64 GPUs: {states / 1e9:.2f} GB")
print(f"activations of 8 x 2,048 tokens in bfloat16, on every GPU: {kept / 1e9:.1f} GB")

# %% [markdown]
# The ZeRO paper calls this rest the **[residual states](../docs/glossary.md#residual-states)**, and its section 6,
# *ZeRO-R*, is about them: activations, temporary buffers, and memory that is free but in pieces too small to use. This
# lesson takes the activations, then moves the optimizer off the GPU (*ZeRO-Offload*), and asks when that pays. Buffers
# and pieces are for another day.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
from functools import partial

import torch
import torch.distributed as dist
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, batch, text

words = text()


def make_model(run=None):  # run(block, x) in place of block(x)
    torch.manual_seed(0)
    return lab.with_blocks_run_by(run, GPT(layers=6, width=128))


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters in {len(make_model().blocks)} blocks of width 128")

# %% [markdown]
# ## The mountain
#
# First the step of lesson 02. For the moment every rank trains alone, in a process group of its own and on the same
# samples, so that nothing but the step itself shows.


# %%
# %%ranks
alone = [dist.new_group([number]) for number in range(world_size)][rank]


def record(run=None, sequences=8, stage=zerolab.DDP, group=alone):
    zero = stage(make_model(run), units=[Block], group=group)
    sample = partial(batch, words, 0, batch_size=sequences, context=64)
    return lab.second_step(zero, sample)  # its allocations, the loss, the weights


plain, *plain_numbers = record()

# %%
plain = lab.pull("plain", rank=0)
plots.show(plots.skyline([plain], names=["with everything kept"]))

# %% [markdown]
# The mountain is what forward keeps for backward: 16 vectors of the model's width for each token and block, two more
# after the blocks, and the logarithms of 256 probabilities (lesson 02).
#
# ## Forget, and compute again
#
# Of a block's 16 vectors, 15 can be computed from the first, its input. **[Activation
# checkpointing](../docs/glossary.md#activation-checkpointing)** keeps only the inputs. When backward reaches a block,
# the block's forward runs *again*, from its kept input; now all 16 vectors are there, for this one block, and backward
# goes on.
#
# Predict two numbers. How many bytes does one token leave behind when forward returns, if each of the 6 blocks keeps
# only its input? (Width 128, float32. What follows the blocks stays as it was.) And the price: how much arithmetic does
# a step take, forward and backward together, as a multiple of what it took? (A backward takes twice the arithmetic of
# its forward.)

# %%
lab.predict("10.1", 4 * (128 * (6 + 2) + 256))  # bytes
lab.predict("10.2", 4 / 3)  # × the arithmetic

# %% [markdown]
# ## Write: a checkpointed block
#
# To decide what happens in both directions, write a `torch.autograd.Function`: a forward and a backward of your own,
# which autograd calls in place of whatever it would have recorded. Three facts decide what they look like:
#
# - **Nothing is recorded inside either of them.** In forward that is what you want. In backward the block's second run
#   *must* be recorded, or there is nothing to send the gradient through: `with torch.enable_grad():`.
# - **The second run stands alone.** It starts from the kept values with no history (`detach()`). Its backward,
#   `torch.autograd.backward(y, grad)`, ends at this input, and adds the parameters' gradients to their `.grad` on the
#   way. Your backward returns the input's gradient, and autograd goes on from there.
# - **Both runs must compute the same.** Dropout draws random numbers, and *autocast* picks a dtype for each operation
#   (`with torch.autocast(...)`, usually around the forward only). `Moment(x.device.type)`, made before the first run,
#   keeps the random state and the autocast of that moment; `with moment.again():` runs under them once more, and leaves
#   the random numbers outside as they were. (Random numbers here are the CPU's; `torch.utils.checkpoint` keeps a GPU's
#   too.)

# %%
# %%exercise 10.1

# %%
lab.check("10.1")

# %% [markdown]
# Now the real model, with your function around each of its blocks, and with torch's. Arithmetic is counted as in lesson
# 09 (without what is inside attention).

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

checkpointed = lab.mine("10.1")
recomputed, *numbers = record(checkpointed)
torchs_line, *torchs_numbers = record(partial(checkpoint, use_reentrant=False))
same = lab.bit_for_bit(plain_numbers, numbers, torchs_numbers)

half, *_ = record(checkpointed, sequences=4)
left = lab.left_by_forward(recomputed) - lab.left_by_forward(half)
per_token = round(left / (4 * 64))

both = {"kept": make_model(), "recomputed": make_model(checkpointed)}
sample = batch(words, 0, 0, 8, 64)
flop = {name: lab.flop_by_phase(model, sample) for name, model in both.items()}
arithmetic = {name: sum(of.values()) for name, of in flop.items()}

# %%
arithmetic = lab.pull("arithmetic", rank=0)
lab.measured("10.1", lab.pull("per_token", rank=0))
lab.measured("10.2", round(arithmetic["recomputed"] / arithmetic["kept"], 3))
lab.reveal("10.1")
lab.reveal("10.2")

# %%
recomputed = lab.pull("recomputed", rank=0)
if lab.predicted("10.1"):
    names, mine = ["with everything kept", "with inputs kept"], [False, lab.passed("10.1")]
    plots.show(plots.skyline([plain, recomputed], learner=mine, names=names))

# %% tags=["nbval-check-output"]
print("loss and weights of all three, bit for bit the same:", all(lab.pull("same")))
if lab.predicted("10.1") and lab.predicted("10.2"):
    print(f"per token: {16 * 6 * 128 * 4:,} bytes of blocks became {6 * 128 * 4:,}")
    print(f"arithmetic: {arithmetic['kept']:,} became {arithmetic['recomputed']:,}")
    off = recomputed.peak / lab.pull("torchs_line", rank=0).peak - 1
    print("the peaks with yours and with torch's differ by less than 2 %:", abs(off) < 0.02)

# %% [markdown]
# The mountain has become a low ridge: kept inputs, and the 16 vectors of the block that backward is at. The peak is now
# mostly model states, for which there are stages 1 to 3.
#
# A token leaves 4 bytes × (128 × (6 + 2) + 256) = 5,120, and 16 more: 8 for the target, of which forward makes a copy,
# and 8 for the last norm's mean and spread. The arithmetic grows from three parts (forward one, backward two) to nearly
# four: the head is not computed again.
#
# **In production** this is `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)`, the third run above.
# (Yours is what torch calls *reentrant*: it starts a backward inside the backward.)
#
# ## Beyond the device
#
# A server has more host memory than its GPUs have of theirs, and hardly uses it. In bfloat16 with Adam, 12 of 16 bytes
# are float32 masters and averages. These are read and written *once a step*. So
# **[ZeRO-Offload](../docs/glossary.md#offload)** (Ren et al., arXiv 2101.06840) puts them on the host, and updates them
# there:
#
# 1. forward and backward run on the device, with bfloat16 parameters;
# 2. each mean gradient goes to the host as soon as it is there, in bfloat16;
# 3. the host casts it to float32 and updates masters and averages;
# 4. the new values, rounded to bfloat16, go back to the device.
#
# It goes well with ZeRO: in stages 1 to 3 a rank updates its *shard*, so each of N ranks sends Ψ/N gradients and gets
# Ψ/N parameters back.
#
# Predict, for stage 2 with offload, Ψ = 1,263,616 and N = 4. How many bytes of model states does a rank hold **on the
# device** when backward returns? And how many bytes cross its link to the host in a step, both directions together?

# %%
lab.predict("10.3", 2 * 1_263_616)  # bytes
lab.predict("10.4", 2 * 2 * 1_263_616 // 4)  # bytes

# %% [markdown]
# ## Write: an optimizer on the host
#
# On a laptop *device* and *host* are one memory. We keep honest books all the same. `HostLink` makes real copies,
# `link.to_host(tensor)` and `link.to_device(out, tensor)`, and counts their bytes. What came over the link is on the
# host, and so is what is made from it there, such as `tensor.float()` or `torch.zeros_like(tensor)`; everything else is
# on the device.
#
# `receive(start, grad)` is called whenever backward has finished a part of this rank's gradient, and `step()` when all
# parts of all micro-batches are there. Two things are easy to get wrong: on which side you cast (the wrong one doubles
# the traffic), and which copy of a parameter is the true one.

# %%
# %%exercise 10.2

# %%
lab.check("10.2")

# %% [markdown]
# ## Measure
#
# Your optimizer inside a ZeRO-1 made of your own parts: the flat buffer of 02.1, the reduce-scatter of 04.1, and an
# all-gather. It trains four steps on real text twice, once with the masters on the device and no link, and once with your
# optimizer on the host. What crosses the link is the same in stages 1 and 2, so this run measures 10.4, and the
# engine's, further down, measures 10.3.

# %%
# %%ranks
parts = lab.mine("02.1"), lab.mine("04.1")  # flat_buffer, reduce_scatter_mean
samples = [batch(words, rank, number, 8, 64) for number in range(4)]
equal, crossed = lab.on_device_and_host(make_model, lab.mine("10.2"), samples, *parts)

# %% [markdown]
# And the engine's own, `offload="optimizer"` with stage 2. What it would keep on a GPU counts as on the device.


# %%
# %%ranks
def where_it_is(stage, **options):
    half = zerolab.Precision(torch.bfloat16)
    zero = stage(make_model(), units=[Block], precision=half, **options)
    return lab.held_on_device_and_host(zero, samples[:2])


places = {
    "stage 2": where_it_is(zerolab.Zero2),
    "stage 2, offload": where_it_is(zerolab.Zero2, offload="optimizer"),
}

# %%
places, psi = lab.pull("places", rank=0), lab.pull("psi", rank=0)
lab.measured("10.3", sum(places["stage 2, offload"]["device"].values()))
lab.measured("10.4", int(lab.pull("crossed", rank=0)))
lab.reveal("10.3")
lab.reveal("10.4")

# %% tags=["nbval-check-output"]
equal = all(lab.pull("equal"))
print("on the host or on the device, losses and parameters bit for bit:", equal)
if lab.predicted("10.3") and lab.predicted("10.4"):
    print(lab.lines_of_places(places, psi))
    print(f"over the link in a step: {lab.pull('crossed', rank=0):,.0f} bytes = 4Ψ/4")

# %% [markdown]
# On the device 2Ψ stay, the bfloat16 parameters, whatever N is; with stage 3 it is 2Ψ/N. The host has this rank's shard
# of the rest: 2 bytes of gradient, 4 of master and 8 of averages are 14Ψ/N. (Yours holds its gradients in float32, so
# 16Ψ/N.)
#
# ## When does it pay?
#
# In each micro-batch 2Ψ/N bytes of gradients go down; once a step 2Ψ/N come up, and the host updates its parameters.
# That does not grow with the tokens, and computing does: 6Ψ operations for each token (lesson 09). With one
# micro-batch the link takes as long as the GPU when 4Ψ/N bytes ÷ bandwidth = 6Ψ operations × tokens ÷ speed. Ψ cancels:
# tokens = 4/N ÷ bandwidth × speed ÷ 6. The update moves 28 bytes per parameter through the host's memory (read: gradient, master and two averages,
# 16; written: the last three, 12). Here are both in tokens. Put in your own machine's numbers; these are manufacturers'
# figures, or a stated part of them:

# %% tags=["nbval-check-output"]
speed = 400e12  # operations per second: 40 % of the 989e12 (bfloat16) of an H100
to_host = 50e9  # bytes per second and direction: most of the 64e9 of its PCIe 5 link
memory = 600e9  # bytes per second: two sockets, sixteen channels of DDR5-4800, for 8 GPUs
for ranks in (1, 8, 64):
    link = (4 / ranks) / to_host * speed / 6
    update = 28 / max(1, ranks // 8) / memory * speed / 6  # every 8 ranks have a host
    down = f"({link / 2:,.0f} for the way down, paid in each micro-batch)"
    print(f"N = {ranks:2}: the link costs {link:>5,.0f} tokens {down}", end=", ")
    print(f"the update {update:>5,.0f}")

# %% [markdown]
# One GPU or eight, their host updates all Ψ parameters, and with eight that costs far more than the link; with 64 GPUs
# eight hosts share them. With one micro-batch all of it costs 8,444 tokens on one GPU, 3,778 on eight, and 472 on 64.
# So on one server, with a few thousand tokens per GPU, a GPU waits about as long as it computes, and hiding the way
# down behind backward saves only 333 of the 3,778. Accumulation shares only the way up and the update among more
# tokens. So offload pays when a model does not fit otherwise, or when the freed memory makes the micro-batch so large
# that the wait no longer counts.
#
# **In production** this is `"offload_optimizer": {"device": "cpu"}` in DeepSpeed 0.19.8. FSDP2's `CPUOffloadPolicy`
# (torch 2.13) keeps the shards of everything on the host, the parameters too, and sends those up before each gather.
#
# ## On trial
#
# > "Intermediate results are partitioned" (said of ZeRO, without qualification).


# %%
# %%ranks
stages = (zerolab.DDP, zerolab.Zero1, zerolab.Zero2, zerolab.Zero3)
by_stage = {stage.__name__: record(stage=stage, group=None)[0] for stage in stages}
left_by = {name: lab.left_by_forward(line) / 512e3 for name, line in by_stage.items()}

# %% tags=["nbval-check-output"]
left_by = {name: round(size, 1) for name, size in lab.pull("left_by", rank=0).items()}
print("activations when forward returns, kB per token:", left_by)

# %% [markdown]
# **Verdict: true of ZeRO-R's P_a, together with model parallelism; false of stages 1 to 3.** The stages divide what all
# ranks have in common. In data parallelism each rank has samples of its own, so no activation is stored twice, and
# there is nothing to divide.
#
# It is different when ranks share the work of *one layer*, each with some of the columns of its matrices (**[tensor
# parallelism](../docs/glossary.md#tensor-parallelism)**, lesson 15): all keep the same input. ZeRO-R's **P_a**
# (partitioned activations) leaves each 1/N of it, and all-gathers the rest before the second run. Of our model's
# inputs, 6 blocks × 512 tokens × 128 × 4 = 1,572,864 bytes, each of four ranks would keep 393,216 with P_a. (DeepSpeed
# 0.19.8: `partition_activations` in `activation_checkpointing`.)
#
# > "ZeRO cures fragmentation and memory bandwidth."
#
# **Verdict: false.** The stages cure *capacity*. Fragmentation, free memory in pieces too small to use, is a
# matter of lifetimes, and parameters that are gathered and released make holes of their own (the section for another
# day measures it). As for bandwidth: in every stage a
# rank computes with full parameters on samples of its own, so its forward and backward read and write what they always
# did, and in stage 3 gathers come on top. Only the optimizer's step touches 1/N.
#
# ## For another day: free, but of no use (8 minutes)
#
# On a fresh kernel, run the cells above first.
#
# An allocator hands out pieces of the GPU's memory and never moves them: somebody has a pointer. So free memory comes
# in **holes**, and a request must fit into one of them. **[Fragmentation](../docs/glossary.md#fragmentation)** means
# that the holes add up to much and none is large.
#
# `replay` takes every allocation of the first step that you recorded, sizes and lifetimes, and performs it again in one
# flat buffer, *first fit*: each request gets the lowest hole that is large enough (sizes are rounded up to 512 bytes,
# as CUDA's allocator does, which has more rules and cannot move anything either). The buffer is as large as the highest
# address that the step turns out to use, and the replay stops when backward is over. It is done twice: as it was, and
# with a region of its own for all gradients:

# %%
from zerolab.lab import OutOfMemory, replay

first_fit = replay(plain, until="backward")
apart = replay(plain, apart=["gradients"], until="backward")
titles = ["first fit", "gradients in one flat buffer"]
plots.show(plots.address_map([first_fit, apart], titles))

# %% [markdown]
# Black bars mark the largest hole. On the left, activations come and go, and between them lie gradients. Those of the
# last block were made while the activations of the blocks before it were still there, so they landed above them, and
# they stay until `zero_grad()`. This is the paper's diagnosis: *short lifetimes between long ones*.
#
# Does it matter? Suppose that the gradients are to be averaged now, as a library without buckets would do it: all of
# them copied into one **fused buffer**, so that one all-reduce is enough. It takes 4Ψ bytes.

# %%
arena = first_fit.arena
print(f"free: {arena.free:,} bytes in {len(arena.holes)} holes; wanted: {4 * psi:,}")
try:
    arena.take(4 * psi)
except OutOfMemory as error:
    print("OutOfMemory:", error)
arena.take(1 << 18)
print("a buffer of 256 KiB: taken")
apart.arena.take(4 * psi)
print("on the right, 4Ψ: taken")
print(f"in use at the peak: {first_fit.needed:,} bytes")
for name, ways in (("first fit", first_fit), ("gradients apart", apart)):
    more = 100 * (ways.arena.size / first_fit.needed - 1)
    print(f"{name:15} {ways.arena.size:,} bytes of addresses, {more:.1f} % more")
assert apart.arena.size > first_fit.arena.size and arena.free > 3 * 4 * psi > arena.largest

# %% [markdown]
# Several times as much is free, and the request fails. ZeRO-R has two answers.
#
# **C_B, constant buffers.** The fused buffer grew with the model: 4Ψ is 30 GB for 7.5 billion parameters. A buffer of
# *constant* size, filled and sent again and again, does the same work. The engine's buckets come close: of a block
# each, they grow with the width, and not with the number of layers (lesson 05).
#
# **M_D, memory defragmentation.** Long lifetimes get a region of their own, reserved before the step, as on the right.
# Then one hole is nearly all that is free. But that region is reserved while activations are at their peak and there
# are hardly any gradients yet, so the step needs *more* addresses than before. M_D buys large holes with reserved ones.
#
# **In production.** `torch.cuda.memory_reserved() - torch.cuda.memory_allocated()` is what the allocator has and
# nobody uses. If it is large when a run dies, try `PYTORCH_ALLOC_CONF=expandable_segments:True` (in older versions of
# torch `PYTORCH_CUDA_ALLOC_CONF`), with which regions of addresses can grow.
#
# And do the stages cure it? The same replay of a step with DDP and of one in stage 3:

# %% tags=["nbval-check-output"]
lines = lab.pull("by_stage", rank=0)
found = {name: replay(lines[name]) for name in ("DDP", "Zero3")}
beyond = {name: ways.arena.size / ways.needed for name, ways in found.items()}
more = beyond["Zero3"] > beyond["DDP"]
print("stage 3 needs more addresses beyond its peak than DDP:", more)

# %% [markdown]
# They do not. M_D, another part of the paper, does.
#
# ## Questions
#
# 1. A run with ZeRO-3 on 64 GPUs is out of memory with a batch of 8 and fits with 4. Which two settings do you try
#    first, and what does each cost?
# 2. You checkpoint every block of a model with 64 layers. What is the peak of activations made of? Would it be better
#    to checkpoint them in pairs, as one piece each?
# 3. (Of "For another day".) `nvidia-smi` shows 78 GB, torch says that 60 GB are allocated, and a request for 4 GB
#    fails. What is going on?
# 4. A model of 10 billion parameters on one GPU of 40 GB, bfloat16 with Adam: what does offload leave on the GPU, and
#    with how many tokens a step would you run it?
# 5. ZeRO-R's P_a keeps a quarter of each block's input on each of four ranks. Where does that save memory, and why not
#    in plain data parallelism?
# 6. With offload and ZeRO-2 on N ranks, a step has four micro-batches. What crosses a rank's link, and which part of it
#    would eight micro-batches spread among more tokens?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Activation checkpointing: about a third more arithmetic, and of the activations a tenth remains here when forward
#    returns, and a fifth at the peak; less with more layers. A smaller micro-batch with accumulation: no more
#    arithmetic, but smaller matrix products, and in stage 3 the gathers are repeated for every micro-batch.
# 2. Of 64 inputs, and the 16 vectors of the one block that is computed again: about 64 + 16 = 80 vectors per token
#    instead of 1,024 (the input of that block is counted twice). In pairs, 32 + 32 = 64: less. The optimum is where
#    both parts are equal, here at pairs of blocks.
# 3. Fragmentation (for another day, above): up to 18 GB (less what CUDA itself takes, lesson 02) belong to the
#    allocator, in holes of less than 4 GB. `expandable_segments:True`, reserving long lifetimes early, or the same
#    sequence length in every step helps.
# 4. 2Ψ = 20 GB of parameters; masters, averages and gradients, 140 GB, are on the host. With one GPU per host the
#    update costs as much as 3,100 tokens (by the numbers above), and the link as much as 2,700 each way. So take
#    micro-batches as large as fit. Eight thousand tokens in one: about half of the time is compute. A hundred
#    thousand in ten of them: gradients go down ten times, and three quarters are compute, more if the way down hides
#    behind backward.
# 5. Where ranks share the work of one layer (tensor parallelism) and all keep the same input. In data parallelism
#    each rank's inputs come from samples of its own: nothing is there twice.
# 6. Down go 2Ψ/N bytes of gradients for each micro-batch, 8Ψ/N in all; up come 2Ψ/N of parameters, once. More
#    micro-batches spread only the way up and the update on the host.

# %%
lab.stop()
lab.progress()
