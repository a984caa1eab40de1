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

# %% [markdown]
# 29 calls and not one byte more than the formula: 2 × ¾ × 4 bytes × 470,528.
#
# Now train: 10 steps on real text, and the same once more in *one process that does all the work alone*. It gets the
# global batch in one piece.

# %%
# %%ranks


def train(model, after_backward=None, steps=10, data_of=lambda rank: rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch(words, data_of(rank), step, 4, 64)).backward()
        if after_backward is not None:
            after_backward(list(model.parameters()))
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


naive = train(make_model(), average)

# %%
import torch
from zerolab.lab.data import batch, text
from zerolab.lab.models import GPT, Block

torch.set_num_threads(1)  # as on the ranks: how work is cut among threads changes the order of sums
words = text()


def alone(gradients, steps=10):
    torch.manual_seed(0)
    model = GPT(layers=2, width=128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        gradients(model, [batch(words, rank, step, 4, 64) for rank in range(4)])
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def in_one_piece(model, batches):
    x, y = (torch.cat(part) for part in zip(*batches))  # 16 sequences
    model(x, y).backward()


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other))


one_process = alone(in_one_piece)
naive = lab.pull("naive")
print(f"four ranks and one process: weights differ by {largest_difference(naive[0], one_process):.0e} at most")

# %%
# NBVAL_CHECK_OUTPUT
print("all ranks end with the same weights, to the bit:", all(largest_difference(naive[0], n) == 0 for n in naive))
print("four ranks and one process agree to 0.00001:", largest_difference(naive[0], one_process) < 1e-5)

# %% [markdown]
# The ranks agree to the bit: after an all-reduce all hold the same bytes. With one process they agree to about six digits,
# not to the bit. Floating point sums depend on their order: 16 sequences in one matrix product are added up in another
# order than four times 4, and the ring adds the ranks' parts in an order of its own. Nobody is more right than the other.
# (Further down you get equality to the bit, by taking care of the order.)
#
# ## Buckets
#
# A message has a price that does not depend on its size: its **latency**. On a laptop you do not feel it, so we emulate a
# network of 200 MB/s on which every message takes 1 ms. An all-reduce in a ring of 4 ranks is 2 × 3 messages, one after
# the other. How many milliseconds will averaging take with your 29 calls?

# %%
lab.predict("03.3", 1000 * (29 * 6 * 0.001 + 2_823_168 / 200e6))

# %% [markdown]
# ## Write: a bucket
#
# The gradients can travel together, in one flat tensor, a **bucket**. You made one in lesson 02. Now with three methods:
# `collect` copies gradients in, `reduce` makes one all-reduce, `write_back` copies the means out. Mind the parameter
# without a gradient: here another rank may have had one, and all must send buckets of the same layout.

# %%
# %%exercise 03.2
import torch
import torch.distributed as dist
from torch import Tensor


class Bucket:
    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.flat = torch.zeros(sum(param.numel() for param in params))
        self.views, offset = [], 0
        for param in params:
            self.views.append(self.flat[offset : offset + param.numel()].view_as(param))
            offset += param.numel()

    def collect(self) -> None:
        for param, view in zip(self.params, self.views):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()

    def write_back(self) -> None:
        for param, view in zip(self.params, self.views):
            param.grad = view.clone()


# %%
lab.check("03.2")

# %%
lab.link("200 MB/s, 1 ms")

# %%
# %%ranks
import time
from statistics import median

Bucket = lab.mine("03.2")
bucket = Bucket(params)


def bucketed(params):
    bucket.collect()
    bucket.reduce()
    bucket.write_back()


def seconds(function, times=3):
    found = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        function(params)
        found.append(time.perf_counter() - begin)
    return median(found)


times = seconds(average), seconds(bucketed)
with calls() as book:
    bucketed(params)
number, sent = len(book.calls), book.sent

# %%
times = [max(of_ranks) for of_ranks in zip(*lab.pull("times"))]
lab.measured("03.3", round(1000 * times[0]), "ms")
lab.reveal("03.3")

# %%
if lab.predicted("03.3"):
    transfer = lab.pull("sent", rank=0) / 200e6
    costs = {
        "29 calls": plots.Cost(29 * 6 * 0.001, transfer, times[0]),
        "1 call": plots.Cost(6 * 0.001, transfer, times[1]),
    }
    title = "The same bytes in 29 calls and in one"
    plots.show(plots.call_costs(costs, title, "Averaging the gradients of the GPT on 4 ranks"))

# %%
# NBVAL_CHECK_OUTPUT
number, sent = lab.pull("number", rank=0), lab.pull("sent", rank=0)
if lab.predicted("03.2") and lab.predicted("03.3"):
    print(f"with the bucket: {number} call, {sent:,.0f} bytes sent per rank")
    assert times[0] > 4 * times[1]
lab.link(None)
