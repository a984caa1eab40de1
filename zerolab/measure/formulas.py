"""What a stage should hold and send, given only the number of parameters and the number of ranks.

Ψ parameters, N ranks, Adam. Bytes held per rank when backward returns, and elements sent per step and rank:

    stage        fp32            bf16 compute, fp32 masters    sent
    0  DDP       16Ψ             16Ψ                           2Ψ(N-1)/N
    1  Zero1      8Ψ +  8Ψ/N      4Ψ + 12Ψ/N                   2Ψ(N-1)/N
    2  Zero2      4Ψ + 12Ψ/N      2Ψ + 14Ψ/N                   2Ψ(N-1)/N
    3  Zero3           16Ψ/N           14Ψ/N                   (3Ψ - Ψ_root)(N-1)/N

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, sections 3.1 and 5 (memory) and 7 (communication); `paper_state_bytes` is its Figure 1.
The formulas leave out padding: each unit is padded to a multiple of N elements, each parameter to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerolab.engine.precision import KEEP, Precision

CATEGORIES = ("parameters", "gradients", "optimizer")

MUON_BYTES = 4  # per parameter: the momentum, float32
ADAM_BYTES = 8  # per parameter: running averages of the gradient and of its square, both float32


def state_bytes(
    stage: int,
    world_size: int,
    parameters: int,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
    optimizer_bytes: float = ADAM_BYTES,
    offload: bool = False,
    owned: bool = False,
) -> dict[str, int]:
    """Bytes of model states per rank when backward returns, by category.

    parameters: number of elements (Ψ), all trainable. own: their dtype before sharding.
    optimizer_bytes: what the optimizer keeps per parameter (Adam 8, SGD with momentum 4, SGD 0).
    owned: it is an `OwnerOptimizer`, whose state is shared out in stage 0, too.
    offload: count what stays on the device with `offload="optimizer"`; `host_state_bytes` gives the rest.

    Masters are the parameters that the optimizer updates. If there is also a copy in the compute dtype, both count as
    parameters. (The paper counts masters as optimizer state; totals are the same.)

    Raises ValueError for an impossible stage or size, and for offload in stage 0.
    """
    _check(stage, world_size, parameters)
    master, compute, reduce = precision.dtypes(own, trainable=True)
    full, share = parameters, parameters / world_size
    if offload:
        if stage == 0:
            raise ValueError("stage 0 has no offload")
        held = share if stage >= 3 else full
        return {"parameters": round(held * compute.itemsize), "gradients": 0, "optimizer": 0}
    if master == compute:  # the optimizer updates the same storage that forward reads
        weights = (share if stage >= 3 else full) * master.itemsize
    else:  # stage 3 keeps no copy in the compute dtype: each gather makes one
        copy = 0 if stage >= 3 else full
        weights = copy * compute.itemsize + (share if stage >= 1 else full) * master.itemsize
    return {
        "parameters": round(weights),
        "gradients": round((share if stage >= 2 else full) * reduce.itemsize),
        "optimizer": round((share if stage >= 1 or owned else full) * optimizer_bytes),
    }


def host_state_bytes(
    world_size: int,
    parameters: int,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
    optimizer_bytes: float = ADAM_BYTES,
) -> dict[str, int]:
    """Bytes per rank on the host when backward returns, with `offload="optimizer"`: 14Ψ/N in bf16, 16Ψ/N in fp32.

    Stages 1, 2 and 3 keep the same there: this rank's shard of the masters, of the gradients in the reduce dtype, and
    of the optimizer state. That is everything stage 3 holds without offload.
    (ZeRO-Offload, arXiv 2101.06840, section 4.)
    """
    return state_bytes(3, world_size, parameters, precision, own, optimizer_bytes)


def moved_bytes(
    stage: int,
    world_size: int,
    parameters: int,
    root: int = 0,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
) -> int:
    """Bytes that one rank sends in one step (one forward, one backward) as in a ring: (N-1)/N of each payload.

    parameters: number of elements (Ψ). root: how many of them the root unit holds (Ψ_root). In stage 3 the root is
    gathered once per step, and released after its reduction; every other unit is gathered for its forward and again
    for its backward.

    Gradients travel in the reduce dtype, parameters in the compute dtype. The all-reduce of stage 0 counts as a
    reduce-scatter and an all-gather, both of gradients. (Paper, section 7.)
    """
    _check(stage, world_size, parameters)
    if not 0 <= root <= parameters:
        raise ValueError(f"root must be between 0 and the number of parameters, {parameters}, not {root}")
    _, compute, reduce = precision.dtypes(own, trainable=True)
    gradients = parameters * reduce.itemsize
    if stage == 0:
        payload = 2 * gradients
    elif stage <= 2:
        payload = gradients + parameters * compute.itemsize
    else:
        payload = gradients + (2 * parameters - root) * compute.itemsize
    return round(payload * (world_size - 1) / world_size)


def between_bytes(
    mesh: tuple[int, int], parameters: int, precision: Precision = KEEP, own: torch.dtype = torch.float32
) -> int:
    """Bytes that one rank sends to other replicas in one step with `mesh=(R, S)`: 2(Ψ/S)(R-1)/R elements of gradients.

    They are the all-reduce of its shard of the mean gradient, in the reduce dtype. Inside its replica it sends
    `moved_bytes` with `world_size` S. Without a mesh, one ring of R*S ranks crosses the slowest link with everything.
    """
    replicas, size = mesh
    _check(1, size, parameters)
    _, _, reduce = precision.dtypes(own, trainable=True)
    return round(2 * parameters / size * reduce.itemsize * (replicas - 1) / replicas)


def owner_moved_bytes(stage: int, world_size: int, elements: int, master: torch.dtype = torch.float32) -> float:
    """Bytes that one rank sends on average in a step of `OwnerOptimizer`, beside what the stage itself sends.

    elements: of the parameters that it updates (Ψ). Stages 1 to 3: 12Ψ(N-1)/N² in fp32. Of every parameter the owner
    lacks (N-1)/N on average; so much comes as gradient and as master, and so much goes back as the new master. That
    makes 3Ψ(N-1)/N elements, which N ranks share in sending. Stage 0: 4Ψ(N-1)/N, as owners spread full parameters.
    The exact number, which depends on where shards cut: `OwnerOptimizer.moved_bytes()`.
    """
    _check(stage, world_size, elements)
    away = elements * (world_size - 1) / world_size * master.itemsize
    return away if stage == 0 else 3 * away / world_size


def muon_bytes(
    world_size: int, shapes: Iterable[tuple[int, int]], fraction: float = 0.25
) -> dict[str, tuple[int, int]]:
    """Ways to give Muon whole matrices whose slices lie on N ranks: bytes of state held, and sent in a step, per rank.

    shapes: of the matrices. fraction: Dion's rank, of a matrix's smaller side. All in fp32, with even slices, beside
    what the stage sends itself. "owners" is `OwnerOptimizer`; the others were not built here:

    - "gather": the momentum stays in slices, and every rank gathers every matrix (Moonlight, arXiv 2502.16982).
    - "all-to-all": the momentum stays in slices; each rank gets whole matrices of its own, and sends their updates back
      (github.com/microsoft/dion, muon.py).
    - "Dion": a power iteration on slices; an all-reduce of (m+1)r elements for an m by n matrix, m <= n, of rank r, and
      nr elements of state more (arXiv 2504.05295v1, table 1).
    """
    _check(1, world_size, 1)
    sides = [(min(shape), max(shape)) for shape in shapes]
    all_of_it = sum(m * n for m, n in sides)
    others = (world_size - 1) / world_size
    ranks = [(m, n, max(1, round(fraction * m))) for m, n in sides]
    elements = {
        "gather": (all_of_it / world_size, all_of_it * others),
        "owners": (all_of_it / world_size, 3 * all_of_it * others / world_size),
        "all-to-all": (all_of_it / world_size, 2 * all_of_it * others / world_size),
        "Dion": (
            sum(m * n + n * r for m, n, r in ranks) / world_size,
            2 * sum((m + 1) * r for m, _, r in ranks) * others,
        ),
    }
    return {way: (round(4 * held), round(4 * sent)) for way, (held, sent) in elements.items()}


def paper_state_bytes(stage: int, world_size: int, parameters: float, k: float = 12) -> float:
    """The paper's bytes per rank: 2Ψ for 16-bit parameters, 2Ψ for gradients, and KΨ for all the optimizer needs.

    k: bytes per parameter of masters, momentum and variance; 12 for Adam (section 3.1). The paper's stage 3 also keeps
    a 16-bit copy of the masters' shard. `state_bytes` has no such 2Ψ/N, because here each gather makes its own copy.
    """
    _check(stage, world_size, parameters)
    share = parameters / world_size
    weights = 2 * (share if stage >= 3 else parameters)
    gradients = 2 * (share if stage >= 2 else parameters)
    return weights + gradients + k * (share if stage >= 1 else parameters)


def bytes_per_parameter(
    stage: int,
    world_size: int,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
    optimizer_bytes: float = ADAM_BYTES,
    offload: bool = False,
    owned: bool = False,
) -> float:
    """Bytes of model states on one rank, divided by Ψ: for example 4 + 12/N in stage 1, in bf16 with Adam."""
    many = 10**15  # so many that rounding to a byte does not show
    states = state_bytes(stage, world_size, many, precision, own, optimizer_bytes, offload, owned)
    return sum(states.values()) / many


def activation_bytes(
    tokens: int,
    layers: int,
    width: int,
    vocabulary: int,
    compute: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
) -> int:
    """Bytes of activations that a GPT (`zerolab.tasks.models.GPT`) holds on one rank when forward returns.

    tokens: in this rank's batch, sequences times length. Attention is fused, so nothing grows with the square of the
    length; there is no dropout.

    A block keeps 16 tensors of shape (tokens, width): the input and output of both norms (4), queries, keys and values
    (3), the output of attention (1), and the two hidden tensors of the MLP, each four times as wide (8). After the
    blocks come the input and output of the last norm, and the log-probabilities in float32. With checkpointing a block
    keeps only its input; backward then recomputes one block at a time, which has its 16 tensors meanwhile. Left out: a
    few numbers per token for norms and attention, less than 1 % from a width of 512 up.

    (The paper, section 3.2, counts 12 tensors a block; Korthikanti et al., arXiv 2205.05198, count 17, and 5 more for
    attention that is not fused, with dropout.)
    """
    sizes = (tokens, layers, width, vocabulary)
    if min(sizes) < 1:
        raise ValueError(f"tokens, layers, width and vocabulary must be 1 or more, not {sizes}")
    row = tokens * width * compute.itemsize
    return (1 if checkpointing else 16) * layers * row + 2 * row + 4 * tokens * vocabulary


def _check(stage: int, world_size: int, parameters: float) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    if world_size < 1 or parameters < 0:
        raise ValueError(f"world_size must be 1 or more and parameters 0 or more, not {world_size} and {parameters}")
