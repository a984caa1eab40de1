# %% [markdown]
# # 18 · Over to production
#
# **The question.** You know what each stage holds and sends. At work, the run is FSDP2 or DeepSpeed, with a
# configuration file that somebody copied, and a checkpoint that took three weeks. Which line of that file does what?
# And can the three weeks be carried over to another library, or are they lost?
#
# In this lesson the same model runs under torch's DDP, ZeroRedundancyOptimizer and FSDP2, with their numbers beside
# ours. You read a DeepSpeed configuration and a stored run of its settings: that part is for reading, apart from two
# predictions. Then you write a migration, after which training goes on with the same numbers. The last part is your
# first run on two GPUs. The way back to torch is for another day.

# %%
# %load_ext zerolab.lab
import tempfile

from zerolab import lab
from zerolab.lab import plots

lab.start(4)
folder = tempfile.mkdtemp(prefix="zerolab-lesson-18-")
lab.push(folder=folder)

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, batch, calls, held_by, text
from zerolab.measure import ledger, model_states

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Predict
#
# FSDP2 (`fully_shard`) is torch's stage 3. It cuts every parameter along its first dimension, where zerolab cuts a flat
# buffer. Both are told the same units: each block, and the rest. Every first dimension here divides by 4. How many
# bytes does a rank send in a step under FSDP2, as a multiple of those under `zerolab.Zero3`?

# %%
lab.predict("18.1", 1.0)  # × Zero3's bytes

# %% [markdown]
# A DeepSpeed configuration says `"train_batch_size": 48` and `"train_micro_batch_size_per_gpu": 4`, and ran on 4 GPUs
# with 3 micro-batches to a step. One GPU is taken away. How many micro-batches must a step now have, for the same run?

# %%
lab.predict("18.2", 4)  # micro-batches

# %% [markdown]
# And `"reduce_bucket_size": 5e8`, which many files have, because it is the default: how many GB is that in float32?

# %%
lab.predict("18.3", 2.0)  # GB

# %% [markdown]
# ## The same model, five ways
#
# `train` runs five steps and returns what we want to know. Only the lines that build the system differ. For torch's,
# `calls` (lesson 03) counts the collectives, and `held_by` what this rank holds; for ours, `ledger` and `model_states`
# do. Each collective counts as a ring sends it.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def train(model, adam, zero=None, steps=range(5)):
    losses = []
    for step in steps:
        with ledger(zero) if zero else calls() as made:
            loss = model(*batch(words, rank, step, 4, 64))
            loss.backward()
            held = model_states(zero, adam) if zero else held_by(model, adam)
            adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    held = {kind: size for kind, size in held.items() if size}
    return {"sent": int(made.moved if zero else made.sent), "held": held, "losses": losses}


def with_fsdp2():
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_zerolab(stage):
    zero = stage(make_model(), units=[Block])
    return zero.model, torch.optim.AdamW(zero.model.parameters(), lr=1e-3), zero


def with_ddp(optimizer, *inner):
    model = DistributedDataParallel(make_model())
    return model, optimizer(model.parameters(), *inner, lr=1e-3)


runs = {
    "DDP": train(*with_ddp(torch.optim.AdamW)),
    "ZeroRedundancyOptimizer": train(*with_ddp(ZeroRedundancyOptimizer, torch.optim.AdamW)),
    "Zero1": train(*with_zerolab(zerolab.Zero1)),
    "FSDP2": train(*with_fsdp2()),
    "Zero3": train(*with_zerolab(zerolab.Zero3)),
}

# %%
runs = lab.pull("runs", rank=0)
lab.measured("18.1", round(runs["FSDP2"]["sent"] / runs["Zero3"]["sent"], 3))
lab.reveal("18.1")

# %% tags=["nbval-check-output"]
def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


if lab.predicted("18.1"):
    for name in ("FSDP2", "Zero3"):
        run = runs[name]
        held = ", ".join(f"{size:,} {kind}" for kind, size in run["held"].items())
        print(f"{name} sends {run['sent']:,} bytes a step and holds, in bytes: {held}")
furthest = max(apart(run["losses"], runs["DDP"]["losses"]) for run in runs.values())
print("in all five, the losses are DDP's, to 0.00001:", furthest < 1e-5)

# %% tags=["nbval-check-output"]
if lab.predicted("18.1"):
    bars = {}
    for name, run in runs.items():
        label = name.replace("Redundancy", "Redundancy\n")
        bars[label] = {kind: size / 1e6 for kind, size in run["held"].items()}
    title = "What rank 0 holds when backward returns"
    plots.show(plots.stacks(bars, title, "4 ranks, float32 with AdamW", "MB"))

# %% [markdown]
# FSDP2 and `Zero3` agree to the byte. Both hold a quarter of the parameters, of the gradients and of Adam's two
# averages, and both gather the root once and every block twice. They cut at other places, which does not matter as long
# as every first dimension divides by four, as in this model. Where it does not, FSDP2 pads each parameter, and zerolab
# each unit.
#
# ZeroRedundancyOptimizer holds what stage 1 holds. But it deals out whole tensors and leaves DDP as it is (lesson 04),
# so the ranks get unequal parts of the state:

# %% tags=["nbval-check-output"]
for name in ("ZeroRedundancyOptimizer", "Zero1"):
    states = [f"{of[name]['held']['optimizer']:,}" for of in lab.pull("runs")]
    print(f"{name} sends {runs[name]['sent']:,} bytes; state of ranks 0 to 3:", *states)

# %% [markdown]
# It sends 1.5 times what `Zero1` does: DDP all-reduces every gradient, and then each rank broadcasts what it updated.
#
# ## DeepSpeed's file, line by line
#
# Here is a stage-2 configuration, as it lies on the disk beside a training script.

# %%
import json

file = """
{
  "train_batch_size": 48,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 3,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 2,
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "offload_optimizer": {"device": "cpu"}
  }
}
"""
config = json.loads(file)

# %% [markdown]
# What each line does in DeepSpeed 0.19.8, and what it is called here. The keys that begin with `stage3_` come with
# `"stage": 3`.
#
# | key | what it does | here |
# |---|---|---|
# | `train_batch_size` | samples in a step, of all GPUs and micro-batches | your sampler's global batch |
# | `train_micro_batch_size_per_gpu` | samples in one forward | the batch that you pass to `model(...)` |
# | `gradient_accumulation_steps` | backwards in a step | all but the last under `zero.no_sync()` |
# | `gradient_clipping` | clips to this norm before the step | `zero.clip_grad_norm_(1.0)` |
# | `stage` | what is divided | the class: `DDP`, `Zero1`, `Zero2` or `Zero3` |
# | `reduce_bucket_size` | elements that are reduced in one call | no number: a unit; `units=[Block]` decides |
# | `allgather_bucket_size` | elements in one gather at most: a larger one is cut | no number: a unit |
# | `overlap_comm` | reduces a bucket while backward goes on (lesson 09) | `zero.overlap`, on unless you turn it off |
# | `contiguous_gradients` | copies gradients into one buffer as they arrive (lesson 10) | always |
# | `offload_optimizer` | masters and averages stay on the host, and are updated there (lesson 10) | `offload="optimizer"` |
# | `stage3_param_persistence_threshold` | parameters with fewer elements stay whole on every rank, and are gathered once, after the step | none: every parameter is cut |
# | `stage3_max_live_parameters` | how many gathered elements may be there at a time | no number: a block is released after its forward |
# | `stage3_max_reuse_distance` | a gathered parameter that is used again within so many elements is not released in between | none: it is released, and gathered again |
# | `stage3_prefetch_bucket_size` | how many may be gathered ahead (lesson 09) | `zero.prefetch`: the next unit, or none |
# | `stage3_gather_16bit_weights_on_model_save` | lets a save gather the weights | `zero.full_state_dict()` |
#
# Files from old articles have `cpu_offload: true` for `offload_optimizer`, and
# `stage3_gather_fp16_weights_on_model_save` for the last key. DeepSpeed 0.19.8 still reads both.
#
# **The batch.** The first three lines say one thing twice: `train_batch_size` must be micro-batch × accumulation ×
# number of GPUs. Two of the three are enough, and then DeepSpeed works out the third. With all three in it, the file is
# for one number of GPUs. If the batch and the micro-batch are to stay, the accumulation must change:

# %%
def micro_batches(config, ranks):
    per_round = config["train_micro_batch_size_per_gpu"] * ranks
    count, rest = divmod(config["train_batch_size"], per_round)
    return None if rest else count


lab.measured("18.2", micro_batches(config, 3))
lab.reveal("18.2")

# %% tags=["nbval-check-output"]
if lab.predicted("18.2"):
    for ranks in range(1, 9):
        steps = micro_batches(config, ranks)
        said = f"micro-batches: {steps}" if steps else f"48 is no multiple of 4 x {ranks}"
        print(f"GPUs: {ranks}, {said}")

# %% [markdown]
# With all three in the file and three GPUs, DeepSpeed 0.19.8 stops before the first step: `Check batch related
# parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 48 != 4 * 3 * 3`.
# That is the good case. Leave `train_batch_size` out, and it runs with a batch of 36, at the old learning rate, without
# a word (lesson 11). Leave `gradient_accumulation_steps` out, and three GPUs get the right accumulation, 4; five get
# the same error, with `48 != 4 * 2 * 5`.
#
# **Buckets count elements**, not bytes.

# %%
import torch

elements = int(config["zero_optimization"]["reduce_bucket_size"])
bucket = torch.empty(elements, device="meta")  # a size without memory
lab.measured("18.3", bucket.nbytes / 1e9)
lab.reveal("18.3")

# %% [markdown]
# With `contiguous_gradients`, its default, DeepSpeed 0.19.8 allocates the whole `reduce_bucket_size`, however small the
# model is, and in stages 1 and 2 a second one for `overlap_comm`. If a run is out of memory by a few GB, look here
# first. A smaller bucket costs latency: more calls of fewer bytes (lesson 01).
#
# **A stored run.** A command measures each setting, DeepSpeed's where it is installed ([how](../docs/performance.md)),
# in about five minutes:
#
#     python -m zerolab.lab.lessons.lesson18.production
#
# Among others, it printed these rows, with DeepSpeed 0.19.8 and torch 2.13.0 on the CPU with gloo. The model is that of
# this lesson with twice the batch, and buckets have a million elements. In every row, each of the five losses was
# within 0.00001 of our DDP's, which the command checks:
#
# | system | what is changed | bytes sent | peak |
# |---|---|---|---|
# | `DDP` |  | 5,202,432 | 29.7 MB |
# | `Zero2` |  | 5,202,432 | 24.4 MB |
# | `Zero3` |  | 7,581,696 | 23.7 MB |
# | FSDP2 |  | 7,581,696 | 24.9 MB |
# | DeepSpeed 2 |  | 7,803,654 | 36.0 MB |
# | DeepSpeed 2 | `contiguous_gradients: false` | 7,803,654 | 28.5 MB |
# | DeepSpeed 2 | `reduce_bucket_size: 10000000` | 7,803,654 | 104.5 MB |
# | DeepSpeed 2 | the same, and `overlap_comm: false` | 7,803,654 | 68.0 MB |
# | DeepSpeed 2 | `use_multi_rank_bucket_allreduce: false` | 5,202,438 | 33.4 MB |
# | DeepSpeed 3 |  | 5,202,444 | 32.8 MB |
# | DeepSpeed 3 | `stage3_param_persistence_threshold`, `stage3_max_live_parameters`, `stage3_max_reuse_distance` and `stage3_prefetch_bucket_size`: 0 | 7,803,660 | 29.9 MB |
#
# Much of each peak is activations, which no stage divides (lesson 10), and peaks change by about 1 MB from run to run,
# so the order of `Zero2`, `Zero3` and FSDP2 in the last column means nothing. What does:
#
# - *Stage 2* sends 1.5 times what DDP sends. By default it all-reduces its buckets and then gathers the parameters.
#   With `use_multi_rank_bucket_allreduce: false` it reduces each part to its owner instead, in more and smaller calls.
# - *The bucket* of ten million elements is 40 MB. There are two of them with `overlap_comm`, and one without: 36.5 MB
#   less at the peak. Without `contiguous_gradients` there is none: 7.5 MB less, of two with a million elements.
# - *Stage 3* gathers once, not twice. Here every parameter is below the threshold of 100,000 elements, so it stays
#   whole, and stage 3 saves no parameter memory. Only the last row releases everything and gathers it again, which is
#   stage 3 as the paper counts it. `Zero3` and FSDP2 send a little less because the root unit stays gathered in
#   between.
#
# This cell runs the first row of each of DeepSpeed's two stages, where it is installed:

# %%
# %%ranks
from importlib.util import find_spec

from zerolab.lab import production

stages = (2, 3) if find_spec("deepspeed") else ()
rows = {stage: production.run("DeepSpeed", stage) for stage in stages}

# %%
for stage, row in lab.pull("rows", rank=0).items():
    print(f"DeepSpeed {stage}: {row.sent:,.0f} bytes sent, peak {row.peak / 1e6:.1f} MB")
if not lab.pull("rows", rank=0):
    print("DeepSpeed is not installed here: the rows above are a stored run")

# %% [markdown]
# ## Write: from torch to zerolab
#
# A torch run has three things to carry over, and all three go by **name**:
#
# - *weights*: parameters, and buffers such as BatchNorm's averages. A tied weight is one tensor under two names.
# - *state*: Adam's `step`, `exp_avg` and `exp_avg_sq` for each parameter. Frozen parameters have none.
# - *groups*: learning rate, betas, weight decay, and the names of the parameters that they apply to.
#
# A zerolab rank needs its slices. Why by name and not by number? Because units have an order of their own:

# %% tags=["nbval-check-output"]
# %%ranks
zero = zerolab.Zero3(make_model(), units=[Block])
if rank == 0:
    in_units = [name for unit in zero.units for name in unit.names]
    in_model = [name for name, _ in make_model().named_parameters()]
    print("model.parameters():", *in_model[1:4])
    print("the units:         ", *in_units[1:4])

# %% [markdown]
# The root unit comes first, with everything outside the blocks. A migration that goes by number would give the averages
# of block 0's first norm to the final norm, and if the shapes fit, nobody would notice.
#
# Weights and buffers are one call: `zero.load_full_state_dict(weights)` cuts them. For the averages, cut by hand. For
# each `unit` in `zero.units` there are:
#
# - `unit.names` and `unit.params`, the names and this rank's slices, in the same order;
# - `unit.layout.views(flat)`, the place of each *whole* parameter, in its shape, in a flat tensor of `unit.layout.size`
#   elements;
# - `unit.layout.shard(flat, zero.rank)`, this rank's shard, and `unit.layout.slices(shard, zero.rank)`, the slices in
#   it (lesson 04). All three (`views`, `shard`, `slices`) return views: what you copy into them is in `flat`.
# - `unit.master.new_zeros(size)`, a new tensor of the dtype that the optimizer works in.
#
# The state of a parameter is `adam.state[param]`, a dict with the three keys. (The check may take ten seconds.)

# %%
# %%exercise 18.1

# %%
lab.check("18.1")

# %% [markdown]
# ## Measure: three weeks, carried over
#
# Now FSDP2 trains three steps. torch's `get_state_dict` with `full_state_dict=True` makes the checkpoint whole, on rank
# 0, and it is written as safetensors and JSON, since a `.pt` or DCP file would have to be unpickled. Then zerolab goes
# on for three steps, in stage 3 and in stage 1, and beside it the FSDP2 run goes on.

# %%
# %%ranks
from torch.distributed.checkpoint import state_dict
from zerolab.lab import read_checkpoint, write_checkpoint

to_zerolab = lab.mine("18.1")
whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)

model, adam = with_fsdp2()
first = train(model, adam, steps=range(3))["losses"]
weights, kept = state_dict.get_state_dict(model, adam, options=whole)
if rank == 0:
    write_checkpoint(f"{folder}/torch", weights, kept["state"], kept["param_groups"])
dist.barrier()
stayed = train(model, adam, steps=range(3, 6))["losses"]

moved = {}
for stage in (zerolab.Zero3, zerolab.Zero1):
    zero = stage(make_model(), units=[Block])
    theirs = torch.optim.AdamW(zero.model.parameters(), lr=0.5)  # replaced by the saved
    to_zerolab(read_checkpoint(f"{folder}/torch"), zero, theirs)
    moved[stage.__name__] = train(zero.model, theirs, zero, range(3, 6))["losses"]
counters = {values["step"].item() for values in theirs.state.values()}

# %% tags=["nbval-check-output"]
first, stayed, moved = (lab.pull(name, rank=0) for name in ("first", "stayed", "moved"))
for name, losses in moved.items():
    print(f"{name}: three losses are FSDP2's, to 0.00001:", apart(losses, stayed) < 1e-5)
print("Adam's step counters:", lab.pull("counters", rank=0))

# %%
said = f"After the move, at step 4, the losses are {stayed[0]:.4f} (FSDP2 stays), "
said += f"{moved['Zero3'][0]:.4f} (moved to Zero3)."
curves = {"FSDP2 stays": first + stayed, "moved to Zero3": first + moved["Zero3"]}
title = "Carried over after step 3"
plots.show(plots.curves(curves, title, "Steps 1 to 6 of the run", "loss", said))

# %% [markdown]
# The check of your function is stricter: stage 3 in float64 on 1 to 4 ranks, with a tied weight, a buffer, a frozen and
# an unused parameter, to 10⁻¹². Stages 1 and 2 are tried on one number of ranks each. What the function does not carry:
# the position in the data, the schedule's state and the random generators. Save them as extras (lesson 11).
#
# From DeepSpeed, `zero_to_fp32.py` gives weights alone, and `ds_to_universal.py` the averages as well, as pickles:
# unpack those only if they are your own.
#
# ## PyTorch's engine on trial
#
# In lessons 03 to 07 your stages went through promises of `zerolab trial`. FSDP2 can be tried in the same way, here
# with its parameters released after forward (`fsdp2`) and kept (`fsdp2-keep`):

# %%
promises = [
    "plain", "clip by the 2-norm", "resumed by more", "held at the peak", "moved in a step",
    "tied across units", "resumed, state in bf16", "disagree: a learning rate",
]
lab.trial("fsdp2", *promises)
lab.trial("fsdp2-keep", "a forward first")

# %% [markdown]
# Five of these nine are kept. Know the other four before you move a run ([all promises](../docs/trial.md)):
#
# - A weight that two units share is refused, with an error that says what to do.
# - `torch.optim.Optimizer.load_state_dict` gives a state the dtype of its parameter. Averages that you kept in bfloat16
#   come back in float32, twice as large.
# - Nobody compares learning rates. If a schedule goes wrong on one rank, each rank updates its part of the model with a
#   rate of its own, and no error tells you. (PyTorch does not promise one.)
# - After a forward with `reshard_after_forward=False` the model's parameters are the full ones. An optimizer that is
#   made then trains those, and the shards stay as they are
#   ([an issue about it](https://github.com/pytorch/pytorch/issues/149205)). Make the optimizer first.
#
# ## On trial: is DDP with NCCL ZeRO?
#
# > "Wrapping the model in DDP and setting the process group to NCCL is ZeRO."

# %% tags=["nbval-check-output"]
if lab.predicted("18.1"):
    for name in ("DDP", "Zero1", "Zero3"):
        held, sent = sum(runs[name]["held"].values()) / 867_072, runs[name]["sent"]
        print(f"{name} holds {held:.2f} bytes per parameter on rank 0, and sends {sent:,}")

# %% [markdown]
# **False.** DDP replicates everything: 16 bytes a parameter on each rank. The backend decides how bytes travel, not who
# holds what.
#
# Nor does ZeRO send less. Stage 1 sends what torch's DDP sends, to the byte, and so does stage 2 (lesson 05). Stage 3
# sends almost 1.5 times as much, in zerolab and in FSDP2.
#
# ## Your first run on two GPUs
#
# It has a page of its own, [Your first run on 2 GPUs](../docs/first-gpu-run.md), to keep open beside the terminal. In
# short:
#
#     zerolab doctor --ranks 2
#     zerolab plan --params 85.5M --ranks 2 --precision fp32
#     torchrun --nproc-per-node 2 -m zerolab.train --task text --layers 12 --width 768 --stage 2 --steps 100 --checkpoint run
#     watch -n 1 nvidia-smi  # in a second terminal
#
# The page says why `nvidia-smi` shows more than the plan, what an out-of-memory and a hang look like, and what to try
# in which order.
#
# ## For another day: the way back, and DeepSpeed on trial (22 minutes)
#
# On a fresh kernel, run the cells above first.
#
# ### Write: and back
#
# In a zerolab run each rank has slices, and torch expects whole tensors. Weights and buffers are one call again:
# `zero.full_state_dict()` returns them on every rank, under all their names. For the averages, fill a shard
# (`unit.master.new_zeros(unit.layout.shard_size)`) with your slices, let
# `zero.comm.all_gather(flat, shard, unit.name).wait()` put everybody's shard in its place, and cut `flat` by names. The
# averages in `adam.state[param]` are of zerolab's tensor class for slices. `to_local(t)` is the same memory as a plain
# tensor, which you can copy to its place in the shard.

# %%
# %%exercise 18.2

# %%
lab.check("18.2")

# %% [markdown]
# A whole checkpoint does not know how many ranks wrote it, or in which stage. Here stage 1 hands the run above over to
# FSDP2, and both go on.

# %%
# %%ranks
from_zerolab = lab.mine("18.2")
checkpoint = from_zerolab(zero, theirs)  # after six steps, from stage 1
if rank == 0:
    write_checkpoint(f"{folder}/zerolab", **checkpoint)
dist.barrier()
here = train(zero.model, theirs, zero, range(6, 8))["losses"]

model, adam = with_fsdp2()
back = read_checkpoint(f"{folder}/zerolab")
defaults = adam.param_groups[0]  # what the file does not say is as torch has it
groups = [defaults | group for group in back["groups"]]
kept = {"state": back["state"], "param_groups": groups}
state_dict.set_state_dict(
    model, adam, model_state_dict=back["weights"], optim_state_dict=kept, options=whole
)
there = train(model, adam, steps=range(6, 8))["losses"]

# %% tags=["nbval-check-output"]
here, there = lab.pull("here", rank=0), lab.pull("there", rank=0)
print("back in FSDP2, two losses equal to 0.00001:", apart(here, there) < 1e-5)

# %% [markdown]
# ### DeepSpeed on trial
#
# DeepSpeed 0.19.8 went through the promises too, in float32 on two ranks. When you ran FSDP2's, every promise that is
# not kept had a ✗. Here: ✓ kept, ✗ not kept, E refused with an error, – not offered, o its documentation promises
# something else.
#
# | promise | FSDP2 | DeepSpeed 2 | DeepSpeed 3 |
# |---|---|---|---|
# | plain | ✓ | ✓ | ✓ |
# | tied across units | E | ✓ | ✓ |
# | moved in a step | ✓ | o | ✓ |
# | held after backward | ✓ | ✗ | ✗ |
# | the first rank decides | – | ✗ | ✗ |
# | NaN on one rank | ✓ | o | o |
# | an error while accumulating | ✗ | ✗ | ✓ |
# | disagree: a learning rate | o | o | o |
#
# - *Held.* Of its part of the parameters, both stages keep a second copy in float32, even of those that are in float32
#   already: 4Ψ/N bytes more. In mixed precision that copy is the master, which every engine keeps.
# - *Moved.* By default stage 2 all-reduces its buckets and sends 1.5 times what ZeRO-2 needs, as in the stored rows
#   above.
# - *The first rank.* `deepspeed.initialize` sends the first rank's parameters to all, and not its buffers. If a mask or
#   a table differs between the ranks, it stays different.
# - *NaN.* If one rank's gradients have a NaN, all ranks skip the step, and no error tells you.
#   `engine.was_step_applied()` does.
# - *An error while accumulating.* When you then drop what was accumulated, `zero_grad()` does not reach all of it in
#   stage 2: the next step still has it. FSDP2 keeps it too, in the gradients of the parameters that it has gathered.
#
# Where DeepSpeed is installed, this cell puts its stage 2 on trial:

# %%
from importlib.util import find_spec

if find_spec("deepspeed"):
    promises = "plain", "held after backward", "the first rank decides", "NaN on one rank"
    lab.trial("deepspeed2", *promises)
else:
    print("DeepSpeed is not installed here: the table above is a stored run")

# %% [markdown]
# [An engine on trial](../docs/trial.md) has all promises and more engines.
#
# ## Questions
#
# 1. A DeepSpeed file works on 8 GPUs and fails on 6, before the first step. What do you look at?
# 2. A small model is out of memory under DeepSpeed stage 2, with 3 GB missing. Which line?
# 3. You move from FSDP2 to another library with the weights alone. What will the loss do, and why?
# 4. Why must a migration go by name and not by position?
# 5. FSDP2 and a flat ZeRO-3 send the same bytes here. For which model would they not?
# 6. `nvidia-smi` shows 21 GB, and the plan says 14. Is something wrong?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. The batch: `train_batch_size` must be micro-batch × accumulation × GPUs. Change the accumulation or the
#    micro-batch, and keep the global batch. If it does not divide by 6 × micro-batch, choose another micro-batch.
# 2. `reduce_bucket_size`: 5e8 elements are 2 GB in float32, whatever the model needs, and `overlap_comm` doubles it.
# 3. It jumps at the first updates: an Adam without averages moves every element a full learning rate (lesson 11).
# 4. Libraries order parameters differently: by module, by unit, by size. Equal shapes make a mix-up silent.
# 5. One with parameters whose first dimension does not divide by N: FSDP2 pads each of them, a flat buffer is padded
#    once for each unit. With many small vectors, or a first dimension smaller than N, it counts.
# 6. Not necessarily. The plan has model states alone. Activations, units in flight, the CUDA context and the
#    allocator's reserve come on top. `torch.cuda.max_memory_allocated()` is nearer to the truth than `nvidia-smi`.

# %%
import shutil

shutil.rmtree(folder)
lab.stop()
lab.progress()
