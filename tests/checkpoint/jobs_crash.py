"""Saves that are killed: before each operation on the file system in turn, and in the middle of a file.

    python jobs_crash.py FOLDER [background]

prints where each death was, and which of the two checkpoints loads afterwards. Every save and every load runs in a
process of its own, forked from one that has done nothing but import.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zerolab
from zerolab.trial.zoo import CASES

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}

SIZES = (6000, 15000)  # in the middle of the rank's file, and of the manifest
PADDING = "." * 10000  # an extra that makes the manifest the longer of the two


def die_at(number: int, folder: str) -> None:
    """From now on count this process's operations on `folder`, and kill it just before operation `number`."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        # rmtree removes files by names relative to an open folder.
        if event in EVENTS and (str(args[0]).startswith(folder) or event == "os.remove"):
            count += 1
            if count == number:
                print(json.dumps({"before": [event, str(args[0])]}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_when_writing(size: int) -> None:
    """Let the system kill this process as soon as a file it writes exceeds `size` bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def make(number: float) -> tuple[zerolab.Engine, torch.optim.Optimizer]:
    zero = zerolab.Zero2(CASES["plain"].model(), units=CASES["plain"].units)
    for param in zero.model.parameters():
        param.data.fill_(number)
    return zero, torch.optim.AdamW(zero.model.parameters())


def save_twice(path: str, number: int, background: bool, death: Callable[[], None]) -> None:
    """Save one checkpoint, then a second in its place, during which this process is to die."""
    zerolab.init()
    zerolab.save(path, *make(number), number=number, padding=PADDING)
    second = make(number + 1)
    death()
    saving = zerolab.save(path, *second, background=background, number=number + 1, padding=PADDING)
    if saving is not None:
        train_on(*second)
        saving.wait()


def train_on(zero: zerolab.Engine, optimizer: torch.optim.Optimizer) -> None:
    """Everything that is in the checkpoint changes."""
    for param in zero.model.parameters():
        param.data.fill_(-2.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.5


def load(path: str, number: int) -> None:
    zerolab.init()
    zero, optimizer = make(-1.0)
    loaded = zerolab.load(path, zero, optimizer)["number"]
    assert loaded in (number, number + 1), (loaded, number)
    assert all((param == loaded).all() for param in zero.model.parameters())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    print(json.dumps({"loaded": "new" if loaded > number else "old"}), flush=True)


def forked(function: Callable[..., None], *args: Any) -> int:
    """Call `function(*args)` in a forked process; return its exit status, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: str, background: bool) -> int:
    path = str(Path(folder) / "checkpoint")
    torch.optim.AdamW([torch.zeros(1)])  # imports a lot the first time, so do that before the forks
    in_files = [partial(die_when_writing, size) for size in SIZES]
    for number in itertools.count(1):
        death = in_files[number - 1] if number <= len(SIZES) else partial(die_at, number - len(SIZES), folder)
        code = forked(save_twice, path, 2 * number, background, death)
        if forked(load, path, 2 * number) != 0:
            return 1
        if code == 0:  # there is no operation with this number, so all have been tried
            print(json.dumps({"left": sorted(os.listdir(folder))}))
            return 0
        if code not in (-signal.SIGKILL, -signal.SIGXFSZ):
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == ["background"]))
