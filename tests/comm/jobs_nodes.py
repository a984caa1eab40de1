"""What torchrun starts on each host for test_nodes.py: `python jobs_nodes.py WHAT FOLDER GROUP_TIMEOUT ...`.

life: every stage for three steps, if that was not done before; then stage 2, saved every four steps, from where it was.
links: two ranks on each host; what passes through the link in a step, with shards over all four and inside each host.
Then stage 3 in a group with that timeout, until a host stops.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from reference import batch, build
from torch import nn

import zerolab
from zerolab.measure import ledger

SENT = Path("/sys/class/net/eth/statistics/tx_bytes")  # of the network namespace that the process is in


def step(zero: zerolab.Engine, optimizer: torch.optim.Optimizer, number: int) -> None:
    zero.model(*batch(zero.rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def keep(zero: zerolab.Engine, path: Path) -> None:
    state = zero.full_state_dict()
    if zero.rank == 0:
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def life(folder: Path, steps: int, pause: float) -> None:
    checkpoint = folder / "checkpoint"
    again = checkpoint.exists()
    for stage in () if again else range(4):
        zero, optimizer = build(stage)
        for number in range(3):
            step(zero, optimizer, number)
        keep(zero, folder / f"stage{stage}.pt")
    zero, optimizer = build(2)
    begin = zerolab.load(checkpoint, zero, optimizer)["step"] if again else 0
    for number in range(begin, steps):
        step(zero, optimizer, number)
        if (number + 1) % 4 == 0:
            zerolab.save(checkpoint, zero, optimizer, step=number + 1)
        if zero.rank == 0:
            (folder / "progress").write_text(f"{begin} {number + 1}")
        time.sleep(pause)
    keep(zero, folder / "end.pt")


def links(folder: Path, timeout: float) -> None:
    """For stages 1 to 3, with and without a mesh: bytes that leave this host in a step, and what the ledger says."""
    seen = {}
    for stage in (1, 2, 3):
        zero, optimizer = build(stage, mesh=(2, 2))
        for number in range(3):
            step(zero, optimizer, number)
        keep(zero, folder / f"mesh{stage}.pt")
        for mesh in (None, (2, 2)):
            seen[f"{stage} {mesh}"] = measure(stage, mesh)
    rank = torch.distributed.get_rank()
    (folder / f"links{rank}.json").write_text(json.dumps(seen))
    zero, optimizer = build(3, group=torch.distributed.new_group(timeout=timedelta(seconds=timeout)))
    for number in range(1000):
        step(zero, optimizer, number)
        if rank == 0:
            (folder / "progress").write_text(f"0 {number + 1}")
        time.sleep(0.1)


def measure(stage: int, mesh: tuple[int, int] | None) -> dict[str, float]:
    """Per step, as the difference of six steps and two: whatever else is in both (barriers, the ledger) cancels."""
    torch.manual_seed(0)
    zero = zerolab.shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), stage, units=[nn.Linear], mesh=mesh)
    optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.0)
    x = torch.ones(1, 512)

    def steps(count: int) -> tuple[int, int]:
        """Bytes sent through the interface, and between hosts by the ledger of this rank."""
        zero.comm.exchange(0, "barrier")
        before = int(SENT.read_text())
        zero.comm.exchange(0, "barrier")  # no rank begins before all have looked
        with ledger(zero) as book:
            for _ in range(count):
                zero.model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            zero.model(x)  # waits for gathers that are under way
        zero.comm.exchange(0, "barrier")
        between = book.totals("link").get("between")
        return int(SENT.read_text()) - before, between.sent if between else 0

    steps(2)  # connections, buffers, the order of gathers
    few, many = (min(steps(count) for _ in range(3)) for count in (2, 6))  # TCP's retransmissions only add
    psi = sum(unit.layout.size for unit in zero.units)
    return {"psi": psi, "link": (many[0] - few[0]) / 4, "ledger": (many[1] - few[1]) / 4}


def main(what: str, folder: str, timeout: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    if what == "links":
        zerolab.init(60.0)
        links(Path(folder), float(timeout))
    else:
        zerolab.init(float(timeout))
        life(Path(folder), int(numbers[0]), float(numbers[1]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
