# %% [markdown]
# # 19 · Claims on trial, and the interview
#
# **The question.** You read: "Optimizer states are fetched from the other ranks when they are needed." It stands in a
# well-written article, with a diagram. Is it true? If you believe it and it is false, you plan for traffic that does
# not exist. If you say it in an interview, the next question ends the interview. How do you find out, in ten minutes,
# on your laptop?
#
# Most lessons have put claims on trial. This one tries the last four, and teaches the method: look at what is in
# the messages, turn a sentence into something that a run can contradict, and only then give a verdict. At the end are
# all 24 claims, and for another day what to read and how to use the fifty interview questions.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% [markdown]
# ## Open the envelopes
#
# The ledger says how many bytes a rank sent and by which collective, and not *what* they were. A sceptic will object:
# "You count an all-gather of 4Ψ bytes and call it parameters. Why not optimizer state?" There is only one answer: open
# the envelope, and compare the numbers in it with the numbers that a rank has.
#
# What could be in it? `lab.states_in_plain_torch` makes the same steps without any engine, each rank alone, with the
# batches of all. It gives all states of the last step: parameters and Adam's two averages, before and after, and this
# rank's gradient.
#
# First say what you believe: `"true"`, `"false"`, or `"condition"` for true under a condition. The claims are about
# ZeRO's stages 1 to 3, as articles have them. "Optimizer states are fetched from the other ranks." (19.1 comes below.)

# %%
lab.predict("19.2", "false")

# %%
# %%ranks
import torch
import torch.distributed as dist
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, batch, envelopes, laid_out, text
from zerolab.measure import ledger

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


def inputs(of_rank, step):
    return batch(words, of_rank, step, 2, 32)


states = lab.states_in_plain_torch(make_model, inputs, steps=2)
print(", ".join(states))

# %% [markdown]
# `envelopes(zero)` copies what this rank gives to each collective: in a reduce-scatter the whole flat unit, in an
# all-gather this rank's shard. Units are padded; `laid_out(unit, tensors)` lays the states out in the same way. Which
# state is a message? Write `carries`. And think of what may happen on the way: with bfloat16 a float32 state is rounded
# before it travels.

# %%
# %%exercise 19.1

# %%
lab.check("19.1")

# %% [markdown]
# Now open every message of the second step, in all four stages. (Stages 1 and 2 gather the new parameters of the first
# step when the second one begins. So each step has one gather.)

# %%
# %%ranks
carries = lab.mine("19.1")


def opened(stage):
    zero = zerolab.STAGES[stage](make_model(), units=[Block])
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    for step in range(2):
        adam.zero_grad()
        with envelopes(zero) as sent, ledger(zero) as book:
            zero.model(*inputs(rank, step)).backward()
            adam.step()
    units, found = {unit.name: unit for unit in zero.units}, []
    for message in sent:
        flat = {name: laid_out(units[message.unit], of) for name, of in states.items()}
        names = list(carries(message.payload, flat, rank, world_size))
        found.append((message.what, message.unit, names, message.sent))
    return found, book.moved, zero


messages = {stage: opened(stage)[:2] for stage in range(4)}

# %%
if lab.predicted("19.2"):
    print("stage 1, rank 0")
    for what, unit, names, sent in lab.pull("messages", rank=0)[1][0]:
        known = ", ".join(names) or "unknown"
        print(f"  {what:14} of {unit:9} {sent:8,} bytes: {known}")

# %% tags=["nbval-check-output"]
bytes_of = {}
for stage, (found, moved) in lab.pull("messages", rank=0).items():
    of = lab.by_kind((names, sent) for _, _, names, sent in found)
    assert sum(of.values()) == moved  # not a byte in the ledger that was not opened
    bytes_of[stage] = of
    if lab.predicted("19.2"):
        known = f"parameters {of['parameters']:>9,}, gradients {of['gradients']:>9,}"
        rest = f"optimizer state {of['optimizer']} bytes, unknown {of['unknown']}"
        print(f"stage {stage}: {known}, {rest}")

# %%
if lab.predicted("19.2"):
    plots.show(lab.in_the_messages(bytes_of))

# %% [markdown]
# In DDP everything is gradients. (One envelope for each unit: the all-reduce is given a gradient and brings back the
# mean.) In ZeRO-1 and ZeRO-2 half of the bytes are parameters. In ZeRO-3 it would be two thirds, but the root is
# gathered only once a step: 63 %.
#
# A test that cannot fail proves nothing. So commit the crime: gather one of Adam's averages, as the article says, and
# see whether `carries` notices.

# %%
# %%ranks
_, _, zero = opened(1)
unit = zero.units[1]
average = laid_out(unit, states["new average"])
with envelopes(zero) as sent:
    mine = unit.layout.shard(average, rank)
    zero.comm.all_gather(torch.empty_like(average), mine, unit.name).wait()
flat = {name: laid_out(unit, of) for name, of in states.items()}
caught = list(carries(sent[0].payload, flat, rank, world_size))

# %% tags=["nbval-check-output"]
print("the culprit sends:", lab.pull("caught"))
assert all(names == ["new average"] for names in lab.pull("caught"))

# %% [markdown]
# ## A claim is a sentence about runs
#
# "ZeRO reduces communication" has no number and no condition. To try it, make it a function of a run that says yes or
# no:
#
#     lambda run, ddp: run.sent < ddp.sent
#
# Then ask it of many runs. One counterexample, and the sentence is not true as it stands. If no run makes it true, it
# is false. In between, it is true under a condition, and the runs for which it holds *are* the condition. Two traps: a
# run must be compared with DDP on as many ranks and in the same dtype, or you measure bfloat16 and call it ZeRO. And
# a claim that nothing could have contradicted has not been tried.
#
# Predict how this one ends: "Trading communication for memory is ZeRO's essence."

# %%
lab.predict("19.1", "condition")  # true, false or condition

# %%
# %%exercise 19.2

# %%
lab.check("19.2")

# %% [markdown]
# `lab.evidence(stage, dtype, group)` trains two steps and writes down what was held, what was sent, and a fingerprint
# of all parameters afterwards, `digits`. Sixteen runs: four stages, two dtypes, two and four ranks.

# %%
# %%ranks
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
runs = [
    lab.evidence(stage, dtype, group)
    for group in (pair, None)
    for dtype in (torch.float32, torch.bfloat16)
    for stage in range(4)
]

# %%
runs = lab.pull("runs", rank=0)
if lab.predicted("19.1"):
    for run in runs:
        which = f"{run.ranks} ranks, {run.dtype:8}, stage {run.stage}"
        print(f"{which}: holds {run.held:9,}, sends {run.sent:9,}, {run.digits}")

# %% tags=["nbval-check-output"]
verdict = lab.mine("19.2")

CLAIMS = {
    "less held": lambda run, ddp: run.held < ddp.held,
    "less sent": lambda run, ddp: run.sent < ddp.sent,
    "more sent and less held": lambda run, ddp: run.sent > ddp.sent and run.held < ddp.held,
    "other parameters than DDP": lambda run, ddp: run.digits != ddp.digits,
    "16Ψ/N, and a thousandth": lambda run, _: (
        run.held <= 1.001 * 16 * run.parameters / run.ranks
    ),
    "half of DDP's memory": lambda run, ddp: run.held <= 0.501 * ddp.held,
}
if lab.predicted("19.1"):
    for name, claim in CLAIMS.items():
        word, where = verdict(claim, runs)
        stages = sorted({run.stage for run in where})
        print(f"{name}: {word}, stages {stages}, in {len(where)} of 12 runs")

# %% [markdown]
# (The thousandth is for padding and Adam's step counters.) Look at the last row, and in the list above it at stage 1:
# it halves the memory in bfloat16 on four ranks, and in none of its other three runs. Without the number of ranks and
# the dtype, "ZeRO-1 halves the memory" is an unfinished sentence.
#
# ## Shared memory?
#
# Predict: "The ranks share memory between nodes."

# %%
lab.predict("19.3", "false")

# %% [markdown]
# Ranks are processes. Rank 0 writes into a list and into a tensor; who sees it?

# %%
# %%ranks
import os

notes, weights = [], torch.zeros(1)
if rank == 0:
    notes.append("from rank 0")
    weights += 42
dist.barrier()
seen = (os.getpid(), len(notes), weights.item())

# %% tags=["nbval-check-output"]
pids, notes, values = zip(*lab.pull("seen"))
if lab.predicted("19.3"):
    print(f"{len(pids)} ranks, {len(set(pids))} processes; notes that each has:", end=" ")
    print(f"{list(notes)}, weights: {list(values)}")

# %% [markdown]
# Two processes can share memory if they ask the operating system for it: both map the same file.

# %%
# %%ranks
there = lab.through_one_file(42)  # all map one file, and rank 0 writes 42 into it

# %% tags=["nbval-check-output"]
if lab.predicted("19.3"):
    print("through one file on one machine, each rank sees:", lab.pull("there"))

# %% [markdown]
# This works because one operating system's memory holds the file. Another node has another. So between nodes on a
# network there are only messages. (Within a node NCCL uses shared memory where its GPUs have no better way, to carry
# messages; parameters and states are not kept in it.)
#
# ## In production
#
# Optimizer state doesn't travel in a step of FSDP2 either (torch's, in the version installed here). Count what it
# sends, and when:

# %%
# %%ranks
theirs = lab.sent_by_fsdp2(make_model(), inputs(rank, 0))

# %% tags=["nbval-check-output"]
computing, updating = lab.pull("theirs", rank=0)
if lab.predicted("19.2"):
    print(f"FSDP2 sends {computing:,.0f} bytes in forward and backward,", end=" ")
    print(f"{updating:,.0f} in the optimizer's step")
    print(f"Zero3, opened above: {sum(bytes_of[3].values()):,} in a step")

# %% [markdown]
# The optimizer's step sends nothing: state, gradient shard and master shard lie on the same rank. (Clipping adds one
# number.) Optimizer state does travel when a checkpoint is put together from all ranks, and when one is loaded on
# another number of ranks (lesson 11); neither is part of a step. With offload it lies on the rank's own host, and is
# updated there: gradients go down and parameters come back (lesson 10).
#
# ## On trial
#
# > "Trading communication for memory is ZeRO's essence."

# %%
word, _ = verdict(CLAIMS["more sent and less held"], runs)
lab.measured("19.1", "condition" if "condition" in word else word)
lab.reveal("19.1")

# %% [markdown]
# **Verdict: true under a condition, stage 3.** Stages 1 and 2 hold less and send exactly what DDP sends. What all three
# have in common, and what the paper is named after, is that they do away with copies: *zero redundancy*.
#
# > "Optimizer states are fetched from the other ranks."

# %%
travels = any(of["optimizer"] for of in bytes_of.values())
lab.measured("19.2", "true" if travels else "false")
lab.reveal("19.2")

# %% [markdown]
# **Verdict: false.** Of all bytes in the ledger, in every stage, 0 are optimizer state. Each rank updates the elements
# whose state it has. That is the idea of ZeRO-1: the state stays, and the result of using it travels.
#
# > "The ranks share memory between nodes."

# %%
alone = notes == (1, 0, 0, 0) and values == (42, 0, 0, 0) and len(set(pids)) == 4
lab.measured("19.3", "false" if alone else "true")
lab.reveal("19.3")

# %% [markdown]
# **Verdict: false.** Ranks are processes, each with memory of its own. Two on one node can share some if both ask for
# it; two on different nodes of a network cannot. What a node knows of another came in a message, and the ledger has it.
#
# > "ZeRO-2.0 improves on ZeRO, and ZeRO-3.0 on that. Install it from the repository, or with this wheel."
#
# Here a source decides. The paper (arXiv 1910.02054, section 5) names three parts, P_os, P_os+g and P_os+g+p;
# DeepSpeed's configuration calls them `"stage": 1`, 2 and 3. They are three stages, and no versions: none is newer than
# another, and each is the right one somewhere (lesson 16). ("ZeRO-2", as people say and this course does, is stage 2.)
# What came later has names of its own: DeepSpeed's [list of
# publications](https://github.com/deepspeedai/DeepSpeed#publications), 36 of them up to 2025, has ZeRO-Offload,
# ZeRO-Infinity and ZeRO++, and neither a ZeRO-2.0 nor a ZeRO-3.0. **Verdict: false.**
#
# A package name that was made up, by an author or by a language model, is free, and anyone may register it. Then `pip
# install` runs a stranger's code with your rights, on a machine with your keys. **Never install what an article names
# before you have looked it up**: on the project's own page, with its repository, its age and its authors. In torch you
# can look without installing anything:

# %% tags=["nbval-check-output"]
for name in (
    "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.distributed.fsdp.fully_shard",
    "torch.optim.ZeRO",
    "torch.distributed.zero.ZeRO2",
    "torch.nn.parallel.ZeroDataParallel",
):
    print(f"{'there    ' if lab.torch_has(name) else 'NOT there'}  {name}")

# %% [markdown]
# (The last three were made up for this lesson.)
#
# And three that earlier lessons have tried. Do you remember? "Asynchronous updates remove the cost of synchronisation."
# (19.4, from lesson 12.) "Model parallelism suits little data." (19.5, from lesson 15.) "ZeRO trains faster." (19.6,
# from lesson 13.)

# %%
lab.predict("19.4", "condition")

# %%
lab.predict("19.5", "condition")

# %%
lab.predict("19.6", "condition")

# %%
for id, key in (("19.4", "13"), ("19.5", "P"), ("19.6", "D")):
    found = lab.claim(key).verdict
    lab.measured(id, "condition" if "condition" in found else found)
    lab.reveal(id)

# %% [markdown]
# ## All claims
#
# What decided each of the 24, and the lesson that measured it. Read the three rows that surprise you most, and leave
# the rest for another day. What stands in quotes can be read in the lesson. (As a page, with links:
# [claims](../docs/claims.md). Those that say much the same are in one row.)

# %% tags=["nbval-check-output"]
if all(lab.predicted(f"19.{number}") for number in range(1, 7)):
    lab.claims()
else:
    print("the list appears here once you have predicted, or skipped, 19.1 to 19.6")

# %% [markdown]
# Not one of them is true as it stands. Many mix up two things that this course keeps apart: what is held and what is
# sent; splitting data and splitting parameters; launching asynchronously and updating asynchronously; a formula and the
# dtype that it is for.
#
# ## For another day
#
# About 25 minutes, most of them for three sections of one paper, and questions for as many evenings as you like.
#
# ### What to read
#
# Reading lists copy each other's mistakes. In this one, the numbers were looked up one by one.
#
# | paper | what it claims | lesson |
# |---|---|---|
# | Rajbhandari, Rasley, Ruwase, He (2019), *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, [1910.02054](https://arxiv.org/abs/1910.02054) | the three stages, their bytes and traffic; ZeRO-R for the rest | 04 to 07, 10, 16 |
# | Ren and others (2021), *ZeRO-Offload: Democratizing Billion-Scale Model Training*, [2101.06840](https://arxiv.org/abs/2101.06840) | optimizer state and update on the host | 10 |
# | Rajbhandari, Ruwase, Rasley, Smith, He (2021), *ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning*, [2104.07857](https://arxiv.org/abs/2104.07857) | offload to the host and to NVMe in stage 3 | 10, the host only |
# | Wang and others (2023), *ZeRO++: Extremely Efficient Collective Communication for Giant Model Training*, [2306.10209](https://arxiv.org/abs/2306.10209) | quantised and hierarchical gathers, quantised gradients | 12 |
# | Li and others (2020), *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, [2006.15704](https://arxiv.org/abs/2006.15704) | DDP: buckets, overlap | 03, 09 |
# | Zhao and others (2023), *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, [2304.11277](https://arxiv.org/abs/2304.11277) | FSDP1's design; FSDP2 differs, read its source | 06, 07 |
# | Micikevicius and others (2017), *Mixed Precision Training*, [1710.03740](https://arxiv.org/abs/1710.03740) | float32 masters, loss scaling | 08 |
# | Chen, Xu, Zhang, Guestrin (2016), *Training Deep Nets with Sublinear Memory Cost*, [1604.06174](https://arxiv.org/abs/1604.06174) | checkpointed activations | 10 |
# | Korthikanti and others (2022), *Reducing Activation Recomputation in Large Transformer Models*, [2205.05198](https://arxiv.org/abs/2205.05198) | bytes of activations, sequence parallelism | 10, 15, 25 |
# | Shoeybi and others (2019), *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*, [1909.08053](https://arxiv.org/abs/1909.08053) | tensor parallelism | 15 |
# | Huang and others (2018), *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, [1811.06965](https://arxiv.org/abs/1811.06965) | pipelines and micro-batches | 15 |
# | Goyal and others (2017), *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, [1706.02677](https://arxiv.org/abs/1706.02677) | linear scaling of the rate, warm-up | 13 |
# | Vogels, Karimireddy, Jaggi (2019), *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization*, [1905.13727](https://arxiv.org/abs/1905.13727) | low-rank gradients, with error feedback | 12 |
#
# Begin with sections 3, 5 and 7 of the first: where the memory goes, the three stages, and what they send. You have
# measured what they derive, at a small size: 16 bytes a parameter and what is left of them in each stage, 2Ψ of traffic
# in stages 1 and 2, 3Ψ in stage 3.
#
# ### Fifty questions
#
# [Fifty interview questions](../docs/questions.md) have a page, with short answers that cite a number and the lesson
# where it was measured; below them is an index of the questions that end the lessons. [The
# formulas](../docs/formulas.md) are one sheet to print, and the [glossary](../docs/glossary.md) has the terms in
# English and Chinese. Ask each other like this:
#
# 1. One reads a question. The other answers in two minutes, aloud, and *names a measurement*: "stage 2 sends what DDP
#    sends; I opened the messages, half of the bytes are parameters."
# 2. The first asks "How do you know?" or "When is that not true?" Those are the questions that interviews are about.
# 3. Only then both read the answer.
#
# Claims are one thing to try, and engines another: [An engine on trial](../docs/trial.md) has over a hundred promises,
# and tries them on zerolab, PyTorch, accelerate and DeepSpeed.
#
# The lessons after this one go on where ZeRO ends. Outside the course: with two GPUs, make [your first
# run](../docs/first-gpu-run.md). With a claim that is not on the list, write a function of a run, try it, and [add a
# lesson](../CONTRIBUTING.md#add-a-lesson).
#
# ## Questions
#
# 1. An article says that ZeRO-1 "gathers the optimizer state before each step". How do you disprove it on a laptop?
# 2. Why is the byte count of a collective no proof of what it carries?
# 3. What is the condition in "ZeRO trades communication for memory"?
# 4. All runs of a benchmark support a claim. Name two reasons why it may still not have been tried.
# 5. When does optimizer state travel, if not in a step?
# 6. An article has a listing, printed losses and a `pip install` line. In which order do you check what?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Train two steps in plain PyTorch and keep Adam's averages. Train them with the engine, and compare with what is
#    given to each collective. The messages opened must be all bytes in the ledger, and a culprit must be caught.
# 2. Parameters, gradients and each of Adam's averages have the same number of elements, in float32 the same number of
#    bytes.
# 3. Stage 3: it sends up to 1.5 times what DDP sends. Stages 1 and 2 save memory and send the same.
# 4. Nothing in them could have contradicted it (all on one rank; no run without the thing claimed). Or they were
#    compared with something that differs in more than the claim: another dtype, batch or number of ranks.
# 5. In a checkpoint that is put together, or loaded on another number of ranks. With offload it stays on the host.
# 6. First the names, before anything is installed: does the library's own documentation have them? Then the losses:
#    could this program print them? Then run what is left, without the package, and count.

# %%
lab.stop()
lab.progress()
