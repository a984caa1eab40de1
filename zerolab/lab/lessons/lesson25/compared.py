"""What lesson 25 compares with one process: attention on a part of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zerolab.lab.lessons.lesson22.compared import relative_error


def attend_in_pieces(attend: Callable[..., Tensor], places: Tensor, group: Any) -> tuple[float, int]:
    """Attention on a rank's part of 64 tokens, in float64: its relative error, gradients included, and forward's FLOP.

    attend: of q, k and v, each (B, H, T / N, D), of `places` (T / N,) and `group`, what attention gives.
    """
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 4, 64, 16, generator=random, dtype=torch.float64).requires_grad_().unbind()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    want = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    mine = [tensor.detach()[:, :, places].requires_grad_() for tensor in (q, k, v)]
    with FlopCounterMode(display=False) as counter:
        got = attend(*mine, places, group)
    grads = torch.autograd.grad(got, mine, grad[:, :, places])
    return relative_error([got, *grads], [tensor[:, :, places] for tensor in want]), counter.get_total_flops()
