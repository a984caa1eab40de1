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
# way you meet three things that are special about text: labels that never reach the loss, sentences of different
# lengths, and tables of embeddings of which a batch touches a few rows. In the end the same script runs on one, two and
# four ranks, and says the same.

# %%
# %load_ext zerolab.lab
from zerolab import lab
from zerolab.lab import plots

lab.start(4)

# %% [markdown]
# ## The data
#
# MRPC (the Microsoft Research Paraphrase Corpus) has pairs of sentences from the news, and for each pair a 1 if both
# say the same, else a 0. It is one of the tasks of [GLUE](https://gluebenchmark.com/). Their files have a line for each
# pair, and tabs between columns. (Read them with `quoting=csv.QUOTE_NONE`, or a quotation mark that is never closed
# swallows the lines that follow.) If you have the folder of MRPC, QQP, RTE, QNLI or WNLI, give it to `lab.pairs`.
# Without a folder, it makes pairs of its own: half say the same in other words, and in the others a person, a thing, a
# place or a deed differs.

# %% tags=["nbval-check-output"]
data = lab.pairs(None, context=16)
kept_out = tuple(data.validation_inputs.shape)
print("training", tuple(data.inputs.shape), data.inputs.dtype, "validation", kept_out)
print("first pair, as word numbers:", data.inputs[0].tolist())
share = data.validation_targets.float().mean().item()
baseline = 100 * max(share, 1 - share)
print(f"always giving the more common answer: {baseline:.1f} % are right")

# %% [markdown]
# A word is a number from 1 to 4,095, and 0 is **[padding](../docs/glossary.md#padding)**: sentences have different
# lengths, and a tensor has only one. Keep the last number in mind, the **baseline**: a model that has learned nothing
# can reach it. (In MRPC [67 %](https://aclanthology.org/I05-5002/) of the pairs say the same, so an accuracy of 0.67
# there is no result.)
#
# ## A loss that falls, and learns nothing
#
# An **encoder** reads a sentence and returns, for each of its words, a vector that depends on the whole sentence: its
# hidden states, (samples, words, width). `lab.Encoder` is one, and below is a training loop that a colleague sends you.
# The loss falls. Does the model learn? Run it before you read it: everything that you need to know is in the picture.

# %%
# %%ranks
import torch
import torch.nn.functional as F
import zerolab
from zerolab import lab
from zerolab.lab import Block

data = lab.pairs(None, context=16)


def colleague(labels, steps=40):
    torch.manual_seed(0)
    encoder = lab.Encoder()
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
said = f"The loss goes from {abs(true_labels[0]):.3f} to {true_labels[-1]:.3f}, after some"
said += " ten steps along a straight line, with the labels and with shuffled ones alike."
curves = {"with the labels": true_labels, "labels shuffled": random_labels}
titles = "The colleague's run", "A bare encoder on sentence pairs, 40 steps"
plots.show(plots.curves(curves, *titles, "loss", said))
assert true_labels == random_labels and true_labels[-1] < -0.04

# %% [markdown]
# Three pieces of evidence. The first two say that this is no cross-entropy, which cannot be **negative** and does not
# go on falling along a **straight line**. The third says what is
# missing: shuffled labels change **not one bit**, so the labels are not in the loss.
#
# What is it then? The encoder is bare. It has no **head**, the layer that turns hidden states into an answer, so it
# cannot compute a loss, and its first output is the hidden states. Their mean is 0 at first, because they come out of a
# LayerNorm. Adam moves every element by about one learning rate a step: the norm's bias alone lowers the mean by that
# much, and its weight and the layers below add to it. Once Adam has found the direction, the line is straight and
# without end. With Hugging Face it is the same mistake to write `BertModel` for `BertForSequenceClassification`, and
# `outputs[0]` for `outputs.loss`, which would have raised an error.
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
tokens = lab.uneven_batch(rank)  # (4, 64)
count, places = int((tokens[:, 1:] != 0).sum()), tokens[:, 1:].numel()
weight = lab.token_weight(tokens)  # read from the gradient of a GPT's logits

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
# remains. The engine averages over the ranks: it divides their sum by N. So each rank calls backward on N·sᵣ/n, and the
# N cancels.
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
# from it are the ranks, with either loss? And does the stage matter?

# %%
# %%ranks
token_loss = lab.mine("14.1")


def own_mean(logits, tokens, world_size):  # the mean of a rank's own tokens
    predicted, targets = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return F.cross_entropy(predicted, targets, ignore_index=0)


right = lab.gradient_alone()  # one process, all the tokens
found = {stage: lab.gradient_with(token_loss, stage) for stage in range(4)}
wrong = lab.gradient_with(own_mean, 0)
off = [((one - right).norm() / right.norm()).item() for one in (wrong, found[0])]
stages_equal = all(torch.equal(found[0], found[stage]) for stage in (1, 2, 3))

# %% tags=["nbval-check-output"]
off = lab.pull("off", rank=0)
print("the mean of means is far from one process's gradient:", off[0] > 0.1)
print("token_loss gives one process's gradient, to within rounding:", off[1] < 1e-5)
print("stages 0 to 3 give the same, bit for bit:", all(lab.pull("stages_equal")))

# %%
print(f"the mean of means is off by {100 * off[0]:.0f} %", end=" ")
print(f"of the gradient's length, token_loss by {100 * off[1]:.5f} %")

# %% [markdown]
# No rank failed, no number looked strange, and yet the gradient was off by almost a quarter of its length.
#
# The same mistake waits in **[gradient accumulation](../docs/glossary.md#gradient-accumulation)**, where a rank splits
# its batch into micro-batches. That was the trainer's mistake, which is on trial below.
#
# ## A table of which a batch reads 64 rows
#
# An embedding is a table with a row for each word. A recommender has one with a row for each user and each product,
# often millions of them. A batch reads a few rows. People call such data **sparse**, and it is often said that ZeRO
# suits it. Predict: a table of 20,000 rows of 16 numbers in float32, 4 ranks in stage 2. Each rank's batch reads 64
# rows. How many bytes of the table's gradient does a rank send in a step? (`lab.table_traffic` measures it on a small
# recommender.)

# %%
lab.predict("14.2", 4 * 20_000 * 16 * 3 // 4)  # bytes

# %%
# %%ranks
traffic = {count: lab.table_traffic(count) for count in (16, 64, 256)}

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
    print("rows changed by AdamW's next step, whose batch read a single one:", end=" ")
    print(f"{traffic[64][1]:,}")

# %% [markdown]
# The bytes do not depend on what was read. A gradient is as large as its parameter, and where nothing was read it holds
# zeros, which travel like other numbers. Nor does the optimizer know: AdamW's weight decay shrinks every row in every
# step, and its averages go on moving the rows of earlier batches. So a row that nobody reads does change.
#
# (`nn.Embedding(sparse=True)`, whose gradient is row numbers and rows, does not go with flat shards: the engine refuses
# it.)
#
# Flat sharding cuts a table into four equal parts, 5,000 rows each, whoever reads them. In stage 2 the table's gradient
# and optimizer state fall to a quarter, in stage 3 the table itself too. But then each rank has to gather all 20,000
# rows to read 64 of them. So ZeRO does not suit sparse data: it treats a table as dense.
#
# Systems for recommenders (TorchRec, for one) keep the table in parts and send the *requests*: each rank asks the owner
# for the rows that it needs, and its bytes grow with the rows that are read. That is model parallelism (lesson 15).
#
# ## Write: the training script
#
# Now everything together in one file, for sentence pairs and for language models alike, so that its result does not
# depend on how many ranks run it. (If you have done 13.1, you know the frame.)
#
# - a step has `batch_size` samples of **all ranks together**, and every rank takes its part. Parts may differ by a
#   sample, or be empty. A rank without samples still runs forward and backward: backward is a
#   collective in every stage, and in stage 3 forward is one too;
# - the loss is the mean over the targets of the whole step. A target of -100 has no answer (padding in a language
#   model, an unlabelled pair) and counts nowhere: `F.cross_entropy` leaves it out by default;
# - accuracy counts every validation target once: each sample on exactly one rank, in eval mode.
#
# The stage is an argument: `zero = zerolab.shard(model, stage)` is `zerolab.DDP(model)` for stage 0, and
# `zerolab.Zero1`, `Zero2` or `Zero3` for the others. It has `zero.rank` and `zero.world_size`. `sums()` gives a rank's
# share of the sums, and `main()` reads the arguments and calls your function for each seed. Both are given.

# %%
# %%exercise 14.2

# %%
lab.check("14.2")

# %% [markdown]
# Now it runs as in production: torchrun starts the processes, and nothing of this notebook is in them. Three seeds on
# one rank give a band; then the first seed runs on two ranks and on four, in another stage each time. (Until your
# script has passed, the course's runs, on one rank.) It takes some 20 seconds. (For MRPC give its folder to `lab.pairs`
# above and to the script: `lab.reproduce("14.2", "--data", folder)`.)

# %%
results = lab.reproduce("14.2")

# %%
said = f"Always the same answer: {baseline:.1f} %."
plots.show(plots.reproduced(results, "Sentence pairs, 60 steps", said))

# %% tags=["nbval-check-output"]
lab.against_one_rank(results, losses=1e-3, accuracy=0.01)
better = all(100 * one["accuracy"] > baseline for one in results[1])
print("better than always the same answer, with every seed:", better)

# %% [markdown]
# This is what a checked result looks like: a number beside the baseline, with the **band** of several seeds. A change
# that moves the accuracy by less than the band has not been shown to do anything. And the number of ranks does not move
# it: only sums are taken in another order, which shows in the seventh digit. (**Dropout** would move it: with another
# number of ranks, samples get other masks. That is no mistake as long as each rank has a seed of its own. This script's
# is the same on all, so every rank would draw the *same* masks, for different samples. So dropout is off.)
#
# ## In production
#
# - **Hugging Face's Trainer** (transformers 5.23) counts the tokens of all micro-batches and, with
#   `average_tokens_across_devices` (on by default), of all ranks, and gives the model that number: `model(...,
#   labels=labels, num_items_in_batch=n)` divides by it. Then it multiplies by the number of ranks, as you did. A script
#   of your own that calls `.loss` has the mean of means.
# - **FSDP2** (torch 2.13) averages too. Multiply by N as here, or switch the average off in every module that you have
#   sharded, one by one: `module.set_gradient_divide_factor(1.0)`.
# - **DeepSpeed** (0.19) averages as well, over ranks and over micro-batches (`_scale_loss_by_gas` in its engine divides
#   by `gradient_accumulation_steps`): scale by both.

# %% [markdown]
# ## On trial
#
# > "Gradient accumulation is *supposed* to be mathematically equivalent to full batch training."
#
# So says Hugging Face's account of the mistake ([October 2024](https://huggingface.co/blog/gradient_accumulation)).
# Take the four ranks' batches from above as four micro-batches of *one* rank, with either loss:

# %%
# %%ranks
counted = sum(4 * ((64 >> r) - 1) for r in range(4))  # the tokens of all four


def a_quarter_of_the_mean(predicted, targets):
    return F.cross_entropy(predicted, targets, ignore_index=0) / 4


def the_sum_over_all(predicted, targets):
    return F.cross_entropy(predicted, targets, ignore_index=0, reduction="sum") / counted


ways = a_quarter_of_the_mean, the_sum_over_all
micro = {}
for way in ways:
    gradient = lab.gradient_in_micro_batches(way)
    micro[way.__name__] = ((gradient - right).norm() / right.norm()).item()

# %% tags=["nbval-check-output"]
for way, off in lab.pull("micro", rank=0).items():
    print(f"{way.replace('_', ' '):22} gives the full batch's gradient: {off < 1e-5}")

# %% [markdown]
# **True under a condition**: each micro-batch's sum is divided by the number of tokens in all of them, which must be
# known before the first backward. A mean of means is the same only where all have equally many. Padded sentences and
# documents as they come do not.
#
# ## For another day: generation, byte by byte
#
# *Ten minutes, for whoever serves models.* A trained model writes text one token at a time: a forward for each of them.
# In stage 3 a forward gathers the parameters. Predict: a GPT of Ψ = 867,072 parameters in float32, sharded over 4
# ranks, writes text, one sentence on each rank. How many bytes does each rank send **for each token that it writes**?

# %%
lab.predict("14.3", 867_072 * 3)  # bytes

# %%
# %%ranks
from zerolab.lab import GPT, text
from zerolab.measure import ledger


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
    tokens = text()[1000 * rank : 1000 * rank + 8].view(1, 8).long()
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
# much. With 8 sentences a forward writes 8 tokens for the same bytes, so a large batch shares the price. A model of 7
# billion parameters in bf16 has 14 GB, and nearly all of it would cross the network for each token. One more trap: a
# sentence ends when its end token comes, on every rank at another time. A rank that stops calling forward leaves the
# others waiting in a gather, so all must go on until the last one is done.
#
# If the model fits on one rank, gather it once: `with zero.full_parameters():` around the loop, or
# `zerolab.export_weights` and a program made for inference. If it does not fit, split the *computation* (tensor
# parallelism, lesson 15): then a few activations travel for each token, and no parameters. Stages 1 and 2 save nothing
# here: there are no gradients, and there is no optimizer state. (DeepSpeed's
# [ZeRO-Inference](https://www.deepspeed.ai/2022/09/09/zero-inference.html) keeps the weights in host memory or on NVMe
# instead and streams each layer to the GPU. That runs what fits on no device, and pays off with large batches.)
#
# ## Questions
#
# 1. Why is the mean of the ranks' losses not the loss of the whole batch, and when is it?
# 2. Why multiply the loss by the number of ranks, if all you want is a mean?
# 3. You forget that factor. AdamW trains nearly as before. Why, and who notices in the end?
# 4. How do you find out within a minute that a loss does not depend on the labels?
# 5. A table has 100 million rows of 64 numbers in float32, and a batch reads 10,000. What does each of 64 GPUs send in
#    stage 2, and what would you use instead?
# 6. (Of "For another day".) What does ZeRO do at inference?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Each mean is divided by its own number of tokens. A token of a rank that has few of them weighs more. It is the
#    same only if all ranks have equally many, as in images, where each sample has one target and batches are of one
#    size.
# 2. The engine averages gradients over the ranks, so it divides what you give it by N. If each rank's loss is its sum
#    over the number of all tokens, the right gradient is the *sum* over the ranks. N times the mean is the sum.
# 3. Adam divides the average gradient by the root of the average square, so a constant factor cancels (but for its tiny
#    ε). Whoever clips notices: a gradient that is N times too small is hardly ever clipped. So does whoever changes to
#    SGD.
# 4. Shuffle the labels and run it again. If the losses are the same, the labels are not in them.
# 5. The gradient is dense: 4 · 64 · 10⁸ = 25.6 GB, and a rank sends 63/64 of it, 25.2 GB, in every step, and as much
#    again when the updated rows are gathered: 50.4 GB. Keep the table in parts and send requests and rows instead:
#    10,000 rows are 2.6 MB, and their gradients another 2.6.
# 6. Stages 1 and 2 do nothing, since there are no gradients and no optimizer state. Stage 3 holds 1/N of the parameters
#    and gathers all of them for each forward, so for each token. It trades speed for memory.

# %%
lab.stop()
lab.progress()
