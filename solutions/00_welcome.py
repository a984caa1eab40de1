# %% [markdown]
# # 00 · Welcome
#
# In fifteen minutes you will have four processes that train one model together, you will have broken them on purpose and
# put them right again, and you will have seen on your own machine what this course is about: **the memory of a training
# run, shared out among several machines**.
#
# You need to know how a PyTorch training loop looks. You need to know nothing about distributed training.

# %% [markdown]
# ## Ranks in a notebook
#
# A *rank* is one of the processes that train together. Usually each has a GPU of its own, and they talk over wires. Here
# four of them run on your machine and talk through its memory, with a library called *gloo*; between NVIDIA GPUs it would
# be *NCCL*. What you write works unchanged on either.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4);

# %% [markdown]
# A cell that begins with `%%ranks` runs on all four. Every rank runs the *same lines*. What makes them differ is their
# number, `rank`, from 0 to `world_size` - 1. A cell without `%%ranks` runs here in the notebook, as ever. If you restart
# the kernel, or a cell says that there are no live ranks, run the cell above again, and then what you need below it.

# %%
# %%ranks
print(f"I am rank {rank} of {world_size}, and my favourite number is {rank**2}")

# %% [markdown]
# What all ranks print alike is shown once. Variables live on the ranks from cell to cell, as they do in any notebook.
# `torch`, `rank` and `world_size` are there from the beginning.

# %%
# %%ranks
import torch.distributed as dist

mine = torch.full((3,), float(rank + 1))
print("this line is the same everywhere")

# %% [markdown]
# ## They talk
#
# Ranks share no memory. They exchange tensors in *collectives*: operations that all ranks call together. The best known
# is *all-reduce*: each rank brings a tensor, and each leaves with the sum of all four.
#
# Rank 0 brings `[1, 1, 1]`, rank 1 brings `[2, 2, 2]`, and so on. What will the first element be afterwards? Every
# lesson asks you before it shows: write your number in the place of `...`. (Not in the mood? `lab.skip("00.1")`.)

# %%
lab.predict("00.1", 10)

# %%
before = lab.pull("mine")  # a list of the four ranks' tensors, here in the notebook

# %%
# %%ranks
dist.all_reduce(mine)

# %%
from zerolab.lab import plots

after = lab.pull("mine")
lab.measured("00.1", after[0][0].item())
lab.reveal("00.1")

# %%
if lab.predicted("00.1"):
    plots.show(plots.before_after("all-reduce", [t.tolist() for t in before], [t.tolist() for t in after]))

# %% [markdown]
# Your turn: begin a cell with `%%ranks`, let each rank make a tensor with `rank + 1` in it, and print the *mean* over the
# four ranks, the same on each. (An all-reduce gives a sum. Gradients of four ranks are averaged in this way.)

# %%
# %%ranks
# write here

# %% tags=["answer"]
# %%ranks
average = torch.tensor([rank + 1.0])
dist.all_reduce(average)
average /= world_size
print(average)

# %% [markdown]
# ## Break it
#
# A collective is a meeting: it happens when everyone has come. So what if rank 2 stays away? Run this and read what comes.

# %% tags=["raises-exception"]
# %%ranks
if rank != 2:
    dist.all_reduce(mine)

# %% [markdown]
# The message says who waited for whom, and in which line. In a real run this is a job that hangs for half an hour and then
# ends in a thousand lines from every GPU. Here the lab's ranks tell each other first what they are about to call, so it
# always looks like this. `lab.reset()` lets the ranks meet anew (in a fresh *process group*, as `torch.distributed` calls
# those who meet), and their variables are still there. After a plain mistake such as a misspelt name you need no reset; if
# ranks no longer answer as they should, it is the first thing to try. A cell that hangs is ended by the notebook's stop button.

# %%
lab.reset()

# %%
# %%ranks
dist.barrier()  # a meeting without a message: all have come
print("all here, and mine is still", tuple(mine.shape))

# %% [markdown]
# ## What this course is about
#
# Train a model with Adam in the plain way on four ranks (this is *data parallelism*: each rank takes a quarter of the
# batch), and each rank holds everything: all parameters, all gradients, all of the optimizer's state. That is the same 16
# bytes for every parameter, four times. **ZeRO** (*zero redundancy optimizer*) is the observation that nobody needs to hold all of it all the time. It
# shares out one thing after the other:
#
# | stage | class here | what each rank holds only a quarter of |
# |---|---|---|
# | 0 | `DDP`, *distributed data parallel*, the plain way | nothing |
# | 1 | `Zero1` | optimizer state |
# | 2 | `Zero2` | optimizer state and gradients |
# | 3 | `Zero3` | optimizer state, gradients and parameters |
#
# Adam keeps two numbers of 4 bytes for each parameter. A model of 1 million parameters in 32-bit floats takes 4 MB,
# its gradients 4 MB and Adam's state 8 MB: 16 MB per rank in stage 0. How many MB will a rank hold in stage 3, on four
# ranks?

# %%
lab.predict("00.2", 4)

# %% [markdown]
# Now the four stages train the same small GPT on real text on your machine: the same loop, with another class name.
# What each rank holds is counted from its live memory.

# %%
from zerolab.lab import measure_ladder

lab.stop()  # these four have done their work; the measurement starts its own
report, problems = measure_ladder(ranks=4, steps=3, device="cpu", sizes={"layers": 4, "width": 128})
assert problems == []

# %%
held = {stage: sum(result["state_bytes"].values()) for stage, result in report["stages"].items()}
lab.measured("00.2", round(held["3"] / report["parameters"], 2), "MB for 1 million parameters")
lab.reveal("00.2")

# %%
if lab.predicted("00.2"):
    plots.show(plots.ladder(report))

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("00.2"):
    for stage, size in held.items():
        print(f"stage {stage}: {size / report['parameters']:.1f} bytes per parameter on each rank")
    same = all(result["bitwise_equal"] for result in report["stages"].values())
    print("the same parameters as one process, to the last bit:", same)

# %% [markdown]
# One colour shrinks per step. And the last line is the second half of the promise: all four stages end with *the same
# numbers* as one process that does all the work alone, to the last bit. ZeRO is not an approximation of anything.

# %% [markdown]
# ## Does your model fit?
#
# The same arithmetic for any model and any GPU. Try the model you work with. When does stage 1 stop helping?
#
# *Activations*, what forward keeps for backward, come on top: here 10 GB of them, on every rank and in every stage. And
# stage 3 needs what it computes with whole for a moment, a *unit* (a block of layers, say) at a time: it is "in flight".

# %%
from zerolab.lab import memory_explorer

memory_explorer("7.5B", 64, activations="10 GB")

# %% [markdown]
# ## On trial
#
# > "ZeRO came from NVIDIA." · "ZeRO came from Facebook's FAIR." · "BERT was trained with it."
#
# All three are in articles. The paper is *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* by
# Rajbhandari, Rasley, Ruwase and He, of **Microsoft**, October 2019 ([arXiv 1910.02054](https://arxiv.org/abs/1910.02054)).
# BERT is of October 2018. **Verdict: false**, all three, by the dates and the title page alone. Claims that need more than
# a title page get a measurement; each lesson tries one or two.

# %% [markdown]
# ## How it goes on
#
# A lesson takes 40 to 60 minutes. You predict, you look, you write at most 25 lines, and a check runs them on 1, 2, 3 and
# 4 ranks and says *which* mistake it found. Your answers are files in `my/`, beside the notebooks, and no update of the
# course overwrites them.
#
# Half a day: lessons 00, 02, 04. One day: 00 to 07. `lab.progress()` shows where you are.

# %%
lab.progress()

# %% [markdown]
# ## Questions
#
# 1. Four ranks train in stage 0. How many copies of the optimizer's state are there, and do they differ?
# 2. Rank 2 skips a collective. Why can rank 0 not notice at once?
# 3. What does ZeRO change about the numbers that a training run computes?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Four, and they are equal to the bit: all ranks saw the same averaged gradients. Three of them are waste, which is the
#    idea of stage 1.
# 2. A rank sees what arrives and nothing else. A rank that is late and a rank that will never come look alike until some
#    time has passed. That is why every collective needs a timeout. (The lab knows sooner because the notebook, which sees
#    all four, tells the others when rank 2 has finished the cell.)
# 3. Nothing. It changes who holds them.
