# %% [markdown]
# # 17 · The clinic
#
# **The question.** A run on many GPUs is broken. You have its log, and the other ranks' logs. What is wrong, and how do
# you know?
#
# While Llama 3 was trained on 16,384 GPUs, 419 unplanned interruptions came in 54 days ([The Llama 3 Herd of
# Models](https://arxiv.org/abs/2407.21783), section 3.3.4): one every three hours. Those were loud. Others are quiet: a
# run that goes on for a week, with numbers that were wrong from the first step.
#
# This lesson is a clinic. Each patient is a real run, broken on purpose. You see nothing but what the ranks printed,
# what they sent and what they held, and write down a diagnosis. Only then do you see the code. Six patients in three
# wards are for today, and one of them you mend. Four more, and a second repair, are for another day.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% [markdown]
# ## How to examine
#
# Four questions, in this order, and an instrument for each. The two in bold are new.
#
# | question | instrument | what it tells |
# |---|---|---|
# | Who did not come? | the **[flight recorder](../docs/glossary.md#flight-recorder)**: the last collectives of every rank | a hang, a dead rank, ranks that parted ways |
# | How much was sent? | the ledger | no reduction, too much of it |
# | What is the same on all ranks, and from when on not? | **fingerprints** of parameters, of gradients, and of parameters after the update | where ranks drift apart |
# | What lives in memory, where, and since when? | bytes by device and by step | out of memory |
#
# A fingerprint is a short number computed from the bits of tensors (here a checksum, cut to four hexadecimal digits).
# The same bits have the same fingerprint, and different bits, almost always, another one. So ranks can compare
# gigabytes by comparing four characters:

# %% tags=["nbval-check-output"]
# %%ranks
from zerolab.lab import fingerprint

weights = torch.arange(1_000_000.0)
if rank == 2:
    weights[123_456] += 0.01
print("1,000,000 weights:", fingerprint([weights]))

# %% [markdown]
# One weight of rank 2's million is enough to tell it apart. (Sums and norms may not show it: they are rounded.)
#
# `lab.admit(n)` runs patient n and prints the evidence and four diagnoses. Each wrong one is plausible, and some are
# right for another patient, but something in the evidence speaks against it: find that before you write down a letter,
# with `lab.predict`. `lab.reveal` says what speaks against a wrong one, and `lab.uncover(n)` shows the code.
#
# ## Ward 1: it stops
#
# With patients 1 and 2 collectives give up after two seconds. In production the limit is 10 minutes with NCCL, 30 with
# gloo, unless you pass a `timeout` to `init_process_group`.
#
# The flight recorder's table says of each rank which collective it finished last and which it waits in, with its shape,
# and how many seconds ago it ended or began. Those that move tensors of the model have a number. Two small ones are the
# engine's own: ranks *announce* a gather that does not follow the order of the last step, and in backward they
# *exchange* which parameters they used. "Is at no line of the script" means that the rank's Python has left the cell.
#
# An all-reduce here is a reduce-scatter and then an all-gather (lesson 01). The table names the half that a rank is in,
# the exception the whole: "waits in reduce-scatter of blocks.0" and "all-reduce of blocks.0 failed" are the same call.
# Exit codes are given as `torchrun` gives them: a negative one is the number of the signal that ended the process (9 is
# SIGKILL, 11 a crash in native code).

# %%
lab.admit(1);

# %%
lab.predict("17.1", "c")  # a, b, c or d

# %%
lab.reveal("17.1")
lab.uncover(1)

# %%
lab.admit(2);

# %%
lab.predict("17.2", "b")

# %%
lab.reveal("17.2")
lab.uncover(2)

# %%
lab.admit(3);

# %%
lab.predict("17.3", "d")

# %%
lab.reveal("17.3")
lab.uncover(3)

# %% [markdown]
# ## Write: stop together
#
# Back to the first patient. Its ranks have different numbers of batches, and nobody knows how many: `batches` is an
# iterable without a length, as a stream is. The stub is the patient's code, without the engine. Mend it: the ranks
# train as long as *every* rank has a batch, and all return the same number of steps.

# %%
# %%exercise 17.1

# %%
lab.check("17.1")

# %% [markdown]
# Now the same uneven data on live ranks: rank 3 has two batches, the others three, of real text.

# %%
# %%ranks
from zerolab import lab
from zerolab.lab import GPT, batch, fingerprint, text

torch.manual_seed(0)
words, model = text(), GPT(layers=1, width=32)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
mine = [batch(words, rank, step, 4, 32) for step in range(2 if rank == 3 else 3)]
steps = lab.mine("17.1")(model, sgd, iter(mine))
mark = fingerprint(model.parameters())

# %% tags=["nbval-check-output"]
steps, marks = lab.pull("steps"), lab.pull("mark")
print("steps made:", steps, "· all parameters the same, bit for bit:", len(set(marks)) == 1)
assert steps == [2, 2, 2, 2] and len(set(marks)) == 1

# %% [markdown]
# Three ranks left a batch unused, and the run ended. The price is an all-reduce of one number in each step.
#
# ## Ward 2: it runs, and the numbers are wrong
#
# No error, no hang. The evidence is what each rank prints in each step: its loss, the fingerprint of its gradients
# *just before the update*, of its parameters *after* it, and the bytes that it sent. The model has 31,200 parameters in
# float32.

# %%
lab.admit(4);

# %%
lab.predict("17.4", "a")

# %%
lab.reveal("17.4")
lab.uncover(4)

# %% [markdown]
# The next patient was tried on 1, 2 and 4 ranks. All ranks got the *same* batch, so that the mean over the ranks is the
# same for every N.

# %%
lab.admit(5);

# %%
lab.predict("17.5", "c")

# %%
lab.reveal("17.5")
lab.uncover(5)

# %% [markdown]
# Equal fingerprints after each update rule out patient 4's fault, and bytes that you can explain rule out a missing
# reduction. But patient 5 passed both tests: a sum moves as many bytes as a mean, and is the same on every rank. Its
# fault shows only beside another number of ranks. So add a third test: make one step on the same batch with one rank
# and with two. The gradient norms must be equal.
#
# ## Ward 3: out of memory
#
# Look at each device first: if one GPU is full and the others are empty, the ranks were not spread over them. To every
# process on a node, `cuda:0`, or plain `cuda` without `torch.cuda.set_device()`, is the first GPU. Its own has the
# number `LOCAL_RANK`, the process's place on its node, which `torchrun` sets: on two nodes of 8 GPUs each, rank 9 has
# `cuda:1`. (No patient here has this fault, as there is no GPU.)

# %%
seen = lab.admit(6)

# %%
lab.predict("17.6", "b")

# %%
lab.reveal("17.6")
lab.uncover(6)
held = {"activations": dict(enumerate(seen[0], start=1))}
moment = "bytes alive after each validation batch, rank 0"
if lab.predicted("17.6"):
    plots.show(plots.growth(held, "validation steps", "Patient 6", moment))

# %% [markdown]
# A straight line, the same 5 MB for each batch: something is made in each and never let go.
# (Exercise 17.2, below, mends it.)
#
# ## In production
#
# `DistributedDataParallel` has an answer to uneven data: inside `join()`, a rank whose batches are used up takes part
# in the others' collectives with zeros, until all are done. Where yours stops with the shortest rank, this one goes on
# to the longest.
#
# torch and others have more instruments:
#
# - `dist.monitored_barrier` (gloo) is a barrier that names the rank that did not come.
# - On NVIDIA GPUs, with `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, torch's own flight recorder is written to a file for each rank
#   when a collective times out, and `torchfrtrace` reads the folder
#   ([tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)).
# - `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares the shapes of every collective before it starts. It is slow: for finding,
#   not for running.
# - `py-spy dump --pid` shows the line that a process is in, and lets it go on.
# - torchrun ends all ranks when one fails and prints the *first* failure, with its exit code.
#
# ## A listing that nobody ran
#
# A listing in an article averages the gradients of four ranks with an all-reduce, and each rank prints its own
# `loss.item()`.
#
# Below it stands what all ranks are said to have printed: "loss 1.6250", later "loss 1.3125".
#
# Can all ranks print the same loss? And can a loss be printed so round? 1.6250 is 26/16 and 1.3125 is 21/16.
# `lab.losses_of_listing` rebuilds the listing in the kindest way: one linear layer, the squared error, random data, as
# in listings of this kind, equal weights, gradients averaged, 200 steps.

# %%
# %%ranks
from zerolab import lab

own_data = lab.losses_of_listing(seed=1 + rank)
same_data = lab.losses_of_listing(seed=1)

# %% tags=["nbval-check-output"]
whose = {"own_data": "each rank its own data", "same_data": "all ranks the same data"}
for name, said in whose.items():
    same = [len(set(step)) == 1 for step in zip(*lab.pull(name))]
    print(f"{said}: all ranks print the same loss in {sum(same)} of {len(same)} steps")

# %% [markdown]
# **Not on data of their own:** in 0 of 200 steps. Ranks that train on their own data print their own losses: the loss
# is computed before anything is averaged. All of them print the same only if the loss itself is reduced, which this
# listing doesn't do, or if all have the same data, and then four ranks do the work of one (lesson 03). And a loss can
# be so round, but rarely: of the 10,000 endings with four decimals, 16 are sixteenths, one loss in 625; two of two
# would be one in 390,625 by chance. Numbers under a listing are evidence only if you can print them yourself.
#
# ## For another day
#
# About 40 minutes: patient 6 to mend, and two more wards. On a fresh kernel, first run the cells at the top that start
# the ranks; nothing else above is needed.
#
# ### Write: a validation that forgets
#
# Mend patient 6, and while you are there, make it right on many ranks: one number for all of them, in which every
# *sample* weighs the same. (Ranks may have different numbers of batches, and batches different sizes. Lesson 14 has the
# same trap with tokens.)

# %%
# %%exercise 17.2

# %%
lab.check("17.2")

# %%
# %%ranks
from zerolab import lab
from zerolab.lab import GPT, batch, text

torch.manual_seed(0)
words, model = text(), GPT(layers=1, width=32)
sizes = [1 + (rank + step) % 3 for step in range(rank + 1)]
held_out = [batch(words, rank, 100 + step, size, 32) for step, size in enumerate(sizes)]
loss = lab.mine("17.2")(model, iter(held_out))
with torch.no_grad():
    pairs = [(model(x, y).item(), len(x)) for x, y in held_out]
own = sum(value * size for value, size in pairs) / sum(size for _, size in pairs)

# %%
losses, owns = lab.pull("loss"), lab.pull("own")
print("validation loss of each rank's own samples:", *[f"{one:.4f} " for one in owns])
print("of all samples, the same on every rank:    ", *[f"{one:.4f} " for one in losses])
assert len(set(losses)) == 1 and min(owns) <= losses[0] <= max(owns)

# %% [markdown]
# ### Ward 4: nothing left but torch's own record
#
# Elsewhere there are no live ranks that compare calls and make a table. What there is: torch's own flight recorder. It
# is on unless `TORCH_FR_BUFFER_SIZE` is 0 and notes the last 2,000 collectives of every rank. `torchfrtrace` lays the
# dumps of all ranks side by side, call by call in each group, and reports the first calls that do not fit.
#
# These two patients ran in fresh processes, without this course's engine. When nothing moved any more, each rank dumped
# its record as JSON, and what you read is torchfrtrace's report. In it a sequence number counts a group's calls from 1,
# a record id all calls of a rank from 0. (torch's own files are pickles, and reading a stranger's pickle runs the
# stranger's code. On gloo, torch 2.13 leaves the members of the groups out of the record, and torchfrtrace ends with a
# KeyError: so each rank adds its groups.)

# %%
lab.admit(7);

# %%
lab.predict("17.7", "b")

# %%
lab.reveal("17.7")
lab.uncover(7)

# %%
lab.admit(8);

# %%
lab.predict("17.8", "c")

# %%
lab.reveal("17.8")
lab.uncover(8)

# %% [markdown]
# ### Ward 5: as it was reported
#
# These two are rebuilt from fixes of 2026 to two libraries that many people train with. Neither stops, and neither
# prints an error. Each fix is named below the code.

# %%
lab.admit(9);

# %%
lab.predict("17.9", "a")

# %%
lab.reveal("17.9")
lab.uncover(9)

# %%
lab.admit(10);

# %%
lab.predict("17.10", "d")

# %%
lab.reveal("17.10")
lab.uncover(10)

# %% [markdown]
# ## Questions
#
# 1. How would you find a hang on 512 ranks?
# 2. Three ranks report "connection closed by peer", one reports nothing. Where do you look, and for what?
# 3. A run on 8 GPUs converges worse than on one. Which three fingerprints do you compare, and what does each tell?
# 4. Why can Adam hide that gradients were summed and not averaged? What brings it to light?
# 5. A rank finds a NaN in its batch. What may it decide alone?
# 6. Memory grows by the same amount with each batch. Training is well. Which line do you look for?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. By the ranks that did not come. Take every rank's last collectives (torch's flight recorder, or the table of this
#    course), find the first number at which they differ, and look at the minority. Then see where that rank's Python is
#    (py-spy), and whether its process lives. The ranks that wait are healthy.
# 2. At the silent one. Its exit code tells: -9, or 137 = 128 + 9 as a shell tells it, is SIGKILL, mostly the host's
#    memory; -11 is a crash in native code. The others only felt its connection close (patient 3).
# 3. Parameters before the first step: were they the same? Gradients after the reduction: was it made? Parameters after
#    the update: is the optimizer the same? The first that differs names the part (patient 4). If none differs, compare
#    with one process on the same total batch: the scale (patient 5), the data (lesson 03), then what is neither
#    parameter nor gradient, such as a buffer (patient 9, for another day).
# 4. Adam divides the average gradient by the root of the average square, so a constant factor cancels. Gradient norms
#    that grow with N show it, and so does clipping, which then clips in more steps.
# 5. Nothing that changes what it calls: not to skip, not to stop, not to catch the error and go on. It tells the others
#    (an all-reduce of a flag), and all skip, or none (patient 2; lesson 08's scaler).
# 6. Something that is kept from each batch with a graph behind it: a loss added up or put in a list without .item(), in
#    a loop without torch.no_grad() (patient 6).

# %%
lab.stop()
lab.progress()
