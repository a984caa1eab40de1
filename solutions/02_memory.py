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

lab.start(1);

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

# %%
lab.predict("02.1", (4 + 4 + 8) * 867_072)

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

# %% [markdown]
# Not one byte is left to explain: Adam also counts its steps, in one float32 for each of the 53 tensors, 212 bytes.
#
# ## 16 bits, and the same 16 bytes
#
# Large models are trained in *mixed precision*: forward and backward compute in **bfloat16**, 2 bytes a number. So half
# of everything? Look at what an update does to a parameter in bfloat16, which has about three decimal digits:

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
weight = torch.tensor(1.0)
print("float32: ", (weight + 0.001).item())
print("bfloat16:", (weight.bfloat16() + 0.001).item(), "- the update is lost")

# %% [markdown]
# So the optimizer keeps its own float32 copy of the parameters, the **master weights**, updates that, and rounds it to
# bfloat16 for the next forward. Gradients arrive in bfloat16; Adam's two averages stay float32.
#
# How many bytes per parameter is that, and how many is it in float32 with plain SGD, which keeps no state at all?

# %%
# bytes per parameter: bfloat16 with masters and Adam, then float32 with SGD without momentum
lab.predict("02.2", 2 + 2 + (4 + 4 + 4))
lab.predict("02.3", 4 + 4)

# %% [markdown]
# `zerolab.DDP` is this course's plainest training engine: it keeps everything on every rank, and it can keep masters.
# `model_states` counts what it holds, storage by storage.

# %%
# %%ranks
from torch.optim import SGD, AdamW
from zerolab import DDP, Precision
from zerolab.measure import model_states


def bytes_per_parameter(precision, Optimizer, **options):
    zero = DDP(GPT(layers=4, width=128), units=[Block], precision=precision)
    optimizer = Optimizer(zero.model.parameters(), lr=1e-3, **options)
    for step in range(2):
        optimizer.zero_grad()
        zero.model(*batch(words, rank, step, 8, 64)).backward()
        held = model_states(zero, optimizer)
        optimizer.step()
    return {kind: held[kind] / psi for kind in ("parameters", "gradients", "optimizer")}


# %%
# %%ranks
costs = {
    "float32\nAdam": bytes_per_parameter(None, AdamW),
    "bfloat16 + masters\nAdam": bytes_per_parameter(Precision(torch.bfloat16), AdamW),
    "float32\nSGD, momentum": bytes_per_parameter(None, SGD, momentum=0.9),
    "float32\nSGD": bytes_per_parameter(None, SGD),
}

# %%
costs = lab.pull("costs", rank=0)
lab.measured("02.2", round(sum(costs["bfloat16 + masters\nAdam"].values()), 2), "bytes per parameter")
lab.measured("02.3", round(sum(costs["float32\nSGD"].values()), 2), "bytes per parameter")
lab.reveal("02.2")
lab.reveal("02.3")

# %%
# NBVAL_CHECK_OUTPUT
if lab.predicted("02.2") and lab.predicted("02.3"):
    title = "What a parameter costs when backward has returned"
    plots.show(plots.stacks(costs, title, "Counted from the live storages of the GPT", "bytes per parameter"))

# %% [markdown]
# The lowest block of the second bar is 6 = 2 + 4: the bfloat16 copy and the master. The ZeRO paper writes the same
# bar as **2 + 2 + 12**, counting the master with the optimizer, since the optimizer is the only one to read it. Both sums are
# 16: mixed precision makes arithmetic fast and activations small, and it **saves no model states at all**. For the 7.5
# billion parameters of the beginning: 16 × 7.5 = 120 GB.
#
# Adam against SGD: 8 bytes of 16 are the price of Adam's two averages. That half is what lesson 04 shares out first.

# %% [markdown]
# ## Flat storage
#
# 53 tensors are 53 allocations, and later they would be 53 messages to the other ranks. So an engine lays the parameters
# of a block end to end in **one flat buffer**, and gives the model **views**: tensors that have a shape of their own and
# no memory of their own.

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
flat = torch.zeros(6)
weight = flat[2:6].view(2, 2)  # no copy: the last four elements, seen as a matrix
weight += 1
print(flat.tolist())
print("the view starts", weight.data_ptr() - flat.data_ptr(), "bytes after the buffer")

# %% [markdown]
# Later lessons cut the buffer into equal pieces, one for each rank. Where the elements do not divide by the number of
# ranks, zeros are added at the end: **padding**. The cuts pay no attention to where a parameter ends; that is what makes
# all pieces equal.

# %%
# NBVAL_CHECK_OUTPUT
import torch
from zerolab.layout import Layout

three = [("a", torch.empty(5)), ("b", torch.empty(2, 2)), ("c", torch.empty(3, 2))]
plots.show(plots.flat_storage(Layout(three, world_size=4)))

# %% [markdown]
# ## Write: a flat buffer with views
#
# `flat_buffer(params, world_size)` returns the buffer and a list of views into it. The views hold the parameters' values,
# and writing to a view must change the buffer. About ten lines. Stuck? `lab.hint("02.1")`.

# %%
# %%exercise 02.1
import torch
from torch import Tensor


def flat_buffer(params: list[Tensor], world_size: int) -> tuple[Tensor, list[Tensor]]:
    numel = sum(param.numel() for param in params)
    size = -(-numel // world_size) * world_size  # rounded up
    flat = torch.zeros(size, dtype=params[0].dtype, device=params[0].device)
    views, offset = [], 0
    for param in params:
        view = flat[offset : offset + param.numel()].view(param.shape)
        view.copy_(param.detach())
        views.append(view)
        offset += param.numel()
    return flat, views


# %%
lab.check("02.1")

# %% [markdown]
# Now your buffer goes under the real model, cut for 5 ranks. The model must not notice: same loss, to the bit. And the
# bytes must be those of before, but for the padding. How much is that, if Ψ = 867,072?

# %%
lab.predict("02.4", 4 * (-867_072 % 5))

# %%
# %%ranks
from zerolab import lab

flat_buffer = lab.mine("02.1")
inputs = batch(words, rank, 3, 8, 64)
before = model(*inputs).item()
params = list(model.parameters())
flat, views = flat_buffer(params, world_size=5)
for param, view in zip(params, views):
    param.data = view  # its own memory goes, the view takes its place
padding = flat.nbytes - sum(param.nbytes for param in params)
assert model(*inputs).item() == before
assert len({param.untyped_storage().data_ptr() for param in params}) == 1

# %%
lab.measured("02.4", lab.pull("padding", rank=0), "bytes")
lab.reveal("02.4")

# %% [markdown]
# ## Hooks: being called when it happens
#
# An engine must act in the middle of backward, and the user's loop is `loss.backward()`, one line. PyTorch calls back:
# a **hook** is a function that you register, and that runs when something is done. This one runs whenever the gradient of
# a parameter is complete:

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
seen = []
hooks = [param.register_post_accumulate_grad_hook(seen.append) for param in params]
model.zero_grad()
model(*inputs).backward()
for hook in hooks:
    hook.remove()
name = {param: name for name, param in model.named_parameters()}
print("first:", ", ".join(name[param] for param in seen[:3]))
print("last: ", ", ".join(name[param] for param in seen[-2:]))
print("a hook is given the", "parameter" if any(seen[0] is param for param in params) else "gradient")

# %% [markdown]
# Two things to remember:
#
# - Gradients arrive **from the last layer to the first**, while the rest of backward still runs. Whoever sends them as
#   they come sends while others compute. That is lesson 09.
# - The hook is handed the **parameter**, and the gradient is its `.grad`. A well-known tutorial averages what the hook is
#   given, and so averages weights. Nothing fails; the model just learns something else.
