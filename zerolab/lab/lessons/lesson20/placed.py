"""Parameters as DTensors, each behind a parametrization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization


def place(
    model: nn.Module, made: Callable[[], nn.Module], mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Module:
    """The same model. Each parameter rests on `mesh` with these placements; what is read is made(...) of it."""
    for module in [*model.modules()]:
        for name, param in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
            register_parametrization(module, name, made())
    return model
