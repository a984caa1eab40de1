# %% [markdown]
# # 08 · Mixed precision
#
# **The question.** GPUs multiply matrices of 16-bit numbers faster than 32-bit ones: an H100 reaches 989 TFLOPS in
# bfloat16, and 67 in float32, for which it has no matrix units (NVIDIA's data sheet, SXM, without sparsity). So large
# models are trained in *[mixed precision](../docs/glossary.md#mixed-precision)*: forward and backward in 16 bits,
# some of the rest in 32. Half the bits, so half the memory? You plan for that, and your run is out of memory in its
# first step. Somebody else picks the other 16-bit format. Their run trains for a day, then the loss is `nan`, and so
# is every weight in the checkpoint that was written an hour later.
#
# After this lesson you can say, to the byte, what 16 bits save in each stage. And you will have written the part that
# keeps a float16 run alive: a loss scaler whose ranks agree.

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
from zerolab import Precision, lab
from zerolab.lab import GPT, Block, batch, text
from zerolab.measure import ledger, model_states

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
# With **bfloat16** (written bf16), forward and backward use a copy of the weights in 2 bytes, and
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
# A floating-point number is a sign, a power of two (its *exponent*) and some binary digits (its *mantissa*). In 16
# bits, each bit more for the exponent is one fewer for the mantissa. **bf16** has the range of float32, and 8 digits.
# **float16** (fp16) has 11 digits and a small range. Its largest number is 65,504. Below 2⁻¹⁴ it gives up its digits
# one by one (those numbers are called *subnormal*), and whatever is below 2⁻²⁵ becomes 0.
#
# Train a model for a while, then look at the gradients of one backward in float32. There are two kinds:
# those of the weights, and those of the activations, which travel backward from layer to layer.

# %%
# %%ranks
from zerolab.lab.plots import binades

zero = zerolab.Zero1(make_model(), units=[Block])
adam = AdamW(zero.model.parameters(), lr=3e-3)
for step in range(30):
    adam.zero_grad()
    zero.model(*batch(words, rank, step, 8, 64)).backward()
    adam.step()
weights = zero.full_state_dict()  # of a model that has learned something
sample = batch(words, rank, 99, 8, 64)
kinds = lab.both_kinds_of_gradients(make_model(weights), sample)
counts = {kind: binades(gradients) for kind, gradients in kinds.items()}

# %%
subtitle = "one backward of a GPT after 30 steps; % of the elements in each power of two"
counts = lab.pull("counts", rank=0)
plots.show(plots.number_line(counts, 16, "Where a gradient falls off", subtitle))

# %% [markdown]
# The powers of two of bf16 and float32 reach beyond both ends of this picture: in them nothing becomes 0 or inf. In
# fp16 nearly all of the activations' gradients have lost something: most are subnormal, and the others are gone.
#
# The black outline shows the cure. Backward is linear: multiply the loss by 2¹⁶, and every gradient is multiplied by
# 2¹⁶. (The loss itself is in float32 here.) Divide again *in float32*, where nothing is lost. This factor is the
# **[loss scale](../docs/glossary.md#loss-scale)** ([Micikevicius et al., 2017](https://arxiv.org/abs/1710.03740)).
# What does the same backward give in each format?


# %%
# %%ranks 0
def gradient(dtype, scale=1):
    model = make_model(weights).to(dtype)
    (model(*sample) * scale).backward()
    return torch.cat([param.grad.float().flatten() for param in model.parameters()]) / scale


exact, half, errors = gradient(torch.float32), torch.float16, []
for dtype, power in ((torch.bfloat16, 0), (half, 0), (half, -11), (half, 16)):
    found = gradient(dtype, 2.0**power)
    became_zero = ((found == 0) & (exact != 0)).float().mean().item()
    errors.append(((found - exact).norm() / exact.norm()).item())
    name = f"{str(dtype)[6:]:8} loss x 2^{power}"
    print(f"{name:21} is off by {errors[-1]:7.2%}, {became_zero:5.1%} became 0")
assert errors[3] < errors[0] < errors[2]

# %% [markdown]
# fp16 is *more* exact than bf16, since it has three more digits: here even without a scale, with one by far. Without
# one, this little model gets away with losing 3.8 % of its gradients. (The picture, which rounds at the end, loses
# 2.1 %. Here the activations' gradients are rounded on the way as well.) But accumulate 2,048 micro-batches, each of
# whose losses is divided by 2,048, and each gives the third line: noise and zeros, and nothing is raised.
#
# ## Why the optimizer wants float32
#
# In both formats the *masters* are float32. Why? A number in bf16 has 8 binary digits: above 0.5 the next one is 0.0039
# away, and above 0.01 it is 0.00006 away. With each power of two down, the gap halves. A step of less than half a gap
# rounds back to where it was. Schedules lower the learning rate as training goes on, say to 10⁻⁵, and then Adam moves a
# weight by about 10⁻⁵ in its first step. How large are our weights, without their signs?

# %%
# %%ranks 0
sizes = torch.cat([weight.flatten() for weight in weights.values()]).abs()
for share in (0.1, 0.5, 0.9):
    print(f"{share:.0%} of the weights are smaller than {sizes.quantile(share):.3f}")

# %% [markdown]
# Keep these weights in bf16 alone, without masters, and make one step with a learning rate of 10⁻⁵. What percentage of
# the weights stays exactly where it was?

# %%
lab.predict("08.3", 89)  # %


# %%
# %%ranks
def stuck(precision, rate):
    zero = zerolab.Zero2(make_model(weights), units=[Block], precision=precision)
    adam = AdamW(zero.model.parameters(), lr=rate, weight_decay=0.0)
    return lab.unmoved_by_a_step(zero, adam, sample)  # % of the weights


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
# The smaller the steps, the fewer weights take part, and nothing warns you: the loss curve only goes flat. The
# masters keep every step. They are rounded to bf16 for the *next* forward, and once enough small steps have added up,
# the copy moves too. (What does not move even with masters has a gradient of 0: rows of the embedding, for bytes that
# do not occur in this batch.)
#
# ## Measure: what is held, and what is sent
#
# All four stages, float32 and bf16, when backward of the second step returns:


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
    return held, book.moved, lab.beyond_formula(zero, held, psi)


table = {}
for number, stage in enumerate(STAGES):
    table[number, "float32"] = measure(stage, None)
    table[number, "bf16"] = measure(stage, BF16)

# %%
table, psi = lab.pull("table", rank=0), 470_528
per_param = {key: sum(held.values()) / psi for key, (held, *_) in table.items()}
lab.measured("08.1", round(per_param[2, "float32"] - per_param[2, "bf16"], 2))
lab.measured("08.2", table[2, "bf16"][1] / table[2, "float32"][1])
lab.reveal("08.1")
lab.reveal("08.2")

# %%
if lab.predicted("08.1"):
    bars = {}
    for (number, name), (held, *_) in table.items():
        bars[f"{number}\n{name}"] = {kind: size / psi for kind, size in held.items()}
    title = "What a rank holds when backward returns"
    subtitle = "4 ranks, AdamW, by stage; masters count as parameters"
    plots.show(plots.stacks(bars, title, subtitle, "bytes per parameter"))

# %% tags=["nbval-check-output"]
if lab.predicted("08.1") and lab.predicted("08.2"):
    for (number, name), (_, sent, beyond) in table.items():
        total = f"{per_param[number, name]:5.2f} bytes per parameter, sent {sent:>9,}"
        print(f"stage {number}, {name:7} {total}; beyond the formula {beyond}")

# %% [markdown]
# The formulas hold, and what is beyond them is Adam's step counters, 4 bytes for each of the 29 tensors. The terms
# below are parameters + gradients + optimizer; what a stage shards is put together, masters included. (The picture
# counts a sharded master as a parameter: stage 1 in bf16 is 3 + 2 + 2 there, and 2 + 2 + 3 here.)
#
# | stage | float32 | bf16 | saved |
# |---|---|---|---|
# | 0 | 4Ψ + 4Ψ + 8Ψ | (2 + 4)Ψ + 2Ψ + 8Ψ | **nothing** |
# | 1 | 8Ψ + 8Ψ/N | 2Ψ + 2Ψ + 12Ψ/N | 4Ψ - 4Ψ/N |
# | 2 | 4Ψ + 12Ψ/N | 2Ψ + 14Ψ/N | 2Ψ - 2Ψ/N |
# | 3 | 16Ψ/N | 14Ψ/N | 2Ψ/N |
#
# In stage 0 the masters cost 4 bytes, which is what 16-bit weights and gradients save: 2 + 4 + 2 + 8 is 16. From
# stage 1 on the masters are sharded, while what is still full is half as large. In stage 3 nothing is full. (There
# the bf16 weights are made on the way into each all-gather; the paper keeps them, and has 16Ψ/N.) What is sent is
# half in every stage: only gradients and bf16 weights travel, never masters.
#
# ## The other end of fp16
#
# If a loss scale of 2¹⁶ is good, why not 2²⁴? fp16's largest number is 65,504. So at a scale of 2¹⁶, the largest
# gradient that stays a number is 65,504 / 65,536 = 0.9995, and at 2²⁴ it is 0.004.
#
# Beyond it is **inf**, and inf - inf or 0 · inf is **NaN**. One of these in the gradient, and Adam writes NaN into
# the weight, and inf or NaN into both averages, for good: every loss after that is NaN.
#
# So after every backward, look: if a gradient is not finite, **skip the step** and halve the scale. If all went well
# for a while, double it. That finds the largest scale that works, and follows it when gradients shrink.
#
# ## Who sees the overflow?
#
# Who looks, though? In stages 1 to 3 a rank has only its shard of the mean gradient. Ask `param.grad.isfinite().all()`,
# and zerolab asks all ranks for you. `zerolab.to_local(param.grad)` is what this rank has itself, and all that an
# engine has to work with. Raise the scale by powers of two until something overflows, and count the elements that are
# not finite on each rank:


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
# There are scales at which one rank sees an overflow and its neighbour sees nothing wrong. Take the smallest, and let
# each rank decide for itself:

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
# compares the ranks' steps, and stops them all. Without that, stages 1 and 2 hang: the ranks that stepped wait for an
# all-gather that the others never join. Stage 3 goes on, with a model of new slices and old ones.
#
# Nor is it enough to skip together. Say that all ranks skip, and rank 2 alone halves its scale, since only rank 2 saw
# the overflow. In the next step its samples count half in the mean, and it divides the mean by half as much as the
# others. Everything is finite, no error, the wrong model.
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
# - `unscale_(optimizer)` divides this rank's gradients by `self.factor`, in place, and sets `self.overflow`: does
#   **any** rank have a gradient that is not finite? One all-reduce of one number tells all of them.
# - `step(optimizer)` calls `optimizer.step()`, or does not. If the loop has not called `unscale_`, do it here.
# - `update()` halves `self.factor` after an overflow. It doubles it after `self.growth_interval` good steps in a row,
#   and counts anew. And it gets ready for the next step, in which nobody has looked yet.

# %%
# %%exercise 08.1

# %%
lab.check("08.1")

# %% [markdown]
# ## Measure: a run in fp16
#
# Train for 16 steps in stage 2: in float32, in bf16, and in fp16 with your scaler. It starts at
# 2²⁰, which is too much, and may grow after 4 good steps. The package's `LossScaler` runs
# beside it.

# %%
# %%ranks
Scaler = lab.mine("08.1")
samples = [batch(words, rank, step, 2, 32) for step in range(16)]


def run(precision, make_scaler=None):
    zero = zerolab.Zero2(make_model(), units=[Block], precision=precision)
    scaler = make_scaler and make_scaler(zero, init_scale=2.0**20, growth_interval=4)
    return lab.train_with(scaler, zero, samples)  # the loop above


mine, package = run(FP16, Scaler), run(FP16, zerolab.LossScaler)
runs = {"float32": run(None), "bf16": run(BF16), "fp16 and a loss scaler": mine}
losses = {name: (one.losses[0], one.losses[-1]) for name, one in runs.items()}
scales, equal = mine.scales, mine.equals(package)

# %%
plots.show(lab.scale_by_step(lab.pull("scales")))

# %%
for name, (first, last) in lab.pull("losses", rank=0).items():
    print(f"{name:22} loss {first:.2f} at first, {last:.2f} in the last step")

# %% tags=["nbval-check-output"]
every = lab.pull("scales")
print("the scale is the same on all ranks:", all(scales == every[0] for scales in every))
print("this scaler's run equals the package's, bit for bit:", all(lab.pull("equal")))

# %% [markdown]
# A skipped step is a batch computed for nothing, and the fp16 run lags: by its last step, whose loss is printed, it had
# skipped six. That is the price of a start at 2²⁰ (torch's is 2¹⁶) and of trying a larger scale every 4 good steps.
#
# A scaler cannot cure everything: an activation beyond 65,504 overflows in *forward*, whatever the scale. Then every
# step is skipped, and the scale halves each time, to no avail: the run is over, though it does not stop. (DeepSpeed
# [ends it](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/fp16/loss_scaler.py) when the
# scale has reached its minimum.) bf16 needs no scale at all.
#
# ## In production
#
# Two ways that torch 2.13 offers: DDP with `autocast`, and FSDP2 with `MixedPrecisionPolicy`, with gradients reduced in
# bf16 and in float32.

# %%
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def fsdp2(reduce):
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
    return lab.held_and_sent(model, sample)


ddp = DistributedDataParallel(make_model())
theirs = {"DDP, autocast": lab.held_and_sent(ddp, sample, autocast=True)}
theirs["FSDP2, reduced in bf16"] = fsdp2(None)
theirs["FSDP2, reduced in float32"] = fsdp2(torch.float32)

# %% tags=["nbval-check-output"]
if lab.predicted("08.1") and lab.predicted("08.2"):
    rows = lab.pull("theirs", rank=0)
    for name in ("bf16", "float32"):
        held, sent, _ = table[3, name]
        rows[f"zerolab, stage 3, {name}"] = held["parameters"], held["gradients"], sent
    for name, sizes in rows.items():
        held, grads, sent = (size / psi for size in sizes)
        print(f"{name:26} parameters {held:.0f}Ψ, gradients {grads:.1f}Ψ bytes,", end=" ")
        print(f"sent {sent:.2f}Ψ")

# %% [markdown]
# - **autocast** changes no weight. It casts the inputs of chosen operations, such as matrix products, and runs others
#   in float32 ([the list](https://docs.pytorch.org/docs/2.13/amp.html)). So parameters and gradients stay float32,
#   4Ψ each, and so does DDP's traffic, 8Ψ · ¾. Only activations become smaller.
# - **DDP needs no agreement.** It averages before anyone looks, and an inf in the mean is there on all ranks. So a
#   `GradScaler` that looks at its own rank decides the same everywhere. With shards it does not. FSDP2's gradients
#   are tensors that know of the other ranks' shards, and ask them when `GradScaler` looks: all skip.
# - **FSDP2** keeps sharded masters and makes bf16 weights for each all-gather, as our stage 3 does, and sends as many
#   bytes. It turns the reduced gradients into the masters' float32 at once, Ψ bytes where ours keeps Ψ/2 until the
#   step: 16Ψ/N where we have 14Ψ/N.
# - **DeepSpeed** (0.19.8) has in its section `fp16` what you wrote: `loss_scale: 0` means found by trial,
#   `initial_scale_power: 16` is 2¹⁶, and `loss_scale_window` is your `growth_interval`.
#
# ## Does it halve the memory?
#
# Model states you have measured. What has to fit is the *peak* of a step, with activations:

# %%
# %%ranks
peaks = {}
for number, n in ((0, 1), (0, 16), (2, 1)):
    stage, data = STAGES[number], batch(words, rank, 0, n, 64)
    engines = (stage(make_model(), units=[Block], precision=kind) for kind in (None, BF16))
    peaks[number, n] = [lab.peak_of_step(zero, data) for zero in engines]

# %%
if lab.predicted("08.1"):
    peaks = lab.pull("peaks", rank=0)
    for (number, n), (wide, half) in peaks.items():
        print(f"stage {number}, sequences: {n:2}; MB of activations", end=" ")
        print(f"{wide.acts:4.1f} -> {half.acts:4.1f}, at the peak", end=" ")
        there = f"{wide.peak:4.1f} in {wide.phase} -> {half.peak:4.1f} in {half.phase}"
        print(f"{there}, {half.peak / wide.peak:.2f} times")
    assert peaks[0, 1][1].peak / peaks[0, 1][0].peak > 0.85  # small batch: hardly anything
    assert 0.4 < peaks[0, 16][1].acts / peaks[0, 16][0].acts < 0.75  # activations

# %% [markdown]
# **Nearly, for the activations; for model states it depends on the stage.** Activations fall to a little more than half
# (the loss is still computed in float32). With one sequence in stage 0 the peak does not fall at all: it has moved from
# backward into the optimizer's step, which holds weights and masters (6Ψ), gradients in float32 (4Ψ) and Adam's
# averages (8Ψ): 8.5 of the 9.0 MB. The larger your batch, the closer the peak comes to what activations do. Model
# states stay at 16Ψ in stage 0 and fall by an eighth in stage 3. In stages 1 and 2 they come close to half when there
# are many ranks: on 64, stage 2 goes from 4.19Ψ to 2.22Ψ. Traffic is halved if the model itself is cast and gradients
# are reduced in 16 bits, as here. Under autocast DDP sends as much as in float32, and FSDP2 with a float32 reduction
# two thirds (5.76Ψ of 8.53Ψ).
#
# ## For another day: where the sum is rounded (2 minutes)
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
# becomes 256, and the 1 is gone. Each chunk starts at another rank: where two or three ones are added up before they
# meet the 256, they survive, and the sum is 260. (Printed are the values among 16 elements.) The engine sends each
# rank's part as it is, adds in float32, and rounds **once**, for the same bytes. A library's remedy is to reduce in
# float32, for twice the bytes of the gradients (`reduce_dtype` in FSDP2). Here `Precision(reduce=torch.float32)`
# leaves out the one rounding too.
#
# ## Questions
#
# 1. Why does bf16 need no loss scale, and what does it pay for that?
# 2. Why are the masters float32, when forward sees only 16 bits of them?
# 3. What is the difference between `torch.autocast` and casting the model to bf16?
# 4. An overflow shows in one rank's shard. What happens in stages 2 and 3 if only that rank skips the step?
# 5. In which order do you unscale, clip, and look for an overflow, and which of the scaler's numbers belong in a
#    checkpoint?
# 6. What does fp8 change?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. It has the powers of two of float32, so what float32 holds does not under- or overflow. It pays in digits: 8 where
#    fp16 has 11. In "What 16 bits can hold" its gradient was further from float32's than that of fp16 with a scale.
# 2. Because a step is far smaller than the weight. In bf16, 8 binary digits, most steps of a learning rate of 10⁻⁵
#    round back to the weight as it was. Masters keep the steps until they add up to something that 16 bits can show.
# 3. autocast casts the inputs of chosen operations, keeps weights and gradients in float32, and leaves delicate
#    operations in float32. So it saves activations only, and DDP still sends 4 bytes per gradient. Casting the model
#    halves weights, gradients and traffic too; then the optimizer needs masters.
# 4. In stage 2 the others wait in the all-gather after the step, and time out. In stage 3 nothing waits, and the
#    model is made of slices of two different steps. (This engine counts steps and stops everybody: some in their
#    step, the others in their next forward.) If the scales differ from then on, every later mean is wrong, and nobody
#    notices.
# 5. Unscale, and look at the same time; then clip, because clipping by a norm of inf turns every other gradient into
#    0, and by a norm of NaN all of them into NaN, and because a norm of scaled gradients means nothing; then step or
#    skip. The scale and the count of good steps belong in a checkpoint, or a resumed run has to find the scale again.
#    (`LossScaler.state_dict()` has both, for `zerolab.save` as an extra.)
# 6. One scale per tensor, or per block of a tensor, instead of one for the loss: 8 bits leave so few powers of two that
#    no single factor fits all tensors, and there are two formats, one with more digits for weights and activations
#    (E4M3), one with more powers for gradients (E5M2) ([Micikevicius et al., 2022](https://arxiv.org/abs/2209.05433)).

# %%
lab.stop()
lab.progress()
