# %% [markdown]
# # 08 · Mixed precision
#
# **The question.** GPUs multiply matrices of 16-bit numbers faster than 32-bit ones. The matrix units of an H100 reach 989
# TFLOPS in bfloat16 and 495 in TF32, which rounds every float32 to 11 binary digits first; for float32 itself there are only
# ordinary units, with 67 (SXM version, without sparsity, by NVIDIA's data sheet). So large models are trained in
# *[mixed precision](../docs/glossary.md#mixed-precision)*: forward and backward in 16 bits, some of the rest in 32. Half the
# bits, so half the memory? You plan for that, and your run is out of memory in its first step. Somebody else picks the other
# 16-bit format. Their run trains for a day, then the loss is `nan`, and so is every weight in the checkpoint that was written
# an hour later.
#
# After this lesson you can say, to the byte, what 16 bits save in each stage. And you will have written the part that keeps
# a float16 run alive: a loss scaler whose ranks agree.

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
from torch import nn
from torch.optim import AdamW
from zerolab import Precision, lab
from zerolab.lab import GPT, Block, batch, text
from zerolab.measure import ledger, model_states, timeline

words = text()
STAGES = zerolab.DDP, zerolab.Zero1, zerolab.Zero2, zerolab.Zero3
BF16, FP16 = Precision(torch.bfloat16), Precision(torch.float16)


def make_model(weights=None):
    torch.manual_seed(0)
    model = GPT(layers=2, width=128)
    if weights is not None:
        model.load_state_dict(weights)
    return model


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# In mixed precision with **bfloat16** (written bf16), forward and backward use a copy of the weights in 2 bytes, and
# gradients are in 2 bytes too. The optimizer updates weights in float32, the
# **[masters](../docs/glossary.md#master-weights)** (lesson 02), and Adam's two averages stay in float32. Masters are
# the optimizer's, and a stage that shards its averages shards them too. In **stage 2** on N = 4 ranks, when backward
# returns, how many bytes per parameter does a rank hold *less* with bf16 than with everything in float32?

# %%
lab.predict("08.1", (4 + 12 / 4) - (2 + 14 / 4))  # bytes per parameter

# %% [markdown]
# And how many bytes does a rank *send* in a step of stage 2, as a multiple of float32's?

# %%
lab.predict("08.2", 0.5)  # × float32's bytes

# %% [markdown]
# ## What 16 bits can hold
#
# A floating-point number is a sign, a power of two (its *exponent*) and some binary digits (its *mantissa*). In 16 bits, each
# bit more for the exponent is one fewer for the mantissa. **bf16** has the range of float32, and 8 digits. **float16** (fp16)
# has 11 digits and a small range. Its largest number is 65,504. Below 2⁻¹⁴ it gives up its digits one by one (those numbers
# are called *subnormal*), and whatever is below 2⁻²⁵ becomes 0.
#
# Is that a problem? Train a model for a while, then look at the gradients of one backward in float32. There are two kinds:
# those of the weights, and those of the activations, which travel backward from layer to layer.

# %%
# %%ranks
zero = zerolab.Zero1(make_model(), units=[Block])
adam = AdamW(zero.model.parameters(), lr=3e-3)
for step in range(30):
    adam.zero_grad()
    zero.model(*batch(words, rank, step, 8, 64)).backward()
    adam.step()
weights = zero.full_state_dict()  # of a model that has learned something


def one_backward(sequences):
    """The gradients of the weights, and those of the activations."""
    model, carried = make_model(weights), []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.register_full_backward_hook(lambda _, into, out: carried.append(out[0]))
    model(*batch(words, rank, 99, sequences, 64)).backward()
    grads = [param.grad for param in model.parameters()]
    return {"gradients": grads, "activations": carried}


# %%
# %%ranks
from zerolab.lab.plots import binades


counts = {kind: binades(tensors) for kind, tensors in one_backward(8).items()}

# %%
title = "Where a gradient falls off"
subtitle = "one backward of a GPT after 30 steps; % of the elements in each power of two"
plots.show(plots.number_line(lab.pull("counts", rank=0), 16, title, subtitle))

# %% [markdown]
# The powers of two of bf16 and float32 reach beyond both ends of this picture: there nothing becomes 0 or inf. In
# fp16 nearly all of the activations' gradients have lost something: most are subnormal, and the others are gone. (The
# loss is a *mean* over tokens: in a larger batch each has a smaller part in it, and its gradient moves further to the
# left.)
#
# The black outline shows the cure. Backward is linear: multiply the loss by 2¹⁶, and every gradient is multiplied by
# 2¹⁶. (The loss itself is computed in float32 here, so it does not overflow.) Divide again *in float32*, where
# nothing is lost. This factor is the **[loss scale](../docs/glossary.md#loss-scale)** ([Micikevicius et al.,
# 2017](https://arxiv.org/abs/1710.03740)). What does the same backward give in each format?


# %%
# %%ranks
def gradient(dtype, scale=1.0):
    model = make_model(weights).to(dtype)
    (model(*batch(words, rank, 99, 8, 64)) * scale).backward()
    return torch.cat([param.grad.float().flatten() for param in model.parameters()]) / scale


exact, errors = gradient(torch.float32), {}
for name, dtype, scale in (
    ("bfloat16", torch.bfloat16, 1.0),
    ("float16", torch.float16, 1.0),
    ("float16, loss x 2^-11", torch.float16, 2.0**-11),
    ("float16, loss x 2^16", torch.float16, 2.0**16),
):
    found = gradient(dtype, scale)
    became_zero = ((found == 0) & (exact != 0)).float().mean().item()
    errors[name] = ((found - exact).norm() / exact.norm()).item(), became_zero

# %%
errors = lab.pull("errors", rank=0)
for name, (error, zero) in errors.items():
    print(f"{name:22} differs from float32 by {error:8.2%}, {zero:6.1%} became 0")
bf16, fp16, small, scaled = (error for error, _ in errors.values())
assert scaled < bf16 < small

# %% [markdown]
# With a scale, fp16 is *more* exact than bf16: it has three more digits. Without one, this little model gets away with it.
# But accumulate 2,048 micro-batches, each of whose losses is divided by 2,048, and each gives the third line: noise and
# zeros, without an error.
#
# ## Why the optimizer wants float32
#
# In both formats the *masters* are float32. Why? A number in bf16 has 8 binary digits: above 0.5 the next one is
# 0.0039 away, above 0.01 it is 0.00006 away. Schedules lower the learning rate as training goes on, say to 10⁻⁵, and
# then Adam moves a weight by about 10⁻⁵ in its first step. In our model 10 % of the weights are below 0.003, half are
# below 0.017, and 90 % below 0.042.
#
# Keep these weights in bf16 alone, without masters, and make one step with a learning rate of 10⁻⁵. What percentage of the
# weights stays exactly where it was?

# %%
lab.predict("08.3", 89)  # %


# %%
# %%ranks
def stuck(precision, rate):
    zero = zerolab.Zero2(make_model(weights), units=[Block], precision=precision)
    before = [param.detach().clone() for param in zero.model.parameters()]
    adam = AdamW(zero.model.parameters(), lr=rate, weight_decay=0.0)
    zero.model(*batch(words, rank, 99, 8, 64)).backward()
    adam.step()
    same = sum(int((old == new).sum()) for old, new in zip(before, zero.model.parameters()))
    count = torch.tensor([same, sum(old.numel() for old in before)])
    dist.all_reduce(count)
    return 100 * count[0].item() / count[1].item()


alone = Precision(torch.bfloat16, master=torch.bfloat16)
still = {}
for rate in (1e-3, 1e-4, 1e-5):
    still["bf16 alone", rate] = stuck(alone, rate)
    still["bf16, float32 masters", rate] = stuck(BF16, rate)

# %%
still = lab.pull("still", rank=0)
lab.measured("08.3", round(still["bf16 alone", 1e-5], 1))
lab.reveal("08.3")

# %%
if lab.predicted("08.3"):
    for (name, rate), share in still.items():
        print(f"learning rate {rate:.0e}, {name:22} {share:5.1f} % of weights did not move")
    assert still["bf16 alone", 1e-5] > 50 > 15 > still["bf16, float32 masters", 1e-5]

# %% [markdown]
# The smaller the steps, the fewer weights take part, and nothing warns you: the loss curve only goes flat. The masters keep
# every step. They are rounded to bf16 for the *next* forward, and once enough small steps have added up, the copy moves
# too. (The weights that do not move even with masters have a gradient of 0: they are rows of the embedding, for bytes that
# do not occur in this batch.)
#
# ## Measure: what is held, and what is sent
#
# Now the bytes. All four stages, float32 and bf16, when backward of the second step returns:


# %%
# %%ranks
def measure(stage, precision):
    zero = stage(make_model(), units=[Block], precision=precision)
    adam = AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(2):
        adam.zero_grad()
        with ledger(zero) as book:
            zero.model(*batch(words, rank, step, 4, 64)).backward()
            held = model_states(zero, adam)
            adam.step()
    return held, book.moved


table = {}
for number, stage in enumerate(STAGES):
    for name, precision in (("float32", None), ("bf16", BF16)):
        table[number, name] = measure(stage, precision)

# %%
table, psi = lab.pull("table", rank=0), 470_528
per_param = {key: sum(held.values()) / psi for key, (held, sent) in table.items()}
lab.measured("08.1", round(per_param[2, "float32"] - per_param[2, "bf16"], 2))
lab.measured("08.2", table[2, "bf16"][1] / table[2, "float32"][1])
lab.reveal("08.1")
lab.reveal("08.2")

# %%
if lab.predicted("08.1"):
    bars = {}
    for (number, name), (held, _) in table.items():
        bars[f"{number}\n{name}"] = {kind: size / psi for kind, size in held.items()}
    title = "What a rank holds when backward returns"
    subtitle = "4 ranks, AdamW, by stage; masters count as parameters"
    plots.show(plots.stacks(bars, title, subtitle, "bytes per parameter"))

# %% tags=["nbval-check-output"]
from zerolab.measure.formulas import state_bytes
from zerolab import Precision
import torch

if lab.predicted("08.1") and lab.predicted("08.2"):
    for (number, name), (held, sent) in table.items():
        dtype = torch.bfloat16 if name == "bf16" else None
        formula = state_bytes(number, 4, psi, Precision(dtype, master=torch.float32))
        rest = {kind: held[kind] - formula[kind] for kind in formula}
        total = f"{per_param[number, name]:5.2f} bytes per parameter, sent {sent:>9,}"
        print(f"stage {number}, {name:7} {total}; beyond the formula {rest}")

# %% [markdown]
# The formulas hold, and what is beyond them is Adam's step counters, 4 bytes for each of the 29 tensors. The terms
# below are parameters + gradients + optimizer; what a stage shards is put together, masters included:
#
# | stage | float32 | bf16 | saved |
# |---|---|---|---|
# | 0 | 4Ψ + 4Ψ + 8Ψ | (2 + 4)Ψ + 2Ψ + 8Ψ | **nothing** |
# | 1 | 8Ψ + 8Ψ/N | 2Ψ + 2Ψ + 12Ψ/N | 4Ψ - 4Ψ/N |
# | 2 | 4Ψ + 12Ψ/N | 2Ψ + 14Ψ/N | 2Ψ - 2Ψ/N |
# | 3 | 16Ψ/N | 14Ψ/N | 2Ψ/N |
#
# In stage 0 the masters cost as much as the two copies save: 2 + 4 + 2 + 8 is 16. From stage 1 on the masters are sharded,
# and the copies that are still whole are half as large. In stage 3 nothing is whole. (There the bf16 weights are made on the
# way into each all-gather; the paper keeps them, and has 16Ψ/N.) What is sent is half in every stage: only gradients and
# bf16 weights travel, never masters.
#
# ## Where the sum is rounded
#
# Gradients travel in bf16, and 4 ranks' gradients are added up. Rank 0 brings 256, and the others 1 each: 259. In bf16,
# numbers between 256 and 512 are 2 apart, and the best possible answers are 258 and 260.

# %%
# %%ranks
brings = torch.full((16,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
library = brings.clone()
dist.all_reduce(library)
zero = zerolab.Zero1(make_model(), units=[Block])
ours = torch.empty(4, dtype=torch.bfloat16)
zero.comm.reduce_scatter(ours, brings, "256 + 1 + 1 + 1").wait()  # a mean; here, 4 elements
theirs, ours = (sorted(set(sums.tolist())) for sums in (library, 4 * ours))

# %%
print("all-reduce of the library, on each rank:", *lab.pull("theirs"))

# %% tags=["nbval-check-output"]
print("added in float32, rounded once:         ", *lab.pull("ours"))

# %% [markdown]
# A ring (lesson 01) passes *partial sums* on, in the dtype of the tensor, so every hop rounds: 256 + 1 is 257, which
# becomes 256, and the 1 is gone. The engine sends each rank's part as it is, adds in float32, and rounds **once**, for
# the same bytes. A library's remedy is to reduce in float32, for twice the bytes of the gradients (`reduce_dtype` in
# FSDP2). Here `Precision(reduce=torch.float32)` leaves out the one rounding too.
#
# ## The other end of fp16
#
# Back to the loss scale. If 2¹⁶ is good, why not 2²⁴? fp16's largest number is 65,504. So at a scale of 2¹⁶, the largest
# gradient that stays a number is 65,504 / 65,536 = 0.9995, and at 2²⁴ it is 0.004.
#
# Beyond it is **inf**, and inf - inf or 0 · inf is **NaN**. One of these in the gradient, and Adam writes NaN into
# the weight, and inf or NaN into both averages, for good: every loss after that is NaN. That is how fp16 ends a run.
#
# So after every backward, look: if a gradient is not finite, **skip the step** and halve the scale. If all went well for a
# while, double it. That finds the largest scale that works, and follows it when gradients shrink.
#
# ## Who sees the overflow?
#
# Who looks, though? In stages 1 to 3 a rank has only its shard of the mean gradient. Ask `param.grad.isfinite().all()`, and
# zerolab asks all ranks for you. `zerolab.to_local(param.grad)` is what this rank has itself, and all that an engine has
# to work with. Raise the scale by powers of two until something overflows, and count the elements that are not finite on
# each rank:


# %%
# %%ranks
def slices(zero):
    """What this rank has of the mean gradient."""
    params = zero.model.parameters()
    return [zerolab.to_local(param.grad) for param in params if param.grad is not None]


def not_finite(power):
    zero = zerolab.Zero3(make_model(weights), units=[Block], precision=FP16)
    (zero.model(*batch(words, rank, 99, 2, 64)) * 2.0**power).backward()
    return sum(int((~grad.isfinite()).sum()) for grad in slices(zero))


overflows = [not_finite(power) for power in range(17, 25)]

# %%
everyone = list(zip(*lab.pull("overflows"), strict=True))
print("scale  ", *(f"{f'rank {rank}':>8}" for rank in range(4)))
for power, found in enumerate(everyone, 17):
    print(f"2^{power:<5}", *(f"{count:>8,}" for count in found))
some = [power for power, found in enumerate(everyone, 17) if min(found) == 0 < max(found)]
lab.push(power=some[0])

# %% [markdown]
# There are scales at which one rank sees an overflow and its neighbour sees nothing wrong. (At 2²³ it begins in the gradient
# of the logits, where backward starts, and is in nearly all that follows.) Take the smallest, and let each rank decide for
# itself:

# %%
# %%ranks
zero = zerolab.Zero3(make_model(weights), units=[Block], precision=FP16)
adam, said = AdamW(zero.model.parameters(), lr=1e-3), "nothing"
try:
    for step in (99, 100):
        (zero.model(*batch(words, rank, step, 2, 64)) * 2.0**power).backward()
        if all(grad.isfinite().all() for grad in slices(zero)):
            adam.step()
        adam.zero_grad()
except zerolab.CommError as error:
    said = str(error).splitlines()[0]

# %%
said = lab.pull("said", rank=0)
print(said.replace(": ", ":\n", 1))
assert "out of step" in said

# %% [markdown]
# Some ranks were in their step (the message counts it already), and one had gone on to its next forward. This engine
# compares the ranks' steps, and stops them all. A program that compares nothing hangs in stages 1 and 2, where the
# ranks that stepped wait for an all-gather that the others never join. In stage 3 it goes on, with a model that is
# made of new slices and old ones.
#
# Nor is it enough to skip together. Say that all ranks skip, and rank 2 alone halves its scale, since only rank 2 saw
# the overflow. In the next step its samples count half in the mean. If all four gradients were equal, the
# mean would be (1 + 1 + ½ + 1)/4 = 0.875 of the right one for ranks 0, 1 and 3, and 1.75 times it for rank 2, which
# divides by half as much. Everything is finite, no error, the wrong model.
#
# ## All or none
#
# Your turn: a loss scaler whose ranks decide together. It goes into the loop like this, as torch's own does:
#
# ```
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)        # only if you clip: a norm of 1 means nothing while gradients are scaled
# zero.clip_grad_norm_(1.0)
# scaler.step(optimizer)            # all ranks or none
# scaler.update()
# optimizer.zero_grad()
# ```
#
# `scale` and `gradients` are given. Write three methods:
#
# - `unscale_(optimizer)` divides this rank's gradients by `self.factor`, in place, and sets `self.overflow`: does **any**
#   rank have a gradient that is not finite? One all-reduce of one number tells all of them.
# - `step(optimizer)` calls `optimizer.step()`, or does not. If the loop has not called `unscale_`, do it here.
# - `update()` halves `self.factor` after an overflow. It doubles it after `self.growth_interval` good steps in a row. And
#   it makes ready for the next step.

# %%
# %%exercise 08.1

# %%
lab.check("08.1")

# %% [markdown]
# ## Measure: a run in fp16
#
# Train for 16 steps from the beginning, in stage 2: in float32, in bf16, and in fp16 with your scaler. It starts at 2²⁰,
# which is too much, and may grow after 4 good steps. (2,000, the default, would be too long to watch.) The package's
# `LossScaler` runs beside it.

# %%
# %%ranks
Scaler = lab.mine("08.1")


def run(precision, scaler_class=None):
    zero = zerolab.Zero2(make_model(), units=[Block], precision=precision)
    adam, losses, scales, scaler = AdamW(zero.model.parameters(), lr=1e-3), [], [], None
    if scaler_class:
        scaler = scaler_class(zero, init_scale=2.0**20, growth_interval=4)
    for step in range(16):
        loss = zero.model(*batch(words, rank, step, 2, 32))
        if scaler is None:
            loss.backward()
            zero.clip_grad_norm_(1.0)
            adam.step()
        else:
            scales.append(scaler.scale(torch.ones(())).item())
            scaler.scale(loss).backward()
            scaler.unscale_(adam)
            zero.clip_grad_norm_(1.0)
            scaler.step(adam)
            scaler.update()
        adam.zero_grad()
        losses.append(loss.item())
    if scaler:
        scales.append(scaler.scale(torch.ones(())).item())  # after the last step
    return {"losses": losses, "scales": scales, "weights": zero.full_state_dict()}


mine, package = run(FP16, Scaler), run(FP16, zerolab.LossScaler)
runs = {"float32": run(None), "bf16": run(BF16), "fp16 and a loss scaler": mine}
losses, scales = {name: found["losses"] for name, found in runs.items()}, mine["scales"]
pairs = zip(mine["weights"].values(), package["weights"].values(), strict=True)
equal = scales == package["scales"] and all(torch.equal(a, b) for a, b in pairs)

# %%
from itertools import pairwise
from math import log2

every = lab.pull("scales")
powers = {f"rank {rank}": list(map(log2, scales)) for rank, scales in enumerate(every)}
first = powers["rank 0"]
assert all(powers[name] == first for name in powers)
skipped = sum(after < before for before, after in pairwise(first))
sentence = (
    f"The scale falls from 2^20 to 2^{min(first):.0f} and ends at 2^{first[-1]:.0f}, the "
    f"same on every rank; {skipped} of {len(first) - 1} steps were skipped, by all of them."
)
title, subtitle = "The loss scale finds its place", "fp16, stage 2, 4 ranks"
plots.show(plots.curves(powers, title, subtitle, "power of two", sentence))

# %%
losses = lab.pull("losses", rank=0)
for name, values in losses.items():
    print(f"{name:22} loss {values[0]:.2f} at first, {values[-1]:.2f} in the last step")
made = sum(after >= before for before, after in pairwise(first[:-1]))
print(f"fp16 has made {made} steps before its last;", end=" ")
print(f"after {made} steps bf16 had {losses['bf16'][made]:.2f}")

# %% tags=["nbval-check-output"]
print("the scale is the same on all ranks:", all(scales == every[0] for scales in every))
print("this scaler's run equals the package's, bit for bit:", all(lab.pull("equal")))

# %% [markdown]
# Finding the scale costs steps: a skipped step is a batch computed for nothing, and the fp16 run lags by as many as it
# skipped. (After as many steps made, bf16's loss was no lower, though of another batch.) That is the price of a start at
# 2²⁰ (torch starts at 2¹⁶) and of trying a larger scale every 4 good steps.
#
# A scaler cannot cure everything. It scales the *loss*, and so the gradients. An activation beyond 65,504 overflows in
# *forward*, whatever the scale. Then every step is skipped, and the scale halves each time, to no avail: the run is over,
# though it does not stop. (DeepSpeed
# [ends it](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/fp16/loss_scaler.py) when the scale has
# reached its minimum.) bf16 has the powers of two of float32, and needs no scale at all.
#
# ## In production
#
# Two ways that torch 2.13 offers, on the same model and four ranks: DDP with `autocast`, and FSDP2 with
# `MixedPrecisionPolicy`, with gradients reduced in bf16 and in float32.

# %%
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from zerolab.lab import calls


def autocast_ddp():
    model = DistributedDataParallel(make_model())
    with calls() as book:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*batch(words, rank, 0, 8, 64))
        loss.backward()
    params = list(model.parameters())
    held = sum(param.nbytes for param in params), sum(param.grad.nbytes for param in params)
    return {"held": held, "sent": book.sent}


def fsdp2(reduce):
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
    with calls() as book:
        model(*batch(words, rank, 0, 8, 64)).backward()
    held = [param.to_local().nbytes for param in model.parameters()]
    grads = [param.grad.to_local().nbytes for param in model.parameters()]
    return {"held": (sum(held), sum(grads)), "sent": book.sent}


theirs = {"DDP, autocast": autocast_ddp()}
theirs["FSDP2, reduced in bf16"] = fsdp2(None)
theirs["FSDP2, reduced in float32"] = fsdp2(torch.float32)

# %% tags=["nbval-check-output"]
if lab.predicted("08.1") and lab.predicted("08.2"):
    theirs = lab.pull("theirs", rank=0)
    rows = {name: (*one["held"], one["sent"]) for name, one in theirs.items()}
    held, sent = table[3, "bf16"]
    rows["zerolab, stage 3"] = held["parameters"], held["gradients"], sent
    for name, sizes in rows.items():
        held, grads, sent = (size / psi for size in sizes)
        print(f"{name:26} parameters {held:.0f}Ψ, gradients {grads:.1f}Ψ bytes,", end=" ")
        print(f"sent {sent:.2f}Ψ")

# %% [markdown]
# - **autocast** changes no weight. It casts the inputs of chosen operations, such as matrix products, on their way, and runs
#   others in float32 ([the list](https://docs.pytorch.org/docs/stable/amp.html)). So parameters and gradients stay float32,
#   4Ψ each, and so does DDP's traffic, 8Ψ · ¾. Only activations become smaller.
# - **DDP needs no agreement.** It averages before anyone looks, and an inf in the mean is there on all ranks. So a
#   `GradScaler` that looks at its own rank decides the same everywhere. With shards it does not. FSDP2's gradients
#   are tensors that know of the other ranks' shards, and ask them when `GradScaler` looks: all skip.
# - **FSDP2** keeps sharded masters and makes bf16 weights for each all-gather, as our stage 3 does, and sends as many bytes.
#   It turns the reduced gradients into the masters' float32 at once, Ψ bytes where ours keeps Ψ/2 until the step: 16Ψ/N
#   where we have 14Ψ/N. Reducing in float32 sends 2Ψ · ¾ more.
# - **DeepSpeed** (0.19.8) names in its section `fp16` what you wrote: `loss_scale: 0` means found by trial, `initial_scale_power: 16`
#   is 2¹⁶, and `loss_scale_window` is your `growth_interval`. `hysteresis: 2` lowers the scale only at the second overflow.
#
# ## On trial
#
# > "Mixed precision halves training memory."
#
# Model states you have measured. What has to fit is the *peak* of a step, with activations. A small and a large
# batch in stage 0, and the small one in stage 2:


# %%
# %%ranks
def peak(stage, precision, sequences):
    zero = stage(make_model(), units=[Block], precision=precision)
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step():
        zero.model(*batch(words, rank, 0, sequences, 64)).backward()
        adam.step()
        adam.zero_grad()

    step()  # creates the optimizer state
    with timeline(zero, adam) as line:
        step()
    return line.peak, max(line.curve("activations"))


peaks = {}
for number, n in ((0, 1), (0, 16), (2, 1)):
    peaks[number, n] = [peak(STAGES[number], kind, n) for kind in (None, BF16)]

# %%
if lab.predicted("08.1"):
    peaks = lab.pull("peaks", rank=0)
    for (number, sequences), ((wide, wide_acts), (half, half_acts)) in peaks.items():
        what = f"stage {number}, {sequences:2} sequence{'s' * (sequences > 1):1}"
        acts = f"activations {wide_acts / 1e6:4.1f} -> {half_acts / 1e6:4.1f} MB"
        print(f"{what}: {acts}, peak {wide / 1e6:4.1f} -> {half / 1e6:4.1f} MB,", end=" ")
        print(f"{half / wide:.2f} times")
    assert peaks[0, 1][1][0] / peaks[0, 1][0][0] > 0.85  # a small batch: hardly anything
    assert 0.4 < peaks[0, 16][1][1] / peaks[0, 16][0][1] < 0.75  # activations

# %% [markdown]
# **Nearly true of the activations; of model states it depends on the stage.** Activations fall to a little more than
# half (the loss is still computed in float32). So the larger your batch, the closer the peak comes to that. Model
# states stay at 16Ψ in stage 0, whatever the batch, and fall by an eighth in stage 3. In stages 1 and 2 they come
# close to half when there are many ranks: on 64, stage 2 goes from 4.19Ψ to 2.22Ψ. What mixed precision does halve is
# traffic, but only if the model itself is cast, as here and in FSDP2: under autocast DDP sends as much as in float32.
# And matrix products become faster.
#
# ## Questions
#
# 1. Why does bf16 need no loss scale, and what does it pay for that?
# 2. Why are the masters float32, when forward sees only 16 bits of them?
# 3. What is the difference between `torch.autocast` and casting the model to bf16?
# 4. An overflow shows in one rank's shard. What happens in stages 2 and 3 if only that rank skips the step?
# 5. In which order do you unscale, clip, and look for an overflow, and which of the scaler's numbers belong in a checkpoint?
# 6. What does fp8 change?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. It has the powers of two of float32, so what float32 holds does not under- or overflow. It pays in digits: 8 where fp16
#    has 11. In the table above its gradient was further from float32's than that of fp16 with a scale.
# 2. Because a step is far smaller than the weight. In bf16, 8 binary digits, most steps of a learning rate of 10⁻⁵ round
#    back to the weight as it was. Masters keep the steps until they add up to something that 16 bits can show.
# 3. autocast casts the inputs of chosen operations, keeps weights and gradients in float32, and leaves delicate operations
#    in float32. So it saves activations only, and DDP still sends 4 bytes per gradient. Casting the model halves weights,
#    gradients and traffic too; then the optimizer needs masters.
# 4. In stage 2 the others wait in the all-gather after the step, and time out. In stage 3 nothing waits, and the
#    model is made of slices of two different steps. (This engine counts steps and stops everybody: some in their
#    step, the others in their next forward.) If the scales differ from then on, every later mean is wrong, and nobody
#    notices.
# 5. Unscale, and look at the same time; then clip, because clipping by a norm of inf turns every other gradient into
#    0, and by a norm of NaN all of them into NaN, and because a norm of scaled gradients means nothing; then step or
#    skip. The scale and the count of good steps belong in a checkpoint, or a resumed run has to find the scale again.
#    (`LossScaler.state_dict()` has both, for `zerolab.save` as an extra.)
# 6. One scale per tensor, or per block of a tensor, instead of one for the loss: 8 bits leave so few powers of two that no
#    single factor fits all tensors, and there are two formats, one with more digits for weights and activations (E4M3), one
#    with more powers for gradients (E5M2) ([Micikevicius et al., 2022](https://arxiv.org/abs/2209.05433)).

# %%
lab.stop()
lab.progress()
