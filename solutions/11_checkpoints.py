# %% [markdown]
# # 11 · Checkpoints that survive
#
# **The question.** When Meta trained Llama 3 on 16,384 GPUs, something stopped the run 466 times in 54 days, 419 of
# them unplanned ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4). That is an unplanned stop every
# three hours. What was not on the disk by then was computed, paid for, and lost.
#
# A **[checkpoint](../docs/glossary.md#checkpoint)** is what has to be on the disk so that training goes on as if it had
# never stopped. Five things can go wrong: ranks may overwrite each other's files; the checkpoint may be incomplete, or
# fit only the number of ranks that wrote it; the crash may come during the save; and the run may go on with other
# samples. You see each of them, and write two functions against the worst.

# %%
# %load_ext zerolab.lab
import tempfile

from zerolab import lab
from zerolab.lab import plots

lab.start(4)
folder = tempfile.mkdtemp(prefix="zerolab-lesson-11-")
lab.push(folder=folder)

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
import zerolab
from zerolab import lab

data = lab.windows(None, 64)  # real text: samples of 64 bytes, with the 64 to predict
zero, adam = lab.small_run()  # a GPT of two blocks in stage 3, and AdamW
print(f"Ψ = {len(lab.all_weights(zero)):,} parameters")

# %% [markdown]
# ## Predict
#
# The model is trained with AdamW in float32, on 4 ranks in stage 3. How many bytes of parameters and optimizer state
# are in its checkpoint, all files together? (Not counting the step counters.)

# %%
lab.predict("11.1", 12 * 136_960)  # bytes

# %% [markdown]
# ## One path for all
#
# A script that was written for one process saves with `torch.save(model.state_dict(), "model.pt")`. On four ranks, each
# runs that line, at the same moment and with the same path. Here every rank saves 40 tensors (16 MB) filled with its
# rank, three times over.

# %%
# %%ranks
mine = {f"tensor {i}": torch.full((100_000,), float(rank)) for i in range(40)}
found = []
for _ in range(3):
    dist.barrier()
    torch.save(mine, f"{folder}/model.pt")
    dist.barrier()
    found.append(lab.whose_tensors(f"{folder}/model.pt"))

# %%
for row in lab.pull("found", rank=0):
    print("whose tensor:", row)

# %% [markdown]
# Each digit says which rank one of the 40 tensors in the file came from. (The rows differ from run to run.) A row of
# one digit means that one rank wrote last, and what the other three saved is gone. Several digits are worse: the ranks
# wrote over each other, and `torch.load` opens the patchwork **without an error**. So ranks that hold different things
# write *different files*, and a format needs checksums, as zerolab's has.
#
# ## Weights alone are no checkpoint
#
# Train 60 steps and stop. Then go on in two ways: with everything that the run had, or with its weights alone and a new
# AdamW.
#
# Adam moves an element by lr · m/√v, where m is the average of its gradients and v of their squares (both corrected for
# having started at zero). In a trained run, gradients change sign from step to step, so m is much smaller than √v.
# Predict: in the *first* step after resuming with weights alone, how many learning rates does the median element move?

# %%
lab.predict("11.2", 1.0)  # learning rates

# %% [markdown]
# `samples(step)` gives the numbers of a step's 24 samples, of all ranks together; in `one_step` each rank takes its
# part. The checkpoint has the number of the next sample.

# %%
# %%ranks
GLOBAL = 24  # samples in a step, of all ranks together
order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(0))


def samples(step, batch=GLOBAL):
    return order[step * batch : (step + 1) * batch]


def train(zero, adam, steps, batch=GLOBAL):
    return [lab.one_step(zero, adam, data, samples(step, batch)) for step in steps]


before = train(zero, adam, range(60))
zerolab.save(f"{folder}/step-60", zero, adam, next_sample=60 * GLOBAL)
weights = zero.full_state_dict()
ways = {"never stopped": lab.ten_steps(train, zero, adam, 60)}

again = lab.small_run()
step = zerolab.load(f"{folder}/step-60", *again)["next_sample"] // GLOBAL
ways["with everything"] = lab.ten_steps(train, *again, step)

again = lab.small_run()
again[0].load_full_state_dict(weights)
ways["weights alone"] = lab.ten_steps(train, *again, 60)

losses, moved, ends = ({name: way[i] for name, way in ways.items()} for i in range(3))
same = losses["never stopped"] == losses["with everything"]
same = same and torch.equal(ends["never stopped"], ends["with everything"])

# %%
moved = lab.pull("moved", rank=0)
lab.measured("11.2", round(moved["weights alone"], 2))
lab.reveal("11.2")

# %% tags=["nbval-check-output"]
same = all(lab.pull("same"))
print("with everything, losses and weights are those of never stopping, bit for bit:", same)

# %%
losses = lab.pull("losses", rank=0)
if lab.predicted("11.2"):
    plots.show(lab.going_on(lab.pull("before", rank=0)[50:], losses, moved))
    assert losses["weights alone"][0] == losses["never stopped"][0]
    assert losses["weights alone"][1] > losses["never stopped"][1] + 0.05

# %% [markdown]
# The first loss after the stop is the same, since the weights are. In the first update a new Adam has seen one
# gradient: m/√v is g/|g| = ±1, so every element that has a gradient moves a *full* learning rate, whether its gradient
# is large or noise. Each restart undoes some progress.
#
# A checkpoint therefore has: parameters; the optimizer's state and its step counter; the position in the data; the
# learning-rate schedule; the states of the random number generators (dropout); buffers such as BatchNorm's averages;
# and with fp16 the loss scale (lesson 08). It has no gradients, because it is written after the step.
#
# ## A file per rank
#
# `zerolab.save` has just written such a checkpoint. Here is what is in the folder:

# %%
from pathlib import Path

saved = Path(folder, "step-60")
lab.measured("11.1", lab.state_bytes_in(saved))
lab.reveal("11.1")

# %% tags=["nbval-check-output"]
print(*sorted(path.name for path in saved.iterdir()), sep="\n")
for piece in lab.pieces_of(saved, "blocks.0.mlp.up.weight"):
    print(piece)
if lab.predicted("11.1"):
    assert lab.state_bytes_in(saved) == 12 * 136_960

# %% [markdown]
# Every rank writes only what it owns: no gather, and all write at once. (A safetensors file is raw tensors under a JSON
# header.) Together they have 4 bytes for each parameter and 8 for Adam's two averages: 12Ψ, whatever the stage and the
# number of ranks. The **manifest** says which elements of what are in which file.
#
# ## Write: who reads what
#
# The next morning one GPU is broken, and four files are to be loaded on three ranks. First on a small scale. A unit of
# 38 elements (lesson 04) is in four files, a shard of 10 elements in each, so 2 in
# the last one are padding. Three ranks will cut it into shards of 13. Predict: how many reads do they need together, if
# a read takes neighbouring elements from one file?

# %%
lab.predict("11.3", 6)  # reads

# %%
files = [(f"rank-{r}.safetensors", 10) for r in range(4)]
lab.measured("11.3", lab.reads_needed(files, 38, 3))
lab.reveal("11.3")
if lab.predicted("11.3"):
    plots.show(plots.who_reads_what(files, 38, 3))

# %% [markdown]
# Laid end to end, the four files *are* the unit, and then padding. Only the cuts move, from 10, 20 and 30 to 13 and 26.
# So the 38 elements fall into 3 + 2 + 1 = 6 pieces, each one read. A rank's share of a file is the overlap of two
# ranges:
#
# ```
# start, stop = max(first, begin), min(last, begin + length)  # nothing if start >= stop
# ```
#
# where the rank owns the elements [first, last) of the unit and the file has [begin, begin + length). The rest is
# book-keeping: `start` and `stop` must count from the beginning of *that file*, the place from that of the *new shard*,
# and padding is nobody's.

# %%
# %%exercise 11.1

# %%
lab.check("11.1")

# %% [markdown]
# ## Measure: four files on three ranks
#
# Now a real one. The four ranks write their shards of the run at step 60, one file each (`rank-0.safetensors` and so on), with
# three tensors for each unit: parameters, and Adam's `exp_avg` and `exp_avg_sq`. Then rank 3 is gone. The other three form a group, build a
# fresh model, and know nothing of the first run but its files. `load_shards` asks your function what to read for each
# unit.

# %%
# %%ranks
plan_reads = lab.mine("11.1")
four = lab.in_shards(f"{folder}/step-60", folder)

three = dist.new_group([0, 1, 2])
read = equal = after = 0
if rank < 3:
    yours, packages = lab.small_run(three), lab.small_run(three)
    read = lab.load_shards(plan_reads, *yours, four, step=60)
    zerolab.load(f"{folder}/step-60", *packages)
    after = train(*yours, range(60, 70))
    equal = after == train(*packages, range(60, 70))
    equal = equal and torch.equal(*(lab.all_weights(zero) for zero, _ in (yours, packages)))

# %% tags=["nbval-check-output"]
read = lab.pull("read")[:3]
if lab.predicted("11.1"):
    print("bytes read:", *(f"{n:,}" for n in read), "together", f"{sum(read):,}")
equal = all(lab.pull("equal")[:3])
print("three ranks, by your plan and by zerolab.load: equal, bit for bit:", equal)

# %% [markdown]
# The three together read 12Ψ bytes, nothing twice, and no rank needed the whole model to load its part. `zerolab.load`
# does what you have done, parameter by parameter, so it also loads into another stage.
#
# ## The same samples
#
# The three ranks went on for 10 steps. Is it still the same run?

# %% tags=["nbval-check-output"]
pairs = zip(lab.pull("after", rank=0), losses["never stopped"], strict=True)
apart = max(abs(a - b) for a, b in pairs)
print("losses on 3 ranks, and on 4 that never stopped, equal to 0.01:", apart < 0.01)

# %% [markdown]
# It is, though not to the last bit: three ranks add the same 24 gradients in another order. The **global sample
# index**, step · 24 to step · 24 + 23, says what a step learns from, whatever the number of ranks; only *who computes
# which* depends on that.
#
# Many scripts deal first: rank r of N gets the samples r, r + N, r + 2N, …, and shuffles its own. (`DistributedSampler`
# shuffles first and then deals, which is safe.) Here are 80 steps of one epoch of 6,000 samples: on 4 ranks, and on 4
# for 40 steps and then on 3:

# %% tags=["nbval-check-output"]
ways = {"dealt to 4 ranks": lab.dealt(4, 4), "dealt to 4, then to 3": lab.dealt(4, 3)}
ways["global sample index"] = lab.dealt(1, 1)  # the same for any number of ranks
for name, seen in ways.items():
    again = (seen.bincount() > 1).sum()
    print(f"{name:22} {len(seen):,} samples, {again:>3} seen more than once")

# %% [markdown]
# When the number of ranks changes, so does each rank's part: samples that the epoch has had come again, others never
# come, and nothing reports it. So save the number of the next sample, as above, and derive the rest from it.
#
# ## Write: a save that a crash cannot spoil
#
# The crash may come *while* the checkpoint is being written, which takes a large model minutes, and may fill the disk.
# Here is the obvious save. `crash.play` runs it in a process of its own, and really kills it (SIGKILL) in the middle of
# a write:

# %% tags=["nbval-check-output"]
from zerolab.lab import crash

path = Path(folder, "only.safetensors")
shards = [Path(folder, f"rank-{r}.safetensors").read_bytes() for r in range(2)]
path.write_bytes(shards[0])  # the checkpoint of an hour ago


def obvious(rank, barrier):
    with open(path, "wb") as file:  # from here on the old checkpoint is gone
        file.write(shards[0])


within = crash.Death(rank=0, number=0, within=True)
run = crash.play(obvious, Path(folder), ranks=1, death=within)
print(f"{run.ended[0]}, and {path.stat().st_size} of {len(shards[0]):,} bytes are there")

# %% [markdown]
# The old one is gone, and the new one cannot be read. The remedy is older than GPUs:
#
# 1. **Never touch the old one.** The new checkpoint goes into files of other names. Nobody reads them yet.
# 2. **Make sure that it is on the disk.** `file.write` hands bytes to Python's buffer. `file.flush()` hands them to the
#    system, which writes them some time later; if the power goes, they are lost. `os.fsync(file.fileno())` returns when
#    they are there.
# 3. **All ranks.** One file of four missing is as bad as all four. So the ranks meet, in a
#    *[barrier](../docs/glossary.md#barrier)* (lesson 01), after everyone has written.
# 4. **One rename decides.** A small file, the **index**, says which files are the checkpoint. Write the new index under
#    another name, then rename it: `os.replace(new, old)` is a single operation. Whoever looks finds the old index or
#    the new one, never half of one. (If the power goes, a new name is safe only once its *folder* has been flushed,
#    too.)
# 5. **Remove the old files last.**
#
# So at every moment the index names files that are complete. The check kills ranks before each operation on files and
# in the middle of writes, lets one rank run far ahead, fills a disk, and looks each time whether a checkpoint can be
# loaded. That takes ten seconds or more.

# %%
# %%exercise 11.2

# %%
lab.check("11.2")

# %% [markdown]
# Now on the real shards of two ranks. Both save step 60. Then they save step 70, and a rank is killed before its first
# operation on a file; in the next try before its second, and so on.

# %%
loaded = []
for rank, operation, step in lab.deaths(lab.mine("11.2"), Path(folder, "tries"), shards):
    loaded.append(step)
    print(f"rank {rank} killed just before it {operation}: step {step} loads")

# %% tags=["nbval-check-output"]
complete = set(loaded) == {60, 70} and len(loaded) > 5
print("after every death a complete checkpoint was there:", complete)

# %% [markdown]
# The old one up to the rename, the new one from there on. `zerolab.save` keeps this order, with folders in place of
# files.
#
# How often should you save? A save costs time, and so does what is computed again after a crash. If a save takes S
# seconds and a crash comes every C seconds, the best interval is about √(2·S·C) (Young, 1974): for one minute and three
# hours, 19 minutes.
#
# ## In production
#
# torch has `torch.distributed.checkpoint` (DCP). Here an FSDP2 model is saved by 4 ranks and loaded by 2 of them:

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

trained = lab.fsdp_run(DeviceMesh("cpu", [0, 1, 2, 3]), data, samples(0))
dcp.save(lab.my_state(*trained), checkpoint_id=f"{folder}/dcp")
in_full = lab.full_state(*trained)
loaded = lab.dcp_load_on([0, 1], f"{folder}/dcp")  # in full; None on the other ranks
loaded_equal = loaded and all(map(torch.equal, in_full, loaded))

# %% tags=["nbval-check-output"]
print(*sorted(path.name for path in Path(folder, "dcp").iterdir()))
equal = lab.pull("loaded_equal")[:2]
print("saved by 4 and loaded by 2, parameters and Adam's averages are equal:", equal)

# %% [markdown]
# The same idea: a file for each rank, and one (`.metadata`) that says what is where. But in torch 2.13:
#
# - DCP *fills* what you give it. Adam's state must exist before you load.
# - `.metadata` is a **pickle**: loading a stranger's DCP checkpoint may run the stranger's code. So may DeepSpeed's
#   files.
#
# **DeepSpeed** (0.19.8) writes a file for each rank too, cut for that number of ranks. `ds_to_universal.py`, a job of
# its own, rewrites the checkpoint into a [universal](https://www.deepspeed.ai/tutorials/universal-checkpointing/) one,
# for any number of ranks; `zero_to_fp32.py` joins the *weights* alone.
#
# **torchrun** with `--max-restarts 3` starts all processes again when one dies; with `--nnodes 2:4` also when a node
# leaves or arrives, with another world size
# ([documentation](https://docs.pytorch.org/docs/2.13/elastic/quickstart.html)). Nothing in memory survives: an
# "elastic" run goes on from its checkpoint.
#
# ## More ranks, and which numbers must stay
#
# Two ranks with 6 samples each have trained 12 steps. Then there are four, and the script has `batch_size=6` *per
# rank*, as most have. Spend the next 144 samples in four ways: on two ranks as before; on four with the same
# [**global** batch](../docs/glossary.md#global-batch), 3 for each rank; on four with 6 each; and on four with 6 each
# and twice the learning rate.

# %%
# %%ranks
pair = dist.new_group([0, 1])
# nodes(group, batch, lr) goes on from there: its steps, and the loss afterwards
nodes = lab.two_ranks_train(train, pair, data, f"{folder}/two")  # the 12 steps
rows = {"2 ranks x 6": nodes(pair, 12), "4 ranks x 3": nodes(None, 12)}
rows |= {"4 ranks x 6": nodes(None, 24), "4 ranks x 6, lr x 2": nodes(None, 24, 2e-3)}

# %%
rows = lab.pull("rows", rank=0)
for name, (steps, loss) in rows.items():
    print(f"{name:20} {steps:2} steps, then {loss:.3f} on text that was held back")

# %% tags=["nbval-check-output"]
two, same, more, _ = (loss for _, loss in rows.values())
print("the same global batch on twice the ranks learns the same:", abs(two - same) < 0.02)
print("the same batch per rank learns less from the same samples:", more > same + 0.02)

# %% [markdown]
# More ranks leave a run as it is if three things stay: the **global batch** (so each rank's part shrinks), with it the
# **learning rate** and its schedule, and the **samples** (a global index). Then only the time changes, and not by much
# once a rank's part is small: each step still sends as many bytes (lesson 04). With the batch *per rank* as it was,
# this is another run: half as many updates from the same samples. Doubling the learning rate made up for nearly all of
# that here, early in the run. No cell shows how far that goes.
#
# ## Questions
#
# 1. How is a checkpoint of 64 ranks loaded on 48?
# 2. A colleague saves `model.state_dict()` every hour. The loss jumps after each restart. Why, and what does it take?
# 3. Why is a rename safer than writing into the file? What does it not protect against?
# 4. What does a barrier before the index appears protect against, and what would happen without it?
# 5. Your job gets 16 GPUs instead of 12. Which numbers must stay, and which change?
# 6. A checkpoint of a 70 billion parameter model, AdamW in float32: how many bytes? How many does each of 64 ranks
#    write, and what if rank 0 gathered it all first?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Every rank works out which flat elements of each unit it owns now, intersects that range with the range in each
#    file, and reads the overlaps. No rank holds everything, no byte is read twice. That takes at most 64 + 48 - 1 reads
#    for each unit and each kind of state, since every read ends at a cut.
# 2. Adam starts with empty averages, so its first steps have the full learning rate in every element. Save the
#    optimizer's state and step counter as well, and with them the schedule, the position in the data and the random
#    generators.
# 3. A rename is one operation: a reader finds the old file or the new one. It does not protect against a power cut
#    unless the new file was flushed to the disk (fsync) before and its folder after, nor from a disk that dies.
# 4. Against an index that names a file that some rank has not written yet. If the job dies then, the index names a
#    checkpoint that does not exist, and no longer the old one.
# 5. The global batch, the learning rate and its schedule, and the order of samples stay. The part of each rank shrinks,
#    and may need fewer micro-batches. 16 must divide the global batch, or the parts are uneven.
# 6. 12 bytes per parameter: 840 GB, so 13.1 GB for each of 64 ranks, all at once. Gathered on rank 0, all 840 GB would
#    go through one network card, and would have to fit in one host's memory.

# %%
import shutil

shutil.rmtree(folder)
lab.stop()
lab.progress()
