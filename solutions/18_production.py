# %% [markdown]
# # 18 · Over to production
#
# **The question.** You know what each stage holds and sends. At work, the run is FSDP2 or DeepSpeed, with a configuration
# file that somebody copied, and a checkpoint that took three weeks. Which line of that file does what? And can the three
# weeks be carried over to another library, or are they lost?
#
# In this lesson the same model runs under torch's FSDP2, ZeroRedundancyOptimizer, and DeepSpeed where it is installed,
# with their numbers beside ours. You read two DeepSpeed configurations line by line. Then you write a migration, from torch
# and back, after which training goes on with the same numbers. The last part is your first run on two GPUs.

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
from zerolab.lab import GPT, Block, batch, calls, text
from zerolab.measure import ledger, model_states, peak_of

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
# buffer. Both are told the same units: each block, and the rest. How many bytes does a rank send in a step under FSDP2, as
# a multiple of those under `zerolab.Zero3`?

# %%
lab.predict("18.1", 1.0)  # × Zero3's bytes

# %% [markdown]
# A DeepSpeed configuration says `"train_batch_size": 48` and `"train_micro_batch_size_per_gpu": 4`, and ran on 4 GPUs with 3
# micro-batches to a step. One GPU is taken away. How many micro-batches must a step now have, for the same run?

# %%
lab.predict("18.2", 4)  # micro-batches

# %% [markdown]
# And `"reduce_bucket_size": 5e8`, which many files have, because it is the default: how many GB is that in float32?

# %%
lab.predict("18.3", 2.0)  # GB

# %% [markdown]
# ## The same model, four ways
#
# `train` runs five steps and returns what we want to know. Only the lines that build the system differ. For torch's, `calls`
# (lesson 04) counts the collectives; for ours, `ledger` does. Both count each collective as a ring sends it.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def local(tensor):  # FSDP2's parameters are DTensors, which know their whole shape and hold a part
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensors):
    return sum(local(tensor).nbytes for tensor in tensors)


def held_by(model, adam):  # for ours, `model_states` counts the same three
    state = getattr(adam, "optim", adam).state
    return {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(param.grad for param in model.parameters()),
        "optimizer": bytes_of(value for values in state.values() for value in values.values()),
    }


def train(model, adam, zero=None, steps=5):
    losses = []
    for step in range(steps):
        with calls() if zero is None else ledger(zero) as made:
            loss = model(*batch(words, rank, step, 4, 64))
            loss.backward()
            held = held_by(model, adam) if zero is None else model_states(zero, adam)
            adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    sent = made.sent if zero is None else made.moved
    return {"sent": int(sent), "held": {kind: size for kind, size in held.items() if size}, "losses": losses}


def with_fsdp2():
    model = make_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def with_zerolab(stage):
    zero = stage(make_model(), units=[Block])
    return zero.model, torch.optim.AdamW(zero.model.parameters(), lr=1e-3), zero


def with_torchs_zero1():
    model = DistributedDataParallel(make_model())
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)


builders = {
    "Zero1": lambda: with_zerolab(zerolab.Zero1),
    "ZeroRedundancy\nOptimizer": with_torchs_zero1,
    "Zero3": lambda: with_zerolab(zerolab.Zero3),
    "FSDP2": with_fsdp2,
}
runs = {name: train(*build()) for name, build in builders.items()}

# %%
runs = lab.pull("runs", rank=0)
lab.measured("18.1", round(runs["FSDP2"]["sent"] / runs["Zero3"]["sent"], 3))
lab.reveal("18.1")

# %% tags=["nbval-check-output"]
if lab.predicted("18.1"):
    for name in ("Zero3", "FSDP2"):
        held = ", ".join(f"{size:,} {kind}" for kind, size in runs[name]["held"].items())
        print(f"{name}: {runs[name]['sent']:,} bytes sent in a step; held, in bytes: {held}")
ours, theirs = runs["Zero3"]["losses"], runs["FSDP2"]["losses"]
print("five losses equal to 0.00001:", max(abs(a - b) for a, b in zip(ours, theirs)) < 1e-5)

# %% tags=["nbval-check-output"]
if lab.predicted("18.1"):
    bars = {name: {kind: size / 1e6 for kind, size in run["held"].items()} for name, run in runs.items()}
    plots.show(plots.stacks(bars, "What rank 0 holds when backward returns", "4 ranks, float32 with AdamW", "MB"))

# %% [markdown]
# To the byte. Both hold a quarter of the parameters, of the gradients and of Adam's two averages, and both gather the root
# once and every block twice. They cut at other places, which does not matter as long as every first dimension divides by
# four, as in this model. Where it does not, FSDP2 pads each parameter, and zerolab each unit.
#
# ZeroRedundancyOptimizer holds what stage 1 holds. But it deals out whole tensors and leaves DDP as it is (lesson 04), so
# the ranks get unequal parts of the state:

# %% tags=["nbval-check-output"]
everyone = lab.pull("runs")
for name in ("Zero1", "ZeroRedundancy\nOptimizer"):
    states = [run[name]["held"]["optimizer"] for run in everyone]
    print(f"{name.replace(chr(10), ''):23} state of ranks 0 to 3:", *(f"{state:,}" for state in states), "bytes")
    print(f"{'':23} sent in a step: {everyone[0][name]['sent']:,} bytes")
a, b = (runs[name]["losses"] for name in ("Zero1", "ZeroRedundancy\nOptimizer"))
print("five losses equal to 0.00001:", max(abs(x - y) for x, y in zip(a, b)) < 1e-5)

# %% [markdown]
# It sends 1.5 times what `Zero1` does: DDP all-reduces every gradient, and then each rank broadcasts what it updated.
#
# **Peaks.** What is held when backward returns is not the most that was held. `peak_of` (lesson 05) builds a system anew
# and asks the allocator for the peak of a whole step, activations and buffers included.


# %%
# %%ranks
import gc


def steps_of(build):
    model, adam, *_ = build()

    def step():
        loss = model(*batch(words, rank, 0, 8, 64))
        loss.backward()
        adam.step()
        adam.zero_grad()

    return step


def peak(build):
    gc.collect()  # so that nothing of an earlier system is freed in between, and counted
    if rank == 0:  # the others only take part: a profiler on every rank would be slow
        return peak_of(lambda: steps_of(build), torch.device("cpu"), steps=2)
    step = steps_of(build)
    step()
    step()


peaks = {name: peak(build) for name, build in builders.items()}

# %%
peaks = lab.pull("peaks", rank=0)
for name, size in peaks.items():
    print(f"{name.replace(chr(10), ''):23} peak of a step {size / 1e6:.1f} MB")

# %% [markdown]
# Most of a peak is activations, which no stage cuts (lesson 10): `Zero3` holds 3.5 MB of model states, and its peak is near
# 24. torch's two are higher because of copies: DDP fills its buckets beside the gradients, and FSDP2 copies a unit into and
# out of its buffers (lesson 07). Peaks change by a block or so (0.8 MB) from run to run, with the moment at which a
# collective's memory is given back. `zerolab bench` compares a larger model, and times:
# [Performance](../docs/performance.md).
#
# ## DeepSpeed's file, line by line
#
# Here is a stage-2 configuration, and what a stage-3 one adds. The cell reads it as a program would, and says for each key
# what it is called here.

# %% tags=["nbval-check-output"]
stage2 = {
    "train_batch_size": 48,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu"},
    },
}
stage3 = {
    "stage": 3,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_gather_16bit_weights_on_model_save": True,
}
HERE = {
    "train_batch_size": "your sampler's global batch",
    "train_micro_batch_size_per_gpu": "the batch that you pass to model(...)",
    "gradient_accumulation_steps": "backwards in a step; all but the last under zero.no_sync()",
    "gradient_clipping": "zero.clip_grad_norm_(1.0) before the step",
    "stage": "the class: DDP, Zero1, Zero2 or Zero3",
    "reduce_bucket_size": "no number: a bucket is a unit; units=[Block] decides",
    "allgather_bucket_size": "no number: a unit",
    "overlap_comm": "zero.overlap, on unless you turn it off",
    "contiguous_gradients": "always: a unit's gradients lie in one flat bucket",
    "offload_optimizer": 'offload="optimizer"',
    "stage3_prefetch_bucket_size": "zero.prefetch: the next unit, or none",
    "stage3_param_persistence_threshold": "none: every parameter is cut, however small",
    "stage3_max_live_parameters": "no number: a block is released after its forward",
    "stage3_gather_16bit_weights_on_model_save": "zero.full_state_dict(), export_weights",
}
for key, value in [*stage2.items(), *stage2["zero_optimization"].items(), *stage3.items()]:
    if key != "zero_optimization" and not (key == "stage" and value == 2):
        print(f"{key:42} {HERE[key]}")

# %% [markdown]
# **The batch.** The first three lines say one thing twice: `train_batch_size` must be micro-batch × accumulation × number
# of GPUs. Two of the three are enough, and then DeepSpeed works out the third. With all three in it, the file is for one
# number of GPUs. If the batch and the micro-batch are to stay, the accumulation must change:

# %%
from zerolab.lab import GPT


def micro_batches(config, ranks):
    per_round = config["train_micro_batch_size_per_gpu"] * ranks
    whole, rest = divmod(config["train_batch_size"], per_round)
    return None if rest else whole


lab.measured("18.2", micro_batches(stage2, 3))
lab.reveal("18.2")

# %% tags=["nbval-check-output"]
if lab.predicted("18.2"):
    for ranks in range(1, 9):
        steps = micro_batches(stage2, ranks)
        print(
            f"{ranks} GPU{'s' * (ranks > 1)}:",
            f"{steps} micro-batches" if steps else "48 cannot be divided into micro-batches of 4",
        )

# %% [markdown]
# With all three in the file and three GPUs, DeepSpeed 0.19.8 stops before the first step: `Check batch related parameters.
# train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 48 != 4 * 3 * 3`. That is the good
# case. Leave `train_batch_size` out, and it runs with a batch of 36, at the old learning rate, without a word (lesson 11).
# Leave `gradient_accumulation_steps` out, and three GPUs get the right one; five get the same error.
#
# **Buckets count elements**, not bytes.

# %%
import torch

bucket = torch.empty(stage2["zero_optimization"]["reduce_bucket_size"], device="meta")  # sizes without memory
lab.measured("18.3", bucket.nbytes / 1e9)
lab.reveal("18.3")

# %% tags=["nbval-check-output"]
if lab.predicted("18.3"):
    print(f"{bucket.numel():,} elements: {bucket.nbytes / 1e9} GB in float32, {bucket.nbytes / 2e9} GB in bfloat16")
    print(f"the model of this lesson has {sum(p.numel() for p in GPT(layers=4, width=128).parameters()):,} parameters")

# %% [markdown]
# DeepSpeed allocates the whole `reduce_bucket_size`, however small the model is, and in stages 1 and 2 a second one for
# `overlap_comm`. If a run is out of memory by a few GB, look here first. A smaller bucket costs latency: more calls of
# fewer bytes (lesson 01). `allgather_bucket_size` is only a limit: it cuts one large gather into several.
#
# The other lines, and where the course measured what they are about:
#
# - `overlap_comm` reduces a bucket while backward goes on. It hides communication only if there is enough to compute per
#   byte (lesson 09).
# - `contiguous_gradients` copies gradients into the bucket as they arrive, so that memory does not fragment (lesson 10).
# - `offload_optimizer` keeps masters and averages in the host's memory, and updates there (lesson 10).
# - `stage3_param_persistence_threshold` is the number of elements below which a parameter stays whole on every rank. Then
#   it is gathered once, after the step.
# - `stage3_max_live_parameters` is how many gathered elements may be there at a time.
# - `stage3_prefetch_bucket_size` is how many may be gathered ahead (lesson 09).
#
# **Old names.** Files from old articles have keys that changed. `cpu_offload: true` became `offload_optimizer: {"device":
# "cpu"}`, and `cpu_offload_param` became `offload_param`. `stage3_gather_fp16_weights_on_model_save` became
# `..._16bit_...`. DeepSpeed 0.19.8 still reads the old ones. In torch, `FullyShardedDataParallel` (FSDP1) became
# `fully_shard`, and its `ShardingStrategy.SHARD_GRAD_OP` is `reshard_after_forward=False`.
#
# **No counterpart.** TensorFlow has no stages. Its `MirroredStrategy` replicates and all-reduces, as DDP does. Keras's
# `ModelParallel` does cut variables, along axes that you write down for each of them: that is nearer to lesson 15.
#
# Where DeepSpeed is installed, this cell runs it, on the same data with the same AdamW:

# %%
# %%ranks
import contextlib
import importlib.util
import io
import logging


def with_deepspeed(stage):
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,  # torch's AdamW, as in the other runs
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # otherwise it clips at 1
    }
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        engine = deepspeed.initialize(model=model, optimizer=adam, config=config, dist_init_required=False)[0]
    losses = []
    for step in range(5):
        with calls() as made:
            loss = engine(*batch(words, rank, step, 8, 64))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    state = bytes_of(t for kept in adam.state.values() for t in kept.values() if torch.is_tensor(t))
    return {"sent": made.sent, "state": state, "losses": losses}


installed = importlib.util.find_spec("deepspeed") is not None
deepspeeds = {stage: with_deepspeed(stage) for stage in (2, 3)} if installed else {}

# %%
if not lab.pull("installed", rank=0):
    print("DeepSpeed is not installed here, so it was not run: docs/performance.md says how to add it")
for stage, run in lab.pull("deepspeeds", rank=0).items():
    apart = max(abs(a - b) for a, b in zip(run["losses"], runs["Zero3"]["losses"]))
    print(f"stage {stage}: {run['sent']:,.0f} bytes sent, {run['state']:,} bytes of state, losses {apart:.1g} apart")

# %% [markdown]
# Each of the settings, with its bytes and its peak, is measured by a command that takes five minutes:
#
#     python -m zerolab.lab.production
#
# It printed these rows with DeepSpeed 0.19.8 and torch 2.13.0, on the CPU with gloo. The model and the batches are those of
# this lesson, and buckets have a million elements. In every row, each of the five losses was within 0.000001 of our DDP's:
#
# | system | what is changed | bytes sent | peak |
# |---|---|---|---|
# | `DDP` |  | 5,202,432 | 29.7 MB |
# | `Zero2` |  | 5,202,432 | 24.4 MB |
# | `Zero3` |  | 7,581,696 | 23.7 MB |
# | FSDP2 |  | 7,581,696 | 24.9 MB |
# | DeepSpeed 2 |  | 7,803,654 | 36.0 MB |
# | DeepSpeed 2 | `overlap_comm: false` | 7,803,654 | 35.4 MB |
# | DeepSpeed 2 | `contiguous_gradients: false` | 7,803,654 | 28.5 MB |
# | DeepSpeed 2 | `reduce_bucket_size: 10000000` | 7,803,654 | 104.5 MB |
# | DeepSpeed 2 | the same, and `overlap_comm: false` | 7,803,654 | 68.0 MB |
# | DeepSpeed 2 | `use_multi_rank_bucket_allreduce: false` | 5,202,438 | 33.4 MB |
# | DeepSpeed 3 |  | 5,202,444 | 32.8 MB |
# | DeepSpeed 3 | `stage3_param_persistence_threshold: 0` | 5,202,444 | 37.7 MB |
# | DeepSpeed 3 | that, `stage3_max_live_parameters`, `stage3_max_reuse_distance` and `stage3_prefetch_bucket_size`: 0 | 7,803,660 | 29.9 MB |
#
# Read it with the file beside you:
#
# - *Stage 2* sends 1.5 times what DDP sends. By default it all-reduces its buckets and then gathers the parameters. With
#   `use_multi_rank_bucket_allreduce: false` it reduces each part to its owner instead, in more and smaller calls.
# - *The bucket* of ten million elements is 40 MB. There are two of them with `overlap_comm`, and one without.
# - *Stage 3* gathers once, not twice. Here every parameter is below the threshold of 100,000 elements, so it stays whole,
#   and stage 3 saves no parameter memory. Without the threshold the limit of a billion live elements does the same.
#   Only the last row releases everything and gathers it again, which is stage 3 as the paper counts it.
#
# `Zero3` and FSDP2 send a little less than the last row because the root unit stays gathered between forward and backward.
#
# ## Write: from torch to zerolab
#
# A torch run has three things to carry over, and all three go by **name**:
#
# - *weights*: parameters, and buffers such as BatchNorm's averages. A tied weight is one tensor under two names.
# - *state*: Adam's `step`, `exp_avg` and `exp_avg_sq` for each parameter. Frozen parameters have none.
# - *groups*: learning rate, betas, weight decay, and the names of the parameters that they apply to.
#
# A zerolab rank needs its slices. Why by name and not by number? Because a flat buffer has an order of its own:

# %%
from zerolab import Layout

three = [("w", torch.empty(3, 3)), ("b", torch.empty(3)), ("s", torch.empty(()))]
plots.show(plots.flat_storage(Layout(three, world_size=4)))

# %% tags=["nbval-check-output"]
# %%ranks
zero = zerolab.Zero3(make_model(), units=[Block])
if rank == 0:
    in_units = [name for unit in zero.units for name in unit.names]
    print("model.parameters():", *[name for name, _ in make_model().named_parameters()][1:4])
    print("the units:         ", *in_units[1:4])

# %% [markdown]
# The root unit comes first, with everything outside the blocks. A migration that numbers parameters would give the final
# norm's averages to a layer of block 0, and if the shapes fit, nobody would notice.
#
# Weights and buffers are one call: `zero.load_full_state_dict(weights)` cuts them. For the averages, cut by hand. For each
# `unit` in `zero.units` there are:
#
# - `unit.names` and `unit.params`, the names and this rank's slices, in the same order;
# - `unit.layout.views(flat)`, the place of each *whole* parameter in a flat tensor of `unit.layout.size` elements;
# - `unit.layout.shard(flat, rank)`, and `unit.layout.slices(shard, rank)`, the slices in it (lesson 04). These are views.
# - `unit.master.new_zeros(size)`, a new tensor of the dtype that the optimizer works in.
#
# The state of a parameter is `adam.state[param]`, a dict with the three keys.

# %%
# %%exercise 18.1

# %%
lab.check("18.1")

# %% [markdown]
# ## Write: and back
#
# The other way, each rank has slices, and torch expects whole tensors. Fill a shard with your slices, let
# `zero.comm.all_gather(flat, shard, unit.name).wait()` put everybody's shard in its place, and cut `flat` by names.

# %%
# %%exercise 18.2

# %%
lab.check("18.2")

# %% [markdown]
# ## Measure: three weeks, carried over
#
# Now FSDP2 trains three steps. torch's `get_state_dict` with `full_state_dict=True` makes the checkpoint whole, on rank 0,
# and it is written as safetensors and JSON: a `.pt` or DCP file would have to be unpickled. Then zerolab goes on for three
# steps, in stage 3 and in stage 1. Beside it the FSDP2 run goes on, too.

# %%
# %%ranks
import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

to_zerolab, from_zerolab = lab.mine("18.1"), lab.mine("18.2")
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write(name, checkpoint):  # by rank 0
    flat = {f"weights/{key}": tensor.contiguous() for key, tensor in checkpoint["weights"].items()}
    for key, kept in checkpoint["state"].items():
        flat |= {f"state/{kind}/{key}": tensor.contiguous() for kind, tensor in kept.items()}
    save_file(flat, f"{folder}/{name}.safetensors")
    Path(folder, f"{name}.json").write_text(json.dumps(checkpoint["groups"]))


def read(name):
    checkpoint = {"weights": {}, "state": {}, "groups": json.loads(Path(folder, f"{name}.json").read_text())}
    for key, tensor in load_file(f"{folder}/{name}.safetensors").items():
        part, _, rest = key.partition("/")
        if part == "weights":
            checkpoint["weights"][rest] = tensor
        else:
            kind, _, param = rest.partition("/")
            checkpoint["state"].setdefault(param, {})[kind] = tensor
    return checkpoint


def steps(model, adam, numbers):
    losses = []
    for step in numbers:
        loss = model(*batch(words, rank, step, 4, 64))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


model, adam = with_fsdp2()
first = steps(model, adam, range(3))
weights, optimizer = get_state_dict(model, adam, options=whole)
if rank == 0:
    write("torch", {"weights": weights, "state": optimizer["state"], "groups": optimizer["param_groups"]})
dist.barrier()
stayed = steps(model, adam, range(3, 6))

moved = {}
for stage in (zerolab.Zero3, zerolab.Zero1):
    zero = stage(make_model(), units=[Block])
    theirs = torch.optim.AdamW(zero.model.parameters(), lr=0.5)  # the saved rate replaces it
    to_zerolab(read("torch"), zero, theirs)
    if stage is zerolab.Zero3:
        zerolab.save(f"{folder}/step-3", zero, theirs)  # from here on, a zerolab checkpoint
    moved[stage.__name__] = steps(zero.model, theirs, range(3, 6))
counters = {values["step"].item() for values in theirs.state.values()}

# %% tags=["nbval-check-output"]
first, stayed, moved = (lab.pull(name, rank=0) for name in ("first", "stayed", "moved"))
for name, losses in moved.items():
    print(f"{name}: three losses equal to FSDP2's, to 0.00001:", max(abs(a - b) for a, b in zip(losses, stayed)) < 1e-5)
print("Adam's step counters:", lab.pull("counters", rank=0))

# %%
said = f"After the move, at step 4, the losses are {stayed[0]:.4f} (FSDP2 stays), {moved['Zero3'][0]:.4f} (moved to Zero3)."
curves = {"FSDP2 stays": first + stayed, "moved to Zero3": first + moved["Zero3"]}
plots.show(plots.curves(curves, "Carried over after step 3", "Steps 1 to 6 of the run", "loss", said))

# %% [markdown]
# And back. A whole checkpoint does not know how many ranks wrote it, or in which stage. Here stage 1 hands over to FSDP2.

# %%
# %%ranks
checkpoint = from_zerolab(zero, theirs)  # six steps old, from stage 1
if rank == 0:
    write("zerolab", checkpoint)
dist.barrier()
here = steps(zero.model, theirs, range(6, 8))

model, adam = with_fsdp2()
back = read("zerolab")
optimizer = {"state": back["state"], "param_groups": back["groups"]}
defaults = adam.param_groups[0]
for group in optimizer["param_groups"]:  # what a file need not say is as torch has it
    group |= {key: value for key, value in defaults.items() if key not in group}
set_state_dict(model, adam, model_state_dict=back["weights"], optim_state_dict=optimizer, options=whole)
there = steps(model, adam, range(6, 8))

# %% tags=["nbval-check-output"]
here, there = lab.pull("here", rank=0), lab.pull("there", rank=0)
print("back in FSDP2, two losses equal to 0.00001:", max(abs(a - b) for a, b in zip(here, there)) < 1e-5)

# %% [markdown]
# The check of your two functions is stricter: float64, world sizes 1 to 4, with a tied weight, a buffer, a frozen and an
# unused parameter, and the parameters of a plain run to 10⁻¹². What neither function carries: the position in the data, the
# schedule's state and the random generators. Save them as extras (lesson 11).
#
# From DeepSpeed, `zero_to_fp32.py` gives weights alone, and `ds_to_universal.py` the averages as well, as pickles: unpack
# those only if they are your own.
#
# ## An optimizer that cannot be cut
#
# Your next run may use Muon for the matrices of the blocks and AdamW for the rest. Muon needs whole matrices (lesson 04). In
# torch's DDP every rank has them, so each of the four keeps all of Muon's state and does all of its work.
# `zerolab.OwnerOptimizer` gives each matrix to one rank, in any stage. Here are 30 steps on the text, three times: with
# AdamW alone, with both in torch's DDP, and with both in stage 3.


# %%
# %%ranks
from torch.optim import AdamW, Muon


def muon_and_adamw(model, blocks, owner=None):
    matrices = [param for param in blocks.parameters() if param.dim() == 2]
    taken = {id(param) for param in matrices}
    muon = owner(matrices, Muon, lr=0.02) if owner else Muon(matrices, lr=0.02)
    return muon, AdamW([param for param in model.parameters() if id(param) not in taken], lr=1e-3)


def losses_of(model, *optimizers, steps=30):
    losses = []
    for step in range(steps):
        loss = model(*batch(words, rank, step, 4, 64))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


model, adam, _ = with_zerolab(zerolab.Zero3)
parallel = DistributedDataParallel(make_model())
replicated = muon_and_adamw(parallel, parallel.module.blocks)
zero = zerolab.Zero3(make_model(), units=[Block])
owned = muon_and_adamw(zero.model, zero.model.blocks, zerolab.OwnerOptimizer)
losses = {
    "Muon in torch's DDP": losses_of(parallel, *replicated),
    "Muon in Zero3": losses_of(zero.model, *owned),
    "AdamW in Zero3": losses_of(model, adam),
}

zero.model(*batch(words, rank, 30, 4, 64)).backward()
with ledger(zero) as book:
    owned[0].step()
muons = [sum(bytes_of(kept.values()) for kept in muon.state.values()) for muon, _ in (replicated, owned)]
sends = book.moved, owned[0].moved_bytes()

# %%
losses = lab.pull("losses", rank=0)
ends = ", ".join(f"{name} {sum(series[-5:]) / 5:.2f}" for name, series in losses.items())
said = f"Mean of the last five losses: {ends}."
plots.show(plots.curves(losses, "Muon beside AdamW", "At equal steps, on 4 ranks; no rate is tuned", "loss", said))

# %% tags=["nbval-check-output"]
matrices, ranks = 4 * 12 * 128**2, 4  # elements in the matrices of 4 blocks
for rank, ((full, own), (sent, formula)) in enumerate(zip(lab.pull("muons"), lab.pull("sends"))):
    print(f"rank {rank}: Muon's state {full:,} bytes in DDP, {own:,} with owners; sends {sent:,} ({formula:,})")
total = sum(sent for sent, _ in lab.pull("sends"))
even = 12 * matrices * (ranks - 1) // ranks
print(f"sent by all: {total:,} bytes; with a quarter of every matrix on each rank, 12Ψ(N-1)/N = {even:,}")

# %% [markdown]
# Plain Muon sends nothing, because everybody does everything. With owners, what an owner lacks of its matrix travels three
# times in float32: to the owner as gradient and as parameter, and back as the new parameter. If every rank had a quarter of
# each matrix, that would be 12Ψ(N-1)/N bytes. It is less, because a shard is a quarter of a *unit*: most matrices lie on
# one or two ranks, and the owner is one that has much of its matrix already. All of it comes on top of what stage 3 sends.
#
# In return each rank keeps a quarter of the state and does a quarter of Muon's work. The losses of the two Muons lie on one
# another. That they are below AdamW's after 30 steps says little, as no rate is tuned. [Muon](../docs/muon.md) has the
# formulas, and a command that times it.
#
# ## On trial
#
# > "Wrapping the model in DDP and setting the process group to NCCL is ZeRO."

# %% tags=["nbval-check-output"]
# %%ranks
parallel = DistributedDataParallel(make_model())
plain = train(parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-3))
if rank == 0:
    print(
        f"DDP holds {sum(plain['held'].values()) / psi:.2f} bytes per parameter on a rank, and sends {plain['sent']:,.0f}"
    )
    if lab.predicted("18.1"):
        print(f"Zero3 holds {sum(runs['Zero3']['held'].values()) / psi:.2f}, and sends {runs['Zero3']['sent']:,.0f}")

# %% [markdown]
# **False.** DDP replicates everything: 16 bytes a parameter on each rank. The backend decides how bytes travel, not who
# holds what.
#
# > "ZeRO reduces communication."
#
# **False here too.** Stage 3 sends almost 1.5 times what DDP sends, in zerolab and in FSDP2 to the same byte.
#
# ## Your first run on two GPUs
#
# The whole of it is on a page of its own, [Your first run on 2 GPUs](../docs/first-gpu-run.md), to keep open beside the
# terminal. In short:
#
#     zerolab doctor --ranks 2
#     zerolab plan --params 85.5M --ranks 2 --precision fp32
#     torchrun --nproc-per-node 2 -m zerolab.train --task text --layers 12 --width 768 --stage 2 --steps 100 --checkpoint run
#     watch -n 1 nvidia-smi
#
# `nvidia-smi` shows more than the plan: activations, the units in flight, what CUDA and NCCL need themselves, and what
# torch's allocator keeps for later. Compare two stages rather than one number with the plan. The page says what an
# out-of-memory and a hang look like, and what to try in which order.
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
# 1. The batch: `train_batch_size` must be micro-batch × accumulation × GPUs. Change the accumulation or the micro-batch, and
#    keep the global batch. If it does not divide by 6 × micro-batch, choose another micro-batch.
# 2. `reduce_bucket_size`: 5e8 elements are 2 GB in float32, whatever the model needs, and `overlap_comm` doubles it.
# 3. It jumps at the first updates: an Adam without averages moves every element a full learning rate (lesson 11).
# 4. Libraries order parameters differently: by module, by unit, by size. Equal shapes make a mix-up silent.
# 5. One with parameters whose first dimension does not divide by N: FSDP2 pads each of them, a flat buffer is padded once for
#    each unit. With many small vectors, or a first dimension smaller than N, it counts.
# 6. Not necessarily. The plan has model states alone. Activations, units in flight, the CUDA context and the allocator's
#    reserve come on top. `torch.cuda.max_memory_allocated()` is nearer to the truth than `nvidia-smi`.

# %%
import shutil

shutil.rmtree(folder)
lab.stop()
lab.progress()
