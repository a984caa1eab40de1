"""The claims that the course puts on trial: each with its verdict, what decided it, and the lesson where it was tried.

    lab.claims()                                   the list, as a table
    lab.claim("13")                                one of them
    python -m zerolab.lab.exercises.verdicts         writes docs/claims.md from it

This list is the only one: the table in lesson 19, the page and the tests read it. What stands `between backticks` in a
reason can be read in that lesson, word for word, in its text or in what its cells print.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TRUE, FALSE, CONDITION = "true", "false", "true under a condition"
VERDICTS = (TRUE, FALSE, CONDITION)

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "claims.md"


@dataclass(frozen=True)
class Claim:
    """One claim.

    key: "1" to "17" and "A" to "Q" stand in articles, "R" and what follows where `source` says, at `address`.
    also: the keys of others that say much the same, and are tried with it. words: as it is written there.
    because: what decided, with numbers of the lesson `between backticks`. lesson: its number. heading: the section.
    quote: how the lesson begins to quote the claim.
    """

    key: str
    words: str
    verdict: str
    because: str
    lesson: str
    quote: str
    heading: str = "On trial"
    also: tuple[str, ...] = ()
    source: str = ""
    address: str = ""

    @property
    def keys(self) -> str:
        return ", ".join((self.key, *self.also))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "1",
        "ZeRO is parameter decomposition, gradient compression and asynchronous communication.",
        FALSE,
        "It is three partitions. In stage 1's ledger `every byte was an uncompressed element`, and the update is "
        "synchronous. ZeRO++ compresses, as an option, four years later.",
        "12",
        "ZeRO is parameter decomposition",
    ),
    Claim(
        "2",
        "Gradients are gathered on a main GPU, which updates the model.",
        FALSE,
        "All four ranks do the same: `rank 0 updates 216,768 elements and sends 5,202,432 bytes a step`, and so does "
        "`rank 3`.",
        "04",
        "Gradients are gathered on a main GPU",
    ),
    Claim(
        "4",
        "ZeRO improves accuracy; synchronous SGD guarantees the global optimum, asynchronous a local one.",
        FALSE,
        "`the same weights, losses and accuracies in stages 0 to 3, bit for bit`. And nothing guarantees an optimum: "
        "what is proved, for either kind, is a point where the gradient vanishes (lesson 12).",
        "13",
        "ZeRO improves accuracy",
        also=("L",),
    ),
    Claim(
        "6",
        "Full sharding keeps 16Ψ/N bytes.",
        CONDITION,
        "True of what stays, apart from Adam's counters: `5,054,772 held when backward returns`, for a 16Ψ/N of "
        "`5,054,464`. Units in flight come on top: `at most 8,745,012 in total`.",
        "06",
        "Full sharding keeps 16Ψ/N bytes",
    ),
    Claim(
        "9",
        "With more devices the model can grow without limit.",
        FALSE,
        "`With 256 times as many ranks, 8.6 MB become 3.6 MB`: units in flight and activations stay.",
        "07",
        "With more devices the model can grow without limit",
    ),
    Claim(
        "10",
        "Wrapping the model in DataParallel or DDP and setting the process group to NCCL is ZeRO: data parallelism "
        "lowers a GPU's memory.",
        FALSE,
        "Every rank holds everything: `16.00 bytes per parameter on each rank, 64 on all ranks together`.",
        "03",
        "Wrapping the model in DataParallel or DDP",
        "On trial: is this ZeRO?",
        also=("F",),
    ),
    Claim(
        "12",
        "Splitting by layer, by block or dynamically are equivalent choices.",
        FALSE,
        "The fullest of 4 ranks holds, as a multiple of an even share: `1.47 blocks in turn, 1.76 layers in turn, 1.44 "
        "tensors greedily, 1.00 flat`.",
        "04",
        "Splitting by layer, by block or dynamically",
    ),
    Claim(
        "13",
        "Asynchronous updates remove the cost of synchronisation.",
        CONDITION,
        "If the loss is not counted. The wait goes, the bytes stay, and gradients are stale by `N_workers - 1 updates "
        "on average`: at the same number of updates, that `costs loss, the more the older they are`.",
        "12",
        "Asynchronous updates remove the cost",
    ),
    Claim(
        "15",
        "A program without a distributed sampler trains N times more data.",
        FALSE,
        "Every rank had the same batches: `In 25 of 25 steps, four ranks with the same batches have exactly the loss "
        "of one process`.",
        "03",
        "A program without a distributed sampler",
        "On trial: the sampler",
    ),
    Claim(
        "16",
        "overlap_comm hides communication.",
        CONDITION,
        "It hides at most what fits behind computing: FLOP per byte decide. `At a quarter of the knee, three quarters "
        "cannot be hidden, in any order`.",
        "09",
        "overlap_comm hides communication",
    ),
    Claim(
        "17",
        "Larger buckets are always faster.",
        FALSE,
        "One bucket for the model `hides nothing: its bytes leave when backward is over`.",
        "09",
        "Larger buckets are always faster",
    ),
    Claim(
        "A",
        "Each GPU trains a submodel, or only its shard's gradient, and the full gradient is the sum of the shards'; "
        "the model needs a special structure.",
        FALSE,
        "`ZeRO-3 each rank computes 0.250, 0.250, 0.250, 0.250 of one process's FLOP, all together 1.000`: a quarter "
        "of the samples, through every layer, and nothing else. Shards are put end to end, each averaged over all "
        "ranks' samples.",
        "15",
        "Each GPU trains a submodel",
        also=("8", "K"),
    ),
    Claim(
        "B",
        "Trading communication for memory is ZeRO's essence.",
        CONDITION,
        "`more sent and less held: true under a condition, stages [3]`. Stages 1 and 2 hold less, and send what "
        "DDP sends.",
        "19",
        "Trading communication for memory",
    ),
    Claim(
        "C",
        "Optimizer states are fetched from the other ranks, or from memory that nodes share.",
        FALSE,
        "Every message of a step was opened, in all four stages: of each, `optimizer state 0 bytes`. What travels is "
        "gradients and parameters, in messages: `4 ranks, 4 processes`, each with memory of its own.",
        "19",
        "Optimizer states are fetched",
        also=("H",),
    ),
    Claim(
        "D",
        "ZeRO trains faster.",
        CONDITION,
        "Mainly through the larger batch that the freed memory holds: `8 MB hold 49 images; sent per image: 37.6 kB` "
        "in stage 0, `8 MB hold 72 images; sent per image: 25.6 kB` in stages 1 and 2.",
        "13",
        "ZeRO trains faster",
    ),
    Claim(
        "E",
        "Intermediate results are partitioned.",
        CONDITION,
        "True of ZeRO-R's P_a, with model parallelism. In stages 0 to 3 a token's activations take `51.4` kB alike.",
        "10",
        "Intermediate results are partitioned",
    ),
    Claim(
        "N",
        "A ZeRO-2.0 and a ZeRO-3.0 followed, each better than the last, with repositories and wheels of their own.",
        FALSE,
        "They are stages, `and no versions: none is newer than another`. Look a name up before you install it: "
        "anyone may register one that was made up.",
        "19",
        "ZeRO-2.0 improves on ZeRO",
    ),
    Claim(
        "P",
        "Model parallelism suits little data.",
        CONDITION,
        "Tensor parallelism, with few tokens in a step: `4,194,304 bytes sent by each rank` are for eight sequences, "
        "and DDP sends 3,468,288 for any number. Not a pipeline: with one micro-batch `a stage stands still for 75% of "
        "the time`.",
        "15",
        "Model parallelism suits little data",
    ),
    Claim(
        "Q",
        "ZeRO cures fragmentation and memory bandwidth.",
        FALSE,
        "It cures capacity. Forward and backward `read and write what they always did`, and (in the section for "
        "another day) `stage 3 needs more addresses beyond its peak than DDP: True`.",
        "10",
        "ZeRO cures fragmentation and memory bandwidth",
    ),
    Claim(
        "R",
        "The learning rate should be scaled linearly based on the number of devices present.",
        CONDITION,
        "If each device keeps its batch, for SGD, and not without end: `512 images, rate x64` was worse than "
        "`512 images, rate x16`. With the same batch on more devices nothing is to be scaled: `4 ranks against 1: "
        "losses within 1e-6: True`.",
        "13",
        "based on the number of devices present",
        source="Accelerate's guide, 1.14",
        address="https://huggingface.co/docs/accelerate/concept_guides/performance",
    ),
    Claim(
        "S",
        "Every additional stage and offload level reduces peak memory, at the cost of more inter-GPU communication.",
        FALSE,
        "`Zero1   holds 6,640,640 bytes of gradients, sends 9,960,960 a step`, and DDP and stage 2 send as much. Only "
        "stage 3 sends more.",
        "05",
        "Every additional stage and offload level",
        also=("3",),
        source="Transformers' guide to DeepSpeed, 2026",
        address="https://huggingface.co/docs/transformers/deepspeed",
    ),
    Claim(
        "T",
        "ZeRO-2 reduces memory by up to 8x relative to the state-of-art.",
        CONDITION,
        "In 16 bits, and on very many ranks. On four, in float32: `stage 2: 2.3 times less than stage 0`.",
        "00",
        "reduces memory by up to 8x",
        source="DeepSpeed's training overview",
        address="https://www.deepspeed.ai/training/",
    ),
    Claim(
        "U",
        "Gradient accumulation is supposed to be mathematically equivalent to full batch training.",
        CONDITION,
        "`a quarter of the mean gives the full batch's gradient: False`; `the sum over all gives the full batch's "
        "gradient: True`. The tokens of all micro-batches must be counted first.",
        "14",
        "mathematically equivalent to full batch training",
        source="Hugging Face's blog, October 2024",
        address="https://huggingface.co/blog/gradient_accumulation",
    ),
    Claim(
        "V",
        "Reduce-scatter is 2 times faster than all-reduce.",
        CONDITION,
        "Where it is one: half the rounds of a ring, and half its bytes. `gloo's all_reduce writes 12 MB`, and `gloo's "
        "reduce_scatter writes 12 MB`, for it is an all-reduce inside.",
        "01",
        "reduce-scatter is 2 times faster",
        source="the Ultra-Scale Playbook, 2025",
        address="https://huggingface.co/spaces/nanotron/ultrascale-playbook/discussions/93/files",
    ),
)


def claim(key: str) -> Claim:
    """The claim with that key, or with which it was put together. Raises KeyError, which lists the keys."""
    for one in CLAIMS:
        if key in (one.key, *one.also):
            return one
    raise KeyError(f"there is no claim {key!r}; there are {', '.join(one.key for one in CLAIMS)}")


def claims(keys: Iterable[str] = ()) -> None:
    """Print the list as a table, or the claims with these keys."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    chosen = [claim(key) for key in keys] or CLAIMS
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading, width in (("", 7), ("claim", 38), ("verdict", 10), ("what decided", 50), ("", 2)):
        table.add_column(heading, width=width)
    for one in chosen:
        said = f"{one.words} ({one.source})" if one.source else one.words
        cells = (one.keys, said, one.verdict, one.because.replace("`", '"'), one.lesson)
        table.add_row(*(Text(cell) for cell in cells), end_section=True)
    printed = io.StringIO()
    Console(file=printed, width=123, color_system=None, force_jupyter=False, force_terminal=False).print(table)
    print("\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines()))


def page() -> str:
    """docs/claims.md."""
    counts = {verdict: sum(one.verdict == verdict for one in CLAIMS) for verdict in VERDICTS}
    found = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    lines = [
        "# Claims on trial",
        "",
        "<!-- Written by `python -m zerolab.lab.exercises.verdicts`, from the list in that module. -->",
        "",
        "Claims about ZeRO that can be read in public articles, and in the documentation that the last rows name.",
        f"Each was tried in a lesson, whose measurement gave the verdict: {found}.",
        "Where a claim is about names, a source decides. What stands `in this type` is in that lesson, in its text",
        "or in what its cells print.",
        "",
        "| | claim | verdict | what decided | lesson |",
        "|---|---|---|---|---|",
    ]
    for one in CLAIMS:
        words, because = (text.replace("|", "\\|") for text in (one.words, one.because))
        lesson = next((ROOT / "solutions").glob(f"{one.lesson}_*.py")).stem
        link = f"[{one.lesson}](../lessons/{lesson}.ipynb), {one.heading.lower().rstrip('?')}"
        said = f"{words} ([{one.source}]({one.address}))" if one.source else words
        lines.append(f"| {one.keys} | {said} | **{one.verdict}** | {because} | {link} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
