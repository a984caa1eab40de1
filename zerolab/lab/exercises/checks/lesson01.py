"""Lesson 01: a ring, from send and receive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor, compare, forgot_to_return
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic

E = 4  # elements in a chunk


def check_calls(calls: list[Traffic], world: World, chunk_bytes: int) -> None:
    """N-1 exchanges of one chunk each, all with the same neighbours."""
    N = world.world_size
    foreign = [call.op for call in calls if call.op != "exchange"]
    if foreign:
        raise Wrong(
            f"{foreign[0]} was called", "a collective did the work that the ring is meant to do: use exchange() only"
        )
    sizes = [call.payload for call in calls]
    if any(size != chunk_bytes for size in sizes):
        size = next(size for size in sizes if size != chunk_bytes)
        raise Wrong(
            f"an exchange sent {size} bytes, and a chunk has {chunk_bytes}",
            "extra traffic: one round moves one chunk (1/N of the tensor), not everything",
        )
    if len(calls) != N - 1:
        raise Wrong(f"{len(calls)} exchanges, not {N - 1}", round_count(len(calls), N))
    right, left = (world.rank + 1) % N, (world.rank - 1) % N
    for call in calls:
        if (call.to, call.source) not in ((right, left), (left, right)):
            raise Wrong(
                f"sent to rank {call.to} and received from rank {call.source}",
                f"wrong neighbour: in a ring rank {world.rank} talks to {left} and {right} only",
            )


def check_reduce_scatter(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    bases = [values.base(E, number) for number in range(N)]
    with world.record() as calls:
        got = answer.ring_reduce_scatter([values.share(b, rank) for b in bases], rank, N, world.spy.exchange)
    if isinstance(got, (list, tuple)):
        raise Wrong(f"the result is a {type(got).__name__} of {len(got)}", f"return one chunk only, number {rank}")
    check_tensor("the result", got, (E,))

    def explain(got: Tensor) -> str:
        if len(calls) != N - 1:
            return round_count(len(calls), N)
        if torch.allclose(got * N, values.total(bases[rank], N)):
            return "averaged (divided by N), but the exercise asks for the sum"
        for number, b in enumerate(bases):
            shares = values.contributions(got, b, N)
            if shares == [1.0] * N:
                return (
                    f"off by one chunk: this is the finished sum of chunk {number}, but rank {rank} owns chunk {rank}; "
                    "start the first round with another chunk"
                )
            if shares is not None and number != rank:
                return f"this is chunk {number} ({values.in_words(shares)}), but rank {rank} owns chunk {rank}"
            if shares is not None and sorted(shares)[-2:] == [0.0, 1.0]:
                return (
                    f"only {values.in_words(shares)} to chunk {number} is in it: add your own chunk to what comes in, "
                    "and pass on the sum"
                )
            if shares is not None:
                return f"chunk {number} holds {values.in_words(shares)}; it should hold every rank's exactly once"
        if N > 2 and calls[0].to == (rank - 1) % N:
            return "different chunks were added up: you send left, but the chunk numbers are for a ring to the right"
        return "contributions to different chunks were added up: what comes in belongs to another chunk"

    compare(f"chunk {rank}", got, values.total(bases[rank], N), explain)
    check_calls(calls, world, E * 4)


def round_count(calls: int, N: int) -> str:
    if abs(calls - N + 1) == 1:
        few = "few" if calls < N - 1 else "many"
        return f"one round too {few}: a ring of N ranks needs N-1 rounds, and you made {calls}"
    return f"{calls} rounds, but a ring of {N} ranks needs {N - 1}"


def check_all_gather(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    shares = [values.base(E, number) for number in range(N)]
    mine = shares[rank].clone()
    with world.record() as calls:
        got = answer.ring_all_gather(mine, rank, N, world.spy.exchange)
    if not isinstance(got, (list, tuple)):
        likely = forgot_to_return(got) or "return a list with one tensor per rank, not the chunks joined together"
        raise Wrong(f"the result is a {type(got).__name__}, not a list of tensors", likely)
    if len(got) != N:
        raise Wrong(f"the list has {len(got)} chunks, not {N}", "the list needs one chunk per rank, your own included")
    empty = [place for place, chunk in enumerate(got) if not isinstance(chunk, Tensor)]
    if empty:
        fewer = len(calls) < N - 1
        raise Wrong(
            f"place {empty[0]} of the list holds {got[empty[0]]!r}",
            round_count(len(calls), N) if fewer else "off by one place: an incoming chunk overwrote another one",
        )

    def whose(chunk: Tensor) -> int | None:
        return next((r for r, share in enumerate(shares) if torch.equal(chunk.float(), share)), None)

    owners = [whose(chunk) for chunk in got]

    def explain(chunk: Tensor) -> str:
        if len(calls) < N - 1:
            return round_count(len(calls), N)
        if len(set(owners)) == 1 and N > 1:
            return f"the same chunk (rank {owners[0]}'s) in every place: one tensor, N times in the list"
        if owners == [(rank - i) % N for i in range(N)] or owners == [(rank + i) % N for i in range(N)]:
            return f"all chunks are there, but in order of arrival, {owners}: put them in rank order"
        if None not in owners and len(set(owners)) == N:
            return f"all chunks are there, but in the wrong places, {owners}: work out again whose chunk arrives when"
        if None not in owners and len(set(owners)) < N:
            return "each round sent your own chunk again: pass on what came in the round before"
        if any(torch.equal(chunk, a + b) for a in shares for b in shares):
            return "chunks were added up: an all-gather adds nothing"
        return ""

    for place, chunk in enumerate(got):
        check_tensor(f"chunk {place}", chunk, (E,))
        compare(f"place {place} of the list", chunk, shares[place], explain)
    check_calls(calls, world, E * 4)


# ---------------------------------------------------------------------- 01.1

REDUCE_SCATTER_STUB = '''\
from torch import Tensor
from zerolab.lab.exercises import Todo


def ring_reduce_scatter(chunks: list[Tensor], rank: int, world_size: int, exchange) -> Tensor:
    """The sum over all ranks of chunk number `rank`.

    chunks: this rank's contribution to each of the N chunks.
    exchange(tensor, to, source): sends `tensor` to rank `to` and returns what rank `source` sends in this round.

    Each rank talks to its two neighbours only, in N-1 rounds of one chunk each.
    """
    raise Todo("01.1")
'''

REDUCE_SCATTER = '''\
from torch import Tensor


def ring_reduce_scatter(chunks: list[Tensor], rank: int, world_size: int, exchange) -> Tensor:
    """The sum over all ranks of chunk number `rank`."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    partial = chunks[(rank - 1) % world_size]  # the chunk that has the longest way to go
    for step in range(world_size - 1):
        received = exchange(partial, to=right, source=left)
        partial = received + chunks[(rank - 2 - step) % world_size]
    return partial
'''


# ---------------------------------------------------------------------- 01.2

ALL_GATHER_STUB = '''\
from torch import Tensor
from zerolab.lab.exercises import Todo


def ring_all_gather(chunk: Tensor, rank: int, world_size: int, exchange) -> list[Tensor]:
    """The chunks of all ranks, in rank order, on every rank.

    chunk: what this rank has. exchange(tensor, to, source): as before.

    Each rank talks to its two neighbours only, in N-1 rounds of one chunk each.
    """
    raise Todo("01.2")
'''

ALL_GATHER = '''\
from torch import Tensor


def ring_all_gather(chunk: Tensor, rank: int, world_size: int, exchange) -> list[Tensor]:
    """The chunks of all ranks, in rank order, on every rank."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = [None] * world_size
    chunks[rank] = passing = chunk
    for step in range(world_size - 1):
        passing = exchange(passing, to=right, source=left)
        chunks[(rank - 1 - step) % world_size] = passing
    return chunks
'''


EXERCISES = [
    Exercise(
        id="01.1",
        title="ring reduce-scatter",
        section="Write it: the first half",
        check=check_reduce_scatter,
        stub=REDUCE_SCATTER_STUB,
        reference=REDUCE_SCATTER,
        hints=(
            "Follow one chunk: which rank must send it first, so that it is home after N-1 rounds?",
            "Chunk r ends at rank r, coming from rank r-1 in the last round. So rank r+1 sends it first: "
            "in the first round rank r sends chunk r-1.",
            "In round s (from 0) rank r sends its partial sum of chunk r-1-s, receives that of chunk r-2-s, and "
            "adds its own chunk r-2-s. All numbers % N.",
        ),
        exports=("ring_reduce_scatter",),
    ),
    Exercise(
        id="01.2",
        title="ring all-gather",
        section="Write it: the second half",
        check=check_all_gather,
        stub=ALL_GATHER_STUB,
        reference=ALL_GATHER,
        hints=(
            "In the first round you have one chunk to send. In the second, send the one that has just come in.",
            "In the first round your left neighbour sends its own chunk; in the second, the chunk of its own left "
            "neighbour.",
            "In round s (from 0) rank r receives the chunk of rank r-1-s, % N. Store it in that place, and send it in "
            "the next round.",
        ),
        exports=("ring_all_gather",),
    ),
]
