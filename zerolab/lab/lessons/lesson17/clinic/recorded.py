"""Patients in bare processes, of which nothing is left but the dumps of torch's own flight recorder.

The live ranks see which calls do not fit before torch makes them, and would say so. These patients run with torch
alone. Their dumps are JSON: the files that torch writes on a timeout are pickles, and a pickle may run anything when it
is read. On gloo (torch 2.13) the recorder notes every call but leaves out who is in a group, and torch's analyzer ends
with a KeyError. So each rank adds its groups to its dump.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.tasks.data import batch, text
from zerolab.tasks.models import GPT
from zerolab.world.processes import Ranks

Dump = dict[str, Any]


def dumps_of(patient: Patient) -> list[Dump]:
    """Run a patient in four fresh processes until each waits in its last call. Returns the ranks' dumps."""
    with Ranks(4, threads=1, forked=True) as pool:
        for seconds in (2.0, 20.0, 200.0):  # a machine that stands still may cut off a healthy call too: once more
            dumps: list[Dump] = pool.run(_dump_after, patient.examine, seconds)
            if all(len(dump["entries"]) == patient.recorded for dump in dumps):
                return dumps
    found = [len(dump["entries"]) for dump in dumps]
    raise RuntimeError(
        f"patient {patient.number} should leave {patient.recorded} calls on every rank, not {found}; "
        f"torch keeps none if TORCH_FR_BUFFER_SIZE is 0"
    )


def _dump_after(broken: Callable[[int, int], Any], seconds: float) -> Dump:
    """On a rank: the recorder's dump after `broken`, in whose groups a call gives up after `seconds`."""
    global _patience
    _patience = timedelta(seconds=seconds)
    before = len(_recorded()["entries"])
    with suppress(RuntimeError, dist.DistError):  # the timeout
        broken(dist.get_rank(), dist.get_world_size())
    dump = _recorded()
    dump["entries"] = dump["entries"][before:]
    groups = c10d._world.pg_group_ranks
    dump["pg_config"] = {
        group.group_name: {"name": group.group_name, "desc": group.group_desc, "ranks": str(sorted(groups[group]))}
        for group in groups
    }
    return dump


def _recorded() -> Dump:
    said = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return {"entries": [], **json.loads(said)}


def analysis(dumps: list[Dump]) -> str:
    """What torch's own analyzer, `torchfrtrace`, says of these dumps; each culprit on a line of its own."""
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    log, said = logging.getLogger("Flight Recorder"), io.StringIO()
    others, log.handlers = log.handlers, [logging.StreamHandler(said)]
    try:
        from torch.distributed.flight_recorder.components.builder import build_db

        details = {f"rank {rank}": {"rank": rank, **dump} for rank, dump in enumerate(dumps)}
        said.truncate(said.seek(0))  # on import it said that an optional package is missing
        build_db(details, JobConfig().parse_args([]), str(dumps[0]["version"]))
    finally:
        log.handlers = others
    lines = (line for line in said.getvalue().splitlines() if line.strip() and "stack trace" not in line)
    return "\n".join(lines).replace(", Culprit", "\n           Culprit")


_patience = timedelta(seconds=2)

# -- 7 ---------------------------------------------------------------------------------------------------------------


def logged_steps(
    model: GPT, sgd: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], group: dist.ProcessGroup
) -> None:
    for step, (x, y) in enumerate(batches):
        loss = model(x, y)
        loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        flat = torch.nn.utils.parameters_to_vector(grads)
        dist.all_reduce(flat, group=group)
        torch.nn.utils.vector_to_parameters(flat / group.size(), grads)
        sgd.step()
        sgd.zero_grad()
        if step % 10 == 1 and group.rank() == 0:  # for the log
            dist.reduce(loss.detach(), 0, group=group)
            print(f"step {step}: loss {loss.item() / group.size():.3f}")


def _logged(rank: int, world_size: int) -> None:
    group, words = dist.new_group(timeout=_patience, group_desc="data"), text()
    torch.manual_seed(0)
    model = GPT(layers=1, width=32)
    batches = (batch(words, rank, step, 4, 32) for step in range(20))
    logged_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, group)


LOGGED = Patient(
    7,
    "It makes two steps and hangs. Nobody changed the training, only the log.",
    (logged_steps,),
    _logged,
    {
        "a": "Ranks 1 to 3 are at fault: the analyzer calls all three of them culprits, and acquits rank 0.",
        "b": "Rank 0 makes a call that nobody else makes: its reduce meets the other ranks' next all-reduce.",
        "c": "Rank 0 is a whole step behind the others: it has finished one all-reduce fewer than they have.",
        "d": "Rank 0 has another model than the others: it sends one number where they send all gradients.",
    },
    "b",
    "The analyzer takes the lowest rank for right and names whoever differs from it, so one rank that is wrong makes "
    "culprits of the rest. Count: one call of one kind against three of another. All four made the same two calls "
    "before, so nobody is behind. A collective under `if rank == 0` is the oldest of all hangs; logging, saving and "
    "evaluating are where it gets in. The print may be rank 0's alone, the reduce may not.",
    recorded=3,
)

# -- 8 ---------------------------------------------------------------------------------------------------------------


def norms(squares: dict[str, Tensor], groups: dict[str, dist.ProcessGroup], names: Iterable[str]) -> dict[str, Tensor]:
    for name in names:
        dist.all_reduce(squares[name], group=groups[name])
    return {name: square.sqrt() for name, square in squares.items()}


def _crossed(rank: int, world_size: int) -> None:
    names = ["dense", "experts"]
    groups = {name: dist.new_group(timeout=_patience, group_desc=name) for name in names}
    for group in groups.values():
        dist.all_reduce(torch.ones(1000), group=group)
    if rank == 1:  # as list({"dense", "experts"}) may be: a set of strings has another order in each process
        names = names[::-1]
    norms({name: torch.ones(1) for name in names}, groups, names)


CROSSED = Patient(
    8,
    "It hangs in the gradient norm, in most starts. In the others it runs for weeks.",
    (norms, _crossed),
    _crossed,
    {
        "a": "Rank 1 died after two calls: it is missing from a group in which all of the rest wait for it.",
        "b": "Ranks 0, 2 and 3 have left the loop: all three are missing from the call that rank 1 is in.",
        "c": "Ranks visit the groups in two orders: each side waits in one for those who are in the other.",
        "d": "The two groups have different members: rank 1 belongs to the second, and not to the first one.",
    },
    "c",
    "Two reports that cross: in one group rank 1 is missing, in the other everyone but rank 1. Nobody is late, dead or "
    "done; each waits where the others will come next. Calls in different groups need the same order on all ranks too. "
    "Sets of strings are where the order is lost: Python seeds their hash anew in each process, so a restart may help. "
    "Sort what you iterate over.",
    recorded=3,
)

PATIENTS = (LOGGED, CROSSED)
