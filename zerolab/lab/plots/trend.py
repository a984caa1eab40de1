"""How memory grows with one quantity: what was measured, and the straight line through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, INK, frame, plain, scale_of
from zerolab.measure.units import in_bytes


class Line(NamedTuple):
    """bytes = start + slope * quantity."""

    slope: float
    start: float


def fit_line(points: Mapping[int, float]) -> Line:
    """The line through {quantity: bytes}, by least squares. Raises ValueError for fewer than two points."""
    import numpy as np

    if len(points) < 2:
        raise ValueError(f"a line needs two points or more, not {len(points)}")
    slope, start = np.polyfit(list(points), list(points.values()), 1)
    return Line(float(slope), float(start))


def growth(measured: Mapping[str, Mapping[int, float]], quantity: str, title: str, subtitle: str) -> tuple[Figure, str]:
    """`measured[category][quantity]` in bytes: a dot for each measurement, and a line through each category's dots.

    A category that combines several, such as "parameters and optimizer", has the colour of the first. quantity: what
    the x axis counts, in the plural, such as "tokens".
    """
    lines = {category: fit_line(points) for category, points in measured.items()}
    sentence = " ".join(_said(category, line, quantity) for category, line in lines.items())
    figure = frame(title, subtitle, sentence, (9.0, 4.6))
    axes = figure.add_axes((0.09, 0.3, 0.74, 0.51))
    plain(axes, grid="y")
    highest = max(max(points.values()) for points in measured.values())
    scale = scale_of(highest)
    most = max(max(points) for points in measured.values())
    for (category, points), marker in zip(measured.items(), "osD^"):
        colour, line = COLOURS[category.split()[0]], lines[category]
        ends = [line.start / scale.bytes, (line.start + line.slope * most) / scale.bytes]
        axes.plot([0, most], ends, color=colour, linewidth=1.5, zorder=2)
        values = [value / scale.bytes for value in points.values()]
        axes.plot(list(points), values, marker, color=colour, markeredgecolor=INK, markersize=7, zorder=3)
        axes.annotate(
            category.replace(" and ", "\nand "),
            (most, ends[1]),
            (10, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_xlim(0, 1.02 * most)
    axes.set_ylim(0, 1.1 * highest / scale.bytes)
    axes.set_xticks(sorted({size for points in measured.values() for size in points}))
    axes.set_xlabel(quantity, color=GREY)
    axes.set_ylabel(scale.name, color=GREY)
    return figure, sentence


def _said(category: str, line: Line, quantity: str) -> str:
    start = in_bytes(max(line.start, 0.0))
    if abs(line.slope) < 1:
        return f"{category.capitalize()}: {start}, however many {quantity}."
    singular = quantity.removesuffix("s")
    plus = f", plus {start}" if line.start >= 1 else ""
    return f"{category.capitalize()}: {in_bytes(line.slope)} per {singular}{plus}."
