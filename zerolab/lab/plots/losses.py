"""Curves over the steps of training, such as losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y, color=GREY)
    axes.set_xlim(first, first - 1 + max(len(series) for series in values.values()))
    legend(axes, axes.get_legend_handles_labels()[0], loc="best")
    return figure, sentence


def reproduced(results: Mapping[int, Sequence[Mapping[str, Any]]], subtitle: str, baseline: str) -> tuple[Figure, str]:
    """What `lab.reproduce` returns: the first seed on 1 rank and on most ranks, and as many others as fit beside it.

    baseline: a sentence about what an untrained model reaches.
    """
    one, most = results[1], max(results)
    first, *others = one
    drawn = {f"1 rank, seed {first['seed']}": first["losses"]}
    if most > 1:
        drawn[f"{most} ranks, seed {first['seed']}"] = results[most][0]["losses"]
    drawn |= {f"1 rank, seed {each['seed']}": each["losses"] for each in others[: len(LOOKS) - len(drawn)]}
    many = [found[0]["losses"] for ranks, found in results.items() if ranks > 1]
    apart = [abs(a - b) for losses in many for a, b in zip(losses, first["losses"], strict=True)]
    band = [100 * each["accuracy"] for each in one]
    said = f"Losses on 1 and on {most} ranks differ by {max(apart):.0e} at most. " if many else ""
    said += f"The accuracies of {len(one)} seeds go from {min(band):.1f} to {max(band):.1f} %. {baseline}"
    title = "The same run, on any number of ranks" if many else f"{len(one)} seeds on one rank"
    return curves(drawn, title, subtitle, "loss", said)
