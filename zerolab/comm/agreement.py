"""Do the ranks go the same way? They tell each other on a control group, and through notes in the store.

Ranks that gather different units would get each other's bytes without an error. So a gather that the agreed order
does not predict is announced first, and costs nobody a wrong tensor.

A rank that waits for long says so in the store, and looks where the others wait. If two wait for each other, in
different collectives, both stop at once.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from zerolab.comm.flight import Entry, ask, issued, log_of
from zerolab.comm.groups import Group, control_group, hold, waits_on_device
from zerolab.comm.recording import Progress, Recorder, out_of_step
from zerolab.comm.waiting import CommError, Complaint, wait_for
from zerolab.world.environment import at_return
from zerolab.world.processes import Patience

INLINE = 256  # bytes of a message that travel at once, with what it is; the rest follows when all ranks agree
REMEMBERED = 8  # agreements of whose progress a rank tells
PATIENCE = 3.0  # seconds for which a rank that is sure to wait in vain waits for what the others say
FRAME = struct.Struct(f"!IIII{INLINE}s112s")  # Comm, steps, backwards, length, first bytes, what it is

_numbers = count(1)  # of the agreements in this process

_ROUTING = (
    "The ranks went different ways through the model (experts, skipped layers, one pass more than others, an error "
    "that one of them caught), and would have mixed up their bytes. Put the parts they choose between into one unit "
    "(units=[...] with the class that contains them all), let every rank make as many passes, or use stage 0, 1 or 2."
)
_WATCHDOG = (
    ". The collectives before it may not have finished: the host does not wait for them, and torch's watchdog ends the "
    "process when the group's timeout is over. "
)
_FINISHED = "has finished its part of the program"
_EDITS = (
    "Parameters are gathered in the first forward after an optimizer step or an edit. Step and edit on every rank "
    "alike; zero.full_parameters() and zero.load_full_state_dict() give all ranks the first rank's values."
)
_PROGRAM = (
    "The ranks are at different places in the program. Every rank must train on as many batches, and make the same "
    "calls of zero's methods, save and load; none may catch an error and go on alone."
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
        self._process = os.getpid()
        self._last: tuple[str, str] | None = None  # (unit, phase) of the last gather
        self._expected: dict[tuple[str, str] | None, tuple[str, str]] = {}  # which gather follows it, once agreed
        self._number = 0  # the same on every rank
        self._name = f"{everyone.handle.group_name}/0"  # until the ranks have agreed on the number
        # The first rank's number counts: other ranks may have made more of these.
        asked = self.exchange([next(_numbers), mesh and list(mesh)], "start of a Comm")
        for rank, (_, other) in enumerate(asked):
            if other != asked[0][1]:
                raise CommError(f"rank {rank} asks for mesh={other} where rank 0 asks for mesh={asked[0][1]}")
        self._number = asked[0][0]
        self._name = f"{everyone.handle.group_name}/{self._number}"
        _made[self._name] = recorder.progress
        if len(_made) > REMEMBERED:
            _made.pop(next(iter(_made)))
        if self._control is not None and _note:  # of a wait that is over
            _post({})

    def refuse_forks(self, what: str) -> None:
        """Raise CommError in a process that this rank has forked, which shares its connections and is waited for."""
        if os.getpid() != self._process:
            raise CommError(
                f"{what} in a process that rank {self._everyone.rank} has forked, a DataLoader's worker for instance: "
                "it is no rank, and its calls would mix with the rank's own. Use the sharded model in the rank's own "
                "process, or give the worker a copy that was made before sharding"
            )

    # -- the order of gathers ------------------------------------------------------------------------------------

    def agree_on_gather(self, unit: str) -> None:
        """Make sure that every rank gathers `unit` now.

        Which gather follows another is agreed once, then predicted. Every rank predicts the same, so a rank that
        does what is predicted need not ask. One that does not, asks. If the others have gone on as predicted, they
        wait for it in the gather while it waits for their answer, which `_contradiction` finds.
        """
        phase, before = self._recorder.phase, self._last
        here = self._last = (unit, phase)
        if self._control is None or self._expected.get(before) == here:
            return
        what = f"announcement of a gather of {unit}"
        digest = zlib.crc32(repr(here).encode()).to_bytes(4)
        if len(set(self.exchange_bytes(digest, what))) == 1:
            self._expected[before] = here
            return
        for rank, other in enumerate(self.exchange(list(here), what)):
            if tuple(other) != here:
                theirs, advice = f"rank {rank} gathers {other[0]} ({other[1]})", self._advice({phase, other[1]}, True)
                raise CommError(f"rank {self._everyone.rank} gathers unit {unit} ({phase}) where {theirs}.\n{advice}")
        raise AssertionError("the digests differ but the gathers do not")

    # -- messages ------------------------------------------------------------------------------------------------

    def exchange(self, message: Any, what: str) -> list[Any]:
        """Every rank's `message` (anything JSON), in rank order. For what is rare and small."""
        if self._control is None:
            return [message] * self._everyone.size
        data = json.dumps(message).encode()
        sizes = self.exchange_bytes(len(data).to_bytes(8), what)
        longest = max(int.from_bytes(size) for size in sizes)
        return [json.loads(row) for row in self.exchange_bytes(data.ljust(longest), what)]

    def exchange_bytes(self, message: bytes, what: str) -> list[bytes]:
        """Every rank's `message`, of the same length on every rank, in rank order."""
        return self.start_exchange(message, what)()

    def start_exchange(self, message: bytes, what: str) -> Callable[[], list[bytes]]:
        """Like `exchange_bytes`, but returns at once; the function it returns waits and gives the messages."""
        if self._control is None:
            return lambda: [message] * self._everyone.size
        self.refuse_forks(what)
        size, made = self._everyone.size, self._recorder.progress
        first, rest = message[:INLINE], message[INLINE:]
        frame = FRAME.pack(self._number, made.steps, made.backwards, len(message), first, what.encode())
        call = self._recorder.call("all_gather", "", size * len(frame + rest), self._everyone, control=True)
        entry = self._log.note(what, "", self._recorder.phase, torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        rows, work = self._all_gather(frame)
        entry.issued = time.time()

        def finish() -> list[bytes]:
            begin, entry.wait = time.perf_counter(), time.time()
            self.wait(work, what, entry)
            frames = self._checked(list(FRAME.iter_unpack(rows)), what)
            messages = [frame[4][: len(message)] for frame in frames]
            if rest:  # not before all ranks are known to send as much: gloo aborts a process that gets too much
                rests, more = self._all_gather(rest)
                self.wait(more, what, entry)
                messages = [m + rests[i * len(rest) : (i + 1) * len(rest)] for i, m in enumerate(messages)]
            entry.end = time.time()
            if call is not None:
                call.end = time.perf_counter()
                call.waits.append((begin, call.end))
            return messages

        return finish

    def _all_gather(self, row: bytes) -> tuple[bytearray, Any]:
        """Where every rank's `row` will be, one after the other, and the work to wait for."""
        rows = bytearray(self._everyone.size * len(row))
        tensors = [torch.frombuffer(data, dtype=torch.uint8) for data in (rows, bytearray(row))]
        return rows, self._control._allgather_base(*tensors)

    def _checked(self, frames: list[Any], what: str) -> list[Any]:
        """Raises CommError if a rank sends another message, or has made another number of optimizer steps."""
        if len({(number, steps, size, name) for number, steps, _, size, _, name in frames}) == 1:
            return frames
        me, stage = self._everyone.rank, self._recorder.progress.stage
        made = {rank: Progress(stage, *frame[1:3]) for rank, frame in enumerate(frames)}
        for rank, (number, steps, _, size, _, name) in enumerate(frames):
            if (number, size, name) != (frames[me][0], frames[me][3], frames[me][5]):
                theirs, phase = name.rstrip(b"\0").decode(errors="ignore"), self._recorder.phase
                theirs += " of another model" * (number != self._number)
                if number == self._number and steps != frames[me][1]:
                    advice = f" {out_of_step(made)}"
                else:
                    advice = "\n" + self._advice({phase}, "gather" in what + theirs)
                raise CommError(f"rank {me}, {what} ({phase}): rank {rank} is in {theirs} instead.{advice}")
        raise CommError(f"rank {me}, {what}: {out_of_step(made)}")

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, work: Any, what: str, entry: Entry) -> None:
        """Wait for `work`. Raises CommError if it fails, or if it can never finish."""
        try:
            reason = wait_for(work, self._complaint(what, entry))
        except RuntimeError as error:  # it failed, or the group's timeout passed
            raise self.failure(what, error, entry) from error
        if reason is not None:
            if _FINISHED in reason:  # it may have left out a collective before
                reason += f"\n{ask(entry)}".rstrip()
            raise CommError(f"rank {self._everyone.rank}, {what} ({entry.phase}): {reason}")

    def _complaint(self, what: str, entry: Entry) -> Complaint:
        """Says, when it is called, why the wait for `entry` can never end, if that is sure.

        The first proof waits a moment for the notes of ranks that say nothing yet, so that it can tell of all.
        """
        seen = 0  # how many notes had been posted at the last look
        sure: Patience | None = None

        def complain() -> str | None:
            nonlocal seen, sure
            if not seen:
                waits = [entry.log.name, entry.number, entry.op, entry.unit]
                _post(
                    {"waits": waits, "what": what, "phase": entry.phase, "comm": self._name, "was": entry.log.recent()}
                )
            posts, store = _store().add("posts", 0), _store()
            if posts == seen and sure is None:
                return None
            seen = posts
            notes = {}
            for rank, place in enumerate(self._log.ranks):
                if place != dist.get_rank() and place in entry.log.ranks and store.check([str(place)]):
                    notes[rank] = json.loads(store.get(str(place)))
            reason = self._contradiction(entry, notes)
            if reason is None or _FINISHED in reason:  # its connections close soon
                return reason
            sure = sure or Patience(PATIENCE)
            told = sum(note.get("comm") == self._name for note in notes.values())
            return reason if told == len(entry.log.ranks) - 1 or sure.turn() <= 0 else None

        return complain

    def _contradiction(self, entry: Entry, notes: dict[int, dict[str, Any]]) -> str | None:
        """Why the wait for `entry` can never end, if one of the other ranks' notes proves it.

        A note stays after its wait is over, and still proves what it says: a rank that waited for a collective which
        this rank has not issued to this day is still waiting.
        """
        mine, here = issued(), (entry.log.name, entry.number)
        for rank, note in notes.items():
            missing = note.get("issued", {}).get(here[0], 0) < here[1]
            group, number, *kind = note.get("waits", ["", 0])
            if (group, number) == here:
                contradicts = kind != [entry.op, entry.unit]
            else:
                contradicts = missing and mine.get(group, number) < number
            if contradicts:
                gathers = "gather" in entry.op + note["what"]
                advice = self._out_of_step(notes) or self._advice({entry.phase, note["phase"]}, gathers)
                return f"rank {rank} waits in {note['what']} ({note['phase']}) instead.\n{advice}"
            if group == here[0] and (parted := self._parted(entry, note["was"])):
                was, mine_was = parted
                return f"rank {rank} was in {was} where this rank was in {mine_was}.\n{_PROGRAM}"
            if missing and "finished" in note:
                advice = self._out_of_step(notes)
                return f"rank {rank} {_FINISHED}. {advice}" if advice else f"rank {rank} {_FINISHED}.\n{_PROGRAM}"
        return None

    def _parted(self, entry: Entry, was: dict[str, list[str]]) -> tuple[str, str] | None:
        """The first collective that another rank, which says what its last ones were, knows as a different one."""
        for number, kind in entry.log.recent().items():
            if was.get(number, kind) != kind:
                theirs, mine = (" of ".join(filter(None, each)).replace("_", "-") for each in (was[number], kind))
                return theirs, mine
        return None

    def _out_of_step(self, notes: dict[int, dict[str, Any]]) -> str:
        """What to say if the ranks, as far as their notes tell, have made different numbers of optimizer steps."""
        made = {self._everyone.rank: self._recorder.progress}
        for rank, note in notes.items():
            if self._name in note.get("made", {}):
                made[rank] = Progress(**note["made"][self._name])
        return out_of_step(dict(sorted(made.items()))) if len({of.steps for of in made.values()}) > 1 else ""

    def _advice(self, phases: set[str], gathers: bool) -> str:
        """What may have led ranks to different collectives in these phases. gathers: one of them is a gather."""
        stage = self._recorder.progress.stage
        if not gathers or stage == 0 or not phases <= {"forward", "backward"}:
            return _PROGRAM
        return _EDITS if stage in (1, 2) else _ROUTING

    def failure(self, what: str, error: Exception, entry: Entry | None = None) -> CommError:
        """The error for a collective that failed, with what the other ranks were doing."""
        where = f"rank {self._everyone.rank} of {self._everyone.size}: {what} ({self._recorder.phase}) failed"
        if waits_on_device(self._everyone.handle):
            where += f" on the control group, which uses gloo{_WATCHDOG}gloo says"
        return CommError(
            f"{where}: {error}\n"
            "Another rank stopped, is much slower, or did not take part in this collective: look at its output first.\n"
            f"{ask(entry)}".rstrip()
        )


# -- notes, which the store keeps by the ranks' numbers in the world ---------------------------------------------------

_note: dict[str, Any] = {}  # this rank's
_made: dict[str, Progress] = {}  # of the newest agreements, by their names; an engine may be gone when its rank says so


def _store() -> dist.Store:
    return dist.PrefixStore("zerolab/waits", dist.distributed_c10d._get_default_store())


def _post(note: dict[str, Any]) -> None:
    """Replace this rank's note."""
    global _note
    made = {name: asdict(progress) for name, progress in _made.items()}
    _note, store = note | {"issued": issued(), "made": made}, _store()
    store.set(str(dist.get_rank()), json.dumps(_note))
    store.add("posts", 1)


def _finished() -> None:
    """`launch`: this rank's function has returned, and the process stays for the next one."""
    if dist.is_initialized() and issued():
        with suppress(dist.DistError):
            _post(_note | {"finished": True})  # it may have finished because it waited in vain


at_return.append(_finished)
