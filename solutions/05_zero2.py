# %% [markdown]
# # 05 · ZeRO-2: shard the gradients
#
# **The question.** With ZeRO-1 a rank updates its quarter of the model, and needs the mean gradient of that quarter alone. But
# it keeps the gradient of everything until `zero_grad()`. Let the rest go, and another 3 bytes per parameter are free on 4
# ranks. It takes two lines. So you turn it on, look at your GPU's peak, and *nothing has changed*.
#
# After this lesson you know when ZeRO-2 lowers the peak and when it cannot, what size a unit should have, and what gradient
# accumulation costs.

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
from torch.optim import AdamW
from zerolab import lab
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block
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
# Everything in float32, 4 ranks. How many bytes of gradients does a rank hold when backward returns in stage 2?

# %%
lab.predict("05.1", 4 * 1_660_160 // 4)

# %% [markdown]
# ## Release after reduce
#
# First look at what stage 1 does. `timeline` writes down every buffer from its allocation to its release (lesson 02). Here
# is one step with a batch so small that hardly an activation is to be seen:


# %%
# %%ranks
def record(stage, sequences, context, units=(Block,)):
    zero = stage(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step():
        zero.model(*batch(words, rank, 0, sequences, context)).backward()
        adam.step()
        adam.zero_grad()

    step()  # makes the optimizer state
    with timeline(zero, adam) as line:
        step()
    return line


stage1 = record(zerolab.Zero1, sequences=1, context=16)

# %%
plots.show(plots.skyline([lab.pull("stage1", rank=0)]))

# %% [markdown]
# Gradients come from the last block to the first. As soon as a block's are all there, they are reduced, while backward goes
# on with the block before it. So the orange area grows block by block until backward is over, and waits for the step. But
# once a block is reduced, this rank's slice of it is all that is wanted: the area should grow by a quarter of that.
#
# Your method is `post_backward(unit)`, which the engine calls when all gradients of the unit are there, in the bucket
# `unit.whole_grad` (lesson 03). Stage 1 starts the reduction in it, and leaves the mean of the shard in `unit.grad`. Three traps:
#
# - The reduction runs *while* your method returns. Memory that it still reads must not go.
# - In stage 1 `unit.grad` is a **view** of the whole gradient, and a view keeps the whole storage alive.
# - Inside `no_sync` (lesson 03) nothing is reduced, and nothing may go: `self.reduces(unit)` is False there.

# %%
# %%exercise 05.1

# %%
lab.check("05.1")

# %% [markdown]
# ## Measure
#
# Three steps on real text: stages 0 and 1, your stage 2, and the package's.

# %%
# %%ranks
Zero2 = lab.mine(zerolab.Zero2)


def train(stage, steps=3):
    zero = stage(make_model(), units=[Block])
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            loss = zero.model(*batch(words, rank, step, 4, 64))
            loss.backward()
            held = model_states(zero, adam)
            adam.step()
        losses.append(loss.item())
    with zero.full_parameters():
        weights = [param.detach().clone() for param in zero.model.parameters()]
    return {"held": held, "sent": book.moved, "weights": weights, "losses": losses}


stages = {"DDP": zerolab.DDP, "Zero1": zerolab.Zero1, "Zero2": Zero2, "package": zerolab.Zero2}
runs = {name: train(stage) for name, stage in stages.items()}
held = {name: run["held"] for name, run in runs.items()}
sent = {name: run["sent"] for name, run in runs.items()}
losses = {name: run["losses"] for name, run in runs.items()}
mine = runs["Zero2"]["weights"]
same = {name: all(map(torch.equal, run["weights"], mine)) for name, run in runs.items()}

# %%
held = lab.pull("held", rank=0)
lab.measured("05.1", held["Zero2"]["gradients"], "bytes")
lab.reveal("05.1")

# %%
if lab.predicted("05.1"):
    bars, learner = {}, [False, False, lab.passed("05.1")]
    for name in ("DDP", "Zero1", "Zero2"):
        bars[name] = {kind: size / 1e6 for kind, size in held[name].items()}
    title = "What a rank holds when backward returns"
    plots.show(plots.stacks(bars, title, "4 ranks, float32 with AdamW", "MB", learner))

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("05.1"):
    for name, bytes_sent in lab.pull("sent", rank=0).items():
        size = held[name]["gradients"]
        print(f"{name:7} holds {size:,} bytes of gradients, sends {bytes_sent:,} a step")
    assert held["Zero2"] == held["package"] and held["Zero2"]["gradients"] == 4 * 1_660_160 // 4
same = lab.pull("same")
print("stage 2 as above and the package's, the same bits:", all(of["package"] for of in same))
print("stages 0, 1 and 2, the same bits:", all(of["DDP"] and of["Zero1"] for of in same))

# %% [markdown]
# A quarter, to the byte, and at no cost: the traffic is what it was, and so is every bit of the weights.
#
# ## Why the peak may not fall
#
# What must fit is the *peak* of a step. Record whole steps of stages 1 and 2 with a batch of 8 × 64 tokens on each rank,
# and with one of 1 × 16. When the gradients' bytes are saved, are they the ones that the peak is made of? Predict: with
# which of the two batches does the peak fall by more, "large" or "small"?

# %%
lab.predict("05.2", "small")

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
    plots.show(plots.skyline(large, learner=[False, lab.passed("05.1")]))

# %%
if lab.predicted("05.2"):
    plots.show(plots.skyline(small, learner=[False, lab.passed("05.1")]))

# %% [markdown]
# With the large batch the peak is a mountain of activations. It comes when forward is over and hardly a gradient is there:
# what ZeRO-2 saves, it saves *later* (compare the end of backward), and the peak is what it was. With the small batch the peak comes when gradients have
# piled up, and there it falls. What the four peaks are made of, to the byte:

# %%
from zerolab.measure.timeline import KINDS

if lab.predicted("05.2"):
    print(f"{'':20}{'large, stage 1':>16}{'stage 2':>12}{'small, stage 1':>16}{'stage 2':>12}")
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
# - *parameters* are 4Ψ and stay; *optimizer* is 8Ψ/4 and 4 bytes for each of the 101 tensors' step counters.
# - *gradients*, large batch: the buckets of the last block and of the root, where backward begins. Small batch, stage 1: all
#   4Ψ, and what autograd has just made and not yet put into a bucket. Stage 2: the slices of the blocks that are done, the
#   root's bucket, which is full only in the end, and one or two whole blocks, one that is filled and one that is reduced.
# - *communication* is where a reduction receives the other ranks' parts: three quarters of the block, with four ranks.
# - *other* is the text (465 kB or so), the batch, and a few bytes in which the ranks agree. *activations* you took apart in lesson 02.
#
# (A collective gives its buffers back a moment sooner or later, so with the small batch gradients and communication may
# differ by a block from run to run. All else is the same every time.)
#
# So before you turn stage 2 on, ask what your peak is made of.
#
# ## What size should a unit have?
#
# A unit is a bucket: it is reduced as one, and until then its whole gradient is there. Three choices: the whole model as
# one unit, the blocks, and every linear layer by itself. On an emulated network of 100 MB/s with 1 ms a message, where a
# reduce-scatter on 4 ranks takes 3 messages, and so does an all-gather.

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
title, subtitle = "A training step, by size of unit", "ZeRO-2 on 4 ranks, units in brackets"
plots.show(plots.call_costs(costs, title, subtitle))
lab.link(None)

# %% [markdown]
# The bars are what the link takes, the diamonds the whole step. With every layer by itself, latency is most of the bar. From
# a diamond back to its bar lies what the step takes beside the link: with blocks it is less than with one unit, for some of
# the bytes travel while backward computes. One unit leaves when its last gradient is there, and then backward is over.
# (On two busy cores that difference is small, and some days it is not there. On GPUs it is what buckets are for.)
#
# And memory? Of a step with the small batch, the peak, and the most that there was of gradients at one moment:

# %%
# %%ranks
lines = {name: record(Zero2, 1, 16, units) for name, units in CHOICES.items() if name != "blocks"}
lines["blocks"] = small[1]
peaks = {name: (lines[name].peak, max(lines[name].curve("gradients"))) for name in CHOICES}

# %% tags=["reveals"]
peaks = lab.pull("peaks", rank=0)
for name, (peak, gradients) in peaks.items():
    print(f"{name:13} peak {peak:>10,} bytes, gradients up to {gradients:>9,}")

# %%
# NBVAL_CHECK_OUTPUT
whole = {name: gradients >= 4 * 1_660_160 for name, (_, gradients) in peaks.items()}
print("the gradients of the whole model are there at once:", whole)

# %% [markdown]
# One unit has the highest peak: ZeRO-2 saves nothing there, for its gradients all have to be there before the first byte can
# leave (and this rank's slice is copied out before they go: 4Ψ + Ψ). On your network the best size is another; the shape of the choice is the same: *large enough that latency does not
# count, small enough that a few fit beside everything else.*
#
# ## Gradient accumulation
#
# A batch that does not fit is cut into *micro-batches*: backward several times, then one step. In DDP one reduces after the last
# only: `with zero.no_sync():` around the others keeps gradients back. In stage 2 that has a price. For 4 micro-batches: how
# many bytes does a rank send in a step *without* `no_sync`, and how many bytes of gradients does it hold between
# micro-batches *with* it?

# %%
lab.predict("05.3", (4 + 1) * 4 * 1_660_160 * 3 // 4)
lab.predict("05.4", 4 * 1_660_160)

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
lab.measured("05.3", accumulated["every micro-batch"][0], "bytes")
lab.measured("05.4", accumulated["the last only"][1], "bytes")
lab.reveal("05.3")
lab.reveal("05.4")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("05.3") and lab.predicted("05.4"):
    for name, (bytes_sent, between) in accumulated.items():
        print(f"{name:17} {bytes_sent:>10,} bytes sent, {between:>9,} of gradients in between")

# %% [markdown]
# Without `no_sync`: four reduce-scatters and one all-gather, each 4Ψ · ¾. With it: one of each, and whole gradients in between, as
# in stage 1. Memory or traffic; both at once cannot be had. (DeepSpeed's stage 2 reduces every micro-batch.)
#
# ## In production
#
# FSDP2 has a form of ZeRO-2: `fully_shard(..., reshard_after_forward=False)`. Each rank keeps its rows of every parameter,
# gathers a block's parameters in forward, and lets them go when the block's *backward* is over (without the option also
# after its forward, and then it is ZeRO-3). Side by side with your stage 2, on the same model and text:

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab.ranks.calls import calls
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
    if rank == 0:  # the profiler takes its time, and one rank is like the others
        return peak_of(lambda: steps_of(build, 8, 64)[1], torch.device("cpu"), steps=2)
    _, step = steps_of(build, 8, 64)
    step()
    step()


allocated = peak_with(build_ours), peak_with(build_theirs)

# %%
difference = max(lab.pull("difference"))
print(f"weights differ by {difference:.0e} at most; one step of Adam moves a weight by 1e-3")
ours, theirs = lab.pull("allocated", rank=0)
print(f"large batch, the allocator's peak: stage 2 {ours:,} bytes, fully_shard {theirs:,}")

# %%
# NBVAL_CHECK_OUTPUT
print("the same weights to 0.0001 after three steps:", difference < 1e-4)
if lab.predicted("05.1"):
    number, theirs = lab.pull("traffic", rank=0)
    ours = lab.pull("sent", rank=0)["Zero2"]
    print(f"sent in a step: stage 2 {ours:,} bytes, fully_shard {theirs:,.0f} in {number} calls")
    assert ours == theirs
    for kind, theirs in lab.pull("kept", rank=0).items():
        ours = held["Zero2"][kind]
        print(f"{kind} after backward: stage 2 {ours:,} bytes, fully_shard {theirs:,}")

# %% [markdown]
# - **Numbers**: equal to rounding. gloo's reduce-scatter adds the ranks in the order of its ring, ours in rank order.
# - **Traffic**: the same, to the byte: 9 all-gathers, each just before the forward that needs the parameters, and 9
#   reduce-scatters. (`calls()` notes what passes PyTorch's dispatcher, and counts it as a ring would send it. gloo's own
#   reduce-scatter is an all-reduce inside and really sends twice as much; NCCL's is not.)
# - **Memory**: between backward and the next forward `fully_shard` keeps a quarter of the parameters, where stage 2 of
#   the paper keeps all. That lowers the floor, not the peak: in the middle of a step the whole parameters are there
#   *beside* the quarter, and a block's are copied on their way into and out of its buffers. (This is the peak as the
#   allocator counts it, for both in the same way. It sees what the collectives need too, and changes from run to run by
#   a block or two, with the moment at which they give it back.)
#
# DeepSpeed's stage 2 copies gradients into buckets of `reduce_bucket_size` elements, 500 million unless you say otherwise: 2
# GB in float32 that count at the peak. A unit is what plays this part here.
#
# ## On trial
#
# > "ZeRO improves accuracy."

# %%
# NBVAL_CHECK_OUTPUT
equal = [of["DDP"] == of["Zero1"] == of["Zero2"] for of in lab.pull("losses")]
print("the losses of stages 0, 1 and 2 are equal to the last bit, on all ranks:", all(equal))

# %% [markdown]
# **Verdict: false.** The same numbers, bit for bit: neither better nor worse. What may change accuracy is what one does with the
# memory that is free, a larger batch for instance.
#
# > "Larger buckets are always faster."

# %%
# NBVAL_CHECK_OUTPUT
highest = max(peaks, key=lambda name: peaks[name][0])
for name, (units, _) in speed.items():
    print(f"{name:13} {6 * units:3} messages in a step")
print("the highest peak has:", highest)

# %% [markdown]
# **True while latency is what you pay, and at a price.** From single layers to blocks much time is won; from blocks to one unit, with a
# ninth of the messages, little or nothing: what is left are bytes, which are the same, and computing, which they then
# cannot hide behind. And the largest unit of all has the highest peak. (`zerolab.measure.trace` measures what hides behind what.)
#
# ## Questions
#
# 1. You turn ZeRO-2 on and the peak stays. What do you look at first, and what would help instead?
# 2. Why must a stage not release the whole gradient as soon as it has *started* the reduction?
# 3. `unit.grad = unit.whole_grad[a:b]`: how much memory is free after `unit.whole_grad = None`?
# 4. 16 micro-batches, stage 2, a slow network. With or without `no_sync`?
# 5. 64 GPUs, 7.5 billion parameters, float32: model states in stages 1 and 2?
# 6. `fully_shard` with `reshard_after_forward=False` keeps a quarter of the parameters between steps. Why does that not
#    lower its peak?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. What the peak is made of. If it is activations: a smaller micro-batch, or activation checkpointing
#    (`torch.utils.checkpoint`). If it is one large unit's gradient: smaller units.
# 2. The reduction still reads it, and memory that is given back is soon somebody else's: the mean is then made of garbage.
# 3. None. The slice is a view, and keeps the storage. It takes a `clone()`.
# 4. With, if the whole gradient fits: one reduce-scatter for 16. Else without, and the network is what you pay with.
# 5. 8Ψ + 8Ψ/64 = 60.9 GB, and 4Ψ + 12Ψ/64 = 31.4 GB.
# 6. The peak comes in forward or backward, and there the whole parameters are gathered, beside the quarter.

# %%
lab.stop()
lab.progress()
