"""An emulated processor: the linear layers of a GPT take as long as on one of a given speed.

Four ranks on two cores take turns at computing; at sleeping they do not. So with a processor slower than the machine,
and the emulated link of `network.py`, a step takes as long as on four devices. Numbers, bytes and calls stay real.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from zerolab.tasks.models import GPT, Block


class Processor:
    """From now on `model` computes with `speed` FLOP per second: 2 for each weight and token in forward, 4 in backward.

    late: (start, end) of each time, by time.perf_counter, by which something was done later than there. Either this
        machine was slower, or it waited for another rank in the middle of a block. Clear it to begin again.
    """

    def __init__(self, model: GPT, speed: float) -> None:
        self.speed = speed
        self.late: list[tuple[float, float]] = []
        self._due = 0.0  # when what was computed so far is done, by time.perf_counter
        for block in model.blocks:
            assert isinstance(block, Block)
            attention, mlp = block.attention, block.mlp
            self._watch(block.norm1, [attention.qkv, attention.out, mlp.up, mlp.down])
        self._watch(model.norm, [model.head])

    def _watch(self, first: nn.Module, linears: list[nn.Linear]) -> None:
        """`linears`, in the order of forward: from `first` to the last of them nothing waits for another rank."""
        first.register_forward_pre_hook(self._begin)
        linears[-1].register_full_backward_pre_hook(self._begin)
        for linear in linears:
            linear.register_forward_hook(self._forward)
            linear.register_full_backward_pre_hook(self._backward)

    def _begin(self, *_: Any) -> None:
        self._due = time.perf_counter()

    def _forward(self, linear: Any, _: Any, output: Any) -> None:
        self._compute(2 * linear.in_features * output.numel())

    def _backward(self, linear: Any, grads: Any) -> None:
        self._compute(4 * linear.in_features * grads[0].numel())

    def _compute(self, flop: int) -> None:
        self._due += flop / self.speed
        now = time.perf_counter()
        if now < self._due:
            time.sleep(self._due - now)
        else:
            self.late.append((self._due, now))
            self._due = now
