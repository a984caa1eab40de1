# %% [markdown]
# # 02 · Where the memory goes
#
# A model of 7.5 billion parameters in 16-bit numbers is a file of 15 GB. You rent a GPU of 80 GB for it, start to train,
# and before the first step is over the run ends with *out of memory*. Training needs **120 GB, and then some**. Whoever
# does not know where they go buys hardware by trial and error, or loses a week to settings that save nothing.
#
# After this lesson you can say what a training step will hold, to the byte, before it runs.
#
# One rank is enough today: memory is a matter of one GPU. (A *rank* is one of the processes that train together; lesson
# 00 shows them.)

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(1)

# %% [markdown]
# The model is a small GPT that reads bytes, the text is English prose that comes with Python. Ψ (psi) is what the papers
# call the number of parameters.

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
from zerolab.lab.data import batch, text
from zerolab.lab.models import GPT, Block

words = text()
torch.manual_seed(0)
model = GPT(layers=4, width=128)
psi = sum(param.numel() for param in model.parameters())
print(f"Ψ = {psi:,} parameters in {len(list(model.parameters()))} tensors, {psi * 4:,} bytes as float32")

# %% [markdown]
# ## Predict
#
# Behind every parameter stand other numbers, of the same shape:
#
# - its **gradient**, which backward writes to `param.grad`;
# - the **optimizer state**: Adam keeps two running averages, of the gradient and of its square.
#
# Parameters, gradients and optimizer state together are called the **model states**. Everything is in float32, 4 bytes a
# number. How many bytes of model states are there for this model, when backward has returned in the second step?

# %% tags=["predict"]
lab.predict("02.1", ...)

# %% tags=["answer"]
lab.predict("02.1", (4 + 4 + 8) * 867_072)  # parameter, gradient, two averages

# %% [markdown]
# ## See
#
# Plain PyTorch, one step after the other. Nothing is estimated: we add up the bytes of the tensors that are there.

# %%
# %%ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
moments = {}


def count(moment):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    sizes = (sum(t.nbytes for t in tensors) for tensors in (model.parameters(), grads, state))
    moments[moment] = dict(zip(("parameters", "gradients", "optimizer"), sizes))


# %%
# %%ranks
for step in (1, 2):
    count(f"before\nstep {step}")
    loss = model(*batch(words, rank, step, batch_size=8, context=64))
    loss.backward()
    count(f"after\nbackward {step}")
    optimizer.step()
    count(f"after\noptimizer.step {step}")
    optimizer.zero_grad()

# %%
from zerolab.lab import plots

moments = lab.pull("moments", rank=0)
lab.measured("02.1", sum(moments["after\nbackward 2"].values()), "bytes")
lab.reveal("02.1")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("02.1"):
    bars = {name: {kind: size / 1e6 for kind, size in held.items()} for name, held in moments.items()}
    title = "Two steps, and what is there when each part of them is over"
    plots.show(plots.stacks(bars, title, "A GPT of 0.87 million parameters in float32 with AdamW", "MB"))

# %% [markdown]
# Three things to see:
#
# 1. The optimizer state does **not exist before the first `optimizer.step()`**. A run that fits for one step can fail in
#    the second: that is why you predicted the second.
# 2. `zero_grad()` gives the gradients back (it sets `.grad` to None), so between steps there are 12 bytes per parameter.
# 3. Parameters are a quarter of it at most. Shrinking *them* is the last thing to do, not the first.

# %% [markdown]
# The sum is not exactly 16Ψ. Where are the bytes that are too many?

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("02.1"):
    psi, tensors = 867_072, 53
    held = moments["after\nbackward 2"]
    print(f"parameters {held['parameters']:,} = 4Ψ + {held['parameters'] - 4 * psi}")
    print(f"gradients  {held['gradients']:,} = 4Ψ + {held['gradients'] - 4 * psi}")
    print(f"optimizer  {held['optimizer']:,} = 8Ψ + {held['optimizer'] - 8 * psi}")
    assert held["optimizer"] - 8 * psi == 4 * tensors  # Adam counts its steps: a float32 for each tensor
