"""Mixed precision: which dtype the optimizer, the computation and the reduction see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ALLOWED = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


class Dtypes(NamedTuple):
    """The dtypes of one unit."""

    master: torch.dtype  # what the optimizer updates
    compute: torch.dtype  # what forward and backward see
    reduce: torch.dtype  # what travels when gradients are averaged


@dataclass(frozen=True)
class Precision:
    """Compute in one dtype, keep the weights in another (arXiv 1910.02054, section 3.1: 2 + 2 + 12 bytes).

    compute: dtype of parameters and activations in forward and backward; None: the parameters' own.
    reduce: dtype in which gradients travel and wait for the step; None: `compute`. Contributions are
        summed in float32 and rounded once (NCCL sums in this dtype, and rounds at each addition);
        gradients of later micro-batches are added in float32.
    master: dtype of the weights that the optimizer updates. Frozen parameters keep their own.
    cast_inputs: whether floating point inputs of the model are cast to `compute`, in tuples, lists, dictionaries and
        dataclasses too, of which the model then gets copies. Other objects come as they are.

    Buffers keep their dtype, and so do the parameters of batch norms. float16 needs a `LossScaler` and wider masters:
    near 1 its smallest step is 0.001, and most updates are smaller.
    """

    compute: torch.dtype | None = torch.bfloat16
    reduce: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("compute", "reduce", "master"):
            dtype = getattr(self, field)
            if dtype is not None and dtype not in ALLOWED:
                names = ", ".join(str(d) for d in ALLOWED)
                raise ValueError(f"Precision({field}={dtype}): not a supported dtype; use one of {names}, or None")
        if self.master == torch.float16:
            raise ValueError("Precision(master=torch.float16): small updates would be lost; use float32 or wider")

    def dtypes(self, own: torch.dtype, trainable: bool) -> Dtypes:
        """The dtypes of a unit whose parameters came as `own`."""
        if not own.is_floating_point:
            return Dtypes(own, own, own)
        compute = self.compute or own
        master = (self.master or own) if trainable else own
        return Dtypes(master, compute, self.reduce or compute)


KEEP = Precision(compute=None, master=None, cast_inputs=False)  # everything in the parameters' own dtype
