"""What people write in training scripts, and what happens to it at every stage.

test_habits.py runs each habit on ranks and in one process and compares. `python tests/engine/habits.py` writes
docs/habits.md from this file.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zerolab

PAGE = Path(__file__).parents[2] / "docs" / "habits.md"
WIDTH = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


@dataclass
class Script:
    """A training script, on ranks with a sharded model (`zero`), or as one process that has all ranks' batches."""

    model: Model
    ranks: list[int]  # whose batches this process has
    zero: Any = None
    optimizer: Any = None
    steps: int = 0
    overflow_at: int = 0  # the step whose loss is infinite
    seen: list[Any] = field(default_factory=list)  # values to compare

    def shard(self, stage: int, **options: Any) -> None:
        self.zero = zerolab.shard(self.model, stage, units=[Block], **options)

    def loss(self, more: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        self.steps += 1
        batches = [batch(rank, self.steps) for rank in self.ranks]
        losses = [self.model(x).square().mean() + (more(x) if more else 0) for x in batches]
        loss = sum(losses) / len(losses)
        return loss * float("inf") if self.steps == self.overflow_at else loss

    def backward(self) -> None:
        self.loss().backward()

    def broadcast(self, value: Any) -> Any:
        """The first rank's `value`, as if every rank loaded the same file."""
        values = [value]
        if self.zero is not None:
            torch.distributed.broadcast_object_list(values)
        return values[0]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Habit:
    title: str
    run: Callable[[Script], None]
    before: Callable[[Script], None] | None  # what the script does before the model is sharded
    says: str  # what happens
    refused: str | None  # the words of the error that refuses it
    stages: tuple[int, ...]  # where it is refused
    instead: str
    ranks: int = 1  # with fewer there is nothing wrong


HABITS: list[Habit] = []


def habit(
    says: str,
    before: Callable[[Script], None] | None = None,
    refused: str | None = None,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    instead: str = "",
    ranks: int = 1,
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    def enter(run: Callable[[Script], None]) -> Callable[[Script], None]:
        title = (run.__doc__ or "").strip()
        HABITS.append(Habit(title, run, before, says, refused, stages, instead, ranks))
        return run

    return enter


# -- gradients -------------------------------------------------------------------------------------------------------


@habit("The norm is that of all ranks' slices, the same on every rank. `zero.clip_grad_norm_(0.1)` is quicker.")
def clip(script: Script) -> None:
    """Clip with torch's function"""
    for _ in range(2):
        script.backward()
        norm = clip_grad_norm_(script.model.parameters(), 0.1)
        script.seen.append(norm)
        script.step()


@habit("Right: a closure sees what the loop would see.")
def clip_in_closure(script: Script) -> None:
    """Clip in a closure"""

    def closure() -> Tensor:
        script.optimizer.zero_grad()
        loss = script.loss()
        loss.backward()
        script.seen.append(clip_grad_norm_(script.model.parameters(), 0.1))
        return loss

    for _ in range(2):
        script.optimizer.step(closure)


@habit("Right: hooks of the optimizer see what the loop would see before the step and after it.")
def clip_in_hook(script: Script) -> None:
    """Clip and log in hooks of the optimizer"""

    def before(optimizer: Any, *args: Any) -> None:
        clip_grad_norm_(script.model.parameters(), 0.1)

    def after(optimizer: Any, *args: Any) -> None:
        for p in script.model.parameters():
            script.seen.append(p.grad.norm() / p.detach().norm())
            script.seen.append(optimizer.state[p]["exp_avg"].norm())

    script.optimizer.register_step_pre_hook(before)
    script.optimizer.register_step_post_hook(after)
    for _ in range(2):
        script.backward()
        script.step()


@habit("Right, with any norm and with or without foreach.")
def clip_variants(script: Script) -> None:
    """Clip by another norm"""
    for norm_type, foreach in [(1.0, None), (3.0, True), (float("inf"), False)]:
        script.backward()
        norm = clip_grad_norm_(script.model.parameters(), 0.1, norm_type, error_if_nonfinite=True, foreach=foreach)
        script.seen.append(norm)
        script.step()


@habit("Right.")
def clip_apart(script: Script) -> None:
    """Clip a part of the model, or in two calls"""
    script.backward()
    script.seen.append(clip_grad_norm_(script.model.head.parameters(), 0.05))
    norm = get_total_norm([p.grad for p in script.model.parameters() if p.grad is not None])
    clip_grads_with_norm_(script.model.parameters(), 0.1, norm)
    script.seen.append(norm)
    script.step()


@habit("Right: it works element by element.")
def clip_values(script: Script) -> None:
    """Clip values"""
    script.backward()
    clip_grad_value_(script.model.parameters(), 0.01)
    script.step()


@habit("Right. Torch still finds the norm of all ranks.")
def scale_grads(script: Script) -> None:
    """Scale or replace gradients by hand, then clip"""
    script.backward()
    for p in script.model.parameters():
        p.grad = p.grad / 2
    script.seen.append(clip_grad_norm_(script.model.parameters(), 0.1))
    script.step()


def _overflow(script: Script) -> None:
    script.overflow_at = 2


@habit(
    "Right: all ranks skip the step if any rank's slice overflows. With `Precision(torch.float16)` gradients wait in "
    "float16, which torch's scaler refuses to unscale: use `zerolab.LossScaler(zero)`.",
    before=_overflow,
)
def grad_scaler(script: Script) -> None:
    """Scale the loss with torch's GradScaler"""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for _ in range(3):
        loss = script.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(script.optimizer)
        clip_grad_norm_(script.model.parameters(), 0.1)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
    script.seen.append(scaler.get_scale())


# -- hooks on parameters ---------------------------------------------------------------------------------------------


@habit(
    "It is called once in each backward, with the averaged gradient of what the parameter shows (in stages 1 to 3 this "
    "rank's slice), when everything is reduced. Under `no_sync()` it is not called."
)
def tensor_hook(script: Script) -> None:
    """Change a gradient in a hook"""
    handle = script.model.head.weight.register_hook(lambda grad: grad * 3)
    script.backward()
    script.step()
    handle.remove()
    script.backward()
    script.step()


def clamp_in_hook(script: Script) -> None:
    """Before sharding"""
    script.model.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@habit("The same.", before=clamp_in_hook)
def early_tensor_hook(script: Script) -> None:
    """A hook that was registered before sharding"""
    script.backward()
    script.step()


@habit("It runs when backward is over. The memory that this saves in one process it does not save here.")
def step_in_backward(script: Script) -> None:
    """Step inside of backward"""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in script.model.parameters()}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in script.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        script.backward()


@habit("Refused.", refused="hooks on it would never be called", instead="`p.register_post_accumulate_grad_hook(f)`")
def node_hook(script: Script) -> None:
    """A hook on autograd's node of a parameter"""
    torch.autograd.graph.register_multi_grad_hook(list(script.model.parameters()), print)


# -- more of what scripts do -------------------------------------------------------------------------------------------


@habit("Right. Each optimizer has its own units, and gradients that nobody used yet add up.")
def two_optimizers(script: Script) -> None:
    """Give parts of the model optimizers of their own, which step at different times"""
    model = script.model
    often = torch.optim.SGD([*model.first.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)
    rarely = torch.optim.AdamW(model.blocks.parameters(), lr=0.01)
    for number in range(4):
        script.backward()
        often.step()
        often.zero_grad()
        if number % 2:
            rarely.step()
            rarely.zero_grad()


@habit("Right.")
def later_group(script: Script) -> None:
    """Thaw a block, and add its parameters to the optimizer then"""
    block = script.model.blocks[0].requires_grad_(False)
    script.optimizer = torch.optim.Adam([p for p in script.model.parameters() if p.requires_grad], lr=0.05)
    for number in range(4):
        if number == 2:
            block.requires_grad_(True)
            script.optimizer.add_param_group({"params": block.parameters(), "lr": 0.002})
        script.backward()
        script.step()


@habit("Right: gradients of an input alone leave those of parameters as they are.")
def adversarial(script: Script) -> None:
    """Train on inputs that were moved against the model (FGSM)"""

    def against(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(script.model(x).square().mean(), x)
        return script.model((x + 0.1 * grad.sign()).detach()).square().mean()

    for _ in range(3):
        script.loss(against).backward()
        script.step()


@habit("Right.")
def functional(script: Script) -> None:
    """Call the model with its own parameters (functional_call)"""
    params = dict(script.model.named_parameters())

    def called(x: Tensor) -> Tensor:
        return torch.func.functional_call(script.model, params, (x,)).abs().mean()

    for _ in range(2):
        script.loss(called).backward()
        script.step()


@habit("Right, also where nothing but the feature gets a gradient.")
def feature(script: Script) -> None:
    """Train on a feature from inside of a block, which a hook keeps"""
    kept = []
    script.model.blocks[1].up.register_forward_hook(lambda module, args, output: kept.append(output))

    def of_feature(x: Tensor) -> Tensor:
        script.model(x)
        return kept.pop().square().mean()

    for _ in range(2):
        script.loss(of_feature).backward()
        script.step()


@habit("Right, with either kind of checkpoint.")
def checkpoint_all(script: Script) -> None:
    """Checkpoint a call of the whole model"""

    def again(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        by_torch = [torch.utils.checkpoint.checkpoint(script.model, x, use_reentrant=kind) for kind in (True, False)]
        return sum(out.abs().mean() for out in by_torch)

    for _ in range(2):
        script.loss(again).backward()
        script.step()


@habit("Right, with the same kind of checkpoint or without.")
def only_checkpoint(script: Script) -> None:
    """Checkpoint every call of the model, reentrantly"""
    for number in range(2):
        losses = []
        for rank in script.ranks:
            x = batch(rank, number).requires_grad_()
            losses.append(torch.utils.checkpoint.checkpoint(script.model, x, use_reentrant=True).square().mean())
        (sum(losses) / len(losses)).backward()
        script.step()


@habit("Right: copies of slices, and what an optimizer keeps for them, go back where they came from.")
def roll_back(script: Script) -> None:
    """Go back to weights and optimizer of a while ago"""
    script.backward()
    script.step()
    weights = {name: p.detach().clone() for name, p in script.model.named_parameters()}
    state = copy.deepcopy(script.optimizer.state_dict())
    script.backward()
    script.step()
    with torch.no_grad():
        for name, p in script.model.named_parameters():
            p.copy_(weights[name])
    script.optimizer.load_state_dict(state)
    script.backward()
    script.step()


@habit("Right: `t.to(p)` asks `p` for nothing but its dtype and device.")
def like_a_parameter(script: Script) -> None:
    """Bring a number to a parameter's dtype and device"""
    scale = torch.tensor(0.25)
    script.backward()
    for p in script.model.parameters():
        p.grad.mul_(scale.to(p)).mul_(scale.type_as(p))
    script.step()


@habit("Right: all ranks leave the batch out.")
def skip_errors(script: Script) -> None:
    """Leave a batch out after an error"""
    for number in range(4):
        try:
            script.backward()
            if number == 1:
                script.model(batch(0, 0)[:, :2])
        except RuntimeError:
            script.optimizer.zero_grad()
            continue
        script.step()


@habit("Right: hooks see and change what they would in one process.")
def module_hooks(script: Script) -> None:
    """Change outputs and gradients in hooks of modules"""
    script.model.blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    script.model.blocks[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    for _ in range(2):
        script.backward()
        script.step()


@habit(
    "Refused in stage 3, on every rank, wherever the others go.",
    refused="The ranks went different ways through the model",
    stages=(3,),
    instead="draw alike on all ranks, or let the blocks be one unit",
    ranks=2,
)
def layer_drop(script: Script) -> None:
    """Call blocks one by one, and let each rank leave out others"""
    model = script.model
    for number in range(3):
        losses = []
        for rank in script.ranks:
            x = model.first(batch(rank, number))
            for depth, block in enumerate(model.blocks):
                if (rank + depth + number) % 2:
                    x = block(x)
            losses.append(model.head(x).square().mean())
        (sum(losses) / len(losses)).backward()
        script.step()


@habit(
    "Refused, at the next forward, step or save.", refused="was replaced after sharding", instead="`p.data.mul_(0.9)`"
)
def assign_data(script: Script) -> None:
    """Assign to .data"""
    for p in script.model.parameters():
        p.data = p.data * 0.9
    script.zero.full_state_dict()


@habit(
    "Refused, at the step: nobody would average the gradient of `scale`.",
    refused="that is of no sharded model",
    instead="`zerolab.shard(nn.ModuleList([model, criterion]), stage)`, so that it is one of the model's",
)
def learnt_loss(script: Script) -> None:
    """Let an optimizer train parameters of a loss as well"""
    scale = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW([*script.model.parameters(), scale])
    (script.loss() * scale.exp()).backward()
    optimizer.step()


@habit(
    "Refused, at the line.", refused="that is no slice of anything", stages=(1, 2, 3), instead="`torch.ones_like(p)`"
)
def made_gradients(script: Script) -> None:
    """Make gradients by hand (evolution strategies)"""
    for p in script.model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    script.step()


# -- weights ---------------------------------------------------------------------------------------------------------


@habit("Seen at the next forward, in every precision.")
def clamp_weights(script: Script) -> None:
    """Write through .data"""
    for _ in range(2):
        script.backward()
        script.step()
        for p in script.model.parameters():
            p.data.clamp_(-0.2, 0.2)


@habit(
    "Right: averages are kept of what each rank shows, its slices, at 1/N of the memory. `zerolab.EMA(zero, 0.5)` does "
    "it in three lines (`update()`, `with average_parameters():`), and `zerolab.save(..., ema=ema)` keeps it."
)
def average_weights(script: Script) -> None:
    """Average weights, and evaluate with the averages"""
    params = list(script.model.parameters())
    averages = [p.detach().clone() for p in params]
    for _ in range(3):
        script.backward()
        script.step()
        torch._foreach_lerp_(averages, [p.detach() for p in params], 0.5)
    trained = [p.detach().clone() for p in params]
    for p, average in zip(params, averages, strict=True):
        p.data.copy_(average)
    with torch.no_grad():
        prediction = script.model(batch(0, 99))
    script.seen.append(prediction)
    for p, weight in zip(params, trained, strict=True):
        p.data.copy_(weight)


@habit("Seen at the next forward.")
def edit_without_grad(script: Script) -> None:
    """Edit weights in place"""
    with torch.no_grad():
        for p in script.model.parameters():
            p.mul_(0.5)
        nn.init.zeros_(script.model.head.weight)
    script.backward()
    script.step()


@habit("Right, in place or with `out=`: what comes back is the parameter, as in torch.")
def step_by_hand(script: Script) -> None:
    """Step without an optimizer"""
    for _ in range(3):
        script.backward()
        with torch.no_grad():
            for number, p in enumerate(script.model.parameters()):
                if number % 2:
                    p -= 0.1 * p.grad
                else:
                    torch.sub(p, 0.1 * p.grad, out=p)
                p.grad = None


@habit(
    "Refused, at the step that would use it.",
    refused="give every rank the same, or their parameters train differently",
    instead="`schedule.step(loss)` with the mean of all ranks' losses",
    ranks=2,
)
def rate_of_own_loss(script: Script) -> None:
    """Let a rate follow this rank's own loss"""
    for _ in range(3):
        loss = script.loss()
        loss.backward()
        script.step()
        for group in script.optimizer.param_groups:
            group["lr"] = 0.1 * loss.item()


_INSTEAD = "before sharding, or inside `with zero.full_parameters():`"


@habit("Refused, at the line.", refused="was to get random values after sharding", instead=_INSTEAD)
def init_weights(script: Script) -> None:
    """Initialise after sharding"""
    for module in script.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)


@habit("Refused, at the line.", refused="was to get random values after sharding", instead=_INSTEAD)
def init_data(script: Script) -> None:
    """Draw weights through .data"""
    script.model.head.weight.data.normal_(0, 0.02)


@habit("Refused, at the line.", refused="was to get random values after sharding", instead=_INSTEAD)
def reset_parameters(script: Script) -> None:
    """Reset a layer"""
    script.model.head.reset_parameters()


@habit(
    "Refused, at the next forward.",
    refused="was replaced after sharding",
    instead="`model.double()` before sharding, or `Precision`",
)
def convert(script: Script) -> None:
    """Convert the model after sharding"""
    script.model.float()
    script.model(batch(0, 0).float())


_MODEL = "do it before sharding"


@habit("Refused, at the next forward.", refused="was added or replaced after sharding", instead=_MODEL)
def replace_head(script: Script) -> None:
    """Replace a module after sharding"""
    script.model.head = nn.Linear(WIDTH, 10).double()
    script.model(batch(0, 0))


@habit("Refused, at the next forward.", refused="was added or replaced after sharding", instead=_MODEL)
def add_adapter(script: Script) -> None:
    """Add parameters after sharding"""
    script.model.blocks[0].adapter = nn.Linear(WIDTH, WIDTH).double()
    script.model(batch(0, 0))


@habit("Right, before sharding or after it. Full states and checkpoints have the names of the model without wrappers.")
def wrap_blocks(script: Script) -> None:
    """Wrap blocks with activation checkpointing"""
    apply_activation_checkpointing(script.model, check_fn=lambda module: isinstance(module, Block))
    for _ in range(2):
        script.backward()
        script.step()


@habit(
    "Refused, at the line.",
    refused="can be neither copied nor pickled",
    instead="copy before sharding, or load `zero.full_state_dict()` into a new model",
)
def copy_model(script: Script) -> None:
    """Copy the model"""
    copy.deepcopy(script.model)


@habit(
    "Refused, at the line.",
    refused="can be neither copied nor pickled",
    instead="`ema = zerolab.EMA(zero, decay)`, which has its numbers; `ema.update()` is `update_parameters(model)`",
)
def averaged_model(script: Script) -> None:
    """Average the model with torch's AveragedModel"""
    torch.optim.swa_utils.AveragedModel(script.model)


@habit(
    "Refused, at the line.",
    refused="leave DistributedDataParallel out",
    instead="nothing, since a sharded model averages its gradients",
)
def in_ddp(script: Script) -> None:
    """Wrap the model in torch's DDP"""
    nn.parallel.DistributedDataParallel(script.model)


@habit(
    "Refused, on every rank, when the next backward ends.",
    refused="The ranks are out of step",
    instead="all-reduce the condition first, or `zerolab.LossScaler`, whose ranks skip together",
    ranks=2,
)
def skip_on_one_rank(script: Script) -> None:
    """Skip a step for a reason that one rank has"""
    for number in range(2):
        loss = script.loss()
        loss.backward()
        if number == 0 and script.zero.rank == 0:
            script.optimizer.zero_grad()
            continue
        script.step()


@habit(
    "Refused, on every rank, at the next step.",
    refused="has only the slices of the rank that calls it",
    stages=(1, 2, 3),
    instead="`zerolab.save(path, zero, optimizer)` and `zerolab.load(path, zero, optimizer)`",
    ranks=2,
)
def save_optimizer(script: Script) -> None:
    """Load one rank's optimizer.state_dict() on every rank"""
    script.backward()
    script.step()
    saved = script.broadcast(script.optimizer.state_dict())
    script.optimizer.load_state_dict(saved)
    script.backward()
    script.step()


@habit(
    "Refused, at the next forward.",
    refused="require_backward_grad_sync = False is for torch",
    instead="`with zero.no_sync():` around forward and backward",
)
def grad_sync_flag(script: Script) -> None:
    """Accumulate with the flag of torch's DDP"""
    script.model.require_backward_grad_sync = False
    script.backward()


# -- what is computed from parameters and gradients --------------------------------------------------------------------


@habit("Right: `norm`, `mean`, `max` and their like are answered for the whole, alike on all ranks.")
def log_numbers(script: Script) -> None:
    """Log norms, means and extremes"""
    script.backward()
    for p in script.model.parameters():
        script.seen.append(p.detach().norm())
        script.seen.append(p.grad.abs().mean())
        script.seen.append((p.detach() * p.grad).sum())
        script.seen.append(p.data.max() - p.data.min())
        script.seen.append((p.grad > 0).sum() / p.numel())


@habit("Right: all ranks see what one of them has in its slice.")
def skip_nan(script: Script) -> None:
    """Leave a step out if a gradient is not finite"""
    script.overflow_at = 2
    for _ in range(3):
        script.backward()
        if all(p.grad.isfinite().all() for p in script.model.parameters()):
            script.optimizer.step()
        script.optimizer.zero_grad()


@habit("Right: each element has its own.")
def sgd_by_hand(script: Script) -> None:
    """Update by hand"""
    for _ in range(3):
        script.backward()
        with torch.no_grad():
            for p in script.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


@habit("Right: the average is a slice, as what it averages.")
def average(script: Script) -> None:
    """Average the weights (EMA), and train on from the average"""
    shadow = {name: p.detach().clone() for name, p in script.model.named_parameters()}
    for _ in range(3):
        script.backward()
        script.step()
        for name, p in script.model.named_parameters():
            shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    with torch.no_grad():
        for name, p in script.model.named_parameters():
            p.copy_(shadow[name])


@habit("Right: the copies are slices.")
def lookahead(script: Script) -> None:
    """Lookahead"""
    slow = [copy.deepcopy(p) for p in script.model.parameters()]
    for number in range(4):
        script.backward()
        script.step()
        if number % 2:
            with torch.no_grad():
                for old, p in zip(slow, script.model.parameters()):
                    old += 0.5 * (p - old)
                    p.copy_(old)


@habit("Right: the norm is that of all ranks.")
def sharpness_aware(script: Script) -> None:
    """Sharpness-aware minimisation (SAM)"""
    params = list(script.model.parameters())
    script.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        steps = [p.grad * (0.05 / norm) for p in params]
        torch._foreach_add_(params, steps)
    script.optimizer.zero_grad()
    script.backward()
    with torch.no_grad():
        torch._foreach_sub_(params, steps)
    script.step()


@habit("Right: both norms are those of the whole.")
def trust_ratio(script: Script) -> None:
    """Scale gradients by a trust ratio (LARC)"""
    script.backward()
    for p in script.model.parameters():
        ratio = 0.02 * p.detach().norm() / (p.grad.norm() + 1e-8)
        p.grad.mul_(ratio.clamp(max=1.0))
    script.step()


@habit("Right. The mask is a slice, too.")
def prune_by_size(script: Script) -> None:
    """Keep small weights at zero"""
    masks = {p: (p.detach().abs() > 0.1).to(p.dtype) for p in script.model.parameters()}
    for _ in range(2):
        script.backward()
        script.step()
        with torch.no_grad():
            for p, mask in masks.items():
                p.mul_(mask)


_WHOLE = (
    "the same with `zerolab.full_tensor` of `p` or `p.grad`, on all ranks, or inside `with zero.full_parameters():`"
)


@habit("Right: a rank that has none of a parameter takes part.")
def surgery(script: Script) -> None:
    """Project one task's gradients off the other's (PCGrad)"""
    script.backward()
    first = [p.grad.clone() for p in script.model.parameters()]
    script.optimizer.zero_grad()
    script.backward()
    for p, other in zip(script.model.parameters(), first):
        overlap = (p.grad * other).sum()
        if overlap < 0:
            p.grad -= overlap / other.square().sum() * other
        p.grad += other
    script.step()


@habit("Right: p.dim() and names are as before sharding.")
def groups(script: Script) -> None:
    """Decay matrices alone, and give each layer a rate of its own"""
    every = [
        {"params": [p], "lr": 0.05 * 0.9**depth, "weight_decay": 0.1 if p.dim() > 1 and "head" not in name else 0.0}
        for depth, (name, p) in enumerate(script.model.named_parameters())
    ]
    script.optimizer = torch.optim.AdamW(every)
    for _ in range(2):
        script.backward()
        script.step()


@habit("Right, on all ranks alike.")
def thaw(script: Script) -> None:
    """Freeze a block, and thaw it later"""
    script.model.blocks[0].requires_grad_(False)
    script.backward()
    script.step()
    script.model.blocks[0].requires_grad_(True)
    script.backward()
    script.step()


@habit("Right: the copies are slices, and so is the sum of squares.")
def anchored(script: Script) -> None:
    """Hold weights near where they were (L2-SP, EWC)"""
    start = {p: p.detach().clone() for p in script.model.parameters()}
    importance = {p: torch.zeros_like(p) for p in script.model.parameters()}
    for _ in range(3):
        script.backward()
        for p in script.model.parameters():
            importance[p] += p.grad.detach() ** 2
            p.grad += 0.1 * importance[p] * (p.detach() - start[p])
        script.step()
    script.seen.append(sum((p.detach() - start[p]).square().sum() for p in script.model.parameters()))


@habit("Right.")
def momentum(script: Script) -> None:
    """Keep momentum by hand, and step by its sign"""
    state: dict[Any, Any] = {}
    for _ in range(3):
        script.backward()
        with torch.no_grad():
            for p in script.model.parameters():
                mean = state.setdefault(p, torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.add_(mean.sign(), alpha=-0.01)
        script.optimizer.zero_grad()


@habit("Right: both norms are those of the whole.")
def update_ratio(script: Script) -> None:
    """Log how far a step went"""
    script.backward()
    before = [p.detach().clone() for p in script.model.parameters()]
    script.step()
    for p, old in zip(script.model.parameters(), before):
        script.seen.append((p.detach() - old).norm() / old.norm())


@habit("Right: what an optimizer keeps for a slice is a slice.")
def look_at_state(script: Script) -> None:
    """Log and damp what the optimizer keeps"""
    for _ in range(3):
        script.backward()
        script.step()
        for state in script.optimizer.state.values():
            script.seen.append((state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)).norm())
            state["exp_avg"].mul_(0.5)


@habit("Right.")
def forget_state(script: Script) -> None:
    """Begin again with an empty optimizer"""
    for _ in range(2):
        script.backward()
        script.step()
        script.optimizer.state.clear()


@habit("Right.")
def standardise(script: Script) -> None:
    """Standardise each weight by its mean and mean square"""
    for p in script.model.parameters():
        p.data.sub_(p.data.mean())
        p.data.div_(p.data.square().mean().sqrt() + 1e-6)
    script.backward()
    script.step()


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def median(script: Script) -> None:
    """Clip at a multiple of the median"""
    script.backward()
    for p in script.model.parameters():
        p.grad.clamp_(max=3 * p.grad.abs().median())


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def largest(script: Script) -> None:
    """Keep the largest tenth of a gradient"""
    script.backward()
    weight = script.model.blocks[0].up.weight
    weight.grad.mul_(weight.grad.abs() >= weight.grad.abs().flatten().topk(3).values.min())


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def cosine(script: Script) -> None:
    """Compare the directions of two gradients"""
    script.backward()
    for p in script.model.parameters():
        torch.cosine_similarity(p.grad.flatten(), p.detach().flatten(), dim=0)


@habit("Refused, at the line.", refused="goes over a dimension", stages=(1, 2, 3), instead=_WHOLE)
def centralise(script: Script) -> None:
    """Centralise gradients"""
    script.backward()
    for p in script.model.parameters():
        if p.grad.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


@habit("Refused, at the line.", refused="goes over a dimension", stages=(1, 2, 3), instead=_WHOLE)
def adaptive_clipping(script: Script) -> None:
    """Clip each row by its own norm"""
    script.backward()
    weight = script.model.head.weight
    limit = 0.01 * weight.detach().norm(dim=1, keepdim=True).clamp(min=1e-3)
    weight.grad.mul_((limit / weight.grad.norm(dim=1, keepdim=True)).clamp(max=1.0))


@habit("Refused, at the line.", refused="was to get random values", stages=(1, 2, 3), instead=_WHOLE)
def noise(script: Script) -> None:
    """Add noise to gradients"""
    script.backward()
    for p in script.model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


@habit(
    "Refused, at the line.", refused="that is no slice of anything", stages=(1, 2, 3), instead="`torch.zeros_like(p)`"
)
def make_by_shape(script: Script) -> None:
    """Make a tensor by the shape of a parameter"""
    script.backward()
    weight = script.model.first.weight
    momentum = torch.zeros(weight.shape, dtype=weight.dtype)
    momentum.add_(weight.grad)


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def one_row(script: Script) -> None:
    """Zero the gradient of one row"""
    script.backward()
    script.model.head.weight.grad[0] = 0.0


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def to_vector(script: Script) -> None:
    """Make one vector of all parameters"""
    nn.utils.parameters_to_vector(script.model.parameters())


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_WHOLE)
def singular_values(script: Script) -> None:
    """Look at singular values"""
    torch.linalg.svdvals(script.model.head.weight.detach())


@habit("Refused, at the line.", refused="hands out what is", stages=(1, 2, 3), instead=_WHOLE)
def histogram(script: Script) -> None:
    """Draw a histogram with numpy"""
    script.model.head.weight.detach().cpu().numpy()


@habit(
    "Refused, at the line.",
    refused="there is no way back to it",
    instead="`loss.backward()`, and `p.requires_grad_(False)` for what is to get no gradient",
)
def some_inputs(script: Script) -> None:
    """Name the parameters that get gradients"""
    script.loss().backward(inputs=list(script.model.parameters()))


@habit("Refused, at the line.", refused="there is no way back to it", instead="`loss.backward()`, then `p.grad`")
def gradients_by_themselves(script: Script) -> None:
    """Ask autograd for gradients"""
    torch.autograd.grad(script.loss(), list(script.model.parameters()))


@habit(
    "Refused, at the line: stage 3 has released parameters that the second backward needs.",
    refused="stage 3 has released them",
    stages=(3,),
    instead="the same with `zerolab.Zero2`",
)
def gradient_penalty(script: Script) -> None:
    """Penalise the gradient at the input"""

    def penalty(x: Tensor) -> Tensor:
        x.requires_grad_()
        (grad,) = torch.autograd.grad(script.model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    for _ in range(3):
        script.loss(penalty).backward()
        script.step()


_MEAN = "`loss.backward()` alone: `p.grad` is the average over the ranks, which start from the first rank's parameters"


@habit("Refused, at the line.", refused="would pair each rank's slice", stages=(1, 2, 3), instead=_MEAN)
def average_by_hand(script: Script) -> None:
    """Average gradients by hand"""
    script.backward()
    for p in script.model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    script.step()


@habit("Refused, at the line.", refused="would pair each rank's slice", stages=(1, 2, 3), instead=_MEAN)
def broadcast_by_hand(script: Script) -> None:
    """Send the first rank's parameters to all"""
    for p in script.model.parameters():
        dist.broadcast(p.data, 0)
    script.backward()
    script.step()


@habit("Refused, at the line.", refused="is not done element by element", stages=(1, 2, 3), instead=_MEAN)
def flat_by_hand(script: Script) -> None:
    """Average all gradients in one message"""
    script.backward()
    grads = [p.grad for p in script.model.parameters()]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(mean)
    script.step()


# -- the page --------------------------------------------------------------------------------------------------------


def code_of(run: Callable[[Script], None]) -> str:
    """The body of a habit, as a script has it."""
    source = textwrap.dedent(inspect.getsource(run))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    lines = source.splitlines()[tree.body[1].lineno - 1 :]
    code = textwrap.dedent("\n".join(line for line in lines if not re.search(r"script\.seen\.append\(\w+\)$", line)))
    code = re.sub(r"^( *)script\.step\(\)", r"\1optimizer.step()\n\1optimizer.zero_grad()", code, flags=re.MULTILINE)
    for written, read in {
        "script.backward()": "loss.backward()",
        "script.seen.append(": "print(",
        "script.loss()": "model(x).square().mean()",
        "script.broadcast(script.optimizer.state_dict())": 'torch.load("optimizer.pt")  # saved by rank 0',
        "script.loss(penalty)": "(model(x).square().mean() + penalty(x))",
        "script.loss(against)": "(model(x).square().mean() + against(x))",
        "script.loss(called)": "(model(x).square().mean() + called(x))",
        "script.loss(again)": "(model(x).square().mean() + again(x))",
        "script.": "",
        "batch(0, 99)": "x",
        "batch(0, 0)": "x",
    }.items():
        code = code.replace(written, read)
    code = re.sub(r"^(model = model|overflow_at = .*)\n", "", code, flags=re.MULTILINE)  # of the script alone
    if re.search("^def ", code, re.MULTILINE):  # as ruff formats a page
        code = re.sub(r"\n\n(?=\S)", "\n\n\n", code)
    return code


WHERE = {
    (0, 1, 2, 3): "",
    (1, 2, 3): " Stage 0 is right.",
    (3,): " Stages 0 to 2 are right.",
}


def page() -> str:
    lines = [
        "# Habits",
        "",
        "What people write in training scripts, and what happens with a model that zerolab has sharded. Each is a",
        "test, which compares every stage, on 1, 2 and 3 ranks, with one process that has all the data, or expects the",
        "error on every rank. `python tests/engine/habits.py` writes this page.",
        "",
        "## What works as in one process",
        "",
    ]
    for refused in (False, True):
        if refused:
            lines += ["## What is refused", ""]
        for entry in HABITS:
            if bool(entry.refused) is refused:
                code = code_of(entry.run)
                if entry.before is not None and not entry.before.__name__.startswith("_"):
                    code = f"{code_of(entry.before)}\nzero = zerolab.Zero3(model)  # or another stage\n{code}"
                lines += [f"### {entry.title}", "", "```python", *code.splitlines(), "```", ""]
                where = WHERE[entry.stages] if refused else ""
                instead = f" Instead: {entry.instead}." if entry.instead else ""
                lines += textwrap.wrap(entry.says + where + instead, 119) + [""]
    return "\n".join(lines + BLIND.strip().splitlines()) + "\n"


BLIND = """
## What zerolab cannot see

- The shape of a slice. `p.shape` and `len(p)` are those of this rank's slice, (k, 1, ...), since `p.dim()` must tell
  matrices from biases and optimizers build their state by it. `zerolab.full_shape(p)` is the whole's, and `p.numel()`
  counts the elements of the whole.
- Collectives that go past the functions of torch.distributed, as `group.allreduce([p.grad])` does: they mix slices of
  different places. Torch before 2.13 may show nobody what goes into a collective; with it, `dist.all_reduce` does so
  too. In objects (`dist.all_gather_object`) a slice travels as a plain tensor.
- What is done with `zerolab.to_local(t)`, with `t.data_ptr()` and with numpy's memory. `torch.tensor(p)` and
  `p.set_(...)` bypass subclasses in torch, so they are about this rank's slice too.
- In stage 0, edits that differ between ranks, of gradients too. In stages 1 to 3 every rank edits its own slices, and
  the numbers by which it does so between backward and the optimizer's step are compared at that step
  (`p.grad.div_(n)`, where n is this rank's own). Numbers in tensors are not.
- Writes through `.data` inside forward, where in stage 3 and with a `Precision` the model shows a copy that does not
  last (other writes there are refused).
- Hooks that forward itself registers on its parameters see this rank's own gradient, as with torch's DDP.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
