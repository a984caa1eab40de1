"""Patients that cannot have run: listings that circulate, and end with an error in their first lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerolab.lab.lessons.lesson17.clinic.patient import Patient


def _last_line(listing: Callable[[int], Any]) -> Callable[[int, int], None]:
    """Runs a listing and prints what a traceback ends with."""

    def examine(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        try:
            listing(rank)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("the listing ran")

    return examine


def wrap(rank: int) -> nn.Module:
    model = nn.Linear(8, 2)
    return DistributedDataParallel(model, device_ids=[0, 1, 2, 3])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.layer(x)
        if y is not None:
            return F.cross_entropy(logits, y)


def loss_of_nothing(rank: int) -> None:
    model = Net()
    loss = model(torch.ones(4, 8))
    loss.backward()


LIST = Patient(
    10,
    "A listing for a node of four GPUs fails in the line that wraps its model, on every rank.",
    (wrap,),
    _last_line(wrap),
    {
        "a": "torch sees fewer GPUs on this node than the list names: the driver or a setting hides some.",
        "b": "The process group has not been initialised: torch knows of one process, and of one device.",
        "c": "The listing hands each process the whole node: a rank is meant to drive one GPU and no more.",
        "d": "The model is not on a GPU yet: it has to be moved to its devices before it can be wrapped.",
    },
    "c",
    "One process drives one GPU. DistributedDataParallel has taken a single device for years; a list of all of "
    "them is left over from DataParallel, which had one process for all GPUs. device_ids=[local_rank], or "
    "nothing.",
)
NOTHING = Patient(
    11,
    "A listing's first step fails, in the line with backward().",
    (Net, loss_of_nothing),
    _last_line(loss_of_nothing),
    {
        "a": "The model gave no loss back: it got no labels, or a way through forward() has no return.",
        "b": "The graph is gone: a backward() ran through it before, and freed it for lack of an order.",
        "c": "The graph was never built: no parameter of the model requires a gradient, so there is none.",
        "d": "The loss is not a finite number: some step before overflowed, and NaN has no gradient.",
    },
    "a",
    "A function that ends without `return` returns None. Models that take labels return a loss only if they get "
    "them. The error comes one line later than its cause, in the first line that uses the None.",
)

PATIENTS = (LIST, NOTHING)
