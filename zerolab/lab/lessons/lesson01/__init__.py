"""Lesson 01: a ring, from send and receive."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zerolab.lab.exercises.differences import contributions
from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene, in_groups


class Ring:
    """`exchange` among the ranks that play, counted from 0, and what it did."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.rounds: list[tuple[int, int, str]] = []  # to, source, both from this rank on, and what was sent

    def exchange(self, tensor: Tensor, to: int, source: int) -> Tensor:
        play, N = self.play, self.play.size
        for name, rank in (("to", to), ("source", source)):
            if not isinstance(rank, int) or not 0 <= rank < N:
                raise ValueError(f"exchange({name}={rank!r}): ranks go from 0 to {N - 1}; did you take % N?")
        sent = contributions(tensor.detach(), play) if isinstance(tensor, Tensor) else ""
        self.rounds.append(((to - play.rank) % N, (source - play.rank) % N, sent))
        return play.world.spy.exchange(tensor, play.members[to], play.members[source])

    def look(self) -> None:
        """To be called after an event: all rounds are with the two neighbours, in opposite ways."""
        ways = {(1 % self.play.size, -1 % self.play.size), (-1 % self.play.size, 1 % self.play.size)}
        self.play.see("every exchange is from one neighbour to the other", all(r[:2] in ways for r in self.rounds))
        self.play.clue("rounds", self.rounds)


def scatter(play: Play, *shape: int) -> None:
    ring = Ring(play)
    chunks = [play.base(*shape, name=f"chunk {c}", number=c) for c in range(play.size)]
    mine = [play.share(chunk, play.rank) for chunk in chunks]
    function = play.code.ring_reduce_scatter
    play.call("ring_reduce_scatter()", function, mine, play.rank, play.size, ring.exchange, uses=("exchange",))
    ring.look()


def gather(play: Play, *shape: int) -> None:
    ring = Ring(play)
    chunk = play.keep("`chunk`", play.share(play.base(*shape, name="the chunk"), play.rank))
    function = play.code.ring_all_gather
    play.call("ring_all_gather()", function, chunk, play.rank, play.size, ring.exchange, uses=("exchange",))
    ring.look()


def battery_of(act: Callable[..., None]) -> tuple[Scene, ...]:
    def again(play: Play) -> None:
        act(play, 4)
        act(play, 7)

    return (
        Scene("", lambda play: act(play, 4)),
        Scene("with chunks of 2 x 3 elements", lambda play: act(play, 2, 3), "take the shape from the arguments"),
        Scene(
            "in a second call, with longer chunks",
            again,
            "right the first time: take the sizes from the arguments, and keep nothing from an earlier call",
        ),
        *in_groups(
            lambda play: act(play, 4),
            "right when all ranks take part, but not when some do: use the arguments rank and world_size",
        ),
    )


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
        battery=battery_of(scatter),
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
        battery=battery_of(gather),
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
