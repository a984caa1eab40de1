# %% [markdown]
# # 07 · ZeRO-3, backward: gather again, reduce, release
#
# Lesson 06 let every block's parameters go as soon as its forward was over. Backward needs them once more: the gradient of a
# layer's *input* is the gradient of its output times its weights. So everything is gathered a second time, while gradients
# go the other way and are reduced.
#
# On a slow network that second time is what makes a run 1.5 times as expensive, and the order of three lines decides
# how much memory is needed while it happens. Today you write those three lines, and can say every byte they send.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4)
# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
import zerolab
from torch.optim import AdamW
from zerolab import DDP, Zero2, Zero3, lab
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT, Block

batches = [batch(text(), rank, step, batch_size=1, context=32) for step in range(5)]


def make_model():
    torch.manual_seed(0)
    return GPT(layers=6, width=128)


def build(stage):
    zero = stage(make_model(), units=[Block])
    zero.prefetch = False  # nothing is gathered before its turn, so that one can see each turn; usually it is on
    return zero, AdamW(zero.model.parameters(), lr=1e-3)


zero, optimizer = build(Zero3)
print({unit.name: unit.layout.size for unit in zero.units[:2]}, "... seven units")

# %% [markdown]
# ## Predict
#
# Ψ = 1,263,616 parameters in float32 on 4 ranks: 73,984 in the root, 198,272 in each of six blocks. In one training step,
#
# 1. how many collectives are there? An all-gather or a reduce-scatter of a unit counts as one. The root stays from its
#    forward until its gradient is reduced.
# 2. how many bytes does each rank send? Either kind sends (N-1)/N of the unit (lesson 01).
# 3. what is the most that is gathered at one moment of *backward*, in bytes? A hint: the gradient of block 4's output and of
#    block 5's input are the same tensor. Who is told first?

# %%
lab.predict("07.1", 7 + 6 + 7)
lab.predict("07.2", 3 * (3 * 1_263_616 - 73_984))
lab.predict("07.3", 4 * (73_984 + 2 * 198_272))

# %% [markdown]
# ## See
#
# What the engine calls in a backward, in which order, and how many units are gathered after each call, on the four live
# ranks. (`watched` looks over the engine's shoulder.)

# %%
# %%ranks
from zerolab.measure.watch import watched

story = []


def tell(point, unit):
    gathered = [u.name for u in zero.units if u.whole.untyped_storage().size()]
    story.append(f"{point:13} {unit.name:8}  gathered: {', '.join(gathered) or 'nothing'}")


loss = zero.model(*batches[0])
with watched(zero, before=lambda *_: None, after=tell):
    loss.backward()
most = max(sum(u.layout.size * 4 for u in zero.units if u.name in line.split("gathered: ")[1]) for line in story)

# %%
# NBVAL_CHECK_OUTPUT
stories = lab.pull("story")
if lab.predicted("07.3"):
    print("the same on all ranks:", all(story == stories[0] for story in stories))
    print("\n".join(stories[0]))

# %%
lab.measured("07.3", lab.pull("most", rank=0), "bytes")
lab.reveal("07.3")

# %% [markdown]
# Read it from the top. The root comes first: its output layer is where backward begins, and it is there already. Then block
# 5 is gathered; and as soon as the gradient of its input is known, which is the gradient of block 4's output, block 4 is
# gathered, *before* block 5 is released. So there are two blocks at a time. FSDP2 has the same,
# and three where it gathers the next block ahead; ours stays at two then, too. The root goes last: the embeddings are where
# backward ends.
#
# ## ZeRO-3's backward as a class
#
# Three methods, one or two lines each:
#
# - `pre_backward(unit)`: the first gradient has reached the outputs of `unit`.
# - `post_backward(unit)`: backward has passed it, and its gradient is complete. ZeRO-2's version, which you inherit, reduces
#   the gradient and keeps this rank's slice.
# - `after_step(unit)`: the optimizer has changed this rank's shard.
#
# The check puts your class over a forward like that of lesson 06, and trains with both yours and the package's.

# %%
# %%exercise 07.1

# %%
lab.check("07.1")

# %% [markdown]
# ## Measure
#
# `lab.mine(Zero3)` puts together what you have written in lessons 06 and 07. (`zerolab/zero3.py`, which you have now written
# all of, says `self.gather(unit)` for your `unit.gather()`, and has one line more: that starts the next unit's gather ahead,
# where `prefetch` is on.) First the traffic of one step, to the byte:

# %%
# %%ranks
from zerolab.measure import ledger, timeline

Zero3 = lab.mine(Zero3)


def step(zero, optimizer, number=0):
    loss = zero.model(*batches[number])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


zero, optimizer = build(Zero3)
step(zero, optimizer)
with ledger(zero) as book:
    step(zero, optimizer)
number = sum(total.calls for total in book.totals("op").values())
moved = book.moved
table = [(call.unit, call.phase, call.op) for call in book.calls if not call.control]

# %%
lab.measured("07.1", lab.pull("number", rank=0), "collectives")
lab.measured("07.2", lab.pull("moved", rank=0), "bytes")
lab.reveal("07.1")
lab.reveal("07.2")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("07.1") and lab.predicted("07.2"):
    rows = {}
    for unit, phase, op in lab.pull("table", rank=0):
        rows.setdefault(unit, []).append(f"{op} in {phase}")
    for unit, calls in rows.items():
        print(f"{unit:9} {', '.join(calls)}")
    psi, root = 1_263_616, 73_984
    gathered_forward, gathered_backward, reduced = psi, psi - root, psi
    print(f"3Ψ - Ψ_root = {gathered_forward + gathered_backward + reduced:,} elements; x 4 bytes x 3/4 to send")
    assert 3 * (gathered_forward + gathered_backward + reduced) == lab.pull("moved", rank=0)

# %% [markdown]
# Ψ for the gathers of forward, Ψ - Ψ_root for those of backward, Ψ for the reductions. DDP and ZeRO-1 and 2 send 2Ψ: so
# ZeRO-3 sends **1.5 times** as much, less the root. Each block has three collectives in a step, the root two.
#
# Does it learn the same? Five steps of your ZeRO-3, of the package's, and of data parallel training (`DDP`, nothing
# sharded):

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT


def train(stage):
    zero, optimizer = build(stage)
    losses = [step(zero, optimizer, i) for i in range(5)]
    return losses, list(zero.full_state_dict().values())


(losses, weights), *others = [train(stage) for stage in (Zero3, zerolab.Zero3, DDP)]
for theirs, their_weights in others:
    assert losses == theirs and all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
print(f"the losses of five steps and {len(weights)} weights are the same three times, to the last bit")

# %% [markdown]
# To the bit: yours, the package's `Zero3`, and data parallel training. Sharding changes where numbers lie, not what is
# computed: no accuracy is lost, and none won.
#
# Now memory. Every allocation of a step, ZeRO-2's beside yours:

# %%
# %%ranks


def record(stage):
    zero, optimizer = build(stage)
    step(zero, optimizer)  # makes the optimizer state
    step(zero, optimizer)
    with timeline(zero, optimizer) as line:
        step(zero, optimizer)
    return line


line2, line3 = record(Zero2), record(Zero3)

# %%
from zerolab.lab import plots

lines = lab.pull("line3")
if lab.predicted("07.3"):
    plots.show(plots.skyline([lab.pull("line2", rank=0), lines[0]], learner=[False, lab.passed("07.1")]))

# %% [markdown]
# The saw has teeth twice as high in backward: two blocks. Under the activations gradients pile up, but only slices of them.
# Move through the step with the slider; it begins at the peak.

# %%
from zerolab.lab.explorers import timeline_scrubber

if lab.predicted("07.3"):
    scrubber = timeline_scrubber(lines)
    display(scrubber)
    print("At the start:", scrubber.sentence)

# %% [markdown]
# Every byte of that peak has a reason:

# %%
if lab.predicted("07.3"):
    line, psi, root, block = lines[0], 1_263_616, 73_984, 198_272
    kinds = line.by_kind()
    units = {kind: {} for kind in kinds}
    for part in line.parts():
        units[part.kind][part.unit] = part.nbytes
    assert kinds["parameters"] == 4 * psi // 4  # 4Ψ/N: the shards
    assert kinds["optimizer"] == 8 * psi // 4 + 4 * 77  # 8Ψ/N, and a counter for each of 77 tensors
    assert max(line.curve("gathered parameters")) == 4 * (root + 2 * block)
    for kind, nbytes in line.by_kind().items():
        whose = ", ".join(f"{unit} {size:,}" for unit, size in units[kind].items() if unit)
        print(f"{nbytes:>10,}  {kind:20} {whose if len(units[kind]) < 6 else 'of all units'}")
    print(f"{line.peak:>10,}  the peak")
    assert sum(kinds.values()) == sum(part.nbytes for part in line.parts()) == line.peak

# %% [markdown]
# - *Parameters* and *optimizer* are what ZeRO-3 promises: 4Ψ/N and 8Ψ/N (and 4 bytes for each of 77 tensors, in which Adam
#   counts its steps). More ranks make them small.
# - *Gathered parameters*: the root and two blocks, to the byte what you predicted.
# - *Gradients*: a block that backward has passed has its whole gradient, 793,088 bytes, until it is reduced. The root's is
#   there from the first, for its output layer. In the block that backward is in, what is there so far.
# - *Communication*: what a reduction receives from the other ranks, (N-1)/N of the block. Which block that is, and whether
#   its buffers are back already when the next gradient comes, is for the network to decide; so this line and the gradients
#   may be a block larger or smaller in another run.
# - *Activations* that backward has not reached yet; *other*: tokens and temporaries.
#
# All but the first two are **in flight**: some blocks large, whatever N is. Which is why small units are good for memory,
# and why the largest unit decides.
#
# ## Break it on purpose
#
# *Gathered too late*, that is, not again: what forward released is missing in backward.

# %% tags=["raises-exception"]
# %%ranks
# a mistake made on purpose


class Forgets(Zero3):
    def pre_backward(self, unit):
        pass


zero, optimizer = build(Forgets)
zero.model(*batches[0]).backward()

# %% [markdown]
# Here the traceback ends in `backward()`, and no line of the model is named: autograd runs in C++, long after the lines that
# made the graph. What helps is the size: [128, 512] is the weight of a block's `mlp.down`, the first that backward meets
# in a block, and storage 0 says that its memory was let go. So: a unit that was not gathered when backward came to it.
#
# *Gathered, but old.* That mistake gives no error at all. Say, somebody looks at a second loss between backward and step,
# and forgets `torch.no_grad()`: then the root stays, for a backward that does not come. After the optimizer's step its
# values are old. The engine notes that, in `unit.gathered`, so that a class without `after_step` wastes memory and no more.
# Without that note:

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT


class KeepsOld(Zero3):
    def after_step(self, unit):
        unit.gathered = unit.whole.untyped_storage().size() > 0  # what is there is good enough


def loss_after_a_look(stage):
    zero, optimizer = build(stage)
    zero.model(*batches[0]).backward()
    zero.model(*batches[1])
    optimizer.step()
    return zero.model(*batches[1]).item()


new, old = loss_after_a_look(Zero3), loss_after_a_look(KeepsOld)
print("the same loss with new and with old parameters:", new == old)

# %%
print(f"rank 0: the loss is {lab.pull('new', rank=0):.3f}; with the root's old values {lab.pull('old', rank=0):.3f}")

# %% [markdown]
# Both are plausible losses, and training would go on. Only a comparison to the bit finds such a thing, which is why lessons
# end with one.
#
# *A tied weight* is one parameter that two modules share. What if they belong to two units, which are gathered at different
# times? Who releases it, and when?

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
from torch.distributed.fsdp import fully_shard


def tied():
    model = make_model()
    model.blocks[5].mlp.up.weight = model.blocks[0].mlp.up.weight
    return model


zero = Zero3(tied(), units=[Block])
print("zerolab:", {unit.name: unit.layout.size for unit in zero.units if unit.name in ("root", "blocks.0", "blocks.1")})
zero.model(*batches[0]).backward()
try:
    model = tied()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model(*batches[0])
except ValueError as error:
    print("fully_shard:", error)

# %% [markdown]
# The engine puts what is shared into the root unit, which is there all the time, so nobody can let it go too early; it costs
# memory, 65,536 more elements in the root. `fully_shard` refuses, and says what to do. Both are better than what can happen
# where nobody looks: one unit lets go of what the other still needs, or one of the two gradients gets lost.
#
# ## In production
#
# `fully_shard` (FSDP2) on the same model and text: five steps, then the weights compared, the traffic of a step, and the peak
# as torch's own profiler counts it, model and optimizer included.

# %%
# %%ranks
from zerolab.lab.ranks.calls import calls
from zerolab.measure.peak import peak_of


def build_theirs():
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, AdamW(model.parameters(), lr=1e-3)


def their_step(model, optimizer, number=0):
    model(*batches[number]).backward()
    optimizer.step()
    optimizer.zero_grad()


zero, optimizer = build(Zero3)
theirs, their_optimizer = build_theirs()
for i in range(5):
    step(zero, optimizer, i)
    their_step(theirs, their_optimizer, i)
weights = [param.full_tensor() for param in theirs.parameters()]
with zero.full_parameters():
    pairs = zip(weights, zero.model.parameters())
    difference = max((theirs - ours).abs().max().item() for theirs, ours in pairs)
with calls() as book:
    their_step(theirs, their_optimizer)
sent, number = book.sent, len(book.calls)

# %%
# %%ranks


def ours():
    built = build(Zero3)
    return lambda: step(*built)


def fsdp2():
    built = build_theirs()
    return lambda: their_step(*built)


def peak(build, steps=2):
    if rank == 0:  # the others only take part: a profiler on each would take its time
        return peak_of(build, torch.device("cpu"), steps)
    make_step = build()
    for _ in range(steps):
        make_step()


peaks = peak(ours), peak(fsdp2)

# %%
print(f"weights differ by {max(lab.pull('difference')):.0e} at most; one step of Adam moves a weight by 1e-3")
if lab.predicted("07.1") and lab.predicted("07.2"):
    print(f"fully_shard sends {lab.pull('sent', rank=0):,.0f} bytes in {lab.pull('number', rank=0)} calls")
peaks = lab.pull("peaks", rank=0)
print(f"peak: ours {peaks[0]:,}, fully_shard {peaks[1]:,} bytes")

# %%
# NBVAL_CHECK_OUTPUT
print("weights equal to 0.0001 after five steps:", max(lab.pull("difference")) < 1e-4)
if lab.predicted("07.1") and lab.predicted("07.2"):
    print("the same traffic, to the byte:", lab.pull("sent", rank=0) == lab.pull("moved", rank=0))
    assert lab.pull("number", rank=0) == 20

# %% [markdown]
# The same twenty collectives, the same bytes. The weights are not equal to the bit, and neither is wrong: gloo's
# reduce-scatter adds the ranks' gradients in the order of its ring, ours in the order of the ranks, and floating point sums
# depend on their order. Adam divides by the size of the gradient, so a difference in the last digit of a tiny gradient can
# grow: hence a tolerance of 1e-4, a tenth of what one step may move a weight.
#
# The peaks come from torch's profiler, which sees every allocation of either library. Ours is what you have explained above,
# and perhaps the buffers of a reduction or two that have not ended; how many there are at one moment changes from run to
# run, for both. `fully_shard` copies a unit into and out of its buffers, because its shards are rows of each parameter, where
# ours is one stretch of the flat unit. It also gathers the next block ahead, which ours does not here, where `prefetch`
# is off.
#
# There are no times here, and that is no oversight: four ranks share the cores of this machine, and nothing is gained by
# sending while computing. What 1.5 times the bytes cost is to be seen where there are wires.
#
# ## On trial
#
# > "With more devices the model can grow without limit."
#
# First what four ranks can show: the same step on groups of 2 and of 4 ranks. What shrinks with N, and what does not?

# %%
# %%ranks
import torch.distributed as dist

pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


def record_pair():
    zero = Zero3(make_model(), units=[Block], group=pair)
    zero.prefetch = False
    optimizer = AdamW(zero.model.parameters(), lr=1e-3)
    for _ in range(2):
        step(zero, optimizer)
    with timeline(zero, optimizer) as line:
        step(zero, optimizer)
    return line


lines = {2: record_pair(), 4: line3}
KINDS = ("parameters", "optimizer", "gathered parameters", "activations")
highest = {N: {kind: max(line.curve(kind)) for kind in KINDS} for N, line in lines.items()}

# %%
# NBVAL_CHECK_OUTPUT
highest = lab.pull("highest", rank=0)
if lab.predicted("07.3"):
    for kind in highest[2]:
        two, four = highest[2][kind], highest[4][kind]
        print(f"{kind:20} at most {two:>10,} on 2 ranks {four:>10,} on 4 {'the same' if four == two else 'about half'}")

# %% [markdown]
# Only what is *kept* shrinks. So continue the row: computed from the formulas, with what is in flight as measured.

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("07.3"):
    psi, bars = 1_263_616, {}
    for N in (4, 16, 64, 256, 1024):
        bars[f"N = {N}"] = {
            "parameters": 4 * psi / N / 1e6,
            "optimizer": 8 * psi / N / 1e6,
            "gradients": 4 * psi / N / 1e6,
            "gathered parameters": highest[4]["gathered parameters"] / 1e6,
            "activations": highest[4]["activations"] / 1e6,
        }
    subtitle = "ZeRO-3 on one rank: 16Ψ/N, units in flight, activations of one sequence"
    picture, _ = plots.stacks(bars, "What more ranks cannot shrink", subtitle, "MB")
    first, *_, last = [sum(parts.values()) for parts in bars.values()]
    plots.show(
        (picture, f"256 times as many ranks, and {first:.1f} MB have become {last:.1f}: what is in flight stays.")
    )

# %% [markdown]
# **Verdict: false.** From some N on, adding ranks frees next to nothing. What stays are the units in flight, so the *largest
# unit* has to fit, and the activations of at least one sequence. Both grow with the model's width. And there is a price in time: a
# ring of N ranks passes N - 1 messages one after the other in each collective. At 50 µs a message and N = 1024, that is 51
# ms; times the 20 collectives of our tiny step, a second, in which nothing is computed. (Lesson 16 plans a
# trillion parameters.)
#
# ## Questions
#
# 1. Where do 3Ψ come from, why less Ψ_root, and what would the traffic be if *every* unit stayed after its forward?
# 2. Why are there two blocks at once in backward, and only one in forward?
# 3. Why does backward need the parameters at all? Which parameters does it *not* need?
# 4. What is old after `optimizer.step()`, and how would you notice if it were used?
# 5. A colleague accumulates gradients over 8 micro-batches with ZeRO-3. How often is each block gathered?
# 6. Your run needs 1 GB more than each of 64 GPUs has. Do 128 GPUs help?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Gathers in forward (Ψ), again in backward (Ψ - Ψ_root, since the root is still there), reductions (Ψ). If every unit
#    stayed, 2Ψ: that is `reshard_after_forward=False`, and the parameters are whole from forward to backward.
# 2. The gradient that leaves a block is what the block before it waits for: that one is gathered before this one is
#    reduced and released. In forward the next begins only when the last is over.
# 3. For the gradient of a layer's *input*: grad_input = grad_output × weight. Biases are not needed, nor is an embedding
#    table; the engine gathers whole units all the same.
# 4. Everything gathered: the optimizer changed shards. The next forward would use old weights, with no error, and training
#    would get worse or stand still. Compare bit for bit with DDP, as above, and you notice.
# 5. 16 times: for each micro-batch once in forward and once in backward. Reductions can wait for the last one (`no_sync`),
#    at the price of whole gradients; gathers cannot, unless the parameters stay.
# 6. Only if what is sharded, 16Ψ/N, makes up the difference. Look first at what is in flight and at activations: smaller
#    units, a smaller batch, activation checkpointing.

# %%
lab.stop()
lab.progress()
