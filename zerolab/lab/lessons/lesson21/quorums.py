"""How replicas that may die train together: quorums, votes, and the state that a newcomer is handed.

    quorums = lab.Quorums(me, decide)     # me = lab.replica(...); `decide` is the learner's
    quorum = quorums.ask(step)            # the next one that this rank is in
    group = quorum.group()                # this rank's counterparts in its members
    quorum.hand_over(zero, adam)          # to the members that are behind
    quorum.vote(failed)                   # has every rank its gradients? The same answer for all

Whatever the ranks of a quorum agree on is in the store, under the quorum's number, which is never used twice.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerolab
from zerolab.lab.held import fingerprint
from zerolab.lab.lessons.lesson21.replicas import Counterparts, Seat
from zerolab.tasks.data import batch

AVERAGES = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter, beside its step counter
ERRORS = 9  # attempts in a row that may fail: an error that comes again and again is not somebody's death

Decide = Callable[[list[str], dict[str, list[Any]], int], Any]
Attempted = tuple[int, list[str], dict[str, str], bool]  # step, members, sources, made: a plots.Attempt


class Quorums:
    """The quorums that one rank asks for, one after another. A newcomer asks for the one that comes next.

    end: the step before which training ends: `after` steps after a newcomer has joined. attempts: what was tried.
    received: bytes, of a peer's state.
    """

    def __init__(self, me: Seat, decide: Decide, after: int = 6) -> None:
        self.me, self.decide, self.after = me, decide, after
        self.end = float("inf")
        self.attempts: list[Attempted] = []
        self.received = 0
        self.number = 0
        while me.read(f"quorum {self.number}"):
            self.number += 1
        self.errors = 0  # since an attempt was made
        self.counterparts: Counterparts | None = None  # those of the last attempt, if it was made
        self.last: tuple[list[str], list[int]] | None = None  # the members and lives that they are of

    def ask(self, step: int) -> Quorum:
        """Say that this rank's parameters have seen `step` steps, and wait for the next quorum that it is in."""
        while True:
            number, self.number = self.number, self.number + 1
            members, newest, sources, lives = self._decided(number, step)
            if self.me.name in members and lives[self.me.rank] == self.me.life:
                return Quorum(self, number, members, newest, sources, lives)
            self.counterparts = None  # the others make theirs without this rank

    def _decided(self, number: int, step: int) -> Any:
        """Members, step, sources, and the lives of all ranks. The first to decide writes, and all read that."""
        me = self.me
        me.note(f"ask {number}", step)
        before = me.read(f"quorum {number - 1}")[0] if number else me.names

        def decided() -> Any:
            if me.read(f"quorum {number}") is None:
                lives, replicas = self._look(number)
                decision = self.decide(before, replicas, 1)
                if decision is not None:
                    me.first(f"quorum {number}", [*decision, lives])  # compare_set
            return me.read(f"quorum {number}")

        return me.until(decided)

    def _look(self, number: int) -> tuple[list[int], dict[str, list[Any]]]:
        """How often each rank has died, and for each replica what its ranks do: what `decide` is given."""
        lives = self.me.lives()
        asked = self.me.notes(f"ask {number}", lives)
        last = self.me.notes(f"ask {number - 1}", lives)

        def state(rank: int) -> Any:
            alive = rank in last or number == 0
            return asked.get(rank, "busy" if alive else "dead")

        return lives, {name: [state(rank) for rank in self.me.ranks_of(name)] for name in self.me.names}


@dataclass
class Quorum:
    """Who makes `step`, the same for all `members`, and from whom those that are behind take their state."""

    of: Quorums
    number: int
    members: list[str]
    step: int
    sources: dict[str, str]
    lives: list[int]

    def group(self) -> Counterparts:
        """This rank's counterparts: made anew when the members have changed, or the last attempt has failed."""
        of, who = self.of, (self.members, self.lives)
        if of.counterparts is None or who != of.last:
            of.counterparts, of.last = of.me.group(self.number, self.members), who
        return of.counterparts

    def hand_over(self, zero: Any, adam: Any) -> None:
        """Send this rank's shards and averages to a counterpart that is behind, or take those of one that is not."""
        me, group = self.of.me, self.group()
        before = group.received
        for name, source in self.sources.items():
            self.of.end = self.step + self.of.after
            for tensor in shards(zero, adam, self.step) if me.name in (name, source) else ():
                if me.name == source:
                    group.send(tensor.contiguous(), self.members.index(name))
                else:
                    arrived = torch.empty_like(tensor)
                    group.receive(arrived, self.members.index(source))
                    tensor.copy_(arrived)
        self.of.received += group.received - before

    def vote(self, failed: Exception | None) -> bool:
        """Whether every rank of the quorum has its gradients. `failed`: the error for which this one has not."""
        of = self.of
        of.errors += failed is not None
        if failed is not None and of.errors > ERRORS:
            raise failed
        of.me.note(f"vote {self.number}", failed is None)
        ranks = [rank for name in self.members for rank in of.me.ranks_of(name)]
        made = all(of.me.until(lambda: of.me.noted(f"vote {self.number}", ranks, self.lives)))
        of.attempts.append((self.step, self.members, self.sources, made))
        if made:
            of.errors = 0
        else:
            of.counterparts = None  # some rank's may be broken, and all make theirs anew
        return made


def shards(zero: Any, adam: Any, step: int = 0) -> Iterator[Tensor]:
    """This rank's slices of the parameters and of AdamW's averages, which a newcomer begins with, as after `step`."""
    for param in zero.model.parameters():
        mine = zerolab.to_local(param)
        if param not in adam.state:
            empty = {key: torch.zeros_like(mine) for key in AVERAGES}
            adam.state[param] = {"step": torch.tensor(float(step))} | empty
        yield from (mine.detach(), *(zerolab.to_local(adam.state[param][key]) for key in AVERAGES))


def checksum(zero: Any, adam: Any) -> str:
    """The digits that two ranks share if their shards and averages are the same, bit for bit."""
    return fingerprint(shards(zero, adam), 8)


def die_in_backward(module: nn.Module) -> None:
    """Kill this process, when backward comes to the output of `module`."""

    def die(grad: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(die)

    module.register_forward_hook(watch)


def in_one_process(
    model: nn.Module, words: Tensor, attempts: Sequence[Attempted], me: Seat, lr: float = 3e-3
) -> Mapping[int, float]:
    """Make the same steps on a whole model, each with the mean over the ranks that were there.

    Returns the loss of each step, the mean over this rank's counterparts.
    """
    adam = torch.optim.AdamW(model.parameters(), lr=lr)
    losses: dict[int, float] = {}
    for step, members, _, made in attempts:
        if not made:
            continue
        ranks = [rank for name in members for rank in me.ranks_of(name)]
        losses[step] = 0.0
        for rank in ranks:
            loss = model(*batch(words, rank, step, 4, 64))
            (loss / len(ranks)).backward()
            losses[step] += loss.item() / len(members) if rank % me.size == me.place else 0.0
        adam.step()
        adam.zero_grad()
    return losses
