# %% [markdown]
# # 15 · Model parallelism
#
# **The question.** ZeRO divides parameters, gradients and optimizer state among the ranks. It divides neither a sample
# nor its activations. If one sequence of 100,000 tokens needs more memory than a GPU has, a thousand GPUs with ZeRO-3
# fail exactly as one does. And if 1,024 GPUs are to share a batch of 512 sequences, half of them have nothing to do.
# Then the *computing* has to be divided: **[model parallelism](../docs/glossary.md#model-parallelism)**. The wrong kind
# in the wrong place leaves three quarters of your GPUs idle. Which one, when, and what does it send?

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
from zerolab import lab
from zerolab.lab import GPT, batch, calls, text

words = text()


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(layers=4, width=128).to(dtype)  # 4 heads


psi = sum(param.numel() for param in make_model().parameters())
print(f"Ψ = {psi:,} parameters")

# %% [markdown]
# ## Three ways to cut
#
# Four layers, eight samples, four ranks. There are three things to divide:
#
# - the *samples*: every rank runs all layers on its own samples. That is **[data
#   parallelism](../docs/glossary.md#data-parallelism)**, with or without ZeRO;
# - *each layer*: every rank computes a part of every layer, for all samples. That is **[tensor
#   parallelism](../docs/glossary.md#tensor-parallelism)**;
# - *the sequence of layers*: every rank computes some layers, for all samples, and hands the result on. With one more
#   idea, this becomes **[pipeline parallelism](../docs/glossary.md#pipeline-parallelism)**.
#
# `lab.computed_in_three_ways` runs the four MLPs of a GPT of width 64 in all three ways, in float32.

# %%
# %%ranks
same = lab.computed_in_three_ways()  # each compared with all four MLPs on one rank

# %%
plots.show(plots.who_computes_what(lab.three_ways(4, message=8 * 64 * 4)))

# %% tags=["nbval-check-output"]
print("the same results in all three ways:", all(lab.pull("same")))

# %% [markdown]
# Follow the arrows, which are the **dependencies**: what a rank needs from others before it can begin a layer. In the
# first row there are none until backward has gradients to average. In the second, no rank can begin a layer before
# *all* ranks have finished the one before: each sends 3.07 kB after every layer. In the third, each of three ranks
# sends one message of 2.05 kB to the next, which can do nothing until it comes.
#
# ## Predict
#
# In a GPT, tensor parallelism divides the two halves of each block, attention and MLP. Each half costs one all-reduce
# in forward, as above, and one in backward. What is all-reduced has the shape of the block's input. The model has 4
# blocks of width 128, the batch has 8 sequences of 64 tokens, everything is float32, and two ranks divide the model.
# How many bytes does a rank send in a step?

# %%
lab.predict("15.1", 4 * 2 * 2 * 8 * 64 * 128 * 4)  # bytes

# %% [markdown]
# ## Rows first, then columns
#
# An MLP has two layers, `up` and `down`. Between them lie the **hidden units**. Give each rank some of them. For its
# units it needs some *rows* of `up.weight` (torch stores a weight as outputs × inputs), and then it has their values in
# full. In `down` it multiplies them by the *columns* of `down.weight` that belong to them. The result has the full
# width, but is only a part of a sum over *all* hidden units: one all-reduce for two layers.
#
# Could `up` be cut by columns instead? Then every rank would have a part of *every* hidden unit, but GELU needs the
# complete sum: gelu(2) + gelu(-3) = 1.95, and gelu(2 - 3) = -0.16.
#
# And backward? Suppose that every rank has the same gradient of the output y. Two places need care:
#
# - *Where the parts leave* the split region, y = part₀ + part₁ + ... The gradient of each part is the gradient of y,
#   and every rank has that already. Forward adds up, backward does nothing.
# - *Where x enters*, each rank's hidden units use it. So each rank gets only the part of x's gradient that comes from
#   its own units. Forward does nothing, backward adds up.
#
# These are `Leave` and `Enter` (g and f in the Megatron paper, arXiv 1909.08053), each an `autograd.Function`.
#
# ## Write the split
#
# Mind the bias of `down`: every rank has it, and it counts once.

# %%
# %%exercise 15.1

# %%
lab.check("15.1")

# %% [markdown]
# ## Attention, by heads
#
# Attention comes in complete units too: its heads, none of which looks at another. So each rank gets some of the heads,
# and `lab.SplitAttention` does what your MLP does: `Enter`, this rank's heads, this rank's columns of the output layer,
# `Leave`, the bias. `split` replaces both halves of every block. Embeddings, layer norms and the head stay on both
# ranks.
#
# Four ranks give us two pairs, a **[mesh](../docs/glossary.md#mesh)** of 2 × 2. Ranks 0 and 1 divide one copy of the
# model, ranks 2 and 3 another. Each pair is a process group, the rank's *tensor group*.

# %%
# %%ranks
MyMLP, Enter, Leave = (lab.mine("15.1", name) for name in ("MyMLP", "Enter", "Leave"))


def split(model, group):
    for block in model.blocks:
        block.attention = lab.SplitAttention(block.attention, group, Enter, Leave)
        block.mlp = MyMLP(block.mlp, group)
    return model


pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
tensor_group, place = pairs[rank // 2], rank % 2  # place: 0 or 1 in the pair

# %% [markdown]
# ## Measure
#
# One step of the whole model and of the split one, with the same samples. `lab.split_gradients` compares their
# gradients: of a weight that is cut, and of a layer norm, which both ranks of a pair have.

# %%
# %%ranks
whole, cut = make_model(), split(make_model(), tensor_group)
tokens = batch(words, 0, 0, 8, 64)  # the same for everyone
whole(*tokens).backward()
with calls() as everything:
    cut(*tokens).backward()
# Between two ranks an all-reduce sends each element once: 2 (N-1)/N = 1.
number, sent_tensor = len(everything.calls), everything.payload
held = [sum(param.nbytes for param in model.parameters()) for model in (whole, cut)]
off, norms_equal = lab.split_gradients(cut.blocks[1], whole.blocks[1], tensor_group)

# %%
lab.measured("15.1", lab.pull("sent_tensor", rank=0))
lab.reveal("15.1")

# %% tags=["nbval-check-output"]
if lab.predicted("15.1"):
    (whole, cut), number = lab.pull("held", rank=0), lab.pull("number", rank=0)
    sent = lab.pull("sent_tensor", rank=0)
    print(f"{number} all-reduces, {sent:,} bytes sent by each rank")
    print(f"parameters on a rank: {whole:,} bytes whole, {cut:,} divided by two ranks")
for name in lab.pull("off", rank=0):
    same = all(off[name] < 1e-4 for off in lab.pull("off"))
    print(f"the gradient of {name:13} equals one process's, to 4 digits:", same)
same = all(lab.pull("norms_equal"))
print("a layer norm's gradients are the same in a pair, bit for bit:", same)

# %% [markdown]
# *The gradients* are close, not equal bit for bit: a sum in two parts is rounded differently. Nobody averaged the layer
# norm's, and still both ranks have the right one, because everything outside `Enter` and `Leave` sees the same numbers
# on both. Without the sum in `Enter` the two would differ, and so would the copies after a step, without any error.
#
# *The bytes* are more than the 4Ψ = 3,468,288 that DDP's all-reduce sends between two ranks, and of another kind. DDP's
# depend on the parameters, and hide behind backward (lesson 09). These depend on the *tokens*, and the next layer waits
# for them. So tensor parallelism lives where the wires are fastest, inside a node.
#
# *What it buys*: a rank holds about half of the parameters and computes half of each block. Of the activations, it
# halves q, k, v and the hidden units; the inputs of blocks and layer norms stay whole, unless **sequence parallelism**
# (arXiv 2205.05198) divides them as well. (The opening case, a sequence of 100,000 tokens, is lesson 25's.)
#
# ## By layers, and the bubble
#
# Now the third row of the first picture. A **stage** is what one rank computes: here rank r has block r, the first also
# the embeddings, and the last the model's head. `gpt_pipeline` connects the ranks. The *times* are counted, not
# measured, since four ranks may share two cores here. With `pace=0.02` each stage has a clock. A sample's forward
# advances it by 20 ms, its backward by 40 ms. A message that arrives sets it to the sender's time, if that is later.
# First, the whole batch goes through stage 0, then 1, then 2, then 3, and back. (`MyPipeline` is exercise 15.2 below;
# until you have written it, the course's runs.)

# %%
# %%ranks
MyPipeline = lab.mine("15.2")


def pipeline(schedule, micro_batches, dtype=torch.float32):
    model, samples = make_model(dtype), batch(words, 0, 0, 8, 64)
    return lab.gpt_pipeline(schedule, model, samples, rank, micro_batches, pace=0.02)


pipe = pipeline(MyPipeline, micro_batches=1)
pipe.run()
by_layers = pipe.trace

# %%
by_layers = lab.pull("by_layers")
paced = "times counted: forward 20 ms a sample"
plots.show(plots.pipeline_runs({"by layers": by_layers}, paced))

# %% [markdown]
# One stage works at a time: four ranks, the speed of one. The white area is the
# **[bubble](../docs/glossary.md#bubble)**. The remedy: cut the batch into **micro-batches**, whose gradients add up,
# and send each on as soon as it is ready. With 4 stages and 8 micro-batches, first all forwards and then all backwards
# (**GPipe**, arXiv 1811.06965): what fraction of the time is bubble? (Draw it.)

# %%
lab.predict("15.3", 100 * 3 / 11)  # % of the time


# %%
# %%ranks
class GPipe(MyPipeline):
    def order(self):
        each = range(self.micro_batches)
        return [("forward", m) for m in each] + [("backward", m) for m in each]


pipe = pipeline(GPipe, micro_batches=8)
pipe.run()
gpipe = pipe.trace

# %%
gpipe = lab.pull("gpipe")
lab.measured("15.3", round(100 * plots.bubble(gpipe), 2))
lab.reveal("15.3")

# %% [markdown]
# Count in units of one micro-batch on one stage. A rank works for M of them, and waits while the pipeline fills and
# empties: N - 1. So the bubble is (N-1) / (M+N-1), here 3/11. With M much larger than N it nearly vanishes.
#
# ## Write the order
#
# GPipe pays in memory: when the first backward begins, the activations of all M micro-batches are there. The remedy is
# an order called **1F1B**, one forward, one backward (arXiv 1806.03377; with one update per batch, as here,
# 2104.04473). Each backward frees its activations before the next forward takes more: rank r first runs as many
# forwards as there are stages after its own, then takes turns. Write `order()`, the list of a rank's steps;
# `forward(m)` and `backward(m)` are given.

# %%
# %%exercise 15.2

# %%
lab.check("15.2")

# %%
# %%ranks
MyPipeline = lab.mine("15.2")
pipe = pipeline(MyPipeline, micro_batches=8)
pipe.run()
one_by_one = pipe.trace

# %%
if lab.predicted("15.3"):
    runs = {"GPipe": gpipe, "1F1B": lab.pull("one_by_one")}
    plots.show(plots.pipeline_runs(runs, paced))
    assert [plots.in_flight(trace) for trace in runs["GPipe"]] == [8, 8, 8, 8]
    assert [plots.in_flight(trace) for trace in runs["1F1B"]] == [4, 3, 2, 1]

# %% [markdown]
# The same bubble, the same gradients (the check compared them with one process's), and less memory: rank r keeps N - r
# micro-batches, whatever M is. Rank 0 keeps half here; with M = 64 it would be a sixteenth.
#
# A pipeline sends little: one activation forward and its gradient back for each token, between neighbours. Below, it is
# a twelfth of what tensor parallelism sends. So pipelines cross the slow wires between nodes, where tensor parallelism
# would not keep up. (ZeRO does, given enough tokens, lesson 09.)
#
# ## All four, side by side
#
# The same model, the same 8 sequences, 4 ranks, one step with AdamW. FLOP are those of the linear layers, and
# activations are what autograd keeps at the most. Below are the largest numbers that any rank has.

# %%
# %%ranks
tokens = batch(words, 0, 0, 8, 64)
ways = ("one process", "DDP", "ZeRO-3", "tensor", "pipeline")
table = {way: lab.run_way(way, make_model(), tokens, split, MyPipeline) for way in ways}

# %%
rows = lab.pull("table")
largest = lab.most_on_a_rank(rows)
states = {way: of["states"] for way, of in largest.items()}
assert states["ZeRO-3"] < 0.3 * states["one process"] <= 0.3 * states["DDP"]

# %% [markdown]
# Read it by columns:
#
# - *Model states.* DDP divides nothing, ZeRO-3 everything, tensor parallelism all but the copies. A pipeline's first
#   stage is the fullest: it has the embeddings too.
# - *Activations.* Data parallelism, with or without ZeRO, has a quarter of the samples. The other two divide what
#   belongs to *one* sample.
# - *Bytes.* DDP sends gradients, ZeRO-3 parameters as well, the other two activations, in proportion to the tokens.
#
# So which tool, and when?
#
# - **Use model parallelism where ZeRO is not enough**: where one sample's activations (with checkpointing, lesson 10)
#   or one unit's full parameters do not fit on a GPU, where the batch that still trains well has fewer samples than you
#   have GPUs, or where each rank has so few tokens that gathering the parameters takes longer than using them (lesson
#   09). Everywhere else it is the wrong tool: it changes the model's code, and ZeRO does not.
# - **Stage 3 is the wrong tool** where the model fits with stage 2, which sends what DDP sends, and the memory that
#   stage 3 frees would stay empty. (In lesson 16 it is filled with more samples, and pays.)
#
# ## In production
#
# In torch 2.13, `torch.distributed.tensor.parallel.parallelize_module` replaces a layer's weight by a **DTensor**, a
# tensor that knows how it is cut over a mesh: `ColwiseParallel` is our `up`, `RowwiseParallel` our `down`. (The names
# are from the Megatron paper, which writes weights as inputs × outputs: its columns are torch's rows.)
# `torch.distributed.pipelining` has schedules such as `Schedule1F1B`. Large runs use all three: tensor parallelism
# inside a node, pipelines between nodes, ZeRO for the rest. (With a pipeline, that means stage 1: stage 2 would reduce
# the gradients once per micro-batch, and stage 3 would gather the parameters as often, too.)
#
# ## On trial
#
# Four claims. For the first two, the next cell adds up the FLOP of all ranks.
#
# > "Each GPU trains a submodel, or only its shard's gradient, and the full gradient is the sum of the shards'."
# >
# > "[ZeRO] needs a special model structure; synchronisation adds compute."
# >
# > "Data parallelism lowers a GPU's memory; data and model parallelism both raise it."

# %% tags=["nbval-check-output"]
one = largest["one process"]["flop"]
for way in ("DDP", "ZeRO-3", "tensor", "pipeline"):
    each = [of[way]["flop"] / one for of in rows]
    parts = ", ".join(f"{part:.3f}" for part in each)
    print(f"{way:9} each rank computes {parts} of one process's FLOP", end=", ")
    print(f"all together {sum(each):.3f}")

# %% [markdown]
# **A submodel: false for ZeRO.** A quarter on every rank is a quarter of the *samples*, through every layer. Backward
# computes the gradient of *every* parameter, and the reduce-scatter hands the parts to their owners, averaged over all
# ranks' samples. Shards are put end to end, not added up. Training a submodel is what the last two rows do.
#
# **A special structure, more compute: false for ZeRO.** The same GPT class went into DDP and ZeRO-3 as it was, and in
# linear layers all ranks together compute what one process computes. (With tensor parallelism each computes the head.)
# With ZeRO a rank's update work *falls*, to Ψ/N (the table's last column). What synchronisation adds is traffic and
# waiting. The first half is **true of model parallelism**: we replaced both halves of every block, and a pipeline needs
# a chain of stages of equal cost.
#
# **Memory: the first half is true under a condition, the second false.** If the ranks share one batch, data parallelism
# lowers a GPU's activations, and nothing else. ZeRO and model parallelism lower the model states (the table's first
# column), and they combine ("two by two", below).
#
# > "Model parallelism suits little data."
#
# **True under a condition**, for one kind. The size of the *data set* decides nothing. With few tokens in a *step*,
# tensor parallelism sends less: between two ranks 524,288 bytes for each sequence (4,194,304 / 8), where DDP sends
# 3,468,288 for any number. So it is ahead up to six sequences. A pipeline is the opposite: with one micro-batch it
# stands still for 75 % of the time.
#
# ## For another day: two by two
#
# *Six minutes: tensor parallelism and ZeRO together.* Let the second pair compute other samples. Rank 2 has the same
# *parameters* as rank 0, and rank 3 the same as rank 1: {0, 2} and {1, 3} are the **data groups**, and within them ZeRO
# works as ever.
#
#               place 0    place 1
#     pair 0    rank 0 ─── rank 1     ───  a tensor group: activations
#                 │          │
#     pair 1    rank 2 ─── rank 3      │   a data group: parameters and gradients, by ZeRO
#
# Model states are 16 bytes for each parameter. Embeddings, layer norms, the model's head and the biases after `Leave`
# are not divided within a pair, 77,056 of the 867,072 parameters. ZeRO-3 divides whatever a rank has by two. How many
# bytes does a rank hold, for each of the Ψ parameters of the whole model?

# %%
lab.predict("15.2", 16 / 4 * (867_072 + 77_056) / 867_072)  # bytes per parameter

# %%
# %%ranks
import zerolab
from zerolab.lab import Block
from zerolab.measure import ledger, model_states

data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
data_group = data_groups[place]
pair = rank // 2  # the pairs train on different samples


def one_step(dtype):
    model = split(make_model(dtype), tensor_group)
    zero = zerolab.Zero3(model, units=[Block], group=data_group)
    adam = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    with ledger(zero) as book, calls() as everything:
        lab.gpt_loss(zero.model, *batch(words, pair, 0, 8, 64)).backward()
        adam.step()
    tensor = sum(call.payload for call in everything.calls if call.op == "allreduce")
    sent = {"tensor group": tensor, "data group": book.moved}  # ZeRO-3 makes no all-reduce
    return zero, adam, sent


alone = make_model(torch.float64)  # one process, with the samples of both pairs
adam = torch.optim.AdamW(alone.parameters(), lr=1e-3)
for number in range(2):
    (lab.gpt_loss(alone, *batch(words, number, 0, 8, 64)) / 2).backward()
adam.step()
alone = split(alone, tensor_group).state_dict()
together = one_step(torch.float64)[0].full_state_dict()
furthest = max((together[name] - value).abs().max().item() for name, value in alone.items())
zero, adam, by_group = one_step(torch.float32)
states = model_states(zero, adam)

# %%
states = lab.pull("states", rank=0)
lab.measured("15.2", round(sum(states.values()) / 867_072, 3))
lab.reveal("15.2")

# %% tags=["nbval-check-output"]
same = max(lab.pull("furthest")) < 1e-10
print("after a step in float64, all parameters are one process's, to 1e-10:", same)
if lab.predicted("15.2"):
    for group, sent in lab.pull("by_group", rank=0).items():
        print(f"{group}: {sent:>9,} bytes sent by each rank in a step")

# %% [markdown]
# The tensor group sends what it sent before. The data group sends what ZeRO-3 sends between two ranks, for a model that
# is a little more than half as large. None of the classes had to be changed. (But `zero.clip_grad_norm_` sees its data
# group alone: a norm over the whole model counts cut parameters on both ranks of a pair, and copies once.)
#
# ## For another day: half a backward
#
# *Ten minutes: what fills a pipeline's last gaps.* The gaps in 1F1B's rows are waits for a gradient that the next rank
# could have sent earlier. For each matrix product of forward, backward computes two of the same size. One gives the
# gradient of the layer's *input*, which the previous rank is waiting for. The other gives the gradient of its *weight*,
# which nobody needs before the optimizer's step. **[Zero bubble](../docs/glossary.md#zero-bubble)** (arXiv 2401.10241)
# splits them. An order now has three kinds of steps of 20 ms each: forward, backward (for inputs only), and weights. It
# is built from 1F1B's order: after each backward, rank r does the weights of the micro-batch that is r backwards old.
# The last r micro-batches' weights come at the end.
#
# So every rank still waits while the pipeline fills, though for shorter backwards, and no longer while it empties. With
# 4 stages and 8 micro-batches, what fraction of the time is bubble?

# %%
lab.predict("15.4", 100 * 3 / 27)  # % of the time

# %% [markdown]
# `lab.put_off_weights` makes each linear layer's backward compute the gradients of its input and bias alone, and put a
# promise into the list: a tensor whose own backward computes the weight's gradient.


# %%
# %%ranks
from zerolab.lab import saved


class ZeroBubble(MyPipeline):
    def order(self):
        steps, M = [], self.micro_batches
        for what, m in super().order():
            steps.append((what, m))
            if what == "backward" and m >= self.rank:
                steps.append(("weights", m - self.rank))
        return steps + [("weights", m) for m in range(max(0, M - self.rank), M)]

    def forward(self, m):
        promises = self.kept["weights", m] = []  # one from each linear layer's backward
        lab.put_off_weights(self.stage, promises)
        super().forward(m)

    def weights(self, m):
        torch.autograd.backward(self.kept.pop(("weights", m)))


whole = make_model(torch.float64)  # one process
lab.gpt_loss(whole, *batch(words, 0, 0, 8, 64)).backward()
right = dict(lab.GPTStage(whole, rank).named_parameters())
schedules = {"GPipe": GPipe, "1F1B": MyPipeline, "zero bubble": ZeroBubble}
three = {}
for name, schedule in schedules.items():
    pipe = pipeline(schedule, micro_batches=8, dtype=torch.float64)
    with saved(pipe.stage) as kept:
        pipe.run()
    pairs = [(p.grad, right[n].grad) for n, p in pipe.stage.stage.named_parameters()]
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    three[name] = pipe.trace, kept.peak, off

# %%
three = {name: [of[name] for of in lab.pull("three")] for name in lab.pull("three", rank=0)}
runs = {name: [trace for trace, _, _ in ranks] for name, ranks in three.items()}
lab.measured("15.4", round(100 * plots.bubble(runs["zero bubble"]), 2))
lab.reveal("15.4")

# %%
if lab.predicted("15.4"):
    both = {name: runs[name] for name in ("1F1B", "zero bubble")}
    plots.show(plots.pipeline_runs(both, paced))
    print("kept by autograd, at most, in MB: rank 0      1      2      3")
    for name, ranks in three.items():
        print(f"{name:33}", *(f"{kept / 1e6:6.2f}" for _, kept, _ in ranks))
        assert all(off < 1e-12 for _, _, off in ranks), "gradients are not one process's"

# %% [markdown]
# All gradients are one process's to 12 digits, in all three orders. Each rank waits for N - 1 units of 20 ms, where it
# was N - 1 units of 60. The price is memory. A weight's gradient needs the layer's input and the gradient of its
# output, and rank r keeps them for r more micro-batches: now every rank keeps about as much as rank 0, and the last one
# more, since its head's outputs are wide.
#
# torch 2.13 has this order too: `ScheduleInterleavedZeroBubble` with one stage on each rank. On devices a little more
# of the bubble is left: attention between its projections has nothing to put off, nor have layer norms. And whoever
# clips by the global norm waits for the last weights of all ranks (the paper's authors step first, and roll back when
# the norm says so).
#
# ## Questions
#
# 1. A pipeline has 8 stages. How many micro-batches keep the bubble below 10 %? What do they cost in memory with GPipe,
#    and with 1F1B?
# 2. How is a mesh of tensor parallelism, pipeline and ZeRO laid out on nodes of 8 GPUs, and why?
# 3. A 7B model with ZeRO-3 fits on 64 GPUs with one sequence each. You get 512 GPUs, and the batch must not grow. What
#    now?
# 4. Why does tensor parallelism cut `up` by rows and `down` by columns, and not the other way round?
# 5. (Of "For another day".) What does zero bubble put off, how much of the waiting is left, and what does it cost?
# 6. When does tensor parallelism send less than DDP? Would you take it then?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. (N-1)/(M+N-1) < 0.1 with N = 8 needs M > 63: at least 64. GPipe keeps the activations of all 64 on every stage.
#    1F1B keeps 8 on the first stage and 1 on the last.
# 2. Tensor parallelism inside the node: its bytes grow with the tokens, and the next layer waits for them. Pipeline
#    stages on different nodes: they send little, to one neighbour. ZeRO over what is left: its traffic does not depend
#    on the tokens and can hide behind computing.
# 3. 64 sequences cannot be given to 512 ranks. Divide the computing: tensor parallelism over the 8 GPUs of a node, and
#    ZeRO over 64 such groups, one sequence for each.
# 4. With rows of `up` a rank has some hidden units in full, so it can apply GELU to them, and `down` needs one
#    all-reduce. With columns it has a part of every unit's sum, and GELU needs the whole: an all-reduce before it as
#    well.
# 5. The gradients of weights, which nobody needs before the step. Each rank still waits while the pipeline fills, and
#    no longer while it empties. A third of the waiting is left, if forward and the two halves of backward take equally
#    long. Rank r keeps the inputs and output gradients of r more micro-batches.
# 6. With few tokens in a step: its bytes grow with them, and DDP's with the parameters. Between two ranks it sends less
#    up to six sequences. But the next layer waits for its messages, and DDP's hide behind backward. So not for the
#    bytes: take it when a sample, or the batch, has to be divided.

# %%
lab.stop()
lab.progress()
