"""Lesson 11: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson11 import READS, SAVE

from .sources import edit

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

READS_MUTANTS = {
    "padding as data": (edit(READS, _LAST, "(rank + 1) * shard"), "padding was read as data"),
    "start in the unit": (edit(READS, "start - begin, stop - begin", "start, stop"), "beginning of that file's shard"),
    "at in the unit": (edit(READS, ", start - first))", ", start))"), "`at` counts from the beginning of the unit"),
    "at in the file": (edit(READS, ", start - first))", ", start - begin))"), "`at` counts in the file"),
    "at forgotten": (edit(READS, ", start - first))", ", 0))"), "overwrite each other"),
    "off by one at the border": (edit(READS, "begin + length)\n", "begin + length - 1)\n"), "off by one at the border"),
    "one too many": (
        edit(
            READS,
            "stop = max(first, begin), min(last, begin + length)",
            "stop = max(first, begin), min(last, begin + length - (begin + length < last))",
        ),
        "off by one at the border",
    ),
    "N == M": (
        "import math\n\n\ndef plan_reads(files, numel, ranks, rank):\n    name, length = files[rank]\n"
        "    stop = min(length, numel - rank * length)\n    return [(name, 0, stop, 0)] if stop > 0 else []\n",
        "rank r reads file r only",
    ),
    "file r only": (
        edit(
            READS,
            "    for name, length in files:",
            "    for name, length in files[rank : rank + 1]:",
            "reads, begin = [], 0",
            "reads, begin = [], rank * files[0][1]",
        ),
        "rank r reads file r only",
    ),
    "the first files only": (edit(READS, "in files:", "in files[:ranks]:"), "first `ranks` files only"),
    "everything": (
        edit(READS, "max(first, begin), min(last, begin + length)", "begin, min(numel, begin + length)"),
        "a rank must read what it owns",
    ),
    "whole files": (
        edit(READS, _APPEND, "reads.append((name, 0, min(length, numel - begin), max(0, begin - first)))"),
        "needs a part only",
    ),
    "sorted by name": (edit(READS, "in files:", "in sorted(files):"), "sorted by name"),
    "the last is longer": (
        edit(
            READS,
            "math.ceil(numel / ranks)",
            "numel // ranks",
            _LAST,
            "numel if rank == ranks - 1 else (rank + 1) * shard",
        ),
        "the last shard was made longer",
    ),
    "the tail is lost": (edit(READS, "math.ceil(numel / ranks)", "numel // ranks"), "the tail is lost"),
    "empty reads": (edit(READS, "if start < stop:", "if start <= stop:"), "an empty read"),
    "bytes": (
        edit(
            READS,
            "(name, start - begin, stop - begin, start - first)",
            "(name, 4 * (start - begin), 4 * (stop - begin), start - first)",
        ),
        "bytes instead of elements",
    ),
    "length for stop": (edit(READS, "stop - begin, start", "stop - start, start"), "(start, length)"),
    "old shards": (edit(READS, "math.ceil(numel / ranks)", "files[0][1]"), "rank r reads file r only"),
    "the padded length": (
        edit(READS, "math.ceil(numel / ranks)", "math.ceil(sum(n for _, n in files) / ranks)"),
        "the old padded length",
    ),
    "file numbers": (
        edit(READS, "for name, length in files:", "for name, (_, length) in enumerate(files):"),
        "files[i][0]",
    ),
    "nothing returned": (edit(READS, "    return reads\n", ""), "`return` is missing"),
    "begin forgotten": (edit(READS, "        begin += length\n", ""), "each begins where the one before it ends"),
    "round": (edit(READS, "math.ceil(numel / ranks)", "round(numel / ranks)"), "rounds down as often as up"),
    "one more for all": (edit(READS, "math.ceil(numel / ranks)", "numel // ranks + 1"), "one too many where"),
    "balanced": (
        edit(
            READS,
            "shard = math.ceil(numel / ranks)\n",
            "share, more = divmod(numel, ranks)\n    first = rank * share + min(rank, more)\n",
            "first, last = rank * shard, min((rank + 1) * shard, numel)",
            "last = first + share + (rank < more)",
        ),
        "an element more than the others",
    ),
    "at before start": (
        edit(READS, "start - begin, stop - begin, start - first", "start - first, start - begin, stop - begin"),
        "(file, start, stop, at)",
    ),
    "stop before start": (
        edit(READS, "start - begin, stop - begin", "stop - begin, start - begin"),
        "(file, start, stop, at)",
    ),
    "eats the list": (
        edit(READS, "        begin += length\n", "        begin += length\n    files.clear()\n"),
        "work on a copy",
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

SAVE_MUTANTS = {
    "in place": (
        edit(SAVE, _INDEX, '(folder / "index.json").write_text(json.dumps({"step": step, "files": names}))'),
        "written in place",
    ),
    "the index first": (
        edit(SAVE, _BEFORE, "", "    barrier()  # nobody", f"    {_WRITE}\n    barrier()  # nobody"),
        "it comes last",
    ),
    "a temporary file elsewhere": (
        edit(SAVE, 'file.with_name(f"{file.name}.tmp")', 'file.parent.parent / f"{file.name}.tmp"'),
        "Put it beside the file",
    ),
    "tempfile's folder": (
        edit(
            SAVE,
            'new = file.with_name(f"{file.name}.tmp")',
            "import shutil, tempfile\n    new = Path(tempfile.mkdtemp()) / file.name",
            "os.replace(new, file)",
            "shutil.move(new, file)",
        ),
        "Put it beside the file",
    ),
    "a barrier after an error": (
        edit(
            SAVE,
            "    write(folder / names[rank], data)\n    barrier()  # now all files are on the disk\n",
            "    try:\n        write(folder / names[rank], data)\n    finally:\n        barrier()\n",
        ),
        "called barrier() all the same",
    ),
    "no barrier": (edit(SAVE, "    barrier()  # now all files are on the disk\n", ""), "wait for all of them"),
    "no second barrier": (
        edit(SAVE, "    barrier()  # nobody begins the next save before this is over\n", ""),
        "when another had begun the next save",
    ),
    "each rank renames": (edit(SAVE, "    if rank == 0:\n", "    if True:\n"), "several ranks put an index in place"),
    "the old one first": (
        edit(
            SAVE,
            _REMOVE,
            "",
            f"    {_WRITE}\n",
            "    if rank == 0:\n"
            + _REMOVE.replace('["index.json", *names]', '["index.json"]')
            + f"    barrier()\n    {_WRITE}\n",
        ),
        "remove them last",
    ),
    "everything first": (
        edit(
            SAVE,
            _REMOVE,
            "",
            f"    {_WRITE}\n",
            "    if rank == 0:\n"
            + _REMOVE.replace('["index.json", *names]', "[]").replace("folder.iterdir()", "sorted(folder.iterdir())")
            + f"    barrier()\n    {_WRITE}\n",
        ),
        "taken away before the new one",
    ),
    "removed, then renamed": (
        edit(
            SAVE, "        os.replace(new, file)", "        file.unlink(missing_ok=True)\n        os.rename(new, file)"
        ),
        "taken away before the new one",
    ),
    "before the index": (
        edit(SAVE, f"        {_INDEX}\n{_REMOVE}", f"{_REMOVE}        {_INDEX}\n"),
        "remove them last",
    ),
    "the same names": (
        edit(SAVE, 'f"step-{step}-rank-{r}.safetensors"', 'f"rank-{r}.safetensors"'),
        "give the new files other names",
    ),
    "one temporary name": (
        edit(SAVE, 'file.with_name(f"{file.name}.tmp")', 'file.with_name("new.tmp")'),
        "two ranks write the same file",
    ),
    "no rank in the name": (
        edit(SAVE, 'f"step-{step}-rank-{r}.safetensors"', 'f"step-{step}.safetensors"'),
        "two ranks write the same file",
    ),
    "no fsync": (edit(SAVE, _SYNC, ""), "a power cut loses them"),
    "fsync before flush": (edit(SAVE, "            out.flush()\n", ""), "flushed too early"),
    "rename before fsync": (
        edit(
            SAVE,
            _SYNC,
            "",
            "        os.replace(new, file)\n",
            "        os.replace(new, file)\n        with open(file) as out:\n            os.fsync(out.fileno())\n",
        ),
        "not flushed before it was renamed",
    ),
    "no fsync of the index": (
        edit(SAVE, _SYNC, '            if "index" not in file.name:\n                os.fsync(out.fileno())\n'),
        "not flushed before it was renamed",
    ),
    "leaves the temporary": (
        edit(SAVE, "        new.unlink(missing_ok=True)  # after an error", "        pass"),
        "the temporary file stays",
    ),
    "swallows the error": (edit(SAVE, "    finally:\n", "    except OSError:\n"), "the error was swallowed"),
    "the old one stays": (edit(SAVE, _REMOVE, ""), "with every save they fill the disk"),
    "each removes its own": (
        edit(
            SAVE,
            _REMOVE,
            '    barrier()\n    for file in folder.glob(f"step-*-rank-{rank}.safetensors"):\n'
            "        if file.name not in names:\n            file.unlink()\n",
        ),
        "saved by more ranks than there are now",
    ),
    "leftovers stay": (
        edit(
            SAVE,
            'if file.name not in ["index.json", *names]:',
            'if file.name not in names and file.suffix == ".safetensors":',
        ),
        "what a killed save left behind stays",
    ),
    "refuses leftovers": (edit(SAVE, 'open(new, "wb")', 'open(new, "xb")'), "made the next one fail"),
    "appends": (edit(SAVE, 'open(new, "wb")', 'open(new, "ab")'), "begin each file anew"),
    "only rank 0 waits": (
        edit(
            SAVE,
            "    barrier()  # now all files are on the disk\n    if rank == 0:\n",
            "    if rank == 0:\n        barrier()\n",
        ),
        "every rank",
    ),
    "its own barrier": (
        edit(
            SAVE,
            "import json\n",
            "import json\nimport torch.distributed as dist\n",
            "    barrier()  # now",
            "    dist.barrier()  # now",
        ),
        "is given barrier()",
    ),
    "names without order": (
        edit(
            SAVE,
            "for r in range(world_size)]",
            "for r in reversed(range(world_size))]",
            "names[rank]",
            "names[world_size - 1 - rank]",
        ),
        "not in rank order",
    ),
    "rank 0's data for all": (
        edit(
            SAVE,
            f"    {_WRITE}\n",
            "    if rank == 0:\n        for name in names:\n            write(folder / name, data)\n",
        ),
        "another rank's content",
    ),
    "another index": (edit(SAVE, '"files": names}', '"names": names}'), '"files"'),
    "text": (edit(SAVE, "names}).encode())", "names}))"), "JSON is text"),
    "paths": (edit(SAVE, "names}).encode())", "[folder / name for name in names]}).encode())"), "must be JSON"),
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
WRONG = {"11.1": READS_MUTANTS, "11.2": SAVE_MUTANTS}
