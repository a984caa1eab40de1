"""Lesson 11: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson11 import READS, SAVE

BORDER = "off by one at the border of a file: ranges are half open, [start, stop), in Python as here"
OWN_FILE = "rank r reads file r only: with another number of ranks, the shards are cut at other places"
ORDER = "the numbers of a read are in another order: (file, start, stop, at)"
OUTSIDE = (
    "the temporary file is in another folder: a rename is a single operation only within one file system,"
    " and nobody removes what a killed save leaves there. Put it beside the file that it becomes"
)
INDEX_GONE = (
    "the old index was taken away before the new one was in its place: os.replace() does both in a single operation"
)
OLD_FIRST = "files of the old checkpoint were removed while the index still names them: remove them last"
SAME_NAME = "two ranks write the same file: put the rank into every name, also into that of a temporary file"
SWALLOWED = "the error was swallowed: the caller believes that there is a checkpoint. Clean up, then let it through"
AS_IT_IS = "`data` is bytes: write it as it is, in binary mode, 'wb'"
INDEX_NOT_FLUSHED = (
    "the index was not flushed before it was renamed: file.flush(), os.fsync(file.fileno()), os.replace()"
)

# ---------------------------------------------------------------------- 11.1

READS_BY_ELEMENT = """\
def plan_reads(files, numel, ranks, rank):
    shard = -(-numel // ranks)
    places = [(name, i) for name, length in files for i in range(length)][:numel]  # of every element of the unit
    reads = []
    for at, (name, i) in enumerate(places[rank * shard : (rank + 1) * shard]):
        if reads and reads[-1][0] == name:
            reads[-1][2] = i + 1
        else:
            reads.append([name, i, i + 1, at])
    return [tuple(read) for read in reads]
"""

READS_WALKING = """\
from math import ceil


def plan_reads(files, numel, ranks, rank):
    old, new = files[0][1], ceil(numel / ranks)
    here, end, reads = rank * new, min(numel, rank * new + new), []
    while here < end:
        number, start = divmod(here, old)
        count = min(old - start, end - here)
        reads.append((files[number][0], start, start + count, here - rank * new))
        here += count
    return reads
"""

READS_BY_RANGES = """\
import math


def plan_reads(files, numel, ranks, rank):
    size = math.ceil(numel / ranks)
    mine = range(numel)[rank * size : (rank + 1) * size]
    for number, (name, length) in enumerate(files):
        theirs = range(numel)[number * length : (number + 1) * length]
        start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if start < stop:
            yield name, start - theirs.start, stop - theirs.start, start - mine.start
"""

_APPEND = "reads.append((name, start - begin, stop - begin, start - first))"
_LAST = "min((rank + 1) * shard, numel)"

READS_MISTAKES = {
    "padding as data": Mistake(
        edit(READS, _LAST, "(rank + 1) * shard"),
        (
            "padding was read as data: the unit has `numel` elements, and what comes after them in the "
            "last files is padding"
        ),
    ),
    "padding as data, but for the last rank": Mistake(
        edit(READS, _LAST, "numel if rank == ranks - 1 else (rank + 1) * shard"),
        (
            "padding was read as data: the unit has `numel` elements, and what comes after them in the "
            "last files is padding"
        ),
    ),
    "all padding in the last file": Mistake(
        edit(
            READS,
            _LAST,
            "(rank + 1) * shard",
            "    reads, begin = [], 0\n",
            "    files = [*files[:-1], (files[-1][0], files[-1][1] - max(0, sum(n for _, n in files) - numel))]\n"
            "    reads, begin = [], 0\n",
        ),
        "padding was read as data: with more ranks than a unit has elements, whole files are padding, not only the end "
        "of the last",
    ),
    "at from the file": Mistake(
        edit(READS, ", start - first))", ", begin - first))"),
        "`at` is where the read begins in the new shard, start - first: a file may begin before this rank's part does",
    ),
    "two files": Mistake(
        edit(READS, "    return reads", "    return reads[:1] + reads[1:][-1:]"),
        "a file was left out: a new shard may reach over more than two files",
    ),
    "start in the unit": Mistake(
        edit(READS, "start - begin, stop - begin", "start, stop"),
        (
            "start and stop count from the beginning of the unit: they must count from the beginning of "
            "that file's shard, so subtract the number of elements in the files before it"
        ),
    ),
    "at in the unit": Mistake(
        edit(READS, ", start - first))", ", start))"),
        ("`at` counts from the beginning of the unit: it must count from the beginning of this rank's new shard"),
    ),
    "at in the file": Mistake(
        edit(READS, ", start - first))", ", start - begin))"),
        "`at` counts in the file: it must count from the beginning of this rank's new shard",
    ),
    "at forgotten": Mistake(
        edit(READS, ", start - first))", ", 0))"),
        ("every read goes to the beginning of the new shard, so that they overwrite each other: `at` must move on"),
    ),
    "off by one at the border": Mistake(edit(READS, "begin + length)\n", "begin + length - 1)\n"), BORDER),
    "one too many": Mistake(
        edit(
            READS,
            "stop = max(first, begin), min(last, begin + length)",
            "stop = max(first, begin), min(last, begin + length - (begin + length < last))",
        ),
        BORDER,
    ),
    "N == M": Mistake(
        "import math\n\n\ndef plan_reads(files, numel, ranks, rank):\n    name, length = files[rank]\n"
        "    stop = min(length, numel - rank * length)\n    return [(name, 0, stop, 0)] if stop > 0 else []\n",
        OWN_FILE,
    ),
    "file r only": Mistake(
        edit(
            READS,
            "    for name, length in files:",
            "    for name, length in files[rank : rank + 1]:",
            "reads, begin = [], 0",
            "reads, begin = [], rank * files[0][1]",
        ),
        OWN_FILE,
    ),
    "the first files only": Mistake(
        edit(READS, "in files:", "in files[:ranks]:"),
        "it looks into the first `ranks` files only: there are len(files) of them, whatever `ranks` is",
    ),
    "everything": Mistake(
        edit(READS, "max(first, begin), min(last, begin + length)", "begin, min(numel, begin + length)"),
        "it reads all of all files: a rank must read what it owns, and nothing else",
    ),
    "whole files": Mistake(
        edit(READS, _APPEND, "reads.append((name, 0, min(length, numel - begin), max(0, begin - first)))"),
        "it reads whole files: of the files at its borders, a rank needs a part only",
    ),
    "sorted by name": Mistake(
        edit(READS, "in files:", "in sorted(files):"),
        ('the files were sorted by name, where "rank-10" comes before "rank-2": `files` is in rank order as it is'),
    ),
    "the last is longer": Mistake(
        edit(
            READS,
            "math.ceil(numel / ranks)",
            "numel // ranks",
            _LAST,
            "numel if rank == ranks - 1 else (rank + 1) * shard",
        ),
        (
            "the last shard was made longer: all shards have math.ceil(numel / ranks) elements, and the "
            "last is padded instead"
        ),
    ),
    "the tail is lost": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "numel // ranks"),
        "the tail is lost: a shard has math.ceil(numel / ranks) elements, so round up, not down",
    ),
    "empty reads": Mistake(
        edit(READS, "if start < stop:", "if start <= stop:"),
        "an empty read: a file that has nothing for this rank is not read at all",
    ),
    "bytes": Mistake(
        edit(
            READS,
            "(name, start - begin, stop - begin, start - first)",
            "(name, 4 * (start - begin), 4 * (stop - begin), start - first)",
        ),
        "bytes instead of elements: safetensors slices count elements, whatever their dtype",
    ),
    "length for stop": Mistake(
        edit(READS, "stop - begin, start", "stop - start, start"),
        "(start, length) was returned: a read is (file, start, stop, at), half open as in Python",
    ),
    "old shards": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "files[0][1]"),
        "the new shards were cut like the old ones: they have math.ceil(numel / ranks) elements each",
    ),
    "the padded length": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "math.ceil(sum(n for _, n in files) / ranks)"),
        "the new shards were cut from the old padded length: divide `numel`, which has no padding",
    ),
    "file numbers": Mistake(
        edit(READS, "for name, length in files:", "for name, (_, length) in enumerate(files):"),
        "the file's name is asked for, files[i][0], not its number",
    ),
    "nothing returned": Mistake(
        edit(READS, "    return reads\n", ""), "the function returns nothing: `return` is missing"
    ),
    "begin forgotten": Mistake(
        edit(READS, "        begin += length\n", ""),
        "every file is taken to begin where the unit does: each begins where the one before it ends",
    ),
    "round": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "round(numel / ranks)"),
        "round() rounds down as often as up, and then the tail is lost: math.ceil(numel / ranks)",
    ),
    "one more for all": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "numel // ranks + 1"),
        ("numel // ranks + 1 is one too many where the ranks divide the unit evenly: math.ceil(numel / ranks)"),
    ),
    "balanced": Mistake(
        edit(
            READS,
            "shard = math.ceil(numel / ranks)\n",
            "share, more = divmod(numel, ranks)\n    first = rank * share + min(rank, more)\n",
            "first, last = rank * shard, min((rank + 1) * shard, numel)",
            "last = first + share + (rank < more)",
        ),
        (
            "the first ranks got an element more than the others: all shards have math.ceil(numel / "
            "ranks) elements, and only the last ones hold fewer"
        ),
    ),
    "at before start": Mistake(
        edit(READS, "start - begin, stop - begin, start - first", "start - first, start - begin, stop - begin"), ORDER
    ),
    "stop before start": Mistake(edit(READS, "start - begin, stop - begin", "stop - begin, start - begin"), ORDER),
    "the last element as stop": Mistake(
        edit(READS, "stop - begin, start - first", "stop - begin - 1, start - first"),
        "`stop` is the first element that is not read: ranges are half open, [start, stop), in Python as here",
    ),
    "one read": Mistake(
        edit(READS, "    return reads", "    return reads[:1]"),
        "only one file is read: what a rank owns may lie in several",
    ),
    "at counts reads": Mistake(
        edit(READS, "start - first))", "len(reads)))"),
        "`at` counts reads: it is the place of the first element in the new shard, so it moves on by their lengths",
    ),
    "at moves on by whole files": Mistake(
        edit(
            READS,
            "reads, begin = [], 0",
            "reads, begin, at = [], 0, 0",
            "start - first))",
            "at))\n            at += length",
        ),
        "`at` moves on by what was read, stop - start, and not by the length of the file",
    ),
    "the old shards computed": Mistake(
        edit(
            READS,
            "for name, length in files:",
            "for name, _ in files:\n        length = math.ceil(numel / len(files))",
        ),
        "the length of a file's shard is in `files`: it may have more padding than there need be",
    ),
    "ranks from 1": Mistake(
        edit(READS, "rank * shard, min((rank + 1) * shard, numel)", "(rank - 1) * shard, min(rank * shard, numel)"),
        "ranks count from 0: rank r owns the elements from r * shard on",
    ),
    "files from their beginning": Mistake(
        edit(READS, "max(first, begin)", "begin"),
        "a file is read from its beginning, also where the new shard begins in the middle of it: max(first, begin)",
    ),
    "files to their end": Mistake(
        edit(READS, "min(last, begin + length)", "begin + length", "if start < stop", "if start < min(last, stop)"),
        "a file is read to its end, also where the new shard ends in the middle of it: min(last, begin + length)",
    ),
    "names without their folder": Mistake(
        edit(READS, "append((name,", 'append((name.split("/")[-1],'),
        "the file's name is changed: take it from `files` as it is",
    ),
    "fractions": Mistake(
        edit(READS, "math.ceil(numel / ranks)", "numel / ranks"),
        "start, stop and at are whole numbers: math.ceil(numel / ranks)",
    ),
    "eats the list": Mistake(
        edit(READS, "        begin += length\n", "        begin += length\n    files.clear()\n"),
        "`files` was changed, and the caller still needs it: work on a copy",
    ),
}

# ---------------------------------------------------------------------- 11.2

SAVE_BY_FOLDERS = """\
import json
import os
import shutil


def flush(path):
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def save_checkpoint(folder, step, data, rank, world_size, barrier):
    new = folder / f"step-{step:06}"
    new.mkdir(exist_ok=True)
    try:
        mine = new / f"{rank}-of-{world_size}.safetensors"
        mine.write_bytes(data)
        flush(mine)
    except OSError:
        mine.unlink()
        raise
    barrier()
    if rank == 0:
        files = [f"{new.name}/{r}-of-{world_size}.safetensors" for r in range(world_size)]
        next_index = folder / "next.json"
        next_index.write_text(json.dumps({"step": step, "files": files}))
        flush(next_index)
        next_index.rename(folder / "index.json")
        flush(folder)
        for old in folder.glob("step-*"):
            if old != new:
                shutil.rmtree(old)
        for old in new.iterdir():
            if f"{new.name}/{old.name}" not in files:
                old.unlink()
    barrier()
"""

SAVE_BY_DESCRIPTORS = """\
import contextlib
import glob
import json
from os import O_CREAT, O_TRUNC, O_WRONLY, close, fsync, open as open_file, path, remove, rename, write


def durable(name, content):
    number = open_file(name, O_WRONLY | O_CREAT | O_TRUNC, 0o644)
    try:
        while content:
            content = content[write(number, content) :]
        fsync(number)
    except BaseException:
        remove(name)
        raise
    finally:
        close(number)


def save_checkpoint(folder, step, data, rank, world_size, barrier):
    mine = path.join(folder, f"{step}.{rank}.part")
    durable(mine, data)
    barrier()
    if rank == world_size - 1:
        names = [f"{step}.{r}.part" for r in range(world_size)]
        durable(path.join(folder, "index.new"), json.dumps({"files": names, "step": step}).encode())
        rename(path.join(folder, "index.new"), path.join(folder, "index.json"))
    barrier()
    if rank == 0:
        keep = {f"{step}.{r}.part" for r in range(world_size)} | {"index.json"}
        for file in glob.glob(path.join(folder, "*")):
            if path.basename(file) not in keep:
                with contextlib.suppress(FileNotFoundError):
                    remove(file)
    barrier()
"""

_WRITE = "write(folder / names[rank], data)"
_INDEX = 'write(folder / "index.json", json.dumps({"step": step, "files": names}).encode())'
_BEFORE = f"    {_WRITE}\n    barrier()  # now all files are on the disk\n"
_REMOVE = """\
        for file in folder.iterdir():  # the old checkpoint, and what killed saves left
            if file.name not in ["index.json", *names]:
                file.unlink()
"""
_SYNC = "            os.fsync(out.fileno())\n"

SAVE_MISTAKES = {
    "in place": Mistake(
        edit(SAVE, _INDEX, '(folder / "index.json").write_text(json.dumps({"step": step, "files": names}))'),
        (
            "the index was written in place, over the old one: write it under another name, then "
            "os.replace() puts it in the place of the old one in a single operation"
        ),
    ),
    "the index first": Mistake(
        edit(SAVE, _BEFORE, "", "    barrier()  # nobody", f"    {_WRITE}\n    barrier()  # nobody"),
        "the index appeared before the files that it names: it comes last",
    ),
    "a temporary file elsewhere": Mistake(
        edit(SAVE, 'file.with_name(f"{file.name}.tmp")', 'file.parent.parent / f"{file.name}.tmp"'), OUTSIDE
    ),
    "tempfile's folder": Mistake(
        edit(
            SAVE,
            'new = file.with_name(f"{file.name}.tmp")',
            "import shutil, tempfile\n    new = Path(tempfile.mkdtemp()) / file.name",
            "os.replace(new, file)",
            "shutil.move(new, file)",
        ),
        OUTSIDE,
    ),
    "a barrier after an error": Mistake(
        edit(
            SAVE,
            "    write(folder / names[rank], data)\n    barrier()  # now all files are on the disk\n",
            "    try:\n        write(folder / names[rank], data)\n    finally:\n        barrier()\n",
        ),
        (
            "a rank whose write failed called barrier() all the same, as in a `finally`, so rank 0 took "
            "its file for written: after an error do not call it, and no index appears"
        ),
    ),
    "no barrier": Mistake(
        edit(SAVE, "    barrier()  # now all files are on the disk\n", ""),
        ("the index appeared before every rank had written its file: rank 0 must wait for all of them with barrier()"),
    ),
    "no second barrier": Mistake(
        edit(SAVE, "    barrier()  # nobody begins the next save before this is over\n", ""),
        (
            "a rank was still removing files when another had begun the next save, and removed its file: "
            "let all ranks leave together, with another barrier(), or remove only what the old index "
            "names"
        ),
    ),
    "each rank renames": Mistake(
        edit(SAVE, "    if rank == 0:\n", "    if True:\n"),
        ("several ranks put an index in place: one of them, rank 0, is enough, and two get in each other's way"),
    ),
    "the old one first": Mistake(
        edit(
            SAVE,
            _REMOVE,
            "",
            f"    {_WRITE}\n",
            "    if rank == 0:\n"
            + _REMOVE.replace('["index.json", *names]', '["index.json"]')
            + f"    barrier()\n    {_WRITE}\n",
        ),
        OLD_FIRST,
    ),
    "everything first": Mistake(
        edit(
            SAVE,
            _REMOVE,
            "",
            f"    {_WRITE}\n",
            "    if rank == 0:\n"
            + _REMOVE.replace('["index.json", *names]', "[]").replace("folder.iterdir()", "sorted(folder.iterdir())")
            + f"    barrier()\n    {_WRITE}\n",
        ),
        INDEX_GONE,
    ),
    "removed, then renamed": Mistake(
        edit(
            SAVE, "        os.replace(new, file)", "        file.unlink(missing_ok=True)\n        os.rename(new, file)"
        ),
        INDEX_GONE,
    ),
    "before the index": Mistake(edit(SAVE, f"        {_INDEX}\n{_REMOVE}", f"{_REMOVE}        {_INDEX}\n"), OLD_FIRST),
    "the same names": Mistake(
        edit(SAVE, 'f"step-{step}-rank-{r}.safetensors"', 'f"rank-{r}.safetensors"'),
        (
            "a file of the old checkpoint was overwritten while the index still names it: give the new "
            "files other names, for example with the step in them"
        ),
    ),
    "one temporary name": Mistake(
        edit(SAVE, 'file.with_name(f"{file.name}.tmp")', 'file.with_name("new.tmp")'), SAME_NAME
    ),
    "no rank in the name": Mistake(
        edit(SAVE, 'f"step-{step}-rank-{r}.safetensors"', 'f"step-{step}.safetensors"'), SAME_NAME
    ),
    "no fsync": Mistake(
        edit(SAVE, _SYNC, ""),
        (
            "file.write() hands the bytes to the system, which writes them to the disk later; a power cut"
            " loses them. Before the index appears, every file needs file.flush(), then "
            "os.fsync(file.fileno())"
        ),
    ),
    "fsync before flush": Mistake(
        edit(SAVE, "            out.flush()\n", ""),
        (
            "flushed too early: when os.fsync() was called, some bytes were still in Python's buffer. "
            "file.flush() comes first"
        ),
    ),
    "rename before fsync": Mistake(
        edit(
            SAVE,
            _SYNC,
            "",
            "        os.replace(new, file)\n",
            "        os.replace(new, file)\n        with open(file) as out:\n            os.fsync(out.fileno())\n",
        ),
        INDEX_NOT_FLUSHED,
    ),
    "no fsync of the index": Mistake(
        edit(SAVE, _SYNC, '            if "index" not in file.name:\n                os.fsync(out.fileno())\n'),
        INDEX_NOT_FLUSHED,
    ),
    "leaves the temporary": Mistake(
        edit(SAVE, "        new.unlink(missing_ok=True)  # after an error", "        pass"),
        "after an error the temporary file stays, and fills the disk further: remove it in a `finally`",
    ),
    "swallows the error": Mistake(
        edit(SAVE, "    finally:\n", "    except OSError:\n"),
        SWALLOWED,
    ),
    "the old one stays": Mistake(
        edit(SAVE, _REMOVE, ""),
        "files of the old checkpoint stay: with every save they fill the disk, so remove them, last",
    ),
    "each removes its own": Mistake(
        edit(
            SAVE,
            _REMOVE,
            '    barrier()\n    for file in folder.glob(f"step-*-rank-{rank}.safetensors"):\n'
            "        if file.name not in names:\n            file.unlink()\n",
        ),
        (
            "a file of the old checkpoint stays: it was saved by more ranks than there are now, so nobody"
            " removed that rank's file"
        ),
    ),
    "leftovers stay": Mistake(
        edit(
            SAVE,
            'if file.name not in ["index.json", *names]:',
            'if file.name not in names and file.suffix == ".safetensors":',
        ),
        "what a killed save left behind stays for ever: a save that succeeds must remove that too",
    ),
    "refuses leftovers": Mistake(
        edit(SAVE, 'open(new, "wb")', 'open(new, "xb")'),
        (
            "what a killed save left behind made the next one fail: it must be overwritten or removed "
            "(mode 'wb', not 'xb'; exist_ok=True)"
        ),
    ),
    "appends": Mistake(
        edit(SAVE, 'open(new, "wb")', 'open(new, "ab")'),
        "something was added to what a killed save left behind: begin each file anew, in mode 'wb'",
    ),
    "only rank 0 waits": Mistake(
        edit(
            SAVE,
            "    barrier()  # now all files are on the disk\n    if rank == 0:\n",
            "    if rank == 0:\n        barrier()\n",
        ),
        (
            "not every rank calls barrier() equally often, so one of them waits for ever: call it outside"
            " of `if rank == 0:`"
        ),
    ),
    "its own barrier": Mistake(
        edit(
            SAVE,
            "import json\n",
            "import json\nimport torch.distributed as dist\n",
            "    barrier()  # now",
            "    dist.barrier()  # now",
        ),
        "save_checkpoint() is given barrier(): call that one, which is right for any group of ranks",
    ),
    "names without order": Mistake(
        edit(
            SAVE,
            "for r in range(world_size)]",
            "for r in reversed(range(world_size))]",
            "names[rank]",
            "names[world_size - 1 - rank]",
        ),
        "the names in the index are not in rank order: the file of rank r is the one with the number r",
    ),
    "rank 0's data for all": Mistake(
        edit(
            SAVE,
            f"    {_WRITE}\n",
            "    if rank == 0:\n        for name in names:\n            write(folder / name, data)\n",
        ),
        "another rank's content is in a file: each rank writes its own `data`, and nobody has the others'",
    ),
    "another index": Mistake(
        edit(SAVE, '"files": names}', '"names": names}'),
        'index.json must be {"step": step, "files": [a name in the folder for each rank]}',
    ),
    "the index taken away first": Mistake(
        edit(SAVE, f"        {_INDEX}", f'        (folder / "index.json").unlink(missing_ok=True)\n        {_INDEX}'),
        INDEX_GONE,
    ),
    "the step as text": Mistake(
        edit(SAVE, '"step": step', '"step": str(step)'), "`step` in index.json is the number that was given, not a text"
    ),
    "names with the folder": Mistake(
        edit(SAVE, "names}).encode())", "[str(folder / name) for name in names]}).encode())"),
        "the index has the names in the folder, without its path: a folder that is moved must still be readable",
    ),
    "earlier steps removed": Mistake(
        edit(
            SAVE,
            'if file.name not in ["index.json", *names]:',
            'if file.name.endswith(".tmp") or file.name[:5] == "step-" and int(file.name.split("-")[1]) < step:',
        ),
        "after a restart the old checkpoint may be of a later step: remove whatever the new index does not name",
    ),
    "returns after an error": Mistake(
        edit(SAVE, f"    {_WRITE}", f"    try:\n        {_WRITE}\n    except OSError:\n        return"), SWALLOWED
    ),
    "pickled": Mistake(
        edit(
            SAVE,
            "import json\n",
            "import json\nimport pickle\n",
            "names[rank], data)",
            "names[rank], pickle.dumps(data))",
        ),
        AS_IT_IS,
    ),
    "as text": Mistake(edit(SAVE, '"wb"', '"w"', "out.write(data)", 'out.write(data.decode("latin-1"))'), AS_IT_IS),
    "makes the folder": Mistake(
        edit(SAVE, "    names =", "    folder.mkdir()\n    names ="), "`folder` exists, with the old checkpoint in it"
    ),
    "text": Mistake(
        edit(SAVE, "names}).encode())", "names}))"),
        "data is bytes and JSON is text: open files with 'wb', and .encode() the text",
    ),
    "paths": Mistake(
        edit(SAVE, "names}).encode())", "[folder / name for name in names]}).encode())"),
        "the index must be JSON: numbers, strings and lists, no Path (use its .name)",
    ),
}

SAVE_CLEANING_FIRST = """\
import json
import os
from contextlib import suppress


def put(path, content):
    file = open(path, "wb")
    try:
        file.write(content)
        file.flush()
        os.fsync(file)
    except OSError:
        with suppress(OSError):  # it tries once more to write what is in the buffer
            file.close()
        os.remove(path)
        raise
    file.close()


def save_checkpoint(folder, step, data, rank, world_size, barrier):
    index = folder / "index.json"
    old = json.loads(index.read_text())["files"] if index.exists() else []
    if rank == 0:  # what killed saves left behind
        for name in os.listdir(folder):
            if name not in old and name != "index.json":
                os.remove(folder / name)
    barrier()
    put(folder / f"{step}-{rank}.st", data)
    barrier()
    if rank == 0:
        files = [f"{step}-{r}.st" for r in range(world_size)]
        put(folder / "tmp", json.dumps({"step": step, "files": files}).encode())
        os.replace(folder / "tmp", index)
        for name in old:
            os.remove(folder / name)
    barrier()
"""

RIGHT = {
    "11.1": (READS_BY_ELEMENT, READS_WALKING, READS_BY_RANGES),
    "11.2": (SAVE_BY_FOLDERS, SAVE_BY_DESCRIPTORS, SAVE_CLEANING_FIRST),
}
MISTAKES = {"11.1": READS_MISTAKES, "11.2": SAVE_MISTAKES}
