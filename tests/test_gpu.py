"""What only a CUDA device can show. `make gpu` runs these; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_invariants import BF16, Block, Model, batch, train_alone

import zerolab
from zerolab.lab.models import GPT
from zerolab.lab.models import Block as GPTBlock
from zerolab.measure import model_states, timeline

pytestmark = pytest.mark.gpu


def train_on_cuda(stage: int, precision, steps: int):
    device = torch.device("cuda", 0 if dist.get_backend() == "gloo" else torch.cuda.current_device())
    torch.manual_seed(7)
    zero = zerolab.shard(Model().to(device), stage, units=[Block], precision=precision)
    optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2)
    for number in range(steps):
        loss = zero.model(*(tensor.to(device) for tensor in batch(zero.rank, number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict(), zero.comm.backend


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_one_rank_with_nccl_equals_one_process(ranks, precision):
    expected, _ = ranks.run(train_alone, 1, precision, 4, ranks=1)[0]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision is None else {"rtol": 2e-2, "atol": 1e-2}
    for stage in range(4):
        state, backend = ranks.run(train_on_cuda, stage, precision, 4, ranks=1)[0]
        assert backend == "nccl"
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **tolerance)


def test_all_gpus_with_nccl_equal_one_process(ranks):
    n = min(4, torch.cuda.device_count())
    if n < 2:
        pytest.skip("needs two GPUs")
    expected, _ = ranks.run(train_alone, n, None, 4, ranks=1)[0]
    for stage in range(4):
        for state, backend in ranks.run(train_on_cuda, stage, None, 4, ranks=n):
            assert backend == "nccl"
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def timeline_and_allocator(stage: int, precision):
    """The peak of one step by the timeline, and by the allocator, of the same step."""
    device = torch.device("cuda", 0 if dist.get_backend() == "gloo" else torch.cuda.current_device())
    torch.manual_seed(7)
    zero = zerolab.shard(GPT(layers=4, width=512, heads=8).to(device), stage, units=[GPTBlock], precision=precision)
    optimizer = torch.optim.AdamW(zero.model.parameters())
    tokens = torch.randint(0, 256, (16, 64), device=device)

    def step() -> None:
        zero.model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with timeline(zero, optimizer) as line:
        step()
    torch.cuda.synchronize()
    return line.peak, torch.cuda.memory_stats()["active_bytes.all.peak"]


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_the_timeline_agrees_with_the_cuda_allocator(ranks, precision):
    for stage in range(4):
        seen, active = ranks.run(timeline_and_allocator, stage, precision, ranks=1)[0]
        assert abs(seen - active) <= 0.05 * active, f"stage {stage}"


def offloaded(stage: int, offload: str | None):
    """Parameters after four steps, the device's memory when backward has returned, and what is on the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(7)
    zero = zerolab.shard(GPT(layers=4, width=512, heads=8).to(device), stage, units=[GPTBlock], offload=offload)
    optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 64), device=device, generator=torch.Generator(device).manual_seed(0))
    for _ in range(4):
        loss = zero.model(tokens, tokens)
        loss.backward()
        del loss
        held = torch.cuda.memory_allocated(device)
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    host = {param.device.type for param in zero.model.parameters()}
    return zero.full_state_dict(), held, model_states(zero, optimizer, on="host"), host


def test_offload_moves_the_optimizer_to_the_host(ranks):
    psi = sum(p.numel() for p in GPT(layers=4, width=512, heads=8).parameters())
    for stage in (1, 2, 3):
        (plain, held, nothing, _), (state, less, host, where) = (
            ranks.run(offloaded, stage, offload, ranks=1)[0] for offload in (None, "optimizer")
        )
        assert where == {"cpu"} and not any(nothing.values())
        assert host["optimizer"] >= 8 * psi and host["parameters"] >= 4 * psi
        # At N = 1, fp32: without it 16 bytes per parameter, with it the 4 that forward needs.
        assert 0.9 * 12 * psi <= held - less <= 1.1 * 12 * psi, (stage, held, less)
        for name, value in plain.items():  # AdamW in other kernels
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)
