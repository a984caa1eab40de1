"""What the truth is: bytes held, bytes moved and the formulas that they are compared with."""

from zerolab.measure.formulas import ADAM_BYTES, CATEGORIES, moved_bytes, paper_state_bytes, state_bytes
from zerolab.measure.peak import Peak, peak
from zerolab.measure.states import model_states

__all__ = [
    "ADAM_BYTES",
    "CATEGORIES",
    "Peak",
    "model_states",
    "moved_bytes",
    "paper_state_bytes",
    "peak",
    "state_bytes",
]
