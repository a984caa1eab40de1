"""Patients that cannot have run: listings that circulate, and end with an error in their first lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerolab.lab.clinic.patient import Patient


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


def optimizer_for_loss(rank: int) -> None:
    model = nn.Linear(8, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = optimizer(model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.long))
    loss.backward()


def class_from_an_article(rank: int) -> None:
    model = nn.Linear(8, 2)
    parallel: Any = torch.nn.parallel
    model = parallel.ZeroDataParallel(model)
    model(torch.ones(4, 8))


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
    "DistributedDataParallel is given the node's four GPUs, on every rank.",
    (wrap,),
    _last_line(wrap),
    {
        "a": "torch sees fewer than four GPUs",
        "b": "a rank drives one GPU: device_ids may name that one and no other",
        "c": "the process group has not been initialised",
        "d": "the model has to be moved to the GPUs first",
    },
    "b",
    "One process drives one GPU. DistributedDataParallel has taken a single device for years; a list of all of "
    "them is left over from DataParallel, which had one process for all GPUs. device_ids=[local_rank], or "
    "nothing.",
)
OPTIMIZER = Patient(
    11,
    "The first step fails.",
    (optimizer_for_loss,),
    _last_line(optimizer_for_loss),
    {
        "a": "the outputs and the targets have shapes that do not fit",
        "b": "optimizer.step() was forgotten",
        "c": "the optimizer was called where the loss function should have been",
        "d": "the optimizer has no parameters",
    },
    "c",
    "`loss = optimizer(output, target)` is in a listing that circulates. The message names the object that was"
    " called: an SGD. The listing has never run.",
)
CLASS = Patient(
    12,
    "The article says: ZeRO in one line. The line fails.",
    (class_from_an_article,),
    _last_line(class_from_an_article),
    {
        "a": "torch has no such class: nobody has run this line",
        "b": "torch is too old: an update brings it",
        "c": "the class exists for CUDA only",
        "d": "the import is missing: `from torch.nn import parallel` mends it",
    },
    "a",
    "Ask torch what it has before you believe a name: dir(torch.nn.parallel). ZeRO in torch is called "
    "ZeroRedundancyOptimizer (torch.distributed.optim) and fully_shard (torch.distributed.fsdp).",
)
NOTHING = Patient(
    13,
    "backward() fails.",
    (Net, loss_of_nothing),
    _last_line(loss_of_nothing),
    {
        "a": "backward() ran twice on one graph",
        "b": "no parameter requires a gradient",
        "c": "the loss is NaN",
        "d": "the model returned no loss: it got no labels, or a branch of forward() ends without `return`",
    },
    "d",
    "A function that ends without `return` returns None. Models that take labels return a loss only if they get "
    "them. The error comes one line later than its cause, in the first line that uses the None.",
)

PATIENTS = (LIST, OPTIMIZER, CLASS, NOTHING)
