"""Bytes and seconds the way people read and write them, and tables of them.

Bytes are decimal: 1 kB is 1,000 bytes, as in the paper and on the label of a memory module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

PREFIXES = ("", "k", "M", "G", "T", "P")


def in_bytes(count: float) -> str:
    """Three digits and a unit: 999 B, 1.23 kB, 45.6 MB."""
    return _scaled(count, 1000, [f"{prefix}B" for prefix in PREFIXES])


def in_seconds(seconds: float | None) -> str:
    """Three digits and a unit: 12.3 µs, 4.56 ms; "-" for None."""
    return "-" if seconds is None else _scaled(seconds * 1e6, 1000, ["µs", "ms", "s"])


def _scaled(value: float, base: int, names: list[str]) -> str:
    for name in names:
        digits = 0 if name == "B" else max(0, 2 - int(math.log10(value))) if value >= 1 else 2
        text = f"{value:.{digits}f}"
        if float(text) < base or name == names[-1]:
            return f"{text} {name}"
        value /= base
    raise AssertionError("the loop always returns at the last name")


def read_bytes(text: str) -> float:
    """The number of bytes in "80GB", "512 MB", "24 GiB" or "1e9". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(?:([kmgtp]?)(i?)b?)\s*", text, re.IGNORECASE)
    problem = f"{text!r} is not a number of bytes; write 80GB, 512MB or 24GiB"
    if match is None:
        raise ValueError(problem)
    try:
        number = float(match[1])
    except ValueError:
        raise ValueError(problem) from None
    power = ["", "k", "m", "g", "t", "p"].index(match[2].lower())
    return number * (1024 if match[3] else 1000) ** power


def table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table for rich, for narrow terminals: columns for `words`, then for `numbers`, aligned right."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in words:
        result.add_column(name, no_wrap=True)
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    return result
