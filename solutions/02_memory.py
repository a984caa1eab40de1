# %% [markdown]
# # 02 · Where the memory goes
#
# A model of 7.5 billion parameters in 16-bit numbers is a file of 15 GB. You rent an 80 GB GPU for it and start
# training, and before the first step is over the run dies with *[out of memory](../docs/glossary.md#out-of-memory)*.
# Training needs **many times that**. If you don't know where it goes, you buy hardware by trial and
# error, or lose a week to settings that save nothing.
#
# After this lesson you can say what a training step will hold, to the byte, before it runs.
#
# One rank is enough today, because memory is a question about one GPU. (A *rank* is one of the processes that train
# together; lesson 00 shows them.)

# %%
# %load_ext zerolab.lab
from zerolab import lab

lab.start(1);

# %% [markdown]
# The model is a small GPT that reads bytes. The text is English prose that ships with Python. Ψ (psi) is what the
# papers call the number of parameters.

# %% tags=["nbval-check-output"]
# %%ranks
import torch
from zerolab.lab import GPT, Block, batch, text

words = text()
torch.manual_seed(0)
model = GPT(layers=4, width=128)
psi = sum(param.numel() for param in model.parameters())
tensors = len(list(model.parameters()))
print(f"Ψ = {psi:,} parameters in {tensors} tensors, {psi * 4:,} bytes as float32")

# %% [markdown]
# ## Predict
#
# Behind every parameter there are other numbers of the same shape:
#
# - its **gradient**, which backward writes to `param.grad`;
# - the **optimizer state**: Adam keeps two running averages, one of the gradient and one of its square.
#
# Parameters, gradients and optimizer state together are called the **[model states](../docs/glossary.md#model-states)**. Everything here is float32, 4
# bytes per number. How many bytes of model states does this model have when backward returns in the second step?

# %%
lab.predict("02.1", (4 + 4 + 8) * 867_072)  # bytes

# %% [markdown]
# ## See
#
# This is plain PyTorch. Before a step, after its backward and after `optimizer.step()`, we add up the bytes of the
# tensors that make up the model states. Nothing is estimated.

# %%
# %%ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
moments = {}


def count(moment):
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    all_of = {"parameters": model.parameters(), "gradients": grads, "optimizer": state}
    moments[moment] = {kind: sum(t.nbytes for t in held) for kind, held in all_of.items()}


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
lab.measured("02.1", sum(moments["after\nbackward 2"].values()))
lab.reveal("02.1")

# %% tags=["nbval-check-output"]
if lab.predicted("02.1"):
    bars = {}
    for name, held in moments.items():
        bars[name] = {kind: size / 1e6 for kind, size in held.items()}
    title = "What is held during two steps"
    subtitle = "A GPT of 0.87 million parameters in float32 with AdamW"
    plots.show(plots.stacks(bars, title, subtitle, "MB"))

# %% [markdown]
# Three things to see:
#
# 1. The optimizer state **doesn't exist before the first `optimizer.step()`**. A run that fits for one step can fail in
#    the second. That is why the prediction was about the second.
# 2. `zero_grad()` frees the gradients (it sets `.grad` to None). So between steps there are 12 bytes per parameter.
# 3. When backward returns, parameters are only a quarter of what is held. Shrink *them* last, not first.

# %% [markdown]
# The total is not exactly 16Ψ. Where do the extra bytes come from?

# %% tags=["nbval-check-output"]
if lab.predicted("02.1"):
    psi, tensors = 867_072, 53
    held = moments["after\nbackward 2"]
    print(f"parameters {held['parameters']:,} = 4Ψ + {held['parameters'] - 4 * psi}")
    print(f"gradients  {held['gradients']:,} = 4Ψ + {held['gradients'] - 4 * psi}")
    print(f"optimizer  {held['optimizer']:,} = 8Ψ + {held['optimizer'] - 8 * psi}")
    assert held["optimizer"] - 8 * psi == 4 * tensors  # Adam's counters of steps

# %% [markdown]
# Every byte is explained. Adam also counts its steps, in one float32 for each of the 53 tensors: 212 bytes.
#
# ## Half the bits, half the bytes?
#
# Large models are trained in *[mixed precision](../docs/glossary.md#mixed-precision)*: forward and backward compute in
# **bfloat16**, 2 bytes per number. So is everything half the size? bfloat16 has between two and three decimal digits.
# Look at what that does to an update of a parameter:

# %% tags=["nbval-check-output"]
# %%ranks
weight = torch.tensor(1.0)
print("float32: ", (weight + 0.001).item())
print("bfloat16:", (weight.bfloat16() + 0.001).item(), "- the update is lost")

# %% [markdown]
# So the optimizer keeps its own float32 copy of the parameters, the **[master weights](../docs/glossary.md#master-weights)**. It updates those, and rounds
# them to bfloat16 for the next forward. Gradients arrive in bfloat16. Adam's two averages stay in float32.
#
# How many bytes per parameter is that? And how many is it in float32 with plain SGD, which keeps no state at all?

# %%
lab.predict("02.2", 2 + 2 + (4 + 4 + 4))  # bytes per parameter: bfloat16, masters, Adam
lab.predict("02.3", 4 + 4)  # bytes per parameter: float32, SGD without momentum

# %% [markdown]
# `zerolab.DDP` is this course's simplest training engine. It keeps everything on every rank, and it can keep master
# weights. `units=[Block]` tells it which parts of the model to treat as one piece each; lesson 03 puts them to use.
# `model_states` counts what the engine and the optimizer hold, storage by storage.

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
lab.measured("02.2", round(sum(costs["bfloat16 + masters\nAdam"].values()), 2))
lab.measured("02.3", round(sum(costs["float32\nSGD"].values()), 2))
lab.reveal("02.2")
lab.reveal("02.3")

# %% tags=["nbval-check-output"]
if lab.predicted("02.2") and lab.predicted("02.3"):
    title = "What a parameter costs when backward returns"
    subtitle = "Counted from the live storages of the GPT"
    plots.show(plots.stacks(costs, title, subtitle, "bytes per parameter"))

# %% [markdown]
# The bottom part of the second bar is 6 = 2 + 4: the bfloat16 copy and the master. The ZeRO paper writes the same bar
# as **2 + 2 + 12**. It counts the master with the optimizer, since only the optimizer reads it. Both add up to 16.
# Mixed precision makes arithmetic fast and activations small, and it **saves no model states at all**. For the 7.5
# billion parameters from the start of this lesson, that is 16 × 7.5 = 120 GB.
#
# Compare Adam with SGD: 8 of the 16 bytes are the price of Adam's two averages. In mixed precision the optimizer holds
# 12 of the 16, with the master. That is what lesson 04 splits first.

# %% [markdown]
# ## Flat storage
#
# 53 tensors are 53 allocations, and later they would be 53 messages to the other ranks. So an engine lays the
# parameters of a block end to end in **one flat buffer**, and gives the model **views**. A view is a tensor with a
# shape of its own and no memory of its own.

# %% tags=["nbval-check-output"]
# %%ranks
flat = torch.zeros(6)
weight = flat[2:6].view(2, 2)  # no copy: the last four elements, viewed as a matrix
weight += 1
print(flat.tolist())
print("the view starts", weight.data_ptr() - flat.data_ptr(), "bytes after the buffer")

# %% [markdown]
# Later lessons cut the buffer into equal pieces, one for each rank. If the elements don't divide evenly by the number
# of ranks, zeros are added at the end: **padding**. The cuts ignore where one parameter ends and the next begins. That
# is what makes all pieces equal.

# %% tags=["nbval-check-output"]
import torch
from zerolab import Layout

three = [("a", torch.empty(5)), ("b", torch.empty(2, 2)), ("c", torch.empty(3, 2))]
plots.show(plots.flat_storage(Layout(three, world_size=4)))

# %% [markdown]
# ## Write: a flat buffer with views
#
# `flat_buffer(params, world_size)` returns the buffer and a list of views into it. The views hold the parameters'
# values, and writing to a view must change the buffer.

# %%
# %%exercise 02.1

# %%
lab.check("02.1")

# %% [markdown]
# Now put your buffer under the real model, sized for 5 ranks. The model must not notice: the loss stays the same, to
# the bit. The bytes must also stay the same, except for the padding. How many bytes of padding are there for Ψ =
# 867,072?

# %%
lab.predict("02.4", 4 * (-867_072 % 5))  # bytes

# %%
# %%ranks
from zerolab import lab

flat_buffer = lab.mine("02.1")
inputs = batch(words, rank, 3, 8, 64)
before = model(*inputs).item()
params = list(model.parameters())
flat, views = flat_buffer(params, world_size=5)
for param, view in zip(params, views):
    param.data = view  # frees the parameter's own memory and puts the view in its place
padding = flat.nbytes - sum(param.nbytes for param in params)
assert model(*inputs).item() == before
assert len({param.untyped_storage().data_ptr() for param in params}) == 1

# %%
lab.measured("02.4", lab.pull("padding", rank=0))
lab.reveal("02.4")

# %% [markdown]
# ## Hooks: get called when it happens
#
# An engine has to act in the middle of backward, but the user's loop only says `loss.backward()`, one line. So PyTorch
# calls you back: a **hook** is a function that you register and that runs when something happens. This one runs each
# time the gradient of a parameter is complete:

# %% tags=["nbval-check-output"]
# %%ranks
seen = []
hooks = [param.register_post_accumulate_grad_hook(seen.append) for param in params]
model.zero_grad()
model(*inputs).backward()
for hook in hooks:
    hook.remove()
name = {param: name for name, param in model.named_parameters()}
print("first:", ", ".join(name[param] for param in seen[:3]))
print("last: ", ", ".join(name[param] for param in seen[-2:]))
is_param = any(seen[0] is param for param in params)
print("a hook receives the", "parameter" if is_param else "gradient")

# %% [markdown]
# Two things to remember:
#
# - Gradients arrive **from the last layer to the first**, while the rest of backward is still running. If you send each
#   one as it arrives, you send while backward computes.
# - The hook receives the **parameter**; the gradient is its `.grad`. A well-known tutorial averages what the hook
#   receives, and so averages weights. Nothing fails; the model just learns something else.

# %% [markdown]
# ## Measure: activations
#
# Model states stay from step to step. During a step there is more: forward keeps every intermediate result that
# backward will need. These are the **[activations](../docs/glossary.md#activation)**. They depend on more than Ψ: each token of the batch adds its own.
#
# How many bytes does *one token* leave behind in this model, in float32? It has 4 blocks, width 128, and 256 possible
# bytes. For an estimate, count what every layer takes in, once; attention takes in three vectors, and the loss keeps
# one number for each possible byte. (The model is in `zerolab/tasks/models.py`.)

# %%
lab.predict("02.5", 4 * 128 * (16 * 4 + 2) + 4 * 256)  # bytes

# %% [markdown]
# `timeline` records every allocation and every release during a step, and works out what each one was for.

# %%
# %%ranks
from zerolab.measure import timeline

zero = DDP(GPT(layers=4, width=128), units=[Block])
adam = AdamW(zero.model.parameters(), lr=1e-3)


def record(batch_size):
    with timeline(zero, adam) as line:
        zero.model(*batch(words, rank, 0, batch_size, 64)).backward()
        adam.step()
        adam.zero_grad()
    return line


def when_forward_returns(line):
    """The moment of the first event of backward."""
    step = range(line.before, len(line.events))
    return next(i for i in step if line.events[i].phase == "backward")


record(1)  # the first step creates the optimizer state
kept = {}
for size in (2, 4, 8, 12, 16):
    line = record(size)
    kept[64 * size] = line.by_kind(when_forward_returns(line))

# %%
kept = lab.pull("kept", rank=0)
activations = {tokens: kinds["activations"] for tokens, kinds in kept.items()}
states = {tokens: held["parameters"] + held["optimizer"] for tokens, held in kept.items()}
lab.measured("02.5", round(plots.fit_line(activations).slope))
lab.reveal("02.5")

# %% tags=["nbval-check-output"]
if lab.predicted("02.5"):
    title = "Activations grow with the batch"
    subtitle = "What one rank holds when forward returns"
    drawn = {"activations": activations, "parameters and optimizer": states}
    plots.show(plots.growth(drawn, "tokens", title, subtitle))

# %% [markdown]
# It is a straight line. A batch twice as large keeps twice as much, while model states stay the same. So batch size is
# the one memory setting that works immediately, and the rising line is the only thing it can shrink.
#
# Where does the slope come from? A block keeps 16 vectors of the model's width for each token:
#
# - the input and the output of both norms (4);
# - queries, keys and values (3);
# - the output of attention (1);
# - the inside of the MLP before and after its activation function, each four times as wide (8).
#
# After the blocks come two more vectors, and the logarithm of a probability for each of the 256 possible bytes.

# %% tags=["nbval-check-output"]
if lab.predicted("02.5"):
    tokens, layers, width, heads, vocabulary = 512, 4, 128, 4, 256
    number = 4  # bytes of a float32
    explained = {
        "16 vectors in each block": 16 * layers * width * number * tokens,
        "2 vectors around the last norm": 2 * width * number * tokens,
        "logarithms of probabilities": vocabulary * number * tokens,
        "mean and spread, for each norm": 2 * (2 * layers + 1) * number * tokens,
        "one sum for each head of attention": heads * layers * number * tokens,
        "targets, positions, the loss and its gradient": 8 * tokens + 8 * 64 + 3 * number,
    }
    for name, size in explained.items():
        print(f"{size:>12,}  {name}")
    total, measured = sum(explained.values()), activations[tokens]
    print(f"{total:>12,}  in total; measured {measured:,}")
    assert abs(total / measured - 1) < 0.01  # other devices differ a little

# %% [markdown]
# Every byte is explained. The first three lines are a formula, `zerolab.measure.activation_bytes`; what it
# leaves out is below 1 %. Notice what is *not* in the list: a matrix of tokens × tokens. Attention here is the fused
# kind, which computes that matrix in pieces and never keeps it.
#
# ## Measure: a whole step
#
# Now put both together for a batch of 8 × 64 tokens: 16 bytes per parameter, plus the activations. What is the
# **peak**, the most that is held at any one moment? That number decides whether a run fits.

# %%
lab.predict("02.6", 16 * 867_072 + 512 * 34_960)  # bytes

# %%
# %%ranks
line = record(8)

# %%
line = lab.pull("line", rank=0)
lab.measured("02.6", line.peak)
lab.reveal("02.6")

# %%
if lab.predicted("02.6"):
    plots.show(plots.skyline([line]))

# %% [markdown]
# Read it from left to right. Forward piles up activations. Backward takes them down again **and puts gradients in their
# place**. `optimizer.step()` needs next to nothing. So the peak is *less* than model states plus activations: when
# there are the most activations, there are hardly any gradients yet. With as many activations as here, the peak comes
# early in backward.
#
# ("Other" is the batch, and the working memory of the optimizer's step. "Communication" is a few hundred bytes, too few
# to see: the ranks use them to agree on what comes next, and the engine sends them even when it is alone.)
#
# Now account for the peak, to the byte: what forward left, what backward has freed by then, and what it has made.
# (`root` is everything outside the blocks. An activation that backward makes is a gradient on its way through the
# layers.)

# %% tags=["nbval-check-output"]
if lab.predicted("02.6"):
    step = range(line.before, len(line.events))
    forward_ends = next(i for i in step if line.events[i].phase == "backward")
    left, top = line.alive(forward_ends), line.alive(line.peak_moment)
    freed = {number: size for number, size in left.items() if number not in top}
    made = {number: size for number, size in top.items() if number not in left}
    print(f"{sum(left.values()):>12,}  when forward returned")
    for sign, changed in (("-", freed), ("+", made)):
        for number, size in sorted(changed.items(), key=lambda item: -item[1]):
            one = line.buffers[number]
            print(f"{sign}{size:>11,}  {one.kind} of {one.unit}, shape {one.shape}")
    assert sum(left.values()) - sum(freed.values()) + sum(made.values()) == line.peak
    print(f"{line.peak:>12,}  at the peak")

# %% [markdown]
# ## In production
#
# Does PyTorch agree? Its own profiler reports what the allocator handed out and got back. One thing is different on
# GPUs: there, `torch.optim` by default updates all tensors at once (`foreach`), which is faster and needs room. A
# **fused** optimizer does the same in one kernel, without that room. We run all three:

# %%
# %%ranks
from zerolab.measure import peak

found = {}
for name in ("one by one", "foreach", "fused"):
    options = {"foreach": False} if name == "one by one" else {name: True}
    zero = DDP(GPT(layers=4, width=128), units=[Block])
    adam = AdamW(zero.model.parameters(), lr=1e-3, **options)
    record(1)
    line = record(8)
    with peak(zero, adam) as torch_says:
        zero.model(*batch(words, rank, 0, 8, 64)).backward()
        adam.step()
        adam.zero_grad()
    found[name] = (line.peak, torch_says.bytes, max(line.curve("other")))

# %% tags=["nbval-check-output"]
if lab.predicted("02.6"):
    for name, (ours, torch_says, other) in lab.pull("found", rank=0).items():
        print(f"{name:10}  peak {ours:,}, torch's profiler {torch_says:,};", end=" ")
        print(f"batch and working memory {other:,} at most")
        assert abs(torch_says / ours - 1) < 0.01

# %% [markdown]
# PyTorch's profiler agrees to the byte. The temporaries of `foreach` are one more copy of the parameters, 4Ψ. For 7.5
# billion parameters that is 30 GB for as long as the step takes. It doesn't show in the peak here, because the
# activations are gone by then. With small batches and large models, it *is* the peak.
#
# On a GPU you would ask `torch.cuda.max_memory_allocated()` for the peak, and draw a skyline like ours with
# `torch.cuda.memory._record_memory_history()`. A GPU also holds memory that belongs to no tensor: CUDA's own code (some
# hundred MB), and blocks that the allocator keeps for later.
#
# ## Smaller numbers, or fewer?
#
# An article on ZeRO prints the norms of parameters and gradients during training. They shrink, and it concludes that
# memory consumption falls. We train 30 steps, with strong weight decay so that the parameters shrink too, and print
# norms *and* bytes.

# %%
# %%ranks
zero = DDP(GPT(layers=4, width=128), units=[Block])
adam = AdamW(zero.model.parameters(), lr=1e-3, weight_decay=20.0)


def norm(tensors):
    return torch.stack([tensor.detach().norm() for tensor in tensors]).norm().item()


table = []
for step in range(30):
    adam.zero_grad()
    loss = zero.model(*batch(words, rank, step, 8, 64))
    loss.backward()
    params = list(zero.model.parameters())
    norms = norm(params), norm([param.grad for param in params])
    adam.step()
    table.append((loss.item(), *norms, sum(model_states(zero, adam).values())))

# %%
table = lab.pull("table", rank=0)
for step in (0, 9, 19, 29):
    loss, of_params, of_grads, held = table[step]
    norms = f"norms: parameters {of_params:5.2f}, gradients {of_grads:.2f}"
    more = held - table[0][3]
    print(f"step {step:2}: loss {loss:.2f}; {norms}; bytes since step 0: {more:+}")

# %% tags=["nbval-check-output"]
first, last = table[0], table[-1]
print("did the norm of the parameters shrink?", last[1] < first[1])
print("did the norm of the gradients shrink? ", last[2] < first[2])
print("bytes saved:", first[3] - last[3])

# %% [markdown]
# **Smaller, and as many.** Both norms fell, and not one byte went: a float32 takes 4 bytes whether it holds 0.001 or
# 1000. To show memory, count memory. That is what we will do in every lesson.
#
# ## Questions
#
# 1. A model of 1 billion parameters is trained in bfloat16 with float32 masters and Adam. How many GB of model states
#    is that? And with everything in float32?
# 2. A run survives the first step and runs out of memory in the second. What is the likely cause?
# 3. You halve the batch size, and memory falls by much less than half. Why?
# 4. Why does the peak come at the beginning of backward, and not at its end, when all gradients exist?
# 5. What does a view cost, and how can you tell that two tensors share memory?
# 6. A hook averages what it receives. Training runs without an error, but badly. What happened?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. 16 GB, both times: 2 + 2 + 12 and 4 + 4 + 8 bytes per parameter.
# 2. The optimizer state. Adam makes its 8 bytes per parameter in the first `optimizer.step()`, after the first peak.
#    (The other usual cause is a longer batch in the second step.)
# 3. Only activations depend on the batch. Model states stay.
# 4. At the beginning of backward all activations exist. As backward passes a block, it frees the block's activations
#    and puts gradients in their place. These are smaller, unless the batch is small: then the peak does come later.
# 5. A few hundred bytes for the Python object, and no memory for elements. If `a.untyped_storage().data_ptr()` is the
#    same for both, they share memory.
# 6. `register_post_accumulate_grad_hook` passes the parameter. The hook averaged weights, and each rank goes on with
#    its own gradients.

# %%
lab.stop()
lab.progress()
