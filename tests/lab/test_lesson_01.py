"""Lesson 01 asks the kernel what a collective writes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from zerolab.lab.lessons.lesson01 import bytes_written


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts")
def test_what_a_process_writes_is_counted(tmp_path: Path) -> None:
    before = bytes_written._counted()
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    after = bytes_written._counted()
    assert before is not None and after is not None and 1_000_000 <= after - before < 1_100_000


@pytest.mark.parametrize("error", [AttributeError(), NotImplementedError(), FileNotFoundError(), psutil.AccessDenied()])
def test_where_nobody_counts_it_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refused(process: psutil.Process) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", refused, raising=False)
    assert bytes_written._counted() is None
