# %% [markdown]
# # 11 · Checkpoints that survive
#
# **The question.** When Meta trained Llama 3 on 16,384 GPUs, something stopped the run 466 times in 54 days, 419 of them
# unplanned ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4). That is an unplanned stop every three
# hours. What was not on the disk by then was computed, paid for, and lost.
#
# A **[checkpoint](../docs/glossary.md#checkpoint)** is what has to be on the disk so that training goes on as if it had
# never stopped. Five things can go wrong with it: ranks may overwrite each other's; it may be incomplete, or fit only
# the number of ranks that wrote it; the crash may come while it is being written; and the run may go on from it with
# other samples. In this lesson you see each of them, and write two functions that prevent the worst.

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
from zerolab.lab import GPT, Block, windows

data = windows(None, 64)  # real text: samples of 64 bytes, and for each the 64 to predict


def make(group=None, lr=3e-3):
    torch.manual_seed(0)
    zero = zerolab.Zero3(GPT(layers=2, width=64), units=[Block], group=group)
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=lr)


psi = sum(param.numel() for param in GPT(layers=2, width=64).parameters())
print(f"Ψ = {psi:,} parameters")

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
# process runs that line, at the same moment and with the same path, and with a sharded model each saves its own shards. Try
# it: every rank saves 40 tensors (16 MB) that are filled with its rank, three times over.

# %%
# %%ranks
mine = {f"tensor {i}": torch.full((100_000,), float(rank)) for i in range(40)}
found = []
for _ in range(3):
    dist.barrier()
    torch.save(mine, f"{folder}/model.pt")
    dist.barrier()
    if rank == 0:
        try:
            loaded = torch.load(f"{folder}/model.pt", weights_only=True)
            found.append("".join(str(int(tensor[0])) for tensor in loaded.values()))
        except Exception as error:
            found.append(f"cannot be read: {type(error).__name__}")

# %%
for row in lab.pull("found", rank=0):
    print("whose tensor:", row)

# %% [markdown]
# Each digit is one of the 40 tensors in the file, and says which rank it came from. The rows differ from run to run. A row
# of one digit means that one rank wrote last and everything that the other three saved is gone. A row with several digits
# is worse: the ranks wrote over each other at the same offsets, and `torch.load` opens the patchwork **without an error**,
# since all four files had the same size.
#
# Two rules follow. Ranks that hold different things write *different files*. And a format should be able to tell when a
# file is not what was saved: zerolab's has a checksum for every piece. (A third: a `.pt` file is a pickle, and
# unpickling a stranger's file runs the code in it, unless `weights_only=True`. The rest of this lesson is safetensors
# (raw tensors under a JSON header) and JSON, which hold nothing that runs.)
#
# ## Weights alone are no checkpoint
#
# Say the weights have been saved properly. Is that enough? Train 60 steps and stop. Then go on in two ways: with everything
# that the run had, and with its weights alone and a new AdamW, as happens when a script saves `model.state_dict()`.
#
# Adam moves an element by lr · m/√v, where m is the average of its gradients and v of their squares (both corrected for
# having started at zero). In a trained run, gradients change sign from step to step, so m is much smaller than √v. Predict:
# in the *first* step after resuming with weights alone, how many learning rates does the median element move?

# %%
lab.predict("11.2", 1.0)  # learning rates

# %% [markdown]
# `samples(step)` gives the numbers of the 24 samples of a step, for all ranks together, and each rank takes its part of
# them. Why this matters comes later.

# %%
# %%ranks
GLOBAL = 24  # samples in a step, of all ranks together
order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(0))


def samples(step, batch=GLOBAL):
    return order[step * batch : (step + 1) * batch]


def one_step(zero, adam, numbers, source=data):
    mine = numbers.chunk(zero.world_size)[zero.rank]  # this rank's part of the batch
    loss = zero.model(source.inputs[mine].long(), source.targets[mine].long())
    adam.zero_grad()
    loss.backward()
    adam.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=zero.comm.group)
    return mean.item() / zero.world_size


def train(zero, adam, steps):
    return [one_step(zero, adam, samples(step)) for step in steps]


def full(zero):  # all parameters, end to end
    with zero.full_parameters():
        return torch.cat([param.detach().flatten() for param in zero.model.parameters()])


zero, adam = make()
before_stop = train(zero, adam, range(60))
zerolab.save(f"{folder}/step-60", zero, adam)
weights = zero.full_state_dict()

# %%
# %%ranks


def go_on(zero, adam):
    start = full(zero)
    losses = train(zero, adam, range(60, 61))
    moved = ((full(zero) - start).abs() / 3e-3).median().item()
    return losses + train(zero, adam, range(61, 70)), moved, full(zero)


never_stopped, moved_never, end_never = go_on(zero, adam)

again = make()
zerolab.load(f"{folder}/step-60", *again)
everything, moved_everything, end_everything = go_on(*again)

again = make()
again[0].load_full_state_dict(weights)
weights_alone, moved_weights, _ = go_on(*again)
same = everything == never_stopped and torch.equal(end_everything, end_never)

# %%
lab.measured("11.2", round(lab.pull("moved_weights", rank=0), 2))
lab.reveal("11.2")

# %% tags=["nbval-check-output"]
same = all(lab.pull("same"))
print("with everything, losses and weights are those of never stopping, bit for bit:", same)

# %%
if lab.predicted("11.2"):
    before = lab.pull("before_stop", rank=0)[50:]
    names = {"everything": "with everything", "never_stopped": "never stopped"}
    names["weights_alone"] = "weights alone"
    curves = {said: before + lab.pull(name, rank=0) for name, said in names.items()}
    alone, never = curves["weights alone"], curves["never stopped"]
    moved = [lab.pull(name, rank=0) for name in ("moved_weights", "moved_never")]
    said = f"The stop is after step 60. At step 62 the loss is {alone[11]:.2f} with weights"
    said += f" alone, not {never[11]:.2f}: the median element had moved {moved[0]:.2f}"
    said += f" learning rates, not {moved[1]:.2f}."
    title, steps = "Going on after a stop", "Steps 51 to 70 of the run"
    plots.show(plots.curves(curves, title, steps, "loss", said, first=51))
    assert alone[10] == never[10] and alone[11] > never[11] + 0.05

# %% [markdown]
# The first loss after the stop is the same, since the weights are. Then comes the first update. A new Adam has seen one
# gradient: m/√v is g/|g| = ±1, so every element that has a gradient moves a *full* learning rate, whether its gradient
# is large or noise. Some progress is undone at once, and each restart costs it again. On a real curve this looks like a
# bad batch.
#
# A checkpoint therefore has: parameters; the optimizer's state and its step counter; the position in the data; the
# learning-rate schedule; the states of the random number generators (dropout); and buffers such as BatchNorm's averages. It
# has no gradients, because it is written after the step. (With fp16 the loss scale belongs to it too, lesson 08.)
#
# ## A file per rank
#
# `zerolab.save` has just written such a checkpoint. Here is what is in the folder:

# %%
from pathlib import Path

from safetensors import safe_open

total = 0
for path in Path(folder, "step-60").glob("*.safetensors"):
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            total += 0 if name.startswith("rank") else file.get_tensor(name).nbytes
lab.measured("11.1", total)
lab.reveal("11.1")

# %% tags=["nbval-check-output"]
import json

content = json.loads(Path(folder, "step-60", "manifest.json").read_text())["content"]
print(*sorted(path.name for path in Path(folder, "step-60").iterdir()), sep="\n")
name = "blocks.0.mlp.up.weight"
for piece in content["pieces"][f"parameters/{name}"]:
    print(f"{name}: elements {piece['start']} to {piece['stop']} are in {piece['file']}")
if lab.predicted("11.1"):
    assert total == 12 * 136_960

# %% [markdown]
# Every rank writes only what it owns: no gather, no rank that needs memory for all, and the files are written in parallel.
# Together they have 4 bytes for each parameter and 8 for Adam's two averages of it: 12Ψ, whatever the stage and the number
# of ranks. (On top there is a header, and the state of each rank's random number generator.) The **manifest**, a JSON file,
# says which elements of what are in which file.
#
# Why is that last part needed? Because of the next morning: one GPU is broken, and four files are to be loaded on three
# ranks.
#
# ## Write: who reads what
#
# First on a small scale. A unit of 38 elements (lesson 04) is in four files. Each has a shard of 10 elements, so 2 in the
# last one are padding. Three ranks will cut it into shards of 13. Predict: how many reads do the three ranks need together,
# if a read takes neighbouring elements from one file?

# %%
lab.predict("11.3", 6)  # reads

# %%
import re

files = [(f"rank-{r}.safetensors", 10) for r in range(4)]
picture = plots.who_reads_what(files, 38, 3)
lab.measured("11.3", int(re.search(r"in (\d+) reads", picture[1])[1]))
lab.reveal("11.3")
if lab.predicted("11.3"):
    plots.show(picture)

# %% [markdown]
# Laid end to end, the four files *are* the unit, and then padding. Only the cuts move: there were three inside, at 10, 20
# and 30, and now there are two, at 13 and 26. So the 38 elements fall into 3 + 2 + 1 = 6 pieces, and each is one read. A
# rank's share of every file is the overlap of two ranges:
#
#     start, stop = max(first, begin), min(last, begin + length)      # nothing if start >= stop
#
# where the rank owns the elements [first, last) of the unit and the file has [begin, begin + length). What is left is
# book-keeping: `start` and `stop` have to count from the beginning of *that file*, the place from the beginning of the *new
# shard*, and padding is nobody's. It is also where everybody goes wrong once.

# %%
# %%exercise 11.1

# %%
lab.check("11.1")

# %% [markdown]
# ## Measure: four files on three ranks
#
# Now a real one. The four ranks write their shards of the run at step 60 by hand, one safetensors file each, with three
# tensors for each unit: parameters, and Adam's `exp_avg` and `exp_avg_sq`.

# %%
# %%ranks
from safetensors import safe_open
from safetensors.torch import save_file

plan_reads = lab.mine("11.1")
KINDS = ("parameters", "exp_avg", "exp_avg_sq")


def slices_of(unit, adam, kind):  # this rank's slice of each parameter, or of its average
    if kind == "parameters":
        return [zerolab.to_local(param).detach() for param in unit.params]
    return [zerolab.to_local(adam.state[param][kind]) for param in unit.params]


def my_shards(zero, adam):
    shards = {}
    for unit in zero.units:
        for kind in KINDS:
            flat = shards[f"{kind}/{unit.name}"] = torch.zeros(unit.layout.shard_size)
            places = unit.layout.slices(flat, zero.rank)
            for place, tensor in zip(places, slices_of(unit, adam, kind)):
                place.copy_(tensor)
    return shards


zero, adam = make()
zerolab.load(f"{folder}/step-60", zero, adam)
save_file(my_shards(zero, adam), f"{folder}/rank-{rank}.safetensors")
dist.barrier()

# %% [markdown]
# Then rank 3 is gone. The other three form a group of their own, build a fresh model, and know nothing of the first run but
# its four files. Your function says what each of them reads. (`unit.layout.slots` has the place of each parameter in the
# unit, so the last one's `end` is the number of elements without padding.)

# %%
# %%ranks


@torch.no_grad()
def load_shards(zero, adam, files, step):
    read = 0
    for unit in zero.units:
        with safe_open(files[0], framework="pt") as file:
            length = file.get_slice(f"parameters/{unit.name}").get_shape()[0]
        end, sizes = unit.layout.slots[-1].end, [(name, length) for name in files]
        plan = plan_reads(sizes, end, zero.world_size, zero.rank)
        for param in unit.params:  # Adam's state of a parameter, to be filled
            empty = {kind: torch.empty_like(zerolab.to_local(param)) for kind in KINDS[1:]}
            adam.state[param] = {"step": torch.tensor(float(step))} | empty
        for kind in KINDS:
            flat = torch.zeros(unit.layout.shard_size)
            for name, start, stop, at in plan:
                with safe_open(name, framework="pt") as file:
                    shard = file.get_slice(f"{kind}/{unit.name}")
                    flat[at : at + stop - start] = shard[start:stop]
                read += 4 * (stop - start)
            parts = unit.layout.slices(flat, zero.rank)
            for place, part in zip(slices_of(unit, adam, kind), parts):
                place.copy_(part)
    return read


three = dist.new_group([0, 1, 2])
read = equal = after = 0
if rank < 3:
    zero3, adam3 = make(three)
    four = [f"{folder}/rank-{r}.safetensors" for r in range(4)]
    read = load_shards(zero3, adam3, four, step=60)
    packages = make(three)
    zerolab.load(f"{folder}/step-60", *packages)
    after = train(zero3, adam3, range(60, 70))
    equal = after == train(*packages, range(60, 70))
    equal = equal and torch.equal(full(zero3), full(packages[0]))

# %% tags=["nbval-check-output"]
everyone = lab.pull("read")
if lab.predicted("11.1"):
    each = " ".join(f"rank {r} {everyone[r]:,}" for r in range(3))
    print(f"bytes read: {each} together {sum(everyone):,}")
equal = all(lab.pull("equal")[:3])
print("three ranks, by your plan and by zerolab.load: equal, bit for bit:", equal)

# %% [markdown]
# The three together read 12Ψ bytes: nothing twice, and nothing for nothing. Nobody ever held the whole model.
# `zerolab.load` does what you have done, parameter by parameter, so it also loads into another stage.
#
# ## The same samples
#
# The three ranks went on for 10 steps. Is it still the same run?

# %% tags=["nbval-check-output"]
on_three, never = lab.pull("after", rank=0), lab.pull("never_stopped", rank=0)
apart = max(abs(a - b) for a, b in zip(on_three, never, strict=True))
print("losses on 3 ranks, and on 4 that never stopped, equal to 0.01:", apart < 0.01)

# %% [markdown]
# It is, though not to the last bit: a mean over three ranks adds the same 24 gradients in another order than a mean over
# four. It is the same run because of how `samples` is written. The **global sample index**, step · 24 to step · 24 + 23,
# says what a step learns from, and does not depend on how many ranks there are. Only *who computes which* does.
#
# Many scripts do it the other way round: they deal the samples (or the files) to the ranks, rank r of N gets r, r + N,
# r + 2N, …, and each rank shuffles its own. (`DistributedSampler` shuffles first and deals then, which is safe.) Then
# the number of ranks is part of the data. Here are 80 steps of one epoch, on 4 ranks, and on 4 ranks for 40 steps and
# on 3 for the rest:

# %% tags=["nbval-check-output"]
import torch

SAMPLES, GLOBAL = 6_000, 24


def part(step, rank, ranks):  # what a rank that deals and shuffles for itself computes
    own = torch.arange(rank, SAMPLES, ranks)
    own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(rank))]
    return own.split(GLOBAL // ranks)[step]


def dealt(ranks_later):
    sizes = [4] * 40 + [ranks_later] * 40
    return [part(step, r, sizes[step]) for step in range(80) for r in range(sizes[step])]


ways = {"dealt to 4 ranks": dealt(4), "dealt to 4, then to 3": dealt(3)}
ways["global sample index"] = [part(step, 0, 1) for step in range(80)]  # for any number
for name, parts in ways.items():
    seen = torch.cat(parts).bincount(minlength=SAMPLES)
    print(f"{name:22} {seen.sum():,} samples, {(seen > 1).sum():>3} seen more than once")

# %% [markdown]
# As long as the number of ranks stays, no sample comes twice. When it changes, each rank's part is another: samples
# come again that the epoch has had, others will not come at all, and nothing reports it. So save the number of the next
# sample, and derive everything else from it.
#
# ## Write: a save that a crash cannot spoil
#
# The crash may come *while* the checkpoint is being written. This is likelier than it sounds: a large model takes minutes
# to write, and a disk that has just filled up makes it crash. Here is the obvious save. `crash.play` runs it in a process of
# its own, and really kills it in the middle of what it writes (SIGKILL: what the out-of-memory killer sends):

# %% tags=["nbval-check-output"]
from zerolab.lab import crash

path = Path(folder, "only.safetensors")
data = Path(folder, "rank-0.safetensors").read_bytes()
path.write_bytes(data)  # the checkpoint of an hour ago


def obvious(rank, barrier):
    with open(path, "wb") as file:  # from here on the old checkpoint is gone
        file.write(data)


within = crash.Death(rank=0, number=0, within=True)
run = crash.play(obvious, Path(folder), ranks=1, death=within)
print(f"{run.ended[0]}, and {path.stat().st_size} of {len(data):,} bytes are there")

# %% [markdown]
# The old one is gone, and the new one cannot be read: the run is lost, not an hour of it. The remedy is older than
# GPUs:
#
# 1. **Never touch the old one.** The new checkpoint goes into files of other names. Nobody reads them yet.
# 2. **Make sure that it is on the disk.** `file.write` hands bytes to the system, which writes them some time later; if the
#    power goes, they are lost. `os.fsync(file.fileno())` returns when they are there. (And `file.flush()` before it: Python
#    has a buffer too.)
# 3. **All ranks.** One file of four missing is as bad as all four. So the ranks meet, in a *[barrier](../docs/glossary.md#barrier)* (lesson 01), after
#    everyone has written.
# 4. **One rename decides.** A small file, the **index**, says which files are the checkpoint. Write the new index under
#    another name, then rename it: `os.replace(new, old)` is a single operation of the file system. Whoever looks finds the
#    old index or the new one, never half of one. (If the power goes, a new name is safe only once its *folder* is on the disk
#    as well: `fd = os.open(folder, os.O_RDONLY)`, `os.fsync(fd)`, `os.close(fd)`.)
# 5. **Remove the old files last.**
#
# So at every moment the index names files that are complete. Your function gets `barrier()`, so that it works for any group
# of ranks. The check kills a rank just before each of its operations on files, and in the middle of what it writes; lets one
# rank run far ahead of the others; and fills a disk. Every time it looks whether a checkpoint can be loaded. That takes ten
# seconds or more.

# %%
# %%exercise 11.2

# %%
lab.check("11.2")

# %% [markdown]
# Now on the real shards of two ranks. First both save step 60. Then they save again, as step 70, and a rank is killed: in
# the first try before its first operation on a file, in the next before its second, and so on.

# %%
import shutil

save_checkpoint = lab.mine("11.2")
parts = [Path(folder, f"rank-{r}.safetensors").read_bytes() for r in range(2)]
tries = Path(folder, "tries")


def saves(step):
    return lambda rank, barrier: save_checkpoint(tries, step, parts[rank], rank, 2, barrier)


loaded = []
for rank in (0, 1):
    for number in range(100):
        shutil.rmtree(tries, ignore_errors=True)
        tries.mkdir()
        crash.play(saves(60), tries, ranks=2)
        run = crash.play(saves(70), tries, ranks=2, death=crash.Death(rank, number))
        if run.ended.get(rank) != "killed":
            break  # it got through: there is no operation of this number
        step, files = crash.load(tries)  # raises an error if no checkpoint is complete
        assert files == parts
        loaded.append(step)
        print(f"rank {rank} killed just before it {run.of(rank)[-1]}: step {step} loads")

# %% tags=["nbval-check-output"]
complete = set(loaded) == {60, 70} and len(loaded) > 5
print("after every death a complete checkpoint was there:", complete)

# %% [markdown]
# The old one up to the rename, the new one from there on, and never anything else. `zerolab.save` keeps this order,
# with folders in place of files and without an index.
#
# How often should you save? A save costs time, and so does what is computed again after a crash. If a save takes S seconds
# and a crash comes every C seconds on average, the sum is smallest at an interval of about √(2·S·C) (Young, 1974): one
# minute and three hours give 19 minutes.
#
# ## In production
#
# torch has `torch.distributed.checkpoint` (DCP). Here an FSDP2 model is saved by 4 ranks and loaded by 2 of them:

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves


def fsdp(mesh):
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def whole(model, adam):  # every tensor of the model's and of Adam's state, in full
    options = state_dict.StateDictOptions(full_state_dict=True)
    leaves = tree_leaves(state_dict.get_state_dict(model, adam, options=options))
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]


def parts(model, adam):  # what this rank has of both
    return dict(zip(("model", "adam"), state_dict.get_state_dict(model, adam)))


model, adam = fsdp(DeviceMesh("cpu", [0, 1, 2, 3]))
mine = samples(0).chunk(4)[rank]
model(data.inputs[mine].long(), data.targets[mine].long()).backward()
adam.step()
dcp.save(parts(model, adam), checkpoint_id=f"{folder}/dcp")
saved = whole(model, adam)

two = DeviceMesh("cpu", [0, 1])
loaded_equal = None
if rank < 2:
    fewer = fsdp(two)
    state = parts(*fewer)
    dcp.load(state, checkpoint_id=f"{folder}/dcp", process_group=two.get_group())
    ours, adams = state.values()
    state_dict.set_state_dict(*fewer, model_state_dict=ours, optim_state_dict=adams)
    loaded_equal = all(map(torch.equal, saved, whole(*fewer)))
dist.barrier()

# %% tags=["nbval-check-output"]
print(*sorted(path.name for path in Path(folder, "dcp").iterdir()))
equal = lab.pull("loaded_equal")[:2]
print("saved by 4 and loaded by 2, parameters and Adam's averages are equal:", equal)

# %% [markdown]
# The same idea: a file for each rank, and one (`.metadata`) that says what is where. What differs in torch 2.13:
#
# - DCP *fills* what you give it. Adam's state must exist before you load.
# - `.metadata` is a **pickle**. Loading a stranger's DCP checkpoint may run the stranger's code; so may DeepSpeed's files.
# - `dcp.async_save` copies the state to host memory and writes while training goes on. Your five steps still apply: the old
#   checkpoint must stay until the new metadata is there.
# - Data position and schedule are yours to add to the state, with any library, and with DCP the generators too.
#
# **DeepSpeed** (0.19.8) writes a file for each rank too, cut for that number of ranks. `zero_to_fp32.py`, which it puts into
# every checkpoint folder, joins the *weights* into float32 files: weights alone, as above. `ds_to_universal.py` rewrites the
# checkpoint into a [universal](https://www.deepspeed.ai/tutorials/universal-checkpointing/) one, which another number of ranks
# can load. It is a job of its own, with time and disk space of its own.
#
# **torchrun** with `--max-restarts 3` ends all processes when one dies, and starts all of them again; with `--nnodes
# 2:4` it also does so when a node leaves or arrives, with another world size
# ([documentation](https://docs.pytorch.org/docs/stable/elastic/quickstart.html)). Nothing in memory survives: an
# "elastic" run is one that may be killed often, because it saves often and goes on from its checkpoint, as `torchrun
# --nproc-per-node 4 --max-restarts 3 -m zerolab.train --checkpoint run` does.
#
# ## On trial
#
# > "Training too slow? Just add nodes."
#
# Two ranks with 6 samples each have trained 12 steps. Then there are four ranks. The script has `batch_size=6` *per
# rank*, as most have, and nobody changes it. Compare four ways to spend the next 144 samples: on two ranks as before;
# on four with the same [**global** batch](../docs/glossary.md#global-batch), 3 for each rank; and on four with 6 each,
# with the learning rate as it is and with twice as much.

# %%
# %%ranks
pair = dist.new_group([0, 1])
if rank < 2:
    zero2, adam2 = make(pair, lr=1e-3)
    for step in range(12):
        one_step(zero2, adam2, samples(step, 12))
    zerolab.save(f"{folder}/two", zero2, adam2)
dist.barrier()


@torch.no_grad()
def held_back(zero):  # the mean loss on text that was held back
    some = torch.arange(48) * (len(data.validation_inputs) // 48)  # from all of it
    mine = some.chunk(zero.world_size)[zero.rank]
    inputs, targets = data.validation_inputs[mine], data.validation_targets[mine]
    loss = zero.model(inputs.long(), targets.long())
    dist.all_reduce(loss, group=zero.comm.group)
    return loss.item() / zero.world_size


def nodes(group, batch, lr=1e-3):
    zero, adam = make(group)
    zerolab.load(f"{folder}/two", zero, adam)
    adam.param_groups[0]["lr"] = lr
    parts = order[12 * 12 :][:144].split(batch)  # the 144 samples that come next
    for part in parts:
        one_step(zero, adam, part)
    return len(parts), held_back(zero)


rows = {"2 ranks x 6": nodes(pair, 12) if rank < 2 else None}
rows |= {"4 ranks x 3": nodes(None, 12), "4 ranks x 6": nodes(None, 24)}
rows["4 ranks x 6, lr x 2"] = nodes(None, 24, 2e-3)

# %%
rows = lab.pull("rows", rank=0)
for name, (steps, loss) in rows.items():
    print(f"{name:20} {steps:2} steps, then {loss:.3f} on text that was held back")

# %% tags=["nbval-check-output"]
two, same, more, _ = (loss for _, loss in rows.values())
print("the same global batch on twice the ranks learns the same:", abs(two - same) < 0.02)
print("the same batch per rank learns less from the same samples:", more > same + 0.02)
skipped = 12 * 24 - 12 * 12
print("a script that counts steps takes 12 of 24 for done, and skips", skipped, "samples")

# %% [markdown]
# **Verdict: true under a condition.** More ranks leave a run as it is if three things stay: the **global batch** (so each
# rank's part shrinks), with it the **learning rate** and its schedule, and the **samples** (a global index). Then only the
# time changes, and not by much once a rank's part is small: each step still sends as many bytes (lesson 04). Leave the batch
# *per rank* as it is, and you have a different training run: here, half as many updates from the same samples. Doubling the
# learning rate as well made up for that here, early in the run (the last row). It does not work without limit.
#
# ## Questions
#
# 1. How is a checkpoint of 64 ranks loaded on 48?
# 2. A colleague saves `model.state_dict()` every hour. The loss jumps after each restart. Why, and what does it take?
# 3. Why is a rename safer than writing into the file? What does it not protect against?
# 4. What does a barrier before the index appears protect against, and what would happen without it?
# 5. Your job gets 16 GPUs instead of 12. Which numbers must stay, and which change?
# 6. A checkpoint of a 70 billion parameter model, AdamW in float32: how many bytes? How many does each of 64 ranks write,
#    and what if rank 0 gathered it all first?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Every rank works out which flat elements of each unit it owns now, intersects that range with the range in each file,
#    and reads the overlaps: start and stop in the file, and a place in its new shard. No rank holds everything, no byte is
#    read twice. That takes at most 64 + 48 - 1 reads for each unit and each kind of state, since every read ends at a cut.
# 2. Adam starts with empty averages, so its first steps have the full learning rate in every element. Save the optimizer's
#    state and step counter as well, and with them the schedule, the position in the data and the random generators.
# 3. A rename is one operation: a reader finds the old file or the new one. It does not protect against a power cut unless the
#    new file was flushed to the disk (fsync) before and its folder after, nor from a disk that dies: keep a copy elsewhere.
# 4. Against an index that names a file that some rank has not written yet. If the job dies at that moment, the index
#    names a checkpoint that does not exist, and the old one is no longer named.
# 5. The global batch, the learning rate and its schedule, and the order of samples stay. The part of each rank shrinks,
#    and may need fewer micro-batches. 16 must divide the global batch, or the parts are uneven.
# 6. 12 bytes per parameter: 840 GB, so 13.1 GB for each of 64 ranks, written in parallel. Gathered on rank 0, all 840 GB
#    would go through one network card and one process, and 840 GB would have to fit in its host memory.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
