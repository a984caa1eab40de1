"""Puts a data-parallel engine on trial: are its numbers those of one process, and its bytes those of the formula?

    zerolab trial fsdp2 --ranks 2

case.py says what an engine must offer (`Adapter`) and what a case is; adapters.py has the engines that are known;
cases.py lists the cases; hearing.py runs them on real ranks.
"""

from zerolab.trial.case import FEATURES, Adapter, Broken, Case, Unsupported

__all__ = ["FEATURES", "Adapter", "Broken", "Case", "Unsupported"]
