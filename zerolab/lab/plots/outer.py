"""Where local steps take two parameters on each rank, and where the outer step takes all of them from there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, frame, legend, many, plain

Point = tuple[float, float]


def rounds(panels: Mapping[str, Sequence[Sequence[Sequence[Point]]]], subtitle: str) -> tuple[Figure, str]:
    """A panel for each way to make the outer step: `panels[name][rank][round]` are points, the last round has one.

    The best place for the mean of all losses is the origin. A panel alone is drawn larger, without it.
    """
    if not panels:
        raise ValueError("no panels to draw")
    sentence = _sentence(panels)
    figure = frame("Rounds of local steps", subtitle, sentence, (9.0, 5.6))
    alone = len(panels) == 1
    points = [point for walks in panels.values() for walk in walks for of_round in walk for point in of_round]
    across, along = ([*values, *[0.0] * (not alone)] for values in zip(*points))
    for number, (name, walks) in enumerate(panels.items()):
        axes = figure.add_axes((0.05, 0.18, 0.9, 0.6) if alone else (0.03 + 0.32 * number, 0.2, 0.3, 0.54))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_aspect("equal", adjustable="box")
        axes.set_xlim(min(across) - 0.3, max(across) + 0.3 + 1.6 * (not alone))
        axes.set_ylim(min(along) - 0.3, max(along) + 0.3)
        _panel(axes, walks, alone)
        if not alone:
            axes.set_title(name, fontsize=10.5, color=INK)
    look: Look = {"linestyle": "", "color": INK}
    handles = [
        Line2D([], [], color=COLOURS["parameters"], linewidth=1.5, label="local steps of a rank"),
        Line2D([], [], marker="o", markerfacecolor="white", **look, label="mean of the ranks"),
        Line2D(
            [], [], marker="s", color=COLOURS["communication"], linewidth=2, label="outer step, from which all go on"
        ),
        Line2D([], [], marker="+", markersize=11, **look, label="best place"),
    ][: 3 if alone else 4]
    legend(figure, handles, loc="upper left", bbox_to_anchor=(0.025, 0.845), ncols=4, borderpad=0.0, columnspacing=1.1)
    return figure, sentence


def _panel(axes: Any, walks: Sequence[Sequence[Sequence[Point]]], alone: bool) -> None:
    """alone: so large that each round has a label, and the best place is far outside."""
    olds = _olds(walks)
    for walk in walks:
        for of_round in walk[:-1]:
            axes.plot(*zip(*of_round), "-", color=COLOURS["parameters"], linewidth=1.2, marker=".", markersize=3)
    for number in range(len(olds) - 1):
        ends = [walk[number][-1] for walk in walks]
        mean = tuple(sum(values) / len(ends) for values in zip(*ends))
        axes.plot(*[[value] for value in mean], "o", color=INK, markerfacecolor="white", markersize=6, zorder=4)
    axes.plot(*zip(*olds), "-s", color=COLOURS["communication"], linewidth=2, markersize=4.5, zorder=3)
    if not alone:
        axes.plot([0], [0], "+", color=INK, markersize=13, markeredgewidth=1.8, zorder=5)
    for number in range(len(olds)) if alone else (0, len(olds) - 1):
        say = f"after {many(number, 'round')}" if number else "start"
        away = (10, -3) if alone or not number else (10, 5)
        white: Look = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        place: Look = {"textcoords": "offset points", "fontsize": 9.5, "color": GREY, "va": "top", "zorder": 4}
        axes.annotate(say, olds[number], away, bbox=white, **place)


def _olds(walks: Sequence[Sequence[Sequence[Point]]]) -> list[Point]:
    """Where the rounds begin, the same for all ranks, and where the last one ends."""
    return [of_round[0] for of_round in walks[0]]


def _sentence(panels: Mapping[str, Sequence[Sequence[Sequence[Point]]]]) -> str:
    if len(panels) == 1:
        (walks,) = panels.values()
        moved = [(x - before_x, y - before_y) for (before_x, before_y), (x, y) in pairwise(_olds(walks))]
        turns = [math.degrees(math.atan2(y, x)) for x, y in moved]
        lengths = ", ".join(f"{math.hypot(*move):.2f}" for move in moved)
        return f"The outer steps are {lengths} long, and point at {', '.join(f'{turn:.0f}°' for turn in turns)}."
    said = []
    for name, walks in panels.items():
        away = [math.hypot(x, y) for x, y in _olds(walks)]
        nearest = min(range(len(away)), key=away.__getitem__)
        text = f"{name}: {away[-1]:.2f} from the best place after {many(len(away) - 1, 'round')}"
        if nearest < len(away) - 1:
            text += f", and {away[nearest]:.2f} after {nearest}"
        said.append(text)
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."
