"""Cases about the loop: accumulation, clipping, optimizers, precision, scaling, randomness, errors, checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from zerolab.trial.case import Adapter, Broken, Case, right_or_refused
from zerolab.trial.numbers import WIDTH, Block, Numbers, Stack, alone, build, compare, in_float64, noise, train, words

# -- accumulation -----------------------------------------------------------------------------------------------------


class Accumulation(Numbers):
    """Gradients of three micro-batches, reduced once, are those of one large batch."""

    family = "the loop"
    needs = frozenset({"accumulate"})
    micro = 3


class AccumulationWithoutAsking(Numbers):
    """Three backwards before a step add up, each reduced by itself."""

    family = "the loop"
    exact = False
    micro = 1

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        for batch in range(3 * step + 1, 3 * step + 3):
            (super().loss(model, rank, batch) / 3).backward()
        return super().loss(model, rank, 3 * step) / 3


class AccumulationOfSome(Accumulation):
    """A block that a single micro-batch uses, the first or the last, has its gradient like all others."""

    needs = frozenset({"accumulate", "some", "parts"})

    def __init__(self, used_in: int) -> None:
        self.used_in = used_in

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        x = model.emb(tokens)
        for block in list(model.blocks)[: 3 if step % 3 == self.used_in else 2]:
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens.flatten())


class AccumulationAroundBackward(Accumulation):
    """Whether a backward adds or reduces is for itself to know, not for its forward: right numbers, or an error."""

    source = "FSDPModule.set_requires_gradient_sync; DistributedDataParallel.no_sync asks for both to be inside"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        return right_or_refused(self._run, make)

    def _run(self, make: Callable[[], Adapter]) -> str:
        rank, ranks, own = dist.get_rank(), dist.get_world_size(), []
        with in_float64():
            expected, losses = alone(self, ranks)
            adapter = make()
            adapter.wrap(build(self), self.units, self.optimizer)
            for batch in range(self.steps * self.micro):
                is_last = (batch + 1) % self.micro == 0
                with adapter.accumulate() if is_last else nullcontext():
                    loss = self.loss(adapter.model, rank, batch) / self.micro
                with nullcontext() if is_last else adapter.accumulate():
                    adapter.backward(loss)
                if is_last:
                    adapter.step()
                    own.append(loss.item())
            state = adapter.full_state()
        return compare(expected, [row[rank] for row in losses], state, own, adapter.tolerance)


class AccumulationThenClipping(Accumulation):
    """The norm after accumulation is that of the averaged sum."""

    needs = frozenset({"accumulate", "clip"})
    exact = False
    clip = (0.05, 2.0)


class AccumulationOfChanging(Accumulation):
    """One step accumulates and the next does not: nothing of the first is left in the second."""

    steps = 4

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        loss = super().loss(model, rank, step)
        return loss if (step // 3) % 2 == 0 or step % 3 == 2 else 0 * loss


# -- clipping ---------------------------------------------------------------------------------------------------------


class Clipping(Numbers):
    """Gradients are scaled by the norm of all ranks' gradients together."""

    family = "the loop"
    needs = frozenset({"clip"})
    exact = False

    def __init__(self, norm_type: float = 2.0, largest: float = 0.01) -> None:
        self.clip = (largest, norm_type)

    def optimizer(self, model: Any) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=1.0)  # Adam would not see the scale


class ClippingFrozen(Clipping):
    """Frozen parameters have no part in the norm."""

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks[1].requires_grad_(False)
        model.head.bias.requires_grad_(False)
        return model


class ClippingNorm(Numbers):
    """The norm that clipping returns is the same on every rank, and that of one process."""

    family = "the loop"
    needs = frozenset({"clip"})

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with in_float64():
            model = build(self)
            for other in range(ranks):
                (self.loss(model, other, 0) / ranks).backward()
            norms = [nn.utils.get_total_norm([p.grad for p in model.parameters()], p) for p in (1.0, 2.0, torch.inf)]
            adapter = make()
            adapter.wrap(build(self), self.units, self.optimizer)
            adapter.backward(self.loss(adapter.model, rank, 0))
            for p, want in zip((1.0, 2.0, torch.inf), norms, strict=True):
                got = adapter.clip(1e9, p)
                if not abs(got - want.item()) <= 1e-6 * want.item():
                    raise Broken(f"rank {rank}: the {p:g}-norm is {got:.7g}, {want.item():.7g} in one process")
        return "norms 1, 2 and inf"


# -- optimizers -------------------------------------------------------------------------------------------------------


class Optimized(Numbers):
    """The optimizer's numbers are those of one process."""

    family = "the loop"

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, {"lr": 0.01} | options
        self.exact = not options.get("fused")  # whose vectors end elsewhere in a slice

    def optimizer(self, model: Any) -> optim.Optimizer:
        return getattr(optim, self.name)(model.parameters(), **self.options)


class Groups(Numbers):
    """Parameter groups by shape and by name, each with its rate and weight decay, under a schedule."""

    family = "the loop"

    def optimizer(self, model: Any) -> optim.Optimizer:
        decayed = [p for name, p in model.named_parameters() if p.dim() >= 2 and not name.startswith("head")]
        others = [p for name, p in model.named_parameters() if p.dim() < 2 and not name.startswith("head")]
        head = [p for name, p in model.named_parameters() if name.startswith("head")]
        groups: Any = [{"params": decayed, "weight_decay": 0.3}, {"params": others}, {"params": head, "lr": 0.05}]
        optimizer = optim.AdamW(groups, lr=0.02, weight_decay=0.0)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer


class ForwardFirst(Numbers):
    """A forward before the optimizer is made changes nothing: what the optimizer gets is what is trained."""

    family = "the loop"

    def optimizer(self, model: Any) -> optim.Optimizer:
        with torch.no_grad():
            model(words(0, 0, 2, 5))
        return super().optimizer(model)


class Schedule(Numbers):
    """A rate that is written into the groups between the steps counts at the next step."""

    family = "the loop"

    def after(self, model: Any, optimizer: optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 2)


class LateGroup(Numbers):
    """Parameters that are given to the optimizer after some steps are trained from then on."""

    family = "the loop"
    steps = 4

    def optimizer(self, model: Any) -> optim.Optimizer:
        return optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.01)

    def after(self, model: Any, optimizer: optim.Optimizer, step: int) -> None:
        if step == 1:
            late = [p for name, p in model.named_parameters() if name.startswith("head")]
            optimizer.add_param_group({"params": late, "lr": 0.03})
            for p in late:
                p.grad = None


class NotAll(Numbers):
    """Parameters that the optimizer was not given stay as they are."""

    family = "the loop"

    def optimizer(self, model: Any) -> optim.Optimizer:
        return optim.SGD([p for name, p in model.named_parameters() if "up" in name], lr=0.1, momentum=0.9)


class DecayOfUnused(Numbers):
    """Weight decay leaves a parameter alone that had no gradient in this step on any rank."""

    family = "the loop"
    needs = frozenset({"some", "parts"})

    def optimizer(self, model: Any) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        tokens = words(rank, step, 2, 5)
        return F.cross_entropy(model.head(model.blocks[0](model.emb(tokens))).flatten(0, 1), tokens.flatten())


class WholeMatrix(Numbers):
    """An optimizer that looks at whole matrices gets whole matrices: the numbers of one process."""

    family = "the loop"
    needs = frozenset({"whole"})
    source = "Jordan et al., Muon (2024); Shazeer and Stern, Adafactor, arXiv 1804.04235: defined on matrices"

    def __init__(self, name: str) -> None:
        self.name, self.tolerance = name, 1e-2 if name == "Muon" else 0.0  # Muon's iteration is in bfloat16

    def model(self) -> Any:
        """Matrices of unequal sizes, so that cutting the model in two or three cuts through one."""
        sizes = (WIDTH, 9, 7, WIDTH)
        layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes)]
        return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    units = (nn.Linear,)

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        return (model(noise(rank, step, 4, WIDTH)) - 1).square().mean()

    def optimizer(self, model: Any) -> optim.Optimizer:
        return getattr(optim, self.name)(model.parameters(), lr=0.02)


# -- precision --------------------------------------------------------------------------------------------------------


MIXED = "Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3"


class InPrecision(Case):
    """With bf16 in forward, the trained weights stay near those of float32: within 5 % of how far they went."""

    family = "the loop"
    needs = frozenset({"precision"})
    source = MIXED

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        case = Numbers()
        case.steps = 4
        case.optimizer = lambda model: optim.SGD(model.parameters(), lr=0.1)  # type: ignore[method-assign]
        start = build(case).state_dict()
        expected, _ = alone(case, dist.get_world_size())
        adapter = make()
        adapter.wrap(build(case), case.units, case.optimizer, precision=True)
        train(adapter, case)
        state = adapter.full_state()
        went = torch.cat([(expected[name] - start[name]).flatten() for name in expected]).norm()
        off = torch.cat([(state[name].float() - expected[name]).flatten() for name in expected]).norm()
        if not off <= 0.05 * went:
            raise Broken(f"the weights are off by {off / went:.1%} of how far they went")
        return f"off by {off / went:.2%} of the way"


class TwoModels(Numbers):
    """Two models of the same classes, the first in bf16, train in turn, and the second has its own numbers."""

    family = "the loop"
    needs = frozenset({"precision"})
    source = MIXED + " (a policy is the model's that it was given for)"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        first, second = make(), make()
        first.wrap(build(self), self.units, self.optimizer, precision=True)
        train(first, self, range(1))
        with in_float64():
            expected, losses = alone(self, dist.get_world_size())
            second.wrap(build(self), self.units, self.optimizer)
        own = []
        for step in range(self.steps):
            with in_float64():
                own += train(second, self, range(step, step + 1))
            train(first, self, range(step, step + 1))
        with in_float64():
            state = second.full_state()
        rank = dist.get_rank()
        return compare(expected, [row[rank] for row in losses], state, own, second.tolerance)


class SmallUpdates(Case):
    """Updates too small for bf16 add up in float32 masters."""

    family = "the loop"
    needs = frozenset({"precision"})
    source = MIXED + ".1"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
        nn.init.constant_(model[0].weight, 1.0)
        adapter = make()
        adapter.wrap(model, (nn.Linear,), lambda model: optim.SGD(model.parameters(), lr=1e-4), precision=True)
        for _ in range(10):
            adapter.backward(adapter.model(torch.ones(1, 4)).sum())
            adapter.step()
        moved = 1 - adapter.full_state()["0.weight"].double()
        if not (moved - 1e-3).abs().max() < 1e-5:
            raise Broken(f"ten updates of 0.0001 have moved a weight of 1 by {moved.mean():.2g}")
        return "10 × 0.0001 are 0.001"


class SumsInFloat32(Case):
    """Gradients in bf16 of 256 on one rank and 1 on each other are summed in float32: the small ones count."""

    family = "the loop"
    needs = frozenset({"precision"})
    least = 2
    source = MIXED + ".3: large reductions in FP32"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model: Any = nn.Sequential(nn.Linear(4, 1, bias=False))
        nn.init.zeros_(model[0].weight)
        adapter = make()
        adapter.wrap(model, (nn.Linear,), lambda model: optim.SGD(model.parameters(), lr=1.0), precision=True)
        adapter.backward(adapter.model(torch.full((1, 4), 256.0 if rank == 0 else 1.0)).sum())
        adapter.step()
        got, want = -adapter.full_state()["0.weight"].double(), (255 + ranks) / ranks
        if not (got - want).abs().max() < 1e-3:
            raise Broken(f"the mean is {got.mean():g}, not {want:g}")
        return f"{want:g}"


class BuffersKeepTheirDtype(Case):
    """Buffers keep their dtype when forward computes in bf16: a counter counts, a running mean runs in float32."""

    family = "the loop"
    needs = frozenset({"precision"})
    source = MIXED + ".3: the statistics of batch normalization"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        adapter = make()
        adapter.wrap(model, (nn.Linear,), lambda model: optim.SGD(model.parameters(), lr=0.1), precision=True)
        before = {name: b.dtype for name, b in adapter.model.named_buffers()}
        adapter.backward(adapter.model(noise(dist.get_rank(), 0, 8, 4)).float().square().mean())
        adapter.step()
        state = adapter.full_state()
        for name, dtype in before.items():
            want = torch.int64 if "num_batches" in name else torch.float32
            if not dtype == state[name].dtype == want:
                raise Broken(f"{name} is {state[name].dtype}, {want} in one process")
        return "float32 and int64"


class Overflow(Case):
    """A gradient that overflows on one rank makes every rank skip the step and halve the scale."""

    family = "the loop"
    needs = frozenset({"scaler"})
    least = 2
    source = MIXED + ".2"

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank = dist.get_rank()
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 3, bias=False))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        adapter = make()
        adapter.wrap(model, (nn.Linear,), lambda model: optim.SGD(model.parameters(), lr=0.1), scaler=True)
        scales = []
        for step in range(2):
            out = adapter.model(noise(rank, step, 4, 4))
            if step == 0 and rank == 1:
                out = out * torch.tensor([torch.inf, 1.0, 1.0], dtype=out.dtype)
            adapter.backward(adapter.scaler.scale(out.float().abs().mean()))
            adapter.scaler.step(adapter.optimizer)
            adapter.scaler.update()
            adapter.optimizer.zero_grad()
            scales.append(adapter.scaler.get_scale())
            if step == 0:
                after = adapter.full_state()
                for name, value in start.items():
                    if not torch.equal(after[name].float(), value):
                        raise Broken(f"rank {rank}: {name} has changed in the step that was to be skipped")
        if scales != [128.0, 128.0]:
            raise Broken(
                f"rank {rank}: the scale is {scales[0]:g} after the overflow and {scales[1]:g} after a good step"
            )
        if all(torch.equal(adapter.full_state()[name].float(), value) for name, value in start.items()):
            raise Broken("the good step after it has changed nothing")
        return "skipped, 256 to 128"


# -- randomness, passes between, errors -------------------------------------------------------------------------------


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


class Dropout(Numbers):
    """Dropout draws what it would draw in one process with this rank's seed: the engine draws nothing itself."""

    family = "the loop"
    units = (Dropping,)

    def model(self) -> Any:
        return Stack(Dropping)

    def before(self, model: Any, rank: int, step: int) -> None:
        torch.manual_seed(77 * step + rank)


class DropoutOnce(Dropout):
    """The random state goes on from step to step as in one process: neither forward, backward nor step draws."""

    family = "the loop"

    def __init__(self) -> None:
        self.states: dict[int, Tensor] | None = None  # of all ranks, while one process is all of them

    def before(self, model: Any, rank: int, step: int) -> None:
        if step == 0:
            torch.manual_seed(rank)
        elif self.states is not None:
            torch.set_rng_state(self.states[rank])

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        loss = super().loss(model, rank, step)
        if self.states is not None:
            self.states[rank] = torch.get_rng_state()
        return loss

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        self.states = {}
        return super().run(make, part, folder)

    def between(self) -> None:
        self.states = None


class DropoutRecomputed(Dropout):
    """A recomputed block drops the same elements again."""

    def model(self) -> Any:
        class Recomputed(Stack):
            def body(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return x

        return Recomputed(Dropping)


class Fails(RuntimeError):
    pass


class ErrorInForward(Numbers):
    """After an error in forward that all ranks met, training goes on as if that batch had never been."""

    family = "the loop"
    fails = True

    def before(self, model: Any, rank: int, step: int) -> None:
        def fail(*_: Any) -> None:
            raise Fails

        hook = model.blocks[1].register_forward_pre_hook(fail)
        try:
            self.loss(model, rank, step + 30)
        except Fails:
            pass
        finally:
            hook.remove()


class ErrorInBackward(Numbers):
    """After an error in backward that all ranks met, zero_grad() makes up for it: training goes on."""

    family = "the loop"
    fails = True

    def before(self, model: Any, rank: int, step: int) -> None:
        def fail(grad: Tensor) -> None:
            raise Fails

        hook = model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        try:
            self.loss(model, rank, step + 30).backward()
        except Fails:
            pass
        finally:
            hook.remove()
        model.zero_grad()


class ErrorWhileAccumulating(Numbers):
    """An error in a micro-batch that is accumulated leaves nothing behind: the next step is reduced."""

    family = "the loop"
    needs = frozenset({"accumulate"})

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank = dist.get_rank()
        with in_float64():
            expected, losses = alone(self, dist.get_world_size())
            adapter = make()
            adapter.wrap(build(self), self.units, self.optimizer)
            try:
                with adapter.accumulate():
                    adapter.backward(self.loss(adapter.model, rank, 40))
                    raise Fails
            except Fails:
                adapter.model.zero_grad()
                adapter.recover()
            own = train(adapter, self)
            state = adapter.full_state()
        return compare(expected, [row[rank] for row in losses], state, own, adapter.tolerance)


class Evaluation(Case):
    """A loss in eval mode, without gradients, is that of the full model."""

    family = "the loop"
    source = Numbers.source

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        case, rank = Numbers(), dist.get_rank()
        with in_float64():
            expected, _ = alone(case, dist.get_world_size())
            plain = case.model()
            plain.load_state_dict(expected)
            adapter = make()
            adapter.wrap(build(case), case.units, case.optimizer)
            train(adapter, case)
            adapter.model.eval()
            with torch.no_grad():
                got, want = case.loss(adapter.model, rank, 9).item(), case.loss(plain.eval(), rank, 9).item()
        if not abs(got - want) < adapter.tolerance:
            raise Broken(f"rank {rank}: the loss is {got:.9g}, {want:.9g} in one process")
        return f"{got:.4f}"


class NotANumber(Numbers):
    """A NaN in one rank's gradients is in every rank's parameters after the step, not in its own alone."""

    family = "the loop"
    least = 2

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank = dist.get_rank()
        adapter = make()
        adapter.wrap(build(self), self.units, lambda model: optim.SGD(model.parameters(), lr=0.1))
        loss = self.loss(adapter.model, rank, 0)
        adapter.backward(loss * torch.nan if rank == dist.get_world_size() - 1 else loss)
        adapter.step()
        fine = [name for name, value in adapter.full_state().items() if not value.isnan().all() and "emb" not in name]
        if fine:
            raise Broken(f"rank {rank}: {len(fine)} parameters have kept numbers, {fine[0]} among them")
        return "everywhere"


# -- who decides, and for whom ----------------------------------------------------------------------------------------


class FirstRankDecides(Numbers):
    """Ranks that were seeded differently begin with the first rank's parameters and buffers."""

    family = "the loop"
    needs = frozenset({"broadcast"})
    source = "torch.nn.parallel.DistributedDataParallel: parameters are broadcast from rank 0 when it is made"
    least = 2

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        class Counted(Stack):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.randn(3))

        torch.manual_seed(0)
        expected = Counted().state_dict()
        torch.manual_seed(dist.get_rank())
        adapter = make()
        adapter.wrap(Counted(), self.units, self.optimizer)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for name, value in adapter.full_state().items():
            if not torch.equal(value, expected[name]):
                raise Broken(f"rank {rank} of {ranks}: {name} is not the first rank's")
        return "all from rank 0"


class OfAGroup(Numbers):
    """Groups of ranks that train models of their own do not meet."""

    family = "the loop"
    needs = frozenset({"group"})
    least = 2
    first = 0  # number of the first batch

    def loss(self, model: Any, rank: int, step: int) -> Tensor:
        return super().loss(model, rank, self.first + step)

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        ranks, half = dist.get_world_size(), (dist.get_world_size() + 1) // 2
        members = [[*range(0, half)], [*range(half, ranks)]]
        groups = [dist.new_group(some) for some in members]
        mine = int(dist.get_rank() >= half)
        case = type(self)()
        case.first = 50 * mine
        with in_float64():
            expected, losses = alone(case, len(members[mine]))
            adapter = make()
            adapter.wrap(build(case), case.units, case.optimizer, group=groups[mine])
            own = train(adapter, case, group=groups[mine])
            state = adapter.full_state()
        place = dist.get_rank(groups[mine])
        return compare(expected, [row[place] for row in losses], state, own, adapter.tolerance)


class Hybrid(Numbers):
    """With hybrid sharding, the numbers are those of one process over all ranks, replicas too."""

    family = "the loop"
    needs = frozenset({"mesh"})
    source = "Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2.2"
    least = 4

    def asked(self) -> dict[str, Any]:
        return {"mesh": (2, dist.get_world_size() // 2)}


class HybridAccumulation(Hybrid):
    """With hybrid sharding, micro-batches that were not reduced at once are in the sum on every replica."""

    needs = frozenset({"mesh", "accumulate"})
    micro = 3


# -- state ------------------------------------------------------------------------------------------------------------


class StateDict(Numbers):
    """The full state dict has the names, shapes, dtypes and values of the model before it was sharded."""

    family = "the loop"
    needs = frozenset({"full_state"})

    def model(self) -> Any:
        model: Any = Stack()
        model.head.weight = model.emb.weight
        model.register_buffer("kept", torch.arange(3))
        model.register_buffer("thrown", torch.arange(3), persistent=False)
        return model

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        expected = build(self).state_dict()
        adapter = make()
        adapter.wrap(build(self), self.units, self.optimizer)
        state = adapter.full_state()
        if state.keys() != expected.keys():
            raise Broken(f"other names: {sorted(state.keys() ^ expected.keys())[:4]}")
        for name, value in expected.items():
            got = state[name]
            if (got.shape, got.dtype) != (value.shape, value.dtype) or not torch.equal(got, value):
                raise Broken(f"{name}: {tuple(got.shape)}, {got.dtype}; it was {tuple(value.shape)}, {value.dtype}")
        return f"{len(state)} names"


class Resumed(Numbers):
    """Saved after two steps and loaded by as many ranks, training goes on as if it had not stopped."""

    family = "the loop"
    needs = frozenset({"save"})
    steps = 4
    more = 0  # ranks of the second part, beside those of the first

    def sizes(self, ranks: int) -> list[int]:
        return [ranks, max(1, ranks + self.more)]

    def another(self) -> Any:
        """The model that loads."""
        return build(self)

    def alone(self, ranks: list[int]) -> tuple[dict[str, Tensor], list[list[float]]]:
        """One process, whose batches are those of other numbers of ranks from the third step on."""
        model = build(self)
        optimizer, losses = self.optimizer(model), []
        for step in range(self.steps):
            batches = [self.loss(model, rank, step) for rank in range(ranks[step // 2])]
            losses.append([loss.item() for loss in batches])
            model.zero_grad()
            torch.stack(batches).mean().backward()
            optimizer.step()
        return model.state_dict(), losses

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        rank = dist.get_rank()
        with in_float64():
            adapter = make()
            adapter.wrap(self.another() if part else build(self), self.units, self.optimizer)
            if part == 0:
                train(adapter, self, range(2))
                adapter.save(folder)
                (folder / f"was {dist.get_world_size()}").touch()
                return ""
            adapter.load(folder)
            before = int(next(folder.glob("was *")).name.split()[1])
            expected, losses = self.alone([before, dist.get_world_size()])
            own = train(adapter, self, range(2, 4))
            state = adapter.full_state()
        return compare(expected, [row[rank] for row in losses[2:]], state, own, adapter.tolerance)


class ResumedByMore(Resumed):
    """Saved by some ranks and loaded by one more, training goes on with the same parameters and optimizer state."""

    more = 1


class ResumedByFewer(Resumed):
    """Saved by some ranks and loaded by one fewer, training goes on with the same parameters and optimizer state."""

    more = -1
    least = 2


class ResumedGroups(ResumedByMore):
    """Resharding keeps each parameter group's own settings, and momentum with its parameter."""

    def optimizer(self, model: Any) -> optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if "norm" in name], "momentum": 0.5},
            {"params": [p for name, p in named if "norm" not in name], "lr": 0.1},
        ]
        return optim.SGD(groups, lr=0.2, momentum=0.9)


class ResumedFrozen(Resumed):
    """Frozen parameters are in the checkpoint, too: a model that was initialised otherwise gets them."""

    family = "the loop"

    def model(self) -> Any:
        model: Any = Stack()
        model.blocks[1].requires_grad_(False)
        model.emb.requires_grad_(False)
        return model

    def another(self) -> Any:
        torch.manual_seed(1)
        return self.model()


class StateKeepsItsDtype(ResumedByMore):
    """Optimizer state in another dtype than its parameter keeps it when it is resharded."""

    def optimizer(self, model: Any) -> optim.Optimizer:
        return Half(model.parameters(), lr=0.1)

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        adapter = make()
        adapter.wrap(build(self), self.units, self.optimizer)
        if part == 0:
            train(adapter, self, range(2))
            adapter.save(folder)
            return ""
        adapter.load(folder)
        kinds = {value["kept"].dtype for value in adapter.optimizer.state.values()}
        if kinds != {torch.bfloat16}:
            raise Broken(f"the state was torch.bfloat16, and is {', '.join(map(str, kinds)) or 'gone'}")
        return "bf16"


class Half(optim.Optimizer):
    """Momentum kept in bfloat16."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["kept"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["kept"].mul_(0.9).add_(p.grad.to(torch.bfloat16))
                    p.add_(state["kept"].to(p.dtype), alpha=-group["lr"])
