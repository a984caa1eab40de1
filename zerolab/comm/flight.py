"""The flight recorder: when a collective fails, one table shows which one each rank waits in, with which shapes.

Each process keeps its last collectives (`Log.note`: no tensors, less than a microsecond). A rank whose collective
failed asks the others through the store. In each process a thread looks for the question, and answers even while
the rank computes. One of the ranks that asked prints the table; all of them get the sentence that names the odd rank.

Torch keeps its own record, which knows operations and shapes, but neither units nor phases. It supplies the
collectives that are not the engine's, and on NCCL whether the device has finished one.
"""

from __future__ import annotations

import itertools
import json
import linecache
import os
import socket
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from zerolab.world.processes import Patience

WIDTH = 80
KEPT = 64  # collectives of a process
TURN = 0.3  # seconds between two looks for the question
PATIENCE = 2.0  # seconds that the others have to answer
PAUSE = 0.05  # seconds between two looks for their answers
TOLD = 32  # collectives of which a rank that waits tells the others
LIMIT = 4.0  # seconds until a failure is reported without the others

Row = dict[str, Any]  # a rank's answer, see _row
Line = tuple[str, str, str | None, float]  # of the table: what a rank does, with which collective, its shape, seconds


@dataclass(slots=True)
class Entry:
    """One collective. Times are in seconds since the epoch, 0 until they come."""

    log: Log
    number: int  # in its group, from 1
    op: str
    unit: str
    phase: str
    shape: torch.Size
    dtype: torch.dtype
    start: float
    issued: float = 0.0
    wait: float = 0.0  # when this rank began to stand still for it
    end: float = 0.0


class Log:
    """The collectives of one group. All its members number them alike."""

    def __init__(self, name: str, ranks: list[int], recent: deque[Entry]) -> None:
        self.name, self.ranks, self._recent = name, ranks, recent
        self.count = 0  # of the collectives that this rank has issued

    def note(self, op: str, unit: str, phase: str, payload: torch.Tensor) -> Entry:
        self.count += 1
        entry = Entry(self, self.count, op, unit, phase, payload.shape, payload.dtype, time.time())
        self._recent.append(entry)
        return entry

    def recent(self) -> dict[str, list[str]]:
        """What the last collectives were, by their numbers: operation and unit. JSON."""
        last = [entry for entry in self._recent if entry.log is self][-TOLD:]
        return {str(entry.number): [entry.op, entry.unit] for entry in last}


class _World:
    """This process's recorder, for as long as it stays in one default process group."""

    def __init__(self) -> None:
        self.group = ref(dist.group.WORLD)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.nccl = "nccl" in dist.get_backend_config()
        self.recent: deque[Entry] = deque(maxlen=KEPT)
        self.logs: dict[str, Log] = {}
        self._asked, self._told, self._stopped = threading.Event(), threading.Event(), False
        self._verdict: str | None = None
        self._text = ""  # the table, on the rank that prints it
        self._thread: threading.Thread | None = None
        if self.size == 1 or dist.get_backend() == "fake":
            return
        # The thread has its own connection: the main thread may be waiting on the other one.
        clone = getattr(dist.distributed_c10d._get_default_store(), "clone", None)  # a user's own store may lack it
        if clone is None:
            return
        with suppress(RuntimeError, OSError):
            self._store, self._server = dist.PrefixStore("zerolab/flight", clone()), _line_to_the_server()
            self._thread = threading.Thread(target=self._watch, name="flight recorder", daemon=True)
            self._thread.start()

    def log(self, group: dist.ProcessGroup, kind: str) -> Log:
        name = f"{group.group_name}{kind}"
        if name not in self.logs:
            self.logs[name] = Log(name, dist.get_process_group_ranks(group), self.recent)
        return self.logs[name]

    def ask(self, failed: Entry | None) -> str:
        """The sentence about the odd rank, empty if nothing is known; takes at most `LIMIT` seconds."""
        if self._thread is None:
            return ""
        if failed is None and self.recent:  # it could not even start
            failed = self.recent[-1]
            failed.wait = failed.wait or time.time()
        self._asked.set()
        patience = Patience(LIMIT, longest=TURN)
        while not self._told.wait(TURN) and patience.turn() > 0:
            pass
        if self._verdict is None:
            self._verdict = self._tell_alone()
        text, self._text = self._text, ""
        if text:  # not from the thread: a notebook would show it under the cell that started the thread
            line = "-" * WIDTH
            sys.stderr.write(f"{line}\n{text}\n{line}\n")
            sys.stderr.flush()
        return self._verdict

    def _tell_alone(self) -> str:
        holder = "its process (torchrun's agent on the first host, or rank 0) has ended, is stopped, or is cut off"
        sentence = f"the store does not answer, so nobody can be asked: {holder}"
        self._text = table({self.rank: _row(self)}, self.rank, sentence)
        return sentence

    def stop(self) -> None:
        self._stopped = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(1.0)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            with suppress(dist.DistError):  # the store is gone, and with it any rank that might ask
                self._store.set(f"who/{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))
                self._answer_when_asked()
        finally:
            self._told.set()
            if self._server is not None:
                self._server.close()

    def _answer_when_asked(self) -> None:
        answered = False
        while not self._stopped and self.group() is not None:
            asked = self._asked.wait(TURN)
            if self._server is not None and _hung_up(self._server):
                return
            if asked and not self._stopped:
                if self._store.check(["verdict"]):  # already told, while this rank was elsewhere
                    self._verdict = self._store.get("verdict").decode()
                    return
                self._store.set("asked", "")
                self._answer()
                self._tell(self._collect())
                return
            if not answered and self._store.check(["asked"]):
                self._answer()
                answered = True

    def _answer(self) -> None:
        self._store.set(f"row/{self.rank}", json.dumps(_row(self)))

    def _collect(self) -> dict[int, Row]:
        """The rows of all ranks; for one that does not answer, the reason, as far as it is known."""
        patience = Patience(PATIENCE, longest=2 * PAUSE)
        rows: dict[int, Row] = {}
        while True:
            for rank in range(self.size):
                if rank not in rows and self._store.check([f"row/{rank}"]):
                    rows[rank] = json.loads(self._store.get(f"row/{rank}"))
            silent = {rank: self._fate(rank) for rank in range(self.size) if rank not in rows}
            if patience.turn() <= 0 or all(certain for _, certain in silent.values()):
                return rows | {rank: {"silent": fate} for rank, (fate, _) in silent.items()}
            time.sleep(PAUSE)

    def _fate(self, rank: int) -> tuple[str, bool]:
        """What happened to a rank that does not answer, and whether that is certainly the reason."""
        if not self._store.check([f"who/{rank}"]):
            return "it has made no Comm, or died before", False
        host, pid = json.loads(self._store.get(f"who/{rank}"))
        name = f"process {pid} on {host}"
        state = _state(pid) if host == socket.gethostname() else None
        if state is None:
            return f"{name} died, is stopped, or cannot be reached", False
        if state in "ZX":
            return f"{name} is dead", True
        if state in "Tt":
            return f"{name} is stopped, by a signal or a debugger", True
        return f"{name} does not answer: it is busy outside Python", False

    def _tell(self, rows: dict[int, Row]) -> None:
        self._verdict = verdict(rows)
        if self._store.add("printers", 1) == 1:
            self._text = table(rows, self.rank, self._verdict)
            self._store.set("verdict", self._verdict)
        elif self._comes("verdict", 1.0):  # when this rank fails, its parent may end the rank that prints
            self._verdict = self._store.get("verdict").decode()

    def _comes(self, key: str, seconds: float) -> bool:
        patience = Patience(seconds, longest=2 * PAUSE)
        while not self._store.check([key]):
            if patience.turn() <= 0:
                return False
            time.sleep(PAUSE)
        return True


_world: _World | None = None


def _line_to_the_server() -> socket.socket | None:
    """A connection on which nothing is ever said: it ends with the process that holds the store.

    That may be rank 0, and end first. To ask a store that is gone makes torch print a page about it.
    """
    store = dist.distributed_c10d._get_default_store()
    store = getattr(store, "_underlying_non_prefix_store", store)
    if not isinstance(store, dist.TCPStore):
        return None
    line = socket.create_connection((store.host, store.port), timeout=LIMIT)
    line.setblocking(False)
    return line


def _hung_up(line: socket.socket) -> bool:
    try:
        return not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def log_of(group: dist.ProcessGroup, kind: str = "") -> Log:
    """The log of a group's collectives, or of its collectives of one `kind`."""
    global _world
    if _world is None or _world.group() is not dist.group.WORLD:
        if _world is not None:
            _world.stop()
        _world = _World()
    return _world.log(group, kind)


def issued() -> dict[str, int]:
    """How many collectives this rank has issued in each group, by the names of their logs."""
    return {name: log.count for name, log in _world.logs.items()} if _world is not None else {}


def ask(failed: Entry | None) -> str:
    """A collective failed: print the table, on one of the ranks, and return what is odd, if anything."""
    return _world.ask(failed) if _world is not None else ""


def stop() -> None:
    """End the thread that looks for questions."""
    if _world is not None:
        _world.stop()


# ---------------------------------------------------------------------- what a rank answers


def _row(world: _World) -> Row:
    """This rank's answer: its last collectives, oldest first, and where its main thread is."""
    now, ours, theirs = time.time(), list(world.recent), _recorded_by_torch(world.nccl)
    theirs = [call for call in theirs if not ours or call["created"] >= ours[0].start]
    calls: list[dict[str, Any]] = []
    for entry in ours:
        parts = [call for call in theirs if entry.start <= call["created"] <= (entry.issued or now)]
        theirs = [call for call in theirs if call not in parts]
        done = entry.end and not any(part["state"] == "issued" for part in parts if world.nccl)
        state, since = ("done", entry.end) if done else ("waits", entry.wait) if entry.wait else ("issued", entry.start)
        call: dict[str, Any] = {"group": entry.log.name, "ranks": entry.log.ranks}
        call |= {"number": entry.number, "created": entry.start}
        call |= _names(entry) | {"shape": f"{tuple(entry.shape)} {str(entry.dtype).removeprefix('torch.')}"}
        calls.append(call | {"state": state, "seconds": now - since})
    calls += [call | {"seconds": now - call["created"]} for call in theirs]
    calls.sort(key=lambda call: call["created"])
    return {"calls": calls, "place": _place()}


def _names(entry: Entry) -> dict[str, str]:
    """`name`: what must be the same on every rank. `what`: the name with its number, unless it is a control message."""
    name = entry.op.replace("_", "-") + (f" of {entry.unit} ({entry.phase})" if entry.unit else "")
    return {"name": name, "what": f"#{entry.number} {name}" if entry.unit else name}


def _recorded_by_torch(nccl: bool) -> list[dict[str, Any]]:
    """The collectives in torch's own recorder. What it calls retired has ended: it finished, or it failed."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json", None)
    calls = []
    for entry in json.loads(dump()).get("entries", []) if dump else []:
        sizes = [f"({', '.join(map(str, size))})" for size in entry.get("input_sizes") or []]
        shape = " ".join([*sizes, *(entry.get("input_dtypes") or [])[:1]]).lower()
        name = f"{entry['profiling_name'].partition(':')[2]}, not the engine's"
        calls.append(
            {
                "group": f"torch {' '.join(entry['process_group'])}",
                "ranks": None,
                "number": entry["collective_seq_id"],
                "name": name,
                "what": name,
                "shape": shape,
                "created": entry["time_created_ns"] / 1e9,
                "state": "ended" if entry["retired"] or entry["state"] == "completed" else "issued",
            }
        )
    return calls


def _place() -> str:
    """The innermost of the user's own lines that the main thread is in; empty if it is in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if not _foreign(code.co_filename):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of {os.path.basename(code.co_filename)}, in {code.co_name}: {line}"
        frame = frame.f_back
    return ""


def _foreign(path: str) -> bool:
    """Whether a file belongs to this package, an installed one, or Python."""
    package = os.path.dirname(os.path.dirname(__file__)) + os.sep
    return path.startswith((package, sys.prefix, sys.base_prefix, "<")) or "site-packages" in path


def _state(pid: int) -> str | None:
    """The state of a process on this machine, as the letter that ps shows; X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X" if os.path.isdir("/proc/self") else None


# ---------------------------------------------------------------------- what is told


def verdict(rows: dict[int, Row]) -> str:
    """The sentence that names the odd rank, or one for each if there are several."""
    waits = {rank: call for rank, row in rows.items() if (call := _waits_in(row))}
    places = Counter((call["group"], call["number"]) for call in waits.values())
    sentences: list[str] = []
    told: set[str] = set()
    for (group, number), many in sorted(places.items(), key=lambda place: place[0][1]):
        made = {rank: _in_group(row, group) for rank, row in rows.items()}
        if other := _difference(made):
            return other
        if many < max(places.values()) or group in told:
            continue  # where fewer wait, they may only wait for these ranks, or for an earlier collective
        told.add(group)
        call = next(calls[number] for calls in made.values() if number in calls)
        came = [rank for rank in call["ranks"] if number in made[rank]]
        name = f"{call['what']}, for which {name_ranks(came)} wait{'s' * (len(came) == 1)}"
        late = [rank for rank in call["ranks"] if rank not in came]
        sentences += [f"rank {rank} did not come to {name}: {_doing(rows[rank])}" for rank in late]
        if not late:
            sentences.append(f"all ranks came to {name}: the network between them is slow or broken")
    return "\n".join(sentences)


def _waits_in(row: Row) -> dict[str, Any] | None:
    """The collective that a rank stands still for: the last one, since a failed one stays as it was."""
    return next((call for call in reversed(row.get("calls", [])) if call["state"] == "waits"), None)


def _in_group(row: Row, group: str) -> dict[int, dict[str, Any]]:
    return {call["number"]: call for call in row.get("calls", []) if call["group"] == group}


def _difference(made: dict[int, dict[int, dict[str, Any]]]) -> str:
    """The first collective in which the ranks differ: who is in the minority, and what they did."""
    for number in sorted({number for calls in made.values() for number in calls}):
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, calls in made.items():
            if number in calls:
                kinds.setdefault(_kind(calls[number]), []).append(rank)
        if len(kinds) < 2:
            continue
        following = {_kind(calls[number + 1]): rank for rank, calls in made.items() if number + 1 in calls}
        # A rank that makes now what another rank makes next has skipped what the other makes now.
        skipped = {kind: following.get(kind, ranks[0]) not in ranks for kind, ranks in kinds.items()}
        odd, *_, usual = sorted(kinds, key=lambda kind: (len(kinds[kind]), not skipped[kind], kinds[kind]))
        did = "skipped" if skipped[odd] else "did not take part in"
        many = len(kinds[odd]) > 1
        return (
            f"{name_ranks(kinds[odd])} {did} #{number} {' '.join(usual)} of {name_ranks(kinds[usual])}: "
            f"{'their' if many else 'its'} #{number} is {' '.join(odd)}"
        )
    return ""


def _kind(call: dict[str, Any]) -> tuple[str, str]:
    return call["name"], call["shape"]


def _doing(row: Row) -> str:
    if "silent" in row:
        return row["silent"]
    issued = [call for call in row["calls"] if call["state"] == "issued"]
    if call := _waits_in(row) or (issued[-1] if issued else None):
        return f"it waits in {call['what']}"
    return f"it is at {row['place']}" if row["place"] else "it is not in the script"


def table(rows: dict[int, Row], asker: int, sentence: str) -> str:
    """All ranks, in 80 columns; ranks that did the same share an entry."""
    alike: dict[str, list[int]] = {}
    kept: dict[str, list[Line]] = {}
    for rank in sorted(rows):
        lines = _lines(rows[rank])
        key = json.dumps([line[:3] for line in lines])
        alike.setdefault(key, []).append(rank)
        kept[key] = [max(pair, key=lambda line: line[3]) for pair in zip(kept.get(key, lines), lines)]
    text = [f"flight recorder: rank {asker} asked when its collective failed"]
    for key, ranks in alike.items():
        text.append(f"{name_ranks(ranks)}:")
        for doing, what, shape, seconds in kept[key]:
            if shape is None:
                text += _wrap(f"  {doing:<10} {what}", " " * 13)
                continue
            room = WIDTH - 13 - 2 - len(shape) - 8
            what = what if len(what) <= room else what[: room - 3] + "..."
            text.append(f"  {doing:<10} {what:<{room}}  {shape}{seconds:6.1f} s")
    return "\n".join(line.rstrip() for line in [*text, *_wrap(sentence, "  ")])


def _lines(row: Row) -> list[Line]:
    """What the table says of a rank."""
    if "calls" not in row:
        return [("no record:", row["silent"], None, 0.0)]
    done = [call for call in row["calls"] if call["state"] in ("done", "ended")][-1:]
    waits = [call] if (call := _waits_in(row)) else []
    issued = [call for call in row["calls"] if call["state"] == "issued"]
    calls = [("completed" if call["state"] == "done" else "ended", call) for call in done] + [
        ("waits in", call) for call in waits
    ]
    calls += [("issued", call) for call in issued[-(1 if waits else 2) :]]
    lines: list[Line] = [(doing, call["what"], call["shape"], call["seconds"]) for doing, call in calls]
    if not waits:
        lines.append(("is at", row["place"] or "no line of the script", None, 0.0))
    return lines


def _wrap(text: str, indent: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True)
    return lines


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0-3, 5`."""
    parts: list[str] = []
    ordered = sorted(ranks)
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(parts)}"
