# %% [markdown]
# # 24 · A slow link
#
# **The question.** Two halves of a cluster are in two cities, and the link between them moves 5 GB in a second, say.
# Data parallelism needs a mean over all gradients in every step. With 7 billion parameters in float32 they are 28 GB,
# and each half sends that much: 5.6 seconds in every step, in which nobody computes. Compression makes gradients
# smaller (lesson 12), but every step still waits for an exchange. Must the replicas meet in *every* step? You write an
# optimizer for replicas that meet only every sixteenth step, and see what that saves and what the loss pays for it.
#
# A [replica](../docs/glossary.md#replica) is, as in lesson 21, the ranks that hold a whole model together. It doesn't
# matter here how: each of four ranks is one.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %%
# %%ranks
import torch
from zerolab import lab
from zerolab.lab import GPT, batch, text

words = text()


def make_model():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


# %% [markdown]
# ## Steps that send nothing
#
# With **[local steps](../docs/glossary.md#local-steps)** each replica makes H steps on its own, with its own optimizer
# and its own samples, and then all average their *parameters* and go on from the mean. H steps and the average are a
# *round*.
#
# To see it, take a model of two parameters. The four ranks have different data, so each has a loss of its own, and its
# own best place. All begin at the same point. `walk` makes 4 local steps of SGD and the average, three times.

# %%
# %%ranks
walk = lab.walk(lab.PlainAverage, rounds=3)

# %% tags=["nbval-check-output"]
subtitle = "two parameters, four ranks, 4 local steps in each round"
plots.show(plots.rounds({"the plain average": lab.pull("walk")}, subtitle))

# %% [markdown]
# In each round the ranks drift apart, each towards its own best place. What they agree on is the orange line, and that
# turns slowly, by 25° or so from one round to the next.
#
# DiLoCo (arXiv 2311.08105) makes use of that. The line is a direction, like a gradient, so it may have an optimizer of
# its own. The **[outer gradient](../docs/glossary.md#outer-gradient)** is the old parameters minus the mean of the new
# ones, and not the other way round, since a step *subtracts* its gradient. The outer optimizer is SGD with Nesterov's
# momentum. It keeps a `speed`: what it was, times the momentum, plus the new outer gradient. Where rounds agree, it
# goes further than their mean. With a learning rate of 1 and no momentum, it is the plain average.
#
# ## Predict
#
# 4 ranks, Ψ = 136,960, float32, H = 16. How many bytes does a rank send per step, on average? (In a ring, an all-reduce
# among N ranks sends 2(N-1)/N of the tensor's bytes.)

# %%
lab.predict("24.1", "0.375 Ψ")  # bytes

# %% [markdown]
# ## Write: the outer step
#
# An `Outer` is made before the first local step, and its `step` is called at the end of each round.

# %%
# %%exercise 24.1

# %%
lab.check("24.1")

# %% [markdown]
# Now with your outer step. DiLoCo's paper takes a learning rate of 0.7 and a momentum of 0.9. Here you also see a
# momentum of 0.5. The cross is the best place for the mean of the four losses.

# %%
# %%ranks
Outer = lab.mine("24.1")
walks = {"the plain average": lab.walk(Outer, lr=1.0, momentum=0.0)}
for m in (0.5, 0.9):
    walks[f"lr 0.7, momentum {m}"] = lab.walk(Outer, lr=0.7, momentum=m)

# %% tags=["nbval-check-output"]
walks = lab.pull("walks")  # of each rank
plots.show(plots.rounds({name: [of[name] for of in walks] for name in walks[0]}, subtitle))

# %% [markdown]
# Momentum gets further in as many rounds, and strong momentum too far: after five rounds it is at the cross, and its
# speed carries it past. How far can it go? If all outer gradients were the same g, the speed would grow to g / (1 - m),
# and an outer step to lr · g / (1 - m). With m = 0.5 that is 1.4 times what the ranks have moved, with 0.9 it is 7
# times. But the speed needs many rounds to grow, and as many to turn.
#
# ## Predict again
#
# In a moment a GPT makes 64 steps of AdamW on four ranks, in five ways: with gradients averaged in every step; with an
# outer step after every 4th, and after every 16th, both with lr 0.7 and momentum 0.5; after every 4th with momentum
# 0.9; and alone, without any communication. With an outer step after every 4th there are 16 rounds. Is the loss with
# momentum 0.9 `"less"` than with 0.5, `"more"`, but less than alone, or the `"most"` of all?

# %%
lab.predict("24.2", "most")  # "less", "more" or "most"

# %% [markdown]
# ## Measure: time on the link
#
# First what one exchange takes on a slow link: the mean of all gradients, which every step needs, and your outer step,
# which every H-th needs. The fastest of three counts.

# %%
lab.link("5 MB/s, 200 us")

# %%
# %%ranks
model = make_model()
model(*batch(words, rank, 0, 4, 64)).backward()
every_step = lab.fastest(lambda: lab.average_gradients(model))
a_round = lab.fastest(Outer(model.parameters()).step)

# %%
every_step, a_round = (lab.pull(name, rank=0) for name in ("every_step", "a_round"))
print(f"gradients in every step: {every_step:.3f} s for each step, on the emulated link")
for H in (4, 16):
    print(f"an outer step every {H:2} steps: {a_round / H:.3f} s for each step")
lab.link(None)

# %% [markdown]
# The bytes are divided by H. The time is divided by less if your outer step sends each tensor by itself, as the
# course's does: `average_gradients` makes one call, and each call has a latency and work of its own.
#
# ## Measure: bytes against loss
#
# This is the loop. Only its last two lines, from `if rounds` on, are new. The rest is data parallelism, with the mean
# made only if H = 1. The learning rate falls to 0 in all runs. The cell takes ten seconds or more.

# %%
# %%ranks
STEPS = 64


def train(H, **outer):  # H = 1: gradients in every step; None: never
    model = make_model()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    to_zero = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, STEPS)
    rounds = Outer(model.parameters(), **outer) if outer else None
    sent = 0.0
    for step in range(STEPS):
        model(*batch(words, rank, step, 4, 64)).backward()
        if H == 1:
            sent += lab.sent_by(lambda: lab.average_gradients(model))
        adam.step()
        to_zero.step()
        adam.zero_grad()
        if rounds and (step + 1) % H == 0:
            sent += lab.sent_by(rounds.step)
    return sent / STEPS, lab.validation_loss(model, words)


runs = {"every step": train(1), "alone": train(None)}
for H in (4, 16):
    runs[f"H = {H}"] = train(H, lr=0.7, momentum=0.5)
strong = train(4, lr=0.7, momentum=0.9)[1]

# %%
runs, strong = lab.pull("runs", rank=0), lab.pull("strong", rank=0)
mild, alone = runs["H = 4"][1], runs["alone"][1]
lab.measured("24.1", runs["H = 16"][0])
lab.reveal("24.1")
lab.measured("24.2", "less" if strong < mild else "more" if strong < alone else "most")
lab.reveal("24.2")

# %%
if lab.predicted("24.1") and lab.predicted("24.2"):
    for name, (sent, loss) in runs.items():
        print(f"{name:10} {sent:9,.0f} bytes per step, loss {loss:.2f}")
    print(f"H = 4, but with momentum 0.9 and not 0.5: loss {strong:.2f}")
    every, rare = runs["every step"], runs["H = 16"]
    said = f"Loss {every[1]:.2f} with gradients in every step, {rare[1]:.2f} with a"
    said += f" sixteenth of the bytes, {alone:.2f} with none."
    title, how = "Bytes against loss", "64 steps of AdamW on 4 ranks, the same batches"
    says = ("bytes sent per rank and step", "loss on other text")
    dots = {name: of for name, of in runs.items() if of[0]}
    plots.show(plots.tradeoff(dots, title, how, says, said, "every step", True))
    assert round(every[0] / rare[0]) == 16 and every[1] < rare[1] < alone < strong

# %% [markdown]
# The loss pays something, but with momentum 0.5 less than it pays for no communication at all. Local steps make a
# different run, not the same run faster.
#
# Momentum 0.9 is what the paper and torchft's example
# [`train_diloco.py`](https://github.com/pytorch/torchft/blob/73dafea/train_diloco.py) take, and here it is worse than
# no communication at all. Think of the third panel of the walks above: a likely reason is that early rounds agree, so
# the speed adds up as many as ten of them, and this run has only 16. A longer one may come back; no cell here tries
# that. The outer optimizer is tuned like any other.
#
# ## In production
#
# - **[torchft](https://github.com/pytorch/torchft/blob/73dafea/torchft/local_sgd.py)** has a `DiLoCo` too. It keeps
#   `old` in the host's memory unless it is told otherwise, and if an error occurs in an outer step, the parameters go
#   back to `old`. As replicas meet every H steps, lesson 21's quorum is needed only then, and a death costs at most the
#   H steps of one replica.
# - **Two cities are not the limit.** INTELLECT-1, a model of 10 billion parameters, was trained on three continents by
#   nodes that came and went (arXiv 2412.01152). Each node shards with FSDP2 and meets the others for the outer step,
#   whose all-reduce sends int8. The authors report 400 times less to send than data parallelism, and GPUs that computed
#   83 to 96 % of the time.
# - **The burst.** Bytes per step are few on average, but they all come at once, after every H-th step, and all wait.
#   Streaming DiLoCo (arXiv 2501.18512) sends one part of the model at a time, at different steps, computes meanwhile,
#   and sends 4 bits for each number.
#
# ## As well as synchronous training?
#
# The paper's abstract says that DiLoCo trains as well, and communicates 500 times less. That it sends H times less you
# have measured. What it says about the loss is about 8 workers on the C4 data set. Here no run with local steps was as
# good as gradients in every step, and one was worse than no communication at all. Ask for how many rounds, from which
# start, against which baseline.
#
# ## Questions
#
# 1. 8 replicas, 7 billion parameters in float32, H = 500. How many bytes does a replica send per step, and what must it
#    keep that it didn't need before?
# 2. An exchange takes 3 seconds on the link and a step 0.5 seconds. What part of its time does a run that exchanges in
#    every step spend waiting? From which H on is that at most 5 %?
# 3. An outer step sends each tensor by itself. What does that cost, on which links, and what would you change?
# 4. All rounds have the same outer gradient g, lr is 0.7 and momentum 0.9. How long is the first outer step, how long
#    the 16th, and how long can it get? And with momentum 0.5?
# 5. After an outer step, what is the same on all replicas, and what isn't? What does a newcomer take from a peer, and
#    when may it join?
# 6. Top-k with error feedback (lesson 12) or local steps: what does each save and cost? Can a run have both?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Every 500 steps 2 · 7/8 · 4 · 7 · 10⁹ bytes, 49 GB: 98 MB per step. It keeps the old parameters and the speed,
#    8 bytes more for each parameter of its shards, on the host if need be.
# 2. In every step, 3 of 3.5 seconds: 86 %. With local steps it waits 3 seconds of 3 + 0.5 H, which is 5 % at H = 114.
# 3. As many latencies as tensors, and the work of a call for each. The bytes are the same. It costs most where the
#    latency is high and tensors are small. Put all of them into one flat tensor, or into a few buckets, as data
#    parallelism does with gradients (lesson 03).
# 4. The first has speed g and is 0.7 · (1 + 0.9) g, 1.33 g. The k-th is 0.7 · (1 - 0.9ᵏ⁺¹) / (1 - 0.9) g: 5.83 g for
#    the 16th, and at most 7 g. With 0.5 the first is 1.05 g, and none is longer than 1.4 g.
# 5. The parameters, `old` and the speed are the same. Each replica's AdamW has averages of its own gradients. A
#    newcomer takes parameters and speed, and one peer's AdamW, which is as good as any. It joins where a round begins:
#    in the middle of one, no two replicas have the same parameters.
# 6. Top-k sends less, but in every step, which waits for a latency; what was not sent arrives late. Local steps send
#    everything, seldom, and between rounds the replicas drift apart. Both together: compress the outer gradient, as
#    INTELLECT-1 and Streaming DiLoCo do with fewer bits.

# %%
lab.stop()
lab.progress()
