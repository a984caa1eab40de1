"""Many small messages against few large ones: the time that a link should take, and the time that it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zerolab.lab.plots.style import COLOURS, GREY, INK, PALE, Look, frame, legend, plain
from zerolab.measure.units import in_seconds


class Cost(NamedTuple):
    """Seconds: by the link's numbers, `latency` for all messages and `transfer` for all bytes; and as `measured`."""

    latency: float
    transfer: float
    measured: float


def call_costs(costs: Mapping[str, Cost], title: str, subtitle: str) -> tuple[Figure, str]:
    """A bar for each way to send the same bytes: latency, then transfer. A diamond marks the measurement."""
    if not costs:
        raise ValueError("no costs to draw")
    said = [
        f"{name.replace(chr(10), ' ')}: {in_seconds(cost.measured)}; by the link's numbers, "
        f"{in_seconds(cost.latency)} latency and {in_seconds(cost.transfer)} transfer"
        for name, cost in costs.items()
    ]
    sentence = ". ".join(said) + "."
    height = 2.4 + 0.62 * len(costs)
    figure = frame(title, subtitle, sentence, (9.0, height))
    axes = figure.add_axes((0.2, 1.25 / height, 0.75, (height - 2.35) / height))
    plain(axes, grid="x")
    for row, cost in enumerate(costs.values()):
        latency, transfer, measured = (1000 * seconds for seconds in cost)
        axes.barh(row, latency, 0.5, color=PALE, edgecolor=GREY, linewidth=0.6, zorder=2)
        look: Look = {"color": COLOURS["communication"], "edgecolor": "white", "hatch": "--", "linewidth": 0.4}
        axes.barh(row, transfer, 0.5, latency, zorder=2, **look)
        axes.plot(measured, row, "D", color=INK, markersize=7, zorder=4)
    axes.set_ylim(len(costs) - 0.45, -0.55)
    axes.set_yticks(range(len(costs)), list(costs), fontsize=10)
    axes.set_xlim(0, 1.06 * max(1000 * max(cost.measured, cost.latency + cost.transfer) for cost in costs.values()))
    axes.set_xlabel("milliseconds", color=GREY)
    handles = [
        Patch(facecolor=PALE, edgecolor=GREY, label="latency: messages × time of one"),
        Patch(facecolor=COLOURS["communication"], hatch="--", edgecolor="white", label="transfer: bytes / bandwidth"),
        Line2D([], [], linestyle="", marker="D", color=INK, label="measured"),
    ]
    place = {"loc": "upper center", "bbox_to_anchor": (0.55, 1 - 0.85 / height), "ncols": 3}
    legend(figure, handles, borderpad=0.0, columnspacing=1.2, fontsize=9.5, **place)
    return figure, sentence
