"""Right answers are turned into wrong ones by changing a few words of their source."""

from zerolab.lab.exercises.mistakes import edit

__all__ = ["edit"]
