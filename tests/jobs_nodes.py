"""What torchrun starts on each host for tests/test_nodes.py: `python jobs_nodes.py FOLDER GROUP_TIMEOUT STEPS PAUSE`.

Every stage for three steps, if that was not done before; then stage 2, saved every four steps, from where it was.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from test_invariants import batch, build

import zerolab


def step(zero: zerolab.Engine, optimizer: torch.optim.Optimizer, number: int) -> None:
    zero.model(*batch(zero.rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def keep(zero: zerolab.Engine, path: Path) -> None:
    state = zero.full_state_dict()
    if zero.rank == 0:
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def main(folder: Path, timeout: float, steps: int, pause: float) -> None:
    torch.set_num_threads(1)
    zerolab.init(timeout)
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
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
