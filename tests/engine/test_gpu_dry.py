"""What test_gpu.py does on GPUs, without any: that its functions run, and say so if the numbers differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import strict
import test_gpu


def dry(folder: str) -> None:
    with strict.world(late=1):
        test_gpu.ways(test_gpu.ON_CPU, meshes=True, stages=(3,))
        test_gpu.saved_and_loaded(test_gpu.ON_CPU, folder, fused=True)
        test_gpu.owned(test_gpu.ON_CPU)


@pytest.mark.exhaustive
def test_a_dry_run_on_the_strict_backend(ranks, tmp_path: Path):
    ranks.run(dry, str(tmp_path / "checkpoint"), ranks=2)


def other_way() -> str:
    with strict.world(patience=0.05):
        return test_gpu.another_route(test_gpu.ON_CPU)


def test_a_dry_run_of_another_route(ranks):
    for message in ranks.run(other_way, ranks=2):
        assert "experts." in message and "rank " in message, message
