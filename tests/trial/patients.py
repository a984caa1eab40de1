"""Engines with one bug each, which a library once had. `found_by`: the case that names it, and others it may break.

`issue`: where it was. `everywhere`: it breaks much, since what it breaks is in many cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small import Small
from torch import Tensor, nn

ACCUMULATING = ("accumulate, a block used once", "accumulate, a block used last", "accumulate, then nothing")
ACCUMULATING += ("accumulate, backward alone",)


class Patient(Small):
    issue = ""
    found_by: tuple[str, ...] = ()
    everywhere = False


# -- accumulation -----------------------------------------------------------------------------------------------------


class LastMicroBatch(Patient):
    """Each backward takes the place of the gradients before it."""

    issue = "allenai/open-instruct#1498"
    found_by = ("accumulate", "accumulate, then clip", *ACCUMULATING)

    def backward(self, loss: Tensor) -> None:
        self.model.zero_grad()
        super().backward(loss)


class DividedAgain(Patient):
    """The loss of an accumulated micro-batch is divided by their number once more."""

    issue = "unslothai/unsloth-zoo#1023"
    found_by = ("accumulate", *ACCUMULATING, "an error while accumulating")

    def average(self) -> None:
        if not self.averaged and self.made[1]:
            for param in self.params():
                if param.grad is not None:
                    param.grad /= 3
        super().average()


class ReducedEachTime(Patient):
    """Every micro-batch's gradients are reduced: right numbers, three times the traffic."""

    issue = "KellerJordan/modded-nanogpt#31"
    found_by = ("moved by accumulation", "moved in a step")

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.average()
        self.averaged = False


class UsedInTheLastMicroBatch(Patient):
    """Only what the last micro-batch used counts as used."""

    issue = "pytorch/pytorch#69031"
    found_by = ("accumulate, a block used once",)

    def backward(self, loss: Tensor) -> None:
        before = [p.grad for p in self.params()]
        for param in self.params():
            param.grad = None
        super().backward(loss)
        for param, old in zip(self.params(), before, strict=True):
            if old is not None and param.grad is not None:
                param.grad += old


class DecidedInForward(Patient):
    """Whether a backward's gradients will be reduced is decided in its forward."""

    issue = "karpathy/build-nanogpt#30"
    found_by = ("accumulate, backward alone", "an error while accumulating")
    inside = decided = False

    def broadcast(self) -> None:
        super().broadcast()
        self.model.register_forward_pre_hook(lambda *_: setattr(self, "decided", self.inside))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.inside = True
        with super().accumulate():
            yield
        self.inside = False

    def average(self) -> None:
        if not self.decided:
            super().average()


# -- which parameters -------------------------------------------------------------------------------------------------


class ByItsUsers(Patient):
    """An expert's gradient is divided by the number of ranks that used it: too large by that."""

    issue = "deepspeedai/DeepSpeed#6545"
    found_by = ("mixture of experts", "raw branches", "unused", "disagree: another block")

    def reduce(self, grad: Tensor, ranks: int) -> None:
        dist.all_reduce(grad, group=self.group)
        grad /= ranks


class ZerosForUnused(Patient):
    """What no rank used gets a gradient of zeros, and weight decay moves it."""

    issue = "pytorch/pytorch#28294"
    found_by = ("weight decay of the unused",)
    everywhere = True

    def used(self) -> list[int]:
        return [1 for _ in self.params()]


class OnlyItsUsersReduce(Patient):
    """Each rank reduces the gradients that it has, one after the other: another rank's are others."""

    issue = "pytorch/pytorch#158719"
    found_by = ("mixture of experts", "raw branches", "unused", "disagree: another block", "disagree: frozen later")
    found_by += ("disagree: one stops", "disagree: one skips a backward", "disagree: one accumulates")
    found_by += ("disagree: one asks for the state",)

    def average(self) -> None:
        if not self.averaged:
            for param in self.params():
                if param.grad is not None:
                    self.reduce(param.grad, 1)
        self.averaged = True


class TiedReducedTwice(Patient):
    """A shared parameter is averaged once for each of its names."""

    issue = "pytorch/pytorch#81296"
    found_by = ("tied in the root", "tied across units", "a block used twice", "raw input twice")
    found_by += ("hugging face gpt2", "hugging face bert")

    def average(self) -> None:
        fresh = not self.averaged
        super().average()
        every = [p for _, p in self.model.named_parameters(remove_duplicate=False)]
        for param in self.params():
            if fresh and param.grad is not None:
                param.grad /= self.ranks ** (sum(p is param for p in every) - 1)


class AliasLost(Patient):
    """The full state has each parameter under one name, and a tied one under the first."""

    issue = "deepspeedai/DeepSpeed#3824"
    found_by = ("tied in the root", "tied across units", "a block used twice", "raw input twice", "state dict")
    found_by += ("hugging face gpt2", "hugging face bert", "hugging face llama", "weight norm")
    everywhere = True

    def full_state(self) -> dict[str, Tensor]:
        names = [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]
        return {name: value for name, value in super().full_state().items() if name in names}


class FrozenTrains(Patient):
    """Parameters are made anew, and nn.Parameter trains by default."""

    issue = "pytorch/torchtitan#4282"
    found_by = ("frozen", "LoRA on a frozen bf16 base", "clip, frozen", "disagree: frozen", "resumed, frozen")

    def wrap(self, model: nn.Module, units: Any, optimizer: Any, **asked: Any) -> None:
        for module in model.modules():
            for param in module.parameters(recurse=False):
                param.requires_grad_(True)
        super().wrap(model, units, optimizer, **asked)


class ThawedAlone(Patient):
    """Hooks are made for what trains at the beginning. What is thawed later follows its own rank."""

    issue = "Lightning-AI/pytorch-lightning#20340"
    found_by = ("freezing and thawing",)

    def wrap(self, model: nn.Module, units: Any, optimizer: Any, **asked: Any) -> None:
        self.known = [name for name, p in model.named_parameters() if p.requires_grad]
        super().wrap(model, units, optimizer, **asked)

    def average(self) -> None:
        own = {name: p.grad.clone() for name, p in self.named() if name not in self.known and p.grad is not None}
        super().average()
        for name, param in self.named():
            if name in own:
                param.grad = own[name]


class EmptyEndsIt(Patient):
    """The loop over the parameters ends at one without elements."""

    issue = "NVIDIA/TransformerEngine#3207"
    found_by = ("odd shapes",)

    def params(self) -> list[nn.Parameter]:
        found = super().params()
        return found[: next((i for i, p in enumerate(found) if p.numel() == 0), len(found))]


class EvenRowsOnly(Patient):
    """Rows are shared out by whole division: what is left over is never averaged."""

    issue = "pytorch/pytorch#176076"
    found_by = ("plain",)
    everywhere = True

    def reduce(self, grad: Tensor, ranks: int) -> None:
        super().reduce(grad[: len(grad) // self.ranks * self.ranks] if grad.dim() else grad, ranks)


# -- buffers and who decides ------------------------------------------------------------------------------------------


class NotBroadcast(Patient):
    """Ranks that were seeded differently train from different models."""

    issue = "pytorch/torchtitan#166"
    found_by = ("the first rank decides",)

    def broadcast(self) -> None:
        pass


class BuffersNotBroadcast(Patient):
    """Parameters come from the first rank, and buffers do not."""

    issue = "pytorch/pytorch#111138"
    found_by = ("the first rank decides",)

    def broadcast(self) -> None:
        for tensor in self.model.parameters():
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)


class ThrownBuffersSaved(Patient):
    """Buffers that are not persistent are in the full state."""

    issue = "pytorch/pytorch#125337"
    found_by = ("state dict", "hugging face llama", "hugging face bert")

    def full_state(self) -> dict[str, Tensor]:
        return super().full_state() | dict(self.model.named_buffers())


class LastBufferForAll(Patient):
    """Each buffer is saved with the value of the last one, a variable that was left over."""

    issue = "pytorch/pytorch#93391"
    found_by = ("batch norm, channels_last",)

    def full_state(self) -> dict[str, Tensor]:
        state = super().full_state()
        buffers = {name: b for name, b in self.model.named_buffers() if name in state}
        for name, own in buffers.items():
            state[name] = next(b for b in reversed(buffers.values()) if b.shape == own.shape and b.dtype == own.dtype)
        return state


class OfTheWorld(Patient):
    """Gradients are averaged over the world, whatever group was given."""

    issue = "ByteDance-Seed/VeOmni#1115"
    found_by = ("two groups",)

    def reduce(self, grad: Tensor, ranks: int) -> None:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


# -- clipping, scaling of the loss, randomness ------------------------------------------------------------------------

CLIPS = ("clip by the 2-norm", "clip by the 1-norm", "clip by the largest", "clip, frozen", "accumulate, then clip")


class ReplicasInTheNorm(Patient):
    """Each replica's gradient counts in the norm."""

    issue = "ByteDance-Seed/VeOmni#184"
    found_by = (*CLIPS, "clip, the norm")

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        more = self.ranks ** (1 / norm_type)
        return super().clip(max_norm / more, norm_type) * more


class LargestAsASum(Patient):
    """The largest gradient to the power of 1/inf is 1."""

    issue = "meta-pytorch/torchrec#3199"
    found_by = ("clip by the largest", "clip, the norm")

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        if norm_type == torch.inf:
            super().clip(1e9, norm_type)
            for param in self.params():
                if param.grad is not None:
                    param.grad *= min(1.0, max_norm / 1.0)
            return 1.0
        return super().clip(max_norm, norm_type)


class NormConsumesTheGenerator(Patient):
    """The norm has gone through the generator, and nothing is left to scale."""

    issue = "areal-project/AReaL#335"
    found_by = CLIPS

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        return super().clip(1e30, norm_type)


class ClippedAlone(Patient):
    """Each rank clips by its own gradients' norm, before they are averaged."""

    issue = "pytorch/torchtitan#766"
    found_by = (*CLIPS, "clip, the norm", "disagree: one clips")

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        return nn.utils.clip_grad_norm_(self.params(), max_norm, norm_type).item()


class BadOnesSkippedAlone(Patient):
    """A rank whose gradients are not finite leaves them out, and tells nobody."""

    issue = "ecmwf/WeatherGenerator#2718"
    found_by = ("NaN on one rank",)

    def average(self) -> None:
        if not all(p.grad is None or p.grad.isfinite().all() for p in self.params()):
            for param in self.params():
                param.grad = None
        super().average()


class OneSeedForAll(Patient):
    """Every step seeds all ranks alike, so they drop the same elements."""

    issue = "huggingface/transformers#31412"
    found_by = ("dropout, one random state",)

    def step(self) -> None:
        super().step()
        torch.manual_seed(0)


# -- optimizers and their state ---------------------------------------------------------------------------------------


class OneGroup(Patient):
    """The optimizer is built again of all parameters, and the groups' own settings are lost."""

    issue = "deepspeedai/DeepSpeed#6873"
    found_by = ("groups and a schedule", "resumed, groups")

    def wrap(self, model: nn.Module, units: Any, optimizer: Any, **asked: Any) -> None:
        def of_all(model: nn.Module) -> torch.optim.Optimizer:
            plain = optimizer(model)
            for group in plain.param_groups:
                group |= plain.defaults
            return plain

        super().wrap(model, units, of_all, **asked)


class OthersAfterForward(Patient):
    """After a forward, and until a backward or another forward, the model has other parameters."""

    issue = "pytorch/pytorch#149205"
    found_by = ("a forward first", "two backwards", "two losses", "accumulate, each reduced")
    found_by += ("an error in backward", "held after a forward")
    own: tuple[tuple[nn.Module, str, nn.Parameter], ...] = ()

    def broadcast(self) -> None:
        super().broadcast()
        self.model.register_forward_pre_hook(lambda *_: self.put_back())
        self.model.register_forward_hook(lambda *_: self.lend())

    def lend(self) -> None:
        self.own = tuple((module, name, p) for module in self.model.modules() for name, p in module._parameters.items())
        for module, name, param in self.own:
            setattr(module, name, param if param is None else nn.Parameter(param.detach().clone()))

    def put_back(self) -> None:
        for module, name, param in self.own:
            setattr(module, name, param)
        self.own = ()

    def backward(self, loss: Tensor) -> None:
        self.put_back()
        super().backward(loss)


class OnSlices(Patient):
    """Each rank gives the optimizer its rows of a matrix, as if they were the matrix."""

    issue = "deepspeedai/DeepSpeed#7807"
    found_by = ("Muon", "Adafactor")

    def step(self) -> None:
        if type(self.optimizer) not in (torch.optim.Muon, torch.optim.Adafactor):
            return super().step()
        self.average()
        for param in self.params():  # in turn, each half by itself; the optimizer keeps the state of one shape
            full, grad = param.data, param.grad
            for rows in torch.arange(len(full)).chunk(self.ranks):
                param.data, param.grad = full[rows].clone(), grad[rows].clone()
                plain = type(self.optimizer)([param], **self.optimizer.defaults)
                plain.step()
                full[rows] = param.data
            param.data = full
        self.model.zero_grad()
        self.averaged = False


class StateCast(Patient):
    """torch's load_state_dict gives floating-point state the parameter's dtype."""

    issue = "pytorch/pytorch#43706"
    found_by = ("resumed, state in bf16",)

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "saved.pt", weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


RESUMED = ("resumed", "resumed by more", "resumed by fewer", "resumed, groups", "resumed, frozen")


class NoMoments(Patient):
    """Parameters are loaded, and the optimizer begins anew."""

    issue = "areal-project/AReaL#1468"
    found_by = (*RESUMED, "resumed, state in bf16")

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "saved.pt", weights_only=True)[0])


class MomentsOfANeighbour(Patient):
    """State was packed without padding and is read with it: parameters of equal size get each other's."""

    issue = "NVIDIA/Megatron-LM#5077"
    found_by = RESUMED

    def load(self, folder: Path) -> None:
        super().load(folder)
        state = self.optimizer.state
        for p, q in zip(self.params(), self.params()[6:], strict=False):
            if p.shape == q.shape and p in state and q in state:
                state[p], state[q] = state[q], state[p]


class StepsNotCounted(Patient):
    """The step count is not in the checkpoint: bias correction begins anew."""

    issue = "NVIDIA/TransformerEngine#3318"
    found_by = RESUMED[:3] + RESUMED[4:]

    def load(self, folder: Path) -> None:
        super().load(folder)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.zeros(())


class FrozenNotSaved(Patient):
    """A checkpoint has what the optimizer trains. Frozen weights stay as they were initialised."""

    issue = "deepspeedai/DeepSpeed#3090"
    found_by = ("resumed, frozen",)

    def load(self, folder: Path) -> None:
        frozen = {p: p.detach().clone() for p in self.params() if not p.requires_grad}
        super().load(folder)
        for param, value in frozen.items():
            param.data.copy_(value)


# -- bytes ------------------------------------------------------------------------------------------------------------


class SaysStageTwo(Patient):
    """It says stage 2, and every rank holds every gradient."""

    issue = "karpathy/nanochat#566"
    found_by = ("held after backward", "held between steps", "held at the peak", "moved by accumulation")
    stage = 2


class KeepsLosses(Patient):
    """It keeps every loss, and the graph of some with it."""

    issue = "pytorch/pytorch#63211"
    found_by = ("held after many steps", "held after backward", "held between steps", "held at the peak")

    def wrap(self, model: nn.Module, units: Any, optimizer: Any, **asked: Any) -> None:
        self.kept: list[Tensor] = []
        super().wrap(model, units, optimizer, **asked)

    def average(self) -> None:
        super().average()
        self.kept += [p.grad for p in self.params() if p.grad is not None]


class CopiesAll(Patient):
    """All gradients are copied into one tensor to be reduced, when activations and gradients are there already."""

    issue = "deepspeedai/DeepSpeedExamples#336"
    found_by = ("held at the peak",)

    def used(self) -> list[int]:
        copy = torch.cat([p.grad.flatten() for p in self.params() if p.grad is not None])
        return super().used() if copy.numel() else []


class GathersAll(Patient):
    """Gradients are gathered from all ranks and summed by each: N - 1 times their size, where a ring sends twice it."""

    issue = "deepspeedai/DeepSpeed#7059"
    found_by = ("moved in a step", "moved by accumulation")

    def reduce(self, grad: Tensor, ranks: int) -> None:
        for _ in range(2):  # as much as on three ranks
            others = [torch.empty_like(grad) for _ in range(self.ranks)]
            dist.all_gather(others, grad, group=self.group)
        super().reduce(grad, ranks)


class OneBuffer(Patient):
    """The next gradient goes into the buffer from which the last one is still to be read."""

    issue = "deepspeedai/DeepSpeed#7805"
    found_by = ("plain",)
    everywhere = True

    def reduce(self, grad: Tensor, ranks: int) -> None:
        super().reduce(grad, ranks)
        if grad.dim() == 1:
            size = grad.numel()
            self.buffer = getattr(self, "buffer", {})
            shown = self.buffer.setdefault((size, grad.dtype), torch.empty_like(grad))
            shown.copy_(grad)
            grad.set_(shown.untyped_storage(), 0, grad.shape)


# -- ranks that disagree ----------------------------------------------------------------------------------------------


class AsksNobody(Patient):
    """Nothing is compared, and a learning rate drifts apart."""

    issue = "pytorch/pytorch#163546"
    found_by = ("disagree: a learning rate",)
    everywhere = True

    def agree(self, what: str, value: Any = None) -> None:
        pass


class SyncFlagStays(Patient):
    """After an error inside, gradients are never synchronised again."""

    issue = "pytorch/torchtitan#3724"
    found_by = ("an error while accumulating",)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.averaged = True
        with super().accumulate():
            yield
        self.averaged = False


PATIENTS = {cls.__name__: cls for cls in Patient.__subclasses__()}
