"""What one GPU shows, as tables: `make gpu` prints them after its tests.

    python -m zerolab.apps.gpu                  # about five minutes
    python -m zerolab.apps.gpu --device cpu     # a trial of the same lines, small and without an allocator

1. One rank on NCCL: step times and peaks of every stage, torch's DDP and FSDP2, beside plain PyTorch (`zerolab bench`).
2. Two and four ranks on the one GPU, through gloo: what each rank's allocator holds when backward returns, beside the
   formula. Through NCCL as well, where it lets ranks share a GPU (2.30.3, NCCL_MULTI_RANK_GPU_ENABLE=1).
3. A step in stage 3, profiled: for how much of it the device has nothing to do, because the host is late.

Exit status: 1 if a rank holds less than the formula says, or over a hundredth and 1 MB more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW

import zerolab
from zerolab.apps import bench
from zerolab.apps.machine import SHARING_NCCL
from zerolab.lab.ladder import PRECISIONS
from zerolab.measure import model_states, state_bytes
from zerolab.measure.spans import length, union
from zerolab.tasks.models import GPT, Block

SIZES = {
    "cpu": {"layers": 2, "width": 64, "heads": 2, "context": 32},
    "cuda": {"layers": 8, "width": 512, "heads": 8, "context": 128},  # 25 million parameters, four times on one GPU
}
BATCH = 4


def stand(device: str, backend: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Where this rank computes, and the group in which it talks; None: the default group."""
    if device == "cpu":
        return torch.device("cpu"), None
    torch.cuda.set_device(0)
    return torch.device("cuda", 0), dist.new_group(backend=backend)


def held(device: str, backend: str, precision: str) -> list[int]:
    """Bytes that this rank holds when backward of the second step has returned, for each stage.

    On CUDA what was asked of the allocator since the model was built, so gradients that are late would be seen.
    """
    place, group = stand(device, backend)
    rows = []
    for cls in zerolab.STAGES:
        gc.collect()
        before = asked_for(place)
        torch.manual_seed(0)
        zero = cls(GPT(**SIZES[device]).to(place), units=[Block], precision=PRECISIONS[precision], group=group)
        optimizer = AdamW(zero.model.parameters(), lr=1e-3)
        tokens = torch.randint(0, 256, (BATCH, SIZES[device]["context"]), device=place)
        for _ in range(2):
            optimizer.zero_grad()
            zero.model(tokens, tokens).backward()
            states = model_states(zero, optimizer)
            now = asked_for(place) - before - tokens.nbytes
            optimizer.step()
        rows.append(now if device == "cuda" else sum(states.values()))
        del zero, optimizer, tokens
    return rows


def asked_for(place: torch.device) -> int:
    """Bytes that live tensors have asked of the allocator, before it rounds up; on the CPU 0."""
    if place.type == "cpu":
        return 0
    torch.cuda.synchronize(place)
    return torch.cuda.memory_stats(place)["requested_bytes.all.current"]


def idle(device: str, stage: int) -> tuple[float, float] | None:
    """Milliseconds of a step and of those without a kernel or a copy on the device; None where none can be seen."""
    place = zerolab.init()
    torch.manual_seed(0)
    sizes = bench.SIZES["cuda"] if device == "cuda" else SIZES["cpu"]
    zero = zerolab.shard(GPT(**sizes).to(place), stage, units=[Block])
    optimizer = AdamW(zero.model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (bench.BATCH[device], sizes["context"]), device=place)

    def step() -> None:
        zero.model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    for _ in range(2):  # the first one also starts the profiler
        with torch.profiler.profile() as profile:
            step()
            if device == "cuda":
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    busy = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not busy:
        return None
    spans = union((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in busy)
    whole = spans[-1][1] - spans[0][0]
    return whole / 1000, (whole - length(spans)) / 1000


def no_sharing() -> str:
    """Why several ranks cannot talk through NCCL on one GPU, or ''."""
    version = torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (0,)
    if version < SHARING_NCCL:
        here = ".".join(map(str, version)) if version > (0,) else "none"
        return f"needs NCCL {'.'.join(map(str, SHARING_NCCL))}, here is {here}"
    return "" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else "set NCCL_MULTI_RANK_GPU_ENABLE=1"


# -- the report ------------------------------------------------------------------------------------------------------


def beside_plain(device: str, rounds: int, precision: str, sizes: dict[str, int] | None) -> list[str]:
    report = bench.measure(1, rounds, precision, sizes)
    seconds, peaks = report["step_seconds"], report["peak_bytes"]
    lines = [
        f"One rank, {precision}, {rounds} rounds: beside plain PyTorch",
        f"{'':26}{'ms':>9}{'':>7}{'peak, MB':>12}",
    ]
    for name, time in seconds.items():
        label = "plain PyTorch" if name == bench.FLOOR else name
        ratios = time / seconds[bench.FLOOR], peaks[name] / peaks[bench.FLOOR]
        lines.append(f"{label:26}{1e3 * time:9.1f}{ratios[0]:7.2f}{peaks[name] / 1e6:12.1f}{ratios[1]:7.2f}")
    return lines


def beside_formula(device: str, backend: str, ranks: int, precision: str) -> tuple[list[str], bool]:
    """Lines, and whether all ranks hold what the formula says."""
    psi = sum(param.numel() for param in GPT(**SIZES[device]).parameters())
    with zerolab.Ranks(ranks, threads=1) as pool:
        everyone = pool.run(held, device, backend, precision, timeout=300, group_timeout=60)
    lines = [f"{ranks} ranks on one device, {backend}, {precision}: MB held when backward returns, Ψ = {psi:,}"]
    right = True
    kind = PRECISIONS[precision]
    for cls, *found in zip(zerolab.STAGES, *everyone, strict=True):
        formula = sum(state_bytes(cls.stage, ranks, psi, kind).values())
        right &= all(formula <= each <= 1.01 * formula + 10**6 for each in found)
        lines.append(
            f"{cls.__name__:8}formula {formula / 1e6:8.2f}   ranks " + " ".join(f"{f / 1e6:8.2f}" for f in found)
        )
    return lines, right


def gaps(device: str) -> list[str]:
    with zerolab.Ranks(1, threads=1) as pool:
        rows = {cls.__name__: pool.run(idle, device, cls.stage, timeout=300)[0] for cls in (zerolab.DDP, zerolab.Zero3)}
    lines = ["A step of one rank, profiled: ms, and ms in which the device had nothing to do"]
    for name, row in rows.items():
        lines.append(f"{name:8}" + ("no device was seen" if row is None else f"{row[0]:9.1f}{row[1]:9.1f}"))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zerolab.apps.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial (default cuda)")
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each system (default 20)")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the lines")
        return 0
    # cuBLAS takes up to 32 MiB for each thread from the allocator that is measured here: let it be next to nothing.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="128")
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sizes: Any = SIZES["cpu"] if args.device == "cpu" else None
    wrong = 0
    for precision in ("fp32", "bf16"):
        print("\n".join(beside_plain(args.device, args.rounds, precision, sizes)), end="\n\n", flush=True)
    backends = ["gloo"] if args.device == "cpu" or no_sharing() else ["gloo", "nccl"]
    for backend in backends:
        for ranks in (2, 4):
            lines, right = beside_formula(args.device, backend, ranks, "bf16")
            print("\n".join(lines), end="\n\n", flush=True)
            wrong |= not right
    if why := no_sharing():
        print(f"Several ranks on one GPU through NCCL: skipped, {why}\n")
    print("\n".join(gaps(args.device)))
    if wrong:
        print("WRONG: a rank holds something else than the formula says")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
