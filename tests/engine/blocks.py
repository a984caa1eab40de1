"""An Adam that keeps its averages in 8 bits, with one scale for each block of elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

import zerolab

SIZE = 8


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) -> codes (n,) of int8, and scales (blocks,)."""
    blocks = pad(values, (0, -len(values) % SIZE)).view(-1, SIZE)
    scales = blocks.abs().amax(1) / 127
    codes = (blocks / scales.clamp_min(1e-30)[:, None]).round()
    return codes.flatten()[: len(values)].to(torch.int8), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales.repeat_interleave(SIZE)[: len(codes)]


class Adam8(Optimizer):
    """`flat`: codes are (p.numel(),), else in the shape of p. `skip`: what has no elements gets no state."""

    def __init__(self, params: Any, lr: float = 0.02, flat: bool = False, skip: bool = False) -> None:
        super().__init__(params, {"lr": lr, "flat": flat, "skip": skip})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or (group["skip"] and not p.numel()):
                    continue
                grad, state = p.grad.flatten(), self.state[p]
                m = root = torch.zeros_like(grad)
                if state:
                    m, root = (dequantised(state[key].flatten(), state[f"{key}_scale"]) for key in ("m", "root"))
                state["t"] = state.get("t", 0) + 1
                m = 0.9 * m + 0.1 * grad
                root = (0.99 * root**2 + 0.01 * grad**2).sqrt()
                step = m / (1 - 0.9 ** state["t"]) / (root / (1 - 0.99 ** state["t"]) ** 0.5 + 1e-8)
                p -= group["lr"] * step.clamp(-1, 1).view_as(p)
                for key, values in (("m", m), ("root", root)):
                    codes, state[f"{key}_scale"] = quantised(values)
                    state[key] = codes if group["flat"] else codes.view_as(p)


zerolab.declare_blockwise(Adam8, SIZE, per_block=["m_scale", "root_scale"])
