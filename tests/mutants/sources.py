"""Right answers are turned into wrong ones by changing a few words of their source."""

from __future__ import annotations


def edit(source: str, *changes: str) -> str:
    """`source` with the first text of `changes` replaced by the second, the third by the fourth, and so on."""
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        if old not in source:
            raise ValueError(f"{old!r} is not in the source that is to be changed")
        source = source.replace(old, new)
    return source
