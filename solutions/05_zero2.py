# %% [markdown]
# # 05 · ZeRO-2: shard the gradients
#
# **The question.** With ZeRO-1, a rank updates its quarter of the model and needs only that quarter of the mean gradient.
# But it keeps the gradient of everything until `zero_grad()`. Let the rest go, and on 4 ranks another 3 bytes per parameter
# are free. It takes two lines. So you turn it on, look at your GPU's peak, and *nothing has changed*.
#
# After this lesson you will know when ZeRO-2 lowers the peak and when it cannot, how large a unit should be, and what
# gradient accumulation costs.

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
from torch.optim import AdamW
from zerolab import lab
from zerolab.lab import GPT, Block, batch, text
from zerolab.measure import ledger, model_states, timeline

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=8, width=128)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# Everything is in float32, on 4 ranks. In stage 2, how many bytes of gradients does a rank hold when backward returns?

# %%
lab.predict("05.1", 4 * 1_660_160 // 4)  # bytes

# %% [markdown]
# ## Release after reduce
#
# First look at what stage 1 does. `timeline` records every buffer from allocation to release (lesson 02). Here is one step,
# with a batch so small that its activations can hardly be seen:


# %%
# %%ranks
def record(stage, sequences, context, units=(Block,)):
    zero = stage(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step():
        zero.model(*batch(words, rank, 0, sequences, context)).backward()
        adam.step()
        adam.zero_grad()

    step()  # creates the optimizer state
    with timeline(zero, adam) as line:
        step()
    return line


stage1 = record(zerolab.Zero1, sequences=1, context=16)

# %%
plots.show(plots.skyline([lab.pull("stage1", rank=0)], title="1 × 16 tokens"))

# %% [markdown]
# Gradients arrive from the last block to the first. Once all of a block's gradients are there, their reduction starts,
# and backward goes on with the block before it. So the orange area grows block by block until backward is over, and
# then waits for the step. But once a block is reduced, this rank needs only its shard of the result. What stays should
# grow by a quarter of a block at a time.
#
# Your method is `post_backward(unit)`. The engine calls it when all gradients of the unit are in its bucket, as
# `unit.bucket.full` (lesson 03). Stage 1's version starts the reduction, which leaves the mean of the shard in
# `unit.bucket.grad`. There are three traps:
#
# - The reduction is still running when your method returns. What it still reads must not go before it is done.
# - In stage 1, `unit.bucket.grad` is a **[view](../docs/glossary.md#view)** of the full gradient, and a view keeps the entire storage alive.
# - Inside `no_sync` (lesson 03) nothing is reduced, so nothing may go. There `self.reduces(unit)` is False.
#
# `unit.bucket.release()` avoids all three: it waits until the reduction is over, copies the shard, and where nothing was
# reduced it finds nothing to do. If you free the memory yourself, you have to avoid them.

# %%
# %%exercise 05.1

# %%
lab.check("05.1")

# %% [markdown]
# ## Measure
#
# Train three steps on real text, four times: with stage 0, stage 1, your stage 2, and the package's.

# %%
# %%ranks
Zero2 = lab.mine(zerolab.Zero2)


def train(stage, steps=3):
    zero = stage(make_model(), units=[Block])
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            zero.model(*batch(words, rank, step, 4, 64)).backward()
            held = model_states(zero, adam)
            adam.step()
    with zero.full_parameters():
        weights = [param.detach().clone() for param in zero.model.parameters()]
    return {"held": held, "sent": book.moved, "weights": weights}


stages = {"DDP": zerolab.DDP, "Zero1": zerolab.Zero1}
stages |= {"Zero2": Zero2, "package": zerolab.Zero2}
runs = {name: train(stage) for name, stage in stages.items()}
held = {name: run["held"] for name, run in runs.items()}
sent = {name: run["sent"] for name, run in runs.items()}
mine = runs["Zero2"]["weights"]
same = {name: all(map(torch.equal, run["weights"], mine)) for name, run in runs.items()}

# %%
held = lab.pull("held", rank=0)
lab.measured("05.1", held["Zero2"]["gradients"])
lab.reveal("05.1")

# %%
if lab.predicted("05.1"):
    bars, learner = {}, [False, False, lab.passed("05.1")]
    for name in ("DDP", "Zero1", "Zero2"):
        bars[name] = {kind: size / 1e6 for kind, size in held[name].items()}
    title = "What a rank holds when backward returns"
    plots.show(plots.stacks(bars, title, "4 ranks, float32 with AdamW", "MB", learner))

# %% tags=["nbval-check-output"]
if lab.predicted("05.1"):
    for name, bytes_sent in lab.pull("sent", rank=0).items():
        size = held[name]["gradients"]
        print(f"{name:7} holds {size:,} bytes of gradients, sends {bytes_sent:,} a step")
    assert held["Zero2"] == held["package"]
    assert held["Zero2"]["gradients"] == 4 * 1_660_160 // 4
same = lab.pull("same")
print("this stage 2 equals the package's, bit for bit:", all(of["package"] for of in same))
equal = all(of["DDP"] and of["Zero1"] for of in same)
print("stages 0, 1 and 2 are equal, bit for bit:", equal)

# %% [markdown]
# A quarter, to the byte, and at no cost: the traffic is what it was, and so is every bit of the weights.
#
# ## And the peak?
#
# What must fit is the *[peak](../docs/glossary.md#peak)* of a step. Next you record a step of stage 1 and of stage 2, once with a batch of 8 × 64
# tokens on each rank, and once with 1 × 16. Are the gradient bytes that stage 2 saves part of the peak? Predict: with which
# of the two batches does the peak fall by more, "large" or "small"?

# %%
lab.predict("05.2", "small")  # "small" or "large"

# %%
# %%ranks
large = [record(stage, 8, 64) for stage in (zerolab.Zero1, Zero2)]
small = [stage1, record(Zero2, 1, 16)]

# %%
large, small = lab.pull("large", rank=0), lab.pull("small", rank=0)
falls = {"large": large[0].peak - large[1].peak, "small": small[0].peak - small[1].peak}
lab.measured("05.2", max(falls, key=falls.get))
lab.reveal("05.2")

# %%
if lab.predicted("05.2"):
    whose = [False, lab.passed("05.1")]
    plots.show(plots.skyline(large, learner=whose, title="8 × 64 tokens"))

# %%
if lab.predicted("05.2"):
    plots.show(plots.skyline(small, learner=whose, title="1 × 16 tokens"))

# %% [markdown]
# With the large batch the peak is a mountain of activations. It comes when forward is over and hardly any gradients are
# there yet. What ZeRO-2 saves, it saves *later* (compare the end of backward), so the peak is what it was. With the small
# batch the peak comes when gradients have piled up, so it falls. Here is what the four peaks are made of, to the byte:

# %%
from zerolab.measure import KINDS

if lab.predicted("05.2"):
    head = "large, stage 1", "stage 2", "small, stage 1", "stage 2"
    print("{:20}{:>16}{:>12}{:>16}{:>12}".format("", *head))
    table = [line.by_kind() for line in (*large, *small)]
    for kind in KINDS:
        a, b, c, d = (column[kind] for column in table)
        print(f"{kind:20}{a:>16,}{b:>12,}{c:>16,}{d:>12,}")
    a, b, c, d = (line.peak for line in (*large, *small))
    print(f"{'peak':20}{a:>16,}{b:>12,}{c:>16,}{d:>12,}")
    assert [sum(column.values()) for column in table] == [a, b, c, d]
    assert all(column["parameters"] == 4 * 1_660_160 for column in table)
    assert all(column["optimizer"] == 8 * 1_660_160 // 4 + 4 * 101 for column in table)

# %% [markdown]
# - *parameters* are 4Ψ and stay. *optimizer* is 8Ψ/4, plus 4 bytes for the step counter of each of the 101 tensors.
# - *gradients*, large batch: the buckets of the last block and of the root, where backward begins. Small batch, stage 1:
#   all 4Ψ, and what autograd has just computed and not yet put into a bucket. Small batch, stage 2: the shards of the
#   blocks that are done, the root's bucket, which fills up only at the end, and the full buckets of one or two blocks. One
#   is being filled, the other is being reduced.
# - *communication* is where a reduction receives the other ranks' parts: with four ranks, three quarters of the block.
# - *other* is the batch, 8 bytes a token. *activations* you took apart in lesson 02.
#
# (A collective gives its buffers back a moment sooner or later. So with the small batch, gradients and communication may
# differ by a block from run to run. Everything else is the same every time.)
#
# So before you turn stage 2 on, ask what your peak is made of.
#
# ## What size should a unit have?
#
# A unit is also a bucket: it is reduced as one, and until then its full gradient is in memory. Compare three choices: the
# entire model as one unit, each block as a unit, and each linear layer as a unit. The network is emulated: 100 MB/s, and 1
# ms per message. On 4 ranks a reduce-scatter takes 3 messages, and so does an all-gather.

# %%
lab.link("100 MB/s, 1 ms")

# %%
# %%ranks
import time
from statistics import median

CHOICES = {"one unit": (GPT,), "blocks": (Block,), "linear layers": (torch.nn.Linear,)}


def timed(units, steps=4):
    zero = Zero2(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        adam.zero_grad()
        inputs = batch(words, rank, step, 4, 64)
        dist.barrier()
        begin = time.perf_counter()
        zero.model(*inputs).backward()
        adam.step()
        found.append(time.perf_counter() - begin)
    return len(zero.units), median(found[2:])


speed = {name: timed(units) for name, units in CHOICES.items()}

# %%
speed = lab.pull("speed", rank=0)
costs = {}
for name, (units, seconds) in speed.items():
    latency, transfer = units * (3 + 3) * 0.001, 2 * 4 * 1_660_160 * 3 / 4 / 100e6
    costs[f"{name} ({units})"] = plots.Cost(latency, transfer, seconds)
title = "A training step, by unit size"
subtitle = "ZeRO-2 on 4 ranks, number of units in brackets"
plots.show(plots.call_costs(costs, title, subtitle))
lab.link(None)

# %% [markdown]
# The bars are the time that the link takes; the diamonds are the time of the entire step. With a unit for each layer,
# latency is most of the bar. The gap between a bar and its diamond is what the step takes beyond the link. A single
# unit can leave only when its last gradient is there, and by then backward is over; blocks leave while backward
# computes. How much that gains doesn't show where four ranks share a laptop's cores. Lesson 09 measures it, on an
# emulated processor.
#
# And memory? For one step with the small batch, here are the peak and the most gradients that were there at any moment:

# %%
# %%ranks
lines = {"blocks": small[1]}
for name, units in CHOICES.items():
    if name != "blocks":
        lines[name] = record(Zero2, 1, 16, units)
peaks = {name: (lines[name].peak, max(lines[name].curve("gradients"))) for name in CHOICES}

# %% tags=["reveals"]
peaks = lab.pull("peaks", rank=0)
for name, (peak, gradients) in peaks.items():
    print(f"{name:13} peak {peak:>10,} bytes, gradients up to {gradients:>9,}")

# %% tags=["nbval-check-output"]
at_once = {name: gradients >= 4 * 1_660_160 for name, (_, gradients) in peaks.items()}
print("all gradients of the model are in memory at once:", at_once)

# %% [markdown]
# One unit has the highest peak. ZeRO-2 saves nothing there, because all gradients have to be there before the first byte
# can leave. On top of that, this rank's shard is copied out before they go: 4Ψ + Ψ bytes. On your network another size will
# be best, but the rule is the same: *large enough that latency does not count, small enough that a few fit beside
# everything else.*
#
# ## Gradient accumulation
#
# A batch that does not fit is cut into *[micro-batches](../docs/glossary.md#micro-batch)*: backward runs several times, then comes one step. In DDP you reduce
# only after the last one, and `with zero.no_sync():` around the others keeps their gradients back. In stage 2 that has a
# price. With 4 micro-batches, how many bytes does a rank send in a step *without* `no_sync`? And how many bytes of
# gradients does it hold between micro-batches *with* it?

# %%
lab.predict("05.3", (4 + 1) * 4 * 1_660_160 * 3 // 4)  # bytes
lab.predict("05.4", 4 * 1_660_160)  # bytes

# %%
# %%ranks
from contextlib import nullcontext


def accumulate(keep_back, steps=2, parts=4):
    zero = Zero2(make_model(), units=[Block])
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            for part in range(parts):
                last = part == parts - 1
                with zero.no_sync() if keep_back and not last else nullcontext():
                    micro = batch(words, rank, parts * step + part, 2, 64)
                    loss = zero.model(*micro) / parts
                    loss.backward()
                if part == 1:
                    between = model_states(zero, adam)["gradients"]
            adam.step()
    return book.moved, between


accumulated = {"every micro-batch": accumulate(False), "the last only": accumulate(True)}

# %%
accumulated = lab.pull("accumulated", rank=0)
lab.measured("05.3", accumulated["every micro-batch"][0])
lab.measured("05.4", accumulated["the last only"][1])
lab.reveal("05.3")
lab.reveal("05.4")

# %% tags=["nbval-check-output"]
if lab.predicted("05.3") and lab.predicted("05.4"):
    for name, (bytes_sent, between) in accumulated.items():
        print(f"{name:17} {bytes_sent:>10,} bytes sent,", end=" ")
        print(f"{between:>9,} bytes of gradients in between")

# %% [markdown]
# Without `no_sync`, a step has four reduce-scatters, whose shards the engine adds up, and one all-gather, of 4Ψ · ¾
# bytes each. With it, a step has one of each, and holds full gradients in between, as in stage 1. You can save memory
# or traffic, but not both. (DeepSpeed's stage 2 reduces every micro-batch.)
#
# ## In production
#
# FSDP2 has a form of ZeRO-2: `fully_shard(..., reshard_after_forward=False)`. Each rank keeps its rows of every parameter,
# gathers a block's parameters in forward, and releases them after the block's *backward*. (Without the option it releases
# them after the block's forward as well, and that is ZeRO-3.) Here it is beside your stage 2, on the same model and text:

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab import calls
from zerolab.measure import peak_of


def build_theirs():
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=False)
    return model, AdamW(model.parameters(), lr=1e-3)


def build_ours():
    zero = Zero2(make_model(), units=[Block])
    return zero.model, AdamW(zero.model.parameters(), lr=1e-3)


def steps_of(build, sequences, context):
    model, adam = build()

    def step(number=0):
        model(*batch(words, rank, number, sequences, context)).backward()
        adam.step()
        adam.zero_grad()

    return model, step


# %%
# %%ranks
theirs, step = steps_of(build_theirs, 4, 64)
for number in range(3):
    with calls() as book:
        step(number)
their_weights = [param.full_tensor() for param in theirs.parameters()]
pairs = zip(their_weights, runs["Zero2"]["weights"], strict=True)
difference = max((a - b).abs().max().item() for a, b in pairs)
traffic = len(book.calls), book.sent

theirs(*batch(words, rank, 3, 4, 64)).backward()
kept = {"parameters": sum(param.to_local().nbytes for param in theirs.parameters())}
kept["gradients"] = sum(param.grad.to_local().nbytes for param in theirs.parameters())


# %%
# %%ranks
def peak_with(build):
    if rank == 0:  # the profiler is slow, and the other ranks are like this one
        return peak_of(lambda: steps_of(build, 8, 64)[1], torch.device("cpu"), steps=2)
    _, step = steps_of(build, 8, 64)
    step()
    step()


allocated = peak_with(build_ours), peak_with(build_theirs)

# %%
difference = max(lab.pull("difference"))
print(f"the weights differ by at most {difference:.0e};", end=" ")
print("one step of Adam moves a weight by 1e-3")
ours, theirs = lab.pull("allocated", rank=0)
print("the allocator's peak with the large batch:", end=" ")
print(f"stage 2 {ours:,} bytes, fully_shard {theirs:,}")

# %% tags=["nbval-check-output"]
print("after three steps the weights agree to 0.0001:", difference < 1e-4)
if lab.predicted("05.1"):
    number, theirs = lab.pull("traffic", rank=0)
    ours = lab.pull("sent", rank=0)["Zero2"]
    print(f"sent in a step: stage 2 {ours:,} bytes,", end=" ")
    print(f"fully_shard {theirs:,.0f} in {number} calls")
    assert ours == theirs
    for kind, theirs in lab.pull("kept", rank=0).items():
        ours = held["Zero2"][kind]
        print(f"{kind} after backward: stage 2 {ours:,} bytes, fully_shard {theirs:,}")

# %% [markdown]
# - **Numbers**: equal up to rounding. gloo's reduce-scatter adds the ranks in the order of its ring; ours adds them in rank
#   order.
# - **Traffic**: the same, to the byte: 9 all-gathers, each just before the forward that needs the parameters, and 9
#   reduce-scatters. (`calls()` notes what passes through PyTorch's dispatcher, and counts it as a ring would send it.
#   Inside, gloo's own reduce-scatter is an all-reduce and really sends twice as much; NCCL's is not.)
# - **Memory**: between backward and the next forward, `fully_shard` keeps a quarter of the parameters, where the paper's
#   stage 2 keeps them all. That lowers the floor, not the peak. In the middle of a step the full parameters are there *in
#   addition to* the quarter, and a block's parameters are copied into and out of its buffers. (This is the peak as the
#   allocator counts it, for both in the same way. It includes what the collectives need. It changes by a block or two from
#   run to run, depending on when they give that memory back.)
#
# DeepSpeed's stage 2 copies gradients into buckets of `reduce_bucket_size` elements, 500 million unless you say otherwise.
# In float32 that is 2 GB, and it counts at the peak. Here a unit plays that part.
#
# ## On trial
#
# > "ZeRO reduces communication." · "Every additional stage and offload level reduces peak memory, at the cost of more
# > inter-GPU communication."
#
# Some articles say the first; the second is from the guide to DeepSpeed in the [documentation of
# Transformers](https://huggingface.co/docs/transformers/deepspeed) (2026).
#
# **Verdict: false**, both. You have counted it: stages 1 and 2 send what DDP sends, to the byte. Only stage 3 sends
# more (lessons 06 and 07). And a stage lowers what is *held*; the peak need not follow, as you saw with the large
# batch. And what is offloaded travels between a GPU and its own host, and not between GPUs (lesson 10). If you believe
# the second sentence, you stay with DDP on a slow network, and pay for three copies of Adam's state that cost nothing
# to avoid.
#
# > "Larger buckets are always faster."

# %% tags=["nbval-check-output"]
highest = max(peaks, key=lambda name: peaks[name][0])
for name, (units, _) in speed.items():
    print(f"{name:13} {6 * units:3} messages in a step")
print("the highest peak:", highest)

# %% [markdown]
# **Verdict: false**, because of one word. While latency is what you pay for, it is true: going from single layers to
# blocks saves a lot of time. Going from blocks to one unit, with a ninth of the messages, saves little or nothing: what
# is left is the bytes, which are the same, and with one unit they can no longer hide behind computation. And the
# largest unit has the highest peak. (`zerolab.measure.trace` measures what hides behind what.)

# %% [markdown]
# ## Your engine on trial
#
# The same for your stage 2. Two of the promises are about memory. What a rank holds when backward returns is where [a
# "ZeRO-2" that was ZeRO-1](https://github.com/karpathy/nanochat/issues/566) gives itself away. An engine that reduces
# its gradients only when backward is over gives itself away at the peak: it ends up with its own part, and held all of
# them.

# %% tags=["nbval-check-output"]
import zerolab

promises = [
    "plain", "accumulate", "held after backward", "held at the peak", "moved in a step",
    "moved by accumulation",
]
lab.trial(zerolab.Zero2, *promises)

# %% [markdown]
# ## Questions
#
# 1. You turn ZeRO-2 on and the peak stays. What do you look at first, and what would help instead?
# 2. Why must a stage not release the full gradient as soon as it has *started* the reduction?
# 3. After `unit.bucket.grad = unit.bucket.full[a:b]`, how much memory does `unit.bucket.full = None` free?
# 4. 16 micro-batches, stage 2, a slow network: with or without `no_sync`?
# 5. 64 GPUs, 7.5 billion parameters, float32: how large are the model states in stages 1 and 2?
# 6. `fully_shard` with `reshard_after_forward=False` keeps a quarter of the parameters between steps. Why does that not
#    lower its peak?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. What the peak is made of. If it is activations, use a smaller micro-batch or activation checkpointing
#    (`torch.utils.checkpoint`). If it is one large unit's gradient, use smaller units.
# 2. The reduction still reads it. Freed memory soon belongs to something else, and then the mean is computed from garbage.
# 3. None. The slice is a view, and keeps the storage alive. It takes a `clone()`.
# 4. With it, if the full gradient fits: one reduce-scatter instead of 16. Otherwise without it, and you pay in traffic.
# 5. 8Ψ + 8Ψ/64 = 60.9 GB, and 4Ψ + 12Ψ/64 = 31.4 GB.
# 6. The peak comes in forward or backward. There the full parameters are gathered, in addition to the quarter.

# %%
lab.stop()
lab.progress()
