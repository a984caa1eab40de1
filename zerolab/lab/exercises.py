from zerolab.lab.checks import Todo  # noqa: F401
