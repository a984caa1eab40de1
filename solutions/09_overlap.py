# %% [markdown]
# # 09 · Overlap and prefetch
#
# **The question.** A GPU that waits for the network costs as much per hour as one that computes. If yours stand still
# for a third of every step, a third of the bill buys nothing. There are four remedies: a faster network, which is
# expensive; a larger batch, if there is memory for it; a different stage, which may change nothing; or a better order
# of the same calls, which costs a little memory. Which one does your run need?

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import torch
from torch.optim import AdamW
from zerolab import DDP, Zero1, Zero2, Zero3, lab
from zerolab.lab import GPT, Block, Recorded, batch, linked, text

words = text()
batches = [batch(words, rank, step, batch_size=4, context=64) for step in range(8)]


def make_model():
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


def build(stage, units=(Block,)):
    zero = stage(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step(number=0):
        zero.model(*batches[number]).backward()
        adam.step()
        adam.zero_grad()

    return zero, adam, step


model = make_model()
psi, block = (sum(map(torch.numel, of.parameters())) for of in (model, model.blocks[0]))
print(f"Ψ = {psi:,} parameters: 4 blocks of {block:,}, and a root of {psi - 4 * block:,}")

# %% [markdown]
# ## FLOP for every byte
#
# **[Overlap](../docs/glossary.md#overlap)** means that a rank computes while its messages travel. Whether that can
# work depends on two amounts, which are the same on every machine: what a step computes, and what it sends.
#
# Computing is counted in **[FLOP](../docs/glossary.md#flop)**, floating-point operations: multiplications and
# additions. In forward, a weight is multiplied by something once for every token, and the product is added to a sum:
# 2 FLOP. Backward does that twice, once for the gradient of the layer's input and once for the gradient of the
# weight: 4 FLOP.
#
# Sending you know: DDP sends 2Ψ(N-1)/N elements in a step (lesson 03), here in float32 on 4 ranks. A rank's batch has 4
# sequences of 64 tokens. For every byte that it sends, how many FLOP does it compute? You may treat every parameter as
# a weight.

# %%
lab.predict("09.1", 6 * 4 * 64 / (4 * 2 * 3 / 4))  # FLOP per byte

# %%
# %%ranks
flop = lab.flop_by_phase(make_model(), batches[0])  # torch's FlopCounterMode
stages = DDP, Zero1, Zero2, Zero3
sent = {stage.__name__: lab.sent_by_phase(*build(stage)) for stage in stages}

# %%
flop, sent = lab.pull("flop", rank=0), lab.pull("sent", rank=0)
lab.measured("09.1", round(sum(flop.values()) / sum(sent["DDP"].values()), 1))
lab.reveal("09.1")

# %% [markdown]
# It is about the number of tokens, 256. The 6s cancel: 6 FLOP and 6 bytes for each parameter. It is a little less
# because embeddings are looked up and not multiplied, and biases are only added. (On the CPU torch's counter leaves out
# queries times keys, 8 % more.)
#
# So a rank with twice as many tokens can live with half the bandwidth. In bfloat16 there are half as many bytes, and so
# twice as many FLOP for each. The number of parameters does not matter at all.
#
# ## Reading a timeline
#
# Below, `timed()` records one step of a rank, with the package's `zerolab.measure.trace`: **spans**, in which it
# computed; the collectives, each from its start to its end; and **waits**, in which the rank stood still for one.
#
# On a laptop four ranks take turns at a few cores, and there is no wire between them. So from here on both are
# emulated. The linear layers take as long as at 6 GFLOP per second: a rank that is done sooner sleeps, and leaves its
# core to the others. `lab.link` delays messages as a network of 60 MB per second does. Numbers, bytes and calls stay
# real. Where this machine is too busy to keep the pace, the cell says so, and its times mean nothing.

# %%
# %%ranks
SPEED = 6e9  # FLOP per second


def paced(stage, units=(Block,)):
    """As `build` does, on the emulated processor."""
    return lab.Paced(*build(stage, units), SPEED)


alone = paced(DDP).timed()

# %%
SPEED, alone = lab.pull("SPEED", rank=0), lab.pull("alone", rank=0)
computing = sum(flop.values()) / SPEED  # seconds
print(f"the FLOP of a step take {1000 * computing:.0f} ms; a step without a link", end=" ")
print(f"{1e3 * alone.seconds:.0f} ms, {1e3 * alone.working:.0f} without waits{alone.noise}")
lab.link("60 MB/s, 20 us")

# %% [markdown]
# Now a step of ZeRO-3 over this link, as lessons 06 and 07 left it: every unit is gathered when its turn comes.
# `Recorded` is ZeRO-3 without the package's own prefetching.


# %%
# %%ranks
class JustInTime(Recorded):
    ahead = 0


record = paced(JustInTime).timed().record

# %%
plots.show(plots.gantt(lab.pull("record")))

# %% [markdown]
# Read one rank from left to right. Above is what it computes: light is forward, dark is backward. Below is what
# travels: hatched the gathers, plain the reductions. A black bar means that the rank stands still. In forward the two
# take turns: gather a block, compute it, gather the next. In backward, gradients (the reduce-scatters) travel while the
# rank computes, but it still waits for every gather.
#
# ## A score from 0 to 1
#
# Turn such a picture into a number: *of the time in which something travels, what fraction does the rank spend
# computing?* 0 means that nothing is hidden, and 1 that everything is.
#
# Write it for two lists of (start, end) pairs. Two collectives may be under way at the same time, and one may begin and
# end while another is under way. Every moment counts once. So merge first: (0, 4) and (2, 6) are 6 seconds, not 8. And
# a step that sends nothing has nothing to hide: 1.

# %%
# %%exercise 09.1

# %%
lab.check("09.1")

# %% [markdown]
# A rank computes during its spans, except for the waits inside them. Score the step that you have just seen.
# `record.overlap` is the package's score. It counts every moment in which the rank does not wait, also copying and
# Python between two spans, so it is higher. (The sentence below the picture counts that way, and backward's collectives
# only.)

# %%
# %%ranks
overlap = lab.mine("09.1")


def score(record):
    return overlap(lab.computing(record), record.under_way)


scores = score(record), record.overlap

# %%
for rank, (ours, packages) in enumerate(lab.pull("scores")):
    if packages is None:
        print(f"rank {rank}: NCCL's collectives end on the GPU: only a profile sees when")
        continue
    print(f"rank {rank}: {ours:.2f}, the package says {packages:.2f}")
    assert 0 <= ours <= packages + 1e-6 <= 1.001

# %% [markdown]
# ## Write the schedule
#
# The rank waited without need: while block 0 computed, the link was idle, and block 1 was known to be next.
# **[Prefetching](../docs/glossary.md#prefetching)** means starting that gather early. A schedule has to answer three
# questions:
#
# - *What comes next?* Not the next one in `model.blocks`: a model may run its blocks in any order, or skip some. So
#   record one pass, a forward or a backward, and expect the next of the same kind to be like it. `Recorded` does that:
#   `self.coming` lists the units that the previous pass came to after this one, in order. It is empty in the first
#   pass, and once a pass turns out differently. (`Recorded` then releases whatever was gathered for nothing.)
# - *How many?* Each unit that is gathered ahead needs memory for its full parameters. `self.ahead` is your budget:
#   the next `self.ahead` units may be there, or on their way.
# - *When?* A unit has two methods. `unit.start_gather()` returns at once, and does nothing if the unit is there or on
#   its way. `unit.gather()` waits until it is there; if it was started before, nothing is sent twice. And the link
#   works through its messages in the order in which they were started.
#
# Write `pre_forward` and `pre_backward`, which run just before a unit computes.

# %%
# %%exercise 09.2

# %%
lab.check("09.2")

# %% [markdown]
# Before you run it: without prefetching, backward has two blocks in memory at once (lesson 07): the one at work and,
# for a moment, the one that backward has just left. With `ahead = 2`, how many blocks hold full parameters at the
# same time in backward, at most? The model has four.

# %%
lab.predict("09.2", 4)  # blocks

# %%
# %%ranks
MyPrefetch = lab.mine("09.2")


def two_steps(ahead):
    one = paced(MyPrefetch)
    one.zero.ahead = ahead
    return one.observed(), one.timed()


seen, timed = zip(*map(two_steps, (0, 1, 2)))
same_calls = all(one.calls == seen[0].calls for one in seen)
same_weights = all(torch.equal(one.weights, seen[0].weights) for one in seen)
told = [(one.sent, one.most, score(step.record), step) for one, step in zip(seen, timed)]

# %%
told = lab.pull("told", rank=0)  # for 0, 1 and 2 units ahead
lab.measured("09.2", told[2][1]["backward"])
lab.reveal("09.2")

# %% tags=["nbval-check-output"]
same = all(lab.pull("same_calls")), all(lab.pull("same_weights"))
print("the same calls, and the same weights to the bit:", *same)
if lab.predicted("09.2"):
    for ahead, (nbytes, *_) in enumerate(told):
        print(f"ahead = {ahead}: {nbytes:,} bytes sent")
    assert [most["forward"] for _, most, *_ in told] == [1, 2, 3]
    assert told[0][1]["backward"] == 2 <= told[1][1]["backward"] <= 3

# %%
if lab.predicted("09.2"):
    for ahead, (_, most, scored, step) in enumerate(told):
        blocks = f"{most['forward']} in forward, {most['backward']} in backward"
        took = f"{1000 * step.seconds:.0f} ms a step{step.noise}"
        print(f"ahead = {ahead}: most blocks at once: {blocks}; score {scored:.2f}, {took}")
    print(lab.taken_off(told[0][3], told[1][3]))

# %%
plots.show(plots.gantt([timed[1].record for timed in lab.pull("timed")]))

# %% [markdown]
# The same collectives, the same bytes, the same bits; only the order of *starting* changed. In forward, the link now
# works while the rank computes, and the step is shorter by most of the blocks' gathers, 10 ms each. The price is one
# more block in memory for each unit of the budget.
#
# A second unit ahead gains little here, because one gather takes no longer than one block's computing. It helps where a
# small unit leaves too little time to gather a large one.
#
# Why is the score not 1? The root and block 0, whose gradients backward completes last, have nothing left to hide
# behind, nor have the first gathers of forward; the first of backward has only the head.

# %%
lab.link(None)

# %% [markdown]
# ## How much bandwidth is enough?
#
# A gather is needed before its block's forward, and gradients exist only in backward. So what a **phase** sends can
# hide only behind what that phase computes: how many bytes does it send for each FLOP? The phase with the most
# decides which bandwidth is enough.
#
# ZeRO-3 sends 1.5 times as much as DDP. If everything is to be hidden, how many times DDP's bandwidth does it need?

# %%
lab.predict("09.3", 1)  # × DDP's bandwidth

# %%
need = {stage: max(sent[stage][phase] / flop[phase] for phase in flop) for stage in sent}
lab.measured("09.3", round(need["Zero3"] / need["DDP"], 3))
lab.reveal("09.3")

# %% tags=["nbval-check-output"]
if lab.predicted("09.3"):
    for stage, of_stage in sent.items():
        before, after = of_stage["forward"], of_stage["backward"]
        print(f"{stage:5} sends {before:>9,} bytes in forward, {after:>9,} in backward")
    twice = flop["backward"] == 2 * flop["forward"]
    print("backward computes twice as much as forward:", twice)
    assert all(abs(of_stage / need["DDP"] - 1) < 0.01 for of_stage in need.values())

# %% [markdown]
# **The same.** DDP sends 6 bytes per parameter, all in backward, beside 4 FLOP per token. ZeRO-3 sends them there too
# (less the root), and 3 more in forward, beside 2 FLOP: the same ratio. In stages 1 and 2 the forward decides: it
# gathers what the step has changed. So ZeRO needs no faster network than DDP to hide its messages, provided that each
# unit is gathered around its own forward, as here and in FSDP2.
#
# All four have the same **knee**: the lowest bandwidth at which communication hides. If a step computes for C seconds,
# a third of them in forward, that is 3Ψ / (C/3) = 9Ψ/C bytes per second, with 4 ranks in float32. Below the knee the
# link decides, and ZeRO-3 is slower, in the end 1.5 times.
#
# Now measure: a step of each stage without a link and at five bandwidths, from a quarter of the knee to eight times it.

# %%
lab.push(knee=need["DDP"] * SPEED)  # bytes for each FLOP x FLOP per second

# %%
# %%ranks
def sweep(stage):
    built, found = paced(stage), {}
    for part in (None, 0.25, 0.5, 1, 2, 8):
        with linked(f"{part * knee / 1e6:.3f} MB/s, 20 us" if part else None):
            found[part] = built.timed()
    return found


swept = {stage.__name__: sweep(stage) for stage in stages}

# %%
swept, knee = lab.pull("swept", rank=0), need["DDP"] * SPEED
if lab.predicted("09.3"):
    plots.show(lab.bandwidth_sweep(swept, sent, flop, SPEED, knee))

# %%
if lab.predicted("09.3"):
    print(f"knee: {knee / 1e6:.0f} MB/s = 9Ψ/C for C = {1000 * computing:.0f} ms")
    for stage, found in swept.items():
        latest = max(found.values(), key=lambda step: step.late)
        slow, fast = found[0.25].seconds, found[8].seconds
        print(f"{stage:5} {1000 * slow:4.0f} ms at a quarter of the knee,", end=" ")
        print(f"{1000 * fast:4.0f} ms at eight times the knee{latest.noise}")
        assert slow > 0.99 * sum(sent[stage].values()) / (0.25 * knee)  # the link's time

# %% [markdown]
# To the right of the knee all four take as long as computing takes, whatever they send. To the left each follows the
# link, and ZeRO-3 is the highest. Stages 1 and 2 are below DDP there: they spread the same bytes over forward and
# backward. The dots lie above their lines (where little is sent, even above the dashed one): the lines hide all that
# fits, even what leaves first and last, and leave out what is not a linear layer. No line was fitted to its dots: it
# comes from the bytes, the FLOP, and the two speeds.
#
# "Asynchronous" means two things. *Launched* asynchronously, a collective is started, and waited for before its result
# is used, like everything above: the weights are the same to the bit. *Updated* asynchronously, the optimizer steps
# with gradients of an earlier step, which is another algorithm (lesson 12). ZeRO is asynchronous only in the first
# sense.
#
# ## In production
#
# FSDP2 prefetches too (here in torch 2.13), in backward by itself. In forward it relies on the host: Python issues the
# next gather long before the GPU has finished the block at work. Where the host is not that far ahead, you name the
# next modules yourself, with `set_modules_to_forward_prefetch`. Count how many gathers have been started when each
# block begins to compute (ours: your schedule with `ahead = 1`):

# %%
# %%ranks
gathers = {"FSDP2": lab.gathers_of_fsdp2(make_model(), batches[0])}
gathers["FSDP2, named"] = lab.gathers_of_fsdp2(make_model(), batches[0], named=True)
gathers["yours"] = lab.gathers_of_ours(*build(MyPrefetch), batches[0])

# %% tags=["nbval-check-output"]
gathers = lab.pull("gathers", rank=0)
print(f"{'':14}forward of blocks 0 1 2 3    backward of blocks 3 2 1 0")
for name, counts in gathers.items():
    forward, backward = (" ".join(map(str, half)) for half in (counts[:4], counts[4:]))
    print(f"{name:14}{'':18}{forward}{'':23}{backward}")

# %% [markdown]
# Block 0 cannot begin before two gathers, the root's and its own, and FSDP2 by itself has started just these. With the
# next modules named it has started a third, block 1's, and so have you. In backward all three are one ahead until the
# last block.
#
# DeepSpeed has the switches `overlap_comm` (reductions beside backward, on a stream of their own), and in stage 3
# `stage3_prefetch_bucket_size`, a budget as yours is, but in elements. Its stages 1 and 2 (0.19.8,
# [`stage_1_and_2.py`](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py))
# and torch's `ZeroRedundancyOptimizer`
# ([2.13](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py)) send
# all parameters in the optimizer's step, where nothing is left to hide them.
#
# ## On trial
#
# > "Larger buckets are always faster."
#
# Small buckets leave early, but every one costs its latency. Our DDP with three sizes of unit, each a bucket, on a link
# with half the bandwidth of the knee and 1 ms of latency (an all-reduce of 4 ranks is 6 messages, lesson 01):

# %%
# %%ranks
sizes = {}
for name, unit in ("one unit", GPT), ("blocks", Block), ("linear layers", torch.nn.Linear):
    built = paced(DDP, (unit,))
    with linked(f"{knee / 2e6:.3f} MB/s, 1 ms"):
        step = built.timed()
    sizes[name] = len(built.zero.units), score(step.record), step

# %%
found = lab.pull("sizes")
for name, (units, _, step) in found[0].items():
    mean = sum(rank[name][1] for rank in found) / len(found)
    line = f"{name:14} {units:>2} units, {6 * units:>3} messages: score {mean:.2f}"
    print(f"{line}, {1000 * step.seconds:3.0f} ms a step{step.noise}")
    assert mean < 0.2 or units > 1

# %% [markdown]
# **Verdict: false.** One unit has the least latency and hides nothing: its bytes leave when backward is over, so its
# step is the sum of computing and sending. Linear layers can begin to send before a block is through, and pay for it
# with more than a hundred messages, 1 ms each. Here the middle is best (unless your machine was too noisy to tell). The
# best size depends on latency, bandwidth and model: measure it.
#
# > "overlap_comm hides communication."
#
# **Verdict: true under a condition.** Overlap hides at most what fits behind computing. To the right of the knee that
# is everything but what leaves last: here the root and one block of four, 31 % of the bytes, and far less with a
# hundred blocks. At a quarter of the knee, three quarters cannot be hidden, in any order. The condition is FLOP per
# byte: *tokens on each rank*, and ZeRO frees memory for more of them. So when the score is low, look first at the order
# of calls, then at the batch, and only then at the price of a network.
#
# ## For another day (4 minutes)
#
# On a fresh kernel, run the cells above first.
#
# **The buckets of torch's DDP**, at several limits of size, in the order in which they leave:

# %%
# %%ranks
by_cap = {"default": lab.buckets_of_ddp(make_model(), batches[:3])}
for size in (25, 1, 0.25):
    by_cap[f"{size} MB"] = lab.buckets_of_ddp(make_model(), batches[:3], bucket_cap_mb=size)

# %% tags=["nbval-check-output"]
for name, sizes in lab.pull("by_cap", rank=0).items():
    many = f"{len(sizes)} bucket{'s' * (len(sizes) > 1)}"
    print(f"{name:>7}: {many:10} the last one has {sizes[-1]:>9,} of {sum(sizes):,} bytes")

# %% [markdown]
# With one bucket, everything leaves last. DDP's default avoids it: the first bucket has 1 MiB, so that something
# leaves early, and all others 25 MiB. If you pass `bucket_cap_mb=25` yourself, the first has 25 as well (torch 2.13,
# [`_BucketCapacityConfig`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py)).
#
# **How much of its sending time did DDP hide in the sweep?** As much as its step is shorter than computing and sending
# one after the other. (Computing is the step without a link, less its waits: without a link, it still sends, through
# this machine's memory.) More than 69 % cannot be, because the root and block 0 leave last.

# %%
if lab.predicted("09.3"):
    working, nbytes = swept["DDP"][None].working, sum(sent["DDP"].values())
    last = (73_984 + 198_272) / 867_072  # the root and block 0 have nothing to hide behind
    for part in (0.25, 0.5, 1, 2):  # beyond, it sends for too short a time to tell
        step, transfer = swept["DDP"][part], nbytes / (part * knee)
        hidden = (working + transfer - step.seconds) / transfer
        said = f"DDP at {part:4.2f} x the knee: sends for {1000 * transfer:3.0f} ms,"
        if not step.noise and 0 <= hidden <= min(1 - last, part):  # no more can be
            print(f"{said} {hidden:.0%} of it hidden")
        else:
            print(f"{said} too noisy to judge what is hidden")

# %% [markdown]
# ## Questions
#
# 1. What does an overlap score of 0.4 tell you, and what does it not tell you?
# 2. Your profile shows a gap before every block's forward and none in backward. What is missing?
# 3. Why does ZeRO-3 not need a faster network than DDP in order to hide its communication?
# 4. A GPU computes 400 TFLOP per second and its link carries 50 GB per second. How many tokens per GPU does bfloat16
#    training with DDP need on many ranks?
# 5. You double the prefetch budget, and the step is as long as before. Name two possible reasons.
# 6. What is the difference between an asynchronous all-reduce and asynchronous SGD?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. That in 60 % of the time in which something travels the rank does not compute: mostly it stands still. It does
#    not say how long that is: with little communication, a low score costs next to nothing. Nor does it say whom the
#    rank waits for, the link or a slower rank.
# 2. Prefetching in forward: each gather starts when its block is about to compute. Backward has it. In FSDP2, look
#    whether the host runs ahead of the GPU, or name the next modules.
# 3. What it sends beyond DDP, it sends in forward, where DDP sends nothing. In each phase, it sends as many bytes for
#    each FLOP as DDP does in backward.
# 4. DDP hides behind backward: 4 FLOP per parameter and token against 2 · 2 bytes, since (N-1)/N is nearly 1. That is
#    one FLOP per byte and token. The machine computes 8,000 FLOP in the time of one byte, so it needs about 8,000
#    tokens. (In practice more: neither number is reached in full.)
# 5. The gathers already hid: one unit ahead was enough. Or the link is the limit: to the left of the knee it is never
#    idle, and a larger budget gives it nothing more to do.
# 6. The first is waited for before its result is used, so the numbers do not change. In the second the optimizer uses
#    gradients of older weights: another algorithm.

# %%
lab.stop()
lab.progress()
