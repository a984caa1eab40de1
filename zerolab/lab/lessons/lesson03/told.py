"""The picture of lesson 03's calls."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.calls import Cost, call_costs


def calls_beside_link(sent: float, times: Sequence[float]) -> tuple[Figure, str]:
    """29 calls and 1 that send the same bytes, over 4 ranks: what the lesson's link takes, and the seconds measured."""
    transfer, latency = sent / 200e6, 2 * 3 * 0.001
    costs = {"29 calls": Cost(29 * latency, transfer, times[0]), "1 call": Cost(latency, transfer, times[1])}
    title, subtitle = "The same bytes in 29 calls and in one", "Averaging the gradients of the GPT on 4 ranks"
    return call_costs(costs, title, subtitle)
