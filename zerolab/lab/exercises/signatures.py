"""Tries every known mistake of some lessons, and stores by which marks it is known.

python -m zerolab.lab.exercises.signatures          # of all lessons
python -m zerolab.lab.exercises.signatures 01 02.1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

from zerolab.lab import lessons
from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.mistakes import mistakes_of

ROOMS = Path(lessons.__file__).parent


def build_signatures(asked: list[str]) -> None:
    """Write the signatures of these lessons ("01") or exercises ("01.2"); of all if it is empty."""
    ids = [id for id in EXERCISES if not asked or {id, id[:2]} & {*asked}]
    work = [(id, name) for id in ids for name in mistakes_of(id)]
    found: dict[str, dict[str, str]] = {id: {} for id in ids}
    passed = []
    for id, name in tqdm(work, "mistakes", leave=False, disable=None):
        verdict = judge.try_answer(id, mistakes_of(id)[name].source, told=False)
        if verdict.passed:
            passed.append(f"{id} {name}")
        found[id][name] = " ".join(sorted(verdict.marks))
        if len(found[id]) == len(mistakes_of(id)):
            _store(id, found[id])
    judge.close()
    if passed:
        raise SystemExit(f"these answers pass, so they are no mistakes: {', '.join(passed)}")


def _store(id: str, signatures: dict[str, str]) -> None:
    file = ROOMS / f"lesson{id[:2]}" / "signatures.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept = {other: kept[other] for other in kept if other in EXERCISES} | {id: signatures}
    file.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    build_signatures(sys.argv[1:])
