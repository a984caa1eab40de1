# %% [markdown]
# # 00 · Welcome
#
# In half an hour you will have four processes training one model together. You will have broken them on purpose and
# fixed them. And you will have seen on your own machine what this course is about: **splitting the memory of a training
# run across several machines**.
#
# You need to know what a PyTorch training loop looks like. You don't need to know anything about distributed training.

# %% [markdown]
# ## Ranks in a notebook
#
# A *[rank](../docs/glossary.md#rank)* is one of the processes that train together. Usually each rank has its own GPU, and they talk over wires.
# Here four of them run on your machine, and a library called *gloo* carries their messages. Between NVIDIA GPUs it would
# be *NCCL*, which takes only tensors that are on a GPU. The calls are the same on either.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4);

# %% [markdown]
# A cell that begins with `%%ranks` runs on all four ranks. Every rank runs the *same lines*. The only thing that
# differs is its number, `rank`, from 0 to `world_size` - 1. A cell without `%%ranks` runs here in the notebook, as
# usual. If you restart the kernel, or a cell says that there are no live ranks, run the cell above again, and then
# whatever you need below it.

# %%
# %%ranks
print(f"I am rank {rank} of {world_size}, and my favourite number is {rank**2}")

# %% [markdown]
# If all ranks print the same line, you see it once. Variables stay on the ranks from cell to cell, as in any notebook.
# `torch`, `rank` and `world_size` are defined from the start.
#
# ## They talk
#
# Ranks share no memory. They exchange tensors in *[collectives](../docs/glossary.md#collective)*: operations that all ranks call together. The best known
# is *[all-reduce](../docs/glossary.md#all-reduce)*: each rank brings a tensor, and each leaves with the sum of all four.
#
# Rank 0 brings `[1, 1, 1]`, rank 1 brings `[2, 2, 2]`, and so on. What will the first element be afterwards? Every
# lesson asks you before it shows you: replace the `...` with your number. (Not in the mood? `lab.skip("00.1")`.)

# %%
lab.predict("00.1", 10)

# %%
# %%ranks
import torch.distributed as dist

mine = torch.full((3,), float(rank + 1))
before = mine.tolist()
dist.all_reduce(mine)
after = mine.tolist()

# %%
before, after = lab.pull("before"), lab.pull("after")  # a list of the four ranks' values
lab.measured("00.1", after[0][0])
lab.reveal("00.1")

# %%
if lab.predicted("00.1"):
    plots.show(plots.before_after("all-reduce", before, after))

# %% [markdown]
# Your turn. Begin a cell with `%%ranks`, let each rank make a tensor `average` that holds `rank + 1`, and print the
# *mean* over the four ranks, the same on each. It is 2.5. (An all-reduce gives you a sum. The gradients of four ranks
# are averaged this way too.)

# %%
# %%ranks
# your code here

# %% tags=["answer"]
# %%ranks
average = torch.tensor([rank + 1.0])
dist.all_reduce(average)
average /= world_size
print(average)

# %% [markdown]
# ## Break it
#
# A collective is a meeting: it doesn't start until everyone is there. So what happens if rank 2 stays away? Run this
# and read the message.

# %% tags=["raises-exception"]
# %%ranks
if rank != 2:
    dist.all_reduce(mine)

# %% [markdown]
# The message says who waited for whom, and on which line. In a real run, this is a job that hangs until a timeout ends
# it, by default after 10 minutes with NCCL and 30 with gloo, and leaves pages of errors from every rank. Here the ranks
# first tell each other what they are about to call, and the notebook tells them when one has finished the cell. So you
# always get a message like this one.
#
# `lab.reset()` gives the ranks a fresh *[process group](../docs/glossary.md#process-group)*, which is what `torch.distributed` calls the ranks that meet.
# Their variables are kept. After an ordinary mistake, such as a misspelt name, you don't need a reset. If the ranks
# stop answering as they should, try it first. If a cell hangs, press the notebook's stop button.

# %%
lab.reset()

# %%
# %%ranks
dist.barrier()  # a meeting where nothing is said: everyone has arrived
print("everyone is here, and mine still has shape", tuple(mine.shape))

# %% [markdown]
# ## What this course is about
#
# Train a model with Adam on four ranks in the plain way. This is *data parallelism*: each rank takes a quarter of the
# batch. Each rank also holds everything: all parameters, all gradients and all of the optimizer's state. That is 16
# bytes for every parameter (4 for itself, 4 for its gradient, 8 for the two numbers that Adam keeps), stored four times over.
# **[ZeRO](../docs/glossary.md#zero)** (*zero redundancy optimizer*) starts from the observation that no rank needs
# all of it all the time. It splits one thing after another across the ranks:
#
# | stage | class here | what each rank holds only a quarter of |
# |---|---|---|
# | 0 | `DDP`, *distributed data parallel*, the plain way | nothing |
# | 1 | `Zero1` | optimizer state |
# | 2 | `Zero2` | optimizer state and gradients |
# | 3 | `Zero3` | optimizer state, gradients and parameters |
#
# For a model of 1 million parameters in 32-bit floats, that is 16 MB in stage 0. How many MB will a rank hold in stage
# 3, on four ranks?

# %%
lab.predict("00.2", 4)  # MB for 1 million parameters

# %% [markdown]
# Now all four stages train the same small GPT on real text, on your machine. It has 0.47 million parameters, so what a
# rank holds is divided by 0.47 before it is compared with your number. The loop is the same each time; only the name of
# the class changes. What each rank holds is counted from its live memory. This takes about ten seconds.

# %%
from zerolab.lab import measure_ladder

lab.stop()  # these four are done; the measurement starts its own ranks
sizes = {"layers": 2, "width": 128}
report, problems = measure_ladder(ranks=4, steps=2, device="cpu", sizes=sizes)
assert problems == []

# %%
stages, psi = report["stages"], report["parameters"]
held = {stage: sum(result["state_bytes"].values()) for stage, result in stages.items()}
lab.measured("00.2", round(held["3"] / psi, 2))
lab.reveal("00.2")

# %%
if lab.predicted("00.2"):
    plots.show(plots.ladder(report))

# %% tags=["nbval-check-output"]
if lab.predicted("00.2"):
    for stage, size in held.items():
        print(f"stage {stage}: {size / psi:.1f} bytes per parameter on each rank")
    same = all(result["bitwise_equal"] for result in stages.values())
    print("same parameters as one process, to the last bit:", same)

# %% [markdown]
# Each stage shrinks one more colour. The last line is the other half of the promise: all four stages end with *the same
# numbers* as one process that does all the work alone, to the last bit. ZeRO is not an approximation of anything.

# %% [markdown]
# ## Does your model fit?
#
# The same arithmetic works for any model and any GPU. Try the model you work with. The explorer starts in *bf16*, as
# large models are trained: parameters and gradients in 16 bits, and for the optimizer a copy of the parameters in 32.
# With Adam that is still 16 bytes per parameter (lesson 02). How small does stage 1 get with more and more GPUs? (Never
# below 4 bytes per parameter: the 16-bit parameters and gradients stay whole.) In stage 3 this engine needs 14 of the
# 16, since it makes the 16-bit parameters anew when they are needed (lesson 08). You can switch to float32.
#
# *Activations*, what forward keeps for backward, come on top: here 10 GB of them, on every rank and in every stage.
# Stage 3 also needs the full parameters of whatever it is computing at the moment, one *unit* at a time (a unit is a
# block of layers, say). That unit is "in flight".

# %%
from zerolab.lab import memory_explorer

memory_explorer("7.5B", 64, activations="10 GB")

# %% [markdown]
# ## On trial
#
# > "The current implementation (ZeRO-2) reduces memory by up to 8x relative to the state-of-art."
#
# So says the [documentation of DeepSpeed](https://www.deepspeed.ai/training/), a library that you will meet again. The
# state of the art was what you call stage 0. Divide what you have measured:

# %% tags=["nbval-check-output"]
if lab.predicted("00.2"):
    for stage in "123":
        print(f"stage {stage}: {held['0'] / held[stage]:.1f} times less than stage 0")

# %% [markdown]
# **Verdict: true under a condition.** On four ranks, stage 2 holds 2.3 times less. Its parameters stay whole, at 4 of 16
# bytes in float32 and 2 of 16 in bf16. So however many ranks there are, the factor stays below 4 in float32 and below
# 8 in bf16. "Up to" stands for conditions that the sentence does not name. Nearly every lesson puts a claim on
# trial, and measures what decides it.

# %% [markdown]
# ## What comes next
#
# A lesson takes an hour or so, and at most 75 minutes. You predict, you look, and you write at most 25 lines at a time.
# A check runs them on 1, 2, 3 and 4 ranks and tells you *which* mistake it found. Your answers are files in `my/`, next
# to the notebooks, and no update of the course overwrites them.
#
# If you have half a day: lessons 00, 02 and 04, with the first sections of 01 and 03. If you have a day and a half: 00
# to 07. `lab.progress()` shows where you are.

# %%
lab.progress()

# %% [markdown]
# ## Questions
#
# 1. Four ranks train in stage 0. How many copies of the optimizer's state are there, and do they differ?
# 2. Rank 2 skips a collective. Why can't rank 0 notice right away?
# 3. What does ZeRO change about the numbers that a training run computes?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Four, identical to the last bit, because all ranks saw the same averaged gradients. Three of them are waste. That
#    is the idea behind stage 1.
# 2. A rank sees only what arrives. A rank that is late and a rank that will never come look the same until some time
#    has passed. That is why every collective needs a timeout. (The lab knows sooner: the notebook sees all four ranks,
#    and tells the others when rank 2 has finished the cell.)
# 3. Nothing. It changes who holds them.
