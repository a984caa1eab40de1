"""What the truth is: bytes held, bytes moved, when, and the formulas that they are compared with."""

from zerolab.measure.formulas import (
    ADAM_BYTES,
    CATEGORIES,
    between_bytes,
    host_state_bytes,
    moved_bytes,
    paper_state_bytes,
    state_bytes,
)
from zerolab.measure.holdings import Holdings, holdings
from zerolab.measure.ledger import Ledger, ledger
from zerolab.measure.peak import Peak, peak, peak_of
from zerolab.measure.simulate import Simulation, simulate
from zerolab.measure.states import model_states
from zerolab.measure.timeline import KINDS, Timeline, timeline
from zerolab.measure.trace import Trace, trace

__all__ = [
    "ADAM_BYTES",
    "CATEGORIES",
    "Holdings",
    "KINDS",
    "Ledger",
    "Peak",
    "Simulation",
    "Timeline",
    "Trace",
    "between_bytes",
    "holdings",
    "host_state_bytes",
    "ledger",
    "model_states",
    "moved_bytes",
    "paper_state_bytes",
    "peak",
    "peak_of",
    "simulate",
    "state_bytes",
    "timeline",
    "trace",
]
