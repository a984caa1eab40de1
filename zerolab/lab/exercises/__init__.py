"""The exercises: the learner's side, the judge, and a file of checks for each lesson."""

from zerolab.lab.exercises.learner import Todo, check, exchange, hint, mine, passed, progress
from zerolab.lab.exercises.predictions import predict, reveal

__all__ = ["Todo", "check", "exchange", "hint", "mine", "passed", "predict", "progress", "reveal"]
