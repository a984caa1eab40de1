"""Lesson 11: which parts of which file a rank reads, and a save that a crash cannot spoil."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.lab import crash
from zerolab.lab.crash import INDEX, Death, Operation, Run
from zerolab.lab.exercises.checks import values
from zerolab.lab.exercises.exercise import Exercise, Todo, World, Wrong
from zerolab.world.processes import Patience

# ---------------------------------------------------------------------- 11.1

Files = list[tuple[str, int]]
Read = tuple[str, int, int, int]

PADDING = (
    "padding was read as data: the unit has `numel` elements, and what comes after them in the last files is padding"
)
IN_UNIT = (
    "start and stop count from the beginning of the unit: they must count from the beginning of that file's shard, so "
    "subtract the number of elements in the files before it"
)
AT_IN_UNIT = "`at` counts from the beginning of the unit: it must count from the beginning of this rank's new shard"
AT_IN_FILE = "`at` counts in the file: it must count from the beginning of this rank's new shard"
NO_AT = "every read goes to the beginning of the new shard, so that they overwrite each other: `at` must move on"
PLUS_ONE = "numel // ranks + 1 is one too many where the ranks divide the unit evenly: math.ceil(numel / ranks)"
BALANCED = (
    "the first ranks got an element more than the others: all shards have math.ceil(numel / ranks) elements, and only "
    "the last ones hold fewer"
)
ORDER = "the numbers of a read are in another order: (file, start, stop, at)"
OWN_FILE = "rank r reads file r only: with another number of ranks, the shards are cut at other places"
NOT_ALL_FILES = "it looks into the first `ranks` files only: there are len(files) of them, whatever `ranks` is"
EVERYTHING = "it reads all of all files: a rank must read what it owns, and nothing else"
WHOLE_FILES = "it reads whole files: of the files at its borders, a rank needs a part only"
BORDER = "off by one at the border of a file: ranges are half open, [start, stop), in Python as here"
EMPTY = "an empty read: a file that has nothing for this rank is not read at all"
TAIL = "the tail is lost: a shard has math.ceil(numel / ranks) elements, so round up, not down"
LAST_LONGER = (
    "the last shard was made longer: all shards have math.ceil(numel / ranks) elements, and the last is padded instead"
)
BY_NAME = 'the files were sorted by name, where "rank-10" comes before "rank-2": `files` is in rank order as it is'
TWICE = "something is read twice"
LENGTHS = "(start, length) instead of (start, stop)"
IN_BYTES = "bytes instead of elements: safetensors slices count elements, whatever their dtype"
PADDED_UNIT = "the new shards were cut from the old padded length: divide `numel`, which has no padding"


def old_files(numel: int, ranks: int) -> Files:
    """What `ranks` ranks wrote of a unit: the names in rank order, and the elements of each shard."""
    return [(f"rank-{rank}-of-{ranks}.safetensors", math.ceil(numel / ranks)) for rank in range(ranks)]


def right_reads(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
    shard, found = math.ceil(numel / ranks), []
    first, last = rank * shard, min(rank * shard + shard, numel)
    for number, (name, length) in enumerate(files):
        begin, end = max(first, number * length), min(last, number * length + length)
        if begin < end:
            found.append((name, begin - number * length, end - number * length, begin - first))
    return found


SIZES = (12, 13, 7, 3, 1, 2, 5, 30)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def cases(ranks: int) -> Iterator[tuple[Files, int]]:
    """Old files and sizes: the smallest that tell mistakes apart come first."""
    for old in dict.fromkeys((ranks, 1, 2, 3, 4, 12)):
        for numel in SIZES if old != 12 else (30, 100, 5):
            yield old_files(numel, old), numel


def check_reads(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    with tempfile.TemporaryDirectory(prefix="zerolab-check-") as folder:
        for number, (files, numel) in enumerate(cases(N)):
            given, old = list(files), len(files)
            when = f"{numel} elements, {old} file{'s' * (old > 1)} -> {N} rank{'s' * (N > 1)}, rank {rank}"
            with world.record(), values.in_case(answer, when, "an error in the code, at the line shown", ERRORS_1):
                got = _plan(answer, given, numel, N, rank)
            if given != files:
                raise Wrong(f"{when}: `files` has changed", "the caller still needs it: work on a copy")
            check_form(got, files, when)
            want = right_reads(files, numel, N, rank)
            if _joined(got) != sorted(want):
                likely = _everywhere(answer) or _here(got, want, files, numel, N, rank)
                raise Wrong(f"{when}: {_listed(got)}, expected {_listed(want)}", likely)
            read_really(Path(folder), got, files, numel, N, rank, when, DTYPES[number % len(DTYPES)])
            if len(got) > len(want):
                world.note("some reads could be one: neighbouring elements of a file are fastest in one read")


def _plan(answer: Any, files: Files, numel: int, ranks: int, rank: int) -> Any:
    got = answer.plan_reads(files, numel, ranks, rank)
    return got if got is None or isinstance(got, dict | str | Tensor | int) else list(got)


def _joined(reads: list[Any]) -> list[Read]:
    """Sorted, and what follows on in the file and in the shard as one read."""
    found: list[Read] = []
    for name, start, stop, at in sorted(map(tuple, reads)):
        if found and start < stop and found[-1][0] == name and found[-1][2] == start:
            name, first, _, place = found[-1]
            if place + start - first == at:
                found[-1] = (name, first, stop, place)
                continue
        found.append((name, start, stop, at))
    return found


def check_form(got: Any, files: Files, when: str) -> None:
    """Raises Wrong unless `got` is a list of (a name from `files`, start, stop, at)."""
    shape = "return a list of tuples (file, start, stop, at)"
    if not isinstance(got, list):
        raise Wrong(f"{when}: it returns a {type(got).__name__}, not a list", values.forgot_to_return(got) or shape)
    names = [name for name, _ in files]
    for read in got:
        if not isinstance(read, tuple | list) or len(read) != 4:
            raise Wrong(f"{when}: {read!r} is among the reads", shape)
        name, *numbers = read
        if isinstance(name, int | tuple):
            raise Wrong(f"{when}: the file is {name!r}", "the file's name is asked for, files[i][0]")
        if name not in names:
            raise Wrong(f"{when}: there is no file {name!r}", "take the names from `files`")
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            likely = "start, stop and at are whole numbers: use // or math.ceil()"
            raise Wrong(f"{when}: {read!r} is among the reads", likely)


def _listed(reads: list[Any]) -> str:
    """Short enough for a line: without the files' endings."""
    shown = [f"({read[0].split('-of-')[0]}, {read[1]}, {read[2]}, {read[3]})" for read in reads[:4]]
    return f"[{', '.join(shown)}{', ...' * (len(reads) > 4)}]" if reads else "no reads"


# -- known mistakes, each as the plan to which it leads

Plan = Callable[[Files, int, int, int], list[Read]]


def _changed(change: Callable[[Read, int, int], tuple[Any, ...]]) -> Plan:
    """The right reads, each as `change(read, where its file begins in the unit, where the new shard does)` has it."""

    def plan(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
        length, first = files[0][1], rank * math.ceil(numel / ranks)
        begin = {name: i * length for i, (name, _) in enumerate(files)}
        return [change(read, begin[read[0]], first) for read in right_reads(files, numel, ranks, rank)]  # type: ignore[misc]

    return plan


def _scaled(k: int, k_at: int) -> Plan:
    return _changed(lambda r, begin, first: (r[0], k * r[1], k * r[2], k_at * r[3]))


def _shards(length: Callable[[Files, int, int], int], longer: bool = False, padded: bool = False) -> Plan:
    """New shards of another length; the last one goes on to the end if `longer`, over the padding if `padded`."""

    def plan(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
        shard = length(files, numel, ranks)
        last = numel if longer and rank == ranks - 1 else rank * shard + shard
        return _cut(files, rank * shard, last if padded else min(last, numel))

    return plan


def _own_file(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
    length = files[0][1]
    stop = min(length, numel - rank * length)
    return [(files[rank][0], 0, stop, 0)] if rank < len(files) and stop > 0 else []


def _from_own_file(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
    return [read for read in right_reads(files, numel, ranks, rank) if files[rank:] and read[0] == files[rank][0]]


def _all(at: Callable[[int, int], int]) -> Plan:
    def plan(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
        first = rank * math.ceil(numel / ranks)
        return [(name, a, b, at(begin, first)) for name, a, b, begin in _cut(files, 0, numel)]

    return plan


def _whole(rest: bool) -> Plan:
    """Whole files, those that have something for the rank; with their padding, or without."""

    def plan(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
        length, begin = files[0][1], {name: i * files[0][1] for i, (name, _) in enumerate(files)}
        reads = right_reads(files, numel, ranks, rank)
        return [(name, 0, length if rest else min(length, numel - begin[name]), at) for name, _, _, at in reads]

    return plan


def _one_begin(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
    shard = math.ceil(numel / ranks)
    first, last = rank * shard, min(rank * shard + shard, numel)
    return [(name, first, min(last, length), 0) for name, length in files if first < min(last, length)]


ROUND = "round() rounds down as often as up, and then the tail is lost: math.ceil(numel / ranks)"
ONE_BEGIN = "every file is taken to begin where the unit does: each begins where the one before it ends"


def _balanced(files: Files, numel: int, ranks: int, rank: int) -> list[Read]:
    share, more = divmod(numel, ranks)
    first = rank * share + min(rank, more)
    return _cut(files, first, first + share + (rank < more))


def _in_order(*order: int) -> Plan:
    """The right reads, but for the order of their three numbers."""

    def plan(files: Files, numel: int, ranks: int, rank: int) -> list[Any]:
        return [(read[0], *(read[place] for place in order)) for read in right_reads(files, numel, ranks, rank)]

    return plan


KNOWN: list[tuple[Plan, str]] = [
    (_changed(lambda r, begin, first: (r[0], r[1] + begin, r[2] + begin, r[3])), IN_UNIT),
    (_changed(lambda r, begin, first: (r[0], r[1] + begin, r[2] + begin, r[3] + first)), IN_UNIT),
    (_changed(lambda r, begin, first: (r[0], r[1], r[2], r[3] + first)), AT_IN_UNIT),
    (_changed(lambda r, begin, first: (r[0], r[1], r[2], r[1])), AT_IN_FILE),
    (_changed(lambda r, begin, first: (r[0], r[1], r[2], 0)), NO_AT),
    (_changed(lambda r, begin, first: (r[0], r[1], r[2] - r[1], r[3])), LENGTHS),
    *((_scaled(k, k), IN_BYTES) for k in (2, 4, 8)),
    *((_scaled(k, 1), IN_BYTES) for k in (2, 4, 8)),
    (lambda files, numel, ranks, rank: right_reads(sorted(files), numel, ranks, rank), BY_NAME),
    (lambda files, numel, ranks, rank: right_reads(files[:ranks], numel, ranks, rank), NOT_ALL_FILES),
    (_shards(lambda files, numel, ranks: numel // ranks), TAIL),
    (_shards(lambda files, numel, ranks: numel // ranks, longer=True), LAST_LONGER),
    (_shards(lambda files, numel, ranks: round(numel / ranks)), ROUND),
    (_shards(lambda files, numel, ranks: math.ceil(numel / ranks), padded=True), PADDING),
    (_shards(lambda files, numel, ranks: math.ceil(files[0][1] * len(files) / ranks)), PADDED_UNIT),
    (_shards(lambda files, numel, ranks: math.ceil(files[0][1] * len(files) / ranks), padded=True), PADDED_UNIT),
    (_shards(lambda files, numel, ranks: files[0][1] * len(files) // ranks, padded=True), PADDED_UNIT),
    (_own_file, OWN_FILE),
    (
        lambda files, numel, ranks, rank: [(*files[rank : rank + 1][0][:1], 0, files[0][1], 0)] if files[rank:] else [],
        OWN_FILE,
    ),
    (_from_own_file, OWN_FILE),
    (_all(lambda begin, first: begin), EVERYTHING),
    (_all(lambda begin, first: begin - first), EVERYTHING),
    (_all(lambda begin, first: max(0, begin - first)), EVERYTHING),
    (_whole(rest=False), WHOLE_FILES),
    (_whole(rest=True), WHOLE_FILES),
    (_one_begin, ONE_BEGIN),
    (_shards(lambda files, numel, ranks: numel // ranks + 1), PLUS_ONE),
    (_balanced, BALANCED),
    *((_in_order(*order), ORDER) for order in itertools.permutations((1, 2, 3)) if order != (1, 2, 3)),
]


def _everywhere(answer: Any) -> str:
    """The known mistake that explains the answer in every case, whatever the number of ranks; "" if none does."""
    possible = list(KNOWN)
    for ranks in (1, 2, 3, 4):
        for files, numel in cases(ranks):
            for rank in range(ranks):
                try:
                    got = sorted(map(tuple, _plan(answer, list(files), numel, ranks, rank)))
                except Exception:  # it may fail where its mistake leads nowhere
                    continue
                possible = [(plan, why) for plan, why in possible if sorted(plan(files, numel, ranks, rank)) == got]
        if not possible:
            return ""
    return possible[0][1]


def _here(got: list[Any], want: list[Read], files: Files, numel: int, ranks: int, rank: int) -> str:
    """What is wrong in this case, where no known mistake explains all cases; "" if that cannot be told."""
    length, shard = files[0][1], math.ceil(numel / ranks)
    begin = {name: i * length for i, (name, _) in enumerate(files)}
    if any(stop <= start for _, start, stop, _ in got):
        return EMPTY
    if any(start < 0 or at < 0 for _, start, _, at in got):
        return "a negative number: where the file begins before the new shard, or after it, max(0, ...) is missing"
    if any(stop > length for _, _, stop, _ in got):
        return f"a read goes beyond the {length} elements that the file has of this unit: stop is at most its length"
    flats = [begin[name] + i for name, start, stop, _ in got for i in range(start, stop)]
    needed = [begin[name] + i for name, start, stop, _ in want for i in range(start, stop)]
    missing, extra = set(needed) - set(flats), set(flats) - set(needed)
    if any(flat >= numel for flat in flats):
        return PADDING
    if any(at + stop - start > shard for _, start, stop, at in got):
        return "a read goes beyond the end of this rank's new shard"
    if len(set(flats)) < len(flats):
        return TWICE
    ends = {end for name, start, stop, _ in want for end in (begin[name] + start, begin[name] + stop - 1)}
    near = ends | {end - 1 for end in ends} | {end + 1 for end in ends}
    if missing | extra and missing | extra <= near and len(missing | extra) <= 2 * max(1, len(want)):
        return BORDER
    if extra:
        return "it reads elements that belong to another rank's new shard" * (not missing)
    if missing:
        return "some of this rank's elements are in no read: look into every file"
    return "the right elements, but `at` sends them to the wrong places of the new shard"


def _cut(files: Files, first: int, last: int) -> list[Read]:
    """The reads of the flat elements [first, last)."""
    found, begin = [], 0
    for name, length in files:
        start, stop = max(first, begin), min(last, begin + length)
        if start < stop:
            found.append((name, start - begin, stop - begin, start - first))
        begin += length
    return found


def read_really(
    folder: Path, got: list[Any], files: Files, numel: int, ranks: int, rank: int, when: str, dtype: torch.dtype
) -> None:
    """Write the files, with garbage for padding, and read them by the plan: every element in its place, and no more."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    flat = torch.full((sum(length for _, length in files),), -1, dtype=dtype)
    flat[:numel] = torch.arange(1, numel + 1, dtype=dtype)
    for (name, _), part in zip(files, flat.chunk(len(files)), strict=True):
        save_file({"unit": part.clone()}, folder / name)
    shard, elements = torch.zeros(math.ceil(numel / ranks), dtype=dtype), 0
    for name, start, stop, at in got:
        with safe_open(folder / name, framework="pt") as file:
            part = file.get_slice("unit")[start:stop]
        shard[at : at + stop - start] = part
        elements += part.numel()
    want = torch.zeros_like(shard)
    want[: max(0, numel - rank * len(shard))] = flat[:numel][rank * len(shard) : (rank + 1) * len(shard)]
    values.compare(f"{when}, read from real files in {dtype}", shard + 1, want + 1)
    if elements != int((want != 0).sum()):
        raise Wrong(f"{when}: {elements} elements were read", TWICE)


ERRORS_1 = {
    "division by zero": "nothing is to be divided by the number of a rank: ranks is 1 or more",
    "not subscriptable": "`files` is a list of (name, length)",
    "list indices must be": "`files` is a list of (name, length): for name, length in files",
    "list index out of range": "there are len(files) old files and `ranks` new ranks: the two differ",
}

READS_STUB = '''\
import math
from zerolab.lab.exercises import Todo


def plan_reads(files: list[tuple], numel: int, ranks: int, rank: int) -> list[tuple]:
    """What `rank` of `ranks` reads of one unit: a list of (file, start, stop, at).

    Elements [start, stop) of the shard in `file` go to `at` and after it in the new shard.

    numel: the elements of the unit, without padding. files: for each rank that saved, in
    order, the name of its file and the length of its shard of this unit. Laid end to end,
    these shards are the unit and then padding. The new shards have math.ceil(numel / ranks)
    elements each. The last ones may be padding, which nobody reads.
    """
    raise Todo("11.1")
'''

READS = """\
import math


def plan_reads(files: list[tuple], numel: int, ranks: int, rank: int) -> list[tuple]:
    shard = math.ceil(numel / ranks)
    first, last = rank * shard, min((rank + 1) * shard, numel)  # what this rank owns
    reads, begin = [], 0
    for name, length in files:  # this file has elements [begin, begin + length) of the unit
        start, stop = max(first, begin), min(last, begin + length)
        if start < stop:
            reads.append((name, start - begin, stop - begin, start - first))
        begin += length
    return reads
"""


# ---------------------------------------------------------------------- 11.2

IN_PLACE = (
    "the index was written in place, over the old one: write it under another name, then os.replace() puts it in the "
    "place of the old one in a single operation"
)
INDEX_GONE = (
    "the old index was taken away before the new one was in its place: os.replace() does both in a single operation"
)
OLD_FIRST = "files of the old checkpoint were removed while the index still names them: remove them last"
OVERWRITTEN = (
    "a file of the old checkpoint was overwritten while the index still names it: give the new files other names, for "
    "example with the step in them"
)
INDEX_FIRST = "the index appeared before the files that it names: it comes last"
NO_BARRIER = (
    "the index appeared before every rank had written its file: rank 0 must wait for all of them with barrier()"
)
SAME_NAME = "two ranks write the same file: put the rank into every name, also into that of a temporary file"
MANY_INDEXES = "several ranks put an index in place: one of them, rank 0, is enough, and two get in each other's way"
NOT_FLUSHED = (
    "file.write() hands the bytes to the system, which writes them to the disk later; a power cut loses them. "
    "Before the index appears, every file needs file.flush(), then os.fsync(file.fileno())"
)
FLUSHED_EARLY = (
    "flushed too early: when os.fsync() was called, some bytes were still in Python's buffer. file.flush() comes first"
)
INDEX_NOT_FLUSHED = (
    "the index was not flushed before it was renamed: file.flush(), os.fsync(file.fileno()), os.replace()"
)
OLD_STAYS = "files of the old checkpoint stay: with every save they fill the disk, so remove them, last"
OTHER_RANKS_STAY = (
    "a file of the old checkpoint stays: it was saved by more ranks than there are now, so nobody removed that rank's "
    "file"
)
NOT_THAT = "is not what it saved"
OUTSIDE = (
    "the temporary file is in another folder: a rename is a single operation only within one file system, and nobody "
    "removes what a killed save leaves there. Put it beside the file that it becomes"
)
PASSED = (
    "a rank whose write failed called barrier() all the same, as in a `finally`, so rank 0 took its file for written: "
    "after an error do not call it, and no index appears"
)
APPENDED = "something was added to what a killed save left behind: begin each file anew, in mode 'wb'"
LEFTOVER = "what a killed save left behind stays for ever: a save that succeeds must remove that too"
TEMPORARY_STAYS = "after an error the temporary file stays, and fills the disk further: remove it in a `finally`"
SWALLOWED = "the error was swallowed: the caller believes that there is a checkpoint. Clean up, then let it through"
REMOVES_OTHERS = (
    "a rank was still removing files when another had begun the next save, and removed its file: let all ranks leave "
    "together, with another barrier(), or remove only what the old index names"
)
EXISTS = (
    "what a killed save left behind made the next one fail: it must be overwritten or removed (mode 'wb', not 'xb'; "
    "exist_ok=True)"
)
UNEQUAL = (
    "not every rank calls barrier() equally often, so one of them waits for ever: call it outside of `if rank == 0:`"
)
OWN_BARRIER = "save_checkpoint() is given barrier(): call that one, which is right for any group of ranks"
FOLDER_FLUSH = (
    "a file's name is content of its folder: to be sure of the rename after a power cut, flush the folder too "
    "(os.open(folder, os.O_RDONLY), os.fsync(), os.close())"
)


def part(step: int, rank: int) -> bytes:
    """What `rank` saves in `step`: a real safetensors file."""
    from safetensors.torch import save

    return save({"unit": torch.arange(8 + rank, dtype=torch.float32) + 100 * step})


@dataclass
class Finding:
    """What a scenario found. `number`: the place of the scenario in the list of all."""

    number: int
    seen: str
    likely: str


def check_save(answer: Any, world: World) -> None:
    with folder_of_all(world) as folder:
        told = everyone(world, [vars(found) for found in search(answer, world, folder)])
    findings = sorted((Finding(**found) for rows in told for found in rows), key=lambda found: found.number)
    if findings:  # the same on every rank, so that the verdict does not depend on who found it
        raise Wrong(findings[0].seen, findings[0].likely)
    with folder_of_all(world) as folder:
        check_live(answer, world, folder)


def _barrier() -> None:
    dist.barrier()  # from here, so that it does not count as the answer's own call


def check_live(answer: Any, world: World, folder: Path) -> None:
    """On live ranks, with a real barrier: the first checkpoint, and the second in its place."""
    N, rank = world.world_size, world.rank
    for step in (1, 2):
        what = f"save_checkpoint(..., step={step}) on {N} rank{'s' * (N > 1)}"
        with world.record() as calls:
            result = answer.save_checkpoint(folder, step, part(step, rank), rank, N, _barrier)
        if any(call.on_world for call in calls):
            raise Wrong(f"{what}: it calls dist.{next(c.op for c in calls if c.on_world)}() itself", OWN_BARRIER)
        everyone(world, "saved")
        if result is not None:
            raise Wrong(f"{what} returns a {type(result).__name__}", "it returns nothing: what counts is on the disk")
        if found := look(folder, {step: N}, Run(), None):
            raise Wrong(f"{what}: {found[0]}", found[1])
        everyone(world, "looked")


def search(answer: Any, world: World, folder: Path) -> Iterator[Finding]:
    """Saves that are killed, at every operation of one rank after the other. Each live rank tries some of them."""
    N = world.world_size
    number = 0
    home = folder / f"tries-{world.rank}"
    tries = _Tries(answer, home, world)
    try:
        for scenario in tries.scenarios(N):
            number += 1
            if number % N != world.rank:
                continue
            if found := scenario():
                yield Finding(number, *found)
                return
    except Wrong as wrong:  # of the first save, which every rank makes
        yield Finding(0, wrong.seen, wrong.likely)
    finally:
        shutil.rmtree(home, ignore_errors=True)


Told = tuple[str, str]


class _Tries:
    """Scenarios: each is a function that returns what it saw and the likely mistake, or None."""

    def __init__(self, answer: Any, home: Path, world: World) -> None:
        self.answer, self.home, self.world = answer, home, world
        self.home.mkdir()
        self._old: dict[int, Path] = {}

    def scenarios(self, N: int) -> Iterator[Callable[[], Told | None]]:
        orders = [list(range(N))] + ([list(range(N))[::-1]] if N > 1 else [])
        for order in orders:
            yield partial(self.complete, N, order, N)
        yield partial(self.complete, N, orders[-1], N + 1)
        for order in orders[::-1]:
            yield partial(self.in_a_row, N, order)
        if N <= 3:
            for target in dict.fromkeys((0, N - 1)):
                others = [rank for rank in range(N) if rank != target]
                for order in ([*others, target], [target, *others])[: 1 + (N == 2)]:
                    run = self._play(N, self._fresh(N), 2, order)
                    for number, operation in enumerate(run.of(target)):
                        for within in (False, True)[: 1 + (operation.what == "open")]:
                            death = Death(target, number, within)
                            yield partial(self.killed, N, order, death)
        if N <= 2:
            for rank in range(N)[::-1]:
                yield partial(self.full_disk, N, rank)

    # -- the scenarios ---------------------------------------------------------------------------------------------

    def complete(self, N: int, order: list[int], old: int) -> Told | None:
        folder = self._fresh(old)
        run = self._play(N, folder, 2, order)
        name = _named(N, "save 2", old)
        if said := self._errors(run, name):
            return said
        if said := _calls(run) or look(folder, {2: N}, run, None):
            return f"{name}: {said[0]}", said[1]
        if left := _left(folder):
            return f"{name}: {left[0]} is still there", OTHER_RANKS_STAY if old > N else OLD_STAYS
        index = max(i for i, operation in enumerate(run.operations) if _appears(operation))
        flushed = [operation.path for operation in run.operations[index:] if operation.what in ("fsync", "sync")]
        if not any(path in (".", "") for path in flushed):
            self.world.note(FOLDER_FLUSH)
        return None

    def in_a_row(self, N: int, order: list[int]) -> Told | None:
        """Two saves, the second as soon as the first returns: a rank may be far ahead of another."""
        folder = self._fresh(N)
        run = self._row(N, folder, order)
        name = f"two saves, one right after the other, on {N} rank{'s' * (N > 1)}"
        for rank, error in run.ended.items():
            if error and "No such file" in error:
                return f"{name}: rank {rank}, {error}", REMOVES_OTHERS
        if said := self._errors(run, name):
            return said
        if said := look(folder, {3: N}, run, None):
            likely = REMOVES_OTHERS if "not there" in said[0] else said[1]
            return f"{name}: {said[0]}", likely
        if left := _left(folder):
            return f"{name}: {left[0]} is still there", OLD_STAYS
        return None

    def killed(self, N: int, order: list[int], death: Death) -> Told | None:
        folder = self._fresh(N)
        run = self._play(N, folder, 2, order, death)
        operation = run.of(death.rank)[death.number]
        how = "while it wrote" if death.within else "just before it"
        what = f"{how} {operation.path}" if death.within else f"{how} {operation}"
        name = f"rank {death.rank} of {N} was killed {what}" if N > 1 else f"killed {what}"
        steps = {1: N, 2: N}
        if said := look(folder, steps, run, death, old=1):
            return f"{name}: {said[0]}", said[1]
        if N > 1:
            return None
        # After a restart: the same step again, unless it is the one that loads; or, with other intervals, a later one.
        again = [3] if crash.load(folder)[0] == 2 else [2, 3][: 1 + death.within]
        killed = self.home / "killed"
        shutil.rmtree(killed, ignore_errors=True)
        folder.rename(killed)
        for step in again:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(killed, folder)
            if said := self._next_save(folder, name, step):
                return said
        return None

    def _next_save(self, folder: Path, name: str, step: int) -> Told | None:
        run = self._play(1, folder, step, [0])
        if error := run.ended.get(0):
            likely = EXISTS if "FileExistsError" in error else "an error in the code, at the line shown"
            return f"{name}, and the next save failed: {error}", likely
        if said := look(folder, {step: 1}, run, None):
            return f"{name}, and after the next save: {said[0]}", APPENDED if NOT_THAT in said[0] else said[1]
        if left := _left(folder):
            return f"{name}, and after the next save {left[0]} is still there", LEFTOVER
        return None

    def full_disk(self, N: int, rank: int) -> Told | None:
        folder = self._fresh(N)
        before = _files(folder)
        run = crash.play(self._work(N, folder, 2), folder, N, None, full=rank, module=self.answer)
        name = f"rank {rank}'s disk is full" if N > 1 else "the disk is full"
        if not run.ended.get(rank):
            return f"{name}, and save_checkpoint() returned as if nothing had happened", SWALLOWED
        if said := look(folder, {1: N}, run, None, old=1):
            passed = N > 1 and any(_appears(operation) for operation in run.operations)
            return f"{name}: {said[0]}", PASSED if passed else said[1]
        if N == 1 and (left := [file for file in _files(folder) if file not in before]):
            return f"{name}: afterwards {left[0]} is still there", TEMPORARY_STAYS
        return None

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _work(self, N: int, folder: Path, step: int) -> crash.Work:
        def work(rank: int, barrier: Callable[[], None]) -> None:
            self._alone()
            self.answer.save_checkpoint(folder, step, part(step, rank), rank, N, barrier)

        return work

    def _alone(self) -> None:
        """In a forked process: it is not one of the live ranks, so a call of torch.distributed would go nowhere."""

        def refuse(call: Any) -> None:
            raise RuntimeError(f"dist.{call.op}() of the default group")

        self.world.spy._agree = refuse  # type: ignore[method-assign]

    def _play(self, N: int, folder: Path, step: int, order: list[int], death: Death | None = None) -> Run:
        return crash.play(self._work(N, folder, step), folder, N, order, death, module=self.answer)

    def _row(self, N: int, folder: Path, order: list[int], steps: tuple[int, int] = (2, 3)) -> Run:
        def work(rank: int, barrier: Callable[[], None]) -> None:
            self._alone()
            for step in steps:
                self.answer.save_checkpoint(folder, step, part(step, rank), rank, N, barrier)

        return crash.play(work, folder, N, order, module=self.answer)

    def _fresh(self, ranks: int) -> Path:
        """A folder with the answer's own checkpoint of step 1 by `ranks` ranks."""
        if ranks not in self._old:
            self._old[ranks] = self.home / f"old-{ranks}"
            self._old[ranks].mkdir()
            run = self._play(ranks, self._old[ranks], 1, list(range(ranks)))
            name = f"the first save on {ranks} rank{'s' * (ranks > 1)}"
            if ranks != self.world.world_size:
                name += f", which a save on {self.world.world_size} is to replace"
            if said := self._errors(run, name) or _calls(run) or look(self._old[ranks], {1: ranks}, run, None):
                seen = said[0] if said[0].startswith(name) else f"{name}: {said[0]}"
                raise Wrong(seen, said[1])
        folder = self.home / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._old[ranks], folder)
        return folder

    def _errors(self, run: Run, name: str) -> Told | None:
        if run.unequal:
            return f"{name}: a rank waits in a barrier to which another does not come", UNEQUAL
        for rank, error in run.ended.items():
            if error == "late":
                return f"{name}: rank {rank} does not end", "a loop that does not end: only barrier() waits for others"
            if error.startswith("Todo:"):
                raise Todo("11.2")
            if error:
                likely = next((why for part, why in ERRORS_2.items() if part in error), "")
                return f"{name}: rank {rank}, {error}", likely or "an error in the code, at the line shown"
        return None


def _named(N: int, what: str, old: int) -> str:
    return f"{what} on {N} rank{'s' * (N > 1)} over a checkpoint of {old}"


def _appears(operation: Operation) -> bool:
    return operation.to == INDEX or (operation.what == "open" and operation.path == INDEX)


def _calls(run: Run) -> Told | None:
    """Mistakes that show in what was done in which order, whoever was faster this time."""
    appears = [operation for operation in run.operations if _appears(operation)]
    if not appears:
        return f"{INDEX} never appeared", "the index is missing: rank 0 writes it, when all files are there"
    if any(operation.what == "open" for operation in appears):
        return f"rank {appears[0].rank} {appears[0]}", IN_PLACE
    for operation in run.operations:
        if operation.what in ("rename", "link") and os.path.isabs(operation.path) and not os.path.isabs(operation.to):
            return f"rank {operation.rank} {operation}", OUTSIDE
    if len({operation.rank for operation in appears}) > 1:
        return f"ranks {' and '.join(str(o.rank) for o in appears)} each put {INDEX} in place", MANY_INDEXES
    opened: dict[tuple[int, str], int] = {}
    for operation in run.operations:
        if operation.what == "open":
            other = opened.setdefault((operation.barriers, operation.path), operation.rank)
            if other != operation.rank:
                return f"ranks {other} and {operation.rank} both write {operation.path}", SAME_NAME
    return _flushes(run, appears[0])


def _flushes(run: Run, appears: Operation) -> Told | None:
    before = run.operations[: run.operations.index(appears)]
    after_sync = any(operation.what == "sync" for operation in before)
    flushed = {operation.file for operation in before if operation.what == "fsync"}
    files = {inode for inode, _ in (file for file in flushed if file)}
    for name, at in (appears.named or {}).items():
        if at is None:
            return f"when {INDEX} appeared, {name} was not there", INDEX_FIRST if run.ended and len(
                run.ended
            ) == 1 else NO_BARRIER
        if at not in flushed and not after_sync:
            why = FLUSHED_EARLY if at[0] in files else NOT_FLUSHED
            return f"when {INDEX} appeared, {name} had not been flushed to the disk", why
    if appears.file not in flushed and not after_sync:
        early = appears.file is not None and appears.file[0] in files
        return f"when {INDEX} appeared, it had not been flushed itself", FLUSHED_EARLY if early else INDEX_NOT_FLUSHED
    return None


def look(folder: Path, steps: dict[int, int], run: Run, death: Death | None, old: int = 0) -> Told | None:
    """What a reader finds: one of the checkpoints `steps` (step -> number of ranks), complete; else what is wrong.

    old: the step of the checkpoint that was there before, if it may still be the one.
    """
    try:
        step, files = crash.load(folder)
    except crash.Unreadable as error:
        return f"nothing can be loaded: {error}", _unreadable(folder, str(error), run, death, old)
    except (OSError, TypeError, ValueError) as error:
        return f"nothing can be loaded: {type(error).__name__}: {error}", FORM
    if step not in steps or isinstance(step, bool):
        if old and isinstance(step, int):
            return f"{INDEX} says step {step}, and not all of it is there", SWALLOWED
        if isinstance(step, int) and not isinstance(step, bool):
            return f"{INDEX} is still that of step {step}", "the new index never got into the place of the old one"
        return f"the step in {INDEX} is {step!r}", "it must be the step that save_checkpoint() was given"
    ranks = steps[step]
    if len(files) != ranks:
        return f"{INDEX} names {len(files)} files, and {ranks} ranks saved", "one name for each rank, in rank order"
    for rank, content in enumerate(files):
        if content == part(step, rank):
            continue
        what = f"{INDEX} says step {step}, but rank {rank}'s file"
        if any(content == part(other, rank) for other in (1, 2, 3)):
            return f"{what} is of another step", OVERWRITTEN if step == old else _too_soon(death, rank)
        if any(content == part(step, other) for other in range(ranks)):
            mixed = "the names are not in rank order, or two ranks write to the same name"
            return f"{what} has another rank's content", mixed
        if part(step, rank).startswith(content) or not content:
            seen = f"{what} has {len(content)} of {len(part(step, rank))} bytes"
            return seen, OVERWRITTEN if step == old else _too_soon(death, rank)
        return f"{what} {NOT_THAT}", "write `data` as it is, in binary mode"
    return None


FORM = f'{INDEX} must be {{"step": step, "files": [a name in the folder for each rank]}}'


def _unreadable(folder: Path, error: str, run: Run, death: Death | None, old: int) -> str:
    if "not complete" in error:
        try:
            json.loads((folder / INDEX).read_bytes())
        except ValueError:
            return IN_PLACE
        return FORM
    if "which is not there" in error:
        index = json.loads((folder / INDEX).read_bytes())
        if old and index["step"] == old:
            renamed = {o.path for o in run.operations if o.what == "rename"}
            names = set(index["files"])
            return OVERWRITTEN if names & renamed else OLD_FIRST
        if death is None:
            gone = {operation.path for operation in run.operations if operation.what == "remove"}
            if any(name in gone for name in index["files"]):
                return "the new files were removed as well: remove those that the new index does not name"
            return FORM + "; the names are those of the files, without the folder"
        missing = next(i for i, name in enumerate(index["files"]) if not (folder / name).is_file())
        return _too_soon(death, missing)
    if any(o.path == INDEX and o.what in ("remove", "rename") for o in run.operations):
        return INDEX_GONE
    if any("/" in o.path and o.path.endswith(INDEX) for o in run.operations):
        return f"the reader looks for {INDEX} in the folder itself, not in a folder below it"
    if death is None and not any(_appears(o) for o in run.operations):
        return "the index is missing: rank 0 writes it, when all files are there"
    return INDEX_GONE


def _too_soon(death: Death | None, rank: int) -> str:
    return INDEX_FIRST if rank == 0 and (death is None or death.rank == 0) else NO_BARRIER


def _left(folder: Path) -> list[str]:
    """Files in the folder that are not of its checkpoint."""
    named = {os.path.normpath(name) for name in json.loads((folder / INDEX).read_bytes())["files"]} | {INDEX}
    return [file for file in _files(folder) if file not in named]


def _files(folder: Path) -> list[str]:
    return sorted(os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files)


# ---------------------------------------------------------------------- what both use


def everyone(world: World, value: Any) -> list[Any]:
    """`value` of every rank, which must be JSON: a meeting that does not count as one of the answer's calls."""
    spy = world.spy
    name = spy._next("all of the check")
    spy.store.set(f"{name} by {world.rank}", json.dumps(value))
    return [json.loads(spy._ask(f"{name} by {rank}", rank, "the check")) for rank in range(world.world_size)]


@contextmanager
def folder_of_all(world: World) -> Iterator[Path]:
    """A temporary folder that all ranks see, removed when the last of them leaves."""
    mine = tempfile.mkdtemp(prefix="zerolab-check-") if world.rank == 0 else ""
    folder = Path(everyone(world, mine)[0])
    try:
        yield folder
        everyone(world, "done")
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        if world.rank == 0:
            patience = Patience(2.0, longest=0.02)  # after an error the others may still be at work in it
            others = [f"over/{rank}" for rank in range(1, world.world_size)]
            while others and not world.spy.store.check(others) and patience.turn() > 0:
                time.sleep(0.01)
            shutil.rmtree(folder, ignore_errors=True)
        raise


ERRORS_2 = {
    "Invalid cross-device link": OUTSIDE,
    "of the default group": OWN_BARRIER,
    "a bytes-like object is required": "data is bytes and JSON is text: open files with 'wb', and .encode() the text",
    "must be str, not bytes": "`data` is bytes: open the file in binary mode, 'wb'",
    "not supported between": '`step` and `rank` are numbers: put them into a name with f"..."',
    "is not JSON serializable": "the index must be JSON: numbers, strings and lists, no Path (use its .name)",
    "No such file or directory": "a file was renamed, removed or opened that is not there, perhaps because another "
    "rank has renamed or removed it",
    "File exists": EXISTS,
    "Is a directory": "a folder is not removed by os.remove(): shutil.rmtree() does that",
    "Directory not empty": "os.replace() does not replace a folder that has files in it",
    "Bad file descriptor": "the file was closed before os.fsync(file.fileno())",
    "I/O operation on closed file": "the file was closed before it was flushed: flush inside the `with`",
}

SAVE_STUB = '''\
import json
import os
from pathlib import Path
from zerolab.lab.exercises import Todo


def save_checkpoint(
    folder: Path, step: int, data: bytes, rank: int, world_size: int, barrier
) -> None:
    """Put the checkpoint of `step` in the place of the one in `folder`.

    All ranks call it, each with its own `data`. Who reads goes by folder / "index.json":
    {"step": step, "files": [one name for each rank, in rank order]}. Whenever a process is
    killed or the power goes, either the old or the new checkpoint must be there, complete.
    (To flush the folder, for a power cut right after a rename, is welcome and not asked.)

    `folder` exists. There may be a checkpoint in it, of another step and perhaps of another
    number of ranks, and what killed saves left behind. In the end only index.json and the
    files that it names are left. If a write fails, the error goes to the caller, and no
    half-written file stays.
    barrier() returns when all ranks have called it.
    """
    raise Todo("11.2")
'''

SAVE = """\
import json
import os
from pathlib import Path


def write(file: Path, data: bytes) -> None:
    new = file.with_name(f"{file.name}.tmp")
    try:
        with open(new, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)  # after an error


def save_checkpoint(
    folder: Path, step: int, data: bytes, rank: int, world_size: int, barrier
) -> None:
    names = [f"step-{step}-rank-{r}.safetensors" for r in range(world_size)]
    write(folder / names[rank], data)
    barrier()  # now all files are on the disk
    if rank == 0:
        write(folder / "index.json", json.dumps({"step": step, "files": names}).encode())
        for file in folder.iterdir():  # the old checkpoint, and what killed saves left
            if file.name not in ["index.json", *names]:
                file.unlink()
    barrier()  # nobody begins the next save before this is over
"""

EXERCISES = [
    Exercise(
        id="11.1",
        title="which rank reads what",
        difficulty=2,
        section="Write: who reads what",
        check=check_reads,
        stub=READS_STUB,
        reference=READS,
        hints=(
            "This rank owns the elements [first, last) of the unit: first = rank * shard, and last is first + shard "
            "but at most numel, where shard = math.ceil(numel / ranks).",
            "File i has the elements [begin, begin + length) of the unit. What the rank needs of it is the "
            "intersection of the two ranges: start = max(first, begin), stop = min(last, begin + length), if "
            "start < stop.",
            "start and stop count in the unit so far. In the file they are start - begin and stop - begin; in the new "
            "shard they go to start - first.",
        ),
        exports=("plan_reads",),
        errors=ERRORS_1,
    ),
    Exercise(
        id="11.2",
        title="a save that survives",
        difficulty=2,
        section="Write: a save that a crash cannot spoil",
        check=check_save,
        stub=SAVE_STUB,
        reference=SAVE,
        hints=(
            "Give the new files names that the old checkpoint does not have, with the step and the rank in them. Each "
            "rank writes its own, then file.flush() and os.fsync(file.fileno()), then barrier().",
            'Then rank 0 alone writes the index as "index.json.tmp", flushes it, and os.replace()s it to "index.json". '
            "That is the moment at which the new checkpoint becomes the checkpoint.",
            "Last, rank 0 removes whatever is in the folder and not in the new index; and a second barrier() keeps the "
            "others from starting the next save meanwhile. A temporary file goes in a `finally`.",
        ),
        exports=("save_checkpoint",),
        errors=ERRORS_2,
    ),
]
