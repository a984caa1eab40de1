"""The name under which lessons copied before this release import `zerolab.lab.ranks.calls`."""

from zerolab.lab.ranks.calls import calls

__all__ = ["calls"]
