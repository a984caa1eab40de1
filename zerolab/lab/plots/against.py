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
    """`points[name]` = (x, y), each with its name above it, or below where the name would meet the rule.

    marked: the name of the point to compare with. It stands below, and a dashed rule runs through its y.
    in_bytes_per_step: x counts bytes, on a logarithmic axis.
    """
    if not points:
        raise ValueError("no points to draw")
    figure = frame(title, subtitle, sentence, (9.0, 5.2))
    axes = figure.add_axes((0.09, 0.27, 0.87, 0.55))
    plain(axes, grid="y")
    values = [y for _, y in points.values()]
    low, high = min(values), max(values)
    room = 0.12 * (high - low or 1)
    if marked:
        axes.axhline(points[marked][1], color=INK, linewidth=1, linestyle="--")
    widest = max(x for x, _ in points.values())
    if in_bytes_per_step:
        axes.set_xscale("log")
        axes.set_xlim(min(x for x, _ in points.values()) / 1.6, widest * 2.4)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: in_bytes(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(-0.14 * widest, 1.14 * widest)
    axes.set_ylim(low - 1.6 * room, high + 2.2 * room)
    rule = axes.transLimits.transform(axes.transScale.transform((widest, points[marked][1])))[1] if marked else -1.0
    clusters: list[tuple[float, list[float], list[str]]] = []  # names of dots in one place share a label
    for name, (x, y) in sorted(points.items(), key=lambda point: -point[1][1]):  # the names as the dots, from above
        look: Look = {"color": INK if name == marked else COLOURS["communication"], "markersize": 8}
        axes.plot([x], [y], "s" if name == marked else "o", linestyle="", zorder=3, **look)
        across, up = axes.transLimits.transform(axes.transScale.transform((x, y)))
        place: Look = {"ha": "center", "fontsize": 9.5, "color": INK, "textcoords": "offset points", "zorder": 4}
        if name == marked:
            axes.annotate(name, (x, y), (0, -9), va="top", **place)
            continue
        near = [of for of in clusters if abs(of[0] - across) < 0.03 and abs(of[1][0] - up) < 0.05]
        if near:
            near[0][1].append(up)
            near[0][2].append(name)
        else:
            clusters.append((across, [up], [name]))
    for across, ups, names in clusters:
        spot: Look = {"xycoords": "axes fraction", **place}
        if max(ups) < rule < max(ups) + 0.04 + 0.06 * len(names):
            axes.annotate("\n".join(names), (across, min(ups)), (0, -7), va="top", **spot)
        else:
            axes.annotate("\n".join(names), (across, max(ups)), (0, 7), va="bottom", **spot)
    axes.set_xlabel(axes_say[0], color=GREY)
    axes.set_ylabel(axes_say[1], color=GREY)
    return figure, sentence
