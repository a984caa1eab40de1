"""The name under which lessons copied before this release import `zerolab.tasks.models`."""

from zerolab.tasks.models import *  # noqa: F403
