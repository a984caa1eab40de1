"""Evidence for lesson 19: what a run of each stage holds, sends and learns, and what its messages carry.

run = evidence(3, group=pair)             one run of stage 3 on two ranks
with envelopes(zero) as sent: ...         every message that this rank sends meanwhile, with what is in it
states = states_in_plain_torch(...)       what could be in it, from training without an engine
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab import Unit
from zerolab.lab.held import fingerprint
from zerolab.measure import ledger, model_states
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import Block, small_gpt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evidence:
    """One run, on one rank.

    stage: 0 (DDP) to 3. ranks: how many took part. dtype: "float32" or "bfloat16", of forward and backward.
    parameters: Ψ. held: bytes of model states when backward returns. sent: bytes in one step.
    digits: a fingerprint of all parameters after the last step, the same for the same bits.
    """

    stage: int
    ranks: int
    dtype: str
    parameters: int
    held: int
    sent: int
    digits: str


@dataclass(frozen=True)
class Envelope:
    """One message. what: "reduce_scatter", "all_gather" or "all_reduce". unit: its name. payload: what this rank gave,
    a flat copy: a whole unit (N * S,), or in an all-gather this rank's shard (S,). sent: its bytes, as in a ring."""

    what: str
    unit: str
    payload: Tensor
    sent: int


def evidence(
    stage: int | type[zerolab.Engine],
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    make: Callable[[], nn.Module] = small_gpt,
    inputs: Callable[[int, int], tuple[Tensor, ...]] | None = None,
    units: tuple[type[nn.Module], ...] = (Block,),
) -> Evidence:
    """Train two steps with Adam in `stage` (or an engine's class), on the ranks of `group` (default: all).

    make: the model. inputs: (rank, step) -> its arguments, by default text. The second step is the one measured.
    """
    words = text() if inputs is None else None
    cls = zerolab.STAGES[stage] if isinstance(stage, int) else stage
    model = make()
    psi = sum(param.numel() for param in model.parameters())
    precision = None if dtype == torch.float32 else zerolab.Precision(dtype)
    zero = cls(model, units=units, precision=precision, group=group)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        given = inputs(zero.rank, step) if inputs else batch(words, zero.rank, step, 2, 32)  # type: ignore[arg-type]
        adam.zero_grad()
        with ledger(zero) as book:
            loss = model(*given)
            (loss if loss.dim() == 0 else loss.square().mean()).backward()
            held = sum(model_states(zero, adam).values())
            adam.step()
    with zero.full_parameters():
        digits = fingerprint((param.detach().float() for param in model.parameters()), 8)
    name = str(dtype).removeprefix("torch.")
    return Evidence(cls.stage, zero.world_size, name, psi, held, book.moved, digits)


@contextmanager
def envelopes(zero: zerolab.Engine) -> Iterator[list[Envelope]]:
    """Open every message of parameters or gradients that this rank sends inside the block."""
    comm: Any = zero.comm
    opened: list[Envelope] = []

    def watch(what: str, times: float) -> Callable[..., Any]:
        send = getattr(comm, what)

        def watched(*args: Any) -> Any:
            tensor, unit = args[-2], args[-1]
            others = comm.world_size - 1
            shard = tensor.nbytes if what == "all_gather" else tensor.nbytes // comm.world_size
            opened.append(Envelope(what, unit, tensor.detach().clone().flatten(), round(times * shard * others)))
            return send(*args)

        return watched

    for what, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        setattr(comm, what, watch(what, times))
    try:
        yield opened
    finally:
        for what in ("reduce_scatter", "all_gather", "all_reduce"):
            delattr(comm, what)


def states_in_plain_torch(
    make: Callable[[], nn.Module], inputs: Callable[[int, int], tuple[Tensor, ...]], steps: int
) -> dict[str, dict[str, Tensor]]:
    """Train `steps` steps without an engine, each on the mean over all ranks' batches, and keep all states of the last.

    make: the model, which returns its loss. inputs: (rank, step) -> its arguments. Returns {state: {parameter's name:
    tensor}}: parameters and Adam's averages before the last step ("old") and after it ("new"), this rank's gradient.
    """
    model = make()
    states: dict[str, dict[str, Tensor]] = {}
    names, params = zip(*model.named_parameters(), strict=True)
    adam = torch.optim.AdamW(params, lr=1e-3)
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "parameters": lambda param: param,
        "average": lambda param: adam.state[param]["exp_avg"],
        "average of squares": lambda param: adam.state[param]["exp_avg_sq"],
    }

    def note(when: str) -> None:
        for kind, of in kinds.items():
            values = [of(param).detach().clone() for param in params]
            states[f"{when} {kind}"] = dict(zip(names, values, strict=True))

    for step in range(steps):
        if step == steps - 1:
            note("old")
        losses = [model(*inputs(rank, step)) for rank in range(dist.get_world_size())]
        grads = [torch.autograd.grad(loss, params) for loss in losses]
        for param, *of_ranks in zip(params, *grads, strict=True):
            param.grad = sum(of_ranks) / dist.get_world_size()
        adam.step()
    states["own gradient"] = dict(zip(names, grads[dist.get_rank()], strict=True))
    note("new")
    return states


KINDS = ("parameters", "gradients", "optimizer", "unknown")
_KIND_OF = {"gradient": "gradients", "average": "optimizer", "squares": "optimizer"}


def by_kind(messages: Iterable[tuple[list[str], int]]) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state and unknown. messages: (names of the states, bytes) of each."""
    total = dict.fromkeys(KINDS, 0)
    for names, sent in messages:
        last = names[0].split()[-1] if names else "unknown"  # as in "own gradient"
        total[_KIND_OF.get(last, last)] += sent
    return total


def in_the_messages(bytes_of: Mapping[int, Mapping[str, int]]) -> tuple[Figure, str]:
    """A bar for each stage, by what its messages contain. bytes_of: stage -> what `by_kind` returned."""
    from zerolab.lab.plots import stacks

    names = dict(zip(range(4), ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"), strict=True))
    bars = {names[stage]: {kind: of[kind] / 1e6 for kind in KINDS[:3]} for stage, of in bytes_of.items()}
    title = "What is in the messages of a step"
    subtitle = "MB that rank 0 of 4 sends, by content: compared with plain PyTorch's states"
    figure, _ = stacks(bars, title, subtitle, "MB")
    shares = {names[stage]: of["parameters"] / sum(of.values()) for stage, of in bytes_of.items()}
    said = f"Parameters: {', '.join(f'{100 * share:.0f} % in {name}' for name, share in shares.items())}."
    rest = "All the rest is gradients: no stage sends optimizer state."
    if any(of["optimizer"] or of["unknown"] for of in bytes_of.values()):
        rest = "Not all the rest is gradients."
    return figure, f"{said} {rest}"


def torch_has(name: str) -> bool:
    """Whether the installed torch has `name`, such as "torch.optim.AdamW". It imports nothing but torch."""
    if name.split(".")[0] != "torch":
        raise ValueError(f"{name!r} is no name in torch")
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


def laid_out(unit: Unit, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensors of a unit's parameters, by name, in one flat tensor (N * S,), as the unit keeps them; gaps are 0."""
    flat = torch.zeros(unit.layout.size, dtype=next(iter(tensors.values())).dtype)
    for view, name in zip(unit.layout.views(flat), unit.names, strict=True):
        view.copy_(tensors[name].detach())
    return flat
