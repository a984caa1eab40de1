"""What a patient of the clinic is: a broken run, what it complains of, and what an examination shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patient:
    """One broken run.

    script: the code that is broken, shown once a diagnosis is written down. examine: runs it on every rank and prints
    what an engineer would see; returns numbers for a picture, if there is one. complaint: what was reported.
    choices: letter -> a diagnosis and its reason. answer: the right letter. story: what to learn from it.
    reset: whether the ranks are out of step afterwards. recorded: if not 0, `examine` runs in bare processes, and the
    evidence is what torch's flight recorder has of them: so many calls on each rank, the last of which never ends.
    source: the fix that it was rebuilt from, told with the story. catches: whether the script prints its errors itself,
    so that a rank that finished the cell may have failed; the evidence then leaves out who finished it.
    """

    number: int
    complaint: str
    script: tuple[Callable[..., Any], ...]
    examine: Callable[[int, int], Any]
    choices: dict[str, str]
    answer: str
    story: str
    reset: bool = False
    recorded: int = 0
    source: str = ""
    catches: bool = False
