"""Tries every known mistake of some lessons, and stores by which marks it is known.

python -m zerolab.lab.exercises.signatures          # of all lessons
python -m zerolab.lab.exercises.signatures 01 02
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

from zerolab.lab.exercises import judge, lessons
from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.mistakes import mistakes_of

ROOMS = Path(lessons.__file__).parent


def build_signatures(numbers: list[str]) -> None:
    """Write the signatures.json of the lessons with these numbers, "01"; of all that have a battery if it is empty."""
    asked = [id for id, exercise in EXERCISES.items() if exercise.battery and (not numbers or id[:2] in numbers)]
    work = [(id, name) for id in asked for name in mistakes_of(id)]
    found: dict[str, dict[str, dict[str, str]]] = {}
    for id, name in tqdm(work, "mistakes", leave=False, disable=None):
        verdict = judge.try_answer(id, mistakes_of(id)[name].source, told=False)
        if verdict.passed:
            raise SystemExit(f"{id} {name}: this answer passes, so it is no mistake")
        found.setdefault(id[:2], {}).setdefault(id, {})[name] = " ".join(sorted(verdict.marks))
    for number, signatures in found.items():
        text = json.dumps(signatures, indent=1, ensure_ascii=False) + "\n"
        (ROOMS / f"lesson{number}" / "signatures.json").write_text(text)
    judge.close()


if __name__ == "__main__":
    build_signatures(sys.argv[1:])
