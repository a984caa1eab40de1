"""`zerolab doctor --students 20`: does this machine hold the class? As many live ranks are started, and looked at.

They are started as notebooks do it: processes that each hold up to `ranks` live ranks, which train a small model. What
such a process and its ranks take is measured while all are live, and counted up for a notebook with all its ranks for
each student, and a server. Nothing outlives the doctor: a notebook ends when its input does, and its ranks with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolab.apps.doctor import Finding, MiB, _available_memory, _bytes

SERVER = 110 * MiB  # measured: JupyterLab's server, 93 MiB before a notebook is open
SPARE = 0.9  # of the memory: the rest is for the system
PER_STUDENT = 5.0  # seconds of patience more for each: its rank and its share of a notebook import torch
LEAVE = 10.0  # seconds to end in
START_TIMEOUT = 90.0  # session.START_TIMEOUT, which cannot be imported without the extra `lab`

CELL = """
import torch, zerolab
from zerolab.tasks.models import GPT
model = GPT(layers=2, width=64)
zero = zerolab.Zero2(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randint(0, 256, (2, 33))
for _ in range(2):
    model(x[:, :-1], x[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def hold_class(students: int, ranks: int, timeout: float) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Start as many ranks as there are students, `ranks` in each notebook; None if they did not all start.

    The notebooks and all that they started are gone when this returns.
    """
    subject = f"class of {students}"
    try:
        import psutil  # noqa: F401
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        from zerolab.apps.doctor import INSTALL

        return None, [Finding(subject, "fix", f"live ranks need {error.name}, which is not installed", INSTALL)]
    free, shared = _available_memory(), _shared_memory()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zerolab-room-") as folder:
        sizes = [min(ranks, students - first) for first in range(0, students, ranks)]
        notebooks: list[subprocess.Popen] = []
        try:
            for number, size in enumerate(sizes):
                notebooks.append(_open_notebook(size, Path(folder) / str(number)))
            deadline = begin + timeout + PER_STUDENT * students
            problem = _wait(notebooks, Path(folder), deadline)
            if problem:
                fix = "fewer students on this machine, or fewer ranks each (--ranks 2); what else runs here? (top)"
                return None, [Finding(subject, "fix", f"{students} ranks in {len(sizes)} notebooks: {problem}", fix)]
            seconds = time.monotonic() - begin
            seen = _look(notebooks)
            seen["shared_memory"] = max(0, _shared_memory() - shared)
        finally:
            _end(notebooks)
    seen |= {"students": students, "ranks_each": ranks, "ranks": students, "seconds": seconds, "free": free}
    return seen, judge(seen)


def judge(seen: dict[str, Any]) -> list[Finding]:
    """What was seen of some ranks, counted up for all that the class will have. Adds "needed" to `seen`."""
    students, each = seen["students"], seen["ranks_each"]
    subject, total = f"class of {students}", students * each
    one = seen["notebook_bytes"] + each * seen["rank_bytes"] + SERVER
    seen["needed"] = students * one
    text = f"{seen['ranks']} live ranks were ready after {seen['seconds']:.0f} s; "
    text += f"a rank takes {_bytes(seen['rank_bytes'])}, {seen['rank_threads']} threads and {seen['rank_files']} files"
    text += f", a notebook {_bytes(seen['notebook_bytes'])} and {seen['notebook_files']} files"
    text += f"; shared memory {_bytes(seen['shared_memory'])} in all"
    findings = [Finding(subject, "good", text)]

    room = f"{students} notebooks with {each} ranks and a server each need {_bytes(seen['needed'])}"
    if seen["free"] is None:
        findings.append(Finding("the class's memory", "note", f"{room}; this system does not say how much is free"))
    elif seen["needed"] > SPARE * seen["free"]:
        fit = int(SPARE * seen["free"] / one)
        fewer = next((r for r in range(each - 1, 0, -1) if _needed(seen, r) <= SPARE * seen["free"]), None)
        fix = f"{fit} student{'s' * (fit != 1)} here and the others elsewhere"
        fix += f", or lab.start({fewer}) in place of {each}" * (fewer is not None) + ", or more memory"
        findings.append(Finding("the class's memory", "fix", f"{room} of {_bytes(seen['free'])} free", fix))
    else:
        findings.append(Finding("the class's memory", "good", f"{room} of {_bytes(seen['free'])} free"))

    threads = students * (each * seen["rank_threads"] + seen["notebook_threads"])
    limit = _thread_limit()
    if limit is not None and threads > SPARE * limit:
        fix = f"ulimit -u {2 * threads} (nproc in limits.conf); in a container --pids-limit {2 * threads}"
        findings.append(Finding("the class's threads", "fix", f"about {threads:,} of {limit:,} that may be", fix))
    else:
        of = "" if limit is None else f" of {limit:,} that may be"
        findings.append(Finding("the class's threads", "good", f"about {threads:,}{of}"))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if total > 4 * cores:
        start = seen["seconds"] / seen["ranks"] * total
        text = f"{cores} cores for {total} ranks: if all start theirs at once it takes about {start:.0f} s, "
        text += "and cells of many take turns: bytes are true, times say nothing"
        if start > START_TIMEOUT:
            text += f"; lab.start gives up after {START_TIMEOUT:g} s, so let them start in turns"
        findings.append(Finding("the class's cores", "note", text))
    return findings


def _needed(seen: dict[str, Any], each: int) -> int:
    return seen["students"] * (seen["notebook_bytes"] + each * seen["rank_bytes"] + SERVER)


def _thread_limit() -> int | None:
    """The smallest of what this user, this container and this system may have."""
    limits = []
    with suppress(ImportError):
        import resource

        if (soft := resource.getrlimit(resource.RLIMIT_NPROC)[0]) != resource.RLIM_INFINITY:
            limits.append(soft)
    for file in ("/sys/fs/cgroup/pids.max", "/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max"):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limits.append(int(Path(file).read_text()))
    return min(limits) if limits else None


def _shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0


# -- notebooks without a browser ---------------------------------------------------------------------------------------


def _open_notebook(ranks: int, said: Path) -> subprocess.Popen:
    """A process that holds live ranks, writes into `said` who they are when all have trained, and waits for its end."""
    command = [sys.executable, "-c", "from zerolab.lab import room; room.notebook()", str(ranks), str(said)]
    with said.with_suffix(".err").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )


def notebook() -> None:
    """What such a process does. Its input ends when the doctor is done, or has ended, however that was."""
    ranks, said = int(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the doctor's own parent made of it
    threading.Thread(target=_interrupt_after_input, daemon=True).start()
    from zerolab.lab.ranks import session

    with suppress(KeyboardInterrupt):
        try:
            live = session.start(ranks, device="cpu")
            live.run(CELL)
            part = said.with_suffix(".part")
            part.write_text(json.dumps([rank.process.pid for rank in live._ranks.values()]))
            part.rename(said)
            time.sleep(3600.0)
        finally:
            session.stop()


def _interrupt_after_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LEAVE)
    os._exit(1)  # the ranks see that this process is gone, and go


def _wait(notebooks: list[subprocess.Popen], folder: Path, deadline: float) -> str:
    """Until all are live: what went wrong, if anything."""
    waiting = set(range(len(notebooks)))
    while waiting:
        for number in sorted(waiting):
            if (folder / str(number)).exists():
                waiting.remove(number)
            elif (code := notebooks[number].poll()) is not None:
                told = (folder / f"{number}.err").read_text(errors="replace").strip().splitlines()
                return f"notebook {number} ended at its start: {told[-1] if told else f'exit status {code}'}"
        if time.monotonic() > deadline:
            return f"{len(waiting)} of {len(notebooks)} notebooks had no live ranks when the time was over"
        time.sleep(0.05)
    return ""


def _look(notebooks: list[subprocess.Popen]) -> dict[str, Any]:
    """What they and their ranks take: memory on average, with a share of what several share, the rest at most."""
    import psutil

    owners = [psutil.Process(notebook.pid) for notebook in notebooks]
    ranks = [rank for owner in owners for rank in owner.children()]
    result: dict[str, Any] = {}
    for name, processes in (("rank", ranks), ("notebook", owners)):
        memory = [process.memory_full_info() for process in processes]
        held = [getattr(info, "pss", info.uss) for info in memory]
        result[f"{name}_bytes"] = sum(held) // len(held)
        result[f"{name}_threads"] = max(process.num_threads() for process in processes)
        result[f"{name}_files"] = max(process.num_fds() for process in processes)
    result["processes"] = len(ranks) + len(owners)
    return result


def _end(notebooks: list[subprocess.Popen]) -> None:
    """Let them end, and wait until they and all that they started are gone; kill who does not go."""
    import psutil

    everything = []
    for notebook in notebooks:
        with suppress(psutil.NoSuchProcess):
            everything += psutil.Process(notebook.pid).children(recursive=True)
        notebook.stdin.close()
    deadline = time.monotonic() + LEAVE
    for notebook in notebooks:
        with suppress(subprocess.TimeoutExpired):
            notebook.wait(max(0.0, deadline - time.monotonic()))
        notebook.kill()
        notebook.wait(LEAVE)
    for process in everything:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(everything, timeout=LEAVE)
