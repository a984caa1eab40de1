# %% [markdown]
# # 16 · Plan a trillion parameters
#
# **The question.** You have a model in mind and a budget for GPUs. On how many GPUs does it fit, in which stage, and
# what will they spend their time on? If you find out by renting 64 of them, you have already paid for the answer. You
# have written the stages. Now run them on a cluster that doesn't exist.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

# %% [markdown]
# ## Simulate
#
# torch can make *fake tensors*: they have a shape, a dtype and a storage of a given size, but no memory. It can also
# make a *fake process group*: it has as many ranks as you like, and moves nothing. `simulate` runs the real engine on
# both, unchanged, as rank 0 of N, for a model that no laptop could hold.
#
# The paper that introduced ZeRO (Rajbhandari et al., arXiv 1910.02054) opens with a figure: 7.5 billion parameters on
# 64 GPUs, in 16-bit numbers with Adam. Per parameter that is 2 bytes for a 16-bit weight, 2 for its gradient, and 12
# for a master copy of the weight in 32 bits and Adam's two averages (lesson 02). How many GB does a rank of this engine
# hold in stages 1, 2 and 3 when backward returns? (Lesson 08 says what it does differently in stage 3. Give two
# decimals for stage 3 and one for the others. To see them right away, `lab.skip("16.1")` and so on.)

# %%
lab.predict("16.1", round(4 * 7.5 + 12 * 7.5 / 64, 1))  # GB
lab.predict("16.2", round(2 * 7.5 + 14 * 7.5 / 64, 1))  # GB
lab.predict("16.3", round(14 * 7.5 / 64, 2))  # GB

# %% [markdown]
# A class is *yours* if you have passed its exercises in lessons 03 to 07, and the course's if not. The printed lines
# say whose code runs. The cell after the next takes some 20 seconds: it trains the 7.5 billion parameters for two
# steps in each stage, with every operation run but none of its numbers computed.

# %%
from tqdm import tqdm
from zerolab import DDP, Zero1, Zero2, Zero3
from zerolab.measure.paper import FIGURE_1, SIZES, simulate_gpt

stages = [lab.mine(stage) for stage in (DDP, Zero1, Zero2, Zero3)]
written = (("03.3",), ("04.2",), ("05.1",), ("06.2", "07.1"))
yours = [all(map(lab.passed, ids)) for ids in written]  # its bar: solid if so, else hatched
for stage in stages:
    stage.prefetch = False  # gather nothing before its turn, as in lessons 06 and 07

# %%
layers, width = SIZES["7.5B"]
shown = tqdm(stages, "stages", leave=False)
runs = [simulate_gpt(layers, width, stage, ranks=64) for stage in shown]
held = [sum(run.states.values()) / 1e9 for run in runs]
for number, id in ((1, "16.1"), (2, "16.2"), (3, "16.3")):
    lab.measured(id, round(held[number], 2 if number == 3 else 1))
    lab.reveal(id)

# %% tags=["nbval-check-output"]
if lab.predicted("16.1") and lab.predicted("16.2") and lab.predicted("16.3"):
    for paper, engine, stage in zip(FIGURE_1, held, stages):
        print(f"{stage.__name__:6} the paper {paper:6.1f} GB, simulated {engine:6.2f} GB")
    assert all(abs(engine / paper - 1) < 0.01 for paper, engine in zip(FIGURE_1[:3], held))

# %% [markdown]
# Now draw the figure itself. (Our picture shows the 30 GB of masters with the parameters, because they hold the
# parameters' values. The paper counts them as optimizer state. From stage 1 on, a rank has masters for its slices
# only.)

# %%
if lab.predicted("16.1") and lab.predicted("16.2") and lab.predicted("16.3"):
    plots.show(lab.figure_1(stages, runs, yours))

# %% [markdown]
# Stages 0, 1 and 2 agree with the paper. In stage 3 the paper says 1.9 GB and the engine 1.64 GB, and neither is wrong.
# The paper keeps a 16-bit copy of the slices beside the masters: 16Ψ/N. This engine makes that copy again on the way
# into each gather: 14Ψ/N.

# %% [markdown]
# ## The peak is higher
#
# A rank needs room for more than what it holds when backward returns. The simulation recorded every allocation, so ask
# it what the peak of a step is made of. (Each rank has one sequence of 1,024 tokens, and nothing is recomputed.)

# %%
if lab.predicted("16.3"):
    plots.show(plots.skyline([runs[2].timeline, runs[3].timeline], learner=yours[2:]))

# %% tags=["nbval-check-output"]
if lab.predicted("16.3"):
    for run, stage in zip(runs[2:], stages[2:]):
        kinds = run.timeline.by_kind()
        parts = {kind: round(size / 1e9, 1) for kind, size in kinds.items() if size > 5e7}
        print(stage.__name__, f"peak {run.timeline.peak / 1e9:.1f} GB:", parts)

# %% [markdown]
# In stage 3 a rank *holds* 1.6 GB and *needs* more than five times that. The rest is activations, and the units in
# flight: their full parameters and full gradients (lessons 06 and 07). More GPUs make the first number smaller. The
# rest stays what it is.
#
# ## To a trillion
#
# Three models on up to 1,024 GPUs: this is the paper's Table 1. All 54 cells take a few minutes to simulate (`zerolab
# simulate --table1 --json table1.json`), so here they come from the file which that command wrote.

# %%
import json
from importlib.resources import files

cells = json.loads((files("zerolab.measure") / "table1.json").read_text())["cells"]
plots.show(plots.to_a_trillion(cells))

# %% [markdown]
# Look at the lines of stages 1 and 2: they stop falling. What a stage doesn't shard stays, however many GPUs there are:
# 4Ψ bytes in stage 1, and 2Ψ in stage 2. A trillion parameters in 16 bits are 2 TB, and no GPU has that much.
# (Circles are the paper's numbers, dots this engine's, lines the formulas. The grey lines mark the memory of GPUs that
# you can rent.)
#
# ## Write: the fewest GPUs
#
# So for each stage there is a smallest number of GPUs on which a model fits, or no number is enough. Write it, for this
# engine in bf16 with Adam, with activations that each GPU needs on top.

# %%
# %%exercise 16.1

# %%
lab.check("16.1")

# %% [markdown]
# ## A plan for a cluster
#
# A customer has 32 GPUs of 80 GB, and wants to train a model of 13 billion parameters. One sequence of theirs needs 12
# GB of activations. In which stages does the model fit, and on how many of the GPUs? Another asks for a model of the
# size of GPT-3, 175 billion parameters, with the same 12 GB, on any number of them. (The answer leaves no room for
# units in flight, so read it as a lower bound. `zerolab.lab.memory_explorer` takes your own numbers: for another day,
# at the end.)

# %% tags=["nbval-check-output"]
fewest = lab.mine("16.1")
needed = fewest(13_000_000_000, 80e9, 12e9)
if lab.passed("16.1"):

    def told(needed):
        said = {stage: f"{n} GPUs or more" if n else "never" for stage, n in needed.items()}
        return ", ".join(f"stage {stage}: {n}" for stage, n in said.items())

    print("13 billion:", told({stage: n for stage, n in needed.items() if n and n <= 32}))
    print("GPT-3:", told(fewest(175_000_000_000, 80e9, 12e9)))
else:
    print("the answer appears here once your function has passed")

# %% [markdown]
# ## Where the time goes
#
# It is not enough that a model fits. Say each GPU computes 16 sequences of 1,024 tokens in a step, and we add GPUs. In
# stage 3:
#
# - *computing* stays the same: 6 operations per parameter and token, at 200 TFLOP/s.
# - *sending* stays almost the same: about 3Ψ elements of 2 bytes, whatever N is (lesson 07). A ring over several nodes
#   is only as fast as the wires between the nodes: 25 GB/s out of a node of 8 GPUs, compared with 300 GB/s inside it.
# - *[latency](../docs/glossary.md#latency)* grows: a ring of N ranks passes N - 1 messages, one after another, in 3
#   collectives for each of 37 units (36 blocks and the root), at 20 µs a message.

# %%
psi, tokens, units = 7.5e9, 16 * 1024, 37
inside, between = {"speed": 300e9, "message": 5e-6}, {"speed": 25e9, "message": 20e-6}


def flat(n):
    return {
        "computing": 6 * psi * tokens / 200e12,
        "sending": 3 * 2 * psi * (n - 1) / n / between["speed"],
        "latency": 3 * units * (n - 1) * between["message"],
    }


# %% tags=["nbval-check-output"]
for n in (16, 64, 512, 4096):
    times = [f"{kind} {seconds:.1f} s" for kind, seconds in flat(n).items()]
    print(f"{n:5,} GPUs:", ", ".join(times))

# %% [markdown]
# So it scales, up to a few hundred GPUs. Beyond that, a step waits for messages that carry hardly anything.
#
# **[Hybrid sharding](../docs/glossary.md#hybrid-sharding)** shards inside a node, where wires are fast, and keeps a full
# replica in every node. The 8 ranks of a node are a *shard group*. The ranks that hold the same shard in different nodes
# are a *replicate group*. Look at which wires are used (the number in a square is the shard that the GPU holds):

# %%
plots.show(plots.sharding_map(nodes=4, per_node=8))

# %% [markdown]
# On the left, every gather of every unit goes around through all nodes. On the right, parameters are gathered among 8
# GPUs and never leave the node. Only gradients travel between nodes. Each GPU has the mean, over its node, of one
# eighth of the gradient. It averages that with the GPUs in other nodes that hold the same eighth. That is an all-reduce
# of Ψ/8 elements for each of the node's eight GPUs, which share its wires. The price is memory: states are now
# divided by 8 instead of N.


# %%
def hybrid(n):
    nodes = n // 8
    sent_inside = 3 * 2 * psi * 7 / 8
    sent_between = 8 * 2 * (2 * psi / 8) * (nodes - 1) / nodes
    rounds_inside, rounds_between = 3 * units * 7, 2 * units * (nodes - 1)
    return {
        "computing": 6 * psi * tokens / 200e12,
        "sending": sent_inside / inside["speed"] + sent_between / between["speed"],
        "latency": rounds_inside * inside["message"] + rounds_between * between["message"],
    }


counts = (16, 64, 512, 4096)
panels = {"flat": {n: flat(n) for n in counts}, "hybrid": {n: hybrid(n) for n in counts}}
subtitle = "7.5 billion parameters, 16 sequences per GPU; by formula, with no overlap"
plots.show(plots.where_time_goes(panels, subtitle))

# %% tags=["nbval-check-output"]
from zerolab.measure.paper import BF16
from zerolab.measure import between_bytes, moved_bytes

# What the engine's tests measure is the same:
assert moved_bytes(3, 64, int(psi), precision=BF16) == 6 * psi * 63 / 64
assert 8 * between_bytes((8, 8), int(psi), BF16) == 4 * psi * 7 / 8
for n in (64, 512):
    leaving = {"flat": 6 * psi * (n - 1) / n, "hybrid": 4 * psi * (n - 8) / n}
    for (way, nbytes), kept in zip(leaving.items(), (14 * psi / n, 14 * psi / 8)):
        print(f"{n} GPUs, {way:6}: a GPU holds {kept / 1e9:4.1f} GB,", end=" ")
        print(f"{nbytes / 1e9:.0f} GB leave each node per step")

# %% [markdown]
# At least a third less leaves the node: 2Ψ elements, as in DDP, instead of 3Ψ. (On few nodes it is less still: a ring of
# 8 nodes sends 7/8 of those 2Ψ.) Latency falls to a fraction, because a ring has 8 members, or as many as there are
# nodes. And what still travels between nodes can wait: a gradient isn't needed until the step, while a gather holds up
# the next block, and those stay inside. If several micro-batches make up a step, parameters are gathered for each of
# them, but gradients cross between nodes only once.
#
# (These are formulas, not measurements. Real networks also use trees instead of rings, whose latency grows with the
# logarithm of N, and libraries overlap part of it. So FSDP on thousands of GPUs is not as slow as the left panel.)
#
# ## Write: a plan that pays
#
# A customer wants to train 13 billion parameters on 20 billion tokens, in sequences of 2,048. They can have at most 32
# GPUs of 80 GB, in nodes of 8, at 2 dollars an hour each. **At most 7 days, and at most 8,000 dollars.** Which stage,
# how many GPUs, and how many sequences on each?
#
# - Memory: states by the stage's formula (bf16 with Adam), 12 GB of activations for each sequence, and 2 GB for what is
#   in flight.
# - Time of a step: first computing, 6 operations per parameter and token at 200 TFLOP/s. Then sending, in 2 bytes each:
#   2Ψ elements in stages 0 to 2 and 3Ψ in stage 3, (N-1)/N of it, at 300 GB/s on one node and 25 GB/s on more. Nothing
#   overlaps, and there is no latency.
#
# More than one plan is right, and most are wrong. Compute it, or try: the check tells you which limit you broke.


# %%
# %%exercise 16.2

# %%
lab.check("16.2")

# %% [markdown]
# Here is what your plan costs, and what others would cost, each with as many sequences as fit:

# %%
if lab.passed("16.2"):
    mine = lab.mine("16.2")()
    print(f"your plan, {mine}: {lab.weigh_plan(**mine)}")
    print(lab.other_plans())

# %% [markdown]
# On 32 GPUs the stage that sends the most is the cheapest. The memory it frees is room for more sequences, and with
# more sequences in a step, that step's bytes are paid for once for all of them. On one node it is cheaper still, but
# too slow. So don't ask how much a stage sends; ask how much it sends *per token*.
#
# ## In production
#
# The course's engine takes `mesh=(nodes, 8)` for hybrid sharding, in stages 1 to 3. In FSDP2 it is a two-dimensional
# mesh, `fully_shard(model, mesh=init_device_mesh("cuda", (nodes, 8)))`, and in DeepSpeed MiCS (`mics_shard_size`).
# (`zero_hpz_partition_size` is a related idea in stage 3: a second copy of the parameters, sharded only within the
# node.) People who plan real runs measure on a single node first: until then, the constants above are guesses.
#
# ## On trial
#
# > "With more devices the model can grow without limit."
#
# Lesson 07 tested it on your machine. Here it is at scale: the same table has the simulated peak of a trillion
# parameters. (There the engine prefetches, as it does unless told otherwise, so a little more is in flight than above.)

# %%
big = [cell for cell in cells if cell["model"] == "1T" and cell["stage"] == 3]
for cell in big:
    holds, peak = cell["engine_gb"], cell["peak_gb"]
    print(f"on {cell['ranks']:5,}: holds {holds:8,.0f} GB,", end=" ")
    print(f"peak of a step {peak:8,.0f} GB")

# %% [markdown]
# **Verdict: false.** From 256 to 1,024 GPUs, what a rank holds falls to a quarter, but the peak falls only by about a
# sixth. Activations and full units, parameters and gradients, don't get smaller with more ranks: on 1,024 GPUs they are
# nearly all of the peak, which is 178 GB above what is held. One block of this model has 7.9 billion parameters (12
# times the square of its width, 25,600), 16 GB in 16 bits. As for time, the picture above shows it for 7.5 billion: on
# 4,096 GPUs, sharded flat, 9.1 of a step's 14.6 seconds are latency.
#
# > "Full sharding keeps 16Ψ/N."
#
# You measured it in float32 in lesson 06. Here, in bf16: **true for what the paper's engine holds; this one holds
# 14Ψ/N.** In both, activations and what is in flight come on top.
#
# ## For another day: the largest model (4 minutes)
#
# Turn the question around. What is the largest model that 64 GPUs can train, if they have 24, 80 or 141 GB each,
# and activations and units in flight take a quarter of it? The explorer after the next cell takes your own numbers.

# %% tags=["nbval-check-output"]
from zerolab.measure import in_parameters, plan as compare

for gpu in (24e9, 80e9, 141e9):
    rows = compare(1e9, 64, memory=gpu, activations=gpu / 4)
    largest = [f"stage {row.stage} {in_parameters(row.largest)}" for row in rows]
    print(f"{gpu / 1e9:.0f} GB:", ", ".join(largest))

# %%
from zerolab.lab import memory_explorer

explorer = memory_explorer("13B", ranks=32, activations="20 GB")
display(explorer)
print("At the start:", explorer.sentence)

# %% [markdown]
# ## Questions
#
# 1. A GPU has 80 GB, and activations take 20. What is the largest model for stage 2, on any number of GPUs?
# 2. Why does the simulation of stage 3 give 14Ψ/N and the paper 16Ψ/N?
# 3. You double the number of GPUs and keep the global batch. What happens to computing, sending and latency per step?
# 4. Hybrid sharding over 8 GPUs of 80 GB: what is the largest model, if 30 GB are needed on top? When does it not help?
# 5. Two plans send the same bytes in a step. Why might one cost half as much?
# 6. Stage 3 divides a trillion parameters among 1,024 GPUs: 14 GB on each. Does the model train on GPUs of 80 GB?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. 2Ψ must stay below 60 GB: 30 billion parameters. Getting all the way there would take infinitely many GPUs.
# 2. The paper keeps a 16-bit copy of the slices. Here, each gather makes it from the masters.
# 3. Computing halves, because each rank has half as many tokens. Sending stays almost the same. Latency doubles. So at
#    some number of GPUs a step stops getting faster.
# 4. 14Ψ/8 = 50 GB: 28.6 billion parameters, on any number of nodes. Larger models must be sharded over more GPUs than
#    a node has. And if all wires are equally fast, the only gain is latency.
# 5. It computes more tokens in a step, so the bytes are paid for less often. Or it sends them over faster wires, or
#    while it computes.
# 6. Not as it is: beside what it holds, a step needs 178 GB, for activations and for units in flight. One block is 16 GB
#    in 16 bits, and so is its gradient. Checkpointing lowers the first; tensor parallelism, which cuts the blocks
#    themselves, lowers both.

# %%
lab.progress()
