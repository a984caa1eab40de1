"""`zerolab classroom`: what is started, what the teacher sees, and its end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from zerolab.lab.__main__ import OPEN, _only_here
from zerolab.lab.classroom.labs import Classroom, Refused
from zerolab.measure.units import in_bytes

EVERY = 1.0  # seconds between looks
PROBE_TIMEOUT = 60.0  # for the driver to say how many GPUs there are
STUDENT_BYTES = 1.2e9  # a lab, a notebook and four ranks


def classroom(
    students: int,
    gpus: int,
    ip: str,
    open_to_network: bool,
    port: int,
    folder: Path,
    lease_minutes: float,
) -> int:
    """Hold a classroom until Ctrl-C or SIGTERM. Exit status 0 if it began."""
    if not sys.platform.startswith("linux"):
        raise Refused(f"a classroom needs Linux, not {sys.platform}; each can run `make lab` on a machine of their own")
    if not 1 <= students <= 200:
        raise Refused(f"--students must be from 1 to 200, not {students}")
    if not 0 < lease_minutes <= 24 * 60:
        raise Refused(f"--lease-minutes must be more than 0 and at most a day, not {lease_minutes:g}")
    if not 1024 <= port <= 65000:
        raise Refused(f"--port must be from 1024 to 65000, not {port}")
    if not open_to_network and not _only_here(ip):
        raise Refused(f"--ip {ip}: {OPEN}")
    lessons = Path(__file__).resolve().parents[3] / "lessons"
    if not any(lessons.glob("*.ipynb")):
        raise Refused(f"there are no lessons in {lessons}: run this in a checkout of the course")
    names, rehearsal = lent_gpus(gpus)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the labs inherit it; a desktop's soft limit is low
    ended: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: ended.append(number)) for number in ENDS}
    room = Classroom(folder, students, ip, port, names, rehearsal, 60.0 * lease_minutes)
    try:
        if rehearsal:
            print(f"torch sees no GPU here: a rehearsal. {gpus} numbers are lent, and ranks stay on the CPU")
        if (free := psutil.virtual_memory().available) < students * STUDENT_BYTES:
            need = in_bytes(students * STUDENT_BYTES)
            print(
                f"{in_bytes(free)} of memory are free, but {students} notebooks with four ranks each need about {need}"
            )
        room.open(lessons)
        print(f"addresses and tokens: {room.handout}, which only you can read; Ctrl-C ends everything", flush=True)
        _attend(room, ended)
    finally:
        room.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    print("all labs, notebooks and ranks have ended")
    return 0


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _attend(room: Classroom, ended: list[int]) -> None:
    begin, told = time.monotonic(), 0
    while not ended:
        room.look()
        ready = sum(lab.ready for lab in room.labs)
        if ready != told and ready == len(room.labs):
            print(f"{ready} labs answer, {time.monotonic() - begin:.0f} s after the start", flush=True)
        told = ready
        time.sleep(EVERY)


def lent_gpus(wanted: int) -> tuple[list[str], bool]:
    """Their names, as CUDA_VISIBLE_DEVICES has them, and whether there are none, so that this is a rehearsal."""
    if wanted < 0:
        raise Refused(f"--gpus must be 0 or more, not {wanted}")
    if wanted == 0:
        return [], False
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Refused(f"the GPUs' driver did not answer within {PROBE_TIMEOUT:g} s: nvidia-smi may say why") from None
    last = done.stdout.split()
    if done.returncode or not last:
        raise Refused(f"torch does not say how many GPUs there are: {done.stderr.strip()[-300:]}")
    seen = int(last[-1])
    if 0 < seen < wanted:
        raise Refused(f"--gpus {wanted}, but torch sees {seen}: --gpus {seen}")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = chosen.split(",") if chosen and seen else [str(number) for number in range(wanted)]
    return [name.strip() for name in names[:wanted]], seen == 0
