"""The name under which older copies of lessons import `zerolab.tasks.models`."""

from zerolab.tasks.models import *  # noqa: F403
