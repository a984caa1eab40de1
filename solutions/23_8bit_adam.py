# %% [markdown]
# # 23 · 8-bit Adam, sharded
#
# **The question.** Sharding moves numbers and changes none: the stages of this course keep the same numbers, bit for
# bit (lesson 04). With an optimizer in wide use that stops being true. Let Adam store its state in 8 bits, cut it into
# equal shards, and on the same samples the ranks train a different model from the one that a single process trains, and
# a different one for each number of ranks. Nothing fails. But the run cannot be repeated on another number of GPUs, and
# the state in its checkpoint does not fit there. Where may one cut?
#
# The lesson builds on lesson 04. In ZeRO-1 all parameters lie end to end in a flat storage; each rank updates a stretch
# of it, its shard, with an optimizer whose state covers that stretch alone, and sends the result to the others.

# %%
# %load_ext zerolab.lab
import shutil
import tempfile

from zerolab import lab
from zerolab.lab import blocks_and_owners, in_other_blocks, plots

lab.start(3)
folder = tempfile.mkdtemp(prefix="zerolab-lesson-23-")
lab.push(folder=folder)

# %% [markdown]
# ## Eight bits and a scale
#
# Adam keeps two averages of each parameter's gradients, 8 bytes in float32.
# **[Quantisation](../docs/glossary.md#quantisation)** stores them as whole numbers from -127 to 127, the *codes*, of
# one byte each. The largest absolute value becomes 127, and a *scale*, the value that a code of 1 stands for, is kept
# beside them.
#
# With one scale for a whole tensor, one large value can make the codes so coarse that all others are 0. So the tensor
# is cut into **blocks**, here of 256 elements, and each has a scale of its own, a float32 (Dettmers et al., arXiv
# 2110.02861, with other codes). Here are 512 values of 0.01, one of which is replaced by 12.7.

# %% tags=["nbval-check-output"]
# %%ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zerolab
from zerolab import lab
from zerolab.lab import GPT, Block, Ragged, StoredAdam, batch, four_steps, text


def quantise(x, block=256):  # (n,) -> codes (n,), and a scale for each block
    rows = F.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = rows.abs().amax(dim=1) / 127
    codes = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
    return codes.flatten()[: x.numel()], scales


def dequantise(codes, scales, block=256):
    return codes.float() * scales.repeat_interleave(block)[: codes.numel()]


x = torch.full((512,), 0.01)
x[300] = 12.7
for block in (512, 256):
    restored = dequantise(*quantise(x, block), block)
    print(f"blocks of {block}: {int((restored == 0).sum())} of 512 values come back as 0")

# %% [markdown]
# The large value ruins its own block, and no other.
#
# ## Predict
#
# With blocks of 256, how many bytes of optimizer state does a parameter cost? (It was 8.)

# %%
lab.predict("23.1", 2 * (1 + 4 / 256))  # bytes per parameter


# %%
# %%ranks
class Adam8(StoredAdam):  # Adam that stores its averages, after each step, by `quantise`
    def __init__(self, params):
        super().__init__(params, quantise, dequantise)


def make_model():
    torch.manual_seed(0)
    return GPT(layers=2, width=64)


words, model = text(), make_model()
adam = Adam8(model.parameters())
model(*batch(words, rank, 0, 2, 64)).backward()
adam.step()
state = [value for of_one in adam.state.values() for value in of_one.values()]
state_bytes = sum(value.nbytes for value in state if torch.is_tensor(value))
sizes = [param.numel() for param in model.parameters()]

# %%
lab.measured("23.1", lab.pull("state_bytes", rank=0) / sum(lab.pull("sizes", rank=0)))
lab.reveal("23.1")

# %% [markdown]
# A quarter of the bytes. (A parameter with fewer elements than a block has a scale of its own too: that is the rest.)
# `Adam8` stores the square root of the second average, since its range is narrower.
#
# ## Where a border falls
#
# Now shard it. Blocks are counted within each parameter, from its own first element, and the last one of a parameter
# may be shorter. Take three parameters of 96, 10 and 31 elements, in blocks of 8, and 2 ranks. An equal share is 68.5
# elements, so the border is at 68, in the middle of a block. In the picture each box is a block or a part of one. Its
# colour says which rank owns it, and so does the number, where there is room.

# %%
ways = {"equal shares": [0, 68, 137], "cut between blocks": [0, 64, 137]}
shown = {way: blocks_and_owners([96, 10, 31], borders, 8) for way, borders in ways.items()}
plots.show(plots.shard_map(shown, ranks=2))

# %% [markdown]
# With equal shares, rank 1 sees the end of the first parameter, from element 68 on, and counts its blocks from there:
# 68 to 75, 76 to 83, and so on up to 96. In one process they are 64 to 71, 72 to 79. With other elements in a block,
# its largest value may be another, so its scale differs, and with it the rounded values. And rank 0 has half a block,
# 64 to 67, whose largest value may have been in the other half. The next parameters begin anew, and are right.
#
# ## Predict
#
# Two models, both trained by `Adam8` from the same start with the same samples: one by one process, one by 2 ranks with
# equal shares. The optimizer reads its two averages (0 at the start), mixes in the gradient, updates the parameters,
# and stores the averages. After how many steps do parameters differ for the first time?

# %%
lab.predict("23.2", 2)  # steps

# %% [markdown]
# ## Write: where to cut
#
# `cuts` moves each border back to the end of a block. In the example, the exact share is 68.5 elements, blocks end at
# 8, 16, ..., 96, then at 104 and 106, then at 114, ..., 137, and the border goes to 64.

# %%
# %%exercise 23.1

# %%
lab.check("23.1")

# %% [markdown]
# ## The same model on 2 and on 3 ranks?
#
# `Ragged` is ZeRO-1 with borders that may lie anywhere. `four_steps` trains on the mean of some ranks' gradients, and
# returns the parameters after each step. Each number of ranks has samples of its own, so each is compared with one
# process that trains on the same. `zerolab.DDP` adds gradients in the order of the ranks, as one process does, so
# whatever differs comes from the optimizer.

# %%
# %%ranks
cuts, groups = lab.mine("23.1"), {2: dist.new_group([0, 1]), 3: dist.group.WORLD}


def by_one_process(N):
    model = make_model()
    return four_steps(model, Adam8(model.parameters()), words, *range(N))


def by_ranks(borders, group):
    model = make_model()
    zerolab.DDP(model, group=group)
    return four_steps(model, Ragged(model, borders, group, Adam8), words, rank)


def count_differences(N, borders):
    pairs = zip(by_one_process(N), by_ranks(borders, groups[N]), strict=True)
    return [int((one != ours).sum()) for one, ours in pairs]


trial = []
for N in (2, 3):
    equal = [r * sum(sizes) // N for r in range(N + 1)]
    between = cuts(sizes, N, 256)
    for way, borders in {"equal shares": equal, "cut between blocks": between}.items():
        if rank < N:
            trial.append((N, way, borders, count_differences(N, borders)))

# %%
sizes, trial = lab.pull("sizes", rank=0), lab.pull("trial", rank=0)
first_to_differ = [number for number, differ in enumerate(trial[0][3], 1) if differ]
lab.measured("23.2", first_to_differ[0])
lab.reveal("23.2")
if lab.predicted("23.2"):
    print(f"{sum(sizes):,} parameters")
    for N, way, borders, differ in trial:
        moved = in_other_blocks(sizes, borders, 256)
        print(f"{N} ranks, {way:18} {moved:5,} elements in other blocks;", end=" ")
        print("after each step differ", *(f"{number:,}" for number in differ))
        assert differ[1] <= moved and any(differ) == (way == "equal shares")

# %% [markdown]
# The first step has the bits of one process: it reads averages of 0, and rounds only when it is done. The second reads
# what was rounded, so parameters differ, but only among the elements that lie in other blocks. Then the next forward
# computes with them, gradients change all over the model, and from then on most parameters differ. One border inside a
# block was enough.
#
# Nothing complains. But the run depends on its number of ranks, and a checkpoint of codes and scales from 3 ranks does
# not fit 2, whose blocks are others. Cut between blocks, every number of ranks gives the bits of one process.
#
# ## Granularity
#
# So a layout has a **[granularity](../docs/glossary.md#granularity)**: the number of elements that must stay together.
# For AdamW it is 1, since each element is updated from its own gradient. For this Adam it is 256. For Muon, which
# orthogonalises matrices, it is a whole parameter (lesson 04). What does it cost? This is the GPT on 3 ranks.

# %%
# %%ranks 0
kinds = {"AdamW: 1": 1, "8-bit Adam: 256": 256, "Muon: a parameter": max(sizes)}
borders = {kind: cuts(sizes, 3, together) for kind, together in kinds.items()}

# %%
shown = {
    kind: blocks_and_owners([sum(sizes)], ends, sum(sizes))
    for kind, ends in lab.pull("borders", rank=0).items()
}
plots.show(plots.shard_map(shown, ranks=3))

# %% [markdown]
# A shard differs from an equal share by less than what must stay together. Fewer than 256 elements are too few to see
# in the picture, a matrix is not. On more ranks than there are matrices, some would have nothing.
#
# ## In an engine
#
# The course's engine keeps equal shards and takes the granularity as an option: padding fills each parameter, and then
# each shard, up to whole blocks. It cannot guess what an optimizer does, so you declare it: how long a block is, and
# which state is kept per block. What happens without? And what does another number of ranks read from a checkpoint?

# %%
# %%ranks
told, scales = {}, {}


def in_zero3(N, **options):
    model = make_model()
    zero = zerolab.Zero3(model, units=[Block], group=groups[N], **options)
    return model, zero, Adam8(model.parameters())


def scales_of(adam):  # this rank's, of the first average
    states = [state for state in adam.state.values() if state]
    assert all(state["m"].dtype == torch.int8 for state in states)
    return torch.cat([zerolab.to_local(state["m_scale"]) for state in states]).tolist()


model, zero, adam = in_zero3(3)
try:
    four_steps(model, adam, words, rank)
except RuntimeError as error:
    told["undeclared"] = str(error).split(". ")[0]
zerolab.declare_blockwise(Adam8, 256, per_block=["m_scale", "root_scale"])
model, zero, adam = in_zero3(3, granularity=256)
four_steps(model, adam, words, rank)
zerolab.save(f"{folder}/three", zero, adam)
scales[3] = scales_of(adam)
full = zero.full_state_dict()
ours = torch.cat([full[name].flatten() for name, _ in make_model().named_parameters()])
told["declared"] = f"one process's bits: {torch.equal(ours, by_one_process(3)[-1])}"
if rank < 2:
    model, zero, adam = in_zero3(2, granularity=256)
    zerolab.load(f"{folder}/three", zero, adam)
    scales[2] = scales_of(adam)

# %% tags=["nbval-check-output"]
for way, said in lab.pull("told", rank=0).items():
    print(f"{way}: {said}")

of_ranks = lab.pull("scales")
found = {N: sorted(scale for of in of_ranks[:N] for scale in of[N]) for N in (2, 3)}
print("scales saved by 3 ranks and loaded by 2: equal:", found[2] == found[3])

# %% [markdown]
# Undeclared, it is refused, instead of silently training another model. Declared, it has the bits of one process, and
# the scales of 3 ranks are dealt out anew to 2 and stay what they are. The codes stay in 8 bits: nothing is rounded
# twice. The price is the padding, which travels too: in each unit less than a block per parameter and one per rank.
#
# ## In production
#
# - **FSDP2** cuts a parameter evenly by rows, and a border between two rows may fall into the middle of a block.
# - **torchao**'s `AdamW8bit` knows that. It stores a parameter's averages in 8 bits where this rank's part has at least
#   4,096 elements and consists of whole blocks, and in floats otherwise (`_new_buffer` in `torchao/optim/adam.py`). It
#   never cuts a block, but the number of ranks decides which averages are rounded at all: those of a vector of 8,192
#   elements on one rank and on two, but not on four.
# - **bitsandbytes** is where the widely used 8-bit Adam comes from. Of a sharded parameter it sees a rank's part.
# - **RaggedShard** (veScale-FSDP, arXiv 2602.22437) makes `cuts` a [placement](../docs/glossary.md#placement) of
#   [DTensors](../docs/glossary.md#dtensor) (lesson 20): uneven shards, cut in units of a chosen granularity.
#
# Before you combine an optimizer with a sharded engine, ask what it computes from more than one element, and where the
# borders lie.
#
# ## Questions
#
# 1. Why does an 8-bit Adam on equal shards depend on the number of ranks, when AdamW doesn't?
# 2. What does it cost to halve the block, from 256 elements to 128, and what is gained?
# 3. One border lies inside a block. How does the difference get from there to the whole model, and when?
# 4. A layout has granularity g. How uneven can its shards be, and when does that matter?
# 5. `cuts` makes shards uneven, the engine pads them to equal length. What does each pay?
# 6. A run on 3 ranks with equal shards has saved its codes and scales. What would 2 ranks have to do to go on, and what
#    would be lost? And if it had cut between blocks?

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. AdamW updates an element from its own gradient, wherever it is. A block's scale depends on all its elements, and a
#    border within it makes other blocks, so other roundings.
# 2. The scales double, from 2·4/256 to 2·4/128 bytes per parameter: 2.03 become 2.06. A large value then spoils the
#    rounding of 127 neighbours, and no longer of 255.
# 3. When the first step ends, the averages of elements in other blocks are rounded differently. The second step updates
#    those elements with them. The third forward computes with these parameters, so all gradients change.
# 4. A shard differs from an equal one by less than g elements. It matters when g is not small beside Ψ/N: with whole
#    matrices of a large model, on many ranks, some have one and some none.
# 5. Uneven shards: the fullest rank decides the memory and the time of a step, and collectives must take pieces of
#    different length. Padding: all shards are of the same length, but the padding is held and sent.
# 6. Turn the codes into floats with the blocks of 3 ranks, and round them again with those of 2: what the second
#    rounding changes is lost. Cut between blocks, codes and scales are only dealt out anew.

# %%
shutil.rmtree(folder)
lab.stop()
lab.progress()
