"""Models and ways of using them that a sharding engine gets wrong if it can.

A `Case` says how to build a model and how a rank gets a loss from it; `alone` and `sharded` train it, in one process
without zerolab and on ranks with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolab

WIDTH, WORDS = 8, 13


def noise(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head: words in, logits out."""

    def __init__(self, make: Any = Block, blocks: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.emb(tokens))))


class Case:
    units: Any = (Block,)
    exact = True  # bit for bit; else within a tolerance, where a gradient is reduced in two parts
    steps = 3
    every_size = False  # also at 1 and 4 ranks
    stages: tuple[int, ...] = (0, 1, 2, 3)

    def model(self) -> nn.Module:
        return Stack()

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(self, model: nn.Module, rank: int, step: int) -> None:
        """Something done before each step."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def alone(case: Case, ranks: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """One process: the mean of the ranks' gradients, in rank order; each rank has its own buffers."""
    model = build(case)
    optimizer = case.optimizer(model)
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(ranks)]
    losses = []
    for step in range(case.steps):
        grads = []
        losses.append([])
        for rank in range(ranks):
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers[rank][name])
            case.before(model, rank, step)
            model.zero_grad()
            loss = case.loss(model, rank, step)
            case.backward(loss)
            losses[-1].append(loss.item())
            grads.append([p.grad for p in model.parameters()])
            buffers[rank] = {name: b.clone() for name, b in model.named_buffers()}
        for param, own in zip(model.parameters(), zip(*grads, strict=True), strict=True):
            param.grad = None
            if any(g is not None for g in own):
                total = torch.zeros_like(param) if own[0] is None else own[0].clone()
                for grad in own[1:]:
                    total += 0 if grad is None else grad
                param.grad = total / ranks
        optimizer.step()
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[0][name])
    return model.state_dict(), losses


def sharded(case: Case, stage: int, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """On ranks, with zerolab."""
    zero = zerolab.shard(build(case), stage, units=case.units, **options)
    optimizer = case.optimizer(zero.model)
    losses = []
    for step in range(case.steps):
        case.before(zero.model, zero.rank, step)
        loss = case.loss(zero.model, zero.rank, step)
        case.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if stage == 3:  # nothing stays gathered
            assert not any(unit.full.untyped_storage().size() for unit in zero.units)
    return zero.full_state_dict(), losses


def attempt(function: Any) -> str:
    """The error that `function` ends with: class and message."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- models ---------------------------------------------------------------------------------------------------------


class Plain(Case):
    every_size = True


class DefaultUnits(Case):
    units = None


class BatchNorm(Case):
    """Buffers, and convolution weights in channels_last."""

    units = (nn.Conv2d,)

    def model(self) -> nn.Module:
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))
        return net.to(memory_format=torch.channels_last)

    def loss(self, model, rank, step):
        images = noise(rank, step, 4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        return F.cross_entropy(model(images), torch.arange(4))


class TiedInRoot(Case):
    def model(self) -> nn.Module:
        model = Stack()
        model.head.weight = model.emb.weight
        return model


class TiedAcrossUnits(Case):
    def model(self) -> nn.Module:
        model = Stack()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        return model


class UsedTwice(Case):
    def model(self) -> nn.Module:
        model = Stack()
        model.blocks.append(model.blocks[0])
        return model


class NoGradientFromInputs(Case):
    """Raw numbers in: the first unit's inputs need no gradient."""

    def model(self) -> nn.Module:
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


class OddOutputs(Case):
    units = (OddBlock,)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        model = Stack(OddBlock)
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


class AuxiliaryLoss(Case):
    units = (AuxiliaryBlock,)

    def model(self) -> nn.Module:
        return Stack(AuxiliaryBlock)

    def loss(self, model, rank, step):
        return super().loss(model, rank, step) + sum(block.auxiliary for block in model.blocks)


class HuggingFace(Case):
    units = None

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
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


class Mixture(Case):
    steps = 4
    every_size = True

    def __init__(self, units: Any = (MixtureBlock,)) -> None:
        self.units = units

    def model(self) -> nn.Module:
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


class LoRA(Case):
    units = (LowRank,)

    def model(self) -> nn.Module:
        model = Stack(LowRank)
        model.emb.requires_grad_(False)
        return model


class Recurrent(Case):
    units = (nn.LSTM,)

    def model(self) -> nn.Module:
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


class Attention(Case):
    def __init__(self, units: Any) -> None:
        self.units = units

    def model(self) -> nn.Module:
        return Stack(AttentionBlock)


class WeightNorm(Case):
    def __init__(self, old: bool) -> None:
        self.old = old

    def model(self) -> nn.Module:
        model = Stack()
        for block in model.blocks:
            if self.old:
                block.up = nn.utils.weight_norm(block.up)
            else:
                nn.utils.parametrizations.weight_norm(block.up)
        return model


class OddShapes(Case):
    """A scalar, an empty parameter, fewer elements than ranks, lists and dicts of parameters, modules without any."""

    every_size = True
    units = (Block,)

    def model(self) -> nn.Module:
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


class PartsCalled(Case):
    """The root is never called: its modules and the units are, one by one."""

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens.flatten())


class PartOfUnitCalled(Case):
    """Modules inside a unit are called from outside of it, as well as the unit."""

    def loss(self, model, rank, step):
        extra = model.blocks[1].down(F.gelu(model.blocks[1].up(noise(rank, step, 3, WIDTH)))).square().mean()
        return super().loss(model, rank, step) + extra


class TwoForwards(Case):
    def loss(self, model, rank, step):
        return super().loss(model, rank, step) + super().loss(model, rank, step + 50)


class TwoBackwards(Case):
    exact = False

    def backward(self, loss):
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()


class TwoLosses(Case):
    """Two forwards, then a backward for each: the first must not take for unused what the second needs."""

    exact = False

    def loss(self, model, rank, step):
        self.first = super().loss(model, rank, step)
        second = super().loss(model, rank, step + 50)
        return 0.5 * (second + self.first.detach()) + 0 * second

    def backward(self, loss):
        (0.5 * self.first).backward()
        loss.backward()


class RawInputTwice(Case):
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


class RawBranches(Case):
    """Units beside the others, on inputs that have no gradient, of which some ranks use only a part."""

    units = (Block, HalfUsed)

    def model(self):
        model = Stack()
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


class ViewOfOwnWeight(Case):
    """A unit whose result is a part of its parameter."""

    units = (Positions, Block)

    def model(self):
        model = Stack()
        model.positions = Positions()
        return model

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.body(model.emb(tokens) + model.positions(5))
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class Frozen(Case):
    def model(self) -> nn.Module:
        model = Stack()
        model.blocks[1].requires_grad_(False)
        model.emb.requires_grad_(False)
        model.blocks[0].up.bias.requires_grad_(False)
        return model


class FreezingAndThawing(Case):
    steps = 6
    every_size = True

    def model(self) -> nn.Module:
        model = Stack()
        model.blocks[2].requires_grad_(False)
        return model

    def before(self, model, rank, step):
        model.blocks[2].requires_grad_(step >= 2)
        model.blocks[0].up.weight.requires_grad_(step < 2 or step >= 4)
        model.blocks[1].requires_grad_(step not in (3, 4))


class Unused(Case):
    """A block that only some ranks use (which stage 3 refuses), one whose output comes to nothing, a norm at times."""

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


class SkippedByAll(Case):
    """Every rank leaves out the same block, another one in each step."""

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


class Checkpointed(Case):
    units = (Block,)

    def __init__(self, reentrant: bool, where: str) -> None:
        self.reentrant, self.where = reentrant, where

    def model(self) -> nn.Module:
        model = CheckpointedStack(self.reentrant, self.where, InnerCheckpoint if self.where == "inside" else Block)
        for block in model.blocks:
            block.reentrant = self.reentrant
        return model


class SharedAcrossCheckpoints(Case):
    """One block in two re-entrant checkpoints: its gradients come in two backwards inside the backward."""

    exact = False

    def loss(self, model, rank, step):
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for i in (0, 1, 0, 2, 1):
            x = checkpoint(model.blocks[i], x, use_reentrant=True)
        return F.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())


class LooksBetween(Case):
    """Passes without gradients, in eval mode, in inference mode and over parts of the model, between the steps."""

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


CASES: dict[str, Case] = {
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
