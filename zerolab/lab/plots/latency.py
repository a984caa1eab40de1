"""What a collective costs: its time at each size, and the line of latency and bandwidth through the points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, INK, frame, plain
from zerolab.measure.units import in_bytes, in_seconds


class Fit(NamedTuple):
    """seconds = latency + bytes / bandwidth."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth


def fit_cost(times: Mapping[int, Sequence[float]]) -> Fit:
    """Fit a line to {bytes: seconds of several runs}: least squares of the relative errors, on each size's median.

    Raises ValueError for fewer than two sizes, or where larger messages did not take longer.
    """
    import numpy as np

    if len(times) < 2:
        raise ValueError(f"a line needs two sizes or more, not {len(times)}")
    sizes = np.array(sorted(times), dtype=float)
    medians = np.array([np.median(times[int(size)]) for size in sizes])
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / medians[:, None]
    (latency, slope), *_ = np.linalg.lstsq(rows, np.ones_like(sizes), rcond=None)
    if slope <= 0:
        raise ValueError("larger messages did not take longer: measure larger sizes, or more runs")
    return Fit(max(float(latency), 0.0), 1 / float(slope))


def cost(times: Mapping[int, Sequence[float]], what: str) -> tuple[Figure, str]:
    """A dot for every run, on logarithmic scales; the fitted line, and where latency and bandwidth cost the same.

    times: {bytes: seconds of several runs}. what: what was timed, such as "all-reduce on 4 ranks".
    """
    fit = fit_cost(times)
    even = fit.latency * fit.bandwidth
    sentence = (
        f"An {what}" if what[0] in "aeiou" else f"A {what}"
    ) + f" takes {in_seconds(fit.latency)}, however small, and another second for every {in_bytes(fit.bandwidth)}; "
    sentence += f"below {in_bytes(even)} most of its time is latency."
    figure = frame("What a collective costs", what, sentence, (9.0, 4.9))
    axes = figure.add_axes((0.09, 0.3, 0.88, 0.52))
    plain(axes, grid="y")
    sizes = sorted(times)
    for size in sizes:
        dots = [1e3 * seconds for seconds in times[size]]
        axes.plot([size] * len(dots), dots, "o", color=COLOURS["communication"], markersize=4, alpha=0.55)
    smooth = [sizes[0] * (sizes[-1] / sizes[0]) ** (k / 60) for k in range(61)]
    axes.plot(smooth, [1e3 * fit.seconds(size) for size in smooth], color=INK, linewidth=1.3)
    axes.plot(smooth, [1e3 * size / fit.bandwidth for size in smooth], color=GREY, linewidth=0.9, linestyle="--")
    axes.axhline(1e3 * fit.latency, color=GREY, linewidth=0.9, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = min(min(runs) for runs in times.values())
    low, high = 5e2 * lowest, 2e3 * max(max(runs) for runs in times.values())
    axes.set_ylim(low, high)
    ticks = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks(sizes, [in_bytes(size) for size in sizes], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor", color=GREY, fontsize=9)
    axes.set_ylabel("milliseconds", color=GREY)
    axes.text(smooth[0], 1e3 * fit.latency, "latency", fontsize=9, color=GREY, va="bottom")
    axes.text(
        smooth[-1], 1e3 * smooth[-1] / fit.bandwidth, "bytes / bandwidth", fontsize=9, color=GREY, ha="right", va="top"
    )
    return figure, sentence
