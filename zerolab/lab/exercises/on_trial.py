"""A learner's own stage on trial: cases of `zerolab trial` in a notebook."""

from __future__ import annotations

import contextlib
import io
import textwrap

import zerolab
from zerolab.engine.engine import Engine
from zerolab.lab.exercises.learner import Misused, mine
from zerolab.trial.adapters import Ours
from zerolab.trial.cases import CASES
from zerolab.trial.hearing import HOLDS, hear

RANKS = 2
WIDTH = 92


class Mine(Ours):
    """A stage of zerolab with the learner's passed answers in it."""

    number = 0

    def __init__(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # `trial` has said whose code it is
            super().__init__(self.number, mine(zerolab.STAGES[self.number]))


DDP, Zero1, Zero2, Zero3 = (type(kind.__name__, (Mine,), {"number": kind.stage}) for kind in zerolab.STAGES)


def trial(stage: type[Engine], *names: str) -> None:
    """Put `stage`, with your passed answers in it, through these cases of `zerolab trial`, on two ranks of their own.

    Prints a line for each. Raises Misused if there is no such case, or no exercise is about the stage.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise Misused(f"lab.trial() knows no case {unknown[0]!r}; zerolab trial --list shows them all")
    mine(stage)
    kept = 0
    for verdict in hear(f"{__file__}:{stage.__name__}", RANKS, names):
        holds = verdict.verdict == HOLDS
        kept += holds
        told = f"{'✓' if holds else '✗'} {verdict.case}: {CASES[verdict.case].promise}"
        print(textwrap.fill(told, WIDTH, subsequent_indent="  "))
        if not holds:
            print(textwrap.indent(textwrap.fill(f"{verdict.verdict}: {verdict.what}", WIDTH - 2), "  "))
    print(f"{kept} of {len(names)} promises kept, on {RANKS} ranks")
