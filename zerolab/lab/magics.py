"""`%%ranks`: a cell on every rank. `%%ranks 0,2`: on two of them. `%%ranks --timeout 30`: for at most 30 seconds."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from zerolab.lab import session


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"%%ranks: {message}; write %%ranks, %%ranks 0,2 or %%ranks --timeout 30")


def parse(line: str) -> tuple[list[int] | None, float | None]:
    """The ranks that a line names (None: all), and the seconds that it allows."""
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="?", type=_numbers)
    parser.add_argument("--timeout", type=float)
    options = parser.parse_args(line.split())
    return options.ranks, options.timeout


def _numbers(text: str) -> list[int]:
    """`0,2` or `1-3`."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} names no ranks")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def ranks(line: str, cell: str) -> None:
    chosen, timeout = parse(line)
    session.need().run(cell, chosen, timeout, show=True)


def register(shell: Any) -> None:
    shell.register_magic_function(ranks, "cell", "ranks")
