"""The exercises.

learner        %%exercise, check, hint, mine: what a learner calls
predictions    predict, reveal, skip
on_trial       trial: a learner's stage, or another engine, in cases of `zerolab trial`
store          the folder with answers and progress
judge          tries an answer on ranks of its own and words the verdict
battery        plays an exercise's scenes with the course's answer and the learner's, side by side
observing      what a scene is, and what is seen of a program in it
differences    the differences of two programs that went through the same scenes
mistakes       known mistakes, and which of them an answer is most like
signatures     tries every known mistake, and stores how it is recognised
stages         the scenes of exercises whose answer is a stage of the engine
training       what is looked at where the answer is a training script
values         what wrong values are made of
alive          what a program keeps in memory
spy            what is seen of an answer's calls
exercise       what an exercise is, and the rank on which an answer is tried
catalogue      the list of all exercises, which are in the lessons' rooms: zerolab/lab/lessons/
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Todo", "check", "exchange", "hint", "mine", "passed", "predict", "progress", "reveal"]


def __getattr__(name: str) -> Any:  # not before it is used: the list of exercises imports the rooms, which import this
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "predictions" if name in ("predict", "reveal") else "learner"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
