"""Curves over the steps of training, such as losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerolab.lab.plots.style import GREY, INK, Look, frame, legend, plain

# Wide and pale first, thin and dark later, so that curves on top of each other can all be seen.
LOOKS: tuple[Look, ...] = (
    {"color": "#56B4E9", "linewidth": 7.0, "alpha": 0.55},
    {"color": INK, "linewidth": 1.5, "linestyle": "--"},
    {"color": "#D55E00", "linewidth": 1.6, "marker": "o", "markersize": 3.5},
    {"color": "#009E73", "linewidth": 1.6, "linestyle": ":"},
)


def curves(
    values: Mapping[str, Sequence[float]], title: str, subtitle: str, y: str, sentence: str = "", first: int = 1
) -> tuple[Figure, str]:
    """Up to four curves `values[name][step]`. sentence: what to see; default: where each curve begins and ends.

    first: the number of the first step.
    """
    if not 1 <= len(values) <= len(LOOKS):
        raise ValueError(f"{len(values)} curves: give 1 to {len(LOOKS)}, as more cannot be told apart")
    ends = [f"{name} from {series[0]:.2f} to {series[-1]:.2f}" for name, series in values.items()]
    sentence = sentence or f"{y.capitalize()}: {'; '.join(ends)}."
    figure = frame(title, subtitle, sentence, (9.0, 4.6))
    axes = figure.add_axes((0.08, 0.3, 0.89, 0.5))
    plain(axes, grid="y")
    for (name, series), look in zip(values.items(), LOOKS):
        axes.plot(range(first, first + len(series)), series, label=name, **look)
    axes.set_xlabel("step", color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.set_xlim(first, first - 1 + max(len(series) for series in values.values()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes, axes.get_legend_handles_labels()[0], loc="upper right")
    return figure, sentence
