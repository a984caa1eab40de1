"""What one thing costs against what it buys: a labelled dot for each way of doing it."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, plain
from zerolab.measure.units import in_bytes


def tradeoff(
    points: Mapping[str, tuple[float, float]],
    title: str,
    subtitle: str,
    axes_say: tuple[str, str],
    sentence: str,
    marked: str = "",
    in_bytes_per_step: bool = False,
) -> tuple[Figure, str]:
    """`points[name]` = (x, y), each with its name. A dashed rule runs through the y of the point `marked`.

    in_bytes_per_step: x counts bytes, on a logarithmic axis.
    """
    if not points:
        raise ValueError("no points to draw")
    figure = frame(title, subtitle, sentence, (9.0, 5.2))
    axes = figure.add_axes((0.09, 0.27, 0.87, 0.55))
    plain(axes, grid="both")
    values = [y for _, y in points.values()]
    low, high = min(values), max(values)
    room = 0.12 * (high - low or 1)
    if marked:
        axes.axhline(points[marked][1], color=INK, linewidth=1, linestyle="--")
    taken: list[tuple[float, float]] = []
    widest = max(x for x, _ in points.values())
    if in_bytes_per_step:
        axes.set_xscale("log")
        axes.set_xlim(min(x for x, _ in points.values()) / 1.6, widest * 2.4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: in_bytes(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(-0.06 * widest, 1.2 * widest)
    axes.set_ylim(low - 1.6 * room, high + 1.6 * room)
    ordered = sorted(points.items(), key=lambda item: (item[1][1], item[1][0]))
    for name, (x, y) in ordered:
        look: Look = {"color": INK if name == marked else COLOURS["communication"], "markersize": 8}
        axes.plot([x], [y], "s" if name == marked else "o", linestyle="", zorder=3, **look)
        across, up = axes.transLimits.transform(axes.transScale.transform((x, y)))
        shift = 0.0
        while any(abs(across - other) < 0.24 and abs(up + shift - at) < 0.06 for other, at in taken):
            shift += 0.015
        taken.append((across, up + shift))
        box: Look = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
        place: Look = {"xytext": (9, shift * 0.55 * 5.2 * 72), "textcoords": "offset points"}
        axes.annotate(name, (x, y), va="center", fontsize=9.5, color=INK, bbox=box, zorder=4, **place)
    axes.set_xlabel(axes_say[0], color=GREY)
    axes.set_ylabel(axes_say[1], color=GREY)
    return figure, sentence
