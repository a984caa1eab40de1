"""Do the ranks go the same way? They tell each other on a control group, and through notes in the store.

Ranks that gather different units would get each other's bytes without an error. So a gather that the agreed order
does not predict is announced first, and costs nobody a wrong tensor.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from zerolab.comm.flight import Entry, ask, log_of
from zerolab.comm.groups import Group, control_group, hold
from zerolab.comm.record import Recorder
from zerolab.comm.waiting import CommError, Complaint, wait_for

_numbers = count()  # of the agreements in this process

_ROUTING = (
    "The ranks went different ways through the model (experts, skipped layers, one pass more than others), and would "
    "have mixed up their bytes. Put the parts they choose between into one unit (units=[...] with the class that "
    "contains them all), let every rank make as many passes, or use stage 0, 1 or 2."
)


class Agreement:
    """What the ranks of `everyone` say to each other about the run. Where no data moves (`fake`), nothing is said.

    Raises CommError, on every rank, if they do not ask for the same `mesh`.
    """

    def __init__(self, everyone: Group, recorder: Recorder, mesh: tuple[int, int] | None, fake: bool) -> None:
        hold(self)
        self._everyone, self._recorder = everyone, recorder
        self._control: Any = None if fake else control_group(everyone.handle)  # Any: torch hides _allgather_base
        self._log = log_of(everyone.handle, "control")
        self._gathers = 0  # how many all-gathers so far: the same number on every rank
        self._last: tuple[str, str] | None = None  # (unit, phase) of the last gather
        self._expected: dict[tuple[str, str] | None, tuple[str, str]] = {}  # which gather follows it, once agreed
        # The first rank's number says where the notes are: other ranks may have made more of these.
        asked = self.exchange([next(_numbers), mesh and list(mesh)], "start of a Comm")
        for rank, (_, other) in enumerate(asked):
            if other != asked[0][1]:
                raise CommError(f"rank {rank} asks for mesh={other} where rank 0 asks for mesh={asked[0][1]}")
        name = f"zerolab/{everyone.handle.group_name}/{asked[0][0]}"
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    # -- the order of gathers ------------------------------------------------------------------------------------

    def agree_on_gather(self, unit: str) -> Complaint | None:
        """Make sure that every rank gathers `unit` now.

        Which gather follows another is agreed once, then predicted. Every rank predicts the same, so a rank that
        does what is predicted need not ask. One that does not, asks. If the others have gone on as predicted, they
        find its note in the store while they wait, and every rank stops with an error.

        Returns the complaint that the wait for a predicted gather looks out for.
        """
        phase, before = self._recorder.phase, self._last
        here = self._last = (unit, phase)
        self._gathers += 1
        if self._control is None:
            return None
        if self._expected.get(before) == here:
            number = self._gathers
            return lambda: self._contradicted(number)
        self._note("unpredicted", {"gather": self._gathers, "unit": unit})
        what = f"announcement of a gather of {unit}"
        digest = zlib.crc32(repr(here).encode()).to_bytes(4)
        if len(set(self.exchange_bytes(digest, what, self._abandoned))) == 1:
            self._expected[before] = here
            return None
        for rank, other in enumerate(self.exchange(list(here), what)):
            if tuple(other) != here:
                me, theirs = self._everyone.rank, f"rank {rank} gathers {other[0]} ({other[1]})"
                raise CommError(f"rank {me} gathers unit {unit} ({phase}) where {theirs}.\n{_ROUTING}")
        raise AssertionError("the digests differ but the gathers do not")

    def _contradicted(self, gather: int) -> str | None:
        """Whether another rank's gather number `gather` was not the predicted one, as this rank's was."""
        for rank, note in self._notes("unpredicted"):
            if note["gather"] == gather:
                return f"rank {rank} gathers unit {note['unit']} instead."
        return None

    def _abandoned(self) -> str | None:
        """Whether another rank has stopped because of what this rank announced."""
        for rank, note in self._notes("stopped"):
            if note["gather"] == self._gathers:
                return f"rank {rank} gathers another unit."
        return None

    def _note(self, kind: str, note: dict[str, Any]) -> None:
        self._store.set(f"{kind}/{self._everyone.rank}", json.dumps(note))

    def _notes(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The other ranks' notes of this kind."""
        for rank in range(self._everyone.size):
            if rank != self._everyone.rank and self._store.check([f"{kind}/{rank}"]):
                yield rank, json.loads(self._store.get(f"{kind}/{rank}"))

    # -- messages ------------------------------------------------------------------------------------------------

    def exchange(self, message: Any, what: str) -> list[Any]:
        """Every rank's `message` (anything JSON), in rank order. For what is rare and small."""
        if self._control is None:
            return [message] * self._everyone.size
        data = json.dumps(message).encode()
        sizes = self.exchange_bytes(len(data).to_bytes(8), what)
        longest = max(int.from_bytes(size) for size in sizes)
        return [json.loads(row) for row in self.exchange_bytes(data.ljust(longest), what)]

    def exchange_bytes(self, message: bytes, what: str, complaint: Complaint | None = None) -> list[bytes]:
        """Every rank's `message`, of the same length on every rank, in rank order."""
        return self.start_exchange(message, what, complaint)()

    def start_exchange(
        self, message: bytes, what: str, complaint: Complaint | None = None
    ) -> Callable[[], list[bytes]]:
        """Like `exchange_bytes`, but returns at once; the function it returns waits and gives the messages."""
        if self._control is None:
            return lambda: [message] * self._everyone.size
        result = bytearray(self._everyone.size * len(message))
        tensors = [torch.frombuffer(data, dtype=torch.uint8) for data in (result, bytearray(message))]
        call = self._recorder.call("all_gather", "", len(result), self._everyone, control=True)
        entry = self._log.note(what, "", self._recorder.phase, tensors[0])
        work = self._control._allgather_base(*tensors)
        entry.issued = time.time()

        def finish() -> list[bytes]:
            begin, entry.wait = time.perf_counter(), time.time()
            self.wait(work, what, entry, complaint)
            entry.end = time.time()
            if call is not None:
                call.end = time.perf_counter()
                call.waits.append((begin, call.end))
            return [bytes(result[i : i + len(message)]) for i in range(0, len(result), len(message))]

        return finish

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, work: Any, what: str, entry: Entry, complaint: Complaint | None = None) -> None:
        """Wait for `work`. Raises CommError if it fails, or if another rank has a complaint."""
        try:
            reason = wait_for(work, complaint)
        except RuntimeError as error:  # it failed, or the group's timeout passed
            raise self.failure(what, error, entry) from error
        if reason is not None:
            self._note("stopped", {"gather": self._gathers})
            raise CommError(f"rank {self._everyone.rank}, {what}: {reason}\n{_ROUTING}")

    def failure(self, what: str, error: Exception, entry: Entry | None = None) -> CommError:
        """The error for a collective that failed, with what the other ranks were doing."""
        return CommError(
            f"rank {self._everyone.rank} of {self._everyone.size}: {what} ({self._recorder.phase}) failed: {error}\n"
            "Another rank stopped, is much slower, or did not take part in this collective: look at its output first.\n"
            f"{ask(entry)}".rstrip()
        )
