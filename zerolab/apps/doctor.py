"""`zerolab doctor`: what this machine can do, and what to do about what it cannot.

machine.py tries everything that is looked at; rehearsal.py starts a class's worth of live ranks (`--students`). Here it
is all put together and printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerolab.apps.machine import (
    GROUP_TIMEOUT,
    Refused,
    all_reduce,
    check_backends,
    check_build,
    check_environment,
    check_host_name,
    check_loopback,
    check_memory,
    check_open_files,
    check_packages,
    check_port,
    check_python,
    check_shared_memory,
    check_slurm,
    check_torch,
    look_at_gpus,
)
from zerolab.apps.rehearsal import hold_class
from zerolab.lab.__main__ import find_course

# -- lessons -----------------------------------------------------------------------------------------------------------


def lessons(folder: Path, gpus: int, nccl: bool) -> list[dict[str, str]]:
    """How each lesson runs here: as it is, and with lab.start(..., device="cuda") in its cell."""
    rows = []
    for file in sorted(folder.glob("[0-9]*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        lines = "\n".join(sources).splitlines()
        title = next((line[2:] for line in lines if line.startswith("# ")), file.stem)
        code = "\n".join(source for cell, source in zip(cells, sources) if cell["cell_type"] == "code")
        started = [int(number) for number in re.findall(r"lab\.start\((\d+)", code)]
        ranks = max(started, default=0)
        rows.append({"lesson": title, "ranks": str(ranks or "-")} | _how(ranks, gpus, nccl))
    return rows


def _how(ranks: int, gpus: int, nccl: bool) -> dict[str, str]:
    """What `session.start` chooses: the CPU, unless CUDA_VISIBLE_DEVICES or device= says that the GPUs are ours."""
    if not ranks:
        return {"as it is": "no ranks needed", "on GPUs": "-"}
    each = gpus >= ranks and nccl
    chosen = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and each
    if not gpus:
        with_gpus = "no GPU here"
    elif not each:
        with_gpus = f"gloo, sharing {gpus} GPU{'s' * (gpus > 1)}: real bytes, no real times"
    else:
        with_gpus = "NCCL, a GPU each; gloo for what is on the CPU"
    return {"as it is": with_gpus if chosen else "gloo, CPU", "on GPUs": with_gpus}


# -- a full visit ------------------------------------------------------------------------------------------------------


def run(
    ranks: int = 4,
    ports: Sequence[int] = (),
    timeout: float = 60.0,
    json_file: str | None = None,
    students: int | None = None,
) -> int:
    """Examine the machine and print the findings. Exit status: 0 all is well, 1 something needs fixing.

    students: also start this many live ranks, and work out what a class needs in which each student has `ranks`. Raises
    `Refused` before any work if an argument makes no sense.
    """
    if ranks < 1 or timeout <= 0:
        raise Refused(f"--ranks and --timeout must be more than 0, not {ranks} and {timeout:g}")
    if students is not None and students < 1:
        raise Refused(f"--students must be 1 or more, not {students}")
    begin = time.monotonic()
    report = examine(ranks, ports, timeout, students)
    if json_file:
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    wrong = [finding["subject"] for finding in report["findings"] if finding["state"] == "fix"]
    took = f"({time.monotonic() - begin:.0f} s)"
    print(f"to be fixed: {', '.join(wrong)} {took}" if wrong else f"all is well {took}")
    return report["status"]


def examine(ranks: int, ports: Sequence[int], timeout: float, students: int | None = None) -> dict[str, Any]:
    """Try everything that --json reports. timeout: seconds for each trial."""
    asked = [check_port(port) for port in ports]  # first, as it may refuse
    findings = [check_python(), check_torch(), check_build(), check_packages(), check_backends(), check_memory(ranks)]
    gpus, about = look_at_gpus(timeout)
    findings += [*about, check_shared_memory(gpus=len(gpus["gpus"])), check_open_files(ranks)]
    findings += [check_loopback(ranks), *asked, check_host_name(), *check_environment(), *check_slurm()]
    usable = [gpu for gpu in gpus["gpus"] if not gpu["problem"]]
    runs = [("cpu", ranks)]
    if usable and len(usable) == len(gpus["gpus"]):
        runs += [("nccl", len(usable))] * bool(gpus["nccl"])
        runs += [("shared", ranks)] * (ranks > len(usable) or not gpus["nccl"])
    measured = []
    for kind, many in runs:
        entry, finding = all_reduce(kind, many, timeout, min(GROUP_TIMEOUT, timeout / 2))
        measured += [entry] * (entry is not None)
        findings.append(finding)
    room = None
    if students is not None:
        room, about = hold_class(students, ranks, timeout)
        findings += about
    rows = lessons(find_course() / "lessons", len(usable), bool(gpus.get("nccl")))
    status = int(any(finding.state == "fix" for finding in findings))
    report = {"status": status, "findings": [asdict(finding) for finding in findings], "gpus": gpus}
    return report | {"all_reduce": measured, "lessons": rows, "class": room}


def show(report: dict[str, Any]) -> None:
    marks = {"good": "ok", "note": "note", "fix": "FIX"}
    width = max(40, min(shutil.get_terminal_size((120, 24)).columns, 140))
    for finding in report["findings"]:
        text = f"{finding['subject']}: {finding['says']}"
        print(textwrap.fill(text, width, initial_indent=f"{marks[finding['state']]:5}", subsequent_indent=" " * 7))
        if finding["fix"]:
            print(textwrap.fill(finding["fix"], width, initial_indent="     -> ", subsequent_indent=" " * 8))
    if topology := report["gpus"].get("topology"):
        print(f"\nWhat connects the GPUs (nvidia-smi topo -m):\n{topology}")
    if report["lessons"]:
        print('\nHow the lessons run here: as they are, and with lab.start(..., device="cuda"):')
        _table(report["lessons"])
        print()


def _table(rows: list[dict[str, str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:  # already a finding
        for row in rows:
            print("  " + " | ".join(row.values()))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
