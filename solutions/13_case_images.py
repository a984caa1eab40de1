# %% [markdown]
# # 13 · Case: images
#
# **The question.** A classifier trains on one GPU and reaches 97 %. On four it is said to reach 97 % too. Who has
# checked that, and how?
#
# Images make it look easy: every sample has one label and one size. Yet a run on four ranks can learn from the same
# images four times, count some answers twice, validate four different models, or take a quarter of the steps that it
# needs. None of these fails. You pay for four GPUs, and find out when the model is in use.
#
# This lesson is a case, from the file with the images to a checked result. You find two mistakes from their evidence,
# write a training script, run it with torchrun on one, two and four ranks, and measure what a larger batch costs.

# %%
# %load_ext zerolab.lab
import torch
import torch.nn.functional as F
from torch import nn
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% [markdown]
# ## The data
#
# CIFAR-10 has 60,000 photographs of 32×32 pixels, in ten classes. Its "Python version" is a set of pickles, and to open
# a pickle is to run whatever code is in it. If you have the [binary
# version](https://www.cs.toronto.edu/~kriz/cifar.html), `lab.cifar10(folder)` reads it: a byte for the label, then
# 1,024 bytes of red, 1,024 of green, 1,024 of blue.
#
# The case itself uses scikit-learn's handwritten digits, which need no download: 8×8 pixels, one channel. Every fifth
# image is kept for **validation**: the model never learns from it, so the share of right answers there, its
# **[accuracy](../docs/glossary.md#accuracy)**, says how it does on images that it has not seen.

# %% tags=["nbval-check-output"]
data = lab.digits()
kept_out = tuple(data.validation_inputs.shape)
print("training", tuple(data.inputs.shape), data.inputs.dtype, "validation", kept_out)
most_common = data.validation_targets.bincount().max().item() / len(data.validation_targets)
print(f"always the validation's most common digit: {100 * most_common:.1f} % are right")

# %% [markdown]
# Remember the last number, the **baseline**: no answer that is always the same does better. The images are bytes from
# 0 to 255; a model is given `images / 255`.
#
# ## Two mistakes, from their evidence
#
# **Exhibit A** is a validation accuracy, on images that were set aside "from the data". The labels were shuffled
# first, so nobody can know a label that they have not seen.

# %%
order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
few, shuffled = data.inputs[:128], data.targets[order]
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(400):
    part = slice(0, 64) if step % 2 == 0 else slice(64, 128)
    F.cross_entropy(model(few[part] / 255), shuffled[part]).backward()
    sgd.step()
    sgd.zero_grad()


def share_right(images, labels):
    return (model(images / 255).argmax(1) == labels).float().mean().item()


theirs = share_right(few[64:], shuffled[64:])
honest = share_right(data.validation_inputs, data.validation_targets)
print(f"accuracy on their validation images: {100 * theirs:.1f} %")
print(f"accuracy on images that were kept out: {100 * honest:.1f} %")
assert theirs > 0.9 and honest < 0.25

# %% [markdown]
# Their validation images are among those that the model learned from: it has memorised 128 shuffled labels. Split
# first, and train after. The test takes a minute: with shuffled labels, an honest validation stays near the baseline
# (here: below 25 %).
#
# **Exhibit B** is from four ranks. Each took steps of 16 images and printed its first three losses. The model,
# `ResNet`, is explained below.

# %%
# %%ranks
import torch.nn.functional as F
import zerolab
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zerolab import lab
from zerolab.lab import CNN, ConvBlock, ResNet, digits

data = digits()
torch.manual_seed(0)  # as many scripts begin, on every rank
zero = zerolab.Zero2(ResNet())
sgd = torch.optim.SGD(zero.model.parameters(), lr=0.02, momentum=0.9)
losses, everything = [], TensorDataset(data.inputs, data.targets)
for images, labels in DataLoader(everything, batch_size=16, shuffle=True):
    loss = F.cross_entropy(zero.model(images / 255), labels)
    loss.backward()
    sgd.step()
    sgd.zero_grad()
    losses.append(loss.item())
    if len(losses) == 3:
        break

# %%
for rank, losses in enumerate(lab.pull("losses")):
    print(f"rank {rank}:", "  ".join(f"{loss:.6f}" for loss in losses))
assert all(of == losses for of in lab.pull("losses"))

# %% [markdown]
# Different images have different losses, so four equal losses mean the **same images on every rank**. The mean of four
# equal gradients is one of them: four ranks did the work of one. The script seeds all ranks alike, and nobody divides
# the samples.
#
# That is what a **[sampler](../docs/glossary.md#sampler)** is for. `DistributedSampler` shuffles the numbers of the
# samples alike on every rank, and gives each rank every fourth one (lesson 03). Two things about it surprise people. It
# shuffles with its seed plus the epoch, and learns the epoch only from `sampler.set_epoch(epoch)`: without that call,
# every epoch has the same order. And all ranks get equally many: it fills up with samples from the front. In training
# that hardly matters. In validation it gives a wrong accuracy, since some images count twice. Give each rank its part
# yourself, and add up right answers and images over the ranks.
#
# ## BatchNorm: four ranks, four models
#
# **BatchNorm** subtracts from each channel the mean of the *batch* and divides by its standard deviation. For
# validation it keeps running averages of mean and variance, in **[buffers](../docs/glossary.md#buffer)**: tensors
# that belong to the model and are no parameters. They have no gradient, and this engine leaves them alone during
# training. So each rank keeps those of its own images.
#
# Below, four ranks train a CNN with BatchNorm in stage 2. The images are sorted by their label and cut into four files,
# one for each rank, as happens when a data set is written class by class. Each rank validates with its own statistics,
# and then with rank 0's.


# %%
# %%ranks
def batch_norm_run(steps=40):
    torch.manual_seed(0)
    model = CNN(layers=1, width=8)
    mine = data.targets.argsort(stable=True).tensor_split(4)[rank]
    mine = mine[torch.randperm(len(mine))]
    zero = zerolab.Zero2(model, units=[ConvBlock])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        numbers = mine[torch.arange(8 * step, 8 * step + 8) % len(mine)]
        F.cross_entropy(model(data.inputs[numbers] / 255), data.targets[numbers]).backward()
        sgd.step()
        sgd.zero_grad()
    return zero


@torch.no_grad()
def accuracy(model):
    model.eval()
    answers = model(data.validation_inputs / 255).argmax(1)
    return (answers == data.validation_targets).float().mean().item()


def all_weights(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


zero = batch_norm_run()
with zero.full_parameters():
    weights = all_weights(zero.model).double().norm().item()
own = accuracy(zero.model)
running_mean = zero.model.blocks[0].norm.running_mean[:2].tolist()
zero.broadcast_buffers()
shared = accuracy(zero.model)

# %%
for rank, (own, mean) in enumerate(zip(lab.pull("own"), lab.pull("running_mean"))):
    print(f"rank {rank}: accuracy {100 * own:.1f} %,", end=" ")
    print(f"running means of two channels {mean[0]:.3f} and {mean[1]:.3f}")
print(f"after broadcast_buffers, on every rank: {100 * lab.pull('shared', rank=0):.1f} %")
assert len(set(lab.pull("weights"))) == len(set(lab.pull("shared"))) == 1
assert len({tuple(mean) for mean in lab.pull("running_mean")}) > 1

# %% [markdown]
# The same weights, and another accuracy on every rank. What is "the" accuracy then? It is that of the rank that prints.
# `zero.broadcast_buffers()` gives all of them rank 0's statistics, so that there is one model. It does not make it a
# good one: its statistics are those of three kinds of digits, and its weights learned from batches of four kinds at
# most. Three remedies, from the weakest:
#
# 1. shuffle the samples of all ranks together, so that every rank sees all classes, and share the buffers before
#    validation;
# 2. average over the whole batch: `nn.SyncBatchNorm` does it in every forward (torch has it for GPUs only);
# 3. a norm that looks at one image at a time, such as **GroupNorm**. Then the result does not depend on the number of
#    ranks, beyond rounding, since no image sees the others. The residual network of this lesson has it.
#
# A **residual network** adds the input of a block to its output, so that the block has only to learn a change.
# `lab.ResNet` has one block, 16 channels, and a head for ten classes.
#
# ## Write: the training script
#
# - Each epoch takes the samples in another order, the same on every rank: `seed + epoch`.
# - A step has `batch_size` samples of **all ranks together**. 1,438 is no multiple of anything useful, so the last step
#   of an epoch is smaller, parts differ by a sample, and some may be empty. A rank without samples still runs forward
#   and backward.
# - The loss is the mean over the step's samples. The engine averages over ranks, and equal weights of *ranks* are not
#   equal weights of *samples* when parts differ. So each rank calls backward on N·sᵣ/n: sᵣ is the sum of its samples'
#   losses, n the number of samples in the step, N the number of ranks.
# - The optimizer's rate is meant for 32 samples. For `batch_size` it is `batch_size / 32` times as much (**linear
#   scaling**), and in the first epoch it rises to that in equal parts (**[warm-up](../docs/glossary.md#warm-up)**):
#   the recipe of large runs. You measure below where scaling helps and where it ends.
# - All ranks have the same buffers before validation, and accuracy counts each validation image once.
#
# The stage is an argument of the script. `zerolab.shard(model, stage)` is `zerolab.DDP(model)` for stage 0, and
# `zerolab.Zero1`, `Zero2` or `Zero3` for the others. `main()`, which reads the arguments and calls your function for
# each seed, is there already.

# %%
# %%exercise 13.1

# %%
lab.check("13.1")

# %% [markdown]
# The check compared your losses, rates, buffers and weights with one process, also in stages 0 to 3, with empty parts.
# Now it runs as in production: torchrun starts the processes, and nothing of this notebook is in them. Three seeds on
# one rank, each with its own weights and orders, give a band; then the first seed on two ranks and on four, in another
# stage each time. (Until your script has passed, the course's runs, on one rank.) It takes some 20 seconds. For
# CIFAR-10, add `"--data"` and its folder.

# %%
results = lab.reproduce("13.1", "--epochs", 2, "--batch-size", 64)

# %%
said = f"Always the most common digit: {100 * most_common:.1f} %."
plots.show(plots.reproduced(results, "Digits, 2 epochs of 23 steps", said))

# %% tags=["nbval-check-output"]
lab.against_one_rank(results, losses=1e-6)
better = all(one["accuracy"] > 0.85 for one in results[1])
print("better than 85 % with every seed:", better)

# %% [markdown]
# That is a checked result: a number beside the baseline, with the **band** of three seeds, and, once your script has
# passed, the same run on any number of ranks. Only sums are taken in another order, and the script trains in float64,
# where that stays small. In float32 it can show, where a ReLU opens on two ranks and stays shut on one: that is
# rounding and no mistake. A mistake is much larger, from the first step in which it counts: an unequal last part shows
# only at the end of an epoch. (A forgotten `+ epoch` does not show here at all: every number of ranks repeats the same
# order. The check found it, because it knows the right one.) A change that moves the accuracy by less than the band has
# not been shown to do anything.
#
# ## What a larger batch costs
#
# More GPUs make it tempting to take a larger batch: each keeps its 32 samples, and eight of them make 256. Compare runs
# with **equal samples**, since those are what you pay for. First predict: five epochs of 1,438 images, with a batch of
# 512 (nothing is dropped). How many steps does the optimizer take?

# %%
lab.predict("13.1", 15)  # steps

# %% [markdown]
# Now measure. Each of the four ranks trains alone, with a seed of its own, and with a rate of 0.005 for 32 images: a
# quarter of the script's, to leave room for scaling. Then with batches of 256 and 512 images: at that rate (x1), at the
# linearly scaled one (x8 and x16), at 512 also with a warm-up in the first epoch, and at four times the scaled rate
# (x64).


# %%
# %%ranks
def alone(batch_size, scale, warm_up, epochs=5):
    torch.manual_seed(rank)
    model = ResNet()
    sgd = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    steps, per_epoch = 0, -(-len(data.inputs) // batch_size)
    for epoch in range(epochs):
        seeded = torch.Generator().manual_seed(rank + epoch)
        for numbers in torch.randperm(len(data.inputs), generator=seeded).split(batch_size):
            risen = min(1, (steps + 1) / per_epoch) if warm_up else 1
            sgd.param_groups[0]["lr"] = 0.005 * scale * risen
            logits = model(data.inputs[numbers] / 255)
            F.cross_entropy(logits, data.targets[numbers]).backward()
            sgd.step()
            sgd.zero_grad()
            steps += 1
    return accuracy(model), steps


kinds = [(32, 1, ""), (256, 1, ""), (256, 8, "")]
kinds += [(512, 1, ""), (512, 16, ""), (512, 16, ", warm-up"), (512, 64, "")]
found = {f"{b} images, rate x{r}{w}": alone(b, r, warm_up=bool(w)) for b, r, w in kinds}

# %%
lab.measured("13.1", lab.pull("found", rank=0)["512 images, rate x1"][1])
lab.reveal("13.1")

# %%
if lab.predicted("13.1"):
    results, mean = {}, {}
    for name, (_, steps) in lab.pull("found", rank=0).items():
        results[name] = right = sorted(100 * found[name][0] for found in lab.pull("found"))
        mean[name] = sum(right) / len(right)
        print(f"{name:30} {steps:4} steps   accuracy {right[0]:.1f} to {right[-1]:.1f} %")
    said = "; ".join(f"{name} {mean[name]:.1f}" for name in mean)
    said = f"Mean accuracy of four seeds after the same 7,190 images, in %: {said}."
    look = "Digits, 5 epochs; each dot is a seed, shaded: 32 images"
    titles, marked = ("What a larger batch costs", look), "32 images, rate x1"
    plots.show(plots.bands(results, *titles, "accuracy, %", said, marked))
    for large, scaled in (("256", "x8"), ("512", "x16")):
        assert mean[f"{large} images, rate {scaled}"] > mean[f"{large} images, rate x1"] + 3
    assert mean["512 images, rate x64"] < mean["512 images, rate x16"]

# %% [markdown]
# Equal samples, and fewer steps. At the rate of 32 images, the 15 steps of 512 do not get as far as the 225 of 32:
# each step is about as long. Linear scaling makes up for most of it: at 256 images eight times the rate comes close to
# the band of 32, at 512 sixteen times brings most of the accuracy back. Between x16 and x64 nothing was tried.
#
# The rule has an end. It gives 512 images a rate of 0.08. At 0.32, which is what it makes of the script's 0.02, the
# steps leave the region where the gradient is right, and the seeds scatter widely. So the higher the rate of the
# small batch already is, the less there is to scale. And the warm-up does no good at x16: it makes two of the 15
# steps shorter. It is meant for runs of thousands of steps, whose first ones would diverge ([Goyal and
# others](https://arxiv.org/abs/1706.02677), section 2.2).
#
# ## Rates and batches that change, in every stage
#
# A **schedule** changes the rate from step to step, and a **dynamic batch** grows during a run. Both are safe under
# sharding for one reason: each rank computes them from numbers that all ranks know, the step and the epoch. (A schedule
# that looks at the loss, such as `ReduceLROnPlateau`, must see the mean loss of all ranks. Otherwise the copies of
# torch's DDP drift apart, and under ZeRO every shard would train at its owner's rate; this engine stops with an error.)
# The optimizer of every stage has `param_groups`, so torch's schedulers work as they are. Here one run has both, in
# stages 0 to 3:


# %%
# %%ranks
def scheduled(stage):
    torch.manual_seed(0)
    model = ResNet()
    zero = zerolab.shard(model, stage)
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=20)
    losses = []
    for epoch, batch_size in enumerate((64, 128)):  # the batch grows
        seeded = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(data.inputs), generator=seeded)[:640]
        for numbers in order.split(batch_size):
            mine = numbers[rank::world_size]
            loss = F.cross_entropy(model(data.inputs[mine] / 255), data.targets[mine])
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            schedule.step()
            losses.append(loss.item())
    right = accuracy(model)
    with zero.full_parameters():
        return all_weights(model), losses, right


runs = [scheduled(stage) for stage in range(4)]
equal = [torch.equal(runs[0][0], each[0]) and runs[0][1:] == each[1:] for each in runs]

# %% tags=["nbval-check-output"]
for stage in range(4):
    same = all(equal[stage] for equal in lab.pull("equal"))
    print(f"stage {stage}: weights, losses, accuracy as in stage 0, bit for bit: {same}")

# %% [markdown]
# ## In production
#
# - **torch's DDP** broadcasts rank 0's buffers before a forward of the wrapper (`broadcast_buffers=True`). After the
#   last step they differ again, by one update. If every rank then validates with `ddp.module`, which bypasses the
#   wrapper, the accuracies may differ.
# - **FSDP2** leaves buffers alone. This engine copies rank 0's to all once, when it is built. **DeepSpeed**
#   broadcasts parameters then, and only those (`_broadcast_model` in [its
#   engine](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py)).
# - **SyncBatchNorm** on GPUs: `nn.SyncBatchNorm.convert_sync_batchnorm(model)`, before the model is sharded.
# - **DistributedSampler**: `DataLoader(batch_size=b)` is per rank there: the step has N·b samples, so the batch changes
#   when N does, and the learning rate does not, unless you change it.
# - **A GAN** has an engine for each network: see "For another day".
#
# ## On trial
#
# > "ZeRO improves accuracy."
#
# **False.** You have measured it: the same weights, losses and accuracies in stages 0 to 3, bit for bit, with a
# schedule and a growing batch. ZeRO shares out what is stored, and changes no number. A better accuracy reported with
# ZeRO comes from something else that was changed, often the batch.
#
# > "The learning rate should be scaled *linearly* based on the number of devices present."
#
# So says the guide of [Accelerate](https://huggingface.co/docs/accelerate/concept_guides/performance) (1.14). **True
# under a condition.** Devices do not enter: with the same batch, your script has the same losses on 1, 2 and 4 ranks,
# and a rate that follows the ranks would have made three different runs. What enters is the batch, which grows with the
# devices if each keeps its own. Then, from a rate of 0.005 for 32 images, the rule nearly held at 8 times, and at 16
# brought back most of the accuracy; from 0.02 the same 16 times were too much. All of that is for SGD. The guide
# multiplies the rate of an AdamW, and for Adam theory and experiment speak for the square root ([Malladi and
# others](https://arxiv.org/abs/2205.10287)).
#
# > "ZeRO trains faster."
#
# What could be faster? In forward and backward each rank computes what it computed before. (Only the optimizer's step
# is done in shares, and it is small beside them.) Measure what a step of a larger ResNet sends, and its peak with 48
# images on each rank and with 80:

# %%
# %%ranks
costs = {s: [lab.cost_of_step(s, images) for images in (48, 80)] for s in range(4)}

# %%
per_image = {}
for stage, ((peak, sent), (larger, _)) in lab.pull("costs", rank=0).items():
    image = (larger - peak) / 32  # bytes that one image more costs
    fits = int(48 + (8e6 - peak) / image)  # in 8 MB on each rank
    per_image[stage] = sent, fits, sent / fits
    print(f"stage {stage}: sends {sent / 1e6:.2f} MB a step;", end=" ")
    print(f"8 MB hold {fits} images; sent per image: {sent / fits / 1e3:.1f} kB")
sends, fits, for_each = zip(*per_image.values())
assert sends[0] == sends[1] == sends[2] < sends[3] and fits[2] <= fits[1]
assert max(for_each[1:3]) < for_each[0]

# %% [markdown]
# **True under a condition.** With the same batch no stage sends less than DDP, and stage 3 sends more, so nothing gets
# faster but the optimizer's step, which is small. But the memory that is freed can hold a larger batch, and then a
# step's messages are shared by more images. (Stage 2 frees no more than stage 1 at this peak: while activations fill
# it, there are hardly any gradients yet, lesson 05.) It pays where communication is what you wait for, and where the
# larger batch still learns. You have measured above that it may not.
#
# ## For another day: two networks, two engines
#
# *Ten minutes, for whoever trains more than one network.* In a **GAN** two networks train against each other. The
# *generator* makes images out of noise. The *discriminator* says of an image whether it is real. A step of the
# discriminator D shows it real and made images; a step of the generator G sends its images through D, and asks for the
# gradient that makes them look more real. Each has its own engine and optimizer.
#
# The gradient of G passes through D, and on the way backward computes the gradients of D's parameters too. Nobody uses
# them. D has Ψ = 8,448 parameters in float32, on four ranks in stage 2. Predict: **in a step of G**, how many bytes of
# D's gradients does each rank send?

# %%
lab.predict("13.2", 8_448 * 3)  # bytes


# %%
# %%ranks
from functools import partial
from zerolab.measure import ledger


def gan(stage, quiet=False, steps=8):
    torch.manual_seed(0)
    G = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    D = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1, bias=False))
    zero_g, zero_d = zerolab.shard(G, stage), zerolab.shard(D, stage)
    adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))
    adam_g, adam_d = adam(G.parameters()), adam(D.parameters())
    seeded = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        numbers = torch.randint(len(data.inputs), (16,), generator=seeded)
        real = data.inputs[numbers].flatten(1) / 255
        made = G(torch.randn(16, 16, generator=seeded))
        (F.softplus(D(made.detach())).mean() + F.softplus(-D(real)).mean()).backward()
        adam_d.step()
        adam_d.zero_grad()
        loss = F.softplus(-D(made)).mean()
        with ledger(zero_d) as book:
            if quiet:
                with zero_d.no_sync():  # D's gradients of this backward stay where they are
                    loss.backward()
            else:
                loss.backward()
        adam_g.step()
        adam_g.zero_grad()
        adam_d.zero_grad()  # what G's step has left in D
    with zero_g.full_parameters(), zero_d.full_parameters():
        weights = torch.cat([all_weights(G), all_weights(D)])
    return weights, book.moved


kinds = ((0, False), (1, False), (2, False), (2, True), (3, False))
gans = {kind: gan(*kind) for kind in kinds}
expected = gans[0, False][0]
gan_equal = {kind: torch.equal(weights, expected) for kind, (weights, _) in gans.items()}
gan_sent = {kind: sent for kind, (_, sent) in gans.items()}

# %%
lab.measured("13.2", lab.pull("gan_sent", rank=0)[2, False])
lab.reveal("13.2")

# %% tags=["nbval-check-output"]
if lab.predicted("13.2"):
    for (stage, quiet), sent in lab.pull("gan_sent", rank=0).items():
        same = all(equal[stage, quiet] for equal in lab.pull("gan_equal"))
        how = ", under D's no_sync()" if quiet else ""
        seen = f"stage {stage}{how}: {sent:,} bytes of D's gradients in a step of G"
        print(f"{seen}; both networks equal stage 0, bit for bit: {same}")

# %% [markdown]
# An engine reduces whatever gradients a backward leaves, and does not know that nobody wants them. `with
# zero_d.no_sync():` around G's backward keeps them on the rank, and `adam_d.zero_grad()` throws them away. Both
# networks stay the same, bit for bit. Forget that `zero_grad()`, and D's next step also learns from G's loss, which is
# to fool it: a run that gets worse, without an error.
#
# ## Questions
#
# 1. Four ranks print exactly the same loss in every step. What is wrong, and what does it cost?
# 2. Why is the last batch of an epoch a problem on several ranks, and what is the mean of the ranks' mean losses there?
# 3. Same weights on all ranks, and different validation accuracies. Name two causes.
# 4. You go from 8 to 64 GPUs with the same batch on each. What do you do to the learning rate, and how do you know that
#    it was right?
# 5. A rank's share of the last batch is empty. May it skip the step?
# 6. (Of "For another day".) Which gradients does a generator's backward leave in the discriminator, and what happens if
#    you forget them?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Every rank has the same samples: no sampler, or the same seed and no split. N ranks do the work of one, and an
#    epoch costs N times as much.
# 2. Parts differ in size. The mean of means gives each *rank* the same weight, so images in small parts weigh more. Sum
#    over each rank's samples, times N, divided by the number of samples in the step.
# 3. BatchNorm's running statistics are each rank's own; or each rank validates on its own part. (Or a rank is in
#    training mode.)
# 4. Times eight, if the old rate was well below the highest that the model tolerates; in a long run with a warm-up.
#    Then train to equal samples with several seeds, at that rate, at half and at twice that rate, and compare with the
#    band of the old batch. The rule is a recipe, and ends somewhere.
# 5. No. Backward reduces gradients, and in stage 3 forward gathers parameters: all ranks take part. It runs with an
#    empty batch, and adds 0.
# 6. Those of all of its parameters, for the loss of the generator. D's next step adds them to its own: it learns to be
#    fooled. In every engine they also travel, unless `no_sync()` keeps them.

# %%
lab.stop()
lab.progress()
