"""The answer to an exercise as a script of its own, started by the real torchrun.

    said = torchrun("14.2", 4, "--stage", "3")          # what the ranks printed
    results = lab.reproduce("14.2")                     # three seeds, and other numbers of ranks

It is the learner's file once it has passed its check, and until then the course's, as with `mine`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zerolab
from zerolab.lab.exercises.catalogue import find_exercise
from zerolab.lab.exercises.learner import passed
from zerolab.lab.exercises.store import file_of

TIMEOUT = 400.0  # seconds: the slowest of the lessons takes a quarter of a minute on two idle cores


class ScriptFailed(RuntimeError):
    """A script that did not end well. Shows the end of what it said."""


def torchrun(id: str, ranks: int, *arguments: object, timeout: float = TIMEOUT) -> str:
    """Run the answer to exercise `id` by torchrun on `ranks` processes of this machine; return its standard output.

    Raises ScriptFailed if it ends with an error, or not within `timeout` seconds. It then leaves no process behind.
    """
    asked, own = find_exercise(id), passed(id)
    with tempfile.TemporaryDirectory(prefix="zerolab-script-") as folder:
        file = Path(folder) / file_of(id).name
        file.write_text(file_of(id).read_text() if own else asked.reference)
        said = "your" if own else "the course's"
        print(f"torchrun --nproc-per-node {ranks} {file.name} {' '.join(map(str, arguments))}   # {said} script")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        path = os.pathsep.join([str(Path(zerolab.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [*launcher, str(file), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:  # time is up, or the cell was interrupted
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                late = f"the script had not ended after {timeout:g} s: a rank may wait for another"
                raise ScriptFailed(late) from None
            raise
    if process.returncode:
        raise ScriptFailed(f"torchrun ended with {process.returncode}\n{_end_of(err)}")
    return out


def reproduce(id: str, *arguments: object) -> dict[int, list[dict[str, Any]]]:
    """Run a training script with three seeds on one rank, then the first on 2 ranks in stage 2 and on 4 in stage 3.

    By the number of ranks, what it printed for each seed: {"seed": ..., "losses": [...], "accuracy": 0 to 1}. Until the
    exercise has passed, only the course's script runs, on one rank. Raises what `torchrun` does.
    """
    runs = {1: (0, 0, 1, 2)} | ({2: (2, 0), 4: (3, 0)} if passed(id) else {})
    results = {}
    for ranks, (stage, *seeds) in runs.items():
        said = torchrun(id, ranks, "--stage", stage, *arguments, "--seeds", *seeds)
        results[ranks] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        for one in results[ranks]:
            print(f"   seed {one['seed']}: loss {one['losses'][-1]:.4f}, accuracy {100 * one['accuracy']:.2f} %")
    return results


def against_one_rank(results: dict[int, list[dict[str, Any]]], losses: float, accuracy: float = 0.0) -> None:
    """Print, for each other number of ranks in `results` of `reproduce`, whether its first seed ended as on one rank.

    losses, accuracy: how far each may be from that of one rank, for rounding.
    """
    allowed = f"accuracies within {100 * accuracy:g} %" if accuracy else "same accuracy"
    first, within = results[1][0], f"{losses:g}".replace("e-0", "e-")
    for ranks, (other, *_) in list(results.items())[1:]:
        pairs = zip(first["losses"], other["losses"], strict=True)
        close = all(abs(a - b) < losses for a, b in pairs)
        right = abs(first["accuracy"] - other["accuracy"]) < max(accuracy, 1e-6)
        print(f"{ranks} ranks against 1: losses within {within}: {close}, {allowed}: {right}")


def _end_of(err: str, lines: int = 25) -> str:
    """The first traceback in what the ranks and torchrun said, or the last lines."""
    rows = err.splitlines()
    found = [i for i, row in enumerate(rows) if "Traceback (most recent call last)" in row]
    begin = found[0] if found else max(0, len(rows) - lines)
    return "\n".join(rows[begin : begin + lines])
