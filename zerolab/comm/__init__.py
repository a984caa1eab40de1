"""Between the ranks: collectives, what the ranks agree on, what is recorded, and who is missing when one fails.

`collectives.py` is the one to read. It builds on `agreement` (do the ranks go the same way), `waiting`, `recording`
(calls, bytes, times), `groups` and `flight` (the flight recorder), each of which imports only those after it, and on
`native` (NCCL).
"""

from zerolab.comm.collectives import Comm, Pending
from zerolab.comm.groups import Group
from zerolab.comm.recording import Call
from zerolab.comm.waiting import CommError

__all__ = ["Call", "Comm", "CommError", "Group", "Pending"]
