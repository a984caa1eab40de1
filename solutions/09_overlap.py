# %% [markdown]
# # 09 · Overlap and prefetch
#
# **The question.** A GPU that waits for the network costs as much per hour as one that computes. If yours stand still for a
# third of every step, a third of the bill buys nothing. There are three remedies: a faster network, which is expensive; a
# different stage, which may change nothing; or a better order of the same calls, which is free. Which one does your run
# need?
#
# After this lesson you can read a timeline, give it a score, write the order of calls that hides communication behind
# computing, and work out how much bandwidth is enough to hide all of it.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import time

import torch
import torch.distributed as dist
from torch.optim import AdamW
from zerolab import DDP, Zero1, Zero2, Zero3, lab
from zerolab.lab import GPT, Block, Processor, Recorded, batch, linked, text
from zerolab.measure import ledger, trace
from zerolab.measure.spans import intersection, length

words = text()
# 8 batches of 256 tokens, different on each rank
batches = [batch(words, rank, step, batch_size=4, context=64) for step in range(8)]


def make_model():
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


def build(stage, units=(Block,)):
    zero = stage(make_model(), units=list(units))
    adam = AdamW(zero.model.parameters(), lr=1e-3)

    def step(number=0):
        loss = zero.model(*batches[number])
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.item()

    return zero, adam, step


print(f"Ψ = {sum(param.numel() for param in make_model().parameters()):,} parameters")

# %% [markdown]
# ## FLOP for every byte
#
# **[Overlap](../docs/glossary.md#overlap)** means that a rank computes while its messages travel. Whether that can work depends on two amounts, and neither
# is a time, so they are the same on every machine: what a step computes, and what it sends.
#
# Computing is counted in **[FLOP](../docs/glossary.md#flop)**, floating-point operations; one multiplication or one addition is one FLOP. In forward, a
# weight is multiplied by something once for every token, and the product is added to a sum: 2 FLOP. Backward does that
# twice, once for the gradient of the layer's input and once for the gradient of the weight: 4 FLOP.
#
# Sending you know: DDP sends 2Ψ(N-1)/N elements in a step (lesson 03), here in float32 on 4 ranks. A rank's batch has 4
# sequences of 64 tokens. For every byte that it sends, how many FLOP does it compute? You may treat every parameter as a
# weight.

# %%
lab.predict("09.1", 6 * 4 * 64 / (4 * 2 * 3 / 4))  # FLOP per byte

# %%
# %%ranks
from torch.utils.flop_counter import FlopCounterMode

model = make_model()
with FlopCounterMode(display=False) as in_forward:
    loss = model(*batches[0])
with FlopCounterMode(display=False) as in_backward:
    loss.backward()
flop = {"forward": in_forward.get_total_flops(), "backward": in_backward.get_total_flops()}


def sent_by(stage):
    zero, _, step = build(stage)
    step()
    with ledger(zero) as book:
        step()  # in stages 1 and 2 the second forward gathers what the first step changed
    by_phase = book.totals("phase")
    return {phase: by_phase[phase].sent if phase in by_phase else 0 for phase in flop}


sent = {stage.__name__: sent_by(stage) for stage in (DDP, Zero1, Zero2, Zero3)}

# %%
flop, sent = lab.pull("flop", rank=0), lab.pull("sent", rank=0)
lab.measured("09.1", round(sum(flop.values()) / sum(sent["DDP"].values()), 1))
lab.reveal("09.1")

# %% [markdown]
# It is about the number of tokens, 256. The 6s cancel: 6 FLOP and 6 bytes for each parameter. It is a little less because
# embeddings are looked up and not multiplied, and biases are only added. (On the CPU the counter of torch 2.13 leaves out how
# queries meet keys inside attention. With sequences this short, that would add at most 8 %.)
#
# So a rank with twice as many tokens can live with half the bandwidth. In bfloat16 there are half as many bytes, and so
# twice as many FLOP for each. The number of parameters does not matter at all.
#
# ## Reading a timeline
#
# `trace` records one step of a rank: **spans**, in which it computed, with a start and an end; the collectives, from
# the moment each was issued to the moment it was complete; and **waits**, in which the rank stood still for one.
#
# On a laptop such a record says little: four ranks take turns at a few cores, and there is no wire between them. So
# from here on both are emulated. `Processor` makes the linear layers take as long as at 6 GFLOP per second: a rank that
# is done sooner sleeps, and leaves its core to the others. `lab.link` delays messages as a network of 60 MB per second
# does. Numbers, bytes and calls stay real. If this machine is too busy even for 6 GFLOP per second on each rank, the
# emulated processor comes *late*. A step of which more than 5 % was late is measured once more, and if it was late
# again, the cell says so: then its times mean nothing.

# %%
# %%ranks
SPEED = 6e9  # FLOP per second


def paced(stage, units=(Block,)):
    """As `build` does, on the emulated processor."""
    zero, adam, step = build(stage, units)
    processor = Processor(zero.model, SPEED)
    step()  # creates the optimizer's state
    return zero, adam, step, processor


def slowest(seconds):  # of all ranks
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(zero, adam, step, processor):
    """A step: seconds until the last rank is done, what part of them it was late, trace."""
    found = []
    for _ in range(2):  # again if it was late
        processor.late.clear()
        dist.barrier()
        begin = time.perf_counter()
        with trace(zero, adam) as record:
            step(0)
        seconds = slowest(time.perf_counter() - begin)
        waited = intersection(processor.late, record.waits)  # for others: that is not late
        late = slowest(length(processor.late) - length(waited)) / seconds
        found.append((seconds, late, record))
        if late < 0.03:
            break
    return min(found, key=lambda one: one[1])


alone, late, _ = timed(*paced(DDP))

# %%
SPEED = lab.pull("SPEED", rank=0)
computing = sum(flop.values()) / SPEED  # seconds


def noise(late):
    return f", too noisy to judge: {late:.0%} of it late" if late > 0.05 else ""


alone, late = lab.pull("alone", rank=0), lab.pull("late", rank=0)
print(f"the FLOP of a step take {1000 * computing:.0f} ms;", end=" ")
print(f"a step without a link took {1000 * alone:.0f} ms{noise(late)}")
lab.link("60 MB/s, 20 us")

# %% [markdown]
# Now a step of ZeRO-3 over this link, as lessons 06 and 07 left it: every unit is gathered when its turn comes. `Recorded`
# is ZeRO-3 without the package's own prefetching.

# %%
# %%ranks


class JustInTime(Recorded):
    ahead = 0


_, _, record = timed(*paced(JustInTime))

# %%
plots.show(plots.gantt(lab.pull("record")))

# %% [markdown]
# Read one rank from left to right. Above is what it computes: light is forward, dark is backward. Below is what
# travels: hatched the gathers, plain the reductions. A black bar means that the rank stands still. In forward the two
# take turns: gather a block, compute it, gather the next. In backward, gradients (the reduce-scatters) travel while the
# rank computes, but it still stands still for every gather.
#
# ## A score from 0 to 1
#
# Pictures cannot be compared over thousands of steps, so turn one into a number: *of the time in which something
# travels, what fraction does the rank spend computing?* 0 means that nothing is hidden, and 1 that everything is.
#
# Write it for two lists of (start, end) pairs. Two collectives may be under way at the same time, and one may begin and end
# while another is under way. Every moment counts once. So merge first: (0, 4) and (2, 6) are 6 seconds, not 8. And a step
# that sends nothing has nothing to hide: 1.

# %%
# %%exercise 09.1

# %%
lab.check("09.1")

# %% [markdown]
# When does a rank compute? During its spans, except for the waits inside them. Score the step that you have just seen.
# `record.overlap` is the package's score. It counts every moment in which the rank does not wait, including those
# between two spans: copying, Python, the loss. So it is higher. (The sentence below the picture counts the package's
# way, and backward's collectives only.)

# %%
# %%ranks
overlap = lab.mine("09.1")


def busy(record):
    pieces = []
    for span in record.spans:
        begin = span.start
        for start, end in record.waits:
            if start < span.end and begin < end:
                pieces.append((begin, min(start, span.end)))
                begin = end
        pieces.append((begin, span.end))
    return [(start, end) for start, end in pieces if start < end]


def score(record):
    return overlap(busy(record), record.under_way)


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
# **[Prefetching](../docs/glossary.md#prefetching)** means starting that gather early. A schedule says which gathers to start when. It has to answer three
# questions:
#
# - *What comes next?* Not the next one in `model.blocks`: a model may run its blocks in any order, skip some, or use one
#   twice, and backward runs the other way round. So record one pass, a forward or a backward, and expect the next pass of
#   the same kind to be like it. `Recorded` does that. `self.coming` lists the units that the previous pass came to after this
#   one, in order. In the first pass it is empty, and also once a pass turns out differently. (`Recorded` then releases
#   whatever was gathered for nothing.)
# - *How many?* Each unit that is gathered ahead needs memory for its full parameters. `self.ahead` is your budget: so many
#   units may be there, or on their way, before the pass comes to them.
# - *When?* A unit has two methods. `unit.start_gather()` returns at once, and does nothing if the unit is there or on its
#   way. `unit.gather()` waits until it is there; if it was started before, nothing is sent twice. And the link works through
#   its messages in the order in which they were started.
#
# Write `pre_forward` and `pre_backward`, which run just before a unit computes.

# %%
# %%exercise 09.2

# %%
lab.check("09.2")

# %% [markdown]
# Before you run it: without prefetching, backward has two blocks in memory at once (lesson 07), the one at work and for a
# moment the one behind it. With `ahead = 2`, how many blocks hold full parameters at the same time in backward, at most? The
# model has four.

# %%
lab.predict("09.2", 4)  # blocks

# %%
# %%ranks
from zerolab.measure.watch import watched

MyPrefetch = lab.mine("09.2")


def one_step(ahead):
    zero, adam, step, processor = paced(MyPrefetch)
    zero.ahead = ahead
    most = {"forward": 0, "backward": 0}

    def look(point, unit):
        phase = point.partition("_")[2]
        if phase in most:
            blocks = [unit for unit in zero.units if unit not in zero.root]
            there = sum(block.full.untyped_storage().size() > 0 for block in blocks)
            most[phase] = max(most[phase], there)

    with ledger(zero) as book, watched(zero, before=lambda *_: None, after=look):
        step(1)
    calls = sorted((of.op, of.phase, of.unit) for of in book.calls if not of.control)
    weights = torch.cat([value.flatten() for value in zero.full_state_dict().values()])
    seconds, late, record = timed(zero, adam, step, processor)
    told = {"sent": book.moved, "most": most, "score": score(record)}
    return told | {"seconds": seconds, "late": late}, calls, weights, record


told, calls, weights, records = zip(*map(one_step, (0, 1, 2)))
same_calls = all(of == calls[0] for of in calls)
same_weights = all(torch.equal(of, weights[0]) for of in weights)
with_prefetch = records[1]

# %%
told = lab.pull("told", rank=0)  # for 0, 1 and 2 units ahead
lab.measured("09.2", told[2]["most"]["backward"])
lab.reveal("09.2")

# %% tags=["nbval-check-output"]
same = all(lab.pull("same_calls")), all(lab.pull("same_weights"))
print("the same calls, and the same weights to the bit:", *same)
if lab.predicted("09.2"):
    for ahead, one in enumerate(told):
        print(f"ahead = {ahead}: {one['sent']:,} bytes sent")
    assert [one["most"]["forward"] for one in told] == [1, 2, 3]
    assert told[0]["most"]["backward"] == 2 <= told[1]["most"]["backward"] <= 3

# %%
if lab.predicted("09.2"):
    for ahead, one in enumerate(told):
        forward, backward = one["most"].values()
        blocks = f"most blocks at once: {forward} in forward, {backward} in backward"
        step = f"{1000 * one['seconds']:.0f} ms a step{noise(one['late'])}"
        print(f"ahead = {ahead}: {blocks}; score {one['score']:.2f}, {step}")
    saved = told[0]["seconds"] - told[1]["seconds"]
    if saved > 0 and not any(noise(one["late"]) for one in told):
        print(f"One unit ahead takes {1000 * saved:.0f} ms off the step.")
    else:
        print("This machine is too busy now to show what a unit ahead takes off the step.")

# %%
plots.show(plots.gantt(lab.pull("with_prefetch")))

# %% [markdown]
# The same collectives, the same bytes, the same bits; only the order of *starting* changed. In forward, the link now works
# while the rank computes, and the step is shorter by most of the gathers, 10 ms each. The price is memory: one more block for
# each unit of the budget. (The package's own `Zero3` stays at two in backward. It starts the next gather only when the block
# behind has been released, which comes a moment later.)
#
# A second unit ahead gains little here, because one gather takes no longer than one block's computing. A larger budget helps
# where units differ in size: a small unit leaves too little time to gather a large one.
#
# Why is the score not 1? The root and block 0, whose gradients backward completes last, have nothing left to hide behind.
# Neither have the first gathers of a step.

# %%
lab.link(None)

# %% [markdown]
# ## How much bandwidth is enough?
#
# What is sent in forward can hide only behind forward: a gather is needed before the block's forward, not later. Gradients
# exist only in backward, so they can hide only there. So ask of each **phase**: how many bytes does it send for each FLOP
# that it computes? The phase with the most decides which bandwidth is enough.
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
# (less the root), and 3 more in forward, beside 2 FLOP: the same ratio. It uses a forward in which DDP's link is idle. In
# stages 1 and 2 the forward decides: it gathers what the step has changed.
#
# So all four have the same **knee**: the lowest bandwidth at which communication hides. If a step computes for C
# seconds, a third of them in forward, that is 3Ψ / (C/3) = 9Ψ/C bytes per second, with 4 ranks in float32. (The link of
# the timelines above had 1.6 times as much.) Below the knee the link decides, and ZeRO-3 is slower, in the end by a
# factor of 1.5, as it sends 1.5 times as much.
#
# Now measure: a step without a link and at five bandwidths, from a quarter of the knee to eight times the knee, at each of
# the four stages. This takes about ten seconds.

# %%
lab.push(knee=need["DDP"] * SPEED)  # bytes for each FLOP x FLOP per second

# %%
# %%ranks
PARTS = (0.25, 0.5, 1, 2, 8)


def sweep(stage):
    built, found = paced(stage), {}
    for part in (None, *PARTS):
        with linked(f"{part * knee / 1e6:.3f} MB/s, 20 us" if part else None):
            found[part] = timed(*built)[:2]
    return found


swept = {stage.__name__: sweep(stage) for stage in (DDP, Zero1, Zero2, Zero3)}

# %%
from zerolab.lab.plots import Phase

swept, knee = lab.pull("swept", rank=0), need["DDP"] * SPEED
times, phases = {}, {}
for stage, found in swept.items():
    times[stage] = {part * knee: seconds for part, (seconds, _) in found.items() if part}
    of_stage = sent[stage]
    phases[stage] = {phase: Phase(flop[phase] / SPEED, of_stage[phase]) for phase in flop}
title = "How much bandwidth is enough to hide communication?"
subtitle = "4 ranks, 256 tokens on each; emulated: links of 20 µs, processors of 6 GFLOP/s"
if lab.predicted("09.3"):
    plots.show(plots.link_sweep(times, phases, title, subtitle))

# %%
if lab.predicted("09.3"):
    print(f"knee: {knee / 1e6:.0f} MB/s = 9Ψ/C for C = {1000 * computing:.0f} ms")
    for stage, found in swept.items():
        slow, fast = found[0.25][0], found[8][0]
        print(f"{stage:5} {1000 * slow:4.0f} ms at a quarter of the knee,", end=" ")
        latest = max(late for _, late in found.values())
        print(f"{1000 * fast:4.0f} ms at eight times the knee{noise(latest)}")
        assert slow > 0.99 * sum(sent[stage].values()) / (0.25 * knee)  # the link's time

# %% [markdown]
# To the right of the knee all four take as long as computing takes, whatever they send. To the left each follows the
# link, and ZeRO-3 is the highest. The dots lie above their lines: the lines hide everything that fits, but the first
# gather of a step and the last reduction have nothing to hide behind, and what is outside the linear layers, which is
# not paced, takes this machine's own time: the difference between the two numbers that were printed above. (On a busy
# machine it is more.) No line was fitted to its dots: it comes from the bytes, the FLOP, and the two speeds.
#
# ## Launched asynchronously, updated asynchronously
#
# "Asynchronous" is used for two things that have little in common. *Launched* asynchronously: a collective is started and
# waited for later, before its result is used. Everything above is of this kind, and as you saw, the weights are the same to
# the bit. *Updated* asynchronously: the optimizer does not wait, and steps with gradients of an earlier step. That is another
# algorithm, which may train more slowly or not at all; lesson 12 measures it. When somebody says that ZeRO is asynchronous,
# ask which one is meant. All three stages launch asynchronously, and all three update synchronously.
#
# ## In production
#
# FSDP2 prefetches too (here in torch 2.13). In backward it does so by itself. In forward it relies on the host: Python issues the next gather
# long before the GPU has finished the block at work. Where the host is not that far ahead, you name the next modules
# yourself, with `set_modules_to_forward_prefetch`. To see it, count how many gathers have been started when each block
# begins to compute. (Our step: the package's `Recorded` with your schedule and `ahead = 1`.)

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab import calls


def gathers_before(model, count):
    """How many gathers were started whenever a block begins to compute, in one step."""
    seen = []

    def look(*_):
        seen.append(count())

    for block in model.blocks:
        block.norm1.register_forward_pre_hook(look)
        block.mlp.down.register_full_backward_pre_hook(look)
    model(*batches[0]).backward()
    return seen


def fsdp2(explicit):
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module)
    if explicit:
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
    model(*batches[0]).backward()
    with calls() as book:
        return gathers_before(model, lambda: sum("allgather" in of.op for of in book.calls))


def ours():
    zero, _, step = build(MyPrefetch)
    step()

    def gathers():
        return sum(call.op == "all_gather" and not call.control for call in book.calls)

    with ledger(zero) as book:
        return gathers_before(zero.model, gathers)


gathers = {"FSDP2": fsdp2(False), "FSDP2, named": fsdp2(True), "yours": ours()}

# %% tags=["nbval-check-output"]
gathers = lab.pull("gathers", rank=0)
print(f"{'':14}forward of blocks 0 1 2 3    backward of blocks 3 2 1 0")
for name, counts in gathers.items():
    forward, backward = (" ".join(map(str, half)) for half in (counts[:4], counts[4:]))
    print(f"{name:14}{'':18}{forward}{'':23}{backward}")

# %% [markdown]
# Block 0 cannot begin before two gathers, the root's and its own. FSDP2 by itself has started just these two. With the next
# modules named it has started a third, block 1's, and so have you. In backward all three are one ahead until the last block.
# The order that you wrote is FSDP2's.
#
# Where you find the same switches: DeepSpeed's `overlap_comm` (reductions beside backward, on a stream of their own), and in
# stage 3 `stage3_prefetch_bucket_size`, which is a budget as yours is, but counted in elements; FSDP2's
# `set_modules_to_backward_prefetch`; in DDP `bucket_cap_mb`, to which we come now.
#
# ## On trial
#
# > "Larger buckets are always faster."
#
# Lesson 05 compared three sizes of unit. Here is what torch's own DDP does with sizes of bucket, in the order in which the
# buckets leave:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel


def buckets(**size):
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True, **size)
    for number in range(3):  # it puts its buckets in order after the first step
        with calls() as book:
            model(*batches[number]).backward()
    storages = {param.grad.untyped_storage()._cdata for param in model.parameters()}
    return [call.payload for call in book.calls], len(storages)


sizes = {f"{size} MB": buckets(bucket_cap_mb=size) for size in (25, 1, 0.25)}
by_cap = {"default": buckets()} | sizes

# %% tags=["nbval-check-output"]
for name, (sizes, storages) in lab.pull("by_cap", rank=0).items():
    many = f"{len(sizes)} bucket{'s' * (len(sizes) > 1)}"
    print(f"{name:>7}: {many:10} the last one has {sizes[-1]:>9,} of {sum(sizes):,} bytes")
    assert storages == len(sizes)  # gradient_as_bucket_view: gradients are views of them

# %% [markdown]
# The last bucket is complete when backward is over, so nothing of it can hide. With one bucket, that is everything. DDP's
# default avoids it: the first bucket has 1 MiB, so that something leaves early, and all others 25 MiB. If you pass
# `bucket_cap_mb=25` yourself, the first has 25 as well (torch 2.13, `_BucketCapacityConfig` in
# [`distributed.py`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py)).
#
# With many buckets little is left for the end, but every bucket costs its latency. To see both, run our DDP with three
# sizes of unit on a link with half the bandwidth of the knee and 1 ms of latency:

# %%
# %%ranks
SIZES = {"one unit": (GPT,), "blocks": (Block,), "linear layers": (torch.nn.Linear,)}


def by_size(units):
    built = paced(DDP, units)
    with linked(f"{knee / 2e6:.3f} MB/s, 1 ms"):
        seconds, late, record = timed(*built)
    return len(built[0].units), seconds, late, score(record)


sizes = {name: by_size(units) for name, units in SIZES.items()}

# %%
found = lab.pull("sizes")
for name, (units, seconds, late, _) in found[0].items():
    mean = sum(rank[name][3] for rank in found) / len(found)
    line = f"{name:14} {units:>2} units, {6 * units:>3} messages: score {mean:.2f}"
    print(f"{line}, {1000 * seconds:3.0f} ms a step{noise(late)}")
assert sum(rank["one unit"][3] for rank in found) / len(found) < 0.2

# %% [markdown]
# **Verdict: false.** One unit has the least latency and hides nothing: its bytes leave when backward is over, so its
# step is the sum of computing and sending. Linear layers can begin to send before a block is through, and pay for it
# with more than a hundred messages, 1 ms each. Here the middle is best (unless your machine was too noisy to tell). And
# a bucket takes memory: what waits to be complete is held in full. `gradient_as_bucket_view=True` at least keeps no
# second copy: the gradients are views of the buckets, as in lesson 02. The best size depends on latency, bandwidth and
# model. Measure it; it takes three runs.
#
# > "overlap_comm hides communication."

# %%
if lab.predicted("09.3"):
    alone, _ = swept["DDP"][None]
    for part in (0.25, 0.5, 1, 2):  # beyond, it sends for too short a time to tell
        seconds, late = swept["DDP"][part]
        transfer = sum(sent["DDP"].values()) / (part * knee)
        hidden = (alone + transfer - seconds) / transfer
        said = f"DDP at {part:4.2f} x the knee: sends for {1000 * transfer:3.0f} ms,"
        if late < 0.05 and 0 <= hidden <= min(1, part):  # no more than computing can hide
            print(f"{said} {hidden:.0%} of it hidden")
        else:
            print(f"{said} too noisy to judge what is hidden")

# %% [markdown]
# **Verdict: true under a condition.** Overlap hides at most what fits behind computing. To the right of the knee that is
# everything but what leaves last: here the root and one block of four, 31 % of the bytes, and far less with a hundred blocks.
# At a quarter of the knee, three quarters cannot be hidden, in any order. The condition is FLOP per byte: *tokens on
# each rank*. In practice, when the score is low, first look at the order of calls (are the gathers started early?), then at
# the batch, and only then at the price of a network.
#
# > "A fast interconnect is a condition for ZeRO."
#
# **Verdict: false.** Stages 1 and 2 send what DDP sends, and have DDP's knee. ZeRO-3 sends 1.5 times as much and has the same
# knee, as measured above. So where DDP hides its communication, all stages can, provided that each unit is gathered around
# its own forward, as here and in FSDP2. Not everyone does that. DeepSpeed's stages 1 and 2 gather all parameters at the end of
# the optimizer's step (0.19.8, `all_gather_dp_groups` in `step` of
# [`stage_1_and_2.py`](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py)), and
# torch's `ZeroRedundancyOptimizer` broadcasts them there (2.13, `_sync_params` in
# [`step`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py)). In the
# step no forward or backward is left to hide them.
#
# What ZeRO frees is memory for a larger batch, and with more tokens the knee moves to slower networks. Below the knee a
# slow network does cost ZeRO-3 more than DDP. There the package's option `mesh=` helps, which gathers within a node
# only (lesson 16).
#
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
# 1. That the rank stands still for 60 % of the time in which something travels. It does not say how long that is: with little
#    communication, a low score costs next to nothing. Nor does it say whom the rank waits for, the link or a slower rank.
# 2. Prefetching in forward: each gather starts when its block is about to compute. Backward has it. In FSDP2, look whether
#    the host runs ahead of the GPU, or name the next modules.
# 3. What it sends beyond DDP, it sends in forward, where DDP sends nothing. In each phase, it sends as many bytes for each
#    FLOP as DDP does in backward.
# 4. DDP hides behind backward: 4 FLOP per parameter and token against 2 · 2 bytes, since (N-1)/N is nearly 1. That is one
#    FLOP per byte and token. The machine computes 8,000 FLOP in the time of one byte, so it needs about 8,000 tokens. (In
#    practice more: neither number is reached in full.)
# 5. The gathers already hid: one unit ahead was enough. Or the link is the limit: to the left of the knee no order helps.
# 6. The first is waited for before its result is used, so the numbers do not change. In the second the optimizer uses
#    gradients of older weights: another algorithm.

# %%
lab.stop()
lab.progress()
