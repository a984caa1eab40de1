"""The name under which older copies of lessons import `calls` (zerolab.lab.ranks.counting)."""

from zerolab.lab.ranks.counting import calls

__all__ = ["calls"]
