"""Several results of each kind, as the band from the lowest to the highest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, INK, frame, plain


def bands(
    results: Mapping[str, Sequence[float]], title: str, subtitle: str, x: str, sentence: str, marked: str = ""
) -> tuple[Figure, str]:
    """A row for each name: `results[name]` as dots, joined from the lowest to the highest.

    x: what the axis counts. marked: the row to compare with; its band is shaded through all rows.
    """
    if not results or not all(results.values()):
        raise ValueError("every row needs a result to draw")
    rows = len(results)
    figure = frame(title, subtitle, sentence, (9.0, 2.4 + 0.38 * rows))
    height = figure.get_size_inches()[1]
    axes = figure.add_axes((0.27, 1.35 / height, 0.69, 0.38 * rows / height))
    plain(axes, grid="x")
    if marked:
        axes.axvspan(min(results[marked]), max(results[marked]), color=GREY, alpha=0.15, linewidth=0)
    for row, values in enumerate(results.values()):
        axes.plot([min(values), max(values)], [row, row], color=COLOURS["communication"], linewidth=3, zorder=2)
        axes.plot(values, [row] * len(values), "o", color=INK, markersize=5, linestyle="", zorder=3)
    axes.set_yticks(range(rows), list(results), color=INK)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlabel(x, color=GREY)
    return figure, sentence
