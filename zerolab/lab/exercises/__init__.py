"""The exercises.

    learner        %%exercise, check, hint, mine: what a learner calls
    predictions    predict, reveal, skip
    store          the folder with answers and progress
    judge          runs a check on ranks of its own and words the verdict
    battery        plays an exercise's scenes with the course's answer and the learner's, side by side
    observing      what a scene is, and what is seen of a program in it
    differences    the differences of two programs that went through the same scenes
    mistakes       known mistakes, and which of them an answer is most like
    signatures     tries every known mistake, and stores how it is recognised
    spy            what a check sees of the answer's calls
    exercise       what an exercise is, and what a check gets and raises
    lessons/       the rooms: for each lesson its exercises, and the mistakes that learners make in them
    checks/        for each lesson that has no room yet: checks, stubs, references, hints
    catalogue      the list of all exercises

The mistakes of the lessons in checks/ are in tests/mutants/.
"""

from zerolab.lab.exercises.learner import Todo, check, exchange, hint, mine, passed, progress
from zerolab.lab.exercises.predictions import predict, reveal

__all__ = ["Todo", "check", "exchange", "hint", "mine", "passed", "predict", "progress", "reveal"]
