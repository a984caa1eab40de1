"""A file for each command of `zerolab`."""
