# %% [markdown]
# # 21 · Nothing stops
#
# **The question.** On 16,384 GPUs something stopped the run every three hours (lesson 11). The usual answer is to stop
# everybody, start everybody again and load the last checkpoint. If that takes ten minutes, 5 % of the time goes into
# it. But most of a cluster is fine at any moment, and with [hybrid sharding](../docs/glossary.md#hybrid-sharding) there
# is even a copy of everything elsewhere. So why does anybody stop? In this lesson a rank is killed in the middle of a
# step, and the others go on. A newcomer takes a peer's state and joins. A checkpoint is written while training changes
# what is in it. And at the end nobody dies, but a link is slow.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(6)

# %% [markdown]
# ## A replica is a world of its own
#
# Six ranks form three **[replicas](../docs/glossary.md#replica)**: A, B and C. The two ranks of a replica shard
# everything between them, with the package's `Zero3`. Between replicas only means of gradients travel. So far that is
# lesson 12's `mesh=`, here `(3, 2)`. But a mesh belongs to one [process group](../docs/glossary.md#process-group), and
# a process group cannot lose a member: when one dies, every collective of all six fails.
#
# So `lab.replica(ranks=2)` leaves the world of `lab.start`, and makes each replica a world of two. What connects
# replicas is a *store*, a small server of keys and values that outlives them all. Here it is in the notebook's process,
# which started the ranks and sees them end: the key `lives/3` counts rank 3's deaths.
#
# `%%ranks` gets two options. A cell with `--revive` does not fail when a rank dies: the others go on, and the dead rank
# starts again, as an empty process. It runs the cells marked `--always`, and then the cell itself.

# %%
# %%ranks --always
import os
import signal
import zlib

import torch
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, batch, text

me = lab.replica(ranks=2)  # me.name, me.place in it, me.rank among all, me.life
words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


print(f"place {me.place} of replica {me.name}")

# %% [markdown]
# ## Predict
#
# In step 4, rank 3 is killed in the middle of backward. Nothing is loaded, nobody waits for a new process. How many
# ranks make step 4 in the end?
#
# Later a new replica B joins. Its two processes are empty, and the model has Ψ = 136,960 parameters, trained with
# AdamW in float32. How many bytes does *each* of the two have to receive before it can take part? (Without AdamW's step
# counter, which is a number that all know.)

# %%
lab.predict("21.1", 4)  # ranks
lab.predict("21.2", "6 Ψ")  # bytes

# %% [markdown]
# ## Write: who goes on
#
# Before every step, those that are there agree on who makes it: a **[quorum](../docs/glossary.md#quorum)**. Each rank
# writes into the store that it asks for quorum number 7, say, and how many steps its parameters have seen. Then each
# looks at what all have written, and *decides*. Three rules:
#
# - **Half a replica is none.** When rank 3 dies, half of its replica's shards are gone. Rank 2 cannot finish a step
#   without them, so it ends too.
# - **Busy is not dead.** A member of the last quorum that has not asked yet may just be slow. It is waited for, or a
#   moment's delay would cost a healthy replica; but only as long as none of its ranks has died.
# - **Newcomers are not waited for.** Nobody knows when they come. One that has asked is in; the next chance comes with
#   the next step.
#
# You write the decision. It has no time limit: a rank is dead when its process has ended.

# %%
# %%exercise 21.1

# %%
lab.check("21.1")

# %% [markdown]
# Ranks look at different moments, so two of them may decide differently, and only one decision may count. The store's
# `compare_set` writes a value only if there is none, and returns what is there afterwards. So the first to decide
# writes, and all others read that.
#
# A step ends with a vote, for the same reason. When rank 3 dies in backward, some ranks may already have their
# gradients and others have an error. If only the first updated, the replicas would train two models, and nothing would
# say so. So all update if *every* rank of the quorum has its gradients, and otherwise nobody does: the attempt is
# thrown away, and whoever is left tries the same step again.

# %%
# %%ranks --always
decide = lab.mine("21.1")


def look(number):  # how often each rank has died, and what each replica is doing
    lives = me.lives()
    asked = me.notes(f"ask {number}", lives)
    last = me.notes(f"ask {number - 1}", lives)

    def state(rank):
        alive = rank in last or number == 0
        return asked.get(rank, "busy" if alive else "dead")

    return lives, {name: [state(r) for r in me.ranks_of(name)] for name in me.names}


def quorum(number, step):  # members, step, sources, and the lives of all ranks
    me.note(f"ask {number}", step)
    before = me.read(f"quorum {number - 1}")[0] if number else me.names

    def decided():
        if me.read(f"quorum {number}") is None:
            lives, replicas = look(number)
            decision = decide(before, replicas, least=1)
            if decision is not None:
                me.first(f"quorum {number}", [*decision, lives])  # compare_set
        return me.read(f"quorum {number}")

    return me.until(decided)


def all_have_it(number, members, lives, mine):
    me.note(f"vote {number}", mine)
    ranks = [rank for name in members for rank in me.ranks_of(name)]
    return all(me.until(lambda: me.noted(f"vote {number}", ranks, lives)))


# %% [markdown]
# ## Kill it
#
# Now the training. `group` joins this rank and its *counterparts*: the ranks with the same place in the other replicas,
# which hold the same shards (lesson 16's replicate group). It belongs to no world, and is made anew when the members
# change or an attempt has failed. Two things matter most. `flat /= group.size` makes a mean over those who are there.
# `hand_over` sends a newcomer its shards of the parameters and of AdamW's two averages, from its counterpart in the
# replica that `sources` names. And `me.until` looks again and again, and ends the process if its replica has lost a
# rank.

# %%
# %%ranks --always
zero = zerolab.Zero3(make_model(), units=[Block])  # in the world of this replica
adam = torch.optim.AdamW(zero.model.parameters(), lr=3e-3)
AVERAGES = ("exp_avg", "exp_avg_sq")
local = zerolab.to_local  # this rank's slice


def mean_over_replicas(group, loss):
    grads = [local(param.grad) for param in zero.model.parameters()]
    flat = torch.cat([*(grad.flatten() for grad in grads), loss.detach().view(1)])
    group.all_reduce(flat)
    flat /= group.size  # those who are there
    parts = flat.split([*(grad.numel() for grad in grads), 1])
    for grad, part in zip(grads, parts):
        grad.copy_(part.view_as(grad))
    return flat[-1].item()


def state(step):  # this rank's shards: parameters, and AdamW's averages of them
    for param in zero.model.parameters():
        if param not in adam.state:
            empty = {key: torch.zeros_like(local(param)) for key in AVERAGES}
            adam.state[param] = {"step": torch.tensor(float(step))} | empty
        averages = (local(adam.state[param][key]) for key in AVERAGES)
        yield from (local(param).detach(), *averages)


def hand_over(group, members, sources, step):
    for name, source in sources.items():
        for tensor in state(step) if me.name in (name, source) else ():
            if me.name == source:
                group.send(tensor.contiguous(), members.index(name))
            else:
                arrived = torch.empty_like(tensor)
                group.receive(arrived, members.index(source))
                tensor.copy_(arrived)


def die_in_backward(module, args, output):
    output.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))


# %%
# %%ranks --revive
def train(after=6):  # until so many steps after a newcomer has joined
    step, number, joined, received = 0, 0, None, 0
    group, last, made, attempts, errors = None, None, False, [], []
    while me.read(f"quorum {number}"):  # a newcomer asks for the one that comes next
        number += 1
    while joined is None or step < joined + after:
        members, newest, sources, lives = quorum(number, step)
        if me.name in members and lives[me.rank] == me.life:
            mine = False
            try:
                if not made or (members, lives) != last:
                    group, last = me.group(number, members), (members, lives)
                if sources:
                    hand_over(group, members, sources, newest)
                    joined, received = newest, received + group.received
                step = newest
                if step == 4 and me.rank == 3 and me.life == 0:
                    zero.model.blocks[0].register_forward_hook(die_in_backward)
                loss = zero.model(*batch(words, me.rank, step, 4, 64))
                loss.backward()
                loss = mean_over_replicas(group, loss)
                mine = True
            except RuntimeError as error:  # somebody is gone
                errors.append(error)
                if len(errors) > 9:
                    raise
            made = all_have_it(number, members, lives, mine)
            attempts.append((step, members, sources, made, loss if made else None))
            if made:
                adam.step()
                step, errors = step + 1, []
            adam.zero_grad()
        number += 1
    return attempts, received


attempts, received = train()
shards = torch.cat([tensor.flatten() for tensor in state(0)])
mark = zlib.crc32(shards.numpy().tobytes())

# %% [markdown]
# Rank 3 was killed, and rank 2 saw the connection close. What it printed is the engine's flight recorder (lesson 17):
# which collective it was in, and who did not come. (Its ranks 0 and 1, counted within the replica, are our 2 and 3.)
# Then rank 2 ended too, and both were started again.

# %%
attempts = lab.pull("attempts", rank=0)
history = [plots.Attempt(*attempt[:4]) for attempt in attempts]
again = next(of for of in history if of.made and of.step == 4)
lab.measured("21.1", 2 * len(again.members))
lab.reveal("21.1")
lab.measured("21.2", lab.pull("received", rank=2))
lab.reveal("21.2")

# %%
if lab.predicted("21.1"):
    plots.show(plots.membership(history, ["A", "B", "C"]))

# %% tags=["nbval-check-output"]
marks = lab.pull("mark")
same = [len(set(marks[place::2])) == 1 for place in (0, 1)]
print("shards and averages of A, B and C are the same, bit for bit:", same)
if lab.predicted("21.2"):
    print(f"rank 2 received {lab.pull('received', rank=2):,} bytes")

# %% [markdown]
# The survivors threw one attempt away and went on. How many steps they made with two replicas depends on how long this
# machine takes to start two processes: nobody waited for them. When B came, each of its ranks received half of 12Ψ
# bytes: the parameters and two averages, sharded as everything is.
#
# ## What is the divisor?
#
# Is the result right? One process that knows who was there can make the same steps, each with the mean over the
# micro-batches of those ranks.

# %%
# %%ranks 0,1
full = zero.full_state_dict()
one = make_model()
its_adam = torch.optim.AdamW(one.parameters(), lr=3e-3)
off = []
for step, members, _, made, loss in attempts if rank == 0 else ():
    if not made:
        continue
    ranks, total = [r for name in members for r in me.ranks_of(name)], 0.0
    for r in ranks:
        its_loss = one(*batch(words, r, step, 4, 64)) / len(ranks)
        its_loss.backward()
        total += its_loss.item() if r % 2 == me.place else 0.0
    off.append(abs(2 * total - loss))  # `loss` is the mean over rank 0's counterparts
    its_adam.step()
    its_adam.zero_grad()
apart = max((full[name] - p).abs().max().item() for name, p in one.named_parameters())

# %% tags=["nbval-check-output"]
print("the losses of one process, to 0.001:", max(lab.pull("off", rank=0)) < 1e-3)
print("its parameters, to one learning rate:", lab.pull("apart", rank=0) < 3e-3)

# %% [markdown]
# Each mean was over three replicas, then two, then three, and the divisor was always the number in the sum. Had it
# stayed 3 while two were there, every gradient would have been 2/3 as long, and nothing would have failed. (The losses
# show that it did not: AdamW would hide most of it in the parameters.)
#
# There is a choice in this: dividing by those who are there makes the *global batch* smaller, by B's part, and lesson
# 11 said that it should stay. It can: the survivors may compute B's micro-batches too, and the step takes longer.
#
# ## When all are gone
#
# A peer's state replaces the checkpoint as long as one replica lives. A power cut takes all, so checkpoints are still
# written. Can training go on meanwhile? Fresh ranks:

# %%
lab.start(4)

# %%
# %%ranks --always
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file
from zerolab import lab
from zerolab.lab import GPT, batch, calls, text

words = text()
name = f"zerolab-lesson-21-{os.environ['MASTER_PORT']}"  # no other session has this port
folder = Path(tempfile.gettempdir(), name)
folder.mkdir(exist_ok=True)


def make_model():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


def one_step(model, adam, step, who=0):
    model(*batch(words, who, step, 4, 64)).backward()
    adam.step()
    adam.zero_grad()


# %% [markdown]
# Rank 0 trains, and a thread of it writes. The disk here is so slow that each tensor takes as long as a step of
# training: the two threads meet after every step (`between_steps`), so that it comes out the same on every machine.
# Then every tensor in the file is looked up among the parameters of all steps.


# %%
# %%ranks 0
def train_and_write(model, adam, tensors, steps):
    between_steps, written, of_step = threading.Barrier(2, timeout=300), {}, []

    def write():
        for name, tensor in tensors.items():
            between_steps.wait()
            written[name] = tensor.detach().clone()  # what the file gets at this moment
            between_steps.wait()
        save_file(written, folder / "of-a-thread.safetensors")

    writer = threading.Thread(target=write)
    writer.start()
    for step in steps:
        of_step.append({name: p.detach().clone() for name, p in model.named_parameters()})
        between_steps.wait()
        between_steps.wait()
        one_step(model, adam, step)
    writer.join()
    loaded = load_file(folder / "of-a-thread.safetensors")
    return [
        next(step for step, state in enumerate(of_step) if torch.equal(tensor, state[name]))
        for name, tensor in loaded.items()
    ]


model = make_model()
adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
names = [name for name, _ in model.named_parameters()]
live = dict(model.named_parameters())
whose = train_and_write(model, adam, live, range(len(names)))

# %% tags=["nbval-check-output"]
whose = lab.pull("whose", rank=0)
print("the step of each tensor in the file:", *sorted(whose))

# %% [markdown]
# Every tensor is of another step, and the file opens without an error: a model that never was. A checkpoint in the
# background must not read anything that training writes.
#
# ## Write: stage, then write
#
# To **[stage](../docs/glossary.md#staging)** is to copy everything that belongs to the checkpoint, at one moment
# between two steps, while training waits. Then a thread writes the copy, however long it takes, and training goes on.
# The price is memory, the host's with `.to("cpu", copy=True)`: 12 bytes for each parameter of a rank's shards, and as
# much again if the copy becomes a file's bytes before it is written, as below.
#
# What is a copy? `detach()` is not one, nor is `.cpu()` if the tensor is on the CPU already. And an optimizer's state
# is full of dicts within dicts.

# %%
# %%exercise 21.2

# %%
lab.check("21.2")

# %%
# %%ranks 0
stage = lab.mine("21.2")
staged = stage(dict(model.named_parameters()))
whose_staged = train_and_write(model, adam, staged, range(len(names)))

# %% tags=["nbval-check-output"]
print("the step of each tensor, staged:", set(lab.pull("whose_staged", rank=0)))

# %% [markdown]
# ## Killed midway
#
# The thread writes as lesson 11 says: under another name, flush, rename. Rank 0 saves step 10 that way, trains on, and
# is killed when the thread has written half of step 20. Its next life looks at what is there. (Only parameters are
# saved, for brevity.)


# %%
# %%ranks 0 --revive
def write_staged(staged, step, half=None):
    path = folder / "checkpoint.safetensors"
    data = save({**staged, "step": torch.tensor(step)})  # bytes
    with open(path.with_suffix(".part"), "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        if half:
            half.set()
            threading.Event().wait(300)  # the disk is slow, and then comes the end
        file.write(data[len(data) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)


if os.environ["ZEROLAB_LIFE"] == "0":  # the first life
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        one_step(model, adam, step)
    writer = threading.Thread(target=write_staged, args=(stage(model.state_dict()), 10))
    writer.start()
    for step in range(10, 20):
        one_step(model, adam, step)
    writer.join()
    half = threading.Event()
    args = stage(model.state_dict()), 20, half
    threading.Thread(target=write_staged, args=args, daemon=True).start()
    one_step(model, adam, 20)  # training goes on meanwhile
    half.wait(300)
    os.kill(os.getpid(), signal.SIGKILL)

sizes = {path.name: path.stat().st_size for path in folder.glob("checkpoint*")}
found = load_file(folder / "checkpoint.safetensors")

# %% tags=["nbval-check-output"]
for name, size in sorted(lab.pull("sizes", rank=0).items()):
    print(f"{name}: {size:,} bytes")
print("the next life loads step", lab.pull("found", rank=0)["step"].item())

# %% [markdown]
# The half-written file has another name, and what loads is step 10, complete. With several ranks, the index may appear
# only when all have written. The thread must not find that out with a collective in training's group: the collectives
# of two threads have no order between them, so one rank's barrier could meet another's gradients. It takes a group of
# its own, or keys in a store. And a second save must wait for the first, or memory must hold both.
# `zerolab.save(path, zero, adam, background=True)` needs no collective in its thread: it returns an object whose
# `wait()` all ranks call before the next save, and there the checkpoint is put in place.
#
# ## A slow link
#
# Now nobody dies, but two halves of a cluster are in two cities, with a slow link between them. Every step needs a mean
# over all gradients. Compression makes it smaller (lesson 12), but every step still waits for it. With **[local
# steps](../docs/glossary.md#local-steps)** most steps send nothing: each replica makes H steps on its own, with its own
# AdamW, and then the replicas average their *parameters*.
#
# DiLoCo (arXiv 2311.08105) sees more in it than an average. The change that H steps have made is a direction, and its
# mean over replicas can be treated as a gradient: the **[outer gradient](../docs/glossary.md#outer-gradient)**, old
# parameters minus the mean of the new ones. So it gets an optimizer of its own, SGD with Nesterov's momentum, which
# goes further where one round after another points the same way. With a learning rate of 1 and no momentum, it is the
# plain average.
#
# Predict: 4 ranks, each a replica, Ψ = 136,960, float32, H = 16. How many bytes does a rank send per step, on average,
# if an all-reduce goes round a ring?

# %%
lab.predict("21.3", "0.375 Ψ")  # bytes

# %% [markdown]
# ## Write: the outer step

# %%
# %%exercise 21.3

# %%
lab.check("21.3")

# %% [markdown]
# ## Measure: bytes against loss
#
# First what one exchange takes on a slow link: the mean of all gradients, which every step needs, and your outer step,
# which every H-th needs. The fastest of three counts. (Rank 0, started again, is in no group: `lab.reset` makes one.)

# %%
lab.reset()
lab.link("5 MB/s, 200 us")

# %%
# %%ranks
Outer = lab.mine("21.3")


def average_gradients(model):
    grads = [param.grad for param in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad) / world_size)


def fastest(exchange):
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


model = make_model()
model(*batch(words, rank, 0, 4, 64)).backward()
every_step = fastest(lambda: average_gradients(model))
a_round = fastest(Outer(model.parameters()).step)

# %%
every_step, a_round = (lab.pull(name, rank=0) for name in ("every_step", "a_round"))
print(f"gradients in every step: {every_step:.3f} s for each step, on the emulated link")
for H in (4, 16):
    print(f"an outer step in {H:2}: {a_round / H:.3f} s for each step")
lab.link(None)

# %% [markdown]
# Now the same 64 steps of AdamW in five ways: with gradients averaged in every step; with an outer step (lr 0.7,
# momentum 0.5) after every 4th, and after every 16th; after every 4th again, with momentum 0.9; and with no
# communication at all. It takes ten seconds or more.

# %%
# %%ranks
STEPS, RATE = 64, 3e-3


def run(H, **outer):  # H = 1: gradients in every step; None: never
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    rounds = Outer(model.parameters(), **outer) if outer else None
    sent = 0.0
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = RATE * (1 - step / STEPS)  # to 0, as most runs end
        model(*batch(words, rank, step, 4, 64)).backward()
        if H == 1:
            with calls() as book:
                average_gradients(model)
            sent += book.sent
        adam.step()
        adam.zero_grad()
        if rounds and (step + 1) % H == 0:
            with calls() as book:
                rounds.step()
            sent += book.sent
    loss = 0.0
    with torch.no_grad():  # other text, which one rank reads
        for i in range(2) if rank == 0 else ():
            loss += model(*batch(words, 9, 9_990 + i, 32, 64)).item() / 2
    return sent / STEPS, loss


runs = {"every step": run(1), "alone": run(None)}
for H in (4, 16):
    runs[f"H = {H}"] = run(H, lr=0.7, momentum=0.5)
strong = run(4, lr=0.7, momentum=0.9)[1]

# %%
runs = lab.pull("runs", rank=0)
lab.measured("21.3", runs["H = 16"][0])
lab.reveal("21.3")

# %%
if lab.predicted("21.3"):
    for name, (sent, loss) in runs.items():
        print(f"{name:10} {sent:9,.0f} bytes per step, loss {loss:.2f}")
    strong, alone = lab.pull("strong", rank=0), runs["alone"][1]
    print(f"H = 4, but with momentum 0.9 and not 0.5: loss {strong:.2f}")
    dots = {name: of for name, of in runs.items() if of[0]}
    every, rare = runs["every step"], runs["H = 16"]
    said = f"Loss {every[1]:.2f} with gradients in every step, {rare[1]:.2f} with a"
    said += f" sixteenth of the bytes, {alone:.2f} with none."
    title, subtitle = "Bytes against loss", "64 steps of AdamW on 4 ranks, the same batches"
    says = ("bytes sent per rank and step", "loss on other text")
    picture = plots.tradeoff(dots, title, subtitle, says, said, "every step", True)
    plots.show(picture)
    assert round(every[0] / rare[0]) == 16 and every[1] < rare[1] < alone < strong

# %% [markdown]
# The bytes are divided by H. The time on the link is divided by less if your outer step sends each tensor by itself, as
# the course's does: each call has a latency and work of its own. And the loss pays something, though with momentum 0.5
# not as much as with no communication. Local steps make another run, not the synchronous one faster.
#
# Now look at momentum 0.9. With a learning rate of 0.7 it is usual, as in torchft's example `train_diloco.py`, and here
# it is worse than no communication at all. The speed then adds up about ten rounds. So where rounds agree, as they tend
# to early in a run, an outer step is up to 0.7 / (1 - 0.9) = 7 times the mean of what the ranks have moved. And this
# run has only 16 rounds. The outer optimizer is tuned like any other.
#
# ## In production
#
# **[torchft](https://github.com/pytorch/torchft)** is the first half of this lesson for real clusters. A server, the
# *lighthouse*, makes a quorum before every step, and process groups are made anew when the members change. The vote is
# within each replica; one that misses an update takes a peer's state, as a newcomer does. Meanwhile the others compute,
# and it adds zeros to their step. Its authors report "training with 2000 synthetic failures every ~15 seconds and no
# checkpoints" ("Fault Tolerant Llama", PyTorch blog, 2025).
#
# What is harder there than here, and cannot be shown on one machine with CPUs:
#
# - **Noticing.** Here a process ended, and its parent knew. A machine without power tells nobody. So in torchft replicas
#   send *heartbeats*, and a clock decides: a slow replica may be thrown out.
# - **Getting out of a collective.** gloo raises an error when a peer is gone. With NCCL the others may wait inside a
#   kernel on the GPU, until the communicator is aborted; a deadlock may end the process
#   ([torchft](https://github.com/pytorch/torchft/blob/main/docs/source/assumptions_and_recommendations.rst)).
# - **Staging from a GPU** may overlap with the next forward and backward: only the optimizer's step must wait for it.
#   torch's `dcp.async_save` can return a future for the end of the staging
#   ([documentation](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html)).
#
# torchft has DiLoCo too. If replicas meet every H steps, a quorum is needed only then, and a death costs at most the H
# steps of one replica.
#
# ## On trial
#
# > "In synchronous training, one failed GPU stops all of them."
#
# **Verdict: false.** It is the process group that cannot lose a member, not synchronous training. In the picture above,
# every step has one mean over all that were there, and what stopped was replica B and one attempt.
#
# > "DiLoCo trains as well as synchronous training, and communicates 500 times less."
#
# **Verdict: true under a condition.** That it sends H times less you have measured. As for the loss, the paper's
# abstract says so for 8 workers on the C4 data set. Here it depended on H and on the outer optimizer: one choice was
# better than no communication, another worse. Ask for how many rounds, from which start, against which baseline.
#
# ## Questions
#
# 1. Replica B has ranks 2 and 3, and rank 3 dies in backward. What do ranks 2, 1 and 0 see, and what does each do?
# 2. Why do all ranks vote before the update? What would go wrong without it, and when would it be noticed?
# 3. Two of three replicas are left. There are two ways to go on with the right mean. Which, and what does each change?
# 4. Why is a busy member waited for and a newcomer not, and why is one decision written with `compare_set`?
# 5. A model of 70 billion parameters, AdamW in float32, 64 ranks. What does a background checkpoint cost each rank, and
#    what must its thread not do?
# 6. 8 replicas, 7 billion parameters in float32, H = 500. How many bytes does a replica send per step, and what must it
#    keep that it didn't need before?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Rank 2 is in a collective of its replica, sees the connection close, and ends: it holds half a model. Rank 1 waits
#    for rank 3 in the mean over replicas and gets an error; rank 0 gets one as soon as rank 2 has ended. Both vote no,
#    throw their gradients away, and ask for the next quorum.
# 2. Some may have their gradients when others get an error. If those updated, the replicas would have different
#    parameters, and average gradients of different models. Nothing would fail: the loss only gets worse, perhaps.
# 3. Divide by two: the global batch is smaller by a third, as long as the third is away. Or let the two compute the
#    third's micro-batches too: the same batch and the same mean, and the step takes longer.
# 4. A busy member has the newest state and will ask soon, unless it dies, which becomes known. Nobody knows when a
#    newcomer comes. Ranks that look at different moments could decide differently; with `compare_set` the first
#    decision counts for all.
# 5. 12 · 70 · 10⁹ / 64 bytes, 13.1 GB of the host's memory (twice that if the copy becomes a file's bytes first), and
#    the time to copy. The thread must not read what training writes, nor use training's process groups, nor touch the
#    old checkpoint before the new one is complete.
# 6. Every 500 steps 2 · 7/8 · 4 · 7 · 10⁹ bytes, 49 GB: 98 MB per step. It keeps the old parameters and the speed, 8
#    bytes more for each parameter of its shards, on the host if need be.

# %%
import shutil

shutil.rmtree(lab.pull("folder", rank=0))
lab.stop()
lab.progress()
