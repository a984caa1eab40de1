"""Models, and ways of using them, that a sharding engine gets wrong if it can.

Each is a case whose docstring is the promise: the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerolab.trial.case import Adapter, right_or_refused
from zerolab.trial.numbers import WIDTH, WORDS, Block, Numbers, Stack, noise, words

# -- models ---------------------------------------------------------------------------------------------------------


class Plain(Numbers):
    """A small model of blocks has the numbers of one process."""

    every_size = True


class DefaultUnits(Numbers):
    """So it has where the engine chooses the units."""

    units = None


class BatchNorm(Numbers):
    """Convolutions in channels_last; batch norms, where each rank keeps statistics and the first rank's are saved."""

    units = (nn.Conv2d,)

    def model(self) -> Any:
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU()]
        net: Any = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))
        return net.to(memory_format=torch.channels_last)

    def loss(self, model, rank, step):
        images = noise(rank, step, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(images), torch.arange(4))


class TiedInRoot(Numbers):
    """A head that shares the embedding's weight gets both gradients."""

    def model(self) -> Any:
        model: Any = Stack()
        model.head.weight = model.emb.weight
        return model


class TiedAcrossUnits(Numbers):
    """Blocks that share a weight train it together."""

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model


class UsedTwice(Numbers):
    """A block that is called twice in a forward gets both gradients."""

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks.append(model.blocks[0])
        return model


class NoGradientFromInputs(Numbers):
    """Raw numbers in: the first unit's inputs need no gradient."""

    def model(self) -> Any:
        return nn.Sequential(Block(), Block(), Block())

    def loss(self, model, rank, step):
        return model(noise(rank, step, 4, WIDTH)).square().mean()


@dataclass
class Result:
    hidden: Tensor
    unused: Tensor


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OddBlock(Block):
    kind = "dataclass"

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x["hidden"] if isinstance(x, dict) else getattr(x, "hidden", None)
        y = super().forward(x)
        makers = {
            "dataclass": lambda: Result(y, y * 2),
            "dict": lambda: {"hidden": y, "unused": [y * 2, (y * 3, None)]},
            "object": lambda: Holder(y),
            "slots": lambda: Slotted(y),
        }
        return makers[self.kind]()


class OddOutputs(Numbers):
    """Blocks may return data classes, dicts or objects, and be called without the model."""

    needs = frozenset({"parts"})
    units = (OddBlock,)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> Any:
        model: Any = Stack(OddBlock)
        for block in model.blocks:
            block.kind = self.kind
        model.body = None  # the blocks are called below, the root is not
        return model

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x: Any = model.emb(tokens)
        for block in model.blocks:
            x = block(x)
        x = x["hidden"] if isinstance(x, dict) else x.hidden
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens.flatten())


class AuxiliaryBlock(Block):
    """Keeps a loss of its own, made with weights that backward needs, after its output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x):
        y = super().forward(x)
        self.auxiliary = self.router(F.gelu(self.router.weight.sum(0) * x)).square().mean()
        return y


class AuxiliaryLoss(Numbers):
    """A loss that a block keeps beside its output reaches the weights that made it."""

    units = (AuxiliaryBlock,)

    def model(self) -> Any:
        return Stack(AuxiliaryBlock)

    def loss(self, model, rank, step):
        return super().loss(model, rank, step) + sum(block.auxiliary for block in model.blocks)


class HuggingFace(Numbers):
    """A model of transformers, as it is."""

    units = None

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> Any:
        import transformers as hf

        small = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
        if self.kind == "gpt2":  # tied embeddings
            config = hf.GPT2Config(vocab_size=WORDS, n_layer=2, n_head=2, n_embd=16, n_positions=16)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            return hf.GPT2LMHeadModel(config)
        if self.kind == "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=24, **small))
        config = hf.BertConfig(intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small)
        return hf.BertForMaskedLM(config)

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        return model(input_ids=tokens, labels=tokens).loss


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class MixtureBlock(nn.Module):
    """Four experts, of which `route` (a number) chooses one: other ranks, other experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.route = 0

    def forward(self, x):
        return x + self.experts[self.route](self.norm(x))


class Mixture(Numbers):
    """Experts in a block, of which each rank uses another: all get the mean over all ranks."""

    needs = frozenset({"some"})
    steps = 4
    every_size = True

    def __init__(self, units: Any = (MixtureBlock,)) -> None:
        self.units = units

    def model(self) -> Any:
        return Stack(MixtureBlock)

    def before(self, model, rank, step):
        for i, block in enumerate(model.blocks):
            block.route = (rank + i + step) % 3  # the last expert is never used


class LowRank(nn.Module):
    """LoRA: a frozen bfloat16 layer and a trainable float32 correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return x + self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


class LoRA(Numbers):
    """Frozen bfloat16 and trained float32 in one unit."""

    units = (LowRank,)

    def model(self) -> Any:
        model: Any = Stack(LowRank)
        model.emb.requires_grad_(False)
        return model


class Recurrent(Numbers):
    """An LSTM, whose weights are in a list of its own."""

    units = (nn.LSTM,)

    def model(self) -> Any:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.emb = nn.Embedding(WORDS, WIDTH)
                self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
                self.head = nn.Linear(WIDTH, WORDS)

            def forward(self, tokens):
                return self.head(self.lstm(self.emb(tokens))[0])

        return Net()


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])


class Attention(Numbers):
    """Attention modules as units, with modules inside that are never called."""

    def __init__(self, units: Any) -> None:
        self.units = units

    def model(self) -> Any:
        return Stack(AttentionBlock)

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Not Adam: it makes whole steps of what rounding leaves of the keys' bias' gradient, which is 0."""
        return torch.optim.SGD(model.parameters(), lr=0.1)


class WeightNorm(Numbers):
    """Parametrised weights."""

    def __init__(self, old: bool) -> None:
        self.old = old

    def model(self) -> Any:
        model: Any = Stack()
        for block in model.blocks:
            if self.old:
                block.up = nn.utils.weight_norm(block.up)
            else:
                nn.utils.parametrizations.weight_norm(block.up)
        return model


class OddShapes(Numbers):
    """A scalar, an empty parameter, fewer elements than ranks, lists and dicts of parameters, modules without any."""

    every_size = True
    units = (Block,)

    def model(self) -> Any:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(1.5))
                self.empty = nn.Parameter(torch.zeros(0, 3))
                self.pair = nn.Parameter(torch.randn(2))
                self.list = nn.ParameterList([torch.randn(3, 1), torch.randn(1, 1, 5)])
                self.dict = nn.ParameterDict({"a": torch.randn(7, 2)})
                self.block = Block()
                self.nothing = nn.Identity()

            def forward(self, x):
                x = self.nothing(self.block(x)) * self.scale + self.pair.prod() + self.empty.sum()
                return x + self.list[0].sum() * self.list[1].mean() + self.dict["a"].square().mean()

        return Net()

    def loss(self, model, rank, step):
        return model(noise(rank, step, 4, WIDTH)).square().mean()


# -- ways of using a model ------------------------------------------------------------------------------------------


class PartsCalled(Numbers):
    """The root is never called: its modules and the units are, one by one."""

    needs = frozenset({"parts"})

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens.flatten())


class PartOfUnitCalled(Numbers):
    """Modules inside a unit are called from outside of it, as well as the unit."""

    needs = frozenset({"parts"})

    def loss(self, model, rank, step):
        extra = model.blocks[1].down(F.gelu(model.blocks[1].up(noise(rank, step, 3, WIDTH)))).square().mean()
        return super().loss(model, rank, step) + extra


class TwoForwards(Numbers):
    """Two forwards, and one backward through both."""

    needs = frozenset({"several"})

    def loss(self, model, rank, step):
        return super().loss(model, rank, step) + super().loss(model, rank, step + 50)


class TwoBackwards(Numbers):
    """Two backwards through one graph add up."""

    needs = frozenset({"several"})
    exact = False

    def backward(self, loss):
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()


class TwoLosses(Numbers):
    """Two forwards, then a backward for each: the first must not take for unused what the second needs."""

    needs = frozenset({"several"})
    exact = False

    def loss(self, model, rank, step):
        self.first = super().loss(model, rank, step)
        second = super().loss(model, rank, step + 50)
        return 0.5 * (second + self.first.detach()) + 0 * second

    def backward(self, loss):
        (0.5 * self.first).backward()
        loss.backward()


class RawInputTwice(Numbers):
    """A unit used twice, first with inputs that have no gradient."""

    def model(self):
        block = Block()
        return nn.Sequential(block, block, nn.Linear(WIDTH, WIDTH))

    def loss(self, model, rank, step):
        return model(noise(rank, step, 4, WIDTH)).square().mean()


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.at_times = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.always(x) + (self.at_times(x) if both else 0)


class RawBranches(Numbers):
    """Units beside the others, on inputs that have no gradient, of which some ranks use only a part."""

    needs = frozenset({"some", "parts"})
    units = (Block, HalfUsed)

    def model(self):
        model: Any = Stack()
        model.first, model.last = HalfUsed(), HalfUsed()
        return model

    def loss(self, model, rank, step):
        tokens, raw = words(rank, step, 2, 5), noise(rank, step, 2, 5, WIDTH)
        x = model.first(raw, rank != step) + model.body(model.emb(tokens)) + model.last(raw, rank == step)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, n: int) -> Tensor:
        return self.table[:n]


class ViewOfOwnWeight(Numbers):
    """A unit whose result is a part of its parameter."""

    needs = frozenset({"parts"})
    units = (Positions, Block)

    def model(self):
        model: Any = Stack()
        model.positions = Positions()
        return model

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.body(model.emb(tokens) + model.positions(5))
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class Frozen(Numbers):
    """Frozen parameters, alone and in a block, stay as they are."""

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks[1].requires_grad_(False)
        model.emb.requires_grad_(False)
        model.blocks[0].up.bias.requires_grad_(False)
        return model


class FreezingAndThawing(Numbers):
    """Parameters are frozen and thawed between the steps, on all ranks alike."""

    needs = frozenset({"some"})
    steps = 6
    every_size = True

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks[2].requires_grad_(False)
        return model

    def before(self, model, rank, step):
        model.blocks[2].requires_grad_(step >= 2)
        model.blocks[0].up.weight.requires_grad_(step < 2 or step >= 4)
        model.blocks[1].requires_grad_(step not in (3, 4))


class Unused(Numbers):
    """A block that some ranks skip, one whose output is thrown away, a norm in some steps only: right, or an error on
    every rank."""

    needs = frozenset({"some", "parts"})
    steps = 4
    stages = (0, 1, 2)

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.blocks[0](model.emb(tokens))
        if (rank + step) % 2 == 0:
            x = model.blocks[1](x)
        model.blocks[2](x)
        if step < 2:
            return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())
        return model.head(model.norm(x)).square().mean()

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        return right_or_refused(super().run, make, part, folder)


class SkippedByAll(Numbers):
    """Every rank leaves out the same block, another one in each step."""

    needs = frozenset({"some", "parts"})
    steps = 4

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for i, block in enumerate(model.blocks):
            x = x if i == step % 3 else block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class CheckpointedStack(Stack):
    def __init__(self, reentrant: bool, where: str, make: Any = Block) -> None:
        super().__init__(make)
        self.reentrant, self.where = reentrant, where

    def body(self, x):
        def run(function, value):
            return checkpoint(function, value, use_reentrant=self.reentrant)

        if self.where == "blocks":
            for block in self.blocks:
                x = run(block, x)
            return x
        if self.where == "several":
            return run(lambda v: self.blocks[1](self.blocks[0](v)), self.blocks[2](x))
        if self.where == "nested":
            return run(lambda v: run(self.blocks[1], self.blocks[0](v)), self.blocks[2](x))
        return super().body(x)


class InnerCheckpoint(Block):
    """Recomputes by a function that uses the weights without calling their modules."""

    reentrant = False

    def forward(self, x):
        def mlp(h):
            return F.linear(F.gelu(F.linear(h, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)

        return x + checkpoint(mlp, self.norm(x), use_reentrant=self.reentrant)


class Checkpointed(Numbers):
    """Activations that are computed again in backward."""

    units = (Block,)

    def __init__(self, reentrant: bool, where: str) -> None:
        self.reentrant, self.where = reentrant, where

    def model(self) -> Any:
        model: Any = CheckpointedStack(self.reentrant, self.where, InnerCheckpoint if self.where == "inside" else Block)
        for block in model.blocks:
            block.reentrant = self.reentrant
        return model


class SharedAcrossCheckpoints(Numbers):
    """One block in two re-entrant checkpoints: its gradients come in two backwards inside the backward."""

    needs = frozenset({"parts"})
    exact = False

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for i in (0, 1, 0, 2, 1):
            x = checkpoint(model.blocks[i], x, use_reentrant=True)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class LooksBetween(Numbers):
    """Passes without gradients, in eval mode, in inference mode and over parts of the model, between the steps."""

    needs = frozenset({"parts"})

    def before(self, model, rank, step):
        tokens = words(rank, step + 70, 2, 3)
        with torch.no_grad():
            model(tokens)
            model.blocks[2](noise(rank, step, 2, WIDTH))
        model.eval()
        with torch.inference_mode():
            model(tokens)
        model(tokens)  # with gradients, but never a backward
        model.train()


CASES: dict[str, Numbers] = {
    "plain": Plain(),
    "default units": DefaultUnits(),
    "batch norm, channels_last": BatchNorm(),
    "tied in the root": TiedInRoot(),
    "tied across units": TiedAcrossUnits(),
    "a block used twice": UsedTwice(),
    "inputs without gradient": NoGradientFromInputs(),
    **{f"output: {kind}": OddOutputs(kind) for kind in ("dataclass", "dict", "object", "slots")},
    "auxiliary loss": AuxiliaryLoss(),
    **{f"hugging face {kind}": HuggingFace(kind) for kind in ("gpt2", "llama", "bert")},
    "mixture of experts": Mixture(),
    "LoRA on a frozen bf16 base": LoRA(),
    "LSTM": Recurrent(),
    "attention": Attention((AttentionBlock, nn.MultiheadAttention)),
    "attention of linears": Attention((nn.Linear,)),
    "weight norm": WeightNorm(old=False),
    "weight norm, old": WeightNorm(old=True),
    "odd shapes": OddShapes(),
    "parts called": PartsCalled(),
    "part of a unit called": PartOfUnitCalled(),
    "two forwards": TwoForwards(),
    "two backwards": TwoBackwards(),
    "two losses": TwoLosses(),
    "raw input twice": RawInputTwice(),
    "raw branches": RawBranches(),
    "view of own weight": ViewOfOwnWeight(),
    "frozen": Frozen(),
    "freezing and thawing": FreezingAndThawing(),
    "unused": Unused(),
    "skipped by all": SkippedByAll(),
    **{
        f"checkpoint {where}, {'' if reentrant else 'non-'}reentrant": Checkpointed(reentrant, where)
        for where in ("blocks", "several", "nested", "inside")
        for reentrant in (False, True)
    },
    "shared across checkpoints": SharedAcrossCheckpoints(),
    "passes between": LooksBetween(),
}
