"""Patients rebuilt from fixes of 2026: what was broken in two libraries, in a few lines, on four ranks."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.held import fingerprint
from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT


def _mean_of_gradients(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grads


# -- 9 ---------------------------------------------------------------------------------------------------------------


def start_alike(model: nn.Module, within_node: dist.ProcessGroup, between_nodes: dist.ProcessGroup) -> None:
    for group in (within_node, between_nodes):
        share(model, group)


def share(model: Any, group: dist.ProcessGroup) -> None:
    for buffer in model.buffers():
        if not hasattr(buffer, "shared"):  # a block and the model that it is in have the same buffer: once will do
            buffer.shared = True
            dist.broadcast(buffer, group=group, group_src=0)
    for param in model.parameters():
        dist.broadcast(param.data, group=group, group_src=0)


class _Waves(nn.Module):
    """Positions as waves of different lengths, in a buffer: nothing in it is learnt."""

    table: Tensor

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.arange(context)[:, None] / 1000 ** (torch.arange(width // 2) / (width // 2))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions]


def _gpt(rank: int) -> GPT:
    """On rank 0 the model; on the others one of the same shape, without values."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=32)
    model.position = _Waves(64, 32)  # type: ignore[assignment]
    if rank > 0:
        model.to("meta").to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.zero_()  # memory that nobody wrote to: here it is zeros on every machine
    return model


def _two_nodes(rank: int, world_size: int) -> None:
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, words = _gpt(rank), text()
    start_alike(model, within[rank // 2], between[rank % 2])
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    print(f"before:                             parameters {fingerprint(model.parameters())}")
    for step in range(2):
        x, y = batch(words, 0, step, 8, 64)
        loss = model(x, y)
        loss.backward()
        grads = fingerprint(_mean_of_gradients(model))
        sgd.step()
        sgd.zero_grad()
        weights = fingerprint(model.parameters())
        print(f"step {step}: batch {fingerprint([x, y])}  gradients {grads}  parameters {weights}  loss {loss:.4f}")
    for group in within + between:
        dist.destroy_process_group(group)


BUFFERS = Patient(
    9,
    "A run on two nodes (ranks 0 and 1, ranks 2 and 3) does not repeat the run on one. For the examination, all four "
    "ranks got the same batches; the loss is each rank's own.",
    (start_alike, share),
    _two_nodes,
    {
        "a": "A buffer did not reach the second node: two ranks compute with what their memory held.",
        "b": "The second node reads other data: its loader was seeded otherwise than that of the first.",
        "c": "Each node takes the mean of its own gradients: there are two models, and they drift apart.",
        "d": "The second node began with other weights: its updates are right, and its model is not.",
    },
    "a",
    "All ranks have the same batch and the same parameters, bit for bit, and two of them compute another loss. So "
    "something differs that is no parameter. It is a buffer, here of the positions. In the first round rank 2, which "
    "had nothing yet, sent its buffer to rank 3, and both marked it as done. The second round, between nodes, mended "
    "the parameters and left out what was marked. Fingerprint all that a forward reads, not only what is learnt. "
    "Mended: first between the nodes, then within them, with the marks taken off in between.",
    source='pytorch/pytorch#178569, March 2026: "Fix HSDP sync_module_states broadcast order for buffers"\n'
    "https://github.com/pytorch/pytorch/pull/178569",
)

# -- 10 --------------------------------------------------------------------------------------------------------------


def save(path: Path, model: nn.Module, adam: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "adam": adam.state_dict(), "step": step, "random": torch.get_rng_state()}
    if dist.get_rank() == 0:  # replicas: the others hold the same
        torch.save(state, path)
    dist.barrier()


def load(path: Path, model: nn.Module, adam: torch.optim.Optimizer) -> int:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    torch.set_rng_state(state["random"])
    return state["step"]


class _Dropping(GPT):
    """A GPT with dropout after each block. It counts what was dropped."""

    dropped = 0

    def __init__(self) -> None:
        super().__init__(layers=1, width=32)
        for block in self.blocks:
            block.register_forward_hook(self._drop)

    def _drop(self, block: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept = nn.functional.dropout(output, 0.1, self.training)
        self.dropped = int((kept == 0).sum())
        return kept


def _resumed(rank: int, world_size: int) -> None:
    words, place = text(), [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(place)
    path = Path(place[0]) / "checkpoint.pt"

    def begin() -> tuple[_Dropping, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = _Dropping()
        torch.manual_seed(1 + rank)  # every rank drops something else
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step_of(model: _Dropping, adam: torch.optim.Optimizer, step: int) -> str:
        x, y = batch(words, rank, step, 8, 32)
        state = fingerprint(moment for one in adam.state.values() for moment in (one["exp_avg"], one["exp_avg_sq"]))
        said = f"batch {fingerprint([x, y])}  parameters {fingerprint(model.parameters())}  Adam's state {state}"
        with torch.no_grad():
            evaluated = model.eval()(x, y)
        loss = model.train()(x, y)
        adam.zero_grad()
        loss.backward()
        _mean_of_gradients(model)
        adam.step()
        return f"{said}  loss {evaluated:.4f}, with dropout {loss:.4f} ({model.dropped} dropped)"

    model, adam = begin()
    for step in range(2):
        step_of(model, adam, step)
    save(path, model, adam, 2)
    print("went on:", step_of(model, adam, 2))
    model, adam = begin()
    print("resumed:", step_of(model, adam, load(path, model, adam)))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0])


RANDOM = Patient(
    10,
    "A run that was resumed from its checkpoint does not repeat the run that was never stopped. Here is the first step "
    "after the checkpoint, in both.",
    (save, load),
    _resumed,
    {
        "a": "The loader begins anew: after the checkpoint the ranks learn from the first batches again.",
        "b": "Adam's state is not restored: its averages begin with zeros, and its first steps are too long.",
        "c": "No random state is restored: every rank begins again with the numbers of its own seed.",
        "d": "All ranks go on with rank 0's random state: it was taken for something that they share.",
    },
    "d",
    "Rank 0 repeats its step to the last digit, so a random state was restored. The others have their batch, the "
    "parameters, Adam's state, and the loss without dropout. Only what dropout draws is not theirs: all drop as many "
    "elements as rank 0. One copy is enough of what is the same on all ranks. Random states differ, and so do places "
    "in the data: each rank needs its own. (The pull request counts 252 of 256 ranks that had another rank's.)",
    source='NVIDIA/Megatron-LM#6858, August 2026: "fix: restore each rank\'s own RNG state on checkpoint load"\n'
    "https://github.com/NVIDIA/Megatron-LM/pull/6858",
)

PATIENTS = (BUFFERS, RANDOM)
