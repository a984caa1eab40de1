"""Between the ranks: collectives, what the ranks agree on, what is recorded, and who is missing when one fails.

`collectives.py` is the one to read. It builds on `agreement` (do the ranks go the same way), `waiting`, `record`
(calls, bytes, times), `groups` and `flight` (the flight recorder), each of which imports only those after it.
"""

from zerolab.comm.collectives import Comm, Pending
from zerolab.comm.groups import Group
from zerolab.comm.record import Call
from zerolab.comm.waiting import CommError

__all__ = ["Call", "Comm", "CommError", "Group", "Pending"]
