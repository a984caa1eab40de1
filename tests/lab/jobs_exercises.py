"""Functions that test_exercises.py runs on ranks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import zerolab
from zerolab.lab.exercises import battery, judge
from zerolab.lab.exercises import learner as exercises


def losses(cls: type[zerolab.Engine]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    zero = cls(model, units=[nn.Linear])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(zero.rank)
    found = []
    for _ in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_with_both(decisions: dict[str, tuple[str, bool]]) -> tuple[list[float], list[float], str]:
    """Losses with the learner's class, losses with the package's, and the file of the learner's class."""
    exercises.hear(decisions, [])
    ours = exercises.mine(zerolab.DDP)
    return losses(ours), losses(zerolab.DDP), ours.reduce.__code__.co_filename


def train_zero3(decisions: dict[str, tuple[str, bool]]) -> tuple[list[float], list[float], list[str]]:
    """Losses with both halves of the learner's ZeRO-3, those with the package's, and the learner's files."""
    exercises.hear(decisions, [])
    ours = exercises.mine(zerolab.Zero3)
    methods = [ours.optimizer_params, ours.post_forward, ours.pre_backward, ours.post_backward, ours.after_step]
    return losses(ours), losses(zerolab.Zero3), [Path(method.__code__.co_filename).name for method in methods]


def train_a_stub(source: str) -> None:
    losses(judge.load(source, "ex_03_3.py", "ex_03_3").MyDDP)


def process_groups() -> int:
    """One for each process group of this rank, by the name that the system shows. It forgets what references did."""
    found = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended since
            found += (thread / "comm").read_text().startswith("gloo_tcp")
    battery._kept.clear()
    return found
