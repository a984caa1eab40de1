"""What two runs of a block have to share in order to compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Moment:
    """The random numbers and the autocast of `device` at the moment when this is made.

    moment = Moment("cpu")
    y = block(x)
    ...
    with moment.again():
        y = block(x)            # draws the same, in the same dtypes

    Afterwards both are as they were before `again()`. Random numbers are the CPU's.
    """

    def __init__(self, device: str) -> None:
        self.device, self.random = device, torch.get_rng_state()
        self.autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]), torch.autocast(self.device, *self.autocast):
            torch.set_rng_state(self.random)
            yield
