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
from zerolab.lab import GPT, Block, Recorded, batch, linked, text
from zerolab.measure import ledger, trace

words = text()
batches = [batch(words, rank, step, batch_size=4, context=64) for step in range(8)]  # 256 tokens on each rank


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
    return {phase: sum(c.sent for c in book.calls if c.phase == phase and not c.control) for phase in flop}


sent = {stage.__name__: sent_by(stage) for stage in (DDP, Zero1, Zero2, Zero3)}

# %%
flop, sent = lab.pull("flop", rank=0), lab.pull("sent", rank=0)
lab.measured("09.1", round(sum(flop.values()) / sum(sent["DDP"].values()), 1))
lab.reveal("09.1")

# %% [markdown]
# It is about the number of tokens, 256. The 6s cancel: 6 FLOP and 6 bytes for each parameter. It is a little less because
# embeddings are looked up and not multiplied, and biases are only added. (torch's counter leaves out how queries meet keys
# inside attention. With sequences this short, that would add at most 8 %.)
#
# So a rank with twice as many tokens can live with half the bandwidth. In bfloat16 there are half as many bytes, and so
# twice as many FLOP for each. The number of parameters does not matter at all.
#
# ## Reading a timeline
#
# `trace` records one step of a rank: **spans**, in which it computed, with a start and an end; the collectives, from
# the moment each was issued to the moment it was complete; and **waits**, in which the rank stood still for one. To see
# anything on a laptop we need a network that is slow enough. So first we time a step without any link to wait for. Then
# we emulate a link that carries 36 bytes for every parameter in that time. (Why 36? You will be able to say so later.)

# %%
# %%ranks


def slowest(seconds):  # of all ranks
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def timed(zero, adam, step, times=2):
    """The fastest of some steps, each timed until the last rank is done; and its trace."""
    found = []
    for number in range(times):
        dist.barrier()
        begin = time.perf_counter()
        with trace(zero, adam) as record:
            step(number)
        found.append((slowest(time.perf_counter() - begin), record))
    return min(found, key=lambda pair: pair[0])


built = build(DDP)
built[2]()  # creates the optimizer's state
alone, _ = timed(*built, times=8)

# %%
alone = lab.pull("alone", rank=0)
speed = 36 * 867_072 / alone
print(f"a step without a link takes {1000 * alone:.0f} ms here")
lab.link(f"{speed / 1e6:.0f} MB/s, 20 us")

# %% [markdown]
# Now a step of ZeRO-3 over this link, as lessons 06 and 07 left it: every unit is gathered when its turn comes. `Recorded`
# is ZeRO-3 without the package's own prefetching.

# %%
# %%ranks


class JustInTime(Recorded):
    ahead = 0


built = build(JustInTime)
built[2]()
seconds, record = timed(*built, times=4)

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
# Pictures cannot be compared over thousands of steps, so turn one into a number: *of the time in which something travels,
# what fraction does the rank spend computing?* 0 means that it stands still for everything, and 1 that it never waits.
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
# `record.overlap` is the package's score. It counts every moment in which the rank does not wait, including those between
# two spans: copying, Python, another rank's turn at the core. So it is higher.

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
        print(f"rank {rank}: NCCL's collectives end on the GPU, where only a profile sees them")
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
    zero, adam, step = build(MyPrefetch)
    zero.ahead = ahead
    step(0)
    step(1)
    with ledger(zero) as book:
        step(2)
    calls = sorted((c.op, c.phase, c.unit) for c in book.calls if not c.control)
    most = {"forward": 0, "backward": 0}

    def look(point, unit):
        phase = point.partition("_")[2]
        if phase in most:
            blocks = [u for u in zero.units if u not in zero.root and u.full.untyped_storage().size()]
            most[phase] = max(most[phase], len(blocks))

    with watched(zero, before=lambda *_: None, after=look):
        step(3)
    seconds, record = timed(zero, adam, step, times=3)
    values = list(zero.full_state_dict().values())
    return {"calls": calls, "sent": book.moved, "most": most, "record": record, "values": values, "seconds": seconds}


runs = {ahead: one_step(ahead) for ahead in (0, 1, 2)}
most = {ahead: run["most"] for ahead, run in runs.items()}
sent_ahead = {ahead: run["sent"] for ahead, run in runs.items()}
scores = {ahead: score(run["record"]) for ahead, run in runs.items()}
seconds = {ahead: run["seconds"] for ahead, run in runs.items()}
with_prefetch = runs[1]["record"]
same_calls = all(run["calls"] == runs[0]["calls"] for run in runs.values())
same_values = all(all(map(torch.equal, run["values"], runs[0]["values"])) for run in runs.values())

# %%
most, everyone = lab.pull("most", rank=0), lab.pull("scores")
lab.measured("09.2", most[2]["backward"])
lab.reveal("09.2")

# %% tags=["nbval-check-output"]
print("the same calls, and the same weights to the bit:", all(lab.pull("same_calls")), all(lab.pull("same_values")))
if lab.predicted("09.2"):
    for ahead, bytes_sent in lab.pull("sent_ahead", rank=0).items():
        print(f"ahead = {ahead}: {bytes_sent:,} bytes sent")
    assert most[2]["forward"] == 3 and most[0]["backward"] == 2 <= most[1]["backward"] <= 3

# %%
if lab.predicted("09.2"):
    for ahead, seconds in lab.pull("seconds", rank=0).items():
        mean = sum(scores[ahead] for scores in everyone) / len(everyone)
        blocks = f"{most[ahead]['forward']} in forward, {most[ahead]['backward']} in backward"
        print(f"ahead = {ahead}: score {mean:.2f}, {1000 * seconds:.0f} ms a step; blocks at most: {blocks}")

# %%
plots.show(plots.gantt(lab.pull("with_prefetch")))

# %% [markdown]
# The same collectives, the same bytes, the same bits; only the order of *starting* changed. In forward, the link now works
# while the rank computes. The price is memory: one more block for each unit of the budget. (The package's own `Zero3` stays
# at two in backward. It starts the next gather only when the block behind has been released, which comes a moment later.)
#
# A second unit ahead gains little here, because one gather takes no longer than one block's computing. A larger budget helps
# where units differ in size: a small unit leaves too little time to gather a large one.
#
# Why is the score not 1? The root, which backward reduces last, has nothing left to hide behind. Neither has the first
# gather of a step. And on this machine four ranks share the cores, so a rank also waits for others that are behind.

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
    for stage, phases in sent.items():
        print(f"{stage:5} sends {phases['forward']:>9,} bytes in forward, {phases['backward']:>9,} in backward")
    print("backward computes twice as much as forward:", flop["backward"] == 2 * flop["forward"])
    assert all(abs(bytes_per_flop / need["DDP"] - 1) < 0.01 for bytes_per_flop in need.values())

# %% [markdown]
# **The same.** DDP sends 6 bytes per parameter, all in backward, beside 4 FLOP per token. ZeRO-3 sends them there too
# (less the root), and 3 more in forward, beside 2 FLOP: the same ratio. It uses a forward in which DDP's link is idle. In
# stages 1 and 2 the forward decides: it gathers what the step has changed.
#
# So all four have the same **knee**: the lowest bandwidth at which communication hides. If a step computes for C seconds, a
# third of them in forward, that is 3Ψ / (C/3) = 9Ψ/C bytes per second, with 4 ranks in float32. (The link of the timelines
# above had four times as much.) Below the knee the link decides, and ZeRO-3 is slower, in the end by the 1.5 times that it
# sends.
#
# Now measure: a step at five bandwidths, from a quarter of the knee to eight times the knee, at each of the four
# stages.

# %%
# %%ranks
PARTS = (0.25, 0.5, 1, 2, 8)


def sweep(stage, speed):
    zero, adam, step = build(stage)
    step(0)
    step(1)
    found = {}
    for part in PARTS:
        with linked(f"{part * speed / 1e6:.3f} MB/s, 20 us"):
            seconds, record = timed(zero, adam, step, times=2 if part < 1 else 3)
        found[part * speed] = (seconds, score(record))
    return found


knee = 9 * 867_072 / alone
swept = {stage.__name__: sweep(stage, knee) for stage in (DDP, Zero1, Zero2, Zero3)}

# %%
from zerolab.lab.plots import Phase

swept = lab.pull("swept")
times = {stage: {speed: seconds for speed, (seconds, _) in found.items()} for stage, found in swept[0].items()}
share = {"forward": alone / 3, "backward": 2 * alone / 3}  # of the FLOP, and so of the time
phases = {stage: {phase: Phase(share[phase], sent[stage][phase]) for phase in share} for stage in sent}
title = "How much bandwidth is enough to hide communication?"
if lab.predicted("09.3"):
    plots.show(plots.link_sweep(times, phases, title, "4 ranks, 256 tokens on each; emulated links of 20 µs"))

# %%
slow, *_, fast = sorted(times["DDP"])
if lab.predicted("09.3"):
    print(f"knee: {plots.knee(phases['DDP']) / 1e6:.0f} MB/s = 9Ψ/C for C = {1000 * alone:.0f} ms")
    for stage, of_stage in times.items():
        scores = [sum(rank[stage][speed][1] for rank in swept) / 4 for speed in (slow, fast)]
        line = f"{stage:5} {1000 * of_stage[slow]:4.0f} ms and score {scores[0]:.2f} at a quarter of the knee"
        print(f"{line}, {1000 * of_stage[fast]:4.0f} ms at eight times the knee")
    for stage, of_stage in times.items():
        assert of_stage[slow] > 0.99 * sum(sent[stage].values()) / slow  # nothing is faster than the link
    assert times["Zero3"][slow] > times["DDP"][fast]

# %% [markdown]
# To the right of the knee the lines of all four meet, whatever they send. To the left each follows the link, and ZeRO-3 is
# the highest. Most dots lie above their lines, more so on a busy machine: four ranks share its cores, and every
# collective takes some of their time. ZeRO-3, which issues the most, pays the most. (DDP pays a little too: each unit's
# all-reduce is two collectives, one after the other.) No line was fitted to its dots: it comes from the bytes, from the
# FLOP, and from one step that was timed without a link.
#
# ## Launched asynchronously, updated asynchronously
#
# "Asynchronous" is used for two things that have little in common. *Launched* asynchronously: a collective is started and
# waited for later, before its result is used. Everything above is of this kind. *Updated* asynchronously: the optimizer does
# not wait, and steps with gradients of an earlier step. Train 8 steps with DDP in three ways: waiting for each reduction at
# once, overlapping them, and stepping with the gradients of the step before.

# %%
# %%ranks


def train(overlap, late=False):
    zero, adam, _ = build(DDP)
    zero.overlap = overlap  # False: wait for each reduction before backward goes on
    before = None
    for number in range(8):
        loss = zero.model(*batches[number])
        loss.backward()
        fresh = [param.grad.clone() for param in zero.model.parameters()]
        if late and before:
            for param, grad in zip(zero.model.parameters(), before, strict=True):
                param.grad.copy_(grad)
        if before or not late:
            adam.step()
        before = fresh
        adam.zero_grad()
    return [param.detach().clone() for param in zero.model.parameters()], loss.item()


waiting, overlapping, stale = train(overlap=False), train(overlap=True), train(overlap=True, late=True)
equal = {
    "launched": all(map(torch.equal, waiting[0], overlapping[0])),
    "updated": all(map(torch.equal, waiting[0], stale[0])),
}
last = [found[1] for found in (waiting, overlapping, stale)]

# %% tags=["nbval-check-output"]
equal = lab.pull("equal")
print("launched asynchronously, the weights are the same to the bit:", all(of["launched"] for of in equal))
print("updated asynchronously, they are the same:", all(of["updated"] for of in equal))

# %%
print("rank 0's last loss: waiting {:.3f}, overlapping {:.3f}, stale {:.3f}".format(*lab.pull("last", rank=0)))

# %% [markdown]
# The first kind is free. The second is another algorithm, which may train more slowly or not at all; lesson 12 measures it.
# When somebody says that ZeRO is asynchronous, ask which one is meant. All three stages launch asynchronously, and all three
# update synchronously.
#
# ## In production
#
# FSDP2 prefetches too. In backward it does so by itself. In forward it relies on the host: Python issues the next gather
# long before the GPU has finished the block at work. Where the host is not that far ahead, you name the next modules
# yourself, with `set_modules_to_forward_prefetch`. To see it, count how many gathers have been started when each block
# begins to compute. (Our step: the package's `Recorded` with your schedule and `ahead = 1`.)

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from zerolab.lab import calls


def gathers_before(model, count):
    """(phase, block, gathers started so far) whenever a block begins to compute, in one step."""
    seen, hooks = [], []
    for number, block in enumerate(model.blocks):

        def look(*_, number=number, phase="forward"):
            seen.append((phase, number, count()))

        def look_back(*_, look=look):
            look(phase="backward")

        hooks.append(block.norm1.register_forward_pre_hook(look))
        hooks.append(block.mlp.down.register_full_backward_pre_hook(look_back))
    model(*batches[0]).backward()
    for hook in hooks:
        hook.remove()
    return [seen[i][2] for i in range(len(seen))]


def fsdp2(explicit):
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module)
    if explicit:
        for block, following in zip(model.blocks, model.blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
    model(*batches[0]).backward()
    with calls() as book:
        return gathers_before(model, lambda: sum("allgather" in call.op for call in book.calls))


def ours():
    zero, _, step = build(MyPrefetch)
    step()
    with ledger(zero) as book:
        return gathers_before(zero.model, lambda: sum(c.op == "all_gather" and not c.control for c in book.calls))


gathers = {"FSDP2": fsdp2(False), "FSDP2, named": fsdp2(True), "yours": ours()}

# %% tags=["nbval-check-output"]
gathers = lab.pull("gathers", rank=0)
print(f"{'':14}forward of blocks 0 1 2 3    backward of blocks 3 2 1 0")
for name, counts in gathers.items():
    print(f"{name:14}{'':18}{' '.join(map(str, counts[:4]))}{'':23}{' '.join(map(str, counts[4:]))}")

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
# Lesson 05 timed three sizes of unit. Here is what torch's own DDP does with three sizes of bucket, in the order in which
# the buckets leave:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel


def buckets(megabytes):
    model = DistributedDataParallel(make_model(), bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    for number in range(3):  # it puts its buckets in order after the first step
        with calls() as book:
            model(*batches[number]).backward()
    grads = {param.grad.untyped_storage()._cdata for param in model.parameters()}
    return [call.payload for call in book.calls], len(grads)


by_cap = {megabytes: buckets(megabytes) for megabytes in (25, 1, 0.25)}

# %% tags=["nbval-check-output"]
for megabytes, (sizes, storages) in lab.pull("by_cap", rank=0).items():
    many = f"{len(sizes)} bucket{'s' * (len(sizes) > 1)}"
    print(f"{megabytes:5} MB: {many:10} the last one has {sizes[-1]:>9,} of {sum(sizes):,} bytes")
    assert storages == len(sizes)  # gradient_as_bucket_view: gradients are views of the buckets, not copies

# %% [markdown]
# The last bucket is complete when backward is over, so nothing of it can hide. With one bucket, that is everything.
# With many it is little, but every bucket costs its latency. To see both, run our DDP with three sizes of unit on a
# link with half the bandwidth of the knee and 0.2 ms of latency:

# %%
# %%ranks
SIZES = {"one unit": (GPT,), "blocks": (Block,), "linear layers": (torch.nn.Linear,)}


def by_size(units):
    built = build(DDP, units)
    built[2]()
    with linked(f"{knee / 2e6:.3f} MB/s, 200 us"):
        seconds, record = timed(*built, times=3)
    return len(built[0].units), seconds, score(record)


sizes = {name: by_size(units) for name, units in SIZES.items()}

# %%
found = lab.pull("sizes")
for name, (units, seconds, _) in found[0].items():
    mean = sum(rank[name][2] for rank in found) / len(found)
    print(f"{name:14} {units:>2} units, {6 * units:>3} messages: {1000 * seconds:4.0f} ms a step, score {mean:.2f}")
assert sum(rank["one unit"][2] for rank in found) / len(found) < 0.5

# %% [markdown]
# **Verdict: false.** One unit has the least latency and hides nothing: its bytes leave when backward is over, so its
# step is the sum of computing and sending. Linear layers hide some, and pay for it with more than a hundred messages.
# (On a busy machine the times change places from run to run; the score of one unit stays 0.) And a bucket takes memory:
# what waits to be complete is held in full. `gradient_as_bucket_view=True` at least keeps no second copy: the gradients
# are views of the buckets, as in lesson 02. The best size depends on latency, bandwidth and model. Measure it; it takes
# three runs.
#
# > "overlap_comm hides communication."

# %%
if lab.predicted("09.3"):
    for speed, seconds in list(times["DDP"].items())[:4]:  # beyond, it sends for too short a time to tell
        transfer = sum(sent["DDP"].values()) / speed
        hidden = min(1.0, max(0.0, (alone + transfer - seconds) / transfer))
        part = speed / plots.knee(phases["DDP"])
        print(f"DDP at {part:4.2f} x the knee: sends for {1000 * transfer:3.0f} ms, of which {hidden:4.0%} is hidden")

# %% [markdown]
# **Verdict: true under a condition.** Overlap hides at most what fits behind computing. To the right of the knee that
# is everything but the first gather and the last reduction (and, on a busy laptop, what four ranks on two cores cost
# each other). At a quarter of the knee, three quarters cannot be hidden, in any order. The condition is FLOP per byte:
# *tokens on each rank*. In practice, when the score is low, first look at the order of calls (are the gathers started
# early?), then at the batch, and only then at the price of a network.
#
# > "A fast interconnect is a condition for ZeRO."
#
# **Verdict: false.** Stages 1 and 2 send what DDP sends, and have DDP's knee. ZeRO-3 sends 1.5 times as much and has the same
# knee, as measured above. So where DDP hides its communication, all stages do. What ZeRO frees is memory for a
# larger batch, and with more tokens the knee moves to slower networks. Below the knee a slow network does cost ZeRO-3 more
# than DDP, and there it is worth a look at the package's option `mesh=`, which gathers within a node only.
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
