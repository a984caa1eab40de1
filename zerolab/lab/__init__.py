"""What a classroom needs: small models, real text, plots, the demonstration, and live ranks in a notebook.

    %load_ext zerolab.lab
    from zerolab import lab
    lab.start(4)

Not imported by the engine. Names are looked up when they are first used: importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ranks.session": ("Session", "RankFailure", "start", "stop", "reset", "push", "pull", "size", "current"),
    "ranks.network": ("link",),  # lab.link("200 MB/s, 50 us")
    "exercises.learner": ("Todo", "check", "hint", "progress", "mine", "passed", "exchange"),
    "exercises.predictions": ("predict", "predicted", "reveal", "measured", "skip"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext zerolab.lab`: the magics `%%ranks` and, where the exercises are there, `%%exercise`."""
    from zerolab.lab.ranks import magics

    magics.register(shell)
    try:
        exercises = importlib.import_module("zerolab.lab.exercises.learner")
    except ModuleNotFoundError as error:
        if error.name != "zerolab.lab.exercises":
            raise
    else:
        exercises.register(shell)
