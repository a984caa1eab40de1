"""Measures what each student's processes use, and ends those that use too much.

It needs no cgroup, so it works in a container and without root. But it looks only once a second, so it is late to
notice a process that grows faster than that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from zerolab.classroom.labs import STUDENT, Lab
from zerolab.classroom.shield import view_of
from zerolab.lab.ranks import notices
from zerolab.lab.ranks.rank import NAME as RANK
from zerolab.measure.units import in_bytes

RESERVE = 0.03  # of the machine's memory: when less is available, the greediest process of all is ended


@dataclass
class _Process:
    process: psutil.Process
    branch: int  # the server's child that it descends from; 0 for the server, -1 for an orphan
    memory: int = 0  # bytes that no other process shares
    shared: int = 0
    kind: str = "process"


@dataclass
class Usage:
    """What one student uses: bytes of memory, and numbers of processes."""

    memory: int = 0
    processes: int = 0
    notebooks: int = 0
    ranks: int = 0
    found: list[_Process] = field(default_factory=list, repr=False)


class Watch:
    """`look` measures, ends what exceeds `memory` bytes or `processes`, and tells the teacher and the student."""

    def __init__(self, labs: list[Lab], memory: float, processes: int, tell: Callable[[str], None] = print) -> None:
        self.labs, self.memory, self.processes, self.tell = labs, memory, processes, tell

    def look(self) -> dict[str, Usage]:
        usage = self._measure()
        for lab in self.labs:
            mine = usage[lab.student]
            if mine.processes > self.processes:
                self._prune(lab, mine)
            elif mine.memory > self.memory and (exact := _exact(mine)) > self.memory:
                rule = f"each student may hold {in_bytes(self.memory)}, and you held {in_bytes(exact)}"
                self._end_greediest(lab, mine, rule)
        machine = psutil.virtual_memory()
        if machine.available < RESERVE * machine.total:
            lab = max(self.labs, key=lambda lab: usage[lab.student].memory)
            self._end_greediest(lab, usage[lab.student], f"the machine had only {in_bytes(machine.available)} left")
        return usage

    def _measure(self) -> dict[str, Usage]:
        servers = {lab.process.pid: lab.student for lab in self.labs if lab.process is not None}
        usage = {lab.student: Usage() for lab in self.labs}
        owner: dict[int, tuple[str, int]] = {pid: (student, 0) for pid, student in servers.items()}
        me = os.getpid()
        views = {view: student for pid, student in servers.items() if (view := view_of(pid)) not in (0, view_of(me))}
        # children() lists a parent before its children.
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.pid not in owner:
                    parent = process.ppid()
                    if parent == me:
                        student = views.get(view_of(process.pid)) or process.environ().get(STUDENT)
                        if student not in usage:
                            continue  # no student's
                        owner[process.pid] = (student, -1)
                    elif parent in owner:
                        student, branch = owner[parent]
                        owner[process.pid] = (student, branch or process.pid)
                    else:
                        continue
                student, branch = owner[process.pid]
                self._add(usage[student], _Process(process, branch))
        for mine in usage.values():
            mine.memory = sum(one.memory for one in mine.found) + max((one.shared for one in mine.found), default=0)
        return usage

    def _add(self, mine: Usage, one: _Process) -> None:
        with one.process.oneshot():
            memory, name, words = one.process.memory_info(), one.process.name(), one.process.cmdline()
        one.memory, one.shared = max(0, memory.rss - memory.shared), memory.shared
        if one.branch == 0:
            one.kind = "server"
        elif name == RANK:
            one.kind = "rank"
        elif any(word.startswith("ipykernel") for word in words):
            one.kind = "notebook"
        mine.found.append(one)
        mine.processes += 1
        mine.notebooks += one.kind == "notebook"
        mine.ranks += one.kind == "rank"

    def _end_greediest(self, lab: Lab, mine: Usage, rule: str) -> None:
        choice = [one for one in mine.found if one.kind != "server"]
        if not choice:
            return
        one = max(choice, key=lambda one: one.memory)
        which = f"{one.kind} (process {one.process.pid})" if one.kind != "rank" else "rank"
        text = f"the classroom ended this {which}, which held {in_bytes(one.memory)}: {rule}"
        notices.write(lab.notices, one.process.pid, text, one.kind == "notebook")
        with suppress(psutil.Error):
            one.process.kill()
        self.tell(f"{lab.student}: {text}")

    def _prune(self, lab: Lab, mine: Usage) -> None:
        """End the branch with the most processes: a notebook and all it started. Stop them first, so none can fork."""
        branches = [one.branch for one in mine.found if one.branch != 0]
        worst = max(set(branches), key=branches.count)
        kind = next((one.kind for one in mine.found if one.process.pid == worst), "")
        what = (
            f"this {kind} (process {worst}) and all that it had started" if kind else "processes that were left behind"
        )
        text = f"the classroom ended {what}: "
        text += f"each student may have {self.processes} processes, and you had {mine.processes}"
        notices.write(lab.notices, worst, text, of_notebook=True)
        for _ in range(10):
            family = [one.process for one in mine.found if one.branch == worst]
            for process in family:
                with suppress(psutil.Error):
                    process.suspend()
            mine = self._measure()[lab.student]
            if {one.process for one in mine.found if one.branch == worst} <= set(family):
                break
        for one in mine.found:
            if one.branch == worst:
                with suppress(psutil.Error):
                    one.process.kill()
        self.tell(f"{lab.student}: {text}")


def _exact(mine: Usage) -> int:
    """Memory with each shared page divided by its sharers. Slow to ask for, so done only where it matters."""
    total = 0
    for one in mine.found:
        with suppress(psutil.Error):
            total += one.process.memory_full_info().pss
    return total
