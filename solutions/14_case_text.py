# %% [markdown]
# # 14 · Case: text
#
# **The question.** A script trains on one GPU, and its numbers are good. Now it runs on four. Are they the same
# numbers?
#
# With text they often are not, and nothing fails. In October 2024 a widely used trainer was found to compute [another
# loss](https://huggingface.co/blog/gradient_accumulation) than the one its users had asked for: it averaged the means
# of batches that had different numbers of tokens. A run that is a little wrong costs as much as one that is right, and
# you learn about it months later, if at all.
#
# This lesson is a case, from the file with the data to a checked result: sentence pairs, an encoder, and a GPT. On the
# way you meet four things that are special about text: labels that never reach the loss, sentences of different
# lengths, tables of embeddings of which a batch touches a few rows, and generation, one token after the other. In the
# end the same script runs on one, two and four ranks, and says the same.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% [markdown]
# ## The data
#
# MRPC (the Microsoft Research Paraphrase Corpus) has pairs of sentences from the news, and for each pair a 1 if both
# say the same, else a 0. It is one of the tasks of [GLUE](https://gluebenchmark.com/), which come as files with a line for
# each pair and columns separated by tabs. (Quotation marks are plain characters in them: read them with
# `quoting=csv.QUOTE_NONE`, or one that is never closed swallows the lines that follow.) If you have the folder of MRPC, QQP,
# RTE, QNLI or WNLI, give it to `lab.pairs`. Without a folder, it makes pairs of its own: half of them say the same in other
# words, and in the others a person, a thing, a place or a deed differs.

# %% tags=["nbval-check-output"]
data = lab.pairs(None, context=16)
kept_out = tuple(data.validation_inputs.shape)
print("training", tuple(data.inputs.shape), data.inputs.dtype, "validation", kept_out)
print("first pair, as word numbers:", data.inputs[0].tolist())
share = data.validation_targets.float().mean().item()
baseline = 100 * max(share, 1 - share)
print(f"always giving the more common answer: {baseline:.1f} % are right")

# %% [markdown]
# A word is a number from 1 to 4,095, and 0 is **[padding](../docs/glossary.md#padding)**: sentences have different lengths, and a tensor has only one.
# Keep the last number in mind, the **baseline**: a model that has learnt nothing can reach it. (In MRPC
# [67 %](https://aclanthology.org/I05-5002/) of the pairs say the same, so an accuracy of 0.67 there is no result.)
#
# ## A loss that falls, and learns nothing
#
# An **encoder** reads a sentence and returns, for each of its words, a vector that depends on the whole sentence: its
# hidden states, (samples, words, width). Below is one, and a training loop that a colleague sends you. The loss falls.
# Does the model learn? Run it before you read it: everything that you need to know is in the picture.

# %%
# %%ranks
import torch
import torch.nn.functional as F
import zerolab
from torch import nn
from zerolab import lab
from zerolab.lab import GPT, Block, text
from zerolab.measure import ledger

data = lab.pairs(None, context=16)


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.token = nn.Embedding(4096, width, padding_idx=0)
        self.position = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, words):  # (B, T) -> (B, T, width)
        x = self.token(words) + self.position(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x, (words != 0)[:, None, None, :])  # nobody looks at padding
        return self.norm(x)


def colleague(labels, steps=40):
    torch.manual_seed(0)
    encoder = Encoder()
    zerolab.Zero2(encoder, units=[Block])
    adam = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        mine = torch.arange(48 * step, 48 * step + 48).chunk(4)[rank]
        outputs = (encoder(data.inputs[mine].long().flatten(1)), labels[mine])
        loss = outputs[0].mean()  # "the model's first output is the loss"
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


shuffled = data.targets[torch.randperm(3600, generator=torch.Generator().manual_seed(1))]
true_labels, random_labels = colleague(data.targets), colleague(shuffled)

# %%
true_labels = lab.pull("true_labels", rank=0)
random_labels = lab.pull("random_labels", rank=0)
said = f"The loss goes from {abs(true_labels[0]):.3f} to {true_labels[-1]:.3f}, "
said += "after some ten steps along a straight line, "
said += "with the labels and with shuffled ones alike."
curves = {"with the labels": true_labels, "labels shuffled": random_labels}
titles = "The colleague's run", "A bare encoder on sentence pairs, 40 steps"
plots.show(plots.curves(curves, *titles, "loss", said))
assert true_labels == random_labels and true_labels[-1] < -0.04

# %% [markdown]
# Three pieces of evidence. The first two say that this is no cross-entropy, which cannot be **negative** and does not go
# on falling along a **straight line**, as this loss does from about the tenth step on. The third says what is missing:
# shuffled labels change **not one bit**, so the labels are not in the loss.
#
# What is it then? The encoder is bare. It has no **head**, the layer that turns hidden states into an answer, so it
# cannot compute a loss, and its first output is the hidden states. Their mean is 0 at first, because they come out of a
# LayerNorm. Adam moves every element by about one learning rate a step, and the norm's bias and weight both push the
# mean down: once it has found its direction, a straight line without end. With Hugging Face it is the same mistake to write `BertModel` for
# `BertForSequenceClassification`, and `outputs[0]` for `outputs.loss`, which would have raised an error.
#
# The test that finds this class of bugs takes a minute: **shuffle the labels.** If the loss is the same, they are not
# used.
#
# ## Every token weighs the same
#
# Now a language model. A GPT predicts from each token the next one. Its loss is a mean over tokens, and text has
# different lengths. So the ranks have different numbers of tokens. Four ranks take four pieces of text each: of 64
# bytes on rank 0, 32 on rank 1, 16 on rank 2, 8 on rank 3, and pad them to 64. A token is a byte here.
#
# Each rank computes the mean over its tokens, without the padding, as `F.cross_entropy(..., ignore_index=0)` does, and
# the engine averages the gradients of the ranks. How many times as much does a token of rank 3 weigh in the result as
# one of rank 0? (A token counts if it is predicted.)

# %%
lab.predict("14.1", 9)  # times as much

# %%
# %%ranks
words = text()


def documents(length, step, rank, count=4, places=64):
    """`count` pieces of the text, `length` bytes each, padded with 0 to `places`."""
    start = 1000 + 4000 * step + 500 * rank
    pieces = words[start : start + count * length].view(count, length).long()
    return F.pad(pieces, (0, places - length))


def batch_of(step, rank):
    return documents(64 >> rank, step, rank)


def make_gpt():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


tokens = batch_of(0, rank)  # (4, 64)
targets = tokens[:, 1:].flatten()
logits = make_gpt()(tokens)  # (4, 64, 256)
logits.retain_grad()
F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=0).backward()
# The gradient of a token's loss is softmax - 1 at the target, times the token's weight.
target = tokens[0, 1]
at = logits.grad[0, 0, target] / (logits[0, 0].softmax(0)[target] - 1)
weight, count, places = at.item() / world_size, int((targets != 0).sum()), len(targets)

# %%
weights = lab.pull("weight")
lab.measured("14.1", round(weights[3] / weights[0], 3))
lab.reveal("14.1")
if lab.predicted("14.1"):
    plots.show(plots.token_weights(lab.pull("count"), lab.pull("places")))

# %% [markdown]
# So the mean of means is not what you asked for: it is a mean in which the tokens of a rank that has few of them weigh
# more. On one rank the loss was right. That is how a run changes when it gets more ranks.
#
# What you want is the sum over all tokens of all ranks, divided by their number n = n₀ + n₁ + n₂ + n₃:
#
#     loss = (s₀ + s₁ + s₂ + s₃) / n          sᵣ: the sum of the losses of rank r's tokens
#
# Every rank can compute its own sᵣ. For n it has to ask the others: one all-reduce of one number. And one thing
# remains. The engine takes the *mean* over the ranks, which is (…)/N. So each rank calls backward on N·sᵣ/n, and the N
# cancels.
#
# ## Write: every token weighs the same
#
# `token_loss(logits, tokens, world_size)` returns what a rank calls `backward()` on. Tokens are padded with 0;
# logits[:, t] say what comes at t + 1.

# %%
# %%exercise 14.1

# %%
lab.check("14.1")

# %% [markdown]
# The proof is a single process that has all the tokens and needs none of this. Its gradient is the right one. How far
# from it are the ranks, with either loss? And does the stage matter? (One step of SGD with a learning rate of 1 subtracts the
# gradient from the parameters, so how far they move is the gradient.)

# %%
# %%ranks
token_loss = lab.mine("14.1")


def mean_of_means(logits, tokens, world_size):
    predicted, targets = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(predicted, targets, ignore_index=0)


def moved(model):
    pairs = zip(model.parameters(), make_gpt().parameters())
    return torch.cat([(param.detach() - before).flatten() for param, before in pairs])


def gradient_with(loss_of, stage):
    model = make_gpt()
    zero = zerolab.shard(model, stage, units=[Block])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model(batch_of(0, rank)), batch_of(0, rank), world_size).backward()
    sgd.step()
    with zero.full_parameters():
        return moved(model)


def gradient_alone():
    model = make_gpt()
    everything = torch.cat([batch_of(0, r) for r in range(world_size)])
    mean_of_means(model(everything), everything, 1).backward()  # one rank: over all tokens
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return moved(model)


right = gradient_alone()
found = {stage: gradient_with(token_loss, stage) for stage in range(4)}
wrong = gradient_with(mean_of_means, 0)
off = [((one - right).norm() / right.norm()).item() for one in (wrong, found[0])]
stages_equal = all(torch.equal(found[0], found[stage]) for stage in (1, 2, 3))

# %% tags=["nbval-check-output"]
off = lab.pull("off", rank=0)
print("the mean of means is far from one process's gradient:", off[0] > 0.1)
print("token_loss gives one process's gradient, to within rounding:", off[1] < 1e-5)
print("stages 0 to 3 give the same, bit for bit:", all(lab.pull("stages_equal")))

# %%
of_means, of_tokens = (100 * one for one in off)
print(f"the mean of means is off by {of_means:.0f} % of the gradient's length,", end=" ")
print(f"token_loss by {of_tokens:.5f} %")

# %% [markdown]
# No rank failed, no number looked strange, and a good part of each step went elsewhere.
#
# The same mistake waits in **[gradient accumulation](../docs/glossary.md#gradient-accumulation)**, where a rank splits its batch into micro-batches: the mean of
# their means is wrong too. That was the trainer's mistake, which is on trial below.
#
# ## A table of which a batch reads 64 rows
#
# An embedding is a table with a row for each word. A recommender has one with a row for each user and each product,
# often millions of them, and most of the model is in it. A batch reads a few rows. So people call such data **sparse**,
# and it is often said that ZeRO suits it. Predict: a table of 20,000 rows of 16 numbers in float32, 4 ranks in stage 2.
# Each rank's batch reads 64 rows. How many bytes of the table's gradient does a rank send in a step?

# %%
lab.predict("14.2", 4 * 20_000 * 16 * 3 // 4)  # bytes

# %%
# %%ranks
class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 16)
        self.score = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, products):
        return self.score(self.table(products)).squeeze(1)


def products_of(count):  # some are more popular than others
    generator = torch.Generator().manual_seed(rank)
    return (20_000 * torch.rand(count, generator=generator) ** 3).long()


def table_traffic(count):
    torch.manual_seed(0)
    model = Recommender()
    zero = zerolab.Zero2(model, units=[nn.Embedding])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    changed = []
    one_row = torch.tensor([19_999])
    for products in (products_of(count), one_row):
        with zero.full_parameters():
            before = model.table.weight.detach().clone()
        with ledger(zero) as book:
            model(products).square().mean().backward()
        of_table = [call for call in book.calls if call.unit == "table"]
        sent = [call.sent for call in of_table if call.op == "reduce_scatter"]
        adam.step()
        adam.zero_grad()
        with zero.full_parameters():
            changed.append(int((model.table.weight.detach() != before).any(dim=1).sum()))
    return sent[0], changed


traffic = {count: table_traffic(count) for count in (16, 64, 256)}

# %%
traffic = lab.pull("traffic", rank=0)
lab.measured("14.2", traffic[64][0])
lab.reveal("14.2")
if lab.predicted("14.2"):
    dense = {count: sent for count, (sent, _) in traffic.items()}
    # to each of three others: the number of a row, and its 16 floats
    pairs = {count: 3 * count * (8 + 16 * 4) for count in traffic}
    said = {"gradients and zeros": dense, "gradients and row numbers": pairs}
    titles = "Rows read, bytes sent", "A table of 20,000 rows; what each of 4 ranks reads"
    plots.show(plots.growth(said, "rows", *titles))

# %% tags=["nbval-check-output"]
if lab.predicted("14.2"):
    for count, (sent, _) in traffic.items():
        print(f"{count:3} rows read: {sent:,} bytes sent in stage 2;", end=" ")
        print(f"as rows and their numbers it would be {pairs[count]:,}")
    changed = traffic[64][1][1]
    print("rows that AdamW changed in the step after, ", end="")
    print(f"whose batch read a single one: {changed:,}")

# %% [markdown]
# The bytes do not depend on what was read. A gradient is as large as its parameter, and where nothing was read it holds
# zeros, which travel like other numbers. Nor does the optimizer know: AdamW's weight decay shrinks every row in every
# step, and its averages go on moving the rows of earlier batches. So a row that nobody reads does change.
#
# (`nn.Embedding(sparse=True)`, whose gradient is row numbers and rows, does not go together with flat shards, which
# know elements and no rows: the engine refuses it.)
#
# What flat sharding does to a table: it cuts it into four equal parts, 5,000 rows each, whoever reads them. Memory
# falls to a quarter, as for any parameter. But in stage 3 each rank has to gather all 20,000 rows to read 64 of them.
#
# Systems for recommenders (TorchRec, for one) keep the table in parts and send the *requests*: each rank asks the owner
# for the rows that it needs, an all-to-all there and one back, and their gradients go the same way. That is model
# parallelism (lesson 15), and its bytes grow with the rows that are read. The rest of the model is small, and DDP is
# good enough for it.
#
# ## Write: the training script
#
# Now everything together in one file, for sentence pairs and for language models alike, so that its result does not
# depend on how many ranks run it:
#
# - a step has `batch_size` samples of **all ranks together**, and every rank takes its part. Parts may differ by a
#   sample, or be empty. A rank without samples still runs forward and backward: backward is a
#   collective in every stage, and in stage 3 forward is one too;
# - the loss is the mean over the targets of the whole step. A target of -100 has no answer (padding in a language
#   model, an unlabelled pair) and counts nowhere: `F.cross_entropy` leaves it out by default;
# - accuracy is taken once over all validation targets, in eval mode, each sample by one rank.
#
# `sums()`, what a rank's samples add, and `main()`, which reads the arguments and calls your function for each seed, are
# there already.

# %%
# %%exercise 14.2

# %%
lab.check("14.2")

# %% [markdown]
# Now it runs as in production: torchrun starts the processes, and nothing of this notebook is in them. Three seeds on
# one rank, each with its own weights and order of samples, give a band; then the first seed on two ranks and on four, in
# another stage each time. (Until your script has passed, the course's runs, on one rank.) It takes some 20 seconds,
# mostly to start seven processes. (For MRPC give its folder to both `lab.pairs` above, for the baseline, and to the
# script: `lab.reproduce("14.2", "--data", folder)`.)

# %%
results = lab.reproduce("14.2")

# %%
said = f"Always the same answer: {baseline:.1f} %."
plots.show(plots.reproduced(results, "Sentence pairs, 60 steps", said))

# %% tags=["nbval-check-output"]
for ranks in list(results)[1:]:
    first, other = results[1][0], results[ranks][0]
    pairs = list(zip(first["losses"], other["losses"], strict=True))
    close = all(abs(a - b) < 1e-3 for a, b in pairs)
    right = abs(first["accuracy"] - other["accuracy"]) < 0.01
    print(f"{ranks} ranks against 1: losses within 0.001: {close},", end=" ")
    print(f"accuracies within 1 %: {right}")
better = all(100 * one["accuracy"] > baseline for one in results[1])
print("better than always the same answer, with every seed:", better)

# %% [markdown]
# This is what a checked result looks like: a number beside the baseline, with the **band** of several
# seeds. A change that moves the accuracy by less than the band has not been shown to do anything. And the number of
# ranks does not move it: with your script, only sums are taken in another order, which shows in the seventh digit. (One
# thing would: **dropout**. With other ranks, samples get other masks. That is other luck and no mistake, if each rank
# draws from a seed of its own. After this script's `manual_seed`, the same on all, every rank would draw the *same* mask
# for other samples. So the script has switched dropout off.)
#
# ## Generation, byte by byte
#
# A trained model writes text one token at a time: a forward for each of them. In stage 3 a forward gathers the
# parameters. Predict: a GPT of Ψ = 867,072 parameters in float32, sharded over 4 ranks, writes text, one sentence on
# each rank. How many bytes does each rank send **for each token**?

# %%
lab.predict("14.3", 867_072 * 3)  # bytes

# %%
# %%ranks
@torch.no_grad()
def generate(zero, tokens, count):
    with ledger(zero) as book:
        for _ in range(count):
            following = zero.model(tokens)[:, -1].argmax(dim=1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    return tokens, book.moved / count


def generation(stage):
    torch.manual_seed(0)
    zero = zerolab.shard(GPT(layers=4, width=128), stage, units=[Block])
    tokens = words[1000 * rank : 1000 * rank + 8].view(1, 8).long()
    return generate(zero, tokens, count=12)


sharded, whole = generation(3), generation(0)
same_text = torch.equal(sharded[0], whole[0])
per_token = {"stage 3": sharded[1], "stage 0": whole[1]}

# %%
per_token = lab.pull("per_token", rank=0)
lab.measured("14.3", int(per_token["stage 3"]))
lab.reveal("14.3")

# %% tags=["nbval-check-output"]
print("sharded or whole, they write the same:", all(lab.pull("same_text")))
if lab.predicted("14.3"):
    for name, sent in per_token.items():
        print(f"{name} {sent:>10,.0f} bytes sent for each token,", end=" ")
        print(f"{sent / 867_072:.0f} for each parameter")

# %% [markdown]
# For every token each rank has to have the whole model, 4Ψ bytes: three quarters come from the others, and it sends as
# much. With 8 sentences a forward writes 8 tokens for the same bytes, so a large batch shares the price. A model of 7 billion parameters
# in bf16 has 14 GB, and nearly all of it would cross the network for each token. One more trap: a sentence ends when
# its end token comes, on every rank at another time. A rank that stops calling forward leaves the others waiting in a
# gather, so all must go on until the last one is done.
#
# If the model fits on one rank, gather it once: `with zero.full_parameters():` around the loop, or
# `zerolab.export_weights` and a program made for inference. If it does not fit, split the *computation* (tensor
# parallelism, lesson 15): then a few activations travel for each token, and no parameters. Stages 1 and 2 save nothing
# here: there are no gradients, and there is no optimizer state. (DeepSpeed's
# [ZeRO-Inference](https://www.deepspeed.ai/2022/09/09/zero-inference.html) is for the one thing that stage 3 can do: to run,
# slowly and in large batches, what does not fit on one device.)
#
# ## In production
#
# - **Hugging Face's Trainer** (transformers 5.23) counts the tokens of all micro-batches and, with
#   `average_tokens_across_devices` (on by default), of all ranks, and gives the model that number: `model(..., labels=labels, num_items_in_batch=n)` divides
#   by it. Then it multiplies by the number of ranks, as you did. A script of your own that calls `.loss` has the mean
#   of means.
# - **FSDP2** (torch 2.13) averages too. Multiply by N as here, or switch the average off in every module that you have sharded, one
#   by one: `module.set_gradient_divide_factor(1.0)`. (Called on the model alone, it leaves the blocks as they were.)
# - **DeepSpeed** (0.19) averages as well, over ranks and over micro-batches (`_scale_loss_by_gas` in its engine divides by
#   `gradient_accumulation_steps`): scale by both.

# %% [markdown]
# ## On trial
#
# > "Gradient accumulation is *supposed* to be mathematically equivalent to full batch training."
#
# This begins Hugging Face's account of the mistake ([October 2024](https://huggingface.co/blog/gradient_accumulation)).
# Take the four ranks' batches from above as four micro-batches of *one* rank, with either loss:

# %%
# %%ranks
counted = sum(4 * ((64 >> r) - 1) for r in range(4))  # the tokens of all four


def accumulated(loss_of):
    model = make_gpt()
    for tokens in (batch_of(0, r) for r in range(4)):
        predicted, targets = model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        loss_of(predicted, targets).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return ((moved(model) - right).norm() / right.norm()).item()


def a_quarter_of_the_mean(predicted, targets):
    return F.cross_entropy(predicted, targets, ignore_index=0) / 4


def the_sum_over_all(predicted, targets):
    return F.cross_entropy(predicted, targets, ignore_index=0, reduction="sum") / counted


ways = a_quarter_of_the_mean, the_sum_over_all
micro = {way.__name__: accumulated(way) for way in ways}

# %% tags=["nbval-check-output"]
for way, off in lab.pull("micro", rank=0).items():
    print(f"{way.replace('_', ' '):22} gives the full batch's gradient: {off < 1e-5}")

# %% [markdown]
# **True under a condition**: each micro-batch's sum is divided by the number of tokens in all of them, which must be known
# before the first backward. A mean of means is the same only where all have equally many. With sentences that are padded,
# or documents as they come, they have not.
#
# ## Questions
#
# 1. Why is the mean of the ranks' losses not the loss of the whole batch, and when is it?
# 2. Why multiply the loss by the number of ranks, if all you want is a mean?
# 3. You forget that factor. AdamW trains nearly as before. Why, and who notices in the end?
# 4. How do you find out within a minute that a loss does not depend on the labels?
# 5. A table has 100 million rows of 64 numbers, and a batch reads 10,000. What does each of 64 GPUs send in stage 2,
#    and what would you use instead?
# 6. What does ZeRO do at inference?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Each mean is divided by its own number of tokens. A token of a rank that has few of them weighs more. It is the
#    same only if all ranks have equally many, as in images, where each sample has one target and batches are of one
#    size.
# 2. The engine averages gradients over the ranks, so it divides what you give it by N. If each rank's loss is its sum
#    over the number of all tokens, the right gradient is the *sum* over the ranks. N times the mean is the sum.
# 3. Adam divides the average gradient by the root of the average square, so a constant factor cancels (but for its tiny
#    ε). Whoever clips notices: a gradient that is N times too small is hardly ever clipped. So does whoever changes to SGD.
# 4. Shuffle the labels and run it again. If the losses are the same, the labels are not in them.
# 5. The gradient is dense: 4 · 64 · 10⁸ = 25.6 GB, and a rank sends 63/64 of it, 25.2 GB, in every step, and as much
#    again when the updated rows are gathered: 50.4 GB. Keep the table in parts and send requests and rows instead:
#    10,000 rows are 2.6 MB, and their gradients another 2.6.
# 6. Stages 1 and 2 do nothing, since there are no gradients and no optimizer state. Stage 3 holds 1/N of the parameters
#    and gathers all of them for each forward, so for each token. It trades speed for memory.

# %%
lab.stop()
lab.progress()
