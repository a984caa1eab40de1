"""Lesson 01: a ring, from send and receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.checks.values import check_tensor, compare, counted, forgot_to_return
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.spy import Traffic
from zerolab.lab.ranks.intercept import MESSAGES

E = 4  # elements in a chunk


@dataclass
class Ring:
    """`exchange` among the ranks from `first` on, counted from 0, and what it moved in each round."""

    world: World
    first: int = 0
    rounds: list[tuple[Tensor, Tensor, int, int]] = field(default_factory=list)  # sent, received, to, source

    @property
    def size(self) -> int:
        return self.world.world_size - self.first

    @property
    def rank(self) -> int:
        return self.world.rank - self.first

    def exchange(self, tensor: Tensor, to: int, source: int) -> Tensor:
        for name, rank in (("to", to), ("source", source)):
            if not isinstance(rank, int) or not 0 <= rank < self.size:
                raise ValueError(f"exchange({name}={rank!r}): ranks go from 0 to {self.size - 1}; did you take % N?")
        sent = tensor.detach().clone() if isinstance(tensor, Tensor) else tensor
        received = self.world.spy.exchange(tensor, to + self.first, source + self.first)
        self.rounds.append((sent, received.clone(), to, source))
        return received


def check_calls(calls: list[Traffic], ring: Ring, chunk_bytes: int) -> None:
    """N-1 exchanges of one chunk each, all with the same neighbours."""
    N, rank = ring.size, ring.rank
    foreign = [call.op for call in calls if call.op != "exchange"]
    if foreign:
        likely = "a collective did the work that the ring is meant to do: use exchange() only"
        if foreign[0] in MESSAGES:
            likely = "send with exchange() only: the messages of this function are counted there"
        raise Wrong(f"{foreign[0]} was called", likely)
    sizes = [call.payload for call in calls]
    if any(size != chunk_bytes for size in sizes):
        size = next(size for size in sizes if size != chunk_bytes)
        raise Wrong(
            f"an exchange sent {size} bytes, and a chunk has {chunk_bytes}",
            "extra traffic: one round moves one chunk (1/N of the tensor), not everything",
        )
    if len(calls) != N - 1:
        raise Wrong(f"{counted(len(calls), 'exchange')}, not {N - 1}", round_count(len(calls), N))
    right, left = (rank + 1) % N, (rank - 1) % N
    for _, _, to, source in ring.rounds:
        if (to, source) not in ((right, left), (left, right)):
            raise Wrong(
                f"sent to rank {to} and received from rank {source}",
                f"wrong neighbour: in a ring rank {rank} talks to {left} and {right} only",
            )


def round_count(calls: int, N: int) -> str:
    if abs(calls - N + 1) == 1:
        few = "few" if calls < N - 1 else "many"
        return f"one round too {few}: a ring of N ranks needs N-1 rounds, and you made {calls}"
    return f"{counted(calls, 'round')}, but a ring of {counted(N, 'rank')} needs {N - 1}"


@contextmanager
def own_arguments(world: World, ring: Ring) -> Iterator[None]:
    """In a ring of some of the ranks, a mistake is most likely that the process group was asked who there is."""
    try:
        yield
    except (Wrong, ValueError, IndexError) as error:
        if not ring.first:
            raise
        what = error.seen if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        raise Wrong(f"in a ring of {ring.size} of the {world.world_size} ranks: {what}", OWN_ARGUMENTS) from None


OWN_ARGUMENTS = (
    "right when all ranks take part, but not when some do: use the arguments rank and world_size, not what "
    "dist.get_rank() and dist.get_world_size() say, and keep nothing from an earlier call"
)
CALLED_AGAIN = (
    "right the first time, but not in a second call with longer chunks: take the sizes from the arguments, and keep "
    "nothing from an earlier call"
)


@contextmanager
def called_again() -> Iterator[None]:
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"in a second call: {wrong.seen}", CALLED_AGAIN, wrong.tip) from None


def check_reduce_scatter(answer: Any, world: World) -> None:
    scatter(answer, Ring(world), (E,))
    with called_again():
        scatter(answer, Ring(world), (7,))
    if (some := Ring(world, first=1)).size > 0 and world.rank > 0:  # the lesson draws smaller rings too
        with own_arguments(world, some):
            scatter(answer, some, (E,))


def scatter(answer: Any, ring: Ring, shape: tuple[int, ...]) -> None:
    N, rank, E = ring.size, ring.rank, torch.Size(shape).numel()
    bases = [values.base(E, number).view(shape) for number in range(N)]
    with ring.world.record() as calls, values.nan_in_fresh_memory():
        got = answer.ring_reduce_scatter([values.share(b, rank) for b in bases], rank, N, ring.exchange)
    if isinstance(got, (list, tuple)):
        raise Wrong(f"the result is a {type(got).__name__} of {len(got)}", f"return one chunk only, number {rank}")
    check_tensor("the result", got, shape)

    def whose(tensor: Tensor) -> tuple[int, list[float]]:
        """The chunk's number and each rank's contribution to it; -1 if it is no such sum."""
        for number, b in enumerate(bases):
            if (shares := values.contributions(tensor, b, N)) is not None:
                return number, shares
        return -1, []

    def explain(got: Tensor) -> str:
        if len(calls) != N - 1:
            return round_count(len(calls), N)
        if torch.allclose(got * N, values.total(bases[rank], N)):
            return "averaged (divided by N), but the exercise asks for the sum"
        number, shares = whose(got)
        first = whose(ring.rounds[0][0])[0] if ring.rounds else rank
        way = 1 if not ring.rounds or ring.rounds[0][2] == (rank + 1) % N else -1
        if N > 1 and _is_sound([whose(sent) for sent, _, _, _ in ring.rounds], rank, way):
            mine = (first - way * (N - 1)) % N  # the chunk that is finished here
            if mine != rank:
                return (
                    f"off by one chunk: the ring is sound, but rank {rank} sent chunk {first} first, so the sum that "
                    f"is finished on rank {rank} is that of chunk {mine}; rank r owns chunk r, so start the first "
                    f"round with another chunk"
                )
            if number == rank and 1 < sum(shares) < N:
                return f"the last addition is lost: only {values.in_words(shares)} of {N} in what you return"
        if number >= 0 and number != rank:
            return f"this is chunk {number} ({values.in_words(shares)}), but rank {rank} owns chunk {rank}"
        if shares and sorted(shares)[-2:] == [0.0, 1.0]:
            return (
                f"only {values.in_words(shares)} to chunk {number} is in it: add your own chunk to what comes in, "
                "and pass on the sum"
            )
        if shares and all(share == int(share) for share in shares):
            return f"chunk {number} holds {values.in_words(shares)}; it should hold every rank's exactly once"
        if N > 2 and way == -1:
            return "different chunks were added up: you send left, but the chunk numbers are for a ring to the right"
        return "contributions to different chunks were added up: what comes in belongs to another chunk"

    compare(f"chunk {rank}", got, values.total(bases[rank], N), explain)
    check_calls(calls, ring, E * 4)


def _is_sound(sent: list[tuple[int, list[float]]], rank: int, way: int) -> bool:
    """Whether each round passed on the next chunk, with one more rank's contribution in it."""
    N, first = len(sent) + 1, sent[0][0]
    for i, (number, shares) in enumerate(sent):
        whole = [1.0 if (rank - way * r) % N <= i else 0.0 for r in range(N)]
        if first < 0 or number != (first - way * i) % N or shares != whole:
            return False
    return True


def check_all_gather(answer: Any, world: World) -> None:
    gather(answer, Ring(world), (E,))
    with called_again():
        gather(answer, Ring(world), (7,))
    if (some := Ring(world, first=1)).size > 0 and world.rank > 0:
        with own_arguments(world, some):
            gather(answer, some, (E,))


def gather(answer: Any, ring: Ring, shape: tuple[int, ...]) -> None:
    N, rank, E = ring.size, ring.rank, torch.Size(shape).numel()
    base = values.base(E).view(shape)
    shares = [values.share(base, number) for number in range(N)]
    mine = shares[rank].clone()
    with ring.world.record() as calls, values.nan_in_fresh_memory():
        got = answer.ring_all_gather(mine, rank, N, ring.exchange)
    if not isinstance(got, (list, tuple)):
        likely = forgot_to_return(got) or "return a list with one tensor per rank, not the chunks joined together"
        raise Wrong(f"the result is a {type(got).__name__}, not a list of tensors", likely)
    if len(got) != N:
        likely = "the list needs one chunk per rank, your own included"
        raise Wrong(f"the list has {counted(len(got), 'chunk')}, not {N}", likely)
    empty = [place for place, chunk in enumerate(got) if not isinstance(chunk, Tensor)]
    if empty:
        likely = "off by one place: an incoming chunk overwrote another one"
        if len(calls) < N - 1:
            likely = round_count(len(calls), N)
        elif empty == [rank]:
            likely = f"your own chunk is missing: rank {rank}'s list must hold it in place {rank}"
        raise Wrong(f"place {empty[0]} of the list holds {got[empty[0]]!r}", likely)

    def whose(chunk: Tensor) -> int | None:
        return next((r for r, share in enumerate(shares) if torch.equal(chunk.float(), share)), None)

    owners = [whose(chunk) for chunk in got]

    def explain(chunk: Tensor) -> str:
        if len(calls) < N - 1:
            return round_count(len(calls), N)
        if (sums := values.contributions(chunk, base, N)) and sum(sums) > 1:
            return f"this is a sum ({values.in_words(sums)}): chunks were added up, but an all-gather adds nothing"
        if chunk.isnan().any():
            missing = "your own chunk" if owners[rank] is None and owners.count(None) == 1 else "a chunk"
            return f"{missing} is missing: this memory was never written to"
        if N > 1 and len({one.data_ptr() for one in got}) == 1:
            return f"the same chunk (rank {owners[0]}'s) in every place: one tensor, N times in the list"
        if None not in owners and (sent := [whose(sent) for sent, _, _, _ in ring.rounds]) and set(sent) == {rank}:
            if N > 2:
                return "each round sent your own chunk again: pass on what came in the round before"
        if owners == [(rank - i) % N for i in range(N)] or owners == [(rank + i) % N for i in range(N)]:
            return f"all chunks are there, but in order of arrival, {owners}: put them in rank order"
        if None not in owners and len(set(owners)) == N:
            return f"all chunks are there, but in the wrong places, {owners}: work out again whose chunk arrives when"
        if None not in owners:
            return f"a chunk overwrote another: the list holds the chunks of ranks {owners}"
        return ""

    for place, chunk in enumerate(got):
        check_tensor(f"chunk {place}", chunk, shape)
        compare(f"place {place} of the list", chunk, shares[place], explain)
    check_calls(calls, ring, E * 4)
    if not torch.equal(mine, shares[rank]):
        raise Wrong("`chunk` has changed", "what comes in was copied into the argument `chunk`: leave it as it is")


# ---------------------------------------------------------------------- 01.1

REDUCE_SCATTER_STUB = '''\
from torch import Tensor
from zerolab.lab.exercises import Todo


def ring_reduce_scatter(
    chunks: list[Tensor], rank: int, world_size: int, exchange
) -> Tensor:
    """The sum over all ranks of chunk number `rank`.

    chunks: this rank's contribution to each of the N chunks.
    exchange(tensor, to, source): sends `tensor` to rank `to` and returns what rank `source`
        sends in this round.

    Each rank talks to its two neighbours only, in N-1 rounds of one chunk each.
    """
    raise Todo("01.1")
'''

REDUCE_SCATTER = '''\
from torch import Tensor


def ring_reduce_scatter(
    chunks: list[Tensor], rank: int, world_size: int, exchange
) -> Tensor:
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

    chunk: what this rank has; leave it as it is. exchange(tensor, to, source): as before.

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
        difficulty=2,
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
        difficulty=1,
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
        errors={
            "not a NoneType": "that place of the list is still empty: send your own chunk first, then what came in last"
        },
    ),
]
