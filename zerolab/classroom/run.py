"""`zerolab classroom`: start the labs, show the teacher how they are doing, and end them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live

from zerolab.classroom import board
from zerolab.classroom.broker import Entry
from zerolab.classroom.labs import Classroom, Refused
from zerolab.classroom.watch import Usage, Watch
from zerolab.lab.__main__ import OPEN, find_course, only_here
from zerolab.measure.units import in_bytes

EVERY = 1.0  # seconds between looks
PROBE_TIMEOUT = 60.0  # for the driver to say how many GPUs there are
STUDENT_BYTES = 1.2e9  # for a lab, a notebook and four ranks


def hold(
    students: int,
    gpus: int,
    ip: str,
    open_to_network: bool,
    port: int,
    folder: Path,
    lease_minutes: float,
    memory: float,
    processes: int,
    solutions: bool,
    no_answers: bool,
) -> int:
    """Hold a classroom until Ctrl-C or SIGTERM. Returns exit status 0. Raises Refused if it cannot begin."""
    if not sys.platform.startswith("linux"):
        raise Refused(f"a classroom needs Linux, not {sys.platform}; students can run `make lab` on their own machines")
    if not 1 <= students <= 200:
        raise Refused(f"--students must be from 1 to 200, not {students}")
    if not 0 < lease_minutes <= 24 * 60:
        raise Refused(f"--lease-minutes must be more than 0 and at most a day, not {lease_minutes:g}")
    if not 0.5 <= memory <= 1e6:
        raise Refused(f"--memory must be 0.5 or more, in GB, not {memory:g}")
    if not 8 <= processes <= 100_000:
        raise Refused(f"--processes must be 8 or more (a lab, a notebook and four ranks make 6), not {processes}")
    if not 1024 <= port <= 65000:
        raise Refused(f"--port must be from 1024 to 65000, not {port}")
    if not open_to_network and not only_here(ip):
        raise Refused(f"--ip {ip}: {OPEN.replace('8888', str(port))}")
    course = find_course()
    lessons = course / "lessons"
    if not any(lessons.glob("*.ipynb")):
        raise Refused(f"there are no lessons in {lessons}: install zerolab, or run this in a checkout")
    names, rehearsal = lent_gpus(gpus)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the labs inherit it; a desktop's soft limit is low
    ended: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: ended.append(number)) for number in ENDS}
    room = Classroom(folder, students, ip, port, names, rehearsal, 60.0 * lease_minutes)
    try:
        if rehearsal:
            print(f"torch sees no GPU here, so this is a rehearsal: {gpus} numbers are lent, and ranks stay on the CPU")
        if (free := psutil.virtual_memory().available) < students * STUDENT_BYTES:
            need = in_bytes(students * STUDENT_BYTES)
            print(
                f"{in_bytes(free)} of memory is free, but {students} notebooks with four ranks each need about {need}"
            )
        room.open(lessons, course / "solutions" if solutions else None, answers=not no_answers)
        print(
            f"addresses and tokens: {room.handout} (only your account can read it); Ctrl-C ends everything", flush=True
        )
        _attend(room, Watch(room.labs, memory * 1e9, processes, room.tell), ended)
    finally:
        room.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    print("all labs, notebooks and ranks have ended")
    return 0


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _attend(room: Classroom, watch: Watch, ended: list[int]) -> None:
    """Keep the labs running until a signal ends them, and show a table if there is a terminal."""
    begin, told = time.monotonic(), 0
    said: list[str] = []
    with Live(auto_refresh=False) if sys.stdout.isatty() else nullcontext() as live:
        if live is not None:  # print lines above the table, which stays in place
            room.tell = watch.tell = said.append
        while not ended:
            room.look()
            usage = watch.look()
            ready = sum(lab.ready for lab in room.labs)
            if ready != told and ready == len(room.labs):
                room.tell(f"ready: {ready} of {ready} labs, {time.monotonic() - begin:.0f} s after the start")
            told = ready
            if live is not None:
                while said:
                    live.console.print(said.pop(0), markup=False, highlight=False)
                live.update(_table(room, usage), refresh=True)
            sys.stdout.flush()
            time.sleep(EVERY)


def _table(room: Classroom, usage: dict[str, Usage]) -> Any:
    lent = {entry.student: entry for entry in room.broker.table()}
    rows = []
    for lab in room.labs:
        mine, progress, entry = usage[lab.student], board.read(lab.work / "my"), lent.get(lab.student)
        state = str(lab.port) if lab.ready else "starting" if lab.process is not None else "down"
        numbers = [mine.notebooks, mine.ranks, in_bytes(mine.memory), len(progress.passed), len(progress.predictions)]
        rows.append([lab.student, state, *_lent(entry), *map(str, numbers)])
    free = in_bytes(psutil.virtual_memory().available)
    return board.teacher_view(rows, f"{len(rows)} student{'s' * (len(rows) > 1)} · {free} of memory free")


def _lent(entry: Entry | None) -> tuple[str, str]:
    """A student's GPUs and for how long they are guaranteed, or the place in the queue."""
    if entry is None:
        return "", ""
    if not entry.gpus:
        return f"place {entry.place}", ""
    runs: list[list[str]] = []
    for name in entry.gpus:
        if runs and runs[-1][-1].isdecimal() and name == str(int(runs[-1][-1]) + 1):
            runs[-1].append(name)
        else:
            runs.append([name])
    names = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    left = int(entry.left)
    return names, f"{left // 60}:{left % 60:02}"


def show_board(folder: Path, plot: str | None) -> int:
    """`--board`: how far the class is, without names, for everyone to see."""
    room = board.rooms(folder)
    if not room:
        raise Refused(f"there are no students' folders in {folder}: name the classroom's --folder")
    for table in board.room_view(room):
        Console().print(table)
    if plot:
        board.picture(room).savefig(plot, dpi=120)
        print(f"drawn: {plot}")
    return 0


def lent_gpus(wanted: int) -> tuple[list[str], bool]:
    """The GPUs' names, as in CUDA_VISIBLE_DEVICES, and whether this is a rehearsal because there are no GPUs."""
    if wanted < 0:
        raise Refused(f"--gpus must be 0 or more, not {wanted}")
    if wanted == 0:
        return [], False
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Refused(f"the GPU driver did not answer within {PROBE_TIMEOUT:g} s: nvidia-smi may say why") from None
    last = done.stdout.split()
    if done.returncode or not last:
        raise Refused(f"torch could not count the GPUs: {done.stderr.strip()[-300:]}")
    seen = int(last[-1])
    if 0 < seen < wanted:
        raise Refused(f"--gpus {wanted}, but torch sees {seen}: --gpus {seen}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = chosen.split(",") if chosen and seen else [str(number) for number in range(wanted)]
    return [name.strip() for name in names[:wanted]], seen == 0
