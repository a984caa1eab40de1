"""The way between a device and its host: copies in both directions, counted.

    link = HostLink()
    master = link.to_host(shard)       # a new tensor in the host's memory
    link.to_device(shard, master)      # into a tensor of the device's
    link.down, link.up                 # bytes

Without a GPU, device and host are one memory. The copies are made all the same, and so the bytes are real; only these
books say on which side a tensor is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.engine.bucket import on_host


class HostLink:
    """`down`, `up`: bytes copied to the host and to the device."""

    def __init__(self) -> None:
        self.down = self.up = 0

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in the host's memory, with its shape and dtype."""
        self.down += tensor.nbytes
        return on_host(tensor.detach())

    def to_device(self, out: Tensor, tensor: Tensor) -> None:
        """Copy `tensor`, which is on the host, into `out`, which is on the device. What travels has its dtype."""
        self.up += tensor.nbytes
        with torch.no_grad():
            out.copy_(tensor)
