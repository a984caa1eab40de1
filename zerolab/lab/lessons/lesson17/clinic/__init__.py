"""Broken runs for lesson 17: each is run on the live ranks, and shows what an engineer would see, and no more.

    lab.admit(3)          run patient 3 and print the evidence
    lab.uncover(3)        its code, once there is a diagnosis: lab.predict("17.3", ...)

The patients are in stops, numbers, memory, recorded and reported, so that nobody reads a diagnosis by accident.
"""

from __future__ import annotations

import importlib
import inspect
import re
import signal
import textwrap
from typing import Any

import torch.distributed as dist

from zerolab.lab.lessons.lesson17.clinic.patient import Patient
from zerolab.lab.ranks.report import Misused, RankFailure

_WARDS = ("stops", "numbers", "memory", "recorded", "reported")
_ENDED = re.compile(r"^(rank \d+) was killed by (SIG[A-Z]+).*$")
_TRACE = re.compile(r'^ *(File ".*|.*\.py.* line \d+.*|line \d+ of .*)$')


def patients() -> dict[int, Patient]:
    """All of them, by number."""
    wards = [importlib.import_module(f"{__name__}.{ward}") for ward in _WARDS]
    return {patient.number: patient for ward in wards for patient in ward.PATIENTS}


def _find(number: int) -> Patient:
    known = patients()
    if number not in known:
        raise Misused(f"there is no patient {number!r}; there are {min(known)} to {max(known)}")
    return known[number]


def admit(number: int) -> list[Any] | None:
    """Run a patient, on the live ranks unless it is recorded, and print the evidence and the diagnoses to choose from.

    Returns what each rank measured, for a picture. Afterwards the ranks are ready for the next patient.
    """
    from zerolab.lab.ranks import session
    from zerolab.lab.ranks.report import show

    patient = _find(number)
    print(f"PATIENT {number}. {patient.complaint}\n")
    if patient.recorded:
        from zerolab.lab.lessons.lesson17.clinic.recorded import analysis, dumps_of

        print(analysis(dumps_of(patient)))
        return _ask(patient)
    live, results, found = session.need(), {}, None
    try:
        code = f"from {__name__} import examine as _examine; _seen = _examine({number}, rank, world_size)"
        results = {result.rank: result for result in live.run(code, timeout=60.0)}
    except RankFailure as failure:
        if not patient.reset:
            raise
        results = failure.results
        show(results, live.size)
        print(_without_code(str(failure), finished=not patient.catches))
    else:
        show(results, live.size)
        found = live.pull("_seen")
    if patient.reset:
        print()
        session.reset()
    return _ask(patient, found)


def _ask(patient: Patient, found: list[Any] | None = None) -> list[Any] | None:
    """Print the diagnoses."""
    from zerolab.lab.exercises.predictions import measured

    print("\nWhich is it, and why?")
    for letter, diagnosis in patient.choices.items():
        print(textwrap.fill(f"  {letter}  {diagnosis}", 100, subsequent_indent="     "))
    measured(f"17.{patient.number}", patient.answer)
    return found


def examine(number: int, rank: int, world_size: int) -> Any:
    """On a rank: run the patient. An error ends it as it would end a script, without the lines of its code."""
    patient = _find(number)
    try:
        return patient.examine(rank, world_size)
    except Exception as error:
        raise type(error)(str(error)) from None
    finally:
        if not patient.reset and dist.is_initialized():
            dist.barrier()


def uncover(number: int) -> None:
    """Show a patient's code and what to learn from it, if the diagnosis is written down or skipped."""
    from zerolab.lab.exercises.predictions import predicted

    patient = _find(number)
    if predicted(f"17.{number}"):
        print("\n\n".join(inspect.getsource(part).rstrip() for part in patient.script))
        print(f"\n{textwrap.fill(patient.story, 100)}")
        if patient.source:
            print(f"\nRebuilt from {patient.source}")
    else:
        print(f'The code is shown once you have a diagnosis: lab.predict("17.{number}", ...)')


def _without_code(text: str, finished: bool = True) -> str:
    """A failure's message without the places in the code, which would tell the diagnosis.

    A rank that a signal ended is told as torchrun tells it: by its exit code. finished: whether to keep who finished.
    """
    lines = text.splitlines()
    kept, skip = [], False
    for line in lines:
        if _TRACE.match(line):
            skip = True
            continue
        if skip and line.startswith("    "):
            continue
        skip = False
        if ended := _ENDED.match(line):
            line = f"{ended[1]}: no output, exit code {-signal.Signals[ended[2]]}"
        if not line.startswith("lab.reset()") and (finished or not line.endswith(": finished the cell")):
            kept.append(line)
    return "\n".join(kept)
