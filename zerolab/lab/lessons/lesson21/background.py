"""Checkpoints that a thread writes while training goes on, on a disk that is slow."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

PATIENCE = 300  # seconds: it ends only what can never come


def life() -> int:
    """How often this live rank has died before."""
    return int(os.environ["ZEROLAB_LIFE"])


def scratch_folder() -> Path:
    """A folder of this session's live ranks, the same in each of their lives."""
    user = os.getuid() if hasattr(os, "getuid") else "me"  # the port may have been another user's before
    folder = Path(tempfile.gettempdir(), f"zerolab-lesson-21-{user}-{os.environ['MASTER_PORT']}")
    folder.mkdir(exist_ok=True)
    return folder


def written_meanwhile(
    tensors: Mapping[str, Tensor], model: nn.Module, one_step: Callable[[int], None], path: Path
) -> list[int]:
    """Write `tensors` in a thread while `one_step(0)`, `one_step(1)` ... train `model`, and load the file.

    Returns for each tensor in it after how many of these steps the model's parameters were that. A tensor takes the
    disk as long as a step takes training: the two threads meet before and after each, so that it comes out the same on
    every machine.
    """
    meet, written, of_step = threading.Barrier(2, timeout=PATIENCE), {}, []

    def write() -> None:
        for name, tensor in tensors.items():
            meet.wait()
            written[name] = tensor.detach().clone()  # what the file gets at this moment
            meet.wait()
        save_file(written, path)

    writer = threading.Thread(target=write)
    writer.start()
    for step in range(len(tensors)):
        of_step.append({name: param.detach().clone() for name, param in model.named_parameters()})
        meet.wait()
        meet.wait()
        one_step(step)
    writer.join()
    return [
        next(step for step, state in enumerate(of_step) if torch.equal(tensor, state[name]))
        for name, tensor in load_file(path).items()
    ]


def write_in_background(
    staged: Mapping[str, Tensor], step: int, path: Path, dies_at_half: bool = False
) -> threading.Thread:
    """Start a thread that writes `staged` and `step`, as lesson 11 says: under another name, flush, rename.

    dies_at_half: kill this process, when half of the file is written.
    """

    def write() -> None:
        data = save({**staged, "step": torch.tensor(step)})
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            if dies_at_half:
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    writer = threading.Thread(target=write)
    writer.start()
    return writer
