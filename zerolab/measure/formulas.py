"""What a stage should hold and move, from the numbers of parameters and ranks alone.

Ψ parameters, N ranks, Adam. Bytes held per rank when backward returns, and elements moved per step and rank:

    stage        fp32            bf16 compute, fp32 masters    moved
    0  DDP       16Ψ             16Ψ                           2Ψ(N-1)/N
    1  Zero1      8Ψ +  8Ψ/N      4Ψ + 12Ψ/N                   2Ψ(N-1)/N
    2  Zero2      4Ψ + 12Ψ/N      2Ψ + 14Ψ/N                   2Ψ(N-1)/N
    3  Zero3           16Ψ/N           14Ψ/N                   (3Ψ - Ψ_root)(N-1)/N

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, sections 3.1 and 5 (memory) and 7 (communication); `paper_state_bytes` is its Figure 1.
Padding is left out: each unit is padded to a multiple of N elements, and each parameter to 16 bytes.
"""

from __future__ import annotations

import torch

from zerolab.engine.precision import KEEP, Precision

CATEGORIES = ("parameters", "gradients", "optimizer")

ADAM_BYTES = 8  # per parameter: the averages of the gradient and of its square, in float32


def state_bytes(
    stage: int,
    world_size: int,
    parameters: int,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
    optimizer_bytes: float = ADAM_BYTES,
    offload: bool = False,
) -> dict[str, int]:
    """Bytes of model states per rank when backward returns, by category.

    offload: what is left on the device with `offload="optimizer"`; `host_state_bytes` is the rest.

    parameters: number of elements (Ψ), all trainable. own: their dtype before sharding.
    optimizer_bytes: what the optimizer keeps per parameter (Adam 8, SGD with momentum 4, SGD 0).

    Masters are parameters that the optimizer updates. Where masters and a copy for the computation both exist, both
    count as parameters. (The paper counts masters as optimizer state, which changes no total.)
    """
    _check(stage, world_size, parameters)
    master, compute, reduce = precision.dtypes(own, trainable=True)
    whole, share = parameters, parameters / world_size
    if offload:
        if stage == 0:
            raise ValueError("stage 0 has no offload")
        held = share if stage >= 3 else whole
        return {"parameters": round(held * compute.itemsize), "gradients": 0, "optimizer": 0}
    # What the optimizer updates lies inside what forward sees, unless that is another dtype or is not kept.
    if master == compute:
        weights = (share if stage >= 3 else whole) * master.itemsize
    else:
        copy = 0 if stage >= 3 else whole
        weights = copy * compute.itemsize + (share if stage >= 1 else whole) * master.itemsize
    return {
        "parameters": round(weights),
        "gradients": round((share if stage >= 2 else whole) * reduce.itemsize),
        "optimizer": round((share if stage >= 1 else whole) * optimizer_bytes),
    }


def host_state_bytes(
    world_size: int,
    parameters: int,
    precision: Precision = KEEP,
    own: torch.dtype = torch.float32,
    optimizer_bytes: float = ADAM_BYTES,
) -> dict[str, int]:
    """Bytes per rank on the host with `offload="optimizer"`, when backward returns: 14Ψ/N in bf16, 16Ψ/N in fp32.

    The same in stages 1, 2 and 3: a slice of masters, of gradients in the reduce dtype, and of the optimizer's state,
    which is all that stage 3 holds without offload.
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
    """Bytes that one rank sends in one step (one forward and backward) in a ring: (N-1)/N of each payload.

    parameters: number of elements (Ψ). root: how many of them the root unit holds (Ψ_root). It is gathered once, and
    stays from its forward to its reduction; every other unit is gathered for its forward and again for its backward.

    Gradients travel in the reduce dtype and parameters in the compute dtype. The all-reduce of stage 0 is a
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

    The all-reduce of its shard's mean, in the reduce dtype. What it sends inside its replica is `moved_bytes` with
    `world_size` S. Without the mesh, all of `moved_bytes` of R*S ranks goes over the slowest link in a ring.
    """
    replicas, size = mesh
    _check(1, size, parameters)
    _, _, reduce = precision.dtypes(own, trainable=True)
    return round(2 * parameters / size * reduce.itemsize * (replicas - 1) / replicas)


def paper_state_bytes(stage: int, world_size: int, parameters: float, k: float = 12) -> float:
    """The paper's bytes per rank: 16-bit parameters (2Ψ) and gradients (2Ψ), and KΨ for all that the optimizer needs.

    k: bytes per parameter of masters, momentum and variance; 12 for Adam (section 3.1). Its stage 3 keeps a 16-bit
    copy of the slice beside the masters, 2Ψ/N that `state_bytes` does not have: there each gather makes it anew.
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
) -> float:
    """Model states per rank in bytes for each parameter of the model: 4 + 12/N for stage 1 in bf16 with Adam."""
    many = 10**15  # so that rounding to whole bytes does not show
    return sum(state_bytes(stage, world_size, many, precision, own, optimizer_bytes).values()) / many


def activation_bytes(
    tokens: int,
    layers: int,
    width: int,
    vocabulary: int,
    compute: torch.dtype = torch.bfloat16,
    checkpointing: bool = False,
) -> int:
    """Bytes of activations that a GPT (`zerolab.tasks.models.GPT`) holds on a rank when forward returns.

    tokens: of this rank's batch, sequences times length. Attention is fused, so that nothing grows with the square of
    the length; there is no dropout.

    A block keeps 16 tensors of (tokens, width): the input and result of both norms (4), queries, keys and values (3),
    what attention gives (1), and twice the four times wider inside of the MLP (8). After the blocks come the input and
    result of the last norm, and the logarithms of the probabilities in float32. With checkpointing a block keeps its
    input alone; in backward one block at a time is computed again, and then has its 16. Left out: a few numbers per
    token for norms and attention, below 1 % from a width of 512 on.

    (The paper, section 3.2, counts 12 tensors a block; Korthikanti et al., arXiv 2205.05198, count 17 and 5 for
    attention that is not fused, with dropout.)
    """
    if min(tokens, layers, width, vocabulary) < 1:
        raise ValueError(f"tokens, layers, width, vocabulary must be 1 or more: {tokens, layers, width, vocabulary}")
    row = tokens * width * compute.itemsize
    return (1 if checkpointing else 16) * layers * row + 2 * row + 4 * tokens * vocabulary


def _check(stage: int, world_size: int, parameters: float) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, not {stage!r}")
    if world_size < 1 or parameters < 0:
        raise ValueError(f"world_size must be 1 or more and parameters 0 or more, not {world_size} and {parameters}")
