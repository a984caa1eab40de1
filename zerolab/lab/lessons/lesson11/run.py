"""The run that lesson 11 stops and goes on with: a small GPT on real text in stage 3, and the same under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves

import zerolab
from zerolab import Zero3
from zerolab.tasks.data import Split
from zerolab.tasks.models import GPT, Block

Train = Callable[..., list[float]]  # (zero, adam, steps, batch=24)


def small_run(group: Any = None, lr: float = 3e-3) -> tuple[Zero3, AdamW]:
    """The same at its start on every rank and for every group of ranks."""
    torch.manual_seed(0)
    zero = Zero3(GPT(layers=2, width=64), units=[Block], group=group)
    return zero, AdamW(zero.model.parameters(), lr=lr)


def one_step(zero: Zero3, adam: AdamW, data: Split, numbers: Tensor) -> float:
    """A step on the samples `numbers` of `data`, of which each rank takes its part. The loss is that of all ranks."""
    mine = numbers.chunk(zero.world_size)[zero.rank]
    loss = zero.model(data.inputs[mine].long(), data.targets[mine].long())
    adam.zero_grad()
    loss.backward()
    adam.step()
    return _mean(zero, loss.detach().clone())


@torch.no_grad()
def loss_held_back(zero: Zero3, data: Split) -> float:
    """The mean loss on 48 samples from all of the text that was held back."""
    some = torch.arange(48) * (len(data.validation_inputs) // 48)
    mine = some.chunk(zero.world_size)[zero.rank]
    return _mean(zero, zero.model(data.validation_inputs[mine].long(), data.validation_targets[mine].long()))


def _mean(zero: Zero3, loss: Tensor) -> float:
    dist.all_reduce(loss, group=zero.comm.group)
    return loss.item() / zero.world_size


def all_weights(zero: Zero3) -> Tensor:
    """All parameters, end to end: (Ψ,)."""
    with zero.full_parameters():
        return torch.cat([param.detach().flatten() for param in zero.model.parameters()])


def ten_steps(train: Train, zero: Zero3, adam: AdamW, step: int) -> tuple[list[float], float, Tensor]:
    """The losses of ten steps from `step` on; how many learning rates the median element moved in the first; and the
    parameters after the last. train(zero, adam, steps) gives losses.
    """
    start = all_weights(zero)
    losses = train(zero, adam, range(step, step + 1))
    moved = (all_weights(zero) - start).abs() / adam.param_groups[0]["lr"]
    losses += train(zero, adam, range(step + 1, step + 10))
    return losses, moved.median().item(), all_weights(zero)


def dealt(ranks: int, ranks_later: int, samples: int = 6_000, batch: int = 24) -> Tensor:
    """The samples of 80 steps, if each rank shuffles those that it is dealt: rank r of N has r, r + N, r + 2N, …

    After step 40 there are `ranks_later`. For one rank this is the global sample index.
    """
    seen = []
    for step in range(80):
        size = ranks if step < 40 else ranks_later
        for rank in range(size):
            own = torch.arange(rank, samples, size)
            own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(rank))]
            seen.append(own.split(batch // size)[step])
    return torch.cat(seen)


def fsdp_run(mesh: DeviceMesh, data: Split | None = None, numbers: Tensor | None = None) -> tuple[GPT, AdamW]:
    """The same model under FSDP2; with `data`, after a step on the samples `numbers`."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=64)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    adam = AdamW(model.parameters(), lr=3e-3)
    if data is not None and numbers is not None:
        mine = numbers.chunk(mesh.size())[mesh.get_local_rank()]
        model(data.inputs[mine].long(), data.targets[mine].long()).backward()
        adam.step()
    return model, adam


def two_ranks_train(
    train: Train, pair: dist.ProcessGroup | None, data: Split, folder: str
) -> Callable[..., tuple[int, float] | None]:
    """The ranks of `pair` train 12 steps of 12 samples, and save them in `folder`. All ranks call this.

    Returns nodes(group, batch, lr), by which the ranks of `group` go on from there with the next 144 samples, `batch`
    in a step: how many steps that makes, and the loss on text that was held back. It is None on the other ranks.
    """
    if dist.get_rank(pair) >= 0:
        run = small_run(pair, lr=1e-3)
        train(*run, range(12), 12)
        zerolab.save(folder, *run, next_sample=12 * 12)
    dist.barrier()

    def nodes(group: dist.ProcessGroup | None, batch: int, lr: float = 1e-3) -> tuple[int, float] | None:
        if dist.get_rank(group) < 0:
            return None
        zero, adam = small_run(group)
        first = zerolab.load(folder, zero, adam)["next_sample"]
        adam.param_groups[0]["lr"] = lr
        steps = range(first // batch, (first + 144) // batch)
        train(zero, adam, steps, batch)
        return len(steps), loss_held_back(zero, data)

    return nodes


def my_state(model: nn.Module, adam: AdamW) -> dict[str, Any]:
    """What this rank has of both, as DCP takes it."""
    return dict(zip(("model", "adam"), state_dict.get_state_dict(model, adam), strict=True))


def dcp_load_on(ranks: list[int], folder: str) -> list[Tensor] | None:
    """A fresh model and its AdamW under FSDP2, loaded by `ranks` from a checkpoint of DCP: their state, in full.

    All ranks call this. It is None on the others.
    """
    mesh = DeviceMesh("cpu", ranks)
    found: list[Tensor] | None = None
    if dist.get_rank() in ranks:
        model, adam = fsdp_run(mesh)
        state = my_state(model, adam)  # DCP fills what it is given
        dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
        state_dict.set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"])
        found = full_state(model, adam)
    dist.barrier()
    return found


def full_state(model: nn.Module, adam: AdamW) -> list[Tensor]:
    """Every tensor of the model's and of Adam's state, in full."""
    options = state_dict.StateDictOptions(full_state_dict=True)
    leaves = tree_leaves(state_dict.get_state_dict(model, adam, options=options))
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]
