# %% [markdown]
# # 07 · ZeRO-3, backward: gather again, reduce, release
#
# In lesson 06, every block's parameters went as soon as its forward was over. Backward needs them once more: the gradient
# of a layer's *input* is the gradient of its output times its weights. So every block is gathered a second time, while
# gradients go the other way and are reduced.
#
# On a slow network that second time is what makes a run 1.5 times as expensive, and the order of a few lines decides how
# much memory it takes. Today you write those lines, and you will be able to account for every byte they send.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4)
# %% tags=["nbval-check-output"]
# %%ranks
import torch
import zerolab
from torch.optim import AdamW
from zerolab import DDP, Zero2, Zero3, lab
from zerolab.lab import GPT, Block, batch, text

batches = [batch(text(), rank, step, batch_size=1, context=32) for step in range(5)]


def make_model():
    torch.manual_seed(0)
    return GPT(layers=6, width=128)


def build(stage):
    zero = stage(make_model(), units=[Block])
    zero.prefetch = False  # it is on by default; off, every unit is gathered in its turn
    return zero, AdamW(zero.model.parameters(), lr=1e-3)


zero, optimizer = build(Zero3)
print({unit.name: unit.layout.size for unit in zero.units[:2]}, "... seven units")

# %% [markdown]
# ## Predict
#
# The model has Ψ = 1,263,616 parameters in float32, on 4 ranks: 73,984 in the root and 198,272 in each of six blocks. In
# one training step,
#
# 1. how many collectives are there? An all-gather or a reduce-scatter of a unit counts as one. The root stays from its
#    forward until its gradient is reduced.
# 2. how many bytes does each rank send? Either kind sends (N-1)/N of the unit (lesson 01).
# 3. what is the most that is gathered at any moment of *backward*, in bytes? A hint: the gradient of block 4's output and
#    the gradient of block 5's input are the same tensor. Which of the two blocks hears of it first?

# %%
lab.predict("07.1", 7 + 6 + 7)  # collectives
lab.predict("07.2", 3 * (3 * 1_263_616 - 73_984))  # bytes
lab.predict("07.3", 4 * (73_984 + 2 * 198_272))  # bytes

# %% [markdown]
# ## See
#
# Here is what the engine calls in a backward, in order, on the four live ranks, and which units are gathered after each
# call. (`watched` looks over the engine's shoulder.)

# %%
# %%ranks
from zerolab.measure.watch import watched

story = []


def tell(point, unit):
    gathered = [u.name for u in zero.units if u.full.untyped_storage().size()]
    story.append(f"{point:13} {unit.name:8}  gathered: {', '.join(gathered) or 'nothing'}")


loss = zero.model(*batches[0])
with watched(zero, before=lambda *_: None, after=tell):
    loss.backward()
sizes = {unit.name: 4 * unit.layout.size for unit in zero.units}
most = 0
for line in story:
    gathered = line.split("gathered: ")[1]
    most = max(most, sum(size for name, size in sizes.items() if name in gathered))

# %% tags=["nbval-check-output"]
stories = lab.pull("story")
if lab.predicted("07.3"):
    print("the same on all ranks:", all(story == stories[0] for story in stories))
    print("\n".join(stories[0]))

# %%
lab.measured("07.3", lab.pull("most", rank=0))
lab.reveal("07.3")

# %% [markdown]
# Read it from the top. The root comes first: backward begins with its output layer, and the root is there already. Then
# block 5 is gathered. The gradient of its input is also the gradient of block 4's output, and block 4 hears of it first. So
# block 4 is gathered *before* block 5 is released, and two blocks are there at a time. [FSDP2](../docs/glossary.md#fsdp) has two as well, and three
# when it gathers the next block ahead; ours stays at two even then. The root goes last: backward ends with the embeddings.
#
# ## ZeRO-3's backward as a class
#
# You write three methods, of one or two lines each, with `unit.gather()` and `unit.release()` from lesson 06:
#
# - `pre_backward(unit)`: the first gradient has reached the unit's outputs.
# - `post_backward(unit)`: backward has passed the unit, and its gradient is complete. ZeRO-2's version, which you inherit,
#   reduces the gradient and keeps this rank's shard of it.
# - `after_step(unit)`: the optimizer has changed this rank's shard.
#
# The check adds a forward like that of lesson 06 to your class, trains with it, and compares with the package's `Zero3`.

# %%
# %%exercise 07.1

# %%
lab.check("07.1")

# %% [markdown]
# ## Measure
#
# `lab.mine(Zero3)` puts together what you wrote in lessons 06 and 07. (You have now written all of `zerolab/zero3.py`, with
# two differences. It says `self.gather(unit)` for your `unit.gather()`. And it has one more line, which starts gathering
# the next unit ahead of time when `prefetch` is on.) First the traffic of one step, to the byte:

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
lab.measured("07.1", lab.pull("number", rank=0))
lab.measured("07.2", lab.pull("moved", rank=0))
lab.reveal("07.1")
lab.reveal("07.2")

# %% tags=["nbval-check-output"]
if lab.predicted("07.1") and lab.predicted("07.2"):
    rows = {}
    for unit, phase, op in lab.pull("table", rank=0):
        rows.setdefault(unit, []).append(f"{op} in {phase}")
    for unit, calls in rows.items():
        print(f"{unit:9} {', '.join(calls)}")
    psi, root = 1_263_616, 73_984
    gathered_forward, gathered_backward, reduced = psi, psi - root, psi
    elements = gathered_forward + gathered_backward + reduced
    print(f"3Ψ - Ψ_root = {elements:,} elements; a rank sends 3/4 of their bytes")
    assert 3 / 4 * 4 * elements == lab.pull("moved", rank=0)

# %% [markdown]
# The gathers of forward are Ψ, those of backward Ψ - Ψ_root, and the reductions Ψ. DDP, ZeRO-1 and ZeRO-2 send 2Ψ. So
# ZeRO-3 sends **1.5 times** as much, less the root. Each block has three collectives in a step; the root has two.
#
# Does it learn the same? Train five steps with your ZeRO-3, with the package's, and with plain data parallelism (`DDP`,
# nothing sharded):

# %% tags=["nbval-check-output"]
# %%ranks


def train(stage):
    zero, optimizer = build(stage)
    losses = [step(zero, optimizer, i) for i in range(5)]
    return losses, list(zero.full_state_dict().values())


(losses, weights), *others = [train(stage) for stage in (Zero3, zerolab.Zero3, DDP)]
for their_losses, theirs in others:
    assert losses == their_losses and all(map(torch.equal, weights, theirs))
print(f"the losses of five steps and {len(weights)} weights are the same", end=" ")
print("in all three runs, bit for bit")

# %% [markdown]
# All three agree to the bit. Sharding changes where numbers are kept, not what is computed: no accuracy is lost, and none
# is gained.
#
# Now memory. Here is every allocation of a step, ZeRO-2's beside yours:

# %%
# %%ranks


def record(stage):
    zero, optimizer = build(stage)
    step(zero, optimizer)  # creates the optimizer state
    step(zero, optimizer)
    with timeline(zero, optimizer) as line:
        step(zero, optimizer)
    return line


line2, line3 = record(Zero2), record(Zero3)

# %%
from zerolab.lab import plots

lines = lab.pull("line3")
if lab.predicted("07.3"):
    both, whose = [lab.pull("line2", rank=0), lines[0]], [False, lab.passed("07.1")]
    plots.show(plots.skyline(both, learner=whose))

# %% [markdown]
# In backward the teeth of the saw are twice as high: two blocks. Below the activations gradients pile up, but only shards
# of them. Move through the step with the slider; it begins at the peak.

# %%
from zerolab.lab import timeline_scrubber

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
    assert kinds["optimizer"] == 8 * psi // 4 + 4 * 77  # 8Ψ/N, and 77 tensors' counters
    assert max(line.curve("gathered parameters")) == 4 * (root + 2 * block)
    for kind, nbytes in line.by_kind().items():
        whose = ", ".join(f"{unit} {size:,}" for unit, size in units[kind].items() if unit)
        print(f"{nbytes:>10,}  {kind:20} {whose if len(units[kind]) < 6 else 'all units'}")
    print(f"{line.peak:>10,}  the peak")
    assert sum(kinds.values()) == sum(part.nbytes for part in line.parts()) == line.peak

# %% [markdown]
# - *Parameters* and *optimizer* are what ZeRO-3 promises: 4Ψ/N and 8Ψ/N, plus Adam's step counters, 4 bytes for each of 77
#   tensors. More ranks make them smaller.
# - *Gathered parameters*: the root and two blocks, the answer to 07.3 to the byte.
# - *Gradients*: a block that backward has passed has a full bucket, 793,088 bytes, until it is reduced. The root's bucket
#   has been there from the start, for its output layer. The block that backward is in has what has arrived so far.
# - *Communication*: what a reduction receives from the other ranks, (N-1)/N of the block. The network decides which block
#   that is, and whether its buffers are back before the next gradient comes. So this line and the gradients may be a block
#   larger or smaller in another run.
# - *Activations* are those that backward has not reached yet. *Other* is the batch.
#
# Everything but the parameters, the optimizer and the shards of gradients is **in flight**. Activations aside, that is
# a few blocks' worth, whatever N is. That is why small units are good for memory, and why the largest unit decides.
#
# ## Break it on purpose
#
# *Not gathered*: what forward released is missing in backward.

# %% tags=["raises-exception"]
# %%ranks
# a deliberate mistake


class Forgets(Zero3):
    def pre_backward(self, unit):
        pass


zero, optimizer = build(Forgets)
zero.model(*batches[0]).backward()

# %% [markdown]
# This time the traceback ends in `backward()` and names no line of the model: autograd runs in C++, long after the lines
# that built the graph. What helps is the size. [128, 512] is the weight of a block's `mlp.down`, the first weight that
# backward meets in a block, and a storage of size 0 is one whose memory was released. So backward came to a unit that was
# not gathered.
#
# *Gathered, but old.* That mistake gives no error at all. Say someone looks at a second loss between backward and step, and
# forgets `torch.no_grad()`. Then the root stays, for a backward that never comes. After the optimizer's step its values are
# old. The engine keeps track of that in `unit.gathered`, so a class without `after_step` wastes memory and nothing worse.
# Without that record:

# %% tags=["nbval-check-output"]
# %%ranks


class KeepsOld(Zero3):
    def after_step(self, unit):
        unit.gathered = unit.full.untyped_storage().size() > 0  # in memory: then current


def loss_after_a_look(stage):
    zero, optimizer = build(stage)
    zero.model(*batches[0]).backward()
    zero.model(*batches[1])
    optimizer.step()
    return zero.model(*batches[1]).item()


new, old = loss_after_a_look(Zero3), loss_after_a_look(KeepsOld)
print("new and old parameters give the same loss:", new == old)

# %%
new, old = lab.pull("new", rank=0), lab.pull("old", rank=0)
print(f"rank 0: the loss is {new:.3f}; with the root's old values {old:.3f}")

# %% [markdown]
# Both losses are plausible, and training would go on. Only a comparison with a run that is known to be right finds such
# a thing, which is why these lessons make one, bit for bit.
#
# *A [tied weight](../docs/glossary.md#tied-weight)* is one parameter that two modules share. What if the two modules belong to two units, which are gathered
# at different times? Which unit releases it, and when?

# %% tags=["nbval-check-output"]
# %%ranks
from torch.distributed.fsdp import fully_shard


def tied():
    model = make_model()
    model.blocks[5].mlp.up.weight = model.blocks[0].mlp.up.weight
    return model


zero = Zero3(tied(), units=[Block])
sizes = {unit.name: unit.layout.size for unit in zero.units}
print("zerolab:", {name: sizes[name] for name in ("root", "blocks.0", "blocks.1")})
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
# The engine puts shared parameters into the root unit. The root stays through forward and backward, so nobody can release
# them too early. The price is memory: 65,536 more elements in the root. `fully_shard` refuses, and says what to do. Both
# are better than what can happen when nobody checks: one unit releases what the other still needs, or one of the two
# gradients gets lost.
#
# ## In production
#
# Here is `fully_shard` (FSDP2) on the same model and text. Train five steps, then compare the weights, the traffic of a
# step, and the peak as torch's own profiler counts it, model and optimizer included.

# %%
# %%ranks
from zerolab.lab import calls
from zerolab.measure import peak_of


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
    if rank == 0:  # the others only take part: a profiler on every rank would be slow
        return peak_of(build, torch.device("cpu"), steps)
    make_step = build()
    for _ in range(steps):
        make_step()


peaks = peak(ours), peak(fsdp2)

# %%
most = max(lab.pull("difference"))
print(f"the weights differ by at most {most:.0e}; one step of Adam moves a weight by 1e-3")
if lab.predicted("07.1") and lab.predicted("07.2"):
    sent, number = lab.pull("sent", rank=0), lab.pull("number", rank=0)
    print(f"fully_shard sends {sent:,.0f} bytes in {number} calls")
peaks = lab.pull("peaks", rank=0)
print(f"peak: ours {peaks[0]:,}, fully_shard {peaks[1]:,} bytes")

# %% tags=["nbval-check-output"]
print("after five steps the weights agree to 0.0001:", max(lab.pull("difference")) < 1e-4)
if lab.predicted("07.1") and lab.predicted("07.2"):
    print("the same traffic, to the byte:", sent == lab.pull("moved", rank=0))
    assert number == 20

# %% [markdown]
# The same twenty collectives, the same bytes. The weights are not equal to the bit, and neither library is wrong. gloo's
# reduce-scatter adds the ranks' gradients in the order of its ring, ours in rank order, and floating-point sums depend on
# their order. Adam divides by the size of the gradient, so a difference in the last digit of a tiny gradient can grow.
# Hence the tolerance of 1e-4, a tenth of what one step may move a weight.
#
# The peaks come from torch's profiler, which sees every allocation of either library. Ours is what you explained above,
# perhaps with the buffers of one or two reductions that have not ended yet. How many of those there are at a time changes
# from run to run, for both libraries. `fully_shard` copies a unit into and out of its buffers, because its shards are rows
# of each parameter; ours are stretches of the flat unit. It also gathers the next block ahead. Ours does not do so here,
# because `prefetch` is off.
#
# There are no times here, and that is deliberate: four ranks share the cores of this machine, so sending while computing
# gains nothing. To see what 1.5 times the bytes cost, you need real wires.
#
# ## On trial
#
# > "With more devices the model can grow without limit."
#
# First, what four ranks can show: the same step on groups of 2 and of 4 ranks. What shrinks with N, and what does not?

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

# %% tags=["nbval-check-output"]
highest = lab.pull("highest", rank=0)
if lab.predicted("07.3"):
    for kind in highest[2]:
        two, four = highest[2][kind], highest[4][kind]
        part = f"{four / two:.0%} of it"
        print(f"{kind:20} at most {two:>10,} on 2 ranks, {four:>10,} on 4: {part}")

# %% [markdown]
# Only what is *kept* shrinks. So continue the row, with what is kept computed from the formulas and what is in flight as
# measured.

# %% tags=["nbval-check-output"]
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
    said = f"With 256 times as many ranks, {first:.1f} MB become {last:.1f} MB"
    plots.show((picture, f"{said}: what is in flight stays."))

# %% [markdown]
# **Verdict: false.** From some N on, adding ranks frees next to nothing. The units in flight stay, so the *largest
# unit* has to fit. The activations of at least one sequence stay, too. Both grow with the model's width, and
# activations with its depth and the length of a sequence as well. And there is a price in time: in each collective, a
# ring of N ranks passes on N - 1 messages in sequence. At 50 µs a message and N = 1024, that is 51 ms. For the 20
# collectives of our tiny step it is a second, for messages alone. (Lesson 16 plans a trillion parameters.)

# %% [markdown]
# ## Your engine on trial
#
# All of `Zero3` is yours now. These promises are those that sharded parameters make hard: a weight that two units share,
# a block that runs again in backward, an error in the middle of it. In the last one a rank leaves a backward out: each rank
# must get an error, and none may wait. (`zerolab trial zero3` tries all promises, in a few minutes. [Here](../docs/trial.md)
# is what it says of other engines.)

# %% tags=["nbval-check-output"]
import zerolab

promises = [
    "plain", "tied across units", "dropout, recomputed", "an error in backward",
    "held after backward", "held at the peak", "moved in a step",
    "disagree: one skips a backward",
]
lab.trial(zerolab.Zero3, *promises)

# %% [markdown]
# ## Questions
#
# 1. Where does 3Ψ come from, why less Ψ_root, and what would the traffic be if *every* unit stayed after its forward?
# 2. Why are there two blocks at once in backward, and only one in forward?
# 3. Why does backward need the parameters at all? Which parameters does it *not* need?
# 4. What is old after `optimizer.step()`, and how would you notice if it were used?
# 5. A colleague accumulates gradients over 8 micro-batches with ZeRO-3. How often is each block gathered in a step?
# 6. Your run needs 1 GB more than each of its 64 GPUs has. Do 128 GPUs help?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. From the gathers in forward (Ψ), the gathers in backward (Ψ - Ψ_root, because the root is still there) and the
#    reductions (Ψ). If every unit stayed, the traffic would be 2Ψ. That is `reshard_after_forward=False`, and it keeps the
#    full parameters in memory from forward to backward.
# 2. The gradient that leaves a block is what the block before it waits for. So that one is gathered before this one is
#    reduced and released. In forward, a block begins only when the one before it is done.
# 3. For the gradient of a layer's *input*: grad_input = grad_output × weight. Biases are not needed, nor is an embedding
#    table. The engine gathers entire units all the same.
# 4. Everything that is gathered: the optimizer changed only shards. The next forward would use old weights, with no error,
#    and training would get worse or stall. To notice, compare with DDP bit for bit, as above.
# 5. 16 times: once in forward and once in backward of each micro-batch. Reductions can wait for the last one (`no_sync`),
#    at the price of full gradients. Gathers cannot, unless the parameters stay.
# 6. Only if halving the part that is sharded, 16Ψ/N, frees that 1 GB. Look first at what is in flight and at activations:
#    smaller units, a smaller batch, activation checkpointing.

# %%
lab.stop()
lab.progress()
