"""Which notebooks on this machine have live ranks: one small file for each, so that a second notebook can say so."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_core.paths import jupyter_runtime_dir


@dataclass
class Entry:
    """A notebook's kernel and its ranks. Ids of processes are reused, so each comes with the time it was created."""

    file: Path
    notebook: tuple[int, float]
    ranks: list[tuple[int, float]]

    def living(self) -> list[int]:
        return [pid for pid, made in self.ranks if _made(pid) == made]


def _folder() -> Path:
    return Path(jupyter_runtime_dir()) / "zerolab"


def _made(pid: int) -> float | None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.create_time()
    return None


def write(pids: list[int]) -> None:
    """Note this process's ranks. If the note cannot be written, other notebooks will not know of them."""
    ranks = [(pid, made) for pid in pids if (made := _made(pid)) is not None]
    entry = {"notebook": (os.getpid(), _made(os.getpid())), "ranks": ranks}
    file = _folder() / f"{os.getpid()}.json"
    new = file.with_suffix(".new")
    with suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        new.write_text(json.dumps(entry))
        new.replace(file)


def remove() -> None:
    with suppress(OSError):
        (_folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def others() -> list[Entry]:
    """The other notebooks with living ranks. Removes the files of notebooks that are gone."""
    found = []
    for file in sorted(_folder().glob("*.json")):
        try:
            data = json.loads(file.read_text())
            entry = Entry(file, tuple(data["notebook"]), [(pid, made) for pid, made in data["ranks"]])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if entry.notebook[0] == os.getpid():
            continue
        if entry.living():
            found.append(entry)
        else:
            file.unlink(missing_ok=True)
    return found


def stop(entry: Entry) -> int:
    """Kill the ranks of another notebook. Returns how many there were."""
    pids = entry.living()
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # each rank leads a group of its own
    entry.file.unlink(missing_ok=True)
    return len(pids)
