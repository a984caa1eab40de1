"""`%%ranks` runs a cell on every rank, `%%ranks 0,2` on two of them, `%%ranks --timeout 30` for at most 30 seconds.

With `--revive`, a rank that dies is started again while the others go on. It first runs the cells with `--always`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NoReturn

from IPython.display import clear_output

from zerolab.lab.exercises.cards import somebody_watches
from zerolab.lab.ranks import session
from zerolab.lab.ranks.report import Misused, RankFailure, Result, show


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Misused(f"%%ranks: {message}; write %%ranks, %%ranks 0,2 or %%ranks --timeout 30")


def parse(line: str) -> argparse.Namespace:
    """`ranks`: those that the line names (None: all), `timeout` in seconds, `always` and `revive` as in Session.run."""
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="?", type=_numbers)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--revive", action="store_true")
    return parser.parse_args(line.split())


def _numbers(text: str) -> list[int]:
    """`0,2` or `1-3`."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} names no ranks")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


class Watch:
    """Shows each rank's latest line while a cell runs longer than two seconds, and removes them at the end."""

    def __init__(self, first: float = 2.0, every: float = 0.5) -> None:
        self._begin, self._every, self._shown = time.monotonic(), every, ""
        self._next = self._begin + first

    def __call__(self, results: dict[int, Result]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        lines = [f"rank {rank}: {self._state(result)}" for rank, result in results.items()]
        if not any(result.outputs or result.failure or result.seconds for result in results.values()):
            lines = [f"{len(lines)} rank{'s' * (len(lines) > 1)} at work, {time.monotonic() - self._begin:.0f} s"]
        if (text := "\n".join(lines)) != self._shown:
            self._shown = text
            clear_output(wait=True)
            print(text, flush=True)

    def _state(self, result: Result) -> str:
        if result.failure:
            return f"{result.failure.kind}: {result.failure.summary}"
        last = result.text.replace("\r", "").rstrip().rpartition("\n")[2]
        return f"{last[:100]} (done)" if result.seconds is not None else last[:100] or "..."

    def clear(self, more: bool) -> None:
        """more: whether the cell's output follows, and so takes the place of what was shown."""
        if self._shown:
            clear_output(wait=more)


def ranks(line: str, cell: str) -> None:
    options = parse(line)
    live, watch = session.need(), Watch() if somebody_watches() else None
    if not cell.startswith("%%"):
        cell = f"# %%ranks\n{cell}"  # so that lines count as they do in the notebook
    results: dict[int, Result] = {}
    try:
        done = live.run(cell, options.ranks, options.timeout, watch=watch, always=options.always, revive=options.revive)
        results = {result.rank: result for result in done}
    except RankFailure as failure:
        results = failure.results
        raise
    finally:
        if watch is not None:
            watch.clear(more=any(result.outputs for result in results.values()))
        show(results, live.size)


def register(shell: Any) -> None:
    shell.register_magic_function(ranks, "cell", "ranks")
