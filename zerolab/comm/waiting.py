"""Waiting in short turns: Ctrl-C gets through, and so does the news that another rank went a different way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerolab.world.environment import given_up

POLL = timedelta(seconds=1)  # how often a wait asks whether another rank has a complaint

Complaint = Callable[[], str | None]  # why this wait will never end, if another rank has said so


class CommError(RuntimeError):
    """A collective failed, or the ranks disagree. The message names the rank, the operation and the unit."""


def wait_for(work: Any, complaint: Complaint | None = None) -> str | None:
    """Wait until `work` finishes and return None, or until there is a complaint and return it.

    Re-raises the error of `work` (RuntimeError), which may be the timeout of its group.
    """
    question: _Question | None = None
    while not finished_within(POLL, work):
        if complaint is not None and (question is None or question.over):
            question = _Question(complaint)
        if question is not None and (reason := question.reason()):
            given_up.set()
            return reason
    return None


def finished_within(turn: timedelta, work: Any) -> bool:
    """Wait at most `turn`; return whether `work` finished; re-raise its error."""
    try:
        work.wait(turn)
        return True
    except RuntimeError:  # it failed, or the turn is over
        if not work.is_completed():
            return False
    work.wait()  # returns at once: it failed, or it finished just after the turn
    return True


class _Question:
    """Asks for a complaint in a thread, so that only the thread hangs if the store's host cannot be reached."""

    def __init__(self, complaint: Complaint) -> None:
        self._complaint = complaint
        self._reason: str | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with suppress(dist.DistError):  # without a store nobody can complain; the group's timeout ends the wait
            self._reason = self._complaint()

    def reason(self) -> str | None:
        self._thread.join(POLL.total_seconds())
        return self._reason

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()
