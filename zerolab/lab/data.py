"""The name under which older copies of lessons import `zerolab.tasks.data`."""

from zerolab.tasks.data import *  # noqa: F403
