"""The instruments: bytes held, bytes sent, when each happened, and the formulas to compare them with.

Each of these watches a block of code on one rank:

    with ledger(zero) as book: ...                  # traffic.py: every collective, its bytes and its time
    with timeline(zero, optimizer) as line: ...     # allocations.py: every allocation and release
    with trace(zero, optimizer) as record: ...      # spans.py: what was computed while collectives were under way
    with peak(zero, optimizer) as p: ...            # peak_memory.py: the most bytes in use, from the allocator

`model_states` (states.py) and `holdings` (extents.py) look at this moment. `state_bytes` and its neighbours
(formulas.py) say what it should be, `plan` (planning.py) does so for a run that has not begun, and `simulate`
(simulation.py) runs one rank of a cluster that does not exist. `predicted_step` and `knee` (overlap.py) say how long a
step takes on a link. paper.py has the ZeRO paper's own numbers.
"""

from zerolab.measure.allocations import KINDS, Timeline, timeline
from zerolab.measure.extents import Holdings, holdings
from zerolab.measure.formulas import (
    ADAM_BYTES,
    CATEGORIES,
    activation_bytes,
    between_bytes,
    bytes_per_parameter,
    host_state_bytes,
    moved_bytes,
    owner_moved_bytes,
    paper_state_bytes,
    state_bytes,
)
from zerolab.measure.overlap import Phase, knee, phases_of, predicted_step
from zerolab.measure.peak_memory import Peak, peak, peak_of
from zerolab.measure.planning import in_parameters, plan
from zerolab.measure.simulation import Simulation, simulate
from zerolab.measure.spans import Trace, trace
from zerolab.measure.states import model_states
from zerolab.measure.traffic import Ledger, ledger
from zerolab.measure.watch import watched

__all__ = [
    "ADAM_BYTES",
    "CATEGORIES",
    "Holdings",
    "KINDS",
    "Ledger",
    "Peak",
    "Phase",
    "Simulation",
    "Timeline",
    "Trace",
    "activation_bytes",
    "between_bytes",
    "bytes_per_parameter",
    "holdings",
    "host_state_bytes",
    "in_parameters",
    "knee",
    "ledger",
    "model_states",
    "moved_bytes",
    "owner_moved_bytes",
    "paper_state_bytes",
    "peak",
    "peak_of",
    "phases_of",
    "plan",
    "predicted_step",
    "simulate",
    "state_bytes",
    "timeline",
    "trace",
    "watched",
]
