"""`zerolab doctor --students 20`: can this machine hold the class? It starts one live rank per student and measures.

The ranks start as in notebooks: each process holds up to `ranks` live ranks, which train a small model. What such a
process and its ranks use is measured while all are live, and scaled up to a server and a notebook with all its ranks
for each student. Nothing outlives the doctor: a notebook ends when its input does, and its ranks end with it.
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

from zerolab.apps.machine import INSTALL, Finding, MiB, available_memory, in_bytes
from zerolab.world import nursery

SERVER = 110 * MiB  # measured: JupyterLab's server takes 93 MiB before a notebook is open
SPARE = 0.9  # of the memory; the rest is for the system
PER_STUDENT = 5.0  # more seconds of patience for each: its rank and its share of a notebook import torch
LEAVE = 10.0  # seconds for processes to end
START_TIMEOUT = 300.0  # live.START_TIMEOUT, which cannot be imported without the extra `lab`

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
    """Start as many ranks as there are students, `ranks` in each notebook. None if they did not all start.

    When this returns, the notebooks and everything that they started are gone.
    """
    subject = f"class of {students}"
    try:
        import psutil  # noqa: F401
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        return None, [Finding(subject, "fix", f"live ranks need {error.name}, which is not installed", INSTALL)]
    free, shared = available_memory(), _shared_memory()
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
                fix = "fewer students on this machine, or fewer ranks each (--ranks 2); what else is running? (top)"
                return None, [Finding(subject, "fix", f"{students} ranks in {len(sizes)} notebooks: {problem}", fix)]
            seconds = time.monotonic() - begin
            seen = _look(notebooks)
            seen["shared_memory"] = max(0, _shared_memory() - shared)
        finally:
            _end(notebooks)
    seen |= {"students": students, "ranks_each": ranks, "ranks": students, "seconds": seconds, "free": free}
    return seen, judge(seen)


def judge(seen: dict[str, Any]) -> list[Finding]:
    """Scale what was measured on some ranks up to all the ranks of the class. Adds "needed" to `seen`."""
    students, each = seen["students"], seen["ranks_each"]
    subject, total = f"class of {students}", students * each
    one = seen["notebook_bytes"] + each * seen["rank_bytes"] + SERVER
    seen["needed"] = students * one
    text = f"{seen['ranks']} live ranks were ready after {seen['seconds']:.0f} s; "
    text += (
        f"a rank takes {in_bytes(seen['rank_bytes'])}, {seen['rank_threads']} threads and {seen['rank_files']} files"
    )
    text += f", a notebook {in_bytes(seen['notebook_bytes'])} and {seen['notebook_files']} files"
    text += f"; shared memory {in_bytes(seen['shared_memory'])} in all"
    findings = [Finding(subject, "good", text)]

    room = f"{students} notebooks with {each} ranks and a server each need {in_bytes(seen['needed'])}"
    if seen["free"] is None:
        findings.append(Finding("the class's memory", "note", f"{room}; this system does not say how much is free"))
    elif seen["needed"] > SPARE * seen["free"]:
        fit = int(SPARE * seen["free"] / one)
        fewer = next((r for r in range(each - 1, 0, -1) if _needed(seen, r) <= SPARE * seen["free"]), None)
        fix = f"{fit} student{'s' * (fit != 1)} here and the others elsewhere"
        fix += f", or lab.start({fewer}) instead of {each}" * (fewer is not None) + ", or more memory"
        findings.append(Finding("the class's memory", "fix", f"{room} of {in_bytes(seen['free'])} free", fix))
    else:
        findings.append(Finding("the class's memory", "good", f"{room} of {in_bytes(seen['free'])} free"))

    threads = students * (each * seen["rank_threads"] + seen["notebook_threads"])
    limit = _thread_limit()
    if limit is not None and threads > SPARE * limit:
        fix = f"ulimit -u {2 * threads} (nproc in limits.conf); in a container --pids-limit {2 * threads}"
        findings.append(Finding("the class's threads", "fix", f"about {threads:,} of {limit:,} that are allowed", fix))
    else:
        of = "" if limit is None else f" of {limit:,} that are allowed"
        findings.append(Finding("the class's threads", "good", f"about {threads:,}{of}"))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if total > 4 * cores:
        start = seen["seconds"] / seen["ranks"] * total
        text = f"{cores} cores for {total} ranks: if all students start theirs at once it takes about {start:.0f} s, "
        text += "and their cells compete for the cores: bytes are real, times say nothing"
        if start > START_TIMEOUT:
            text += f"; lab.start gives up after {START_TIMEOUT:g} s, so let students start in turns"
        findings.append(Finding("the class's cores", "note", text))
    return findings


def _needed(seen: dict[str, Any], each: int) -> int:
    return seen["students"] * (seen["notebook_bytes"] + each * seen["rank_bytes"] + SERVER)


def _thread_limit() -> int | None:
    """The smallest limit of this user, this container and this system."""
    limits = []
    with suppress(ImportError):
        import resource

        if (soft := resource.getrlimit(resource.RLIMIT_NPROC)[0]) != resource.RLIM_INFINITY:
            limits.append(soft)
    for file in ("/sys/fs/cgroup/pids.max", "/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max"):
        with suppress(OSError, ValueError):  # "max", which is not a number, means no limit
            limits.append(int(Path(file).read_text()))
    return min(limits) if limits else None


def _shared_memory() -> int:
    return shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0


# -- notebooks without a browser ---------------------------------------------------------------------------------------


def _open_notebook(ranks: int, said: Path) -> subprocess.Popen:
    """Start a process that holds live ranks, writes their ids into `said` once all have trained, and then waits."""
    command = [sys.executable, "-c", f"from {__name__} import notebook; notebook()", str(ranks), str(said)]
    with said.with_suffix(".err").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )


def notebook() -> None:
    """What such a process does. Its input ends when the doctor is done, or when the doctor ends for any reason."""
    ranks, said = int(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in case the doctor's own parent changed it
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
    os._exit(1)  # the ranks notice and end too


def _wait(notebooks: list[subprocess.Popen], folder: Path, deadline: float) -> str:
    """Wait until all are live. Returns what went wrong, or ""."""
    waiting = set(range(len(notebooks)))
    while waiting:
        for number in sorted(waiting):
            if (folder / str(number)).exists():
                waiting.remove(number)
            elif (code := notebooks[number].poll()) is not None:
                told = (folder / f"{number}.err").read_text(errors="replace").strip().splitlines()
                return f"notebook {number} ended while starting: {told[-1] if told else f'exit status {code}'}"
        if time.monotonic() > deadline:
            return f"{len(waiting)} of {len(notebooks)} notebooks had no live ranks when time ran out"
        time.sleep(0.05)
    return ""


def _look(notebooks: list[subprocess.Popen]) -> dict[str, Any]:
    """What they and their ranks use: memory on average, counting a share of shared pages; the rest at its highest."""
    import psutil

    owners = [psutil.Process(notebook.pid) for notebook in notebooks]
    below = [child for owner in owners for child in owner.children(recursive=True)]
    ranks = [child for child in below if child.name() != nursery.NAME]
    notebooks_own = [*owners, *(child for child in below if child not in ranks)]
    result: dict[str, Any] = {}
    for name, number, processes in (("rank", len(ranks), ranks), ("notebook", len(owners), notebooks_own)):
        memory = [process.memory_full_info() for process in processes]
        result[f"{name}_bytes"] = sum(getattr(info, "pss", info.uss) for info in memory) // number
        result[f"{name}_threads"] = max(process.num_threads() for process in processes)
        result[f"{name}_files"] = max(process.num_fds() for process in processes)
    result["processes"] = len(below) + len(owners)
    return result


def _end(notebooks: list[subprocess.Popen]) -> None:
    """Let them end, wait until they and everything that they started are gone, and kill whatever stays."""
    import psutil

    everything = []
    for notebook in notebooks:
        with suppress(psutil.NoSuchProcess):
            everything += psutil.Process(notebook.pid).children(recursive=True)
        if notebook.stdin is not None:
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
