"""docs/formulas.md: every row is evaluated as it is printed.

Where `zerolab.measure` has the number, or torch, the row must give it at several Ψ and N. Other rows must give what
their lesson measured and printed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from zerolab import Layout, Precision
from zerolab.comm.recording import Call, bytes_sent
from zerolab.engine.precision import KEEP
from zerolab.lab.exercises.battery import load
from zerolab.lab.lessons.lesson11 import READS, old_files
from zerolab.lab.plots import Phase, knee
from zerolab.measure import (
    Trace,
    activation_bytes,
    between_bytes,
    host_state_bytes,
    moved_bytes,
    paper_state_bytes,
    plan,
    state_bytes,
)
from zerolab.measure.planning import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "formulas.md"
TABLES, _, SYMBOL_TABLE = PAGE.read_text(encoding="utf-8").partition("## Symbols")
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.*?) \| \[(\d\d)\]\(\.\./(\S+)\) \|$", TABLES, re.MULTILINE)
FORMULAS = {what: formula for what, formula, *_ in ROWS}
LESSONS = {what: file for what, *_, file in ROWS}
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-zΨαβη](?:_[a-z]+)?|⌈|⌉|√|[-+/()])")
BF16 = Precision(torch.bfloat16)
SIZES = [(psi, n) for psi in (470_528, 867_072, 7_500_000_000) for n in (1, 2, 4, 64, 1024)]


def tokens(formula: str) -> list[str]:
    found = TOKEN.findall(formula)
    assert "".join(found) == formula.replace(" ", ""), f"cannot read {formula}"
    return found


def value(what: str, **symbols: float) -> float:
    """The row's formula with these numbers: what stands side by side is multiplied."""
    python: list[str] = []
    for token in tokens(FORMULAS[what]):
        if token not in "-+/)⌉" and python and re.search(r"[\d\])]$", python[-1]):
            python.append("*")
        python.append({"⌈": "math.ceil(", "⌉": ")", "√": "math.sqrt"}.get(token, token))
        if token[0].isalpha():
            python[-1] = f"number[{token!r}]"
    return eval(" ".join(python), {"math": math, "number": symbols})


def stored(what: str) -> str:
    """Text and outputs of the solved lesson that the row names."""
    seen: list[str] = []
    file = ROOT / LESSONS[what].replace("lessons/", "solutions/")
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        seen += cell["source"] if cell["cell_type"] == "markdown" else []
        for output in cell.get("outputs", []):
            seen += [*output.get("text", []), *output.get("data", {}).get("text/plain", []), "\n"]
    return " ".join("".join(seen).replace("**", "").split())


def printed(what: str, number: str) -> None:
    assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d])", stored(what)), f"{what}: the lesson has no {number}"


# ---------------------------------------------------------------------- what the package says

CHECKS: dict[str, Callable[[str], None]] = {}


def row(*names: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    def add(check: Callable[[str], None]) -> Callable[[str], None]:
        for name in names:
            assert name not in CHECKS
            CHECKS[name] = check
        return check

    return add


STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


@row(*(f"{name}, {kind}" for name in STAGES for kind in ("float32", "bf16 with float32 masters")))
def model_states(what):
    stage, precision = STAGES[what.partition(",")[0]], BF16 if "bf16" in what else KEEP
    for psi, n in SIZES:
        held = sum(state_bytes(stage, n, psi, precision).values())
        assert value(what, Ψ=psi, N=n) == pytest.approx(held, abs=2)


@row("the paper's baseline", "the paper's stage 1", "the paper's stage 2", "the paper's stage 3")
def paper(what):
    stage = int(what[-1]) if what[-1].isdigit() else 0
    for psi, n in SIZES:
        for k in (12, 4):
            assert value(what, Ψ=psi, N=n, K=k) == pytest.approx(paper_state_bytes(stage, n, psi, k))


@row("DDP with SGD, float32", "DDP with SGD and momentum, float32")
def other_optimizers(what):
    kept = OPTIMIZERS["momentum" if "momentum" in what else "sgd"]
    for psi, n in SIZES:
        assert value(what, Ψ=psi) == sum(state_bytes(0, n, psi, optimizer_bytes=kept).values())


@row("offload, bf16, stages 1, 2: on the device", "offload, bf16, stage 3: on the device")
def offloaded(what):
    for stage in (3,) if "stage 3" in what else (1, 2):
        for psi, n in SIZES:
            held = sum(state_bytes(stage, n, psi, BF16, offload=True).values())
            assert value(what, Ψ=psi, N=n) == pytest.approx(held, abs=1)


@row("offload, bf16, stages 1-3: on the host")
def on_the_host(what):
    for psi, n in SIZES:
        assert value(what, Ψ=psi, N=n) == pytest.approx(sum(host_state_bytes(n, psi, BF16).values()), abs=2)


@row("hybrid ZeRO-3, bf16")
def hybrid_states(what):
    for psi, s in SIZES:
        assert value(what, Ψ=psi, S=s) == pytest.approx(sum(state_bytes(3, s, psi, BF16).values()), abs=2)
    assert f"hybrid: a GPU holds {value(what, Ψ=7.5e9, S=8) / 1e9:.1f} GB" in stored(what)


@row("ZeRO-3 and tensor parallelism, float32")
def two_by_two(what):
    psi = 867_072
    for t in (1, 2, 4):  # what a rank has, divided by ZeRO-3
        for d in (1, 2, 8):
            mine = 77_056 + (psi - 77_056) // t
            assert value(what, Ψ=psi, Ψ_copy=77_056, T=t, D=d) == pytest.approx(
                sum(state_bytes(3, d, mine).values()), abs=2
            )
    printed(what, f"{value(what, Ψ=psi, Ψ_copy=77_056, T=2, D=2) / psi:.3f}")


@row("Adam's step counters")
def counters(what):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert value(what, n=4) == sum(state["step"].nbytes for state in optimizer.state.values())
    printed(what, f"{value(what, n=53):,.0f}")


@row("padding of a unit")
def padding(what):
    for size in (1, 15, 16, 198_272):
        for n in (1, 2, 3, 4, 5, 64):
            layout = Layout([("a", torch.empty(size))], world_size=n)
            shards = layout.shard(torch.empty(layout.size), 0).numel() * n
            assert value(what, Ψ_unit=size, N=n) == math.ceil(size / n) * n - size
            assert shards >= size + value(what, Ψ_unit=size, N=n)  # the engine may also align a parameter
    printed(what, f"{4 * value(what, Ψ_unit=867_072, N=5):.0f} B")


@row("a checkpoint, float32, all files together")
def checkpoint(what):
    printed(what, f"{value(what, Ψ=136_960):,.0f}")


@row("largest model for ZeRO-2, bf16")
def largest(what):
    for g, a, n in ((80e9, 20e9, 64), (24e9, 0, 8), (141e9, 35e9, 1)):
        assert plan(1e9, n, memory=g, activations=a)[2].largest == int(value(what, G=g, A=a, N=n))


@row("fewest GPUs for ZeRO-2, bf16")
def fewest(what):
    for psi, g, a in ((13e9, 80e9, 12e9), (7.5e9, 80e9, 10e9), (7.5e9, 24e9, 4e9)):
        n = value(what, Ψ=psi, G=g, A=a)
        assert plan(psi, n, memory=g, activations=a)[2].fits
        assert n == 1 or not plan(psi, n - 1, memory=g, activations=a)[2].fits


@row("activations of a GPT, fused attention", "the same, every block checkpointed")
def activations(what):
    again = "checkpointed" in what
    for tokens_, layers, width, vocabulary in ((512, 4, 128, 256), (2048, 32, 4096, 30_000)):
        for dtype in (torch.bfloat16, torch.float32):
            held = activation_bytes(tokens_, layers, width, vocabulary, dtype, checkpointing=again)
            assert value(what, t=tokens_, L=layers, w=width, v=vocabulary, e=dtype.itemsize) == held


@row("reduce-scatter or all-gather", "all-reduce", "broadcast, the ranks' mean")
def collectives(what):
    names = {"reduce": ["reduce_scatter", "all_gather"], "all-re": ["all_reduce"], "broadc": ["broadcast"]}[what[:6]]
    for name in names:
        for n in (1, 2, 4, 8, 64):
            for b in (64, 8_000_000, 15_000_000_000):
                assert int(value(what, B=b, N=n)) == bytes_sent(name, b, n)


@row("DDP, ZeRO-1 and ZeRO-2", "ZeRO-3")
def traffic(what):
    for psi, n in SIZES:
        for precision, size in ((KEEP, 4), (BF16, 2)):
            root = 73_984
            for stage in (3,) if what == "ZeRO-3" else (0, 1, 2):
                sent = moved_bytes(stage, n, psi, root, precision)
                assert size * value(what, Ψ=psi, N=n, Ψ_root=root) == pytest.approx(sent, abs=1)


@row("ZeRO-3 in bf16, reduced in float32")
def reduced_in_float32(what):
    for psi, n in SIZES:
        sent = moved_bytes(3, n, psi, 73_984, Precision(torch.bfloat16, torch.float32))
        assert value(what, Ψ=psi, N=n, Ψ_root=73_984) == pytest.approx(sent, abs=1)


@row("hybrid, to the other replicas")
def between(what):
    for psi, s in SIZES:
        for r in (1, 2, 8):
            assert 2 * value(what, Ψ=psi, S=s, R=r) == pytest.approx(between_bytes((r, s), psi, BF16), abs=1)


@row("knee: bandwidth that hides all, float32")
def the_knee(what):
    for psi, n in SIZES:
        for c in (0.1, 3.0):
            phases = {
                "DDP": {"forward": Phase(c / 3, 0), "backward": Phase(2 * c / 3, moved_bytes(0, n, psi))},
                "ZeRO-3": {
                    "forward": Phase(c / 3, moved_bytes(3, n, psi) / 3),
                    "backward": Phase(2 * c / 3, moved_bytes(3, n, psi) * 2 / 3),
                },
            }
            for stage in phases.values():
                assert value(what, Ψ=psi, N=n, C=c) == pytest.approx(knee(stage), rel=1e-6)
    assert "9Ψ/C" in stored(what) and value(what, Ψ=1, N=4, C=1) == 9


@row("overlap score")
def overlap(what):
    calls = [Call("all_gather", "root", "forward", 8, 6, False, 0, None, 0.0) for _ in range(2)]
    for call, (start, end, waits) in zip(calls, ((0.0, 4.0, [(3.0, 4.0)]), (2.0, 6.0, [(5.5, 6.0)]))):
        call.start, call.end, call.waits = start, end, waits
    assert Trace(0, 1, [], calls).overlap == value(what, x=6.0, y=1.5)


@row("reads of a unit: N files, Q ranks, at most")
def reads(what):
    most, plan_reads = 0, load(READS, "<11.1>", "ex_11_1").plan_reads
    for n in range(1, 9):
        for q in range(1, 9):
            for numel in (1, 38, 97, 504):
                files = old_files(numel, n)
                made = sum(len(plan_reads(files, numel, q, rank)) for rank in range(q))
                assert made <= value(what, N=n, Q=q)
                most += made == value(what, N=n, Q=q)
    assert most > 20
    printed(what, f"{value(what, N=4, Q=3)} reads")


@row("a message", "a message that is half latency")
def message(what):
    half = value("a message that is half latency", α=5e-3, β=100e6)
    assert value("a message", α=5e-3, β=100e6, B=half) == 2 * 5e-3
    printed(what, f"{half / 1e3:.0f} kB")


@row("a rank's loss, for a mean over all tokens")
def token_loss(what):
    torch.manual_seed(0)
    lengths = [63, 31, 15, 7]
    logits, targets = torch.randn(sum(lengths), 9, dtype=torch.float64), torch.randint(0, 9, (sum(lengths),))
    sums = [
        F.cross_entropy(a, b, reduction="sum").item() for a, b in zip(logits.split(lengths), targets.split(lengths))
    ]
    losses = [value(what, N=4, s_r=of_rank, n_tok=sum(lengths)) for of_rank in sums]
    assert sum(losses) / 4 == pytest.approx(F.cross_entropy(logits, targets).item())


@row("how far Adam moves an element")
def adam(what):
    for gradient in (3.0, -0.001):
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.Adam([param], lr=0.25, eps=0.0)
        first = second = 0.0
        for step in (1, 2, 3):
            before = param.item()
            param.grad = torch.tensor([gradient / step], dtype=torch.float64)
            optimizer.step()
            first, second = 0.9 * first + 0.1 * gradient / step, 0.999 * second + 0.001 * (gradient / step) ** 2
            moved = value(what, η=0.25, m=first / (1 - 0.9**step), u=second / (1 - 0.999**step))
            assert before - param.item() == pytest.approx(moved)


@row("samples that a sampler hands out")
def sampler(what):
    from torch.utils.data import DistributedSampler

    for v in (10, 12, 359):
        for n in (1, 3, 4):
            handed = sum(len(list(DistributedSampler(range(v), n, rank))) for rank in range(n))
            assert handed == value(what, V=v, N=n)


@row("float16: largest gradient at a loss scale")
def float16(what):
    assert value(what, z=1) == torch.finfo(torch.float16).max
    printed(what, f"{value(what, z=2**16):.4f}")


# ---------------------------------------------------------------------- what the lessons measured

SMALL, ROOT_UNIT, BLOCK = 1_263_616, 73_984, 198_272  # the GPT of lessons 06, 07 and 10
MEASURED: dict[str, list[tuple[dict[str, float], Callable[[float], str]]]] = {
    "ZeRO-3, gathered in forward": [({"Ψ_root": ROOT_UNIT, "Ψ_unit": BLOCK}, lambda x: f"{4 * x / 1e6:.2f} MB")],
    "ZeRO-3, gathered in backward": [({"Ψ_root": ROOT_UNIT, "Ψ_unit": BLOCK}, lambda x: f"{4 * x:,.0f}")],
    "blocks in forward, with prefetch": [({"a": a}, lambda x: f"{x} in forward") for a in (0, 1, 2)],
    "blocks in backward, with prefetch": [({"a": a}, lambda x: f"{x} in backward") for a in (0, 1, 2)],
    "per token, k blocks checkpointed as one": [
        ({"L": 64, "k": 1}, lambda x: f"64 + 16 = {x:.0f}"),
        ({"L": 64, "k": 2}, lambda x: f"32 + 32 = {x:.0f}"),
    ],
    "kept inputs, partitioned (P_a)": [({"L": 6, "t": 512, "w": 128, "e": 4, "T": 4}, lambda x: f"{x:,.0f} with P_a")],
    "micro-batches kept, GPipe": [({"M": 8}, lambda x: f"keeps at most {x} micro-batches")],
    "micro-batches kept by stage r, 1F1B": [
        (
            {"P": 4, "r": 0},
            lambda x: f"1F1B: a stage stands still for 27% of the time and keeps at most {x} micro-batches",
        ),
        ({"P": 8, "r": 0}, lambda x: f"1F1B keeps {x} on the first stage"),
        ({"P": 8, "r": 7}, lambda x: f"{x} on the last"),
    ],
    "all-reduce through a root, in and out": [
        ({"N": n, "B": 8_000_000}, lambda x: f"{x:,.0f} bytes through a root") for n in (2, 3, 4)
    ],
    "ZeRO-3, collectives in a step": [({"U": 7}, lambda x: f"{x} collectives")],
    "ZeRO-2, every micro-batch reduced": [({"Ψ": 1_660_160, "M": 4, "N": 4}, lambda x: f"{4 * x:,.0f} bytes sent")],
    "ZeRO-3, generating one token": [({"Ψ": 867_072, "N": 4}, lambda x: f"{4 * x:,.0f} bytes sent")],
    "offload, bf16: over the link to the host": [({"Ψ": SMALL, "N": 4}, lambda x: f"{x:,.0f} bytes")],
    "tensor parallelism": [({"L": 4, "t": 512, "w": 128, "T": 2}, lambda x: f"{4 * x:,.0f} bytes sent")],
    "pipeline, a stage in the middle": [({"t": 512, "w": 128}, lambda x: f"2,111,552 {4 * x:,.0f}")],
    "main GPU, int8 in and float32 out": [({"N": 4, "Ψ": 136_960}, lambda x: f"rank 0 = {x / 1e6:.2f}")],
    "int8, a scale per 256, all-gathered": [({"N": 4, "Ψ": 136_960}, lambda x: f"{x:,.0f} bytes sent")],
    "top-k, all-gathered": [({"N": 4, "k": 1_369}, lambda x: f"{x:,.0f} bytes sent")],
    "int4, a scale per 64, by all-to-all": [({"Ψ": 136_960, "N": 4}, lambda x: f"{x:,.0f} bytes sent")],
    "top-k: as much as an all-reduce from": [({"Ψ": 136_960, "k": 1_369}, lambda x: f"{x:.0f} ranks")],
    "an all-reduce": [
        ({"N": 4, "α": 1e-3, "B": 0, "β": 200e6}, lambda x: f"{1e3 * x:.2f} ms latency"),
        ({"N": 4, "α": 0, "B": 4 * 470_528, "β": 200e6}, lambda x: f"{1e3 * x:.1f} ms transfer"),
    ],
    "computing a step": [({"Ψ": 7.5e9, "t": 16 * 1024, "F": 200e12}, lambda x: f"computing {x:.1f} s")],
    "computing, every block checkpointed": [({"Ψ": 1, "t": 1, "F": 6}, lambda x: f"you said {x:.3f} ×")],
    "ZeRO-3, latency of a step": [
        ({"U": 37, "N": n, "α": 20e-6}, lambda x: f"latency {x:.1f} s") for n in (64, 512, 4096)
    ],
    "DDP in float32: computed per byte sent": [({"t": 4 * 64, "N": 4}, lambda x: f"you said {x:.0f} FLOP per byte")],
    "DDP in bf16 hides from, on many ranks": [({"F": 400e12, "β": 50e9}, lambda x: f"about {x:,.0f} tokens")],
    "bubble of a pipeline": [
        ({"P": 4, "M": m}, lambda x, run=run: f"{run}: a stage stands still for {x:.0%}")
        for run, m in {"by layers": 1, "GPipe": 8, "1F1B": 8}.items()
    ],
    "bubble with zero bubble": [({"P": 4, "M": 8}, lambda x: f"measured {100 * x:.2f} %")],
    "offload: link = computing from": [
        ({"F": 400e12, "N": n, "β": 50e9}, lambda x: f"link costs {x:,.0f} tokens") for n in (1, 8, 64)
    ],
    "offload: update = computing from": [
        ({"F": 400e12, "H": h, "β_host": 600e9}, lambda x: f"update {x:,.0f}") for h in (1, 8)
    ],
    "time between two checkpoints": [({"X": 60, "Y": 3 * 3600}, lambda x: f"{x / 60:.0f} minutes")],
    "global batch": [({"N": n, "b": 6, "M": 1}, lambda x: f"ranks x 6 {144 // x:.0f} steps") for n in (2, 4)],
    "steps of an epoch": [({"V": 1438, "N": 1, "b": 512, "M": 1}, lambda x: f"measured {5 * x} steps")],
    "learning rate, scaled from 32 samples": [
        ({"η": 1, "N": 4, "b": b, "M": 1}, lambda x: f"rate x{x:.0f}") for b in (64, 128)
    ],
    "int8: the scale of a tensor": [({"x_max": 1.27}, lambda x: f"scale {x:.2f}")],
    "mean staleness, asynchronous SGD": [({"W": 3}, lambda x: f"you said {x} updates")],
}


@row(*MEASURED)
def measured(what):
    for symbols, says in MEASURED[what]:
        text = re.escape(says(value(what, **symbols)))
        assert re.search(rf"(?<![\d.,]){text}", stored(what)), (
            f"{what}: the lesson has no {says(value(what, **symbols))}"
        )


@pytest.mark.parametrize("what", FORMULAS)
def test_a_formula(what):
    CHECKS[what](what)


def test_each_row_has_a_name_of_its_own():
    assert len(FORMULAS) == len(ROWS) == TABLES.count("](../lessons/")
    assert CHECKS.keys() == FORMULAS.keys()


def test_the_lessons_are_there():
    for _, _, _, number, file in ROWS:
        assert (ROOT / file).exists() and Path(file).name.startswith(number)


def test_each_symbol_is_explained_once():
    explained = [
        name for row in re.findall(r"^\| (\S.*?) \|", SYMBOL_TABLE, re.MULTILINE)[1:] for name in row.split(", ")
    ]
    explained = [name for name in explained if not set(name) <= {"-", "|"}]
    used = {token for formula in FORMULAS.values() for token in tokens(formula) if token[0].isalpha()}
    assert len(explained) == len(set(explained))
    assert set(explained) == used


@pytest.mark.parametrize("what", FORMULAS)
def test_a_wrong_formula_is_noticed(what, monkeypatch):
    """With its first number one larger, or its first symbol three times as large, a row no longer passes."""
    found = tokens(FORMULAS[what])
    at = next(k for k, token in enumerate(found) if token[0].isalnum())
    found[at] = str(int(found[at]) + 1) if found[at].isdigit() else f"3{found[at]}"
    monkeypatch.setitem(FORMULAS, what, " ".join(found))
    with pytest.raises(AssertionError):
        CHECKS[what](what)
