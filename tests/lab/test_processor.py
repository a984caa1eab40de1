"""The emulated processor of lesson 09."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from zerolab.lab import GPT, Processor


def test_a_step_takes_as_long_as_its_flop_at_that_speed():
    torch.manual_seed(0)
    model, x = GPT(layers=2, width=32, context=16), torch.randint(0, 256, (2, 16))
    with FlopCounterMode(display=False) as counter:
        expected = model(x, x)
        expected.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    flop = counter.get_total_flops()
    processor = Processor(model, flop / 0.2)
    begin = time.perf_counter()
    loss = model(x, x)
    in_forward = time.perf_counter() - begin
    loss.backward()
    assert time.perf_counter() - begin >= 0.2 and in_forward >= 0.2 / 3
    assert torch.equal(loss, expected)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), grads, strict=True))
    assert all(start <= end for start, end in processor.late)


def test_it_says_when_the_machine_is_slower():
    model, x = GPT(layers=1, width=32, context=16), torch.randint(0, 256, (2, 16))
    processor = Processor(model, 1e18)
    model(x, x).backward()
    assert len(processor.late) == 10  # five linear layers, forward and backward
    assert all(start < end for start, end in processor.late)
    ends = [end for _, end in processor.late]
    assert ends == sorted(ends)
