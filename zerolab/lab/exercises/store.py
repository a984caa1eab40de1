"""Where answers and progress are kept: the folder `my` beside the notebook, or where ZEROLAB_MY says."""

from __future__ import annotations

import json
import os
from pathlib import Path


def folder() -> Path:
    """The folder of answers and progress."""
    return Path(os.environ.get("ZEROLAB_MY") or "my")


def file_of(id: str) -> Path:
    """The file of the answer to exercise `id`."""
    return folder() / f"ex_{id.replace('.', '_')}.py"


def _progress_file() -> Path:
    return folder() / "progress.json"


def read_progress() -> dict[str, dict]:
    empty: dict[str, dict] = {"passed": {}, "predictions": {}, "hints": {}}
    try:
        found = json.loads(_progress_file().read_text())
    except FileNotFoundError:
        return empty
    except ValueError as error:
        raise ValueError(
            f"{_progress_file()} is damaged ({error}): delete it; your answers are in files of their own"
        ) from None
    return empty | found


def write_progress(progress: dict[str, dict]) -> None:
    write(_progress_file(), json.dumps(progress, indent=1, sort_keys=True) + "\n")


def write(file: Path, text: str) -> None:
    """Write all of it or nothing, even if the disk is full or the process is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.replace(file)
