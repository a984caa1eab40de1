"""`zerolab train` under torchrun, of which a rank is killed in every life but the last.

    torchrun --max-restarts KILLS ... jobs_killed.py KILLS DIARY DIR [arguments of zerolab.train]

saves to DIR. Who dies, and when, follows from the number of the restart: at a random moment after a random number of
steps, at a random moment from the start of the process on, or within a save: just before one of the things that it does
to the file system, or in the middle of a file. What was done, and where the process was, is a line in DIARY.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from random import Random

from jobs_crash import EVENTS, die_when_writing
from torch.optim.optimizer import register_optimizer_step_post_hook

KINDS = ("step", "step", "start", "save", "file")


def main(kills: int, diary: str, folder: str, arguments: list[str]) -> int:
    life, rank, size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    random = Random(life)
    kind, victim = KINDS[life % len(KINDS)], random.randrange(size)
    if kind in ("save", "file"):  # most is done by the first rank, which also writes other files than a checkpoint's
        victim = ("save", "file").index(kind)
    if life < kills and rank == victim:
        note = {"life": life, "rank": rank, "kind": kind}
        if kind == "start":
            die_after(random.uniform(0, 3), diary, note)
        else:
            moment = random.uniform(0, 0.05)
            number = random.randrange(1, 16)
            death = {
                "step": lambda: die_after(moment, diary, note),
                "save": lambda: die_before(number, folder, diary, note),
                "file": lambda: (write(diary, note), die_when_writing(2000)),
            }
            after_steps(random.randrange(1, 8), death[kind])
    from zerolab.apps import train

    return train.main([*arguments, "--checkpoint", folder])


def after_steps(number: int, act: Callable[[], object]) -> None:
    count = 0

    def hook(*ignored: object) -> None:
        nonlocal count
        count += 1
        if count == number:
            act()

    register_optimizer_step_post_hook(hook)


def die_after(seconds: float, diary: str, note: dict[str, object]) -> None:
    main_thread = threading.get_ident()

    def kill() -> None:
        time.sleep(seconds)
        frame, names = sys._current_frames()[main_thread], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        die(diary, note | {"where": next((n for n in names if n in ("save", "load", "train_step", "train")), "start")})

    threading.Thread(target=kill, daemon=True).start()


def die_before(number: int, folder: str, diary: str, note: dict[str, object]) -> None:
    """Die just before thing `number` that this process does to `folder` from here on."""
    count = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS and (str(args[0]).startswith(folder) or event == "os.remove"):
            count += 1
            if count == number:
                die(diary, note | {"where": "save", "before": event})

    sys.addaudithook(hook)


def die(diary: str, note: dict[str, object]) -> None:
    write(diary, note)
    os.kill(os.getpid(), signal.SIGKILL)


def write(diary: str, note: dict[str, object]) -> None:
    with open(diary, "a") as file:
        file.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
