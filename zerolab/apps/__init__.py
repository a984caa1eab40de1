"""A file for each command of `zerolab`, and what the commands share."""
