# %% [markdown]
# # 03 · Data parallel
#
# One GPU would train for eight days. You rent four, and expect two days. The plan is called **data parallelism**: every
# rank has the whole model, each takes a part of the batch, and together they make one step.
#
# It is a dozen lines, and three mistakes in them cost real money, because nothing fails: gradients that are *added* where
# they should be averaged are a learning rate four times too high; a call for each tensor lets the network wait for itself;
# and a sampler that was forgotten makes four GPUs do the work of one, to the last bit. You will make it right, then watch
# the third mistake.

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(4);

# %%
# %%ranks
# NBVAL_CHECK_OUTPUT
import torch
import torch.distributed as dist
from zerolab.lab.data import batch, text
from zerolab.lab.models import GPT, Block

words = text()


def make_model():
    torch.manual_seed(0)  # every rank begins with the same weights
    return GPT(layers=2, width=128)


model = make_model()
params = list(model.parameters())
print(f"{sum(p.numel() for p in params):,} parameters in {len(params)} tensors")

# %% [markdown]
# ## The mean of N batches
#
# All ranks' batches of one step together are the **global batch**. Here each of four ranks takes 4 sequences, so the
# global batch has 16. Let us look at one gradient, that of four weights, on each rank:

# %%
# %%ranks
model(*batch(words, rank, 0, batch_size=4, context=64)).backward()  # which batch depends on the rank
grad = params[4].grad[0, :4] * 1e5
mine = [round(x, 1) for x in grad.tolist()]
dist.all_reduce(grad)  # replaces the tensor by the sum over the ranks, on every rank
mean = [round(x, 1) for x in (grad / world_size).tolist()]

# %%
from zerolab.lab import plots

plots.show(plots.before_after("all-reduce, then divided by 4", lab.pull("mine"), lab.pull("mean")))

# %% [markdown]
# The ranks saw different text, so they want to go different ways. If each took its own step, there would be four models
# after it. So they agree on the **mean**. That is no compromise but exactly right. The loss of a batch is the mean of its
# sequences' losses, and for four batches of equal size
#
# $$L_{16} = \tfrac14 (L_4^{(0)} + L_4^{(1)} + L_4^{(2)} + L_4^{(3)}) \quad\text{so}\quad
# \nabla L_{16} = \tfrac14 (\nabla L_4^{(0)} + \nabla L_4^{(1)} + \nabla L_4^{(2)} + \nabla L_4^{(3)}).$$
#
# The mean of the four gradients *is* the gradient of the global batch. And as all ranks began with the same weights and
# make the same step, they stay equal; no weight ever travels.
#
# ## Predict
#
# The plainest way: after backward, all-reduce each parameter's gradient. In one step, how many calls is that? And how many
# bytes does a rank send, if an all-reduce of B bytes among N ranks runs as a ring (lesson 01: each rank sends 2(N-1)/N of
# B)? There are 470,528 parameters in float32.

# %%
lab.predict("03.1", 29)
lab.predict("03.2", 2 * 3 / 4 * 4 * 470_528)

# %% [markdown]
# ## Write: average
#
# Three lines will do. One trap: a parameter that nobody used has no gradient.

# %%
# %%exercise 03.1
import torch.distributed as dist
from torch import Tensor


def average(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# %%
lab.check("03.1")

# %% [markdown]
# ## Measure
#
# Your code on real gradients. `calls()` writes down every collective that passes PyTorch's dispatcher.

# %%
# %%ranks
from zerolab import lab
from zerolab.lab.calls import calls

average = lab.mine("03.1")
with calls() as book:
    average(params)
number, sent = len(book.calls), book.sent

# %%
lab.measured("03.1", lab.pull("number", rank=0), "calls")
lab.measured("03.2", lab.pull("sent", rank=0), "bytes")
lab.reveal("03.1")
lab.reveal("03.2")
