"""An engine on trial in a notebook: a learner's own stage, or another one, in cases of `zerolab trial`."""

from __future__ import annotations

import contextlib
import io
import textwrap

import zerolab
from zerolab.engine.engine import Engine
from zerolab.lab.exercises.learner import Misused, mine
from zerolab.trial.adapters import Ours
from zerolab.trial.cases import CASES
from zerolab.trial.hearing import HOLDS, Refused, find, hear

RANKS = 2
WIDTH = 92


class Mine(Ours):
    """A stage of zerolab with the learner's passed answers in it."""

    number = 0

    def __init__(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # `trial` has said whose code it is
            super().__init__(self.number, mine(zerolab.STAGES[self.number]))


DDP, Zero1, Zero2, Zero3 = (type(kind.__name__, (Mine,), {"number": kind.stage}) for kind in zerolab.STAGES)


def trial(engine: type[Engine] | str, *names: str) -> None:
    """Put `engine` through these cases of `zerolab trial`, on two ranks of their own, and print a line for each.

    engine: a stage, with your passed answers in it, or the name of an engine that `zerolab trial` knows.
    Raises Misused if there is no such case or engine, or no exercise is about the stage.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise Misused(f"lab.trial() knows no case {unknown[0]!r}; zerolab trial --list shows them all")
    if isinstance(engine, str):
        try:
            find(engine)
        except Refused as why:
            raise Misused(f"lab.trial(): {why}") from None
    else:
        mine(engine)
        engine = f"{__file__}:{engine.__name__}"
    kept = 0
    for verdict in hear(engine, RANKS, names):
        holds = verdict.verdict == HOLDS
        kept += holds
        told = f"{'✓' if holds else '✗'} {verdict.case}: {CASES[verdict.case].promise}"
        print(textwrap.fill(told, WIDTH, subsequent_indent="  "))
        if not holds:
            seen = f"{verdict.verdict}: {verdict.what}" + (f" ({verdict.otherwise})" if verdict.otherwise else "")
            print(textwrap.indent(textwrap.fill(seen, WIDTH - 2), "  "))
    print(f"{kept} of {len(names)} promises kept, on {RANKS} ranks")
