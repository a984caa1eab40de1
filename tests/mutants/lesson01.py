"""Lesson 01: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson01 import ALL_GATHER, REDUCE_SCATTER

from .sources import edit

# ---------------------------------------------------------------------- 01.1

REDUCE_SCATTER_INTO_CHUNKS = """\
def ring_reduce_scatter(chunks, rank, world_size, exchange):
    for step in range(world_size - 1):
        send = (rank - step - 1) % world_size
        add = (rank - step - 2) % world_size
        chunks[add] += exchange(chunks[send], (rank + 1) % world_size, (rank - 1) % world_size)
    return chunks[rank]
"""

REDUCE_SCATTER_LEFTWARDS = """\
import torch


def ring_reduce_scatter(chunks, rank, world_size, exchange):
    full = torch.stack(list(chunks))  # (N, S)
    for distance in range(1, world_size):  # the ring turned round: to the left
        passing = (rank + distance) % world_size
        received = exchange(full[passing], to=(rank - 1) % world_size, source=(rank + 1) % world_size)
        full[(passing + 1) % world_size] += received
    return full[rank].clone()
"""

REDUCE_SCATTER_MUTANTS = {
    "the other way round, numbers kept": (
        edit(REDUCE_SCATTER, "to=right, source=left", "to=left, source=right"),
        "but the chunk numbers are for a ring to the right",
    ),
    "returns another chunk": (
        edit(REDUCE_SCATTER_INTO_CHUNKS, "return chunks[rank]", "return chunks[rank - 1]"),
        "owns chunk",
    ),
    "off by one chunk": (
        edit(REDUCE_SCATTER, "chunks[(rank - 1) % world_size]", "chunks[rank]", "rank - 2 - step", "rank - 1 - step"),
        "off by one chunk",
    ),
    "passes on without adding": (
        edit(REDUCE_SCATTER, "received + chunks[(rank - 2 - step) % world_size]", "received"),
        "only rank",
    ),
    "one round too few": (edit(REDUCE_SCATTER, "range(world_size - 1)", "range(world_size - 2)"), "one round too few"),
    "one round too many": (edit(REDUCE_SCATTER, "range(world_size - 1)", "range(world_size)"), "one round too many"),
    "averages": (edit(REDUCE_SCATTER, "return partial", "return partial / world_size"), "averaged"),
    "adds the own chunk twice": (
        edit(REDUCE_SCATTER, "received + chunks", "received + 2 * chunks"),
        "it should hold every rank's exactly once",
    ),
    "adds to another chunk": (
        edit(REDUCE_SCATTER, "rank - 2 - step", "rank - 3 - step"),
        "different chunks were added",
    ),
    "wrong neighbour": (edit(REDUCE_SCATTER, "source=left", "source=right"), "neighbours are mixed up"),
    "skips the modulo": (
        edit(REDUCE_SCATTER, "right, left = (rank + 1) % world_size", "right, left = rank + 1"),
        "did you take % N?",
    ),
    "sends everything in every round": (
        """\
import torch


def ring_reduce_scatter(chunks, rank, world_size, exchange):
    mine = torch.cat(list(chunks))
    total, passing = mine.clone(), mine
    for _ in range(world_size - 1):
        passing = exchange(passing, (rank + 1) % world_size, (rank - 1) % world_size)
        total += passing
    return total.view(world_size, -1)[rank]
""",
        "extra traffic",
    ),
    "straight to the owners, no ring": (
        """\
def ring_reduce_scatter(chunks, rank, world_size, exchange):
    total = chunks[rank].clone()
    for d in range(1, world_size):
        to, source = (rank + d) % world_size, (rank - d) % world_size
        total += exchange(chunks[to], to, source)
    return total
""",
        "talks to",
    ),
    "a collective instead": (
        """\
import torch
import torch.distributed as dist


def ring_reduce_scatter(chunks, rank, world_size, exchange):
    full = torch.stack(list(chunks))
    dist.all_reduce(full)
    for _ in range(world_size - 1):
        exchange(full[0], (rank + 1) % world_size, (rank - 1) % world_size)
    return full[rank]
""",
        "a collective did the work",
    ),
    "sends its own chunk first": (
        edit(REDUCE_SCATTER_INTO_CHUNKS, "rank - step - 1", "rank - step", "rank - step - 2", "rank - step - 1"),
        "the ring is sound, but rank 0 sent chunk 0 first",
    ),
    "asks the process group": (
        edit(
            REDUCE_SCATTER_INTO_CHUNKS,
            "    for step",
            "    import torch.distributed as dist\n"
            "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            "    for step",
        ),
        "use the arguments rank and world_size",
    ),
    "keeps the first call's chunks": (
        "kept = []\n"
        + edit(REDUCE_SCATTER_INTO_CHUNKS, "    for step", "    kept.extend(chunks)\n    chunks = kept\n    for step"),
        "keep nothing from an earlier call",
    ),
    "writes over its own chunk": (edit(REDUCE_SCATTER_INTO_CHUNKS, "+= exchange", "= exchange"), "add your own chunk"),
    "returns all chunks": (
        edit(REDUCE_SCATTER_INTO_CHUNKS, "return chunks[rank]", "return chunks"),
        "return one chunk only",
    ),
    "messages past exchange": (
        """\
import torch
import torch.distributed as dist


def ring_reduce_scatter(chunks, rank, world_size, exchange):
    for step in range(world_size - 1):
        received = torch.empty_like(chunks[0])
        send = dist.P2POp(dist.isend, chunks[(rank - step - 1) % world_size], (rank + 1) % world_size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        chunks[(rank - step - 2) % world_size] += received
    return chunks[rank]
""",
        "send with exchange() only",
    ),
    "returns nothing": (edit(REDUCE_SCATTER, "return partial", "chunks[rank] = partial"), "`return` is missing"),
}

# ---------------------------------------------------------------------- 01.2

ALL_GATHER_LEFTWARDS = """\
def ring_all_gather(chunk, rank, world_size, exchange):
    arrived = [chunk]  # of rank, rank + 1, rank + 2, ...
    while len(arrived) < world_size:
        arrived.append(exchange(arrived[-1], to=(rank - 1) % world_size, source=(rank + 1) % world_size))
    return [arrived[(other - rank) % world_size] for other in range(world_size)]
"""

ALL_GATHER_INTO_ONE = """\
import torch


def ring_all_gather(chunk, rank, world_size, exchange):
    full = torch.empty(world_size, *chunk.shape)
    full[rank] = chunk
    at = rank
    for _ in range(world_size - 1):
        received = exchange(full[at], (rank + 1) % world_size, (rank - 1) % world_size)
        at = (at - 1) % world_size
        full[at] = received
    return list(full)
"""

ALL_GATHER_BY_OWNER = """\
def ring_all_gather(chunk, rank, world_size, exchange):
    found, owner = {rank: chunk}, rank
    while len(found) < world_size:
        received = exchange(found[owner], to=(rank + 1) % world_size, source=(rank - 1) % world_size)
        owner = (owner - 1) % world_size
        found[owner] = received
    return [found[rank] for rank in sorted(found)]
"""

_ADDS = """\
def ring_all_gather(chunk, rank, world_size, exchange):
    chunks = [None] * world_size
    chunks[rank] = chunk
    for step in range(world_size - 1):
        chunk += exchange(chunk, (rank + 1) % world_size, (rank - 1) % world_size)
        chunks[(rank - 1 - step) % world_size] = chunk
    return chunks
"""

ALL_GATHER_MUTANTS = {
    "never stores its own": (
        edit(ALL_GATHER, "chunks[rank] = passing = chunk", "passing = chunk"),
        "your own chunk is missing",
    ),
    "leaves its own place empty": (
        edit(
            ALL_GATHER,
            "[None] * world_size",
            "[__import__('torch').empty_like(chunk) for _ in range(world_size)]",
            "chunks[rank] = passing = chunk",
            "passing = chunk",
        ),
        "your own chunk is missing",
    ),
    "adds up in place": (_ADDS, "an all-gather adds nothing"),
    "copies into its argument": (
        edit(
            _ADDS,
            "chunk += exchange(",
            "chunk.copy_(exchange(",
            "% world_size)\n        chunks",
            "% world_size))\n        chunks",
        ),
        "one tensor, N times in the list",
    ),
    "changes its argument": (
        edit(
            _ADDS,
            "chunk += exchange(",
            "chunk.copy_(exchange(",
            "% world_size)\n        chunks",
            "% world_size))\n        chunks",
            "= chunk\n",
            "= chunk.clone()\n",
        ),
        "leave it as it is",
    ),
    "asks the process group": (
        "import torch.distributed as dist\n\n\n"
        + edit(
            ALL_GATHER,
            "    right, left",
            "    rank, world_size = dist.get_rank(), dist.get_world_size()\n    right, left",
        ),
        "use the arguments rank and world_size",
    ),
    "sends what has not come yet": (
        edit(
            ALL_GATHER,
            "passing = exchange(passing",
            "passing = exchange(chunks[(rank - 1 - step) % world_size]",
        ),
        "still empty",
    ),
    "keeps the list of an earlier call": (
        """\
def ring_all_gather(chunk, rank, world_size, exchange, arrived=[]):
    arrived.append(chunk)
    for _ in range(world_size - 1):
        arrived.append(exchange(arrived[-1], (rank + 1) % world_size, (rank - 1) % world_size))
    return [arrived[(rank - other) % world_size] for other in range(world_size)]
""",
        "keep nothing from an earlier call",
    ),
    "joined together": (
        "import torch\n\n\n" + edit(ALL_GATHER, "return chunks", "return torch.cat(chunks)"),
        "not the chunks joined together",
    ),
    "shifted by one": (edit(ALL_GATHER, "return chunks", "return chunks[1:] + chunks[:1]"), "in the wrong places"),
    "adds": (edit(ALL_GATHER, "= passing\n    return", "= passing + chunk\n    return"), "adds nothing"),
    "sends the own chunk every round": (
        edit(ALL_GATHER, "passing = exchange(passing", "passing = exchange(chunk"),
        "each round sent your own chunk again",
    ),
    "order of arrival": (
        edit(ALL_GATHER, "chunks[rank] =", "chunks[0] =", "(rank - 1 - step) % world_size", "step + 1"),
        "in order of arrival",
    ),
    "off by one place": (edit(ALL_GATHER, "rank - 1 - step", "rank - step"), "off by one place"),
    "one round too few": (edit(ALL_GATHER, "range(world_size - 1)", "range(world_size - 2)"), "one round too few"),
    "one round too many": (edit(ALL_GATHER, "range(world_size - 1)", "range(world_size)"), "one round too many"),
    "the same tensor in every place": (
        edit(ALL_GATHER, "return chunks", "return [passing] * world_size"),
        "the same chunk",
    ),
    "forgets its own": (
        edit(ALL_GATHER, "return chunks", "return chunks[:rank] + chunks[rank + 1 :]"),
        "your own included",
    ),
    "wrong neighbour": (edit(ALL_GATHER, "source=left", "source=right"), "neighbours are mixed up"),
    "straight to everyone, no ring": (
        """\
def ring_all_gather(chunk, rank, world_size, exchange):
    chunks = [chunk] * world_size
    for d in range(1, world_size):
        source = (rank - d) % world_size
        chunks[source] = exchange(chunk, (rank + d) % world_size, source)
    return chunks
""",
        "talks to",
    ),
    "sends everything in every round": (
        """\
import torch


def ring_all_gather(chunk, rank, world_size, exchange):
    full = torch.zeros(world_size, *chunk.shape)
    full[rank] = chunk
    for _ in range(world_size - 1):
        received = exchange(full, (rank + 1) % world_size, (rank - 1) % world_size)
        full = torch.maximum(full, received)
    return list(full)
""",
        "extra traffic",
    ),
    "a collective instead": (
        """\
import torch
import torch.distributed as dist


def ring_all_gather(chunk, rank, world_size, exchange):
    chunks = [torch.empty_like(chunk) for _ in range(world_size)]
    dist.all_gather(chunks, chunk)
    return chunks
""",
        "a collective did the work",
    ),
}

RIGHT = {
    "01.1": (REDUCE_SCATTER_INTO_CHUNKS, REDUCE_SCATTER_LEFTWARDS),
    "01.2": (ALL_GATHER_LEFTWARDS, ALL_GATHER_INTO_ONE, ALL_GATHER_BY_OWNER),
}

WRONG = {
    "01.1": REDUCE_SCATTER_MUTANTS,
    "01.2": ALL_GATHER_MUTANTS,
}
