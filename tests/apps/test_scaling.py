"""What the engine itself costs, and the bytes that go with ranks. (Other times are the machine's: nothing is asked.)"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from jobs_common import worlds

import zerolab
from zerolab.apps import scaling

pytestmark = pytest.mark.slow


@contextmanager
def calls_for_seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the clock shows how many functions this process has called, so nothing else on the machine counts."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with monkeypatch.context() as patched:
        patched.setattr(scaling, "time", SimpleNamespace(process_time=lambda: float(calls)))
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)


CALLS = {"forward": 300, "backward": 260}  # of Python and torch, for one unit: some 40 to 90 microseconds


@pytest.mark.parametrize("stage", worlds(3, others=[0]))
def test_a_unit_costs_the_same_however_many_there_are(stage, monkeypatch):
    """Linear: what is done for each unit once for each unit would double from the first ratio to the second."""
    with calls_for_seconds(monkeypatch):
        cost = scaling.engine_cost("link", stage, rounds=2)
    assert all(0 < cost["per_unit"][part] < most for part, most in CALLS.items()), cost
    assert cost["collectives"][-1] > cost["collectives"][0] > 0
    assert all(0.9 < ratio < 1.1 for ratio in cost["linear"].values()), cost
    assert not dist.is_initialized()


@pytest.mark.exhaustive
def test_quadratic_cost_would_be_seen(monkeypatch):
    """A unit that looks at every unit in its forward."""
    pre_forward = zerolab.DDP.pre_forward

    def slow(self, unit):
        for other in self.units:
            for _ in range(30):
                repr(other.name)
        pre_forward(self, unit)

    monkeypatch.setattr(zerolab.DDP, "pre_forward", slow)
    with calls_for_seconds(monkeypatch):
        assert scaling.engine_cost("link", 0, rounds=2)["linear"]["forward"] > 2


@pytest.mark.exhaustive
def test_bytes_on_ranks_are_as_simulated_and_the_rest_is_drawn(lent, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "UNITS", (1, 4))
    monkeypatch.setattr(scaling, "WIDTHS", (32, 64))
    monkeypatch.setattr(scaling, "ROUNDS", 2)
    report = json.loads(json.dumps(scaling.measure(ranks=(1, 2), big=(2, 64), counts=(2, 4, 6))))
    assert scaling.problems_of(report) == []
    elements = 8 * (256 * 256 + 256)
    sent = {(row["stage"], row["ranks"]): row["sent"] for row in report["ranks"]}
    assert all(sent[stage, 1] == 0 for stage in scaling.STAGES)
    assert [sent[stage, 2] for stage in scaling.STAGES] == [4 * elements] * 3 + [6 * elements]  # 2Ψ/2 and 3Ψ/2 elements
    assert {row["units"] for row in report["units"]} == {1, 4} and {row["stage"] for row in report["units"]} == {
        0,
        1,
        2,
        3,
    }
    assert all(row["seconds"] > 0 and row["floor"] > 0 for row in report["units"] + report["parameters"])

    from zerolab.lab.plots import scaling as draw

    figure, sentence = draw(report)
    figure.savefig(tmp_path / "scaling.png")
    assert "64 ranks, each sends" in sentence and len(figure.axes) == 4

    report["ranks"][-1]["sent"] += 4
    (problem,) = scaling.problems_of(report)
    assert "stage 3, 2 ranks" in problem


@pytest.mark.exhaustive
def test_the_host_does_less_than_for_fsdp2():
    """CPU time of one process, in turn. It is 0.16 to 0.21 where nothing else runs; half leaves room for a busy one."""
    cost = scaling.host_cost(rounds=12)
    together = {name: sum(seconds.values()) for name, seconds in cost.items()}
    assert list(together) == [scaling.PLAIN, *(f"stage {stage}" for stage in scaling.STAGES), scaling.FSDP2]
    for stage in scaling.STAGES:
        assert 0 < together[f"stage {stage}"] < 0.5 * together[scaling.FSDP2], cost
    assert scaling.host_table({"host": cost}).row_count == 6
    assert not dist.is_initialized()


def test_a_process_group_is_refused():
    with scaling.fake_ranks(2):
        with pytest.raises(RuntimeError, match="without a process group"):
            with scaling.fake_ranks(2):
                pass
