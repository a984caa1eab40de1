"""The exercises.

    learner        %%exercise, check, hint, mine: what a learner calls
    predictions    predict, reveal, skip
    store          the folder with answers and progress
    judge          runs a check on ranks of its own and words the verdict
    spy            what a check sees of the answer's calls
    exercise       what an exercise is, and what a check gets and raises
    checks/        for each lesson: checks, stubs, references, hints
    catalogue      the list of all exercises

The mistakes that the checks must name are in tests/mutants/.
"""

from zerolab.lab.exercises.learner import Todo, check, exchange, hint, mine, passed, progress
from zerolab.lab.exercises.predictions import predict, reveal

__all__ = ["Todo", "check", "exchange", "hint", "mine", "passed", "predict", "progress", "reveal"]
