"""Ports for what a test starts."""

import itertools
import os
import socket

# Below those that the system hands out, so that nobody gets one between the look and the use.
_ports = itertools.count(20_000 + os.getpid() * 50 % 12_000)


def free_ports(count: int) -> list[int]:
    """Of this machine. None is given twice."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := next(_ports)))
            except OSError:
                continue
        found.append(port)
    return found
