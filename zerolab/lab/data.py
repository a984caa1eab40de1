"""The name under which lessons copied before this release import `zerolab.tasks.data`."""

from zerolab.tasks.data import *  # noqa: F403
