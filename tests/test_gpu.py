"""What only CUDA devices can show. `make gpu` runs these; elsewhere they are skipped.

NCCL wants a GPU for each rank: with one GPU a single rank, which still copies on NCCL's streams. Ranks that share a GPU
talk through gloo, each with an allocator of its own. From NCCL 2.30.3 they may talk through NCCL, too, which is tried
where the switch for it is on: NCCL_MULTI_RANK_GPU_ENABLE=1 make gpu

What waits, on the host and for the host, is tested without a GPU in engine/test_strict.py. Some functions from here are
dry-run on the CPU in engine/test_gpu_dry.py.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

# cuBLAS takes up to 32 MiB for each thread from the allocator that is measured here: let it be next to nothing, in the
# ranks as well, which begin with this environment.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
os.environ["CUBLASLT_WORKSPACE_SIZE"] = "128"

import pytest
import torch
import torch.distributed as dist
from reference import BF16, Block, Model, batch, train_alone
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerolab
from zerolab.engine.precision import KEEP
from zerolab.measure import model_states, state_bytes, timeline, trace
from zerolab.measure.spans import intersection, length, union
from zerolab.tasks.models import GPT
from zerolab.tasks.models import Block as GPTBlock

pytestmark = [pytest.mark.gpu]

# Other kernels round otherwise. Adam divides a gradient by its own size: where that is rounding alone, the difference
# would be as large as the step. With this eps it stays as small as the rounding.
EPS = 1e-2
STEPS = 4
PRECISIONS = {"fp32": None, "bf16": BF16, "fp16": zerolab.Precision(torch.float16)}
# In simulations on a CPU, rounding made 3e-7 in fp32 and 5e-4 in bf16, and a rank that is left out 5e-2.
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 2e-3}

ONE_GPU_EACH, SHARING, NCCL_SHARING = "a GPU each, NCCL", "one GPU, gloo", "one GPU, NCCL"
ON_CPU = "no GPU"  # a dry run


def place(how: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Where this rank computes, and the group in which it talks; None: the default group."""
    if how == ON_CPU:
        return torch.device("cpu"), None
    if how == ONE_GPU_EACH:
        assert dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()), None
    torch.cuda.set_device(0)
    return torch.device("cuda", 0), dist.new_group(backend="gloo" if how == SHARING else "nccl")


def ranks_for(how: str, n: int) -> int:
    """n, or as many as there are GPUs for; skips where that cannot be."""
    if how == NCCL_SHARING:
        version = torch.cuda.nccl.version()
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or version < (2, 30, 3):
            pytest.skip(f"needs NCCL 2.30.3 and NCCL_MULTI_RANK_GPU_ENABLE=1; here is {'.'.join(map(str, version))}")
    if how == ONE_GPU_EACH and n > 1:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        return min(n, torch.cuda.device_count())
    return n


EVERYWHERE = pytest.mark.parametrize(
    ("how", "n"),
    [
        (ONE_GPU_EACH, 1),
        (ONE_GPU_EACH, 4),
        (SHARING, 2),
        (SHARING, 3),
        (SHARING, 4),
        (NCCL_SHARING, 2),
        (NCCL_SHARING, 3),
    ],
)


# -- the same numbers -------------------------------------------------------------------------------------------------


def train(how: str, precision: str) -> list[tuple[dict[str, Tensor], str, float]]:
    """For each stage the parameters after STEPS steps, the backend, and the scale of the loss."""
    device, group = place(how)
    results = []
    for stage in range(4):
        torch.manual_seed(7)
        zero = zerolab.shard(Model().to(device), stage, units=[Block], precision=PRECISIONS[precision], group=group)
        optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2, eps=EPS)
        scaler = zerolab.LossScaler(zero, init_scale=2.0**10) if precision == "fp16" else None
        for number in range(STEPS):
            if scaler and number == 1:  # a step that all must skip, because the last rank's gradients overflow
                step(zero, optimizer, number, scaler, torch.inf if zero.rank == zero.world_size - 1 else 1.0)
            step(zero, optimizer, number, scaler)
        results.append((zero.full_state_dict(), zero.comm.backend, scaler.get_scale() if scaler else 0.0))
    return results


def step(
    zero: zerolab.Engine,
    optimizer: torch.optim.Optimizer,
    number: int,
    scaler: zerolab.LossScaler | None = None,
    factor: float = 1.0,
) -> None:
    loss = zero.model(*(tensor.to(zero.comm.device) for tensor in batch(zero.rank, number))) * factor
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


@EVERYWHERE
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_stage_equals_one_process(ranks, how, n, precision):
    n = ranks_for(how, n)
    expected, _ = ranks.run(train_alone, n, PRECISIONS[precision], STEPS, "cuda", EPS, ranks=1)[0]
    for results in ranks.run(train, how, precision, ranks=n, timeout=120):
        for stage, (state, backend, scale) in enumerate(results):
            assert backend == ("gloo" if how == SHARING else "nccl")
            assert scale == (2.0**9 if precision == "fp16" else 0.0)
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                told = f"stage {stage}, {name}"
                torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE[precision], msg=told)


# -- every way of use --------------------------------------------------------------------------------------------------


class Checkpointed(Model):
    """Blocks are computed again in backward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.emb(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(number % 2))
        return nn.functional.cross_entropy(self.head(self.ln(x)).flatten(0, 1), y.flatten())


def used(
    stage: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    model: type[Model] = Model,
    meta: bool = False,
    nan: bool = False,
    late: int | None = None,
    stream: bool = False,
    precision: str = "fp32",
    **mode: Any,
) -> list[Tensor]:
    """Steps with accumulation and clipping; what comes of them."""
    torch.manual_seed(7)
    options = {key: mode.pop(key) for key in ("offload", "mesh") if key in mode}
    made = model()
    state = made.state_dict() if dist.get_rank() == 0 else None
    if meta:
        with torch.device("meta"):
            made = model()
        options["init"] = lambda module: module.reset_parameters()
    else:
        made.to(device)
    with device if meta else nullcontext():
        zero = zerolab.shard(made, stage, units=[Block], group=group, precision=PRECISIONS[precision], **options)
    if meta:
        assert zero.comm.device.type == device.type
        zero.load_full_state_dict(state)
    for key, value in mode.items():
        setattr(zero, key, value)
    if late == zero.rank and device.type == "cuda":
        for block in zero.model.blocks:
            block.register_forward_pre_hook(lag)
            block.register_full_backward_pre_hook(lag)
    optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2, eps=EPS)
    scaler = zerolab.LossScaler(zero, init_scale=2.0**10, enabled=precision == "fp16")
    side = torch.cuda.Stream() if stream and device.type == "cuda" else None
    if side:
        side.wait_stream(torch.cuda.current_stream())
    torch.use_deterministic_algorithms(nan, warn_only=True)  # what torch.empty() gives is NaN
    try:
        with torch.cuda.stream(side) if side else nullcontext():
            for number in range(STEPS):
                with zero.no_sync():
                    scaler.scale(zero.model(*(t.to(device) for t in batch(zero.rank, 50 + number)))).backward()
                scaler.scale(zero.model(*(t.to(device) for t in batch(zero.rank, number)))).backward()
                scaler.unscale_(optimizer)
                zero.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    if side:
        torch.cuda.current_stream().wait_stream(side)
    return [*zero.full_state_dict().values(), torch.tensor(scaler.get_scale())]


def lag(*_: object) -> None:
    torch.cuda._sleep(5_000_000)  # clock ticks: milliseconds, in which the host is through with several blocks


def ways(how: str, meshes: bool, stages: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    device, group = place(how)
    modes: list[dict[str, Any]] = [{"overlap": False, "prefetch": False}, {"keep_grad_memory": True}]
    modes += [{"meta": True}, {"model": Checkpointed}, {"nan": True, "late": 0}, {"stream": True}]
    for stage in stages:
        expected = {p: used(stage, device, group, precision=p) for p in PRECISIONS}
        tried = [*modes, {"precision": "bf16", "late": 1}]
        if stage:
            tried += [{"precision": "fp16", "offload": "optimizer"}, {"offload": "optimizer", "nan": True, "late": 0}]
            tried += [{"mesh": (2, dist.get_world_size() // 2)}] * meshes
        for mode in tried:
            precision = mode.get("precision", "fp32")
            for value, got in zip(expected[precision], used(stage, device, group, **mode), strict=True):
                message = f"stage {stage}, {mode}"
                torch.testing.assert_close(got, value, rtol=0, atol=TOLERANCE[precision], msg=message)


@EVERYWHERE
def test_every_way_of_use(ranks, how, n):
    n = ranks_for(how, n)
    ranks.run(ways, how, how == ONE_GPU_EACH and n % 2 == 0, ranks=n, timeout=200)


def saved_and_loaded(how: str, folder: str, fused: bool) -> None:
    """With an optimizer whose state is on the device, and the device's own random numbers."""
    device, group = place(how)
    for stage in range(4):
        made = []
        for number in range(2):
            torch.manual_seed(7 + number)
            zero = zerolab.shard(Model().to(device), stage, units=[Block], group=group)
            optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2, fused=fused)
            if number == 0:
                step(zero, optimizer, 0)
                zerolab.save(folder, zero, optimizer)
            else:
                torch.rand(5, device=device)
                zerolab.load(folder, zero, optimizer)
            drawn = torch.rand(5, device=device).cpu()
            step(zero, optimizer, 1)
            made.append([drawn, *zero.full_state_dict().values()])
        assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)), stage


@EVERYWHERE
def test_a_checkpoint_of_a_fused_optimizer(ranks, how, n, tmp_path):
    ranks.run(saved_and_loaded, how, str(tmp_path), True, ranks=ranks_for(how, n), timeout=120)


def without_waiting(how: str) -> None:
    """From the second step on, nothing in forward, backward or step makes the host wait for the device."""
    device, group = place(how)
    for stage in range(4):
        zero = zerolab.shard(Model().to(device), stage, units=[Block], group=group)
        optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2)
        data = [[tensor.to(device) for tensor in batch(zero.rank, number)] for number in range(3)]
        for number in range(3):
            torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
            try:
                zero.model(*data[number]).backward()
                zero.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n", [1, 4])
def test_the_host_does_not_wait_for_the_device(ranks, n):
    ranks.run(without_waiting, ONE_GPU_EACH, ranks=ranks_for(ONE_GPU_EACH, n), timeout=60)


# -- a rank that fails -------------------------------------------------------------------------------------------------


def goes_wrong(how: str, what: str, folder: str) -> None:
    device, group = place(how)
    zero = zerolab.shard(Model().to(device), 3, units=[Block], group=group)
    optimizer = torch.optim.AdamW(zero.model.parameters())
    try:
        for number in range(4):
            if zero.rank == 1 and number == 2:
                if what == "raises":
                    raise ValueError("a bad batch")
                os.kill(os.getpid(), signal.SIGKILL)
            step(zero, optimizer, number)
    except zerolab.CommError as error:
        Path(folder, f"rank {zero.rank}").write_text(str(error))
        raise


@pytest.mark.parametrize("how", [ONE_GPU_EACH, SHARING, NCCL_SHARING])
@pytest.mark.parametrize(("what", "words"), [("raises", "ValueError: a bad batch"), ("dies", "SIGKILL")])
def test_a_rank_that_fails_is_named(how, what, words, tmp_path):
    n = ranks_for(how, 2)
    with zerolab.Ranks(n, threads=1) as pool, pytest.raises(zerolab.RankError) as caught:
        pool.run(goes_wrong, how, what, str(tmp_path))
    assert caught.value.rank == 1 and words in str(caught.value), caught.value


class Routed(nn.Module):
    """Two units, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x).sum()


def another_route(how: str) -> str:
    """What is said, on this rank, when in the third pass each rank takes another way."""
    device, group = place(how)
    zero = zerolab.shard(Routed().to(device), 3, units=[nn.Linear], group=group)
    with pytest.raises(zerolab.CommError) as caught:
        for number in range(3):
            zero.model(torch.ones(2, 8, device=device), zero.rank if number == 2 else 0).backward()
    return str(caught.value)


@pytest.mark.parametrize("how", [ONE_GPU_EACH, SHARING, NCCL_SHARING])
def test_another_route_is_named(how):
    n = ranks_for(how, 2)
    with zerolab.Ranks(n, threads=1) as pool:
        for message in pool.run(another_route, how):
            assert "experts." in message and "rank " in message, message


# -- optimizers that look at whole matrices ----------------------------------------------------------------------------


def owned(how: str) -> None:
    """Muon with owners trains as plain Muon does in stage 0."""
    device, group = place(how)
    expected: list[Tensor] = []
    for stage in (None, 0, 1, 2, 3):
        torch.manual_seed(7)
        zero = zerolab.shard(Model().to(device), stage or 0, units=[Block], group=group)
        matrices = [param for param in zero.model.parameters() if param.dim() == 2]
        muon: Any = torch.optim.Muon(matrices, lr=0.02)
        if stage is not None:
            muon = zerolab.OwnerOptimizer(matrices, torch.optim.Muon, lr=0.02)
        for number in range(STEPS):
            zero.model(*(tensor.to(device) for tensor in batch(zero.rank, number))).backward()
            muon.step()
            zero.model.zero_grad()
        weights = [value.cpu() for value in zero.full_state_dict().values()]
        expected = expected or weights
        for one, other in zip(weights, expected, strict=True):
            # Muon works in bf16, which makes much of a gradient's last digit.
            torch.testing.assert_close(one, other, rtol=0, atol=4e-3, msg=f"stage {stage}")


@EVERYWHERE
def test_owners_train_as_plain_muon(ranks, how, n):
    ranks.run(owned, how, ranks=ranks_for(how, n), timeout=120)


# -- the same bytes ---------------------------------------------------------------------------------------------------


SIZES = {"layers": 4, "width": 1024, "heads": 16}  # so large that what is rounded up does not matter
with torch.device("meta"):
    PSI = sum(param.numel() for param in GPT(**SIZES).parameters())  # 51 million


def gpt(
    stage: int, precision: str, device: torch.device, group: dist.ProcessGroup | None, offload: str | None = None
) -> tuple[zerolab.Engine, torch.optim.Optimizer]:
    torch.manual_seed(7)
    zero = zerolab.shard(
        GPT(**SIZES).to(device), stage, units=[GPTBlock], precision=PRECISIONS[precision], group=group, offload=offload
    )
    return zero, torch.optim.AdamW(zero.model.parameters(), lr=1e-3, eps=EPS)


def asked_for(device: torch.device) -> int:
    """Bytes that live tensors have asked of the allocator, before it rounds up."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["requested_bytes.all.current"]


def trained(
    stage: int, precision: str, device: torch.device, group: dist.ProcessGroup | None, offload: str | None = None
) -> tuple[dict[str, Tensor], int, int, dict[str, int], set[str]]:
    """After three steps the parameters, bytes on the device when backward has returned, the peak, the host's states."""
    gc.collect()
    before = asked_for(device)
    zero, optimizer = gpt(stage, precision, device, group, offload)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(zero.rank)).to(device)
    for number in range(3):
        if number == 1:  # not of the beginning
            torch.cuda.reset_peak_memory_stats(device)
        zero.model(tokens, tokens).backward()
        held = asked_for(device) - before
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    top = torch.cuda.max_memory_allocated(device)
    host = model_states(zero, optimizer, on="host")
    where = {param.device.type for param in zero.model.parameters()}
    return zero.full_state_dict(), held, top, host, where


def holds(how: str, precision: str) -> list[tuple[int, int]]:
    device, group = place(how)
    return [trained(stage, precision, device, group)[1:3] for stage in range(4)]


@pytest.mark.parametrize(("how", "n"), [(ONE_GPU_EACH, 1), (ONE_GPU_EACH, 4), (SHARING, 4)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_ranks_allocator_holds_what_the_formula_says(ranks, how, n, precision):
    n = ranks_for(how, n)
    kind = PRECISIONS[precision] or KEEP
    for rows in ranks.run(holds, how, precision, ranks=n, timeout=120):
        print(how, n, precision, "held and peak, in MB:", [(held // 10**6, top // 10**6) for held, top in rows])
        for stage, (held, _) in enumerate(rows):
            expected = sum(state_bytes(stage, n, PSI, kind).values())
            assert expected <= held <= 1.01 * expected + 10**6, stage
        if n > 1:
            assert sorted((top for _, top in rows), reverse=True) == [top for _, top in rows]


def offloaded(how: str) -> None:
    """Compared here: full parameters would have to travel to the test."""
    device, group = place(how)
    for stage in (1, 2, 3):
        plain, held, _, nothing, _ = trained(stage, "fp32", device, group)
        state, less, _, host, where = trained(stage, "fp32", device, group, "optimizer")
        n = dist.get_world_size()
        assert where == {"cpu"} and not any(nothing.values())
        assert host["optimizer"] >= 8 * PSI // n and host["parameters"] >= 4 * PSI // n
        saved = sum(state_bytes(stage, n, PSI).values()) - sum(state_bytes(stage, n, PSI, offload=True).values())
        assert 0.98 * saved <= held - less <= 1.02 * saved, (stage, held, less, saved)
        for name, value in plain.items():  # AdamW in other kernels
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("how", "n"), [(ONE_GPU_EACH, 1), (ONE_GPU_EACH, 4), (SHARING, 2)])
def test_offload_moves_the_optimizer_to_the_host(ranks, how, n):
    ranks.run(offloaded, how, ranks=ranks_for(how, n), timeout=120)


def two_peaks(how: str, precision: str) -> list[tuple[int, int]]:
    """For each stage the peak of one step by the timeline, and by the allocator, of the same step."""
    device, group = place(how)
    # gloo holds what it sends until its own stream is through, which is no property of the step.
    what = "allocated_bytes.all.peak" if how == SHARING else "active_bytes.all.peak"
    peaks = []
    for stage in range(4):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        zero, optimizer = gpt(stage, precision, device, group)
        tokens = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(zero.rank)).to(device)
        for number in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            with timeline(zero, optimizer) if number == 3 else nullcontext() as line:
                zero.model(tokens, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        peaks.append((line.peak, torch.cuda.memory_stats(device)[what] - before))
        del zero, optimizer, line
    return peaks


@pytest.mark.parametrize(("how", "n"), [(ONE_GPU_EACH, 1), (ONE_GPU_EACH, 4), (SHARING, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_timeline_agrees_with_the_cuda_allocator(ranks, how, n, precision):
    for peaks in ranks.run(two_peaks, how, precision, ranks=ranks_for(how, n), timeout=120):
        print(how, precision, "timeline and allocator, in MB:", [(a // 10**6, b // 10**6) for a, b in peaks])
        for stage, (seen, active) in enumerate(peaks):
            assert abs(seen - active) <= 0.05 * active, f"stage {stage}"


# -- streams ----------------------------------------------------------------------------------------------------------


def behind(how: str) -> None:
    """The device lags far behind the host, before each block in forward and in backward: its memory must not change."""
    device, group = place(how)

    for stage in range(4):
        states = []
        for late in (False, True):
            torch.manual_seed(7)
            zero = zerolab.shard(Model().to(device), stage, units=[Block], group=group)
            optimizer = torch.optim.AdamW(zero.model.parameters(), lr=1e-2, eps=EPS)
            if late:
                for block in zero.model.blocks:
                    block.register_forward_pre_hook(lag)
                    block.register_full_backward_pre_hook(lag)
            for number in range(STEPS):
                step(zero, optimizer, number)
            states.append(zero.full_state_dict())
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-6, msg=f"stage {stage}, {name}")


@EVERYWHERE
def test_a_device_that_is_behind_changes_nothing(ranks, how, n):
    ranks.run(behind, how, ranks=ranks_for(how, n), timeout=120)


class OnDevice(NamedTuple):
    """Something that the device did, as torch's profiler saw it; times in microseconds."""

    name: str
    stream: int
    begin: float
    end: float


def profiled(how: str) -> tuple[list[OnDevice], list[bool]]:
    """One step in stage 3, and for each block but the first whether its gather was issued while another computed."""
    device, group = place(how)
    zero, optimizer = gpt(3, "fp32", device, group)
    tokens = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(zero.rank)).to(device)

    def once() -> None:
        zero.model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    for _ in range(3):  # the order of the gathers is known from the second step on
        once()
    with trace(zero, optimizer) as record:
        once()
    ends = {span.unit: span.end for span in record.spans if span.phase == "forward"}
    starts = {call.unit: call.start for call in record.calls if (call.op, call.phase) == ("all_gather", "forward")}
    early = [starts[f"blocks.{i + 1}"] < ends[f"blocks.{i}"] for i in range(SIZES["layers"] - 1)]
    with torch.profiler.profile() as profile:
        once()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    done = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    rows = [OnDevice(e["name"], e["args"]["stream"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in done]
    return rows, early


@pytest.mark.parametrize(("how", "n"), [(ONE_GPU_EACH, 1), (ONE_GPU_EACH, 4), (SHARING, 2)])
def test_collectives_have_streams_of_their_own_and_run_beside_the_computation(ranks, how, n):
    n = ranks_for(how, n)
    for rows, early in ranks.run(profiled, how, ranks=n, timeout=120):
        assert early == [True] * (SIZES["layers"] - 1)
        if not rows:
            pytest.skip("torch's profiler may not look at this device")
        streams = Counter(row.stream for row in rows if not row.name.startswith("Mem"))
        (main, _), *_ = streams.most_common(1)  # the one with most kernels
        # A rank alone has only to copy; gloo copies to the host and back.
        own = "nccl" if how == ONE_GPU_EACH and n > 1 else "memcpy"
        talk = [row for row in rows if own in row.name.lower() and row.stream != main]
        assert len(talk) >= 2 * SIZES["layers"]  # a gather in forward, and one in backward
        assert not [row for row in rows if "nccl" in row.name.lower() and row.stream == main]
        both = intersection(
            union((r.begin, r.end) for r in talk), union((r.begin, r.end) for r in rows if r.stream == main)
        )
        print(
            how,
            n,
            f"of {length(union((r.begin, r.end) for r in talk)):.0f} us of collectives {length(both):.0f} beside",
        )
        if how == ONE_GPU_EACH and n > 1:
            assert length(both) > 0
