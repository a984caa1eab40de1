# %% [markdown]
# # 11 · Checkpoints that survive
#
# **The question.** When Meta trained Llama 3 on 16,384 GPUs, something stopped the run 466 times in 54 days, 419 of them
# unplanned ([arXiv 2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4). That is an unplanned stop every three
# hours. What was not on the disk by then was computed, paid for, and lost.
#
# A **[checkpoint](../docs/glossary.md#checkpoint)** is what has to be on the disk so that training goes on as if it had never stopped. Four things go wrong
# with it in practice: it is not complete, it only fits the number of ranks that wrote it, the crash comes while it is being
# written, or the run goes on from it with other samples. In this lesson you see each of them happen, and write the two
# functions that prevent the worst.

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

data = windows(None, 64)  # real text, cut into samples of 64 bytes, each with the 64 bytes to predict


def make(group=None, lr=3e-3):
    torch.manual_seed(0)
    zero = zerolab.Zero3(GPT(layers=2, width=64), units=[Block], group=group)
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=lr)


psi = sum(param.numel() for param in GPT(layers=2, width=64).parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# The model is trained with AdamW in float32, on 4 ranks in stage 3. How many bytes of parameters and optimizer state are in
# its checkpoint, all files together? (Not counting the step counters. It is written right after the optimizer's step.)

# %%
lab.predict("11.1", 12 * 136_960)  # bytes

# %% [markdown]
# ## One path for all
#
# A script that was written for one process saves with `torch.save(model.state_dict(), "model.pt")`. On four ranks, each
# process runs that line, at the same moment and with the same path. With a sharded model each of them also saves something
# else: its own shards. Try it: every rank saves 40 tensors (16 MB) that are filled with its rank, three times over.

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
# is worse: the file is a patchwork of several ranks, because they wrote over each other at the same offsets. `torch.load`
# opens it **without an error**. All four files had the same size, so every header fits every tensor.
#
# Two rules follow. Ranks that hold different things write *different files*. And a format should be able to tell when a
# file is not what was saved: zerolab's has a checksum for every piece.
#
# (`weights_only=True` matters as well. A `.pt` file is a pickle, and unpickling a stranger's file runs the code in it.
# Everything else in this lesson is safetensors and JSON, which hold numbers and nothing that runs.)
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
    return losses + train(zero, adam, range(61, 76)), moved, full(zero)


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
print("with everything, losses and weights equal the run that never stopped, bit for bit:", all(lab.pull("same")))

# %%
if lab.predicted("11.2"):
    before = lab.pull("before_stop", rank=0)[50:]
    curves = {"with everything": before + lab.pull("everything", rank=0)}
    curves["never stopped"] = before + lab.pull("never_stopped", rank=0)
    curves["weights alone"] = before + lab.pull("weights_alone", rank=0)
    alone, never = curves["weights alone"], curves["never stopped"]
    rest = [lab.pull(name, rank=0) for name in ("moved_never", "moved_weights")]
    said = f"The stop is after step 10 of the picture. At step 12 the loss is {alone[11]:.2f} with weights alone, not "
    said += f"{never[11]:.2f}: the median element had moved {rest[1]:.2f} learning rates, not {rest[0]:.2f}."
    plots.show(plots.curves(curves, "Going on after a stop", "Steps 51 to 76 of the run", "loss", said))
    assert alone[10] == never[10] and alone[11] > never[11] + 0.05

# %% [markdown]
# The first loss after the stop is the same, since the weights are. Then comes the first update. A new Adam has seen one
# gradient: m/√v is g/|g| = ±1, so every element moves a *full* learning rate, whether its gradient is large or noise. Some
# progress is undone at once, and each restart costs it again. On the curve of a real run this looks like a bad batch, so
# nobody looks for it.
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
for path in sorted(Path(folder, "step-60").iterdir()):
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            state = [file.get_tensor(name).nbytes for name in sorted(file.keys()) if not name.startswith("rank")]
            total += sum(state)
lab.measured("11.1", total)
lab.reveal("11.1")

# %% tags=["nbval-check-output"]
import json

manifest = json.loads(Path(folder, "step-60", "manifest.json").read_text())["content"]
print(*sorted(path.name for path in Path(folder, "step-60").iterdir()), sep="\n")
for piece in manifest["pieces"]["parameters/blocks.0.mlp.up.weight"]:
    print(f"blocks.0.mlp.up.weight: elements {piece['start']} to {piece['stop']} are in {piece['file']}")
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
from safetensors.torch import load_file, save_file

plan_reads = lab.mine("11.1")
KINDS = ("parameters", "exp_avg", "exp_avg_sq")


def tensors_of(unit, adam, kind):  # this rank's slice of each parameter of the unit, or of its state
    return [zerolab.to_local(param) if kind == "parameters" else adam.state[param][kind] for param in unit.params]


def my_shards(zero, adam):
    shards = {}
    for unit in zero.units:
        for kind in KINDS:
            flat = torch.zeros(unit.layout.shard_size)
            for place, tensor in zip(unit.layout.slices(flat, zero.rank), tensors_of(unit, adam, kind)):
                place.copy_(tensor)
            shards[f"{kind}/{unit.name}"] = flat
    return shards


zero, adam = make()
zerolab.load(f"{folder}/step-60", zero, adam)
save_file(my_shards(zero, adam), f"{folder}/rank-{rank}.safetensors")
root = zero.units[0]
sizes = root.name, root.layout.shard_size, root.layout.slots[-1].end
dist.barrier()

# %% [markdown]
# Then rank 3 is gone. The other three form a group of their own, build a fresh model, and know nothing of the first run but
# its four files. Your function says what each of them reads.

# %%
# %%ranks


@torch.no_grad()
def load_shards(zero, adam, files, step):
    read = 0
    for unit in zero.units:
        end = unit.layout.slots[-1].end  # without the padding
        with safe_open(files[0], framework="pt") as file:
            length = file.get_slice(f"parameters/{unit.name}").get_shape()[0]
        plan = plan_reads([(name, length) for name in files], end, zero.world_size, zero.rank)
        for kind in KINDS:
            flat = torch.zeros(unit.layout.shard_size)
            for name, start, stop, at in plan:
                with safe_open(name, framework="pt") as file:
                    flat[at : at + stop - start] = file.get_slice(f"{kind}/{unit.name}")[start:stop]
                read += 4 * (stop - start)
            for param, part in zip(unit.params, unit.layout.slices(flat, zero.rank)):
                if kind == "parameters":
                    zerolab.to_local(param).copy_(part)
                else:
                    adam.state[param][kind] = part.clone()
                    adam.state[param]["step"] = torch.tensor(float(step))
    return read


three = dist.new_group([0, 1, 2])
read = equal = after = 0
if rank < 3:
    zero3, adam3 = make(three)
    read = load_shards(zero3, adam3, [f"{folder}/rank-{r}.safetensors" for r in range(4)], 60)
    packages = make(three)
    zerolab.load(f"{folder}/step-60", *packages)
    after = train(zero3, adam3, range(60, 76))
    equal = after == train(*packages, range(60, 76)) and torch.equal(full(zero3), full(packages[0]))

# %% tags=["nbval-check-output"]
everyone = lab.pull("read")
if lab.predicted("11.1"):
    print("bytes read:", *(f"rank {r} {everyone[r]:,}" for r in range(3)), f"together {sum(everyone):,}")
print("three ranks, by your plan and by zerolab.load: equal, bit for bit:", all(lab.pull("equal")[:3]))

# %% [markdown]
# The three together read 12Ψ bytes: nothing twice, and nothing for nothing. Nobody ever held the whole model. Here are the
# cuts in one of the units, with the reads that your function planned:

# %%
plan_reads = lab.mine("11.1")
name, length, end = lab.pull("sizes", rank=0)
files = [(f"rank-{r}.safetensors", length) for r in range(4)]
plans = [plan_reads(files, end, 3, rank) for rank in range(3)]
if lab.predicted("11.3"):
    plots.show(plots.who_reads_what(files, end, plans))

# %% [markdown]
# `zerolab.load` does what you have done, parameter by parameter. So it also loads into another stage, and into more ranks
# as well as fewer.
#
# ## The same samples
#
# The three ranks went on for 16 steps. Is it still the same run?

# %% tags=["nbval-check-output"]
on_three, never = lab.pull("after", rank=0), lab.pull("never_stopped", rank=0)
apart = max(abs(a - b) for a, b in zip(on_three, never))
print("losses on 3 ranks and on the 4 that never stopped differ by less than 0.01:", apart < 0.01)

# %% [markdown]
# It is, though not to the last bit: a mean over three ranks adds the same 24 gradients in another order than a mean over
# four. It is the same run because of how `samples` is written. The **global sample index**, step · 24 to step · 24 + 23,
# says what a step learns from, and does not depend on how many ranks there are. Only *who computes which* does.
#
# Many scripts do it the other way round: rank r draws from a stream of its own, seeded with its rank. Then the number of
# ranks is part of the data. Here is what the two do when 4 ranks have trained 40 steps and 3 ranks train the next 40:

# %% tags=["nbval-check-output"]
import torch

SAMPLES, GLOBAL = 6_000, 24


def own_stream(rank, step, count):  # every rank shuffles for itself
    mine = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(rank))
    return mine[step * count : (step + 1) * count]


def by_rank():
    for step in range(80):
        ranks = 4 if step < 40 else 3
        yield torch.cat([own_stream(rank, step, GLOBAL // ranks) for rank in range(ranks)])


def by_index():
    shuffled = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    for step in range(80):
        yield shuffled[step * GLOBAL : (step + 1) * GLOBAL]


for name, stream in (("a stream per rank", by_rank()), ("global sample index", by_index())):
    seen = torch.cat(list(stream)).bincount(minlength=SAMPLES)
    print(f"{name:20} {int(seen.sum()):,} samples, {int((seen > 1).sum()):>3} of them seen more than once")

# %% [markdown]
# With a stream for each rank, samples repeat while others have not been seen at all, and nothing reports it. So save the
# number of the next sample, and derive everything else from it.
#
# ## Write: a save that a crash cannot spoil
#
# The crash may come *while* the checkpoint is being written. This is likelier than it sounds: a large model takes minutes
# to write, and a disk that has just filled up makes it crash. Here is the obvious save, in a process of its own that
# is really killed in the middle (SIGKILL: what the out-of-memory killer and an impatient scheduler send):

# %% tags=["nbval-check-output"]
import subprocess
import sys

script = """
import os, signal, sys
path, data = sys.argv[1], sys.stdin.buffer.read()
with open(path, "wb") as file:                  # from here on the old checkpoint is gone
    file.write(data[: len(data) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)        # the crash
    file.write(data[len(data) // 2 :])
"""
path = Path(folder, "only.safetensors")
data = Path(folder, "rank-0.safetensors").read_bytes()
path.write_bytes(data)
died = subprocess.run([sys.executable, "-c", script, str(path)], input=data)
print("exit status", died.returncode, f"· {path.stat().st_size / len(data):.0%} of the file is there")
try:
    with safe_open(path, framework="pt") as file:
        print("it can be loaded")
except Exception as error:
    print("it cannot be loaded:", type(error).__name__)

# %% [markdown]
# The old one gone, the new one unreadable: the run is lost, not three hours of it. The remedy is older than GPUs:
#
# 1. **Never touch the old one.** The new checkpoint goes into files of other names. Nobody reads them yet.
# 2. **Make sure that it is on the disk.** `file.write` hands bytes to the system, which writes them some time later; if the
#    power goes, they are lost. `os.fsync(file.fileno())` returns when they are there. (And `file.flush()` before it: Python
#    has a buffer too.)
# 3. **All ranks.** One file of four missing is as bad as all four. So the ranks meet, in a *[barrier](../docs/glossary.md#barrier)* (lesson 01), after
#    everyone has written.
# 4. **One rename decides.** A small file, the **index**, says which files are the checkpoint. Write the new index under
#    another name, then rename it: `os.replace(new, old)` is a single operation of the file system. Whoever looks finds the
#    old index or the new one, never half of one.
# 5. **Remove the old files last.**
#
# So at every moment the index names files that are complete. Your function gets `barrier()`, so that it works for any group
# of ranks. The check kills a rank just before each of its operations on files, and in the middle of what it writes; lets one
# rank run far ahead of the others; and fills a disk. Every time it looks whether a checkpoint can be loaded.

# %%
# %%exercise 11.2

# %%
lab.check("11.2")

# %% [markdown]
# Now on the real shards of two ranks. First both save step 60. Then they save again, as step 70, and a rank is killed: in
# the first try before its first operation on a file, in the next before its second, and so on.

# %%
import shutil

from zerolab.lab import crash

save_checkpoint = lab.mine("11.2")
parts = [Path(folder, f"rank-{r}.safetensors").read_bytes() for r in range(2)]
tries = Path(folder, "tries")


def saves(step):
    return lambda rank, barrier: save_checkpoint(tries, step, parts[rank], rank, 2, barrier)


def killed(rank, number):
    """Which step can be loaded afterwards; and what the rank was about to do, or None if it got through."""
    shutil.rmtree(tries, ignore_errors=True)
    tries.mkdir()
    crash.play(saves(60), tries, ranks=2)
    run = crash.play(saves(70), tries, ranks=2, death=crash.Death(rank, number))
    step, files = crash.load(tries)  # raises an error if there is no complete checkpoint
    assert files == parts
    return step, str(run.of(rank)[-1]) if run.ended.get(rank) == "killed" else None


table = []
for rank in (0, 1):
    for number in range(100):
        step, last = killed(rank, number)
        if last is None:
            break
        table.append(step)
        print(f"rank {rank} killed just before it {last}: step {step} loads")

# %% tags=["nbval-check-output"]
print("after every death a complete checkpoint was there:", set(table) == {60, 70} and len(table) > 5)

# %% [markdown]
# The old one up to the rename, the new one from there on, and never anything else. `zerolab.save` follows the same five
# steps, with folders in place of files; the tests kill it at every operation too, and also kill whole training runs.
#
# How often should you save? A save costs time, and so does what is computed again after a crash. If a save takes S seconds
# and a crash comes every C seconds on average, the sum is smallest at an interval of about √(2·S·C) (Young, 1974): one
# minute and three hours give 19 minutes.
#
# ## Going on with new data
#
# The run is over. Now the model is to learn something else: here Python source code, the standard library's decimal
# arithmetic, in place of English. What of the checkpoint should come along? Try three ways, 16 steps each, with the
# *position in the data* set back to 0.

# %%
# %%ranks
import _pydecimal

code = windows(_pydecimal.__file__, 64)
shuffled = torch.randperm(len(code.inputs), generator=torch.Generator().manual_seed(1))
steps_of_code = len(code.inputs) // GLOBAL


def on_code(load_all, warm_up):
    zero, adam = make()
    if load_all:
        zerolab.load(f"{folder}/step-60", zero, adam)
    else:
        zero.load_full_state_dict(weights)
    losses = []
    for step in range(16):
        adam.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / warm_up)
        losses.append(one_step(zero, adam, shuffled[step * GLOBAL : (step + 1) * GLOBAL], code))
    return losses, english(zero)


@torch.no_grad()
def english(zero):  # the mean loss on text that was held back
    some = torch.arange(48) * (len(data.validation_inputs) // 48)  # from all of it
    mine = some.chunk(zero.world_size)[zero.rank]
    loss = zero.model(data.validation_inputs[mine].long(), data.validation_targets[mine].long())
    dist.all_reduce(loss, group=zero.comm.group)
    return loss.item() / zero.world_size


ways = {"all of it": on_code(True, 1), "weights alone": on_code(False, 1), "weights, warm-up": on_code(False, 8)}
zero, adam = make()
zerolab.load(f"{folder}/step-60", zero, adam)
old_english = english(zero)

# %%
ways, old_english = lab.pull("ways", rank=0), lab.pull("old_english", rank=0)
second = ", ".join(f"{losses[1]:.2f} ({name})" for name, (losses, _) in ways.items())
after = ", ".join(f"{text:.2f} ({name})" for name, (_, text) in ways.items())
said = f"At step 2 the loss is {second}. On the English that was held back, the loss goes from {old_english:.2f} to {after}."
curves = {name: losses for name, (losses, _) in ways.items()}
plots.show(plots.curves(curves, "From English to Python", "16 steps on new data, after 60 on the old", "loss", said))
assert sum(text for _, text in ways.values()) / len(ways) > old_english
print(
    f"the new data have {lab.pull('steps_of_code', rank=0)} steps; with the old position, 60 of them would be skipped"
)

# %% [markdown]
# All three learn Python, and all three forget English: that the loss on the old text rises is the price of new data, and no
# checkpoint prevents it (mixing old samples in does). What each way needs:
#
# - *All of it*: Adam's averages are of the old gradients, and fade within some dozen steps for m, and hundreds for v
#   (β₂ = 0.999). Take it if the new data resemble the old.
# - *Weights alone* begins with the full-size steps that you saw above; look at step 2. A **warm-up**, a learning rate that
#   grows from almost nothing, lets Adam collect its averages before it may take large steps.
# - In each case the *position* starts again. A resumed script that keeps the step counter skips the first 60 steps of the
#   new data without a word, and its learning-rate schedule goes on where the old one ended, which is often at zero.
#
# ## In production
#
# torch has `torch.distributed.checkpoint` (DCP). Here an FSDP2 model is saved by 4 ranks and loaded by 2 of them:

# %%
# %%ranks
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def fsdp(mesh):
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def state_of(model, adam):
    model_state, adam_state = get_state_dict(model, adam)
    return {"model": model_state, "adam": adam_state}


def step_fsdp(model, adam):
    mine = samples(0).chunk(4)[rank]
    model(data.inputs[mine].long(), data.targets[mine].long()).backward()
    adam.step()
    adam.zero_grad()


model, adam = fsdp(DeviceMesh("cpu", [0, 1, 2, 3]))
step_fsdp(model, adam)
dcp.save(state_of(model, adam), checkpoint_id=f"{folder}/dcp")


def held(model, adam):  # this rank's part of every parameter and of Adam's averages
    tensors = [t for p in model.parameters() for t in (p, adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])]
    return {str(number): t.detach().to_local().contiguous() for number, t in enumerate(tensors)}


save_file(held(model, adam), f"{folder}/fsdp-{rank}.safetensors")  # to compare with
dist.barrier()
two = DeviceMesh("cpu", [0, 1])
loaded_equal = None
if rank < 2:
    fewer, other_adam = fsdp(two)
    state = state_of(fewer, other_adam)
    dcp.load(state, checkpoint_id=f"{folder}/dcp", process_group=two.get_group())
    set_state_dict(fewer, other_adam, model_state_dict=state["model"], optim_state_dict=state["adam"])
    halves = [load_file(f"{folder}/fsdp-{2 * rank + i}.safetensors") for i in (0, 1)]
    both = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    loaded_equal = all(torch.equal(both[name], t) for name, t in held(fewer, other_adam).items())
dist.barrier()

# %%
for name in ("dcp", "step-60") if lab.predicted("11.1") else ():
    files = sorted(Path(folder, name).iterdir())
    print(f"{name:8}", ", ".join(f"{file.name} {file.stat().st_size:,}" for file in files))

# %% tags=["nbval-check-output"]
print("saved by 4 and loaded by 2, parameters and Adam's averages are equal:", lab.pull("loaded_equal")[:2])

# %% [markdown]
# The same idea, file by file: a file for each rank, and one (`.metadata`) that says what is where. (DCP's files are larger
# here because each piece of a tensor has a header of its own, of about a kilobyte. With large tensors that does not count.)
# What differs:
#
# - DCP *fills* what you give it. You build the model and its state first, then load into it. `get_state_dict` makes an
#   optimizer state to be filled even before the first step.
# - `.metadata` is a **pickle**. Loading a stranger's DCP checkpoint may run the stranger's code; so may DeepSpeed's files.
# - `dcp.async_save` copies the state to host memory and writes while training goes on. Your five steps still apply: a
#   checkpoint counts when its metadata is there, and the old one must stay until then.
# - Data position, schedule and generators are yours to add to the state, with any library.
#
# **DeepSpeed** writes a file for each rank too, cut for that number of ranks. Two scripts translate. `zero_to_fp32.py`,
# which it puts into every checkpoint folder, joins the shards of the *weights* into float32 files, to publish or to
# fine-tune: weights alone, as above. `ds_to_universal.py` rewrites the whole checkpoint into a
# [universal](https://www.deepspeed.ai/tutorials/universal-checkpointing/) one, which a run with another number of ranks, or
# with other parallelism, can load. It is a job of its own: plan time and disk space for it.
#
# **torchrun** watches the processes. With `--max-restarts 3` it ends all of them when one dies and starts all of them again;
# with `--nnodes 2:4` it also does so when a node leaves or arrives, with new ranks and another world size
# ([documentation](https://docs.pytorch.org/docs/stable/elastic/quickstart.html)). That is all it does. Nothing in memory
# survives, so an "elastic" run is one that is killed often and loads its checkpoint well. Your script must find the newest
# complete checkpoint, load it at whatever world size it wakes up in, and go on with the right sample. `zerolab train` does
# that: `torchrun --nproc-per-node 4 --max-restarts 3 -m zerolab.train --checkpoint run`.
#
# ## On trial
#
# > "Training too slow? Just add nodes."
#
# Two ranks with 6 samples each have trained 12 steps. Then there are four ranks. The script has `batch_size=6` *per rank*,
# as most have, and nobody changes it. Compare three ways to spend the next 144 samples: on two ranks as before; on four with
# the same [**global** batch](../docs/glossary.md#global-batch), 3 for each rank; and on four with 6 each.

# %%
# %%ranks
pair = dist.new_group([0, 1])
if rank < 2:
    zero2, adam2 = make(pair, lr=1e-3)
    for step in range(12):
        one_step(zero2, adam2, samples(step, 12))
    zerolab.save(f"{folder}/two", zero2, adam2)
dist.barrier()


def nodes(group, batch, lr=1e-3):
    zero, adam = make(group)
    zerolab.load(f"{folder}/two", zero, adam)
    adam.param_groups[0]["lr"] = lr
    first, steps = 12 * 12, 144 // batch  # go on with the next sample, for as many steps as 144 samples last
    for step in range(steps):
        one_step(zero, adam, order[first + step * batch : first + (step + 1) * batch])
    return steps, english(zero)


rows = {"2 ranks x 6": nodes(pair, 12) if rank < 2 else None}
rows |= {"4 ranks x 3": nodes(None, 12), "4 ranks x 6": nodes(None, 24), "4 ranks x 6, lr x 2": nodes(None, 24, 2e-3)}

# %%
rows = lab.pull("rows", rank=0)
for name, (steps, loss) in rows.items():
    print(f"{name:20} {steps:2} steps for 144 samples, then a loss of {loss:.3f} on text that was held back")

# %% tags=["nbval-check-output"]
losses = {name: loss for name, (_, loss) in rows.items()}
same = abs(losses["2 ranks x 6"] - losses["4 ranks x 3"]) < 0.02
print("the same global batch on twice the ranks learns the same:", same)
print("the same batch per rank learns less from the same samples:", losses["4 ranks x 6"] > losses["4 ranks x 3"] + 0.1)
print("a script that counts steps skips", 12 * 24 - 12 * 12, "samples: it takes 12 steps of 24 for done")

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
#    new file was flushed to the disk (fsync) before, nor from a disk that dies: keep a copy elsewhere.
# 4. From an index that names a file that some rank has not written yet. If the job dies at that moment, the index names a
#    checkpoint that does not exist, and the old one is no longer named.
# 5. The global batch, the learning rate and its schedule, and the order of samples stay. The part of each rank changes, and
#    the number of micro-batches if it no longer fits in memory. 16 must divide the global batch, or the parts are uneven.
# 6. 12 bytes per parameter: 840 GB, so 13.1 GB for each of 64 ranks, written in parallel. Gathered on rank 0, all 840 GB
#    would go through one network card and one process, and 840 GB would have to fit in its host memory.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
