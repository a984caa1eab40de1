# %% [markdown]
# # 16 · Plan a trillion parameters
#
# **The question.** You have a model in mind and a budget for GPUs. On how many does it fit, in which stage, and what will
# they spend their time on? Whoever finds out by renting 64 of them has paid for the answer; whoever plans with the wrong
# formula has bought the wrong number. You have written the stages. Now let them run on a cluster that does not exist.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

# %% [markdown]
# ## Simulate
#
# torch can make *fake tensors*: they have a shape, a dtype and a storage of some size, but no memory. And a *fake process
# group*: it has as many ranks as you like, and moves nothing. `simulate` runs the real engine on both, unchanged, as
# rank 0 of N. What it holds and sends is then real arithmetic of real code, for a model that no laptop could hold.
#
# The paper's Figure 1 asks about 7.5 billion parameters on 64 GPUs, in bf16 with Adam. (16-bit parameters and gradients, 2
# bytes each, and masters and Adam's two averages, 12 bytes: lesson 02.) What does a rank hold in stage 1, 2, and 3, in GB?

# %%
lab.predict("16.1", round(4 * 7.5 + 12 * 7.5 / 64, 1))
lab.predict("16.2", round(2 * 7.5 + 14 * 7.5 / 64, 1))
lab.predict("16.3", round(14 * 7.5 / 64, 2))

# %% [markdown]
# The classes are *yours* where your exercises of lessons 03 to 07 have passed, and the course's where not: the printed
# lines say whose code runs.

# %%
from zerolab import DDP, Zero1, Zero2, Zero3
from zerolab.lab.paper import FIGURE_1, SIZES, simulate_gpt

stages = [lab.mine(stage) for stage in (DDP, Zero1, Zero2, Zero3)]

# %%
layers, width = SIZES["7.5B"]
runs = [simulate_gpt(layers, width, stage, ranks=64) for stage in stages]
held = [sum(run.states.values()) / 1e9 for run in runs]
for number, id in ((1, "16.1"), (2, "16.2"), (3, "16.3")):
    lab.measured(id, round(held[number], 2 if number == 3 else 1), "GB")
    lab.reveal(id)

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("16.1"):
    for paper, engine, stage in zip(FIGURE_1, held, stages):
        print(f"{stage.__name__:6} the paper {paper:6.1f} GB, your engine {engine:6.2f} GB")
    assert all(abs(engine / paper - 1) < 0.01 for paper, engine in zip(FIGURE_1[:3], held))

# %% [markdown]
# Stages 1 and 2 agree. In stage 3 the paper says 1.9 GB and the engine 1.64, and it is no error: the paper keeps a 16-bit
# copy of the slice beside the masters, 16Ψ/N. This engine makes the copy anew on the way into each gather: 14Ψ/N.

# %% [markdown]
# ## The peak is more
#
# What a rank holds between steps is not what it must have room for. The simulation has recorded every allocation, so ask it
# what the peak of a step is made of. (One sequence of 1,024 tokens for each rank, nothing recomputed.)

# %%
if lab.predicted("16.3"):
    plots.show(plots.skyline([runs[2].timeline, runs[3].timeline]))

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("16.3"):
    for run, stage in zip(runs[2:], stages[2:]):
        parts = {kind: round(size / 1e9, 1) for kind, size in run.timeline.by_kind().items() if size > 5e7}
        print(stage.__name__, f"peak {run.timeline.peak / 1e9:.1f} GB:", parts)

# %% [markdown]
# In stage 3 a rank *holds* 1.6 GB and *needs* more than five times that: activations, and the units in flight. More GPUs
# make the first number smaller and leave the second as it is.

# %% [markdown]
# ## To a trillion
#
# Three models on up to 1,024 GPUs: the paper's Table 1. All 54 cells take some minutes (`zerolab simulate --table1 --json
# docs/table1.json`), so here they come from the file that this command wrote.

# %%
import json
from pathlib import Path

import zerolab

stored = Path(zerolab.__file__).parents[1] / "docs" / "table1.json"
cells = json.loads(stored.read_text())["cells"]
plots.show(plots.to_a_trillion(cells))

# %% [markdown]
# Look at the two upper lines: they stop falling. What is not shared out stays, however many GPUs there are: 4Ψ bytes in
# stage 1, 2Ψ in stage 2. A trillion parameters are 2 TB of gradients and parameters in 16 bits, and no GPU has that.

# %% [markdown]
# ## Write: the fewest GPUs
#
# So for each stage there is a fewest number of GPUs, or none is enough. Write it: bf16 with Adam, and activations that
# each GPU needs besides. A lesson's worth of formulas in ten lines.

# %%
# %%exercise 16.1
import math


def fewest_gpus(parameters: int, memory: float, activations: float) -> dict[int, int | None]:
    """For each stage 0 to 3 the fewest GPUs on which training in bf16 with Adam fits; None if no number is enough."""
    on_every, shared = {0: 16, 1: 4, 2: 2, 3: 0}, {0: 0, 1: 12, 2: 14, 3: 14}
    result = {}
    for stage in range(4):
        room = memory - activations - on_every[stage] * parameters
        if shared[stage] == 0:
            result[stage] = 1 if room >= 0 else None
        elif room <= 0:
            result[stage] = None
        else:
            result[stage] = max(1, math.ceil(shared[stage] * parameters / room))
    return result


# %%
lab.check("16.1")

# %% [markdown]
# ## A plan for a cluster
#
# A customer has 32 GPUs of 80 GB, and a model of 13 billion parameters in mind. A sequence of theirs needs 12 GB of
# activations. In which stages does it fit, and on how many of the GPUs?

# %%
fewest = lab.mine("16.1")
plan = fewest(13_000_000_000, 80e9, 12e9)
print({stage: n for stage, n in plan.items() if n is not None and n <= 32})
assert plan == {0: None, 1: 10, 2: 5, 3: 3}

# %% [markdown]
# And the other way round: the largest model per kind of GPU, on 64 of them, if the model states may have all but a quarter of
# the memory.

# %%
# NBVAL_CHECK_OUTPUT
from zerolab.measure.plan import in_parameters, plan as compare

for gpu in (24e9, 80e9, 141e9):
    rows = compare(1e9, 64, memory=gpu, activations=gpu / 4)
    print(f"{gpu / 1e9:.0f} GB:", ", ".join(f"stage {row.stage} {in_parameters(row.largest)}" for row in rows))

# %% [markdown]
# ## Where the time goes
#
# Fitting is not all. In a step each rank of stage 3 sends about three times the 16-bit parameters, whatever N is, and it
# computes 6 operations per parameter and token. More GPUs with the same number of sequences each: computing stays, sending
# stays, latency grows: 2 messages for each unit and neighbour. Put in numbers for 7.5 billion parameters, 16 sequences a
# GPU, 200 TFLOP/s, and 25 GB/s between the GPUs of different nodes, 20 µs a message:

# %%
# NBVAL_CHECK_OUTPUT
psi, tokens, units = 7.5e9, 16 * 1024, 37
for n in (8, 64, 512, 4096):
    computing = 6 * psi * tokens / 200e12
    sending = 3 * 2 * psi * (n - 1) / n / 25e9
    latency = 3 * units * (n - 1) * 20e-6
    print(f"{n:5,} GPUs: computing {computing:.1f} s, sending {sending:.1f} s, latency {latency:.1f} s")

# %% [markdown]
# These are formulas, not measurements: a ring over 4,096 ranks pays 4,095 latencies for each collective. Nobody trains like
# that. **Hybrid sharding** shards inside a node, where the wires are fast, and keeps replicas of the node's shards on the
# others: parameters are gathered among 8 ranks and never leave the node; between nodes travel only the gradients of a
# rank's own shard, an eighth of them. What it costs is memory: the states are divided by 8 and not by N.

# %%
# NBVAL_CHECK_OUTPUT
for n in (64, 512):
    flat, hybrid = 14 * psi / n, 14 * psi / 8
    across_flat = 3 * 2 * psi * (n - 1) / n
    across_hybrid = 2 * (2 * psi / 8) * (n / 8 - 1) / (n / 8)
    print(f"{n} GPUs: held {flat / 1e9:.1f} or {hybrid / 1e9:.1f} GB;", end=" ")
    print(f"a rank sends {across_flat / 1e9:.0f} GB over a slow wire, or {across_hybrid / 1e9:.1f} GB")

# %% [markdown]
# In a flat ring only the ranks at a node's edge use the slow wire, but the ring is no faster than its slowest link, so all
# of its bytes count as if they were sent there. Hybrid sharding sends a twelfth of them.

# %% [markdown]
# ## In production
#
# FSDP2 calls it a two-dimensional mesh: `fully_shard(model, mesh=init_device_mesh("cuda", (nodes, 8)))`. DeepSpeed has
# `zero_hpz_partition_size` for the same idea in stage 3. The classes of this course shard over one group; their `group=`
# takes any.

# %% [markdown]
# ## On trial
#
# > "With more devices the model can grow without limit."
#
# Lesson 07 tried it on your machine. Here is the same claim at scale: the peak of a trillion parameters on 1,024 GPUs was
# simulated into the same table.

# %%
# NBVAL_CHECK_OUTPUT
big = [cell for cell in cells if cell["model"] == "1T" and cell["stage"] == 3]
for cell in big:
    print(f"{cell['ranks']:5,} GPUs: held {cell['engine_gb']:9,.1f} GB, peak of a step {cell['peak_gb']:9,.1f} GB")

# %% [markdown]
# **Verdict: false.** From 256 to 1,024 GPUs what a rank holds falls to a quarter, and the peak by a sixth: activations and
# three whole units, 35 GB of parameters and 35 GB of gradients, do not care how many ranks there are.

# %% [markdown]
# ## Questions
#
# 1. A GPU has 80 GB, and activations take 20. What is the largest model for stage 2, on any number of GPUs?
# 2. Why does the simulation of stage 3 give 14Ψ/N and the paper 16Ψ/N?
# 3. You double the number of GPUs and keep the global batch. What happens to computing, sending and latency per step?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. 2Ψ must stay below 60 GB: 30 billion parameters, and with the last of them infinitely many GPUs.
# 2. The paper keeps a 16-bit copy of the slice; here each gather makes it from the masters on its way.
# 3. Computing halves, because each rank has half as many tokens; sending stays as it is; latency doubles. So at some number
#    of GPUs a step does not get faster any more.

# %%
lab.progress()
