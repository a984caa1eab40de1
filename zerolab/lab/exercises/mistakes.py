"""Mistakes are data: an answer that is wrong, what a learner is told, and how it differs, which is computed.

A lesson's room has its mistakes in mistakes.py, and their signatures in signatures.json, which
`python -m zerolab.lab.exercises.signatures` writes. A signature is the set of marks that an answer leaves in a battery
(differences.py). An answer is told the sentence of the mistake whose signature is nearest.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files

NEAR = 0.72  # the least likeness at which a mistake is told
OWN = 0.1  # what a mark that no known mistake has counts: it is more often an answer's own way than its mistake


@dataclass(frozen=True)
class Mistake:
    """source: a whole answer. says: what a learner who wrote this is told: what is wrong, and why it matters."""

    source: str
    says: str

    def __post_init__(self) -> None:
        if self.says != self.says.strip():
            raise ValueError(f"a learner reads this alone, and it is a part of a sentence: {self.says!r}")


def edit(source: str, *changes: str) -> str:
    """`source` with the first text of `changes` replaced by the second, the third by the fourth, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if old not in source:
            raise ValueError(f"{old!r} is not in the source that is to be changed")
        source = source.replace(old, new)
    return source


def mistakes_of(id: str) -> dict[str, Mistake]:
    """The known mistakes in exercise `id`, by name."""
    return import_module(f"zerolab.lab.lessons.lesson{id[:2]}.mistakes").MISTAKES[id]


@cache
def signatures_of(id: str) -> dict[str, frozenset[str]]:
    """The marks of each known mistake in exercise `id`."""
    file = files(f"zerolab.lab.lessons.lesson{id[:2]}") / "signatures.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    return {name: frozenset(marks.split()) for name, marks in kept.get(id, {}).items()}


def nearest(id: str, marks: Iterable[str], without: str = "") -> Mistake | None:
    """The known mistake whose signature is most like `marks`, if one is near. `without`: one that does not count."""
    known, found = signatures_of(id), set(marks)
    often = Counter(mark for signature in known.values() for mark in signature)

    def weight(some: Iterable[str]) -> float:  # what few mistakes share says more
        most = math.log(1.0 + len(known))
        return sum(math.log(1.0 + len(known) / often[mark]) if often[mark] else OWN * most for mark in some)

    likeness = {
        name: weight(signature & found) / (weight(signature | found) or 1.0)
        for name, signature in known.items()
        if name != without
    }
    if not likeness or max(likeness.values()) < NEAR:
        return None
    return mistakes_of(id).get(max(likeness, key=likeness.__getitem__))
