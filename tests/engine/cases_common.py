"""The cases of `zerolab trial`, in float32 and bit for bit, and errors as text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zerolab.trial.adapters import Ours
from zerolab.trial.numbers import Numbers, build, train


def sharded(case: Numbers, stage: int, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    """On ranks, with zerolab. `alone` of zerolab.trial.numbers is the one process."""
    engine = Ours(stage)
    engine.wrap(build(case), case.units, case.optimizer, **case.asked(), **options)
    losses = []
    for step in range(case.steps):
        losses += train(engine, case, range(step, step + 1), options.get("group"))
        if stage == 3:  # nothing stays gathered
            assert not any(unit.full.untyped_storage().size() for unit in engine.zero.units)
    return engine.full_state(), losses


def attempt(function: Any) -> str:
    """The error that `function` ends with: class and message."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
