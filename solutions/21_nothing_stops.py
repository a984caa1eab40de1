# %% [markdown]
# # 21 · Nothing stops
#
# **The question.** On 16,384 GPUs something stopped the run every three hours (lesson 11). The usual answer is to stop
# everybody, start everybody again and load the last checkpoint. If that takes ten minutes, 5 % of the time goes into
# it. But most of a cluster is fine at any moment, and with [hybrid sharding](../docs/glossary.md#hybrid-sharding) there
# is even a copy of everything elsewhere. So why does anybody stop? In this lesson a rank is killed in the middle of a
# step, and the others go on. A newcomer takes a peer's state and joins. And for the day on which all die at once, a
# checkpoint is written while training changes what is in it.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(6)

# %% [markdown]
# ## A replica is a world of its own
#
# Six ranks form three **[replicas](../docs/glossary.md#replica)**, A, B and C. The two ranks of a replica shard
# everything between them, with the package's `Zero3`. In a step only means of gradients travel between replicas:
#
# ```
#               place 0                  place 1
# replica A     rank 0 <-- Zero3 -->     rank 1
#                 |                        |
#                 | means of gradients     | means of gradients
#                 |                        |
# replica B     rank 2 <-- Zero3 -->     rank 3
#                 |                        |
# replica C     rank 4 <-- Zero3 -->     rank 5
# ```
#
# So far that is lesson 12's `mesh=`, here `(3, 2)`. But a mesh belongs to one [process
# group](../docs/glossary.md#process-group), which cannot lose a member: when one dies, every collective of all six
# fails. So `lab.replica(ranks=2)` makes each replica a world of its own. What connects them is a *store*, a small
# server of keys and values that outlives them all. It is in the notebook's process, which started the ranks and sees
# them end.
#
# In a cell with `%%ranks --revive`, the others go on when a rank dies. The dead rank starts again, as an empty process,
# and runs the cells marked `--always`, then the cell itself.

# %%
# %%ranks --always
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
# writes into the store that it asks for the next one, and how many steps its parameters have seen. Then each looks at
# what all have written, and *decides*. Three rules:
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
# A step ends with a vote, for the same reason. When rank 3 dies, some ranks may already have their gradients and others
# have an error. If only the first updated, the replicas would train two models, and nothing would say so. So all update
# if *every* rank of the quorum has its gradients, and otherwise nobody: whoever is left tries the same step again.
#
# ## Kill it
#
# First the model, sharded in the world of its replica, and the mean over replicas. `group` joins a rank and its
# *counterparts*, one column of the picture above: they have the same place, and so the same shards.

# %%
# %%ranks --always
decide = lab.mine("21.1")
zero = zerolab.Zero3(make_model(), units=[Block])
adam = torch.optim.AdamW(zero.model.parameters(), lr=3e-3)


def mean_over_replicas(group, tensors):
    for tensor in tensors:
        group.all_reduce(tensor)
        tensor /= group.size  # those who are there


# %% [markdown]
# Now the training. The package's `Quorums` writes into the store and reads from it, and calls your `decide`. An attempt
# has five parts:
#
# 1. `ask` returns the next quorum that this rank is in, the same for all its members.
# 2. `group` joins the counterparts. It is made anew when the members have changed or an attempt has failed.
# 3. `hand_over` sends a member that is behind its shards of the parameters and of AdamW's two averages, from its
#    counterpart in the replica that `sources` names. If nobody is behind, it sends nothing.
# 4. The step itself: forward, backward, mean. Where somebody is gone, a collective raises an error.
# 5. `vote` is True, on every rank, if no rank of the quorum had an error.
#
# In `ask` and `vote` a rank waits for others, and ends itself if its own replica has lost a rank.

# %%
# %%ranks --revive
losses, step = {}, 0
quorums = lab.Quorums(me, decide)
while step < quorums.end:  # 6 steps after a newcomer has joined
    quorum, failed = quorums.ask(step), None
    try:
        group = quorum.group()
        quorum.hand_over(zero, adam)
        step = quorum.step
        if step == 4 and me.rank == 3 and me.life == 0:
            lab.die_in_backward(zero.model.blocks[0])
        loss = zero.model(*batch(words, me.rank, step, 4, 64))
        loss.backward()
        grads = [zerolab.to_local(param.grad) for param in zero.model.parameters()]
        mean_over_replicas(group, [loss.detach(), *grads])
    except RuntimeError as error:  # somebody is gone
        failed = error
    if quorum.vote(failed):
        adam.step()
        losses[step] = loss.item()
        step += 1
    adam.zero_grad()

# %% [markdown]
# Rank 3 was killed. Rank 2 saw the connection close or the death in the store, and ended too, and both were started
# again. (If rank 2 had time to print the engine's flight recorder, lesson 17's, its ranks 0 and 1 are our 2 and 3.)

# %%
# %%ranks
attempts, received = quorums.attempts, quorums.received
mark = lab.checksum(zero, adam)

# %%
history = [plots.Attempt(*attempt) for attempt in lab.pull("attempts", rank=0)]
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
# machine takes to start two processes. When B came, each of its ranks received half of 12Ψ bytes: the parameters and
# two averages, sharded as everything is.
#
# ## What is the divisor?
#
# Is the result right? One process that knows who was there can make the same steps, each with the mean over the
# micro-batches of those ranks. `in_one_process` does that with a model on which nothing is sharded.

# %%
# %%ranks 0,1
full = zero.full_state_dict()
one = make_model()
its_losses = lab.in_one_process(one, words, attempts, me)
off = max(abs(its_losses[step] - losses[step]) for step in losses)
apart = max((full[name] - p).abs().max().item() for name, p in one.named_parameters())

# %% tags=["nbval-check-output"]
print("the losses of one process, to 0.001:", lab.pull("off", rank=0) < 1e-3)
print("its parameters, to one learning rate:", lab.pull("apart", rank=0) < 3e-3)

# %% [markdown]
# Each mean was over three replicas, then two, then three, and the divisor was always the number in the sum. Had it
# stayed 3 while two were there, every gradient would have been 2/3 as long, and nothing would have failed. (It didn't:
# `mean_over_replicas` divided the losses too, and they are right. In the parameters AdamW would hide most of it.)
#
# There is a choice in this: dividing by those who are there makes the *global batch* smaller, by B's part, and lesson
# 11 said that it should stay. It can: the survivors may compute B's micro-batches too, and the step takes longer.
#
# ## When all are gone
#
# A peer's state replaces the checkpoint as long as one replica lives. A power cut takes all, so checkpoints are still
# written. Can training go on meanwhile? One fresh rank is enough to see it:

# %%
lab.start(1)

# %%
# %%ranks --always
import torch
from safetensors.torch import load_file
from zerolab import lab
from zerolab.lab import GPT, batch, text

words, folder = text(), lab.scratch_folder()


def fresh():
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def one_step(step):
    model(*batch(words, 0, step, 4, 64)).backward()
    adam.step()
    adam.zero_grad()


# %% [markdown]
# The rank trains, and a thread of it writes, on a disk so slow that each tensor takes as long as a step of training.
# Afterwards `written_meanwhile` loads the file and looks every tensor up among the parameters of all steps.

# %%
# %%ranks
model, adam = fresh()
path = folder / "of-a-thread.safetensors"
whose = lab.written_meanwhile(dict(model.named_parameters()), model, one_step, path)

# %% tags=["nbval-check-output"]
print("the step of each tensor in the file:", *sorted(lab.pull("whose", rank=0)))

# %% [markdown]
# Every tensor is from a different step, and the file opens without an error: a model that never existed. A checkpoint
# in the background must not read anything that training writes.
#
# ## Write: stage, then write
#
# To **[stage](../docs/glossary.md#staging)** is to copy everything that belongs to the checkpoint, at one moment
# between two steps, while training waits. Then a thread writes the copy, however long it takes, and training goes on.
# The price is memory (from a GPU, the host's: `.to("cpu", copy=True)`): 12 bytes for each parameter of a rank's shards,
# and as much again if the copy is turned into a file's bytes before it is written, as below.
#
# What is a copy? `detach()` is not one, nor is `.cpu()` if the tensor is on the CPU already. And an optimizer's state
# is full of dicts within dicts.

# %%
# %%exercise 21.2

# %%
lab.check("21.2")

# %%
# %%ranks
stage = lab.mine("21.2")
staged = stage(dict(model.named_parameters()))
whose_staged = lab.written_meanwhile(staged, model, one_step, path)

# %% tags=["nbval-check-output"]
print("the step of each tensor, staged:", set(lab.pull("whose_staged", rank=0)))

# %% [markdown]
# ## Killed midway
#
# `write_in_background` starts a thread that writes as lesson 11 says: under another name, flush, rename. The rank saves
# step 10 that way and trains on. It is killed when the thread has written half of step 20. Its next life looks at what
# is there. (Only parameters are saved, for brevity.)

# %%
# %%ranks --revive
path = folder / "checkpoint.safetensors"
if lab.life() == 0:
    model, adam = fresh()
    for step in range(10):
        one_step(step)
    writer = lab.write_in_background(stage(model.state_dict()), 10, path)
    for step in range(10, 20):  # training goes on meanwhile
        one_step(step)
    writer.join()
    writer = lab.write_in_background(stage(model.state_dict()), 20, path, dies_at_half=True)
    one_step(20)
    writer.join()

sizes = {path.name: path.stat().st_size for path in folder.glob("checkpoint*")}
found = load_file(path)

# %% tags=["nbval-check-output"]
for name, size in sorted(lab.pull("sizes", rank=0).items()):
    print(f"{name}: {size:,} bytes")
print("the next life loads step", lab.pull("found", rank=0)["step"].item())

# %% [markdown]
# The half-written file has another name, and what loads is step 10, complete. With several ranks, the index may appear
# only when all have written. The thread must not find that out with a collective in training's group: the collectives
# of two threads have no order between them, so one rank's barrier could meet another's gradients. It takes a group of
# its own, or keys in a store. `zerolab.save(path, zero, adam, background=True)` returns an object whose `wait()` all
# ranks call before the next save: that call puts the checkpoint in place.
#
# ## In production
#
# **[torchft](https://github.com/pytorch/torchft/tree/73dafea)** does with real clusters what you did with six
# processes. A server, the *lighthouse*, makes a quorum before every step. The vote is within each replica; one that
# misses an update takes a peer's state, as a newcomer does. Meanwhile the others compute, and it adds zeros to their
# step. Its authors report "training with 2000 synthetic failures every ~15 seconds and no checkpoints" ("Fault Tolerant
# Llama", PyTorch blog, 2025).
#
# What is harder there than here, and cannot be shown on one machine with CPUs:
#
# - **Noticing.** Here a process ended, and its parent knew. A machine without power tells nobody. So in torchft
#   replicas send *heartbeats*, and a clock decides: a slow replica may be thrown out.
# - **Getting out of a collective.** gloo raises an error when a peer is gone. With NCCL the others may wait inside a
#   kernel on the GPU, until the communicator is aborted; a deadlock may end the process
#   ([torchft](https://github.com/pytorch/torchft/blob/73dafea/docs/source/assumptions_and_recommendations.rst)).
# - **Staging from a GPU** may overlap with the next forward and backward: only the optimizer's step must wait for it.
#   torch's `dcp.async_save` can return a future for the end of the staging
#   ([documentation](https://docs.pytorch.org/docs/2.13/distributed.checkpoint.html)).
#
# So one failed GPU need not stop synchronous training: it is the process group that cannot lose a member. In the
# picture above, every step has one mean over all that were there, and what stopped was replica B and one attempt.
# Replicas need not even meet in every step: lesson 24 lets them make many steps alone, over a link that is slow.
#
# ## Questions
#
# 1. Replica B has ranks 2 and 3, and rank 3 dies in backward. What do ranks 2, 1 and 0 see, and what does each do?
# 2. Why do all ranks vote before the update? What would go wrong without it, and when would it be noticed?
# 3. Two of three replicas are left. There are two ways to go on with the right mean. Which, and what does each change?
# 4. Why is a busy member waited for and a newcomer not, and why is one decision written with `compare_set`?
# 5. A model of 70 billion parameters, AdamW in float32, 64 ranks. What does a background checkpoint cost each rank, and
#    what must its thread not do?
# 6. Two replicas of 64 ranks train that model, and a third joins. What does each newcomer receive, from whom, and how
#    long does that take at 10 GB/s? What do the others do meanwhile, and why is it better than a checkpoint?

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
# 6. The same 13.1 GB, from its counterpart in the replica that `sources` names. All 64 pairs send at once, so it takes
#    1.3 seconds. In this lesson's loop the others wait for it in the mean; in torchft they compute. And the state is
#    that after the last step, which nobody has written to a disk: no step is lost.

# %%
import shutil

shutil.rmtree(lab.pull("folder", rank=0))
lab.stop()
lab.progress()
