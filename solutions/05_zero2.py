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
from zerolab.lab.data import batch, text
from zerolab.lab.models import GPT, Block
from zerolab.measure import ledger, model_states, timeline

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# Everything in float32, 4 ranks. How many bytes of gradients does a rank hold when backward returns in stage 2?

# %%
lab.predict("05.1", 4 * 867_072 // 4)

# %% [markdown]
# ## Release after reduce
#
# Gradients come from the last block to the first. As soon as a block's gradients are all there, they are reduced, while
# backward goes on with the block before it. Once reduced, this rank's slice is all that is wanted. Two traps:
#
# - The reduction runs *while* your method returns. Memory that it still reads must not go.
# - In stage 1 `unit.grad` is a **view** of the whole gradient, and a view keeps the whole storage alive.

# %%
# %%exercise 05.1
import zerolab
from zerolab import Unit


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit: Unit) -> None:
        super().post_backward(unit)
        unit.release_grad()


# %%
lab.check("05.1")

# %% [markdown]
# ## Measure
#
# Five steps on real text, stage 1 beside your stage 2.

# %%
# %%ranks
Zero2 = lab.mine(zerolab.Zero2)


def train(stage, steps=5):
    zero = stage(make_model(), units=[Block])
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        adam.zero_grad()
        with ledger(zero) as book:
            loss = zero.model(*batch(words, rank, step, 8, 64))
            loss.backward()
            held = model_states(zero, adam)
            adam.step()
        losses.append(loss.item())
    with zero.full_parameters():
        weights = [param.detach().clone() for param in zero.model.parameters()]
    return {"held": held, "sent": book.moved, "weights": weights, "losses": losses}


runs = {stage.__name__: train(stage) for stage in (zerolab.DDP, zerolab.Zero1, Zero2)}
held = {name: run["held"] for name, run in runs.items()}
sent = {name: run["sent"] for name, run in runs.items()}
same = all(torch.equal(a, b) for run in runs.values() for a, b in zip(run["weights"], runs["DDP"]["weights"]))
losses = {name: run["losses"] for name, run in runs.items()}

# %%
held = lab.pull("held", rank=0)
lab.measured("05.1", held["Zero2"]["gradients"], "bytes")
lab.reveal("05.1")

# %%
if lab.predicted("05.1"):
    bars = {name: {kind: size / 1e6 for kind, size in kinds.items()} for name, kinds in held.items()}
    plots.show(plots.stacks(bars, "What a rank holds when backward returns", "4 ranks, float32 with AdamW", "MB"))

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("05.1"):
    print("gradients:", ", ".join(f"{name} {kinds['gradients']:,} bytes" for name, kinds in held.items()))
    print("sent per step:", ", ".join(f"{name} {size:,} bytes" for name, size in lab.pull("sent", rank=0).items()))
    print("all parameters equal DDP's, to the last bit:", all(lab.pull("same")))

# %% [markdown]
# A quarter, to the byte, at no cost: the traffic is what it was.
#
# ## Why the peak may not fall
#
# What must fit is the *peak* of a step. Record whole steps of stages 1 and 2, with a batch of 16 × 64 tokens on each rank,
# and with one of 1 × 16. When the gradients' bytes are saved, are they the ones that the peak is made of? Predict: in which
# of the two does the peak fall by more, "large" or "small"?

# %%
lab.predict("05.2", "small")


# %%
# %%ranks
def record(stage, sequences, context, units=(Block,)):
    zero = stage(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(2):  # the first makes the optimizer state
        with timeline(zero, adam) as line:
            zero.model(*batch(words, rank, step, sequences, context)).backward()
            adam.step()
            adam.zero_grad()
    return line


large = [record(stage, 16, 64) for stage in (zerolab.Zero1, Zero2)]
small = [record(stage, 1, 16) for stage in (zerolab.Zero1, Zero2)]

# %%
large, small = lab.pull("large", rank=0), lab.pull("small", rank=0)
falls = {name: one.peak - two.peak for name, (one, two) in {"large": large, "small": small}.items()}
lab.measured("05.2", max(falls, key=falls.get))
lab.reveal("05.2")

# %%
if lab.predicted("05.2"):
    plots.show(plots.skyline(large))

# %%
if lab.predicted("05.2"):
    plots.show(plots.skyline(small))

# %% [markdown]
# With the large batch activations dominate. The peak comes early in backward, when nearly all activations are there and
# hardly any gradient yet: what ZeRO-2 saves is saved *later*, and the peak is what it was. With the small batch the peak
# comes when gradients have piled up, and there it falls.

# %%
if lab.predicted("05.2"):
    for name, fall in falls.items():
        print(f"{name} batch: stage 2 lowers the peak by {fall:,} bytes")

# %% [markdown]
# (By how much depends on when a collective gives its buffers back, which differs a little from run to run.) What the
# peaks are made of, to the byte:

# %%
if lab.predicted("05.2"):
    for name, pair in (("large", large), ("small", small)):
        for line in pair:
            parts = ", ".join(f"{kind} {size:,}" for kind, size in line.by_kind().items() if size)
            print(f"{name} batch, stage {line.stage}: peak {line.peak:,} = {parts}")
            assert sum(line.by_kind().values()) == line.peak

# %% [markdown]
# ## What size should a unit have?
#
# A unit is a bucket: it is reduced as one, and until then its whole gradient is there. Three choices: the whole model as
# one unit, the blocks, and every linear layer by itself. On an emulated network of 100 MB/s with 1 ms a message, where a
# reduce-scatter on 4 ranks takes 3 messages.

# %%
lab.link("100 MB/s, 1 ms")

# %%
# %%ranks
import time
from statistics import median

CHOICES = {"one unit": (GPT,), "blocks": (Block,), "linear layers": (torch.nn.Linear,)}


def timed(units, steps=6):
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
        found.append(1000 * (time.perf_counter() - begin))
    return len(zero.units), median(found[2:])


speed = {name: timed(units) for name, units in CHOICES.items()}

# %%
lab.link(None)

# %%
# %%ranks
peaks = {name: record(Zero2, 1, 16, units).peak for name, units in CHOICES.items()}

# %%
speed, peaks = lab.pull("speed", rank=0), lab.pull("peaks", rank=0)
for name, (units, milliseconds) in speed.items():
    print(f"{name:13} {units:3} units, peak {peaks[name]:>10,} bytes, {milliseconds:4.0f} ms a step (emulated link)")

# %% [markdown]
# One unit needs the fewest messages and has the highest peak: its gradients all have to be there before the first byte can
# leave, so ZeRO-2 saves nothing at the peak, and nothing travels while backward computes. A unit for each layer holds little
# and pays a latency for each. Blocks lie between. On your network the best size is another; the shape of the choice
# is the same.
#
# ## Gradient accumulation
#
# A batch that does not fit is cut into *micro-batches*: backward several times, then one step. In DDP one reduces after the last
# only: `with zero.no_sync():` around the others keeps gradients back. In stage 2 that has a price. For 4 micro-batches: how
# many bytes does a rank send in a step *without* `no_sync`, and how many bytes of gradients does it hold between
# micro-batches *with* it?

# %%
lab.predict("05.3", (4 + 1) * 4 * 867_072 * 3 // 4)
lab.predict("05.4", 4 * 867_072)

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
                    loss = zero.model(*batch(words, rank, parts * step + part, 2, 64)) / parts
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
    for name, (bytes_sent, bytes_held) in accumulated.items():
        print(f"reduce {name:17} {bytes_sent:>10,} bytes sent a step, {bytes_held:>9,} bytes of gradients in between")

# %% [markdown]
# Without `no_sync`: four reduce-scatters and one all-gather, each 4Ψ · ¾. With it: one of each, and whole gradients in between, as
# in stage 1. Memory or traffic; both at once cannot be had. (DeepSpeed's stage 2 reduces every micro-batch.)
#
# ## In production
#
# FSDP2 has ZeRO-2 as `fully_shard(..., reshard_after_forward=False)`: parameters are gathered once and stay until the end of
# backward. DeepSpeed's stage 2 copies gradients into buckets of `reduce_bucket_size` elements, 500 million unless you say
# otherwise, 2 GB in float32 that count at the peak; a unit is what plays this part here.
#
# ## On trial
#
# > "ZeRO improves accuracy."

# %%
# NBVAL_CHECK_OUTPUT
everyone = lab.pull("losses")
print(
    "losses of stages 0, 1 and 2 are equal to the last bit:",
    all(len({str(x) for x in r.values()}) == 1 for r in everyone),
)

# %% [markdown]
# **Verdict: false.** The same numbers, bit for bit: neither better nor worse. What may change accuracy is what one does with the
# memory that is free, a larger batch for instance.
#
# > "Larger buckets are always faster."
#
# **True while latency is what you pay, and at a price.** From single layers to blocks much time is won; from blocks to one unit, with a
# fifth of the messages, only little: what is left are bytes and computing. A bucket leaves when its last gradient is there, so the
# largest of all leaves when backward is over and nothing is left to compute meanwhile. And it has the highest peak:

# %%
# NBVAL_CHECK_OUTPUT
order = sorted(peaks, key=peaks.get, reverse=True)
print("highest peak first:", ", ".join(order))

# %% [markdown]
# Lesson 09 measures what hides behind what.
#
# ## Questions
#
# 1. You turn ZeRO-2 on and the peak stays. What do you look at first, and what would help instead?
# 2. Why must a stage not release the whole gradient as soon as it has *started* the reduction?
# 3. `unit.grad = unit.whole_grad[a:b]`: how much memory is free after `unit.whole_grad = None`?
# 4. 16 micro-batches, stage 2, a slow network. With or without `no_sync`?
# 5. 64 GPUs, 7.5 billion parameters, float32: model states in stages 1 and 2?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. What the peak is made of. If it is activations: a smaller micro-batch, or checkpointing (lesson 10). If it is one large
#    unit's gradient: smaller units.
# 2. The reduction still reads it, and memory that is given back is soon somebody else's: the mean is then made of garbage.
# 3. None. The slice is a view, and keeps the storage. It takes a `clone()`.
# 4. With, if the whole gradient fits: one reduce-scatter for 16. Else without, and the network is what you pay with.
# 5. 8Ψ + 8Ψ/64 = 60.9 GB, and 4Ψ + 12Ψ/64 = 31.4 GB.

# %%
lab.stop()
lab.progress()
