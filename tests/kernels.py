"""Kernels of notebooks as forks of this process's nursery, and so is the nursery that each starts its ranks with.

Imports are half of what a short notebook costs. The tests of the browser, the hub and classrooms start kernels as a
notebook server does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ipykernel.kernelapp import IPKernelApp

from zerolab.world import nursery


class Kernel:
    """A fork, with what jupyter_client needs of `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, command: Sequence[str], *, cwd: str, env: Mapping[str, str], **_: Any) -> None:
        self._fork = nursery.start("tests.kernels:run", list(command[command.index("-f") :]), cwd, environment=env)
        self.pid = self._fork.pid
        while self._fork.is_alive() and os.getpgid(self.pid) != self.pid:  # whom an interrupt will go to
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._fork.exitcode

    def wait(self) -> int | None:
        self._fork.join()
        return self.poll()

    def kill(self) -> None:
        self._fork.kill()

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def run(arguments: Sequence[str], folder: str) -> None:
    os.chdir(folder)
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # half a second, and no test debugs
    nursery.branch()
    IPKernelApp.launch_instance(arguments)
