"""The ranks that the tests run on: real processes with a real process group, started once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zerolab

sys.path.insert(0, str(Path(__file__).parent))  # so that the ranks can import the functions of the tests


@pytest.fixture(scope="session")
def ranks() -> Iterator[zerolab.Ranks]:
    """`ranks.run(function, *args, ranks=n)`: the function's results on the first n of four ranks, one thread each."""
    with zerolab.Ranks(4, threads=1) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
