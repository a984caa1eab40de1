"""Lesson 01: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson01 import ALL_GATHER, REDUCE_SCATTER

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

REPLACED = (
    "only one rank's part of a chunk is in the result: what comes in replaces your own; add your own to it, and pass "
    "on the sum"
)

REDUCE_SCATTER_MISTAKES = {
    "the other way round, numbers kept": Mistake(
        edit(REDUCE_SCATTER, "to=right, source=left", "to=left, source=right"),
        (
            "contributions to different chunks were added up: you send to the left, but the chunk numbers are for"
            " a ring to the right"
        ),
    ),
    "returns another chunk": Mistake(
        edit(REDUCE_SCATTER_INTO_CHUNKS, "return chunks[rank]", "return chunks[rank - 1]"),
        "the ring is right, but what you return is another rank's chunk: rank r owns chunk r, `chunks[rank]`",
    ),
    "off by one chunk": Mistake(
        edit(REDUCE_SCATTER, "chunks[(rank - 1) % world_size]", "chunks[rank]", "rank - 2 - step", "rank - 1 - step"),
        (
            "off by one chunk: the ring is sound, but it starts with your own chunk, so another rank's sum is "
            "finished here; rank r owns chunk r, so send chunk r-1 first"
        ),
    ),
    "passes on without adding": Mistake(
        edit(REDUCE_SCATTER, "received + chunks[(rank - 2 - step) % world_size]", "received"),
        REPLACED,
    ),
    "one round too few": Mistake(
        edit(REDUCE_SCATTER, "range(world_size - 1)", "range(world_size - 2)"),
        "one round too few: a ring of N ranks needs N-1 rounds, so that every chunk is home at the end",
    ),
    "one round too many": Mistake(
        edit(REDUCE_SCATTER, "range(world_size - 1)", "range(world_size)"),
        (
            "one round too many: after N-1 rounds every chunk is at home, and another round adds a part twice or "
            "sends for nothing"
        ),
    ),
    "averages": Mistake(
        edit(REDUCE_SCATTER, "return partial", "return partial / world_size"),
        "averaged: the result is divided by N, but the exercise asks for the sum",
    ),
    "adds the own chunk twice": Mistake(
        edit(REDUCE_SCATTER, "received + chunks", "received + 2 * chunks"),
        "your own part is in the sum more than once: each rank's part belongs in it exactly once",
    ),
    "adds to another chunk": Mistake(
        edit(REDUCE_SCATTER, "rank - 2 - step", "rank - 3 - step"),
        (
            "contributions to different chunks were added up: what comes in belongs to another chunk than the one"
            " you add; in round s rank r receives chunk r-2-s"
        ),
    ),
    "wrong neighbour": Mistake(
        edit(REDUCE_SCATTER, "source=left", "source=right"),
        (
            "the neighbours are mixed up: if rank r sends to rank s, then rank s must receive from r; send to the"
            " right, receive from the left"
        ),
    ),
    "skips the modulo": Mistake(
        edit(REDUCE_SCATTER, "right, left = (rank + 1) % world_size", "right, left = rank + 1"),
        "the last rank's right neighbour is rank 0: did you take the rank % N?",
    ),
    "sends everything in every round": Mistake(
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
        "extra traffic: one round moves one chunk, 1/N of the tensor, not everything",
    ),
    "straight to the owners, no ring": Mistake(
        """\
def ring_reduce_scatter(chunks, rank, world_size, exchange):
    total = chunks[rank].clone()
    for d in range(1, world_size):
        to, source = (rank + d) % world_size, (rank - d) % world_size
        total += exchange(chunks[to], to, source)
    return total
""",
        (
            "in a ring a rank talks to its two neighbours only; you send each chunk straight to its owner, which "
            "on a cluster crosses every link"
        ),
    ),
    "a collective instead": Mistake(
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
        "a collective did the work that the ring is meant to do: use exchange() only",
    ),
    "sends its own chunk first": Mistake(
        edit(REDUCE_SCATTER_INTO_CHUNKS, "rank - step - 1", "rank - step", "rank - step - 2", "rank - step - 1"),
        (
            "off by one chunk: the ring is sound, but it starts with your own chunk, so another rank's sum is "
            "finished here; rank r owns chunk r, so send chunk r-1 first"
        ),
    ),
    "asks the process group": Mistake(
        edit(
            REDUCE_SCATTER_INTO_CHUNKS,
            "    for step",
            "    import torch.distributed as dist\n"
            "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            "    for step",
        ),
        (
            "right when all ranks take part, but not when some do: use the arguments rank and world_size, not "
            "what dist.get_rank() and dist.get_world_size() say"
        ),
    ),
    "keeps the first call's chunks": Mistake(
        "kept = []\n"
        + edit(REDUCE_SCATTER_INTO_CHUNKS, "    for step", "    kept.extend(chunks)\n    chunks = kept\n    for step"),
        (
            "right the first time, but a second call still works with the first one's chunks: keep nothing from "
            "an earlier call"
        ),
    ),
    "writes over its own chunk": Mistake(
        edit(REDUCE_SCATTER_INTO_CHUNKS, "+= exchange", "= exchange"),
        REPLACED,
    ),
    "returns all chunks": Mistake(
        edit(REDUCE_SCATTER_INTO_CHUNKS, "return chunks[rank]", "return chunks"),
        "the result is the whole list: return one chunk only, the one with this rank's number",
    ),
    "messages past exchange": Mistake(
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
        "send with exchange() only: the messages of other functions are not those that the exercise counts",
    ),
    "returns nothing": Mistake(
        edit(REDUCE_SCATTER, "return partial", "chunks[rank] = partial"),
        "the function returns nothing: `return` is missing",
    ),
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

ALL_GATHER_MISTAKES = {
    "never stores its own": Mistake(
        edit(ALL_GATHER, "chunks[rank] = passing = chunk", "passing = chunk"),
        "your own chunk is missing: the list must hold it in place `rank`",
    ),
    "leaves its own place empty": Mistake(
        edit(
            ALL_GATHER,
            "[None] * world_size",
            "[__import__('torch').empty_like(chunk) for _ in range(world_size)]",
            "chunks[rank] = passing = chunk",
            "passing = chunk",
        ),
        "your own chunk is missing: the memory in place `rank` of the list was never written to",
    ),
    "adds up in place": Mistake(
        _ADDS,
        "chunks were added up, but an all-gather adds nothing: it passes on what came in as it is",
    ),
    "copies into its argument": Mistake(
        edit(
            _ADDS,
            "chunk += exchange(",
            "chunk.copy_(exchange(",
            "% world_size)\n        chunks",
            "% world_size))\n        chunks",
        ),
        ("one tensor is N times in the list, and `chunk` was written over: give what comes in a place of its own"),
    ),
    "changes its argument": Mistake(
        edit(
            _ADDS,
            "chunk += exchange(",
            "chunk.copy_(exchange(",
            "% world_size)\n        chunks",
            "% world_size))\n        chunks",
            "= chunk\n",
            "= chunk.clone()\n",
        ),
        "`chunk` has changed: what comes in was copied into the argument; leave it as it is",
    ),
    "asks the process group": Mistake(
        "import torch.distributed as dist\n\n\n"
        + edit(
            ALL_GATHER,
            "    right, left",
            "    rank, world_size = dist.get_rank(), dist.get_world_size()\n    right, left",
        ),
        (
            "right when all ranks take part, but not when some do: use the arguments rank and world_size, not "
            "what dist.get_rank() and dist.get_world_size() say"
        ),
    ),
    "sends what has not come yet": Mistake(
        edit(
            ALL_GATHER,
            "passing = exchange(passing",
            "passing = exchange(chunks[(rank - 1 - step) % world_size]",
        ),
        "that place of the list is still empty: send your own chunk first, then what came in last",
    ),
    "keeps the list of an earlier call": Mistake(
        """\
def ring_all_gather(chunk, rank, world_size, exchange, arrived=[]):
    arrived.append(chunk)
    for _ in range(world_size - 1):
        arrived.append(exchange(arrived[-1], (rank + 1) % world_size, (rank - 1) % world_size))
    return [arrived[(rank - other) % world_size] for other in range(world_size)]
""",
        (
            "right the first time, but a second call still holds the first one's chunks: keep nothing from an "
            "earlier call (a default argument is made once)"
        ),
    ),
    "joined together": Mistake(
        "import torch\n\n\n" + edit(ALL_GATHER, "return chunks", "return torch.cat(chunks)"),
        "the chunks are joined into one tensor: return a list with one tensor per rank",
    ),
    "shifted by one": Mistake(
        edit(ALL_GATHER, "return chunks", "return chunks[1:] + chunks[:1]"),
        ("all chunks are there, but one place away from where they belong: the chunk of rank r belongs in place r"),
    ),
    "adds": Mistake(
        edit(ALL_GATHER, "= passing\n    return", "= passing + chunk\n    return"),
        "your own chunk was added to one that came in, but an all-gather adds nothing",
    ),
    "sends the own chunk every round": Mistake(
        edit(ALL_GATHER, "passing = exchange(passing", "passing = exchange(chunk"),
        "each round sent your own chunk again: pass on what came in the round before",
    ),
    "order of arrival": Mistake(
        edit(ALL_GATHER, "chunks[rank] =", "chunks[0] =", "(rank - 1 - step) % world_size", "step + 1"),
        (
            "all chunks are there, but in order of arrival, your own first: put them in rank order, the chunk of "
            "rank r in place r"
        ),
    ),
    "off by one place": Mistake(
        edit(ALL_GATHER, "rank - 1 - step", "rank - step"),
        (
            "off by one place: what comes in first is the left neighbour's chunk, rank-1, and it was stored as "
            "another rank's"
        ),
    ),
    "one round too few": Mistake(
        edit(ALL_GATHER, "range(world_size - 1)", "range(world_size - 2)"),
        "one round too few: a ring of N ranks needs N-1 rounds, so that every chunk has come by",
    ),
    "one round too many": Mistake(
        edit(ALL_GATHER, "range(world_size - 1)", "range(world_size)"),
        "one round too many: after N-1 rounds every chunk is there, and another one only brings back your own",
    ),
    "the same tensor in every place": Mistake(
        edit(ALL_GATHER, "return chunks", "return [passing] * world_size"),
        "the same chunk is in every place of the list: keep each one that comes in",
    ),
    "forgets its own": Mistake(
        edit(ALL_GATHER, "return chunks", "return chunks[:rank] + chunks[rank + 1 :]"),
        "the list needs one chunk per rank, your own included",
    ),
    "wrong neighbour": Mistake(
        edit(ALL_GATHER, "source=left", "source=right"),
        (
            "the neighbours are mixed up: if rank r sends to rank s, then rank s must receive from r; send to the"
            " right, receive from the left"
        ),
    ),
    "straight to everyone, no ring": Mistake(
        """\
def ring_all_gather(chunk, rank, world_size, exchange):
    chunks = [chunk] * world_size
    for d in range(1, world_size):
        source = (rank - d) % world_size
        chunks[source] = exchange(chunk, (rank + d) % world_size, source)
    return chunks
""",
        (
            "in a ring a rank talks to its two neighbours only; you send to every rank, which on a cluster "
            "crosses every link"
        ),
    ),
    "sends everything in every round": Mistake(
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
        "extra traffic: one round moves one chunk, not all of them",
    ),
    "a collective instead": Mistake(
        """\
import torch
import torch.distributed as dist


def ring_all_gather(chunk, rank, world_size, exchange):
    chunks = [torch.empty_like(chunk) for _ in range(world_size)]
    dist.all_gather(chunks, chunk)
    return chunks
""",
        "a collective did the work that the ring is meant to do: use exchange() only",
    ),
}

RIGHT = {
    "01.1": (REDUCE_SCATTER_INTO_CHUNKS, REDUCE_SCATTER_LEFTWARDS),
    "01.2": (ALL_GATHER_LEFTWARDS, ALL_GATHER_INTO_ONE, ALL_GATHER_BY_OWNER),
}

MISTAKES = {
    "01.1": REDUCE_SCATTER_MISTAKES,
    "01.2": ALL_GATHER_MISTAKES,
}
