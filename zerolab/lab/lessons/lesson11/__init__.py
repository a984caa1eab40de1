"""Lesson 11: which parts of which file a rank reads, and a save that a crash cannot spoil."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from zerolab.lab.exercises.exercise import Exercise, Todo
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.values import counted
from zerolab.lab.lessons.lesson11 import crash
from zerolab.lab.lessons.lesson11.crash import INDEX, Death, Operation, Run

# ---------------------------------------------------------------------- 11.1

Files = list[tuple[str, int]]
SIZES = (12, 13, 7, 3, 1, 2, 5, 30)


def old_files(numel: int, ranks: int) -> Files:
    """What `ranks` ranks wrote of a unit: the names in rank order, and the elements of each shard."""
    return [(f"rank-{rank}", math.ceil(numel / ranks)) for rank in range(ranks)]


def plan(play: Play, files: Files, numel: int, ranks: int = 0, rank: int | None = None) -> None:
    ranks, rank = ranks or play.size, play.rank if rank is None else rank
    said = f"plan_reads({counted(len(files), 'file')} of {files[0][1]}, {numel}, {ranks}, {rank})"
    given = play.keep("`files`", list(files))
    with play.event(said, uses=()) as event:
        event.results.add(said)
        found = play.code.plan_reads(given, numel, ranks, rank)
        if not isinstance(found, str | dict | int | Tensor | None):
            found = list(found)
    reads = joined(found) if isinstance(found, list) else found
    if reads != found and len(reads) < len(found):
        play.notes.append("some reads could be one: neighbouring elements of a file are fastest in one read")
    play.see(said, reads)


def joined(reads: list[Any]) -> list[Any]:
    """In one order, and what follows on in the file and in the shard as one read; as they are if they are no reads."""
    if not all(
        isinstance(read, tuple | list) and [type(part) for part in read] == [str, int, int, int] for read in reads
    ):
        return reads
    found: list[Any] = []
    for name, start, stop, at in sorted(map(tuple, reads)):
        if found and start < stop and found[-1][0] == name and found[-1][2] == start:
            _, first, _, place = found[-1]
            if place + start - first == at:
                found[-1] = (name, first, stop, place)
                continue
        found.append((name, start, stop, at))
    return found


def from_ranks(*old: int, sizes: tuple[int, ...] = SIZES) -> Callable[[Play], None]:
    def act(play: Play) -> None:
        for ranks in old or dict.fromkeys((play.size, 1, 2, 3, 4)):
            for numel in sizes:
                plan(play, old_files(numel, ranks), numel)

    return act


def more_padding(play: Play) -> None:
    for numel, length in ((13, 8), (5, 6), (30, 20)):
        plan(play, [(f"rank-{rank}", length) for rank in range(4)], numel)


def other_names(play: Play) -> None:
    for names in (["c", "a", "d", "b"], ["/old/2.st", "/old/1.st", "/old/0.st"]):
        plan(play, [(name, 5) for name in names], 5 * len(names) - 2)


def other_ranks(play: Play) -> None:
    for ranks, old, numel in ((3, 4, 38), (5, 2, 38), (2, 5, 7)):
        for rank in range(ranks):
            plan(play, old_files(numel, old), numel, ranks, rank)


READS_BATTERY = (
    Scene(
        "",
        from_ranks(),
        "by hand: this rank owns [first, last) of the unit, and a file has [begin, begin + length). What both have is "
        "read: start and stop from the file's beginning on, `at` from `first` on",
    ),
    Scene(
        "from twelve files",
        from_ranks(12, sizes=(30, 100, 5)),
        "`files` is in rank order as it is; there are len(files) of them, whatever `ranks` is",
    ),
    Scene(
        "with more padding than there need be",
        more_padding,
        "the length of a file's shard is in `files`, and what comes after `numel` elements is padding, wherever it is",
    ),
    Scene("with other names", other_names, "the names say nothing: `files` is in rank order as it is"),
    Scene(
        "with other numbers for `ranks` and `rank`",
        other_ranks,
        "take the number of ranks and the rank from the arguments",
        sizes=(3,),
    ),
)


READS_STUB = '''\
import math
from zerolab.lab.exercises import Todo


def plan_reads(files: list[tuple], numel: int, ranks: int, rank: int) -> list[tuple]:
    """What `rank` of `ranks` reads of one unit: a list of (file, start, stop, at).

    Elements [start, stop) of the shard in `file` go to the new shard, from `at` on.

    numel: the elements of the unit, without padding. files: for each rank that saved, in
    order, the name of its file and the length of its shard of this unit. Laid end to end,
    these shards are the unit and then padding. The new shards have math.ceil(numel / ranks)
    elements each. The last elements may be padding, which nobody reads.
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

EARLIER, NEW, NEXT, LATER = 1, 2, 3, 7  # steps: the old checkpoint may be of a later one, after a restart
WHOLE = {step: f"step {step}, complete" for step in (EARLIER, NEW, NEXT, LATER)}


def part(step: int, rank: int) -> bytes:
    """What `rank` saves in `step`: every byte there is, so that none is taken for text."""
    return f"{step} {rank} ".encode() * (1 + rank) + bytes(range(256))


def found_by_a_reader(folder: Path, ranks: dict[int, int]) -> str:
    """Which checkpoint there is, and whether all of it. ranks: step -> how many saved it."""
    try:
        step, files = crash.load(folder)
    except crash.Unreadable as error:
        names = "which is not there" in str(error)
        return f"an {INDEX} that names a file which is not there" if names else str(error)
    except (OSError, TypeError, ValueError):
        return f"an {INDEX} of another form"
    if type(step) is not int or step not in ranks:
        return f"step {step!r}"
    if len(files) != ranks[step]:
        return f"step {step}, {len(files)} files of {ranks[step]}"
    for rank, content in enumerate(files):
        if content != part(step, rank):
            whose = "what nobody saved" if content else "nothing"
            if any(content == part(other, rank) for other in ranks):
                whose = "what it has in another step"
            elif any(content == part(step, other) for other in range(ranks[step])):
                whose = "another rank's content"
            elif content and part(step, rank).startswith(content):
                whose = "only the beginning"
            return f"step {step}, with {whose} in a file"
    return WHOLE[step]


def whose(folder: Path, ranks: int) -> list[str]:
    """Whose content is in each file that the index names, by the rank that it should be."""
    files: list[bytes] = []
    with suppress(crash.Unreadable, OSError, TypeError, ValueError):
        files = crash.load(folder)[1]
    parts = {part(step, rank): f"{rank} of step {step}" for step in WHOLE for rank in range(ranks)}
    return [parts.get(content, "?") for content in files]


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())


def named(folder: Path) -> list[str]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [os.path.normpath(name) for name in json.loads((folder / INDEX).read_bytes())["files"]]
    return []


def not_named(folder: Path) -> list[str]:
    """The files in the folder that do not belong to its checkpoint."""
    return [file for file in files_in(folder) if file not in [*named(folder), INDEX]]


class Saves:
    """Saves by processes that take turns, in a folder of their own; an error in one of them is raised here."""

    def __init__(self, play: Play, home: str) -> None:
        self.play, self.home = play, Path(home)
        self.folder = self.home / "now"

    def save(self, ranks: int, *steps: int, order: list[int] | None = None, fails: bool = False, **more: Any) -> Run:
        def work(rank: int, barrier: Callable[[], None]) -> None:
            self.play.world.spy._agree = refuse  # type: ignore[method-assign]
            for step in steps:
                self.play.code.save_checkpoint(self.folder, step, part(step, rank), rank, ranks, barrier)

        run = crash.play(work, self.folder, ranks, order, module=self.play.code, **more)
        for rank, error in run.ended.items():
            if error == "late":
                raise as_it_was(f"TimeoutError: rank {rank} of {ranks} does not end")
            if error and error != "killed" and "another rank did not come" not in error and not fails:
                raise as_it_was(error)
        if run.unequal and not fails:
            raise RuntimeError("a rank waits in a barrier to which another does not come")
        return run

    def over_a_checkpoint_of(self, ranks: int, step: int = EARLIER) -> None:
        """Begin again with a folder in which the answer has saved a first checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)
        old = self.home / f"step {step} on {ranks}"
        if not old.exists():
            self.folder.mkdir()
            self.save(ranks, step)
            shutil.copytree(self.folder, old)
        else:
            shutil.copytree(old, self.folder)


def refuse(call: Any, group: Any) -> None:
    """A process of a save is none of the live ranks, so a call of torch.distributed would go nowhere."""
    raise RuntimeError(f"dist.{call.op}() of the default group")


def as_it_was(error: str) -> Exception:
    """An error that a process has reported in words, "OSError: no space · line 7"."""
    kind, _, what = error.partition(": ")
    if kind == "Todo":
        return Todo("11.2")
    return type(kind, (Exception,), {"__module__": "builtins"})(what)


def in_turns(N: int) -> list[list[int]]:
    return [list(range(N)), list(range(N))[::-1]][: 1 + (N > 1)]


def look_at_files(play: Play, run: Run) -> None:
    """In which order things were done, whoever was faster this time."""
    appears = [o for o in run.operations if o.to == INDEX or (o.what == "open" and o.path == INDEX)]
    written: dict[tuple[int, str], set[int]] = {}
    for o in run.operations:
        if o.what == "open":
            written.setdefault((o.barriers, o.path), set()).add(o.rank)
    twice = [path for (_, path), ranks in written.items() if len(ranks) > 1]
    outside = [
        o for o in run.operations if o.what in ("rename", "link") and os.path.isabs(o.path) and not os.path.isabs(o.to)
    ]
    play.see("index.json appears", bool(appears))
    play.see("index.json is renamed into its place, not written there", all(o.what != "open" for o in appears))
    play.see("no file comes from outside the folder", not outside, ", ".join(map(str, outside)))
    play.see("one rank puts index.json in place", len({o.rank for o in appears}) == 1)
    play.see("no file is written by two ranks", not twice, " and ".join(twice))
    if not appears:
        return
    first = run.operations.index(appears[0])
    flushed = {o.file for o in run.operations[:first] if o.what == "fsync"}
    synced = any(o.what == "sync" for o in run.operations[:first])
    named = appears[0].named or {}
    missing = [name for name, at in named.items() if at is None]
    unsafe = [name for name, at in named.items() if at is not None and at not in flushed and not synced]
    play.see("all files are there when index.json appears", not missing, " and ".join(missing[:3]))
    play.see("they have been flushed to the disk by then", not unsafe, " and ".join(unsafe[:3]))
    play.see("index.json has been flushed to the disk by then", appears[0].file in flushed or synced)
    play.clue("flushed, but too early", any(at and at[0] in {f[0] for f in flushed if f} for at in named.values()))
    if not any(o.path in (".", "") for o in run.operations[first:] if o.what in ("fsync", "sync")):
        play.notes.append(FOLDER_FLUSH)


FOLDER_FLUSH = (
    "a file's name is content of its folder: to be sure of the rename after a power cut, flush the folder too "
    "(os.open(folder, os.O_RDONLY), os.fsync(), os.close())"
)


def complete(play: Play) -> None:
    """The first save, and others over it: rank 0 is the fastest, or the slowest."""
    N = play.size
    with tempfile.TemporaryDirectory(prefix="zerolab-check-") as home:
        saves = Saves(play, home)
        olds = [(N, EARLIER, in_turns(N)[0]), (N, LATER, in_turns(N)[-1]), (N + 1, EARLIER, in_turns(N)[-1])]
        for ranks, step, order in olds:
            with play.event(f"a save on {N} over step {step} on {ranks}, rank {order[0]} first", uses=()):
                saves.over_a_checkpoint_of(ranks, step)
                run = saves.save(N, NEW, order=order)
            look_at_files(play, run)
            play.see("what a reader finds", found_by_a_reader(saves.folder, {step: ranks, NEW: N}))
            play.clue("whose content is where", whose(saves.folder, N))
            play.see(
                "the names in index.json are those in the folder", not any(map(os.path.isabs, named(saves.folder)))
            )
            left = not_named(saves.folder)
            play.see("nothing is left but index.json and the files that it names", not left, " and ".join(left))


def in_a_row(play: Play) -> None:
    """A rank may be in the second save while another is still in the first."""
    N = play.size
    with tempfile.TemporaryDirectory(prefix="zerolab-check-") as home:
        saves = Saves(play, home)
        for order in in_turns(N):
            with play.event(f"two saves, rank {order[0]} first", uses=()):
                saves.over_a_checkpoint_of(N)
                saves.save(N, NEW, NEXT, order=order)
            play.see("what a reader finds", found_by_a_reader(saves.folder, {EARLIER: N, NEW: N, NEXT: N}))
            play.see("nothing is left but index.json and the files that it names", not not_named(saves.folder))


def killed(play: Play) -> None:
    """A rank dies at each of its operations in turn, before it or within what it writes; each live rank tries some."""
    N, number, told, bad = play.size, 0, [], {}  # type: ignore[var-annotated]
    with play.event("kills", uses=()), tempfile.TemporaryDirectory(prefix="zerolab-check-") as home:
        saves = Saves(play, home)
        for rank in range(N):
            order = [*(other for other in range(N) if other != rank), rank]
            saves.over_a_checkpoint_of(N)
            for i, operation in enumerate(saves.save(N, NEW, order=order).of(rank)):
                if operation.what in ("fsync", "sync"):
                    continue  # a flush changes nothing that a reader finds
                for within in (False, True)[: 1 + (operation.what == "open")]:
                    number += 1
                    if number % N == play.rank:
                        told.append(kill(saves, N, order, Death(rank, i, within), operation))
        for what, found, after in itertools.chain(*play.world.everyone(told)):
            for when, one in (("after a kill", found), ("after the next save", after)):
                if one not in (WHOLE[EARLIER], WHOLE[NEW], WHOLE[NEXT], ""):
                    bad.setdefault(when, []).append((one, what))
    for when in ("after a kill", "after the next save"):
        first = bad.get(when, [("a whole checkpoint", "")])[0]
        play.see(f"what a reader finds {when}", *first)
        for one, what in bad.get(when, []):
            place = re.sub(r"\S*[\d.]\S*", lambda word: "the index" if INDEX in word[0] else "a file", what)
            play.clue(f"{when}: {place}", one)


def kill(saves: Saves, N: int, order: list[int], death: Death, operation: Operation) -> tuple[str, str, str]:
    """What was done; what a reader finds; and what one finds after the next save, which is on a single rank."""
    how = f"while it wrote {operation.path}" if death.within else f"just before it {operation}"
    saves.over_a_checkpoint_of(N)
    saves.save(N, NEW, order=order, death=death, fails=True)  # a short write may be an error instead
    what, found = f"rank {death.rank} of {N} was killed {how}", found_by_a_reader(saves.folder, {EARLIER: N, NEW: N})
    if found not in (WHOLE[EARLIER], WHOLE[NEW]) or (N > 1 and not death.within):
        return what, found, ""
    step = NEXT if found == WHOLE[NEW] or death.number % 2 else NEW
    run = saves.save(1, step, fails=True)
    if error := run.ended.get(0):
        return what, found, f"{error.split(':')[0]} in the next save"
    after = found_by_a_reader(saves.folder, {EARLIER: N, NEW: 1 if step == NEW else N, NEXT: 1})
    if left := not_named(saves.folder):
        return f"{what}, and {left[0]} is still there", found, "a file that does not belong to it"
    return what, found, after


def full_disk(play: Play) -> None:
    N = play.size
    with tempfile.TemporaryDirectory(prefix="zerolab-check-") as home:
        saves = Saves(play, home)
        for rank in range(N):
            with play.event(f"rank {rank}'s disk is full", uses=()):
                saves.over_a_checkpoint_of(N)
                before = files_in(saves.folder)
                run = saves.save(N, NEW, fails=True, full=rank)
            error = run.ended.get(rank) or ""
            play.see("the error of a full disk comes to the caller", bool(error))
            play.see("what a reader finds", found_by_a_reader(saves.folder, {EARLIER: N, NEW: N}))
            if N == 1:
                left = [file for file in files_in(saves.folder) if file not in before]
                play.see("no half-written file stays", not left, " and ".join(left))


SAVE_BATTERY = (
    Scene(
        "",
        complete,
        "each rank writes and flushes its own file, all wait, one puts the index in place by a rename, and then what "
        "is not named there goes",
    ),
    Scene(
        "in two saves, one right after the other",
        in_a_row,
        "a rank was still at work on a save when another had begun the next: let all ranks leave together",
        sizes=(2, 3),
    ),
    Scene(
        "",
        killed,
        "follow what is on the disk at that moment: the index must name a checkpoint that is complete, the old one "
        "until the new one is, and the next save must cope with what stays",
        sizes=(1, 2),
    ),
    Scene(
        "",
        full_disk,
        "after an error no index may appear and no half-written file stay, and the caller must hear of it",
        sizes=(1, 2),
    ),
)


SAVE_ERRORS = {
    "of the default group": "call the barrier() that is given, which is right for any group of ranks",
    "a bytes-like object is required": "data is bytes and JSON is text: open files with 'wb', and .encode() the text",
    "must be str, not bytes": "`data` is bytes: open the file in binary mode, 'wb'",
    "is not JSON serializable": "the index must be JSON: numbers, strings and lists, no Path (use its .name)",
    "Bad file descriptor": "the file was closed before os.fsync(file.fileno())",
    "I/O operation on closed file": "the file was closed before it was flushed: flush inside the `with`",
    "another does not come": "every rank must call barrier() equally often: call it outside of `if rank == 0:`",
    "does not end": "a loop that does not end: only barrier() waits for others",
}

SAVE_STUB = '''\
import json
import os
from pathlib import Path
from zerolab.lab.exercises import Todo


def save_checkpoint(
    folder: Path, step: int, data: bytes, rank: int, world_size: int, barrier
) -> None:
    """Replace the checkpoint in `folder` with that of `step`.

    All ranks call it, each with its own `data`. Readers look at folder / "index.json":
    {"step": step, "files": [one name for each rank, in rank order]}. Whenever a process is
    killed or the power goes, either the old or the new checkpoint must be there, complete.
    (A power cut right after a rename takes a flush of the folder too: welcome, not asked.)

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
        battery=READS_BATTERY,
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
    ),
    Exercise(
        id="11.2",
        title="a save that survives",
        difficulty=2,
        section="Write: a save that a crash cannot spoil",
        battery=SAVE_BATTERY,
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
        errors=SAVE_ERRORS,
    ),
]
