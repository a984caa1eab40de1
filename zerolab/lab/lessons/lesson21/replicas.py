"""Replicas that may die: each is a world of its own, and all of them meet in a store that outlives them.

    me = lab.replica(ranks=2)            # on a live rank: it leaves the world of all, and joins that of its replica
    me.note("vote 4", True)              # what all may read, signed with this rank and its life
    me.notes("vote 4")                   # rank -> what it noted, of the ranks whose life that still is
    me.until(lambda: ...)                # look again and again until this returns something else than None
    group = me.group(4, ["A", "C"])      # this rank's counterparts in A and C

The store is in the notebook's process. There the session counts the lives of each rank that have ended (live.py), which
is how a death becomes known: by the end of a process, as torchrun's agent sees it, and not by a clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from zerolab.lab.ranks.report import Misused
from zerolab.world.processes import Patience

T = TypeVar("T")
LOOK = 0.01  # seconds between two looks into the store
PATIENCE = 300.0  # seconds: it ends only what can never come
GROUP_TIMEOUT = timedelta(seconds=120)  # of a collective whose other ranks are alive and do not come
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Counterparts:
    """The ranks of several replicas that hold the same shard: `rank` and `size` of this one among them.

    It is a process group that belongs to no world, so that it can be made anew when the others change.
    """

    rank: int
    size: int
    group: Any
    received: int = 0  # bytes, of `receive`

    def all_reduce(self, tensor: Tensor) -> None:
        self._run("allreduce", [tensor])

    def send(self, tensor: Tensor, to: int) -> None:
        self._run("send", [tensor], to, 0)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._run("recv", [tensor], source, 0)
        self.received += tensor.nbytes

    def _run(self, call: str, *args: Any) -> None:
        if self.group is None:
            raise RuntimeError("a rank of this group is gone: make another group")
        try:
            getattr(self.group, call)(*args).wait()
        except RuntimeError:
            # This closes its connections. Another rank may be waiting for this one, and has heard nothing of the death.
            self.group = None
            raise


class Seat:
    """One rank of one replica: `name` of the replica, `place` in it, `rank` among all, and which `life` this is."""

    def __init__(self, ranks: int, store: Any, rank: int, life: int, everyone: int) -> None:
        if everyone % ranks:
            raise Misused(f"{everyone} ranks are no whole number of replicas of {ranks}")
        self.size, self.store, self.rank, self.life = ranks, store, rank, life
        self.names = list(NAMES[: everyone // ranks])
        self.name, self.place = self.names[rank // ranks], rank % ranks

    def __repr__(self) -> str:
        return f"<rank {self.rank}: place {self.place} of replica {self.name}, life {self.life}>"

    def ranks_of(self, name: str) -> list[int]:
        first = self.names.index(name) * self.size
        return list(range(first, first + self.size))

    # -- what all may read ---------------------------------------------------------------------------------------------

    def lives(self) -> list[int]:
        """How many lives of each rank have ended: the number of the life that it has now."""
        return [int(found or 0) for found in self._read_all("lives")]

    def _read_all(self, key: str) -> list[bytes | None]:
        """What is under `key` for each rank; in two questions to the store when all are there."""
        keys = [f"{key}/{rank}" for rank in range(len(self.names) * self.size)]
        if self.store.check(keys):
            return self.store.multi_get(keys)
        return [self.store.get(each) if self.store.check([each]) else None for each in keys]

    def note(self, key: str, what: Any) -> None:
        self.store.set(f"{key}/{self.rank}", json.dumps([self.life, what]))

    def notes(self, key: str, lives: Sequence[int] | None = None) -> dict[int, Any]:
        """Rank -> what it noted under `key`, of the ranks whose life has not ended since."""
        found = {}
        now = self.lives() if lives is None else lives
        for rank, entry in enumerate(self._read_all(key)):
            life, what = json.loads(entry) if entry else (None, None)
            if life == now[rank]:
                found[rank] = what
        return found

    def noted(self, key: str, ranks: Sequence[int], lives: Sequence[int]) -> list[Any] | None:
        """What each of `ranks` noted under `key` in the life that `lives` gives it, None for one that died before.

        None until that is known of all: then it is the same for whoever asks.
        """
        now, entries, found = self.lives(), self._read_all(key), []
        for rank in ranks:
            life, what = json.loads(entries[rank] or "[null, null]")
            if life != lives[rank] and now[rank] == lives[rank]:
                return None
            found.append(what if life == lives[rank] else None)
        return found

    def first(self, key: str, what: Any) -> Any:
        """What was written under `key`: `what`, unless somebody was there before."""
        return json.loads(self.store.compare_set(key, "", json.dumps(what)))

    def read(self, key: str) -> Any:
        """What `first` has written, or None."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    # -- waiting -------------------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], T | None]) -> T:
        """What `look` returns when that is not None. Ends this process if its replica has lost a rank."""
        patience = Patience(PATIENCE)
        while True:
            self.end_if_broken()
            if (found := look()) is not None:
                return found
            if patience.turn() < 0:
                raise RuntimeError(f"rank {self.rank} waited {PATIENCE:g} s, and what it waits for did not come")
            time.sleep(LOOK)

    def end_if_broken(self) -> None:
        """A replica that has lost a rank holds a part of the model: the rest of it ends, to be started again."""
        if [self.lives()[rank] for rank in self.ranks_of(self.name)] != self._together:
            os._exit(1)

    # -- groups --------------------------------------------------------------------------------------------------------

    _together: list[int]  # the lives of this replica's ranks that form its world

    def meet(self) -> None:
        """Join the world of this replica, which its ranks agree to by the numbers of their lives."""
        ranks, patience = self.ranks_of(self.name), Patience(PATIENCE)
        while True:
            lives = [self.lives()[rank] for rank in ranks]
            if lives[self.place] == self.life:
                world = f"replica {self.name} {lives}"
                self.note(world, True)
                if all(self.store.check([f"{world}/{rank}"]) for rank in ranks):
                    break
            if patience.turn() < 0:
                raise RuntimeError(f"rank {self.rank} waited {PATIENCE:g} s for the others of replica {self.name}")
            time.sleep(LOOK)
        self._together = lives
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(world, self.store),
            rank=self.place,
            world_size=self.size,
            timeout=GROUP_TIMEOUT,
        )

    def group(self, number: int, names: Sequence[str]) -> Counterparts:
        """This rank's counterparts in these replicas, of which its own is one. `number` is never used twice."""
        store = dist.PrefixStore(f"quorum {number}, place {self.place}", self.store)
        rank, size = list(names).index(self.name), len(names)
        return Counterparts(rank, size, dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT))


def replica(ranks: int) -> Seat:
    """Leave the world that this live rank is in, and join that of its replica. Ranks 0 to `ranks` - 1 are A."""
    if "ZEROLAB_LIFE" not in os.environ:
        raise Misused("lab.replica works on live ranks that lab.start has started, not on a cluster's engines")
    if dist.is_initialized():
        dist.destroy_process_group()
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, wait_for_workers=False, timeout=GROUP_TIMEOUT)
    rank, everyone = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.compare_set(f"lives/{rank}", "", "0")
    seat = Seat(ranks, store, rank, int(os.environ["ZEROLAB_LIFE"]), everyone)
    seat.meet()
    return seat
